"""Conversations that the proxy matches with recorded ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import turnwright as tw
from kit.proxy import (
    TOOL,
    RecordingEngine,
    account,
    client,
    contexts,
    direct,
    in_order,
)
from turnwright_serve.proxy import ProxySession

TOOLS = [{"type": "function", "function": TOOL}]


class Conversation:
    """Requests to chat completions, with the history in the hands of the test."""

    def __init__(
        self, http: Any, *, tools: Any = TOOLS, headers: dict[str, str] | None = None
    ) -> None:
        self.http, self.tools, self.headers = http, tools, headers or {}
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": "Rules."},
            {"role": "user", "content": "Begin."},
        ]
        self.replies: list[tuple[str, str]] = []
        """Ids of the replies, and their requests."""

    async def ask(self, *more: dict[str, Any]) -> dict[str, Any]:
        self.messages += more
        body = {"model": "m", "messages": self.messages, "tools": self.tools}
        response = await self.http.post("/v1/chat/completions", json=body, headers=self.headers)
        assert response.status_code == 200, response.text
        message = response.json()["choices"][0]["message"]
        self.replies.append((response.json()["id"], json.dumps(body, sort_keys=True)))
        self.messages.append(message)
        return message


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def run(
    work: Callable[[Conversation, Any, ProxySession], Any], replies: Any, **given: Any
) -> tuple[tw.Trajectory, RecordingEngine]:
    engine = RecordingEngine(in_order(replies) if isinstance(replies, list) else replies)

    async def connected(session: ProxySession, root: str) -> None:
        async with client(root) as http:
            await work(Conversation(http), http, session)

    trajectory = direct(connected, engine, **given)
    account(trajectory)
    assert contexts(trajectory) == [ids for _, ids in engine.received]
    return trajectory, engine
