"""One episode of an environment, on one page.

`run_episode` plays it in attempts. `_attempt` is the loop of one attempt: reset, then for each turn
sample a reply, step the environment, append its observation. `compute_reward` follows when the loop
has ended.

What is written when: a reply and its turn before the environment's step (`Recorder.generate`);
reward, info and observation of the step with the next reply, or at the end. A run that is killed in
between takes the recorded actions again; with `effects`, each step has an entry of its own.

What ends the loop besides a step: a limit, as `LimitReached` (no turn or token is left, an
observation does not fit, a reply was cut or has a misplaced control token). `Rollout` catches it
and asks for the reward as usual. Any other exception leaves no reward, but for `RestartEpisode`:
another attempt is played, and what was sampled stays untrained. Where history is rewritten, the ids
left behind stay as a branch of the trajectory, and are trained.

What one turn samples is `Recorder.generate`. Deadlines of user code, its retries and its recovery
are in `EnvSession`, the ids of an observation in `PromptWriter`. Episodes of agent functions have
no loop here (`Rollout._run_agent`), rewards that compare siblings are in `GroupRewards`, and
`Rollout.play_episode` puts the parts together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from turnwright.envs import Action, Env, InlineObservation, NewHistory, Scores, Step
from turnwright.envs.env import IsolatedReward, as_step
from turnwright.envs.isolation.fork_server import ForkedProcess
from turnwright.envs.rewards.workers import reserve_worker, run_isolated, track_running, use_worker
from turnwright.envs.tool_env import ToolEnv
from turnwright.envs.user_code import as_number
from turnwright.errors import EnvError, InvalidAction, RewardError, words
from turnwright.media import has_media
from turnwright.renderers import Renderer
from turnwright.rollouts.agent_function import Reply
from turnwright.rollouts.conversation import ConversationPath, PathState
from turnwright.rollouts.counts import add_counts
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
    Trajectory,
    Turn,
    as_messages,
    merge_texts,
)

THREAD_ENCODE_CHARS = 20_000
"""Text length in characters above which encoding runs in a worker thread: about 5 ms of a core."""


async def run_episode(session: EnvSession, recorder: Recorder, deadline: Deadline) -> None:
    """Play and record one episode of an environment, in as many attempts as its rules allow.

    Raises `LimitReached` when a limit ends the episode.
    """
    while True:
        try:
            await _attempt(session, recorder, deadline)
            recorder.resumed.check_end()
            return
        except RestartEpisode as error:
            recorder.restart_attempt(error)


async def _attempt(session: EnvSession, recorder: Recorder, deadline: Deadline) -> None:
    """Play one attempt until a step ends it; limits and failures leave it as exceptions."""
    path = await _open_conversation(session, recorder)
    max_resamples = 0
    if session.rules.on_invalid == "resample":
        max_resamples = session.rules.max_resamples_per_turn
    resamples_left = max_resamples

    while True:
        # Sample a reply. One that was cut by a limit, or has a misplaced control token, ends the
        # episode: the environment does not see it.
        state_before = path.state if max_resamples else None
        turn = await recorder.generate(path, deadline)
        number = path.turn
        if number in recorder.limits_met:
            raise recorder.limits_met[number]

        # Step the environment.
        began = time.monotonic()
        recorder.enter_phase("step", began)
        action = _action_of(turn, path, recorder)
        try:
            if session.can_recover:
                result = await session.step(action, turn)
            else:
                # The same call and deadline, a coroutine less: nothing is retried or kept.
                result = await session.call_step(action)
            step = as_step(result)
        except InvalidAction as error:
            add_counts(recorder.trajectory, "invalid_actions")
            message = words(error)
            if state_before is not None and resamples_left:
                resamples_left -= 1
                env_s = time.monotonic() - began
                _ask_again(session, recorder, path, state_before, message, env_s)
                continue
            # The model reads what was wrong, and the episode goes on.
            step = Step(message, info={"invalid_action": message})
        resamples_left = max_resamples

        # Record the step; in a resumed episode its reward has to be the recorded one.
        if recorder.resumed.active:
            recorder.resumed.check_step(number, step.reward)
        recorder.record_step(number, step.reward, step.info, time.monotonic() - began)

        # End the episode, or append what the environment says.
        if step.terminated or step.truncated:
            final = _final_messages(step.observation)
            recorder.trajectory.final = await session.take_in(final, final=True)
            recorder.trajectory.stop = (
                StopReason.DONE if step.terminated else StopReason.ENV_TRUNCATED
            )
            return
        await _append_observation(step.observation, path, recorder, session)


async def _open_conversation(session: EnvSession, recorder: Recorder) -> ConversationPath:
    """Reset the environment and render its opening prompt."""
    messages, tools = await session.reset()

    # An environment may set its own limits during its reset.
    recorder.limit_turns(getattr(session.env, "max_turns", None))
    recorder.set_on_turn_length(session.env.on_turn_length)

    recorder.enter_phase("render")
    recorder.journal.observation = messages
    messages = await session.take_in(messages)
    recorder.journal.observation = messages
    if _is_long(messages):
        return await session.in_thread(recorder.open, messages, tools)
    return recorder.open(messages, tools)


def _action_of(turn: Turn, path: ConversationPath, recorder: Recorder) -> Action:
    """Return what the environment sees of a turn's reply."""
    renderer = recorder.renderer
    end_token = _end_text(renderer, path.ids[-1])  # type: ignore[arg-type]  # hashed by identity
    size = len(path.ids) - turn.context
    return Action(
        text=turn.reply.text,
        message=turn.reply,
        truncated=turn.finish == "length",
        tokens=size - 1 if end_token else size,
        raw_source=partial(_raw_text, recorder, turn),
        end_token=end_token,
    )


@lru_cache(maxsize=256)
def _end_text(renderer: Renderer, last: int) -> str:
    """Return the text of the last id of a reply if it is an end token; else an empty text."""
    return renderer.decode([last]) if last in renderer.stop_ids else ""


def _raw_text(recorder: Recorder, turn: Turn) -> str:
    """Decode all text of a turn's reply, up to and including a stop text of the episode."""
    ids: list[int] = []
    for index in turn.spans:
        ids += recorder.trajectory.spans[index].ids
    text = reply_text(recorder.renderer, ids, inside=turn.inserted is not None)
    return text if recorder.stop is None else recorder.stop.cut(text)


def _ask_again(
    session: EnvSession,
    recorder: Recorder,
    path: ConversationPath,
    state_before: PathState,
    message: str,
    env_s: float,
) -> None:
    """Reject the last reply, whose action was invalid, so that another one is sampled.

    It stays a turn, with a reward of 0, that does not count toward the turn limit.
    """
    recorder.reject(
        path,
        state_before,
        {"invalid_action": message, "asked_again": True},
        trained=session.rules.rejected_replies == "trained",
        env_s=env_s,
    )


def _final_messages(observation: Any) -> tuple[Message, ...]:
    """Return the messages of an observation that no reply follows."""
    if isinstance(observation, InlineObservation):
        return as_messages(observation.message if observation.text else None)
    if isinstance(observation, NewHistory):
        return as_messages(observation.new)
    return as_messages(observation)


# Observations


async def _append_observation(
    observation: Any, path: ConversationPath, recorder: Recorder, session: EnvSession
) -> None:
    """Append an observation to the path: as a new history, inside the last reply, or as messages.

    The journal keeps it for its next entry before anything can fail on it, and again once its media
    are stored; one inside the last reply only then.
    """
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
            (stored_message,) = await session.take_in((inline.message,))
            inline = replace(inline, text=stored_message.content)
        recorder.journal.observation = inline
        recorder.enter_phase("render")
        recorder.prompts.insert(path, inline)
        return

    messages = as_messages(observation)
    recorder.enter_phase("render")
    recorder.journal.observation = messages
    if has_media(messages):
        messages = await session.take_in(messages)
        recorder.journal.observation = messages
    prompts = recorder.prompts
    if _is_long(messages):
        rendered, messages = await session.in_thread(prompts.render_observation, path, messages)
        prompts.append(path, rendered, messages)
    else:
        prompts.append_observation(path, messages)


def _is_long(messages: Sequence[Message]) -> bool:
    size = 0
    for message in messages:
        size += len(message.text)
    return size > THREAD_ENCODE_CHARS


def to_inline(observation: Messages | InlineObservation | None) -> InlineObservation:
    """Return an observation as content inside the model's message (`history = "inline"`).

    Its messages stand on lines of their own. Raises `EnvError` for a message that is neither of the
    user nor of a tool.
    """
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
        if isinstance(message.content, str):
            parts.append(message.content)
        else:
            parts += message.content

    if has_media(messages):
        return InlineObservation(merge_texts(parts))
    return InlineObservation("".join(part for part in parts if isinstance(part, str)))


# Rewards


async def compute_reward(session: EnvSession, recorder: Recorder) -> float | None:
    """Return the reward of a finished episode: its steps' plus the environment's own.

    None if the environment gave None for one of them. A turn without a step, which a limit ended,
    adds 0.
    """
    recorder.enter_phase("reward", time.monotonic())
    if recorder.unrewarded:
        return None
    reward_of_steps = sum(turn.reward or 0.0 for turn in recorder.trajectory.turns)

    if type(session.env).reward is Env.reward:
        recorder.journal.reward("own", 0.0)
        return reward_of_steps
    own_reward = await recorder.retries.reward(
        partial(_own_reward, session, recorder), session.wait
    )
    return None if own_reward is None else reward_of_steps + own_reward


async def _own_reward(session: EnvSession, recorder: Recorder) -> float | None:
    """Return the environment's own reward, computed in its thread or in a worker process."""
    await session.revive()
    env = session.env
    trajectory = recorder.trajectory
    seconds = recorder.limits.reward_s
    recorder.enter_phase("reward", time.monotonic())

    # The wait for a worker process does not count toward the reward's time.
    isolated = session.rules.reward_isolation == "process"
    functions = _functions_of_worker(env, isolated)
    workers: list[ForkedProcess] = []
    if functions:
        workers = await session.wait(reserve_worker(*functions), recorder.limits.wall_clock_s)

    with track_running() as running_rewards, use_worker(workers):
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
            message = reward_timeout_message(running_rewards, words(late))
            raise TimeoutError(message) from None

    reward = reward_value(value, recorder, "the episode's reward")
    recorder.journal.reward("own", value)
    return reward


def _functions_of_worker(env: Env, isolated: bool) -> Sequence[Callable[..., Any]]:
    """Return the functions of a reward that a worker process runs; none without one."""
    if isinstance(env, ToolEnv):
        return env.functions if isolated else env.isolated_rewards
    return [type(env)] if isolated else ()


def reward_timeout_message(names: Sequence[str], message: str = "") -> str:
    """Return an exception's own message, else one that names the rewards that were late."""
    if message:
        return message
    listed = ", ".join(map(repr, dict.fromkeys(names)))
    return f"the reward {listed} did not answer by its deadline" if listed else ""


def reward_value(value: Any, recorder: Recorder, what: str) -> float | None:
    """Return a reward as a float (None stays None); of `Scores`, the total.

    The parts of `Scores` are recorded: rewards by name, by agent, by turn and by row, and metrics.
    `what` names the reward in errors. Raises `RewardError` for parts of turns, agents or replies
    that the episode does not have.
    """
    if not isinstance(value, Scores):
        return as_number(value, what)

    trajectory = recorder.trajectory
    scores = value.checked(what)
    if len(scores.turns) > len(trajectory.turns):
        raise RewardError(
            f"{what} has {len(scores.turns)} turns, the episode {len(trajectory.turns)}"
        )
    trajectory.rewards |= scores.parts

    played_agents = {turn.agent for turn in trajectory.turns}
    unknown_agents = sorted(scores.agents.keys() - played_agents)
    if unknown_agents:
        raise RewardError(
            f"{what}: agent {unknown_agents[0]!r} has a reward and no turn; agents are "
            f"{', '.join(sorted(played_agents))}"
        )
    trajectory.agent_rewards |= scores.agents

    for name, number in scores.metrics.items():
        trajectory.metrics[name] = trajectory.metrics.get(name, 0) + number
    if scores.own is None:
        return None

    for index, added in enumerate(scores.turns):
        if added:
            turn = trajectory.turns[index]
            recorder.record_step(index, (turn.reward or 0.0) + added, turn.info, turn.env_s)
    _record_row_rewards(scores, trajectory, what)
    return scores.total


def _record_row_rewards(scores: Scores, trajectory: Trajectory, what: str) -> None:
    """Record the rewards of single rows, which name their turns by the replies themselves."""
    turn_numbers = {id(turn.reply): number for number, turn in enumerate(trajectory.turns)}
    for row_reward, replies in scores.rows:
        turns: list[int] = []
        for reply in replies:
            if not isinstance(reply, Reply) or id(reply.message) not in turn_numbers:
                raise RewardError(
                    f"{what}: rows has a reply that is not of this episode; pass what "
                    "model.generate returned"
                )
            turns.append(turn_numbers[id(reply.message)])
        trajectory.row_rewards.append(RowReward(row_reward, tuple(sorted(turns))))
