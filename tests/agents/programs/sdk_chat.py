"""A loop over OpenAI's SDK and chat completions; `stream` as an argument streams."""

import json
import subprocess
import sys

import openai

TOOL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
client = openai.OpenAI()
messages = [
    {"role": "system", "content": "You use a shell."},
    {"role": "user", "content": sys.argv[1]},
]
while True:
    given = {"model": "turnwright", "messages": messages, "tools": [TOOL]}
    if sys.argv[2:] == ["stream"]:
        with client.chat.completions.stream(**given) as stream:
            message = stream.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**given).choices[0].message
    messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        command = json.loads(call.function.arguments)["command"]
        output = subprocess.run(command, shell=True, capture_output=True, text=True).stdout
        messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
print(message.content)
