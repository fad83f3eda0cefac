"""Five mistakes of a user, each with its number; type checkers find them all."""

import turnwright as tw


class Guess(tw.Env):
    def reset(self, task: tw.Task, *, seed: int | None = None) -> str:
        return task.word  # 1

    def step(self, action: tw.Action) -> tw.Step:
        return tw.Step("x", done=True)  # 2


print(tw.Nonsense)  # 3
tw.rollout(Guess, [tw.Task("x")], engine="http://localhost")  # 4
tw.Limits(turns="five")  # 5
