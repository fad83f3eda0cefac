"""Command convert."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from turnwright.cli.options import Command, add_command
from turnwright.errors import UsageError


def add_convert(subparsers: Any) -> None:
    """Register the command."""
    help = "turn a launch script of slime, SkyRL, verl, ms-swift or TRL into a recipe"
    epilog = (
        "Reads a shell script, an argument list, a Python launcher (.py) or YAML (.yaml), and "
        "runs nothing of it. The recipe\ngoes to the standard output or --out, and names every "
        "setting that it drops. What could not be read is named as\nincomplete; a training that "
        "no recipe does is refused (exit status 2)."
    )
    parser = add_command(subparsers, "convert", help, run_convert, epilog=epilog)

    parser.add_argument("source", metavar="FILE", type=Path, help="the script or configuration")
    parser.add_argument(
        "--system",
        metavar="NAME",
        help="slime, skyrl, verl, swift or trl (default: by its settings)",
    )
    parser.add_argument(
        "--out", metavar="RECIPE", type=Path, help="the recipe to write, which must not exist"
    )


def run_convert(args: argparse.Namespace) -> int:
    """Convert a launch script and print the recipe, or its account."""
    from turnwright_compat.launch_scripts import convert_file

    converted = convert_file(args.source, args.system)
    if args.out is None:
        # The recipe alone is on the standard output, so it can be redirected into a file.
        print(converted.recipe, end="")
    else:
        try:
            with args.out.open("x", encoding="utf-8") as file:
                file.write(converted.recipe)
        except OSError as error:
            raise UsageError(
                f"--out {args.out}: cannot be written ({error.strerror}); name a new file"
            ) from None

    # Values of the script must not reach the terminal as control characters.
    for line in converted.lines():
        printable = "".join(character if character.isprintable() else " " for character in line)
        print(printable, file=sys.stderr)
    return 0


CONVERT = Command(add_convert)
