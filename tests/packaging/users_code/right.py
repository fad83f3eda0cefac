"""A user's file: an environment, a rollout and a training."""

import turnwright as tw


class Guess(tw.Env):
    max_turns = 5

    def reset(self, task: tw.Task, *, seed: int | None = None) -> str:
        self.number = int(task.answer or 0)
        return "Guess."

    def step(self, action: tw.Action) -> tw.Step:
        right = action.text.strip() == str(self.number)
        return tw.Step("right" if right else "wrong", reward=float(right), terminated=right)


tasks = [tw.Task("Guess a number.", answer="7", id="a")]
trajectories = tw.rollout(Guess, tasks, engine=tw.ScriptedEngine(["7"]), limits=tw.Limits(turns=5))
print(trajectories[0].reward)
