"""What the engine sampled for a worker's calls: it cannot claim other ids, or those of another agent."""

from __future__ import annotations

from typing import Any

from turnwright.engines import Generation, Request
from turnwright.records.serialization import Event
from turnwright_cluster.record import Sampled, sampled_of, spans_of


class EngineLedger:
    """Replies by the seeds of their calls, until a turn is made of them."""

    def __init__(self) -> None:
        self._replies: dict[int, dict[int, Sampled]] = {}
        """By position in the reply: a call that is repeated replaces its first answer."""

    def add(self, request: Request, generation: Generation) -> None:
        """Add the answer of a call."""
        versions = [generation.version] * len(generation.ids)
        for first, version in generation.later_versions:
            versions[first:] = [version] * (len(versions) - first)
        agents = [request.agent] * len(generation.ids)
        sampled = list(zip(generation.ids, generation.logprobs, versions, agents, strict=True))
        self._replies.setdefault(request.seed, {})[request.reply_position] = sampled

    def covers(self, event: Event) -> bool:
        """Return whether the engine sampled the ids of an event; forget the reply of a turn."""
        sampled = sampled_of(spans_of(event))
        if "resumed" in event or not sampled:
            return True  # `GroupRecord` compares what an earlier play sampled with its record
        if event["e"] != "turn":
            return self._has_all(sampled)
        if self._reply(self._replies.get(event["seed"], {})) != sampled:
            return False
        del self._replies[event["seed"]]
        return True

    @staticmethod
    def _reply(parts: dict[int, Sampled]) -> Sampled:
        return [one for position in sorted(parts) for one in parts[position]]

    def _has_all(self, left: list[Any]) -> bool:
        """Return whether ids are those of replies of which no turn was made."""
        replies = [self._reply(parts) for parts in self._replies.values()]
        while left:
            complete = next((reply for reply in replies if reply and left[: len(reply)] == reply), None)
            if complete is None:
                return any(reply[: len(left)] == left for reply in replies)
            replies.remove(complete)
            left = left[len(complete) :]
        return True
