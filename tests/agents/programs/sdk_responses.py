"""A loop over OpenAI's SDK and the Responses API; `stream` as an argument streams."""

import json
import subprocess
import sys

import openai

PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
}
TOOL = {
    "type": "function",
    "name": "shell",
    "description": "Run a command.",
    "parameters": PARAMETERS,
    "strict": False,
}
client = openai.OpenAI()
items = [{"role": "user", "content": sys.argv[1]}]
while True:
    given = {
        "model": "turnwright",
        "instructions": "You use a shell.",
        "input": items,
        "tools": [TOOL],
        "store": False,
    }
    if sys.argv[2:] == ["stream"]:
        with client.responses.stream(**given) as stream:
            response = stream.get_final_response()
    else:
        response = client.responses.create(**given)
    items += [
        item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output
    ]
    calls = [item for item in response.output if item.type == "function_call"]
    if not calls:
        break
    for call in calls:
        command = json.loads(call.arguments)["command"]
        output = subprocess.run(command, shell=True, capture_output=True, text=True).stdout
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
print(response.output_text)
