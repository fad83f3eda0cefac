"""Replies in flight of a served engine: sampled, paused, held through an update, ended."""

from __future__ import annotations

import asyncio
from typing import Any

from turnwright.engines.protocols import Generation, Request
from turnwright_serve.server.intake import HttpError

PAUSES = {"abort": "abort", "wait": "wait", "keep": "hold", "retract": "hold"}
"""What a pause does to the replies in flight: end them, wait for their ends, or hold them, to go on
with the weights of then; by the names that vLLM (`keep`) and SGLang (`retract`) have for it. What
is held computes its cache again."""
Span = dict[str, Any]
"""Run of ids that the same weights sampled, as vLLM and SGLang report it: `version`, `start`,
`end`."""


class Replies:
    """The replies of an engine that one server samples, by the names of their requests."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.weights = "default"
        """Name of the engine's weights."""
        self._running: dict[str, asyncio.Task[Generation]] = {}
        self._allowed = asyncio.Event()
        self._allowed.set()
        self._held: asyncio.Future[bool] | None = None
        """Of the last pause that holds replies: settled when it ends, with whether they go on."""

    @property
    def names(self) -> list[str]:
        """Names of the replies in flight."""
        return list(self._running)

    @property
    def paused(self) -> bool:
        """Whether new replies wait."""
        return not self._allowed.is_set()

    def rename(self, weights: Any) -> None:
        """Name the engine's weights from here on."""
        self.weights = str(weights)

    async def sample(self, request: Request, name: str) -> tuple[Generation, list[Span]]:
        """Sample one reply, after a pause; return it with the names of the weights of its ids.

        Raises `HttpError` for the name of a reply in flight.
        """
        await self._allowed.wait()
        if name in self._running:
            raise HttpError(400, f"request {name!r} is already running")

        spans: list[Span] = []
        task = asyncio.ensure_future(self._sample_parts(request, spans))
        self._running[name] = task
        try:
            return await task, spans
        except asyncio.CancelledError:
            # Either this task is cancelled, or the reply alone.
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            return Generation([], [], "abort", 0), [{"version": self.weights, "start": 0, "end": 0}]
        finally:
            task.cancel()
            del self._running[name]

    async def _sample_parts(self, request: Request, spans: list[Span]) -> Generation:
        """Sample a reply, which goes on after each pause that holds it; add to `spans` the weights
        of its ids."""
        reply: Generation | None = None
        while True:
            weights = self.weights
            start = len(reply.ids) if reply else 0
            part: Generation = await self._engine.generate(request)
            reply = reply.joined(part) if reply else part
            if spans and start == spans[-1]["start"]:
                # Nothing was sampled with the last weights.
                spans.pop()
            spans.append({"version": weights, "start": start, "end": len(reply.ids)})

            if part.finish != "abort" or self._held is None or not await asyncio.shield(self._held):
                return reply
            request = request.continued(part)

    async def pause(self, effect: str) -> None:
        """Block new replies; end those in flight (`abort`), wait for them (`wait`), or hold them
        (`hold`)."""
        self._allowed.clear()
        if effect == "hold":
            if self._held is None or self._held.done():
                self._held = asyncio.get_running_loop().create_future()
            self._engine.abort()
            return

        self._end_hold(go_on=False)
        if effect == "abort":
            self._engine.abort()
        if self._running:
            await asyncio.wait(list(self._running.values()))

    def resume(self) -> None:
        """End a pause."""
        self._end_hold(go_on=True)
        self._allowed.set()

    def cancel(self, name: str) -> None:
        """End a reply without its ids."""
        if name in self._running:
            self._running[name].cancel()

    def _end_hold(self, *, go_on: bool) -> None:
        """End a pause that holds replies; they go on, also those that it has yet to reach, or
        end with what they have."""
        if self._held is not None and not self._held.done():
            self._held.set_result(go_on)
        if not go_on:
            self._held = None
