"""Tasks, trajectories and their spans, turns and training rows.

A `Trajectory` is the record of one episode. Its `Span`s hold every id once, as a forest: a span
continues its parent, and where history was rewritten two spans share one. Its `Turn`s say which
ids the engine received for a reply, and what the environment answered. `Trajectory.samples` makes
training rows of both.

Not here: who fills a trajectory during an episode (`rollouts/recorder.py:Recorder` and
`rollouts/conversation.py:ConversationPath`), its form in files (`records/serialization.py`), and
what a sampled id is worth in training (`training/advantages.py:advantages`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from itertools import repeat
from typing import Any, NamedTuple

from turnwright.types.expert_routing import ROUTES, ExpertRoutes
from turnwright.types.media import Image, ImageRef, MediaPlacement, placements_between
from turnwright.types.messages import Message, Messages, as_messages
from turnwright.types.notebook import html_of
from turnwright.types.outcomes import Failure, StopReason, shortened
from turnwright.types.sampling import SamplingDistribution


@dataclass(frozen=True, slots=True)
class Task:
    """One immutable row of a dataset: the conversation to start from, and the expected answer.

    Example::

        >>> task = tw.Task("What is 6 * 7?", answer="42")
        >>> task.messages[0].role, task.messages[0].text
        ('user', 'What is 6 * 7?')
        >>> task == tw.Task("What is 6 * 7?", answer="42")
        True

        >>> system = {"role": "system", "content": "Be brief."}
        >>> tw.Task([system, {"role": "user", "content": "Hi"}], info={"level": 2}).info
        {'level': 2}
    """

    messages: tuple[Message, ...] = ()
    """Opening conversation; a string becomes one user message. An environment may replace it."""
    answer: Any = None
    """Reference answer for rewards; the model never receives it."""
    id: str = ""
    """Permanent name of the row; by default derived from the content, so equal rows are equal
    tasks."""
    images: tuple[ImageRef | Image, ...] = ()
    """Images for the environment; the model receives only those in `messages`."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """All other columns of the row, and its `id` and `env`."""
    env: str = ""
    """Name of the environment for this row, in runs with several."""
    other_columns: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Columns of the row that `info` lacks: its media, those that a recipe maps, and empty ones,
    which are None."""
    is_text: bool = field(default=False, compare=False, repr=False)
    """Whether the prompt was one text; user code of other systems then gets it instead of a list of
    messages."""

    def __init__(
        self,
        messages: Messages | None = None,
        answer: Any = None,
        *,
        id: str = "",
        images: Sequence[Any] = (),
        info: Mapping[str, Any] | None = None,
        env: str = "",
        other_columns: Mapping[str, Any] | None = None,
        is_text: bool | None = None,
    ) -> None:
        if is_text is None:
            is_text = isinstance(messages, str)
        own_images = tuple(
            image if isinstance(image, (ImageRef, Image)) else Image(image) for image in images
        )

        set_field = object.__setattr__  # the dataclass is frozen
        set_field(self, "messages", as_messages(messages))
        set_field(self, "answer", answer)
        set_field(self, "images", own_images)
        set_field(self, "info", dict(info or {}))
        set_field(self, "env", env)
        set_field(self, "other_columns", dict(other_columns or {}))
        set_field(self, "is_text", is_text)
        set_field(self, "id", id or self._content_id())

    @property
    def columns(self) -> dict[str, Any]:
        """All columns of the row but its prompt, as user code of other systems gets them."""
        columns = {**self.other_columns, **self.info}
        if self.answer is not None:
            columns.setdefault("answer", self.answer)
        return columns

    def _content_id(self) -> str:
        messages = [message.to_dict() for message in self.messages]
        images = [image.to_dict()["image"] for image in self.images]
        content = [messages, self.answer, images, self.info, self.env]
        try:
            text = json.dumps(content, sort_keys=True, default=_stable_repr, ensure_ascii=False)
        except (TypeError, ValueError):  # unsortable keys, or a cyclic value
            text = _stable_repr(content)
        return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()

    def __hash__(self) -> int:
        return hash(self.id)


def is_json(value: Any) -> bool:
    """Whether a value is JSON data, so that it can be recorded and sent."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_json(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(is_json, value))
    return value is None or isinstance(value, (str, int, float, bool))


def _stable_repr(value: Any) -> str:
    """Return a repr without parts that differ between processes: addresses and the order of
    sets."""
    if isinstance(value, (set, frozenset)):
        return repr(sorted(map(_stable_repr, value)))
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


FAILED_ATTEMPT = "failed_attempt"
"""Untrained reason: ids were sampled in a failed attempt."""

Alternatives = Sequence[tuple[int, float]]
"""The most likely ids at one position with their logprobs, likeliest first."""
Slot = tuple[int, int]
"""Index of a span in `Trajectory.spans`, and offset of one of its ids."""


class Origin(StrEnum):
    """Origin of the ids of a span."""

    PROMPT = "prompt"
    TEMPLATE = "template"
    MODEL = "model"
    ENV = "env"


@dataclass(slots=True)
class Span:
    """A run of ids with one origin; a node in the trajectory's forest.

    A span holds only the ids it adds. It follows its `parent` from path position `start` on. If
    `start` is before the parent's end, the rest of the parent belongs to another branch.

    Example: a prompt of 5 ids, a reply of 3, and an observation of 4::

        >>> prompt = tw.Span(tw.Origin.PROMPT, ids=[10, 11, 12, 13, 14])
        >>> logprobs = [-0.5, -0.1, -0.2]
        >>> reply = tw.Span(
        ...     tw.Origin.MODEL, ids=[20, 21, 22], parent=0, start=5, logprobs=logprobs, version=0
        ... )
        >>> observation = tw.Span(tw.Origin.ENV, ids=[30, 31, 32, 33], parent=1, start=8)
        >>> [span.end for span in (prompt, reply, observation)], reply.mask
        ([5, 8, 12], [1, 1, 1])
    """

    origin: Origin
    ids: Sequence[int]
    """A tuple in recorded trajectories: unlike lists, the garbage collector does not track it."""
    parent: int = -1
    """Index of the preceding span, -1 for a root."""
    start: int = 0
    """Path position of the first id."""
    logprobs: Sequence[float | None] | None = None
    """Logprobs under the sampling distribution, one per id, in nats; None for spans that were not
    sampled."""
    version: int | None = None
    """Policy version that sampled the ids; None for spans that were not sampled."""
    media: tuple[MediaPlacement, ...] = ()
    """Blocks of images and videos among the ids, by offset; each is complete."""
    agent: str = "main"
    untrained: str | None = None
    """Why sampled ids get weight 0 (a failed attempt, a rewound tail); None if they are trained."""
    untrained_from: int = 0
    """First untrained offset; ids before it are trained."""
    sampling: SamplingDistribution | None = None
    """Distribution of `logprobs`; None for spans that were not sampled, and in records that do not
    store it."""
    cache_version: int | None = None
    """Oldest policy version whose weights computed a part of the cached context of these ids;
    None means `version`."""
    alternatives: Sequence[Alternatives] = ()
    """For each id the most likely ids at its position, under the sampling distribution, with
    logprobs of 7 digits; empty unless they were requested."""

    @property
    def end(self) -> int:
        """Path position after the last id."""
        return self.start + len(self.ids)

    @property
    def sampled(self) -> bool:
        """Whether a policy sampled these ids."""
        return self.origin is Origin.MODEL

    @property
    def trained(self) -> int:
        """Number of first ids that are trained."""
        if not self.sampled:
            return 0
        if self.untrained is None:
            return len(self.ids)
        return min(self.untrained_from, len(self.ids))

    @property
    def mask(self) -> list[int]:
        """1 per sampled id, 0 per other id."""
        return [1 if self.sampled else 0] * len(self.ids)

    def check(self) -> None:
        """Check that logprobs and version match the origin (invariant 3).

        Raises `ValueError` when logprobs are missing, too many, or set on a span that was not
        sampled.
        """
        if not self.sampled:
            if self.logprobs is not None or self.version is not None:
                raise ValueError(
                    f"a span of origin {self.origin} was not sampled and must have no logprobs and "
                    "no version"
                )
            return

        if self.logprobs is None or len(self.logprobs) != len(self.ids):
            have = "none" if self.logprobs is None else len(self.logprobs)
            raise ValueError(
                f"a sampled span needs one logprob per id: {len(self.ids)} ids, {have} logprobs"
            )
        if self.version is None:
            raise ValueError("a sampled span needs the policy version that sampled it")


@dataclass(slots=True)
class Turn:
    """One reply of the model and the environment's response.

    Example: the turn of the spans in the example of `Span`, whose reply is span 1::

        >>> question, answer = tw.Message("user", "6 * 7?"), tw.Message("assistant", "42")
        >>> turn = tw.Turn(
        ...     "main", prompt=0, context=5, spans=(1,), messages=(question,), reply=answer
        ... )
        >>> turn.message.text
        '42'
    """

    agent: str
    prompt: int
    """Index of the span that ends the context; the engine received the first `context` ids of
    `trajectory.path(prompt)`."""
    context: int
    """Number of ids the engine received."""
    spans: tuple[int, ...]
    """Indices of the reply's spans (several if a call was aborted and continued)."""
    messages: tuple[Message, ...]
    """Messages since the reply of the turn `parent`."""
    reply: Message
    parent: int = -1
    """Index of the turn whose conversation this one continues, -1 if it opens one."""
    finish: str = "stop"
    """`stop`, `length` or `abort`, as reported by the engine."""
    reward: float | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    retries: int = 0
    generate_s: float = 0.0
    """Seconds of the engine."""
    env_s: float = 0.0
    """Seconds of the environment's step."""
    cached: int = field(default=0, compare=False)
    """Context ids in the engine's cache; depends on other load, so it is not compared."""
    extras: dict[str, tuple[int, Any]] = field(default_factory=dict)
    """Per-token extras of an engine, as (first path position, array). `routes`: experts of the
    positions that this turn computed first.
    """
    inserted: str | None = None
    """Text the environment inserted after the reply of `parent`, inside one message with both
    replies; None if the reply begins a message.
    """
    kept: int | None = None
    """If the reply continues a message: number of remaining ids of the reply of `parent`."""
    grown: Message | None = None
    """If the reply continues a message: the complete message, from its first reply to the end of
    this one."""
    weights: tuple[float, ...] | None = None
    """Training weight of each sampled id, where an agent function set them (`Model.weigh`); None is
    1 for all."""

    @property
    def message(self) -> Message:
        """The assistant message that ends with the reply, inserted text included."""
        return self.reply if self.grown is None else self.grown


GroupKey = tuple[str, int, str]
"""Phase, step and task."""


@dataclass(frozen=True, slots=True)
class EpisodeKey:
    """Identifies one episode of a run and seeds it, independently of other episodes."""

    phase: str
    """`train`, or the name of an evaluation."""
    step: int
    task: str
    sample: int
    attempt: int = 0

    @property
    def session(self) -> str:
        """Name of the episode in requests to an engine."""
        return f"{self.phase}/{self.step}/{self.task}/{self.sample}/{self.attempt}"

    @property
    def group(self) -> GroupKey:
        """What the episodes of one group share."""
        return self.phase, self.step, self.task

    @property
    def metrics_step(self) -> int:
        """Step as metrics, displays and commands count: training steps from 1."""
        return self.step + (self.phase == "train")

    @property
    def label(self) -> str:
        """Name of the episode for people: `train 3 / TASK / 0`."""
        return f"{self.phase} {self.metrics_step} / {self.task} / {self.sample}"


class RowReward(NamedTuple):
    """Reward of one training row of an agent function."""

    reward: float
    turns: tuple[int, ...]
    """Numbers of the turns that the row trains."""


class RowUnit(NamedTuple):
    """Turns that are in the same rows of an agent function."""

    turns: list[int]
    reward: float
    """Mean reward of these rows."""


@dataclass(slots=True)
class Sample:
    """One training row: a root-to-leaf path of a trajectory.

    All lists have the length of `ids`. A sampled id shared by several paths has weight 1 only in
    the first of them.

    Example: one reply of one id per byte, and the id that ends it::

        >>> async def play(task, model):
        ...     reply = await model.generate(task.messages)
        ...     return float(reply.text == task.answer)
        >>> tasks = [tw.Task("6 * 7?", answer="42")]
        >>> (trajectory,) = tw.rollout(play, tasks, tw.ScriptedEngine(["42"]))
        >>> (sample,) = trajectory.samples()
        >>> sum(sample.mask), sample.mask[-4:], sample.weights[-4:], sample.reward
        (3, [0, 1, 1, 1], [0.0, 1.0, 1.0, 1.0], 1.0)
    """

    ids: list[int]
    mask: list[int]
    """1 for sampled ids."""
    weights: list[float]
    """1.0 for ids trained in this row, or the weight that an agent function gave them; else 0.0, as
    wherever mask is 0."""
    logprobs: list[float | None]
    """None for ids that were not sampled."""
    versions: list[int | None]
    reward: float | None
    """Reward of the trajectory; with rewards by row, that of its last trained reply."""
    trajectory: Trajectory
    token_rewards: list[float] | None = None
    """Reward by token, 0.0 elsewhere: a turn's at the last id of its reply, the episode's own at
    the last trained id.

    Like weights, they are only in the first row with the id, so they sum to the trajectory's reward
    over all rows. Ids that were not sampled have none. With rewards by row, each is at the last
    trained id of its row. None if the reward was not computed.
    """
    media: list[MediaPlacement] = field(default_factory=list)
    """Images and videos, by position in `ids`; each block is complete."""
    routes: ExpertRoutes | None = None
    """Experts of each position, [len(ids), layers, k], if the engine reported them. They are known
    once an id is computed, so the last id has none.
    """
    routes_mask: list[int] = field(default_factory=list)
    """1 where `routes` has a position's experts, 0 for padding; empty if there are none."""
    samplings: list[SamplingDistribution | None] = field(default_factory=list)
    """Distribution of each id's logprob; None for ids that were not sampled."""
    slots: list[Slot] = field(default_factory=list)
    """Where each id is in the trajectory."""

    @property
    def sampling(self) -> SamplingDistribution | None:
        """Distribution of all sampled ids; argument of `token_logprobs`.

        It has temperature, top-p, top-k and banned ids. None for records that do not store it.

        Raises `ValueError` when calls of one path used different distributions (an agent function's
        `temperature=`).
        """
        distributions = {
            distribution
            for distribution, is_sampled in zip(self.samplings, self.mask, strict=True)
            if is_sampled
        }
        if len(distributions) > 1:
            raise ValueError(
                f"the ids of this path were sampled from {len(distributions)} distributions; see "
                "Sample.samplings"
            )
        return next(iter(distributions), None)


@dataclass(slots=True)
class Trajectory:
    """The record of one episode: a forest of spans, its turns, reward and stop reason.

    Example::

        >>> async def play(task, model):
        ...     reply = await model.generate(task.messages)
        ...     return float(reply.text == task.answer)
        >>> tasks = [tw.Task("6 * 7?", answer="42")]
        >>> (trajectory,) = tw.rollout(play, tasks, tw.ScriptedEngine(["42"]))
        >>> trajectory.reward, trajectory.final_text
        (1.0, '42')

        The ids that the engine received for the first reply, and the rows for a trainer:

        >>> context = trajectory.prompt_ids(0)
        >>> [sample.ids[: len(context)] == context for sample in trajectory.samples()]
        [True]
    """

    task: Task
    key: EpisodeKey
    spans: list[Span] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    reward: float | None = None
    """None if it was not computed, never 0.0 instead."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward."""
    row_rewards: list[RowReward] = field(default_factory=list)
    """Rewards by row, where an agent function gave each row its own.

    `reward` is their mean, plus what applies to all rows.
    """
    agent_rewards: dict[str, float] = field(default_factory=dict)
    """Rewards by agent, where `Scores.agents` gave some; other agents have `reward`."""
    agent_groups: dict[str, str] = field(default_factory=dict)
    """Agents whose rewards are compared within the episode, with the name of their group
    (`Model.generate(group=...)`)."""
    stop: StopReason | None = None
    """None while the episode runs."""
    error: Failure | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    branches: dict[str, int] = field(default_factory=dict)
    """Number of history rewrites, by reason."""
    template: str = ""
    """Hash of the chat template."""
    wall_s: float = 0.0
    reward_s: float = 0.0
    """Seconds of computing the reward, without the group's."""
    final: tuple[Message, ...] = ()
    """Last observation; it has no reply and no ids."""
    failures: list[Failure] = field(default_factory=list)
    """Recovered failures, in order; the failure that ended the episode is `error`."""
    failed_turns: list[Turn] = field(default_factory=list)
    """Turns of failed attempts. Their spans are untrained roots in `spans`."""

    def __repr__(self) -> str:
        """Return one line; `show` prints the conversation."""
        parts = [
            f"task={self.task.id}",
            f"reward={self.reward}",
            f"turns={len(self.turns)}",
            f"tokens={self.sampled_tokens}",
        ]
        error = "" if self.error is None else f" {self.error!r}"
        return f"<Trajectory {' '.join(parts)} stop={self.stop}{error}>"

    def _repr_html_(self) -> str | None:
        return html_of(self)

    def show(self, limit: int = 2000) -> None:
        """Print the last turn's conversation, and the failure if there is one.

        Each message is cut after `limit` characters.
        """
        for line in self.describe(limit):
            print("".join(char if char.isprintable() else "\ufffd" for char in line))

    def describe(self, limit: int | None = None) -> Iterator[str]:
        """Yield the lines of `show`, control characters included.

        These are a head line, the failure, and the conversation; text of the environment within a
        reply has the role `inserted`.
        """
        reward = "not computed" if self.reward is None else f"{self.reward:g}"
        size = f"{len(self.turns)} turns  {self.sampled_tokens} tokens"
        yield f"task {self.task.id}  reward {reward}  {size}  {self.stop or 'running'}"

        error = self.error
        if error is not None:
            place = f" ({error.place})" if error.place else ""
            yield f"  {error.type} in {error.phase}: {shortened(error.message)}{place}"

        for role, text in self._texts():
            if limit is not None and len(text) > limit:
                text = f"{text[:limit]} [{len(text) - limit} characters more]"
            label = role
            for line in text.splitlines() or [""]:
                yield f"  {label:>9} | {line}"
                label = ""

    def _texts(self) -> Iterator[tuple[str, str]]:
        """Yield role and text of each message of the last turn's conversation."""
        for number in self.turn_chain(len(self.turns) - 1):
            turn = self.turns[number]
            if turn.inserted is not None:
                truncation = ""
                parent = self.turns[turn.parent]
                sampled = sum(len(self.spans[index].ids) for index in parent.spans)
                if turn.kept is not None and turn.kept < sampled:
                    truncation = f"[{turn.kept} of {sampled} tokens kept] "
                yield "inserted", f"{truncation}{turn.inserted}"

            for message in (*turn.messages, turn.reply):
                text = message.text
                for call in message.tool_calls:
                    text += f" {call.name}({dict(call.arguments)})"
                yield message.role, text

    def fail_attempt(self) -> None:
        """Mark everything so far as a failed attempt.

        It stays, untrained, and the episode starts over.
        """
        for span in self.spans:
            if span.sampled:
                span.untrained = FAILED_ATTEMPT
                span.untrained_from = 0
        self.failed_turns += self.turns
        self.turns = []
        self.metrics.clear()
        self.branches.clear()
        self.agent_groups.clear()

    @property
    def messages(self) -> list[Message]:
        """The conversation of the last turn, its reply included."""
        return self.conversation(len(self.turns) - 1)

    def conversation(self, turn: int) -> list[Message]:
        """Return all messages up to and including the reply of a turn; empty for -1."""
        messages: list[Message] = []
        for number in self.turn_chain(turn):
            current = self.turns[number]
            if current.inserted is not None:
                messages.pop()  # this turn's message includes it
            messages += [*current.messages, current.message]
        return messages

    def turn_chain(self, turn: int) -> list[int]:
        """Return the turns of a turn's conversation, in order, itself included; empty for -1."""
        turns: list[int] = []
        while turn >= 0:
            turns.append(turn)
            turn = self.turns[turn].parent
        return turns[::-1]

    def turn_of_span(self) -> dict[int, int]:
        """Return the index of the turn whose reply each sampled span is part of."""
        return {span: number for number, turn in enumerate(self.turns) for span in turn.spans}

    def reply_start(self, turn: int) -> int:
        """Return the path position of the first id of a turn's assistant message."""
        while self.turns[turn].inserted is not None:
            turn = self.turns[turn].parent
        return self.turns[turn].context

    @property
    def final_text(self) -> str:
        """Text of the last reply, empty before the first."""
        return self.turns[-1].reply.text if self.turns else ""

    @property
    def sampled_tokens(self) -> int:
        """Number of sampled ids, on all branches."""
        return sum(len(span.ids) for span in self.spans if span.origin is Origin.MODEL)

    @property
    def observed_tokens(self) -> int:
        """Number of ids that were neither sampled nor part of an opening prompt."""
        return sum(
            len(span.ids) for span in self.spans if span.origin in (Origin.ENV, Origin.TEMPLATE)
        )

    def chain(self, leaf: int) -> list[tuple[int, int]]:
        """Return the spans on the path to the end of the span `leaf`, root first.

        Each is (index of the span, number of its ids on the path). Empty for -1.
        """
        links: list[tuple[int, int]] = []
        index = leaf
        end = self.spans[leaf].end if leaf >= 0 else 0
        while index >= 0:
            span = self.spans[index]
            if span.start < end:
                links.append((index, end - span.start))
                end = span.start
            index = span.parent
        links.reverse()
        return links

    def path(self, leaf: int) -> list[int]:
        """Return the ids from the root to the end of a span."""
        ids: list[int] = []
        for index, used in self.chain(leaf):
            ids.extend(self.spans[index].ids[:used])
        return ids

    def media_placements(self, leaf: int) -> list[MediaPlacement]:
        """Return the placements of media on the path to the end of a span."""
        return [
            block.shifted(self.spans[index].start)
            for index, used in self.chain(leaf)
            for block in placements_between(self.spans[index].media, 0, used)
        ]

    def prompt_ids(self, turn: int) -> list[int]:
        """Return the ids that the engine received for a turn (invariant 2)."""
        return self.path(self.turns[turn].prompt)[: self.turns[turn].context]

    def leaves(self) -> list[int]:
        """Return the indices of the spans whose end no other span continues, in order."""
        continued = {
            span.parent
            for span in self.spans
            if span.parent >= 0 and span.start == self.spans[span.parent].end
        }
        return [index for index in range(len(self.spans)) if index not in continued]

    def samples(self) -> Iterator[Sample]:
        """Yield one row per leaf; every sampled id is trained in exactly one row (invariant 1).

        A path without sampled ids has no row.
        """
        routes = SpanRoutes(self)
        weights_by_span = self.turn_weights()
        rewards_by_span = self._row_rewards_by_span()
        token_rewards = self._token_rewards()

        earlier_ids = [0] * len(self.spans)  # number of first ids of each span in earlier rows
        for leaf in self.leaves():
            row = Sample(
                ids=[],
                mask=[],
                weights=[],
                logprobs=[],
                versions=[],
                reward=self.reward,
                trajectory=self,
                token_rewards=None if token_rewards is None else [],
            )
            links = self.chain(leaf)
            for index, used in links:
                span = self.spans[index]
                _append_span(row, index, span, used)

                # The row trains the ids from `first` to `last`: earlier rows have those before,
                # and those after are not trained at all.
                first = min(earlier_ids[index], used)
                last = max(first, min(used, span.trained))
                earlier_ids[index] = max(earlier_ids[index], used)

                trained: Sequence[float] = [1.0] * (last - first)
                if index in weights_by_span:
                    trained = weights_by_span[index][first:last]
                row.weights += [*[0.0] * first, *trained, *[0.0] * (used - last)]

                if last > first:
                    row.reward = rewards_by_span.get(index, row.reward)
                if token_rewards is not None and row.token_rewards is not None:
                    span_position = len(row.token_rewards)
                    row.token_rewards += [0.0] * used
                    for offset, reward in token_rewards.get(index, {}).items():
                        if first <= offset < used:
                            row.token_rewards[span_position + offset] = reward

            if any(row.mask):
                row.routes, row.routes_mask = routes.for_chain(links) or (None, [])
                yield row

    def turn_weights(self) -> dict[int, tuple[float, ...]]:
        """Return the weights that an agent function gave sampled ids, by index of the span."""
        weights_by_span: dict[int, tuple[float, ...]] = {}
        for turn in self.turns:
            if turn.weights is None:
                continue
            offset = 0
            for index in turn.spans:
                size = len(self.spans[index].ids)
                weights_by_span[index] = turn.weights[offset : offset + size]
                offset += size
        return weights_by_span

    def row_units(self) -> list[RowUnit]:
        """Return the turns that are in the same rows, together; empty without rewards by row.

        A row without turns is a unit of its own, after the others.
        """
        if not self.row_rewards or self.reward is None:
            return []
        added = self._added_to_rows()

        units: dict[tuple[int, ...], RowUnit] = {}
        for turn in range(len(self.turns)):
            rows = tuple(number for number, row in enumerate(self.row_rewards) if turn in row.turns)
            if not rows:
                continue
            if rows not in units:
                mean = math.fsum(self.row_rewards[number].reward for number in rows) / len(rows)
                units[rows] = RowUnit([], added + mean)
            units[rows].turns.append(turn)

        without_turns = [
            RowUnit([], added + row.reward) for row in self.row_rewards if not row.turns
        ]
        return [*units.values(), *without_turns]

    def _row_rewards_by_span(self) -> dict[int, float]:
        rewards: dict[int, float] = {}
        for unit in self.row_units():
            for turn in unit.turns:
                for span in self.turns[turn].spans:
                    rewards[span] = unit.reward
        return rewards

    def _added_to_rows(self) -> float:
        """Return what the episode's reward has beyond the mean of its rows'."""
        mean = math.fsum(row.reward for row in self.row_rewards) / len(self.row_rewards)
        return (self.reward or 0.0) - mean

    def _token_rewards(self) -> dict[int, dict[int, float]] | None:
        """Return rewards by span and offset of an id; None if the reward was not computed."""
        if self.reward is None:
            return None

        if self.row_rewards:
            rewards = self._rewards_at_row_ends()
        else:
            rewards = self._rewards_at_turn_ends(self.reward)

        by_span: dict[int, dict[int, float]] = {}
        for (span, offset), reward in rewards.items():
            by_span.setdefault(span, {})[offset] = reward
        return by_span

    def _rewards_at_row_ends(self) -> dict[Slot, float]:
        """Return each row's reward at the last trained id of its turns."""
        rewards: dict[Slot, float] = {}
        for row in self.row_rewards:
            last_trained: Slot | None = None
            for turn in row.turns:
                for index in self.turns[turn].spans:
                    trained = self.spans[index].trained
                    if trained:
                        last_trained = index, trained - 1
            if last_trained is not None:
                before = rewards.get(last_trained, 0.0)
                rewards[last_trained] = before + row.reward + self._added_to_rows()
        return rewards

    def _rewards_at_turn_ends(self, reward: float) -> dict[Slot, float]:
        """Return each turn's reward at its last id, and the rest at the last trained id.

        A turn's last id is that of its reply. The rest is what the episode's reward has beyond the
        rewards of its turns.
        """
        rewards: dict[Slot, float] = {}
        last_sampled: Slot | None = None
        last_trained: Slot | None = None
        for turn in self.turns:
            sampled = [index for index in turn.spans if self.spans[index].ids]
            if not sampled:
                continue
            last_sampled = sampled[-1], len(self.spans[sampled[-1]].ids) - 1
            rewards[last_sampled] = rewards.get(last_sampled, 0.0) + (turn.reward or 0.0)
            for index in sampled:
                trained = self.spans[index].trained
                if trained:
                    last_trained = index, trained - 1

        remainder = reward - sum(rewards.values())
        end = last_trained or last_sampled  # an episode of which nothing is trained has a reward
        if remainder and end is not None:
            rewards[end] = rewards.get(end, 0.0) + remainder
        return rewards


def _append_span(row: Sample, index: int, span: Span, used: int) -> None:
    """Append the first `used` ids of a span to a row, without weights and rewards.

    Those depend on the rows before.
    """
    if span.media:
        position = len(row.ids)
        row.media += [block.shifted(position) for block in placements_between(span.media, 0, used)]
    row.ids.extend(span.ids[:used])
    row.slots.extend(zip(repeat(index), range(used), strict=False))
    row.mask.extend([int(span.sampled)] * used)
    row.logprobs.extend([None] * used if span.logprobs is None else span.logprobs[:used])
    row.versions.extend([span.version] * used)
    row.samplings.extend([span.sampling] * used)


@dataclass(slots=True)
class Group:
    """The trajectories of one task at one step: the unit of advantage."""

    task: Task
    trajectories: list[Trajectory]

    @property
    def rewards(self) -> list[float | None]:
        """One reward per trajectory, None where it was not computed."""
        return [trajectory.reward for trajectory in self.trajectories]

    def _repr_html_(self) -> str | None:
        return html_of(self)


@dataclass(frozen=True, slots=True)
class _RoutesOfSpan:
    data: bytearray
    """Routes of the span's positions, concatenated; zeros where none were reported."""
    reported: bytearray
    """1 for each reported position, else 0."""


class SpanRoutes:
    """Routes of a trajectory by span, so that branches share those of their trunk.

    The first report of a position wins: later ids were sampled with it.
    """

    def __init__(self, trajectory: Trajectory) -> None:
        self._trajectory = trajectory
        self._by_span: dict[int, _RoutesOfSpan] = {}
        self._sizes: tuple[int, int, int] | None = None
        """Layers, k, width."""

        reporting_turns = [
            turn
            for turn in (*trajectory.failed_turns, *trajectory.turns)
            if ROUTES in turn.extras and (turn.spans or turn.prompt >= 0)
        ]
        reports = [ExpertRoutes.of(turn.extras[ROUTES][1]) for turn in reporting_turns]
        any_wide = any(report.width == 2 for report in reports)

        for turn, report in zip(reporting_turns, reports, strict=True):
            start, _ = turn.extras[ROUTES]
            leaf = turn.spans[-1] if turn.spans else turn.prompt
            self._add(leaf, start, report.as_uint16() if any_wide else report)

    def __bool__(self) -> bool:
        return bool(self._by_span)

    def _add(self, leaf: int, start: int, routes: ExpertRoutes) -> None:
        """Add the routes of path positions from `start` on, on the path to the end of `leaf`."""
        sizes = routes.layers, routes.k, routes.width
        if self._sizes not in (None, sizes):
            shape = f"{routes.layers} x {routes.k}"
            raise ValueError(
                f"{self._trajectory.key}: routes of {shape} and other shapes in one trajectory"
            )
        self._sizes = sizes

        position_bytes = routes.bytes_per_position
        end = start + len(routes)
        for index, used in self._trajectory.chain(leaf):
            span = self._trajectory.spans[index]
            low = max(start, span.start) - span.start
            high = min(end, span.start + used) - span.start
            if low >= high:
                continue

            if index not in self._by_span:
                size = len(span.ids)
                self._by_span[index] = _RoutesOfSpan(
                    data=bytearray(size * position_bytes), reported=bytearray(size)
                )
            span_routes = self._by_span[index]
            report_offset = span.start - start  # of the span's first id, among the new routes
            for first, last in _unreported_runs(span_routes.reported, low, high):
                source_start = (report_offset + first) * position_bytes
                source_end = (report_offset + last) * position_bytes
                target = slice(first * position_bytes, last * position_bytes)
                span_routes.data[target] = routes.data[source_start:source_end]
            span_routes.reported[low:high] = b"\1" * (high - low)

    def for_chain(self, links: Sequence[tuple[int, int]]) -> tuple[ExpertRoutes, list[int]] | None:
        """Return the routes of a chain of spans, and 1 for each reported position.

        The routes of other positions are zeros. None if the trajectory has no routes.
        """
        if self._sizes is None:
            return None
        layers, k, width = self._sizes
        position_bytes = layers * k * width

        data = bytearray()
        reported = bytearray()
        for index, used in links:
            if index in self._by_span:
                data += self._by_span[index].data[: used * position_bytes]
                reported += self._by_span[index].reported[:used]
            else:
                data += bytes(used * position_bytes)
                reported += bytes(used)
        return ExpertRoutes(bytes(data), layers, k, width), list(reported)


def _unreported_runs(reported: bytearray, low: int, high: int) -> Iterable[tuple[int, int]]:
    """Yield (begin, end) of each run of zeros between two offsets."""
    while low < high:
        begin = reported.find(0, low, high)
        if begin < 0:
            return
        end = reported.find(1, begin, high)
        low = high if end < 0 else end
        yield begin, low
