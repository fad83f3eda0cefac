"""Tasks, trajectories and their spans, turns and training rows."""

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
from turnwright.types.outcomes import Failure, StopReason, shortened
from turnwright.types.sampling import SamplingDistribution


@dataclass(frozen=True, slots=True)
class Task:
    """One immutable row of a dataset: the conversation to start from, and the expected answer.

    Example::

        Task("What is 6 * 7?", answer="42") Task([{"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"}], info={"level": 2})
    """

    messages: tuple[Message, ...] = ()
    """Opening conversation; a string becomes one user message. An environment may replace it."""
    answer: Any = None
    """Reference answer for rewards; the model never receives it."""
    id: str = ""
    """Permanent name of the row; by default derived from the content, so equal
    rows are equal tasks."""
    images: tuple[ImageRef | Image, ...] = ()
    """Images for the environment; the model receives only those in `messages`."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """All other columns of the row, and its `id` and `env`."""
    env: str = ""
    """Name of the environment for this row, in runs with several."""
    other_columns: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Columns of the row that `info` lacks: its media, those that a recipe maps, and empty
    ones, which are None."""
    is_text: bool = field(default=False, compare=False, repr=False)
    """Whether the prompt was one text, which user code of other systems gets as it is,
    not a list of messages."""

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
        set_field = object.__setattr__
        set_field(self, "messages", as_messages(messages))
        set_field(self, "answer", answer)
        set_field(
            self,
            "images",
            tuple(i if isinstance(i, (ImageRef, Image)) else Image(i) for i in images),
        )
        set_field(self, "info", dict(info or {}))
        set_field(self, "env", env)
        set_field(self, "other_columns", dict(other_columns or {}))
        set_field(self, "is_text", isinstance(messages, str) if is_text is None else is_text)
        set_field(self, "id", id or self._content_id())

    @property
    def columns(self) -> dict[str, Any]:
        """All columns of the row but its prompt, as rewards and environments of
        other systems get them."""
        columns = {**self.other_columns, **self.info}
        if self.answer is not None:
            columns.setdefault("answer", self.answer)
        return columns

    def _content_id(self) -> str:
        messages, images = (
            [m.to_dict() for m in self.messages],
            [i.to_dict()["image"] for i in self.images],
        )
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
    """Return a repr without parts that differ between processes: addresses
    and the order of sets."""
    if isinstance(value, (set, frozenset)):
        return repr(sorted(map(_stable_repr, value)))
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


FAILED_ATTEMPT = "failed_attempt"
"""Untrained reason: ids were sampled in a failed attempt."""


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

    Example: a prompt of 5 ids, a reply of 3, an observation of 4::

        Span(Origin.PROMPT, ids=[...5], parent=-1, start=0)
        Span(Origin.MODEL, ids=[...3], parent=0, start=5, logprobs=[...3], version=0)
        Span(Origin.ENV, ids=[...4], parent=1, start=8)
    """

    origin: Origin
    ids: Sequence[int]
    """A tuple in recorded trajectories: unlike lists, the garbage collector does not track it."""
    parent: int = -1
    """Index of the preceding span, -1 for a root."""
    start: int = 0
    """Path position of the first id."""
    logprobs: Sequence[float | None] | None = None
    """Logprobs under the sampling distribution, one per id; None for spans
    that were not sampled."""
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
    """Distribution of `logprobs`; None for spans that were not sampled and in
    records of earlier versions."""
    cache_version: int | None = None
    """Oldest policy version whose weights computed a part of the cached context of these ids;
    None means `version`."""

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
        return len(self.ids) if self.untrained is None else min(self.untrained_from, len(self.ids))

    @property
    def mask(self) -> list[int]:
        """1 per sampled id, 0 per other id."""
        return [1 if self.sampled else 0] * len(self.ids)

    def check(self) -> None:
        """Check that logprobs and version match the origin (invariant 3).

        Raises `ValueError` when logprobs are missing, too many, or set on a
        span that was not sampled.
        """
        if self.sampled:
            if self.logprobs is None or len(self.logprobs) != len(self.ids):
                have = "none" if self.logprobs is None else len(self.logprobs)
                raise ValueError(
                    f"a sampled span needs one logprob per id: {len(self.ids)} ids, {have} logprobs"
                )
            if self.version is None:
                raise ValueError("a sampled span needs the policy version that sampled it")
        elif self.logprobs is not None or self.version is not None:
            raise ValueError(
                f"a span of origin {self.origin} was not sampled and must have no logprobs and no "
                "version"
            )


@dataclass(slots=True)
class Turn:
    """One reply of the model and the environment's response."""

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
    env_s: float = 0.0
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
    """If the reply continues a message: the complete message, from its first reply
    to the end of this one."""
    weights: tuple[float, ...] | None = None
    """Training weight of each sampled id, where an agent function set them
    (`Model.weigh`); None is 1 for all."""

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


class RowReward(NamedTuple):
    """Reward of one training row of an agent function."""

    reward: float
    turns: tuple[int, ...]
    """Numbers of the turns that the row trains."""


@dataclass(slots=True)
class Sample:
    """One training row: a root-to-leaf path of a trajectory.

    All lists have the length of `ids`. A sampled id shared by several paths has weight 1
    only in the first of them.
    """

    ids: list[int]
    mask: list[int]
    """1 for sampled ids."""
    weights: list[float]
    """1.0 for ids trained in this row, or the weight that an agent function gave them; else
    0.0, as wherever mask is 0."""
    logprobs: list[float | None]
    """None for ids that were not sampled."""
    versions: list[int | None]
    reward: float | None
    """Reward of the trajectory; with rewards by row, that of its last trained reply."""
    trajectory: Trajectory
    token_rewards: list[float] | None = None
    """Reward by token, 0.0 elsewhere: a turn's at the last id of its reply, the episode's
    own at the last trained id.

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
    slots: list[tuple[int, int]] = field(default_factory=list)
    """Index of each id's span in `trajectory.spans`, and its offset in the span."""

    @property
    def sampling(self) -> SamplingDistribution | None:
        """Distribution of all sampled ids: temperature, top-p, top-k and banned ids;
        argument of `token_logprobs`.

        None for records of versions that did not store it.

        Raises `ValueError` when calls of one path used different distributions (an agent
        function's `temperature=`).
        """
        distributions = {
            one for one, sampled in zip(self.samplings, self.mask, strict=True) if sampled
        }
        if len(distributions) > 1:
            raise ValueError(
                f"the ids of this path were sampled from {len(distributions)} distributions; see "
                "Sample.samplings"
            )
        return next(iter(distributions), None)


@dataclass(slots=True)
class Trajectory:
    """The record of one episode: a forest of spans, its turns, reward and stop reason."""

    task: Task
    key: EpisodeKey
    spans: list[Span] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    reward: float | None = None
    """None if it was not computed, never 0.0 instead."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward."""
    row_rewards: list[RowReward] = field(default_factory=list)
    """Rewards by row, where an agent function gave each row its own; `reward` is their mean, plus
    what applies to all rows."""
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

    def show(self, limit: int = 2000) -> None:
        """Print the last turn's conversation, and the failure if there is one; cut each message
        after `limit` characters."""
        for line in self.describe(limit):
            print("".join(one if one.isprintable() else "\ufffd" for one in line))

    def describe(self, limit: int | None = None) -> Iterator[str]:
        """Yield the lines of `show`, control characters included: a head line, the failure, and the
        conversation; text of the environment within a reply is `inserted`."""
        reward = "not computed" if self.reward is None else f"{self.reward:g}"
        size = f"{len(self.turns)} turns  {self.sampled_tokens} tokens"
        yield f"task {self.task.id}  reward {reward}  {size}  {self.stop or 'running'}"
        if (error := self.error) is not None:
            yield (
                f"  {error.type} in {error.phase}: "
                f"{shortened(error.message)}{error.place and f' ({error.place})'}"
            )
        for role, text in self._spoken():
            cut = (
                text
                if limit is None or len(text) <= limit
                else f"{text[:limit]} [{len(text) - limit} characters more]"
            )
            for index, line in enumerate(cut.splitlines() or [""]):
                yield f"  {role if index == 0 else '':>9} | {line}"

    def _spoken(self) -> Iterator[tuple[str, str]]:
        for number in self.turn_chain(len(self.turns) - 1):
            turn = self.turns[number]
            if turn.inserted is not None:
                total = sum(len(self.spans[index].ids) for index in self.turns[turn.parent].spans)
                truncation = (
                    f"[{turn.kept} of {total} tokens kept] "
                    if turn.kept is not None and turn.kept < total
                    else ""
                )
                yield "inserted", f"{truncation}{turn.inserted}"
            for message in (*turn.messages, turn.reply):
                calls = "".join(
                    f" {call.name}({dict(call.arguments)})" for call in message.tool_calls
                )
                yield message.role, message.text + calls

    def fail_attempt(self) -> None:
        """Mark everything so far as a failed attempt: it stays, untrained, and
        the episode starts over."""
        for span in self.spans:
            if span.sampled:
                span.untrained, span.untrained_from = FAILED_ATTEMPT, 0
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
            row = self.turns[number]
            if row.inserted is not None:
                messages.pop()  # this turn's message includes it
            messages += [*row.messages, row.message]
        return messages

    def turn_chain(self, turn: int) -> list[int]:
        """Return the turns of a turn's conversation, in order, itself included; empty for -1."""
        turns: list[int] = []
        while turn >= 0:
            turns.append(turn)
            turn = self.turns[turn].parent
        return turns[::-1]

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
        """Return the spans on the path to the end of `leaf`, root first, as (span index, number of
        its ids on the path)."""
        links: list[tuple[int, int]] = []
        index, end = leaf, self.spans[leaf].end if leaf >= 0 else 0
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
        used_before = [0] * len(self.spans)  # number of first ids of each span in earlier rows
        token_rewards, routes, given = self._token_rewards(), SpanRoutes(self), self.turn_weights()
        own = {
            span: reward
            for turns, reward in self.row_units()
            for turn in turns
            for span in self.turns[turn].spans
        }
        for leaf in self.leaves():
            row, links = (
                Sample(
                    [], [], [], [], [], self.reward, self, None if token_rewards is None else []
                ),
                self.chain(leaf),
            )
            for index, used in links:
                span = self.spans[index]
                if span.media:
                    row.media += [
                        block.shifted(len(row.ids))
                        for block in placements_between(span.media, 0, used)
                    ]
                row.ids.extend(span.ids[:used])
                row.slots.extend(zip(repeat(index), range(used), strict=False))
                row.mask.extend([int(span.sampled)] * used)
                row.logprobs.extend(
                    span.logprobs[:used] if span.logprobs is not None else [None] * used
                )
                row.versions.extend([span.version] * used)
                row.samplings.extend([span.sampling] * used)
                old = min(used_before[index], used)
                new = max(old, min(used, span.trained))
                weights = given[index][old:new] if index in given else [1.0] * (new - old)
                row.weights += [*[0.0] * old, *weights, *[0.0] * (used - new)]
                if new > old:
                    row.reward = own.get(index, row.reward)
                if token_rewards is not None and row.token_rewards is not None:
                    first = len(row.token_rewards)
                    row.token_rewards += [0.0] * used
                    for offset, reward in token_rewards.get(index, {}).items():
                        if old <= offset < used:
                            row.token_rewards[first + offset] = reward
                used_before[index] = max(used_before[index], used)
            if any(row.mask):
                row.routes, row.routes_mask = routes.for_chain(links) or (None, [])
                yield row

    def turn_weights(self) -> dict[int, tuple[float, ...]]:
        """Return the weights that an agent function gave sampled ids, by index of the span."""
        found: dict[int, tuple[float, ...]] = {}
        for turn in self.turns:
            rest = turn.weights
            if rest is not None:
                for index in turn.spans:
                    size = len(self.spans[index].ids)
                    found[index], rest = rest[:size], rest[size:]
        return found

    def row_units(self) -> list[tuple[list[int], float]]:
        """Return turns that are in the same rows, with the mean reward of those rows, and no turns
        for a row without; empty without rewards by row."""
        if not self.row_rewards or self.reward is None:
            return []
        added = self._added_to_rows()
        found: dict[tuple[int, ...], tuple[list[int], float]] = {}
        for number in range(len(self.turns)):
            rows = [at for at, row in enumerate(self.row_rewards) if number in row.turns]
            if rows:
                mean = math.fsum(self.row_rewards[at].reward for at in rows) / len(rows)
                found.setdefault(tuple(rows), ([], added + mean))[0].append(number)
        empty: list[tuple[list[int], float]] = [
            ([], added + row.reward) for row in self.row_rewards if not row.turns
        ]
        return [*found.values(), *empty]

    def _added_to_rows(self) -> float:
        """Return what the episode's reward has beyond the mean of its rows'."""
        return (self.reward or 0.0) - math.fsum(row.reward for row in self.row_rewards) / len(
            self.row_rewards
        )

    def _token_rewards(self) -> dict[int, dict[int, float]] | None:
        """Return rewards by span and offset of a sampled id; None if the
        reward was not computed."""
        if self.reward is None:
            return None
        token_rewards: dict[tuple[int, int], float] = {}
        last: tuple[int, int] | None = None
        for row in self.row_rewards:
            ids = [
                (span, self.spans[span].trained)
                for turn in row.turns
                for span in self.turns[turn].spans
            ]
            if trained := [(span, size - 1) for span, size in ids if size]:
                token_rewards[trained[-1]] = (
                    token_rewards.get(trained[-1], 0.0) + row.reward + self._added_to_rows()
                )
        for turn in () if self.row_rewards else self.turns:
            spans = [(index, self.spans[index]) for index in turn.spans if self.spans[index].ids]
            if not spans:
                continue
            end = spans[-1][0], len(spans[-1][1].ids) - 1
            token_rewards[end] = token_rewards.get(end, 0.0) + (turn.reward or 0.0)
            last = next(
                ((index, span.trained - 1) for index, span in reversed(spans) if span.trained), last
            )
        remainder = self.reward - sum(token_rewards.values())
        if token_rewards and remainder and not self.row_rewards:
            last = last or end
            token_rewards[last] = token_rewards.get(last, 0.0) + remainder
        by_span: dict[int, dict[int, float]] = {}
        for (span, offset), value in token_rewards.items():
            by_span.setdefault(span, {})[offset] = value
        return by_span


@dataclass(slots=True)
class Group:
    """The trajectories of one task at one step: the unit of advantage."""

    task: Task
    trajectories: list[Trajectory]

    @property
    def rewards(self) -> list[float | None]:
        """One reward per trajectory, None where it was not computed."""
        return [trajectory.reward for trajectory in self.trajectories]


ReportedRoutes = dict[int, tuple[bytearray, bytearray]]
"""By span: the routes of its positions, concatenated, and 1 for each reported position."""


class SpanRoutes:
    """Routes of a trajectory by span, so that branches share those of their trunk.

    The first report of a position wins: later ids were sampled with it.
    """

    def __init__(self, trajectory: Trajectory) -> None:
        self._reported: ReportedRoutes = {}
        self._sizes: tuple[int, int, int] | None = None
        """Layers, k, width."""
        self._trajectory = trajectory
        turn_routes = [
            (turn, *turn.extras[ROUTES])
            for turn in (*trajectory.failed_turns, *trajectory.turns)
            if ROUTES in turn.extras and (turn.spans or turn.prompt >= 0)
        ]
        any_wide = any(ExpertRoutes.of(routes).width == 2 for _, _, routes in turn_routes)
        for turn, start, routes in turn_routes:
            known = ExpertRoutes.of(routes)
            self._add(
                turn.spans[-1] if turn.spans else turn.prompt,
                start,
                known.as_uint16() if any_wide else known,
            )

    def __bool__(self) -> bool:
        return bool(self._reported)

    def _add(self, leaf: int, start: int, routes: ExpertRoutes) -> None:
        sizes = routes.layers, routes.k, routes.width
        if self._sizes not in (None, sizes):
            shape = f"{routes.layers} x {routes.k}"
            raise ValueError(
                f"{self._trajectory.key}: routes of {shape} and other shapes in one trajectory"
            )
        self._sizes = sizes
        per_position, end = routes.bytes_per_position, start + len(routes)
        for index, used in self._trajectory.chain(leaf):
            span = self._trajectory.spans[index]
            first, last = max(start, span.start), min(end, span.start + used)
            if first >= last:
                continue
            if index not in self._reported:
                self._reported[index] = (
                    bytearray(len(span.ids) * per_position),
                    bytearray(len(span.ids)),
                )
            data, known = self._reported[index]
            low, high = first - span.start, last - span.start
            for at in _runs(known, low, high):
                source = (at[0] + span.start - start) * per_position
                reported = routes.data[source : source + (at[1] - at[0]) * per_position]
                data[at[0] * per_position : at[1] * per_position] = reported
            known[low:high] = b"\1" * (high - low)

    def for_chain(self, links: Sequence[tuple[int, int]]) -> tuple[ExpertRoutes, list[int]] | None:
        """Return the routes of a chain of spans, zeros where none were reported, and 1
        for each reported position.

        None if the trajectory has no routes.
        """
        if self._sizes is None:
            return None
        layers, k, width = self._sizes
        data, known = bytearray(), bytearray()
        for index, used in links:
            reported = self._reported.get(index)
            data += (
                bytes(used * layers * k * width)
                if reported is None
                else reported[0][: used * layers * k * width]
            )
            known += bytes(used) if reported is None else reported[1][:used]
        return ExpertRoutes(bytes(data), layers, k, width), list(known)


def _runs(known: bytearray, low: int, high: int) -> Iterable[tuple[int, int]]:
    """Yield (begin, end) of runs of unreported positions."""
    while low < high:
        begin = known.find(0, low, high)
        if begin < 0:
            return
        end = known.find(1, begin, high)
        low = high if end < 0 else end
        yield begin, low
