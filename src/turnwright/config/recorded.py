"""Configurations of runs that an earlier version recorded, with the keys of today."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnwright.config.schema import EnvRules, RetryRules
from turnwright.errors import ConfigError


def with_keys_of_today(config: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return a recorded configuration with the keys of today; `place` names it in a `ConfigError`.

    Raises `ConfigError` for a setting that no key has any more.
    """
    config = dict(config)
    if "schedule" in config:
        config["schedule"] = _schedule(config["schedule"], place)
    if "rollout" in config:
        config["rollout"] = _rollout(config["rollout"])
    if "env" in config:
        config["env"] = [_with_retries(table) for table in config["env"]]
    return config


def rules_of(row: Mapping[str, Any]) -> EnvRules:
    """Return the rules that a journal recorded."""
    rules = _with_retries(row)
    retries = RetryRules(**rules.pop("retries", {}))
    return EnvRules(**rules, retries=retries)


def _with_retries(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Return rules with their table of retries, whose keys once were keys of the environment."""
    rules = dict(rules)
    retries = dict(rules.pop("retries", {}))
    for key, name in _RETRIES.items():
        if name in rules:
            retries[key] = rules.pop(name)
    # Turns and engine calls had a maximum each; that of what is retried at all stands for both.
    of_turns, of_calls = rules.pop("max_env_retries", None), rules.pop("max_engine_retries", None)
    if of_turns is not None and of_calls is not None:
        retries["episode"] = (
            of_turns if retries.get("turn") or not retries.get("engine") else of_calls
        )
    return rules | ({"retries": retries} if retries else {})


_RETRIES = {
    "turn": "max_env_retries_per_turn",
    "engine": "max_engine_retries_per_turn",
    "reward": "max_reward_retries",
    "wait_s": "retry_wait_s",
}


def _schedule(section: Mapping[str, Any], place: str) -> dict[str, Any]:
    section = dict(section)
    selection = section.pop("selection", "complete")
    if selection != "complete":
        why = "is no setting any more, since only comparisons used it; start a new run"
        raise ConfigError(f'{place}: schedule.selection = "{selection}": {why}')
    return section


def _rollout(section: Mapping[str, Any]) -> dict[str, Any]:
    section = dict(section)
    if section.pop("sanity_every", "episode") == "turn":
        section["sanity_share"] = "turns"
    return section
