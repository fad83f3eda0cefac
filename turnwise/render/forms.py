"""The form in which a template takes messages: found by trying, so that what it can show is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from turnwise.errors import TemplateError
from turnwise.render.guard import random_mark
from turnwise.render.template import ChatTemplate
from turnwise.types import ContentPart, Message, ToolCall

Tools = Sequence[Mapping[str, Any]]
_ID_SIZE = 9
"""Letters and digits of a tool call's id where a template insists (Mistral's do)."""

PROBE_TOOLS: Tools = (
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "d",
            "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": ["x"]},
        },
    },
)


def call_id(number: int) -> str:
    """An id of a tool call that strict templates take."""
    return f"call{number:05d}"


def adapt_template(template: ChatTemplate) -> ChatTemplate:
    """The template with messages in the form that it reads: texts as lists of parts, arguments of calls as JSON text."""
    text = random_mark()
    for parts, empty_tools in ((False, False), (True, False), (False, True), (True, True)):
        form = template.with_message_format(parts=parts, empty_tools=empty_tools)
        try:
            if text in form.render((Message("user", text),)):
                template = form
                break
        except TemplateError:
            continue
    said = (Message("user", "u"), Message("assistant", "", tool_calls=(ToolCall("f", {"x": text}, call_id(0)),)))
    for text_arguments in (False, True):
        form = template.with_message_format(text_arguments=text_arguments)
        for tools in ((), PROBE_TOOLS):
            try:
                form.render((*said, Message("tool", "t", tool_call_id=call_id(0), name="f")), tools)
            except TemplateError:
                continue
            return form
    return template


def sample_conversations(template: ChatTemplate) -> Iterator[str]:
    """Conversations of several kinds as a template writes them; those that it refuses are left out."""
    form = adapt_template(template)
    system, user, said = Message("system", "1"), Message("user", "2"), Message("assistant", "3")
    called = Message("assistant", "", tool_calls=(ToolCall("f", {"x": "5"}, call_id(0)),), reasoning="4")
    told = Message("tool", "6", tool_call_id=call_id(0), name="f")
    for rows in (
        (user,),
        (system, user, said),
        (user, replace(said, reasoning="4"), user),
        (user, called, told, said, user),
        (user, called),
    ):
        for tools in ((), PROBE_TOOLS):
            for prompt in (False, True):
                try:
                    yield form.render(rows, tools, generation_prompt=prompt)
                except TemplateError:
                    continue


def _short_ids(messages: Sequence[Message]) -> list[Message]:
    """Ids of tool calls as letters and digits of the one length that strict templates take."""

    def short(name: str | None) -> str:
        kept = "".join(filter(str.isalnum, name or ""))
        return kept[-_ID_SIZE:].rjust(_ID_SIZE, "0")

    return [
        replace(
            m,
            tool_call_id=short(m.tool_call_id) if m.role == "tool" else m.tool_call_id,
            tool_calls=tuple(replace(call, id=short(call.id)) for call in m.tool_calls),
        )
        for m in messages
    ]


def _as_user(messages: Sequence[Message]) -> list[Message]:
    """Results of tools as a user's words, joined with what else the user says: for templates that know no tool role."""
    rows: list[Message] = []
    for message in messages:
        spoken = Message("user", message.content) if message.role == "tool" else message
        if rows and rows[-1].role == spoken.role == "user":
            rows[-1] = replace(rows[-1], content=_joined(rows[-1].content, spoken.content))
        else:
            rows.append(spoken)
    return rows


def _joined(one: str | tuple[ContentPart, ...], other: str | tuple[ContentPart, ...]) -> str | tuple[ContentPart, ...]:
    """Two contents with an empty line between them."""
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}\n\n{other}"
    parts = ((content,) if isinstance(content, str) else content for content in (one, "\n\n", other))
    return tuple(part for content in parts for part in content)


ADAPT: Mapping[str, Callable[[Sequence[Message]], list[Message]]] = {"": list, "ids": _short_ids, "user": _as_user}
"""How messages are changed, by name."""
