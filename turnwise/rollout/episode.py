"""The one loop: a world and a model, turn by turn, until something says stop."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from inspect import isawaitable, iscoroutinefunction
from math import isfinite
from typing import Any, TypeVar

from turnwise.env import Action, Env, Inline, Step
from turnwise.errors import EnvError, InvalidAction, RewardError
from turnwise.rollout.inline import as_inline, go_on, raw_text
from turnwise.rollout.recorder import Recorder
from turnwise.rollout.waiting import Deadline, Threads
from turnwise.types import StopReason, Task, as_messages

T = TypeVar("T")


class Reach:
    """An environment of one episode, called under deadlines: async code on the loop, anything else in a thread."""

    def __init__(self, env: Env, deadline: Deadline, threads: Threads) -> None:
        self.env = env
        self._step_is_async = _is_async(env.step)
        self._deadline = deadline
        self._threads = threads

    @classmethod
    async def make(cls, factory: Callable[[], Env], deadline: Deadline, threads: Threads, seconds: float) -> Reach:
        """Make the environment of one episode: on the loop where its class is async, else in a thread.

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
        return cls(env, deadline, threads)

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
            waiting = self._threads.call(lambda: method(*args, **kwargs))
        else:
            waiting = self._threads.call(method, *args)
        result = await self._deadline.wait(waiting, seconds)
        return await self._deadline.wait(result, seconds) if isawaitable(result) else result


async def play_env(world: Reach, task: Task, recorder: Recorder, deadline: Deadline) -> None:
    """Play one episode of an environment into the record.

    Raises:
        LimitReached: when a limit ended it.
        EnvError, EngineError, TemplateError, TimeoutError, and whatever the environment raises.
    """
    limits, trajectory, env = recorder.limits, recorder.trajectory, world.env
    opening = await world.call(env.reset, task, seed=recorder.seed & 0x7FFFFFFF, seconds=limits.env_s)
    messages = task.messages if opening is None else as_messages(opening)
    recorder.phase = "render"
    path = recorder.open(messages, env.tools)
    while True:
        turn = await recorder.generate(path, deadline.wait)
        began = time.monotonic()
        recorder.phase, recorder.since = "step", began
        size = len(path.ids) - turn.context - (path.ids[-1] in recorder.renderer.stop_ids)
        action = Action(turn.reply.text, turn.reply, turn.finish == "length", size, partial(raw_text, recorder, turn))
        try:
            step = as_step(await world.step(action, limits.env_s))
        except InvalidAction as mistake:
            step = Step(str(mistake), info={"invalid_action": str(mistake)})
            trajectory.metrics["invalid_actions"] = trajectory.metrics.get("invalid_actions", 0) + 1
        recorder.answer(path.turn, finite(step.reward, "a step's reward"), step.info, time.monotonic() - began)
        said = step.observation
        if step.terminated or step.truncated:
            trajectory.final = as_messages((said.text or None) if isinstance(said, Inline) else said)
            trajectory.stop = StopReason.DONE if step.terminated else StopReason.ENV_TRUNCATED
            return
        if isinstance(said, Inline) or recorder.history == "inline":
            inline = as_inline(said)
            recorder.phase = "render"
            go_on(recorder, path, inline)
        else:
            observation = as_messages(said)
            recorder.phase = "render"
            recorder.observe(path, observation)


async def score(world: Reach, recorder: Recorder) -> float | None:
    """The reward of a finished episode: its steps' and the environment's own; None where one was not computed.

    Raises:
        RewardError: for a reward that is not a finite number, or when computing it raised.
    """
    recorder.phase, recorder.since = "reward", time.monotonic()
    trajectory = recorder.trajectory
    if recorder.unrewarded:
        return None
    total = sum(turn.reward or 0.0 for turn in trajectory.turns)
    if type(world.env).reward is Env.reward:
        return total
    own = finite(await world.call(world.env.reward, trajectory, seconds=recorder.limits.reward_s), "the episode's reward")
    return None if own is None else total + own


def as_step(value: Any) -> Step:
    """What `Env.step` returned, as a `Step`.

    Raises:
        EnvError: when it is neither a Step nor a 5-tuple.
    """
    if isinstance(value, Step):
        return value
    if isinstance(value, tuple) and len(value) == 5:
        return Step(*value)
    raise EnvError(f"step returned {type(value).__name__}, not turnwise.Step(...) or Gymnasium's 5-tuple")


def finite(reward: Any, what: str) -> float | None:
    """A reward as a float, None as it is.

    Raises:
        RewardError: when it is no finite number.
    """
    if reward is None:
        return None
    try:
        value = float(reward)
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardError(f"{what} is {reward!r:.80}, not a number") from error
    if not isfinite(value):
        raise RewardError(f"{what} is {value}; rewards are finite, None where there is none")
    return value


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
