"""How sampling and training overlap, by schedule, on a clock that jumps: work W3.

The shipped stream, its places of calls, the scheduler and the batches of each mode run on an event
loop whose clock jumps to the next timer. The engine and the environment only sleep, and so does the
trainer; nothing else takes time on that clock.

W3: 64 calls at a time (C), 2 ms per token, 256 episodes a step in 32 groups of 8, 20 steps. A
reply has logN(64, 0.5) tokens, an episode logN(6, 0.9) turns, at most 64, each drawn by itself
(the first number is the median). The environment takes 50 ms after each reply. Training takes 2
s a step, a fixed assumption: 0.4 of the 5.1 s that an engine without a pause needs for a batch.
A weight update takes no time.

Keys of the last line, JSON. The outer `ratio_to_list` and `ratio_to_bound` are those of `sync`, the
rest those of `async` at staleness 2; `modes` has all of them for each mode. Times are of the run
until its last step is trained, the end of which no new group overlaps.

ratio_to_list   seconds that the steps waited for their batches, over those of list scheduling: all
                episodes of a batch begin at once, each call takes the first free place in the order
                of arrival, the next batch begins after the last episode (`ratio_to_list_max`: of
                the worst batch)
ratio_to_bound  the same over the bound of each batch: max(its engine time / C, its longest episode
                played alone)
busy            engine time of all calls / (C x time of the run)
useful          engine time of trained groups / (C x time of the run)
ideal_busy      highest possible `useful` of those groups: their engine time / (C x shortest
                possible run), which is engine time / C, plus the time of the trainer: of every step
                where it and the engine take turns (sync, hold), else of the last step
share_of_ideal  busy / ideal_busy
share_filled    the same up to the entry of the last group: busy part of the time in which the
                engine may sample
lag_mean        mean over trained groups of updates between entry and training
lag_max         largest of them
turns_sampled   mean turns of the episodes of all groups that entered, as if discarded ones were
                played to their end
turns_trained   mean turns of the episodes of trained groups
ks              Kolmogorov-Smirnov distance of the two distributions of turns
ks_discarded    the same of trained and discarded groups, whose samples are independent if
                discarding does not depend on length; `ks_1pct` is what chance exceeds in 1% of
                cases (both 0 where nothing was discarded)
unbiased        whether turns_trained is within 1% of turns_sampled, and ks_discarded at most
                ks_1pct
discarded       groups that entered and were not trained

The last part plays real Hop tasks (solved by Hop's own player, one to three look-ups, two to four
turns) with W3's replies and environment, 4 groups of 8 a step, and prints the share of each number
of look-ups among groups that entered and were trained.

    python benchmarks/scheduling.py            # two minutes; --steps 4 for a look
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import math
import selectors
import statistics
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any

import turnwright as tw
from turnwright.engines import Generation
from turnwright.envs.builtin.hop import Hop
from turnwright.renderers import byte_renderer
from turnwright.rollouts import Rollout, make_episode_specs
from turnwright.rollouts.group_scheduler import BatchScheduler
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright.training.batches import Batch, Batches, StepBatches, StreamBatches, StreamRecord

PLACES, GROUPS, SAMPLES = 64, 32, 8
TOKEN_S, ENV_S, TRAIN_S = 0.002, 0.05, 2.0
SEED = 0


@cache
def replies(group: int, sample: int) -> tuple[int, ...]:
    """Tokens of each reply of an episode."""
    rng = Random(f"{SEED}/{group}/{sample}")
    turns = min(64, max(1, round(rng.lognormvariate(math.log(6), 0.9))))
    return tuple(max(2, round(rng.lognormvariate(math.log(64), 0.5))) for _ in range(turns))


class JumpingSelector(selectors.DefaultSelector):
    """Does not wait for the next timer: moves the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(None if timeout is None else 0)
        if not ready and timeout is not None:
            self.now += max(0.0, timeout)
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """Event loop on the clock of its selector."""

    def __init__(self) -> None:
        self._jumping = JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


class Sleeper:
    """Engine that sleeps; a call that is interrupted has sampled the share of the reply's ids
    that its time allowed."""

    context = None
    version = 0

    def __init__(self, reply: Callable[[tw.Request], tuple[Sequence[int], float]]) -> None:
        """`reply` returns the ids of the complete reply and the seconds that one takes."""
        self._reply = reply
        self._done_s = 0.0
        self._calls: dict[asyncio.Future[None], float] = {}

    @property
    def busy(self) -> float:
        """Seconds of all calls until now."""
        now = asyncio.get_running_loop().time()
        return self._done_s + sum(now - began for began in self._calls.values())

    async def generate(self, request: tw.Request) -> Generation:
        loop = asyncio.get_running_loop()
        reply, id_s = self._reply(request)
        ids = list(reply[request.reply_position :])
        began, end = loop.time(), loop.create_future()
        timer = loop.call_later(id_s * len(ids), end.set_result, None)
        self._calls[end] = began
        try:
            await end
        finally:
            timer.cancel()
            self._done_s += loop.time() - self._calls.pop(end)
        done = min(len(ids), math.ceil((loop.time() - began) / id_s - 1e-6))
        return Generation(
            ids[:done], [-0.5] * done, "stop" if done == len(ids) else "abort", self.version
        )

    def interrupt(self) -> None:
        for end in self._calls:
            if not end.done():
                end.set_result(None)

    def release(self, session: str) -> None:
        pass

    async def close(self) -> None:
        pass


class Waits(tw.Env):
    """Environment that takes its time; a reply that ends in a full stop is the last."""

    async def reset(self, task: tw.Task, *, seed: int | None = None) -> str:
        return "go"

    async def step(self, action: tw.Action) -> tw.Step:
        await asyncio.sleep(ENV_S)
        return tw.Step("on", 0.0, action.text.endswith("."))

    async def close(self) -> None:
        pass


class SlowHop(Hop):
    """Hop that takes its time."""

    async def step(self, action: tw.Action) -> tw.Step:
        await asyncio.sleep(ENV_S)
        return await super().step(action)

    async def close(self) -> None:
        pass


RENDERER = byte_renderer()
END = min(RENDERER.stop_ids)
MORE, LAST = RENDERER.encode("a")[0], RENDERER.encode(".")[0]


def w3_reply(request: tw.Request) -> tuple[list[int], float]:
    """Reply of W3, whose text ends in a full stop in the last turn."""
    _, _, task, sample, _ = request.session.split("/")
    tokens, turn = replies(int(task), int(sample)), len(request.messages) // 2
    return [*[MORE] * (tokens[turn] - 2), LAST if turn + 1 == len(tokens) else MORE, END], TOKEN_S


def hop_reply(request: tw.Request) -> tuple[list[int], float]:
    """Reply of Hop's own player, which takes as long as one of W3."""
    ids = RENDERER.encode_reply(Hop.solver(request.messages, Random(0)))
    tokens = Random(request.seed).lognormvariate(math.log(64), 0.5)
    return ids, TOKEN_S * max(1.0, tokens) / len(ids)


class FifoScheduler(BatchScheduler):
    """For comparison: trains groups in the order in which they entered, so it waits longer."""

    def _select(self, version: int) -> list[int] | None:
        batch = list(self._open)[: self.groups]
        return batch if len(batch) == self.groups else None


class DiscardingScheduler(BatchScheduler):
    """For comparison: trains the first complete groups and drops those that would
    exceed the staleness."""

    def __init__(self, groups: int, staleness: int, *, steps: int, refill: int = 0) -> None:
        super().__init__(groups, staleness, steps=steps, refill=refill)
        self.discarded: list[int] = []

    def admit(self) -> int | None:
        planned = self.groups * min(self.version + self.staleness + 1, self.steps)
        # Further groups take the places of those that were dropped.
        if self._next - len(self.discarded) >= planned:
            return None
        group = self._next
        self._next += 1
        self._open[group] = self.version
        return group

    def _select(self, version: int) -> list[int] | None:
        batch = list(self._complete)[: self.groups]
        return batch if len(batch) == self.groups else None

    def advance(self) -> None:
        super().advance()
        late = [
            group
            for group, version in self._open.items()
            if version + self.staleness < self.version
        ]
        for group in late:
            del self._open[group]
            self._complete.pop(group, None)
        self.discarded += late


class DiscardingBatches(StreamBatches):
    """Ends the episodes of groups that were dropped."""

    async def next(self, step: int) -> Batch:
        if self._scheduler.version < step:
            self._scheduler.advance()
            assert isinstance(self._scheduler, DiscardingScheduler)
            for group in self._scheduler.discarded:
                self._finished.pop(group, None)
                if group in self._running:
                    self._running[group].cancel()
        return await super().next(step)


class Schedule:
    """One run of a mode: its batches from the shipped code, a trainer that sleeps."""

    def __init__(
        self,
        mode: str,
        staleness: int = 0,
        *,
        steps: int,
        scheduler: type[BatchScheduler] = BatchScheduler,
        hold: bool = False,
        groups: int = GROUPS,
        env: type[tw.Env] = Waits,
        tasks: Callable[[int], tw.Task] = lambda group: tw.Task("go", id=str(group)),
        reply: Callable[[tw.Request], tuple[Sequence[int], float]] = w3_reply,
        train_s: float = TRAIN_S,
    ) -> None:
        self.mode, self.staleness, self.steps, self.scheduler, self.hold = (
            mode,
            staleness,
            steps,
            scheduler,
            hold,
        )
        self.groups, self.train_s = groups, train_s
        self._env, self._tasks = env, tasks
        self.engine = Sleeper(reply)
        self._group_of: dict[str, int] = {}
        self.entered: dict[int, int] = {}
        """Policy version at the entry of each group."""
        self.trained: list[list[int]] = []
        self.lags: list[int] = []
        self.waits: list[float] = []
        """Seconds that each step waited for its batch."""
        self.time = self.used = 0.0
        """Seconds of the run, and of its engine calls until then."""
        self.filled: tuple[float, float, int] = (0.0, 0.0, 0)
        """The same until the last group entered, and the trained steps."""

    def step(self, number: int) -> list[Any]:
        """As `TaskPlan.step`: the groups of a nominal step."""
        numbers = range(number * self.groups, (number + 1) * self.groups)
        found = [SimpleNamespace(group=group, task=self._tasks(group)) for group in numbers]
        self._group_of |= {choice.task.id: choice.group for choice in found}
        return found

    def observe(self, step: int, found: Sequence[Any]) -> None:
        """As `TaskPlan.observe`: every task comes once, so nothing is learned of it."""

    def tied_groups(self, groups: Any) -> frozenset[str]:
        """Return none: every group has signal."""
        return frozenset()

    refill = 0

    def run(self) -> Schedule:
        """Run to the end on a clock of its own."""
        with asyncio.Runner(loop_factory=JumpingLoop) as runner:
            runner.run(self._run())
        return self

    async def _run(self) -> None:
        loop, version = asyncio.get_running_loop(), 0
        limits = tw.Limits(
            turns=64,
            turn_tokens=10**4,
            episode_tokens=10**6,
            wall_clock_s=1e5,
            generate_s=1e5,
            env_s=1e5,
            context=10**6,
        )
        rollout = Rollout(
            self.engine,
            RENDERER,
            RolloutSettings(limits=limits, concurrency=PLACES, sanity="off", watchdog_s=600.0),
        )
        async with rollout.stream() as stream:

            def play(choices: Sequence[Any], step: int) -> Awaitable[list[tw.Trajectory]]:
                episodes = []
                self.filled = loop.time(), self.engine.busy, len(self.waits)
                for choice in choices:
                    self.entered.setdefault(choice.group, version)
                    episodes += make_episode_specs(
                        self._env, [choice.task], phase="train", step=step, samples=SAMPLES
                    )
                return stream.submit(episodes, training=True, min_version=version)

            batches = self._batches(play, stream.gate)
            try:
                for step in range(self.steps):
                    began = loop.time()
                    await batches.settle()
                    version = self.engine.version = step
                    stream.gate.resume()
                    batch = await batches.next(step)
                    self.waits.append(loop.time() - began)
                    assert not (errors := [t.error for t in batch.trajectories if t.error]), errors[
                        :2
                    ]
                    groups = sorted({self._group_of[t.task.id] for t in batch.trajectories})
                    self.trained.append(groups)
                    self.lags += [step - self.entered[group] for group in groups]
                    if self.hold:
                        stream.gate.hold_new()
                        while stream.gate.training_calls:
                            self.engine.interrupt()
                            await asyncio.sleep(0)
                    await asyncio.sleep(self.train_s)
                self.time, self.used = loop.time(), self.engine.busy
            finally:
                await batches.close()

    def _batches(self, play: Any, gate: Any) -> Batches:
        plan: Any = self

        async def progress(work: Awaitable[Any]) -> Any:
            return await work

        if self.mode != "async":
            ahead_until = self.steps if self.mode == "one_step_off" else 0
            return StepBatches(plan, plan, play, progress, ahead_until=ahead_until)
        scheduler = self.scheduler(self.groups, self.staleness, steps=self.steps)
        source = DiscardingBatches if isinstance(scheduler, DiscardingScheduler) else StreamBatches
        return source(
            scheduler, plan, plan, play, progress, gate, lambda event: None, StreamRecord()
        )


def engine_s(group: int) -> float:
    """Return the engine time of a group of W3."""
    return TOKEN_S * sum(sum(replies(group, sample)) for sample in range(SAMPLES))


def list_schedule(groups: Sequence[int]) -> float:
    """Return the time of a batch by list scheduling: every call takes the first free place in
    the order of arrival."""
    episodes = [replies(group, sample) for group in groups for sample in range(SAMPLES)]
    number, end = count(), 0.0
    free = [0.0] * PLACES
    arrivals = [(0.0, next(number), episode, 0) for episode in episodes]
    while arrivals:
        arrival, _, episode, turn = heapq.heappop(arrivals)
        done = max(arrival, heapq.heappop(free)) + TOKEN_S * episode[turn]
        heapq.heappush(free, done)
        end = max(end, done + ENV_S)
        if turn + 1 < len(episode):
            heapq.heappush(arrivals, (done + ENV_S, next(number), episode, turn + 1))
    return end


def bound(groups: Sequence[int]) -> float:
    """Return the least time of a batch."""
    longest = max(
        sum(TOKEN_S * n + ENV_S for n in replies(group, sample))
        for group in groups
        for sample in range(SAMPLES)
    )
    return max(longest, sum(map(engine_s, groups)) / PLACES)


def ks(first: Sequence[int], second: Sequence[int]) -> tuple[float, float]:
    """Return the Kolmogorov-Smirnov distance of two samples, and the value that chance
    exceeds in 1% of cases."""
    if not first or not second:
        return 0.0, 0.0
    a, b = sorted(first), sorted(second)
    distance = max(
        abs(bisect_right(a, value) / len(a) - bisect_right(b, value) / len(b)) for value in {*a, *b}
    )
    return distance, 1.628 * math.sqrt((len(a) + len(b)) / (len(a) * len(b)))


def figures(run: Schedule) -> dict[str, float]:
    """Return the keys of a mode, as the page's first lines define them."""
    trained = [group for batch in run.trained for group in batch]
    batches = [range(step * run.groups, (step + 1) * run.groups) for step in range(run.steps)]
    lists, bounds = [list_schedule(batch) for batch in batches], [bound(batch) for batch in batches]
    work = sum(map(engine_s, trained)) / PLACES
    parts = (run.entered, trained, run.entered.keys() - trained)
    sampled, kept, dropped = (
        [len(replies(group, n)) for group in part for n in range(SAMPLES)] for part in parts
    )
    means = statistics.fmean(sampled), statistics.fmean(kept)
    by_turns = run.mode == "sync" or run.hold
    ideal = work / max(work + run.train_s * (run.steps if by_turns else 1), run.train_s * run.steps)
    filled_s, filled_used, filled_steps = run.filled
    distance, chance = ks(kept, dropped)
    row = {
        "ratio_to_list": sum(run.waits) / sum(lists),
        "ratio_to_list_max": max(wait / one for wait, one in zip(run.waits, lists, strict=True)),
        "ratio_to_bound": sum(run.waits) / sum(bounds),
        "busy": run.used / PLACES / run.time,
        "useful": work / run.time,
        "ideal_busy": ideal,
        "share_of_ideal": run.used / PLACES / run.time / ideal,
        "share_filled": filled_used
        / PLACES
        / max(TOKEN_S, filled_s - run.train_s * filled_steps * by_turns),
        "lag_mean": statistics.fmean(run.lags),
        "lag_max": max(run.lags),
        "turns_sampled": means[0],
        "turns_trained": means[1],
        "ks": ks(sampled, kept)[0],
        "ks_discarded": distance,
        "ks_1pct": chance,
        "unbiased": abs(means[1] / means[0] - 1) <= 0.01 and distance <= chance,
        "discarded": len(run.entered) - len(trained),
        "time_s": run.time,
    }
    return {
        name: value if isinstance(value, bool) else round(value, 4) for name, value in row.items()
    }


def hop_shares(
    steps: int, staleness: int, scheduler: type[BatchScheduler]
) -> dict[str, dict[int, float]]:
    """Return the share of each number of look-ups among the Hop groups that entered
    and that were trained."""
    drawn = Hop.tasks("train", 8 * steps + 64, SEED)

    run = Schedule(
        "async",
        staleness,
        steps=steps,
        scheduler=scheduler,
        groups=4,
        env=SlowHop,
        tasks=drawn.__getitem__,
        reply=hop_reply,
        train_s=0.1,
    ).run()
    trained = [group for batch in run.trained for group in batch]
    shares = {}
    for name, groups in (("entered", list(run.entered)), ("trained", trained)):
        hops = Counter(drawn[group].info["hops"] for group in groups)
        shares[name] = {number: round(hops[number] / len(groups), 3) for number in sorted(hops)}
    return shares


MODES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "one_step_off": {"mode": "one_step_off"},
    "async_1": {"mode": "async", "staleness": 1},
    "async_2": {"mode": "async", "staleness": 2},
    "async_4": {"mode": "async", "staleness": 4},
    "hold_2": {"mode": "async", "staleness": 2, "hold": True},
    "hold_4": {"mode": "async", "staleness": 4, "hold": True},
    "fifo_2": {"mode": "async", "staleness": 2, "scheduler": FifoScheduler},
    "discard_1": {"mode": "async", "staleness": 1, "scheduler": DiscardingScheduler},
    "discard_2": {"mode": "async", "staleness": 2, "scheduler": DiscardingScheduler},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="batches of each mode")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES), help="only these")
    args = parser.parse_args()
    print(f"W3, {args.steps} steps, training {TRAIN_S} s a step, {PLACES} calls at a time")
    modes = {}
    for name in args.modes:
        modes[name] = row = figures(Schedule(steps=args.steps, **MODES[name]).run())
        print(f"{name:13}", " ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    hop = {}
    for name, scheduler in (("complete", BatchScheduler), ("discard", DiscardingScheduler)):
        hop[name] = hop_shares(10 * args.steps, 1, scheduler)
        print(f"Hop by look-ups, staleness 1, {name}: {hop[name]}", flush=True)
    outer = {"sync": ("ratio_to_list", "ratio_to_bound")}
    outer["async_2"] = (
        "busy",
        "useful",
        "ideal_busy",
        "lag_mean",
        "lag_max",
        "turns_sampled",
        "turns_trained",
    )
    row = {key: modes[name][key] for name, keys in outer.items() if name in modes for key in keys}
    print(json.dumps(row | {"modes": modes, "hop": hop}))


if __name__ == "__main__":
    sys.exit(main())
