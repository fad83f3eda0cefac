"""Episode loop of an environment: sample a reply, step the environment, append its
observation; then the reward."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from turnwright.envs import Action, Env, InlineObservation, NewHistory, Scores, Step
from turnwright.envs.env import IsolatedReward, as_step
from turnwright.envs.rewards.workers import reserve_worker, run_isolated, track_running, use_worker
from turnwright.envs.tool_env import ToolEnv
from turnwright.envs.user_code import as_number
from turnwright.errors import EnvError, InvalidAction, RewardError, words
from turnwright.media import has_media
from turnwright.renderers import Renderer
from turnwright.rollouts.agent_function import Reply
from turnwright.rollouts.conversation import ConversationPath
from turnwright.rollouts.env_session import EnvSession
from turnwright.rollouts.recorder import Recorder
from turnwright.rollouts.replies import reply_text
from turnwright.rollouts.resume import RestartEpisode
from turnwright.rollouts.timeouts import Deadline
from turnwright.types import (
    ContentPart,
    Message,
    Messages,
    RowReward,
    StopReason,
    Turn,
    as_messages,
    merge_texts,
)

THREAD_ENCODE_CHARS = 20_000
"""Text length in characters above which encoding runs in a worker thread: about 5 ms of a core."""


async def run_episode(session: EnvSession, recorder: Recorder, deadline: Deadline) -> None:
    """Play and record one episode of an environment, in as many attempts as its rules allow;
    `LimitReached` ends it."""
    while True:
        try:
            await _attempt(session, recorder, deadline)
            return recorder.resumed.check_end()
        except RestartEpisode as error:
            recorder.restart_attempt(error)


async def _attempt(session: EnvSession, recorder: Recorder, deadline: Deadline) -> None:
    trajectory, rules = recorder.trajectory, session.rules
    messages, tools = await session.reset()
    recorder.limit_turns(getattr(session.env, "max_turns", None))  # reset may have set it
    recorder.set_on_turn_length(session.env.on_turn_length)
    recorder.enter_phase("render")
    recorder.journal.observation = messages
    recorder.journal.observation = messages = await session.take_in(messages)
    path = (
        await session.in_thread(recorder.open, messages, tools)
        if _is_long(messages)
        else recorder.open(messages, tools)
    )
    resamples_left = max_resamples = (
        rules.max_resamples_per_turn if rules.on_invalid == "resample" else 0
    )
    while True:
        before = path.state if max_resamples else None
        turn = await recorder.generate(path, deadline)
        if path.turn in recorder.limits_met:
            raise recorder.limits_met[path.turn]
        began = time.monotonic()
        recorder.enter_phase("step", began)
        end = _end_text(recorder.renderer, path.ids[-1])  # type: ignore[arg-type]  # hashed by identity
        size = len(path.ids) - turn.context - bool(end)
        action = Action(
            turn.reply.text,
            turn.reply,
            turn.finish == "length",
            size,
            partial(_raw_text, recorder, turn),
            end,
        )
        try:
            # Most episodes have neither retries nor effects; they skip the
            # coroutine of `EnvSession.step`.
            step = as_step(
                await (
                    session.step(action, turn) if session.can_recover else session.call_step(action)
                )
            )
        except InvalidAction as error:
            text = words(error)
            trajectory.metrics["invalid_actions"] = trajectory.metrics.get("invalid_actions", 0) + 1
            if resamples_left and before is not None:
                resamples_left -= 1
                env_s = time.monotonic() - began
                info = {"invalid_action": text, "asked_again": True}
                recorder.reject(
                    path, before, info, trained=rules.rejected_replies == "trained", env_s=env_s
                )
                continue
            step = Step(text, info={"invalid_action": text})
        resamples_left = max_resamples
        if recorder.resumed.active:
            recorder.resumed.check_step(path.turn, step.reward)
        recorder.record_step(path.turn, step.reward, step.info, time.monotonic() - began)
        if step.terminated or step.truncated:
            last = step.observation
            if isinstance(last, InlineObservation):
                last = last.message if last.text else None
            elif isinstance(last, NewHistory):
                last = last.new
            final = as_messages(last)
            trajectory.final = await session.take_in(final, final=True)
            trajectory.stop = StopReason.DONE if step.terminated else StopReason.ENV_TRUNCATED
            return
        await _append_observation(step, path, recorder, session)


async def _append_observation(
    step: Step, path: ConversationPath, recorder: Recorder, session: EnvSession
) -> None:
    """Append a step's observation to the path: inside the last reply, or as messages.

    Encode long text in a thread.
    """
    observation = step.observation
    if isinstance(observation, NewHistory):
        recorder.journal.observation = observation
        if has_media(observation.new):
            observation = observation.with_new(await session.take_in(observation.new))
            recorder.journal.observation = observation
        recorder.enter_phase("render")
        await session.in_thread(recorder.prompts.rewrite, path, observation)
        return
    if isinstance(observation, InlineObservation) or recorder.history == "inline":
        inline = to_inline(observation)
        if has_media((inline.message,)):
            (taken_in,) = await session.take_in((inline.message,))
            inline = replace(inline, text=taken_in.content)
        recorder.journal.observation = inline
        recorder.enter_phase("render")
        recorder.prompts.insert(path, inline)
        return
    messages = as_messages(observation)
    recorder.enter_phase("render")
    recorder.journal.observation = messages
    if has_media(messages):
        recorder.journal.observation = messages = await session.take_in(messages)
    if _is_long(messages):
        prompts = recorder.prompts
        prompts.append(path, *await session.in_thread(prompts.render_observation, path, messages))
    else:
        recorder.prompts.append_observation(path, messages)


def to_inline(observation: Messages | InlineObservation | None) -> InlineObservation:
    """Return an observation as content inside the model's message (`history = "inline"`),
    its messages on lines."""
    if isinstance(observation, InlineObservation):
        return observation
    messages = as_messages(observation)
    parts: list[ContentPart] = []
    for number, message in enumerate(messages):
        if message.role not in ("user", "tool"):
            raise EnvError(
                f"a message of role {message.role!r} cannot be part of the reply (rollout.history "
                '= "inline"): return text, or messages of role "user" or "tool"; or use '
                'rollout.history = "append"'
            )
        if number:
            parts.append("\n")
        parts += (message.content,) if isinstance(message.content, str) else message.content
    if has_media(messages):
        return InlineObservation(merge_texts(parts))
    return InlineObservation("".join(part for part in parts if isinstance(part, str)))


@lru_cache(maxsize=256)
def _end_text(renderer: Renderer, last: int) -> str:
    """Return the text of the last id of a reply if it is an end token; else an empty text."""
    return renderer.decode([last]) if last in renderer.stop_ids else ""


def _raw_text(recorder: Recorder, turn: Turn) -> str:
    """Decode all text of a turn's reply, up to and including a stop text of the episode."""
    spans = recorder.trajectory.spans
    ids = [i for index in turn.spans for i in spans[index].ids]
    text = reply_text(recorder.renderer, ids, inside=turn.inserted is not None)
    return text if recorder.stop is None else recorder.stop.cut(text)


def _is_long(messages: Sequence[Message]) -> bool:
    size = 0
    for message in messages:
        size += len(message.text)
    return size > THREAD_ENCODE_CHARS


async def compute_reward(session: EnvSession, recorder: Recorder) -> float | None:
    """Return the reward of a finished episode: its steps' plus the environment's own; None
    if either is missing."""
    recorder.enter_phase("reward", time.monotonic())
    if recorder.unrewarded:
        return None
    total = sum(turn.reward or 0.0 for turn in recorder.trajectory.turns)
    if type(session.env).reward is Env.reward:
        recorder.journal.reward("own", 0.0)
        return total
    own = await recorder.retries.reward(partial(_own_reward, session, recorder), session.wait)
    return None if own is None else total + own


async def _own_reward(session: EnvSession, recorder: Recorder) -> float | None:
    """Return the environment's own reward, computed in its thread or in a worker process."""
    await session.revive()
    env, trajectory, seconds = session.env, recorder.trajectory, recorder.limits.reward_s
    recorder.enter_phase("reward", time.monotonic())
    isolated = session.rules.reward_isolation == "process"
    functions: Sequence[Callable[..., Any]] = [type(env)] if isolated else ()
    if isinstance(env, ToolEnv):
        functions = env.functions if isolated else env.isolated_rewards
    workers = (
        await session.wait(reserve_worker(*functions), recorder.limits.wall_clock_s)
        if functions
        else []
    )
    with track_running() as names, use_worker(workers):
        try:
            if not isolated:
                value = await session.call(env.reward, trajectory, seconds=seconds)
            elif isinstance(env, IsolatedReward):
                value = await session.call(env.isolated_reward, trajectory, seconds=seconds)
            else:
                name = f"{type(env).__name__}.reward"
                value = await session.call(
                    run_isolated, name, env.reward, trajectory, seconds=seconds
                )
        except TimeoutError as late:
            raise TimeoutError(reward_timeout_message(names, words(late))) from None
    reward = reward_value(value, recorder, "the episode's reward")
    recorder.journal.reward("own", value)
    return reward


def reward_timeout_message(names: Sequence[str], message: str = "") -> str:
    """Return the exception's own message, else one that names the rewards that
    missed their deadline."""
    listed = ", ".join(map(repr, dict.fromkeys(names)))
    return message or (f"the reward {listed} did not answer by its deadline" if listed else "")


def reward_value(value: Any, recorder: Recorder, what: str) -> float | None:
    """Return a reward as a float (None stays None).

    For `Scores`, return the total and record its parts.
    """
    if not isinstance(value, Scores):
        return as_number(value, what)
    trajectory = recorder.trajectory
    scores = value.checked(what)
    own, by_turn = scores.own, scores.turns
    if len(by_turn) > len(trajectory.turns):
        raise RewardError(f"{what} has {len(by_turn)} turns, the episode {len(trajectory.turns)}")
    trajectory.rewards |= scores.parts
    played = {turn.agent for turn in trajectory.turns}
    if unknown := sorted(scores.agents.keys() - played):
        raise RewardError(
            f"{what}: agent {unknown[0]!r} has a reward and no turn; agents are "
            f"{', '.join(sorted(played))}"
        )
    trajectory.agent_rewards |= scores.agents
    for name, number in scores.metrics.items():
        trajectory.metrics[name] = trajectory.metrics.get(name, 0) + number
    if own is None:
        return None
    for index, added in enumerate(by_turn):
        if added:
            turn = trajectory.turns[index]
            recorder.record_step(index, (turn.reward or 0.0) + added, turn.info, turn.env_s)
    numbers = {id(turn.reply): number for number, turn in enumerate(trajectory.turns)}
    for row_reward, replies in scores.rows:
        turns = [
            numbers.get(id(reply.message), -1) if isinstance(reply, Reply) else -1
            for reply in replies
        ]
        if min(turns, default=0) < 0:
            raise RewardError(
                f"{what}: rows has a reply that is not of this episode; pass what model.generate "
                "returned"
            )
        trajectory.row_rewards.append(RowReward(row_reward, tuple(sorted(turns))))
    return scores.total
