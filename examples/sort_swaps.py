"""Sort four numbers by swapping two places at a time."""

import random

import turnwright as tw

PLACES = "abcd"


class SortSwaps(tw.Env):
    """The reward is 1 when the numbers are in order after at most four swaps."""

    single_turn_best = 0.25
    max_turns = 4

    def reset(self, task, *, seed=None):
        self.row = list(task.info["row"])
        return self.show()

    def step(self, action):
        words = action.text.split()
        if len(words) != 3 or words[0] != "swap" or not {words[1], words[2]} <= set(PLACES):
            raise tw.InvalidAction(f"say swap PLACE PLACE\n{self.show()}")
        one, other = (PLACES.index(word) for word in words[1:])
        self.row[one], self.row[other] = self.row[other], self.row[one]
        done = self.row == sorted(self.row)
        return tw.Step(self.show(), reward=float(done), terminated=done)

    def show(self):
        return "row " + " ".join(
            f"{place} {number}" for place, number in zip(PLACES, self.row, strict=True)
        )

    @staticmethod
    def tasks(split, n, seed):
        rng = random.Random(f"{split} {seed}")
        tasks = {}
        for _ in range(20 * n):
            row = rng.sample(range(1, 8), 4)
            if row != sorted(row) and (sum(row[::2]) % 5 == 0) == (split == "eval"):
                task = tw.Task(info={"row": row})
                tasks[task.id] = task
        return list(tasks.values())[:n]

    @staticmethod
    def solver(messages, rng):
        row = [int(word) for word in messages[-1].text.split()[-7::2]]
        wrong = next(place for place in range(4) if row[place] != sorted(row)[place])
        return f"swap {PLACES[wrong]} {PLACES[row.index(sorted(row)[wrong])]}"

    @staticmethod
    def demonstrator(messages, rng):
        return (
            SortSwaps.solver(messages, rng)
            if rng.random() < 0.6
            else "swap " + " ".join(rng.sample(PLACES, 2))
        )
