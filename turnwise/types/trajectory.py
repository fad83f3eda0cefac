"""What an episode leaves behind: spans of ids in a forest, the turns that made them, and rows to train on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from turnwise.types.message import ImageRef, Message
from turnwise.types.stop import StopReason
from turnwise.types.task import Task


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
    images: tuple[ImageRef, ...] = ()
    agent: str = "main"
    untrained: str | None = None
    """Why its sampled ids get weight 0 (a failed attempt, a rewound tail); None when they are trained."""

    @property
    def end(self) -> int:
        """Path position behind the last id."""
        return self.start + len(self.ids)

    @property
    def sampled(self) -> bool:
        """Whether a policy sampled these ids."""
        return self.origin is Origin.MODEL

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
    extras: dict[str, tuple[int, Any]] = field(default_factory=dict)
    """What an engine adds per token, as (first path position, array)."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What broke, as data: a bad rollout is a record, never a crash."""

    type: str
    message: str
    phase: str
    """reset, step, reward, generate, render or close."""
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Key:
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


@dataclass(slots=True)
class Trajectory:
    """The record of one episode: a forest of spans, its turns, reward, and why it stopped."""

    task: Task
    key: Key
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
    final: tuple[Message, ...] = ()
    """What the environment said last; nobody replied to it, so it has no ids."""

    @property
    def messages(self) -> list[Message]:
        """The conversation of the last turn, its reply included."""
        return self.conversation(len(self.turns) - 1)

    def conversation(self, turn: int) -> list[Message]:
        """Every message up to and including the reply of a turn; empty for -1."""
        pieces: list[tuple[Message, ...]] = []
        while turn >= 0:
            pieces.append((*self.turns[turn].messages, self.turns[turn].reply))
            turn = self.turns[turn].parent
        return [message for piece in reversed(pieces) for message in piece]

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

    def received(self, turn: int) -> list[int]:
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
        owned: set[tuple[int, int]] = set()
        for leaf in self.leaves():
            row = Sample([], [], [], [], [], self.reward, self)
            for index, used in self.chain(leaf):
                span = self.spans[index]
                row.ids.extend(span.ids[:used])
                row.mask.extend(span.mask[:used])
                row.logprobs.extend(span.logprobs[:used] if span.logprobs is not None else [None] * used)
                row.versions.extend([span.version] * used)
                for offset in range(used):
                    fresh = span.sampled and span.untrained is None and (index, offset) not in owned
                    row.weights.append(1.0 if fresh else 0.0)
                    if span.sampled:
                        owned.add((index, offset))
            if any(row.mask):
                yield row


@dataclass(slots=True)
class Group:
    """The trajectories of one task at one step: the unit of advantage."""

    task: Task
    trajectories: list[Trajectory]

    @property
    def rewards(self) -> list[float | None]:
        """One reward per trajectory, None where it was not computed."""
        return [trajectory.reward for trajectory in self.trajectories]
