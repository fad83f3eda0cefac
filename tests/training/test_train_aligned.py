"""Teachers with another tokenizer: chunks of both have the same bytes, and a chunk's
probability is that of its text."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.training import E, M, P, chain

from turnwright.config import ModelConfig, RunConfig, TeacherConfig, TrainConfig
from turnwright.errors import ConfigError, TurnwrightError
from turnwright.training import Trainer, create_tiny_model, load_model_and_renderer
from turnwright.training.credit import Credit
from turnwright.training.forward.batch import LossDenominator
from turnwright.training.loss_weights import trainable_tokens
from turnwright.training.teachers.alignment import Translation
from turnwright.training.teachers.build import make_teachers
from turnwright.types import Group, Message, Task

WORDS = {"policy": ("code of amber", "lookup birch"), "teacher": ("of am", "look up bir ch der")}
TEXTS = {
    name: [
        f"<|im_start|>user\n{asked} {n}<|im_end|>\n<|im_start|>assistant\n{said}<|im_end|>"
        for n in range(60)
    ]
    for name, (asked, said) in WORDS.items()
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two models whose tokenizers split the same texts otherwise."""
    folder = tmp_path_factory.mktemp("aligned")
    found = {}
    for seed, (name, texts) in enumerate(TEXTS.items()):
        directory = create_tiny_model(
            ModelConfig(hidden=32, layers=1), texts, folder / name, seed=seed
        )
        found[name] = (directory, *load_model_and_renderer(directory, directory, ModelConfig()))
    policy, teacher = (found[name][2] for name in TEXTS)
    assert policy.encode("lookup birch") != teacher.encode("lookup birch")
    return found


def conversation(renderer, *turns):
    """A chain of observations and replies, as (text of the user, text of the reply)."""
    pieces = []
    for number, (asked, said) in enumerate(turns):
        shown = renderer.open([Message("user", asked)]).ids
        pieces += [(P if not number else E, list(shown)), (M, renderer.encode_reply(said))]
    return chain(pieces, reward=1.0)


texts = st.text(st.sampled_from("amber birch lookup code der \n 0é—"), max_size=30)


@settings(max_examples=60, deadline=None)
@given(asked=texts, said=texts, cut=st.integers(0, 9))
def test_chunks_have_the_same_bytes_and_cover_what_both_split(made, asked, said, cut):
    policy, teacher = (made[name][2] for name in TEXTS)
    found = Translation(policy, teacher, "t")
    prompt, reply = policy.open([Message("user", asked)]).ids, policy.encode_reply(said)
    ids = [*prompt, *reply[: len(reply) - cut]]
    sampled = set(range(len(prompt), len(ids)))
    own, chunks = found.align(ids, sampled)
    for chunk in chunks:
        here, there = (
            b"".join(one.codec.token_bytes[i] for i in part)
            for one, part in (
                (policy, ids[chunk.start : chunk.end]),
                (teacher, own[chunk.own_start : chunk.own_end]),
            )
        )
        assert here == there
        assert chunk.start in sampled or chunk.end - 1 not in sampled
    if not cut:
        assert {place for chunk in chunks for place in range(chunk.start, chunk.end)} == set(
            range(len(ids))
        )
        assert teacher.decode(own) == policy.decode(ids)


def chunk_texts(policy, teacher, said, cut=0):
    """The texts of the chunks of a reply, without its last ids."""
    ids = policy.encode_reply(said)
    ids = ids[: len(ids) - cut]
    _, chunks = Translation(policy, teacher, "t").align(ids, set(range(len(ids))))
    return ["".join(policy.token_texts(ids[chunk.start : chunk.end])) for chunk in chunks]


def test_no_chunk_ends_where_an_id_of_one_goes_on_for_the_other(made):
    """After "look" the teacher may go on to "lookup", which is one id of the policy: "look" is not
    the same event for both. A chunk of its own for what follows would credit a rare "look4" with
    how seldom the policy says 4 there."""
    policy, teacher = (made[name][2] for name in TEXTS)
    assert len(policy.encode("lookup")) == 1
    assert teacher.token_texts(teacher.encode("lookup")) == ["look", "up"]
    assert chunk_texts(policy, teacher, "lookup birch") == ["lookup", " birch", "<|im_end|>"]
    assert chunk_texts(policy, teacher, "look4") == ["look4", "<|im_end|>"]
    assert chunk_texts(policy, teacher, "look") == ["look<|im_end|>"]
    # Cut before it is known which word it is.
    assert chunk_texts(policy, teacher, "look", cut=1) == []
    # And the other way around.
    assert chunk_texts(teacher, policy, "look4") == [
        "look4",
        "<|im_end|>",
    ]


def answers(made, trajectories, **config):
    _, model, renderer = made["policy"]
    teacher = TeacherConfig(path=str(made["teacher"][0]), **config)
    run = RunConfig(
        teacher=(teacher,), train=TrainConfig(reward_weight=0.0, max_mismatch=1e9, lr=0.0)
    )
    return Trainer(
        model, run.train, banned_ids=renderer.banned_ids, teachers=make_teachers(run, renderer)
    )


def test_a_chunk_has_the_probability_of_its_text_and_its_ids_share_the_signal(made):
    policy, teacher = made["policy"][2], made["teacher"][2]
    trajectory = conversation(
        policy, ("code of amber 1", "lookup birch"), ("see der", "look up der")
    )
    trainer = answers(made, [trajectory])
    trainer.teachers.ask([trajectory])
    credits = [Credit(trajectory, 0.0, None, trainable_tokens(trajectory))]
    batch = trainer._batch(credits, LossDenominator.of(credits, "token"))
    (scores,) = trainer.teachers.score(batch)
    own, _ = Translation(policy, teacher, "t").align(
        trajectory.path(3),
        {p for s in (1, 3) for p in range(trajectory.spans[s].start, trajectory.spans[s].end)},
    )
    with torch.no_grad():
        logits = made["teacher"][1](torch.tensor([own])).logits[0]
    logits[:, sorted(teacher.banned_ids)] = -torch.inf
    logp = logits.log_softmax(-1)
    replies = [teacher.encode_reply(text) for text in ("lookup birch", "look up der")]
    starts = [
        next(n for n in range(len(own)) if own[n : n + len(reply)] == reply) for reply in replies
    ]
    expected = sum(
        float(logp[s + k - 1, i])
        for s, reply in zip(starts, replies, strict=True)
        for k, i in enumerate(reply)
    )
    first = torch.tensor([n for n in range(batch.size) if int(scores.chunk_n[n]) == n])
    assert float(scores.logp_n[first].sum()) == pytest.approx(expected, abs=1e-4)
    assert len(first) < batch.size  # some chunk has several ids
    policy_n = torch.arange(batch.size, dtype=torch.float64)
    gap = scores.gap(slice(None), policy_n)
    for n in range(batch.size):
        same = scores.chunk_n == scores.chunk_n[n]
        assert float(gap[n]) == pytest.approx(float(scores.logp_n[n]) - float(policy_n[same].sum()))


def test_what_no_chunk_has_is_counted_and_too_much_of_it_refused(made):
    policy = made["policy"][2]
    good = conversation(policy, ("code of amber 1", "lookup birch"))
    odd = conversation(policy, ("code", "x"))
    odd.key = type(odd.key)("train", 0, "t", 1)
    # Half a character.
    byte = next(i for i, text in enumerate(policy.codec.token_bytes) if text == b"\xc3")
    odd.spans[1].ids = [byte, odd.spans[1].ids[-1]]
    odd.spans[1].logprobs = [-1.0, -1.0]
    groups = [Group(Task("t", id="t"), [good, odd])]
    figures = answers(made, groups, max_unaligned=0.5).step(groups, step=0, steps=1).metrics
    assert figures["tokens_no_teacher"] == 1.0
    assert figures["tokens_trained"] == figures["tokens_sampled"] - 1.0
    assert figures["teacher.teacher.unaligned"] == pytest.approx(1.0 / figures["tokens_sampled"])
    with pytest.raises(
        TurnwrightError,
        match=r"of the sampled ids are in no text .* over teacher.max_unaligned = 0",
    ):
        answers(made, groups, max_unaligned=0.0).step(groups, step=0, steps=1)


def test_distributions_of_other_vocabularies_are_refused(made):
    with pytest.raises(ConfigError, match='signal = "loss" would compare other vocabularies'):
        answers(made, [], signal="loss")
