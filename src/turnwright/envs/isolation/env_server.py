"""What a forked process does: it serves the calls of one environment, or of functions, one at a
time.

Requests are a method's name and its pickled arguments, from the process that started this one and
hence trusted. An answer is ("ok", value), ("invalid", words) for an `InvalidAction`, or ("error",
`Failure`); values leave as plain data. SIGTERM ends a call and closes the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import pickle
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from inspect import isawaitable
from typing import Any

from turnwright.config import Limits
from turnwright.envs.env import (
    Env,
    InlineObservation,
    NeedsLimits,
    NewHistory,
    Scores,
    Step,
    as_step,
)
from turnwright.envs.isolation.wire import HEAD, frame, picklable_value
from turnwright.envs.user_code import as_number, failure_of
from turnwright.errors import InvalidAction, UsageError, words
from turnwright.media import media_as_bytes
from turnwright.types import Task, as_messages


class _Stop(BaseException):
    """Raised by SIGTERM: the process is to end."""


class EnvServer:
    """Serves requests to one environment in its process, until `close`."""

    def __init__(self, sock: socket.socket, make: Callable[[], Env], grace_s: float) -> None:
        """`grace_s` is the time in which it has ended after SIGTERM."""
        self._sock = sock
        self._stream = sock.makefile("rb")
        self._make = make
        self._grace_s = grace_s
        self._env: Env | None = None
        self._runner = asyncio.Runner()
        self._task: asyncio.Task[Any] | None = None
        """That of the last call that ran on the loop."""
        self._stopping = False
        self._pid = os.getpid()

    def serve(self) -> None:
        """Answer requests until `close`, SIGTERM, or the end of the socket."""
        signal.signal(signal.SIGTERM, self._stop)
        self._send(0, self._pid)
        try:
            try:
                while (request := self._receive()) is not None:
                    self._answer(*request)
                    if request[1] == "close":
                        self._env = None
                    if request[1] == "close" or self._stopping:
                        return  # with `_stopping`, the call ended by itself before it was cancelled
            finally:
                self._ignore_signals()
        except _Stop:  # it may arrive as late as in the line above
            pass
        finally:
            self._ignore_signals()
            if self._env is not None:
                self._settle(self._quiet())
                with contextlib.suppress(Exception):
                    self._settle(self._env.close())

    def _ignore_signals(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)

    async def _quiet(self) -> None:
        """Cancel the tasks that an interrupted call left on the loop, without reporting their
        exceptions."""
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self._grace_s / 4)

    def _stop(self, *_: Any) -> None:
        """End the current call: cancel it where asyncio runs, which would report an exception and
        go on; else interrupt it."""
        self._stopping = True
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise _Stop from None

        if self._task is not None:
            loop.call_soon_threadsafe(self._task.cancel)
        # A call may block the loop, or ignore its cancellation.
        signal.signal(signal.SIGALRM, self._interrupt)
        signal.setitimer(signal.ITIMER_REAL, self._grace_s / 4)

    def _interrupt(self, *_: Any) -> None:
        raise _Stop

    def _answer(self, number: int, method: str, arguments: bytes) -> None:
        """Call a method, and send what it returns or raises."""
        answer: tuple[str, Any]
        try:
            answer = ("ok", self._call(method, *pickle.loads(arguments)))
        except InvalidAction as mistake:
            answer = ("invalid", words(mistake))
        except BaseException as error:
            if self._stopping:
                raise _Stop from error
            if not issubclass(type(error), Exception):
                error = RuntimeError(f"raised {words(error, repr)}")
            phase = "reward" if method == "score" else method
            answer = ("error", failure_of(error, phase))
        self._send(number, answer)

    def _call(self, method: str, *args: Any) -> Any:
        """Call a method of the environment, or a function; return plain data."""
        if method == "reset":
            return self._reset(*args)
        if method == "score":
            return _numbers(self._call_function(*args))
        if method == "call":
            return picklable_value(self._call_function(*args))

        env = self._env
        assert env is not None
        if method == "restore":
            args = (pickle.loads(args[0]),)
        result = self._settle(getattr(env, method)(*args))

        if method == "step":
            return _plain_step(as_step(result))
        if method == "snapshot":
            return pickle.dumps(result)
        return _number(result) if method == "reward" else None

    def _reset(self, task: Task, seed: int | None, limits: Limits | None) -> Any:
        """Make and reset the environment; return its opening and what `ProcessEnv` asks of it."""
        env = self._make()
        self._env = env
        if limits is not None and isinstance(env, NeedsLimits):
            env.set_limits(limits)
        opening = self._settle(env.reset(task, seed=seed))

        messages = None if opening is None else media_as_bytes(as_messages(opening))
        tools = picklable_value([dict(tool) for tool in env.tools])
        max_turns = getattr(env, "max_turns", None)
        has_reward = type(env).reward is not Env.reward
        has_snapshots = type(env).snapshot is not Env.snapshot
        return messages, tools, has_reward, has_snapshots, max_turns, env.on_turn_length

    def _call_function(self, data: bytes) -> Any:
        """Call a function with arguments, pickled together, which loads the function's module
        here."""
        try:
            function, args = pickle.loads(data)
        except AttributeError as error:
            raise UsageError(
                f"the process cannot find the reward: {error}; define it at the top level of a file"
            ) from error
        return self._settle(function(*args))

    def _settle(self, value: Any) -> Any:
        """Return a value, awaited on the loop if it is awaitable."""
        return self._runner.run(self._await(value)) if isawaitable(value) else value

    async def _await(self, value: Awaitable[Any]) -> Any:
        self._task = asyncio.current_task()
        return await value

    def _send(self, number: int, value: Any) -> None:
        if os.getpid() != self._pid:  # a fork made by the environment also returned from the call
            os._exit(1)
        self._sock.sendall(frame(number, pickle.dumps(value)))

    def _receive(self) -> tuple[int, str, bytes] | None:
        """Return number, method and pickled arguments of the next request; None at the end."""
        head = self._stream.read(HEAD.size)
        if len(head) < HEAD.size:
            return None
        _, number, size = HEAD.unpack(head)

        data = io.BytesIO(self._stream.read(size))
        if len(data.getbuffer()) < size:
            return None
        return number, pickle.load(data), data.read()


def _plain_step(step: Step) -> Step:
    """Return a step whose images are bytes and whose `info` is plain data, which can leave the
    process."""
    observation = step.observation
    if isinstance(observation, InlineObservation):
        (inserted,) = media_as_bytes((observation.message,))
        observation = replace(observation, text=inserted.content)
    elif isinstance(observation, NewHistory):
        observation = observation.with_new(media_as_bytes(observation.new))
    else:
        observation = media_as_bytes(as_messages(observation))
    return step._replace(observation=observation, info=picklable_value(dict(step.info)))


def _numbers(rewards: Any) -> Any:
    """Convert a reward, or a list of them."""
    if isinstance(rewards, (list, tuple)):
        return [_number(reward) for reward in rewards]
    return _number(rewards)


def _number(reward: Any) -> Any:
    """Convert a reward to plain floats, which can leave the process."""
    if isinstance(reward, Scores):
        return reward.checked("the reward")
    return as_number(reward, "the reward")
