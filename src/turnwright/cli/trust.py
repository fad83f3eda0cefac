"""Ask before code of a run directory runs that this user did not start: its settings name files,
commands and modules."""

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
    named = [(key, text) for key, text in code_named_by(config) if not only or key in only]
    inside = any(is_in(run, text) for _, text in named)
    if named:
        confirm(run, [f"{key} = {text}" for key, text in named], args, inside=inside)


def confirm_file(file: Path, config: RunConfig | None, args: argparse.Namespace) -> None:
    """Ask before a recipe or an environment in a run directory is used."""
    run = next((folder for folder in file.absolute().parents if is_run(folder)), None)
    if run is None:
        return
    named = (
        [str(file)]
        if config is None
        else [f"{key} = {text}" for key, text in code_named_by(config)]
    )
    if named:
        confirm(run, named, args, inside=True)


def is_run(folder: Path) -> bool:
    """Return whether a directory is one that a run wrote, or poses as one."""
    return (folder / "config.json").is_file() and any(
        (folder / name).is_file() for name in _RUN_FILES
    )


def confirm(run: Path, named: list[str], args: argparse.Namespace, *, inside: bool) -> None:
    """Ask whether what is named may run, unless the run is this user's and the code
    is not `inside` of it."""
    from turnwright.display.text import single_line
    from turnwright.records.own_runs import is_own_run

    if args.trust or (is_own_run(run) and not inside):
        return
    why = (
        "has code in its directory" if is_own_run(run) else "was not started by you on this machine"
    )
    more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
    listed = single_line("; ".join(named[:MAX_NAMED]) + more, 600)
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(
            f"{run} {why}, and this command would run what it names: {listed}; read it, then add "
            "--trust"
        )
    print(
        f"{single_line(str(run))} {why}. `turnwright {args.command}` would run what it names:",
        file=sys.stderr,
    )
    for text in named[:MAX_NAMED]:
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

    foreign = {f"env.{number}." for number, env in enumerate(config.env) if env.use not in BUILTIN}
    for key, value in flatten(config):
        of_foreign = any(
            key == f"{prefix}use" or key.startswith(f"{prefix}args.") for prefix in foreign
        )
        for text in _texts(value):
            if text and (of_foreign or key == "engine.install_dir" or _is_code(text)):
                yield key, text


def _is_code(text: str) -> bool:
    return _FILE.search(text) is not None or _MODULE_OBJECT.fullmatch(text) is not None


def _texts(value: Any) -> Iterator[str]:
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
        return True
