"""`turnwise init`: an environment, a recipe and a test to start from, which pass as written."""

from __future__ import annotations

import argparse
import keyword
import re
from pathlib import Path
from typing import Any

from turnwise.cli.options import add_command
from turnwise.errors import UsageError

_FILES = {
    "{name}.py": "env.py.jinja",
    "recipe.toml": "recipe.toml.jinja",
    "test_{name}.py": "test.py.jinja",
    "README.md": "README.md.jinja",
}


def add_init(subparsers: Any) -> None:
    """Register the command."""
    parser = add_command(subparsers, "init", "write an environment, a recipe and a test to start from", run_init)
    parser.add_argument("directory", metavar="NAME", type=Path, help="a directory to make; its name is the environment's")


def run_init(args: argparse.Namespace) -> int:
    """Write the files and say what to do next."""
    folder: Path = args.directory
    name = re.sub(r"\W+", "_", folder.name)
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        raise UsageError(f"{folder}: '{folder.name}' cannot name a Python module; take letters, digits and _, my_env say")
    if name in ("turnwise", "test", "random", "collections"):
        raise UsageError(f"{folder}: a module named '{name}' would hide another one; take another name, my_{name} say")
    paths = [folder / pattern.format(name=name) for pattern in _FILES]
    taken = next((path for path in paths if path.exists()), None)
    if taken is not None:
        raise UsageError(f"{taken}: exists already; take another name, or remove it first")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, template in zip(paths, _FILES.values(), strict=True):
            path.write_text(_fill(template, name), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written ({error.strerror}); take another directory") from None
    for path in paths:
        print(path)
    print(f"next: cd {folder} && pytest && turnwise check {name}.py:{class_name(name)} && turnwise train recipe.toml")
    return 0


def class_name(module: str) -> str:
    """The class of a module's environment: `my_env` -> `MyEnv`."""
    name = "".join(word[:1].upper() + word[1:] for word in module.split("_"))
    return name if name.isidentifier() else f"Env{name}"


def _fill(template: str, name: str) -> str:
    text = (Path(__file__).parent / "templates" / template).read_text(encoding="utf-8")
    # Two words to fill in do not need a template engine.
    return text.replace("{{ name }}", name).replace("{{ cls }}", class_name(name))
