"""The page of dependencies has what pyproject.toml asks for, with a reason for each."""

from __future__ import annotations

from dependency_table import BEGIN, END, PAGE, WHY, declared


def test_the_page_has_every_dependency():
    rows = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].splitlines()
    shown = [[cell.strip() for cell in row.strip("|").split("|")][:3] for row in rows[3:]]
    assert shown == [[one.name, one.bounds, one.places] for one in declared()]


def test_each_has_a_reason():
    assert WHY.keys() == {one.name for one in declared()}
    assert all(why and instead for why, instead in WHY.values())
