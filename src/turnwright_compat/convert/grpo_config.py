"""Rules for the arguments of TRL's `GRPOConfig`, which ms-swift's flags have too."""

from __future__ import annotations

from typing import Any

from turnwright_compat.convert.engine import Draft

LOSSES = {"grpo": "trajectory", "bnpo": "token", "dapo": "token", "dr_grpo": "fixed"}
"""Loss -> the aggregation that it is."""
CORRECTIONS = {"token_truncate": "tis", "token_mask": "icepop", "sequence_mask": "sequence_mis"}


def loss_type(draft: Draft, value: Any) -> str | None:
    """Rule of the loss: an algorithm of its own, or an aggregation."""
    if value == "cispo":
        draft.put("train.algorithm", "cispo")
    elif value in LOSSES:
        draft.put("train.aggregation", LOSSES[value])
    else:
        return "no such loss here; write your own (train.algorithm)"
    return None


def sync_ref_model(draft: Draft, value: Any) -> str | None:
    """Rule of a reference that follows the policy: it can be replaced, not mixed with it."""
    if value is True and draft.number("ref_model_mixup_alpha", 0.6) != 1.0:
        return (
            "the reference is replaced (train.reference_every), not mixed: set "
            "ref_model_mixup_alpha = 1"
        )
    return None


def set_batch(
    draft: Draft, completions: float, group: float, updates: float, *, origin: str
) -> int:
    """Set the groups of a step, of `completions` in all, and its optimizer steps; return these as
    they are written."""
    whole_updates = max(1, round(updates))
    draft.put("rollout.groups", max(1, round(completions / group)), origin=origin)
    draft.put("train.minibatches", whole_updates, origin=origin)
    if completions % group:
        draft.notes.append(
            f"{completions:g} completions are no multiple of num_generations = {group:g}: "
            "rollout.groups is rounded"
        )
    return whole_updates
