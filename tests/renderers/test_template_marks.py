"""Where a template marks the assistant's part."""

from __future__ import annotations

import pytest

from turnwright.errors import TemplateError
from turnwright.renderers import ChatTemplate, template_names, template_source
from turnwright.types import Message

TALK = [
    Message("user", "Hi"),
    Message("assistant", "Yes.", reasoning="So."),
    Message("user", "?"),
    Message("assistant", "No."),
]


def test_marks_stand_around_replies_and_their_end() -> None:
    for name in template_names():
        template = ChatTemplate(template_source(name))
        text, spans = template.render_with_assistant_ranges(TALK)
        assert text == template.render(TALK)
        marked = [text[start:end] for start, end in spans]
        assert marked[-1] == "No.<|im_end|>"
        assert marked[0].endswith("Yes.<|im_end|>")
        assert len(marked) == 2
        assert template.render_with_assistant_ranges(TALK[:1], generation_prompt=True)[1] == []


def test_marks_in_marks_are_one_and_empty_ones_none() -> None:
    source = (
        "a{% generation %}b{% generation %}c{% endgeneration %}d{% endgeneration "
        "%}{% generation %}{% endgeneration %}e"
    )
    assert ChatTemplate(source).render_with_assistant_ranges([]) == ("abcde", [(1, 4)])
    assert ChatTemplate("plain").render_with_assistant_ranges([]) == ("plain", [])


def test_what_is_marked_may_not_be_changed_afterwards() -> None:
    source = "{% set x %}{% generation %}  b  {% endgeneration %}{% endset %}{{ x | trim }}"
    with pytest.raises(TemplateError, match="changes the text it marks"):
        ChatTemplate(source).render_with_assistant_ranges([])
