"""Replies that are interrupted after any id and continued by another call, and caches that
outlive their weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from turnwright.engines import Generation, Request
from turnwright.engines.local import LocalEngine
from turnwright.engines.local.sampler import Sampler
from turnwright.engines.local.scheduler import Scheduler

Generate = Callable[[Request], Awaitable[Generation]]


class Interrupter(Sampler):
    """Ends all calls as aborted after some ids, given by (seed of the reply, position in it)."""

    engine: LocalEngine
    interruptions = 0

    def __init__(self, after: Callable[[int, int], bool]) -> None:
        self.after = after

    def __call__(self, logits: Any, draws: Sequence[Any]) -> tuple[list[int], list[float]]:
        if any(self.after(draw.request.seed, draw.position) for draw in draws):
            worker = self.engine._worker
            worker.post(lambda: worker.deliver(worker.scheduler.abort()))
            self.interruptions += 1
        return super().__call__(logits, draws)


def interrupted(model: Any, after: Callable[[int, int], bool], **options: Any) -> LocalEngine:
    """A local engine that interrupts replies."""
    engine = LocalEngine(model, **options)
    interrupt(engine, after)
    return engine


def interrupt(engine: LocalEngine, after: Callable[[int, int], bool]) -> Interrupter:
    """Let an engine interrupt its replies from now on."""
    sampler = Interrupter(after)
    sampler.engine = engine
    engine._scheduler.sampler = sampler
    return sampler


async def whole(
    generate: Generate, request: Request, between: Callable[[], Awaitable[Any]] | None = None
) -> Generation:
    """A reply of as many calls as it takes; `between` runs before each but the first."""
    known, most = request.routes_from, request.max_tokens
    reply = made = await generate(request)
    while made.finish == "abort" and len(reply.ids) < most:
        if between is not None:
            await between()
        request = request.continued(made)
        made = await generate(request)
        reply = reply.joined(made)
    reply.finish = "length" if reply.finish == "abort" else reply.finish
    if "routes" in reply.extras:
        start, routes = reply.extras["routes"]
        reply.extras = {"routes": (known, np.asarray(routes)[known - start :])}
    return reply


def on_thread(engine: LocalEngine) -> LocalEngine:
    """The engine, whose steps all run on its thread, as on a GPU: an event
    loop goes on during each."""
    engine._worker._short_step_s = 0.0
    return engine


class LeakyScheduler(Scheduler):
    """Keeps the cache of replaced weights, which a server must not."""

    def clear_cache(self) -> None:
        return


def leaky(engine: LocalEngine) -> LocalEngine:
    """The engine, with a cache that outlives its weights."""
    engine._scheduler.__class__ = LeakyScheduler
    return engine
