"""The seam to whatever samples tokens: ids in, ids and logprobs out. An engine knows no text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from turnwise.engine.stops import StopText
from turnwise.types import MediaPlacement, Message, Sampling
from turnwise.types.renamed import Renamed

Finish = Literal["stop", "length", "abort"]
_UNMODIFIED = Sampling()
MissingLogprobs = Literal["error", "mask", "recompute"]


@dataclass(slots=True)
class Request:
    """One call to an engine."""

    ids: Sequence[int]
    """The whole context, verbatim. The caller leaves it unchanged until the call returns; to keep it longer, copy it."""
    max_tokens: int
    """At most this many new ids; at least 1."""
    stop_ids: frozenset[int]
    """Sampling ends behind any of these; the stop id is part of the result."""
    seed: int
    """64 bits that name (run, phase, step, task, sample, attempt, call); position p of the reply draws from (seed, p) alone."""
    session: str
    """The trajectory: calls of one session extend each other, so caches and servers can be kept for it."""
    group: str = ""
    """Sessions of one group begin with the same prompt."""
    call: int = 0
    """Number of the call within its session, from 0."""
    sampling: Sampling = _UNMODIFIED
    agent: str = "main"
    media: Sequence[MediaPlacement] = ()
    """Blocks of images and videos among `ids`, in order, each whole; as `ids`, left unchanged until the call returns."""
    messages: Sequence[Message] = ()
    """What the ids say, for scripts and for chat endpoints in evaluation; an engine that samples reads `ids` alone."""
    banned_ids: frozenset[int] = frozenset()
    """Never sampled; the trainer bans them in its softmax too."""
    extras: frozenset[str] = frozenset()
    """Extras asked for by name (`routes`); logprobs are always given."""
    routes_from: int = 0
    """Where `want` names `routes`: the first position whose experts are wanted; who asks has those before it."""
    deadline: float | None = None
    """Event loop time by which an answer is wanted."""
    min_version: int = 0
    """The oldest policy that may answer."""
    stop_text: StopText | None = None
    """Sampling ends also behind the id that completes one of these texts (`stop_text.texts`, for engines that know text)."""
    want = Renamed("extras")


@dataclass(slots=True)
class Generation:
    """What one call sampled."""

    ids: list[int]
    logprobs: Sequence[float | None]
    """log p(id | context) under the sampled distribution, one per id, finite; None only where `missing_logprobs` says so."""
    finish: Finish
    """`stop`: ends in a stop id, or in the id that completes a stop text; `length`: max_tokens reached; `abort`: interrupted,
    what is here was sampled and counts."""
    version: int
    """Policy version of every id."""
    cached_tokens: int = 0
    """Ids of the context that came from a cache."""
    extras: Mapping[str, tuple[int, Any]] = field(default_factory=dict)
    """What was asked for and can be told, as (first position, array): `routes` are a `ExpertRoutes`, or an integer array
    [positions, layers, k], from `routes_from` or before it up to the last position that was fed, which is the one before the
    last id."""
    missing_logprobs: MissingLogprobs = "error"
    """What becomes of ids whose logprob is None: a breach of contract, untrained and counted, or trained against the trainer's
    own forward and counted."""
    drafted: int = 0
    """Ids that speculative decoding drafted for this reply; `accepted` of them were sampled."""
    accepted: int = 0


@runtime_checkable
class Engine(Protocol):
    """Samples replies. `generate` is called from one event loop, many calls at a time.

    Optional capabilities are protocols of their own: `HasContextLimit`, `HasRenderer`, `NeedsRenderer`, `AcceptsPixelSource`,
    `SupportsWeightUpdate`, `SupportsSleep`. A rollout looks for them once, when it is constructed.
    """

    async def generate(self, request: Request) -> Generation:
        """Sample one reply.

        Raises:
            EngineError: when no answer can be had.
        """
        ...

    def release(self, session: str) -> None:
        """The session is over; what is cached for it may go."""
        ...

    async def close(self) -> None:
        """Stop; calls in flight end as aborted."""
        ...


@runtime_checkable
class HasContextLimit(Protocol):
    """Engine with a maximum context length."""

    @property
    def context(self) -> int | None:
        """Maximum number of ids of context plus reply; None while it is unknown. Read before each episode."""
        ...


@runtime_checkable
class HasRenderer(Protocol):
    """Engine that has the renderer of its model."""

    @property
    def renderer(self) -> Any:
        """Renderer of the model, or None."""
        ...


@runtime_checkable
class NeedsRenderer(Protocol):
    """Engine that takes the renderer of the rollout."""

    def set_renderer(self, renderer: Any) -> None:
        """Take the renderer; called once, before the first request."""
        ...


@runtime_checkable
class AcceptsPixelSource(Protocol):
    """Engine of a vision model."""

    def see(self, pixels: Any) -> None:
        """Add a source of pixel values for `Request.media`; called once per rollout with a vision renderer."""
        ...


@runtime_checkable
class SupportsPause(Protocol):
    """Server client that can end the calls in flight and keep their ids."""

    async def pause(self, mode: Literal["abort"]) -> None:
        """Pause sampling.

        Raises:
            SyncError: when the server lacks the route.
        """
        ...


@runtime_checkable
class SupportsSleep(Engine, Protocol):
    """An engine that gives its memory back while others need it."""

    async def sleep(self) -> None:
        """Give memory back until the next `update`; calls in flight end as aborted first.

        Raises:
            EngineError: when it cannot.
        """
        ...


@runtime_checkable
class SupportsWeightUpdate(Engine, Protocol):
    """An engine whose weights a trainer can replace."""

    @property
    def version(self) -> int:
        """Policy version of the weights."""
        ...

    async def update(self, weights: Iterable[tuple[str, Any]], version: int) -> str:
        """Take new weights, by Hugging Face name; calls in flight end as aborted first.

        Returns:
            The fingerprint of the weights as they arrived, which the trainer compares with its own.

        Raises:
            SyncError: when a name or a shape does not fit.
        """
        ...
