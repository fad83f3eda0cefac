"""A Hugging Face chat template, run in Jinja's sandbox without transformers."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from copy import copy
from datetime import datetime
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from turnwise.errors import TemplateError
from turnwise.types import Message

if TYPE_CHECKING:
    import jinja2

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\nCall one by writing <tool_call>{"name": NAME, "arguments": {...}}</tool_call>.' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""ChatML, append-only, with tools described briefly; for models that have no template of their own."""


_MOST_SAID = 500
"""Characters of a template's own error that are told."""
_CONVERSATION = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
"""Variables that every rendering sets itself."""


def digest(value: Any) -> str:
    """A short hash of plain values, the same in every process."""
    return sha256(json.dumps(value, sort_keys=True, default=repr).encode("utf-8", "surrogatepass")).hexdigest()[:16]


class ChatTemplate:
    """A compiled chat template; rendering is pure, its clock stands still."""

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None, *, origin: str = "chat template") -> None:
        """
        Args:
            source: the Jinja source.
            variables: further names that the template may use (`bos_token` and the like).
            origin: what errors call the template: a file, say.
        """
        self.source = source
        self.origin = origin
        self._variables = dict(variables or {})
        self._now = datetime.now()
        self._parts = False
        self._text_arguments = False
        self._no_tools: list[Any] | None = None
        self.fingerprint = digest([source, self._variables])

    @cached_property
    def parameters(self) -> frozenset[str]:
        """The variables that the template reads and that are not a part of the conversation, such as `enable_thinking`.

        Raises:
            TemplateError: when it is no template.
        """
        from jinja2 import meta

        compiled = self._compiled
        return frozenset(meta.find_undeclared_variables(compiled.environment.parse(self.source)) - _CONVERSATION)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return self._compile(None)

    @cached_property
    def _with_marks(self) -> tuple[jinja2.Template, re.Pattern[str]]:
        """The template that writes marks around what stands in `{% generation %}`, and what they look like."""
        begin, end = (f"{{{secrets.token_hex(12)}}}" for _ in range(2))
        return self._compile((begin, end)), re.compile(f"({begin})|({end})")

    def _compile(self, marks: tuple[str, str] | None) -> jinja2.Template:
        from turnwise.render.sandbox import TemplateSandbox  # jinja2 takes 50 ms, so only when a template is rendered

        try:
            return TemplateSandbox(self._now.strftime, marks).template(self.source)
        except Exception as error:  # whatever a text can make of a parser
            raise TemplateError(f"{self.origin}: not a Jinja template ({str(error)[:_MOST_SAID]})") from error

    def with_message_format(
        self,
        *,
        parts: bool | None = None,
        text_arguments: bool | None = None,
        empty_tools: bool | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> ChatTemplate:
        """The same template, shown messages in another form.

        Args:
            parts: texts as lists of parts (`[{"type": "text", ...}]`), which some templates of vision models insist on.
            text_arguments: arguments of tool calls as JSON text (OpenAI's wire format) in place of objects.
            empty_tools: an empty list where there are no tools, for templates that go through them without asking.
            variables: further settings of the template.
        """
        _ = self._compiled  # once for all forms
        twin = copy(self)
        twin._parts = self._parts if parts is None else parts
        twin._text_arguments = self._text_arguments if text_arguments is None else text_arguments
        if empty_tools is not None:
            twin._no_tools = [] if empty_tools else None
        twin._variables = self._variables | dict(variables or {})
        return twin

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        generation_prompt: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of a conversation, as transformers' `apply_chat_template` writes it.

        Args:
            documents: what the template may show as sources, dicts with `title` and `text`.

        Raises:
            TemplateError: when the template refuses it, breaks on it, or does more work than a chat template has to.
        """
        return self._render(self._compiled, messages, tools, generation_prompt, documents)

    def render_with_assistant_ranges(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and where in it (start, end) stands what the template marks as the assistant's.

        The marks are `{% generation %}` and `{% endgeneration %}`; a template without them marks nothing.

        Raises:
            TemplateError: as `render`, and when the template changes what stands between marks.
        """
        compiled, pattern = self._with_marks
        found = self._render(compiled, messages, tools, generation_prompt, None)
        pieces: list[str] = []
        spans: list[tuple[int, int]] = []
        at = depth = begun = position = 0
        for match in pattern.finditer(found):
            pieces.append(found[position : match.start()])
            at += len(pieces[-1])
            position = match.end()
            if match.group(1):
                begun = begun if depth else at
                depth += 1
            else:
                depth -= 1
                if depth == 0 and at > begun:
                    spans.append((begun, at))
        text = "".join(pieces) + found[position:]
        if depth or text != self.render(messages, tools, generation_prompt=generation_prompt):
            raise TemplateError(f"{self.origin}: changes what it marks by {{% generation %}}, so it is not known where that is")
        return text, spans

    def _render(
        self,
        compiled: jinja2.Template,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        generation_prompt: bool,
        documents: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        from turnwise.render.metered import render_budget

        try:
            with render_budget():
                return compiled.render(
                    self._variables
                    | {
                        "messages": [self._view(message) for message in messages],
                        "tools": [_plain(tool) for tool in tools] or self._no_tools,
                        "documents": None if documents is None else [_plain(document) for document in documents],
                        "add_generation_prompt": generation_prompt,
                    }
                )
        except Exception as error:  # any exception type can come out of a template
            roles = ", ".join(message.role for message in messages)
            said = str(error)[:_MOST_SAID]
            raise TemplateError(f"{self.origin}: cannot show a conversation of {roles}: {said}") from error

    def _view(self, message: Message) -> dict[str, Any]:
        row = message.to_dict()
        if message.reasoning is not None:
            row["thinking"] = message.reasoning  # templates differ in the name
        if self._parts and isinstance(message.content, str):
            row["content"] = [{"type": "text", "text": message.content}]
        if self._text_arguments:
            for call in row.get("tool_calls", ()):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return row


def _plain(value: Any) -> Any:
    """A value of plain types alone: objects have methods that a template must not reach."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return float(value) if isinstance(value, float) else int(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"
