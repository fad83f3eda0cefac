"""Programs and conversations that the proxy is tested with."""

from __future__ import annotations

import json
from typing import Any

from kit.proxy import (
    TOOL,
)


class ChatProgram:
    """Talks chat completions as the official client does."""

    path = "/v1/chat/completions"

    def __init__(self, stream: bool) -> None:
        self.stream = stream
        self.messages: list[Any] = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is a b?"},
        ]
        self.usage: list[dict[str, Any]] = []

    def body(self) -> dict[str, Any]:
        more = {"stream": True, "stream_options": {"include_usage": True}} if self.stream else {}
        return {
            "model": "m",
            "messages": self.messages,
            "tools": [{"type": "function", "function": TOOL}],
        } | more

    def take(self, text: str) -> list[Any]:
        """Add the reply to the history; return its calls."""
        if not self.stream:
            found = json.loads(text)
            message = found["choices"][0]["message"]
            self.usage.append(found["usage"])
        else:
            rows = [
                json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")
            ]
            assert text.rstrip().endswith("data: [DONE]")
            self.usage.append(rows[-1]["usage"])
            message = {"role": "assistant", "content": "", "tool_calls": []}
            for delta in (row["choices"][0]["delta"] for row in rows if row["choices"]):
                message["content"] += delta.get("content") or ""
                message["tool_calls"] += [
                    {k: v for k, v in one.items() if k != "index"}
                    for one in delta.get("tool_calls", ())
                ]
                if "reasoning_content" in delta:
                    message["reasoning_content"] = delta["reasoning_content"]
            if not message["tool_calls"]:
                del message["tool_calls"]
        self.messages.append(message)
        return message.get("tool_calls") or []

    def answer(self, call: Any, text: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": [{"type": "text", "text": text}]})

    def show(self, data: str) -> None:
        url = {"url": f"data:image/png;base64,{data}"}
        self.messages.append({"role": "user", "content": [{"type": "image_url", "image_url": url}]})


class ResponsesProgram(ChatProgram):
    """Talks the Responses API and sends back the items that it got."""

    path = "/v1/responses"
    statuses = ("completed",)

    def body(self) -> dict[str, Any]:
        tools = [{"type": "function", **TOOL}, {"type": "web_search"}]
        items = [m if "type" in m else {"type": "message", **m} for m in self.messages[1:]]
        return {
            "model": "m",
            "instructions": "Be brief.",
            "input": items,
            "tools": tools,
            "store": False,
            "stream": self.stream,
        }

    def take(self, text: str) -> list[Any]:
        if self.stream:
            rows = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
            assert [row["sequence_number"] for row in rows] == list(range(len(rows)))
            found = rows[-1]["response"]
            done = [row["item"] for row in rows if row["type"] == "response.output_item.done"]
            assert [item["id"] for item in done] == [item["id"] for item in found["output"]]
        else:
            found = json.loads(text)
        assert found["status"] in self.statuses
        self.usage.append({"completion_tokens": found["usage"]["output_tokens"]})
        self.messages += found["output"]
        return [item for item in found["output"] if item["type"] == "function_call"]

    def answer(self, call: Any, text: str) -> None:
        self.messages.append(
            {"type": "function_call_output", "call_id": call["call_id"], "output": text}
        )

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": [{"type": "input_text", "text": text}]})

    def show(self, data: str) -> None:
        self.messages.append(
            {
                "role": "user",
                "content": [{"type": "input_image", "image_url": f"data:image/png;base64,{data}"}],
            }
        )


class MessagesProgram(ChatProgram):
    """Talks the Messages API and moves its cache mark to the last message, as Claude Code does."""

    path = "/v1/messages"

    def body(self) -> dict[str, Any]:
        tool = {
            "name": "look_up",
            "description": TOOL["description"],
            "input_schema": TOOL["parameters"],
        }
        system = [
            {
                "type": "text",
                "text": f"x-anthropic-billing-header: cc_version={len(self.messages)};",
            }
        ]
        system.append({"type": "text", "text": "Be brief."})
        messages = json.loads(json.dumps(self.messages[1:]))
        last = messages[-1]
        if isinstance(last["content"], str):
            last["content"] = [{"type": "text", "text": last["content"]}]
        last["content"][-1]["cache_control"] = {"type": "ephemeral"}
        given = {
            "model": "m",
            "max_tokens": 32000,
            "system": system,
            "messages": messages,
            "tools": [tool],
        }
        return given | {"stream": self.stream}

    def take(self, text: str) -> list[Any]:
        if self.stream:
            rows = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
            blocks: list[dict[str, Any]] = []
            partial = ""
            for row in rows:
                if row["type"] == "content_block_start":
                    blocks.append(row["content_block"])
                    partial = ""
                elif row["type"] == "content_block_delta":
                    delta = row["delta"]
                    for name in ("text", "thinking", "signature"):
                        if name in delta:
                            blocks[-1][name] += delta[name]
                    partial += delta.get("partial_json", "")
                elif row["type"] == "content_block_stop" and blocks[-1]["type"] == "tool_use":
                    blocks[-1]["input"] = json.loads(partial)
            usage = next(row["usage"] for row in rows if row["type"] == "message_delta")
        else:
            blocks, usage = json.loads(text)["content"], json.loads(text)["usage"]
        self.usage.append({"completion_tokens": usage["output_tokens"]})
        self.messages.append({"role": "assistant", "content": blocks})
        return [block for block in blocks if block["type"] == "tool_use"]

    def answer(self, call: Any, text: str) -> None:
        result = {
            "type": "tool_result",
            "tool_use_id": call["id"],
            "content": [{"type": "text", "text": text}],
        }
        self.messages.append({"role": "user", "content": [result]})

    def show(self, data: str) -> None:
        source = {"type": "base64", "media_type": "image/png", "data": data}
        self.messages.append({"role": "user", "content": [{"type": "image", "source": source}]})


PROGRAMS = [ChatProgram, ResponsesProgram, MessagesProgram]
ASK = """
import json, os, sys, urllib.request
def ask(messages):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    head = {"content-type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
        return json.load(answer)["choices"][0]["message"]
messages = [{"role": "user", "content": sys.argv[1]}]
"""  # noqa: E501
TWO_CALLS = (
    ASK
    + """
for number in range(2):
    messages.append(ask(messages))
    messages.append({"role": "user", "content": "next"})
print(open("in/data.txt").read(), messages[1]["content"], os.getcwd() == os.path.realpath(os.getcwd()))
open("made.txt", "w").write("made")
print("words", file=sys.stderr)
"""  # noqa: E501
)


def script(source: str) -> list[str]:
    """Return the command of a Python program; `{` is doubled nowhere, since only
    known names are replaced."""
    return ["{python}", "-c", source, "{task}"]
