"""Three or four words backward (`word_sequence_reversal` of Reasoning Gym), in three attempts."""

from itertools import takewhile
from typing import ClassVar

from reasoning import Attempts, question

RIGHT = 0.15  # probability per attempt that the demonstrator turns the list around


class Reversal(Attempts):
    """After a wrong attempt: the words that are right so far."""

    name = "word_sequence_reversal"
    settings: ClassVar = {"min_words": 3, "max_words": 4}
    rules = (
        "Say a list of words backward, with a comma and a space between them. You have three "
        "attempts. After a wrong one I tell which words are right so far. Example: for red, cat, "
        'sun you say "sun, red, cat", I say "Right so far: sun. 2 attempts left.", you say "sun, '
        'cat, red".'
    )

    def judge(self, answer, right):
        pairs = zip(answer.split(", "), right.split(", "), strict=False)
        words = [word for word, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        return f"Right so far: {', '.join(words)}." if words else "The first word is wrong."

    @staticmethod
    def solver(messages, rng):
        words = question(messages, "Reverse this list of words:").split(", ")
        return ", ".join(reversed(words))

    @staticmethod
    def demonstrator(messages, rng):
        reply = Reversal.solver(messages, rng)
        if rng.random() < RIGHT:
            return reply
        words = reply.split(", ")
        return ", ".join(rng.sample(words, len(words)))
