"""Turn cards over, one at a time, and name the two of one color."""

import random
from itertools import combinations

import numpy as np

import turnwright as tw

COLORS = {
    "red": (230, 40, 40),
    "green": (40, 200, 60),
    "blue": (60, 90, 240),
    "white": (240, 240, 240),
    "gold": (240, 190, 40),
}
CARDS = ("1", "2", "3", "4")
SIDE = 24  # pixels of a card


def draw(cards, open_card):
    """Draw four cards in two rows, face down but for one."""
    image = np.zeros((2 * SIDE, 2 * SIDE, 3), np.uint8)
    for number, color in enumerate(cards):
        top, left = SIDE * (number // 2), SIDE * (number % 2)
        face = COLORS[color] if number == open_card else (70, 60, 80)
        image[top + 2 : top + SIDE - 2, left + 2 : left + SIDE - 2] = face
    return image


class FindPair(tw.Env):
    """`turn N` shows a card; `pair A B` names the two that are equal.

    The other two differ from all.
    """

    single_turn_best = 1 / 6
    max_turns = 7

    def reset(self, task, *, seed=None):
        self.cards = task.info["cards"]
        return self.show(None)

    def step(self, action):
        words = action.text.split()
        if len(words) == 2 and words[0] == "turn" and words[1] in CARDS:
            return tw.Step(self.show(CARDS.index(words[1])))
        if (
            len(words) == 3
            and words[0] == "pair"
            and words[1] in CARDS
            and words[2] in CARDS
            and words[1] != words[2]
        ):
            one, other = (self.cards[CARDS.index(word)] for word in words[1:])
            return tw.Step(reward=float(one == other), terminated=True)
        raise tw.InvalidAction("say turn N or pair A B")

    def show(self, card):
        alt = "closed" if card is None else f"card {CARDS[card]} {self.cards[card]}"
        return [tw.Image(draw(self.cards, card), alt=alt)]

    @staticmethod
    def tasks(split, n, seed):
        every = []
        for pair in combinations(range(4), 2):
            for colors in combinations(COLORS, 3):
                for twice in colors:
                    one, other = (color for color in colors if color != twice)
                    for rest in ((one, other), (other, one)):
                        left = list(rest)
                        every.append(
                            [twice if number in pair else left.pop() for number in range(4)]
                        )
        kept = [
            cards for number, cards in enumerate(every) if (number % 7 == 0) == (split == "eval")
        ]
        chosen = random.Random(seed).sample(kept, min(n, len(kept)))
        return [tw.Task(info={"cards": cards}) for cards in chosen]

    @staticmethod
    def solver(messages, rng):
        shown = [message.text_with_alt.split() for message in messages if message.role == "user"]
        seen = {words[1]: words[2] for words in shown if words[0] == "card"}
        for one, other in combinations(sorted(seen), 2):
            if seen[one] == seen[other]:
                return f"pair {one} {other}"
        return f"turn {next(card for card in CARDS if card not in seen)}"

    @staticmethod
    def demonstrator(messages, rng):
        if rng.random() < 0.6:
            return FindPair.solver(messages, rng)
        return rng.choice(
            (f"turn {rng.choice(CARDS)}", f"pair {' '.join(sorted(rng.sample(CARDS, 2)))}")
        )
