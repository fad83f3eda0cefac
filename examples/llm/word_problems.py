"""Word problems: two or three JSON calls that calculate, then the number.

::

    user       (the rules) Ann has 14 boxes with 12 pens each and gives away 30 pens. How many pens
               are left?
    assistant  <tool_call>{"name": "multiply", "arguments": {"a": 14, "b": 12}}</tool_call>
    tool       168
    assistant  <tool_call>{"name": "subtract", "arguments": {"a": 168, "b": 30}}</tool_call>
    tool       138
    assistant  138

The template of the recipe shows the tools, and how a call is written.
"""

import operator
import re

from llm_kit import only_number

import turnwright as tw
from turnwright.envs.builtin.common import sample_tasks, tool_call

RULES = (
    "Solve the problem with the tools add, subtract and multiply. Call one tool each turn and read "
    "its result. When you have the answer, say only the number. Example: for a sum of 3 and 5 you "
    'call add with a 3 and b 5, the result is 8, and you say "8". '
)
WHO = ("Ann", "Ben", "Carl", "Eva", "Jack", "Mary", "Paul", "Tom")
STORIES = {
    "{who} has {a} boxes with {b} pens each and gives away {c} pens. How many pens are left?": "* "
    "-",
    "{who} bakes {a} trays of {b} rolls each, and {c} rolls more. How many rolls are there?": "* +",
    "{who} has {a} coins, finds {b} coins and then loses {c}. How many coins are left?": "+ -",
    "{who} buys {a} red cups and {b} blue cups. Each cup costs {c} dollars. How many "
    "dollars is that?": "+ *",
    "{who} packs {a} bags with {b} nuts each, adds {c} nuts and eats {d}. How many nuts "
    "are left?": "* + -",
    "{who} reads {a} pages each morning and {b} each evening for {c} days, but skips {d} pages. "
    "How many pages is that?": "+ * -",
}
"""The operations that solve each story, from left to right."""
TOOLS = {"+": "add", "-": "subtract", "*": "multiply"}
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
GIVE_UP = 0.3  # probability per call that the demonstrator answers with the last number instead


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def subtract(a: int, b: int) -> str:
    """Subtract b from a."""
    return str(a - b)


def multiply(a: int, b: int) -> str:
    """Multiply two numbers."""
    return str(a * b)


def right(trajectory, task):
    """Return 1.0 when the last reply has the answer and no other number."""
    return float(str(only_number(trajectory.final_text)) == task.answer)


def calls_of(signs, numbers):
    """Return (tool, a, b, result) of each call that solves a problem."""
    first, *rest = numbers
    calls = []
    for sign, number in zip(signs.split(), rest, strict=False):
        result = OPERATORS[sign](first, number)
        calls.append((TOOLS[sign], first, number, result))
        first = result
    return calls


def tasks(split, n, seed):
    """Return stories with numbers; no story is with the same numbers in both splits."""

    def draw(rng):
        story, signs = rng.choice(list(STORIES.items()))
        numbers = [rng.randint(11, 60), rng.randint(11, 30), rng.randint(2, 20), rng.randint(2, 20)]
        words = dict(zip("abcd", numbers, strict=True))
        answer = calls_of(signs, numbers)[-1][3]

        key = f"{story} {numbers}"
        return key, tw.Task(RULES + story.format(who=rng.choice(WHO), **words), answer=str(answer))

    return sample_tasks("word problems", split, n, seed, draw)


def planned_calls(messages):
    """Return the calls for the problem of a conversation."""
    opening = next(message.text for message in messages if message.role == "user")
    question = opening.removeprefix(RULES)
    for story, signs in STORIES.items():
        pattern = re.escape(story).replace(r"\{who\}", r"\w+")
        for name in "abcd":
            pattern = pattern.replace(rf"\{{{name}\}}", rf"(?P<{name}>\d+)")
        if found := re.fullmatch(pattern, question):
            return calls_of(signs, [int(number) for number in found.groups()])
    raise ValueError(f"not one of the stories: {question}")


def solver(messages, rng):
    calls = planned_calls(messages)
    results = [message for message in messages if message.role == "tool"]
    if len(results) == len(calls):
        return results[-1].text
    tool, a, b, _ = calls[len(results)]
    return tool_call(tool, a=a, b=b)


def demonstrator(messages, rng):
    reply = solver(messages, rng)
    if reply.startswith("<tool_call>") and rng.random() < GIVE_UP:
        return re.findall(r"\d+", messages[-1].text)[-1]
    return reply


WORD_PROBLEMS = tw.tool_env(
    [add, subtract, multiply],
    reward=right,
    max_turns=6,
    tasks=tasks,
    solver=solver,
    demonstrator=demonstrator,
    single_turn_best=1.0,
)
