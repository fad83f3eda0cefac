"""Programs for tests of the proxy: requests in each dialect over a real socket, and an engine that
records what it received."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx2

import turnwright as tw
from turnwright_serve.proxy import ProxyServer, ProxySession, ProxySettings, program
from turnwright_serve.proxy.programs import ProgramEndpoint

TOOL = {
    "name": "look_up",
    "description": "Look up a word.",
    "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
}


def called(name: str, **arguments: Any) -> str:
    """Return the text of a reply with one call."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class RecordingEngine(tw.ScriptedEngine):
    """Records the ids and the session of every request."""

    def __init__(self, replies: Any) -> None:
        super().__init__(replies)
        self.received: list[tuple[str, list[int]]] = []

    async def generate(self, request: tw.Request) -> tw.Generation:
        self.received.append((request.session, list(request.ids)))
        await asyncio.sleep(0)
        return await super().generate(request)


def in_order(replies: Sequence[str]) -> Callable[..., str]:
    """Return a script that gives its replies in the order of the requests,
    whatever the conversation."""
    left = iter(replies)
    return lambda messages, rng: next(left)


def play(
    agent: Callable[[ProgramEndpoint], Any] | list[str],
    engine: Any,
    *,
    score: Any = lambda result: 1.0,
    tasks: Any = None,
    **given: Any,
) -> tw.Trajectory:
    """Play one episode of a program and return its trajectory."""
    options = {
        name: given.pop(name) for name in ("limits", "out", "renderer", "seed") if name in given
    }
    return tw.rollout(
        program(agent, score=score, **given), tasks or [tw.Task("Begin.")], engine, **options
    )[0]


def direct(
    work: Callable[[ProxySession, str], Awaitable[Any]],
    engine: Any,
    *,
    settings: ProxySettings | None = None,
    **given: Any,
) -> tw.Trajectory:
    """Play one episode in which `work(session, root URL)` speaks to the server."""

    async def play_one(task: tw.Task, model: tw.Model) -> float:
        session = ProxySession(model, settings)
        async with ProxyServer() as server:
            try:
                await work(session, server.open(session))
            finally:
                await session.end()
        return 1.0

    trajectory = tw.rollout(play_one, [tw.Task("Begin.")], engine, **given)[0]
    if trajectory.error is not None:
        raise AssertionError(trajectory.error.traceback)
    return trajectory


def client(root: str) -> httpx2.AsyncClient:
    """Return an HTTP client of a session."""
    # Reading certificates takes a while.
    return httpx2.AsyncClient(base_url=root, trust_env=False, verify=False, timeout=60)


def account(trajectory: tw.Trajectory) -> None:
    """Check that every sampled id is in exactly one row with a weight, or has a reason."""
    weighted: dict[tuple[int, int], int] = {}
    for row in trajectory.samples():
        for slot, weight, mask in zip(row.slots, row.weights, row.mask, strict=True):
            if mask and weight:
                weighted[slot] = weighted.get(slot, 0) + 1
    own = trajectory.turn_weights()
    for number, span in enumerate(trajectory.spans):
        if not span.sampled:
            continue
        for offset in range(len(span.ids)):
            reason = (span.untrained is not None and offset >= span.trained) or own.get(
                number, (1.0,) * len(span.ids)
            )[offset] == 0
            assert weighted.get((number, offset), 0) == (0 if reason else 1), (number, offset)


def contexts(trajectory: tw.Trajectory) -> list[list[int]]:
    """Return the recorded context of every turn."""
    return [trajectory.path(turn.prompt)[: turn.context] for turn in trajectory.turns]
