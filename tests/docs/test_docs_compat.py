"""The page of other frameworks names for each of their capabilities tests that there are."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/compat.md").read_text(encoding="utf-8")
TABLES = (ROOT / "docs/reference/capabilities.md").read_text(encoding="utf-8")
SYSTEMS = {"S": 15, "K": 6, "V": 8, "W": 6}
ROW = re.compile(r"^\| ([SKVW]\d+) \| [^|]+ \| ([^|]+) \|$", re.MULTILINE)
FILES = re.compile(r"^\| ([SKVW]\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
USERS = {"S": "slime", "K": "skyrl", "V": "verl", "W": "swift"}


@cache
def defined_tests(file: str) -> set[str]:
    path = ROOT / file if "/" in file else ROOT / "tests/compat" / file
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {
        node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


def named_tests(cell: str) -> list[str]:
    """The tests that a cell names, which there must be."""
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", cell)
    assert len(named) == cell.count("::"), cell
    lost = [f"{file}::{test}" for file, test in named if test not in defined_tests(file)]
    assert not lost, cell
    return [file for file, _ in named]


def test_every_row_names_tests_that_exist() -> None:
    rows = dict(ROW.findall(TABLES))
    assert list(rows) == [
        f"{system}{number}" for system, most in SYSTEMS.items() for number in range(1, most + 1)
    ]
    for row, cell in rows.items():
        assert named_tests(cell), row


def test_the_tests_named_elsewhere_on_the_page_exist() -> None:
    found = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in defined_tests(file.relative_to(ROOT).as_posix())
    }
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    assert len(named) > 5
    assert not named - found


def test_every_row_has_user_files_with_both_kinds_of_tests() -> None:
    rows = FILES.findall(TABLES)
    assert [row for row, *_ in rows] == [
        f"{system}{number}" for system, most in SYSTEMS.items() for number in range(1, most + 1)
    ]
    files: dict[str, set[str]] = {system: set() for system in SYSTEMS}
    compared: dict[str, set[str]] = {system: set() for system in SYSTEMS}
    for row, cell, stand_ins, original in rows:
        named = re.findall(r"`(\w+\.py)`", cell)
        assert named, row
        assert all(
            (ROOT / "tests/compat/users" / USERS[row[0]] / file).is_file() for file in named
        ), row
        assert named_tests(stand_ins), row
        with_original = named_tests(original)
        assert with_original or original.startswith("none: "), row
        assert all("original" in file or "oracle" in file for file in with_original), row
        files[row[0]] |= set(named)
        compared[row[0]] |= set(named) if with_original else set()
    assert all(len(found) >= 8 for found in files.values()), files
    assert all(len(found) >= 7 for found in compared.values()), compared
