"""The mask by a template's marks against ours, which comes from sampling:
equal, or it is named why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from kit.corpus import SPECIAL, TOOLS, distinct, template_of, tokenizer_of

import turnwright as tw
from turnwright.config import Limits
from turnwright.errors import TemplateError
from turnwright.renderers import (
    ChatRenderer,
    ChatTemplate,
    HFTokenizer,
    template_names,
    template_source,
)
from turnwright.rollouts.render_check import built_conversation
from turnwright.types import Message, Origin, ToolCall, Tools

ASKED, MORE = "Begin.", "Go on."
FORMS = (
    "{}",
    " {}",
    "\n{}\n",
    "<think>\nHm.\n</think>\n\n{}",
    "Hm.\n</think>\n\n{}",
    "\nHm.\n</think>\n\n{}",
    "Hm.</think>{}",
    "\n<think></think>\n{}",
    "{}<|END_RESPONSE|>",
    "<|channel|>final<|message|>{}",
    " to=user<|message|>{}",
)
"""How a model of a template would say something: at once, behind thinking, or behind thinking
that the prompt opened."""
OTHER = (
    "another text: the template rewrites history, or writes a finished turn in a form that "
    "no reply here has"
)


class Ask(tw.Env):
    """One question more."""

    def reset(self, task: Any, *, seed: int | None = None) -> str:
        self.asked = False
        return ASKED

    def step(self, action: Any) -> tw.Step:
        was, self.asked = self.asked, True
        return tw.Step(None if was else MORE, 0.0, was)


def ours(renderer: ChatRenderer, form: str) -> tuple[list[int], list[int], tuple[Message, ...]]:
    """Ids and mask of a conversation as it was played."""
    limits = Limits(turn_tokens=200)
    end = renderer.encode_reply("")
    replies = [[*renderer.codec.encode(form.format(said)), *end] for said in ("Yes.", "No.")]
    (played,) = tw.rollout(
        Ask, [tw.Task(ASKED)], tw.ScriptedEngine(replies), renderer=renderer, limits=limits
    )
    assert played.error is None, played.error
    built = built_conversation(played, len(played.turns) - 1)
    mask = [0] * len(built.ids)
    for piece in built.pieces:
        if piece.origin is Origin.MODEL:
            mask[piece.start : piece.end] = [1] * (piece.end - piece.start)
    return list(built.ids), mask, tuple(built.messages)


def template_assistant_mask(
    renderer: ChatRenderer, messages: Sequence[Message], tools: Tools = ()
) -> tuple[list[int], list[int]]:
    """The ids of a full render, and a mask: 1 for each id that overlaps a
    `{% generation %}` block, else 0."""
    text, marked = renderer.template.render_with_assistant_ranges(messages, tools)
    ids: list[int] = []
    mask: list[int] = []
    number = 0
    for token, start, end in renderer.codec.encode_with_offsets(text):
        while number < len(marked) and marked[number][1] <= start:
            number += 1
        ids.append(token)
        mask.append(int(number < len(marked) and marked[number][0] < max(end, start + 1)))
    return ids, mask


def compared(renderer: ChatRenderer) -> set[str]:
    """How the two masks differ; empty where they do not."""
    for form in FORMS:
        ids, mask, talk = ours(renderer, form)
        try:
            canonical, marked = template_assistant_mask(renderer, talk)
        except TemplateError:
            # gpt-oss takes no channels in a content: read by a parser, they would be reasoning.
            continue
        if (
            canonical[: len(ids)] == ids
            and sum(message.role == "assistant" for message in talk) == 2
        ):
            return differences(renderer, ids, mask, marked)
    return {OTHER}


def differences(
    renderer: ChatRenderer, ids: list[int], mask: list[int], marked: list[int]
) -> set[str]:
    """What the marks of equal ids disagree about."""
    found: set[str] = set()
    for at, (own, other) in enumerate(zip(mask, marked, strict=False)):
        if own == other:
            continue
        if own:
            found.add(
                "the end of a reply is not marked"
                if ids[at] in renderer.stop_ids
                else "a reply is not marked"
            )
        elif (at and mask[at - 1]) or (at and marked[at - 1] and ids[at - 1] in renderer.stop_ids):
            found.add("the newline behind a reply is marked")
        else:
            found.add("what the generation prompt writes is marked")
    return found


@pytest.mark.parametrize("name", template_names())
def test_named_templates_mark_exactly_what_is_sampled(name: str) -> None:
    template = ChatTemplate(template_source(name), SPECIAL, origin=name)
    assert compared(ChatRenderer(HFTokenizer(tokenizer_of(template)), template)) == set()


EXPLAINED = {
    "the newline behind a reply is marked",
    "what the generation prompt writes is marked",
    OTHER,
}


NOT_COMPARED = {
    *("deepseek_r1_distill", "deepseekv3", "gptoss", "idefics3", "smolvlm"),
    *("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"),
}
"""Those of trl's that are another text in every form that a reply has here."""


def test_templates_of_the_corpus_that_mark_agree_or_it_is_named_why_not() -> None:
    seen: Counter[str] = Counter()
    for name, source in distinct():
        template = template_of(name, source)
        if "endgeneration" not in source:
            continue
        renderer = ChatRenderer(HFTokenizer(tokenizer_of(template)), template)
        found = compared(renderer)
        assert found <= EXPLAINED, f"{name}: {found}"
        seen.update(found or {"equal"})
        assert (OTHER in found) == (
            name.removeprefix("trl/").removesuffix("_training") in NOT_COMPARED
        ), name
        seen["templates"] += 1
    print(dict(seen))


def test_tools_and_calls_are_marked_as_they_are_written() -> None:
    template = ChatTemplate(template_source("qwen3_with_thinking"), SPECIAL)
    renderer = ChatRenderer(HFTokenizer(tokenizer_of(template)), template)
    call = ToolCall("look", {"key": "a"}, "1")
    talk = [Message("user", "u"), Message("assistant", "", tool_calls=(call,), reasoning="So.")]
    ids, mask = template_assistant_mask(
        renderer,
        [*talk, Message("tool", "x", tool_call_id="1"), Message("assistant", "Done.")],
        TOOLS,
    )
    text = renderer.decode([i for i, one in zip(ids, mask, strict=True) if one])
    assert text.startswith("<think>\nSo.\n</think>\n\n")
    assert text.endswith(
        '{"name": "look", "arguments": {"key": "a"}}\n</tool_call><|im_end|>Done.<|im_end|>'
    )
    assert ids == renderer.codec.encode(renderer.decode(ids))
