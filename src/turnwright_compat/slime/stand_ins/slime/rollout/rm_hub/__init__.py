"""Rewards of slime by name."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Sequence
from typing import Any

from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward, get_gemma_math_reward
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward
from slime.rollout.rm_hub.ifbench import compute_ifbench_reward
from slime.rollout.rm_hub.math_dapo_utils import compute_score
from slime.rollout.rm_hub.math_utils import extract_answer, grade_answer_verl
from slime.utils.http_utils import post
from slime.utils.misc import load_function

RULES = {
    "deepscaler": lambda response, label, metadata: get_deepscaler_rule_based_reward(response, label),
    "gemma_math": lambda response, label, metadata: get_gemma_math_reward(response, label),
    "dapo": lambda response, label, metadata: compute_score(response, label),
    "math": lambda response, label, metadata: int(grade_answer_verl(response, label)),
    "f1": lambda response, label, metadata: f1_score(response, label)[0],
    "gpqa": compute_gpqa_reward,
    "ifbench": compute_ifbench_reward,
    "random": lambda response, label, metadata: random.randint(0, 1),
}
REMOTE = "remote_rm"
BY_CONTENT = "deterministic_random"
BOXED = "boxed_"
"""Prefix of a rule that reads what is in the last box."""


async def async_rm(args: Any, sample: Any, **options: Any) -> Any:
    """Return the reward of a sample: of `custom_rm_path` of the sample, else of `args`, else of the rule in the sample's
    metadata or in `args.rm_type`.

    Raises:
        NotImplementedError: for no rule, or one that is not here.
    """
    custom = sample.custom_rm_path or args.custom_rm_path
    if custom:
        return await load_function(custom)(args, sample, **options)

    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    named = str(metadata.get("rm_type") or args.rm_type or "").strip()
    kind, response = named.removeprefix(BOXED), sample.response
    if named.startswith(BOXED):
        response = extract_answer(response) or ""

    if kind == REMOTE:
        return await post(args.rm_url, {"prompt": sample.prompt, "response": sample.response, "label": sample.label})
    if kind == BY_CONTENT:
        return hashlib.sha256(f"{sample.tokens}{response}".encode()).digest()[0] % 2
    rule = RULES.get(kind)
    if rule is None:
        raise NotImplementedError(f"rm_type {named!r}; there are {', '.join(RULES)}, each also with {BOXED}, and {REMOTE}")
    # A grader may take seconds for a hard expression, and other episodes go on meanwhile.
    return await asyncio.to_thread(rule, response, sample.label, metadata)


async def batched_async_rm(args: Any, samples: Sequence[Any], **options: Any) -> Any:
    """Return the rewards of several samples, which a custom reward gets at once."""
    if args.custom_rm_path:
        return await load_function(args.custom_rm_path)(args, samples, **options)
    return await asyncio.gather(*(async_rm(args, sample, **options) for sample in samples))


__all__ = ["async_rm", "batched_async_rm", "extract_answer", "grade_answer_verl"]
