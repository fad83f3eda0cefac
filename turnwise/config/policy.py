"""Keys of `[train]` that exclude each other."""

from __future__ import annotations

from turnwise.config.schema import TrainConfig

BATCH_ADVANTAGES = ("reinforce_pp",)
"""Algorithms that compare a trajectory with the whole batch alone, so that groups may be of one."""


def uses_group_baseline(train: TrainConfig) -> bool:
    """Whether a trajectory is compared with the others of its task."""
    if train.advantage is not None:
        return train.advantage != "batch"
    return train.algorithm not in BATCH_ADVANTAGES


def conflicting_keys(train: TrainConfig) -> tuple[str, str] | None:
    """The first key whose value another one excludes, and why; None where all fit."""
    if train.correction != "none" and train.old_logprobs == "engine":
        why = 'would count twice what old_logprobs = "engine" puts into the ratio already; set old_logprobs = "trainer"'
        return "correction", why
    if train.correction_low is not None and train.correction in ("none", "tis"):
        return "correction_low", f'has no meaning with correction = "{train.correction}", which has no lower bound'
    if train.correction_high is not None and train.correction == "none":
        return "correction_high", 'has no meaning with correction = "none"'
    low, high = train.correction_low, train.correction_high
    if low is not None and high is not None and low >= high:
        return "correction_low", f"must be under train.correction_high = {high:g}"
    if train.kl_in == "reward" and train.kl_estimator not in (None, "k1"):
        return "kl_estimator", 'k1 is what is taken off a reward: k2 and k3 are always positive there; set kl_in = "loss"'
    if train.kl and train.reference == "none":
        return "reference", f"train.kl = {train.kl:g} needs a policy to stay near to; set kl = 0, or leave this key out"
    batch = train.advantage or {"reinforce_pp": "batch", "reinforce_pp_baseline": "group_batch"}.get(train.algorithm)
    if train.refill and batch in ("batch", "group_batch"):
        return (
            "refill",
            f'replaces groups without a difference of their own; advantage = "{batch}" compares with the whole batch',
        )
    if train.discount != 1.0 and train.credit != "turn":
        return "discount", 'is between turns; set credit = "turn"'
    return None
