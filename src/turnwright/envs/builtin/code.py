"""Code: write a function; hidden tests run it in a sandbox. Feedback on wrong code uses only the
example of the question.

::

    user       Write a Python function f(x) that returns x times 3 plus 4. Example: f(5) is 19.
    assistant  def f(x): return x + 3 + 4
    user       f(5) is 12, not 19
    assistant  def f(x): return x * 3 + 4

The reward is 1 when f is right on every hidden input. Expected values never enter the sandbox: it
receives inputs and returns values, which are compared outside. So a program has no test to patch,
no verdict to print and no reward file to write; even with control of the sandbox it can only return
values, which must be right.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from turnwright.envs.builtin.common import sample_tasks
from turnwright.envs.env import Action, Env, Step
from turnwright.envs.isolation.sandbox import Sandbox, SandboxProtocol, SandboxResult
from turnwright.errors import ConfigError, EnvError
from turnwright.types import Message, Task


@dataclass(frozen=True, slots=True)
class FunctionKind:
    """One kind of function that is asked for, of an input x and the constants a and b."""

    asked: str
    """What the function returns, in the question."""
    solution: str
    """The same as an expression."""
    input: Literal["int", "list", "text"]
    """Type of x."""
    right: Callable[[Any, int, int], Any]
    """Returns the right value for x, a and b."""


_KINDS = {
    "line": FunctionKind("x times {a} plus {b}", "x * {a} + {b}", "int", lambda x, a, b: x * a + b),
    "over": FunctionKind(
        "the sum of the numbers in x over {a}",
        "sum(n for n in x if n > {a})",
        "list",
        lambda x, a, b: sum(n for n in x if n > a),
    ),
    "by": FunctionKind(
        "how many numbers in x {a} divides",
        "sum(n % {a} == 0 for n in x)",
        "list",
        lambda x, a, b: sum(n % a == 0 for n in x),
    ),
    "add": FunctionKind(
        "the list x with {a} added to each",
        "[n + {a} for n in x]",
        "list",
        lambda x, a, b: [n + a for n in x],
    ),
    "say": FunctionKind(
        "the text x backwards, {a} times",
        "x[::-1] * {a}",
        "text",
        lambda x, a, b: x[::-1] * a,
    ),
}

_DRIVER = """\
import json, os
answers = os.dup(3)
os.close(3)
with open("inputs.json") as file:
    inputs = json.load(file)
with open("solution.py") as file:
    source = file.read()
space = {"__name__": "solution"}
exec(compile(source, "solution.py", "exec"), space)
for value in inputs:
    os.write(answers, json.dumps(space["f"](value)).encode() + b"\\n")
"""
"""The program in the sandbox: it returns the values of f by descriptor 3."""

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)\n?```", re.DOTALL)

_MAX_FEEDBACK = 300
"""Characters of feedback that a program decides."""

_CHANNEL = 65_536
"""Bytes of values that a program returns."""


class Code(Env):
    """Small functions under hidden tests.

    Args:
        tests: number of hidden inputs, besides the example of the question.
        seconds: deadline of a submission in the default sandbox.
        rules: open with a system message that states the rules.
        sandbox: another sandbox for submissions, with its own limits.
    """

    max_turns: ClassVar[int] = 3
    single_turn_best: ClassVar[float] = 1.0
    rule: ClassVar[str] = (
        "Answer with the code of the function and nothing else, or with one block between "
        "```python and ```."
    )

    def __init__(
        self,
        tests: int = 8,
        seconds: float = 10.0,
        rules: bool = False,
        *,
        sandbox: SandboxProtocol | None = None,
    ) -> None:
        if not 1 <= tests <= 100:
            raise ConfigError("code: tests are 1 to 100")
        self._sandbox = sandbox or Sandbox(seconds=seconds, cpu_seconds=2, processes=8, output=4096)
        self._tests = tests
        self._rules = rules
        self._inputs: list[Any] = []
        self._right: list[Any] = []

    async def reset(self, task: Task, *, seed: int | None = None) -> tuple[Message, ...]:
        name = task.info.get("kind")
        numbers = task.info.get("numbers")
        if name not in _KINDS or not isinstance(numbers, list) or len(numbers) != 2:
            raise EnvError(
                f"task {task.id} is not one of code's: it needs info['kind'] and info['numbers']"
            )
        kind = _KINDS[name]
        rng = random.Random(f"hidden {task.id}")
        hidden = [_draw(kind.input, rng) for _ in range(self._tests)]
        self._inputs = [task.info["example"], *hidden]
        self._right = [kind.right(value, *numbers) for value in self._inputs]
        return (Message("system", self.rule), *task.messages) if self._rules else task.messages

    async def step(self, action: Action) -> Step:
        """Run the submission; end if it is right, else return feedback."""
        blocks = _FENCED.findall(action.text)
        if len(blocks) > 1:
            return Step("Give one block of code.", info={"right": False})

        source = blocks[0] if blocks else action.text
        files = {"solution.py": source, "inputs.json": json.dumps(self._inputs)}
        result = await self._sandbox.arun(_DRIVER, files, channel=_CHANNEL)
        values = _values(result.channel)
        is_right = len(values) == len(self._right) and all(map(_same, values, self._right))
        info = {"right": is_right, "timed_out": result.timed_out}
        if is_right:
            return Step(reward=1.0, terminated=True, info=info)
        return Step(self._feedback(values, result), info=info)

    def _feedback(self, values: list[Any], result: SandboxResult) -> str:
        """Describe the error on the example, without revealing hidden inputs."""
        if values and not _same(values[0], self._right[0]):
            return (
                f"f({self._inputs[0]!r}) is {values[0]!r:.{_MAX_FEEDBACK}}, not {self._right[0]!r}"
            )
        if not values:
            return f"no value: {result.text.strip().splitlines()[-1][:_MAX_FEEDBACK]}"
        return "wrong on a hidden test"

    @staticmethod
    def tasks(split: str, n: int, seed: int) -> list[Task]:
        """Return functions of one argument with one or two constants; no function is in both
        splits."""

        def draw(rng: random.Random) -> tuple[str, Task]:
            name = rng.choice(tuple(_KINDS))
            kind = _KINDS[name]
            a = rng.randint(2, 9 if name in ("by", "say") else 60)
            b = rng.randint(1, 99) if name == "line" else 0
            key = f"{name} {[a, b]}"
            example = _draw(kind.input, random.Random(key))
            question = (
                f"Write a Python function f(x) that returns {kind.asked.format(a=a, b=b)}. "
                f"Example: f({example!r}) is {kind.right(example, a, b)!r}."
            )
            info = {"kind": name, "numbers": [a, b], "example": example}
            return key, Task(question, info=info)

        return sample_tasks("code", split, n, seed, draw)

    @staticmethod
    def texts(n: int, seed: int) -> list[str]:
        """Return sample questions, solutions and feedback, without running code."""
        rng = random.Random(seed)
        texts = []
        for task in Code.tasks("train", n, seed):
            texts += [task.messages[0].text, Code.solver(task.messages, rng)]
        feedback = [
            "f(5) is 12, not 19",
            "wrong on a hidden test",
            "no value: SyntaxError: invalid syntax",
            "Give one block of code.",
        ]
        return texts + feedback

    @staticmethod
    def solver(messages: Sequence[Message], rng: random.Random) -> str:
        """Play optimally, knowing the kinds of functions."""
        question = next(message.text for message in messages if message.role == "user")
        for kind in _KINDS.values():
            pattern = re.escape(kind.asked)
            pattern = pattern.replace(r"\{a\}", r"(?P<a>\d+)").replace(r"\{b\}", r"(?P<b>\d+)")
            match = re.search(pattern, question)
            if match:
                numbers = {"a": "", "b": "", **match.groupdict()}
                return f"def f(x): return {kind.solution.format(**numbers)}"
        return "def f(x): return x"

    @staticmethod
    def demonstrator(messages: Sequence[Message], rng: random.Random) -> str:
        """Play poorly: write wrong numbers with probability 0.67."""
        reply = Code.solver(messages, rng)
        if rng.random() < 0.67:
            return re.sub(r"\d+", lambda _: str(rng.randint(2, 9)), reply)
        return reply


def _draw(kind: str, rng: random.Random) -> Any:
    """Draw an input: a number, a list of numbers, or a text."""
    if kind == "int":
        return rng.randint(-99, 99)
    if kind == "text":
        return "".join(rng.choice("abcdefgh") for _ in range(rng.randint(2, 8)))
    return [rng.randint(-20, 40) for _ in range(rng.randint(3, 8))]


def _values(channel: str) -> list[Any]:
    """Parse the values of f written by the program, up to the first line that is not JSON."""
    values = []
    for line in channel.splitlines():
        try:
            values.append(json.loads(line))
        except (ValueError, RecursionError):
            break
    return values


def _same(value: Any, right: Any) -> bool:
    """Whether values are equal and of equal types, recursively: True is not 1, and 1.0 is not 1."""
    if type(value) is not type(right):
        return False
    if isinstance(right, list):
        return len(value) == len(right) and all(map(_same, value, right))
    return bool(value == right)
