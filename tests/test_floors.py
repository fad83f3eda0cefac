"""The floors of the house: imports point down, the core is light, names resolve, and everything
public says what it is."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from importlib import import_module, util
from pathlib import Path

import pytest

import turnwright

ROOT = Path(turnwright.__file__).parents[2]
HEAVY = ("torch", "transformers", "ray", "numpy", "numba")
CORE = ("types", "errors", "config", "renderers", "envs", "engines", "records", "rollouts")


@pytest.mark.skipif(util.find_spec("importlinter") is None, reason="import-linter is not installed")
@pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="not a checkout")
def test_imports_point_only_down():
    code = (
        "import sys; from importlinter.cli import lint_imports; "
        "sys.exit(lint_imports(no_cache=True))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "statement", ["import turnwright", "; ".join(f"import turnwright.{room}" for room in CORE)]
)
def test_the_core_imports_nothing_heavy(statement):
    code = (
        f"{statement}; import json, sys; print(json.dumps(sorted({{name.split('.')[0] for name "
        "in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(json.loads(done.stdout)) & set(HEAVY)


def exported():
    rooms = ["turnwright", *[f"turnwright.{room}" for room in CORE]]
    return [(room, name) for room in rooms for name in getattr(import_module(room), "__all__", ())]


@pytest.mark.parametrize(("room", "name"), exported())
def test_every_exported_name_resolves_and_says_what_it_is(room, name):
    value = getattr(import_module(room), name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert (value.__doc__ or "").strip(), f"{room}.{name} has no docstring"
