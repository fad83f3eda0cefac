"""What an agent function sees of a reply that breaks a limit, and what its episode is then."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.rollouts import Sampler, check_record, renderer, tasks

import turnwright as tw

TEXTS = ("yes", "no \u00e9\u4e2d", "line\nline", "long " * 20)
LONG = "a reply that is too long"
SHORT = tw.Limits(turns=8, turn_tokens=6)


def judged(trajectory):
    """A reward that depends on how the episode ended."""
    return float(len(trajectory.turns)) - 10.0 * (
        trajectory.turns[-1].finish == "length" if trajectory.turns else 0
    )


class Talks(tw.Env):
    """Says something for some turns."""

    async def reset(self, task, *, seed=None):
        self.rng = random.Random(task.id)
        self.left = 6

    async def step(self, action):
        self.left -= 1
        return tw.Step(self.rng.choice(TEXTS), terminated=self.left <= 0)

    async def reward(self, trajectory):
        return judged(trajectory)

    async def close(self):
        pass


def talk(ends):
    """Return the same as a play function, which ends at a cut reply, or asks on
    until the limit stops it."""

    async def play(task, model):
        rng = random.Random(task.id)
        messages = list(task.messages)
        for _ in range(6):
            try:
                reply = await model.generate(messages)
            except tw.LimitReached:
                return judged(model.trajectory)
            if ends and reply.finish == "length" and model.limits.on_turn_length == "stop":
                return judged(model.trajectory)
            messages += [reply.message, {"role": "user", "content": rng.choice(TEXTS)}]
        return judged(model.trajectory)

    return play


optional = st.none() | st.integers(60, 400)


@settings(max_examples=60, deadline=None)
@given(
    context=optional,
    episode_tokens=optional,
    turn_tokens=st.integers(1, 40),
    turns=st.integers(1, 8),
    on=st.sampled_from(("stop", "continue")),
    kind=st.sampled_from(("bytes", "bpe")),
    seed=st.integers(0, 2**32),
    abort=st.sampled_from((0.0, 0.3)),
    ends=st.booleans(),
)
def test_a_function_that_asks_what_an_environment_asks_has_its_episode(
    context, episode_tokens, turn_tokens, turns, on, kind, seed, abort, ends
):
    limits = tw.Limits(
        turns=turns,
        turn_tokens=turn_tokens,
        on_turn_length=on,
        episode_tokens=episode_tokens,
        context=context,
    )

    def rows(player):
        engine = Sampler(200, most=30, ends=0.5, aborts=abort)
        engine.vocabulary = 256 if kind == "bytes" else 250
        found = tw.rollout(
            player, tasks(2), engine, renderer=renderer(kind), limits=limits, seed=seed
        )
        for trajectory in found:
            check_record(trajectory, engine.calls)
            assert trajectory.error is None
        return found

    for own, expected in zip(rows(talk(ends)), rows(Talks), strict=True):
        assert own.reward == expected.reward
        assert own.stop == expected.stop
        mine, theirs = (
            [(row.ids, row.mask, row.logprobs) for row in one.samples()] for one in (own, expected)
        )
        # After its last step an environment has not rendered the observation that a
        # function has not either.
        assert [row[1].count(1) for row in mine] == [row[1].count(1) for row in theirs]
        assert [span.ids for span in own.spans if span.sampled] == [
            span.ids for span in expected.spans if span.sampled
        ]


def episode(play, replies, **limits):
    engine = tw.ScriptedEngine(replies)
    (found,) = tw.rollout(
        play, [tw.Task("Go.")], engine, limits=tw.Limits(**{"turns": 8, "turn_tokens": 6} | limits)
    )
    return found


def reason_of(call):
    """Run a call that a limit refuses; return the limit and its text."""

    async def run():
        with pytest.raises(tw.LimitReached) as caught:
            await call
        return caught.value.reason, str(caught.value)

    return run()


def test_the_conversation_of_a_cut_reply_cannot_go_on():
    seen = {}

    async def play(task, model):
        messages = [{"role": "user", "content": "Go."}]
        reply = await model.generate(messages)
        seen["finish"], seen["text"] = reply.finish, reply.text
        more = {"role": "user", "content": "more"}
        seen["message"] = await reason_of(model.generate([*messages, reply.message, more]))
        copied = {"role": "assistant", "content": reply.text}
        seen["copied"] = await reason_of(model.generate([*messages, copied, more]))
        prompt = await model.render(messages, {})
        seen["ids"] = await reason_of(
            model.generate([*prompt, *reply.ids, *more["content"].encode()])
        )
        seen["itself"] = await reason_of(model.generate([*prompt, *reply.ids]))
        return 0.5

    found = episode(play, [LONG] * 8)
    assert seen["finish"] == "length"
    assert LONG.startswith(seen["text"])
    for name in ("message", "copied", "ids", "itself"):
        reason, text = seen[name]
        assert reason == "turn_length"
        assert "turn 0" in text
        assert 'on_turn_length = "continue"' in text
    assert (found.reward, str(found.stop), len(found.turns)) == (0.5, "turn_length", 1)


def test_other_conversations_of_the_episode_go_on_whichever_ends_first():
    async def solve(model, name, delay):
        messages = [{"role": "user", "content": name}]
        for _ in range(2):
            await asyncio.sleep(delay)
            reply = await model.generate(messages, agent=name)
            if reply.finish == "length":
                return 0
            messages += [reply.message, {"role": "user", "content": "On."}]
        return 1

    def play(first, second):
        async def both(task, model):
            done = await asyncio.gather(solve(model, "cut", first), solve(model, "fine", second))
            return float(sum(done))

        return both

    def script(messages, rng):
        return LONG if messages[0].text == "cut" else "ok"

    for first, second in ((0.0, 0.05), (0.05, 0.0)):
        (found,) = tw.rollout(
            play(first, second), [tw.Task("Go.")], tw.ScriptedEngine(script), limits=SHORT
        )
        assert found.error is None
        assert found.reward == 1.0
        assert sorted((turn.agent, turn.finish) for turn in found.turns) == [
            ("cut", "length"),
            ("fine", "stop"),
            ("fine", "stop"),
        ]


def test_a_reply_may_be_asked_for_again():
    async def play(task, model):
        reply = await model.generate("Go.")
        while reply.finish == "length":
            reply = await model.generate("Go.")
        return float(reply.text == "ok")

    found = episode(play, [LONG, LONG, "ok"])
    assert (found.reward, str(found.stop)) == (1.0, "done")


def test_a_reply_cut_at_the_functions_own_bound_does_not_end_the_conversation():
    async def play(task, model):
        messages = [{"role": "user", "content": "Go."}]
        reply = await model.generate(messages, max_tokens=3)
        assert reply.finish == "length"
        reply = await model.generate([*messages, reply.message, {"role": "user", "content": "On."}])
        return float(reply.text == "ok")

    found = episode(play, [LONG, "ok"])
    assert (found.reward, str(found.stop)) == (1.0, "done")


@pytest.mark.parametrize("limits", [{"episode_tokens": 4}, {"context": 40}])
def test_cuts_at_other_limits_are_seen_too(limits):
    async def play(task, model):
        reply = await model.generate("Go.")
        return -1.0 if reply.finish == "length" else 1.0

    found = episode(play, [LONG], turn_tokens=30, **limits)
    assert found.reward == -1.0
    assert str(found.stop) in ("episode_tokens", "context")


def test_a_reply_with_a_misplaced_control_token_has_a_reward_and_no_sequel():
    text = tw.byte_renderer()
    banned = min(text.invalid_ids)
    seen = {}

    async def play(task, model):
        messages = [{"role": "user", "content": "Go."}]
        reply = await model.generate(messages)
        seen["again"] = await reason_of(
            model.generate([*messages, reply.message, {"role": "user", "content": "On."}])
        )
        return -1.0

    found = episode(play, [[104, banned, 105, max(text.stop_ids)]])
    assert seen["again"][0] == "invalid_token"
    assert (found.reward, str(found.stop)) == (-1.0, "invalid_token")


def test_several_replies_at_once_are_each_cut_on_their_own():
    async def play(task, model):
        messages = [{"role": "user", "content": "Go."}]
        replies = await model.generate(messages, n=3)
        fine = [one for one in replies if one.finish == "stop"]
        assert len(fine) == 2
        more = {"role": "user", "content": "On."}
        for one in fine:
            await model.generate([*messages, one.message, more])
        return 1.0

    found = episode(play, ["a", LONG, "b", "c", "d"])
    assert (found.reward, len(found.turns)) == (1.0, 5)


def test_an_aborted_function_after_a_cut_reply_stays_aborted():
    async def play(task, model):
        await model.generate("Go.")
        return tw.Scores(0.0, status="aborted")

    assert str(episode(play, [LONG]).stop) == "aborted"


def test_ids_that_a_function_appends_count_as_observed():
    """Loops of other systems pass ids at each call; `limits.episode_tokens` had
    counted their replies alone."""
    seen = {}

    async def play(task, model):
        ids = list(await model.render([{"role": "user", "content": "Go."}], {}))
        reply = await model.generate(ids)
        long = list(b"an observation that is much too long for the episode")
        seen["long"] = await reason_of(model.generate([*ids, *reply.ids, *long]))
        reply = await model.generate([*ids, *reply.ids, *b"short"])
        return float(len(reply.ids))

    found = episode(play, ["ok", "fine"], episode_tokens=20)
    assert seen["long"][0] == "episode_tokens"
    assert found.metrics["observation_tokens_left_out"] > 20
    assert found.reward == 5.0
    assert found.sampled_tokens + found.observed_tokens <= 20
