"""Comparison of two records of one episode, timings excluded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from turnwright.records.run_dir import to_json
from turnwright.records.serialization import message_row, outcome_row, span_row
from turnwright.types import EpisodeKey, Failure, Message, Trajectory, Turn

MAX_VALUE_CHARS = 160
"""Characters of a value in a difference."""
_NOT_COMPARED = ("wall_s", "reward_s", "error")
_TURN = (
    "agent",
    "finish",
    "reward",
    "retries",
    "inserted",
    "kept",
    "parent",
    "prompt",
    "context",
    "spans",
)


@dataclass(frozen=True, slots=True)
class EpisodeDifference:
    """A difference between an episode and its replay."""

    key: EpisodeKey
    what: str
    """`prompt`, `reply`, `reward`, `stop`, ..."""
    where: str
    recorded: str
    now: str
    turn: int = -1
    """From 0; -1 if the difference belongs to no turn."""
    position: int = -1
    """For a prompt: the first differing id."""
    recorded_ids: tuple[int, ...] = ()
    """For a prompt: the first few ids from that position on."""
    now_ids: tuple[int, ...] = ()
    origin: str = ""
    """For a prompt: origin of the recorded id at that position."""


def compare_episodes(
    recorded: Trajectory, now: Trajectory, *, template: bool = True
) -> list[EpisodeDifference]:
    """Return the differences between an episode and its replay, apart from timings,
    tracebacks, cache counts and what else was likely.

    With `template`, the chat templates must be equal too.
    """
    differences: list[EpisodeDifference] = []
    for what, turn, old, new in _pairs(recorded, now):
        if old != new:
            where = f"turn {turn + 1}" if turn >= 0 else ""
            differences.append(
                EpisodeDifference(recorded.key, what, where, short_text(old), short_text(new), turn)
            )
    if template and recorded.template != now.template:
        differences.append(
            EpisodeDifference(recorded.key, "template", "", recorded.template, now.template)
        )
    return differences


def _pairs(recorded: Trajectory, now: Trajectory) -> Iterator[tuple[str, int, Any, Any]]:
    """Yield (what, turn, recorded, now), most informative first."""
    yield "error", -1, as_json(_failure(recorded.error)), as_json(_failure(now.error))
    for number, (old, new) in enumerate(zip(recorded.turns, now.turns, strict=False)):
        yield from ((what, number, a, b) for what, a, b in _turns(old, new))
    yield "turns", -1, len(recorded.turns), len(now.turns)
    old_end, new_end = _outcome(recorded), _outcome(now)
    for what in ("stop", "reward", "rewards", "final"):
        yield what, -1, old_end.pop(what), new_end.pop(what)
    for number, (before, after) in enumerate(zip(recorded.spans, now.spans, strict=False)):
        after_row = as_json(span_row(after))
        if before.sampling is None:  # a record of an earlier version
            after_row.pop("sampling", None)
        before_row = as_json(span_row(before))
        before_row.pop("alternatives", None)  # a replay asks for none
        yield f"span {number}", -1, before_row, after_row
    yield "spans", -1, len(recorded.spans), len(now.spans)
    for old, new in zip(recorded.failed_turns, now.failed_turns, strict=False):
        yield from ((f"failed attempt, {what}", -1, a, b) for what, a, b in _turns(old, new))
    yield "turns of failed attempts", -1, len(recorded.failed_turns), len(now.failed_turns)
    old_metrics, new_metrics = old_end.pop("metrics"), new_end.pop("metrics")
    for name in sorted({*old_metrics, *new_metrics}):
        yield f"metric {name}", -1, old_metrics.get(name), new_metrics.get(name)
    for what in ("branches", "failures"):
        yield what, -1, old_end.pop(what), new_end.pop(what)
    yield "rewards by row", -1, recorded.row_rewards, now.row_rewards
    yield "rewards by agent", -1, recorded.agent_rewards, now.agent_rewards
    yield (
        "weights",
        -1,
        [sample.weights for sample in recorded.samples()],
        [sample.weights for sample in now.samples()],
    )


def _turns(old: Turn, new: Turn) -> Iterator[tuple[str, Any, Any]]:
    yield "messages", _messages(old.messages), _messages(new.messages)
    yield "reply", _messages([old.reply]), _messages([new.reply])
    yield "message", _messages([old.message]), _messages([new.message])
    for name in _TURN:
        yield name, as_json(getattr(old, name)), as_json(getattr(new, name))
    yield "info", _info(old.info), _info(new.info)
    yield "routes", old.extras, new.extras


def _messages(messages: Sequence[Message]) -> Any:
    return as_json([message_row(message) for message in messages])


def _outcome(trajectory: Trajectory) -> dict[str, Any]:
    row = {"failures": []} | outcome_row(trajectory)
    row["failures"] = [_failure(failure) for failure in trajectory.failures]
    fields: dict[str, Any] = as_json(
        {name: value for name, value in row.items() if name not in _NOT_COMPARED}
    )
    return fields


def _failure(failure: Failure | None) -> Any:
    if failure is None:
        return None
    return [
        failure.type,
        failure.message,
        failure.phase,
        failure.kind,
        failure.turn,
        failure.recovery,
    ]


def _info(info: Mapping[str, Any]) -> Any:
    """Return a turn's info without the seconds of its calls."""
    row = as_json(dict(info))
    log = row.get("tool_log")
    for call in log if isinstance(log, list) else []:
        if isinstance(call, dict):
            call.pop("s", None)
    return row


def as_json(value: Any) -> Any:
    """Return a value as it is read back from a journal."""
    return orjson.loads(to_json(value))


def short_text(value: Any) -> str:
    """Return a value as text, truncated for a table."""
    text = value if isinstance(value, str) else to_json(value).decode()
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}..."
