"""Rewards of ms-swift by name; of process rewards and reward models only the names."""

# mypy: disable-error-code="override"
# A reward names the columns of the rows that it reads, as ms-swift calls it.

from __future__ import annotations

import json
import math
import re
from typing import Any

from turnwright.envs.user_imports import import_for_user


class ORM:
    """Reward function; columns of the rows are keyword arguments, as lists."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        self.args = args

    def __call__(self, **kwargs: Any) -> list[float]:
        raise NotImplementedError


class AsyncORM(ORM):
    """Asynchronous reward function, for judges and other services."""

    async def __call__(self, **kwargs: Any) -> list[float]:
        raise NotImplementedError


class MathAccuracy(ORM):
    """1 if the answer, between `<answer>` tags or boxed, equals that of `solution`; 0 for a
    solution that cannot be read."""

    def __call__(self, completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:
        from turnwright_compat.graders.verified import by_swift

        return [
            by_swift(content, expected)
            for content, expected in zip(completions, solution, strict=False)
        ]


class Format(ORM):
    """1 for a completion of the form `<think>...</think><answer>...</answer>`."""

    form = re.compile(
        r"^<think>.*?</think>\s*<answer>.*?</answer>(?![\s\S])", re.DOTALL | re.MULTILINE
    )

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [float(bool(self.form.match(content))) for content in completions]


class ReActFormat(Format):
    """1 for a completion with `Action:` and `Action Input:` after its thoughts."""

    form = re.compile(
        r"^<think>.*?</think>\s*Action:.*?Action Input:.*?$", re.DOTALL | re.MULTILINE
    )


class ReactORM(ORM):
    """1 for the tool call of `solution`, in ReAct's form: the same action, and equal
    objects as its input."""

    def __call__(self, completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:
        rewards = []
        for completion, expected in zip(completions, solution, strict=True):
            if completion.endswith("Observation:"):
                completion = completion[: completion.index("Observation:")]
            for end in ("<|endoftext|>", "<|im_end|>"):
                completion = completion.replace(end, "")

            action, arguments = _call(completion.strip())
            expected_action, expected_arguments = _call(expected)
            is_equal = (
                action == expected_action
                and isinstance(expected_arguments, dict)
                and isinstance(arguments, dict)
                and arguments == expected_arguments
            )
            rewards.append(float(is_equal))
        return rewards


def _call(text: str) -> tuple[str, Any]:
    """Return the last action of a text and its input, read as JSON; no input is an empty object."""
    name, arguments = "none", "{}"
    if "Action Input:" in text:
        arguments = text.rpartition("Action Input:")[2].strip()
    if "Action:" in text:
        name = text.rpartition("Action:")[2].partition("Action Input:")[0].strip()
    try:
        return name, json.loads(arguments)
    except ValueError:
        return name, None


class CosineReward(ORM):
    """Half a cosine over the length: a right answer is worth less the longer it
    is, a wrong one more."""

    def __init__(self, args: Any = None, accuracy_orm: Any = None, **kwargs: Any) -> None:
        super().__init__(args)
        self.right = args.cosine_min_len_value_correct, args.cosine_max_len_value_correct
        self.wrong = args.cosine_min_len_value_wrong, args.cosine_max_len_value_wrong
        self.max_len = args.cosine_max_len
        self.accuracy_orm = accuracy_orm or MathAccuracy()

    def __call__(self, completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:
        right = self.accuracy_orm(completions, solution, **kwargs)
        rewards = []
        for ids, accuracy in zip(kwargs["response_token_ids"], right, strict=True):
            short, long = self.right if accuracy >= 1 else self.wrong
            passed = (1 - math.cos(math.pi * len(ids) / self.max_len)) / 2
            rewards.append(short + (long - short) * passed)
        return rewards


class RepetitionPenalty(ORM):
    """The part of the n-grams of words that are repetitions, times the penalty."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(args)
        self.ngram_size = args.repetition_n_grams
        self.max_penalty = args.repetition_max_penalty

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        rewards = []
        for completion in completions:
            words = completion.lower().split()
            grams = list(zip(*(words[at:] for at in range(self.ngram_size)), strict=False))
            repeated = 1 - len(set(grams)) / len(grams) if grams else 0.0
            rewards.append(repeated * self.max_penalty)
        return rewards


class SoftOverlong(ORM):
    """0 up to `soft_cache_length` ids before `soft_max_length`, from there on down to
    -1 at it, and further."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(args)
        if args.soft_cache_length >= args.soft_max_length:
            raise ValueError(
                f"soft_cache_length ({args.soft_cache_length}) is under soft_max_length "
                f"({args.soft_max_length})"
            )
        self.soft_max_length = args.soft_max_length
        self.soft_cache_length = args.soft_cache_length

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        first = self.soft_max_length - self.soft_cache_length
        return [
            min((first - len(ids)) / self.soft_cache_length, 0.0)
            for ids in kwargs["response_token_ids"]
        ]


orms: dict[str, Any] = {
    "accuracy": MathAccuracy,
    "format": Format,
    "react_format": ReActFormat,
    "toolbench": ReactORM,
    "cosine": CosineReward,
    "repetition": RepetitionPenalty,
    "soft_overlong": SoftOverlong,
}


class PRM:
    """Base class of process rewards."""

    def __call__(self, **kwargs: Any) -> list[Any]:
        raise NotImplementedError


prms: dict[str, Any] = {}


class DefaultRMPlugin:
    """Base class of the plugins of reward models."""

    def __init__(self, model: Any, template: Any) -> None:
        self.model = model
        self.template = template


rm_plugins: dict[str, Any] = {"default": DefaultRMPlugin}


def __getattr__(name: str) -> Any:
    if name not in ("MultiTurnScheduler", "multi_turns"):
        raise AttributeError(f"swift.rewards has no {name!r}")
    # Not before somebody asks: it imports the rewards.
    return getattr(import_for_user("swift.rollout.multi_turn", fromlist=(name,)), name)
