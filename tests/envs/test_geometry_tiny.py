"""The environment of the tiny geometry recipes: calls, rambling, and the rewards of the control."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import turnwright as tw
from turnwright.cli.main import main
from turnwright.config import EnvConfig, load
from turnwright.envs import play_scripted, resolve_env
from turnwright.envs.builtin import BUILTIN, common
from turnwright.errors import ConfigError, EnvError
from turnwright.records.episode_metrics import rollout_metrics

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def world(name="Figures", **args):
    return resolve_env(EnvConfig(use=f"{RECIPES / 'geometry_tiny.py'}:{name}", args=args))


SHORT, LONG = world(figures=2, turns=3), world(figures=5, turns=20)


def play(spec, player, n=60, **more):
    limits = tw.Limits(turns=spec.max_turns, turn_tokens=4096)
    engine = tw.ScriptedEngine(player)
    return tw.rollout(spec.factory, spec.tasks("train", n, 3), engine, limits=limits, **more)


def by_hand(spec, task, *replies):
    """Play the replies in order, the last one again where they do not suffice."""
    left = list(replies)

    def speak(messages, rng):
        return left.pop(0) if len(left) > 1 else left[0]

    played = play_scripted(spec.factory(), task, speak, random.Random(0), turns=spec.max_turns)
    return asyncio.run(played).trajectory


def answers(task):
    return [f"{2 * np.pi * circle['a']:.1f}" for circle in task.info["circles"]]


def call(answer):
    return common.tool_call("check_answer", answer=answer)


def images(spec, task):
    """Return the pixels of all images of a task, as its solver sees them."""
    played = by_hand(spec, task, *map(call, answers(task)))
    messages = [message for turn in played.turns for message in turn.messages]
    parts = [part for message in messages for part in parts_of(message)]
    return [np.asarray(part.value) for part in parts if isinstance(part, tw.Image)]


def parts_of(message):
    return (message.content,) if isinstance(message.content, str) else message.content


@pytest.mark.parametrize("name", ["Figures", "Shuffled"])
def test_the_contract_holds(name, capsys):
    assert main(["check", f"{RECIPES / 'geometry_tiny.py'}:{name}"]) == 0
    assert "The solver has the reward 1" in capsys.readouterr().out


@pytest.mark.parametrize(("spec", "figures"), [(SHORT, 2), (LONG, 5)])
def test_the_solver_needs_a_call_for_each_circle(spec, figures):
    played = play(spec, spec.solver)
    assert {(one.reward, len(one.turns)) for one in played} == {(1.0, figures)}
    assert spec.single_turn_best == 0.0


@pytest.mark.parametrize("spec", [SHORT, LONG])
def test_one_reply_is_never_enough(spec):
    for task in spec.tasks("eval", 20, 0):
        right = [call(answer) for answer in answers(task)]
        for reply in (right[0], "".join(right), right[0] * 2, f"\\boxed{{{answers(task)[0]}}}"):
            assert by_hand(spec, task, reply, "I give up").reward == 0.0
        assert by_hand(spec, task, *right).reward == 1.0


def test_a_wrong_call_costs_a_turn_and_a_reply_without_a_call_ends_the_episode():
    task = SHORT.tasks("train", 1, 0)[0]
    first, second = answers(task)
    assert by_hand(SHORT, task, call("7"), call(first), call(second)).reward == 1.0
    late = by_hand(SHORT, task, call("7"), call("7"), call(first), call(second))
    assert (late.reward, len(late.turns)) == (0.0, 3)
    gave_up = by_hand(SHORT, task, call(first), second, call(second))
    assert (gave_up.reward, len(gave_up.turns)) == (0.0, 2)
    malformed = by_hand(SHORT, task, "<tool_call>{</tool_call>", call(first), call(second))
    assert malformed.reward == 1.0
    assert by_hand(SHORT, task, call("x" * 100_000), call(first), call(second)).reward == 1.0


def test_what_is_no_task_of_it_is_refused():
    with pytest.raises(EnvError, match="with 5 circles"):
        by_hand(LONG, SHORT.tasks("train", 1, 0)[0], "one")
    for figures in (1, 4):
        with pytest.raises(ConfigError, match="figures are 2 to the number of turns"):
            world(figures=figures, turns=3)


def test_only_the_image_has_the_radius():
    """A circle of radius a is 2 a / 12 of an image wide; the texts of the opening do not have a."""
    tasks = LONG.tasks("train", 30, 0)
    openings = set()
    for task in tasks:
        parts = [part for message in LONG.factory().reset(task) for part in parts_of(message)]
        openings.add(tuple(part for part in parts if isinstance(part, str)))
    assert len(openings) == 1
    for task in tasks:
        for circle, pixels in zip(task.info["circles"], images(LONG, task), strict=True):
            columns = np.nonzero((pixels < 200).any(axis=(0, 2)))
            assert pixels.shape == (64, 64, 3)
            assert np.ptp(columns) == pytest.approx(2 * circle["a"] * 64 / 12, abs=1.5)


def test_the_splits_have_no_sequence_of_radii_and_no_image_in_common():
    seen = {}
    for split in ("train", "eval"):
        tasks = SHORT.tasks(split, 150, 0)
        radii = {tuple(circle["a"] for circle in task.info["circles"]) for task in tasks}
        seen[split] = radii, {pixels.tobytes() for task in tasks for pixels in images(SHORT, task)}
    for train, held_out in zip(seen["train"], seen["eval"], strict=True):
        assert train
        assert held_out
        assert not train & held_out


@pytest.mark.parametrize(("spec", "low", "high"), [(SHORT, 2.2, 3.0), (LONG, 8.0, 15.0)])
def test_the_demonstrator_rambles_repeats_and_takes_many_turns(spec, low, high):
    played = play(spec, spec.demonstrator, 150)
    rambled, optimal = rollout_metrics(played), rollout_metrics(play(spec, spec.solver, 150))
    assert rambled["repetition"] > optimal["repetition"] + 0.2
    assert rambled["reply_tokens"]["mean"] > 1.8 * optimal["reply_tokens"]["mean"]
    assert low < sum(len(one.turns) for one in played) / len(played) < high


def test_the_demonstrator_repeats_calls_and_succeeds_only_at_times():
    again = wrong = 0
    played = play(LONG, LONG.demonstrator, 150)
    for one in played:
        calls = [turn.reply.tool_calls[0].arguments["answer"] for turn in one.turns]
        for turn, before, after in zip(one.turns, calls, calls[1:], strict=False):
            wrong += not turn.info["right"]
            again += not turn.info["right"] and before == after
    assert 0.3 < again / wrong < 0.6
    assert 0.1 < sum(one.reward for one in play(SHORT, SHORT.demonstrator, 150)) / 150 < 0.8


def test_the_control_permutes_the_rewards_of_a_group_and_nothing_else():
    control = world("Shuffled", figures=2, turns=3)
    tasks = control.tasks("train", 20, 0)
    assert [task.info for task in tasks] == [task.info for task in SHORT.tasks("train", 20, 0)]
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    moved = 0
    for number in range(20):
        key = tw.EpisodeKey("train", number, "task", 0)
        group = [SimpleNamespace(reward=reward, key=key) for reward in rewards]
        added = control.group_reward(group)
        dealt = [reward + more for reward, more in zip(rewards, added, strict=True)]
        assert Counter(dealt) == Counter(rewards)
        assert added == control.group_reward(group)
        moved += dealt != rewards
    assert moved > 15


def test_a_rollout_of_the_control_has_permuted_rewards():
    control = world("Shuffled", figures=2, turns=3)
    limits = tw.Limits(turns=3, turn_tokens=4096)
    tasks = control.tasks("train", 12, 0)
    own, dealt = (
        tw.rollout(env, tasks, tw.ScriptedEngine(SHORT.demonstrator), samples=8, limits=limits)
        for env in (type(SHORT.factory()), type(control.factory()))
    )
    groups = [slice(start, start + 8) for start in range(0, 96, 8)]
    assert [one.reward for one in own] != [one.reward for one in dealt]
    for group in groups:
        before, after = (Counter(one.reward for one in played[group]) for played in (own, dealt))
        assert before == after


def test_both_recipes_press_by_a_limit_and_not_by_the_reward():
    for name in ("short", "long"):
        config = load(RECIPES / f"geometry_tiny_{name}.toml", envs=tuple(BUILTIN)).config
        assert config.limits.episode_tokens is not None
        assert config.train.overlong_tokens is None
        assert config.limits.turns == config.env[0].args["turns"] == {"short": 3, "long": 20}[name]
