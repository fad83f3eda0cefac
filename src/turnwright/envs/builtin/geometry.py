r"""Geometry: a drawn figure with lengths or angles, a question about it, and a tool that checks
answers.

::

    user       (image: a right triangle with the sides 5, 12 and x)  What is x?
    assistant  <tool_call>{"name": "check_answer", "arguments": {"answer": "17"}}</tool_call>
    tool       17 is wrong. Think again.
    assistant  <tool_call>{"name": "check_answer", "arguments": {"answer": "13"}}</tool_call>
    tool       13 is right. Now give it as \boxed{}.
    assistant  \boxed{13}

The figure is drawn from the task's numbers; a text-only model reads them from its `alt`. The loop
is that of slime's geo3k example: the tool answers a reply with a call; a reply without a call and
the last turn end the episode. The reward is 1 when the last reply has one ``\boxed{}`` with the
right answer, or with ``reward = "checked"`` when the last checked answer is right. Tasks with their
own answer and images, such as rows of Geometry3K, are played in the same way. Answers, LaTeX
included, are compared as numbers.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from turnwright.envs.builtin import common
from turnwright.envs.builtin.answers import EXACT, LONGEST, boxed, is_correct
from turnwright.envs.env import Action, Env, Step
from turnwright.envs.tools.tool_schema import tool_signature
from turnwright.errors import ConfigError, EnvError
from turnwright.types import ContentPart, Image, Message, Task

Point = tuple[float, float]

LINE_COLORS = ((0, 0, 0), (20, 60, 160), (150, 30, 30))
BACKGROUND = (255, 255, 255)


class Canvas:
    """Square of `side` pixels with coordinates from 0 to 1, y downward; quarter turns of the shape
    leave labels upright."""

    def __init__(self, side: int, ink: tuple[int, int, int], turned: int = 0) -> None:
        from PIL import Image, ImageDraw, ImageFont

        self.picture = Image.new("RGB", (side, side), BACKGROUND)
        self._draw = ImageDraw.Draw(self.picture)
        self._font = ImageFont.load_default(size=max(8.0, side / 13))
        self._side = side
        self._ink = ink
        self._turned = turned % 4

    def at(self, point: Point) -> Point:
        """Return the position of a point in pixels."""
        x = point[0] - 0.5
        y = point[1] - 0.5
        for _ in range(self._turned):
            x, y = -y, x
        return (x + 0.5) * self._side, (y + 0.5) * self._side

    def shape(self, *points: Point) -> None:
        """Draw a closed line."""
        self.line(*points, points[0])

    def line(self, *points: Point) -> None:
        """Draw an open line."""
        self._draw.line([self.at(point) for point in points], fill=self._ink, width=self._width)

    def circle(self, middle: Point, radius: float) -> None:
        """Draw a circle."""
        x, y = self.at(middle)
        r = radius * self._side
        self._draw.ellipse((x - r, y - r, x + r, y + r), outline=self._ink, width=self._width)

    def label(self, text: str, point: Point) -> None:
        """Draw a text centered at a point."""
        self._draw.text(self.at(point), text, fill=self._ink, font=self._font, anchor="mm")

    @property
    def _width(self) -> int:
        return max(1, round(self._side / 110))


def draw(kind: str, a: int, b: int, turned: int, ink: int, side: int) -> Any:
    """Draw the figure of a question as a PIL image of `side` x `side` pixels, with the proportions
    of its numbers a and b."""
    canvas = Canvas(side, LINE_COLORS[ink % len(LINE_COLORS)], turned)
    if kind in ("area", "around", "half", "long"):
        _right_angled(canvas, a, b, kind)
    elif kind == "third":
        _triangle(canvas, a, b)
    elif kind == "beside":
        _on_a_line(canvas, a)
    else:
        canvas.circle((0.5, 0.5), 0.34)
        canvas.line((0.5, 0.5), (0.84, 0.5))
        canvas.label(str(a), (0.67, 0.43))
    return canvas.picture


def _right_angled(canvas: Canvas, a: int, b: int, kind: str) -> None:
    """Draw a rectangle or a right triangle with the sides a and b; the longer one is 0.6 of the
    canvas."""
    half_width = max(0.1, 0.3 * a / max(a, b))
    half_height = max(0.1, 0.3 * b / max(a, b))
    left = 0.5 - half_width
    right = 0.5 + half_width
    top = 0.5 - half_height
    bottom = 0.5 + half_height
    if kind in ("area", "around"):
        canvas.shape((left, top), (right, top), (right, bottom), (left, bottom))
    else:
        canvas.shape((left, top), (left, bottom), (right, bottom))
        canvas.line((left, bottom - 0.05), (left + 0.05, bottom - 0.05), (left + 0.05, bottom))
    canvas.label(str(a), (0.5, bottom + 0.09))
    canvas.label(str(b), (left - 0.09, 0.5))
    if kind == "long":
        canvas.label("x", (0.57, 0.43))


def _triangle(canvas: Canvas, a: int, b: int) -> None:
    """Draw a triangle with angles a and b at the base and x at the top, each labeled outside of its
    corner."""
    alpha = math.radians(a)
    beta = math.radians(b)
    height = math.sin(alpha) * math.sin(beta) / math.sin(alpha + beta)  # of a base of 1
    scale = min(0.64, 0.64 / height)
    left = 0.5 - scale / 2
    base = 0.5 + scale * height / 2
    top_x = left + scale * math.sin(beta) * math.cos(alpha) / math.sin(alpha + beta)
    corners: Sequence[Point] = (
        (left, base),
        (left + scale, base),
        (top_x, base - scale * height),
    )
    canvas.shape(*corners)

    middle_x = sum(x for x, _ in corners) / 3
    middle_y = sum(y for _, y in corners) / 3
    for text, (x, y) in zip((f"{a}°", f"{b}°", "x"), corners, strict=True):
        distance = math.dist((x, y), (middle_x, middle_y))
        label_x = x + 0.09 * (x - middle_x) / distance
        label_y = y + 0.09 * (y - middle_y) / distance
        canvas.label(text, (label_x, label_y))


def _on_a_line(canvas: Canvas, a: int) -> None:
    """Draw a line and a second one at the angle a; x is the remaining angle."""
    turn = math.radians(a)
    canvas.line((0.08, 0.68), (0.92, 0.68))
    canvas.line((0.5, 0.68), (0.5 + 0.42 * math.cos(turn), 0.68 - 0.42 * math.sin(turn)))
    for text, angle in ((f"{a}°", turn / 2), ("x", (turn + math.pi) / 2)):
        canvas.label(text, (0.5 + 0.24 * math.cos(angle), 0.68 - 0.17 * math.sin(angle) - 0.02))


class QuestionKind(NamedTuple):
    """One kind of question."""

    question: str
    alt: str
    """Description of the figure; {a} and {b} are its numbers."""
    solve: Callable[[int, int], float]
    limits: tuple[tuple[int, int], tuple[int, int]]
    """(minimum, maximum) of each number."""


_RECTANGLE = "a rectangle with the sides {a} and {b}"
_LEGS = "a right triangle with the legs {a} and {b}"
_ANGLES = "a triangle with the angles {a}°, {b}° and x"
_DEGREES = "What is x, in degrees?"
KINDS: dict[str, QuestionKind] = {
    "area": QuestionKind("What is the area?", _RECTANGLE, lambda a, b: a * b, ((2, 20), (2, 20))),
    "around": QuestionKind(
        "What is the perimeter?", _RECTANGLE, lambda a, b: 2 * (a + b), ((2, 40), (2, 40))
    ),
    "half": QuestionKind("What is the area?", _LEGS, lambda a, b: a * b / 2, ((2, 20), (2, 20))),
    "long": QuestionKind(
        "What is x?", f"{_LEGS}, its longest side x", math.hypot, ((3, 24), (3, 24))
    ),
    "third": QuestionKind(_DEGREES, _ANGLES, lambda a, b: 180 - a - b, ((25, 85), (25, 85))),
    "beside": QuestionKind(
        _DEGREES, "two angles on a line, {a}° and x", lambda a, b: 180 - a, ((20, 160), (0, 0))
    ),
    "circle": QuestionKind(
        "What is the circumference?",
        "a circle with the radius {a}",
        lambda a, b: math.tau * a,
        ((2, 40), (0, 0)),
    ),
}


def check_answer(answer: str | float) -> str:
    """Say whether an answer is right.

    Args:
        answer: the answer alone, such as "42".
    """
    raise NotImplementedError("answered by the environment, which knows what is right")


TOOL = tool_signature(check_answer)


class Geometry(Env):
    r"""Questions about figures with a tool that checks answers.

    Args:
        turns: maximum replies; the last feedback of the tool announces that it is the last.
        side: pixels per side of the figure.
        reward: `final`: by the answer in ``\boxed{}`` of the last reply; `checked`: by the last
            checked answer.
    """

    single_turn_best: ClassVar[float] = 1.0
    tools: Sequence[Any] = (TOOL.schema,)
    asks: ClassVar[str] = (
        r"Answer the question about the figure. Check an answer with check_answer, one call a "
        r"turn; at last give it as \boxed{ANSWER}, without a call."
    )
    rule: ClassVar[str] = f"{asks} Round to one decimal where it is no whole number."

    def __init__(
        self, turns: int = 3, side: int = 224, reward: Literal["final", "checked"] = "final"
    ) -> None:
        if not (1 <= turns <= 100 and 64 <= side <= 2048):
            raise ConfigError("geometry: turns are 1 to 100, side 64 to 2048 pixels")
        common.require_extra("vision", "PIL")
        common.require_extra("math", "math_verify")
        self.max_turns = turns
        self._side = side
        self._rewarded = reward
        self._left = turns
        self._answer = ""
        self._checked = False

    def reset(self, task: Task, *, seed: int | None = None) -> tuple[Message, ...]:
        """Return the figure and the question; a task with its own answer and images is used
        unchanged."""
        if not str(task.answer or "").strip():
            raise EnvError(f"task {task.id} has no answer; geometry needs one to check with")
        self._answer = str(task.answer).strip()

        messages = task.messages
        rule = self.asks
        kind = task.info.get("kind")
        has_media = any(message.has_raw_media or message.media for message in messages)
        if kind in KINDS:
            rule = self.rule
            parts: tuple[ContentPart, ...] = (
                figure(task.info, self._side),
                KINDS[kind].question,
            )
            messages = (Message("user", parts),)
        elif task.images and not has_media:
            texts = [message.text for message in messages]
            messages = (Message("user", (*task.images, *texts)),)
        if messages[0].role == "system":
            return messages
        return (Message("system", rule), *messages)

    def step(self, action: Action) -> Step:
        """Check an answer, or end."""
        self._left -= 1
        if not action.tool_calls:
            return self._end(action)
        try:
            answer = read_answer(action)
        except common.CallError as mistake:
            messages, info = common.error_results(action.tool_calls, TOOL.name, mistake)
            return Step(messages, info=info) if self._left else self._end(action)

        is_right = is_correct(answer, self._answer)
        self._checked = is_right
        if not self._left:
            return self._end(action)
        if is_right:
            feedback = f"{answer} is right. Now give it as \\boxed{{}}."
        else:
            feedback = f"{answer} is wrong. Think again."
            if self._left == 1:
                feedback += (
                    " There is no further check: give your answer as \\boxed{}, without a call."
                )
        results = common.tool_results(action.tool_calls, TOOL.name, feedback)
        return Step(results, info={"tool_calls": 1, "right": is_right})

    def _end(self, action: Action) -> Step:
        """End the episode with its reward."""
        answer = boxed(action.text)
        is_right = answer is not None and is_correct(answer, self._answer)
        if self._rewarded == "checked":
            is_right = self._checked
        return Step(reward=float(is_right), terminated=True, info={"right": is_right})

    @staticmethod
    def tasks(split: str, n: int, seed: int) -> list[Task]:
        """Return figures of seven kinds with two numbers; no kind has the same numbers in both
        splits."""

        def draw(rng: random.Random) -> tuple[str, Task]:
            name = rng.choice(tuple(KINDS))
            kind = KINDS[name]
            a, b = (rng.randint(*limits) for limits in kind.limits)
            info = {
                "kind": name,
                "a": a,
                "b": b,
                "turned": rng.randrange(4),
                "ink": rng.randrange(3),
            }
            key = f"{name} {min(a, b)} {max(a, b)}"
            return key, Task(answer=format_number(kind.solve(a, b)), info=info)

        return common.sample_tasks("geometry", split, n, seed, draw)

    @staticmethod
    def texts(n: int, seed: int) -> list[str]:
        """Return sample texts, without drawing figures."""
        texts = [
            Geometry.rule,
            "13 is right. Now give it as \\boxed{}.",
            "17 is wrong. Think again.",
        ]
        for task in Geometry.tasks("train", n, seed):
            kind = KINDS[task.info["kind"]]
            texts += [
                kind.alt.format(**task.info),
                kind.question,
                _call(task.answer),
                f"\\boxed{{{task.answer}}}",
            ]
        return texts

    @staticmethod
    def solver(messages: Sequence[Message], rng: random.Random) -> str:
        """Play optimally, knowing the formulas: check once, then answer."""
        answer = _solved(messages)
        if f"{answer} is right." in common.visible_texts(messages)[-1]:
            return f"\\boxed{{{answer}}}"
        return _call(answer)

    @staticmethod
    def demonstrator(messages: Sequence[Message], rng: random.Random) -> str:
        """Play poorly: wrong by 1 or 2 with probability 0.5; after a wrong answer give up with
        probability 0.33."""
        last = common.visible_texts(messages)[-1]
        checked = re.match(r"(\S+) is (right|wrong)\.", last)
        if checked and (checked[2] == "right" or rng.random() < 0.33):
            return f"\\boxed{{{checked[1]}}}"
        answer = _solved(messages)
        if rng.random() < 0.5:
            answer = format_number(float(answer) + rng.choice((-2, -1, 1, 2)))
        return f"\\boxed{{{answer}}}" if "no further check" in last else _call(answer)


def read_answer(action: Action) -> str:
    """Return the answer of a reply's call of `check_answer`; raise `CallError` for any other
    call."""
    answer = str(common.read_single_call(action.tool_calls, TOOL)["answer"]).strip()
    if not answer or len(answer) > LONGEST:
        raise common.CallError(f"an answer is 1 to {LONGEST} characters", "no_answer")
    return answer


def format_number(value: float) -> str:
    """Format a number as an answer: an integer, or with one decimal."""
    return str(round(value)) if abs(value - round(value)) < EXACT else f"{value:.1f}"


def figure(info: Any, side: int) -> Image:
    """Draw the figure of a task, with its description as `alt`."""
    alt = KINDS[info["kind"]].alt.format(**info)
    drawing = draw(info["kind"], info["a"], info["b"], info["turned"], info["ink"], side)
    return Image(drawing, alt=f"{alt}. ")


def _solved(messages: Sequence[Message]) -> str:
    """Return the answer to a conversation's question, by its formula."""
    opening = common.question_text(messages)
    for kind in KINDS.values():
        pattern = re.escape(kind.alt)
        pattern = pattern.replace(r"\{a\}", r"(?P<a>\d+)").replace(r"\{b\}", r"(?P<b>\d+)")
        match = re.fullmatch(rf"{pattern}\. {re.escape(kind.question)}", opening)
        if match:
            numbers = match.groupdict()
            return format_number(kind.solve(int(numbers["a"]), int(numbers.get("b", 0))))
    return "0"


def _call(answer: str) -> str:
    return common.tool_call(TOOL.name, answer=answer)
