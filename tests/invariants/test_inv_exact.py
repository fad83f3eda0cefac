"""Invariants 1, 2, 3 and 7 of the rollout: what the engine saw and sampled is what the
record holds, id for id."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.play_functions import best_of_two, edited, planner_and_worker, verbatim
from kit.rollouts import AsyncTalk, Sampler, Talk, check_record, linear, renderer, tasks

import turnwright as tw
from turnwright.types import FAILED_ATTEMPT

KINDS = ("bytes", "bpe", "unigram")
FEW = settings(max_examples=25, deadline=None)


def vocabulary(kind: str) -> int:
    return 256 if kind == "bytes" else 250


@FEW
@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**32),
    abort=st.sampled_from((0.0, 0.4)),
    sync=st.booleans(),
)
def test_random_ids_survive_eight_turns_verbatim(kind, seed, abort, sync):
    engine = Sampler(vocabulary(kind), aborts=abort, ends=0.97)
    env = Talk if sync else AsyncTalk
    limits = tw.Limits(turn_tokens=13, on_turn_length="continue")
    rows = tw.rollout(env, tasks(2), engine, renderer=renderer(kind), seed=seed, limits=limits)
    odd = 0
    for trajectory in rows:
        check_record(trajectory, engine.calls)
        invalid = renderer(kind).invalid_ids
        if not any(set(span.ids) & invalid for span in trajectory.spans if span.sampled):
            assert (len(trajectory.turns), trajectory.stop) == (8, "done")
        assert linear(trajectory), "an episode that nobody rewrote is one sequence"
        text = renderer(kind)
        odd += sum(
            text.encode(text.decode(s.ids)) != list(s.ids) for s in trajectory.spans if s.sampled
        )
    assert odd, "no reply was non-canonical, so this proved little"


def test_a_reply_that_encodes_otherwise_is_kept_as_sampled():
    text = renderer("bpe")
    letters = [text.encode(letter)[0] for letter in "word"]
    assert text.encode("word") != letters
    assert text.decode(letters) == "word"
    reply = [*letters, min(text.stop_ids)]

    class Two(tw.Env):
        count = 0

        async def reset(self, task, *, seed=None):
            return "Go."

        async def step(self, action):
            assert action.text == "word"
            self.count += 1
            return tw.Step("On.", terminated=self.count == 8)

    (trajectory,) = tw.rollout(Two, tasks(1), tw.ScriptedEngine([reply] * 8), renderer=text)
    path = trajectory.path(len(trajectory.spans) - 1)
    assert "-".join(map(str, path)).count("-".join(map(str, reply))) == 8


PLAYS = (best_of_two, planner_and_worker, edited, verbatim)


@settings(max_examples=40, deadline=None)
# One worker ends the episode of the other.
@example(play=planner_and_worker, kind="bpe", seed=0, abort=0.4, delay=0.0)
@given(
    play=st.sampled_from(PLAYS),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**32),
    abort=st.sampled_from((0.0, 0.4)),
    delay=st.sampled_from((0.0, 1e-4)),
)
def test_play_functions_keep_the_invariants(play, kind, seed, abort, delay):
    engine = Sampler(vocabulary(kind), aborts=abort, delay=delay, ends=0.9)
    limits = tw.Limits(turns=40, turn_tokens=14, on_turn_length="continue")
    rows = tw.rollout(play, tasks(2), engine, renderer=renderer(kind), seed=seed, limits=limits)
    for trajectory in rows:
        assert trajectory.error is None, trajectory.error
        check_record(trajectory, engine.calls)
    asked = sum(len(call.ids) for call in engine.calls)
    spans = [span for trajectory in rows for span in trajectory.spans]
    # A call beside the one that ended it.
    asked -= sum(len(span.ids) for span in spans if span.untrained == FAILED_ATTEMPT)
    assert sum(sum(row.weights) for trajectory in rows for row in trajectory.samples()) == asked


def test_a_continued_best_of_two_is_one_trunk_with_two_leaves():
    engine = tw.ScriptedEngine(["left", "right", "end"])

    async def play(task, model):
        first, second = await asyncio.gather(model.generate("Q"), model.generate("Q"))
        assert (first.text, second.text) == ("left", "right")
        question = {"role": "user", "content": "Q"}
        await model.generate([question, second.message, {"role": "user", "content": "go on"}])
        return 1.0

    (trajectory,) = tw.rollout(play, tasks(1), engine)
    assert [turn.parent for turn in trajectory.turns] == [-1, -1, 1]
    assert len([span for span in trajectory.spans if span.origin == "prompt"]) == 1
    assert trajectory.branches == {}
    texts = [tw.byte_renderer().decode(row.ids) for row in trajectory.samples()]
    assert len(texts) == 2
    assert texts[0].endswith("left<|im_end|>")
    assert "right<|im_end|>\n" in texts[1]
    assert texts[1].endswith("end<|im_end|>")


def test_of_replies_with_equal_text_the_one_that_was_given_is_continued():
    """Two replies that read alike differ in ids; the message object says which of them goes on."""
    text = renderer("bpe")
    letters = [text.encode(letter)[0] for letter in "word"]
    stop = min(text.stop_ids)
    engine = tw.ScriptedEngine([[*text.encode("word"), stop], [*letters, stop], "end"])

    async def play(task, model):
        _, second = await asyncio.gather(model.generate("Q"), model.generate("Q"))
        await model.generate(
            [{"role": "user", "content": "Q"}, second.message, {"role": "user", "content": "go on"}]
        )
        return 1.0

    (trajectory,) = tw.rollout(play, tasks(1), engine, renderer=text)
    assert trajectory.error is None
    assert trajectory.turns[2].parent == 1
    received = trajectory.prompt_ids(2)
    at = received.index(letters[0])
    assert received[at : at + 5] == [*letters, stop]


def test_a_rewritten_reply_branches_and_loses_nothing():
    async def play(task, model):
        reply = await model.generate("Q")
        said = {"role": "assistant", "content": reply.text.upper()}
        await model.generate(
            [{"role": "user", "content": "Q"}, said, {"role": "user", "content": "go on"}]
        )
        return 1.0

    (trajectory,) = tw.rollout(play, tasks(1), tw.ScriptedEngine(["small", "end"]))
    assert trajectory.branches == {"edited": 1}
    weights = [sum(row.weights) for row in trajectory.samples()]
    assert weights == [6.0, 4.0]
    assert b"SMALL" in bytes(i for i in trajectory.prompt_ids(1) if i < 256)


def test_two_questions_that_begin_alike_are_no_edit():
    async def play(task, model):
        await model.generate("What is one?")
        await model.generate("What is two?")
        return 1.0

    (trajectory,) = tw.rollout(play, tasks(1), tw.ScriptedEngine(["1", "2"]))
    assert trajectory.branches == {}


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_turn_task_is_an_episode_of_one_turn(kind):
    class Once(tw.Env):
        async def reset(self, task, *, seed=None):
            return None

        async def step(self, action):
            return tw.Step(reward=1.0, terminated=True)

    engine = Sampler(vocabulary(kind))
    (trajectory,) = tw.rollout(Once, tasks(1), engine, renderer=renderer(kind))
    check_record(trajectory, engine.calls)
    assert (len(trajectory.turns), len(trajectory.spans), trajectory.stop, trajectory.reward) == (
        1,
        2,
        "done",
        1.0,
    )
    assert trajectory.turns[0].messages == trajectory.task.messages


def test_the_check_itself_can_fail():
    """The oracle of this file notices a lost id, a changed id, and a logprob on the wrong one."""
    engine = Sampler()
    (trajectory,) = tw.rollout(AsyncTalk, tasks(1), engine)
    number = next(
        i for i, span in enumerate(trajectory.spans) if span.sampled and len(span.ids) > 1
    )
    span = trajectory.spans[number]
    ids, logprobs = span.ids, span.logprobs
    for broken in (
        (ids[:-1], logprobs[:-1]),
        ((ids[0] + 1, *ids[1:]), logprobs),
        (ids, logprobs[::-1]),
    ):
        span.ids, span.logprobs = broken
        with pytest.raises(AssertionError):
            check_record(trajectory, engine.calls)
    span.ids, span.logprobs = ids, logprobs
    check_record(trajectory, engine.calls)
