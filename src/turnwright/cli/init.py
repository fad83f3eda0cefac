"""Command init: write a starter environment, its recipe, its test and a README.

The files are made of the templates in `templates/` beside this module. What is written is never
written over: `run_init` refuses a name that is taken, by a file or by a Python module.
"""

from __future__ import annotations

import argparse
import keyword
import re
import shlex
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from turnwright.cli.options import Command, add_command
from turnwright.errors import UsageError

READS = "model = { heads = 4, kv_heads = 4 }"
SEES = """\
# It sees images up to this size, larger ones are scaled down; of text it reads what is beside them, never their alt.
model = { vision = true, image_side = 64, heads = 4, kv_heads = 4 }"""  # noqa: E501
"""The tiny model in a recipe, for text and with images."""
_FILES = {
    "{name}.py": "env.py",
    "recipe.toml": "recipe.toml",
    "test_{name}.py": "test.py",
    "README.md": "README.md",
}
"""File -> its template."""


def add_init(subparsers: Any) -> None:
    """Register the command."""
    parser = add_command(
        subparsers, "init", "write a starter environment, recipe and test", run_init
    )
    parser.add_argument(
        "directory",
        metavar="NAME",
        type=Path,
        help="directory to create; its name is the environment's",
    )
    vision = "an environment with images, and a recipe for a model that sees"
    parser.add_argument("--vision", action="store_true", help=vision)


def run_init(args: argparse.Namespace) -> int:
    """Write the files and print the next commands."""
    folder: Path = args.directory
    name = re.sub(r"\W+", "_", folder.name)
    _refuse_name(folder, name)

    paths = [folder / pattern.format(name=name) for pattern in _FILES]
    existing = next((path for path in paths if path.exists()), None)
    if existing is not None:
        raise UsageError(f"{existing}: already exists; choose another name, or remove it first")

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, template in zip(paths, _FILES.values(), strict=True):
            path.write_text(_filled(template, name, vision=args.vision), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{folder}: cannot be written ({error.strerror}); choose another directory"
        ) from None

    for path in paths:
        print(path)
    check = f"turnwright check {name}.py:{class_name(name)}"
    print(
        f"next: cd {shlex.quote(str(folder))} && pytest && {check} && turnwright train recipe.toml"
    )
    return 0


def _refuse_name(folder: Path, name: str) -> None:
    """Raise `UsageError` for a name that no module can have, or that would hide one."""
    is_module_name = name.isidentifier() and name.isascii() and not keyword.iskeyword(name)
    if not is_module_name or name.startswith("__"):
        raise UsageError(
            f"{folder}: '{folder.name}' cannot name a Python module; use letters, digits and _, "
            "such as my_env"
        )

    # A bare directory on the path is found too, and has no origin: it hides nothing.
    installed = PathFinder.find_spec(name)
    is_installed = installed is not None and bool(installed.origin)
    if name in {"turnwright", *sys.stdlib_module_names} or is_installed:
        raise UsageError(
            f"{folder}: a module named '{name}' would hide another one; choose another name, such "
            f"as my_{name}"
        )


def _filled(template: str, name: str, *, vision: bool) -> str:
    """Return the text of a file for an environment's name."""
    if vision and template == "env.py":
        template = "env_vision.py"
    template_file = Path(__file__).parent / "templates" / f"{template}.jinja"
    text = template_file.read_text(encoding="utf-8")

    # Three placeholders need no template engine.
    text = text.replace("{{ name }}", name)
    text = text.replace("{{ cls }}", class_name(name))
    return text.replace("{{ model }}", SEES if vision else READS)


def class_name(module: str) -> str:
    """Return the class name for a module: `my_env` -> `MyEnv`."""
    name = "".join(word[:1].upper() + word[1:] for word in module.split("_"))
    return name if name.isidentifier() else f"Env{name}"


COMMAND = Command(add_init)
