"""Datasets of Reasoning Gym in several turns: after a wrong attempt, what is right so far.

Needs `pip install reasoning-gym` (tested with 0.1.25). `sums.py`, `reversal.py` and `spelling.py`
have a task each.
"""

import functools
import random
from importlib.util import find_spec

from llm_kit import first_line

import turnwright as tw
from turnwright.envs.builtin.common import is_held_out
from turnwright.envs.spec import check_split
from turnwright.errors import ConfigError

ATTEMPTS = 3
ROWS = 10_000  # rows that tasks are drawn from


@functools.cache
def dataset(name, **settings):
    """Make a dataset; its rows are generated when they are read."""
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=0, size=ROWS, **settings)


class Attempts(tw.Env):
    """A question of a dataset; the reward is 1 for a right answer within three attempts.

    A class of a task has `name` and `settings` of its dataset, `rules` to say before the question,
    and `judge`. The dataset decides what is right: it scores the answer 1.
    """

    single_turn_best = 1.0
    max_turns = ATTEMPTS
    name, settings, rules = "", {}, ""

    def __init__(self):
        if find_spec("reasoning_gym") is None:
            raise ConfigError("reasoning_gym is not installed; pip install reasoning-gym")

    def reset(self, task, *, seed=None):
        self.row, self.left = task.info["row"], ATTEMPTS
        return f"{self.rules} {self.row['question'].strip()}"

    def step(self, action):
        answer = self.read(first_line(action.text))
        rows = dataset(self.name, **self.settings)
        is_right = bool(answer) and rows.score_answer(answer=answer, entry=self.row) >= 1.0

        self.left -= 1
        if is_right or self.left == 0:
            return tw.Step(reward=float(is_right), terminated=True)
        verdict = self.judge(answer, self.row["answer"])
        return tw.Step(f"{verdict} {self.left} attempt{'s' * (self.left > 1)} left.")

    def read(self, line):
        """Return the answer of a line, or an empty text."""
        return line

    def judge(self, answer, right):
        """Say what is right in a wrong answer."""
        raise NotImplementedError

    @classmethod
    def tasks(cls, split, n, seed):
        """Return rows of different questions; no question is in both splits."""
        check_split(split)
        rows = dataset(cls.name, **cls.settings)
        found = {}
        for index in random.Random(f"{split} {seed}").sample(range(ROWS), ROWS):
            if len(found) >= n:
                break
            row = rows[index]
            if is_held_out(cls.name, row["question"]) == (split == "eval"):
                found.setdefault(row["question"], tw.Task(answer=row["answer"], info={"row": row}))
        return list(found.values())


def question(messages, before):
    """Return what follows a text in the first user message."""
    text = next(message.text for message in messages if message.role == "user")
    return text.rpartition(before)[2].strip()
