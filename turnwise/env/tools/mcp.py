"""The tools of MCP servers as tools of an environment, through the official `mcp` package."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from turnwise.env.near import suggest_or_list
from turnwise.env.tools.jsontypes import flatten
from turnwise.env.tools.lifetime import ToolInstance
from turnwise.env.tools.mcp_session import McpSession, SessionThread
from turnwise.env.tools.results import Content, ToolResult, join_content
from turnwise.env.tools.rows import RowArguments
from turnwise.env.tools.schema import ToolSchemaError, ToolSignature, checked_name
from turnwise.env.tools.tools import Tool
from turnwise.errors import ConfigError
from turnwise.types import NO_AUDIO, Image

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
    """The tools of an MCP server, for `tool_env(tools=[...])`; needs `pip install '.[mcp]'`.

    Example::

        files = mcp_tools(["python", "server.py"], only=["read_file"])
        web = mcp_tools("http://127.0.0.1:8000/mcp", session="shared", prefix="web_")

    Args:
        server: a command with its arguments, spoken to over its standard input and output; or a URL (streamable HTTP).
        name: what errors call it; by default the URL, or the last part of the command.
        session: `trajectory`, one for each episode (a command is then a process for each); or `shared`, one for all episodes
            that run at the same time, closed with the last of them.
        only: the server's names of the tools to take; by default all.
        prefix: stands in front of each tool's name.
        rename: the server's names to others, where a name cannot be a tool's or two would be alike; without the prefix.
        env, cwd: of the process: variables besides PATH, HOME and such, and its directory.
        headers: of each HTTP request.
        connect_s: seconds to begin a session, the start of a process included.
        call_s: seconds for one call.

    Raises:
        ConfigError: when `mcp` is not installed, or a setting cannot be.
    """
    url = isinstance(server, str)
    if isinstance(server, str) and not server.startswith(("http://", "https://")):
        raise ConfigError(
            f'mcp_tools({server!r}): a URL begins with http:// or https://; a command is a list, ["python", "server.py"]'
        )
    if not server:
        raise ConfigError('mcp_tools([]): give a command and its arguments, ["python", "server.py"]')
    if session not in ("trajectory", "shared"):
        raise ConfigError(f'mcp_tools: session = {session!r}; write "trajectory" or "shared"')
    for key, value in (("connect_s", connect_s), ("call_s", call_s)):
        if not value > 0:
            raise ConfigError(f"mcp_tools: {key} is {value}; it is over 0 seconds")
    if url and (env is not None or cwd is not None):
        raise ConfigError("mcp_tools: env and cwd are for commands; a server at a URL has its own")
    if not url and headers is not None:
        raise ConfigError("mcp_tools: headers are for URLs; give a command its env")
    if importlib.util.find_spec("mcp") is None:
        raise ConfigError("mcp_tools needs the package mcp; pip install 'mcp>=2'")
    command = server if isinstance(server, str) else tuple(map(str, server))
    return McpTools(
        command,
        name or (str(server) if url else Path(command[-1]).name),
        session,
        None if only is None else tuple(only),
        prefix,
        dict(rename or {}),
        None if env is None else dict(env),
        cwd,
        dict(headers or {}),
        connect_s,
        call_s,
    )


@dataclass(eq=False)
class McpTools:
    """What `mcp_tools` returns: a source of tools, whose names are known when a session is open."""

    server: str | tuple[str, ...]
    name: str
    session: str = "trajectory"
    only: tuple[str, ...] | None = None
    prefix: str = ""
    rename: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] | None = None
    cwd: Path | str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    connect_s: float = 30.0
    call_s: float = 30.0
    _home: SessionThread | None = field(default=None, init=False, repr=False)
    _shared: McpSession | None = field(default=None, init=False, repr=False)
    _lock: Any = field(default_factory=threading.Lock, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Its settings: sessions stay in the process that opened them."""
        return {key: value for key, value in vars(self).items() if not key.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_home": None, "_shared": None, "_lock": threading.Lock()}

    @property
    def names(self) -> None:
        """Not known before a session is open."""
        return None

    def open(self, row: RowArguments, lives: list[ToolInstance]) -> ToolInstance:
        """Its life in one episode."""
        return _McpLife(self)

    def acquire(self) -> McpSession:
        """A session to use, begun where there is none to share."""
        with self._lock:
            if self._shared is not None and not self._shared.broken:
                self._shared.users += 1
                return self._shared
            if self._home is None:
                self._home = SessionThread()
            made = McpSession(self._home, self.name, self._connect, self.connect_s)
            made.users = 1
            if self.session == "shared":
                self._shared = made
            made.over.add_done_callback(self._left)
            return made

    def release(self, session: McpSession) -> None:
        """One user less; a session without any is closed."""
        with self._lock:
            session.users -= 1
            if session.users:
                return
            if self._shared is session:
                self._shared = None
        session.start_closing()

    def made(self, tools: Sequence[Any], call: Call) -> tuple[Tool, ...]:
        """Tools of an environment from those that a server lists.

        Raises:
            ToolSchemaError: for a name in `only` or `rename` that the server does not have, or one that cannot be a tool's.
        """
        listed = {tool.name: tool for tool in tools}
        for key, named in (("only", self.only or ()), ("rename", self.rename)):
            for one in named:
                if one not in listed:
                    near = suggest_or_list(one, listed) or "it has none"
                    raise ToolSchemaError(f"MCP server {self.name} has no tool {one!r}, which {key} names; {near}")
        taken = [tool for tool in tools if self.only is None or tool.name in self.only]
        return tuple(self._tool(tool, call) for tool in taken)

    def _tool(self, listed: Any, call: Call) -> Tool:
        where = f"MCP server {self.name}"
        name = checked_name(self.prefix + self.rename.get(listed.name, listed.name), where, "rename=")
        raw = listed.input_schema if isinstance(listed.input_schema, Mapping) else {}
        try:
            parameters = flatten(raw)
        except (ValueError, KeyError):  # a type that holds itself: told as it is, and checked by the server
            parameters = dict(raw)
        body = {"name": name, "description": listed.description or "", "parameters": {"type": "object"} | parameters}

        async def run(**arguments: Any) -> ToolResult:
            return await call(listed.name, arguments)

        return Tool(run, ToolSignature({"type": "function", "function": body}, {}), source=where)

    def _left(self, _: Any) -> None:
        """A session is over, and perhaps the thread with it (this runs in that thread)."""
        with self._lock:
            if self._home is not None and self._home.empty:
                self._home.end()
                self._home = None

    def _connect(self, session: McpSession) -> AbstractAsyncContextManager[Any]:
        return _connected(self, session)


@asynccontextmanager
async def _connected(settings: McpTools, session: McpSession) -> Any:
    from mcp import Client, StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    async with AsyncExitStack() as stack:
        transport: Any
        if isinstance(settings.server, str):
            client = await stack.enter_async_context(create_mcp_http_client(headers=dict(settings.headers)))
            transport = streamable_http_client(settings.server, http_client=client)
        else:
            command, *args = settings.server
            env = dict(settings.env or {}) | {"TURNWISE_MCP_SESSION": session.token}
            transport = stdio_client(
                StdioServerParameters(command=command, args=args, env=env, cwd=settings.cwd), errlog=session.home.log
            )
        yield await stack.enter_async_context(Client(transport))


class _McpLife:
    """What a server is within one episode: its own session, or a share in one."""

    def __init__(self, source: McpTools) -> None:
        self._source = source
        self._session: McpSession | None = None
        self.tools: tuple[Tool, ...] = ()

    @property
    def name(self) -> str:
        """The server's."""
        return self._source.name

    async def create(self) -> Content:
        """Begin the session.

        Raises:
            ToolFailure: when the server cannot be reached.
            ToolSchemaError: as `McpTools.made`.
        """
        self._session = self._source.acquire()
        self.tools = self._source.made(await self._session.tools(), self._call)
        return ""

    async def reward(self) -> float | None:
        """None of its own."""
        return 0.0

    async def release(self) -> None:
        """Let go of the session; waits until it is closed where nobody else uses it."""
        session, self._session = self._session, None
        if session is not None:
            self._source.release(session)
            if not session.users:
                await session.closed()

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
    """A block of a result: text, an image, or a mark that the model can see."""
    data = getattr(block, "data", None) if block.type == "image" else getattr(getattr(block, "resource", None), "blob", None)
    if isinstance(data, str) and _mime(block).startswith("image/") and "svg" not in _mime(block):
        return (Image(f"data:{_mime(block)};base64,{data}", alt=_left_out(block)),)
    return _text(block)


def _text(block: Any) -> str:
    """A block of a result as text; what is none stands as a mark that the model can see."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource" and getattr(block.resource, "text", None) is not None:
        return str(block.resource.text)
    if block.type == "resource_link":
        return f"[{block.uri}]"
    return _left_out(block)


def _left_out(block: Any) -> str:
    mime = _mime(block)
    return f"[left out: {mime}; {NO_AUDIO}]" if mime.startswith("audio") else f"[left out: {mime}]"


def _mime(block: Any) -> str:
    """What a block says that it is."""
    found = getattr(block, "mime_type", None) or getattr(getattr(block, "resource", None), "mime_type", None) or block.type
    return str(found)
