"""What an episode waits for: deadlines, and places of engine calls.

`Deadline.wait` bounds every await of an episode by one timer. `CallGate` limits the calls in the
engine and says who enters next: an episode has a place only during its calls, none while its
environment works. Waiting calls enter by the age of their policy, then by their number of turns; a
new episode starts when no call waits. `EpisodePlace` is one episode's share of the gate.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Awaitable, Callable
from typing import NamedTuple, NoReturn, TypeVar

from turnwright.envs.user_code import is_interrupt
from turnwright.errors import words

T = TypeVar("T")


class Stop:
    """Flag of an ending rollout.

    Only then does a cancellation of an episode's task count; others come from user code.
    """

    asked = False


class Deadline:
    """One timer for all waits of one task.

    The timer is set once; if it fires before the current deadline, it is set again. A wait that
    ends in time costs two assignments. (`asyncio.timeout` sets and removes a timer each time, which
    costs about 8 us a wait.)
    """

    __slots__ = (
        "_fired",
        "_held",
        "_held_since",
        "_loop",
        "_outer",
        "_stop",
        "_task",
        "_timer",
        "_wait_end",
        "end",
    )

    def __init__(
        self, wall_clock: float, stop: Stop | None = None, outer: Deadline | None = None
    ) -> None:
        """Create the deadline of the running task: every wait ends `wall_clock` seconds from now.

        `stop` is the flag of the rollout that owns the task. None for a task of user code, which
        that code may cancel. `outer` is the deadline of the task that waits for this one.
        """
        task = asyncio.current_task()
        assert task is not None
        self._loop = asyncio.get_running_loop()
        self._task = task
        self._stop = stop
        self._outer = outer
        self.end = self._loop.time() + wall_clock
        """Loop time at which the last wait ends."""

        self._timer: asyncio.TimerHandle | None = None
        self._wait_end = 0.0
        """Loop time at which the current wait ends; 0 without one."""
        self._fired = False
        """Whether the timer has cancelled the task, which has not noticed yet."""
        self._held = 0
        """Number of waits that do not count."""
        self._held_since = 0.0
        """Start of the first of them."""

    async def wait(self, awaitable: Awaitable[T], seconds: float) -> T:
        """Wait for an awaitable for at most `seconds`.

        Raises `TimeoutError` when it takes longer, and cancels it. Raises `RuntimeError` when it
        cancels the task, exits the process, or raises another `BaseException`, which would end
        other episodes too.
        """
        # A timer that fires too early is set again, one that would fire too late is replaced.
        wait_end = min(self._loop.time() + seconds, self.end)
        self._wait_end = wait_end
        if self._timer is None or self._timer.when() > wait_end:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(wait_end, self._on_timer)

        try:
            result = await awaitable
            if self._stop is not None and self._task.cancelling() and not self._fired:
                await asyncio.sleep(0)  # delivers a requested cancellation that is still pending
                if not self._stop.asked:
                    self.clear()
        except BaseException as error:
            if issubclass(type(error), Exception):
                raise
            self._raise(error)
        else:
            return result
        finally:
            self._wait_end = 0.0
            if self._fired:  # the awaitable swallowed the cancellation
                self._fired = False
                self._task.uncancel()

    async def hold(self, awaitable: Awaitable[T]) -> T:
        """Wait for an awaitable outside this deadline and the outer one.

        Their ends move by the time it takes.
        """
        self._suspend()
        try:
            return await self.wait(awaitable, math.inf)
        finally:
            self._continue()

    def _suspend(self) -> None:
        if self._outer is not None:
            self._outer._suspend()
        if not self._held:
            self._held_since = self._loop.time()
        self._held += 1

    def _continue(self) -> None:
        if self._outer is not None:
            self._outer._continue()
        self._held -= 1
        if self._held:
            return
        seconds = self._loop.time() - self._held_since
        self.end += seconds
        if self._wait_end:
            self._wait_end += seconds
            if self._timer is None:  # it fired meanwhile
                self._timer = self._loop.call_at(self._wait_end, self._on_timer)

    def _raise(self, error: BaseException) -> NoReturn:
        """Raise the substitute of an exception that is not an `Exception`."""
        fired = self._fired
        self._fired = False
        if fired:
            self._task.uncancel()
        if self.passes(error):
            raise error

        self.clear()
        if type(error) is not asyncio.CancelledError:
            raise RuntimeError(f"raised {words(error, repr)}") from error
        if fired:
            raise TimeoutError from None
        raise RuntimeError("it was cancelled from within") from None

    def passes(self, error: BaseException) -> bool:
        """Return whether an exception ends the rollout: Ctrl-C, its cancellation, a discarded
        coroutine."""
        kind = type(error)
        if issubclass(kind, asyncio.CancelledError):
            return bool(self._task.cancelling()) if self._stop is None else self._stop.asked
        if issubclass(kind, GeneratorExit):
            return not self._runs()
        return issubclass(kind, KeyboardInterrupt) and is_interrupt(error)

    def clear(self) -> None:
        """Clear cancellations requested by user code."""
        while self._stop is not None and self._task.cancelling():
            self._task.uncancel()

    def _runs(self) -> bool:
        try:
            return asyncio.current_task() is self._task
        except RuntimeError:
            return False

    @property
    def expired(self) -> bool:
        """Whether the wall clock has run out."""
        return self._loop.time() >= self.end

    def extend(self, seconds: float) -> None:
        """Set the end of all waits to `seconds` from now."""
        self.end = self._loop.time() + seconds

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        if self._wait_end == 0.0 or self._held:
            return
        if self._loop.time() >= self._wait_end:
            self._fired = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_at(self._wait_end, self._on_timer)


class _Waiter(NamedTuple):
    """A call, or the start of an episode, that waits; ordered by the first three fields."""

    version: int
    turns: int
    """Negative number of turns before the call."""
    number: int
    future: asyncio.Future[None]


class CallGate:
    """Places of engine calls.

    It limits concurrent calls, and holds those of training while something else needs the engine.
    """

    def __init__(self, places: int, episodes: int | None = None) -> None:
        """Admit `places` concurrent calls, and start episodes while fewer are alive than
        `episodes`; None is unlimited."""
        self._places = places
        self._most_alive = episodes
        self._ahead = places // 4
        """Episodes that start while every place is taken, so that their environments are ready
        when one is free."""

        self.calls = 0
        """Calls in the engine."""
        self.training_calls = 0
        """Calls of training in the engine."""
        self.starting = 0
        """Episodes that have made no call yet."""
        self.alive = 0
        """Episodes that have started and not ended."""

        # What waits, by whether it is of training: calls, and episodes to start.
        self._calls: dict[bool, list[_Waiter]] = {True: [], False: []}
        self._starts: dict[bool, list[_Waiter]] = {True: [], False: []}
        self._numbers = 0
        """Number of waiters so far; the last key of their order."""
        self._announced = 0
        """Episodes of training that are about to wait for their start."""

        self._held = False
        self._watchers: list[Callable[[], None]] = []
        self._idle: asyncio.Future[None] | None = None
        """Has a result when no call of training is in the engine."""
        self._free_waiter: asyncio.Future[None] | None = None
        """Has a result when a new episode of training would start at once."""

    @property
    def held(self) -> bool:
        """Whether the calls of training are held."""
        return self._held

    def watch(self, changed: Callable[[], None]) -> None:
        """Call a function when the calls of training are held, and when they continue."""
        self._watchers.append(changed)

    def _hold(self, held: bool) -> None:
        self._held = held
        for changed in self._watchers:
            changed()

    def announce(self, episodes: int) -> None:
        """Count episodes of training that are about to wait for their start.

        A negative number takes them back.
        """
        self._announced += episodes
        if episodes < 0:
            self._admit()

    async def wait_free(self) -> None:
        """Wait until a new episode of training would start at once."""
        while not self._is_free():
            self._free_waiter = self._free_waiter or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._free_waiter)

    def _is_free(self) -> bool:
        if self._held or self._announced or self._starts[True]:
            return False
        return self._may_start()

    async def hold(self) -> None:
        """Hold the calls of training, and wait until none of them is in the engine."""
        self._hold(True)
        while self.training_calls:
            self._idle = self._idle or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)

    def hold_new(self) -> None:
        """Hold the calls of training that are not in the engine yet."""
        self._hold(True)

    def resume(self) -> None:
        """Let the calls of training continue."""
        self._hold(False)
        self._admit()

    def _may_start(self) -> bool:
        if self.calls + self.starting >= self._places + self._ahead:
            return False
        if self._most_alive is not None and self.alive >= self._most_alive:
            return False
        return self._next(self._calls) is None

    def _wait(self, heap: list[_Waiter], version: int, turns: int) -> _Waiter:
        self._numbers += 1
        future = asyncio.get_running_loop().create_future()
        waiter = _Waiter(version, -turns, self._numbers, future)
        heapq.heappush(heap, waiter)
        return waiter

    def _next(self, heaps: dict[bool, list[_Waiter]]) -> tuple[_Waiter, bool] | None:
        """Return the first waiter that is not held, and whether it is of training.

        Cancelled ones are dropped.
        """
        first: tuple[_Waiter, bool] | None = None
        for training, heap in heaps.items():
            while heap and heap[0].future.done():
                heapq.heappop(heap)
            if not heap or (training and self._held):
                continue
            if first is None or heap[0][:3] < first[0][:3]:
                first = heap[0], training
        return first

    def _admit(self) -> None:
        """Admit waiting calls to free places, then start episodes."""
        while self.calls < self._places:
            next_call = self._next(self._calls)
            if next_call is None:
                break
            waiter, training = next_call
            heapq.heappop(self._calls[training])
            self._take(training)
            waiter.future.set_result(None)

        while self._may_start():
            next_start = self._next(self._starts)
            if next_start is None:
                break
            waiter, training = next_start
            heapq.heappop(self._starts[training])
            self.starting += 1
            self.alive += 1
            waiter.future.set_result(None)

        if self._free_waiter is not None and self._is_free():
            self._free_waiter.set_result(None)
            self._free_waiter = None

    def _take(self, training: bool) -> None:
        self.calls += 1
        self.training_calls += training

    def leave(self, training: bool) -> None:
        """Give up the place of a call."""
        self.calls -= 1
        self.training_calls -= training
        if self._idle is not None and not self.training_calls:
            self._idle.set_result(None)
            self._idle = None

        # Most calls leave with nobody waiting.
        calls_wait = self._calls[True] or self._calls[False]
        starts_wait = self._starts[True] or self._starts[False]
        if calls_wait or starts_wait or self._free_waiter:
            self._admit()

    def try_enter(self, training: bool) -> bool:
        """Take a place for a call if one is free and no call waits."""
        if self.calls >= self._places or (training and self._held):
            return False
        if (self._calls[True] or self._calls[False]) and self._next(self._calls):
            return False
        self._take(training)
        return True

    async def enter(self, training: bool, version: int, turns: int) -> None:
        """Wait for the place of a call."""
        waiter = self._wait(self._calls[training], version, turns)
        try:
            await waiter.future
        except asyncio.CancelledError:
            # It was admitted and cancelled at once: its place is another's.
            if waiter.future.done() and not waiter.future.cancelled():
                self.leave(training)
            raise

    async def start(self, training: bool, version: int) -> None:
        """Wait until an episode may start."""
        if not (training and self._held) and not self._starts[training] and self._may_start():
            self.starting += 1
            self.alive += 1
            return

        waiter = self._wait(self._starts[training], version, 0)
        try:
            await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled():
                self.end(starting=True)
            raise

    def first_call(self) -> None:
        """Count an episode as started."""
        self.starting -= 1

    def end(self, *, starting: bool) -> None:
        """Count an episode as ended; `starting` if it made no call."""
        self.starting -= starting
        self.alive -= 1
        self._admit()


class EpisodePlace:
    """An episode's share of the gate."""

    def __init__(self, gate: CallGate, training: bool, version: int) -> None:
        self._gate = gate
        self._training = training
        self._version = version
        self._starting = True
        """Whether it has made no call yet."""
        self.waiting = 0
        """Number of its calls that wait for a place."""

    async def start(self) -> None:
        """Wait until the episode may start."""
        await self._gate.start(self._training, self._version)

    def try_enter(self) -> bool:
        """Take a place for a call if one is free and no call waits."""
        if self._starting:
            self._starting = False
            self._gate.first_call()
        return self._gate.try_enter(self._training)

    async def enter(self, turns: int, deadline: Deadline) -> None:
        """Wait outside the deadline for the place of a call after `turns` turns.

        `try_enter` comes first.
        """
        self.waiting += 1
        try:
            await deadline.hold(self._gate.enter(self._training, self._version, turns))
        finally:
            self.waiting -= 1

    def leave(self) -> None:
        """Give up the place of a call."""
        self._gate.leave(self._training)

    def end(self) -> None:
        """End the episode."""
        self._gate.end(starting=self._starting)
