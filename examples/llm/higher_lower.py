"""Higher or lower: find a number from 1 to 20 in five guesses.

::

    user       (the rules) My number is higher than 7.
    assistant  14
    user       Lower than 14. 4 guesses left.
    assistant  10
"""

import re

from llm_kit import only_number

import turnwright as tw
from turnwright.envs.builtin.common import sample_tasks

LARGEST = 20
GUESSES = 5
RULES = (
    "I have a number from 1 to 20 and you have five guesses. Say only one number each turn. I tell "
    'whether my number is higher or lower. Example: my number is 6 and you say "9", I say "Lower '
    'than 9. 4 guesses left.", you say "6". Now I have a new number. My number is {hint}.'
)
WILD = 0.5  # probability per turn that the demonstrator forgets what it heard


def compared(number, guess):
    """Tell where a number is of a guess."""
    return f"{'higher' if number > guess else 'lower'} than {guess}"


class HigherLower(tw.Env):
    """The reward is 1 for the number.

    The rules end with the answer to a first guess, which makes 380 different tasks of 20 numbers.
    """

    single_turn_best = 0.1
    max_turns = GUESSES

    def reset(self, task, *, seed=None):
        self.number, self.left = task.info["number"], GUESSES
        return RULES.format(hint=compared(self.number, task.info["first"]))

    def step(self, action):
        guess = only_number(action.text)
        self.left -= 1
        if guess == self.number:
            return tw.Step(reward=1.0, terminated=True)
        if self.left == 0:
            return tw.Step(terminated=True)

        left = f"{self.left} guess{'es' * (self.left > 1)} left."
        if guess is None or not 1 <= guess <= LARGEST:
            raise tw.InvalidAction(f"Say one number from 1 to {LARGEST}. {left}")
        return tw.Step(f"{compared(self.number, guess).capitalize()}. {left}")

    @staticmethod
    def tasks(split, n, seed):
        """Return numbers with a first answer; no such pair is in both splits."""

        def draw(rng):
            number, first = rng.sample(range(1, LARGEST + 1), 2)
            return f"{number} {first}", tw.Task(info={"number": number, "first": first})

        return sample_tasks("higher or lower", split, n, seed, draw)

    @staticmethod
    def possible(messages):
        """Return the numbers that agree with everything said after the example."""
        texts = [message.text for message in messages if message.role == "user"]
        heard = " ".join([texts[0].rpartition("Now")[2], *texts[1:]]).lower()

        low, high = 1, LARGEST
        for direction, guess in re.findall(r"(higher|lower) than (\d+)", heard):
            if direction == "higher":
                low = max(low, int(guess) + 1)
            else:
                high = min(high, int(guess) - 1)
        return range(low, high + 1)

    @staticmethod
    def solver(messages, rng):
        numbers = HigherLower.possible(messages)
        return str(numbers[len(numbers) // 2])

    @staticmethod
    def demonstrator(messages, rng):
        numbers = HigherLower.possible(messages)
        if rng.random() < WILD:
            numbers = range(1, LARGEST + 1)
        return str(rng.choice(numbers))
