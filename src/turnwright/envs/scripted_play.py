"""Play episodes with a scripted player: no model, engine or tokenizer.

`ScriptedRunner.play` is an episode, `ScriptedRunner.turn` a turn of it. Demonstrations and
`turnwright check` play this way; an episode of a model is played in `rollouts/episode.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast

from turnwright.config import Limits
from turnwright.envs.env import (
    Action,
    Env,
    InlineObservation,
    NeedsLimits,
    NewHistory,
    Scores,
    Step,
    as_step,
    check_size,
)
from turnwright.envs.threads import run_in_thread
from turnwright.envs.user_code import as_number
from turnwright.errors import EnvError, InvalidAction, RewardError
from turnwright.types import EpisodeKey, Message, StopReason, Task, Trajectory, Turn, as_messages

T = TypeVar("T")

Speak = Callable[[Sequence[Message], random.Random], str]
"""Scripted player: maps the model's messages to the text of a reply."""


class CallHangs(EnvError):
    """A call of the environment did not return in time."""


@dataclass(slots=True)
class ScriptedEpisode:
    """Episode of a scripted player."""

    trajectory: Trajectory
    """Without spans, since nothing was sampled."""
    replies: list[str] = field(default_factory=list)
    """Texts of the player's replies, tool calls included."""
    tools: tuple[Any, ...] = ()
    """Tool schemas that a model would have received."""


@dataclass(frozen=True, slots=True)
class _OpenMessage:
    """A message of the model that its next reply continues."""

    text: str
    """Its text so far, inserted text included."""
    inserted: str
    """Text that the last observation inserted."""
    kept_bytes: int
    """Bytes of the last reply before the inserted text."""


class ScriptedRunner:
    """Plays one episode turn by turn: `open`, `turn` while it returns True, `finish`, and always
    `close`.

    All raise `EnvError` when the environment breaks its contract; its own exceptions pass through,
    with the phase as a note.
    """

    def __init__(
        self,
        env: Env,
        task: Task,
        speak: Speak,
        rng: random.Random,
        *,
        turns: int = 8,
        seed: int = 0,
        call_s: float | None = None,
    ) -> None:
        """`call_s` bounds each call of the environment, in seconds; None waits for it."""
        self.env = env
        self.played = ScriptedEpisode(Trajectory(task, EpisodeKey("by hand", 0, task.id, 0)))
        self._speak = speak
        self._rng = rng
        self._max_turns = turns
        self._seed = seed
        self._call_s = call_s
        self._observation: tuple[Message, ...] = ()
        self._is_rewritten = False
        """Whether the observation is the complete conversation."""
        self._open_message: _OpenMessage | None = None
        self._total: float | None = 0.0

    async def open(self) -> None:
        """Reset the environment and read its opening messages."""
        task = self.played.trajectory.task
        with _noting_phase("reset"):
            if isinstance(self.env, NeedsLimits):
                self.env.set_limits(Limits(turns=self._max_turns))
            opening = await self._call(self.env.reset, task, seed=self._seed)
            self._observation = task.messages if opening is None else _messages(opening, "reset")
            self.played.tools = tuple(self.env.tools)
        if not self._observation:
            raise EnvError(
                "reset returned nothing and the task has no messages; say something for the model "
                "to answer"
            )

    async def turn(self) -> bool:
        """Play one turn; return whether the episode continues."""
        trajectory = self.played.trajectory
        if len(trajectory.turns) >= self._max_turns:
            trajectory.stop = StopReason.MAX_TURNS
            return False

        conversation = self._conversation()
        with _noting_phase("player"):
            reply = self._speak(conversation, self._rng)
        self.played.replies.append(reply)
        turn = self._turn_of(reply)

        with _noting_phase("step"):
            size = len(reply.encode("utf-8", "replace"))  # one token per byte
            action = Action(turn.reply.text, turn.reply, False, size, lambda: reply)
            step = await take_step(self.env, action, self._call)
            messages = [*conversation, turn.message]
            observation = self._read_observation(step.observation, messages, reply)
        turn.reward = step.reward
        turn.info = step.info
        trajectory.turns.append(turn)
        if self._total is not None:
            self._total = None if step.reward is None else self._total + step.reward
        self._observation = observation

        if step.terminated or step.truncated:
            trajectory.stop = StopReason.DONE if step.terminated else StopReason.ENV_TRUNCATED
            trajectory.final = observation
            return False
        return True

    def _conversation(self) -> list[Message]:
        """Return the messages that the player answers."""
        if self._is_rewritten:
            return list(self._observation)
        conversation = [*self.played.trajectory.messages, *self._observation]
        if self._open_message is not None:
            conversation[-1] = read_reply(self._open_message.text)
        return conversation

    def _turn_of(self, reply: str) -> Turn:
        """Return the turn of a reply, which the environment has not seen."""
        message = read_reply(reply, self.played.tools)
        parent = -1 if self._is_rewritten else len(self.played.trajectory.turns) - 1
        turn = Turn("main", -1, 0, (), self._observation, message, parent)
        if self._open_message is not None:
            turn.inserted = self._open_message.inserted
            turn.kept = self._open_message.kept_bytes
            grown = read_reply(self._open_message.text + reply)
            turn.grown = replace(grown, tool_calls=message.tool_calls)
        return turn

    def _read_observation(
        self, observation: Any, messages: Sequence[Message], reply: str
    ) -> tuple[Message, ...]:
        """Return the new messages of an observation, after `messages`, the last of which has
        `reply`."""
        earlier_text = "" if self._open_message is None else self._open_message.text
        self._open_message = None
        self._is_rewritten = isinstance(observation, NewHistory)

        if isinstance(observation, NewHistory):
            observation.check(len(messages))
            return tuple(
                messages[item] if isinstance(item, int) else item for item in observation.messages
            )
        if isinstance(observation, InlineObservation):
            kept = observation.kept_text(reply)
            inserted = observation.message.text_with_alt
            kept_bytes = len(kept.encode("utf-8", "replace"))
            self._open_message = _OpenMessage(earlier_text + kept + inserted, inserted, kept_bytes)
            return ()
        return _messages(observation, "step")

    async def finish(self) -> ScriptedEpisode:
        """Compute the reward."""
        trajectory = self.played.trajectory
        with _noting_phase("reward"):
            reward: Any = await self._call(self.env.reward, trajectory)
            if isinstance(reward, Scores):
                reward = _as_env_error(reward.checked, "the reward")
                trajectory.rewards |= reward.parts
                reward = reward.total
            episode_reward = _as_env_error(as_number, reward, "the reward")

        if self._total is None or episode_reward is None:
            trajectory.reward = None
        else:
            trajectory.reward = self._total + episode_reward
        return self.played

    async def close(self) -> None:
        """Close the environment."""
        with _noting_phase("close"):
            await self._call(self.env.close)

    async def play(self) -> ScriptedEpisode:
        """Play the episode from `open` to `finish`, and always close the environment."""
        try:
            await self.open()
            while await self.turn():
                pass
            return await self.finish()
        finally:
            await self.close()

    async def _call(self, method: Callable[..., T | Awaitable[T]], *args: Any, **kwargs: Any) -> T:
        return await call_within(self._call_s, method, *args, **kwargs)


async def play_scripted(
    env: Env, task: Task, speak: Speak, rng: random.Random, *, turns: int = 8, seed: int = 0
) -> ScriptedEpisode:
    """Play one episode with a scripted player, compute the reward, and always close the
    environment.

    Example::

        >>> import random
        >>> from turnwright.envs.resolve import resolve_env
        >>> env_spec = resolve_env("calculator")
        >>> [task] = env_spec.tasks("train", n=1)
        >>> episode = run(
        ...     play_scripted(env_spec.factory(), task, env_spec.solver, random.Random(0))
        ... )
        >>> episode.trajectory.reward, len(episode.replies)
        (1.0, 2)
    """
    return await ScriptedRunner(env, task, speak, rng, turns=turns, seed=seed).play()


async def call_within(
    seconds: float | None, method: Callable[..., T | Awaitable[T]], *args: Any, **kwargs: Any
) -> T:
    """Call a method of an environment; raise `CallHangs` if it takes longer than `seconds`.

    None waits for it.
    """
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            return await call_method(method, *args, **kwargs)
    except TimeoutError:
        if not deadline.expired():
            raise  # of the method itself
        raise CallHangs(
            f"{method.__name__} did not return within {seconds:g} s (limits.env_s in training); "
            "bound what it waits for"
        ) from None


async def take_step(
    env: Env, action: Action, call: Callable[..., Awaitable[Any]] | None = None
) -> Step:
    """Call `step`.

    Mistakes of the model (`InvalidAction`) become observations, a wrong return value an `EnvError`.

    `call` calls methods of the environment in place of `call_method`.
    """
    try:
        result = await (call or call_method)(env.step, action)
    except InvalidAction as mistake:
        return Step(str(mistake))
    return _as_env_error(as_step, result)


def _as_env_error(read: Callable[..., T], *args: Any) -> T:
    """Call a reader of environment values, and raise its RewardError as an EnvError."""
    try:
        return read(*args)
    except RewardError as error:
        raise EnvError(str(error)) from None


def _messages(value: Any, where: str) -> tuple[Message, ...]:
    check_size(value, where)
    try:
        return as_messages(value)
    except (TypeError, ValueError, KeyError) as error:
        raise EnvError(f"{where} returned what is no message: {error}") from error


@contextlib.contextmanager
def _noting_phase(phase: str) -> Iterator[None]:
    """Add the phase to exceptions as a note, for reports."""
    try:
        yield
    except Exception as error:
        error.add_note(phase)
        raise


async def call_method(method: Callable[..., T | Awaitable[T]], *args: Any, **kwargs: Any) -> T:
    """Call a method: await an async one, run a sync one in a thread, as a rollout does."""
    function = getattr(method, "__func__", None)
    if function is Env.reward or function is Env.close:
        # The defaults do nothing and need no thread.
        return await maybe_await(method(*args, **kwargs))
    if inspect.iscoroutinefunction(method):
        return cast(T, await method(*args, **kwargs))
    return await maybe_await(await run_in_thread(partial(method, *args, **kwargs), {}))


async def maybe_await(value: T | Awaitable[T]) -> T:
    """Return a value, awaited if it is awaitable."""
    return await value if inspect.isawaitable(value) else value


def read_reply(text: str, tools: Sequence[Any] = ()) -> Message:
    """Parse a reply's text to a message, with tool calls and reasoning in the Hermes format."""
    from turnwright.renderers.parsers import PARSERS

    return PARSERS["hermes"].parse(text, tools)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine from synchronous code, also where an event loop already runs in this thread
    (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1, "turnwright-by-hand") as pool:
        return pool.submit(asyncio.run, coroutine).result()
