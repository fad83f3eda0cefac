"""Calling what a user wrote: async functions as they are, others in threads of their own."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import math
import threading
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any


def as_number(value: Any) -> float | None:
    """Return a number as a float: an int, a float, or a scalar of NumPy or of a tensor library. None for anything else.

    Booleans, strings and bytes are not numbers. NaN and infinities are; the caller decides about them.
    """
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf  # an integer of more digits than a float has


async def called(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """What a function gives: awaited when it is async, else run in a thread of its own.

    Raises:
        RuntimeError: where it asks the process to end. In a task of its own that would end the loop.
    """
    try:
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        result = await in_thread(function, arguments)
        return await result if inspect.isawaitable(result) else result
    except SystemExit as end:
        raise RuntimeError(f"SystemExit: {end}") from end


LEFT: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("left", default=None)
"""Where the environment of this task notes calls that nobody waits for any more, and that still hold a thread."""


async def in_thread(function: Callable[..., Any], arguments: Mapping[str, Any], name: str = "") -> Any:
    """Run a function in a daemon thread of its own.

    A pool would do for what returns; a function that hangs for ever would keep a place of it, and the process from ending.
    """
    name = name or getattr(function, "__name__", "")
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

    thread = threading.Thread(target=work, name=f"tool {name}", daemon=True)
    thread.start()
    try:
        return await future
    except asyncio.CancelledError:
        left = LEFT.get()
        if left is not None and thread.is_alive():
            thread.name = f"tool {name} abandoned"
            left.append(name)
        raise
