"""An OpenEnv server of the official package: guess a number.

`/small` takes one session at a time; `/open` counts them.
"""

import os
import sys
import time

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import field_validator

OPEN = {"now": 0, "ever": 0}
FAILED = set()


class Guess(Action):
    guess: int

    @field_validator("guess")
    @classmethod
    def small(cls, value):
        if value > 999:
            raise ValueError("too large")
        return value


class Heard(Observation):
    said: str
    low: int = 1


class Secret(Environment):
    """The number is a function of the seed. What goes wrong, and when, is told to `reset`."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        OPEN["now"] += 1
        OPEN["ever"] += 1
        self.steps = 0

    def reset(self, seed=None, episode_id=None, **trouble):
        self.secret, self.trouble, self.steps = seed % 100, trouble, 0
        if trouble.get("over"):
            return Heard(said="Over.", done=True)
        return Heard(said="Guess.")

    def step(self, action, timeout_s=None, **kwargs):
        self.steps += 1
        trouble = self.trouble
        if self.steps == trouble.get("fail_at") and trouble["key"] not in FAILED:
            FAILED.add(trouble["key"])
            raise RuntimeError("the disk is full")
        if trouble.get("refuse"):
            raise ValueError("not that one")
        if trouble.get("hang"):
            time.sleep(trouble["hang"])
        done = action.guess == self.secret
        said = "Yes." if done else "Higher." if action.guess < self.secret else "Lower."
        given = {
            "every": float(done) - 0.1,
            "last": 1.0 if done else None,
            "never": None,
            "nan": float("nan"),
        }
        return Heard(said=said, done=done, reward=given[trouble.get("reward", "last")])

    @property
    def state(self):
        return State(step_count=self.steps)

    def close(self):
        OPEN["now"] -= 1


app = create_fastapi_app(Secret, Guess, Heard, max_concurrent_envs=64)
app.mount("/small", create_fastapi_app(Secret, Guess, Heard, max_concurrent_envs=1))


@app.get("/open")
def opened():
    return OPEN | {"pid": os.getpid()}


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="critical")
