"""What a worker sends of a group: each event is applied, written to the journal, and only then a
part of its episodes."""

from __future__ import annotations

import zlib
from typing import Any

from turnwright.errors import TraceError
from turnwright.records.run_dir import EventLog
from turnwright.records.serialization import Event, apply_event
from turnwright.types import EpisodeKey, Trajectory
from turnwright_cluster.base import GroupSpec, WorkerFailed

_DEFINITIONS = ("settings", "tools")
_EPISODE = ("opened", "turn", "step", "failed_attempt", "closed")


class GroupRecord:
    """Episodes of one group as one worker plays them.

    Raises `WorkerFailed` for an event that does not fit those before it, and `TraceError` when the
    journal cannot be written.
    """

    def __init__(self, spec: GroupSpec, journal: EventLog) -> None:
        self._spec = spec
        self._journal = journal
        self._running: dict[EpisodeKey, Trajectory] = {}
        self.finished: dict[EpisodeKey, Trajectory] = {}
        """Closed episodes."""
        self.events: dict[EpisodeKey, list[Event]] = {}
        """Events of the episodes that were opened, without the first."""
        self.definitions: dict[str, Any] = {}
        """Values that they refer to, by name."""
        self.resumed_turns = 0
        self.tools = 0
        """Maximum number of tools offered in a turn."""

    def add(self, event: Event) -> None:
        """Take an event."""
        if event.get("e") in _DEFINITIONS:
            self._define(event)
            return

        try:
            key = EpisodeKey(*event["k"])
            self._apply(key, event)
        except (
            AttributeError,
            IndexError,
            KeyError,
            TypeError,
            ValueError,
            TraceError,
            zlib.error,
        ) as error:
            raise WorkerFailed(
                f"sent an event that does not fit those before it ({error!r:.200}): {event!r:.120}"
            ) from error

        self._journal.append({name: value for name, value in event.items() if name != "crc"})
        if event["e"] == "closed":
            self.finished[key] = self._running.pop(key)

    def _define(self, event: Event) -> None:
        kind = event["e"]
        value = event.get("value")
        name = self._journal.append_definition(kind, value)
        if kind == "tools":
            self.definitions[name] = value

    def _apply(self, key: EpisodeKey, event: Event) -> None:
        kind = event["e"]
        if kind not in _EPISODE:
            raise ValueError(f"there is no event {kind!r:.40}")
        if key not in self._spec.keys:
            raise ValueError("its episode was not asked for")

        if kind == "opened":
            if key in self.events:
                raise ValueError("its episode was opened before")
            self._running[key] = Trajectory(self._spec.task, key, template=event["template"])
            self.events[key] = []
            return

        trajectory = self._running[key]
        if kind != "step":
            apply_event(trajectory, event)
        if event.get("tools"):
            self.tools = max(self.tools, len(self.definitions[event["tools"]]))
        if kind == "turn":
            self.resumed_turns += "resumed" in event
        self.events[key].append(event)
