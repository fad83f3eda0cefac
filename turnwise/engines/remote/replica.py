"""One server of a fleet: health, weights, recovery."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from turnwise.engines.base import Generation, Request, SupportsPause
from turnwise.engines.remote.base import RemoteEngine, WeightsLabel
from turnwise.engines.remote.weight_sync import WeightsSource
from turnwise.errors import EngineError, EngineUnavailable, NotTrainable, StaleWeights, SyncError

_proof_log = logging.getLogger(__name__)

Expect = Callable[[Sequence[int]], Sequence[float]]
"""Given ids, the trainer's own log p(ids[i] | ids[:i]) for i from 1 on, at temperature 1."""


@dataclass(frozen=True, slots=True)
class WeightsProof:
    """What a server said of its weights when they were known to be right."""

    label: WeightsLabel
    noise: float
    """Largest difference between two askings of the same weights, nats."""

    def max_difference(self, other: WeightsLabel) -> float:
        """Largest difference of the scores, nats; infinite where they cannot be compared."""
        mine, theirs = self.label.scores, other.scores
        if len(mine) != len(theirs):
            return float("inf")
        return max((abs(a - b) for a, b in zip(mine, theirs, strict=True)), default=0.0)

    def check(self, now: WeightsLabel, who: str) -> None:
        """See that the server still has these weights.

        Raises:
            StaleWeights: when it has others.
        """
        if now.name != self.label.name:
            raise StaleWeights(f"{who} calls its weights {now.name!r}, and they were {self.label.name!r}")
        far = self.max_difference(now)
        if far > max(10 * self.noise, 1e-6):
            raise StaleWeights(
                f"{who} has other weights than before under the same name: its logprobs of known ids moved by up to {far:.3g} "
                f"nats, and between two askings by {self.noise:.1g}"
            )


async def score_canary(engine: RemoteEngine) -> WeightsProof:
    """Ask a server twice for what its weights say.

    Raises:
        EngineError: when it does not say.
    """
    first, second = await engine.weights_label(), await engine.weights_label()
    return WeightsProof(second, WeightsProof(first, 0.0).max_difference(second))


@dataclass(frozen=True, slots=True)
class ExpectedScores:
    """What the trainer itself says of `CANARY` with its new weights."""

    scores: tuple[float, ...]
    moved: float
    """Largest difference to what it said of the weights before, nats; 0 for the first."""


async def verify_weights_arrived(
    engine: RemoteEngine, before: WeightsProof | None, *, changed: bool, wanted: ExpectedScores | None, tolerance: float
) -> WeightsProof:
    """See that weights that a server was told to read are the ones that answer.

    Args:
        before: of the weights that it had.
        changed: whether the new ones differ from those.
        wanted: what the trainer itself says; without it, only that the server's answers changed is shown.
        tolerance: most difference to what the trainer says, nats.

    Raises:
        SyncError: when they did not arrive, or only in part.
    """
    now = await score_canary(engine)
    if wanted is not None:
        far = WeightsProof(WeightsLabel(None, wanted.scores), 0.0).max_difference(now.label)
        if not far <= tolerance:
            raise SyncError(
                f"{engine.display_name} says yes to the weights of policy {engine.version} and samples from others: its "
                f"logprobs of "
                f"known ids are up to {far:.3g} nats off the trainer's (at most {tolerance:g} is rounding)"
            )
        if before is not None and wanted.moved > tolerance / 10 and before.max_difference(now.label) == 0.0:
            raise SyncError(
                f"{engine.display_name} says yes to the weights of policy {engine.version} and answers to the last bit as "
                f"before, while "
                f"the trainer's logprobs of known ids moved by {wanted.moved:.3g} nats: they did not arrive"
            )
        return now
    if not changed or before is None:
        return now
    far = before.max_difference(now.label)
    if far == 0.0:
        raise SyncError(
            f"{engine.display_name} says yes to the weights of policy {engine.version} and answers to the last bit as "
            f"before: they did "
            "not arrive (or the change is too small for the type that it computes in; then give expected_logprobs=)"
        )
    if far <= before.noise:
        _proof_log.warning(
            "%s: new weights change its logprobs by %.2g nats, which is within its noise", engine.display_name, far
        )
        engine.counts["updates_unproven"] += 1
    return now


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
        return await score_canary(engine)
    except (SyncError, NotTrainable):
        return None
