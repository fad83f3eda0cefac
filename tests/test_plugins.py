"""What packages add: a stranger's package adds a thing of each kind; without one of ours, what it
had says what is missing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from turnwright import plugins
from turnwright.display.reports import reports_of
from turnwright.envs.foreign import adapt_group_filter
from turnwright.errors import ConfigError

SRC = Path(plugins.__file__).parents[1]
STRANGER = '''
import argparse
import json
from pathlib import Path

import turnwright as tw
from turnwright.cli.options import Command, add_command
from turnwright.engines.local import LocalEngine
from turnwright.envs.builtin.hop import Hop
from turnwright.envs.foreign import Framework
from turnwright.renderers.parsers import PARSERS

Maze = Hop


def greet(args):
    print("hello from a stranger")
    return 0


def add_greet(subparsers):
    add_command(subparsers, "greet", "greet", greet)


def report(run, renew):
    (run / "greeting.txt").write_text("hello")
    return run / "greeting.txt"


GREET = Command(add_greet, report=report)


class Counting(LocalEngine):
    calls = 0

    async def generate(self, request):
        Counting.calls += 1
        return await super().generate(request)


def make_engine(config, model, renderer):
    Path("engine.txt").write_text(config.engine.kind)
    return Counting(model, renderer=renderer)


class Loud:
    """The parser of another format, and a file that tells of its use."""

    name = "loud"

    def __getattr__(self, name):
        Path("parser.txt").write_text(name)
        return getattr(PARSERS["hermes"], name)


LOUD = Loud()


class Tracker:
    def start(self, run, project, name, config):
        self.file = (run / "track" / "strange.jsonl").open("a")

    def log(self, phase, step, figures):
        self.file.write(json.dumps([phase, step, len(figures)]) + "\\n")

    def finish(self):
        self.file.close()


class Board:
    """An environment of another framework."""

    moves = ["left", "right"]


def adapt(found):
    if isinstance(found.target, Board):
        return Hop
    return None


FRAMEWORK = Framework("boards", adapt, find=lambda id: Board() if id == "first" else None, ids=lambda: ["first"])
'''  # noqa: E501
POINTS = """
[turnwright.environments]
maze = stranger:Maze

[turnwright.commands]
greet = stranger:GREET

[turnwright.engines]
counting = stranger:make_engine

[turnwright.parsers]
loud = stranger:LOUD

[turnwright.trackers]
strange = stranger:Tracker

[turnwright.frameworks]
boards = stranger:FRAMEWORK
"""
TINY = """
out = "run"

[model]
hidden = 32
layers = 1
parser = "loud"

[engine]
kind = "counting"

[[env]]
use = "USE"

[warmup]
demos = 40
steps = 2
rounds = 1
gate_success = 0.0
gate_tasks = 4

[rollout]
groups = 2
group_size = 2

[train]
steps = 1

[eval]
tasks = 2

[track]
to = ["strange"]
"""


# One part of it raises when it is imported, the others when they are used.
TROUBLE = """
from turnwright.cli.options import Command
from turnwright.envs.foreign import Framework
from turnwright.errors import ConfigError


def report(run, renew):
    if renew:
        raise ConfigError("no room for the report")
    return run / "theirs.txt"


def group_filter(function):
    if function is print:
        raise ConfigError("print is no filter")


REPORTS = Command(lambda subparsers: None, report=report)
FILTERS = Framework("filters", lambda found: None, group_filter=group_filter)


def __getattr__(name):
    raise {"LEAVES": SystemExit}.get(name, RuntimeError)("a part is missing")
"""
TROUBLE_POINTS = """
[turnwright.commands]
a_broken = trouble:COMMAND
b_leaves = trouble:LEAVES
reports = trouble:REPORTS

[turnwright.frameworks]
a_broken = trouble:FRAMEWORK
b_leaves = trouble:LEAVES
filters = trouble:FILTERS
"""


def install(folder: Path, name: str, code: str, points: str) -> Path:
    """Write a package of one module and its metadata to a folder, as pip installs
    it; return the folder."""
    (folder / f"{name}.py").write_text(code)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)
    return folder


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    return install(tmp_path, "stranger", STRANGER, POINTS)


@pytest.fixture
def _trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(install(tmp_path, "trouble", TROUBLE, TROUBLE_POINTS))
    plugins.installed.cache_clear()
    yield
    plugins.installed.cache_clear()


def turnwright(folder: Path, *words: str, src: Path = SRC) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": f"{src}{os.pathsep}{folder}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "turnwright", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_a_stranger_adds_a_command(stranger):
    assert turnwright(stranger, "greet").stdout == "hello from a stranger\n"
    assert "greet" in turnwright(stranger, "--help").stdout


@pytest.mark.parametrize("use", ["maze", "boards:first"])
def test_a_stranger_adds_an_environment_an_engine_a_parser_a_tracker_and_a_framework(stranger, use):
    (stranger / "recipe.toml").write_text(TINY.replace("USE", use))
    done = turnwright(stranger, "train", "recipe.toml", "--display", "none")
    assert done.returncode == 0, done.stderr
    assert (stranger / "engine.txt").read_text() == "counting"
    assert (stranger / "parser.txt").exists()
    assert f"report     {Path('run', 'greeting.txt')}" in done.stdout
    rows = [
        json.loads(line)
        for line in (stranger / "run" / "track" / "strange.jsonl").read_text().splitlines()
    ]
    assert {phase for phase, _, _ in rows} >= {"warmup", "train"}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("train", "recipe.toml", "--env.use", "maz"), "no such environment; did you mean 'maze'?"),
        (("train", "recipe.toml", "--env.use", "boards:second"), "boards has no 'second'"),
        (
            ("train", "recipe.toml", "--engine.kind", "elsewhere"),
            "--engine.kind elsewhere: there are local, auto,",
        ),
        (("train", "recipe.toml", "--track.to", '["strang"]'), "track.to"),
        (("gret",), "did you mean `turnwright greet`?"),
    ],
)
def test_a_wrong_name_is_told_in_one_line(stranger, words, error):
    (stranger / "recipe.toml").write_text(TINY.replace("USE", "maze"))
    done = turnwright(stranger, *words)
    assert done.returncode == 2
    assert error in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.usefixtures("_trouble")
@pytest.mark.parametrize("kind", ["commands", "frameworks"])
def test_what_cannot_be_imported_is_left_out_and_told_to_who_names_it(kind):
    assert len(list(plugins.importable(kind))) == len(plugins.installed(kind)) - 2
    for name in ("a_broken", "b_leaves"):
        with pytest.raises(
            ConfigError, match=rf"'{name}' of trouble:\w+ cannot be imported \(a part is missing\)"
        ):
            plugins.load(kind, name)


@pytest.mark.usefixtures("_trouble")
def test_errors_of_what_is_used_are_told(tmp_path):
    """They are not those of a package that cannot be imported."""
    assert tmp_path / "theirs.txt" in reports_of(tmp_path, renew=False)
    with pytest.raises(ConfigError, match="no room for the report"):
        reports_of(tmp_path, renew=True)
    assert adapt_group_filter(len) is None
    with pytest.raises(ConfigError, match="print is no filter"):
        adapt_group_filter(print)


@pytest.fixture(scope="module")
def core(tmp_path_factory) -> Path:
    """The source tree without the packages beside the core."""
    folder = tmp_path_factory.mktemp("core")
    shutil.copytree(
        SRC / "turnwright", folder / "turnwright", ignore=shutil.ignore_patterns("__pycache__")
    )
    return folder


# The packages that are installed for the tests are hidden, as an editable installation
# finds them without a path.
HIDE = "import sys; [sys.modules.__setitem__(name, None) for name in {packages!r}]; "


def core_alone(core: Path, code: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(core), "OMP_NUM_THREADS": "1"}
    program = HIDE.format(packages=plugins.PACKAGES) + code
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=core,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("command", "package"), sorted(plugins.OURS["commands"].items()))
def test_without_a_package_its_commands_say_what_is_missing(core, command, package):
    done = core_alone(
        core, f"from turnwright.cli.main import main; sys.exit(main([{command!r}, 'x']))"
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        f"turnwright: error: the command {command!r} is part of {package}, which is not in this "
        "installation; install all of turnwright again\n"
    )


@pytest.mark.parametrize(
    ("kind", "name", "package"),
    [
        (kind, name, package)
        for kind in ("frameworks", "trackers", "transports")
        for name, package in plugins.OURS[kind].items()
    ],
)
def test_without_a_package_its_recipe_values_say_what_is_missing(core, kind, name, package):
    values = {
        "frameworks": [f"--env.use={name}" if name == "program" else f"--env.use={name}:x"],
        "trackers": ["--env.use=hop", f'--track.to=["{name}"]'],
    }
    if kind == "transports":
        done = core_alone(core, f"from turnwright import plugins; plugins.load({kind!r}, {name!r})")
        assert (
            f"the transport {name!r} is part of {package}, which is not in this installation"
            in done.stderr
        )
        return
    words = ["train", *values[kind], "--train.steps=1", "--warmup.demos=0", "--display=none"]
    done = core_alone(core, f"from turnwright.cli.main import main; sys.exit(main({words!r}))")
    assert f"{kind.removesuffix('s')} {name!r} is part of {package}" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_names_that_moved_say_where_they_are(core):
    done = core_alone(core, "import turnwright as tw; tw.program")
    assert (
        done.stderr.splitlines()[-1]
        == "AttributeError: turnwright.program is turnwright_serve.program"
    )


def test_nothing_of_the_core_imports_the_packages_beside_it():
    for file in (SRC / "turnwright").rglob("*.py"):
        for package in plugins.PACKAGES:
            text = file.read_text(encoding="utf-8")
            assert f"import {package}" not in text, file
            assert f"from {package}" not in text, file
