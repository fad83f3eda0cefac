"""The contract of engines: requests, replies, and what an engine may be able to do besides.

An `Engine` takes a `Request` (the complete context as ids, limits, a seed) and returns a
`Generation`: the ids it sampled, one logprob for each, why the reply ended, and the policy version
that sampled it. `check_generation` holds a reply to this contract. What only some engines can do
(report a context limit, take new weights, release memory) is a protocol each, which callers test
with `isinstance`. `StopText` finds the texts that end a reply in its ids.

How ids are sampled is not here, nor are retries and weight transfer. Read on in `ScriptedEngine`,
the smallest engine; in `LocalEngine.generate` and `RemoteEngine.generate`, which sample; and in
`ReplySampler.sample`, which calls them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import isfinite
from typing import Any, Literal, Protocol, runtime_checkable

from turnwright.errors import BackendContractError, UsageError
from turnwright.types import (
    ROUTES,
    Alternatives,
    ExpertRoutes,
    MediaPlacement,
    Message,
    Sampling,
    Tools,
)

Decode = Callable[[Sequence[int]], str]
Finish = Literal["stop", "length", "abort"]
MissingLogprobs = Literal["error", "mask", "recompute"]
InFlight = Literal["recompute", "salt", "keep"]
_UNMODIFIED = Sampling()
LOGPROB_TOLERANCE = 1e-3
"""Maximum difference of two logprobs of one id, in nats."""
MAX_ALTERNATIVES = 20
"""Maximum of `Request.alternatives`; vLLM reports no more unless it is started with another."""


class StopText:
    """Texts that end a reply, and their detection in token ids.

    The first text to be completed ends the reply. A text may begin and end inside tokens and span
    any number of them, partial UTF-8 characters included. Sampled ids are never cut or extended.

    Example::

        stop = StopText(["</search>"], renderer.decode)
        while not stop.completes(ids):
            ids.append(sample())
    """

    __slots__ = ("_before", "_decode", "_last", "_max_bytes", "_may_end", "texts")

    def __init__(self, texts: Sequence[str], decode: Decode) -> None:
        """
        Args:
            texts: decoded texts; the text of a control token also matches that token.
            decode: decodes ids with the tokenizer of the sampling model.

        Raises:
            UsageError: for no text, an empty text, or one with a replacement character
                (never found in a reply).
        """
        self.texts = (texts,) if isinstance(texts, str) else tuple(texts)
        if not self.texts:
            raise UsageError("stop texts: the list is empty; omit stop instead")
        for text in self.texts:
            if not isinstance(text, str) or not text or "\ufffd" in text:
                raise UsageError(
                    f"stop text {text!r}: must be a non-empty decodable text, such as '</search>'"
                )
        self._decode = decode
        self._before: tuple[int, ...] = ()
        """Ids of the same reply that earlier calls sampled."""
        self._max_bytes = max(len(text.encode("utf-8", "replace")) for text in self.texts)

        # A printable ASCII character always decodes from its own byte; other characters
        # depend on neighboring ids.
        last_chars = {text[-1] for text in self.texts}
        is_ascii = all("!" <= char <= "~" for char in last_chars)
        self._last = last_chars if is_ascii else None
        self._may_end: dict[int, bool] = {}
        """Whether a text may end in an id, judging by its last character."""

    def continued_after(self, ids: Sequence[int]) -> StopText:
        """Return a detector for ids that continue these.

        It serves an aborted reply that another call continues.
        """
        other = copy(self)
        other._before = (*self._before, *ids)
        return other

    def completes(self, ids: Sequence[int]) -> bool:
        """Return whether the last id completes a text; assumes that no earlier id did."""
        return bool(ids) and self._ends(ids, len(ids))

    def first_completion(self, ids: Sequence[int]) -> int:
        """Return how many ids complete the first text; 0 when none is complete."""
        for count in range(1, len(ids) + 1):
            if self._ends(ids, count):
                return count
        return 0

    def _ends(self, ids: Sequence[int], count: int) -> bool:
        """Return whether id `count - 1` completes a text."""
        # Most ids do not hold the last character of a text; each is decoded once to know.
        last_id = ids[count - 1]
        if self._last is not None:
            if last_id not in self._may_end:
                decoded = self._decode([last_id])
                self._may_end[last_id] = any(char in decoded for char in self._last)
            if not self._may_end[last_id]:
                return False

        # Decode as many ids as the longest text has bytes, and one more on each side.
        window = self._max_bytes + 2
        while True:
            missing = window - count
            earlier = self._before[-missing:] if missing > 0 else ()
            tail = [*earlier, *ids[max(0, count - window) : count]]
            decoded = self._decode(tail)
            if any(text in decoded for text in self.texts):
                return True

            # Ids that decode to nothing on their own let a text start further
            # back than one id per byte.
            if len(tail) < window or len(self._decode(tail[1:-1])) >= self._max_bytes:
                return False
            window *= 2

    def cut(self, text: str) -> str:
        """Truncate a text after the first complete stop text; return all of it if there is none."""
        ends = [text.index(stop) + len(stop) for stop in self.texts if stop in text]
        return text[: min(ends)] if ends else text


@dataclass(slots=True)
class Request:
    """One call to an engine: the context, the limits of the reply, and where its draws start."""

    ids: Sequence[int]
    """Complete context, verbatim.

    The caller must not modify it until the call returns; engines copy it to keep it longer.
    """
    max_tokens: int
    """Maximum number of new ids; at least 1."""
    stop_ids: frozenset[int]
    """Sampling ends after any of these; the stop id is part of the result."""
    seed: int
    """64 bits derived from (run, phase, step, task, sample, attempt, call); reply position p
    draws from (seed, p) only."""
    session: str
    """Trajectory id.

    Calls of a session extend each other, so caches and server affinity may use it.
    """
    group: str = ""
    """Sessions of a group share their opening prompt."""
    call: int = 0
    """Index of the call within its session, from 0."""
    sampling: Sampling = _UNMODIFIED
    agent: str = "main"
    media: Sequence[MediaPlacement] = ()
    """Complete image and video blocks among `ids`, in order; must stay unmodified until the call
    returns."""
    messages: Sequence[Message] = ()
    """Messages that `ids` render, for scripts and evaluation chat endpoints; engines that
    sample read `ids` only."""
    banned_ids: frozenset[int] = frozenset()
    """Ids that are never sampled; the trainer excludes them from its softmax too."""
    extras: frozenset[str] = frozenset()
    """Requested extras by name (`routes`); logprobs are always returned."""
    routes_from: int = 0
    """First position whose experts are requested when `extras` has `routes`; the caller has the
    earlier ones."""
    deadline: float | None = None
    """Event loop time by which a response is needed."""
    min_version: int = 0
    """Oldest version of a trained policy that may respond."""
    stop_text: StopText | None = None
    """Sampling also ends after the id that completes one of these texts (`stop_text.texts`, for
    engines that see text)."""
    reply_position: int = 0
    """Number of ids at the end of `ids` that earlier calls sampled for this reply; its draws
    continue at this position."""
    tools: Tools = ()
    """Tools that `ids` offer, for evaluation chat endpoints."""
    alternatives: int = 0
    """Number of most likely ids to return with each sampled one, for engines that have
    `gives_alternatives`."""

    def continued(self, part: Generation) -> Request:
        """Return the request that continues this one's reply after its first ids."""
        stop_text = None
        if self.stop_text is not None:
            stop_text = self.stop_text.continued_after(part.ids)
        # The caller has the experts that the part came with.
        routes_start, routes = part.extras.get(ROUTES, (self.routes_from, ()))
        return replace(
            self,
            ids=[*self.ids, *part.ids],
            max_tokens=self.max_tokens - len(part.ids),
            stop_text=stop_text,
            reply_position=self.reply_position + len(part.ids),
            routes_from=routes_start + len(routes),
        )


@dataclass(slots=True)
class Generation:
    """Ids sampled by one call."""

    ids: list[int]
    logprobs: Sequence[float | None]
    """log p(id | context) under the sampling distribution, one finite value per id; None only
    with `missing_logprobs`."""
    finish: Finish
    """`stop`: the last id is a stop id or completes a stop text; `length`: max_tokens reached;
    `abort`: interrupted, the ids so far are valid."""
    version: int
    """Policy version of the first id, and of every id unless `later_versions` tells otherwise."""
    cached_tokens: int = 0
    """Context ids served from a cache."""
    extras: Mapping[str, tuple[int, Any]] = field(default_factory=dict)
    """Requested extras that are available, as name -> (first position, array).

    `routes` is an `ExpertRoutes` or an integer array [positions, layers, k]. It starts at
    `routes_from` or earlier and ends at the last position fed, which precedes the last id."""
    missing_logprobs: MissingLogprobs = "error"
    """Handling of ids whose logprob is None: a contract error; untrained and counted; or trained
    against the trainer's own forward pass and counted."""
    drafted: int = 0
    """Ids drafted for this reply by speculative decoding."""
    accepted: int = 0
    """Number of those that were sampled."""
    later_versions: Sequence[tuple[int, int]] = ()
    """Weights that changed during the call: (index of the first id, policy version) of each later
    run of ids, in order."""
    cache_version: int | None = None
    """Oldest policy version whose weights computed a part of the context's cache; None means
    that of each id itself."""
    fixed: bool = False
    """Whether a policy that is not trained sampled it: its version may be older than
    `Request.min_version`."""
    alternatives: Sequence[Alternatives] = ()
    """For each id the most likely ids at its position, if the request asks for any; at most so
    many, and fewer where the distribution has fewer."""

    def joined(self, later: Generation) -> Generation:
        """Return this part of a reply together with what the engine sampled for the rest.

        The rest is that of the request `Request.continued`.
        """
        extras = {**self.extras, **later.extras}
        if ROUTES in self.extras and ROUTES in later.extras:
            extras[ROUTES] = _joined_routes(self.extras[ROUTES], later.extras[ROUTES])

        # Runs of ids of one version each, as (index of the first id, version).
        count = len(self.ids)
        runs = [(0, self.version), *self.later_versions] if count else []
        runs.append((count, later.version))
        runs += [(count + start, version) for start, version in later.later_versions]
        changes = [run for previous, run in pairwise(runs) if run[1] != previous[1]]

        return replace(
            later,
            ids=[*self.ids, *later.ids],
            logprobs=[*self.logprobs, *later.logprobs],
            version=runs[0][1],
            cached_tokens=self.cached_tokens,
            extras=extras,
            drafted=self.drafted + later.drafted,
            accepted=self.accepted + later.accepted,
            later_versions=changes,
            alternatives=[*self.alternatives, *later.alternatives],
        )


def _joined_routes(part: tuple[int, Any], later: tuple[int, Any]) -> tuple[int, ExpertRoutes]:
    """Return the experts of two parts of a reply, which may overlap, and their first position."""
    part_start, part_routes = part[0], ExpertRoutes.of(part[1])
    later_start, later_routes = later[0], ExpertRoutes.of(later[1])
    overlap = part_start + len(part_routes) - later_start
    return part_start, part_routes.concat(later_routes.slice(overlap, len(later_routes)))


@runtime_checkable
class Engine(Protocol):
    """Samples replies. `generate` is called from one event loop, with many calls in flight.

    Optional capabilities are separate protocols: `HasContextLimit`, `HasRenderer`,
    `GivesAlternatives`,
    `NeedsRenderer`, `AcceptsPixelSource`, `SupportsWeightUpdate`, `SupportsSleep`. A rollout
    checks for them once, at construction.
    """

    async def generate(self, request: Request) -> Generation:
        """Sample one reply.

        Raises:
            EngineError: when no reply can be obtained.
        """

    def release(self, session: str) -> None:
        """End a session; its caches may be freed."""

    async def close(self) -> None:
        """Stop; calls in flight end as aborted."""


@runtime_checkable
class HasContextLimit(Protocol):
    """Engine with a maximum context length."""

    @property
    def context(self) -> int | None:
        """Maximum number of ids of context plus reply; None while it is unknown.

        Read before each episode.
        """


@runtime_checkable
class HasRenderer(Protocol):
    """Engine that has the renderer of its model."""

    @property
    def renderer(self) -> Any:
        """Renderer of the model, or None."""


@runtime_checkable
class GivesAlternatives(Protocol):
    """Engine that may return the most likely ids with each sampled one."""

    @property
    def gives_alternatives(self) -> bool:
        """Whether it does, for a request with `alternatives`."""


def gives_alternatives(engine: Engine) -> bool:
    """Return whether an engine returns the most likely ids where a request asks for them."""
    return isinstance(engine, GivesAlternatives) and engine.gives_alternatives


@runtime_checkable
class NeedsRenderer(Protocol):
    """Engine that takes the renderer of the rollout."""

    def set_renderer(self, renderer: Any) -> None:
        """Take the renderer; called once, before the first request."""


def give_renderer(engine: Engine, renderer: Any) -> None:
    """Set the renderer of an engine that takes one, with `set_renderer`."""
    if isinstance(engine, NeedsRenderer):
        engine.set_renderer(renderer)


@runtime_checkable
class AcceptsPixelSource(Protocol):
    """Engine of a vision model."""

    def add_pixel_source(self, pixels: Any) -> None:
        """Add a source of pixel values for `Request.media`.

        Called once per rollout with a vision renderer.
        """


def add_pixel_source(engine: Engine, pixels: Any) -> None:
    """Add a source of pixel values to an engine that takes one, with `add_pixel_source`."""
    if isinstance(engine, AcceptsPixelSource):
        engine.add_pixel_source(pixels)


@runtime_checkable
class SupportsPause(Protocol):
    """Server client that can end the calls in flight and keep their ids."""

    async def pause(self, mode: Literal["abort"]) -> None:
        """Pause sampling.

        Raises:
            SyncError: when the server lacks the route.
        """


@runtime_checkable
class SharesMemory(Protocol):
    """Engine in the trainer's process, whose cache can be dropped while it is not needed."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights."""
        ...

    async def drop_cache(self) -> None:
        """Release the memory of keys and values unless calls are in flight."""
        ...


@runtime_checkable
class SupportsSleep(Engine, Protocol):
    """Engine that can release its memory while others need it."""

    async def sleep(self) -> None:
        """Release memory until the next `update`; calls in flight first end as aborted.

        Raises:
            EngineError: when it cannot.
        """


@runtime_checkable
class SupportsWeightUpdate(Engine, Protocol):
    """Engine whose weights a trainer can replace."""

    @property
    def version(self) -> int:
        """Policy version of the weights."""

    async def update(self, weights: Iterable[tuple[str, Any]], version: int) -> str:
        """Replace the weights, which come by Hugging Face name.

        Calls in flight first end as aborted.

        Returns:
            Fingerprint of the weights as received, which the trainer compares with its own.

        Raises:
            SyncError: when a name or a shape does not match.
        """


def check_generation(generation: Generation, request: Request, name: str) -> None:
    """Check that a generation keeps the contract of engines.

    Raises:
        BackendContractError: when it does not; its text starts with `name`, the engine's name.
    """
    fault = _find_fault(generation, request)
    if fault:
        raise BackendContractError(f"{name} {fault}")


def _find_fault(generation: Generation, request: Request) -> str:
    """Return the violation, or an empty string."""
    ids = generation.ids
    logprobs = generation.logprobs
    finish = generation.finish
    if finish not in ("stop", "length", "abort"):
        return f"returned the finish reason {finish!r}; expected stop, length or abort"
    if generation.version is None or (
        generation.version < request.min_version and not generation.fixed
    ):
        return f"sampled with policy {generation.version}, older than {request.min_version}"

    # As many logprobs as ids, and no more ids than requested.
    if logprobs is None or len(ids) != len(logprobs):
        returned = "no" if logprobs is None else len(logprobs)
        return f"returned {returned} logprobs for {len(ids)} ids"
    if len(ids) > request.max_tokens:
        return f"returned {len(ids)} ids; at most {request.max_tokens} were requested"
    fault = _extras_fault(generation, request)
    if fault:
        return fault
    if not ids:
        return "" if finish == "abort" else f"returned no ids with the finish reason {finish!r}"

    # The reply ends where it was to stop, and nowhere else.
    ends_in_stop_id = ids[-1] in request.stop_ids
    ends_in_stop_text = False
    if request.stop_text is not None:
        count = request.stop_text.first_completion(ids)
        if 0 < count < len(ids):
            texts = list(request.stop_text.texts)
            return f"sampled {len(ids) - count} ids after a stop text of {texts}"
        ends_in_stop_text = count > 0
    stopped = ends_in_stop_id or ends_in_stop_text
    if stopped is not (finish == "stop"):
        only_text = ends_in_stop_text and not ends_in_stop_id
        article = "a" if stopped else "no"
        end = "stop text's end" if only_text else "stop id"
        return f"returned the finish reason {finish!r} after id {ids[-1]}, which is {article} {end}"

    if generation.missing_logprobs != "error":
        logprobs = [logprob for logprob in logprobs if logprob is not None]
    return _numbers_fault(ids, logprobs)


def _extras_fault(generation: Generation, request: Request) -> str:
    """Return the violation in what came besides ids and logprobs, or an empty string."""
    fault = ""
    if ROUTES in generation.extras:
        fault = _routes_fault(generation, request)
    if not fault and (request.alternatives or generation.alternatives):
        fault = _alternatives_fault(generation, request)
    return fault


def _routes_fault(generation: Generation, request: Request) -> str:
    start, routes = generation.extras[ROUTES]
    try:
        count = len(ExpertRoutes.of(routes))
    except ValueError as error:
        return f"returned unreadable routes: {error}"

    total = len(request.ids) + len(generation.ids)
    if not 0 <= start <= request.routes_from or start + count > total:
        return (
            f"returned routes of positions {start} to {start + count}; those from "
            f"{request.routes_from} on, of {total} ids were requested"
        )
    return ""


def _alternatives_fault(generation: Generation, request: Request) -> str:
    most = request.alternatives
    if len(generation.alternatives) != (len(generation.ids) if most else 0):
        return (
            f"returned alternatives of {len(generation.alternatives)} ids for "
            f"{len(generation.ids)} ids, and {most} of each were requested"
        )

    sampled = zip(generation.ids, generation.logprobs, strict=True)
    for (id_, logprob), alternatives in zip(sampled, generation.alternatives, strict=True):
        logprobs = dict(alternatives)
        if not 0 < len(alternatives) <= most or len(logprobs) != len(alternatives):
            return f"returned the alternatives {list(alternatives)!r:.200}; {most} were requested"
        if not all(map(isfinite, logprobs.values())):
            return "returned an alternative whose logprob is not finite"
        if any(later > former for former, later in pairwise(logprobs.values())):
            return "returned alternatives that are not in the order of their logprobs"
        if logprob is not None and abs(logprobs.get(id_, logprob) - logprob) > LOGPROB_TOLERANCE:
            return (
                f"returned the logprob {logprob:g} of the sampled id {id_}, and "
                f"{logprobs[id_]:g} of the same id among its alternatives"
            )
    return ""


def _numbers_fault(ids: Sequence[int], logprobs: Sequence[float | None]) -> str:
    # Sum and minimum are computed in C, and fail for a value that is not a number.
    try:
        if not isfinite(sum(logprobs)):  # type: ignore[arg-type]
            return "returned a logprob that is not finite"
    except TypeError:
        return "returned a logprob that is missing or not a number"
    try:
        return "returned a negative id" if min(ids) < 0 else ""
    except TypeError:
        return "returned an id that is missing or not a number"
