"""Lookups: a parcel went from person to person; ask them one by one, then name its shelf.

::

    user       (the rules) Ben got the parcel first.
    assistant  ask Ben
    user       Ben gave it to Tom.
    assistant  ask Tom
    user       Tom put it on shelf 4.
    assistant  shelf 4
"""

import re
from itertools import pairwise

from llm_kit import command

import turnwright as tw
from turnwright.envs.builtin.common import sample_tasks

NAMES = ("Ann", "Ben", "Carl", "Dan", "Eva", "Fred", "Jack", "Kate", "Lucy", "Mary", "Paul", "Tom")
SHELVES = ("1", "2", "3", "4", "5", "6", "7", "8", "9")
RULES = (
    "A parcel went from person to person. Find its shelf. Say one command each turn: ask NAME "
    "tells what that person did with the parcel, shelf NUMBER ends. Example: Zoe got the parcel "
    'first. You say "ask Zoe", I say "Zoe put it on shelf 7.", you say "shelf 7". Now it is your '
    "turn. {first} got the parcel first."
)
HELP = "Say ask NAME or shelf NUMBER."
GIVE_UP = 0.25  # probability per turn that the demonstrator guesses a shelf


class Lookups(tw.Env):
    """The reward is 1 for the right shelf; a person who never had the parcel says so."""

    single_turn_best = 1 / len(SHELVES)
    max_turns = 6

    def reset(self, task, *, seed=None):
        chain, self.shelf = task.info["chain"], task.info["shelf"]

        self.told = {}
        for giver, taker in pairwise(chain):
            self.told[giver.lower()] = f"{giver} gave it to {taker}."
        self.told[chain[-1].lower()] = f"{chain[-1]} put it on shelf {self.shelf}."
        return RULES.format(first=chain[0])

    def step(self, action):
        match command(action.text):
            case ["ask", name]:
                return tw.Step(self.told.get(name, f"That person never had it. {HELP}"))
            case ["shelf", number] if number in SHELVES:
                return tw.Step(reward=float(number == self.shelf), terminated=True)
        raise tw.InvalidAction(HELP)

    @staticmethod
    def tasks(split, n, seed):
        """Return chains of two to four people; no chain is in both splits."""

        def draw(rng):
            chain = rng.sample(NAMES, rng.choice((2, 3, 4)))
            return " ".join(chain), tw.Task(info={"chain": chain, "shelf": rng.choice(SHELVES)})

        return sample_tasks("lookups", split, n, seed, draw)

    @staticmethod
    def solver(messages, rng):
        last = messages[-1].text
        if shelf := re.search(r"put it on shelf (\d)\.$", last):
            return f"shelf {shelf[1]}"
        person = re.search(r"gave it to (\w+)\.$|(\w+) got the parcel first\.$", last)
        return f"ask {person[1] or person[2]}"

    @staticmethod
    def demonstrator(messages, rng):
        reply = Lookups.solver(messages, rng)
        gives_up = reply.startswith("ask") and rng.random() < GIVE_UP
        return f"shelf {rng.choice(SHELVES)}" if gives_up else reply
