"""Two arms with names: one that pays little for sure, and one that pays much now and then.

The kind of an arm is that of its name, which is learned. RAGEN (arXiv 2504.20073) has the same
question as a game of one turn; its pay-offs were not at hand, and these are ours: 0.2 for sure, or
1 with probability 0.3, so the arm of the higher mean looks worse seven times out of ten.
"""

import random

import turnwright as tw

SAFE = ("clerk", "judge", "nurse", "tutor", "guard", "baker", "miner", "tailor")
RISKY = ("pilot", "diver", "thief", "racer", "scout", "gamer", "actor", "sailor")
SURE, CHANCE = 0.2, 0.3
PAIRS = [(safe, risky) for safe in SAFE for risky in RISKY]


class Bandit(tw.Env):
    """The reward is what the named arm pays."""

    max_turns = 1
    single_turn_best = CHANCE

    def reset(self, task, *, seed=None):
        self.task = task
        self.random = random.Random(seed)
        return " or ".join(task.info["names"])

    def step(self, action):
        name = action.text.strip()
        if name not in self.task.info["names"]:
            raise tw.InvalidAction("say one of the two names")
        paid = SURE if name in SAFE else float(self.random.random() < CHANCE)
        return tw.Step(str(paid), reward=paid, terminated=True)

    @staticmethod
    def tasks(split, n, seed):
        kept = [pair for number, pair in enumerate(PAIRS) if (number % 4 == 0) == (split == "eval")]
        rng = random.Random(f"{split}/{seed}")
        tasks = []
        for _ in range(n):
            names = list(rng.choice(kept))
            rng.shuffle(names)
            tasks.append(tw.Task(info={"names": names}))
        return tasks

    @staticmethod
    def solver(messages, rng):
        return next(name for name in messages[-1].text.split(" or ") if name in RISKY)

    @staticmethod
    def demonstrator(messages, rng):
        return rng.choice(messages[-1].text.split(" or "))
