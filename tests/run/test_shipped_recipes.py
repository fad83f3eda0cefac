"""The recipes as they are shipped: of the built-in environments, and of user
code of other frameworks."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from turnwright.config import load
from turnwright.envs import resolve_env
from turnwright.envs.builtin import BUILTIN

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.toml"))
BUILT_IN = ("search", "code", "frozen_lake", "hinted_math")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_is_short_and_loads(recipe: Path, tmp_path: Path) -> None:
    written = [
        line for line in recipe.read_text().splitlines() if line and not line.startswith("#")
    ]
    foreign = recipe.parent.name == "compat"
    assert len(written) <= (35 if foreign else 25)
    if foreign:  # its rows are made by the script that its first lines name
        home = Path(shutil.copytree(recipe.parent, tmp_path / "compat"))
        for name in re.findall(r'"([\w/]+\.jsonl)"', recipe.read_text()):
            (home / name).parent.mkdir(exist_ok=True)
            (home / name).touch()
        recipe = home / recipe.name
        (script,) = re.findall(
            r"^# +python recipes/compat/(\w+\.py)", recipe.read_text(), re.MULTILINE
        )
        assert (home / script).is_file()
    assert load(recipe, envs=tuple(BUILTIN)).config.env


@pytest.mark.parametrize("name", [*BUILT_IN, "sokoban"])
def test_the_environment_of_a_recipe_takes_its_arguments(name: str) -> None:
    (config,) = load(ROOT / "recipes" / f"{name}.toml", envs=tuple(BUILTIN)).config.env
    assert resolve_env(config).tasks("train", 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT_IN)
def test_five_steps_run_end_to_end(name: str) -> None:
    command = [sys.executable, "benchmarks/recipes.py", name]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    row = done.stdout.splitlines()[-1].split("|")
    assert (row[1].strip(), row[2].strip(), row[5].strip()) == (name, "5", "0")
