"""From what a recipe or a person says of history to a mode or a policy."""

from __future__ import annotations

from typing import Any

from turnwise.config.schema import HISTORY_MODES, HISTORY_OBJECT, history_error
from turnwise.env.resolve import load_object
from turnwise.errors import ConfigError, UsageError
from turnwise.render.history import POLICIES, History


def parse_history(said: Any) -> History:
    """The mode or policy that is meant: a mode by its name, `name:N` for one that is shipped, `file.py:policy`, or an object.

    Raises:
        ConfigError: for a name that is not known, a number that does not fit, or a file without such a policy.
        UsageError: for an object that is no policy.
    """
    if not isinstance(said, str):
        if not callable(said):
            raise UsageError(f"history is a mode, a policy's name or a function of (conversation, replies), not {said!r:.60}")
        policy: History = said
        return policy
    if wrong := history_error(said):
        raise ConfigError(f"rollout.history = {said!r}: {wrong}")
    if said in HISTORY_MODES:
        return said
    if said.startswith(HISTORY_OBJECT):
        raise ConfigError(
            f"the run was begun with the history policy {said.removeprefix(HISTORY_OBJECT)!r} as an object: go on with the "
            "same call of turnwise.train() and resume=True"
        )
    if ".py" in said:
        found = load_object(said)
        if not callable(found):
            raise ConfigError(f"{said} is {type(found).__name__}; a history policy is a function of (conversation, replies)")
        loaded: History = found
        return loaded
    name, _, number = said.partition(":")
    return POLICIES[name](int(number))
