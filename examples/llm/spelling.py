"""A short word backward (`spell_backward` of Reasoning Gym), in three attempts."""

from itertools import takewhile
from typing import ClassVar

from reasoning import Attempts, question

RIGHT = 0.1  # probability per attempt that the demonstrator spells with care


class Spelling(Attempts):
    """After a wrong attempt: the letters that are right so far."""

    name = "spell_backward"
    settings: ClassVar = {"min_word_len": 3, "max_word_len": 4}
    rules = (
        "Spell a word backward and say only that. You have three attempts. After a wrong one I "
        'tell which letters are right so far. Example: for top you say "pto", I say "Right so far: '
        'p. 2 attempts left.", you say "pot".'
    )

    def judge(self, answer, right):
        pairs = zip(answer, right, strict=False)
        letters = "".join(letter for letter, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return f"Right so far: {letters}." if letters else "The first letter is wrong."

    @staticmethod
    def solver(messages, rng):
        return question(messages, "nus):")[::-1]

    @staticmethod
    def demonstrator(messages, rng):
        reply = Spelling.solver(messages, rng)
        if rng.random() < RIGHT:
            return reply
        return "".join(rng.sample(reply, len(reply)))
