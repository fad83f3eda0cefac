"""The environment of one episode: its calls under deadlines, its retries and its recovery.

`EnvSession.call` is the way of every call of user code: awaited on the loop if it is async, else in
a thread. `EnvSession.step` retries a step that failed, after `_restore` has brought the environment
back into its last state, by its snapshot or by replaying the episode's actions.

The loop that takes the steps is `episode._attempt`; deadlines are in `timeouts.Deadline`.
"""

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
"""Seconds for a process to start; processes of many episodes that start together wait for one
another."""


async def _called(function: Callable[[], T]) -> T:
    return function()


_IS_ASYNC: dict[Any, bool] = {}


def _is_async(method: Callable[..., Any]) -> bool:
    """Return whether a method is a coroutine function, which is asked once for each function."""
    function = getattr(method, "__func__", method)
    is_async = _IS_ASYNC.get(function)
    if is_async is None:
        # Factories may be made for each episode, so the table is emptied when it is large.
        if len(_IS_ASYNC) > 4096:
            _IS_ASYNC.clear()
        is_async = iscoroutinefunction(function)
        _IS_ASYNC[function] = is_async
    return is_async


class EnvSession:
    """Environment of one episode, with the steps taken so far, so that it can recover from
    failures.

    A failed step is retried after the environment is back in its last state. `restore` brings it
    there if the environment has snapshots. Otherwise a fresh instance is reset with the same seed
    and takes the same actions; each observation is compared with the first. If one differs, the
    episode starts over.

    In an environment with effects (`env.effects`), no step is repeated: the journal has the result
    of each and the state after it, which a resumed episode reads; without a state to restore, the
    episode starts over.
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
        self._make = make
        self._task = task
        self._recorder = recorder
        self._deadline = deadline
        self._threads = threads
        self._seconds = recorder.limits.env_s

        # The current instance.
        self._env: Env | None = None
        self._step_is_async = False
        self._owner = ""
        """Session of the attempt, which names calls that never return."""
        self.process: ProcessEnv | None = None
        """The environment if it runs in its own process, else None."""
        self._examined: Env | None = None
        """The instance that was asked whether it declares snapshots."""
        self._declared: SupportsSnapshot | None = None
        """That instance, if it does."""

        # What it can be brought back from.
        self.can_retry = rules.retries.turn > 0 or (
            rules.isolation == "process" and rules.retries.reward > 0
        )
        """Whether the rules allow a step or a reward to be retried."""
        self.can_recover = self.can_retry or rules.effects
        """Whether steps are kept, to be retried here or read from the journal by a resumed
        episode."""
        self._retries_left = rules.retries.episode
        self._discard()

    def _discard(self) -> None:
        """Forget what an attempt can be brought back from."""
        self._opening: tuple[tuple[Message, ...], list[Any]] | None = None
        self._steps: list[tuple[Action, Any]] = []
        """Actions, each with the digest of its step or the text of its refusal."""
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
        """Return the result of `method(*args)`, awaited if it is awaitable.

        An async method runs on the loop, another in a thread.
        """
        if seconds is None:
            seconds = self._seconds
        waiting: Awaitable[Any]
        if _is_async(method):
            waiting = method(*args, **kwargs)
        else:
            function = partial(method, **kwargs) if kwargs else method
            waiting = self._threads.call(function, *args, owner=self._owner)

        result = await self._deadline.wait(waiting, seconds)
        if is_awaitable(result):
            return await self._deadline.wait(result, seconds)
        return result

    async def reset(self) -> tuple[tuple[Message, ...], Tools]:
        """Construct and reset the environment; return its opening messages and its tools."""
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
        """Take one step, with retries where the environment fails and the rules allow it.

        One with effects is taken only once: a resumed episode reads it from the record. If the run
        was killed between the step and its entry, the environment is in the state before it now,
        and the step is counted in `resume_steps_in_doubt`.
        """
        if not self.rules.effects:
            return await self._step(action, turn)

        recorder = self._recorder
        number = len(recorder.trajectory.turns) - 1
        row = recorder.resumed.steps.get(number, {})
        step = None
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
        """Take one step, and again after a failure that the rules forgive."""
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
                tries_now = await self._recover(error, tries + 1)
                turn.retries += tries_now - tries
                tries = tries_now
                self._recorder.enter_phase("step", time.monotonic())
            else:
                self._steps.append((action, digest))
                return step

    async def _step_once(self, action: Action) -> Step:
        """Take one step and store the media of its observation."""
        step = as_step(await self.call_step(action))
        if isinstance(step.observation, (str, NoneType)):
            return step

        observation: Any
        final = step.terminated or step.truncated
        if isinstance(step.observation, InlineObservation):
            (inserted,) = await self._store_media((step.observation.message,), final)
            observation = replace(step.observation, text=inserted.content)
        elif isinstance(step.observation, NewHistory):
            new = await self._store_media(step.observation.new, final)
            observation = step.observation.with_new(new)
        else:
            observation = await self._store_media(as_messages(step.observation), final)
        return step._replace(observation=observation)

    async def wait(self, awaitable: Awaitable[T], seconds: float) -> T:
        """Wait as `Deadline.wait` does."""
        return await self._deadline.wait(awaitable, seconds)

    async def revive(self) -> None:
        """Restore an environment whose process ended during its reward, for a retry.

        Raises `ProcessDied` if it cannot be restored.
        """
        if self.process is None or not self.process.exited:
            return
        gone = ProcessDied("the environment's process ended when its reward was asked for")
        try:
            await self._restore(failure_of(gone, "reward"))
        except RestartEpisode as other:
            raise ProcessDied(f"{gone}, and could not be brought back: {other}") from other

    async def close(self) -> None:
        """Close the environment."""
        env = self._env
        self._env = None
        self.process = None
        if env is None:
            return
        try:
            # `Env.close` does nothing, and a call in a thread takes 0.1 ms.
            if env.close != MethodType(Env.close, env):
                await self.call(env.close)
        finally:
            if isinstance(env, ToolEnv):
                for name in env.abandoned:
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
        """Store the media of messages, or describe them for a text-only model.

        Images are decoded in a thread. No model reads a `final` observation; its media do not
        count.
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
        if intake.has_vision:
            return await self.in_thread(take_in, messages)
        return take_in(messages)

    # Recovery

    async def _open(self) -> None:
        """Construct an instance and reset it; its opening has to be the first one's."""
        # Construct it, on the loop where its `reset` is async, as an async class is.
        recorder = self._recorder
        reset = getattr(self._make, "reset", None)
        making: Awaitable[Env]
        if reset is not None and _is_async(reset):
            making = _called(self._make)
        else:
            making = self._threads.call(self._make)
        env = await self._deadline.wait(making, self._seconds)
        if not isinstance(env, Env):
            raise EnvError(
                f"the environment factory returned {type(env).__name__}, not a turnwright.Env"
            )

        if self.rules.isolation == "process":
            from turnwright.envs.isolation.process_env import ProcessEnv  # few runs need it

            if isinstance(env, ProcessEnv):
                await self._deadline.wait(env.start(), START_S)
                self.process = env
        self._env = env
        self._step_is_async = _is_async(env.step)
        self._owner = recorder.session

        # Tell it what it asks for, and reset it.
        if implements(type(env), NeedsLimits):
            cast(NeedsLimits, env).set_limits(recorder.limits)
        if implements(type(env), NeedsDecoder):
            cast(NeedsDecoder, env).set_decoder(recorder.decode_text)
        opening = await self.call(env.reset, self._task, seed=recorder.seed & 0x7FFFFFFF)
        check_size(opening, "reset")
        messages = self._task.messages if opening is None else as_messages(opening)

        # A later opening is compared with stored media, since the environment may draw on the same
        # canvas again.
        if self.can_retry:
            messages = await self._store_media(messages)
        tools = list(env.tools)
        if self._opening is not None and self._opening != (messages, tools):
            raise RestartEpisode("its opening differs")
        self._opening = messages, tools

    async def _snapshot(self) -> None:
        """Take a snapshot, if the environment has any."""
        env = self.env
        if self._examined is not env:  # once for each instance, since it takes 40 us
            self._examined = env
            self._declared = env if isinstance(env, SupportsSnapshot) else None

        # Without a declaration, an environment has snapshots if its class has the method.
        has_snapshots = None if self._declared is None else self._declared.snapshots
        if has_snapshots is None:
            has_snapshots = type(env).snapshot is not Env.snapshot
        if has_snapshots:
            self._state = None  # an older one is of no use, should this call fail
            self._state = await self.call(env.snapshot)

    async def _recover(self, error: Exception, tries: int) -> int:
        """Restore the environment after a failure; return the number of tries so far.

        Raises the last failure where the rules allow no other try.
        """
        recorder = self._recorder
        failures = recorder.trajectory.failures
        while True:
            failure = failure_of(error, recorder.phase, len(recorder.trajectory.turns) - 1)
            has_tries = tries <= self.rules.retries.turn and self._retries_left > 0
            if not has_tries or self._deadline.expired or not retryable(failure) or is_over(error):
                raise error

            # The failure is on record while it is recovered from, and says then how it was.
            self._retries_left -= 1
            failures.append(failure)
            number = len(failures) - 1
            try:
                seconds = backoff_s(self.rules, tries, recorder.seed + self._retries_left)
                await self._deadline.wait(asyncio.sleep(seconds), 2 * LONGEST_WAIT_S)
                recovery = await self._restore(failure)
                failures[number] = replace(failure, recovery=recovery)
            except RestartEpisode:
                failures[number] = replace(failure, recovery="attempt")
                raise
            except Exception as next_error:
                error = next_error
                tries += 1
            else:
                return tries

    async def _state_row(self) -> dict[str, Any]:
        """Return the environment's state for the journal.

        It is empty without snapshots, and if JSON would change the state.
        """
        self._state = None
        await self._snapshot()
        with suppress(Exception):  # comparing objects of user code
            if self._state is not None and orjson.loads(to_json(self._state)) == self._state:
                return {"state": self._state}
        return {}

    async def _resume_state(self) -> None:
        """Restore the recorded state of an interrupted episode.

        The journal of this play gets the state that the episode begins in.
        """
        recorded = self._recorder.resumed.state
        if recorded is None:
            self._recorder.journal.step(-1, await self._state_row())
            return
        try:
            await self.call(self.env.restore, recorded["state"])
        except Exception as error:
            raise ResumeDiffers(f"the environment could not be restored: {words(error)}") from error

        # Written again before the turns, so that this play too can go on from its own entries.
        for number, row in self._recorder.resumed.steps.items():
            self._recorder.journal.step(number, row)

    async def _restore(self, failure: Failure) -> str:
        """Bring the environment into its state before the failed step.

        Return `restored` or `replayed`. Raises `RestartEpisode` where neither can be.
        """
        recorder = self._recorder
        state = self._state
        self._state = None  # a failed restore is not retried; a replay follows

        # The instance itself, unless a call may still run in it.
        is_gone = failure.kind == FailureKind.TIMEOUT or failure.type == ProcessDied.__name__
        if state is not None and self._env is not None and not is_gone:
            await self.call(self._env.restore, state)
            return "restored"
        if state is None and self.rules.effects and recorder.trajectory.turns:
            raise RestartEpisode("its steps have effects and it has no snapshots")

        # Another instance.
        await self._close_quietly()
        recorder.enter_phase("reset", time.monotonic())
        await self._open()
        recorder.enter_phase("step")
        if state is not None:
            await self.call(self.env.restore, state)
            return "restored"

        # The same actions have to have the same results.
        for action, digest in self._steps:
            recorder.enter_phase("step", time.monotonic())
            try:
                digest_now = _step_digest(await self._step_once(action))
            except InvalidAction as mistake:
                digest_now = words(mistake)
            if digest_now != digest:
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
    # Read from the class, since attributes of the object may be user code.
    kind = type(error)
    return issubclass(kind, RemoteException) and kind.over


def _step_digest(step: Step) -> Any:
    """Return the parts of a step that must be equal when it is replayed."""
    observation: Any = step.observation
    if not isinstance(observation, (InlineObservation, NewHistory)):
        observation = as_messages(observation)
    return observation, step.reward, step.terminated, step.truncated
