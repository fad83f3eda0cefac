"""Typed functions that a model may call, and the outcomes of calls."""

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
        home, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
        known = _named(home, name)
        if isinstance(known, Tool) and known.function is function:
            return _import_tool, (home, name, dict(self.row), self.source)
        return Tool, (function, self.signature, self.from_row, dict(self.row), self.source)

    def __repr__(self) -> str:
        return f"<tool {self.name}>"


def _named(home: str, name: str) -> Any:
    """Return the attribute of a loaded module by dotted name, or None."""
    found: Any = sys.modules.get(home)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _import_tool(home: str, name: str, row: Mapping[str, Any], source: str) -> Tool:
    """Import a tool pickled in another process."""
    importlib.import_module(home)
    found = _named(home, name)
    if not isinstance(found, Tool):
        raise UsageError(
            f"{home}.{name} is no tool in this process; put @tool on a function at the top level "
            "of a file"
        )
    return replace(found, row=row, source=source)


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
    """
    if function is None or isinstance(function, str):
        given = name or function
        hidden = (from_row,) if isinstance(from_row, str) else tuple(from_row)
        return lambda wrapped: Tool(
            wrapped, tool_signature(wrapped, name=given, schema=schema, from_row=hidden), hidden
        )
    return Tool(function, tool_signature(function))


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """Outcome of one call."""

    message: Message  # the `tool` message for the model
    error: str | None = None
    """Kind of error: the `cause` of a malformed call, or `unknown_tool`, `unknown_argument`,
    `missing_argument`, `wrong_type`, `raised`; None on success."""
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    cut: bool = False  # the result was truncated
    tool: str = ""  # tool name in the call
    seconds: float = 0.0


class Tools:
    """Tools of an episode by name, which must be unique."""

    def __init__(
        self, tools: Iterable[Callable[..., Any] | Tool], cut: ResultLimit | None = None
    ) -> None:
        self.cut = cut or ResultLimit()
        self._tools: dict[str, Tool] = {}
        for item in tools:
            made = as_tool(item)
            if made.name in self._tools:
                sources = f"{_source(self._tools[made.name])} and {_source(made)}"
                raise ToolSchemaError(
                    f"two tools are called {made.name!r}: {sources}; rename one with "
                    "@tool(name=...)"
                )
            self._tools[made.name] = made

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """Schemas of the tools, in the order given."""
        return tuple(tool.schema for tool in self)

    async def call_all(self, calls: Sequence[ToolCall]) -> list[CallOutcome]:
        """Run the calls of one reply: async tools concurrently, sync ones sequentially;
        outcomes in call order."""
        if len(calls) == 1:
            return [await self.call(calls[0])]
        outcomes: list[CallOutcome | None] = [None] * len(calls)

        async def run(numbers: Iterable[int]) -> None:
            for number in numbers:
                outcomes[number] = await self.call(calls[number])

        tools = [self._tools.get(call.name) for call in calls]
        waiting = [
            n
            for n, tool in enumerate(tools)
            if tool is not None and inspect.iscoroutinefunction(tool.function)
        ]
        in_order = [number for number in range(len(calls)) if number not in waiting]
        if not waiting or len(waiting) + bool(in_order) == 1:
            await run(range(len(calls)))
            return outcomes  # type: ignore[return-value]
        try:
            async with asyncio.TaskGroup() as group:
                for numbers in (*((number,) for number in waiting), in_order):
                    group.create_task(run(numbers))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if None in outcomes:
            raise RuntimeError("a tool cancelled its own call")
        return outcomes  # type: ignore[return-value]

    async def call(self, call: ToolCall) -> CallOutcome:
        """Run one call; mistakes of the model and exceptions of the tool, except
        `ToolFailure`, become `Error: ...`."""
        began = time.monotonic()
        returned, error = await self._call(call)
        content, cut = self.cut(returned.content)
        message = Message("tool", content, tool_call_id=call.id or None, name=call.name or None)
        return CallOutcome(
            message,
            error,
            returned.reward,
            returned.metrics,
            cut,
            call.name,
            time.monotonic() - began,
        )

    async def _call(self, call: ToolCall) -> tuple[ToolResult, str | None]:
        """Return the result of one call, and its kind of error."""
        if call.error is not None:
            return _error_result(call.error), call.cause or "malformed"
        found = self._tools.get(call.name)
        if found is None:
            near = suggest_or_list(call.name, self._tools) or "there is none"
            return _error_result(f"no tool {call.name!r}; {near}"), "unknown_tool"
        try:
            arguments = found.signature.read(call.arguments)
        except InvalidArguments as error:
            return _error_result(str(error)), error.cause
        if found.row:
            arguments = {**arguments, **found.row}
        try:
            result = await call_user(found.function, arguments)
        except (ToolFailure, ToolSchemaError):
            raise
        except Exception as error:
            text = words(error)
            if not text or not issubclass(type(error), ValueError):
                text = f"{class_name(error)}: {text}".rstrip(": ")
            return _error_result(text), "raised"
        returned = read_result(result, call.name)
        if returned.error and isinstance(returned.content, str):
            return _error_result(returned.content), "raised"
        for what, value in (
            ("reward", returned.reward),
            *((f"metric {key!r}", n) for key, n in returned.metrics.items()),
        ):
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                # One that is not finite would corrupt every mean.
                as_number(value, f"the tool {call.name!r} gave the {what}, which")
        return returned, "raised" if returned.error else None


def _error_result(text: str) -> ToolResult:
    return ToolResult(f"Error: {text}")


def as_tool(item: Any) -> Tool:
    """Convert a function to a tool; return a tool unchanged."""
    if isinstance(item, Tool):
        made = item
    elif callable(item) and not inspect.isclass(item):
        made = Tool(item, tool_signature(item))
    else:
        raise ToolSchemaError(f"{item!r:.80} is not a tool; give functions or @tool objects")
    if not made.source and takes_self(made):
        raise ToolSchemaError(
            f"tool {made.name!r} is a method without its object; give the class, or "
            f"object.{made.name}"
        )
    return made


def takes_self(tool: Tool) -> bool:
    """Whether the function of a tool is an unbound method."""
    return (
        inspect.isfunction(tool.function) and next(iter(parameters_of(tool.function)), "") == "self"
    )


def _source(tool: Tool) -> str:
    if tool.source:
        return tool.source
    name = getattr(tool.function, "__qualname__", type(tool.function).__name__)
    return f"{getattr(tool.function, '__module__', '?')}.{name}"
