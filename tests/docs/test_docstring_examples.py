"""Examples in docstrings print what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import turnwright as tw

SRC = Path(__file__).parents[2] / "src"
MODULES = [
    ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(SRC.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


def documented(module_name: str) -> list[doctest.DocTest]:
    """Return the docstrings of a module that have examples."""
    module = importlib.import_module(module_name)
    names = {**vars(module), "tw": tw}
    tests = doctest.DocTestFinder().find(module, module_name, extraglobs=names)
    return [test for test in tests if test.examples]


@pytest.mark.parametrize("module_name", MODULES)
def test_examples_print_what_they_say(
    module_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = documented(module_name)
    assert tests, f"{module_name} has `>>>` outside of docstrings alone"

    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for number, test in enumerate(tests):
        directory = tmp_path / str(number)  # an example may write files
        directory.mkdir()
        monkeypatch.chdir(directory)
        runner.run(test, out=report.append)
    assert not runner.summarize(verbose=False).failed, "".join(report)
