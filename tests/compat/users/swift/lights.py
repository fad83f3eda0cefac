"""A Gym environment, registered by name."""

from swift.infer_engine.protocol import RolloutInferRequest
from swift.rewards import ORM, orms
from swift.rollout.gym_env import Env, envs
from swift.template import Messages
from swift.utils import get_logger

logger = get_logger()


class Lights(Env):
    """Lights that are switched on and off, until `goal` of them were switched on."""

    async def reset(self, config: RolloutInferRequest):
        self.left, self.step_reward = config.data_dict["goal"], self.env_config.get("step", 0.5)
        return "Switch.", {}, "You switch lights."

    async def step(self, action: Messages):
        on = action[-1]["content"] == "on"
        self.left -= on
        return (
            f"{self.left} left.",
            self.step_reward if on else -self.step_reward / 2,
            self.left == 0,
            {},
        )

    async def close(self):
        self.left = None


class Short(ORM):
    def __call__(self, completions, rollout_infos, **kwargs):
        return [
            2.0 if len(c) < 4 and infos["gym_done"] else 0.0
            for c, infos in zip(completions, rollout_infos, strict=True)
        ]


envs["lights"] = Lights
orms["short"] = Short
