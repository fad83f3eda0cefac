"""What a server takes in: access from the head alone, bounds on bodies, times and connections, and
parsing beside the loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path

import orjson
import pytest
from pydantic import BaseModel, field_validator

from turnwright.cli.main import main
from turnwright.engines.remote.http import HttpClient
from turnwright_serve.server import Call, Endpoint, HttpError, IntakeLimits, JsonHttpServer, RawBody
from turnwright_serve.server.intake import MAX_NESTED, check_values

MIB = 2**20
LONG_S = 20.0
"""Deadline of what a busy machine does at last, and a server without the bound never."""


class Connection:
    """One connection to a server, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        """Write bytes."""
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        """Return status and body of the next response; status 0 where the
        connection ends without one."""
        async with asyncio.timeout(LONG_S):
            try:
                head = await self.reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                return 0, b""
            rows = head.lower().split(b"\r\n")
            size = next(
                int(row.partition(b":")[2]) for row in rows if row.startswith(b"content-length:")
            )
            return int(head.split()[1]), await self.reader.readexactly(size)


@contextlib.asynccontextmanager
async def connected(server: JsonHttpServer):
    """Yield a connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()


def head(path: str, size: int, token: str = "key") -> bytes:
    """Return the head of a request with a body."""
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\ncontent-type: "
        f"application/json\r\ncontent-length: {size}\r\n\r\n"
    ).encode()


async def size_of(call: Call) -> int:
    """Answer with the length of the body."""
    assert call.parse is not None
    return await call.parse(len)


def by_owner(call: Call) -> str:
    """Name the owner of a request as its path does."""
    return call.path["owner"]


def serve(work, routes=None, limits: IntakeLimits | None = None, token: str = "key"):
    """Run `work(server)` beside a server."""

    async def run():
        found = routes or {("POST", "/size"): Endpoint(size_of, RawBody)}
        server = JsonHttpServer(found, host="127.0.0.1", port=0, token=token, limits=limits)
        await server.start()
        try:
            async with asyncio.timeout(3 * LONG_S):
                return await work(server)
        finally:
            await server.close()

    return asyncio.run(run())


SHARED = {("POST", "/{owner}/size"): Endpoint(size_of, RawBody, admits=by_owner)}


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """Keep the files of tokens out of the user's home."""
    monkeypatch.setenv("HOME", str(tmp_path))


def test_access_is_decided_before_any_of_the_body_arrives():
    def admits(call: Call) -> str:
        raise HttpError(403, "not you")

    async def work(server):
        answers = []
        for path, token in (("/size", "wrong"), ("/never", "key")):
            async with connected(server) as one:
                await one.send(head(path, 50 * MIB, token))
                answers.append((await one.answer())[0])
        assert server.intake.room.free == server.intake.limits.bodies
        return answers

    routes = {
        ("POST", "/size"): Endpoint(size_of, RawBody),
        ("POST", "/never"): Endpoint(size_of, RawBody, admits=admits),
    }
    assert serve(work, routes) == [401, 403]


@pytest.mark.parametrize("token", ["", "key"])
def test_every_request_needs_the_token_unless_it_is_turned_off(token):
    async def health(call: Call) -> int:
        return 1

    async def work(server):
        with_token = HttpClient(server.url, token=server.token)
        other = HttpClient(server.url, token="wrong")
        found = [await with_token.get("/health", 5)]
        try:
            await other.get("/health", 5)
            found.append("answered")
        except Exception as error:
            found.append(getattr(error, "status", error))
        await with_token.close()
        await other.close()
        return found

    routes = {("GET", "/health"): Endpoint(health)}
    # The client of this user finds a generated token by itself.
    assert serve(work, routes, token=token) == ([1, "answered"] if not token else [1, 401])

    async def raw(server):
        async with connected(server) as one:
            await one.send(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            return (await one.answer())[0]

    assert serve(raw, routes, token=token) == 401


def test_requests_at_once_learn_the_token_of_this_user():
    async def health(call: Call) -> int:
        return 1

    async def work(server):
        client = HttpClient(server.url)
        try:
            return await asyncio.gather(*(client.get("/health", 20) for _ in range(8)))
        finally:
            await client.close()

    assert serve(work, {("GET", "/health"): Endpoint(health)}, token="") == [1] * 8


def test_bodies_wait_in_turn_for_room():
    """The second body is not read before the first one is parsed: both would be over the bound."""

    async def work(server):
        async with (
            connected(server) as first,
            connected(server) as second,
            connected(server) as small,
        ):
            await first.send(head("/size", 700_000) + b" " * 600_000)
            while server.intake.room.free == MIB:
                await asyncio.sleep(0.001)
            sending = asyncio.ensure_future(second.send(head("/size", 700_000) + b" " * 700_000))
            waiting = asyncio.ensure_future(second.answer())
            await small.send(head("/size", 1000) + b" " * 1000)
            assert await small.answer() == (200, b"1000")  # a small one needs no room
            assert not waiting.done()
            assert server.intake.room.free == MIB - 700_000

            await first.send(b" " * 100_000)
            assert await first.answer() == (200, b"700000")
            assert await waiting == (200, b"700000")
            await sending
        assert server.intake.room.free == MIB

    serve(work, limits=IntakeLimits(bodies=MIB, yield_s=60.0))


def test_a_slow_body_gives_its_room_to_one_that_waits():
    async def work(server):
        async with connected(server) as slow, connected(server) as other:
            await slow.send(head("/size", 700_000) + b" " * 1000)
            while server.intake.room.free == MIB:
                await asyncio.sleep(0.001)
            await other.send(head("/size", 700_000) + b" " * 700_000)
            assert await other.answer() == (200, b"700000")
            status, body = await slow.answer()
            assert status == 503
            assert b"while others waited" in body

    serve(work, limits=IntakeLimits(bodies=MIB, yield_s=0.05))


def test_without_room_in_time_a_request_is_told_to_try_again():
    async def work(server):
        async with connected(server) as first, connected(server) as second:
            await first.send(head("/size", 700_000))
            while server.intake.room.free == MIB:
                await asyncio.sleep(0.001)
            await second.send(head("/size", 700_000))
            status, body = await second.answer()
            assert status == 503
            assert b"Try again" in body
            await first.send(b" " * 700_000)
            assert await first.answer() == (200, b"700000")

    serve(work, limits=IntakeLimits(bodies=MIB, room_s=0.05, yield_s=60.0))


def test_the_bodies_of_one_owner_leave_room_for_others():
    async def work(server):
        async with contextlib.AsyncExitStack() as stack:
            greedy = [await stack.enter_async_context(connected(server)) for _ in range(6)]
            for one in greedy:
                await one.send(head("/greedy/size", 300_000) + b" " * 70_000)
            while server.intake.room.free == MIB:
                await asyncio.sleep(0.001)
            async with connected(server) as other:
                await other.send(head("/other/size", 400_000) + b" " * 400_000)
                assert await other.answer() == (200, b"400000")
            assert server.intake.room.free == MIB - 300_000

    serve(work, SHARED, IntakeLimits(bodies=MIB, owner_bodies=400_000, yield_s=60.0))


def test_an_owner_has_so_many_requests_in_flight():
    over = asyncio.Event()

    async def wait(call: Call) -> int:
        await over.wait()
        return 1

    async def work(server):
        async with (
            connected(server) as a,
            connected(server) as b,
            connected(server) as c,
            connected(server) as d,
        ):
            for one in (a, b):
                await one.send(head("/greedy/wait", 2) + b"{}")
            while server.intake.requests["greedy"] < 2:
                await asyncio.sleep(0.001)
            await c.send(head("/greedy/wait", 2) + b"{}")
            assert (await c.answer())[0] == 429
            await d.send(head("/other/wait", 2) + b"{}")
            over.set()
            assert [(await one.answer())[0] for one in (a, b, d)] == [200] * 3
        assert not server.intake.requests

    serve(
        work,
        {("POST", "/{owner}/wait"): Endpoint(wait, RawBody, admits=by_owner)},
        IntakeLimits(owner_requests=2),
    )


def test_a_body_that_does_not_arrive_is_given_up():
    async def work(server):
        async with connected(server) as one:
            await one.send(head("/size", 200_000) + b" ")
            status, body = await one.answer()
        assert server.intake.room.free == server.intake.limits.bodies
        return status, b"did not arrive" in body

    assert serve(work, limits=IntakeLimits(body_s=0.05)) == (408, True)


@pytest.mark.parametrize("earlier", [b"", b"{}"], ids=["first", "kept alive"])
def test_a_head_that_does_not_arrive_is_given_up(earlier):
    async def work(server):
        async with connected(server) as one:
            if earlier:
                await one.send(head("/size", len(earlier)) + earlier)
                assert await one.answer() == (200, b"2")
            await one.send(b"POST /size HTTP/1.1\r\nhost: 127")
            return await one.answer()

    assert serve(work, limits=IntakeLimits(head_s=0.2)) == (0, b"")


def test_a_connection_too_many_ends_the_one_that_is_silent_for_longest():
    async def work(server):
        async with contextlib.AsyncExitStack() as stack:
            first = await stack.enter_async_context(connected(server))
            await first.send(head("/size", 2) + b"{}")
            assert await first.answer() == (200, b"2")
            silent = []
            for _ in range(3):
                silent.append(await stack.enter_async_context(connected(server)))
                await silent[-1].send(b"POST /si")
            async with connected(server) as last:
                await last.send(head("/size", 2) + b"{}")
                assert await last.answer() == (200, b"2")
            assert await first.answer() == (0, b"")
            await silent[-1].send(head("/size", 2)[8:] + b"{}")
            assert await silent[-1].answer() == (200, b"2")

    serve(work, limits=IntakeLimits(connections=4))


def test_where_each_connection_has_a_request_another_one_is_refused():
    over = asyncio.Event()

    async def wait(call: Call) -> int:
        await over.wait()
        return 1

    async def work(server):
        async with connected(server) as first:
            await first.send(head("/wait", 2) + b"{}")
            while not server.intake.requests:
                await asyncio.sleep(0.001)
            async with connected(server) as second:
                status, body = await second.answer()
            over.set()
            assert (status, b"too many connections" in body) == (503, True)
            assert (await first.answer())[0] == 200

    serve(work, {("POST", "/wait"): Endpoint(wait, RawBody)}, IntakeLimits(connections=1))


def test_others_are_answered_while_a_long_body_is_validated():
    """The schema waits for another request: on the event loop, both would wait for ever."""
    begun, asked = threading.Event(), threading.Event()

    class Slow(BaseModel):
        text: str

        @field_validator("text")
        @classmethod
        def wait(cls, text: str) -> str:
            begun.set()
            if not asked.wait(LONG_S):
                raise ValueError("the other request was not answered meanwhile")
            return text

    async def slow(call: Call) -> int:
        return len(call.body.text)

    async def note(call: Call) -> int:
        asked.set()
        return 1

    async def work(server):
        async with connected(server) as one, connected(server) as other:
            body = orjson.dumps({"text": "x" * 2 * MIB})
            await one.send(head("/slow", len(body)) + body)
            while not begun.is_set():
                await asyncio.sleep(0.001)
            await other.send(head("/note", 2) + b"{}")
            assert await other.answer() == (200, b"1")
            assert await one.answer() == (200, b"%d" % (2 * MIB))

    serve(
        work, {("POST", "/slow"): Endpoint(slow, Slow), ("POST", "/note"): Endpoint(note, RawBody)}
    )


def test_long_bodies_of_owners_are_parsed_in_turn():
    order: list[str] = []
    begun, over = threading.Event(), threading.Event()

    async def read(call: Call) -> int:
        def parse(raw: bytes) -> int:
            order.append(call.path["owner"])
            begun.set()
            assert over.wait(LONG_S)
            return 1

        assert call.parse is not None
        return await call.parse(parse)

    async def work(server):
        content = b'"' + b"x" * 2 * MIB + b'"'
        async with contextlib.AsyncExitStack() as stack:
            asking = []
            for owner, count in (("greedy", 1), ("greedy", 2), ("greedy", 3), ("other", 4)):
                one = await stack.enter_async_context(connected(server))
                await one.send(head(f"/{owner}/read", len(content)) + content)
                asking.append(one)
                while (
                    sum(map(len, server.intake.lane._waiting.values())) < count - 1
                    or not begun.is_set()
                ):
                    await asyncio.sleep(0.001)
            over.set()
            assert [(await one.answer())[0] for one in asking] == [200] * 4

    serve(work, {("POST", "/{owner}/read"): Endpoint(read, RawBody, admits=by_owner)})
    assert order[0] == "greedy"
    assert order.index("other") <= 2


def test_a_body_whose_client_left_is_not_parsed():
    begun, over = threading.Event(), threading.Event()
    parsed = []

    class Text(BaseModel):
        text: str

        @field_validator("text")
        @classmethod
        def wait(cls, text: str) -> str:
            parsed.append(text[0])
            begun.set()
            assert over.wait(LONG_S)
            return text

    async def answer(call: Call) -> int:
        return 1

    async def work(server):
        async with connected(server) as first, connected(server) as last:
            for one, letter in ((first, "a"), (last, "c")):
                if letter == "c":
                    async with connected(server) as second:
                        body = orjson.dumps({"text": "b" * 2 * MIB})
                        await second.send(head("/text", len(body)) + body)
                        while not any(server.intake.lane._waiting.values()):
                            await asyncio.sleep(0.001)
                    while any(server.intake.lane._waiting.values()):
                        await asyncio.sleep(0.001)
                body = orjson.dumps({"text": letter * 2 * MIB})
                await one.send(head("/text", len(body)) + body)
                while not begun.is_set():
                    await asyncio.sleep(0.001)
            over.set()
            assert [(await one.answer())[0] for one in (first, last)] == [200, 200]

    serve(work, {("POST", "/text"): Endpoint(answer, Text)})
    assert parsed == ["a", "c"]


def test_a_body_with_too_many_values_is_refused_and_text_is_no_value():
    check_values(b'{"text": "' + b"[" * 4 * MAX_NESTED + b'"}')
    with pytest.raises(HttpError, match="lists and objects"):
        check_values(b"[" + b"[]," * MAX_NESTED + b"0]")

    async def work(server):
        async with connected(server) as one:
            body = b"[" + b"[]," * MAX_NESTED + b"0]"
            await one.send(head("/size", len(body)) + body)
            return (await one.answer())[0]

    assert serve(work) == 413


def test_the_bounds_of_the_documents_are_those_of_the_code():
    limits = IntakeLimits()
    text = (Path(__file__).parents[2] / "docs" / "reference" / "servers.md").read_text()
    for bound in (
        f"{limits.bodies // MIB} MiB",
        f"{limits.connections} connections",
        f"{limits.owner_requests} requests",
    ):
        assert bound in text


def test_the_cache_of_serve_has_a_size(capsys, tmp_path):
    for size in ("0", "-1", "nan"):
        assert main(["serve", str(tmp_path), "--cache-gib", size]) == 2
        assert "--cache-gib" in capsys.readouterr().err
