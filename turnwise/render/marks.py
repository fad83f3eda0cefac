"""The assistant's part of a conversation by a template's own marks, on ids; to be held against what was sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.render.chat import ChatRenderer
from turnwise.types import Message


def template_assistant_mask(
    renderer: ChatRenderer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[list[int], list[int]]:
    """The ids of a full render, and 1 for each that touches what stands in `{% generation %}`, else 0.

    What is trained never comes from here: a mask by marks knows nothing of what was sampled, and templates differ in whether
    they mark the newline behind a reply's end.

    Raises:
        TemplateError: when the template cannot show the conversation, or changes what it marks.
    """
    text, marked = renderer.template.render_with_assistant_ranges(messages, tools)
    ids: list[int] = []
    mask: list[int] = []
    number = 0
    for token, start, end in renderer.codec.encode_with_offsets(text):
        while number < len(marked) and marked[number][1] <= start:
            number += 1
        inside = number < len(marked) and marked[number][0] < max(end, start + 1)
        ids.append(token)
        mask.append(int(inside))
    return ids, mask
