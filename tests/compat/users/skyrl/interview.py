"""`init` writes the prompt, and one step returns several messages of different roles."""

from typing import Any

from skyrl_gym import Env
from skyrl_gym.envs.base_text_env import BaseTextEnv


class InterviewEnv(BaseTextEnv):
    def __init__(self, env_config: Any = None, extras: dict[str, Any] = {}):  # noqa: B006
        super().__init__()
        self.questions = list(extras["questions"])
        self.closed = False
        assert isinstance(self, Env)

    def init(self, prompt):
        opening, metadata = super().init(prompt)
        return [
            {"role": "system", "content": f"{len(self.questions)} questions follow."},
            *opening,
        ], {"n": 1, **metadata}

    def step(self, action: str):
        self.turns += 1
        if not self.questions:
            return {"observations": [], "reward": 1.0, "done": True, "metadata": None}
        observations = [
            {"role": "tool", "content": f"noted: {action}"},
            {"role": "user", "content": self.questions.pop(0)},
        ]
        return {
            "observations": observations,
            "reward": 0.25,
            "done": False,
            "metadata": {"seen": {1, 2}, "who": self},
        }

    def close(self):
        self.closed = True
