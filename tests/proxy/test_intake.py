"""What the proxy takes in of programs that send too much, too slowly or to sessions of others,
and the key of `record`."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from kit.proxy import RecordingEngine, client, direct, in_order

import turnwright as tw
from tests.proxy.test_recording import record, script, talk
from turnwright.config import load
from turnwright.engines import tokens
from turnwright_serve.commands.record import record_programs
from turnwright_serve.proxy import ProxyServer, ProxySession, recording, server
from turnwright_serve.proxy.request_cache import RequestCache

LONG_S = 20.0
"""Deadline of what a busy machine does at last, and a server without the bound never."""
CHAT = "/v1/chat/completions"


def chat(text: str, **more: Any) -> dict[str, Any]:
    """Return the body of a request."""
    return {"model": "any", "messages": [{"role": "user", "content": text}], **more}


async def head_only(url: str, path: str, **headers: str) -> int:
    """Send the head of a request with a long body and nothing of the body; return the
    status of the answer."""
    host, _, root = url.removeprefix("http://").partition("/")
    reader, writer = await asyncio.open_connection(*host.split(":"))
    rows = {
        "host": host,
        "content-type": "application/json",
        "content-length": "50000000",
    } | headers
    head = "".join(f"{name}: {value}\r\n" for name, value in rows.items())
    where = f"/{root}{path}" if root else path
    writer.write(f"POST {where} HTTP/1.1\r\n{head}\r\n".encode())
    try:
        async with asyncio.timeout(LONG_S):
            return int((await reader.readuntil(b"\r\n")).split()[1])
    finally:
        writer.close()


@pytest.mark.parametrize(
    "path", [CHAT, "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"]
)
def test_a_request_of_no_session_is_refused_before_its_body(path: str) -> None:
    async def work() -> list[int]:
        async with ProxyServer() as proxy:
            statuses = [await head_only(proxy.url, path)]
            statuses.append(await head_only(f"{proxy.url}/s/{'0' * 32}", path))
            statuses.append(await head_only(proxy.url, path, authorization="Bearer wrong"))
            assert proxy.unknown_sessions == 3
        return statuses

    assert all(400 <= status < 404 for status in asyncio.run(work()))


def test_others_are_answered_while_a_long_request_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the long one waits for the answer to another session: on the event loop,
    both would wait for ever."""
    begun, answered = threading.Event(), threading.Event()
    parse = RequestCache.parse

    def slow(cache: RequestCache, raw: bytes, name: str) -> Any:
        if len(raw) > 2**20:
            begun.set()
            assert answered.wait(LONG_S), "the other request was not answered meanwhile"
        return parse(cache, raw, name)

    monkeypatch.setattr(RequestCache, "parse", slow)

    async def play(task: tw.Task, model: tw.Model) -> float:
        async with ProxyServer() as proxy:
            long, other = ProxySession(model), ProxySession(model)
            async with client(proxy.open(long)) as one, client(proxy.open(other)) as two:
                body = chat("x", metadata={"note": "y" * 2**21})
                asked = asyncio.ensure_future(one.post(CHAT, json=body))
                while not begun.is_set():
                    await asyncio.sleep(0.001)
                assert (await two.post(CHAT, json=chat("Short."))).status_code == 200
                answered.set()
                assert (await asked).status_code == 200
            for session in (long, other):
                await session.end()
        return 1.0

    (trajectory,) = tw.rollout(play, [tw.Task("Begin.")], RecordingEngine(in_order(["one", "two"])))
    assert trajectory.error is None, trajectory.error.traceback


def test_requests_that_fail_are_not_kept() -> None:
    async def work(session: ProxySession, root: str) -> None:
        async with client(root) as http:
            for number in range(20):
                body = {"model": "any", "messages": [], "metadata": {"number": number}}
                assert (await http.post(CHAT, json=body)).status_code == 400
                headers = {"x-session-id": f"agent {number}"}
                body = chat(f"{number}", n=2)
                assert (await http.post(CHAT, json=body, headers=headers)).status_code == 400
            assert not session._tasks
            assert len(session._latest) <= 8
            assert (await http.post(CHAT, json=chat("Well."))).status_code == 200

    direct(work, RecordingEngine(["a"]))


def test_sessions_forget_when_all_keep_too_much_and_answer_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def played(kept: int) -> tuple[Any, ...]:
        monkeypatch.setattr(server, "KEPT_BYTES", kept)
        forgotten = []
        forget = ProxySession.forget
        monkeypatch.setattr(
            ProxySession, "forget", lambda session: (forgotten.append(1), forget(session))[1]
        )

        async def work(session: ProxySession, root: str) -> None:
            messages: list[Any] = [{"role": "user", "content": "Begin. " + "x" * 500}]
            async with client(root) as http:
                for number in range(4):
                    body = {"model": "any", "messages": messages}
                    response = await http.post(CHAT, json=body)
                    assert response.status_code == 200, response.text
                    messages += [
                        response.json()["choices"][0]["message"],
                        {"role": "user", "content": f"{number}"},
                    ]

        engine = RecordingEngine(in_order(["a", "b", "c", "d"]))
        trajectory = direct(work, engine)
        monkeypatch.setattr(ProxySession, "forget", forget)
        return (
            len(forgotten),
            engine.received,
            trajectory.branches,
            [turn.context for turn in trajectory.turns],
        )

    kept, forgot = played(2**28), played(600)
    assert kept[0] == 0
    assert forgot[0] > 0
    assert [ids for _, ids in kept[1]] == [ids for _, ids in forgot[1]]
    assert kept[2:] == forgot[2:]


def test_more_text_than_a_context_has_ends_the_session_as_its_context_does() -> None:
    async def work(session: ProxySession, root: str) -> None:
        async with client(root) as http:
            response = await http.post(CHAT, json=chat("ab " * 400_000))
            assert response.status_code == 400
            assert "the episode is over" in response.text
            assert (await http.post(CHAT, json=chat("Short."))).status_code == 400
            assert session.limit is not None
            assert session.limit.reason == "context"

    engine = RecordingEngine(["a"])
    direct(work, engine, limits=tw.Limits(context=1000))
    assert not engine.received


def test_a_recorder_needs_its_key_and_tells_sessions_apart_by_what_follows_it() -> None:
    keys = {"missing": {}, "wrong": {"authorization": "Bearer ke"}, "longer": {"x-api-key": "keys"}}

    async def work(url: str) -> None:
        async with client(url) as http:
            for headers in keys.values():
                for path in (CHAT, f"/s/one{CHAT}", "/s/one/end"):
                    response = await http.post(path, json=chat("x"), headers=headers)
                    assert response.status_code == 401, (path, headers)
                assert (await http.get("/s/one/v1/models", headers=headers)).status_code == 401
            assert await head_only(url, f"/s/one{CHAT}") == 401
            assert tokens.lookup(url) == "key"
            for key in ("key-a", "key-b"):
                await talk(url, headers={"x-api-key": key})
            await talk(url, "/s/one", headers={"authorization": "Bearer key"})
            assert (await http.post("/s/one/end", json={"reward": 1.0})).status_code == 401
            ended = await http.post(
                "/s/one/end", json={"reward": 1.0}, headers={"x-api-key": "key"}
            )
            assert ended.json() == {"ended": "one"}

    played, _ = record(work, RecordingEngine(script), key="key")
    assert len(played) == 3
    assert [trajectory.reward for trajectory in played if trajectory.key.task == "one"] == [1.0]


def test_programs_of_a_recorder_send_any_key_where_only_the_end_of_a_session_needs_one() -> None:
    async def work(url: str) -> None:
        await talk(url, headers={"x-api-key": "of a program"})
        await talk(url, "/s/one")
        async with client(url) as http:
            for headers in ({}, {"x-api-key": "of a program"}):
                for path in ("/end", "/s/one/end"):
                    assert (
                        await http.post(path, json={"reward": 1.0}, headers=headers)
                    ).status_code == 401
            ended = await http.post(
                "/s/one/end", json={"reward": 1.0}, headers={"x-api-key": "key"}
            )
            assert ended.json() == {"ended": "one"}

    played, _ = record(work, RecordingEngine(script), key="key", keyed_sampling=False)
    assert sorted(trajectory.reward or 0.0 for trajectory in played) == [0.0, 1.0]


@pytest.mark.parametrize(("given", "keyless"), [("", False), ("own", False), ("", True)])
def test_the_command_makes_a_key_and_says_how_to_call_it(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, given: str, keyless: bool
) -> None:
    used: list[tuple[str, bool]] = []

    async def recorded(
        rollout: Any, *, on_start: Any, key: str, keyed_sampling: bool, **more: Any
    ) -> list[tw.Trajectory]:
        used.append((key, keyed_sampling))
        on_start("http://127.0.0.1:1")
        return []

    monkeypatch.setattr(recording, "record_sessions", recorded)
    words = [
        "--env.use=program",
        "--engine.kind=chat",
        '--engine.urls=["http://127.0.0.1:9/v1"]',
        "--engine.model=m",
    ]
    resolved = load(None, [*words, f"--out={tmp_path / 'run'}"], envs=["program"], training=False)
    said: list[str] = []
    record_programs(resolved, port=0, idle_s=1, note=said.append, key=given, keyless=keyless)
    ((key, keyed_sampling),) = used
    line = next(one for one in said if "/s/NAME/v1" in one)
    assert ("TURNWRIGHT_SERVE_TOKEN" if given else "any API key") in line
    assert keyed_sampling == bool(given)
    if keyless:
        assert key == ""
    elif given:
        assert key == given
    else:
        assert len(key) >= 32
        assert any(key in one and "/s/NAME/end" in one for one in said)
