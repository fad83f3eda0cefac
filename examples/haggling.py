"""Buy a thing at the lowest price that its seller would take."""

import random

import turnwright as tw

THINGS = ("lamp", "chair", "vase", "clock", "bowl", "coat", "ring", "drum")


class Haggling(tw.Env):
    """The seller goes down by one for each offer that is at most two below the price, and says
    `last` at the lowest one."""

    single_turn_best = 0.0
    max_turns = 8

    def reset(self, task, *, seed=None):
        self.price, self.lowest = task.info["price"], task.info["lowest"]
        return f"{task.info['thing']} {self.price}"

    def step(self, action):
        words = action.text.split()
        if len(words) != 2 or words[0] != "offer" or not words[1].isdecimal():
            raise tw.InvalidAction("say offer PRICE")
        offer = int(words[1])
        if offer < self.price - 2:
            return tw.Step("bye", terminated=True)
        if offer >= self.lowest and (offer >= self.price or self.price == self.lowest):
            return tw.Step("sold", reward=float(offer == self.lowest), terminated=True)
        self.price = max(self.price - 1, self.lowest)
        return tw.Step(f"{'last' if self.price == self.lowest else 'no'} {self.price}")

    @staticmethod
    def tasks(split, n, seed):
        every = [
            (thing, price, down)
            for thing in THINGS
            for price in range(8, 21)
            for down in range(1, 5)
        ]
        kept = [
            one
            for one in every
            if ((THINGS.index(one[0]) + one[1] + one[2]) % 5 == 0) == (split == "eval")
        ]
        chosen = random.Random(seed).sample(kept, min(n, len(kept)))
        return [
            tw.Task(info={"thing": thing, "price": price, "lowest": price - down})
            for thing, price, down in chosen
        ]

    @staticmethod
    def solver(messages, rng):
        word, price = messages[-1].text.split()
        return f"offer {price if word == 'last' else int(price) - 1}"

    @staticmethod
    def demonstrator(messages, rng):
        price = messages[-1].text.split()[-1]
        return f"offer {int(price) - rng.choice((0, 1, 1, 2))}" if price.isdecimal() else "offer 9"
