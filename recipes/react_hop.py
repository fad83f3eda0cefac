"""A ReAct agent over the openai package, which knows nothing of Turnwright: it looks names
up until it can answer."""

import json
import sys

from openai import OpenAI


def solve(client: OpenAI, question: str, table: dict[str, str]) -> str:
    """Return the answer to a question; the table has what stands under each name."""
    messages = [{"role": "user", "content": question}]
    for _ in range(6):
        reply = (
            client.chat.completions.create(model="any", messages=messages)
            .choices[0]
            .message.content
            or ""
        )
        words = reply.split()
        if words and words[0].startswith("answer"):
            return words[1] if len(words) == 2 and words[0] == "answer" else ""
        found = (
            table.get(words[1], "unknown")
            if len(words) == 2 and words[0] == "lookup"
            else "lookup or answer"
        )
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": found}]
    return ""


if __name__ == "__main__":
    with open("table.json") as file:
        print(solve(OpenAI(), sys.argv[1], json.load(file)))
