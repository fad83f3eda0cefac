"""A world of two turns whose rewards are drawn, and follow from the seed alone; for runs that
must go on as they began."""

LONG = """\
import random
import turnwright as tw

class Long(tw.Env):
    def reset(self, task, *, seed=None):
        self.rng, self.left = random.Random(seed), 2
        return "Say more."

    def step(self, action):
        self.left -= 1
        return tw.Step("On.", reward=self.rng.random(), terminated=self.left == 0)

    @staticmethod
    def tasks(split, n, seed):
        return [tw.Task(f"Say {split} {number}.") for number in range(n)]
"""
"""What the file `long.py` of a test holds; a recipe names it `long.py:Long`."""
