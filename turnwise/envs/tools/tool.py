"""Tools: typed functions that a model may call, and what comes of a call."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, overload

from turnwise.envs.tools.results import Content, ResultLimit, ToolResult, read_result
from turnwise.envs.tools.schema import InvalidArguments, ToolSchemaError, ToolSignature, tool_signature
from turnwise.envs.user_code import call_user, suggest_or_list
from turnwise.errors import RewardError, ToolFailure, UsageError, class_name, words
from turnwise.types import Message, ToolCall


@dataclass(frozen=True, slots=True)
class Tool:
    """A function with its schema. Still called like the function that it was made from.

    Example::

        @tool("add")
        def plus(a: int, b: int = 1) -> int:
            '''Add two numbers.'''
            return a + b
    """

    function: Callable[..., Any]
    """Sync (it then runs in a thread) or async."""
    signature: ToolSignature
    from_row: tuple[str, ...] = ()
    """Parameters that the task's row gives, and that the model is not told of."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """What the row of an episode gives for them."""
    source: str = ""
    """Where it comes from, for errors; empty for a function, which says so itself."""

    @property
    def name(self) -> str:
        """What the model calls it."""
        return self.signature.name

    @property
    def schema(self) -> Mapping[str, Any]:
        """In OpenAI's shape."""
        return self.signature.schema

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function as it is, arguments unchecked."""
        return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """By name where `@tool` put it in its function's place, so that another process finds it there."""
        function = self.function
        home, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
        known = _named(home, name)
        if isinstance(known, Tool) and known.function is function:
            return _import_tool, (home, name, dict(self.row), self.source)
        return Tool, (function, self.signature, self.from_row, dict(self.row), self.source)

    def __repr__(self) -> str:
        return f"<tool {self.name}>"


def _named(home: str, name: str) -> Any:
    """What a module has of a dotted name; None where it has nothing."""
    found: Any = sys.modules.get(home)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _import_tool(home: str, name: str, row: Mapping[str, Any], source: str) -> Tool:
    """A tool of another process, as it stands in this one."""
    importlib.import_module(home)
    found = _named(home, name)
    if not isinstance(found, Tool):
        raise UsageError(f"{home}.{name} is no tool in this process; put @tool on a function at the top level of a file")
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
    """Make a tool of a function: `@tool`, `@tool("name")` or `@tool(name=..., schema=..., from_row=...)`.

    Args:
        name: what the model calls it, by default the function's name.
        schema: in OpenAI's shape, instead of one from hints and docstring.
        from_row: parameters that the model is not told of; the task's row gives them, in `tools_kwargs`.

    Raises:
        ToolSchemaError: when the function cannot be one.
    """
    if function is None or isinstance(function, str):
        given = name or function
        hidden = (from_row,) if isinstance(from_row, str) else tuple(from_row)
        return lambda wrapped: Tool(wrapped, tool_signature(wrapped, name=given, schema=schema, from_row=hidden), hidden)
    return Tool(function, tool_signature(function))


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """What came of one call."""

    message: Message
    """The `tool` message that the model is shown."""
    error: str | None = None
    """Which mistake it was: the call's own `cause`, or `unknown_tool`, `unknown_argument`, `missing_argument`, `wrong_type` or
    `raised`; None when the call ran."""
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    cut: bool = False
    """The result was too long, and the model is shown a part of it."""
    tool: str = ""
    """The name that the call gave."""
    seconds: float = 0.0


class Tools:
    """The tools of an episode, by name.

    Raises:
        ToolSchemaError: when something is not a function, cannot be a tool, or two have one name.
    """

    def __init__(self, tools: Iterable[Callable[..., Any] | Tool], cut: ResultLimit | None = None) -> None:
        self.cut = cut or ResultLimit()
        self._tools: dict[str, Tool] = {}
        for item in tools:
            made = as_tool(item)
            if made.name in self._tools:
                sources = f"{_source(self._tools[made.name])} and {_source(made)}"
                raise ToolSchemaError(f"two tools are called {made.name!r}: {sources}; rename one with @tool(name=...)")
            self._tools[made.name] = made

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """What the model is told, in the order given."""
        return tuple(tool.schema for tool in self)

    async def call_all(self, calls: Sequence[ToolCall]) -> list[CallOutcome]:
        """Run the calls of one reply: async tools at the same time, sync ones one after another; outcomes in call order.

        Raises:
            ToolFailure, EnvError: as `call`; the calls that still ran are cancelled.
        """
        if len(calls) == 1:
            return [await self.call(calls[0])]
        outcomes: list[CallOutcome | None] = [None] * len(calls)

        async def run(numbers: Iterable[int]) -> None:
            for number in numbers:
                outcomes[number] = await self.call(calls[number])

        waiting = [n for n, call in enumerate(calls) if call.name in self._tools and _is_async(self._tools[call.name])]
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
        """Run one call. The model's mistakes, and exceptions of the tool, become a message `Error: ...`.

        Raises:
            ToolFailure: when the tool raised it.
            EnvError: when it returned what cannot be read.
            RewardError: for a reward or metric that is not finite.
        """
        began = time.monotonic()
        outcome = await self._call(call)
        return replace(outcome, tool=call.name, seconds=time.monotonic() - began)

    async def _call(self, call: ToolCall) -> CallOutcome:
        if call.error is not None:
            return self._mistake(call, call.cause or "malformed", call.error)
        found = self._tools.get(call.name)
        if found is None:
            near = suggest_or_list(call.name, self._tools) or "there is none"
            return self._mistake(call, "unknown_tool", f"no tool {call.name!r}; {near}")
        try:
            arguments = found.signature.read(call.arguments)
        except InvalidArguments as error:
            return self._mistake(call, error.cause, str(error))
        if found.row:
            arguments = {**arguments, **found.row}
        try:
            result = await call_user(found.function, arguments)
        except (ToolFailure, ToolSchemaError):
            raise
        except Exception as error:
            said = words(error)
            if not said or not issubclass(type(error), ValueError):
                said = f"{class_name(error)}: {said}".rstrip(": ")
            return self._mistake(call, "raised", said)
        return self._outcome(call, read_result(result, call.name))

    def _outcome(self, call: ToolCall, returned: ToolResult) -> CallOutcome:
        if returned.error and isinstance(returned.content, str):
            return self._mistake(call, "raised", returned.content)
        for what, value in (("reward", returned.reward), *((f"metric {key!r}", n) for key, n in returned.metrics.items())):
            if isinstance(value, (int, float)) and not isfinite(value):  # it would pass for 0, or spoil every mean
                raise RewardError(f"the tool {call.name!r} gave the {what} {value}; such numbers are finite")
        content, cut = self.cut(returned.content)
        error = "raised" if returned.error else None
        return CallOutcome(_message(call, content), error, returned.reward, returned.metrics, cut)

    def _mistake(self, call: ToolCall, kind: str, said: str) -> CallOutcome:
        content, cut = self.cut(f"Error: {said}")
        return CallOutcome(_message(call, content), kind, cut=cut)


def as_tool(item: Any) -> Tool:
    """A function as a tool; a tool as it is.

    Raises:
        ToolSchemaError: for anything else, and for a method that belongs to no object.
    """
    if isinstance(item, Tool):
        made = item
    elif callable(item) and not inspect.isclass(item):
        made = Tool(item, tool_signature(item))
    else:
        raise ToolSchemaError(f"{item!r:.80} is not a tool; give functions or what @tool makes of them")
    if (
        not made.source
        and inspect.isfunction(made.function)
        and next(iter(inspect.signature(made.function).parameters), "") == "self"
    ):
        raise ToolSchemaError(f"tool {made.name!r} is a method without its object; give the class, or object.{made.name}")
    return made


def _is_async(tool: Tool) -> bool:
    return inspect.iscoroutinefunction(tool.function)


def _source(tool: Tool) -> str:
    if tool.source:
        return tool.source
    name = getattr(tool.function, "__qualname__", type(tool.function).__name__)
    return f"{getattr(tool.function, '__module__', '?')}.{name}"


def _message(call: ToolCall, content: Content) -> Message:
    return Message("tool", content, tool_call_id=call.id or None, name=call.name or None)
