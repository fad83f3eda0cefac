"""Sink a ship of two fields on a board of four by four."""

import random

import turnwise as tw

FIELDS = [row + column for row in "abcd" for column in "1234"]


class Battleship(tw.Env):
    """The reward is 1 when both fields are hit within ten shots at twelve open fields."""

    single_turn_best = 0.0
    max_turns = 10

    def reset(self, task, *, seed=None):
        self.ship, self.shots = set(task.info["ship"]), set(task.info["water"])
        return f"water {' '.join(task.info['water'])}"

    def step(self, action):
        field = action.text.strip()
        if field not in FIELDS or field in self.shots:
            raise tw.InvalidAction("again")
        self.shots.add(field)
        done = self.ship <= self.shots
        return tw.Step("hit" if field in self.ship else "miss", reward=float(done), terminated=done)

    @staticmethod
    def tasks(split, n, seed):
        rng = random.Random(f"{split} {seed}")
        tasks = {}
        for _ in range(20 * n):
            field, right = rng.randrange(16), rng.random() < 0.5
            if (field % 4 < 3) if right else (field < 12):
                ship = [FIELDS[field], FIELDS[field + (1 if right else 4)]]
                water = sorted(rng.sample([one for one in FIELDS if one not in ship], 4))
                if (sum(map(FIELDS.index, water)) % 5 == 0) == (split == "eval"):
                    task = tw.Task(info={"ship": ship, "water": water})
                    tasks[task.id] = task
        return list(tasks.values())[:n]

    @staticmethod
    def solver(messages, rng):
        shots = [message.text.strip() for message in messages if message.role == "assistant"]
        hits = [FIELDS.index(shot) for shot, said in zip(shots, messages[2::2], strict=False) if said.text == "hit"]
        left = [field for field in FIELDS if field not in (*shots, *messages[0].text.split()[1:])]
        near = [hit + step for hit in hits for step in (-4, -1, 1, 4)]
        return rng.choice([field for field in left if FIELDS.index(field) in near] or left)

    @staticmethod
    def demonstrator(messages, rng):
        return Battleship.solver(messages, rng) if rng.random() < 0.6 else rng.choice(FIELDS)
