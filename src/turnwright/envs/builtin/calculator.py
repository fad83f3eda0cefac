"""Calculator: arithmetic that is hard without the given tool. Tool calls in JSON; the answer is a
plain number.

::

    user       (37 + 48) * 16 = ?
    assistant  <tool_call>{"name": "calculator", "arguments": {"expression": "(37 + 48) * 16"}}</tool_call>
    tool       1360
    assistant  1360

The reward is 1 when the last reply is exactly the number. A model that can calculate needs no tool,
so one reply can suffice.
"""  # noqa: E501

from __future__ import annotations

import random
from collections.abc import Sequence

from turnwright.envs.builtin.common import sample_tasks, tool_call
from turnwright.envs.tool_env import tool_env
from turnwright.envs.tools.arithmetic import arithmetic
from turnwright.types import Message, Task, Trajectory

_FORMS = ("({a} + {b}) * {c}", "{a} * {b} - {c}", "{a} + {b} * {c}", "({a} - {b}) * {c}")


def calculator(expression: str) -> str:
    """Evaluate arithmetic.

    Args:
        expression: for example "(3 + 4) * 5".
    """
    return str(arithmetic(expression))


def exact(trajectory: Trajectory, task: Task) -> float:
    """Return 1.0 when the last reply is exactly the answer, else 0.0."""
    return float(trajectory.final_text.strip() == task.answer)


def tasks(split: str, n: int, seed: int) -> list[Task]:
    """Return expressions of three numbers from 11 to 99; none is in both splits."""

    def draw(rng: random.Random) -> tuple[str, Task]:
        a, b, c = (rng.randint(11, 99) for _ in range(3))
        expression = rng.choice(_FORMS).format(a=a, b=b, c=c)
        return expression, Task(f"{expression} = ?", answer=str(arithmetic(expression)))

    return sample_tasks("calculator", split, n, seed, draw)


def solver(messages: Sequence[Message], rng: random.Random) -> str:
    """Play optimally: call the tool with the expression, then answer with its result."""
    if messages[-1].role == "tool":
        return messages[-1].text
    return tool_call("calculator", expression=messages[-1].text.removesuffix(" = ?"))


def demonstrator(messages: Sequence[Message], rng: random.Random) -> str:
    """Play poorly: guess instead of calling the tool, with probability 0.5."""
    reply = solver(messages, rng)
    if reply.startswith("<tool_call>") and rng.random() < 0.5:
        return str(rng.randint(100, 9999))
    return reply


CALCULATOR = tool_env(
    tools=[calculator],
    reward=exact,
    max_turns=4,
    tasks=tasks,
    solver=solver,
    demonstrator=demonstrator,
    single_turn_best=1.0,
)
