"""Replies inside one message, stopped by texts and rewound: played by scripts and by a model,
and trained on exactly."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
import torch
from kit.double_precision import Model64
from kit.gradients import check_probe, loss_and_gradient
from kit.inline_worlds import STOPS, Wild, check
from kit.rollouts import Call, Sampler, renderer
from kit.training import STILL

import turnwright as tw
from turnwright.config import TrainConfig
from turnwright.engines.local import LocalEngine
from turnwright.renderers import load_renderer
from turnwright.rollouts import group_by_task
from turnwright.training import Trainer

LIMITS = tw.Limits(turns=8, turn_tokens=12, on_turn_length="continue", context=500)


class Search(tw.Env):
    """A search tool within one message, as SkyRL's: `<search>` is answered, `<answer>`
    ends, each step is paid."""

    pages = {"amber": "birch", "birch": "7"}  # noqa: RUF012

    def reset(self, task, *, seed=None):
        self.answer = task.answer
        return f"{task.id}: say <search>word</search> or <answer>number</answer>."

    def step(self, action):
        query = re.search(r"<search>(.*?)</search>$", action.text)
        if query:
            return tw.Step(
                f"\n<information>{self.pages.get(query[1], 'nothing')}</information>\n", reward=0.1
            )
        answer = re.search(r"<answer>(.*?)</answer>$", action.text)
        return tw.Step(reward=float(bool(answer) and answer[1] == self.answer), terminated=True)


class Tip(tw.Env):
    """ms-swift's `math_tip_trick`: a wrong boxed answer is taken back once, and the
    model goes on with a tip."""

    def reset(self, task, *, seed=None):
        self.answer, self.tipped = task.answer, False
        return "6 * 7?"

    def step(self, action):
        boxed = list(re.finditer(r"\\boxed\{(.*?)\}", action.raw))
        right = bool(boxed) and boxed[-1][1] == self.answer
        if right or self.tipped or not boxed:
            return tw.Step(reward=float(right), terminated=True)
        self.tipped = True
        return tw.Step(
            tw.InlineObservation("But wait... ", keep_chars=boxed[-1].start(), tail="untrained")
        )


@pytest.mark.parametrize("kind", ["bytes", "bpe", "unigram"])
def test_a_search_agent_speaks_in_one_message(kind):
    text = renderer(kind)
    said = [
        "<search>amber</search> and on",
        "So <search>birch</search>.",
        "It is <answer>7</answer> yes",
    ]
    engine = tw.ScriptedEngine(said)
    task = tw.Task(id="t", answer="7")
    stops = ["</search>", "</answer>"]
    (trajectory,) = tw.rollout(Search, [task], engine, renderer=text, stop=stops, history="inline")
    assert (trajectory.error, trajectory.reward, trajectory.branches) == (None, 1.2, {})
    assert [m.role for m in trajectory.messages] == ["user", "assistant"]
    assert [turn.finish for turn in trajectory.turns] == ["stop"] * 3
    assert trajectory.messages[-1].text.replace(" ", "") == (
        "<search>amber</search>\n<information>birch</information>\nSo<search>birch</search>\n<information>7</information>\n"
        "Itis<answer>7</answer>"
    ).replace(" ", "")
    (row,) = trajectory.samples()
    assert sum(row.mask) == sum(row.weights) == trajectory.sampled_tokens
    assert not text.stop_ids & {i for i, mask in zip(row.ids, row.mask, strict=True) if mask}, (
        "an end that nobody sampled"
    )
    ends = [
        turn.context + sum(len(trajectory.spans[i].ids) for i in turn.spans) - 1
        for turn in trajectory.turns
    ]
    assert {at: reward for at, reward in enumerate(row.token_rewards) if reward} == dict(
        zip(ends, (0.1, 0.1, 1.0), strict=True)
    )


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_tip_takes_a_wrong_answer_back_even_out_of_the_thinking(kind):
    text = renderer(kind)
    wrong, right = (
        "<think>Six sevens: \\boxed{41}, sure.</think>\\boxed{41}",
        "more. \\boxed{42}</think>It is \\boxed{42}",
    )

    class Early(Tip):
        def step(self, action):
            step = super().step(action)
            at = action.raw.index("\\boxed")
            inline = step.observation
            return (
                step._replace(observation=replace(inline, keep_chars=at))
                if inline is not None
                else step
            )

    (trajectory,) = tw.rollout(
        Early, [tw.Task("q", answer="42")], tw.ScriptedEngine([wrong, right]), renderer=text
    )
    assert (trajectory.error, trajectory.reward, trajectory.branches) == (None, 1.0, {"rewound": 1})
    whole = trajectory.messages[-1]
    assert whole.reasoning == "Six sevens: But wait... more. \\boxed{42}"
    assert whole.text == "It is \\boxed{42}"
    span = trajectory.spans[1]
    assert span.untrained == "rewound"
    assert 0 < span.untrained_from < len(span.ids)
    assert sum(sum(row.weights) for row in trajectory.samples()) == span.untrained_from + len(
        trajectory.spans[-1].ids
    )


class Listening:
    """An engine that writes down what another was asked and gave."""

    def __init__(self, engine):
        self.engine, self.calls = engine, []
        self.context, self.renderer = engine.context, engine.renderer

    @property
    def version(self):
        return self.engine.version

    async def generate(self, request):
        context = tuple(request.ids)
        found = await self.engine.generate(request)
        call = (
            request.session,
            request.agent,
            context,
            request.max_tokens,
            tuple(found.ids),
            tuple(found.logprobs),
        )
        self.calls.append(Call(*call, found.version))
        return found

    def release(self, session):
        self.engine.release(session)

    async def close(self):
        await self.engine.close()


@pytest.mark.parametrize("history", ["append", "inline"])
def test_a_model_is_played_and_trained_on_in_the_contexts_that_it_saw(
    tiny_dir, tiny_model, history
):
    """The trainer's own logprobs, computed row by row, are those that the engine sampled
    with, rewinds and all."""
    text = load_renderer(tiny_dir)
    engine = Listening(LocalEngine(tiny_model, renderer=text, context=500))
    tasks = [tw.Task(f"Task {number}", id=f"t{number}") for number in range(3)]
    rows = tw.rollout(
        Wild, tasks, engine, samples=4, limits=LIMITS, stop=STOPS, history=history, seed=5
    )
    for trajectory in rows:
        assert trajectory.error is None, trajectory.error
        check(trajectory, engine, text)
    ended = [turn.finish for trajectory in rows for turn in trajectory.turns]
    assert min(ended.count("stop"), ended.count("length")) > 5
    assert sum(sum(t.branches.values()) for t in rows) > 5
    trainer = Trainer(
        tiny_model, TrainConfig(**{**STILL, "max_mismatch": 1e-3}), banned_ids=text.banned_ids
    )
    figures = trainer.step(group_by_task(rows), step=0, steps=10).metrics
    assert figures["mismatch_max"] < 1e-4
    left_out = sum(len(s.ids) - s.trained for t in rows for s in t.spans if s.sampled)
    assert figures["tokens_rewound"] == left_out > 0


def test_stopped_search_and_tips_with_a_model(tiny_dir, tiny_model):
    """Whatever an untrained model says to them, both agents keep the invariants."""
    text = load_renderer(tiny_dir)
    for env, stop, history in (
        (Search, ["</search>", "</answer>", "e"], "inline"),
        (Tip, ["}"], "append"),
    ):
        engine = Listening(LocalEngine(tiny_model, renderer=text, context=500))
        tasks = [tw.Task(id=f"t{number}", answer="7") for number in range(4)]
        for trajectory in tw.rollout(
            env, tasks, engine, samples=2, limits=LIMITS, stop=stop, history=history
        ):
            assert trajectory.error is None, trajectory.error
            check(trajectory, engine, text)


@pytest.mark.parametrize("history", ["append", "inline"])
def test_invariant_4_no_gradient_at_what_was_inserted(history):
    """Ids of insertions, closes and rewound tails get a gradient of exactly 0, all others of
    rewarded episodes do not."""
    text = renderer("bytes")
    tasks = [tw.Task("Go", id=f"t{number}") for number in range(2)]
    rows = tw.rollout(
        Wild,
        tasks,
        Sampler(ends=0.8),
        samples=3,
        limits=LIMITS,
        stop=STOPS,
        history=history,
        renderer=text,
    )
    made = group_by_task(rows)
    assert any(turn.inserted for trajectory in rows for turn in trajectory.turns)
    assert any(span.untrained for trajectory in rows for span in trajectory.spans)
    check_probe(made, model=Model64(300, context=600, whole=True))
    with pytest.raises(AssertionError, match="gradient at position"):
        check_probe(made, 1, model=Model64(300, context=600, whole=True))


def test_rewound_tails_that_are_untrained_change_no_gradient():
    """An untrained tail and the same episode without it have equal gradients."""

    class Cut(tw.Env):
        def reset(self, task, *, seed=None):
            self.rng, self.left = random.Random(seed), 4
            return "Go."

        def step(self, action):
            self.left -= 1
            said = (
                tw.InlineObservation(
                    "so ", keep_tokens=self.rng.randint(1, action.tokens), tail="untrained"
                )
                if action.tokens
                else "On."
            )
            return tw.Step(said, reward=self.rng.random(), terminated=self.left == 0)

    rows = tw.rollout(
        Cut, [tw.Task("a", id="a")], Sampler(ends=0.5, most=20), samples=4, limits=LIMITS
    )
    assert sum(span.untrained is not None for t in rows for span in t.spans) > 4
    _, whole = loss_and_gradient(Model64(300, context=600), group_by_task(rows))
    for trajectory in rows:
        for span in trajectory.spans:
            if span.untrained:
                assert span.logprobs is not None
                span.ids, span.logprobs = span.ids[: span.trained], span.logprobs[: span.trained]
                span.untrained, span.untrained_from = None, 0
    _, cut = loss_and_gradient(Model64(300, context=600), group_by_task(rows))
    assert torch.allclose(whole, cut, rtol=1e-10, atol=1e-14)
