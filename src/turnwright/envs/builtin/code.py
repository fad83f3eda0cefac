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
from typing import Any, ClassVar

from turnwright.envs.builtin.common import sample_tasks
from turnwright.envs.env import Action, Env, Step
from turnwright.envs.isolation.sandbox import Sandbox, SandboxProtocol, SandboxResult
from turnwright.errors import ConfigError, EnvError
from turnwright.types import Message, Task

Kind = tuple[str, str, str, Callable[[Any, int, int], Any]]
_KINDS: dict[str, Kind] = {
    "line": ("x times {a} plus {b}", "x * {a} + {b}", "int", lambda x, a, b: x * a + b),
    "over": (
        "the sum of the numbers in x over {a}",
        "sum(n for n in x if n > {a})",
        "list",
        lambda x, a, b: _sum_over(x, a),
    ),
    "by": (
        "how many numbers in x {a} divides",
        "sum(n % {a} == 0 for n in x)",
        "list",
        lambda x, a, b: _divided(x, a),
    ),
    "add": (
        "the list x with {a} added to each",
        "[n + {a} for n in x]",
        "list",
        lambda x, a, b: [n + a for n in x],
    ),
    "say": (
        "the text x backwards, {a} times",
        "x[::-1] * {a}",
        "text",
        lambda x, a, b: x[::-1] * a,
    ),
}
"""(question, solution expression, type of x, reference function) by kind."""

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
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)\n?```", re.DOTALL)
_MAX_FEEDBACK = 300
_CHANNEL = 65_536


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
        self._box = sandbox or Sandbox(seconds=seconds, cpu_seconds=2, processes=8, output=4096)
        self._tests, self._rules = tests, rules
        self._inputs: list[Any] = []
        self._right: list[Any] = []

    async def reset(self, task: Task, *, seed: int | None = None) -> tuple[Message, ...]:
        kind, numbers = task.info.get("kind"), task.info.get("numbers")
        if kind not in _KINDS or not isinstance(numbers, list) or len(numbers) != 2:
            raise EnvError(
                f"task {task.id} is not one of code's: it needs info['kind'] and info['numbers']"
            )
        _, _, given, right = _KINDS[kind]
        rng = random.Random(f"hidden {task.id}")
        self._inputs = [task.info["example"], *(_draw(given, rng) for _ in range(self._tests))]
        self._right = [right(value, *numbers) for value in self._inputs]
        return (Message("system", self.rule), *task.messages) if self._rules else task.messages

    async def step(self, action: Action) -> Step:
        """Run the submission; end if it is right, else return feedback."""
        blocks = _FENCED.findall(action.text)
        if len(blocks) > 1:
            return Step("Give one block of code.", info={"right": False})
        source = blocks[0] if blocks else action.text
        files = {"solution.py": source, "inputs.json": json.dumps(self._inputs)}
        ran = await self._box.arun(_DRIVER, files, channel=_CHANNEL)
        values = _values(ran.channel)
        right = len(values) == len(self._right) and all(map(_same, values, self._right))
        info = {"right": right, "timed_out": ran.timed_out}
        if right:
            return Step(reward=1.0, terminated=True, info=info)
        return Step(self._feedback(values, ran), info=info)

    def _feedback(self, values: list[Any], ran: SandboxResult) -> str:
        """Describe the error on the example, without revealing hidden inputs."""
        if values and not _same(values[0], self._right[0]):
            return (
                f"f({self._inputs[0]!r}) is {values[0]!r:.{_MAX_FEEDBACK}}, not {self._right[0]!r}"
            )
        if not values:
            return f"no value: {ran.text.strip().splitlines()[-1][:_MAX_FEEDBACK]}"
        return "wrong on a hidden test"

    @staticmethod
    def tasks(split: str, n: int, seed: int) -> list[Task]:
        """Return functions of one argument with one or two constants; no
        function is in both splits."""

        def draw(rng: random.Random) -> tuple[str, Task]:
            kind = rng.choice(tuple(_KINDS))
            asked, _, given, right = _KINDS[kind]
            limit = 9 if kind in ("by", "say") else 60
            numbers = [rng.randint(2, limit), rng.randint(1, 99) if kind == "line" else 0]
            example = _draw(given, random.Random(f"{kind} {numbers}"))
            question = (
                "Write a Python function f(x) that returns "
                f"{asked.format(a=numbers[0], b=numbers[1])}."
            )
            question += f" Example: f({example!r}) is {right(example, *numbers)!r}."
            return f"{kind} {numbers}", Task(
                question, info={"kind": kind, "numbers": numbers, "example": example}
            )

        return sample_tasks("code", split, n, seed, draw)

    @staticmethod
    def texts(n: int, seed: int) -> list[str]:
        """Return sample questions, solutions and feedback, without running code."""
        rng = random.Random(seed)
        asked = Code.tasks("train", n, seed)
        feedback = [
            "f(5) is 12, not 19",
            "wrong on a hidden test",
            "no value: SyntaxError: invalid syntax",
            "Give one block of code.",
        ]
        return [
            text
            for task in asked
            for text in (task.messages[0].text, Code.solver(task.messages, rng))
        ] + feedback

    @staticmethod
    def solver(messages: Sequence[Message], rng: random.Random) -> str:
        """Play optimally, knowing the kinds of functions."""
        question = next(message.text for message in messages if message.role == "user")
        for asked, solution, _, _ in _KINDS.values():
            pattern = (
                re.escape(asked).replace(r"\{a\}", r"(?P<a>\d+)").replace(r"\{b\}", r"(?P<b>\d+)")
            )
            if found := re.search(pattern, question):
                return (
                    f"def f(x): return {solution.format(**{'a': '', 'b': '', **found.groupdict()})}"
                )
        return "def f(x): return x"

    @staticmethod
    def demonstrator(messages: Sequence[Message], rng: random.Random) -> str:
        """Play poorly: write wrong numbers with probability 0.67."""
        reply = Code.solver(messages, rng)
        return (
            re.sub(r"\d+", lambda _: str(rng.randint(2, 9)), reply)
            if rng.random() < 0.67
            else reply
        )


def _sum_over(numbers: list[int], minimum: int) -> int:
    return sum(number for number in numbers if number > minimum)


def _divided(numbers: list[int], by: int) -> int:
    return sum(number % by == 0 for number in numbers)


def _draw(given: str, rng: random.Random) -> Any:
    """Draw an input: a number, a list of numbers, or a text."""
    if given == "int":
        return rng.randint(-99, 99)
    if given == "text":
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
