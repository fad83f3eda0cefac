"""A Hugging Face chat template, run in Jinja's sandbox without transformers."""

from __future__ import annotations

import json
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


_CONVERSATION = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
"""Variables that every rendering sets itself."""


def digest(value: Any) -> str:
    """A short hash of plain values, the same in every process."""
    return sha256(json.dumps(value, sort_keys=True, default=repr).encode("utf-8", "surrogatepass")).hexdigest()[:16]


class Template:
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

        assert self._compiled is not None  # says what is wrong with it
        return frozenset(meta.find_undeclared_variables(self._environment.parse(self.source)) - _CONVERSATION)

    @cached_property
    def _environment(self) -> jinja2.Environment:
        import jinja2  # 50 ms, so only when a template is rendered
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import SandboxedEnvironment

        class Generation(Extension):
            """Reads `{% generation %}`, which marks the assistant's part; the text in it is rendered as it is."""

            tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return jinja2.nodes.Scope(body).set_lineno(line)

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        # Not the immutable one: templates fill lists of their own, and what they are given is made anew for each rendering.
        environment = SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = self._now.strftime
        return environment

    @cached_property
    def _compiled(self) -> jinja2.Template:
        import jinja2

        try:
            return self._environment.from_string(self.source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"{self.origin}: not a Jinja template ({error})") from error

    def fit(
        self,
        *,
        parts: bool | None = None,
        text_arguments: bool | None = None,
        empty_tools: bool | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Template:
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
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, generation_prompt: bool = False
    ) -> str:
        """The text of a conversation.

        Raises:
            TemplateError: when the template refuses it or breaks on it.
        """
        compiled = self._compiled
        try:
            return compiled.render(
                **self._variables,
                messages=[self._view(message) for message in messages],
                tools=list(tools) or self._no_tools,
                documents=None,
                add_generation_prompt=generation_prompt,
            )
        except Exception as error:  # any exception type can come out of a template
            roles = ", ".join(message.role for message in messages)
            raise TemplateError(f"{self.origin}: cannot show a conversation of {roles}: {error}") from error

    def _view(self, message: Message) -> dict[str, Any]:
        row = message.to_dict()
        if message.reasoning is not None:
            row["thinking"] = message.reasoning  # templates differ in the name
        if self._parts and isinstance(message.content, str):
            row["content"] = [{"type": "text", "text": message.content}]
        if self._text_arguments:
            for call in row.get("tool_calls", ()):
                call["function"]["arguments"] = _to_json(call["function"]["arguments"])
        return row


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
