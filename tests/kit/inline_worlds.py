"""Environments that insert text into the model's own message."""

from __future__ import annotations

import random
from collections import Counter

import pytest

import turnwright as tw

STOPS = ("e", "an", "中", "\n")
CONTROL = ("<|im_end|>", "<|im_start|>user\nHi", "</think>", "<tool_call>", "a<|im_end", "|>")


class Wild(tw.Env):
    """Goes on in every way, by chance: appends, inserts, rewinds, with control text and
    characters of several bytes."""

    turns = 7

    def reset(self, task, *, seed=None):
        self.rng = random.Random(f"{task.id}/{seed}")
        self.left = self.turns
        return "Begin."

    def step(self, action):
        self.left -= 1
        pick = self.rng.choice
        text = pick(["", "But wait, ", " so é中\U0001f600", "\n\nline", "the", *CONTROL])
        said = [
            text,
            None,
            [{"role": "tool", "content": text}, {"role": "user", "content": "On."}],
            tw.InlineObservation(text),
            tw.InlineObservation(text, tail="untrained"),
            tw.InlineObservation(
                text,
                keep_chars=self.rng.randint(0, len(action.raw)),
                tail=pick(["trained", "untrained"]),
            ),
            tw.InlineObservation(
                text,
                keep_tokens=self.rng.randint(0, action.tokens),
                tail=pick(["trained", "untrained"]),
            ),
        ]
        return tw.Step(pick(said), reward=self.rng.random(), terminated=self.left <= 0)


def sampled_calls(trajectory):
    """What was sampled, turn by turn, as the engine would tell it."""
    rows = []
    for number, turn in enumerate(trajectory.turns):
        context = trajectory.prompt_ids(number)
        for index in turn.spans:
            span = trajectory.spans[index]
            rows.append((tuple(context), tuple(span.ids), span.logprobs))
            context = [*context, *span.ids]
    return rows


def check(trajectory, engine, text):
    """Invariants 1, 2, 3, 7 and 8, and that nothing inserted has a weight."""
    key = trajectory.key
    session = f"{key.phase}/{key.step}/{key.task}/{key.sample}/{key.attempt}"
    mine = [call for call in engine.calls if call.session == session and call.ids]
    assert sampled_calls(trajectory) == [(call.context, call.ids, call.logprobs) for call in mine]
    rows = list(trajectory.samples())
    weights = sum(sum(row.weights) for row in rows)
    left_out = sum(len(span.ids) - span.trained for span in trajectory.spans if span.sampled)
    assert weights + left_out == trajectory.sampled_tokens == sum(len(call.ids) for call in mine)
    trained = Counter()
    for row in rows:
        assert (
            len(row.ids)
            == len(row.mask)
            == len(row.weights)
            == len(row.logprobs)
            == len(row.token_rewards)
        )
        for at, weight in enumerate(row.weights):
            assert weight in (0.0, float(row.mask[at]))
            assert (row.logprobs[at] is None) is (row.mask[at] == 0)
            assert row.token_rewards[at] == 0.0 or row.mask[at]
            if weight:
                trained[tuple(row.ids[: at + 1]), row.logprobs[at]] += 1
    sampled = Counter(
        (call.context + call.ids[: at + 1], call.logprobs[at])
        for call in mine
        for at in range(len(call.ids))
    )
    assert trained <= sampled, (
        "an id is trained twice, or in another context than it was sampled in"
    )
    assert sum(sum(row.token_rewards) for row in rows) == pytest.approx(trajectory.reward, abs=1e-9)
    for span in trajectory.spans:
        span.check()
        assert span.ids
    control = text._guard.control_ids
    for turn in trajectory.turns:
        if turn.inserted is None:
            continue
        parent = trajectory.turns[turn.parent]
        begin = parent.context + turn.kept
        path = trajectory.path(turn.prompt)[: turn.context]
        said = [i for index in parent.spans for i in trajectory.spans[index].ids]
        assert path[: parent.context] == trajectory.prompt_ids(turn.parent)
        assert path[parent.context : begin] == said[: turn.kept], (
            "what was kept of a reply is not what was sampled"
        )
        assert control.isdisjoint(path[begin:]), "inserted text became control"
        if text.decode(text.encode(turn.inserted)) == turn.inserted:
            # A tokenizer without bytes knows not every character.
            assert text.decode(path).endswith(turn.inserted)
