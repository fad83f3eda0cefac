"""Stop texts: found wherever they lie in the ids, cut from what the environment reads, never
added to what was sampled."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.rollouts import Sampler, Talk, check_record, renderer, tasks

import turnwright as tw
from turnwright.config import load
from turnwright.engines import check_generation

KINDS = ("bytes", "bpe", "unigram")


def vocabulary(kind):
    return 256 if kind == "bytes" else 250


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32), data=st.data())
def test_the_first_complete_text_is_found_wherever_it_lies_in_the_ids(kind, seed, data):
    rng, text = random.Random(seed), renderer(kind)
    allowed = [i for i in range(vocabulary(kind)) if i not in text.stop_ids]
    ids = rng.choices(allowed, k=rng.randint(1, 40)) + text.encode("one 中é\U0001f600 </x> two")
    rng.randrange(2) and rng.shuffle(ids)
    said = text.decode(ids)
    texts = []
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(said) - 1))
        texts.append(said[start : start + data.draw(st.integers(1, 8))])
    texts = [t for t in texts if "\ufffd" not in t] or ["</x>"]
    stop = tw.StopText(texts, text.decode)
    slow = next(
        (n for n in range(1, len(ids) + 1) if any(t in text.decode(ids[:n]) for t in texts)), 0
    )
    assert stop.first_completion(ids) == slow
    split = data.draw(st.integers(0, len(ids)))
    if not slow or split < slow:
        assert stop.continued_after(ids[:split]).first_completion(ids[split:]) == max(
            0, slow - split
        )
    cut = stop.cut(said)
    assert said.startswith(cut)
    assert any(cut.endswith(t) for t in texts) or not any(t in said for t in texts)
    assert not any(t in cut[:-1] for t in texts)


def test_ids_that_say_nothing_hide_no_stop_text():
    words = {0: "", 1: "</", 2: "x>", 3: "."}
    stop = tw.StopText(["</x>"], lambda ids: "".join(words[i] for i in ids))
    assert stop.first_completion([3, 1, *[0] * 50, 2, 3]) == 53


@pytest.mark.parametrize("texts", [[], [""], ["a", ""], [7], ["a\ufffd"]])
def test_what_no_reply_can_hold_is_refused(texts):
    with pytest.raises(tw.UsageError, match="stop text"):
        tw.StopText(texts, str)


class Ask(tw.Env):
    """Reads what is between the marks."""

    seen: list = []  # noqa: RUF012

    def reset(self, task, *, seed=None):
        return "Search."

    def step(self, action):
        type(self).seen.append((action.text, action.truncated))
        return tw.Step("Found.", reward=1.0, terminated=len(type(self).seen) == 2)


def test_the_ids_stay_and_the_text_for_the_environment_is_cut():
    """The stop text ends inside a token: the ids keep the whole token, the environment
    reads up to the mark."""
    text = renderer("bpe")
    Ask.seen = []
    inside = text.encode("is the word")
    assert text.token_texts(inside)[1] == " the"
    engine = tw.ScriptedEngine([inside, "no more"])
    (trajectory,) = tw.rollout(Ask, tasks(1), engine, renderer=text, stop=["s th", "word"])
    assert Ask.seen == [("is th", False), ("no more", False)]
    prompt, reply, close, observation = trajectory.spans[:4]
    assert (trajectory.turns[0].finish, list(reply.ids)) == ("stop", inside[:2])
    assert (close.origin, len(close.ids), set(close.ids) <= text.stop_ids, close.mask) == (
        "template",
        1,
        True,
        [0],
    )
    assert trajectory.prompt_ids(1) == [*prompt.ids, *reply.ids, *close.ids, *observation.ids]


def test_an_engine_that_samples_on_behind_a_stop_text_breaks_its_contract():
    text = renderer("bytes")
    stop = tw.StopText(["ab"], text.decode)
    request = tw.Request([1], 9, frozenset({256}), 0, "s", stop_text=stop)
    good = tw.Generation([*b"xab"], [-1.0] * 3, "stop", 0)
    check_generation(good, request, "E")
    for ids, finish, why in (
        ([*b"xabc"], "length", "1 ids after a stop text"),
        ([*b"xab"], "length", "finish reason 'length' after .* a stop text's end"),
        ([*b"xa"], "stop", "no stop id"),
    ):
        with pytest.raises(tw.EngineError, match=why):
            check_generation(tw.Generation(ids, [-1.0] * len(ids), finish, 0), request, "E")


@settings(max_examples=30, deadline=None)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32), aborts=st.sampled_from((0.0, 0.5)))
def test_episodes_with_stop_texts_keep_the_invariants(kind, seed, aborts):
    text = renderer(kind)
    engine = Sampler(vocabulary(kind), aborts=aborts, ends=0.8)
    limits = tw.Limits(turn_tokens=30, on_turn_length="continue")
    stops = ["e", "\n", "中", "an"]
    rows = tw.rollout(Talk, tasks(2), engine, renderer=text, seed=seed, limits=limits, stop=stops)
    for trajectory in rows:
        check_record(trajectory, engine.calls)
        for turn in trajectory.turns:
            said = text.decode(
                [
                    i
                    for index in turn.spans
                    for i in trajectory.spans[index].ids
                    if i not in text.stop_ids
                ]
            )
            found = [said.index(t) + len(t) for t in stops if t in said]
            assert turn.reply.text == (said[: min(found)] if found else said) or "<" in said


def test_a_call_of_a_play_function_has_stop_texts_of_its_own():
    async def play(task, model):
        one = await model.generate("Q", stop=["</a>"])
        two = await model.generate("R")
        assert (one.text, one.finish, two.text) == ("x</a>", "stop", "x</a>y</b>")
        with pytest.raises(tw.UsageError, match="stop text"):
            await model.generate("S", stop=[""])
        return 1.0

    engine = tw.ScriptedEngine(["x</a>y", "x</a>y</b>z"])
    (trajectory,) = tw.rollout(play, tasks(1), engine, stop=["</b>"])
    assert trajectory.error is None
    assert trajectory.sampled_tokens == 5 + 10


def test_stop_texts_of_a_recipe(tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text('[[env]]\nuse = "hop"\n[rollout]\nstop = ["</search>", "</answer>"]\n')
    assert load(recipe).config.rollout.stop == ("</search>", "</answer>")
    for wrong, why in (('stop = [""]', "must not be empty"), ("stop = [1]", "a list of strings")):
        recipe.write_text(f'[[env]]\nuse = "hop"\n[rollout]\n{wrong}\n')
        with pytest.raises(tw.TurnwrightError, match=why):
            load(recipe)
