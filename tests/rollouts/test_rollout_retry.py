"""Failures that are recovered from: the same trajectory as without them, nothing sampled
lost, and budgets kept."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.rollouts import AsyncTalk, Sampler, Talk, facts, tasks

import turnwright as tw
from turnwright.records import read_json_lines, rebuild_trajectories
from turnwright.rollouts import Rollout, make_episode_specs
from turnwright.rollouts.resume import EarlierEpisodes
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright.training.advantages import CreditSettings, advantages
from turnwright.types import FAILED_ATTEMPT

FEW = settings(max_examples=30, deadline=None)
QUICK = tw.EnvRules(retries=tw.RetryRules(turn=2, wait_s=0.0))
LIMITS = tw.Limits(env_s=2.0, turns=12)


class Flaky:
    """Breaks at planned points, each once: (task, number of the call),
    whichever instance is asked."""

    plan: ClassVar[dict[tuple[str, int], str]] = {}
    opened = 0
    closed = 0
    drifts = False

    def reach(self, number):
        kind = type(self)
        fault = kind.plan.pop((self.task, number), "")
        if fault == "raises":
            raise ConnectionError("reset by peer")
        if fault == "tool":
            raise tw.ToolFailure("the index is down")
        return fault

    def begin(self, task):
        type(self).opened += 1
        self.task, self.calls = task.id, 0
        self.reach(0)

    def say(self):
        said = super().say()
        return f"{said} {random.random()}" if self.drifts else said


class FlakySync(Flaky, Talk):
    turns = 5

    def reset(self, task, *, seed=None):
        self.begin(task)
        return Talk.reset(self, task, seed=seed)

    def step(self, action):
        self.calls += 1
        self.reach(self.calls)
        return Talk.step(self, action)

    def close(self):
        type(self).closed += 1


class FlakyAsync(Flaky, AsyncTalk):
    turns = 5

    async def reset(self, task, *, seed=None):
        self.begin(task)
        return Talk.reset(self, task, seed=seed)

    async def step(self, action):
        self.calls += 1
        if self.reach(self.calls) == "hangs":
            await asyncio.sleep(60)
        return Talk.step(self, action)

    async def close(self):
        type(self).closed += 1


class Saves(FlakySync):
    """Half of its failures leave it in another state than it was in."""

    def snapshot(self):
        return self.left, self.rng.getstate(), self.calls

    def restore(self, state):
        self.left, _, self.calls = state
        self.rng.setstate(state[1])

    def step(self, action):
        self.calls += 1
        self.rng.random()
        self.left -= 3
        self.reach(self.calls)
        self.left += 3
        return Talk.step(self, action)


def kind(world, plan, **more):
    return type(world.__name__, (world,), {"plan": dict(plan), "opened": 0, "closed": 0} | more)


def play(world, plan=(), *, n=3, rules=QUICK, engine=None, **more):
    made = kind(world, plan, **more)
    limits = (
        LIMITS
        if not any(fault == "hangs" for fault in dict(plan).values())
        else tw.Limits(env_s=0.1, turns=12)
    )
    rows = tw.rollout(made, tasks(n), engine or Sampler(), limits=limits, rules=rules)
    assert made.opened == made.closed, "an environment was left open"
    assert not made.plan, "a planned failure was not met"
    return rows, made


@FEW
@given(
    world=st.sampled_from((FlakySync, FlakyAsync, Saves)),
    at=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 5)), unique_by=lambda pair: pair[0], min_size=1
    ),
    fault=st.sampled_from(("raises", "tool")),
)
def test_an_environment_that_fails_once_gives_the_trajectory_of_one_that_does_not(world, at, fault):
    expected, _ = play(world)
    got, made = play(world, {(f"t{task}", call): fault for task, call in at})
    assert [facts(t) for t in got] == [facts(t) for t in expected]
    calls = dict(at)
    for number, trajectory in enumerate(got):
        if number not in calls:
            assert trajectory.failures == []
            continue
        (failure,) = trajectory.failures
        call = calls[number]
        restored = world is Saves and call > 0
        assert failure.type == ("ConnectionError" if fault == "raises" else "ToolFailure")
        assert failure.kind == ("environment" if fault == "raises" else "tool")
        assert (failure.phase, failure.turn) == (("step", call - 1) if call else ("reset", -1))
        assert failure.recovery == ("restored" if restored else "replayed")
        assert failure.traceback
        assert [turn.retries for turn in trajectory.turns] == [
            int(i == call - 1) for i in range(len(trajectory.turns))
        ]
    fresh = sum(1 for call in calls.values() if world is not Saves or call == 0)
    assert made.opened == 3 + fresh


@pytest.mark.parametrize("call", [1, 3])
def test_a_step_that_hangs_is_replayed_in_a_fresh_instance(call):
    expected, _ = play(FlakyAsync, n=1)
    got, made = play(FlakyAsync, {("t0", call): "hangs"}, n=1)
    assert [facts(t) for t in got] == [facts(t) for t in expected]
    assert (got[0].failures[0].kind, got[0].failures[0].recovery, made.opened) == (
        "timeout",
        "replayed",
        2,
    )


@FEW
@given(call=st.integers(2, 5), world=st.sampled_from((FlakySync, FlakyAsync)))
def test_where_a_replay_says_something_else_the_episode_begins_anew_and_keeps_what_was_sampled(
    call, world
):
    engine = Sampler()
    (trajectory,), made = play(world, {("t0", call): "raises"}, n=1, engine=engine, drifts=True)
    (failure,) = trajectory.failures
    assert (failure.recovery, made.opened, trajectory.stop) == ("attempt", 3, "done")
    assert len(trajectory.failed_turns) == call
    assert len(trajectory.turns) == 5
    assert trajectory.sampled_tokens == sum(len(c.ids) for c in engine.calls)
    lost = sum(len(c.ids) for c in engine.calls if c.session.endswith("/0"))
    ledger = advantages([tw.Group(trajectory.task, [trajectory])], CreditSettings(min_group=1))
    assert sum(ledger.tokens.values()) == ledger.sampled == trajectory.sampled_tokens
    untrained = sum(len(span.ids) for span in trajectory.spans if span.untrained == FAILED_ATTEMPT)
    assert untrained == lost > 0
    weights = sum(sum(row.weights) for row in trajectory.samples())
    assert weights == sum(len(c.ids) for c in engine.calls if c.session.endswith("/1"))
    assert Counter(engine.released) == Counter({c.session for c in engine.calls})
    assert trajectory.reward == pytest.approx(sum(turn.reward for turn in trajectory.turns))


@pytest.mark.parametrize(("rules", "failures", "stop"), [
    (tw.EnvRules(), 0, "env_error"),
    (tw.EnvRules(retries=tw.RetryRules(turn=1, wait_s=0.0)), 1, "env_error"),
    (tw.EnvRules(retries=tw.RetryRules(turn=3, wait_s=0.0)), 3, "env_error"),
    (tw.EnvRules(retries=tw.RetryRules(turn=9, episode=2, wait_s=0.0)), 2, "env_error"),
])  # fmt: skip
def test_retries_keep_to_their_budgets_and_the_last_failure_ends_the_episode(rules, failures, stop):
    class Down(FlakySync):
        def step(self, action):
            raise ConnectionError("always")

    (trajectory,), _ = play(Down, n=1, rules=rules)
    assert (len(trajectory.failures), trajectory.stop, trajectory.reward) == (failures, stop, None)
    assert (trajectory.error.kind, trajectory.error.turn) == ("environment", 0)


def test_mistakes_in_code_are_not_tried_again():
    class Wrong(FlakySync):
        def step(self, action):
            return tw.Step(None.text)

    (trajectory,), made = play(Wrong, n=1)
    assert (trajectory.failures, made.opened, trajectory.error.kind) == ([], 1, "user_bug")
    file, _, line = trajectory.error.place.rpartition(":")
    assert "None.text" in Path(file).read_text().splitlines()[int(line) - 1]


def test_a_wait_between_retries_ends_with_the_episode():
    class Down(FlakySync):
        def step(self, action):
            raise ConnectionError("always")

    rules = tw.EnvRules(retries=tw.RetryRules(turn=9, wait_s=20.0))
    (trajectory,) = tw.rollout(
        kind(Down, {}), tasks(1), Sampler(), limits=tw.Limits(wall_clock_s=0.3), rules=rules
    )
    assert trajectory.stop == "wall_clock"


class Picky(AsyncTalk):
    """Takes only replies whose text is long enough."""

    least = 6

    async def step(self, action):
        if len(action.text) < self.least:
            raise tw.InvalidAction("too short")
        return Talk.step(self, action)


@FEW
@given(
    rejected=st.sampled_from(("trained", "untrained")),
    most=st.integers(1, 4),
    seed=st.integers(0, 50),
)
def test_asked_again_the_model_stands_where_it_stood_and_its_rejected_replies_stay(
    rejected, most, seed
):
    engine = Sampler(vocabulary=128)
    rules = tw.EnvRules(
        on_invalid="resample", rejected_replies=rejected, max_resamples_per_turn=most
    )
    (trajectory,) = tw.rollout(
        Picky, tasks(1), engine, rules=rules, seed=seed, limits=tw.Limits(turns=20)
    )
    asked = [turn for turn in trajectory.turns if turn.info.get("asked_again")]
    taken = [turn for turn in trajectory.turns if not turn.info.get("asked_again")]
    assert trajectory.branches.get("asked_again", 0) == len(asked)
    assert [c.context for c in engine.calls] == [
        tuple(trajectory.prompt_ids(i)) for i in range(len(trajectory.turns))
    ]
    for before, after in zip(trajectory.turns, trajectory.turns[1:], strict=False):
        if before.info.get("asked_again"):
            assert (after.context, after.prompt, after.messages) == (
                before.context,
                before.prompt,
                before.messages,
            )
            assert after.reply is not before.reply
    assert len([m for m in trajectory.messages if m.role == "assistant"]) == len(taken)
    whole = sum(sum(row.weights) for row in trajectory.samples())
    left_out = (
        sum(len(trajectory.spans[i].ids) for turn in asked for i in turn.spans)
        if rejected == "untrained"
        else 0
    )
    assert whole == trajectory.sampled_tokens - left_out
    ledger = advantages([tw.Group(trajectory.task, [trajectory])], CreditSettings(min_group=1))
    assert ledger.tokens.get("invalid_action", 0) in (left_out, 0)
    assert sum(ledger.tokens.values()) == trajectory.sampled_tokens


def test_rejected_replies_are_no_turns_of_the_limit_and_the_last_mistake_is_an_observation():
    class Never(AsyncTalk):
        async def step(self, action):
            raise tw.InvalidAction("no")

    rules = tw.EnvRules(on_invalid="resample", max_resamples_per_turn=2)
    (trajectory,) = tw.rollout(Never, tasks(1), Sampler(), rules=rules, limits=tw.Limits(turns=3))
    assert (trajectory.stop, len(trajectory.turns)) == ("max_turns", 9)
    assert [bool(turn.info.get("asked_again")) for turn in trajectory.turns] == [
        True,
        True,
        False,
    ] * 3
    assert trajectory.turns[3].messages[0].text == "no"
    assert trajectory.metrics["invalid_actions"] == 9


def test_asked_again_inside_a_message_goes_on_where_it_stood():
    class Inside(tw.Env):
        def reset(self, task, *, seed=None):
            self.n = 0
            return "Go."

        def step(self, action):
            self.n += 1
            if self.n == 2:
                raise tw.InvalidAction("no")
            return tw.Step(tw.InlineObservation(" and "), terminated=self.n == 4)

    rules = tw.EnvRules(on_invalid="resample")
    engine = tw.ScriptedEngine(["a", "bad", "b", "c"])
    (trajectory,) = tw.rollout(Inside, tasks(1), engine, rules=rules)
    assert trajectory.messages[-1].text == "a and b and c"


def told(trajectory):
    """All that a journal has to bring back."""
    failures = [
        (f.type, f.message, f.phase, f.kind, f.place, f.turn, f.recovery)
        for f in trajectory.failures
    ]
    turns = [(t.retries, t.reply, t.context, t.spans) for t in trajectory.turns]
    earlier = [
        (t.retries, t.reply, t.context, t.spans, dict(t.info)) for t in trajectory.failed_turns
    ]
    return facts(trajectory), failures, turns, earlier


@pytest.mark.parametrize("drifts", [False, True])
def test_a_run_cut_off_at_any_line_goes_on_to_the_same_episodes(tmp_path, drifts):
    made = kind(
        FlakySync, {("t0", 2): "raises", ("t1", 0): "tool", ("t2", 4): "raises"}, drifts=drifts
    )
    rows = tasks(3)
    by_id = {task.id: task for task in rows}
    full = tw.rollout(made, rows, Sampler(), limits=LIMITS, rules=QUICK, out=tmp_path / "full")
    lines = (tmp_path / "full" / "journal.jsonl").read_bytes().splitlines(keepends=True)
    back = rebuild_trajectories(read_json_lines(tmp_path / "full" / "journal.jsonl"), by_id.get)
    assert [told(back[t.key]) for t in full] == [told(t) for t in full]
    todo = make_episode_specs(kind(FlakySync, {}), rows, phase="rollout", step=0, rules=QUICK)
    for cut in range(0, len(lines) + 1, 3):
        path = tmp_path / f"cut{cut}.jsonl"
        path.write_bytes(b"".join(lines[:cut]))
        recorded = rebuild_trajectories(read_json_lines(path), by_id.get)
        engine = Sampler()

        async def go_on(recorded=recorded, engine=engine):
            return await Rollout(
                engine,
                tw.byte_renderer(),
                RolloutSettings(limits=LIMITS),
                earlier=EarlierEpisodes(finished=recorded),
            ).play(todo)

        again = asyncio.run(go_on())
        assert [t.key for t in again] == [t.key for t in full]
        assert {c.session.split("/")[2] for c in engine.calls} == {t.id for t in rows} - {
            k.task for k in recorded
        }
        if not drifts:
            assert [facts(t) for t in again] == [facts(t) for t in full]
    shutil.rmtree(tmp_path / "full")
