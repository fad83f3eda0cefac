"""Two records of one episode held against each other, but for the clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from turnwise.records.run_dir import to_json
from turnwise.records.serialization import message_row, outcome_row, span_row
from turnwise.types import EpisodeKey, Failure, Message, Trajectory, Turn

LONGEST = 160
"""Characters of a value that are shown."""
_SEPARATE = ("wall_s", "reward_s", "error")
_TURN = ("agent", "finish", "reward", "retries", "inserted", "kept", "parent", "prompt", "context", "spans")


@dataclass(frozen=True, slots=True)
class EpisodeDifference:
    """Where an episode that was played again is not what was recorded."""

    key: EpisodeKey
    what: str
    """`prompt`, `reply`, `reward`, `stop`, ..."""
    where: str
    recorded: str
    now: str
    turn: int = -1
    """From 0; -1 where it is of no turn."""
    position: int = -1
    """Of a prompt: the first id that differs."""
    recorded_ids: tuple[int, ...] = ()
    """Of a prompt: the ids from that position on, a few."""
    now_ids: tuple[int, ...] = ()
    origin: str = ""
    """Of a prompt: who wrote the recorded id there."""


def compare_episodes(recorded: Trajectory, now: Trajectory, *, template: bool = True) -> list[EpisodeDifference]:
    """What differs between an episode and the same episode played again; nothing where they are equal.

    Seconds, tracebacks and what was in caches are left out.

    Args:
        template: whether the chat template has to be the same.
    """
    found: list[EpisodeDifference] = []
    for what, turn, old, new in _pairs(recorded, now):
        if old != new:
            where = f"turn {turn + 1}" if turn >= 0 else ""
            found.append(EpisodeDifference(recorded.key, what, where, shown(old), shown(new), turn))
    if template and recorded.template != now.template:
        found.append(EpisodeDifference(recorded.key, "template", "", recorded.template, now.template))
    return found


def _pairs(recorded: Trajectory, now: Trajectory) -> Iterator[tuple[str, int, Any, Any]]:
    """(what, turn, recorded, now), in the order in which a person asks."""
    yield "error", -1, plain(_failure(recorded.error)), plain(_failure(now.error))
    for number, (old, new) in enumerate(zip(recorded.turns, now.turns, strict=False)):
        yield from ((what, number, a, b) for what, a, b in _turns(old, new))
    yield "turns", -1, len(recorded.turns), len(now.turns)
    old_end, new_end = _end(recorded), _end(now)
    for what in ("stop", "reward", "rewards", "final"):
        yield what, -1, old_end.pop(what), new_end.pop(what)
    for number, (before, after) in enumerate(zip(recorded.spans, now.spans, strict=False)):
        after_row = plain(span_row(after))
        if before.sampling is None:  # a record of an earlier version
            after_row.pop("sampling", None)
        yield f"span {number}", -1, plain(span_row(before)), after_row
    yield "spans", -1, len(recorded.spans), len(now.spans)
    for old, new in zip(recorded.failed_turns, now.failed_turns, strict=False):
        yield from ((f"failed attempt, {what}", -1, a, b) for what, a, b in _turns(old, new))
    yield "turns of failed attempts", -1, len(recorded.failed_turns), len(now.failed_turns)
    old_metrics, new_metrics = old_end.pop("metrics"), new_end.pop("metrics")
    for name in sorted({*old_metrics, *new_metrics}):
        yield f"metric {name}", -1, old_metrics.get(name), new_metrics.get(name)
    for what in ("branches", "failures"):
        yield what, -1, old_end.pop(what), new_end.pop(what)
    yield "weights", -1, _weights(recorded), _weights(now)


def _turns(old: Turn, new: Turn) -> Iterator[tuple[str, Any, Any]]:
    yield "messages", _messages(old.messages), _messages(new.messages)
    yield "reply", _messages([old.reply]), _messages([new.reply])
    yield "message", _messages([old.message]), _messages([new.message])
    for name in _TURN:
        yield name, plain(getattr(old, name)), plain(getattr(new, name))
    yield "info", _info(old.info), _info(new.info)
    yield "routes", old.extras, new.extras


def _messages(messages: Sequence[Message]) -> Any:
    return plain([message_row(message) for message in messages])


def _end(trajectory: Trajectory) -> dict[str, Any]:
    row = {"failures": []} | outcome_row(trajectory)
    row["failures"] = [_failure(failure) for failure in trajectory.failures]
    named: dict[str, Any] = plain({name: value for name, value in row.items() if name not in _SEPARATE})
    return named


def _failure(failure: Failure | None) -> Any:
    if failure is None:
        return None
    return [failure.type, failure.message, failure.phase, failure.kind, failure.turn, failure.recovery]


def _info(info: Mapping[str, Any]) -> Any:
    """A turn's info without the seconds of its calls."""
    row = plain(dict(info))
    log = row.get("tool_log")
    for call in log if isinstance(log, list) else []:
        if isinstance(call, dict):
            call.pop("s", None)
    return row


def _weights(trajectory: Trajectory) -> list[list[float]]:
    return [sample.weights for sample in trajectory.samples()]


def plain(value: Any) -> Any:
    """A value as a journal gives it back."""
    return orjson.loads(to_json(value))


def shown(value: Any) -> str:
    """A value for a table."""
    text = value if isinstance(value, str) else to_json(value).decode()
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
