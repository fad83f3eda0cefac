"""Typed functions that a model may call, and the outcomes of calls.

`tool` makes a `Tool` of a function, `Tools.call_all` runs the calls of a reply, and
`Tools._call` says what becomes of one. Schemas and arguments are in `tool_schema.py`, return values
in `results.py`, tools with a state of their own in `stateful.py`.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

from turnwright.envs.tools.results import ResultLimit, ToolResult, read_result
from turnwright.envs.tools.tool_schema import (
    InvalidArguments,
    ToolSchemaError,
    ToolSignature,
    parameters_of,
    tool_signature,
)
from turnwright.envs.user_code import as_number, call_user
from turnwright.errors import ToolFailure, UsageError, class_name, suggest_or_list, words
from turnwright.types import Message, ToolCall


@dataclass(frozen=True, slots=True)
class Tool:
    """Function with a schema; calling it calls the function.

    Example::

        @tool("add")
        def plus(a: int, b: int = 1) -> int:
            '''Add two numbers.'''
            return a + b
    """

    function: Callable[..., Any]
    """Async, or sync and then run in a thread."""
    signature: ToolSignature
    from_row: tuple[str, ...] = ()
    """Parameters set by the task's row and hidden from the model."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """Values of these parameters in this episode."""
    source: str = ""
    """Origin in errors; empty for a function, which has a module and a name."""

    @property
    def name(self) -> str:
        """Name in calls of the model."""
        return self.signature.name

    @property
    def schema(self) -> Mapping[str, Any]:
        """OpenAI schema."""
        return self.signature.schema

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function without checking the arguments."""
        return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by name if `@tool` replaced the function, so another process can import it."""
        function = self.function
        home = getattr(function, "__module__", "")
        name = getattr(function, "__qualname__", "")
        named = _named(home, name)
        if isinstance(named, Tool) and named.function is function:
            return _import_tool, (home, name, dict(self.row), self.source)
        return Tool, (function, self.signature, self.from_row, dict(self.row), self.source)

    def __repr__(self) -> str:
        return f"<tool {self.name}>"


def _named(home: str, name: str) -> Any:
    """Return the attribute of a loaded module by dotted name, or None."""
    value: Any = sys.modules.get(home)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _import_tool(home: str, name: str, row: Mapping[str, Any], source: str) -> Tool:
    """Import a tool pickled in another process."""
    importlib.import_module(home)
    imported = _named(home, name)
    if not isinstance(imported, Tool):
        raise UsageError(
            f"{home}.{name} is no tool in this process; put @tool on a function at the top level "
            "of a file"
        )
    return replace(imported, row=row, source=source)


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    function: str | None = None,
    /,
    *,
    name: str | None = None,
    schema: Mapping[str, Any] | None = None,
    from_row: Sequence[str] = (),
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | str | None = None,
    /,
    *,
    name: str | None = None,
    schema: Mapping[str, Any] | None = None,
    from_row: Sequence[str] = (),
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool of a function: `@tool`, `@tool("name")` or
    `@tool(name=..., schema=..., from_row=...)`.

    Args:
        name: tool name, by default the function's name.
        schema: OpenAI schema instead of one from hints and docstring.
        from_row: parameters hidden from the model and set by `tools_kwargs` of the task's row.

    Raises:
        ToolSchemaError: for a function that cannot be a tool.

    Example::

        >>> @tool("add")
        ... def plus(a: int, b: int = 1) -> int:
        ...     '''Add two numbers.'''
        ...     return a + b
        >>> plus
        <tool add>
        >>> plus.schema["function"]["parameters"]["required"]
        ['a']
    """
    if function is not None and not isinstance(function, str):
        return Tool(function, tool_signature(function))

    tool_name = name or function
    hidden = (from_row,) if isinstance(from_row, str) else tuple(from_row)

    def make(wrapped: Callable[..., Any]) -> Tool:
        signature = tool_signature(wrapped, name=tool_name, schema=schema, from_row=hidden)
        return Tool(wrapped, signature, hidden)

    return make


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """Outcome of one call."""

    message: Message
    """The `tool` message for the model."""
    error: str | None = None
    """Kind of error: the `cause` of a malformed call, or `unknown_tool`, `unknown_argument`,
    `missing_argument`, `wrong_type`, `raised`; None on success."""
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    cut: bool = False
    """Whether the result was truncated."""
    tool: str = ""
    """Tool name in the call."""
    seconds: float = 0.0


class Tools:
    """Tools of an episode by name, which must be unique."""

    def __init__(
        self, tools: Iterable[Callable[..., Any] | Tool], cut: ResultLimit | None = None
    ) -> None:
        self.cut = cut or ResultLimit()
        self._tools: dict[str, Tool] = {}
        for item in tools:
            tool = as_tool(item)
            if tool.name in self._tools:
                sources = f"{_source(self._tools[tool.name])} and {_source(tool)}"
                raise ToolSchemaError(
                    f"two tools are called {tool.name!r}: {sources}; rename one with "
                    "@tool(name=...)"
                )
            self._tools[tool.name] = tool

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """Schemas of the tools, in the order given."""
        return tuple(tool.schema for tool in self)

    async def call_all(self, calls: Sequence[ToolCall]) -> list[CallOutcome]:
        """Run the calls of one reply: async tools concurrently, sync ones sequentially; outcomes in
        call order."""
        if len(calls) == 1:
            return [await self.call(calls[0])]

        concurrent: list[int] = []  # calls by number
        sequential: list[int] = []
        for number, call in enumerate(calls):
            tool = self._tools.get(call.name)
            if tool is not None and inspect.iscoroutinefunction(tool.function):
                concurrent.append(number)
            else:
                sequential.append(number)

        outcomes: list[CallOutcome | None] = [None] * len(calls)

        async def run(numbers: Iterable[int]) -> None:
            for number in numbers:
                outcomes[number] = await self.call(calls[number])

        if not concurrent:
            await run(sequential)
            return outcomes  # type: ignore[return-value]
        try:
            async with asyncio.TaskGroup() as group:
                for number in concurrent:
                    group.create_task(run([number]))
                group.create_task(run(sequential))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if None in outcomes:
            raise RuntimeError("a tool cancelled its own call")
        return outcomes  # type: ignore[return-value]

    async def call(self, call: ToolCall) -> CallOutcome:
        """Run one call; mistakes of the model and exceptions of the tool, except `ToolFailure`,
        become `Error: ...`."""
        began = time.monotonic()
        result, error = await self._call(call)
        content, is_cut = self.cut(result.content)
        message = Message("tool", content, tool_call_id=call.id or None, name=call.name or None)
        seconds = time.monotonic() - began
        return CallOutcome(
            message, error, result.reward, result.metrics, is_cut, call.name, seconds
        )

    async def _call(self, call: ToolCall) -> tuple[ToolResult, str | None]:
        """Return the result of one call, and its kind of error."""
        # Mistakes of the model.
        if call.error is not None:
            return _error_result(call.error), call.cause or "malformed"
        tool = self._tools.get(call.name)
        if tool is None:
            near = suggest_or_list(call.name, self._tools) or "there is none"
            return _error_result(f"no tool {call.name!r}; {near}"), "unknown_tool"
        try:
            arguments = tool.signature.read(call.arguments)
        except InvalidArguments as error:
            return _error_result(str(error)), error.cause
        if tool.row:
            arguments = {**arguments, **tool.row}

        try:
            value = await call_user(tool.function, arguments)
        except (ToolFailure, ToolSchemaError):
            raise
        except Exception as error:
            # A ValueError is what tools tell the model with: its text alone.
            text = words(error)
            if not text or not issubclass(type(error), ValueError):
                text = f"{class_name(error)}: {text}".rstrip(": ")
            return _error_result(text), "raised"

        result = read_result(value, call.name)
        if result.error and isinstance(result.content, str):
            return _error_result(result.content), "raised"
        _check_number(call.name, "reward", result.reward)
        for name, number in result.metrics.items():
            _check_number(call.name, f"metric {name!r}", number)
        return result, "raised" if result.error else None


def _check_number(tool_name: str, what: str, value: Any) -> None:
    """Raise `RewardError` for a number of a tool that is not finite: it would corrupt every
    mean."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        as_number(value, f"the tool {tool_name!r} gave the {what}, which")


def _error_result(text: str) -> ToolResult:
    return ToolResult(f"Error: {text}")


def as_tool(item: Any) -> Tool:
    """Convert a function to a tool; return a tool unchanged."""
    if isinstance(item, Tool):
        tool = item
    elif callable(item) and not inspect.isclass(item):
        tool = Tool(item, tool_signature(item))
    else:
        raise ToolSchemaError(f"{item!r:.80} is not a tool; give functions or @tool objects")
    if not tool.source and takes_self(tool):
        raise ToolSchemaError(
            f"tool {tool.name!r} is a method without its object; give the class, or "
            f"object.{tool.name}"
        )
    return tool


def takes_self(tool: Tool) -> bool:
    """Whether the function of a tool is an unbound method."""
    if not inspect.isfunction(tool.function):
        return False
    return next(iter(parameters_of(tool.function)), "") == "self"


def _source(tool: Tool) -> str:
    """Return where a tool comes from, for errors."""
    if tool.source:
        return tool.source
    name = getattr(tool.function, "__qualname__", type(tool.function).__name__)
    return f"{getattr(tool.function, '__module__', '?')}.{name}"
