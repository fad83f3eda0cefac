"""Options shared by several commands: recipe and overrides, display, and small formatting
helpers."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwright.errors import UsageError
from turnwright.shutdown import STOP_SIGNALS, StopSignals

if TYPE_CHECKING:
    from turnwright.config import ResolvedConfig
    from turnwright.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the command line, as packages add it (`turnwright.plugins`)."""

    add: Callable[[Any], None]
    """Registers its parser with argparse's subparsers, by `add_command`."""
    report: Callable[[Path, bool], Path] | None = None
    """Writes a file about a run that ended, and returns its path; where there is one, only if told
    to renew it."""


DISPLAYS = ("auto", "rich", "plain", "none")
LOG_LEVELS = ("debug", "info", "warning", "error", "off")
OVERRIDES = (
    "Any key of the recipe can be overridden: --section.key VALUE (--train.lr 1e-4, "
    "--env.args.depth 3)."
)


def import_training(module: str = "turnwright.training.run") -> None:
    """Import what needs torch.

    A signal ends the process at once: raised inside these imports, it would abort the process or
    appear as another error. Without garbage collection, which finds nothing there, they take 3.2 s
    of CPU instead of 4.1.
    """
    replaced_handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *STOP_SIGNALS)}
        for number, handler in handlers.items():
            if handler is signal.default_int_handler or isinstance(handler, StopSignals):
                replaced_handlers[number] = signal.signal(number, _leave)

    collects = gc.isenabled()
    is_new = module not in sys.modules
    if is_new:
        gc.collect()  # so that nothing else is frozen
    gc.disable()
    try:
        importlib.import_module(module)
    finally:
        if is_new:
            gc.freeze()  # what was imported stays
        if collects:
            gc.enable()
        for number, handler in replaced_handlers.items():
            signal.signal(number, handler)


def _leave(number: int, frame: object) -> None:
    """End the process at a signal, without the steps of a shutdown."""
    os.write(2, b"turnwright: error: interrupted\n")
    os._exit(128 + number)


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP end the body alike, so that it cleans up, and go on after
    it."""
    with StopSignals().installed(), suppress(KeyboardInterrupt):
        yield


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split words into options of the command and overrides (`--section.key value`, recognized by
    the dot).

    Example::

        >>> split_overrides(["recipe.toml", "--out", "runs/a", "--train.lr", "1e-4"])
        (['recipe.toml', '--out', 'runs/a'], ['--train.lr', '1e-4'])
    """
    options: list[str] = []
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*options, word, *rest], overrides
        name, equals, _ = word.partition("=")
        if not name.startswith("--") or "." not in name:
            options.append(word)
            continue
        overrides.append(word)
        if not equals and rest and not rest[0].startswith("--"):
            overrides.append(rest.pop(0))
    return options, overrides


def add_command(
    subparsers: Any, name: str, help: str, run: Any, *, overrides: bool = False, epilog: str = ""
) -> argparse.ArgumentParser:
    """Register a command: its parser, its function, and whether it accepts overrides."""
    if overrides:
        epilog = f"{epilog}\n{OVERRIDES}" if epilog else OVERRIDES
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=help,
        description=help,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, takes_overrides=overrides)
    return parser


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the recipe, its two keys without a section, and the options that print settings."""
    parser.add_argument("recipe", nargs="?", type=Path, help="a TOML recipe")
    parser.add_argument("--seed", help="override the recipe's seed")
    parser.add_argument(
        "--keys",
        action="store_true",
        help="list every recipe key with its default and help, and exit",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print every setting and its origin, make each environment once, and exit",
    )


def add_display(parser: argparse.ArgumentParser, quiet: str = "show no progress") -> None:
    """Add the choice of progress display; `quiet` says what `--quiet` leaves out."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--display",
        choices=DISPLAYS,
        default="auto",
        help="auto is rich on a terminal, plain lines elsewhere",
    )
    group.add_argument("--quiet", action="store_true", help=quiet)


def display_of(args: argparse.Namespace) -> str:
    """Return the display that the arguments ask for."""
    return "none" if args.quiet else str(args.display)


def requested(
    args: argparse.Namespace, read: Callable[[argparse.Namespace], ResolvedConfig]
) -> ResolvedConfig | None:
    """Read the settings; print what `--keys` or `--dry-run` asks for instead, and return None."""
    from turnwright.config.dump import help_keys, placement, to_toml

    if args.keys:
        print("\n".join(help_keys()))
        return None
    resolved = read(args)
    if args.dry_run:
        print(to_toml(resolved), end="")
        print("\n# where it would run")
        print("\n".join(f"# {line}" for line in placement(resolved.config)), flush=True)
        make_environments(resolved.config)
        return None
    return resolved


def make_environments(config: RunConfig) -> list[str]:
    """Resolve each environment of a recipe and make it once; return their names.

    Raises `ConfigError` for one that cannot be made, in one line.
    """
    from turnwright.envs.check import check_first_row
    from turnwright.envs.resolve import resolve_env

    names = []
    for env in config.env:
        spec = resolve_env(env, play=config.rollout.function)
        check_first_row(spec)
        names.append(spec.name)
    return names


def resolve(args: argparse.Namespace, *, training: bool) -> ResolvedConfig:
    """Read the recipe and the overrides in the arguments; a UsageError if neither a recipe nor an
    environment is given."""
    from turnwright.config import load
    from turnwright.renderers.template import template_names

    words = list(args.overrides)
    for key in ("seed", "out"):
        value = vars(args).get(key)
        if value is not None:
            words.append(f"--{key}={value}")
    if args.recipe is None and not any(word.startswith("--env.") for word in words):
        raise UsageError(
            f"turnwright {args.command} needs a recipe: turnwright {args.command} recipe.toml (or "
            "--env.use NAME)"
        )
    return load(
        args.recipe, words, envs=builtin_envs(), templates=template_names(), training=training
    )


def builtin_envs() -> Sequence[str]:
    """Return the names of the built-in environments and of those that packages add."""
    from turnwright import plugins
    from turnwright.envs.builtin import BUILTIN

    return sorted({*BUILTIN, *plugins.names("environments")})


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Format rows as lines of aligned columns: the first left-aligned, the others right-aligned.

    Example::

        >>> print("\\n".join(table([("", "success"), ("sampled", "31.2%")])))
                 success
        sampled    31.2%
    """
    cells = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip_longest(*cells, fillvalue="")]
    lines = []
    for row in cells:
        label, *values = row
        aligned = map(str.rjust, values, widths[1:])
        lines.append("  ".join([label.ljust(widths[0]), *aligned]))
    return lines


def percent(value: float | None) -> str:
    """Format a share as a percentage."""
    return "-" if value is None else f"{value:.1%}"


def interval(ci: Sequence[float] | None) -> str:
    """Format a 95% interval as percentages."""
    return "" if ci is None else f"[{100 * ci[0]:.1f}, {100 * ci[1]:.1f}]"


def positive(text: str) -> int:
    """Read a positive integer; raise argparse's error for another text."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, not {text!r}")
    return value
