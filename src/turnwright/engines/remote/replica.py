"""One server of a fleet: its calls, its health, and the proof of its weights.

A `Replica` has the state that says whether the server may be called. `Replica.check` finds faults
and ends them, `Replica.update` brings new weights and verifies by their scores that they arrived.
Which server a call goes to, and when checks run, is decided in `Fleet`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from turnwright.engines.protocols import Generation, Request, SupportsPause
from turnwright.engines.remote.remote_engine import DRAIN_S, EngineLoad, RemoteEngine
from turnwright.engines.remote.response import WeightsLabel
from turnwright.engines.remote.weight_sync import WeightsSource
from turnwright.errors import EngineError, EngineUnavailable, NotTrainable, StaleWeights, SyncError

_log = logging.getLogger(__name__)

LogprobFunction = Callable[[Sequence[int]], Sequence[float]]
"""Function of ids that returns the trainer's log p(ids[i] | ids[:i]) for i >= 1, at temperature
1."""


@dataclass(frozen=True, slots=True)
class WeightsProof:
    """Scores of a server's weights, taken when the weights were known to be right."""

    label: WeightsLabel
    noise: float
    """Largest difference between two measurements of the same weights, in nats."""

    def check(self, label: WeightsLabel, who: str) -> None:
        """Raise `StaleWeights` when the server has other weights than these."""
        if label.name != self.label.name:
            raise StaleWeights(
                f"{who} reports the weights {label.name!r} instead of {self.label.name!r}"
            )
        difference = self.label.max_difference(label)
        if difference > max(10 * self.noise, 1e-6):
            raise StaleWeights(
                f"{who} has other weights under the same name: its logprobs of known ids moved by "
                f"up to {difference:.3g} nats; repeated measurements differ by {self.noise:.1g}"
            )


async def score_canary(engine: RemoteEngine, noise: float | None = None) -> WeightsProof:
    """Score the known ids on a server; twice unless the noise of its scores is known."""
    label = await engine.weights_label()
    if noise is None:
        again = await engine.weights_label()
        noise = label.max_difference(again)
    return WeightsProof(label, noise)


@dataclass(frozen=True, slots=True)
class ExpectedScores:
    """The trainer's own scores of the known ids for its new weights."""

    label: WeightsLabel
    moved: float
    """Largest difference from its scores of the previous weights, in nats; 0 for the first
    weights."""


@dataclass(frozen=True, slots=True)
class LatestWeights:
    """The latest weights of a fleet, which a server that joins or comes back gets and must sample
    from."""

    source: WeightsSource | None
    """None before the first update."""
    scores: WeightsLabel | None = None
    """Scores of the known ids that prove them: the trainer's, or a proven server's of the same
    kind."""
    tolerance: float = 1e-3
    """Maximum difference from those, in nats."""

    def check(self, proof: WeightsProof | None, who: str) -> None:
        """Raise `StaleWeights` when a server samples from other weights.

        Without scores on both sides nothing is known.
        """
        if self.scores is None or proof is None:
            return
        difference = self.scores.max_difference(proof.label)
        if not difference <= self.tolerance:
            raise StaleWeights(
                f"{who} has other weights than the fleet: its logprobs of known ids differ by up "
                f"to {difference:.3g} nats (tolerance {self.tolerance:g})"
            )


FULL = 0.95
"""Fraction of a server's cache over which it gets fewer calls."""
SPARE = 0.85
"""Fraction of a server's cache under which it may get more calls."""
ANSWER_S = 1.0
"""Seconds for interrupted calls to arrive after a pause; calls that still wait on the server have
sampled nothing."""
SLEEPING = "is asleep (engine.colocate); new weights wake it"
State = Literal["up", "doubted", "down", "loading", "asleep", "left"]
"""`doubted`: a fault occurred or it joined, no calls before a check; `down`: checks fail, calls
were moved; `loading`: a weight update runs; `asleep`: memory released until the next weights;
`left`: removed from the fleet."""


class Replica:
    """A server of a fleet, its calls in flight, and the state of its weights."""

    def __init__(self, engine: RemoteEngine, most: int, misses: int) -> None:
        """Run at most `most` calls concurrently; after `misses` failed checks in a row they move to
        other servers."""
        self.engine = engine
        self._pausable = engine if isinstance(engine, SupportsPause) else None
        self.most = most
        """Maximum number of concurrent calls."""
        self.limit = most
        """Maximum number of calls with which it takes new sessions; it follows the server's reports
        of its load."""

        self.state: State = "up"
        self.fault = ""
        self.proof: WeightsProof | None = None
        self.outdated = False
        """Whether it missed the latest weights."""
        self.lock = asyncio.Lock()
        """Held during weight updates."""
        self.check_now = asyncio.Event()
        """Set to run the next check immediately."""

        self.calls: set[asyncio.Task[Any]] = set()
        """Tasks with a call in flight."""
        self._ended: set[asyncio.Task[Any]] = set()
        """Those whose calls were ended here."""
        self.counts: Counter[str] = Counter()
        """`answers`, `faults/TYPE`, `checks_failed`, `fallen`, `recovered`, `reloaded`."""
        self.not_before = 0.0
        """Earliest time of the next call (`time.monotonic`), from the server's `Retry-After`."""
        self._most_misses = misses
        self._misses = 0

    @property
    def available(self) -> bool:
        """Whether it may take a call now."""
        has_room = self.state == "up" and len(self.calls) < self.most
        return has_room and time.monotonic() >= self.not_before

    @property
    def accepts_sessions(self) -> bool:
        """Whether it may take a call of a new session now."""
        return len(self.calls) < self.limit and self.available

    @property
    def business(self) -> float:
        """Calls in flight, as a fraction of `limit`."""
        return len(self.calls) / self.limit

    def adapt(self, load: EngineLoad) -> None:
        """Adjust `limit` to the server's load."""
        calls = len(self.calls)
        used = min(self.limit, calls)
        if load.waiting > 1 + load.running // 16:
            # A queue speeds nothing up.
            self.limit = max(1, self.limit // 2, used - load.waiting)
        elif load.cache is not None and load.cache > FULL:
            # A full cache evicts what episodes come back to.
            self.limit = max(1, used * 7 // 8)
        elif calls >= self.limit and (load.cache is None or load.cache < SPARE):
            self.limit = min(self.most, self.limit + max(1, self.limit // 8))

    async def generate(self, request: Request) -> Generation:
        """Sample one reply.

        Raises as the engine, and `EngineUnavailable` also when the call was moved off this server.
        """
        # In the caller's task: one per call would cost a tenth of the request. Its cancellations
        # are distinguished as `asyncio.timeout` does.
        task = asyncio.current_task()
        assert task is not None
        cancelled = task.cancelling()
        self.calls.add(task)

        try:
            generation = await self.engine.generate(request)
        except asyncio.CancelledError:
            if task not in self._ended or task.uncancel() > cancelled:
                raise
            reason = self.fault or "a weight update started"
            raise EngineUnavailable(
                f"{self.engine.display_name} ended the call: {reason}"
            ) from None
        except EngineError as error:
            self.counts[f"faults/{type(error).__name__}"] += 1
            raise
        finally:
            self.calls.discard(task)
            self._ended.discard(task)

        self.counts["answers"] += 1
        return generation

    def mark_suspect(self, fault: str) -> None:
        """Stop new calls until a check succeeds."""
        self.fault = fault
        if self.state == "up":
            self.state = "doubted"
        self.check_now.set()

    def abort_calls(self) -> None:
        """Cancel the calls in flight; their callers retry on other servers."""
        for task in self.calls - self._ended:
            self._ended.add(task)
            task.cancel()

    async def wait_for_calls(self, seconds: float) -> None:
        """Wait until the calls in flight now are over, for at most some seconds."""
        calls = set(self.calls)
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while calls & self.calls and loop.time() < end:
            await asyncio.sleep(0.005)

    async def check(self, seconds: float, latest: Callable[[], LatestWeights]) -> bool:
        """Check health (within `seconds`) and weights, and replace missing ones by the latest.

        Return whether the server may take calls.
        """
        if self.state in ("loading", "asleep", "left"):
            return False
        try:
            await self.engine.check_health(seconds)
            if self.state != "up":
                await self._check_completely(seconds, latest)
            else:
                async with asyncio.timeout(10 * seconds):
                    await self._check_quickly()
                    load = await self.engine.load()
                    if load is not None:
                        self.adapt(load)
                if self.state != "up":  # a call failed meanwhile, which needs the full check
                    return await self.check(seconds, latest)
        except (EngineError, SyncError, TimeoutError) as error:
            self._count_failed_check(error)
            return False

        if self.state in ("doubted", "down"):  # no update or sleep started during the check
            self.state = "up"
            self.fault = ""
            self.counts["recovered"] += 1
            _log.info("%s recovered", self.engine.display_name)
        self._misses = 0
        return self.state == "up"

    def _count_failed_check(self, error: Exception) -> None:
        """Take calls off the server, and move those in flight after too many failed checks."""
        self.counts["checks_failed"] += 1
        self._misses += 1
        self.fault = str(error) or f"{self.engine.display_name} did not respond to a check in time"
        if self.state == "up":
            self.state = "doubted"
        if self._misses >= self._most_misses and self.state == "doubted":
            self.state = "down"
            self.counts["fallen"] += 1
            _log.warning(
                "%s is down after %d failed checks: %s",
                self.engine.display_name,
                self._misses,
                self.fault,
            )
        if self.state == "down":
            self.abort_calls()

    async def _check_completely(self, seconds: float, latest: Callable[[], LatestWeights]) -> None:
        """Check the weights of a server that had a fault, until they are the latest."""
        async with self.lock:
            while self.state in ("doubted", "down"):  # an update may have finished first
                checked = latest()
                await self._check_weights(checked, 10 * seconds)
                if latest().source is checked.source:
                    break
                self.outdated = True  # an update of the others finished meanwhile

    async def _check_quickly(self) -> None:
        """Check the weights of a healthy server by name, or by scores if it has no names."""
        label = self.engine.label
        if label is None:
            if self.proof is not None:
                self.proof.check(await self.engine.weights_label(), self.engine.display_name)
            return
        name = await self.engine.weights_name()
        if name != label and self.engine.label == label and self.state == "up":
            raise StaleWeights(
                f"{self.engine.display_name} reports the weights {name!r} instead of {label!r}"
            )

    async def _check_weights(self, latest: LatestWeights, seconds: float) -> None:
        """Check the weights, each request within `seconds`, and send the latest where they are
        missing."""
        source = latest.source
        async with asyncio.timeout(seconds):
            await self.engine.open()
        if self.engine.asleep and source is None:
            raise StaleWeights(f"{self.engine.display_name} {SLEEPING}")

        # It may still have the weights that it had before its fault.
        if self.proof is not None and not self.outdated and not self.engine.asleep:
            try:
                async with asyncio.timeout(seconds):
                    self.proof.check(await self.engine.weights_label(), self.engine.display_name)
                return
            except StaleWeights as stale:
                if source is None:
                    raise
                _log.warning("%s; sending the weights of policy %d again", stale, source.version)

        if source is not None:
            # This has deadlines of its own: loading takes minutes.
            await source.send_to(self.engine)
            self.counts["reloaded"] += 1
        async with asyncio.timeout(seconds):
            proof = await _score_if_supported(self.engine)
        latest.check(proof, self.engine.display_name)
        self.proof = proof
        self.outdated = False

    async def start(self) -> None:
        """Check the server for the first time."""
        await self.engine.open()
        if self.engine.asleep:
            self.state = "asleep"
            self.fault = f"{self.engine.display_name} {SLEEPING}"
        elif self.proof is None:
            self.proof = await _score_if_supported(self.engine)

    async def update(
        self,
        source: WeightsSource,
        *,
        changed: bool,
        expected: ExpectedScores | None,
        tolerance: float,
    ) -> None:
        """Send weights to the server and check that it samples from them.

        Its scores are compared with the trainer's (`expected`), within a tolerance in nats; without
        those only a change of its scores is checked, if the weights changed.
        """
        engine = self.engine
        self.state = "loading"
        async with self.lock:
            previous = self.proof
            if not source.is_adapter:
                await self.drain()
            await source.send_to(engine)
            if source.is_adapter:
                self.abort_calls()  # of the adapter before, where the server could not end them

            proof = await score_canary(engine, None if previous is None else previous.noise)
            if expected is not None:
                self._check_expected(proof, previous, expected, tolerance)
            elif changed and previous is not None:
                self._check_changed(proof, previous)
            self.proof = proof

    def _check_expected(
        self,
        proof: WeightsProof,
        previous: WeightsProof | None,
        expected: ExpectedScores,
        tolerance: float,
    ) -> None:
        """Raise `SyncError` unless a server's scores are the trainer's, and moved if those did."""
        difference = expected.label.max_difference(proof.label)
        if not difference <= tolerance:
            raise SyncError(
                f"{self._accepted} samples from others: its logprobs of known ids differ from "
                f"the trainer's by up to {difference:.3g} nats (tolerance {tolerance:g})"
            )
        stands_still = previous is not None and previous.label.max_difference(proof.label) == 0.0
        if stands_still and expected.moved > tolerance / 10:
            raise SyncError(
                f"{self._accepted} its logprobs of known ids are bit-identical to before, while "
                f"the trainer's moved by {expected.moved:.3g} nats: the weights did not arrive"
            )

    def _check_changed(self, proof: WeightsProof, previous: WeightsProof) -> None:
        """Raise `SyncError` if new weights left a server's scores as they were."""
        moved = previous.label.max_difference(proof.label)
        if moved == 0.0:
            raise SyncError(
                f"{self._accepted} its logprobs of known ids are bit-identical to before: the "
                "weights did not arrive (or the change is too small for the server's dtype; then "
                "pass expected_logprobs=)"
            )
        if moved <= previous.noise:
            _log.warning(
                "%s: new weights change its logprobs by %.2g nats, which is within its noise",
                self.engine.display_name,
                moved,
            )
            self.engine.counts["updates_unproven"] += 1

    @property
    def _accepted(self) -> str:
        """First words of an error of an update."""
        engine = self.engine
        return f"{engine.display_name} accepted the weights of policy {engine.version} but"

    async def drain(self) -> None:
        """End the calls in flight, keeping their ids where the server supports it, unless responses
        name their weights.

        Where they do, the update itself interrupts calls. A call that reaches the paused server
        waits there and goes on with the new weights; waiting for it here would take all of a
        time-out.
        """
        if not self.calls or self.engine.names_weights:
            return
        seconds = DRAIN_S
        if self._pausable is not None:
            with suppress(SyncError):  # a server without this route; updates that need it report it
                await self._pausable.pause("abort")
                seconds = ANSWER_S
        if self.calls:
            await self.wait_for_calls(seconds)
            self.abort_calls()

    async def sleep(self) -> None:
        """Make the server release its memory.

        It gets no calls until new weights wake it, or, if this fails, a check.
        """
        async with self.lock:
            await self.drain()
            try:
                await self.engine.sleep()
            except EngineError as error:
                self.mark_suspect(str(error))
                raise
            self.state = "asleep"
            self.fault = f"{self.engine.display_name} {SLEEPING}"


async def _score_if_supported(engine: RemoteEngine) -> WeightsProof | None:
    """Score the server's weights; return None for a kind without scores."""
    try:
        return await score_canary(engine)
    except (SyncError, NotTrainable):
        return None
