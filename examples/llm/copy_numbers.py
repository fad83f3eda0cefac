"""Copy numbers: say two back, then the first one again. Made to be learned without a warm-up.

::

    user       (the rules) The number is 385.
    assistant  385
    user       Right. The next number is 174.
    assistant  174
    user       Right. Now say the first number again.
    assistant  385
"""

import re

from llm_kit import only_number

import turnwright as tw
from turnwright.envs.builtin.common import sample_tasks

RULES = (
    "I say two numbers, one after the other, and you say each of them back. Then you say the first "
    'number again. Say only the number. Example: the number is 521 and you say "521", I say '
    '"Right. The next number is 408.", you say "408", I say "Right. Now say the first number '
    'again.", you say "521". Now your numbers. The number is {first}.'
)
CARELESS = 0.2  # probability per turn that the demonstrator says another number


class CopyNumbers(tw.Env):
    """The reward is the share of the three replies that are right."""

    single_turn_best = 0.0
    max_turns = 3

    def reset(self, task, *, seed=None):
        first, second = task.info["numbers"]
        self.expected = [first, second, first]
        self.questions = [f"The next number is {second}.", "Now say the first number again."]
        self.right = 0
        return RULES.format(first=first)

    def step(self, action):
        expected = self.expected.pop(0)
        is_right = only_number(action.text) == expected
        self.right += is_right
        if not self.expected:
            return tw.Step(reward=self.right / 3, terminated=True)

        verdict = "Right." if is_right else f"Wrong, it was {expected}."
        return tw.Step(f"{verdict} {self.questions.pop(0)}")

    @staticmethod
    def tasks(split, n, seed):
        """Return pairs of numbers of three digits; no pair is in both splits."""

        def draw(rng):
            numbers = rng.sample(range(100, 1000), 2)
            return str(numbers), tw.Task(info={"numbers": numbers})

        return sample_tasks("copy numbers", split, n, seed, draw)

    @staticmethod
    def solver(messages, rng):
        texts = [message.text for message in messages if message.role == "user"]
        first = re.search(r"The number is (\d+)\.$", texts[0])
        second = re.search(r"The next number is (\d+)\.$", texts[-1])
        return (second or first)[1]

    @staticmethod
    def demonstrator(messages, rng):
        if rng.random() < CARELESS:
            return str(rng.randrange(100, 1000))
        return CopyNumbers.solver(messages, rng)
