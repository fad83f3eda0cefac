"""Two agents read the same prompts; each is rewarded for a digit of its own, so no single
policy can satisfy both."""

import asyncio

from turnwright import Model, Scores, Task

DIGITS = {"left": "3", "right": "7"}


def tasks(split: str, n: int, seed: int) -> list[Task]:
    """Return 200 tasks of training, or 200 held-out ones."""
    first = 200 if split == "eval" else 0
    return [Task(f"Round {first + number}. Your digit?") for number in range(200)]


async def play(task: Task, model: Model) -> Scores:
    """Ask both agents; the episode's reward is the share of them that said their digit."""
    replies = await asyncio.gather(
        *(model.generate(task.messages, agent=agent) for agent in DIGITS)
    )
    hits = {
        agent: float(reply.text.strip() == DIGITS[agent])
        for agent, reply in zip(DIGITS, replies, strict=True)
    }
    return Scores(sum(hits.values()) / len(hits), agents=hits)
