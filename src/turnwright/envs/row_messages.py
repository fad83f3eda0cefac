"""Conversations and tools of rows, as several systems write them, in OpenAI's format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from turnwright.errors import TaskError, did_you_mean
from turnwright.types import Message, ToolCall, is_image_object
from turnwright.types.media import Image, ImageRef, Video, VideoRef
from turnwright.types.messages import ROLES

CALL_ROLES = ("tool_call", "function_call")
"""Roles of ms-swift whose message is a call of the assistant."""

RESULT_ROLES = ("tool_response", "function_response", "observation", "observations", "function")
"""Roles of ms-swift, and OpenAI's older one, whose message is the result of a call."""

_OUR_ROLES = {
    **dict.fromkeys(("human", "question", "instruction"), "user"),
    **dict.fromkeys(("gpt", "bot", "ai", "model", "chatgpt", "answer"), "assistant"),
    **dict.fromkeys(("ipython", "tool_result", "tool_results"), "tool"),
}
"""Our role for roles of other formats."""

_PART_TYPES = (
    "text",
    "input_text",
    "output_text",
    "image",
    "image_url",
    "input_image",
    "video",
    "video_url",
    "input_video",
)


def read_conversation_column(value: Any, where: str) -> Any:
    """Return the messages of a row in OpenAI's format; a value that is no list of messages as it
    is.

    A message of role `tool_call`, or several in a row, become calls of one assistant message,
    together with the assistant's text before them. `tool_response` and `function` become `tool`,
    and `function_call` of an assistant one of `tool_calls`. A tool's result that is no text becomes
    JSON.

    Raises:
        TaskError: for an unknown role, or a call that cannot be read; it names the message and the
            call.
    """
    if not isinstance(value, (list, tuple)):
        return value
    messages: list[Any] = []
    for number, message in enumerate(value):
        place = f"{where}: messages[{number}]"
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str):  # a text, a `Message`, or a mistake that `Message.of` names
            messages.append(message)
            continue

        name = role.replace("-", "_")
        if name in CALL_ROLES:
            calls = _calls_of_content(message, place)
            last = messages[-1] if messages else None
            if isinstance(last, Mapping) and _is_assistant(last):
                earlier_calls = last.get("tool_calls") or ()
                messages[-1] = {**last, "tool_calls": [*earlier_calls, *calls]}
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        elif name == "tool" or name in RESULT_ROLES:
            messages.append({**message, "role": "tool", "content": _result(message.get("content"))})
        elif name == "assistant":
            messages.append(_assistant(message, place))
        elif role in ROLES:
            messages.append(message)
        else:
            raise TaskError(f"{place} has the role {role!r:.60}; {_role_hint(role)}")
    return messages


def _role_hint(role: str) -> str:
    """Return what to write in place of an unknown role."""
    roles = (*ROLES, "tool_call", "tool_response")
    listed = ", ".join(roles)
    our_role = _OUR_ROLES.get(role.lower())
    if our_role is not None:
        near = f"write {our_role!r}"
    else:
        near = did_you_mean(role.lower(), roles, 0.6)
    return f"{near} (roles are {listed})" if near else f"write one of {listed}"


def _is_assistant(message: Any) -> bool:
    if isinstance(message, Message):
        return message.role == "assistant"
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def _assistant(message: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """Return an assistant's message with checked `tool_calls`."""
    calls = message.get("tool_calls")
    if not calls:
        legacy_call = message.get("function_call")
        if not legacy_call:
            return message
        place = f"{place}.function_call"
        rest = {key: value for key, value in message.items() if key != "function_call"}
        return {**rest, "tool_calls": [_call(_read_json(legacy_call, place), place)]}

    calls = _read_json(calls, f"{place}.tool_calls")
    if not isinstance(calls, (list, tuple)):
        raise TaskError(f"{place}.tool_calls is {type(calls).__name__}; write a list of calls")
    checked = [_call(call, f"{place}.tool_calls[{n}]") for n, call in enumerate(calls)]
    return {**message, "tool_calls": checked}


def _calls_of_content(message: Mapping[str, Any], place: str) -> list[Any]:
    """Return the calls of a message of role `tool_call`."""
    place = f"{place}.content"
    content = _read_json(message.get("content"), place)
    if not isinstance(content, (list, tuple)) or not content:
        return [_call(content, place)]
    return [_call(call, f"{place}[{n}]") for n, call in enumerate(content)]


def _call(call: Any, place: str) -> Any:
    """Check a call, and return it in OpenAI's format."""
    if isinstance(call, ToolCall):
        return call
    if not isinstance(call, Mapping):
        raise TaskError(
            f'{place}: a call is {{"name": ..., "arguments": {{...}}}}, not {call!r:.80}'
        )
    function = _read_json(call.get("function", call), f"{place}.function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise TaskError(
            f"{place}: a call without a name; give 'name' and 'arguments' (it has "
            f"{', '.join(map(str, call))})"
        )

    arguments = function.get("arguments")
    if arguments is None:
        arguments = function.get("parameters")  # as some rows of ms-swift
    arguments = _read_json(arguments, f"{place}: the arguments of {name!r}") if arguments else {}
    if not isinstance(arguments, Mapping):
        raise TaskError(
            f"{place}: the arguments of {name!r} are {type(arguments).__name__}; write an object, "
            "or its JSON text"
        )

    checked = {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}
    if call.get("id"):
        checked["id"] = call["id"]
    return checked


def _read_json(value: Any, place: str) -> Any:
    """Read a value that may be written as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise TaskError(
            f"{place}: no JSON ({error}): {value!r:.120}; write an object, or its JSON text"
        ) from None


def _result(content: Any) -> Any:
    """Return the content of a tool's result: parts as they are, and other data as JSON."""
    parts = content if isinstance(content, (list, tuple)) else [content]
    if content is None or all(map(_is_part, parts)):
        return content
    try:
        return json.dumps(content, ensure_ascii=False)
    except (TypeError, ValueError):
        return content  # `Message.of` names what it is


def _is_part(part: Any) -> bool:
    if isinstance(part, Mapping):
        return part.get("type") in _PART_TYPES
    return isinstance(part, (str, Image, ImageRef, Video, VideoRef)) or is_image_object(part)


def without_reference(messages: Any, *, only_calls: bool = False) -> tuple[Any, Any]:
    """Return a conversation without the assistant's messages that end it, and the last of them as
    an answer.

    The answer is the content of a text, and a message with calls in OpenAI's format. With
    `only_calls` a conversation that ends with a text keeps it, to be continued.
    """
    if not isinstance(messages, (list, tuple)) or not messages or not _is_assistant(messages[-1]):
        return messages, None
    last = messages[-1]
    calls = last.get("tool_calls") if isinstance(last, Mapping) else last.tool_calls
    if not calls and (only_calls or len(messages) < 2):
        return messages, None

    end = len(messages) - 1
    first = 0 if calls else 1  # a greeting may open a conversation, a call does not
    while end > first and _is_assistant(messages[end - 1]):
        end -= 1
    if calls:
        return messages[:end], Message.of(last).to_dict()
    return messages[:end], last.get("content") if isinstance(last, Mapping) else last.content


def read_tools(column: Any, where: str) -> tuple[Any, ...]:
    """Return the items of a column `tools`: schemas or names. The column, and each schema, may be
    JSON text.

    Raises:
        TaskError: for text that is no JSON, or a value that is no list.
    """
    if isinstance(column, str) and column.lstrip().startswith(("[", "{")):
        column = _read_json(column, f"{where}: tools")
    if column is None or column == "":
        return ()
    if isinstance(column, Mapping):
        column = [column]
    if not isinstance(column, (list, tuple)):
        raise TaskError(
            f"{where}: the column tools is a list of names of tools, not {column!r:.80}; or of "
            "their schemas, also as JSON text"
        )
    items = []
    for number, item in enumerate(column):
        is_schema = isinstance(item, str) and item.lstrip().startswith("{")
        items.append(_read_json(item, f"{where}: tools[{number}]") if is_schema else item)
    return tuple(items)


def read_tool_schemas(column: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    """Return a column `tools` as schemas in OpenAI's format.

    A schema without `{"type": "function", ...}` around it gets it.

    Raises:
        TaskError: as `read_tools`, and for a name instead of a schema.
    """
    schemas: list[Mapping[str, Any]] = []
    for number, item in enumerate(read_tools(column, where)):
        if not isinstance(item, Mapping):
            raise TaskError(
                f"{where}: tools[{number}] is {item!r:.60}; write the tool's schema, an object "
                "with its function"
            )
        is_bare = "function" not in item and "type" not in item
        schemas.append({"type": "function", "function": item} if is_bare else item)
    return tuple(schemas)
