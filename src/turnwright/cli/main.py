"""Command line: `turnwright train | eval | rollout | check | init | engines | pack |
completion`, and the commands that packages add.

`entry` is the program, `main` one command with its exit status, and `_run` parses its words. What a
command does is in its own module, named in `COMMANDS`. Heavy imports are deferred to the commands
that need them, so that `turnwright --help` is fast.
"""

from __future__ import annotations

import argparse
import atexit
import difflib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib import import_module
from typing import NoReturn

from turnwright import plugins
from turnwright._version import __version__
from turnwright.cli.options import Command, split_overrides
from turnwright.errors import TraceError, TurnwrightError, UsageError, missing_training
from turnwright.files import why_not_written
from turnwright.plugins import FOLDERS
from turnwright.shutdown import StopSignals

COMMANDS = {
    "train": "turnwright.cli.train",
    "eval": "turnwright.cli.evaluate",
    "rollout": "turnwright.cli.rollout",
    "check": "turnwright.cli.check",
    "init": "turnwright.cli.init",
    "engines": "turnwright.cli.engines",
    "pack": "turnwright.cli.pack",
    "completion": "turnwright.cli.completion",
}
"""Commands of the core, and the module of each, which has it as `COMMAND`."""

MOST_NAMED = 3
"""Most keys of one name that an error names."""

EXIT_S = 3.0
"""Seconds that threads which user code left running have to end after the command."""

EXAMPLES = """\
examples:
  turnwright train recipe.toml --train.lr 1e-4     train; any key of the recipe can be overridden
  turnwright train recipe.toml --dry-run           print every setting and its origin
  turnwright eval recipe.toml --samples 4          success and pass@k on held-out tasks
  turnwright init my_env                           write a starter environment, recipe and test
  turnwright view runs/run                         open the viewer of a run
"""


class _Parser(argparse.ArgumentParser):
    """Argument parser that raises errors, so that one place reports them."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")


def build_parser(command: str = "") -> argparse.ArgumentParser:
    """Return the parser with all commands, or with `command` alone if it is one of the core.

    So a command imports its own module, and neither those of others nor what finds entry points.
    """
    parser = _Parser(
        prog="turnwright",
        description="Multi-turn reinforcement learning for LLM agents, token for token.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")

    names = [command] if command in COMMANDS else list(COMMANDS)
    for name in names:
        core_command: Command = import_module(COMMANDS[name]).COMMAND
        core_command.add(subparsers)
    if command not in COMMANDS:
        for added_command in plugins.importable("commands"):
            added_command.add(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 success, 1 failure, 2 user error, 128 + n when
    signal n interrupted it."""
    words = list(sys.argv[1:] if argv is None else argv)
    is_training = words[:1] == ["train"]
    stop_signals = StopSignals()
    try:
        with _own_warnings_without_source(), _handled(stop_signals):
            return _run(words)
    except (UsageError, TraceError) as error:
        return _print_error(str(error))
    except TurnwrightError as error:  # not a user error, but the message is sufficient
        return _print_error(str(error), status=1)
    except SystemExit as exit:  # raised by argparse after --help
        return exit.code if isinstance(exit.code, int) else 1
    except KeyboardInterrupt as interrupt:
        status = 128 + (stop_signals.received or signal.SIGINT)
        hint = str(interrupt)
        if not hint and is_training:
            hint = "journaled episodes are kept; resume with --resume RUN"
        return _print_error(f"interrupted; {hint}" if hint else "interrupted", status=status)
    except BrokenPipeError:
        # The reader (`| head`) closed the pipe. Without a new stdout, Python prints another error
        # when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        missing = missing_training(error)
        if missing is None:
            raise
        return _print_error(str(missing))
    except Exception as error:
        why = why_not_written(error)
        if not why:
            raise
        place = error.filename if isinstance(error, OSError) and error.filename else "writing"
        remedy = "free space and try again"
        if is_training:
            remedy = "free space, then resume with --resume RUN"
        return _print_error(f"{place}: {why}; {remedy}")


def _handled(stop_signals: StopSignals) -> AbstractContextManager[None]:
    """Return what handles SIGTERM and SIGHUP as Ctrl-C for a command.

    Not under torchrun, which ends all its processes at once: one that ended in order would wait for
    the others. Nor in another thread than the main one, which may not handle signals.
    """
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
    in_main_thread = threading.current_thread() is threading.main_thread()
    return stop_signals.installed() if is_alone and in_main_thread else nullcontext()


@contextmanager
def _own_warnings_without_source() -> Iterator[None]:
    """Print warnings of this package as `warning: text`, without the line of its code that gave
    them."""
    python_format = warnings.formatwarning

    def format(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        if filename.startswith(FOLDERS):
            return f"warning: {message}\n"
        return python_format(message, category, filename, lineno, line)

    warnings.formatwarning = format
    try:
        yield
    finally:
        warnings.formatwarning = python_format


def _run(words: list[str]) -> int:
    """Parse the words and run their command; return its exit status."""
    parser = build_parser(words[0] if words else "")
    if not words:
        parser.print_help(sys.stderr)
        return 2
    if words[0] in ("--version", "version"):
        print(f"turnwright {__version__}")
        return 0
    commands = commands_of(parser)
    if words[0] == "help":
        words = [*words[1:2], "--help"]
    _check_command(words, list(commands))

    words, overrides = split_overrides(words)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        raise UsageError(_unknown(commands[words[0]], words[0], unknown[0]))
    if args.command is None:
        raise UsageError(f"no command; commands are {', '.join(commands)}")
    if overrides and not args.takes_overrides:
        raise UsageError(
            f"turnwright {args.command} reads no recipe, so {overrides[0]} has no effect; leave it "
            "out"
        )
    args.overrides = list(overrides)
    run: Callable[[argparse.Namespace], int] = args.run
    return run(args)


def commands_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return the parsers of commands, by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            commands: Mapping[str, argparse.ArgumentParser] = action.choices
            return commands
    raise AssertionError("the parser has commands")


def _check_command(words: Sequence[str], names: Sequence[str]) -> None:
    """Raise `UsageError` unless the first word is a command, or asks for help."""
    first = words[0]
    if first.startswith("-"):
        if first in ("-h", "--help"):
            return
        command = next((word for word in words if word in names), "COMMAND")
        raise UsageError(
            f"unknown option {first} before the command; its options follow it: `turnwright "
            f"{command} --help`"
        )
    if first in names:
        return

    if first in plugins.names("commands"):
        plugins.load("commands", first)  # which says what is missing
    near = difflib.get_close_matches(first, [*names, "help", "version"], n=1, cutoff=0.5)
    hint = f"did you mean `turnwright {near[0]}`?" if near else f"commands are {', '.join(names)}"
    raise UsageError(f"unknown command '{first}'; {hint}")


def _unknown(parser: argparse.ArgumentParser, command: str, word: str) -> str:
    """Describe an option that the command does not have, and the closest option or recipe key."""
    name = word.partition("=")[0]
    if not name.startswith("-"):
        return (
            f"turnwright {command}: unexpected argument '{word}'; see `turnwright {command} --help`"
        )

    # By what follows the dashes, which all have in common.
    choices: dict[str, list[str]] = {}
    for option in parser._option_string_actions:
        if option.startswith("--") and option != "--help":
            choices[option.removeprefix("--")] = [option]
    if parser.get_default("takes_overrides"):
        from turnwright.config.fields import keys_by_name

        for key, dotted_keys in keys_by_name().items():
            flags = [f"--{dotted.replace('_', '-')}" for dotted in dotted_keys]
            if name not in flags:
                choices.setdefault(key.replace("_", "-"), flags)

    wanted = name.lstrip("-").replace("_", "-")
    near = difflib.get_close_matches(wanted, list(choices), n=1, cutoff=0.6)
    hint = f"see `turnwright {command} --help`"
    if near:
        flags = choices[near[0]]
        named = " or ".join(repr(flag) for flag in flags[:MOST_NAMED])
        more = f" or {len(flags) - MOST_NAMED} others" if len(flags) > MOST_NAMED else ""
        hint = f"did you mean {named}{more}?"
    return f"turnwright {command}: unknown option {name}; {hint}"


def _print_error(message: str, status: int = 2) -> int:
    """Print an error in one line, without line breaks and control characters of quoted text, and
    return the status."""
    line = " ".join(message.split())
    printable = "".join(char if char.isprintable() else "\ufffd" for char in line)
    print(f"turnwright: error: {printable}", file=sys.stderr)
    return status


def entry() -> NoReturn:
    """Run one command as a process, and end the process with its exit status, whatever threads user
    code left."""
    status = main()
    threading.Thread(target=_end_after, args=(status,), name="turnwright-exit", daemon=True).start()
    sys.exit(status)


def _end_after(status: int) -> None:
    """End the process if Python still waits for other threads; they would keep it for ever, a batch
    job with it."""
    while True:
        time.sleep(EXIT_S)
        remaining = []
        for thread in threading.enumerate():
            is_other = thread is not threading.main_thread() and not thread.daemon
            if is_other and thread.is_alive():
                remaining.append(thread.name)
        if remaining:
            break

    with suppress(Exception):  # a closed stderr
        names = ", ".join(remaining)
        _print_error(
            f"ended without waiting for the threads {names}, which user code left running", status
        )
        atexit._run_exitfuncs()
        sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    entry()
