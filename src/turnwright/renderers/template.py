"""Jinja chat templates, the named presets, and the message format that a template accepts.

`ChatTemplate.render` is a function of its arguments alone: the clock is frozen, and the template
runs in a sandbox with a budget of work (`TemplateSandbox`). Templates differ in the format of
messages that they accept, so `adapt_template` tries a few, and `ADAPT` has the changes of tool
results that some require. The parts at the end are for `model.template` and
`model.template_args`: `find_source`, `check_arguments`.

What a template does with a growing conversation is found out in `probe.py` and `contract.py`.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwright.config.values import is_template_file
from turnwright.errors import ConfigError, TemplateError, did_you_mean
from turnwright.files import read_text
from turnwright.renderers.inspected import is_watching, watch_nothing
from turnwright.types import ContentPart, Message, ToolCall, Tools

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
"""  # noqa: E501
"""ChatML, append-only, with short tool descriptions; for models without a template of their own."""


_MAX_ERROR_CHARS = 500
"""Maximum characters of a template's own error in our messages."""
_CONVERSATION = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
"""Variables that every rendering sets."""


def random_mark() -> str:
    """Return random digits, which survive trimming, JSON and changes of case."""
    return str(10**20 + secrets.randbelow(9 * 10**20))


def digest(value: Any) -> str:
    """Return a short hash of plain values, the same in every process."""
    text = json.dumps(value, sort_keys=True, default=repr)
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class ChatTemplate:
    """Compiled chat template; rendering is pure, with a frozen clock."""

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any] | None = None,
        *,
        origin: str = "chat template",
    ) -> None:
        """`variables` are more names that the template may use (such as `bos_token`); `origin`
        names it in errors."""
        self.source = source
        self.origin = origin
        self._variables = dict(variables or {})
        self._now = datetime.now()
        self._parts = False
        self._text_arguments = False
        self._no_tools: list[Any] | None = None
        self._writes_parts: dict[str, bool] = {}
        self.fingerprint = digest([source, self._variables])

    @property
    def variables(self) -> Mapping[str, Any]:
        """Names that the template may use besides the conversation, such as `bos_token`."""
        return self._variables

    @cached_property
    def parameters(self) -> frozenset[str]:
        """Variables that the template reads besides the conversation, such as `enable_thinking`.

        Raises `TemplateError` if the source is not a template.
        """
        from jinja2 import meta

        syntax_tree = self._compiled.environment.parse(self.source)
        return frozenset(meta.find_undeclared_variables(syntax_tree) - _CONVERSATION)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return self._compile(None)

    @cached_property
    def _watched(self) -> jinja2.Template:
        """The template, compiled so that what it inspects of placeholders is recorded."""
        from turnwright.renderers.watching_sandbox import watching_template

        return watching_template(self._now.strftime, self.source)

    @cached_property
    def _with_marks(self) -> tuple[jinja2.Template, re.Pattern[str]]:
        """The template with marks around `{% generation %}` blocks, and the pattern of the
        marks."""
        begin = f"{{{secrets.token_hex(12)}}}"
        end = f"{{{secrets.token_hex(12)}}}"
        return self._compile((begin, end)), re.compile(f"({begin})|({end})")

    def _compile(self, marks: tuple[str, str] | None) -> jinja2.Template:
        # Importing jinja2 takes 50 ms.
        from turnwright.renderers.template_sandbox import TemplateSandbox

        try:
            return TemplateSandbox(self._now.strftime, marks).template(self.source)
        except Exception as error:  # the parser may raise anything
            reason = str(error)[:_MAX_ERROR_CHARS]
            raise TemplateError(f"{self.origin}: not a Jinja template ({reason})") from error

    def with_message_format(
        self,
        *,
        parts: bool | None = None,
        text_arguments: bool | None = None,
        empty_tools: bool | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> ChatTemplate:
        """Return the same template with messages in another format.

        Args:
            parts: texts as lists of parts (`[{"type": "text", ...}]`), which some vision templates
                require.
            text_arguments: call arguments as JSON text (OpenAI's wire format) instead of objects.
            empty_tools: an empty list if there are no tools, for templates that iterate without a
                check.
            variables: more settings of the template.
        """
        _ = self._compiled  # compile once for all formats
        twin = copy(self)
        if parts is not None:
            twin._parts = parts
        if text_arguments is not None:
            twin._text_arguments = text_arguments
        if empty_tools is not None:
            twin._no_tools = [] if empty_tools else None
        twin._variables = self._variables | dict(variables or {})
        twin._writes_parts = {}
        return twin

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        *,
        generation_prompt: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render a conversation, as transformers' `apply_chat_template` does.

        `documents` are sources that the template may include, dicts with `title` and `text`.

        Raises `TemplateError` if the template rejects the conversation, fails, or exceeds the work
        budget.
        """
        compiled = self._watched if is_watching() else self._compiled
        return self._render(compiled, messages, tools, generation_prompt, documents)

    def try_render(
        self, messages: Sequence[Message], tools: Tools = (), *, generation_prompt: bool = False
    ) -> str | None:
        """Render a conversation; None if the template rejects it."""
        try:
            return self.render(messages, tools, generation_prompt=generation_prompt)
        except TemplateError:
            return None

    def render_with_assistant_ranges(
        self, messages: Sequence[Message], tools: Tools = (), *, generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation; also return the (start, end) ranges marked as the assistant's.

        The marks are `{% generation %}` and `{% endgeneration %}`; a template without them marks
        nothing.

        Raises `TemplateError` as in `render`, and if the template changes the text between marks.
        """
        compiled, mark_pattern = self._with_marks
        marked_text = self._render(compiled, messages, tools, generation_prompt, None)

        # Positions count the text without marks. Blocks may be nested: the outermost one counts.
        pieces: list[str] = []
        ranges: list[tuple[int, int]] = []
        size = 0
        range_start = 0
        open_blocks = 0
        piece_start = 0
        for mark in mark_pattern.finditer(marked_text):
            pieces.append(marked_text[piece_start : mark.start()])
            size += len(pieces[-1])
            piece_start = mark.end()
            if mark.group(1):
                if not open_blocks:
                    range_start = size
                open_blocks += 1
            else:
                open_blocks -= 1
                if open_blocks == 0 and size > range_start:
                    ranges.append((range_start, size))
        text = "".join(pieces) + marked_text[piece_start:]

        if open_blocks or text != self.render(messages, tools, generation_prompt=generation_prompt):
            raise TemplateError(
                f"{self.origin}: changes the text it marks by {{% generation %}}, so its position "
                "is unknown"
            )
        return text, ranges

    def _render(
        self,
        compiled: jinja2.Template,
        messages: Sequence[Message],
        tools: Tools,
        generation_prompt: bool,
        documents: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        from turnwright.renderers.template_sandbox import render_budget

        try:
            with render_budget():
                conversation: dict[str, Any] = {
                    "messages": [self._view(message) for message in messages],
                    "tools": [_plain(tool) for tool in tools] or self._no_tools,
                    "documents": None,
                    "add_generation_prompt": generation_prompt,
                }
                if documents is not None:
                    conversation["documents"] = [_plain(document) for document in documents]
                return compiled.render(self._variables | conversation)
        except Exception as error:  # a template may raise anything
            roles = ", ".join(message.role for message in messages)
            reason = str(error)[:_MAX_ERROR_CHARS]
            raise TemplateError(
                f"{self.origin}: cannot render a conversation of {roles}: {reason}"
            ) from error

    def _view(self, message: Message) -> dict[str, Any]:
        """Return a message in the format that the template accepts."""
        row = message.to_dict()
        if message.reasoning is not None:
            row["thinking"] = message.reasoning  # the name differs by template
        if isinstance(message.content, str):
            if self._parts:
                row["content"] = [{"type": "text", "text": message.content}]
        elif not message.media and not self.writes_parts(message.role):
            row["content"] = message.text

        if self._text_arguments:
            for call in row.get("tool_calls", ()):
                function = call["function"]
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return row

    def writes_parts(self, role: str) -> bool:
        """Return whether the template itself writes each text of a message whose content is a list
        of them.

        One that does not may write the list as Python would print it, or reject it; so there the
        texts are joined.
        """
        if role not in self._writes_parts:
            self._writes_parts[role] = False  # also while it is being found out
            with watch_nothing():
                self._writes_parts[role] = self._find_whether_it_writes_parts(role)
        return self._writes_parts[role]

    def _find_whether_it_writes_parts(self, role: str) -> bool:
        first, second = random_mark(), random_mark()
        message = Message(role, (first, second))
        conversation: tuple[Message, ...] = (message,)
        tools: Tools = ()
        if role in ("system", "developer"):
            conversation = (message, ASKED)
        elif role == "assistant":
            conversation = (ASKED, message)
        elif role == "tool":
            result = replace(message, tool_call_id=PROBE_CALL.id, name=PROBE_CALL.name)
            conversation = (ASKED, Message("assistant", "", (PROBE_CALL,)), result)
            tools = PROBE_TOOLS

        twin = copy(self)
        twin._writes_parts = {role: True}  # so that the template receives the list
        text = twin.try_render(conversation, tools) or ""
        between, both_in_order, rest = text.partition(first)[2].partition(second)
        written_once = bool(both_in_order) and text.count(first) == 1 and second not in rest
        return written_once and not between.strip()


def _plain(value: Any) -> Any:
    """Reduce a value to plain types, because templates must not reach methods of objects."""
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


def probe_tool(name: str, about: str, argument: str, argument_about: str) -> Mapping[str, Any]:
    """Return the schema of a tool with one required string."""
    properties = {argument: {"type": "string", "description": argument_about}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    return {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": parameters},
    }


PROBE_TOOLS: Tools = (probe_tool("f", "d", "x", "x"),)
_ID_SIZE = 9
"""Length of a tool call id for strict templates (Mistral's), which accept letters and digits."""


def call_id(number: int) -> str:
    """Return a tool call id that strict templates accept."""
    return f"call{number:05d}"


ASKED = Message("user", "u")
PROBE_CALL = ToolCall("f", {"x": "1"}, call_id(0))


def probe_result(text: str, number: int = 0) -> Message:
    """Return the result of a probe's call."""
    return Message("tool", text, tool_call_id=call_id(number), name="f")


def adapt_template(template: ChatTemplate) -> ChatTemplate:
    """Return the template with the message format that it accepts.

    Texts may have to be parts, the list of tools empty instead of missing, and the arguments of
    calls JSON text.
    """
    text = random_mark()
    for parts, empty_tools in ((False, False), (True, False), (False, True), (True, True)):
        variant = template.with_message_format(parts=parts, empty_tools=empty_tools)
        if text in (variant.try_render((Message("user", text),)) or ""):
            template = variant
            break

    calls = (ToolCall("f", {"x": text}, call_id(0)),)
    conversation = (ASKED, Message("assistant", "", calls), probe_result("t"))
    for text_arguments in (False, True):
        variant = template.with_message_format(text_arguments=text_arguments)
        for tools in ((), PROBE_TOOLS):
            if variant.try_render(conversation, tools) is not None:
                return variant
    return template


def sample_conversations(template: ChatTemplate) -> Iterator[str]:
    """Yield renderings of several kinds of conversations; skip those that the template rejects."""
    adapted = adapt_template(template)
    system = Message("system", "1")
    user = Message("user", "2")
    answer = Message("assistant", "3")
    call = ToolCall("f", {"x": "5"}, call_id(0))
    called = Message("assistant", "", tool_calls=(call,), reasoning="4")
    result = probe_result("6")

    for conversation in (
        (user,),
        (system, user, answer),
        (user, replace(answer, reasoning="4"), user),
        (user, called, result, answer, user),
        (user, called),
    ):
        for tools in ((), PROBE_TOOLS):
            for prompt in (False, True):
                text = adapted.try_render(conversation, tools, generation_prompt=prompt)
                if text is not None:
                    yield text


def calls_as_text(message: Message) -> Message:
    """Return a demonstration with its calls in its text.

    They are in Hermes' format, in which replies without a format of their own are parsed.
    """
    if not message.tool_calls:
        return message
    texts = [message.text] if message.text else []
    for call in message.tool_calls:
        body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
        texts.append(f"<tool_call>\n{body}\n</tool_call>")
    return replace(message, content="\n".join(texts), tool_calls=())


def _short_ids(messages: Sequence[Message]) -> list[Message]:
    """Reduce tool call ids to letters and digits of the length that strict templates accept."""

    def short(call_id: str | None) -> str:
        letters_and_digits = "".join(filter(str.isalnum, call_id or ""))
        return letters_and_digits[-_ID_SIZE:].rjust(_ID_SIZE, "0")

    rows = []
    for message in messages:
        calls = tuple(replace(call, id=short(call.id)) for call in message.tool_calls)
        answered = message.tool_call_id
        if message.role == "tool":
            answered = short(answered)
        rows.append(replace(message, tool_call_id=answered, tool_calls=calls))
    return rows


def _as_user(messages: Sequence[Message]) -> list[Message]:
    """Convert tool results to user text, joined with adjacent user messages, for templates without
    a tool role."""
    rows: list[Message] = []
    for message in messages:
        row = message
        if message.role == "tool":
            # Texts in a list are one text, as they would be in a result.
            row = Message("user", message.content if message.media else message.text)
        if rows and rows[-1].role == row.role == "user":
            rows[-1] = replace(rows[-1], content=_joined(rows[-1].content, row.content))
        else:
            rows.append(row)
    return rows


def _joined(
    first: str | tuple[ContentPart, ...], second: str | tuple[ContentPart, ...]
) -> str | tuple[ContentPart, ...]:
    """Join two contents with an empty line between them."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"

    first_parts = (first,) if isinstance(first, str) else first
    second_parts = (second,) if isinstance(second, str) else second
    return (*first_parts, "\n\n", *second_parts)


ADAPT: Mapping[str, Callable[[Sequence[Message]], list[Message]]] = {
    "": list,
    "ids": _short_ids,
    "user": _as_user,
}
"""Changes of messages that templates require, by name."""


_NAMED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "chatml": ("chatml.jinja", {}),
    "qwen_vl": ("qwen_vl.jinja", {}),
    "qwen3_with_thinking": ("qwen3.jinja", {"keep_thinking": True}),
    "qwen3_without_thinking": ("qwen3.jinja", {"keep_thinking": False}),
}
"""Template file in this package and the variables to set in it, by name."""


def template_names() -> list[str]:
    """Return the names that `model.template` accepts."""
    return sorted(_NAMED)


def template_source(name: str) -> str:
    """Return the Jinja source of a named template.

    Raises `ConfigError` for an unknown name.
    """
    if name not in _NAMED:
        near = did_you_mean(name, _NAMED)
        raise ConfigError(
            f"model.template = {json.dumps(name)}: no such template; "
            f"{near + ' ' if near else ''}named ones are {', '.join(template_names())}; for your "
            "own, give its file, such as template.jinja"
        )
    file_name, variables = _NAMED[name]
    file = files("turnwright.renderers").joinpath("templates", file_name)
    return with_preset_variables(file.read_text(encoding="utf-8"), variables)


def find_source(name: str) -> tuple[str, str]:
    """Return the source of a template given by name or file, and its name in errors.

    Raises `ConfigError` if there is no such template, or its file cannot be read.
    """
    if name in _NAMED or not (is_template_file(name) or Path(name).exists()):
        return template_source(name), f"template {name}"
    try:
        return read_text(Path(name)), name
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(
            f'model.template = "{name}": cannot be read ({reason}); name a Jinja file in UTF-8'
        ) from None


def with_preset_variables(source: str, variables: Mapping[str, Any]) -> str:
    """Prepend default values for variables, so that the template renders the same wherever it is
    used.

    Chat templates run with `trim_blocks`, which removes the newline after each prepended line.

    Example: `with_preset_variables("{{ x }}", {"x": True})` begins with
    `{%- if x is not defined %}{% set x = true %}{% endif %}`
    """
    lines = [
        f"{{%- if {name} is not defined %}}{{% set {name} = {_literal(value)} %}}{{% endif %}}\n"
        for name, value in variables.items()
    ]
    return "".join(lines) + source


def check_arguments(template: ChatTemplate, arguments: Mapping[str, Any]) -> None:
    """Check that `model.template_args` names variables of the template.

    Raises `ConfigError` for an unused variable, or a value that is not JSON; `TemplateError` if the
    source is not a template.
    """
    for name, value in arguments.items():
        if name not in template.parameters:
            names = ", ".join(sorted(template.parameters)) or "none"
            remedy = did_you_mean(name, template.parameters) or f"it uses {names}"
            raise ConfigError(
                f"model.template_args.{name}: {template.origin} has no such variable; {remedy}"
            )
        try:
            _literal(value)
        except (TypeError, ValueError):
            raise ConfigError(
                f"model.template_args.{name} = {value!r:.80}: not a JSON value"
            ) from None


def _literal(value: Any) -> str:
    """Format a JSON value as a Jinja expression."""
    if isinstance(value, Mapping):
        items = [f"{_literal(str(key))}: {_literal(item)}" for key, item in value.items()]
        return "{" + ", ".join(items) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if value is None:
        return "none"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
