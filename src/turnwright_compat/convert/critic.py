"""Rules of critics: what slime, SkyRL and verl call their settings is in their tables, what becomes
of them is here.

A critic of those systems is a copy of some model with a head of one layer, trained in minibatches
on raw returns. Ours (`training/trainer/critic.py`) begins as a copy of the policy, normalizes
returns, and makes each update on all values of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from turnwright_compat.convert.engine import NO_EFFECT, Draft, Rule, same

NO_CRITIC = f"{NO_EFFECT}: the estimator trains no critic"
CLIP = (
    "its range is in points of reward, that of train.critic.clip in standard deviations of "
    "returns: set that one if values have to be held"
)
CONSTANT = "the rate of the critic is constant (train.critic.lr)"

_Entry = str | Rule | tuple[str, tuple[Any, ...]]
"""A recipe key, a rule, or a reason with the values that have no effect."""


def critic_rules(
    has_critic: Callable[[Draft], bool], entries: Mapping[str, _Entry]
) -> dict[str, Rule]:
    """Return rules of settings that have no effect where no critic is trained."""
    return {key: _critic_rule(has_critic, entry) for key, entry in entries.items()}


def _critic_rule(has_critic: Callable[[Draft], bool], entry: _Entry) -> Rule:
    def rule(draft: Draft, value: Any) -> str | None:
        if not has_critic(draft):
            return NO_CRITIC
        if isinstance(entry, str):
            return same(entry)(draft, value)
        if not isinstance(entry, tuple):
            return entry(draft, value)

        reason, neutral_values = entry
        return f"{NO_EFFECT} at this value ({reason})" if value in neutral_values else reason

    return rule


def as_policy(key: str, default: Any, recipe_key: str) -> Rule:
    """Return a rule of a setting that the critic shares with the policy here; `key` is the
    policy's."""

    def rule(draft: Draft, value: Any) -> str | None:
        if value == draft.settings.get(key, default):
            return f"{NO_EFFECT} at this value: the critic has the policy's"
        return f"the critic has the policy's ({recipe_key})"

    return rule


def begins_as_policy(*keys: str) -> Rule:
    """Return a rule of the weights that the critic begins with; `keys` name those of the
    policy."""

    def rule(draft: Draft, value: Any) -> str | None:
        if value is None or value in [draft.settings.get(key) for key in keys]:
            return f"{NO_EFFECT} at this value: the critic begins as a copy of the policy"
        return "the critic begins as a copy of the policy; other weights are not loaded"

    return rule


def set_critic(
    draft: Draft, *, updates: int, parts: int, origin: str, decays: bool = False
) -> None:
    """Set the critic's updates, and note in what it differs there.

    Args:
        updates: optimizer steps of the critic in a step.
        parts: minibatches into which they divide the step's values.
        origin: settings that gave the updates.
        decays: whether the critic's rate follows the schedule of the policy there.
    """
    draft.put("train.critic.updates", updates, origin=origin)
    if parts > 1:
        draft.notes.append(
            f"an update of the critic is on 1/{parts} of a step's values there, and on all of them "
            f"here: train.critic.updates = {updates} is the number of its updates there"
        )
    draft.notes.append(
        "the critic's head is two layers with a rate of their own (train.critic.head_lr), on "
        "normalized returns; there it is one layer with the rate of the body"
    )
    if decays and draft.values.get("train.schedule", "linear") != "constant":
        draft.notes.append("the critic's rate decays as the policy's there; here it is constant")


def set_critic_warmup(draft: Draft, steps: int, origin: str) -> None:
    """Set the first steps, in which the critic alone is trained, unless those are all."""
    if steps <= 0:
        return

    all_steps = draft.values.get("train.steps")
    if isinstance(all_steps, int) and steps >= all_steps:
        draft.reasons[origin] = (
            f"the critic alone would be trained in all of the {all_steps} steps, which no recipe "
            "does"
        )
        return
    draft.put("train.critic.warmup_steps", steps, origin=origin)


def note_clip(draft: Draft, key: str, default: float) -> None:
    """Say that values are clipped there by default, where no setting does."""
    if key not in draft.settings:
        draft.notes.append(f"{key} is {default:g} there by default, and is left out: {CLIP}")
