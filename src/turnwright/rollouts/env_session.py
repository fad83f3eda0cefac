"""Environment of one episode: calls under deadlines, retries and recovery."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from inspect import iscoroutinefunction
from types import MethodType, NoneType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import orjson

from turnwright.config import EnvRules
from turnwright.envs import Action, Env, InlineObservation, NewHistory, Step
from turnwright.envs.env import (
    NeedsDecoder,
    NeedsLimits,
    SupportsSnapshot,
    as_step,
    check_size,
    implements,
)
from turnwright.envs.threads import AbandonableThreads
from turnwright.envs.tool_env import ToolEnv
from turnwright.envs.user_code import RemoteException, failure_of, is_awaitable, retryable
from turnwright.errors import EnvError, InvalidAction, ProcessDied, words
from turnwright.media import has_media
from turnwright.records.run_dir import to_json
from turnwright.rollouts.counts import add_counts
from turnwright.rollouts.recorder import Recorder
from turnwright.rollouts.resume import RestartEpisode, ResumeDiffers, read_step, step_row
from turnwright.rollouts.retries import LONGEST_WAIT_S, backoff_s
from turnwright.rollouts.timeouts import Deadline
from turnwright.types import Failure, FailureKind, Message, Task, Tools, Turn, as_messages

if TYPE_CHECKING:
    from turnwright.envs.isolation.process_env import ProcessEnv


T = TypeVar("T")

START_S = 120.0
"""Seconds for a process to start; processes of many episodes that start together
wait for one another."""


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


class EnvSession:
    """Environment of one episode, with the steps taken so far, so that it
    can recover from failures.

    A failed step is retried after the environment is back in its last state. `restore` brings
    it there if the environment has snapshots. Otherwise a fresh instance is reset with the same
    seed and takes the same actions; each observation is compared with the first. If one
    differs, the episode starts over.

    In an environment with effects (`env.effects`), no step is repeated: the journal has the
    result of each and the state after it, which a resumed episode reads; without a state to
    restore, the episode starts over.
    """

    def __init__(
        self,
        make: Callable[[], Env],
        task: Task,
        rules: EnvRules,
        recorder: Recorder,
        deadline: Deadline,
        threads: AbandonableThreads,
    ) -> None:
        self.rules = rules
        self.process: ProcessEnv | None = None
        """The environment if it runs in its own process, else None."""
        self._env: Env | None = None
        self._step_is_async = False
        self._owner = ""
        """Session of the attempt, which names calls that never return."""
        self._make = make
        self._task = task
        self._recorder = recorder
        self._deadline = deadline
        self._threads = threads
        self._seconds = recorder.limits.env_s
        self.can_retry = rules.retries.turn > 0 or (
            rules.isolation == "process" and rules.retries.reward > 0
        )
        """Whether the rules allow a step or a reward to be retried."""
        self.can_recover = self.can_retry or rules.effects
        """Whether steps are kept, to be retried here or read from the journal
        by a resumed episode."""
        self._retries_left = rules.retries.episode
        self._examined: Env | None = None
        self._declared: SupportsSnapshot | None = None
        self._discard()

    def _discard(self) -> None:
        self._opening: tuple[tuple[Message, ...], list[Any]] | None = None
        self._steps: list[tuple[Action, Any]] = []
        self._state: Any = None

    @property
    def env(self) -> Env:
        """The current instance; there is none before the first and between two."""
        assert self._env is not None
        return self._env

    def call_step(self, action: Action) -> Awaitable[Any]:
        """Start one step. Like `call`, with one coroutine less for an async environment."""
        if self._step_is_async:
            waiting: Any = self.env.step(action)
            return self._deadline.wait(waiting, self._seconds)
        return self.call(self.env.step, action)

    async def call(
        self, method: Callable[..., Any], *args: Any, seconds: float | None = None, **kwargs: Any
    ) -> Any:
        """Return the result of `method(*args)`, awaited if it is awaitable: on the loop if it is
        async, else in a thread."""
        seconds = self._seconds if seconds is None else seconds
        waiting: Awaitable[Any]
        if _is_async(method):
            waiting = method(*args, **kwargs)
        else:
            function = partial(method, **kwargs) if kwargs else method
            waiting = self._threads.call(function, *args, owner=self._owner)
        result = await self._deadline.wait(waiting, seconds)
        return await self._deadline.wait(result, seconds) if is_awaitable(result) else result

    async def reset(self) -> tuple[tuple[Message, ...], Tools]:
        """Construct and reset the environment; return the opening messages and the tools
        offered to the model."""
        self._discard()
        await self._close_quietly()
        self._recorder.enter_phase("reset")
        try:
            await self._open()
        except Exception as error:
            await self._recover(error, 1)
        assert self._opening is not None
        if self.rules.effects:
            await self._resume_state()
        return self._opening[0], self.env.tools

    async def step(self, action: Action, turn: Turn) -> Step:
        """Take one step, with retries where the environment fails and the rules allow it;
        one with effects only once.

        A resumed episode reads a step with effects from the record. If the run was killed between
        the step and its entry, the environment is in the state before it now, and the step is
        counted in `resume_steps_in_doubt`.
        """
        if not self.rules.effects:
            return await self._step(action, turn)
        recorder = self._recorder
        number = len(recorder.trajectory.turns) - 1
        row, step = recorder.resumed.steps.get(number, {}), None
        if not row:
            if recorder.resumed.has(number):
                add_counts(recorder.trajectory, "resume_steps_in_doubt")
            try:
                step = await self._step(action, turn)
                row = step_row(step)
            except InvalidAction as mistake:
                row = {"invalid": words(mistake)}
            row |= await self._state_row()
            recorder.journal.step(number, row)
        if "invalid" in row:
            raise InvalidAction(row["invalid"])
        return step or read_step(row)

    async def _step(self, action: Action, turn: Turn) -> Step:
        digest: Any
        tries = 0
        while True:
            try:
                await self._snapshot()
                step = await self._step_once(action)
                digest = _step_digest(step)
            except InvalidAction as mistake:
                self._steps.append((action, words(mistake)))
                raise
            except Exception as error:
                before, tries = tries, await self._recover(error, tries + 1)
                turn.retries += tries - before
                self._recorder.enter_phase("step", time.monotonic())
            else:
                self._steps.append((action, digest))
                return step

    async def _step_once(self, action: Action) -> Step:
        """Take one step and store the media of its observation."""
        step = as_step(await self.call_step(action))
        if isinstance(step.observation, (str, NoneType)):
            return step
        final = step.terminated or step.truncated
        if isinstance(step.observation, InlineObservation):
            (inserted,) = await self._store_media((step.observation.message,), final)
            return step._replace(observation=replace(step.observation, text=inserted.content))
        if isinstance(step.observation, NewHistory):
            new = await self._store_media(step.observation.new, final)
            return step._replace(observation=step.observation.with_new(new))
        return step._replace(
            observation=await self._store_media(as_messages(step.observation), final)
        )

    async def wait(self, awaitable: Awaitable[T], seconds: float) -> T:
        """Wait as `Deadline.wait` does."""
        return await self._deadline.wait(awaitable, seconds)

    async def revive(self) -> None:
        """Restore an environment whose process ended during its reward, for a retry; raise
        `ProcessDied` if it cannot be."""
        if self.process is None or not self.process.exited:
            return
        gone = ProcessDied("the environment's process ended when its reward was asked for")
        try:
            await self._restore(failure_of(gone, "reward"))
        except RestartEpisode as other:
            raise ProcessDied(f"{gone}, and could not be brought back: {other}") from other

    async def close(self) -> None:
        """Close the environment."""
        env, self._env, self.process = self._env, None, None
        if env is None:
            return
        try:
            if env.close != MethodType(
                Env.close, env
            ):  # which does nothing, and a call in a thread takes 0.1 ms
                await self.call(env.close)
        finally:
            for name in env.abandoned if isinstance(env, ToolEnv) else ():  # calls of tools
                self._threads.abandoned += 1
                self._threads.names.append(f"{self._owner} {name}".strip())

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Run a long computation in a worker thread."""
        return await self._deadline.wait(
            self._threads.call(function, *args, owner=self._recorder.session), self._seconds
        )

    async def take_in(
        self, messages: tuple[Message, ...], *, final: bool = False
    ) -> tuple[Message, ...]:
        """Store the media of messages, or describe them for a text-only model; images
        are decoded in a thread.

        No model reads a `final` observation; its media do not count.
        """
        if not has_media(messages):
            return messages
        messages = await self._store_media(messages, final)
        if not final:
            self._recorder.media_intake.count(messages)
        return messages

    async def _store_media(
        self, messages: tuple[Message, ...], final: bool = False
    ) -> tuple[Message, ...]:
        if not has_media(messages):
            return messages
        intake = self._recorder.media_intake
        take_in = partial(intake.take_in, final=final)
        return await self.in_thread(take_in, messages) if intake.has_vision else take_in(messages)

    # Recovery

    async def _open(self) -> None:
        recorder = self._recorder
        reset = getattr(self._make, "reset", None)
        on_loop = reset is not None and _is_async(reset)  # as an async class is
        env = await self._deadline.wait(
            _called(self._make) if on_loop else self._threads.call(self._make), self._seconds
        )
        if not isinstance(env, Env):
            raise EnvError(
                f"the environment factory returned {type(env).__name__}, not a turnwright.Env"
            )
        if self.rules.isolation == "process":
            from turnwright.envs.isolation.process_env import ProcessEnv  # few runs need it

            if isinstance(env, ProcessEnv):
                await self._deadline.wait(env.start(), START_S)
                self.process = env
        self._env, self._step_is_async, self._owner = env, _is_async(env.step), recorder.session
        if implements(type(env), NeedsLimits):
            cast(NeedsLimits, env).set_limits(recorder.limits)
        if implements(type(env), NeedsDecoder):
            cast(NeedsDecoder, env).set_decoder(recorder.decode_text)
        opening = await self.call(env.reset, self._task, seed=recorder.seed & 0x7FFFFFFF)
        check_size(opening, "reset")
        messages = self._task.messages if opening is None else as_messages(opening)
        # a later reset is compared with stored media: the environment may draw
        # on the same canvas again
        if self.can_retry:
            messages = await self._store_media(messages)
        tools = list(env.tools)
        if self._opening is not None and self._opening != (messages, tools):
            raise RestartEpisode("its opening differs")
        self._opening = messages, tools

    async def _snapshot(self) -> None:
        env = self.env
        if self._examined is not env:  # takes 40 us, so only where steps are kept
            self._examined, self._declared = env, env if isinstance(env, SupportsSnapshot) else None
        declared = None if self._declared is None else self._declared.snapshots
        if declared or (declared is None and type(env).snapshot is not Env.snapshot):
            self._state = None
            self._state = await self.call(env.snapshot)

    async def _recover(self, error: Exception, tries: int) -> int:
        """Restore the environment after a failure; return the number of tries so far, or
        raise the last failure."""
        recorder = self._recorder
        failures = recorder.trajectory.failures
        while True:
            failure = failure_of(error, recorder.phase, len(recorder.trajectory.turns) - 1)
            left = (
                tries <= self.rules.retries.turn
                and self._retries_left > 0
                and not self._deadline.expired
            )
            if not left or not retryable(failure) or is_over(error):
                raise error
            self._retries_left -= 1
            failures.append(failure)
            number = len(failures) - 1
            try:
                seconds = backoff_s(self.rules, tries, recorder.seed + self._retries_left)
                await self._deadline.wait(asyncio.sleep(seconds), 2 * LONGEST_WAIT_S)
                failures[number] = replace(failure, recovery=await self._restore(failure))
            except RestartEpisode:
                failures[number] = replace(failure, recovery="attempt")
                raise
            except Exception as again:
                error, tries = again, tries + 1
            else:
                return tries

    async def _state_row(self) -> dict[str, Any]:
        """Return the environment's state for the journal; empty without snapshots, or if JSON
        would change the state."""
        self._state = None
        await self._snapshot()
        with suppress(Exception):  # comparing objects of user code
            if self._state is not None and orjson.loads(to_json(self._state)) == self._state:
                return {"state": self._state}
        return {}

    async def _resume_state(self) -> None:
        """Restore the recorded state of an interrupted episode, and write the state that
        the episode begins in."""
        recorded = self._recorder.resumed.state
        if recorded is None:
            self._recorder.journal.step(-1, await self._state_row())
            return
        try:
            await self.call(self.env.restore, recorded["state"])
        except Exception as error:
            raise ResumeDiffers(f"the environment could not be restored: {words(error)}") from error
        for (
            number,
            row,
        ) in (
            self._recorder.resumed.steps.items()
        ):  # before its turns: each play has what it may go on from
            self._recorder.journal.step(number, row)

    async def _restore(self, failure: Failure) -> str:
        """Bring the environment into its state before the failed step; return
        `restored` or `replayed`."""
        recorder = self._recorder
        state, self._state = self._state, None  # a failed restore is not retried; a replay follows
        gone = failure.kind == FailureKind.TIMEOUT or failure.type == ProcessDied.__name__
        if state is not None and self._env is not None and not gone:
            await self.call(self._env.restore, state)
            return "restored"
        if state is None and self.rules.effects and recorder.trajectory.turns:
            raise RestartEpisode("its steps have effects and it has no snapshots")
        await self._close_quietly()  # a timed-out call may still run in it
        recorder.enter_phase("reset", time.monotonic())
        await self._open()
        recorder.enter_phase("step")
        if state is not None:
            await self.call(self.env.restore, state)
            return "restored"
        for action, before in self._steps:
            recorder.enter_phase("step", time.monotonic())
            try:
                now = _step_digest(await self._step_once(action))
            except InvalidAction as mistake:
                now = words(mistake)
            if now != before:
                raise RestartEpisode("a replayed step differs")
        return "replayed"

    async def _close_quietly(self) -> None:
        """Close a failed instance; record an exception instead of raising it."""
        try:
            await self.close()
        except Exception as error:
            self._recorder.trajectory.failures.append(failure_of(error, "close"))


def is_over(error: BaseException) -> bool:
    """Return whether a recorded failure, raised in a replay, ended the episode."""
    kind = type(error)
    return (
        issubclass(kind, RemoteException) and kind.over
    )  # read from the class: attributes of the object may be user code


def _step_digest(step: Step) -> Any:
    """Return the parts of a step that must be equal when it is replayed."""
    observation: Any = step.observation
    if not isinstance(observation, (InlineObservation, NewHistory)):
        observation = as_messages(observation)
    return observation, step.reward, step.terminated, step.truncated
