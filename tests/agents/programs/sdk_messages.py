"""A loop over Anthropic's SDK; `stream` as an argument streams."""

import subprocess
import sys

import anthropic

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOL = {"name": "shell", "description": "Run a command.", "input_schema": SCHEMA}
client = anthropic.Anthropic()
messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    given = {
        "model": "turnwright",
        "max_tokens": 1000,
        "system": "You use a shell.",
        "messages": messages,
        "tools": [TOOL],
    }
    assert (
        client.messages.count_tokens(
            **{k: v for k, v in given.items() if k != "max_tokens"}
        ).input_tokens
        > 0
    )
    if sys.argv[2:] == ["stream"]:
        with client.messages.stream(**given) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**given)
    messages.append({"role": "assistant", "content": message.content})
    calls = [block for block in message.content if block.type == "tool_use"]
    if not calls:
        break
    results = []
    for call in calls:
        output = subprocess.run(
            call.input["command"], shell=True, capture_output=True, text=True
        ).stdout
        results.append({"type": "tool_result", "tool_use_id": call.id, "content": output})
    messages.append({"role": "user", "content": results})
print(message.content[-1].text)
