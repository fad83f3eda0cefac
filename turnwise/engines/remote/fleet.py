"""Many servers behind one engine; one that dies, hangs, forgets its weights or talks nonsense loses no trajectory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from turnwise.engines.base import Generation, Request
from turnwise.engines.remote import replica
from turnwise.engines.remote.base import CANARY, RemoteEngine, WeightsLabel
from turnwise.engines.remote.chat import ChatEngine
from turnwise.engines.remote.replica import Expect, ExpectedScores, Replica, WeightsProof
from turnwise.engines.remote.weight_files import WeightDirectories
from turnwise.engines.remote.weight_sync import DiskWeights, WeightPacker, WeightsSource
from turnwise.errors import BackendContractError, ConfigError, EngineError, EngineUnavailable, SyncError

_log = logging.getLogger(__name__)
MAX_CONTRACT_ERRORS = 4
"""Answers to one call that may break the contract: a server that is set up wrongly does so every time."""


class Fleet:
    """Servers of one model as one engine.

    - The turns of a session go to one server, where their prefix is cached; a new session goes where fewest calls run.
    - A call whose server gives no answer, or one that breaks the contract, is asked again elsewhere, with the same ids.
    - A server that met a fault gets no calls before a check went well: its health, and the logprobs that its weights give
      to known ids. One that came back with old weights is given the newest ones again.
    - A server that does not answer its checks (stopped, hung) loses its calls in flight to the others.
    - At most `most` calls run on a server; others wait in line, at most `most_waiting` of them.

    Example::

        engine = Fleet([VllmEngine("http://a:8000"), VllmEngine("http://b:8000")])
        trajectories = tw.rollout(env, tasks, engine=engine)
    """

    def __init__(
        self,
        engines: Sequence[RemoteEngine],
        *,
        shelf: WeightDirectories | None = None,
        courier: WeightPacker | None = None,
        most: int = 256,
        most_waiting: int = 65_536,
        attempts: int = 16,
        patience_s: float = 120.0,
        check_s: float = 2.0,
        health_s: float = 5.0,
        misses: int = 3,
        expected_logprobs: Expect | None = None,
        tolerance: float = 1e-3,
        first: Callable[[], Iterable[tuple[str, Any]]] | None = None,
    ) -> None:
        """
        Args:
            engines: one per server.
            shelf: where new weights are written for the servers to read; `update` needs it, or a courier.
            courier: sends new weights by process group, one for each server, or in requests, in place of the shelf.
            most: calls at a time per server.
            most_waiting: calls in line, beyond which one more is an error.
            attempts: how often one call is asked before it is an error.
            patience_s: how long a call waits for any server to come back.
            check_s: seconds between checks.
            health_s: deadline of a look at a server's health; ten times as long for one at its weights.
            misses: failed checks in a row before a server's calls are taken away.
            expected_logprobs: the trainer's own logprobs of ids, which prove an update; without it, only a change is shown.
            tolerance: most difference to those, nats; 1e-3 is for float32.
            first: weights that the servers are given before the first call, where nobody calls `update` before.

        Raises:
            ConfigError: for no server, the same one twice, or a setting that cannot be.
        """
        if not engines:
            raise ConfigError("a fleet needs at least one server")
        urls = Counter(engine.url for engine in engines)
        if twice := [url for url, count in urls.items() if count > 1]:
            raise ConfigError(f"a fleet has {twice[0]} twice")
        if most < 1 or attempts < 1 or misses < 1 or min(check_s, health_s, patience_s) <= 0:
            raise ConfigError("a fleet's most, attempts and misses are at least 1, and check_s, health_s and patience_s over 0")
        self.members = [Replica(engine, most, misses) for engine in engines]
        for engine in engines:
            engine.patient = False  # others are asked meanwhile
        self.shelf, self.courier = shelf, courier
        self._expected_logprobs = expected_logprobs
        self.tolerance = tolerance
        self.version = min(engine.version for engine in engines)
        self.renderer = next((engine.renderer for engine in engines if engine.renderer is not None), None)
        self.counts: Counter[str] = Counter()
        """`asked_again/TYPE`, `waited`, `updates`."""
        self._most_waiting, self._attempts, self._patience_s = most_waiting, attempts, patience_s
        self._check_s, self._health_s = check_s, health_s
        self._homes: dict[str, Replica] = {}
        self._line: deque[asyncio.Future[None]] = deque()
        self._latest: WeightsSource | None = None
        self._fingerprint = ""
        self._said: WeightsLabel | None = None
        self._first, self._giving = first, asyncio.Lock()
        self._resting = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch: list[asyncio.Task[None]] = []
        self._opened: asyncio.Future[None] | None = None

    @property
    def context(self) -> int | None:
        """Most ids of context plus reply that every server takes; None while no server said it."""
        known = [member.engine.context for member in self.members if member.engine.context is not None]
        return min(known, default=None)

    def set_renderer(self, renderer: Any) -> None:
        """Take the rollout's renderer where none was given."""
        self.renderer = self.renderer or renderer
        for member in self.members:
            member.engine.set_renderer(renderer)

    def add_pixel_source(self, pixels: Any) -> None:
        """Where the images behind `Request.media` are."""
        for member in self.members:
            member.engine.add_pixel_source(pixels)

    async def open(self) -> None:
        """Look at every server; those that do not answer are taken in later. Called by itself before the first call."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # a rollout of its own: what belonged to the loop before ended with it
            self._loop, self._opened = loop, loop.create_future()
            self._line.clear()
            for member in self.members:
                member.calls.clear()
                member.hurry, member.lock = asyncio.Event(), asyncio.Lock()
            try:
                await self._prepare()
                found = await asyncio.gather(*(m.start() for m in self.members), return_exceptions=True)
                for member, error in zip(self.members, found, strict=True):
                    if isinstance(error, EngineError):
                        member.mark_suspect(str(error))
                    elif isinstance(error, BaseException):
                        raise error
            except BaseException:
                self._loop = None
                self._opened.cancel()
                raise
            self._watch = [loop.create_task(self._health_loop(member)) for member in self.members]
            self._opened.set_result(None)
        elif self._opened is not None and not self._opened.done():
            await asyncio.shield(self._opened)

    async def generate(self, request: Request) -> Generation:
        """Sample one reply, wherever there is a server that gives one.

        Raises:
            EngineError: when none does: after `attempts`, or when all were down for `patience_s`.
        """
        if self._first is not None and self._latest is None:
            async with self._giving:
                if self._latest is None:
                    await self.update(self._first(), self.version)
        await self.open()
        failed: list[Replica] = []
        breaches = 0
        while True:
            member = await self._place(request.session, failed)
            try:
                return await member.generate(request)
            except (EngineUnavailable, BackendContractError) as error:
                fault = error
            finally:
                self._next()
            member.not_before = time.monotonic() + min(fault.retry_after, self._patience_s)
            failed.append(member)
            breaches += isinstance(fault, BackendContractError)
            member.mark_suspect(str(fault))
            if self._homes.get(request.session) is member:
                del self._homes[request.session]
            if len(failed) >= self._attempts or breaches > MAX_CONTRACT_ERRORS:
                break
            self.counts[f"asked_again/{type(fault).__name__}"] += 1
        servers = len({id(member) for member in failed})
        kind = BackendContractError if isinstance(fault, BackendContractError) else EngineUnavailable
        raise kind(f"asked {len(failed)} times, {servers} of {len(self.members)} servers, and no answer: {fault}") from fault

    def release(self, session: str) -> None:
        """The session is over; its next call, should there be one, may go anywhere."""
        member = self._homes.pop(session, None)
        if member is not None:
            member.engine.release(session)

    async def close(self) -> None:
        """Stop checking and close the connections; the servers go on."""
        for task in self._watch:
            task.cancel()
        if self._loop is asyncio.get_running_loop():
            await asyncio.gather(*self._watch, return_exceptions=True)
        self._watch = []
        for member in self.members:
            member.abort_calls()
        await asyncio.gather(*(member.engine.close() for member in self.members), return_exceptions=True)
        self._loop = None

    async def _prepare(self) -> None:
        """Before servers are looked at for the first time: see that they run, where that is ours to see to."""

    async def _revive(self, member: Replica) -> None:
        """A check of a server failed: start it again, where that is ours to do."""

    # Placing calls

    async def _place(self, session: str, failed: Sequence[Replica]) -> Replica:
        """A server that may be asked now; waits for one."""
        since: float | None = None
        loop = asyncio.get_running_loop()
        while True:
            home = self._homes.get(session)
            if home is not None and home.available:
                return home
            free = [member for member in self.members if member.available]
            fresh = [member for member in free if member not in failed] or free
            if fresh:
                best = min(fresh, key=lambda member: len(member.calls))
                self._homes[session] = best
                return best
            up = any(member.state in ("up", "loading") for member in self.members)
            since = None if up else since if since is not None else loop.time()
            if since is not None and loop.time() - since > self._patience_s:
                told = "; ".join(f"{member.engine.url}: {member.fault}" for member in self.members)
                raise EngineUnavailable(f"no server of {len(self.members)} answered for {self._patience_s:g} s: {told}")
            await self._wait_for_slot()

    async def _wait_for_slot(self) -> None:
        if len(self._line) >= self._most_waiting:
            raise EngineError(f"{len(self._line)} calls wait for a server already (most_waiting): lower rollout.concurrency")
        place = asyncio.get_running_loop().create_future()
        self._line.append(place)
        self.counts["waited"] += 1
        # Not `wait_for`: in Python 3.11 it loses a cancellation that comes together with what it waits for.
        try:
            async with asyncio.timeout(min(1.0, self._patience_s / 4)):
                await place
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._next()  # it was this call's turn
            raise
        finally:
            with suppress(ValueError):
                self._line.remove(place)

    def _next(self) -> None:
        """A place became free: the call that waits longest may look."""
        while self._line:
            place = self._line.popleft()
            if not place.done():
                place.set_result(None)
                return

    def _all(self) -> None:
        while self._line:
            self._next()

    # Watching

    async def _health_loop(self, member: Replica) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._check_s):
                    await member.hurry.wait()
            member.hurry.clear()
            if self._resting:  # whoever wakes up or starts anew now takes the memory that others train in
                continue
            try:
                well = await member.check(self._health_s, lambda: self._latest)
            except Exception as error:  # a mistake of ours must not leave a server without its checks
                _log.exception("the check of %s itself failed", member.engine.display_name)
                member.fault, member.state, well = repr(error), "doubted", False
            if well:
                self._all()
            elif not self._resting:  # it may have been put to sleep while it was looked at
                await self._revive(member)
            await asyncio.sleep(self._check_s / 10)  # a server that fails every call is not asked without a pause

    # Weights

    async def update(self, weights: Iterable[tuple[str, Any]], version: int) -> str:
        """Have every server take new weights, from the shelf or by courier; calls in flight end as aborted first.

        A server that does not take them gets no calls any more, until it does.

        Returns:
            The fingerprint of what stands on the disk, which is what the servers read, or of what was sent.

        Raises:
            NotTrainable: for a fleet with a chat endpoint.
            SyncError: when no server answers from the new weights.
        """
        for member in self.members:
            if isinstance(member.engine, ChatEngine):
                await member.engine.update(weights, version)
        parcel: WeightsSource
        if self.courier is not None:
            parcel, fingerprint = await asyncio.to_thread(self.courier.pack, weights, version)
        elif self.shelf is not None:
            directory, fingerprint = await asyncio.to_thread(self.shelf.write, weights, version)
            parcel = self.shelf.as_source(directory, version)
        else:
            raise SyncError(
                "a fleet writes new weights to a directory that its servers see: Fleet(..., shelf=Shelf(path, model))"
            )
        # Of the first weights it is not known whether the servers had them already.
        await self.update_from(parcel, changed=self._fingerprint not in ("", fingerprint))
        self._fingerprint = fingerprint
        return fingerprint

    async def sleep(self) -> None:
        """Have every server give its memory back; calls in flight end as aborted first. The next weights wake them.

        Until then no server is asked, looked at or started.

        Raises:
            EngineError: when one that answers does not.
        """
        await self.open()
        self._resting = True
        found = await asyncio.gather(*(m.sleep() for m in self.members if m.state == "up"), return_exceptions=True)
        for error in found:
            if isinstance(error, EngineUnavailable):
                _log.warning("%s; it is left as it is", error)  # dead, or about to be found out
            elif isinstance(error, BaseException):
                self._resting = False
                raise error

    async def load_from_disk(self, directory: str | Path, version: int, *, changed: bool = True) -> None:
        """Have every server read the weights of a directory, and see that they answer from them.

        Args:
            changed: whether they differ from the ones before.

        Raises:
            SyncError: when no server does.
        """
        await self.update_from(DiskWeights(Path(directory), version), changed=changed)

    async def update_from(self, parcel: WeightsSource, *, changed: bool = True) -> None:
        """Have every server take weights, and see that they answer from them.

        Args:
            changed: whether they differ from the ones before.

        Raises:
            SyncError: when no server does.
        """
        await self.open()
        self._resting = False
        wanted = await self._wanted()
        found = await asyncio.gather(*(self._load(m, parcel, changed, wanted) for m in self.members), return_exceptions=True)
        faults = []
        for member, error in zip(self.members, found, strict=True):
            member.state = "up" if error is None else "doubted"
            if isinstance(error, (EngineError, SyncError, TimeoutError)):
                member.fault = str(error)
                member.behind = self._latest is not None  # it may have some of them, and is given the last whole ones
                faults.append(f"{member.engine.url}: {error}")
                _log.warning("%s", faults[-1])
            elif error is not None:
                raise error
        if len(faults) == len(self.members):
            self._all()
            raise SyncError(f"no server of {len(faults)} has the weights of policy {parcel.version}: {'; '.join(faults)}")
        self._latest, self.version = parcel, parcel.version
        for member in self.members:
            member.behind = member.state != "up"  # it is given them before it is asked again
            member.hurry.set()
        self.counts["updates"] += 1
        self._all()

    async def _load(self, member: Replica, parcel: WeightsSource, changed: bool, wanted: ExpectedScores | None) -> None:
        member.state = "loading"
        engine = member.engine
        async with member.lock:
            before = member.proof
            await member.drain()
            await parcel.send_to(engine)
            member.proof = await replica.verify_weights_arrived(
                engine, before, changed=changed, wanted=wanted, tolerance=self.tolerance
            )

    async def _wanted(self) -> ExpectedScores | None:
        """What the trainer says of known ids now."""
        if self._expected_logprobs is None:
            return None
        scores = tuple(await asyncio.to_thread(self._expected_logprobs, CANARY))
        before, self._said = self._said, WeightsLabel(None, scores)
        return ExpectedScores(scores, WeightsProof(before, 0.0).max_difference(self._said) if before is not None else 0.0)
