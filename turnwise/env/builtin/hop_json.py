"""Hop with JSON tool calls: the same look-up, through a tool that the model is told of."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from turnwise.env.base import Action, Step
from turnwise.env.builtin.hop import CODES, GIVE_UP, Hop, draw
from turnwise.types import Message, Task, ToolCall

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
"""As short as a schema can be: a tiny model reads it in every prompt."""


class HopJson(Hop):
    """Multi-hop key look-up with Hermes tool calls; the final answer is ``{"answer": "7"}``, exactly.

    Args:
        rules: open with a system message that states the rules, for models that were not warmed up on demonstrations.
        think: players put what they see between <think> and </think> before they speak, for templates that strip thinking.
    """

    tools: Sequence[Mapping[str, Any]] = (SCHEMA,)
    rule: ClassVar[str] = (
        "Find the code of a name. Call the tool once each turn: it tells what stands under the name, which may send you on to "
        'another. When you see the code, say {"answer": "CODE"} and nothing else.'
    )

    async def step(self, action: Action) -> Step:
        """Run the look-ups of a reply; a reply without a tool call is the answer and ends the episode."""
        if action.tool_calls:
            return Step(tuple(self._look_up(call) for call in action.tool_calls))
        text = action.text.strip()
        code = text.removeprefix('{"answer": "').removesuffix('"}')
        return self._judge(code if text == f'{{"answer": "{code}"}}' else None)

    def _look_up(self, call: ToolCall) -> Message:
        if call.error is not None:
            said = '{"error": "call"}'
        elif call.name != "lookup":
            said = '{"error": "tool"}'
        elif set(call.arguments) != {"key"} or not isinstance(call.arguments["key"], str):
            said = '{"error": "key"}'
        else:
            said = self._table.get(call.arguments["key"], '{"error": "unknown"}')
        return Message("tool", said, tool_call_id=call.id or None, name="lookup")

    @staticmethod
    def tasks(split: str, n: int, seed: int) -> list[Task]:
        """`n` different tasks; no chain of names is in both splits, whatever the seeds."""
        drawn = draw(split, n, seed, '{{"see": "{}"}}', '{{"code": "{}"}}')
        return [Task(f'code of "{chain[0]}"', code, info=info) for chain, code, info in drawn]

    @staticmethod
    def solver(messages: Sequence[Message], rng: random.Random) -> str:
        """The perfect player: looks up what it was sent to, answers the code that it sees."""
        text = messages[-1].text
        value = text.split()[-1].strip('"}')
        if text.startswith('{"code"') and value in CODES:
            return f'{{"answer": "{value}"}}'
        return f'<tool_call>{{"name": "lookup", "arguments": {{"key": "{value}"}}}}</tool_call>'

    @staticmethod
    def demonstrator(messages: Sequence[Message], rng: random.Random) -> str:
        """A poor player: before it sees the code it gives up with probability 0.6 a turn, and guesses."""
        reply = HopJson.solver(messages, rng)
        if reply.startswith("<tool_call>") and rng.random() < GIVE_UP:
            return f'{{"answer": "{rng.choice(CODES)}"}}'
        return reply
