"""What an engine's answer is held to; nothing is repaired."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from turnwise.engine.base import Generation, Request
from turnwise.errors import BackendContractError
from turnwise.types import ROUTES, ExpertRoutes


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
