"""`turnwright check learn`: the toy reward rises, and luck is not taken for learning."""

import pytest

from turnwright.cli.main import main
from turnwright.training.self_checks import ENDS, STEPS, _judge, check_learning


def test_a_toy_reward_rises():
    (found,) = check_learning(["grpo"])
    assert found.ok, found.text
    assert found.after > found.before + 0.1


@pytest.mark.parametrize(
    ("rewards", "ok"),
    [([0.2, 0.3] * 10, False), ([0.3] * STEPS, False), ([0.1] * ENDS + [0.5] * 15, True)],
)
def test_luck_is_not_learning(rewards, ok):
    found = _judge("x", rewards, 1.0)
    assert found.ok is ok
    assert ("not significant" in found.text) is not ok


def test_mistakes_on_the_command_line(capsys):
    assert main(["check", "hop", "--algorithm", "grpo"]) == 2
    assert "--algorithm is for turnwright check learn" in capsys.readouterr().err
    assert main(["check", "learn", "--algorithm", "gprpo"]) == 2
    assert "did you mean 'grpo'?" in capsys.readouterr().err
