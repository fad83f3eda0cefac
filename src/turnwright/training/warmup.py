"""Demonstrations for the supervised warm-up: played by the environment's own player, or recorded.

`demonstrations` plays a demonstrator or solver in the environment; `conversations` converts those
of a dataset. Both go through the rollout loop, so that what the warm-up trains on has the ids that
reinforcement would see. When the warm-up ends is decided in `warmup_gate.py`; its steps are in
`TrainingRun._warm_up`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from turnwright.config import Limits, RunConfig
from turnwright.engines import Generation, Request, ScriptedEngine
from turnwright.envs import Action, Env, Step
from turnwright.envs.datasets import ImageSource, read_messages, read_rows
from turnwright.envs.spec import EnvSpec
from turnwright.envs.tool_env import NO_REWARD, ToolEnvFactory
from turnwright.errors import ConfigError, TaskError, TemplateError, TurnwrightError
from turnwright.media import MediaStore
from turnwright.renderers.chat_renderer import ChatRenderer
from turnwright.renderers.history import History
from turnwright.renderers.row_arguments import COLUMN, check_arguments_of_row
from turnwright.rollouts import EpisodeSpec, Rollout
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright.training.task_plan import TaskPlan
from turnwright.types import EpisodeKey, Message, StopReason, Task, Trajectory

LONGEST = 1 << 20
"""Maximum tokens of a recorded reply: replies are not truncated, but conversations over the context
are skipped."""


@dataclass(frozen=True, slots=True)
class DatasetConversation:
    """Recorded conversation, split at the assistant's replies."""

    opening: tuple[Message, ...]
    replies: tuple[Message, ...]
    answers: tuple[tuple[Message, ...], ...]
    """Messages after each reply but the last."""
    tools: tuple[Mapping[str, Any], ...]


class ConversationEnv(Env):
    """Environment that replays the other roles of a recorded conversation."""

    def __init__(self, conversation: DatasetConversation) -> None:
        self.conversation = conversation
        self.tools = conversation.tools
        self.turn = 0

    def reset(self, task: Task, *, seed: int | None = None) -> Sequence[Message]:
        """Return the messages before the first reply."""
        return self.conversation.opening

    def step(self, action: Action) -> Step:
        """Return the messages before the next reply."""
        self.turn += 1
        if self.turn == len(self.conversation.replies):
            return Step(terminated=True)
        return Step(list(self.conversation.answers[self.turn - 1]) or None)


class ConversationEngine(ScriptedEngine):
    """Engine that replays the assistant's replies, by episode name."""

    def __init__(self, lines: Mapping[str, Sequence[str]]) -> None:
        super().__init__([])
        self.lines = lines

    async def generate(self, request: Request) -> Generation:
        """Return the next reply of the request's conversation."""
        replies = ScriptedEngine(self.lines[request.session], renderer=self.renderer)
        return await replies.generate(request)


async def conversations(
    path: Path,
    renderer: ChatRenderer,
    *,
    limits: Limits,
    history: History,
    limit: int = 0,
    media: MediaStore | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> list[Trajectory]:
    """Convert a dataset's conversations to trajectories, each assistant reply a sampled span; skip
    those over the run's limits.

    Args:
        path: a `.jsonl`, `.parquet` or `.arrow` file, or a directory of them or of
            `datasets.save_to_disk`; each row has `messages` and optionally `tools`.
        limit: number of rows that are read; 0 means all.
        note: receives a line about skipped conversations.

    Raises:
        TaskError: when the file cannot be read, a row is no conversation, or none is left.
    """
    episodes: list[EpisodeSpec] = []
    lines: dict[str, list[str]] = {}
    skipped: Counter[str] = Counter()
    total = 0
    images = ImageSource(path if path.is_dir() else path.parent)
    for row, where in read_rows(path):
        if limit and total == limit:
            break
        total += 1
        conversation = read_conversation(row, where, images)
        arguments = row.get(COLUMN)
        if arguments is not None:
            check_arguments_of_row(arguments, where, renderer)
        if isinstance(conversation, str):
            skipped[conversation] += 1
            continue

        replies = tuple(with_thinking_apart(renderer, reply) for reply in conversation.replies)
        conversation = replace(conversation, replies=replies)
        texts = _texts_as_sampled(renderer, conversation)
        if texts is None:
            skipped["with a reply that the template cannot reproduce"] += 1
            continue

        key = EpisodeKey("converse", 0, f"conversation-{total}", 0)
        task = Task(conversation.opening, id=key.task)
        env = partial(ConversationEnv, conversation)
        episodes.append(EpisodeSpec(task, key, env, None, len(replies)))
        lines[key.session] = texts

    # The run's own limits of turns and tokens would cut what was said.
    turns = max((len(texts) for texts in lines.values()), default=1)
    unlimited = Limits(
        turns=turns, turn_tokens=LONGEST, context=limits.context, images=limits.images
    )
    rollout = Rollout(
        ConversationEngine(lines),
        renderer,
        RolloutSettings(limits=unlimited, history=history, sanity="off"),
        media=media,
    )

    usable: list[Trajectory] = []
    for trajectory in await rollout.play(episodes):
        if trajectory.stop is StopReason.DONE:
            usable.append(trajectory)
        elif trajectory.stop is StopReason.CONTEXT:
            skipped["over the context"] += 1
        else:
            skipped[f"ended as {trajectory.stop}"] += 1

    reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.most_common())
    if not usable:
        raise TaskError(
            f"{path}: none of {total} conversations is usable ({reasons or 'the file is empty'})"
        )
    if skipped:
        note(f"skipped {sum(skipped.values())} of {total} conversations in {path.name}: {reasons}")
    return usable


def _texts_as_sampled(
    renderer: ChatRenderer, conversation: DatasetConversation
) -> list[str] | None:
    """Return the text of each reply; None if the template cannot reproduce one."""
    try:
        texts = [
            encode_as_sampled(renderer, conversation, number)
            for number in range(len(conversation.replies))
        ]
    except TemplateError:
        return None
    reproduced = [text for text in texts if text is not None]
    return reproduced if len(reproduced) == len(texts) else None


def read_conversation(
    row: Any, where: str, images: ImageSource | None = None
) -> DatasetConversation | str:
    """Read a row as a conversation, or return why it has no usable reply; raise `TaskError` when it
    is no conversation."""
    messages, schemas = read_messages(row, where, images)
    places = [number for number, message in enumerate(messages) if message.role == "assistant"]
    if not places:
        return "without an assistant message"
    if places[0] == 0:
        return "starting with an assistant message"

    return DatasetConversation(
        opening=messages[: places[0]],
        replies=tuple(messages[place] for place in places),
        answers=tuple(messages[place + 1 : following] for place, following in pairwise(places)),
        tools=schemas,
    )


def with_thinking_apart(renderer: ChatRenderer, reply: Message) -> Message:
    """Return a reply with the thinking of its text in `reasoning`: rows of ms-swift write it into
    the content."""
    content = reply.content
    if reply.reasoning is not None or not isinstance(content, str) or "</" not in content:
        return reply

    parsed = renderer.parse(renderer.encode_reply(content))
    if not parsed.reasoning or parsed.tool_calls or parsed.calls_in_thinking:
        return reply
    return replace(reply, content=parsed.text, reasoning=parsed.reasoning)


def encode_as_sampled(
    renderer: ChatRenderer, conversation: DatasetConversation, number: int
) -> str | None:
    """Return the text that a model samples for a reply; None if the renderer does not parse the
    reply from it.

    Plain text is used as it is. Tool calls and reasoning are rendered by the chat template, after
    all earlier messages.
    """
    reply = conversation.replies[number]
    text = reply.text
    if reply.media:
        return None

    if reply.tool_calls or reply.reasoning:
        messages = [*conversation.opening]
        earlier_replies = conversation.replies[:number]
        for earlier, answer in zip(earlier_replies, conversation.answers, strict=False):
            messages += [earlier, *answer]
        template = renderer.template
        prompt = template.render(messages, conversation.tools, generation_prompt=True)
        full = template.render([*messages, reply], conversation.tools)
        if not full.startswith(prompt):
            return None

        # What the template writes after a reply is no part of it.
        end = renderer.decode(renderer.encode_reply("x")).partition("x")[2].strip()
        text = full[len(prompt) :].rstrip()
        if end and text.endswith(end):
            text = text[: -len(end)]

    if not text:
        return None
    parsed = renderer.parse(renderer.encode_reply(text), conversation.tools)
    return text if _said(parsed) == _said(reply) else None


def _said(message: Message) -> tuple[str, str, list[tuple[Any, ...]]]:
    """Return text, reasoning and calls of a message, to compare it with another."""
    calls: list[tuple[Any, ...]] = []
    for call in message.tool_calls:
        calls.append((call.name, call.arguments, call.error))
    return message.text.strip(), (message.reasoning or "").strip(), calls


NO_PLAYER = (
    "warmup.demos = {demos}, but {names} has no demonstrator or solver to play "
    "demonstrations; give it one (demonstrator(messages, rng) -> reply, also an argument of "
    "tool_env), or start from a trained model (model.path) with warmup.demos = 0"
)
NO_START = (
    "a new model without demonstrations (warmup.demos = 0, no warmup.dataset) replies at random, "
    "so reinforcement finds no success to build on: give the environment a demonstrator and set "
    "warmup.demos = 4000, or start from a trained model (model.path)"
)


def cannot_learn(config: RunConfig, env_specs: Sequence[EnvSpec]) -> list[str]:
    """Return why a run may have nothing to learn from, as known before it starts.

    Raises:
        ConfigError: when demonstrations are asked for and no environment can play them.
    """
    warmup = config.warmup
    names = [env_spec.name for env_spec in env_specs]
    has_player = any(
        (env_spec.demonstrator or env_spec.solver) is not None and env_spec.factory is not None
        for env_spec in env_specs
    )
    if warmup.demos and warmup.dataset is None and not has_player:
        raise ConfigError(NO_PLAYER.format(demos=warmup.demos, names=", ".join(names)))

    reasons: list[str] = []
    for env_spec in env_specs:
        factory = env_spec.factory
        if isinstance(factory, ToolEnvFactory) and factory.needs_rewards_of_calls:
            reasons.append(f"{env_spec.name}: {NO_REWARD}")

    is_untrained = config.model.path is None and not warmup.demos and warmup.dataset is None
    if is_untrained and config.train.steps:
        reasons.append(NO_START)
    return reasons


async def demonstrations(
    env_specs: Sequence[EnvSpec],
    plan: TaskPlan,
    renderer: ChatRenderer,
    config: RunConfig,
    history: History,
    media: MediaStore | None = None,
    note: Callable[[str], None] = lambda _: None,
    play: Callable[[Rollout, Sequence[EpisodeSpec]], Awaitable[list[Trajectory]]] = Rollout.play,
) -> list[Trajectory]:
    """Play `warmup.demos` demonstrator episodes, or `warmup.dataset`'s conversations, through the
    training loop.

    `note` receives a line about failed demonstrations, which are left out; `play` plays episodes of
    a rollout.

    Raises:
        ConfigError: when no environment has a demonstrator or solver.
        TurnwrightError: when most demonstrations fail.
    """
    warmup = config.warmup
    if warmup.dataset is not None:
        return await conversations(
            Path(warmup.dataset),
            renderer,
            limits=config.limits,
            history=history,
            limit=warmup.demos,
            media=media,
            note=note,
        )

    players = {env_spec.name: env_spec.demonstrator or env_spec.solver for env_spec in env_specs}
    usable = [
        env_spec
        for env_spec in env_specs
        if players[env_spec.name] is not None and env_spec.factory is not None
    ]
    if not usable:
        raise ConfigError(NO_PLAYER.format(demos=warmup.demos, names=", ".join(players)))

    settings = RolloutSettings(
        limits=config.limits,
        seed=config.seed,
        stop=config.rollout.stop,
        history=history,
        # The run's own rollout compares the replies of the model, and warns once.
        sanity="off",
    )
    demos: list[Trajectory] = []
    total_weight = sum(env_spec.weight for env_spec in usable)
    for env_spec in usable:
        player = players[env_spec.name]
        assert player is not None
        rollout = Rollout(ScriptedEngine(player), renderer, settings, media=media)

        # A play function may start a program for each episode, so the environment plays alone.
        count = max(1, round(warmup.demos * env_spec.weight / total_weight))
        in_env = replace(env_spec, agent_function=None)
        choices = [
            replace(choice, env_spec=in_env) for choice in plan.demonstrated(env_spec, count)
        ]

        # With fewer tasks than demonstrations, tasks repeat with another sample number.
        episodes = []
        for number in range(count):
            sample, place = divmod(number, len(choices))
            episodes.append(choices[place].episode("demonstrate", 0, sample))
        demos += await play(rollout, episodes)
    return _without_failed(demos, note)


def _without_failed(demos: Sequence[Trajectory], note: Callable[[str], None]) -> list[Trajectory]:
    """Return the demonstrations that did not fail; raise `TurnwrightError` when most did."""
    succeeded = [demo for demo in demos if demo.stop is not None and not demo.stop.failed]
    if len(succeeded) == len(demos):
        return succeeded

    error = next(demo.error for demo in demos if demo.error is not None)
    failed = f"{len(demos) - len(succeeded)} of {len(demos)} demonstrations failed"
    if len(succeeded) * 2 < len(demos):
        raise TurnwrightError(f"{failed}, the first with {error.type}: {error.message}")
    note(f"{failed} and are left out, the first with {error.type}: {error.message}")
    return succeeded


LIMIT_KEYS = {
    StopReason.MAX_TURNS: "turns",
    StopReason.TURN_LENGTH: "turn_tokens",
    StopReason.EPISODE_TOKENS: "episode_tokens",
    StopReason.CONTEXT: "context",
}
"""Keys of `[limits]` by the stop reason that they cause."""
CUT = 0.1
"""Share of demonstrations cut at a limit from which on it is reported."""


def cut_note(config: RunConfig, demos: Sequence[Trajectory]) -> str:
    """Describe the limit that cuts most demonstrations; empty if it cuts few."""
    stops = Counter(demo.stop for demo in demos if demo.stop in LIMIT_KEYS)
    if not stops:
        return ""
    (reason, count), *_ = stops.most_common(1)
    if reason is None or count < CUT * len(demos):
        return ""

    key = LIMIT_KEYS[reason]
    limit = f"limits.{key} = {getattr(config.limits, key)}"
    if reason is StopReason.MAX_TURNS:
        most_turns = max(len(demo.turns) for demo in demos if demo.stop is reason)
        if most_turns < config.limits.turns:
            limit = "the environment's max_turns"
    return (
        f"{count / len(demos):.0%} of the demonstrations are cut at {limit}; raise it, or what "
        "they show has no end"
    )


def sample_demos(demos: Sequence[Trajectory], config: RunConfig, step: int) -> list[Trajectory]:
    """Draw the demonstrations of one step uniformly (buckets by length would favor middle
    lengths)."""
    return random.Random(f"{config.seed}/warmup/{step}").choices(demos, k=config.warmup.batch)
