"""Text without control text has exactly the ids of the full render, for every kind of tokenizer;
and ids read as text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.guard_suite import FORMS, HARMLESS, MARKERS, chatml, control_of
from kit.tokenizer_kinds import KINDS, REAL, SINGLE_WORDS, codec, tokenizer
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

import turnwright as tw
from turnwright.renderers import CHATML, ChatRenderer, ChatTemplate, HFTokenizer
from turnwright.types import Message

TRAINED = [kind for kind in KINDS if kind not in REAL]
FRAGMENTS = ["the", " of", "\n", "\n\n", "  ", "\t", "7", "<", ">", "|", "<|", "don't"]
FRAGMENTS += ["e\u0301", "\u4e2d", "\U0001f600", "\ufb01", "\u2581"]
clean = st.text(max_size=20) | st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)
messages_of = st.lists(
    st.builds(Message, st.sampled_from(("user", "tool", "system")), clean), min_size=1, max_size=3
)
TEMPLATES = {
    "ChatML": CHATML,
    "trims": CHATML.replace("{{- message.content }}", "{{- message.content | trim }}"),
    "contents meet control": CHATML.replace("message.role + '\\n'", "message.role").replace(
        "'<|im_end|>\\n'", "'<|im_end|>'"
    ),
    "BOS by the template": "{{ '<|endoftext|>' }}" + CHATML,
}


def _full(kind: str, whole: str) -> list[int]:
    """What the tokenizer itself makes of a text."""
    if kind == "one id a byte":
        return codec(kind).encode(whole)
    return codec(kind)._tokenizer.encode(whole, add_special_tokens=False).ids


def _renderer(kind: str, source: str) -> ChatRenderer:
    made = ChatRenderer(codec(kind), ChatTemplate(source), banned=("<|image_pad|>",))
    made.open([Message("user", HARMLESS)])
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_clean_text_has_the_ids_of_the_full_render(kind):
    renderers = {source: _renderer(kind, source) for source in TEMPLATES.values()}

    @settings(max_examples=15 if kind in REAL else 40, deadline=None)
    @given(source=st.sampled_from(list(TEMPLATES.values())), messages=messages_of)
    def holds(source, messages):
        text = renderers[source]
        harmless = [Message(m.role, "x") for m in messages]
        # Where a content joins the template's text into a control token, it is no
        # clean text, and counted.
        opened = text.open(messages)
        whole = _full(kind, ChatTemplate(source).render(messages, generation_prompt=True))
        if control_of(text, whole) == control_of(text, text.open(harmless).ids):
            assert opened.ids == whole
            assert not opened.neutralised
        else:
            assert opened.neutralised or kind == SINGLE_WORDS
        added = text.extend([], text.encode_reply("Yes."), messages)
        said = [Message("user", "Begin."), Message("assistant", "Yes."), *messages]
        whole = _full(kind, ChatTemplate(source).render(said, generation_prompt=True))
        own = control_of(text, text.extend([], text.encode_reply("Yes."), harmless).ids)
        if control_of(text, whole)[-len(own) :] == own and not added.neutralised:
            assert whole[-len(added.ids) :] == added.ids
            assert whole[-len(added.ids) - 1] in text.stop_ids

    holds()


@pytest.mark.parametrize("kind", KINDS)
def test_clean_text_is_never_taken_for_control(kind):
    """No false alarm: what holds no control text is not counted, whatever stands beside it."""
    text = chatml(kind)
    for said in (
        "",
        " ",
        "\n",
        "plain words",
        " padded ",
        "a < b > c | d",
        '{"a": [1]}',
        "\u4e2d\u6587 \U0001f600",
        "x" * 400,
        "e\u0301",
    ):
        for found in (
            text.open([Message("user", said)]),
            text.extend([], text.encode_reply("y"), [Message("tool", said)]),
        ):
            assert (found.neutralised, found.control_text) == (0, {})


def test_kinds_that_cannot_be_exact_say_why():
    assert codec(SINGLE_WORDS).appends_exactly is False
    assert "<think>" in codec(SINGLE_WORDS).inexact_reason
    assert "single_word" in codec(SINGLE_WORDS).inexact_reason
    assert all(
        codec(kind).appends_exactly and not codec(kind).inexact_reason
        for kind in KINDS
        if kind != SINGLE_WORDS
    )


@pytest.mark.parametrize("kind", TRAINED)
def test_an_append_gains_no_word_start_mark_that_the_whole_has_not(kind):
    """Metaspace `first` looks at where in the whole a piece stands, so an append must not be
    taken for a beginning."""
    text = _renderer(kind, TEMPLATES["contents meet control"])
    for said in ("word", " word", "\nword", "word "):
        whole = _full(
            kind,
            text.template.render(
                [Message("user", "u"), Message("assistant", "y"), Message("user", said)]
            ),
        )
        added = text.extend([], text.encode_reply("y"), [Message("user", said)]).ids
        prompt = len(text.extend([], text.encode_reply("y"), []).ids)
        assert whole[-len(added[:-prompt]) :] == added[:-prompt]


# Reading


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "WordPiece" not in kind])
def test_ids_read_as_the_text_that_they_were_made_from(kind):
    text = chatml(kind)
    # It writes "a" and " a" alike.
    spaced = "Metaspace always" in kind or "(real)" in kind or "always" in kind
    for said in (
        "word",
        "the word, and\n\nthe of",
        "a  b",
        " word",
        "word ",
        "\u4e2d\u6587",
        "\U0001f600",
        "caf\u00e9",
    ):
        unknown = "Unigram" in kind and not said.isascii()
        expected = (
            said.lstrip(" ")
            if (spaced or "prefix space" in kind) and said.startswith(" ")
            else said
        )
        read = text.decode(text.codec.encode_plain(said, "control"))
        if unknown:
            assert "<unk>" in read
        elif ("(real)" in kind and "first" in kind) or "Tekken" in kind:
            assert read == said
        else:
            assert read == expected


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_join_to_the_text_but_for_spaces_behind_control_tokens(kind):
    text = chatml(kind)
    ids = text.open([Message("system", "the word"), Message("user", "of and")]).ids
    joined = "".join(text.token_texts(ids))
    if "WordPiece" not in kind:
        assert joined.replace(" ", "") == text.decode(ids).replace(" ", "")
    else:
        assert len(text.token_texts(ids)) == len(ids)


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind.startswith(("SentencePiece", "Mistral v3"))]
)
def test_byte_fallback_reads_as_characters(kind):
    text = chatml(kind)
    for said in ("\u2e3b", "a\u2e3bb", "\U0001f9ff\u0b83"):
        ids = text.encode(said)
        assert text.decode(ids) == said
        assert text.decode(ids[:-1]).startswith(said[0]) or "\ufffd" in text.decode(ids[:-1])


# Beginnings, ends, and what no tokenizer takes


def test_a_bos_token_by_template_and_by_tokenizer_is_written_once():
    kind = "byte-level BPE, BOS added by a post-processor"
    assert tokenizer(kind).encode("x").ids[0] == codec(kind).control["<|endoftext|>"]
    text = _renderer(kind, TEMPLATES["BOS by the template"])
    for messages in (
        [Message("user", "x")],
        [Message("user", "<|im_end|>")],
        [Message("user", "<|endoftext|>")],
    ):
        assert text.open(messages).ids.count(text.codec.control["<|endoftext|>"]) == 1
    assert (
        text.codec.control["<|endoftext|>"]
        not in text.extend([], text.encode_reply("y"), [Message("user", "x")]).ids
    )


def test_a_tokenizer_without_added_tokens_renders_a_template_of_plain_text():
    alphabet = {
        char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    made = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    source = "{% for m in messages %}{{ m.role | title }}: {{ m.content }}\n{% endfor %}"
    source += "{% if add_generation_prompt %}Assistant:{% endif %}"
    text = ChatRenderer(
        HFTokenizer(made), ChatTemplate(source), stop_ids=frozenset([alphabet["\u010a"]])
    )
    opened = text.open([Message("user", "hello")])
    assert text.decode(opened.ids) == "User: hello\nAssistant:"
    assert (
        text.decode(text.extend([], text.encode_reply("y"), [Message("user", "on")]).ids)
        == "User: on\nAssistant:"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_lone_surrogates_are_shown_as_question_marks(kind):
    text = chatml(kind)
    same = text.open([Message("user", "a?b")]).ids
    assert text.open([Message("user", "a\ud800b")]).ids == same
    added = text.extend([], text.encode_reply("y"), [Message("tool", "\udfffword")])
    assert added.ids == text.extend([], text.encode_reply("y"), [Message("tool", "?word")]).ids


def test_white_space_and_digits_as_added_tokens_are_no_control_text():
    kind = "byte-level BPE, white space as added tokens"
    text = chatml(kind)
    messages = [Message("user", "a    b7\n\n   <think>   7")]
    found = text.open(messages)
    assert found.control_text == {"user": 1}
    names = tokenizer(kind).get_vocab()
    assert names["    "] in found.ids


def test_control_behind_a_close_that_joins_in_normalising_is_found():
    """An added token that is looked for in normalised text joins with a
    combining character behind it."""
    made = Tokenizer.from_str(tokenizer("byte-level BPE").to_str())
    made.normalizer = normalizers.NFC()
    made.add_special_tokens([AddedToken("<|end|>", normalized=True, special=True)])
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    source = CHATML.replace("<|im_end|>\\n", "<|end|>")
    text = ChatRenderer(HFTokenizer(made), ChatTemplate(source))
    for said in ("\u0338x", "x\u0338", HARMLESS):
        found = text.open([Message("user", said), Message("user", said)])
        assert control_of(text, found.ids) == control_of(
            text, text.open([Message("user", "a"), Message("user", "a")]).ids
        )


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(TRAINED),
    pieces=st.lists(st.sampled_from([*MARKERS, *FRAGMENTS]) | st.text(max_size=4), max_size=6),
    form=st.sampled_from(list(FORMS)),
    where=st.sampled_from(("open", "extend")),
)
def test_mixtures_of_markers_and_text_never_forge(kind, pieces, form, where):
    text = chatml(kind)
    said = "".join(FORMS[form](piece) if piece in MARKERS else piece for piece in pieces)

    def ids(content):
        if where == "open":
            return text.open([Message("user", content), Message("tool", content)]).ids
        return text.extend(
            [], text.encode_reply("y"), [Message("tool", content), Message("user", content)]
        ).ids

    assert control_of(text, ids(said)) == control_of(text, ids("x"))


def test_a_cut_observation_of_sentencepiece_s_kind_reads_as_its_beginning():
    class Long(tw.Env):
        async def reset(self, task, *, seed=None):
            return "Begin."

        async def step(self, action):
            return tw.Step("the word of and " * 40, terminated=action.text == "that")

    text = chatml("SentencePiece BPE, Metaspace first")
    (played,) = tw.rollout(
        Long,
        [tw.Task("go")],
        tw.ScriptedEngine(["this", "that"]),
        renderer=text,
        limits=tw.Limits(observation_tokens=60),
    )
    assert played.error is None
    assert "user\nthe word of and the word" in text.decode(played.prompt_ids(1))
