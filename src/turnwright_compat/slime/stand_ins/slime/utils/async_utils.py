"""Coroutines from synchronous code."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Coroutine
from typing import Any


def run(coro: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end on an event loop of its own, and return its result."""
    found: list[Any] = []
    failed: list[BaseException] = []
    context = contextvars.copy_context()

    def work() -> None:
        try:
            found.append(context.run(asyncio.run, coro))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]
