"""The one loop: a world and a model, turn by turn, until something says stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from turnwise.env import Action, Env, InlineObservation, Scores, Step
from turnwise.env.base import IsolatedReward, as_step
from turnwise.env.calling import as_number
from turnwise.env.reward.scoring import reserve_worker, run_isolated, track_running, use_worker
from turnwise.env.tool_env import ToolEnv
from turnwise.errors import InvalidAction, RewardError, words
from turnwise.rollout.inline import continue_reply, raw_text, to_inline
from turnwise.rollout.path import ConversationPath
from turnwise.rollout.recorder import Recorder
from turnwise.rollout.retry import EnvSession, RestartEpisode
from turnwise.rollout.waiting import Deadline
from turnwise.types import Message, StopReason, as_messages

LONG = 20_000
"""Characters from which on a text is encoded in a thread: about 5 ms of a core."""


async def run_episode(player: EnvSession, recorder: Recorder, deadline: Deadline) -> None:
    """Play one episode of an environment into the record, in as many attempts as its rules grant.

    Raises:
        LimitReached: when a limit ended it.
        EnvError, EngineError, TemplateError, TimeoutError, and whatever the environment raises.
    """
    while True:
        try:
            return await _attempt(player, recorder, deadline)
        except RestartEpisode:
            recorder.restart_attempt()


async def _attempt(player: EnvSession, recorder: Recorder, deadline: Deadline) -> None:
    trajectory, rules = recorder.trajectory, player.rules
    messages, tools = await player.reset()
    assert player.world is not None
    world, seconds = player.world, recorder.limits.env_s
    recorder.limit_turns(getattr(world.env, "max_turns", None))  # one that it set itself; nobody can know it before
    recorder.enter_phase("render")
    recorder.entries.said = messages
    recorder.entries.said = messages = await player.take_in(messages)
    path = await player.in_thread(recorder.open, messages, tools) if _is_long(messages) else recorder.open(messages, tools)
    asks = most_asks = rules.max_asks_per_turn if rules.on_invalid == "ask_again" else 0
    while True:
        mark = path.mark() if most_asks else None
        turn = await recorder.generate(path, deadline.wait)
        began = time.monotonic()
        recorder.enter_phase("step", began)
        size = len(path.ids) - turn.context - (path.ids[-1] in recorder.renderer.stop_ids)
        action = Action(turn.reply.text, turn.reply, turn.finish == "length", size, partial(raw_text, recorder, turn))
        try:
            # Nearly every episode is without retries, and spares the coroutine in between.
            step = as_step(await (player.step(action, turn) if player.retries else world.step(action, seconds)))
        except InvalidAction as mistake:
            said = words(mistake)
            trajectory.metrics["invalid_actions"] = trajectory.metrics.get("invalid_actions", 0) + 1
            if asks and mark is not None:
                asks -= 1
                taken = time.monotonic() - began
                info = {"invalid_action": said, "asked_again": True}
                recorder.reject(path, mark, info, trained=rules.rejected == "trained", env_s=taken)
                continue
            step = Step(said, info={"invalid_action": said})
        asks = most_asks
        recorder.record_step(path.turn, step.reward, step.info, time.monotonic() - began)
        if await _episode_ended(step, recorder, player):
            return
        await _append_observation(step, path, recorder, player)


async def _episode_ended(step: Step, recorder: Recorder, player: EnvSession) -> bool:
    """Whether a step ended the episode, which is written down."""
    if not (step.terminated or step.truncated):
        return False
    said = step.observation
    final = as_messages((said.text or None) if isinstance(said, InlineObservation) else said)
    recorder.trajectory.final = await player.take_in(final, unanswered=True)
    recorder.trajectory.stop = StopReason.DONE if step.terminated else StopReason.ENV_TRUNCATED
    return True


async def _append_observation(step: Step, path: ConversationPath, recorder: Recorder, player: EnvSession) -> None:
    """What a step says to the model, behind the path; what is long is encoded off the event loop."""
    said = step.observation
    if isinstance(said, InlineObservation) or recorder.history == "inline":
        recorder.entries.said = inline = to_inline(said, recorder.sight)
        recorder.enter_phase("render")
        continue_reply(recorder, path, inline)
    else:
        observation = as_messages(said)
        recorder.enter_phase("render")
        recorder.entries.said = observation
        if recorder.sight.has_media(observation):
            recorder.entries.said = observation = await player.take_in(observation)
        if _is_long(observation):
            recorder.append(path, *await player.in_thread(recorder.render_observation, path, observation))
        else:
            recorder.append_observation(path, observation)


def _is_long(messages: Sequence[Message]) -> bool:
    size = 0
    for message in messages:
        size += len(message.text)
    return size > LONG


async def compute_reward(player: EnvSession, recorder: Recorder) -> float | None:
    """The reward of a finished episode: its steps' and the environment's own; None where one was not computed.

    Raises:
        RewardError: for a reward that is not a finite number.
        TimeoutError: when it was not there in time, naming what was computed; and whatever computing it raised.
    """
    assert player.world is not None
    recorder.enter_phase("reward", time.monotonic())
    trajectory = recorder.trajectory
    if recorder.unrewarded:
        return None
    total = sum(turn.reward or 0.0 for turn in trajectory.turns)
    if type(player.world.env).reward is Env.reward:
        recorder.entries.reward("own", 0.0)
        return total
    own = await recorder.again.reward(partial(_own, player, recorder), player.wait)
    return None if own is None else total + own


async def _own(player: EnvSession, recorder: Recorder) -> float | None:
    """The environment's own reward."""
    await player.revive()
    world = player.world
    assert world is not None
    env, trajectory, seconds = world.env, recorder.trajectory, recorder.limits.reward_s
    recorder.enter_phase("reward", time.monotonic())
    is_apart = player.rules.reward_isolation == "process"
    functions: Sequence[Callable[..., Any]] = [type(env)] if is_apart else ()
    if isinstance(env, ToolEnv):
        functions = env.functions if is_apart else env.isolated_rewards
    scorers = await player.wait(reserve_worker(*functions), recorder.limits.wall_clock) if functions else []
    with track_running() as names, use_worker(scorers):
        try:
            if not is_apart:
                said = await world.call(env.reward, trajectory, seconds=seconds)
            elif isinstance(env, IsolatedReward):
                said = await world.call(env.isolated_reward, trajectory, seconds=seconds)
            else:
                said = await world.call(run_isolated, f"{type(env).__name__}.reward", env.reward, trajectory, seconds=seconds)
        except TimeoutError as late:
            raise TimeoutError(reward_timeout_message(names, words(late))) from None
    own_reward = reward_value(said, recorder, "the episode's reward")
    recorder.entries.reward("own", said)
    return own_reward


def reward_timeout_message(names: Sequence[str], said: str = "") -> str:
    """What to say of rewards that missed their deadline."""
    told = ", ".join(map(repr, dict.fromkeys(names)))
    return said or (f"the reward {told} did not answer by its deadline" if told else "")


def reward_value(value: Any, recorder: Recorder, what: str) -> float | None:
    """A reward as a float, None as it is; of `Scores` the total, and its parts go to the record.

    Raises:
        RewardError: when it, or a part of it, is no finite number; then nothing is recorded.
    """
    if not isinstance(value, Scores):
        return as_number(value, what)
    trajectory = recorder.trajectory
    scores = value.checked(what)
    own, by_turn = scores.own, scores.turns
    if len(by_turn) > len(trajectory.turns):
        raise RewardError(f"{what} has {len(by_turn)} turns, the episode {len(trajectory.turns)}")
    trajectory.rewards |= scores.parts
    for name, found in scores.metrics.items():
        trajectory.metrics[name] = trajectory.metrics.get(name, 0) + found
    if own is None:
        return None
    for number, one in enumerate(by_turn):
        if one:
            turn = trajectory.turns[number]
            recorder.record_step(number, (turn.reward or 0.0) + one, turn.info, turn.env_s)
    return own + sum(by_turn)
