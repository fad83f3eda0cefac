"""Several turns with a reward each, a turn limit of the run, and metrics."""

from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class GuessEnv(BaseTextEnv):
    def __init__(self, env_config: Any = None, extras: dict[str, Any] = {}):  # noqa: B006
        super().__init__()
        self.number = int(extras["reward_spec"]["ground_truth"])
        self.max_turns = int(extras["max_turns"])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        guess = int(action.strip()) if action.strip().isdigit() else None
        right = guess == self.number
        done = right or self.turns >= self.max_turns
        reward = 1.0 if right else 0.1 / self.max_turns if guess is not None else 0.0
        hint = "a number, please" if guess is None else "higher" if guess < self.number else "lower"
        observations = [] if done else [{"role": "user", "content": hint}]
        return BaseTextEnvStepOutput(
            observations=observations, reward=reward, done=done, metadata={"guess": guess}
        )

    def get_metrics(self) -> dict[str, Any]:
        return {"steps": self.turns, "solved": self.turns < self.max_turns, "note": "text"}

    @staticmethod
    def aggregate_metrics(metrics: list[dict[str, Any]]) -> dict[str, Any]:
        return {"avg_steps": sum(m["steps"] for m in metrics) / len(metrics)}
