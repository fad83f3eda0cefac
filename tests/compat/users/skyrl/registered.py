"""A file that registers its environments, with arguments."""

from typing import Any

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.registration import register


class EchoEnv(BaseTextEnv):
    def __init__(self, env_config: Any = None, extras: dict[str, Any] = {}, bonus: float = 0.0):  # noqa: B006
        super().__init__()
        self.word, self.bonus = extras["word"], bonus

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = float(self.word in action) + self.bonus
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


register(id="turnwright_echo", entry_point=EchoEnv)
register(id="turnwright_echo_bonus", entry_point=EchoEnv, kwargs={"bonus": 0.5})
made = skyrl_gym.make("turnwright_echo_bonus", env_config=None, extras={"word": "x"})
assert made.bonus == 0.5
assert skyrl_gym.spec("turnwright_echo").entry_point is EchoEnv
