"""Environments that replace the conversation: what the model reads, what is trained, and
that records hold it."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.rollouts import Sampler, check_record, facts, renderer, tasks

import turnwright as tw
from turnwright.config import EnvRules
from turnwright.envs.scripted_play import ScriptedRunner
from turnwright.rollouts import Rollout, make_episode_specs
from turnwright.rollouts.resume import observation_row, read_observation
from turnwright.rollouts.rollout_settings import RolloutSettings

TEXTS = ("yes", "no é中", "line\nline", "a longer text, twice")


class Valid(Sampler):
    """Samples no control token inside a reply."""

    invalid = frozenset()

    def allowed(self, request):
        return [i for i in super().allowed(request) if i not in self.invalid]


class Rewrites(tw.Env):
    """Keeps some messages of the conversation, in order, and adds some; the
    first one always stays."""

    turns = 5

    def reset(self, task, *, seed=None):
        self.rng = random.Random(task.id)
        self.left, self.size = self.turns, 2
        return [{"role": "system", "content": "Be brief."}, "Begin."]

    def step(self, action):
        self.left -= 1
        self.size += 1  # the reply
        if self.left == 0:
            return tw.Step(reward=1.0, terminated=True)
        if self.rng.random() < 0.3:
            self.size += 1
            return tw.Step(self.rng.choice(TEXTS))
        kept = [0] + [at for at in range(1, self.size) if self.rng.random() < 0.7]
        new = [self.rng.choice(TEXTS) for _ in range(self.rng.randint(1, 2))]
        self.size = len(kept) + len(new)
        return tw.Step(tw.NewHistory([*kept, *new]))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(("bytes", "bpe")),
    history=st.sampled_from(("append", "template")),
)
def test_the_model_reads_the_messages_of_the_new_conversation(seed, kind, history):
    text = renderer(kind)
    engine = Valid(256 if kind == "bytes" else 250, most=8)
    engine.invalid = text.invalid_ids
    found = tw.rollout(
        Rewrites,
        tasks(2),
        engine,
        renderer=text,
        seed=seed,
        history=history,
        limits=tw.Limits(turns=8),
    )
    for trajectory in found:
        check_record(trajectory, engine.calls)
        assert trajectory.error is None
        assert trajectory.reward == 1.0
        assert len(trajectory.turns) == Rewrites.turns
        for number, turn in enumerate(trajectory.turns):
            messages = trajectory.conversation(number)[:-1]
            read = text.decode(trajectory.prompt_ids(number))
            at = 0
            for message in messages:  # each message is there, in its order
                at = read.index(message.text.strip(), at) + len(message.text.strip())
            sampled = [i for index in turn.spans for i in trajectory.spans[index].ids]
            assert sampled
        # Each sampled id is trained once, whatever was left out later.
        trained = sum(sum(1 for weight in row.weights if weight) for row in trajectory.samples())
        assert trained == trajectory.sampled_tokens


def test_kept_replies_keep_their_ids():
    """Their text may have many tokenizations; the one that was sampled stays."""
    text = renderer("bpe")
    odd = [text.encode(letter)[0] for letter in "the"]
    assert odd != list(text.encode("the"))

    class Drops(tw.Env):
        def reset(self, task, *, seed=None):
            self.step_number = 0
            return ["Go.", "hint"]

        def step(self, action):
            self.step_number += 1
            if self.step_number == 2:
                return tw.Step(terminated=True)
            return tw.Step(tw.NewHistory([0, 2, "on"]))

    engine = tw.ScriptedEngine([[*odd, max(text.stop_ids)], "ok"])
    (found,) = tw.rollout(Drops, [tw.Task("x")], engine, renderer=text)
    assert found.branches == {"rewritten": 1}
    ids = list(found.prompt_ids(1))
    assert any(ids[at : at + 3] == odd for at in range(len(ids)))
    assert "hint" not in text.decode(ids)


WRONG = [
    ([0, 9], "keeps message 9, and the conversation has 3, from 0 to 2"),
    ([0, -1], "keeps message -1"),
    ([0, 0], "keeps a message twice"),
    ([], "has no message"),
    ([2, "x"], "begins with a reply"),
    ([0, object()], "NewHistory"),
]


@pytest.mark.parametrize(("items", "why"), WRONG)
def test_a_history_that_cannot_be_is_the_environments_error(items, why):
    class Wrong(tw.Env):
        def reset(self, task, *, seed=None):
            return ["Go.", "hint"]

        def step(self, action):
            return tw.Step(tw.NewHistory(items))

    (found,) = tw.rollout(Wrong, [tw.Task("x")], tw.ScriptedEngine(["a"]))
    assert why in found.error.message
    assert found.reward is None


def test_inside_the_models_message_there_is_no_history_to_replace():
    (found,) = tw.rollout(Rewrites, [tw.Task("x", id="t1")], Sampler(), history="inline")
    assert "inline" in found.error.message


def test_a_process_of_its_own_gives_the_same_episode():
    def play(rules):
        async def both():
            rollout = Rollout(
                Sampler(), tw.byte_renderer(), RolloutSettings(limits=tw.Limits(turns=8), seed=3)
            )
            return await rollout.play(
                make_episode_specs(Rewrites, tasks(2), phase="train", step=0, rules=rules)
            )

        return [facts(one) for one in asyncio.run(both())]

    assert play(EnvRules()) == play(EnvRules(isolation="process"))


def test_observations_are_written_and_read():
    observation = tw.NewHistory([0, {"role": "tool", "content": "x"}, 3, "now"])
    assert read_observation(json.loads(json.dumps(observation_row(observation)))) == observation


def test_a_scripted_player_sees_the_new_conversation():
    seen = []

    def speak(messages, rng):
        seen.append([message.text for message in messages])
        return f"reply {len(seen)}"

    class Drops(tw.Env):
        def reset(self, task, *, seed=None):
            self.step_number = 0
            return ["Go.", "hint"]

        def step(self, action):
            self.step_number += 1
            return tw.Step(tw.NewHistory([0, 2, "on"]), terminated=self.step_number == 3)

    async def play():
        runner = ScriptedRunner(Drops(), tw.Task("x"), speak, random.Random(0))
        await runner.open()
        while await runner.turn():
            pass
        return (await runner.finish()).trajectory

    trajectory = asyncio.run(play())
    assert seen == [["Go.", "hint"], ["Go.", "reply 1", "on"], ["Go.", "on", "on"]]
    assert len(trajectory.turns) == 3
