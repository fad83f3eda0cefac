"""Ask before code of a run directory runs that this user did not start: its settings name files,
commands and modules.

A command calls `confirm_run` for a run that it continues or reads, `confirm_file` for a recipe or
an environment that may lie in one; both list what would run (`code_named_by`), and `confirm` asks.
`turnwright.records.own_runs` knows the runs that this user started. docs/security.md has the rest.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwright.errors import UsageError

if TYPE_CHECKING:
    from turnwright.config.schema import RunConfig

MAX_NAMED = 8
"""Most settings that a question names."""
_RUN_FILES = ("journal.jsonl", "trajectories.jsonl", "metrics.jsonl")
_FILE = re.compile(r"\.py(?!\w)")
_MODULE_OBJECT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add the option that answers the question."""
    help = (
        "run the code that the run's settings name, though you did not start the run on this "
        "machine"
    )
    parser.add_argument("--trust", action="store_true", help=help)


def confirm_run(
    run: Path, config: RunConfig, args: argparse.Namespace, only: Collection[str] = ()
) -> None:
    """Ask before the code that a run's settings name is run; raise `UsageError` if it must not be.

    Nothing is asked with `--trust`, of settings that name no code, and of this user's own runs
    whose code is outside the run directory. `only` has the settings that are used, if not all are.
    """
    code = [(key, text) for key, text in code_named_by(config) if not only or key in only]
    if not code:
        return

    inside = any(is_in(run, text) for _, text in code)
    confirm(run, [f"{key} = {text}" for key, text in code], args, inside=inside)


def confirm_file(file: Path, config: RunConfig | None, args: argparse.Namespace) -> None:
    """Ask before a recipe or an environment in a run directory is used.

    Without a configuration the file itself is the code.
    """
    run = next((folder for folder in file.absolute().parents if is_run(folder)), None)
    if run is None:
        return

    if config is None:
        named = [str(file)]
    else:
        named = [f"{key} = {text}" for key, text in code_named_by(config)]
    if named:
        confirm(run, named, args, inside=True)


def is_run(folder: Path) -> bool:
    """Return whether a directory is one that a run wrote, or poses as one."""
    has_config = (folder / "config.json").is_file()
    return has_config and any((folder / name).is_file() for name in _RUN_FILES)


def confirm(run: Path, named: list[str], args: argparse.Namespace, *, inside: bool) -> None:
    """Ask whether what is named may run, unless the run is this user's and the code is not `inside`
    of it.

    Raises `UsageError` if the answer is no, or if nobody can be asked.
    """
    from turnwright.display.text import single_line
    from turnwright.records.own_runs import is_own_run

    if args.trust:
        return
    is_own = is_own_run(run)
    if is_own and not inside:
        return

    why = "has code in its directory" if is_own else "was not started by you on this machine"
    shown = named[:MAX_NAMED]
    more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""

    # The question is written to stderr and read from stdin: both have to be a terminal.
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        listed = single_line("; ".join(shown) + more, 600)
        raise UsageError(
            f"{run} {why}, and this command would run what it names: {listed}; read it, then add "
            "--trust"
        )

    print(
        f"{single_line(str(run))} {why}. `turnwright {args.command}` would run what it names:",
        file=sys.stderr,
    )
    for text in shown:
        print(f"  {single_line(text, 300)}", file=sys.stderr)
    print(f"Run it with your permissions?{more} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError(f"{run}: not run; --trust answers the question")


def code_named_by(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the settings that name code to run, as (key, value): files, objects of modules,
    commands, engines to start.

    Environments that are not built in may run anything that their arguments say.
    """
    from turnwright.config.recipe import flatten
    from turnwright.envs.builtin import BUILTIN

    foreign = [f"env.{number}." for number, env in enumerate(config.env) if env.use not in BUILTIN]
    for key, value in flatten(config):
        is_of_foreign_env = any(
            key == f"{prefix}use" or key.startswith(f"{prefix}args.") for prefix in foreign
        )
        # What is installed there is started as a server.
        names_code = is_of_foreign_env or key == "engine.install_dir"
        for text in _texts(value):
            if text and (names_code or _is_code(text)):
                yield key, text


def _is_code(text: str) -> bool:
    return _FILE.search(text) is not None or _MODULE_OBJECT.fullmatch(text) is not None


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a value, keys of tables included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in (*value.keys(), *value.values()):
            yield from _texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)


def is_in(run: Path, text: str) -> bool:
    """Return whether a path, or the file of an object, is in a directory."""
    file = Path(text.partition(":")[0]).expanduser()
    try:
        return file.resolve().is_relative_to(run.resolve())
    except (OSError, ValueError, RuntimeError):
        # What cannot be told apart from code in the directory is asked about.
        return True
