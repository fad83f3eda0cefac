"""Supervised warm-up on demonstrations or conversations."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from turnwise.config import Limits, RunConfig
from turnwise.engines import Request, ScriptedEngine
from turnwise.engines.scripted import Reply
from turnwise.envs import Action, Env, Step
from turnwise.envs.datasets import read_rows
from turnwise.envs.spec import EnvSpec
from turnwise.errors import ConfigError, TaskError, TemplateError, TurnwiseError
from turnwise.media import MediaStore
from turnwise.renderers.chat_renderer import ChatRenderer
from turnwise.renderers.history import History
from turnwise.rollouts import EpisodeSpec, Rollout
from turnwise.training.evaluation import EvalResult
from turnwise.training.task_plan import TaskChoice
from turnwise.types import EpisodeKey, Message, StopReason, Task, Trajectory
from turnwise.types.messages import as_messages

LONGEST = 1 << 20
"""Tokens of a reply: what was said is not cut, but what does not fit the context is left out."""


@dataclass(frozen=True, slots=True)
class DatasetConversation:
    """One conversation, cut where the assistant speaks."""

    opening: tuple[Message, ...]
    replies: tuple[Message, ...]
    answers: tuple[tuple[Message, ...], ...]
    """What follows each reply but the last."""
    tools: tuple[Mapping[str, Any], ...]


class ConversationEnv(Env):
    """Says what the others said in a conversation that was written down."""

    def __init__(self, said: DatasetConversation) -> None:
        self.said = said
        self.tools = said.tools
        self.turn = 0

    def reset(self, task: Task, *, seed: int | None = None) -> Sequence[Message]:
        """All that stands before the first reply."""
        return self.said.opening

    def step(self, action: Action) -> Step:
        """All that stands before the next one."""
        self.turn += 1
        if self.turn == len(self.said.replies):
            return Step(terminated=True)
        return Step(list(self.said.answers[self.turn - 1]) or None)


class ConversationEngine(ScriptedEngine):
    """Says what the assistant said, by the name of the episode."""

    def __init__(self, lines: Mapping[str, Sequence[str]]) -> None:
        super().__init__([])
        self.lines = lines

    def _reply(self, request: Request) -> Reply:
        return self.lines[request.session][request.call]


async def conversations(
    path: Path,
    renderer: ChatRenderer,
    *,
    limits: Limits,
    history: History,
    most: int = 0,
    media: MediaStore | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> list[Trajectory]:
    """The conversations of a dataset, every reply of the assistant a sampled span.

    Args:
        path: a `.jsonl`, `.parquet` or `.arrow` file, or a directory of them or of `datasets.save_to_disk`; each row has
            `messages` and may have `tools`.
        limits: of the run; here the context and the images count, and what goes beyond is left out whole.
        most: conversations to take, from the first on; 0 takes all.
        note: told how many were left out, and why.

    Raises:
        TaskError: when the file cannot be read, a row is no conversation, or none is left.
    """
    episodes: list[EpisodeSpec] = []
    lines: dict[str, list[str]] = {}
    out: Counter[str] = Counter()
    total = 0
    for row, where in read_rows(path):
        if most and total == most:
            break
        total += 1
        said = read_conversation(row, where)
        if isinstance(said, str):
            out[said] += 1
            continue
        try:
            words = [encode_as_sampled(renderer, said, number) for number in range(len(said.replies))]
        except TemplateError:
            words = [None]
        if any(one is None for one in words):
            out["the template cannot write a reply that reads as it"] += 1
            continue
        key = EpisodeKey("converse", 0, f"conversation-{total}", 0)
        task = Task(said.opening, id=key.task)
        episodes.append(EpisodeSpec(task, key, partial(ConversationEnv, said), None, len(said.replies)))
        lines[f"{key.phase}/{key.step}/{key.task}/{key.sample}/{key.attempt}"] = [one for one in words if one is not None]
    turns = max((len(said) for said in lines.values()), default=1)
    own = Limits(turns=turns, turn_tokens=LONGEST, context=limits.context, images=limits.images)
    rollout = Rollout(ConversationEngine(lines), renderer, limits=own, history=history, media=media, sanity="off")
    played = await rollout.play(episodes)
    found = [trajectory for trajectory in played if trajectory.stop is StopReason.DONE]
    for trajectory in played:
        if trajectory.stop is not StopReason.DONE:
            out["over the context" if trajectory.stop is StopReason.CONTEXT else f"ended as {trajectory.stop}"] += 1
    why = ", ".join(f"{count} {reason}" for reason, count in out.most_common())
    if not found:
        raise TaskError(f"{path}: none of {total} conversations can be learned from ({why or 'it is empty'})")
    if out:
        note(f"{sum(out.values())} of {total} conversations of {path.name} left out: {why}")
    return found


def read_conversation(row: Any, where: str) -> DatasetConversation | str:
    """A row as a conversation; or why there is nothing to learn from it.

    Raises:
        TaskError: when it is none.
    """
    messages = row.get("messages", row.get("conversations")) if isinstance(row, Mapping) else None
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise TaskError(f'{where}: a conversation is a row with "messages", a list of objects with role and content')
    tools = row.get("tools") or ()
    try:
        given = as_messages([_filled(message) for message in messages])
        schemas = tuple(json.loads(tools) if isinstance(tools, str) else tools)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise TaskError(f"{where}: not made of chat messages and tool schemas: {error}") from error
    places = [number for number, message in enumerate(given) if message.role == "assistant"]
    if not places:
        return "no assistant speaks"
    if places[0] == 0:
        return "the assistant speaks first"
    answers = tuple(given[a + 1 : b] for a, b in pairwise(places))
    return DatasetConversation(given[: places[0]], tuple(given[place] for place in places), answers, schemas)


def _filled(message: Any) -> Any:
    """A message without the fields that columns of a table fill with nothing."""
    if not isinstance(message, Mapping):
        return message
    kept = {key: value for key, value in message.items() if value is not None}
    return kept if "content" in kept else {**kept, "content": ""}


def encode_as_sampled(renderer: ChatRenderer, said: DatasetConversation, number: int) -> str | None:
    """What a model samples to give a reply of a conversation; None where the renderer would not read the reply from it.

    Plain texts are taken as they are. Calls and thinking are written by the chat template, behind all that came before.
    """
    reply, text = said.replies[number], said.replies[number].text
    if reply.media:
        return None
    if reply.tool_calls or reply.reasoning:
        before = [*said.opening]
        for earlier, answer in zip(said.replies[:number], said.answers, strict=False):
            before += [earlier, *answer]
        template = renderer.template
        prompt = template.render(before, said.tools, generation_prompt=True)
        whole = template.render([*before, reply], said.tools)
        if not whole.startswith(prompt):
            return None
        end = renderer.decode(renderer.encode_reply("x")).partition("x")[2]
        text = whole[len(prompt) :].rstrip()
        if end.strip() and text.endswith(end.strip()):
            text = text[: -len(end.strip())]
    if not text:
        return None
    read = renderer.parse(renderer.encode_reply(text), said.tools)
    return text if _same(read, reply) else None


def _same(read: Message, said: Message) -> bool:
    calls = [[(call.name, call.arguments, call.error) for call in message.tool_calls] for message in (read, said)]
    thoughts = [(message.reasoning or "").strip() for message in (read, said)]
    return read.text.strip() == said.text.strip() and calls[0] == calls[1] and thoughts[0] == thoughts[1]


async def demonstrations(
    worlds: Sequence[EnvSpec],
    choices: Sequence[TaskChoice],
    renderer: ChatRenderer,
    config: RunConfig,
    history: History,
    media: MediaStore | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> list[Trajectory]:
    """`warmup.demos` episodes of the worlds' demonstrators, or the conversations of `warmup.dataset`, through the loop that the
    model will play in.

    Args:
        media: where their images are kept: the store that the trainer looks into.
        note: told what is left out of a dataset.

    Raises:
        ConfigError: when no world has a demonstrator or solver.
        TaskError: when a dataset cannot be read, or has nothing to learn from.
        TurnwiseError: when most of them fail.
    """
    if config.warmup.dataset is not None:
        limits, most = config.limits, config.warmup.demos
        path = Path(config.warmup.dataset)
        return await conversations(path, renderer, limits=limits, history=history, most=most, media=media, note=note)
    speakers = {world.name: world.demonstrator or world.solver for world in worlds}
    able = [choice for choice in choices if speakers[choice.world.name] is not None and choice.world.factory is not None]
    if not able:
        raise ConfigError("warmup.demos is over 0 but no environment has a demonstrator or solver; set warmup.demos = 0")
    found: list[Trajectory] = []
    total = sum(world.weight for world in {choice.world.name: choice.world for choice in able}.values())
    for world in worlds:
        speaker = speakers[world.name]
        own = [choice for choice in able if choice.world is world]
        if not own or speaker is None:
            continue
        count = max(1, round(config.warmup.demos * world.weight / total))
        rollout = Rollout(
            ScriptedEngine(speaker),
            renderer,
            limits=config.limits,
            seed=config.seed,
            stop=config.rollout.stop,
            history=history,
            media=media,
        )
        # Tasks are used again when there are fewer than demonstrations; the sample's number then tells them apart.
        episodes = [own[i % len(own)].episode("demonstrate", 0, i // len(own)) for i in range(count)]
        found.extend(await rollout.play(episodes))
    good = [trajectory for trajectory in found if trajectory.stop is not None and not trajectory.stop.failed]
    if len(good) * 2 < len(found):
        error = next(t.error for t in found if t.error is not None)
        raise TurnwiseError(
            f"{len(found) - len(good)} of {len(found)} demonstrations failed, the first with {error.type}: {error.message}"
        )
    return good


def sample_demos(demos: Sequence[Trajectory], config: RunConfig, step: int) -> list[Trajectory]:
    """The demonstrations of one step, drawn with equal chances (buckets by length would favour the middle lengths)."""
    rng = random.Random(f"{config.seed}/warmup/{step}")
    return rng.choices(demos, k=config.warmup.batch)


def learning_rate(config: RunConfig, step: int) -> float:
    """Ten steps up, then a cosine down to a tenth of the peak at `warmup.steps`."""
    warmup = config.warmup
    rise = min(1.0, (step + 1) / 10)
    fall = 0.1 + 0.45 * (1 + math.cos(math.pi * min(step / warmup.steps, 1.0)))
    return warmup.lr * rise * fall


def unmet_gate(config: RunConfig, score: EvalResult, loss: float) -> str:
    """What is still missing before reinforcement may begin; empty when nothing is."""
    warmup = config.warmup
    missing = []
    if score.success < warmup.gate_success:
        missing.append(f"success is {score.success:.2f}, warmup.gate_success {warmup.gate_success:g}")
    if warmup.gate_loss is not None and loss > warmup.gate_loss:
        missing.append(f"loss is {loss:.3f}, warmup.gate_loss {warmup.gate_loss:g}")
    return " and ".join(missing)
