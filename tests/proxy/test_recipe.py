"""`use = "program"`: what a recipe says, and what it hears of a mistake."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from kit.proxy import RecordingEngine

import turnwright as tw
from turnwright.config import EnvConfig
from turnwright.config.recipe import load
from turnwright.envs import resolve_env
from turnwright.errors import ConfigError

SCORES = """
def score(result):
    return float(result.output.strip() == "Begin.")

def files(task):
    return {"question.txt": task.messages[0].text}

LIST = []
"""
AGENT = "import sys; print(open('question.txt').read())"


def section(tmp_path: Path, **args: Any) -> EnvConfig:
    (tmp_path / "scores.py").write_text(SCORES)
    (tmp_path / "agent.py").write_text(AGENT)
    return EnvConfig(use="program", args=args)


def test_a_program_of_a_recipe_is_played(tmp_path: Path) -> None:
    command = ["{python}", "{recipe}/agent.py"]
    spec = resolve_env(
        section(tmp_path, command=command, score="scores.py:score", files="scores.py:files"),
        base=tmp_path,
    )
    assert spec.agent_function is not None
    (trajectory,) = tw.rollout(spec.agent_function, [tw.Task("Begin.")], RecordingEngine([]))
    assert trajectory.error is None, trajectory.error.traceback
    assert trajectory.reward == 1.0


def test_a_loaded_recipe_knows_its_directory(tmp_path: Path) -> None:
    """Also where the command runs elsewhere, as always: the directory of these tests is another."""
    section(tmp_path)
    text = (
        '[[env]]\nuse = "program"\n[env.args]\ncommand = ["{python}", '
        '"{recipe}/agent.py"]\nscore = "scores.py:score"\n'
    )
    (tmp_path / "r.toml").write_text(text + 'files = "scores.py:files"\n')
    spec = resolve_env(load(tmp_path / "r.toml", envs=["hop"]).config.env[0])
    assert spec.agent_function is not None
    (trajectory,) = tw.rollout(spec.agent_function, [tw.Task("Begin.")], RecordingEngine([]))
    assert trajectory.reward == 1.0


def test_a_recipe_may_name_it(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(
        '[[env]]\nuse = "program"\n[env.args]\ncommand = ["x"]\nscore = "scores.py:score"\n'
    )
    assert load(tmp_path / "r.toml", envs=["hop"]).config.env[0].use == "program"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "needs one of args.command"),
        (
            {"command": ["x"], "agent": "scores.py:files", "score": "scores.py:score"},
            "needs one of",
        ),
        ({"command": ["x"]}, "needs args.score"),
        ({"command": "python agent.py", "score": "scores.py:score"}, "args.command is a list"),
        ({"command": ["x"], "score": "score"}, "args.score: 'score' names no module"),
        ({"command": ["x"], "score": "scores.py:LIST"}, "is no function; write file.py:function"),
        (
            {"command": ["x"], "score": "scores.py:score", "env": {"A": 1}},
            "args.env is a table of texts",
        ),
        (
            {"command": ["x"], "score": "scores.py:score", "comand": 1},
            "no argument 'comand'; did you mean 'command'?",
        ),
        ({"agent": "scores.py:nothing", "score": "scores.py:score"}, "scores.py has no 'nothing'"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve_env(section(tmp_path, **args), base=tmp_path)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_server_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [one for one in sys.modules if one.startswith("turnwright_serve.proxy")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette.responses", None)
    with pytest.raises(ConfigError, match=r"pip install 'turnwright\[serve\]'"):
        resolve_env(section(tmp_path, command=["x"], score="scores.py:score"), base=tmp_path)
