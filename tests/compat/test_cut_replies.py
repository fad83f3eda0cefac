"""A reply that is cut at a limit is user code's to judge, and trains at each entrance as it
does in an environment."""

import pytest
from kit.double_precision import Model64
from kit.stand_ins import USERS
from kit.training import distance, gradient

import turnwright as tw
from turnwright.config import TrainConfig
from turnwright.config.schema import EnvConfig
from turnwright.envs.resolve import resolve_env
from turnwright.training import Trainer
from turnwright.types import Group

RENDERER = tw.byte_renderer()
CUT = "never ending"
PLANS = [["good", "good"], ["good", "bad"], [CUT], ["good", CUT]]
"""Replies of each sample; the longest one is over `turn_tokens`."""
ENTRANCES = {
    "slime": ("cut_slime.py:generate", {"custom_rm_path": "cut_slime.py:reward"}),
    "skyrl": ("cut_skyrl.py:Cut", {}),
    "verl": ("cut_verl.py:Cut", {}),
    "swift": ("swift:cut", {"external_plugins": ["cut_swift.py"], "reward_funcs": ["punished"]}),
    "play": ("cut_play.py:play", {}),
}


class Planned(tw.ScriptedEngine):
    """Gives each sample the replies of its plan."""

    def __init__(self, plans):
        super().__init__([], renderer=RENDERER)
        self.plans = plans
        self.calls = 0

    async def generate(self, request):
        self.calls += 1
        sample = int(request.session.split("/")[3])
        self._replies = self.plans[sample]
        return await super().generate(request)


class Punishes(tw.Env):
    """The environment that all of the files are."""

    def reset(self, task, *, seed=None):
        self.seen = 0
        return list(task.messages)

    def step(self, action):
        self.seen += 1
        if self.seen == 2:
            return tw.Step(terminated=True)
        return tw.Step("Again.")

    def reward(self, trajectory):
        if trajectory.stop == tw.StopReason.TURN_LENGTH:
            return -1.0
        return float("good" in trajectory.turns[-1].reply.text)


def played(play, plans=PLANS, **limits):
    """Return the trajectories of one group, and the engine."""
    engine = Planned(plans)
    tasks = [tw.Task("Go.", id="t")]
    limits = tw.Limits(**({"turns": 3, "turn_tokens": 6} | limits))
    found = tw.rollout(play, tasks, engine, samples=len(plans), renderer=RENDERER, limits=limits)
    assert [one.error for one in found] == [None] * len(plans)
    return sorted(found, key=lambda one: one.key.sample), engine


def learned(trajectories):
    """Return loss and gradient of a step on a group, without an update, with what
    it says of cut replies."""
    model = Model64(vocabulary=max(RENDERER.special_ids) + 1)
    settings = TrainConfig(
        lr=0.0, schedule="constant", max_grad_norm=1e9, max_mismatch=1e9, weight_decay=0.0
    )
    trainer = Trainer(model, settings)
    figures = trainer.step([Group(trajectories[0].task, trajectories)], step=0, steps=10).metrics
    return figures["loss"], gradient(model)


def entrance(name):
    use, args = ENTRANCES[name]
    spec = resolve_env(EnvConfig(use=use, args=args), base=USERS / "cut")
    return spec.agent_function


@pytest.mark.parametrize("name", list(ENTRANCES))
def test_a_cut_reply_trains_as_in_an_environment(name):
    expected, _ = played(Punishes)
    found, engine = played(entrance(name))
    assert engine.calls == 7

    assert [one.stop for one in found] == [one.stop for one in expected]
    assert [str(one.stop) for one in found[2:]] == ["turn_length", "turn_length"]
    assert (
        [one.reward for one in found] == [one.reward for one in expected] == [1.0, 0.0, -1.0, -1.0]
    )
    assert [[row.ids for row in one.samples()] for one in found] == [
        [row.ids for row in one.samples()] for one in expected
    ]
    assert [[row.mask for row in one.samples()] for one in found] == [
        [row.mask for row in one.samples()] for one in expected
    ]

    loss, expected_gradient = learned(expected)
    own_loss, own_gradient = learned(found)
    assert expected_gradient.norm() > 0
    assert abs(loss - own_loss) < 1e-6
    assert distance(own_gradient, expected_gradient) < 1e-6


@pytest.mark.parametrize("name", list(ENTRANCES))
def test_a_group_in_which_being_cut_is_what_is_punished_learns(name):
    """Its gradient was 0: the cut replies had no reward."""
    found, _ = played(entrance(name), [["good", "good"], [CUT], ["good", "good"], [CUT]])
    _, own = learned(found)
    assert own.norm() > 0


def test_a_cut_round_of_ms_swift_has_a_reward_of_its_own():
    """It had that of the round before."""
    spec = resolve_env(
        EnvConfig(use="swift:rounds", args={"external_plugins": ["cut_swift.py"]}),
        base=USERS / "cut",
    )
    (found,), _ = played(spec.agent_function, [["good", CUT]])
    assert found.reward == -1.0
    assert str(found.stop) == "turn_length"


def test_a_scheduler_that_asks_on_after_a_cut_reply_keeps_what_its_environment_gave():
    spec = resolve_env(
        EnvConfig(use="swift:stubborn", args={"external_plugins": ["cut_swift.py"]}),
        base=USERS / "cut",
    )
    (found,), engine = played(spec.agent_function, [["good", CUT, "good"]])
    assert engine.calls == 2
    assert found.reward == -1.0
    assert str(found.stop) == "turn_length"
