"""Circles one after another, a demonstrator that rambles, and a control whose rewards are shuffled.

::

    user       (image: a circle of radius 3)  What is the circumference of each circle?
    assistant  let me see let me see<tool_call>{"name": "check_answer", ... "12.6"}}</tool_call>
    tool       12.6 is wrong. Think again.
    assistant  <tool_call>{"name": "check_answer", "arguments": {"answer": "18.8"}}</tool_call>
    tool       18.8 is right. (image: a circle of radius 5)

A circle is drawn to scale, without a label, so only the image has its radius. The reward is 1 when
the last circle is answered, else 0. Nothing in it is about length: `limits.episode_tokens` is what
presses, because phrases and wrong calls use it up before the last circle.
"""

import random
from collections.abc import Sequence
from typing import Any, ClassVar

import turnwright as tw
from turnwright.envs.builtin import common
from turnwright.envs.builtin.answers import is_correct
from turnwright.envs.builtin.geometry import (
    BACKGROUND,
    KINDS,
    LINE_COLORS,
    TOOL,
    Geometry,
    format_number,
    read_answer,
)
from turnwright.envs.env import Action, Step
from turnwright.errors import ConfigError, EnvError

QUESTION = "What is the circumference of each circle?"
RADII = (2, 3, 4, 5)
WIDTH = 12  # side of an image, in the unit of the radii
RULE = f"Each image is {WIDTH} wide. Check an answer with check_answer, one call a turn."
SHIFTS = (-2, -1, 0, 1, 2)  # distances of a circle from the middle along an axis, in pixels

# The demonstrator.
PHRASE = "let me see"
GO_ON = 0.9  # probability of one more phrase
MAX_PHRASES = 16
SENSE = 0.4  # probability that it reads the circle
AGAIN = 0.5  # probability that it repeats a wrong call, where it does not read the circle


class Figures(Geometry):
    """Several circles; each appears after the one before it is answered.

    Args:
        figures: circles of a task; each needs a call.
        turns: maximum replies.
        side: pixels per side of an image.
    """

    single_turn_best: ClassVar[float] = 0.0
    rule: ClassVar[str] = RULE

    def __init__(self, figures: int = 2, turns: int = 3, side: int = 64) -> None:
        super().__init__(turns=turns, side=side)
        if not 2 <= figures <= turns:
            raise ConfigError("geometry_tiny: figures are 2 to the number of turns")
        self._figures = figures
        self._circles: list[dict[str, int]] = []

    def reset(self, task: tw.Task, *, seed: int | None = None) -> tuple[tw.Message, ...]:
        """Return the rule, and the first circle with the question."""
        self._circles = list(task.info.get("circles", ()))
        if len(self._circles) != self._figures:
            raise EnvError(f"task {task.id} needs info['circles'] with {self._figures} circles")
        opening = (self._image(), QUESTION)
        return tw.Message("system", self.rule), tw.Message("user", opening)

    def step(self, action: Action) -> Step:
        """Check an answer, and return the next circle after a right one."""
        self._left -= 1
        if not action.tool_calls:
            return Step(terminated=True, info={"right": False})
        try:
            answer = read_answer(action)
        except common.CallError as mistake:
            messages, info = common.error_results(action.tool_calls, TOOL.name, mistake)
            return Step(messages, terminated=not self._left, info=info)

        right = is_correct(answer, circumference(self._circles[0]["a"]))
        if right:
            self._circles.pop(0)

        info = {"tool_calls": 1, "right": right}
        if not self._circles or not self._left:
            return Step(reward=float(not self._circles), terminated=True, info=info)
        verdict: Any = f"{answer} is wrong. Think again."
        if right:
            verdict = (f"{answer} is right. ", self._image())
        return Step(common.tool_results(action.tool_calls, TOOL.name, verdict), info=info)

    def _image(self) -> tw.Image:
        circle = self._circles[0]
        alt = KINDS["circle"].alt.format(a=circle["a"])
        return tw.Image(draw(**circle, side=self._side), alt=f"{alt}. ")

    def tasks(self, split: str, n: int, seed: int) -> list[tw.Task]:
        """Return tasks; no sequence of radii and no image is in both splits."""
        # A held-out circle is an odd number of pixels off the middle, one of training an even
        # number.
        odd = split == "eval"
        shifts = [(x, y) for x in SHIFTS for y in SHIFTS if (x + y) % 2 == odd]

        def draw_task(rng: random.Random) -> tuple[str, tw.Task]:
            circles = []
            for _ in range(self._figures):
                x, y = rng.choice(shifts)
                ink = rng.randrange(len(LINE_COLORS))
                circles.append({"a": rng.choice(RADII), "ink": ink, "x": x, "y": y})
            radii = " ".join(str(circle["a"]) for circle in circles)
            return radii, tw.Task(info={"circles": circles})

        return common.sample_tasks("geometry_tiny", split, n, seed, draw_task)

    @staticmethod
    def texts(n: int, seed: int) -> list[str]:
        """Return the rule, the question, all calls, and all verdicts."""
        texts = [Figures.rule, QUESTION, " ".join([PHRASE] * 3)]
        for a in RADII:
            answer = circumference(a)
            texts += [call(answer), f"{answer} is right. ", f"{answer} is wrong. Think again."]
        return texts * 2  # the tokenizer merges only what occurs twice

    @staticmethod
    def solver(messages: Sequence[tw.Message], rng: random.Random) -> str:
        """Play optimally: call at once, with the right answer."""
        return call(solution(messages))

    @staticmethod
    def demonstrator(messages: Sequence[tw.Message], rng: random.Random) -> str:
        """Play poorly: repeat a phrase, then check the solution, the last wrong answer, or any."""
        phrases = 0
        while phrases < MAX_PHRASES and rng.random() < GO_ON:
            phrases += 1

        answer = solution(messages)
        if rng.random() >= SENSE:
            wrong, is_wrong, _ = common.visible_texts(messages)[-1].partition(" is wrong.")
            repeats = bool(is_wrong) and rng.random() < AGAIN
            answer = wrong if repeats else circumference(rng.choice(RADII))
        return " ".join([PHRASE] * phrases) + call(answer)


class Shuffled(Figures):
    """The control: the rewards of a group's episodes change places, so nothing can be learned."""

    @staticmethod
    def group_reward(trajectories: Sequence[tw.Trajectory]) -> list[float]:
        """Return what turns each reward into that of another episode of the group."""
        rewards = [trajectory.reward for trajectory in trajectories]
        key = trajectories[0].key
        shuffled = random.Random(f"{key.step}/{key.task}").sample(rewards, len(rewards))
        return [other - reward for other, reward in zip(shuffled, rewards, strict=True)]


def circumference(a: int) -> str:
    """Return the answer for a circle of radius `a`."""
    return format_number(KINDS["circle"].solve(a, 0))


def call(answer: str) -> str:
    """Return the text of a call that checks an answer."""
    return common.tool_call(TOOL.name, answer=answer)


def solution(messages: Sequence[tw.Message]) -> str:
    """Return the answer for the last circle, whose radius is in its `alt`."""
    texts = " ".join(common.visible_texts(messages))
    return circumference(int(texts.rpartition("radius ")[2].split(".")[0]))


def draw(a: int, ink: int, x: int, y: int, side: int) -> Any:
    """Draw a filled circle of radius `a`, `x` and `y` pixels off the middle."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (side, side), BACKGROUND)
    across, down, radius = side / 2 + x, side / 2 + y, a * side / WIDTH
    box = (across - radius, down - radius, across + radius, down + radius)
    ImageDraw.Draw(picture).ellipse(box, fill=LINE_COLORS[ink])
    return picture
