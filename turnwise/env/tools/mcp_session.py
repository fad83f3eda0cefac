"""Connections to MCP servers, each kept by a task in a thread of its own kind, so that nothing can leave one open.

The official client has to be closed by the task that opened it, and closing a server's process takes some seconds where it
does not end by itself. A rollout may be cancelled in the middle of that, or its loop be gone. So sessions live in the loop of
another thread, which ends with the last of them.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import os
import signal
import tempfile
import threading
import uuid
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

from turnwise.errors import ToolFailure

T = TypeVar("T")

_CLOSING_S = 10.0
"""Most seconds that closing may take: the client gives a process 2 to end, 2 after SIGTERM, and kills it then."""
_PAGES = 100
_LOG_BYTES = 1 << 20


class SessionThread:
    """A thread with an event loop, for as long as sessions live there."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.log: Any = tempfile.TemporaryFile("a+", errors="replace")  # noqa: SIM115  what servers write to stderr
        self._sessions: set[McpSession] = set()
        self._thread = threading.Thread(target=self._live, name="turnwise-mcp", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def add(self, session: McpSession) -> None:
        """A session begins."""
        if self.log.seek(0, 2) > _LOG_BYTES:
            self.log.truncate(0)  # written by appending, so the servers go on at its beginning
        self._sessions.add(session)

    def remove(self, session: McpSession) -> None:
        """A session is over."""
        self._sessions.discard(session)

    @property
    def empty(self) -> bool:
        """Whether no session is left."""
        return not self._sessions

    def end(self) -> None:
        """Let the thread end; no session may begin any more."""
        self.loop.call_soon_threadsafe(self.loop.stop)

    def kill(self, token: str) -> None:
        """Kill the process that was started with this token in its environment, and its group, where /proc can find it."""
        with contextlib.suppress(OSError):
            for pid in Path(f"/proc/self/task/{self._thread.native_id}/children").read_text().split():
                if token.encode() in Path(f"/proc/{pid}/environ").read_bytes() and os.getpgid(int(pid)) == int(pid):
                    os.killpg(int(pid), signal.SIGKILL)

    def stderr_tail(self) -> str:
        """The last that a server wrote to stderr."""
        size = self.log.seek(0, 2)
        self.log.seek(max(0, size - 400))
        return " ".join(self.log.read().split())[-200:]

    def _live(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()
            self.log.close()
            atexit.unregister(self._end)

    def _end(self) -> None:
        """The process ends: so do the servers."""
        for session in list(self._sessions):
            session.start_closing()
        self._thread.join(_CLOSING_S)


class McpSession:
    """One connection, from `acquire` by its first user to `release` by its last."""

    def __init__(
        self,
        home: SessionThread,
        name: str,
        connect: Callable[[McpSession], AbstractAsyncContextManager[Any]],
        connect_s: float,
    ) -> None:
        self.name = name
        self.users = 0
        self.broken = False
        """It was closed by the server, or missed a deadline: nobody else shall use it."""
        self.home = home
        self.token = uuid.uuid4().hex
        """Marks its process."""
        self.ready: Future[list[Any]] = Future()
        """Its tools, or why there are none."""
        self.over: Future[None] = Future()
        self._connect = connect
        self._connect_s = connect_s
        self._stop = asyncio.Event()
        self._client: Any = None
        self._in_flight = 0
        self._keeper: asyncio.Task[None] | None = None
        home.add(self)
        home.loop.call_soon_threadsafe(self._begin)

    async def tools(self) -> list[Any]:
        """What the server offers.

        Raises:
            ToolFailure: when it cannot be reached.
        """
        return await _told(self.ready)

    async def call(self, name: str, arguments: Mapping[str, Any], seconds: float) -> Any:
        """The server's result of one call.

        Raises:
            ToolFailure: when it does not answer in time, or has gone.
            ValueError: when it refuses the arguments.
        """
        return await asyncio.wrap_future(self._run(self._call(name, dict(arguments), seconds)))

    def start_closing(self) -> None:
        """Begin to close, from any thread."""
        self.home.loop.call_soon_threadsafe(self._close)

    async def closed(self) -> None:
        """Wait until it is over; whoever stops waiting does not stop the closing."""
        await _told(self.over)

    def _run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.home.loop)

    def _begin(self) -> None:
        self._keeper = self.home.loop.create_task(self._keep())

    def _close(self) -> None:
        self._stop.set()
        assert self._keeper is not None
        if not self.ready.done():
            self._keeper.cancel()
        if not self.ready.done() or self._in_flight:  # it hangs: politeness would take seconds that may not be there
            self.home.kill(self.token)
        self._keeper.add_done_callback(lambda _: self._finish())

    def _finish(self) -> None:
        if not self.over.done():
            self.home.remove(self)
            self.over.set_result(None)

    async def _keep(self) -> None:
        stack = AsyncExitStack()
        try:
            importlib.import_module("mcp")  # takes a second or more once, which is not the server's
            async with asyncio.timeout(self._connect_s):
                self._client = await stack.enter_async_context(self._connect(self))
                tools = await self._list()
            self.ready.set_result(tools)
            await self._stop.wait()
        except BaseException as error:
            self.broken = True
            if not self.ready.done():
                self.ready.set_exception(self._failure(error, f"could not be reached within {self._connect_s:g} s"))
            if not isinstance(error, Exception) and not isinstance(error, asyncio.CancelledError):
                raise
        finally:
            try:
                async with asyncio.timeout(_CLOSING_S):
                    await stack.aclose()
            except Exception:  # a server that cannot be parted from in good order was parted from all the same
                self.broken = True

    async def _list(self) -> list[Any]:
        found: list[Any] = []
        cursor: str | None = None
        for _ in range(_PAGES):
            page = await self._client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if not cursor:
                return found
        raise ToolFailure(f"MCP server {self.name}: its list of tools has over {_PAGES} pages")

    async def _call(self, name: str, arguments: dict[str, Any], seconds: float) -> Any:
        from mcp.shared.exceptions import MCPError
        from mcp_types import INVALID_PARAMS

        self._in_flight += 1
        try:
            async with asyncio.timeout(seconds):
                result = await self._client.call_tool(name, arguments)
            self._in_flight -= 1
            return result
        except MCPError as error:
            self._in_flight -= 1
            if error.code == INVALID_PARAMS:
                raise ValueError(str(error)) from error
            self.broken = True
            raise self._failure(error, "") from error
        except Exception as error:
            self.broken = True
            raise self._failure(error, f"did not answer a call of {name!r} within {seconds:g} s") from error

    def _failure(self, error: BaseException, late: str) -> ToolFailure:
        if isinstance(error, ToolFailure):
            return error
        first = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if isinstance(first, (TimeoutError, asyncio.CancelledError)):
            said = late
        else:
            said = f"failed: {type(first).__name__}: {first}".rstrip(": ")
        wrote = self.home.stderr_tail()
        return ToolFailure(f"MCP server {self.name} {said}" + (f" (its last words: {wrote})" if wrote else ""))


async def _told(future: Future[T]) -> T:
    """The result of a future of another thread; who stops waiting leaves it as it is, and its own loop may be gone by then."""
    loop = asyncio.get_running_loop()
    mine: asyncio.Future[None] = loop.create_future()

    def tell(_: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: None if mine.done() else mine.set_result(None))

    future.add_done_callback(tell)
    await mine
    return future.result()
