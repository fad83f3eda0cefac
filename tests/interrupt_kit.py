"""Replies that are interrupted after any id and continued by another call, and caches that outlive their weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from turnwise.engines import Generation, Request
from turnwise.engines.local import LocalEngine
from turnwise.engines.local.sampling import Sampler
from turnwise.engines.local.scheduler import Scheduler

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
            worker.post([lambda: worker.deliver(worker.scheduler.abort())])
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


async def whole(generate: Generate, request: Request, between: Callable[[], Awaitable[Any]] | None = None) -> Generation:
    """A reply of as many calls as it takes, continued as a rollout does; `between` runs before each but the first."""
    ids: list[int] = []
    logprobs: list[Any] = []
    routes, known = [], request.routes_from
    while True:
        stop = request.stop_text
        made = await generate(
            replace(
                request,
                ids=[*request.ids, *ids],
                max_tokens=request.max_tokens - len(ids),
                stop_text=stop.continued_after(ids) if stop and ids else stop,
                routes_from=known,
                reply_position=len(ids),
            )
        )
        ids += made.ids
        logprobs += made.logprobs
        if "routes" in made.extras:
            start, some = made.extras["routes"]
            routes.append(np.asarray(some)[known - start :])
            known = start + len(some)
        if made.finish != "abort" or len(ids) == request.max_tokens:
            finish = "length" if made.finish == "abort" else made.finish
            extras = {"routes": (request.routes_from, np.concatenate(routes))} if routes else {}
            return replace(made, ids=ids, logprobs=logprobs, finish=finish, extras=extras)
        if between is not None:
            await between()


class LeakyScheduler(Scheduler):
    """Keeps the cache of replaced weights, which a server must not."""

    def clear_cache(self) -> None:
        return


def leaky(engine: LocalEngine) -> LocalEngine:
    """The engine, with a cache that outlives its weights."""
    engine._scheduler.__class__ = LeakyScheduler
    return engine
