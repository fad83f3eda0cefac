"""The recipes of the built-in environments, as they are shipped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.config import load
from turnwise.envs import resolve_env
from turnwise.envs.builtin import BUILTIN

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
BUILT_IN = ("search", "code", "frozen_lake", "hinted_math")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_is_short_and_loads(recipe: Path) -> None:
    written = [line for line in recipe.read_text().splitlines() if line and not line.startswith("#")]
    assert len(written) <= 25
    assert load(recipe, envs=tuple(BUILTIN)).config.env


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_environment_of_a_recipe_takes_its_arguments(name: str) -> None:
    (config,) = load(ROOT / "recipes" / f"{name}.toml", envs=tuple(BUILTIN)).config.env
    assert resolve_env(config).tasks("train", 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT_IN)
def test_five_steps_run_end_to_end(name: str) -> None:
    command = [sys.executable, "benchmarks/recipes.py", name]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    row = done.stdout.splitlines()[-1].split("|")
    assert (row[1].strip(), row[2].strip(), row[5].strip()) == (name, "5", "0")
