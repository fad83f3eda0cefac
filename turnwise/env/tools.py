"""Tools: typed functions that a model may call, and what comes of a call."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, overload

from turnwise.env.near import did_you_mean
from turnwise.env.schema import BadArguments, Signature, ToolSchemaError, signature_of
from turnwise.errors import TurnwiseError
from turnwise.types import ImageRef, Message, Part, ToolCall


class ToolFailure(TurnwiseError, RuntimeError):
    """Raised by a tool for what is not the model's doing (a service is down): the episode fails, nothing is trained on it."""


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
    signature: Signature

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

    def __repr__(self) -> str:
        return f"<tool {self.name}>"


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    function: str | None = None, /, *, name: str | None = None, schema: Mapping[str, Any] | None = None
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | str | None = None,
    /,
    *,
    name: str | None = None,
    schema: Mapping[str, Any] | None = None,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool of a function: `@tool`, `@tool("name")` or `@tool(name=..., schema=...)`.

    Raises:
        ToolSchemaError: when the function cannot be one.
    """
    if function is None or isinstance(function, str):
        given = name or function
        return lambda wrapped: Tool(wrapped, signature_of(wrapped, name=given, schema=schema))
    return Tool(function, signature_of(function, name=name, schema=schema))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one call."""

    message: Message
    """The `tool` message that the model is shown."""
    error: str | None = None
    """Which mistake it was: the call's own `cause`, or `unknown_tool`, `unknown_argument`, `missing_argument`, `wrong_type` or
    `raised`; None when the call ran."""
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)


class Tools:
    """The tools of an environment, by name.

    Raises:
        ToolSchemaError: when something is not a function, cannot be a tool, or two have one name.
    """

    def __init__(self, tools: Iterable[Callable[..., Any] | Tool]) -> None:
        self._tools: dict[str, Tool] = {}
        for item in tools:
            made = item if isinstance(item, Tool) else _tool_of(item)
            if made.name in self._tools:
                sources = f"{_source(self._tools[made.name])} and {_source(made)}"
                raise ToolSchemaError(f"two tools are called {made.name!r}: {sources}; rename one with @tool(name=...)")
            self._tools[made.name] = made

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """What the model is told, in the order given."""
        return tuple(tool.schema for tool in self)

    async def call(self, call: ToolCall) -> Outcome:
        """Run one call. The model's mistakes, and exceptions of the tool, become a message `Error: ...`.

        Raises:
            ToolFailure: when the tool raised it.
        """
        if call.error is not None:
            return _mistake(call, call.cause or "malformed", call.error)
        found = self._tools.get(call.name)
        if found is None:
            return _mistake(
                call, "unknown_tool", f"no tool {call.name!r}; {did_you_mean(call.name, self._tools) or 'there is none'}"
            )
        try:
            arguments = found.signature.read(call.arguments)
        except BadArguments as error:
            return _mistake(call, error.cause, str(error))
        try:
            if inspect.iscoroutinefunction(found.function):
                result = await found.function(**arguments)
            else:
                result = await in_thread(found.function, arguments)
                if inspect.isawaitable(result):
                    result = await result
            return _outcome(call, result)
        except ToolFailure:
            raise
        except Exception as error:
            said = (
                str(error) if isinstance(error, ValueError) and str(error) else f"{type(error).__name__}: {error}".rstrip(": ")
            )
            return _mistake(call, "raised", said)


async def in_thread(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Run a function in a daemon thread of its own.

    A pool would do for what returns; a function that hangs for ever would keep a place of it, and the process from ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = context.run(function, **arguments)
        except Exception as raised:
            error = RuntimeError("StopIteration") if isinstance(raised, StopIteration) else raised
        except BaseException as raised:  # exit() in a tool must not look like ours
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=work, name=f"tool {getattr(function, '__name__', '')}", daemon=True).start()
    return await future


def _tool_of(item: Any) -> Tool:
    if not callable(item) or inspect.isclass(item):
        raise ToolSchemaError(f"{item!r:.80} is not a tool; give functions or what @tool makes of them")
    return Tool(item, signature_of(item))


def _source(tool: Tool) -> str:
    name = getattr(tool.function, "__qualname__", type(tool.function).__name__)
    return f"{getattr(tool.function, '__module__', '?')}.{name}"


def _mistake(call: ToolCall, kind: str, said: str) -> Outcome:
    return Outcome(_message(call, f"Error: {said}"), kind)


def _message(call: ToolCall, content: str | tuple[Part, ...]) -> Message:
    return Message("tool", content, tool_call_id=call.id or None, name=call.name or None)


def _outcome(call: ToolCall, result: Any) -> Outcome:
    """What a tool returned: text, parts, JSON, or verl's (response, reward[, metrics]) with None read as 0.0 and {}."""
    reward, metrics = 0.0, {}
    if isinstance(result, tuple) and len(result) in (2, 3) and _is_reward(result[1]):
        reward = 0.0 if result[1] is None else float(result[1])
        metrics = dict(result[2] or {}) if len(result) == 3 else {}
        result = result[0]
    return Outcome(_message(call, _content(result)), None, reward, metrics)


def _is_reward(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _content(result: Any) -> str | tuple[Part, ...]:
    if isinstance(result, str):
        return result
    if result is None:
        return ""
    if isinstance(result, Message):
        return result.content
    if isinstance(result, ImageRef):
        return (result,)
    if isinstance(result, (list, tuple)) and any(isinstance(part, ImageRef) for part in result):
        return tuple(part if isinstance(part, (str, ImageRef)) else json.dumps(part, default=str) for part in result)
    return json.dumps(result, ensure_ascii=False, default=str)
