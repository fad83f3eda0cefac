"""Sums of two numbers of one or two digits (`chain_sum` of Reasoning Gym), in three attempts."""

from typing import ClassVar

from llm_kit import only_number
from reasoning import Attempts, question

RIGHT = 0.2  # probability per attempt that the demonstrator calculates


class Sums(Attempts):
    """After a wrong attempt: too low or too high, and whether the last digit is right."""

    name = "chain_sum"
    settings: ClassVar = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    rules = (
        "Solve the problem and say only the number. You have three attempts. After a wrong one I "
        'tell whether it is too low or too high. Example: for 2 + 6 you say "9", I say "Too high. '
        '2 attempts left.", you say "8".'
    )

    def read(self, line):
        number = only_number(line)
        return "" if number is None else str(number)

    def judge(self, answer, right):
        if not answer:
            return "Say one number."
        verdict = "Too low." if int(answer) < int(right) else "Too high."
        return f"{verdict} The last digit is right." if answer[-1] == right[-1] else verdict

    @staticmethod
    def solver(messages, rng):
        one, sign, other, _ = question(messages, "problem:").split()
        return str(int(one) + int(other) if sign == "+" else int(one) - int(other))

    @staticmethod
    def demonstrator(messages, rng):
        reply = Sums.solver(messages, rng)
        if rng.random() < RIGHT:
            return reply
        return str(int(reply) + rng.choice((-10, -2, -1, 1, 2, 10)))
