"""Answers compared by math-verify, as ms-swift's `accuracy`, TRL's `accuracy_reward` and verl's
`math_verify` do.

`by_swift`, `by_trl` and `by_verl` each read the answer as that framework does; `_verdict` bounds
the comparison.

The library limits its time by a signal, which works in the main thread alone; here it runs in a
helper process with bounds (`turnwright.envs.isolation.bounded`), and what exceeds them is wrong.
"""

from __future__ import annotations

import re
from typing import Any

from turnwright.envs.isolation.bounded import BoundExceeded, CallFailed, call_bounded
from turnwright.errors import EnvError

_UNLIMITED: dict[str, Any] = {"parsing_timeout": None}


def by_swift(reply: str, solution: str) -> float:
    """Return ms-swift's verdict on a reply: 1.0 or 0.0, also 0.0 for a solution that cannot be
    read."""
    return float(_verdict(_by_swift, reply, solution) or 0.0)


def by_trl(reply: str, solution: str) -> float | None:
    """Return TRL's verdict on a reply: 1.0, 0.0, or None for a solution that cannot be read."""
    return _verdict(_by_trl, reply, solution)


def by_verl(reply: str, truth: str, on_limit: float = 0.0) -> float:
    """Return verl's verdict on a reply: 1.0 or 0.0, and `on_limit` where the comparison does not
    end."""
    return float(_verdict(_by_verl, reply, truth, on_limit=on_limit) or 0.0)


def _verdict(grader: Any, reply: str, truth: str, *, on_limit: float = 0.0) -> float | None:
    try:
        verdict: float | None = call_bounded(grader, reply, truth)
    except BoundExceeded:
        return on_limit
    except CallFailed as error:
        if "ModuleNotFoundError" in str(error):
            raise EnvError(
                f"this grader needs math-verify ({error}); pip install 'turnwright[math]'"
            ) from error
        return 0.0
    return verdict


def _by_swift(reply: str, solution: str) -> float:
    from math_verify import parse, verify

    settings: dict[str, Any] = {"extraction_mode": "first_match", **_UNLIMITED}
    gold = parse(_tagged(solution) or solution, **settings)
    if not gold:
        return 0.0

    tagged_answer = _tagged(reply)
    if tagged_answer is not None:
        answer = parse(tagged_answer, **settings)
    else:
        boxed_first = _boxed_first(
            nits=False, malformed_operators=False, basic_latex=True, boxed=True, units=True
        )
        answer = parse(reply, extraction_config=[boxed_first], **settings)
    return float(verify(gold, answer, timeout_seconds=None))


def _by_trl(reply: str, solution: str) -> float | None:
    from math_verify import parse, verify

    gold = parse(solution, **_UNLIMITED)
    if not gold:
        return None

    config = [_boxed_first(units=True)]
    answer = parse(reply, extraction_config=config, extraction_mode="first_match", **_UNLIMITED)
    return float(verify(gold, answer, timeout_seconds=None))


def _by_verl(reply: str, truth: str) -> float:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    gold = parse(f"\\boxed{{{truth}}}", (LatexExtractionConfig(),), **_UNLIMITED)
    answers = parse(reply, (ExprExtractionConfig(), LatexExtractionConfig()), **_UNLIMITED)
    is_right = any(
        verify(right_answer, answer, timeout_seconds=None)
        for answer in answers
        for right_answer in gold
    )
    return float(is_right)


def _boxed_first(**settings: Any) -> Any:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig

    return LatexExtractionConfig(
        normalization_config=NormalizationConfig(**settings),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )


def _tagged(text: str) -> str | None:
    """Return what is between the first `<answer>` tags; None without them."""
    match = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return match[1].strip() if match else None
