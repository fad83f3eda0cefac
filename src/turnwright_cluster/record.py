"""What a worker sends of a group: each event is checked, written to the journal, and only then a part of its episodes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

from turnwright.errors import TraceError
from turnwright.records.run_dir import EventLog, definition_name
from turnwright.records.serialization import Event, apply_event, key_row, read_span
from turnwright.types import ROUTES, EpisodeKey, Span, Trajectory
from turnwright_cluster.base import GroupSpec, WorkerLied

Sampled = list[tuple[int, float | None, int, str]]
"""Id, logprob, policy version and agent of each id of a reply."""
_DEFINITIONS = ("settings", "tools")
_EPISODE = ("opened", "turn", "step", "failed_attempt", "closed")


def sampled_of(spans: list[Span]) -> Sampled:
    """Return the sampled ids among spans."""
    return [
        (id, logprob, span.version if span.version is not None else -1, span.agent)
        for span in spans
        if span.logprobs is not None
        for id, logprob in zip(span.ids, span.logprobs, strict=True)
    ]


class GroupRecord:
    """Episodes of one group as one worker plays them.

    Raises `WorkerLied` for an event that cannot be one of the group, and `TraceError` when the journal cannot be written.
    """

    def __init__(self, spec: GroupSpec, journal: EventLog, fingerprint: str, is_fixed: Callable[[str], bool]) -> None:
        """`fingerprint` is that of the run's renderer; `is_fixed` returns whether the policy of an agent is never trained, so
        that versions do not apply to it."""
        self._spec, self._journal, self._fingerprint, self._is_fixed = spec, journal, fingerprint, is_fixed
        self._running: dict[EpisodeKey, Trajectory] = {}
        self.finished: dict[EpisodeKey, Trajectory] = {}
        """Closed episodes."""
        self.events: dict[EpisodeKey, list[Event]] = {}
        """Events of the episodes that were opened, without the first."""
        self.definitions: dict[str, Any] = {}
        """Values that they refer to, by name."""
        self.count = 0
        """Number of events."""
        self.resumed_turns = 0
        self.tools = 0
        """Maximum number of tools offered in a turn."""
        # A new attempt repeats none of the record's turns; what it claims to repeat must be in it.
        self._recorded = {
            key: [sampled_of(spans_of(event)) for play in plays for event in play if event["e"] == "turn"]
            for key, plays in spec.plays.items()
        }

    def add(self, event: Event) -> None:
        """Take an event."""
        self.count += 1
        if not isinstance(event, dict) or event.get("e") not in (*_DEFINITIONS, *_EPISODE):
            raise WorkerLied(f"sent {event!r:.80}, which is no event of an episode")
        if event["e"] in _DEFINITIONS:
            self._define(event)
            return
        try:
            key = EpisodeKey(*event["k"])
        except (KeyError, TypeError):
            raise WorkerLied("sent an event that names no episode") from None
        if key not in self._spec.keys:
            raise WorkerLied(f"sent an event of {_name(key)}, which it was not asked for")
        try:
            self._apply(key, event)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, TraceError, zlib.error) as error:
            raise WorkerLied(f"sent an event of {_name(key)} that does not fit those before it ({error!r:.200})") from error
        self._journal.append({name: value for name, value in event.items() if name != "crc"})
        if event["e"] == "closed":
            self.finished[key] = self._running.pop(key)

    def void(self) -> None:
        """Write that nothing of it counts."""
        for key in self.events:
            self._journal.append({"e": "voided", "k": key_row(key)})
        self.finished.clear()
        self.events.clear()

    def _define(self, event: Mapping[str, Any]) -> None:
        kind, name, value = event["e"], event.get("name"), event.get("value")
        if definition_name(kind, value) != name:
            raise WorkerLied(f"sent {kind} under the name of others")
        self._journal.append_definition(kind, value)
        if kind == "tools":
            self.definitions[str(name)] = value

    def _apply(self, key: EpisodeKey, event: Event) -> None:
        kind = event["e"]
        if kind == "opened":
            if key in self.events:
                raise ValueError("it was opened before")
            if event["template"] != self._fingerprint:
                raise ValueError("its template, tokenizer or settings differ from those of the run")
            self._running[key] = Trajectory(self._spec.task, key, template=event["template"])
            self.events[key] = []
            return
        trajectory = self._running[key]
        if kind == "turn" and "routes" in event["turn"] and ROUTES not in self._spec.extras:
            raise ValueError("it has expert routes, which were not asked for")
        if kind != "step":
            self._check_sampled(key, event)
            apply_event(trajectory, event)
        if event.get("tools"):
            self.tools = max(self.tools, len(self.definitions[event["tools"]]))
        if kind == "turn":
            self.resumed_turns += "resumed" in event
        self.events[key].append(event)

    def _check_sampled(self, key: EpisodeKey, event: Event) -> None:
        """Check the policy of sampled ids, and that turns of an earlier play are recorded ones."""
        sampled = sampled_of(spans_of(event))
        old = {agent for _, _, version, agent in sampled if version < self._spec.min_version and "resumed" not in event}
        if not all(map(self._is_fixed, old)):
            raise ValueError(f"it has ids of a policy older than {self._spec.min_version}")
        if "resumed" in event and event["e"] == "turn" and sampled not in self._recorded.get(key, ()):
            raise ValueError("it repeats a turn that no record has")


def spans_of(event: Event) -> list[Span]:
    """Return the spans of an event."""
    return [read_span(row) for row in event.get("spans", ())]


def _name(key: EpisodeKey) -> str:
    return f"{key.phase}/{key.step}/{key.task}/{key.sample}"[:120]
