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


def _answer(text: str) -> str:
    found = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found.group(1).strip() if found else text


class MathAccuracy(ORM):
    """1 if the answer, between `<answer>` tags or boxed, equals that of `solution`; 0 for a solution that cannot be read."""

    def __call__(self, completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:
        from math_verify import LatexExtractionConfig, parse, verify

        boxed = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]
        read: dict[str, Any] = {"extraction_mode": "first_match", "parsing_timeout": None}
        rewards = []
        for content, expected in zip(completions, solution, strict=True):
            gold, answer = parse(_answer(expected), **read), _answer(content)
            found = parse(answer, **read) if "<answer>" in content else parse(answer, extraction_config=boxed, **read)
            try:
                rewards.append(float(verify(gold, found, timeout_seconds=None)) if gold else 0.0)
            except Exception:  # the comparison may raise anything
                rewards.append(0.0)
        return rewards


class Format(ORM):
    """1 for a completion of the form `<think>...</think><answer>...</answer>`."""

    form = re.compile(r"^<think>.*?</think>\s*<answer>.*?</answer>(?![\s\S])", re.DOTALL | re.MULTILINE)

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [float(bool(self.form.match(content))) for content in completions]


class ReActFormat(Format):
    """1 for a completion with `Action:` and `Action Input:` after its thoughts."""

    form = re.compile(r"^<think>.*?</think>\s*Action:.*?Action Input:.*?$", re.DOTALL | re.MULTILINE)


orms: dict[str, Any] = {"accuracy": MathAccuracy, "format": Format, "react_format": ReActFormat}
