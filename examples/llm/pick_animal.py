"""Pick the animal: three rounds, two words each. Made to be learned without a warm-up.

::

    user       (the rules) Round 1: tiger or cup?
    assistant  tiger
    user       Right. Round 2: lamp or goose?
    assistant  lamp
    user       Wrong, it was goose. Round 3: ...
"""

import random
import re

from llm_kit import LONGEST

import turnwright as tw
from turnwright.envs.spec import check_split

ANIMALS = (
    "bear", "bee", "bird", "camel", "cat", "cow", "crab", "deer", "dog", "duck", "eagle",
    "fox", "frog", "goat", "goose", "horse", "lizard", "monkey", "mouse", "owl", "pig",
    "rabbit", "sheep", "shark", "snake", "spider", "tiger", "turtle", "whale", "wolf", "worm",
    "zebra",
)  # fmt: skip
THINGS = (
    "bag", "bed", "book", "bottle", "box", "bridge", "car", "clock", "coat", "cup", "door",
    "fork", "glass", "hammer", "hat", "house", "key", "knife", "lamp", "map", "mirror",
    "paper", "pen", "piano", "ring", "road", "shirt", "shoe", "spoon", "table", "wall",
    "wheel",
)  # fmt: skip
ROUNDS = 3
RULES = (
    "In each of three rounds I name two words, and you say the one that is an animal. Say only "
    'that word. Example: the words are chair and lion, and you say "lion". '
)
CARELESS = 0.4  # probability per round that the demonstrator picks either word


def words_of(words, held_out):
    """Return every fourth word, or the others."""
    return [word for number, word in enumerate(words) if (number % 4 == 3) == held_out]


class PickAnimal(tw.Env):
    """The reward is the share of rounds with the right word.

    Held-out tasks have words that are in no training task.
    """

    single_turn_best = 0.0
    max_turns = ROUNDS

    def reset(self, task, *, seed=None):
        self.rounds, self.animals = task.info["rounds"], task.info["animals"]
        self.played = self.right = 0
        return f"{RULES}{self.ask()}"

    def ask(self):
        """Name the words of a round."""
        return f"Round {self.played + 1}: {' or '.join(self.rounds[self.played])}?"

    def step(self, action):
        words, animal = self.rounds[self.played], self.animals[self.played]
        said = set(re.findall(r"[a-z]+", action.text[:LONGEST].lower())) & set(words)
        self.right += said == {animal}
        self.played += 1
        if self.played == ROUNDS:
            return tw.Step(reward=self.right / ROUNDS, terminated=True)

        verdict = "Right." if said == {animal} else f"Wrong, it was {animal}."
        return tw.Step(f"{verdict} {self.ask()}")

    @staticmethod
    def tasks(split, n, seed):
        """Return rounds; a quarter of the words is held out."""
        check_split(split)
        held_out = split == "eval"
        animals, things = words_of(ANIMALS, held_out), words_of(THINGS, held_out)

        rng = random.Random(f"pick animal {split} {seed}")
        found = {}
        while len(found) < n:
            right, wrong = rng.sample(animals, ROUNDS), rng.sample(things, ROUNDS)
            rounds = [rng.sample(pair, 2) for pair in zip(right, wrong, strict=True)]
            task = tw.Task(info={"rounds": rounds, "animals": right})
            found[task.id] = task
        return list(found.values())

    @staticmethod
    def solver(messages, rng):
        words = re.findall(r"(\w+) or (\w+)\?$", messages[-1].text)[-1]
        return next(word for word in words if word in ANIMALS)

    @staticmethod
    def demonstrator(messages, rng):
        if rng.random() >= CARELESS:
            return PickAnimal.solver(messages, rng)
        return rng.choice(re.findall(r"(\w+) or (\w+)\?$", messages[-1].text)[-1])
