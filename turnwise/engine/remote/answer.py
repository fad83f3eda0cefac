"""What a server answered, held to what it was asked; nothing is repaired, and nothing is ever encoded again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, NamedTuple

from turnwise.engine.base import Finish, Generation, MissingLogprobs, Request
from turnwise.errors import BackendContractError, StaleWeights
from turnwise.types import ROUTES

LOWEST = -9000.0
"""vLLM and others write -9999 where there is no logprob to tell."""
MOST_IDS = 2**31
"""No vocabulary has so many."""
HIGHEST = 1e-3
"""A logprob is at most 0; so much over it is rounding."""


class ExpectedWeights(NamedTuple):
    """What a request was: the weights that it was meant for, and its own name."""

    version: int
    name: str | None
    """The server's own word for them, None where it has none."""
    request: str = ""
    """What the request was called."""

    def check(self, names: Sequence[str], who: str) -> None:
        """See that an answer was sampled by them.

        Raises:
            StaleWeights: when it was not.
        """
        if self.name is not None and any(name != self.name for name in names):
            raise StaleWeights(
                f"{who} sampled with weights that it calls {', '.join(map(repr, names))}; policy {self.version} is "
                f"{self.name!r} (restarted, or updated by somebody else)"
            )


class Carried:
    """What a server's answers tell of themselves: once it stood in one, it stands in each.

    Whether a server tells it depends on its kind and version. One whose answers had it, and then one has not, mixes things up.
    """

    def __init__(self) -> None:
        self._fields: set[str] = set()

    def see(self, field_name: str, found: bool, breach: ResponseErrors) -> bool:
        """Whether an answer has a field.

        Raises:
            BackendContractError: when it has not, and an earlier one had.
        """
        if found:
            self._fields.add(field_name)
        elif field_name in self._fields:
            raise breach(field_name, "is missing from the answer, and earlier answers of the server had it")
        return found

    def check_name(self, field_name: str, said: Any, request: str, breach: ResponseErrors) -> None:
        """See that an answer is that of a request; servers put words of their own around its name.

        Raises:
            BackendContractError: when it is another's.
        """
        if self.see(field_name, said is not None, breach) and (not isinstance(said, str) or request not in said):
            raise breach(field_name, f"is {said!r:.80}, and the request was {request!r}: the answer is another's")


@dataclass(slots=True)
class ServerResponse:
    """One answer, taken out of a server's own form."""

    ids: Sequence[Any]
    logprobs: Sequence[Any]
    """One per id; None where the server gave none for an id and may."""
    finish: str
    """`stop`, `length` or `abort`: what the server says, in one word for all kinds of server."""
    prompt: Sequence[int] | int | None
    """The ids of the context as the server echoes them, or their number."""
    version: int
    cached: int = 0
    extras: Mapping[str, tuple[int, Any]] = field(default_factory=dict)
    cut: bool = False
    """Whether the server may go on behind a stop id (it was not told of them): what is behind it is then left out."""
    drafts: tuple[int, int] = (0, 0)
    """Ids that speculative decoding drafted for it, and how many of them were sampled, where the server tells."""


class ResponseErrors:
    """Makes errors that name the server, its version and the field."""

    def __init__(self, server: str) -> None:
        self.server = server

    def __call__(self, field_name: str, told: str) -> BackendContractError:
        return BackendContractError(f"{self.server}: {field_name} {told}")


def verify_response(
    answer: ServerResponse,
    request: Request,
    asked: int,
    missing: MissingLogprobs,
    breach: ResponseErrors,
    vocabulary: int = MOST_IDS,
) -> tuple[Generation, int]:
    """The answer as a generation.

    Ids behind the first stop id or stop text were not asked for and are left out (only where `answer.cut`, or a stop text,
    which servers know by their own decoding). An answer that ends otherwise than by a stop id, a stop text or its limit is
    an aborted one: the same reply goes on with another call.

    Args:
        asked: the token limit that was sent, at most `request.max_tokens`.
        missing: what becomes of ids without a logprob.
        vocabulary: ids from here on are none of the model's.

    Returns:
        The generation, and how many ids were left out.

    Raises:
        BackendContractError: naming server, version and field.
    """
    _check_prompt(answer.prompt, request.ids, breach)
    ids = answer.ids
    if not isinstance(ids, list):
        raise breach("output ids", f"are {ids!r:.80}, no list")
    for place, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocabulary:
            known = f", and the vocabulary has {vocabulary} ids" if type(token) is int else ""
            raise breach("output ids", f"hold {token!r:.80} at position {place}{known}")
    if not isinstance(answer.logprobs, list):
        raise breach("logprobs", f"are {answer.logprobs!r:.80}, no list")
    if answer.cached < 0 or (answer.cached > len(request.ids) and not request.media):  # images are several ids to the server
        raise breach("cached tokens", f"are {answer.cached} of a prompt of {len(request.ids)} ids")
    if len(ids) > asked:
        raise breach("output ids", f"are {len(ids)} where {asked} were asked for")
    if len(answer.logprobs) != len(ids):
        raise breach("logprobs", f"are {len(answer.logprobs)} for {len(ids)} ids")
    end, finish = _end(answer, request, asked, breach)
    kept = [_number(value, place, missing, breach) for place, value in enumerate(answer.logprobs[:end])]
    if not end and finish != "abort":
        raise breach("output ids", f"are none, and the server says {finish!r}")
    lost: MissingLogprobs = missing if None in kept else "error"
    if end < len(ids) and ROUTES in answer.extras:  # what was left out was fed to nothing that counts
        start, routes = answer.extras[ROUTES]
        answer.extras = {**answer.extras, ROUTES: (start, routes.slice(0, len(request.ids) + end - 1 - start))}
    made = Generation(list(ids[:end]), kept, finish, answer.version, answer.cached, answer.extras, lost, *answer.drafts)
    return made, len(ids) - end


def _check_prompt(echo: Sequence[int] | int | None, sent: Sequence[int], breach: ResponseErrors) -> None:
    if echo is None:
        raise breach("the prompt", "is echoed neither as ids nor as their number, so nothing shows that it is what was sent")
    if type(echo) is int:
        if echo != len(sent):
            raise breach("the prompt", f"has {echo} ids in the server and {len(sent)} were sent")
        return
    if not isinstance(echo, list) or not set(map(type, echo)) <= {int}:
        raise breach("the prompt", f"is echoed as {echo!r:.80}, no list of ids")
    if echo != list(sent):
        place = next((i for i, (a, b) in enumerate(zip(echo, sent, strict=False)) if a != b), min(len(echo), len(sent)))
        raise breach(
            "the prompt", f"is echoed with {len(echo)} ids, {len(sent)} were sent, and they differ from position {place} on"
        )


def _end(answer: ServerResponse, request: Request, asked: int, breach: ResponseErrors) -> tuple[int, Finish]:
    """How many ids of the answer count, and how it ended."""
    ids = answer.ids
    if answer.finish not in ("stop", "length", "abort"):
        raise breach("the finish reason", f"is {answer.finish!r}, which is not known")
    stop = next((place + 1 for place, token in enumerate(ids) if token in request.stop_ids), 0)
    if stop and stop < len(ids) and not answer.cut:
        raise breach("output ids", f"go on behind the stop id {ids[stop - 1]} at position {stop - 1}")
    said = request.stop_text.first_completion(ids[:stop] if stop else ids) if request.stop_text is not None else 0
    stop = min(filter(None, (stop, said)), default=0)
    if stop:
        return stop, "stop"
    if answer.finish == "length":
        if len(ids) < asked:
            raise breach(
                "the finish reason",
                f"is 'length' behind {len(ids)} of {asked} ids: its context is shorter than was taken for granted",
            )
        return len(ids), "length"
    # The server stopped at what is no end here (an end token of its own, an interruption): the reply goes on.
    return len(ids), "abort"


def _number(value: Any, place: int, missing: MissingLogprobs, breach: ResponseErrors) -> float | None:
    if value is None:
        if missing == "error":
            raise breach(
                "logprobs",
                f"lack the one of the id at position {place}; engine.missing_logprobs = 'mask' leaves such ids untrained, "
                "'recompute' takes the trainer's own",
            )
        return None
    if type(value) not in (float, int) or not isfinite(value) or not LOWEST < value <= HIGHEST:
        raise breach("logprobs", f"hold {value!r} at position {place}, which is no log-probability")
    return float(value)
