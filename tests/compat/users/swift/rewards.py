"""Rewards: asynchronous, with a loop of its own, and a plain function of all columns."""

import asyncio

from swift.rewards import AsyncORM, orms
from swift.rewards.orm import ORM


class Judge(AsyncORM):
    def __init__(self, args=None, **kwargs):
        super().__init__(args)

    async def __call__(self, completions, solution, **kwargs):
        async def ask(completion, expected):
            await asyncio.sleep(0.001)
            return 0.5 if expected in completion else 0.0

        return await asyncio.gather(*map(ask, completions, solution))


class OwnLoop(ORM):
    def __call__(self, completions, nums, **kwargs):
        async def total():
            await asyncio.sleep(0)
            return [float(len(one)) for one in nums]

        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(total())
        finally:
            loop.close()


def columns(completions, **kwargs):
    wanted = {
        "messages",
        "solution",
        "nums",
        "problem",
        "rollout_infos",
        "is_truncated",
        "finish_reason",
        "request_id",
    }
    assert wanted <= set(kwargs), sorted(kwargs)
    assert all(len(kwargs[key]) == len(completions) for key in wanted)
    assert kwargs["messages"][0][-1] == {"role": "assistant", "content": completions[0]}
    assert kwargs["is_truncated"] == [False]
    assert (
        kwargs["trajectory_inputs"][kwargs["request_id"][0]][-1]["solution"]
        == kwargs["solution"][0]
    )
    return [1.0]


orms["judge"] = Judge
orms["own_loop"] = OwnLoop
