"""The page of other frameworks names for each of their capabilities tests that there are."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/compat.md").read_text(encoding="utf-8")
SYSTEMS = {"S": 15, "K": 6, "V": 8, "W": 6}
ROW = re.compile(r"^\| ([SKVW]\d+) \| [^|]+ \| (.+) \|$", re.MULTILINE)


@cache
def defined_tests(file: str) -> set[str]:
    path = ROOT / file if "/" in file else ROOT / "tests/compat" / file
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


def test_every_row_names_tests_that_exist() -> None:
    rows = dict(ROW.findall(TEXT))
    assert list(rows) == [f"{system}{number}" for system, most in SYSTEMS.items() for number in range(1, most + 1)]
    for row, cell in rows.items():
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", cell)
        assert named, row
        assert len(named) == cell.count("::"), row
        lost = [f"{file}::{test}" for file, test in named if test not in defined_tests(file)]
        assert not lost, row


def test_the_tests_named_elsewhere_on_the_page_exist() -> None:
    found = {name for file in (ROOT / "tests").rglob("test_*.py") for name in defined_tests(file.relative_to(ROOT).as_posix())}
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    assert len(named) > 5
    assert not named - found
