"""The loop run again against what was recorded: equal where nothing changed, and
told where it is not."""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.histories import Look
from kit.histories import renderer as speaking
from kit.inline_worlds import Wild
from kit.play_functions import Breaks, best_of_two, edited, planner_and_worker, verbatim
from kit.rollouts import AsyncTalk, Sampler, renderer, tasks
from kit.routes import Speaking

import turnwright as tw
from turnwright.engines import Generation
from turnwright.errors import TraceError
from turnwright_view import replay_loop
from turnwright_view.replay import engine

KINDS = ("bytes", "bpe")


@dataclass
class Fails(Sampler):
    """Now and then fails before it answers, takes a new policy, and aborts."""

    share: float = 0.0
    failed: set[tuple[str, int]] = field(default_factory=set)

    async def generate(self, request: tw.Request) -> Generation:
        rng = self.rng(request)
        if rng.random() < self.share and (request.session, request.call) not in self.failed:
            self.failed.add((request.session, request.call))
            raise rng.choice([tw.EngineError("no memory"), ConnectionError("refused")])
        made = await super().generate(request)
        made.version = rng.randrange(5)
        return made


class World(AsyncTalk):
    """Says and does all that a world may, by its seed: failures on every call, refusals, rewards of
    every kind, long texts."""

    share = 0.0
    drifts = False
    restores = False

    @property
    def snapshots(self):
        return self.restores

    tools = ({"type": "function", "function": {"name": "f", "parameters": {}}},)

    def trouble(self, where):
        if random.random() < self.share:  # another time it goes well, or not
            raise random.choice(
                [OSError(f"{where} gone"), tw.ToolFailure("index down"), KeyError("a bug")][
                    : 2 + self.drifts
                ]
            )

    async def reset(self, task, *, seed=None):
        self.turns = random.Random(seed).randint(1, 6)
        self.trouble("reset")
        opening = await super().reset(task, seed=seed)
        return (
            [opening, str(random.random())] if self.drifts and isinstance(opening, str) else opening
        )

    async def step(self, action):
        self.trouble("step")
        kind = self.rng.randrange(12)
        if kind == 0:
            raise tw.InvalidAction("say it otherwise")
        made = await super().step(action)
        if kind == 1:
            return made._replace(reward=None)
        if kind == 2:
            return made._replace(
                truncated=True, terminated=False, observation="cut \u00e9 <|im_end|>"
            )
        if kind == 3:
            return made._replace(observation="long " * 60)
        if kind == 4:
            return made._replace(reward=math.nan)
        return made

    def snapshot(self):
        return self.left, self.rng.getstate()

    def restore(self, state):
        self.trouble("step")
        self.left = state[0]
        self.rng.setstate(state[1])

    async def reward(self, trajectory):
        if random.random() < self.share:
            raise OSError("judge down")
        rng = random.Random(trajectory.key.sample)
        turns = tuple(rng.random() for _ in trajectory.turns)
        kinds: list[Any] = [
            0.1 + rng.random(),
            None,
            math.inf,
            tw.Scores(0.3, turns, {"form": 0.3, "turns": sum(turns)}, {"judge_calls": 1}),
        ]
        return kinds[rng.choice([0, 0, 1, 2, 3, 3, 3])]

    async def close(self):
        if random.random() < self.share / 4:
            raise OSError("close gone")


def compare_all(trajectories):
    """A reward of a group, which fails now and then."""
    if random.random() < 0.2:
        raise OSError("judge of all down")
    return [trajectory.reward / 3 - 0.1 for trajectory in trajectories]


def group(share, drifts, restores, grouped):
    body = {"share": share, "drifts": drifts, "restores": restores}
    return type(
        "World", (World,), body | ({"group_reward": staticmethod(compare_all)} if grouped else {})
    )


@settings(max_examples=30, deadline=None)
@given(
    share=st.sampled_from((0.0, 0.15)),
    fails=st.sampled_from((0.0, 0.2)),
    drifts=st.booleans(),
    restores=st.booleans(),
    grouped=st.booleans(),
    ask=st.sampled_from(("observe", "resample")),
    history=st.sampled_from(("append", "append", "inline", "template", "drop_reasoning:1")),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**32),
    abort=st.sampled_from((0.0, 0.3)),
    most=st.integers(1, 9),
)
def test_a_loop_that_did_not_change_comes_to_what_was_recorded(
    tmp_path_factory, share, fails, drifts, restores, grouped, ask, history, kind, seed, abort, most
):
    out = tmp_path_factory.mktemp("run")
    random.seed(seed)
    rules = tw.EnvRules(
        on_invalid=ask, retries=tw.RetryRules(turn=2, episode=4, engine=1, reward=1, wait_s=0.0)
    )
    limits = tw.Limits(
        turns=most,
        turn_tokens=14,
        on_turn_length="continue",
        observation_tokens=60,
        episode_tokens=500,
    )
    made = group(share, drifts, restores, grouped)
    engine = Fails(200 if kind == "bytes" else 250, aborts=abort, ends=0.9, share=fails)
    words = {
        "renderer": renderer(kind),
        "limits": limits,
        "rules": rules,
        "history": history,
        "seed": seed,
    }
    played = tw.rollout(made, tasks(3), engine, samples=2, out=out, **words)
    found = replay_loop(out, renderer=renderer(kind))
    assert (found.episodes, found.left_out) == (len(played), {})
    assert found.differences == []


@settings(max_examples=25, deadline=None)
@given(
    play=st.sampled_from((best_of_two, planner_and_worker, edited, verbatim)),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**32),
    abort=st.sampled_from((0.0, 0.3)),
    delay=st.sampled_from((0.0, 1e-4)),
)
def test_calls_side_by_side_are_answered_in_the_recorded_order(
    tmp_path_factory, play, kind, seed, abort, delay
):
    out = tmp_path_factory.mktemp("run")
    engine = Fails(200 if kind == "bytes" else 250, aborts=abort, delay=delay, ends=0.9)
    limits = tw.Limits(turns=20, turn_tokens=14, on_turn_length="continue")
    played = tw.rollout(
        play, tasks(2), engine, renderer=renderer(kind), limits=limits, seed=seed, out=out
    )
    found = replay_loop(out, env=play, tasks=tasks(2), renderer=renderer(kind))
    assert (found.episodes, found.differences) == (len(played), [])
    assert replay_loop(out, renderer=renderer(kind)).left_out.total() == len(played)


HALTS: list[float] = []
"""For how long the loop of this process stands still before a call, where it does."""


async def two_workers(task, model):
    """Two side by side; before further calls of the first the machine may halt."""

    async def work(number):
        messages = [{"role": "user", "content": f"Part {number}."}]
        for turn in range(3):
            if number == 0 and turn and HALTS:
                time.sleep(HALTS[0])
                for _ in range(10):
                    await asyncio.sleep(0)
            reply = await model.generate(messages, agent=f"worker {number}")
            messages = [*messages, reply.message, {"role": "user", "content": "More."}]

    await asyncio.gather(work(0), work(1))
    return 0.5


class Late(Sampler):
    """Answers the second of them when the first has all its answers."""

    async def generate(self, request):
        if request.agent == "worker 1":
            await asyncio.sleep(0.05)
        return await super().generate(request)


def test_a_machine_that_halts_does_not_change_the_order(tmp_path, monkeypatch):
    """For longer than a recorded answer is held back until the calls before it were made."""
    monkeypatch.setattr(engine, "MAX_DELAY_S", 0.1)
    tw.rollout(
        two_workers, tasks(2), Late(), limits=tw.Limits(turns=20), seed=3, out=tmp_path / "run"
    )
    monkeypatch.setattr(sys.modules[__name__], "HALTS", [0.2])
    assert replay_loop(tmp_path / "run", env=two_workers, tasks=tasks(2)).differences == []


def recorded(out, env=AsyncTalk, **more):
    return tw.rollout(env, tasks(3), Sampler(), limits=tw.Limits(turns=4), out=out, seed=5, **more)


class Reworded(AsyncTalk):
    """Says one thing otherwise, in its third step."""

    async def step(self, action):
        made = await super().step(action)
        return made._replace(observation="otherwise") if self.left == 5 else made


def test_a_changed_environment_is_told_by_its_first_observation_that_differs(tmp_path):
    played = recorded(tmp_path)
    found = replay_loop(tmp_path, env=Reworded, tasks=tasks(3))
    assert found.episodes == found.different == 3
    for one in found.differences:
        trajectory = next(t for t in played if t.key == one.key)
        assert (one.what, one.turn, one.origin) == ("prompt", 3, "env")
        assert trajectory.prompt_ids(3)[one.position : one.position + 8] == list(one.recorded_ids)
        assert one.recorded_ids != one.now_ids
        assert len(trajectory.prompt_ids(2)) < one.position < len(trajectory.prompt_ids(3))
    assert replay_loop(tmp_path, env=AsyncTalk, tasks=tasks(3)).ok


class Pays(AsyncTalk):
    """Pays twice as much."""

    async def step(self, action):
        made = await super().step(action)
        return made._replace(reward=2 * made.reward)


def test_changed_rewards_limits_histories_and_renderers_are_told(tmp_path):
    recorded(tmp_path)
    rewards = replay_loop(tmp_path, env=Pays, tasks=tasks(3)).differences
    assert {one.what for one in rewards} == {"reward"}
    assert {one.turn for one in rewards} == {-1, 0, 1, 2, 3}
    own = replay_loop(tmp_path, reward=lambda trajectory: 10.0).differences
    assert {one.what for one in own} == {"reward"}
    fewer = replay_loop(tmp_path, limits=tw.Limits(turns=2))
    assert {(one.recorded, one.now) for one in fewer.differences if one.what == "turns"} == {
        ("4", "2")
    }
    more = replay_loop(tmp_path, limits=tw.Limits(turns=5))
    assert {(one.recorded, one.now) for one in more.differences} == {
        ("4 turns, max_turns", "one more turn")
    }
    cut = replay_loop(tmp_path, limits=tw.Limits(turns=4, turn_tokens=3)).differences
    assert {one.what for one in cut} == {"reply"}
    other = replay_loop(tmp_path, renderer=renderer("bpe")).differences
    assert {(one.what, one.turn, one.position) for one in other} == {("prompt", 0, 0)}
    assert replay_loop(tmp_path, only=lambda key: key.task == "t1").episodes == 1


def test_a_history_that_a_policy_changes_branches_elsewhere(tmp_path):
    recorded(tmp_path)
    first = lambda conversation, replies: conversation[:1] + conversation[-2:]  # noqa: E731
    found = replay_loop(tmp_path, history=first)
    assert {one.what for one in found.differences} == {"prompt"}


def test_journals_of_older_releases_are_played_with_their_environment_alone(tmp_path):
    played = recorded(tmp_path)
    path = tmp_path / "journal.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    new = ("settings", "said", "tools", "scores", "call")
    old = [
        {name: value for name, value in event.items() if name not in new}
        for event in events
        if event["e"] not in new
    ]
    path.write_text("".join(json.dumps(event) + "\n" for event in old))
    found = replay_loop(tmp_path)
    assert (found.episodes, found.ok) == (0, False)
    assert list(found.left_out) == [
        "recorded by a release without the necessary settings: pass the environment (--env)"
    ]
    words = {"env": AsyncTalk, "tasks": tasks(3), "limits": tw.Limits(turns=4)}
    found = replay_loop(tmp_path, **words)
    assert {one.what for one in found.differences} <= {"prompt"}, (
        "the seed of an old journal is not in it"
    )
    assert found.episodes == len(played)


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(TraceError, match=r"journal\.jsonl: is not there"):
        replay_loop(tmp_path)
    recorded(tmp_path, renderer=renderer("bpe"))
    with pytest.raises(tw.UsageError, match="which is not the built-in one"):
        replay_loop(tmp_path)
    found = replay_loop(tmp_path, env=AsyncTalk, renderer=renderer("bpe"))
    assert dict(found.left_out) == {"the run does not hold its task: give tasks=": 3}


@settings(max_examples=15, deadline=None)
@given(
    world=st.sampled_from((Wild, Look, Breaks)),
    history=st.sampled_from(("append", "inline", "template", "drop_reasoning:1")),
    name=st.sampled_from(("strips_on_user", "folds", "swaps")),
    seed=st.integers(0, 2**32),
)
def test_tools_rewinds_branches_and_experts_come_again(
    tmp_path_factory, world, history, name, seed
):
    out = tmp_path_factory.mktemp("run")
    text = speaking(name)
    if world is Look and history == "inline":
        history = "append"
    rules = tw.EnvRules(retries=tw.RetryRules(turn=3, wait_s=0.0))
    limits = tw.Limits(turns=12, turn_tokens=60, on_turn_length="continue", context=900)
    words = {"renderer": text, "limits": limits, "rules": rules, "history": history, "seed": seed}
    played = tw.rollout(
        world, tasks(2), Speaking(250, text=text, aborts=0.2), out=out, want=["routes"], **words
    )
    found = replay_loop(out, renderer=text)
    assert (found.episodes, found.differences) == (len(played), [])
    assert any(turn.extras for trajectory in played for turn in trajectory.turns)
