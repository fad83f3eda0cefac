"""Observations inside the model's own message: what is inserted, what is rewound, and what is
read and recorded of it."""

from __future__ import annotations

import base64
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.inline_worlds import STOPS, Wild, check
from kit.rollouts import Sampler, facts, renderer, tasks
from kit.strategies import trajectories
from kit.vision import tiny_vlm_directory
from PIL import Image as Pillow

import turnwright as tw
from turnwright.media.images import encode_png
from turnwright.records import read_json_lines, rebuild_trajectories
from turnwright.renderers import load_renderer
from turnwright.renderers.renderer import cut_ids

KINDS = ("bytes", "bpe", "unigram")


def vocabulary(kind):
    return 256 if kind == "bytes" else 250


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**32),
    aborts=st.sampled_from((0.0, 0.4)),
    stop=st.sampled_from(((), STOPS)),
    history=st.sampled_from(("append", "inline", "template")),
)
def test_random_insertions_and_rewinds_keep_the_invariants(kind, seed, aborts, stop, history):
    text = renderer(kind)
    engine = Sampler(vocabulary(kind), aborts=aborts, ends=0.8, context=4000)
    limits = tw.Limits(turn_tokens=13, on_turn_length="continue")
    rows = tw.rollout(
        Wild, tasks(2), engine, renderer=text, seed=seed, limits=limits, stop=stop, history=history
    )
    for trajectory in rows:
        assert trajectory.error is None, trajectory.error
        check(trajectory, engine, text)
        for number, turn in enumerate(trajectory.turns):
            conversation = trajectory.conversation(number)
            assert conversation[-1] is turn.message
            assert sum(m.role == "assistant" for m in conversation) == sum(
                trajectory.turns[i].inserted is None for i in trajectory.turn_chain(number)
            )


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**32),
    text=st.text(max_size=20),
    data=st.data(),
)
def test_a_cut_keeps_whole_ids_and_says_the_rest(kind, seed, text, data):
    rng, own = random.Random(seed), renderer(kind)
    ids = own.encode(text)
    if rng.random() < 0.5:
        ids += rng.choices(range(vocabulary(kind)), k=rng.randint(0, 9))
        rng.shuffle(ids)
    said = own.decode(ids)
    chars = data.draw(st.integers(0, len(said)))
    count, rest = cut_ids(own.decode, ids, chars)
    assert own.decode(ids[:count]) + rest == said[:chars]
    # As many whole ids as can be kept: each longer beginning says more, or ends inside a character.
    assert not any(
        said[:chars].startswith(own.decode(ids[:n])) for n in range(count + 1, len(ids) + 1)
    )


def test_a_cut_within_characters_of_several_bytes_is_exact_in_bytes():
    text = renderer("bpe")
    ids = text.encode("x中é\U0001f600y")
    assert len(ids) > 8, "characters are spread over tokens"
    whole = b"".join(piece.encode("latin-1", "backslashreplace") for piece in text.token_texts(ids))
    assert whole
    for chars in range(6):
        count, rest = cut_ids(text.decode, ids, chars)
        assert text.decode([*ids[:count], *text.encode(rest)]) == "x中é\U0001f600y"[:chars]
        assert rest == "", "every character ends a token here"


class Once(tw.Env):
    """Gives one observation, then ends."""

    said: object = None
    seen: list = []  # noqa: RUF012

    def reset(self, task, *, seed=None):
        type(self).seen = []
        return "Go."

    def step(self, action):
        type(self).seen.append((action.text, action.raw))
        return tw.Step(type(self).said, reward=0.5, terminated=len(type(self).seen) == 2)


def once(said, replies, **settings):
    env = type("Said", (Once,), {"said": said})
    (trajectory,) = tw.rollout(env, tasks(1), tw.ScriptedEngine(replies), **settings)
    return trajectory, env


def text_of(trajectory, number):
    return tw.byte_renderer().decode(trajectory.prompt_ids(number))


PIXELS = np.zeros((40, 40, 3), np.uint8)
DATA_URI = "data:image/png;base64," + base64.b64encode(encode_png(PIXELS)).decode()
PICTURES = {
    "parts": [tw.Image(PIXELS, alt="a map"), "x"],
    "numpy": [PIXELS, "x"],
    "pillow": [Pillow.fromarray(PIXELS), "x"],
    "data uri": [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": DATA_URI}}, "x"]}
    ],
    "tool message": [{"role": "tool", "content": [tw.Image(PIXELS, alt="a map"), "x"]}],
    "video": [tw.Video([PIXELS, PIXELS], fps=1, alt="a map"), "x"],
}


@pytest.fixture(scope="module")
def sighted(tmp_path_factory):
    return load_renderer(tiny_vlm_directory(tmp_path_factory.mktemp("eyes"), weights=False))


@pytest.mark.parametrize("name", PICTURES)
def test_an_image_of_an_inline_observation_reaches_the_model(sighted, name):
    """A model that sees gets its block inside the reply; a text-only one reads the words, or
    refuses where there are none."""
    said = PICTURES[name]
    env = type("Said", (Once,), {"said": said})
    reply = sighted.encode_reply("One.")
    (seen,) = tw.rollout(
        env, tasks(1), tw.ScriptedEngine([reply, reply]), renderer=sighted, history="inline"
    )
    assert seen.error is None
    turn = seen.turns[1]
    ids, placed = seen.prompt_ids(1), seen.media_placements(turn.prompt)
    sighted.vision.check(ids, placed)
    (block,) = placed
    pad = "video_pad" if name == "video" else "image_pad"
    text = sighted.decode([*ids[: block.start], *ids[block.end :]])
    assert text.endswith("assistant\nOne.<|vision_start|><|vision_end|>x")
    assert f"<|{pad}|>" in sighted.decode(ids[block.start : block.end])
    assert turn.grown.content == ("One.", block.media, "xOne.")

    told, _ = once(said, ["One.", " Two."], history="inline")
    if "a map" in repr(said):
        assert told.error is None
        assert told.turns[1].inserted == "a map\nx"
    else:
        assert told.error is not None
        assert "sees no image" in told.error.message


def test_a_reply_that_ended_goes_on_before_its_end_token_which_stays_a_leaf():
    trajectory, env = once(tw.InlineObservation(" But wait."), ["One.", " Two."])
    assert trajectory.branches == {"close_dropped": 1}
    assert text_of(trajectory, 1).endswith("<|im_start|>assistant\nOne. But wait.")
    assert env.seen == [("One.", "One."), (" Two.", " Two.")]
    assert [m.role for m in trajectory.messages] == ["user", "assistant"]
    assert trajectory.messages[-1].text == "One. But wait. Two."
    assert (trajectory.final_text, trajectory.turns[1].inserted, trajectory.turns[1].kept) == (
        " Two.",
        " But wait.",
        4,
    )
    assert trajectory.turns[1].messages == ()
    rows = list(trajectory.samples())
    assert [sum(row.weights) for row in rows] == [5.0, 6.0]
    assert [sum(row.token_rewards) for row in rows] == [0.5, 0.5]


def test_a_rewound_tail_is_trained_or_not_as_the_environment_says():
    for tail, count in (("trained", 9 + 4), ("untrained", 3 + 4)):
        trajectory, _ = once(
            tw.InlineObservation("X", keep_chars=3, tail=tail), ["Answer 7", "end"]
        )
        assert trajectory.branches == {"rewound": 1}
        assert text_of(trajectory, 1).endswith("assistant\nAnsX")
        assert sum(sum(row.weights) for row in trajectory.samples()) == count
    span = trajectory.spans[1]
    assert (span.untrained, span.untrained_from, span.trained) == ("rewound", 3, 3)


def test_a_cut_token_is_kept_as_text_that_was_not_sampled():
    text = renderer("bpe")
    reply = text.encode("is the word")
    assert text.token_texts(reply)[:2] == ["is", " the"]
    trajectory, _ = once(
        tw.InlineObservation("X", keep_chars=5),
        [[*reply, min(text.stop_ids)], "end"],
        renderer=text,
    )
    inserted = trajectory.spans[2]
    assert trajectory.turns[1].kept == 1
    assert (text.decode(inserted.ids), inserted.origin, inserted.start) == (
        " thX",
        "env",
        trajectory.turns[0].context + 1,
    )


def test_a_reply_can_be_rewound_to_its_beginning_and_said_anew():
    trajectory, _ = once(tw.InlineObservation(keep_tokens=0), ["first", "second"])
    assert trajectory.prompt_ids(1) == trajectory.prompt_ids(0)
    assert trajectory.messages[-1].text == "second"
    assert sum(sum(row.weights) for row in trajectory.samples()) == trajectory.sampled_tokens


def test_an_ordinary_observation_closes_the_message_that_grew():
    said = iter([tw.InlineObservation(" and", keep_chars=1), "Next?"])

    class Two(tw.Env):
        def reset(self, task, *, seed=None):
            return "Go."

        def step(self, action):
            following = next(said, None)
            return tw.Step(following, terminated=following is None)

    (trajectory,) = tw.rollout(Two, tasks(1), tw.ScriptedEngine(["abc", " more", "end"]))
    assert text_of(trajectory, 2).endswith(
        "assistant\na and "
        "more<|im_end|>\n<|im_start|>user\nNext?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [m.text for m in trajectory.messages] == ["Go.", "a and more", "Next?", "end"]


def test_thinking_can_be_rewound_and_the_message_reads_as_one():
    trajectory, env = once(
        tw.InlineObservation(" Or not.", keep_chars=10), ["<think>sure.</think>7", " So</think>8"]
    )
    assert env.seen[0] == ("7", "<think>sure.</think>7")
    whole = trajectory.messages[-1]
    assert (whole.reasoning, whole.text) == ("sur Or not. So", "8")


def test_calls_that_the_world_writes_are_text():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    trajectory, _ = once(tw.InlineObservation(call), ["a", "b"])
    assert trajectory.turns[1].message.tool_calls == ()
    assert call in trajectory.turns[1].message.text


@pytest.mark.parametrize("kind", KINDS)
def test_inserted_text_goes_on_from_the_reply(kind):
    """No mark of a text's beginning stands before it, and what it says is what was given."""
    text = renderer(kind)
    reply = [*text.encode("the word"), min(text.stop_ids)]
    trajectory, _ = once(tw.InlineObservation("ing on"), [reply, reply], renderer=text)
    assert text.decode(trajectory.prompt_ids(1)).endswith("the wording on")


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_that_goes_on_keeps_the_space_that_it_begins_with(kind):
    text = renderer(kind)
    end = min(text.stop_ids)
    (word,) = [text.encode(" the word")[: 1 if kind != "bytes" else 4]]
    trajectory, env = once(
        tw.InlineObservation("so"), [[*text.encode("and"), end], [*word, end]], renderer=text
    )
    assert env.seen[1] == (" the", " the")
    assert trajectory.messages[-1].text == "andso the"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (tw.InlineObservation("x", keep_chars=9), "only 3"),
        (tw.InlineObservation("x", keep_tokens=4), "only 3"),
        (tw.InlineObservation("x", keep_tokens=3), None),
    ],
)
def test_more_than_was_said_cannot_be_kept(said, why):
    trajectory, _ = once(said, ["abc", "end"])
    assert (trajectory.stop == "done") is (why is None)
    if why:
        assert (trajectory.error.type, trajectory.stop) == ("EnvError", "env_error")
        assert why in trajectory.error.message


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"text": 7}, "a string"),
        ({"keep_chars": 1, "keep_tokens": 1}, "not both"),
        ({"keep_chars": -1}, "an integer >= 0"),
        ({"tail": "no"}, '"trained" or "untrained"'),
    ],
)
def test_a_wrong_inline_says_what_is_wrong(fields, why):
    with pytest.raises(tw.EnvError, match=why):
        tw.InlineObservation(**fields)


def test_inline_history_joins_texts_and_refuses_other_roles():
    said = [{"role": "tool", "content": "one"}, "two"]
    trajectory, _ = once(said, ["a", "b"], history="inline")
    assert trajectory.messages[-1].text == "aone\ntwob"
    for wrong in ({"role": "system", "content": "x"}, {"role": "assistant", "content": "x"}):
        trajectory, _ = once(wrong, ["a", "b"], history="inline")
        assert (trajectory.error.type, trajectory.stop) == ("EnvError", "env_error")
        assert wrong["role"] in trajectory.error.message


def test_inline_history_is_not_for_play_functions():
    async def play(task, model):
        return 1.0

    with pytest.raises(tw.UsageError, match="inline"):
        tw.rollout(play, tasks(1), tw.ScriptedEngine(["a"]), history="inline")
    with pytest.raises(tw.UsageError, match="history"):
        tw.rollout(Once, tasks(1), tw.ScriptedEngine(["a"]), history="inlined")


def test_a_long_insertion_is_cut_as_any_observation():
    trajectory, _ = once(
        tw.InlineObservation("x" * 200, keep_chars=1),
        ["abc", "b"],
        limits=tw.Limits(observation_tokens=60),
    )
    assert trajectory.metrics["observation_tokens_cut"] > 0
    assert trajectory.turns[1].inserted.startswith("x")
    assert "tokens shown]" in trajectory.turns[1].inserted


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32), keep=st.floats(0, 1), history=st.sampled_from(("append", "inline"))
)
def test_the_journal_tells_inline_turns_and_a_cut_off_run_goes_on(
    seed, keep, history, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("run")
    limits = tw.Limits(turn_tokens=13, on_turn_length="continue")
    rows, settings = tasks(3), {"seed": seed, "limits": limits, "stop": STOPS, "history": history}
    whole = tw.rollout(Wild, rows, Sampler(ends=0.8), out=folder, **settings)
    found = rebuild_trajectories(
        read_json_lines(folder / "journal.jsonl"), {task.id: task for task in rows}.get
    )
    assert [facts(found[t.key]) for t in whole] == [facts(t) for t in whole]
    assert [[list(r.weights) for r in found[t.key].samples()] for t in whole] == [
        [list(r.weights) for r in t.samples()] for t in whole
    ]
    journal = folder / "journal.jsonl"
    lines = journal.read_bytes()
    journal.write_bytes(lines[: int(len(lines) * keep)])
    left = rebuild_trajectories(
        read_json_lines(folder / "journal.jsonl"), {task.id: task for task in rows}.get
    )
    again = tw.rollout(Wild, rows, Sampler(ends=0.8), **settings)
    assert [facts(left.get(t.key, t)) for t in again] == [facts(t) for t in whole]


@settings(max_examples=100, deadline=None)
@given(trajectory=trajectories(), data=st.data())
def test_token_rewards_sum_to_the_reward_and_stand_at_sampled_ids(trajectory, data):
    sampled = [i for i, span in enumerate(trajectory.spans) if span.sampled]
    for index in sampled:
        reward = data.draw(st.none() | st.floats(-3, 3))
        trajectory.turns.append(
            tw.Turn("main", -1, 0, (index,), (), tw.Message("assistant", ""), reward=reward)
        )
    rows = list(trajectory.samples())
    for row in rows:
        if trajectory.reward is None:
            assert row.token_rewards is None
            continue
        assert len(row.token_rewards) == len(row.ids)
        assert all(
            mask or not reward for mask, reward in zip(row.mask, row.token_rewards, strict=True)
        )
    if trajectory.reward is not None and any(trajectory.spans[i].ids for i in sampled):
        assert sum(sum(row.token_rewards) for row in rows) == pytest.approx(
            trajectory.reward, abs=1e-9
        )


def test_each_turn_pays_at_the_end_of_its_reply_and_the_episode_at_the_last_trained_id():
    class Pays(Once):
        said = tw.InlineObservation("!", keep_chars=1)

        def reward(self, trajectory):
            return 0.25

    (trajectory,) = tw.rollout(Pays, tasks(1), tw.ScriptedEngine(["abc", "de"]))
    first, second = trajectory.samples()
    assert trajectory.reward == 1.25
    assert [r for r in first.token_rewards if r] == [0.5]
    assert first.token_rewards[-1] == 0.5
    assert second.token_rewards[-1] == 0.75
