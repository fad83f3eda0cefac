"""Command completion: a script that completes commands, options and recipe keys in a shell."""

from __future__ import annotations

import argparse
from typing import Any, get_args, get_origin

from turnwright.cli.options import Command, add_command, builtin_envs
from turnwright.errors import UsageError

SHELLS = ("bash", "zsh", "fish")
_EPILOG = """\
turnwright completion bash > ~/.local/share/bash-completion/completions/turnwright
turnwright completion zsh > ~/.zfunc/_turnwright        # with fpath+=(~/.zfunc) before compinit
turnwright completion fish > ~/.config/fish/completions/turnwright.fish
"""

MAX_HELP = 80
"""Characters of the help that a shell shows beside a recipe key."""

FILES = ("FILE", "recipe")
"""Metavars and names of arguments that are completed to files."""
FOLDERS = ("RUN", "DIR", "PATH", "DIRECTORY", "FOLDER", "[clean] FOLDER")
"""Metavars of arguments that are completed to folders, such as those of runs."""


def add_completion(subparsers: Any) -> None:
    """Register the command."""
    parser = add_command(
        subparsers,
        "completion",
        "print a script that completes commands, options and recipe keys",
        run_completion,
        epilog=_EPILOG,
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")


def run_completion(args: argparse.Namespace) -> int:
    """Print the script."""
    print(completion_script(args.shell))
    return 0


def completion_script(shell: str) -> str:
    """Return the script of a shell; raise `UsageError` without the package that writes it."""
    from turnwright.cli.main import build_parser, commands_of

    try:
        import shtab
    except ImportError:
        raise UsageError(
            "turnwright completion needs shtab: pip install 'turnwright[completion]'"
        ) from None

    parser = build_parser()
    for command in commands_of(parser).values():
        if command.get_default("takes_overrides"):
            _add_keys(command)
        for action in command._actions:
            named = action.metavar or action.dest
            if named in FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif named in FOLDERS:
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    script: str = shtab.complete(parser, shell)
    return script


def _add_keys(parser: argparse.ArgumentParser) -> None:
    """Add the keys of recipes to a command's options, which are else recognized by their dot."""
    from turnwright.config.fields import field_docs, field_type, known_keys, path_kind
    from turnwright.config.names import ALGORITHMS, ENGINES, PARSERS, SAMPLERS
    from turnwright.config.values import PathKind

    named = {
        "engine.kind": ENGINES,
        "env.sampler": SAMPLERS,
        "env.use": builtin_envs(),
        "model.parser": PARSERS,
        "train.algorithm": ALGORITHMS,
    }
    metavars: dict[PathKind | None, str] = {PathKind.DIRECTORY: "DIR"}
    docs = field_docs()
    for key in known_keys():
        if "." not in key:  # an option of its own
            continue
        choices = named.get(key) or _choices(field_type(key))
        metavar = "VALUE"
        if choices is None and path_kind(key) is not None:
            metavar = metavars.get(path_kind(key), "FILE")
        parser.add_argument(
            f"--{key.replace('_', '-')}",
            metavar=metavar,
            choices=choices,
            help=_first_sentence(docs.get(key, "")),
        )


def _choices(hint: Any) -> list[str] | None:
    """Return the values of a key that has a few of them."""
    if hint is bool:
        return ["true", "false"]
    if get_origin(hint) is None:
        return None

    choices: list[str] = []
    for member in (hint, *get_args(hint)):
        if get_origin(member) is not None and all(isinstance(v, str) for v in get_args(member)):
            choices += get_args(member)
    return choices or None


def _first_sentence(text: str) -> str:
    """Return a short help; argparse would take a percent sign for a format."""
    sentence = text.partition(". ")[0].rstrip(".")
    if len(sentence) > MAX_HELP:
        sentence = sentence[: MAX_HELP - 1] + "…"
    return sentence.replace("%", "%%")


COMMAND = Command(add_completion)
