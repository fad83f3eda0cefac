"""Configurations of runs that an earlier version recorded, with the keys of today."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    return config


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
