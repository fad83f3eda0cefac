"""For every test: the kit and the benchmarks can be imported, what is drawn is the same in each
run, and torch has one thread.

One thread is what `model.threads` is by default, what equal bits are promised for, and what keeps
two test processes on two cores from slowing each other tenfold.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import zlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

from turnwright import plugins

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

# Runs of the tests are listed apart from those of whoever runs them.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="turnwright-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# So are the viewer's indexes of runs; what others keep in the user's cache stays where it is.
_CACHE = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
os.environ.setdefault("PLAYWRIGHT_BROWSERS_PATH", os.path.join(_CACHE, "ms-playwright"))
os.environ.setdefault("PIP_CACHE_DIR", os.path.join(_CACHE, "pip"))
os.environ.setdefault("HF_HOME", os.path.join(_CACHE, "huggingface"))
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="turnwright-cache-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# What a shell starts in the background ignores Ctrl-C; tests of it send the signal all the same, to
# this process and to others.
signal.signal(signal.SIGINT, signal.default_int_handler)


# No deadline per example: a machine that is busy with other things is no failure. pytest-timeout
# bounds whole tests. One commit has one set of examples, so that it passes always or never;
# ARGS=--hypothesis-profile=explore draws others.
settings.register_profile("turnwright", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("turnwright")


LONG = (
    "run/test_kill_resume.py",
    "training/test_train_ranks.py",
    "run/test_quant_run.py",
    "renderers/test_template_bounds.py",
    "envs/test_mcp.py",
    "rollouts/test_rollout_process.py",
    "engines_local/test_bits.py",
    "run/test_outage.py",
    "run/test_ranks_run.py",
    "run/test_real_models.py",
    "proxy/test_matching.py",
    "run/test_schedule.py",
    "records/test_trace_resume.py",
    "envs/test_exploits.py",
    "renderers/test_guard.py",
)
"""Files that take longest.

They come first: a worker that begins one last keeps the others waiting.
"""


FORKED = (
    "run/test_kill_resume.py",
    "run/test_quant_run.py",
    "run/test_ranks_run.py",
    "run/test_schedule.py",
)
FORKED += (
    "training/test_train_models.py",
    "training/test_train_ranks.py",
    "training/test_train_trainer.py",
)
SERVED = ("engines_remote/test_remote_groups.py", "engines_remote/test_remote_serve.py")
SERVED += ("engines_remote/test_remote_serve_media.py", "scale/")
GUARDED = ("renderers/test_guard.py", "renderers/test_guard_kinds.py")
CORPUS = (
    "renderers/test_contract.py",
    "renderers/test_compose.py",
    "renderers/test_template_mask.py",
)
CORPUS += (
    "renderers/test_template_parity.py",
    "rollouts/test_history.py",
    "invariants/test_inv_templates.py",
)
TOGETHER = {
    f"tests/{name}": group[0] for group in (FORKED, SERVED, GUARDED, CORPUS) for name in group
}
"""Beginnings of the names of files that one worker plays, since they share what takes seconds
to make: a process with torch imported that others are forked from, tokenizers of every kind,
the templates in use."""


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Give each worker files, as `--dist loadfile` does, and some of them together."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return next((group for name, group in TOGETHER.items() if file.startswith(name)), file)

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, since tests also wait: for processes, sockets, disks and
    deadlines. Each worker imports all tests, which takes it ten seconds of CPU."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {Path(__file__).parent / name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path, len(LONG)))
    for item in items:
        # Single tests that use a package beside the core, by a command or a value of a recipe.
        for package in (
            f"turnwright_{name}" for mark in item.iter_markers("beside") for name in mark.args
        ):
            if package in MISSING:
                item.add_marker(pytest.mark.skip(reason=f"needs {package}"))


HANGS = 2.0
"""Times its time limit after which a test counts as one that hangs."""


STDERR = pytest.StashKey()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.fdopen(os.dup(2), "w")  # the real one, which no test captures


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item):
    """End the process of a test that hangs where its time limit does not reach it, and
    print where each thread is.

    The limit is a signal, which waits for the main thread to run Python code, and which a test may
    switch off. Such a test would keep the others, and whoever waits for them, for hours.
    """
    limit = item.config.getvalue("timeout") or item.config.getini("timeout") or 300
    faulthandler.dump_traceback_later(
        HANGS * float(limit), exit=True, file=item.config.stash[STDERR]
    )
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    faulthandler.dump_traceback_later(300, exit=True, file=session.config.stash[STDERR])


def pytest_unconfigure() -> None:
    faulthandler.cancel_dump_traceback_later()


gc.disable()  # until everything is imported, which leaves next to nothing to collect


def pytest_collection_finish() -> None:
    """Exempt imported modules from garbage collection, which scans those of torch and transformers
    for a second each time."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_files():
    """Tests look at what is left among temporary files, so that neither other runs nor other
    workers may put theirs there."""
    with (
        tempfile.TemporaryDirectory(prefix="turnwright-tests-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        Path(folder).chmod(0o755)  # sandboxed code runs as another user
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(autouse=True)
def _one_thread_and_draws_of_its_own(request):
    """Whatever ran before it in its process: which files a worker is given
    differs from run to run."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    torch = sys.modules.get("torch")  # never loaded for this: most tests need none
    if torch is None:
        return
    torch.manual_seed(seed)
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


# Without the packages beside the core, the tests of the core remain (`make test-core`).
MISSING = [package for package in plugins.PACKAGES if find_spec(package) is None]
TESTS = Path(__file__).parent
BESIDE_THE_CORE = ("agents", "browser", "compat", "convert", "docs", "proxy", "scale", "viewer")
"""Folders of tests of those packages, or of all of them."""


@cache
def needs_missing(path: Path) -> bool:
    """Whether a test or a kit names a package that is missing, or imports a kit that does."""
    text = path.read_text(encoding="utf-8")
    if (
        any(package in text for package in MISSING)
        or path.relative_to(TESTS).parts[0] in BESIDE_THE_CORE
    ):
        return True
    named = set(re.findall(r"^\s*from kit\.(\w+) import", text, re.MULTILINE))
    named |= set(re.findall(r"^\s*from kit import (\w+)", text, re.MULTILINE))
    return any(needs_missing(TESTS / "kit" / f"{name}.py") for name in named)


def pytest_ignore_collect(collection_path):
    if MISSING and collection_path.suffix == ".py" and collection_path.name != "conftest.py":
        return True if needs_missing(collection_path) else None
    return None
