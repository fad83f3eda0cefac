"""Rewrite the generated parts of docs/architecture.md: the figure of the layers.

`python tests/docs/architecture.py` writes the page; `tests/docs/test_docs_architecture.py` checks
it, and that each link names code that exists.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
_LINK = re.compile(r"\[`(?P<module>[\w/]+\.py):(?P<name>[\w.]+)`\]\((?P<target>[^)]*)\)")
_LAYERS = re.compile(r"(?<=<!-- layers -->\n).*?(?=<!-- end -->)", re.S)


def purpose(module: str) -> str:
    """Return the first paragraph of the docstring of a module, without its period."""
    base = ROOT / "src" / module.replace(".", "/")
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(doc.partition("\n\n")[0].split()).rstrip(".")


def layers() -> str:
    """Return the layers of the import-linter contracts, top down, as a block of text: the packages
    beside the core first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "importlinter"
    ]["contracts"]
    by_name = {contract["name"]: contract for contract in contracts}
    beside = by_name["Between the packages beside the core, imports point to the servers alone"][
        "layers"
    ]
    core = by_name["Imports point only down"]["layers"]
    rows = [row.split(" | ") for row in (*beside, "turnwright", *core)]
    width = max(len(name.removeprefix("turnwright.")) for row in rows for name in row)
    lines = []
    for row in rows:
        mark = "|" if len(row) > 1 else " "
        for name in row:
            indent = "  " if "." in name else ""
            lines.append(
                (
                    f"{mark} {indent}{name.removeprefix('turnwright.'):<{width}}  {purpose(name)}"
                ).rstrip()
            )
    return "```text\n" + "\n".join(lines) + "\n```\n"


def check_name(path: Path, name: str) -> None:
    """Raise `KeyError` where a file has no function, class or method of a name."""
    body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    for part in name.split("."):
        definitions = [
            node
            for node in body
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        ]
        node = next((node for node in definitions if node.name == part), None)
        if node is None:
            raise KeyError(f"{path.relative_to(ROOT)} has no {name}")
        body = node.body


def generated(page: str) -> str:
    """Return the page with its generated parts as the code is now."""

    def link(match: re.Match[str]) -> str:
        module, name = match["module"], match["name"]
        check_name(ROOT / "src" / "turnwright" / module, name)
        return f"[`{module}:{name}`](../src/turnwright/{module})"

    return _LINK.sub(link, _LAYERS.sub(lambda _: layers(), page))


if __name__ == "__main__":
    PAGE.write_text(generated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
