"""Calling what a user wrote: async functions as they are, others in threads of their own; and reading what it gives."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import math
import threading
from collections.abc import Callable, Mapping
from decimal import Decimal
from numbers import Real
from typing import Any

from turnwise.errors import EnvError, RewardError, class_name, words


async def call_user(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """What a function gives: awaited when it is async, else run in a thread of its own.

    Raises:
        RuntimeError: where it asks the process to end. In a task of its own that would end the loop.
    """
    try:
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        result = await run_in_thread(function, arguments)
        return await result if inspect.isawaitable(result) else result
    except SystemExit as end:
        raise RuntimeError(f"SystemExit: {words(end)}") from end


def carried(error: BaseException) -> Exception:
    """Make an exception of a thread one that a future can carry: `exit()` in a tool, say, must not look like ours."""
    kind = type(error)  # what `__class__` claims is user code
    if issubclass(kind, StopIteration):
        return RuntimeError("StopIteration")
    if issubclass(kind, Exception):
        return error  # type: ignore[return-value]
    return RuntimeError(f"{class_name(error)}: {words(error)}")


ABANDONED_THREADS: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("left", default=None)
"""Where the environment of this task notes calls that nobody waits for any more, and that still hold a thread."""


async def run_in_thread(function: Callable[..., Any], arguments: Mapping[str, Any], name: str = "") -> Any:
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
        except BaseException as raised:
            error = carried(raised)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, error)

    thread = threading.Thread(target=work, name=f"tool {name}", daemon=True)
    thread.start()
    try:
        return await future
    except asyncio.CancelledError:
        left = ABANDONED_THREADS.get()
        if left is not None and thread.is_alive():
            thread.name = f"tool {name} abandoned"
            left.append(name)
        raise


def as_number(value: Any, what: str) -> float | None:
    """Read a number that a user's code returned: a reward, a score, a metric. None, which is not computed, stays None.

    A number is an int, a float, any other real number (numpy's scalars, fractions, decimals), or an array or tensor without
    dimensions that holds one. Text, bytes and booleans are none: "1", b"1" and True are mistakes more often than rewards.

    Args:
        what: the value's name in errors.

    Raises:
        RewardError: for anything else, and for a number that is not finite.
    """
    if value is None:
        return None
    number = number_of(value)
    if number is None:
        hint = ", float(...) where it is a yes or a no" if isinstance(_scalar(value), bool) else ""
        raise RewardError(f"{what} is {shown(value)}, not a number; None where there is none{hint}")
    if not math.isfinite(number):
        if isinstance(_scalar(value), int):
            raise RewardError(f"{what} is {shown(value)}, which no float can hold; rewards are finite")
        raise RewardError(f"{what} is {number}; rewards are finite, None where there is none")
    return number


def number_of(value: Any) -> float | None:
    """Return a number as a float, infinite where no float can hold it; None for anything else. See `as_number`."""
    if type(value) is float:
        return value
    plain = _scalar(value)
    if not isinstance(plain, (Real, Decimal)) or isinstance(plain, bool):
        return None
    try:
        return float(plain)
    except (OverflowError, ValueError):
        return math.inf


def as_flag(value: Any, what: str) -> bool:
    """Read a flag that a user's code returned, numpy's too.

    Raises:
        EnvError: for anything else, which Python would take for true or false.
    """
    if value is True or value is False:
        return value
    plain = _scalar(value)
    if isinstance(plain, bool):
        return plain
    raise EnvError(f"{what} is {shown(value)}, neither True nor False")


def shown(value: Any) -> str:
    """What was returned, for an error: its repr, cut, with its type where the repr does not tell it."""
    try:
        text = f"{value!r:.80}"
    except Exception:
        return f"a {type(value).__name__} without a repr"
    return text if isinstance(value, (str, bytes, bool, type(None), dict, list, tuple)) else f"{text} ({type(value).__name__})"


def _scalar(value: Any) -> Any:
    """What an array, a tensor or a numpy scalar without dimensions holds; anything else as it is."""
    try:
        return value.item() if tuple(value.shape) == () else value
    except Exception:  # no array, or one that does not say
        return value
