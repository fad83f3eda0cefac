"""Requests of engines and judges: deadlines, sizes of responses, and keys that no error tells."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import turnwright as tw
from turnwright.engines.remote.http import HttpClient
from turnwright.errors import EngineError, JudgeError
from turnwright.http_sessions import HttpResponse, HttpSessions, NoResponse, ResponseTooLong

KEY = "sk-secret"
MOST = 1000


def served(answer: Callable[[str], bytes], work: Callable[[str], Awaitable[Any]]) -> Any:
    """Run work with the URL of a server that answers each path; `/late...` after a second."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split()[1]
        if path.startswith("/late"):
            await asyncio.sleep(1.0)
        writer.write(answer(path))
        await writer.drain()
        writer.close()

    async def run() -> Any:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            return await work(f"http://127.0.0.1:{port}")
        finally:
            server.close()

    return asyncio.run(run())


def response(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", "connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def sized(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    return response(body, f"content-length: {len(body)}", *headers, status=status)


def chunked(body: bytes) -> bytes:
    pieces = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    return response(pieces, "transfer-encoding: chunked")


FORMS: dict[str, Callable[[bytes], bytes]] = {
    "with a length": sized,
    "in pieces": chunked,
    "until the connection ends": response,
    "compressed": lambda body: sized(gzip.compress(body), "content-encoding: gzip"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("into_pieces", [False, True])
def test_no_response_is_longer_than_the_client_takes(form: str, into_pieces: bool) -> None:
    async def work(url: str) -> tuple[bytes, bool]:
        sessions = HttpSessions(4)
        options: dict[str, Any] = {"seconds": 20, "most_bytes": MOST}
        pieces = list[bytes]() if into_pieces else None
        found = await sessions.ask("GET", f"{url}/fits", b"", {}, pieces=pieces, **options)
        body = found.body if pieces is None else b"".join(pieces)
        try:
            await sessions.ask("GET", f"{url}/longer", b"", {}, **options)
        except ResponseTooLong:
            return body, True
        finally:
            await sessions.close()
        return body, False

    def answer(path: str) -> bytes:
        return FORMS[form](b"x" * (MOST if path == "/fits" else MOST + 1))

    assert served(answer, work) == (b"x" * MOST, True)


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_deadline_ends_its_own_request_alone(cancelled: bool) -> None:
    async def work(url: str) -> list[Any]:
        sessions = HttpSessions(8)

        async def ask(path: str, seconds: float) -> tuple[str, int]:
            task = asyncio.current_task()
            assert task is not None
            try:
                await sessions.ask("GET", f"{url}{path}", b"", {}, seconds=seconds, most_bytes=MOST)
            except TimeoutError:
                await asyncio.sleep(0)  # raises if the cancellation were still there
                return "late", task.cancelling()
            return "in time", task.cancelling()

        asked = (("/late", 0.3), ("/late", 30.0), ("/", 0.9), ("/", 30.0))
        tasks = [asyncio.create_task(ask(*one)) for one in asked]
        if cancelled:
            await asyncio.sleep(0.05)
            tasks[0].cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        await sessions.close()
        return found

    first, *others = served(lambda path: sized(b"{}"), work)
    assert isinstance(first, asyncio.CancelledError) if cancelled else first == ("late", 0)
    assert others == [("in time", 0)] * 3


def test_a_connection_that_fails_says_how() -> None:
    async def work(url: str) -> None:
        sessions = HttpSessions(4)
        try:
            await sessions.ask("GET", url, b"", {}, seconds=20, most_bytes=MOST)
        finally:
            await sessions.close()

    with pytest.raises(NoResponse, match="ServerDisconnectedError"):
        served(lambda path: b"", work)


@pytest.mark.parametrize("before", range(20))
def test_no_cut_leaves_the_beginning_of_a_key(before: int) -> None:
    body = b"_" * before + KEY.encode() + b"_" * 20
    assert set(HttpResponse(401, body, 0.0).excerpt(20, KEY)) <= set("_*")


async def ask_engine(url: str) -> None:
    client = HttpClient(url, key_env="MY_KEY")
    try:
        await client.get("/health", 20)
    finally:
        await client.close()


async def ask_judge(url: str) -> None:
    await tw.ChatJudge(url, "judge", key_env="MY_KEY", retries=0).ask([tw.Message("user", "?")])


@pytest.mark.parametrize("status", ["401 Unauthorized", "503 Service Unavailable"])
@pytest.mark.parametrize(("ask", "cut"), [(ask_engine, 300), (ask_judge, 200)])
def test_no_error_of_a_client_tells_the_key_not_even_a_part(
    ask: Callable[[str], Awaitable[None]],
    cut: int,
    status: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    for before in (0, cut - len(KEY), cut - 4, cut - 1):
        body = b"_" * before + KEY.encode()
        with pytest.raises((EngineError, JudgeError)) as failed:
            served(lambda path, body=body: sized(body, status=status), ask)
        assert status[:3] in str(failed.value)
        assert not any(KEY[:length] in str(failed.value) for length in range(2, len(KEY) + 1))
