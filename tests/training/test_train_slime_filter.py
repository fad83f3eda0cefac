"""slime's dynamic sampling filters as `train.group_filter`."""

from pathlib import Path

import pytest
from kit.double_precision import Model64
from kit.training import STILL, M, P, chain, credit_settings

import turnwright as tw
from turnwright.config import TrainConfig
from turnwright.errors import ConfigError, UsageError
from turnwright.renderers import byte_renderer
from turnwright.training import Trainer
from turnwright.training.advantages import advantages, without_signal
from turnwright.training.metrics import step_row
from turnwright.types import Group, StopReason

pytestmark = pytest.mark.beside("compat")

THEIRS = f"{Path(__file__).parents[1]}/compat/users/slime/others.py:check_reward_nonzero_std"
BASE = "from slime.rollout.filter_hub.base_types import DynamicFilterOutput\n"


def group(name, *rewards):
    rows = [
        chain([(P, [1, 2]), (M, [3, 4])], task=name, sample=i, reward=one)
        for i, one in enumerate(rewards)
    ]
    for row in rows:
        row.stop = StopReason.DONE
    return Group(rows[0].task, rows)


def write(tmp_path, body):
    (tmp_path / "own.py").write_text(BASE + body)
    return f"{tmp_path}/own.py:own"


def test_a_filter_of_slime_leaves_groups_out_and_its_reasons_are_counted():
    made = [group("tied", 1.0, 1.0), group("open", 0.0, 1.0), group("lost", 0.0, 0.0)]
    metrics = (
        Trainer(Model64(), TrainConfig(**STILL, group_filter=THEIRS))
        .step(made, step=0, steps=1)
        .metrics
    )
    row = step_row([one for each in made for one in each.trajectories], metrics, 1.0, 1.0)
    assert row["groups_filtered"] == {"zero_std": 2}
    assert (row["trajectories_trained"], row["untrained"]["filtered"]) == (2, 8)
    config = TrainConfig(group_filter=THEIRS, refill=1)
    assert without_signal(made, credit_settings(config)) == [True, False, True]


def test_samples_have_what_was_generated(tmp_path):
    body = (
        "def own(args, samples, **kwargs):\n    one, other = samples\n    assert (one.index, "
        "other.index, one.prompt) == (0, 1, [{'role': 'user', 'content': '2 + 5?'}])\n    "
        "assert (one.response, one.label, args.reward_key) == ('7', '7', None)\n    assert "
        "one.tokens[-one.response_length:] == list(b'7') + [one.tokens[-1]]\n    assert "
        "one.status is type(one).Status.COMPLETED\n    return "
        "DynamicFilterOutput(keep=other.get_reward_value(args) == 0.5)\n"
    )

    async def say(task, model):
        return float((await model.generate(task.messages)).text == "7")

    played = tw.rollout(
        say, [tw.Task("2 + 5?", "7")], tw.ScriptedEngine(["7"]), samples=2, renderer=byte_renderer()
    )
    config = TrainConfig(group_filter=write(tmp_path, body))
    settings = credit_settings(config)
    found = advantages([Group(played[0].task, played)], settings)
    assert ({credit.reason for credit in found.credits}, found.rejected) == ({"filtered"}, ())
    played[1].reward = 0.5
    assert {
        credit.reason for credit in advantages([Group(played[0].task, played)], settings).credits
    } == {None}


def test_a_function_of_trajectories_may_give_reasons_too(tmp_path):
    body = (
        "def own(found):\n    return DynamicFilterOutput(False, 'dull', "
        "keep_when_insufficient=found[0].reward == 0.5)\n"
    )
    config = TrainConfig(group_filter=write(tmp_path, body))
    found = advantages([group("a", 0.0, 1.0), group("b", 0.5, 1.0)], credit_settings(config))
    assert found.rejected == ("dull",)
    assert {one.trajectory.task.id: one.reason for one in found.credits} == {
        "a": "filtered",
        "b": None,
    }


@pytest.mark.parametrize("result", ["None", "'yes'", "samples"])
def test_another_result_is_one_line(tmp_path, result):
    config = TrainConfig(
        group_filter=write(tmp_path, f"def own(args, samples):\n    return {result}\n")
    )
    with pytest.raises(UsageError, match=r"task 'a': returned .*; return True to train the group"):
        advantages([group("a", 0.0, 1.0)], credit_settings(config))


def test_other_parameters_are_refused_before_anything_is_played(tmp_path):
    config = TrainConfig(
        group_filter=write(tmp_path, "def own(args, rollouts):\n    return True\n")
    )
    with pytest.raises(ConfigError, match="must take the trajectories of a group"):
        credit_settings(config)
