"""One server of a fleet: whether it may be asked, what runs on it, and how it comes back after a fault."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from turnwise.engine.base import Generation, Request, SupportsPause
from turnwise.engine.remote import proof
from turnwise.engine.remote.base import RemoteEngine
from turnwise.engine.remote.proof import WeightsProof
from turnwise.engine.remote.ways import WeightsSource
from turnwise.errors import EngineError, EngineUnavailable, NotTrainable, StaleWeights, SyncError

_member_log = logging.getLogger(__name__)

DRAIN_S = 5.0
"""For calls in flight to end by themselves before new weights are read."""
SLEEPS = "sleeps (engine.colocate), and new weights wake it"
State = Literal["up", "doubted", "down", "loading", "asleep"]
"""`doubted`: a fault was met, and it gets no new calls before a check; `down`: checks fail, and its calls were taken away;
`loading`: it takes new weights; `asleep`: it gave its memory back, and the next weights wake it."""


class Replica:
    """A server, the calls in flight on it, and what is known of its weights."""

    def __init__(self, engine: RemoteEngine, most: int, misses: int) -> None:
        """
        Args:
            most: calls at a time.
            misses: checks that fail in a row before its calls are taken away.
        """
        self.engine = engine
        self._pausable = engine if isinstance(engine, SupportsPause) else None
        self.most = most
        self.state: State = "up"
        self.fault = ""
        self.proof: WeightsProof | None = None
        self.behind = False
        """Whether it missed the newest weights."""
        self.lock = asyncio.Lock()
        """Held by whoever puts weights in."""
        self.hurry = asyncio.Event()
        """Set where a check should not wait for its time."""
        self.calls: set[asyncio.Task[Generation]] = set()
        self.counts: Counter[str] = Counter()
        """`answers`, `faults/TYPE`, `checks_failed`, `fallen`, `recovered`, `reloaded`."""
        self.not_before = 0.0
        """By `time.monotonic`: the server said that it may not be asked sooner (`Retry-After`)."""
        self._most_misses = misses
        self._misses = 0

    @property
    def available(self) -> bool:
        """Whether it may be asked now."""
        return self.state == "up" and len(self.calls) < self.most and time.monotonic() >= self.not_before

    async def generate(self, request: Request) -> Generation:
        """One answer.

        Raises:
            EngineUnavailable: as the engine, and where the server was given up meanwhile.
            EngineError: as the engine.
        """
        task = asyncio.get_running_loop().create_task(self.engine.generate(request))
        self.calls.add(task)
        try:
            generation = await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise EngineUnavailable(
                f"{self.engine.display_name} was given up: {self.fault or 'it takes new weights'}"
            ) from None
        except EngineError as error:
            self.counts[f"faults/{type(error).__name__}"] += 1
            raise
        finally:
            self.calls.discard(task)
        self.counts["answers"] += 1
        return generation

    def mark_suspect(self, fault: str) -> None:
        """No new calls before a check went well."""
        self.fault = fault
        if self.state == "up":
            self.state = "doubted"
        self.hurry.set()

    def abort_calls(self) -> None:
        """End what is in flight here; whoever waits for it asks elsewhere."""
        for task in list(self.calls):
            task.cancel()

    async def check(self, seconds: float, latest: Callable[[], WeightsSource | None]) -> bool:
        """See whether the server may be asked, and has the weights that it should; put the right ones in where it has not.

        Args:
            seconds: deadline of a look at its health.
            latest: gives the newest weights.

        Returns:
            Whether it may be asked.
        """
        if self.state in ("loading", "asleep"):
            return False
        try:
            await self.engine.check_health(seconds)
            if self.state != "up":
                async with asyncio.timeout(10 * seconds), self.lock:
                    if self.state in ("doubted", "down"):  # an update may have come first
                        await self._check_weights(latest())
            else:
                async with asyncio.timeout(10 * seconds):
                    await self._glance()
                if self.state != "up":  # a call found a fault meanwhile, for which a glance is not enough
                    return await self.check(seconds, latest)
        except (EngineError, SyncError, TimeoutError) as error:
            self._missed(error)
            return False
        return self._well()

    def _well(self) -> bool:
        """A check went well: back, unless new weights came in between."""
        if self.state in ("doubted", "down"):
            self.state, self.fault = "up", ""
            self.counts["recovered"] += 1
            _member_log.info("%s answers again", self.engine.display_name)
        self._misses = 0
        return self.state == "up"

    def _missed(self, error: BaseException) -> None:
        self.counts["checks_failed"] += 1
        self._misses += 1
        self.fault = str(error) or f"{self.engine.display_name} did not answer a check in time"
        if self.state == "up":
            self.state = "doubted"
        if self._misses >= self._most_misses and self.state == "doubted":
            self.state = "down"
            self.counts["fallen"] += 1
            _member_log.warning("%s is given up after %d checks: %s", self.engine.display_name, self._misses, self.fault)
        if self.state == "down":
            self.abort_calls()

    async def _glance(self) -> None:
        """Of a server that is thought well: what it calls its weights, or else what they say."""
        if self.engine.label is None:
            if self.proof is not None:
                self.proof.check(await self.engine.weights_label(), self.engine.display_name)
            return
        label, name = self.engine.label, await self.engine.weights_name()
        if name != label and self.engine.label == label and self.state == "up":
            raise StaleWeights(f"{self.engine.display_name} calls its weights {name!r}, and they were {label!r}")

    async def _check_weights(self, latest: WeightsSource | None) -> None:
        await self.engine.open()
        if self.engine.asleep and latest is None:
            raise StaleWeights(f"{self.engine.display_name} {SLEEPS}")
        if self.proof is not None and not self.behind and not self.engine.asleep:
            try:
                self.proof.check(await self.engine.weights_label(), self.engine.display_name)
                return
            except StaleWeights as stale:
                if latest is None:
                    raise
                _member_log.warning("%s; it is given the weights of policy %d again", stale, latest.version)
        if latest is not None:
            await latest.send_to(self.engine)
            self.counts["reloaded"] += 1
        self.proof, self.behind = await _provable(self.engine), False

    async def start(self) -> None:
        """Look at the server for the first time.

        Raises:
            EngineError: when it cannot be used.
        """
        await self.engine.open()
        if self.engine.asleep:
            self.state, self.fault = "asleep", f"{self.engine.display_name} {SLEEPS}"
        elif self.proof is None:
            self.proof = await _provable(self.engine)

    async def drain(self) -> None:
        """End the calls in flight, with what they have where the server can."""
        if self._pausable is not None and self.calls:
            with suppress(SyncError):  # without the route for it; weights that need it will say so
                await self._pausable.pause("abort")
        if self.calls:
            await asyncio.wait(set(self.calls), timeout=DRAIN_S)
            self.abort_calls()

    async def sleep(self) -> None:
        """Have the server give its memory back; it gets no calls until new weights wake it.

        Raises:
            EngineError: when it does not; it gets no calls before a check.
        """
        async with self.lock:
            await self.drain()
            try:
                await self.engine.sleep()
            except EngineError as error:
                self.mark_suspect(str(error))
                raise
            self.state, self.fault = "asleep", f"{self.engine.display_name} {SLEEPS}"


async def _provable(engine: RemoteEngine) -> WeightsProof | None:
    """What the server's weights say; None for a kind that cannot be asked."""
    try:
        return await proof.score_canary(engine)
    except (SyncError, NotTrainable):
        return None
