"""A reward that keeps everything it was called with."""

from swift.rewards import ORM, orms


class Keys(ORM):
    def __init__(self, args=None, **kwargs):
        super().__init__(args)
        self.seen = []

    def __call__(self, completions, **kwargs):
        self.seen.append({"completions": completions, **kwargs})
        return [0.25] * len(completions)


orms["keys"] = Keys
