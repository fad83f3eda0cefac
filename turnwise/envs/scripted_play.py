"""Playing an environment by hand: an episode without a model, an engine or a tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from turnwise.envs.base import Action, Env, InlineObservation, Scores, Step, as_step
from turnwise.envs.user_code import as_number
from turnwise.errors import EnvError, InvalidAction, RewardError
from turnwise.types import EpisodeKey, Message, StopReason, Task, Trajectory, Turn, as_messages

T = TypeVar("T")
Speak = Callable[[Sequence[Message], random.Random], str]
"""A scripted player: the conversation as the model sees it in, a reply's text out."""


@dataclass(slots=True)
class ScriptedEpisode:
    """An episode that was played by hand."""

    trajectory: Trajectory
    """Without spans: nothing was sampled."""
    replies: list[str] = field(default_factory=list)
    """The texts that the player gave, tool calls written out."""
    tools: tuple[Any, ...] = ()
    """What the model would have been told of tools."""


class ScriptedRunner:
    """Plays one episode turn by turn: `open`, `turn` while it says True, `finish`, and `close` whatever happened.

    Raises (all four):
        EnvError: when the environment breaks its contract. What it raises itself passes through, with a note of the phase.
    """

    def __init__(self, env: Env, task: Task, speak: Speak, rng: random.Random, *, turns: int = 8, seed: int = 0) -> None:
        self.env = env
        self.played = ScriptedEpisode(Trajectory(task, EpisodeKey("by hand", 0, task.id, 0)))
        self._speak, self._rng, self._turns, self._seed = speak, rng, turns, seed
        self._said: tuple[Message, ...] = ()
        self._inside: str | None = None  # the message so far, where the next reply goes on in it
        self._going_on: tuple[str, int] | None = None  # what the world inserted, behind how much of the last reply
        self._total: float | None = 0.0

    async def open(self) -> None:
        """Reset, and hear the opening."""
        task = self.played.trajectory.task
        with _noted("reset"):
            opening = await call_method(self.env.reset, task, seed=self._seed)
            self._said = task.messages if opening is None else _messages(opening, "reset")
            self.played.tools = tuple(self.env.tools)
        if not self._said:
            raise EnvError("reset returned nothing and the task has no messages; say something for the model to answer")

    async def turn(self) -> bool:
        """Let the player reply and hear the answer; whether the episode goes on."""
        trajectory = self.played.trajectory
        if len(trajectory.turns) >= self._turns:
            trajectory.stop = StopReason.MAX_TURNS
            return False
        said = [*trajectory.messages, *self._said]
        if self._going_on is not None:
            said[-1] = read_reply(self._inside or "")
        with _noted("player"):
            reply = self._speak(said, self._rng)
        self.played.replies.append(reply)
        message = read_reply(reply, self.played.tools)
        turn = Turn("main", -1, 0, (), self._said, message, len(trajectory.turns) - 1)
        whole = reply
        if self._going_on is not None:
            whole = f"{self._inside}{reply}"
            turn.inserted, turn.kept = self._going_on
            turn.grown = replace(read_reply(whole), tool_calls=message.tool_calls)
        with _noted("step"):
            step = await take_step(
                self.env, Action(message.text, message, False, len(reply.encode("utf-8", "replace")), lambda: reply)
            )
            heard = self._apply_observation(step.observation, whole, reply)
        turn.reward, turn.info = step.reward, step.info
        trajectory.turns.append(turn)
        self._total = None if self._total is None or step.reward is None else self._total + step.reward
        self._said = heard
        if step.terminated or step.truncated:
            trajectory.stop = StopReason.DONE if step.terminated else StopReason.ENV_TRUNCATED
            trajectory.final = heard
            return False
        return True

    def _apply_observation(self, observation: Any, whole: str, reply: str) -> tuple[Message, ...]:
        """What the world says next, or what of the message so far stays where it goes on inside it."""
        self._inside = self._going_on = None
        if not isinstance(observation, InlineObservation):
            return _messages(observation, "step")
        kept = observation.kept_text(reply)
        self._inside = whole[: len(whole) - len(reply)] + kept + observation.text
        self._going_on = observation.text, len(kept.encode("utf-8", "replace"))
        return ()

    async def finish(self) -> ScriptedEpisode:
        """Ask for the reward."""
        with _noted("reward"):
            said: Any = await call_method(self.env.reward, self.played.trajectory)
            if isinstance(said, Scores):
                said = _broken(said.checked, "the reward")
                self.played.trajectory.rewards |= said.parts
                said = said.total
            own = _broken(as_number, said, "the reward")
        self.played.trajectory.reward = None if self._total is None or own is None else self._total + own
        return self.played

    async def close(self) -> None:
        """Close the environment."""
        with _noted("close"):
            await call_method(self.env.close)


async def play_scripted(
    env: Env, task: Task, speak: Speak, rng: random.Random, *, turns: int = 8, seed: int = 0
) -> ScriptedEpisode:
    """Play one episode with a scripted player, ask for the reward, and close the environment.

    Raises:
        EnvError: when the environment breaks its contract. What it raises itself passes through; it is closed all the same.
    """
    hand = ScriptedRunner(env, task, speak, rng, turns=turns, seed=seed)
    try:
        await hand.open()
        while await hand.turn():
            pass
        return await hand.finish()
    finally:
        await hand.close()


async def take_step(env: Env, action: Action) -> Step:
    """One step as a `Step`; the model's mistakes become observations.

    Raises:
        EnvError: when what `step` returns is no step, or its reward is not a finite number.
    """
    try:
        result = await call_method(env.step, action)
    except InvalidAction as mistake:
        return Step(str(mistake))
    return _broken(as_step, result)


def _broken(read: Callable[..., T], *args: Any) -> T:
    """What a reader of an environment's values gives; a reward that is no number breaks the contract here, as all else does."""
    try:
        return read(*args)
    except RewardError as error:
        raise EnvError(str(error)) from None


def _messages(value: Any, where: str) -> tuple[Message, ...]:
    try:
        return as_messages(value)
    except (TypeError, ValueError, KeyError) as error:
        raise EnvError(f"{where} returned what is no message: {error}") from error


@contextlib.contextmanager
def _noted(phase: str) -> Iterator[None]:
    """Note on an exception where it was raised, for whoever reports it."""
    try:
        yield
    except Exception as error:
        error.add_note(phase)
        raise


async def call_method(method: Callable[..., T | Awaitable[T]], *args: Any, **kwargs: Any) -> T:
    """What a method gives: awaited when it is async, else run in a thread, as a rollout does."""
    function = getattr(method, "__func__", None)
    if function is Env.reward or function is Env.close:  # they do nothing, which needs no thread
        return await maybe_await(method(*args, **kwargs))
    if inspect.iscoroutinefunction(method):
        return cast(T, await method(*args, **kwargs))
    return await maybe_await(await asyncio.to_thread(method, *args, **kwargs))


async def maybe_await(value: T | Awaitable[T]) -> T:
    """A value, awaited when it is awaitable: for methods that may be async or not."""
    return await value if inspect.isawaitable(value) else value


def read_reply(text: str, tools: Sequence[Any] = ()) -> Message:
    """A reply's text as a message, tool calls and reasoning read as from a model that writes Hermes' format."""
    from turnwise.renderers.parsers import PARSERS

    return PARSERS["hermes"].parse(text, tools)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end from ordinary code, also where an event loop already runs in this thread (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    box: list[T | BaseException] = []

    def work() -> None:
        try:
            box.append(asyncio.run(coroutine))
        except BaseException as error:  # handed to the caller below
            box.append(error)

    thread = threading.Thread(target=work, name="turnwise-by-hand")
    thread.start()
    thread.join()
    if isinstance(box[0], BaseException):
        raise box[0]
    return box[0]
