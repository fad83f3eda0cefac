"""One environment under deadlines, with retries and recovery."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from inspect import isawaitable, iscoroutinefunction
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar

from turnwise.config import EnvRules
from turnwise.envs import Action, Env, InlineObservation, Step
from turnwise.envs.base import SupportsSnapshot, as_step
from turnwise.envs.tool_env import ToolEnv
from turnwise.envs.user_code import RemoteException, failure_of, retryable
from turnwise.errors import EnvError, InvalidAction, ProcessDied, TurnwiseError, words
from turnwise.rollouts.conversation import Tools
from turnwise.rollouts.recorder import Recorder
from turnwise.rollouts.retries import LONGEST_WAIT_S, backoff_s
from turnwise.rollouts.timeouts import AbandonableThreads, Deadline
from turnwise.types import Failure, FailureKind, Message, Task, Turn, as_messages

if TYPE_CHECKING:
    from turnwise.envs.isolation.process_env import ProcessEnv


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
            from turnwise.envs.isolation.process_env import ProcessEnv  # which few runs need

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


class RestartEpisode(TurnwiseError):
    """The environment could not be brought back to where it was: the episode begins anew."""


class EnvSession:
    """The environment of one episode, and what was done to it so far, so that it can be brought back.

    A failed step is taken again once the environment stands where it stood: by its own `restore`, where it has one, else by a
    reset of a fresh instance with the same seed and the same actions, each compared with what was observed. Where it then says
    something else, the episode begins anew.
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
        self.world: EnvCaller | None = None
        """The instance in use; None before the first, and between two."""
        self._make = make
        self._task = task
        self._recorder = recorder
        self._deadline = deadline
        self._threads = threads
        self._seconds = recorder.limits.env_s
        self.retries = rules.max_env_retries_per_turn > 0 or (rules.isolation == "process" and rules.max_reward_retries > 0)
        """Whether what is done to the environment may have to be done again."""
        self._left = rules.max_env_retries
        self._declared: SupportsSnapshot | None = None
        self._discard()

    def _discard(self) -> None:
        self._opening: tuple[tuple[Message, ...], list[Any]] | None = None
        self._past: list[tuple[Action, Any]] = []
        self._state: Any = None

    async def reset(self) -> tuple[tuple[Message, ...], Tools]:
        """Make and reset the environment; what opens the episode, and the tools that the model is told of."""
        self._discard()
        await self._shut()
        self._recorder.enter_phase("reset")
        try:
            await self._open()
        except Exception as error:
            await self._recover(error, 1)
        assert self.world is not None
        assert self._opening is not None
        return self._opening[0], self.world.env.tools

    async def step(self, action: Action, turn: Turn) -> Step:
        """One step, tried again where the environment fails and the rules allow it.

        Raises:
            InvalidAction: for the model's mistakes.
            Afresh: when the episode has to begin anew.
        """
        seen: Any
        tries = 0
        while True:
            assert self.world is not None
            try:
                await self._snapshot()
                step = await self._step_once(action)
                seen = _step_digest(step)
            except InvalidAction as mistake:
                self._past.append((action, words(mistake)))
                raise
            except Exception as error:
                before, tries = tries, await self._recover(error, tries + 1)
                turn.retries += tries - before
                self._recorder.enter_phase("step", time.monotonic())
            else:
                self._past.append((action, seen))
                return step

    async def _step_once(self, action: Action) -> Step:
        """One step of the world, its images taken in."""
        assert self.world is not None
        step = as_step(await self.world.step(action, self._seconds))
        if isinstance(step.observation, (str, InlineObservation, NoneType)):
            return step
        last = step.terminated or step.truncated
        return step._replace(observation=await self._taken(as_messages(step.observation), last))

    async def wait(self, awaitable: Awaitable[T], seconds: float) -> T:
        """As `Deadline.wait`."""
        return await self._deadline.wait(awaitable, seconds)

    async def revive(self) -> None:
        """Bring back an environment whose process went with its reward, so that the reward can be asked for again.

        Raises:
            ProcessDied: when it cannot be brought back to where it was; and whatever it raises.
        """
        if self.world is None or self.world.process is None or not self.world.process.exited:
            return
        gone = ProcessDied("the environment's process ended when its reward was asked for")
        try:
            await self._bring_back(failure_of(gone, "reward"))
        except RestartEpisode as other:
            raise ProcessDied(f"{gone}, and could not be brought back: {other}") from other

    async def close(self) -> None:
        """Close the environment.

        Raises:
            TimeoutError: when it takes too long; and whatever it raises.
        """
        world, self.world = self.world, None
        if world is not None:
            try:
                await world.call(world.env.close, seconds=self._seconds)
            finally:
                world.count_abandoned_threads()

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Something that computes for long, in a thread."""
        return await self._deadline.wait(self._threads.call(function, *args, owner=self._recorder.session), self._seconds)

    async def take_in(self, messages: tuple[Message, ...], *, unanswered: bool = False) -> tuple[Message, ...]:
        """What the world says as the model sees it, or would see it where it is `unanswered`; images are decoded in a thread.

        Raises:
            MediaError: for an image that cannot be shown.
        """
        sight = self._recorder.sight
        if not sight.has_media(messages):
            return messages
        messages = await self._taken(messages, unanswered)
        if not unanswered:
            sight.note(messages)
        return messages

    async def _taken(self, messages: tuple[Message, ...], unanswered: bool = False) -> tuple[Message, ...]:
        sight = self._recorder.sight
        if not sight.has_media(messages):
            return messages
        look = partial(sight.take_in, unanswered=unanswered)
        return await self.in_thread(look, messages) if sight.sees else look(messages)

    # Bringing it back

    async def _open(self) -> None:
        recorder = self._recorder
        self.world = world = await EnvCaller.make(
            self._make, self._deadline, self._threads, self._seconds, isolated=self.rules.isolation == "process"
        )
        world.session = recorder.session
        seed = recorder.seed & 0x7FFFFFFF
        opening = await world.call(world.env.reset, self._task, seed=seed, seconds=self._seconds)
        said = self._task.messages if opening is None else as_messages(opening)
        if self.retries:  # compared with another time by what is seen; the world may draw on the same canvas again
            said = await self._taken(said)
        tools = list(world.env.tools)
        if self._opening is not None and self._opening != (said, tools):
            raise RestartEpisode("its opening is another one")
        self._opening = said, tools
        self._declared = world.env if isinstance(world.env, SupportsSnapshot) else None

    async def _snapshot(self) -> None:
        assert self.world is not None
        env = self.world.env
        declared = None if self._declared is None else self._declared.snapshots
        if declared or (declared is None and type(env).snapshot is not Env.snapshot):
            self._state = None
            self._state = await self.world.call(env.snapshot, seconds=self._seconds)

    async def _recover(self, error: Exception, tries: int) -> int:
        """Bring the environment back behind a failure; gives how many tries that made.

        Raises:
            Afresh: when it says something else than before.
            Exception: the last failure, when it is none to be tried again or the budget is spent.
        """
        recorder = self._recorder
        failures = recorder.trajectory.failures
        while True:
            failure = failure_of(error, recorder.phase, len(recorder.trajectory.turns) - 1)
            if not self._may(failure, tries) or is_over(error):
                raise error
            self._left -= 1
            failures.append(failure)
            number = len(failures) - 1
            try:
                await self._pause(tries)
                failures[number] = replace(failure, recovery=await self._bring_back(failure))
            except RestartEpisode:
                failures[number] = replace(failure, recovery="attempt")
                raise
            except Exception as again:
                error, tries = again, tries + 1
            else:
                return tries

    def _may(self, failure: Failure, tries: int) -> bool:
        return (
            retryable(failure)
            and tries <= self.rules.max_env_retries_per_turn
            and self._left > 0
            and not self._deadline.expired
        )

    async def _pause(self, tries: int) -> None:
        seconds = backoff_s(self.rules, tries, self._recorder.seed + self._left)
        await self._deadline.wait(asyncio.sleep(seconds), 2 * LONGEST_WAIT_S)

    async def _bring_back(self, failure: Failure) -> str:
        """Take the environment to where it stood before the step that failed; gives how."""
        recorder = self._recorder
        state, self._state = self._state, None  # a restore that fails is not tried again: what follows is a replay
        gone = failure.kind == FailureKind.TIMEOUT or failure.type == ProcessDied.__name__
        if state is not None and self.world is not None and not gone:
            await self.world.call(self.world.env.restore, state, seconds=self._seconds)
            return "restored"
        await self._shut()  # a call that never came back may still be at work in it
        recorder.enter_phase("reset", time.monotonic())
        await self._open()
        recorder.enter_phase("step")
        assert self.world is not None
        if state is not None:
            await self.world.call(self.world.env.restore, state, seconds=self._seconds)
            return "restored"
        for action, before in self._past:
            recorder.enter_phase("step", time.monotonic())
            try:
                now = _step_digest(await self._step_once(action))
            except InvalidAction as mistake:
                now = words(mistake)
            if now != before:
                raise RestartEpisode("it answers otherwise than before")
        return "replayed"

    async def _shut(self) -> None:
        """Close an instance that failed; what goes wrong is noted, and holds nobody up."""
        try:
            await self.close()
        except Exception as error:
            self._recorder.trajectory.failures.append(failure_of(error, "close"))


def is_over(error: BaseException) -> bool:
    """Whether a recorded failure was the episode's end when it is played again."""
    kind = type(error)
    return issubclass(kind, RemoteException) and kind.over  # the class alone: what the object says is user code


def _step_digest(step: Step) -> Any:
    """What a step showed, to be compared with another time."""
    said = step.observation
    return (said if isinstance(said, InlineObservation) else as_messages(said), step.reward, step.terminated, step.truncated)
