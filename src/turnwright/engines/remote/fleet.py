"""Many servers as one engine; a server that dies, hangs, loses its weights or violates the
contract loses no trajectory.

`Fleet.generate` chooses a server and retries on another, `_health_loop` decides who may be chosen,
`update_from` sends new weights to all of them and verifies that they arrived. What concerns one
server is in `Replica`: its calls in flight, its state, the proof of its weights. Settings are in
`fleet_settings.py`.

Who starts and ends servers is not here (`ManagedFleet`, `PlacedFleet`), nor is how weights are
written and packed (`weight_files.py`, `weight_sync.py`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from turnwright.engines.protocols import Generation, Request
from turnwright.engines.remote.chat import ChatEngine
from turnwright.engines.remote.fleet_settings import FleetSettings, ListedServers, WeightDelivery
from turnwright.engines.remote.remote_engine import RemoteEngine
from turnwright.engines.remote.replica import ExpectedScores, LatestWeights, Replica
from turnwright.engines.remote.response import WeightsLabel
from turnwright.engines.remote.weight_sync import DiskWeights, OnDisk, WeightsSource
from turnwright.errors import (
    BackendContractError,
    ConfigError,
    EngineError,
    EngineUnavailable,
    SyncError,
    TurnwrightError,
    UsageError,
)

_log = logging.getLogger(__name__)
LIST_S = 0.5
"""Seconds between readings of a list of servers."""
LEAVE_S = 30.0
"""Seconds that calls in flight on a server that leaves may take."""
SAMPLED = 32
"""Servers among which a new session chooses the least busy."""
SPARE_SHARE = 0.75
"""A session leaves a server that is merely full only for one with fewer calls than this fraction of
its limit."""
MAX_CONTRACT_ERRORS = 4
"""Contract errors that one call tolerates; a misconfigured server causes one every time."""


class Fleet:
    """Servers of one model as one engine.

    - All turns of a session go to one server, which caches their prefix; a new session goes
      to the least busy server.
    - Servers join and leave at any time (`add`, `remove`, or a list that is watched). One that
      joins first gets the latest weights and must sample from them.
    - A call that gets no response, or one that violates the contract, is retried on another
      server with the same ids.
    - A server that failed gets no calls before a check of its health and of its logprobs for known
      ids. A server with old weights gets the latest ones first.
    - A server that fails its checks (stopped, hung) loses its calls in flight to the others.
    - At most `most` calls run on a server, and new sessions go to it only while its queue and cache
      have room; at most `most_waiting` calls wait.

    Example::

        engine = Fleet([VllmEngine("http://a:8000"), VllmEngine("http://b:8000")])
        trajectories = tw.rollout(env, tasks, engine=engine)
    """

    def __init__(
        self,
        engines: Sequence[RemoteEngine],
        settings: FleetSettings | None = None,
        *,
        delivery: WeightDelivery | None = None,
        listed: ListedServers | None = None,
    ) -> None:
        """
        Args:
            engines: one per server.
            settings: limits of calls, and how failures are found.
            delivery: how new weights reach the servers; `update` needs it.
            listed: further servers, which join and leave.

        Raises:
            ConfigError: for no server and no list, or a duplicate server.
        """
        _check_servers(engines, listed)
        self._settings = settings or FleetSettings()
        self.delivery = delivery or WeightDelivery()
        self.members = [self._member(engine) for engine in engines]
        self.version = min((engine.version for engine in engines), default=0)
        self.renderer = next(
            (engine.renderer for engine in engines if engine.renderer is not None), None
        )
        self.counts: Counter[str] = Counter()
        """`asked_again/TYPE`, `waited`, `updates`, `joined`, `left`, `sessions_moved`."""
        self._homes: dict[str, Replica] = {}
        """Server of each session."""
        self._queue: deque[asyncio.Future[None]] = deque()
        """Calls that wait for a server, in order of arrival."""
        self._pixels: list[Any] = []

        self._latest: WeightsSource | None = None
        self._proven: WeightsLabel | None = None
        """The trainer's scores of the latest weights."""
        self._fingerprint = ""
        self._trainer_label: WeightsLabel | None = None
        self._initial_lock = asyncio.Lock()
        self._asleep = False

        self._listed = listed
        self._wanted: frozenset[str] = frozenset()
        """URLs in the list when it was last read."""
        self._from_list: set[str] = set()
        self._joining: dict[str, asyncio.Task[None]] = {}
        self._join_faults: dict[str, str] = {}

        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened: asyncio.Future[None] | None = None
        self._health_tasks: dict[Replica, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """Following the list, and calls that servers that left finish."""

    @property
    def gives_alternatives(self) -> bool:
        """Whether every server returns the most likely ids with each sampled one."""
        return all(member.engine.gives_alternatives for member in self.members)

    @property
    def context(self) -> int | None:
        """Maximum number of ids of context plus reply that every server takes; None while no
        server reported it."""
        limits: list[int] = []
        for member in self.members:
            if member.engine.context is not None:
                limits.append(member.engine.context)
        return min(limits, default=None)

    def set_renderer(self, renderer: Any) -> None:
        """Use the rollout's renderer if none was given."""
        self.renderer = self.renderer or renderer
        for member in self.members:
            member.engine.set_renderer(renderer)

    def add_pixel_source(self, pixels: Any) -> None:
        """Set the source of the images of `Request.media`."""
        self._pixels.append(pixels)
        for member in self.members:
            member.engine.add_pixel_source(pixels)

    async def open(self) -> None:
        """Check every server; those that do not respond join later.

        Called automatically before the first call.
        """
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            if self._opened is not None and not self._opened.done():
                await asyncio.shield(self._opened)
            return

        # Tasks and futures of an earlier loop ended with it.
        self._loop = loop
        self._opened = loop.create_future()
        self._queue.clear()
        self._tasks.clear()
        self._joining.clear()
        for member in self.members:
            member.calls.clear()
            member.check_now = asyncio.Event()
            member.lock = asyncio.Lock()

        try:
            await self._start_servers()
            if self._listed is not None:
                await self._wait_for_list()
            await self._start_members()
        except BaseException:
            self._loop = None
            self._opened.cancel()
            raise

        self._health_tasks = {
            member: loop.create_task(self._health_loop(member)) for member in self.members
        }
        self._opened.set_result(None)
        if self._listed is not None:
            self._run(self._follow_list())

    async def _start_members(self) -> None:
        """Check every server for the first time; one that fails is checked again later."""
        members = list(self.members)
        starts = [member.start() for member in members]
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        for member, error in zip(members, outcomes, strict=True):
            if isinstance(error, EngineError):
                member.mark_suspect(str(error))
            elif isinstance(error, BaseException):
                raise error

    async def generate(self, request: Request) -> Generation:
        """Sample one reply on any available server.

        Raises:
            EngineError: after `attempts` failures, or when no server was available for
                `patience_s`.
        """
        if self.delivery.first is not None and self._latest is None:
            async with self._initial_lock:
                if self._latest is None:
                    await self.update(self.delivery.first(), self.version)
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

            # Another server is asked with the same ids, and this one is checked meanwhile.
            member.not_before = time.monotonic() + min(fault.retry_after, self._settings.patience_s)
            member.mark_suspect(str(fault))
            failed.append(member)
            if isinstance(fault, BackendContractError):
                breaches += 1
            if self._homes.get(request.session) is member:
                del self._homes[request.session]
            if len(failed) >= self._settings.attempts or breaches > MAX_CONTRACT_ERRORS:
                break
            self.counts[f"asked_again/{type(fault).__name__}"] += 1

        error_class: type[EngineError] = EngineUnavailable
        if isinstance(fault, BackendContractError):
            error_class = BackendContractError
        servers = len({id(member) for member in failed})
        raise error_class(
            f"no response after {len(failed)} attempts on {servers} of {len(self.members)} "
            f"servers: {fault}"
        ) from fault

    def release(self, session: str) -> None:
        """End a session; a later call of it may go to any server."""
        member = self._homes.pop(session, None)
        if member is not None:
            member.engine.release(session)

    async def close(self) -> None:
        """Stop the checks and close the connections; the servers keep running."""
        tasks = [*self._health_tasks.values(), *self._tasks]
        self._health_tasks = {}
        for task in tasks:
            task.cancel()
        if self._loop is asyncio.get_running_loop():
            await asyncio.gather(*tasks, return_exceptions=True)

        for member in self.members:
            member.abort_calls()
        closing = [member.engine.close() for member in self.members]
        await asyncio.gather(*closing, return_exceptions=True)
        if self.delivery.tree is not None:
            await self.delivery.tree.close()
        self._loop = None

    async def _start_servers(self) -> None:
        """Start the servers before their first check, in a subclass that owns them."""

    async def _restart_server(self, member: Replica) -> None:
        """Restart the server after a failed check, in a subclass that owns it."""

    # Servers that join and leave

    def add(self, engine: RemoteEngine) -> None:
        """Add a server; it gets calls once it has the latest weights and samples from them.

        Raises:
            ConfigError: for a server that the fleet has.
        """
        if any(member.engine.url == engine.url for member in self.members):
            raise ConfigError(f"the fleet has {engine.url} already")
        member = self._member(engine)
        engine.set_renderer(self.renderer)
        for pixels in self._pixels:
            engine.add_pixel_source(pixels)
        self.members.append(member)
        self.counts["joined"] += 1

        # Before the fleet is open, `open` checks all members.
        if self._loop is not None and self._opened is not None and self._opened.done():
            member.outdated = self._latest is not None
            member.mark_suspect("joined, and is being checked")
            self._health_tasks[member] = self._loop.create_task(self._health_loop(member))

    async def remove(self, url: str, *, seconds: float = LEAVE_S) -> None:
        """Remove a server: it gets no further calls, and its sessions move.

        Calls in flight have some seconds to end.

        Raises:
            ConfigError: for a server that the fleet lacks.
        """
        named = [member for member in self.members if member.engine.url == url.rstrip("/")]
        if not named:
            raise ConfigError(f"the fleet has no server {url}")
        member = named[0]
        self.members.remove(member)
        member.state = "left"
        member.fault = "it left the fleet"
        self.counts["left"] += 1

        for session in [name for name, home in self._homes.items() if home is member]:
            del self._homes[session]
        health_task = self._health_tasks.pop(member, None)
        if health_task is not None:
            health_task.cancel()
        if member.calls:
            await member.wait_for_calls(seconds)
            member.abort_calls()
        await member.engine.close()

    def _member(self, engine: RemoteEngine) -> Replica:
        engine.patient = False  # calls move to other servers instead
        return Replica(engine, self._settings.most, self._settings.misses)

    def _run(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _wait_for_list(self) -> None:
        """Wait until a listed server is a member, and shortly for the others."""
        assert self._listed is not None
        seconds = self._settings.patience_s
        fault = self._read_list()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                if self._joining:
                    await asyncio.wait(self._joining.values(), timeout=4 * LIST_S)
                while not self.members:
                    await asyncio.sleep(LIST_S)
                    fault = self._read_list()
                return
        fault = fault or "it lists none"
        raise EngineUnavailable(
            f"{self._listed.file.path}: no server after {seconds:g} s (turnwright engines join "
            f"URL): {fault}"
        )

    async def _follow_list(self) -> None:
        last_fault = ""
        while True:
            await asyncio.sleep(LIST_S)
            fault = self._read_list()
            if fault and fault != last_fault:
                _log.warning("%s", fault)
            last_fault = fault

    def _read_list(self) -> str:
        """Begin to add and remove servers to match the list.

        Return what is wrong, or an empty string.
        """
        assert self._listed is not None
        try:
            self._wanted = frozenset(self._listed.file.urls())
        except UsageError as error:  # the servers stay as they are
            return str(error)
        for url in self._from_list - self._wanted:
            self._from_list.discard(url)
            self._run(self.remove(url))
        have = {member.engine.url for member in self.members} | self._joining.keys()
        for url in sorted(self._wanted - have):
            self._joining[url] = self._run(self._join(url))

        faulty = sorted(self._join_faults.keys() & self._wanted)
        return "; ".join(self._join_faults[url] for url in faulty)

    async def _join(self, url: str) -> None:
        """Add a listed server; one that does not respond is asked again at the next reading."""
        assert self._listed is not None
        try:
            engine = await self._listed.connect(url)
            self._join_faults.pop(url, None)
            if url in self._wanted:
                self._from_list.add(url)
                self.add(engine)
        except TurnwrightError as error:
            self._join_faults[url] = str(error)
        except Exception as error:  # a bug here must not end the watch
            self._join_faults[url] = repr(error)
        finally:
            self._joining.pop(url, None)

    # Assigning calls

    async def _choose_replica(self, session: str, failed: Sequence[Replica]) -> Replica:
        """Return a server for a call, waiting until one is available."""
        all_down_since: float | None = None
        loop = asyncio.get_running_loop()
        while True:
            home = self._homes.get(session)
            if home is not None and home.available:
                return home

            # A session stays with a home that is merely full, which has its cache, unless another
            # server has much more room.
            best = self._least_busy(failed)
            home_is_full = home is not None and home.state == "up" and home not in failed
            if best is not None and (not home_is_full or best.business < SPARE_SHARE):
                self.counts["sessions_moved"] += home is not None
                self._homes[session] = best
                return best

            # Patience is for a fleet without any server; full ones are waited for.
            if any(member.state in ("up", "loading") for member in self.members):
                all_down_since = None
            elif all_down_since is None:
                all_down_since = loop.time()
            seconds = self._settings.patience_s
            if all_down_since is not None and loop.time() - all_down_since > seconds:
                reasons = [f"{member.engine.url}: {member.fault}" for member in self.members]
                raise EngineUnavailable(
                    f"none of {len(self.members)} servers was available for {seconds:g} s: "
                    f"{'; '.join(reasons)}"
                )
            await self._wait_for_slot()

    def _least_busy(self, failed: Sequence[Replica]) -> Replica | None:
        """Return the least busy of the servers that take new sessions, or of a sample where there
        are many.

        One that failed this call is chosen only where no other is free.
        """
        groups = [self.members]
        if len(self.members) > SAMPLED:  # looking at 1,000 takes a quarter of a millisecond
            groups.insert(0, random.sample(self.members, SAMPLED))
        for group in groups:
            free = [member for member in group if member.accepts_sessions]
            unfailed = [member for member in free if member not in failed]
            if unfailed:
                return min(unfailed, key=lambda member: member.business)
        return min(free, key=lambda member: member.business, default=None)

    async def _wait_for_slot(self) -> None:
        """Wait until a call ends, or for a second at most."""
        if len(self._queue) >= self._settings.most_waiting:
            raise EngineError(
                f"{len(self._queue)} calls already wait for a server (most_waiting); lower "
                "rollout.concurrency"
            )
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        self.counts["waited"] += 1

        # Not `wait_for`: in Python 3.11 it loses a cancellation that arrives together with the
        # result.
        try:
            async with asyncio.timeout(min(1.0, self._settings.patience_s / 4)):
                await turn
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._admit_next()  # pass this call's turn on
            raise
        finally:
            with suppress(ValueError):
                self._queue.remove(turn)

    def _admit_next(self) -> None:
        """Wake the call that waits longest."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def _admit_all(self) -> None:
        while self._queue:
            self._admit_next()

    # Health checks

    async def _health_loop(self, member: Replica) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.check_s):
                    await member.check_now.wait()
            member.check_now.clear()
            if self._asleep:
                # A server that woke or restarted now would take memory the trainer uses.
                continue

            try:
                is_well = await member.check(
                    self._settings.health_s, lambda: self._latest_for(member)
                )
            except Exception as error:  # a bug in a check must not end the checks
                _log.exception(
                    "the check of %s raised an unexpected error", member.engine.display_name
                )
                member.fault = repr(error)
                member.state = "doubted"
                is_well = False
            if is_well:
                self._admit_all()
            elif not self._asleep:  # it may have been put to sleep during the check
                await self._restart_server(member)
            # Checks are not to follow each other at once when every call fails.
            await asyncio.sleep(self._settings.check_s / 10)

    # Weights

    async def update(self, weights: Iterable[tuple[str, Any]], version: int) -> str:
        """Update the weights of all servers: from disk, over a process group or in requests.

        Calls in flight end as aborted or go on, by the clients' `in_flight` and the kind of server.

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
        delivery = self.delivery
        packer = delivery.packer if delivery.packer is not None else delivery.directories
        if packer is None:
            raise SyncError(
                "a fleet needs a directory for new weights: Fleet(..., "
                "delivery=WeightDelivery(directories=ModelDirectories(path, model)))"
            )

        source, fingerprint = await asyncio.to_thread(packer.pack, weights, version)
        if delivery.tree is not None and isinstance(source, OnDisk):
            urls = [member.engine.url for member in self.members]
            source = await delivery.tree.share(source, urls)
        # The servers may have had the first weights already.
        await self.update_from(source, changed=self._fingerprint not in ("", fingerprint))
        self._fingerprint = fingerprint
        return fingerprint

    async def sleep(self) -> None:
        """Make every server release its memory; calls in flight first end as aborted.

        The next weights wake the servers. Until then no server is called, checked or started.

        Raises:
            EngineError: when a responding server fails.
        """
        await self.open()
        self._asleep = True
        able = [member for member in self.members if member.state == "up"]
        outcomes = await asyncio.gather(
            *(member.sleep() for member in able), return_exceptions=True
        )
        for error in outcomes:
            if isinstance(error, EngineUnavailable):
                # It is down, or about to be found so.
                _log.warning("%s; the server is left as it is", error)
            elif isinstance(error, BaseException):
                self._asleep = False
                raise error

    async def load_from_disk(
        self, directory: str | Path, version: int, *, changed: bool = True
    ) -> None:
        """Make every server load the weights of a directory, and verify them, as `update_from`."""
        await self.update_from(DiskWeights(Path(directory), version), changed=changed)

    async def update_from(self, source: WeightsSource, *, changed: bool = True) -> None:
        """Send weights to every server and verify them.

        `changed` tells whether they differ from the previous ones. Raises `SyncError` when no
        server has them.
        """
        await self.open()
        self._asleep = False
        expected = await self._expected_scores()
        members = list(self.members)  # others join meanwhile
        tolerance = self.delivery.tolerance
        updates = [
            member.update(source, changed=changed, expected=expected, tolerance=tolerance)
            for member in members
        ]
        outcomes = await asyncio.gather(*updates, return_exceptions=True)

        # Which servers have them; one that failed may have a part.
        updated: set[Replica] = set()
        faults: list[str] = []
        for member, error in zip(members, outcomes, strict=True):
            if member not in self.members:
                continue
            member.state = "up" if error is None else "doubted"
            if error is None:
                updated.add(member)
            elif isinstance(error, (EngineError, SyncError, TimeoutError)):
                member.fault = str(error)
                # The latest complete weights follow.
                member.outdated = self._latest is not None
                faults.append(f"{member.engine.url}: {error}")
                _log.warning("%s", faults[-1])
            else:
                raise error
        if not updated and self._listed is None:
            self._admit_all()
            raise SyncError(
                f"no server of {len(faults)} has the weights of policy {source.version}: "
                f"{'; '.join(faults)}"
            )

        # From here on these are the fleet's weights; others get them before their next call.
        self._latest = source
        self.version = source.version
        self._proven = None if expected is None else expected.label
        for member in self.members:
            member.outdated = member not in updated
            if member.outdated and member.state == "up":
                member.state = "doubted"
            member.check_now.set()
        if not updated:
            await self._wait_for_weights(faults)
        self.counts["updates"] += 1
        self._admit_all()

    async def _wait_for_weights(self, faults: Sequence[str]) -> None:
        """Wait until a server of the list has the latest weights and samples from them."""
        seconds = self._settings.patience_s
        version = self.version

        def is_current(member: Replica) -> bool:
            return member.state == "up" and not member.outdated

        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not any(is_current(member) for member in self.members):
                    await asyncio.sleep(LIST_S / 10)
                return
        self._admit_all()
        raise SyncError(
            f"no server has the weights of policy {version} after {seconds:g} s: "
            f"{'; '.join(faults)}"
        )

    def _latest_for(self, member: Replica) -> LatestWeights:
        """Return the latest weights, with scores that prove them on a server.

        Without the trainer's scores they are those of another server of its kind.
        """
        scores = self._proven
        if scores is None:
            for other in self.members:
                is_same_kind = other is not member and other.engine.kind == member.engine.kind
                is_current = other.state == "up" and not other.outdated
                if is_same_kind and is_current and other.proof is not None:
                    scores = other.proof.label
                    break
        return LatestWeights(self._latest, scores, self.delivery.tolerance)

    async def _expected_scores(self) -> ExpectedScores | None:
        """Return the trainer's current scores of the servers' known ids."""
        if self.delivery.expected_logprobs is None or not self.members:
            return None
        ids = self.members[0].engine.known_ids
        scores = await asyncio.to_thread(self.delivery.expected_logprobs, ids)
        label = WeightsLabel(None, tuple(scores))
        previous = self._trainer_label
        self._trainer_label = label
        return ExpectedScores(label, 0.0 if previous is None else label.max_difference(previous))


def _check_servers(engines: Sequence[RemoteEngine], listed: ListedServers | None) -> None:
    if not engines and listed is None:
        raise ConfigError("a fleet needs at least one server, or a list of servers")
    urls = Counter(engine.url for engine in engines)
    for url, count in urls.items():
        if count > 1:
            raise ConfigError(f"a fleet has {url} twice; list each server once")
