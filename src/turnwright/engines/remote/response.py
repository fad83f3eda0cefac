"""Verification of server responses: fields, ids, logprobs, and the weights that sampled them.

`verify_response` makes a `Generation` of a `ServerResponse`, or raises; `ExpectedWeights.versions`
tells which policy sampled each id. The fields of a kind of server are read in its client, such as
`VllmEngine._read`, with `field_of` and the other readers at the end. What is left of the contract,
which holds for every engine, is in `check_generation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from turnwright.engines.protocols import Finish, Generation, InFlight, MissingLogprobs, Request
from turnwright.errors import BackendContractError, StaleWeights, TurnwrightError
from turnwright.types import ROUTES, Alternatives

Breach = Callable[[str, str], BackendContractError]
"""`fault_of` for one server: returns the error for a field and its problem."""


def fault_of(server: str, field_name: str, problem: str) -> BackendContractError:
    """Return the error for a response that violates the contract; `server` includes the server's
    version."""
    return BackendContractError(f"{server}: {field_name} {problem}")


def align_logprobs(
    ids: Sequence[int], entries: Sequence[tuple[int, float]]
) -> list[float | None] | None:
    """Assign logprob entries to ids where the match is unambiguous.

    Servers may omit ids; llama.cpp omits those that end inside a character. An (id, logprob) entry
    that fits several ids is assigned to none: a misplaced logprob is worse than a missing one.

    Return one logprob per id, None where missing or ambiguous; None overall when the entries are
    not a subsequence of the ids.
    """
    # The first place where each entry can be, after the entries before it.
    earliest: list[int] = []
    place = 0
    for id_, _ in entries:
        while place < len(ids) and ids[place] != id_:
            place += 1
        if place == len(ids):
            return None
        earliest.append(place)
        place += 1

    # And the last one, before the entries after it.
    latest = [0] * len(entries)
    place = len(ids) - 1
    for number in range(len(entries) - 1, -1, -1):
        while ids[place] != entries[number][0]:
            place -= 1
        latest[number] = place
        place -= 1

    aligned: list[float | None] = [None] * len(ids)
    for (_, logprob), early, late in zip(entries, earliest, latest, strict=True):
        if early == late:
            aligned[early] = logprob
    return aligned


MIN_LOGPROB = -9000.0
"""vLLM and others report -9999 for a missing logprob."""
MAX_LOGPROB = 1e-3
"""Tolerance for rounding; a logprob is at most 0."""


class SampledVersions(NamedTuple):
    """Policy versions that sampled a response: its first id, later runs of ids, and the oldest in
    its context's cache."""

    version: int
    later: Sequence[tuple[int, int]] = ()
    cache: int | None = None


class ExpectedWeights(NamedTuple):
    """Weights that a request expects, and the request's name."""

    version: int
    """Policy version of the server when the request was sent."""
    name: str | None
    """The server's name for the weights; None when it has none."""
    request: str = ""
    """Request id sent to the server."""
    updates: Mapping[str, int] = MappingProxyType({})
    """Policy versions of the updates that this client began, by the server's name for them."""
    in_flight: InFlight = "recompute"

    def versions(self, spans: Sequence[tuple[int, str]], cached: int, who: str) -> SampledVersions:
        """Return the versions of a response from its runs of (first id, the server's name for the
        weights).

        Expected are the weights at the time of the request and those of later updates. The cache
        of the context is older than an id if its request was sent before an update that left the
        cache.

        Raises:
            StaleWeights: for any other name.
        """
        runs = [(start, self._version(str(name), who)) for start, name in spans]
        if not runs:
            runs = [(0, self.version)]
        first_version = runs[0][1]
        last_version = runs[-1][1]
        later = [run for previous, run in pairwise(runs) if run[1] != previous[1]]

        cache_left = self.in_flight == "keep" or (self.in_flight == "salt" and cached > 0)
        is_older = cache_left and last_version > self.version
        return SampledVersions(first_version, later, self.version if is_older else None)

    def _version(self, name: str, who: str) -> int:
        if self.name is None or name == self.name:
            return self.version
        if self.updates.get(name, -1) > self.version:
            return self.updates[name]
        raise StaleWeights(
            f"{who} sampled with weights it calls {name!r}, but policy {self.version} is "
            f"{self.name!r} (the server restarted, or another client updated it)"
        )


@dataclass(slots=True)
class ServerResponse:
    """One response in a server-independent form."""

    ids: Sequence[Any]
    logprobs: Sequence[Any]
    """One per id; None where the server may and did omit it."""
    finish: str
    """`stop`, `length` or `abort`, as the server reported it."""
    prompt: Sequence[int] | int | None
    """Context ids as echoed by the server, or their count."""
    versions: SampledVersions
    cached: int = 0
    extras: Mapping[str, tuple[int, Any]] = field(default_factory=dict)
    trim: bool = False
    """Whether to drop ids after a stop id: the server was not sent the stop ids."""
    drafts: tuple[int, int] = (0, 0)
    """Ids drafted by speculative decoding and how many were sampled, where reported."""
    alternatives: Sequence[Alternatives] = ()
    """One per id, where they were requested."""


def verify_response(
    response: ServerResponse,
    request: Request,
    max_tokens: int,
    missing: MissingLogprobs,
    vocabulary: int,
    breach: Breach,
) -> tuple[Generation, int]:
    """Check a response and convert it to a generation; return it and the number of dropped ids.

    Ids after the first stop id or stop text are dropped. After a stop id this is allowed only with
    `response.trim`; servers match stop texts by their own decoding. A response that ends without a
    stop id, a stop text or its token limit is an aborted one, and another call continues the reply.
    `max_tokens` is the limit sent, at most `request.max_tokens`; `vocabulary` is an exclusive upper
    bound of valid ids.
    """
    _check_prompt(response.prompt, request.ids, breach)

    ids = response.ids
    if not isinstance(ids, list):
        raise breach("output ids", f"are {ids!r:.80}, not a list")
    # Sets, minima and maxima are computed in C; only a fault is searched for.
    if not set(map(type, ids)) <= {int} or (ids and not (min(ids) >= 0 and max(ids) < vocabulary)):
        raise _invalid_id(ids, vocabulary, breach)
    if not isinstance(response.logprobs, list):
        raise breach("logprobs", f"are {response.logprobs!r:.80}, not a list")
    if response.cached < 0 or (response.cached > len(request.ids) and not request.media):
        # The server counts ids per image.
        raise breach(
            "cached tokens", f"are {response.cached} of a prompt of {len(request.ids)} ids"
        )
    if len(ids) > max_tokens:
        raise breach("output ids", f"are {len(ids)}; at most {max_tokens} were requested")
    if len(response.logprobs) != len(ids):
        raise breach("logprobs", f"are {len(response.logprobs)} for {len(ids)} ids")

    end, finish = _find_end(response, request, max_tokens, breach)
    logprobs: list[Any] = response.logprobs[:end]
    floats = bool(logprobs) and set(map(type, logprobs)) == {float} and isfinite(sum(logprobs))
    if not floats or min(logprobs) <= MIN_LOGPROB or max(logprobs) > MAX_LOGPROB:
        logprobs = [
            _check_logprob(value, position, missing, breach)
            for position, value in enumerate(logprobs)
        ]
    if not end and finish != "abort":
        raise breach("output ids", f"are empty with the finish reason {finish!r}")

    # What belongs to the dropped ids is dropped with them; they were not fed.
    if end < len(ids) and ROUTES in response.extras:
        start, routes = response.extras[ROUTES]
        kept_routes = routes.slice(0, len(request.ids) + end - 1 - start)
        response.extras = {**response.extras, ROUTES: (start, kept_routes)}
    version, later, cache_version = response.versions
    later = [run for run in later if run[0] < end]

    drafted, accepted = response.drafts
    handling: MissingLogprobs = missing if None in logprobs else "error"
    # By position: keywords would take longer, in every call.
    generation = Generation(
        list(ids[:end]),
        logprobs,
        finish,
        version,
        response.cached,
        response.extras,
        handling,
        drafted,
        accepted,
        later,
        cache_version,
    )
    if response.alternatives:
        generation.alternatives = response.alternatives[:end]
    return generation, len(ids) - end


def _invalid_id(ids: Sequence[Any], vocabulary: int, breach: Breach) -> BackendContractError:
    """Return the error for the first id that is none."""
    for position, id_ in enumerate(ids):
        if type(id_) is not int:
            return breach("output ids", f"contain {id_!r:.80} at position {position}")
        if not 0 <= id_ < vocabulary:
            break
    return breach(
        "output ids",
        f"contain {id_!r:.80} at position {position}; the vocabulary has {vocabulary} ids",
    )


def _check_prompt(echo: Sequence[int] | int | None, sent: Sequence[int], breach: Breach) -> None:
    if echo is None:
        raise breach(
            "the prompt",
            "is echoed neither as ids nor as a count, so it cannot be compared with the prompt "
            "sent",
        )
    if type(echo) is int:
        if echo != len(sent):
            raise breach("the prompt", f"has {echo} ids on the server; {len(sent)} were sent")
        return

    if not isinstance(echo, list) or not set(map(type, echo)) <= {int}:
        raise breach("the prompt", f"is echoed as {echo!r:.80}, not as a list of ids")
    if echo != (sent if isinstance(sent, list) else list(sent)):
        position = min(len(echo), len(sent))
        for number, (echoed_id, sent_id) in enumerate(zip(echo, sent, strict=False)):
            if echoed_id != sent_id:
                position = number
                break
        raise breach(
            "the prompt",
            f"is echoed with {len(echo)} ids; {len(sent)} were sent; first difference at "
            f"{position}",
        )


def _find_end(
    response: ServerResponse, request: Request, max_tokens: int, breach: Breach
) -> tuple[int, Finish]:
    """Return how many ids of a response count, and its finish reason."""
    ids = response.ids
    if response.finish not in ("stop", "length", "abort"):
        raise breach("the finish reason", f"is {response.finish!r}; expected stop, length or abort")

    # After the first stop id, or where a stop text is complete before it.
    end = 0
    if not request.stop_ids.isdisjoint(ids):
        end = next(position + 1 for position, id_ in enumerate(ids) if id_ in request.stop_ids)
    if end and end < len(ids) and not response.trim:
        raise breach(
            "output ids", f"continue after the stop id {ids[end - 1]} at position {end - 1}"
        )
    if request.stop_text is not None:
        text_end = request.stop_text.first_completion(ids[:end] if end else ids)
        end = text_end or end
    if end:
        return end, "stop"

    if response.finish == "length":
        if len(ids) < max_tokens:
            problem = (
                f"is 'length' after {len(ids)} of {max_tokens} ids: the server's context is "
                "shorter than expected"
            )
            raise breach("the finish reason", problem)
        return len(ids), "length"

    # The server stopped for a reason of its own (an end token that is no stop id here, an
    # interruption): the reply continues.
    return len(ids), "abort"


def _check_logprob(
    value: Any, position: int, missing: MissingLogprobs, breach: Breach
) -> float | None:
    if value is None:
        if missing == "error":
            remedy = (
                "engine.missing_logprobs = 'mask' leaves such ids untrained, 'recompute' "
                "uses the trainer's own"
            )
            raise breach("logprobs", f"have none for the id at position {position}; {remedy}")
        return None

    is_number = type(value) in (float, int) and isfinite(value)
    if not is_number or not MIN_LOGPROB < value <= MAX_LOGPROB:
        raise breach(
            "logprobs", f"contain {value!r} at position {position}, which is not a log-probability"
        )
    return float(value)


class WeightsLabel(NamedTuple):
    """Identity of a server's weights."""

    name: str | None
    """The server's name for its weights; None when it has none."""
    scores: tuple[float, ...]
    """The server's logprobs of the known ids."""

    def max_difference(self, other: WeightsLabel) -> float:
        """Return the largest difference of the scores in nats; infinite when not comparable."""
        if len(self.scores) != len(other.scores):
            return float("inf")
        pairs = zip(self.scores, other.scores, strict=True)
        return max((abs(own - theirs) for own, theirs in pairs), default=0.0)


@contextmanager
def parsing(what: str, who: str) -> Iterator[None]:
    """Parse a response: a Python error caused by an unexpected form becomes a
    `BackendContractError`."""
    try:
        yield
    except TurnwrightError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise fault_of(
            who, what, f"has an unexpected form: {type(error).__name__}: {error!s:.200}"
        ) from error


def only_choice(raw: Any, breach: Breach) -> Any:
    """Return the only choice of a response, an object."""
    choices = field_of(raw, "choices", breach)
    if not isinstance(choices, list) or len(choices) != 1:
        count = f"{len(choices)}" if isinstance(choices, list) else f"{choices!r:.80}"
        raise breach("choices", f"are {count}; exactly one was requested")
    if not isinstance(choices[0], dict):
        raise breach("choices.0", f"is {choices[0]!r:.80}, not an object")
    return choices[0]


def field_of(raw: Any, path: str, breach: Breach) -> Any:
    """Return a value of a response, by a path such as `choices.0.token_ids`; null counts as
    present."""
    value = raw
    for part in path.split("."):
        try:
            value = value[int(part)] if part.isdigit() else value[part]
        except (LookupError, TypeError):
            raise breach(path, "is missing from the response") from None
    return value


def number_at(raw: Any, path: str) -> int:
    """Return an integer of a response by its path, 0 when missing."""
    value = raw
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value if type(value) is int else 0


def logprobs_of(
    rows: Any,
    ids: Any,
    keys: tuple[Any, Any],
    read: Callable[[Any, Any, Breach], Any],
    breach: Breach,
) -> list[Any]:
    """Return the logprobs of rows after comparing their ids; `keys` are those of a row's id and
    logprob.

    Where anything differs, `read(row, id, breach)` reads each row and names the fault.
    """
    id_key, logprob_key = keys
    with suppress(LookupError, TypeError):
        if list(map(itemgetter(id_key), rows)) == ids[: len(rows)]:
            return list(map(itemgetter(logprob_key), rows))
    return [read(row, id_, breach) for row, id_ in zip(rows, ids, strict=False)]


def alternatives_of(
    rows: Any,
    ids: Sequence[int],
    request: Request,
    read: Callable[[Any], Iterable[tuple[Any, Any]]],
    breach: Breach,
) -> list[list[tuple[int, float]]]:
    """Return the alternatives of each id, from rows of which `read` returns ids and logprobs.

    Servers may put the sampled id in front of the most likely ones, and report a large negative
    number for ids that cannot be sampled. Raises `BackendContractError` for another form.
    """
    if not isinstance(rows, list) or len(rows) != len(ids):
        count = len(rows) if isinstance(rows, list) else "none"
        raise breach("the most likely ids", f"are of {count} positions for {len(ids)} ids")

    alternatives: list[list[tuple[int, float]]] = []
    for row in rows:
        possible: dict[int, float] = {}
        for id_, logprob in read(row):
            if type(id_) is not int or id_ in possible:
                problem = f"have {id_!r:.80} as an id twice or as none: update the server"
                raise breach("the most likely ids", problem)
            value = float(logprob)
            if value > MIN_LOGPROB and id_ not in request.banned_ids:
                possible[id_] = value
        likeliest = sorted(possible.items(), key=lambda pair: -pair[1])
        alternatives.append(likeliest[: request.alternatives])
    return alternatives


INTERRUPTS = "turnwright serve computes the cache of replies in flight again; set recompute or salt"


def version_runs(spans: Any, breach: Breach) -> list[tuple[int, str]]:
    """Return runs of (first id, name of the weights) from the spans that vLLM and SGLang report,
    which follow each other."""
    field_name = "weight_versions"
    runs: list[tuple[int, str]] = []
    end = 0
    for span in spans:
        if field_of(span, "start", breach) != end:
            raise breach(
                field_name,
                f"are {spans!r:.200}; each must start where the one before ends, the first at 0",
            )
        runs.append((end, str(field_of(span, "version", breach))))
        end = field_of(span, "end", breach)
    return runs
