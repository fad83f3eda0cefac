"""Outcome rewards of a batch of completions."""

from __future__ import annotations

import re
from typing import Any


class ORM:
    """Reward function; columns of the rows are keyword arguments, as lists."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        self.args = args

    def __call__(self, **kwargs: Any) -> list[float]:
        raise NotImplementedError


class AsyncORM(ORM):
    """Asynchronous reward function, for judges and other services."""

    async def __call__(self, **kwargs: Any) -> list[float]:  # type: ignore[override]
        raise NotImplementedError


class MathAccuracy(ORM):
    """1 if the answer, between `<answer>` tags or boxed, equals that of `solution`; 0 for a solution that cannot be read."""

    def __call__(self, completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:
        from turnwise.compat.graders.verified import by_swift

        return [by_swift(content, expected) for content, expected in zip(completions, solution, strict=False)]


class Format(ORM):
    """1 for a completion of the form `<think>...</think><answer>...</answer>`."""

    form = re.compile(r"^<think>.*?</think>\s*<answer>.*?</answer>(?![\s\S])", re.DOTALL | re.MULTILINE)

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [float(bool(self.form.match(content))) for content in completions]


class ReActFormat(Format):
    """1 for a completion with `Action:` and `Action Input:` after its thoughts."""

    form = re.compile(r"^<think>.*?</think>\s*Action:.*?Action Input:.*?$", re.DOTALL | re.MULTILINE)


orms: dict[str, Any] = {"accuracy": MathAccuracy, "format": Format, "react_format": ReActFormat}
