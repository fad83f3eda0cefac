"""Tools from MCP servers.

The official client must be closed by the task that opened it, and closing a server process can take
seconds. A rollout may be cancelled meanwhile, or its event loop closed. So sessions run in the
event loop of a separate thread, which ends with the last session.

`mcp_tools` makes the source `McpTools`, which opens an `McpInstance` for each episode: a session of
its own or a shared one. `McpSession._run_session` is the life of a session, in the thread.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import importlib.util
import json
import os
import signal
import tempfile
import threading
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from turnwright.envs.tools.results import Content, ToolResult, join_content
from turnwright.envs.tools.stateful import RowArguments, ToolInstance
from turnwright.envs.tools.tool import Tool
from turnwright.envs.tools.tool_schema import ToolSchemaError, ToolSignature, checked_name, flatten
from turnwright.errors import ConfigError, ToolFailure, first_exception, suggest_or_list
from turnwright.types import Image

T = TypeVar("T")

_CLOSING_S = 10.0
"""Maximum seconds to close a session: the client waits 2 s for a process to end, 2 s after
SIGTERM, then kills it."""

_PAGES = 100
"""Maximum pages of a server's list of tools."""

_LOG_BYTES = 1 << 20
"""What is kept of the standard error of servers."""

_NO_AUDIO = "models here see images and videos, and hear nothing; give a transcript"
"""Read by the model in place of the audio."""


class SessionThread:
    """Thread with an event loop for sessions; ends with the last one."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.log: Any = tempfile.TemporaryFile("a+", errors="replace")  # noqa: SIM115
        """What servers write to stderr."""
        self.sessions: set[McpSession] = set()
        self._thread = threading.Thread(target=self._run_loop, name="turnwright-mcp", daemon=True)
        self._thread.start()
        atexit.register(self._close_sessions)

    def add(self, session: McpSession) -> None:
        """Register a session."""
        if self.log.seek(0, 2) > _LOG_BYTES:
            self.log.truncate(0)  # servers append, so they continue at its start
        self.sessions.add(session)

    def kill(self, token: str) -> None:
        """Kill the process group started with this token in its environment; needs /proc."""
        children = Path(f"/proc/self/task/{self._thread.native_id}/children")
        with contextlib.suppress(OSError):
            for word in children.read_text().split():
                pid = int(word)
                has_token = token.encode() in Path(f"/proc/{pid}/environ").read_bytes()
                if has_token and os.getpgid(pid) == pid:
                    os.killpg(pid, signal.SIGKILL)

    def _run_loop(self) -> None:
        """Run the loop until it is stopped; the body of the thread."""
        with self.log, asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.get_loop().run_forever()
            # The runner cancels the tasks that are left, and must not report their exceptions.
            self.loop.set_exception_handler(lambda *_: None)
        atexit.unregister(self._close_sessions)

    def _close_sessions(self) -> None:
        for session in list(self.sessions):
            session.start_closing()
        self._thread.join(_CLOSING_S)


@dataclass(eq=False)
class McpSession:
    """One connection, from the first `acquire` to the last `release`."""

    session_thread: SessionThread
    name: str
    _connect: Callable[[McpSession, AsyncExitStack], Awaitable[Any]]
    _connect_s: float
    users: int = 0
    broken: bool = False
    """Whether the server closed it or missed a deadline; a broken session is not shared."""
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Identifies the server's process."""
    ready: Future[list[Any]] = field(default_factory=Future)
    """The server's tools, or the failure."""
    over: Future[None] = field(default_factory=Future)
    """Done when it is closed."""
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _client: Any = None
    _in_flight: int = 0
    _session_task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.session_thread.add(self)
        self.session_thread.loop.call_soon_threadsafe(self._begin)

    async def call(self, name: str, arguments: Mapping[str, Any], seconds: float) -> Any:
        """Call a tool; raise `ToolFailure` without an answer in time, `ValueError` when the server
        rejects the arguments."""
        work = self._call(name, dict(arguments), seconds)
        return await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(work, self.session_thread.loop)
        )

    def start_closing(self) -> None:
        """Start closing the session; callable from any thread."""
        self.session_thread.loop.call_soon_threadsafe(self._close)

    def _begin(self) -> None:
        self._session_task = self.session_thread.loop.create_task(self._run_session())

    def _close(self) -> None:
        """Close the session; runs in the thread."""
        self._stop.set()
        assert self._session_task is not None
        is_connecting = not self.ready.done()
        if is_connecting:
            self._session_task.cancel()
        if is_connecting or self._in_flight:
            # It hangs: a graceful close would take seconds.
            self.session_thread.kill(self.token)
        self._session_task.add_done_callback(lambda _: self._finish())

    def _finish(self) -> None:
        if not self.over.done():
            self.session_thread.sessions.discard(self)
            self.over.set_result(None)

    async def _run_session(self) -> None:
        """Connect, list the tools, wait for the end and close; all in one task, as the client
        demands."""
        stack = AsyncExitStack()
        try:
            # The first import takes a second or more, which must not count against the server.
            importlib.import_module("mcp")
            async with asyncio.timeout(self._connect_s):
                self._client = await self._connect(self, stack)
                tools = await self._list()
            self.ready.set_result(tools)
            await self._stop.wait()
        except BaseException as error:
            self.broken = True
            if not self.ready.done():
                late = f"could not be reached within {self._connect_s:g} s"
                self.ready.set_exception(self._failure(error, late))
            if not isinstance(error, (Exception, asyncio.CancelledError)):
                raise
        finally:
            try:
                async with asyncio.timeout(_CLOSING_S):
                    await stack.aclose()
            except Exception:  # the connection is closed even if the server fails to close cleanly
                self.broken = True

    async def _list(self) -> list[Any]:
        """Return the server's tools, of all pages."""
        tools: list[Any] = []
        cursor: str | None = None
        for _ in range(_PAGES):
            page = await self._client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                return tools
        raise ToolFailure(f"MCP server {self.name}: its list of tools has over {_PAGES} pages")

    async def _call(self, name: str, arguments: dict[str, Any], seconds: float) -> Any:
        """Call a tool; runs in the thread. One without an answer stays in flight."""
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
            late = f"did not answer a call of {name!r} within {seconds:g} s"
            raise self._failure(error, late) from error

    def _failure(self, error: BaseException, late: str) -> ToolFailure:
        """Return the failure of a server, `late` where it missed a deadline, with the end of its
        log."""
        if isinstance(error, ToolFailure):
            return error
        first = first_exception(error)
        if isinstance(first, (TimeoutError, asyncio.CancelledError)):
            problem = late
        else:
            problem = f"failed: {type(first).__name__}: {first}".rstrip(": ")

        log = self.session_thread.log
        log.seek(max(0, log.seek(0, 2) - 400))
        tail = " ".join(log.read().split())[-200:]
        message = f"MCP server {self.name} {problem}"
        return ToolFailure(f"{message} (stderr: {tail})" if tail else message)


async def _result_of(future: Future[T]) -> T:
    """Wait for a future of another thread; cancelling the wait leaves it untouched, even if this
    loop closes."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not done.done():
            done.set_result(None)

    def notify(_: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(wake)

    future.add_done_callback(notify)
    await done
    return future.result()


Call = Callable[[str, Mapping[str, Any]], Awaitable[ToolResult]]


def mcp_tools(
    server: str | Sequence[str],
    *,
    name: str | None = None,
    session: Literal["trajectory", "shared"] = "trajectory",
    only: Sequence[str] | None = None,
    prefix: str = "",
    rename: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    headers: Mapping[str, str] | None = None,
    connect_s: float = 30.0,
    call_s: float = 30.0,
) -> McpTools:
    """Make a source of the tools of an MCP server, for `tool_env(tools=[...])`.

    Needs `pip install '.[mcp]'`.

    Example::

        files = mcp_tools(["python", "server.py"], only=["read_file"])
        web = mcp_tools("http://127.0.0.1:8000/mcp", session="shared", prefix="web_")

    Args:
        server: a command with arguments, connected over standard input and output; or a URL
            (streamable HTTP).
        name: name in errors; by default the URL, or the last part of the command.
        session: `trajectory`, one per episode (a command is then a process per episode); or
            `shared`, one for all concurrent episodes, closed with the last.
        only: the server's names of the tools to use; by default all.
        prefix: prefix of each tool's name.
        rename: new names, without the prefix, by the server's names; for invalid or duplicate
            names.
        env, cwd: environment variables of the process, besides PATH, HOME and such, and its
            directory.
        headers: headers of each HTTP request.
        connect_s: deadline in seconds to open a session, including the start of a process.
        call_s: deadline in seconds of one call.

    Raises:
        ConfigError: without the package `mcp`, or for an invalid setting.
    """
    is_url = isinstance(server, str)
    if isinstance(server, str) and not server.startswith(("http://", "https://")):
        raise ConfigError(
            f"mcp_tools({server!r}): a URL begins with http:// or https://; a command is a list, "
            '["python", "server.py"]'
        )
    if not server:
        raise ConfigError(
            'mcp_tools([]): give a command and its arguments, ["python", "server.py"]'
        )
    if session not in ("trajectory", "shared"):
        raise ConfigError(f'mcp_tools: session = {session!r}; write "trajectory" or "shared"')
    for key, value in (("connect_s", connect_s), ("call_s", call_s)):
        if not value > 0:
            raise ConfigError(f"mcp_tools: {key} is {value}; it is over 0 seconds")
    if is_url and (env is not None or cwd is not None):
        raise ConfigError("mcp_tools: env and cwd are for commands; a server at a URL has its own")
    if not is_url and headers is not None:
        raise ConfigError("mcp_tools: headers are for URLs; give a command its env")
    if importlib.util.find_spec("mcp") is None:
        raise ConfigError("mcp_tools needs the package mcp; pip install 'mcp>=2'")

    if not isinstance(server, str):
        server = tuple(map(str, server))
    if not name:
        name = server if isinstance(server, str) else Path(server[-1]).name
    return McpTools(
        server=server,
        name=name,
        session=session,
        only=None if only is None else tuple(only),
        prefix=prefix,
        rename=dict(rename or {}),
        env=None if env is None else dict(env),
        cwd=cwd,
        headers=dict(headers or {}),
        connect_s=connect_s,
        call_s=call_s,
    )


@dataclass(frozen=True, slots=True)
class ListedSignature:
    """Signature of a tool, and what the server listed of it."""

    listed: Mapping[str, Any]
    description: str
    signature: ToolSignature


def _signature(name: str, description: str, listed: Mapping[str, Any], where: str) -> ToolSignature:
    """Make the signature of a server's tool: its schema without titles, its definitions in place of
    their names."""
    try:
        parameters = flatten(listed)
    except (ValueError, KeyError, RecursionError):
        # A recursive type, or other references: the model reads it unchanged.
        parameters = dict(listed)
    if "type" not in parameters:
        parameters = {"type": "object"} | parameters
    body = {"name": name, "description": description, "parameters": parameters}
    try:
        return ToolSignature({"type": "function", "function": body}, {})
    except ToolSchemaError as error:
        raise ToolSchemaError(f"{where}: {error}") from error


@dataclass(eq=False)
class McpTools:
    """Tool source returned by `mcp_tools`; tool names are known once a session is open."""

    server: str | tuple[str, ...]
    name: str
    session: str
    only: tuple[str, ...] | None
    prefix: str
    rename: Mapping[str, str]
    env: Mapping[str, str] | None
    cwd: Path | str | None
    headers: Mapping[str, str]
    connect_s: float
    call_s: float
    _session_thread: SessionThread | None = field(default=None, init=False, repr=False)
    _shared: McpSession | None = field(default=None, init=False, repr=False)
    _lock: Any = field(default_factory=threading.Lock, init=False, repr=False)
    _signatures: dict[str, ListedSignature] = field(default_factory=dict, init=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the settings only: sessions belong to this process."""
        settings = [setting.name for setting in fields(self) if setting.init]
        return McpTools, tuple(getattr(self, name) for name in settings)

    @property
    def names(self) -> None:
        """None: unknown before a session is open."""
        return None

    def open(self, row: RowArguments, instances: list[ToolInstance]) -> ToolInstance:
        """Make the instance of one episode."""
        return McpInstance(self)

    def acquire(self) -> McpSession:
        """Return the shared session if there is one, else a new one."""
        with self._lock:
            if self._shared is not None and not self._shared.broken:
                self._shared.users += 1
                return self._shared

            if self._session_thread is None:
                self._session_thread = SessionThread()
            session = McpSession(self._session_thread, self.name, self._connect, self.connect_s)
            session.users = 1
            if self.session == "shared":
                self._shared = session
            session.over.add_done_callback(self._on_session_closed)
            return session

    def release(self, session: McpSession) -> None:
        """Release a session; the last release closes it."""
        with self._lock:
            session.users -= 1
            if session.users:
                return
            if self._shared is session:
                self._shared = None
        session.start_closing()

    def convert(self, tools: list[Any], call: Call) -> tuple[Tool, ...]:
        """Convert the server's tools, which are called by `call`."""
        listed = {tool.name: tool for tool in tools}
        for setting, names in (("only", self.only or ()), ("rename", self.rename)):
            for name in names:
                if name not in listed:
                    near = suggest_or_list(name, listed) or "it has none"
                    raise ToolSchemaError(
                        f"MCP server {self.name} has no tool {name!r}, which {setting} names; "
                        f"{near}"
                    )
        chosen = [tool for tool in tools if self.only is None or tool.name in self.only]
        return tuple(self._tool(tool, call) for tool in chosen)

    def _tool(self, listed: Any, call: Call) -> Tool:
        """Convert one tool of the server's list."""
        where = f"MCP server {self.name}"
        new_name = self.prefix + self.rename.get(listed.name, listed.name)
        name = checked_name(new_name, where, "rename=")
        schema = listed.input_schema if isinstance(listed.input_schema, Mapping) else {}
        description = listed.description or ""

        # Each episode lists the tools; the same schema is read, and its validator made, once.
        last = self._signatures.get(name)
        if last is None or (last.listed, last.description) != (schema, description):
            signature = _signature(name, description, schema, where)
            last = ListedSignature(schema, description, signature)
            self._signatures[name] = last

        async def run(**arguments: Any) -> ToolResult:
            return await call(listed.name, arguments)

        return Tool(run, last.signature, source=where)

    def _on_session_closed(self, _: Any) -> None:
        """End the session thread after its last session; runs in that thread."""
        with self._lock:
            thread = self._session_thread
            if thread is not None and not thread.sessions:
                thread.loop.call_soon_threadsafe(thread.loop.stop)
                self._session_thread = None

    async def _connect(self, session: McpSession, stack: AsyncExitStack) -> Any:
        """Return a client of the server, whose connection `stack` closes."""
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        transport: Any
        if isinstance(self.server, str):
            client = await stack.enter_async_context(
                create_mcp_http_client(headers=dict(self.headers))
            )
            transport = streamable_http_client(self.server, http_client=client)
        else:
            command, *args = self.server
            env = {**(self.env or {}), "TURNWRIGHT_MCP_SESSION": session.token}
            settings = StdioServerParameters(command=command, args=args, env=env, cwd=self.cwd)
            transport = stdio_client(settings, errlog=session.session_thread.log)
        return await stack.enter_async_context(Client(transport))


@dataclass(slots=True)
class McpInstance:
    """Session of one episode, own or shared."""

    _source: McpTools
    _session: McpSession | None = None
    tools: tuple[Tool, ...] = ()

    @property
    def name(self) -> str:
        """Name of the server."""
        return self._source.name

    async def create(self) -> Content:
        """Open the session."""
        self._session = self._source.acquire()
        listed = await _result_of(self._session.ready)
        self.tools = self._source.convert(listed, self._call)
        return ""

    async def reward(self) -> float | None:
        """Return 0.0: MCP tools have no reward."""
        return 0.0

    async def release(self) -> None:
        """Release the session; the last user waits until it is closed.

        Cancelling the wait does not cancel the close.
        """
        session = self._session
        self._session = None
        if session is None:
            return
        self._source.release(session)
        if not session.users:
            await _result_of(session.over)

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        assert self._session is not None
        result = await self._session.call(name, arguments, self._source.call_s)
        content: Content = ""
        for block in result.content:
            content = join_content(content, _read(block))
        if not result.content and result.structured_content is not None:
            content = json.dumps(result.structured_content, ensure_ascii=False)
        return ToolResult(content, error=bool(result.is_error))


def _read(block: Any) -> Content:
    """Convert a content block of a result: text, an image, or a visible marker."""
    resource = getattr(block, "resource", None)
    resource_text = getattr(resource, "text", None)
    if block.type == "image":
        data = getattr(block, "data", None)
    else:
        data = getattr(resource, "blob", None)
    mime_type = getattr(block, "mime_type", None) or getattr(resource, "mime_type", None)
    mime = str(mime_type or block.type)
    reason = f"; {_NO_AUDIO}" if mime.startswith("audio") else ""
    left_out = f"[left out: {mime}{reason}]"

    if isinstance(data, str) and mime.startswith("image/") and "svg" not in mime:
        return (Image(f"data:{mime};base64,{data}", alt=left_out),)
    if block.type == "text":
        return str(block.text)
    if block.type == "resource" and resource_text is not None:
        return str(resource_text)
    if block.type == "resource_link":
        return f"[{block.uri}]"
    return left_out
