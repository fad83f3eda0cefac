"""A reward is a number, a flag is a boolean, whatever library they are of; anything else is an
error that says what it was."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from kit.rollouts import Sampler

import turnwright as tw
from turnwright.envs import take_step
from turnwright.errors import EnvError

NUMBERS: list[tuple[Any, float]] = [
    (1, 1.0),
    (0.25, 0.25),
    (np.float64(0.5), 0.5),
    (np.float32(0.5), 0.5),
    (np.float16(0.5), 0.5),
    (np.int64(2), 2.0),
    (np.uint8(2), 2.0),
    (np.array(0.75), 0.75),
    (Fraction(1, 4), 0.25),
    (Decimal("0.5"), 0.5),
]
NO_NUMBERS: list[Any] = [
    "1",
    "1.0",
    b"1",
    True,
    False,
    np.True_,
    np.str_("1.0"),
    np.array([1.0]),
    [1.0],
    (1.0,),
    {},
    object(),
]
FLAGS: list[tuple[Any, bool]] = [(True, True), (False, False), (np.True_, True), (np.False_, False)]
NO_FLAGS: list[Any] = ["no", "", "False", 1, 0, 0.0, None, [], b"no", np.int64(1), np.array([True])]
PLACES = ("step", "reward", "own", "turn", "part", "metric")
"""Where a number can be returned: from a step, as the episode's reward, and as the parts of one."""


class Pays(tw.Env):
    """Gives what its task names."""

    def reset(self, task: tw.Task, *, seed: int | None = None) -> str:
        self.info = task.info
        return "Go on."

    def step(self, action: tw.Action) -> tw.Step:
        info = self.info
        if info["place"] in ("flag", "cut"):
            flag = (NO_FLAGS if info["bad"] else [flag for flag, _ in FLAGS])[info["at"]]
            return tw.Step(
                "more", 1.0, **{"terminated" if info["place"] == "flag" else "truncated": flag}
            )
        return tw.Step(None, self.value if info["place"] == "step" else 0.0, True)

    @property
    def value(self) -> Any:
        return NO_NUMBERS[self.info["at"]] if self.info["bad"] else NUMBERS[self.info["at"]][0]

    def reward(self, trajectory: tw.Trajectory) -> Any:
        place = self.info["place"]
        if place == "reward":
            return self.value
        if place in ("own", "turn", "part", "metric"):
            return tw.Scores(
                self.value if place == "own" else 0.0,
                (self.value,) if place == "turn" else (),
                {"part": self.value} if place == "part" else {},
                {"metric": self.value} if place == "metric" else {},
            )
        return 0.0


def cases(bad: bool, numbers: list[Any], flags: list[Any]) -> list[tw.Task]:
    rows = [(place, at) for place in PLACES for at in range(len(numbers))]
    rows += [(place, at) for place in ("flag", "cut") for at in range(len(flags))]
    return [
        tw.Task("Go.", id=f"{place}-{at}", info={"place": place, "at": at, "bad": bad})
        for place, at in rows
    ]


def play(
    tasks: list[tw.Task], isolation: str, env: Any = Pays
) -> dict[tuple[str, int], tw.Trajectory]:
    rules = tw.EnvRules(isolation=isolation)
    found = tw.rollout(
        env, tasks, engine=Sampler(), limits=tw.Limits(turns=2, turn_tokens=3), rules=rules
    )
    return {(one.task.info["place"], one.task.info["at"]): one for one in found}


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_numbers_of_any_library_are_rewards_and_their_booleans_flags(isolation: str) -> None:
    for (place, at), one in play(cases(False, NUMBERS, FLAGS), isolation).items():
        assert one.error is None, (place, at, one.error)
        if place in ("flag", "cut"):
            ended = {"flag": "done", "cut": "env_truncated"}[place] if FLAGS[at][1] else "max_turns"
            assert one.stop == ended, (place, FLAGS[at])
            continue
        wanted = NUMBERS[at][1]
        got = {"part": one.rewards.get("part"), "metric": one.metrics.get("metric")}.get(
            place, one.reward
        )
        assert got == wanted, (place, NUMBERS[at])
        assert type(got) is float, (place, NUMBERS[at], type(got))


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_what_is_no_number_or_no_flag_is_an_error_that_says_what_was_returned(
    isolation: str,
) -> None:
    for (place, at), one in play(cases(True, NO_NUMBERS, NO_FLAGS), isolation).items():
        value = NO_FLAGS[at] if place in ("flag", "cut") else NO_NUMBERS[at]
        assert one.error is not None, (place, value, one.reward, one.stop)
        wanted = (
            ("env_error", "EnvError")
            if place in ("flag", "cut")
            else ("reward_error", "RewardError")
        )
        assert (one.stop, one.error.type) == wanted, (place, value, one.error)
        assert one.reward is None, (place, value)
        said = "<object object at" if type(value) is object else repr(value)
        assert said in one.error.message, (place, value, one.error.message)


@pytest.mark.parametrize("number", range(len(NO_NUMBERS) + len(NUMBERS)))
def test_reward_functions_parts_turns_and_groups_are_held_to_the_same(number: int) -> None:
    value, worth = [*((one, None) for one in NO_NUMBERS), *NUMBERS][number]

    function = lambda trajectory: value  # noqa: E731
    group = lambda trajectories: [value for _ in trajectories]  # noqa: E731
    for name, env in {
        "function": tw.tool_env([], reward=function),
        "part": tw.tool_env([], reward=tw.rewards(part=function)),
        "turn": tw.tool_env(
            [], reward=tw.rewards(part=tw.RewardPart(lambda trajectory, turn: value, of="turn"))
        ),
        "group": tw.tool_env([], reward=tw.rewards(part=tw.RewardPart(group, of="group"))),
    }.items():
        (one,) = tw.rollout(
            env, [tw.Task("Go.")], engine=Sampler(), limits=tw.Limits(turns=1, turn_tokens=3)
        )
        assert one.reward == worth, (name, one.error)
        if worth is None:
            assert one.error is not None
            assert (one.error.type, one.stop) == ("RewardError", "reward_error"), (name, one.error)


def test_the_check_of_an_environment_says_it_too() -> None:
    class Wavers(Pays):
        def step(self, action: tw.Action) -> tw.Step:
            return tw.Step("more", 1.0, terminated="no")

    env = Wavers()
    with pytest.raises(EnvError, match="terminated is 'no'"):
        asyncio.run(take_step(env, tw.Action("x", tw.Message("assistant", "x"))))
