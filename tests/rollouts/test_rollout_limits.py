"""Invariant 7 and the limits: no request exceeds the context, no budget is negative, and each
stop has its own reason."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.rollouts import AsyncTalk, Sampler, check_record, renderer, tasks

import turnwright as tw


class Chatty(AsyncTalk):
    turns = 20
    texts = ("short", "long " * 30, "\u4e2d" * 25)

    async def step(self, action):
        step = await super().step(action)
        self.truncated = getattr(self, "truncated", 0) + action.truncated
        return step


optional = st.none() | st.integers(1, 400)


@settings(max_examples=80, deadline=None)
@given(
    context=optional,
    engine_context=optional,
    episode_tokens=optional,
    turn_tokens=st.integers(1, 40),
    turns=st.integers(1, 9),
    observation_tokens=optional,
    on=st.sampled_from(("stop", "continue")),
    kind=st.sampled_from(("bytes", "bpe")),
    seed=st.integers(0, 2**32),
    abort=st.sampled_from((0.0, 0.3)),
)
def test_no_limit_is_ever_exceeded_and_the_stop_reason_is_right(
    context,
    engine_context,
    episode_tokens,
    turn_tokens,
    turns,
    observation_tokens,
    on,
    kind,
    seed,
    abort,
):
    limits = tw.Limits(
        turns=turns, turn_tokens=turn_tokens, on_turn_length=on, episode_tokens=episode_tokens, context=context,  # noqa: E501
        observation_tokens=observation_tokens,
    )  # fmt: skip
    text = renderer(kind)
    engine = Sampler(200, most=30, ends=0.5, aborts=abort, context=engine_context)
    engine.vocabulary = 256 if kind == "bytes" else 250
    rows = tw.rollout(Chatty, tasks(2), engine, renderer=text, limits=limits, seed=seed)
    most = min([c for c in (context, engine_context) if c is not None], default=10**9)
    for call in engine.calls:  # the kit holds every request to max_tokens >= 1
        assert len(call.context) + call.max_tokens <= most
        assert call.max_tokens <= turn_tokens
    for trajectory in rows:
        check_record(trajectory, engine.calls)
        assert trajectory.error is None
        assert len(trajectory.turns) <= turns
        used = trajectory.sampled_tokens + trajectory.observed_tokens
        assert episode_tokens is None or used <= episode_tokens
        for turn in trajectory.turns:
            assert sum(len(trajectory.spans[i].ids) for i in turn.spans) <= turn_tokens
        check_stop(trajectory, limits, most, used, text)


def check_stop(trajectory, limits, most, used, text):
    stop = trajectory.stop
    last = trajectory.turns[-1] if trajectory.turns else None
    cut = last is not None and last.finish == "length"
    size = len(trajectory.path(len(trajectory.spans) - 1))
    sampled = {i for span in trajectory.spans if span.sampled for i in span.ids}
    assert (stop == "invalid_token") == bool(sampled & text.invalid_ids)
    if stop == "max_turns":
        assert len(trajectory.turns) == limits.turns
    elif stop == "turn_length":
        assert cut
        assert limits.on_turn_length == "stop"
        assert sum(len(trajectory.spans[i].ids) for i in last.spans) == limits.turn_tokens
    elif stop == "context":
        assert size >= most
    elif stop == "episode_tokens":
        left_out = trajectory.metrics.get("observation_tokens_left_out", 0)
        assert used == limits.episode_tokens or used + left_out > limits.episode_tokens
    else:
        assert stop in ("done", "invalid_token")


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_reply_without_an_end_is_closed_by_template_ids_that_are_not_trained(kind):
    text = renderer(kind)
    close = text.encode_reply("")[-1]
    engine = tw.ScriptedEngine(["much too long a reply", "ok"])

    class Two(tw.Env):
        seen = ()

        async def reset(self, task, *, seed=None):
            return "Go."

        async def step(self, action):
            self.seen = (*self.seen, action.truncated)
            return tw.Step("more", terminated=len(self.seen) == 2, info={"seen": self.seen})

    limits = tw.Limits(turn_tokens=4, on_turn_length="continue")
    (trajectory,) = tw.rollout(Two, tasks(1), engine, renderer=text, limits=limits)
    origins = [str(span.origin) for span in trajectory.spans]
    assert origins == ["prompt", "model", "template", "env", "model"]
    assert trajectory.spans[2].ids == (close,)
    assert trajectory.spans[2].logprobs is None
    assert trajectory.turns[1].info["seen"] == (True, False)
    (row,) = trajectory.samples()
    at = row.ids.index(close, len(trajectory.spans[0].ids))
    assert (row.mask[at], row.weights[at]) == (0, 0.0)


def test_a_reply_without_an_end_stops_the_episode_by_default():
    (trajectory,) = tw.rollout(
        AsyncTalk, tasks(1), tw.ScriptedEngine(["long reply"]), limits=tw.Limits(turn_tokens=4)
    )
    assert (trajectory.stop, len(trajectory.turns), trajectory.turns[0].finish) == (
        "turn_length",
        1,
        "length",
    )
    assert trajectory.reward is not None


def test_done_wins_over_every_limit():
    class Once(tw.Env):
        async def reset(self, task, *, seed=None):
            return "Go."

        async def step(self, action):
            return tw.Step("observation " * 50, reward=1.0, terminated=True)

    limits = tw.Limits(turns=1, episode_tokens=3, context=60, observation_tokens=1)
    (trajectory,) = tw.rollout(Once, tasks(1), tw.ScriptedEngine(["ok"]), limits=limits)
    assert (trajectory.stop, trajectory.reward) == ("done", 1.0)
    assert trajectory.final[0].text == "observation " * 50


def test_the_turns_that_a_world_allows_itself_count():
    env = tw.tool_env(tools=[], max_turns=2)
    (trajectory,) = tw.rollout(
        env, [tw.Task("Say.", answer="x")], Sampler(), limits=tw.Limits(turns=5)
    )
    assert len(trajectory.turns) <= 2


@settings(max_examples=25, deadline=None)
@given(
    most=st.integers(0, 120),
    sizes=st.lists(st.integers(0, 90), min_size=0, max_size=4),
    kind=st.sampled_from(("bytes", "bpe", "unigram")),
    char=st.sampled_from(("a", "\u4e2d", "ab ", "<|im_end|>")),
)
def test_observations_keep_to_their_limit_with_a_mark_that_the_model_can_see(
    most, sizes, kind, char
):
    char = "ab " if kind == "unigram" and char == "\u4e2d" else char  # which it does not know
    said = [
        {"role": "tool" if i % 2 else "user", "content": char * size}
        for i, size in enumerate(sizes)
    ]

    class Says(tw.Env):
        count = 0

        async def reset(self, task, *, seed=None):
            return "Go."

        async def step(self, action):
            self.count += 1
            return tw.Step(said, terminated=self.count == 2)

    text = renderer(kind)
    engine = tw.ScriptedEngine(["a", "b"])
    (free,) = tw.rollout(Says, tasks(1), engine, renderer=text)
    (held,) = tw.rollout(
        Says, tasks(1), engine, renderer=text, limits=tw.Limits(observation_tokens=most)
    )
    assert (held.error, held.stop) == (None, "done")
    before, after = free.spans[2].ids, held.spans[2].ids
    cut = held.metrics.get("observation_tokens_cut", 0)
    if len(before) <= most:
        assert (before, cut) == (after, 0)
        return
    bare = len(
        text.extend([], held.spans[1].ids, [tw.Message(row["role"], "") for row in said]).ids
    )
    marks = (
        text.decode(after).count("\n[cut: ")
        if kind != "unigram"
        else text.decode(after).count("[cut:")
    )
    # Each mark costs its own ids; what the template writes is never cut.
    assert len(after) <= max(most, bare + 60 * len(said))
    assert bool(cut) == bool(marks)
    assert cut or not any(sizes)
    control = [i for i in after if i in set(text.codec.control.values())]
    assert len(control) == 2 * len(said) + 1, "a cut made a control token, or lost one"


async def greedy(task, model):
    """Asks for ten replies at once."""
    results = await asyncio.gather(
        *[model.generate(f"Q{i}") for i in range(10)], return_exceptions=True
    )
    got = [r for r in results if not isinstance(r, BaseException)]
    assert all(isinstance(r, tw.LimitReached) for r in results if isinstance(r, BaseException))
    return float(len(got))


@settings(max_examples=30, deadline=None)
@given(
    turns=st.integers(1, 12), episode_tokens=st.none() | st.integers(1, 60), turn_tokens=st.integers(1, 12),  # noqa: E501
    seed=st.integers(0, 2**32), delay=st.sampled_from((0.0, 1e-4)),
)  # fmt: skip
def test_limits_hold_for_calls_at_the_same_time(turns, episode_tokens, turn_tokens, seed, delay):
    limits = tw.Limits(
        turns=turns,
        turn_tokens=turn_tokens,
        episode_tokens=episode_tokens,
        on_turn_length="continue",
    )
    engine = Sampler(delay=delay)
    (trajectory,) = tw.rollout(greedy, tasks(1), engine, limits=limits, seed=seed)
    check_record(trajectory, engine.calls)
    assert trajectory.error is None
    assert len(trajectory.turns) <= turns
    assert episode_tokens is None or trajectory.sampled_tokens <= episode_tokens
    if episode_tokens is None:
        assert trajectory.reward == min(10, turns)


def test_the_least_of_all_budgets_is_asked_for():
    async def play(task, model):
        await model.generate("Q", max_tokens=5)
        await model.generate("Q", max_tokens=50)
        await model.generate("Q")
        return 0.0

    engine = Sampler(most=2)
    tw.rollout(play, tasks(1), engine, limits=tw.Limits(turn_tokens=7))
    assert [call.max_tokens for call in engine.calls] == [5, 7, 7]


def test_a_play_function_that_reaches_a_limit_ends_with_that_reason_and_no_reward():
    async def play(task, model):
        while True:
            await model.generate("Q")

    (trajectory,) = tw.rollout(play, tasks(1), Sampler(), limits=tw.Limits(turns=3))
    assert (trajectory.stop, len(trajectory.turns), trajectory.reward, trajectory.error) == (
        "max_turns",
        3,
        None,
        None,
    )


class Adds(tw.Env):
    """Remembers what it was told."""

    def reset(self, task, *, seed=None):
        return "Go."

    def step(self, action):
        type(self).seen.append(action)
        return tw.Step("On.")


CALL = '<tool_call>{"name": "add", "arguments": {"a": 12345, "b": 67890}}</tool_call>'


@settings(max_examples=25, deadline=None)
@given(
    turn_tokens=st.integers(1, 120),
    episode_tokens=st.none() | st.integers(1, 160),
    before=st.text("abc ", max_size=8),
    on=st.sampled_from(("stop", "continue")),
)
def test_what_a_limit_cut_off_is_never_a_malformed_call_unless_the_world_asked_for_it(
    turn_tokens, episode_tokens, before, on
):
    world = type("Adds", (Adds,), {"seen": []})
    limits = tw.Limits(
        turns=2, turn_tokens=turn_tokens, episode_tokens=episode_tokens, on_turn_length=on
    )
    (trajectory,) = tw.rollout(
        world, tasks(1), tw.ScriptedEngine([before + CALL] * 2), limits=limits
    )
    cut = [turn for turn in trajectory.turns if turn.finish == "length"]
    whole = len(trajectory.turns) - len(cut)
    assert [action.truncated for action in world.seen].count(False) == whole
    assert all(
        call.error is None
        for action in world.seen
        if not action.truncated
        for call in action.tool_calls
    )
    if on == "stop":
        assert not any(action.truncated for action in world.seen), (
            "the world was shown half a reply"
        )
        assert "malformed_calls" not in trajectory.metrics
        assert len(cut) <= 1
        assert not cut or trajectory.stop in ("turn_length", "episode_tokens")
    else:
        broken = [turn for turn in cut if turn.reply.call_error_kinds]
        assert trajectory.metrics.get("malformed_calls", 0) == len(broken)


def test_the_sanity_check_of_a_rollout_can_be_chosen():
    with pytest.raises(tw.UsageError, match='sanity is "strict"'):
        tw.rollout(Adds, tasks(1), Sampler(), sanity="loose")
    for sanity in ("strict", "ignore_strippable", "off"):
        world = type("Adds", (Adds,), {"seen": []})
        assert tw.rollout(world, tasks(1), Sampler(), sanity=sanity)[0].error is None
