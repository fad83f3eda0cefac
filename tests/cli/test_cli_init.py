"""What `turnwise init` writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.cli.main import main
from turnwise.config import load


def test_it_writes_four_files_and_a_recipe_that_loads(tmp_path, capsys):
    assert main(["init", str(tmp_path / "my_env")]) == 0
    assert {path.name for path in (tmp_path / "my_env").iterdir()} == {
        "my_env.py",
        "recipe.toml",
        "test_my_env.py",
        "README.md",
    }
    config = load(tmp_path / "my_env" / "recipe.toml").config
    assert config.env[0].use == f"{tmp_path}/my_env/my_env.py:MyEnv"
    assert len((tmp_path / "my_env" / "recipe.toml").read_text().splitlines()) <= 25
    for path in (tmp_path / "my_env").glob("*.py"):
        compile(path.read_text(), str(path), "exec")
        assert "{" + "{" not in path.read_text()
    assert "MyEnv" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["1st", "class", "random", "ä"])
def test_names_that_cannot_be_modules(tmp_path, capsys, name):
    assert main(["init", str(tmp_path / name)]) == 2
    assert "such as my_" in capsys.readouterr().err


def test_it_never_overwrites(tmp_path, capsys):
    main(["init", str(tmp_path / "my_env")])
    assert main(["init", str(tmp_path / "my_env")]) == 2
    assert "already exists" in capsys.readouterr().err


def test_its_tests_pass_as_written(tmp_path, monkeypatch):
    main(["init", str(tmp_path / "my_env")])
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path / "my_env", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout


def test_its_environment_keeps_the_contract(tmp_path):
    from turnwise.envs import resolve_env
    from turnwise.envs.check import check_env

    main(["init", str(tmp_path / "my_env")])
    world = resolve_env(load(tmp_path / "my_env" / "recipe.toml").config.env[0])
    assert world.name == "MyEnv"
    findings = check_env(world)
    assert findings
    assert all(finding.ok for finding in findings), [finding.text for finding in findings]
