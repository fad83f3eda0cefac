"""Sink a ship of two fields on a board of four by four."""

import random

import turnwright as tw

FIELDS = [row + column for row in "abcd" for column in "1234"]
HUNT = ("a1", "a3", "b2", "b4", "c1", "c3", "d2", "d4")
"""A ship of two covers one of these, and its other field is none of them."""


def near(field):
    """Return the fields beside a field."""
    row, column = divmod(FIELDS.index(field), 4)
    beside = ((row - 1, column), (row, column - 1), (row, column + 1), (row + 1, column))
    return [FIELDS[4 * r + c] for r, c in beside if 0 <= r < 4 and 0 <= c < 4]


class Battleship(tw.Env):
    """The reward is 1 when both fields are hit in eleven shots; each answer names the last shot
    and the first field hit."""

    single_turn_best = 0.0
    max_turns = 11

    def reset(self, task, *, seed=None):
        self.ship, self.hits = task.info["ship"], []
        return self.show(task.info["first"])

    def step(self, action):
        field = action.text.strip()
        if field not in FIELDS:
            raise tw.InvalidAction("say a field from a1 to d4")
        if field in self.ship and field not in self.hits:
            self.hits.append(field)
        done = len(self.hits) == 2
        return tw.Step(self.show(field), reward=float(done), terminated=done)

    def show(self, field):
        return f"shot {field} hit {self.hits[0] if self.hits else 'none'}"

    @staticmethod
    def tasks(split, n, seed):
        ships = [(one, other) for one in HUNT for other in near(one)]
        every = [(ship, first) for ship in ships for first in HUNT if first not in ship]
        kept = [one for number, one in enumerate(every) if (number % 5 == 0) == (split == "eval")]
        chosen = random.Random(seed).sample(kept, min(n, len(kept)))
        return [tw.Task(info={"ship": list(ship), "first": first}) for ship, first in chosen]

    @staticmethod
    def solver(messages, rng):
        last, hit = (
            messages[-1].text.split()[1::2]
            if messages[-1].text.startswith("shot")
            else ("", "none")
        )
        order = HUNT if hit == "none" else near(hit)
        return order[(order.index(last) + 1) % len(order)] if last in order else order[0]

    @staticmethod
    def demonstrator(messages, rng):
        return Battleship.solver(messages, rng) if rng.random() < 0.75 else rng.choice(FIELDS)
