"""Workers in other processes, as the run sees them: leases of groups, and what each worker has and
lacks.

`RemoteWorker.play` waits for the answer of a `Lease`; `work` is what the worker's own request gets,
and `take`, `call` and `answered` are given what it reports. The requests come in at a `RunServer`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from turnwright.errors import TraceError
from turnwright.records.serialization import Event
from turnwright_cluster.base import GroupSpec, OnTurn, PlayedGroup, WorkerFailed, WorkerLost
from turnwright_cluster.codec import Contexts, read_group


@dataclass(slots=True, eq=False)
class Lease:
    """One group while one worker has it."""

    spec: GroupSpec
    on_turn: OnTurn
    row: Mapping[str, Any]
    """The group as the worker gets it."""
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    answer: asyncio.Future[PlayedGroup] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    since: float = field(default_factory=time.monotonic)
    calls: set[asyncio.Task[None]] = field(default_factory=set)
    """Calls in the engine: while there is one, the worker waits for the run."""
    active: float = field(default_factory=time.monotonic)
    """Time of its last event or engine call."""
    sessions: set[str] = field(default_factory=set)
    """Sessions that the engine may hold caches for."""
    count: int = 0
    """Number of its events."""
    contexts: Contexts = field(default_factory=Contexts)

    def begin(self, session: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start an engine call, which ends with the lease."""
        self.sessions.add(session)
        task = asyncio.create_task(work)
        self.calls.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.calls.discard(task)
        self.active = time.monotonic()

    def end(self) -> None:
        """End its engine calls."""
        for task in list(self.calls):
            task.cancel()

    def event(self, event: Event) -> None:
        """Take an event; one that does not fit, or cannot be written, ends the lease."""
        self.active = time.monotonic()
        self.count += 1
        try:
            self.on_turn(event)
        except (WorkerFailed, TraceError) as error:
            self.answer.set_exception(error)


class RemoteWorker:
    """A worker that joined.

    It plays under leases: each ends with an answer, with the worker, or with what does not fit.
    """

    def __init__(
        self,
        name: str,
        room: int,
        *,
        row: Callable[[GroupSpec], Mapping[str, Any]],
        release: Callable[[str], None],
        is_held: Callable[[], bool],
    ) -> None:
        """`room` is the number of groups that it plays at once; `row` returns a group as it is
        sent, `release` ends a session in the engine, and `is_held` returns whether calls of
        training are held."""
        self.name = name
        self.room = room
        self.id = secrets.token_urlsafe(16)
        self.leases: dict[str, Lease] = {}
        self.gone = ""
        """Why it takes no groups any more; empty while it does."""
        self.seen = time.monotonic()
        """Time of its last request."""
        self.connections = 0
        """Requests that are held while it is there."""
        self.reported = 0
        """Number of reports taken."""
        self.reporting = asyncio.Lock()
        self._answered: set[str] = set()
        self._over = False
        self._wake = asyncio.Event()
        self._row = row
        self._release = release
        self._is_held = is_held
        self._held_sent = False
        self._replies: dict[int, Mapping[str, Any]] = {}
        """Replies by the number of the call, until the worker has them."""
        self._calls: dict[int, asyncio.Task[None]] = {}

    async def play(self, spec: GroupSpec, on_turn: OnTurn) -> PlayedGroup:
        if self.gone:
            raise WorkerLost(self.gone)
        lease = Lease(spec, on_turn, self._row(spec))
        self.leases[lease.id] = lease
        self._wake.set()
        try:
            return await lease.answer
        finally:
            del self.leases[lease.id]
            lease.end()
            self._wake.set()
            for session in lease.sessions:
                self._release(session)

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Count a request that is held while it is there."""
        self.connections += 1
        try:
            yield
        finally:
            self.connections -= 1

    async def work(
        self, held: Collection[str], got: Sequence[int], seconds: float
    ) -> dict[str, Any]:
        """Return what a worker that holds some leases and got some replies lacks, after so many
        seconds at the latest.

        It lacks groups to play, replies, which of its leases ended, and whether calls of training
        are held. A lost answer is repeated by the next.
        """
        for number in got:
            self._replies.pop(number, None)
        end = time.monotonic() + seconds
        while True:
            new = [
                lease
                for lease in self.leases.values()
                if lease.id not in held and not lease.answer.done()
            ]
            ended = [
                lease_id
                for lease_id in held
                if lease_id not in self.leases and lease_id not in self._answered
            ]
            left = end - time.monotonic()

            changed = self._held_sent != self._is_held()
            if new or ended or self._replies or left <= 0 or self.gone or changed:
                self._held_sent = self._is_held()
                return {
                    "groups": [{"lease": lease.id, "spec": lease.row} for lease in new],
                    "ended": ended,
                    "replies": list(self._replies.items()),
                    "held": self._held_sent,
                    "over": self._over,
                }
            self._wake.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), left)

    def take(self, lease: Lease, event: Event) -> None:
        """Take an event of a lease; the engine may forget an episode that is closed."""
        lease.event(event)
        if not lease.answer.done() and event["e"] == "closed":
            episode = "/".join(map(str, event["k"][:4])) + "/"
            for session in list(lease.sessions):
                if session.startswith(episode):
                    lease.sessions.discard(session)
                    self._release(session)

    def wake(self) -> None:
        """Have it look for what is new."""
        self._wake.set()

    def call(
        self, number: int, lease: Lease, session: str, work: Awaitable[Mapping[str, Any]]
    ) -> None:
        """Start an engine call of a lease; the worker gets the reply under its number."""

        async def reply() -> None:
            self._replies[number] = await work
            self._wake.set()

        task = lease.begin(session, reply())
        self._calls[number] = task
        task.add_done_callback(lambda _: self._calls.pop(number, None))

    def refuse(self, number: int, why: str) -> None:
        """Reply to a call of a group that is not asked for any more."""
        self._replies[number] = {"fault": "EngineError", "message": why, "retry_after": None}
        self._wake.set()

    def cancel(self, number: int) -> None:
        """End a call that the worker does not wait for any more."""
        self._replies.pop(number, None)
        if number in self._calls:
            self._calls[number].cancel()

    def answered(self, lease: str, row: Mapping[str, Any]) -> None:
        """Take the answer of a lease."""
        held = self.leases.get(lease)
        if held is None or held.answer.done():
            return  # asked again elsewhere meanwhile
        self._answered.add(lease)
        if "fault" in row:
            fault = str(row["fault"])[:1000]
            held.answer.set_exception(WorkerFailed(f"could not play it: {fault}"))
            return

        try:
            group = read_group(row)
        except (KeyError, TypeError, ValueError):
            group = None
        if group != PlayedGroup(held.spec.group, held.count):
            why = (
                f"answered {dict(row)!r:.200} to group {held.spec.group}, of which {held.count} "
                "events arrived"
            )
            held.answer.set_exception(WorkerFailed(why))
            return
        held.answer.set_result(group)

    def fail(self, error: WorkerLost) -> None:
        """End all leases."""
        self.gone = self.gone or str(error)
        for lease in self.leases.values():
            if not lease.answer.done():
                lease.answer.set_exception(error)
        self._wake.set()

    def cut(self, lease: Lease, error: WorkerLost) -> None:
        """End one lease."""
        if not lease.answer.done():
            lease.answer.set_exception(error)

    async def close(self) -> None:
        self._over = True
        self.fail(WorkerLost("the run ended"))
