"""The action is postprocessed, and a step may have no observation."""

from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class TrimEnv(BaseTextEnv):
    def __init__(self, env_config: Any = None, extras: dict[str, Any] = {}):  # noqa: B006
        super().__init__()
        self.max_turns = extras["max_turns"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        text, mark, _ = action.partition("</think>")
        done = "stop" in action
        return BaseTextEnvStepOutput(
            observations=[],
            reward=float(done),
            done=done,
            metadata={},
            postprocessed_action=text + mark,
        )
