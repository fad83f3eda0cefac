"""Calls of tools, and the ids of their results."""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser


def create_tool_call_parser(tool_specs: Sequence[Any], tool_call_parser: str) -> FunctionCallParser:
    """Return SGLang's reader of calls, for tools in OpenAI's format."""
    tools = [one if isinstance(one, Tool) else Tool.model_validate(one) for one in tool_specs]
    return FunctionCallParser(tools=tools, tool_call_parser=tool_call_parser)


async def execute_tool_calls(
    tool_calls: Sequence[Any], execute_one: Callable[[str, dict[str, Any]], Awaitable[str]]
) -> list[dict[str, Any]]:
    """Execute calls in order, and return a message of each result."""
    messages = []
    for call in tool_calls:
        function = getattr(call, "function", None)
        name = call.name if function is None else function.name
        written = call.parameters if function is None else function.arguments
        id = f"call_{uuid.uuid4().hex[:24]}" if function is None else call.id
        content = await execute_one(name, json.loads(written) if written else {})
        if not isinstance(content, str):
            raise TypeError(f"the tool {name} returned {type(content).__name__}; return a text")
        messages.append({"role": "tool", "tool_call_id": id, "content": content, "name": name})
    return messages


def update_sample_with_tool_responses(sample: Any, tool_messages: Sequence[dict[str, Any]], tokenizer: Any) -> None:
    """Append the messages of results to a sample, untrained."""
    ids = tokenize_tool_responses(tool_messages, tokenizer)
    sample.append_response_tokens(tokens=ids, trainable=False, text=tokenizer.decode(ids))


def tokenize_tool_responses(tool_messages: Sequence[dict[str, Any]], tokenizer: Any) -> list[int]:
    """Return the ids that the template writes for results, after a made-up call of each, with the opening of the next reply."""
    calls = [
        {"type": "function", "id": one["tool_call_id"], "function": {"name": one.get("name", "tool"), "arguments": {}}}
        for one in tool_messages
    ]
    before = [{"role": "user", "content": "dummy"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    short = tokenizer.apply_chat_template(before, tokenize=True, add_generation_prompt=False)
    long = tokenizer.apply_chat_template([*before, *tool_messages], tokenize=True, add_generation_prompt=True)
    if long[: len(short)] != short:
        raise ValueError("the template writes earlier messages differently after a tool's result, so nothing can be appended")
    return list(long[len(short) :])
