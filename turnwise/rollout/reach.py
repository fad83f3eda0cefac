"""An environment within reach: called under deadlines, on the loop or in a thread."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from inspect import isawaitable, iscoroutinefunction
from typing import TYPE_CHECKING, Any, TypeVar

from turnwise.env import Action, Env
from turnwise.env.tool_env import ToolEnv
from turnwise.errors import EnvError
from turnwise.rollout.waiting import AbandonableThreads, Deadline

if TYPE_CHECKING:
    from turnwise.env.process.process import ProcessEnv

T = TypeVar("T")

START_S = 120.0
"""Deadline of the start of a process; those of many episodes that begin at once wait for one another."""


class EnvCaller:
    """An environment of one episode, called under deadlines: async code on the loop, anything else in a thread."""

    def __init__(self, env: Env, deadline: Deadline, threads: AbandonableThreads, process: ProcessEnv | None = None) -> None:
        self.env = env
        self.process = process
        """The same, where it lives in a process of its own."""
        self.session = ""
        """Whose it is, for naming calls that never return."""
        self._step_is_async = _is_async(env.step)
        self._deadline = deadline
        self._threads = threads

    @classmethod
    async def make(
        cls,
        factory: Callable[[], Env],
        deadline: Deadline,
        threads: AbandonableThreads,
        seconds: float,
        *,
        isolated: bool = False,
    ) -> EnvCaller:
        """Make the environment of one episode: on the loop where its class is async, else in a thread.

        Args:
            isolated: whether it has a process of its own, which begins under a deadline of its own.

        Raises:
            TimeoutError: when it takes longer than `seconds`.
            EnvError: when the factory gives something else.
        """
        reset = getattr(factory, "reset", None)
        if reset is not None and _is_async(reset):
            env = await deadline.wait(_called(factory), seconds)
        else:
            env = await deadline.wait(threads.call(factory), seconds)
        if not isinstance(env, Env):
            raise EnvError(f"the environment factory gave {type(env).__name__}, not a turnwise.Env")
        process = None
        if isolated:
            from turnwise.env.process.process import ProcessEnv  # which few runs need

            if isinstance(env, ProcessEnv):
                process = env
                await deadline.wait(env.start(), START_S)
        return cls(env, deadline, threads, process)

    def step(self, action: Action, seconds: float) -> Awaitable[Any]:
        """One step; as `call`, with one coroutine less where the environment is async."""
        if self._step_is_async:
            waiting: Any = self.env.step(action)
            return self._deadline.wait(waiting, seconds)
        return self.call(self.env.step, action, seconds=seconds)

    async def call(self, method: Callable[..., Any], *args: Any, seconds: float, **kwargs: Any) -> Any:
        """What `method(*args)` gives, awaited where it is awaitable.

        Raises:
            TimeoutError: when it takes longer than `seconds`.
        """
        waiting: Awaitable[Any]
        if _is_async(method):
            waiting = method(*args, **kwargs)
        elif kwargs:
            waiting = self._threads.call(partial(method, *args, **kwargs), owner=self.session)
        else:
            waiting = self._threads.call(method, *args, owner=self.session)
        result = await self._deadline.wait(waiting, seconds)
        return await self._deadline.wait(result, seconds) if isawaitable(result) else result

    def count_abandoned_threads(self) -> None:
        """Count what the environment says it left in threads of its own (calls of tools), once it is closed."""
        for name in self.env.abandoned if isinstance(self.env, ToolEnv) else ():
            self._threads.abandoned += 1
            self._threads.names.append(f"{self.session} {name}".strip())


async def _called(function: Callable[[], T]) -> T:
    return function()


_ASYNC: dict[Any, bool] = {}


def _is_async(method: Callable[..., Any]) -> bool:
    function = getattr(method, "__func__", method)
    known = _ASYNC.get(function)
    if known is None:
        if len(_ASYNC) > 4096:
            _ASYNC.clear()
        known = _ASYNC[function] = iscoroutinefunction(function)
    return known
