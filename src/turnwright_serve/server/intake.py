"""What a server takes in at once: connections, bytes of bodies, and the time that reading them
takes from other requests.

`Intake.receive` and `Intake.parse` are a body's way: its bytes get room (`BodyRoom`), and what
takes long to parse gets its turn (`ParseLane`).

A request's access is decided from its head. Only then is its body read, into room that all bodies
of the server share. What takes long to parse is parsed in a thread, one body at a time, and the
event loop gets most of the time between two of them: a parser in C keeps Python's lock, so that a
thread alone would hold up everybody else as well.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

T = TypeVar("T")

MIB = 2**20
MAX_VALUES = 2**21
"""Maximum values of a body: a context of two million ids. They take 0.3 s to parse."""
MAX_KEYS = 2**18
"""Maximum keys, which take ten times the time and memory of a number. As many ids as a vocabulary
has may be keys."""
MAX_NESTED = 2**16
"""Maximum lists and objects, which take as much as keys."""
SHORT_BYTES = MIB
SHORT_VALUES = 2**13
"""Bodies within both are parsed at once, in about 2 ms."""
PAUSE_FACTOR = 2.0
"""How much longer than a parse the pause after it is."""
SHORTEST_PAUSED_S = 0.02
"""Seconds of the shortest parse that has a pause after it."""
LONGEST_PAUSE_S = 1.0
"""Seconds of the longest pause."""
LINGER_BYTES = MIB
LINGER_S = 1.0
"""How much of a refused body is read and dropped, and for how long, so that its sender gets to read
the answer."""
_TOKENS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[][{}:,]', re.DOTALL)
"""Strings, and what separates values in JSON."""
_COMMA = ord(",")
_COLON = ord(":")
_OPENS = b"[{"


class HttpError(Exception):
    """Request failure with its own HTTP status.

    Args:
        body: JSON of the response; by default an object with the message as `error`.
        headers: further headers of the response.
    """

    def __init__(
        self, status: int, message: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": message[:2000]} if body is None else body
        self.headers = headers or {}


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeLimits:
    """Bounds of one server."""

    connections: int = 1024
    """Open connections, at most half of the files that the process may open. A further one closes
    the one that has been without a request for longest; where each has one, it is refused."""
    owner_requests: int = 64
    """Requests in flight of one owner, such as a session of the proxy."""
    bodies: int = 256 * MIB
    """Bytes of all bodies that are being received or parsed. Those that do not fit wait in turn. A
    longer one, of weights, has all of it for itself."""
    owner_bodies: int = 64 * MIB
    """Bytes of those of one owner."""
    uncounted: int = 2**16
    """Bytes of a body that needs no room: a connection's buffer holds it anyway."""
    room_s: float = 30.0
    """Seconds that a body may wait for room."""
    yield_s: float = 0.5
    """Seconds that a body may take to arrive while others wait for its room."""
    head_s: float = 20.0
    """Seconds from the first byte of a request's head to its last, and from a connection to its
    first request."""
    body_s: float = 30.0
    """Seconds that a body may take to arrive, and one more for each MiB."""


class Reservation:
    """Room of one body."""

    def __init__(self, room: BodyRoom, size: int, owner: str | None) -> None:
        self._room = room
        self.size = size
        self.owner = owner
        self.since = time.monotonic()
        self.evicted = False
        """Whether it was ended for others while it arrived."""
        self._deadline: asyncio.Timeout | None = None

    def begin(self) -> None:
        """Note that the room is granted."""
        self.since = time.monotonic()

    def arrive(self, deadline: asyncio.Timeout | None) -> None:
        """Set the deadline of the body while it arrives; None when it is complete."""
        self._deadline = deadline

    def reduce(self, size: int) -> None:
        """Count so many bytes less."""
        self.size -= size

    def evict(self) -> None:
        """End the body, which arrives too slowly while others wait."""
        if self._deadline is not None:
            self.evicted = True
            self._deadline.reschedule(asyncio.get_running_loop().time())

    def shrink(self, size: int) -> None:
        """Give back what a complete body does not need."""
        self._room.give_back(self, max(0, self.size - size))

    def release(self) -> None:
        """Give back all of it; what is given back already does not count again."""
        self._room.give_back(self, self.size)
        self._room.arriving.discard(self)


class BodyRoom:
    """Room for the bodies of one server, granted in the order of the requests to owners that are
    within their share."""

    def __init__(self, limits: IntakeLimits) -> None:
        self._limits = limits
        self.free = limits.bodies
        self._held = Counter[str]()
        self._waiting = deque[tuple[Reservation, asyncio.Future[None]]]()
        self.arriving = set[Reservation]()
        """Granted ones whose body is not complete."""
        self._timer: asyncio.TimerHandle | None = None

    async def reserve(self, size: int, owner: str | None) -> Reservation:
        """Wait for room.

        Raises:
            HttpError: 503 where there is none in time.
        """
        size = min(size, self._limits.bodies if owner is None else self._limits.owner_bodies)
        reservation = Reservation(self, size, owner)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = reservation, granted
        self._waiting.append(entry)
        self._grant()

        try:
            async with asyncio.timeout(self._limits.room_s):
                await granted
        except BaseException as error:
            if entry in self._waiting:
                self._waiting.remove(entry)
                # Later ones may fit.
                self._grant()
            else:
                reservation.release()
            if isinstance(error, TimeoutError):
                raise self._full(f"there was no room for a body of {size} bytes") from None
            raise
        return reservation

    def _full(self, what: str) -> HttpError:
        bound = self._limits.bodies // MIB
        text = f"{what}; the bodies of all requests have {bound} MiB. Try again"
        return HttpError(503, text, headers={"retry-after": "1"})

    def too_slow(self) -> HttpError:
        """Return the error of a body that was ended for others."""
        return self._full(
            f"the body took over {self._limits.yield_s:g} s while others waited for room"
        )

    def give_back(self, reservation: Reservation, size: int) -> None:
        """Take back so many bytes of a reservation, and grant them to those that wait."""
        reservation.reduce(size)
        self.free += size
        if reservation.owner is not None:
            self._held[reservation.owner] -= size
            if not self._held[reservation.owner]:
                del self._held[reservation.owner]
        self._grant()

    def _within_share(self, reservation: Reservation) -> bool:
        owner = reservation.owner
        return owner is None or self._held[owner] + reservation.size <= self._limits.owner_bodies

    def _grant(self) -> None:
        for entry in list(self._waiting):
            reservation, granted = entry
            if granted.done() or not self._within_share(reservation):
                continue
            if reservation.size > self.free:
                self._watch()
                break

            self._waiting.remove(entry)
            self.free -= reservation.size
            if reservation.owner is not None:
                self._held[reservation.owner] += reservation.size
            reservation.begin()
            self.arriving.add(reservation)
            granted.set_result(None)

    def _watch(self) -> None:
        """Look again after a while for a body that arrives too slowly."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._limits.yield_s, self._evict_slowest)

    def _evict_slowest(self) -> None:
        self._timer = None
        if not any(self._within_share(reservation) for reservation, _ in self._waiting):
            return
        late = time.monotonic() - self._limits.yield_s
        slow = [
            reservation
            for reservation in self.arriving
            if reservation.since <= late and not reservation.evicted
        ]
        if slow:
            min(slow, key=lambda reservation: reservation.since).evict()
        self._watch()


class ParseLane:
    """Runs what reads long bodies in a thread: one at a time, the owners in turn, with pauses for
    the event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str | None, deque[tuple[asyncio.Future[Any], Callable[[], Any]]]] = {}
        """By owner; the first of them is the next."""
        self._busy = False

    async def run(self, owner: str | None, work: Callable[[], T]) -> T:
        """Return what `work` returns."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        entry = result, work
        self._waiting.setdefault(owner, deque()).append(entry)
        if not self._busy:
            self._start_next()

        try:
            return await result
        finally:
            # The client of one that still waits left: its body is not kept until its turn.
            queue = self._waiting.get(owner)
            if queue and entry in queue:
                queue.remove(entry)

    def _start_next(self) -> None:
        self._busy = False
        while self._waiting:
            owner = next(iter(self._waiting))
            queue = self._waiting.pop(owner)
            if not queue:
                continue
            result, work = queue.popleft()
            # The owner's next one comes after those of the others.
            self._waiting[owner] = queue

            self._busy = True
            running = asyncio.ensure_future(asyncio.to_thread(_timed, work))
            running.add_done_callback(partial(self._finish, result))
            return

    def _finish(
        self, result: asyncio.Future[Any], done: asyncio.Future[tuple[float, Any, Exception | None]]
    ) -> None:
        if done.cancelled():
            # The event loop ends.
            result.cancel()
            return

        seconds, value, error = done.result()
        if not result.done():
            if error is None:
                result.set_result(value)
            else:
                result.set_exception(error)

        pause = 0.0
        if seconds > SHORTEST_PAUSED_S:
            pause = min(PAUSE_FACTOR * seconds, LONGEST_PAUSE_S)
        asyncio.get_running_loop().call_later(pause, self._start_next)


def _timed(work: Callable[[], T]) -> tuple[float, T | None, Exception | None]:
    """Return the processor time of a call, and its value or its error."""
    began = time.thread_time()
    value = None
    error = None
    try:
        value = work()
    except Exception as raised:
        error = raised
    return time.thread_time() - began, value, error


class RawBody:
    """A body as it was received."""

    def __init__(self) -> None:
        self.raw = b""
        self.reservation: Reservation | None = None

    def hold(self, reservation: Reservation, deadline: asyncio.Timeout) -> None:
        """Take room, while the body arrives until a deadline."""
        self.reservation = reservation
        reservation.arrive(deadline)

    def complete(self, raw: bytes, room: BodyRoom) -> None:
        """Take the bytes, and give back the room that they do not need."""
        self.raw = raw
        if self.reservation is not None:
            self.reservation.arrive(None)
            self.reservation.shrink(len(raw))
            room.arriving.discard(self.reservation)

    def release(self) -> None:
        """Drop the bytes and give back their room."""
        self.raw = b""
        if self.reservation is not None:
            self.reservation.release()
            self.reservation = None


class Intake:
    """Room, lane and counts of one server."""

    def __init__(self, limits: IntakeLimits) -> None:
        self.limits = limits
        self.room = BodyRoom(limits)
        self.lane = ParseLane()
        self.requests = Counter[str | None]()
        """Requests in flight, by owner."""

    def enter(self, owner: str | None) -> None:
        """Count a request of an owner.

        Raises:
            HttpError: 429 where the owner has too many in flight.
        """
        most = self.limits.owner_requests
        if owner is not None and self.requests[owner] >= most:
            text = f"{most} requests of this session are in flight; wait for one of them"
            raise HttpError(429, text, headers={"retry-after": "1"})
        self.requests[owner] += 1

    def leave(self, owner: str | None) -> None:
        """Count a request of an owner no more."""
        self.requests[owner] -= 1
        if not self.requests[owner]:
            del self.requests[owner]

    async def receive(self, request: Request, max_bytes: int, owner: str | None) -> RawBody:
        """Receive a body, which the caller releases.

        Raises:
            HttpError: 413 for a longer one, 408 for one that does not arrive in time, 503 where
                there is no room.
        """
        declared = request.headers.get("content-length")
        size = int(declared or 0)
        if size > max_bytes:
            raise HttpError(413, f"the body has {size} bytes; at most {max_bytes} are accepted")

        room = None
        if size > self.limits.uncounted:
            room = await self.room.reserve(size, owner)
        seconds = self.limits.body_s + (size if declared else max_bytes) / MIB

        body = RawBody()
        pieces: list[bytes] = []
        received = 0
        try:
            async with asyncio.timeout(seconds) as deadline:
                if room is not None:
                    body.hold(room, deadline)
                async for piece in request.stream():
                    received += len(piece)
                    if received > max_bytes:
                        raise HttpError(413, f"the body has over {max_bytes} bytes")
                    pieces.append(piece)
                    if received > self.limits.uncounted and body.reservation is None:
                        # Its length was not declared.
                        body.hold(await self.room.reserve(max_bytes, owner), deadline)
        except BaseException as error:
            slow = body.reservation is not None and body.reservation.evicted
            body.release()
            if not isinstance(error, TimeoutError):
                raise
            if slow:
                raise self.room.too_slow() from None
            raise HttpError(
                408, f"the body did not arrive within {seconds:.0f} s; send it faster"
            ) from None

        body.complete(b"".join(pieces), self.room)
        return body

    async def parse(
        self, body: RawBody, owner: str | None, work: Callable[[bytes], T], *, bounded: bool
    ) -> T:
        """Return what `work` makes of a body, whose room is given back; in the lane, if that takes
        long.

        Args:
            bounded: whether the number of its values is bounded.

        Raises:
            HttpError: 413 for a body with too many values.
        """
        raw = body.raw

        def checked() -> T:
            if bounded:
                check_values(raw)
            return work(raw)

        try:
            if len(raw) <= SHORT_BYTES and sum(_separators(raw)) <= SHORT_VALUES:
                return work(raw)
            return await self.lane.run(owner, checked)
        finally:
            body.release()


def _separators(raw: bytes) -> tuple[int, int, int]:
    """Return the commas, the colons, and the brackets and braces of a text, those in strings
    included."""
    return raw.count(b","), raw.count(b":"), raw.count(b"[") + raw.count(b"{")


def check_values(raw: bytes) -> None:
    """Raise `HttpError` for JSON with so many values that it would take seconds and gigabytes to
    parse."""
    values, keys, nested = _separators(raw)
    if values <= MAX_VALUES and keys <= MAX_KEYS and nested <= MAX_NESTED:
        return

    # Many of them may be in strings, where they cost nothing.
    values = keys = nested = 0
    for token in _TOKENS.finditer(raw):
        first = raw[token.start()]
        values += first == _COMMA
        keys += first == _COLON
        nested += first in _OPENS
        if values > MAX_VALUES or keys > MAX_KEYS or nested > MAX_NESTED:
            bounds = f"{MAX_VALUES} values, {MAX_KEYS} keys or {MAX_NESTED} lists and objects"
            raise HttpError(413, f"the body has over {bounds}; send less in one request")
