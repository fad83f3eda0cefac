"""Hop: a code reached over one to three look-ups, as plain text or JSON. The environment of the
quickstart.

A conversation as plain text, and the same with JSON tool calls::

    user       code of amber                     code of "amber"
    assistant  lookup amber                      <tool_call>{"name": "lookup", "arguments": {"key": "amber"}}</tool_call>
    user/tool  see birch                         {"see": "birch"}
    assistant  lookup birch                      ...
    user/tool  code 7                            {"code": "7"}
    assistant  answer 7                          {"answer": "7"}

The reward is 1 when the final answer is exactly the code, else 0. The question does not reveal the
code, which is one of ten with equal probability, so the best success rate in a single turn is 1/10.
Two to four turns are needed, three on average.

Every word has one surface form (a name or a code always follows a space; in JSON it always follows
a quote), since a tiny model can only copy identical tokens.
"""  # noqa: E501

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

from turnwright.envs.builtin.common import is_held_out
from turnwright.envs.env import Action, Env, Step
from turnwright.envs.spec import check_split
from turnwright.errors import EnvError
from turnwright.types import Message, Task, ToolCall

NAMES = (
    "amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron",
    "iris", "jade", "kelp", "lotus", "maple", "north", "olive", "pearl",
)  # fmt: skip
CODES = tuple("0123456789")
MAX_HOPS = 3

GIVE_UP = 0.6
"""Probability per turn that the demonstrator guesses before it has seen the code."""


class Hop(Env):
    """Multi-hop key look-up as plain text.

    Args:
        rules: open with a system message that states the rules, for models without a warm-up on
            demonstrations.
        think: players repeat the last message between <think> and </think> first, for templates
            that strip thinking.
    """

    max_turns: ClassVar[int] = 6
    single_turn_best: ClassVar[float] = 0.1
    rule: ClassVar[str] = (
        "Find the code of a name. Say one action each turn: 'lookup NAME' tells what stands under "
        "the name, which may send you on to another; 'answer CODE' ends. Say nothing else."
    )
    question = "code of {}"
    see = "see {}"
    code = "code {}"
    answer = "answer {}"
    call = "lookup {}"

    def __init__(self, rules: bool = False, think: bool = False) -> None:
        self._rules = rules
        if think:
            for player in ("solver", "demonstrator"):
                setattr(self, player, partial(_with_thinking, getattr(self, player)))
        self._table: dict[str, str] = {}
        self._answer: str | None = None

    async def reset(self, task: Task, *, seed: int | None = None) -> tuple[Message, ...]:
        table = task.info.get("table")
        if not isinstance(table, dict) or task.answer not in CODES:
            raise EnvError(
                f"task {task.id} is not a Hop task: it needs info['table'] and an answer of '0' to "
                "'9'"
            )
        self._table = table
        self._answer = task.answer
        return (Message("system", self.rule), *task.messages) if self._rules else task.messages

    async def step(self, action: Action) -> Step:
        """Answer `lookup NAME` with the table entry; end at any reply that begins with `answer`."""
        words = action.text.split()
        if words and words[0].startswith("answer"):
            return self._judge(words[1] if len(words) == 2 and words[0] == "answer" else None)
        if len(words) == 2 and words[0] == "lookup":
            return Step(self._table.get(words[1], "unknown"))
        return Step("lookup or answer")

    def _judge(self, answer: str | None) -> Step:
        """End the episode with an answer; None for a reply that is none."""
        is_right = answer is not None and answer == self._answer
        return Step(reward=float(is_right), terminated=True, info={"right": is_right})

    @classmethod
    def tasks(cls, split: str, n: int, seed: int) -> list[Task]:
        """Return `n` different tasks; no chain of names is in both splits, for any seeds."""
        drawn = draw(split, n, seed, cls.see, cls.code)
        return [Task(cls.question.format(chain[0]), code, info=info) for chain, code, info in drawn]

    @classmethod
    def solver(cls, messages: Sequence[Message], rng: random.Random) -> str:
        """Play optimally: look up the last name, or answer with the code."""
        text = messages[-1].text
        value = _next(text)
        if value in CODES and text == cls.code.format(value):
            return cls.answer.format(value)
        return cls.call.format(value)

    @classmethod
    def demonstrator(cls, messages: Sequence[Message], rng: random.Random) -> str:
        """Play poorly: before seeing the code, guess with probability 0.6 per turn."""
        reply = cls.solver(messages, rng)
        if reply.startswith(cls.call.partition("{")[0]) and rng.random() < GIVE_UP:
            return cls.answer.format(rng.choice(CODES))
        return reply


def _with_thinking(
    player: Callable[..., str], messages: Sequence[Message], rng: random.Random
) -> str:
    """Return a player's reply after the last message as thinking."""
    return f"<think>\n{messages[-1].text}\n</think>\n\n{player(messages, rng)}"


def chain_of(task: Task) -> tuple[str, ...]:
    """Return the names on a task's path in order, which decide its split."""
    table: dict[str, str] = task.info["table"]
    chain: list[str] = []
    name = task.info["start"]
    while not chain or (name in NAMES and name not in chain):
        chain.append(name)
        name = _next(table[name])
    return tuple(chain)


def held_out(chain: Sequence[str]) -> bool:
    """Whether a chain of names is held out: about a quarter, by hash."""
    return is_held_out("hop", " ".join(chain))


def _next(entry: str) -> str:
    """Return the last word of `see birch`, or of `{"see": "birch"}`."""
    return entry.split()[-1].strip('"}')


def draw(
    split: str, n: int, seed: int, see: str, code: str
) -> Iterator[tuple[tuple[str, ...], str, dict[str, Any]]]:
    """Draw chains, hops and codes from shuffled decks, so any 30 consecutive tasks have equal
    counts of each hop and code.

    Chains are split by their names, not their codes, so codes are uniform in each split. The table
    also has entries for names off the chain.
    """
    check_split(split)
    rng = random.Random(f"hop/{split}/{seed}")
    hops_deck: list[int] = []
    codes_deck: list[str] = []
    seen: set[str] = set()
    for _ in range(n):
        hops_deck = hops_deck or rng.sample(range(1, MAX_HOPS + 1), MAX_HOPS)
        codes_deck = codes_deck or rng.sample(CODES, len(CODES))
        hops = hops_deck.pop()
        answer = codes_deck.pop()

        # Draw until the chain is of the split and the task is new.
        while True:
            chain = tuple(rng.sample(NAMES, hops))
            if held_out(chain) != (split == "eval"):
                continue
            table = {name: _off_chain(name, rng, see, code) for name in NAMES}
            table |= {name: see.format(following) for name, following in pairwise(chain)}
            table[chain[-1]] = code.format(answer)
            identity = repr((chain, sorted(table.items())))
            if identity not in seen:
                break
        seen.add(identity)
        yield chain, answer, {"start": chain[0], "hops": hops, "table": table}


def _off_chain(name: str, rng: random.Random, see: str, code: str) -> str:
    """Draw an entry for a name that need not be looked up."""
    if rng.random() < 0.5:
        return code.format(rng.choice(CODES))
    return see.format(rng.choice([other for other in NAMES if other != name]))


SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string"}},
            "required": ["key"],
        },
    },
}
"""Minimal schema, since a tiny model reads it in every prompt."""


class HopJson(Hop):
    """Multi-hop key look-up with Hermes tool calls.

    The final answer is exactly ``{"answer": "7"}``. Arguments as for `Hop`.
    """

    tools: Sequence[Mapping[str, Any]] = (SCHEMA,)
    rule: ClassVar[str] = (
        "Find the code of a name. Call the tool once each turn: it tells what stands under the "
        "name, which may send you on to another. When you see the code, say "
        '{"answer": "CODE"} and nothing else.'
    )
    question = 'code of "{}"'
    see = '{{"see": "{}"}}'
    code = '{{"code": "{}"}}'
    answer = '{{"answer": "{}"}}'
    call = '<tool_call>{{"name": "lookup", "arguments": {{"key": "{}"}}}}</tool_call>'

    async def step(self, action: Action) -> Step:
        """Run the look-ups of a reply; a reply without a call is the answer and ends the
        episode."""
        if action.tool_calls:
            return Step(tuple(self._look_up(call) for call in action.tool_calls))
        text = action.text.strip()
        code = text.removeprefix('{"answer": "').removesuffix('"}')
        return self._judge(code if text == f'{{"answer": "{code}"}}' else None)

    def _look_up(self, call: ToolCall) -> Message:
        if call.error is not None:
            content = '{"error": "call"}'
        elif call.name != "lookup":
            content = '{"error": "tool"}'
        elif set(call.arguments) != {"key"} or not isinstance(call.arguments["key"], str):
            content = '{"error": "key"}'
        else:
            content = self._table.get(call.arguments["key"], '{"error": "unknown"}')
        return Message("tool", content, tool_call_id=call.id or None, name="lookup")
