"""What `turnwright init` writes."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from turnwright.cli.main import main
from turnwright.config import load


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


def test_the_next_commands_are_those_of_a_shell(tmp_path, capsys):
    assert main(["init", str(tmp_path / "My Env; echo no")]) == 0
    next_line = capsys.readouterr().out.splitlines()[-1]
    words = shlex.split(next_line.removeprefix("next: ").partition(" && ")[0])
    assert words == ["cd", str(tmp_path / "My Env; echo no")]


@pytest.mark.parametrize(
    "name", ["1st", "class", "__main__", "ä", "random", "bisect", "turnwright", "numpy"]
)
def test_names_that_cannot_be_modules(tmp_path, capsys, name):
    assert main(["init", str(tmp_path / name)]) == 2
    assert not (tmp_path / name).exists()
    assert "such as my_" in capsys.readouterr().err


def test_it_never_overwrites(tmp_path, capsys):
    main(["init", str(tmp_path / "my_env")])
    assert main(["init", str(tmp_path / "my_env")]) == 2
    assert "already exists" in capsys.readouterr().err


OTHER = """
import turnwright as tw

{body}
"""
CLASS = """
class MyEnv(tw.Env):
    max_turns = 2
    def reset(self, task, *, seed=None):
        return f"double {task.info['n']}"
    def step(self, action):
        return tw.Step(reward=float(action.text == "2"), terminated=True)
    @staticmethod
    def tasks(split, n, seed):
        return [tw.Task(info={"n": i}) for i in range(3) for _ in range(2) if (i == 0) == (split == "eval")]
    @staticmethod
    def solver(messages, rng):
        return "2"
"""  # noqa: E501
TOOLS = """
def double(n: int) -> int:
    '''Double a number.'''
    return 2 * n

def right(trajectory):
    return float(trajectory.final_text == trajectory.task.answer)

MyEnv = tw.tool_env(tools=[double], reward=right, tasks=[tw.Task(f"double {n}", answer=str(2 * n)) for n in range(9)])
"""  # noqa: E501


@pytest.mark.parametrize("body", [None, CLASS, TOOLS])
def test_its_tests_pass_as_written_and_for_another_environment(tmp_path, monkeypatch, body):
    main(["init", str(tmp_path / "my_env")])
    if body is not None:
        (tmp_path / "my_env" / "my_env.py").write_text(OTHER.format(body=body))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "src"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path / "my_env", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert ("5 passed, 1 skipped" if body == TOOLS else "6 passed") in done.stdout


def test_its_tests_find_a_reward_for_silence(tmp_path, monkeypatch):
    main(["init", str(tmp_path / "my_env")])
    broken = CLASS.replace('action.text == "2"', "True")
    (tmp_path / "my_env" / "my_env.py").write_text(OTHER.format(body=broken))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "src"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path / "my_env", capture_output=True, text=True)
    assert "3 failed" in done.stdout


def test_its_tasks_end_where_there_are_fewer(tmp_path):
    from turnwright.envs import resolve_env

    main(["init", str(tmp_path / "my_env")])
    file = tmp_path / "my_env" / "my_env.py"
    file.write_text(
        file.read_text()
        .replace("ROOMS = 3", "ROOMS = 1")
        .replace('"blue", "green", "white", "black", "gold")', '"blue", "green")')
    )
    spec = resolve_env(f"{file}:MyEnv")
    assert 0 < len(spec.tasks("train", 500, 0)) < 100


def test_its_environment_keeps_the_contract(tmp_path):
    from turnwright.envs import resolve_env
    from turnwright.envs.check import check_env

    main(["init", str(tmp_path / "my_env")])
    world = resolve_env(load(tmp_path / "my_env" / "recipe.toml").config.env[0])
    assert world.name == "MyEnv"
    findings = check_env(world)
    assert findings
    assert all(finding.ok for finding in findings), [finding.text for finding in findings]
