"""A zero-sum game of two roles: both name a digit, the larger wins, and the first role may
add `ODDS` to its own."""

import asyncio

from turnwright import Model, Scores, Task

ODDS = 3


def tasks(split: str, n: int, seed: int) -> list[Task]:
    """Return 200 tasks of training, or 200 held-out ones."""
    first = 200 if split == "eval" else 0
    return [Task(f"Round {first + number}. Your digit?") for number in range(200)]


async def play(task: Task, model: Model) -> Scores:
    """Play a round; the episode's reward is 1 if the first role wins."""
    first, second = await asyncio.gather(
        *(model.generate(task.messages, agent=agent) for agent in ("first", "second"))
    )
    won = wins(first.text, second.text)
    return Scores(
        float(won), agents={"first": 1.0 if won else -1.0, "second": -1.0 if won else 1.0}
    )


def wins(first: str, second: str) -> bool:
    """Return whether the first role wins; what is no digit loses, and between two of those the second role wins."""  # noqa: E501
    digits = [
        int(text) if text in tuple("0123456789") else -100
        for text in (first.strip(), second.strip())
    ]
    return digits[0] + ODDS > digits[1] and digits[0] >= 0


play.agents = ("first", "second")  # type: ignore[attr-defined]
