"""Playing an environment by hand: an episode without a model, an engine or a tokenizer."""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from turnwise.env.base import Action, Env, Step
from turnwise.errors import EnvError, InvalidAction
from turnwise.types import Key, Message, StopReason, Task, Trajectory, Turn, as_messages

T = TypeVar("T")
Speak = Callable[[Sequence[Message], random.Random], str]
"""A scripted player: the conversation as the model sees it in, a reply's text out."""


@dataclass(slots=True)
class Played:
    """An episode that was played by hand."""

    trajectory: Trajectory
    """Without spans: nothing was sampled."""
    replies: list[str] = field(default_factory=list)
    """The texts that the player gave, tool calls written out."""
    tools: tuple[Any, ...] = ()
    """What the model would have been told of tools."""


async def play_by_hand(env: Env, task: Task, speak: Speak, rng: random.Random, *, turns: int = 8, seed: int = 0) -> Played:
    """Play one episode with a scripted player, then ask for the reward and close.

    Raises:
        EnvError: when the environment breaks its contract. What it raises itself passes through; it is closed all the same.
    """
    played = Played(Trajectory(task, Key("by hand", 0, task.id, 0)))
    trajectory = played.trajectory
    try:
        opening = await settle(env.reset(task, seed=seed))
        said = task.messages if opening is None else as_messages(opening)
        played.tools = tuple(env.tools)
        total: float | None = 0.0
        while trajectory.stop is None:
            if len(trajectory.turns) >= turns:
                trajectory.stop = StopReason.MAX_TURNS
                break
            reply = speak([*trajectory.messages, *said], rng)
            played.replies.append(reply)
            message = read_reply(reply, played.tools)
            step = await take_step(env, Action(message.text, message))
            turn = Turn("main", -1, 0, (), said, message, len(trajectory.turns) - 1, reward=step.reward, info=step.info)
            trajectory.turns.append(turn)
            total = None if total is None or step.reward is None else total + step.reward
            said = as_messages(step.observation)
            if step.terminated or step.truncated:
                trajectory.stop = StopReason.DONE if step.terminated else StopReason.ENV_TRUNCATED
        final = await settle(env.reward(trajectory))
        trajectory.reward = None if total is None or final is None else total + float(final)
    finally:
        await settle(env.close())
    return played


async def take_step(env: Env, action: Action) -> Step:
    """One step as a `Step`; the model's mistakes become observations.

    Raises:
        EnvError: when what `step` returns is not a 5-tuple.
    """
    try:
        result = await settle(env.step(action))
    except InvalidAction as mistake:
        return Step(str(mistake))
    if isinstance(result, Step):
        return result
    if isinstance(result, tuple) and len(result) == 5:
        return Step(*result)
    raise EnvError(f"{type(env).__name__}.step returned {result!r:.80}; return tw.Step(...) or a Gymnasium 5-tuple")


async def settle(value: T | Awaitable[T]) -> T:
    """A value, awaited when it is awaitable: for methods that may be async or not."""
    return await value if inspect.isawaitable(value) else value


def read_reply(text: str, tools: Sequence[Any] = ()) -> Message:
    """A reply's text as a message, tool calls and reasoning read as from a model that writes Hermes' format."""
    from turnwise.render.parse import parse_reply

    return parse_reply(text, tools)


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
