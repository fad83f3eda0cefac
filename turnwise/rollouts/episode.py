"""The environment loop, including inline observations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from turnwise.envs import Action, Env, InlineObservation, Scores, Step
from turnwise.envs.base import IsolatedReward, as_step
from turnwise.envs.rewards.workers import reserve_worker, run_isolated, track_running, use_worker
from turnwise.envs.tool_env import ToolEnv
from turnwise.envs.user_code import as_number
from turnwise.errors import EnvError, InvalidAction, RewardError, words
from turnwise.renderers import Branch, Extend
from turnwise.renderers.base import Decode, cut_ids
from turnwise.rollouts.conversation import ConversationPath, reply_decoder, reply_text
from turnwise.rollouts.env_session import EnvSession, RestartEpisode
from turnwise.rollouts.observations import MediaIntake
from turnwise.rollouts.recorder import Recorder
from turnwise.rollouts.timeouts import Deadline
from turnwise.types import Message, Messages, StopReason, Turn, as_messages


def to_inline(observation: Messages | InlineObservation | None, sight: MediaIntake) -> InlineObservation:
    """Return an observation as text inside the model's message (`history = "inline"`).

    A text-only model reads the `alt` text of an image, as in every other history mode.

    Raises:
        EnvError: for a role that cannot be part of a reply, and for an image where the model sees images.
        MediaError: for an image without `alt` where the model is text-only.
    """
    if isinstance(observation, InlineObservation):
        return observation
    messages = as_messages(observation)
    for message in messages:
        if message.role not in ("user", "tool"):
            raise EnvError(
                f'a message of role {message.role!r} cannot stand inside the reply (rollout.history = "inline"): return text, '
                'or messages of role "user" or "tool"; or use rollout.history = "append"'
            )
    if sight.has_media(messages):
        if sight.sees:
            raise EnvError(
                'an image or a video cannot be part of the reply (rollout.history = "inline"): return text, or use '
                'rollout.history = "append"'
            )
        messages = sight.take_in(messages)
    return InlineObservation("\n".join(message.text for message in messages))


def raw_text(recorder: Recorder, turn: Turn) -> str:
    """All that the reply of a turn says, cut behind a stop text of the episode."""
    spans = recorder.trajectory.spans
    ids = [i for index in turn.spans for i in spans[index].ids]
    text = reply_text(recorder.renderer, ids, inside=turn.inserted is not None)
    return text if recorder.stop is None else recorder.stop.cut(text)


def continue_reply(recorder: Recorder, path: ConversationPath, inline: InlineObservation) -> None:
    """Let the model speak on inside its last message, behind what stays of its reply and what the world inserts.

    Raises:
        EnvError: when the reply is shorter than what should stay.
        ControlTextError: when the text holds control text and the renderer rejects it.
    """
    trajectory, renderer = recorder.trajectory, recorder.renderer
    turn = trajectory.turns[path.turn]
    reply = path.ids[turn.context :]
    said = reply[:-1] if reply and reply[-1] in renderer.stop_ids else reply
    count, rest = _kept(reply_decoder(renderer, turn.inserted is not None), said, inline)
    rewound = count < len(said)
    kept = reply[:count] if rewound else reply

    def render(given: tuple[Message, ...]) -> Extend | Branch:
        rendered = renderer.inline(kept, rest + given[0].text)
        if isinstance(rendered, Branch):
            return rendered._replace(keep=turn.context + rendered.keep)
        if not rewound:
            return rendered
        return Branch(turn.context + count, rendered.ids, "rewound", rendered.neutralised, rendered.control_text)

    (message,), rendered = recorder.truncate_observation((Message("user", inline.text),), render)
    recorder.entries.changed |= rewound or inline.keep_chars is not None or inline.tail == "untrained"
    recorder.append(path, rendered)
    if inline.tail == "untrained":
        recorder.mark_untrained(turn, turn.context + count)
    path.inserted, path.kept, path.fresh = message.text, count, ()
    body = path.ids[trajectory.reply_start(path.turn) :]
    path.messages[-1] = renderer.parse(body)
    path.thinking = not renderer.parse((), (), f"{renderer.decode(body)}x").text.endswith("x")


def _kept(decode: Decode, said: Sequence[int], inline: InlineObservation) -> tuple[int, str]:
    """How many ids of a reply stay, and the text behind them that stays too, of an id that is cut."""
    if inline.keep_tokens is None and inline.keep_chars is None:
        return len(said), ""
    inline.check(len(decode(said)), len(said))
    if inline.keep_tokens is not None:
        return inline.keep_tokens, ""
    assert inline.keep_chars is not None
    return cut_ids(decode, said, inline.keep_chars)


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
