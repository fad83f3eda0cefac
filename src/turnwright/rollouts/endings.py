"""Why an episode ends: the stop reason of an exception, and of what an agent function returns.

`Rollout` sets them, and `GroupRewards` that of a reward that failed. The others are those of
`LimitReached`, which `Budget` raises and `Recorder._limit_of` makes, and what an environment's
`Step` says (`episode._attempt`).
"""

from __future__ import annotations

from typing import Any

from turnwright.envs import Scores
from turnwright.errors import EngineError, LimitReached, UsageError
from turnwright.types import Failure, FailureKind, StopReason

_STOPS = {
    "completed": StopReason.DONE,
    "truncated": StopReason.ENV_TRUNCATED,
    "aborted": StopReason.ABORTED,
}


def stop_of_failure(
    failure: Failure, error: BaseException, phase: str, *, out_of_time: bool
) -> StopReason:
    """Return the end of an episode that an exception of a phase ended.

    `out_of_time` is whether the time of the whole episode is over, not that of one call.
    """
    if failure.kind == FailureKind.TIMEOUT:
        return StopReason.WALL_CLOCK if out_of_time else StopReason.TIMEOUT
    if issubclass(type(error), EngineError):
        return StopReason.ENGINE_ERROR
    if failure.kind == FailureKind.TOOL:
        return StopReason.TOOL_ERROR
    if failure.kind == FailureKind.REWARD or phase == "reward":
        return StopReason.REWARD_ERROR
    return StopReason.ENV_ERROR


def stop_of_result(result: Any, limit: LimitReached | None) -> StopReason:
    """Return the end of an agent function's episode: the limit that its last call met,
    else by what it returned.

    Raises:
        RuntimeError: for a status `failed`.
        UsageError: for a status that there is not.
    """
    status = result.status if isinstance(result, Scores) else "completed"
    if status == "failed":
        raise RuntimeError("the agent function returned Scores(status='failed')")
    if isinstance(status, StopReason) and not status.failed:
        return status
    if status not in _STOPS:
        raise UsageError(
            f"Scores(status={status!r:.80}): write {', '.join(map(repr, _STOPS))} or 'failed'"
        )
    if limit is not None and status != "aborted":
        return StopReason(limit.reason)
    return _STOPS[status]
