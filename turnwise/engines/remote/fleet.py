"""Many servers as one engine; a server that dies, hangs, loses its weights or violates the contract loses no trajectory."""

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
from turnwise.engines.remote.base import CANARY, RemoteEngine
from turnwise.engines.remote.chat import ChatEngine
from turnwise.engines.remote.replica import ExpectedScores, LogprobFunction, Replica
from turnwise.engines.remote.response import WeightsLabel
from turnwise.engines.remote.weight_files import WeightDirectories
from turnwise.engines.remote.weight_sync import DiskWeights, WeightPacker, WeightsSource
from turnwise.errors import BackendContractError, ConfigError, EngineError, EngineUnavailable, SyncError

_log = logging.getLogger(__name__)
MAX_CONTRACT_ERRORS = 4
"""Contract errors that one call tolerates; a misconfigured server causes one every time."""


class Fleet:
    """Servers of one model as one engine.

    - All turns of a session go to one server, which caches their prefix; a new session goes to the least busy server.
    - A call that gets no response, or one that violates the contract, is retried on another server with the same ids.
    - A server that failed gets no calls before a check of its health and of its logprobs for known ids. A server with old
      weights gets the latest ones first.
    - A server that fails its checks (stopped, hung) loses its calls in flight to the others.
    - At most `most` calls run on a server; at most `most_waiting` others wait.

    Example::

        engine = Fleet([VllmEngine("http://a:8000"), VllmEngine("http://b:8000")])
        trajectories = tw.rollout(env, tasks, engine=engine)
    """

    def __init__(
        self,
        engines: Sequence[RemoteEngine],
        *,
        directories: WeightDirectories | None = None,
        packer: WeightPacker | None = None,
        most: int = 256,
        most_waiting: int = 65_536,
        attempts: int = 16,
        patience_s: float = 120.0,
        check_s: float = 2.0,
        health_s: float = 5.0,
        misses: int = 3,
        expected_logprobs: LogprobFunction | None = None,
        tolerance: float = 1e-3,
        first: Callable[[], Iterable[tuple[str, Any]]] | None = None,
    ) -> None:
        """
        Args:
            engines: one per server.
            directories: where new weights are written for the servers; `update` needs it, or a packer.
            packer: sends new weights by process group (one per server) or in requests, in place of directories.
            most: maximum number of concurrent calls per server.
            most_waiting: maximum number of waiting calls; one more is an error.
            attempts: maximum number of attempts per call.
            patience_s: seconds a call waits for an available server before failing.
            check_s: seconds between checks.
            health_s: deadline of a health check in seconds; ten times as long for a check of the weights.
            misses: consecutive failed checks before a server's calls are moved.
            expected_logprobs: the trainer's logprobs of ids, which prove an update; without it, only a change is checked.
            tolerance: maximum difference from those, in nats; 1e-3 suits float32.
            first: weights sent to the servers before the first call unless `update` ran before.

        Raises:
            ConfigError: for no server, a duplicate server, or an invalid setting.
        """
        if not engines:
            raise ConfigError("a fleet needs at least one server")
        urls = Counter(engine.url for engine in engines)
        if twice := [url for url, count in urls.items() if count > 1]:
            raise ConfigError(f"a fleet has {twice[0]} twice; list each server once")
        if most < 1 or attempts < 1 or misses < 1 or min(check_s, health_s, patience_s) <= 0:
            raise ConfigError("a fleet's most, attempts and misses must be at least 1; check_s, health_s and patience_s over 0")
        self.members = [Replica(engine, most, misses) for engine in engines]
        for engine in engines:
            engine.patient = False  # calls move to other servers instead
        self.directories, self.packer = directories, packer
        self._expected_logprobs = expected_logprobs
        self.tolerance = tolerance
        self.version = min(engine.version for engine in engines)
        self.renderer = next((engine.renderer for engine in engines if engine.renderer is not None), None)
        self.counts: Counter[str] = Counter()
        """`asked_again/TYPE`, `waited`, `updates`."""
        self._max_waiting, self._attempts, self._unavailable_timeout_s = most_waiting, attempts, patience_s
        self._check_s, self._health_s = check_s, health_s
        self._homes: dict[str, Replica] = {}
        self._queue: deque[asyncio.Future[None]] = deque()
        self._latest: WeightsSource | None = None
        self._fingerprint = ""
        self._trainer_label: WeightsLabel | None = None
        self._initial_weights, self._initial_lock = first, asyncio.Lock()
        self._asleep = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._health_tasks: list[asyncio.Task[None]] = []
        self._opened: asyncio.Future[None] | None = None

    @property
    def context(self) -> int | None:
        """Maximum number of ids of context plus reply that every server takes; None while no server reported it."""
        known = [member.engine.context for member in self.members if member.engine.context is not None]
        return min(known, default=None)

    def set_renderer(self, renderer: Any) -> None:
        """Use the rollout's renderer if none was given."""
        self.renderer = self.renderer or renderer
        for member in self.members:
            member.engine.set_renderer(renderer)

    def add_pixel_source(self, pixels: Any) -> None:
        """Set the source of the images of `Request.media`."""
        for member in self.members:
            member.engine.add_pixel_source(pixels)

    async def open(self) -> None:
        """Check every server; those that do not respond join later. Called automatically before the first call."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # tasks and futures of an earlier loop ended with it
            self._loop, self._opened = loop, loop.create_future()
            self._queue.clear()
            for member in self.members:
                member.calls.clear()
                member.check_now, member.lock = asyncio.Event(), asyncio.Lock()
            try:
                await self._start_servers()
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
            self._health_tasks = [loop.create_task(self._health_loop(member)) for member in self.members]
            self._opened.set_result(None)
        elif self._opened is not None and not self._opened.done():
            await asyncio.shield(self._opened)

    async def generate(self, request: Request) -> Generation:
        """Sample one reply on any available server.

        Raises:
            EngineError: after `attempts` failures, or when no server was available for `patience_s`.
        """
        if self._initial_weights is not None and self._latest is None:
            async with self._initial_lock:
                if self._latest is None:
                    await self.update(self._initial_weights(), self.version)
        await self.open()
        failed: list[Replica] = []
        breaches = 0
        while True:
            member = await self._choose_replica(request.session, failed)
            try:
                return await member.generate(request)
            except (EngineUnavailable, BackendContractError) as error:
                fault = error
            finally:
                self._admit_next()
            member.not_before = time.monotonic() + min(fault.retry_after, self._unavailable_timeout_s)
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
        raise kind(f"no response after {len(failed)} attempts on {servers} of {len(self.members)} servers: {fault}") from fault

    def release(self, session: str) -> None:
        """End a session; a later call of it may go to any server."""
        member = self._homes.pop(session, None)
        if member is not None:
            member.engine.release(session)

    async def close(self) -> None:
        """Stop the checks and close the connections; the servers keep running."""
        tasks, self._health_tasks = self._health_tasks, []
        for task in tasks:
            task.cancel()
        if self._loop is asyncio.get_running_loop():
            await asyncio.gather(*tasks, return_exceptions=True)
        for member in self.members:
            member.abort_calls()
        await asyncio.gather(*(member.engine.close() for member in self.members), return_exceptions=True)
        self._loop = None

    async def _start_servers(self) -> None:
        """Start the servers before their first check, in a subclass that owns them."""

    async def _restart_server(self, member: Replica) -> None:
        """Restart the server after a failed check, in a subclass that owns it."""

    # Assigning calls

    async def _choose_replica(self, session: str, failed: Sequence[Replica]) -> Replica:
        """Return a server for a call, waiting until one is available."""
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
            if since is not None and loop.time() - since > self._unavailable_timeout_s:
                reasons = "; ".join(f"{member.engine.url}: {member.fault}" for member in self.members)
                count, seconds = len(self.members), self._unavailable_timeout_s
                raise EngineUnavailable(f"none of {count} servers was available for {seconds:g} s: {reasons}")
            await self._wait_for_slot()

    async def _wait_for_slot(self) -> None:
        if len(self._queue) >= self._max_waiting:
            raise EngineError(f"{len(self._queue)} calls already wait for a server (most_waiting); lower rollout.concurrency")
        place = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        self.counts["waited"] += 1
        # Not `wait_for`: in Python 3.11 it loses a cancellation that arrives together with the result.
        try:
            async with asyncio.timeout(min(1.0, self._unavailable_timeout_s / 4)):
                await place
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._admit_next()  # pass this call's turn on
            raise
        finally:
            with suppress(ValueError):
                self._queue.remove(place)

    def _admit_next(self) -> None:
        """Wake the call that waits longest."""
        while self._queue:
            place = self._queue.popleft()
            if not place.done():
                place.set_result(None)
                return

    def _admit_all(self) -> None:
        while self._queue:
            self._admit_next()

    # Health checks

    async def _health_loop(self, member: Replica) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._check_s):
                    await member.check_now.wait()
            member.check_now.clear()
            if self._asleep:  # a server that woke or restarted now would take memory the trainer uses
                continue
            try:
                well = await member.check(self._health_s, lambda: self._latest)
            except Exception as error:  # a bug in a check must not end the checks
                _log.exception("the check of %s raised an unexpected error", member.engine.display_name)
                member.fault, member.state, well = repr(error), "doubted", False
            if well:
                self._admit_all()
            elif not self._asleep:  # it may have been put to sleep during the check
                await self._restart_server(member)
            await asyncio.sleep(self._check_s / 10)  # limits the rate of checks when every call fails

    # Weights

    async def update(self, weights: Iterable[tuple[str, Any]], version: int) -> str:
        """Update the weights of all servers, from disk or over a process group; calls in flight first end as aborted.

        A server that fails to update gets no calls until it has the weights.

        Returns:
            Fingerprint of the weights on disk, which the servers read, or of the weights sent.

        Raises:
            NotTrainable: for a fleet with a chat endpoint.
            SyncError: when no server samples from the new weights.
        """
        for member in self.members:
            if isinstance(member.engine, ChatEngine):
                await member.engine.update(weights, version)
        source: WeightsSource
        if self.packer is not None:
            source, fingerprint = await asyncio.to_thread(self.packer.pack, weights, version)
        elif self.directories is not None:
            directory, fingerprint = await asyncio.to_thread(self.directories.write, weights, version)
            source = self.directories.as_source(directory, version)
        else:
            raise SyncError("a fleet needs a directory for new weights: Fleet(..., directories=ModelDirectories(path, model))")
        # The servers may have had the first weights already.
        await self.update_from(source, changed=self._fingerprint not in ("", fingerprint))
        self._fingerprint = fingerprint
        return fingerprint

    async def sleep(self) -> None:
        """Make every server release its memory; calls in flight first end as aborted. The next weights wake the servers.

        Until then no server is called, checked or started.

        Raises:
            EngineError: when a responding server fails.
        """
        await self.open()
        self._asleep = True
        found = await asyncio.gather(*(m.sleep() for m in self.members if m.state == "up"), return_exceptions=True)
        for error in found:
            if isinstance(error, EngineUnavailable):
                _log.warning("%s; the server is left as it is", error)  # down, or about to be found so
            elif isinstance(error, BaseException):
                self._asleep = False
                raise error

    async def load_from_disk(self, directory: str | Path, version: int, *, changed: bool = True) -> None:
        """Make every server load the weights of a directory, and verify them, as `update_from`."""
        await self.update_from(DiskWeights(Path(directory), version), changed=changed)

    async def update_from(self, source: WeightsSource, *, changed: bool = True) -> None:
        """Send weights to every server and verify them; `changed` tells whether they differ from the previous ones.

        Raises `SyncError` when no server has them.
        """
        await self.open()
        self._asleep = False
        wanted = await self._expected_scores()
        updates = (m.update(source, changed=changed, wanted=wanted, tolerance=self.tolerance) for m in self.members)
        found = await asyncio.gather(*updates, return_exceptions=True)
        faults = []
        for member, error in zip(self.members, found, strict=True):
            member.state = "up" if error is None else "doubted"
            if isinstance(error, (EngineError, SyncError, TimeoutError)):
                member.fault = str(error)
                member.outdated = self._latest is not None  # a partial update; the latest complete weights follow
                faults.append(f"{member.engine.url}: {error}")
                _log.warning("%s", faults[-1])
            elif error is not None:
                raise error
        if len(faults) == len(self.members):
            self._admit_all()
            raise SyncError(f"no server of {len(faults)} has the weights of policy {source.version}: {'; '.join(faults)}")
        self._latest, self.version = source, source.version
        for member in self.members:
            member.outdated = member.state != "up"  # sent before its next call
            member.check_now.set()
        self.counts["updates"] += 1
        self._admit_all()

    async def _expected_scores(self) -> ExpectedScores | None:
        """Return the trainer's current scores of `CANARY`."""
        if self._expected_logprobs is None:
            return None
        scores = tuple(await asyncio.to_thread(self._expected_logprobs, CANARY))
        before, self._trainer_label = self._trainer_label, WeightsLabel(None, scores)
        return ExpectedScores(self._trainer_label, self._trainer_label.max_difference(before) if before is not None else 0.0)
