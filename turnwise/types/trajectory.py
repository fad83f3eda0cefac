"""Task, Trajectory, Span, Turn, Sample, Group, EpisodeKey."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any

from turnwise.types.expert_routing import ExpertRoutes, SpanRoutes
from turnwise.types.media import Image, ImageRef, MediaPlacement, placements_between
from turnwise.types.messages import Message, Messages, as_messages
from turnwise.types.outcomes import Failure, StopReason
from turnwise.types.renamed import Renamed
from turnwise.types.sampling import SamplingDistribution


@dataclass(frozen=True, slots=True)
class Task:
    """One immutable row of a dataset: what to do, and what the right answer is.

    Example::

        Task("What is 6 * 7?", answer="42")
        Task([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], info={"level": 2})
    """

    messages: tuple[Message, ...] = ()
    """The conversation so far; a string becomes one user message. An environment may put its own in place."""
    answer: Any = None
    """What a reward compares with; the model never sees it."""
    id: str = ""
    """Names the row for good; derived from the content when not given, so equal rows are equal tasks."""
    images: tuple[ImageRef | Image, ...] = ()
    """For the environment; what the model is shown stands in `messages`."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Every other column of the row."""
    env: str = ""
    """Name of the environment that this row is for, where a run has several."""

    def __init__(
        self,
        messages: Messages | None = None,
        answer: Any = None,
        *,
        id: str = "",
        images: Sequence[Any] = (),
        info: Mapping[str, Any] | None = None,
        env: str = "",
    ) -> None:
        put = object.__setattr__
        put(self, "messages", as_messages(messages))
        put(self, "answer", answer)
        put(self, "images", tuple(i if isinstance(i, (ImageRef, Image)) else Image(i) for i in images))
        put(self, "info", dict(info or {}))
        put(self, "env", env)
        put(self, "id", id or self._content_id())

    def _content_id(self) -> str:
        content = [
            [m.to_dict() for m in self.messages],
            self.answer,
            [i.to_dict()["image"] for i in self.images],
            self.info,
            self.env,
        ]
        try:
            text = json.dumps(content, sort_keys=True, default=_name, ensure_ascii=False)
        except (TypeError, ValueError):  # keys that cannot be sorted, or a value that holds itself
            text = _name(content)
        return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()

    def __hash__(self) -> int:
        return hash(self.id)


def _name(value: Any) -> str:
    """A value's repr without what differs from process to process: addresses, and the order of sets."""
    if isinstance(value, (set, frozenset)):
        return repr(sorted(map(_name, value)))
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


FAILED_ATTEMPT = "failed_attempt"
"""Why ids are not trained that were sampled in an attempt that failed and was begun anew."""


class Origin(StrEnum):
    """Who wrote the ids of a span."""

    PROMPT = "prompt"
    TEMPLATE = "template"
    MODEL = "model"
    ENV = "env"


@dataclass(slots=True)
class Span:
    """A run of ids with one origin; a node of the trajectory's forest.

    A span holds only the ids that it adds. It follows its `parent` from the path position `start` on; where `start` is
    before the parent's end, the parent's tail belongs to another branch.

    Example: a prompt of 5 ids, a reply of 3, an observation of 4::

        Span(Origin.PROMPT, ids=[...5], parent=-1, start=0)
        Span(Origin.MODEL, ids=[...3], parent=0, start=5, logprobs=[...3], version=0)
        Span(Origin.ENV, ids=[...4], parent=1, start=8)
    """

    origin: Origin
    ids: Sequence[int]
    """A tuple in recorded trajectories: unlike lists, the collector of garbage lets them alone."""
    parent: int = -1
    """Index of the span that this one follows, -1 for a root."""
    start: int = 0
    """Position on the path of the first id."""
    logprobs: Sequence[float | None] | None = None
    """Of the distribution that was sampled from, one per id; None for spans that were not sampled."""
    version: int | None = None
    """Policy version that sampled it; None for spans that were not sampled."""
    media: tuple[MediaPlacement, ...] = ()
    """Blocks of images and videos among the ids, by offset; each is whole."""
    agent: str = "main"
    untrained: str | None = None
    """Why its sampled ids get weight 0 (a failed attempt, a rewound tail); None when they are trained."""
    untrained_from: int = 0
    """Where `untrained` begins: the ids before it are trained all the same."""
    sampling: SamplingDistribution | None = None
    """Distribution that `logprobs` belong to; None for spans that were not sampled and in records of earlier versions."""

    @property
    def end(self) -> int:
        """Path position behind the last id."""
        return self.start + len(self.ids)

    @property
    def sampled(self) -> bool:
        """Whether a policy sampled these ids."""
        return self.origin is Origin.MODEL

    @property
    def trained(self) -> int:
        """How many of its first ids are trained."""
        if not self.sampled:
            return 0
        return len(self.ids) if self.untrained is None else min(self.untrained_from, len(self.ids))

    @property
    def mask(self) -> list[int]:
        """1 per sampled id, 0 per id that was not."""
        return [1 if self.sampled else 0] * len(self.ids)

    def check(self) -> None:
        """Hold the span to invariant 3.

        Raises:
            ValueError: when logprobs are missing, too many, or stand on a span that was not sampled.
        """
        if self.sampled:
            if self.logprobs is None or len(self.logprobs) != len(self.ids):
                have = "none" if self.logprobs is None else len(self.logprobs)
                raise ValueError(f"a sampled span has one logprob per id: {len(self.ids)} ids, {have} logprobs")
            if self.version is None:
                raise ValueError("a sampled span carries the policy version that sampled it")
        elif self.logprobs is not None or self.version is not None:
            raise ValueError(f"a span of origin {self.origin} was not sampled and carries no logprobs and no version")


@dataclass(slots=True)
class Turn:
    """One reply of a model and the answer of the world."""

    agent: str
    prompt: int
    """Index of the span that ends the context: the ids the engine received are `trajectory.path(prompt)` cut at `context`."""
    context: int
    """Number of ids the engine received."""
    spans: tuple[int, ...]
    """Indices of the model spans of the reply (several where a call was aborted and continued)."""
    messages: tuple[Message, ...]
    """What was said since the reply of the turn `parent`."""
    reply: Message
    parent: int = -1
    """Index of the turn whose conversation this one continues, -1 where it opens one."""
    finish: str = "stop"
    """`stop`, `length` or `abort`, as the engine said."""
    reward: float | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    retries: int = 0
    generate_s: float = 0.0
    env_s: float = 0.0
    cached: int = field(default=0, compare=False)
    """Ids of the context that the engine had in its cache; depends on what else ran, so equal turns may differ in it."""
    extras: dict[str, tuple[int, Any]] = field(default_factory=dict)
    """What an engine adds per token, as (first path position, array): `routes` are the experts of each position that this turn
    fed first."""
    inserted: str | None = None
    """What the world wrote behind the reply of `parent`, inside the message that both replies are part of; None where the
    reply begins a message."""
    kept: int | None = None
    """Where the reply goes on inside a message: how many ids of the reply of `parent` are still in front of it."""
    grown: Message | None = None
    """Where the reply goes on inside a message: that whole message, from its first reply to the end of this one."""

    @property
    def message(self) -> Message:
        """The assistant message that ends with the reply; what the world wrote inside it is a part of it."""
        return self.reply if self.grown is None else self.grown


@dataclass(frozen=True, slots=True)
class EpisodeKey:
    """Names one episode of a run: the same key has the same noise, whatever else runs."""

    phase: str
    """train, or the name of an evaluation."""
    step: int
    task: str
    sample: int
    attempt: int = 0


@dataclass(slots=True)
class Sample:
    """One row for trainers that know no trees: a root-to-leaf path of a trajectory.

    All lists have the length of `ids`. A sampled id that several paths share has weight 1 in the first of them alone.
    """

    ids: list[int]
    mask: list[int]
    """1 where the id was sampled."""
    weights: list[float]
    """1.0 where the id is trained in this row, else 0.0; 0.0 wherever mask is 0."""
    logprobs: list[float | None]
    """None where the id was not sampled."""
    versions: list[int | None]
    reward: float | None
    trajectory: Trajectory
    token_rewards: list[float] | None = None
    """The reward by token, 0.0 elsewhere: a turn's at the last id of its reply, the episode's own at the last trained id.

    As weights are, they are in the first row alone that holds the id, so over all rows they sum to the trajectory's reward;
    an id that was not sampled has none. None when the reward was not computed.
    """
    media: list[MediaPlacement] = field(default_factory=list)
    """Images and videos, by position in `ids`; each block is whole."""
    routes: ExpertRoutes | None = None
    """The experts of each position, [len(ids), layers, k], where the engine told them; an id's are known once it was fed, so
    the last one has none."""
    routes_mask: list[int] = field(default_factory=list)
    """1 where `routes` holds a position's experts, 0 where it is filled up; empty where there are none at all."""
    samplings: list[SamplingDistribution | None] = field(default_factory=list)
    """Distribution that each id's logprob belongs to; None where the id was not sampled."""

    @property
    def sampling(self) -> SamplingDistribution | None:
        """Distribution of all sampled ids: temperature, top-p, top-k and banned ids. `token_logprobs` takes it.

        None where the record is of a version that did not keep it.

        Raises:
            ValueError: when calls of one path sampled from different distributions (a play function's `temperature=`).
        """
        found = {one for one, sampled in zip(self.samplings, self.mask, strict=True) if sampled}
        if len(found) > 1:
            raise ValueError(f"the ids of this path were sampled from {len(found)} distributions; see Sample.samplings")
        return next(iter(found), None)

    routed = Renamed("routes_mask")


@dataclass(slots=True)
class Trajectory:
    """The record of one episode: a forest of spans, its turns, reward, and why it stopped."""

    task: Task
    key: EpisodeKey
    spans: list[Span] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    reward: float | None = None
    """None when it was not computed; never 0.0 in its place."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Named components of the reward."""
    stop: StopReason | None = None
    """None while the episode runs."""
    error: Failure | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    branches: dict[str, int] = field(default_factory=dict)
    """How often history was rewritten, by reason code."""
    template: str = ""
    """Hash of the chat template that rendered it."""
    wall_s: float = 0.0
    reward_s: float = 0.0
    """Seconds that computing the reward took, that of the group not counted."""
    final: tuple[Message, ...] = ()
    """What the environment said last; nobody replied to it, so it has no ids."""
    failures: list[Failure] = field(default_factory=list)
    """What broke on the way and was recovered from, in order; what ended the episode is `error`."""
    failed_turns: list[Turn] = field(default_factory=list)
    """The turns of attempts that failed. Their spans are among `spans`, as roots of their own, untrained."""

    def fail_attempt(self) -> None:
        """All that was done so far is of an attempt that failed: it stays, untrained, and the episode begins anew."""
        for span in self.spans:
            if span.sampled:
                span.untrained, span.untrained_from = FAILED_ATTEMPT, 0
        self.failed_turns += self.turns
        self.turns = []
        self.metrics.clear()
        self.branches.clear()

    @property
    def messages(self) -> list[Message]:
        """The conversation of the last turn, its reply included."""
        return self.conversation(len(self.turns) - 1)

    def conversation(self, turn: int) -> list[Message]:
        """Every message up to and including the reply of a turn; empty for -1."""
        messages: list[Message] = []
        for number in self.turn_chain(turn):
            row = self.turns[number]
            if row.inserted is not None:
                messages.pop()  # its beginning, which this turn's message repeats
            messages += [*row.messages, row.message]
        return messages

    def turn_chain(self, turn: int) -> list[int]:
        """The turns of a turn's conversation, in order, itself included; empty for -1."""
        turns: list[int] = []
        while turn >= 0:
            turns.append(turn)
            turn = self.turns[turn].parent
        return turns[::-1]

    def reply_start(self, turn: int) -> int:
        """The path position where the assistant message of a turn's reply begins."""
        while self.turns[turn].inserted is not None:
            turn = self.turns[turn].parent
        return self.turns[turn].context

    @property
    def final_text(self) -> str:
        """The text of the last reply, empty before the first."""
        return self.turns[-1].reply.text if self.turns else ""

    @property
    def sampled_tokens(self) -> int:
        """How many ids were sampled, on every branch."""
        return sum(len(span.ids) for span in self.spans if span.sampled)

    @property
    def observed_tokens(self) -> int:
        """How many ids were neither sampled nor part of an opening prompt."""
        return sum(len(span.ids) for span in self.spans if span.origin in (Origin.ENV, Origin.TEMPLATE))

    def chain(self, leaf: int) -> list[tuple[int, int]]:
        """The spans on the path to the end of `leaf`, root first, as (span index, ids of it that are on the path)."""
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
        """The ids from the root to the end of a span."""
        ids: list[int] = []
        for index, used in self.chain(leaf):
            ids.extend(self.spans[index].ids[:used])
        return ids

    def media_placements(self, leaf: int) -> list[MediaPlacement]:
        """Where images and videos stand on the path to the end of a span."""
        return [
            block.shifted(self.spans[index].start)
            for index, used in self.chain(leaf)
            for block in placements_between(self.spans[index].media, 0, used)
        ]

    def prompt_ids(self, turn: int) -> list[int]:
        """The ids that the engine received for a turn (invariant 2)."""
        return self.path(self.turns[turn].prompt)[: self.turns[turn].context]

    def leaves(self) -> list[int]:
        """Indices of the spans whose end no other span continues, in order."""
        continued = {span.parent for span in self.spans if span.parent >= 0 and span.start == self.spans[span.parent].end}
        return [index for index in range(len(self.spans)) if index not in continued]

    def samples(self) -> Iterator[Sample]:
        """One row per leaf; every sampled id is trained in exactly one of them (invariant 1).

        Yields nothing for a path without sampled ids.
        """
        owned = [0] * len(self.spans)  # how many first ids of each span earlier rows hold
        due, told = self._rewards_due(), SpanRoutes(self)
        for leaf in self.leaves():
            row, links = Sample([], [], [], [], [], self.reward, self, None if due is None else []), self.chain(leaf)
            for index, used in links:
                span = self.spans[index]
                if span.media:
                    row.media += [block.shifted(len(row.ids)) for block in placements_between(span.media, 0, used)]
                row.ids.extend(span.ids[:used])
                row.mask.extend(span.mask[:used])
                row.logprobs.extend(span.logprobs[:used] if span.logprobs is not None else [None] * used)
                row.versions.extend([span.version] * used)
                row.samplings.extend([span.sampling] * used)
                old = min(owned[index], used)
                new = max(old, min(used, span.trained))
                row.weights += [0.0] * old + [1.0] * (new - old) + [0.0] * (used - new)
                if due is not None and row.token_rewards is not None:
                    row.token_rewards += [due.get((index, offset), 0.0) if offset >= old else 0.0 for offset in range(used)]
                owned[index] = max(owned[index], used)
            if any(row.mask):
                row.routes, row.routes_mask = told.for_chain(links) or (None, [])
                yield row

    def _rewards_due(self) -> dict[tuple[int, int], float] | None:
        """The reward by the sampled id where it stands, as (span, offset); None when it was not computed."""
        if self.reward is None:
            return None
        due: dict[tuple[int, int], float] = {}
        last: tuple[int, int] | None = None
        for turn in self.turns:
            said = [(index, self.spans[index]) for index in turn.spans if self.spans[index].ids]
            if not said:
                continue
            end = said[-1][0], len(said[-1][1].ids) - 1
            due[end] = due.get(end, 0.0) + (turn.reward or 0.0)
            last = next(((index, span.trained - 1) for index, span in reversed(said) if span.trained), last)
        own = self.reward - sum(due.values())
        if due and own:
            last = last or end
            due[last] = due.get(last, 0.0) + own
        return due

    received = Renamed("prompt_ids")
    begins = Renamed("reply_start")
    lineage = Renamed("turn_chain")
    placed = Renamed("media_placements")


@dataclass(slots=True)
class Group:
    """The trajectories of one task at one step: the unit of advantage."""

    task: Task
    trajectories: list[Trajectory]

    @property
    def rewards(self) -> list[float | None]:
        """One reward per trajectory, None where it was not computed."""
        return [trajectory.reward for trajectory in self.trajectories]
