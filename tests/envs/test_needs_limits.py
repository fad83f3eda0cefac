"""Environments that depend on the limits of the run, and on the ids of their trajectory."""

import pytest

import turnwright as tw


class Limited(tw.Env):
    """Ends itself at the turn limit, reads truncated replies, and rewards the text
    that its ids decode to."""

    on_turn_length = "continue"
    received = 0

    def set_limits(self, limits):
        self.received += 1
        self.turns = limits.turns

    def reset(self, task, *, seed=None):
        self.left = self.turns
        return "Go."

    def step(self, action):
        self.left -= 1
        done = self.left == 0
        return tw.Step(
            f"{self.left} left", float(action.truncated), done, info={"received": self.received}
        )


class Reading(Limited):
    def set_decoder(self, decode):
        self.decode = decode

    def reward(self, trajectory):
        path = trajectory.path(trajectory.leaves()[-1])
        self.text = self.decode(path[trajectory.turns[0].context :])
        return float(
            self.text == "onetwo\nuser\n2 left\nassistant\ntwo\nuser\n1 left\nassistant\nend"
        )


LIMITS = tw.Limits(turns=3, turn_tokens=6)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_an_environment_receives_the_limits_once_and_may_read_truncated_replies(isolation):
    engine = tw.ScriptedEngine(["one two three", "two", "end"])
    (found,) = tw.rollout(
        Limited, [tw.Task()], engine, limits=LIMITS, rules=tw.EnvRules(isolation=isolation)
    )
    assert found.error is None, found.error
    assert (found.stop, found.reward) == (tw.StopReason.DONE, 1.0)
    assert [turn.info["received"] for turn in found.turns] == [1, 1, 1]


def test_an_environment_decodes_the_ids_of_its_trajectory_without_special_tokens():
    engine = tw.ScriptedEngine(["onetwo", "two", "end"])
    limits = tw.Limits(turns=3, turn_tokens=7)
    (found,) = tw.rollout(Reading, [tw.Task()], engine, limits=limits)
    assert found.error is None, found.error
    assert found.reward == 1.0


def test_an_environment_played_by_hand_receives_limits():
    import asyncio
    import random

    played = asyncio.run(
        tw.envs.play_scripted(
            Limited(), tw.Task("Go."), lambda messages, rng: "x", random.Random(0), turns=4
        )
    )
    assert len(played.trajectory.turns) == 4


def test_a_wrong_handling_of_truncated_replies_is_named():
    class Odd(Limited):
        on_turn_length = "cut"

    (found,) = tw.rollout(Odd, [tw.Task()], tw.ScriptedEngine(["x"]), limits=LIMITS)
    assert found.error is not None
    assert found.error.message == 'on_turn_length is \'cut\'; write "stop", "continue" or None'
