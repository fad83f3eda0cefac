"""Examples in docstrings print what they say, and every public function has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
from pathlib import Path

import pytest

import turnwright as tw

SRC = Path(__file__).parents[2] / "src"
MODULES = [
    ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(SRC.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]

WITHOUT_EXAMPLE = {
    "judged": "a judge is a model",
    "load_renderer": "a renderer is that of a model's directory",
    "mcp_tools": "tools are those of a server",
    "simulated_user": "a model plays the user",
    "train": "a run takes a minute",
}
"""Public functions whose example is a literal block, which nothing runs, and why."""


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


def test_every_public_function_has_an_example() -> None:
    functions = {
        name: inspect.getdoc(value) or ""
        for name in tw.__all__
        if inspect.isfunction(value := getattr(tw, name))
    }
    assert len(functions) > 10
    without = {name for name, docstring in functions.items() if ">>> " not in docstring}
    assert without == set(WITHOUT_EXAMPLE)
    for name in WITHOUT_EXAMPLE:
        assert "Example::\n" in functions[name], name
