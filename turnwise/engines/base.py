"""Engine protocol and its optional capabilities; response checks; stop texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal, Protocol, runtime_checkable

from turnwise.errors import BackendContractError, UsageError
from turnwise.types import ROUTES, ExpertRoutes, MediaPlacement, Message, Sampling
from turnwise.types.renamed import Renamed

Decode = Callable[[Sequence[int]], str]


class StopText:
    """Some texts, the first of which to be complete ends a reply, and how to find them in ids.

    A text may begin and end inside tokens, and may be spread over any number of them, bytes of one character included. What
    was sampled stays as it is: ids are never cut inside, nothing is added.

    Example::

        stop = StopText(["</search>"], renderer.decode)
        while not stop.ends(ids):
            ids.append(sample())
    """

    __slots__ = ("_before", "_decode", "_last", "_may_end", "_most", "texts")

    def __init__(self, texts: Sequence[str], decode: Decode) -> None:
        """
        Args:
            texts: as they are decoded; a control token's text stands for the token too.
            decode: the text of ids, of the model that samples.

        Raises:
            UsageError: for no text, an empty one, or one that no reply can be seen to hold.
        """
        self.texts = (texts,) if isinstance(texts, str) else tuple(texts)
        if not self.texts:
            raise UsageError("stop texts: there is none; leave stop out instead")
        for text in self.texts:
            if not isinstance(text, str) or not text or "\ufffd" in text:
                raise UsageError(f"stop text {text!r}: write a text that replies hold, such as '</search>'")
        self._decode = decode
        self._before: tuple[int, ...] = ()
        self._most = max(len(text.encode("utf-8", "replace")) for text in self.texts)
        # A printable ASCII character is decoded from its own byte in whatever company; others have to be looked for.
        last = {text[-1] for text in self.texts}
        self._last = last if all("!" <= char <= "~" for char in last) else None
        self._may_end: dict[int, bool] = {}

    def continued_after(self, ids: Sequence[int]) -> StopText:
        """The same for ids that go on behind these, of one reply (an aborted call, continued)."""
        other = object.__new__(StopText)
        other.texts, other._decode, other._most = self.texts, self._decode, self._most
        other._last, other._may_end = self._last, self._may_end
        other._before = (*self._before, *ids)
        return other

    def completes(self, ids: Sequence[int]) -> bool:
        """Whether the last of the ids completes a text, where none was complete before it."""
        return bool(ids) and self._ends(ids, len(ids))

    def first_completion(self, ids: Sequence[int]) -> int:
        """How many of the ids it takes to complete a text; 0 where none is complete."""
        return next((count for count in range(1, len(ids) + 1) if self._ends(ids, count)), 0)

    def _ends(self, ids: Sequence[int], count: int) -> bool:
        if not self._can_end(ids[count - 1]):
            return False
        window = self._most + 2
        while True:
            missing = window - count
            tail = [*(self._before[-missing:] if missing > 0 else ()), *ids[max(0, count - window) : count]]
            said = self._decode(tail)
            if any(text in said for text in self.texts):
                return True
            # Ids that say nothing by themselves let a text begin further back than one id per byte.
            if len(tail) < window or len(self._decode(tail[1:-1])) >= self._most:
                return False
            window *= 2

    def cut(self, text: str) -> str:
        """A text up to right behind the stop text that is complete first; all of it where there is none."""
        ends = [text.index(stop) + len(stop) for stop in self.texts if stop in text]
        return text[: min(ends)] if ends else text

    def _can_end(self, last: int) -> bool:
        """Whether a text may end in this id, by its last character."""
        if self._last is None:
            return True
        known = self._may_end.get(last)
        if known is None:
            said = self._decode([last])
            known = self._may_end[last] = any(char in said for char in self._last)
        return known


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

    def add_pixel_source(self, pixels: Any) -> None:
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


def check_generation(generation: Generation, request: Request, name: str) -> None:
    """Hold an answer to the engine's contract.

    Args:
        generation: what the engine gave.
        request: what it was asked.
        name: what errors call the engine.

    Raises:
        BackendContractError: naming what is wrong.
    """
    fault = _fault(generation, request)
    if fault:
        raise BackendContractError(f"{name} {fault}")


def _fault(generation: Generation, request: Request) -> str:
    """What is wrong, empty for nothing."""
    ids, logprobs, finish = generation.ids, generation.logprobs, generation.finish
    if finish not in ("stop", "length", "abort"):
        return f"gave the finish reason {finish!r}"
    if generation.version is None or generation.version < request.min_version:
        return f"sampled with policy {generation.version}, older than {request.min_version}"
    if logprobs is None or len(ids) != len(logprobs):
        return f"gave {'no' if logprobs is None else len(logprobs)} logprobs for {len(ids)} ids"
    if len(ids) > request.max_tokens:
        return f"gave {len(ids)} ids where {request.max_tokens} were asked for"
    if ROUTES in generation.extras and (fault := _routes(generation, request)):
        return fault
    if not ids:
        return "" if finish == "abort" else f"gave no ids and says {finish!r}"
    stopped, what = ids[-1] in request.stop_ids, "stop id"
    if request.stop_text is not None and (count := request.stop_text.first_completion(ids)):
        if count < len(ids):
            return f"sampled {len(ids) - count} ids behind a stop text of {list(request.stop_text.texts)}"
        stopped, what = True, what if stopped else "stop text's end"
    if stopped is not (finish == "stop"):
        return f"says {finish!r} behind id {ids[-1]}, which is {'a' if stopped else 'no'} {what}"
    return _numbers(ids, logprobs if generation.missing_logprobs == "error" else [p for p in logprobs if p is not None])


def _routes(generation: Generation, request: Request) -> str:
    start, given = generation.extras[ROUTES]
    try:
        many = len(ExpertRoutes.of(given))
    except ValueError as error:
        return f"gave routes that cannot be read: {error}"
    last = len(request.ids) + len(generation.ids)
    if not 0 <= start <= request.routes_from or start + many > last:
        asked = f"{request.routes_from} on, of {last} ids"
        return f"gave routes of the positions {start} to {start + many}, where those from {asked} were asked for"
    return ""


def _numbers(ids: Sequence[int], logprobs: Sequence[float | None]) -> str:
    try:
        if not isfinite(sum(logprobs)):  # type: ignore[arg-type]
            return "gave a logprob that is not finite"
    except TypeError:
        return "gave a logprob that is missing or no number"
    try:
        return "gave a negative id" if min(ids) < 0 else ""
    except TypeError:
        return "gave an id that is missing or no number"
