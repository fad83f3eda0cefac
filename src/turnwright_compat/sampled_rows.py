"""Rows of ids, masks and rewards that a user's own loop returns, as weights and rewards of
the replies it sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwright.envs.env import Scores
from turnwright.envs.user_code import as_number, describe_value, number_of
from turnwright.errors import EnvError
from turnwright.types import Image, ImageRef, Video, VideoRef

LOGPROB_TOLERANCE = 1e-3
_LENGTHS = ("max_tokens", "max_new_tokens", "max_generate_length")


def sampling_options(
    given: Mapping[str, Any], media: Sequence[Any] | None = None
) -> dict[str, Any]:
    """Return a framework's sampling parameters by our names, without those that leave
    the choice to the run."""
    top_k = given.get("top_k")
    found = {
        "max_tokens": next((given[name] for name in _LENGTHS if given.get(name)), None),
        "temperature": given.get("temperature"),
        "top_p": given.get("top_p"),
        "top_k": None if top_k is None else max(0, top_k),
        "min_p": given.get("min_p"),
        "stop": _several(given.get("stop")),
        "stop_ids": _several(given.get("stop_token_ids")),
        "media": tuple(map(image_of, _several(media))),
    }
    return {key: value for key, value in found.items() if value not in (None, ())}


def image_of(value: Any) -> Any:
    """Return an image of a request as a part of a message: also a data URL, a path, base64 text, or
    a dict with one of them."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str) and not value.startswith("data:"):
        value = Path(value) if _is_file(value) else f"data:image;base64,{value}"
    return value if isinstance(value, (Image, ImageRef, Video, VideoRef)) else Image(value)


def _is_file(text: str) -> bool:
    """Whether a text is the path of a file; base64 is often longer than a name may be."""
    try:
        return len(text) < 4096 and Path(text).is_file()
    except (OSError, ValueError):
        return False


def _several(value: Any) -> tuple[Any, ...]:
    return (
        ()
        if value is None or value == ""
        else (value,)
        if isinstance(value, (str, int))
        else tuple(value)
    )


@dataclass(slots=True)
class EngineCall:
    """One call of the generator's engine: the ids that it knew, and the reply."""

    context: list[int] | None
    """None where the generator gave messages."""
    reply: Any


def read_output(
    output: Any,
    calls: Sequence[EngineCall],
    weigh: Callable[[Any, list[float]], None],
    mask_name: str = "loss_masks",
    logprobs_name: str = "rollout_logprobs",
    *,
    own_rewards: bool = False,
    is_blank: Callable[[Sequence[int]], bool] | None = None,
) -> Scores:
    """Read the episode's rows of a `GeneratorOutput`: set the weights of the
    replies, return the rewards.

    Errors call masks and logprobs by the names that the user's code has for them. With
    `own_rewards` a row's number is the reward of that row; else the last row's is the episode's.

    `is_blank` is for loops that build a row from the texts of its messages. A reply whose ids are
    in the row after other ids than the engine received is trained where the engine sampled it.
    Blank ids after a reply, which the template wrote and the loop masks as trained, are not
    trained. Both are counted in the metrics.

    Raises:
        EnvError: for rows of different lengths, a mask that trains ids which the engine did not
            sample, or logprobs other than those of the engine.
    """
    if not isinstance(output, Mapping) or not output.get("response_ids"):
        raise EnvError(
            f"generate returned {describe_value(output)}; return a GeneratorOutput with "
            "response_ids"
        )
    weights: dict[int, list[float]] = {}
    turns, own = [0.0] * len(calls), 0.0
    rows = len(output["response_ids"])
    by_row: list[tuple[float, tuple[Any, ...]]] = []
    counts: Counter[str] = Counter()
    for row in range(rows):
        prompt, response, mask, reward, logprobs = (_of_row(output, key, row) for key in _ROW)
        if mask is None or len(mask) != len(response):
            raise EnvError(
                f"row {row}: {len(response)} response_ids and {len(mask or ())} {mask_name}; give "
                "one for each id"
            )
        placed = _places(calls, list(prompt or ()), list(response))
        mask = _of_texts(calls, placed, list(response), mask, is_blank, counts)
        _check_mask(
            mask,
            logprobs,
            placed,
            calls,
            (f"row {row}: {mask_name}", f"row {row}: {logprobs_name}"),
        )
        trained = _add_weights(weights, mask, placed, calls)
        if isinstance(reward, (list, tuple)):
            if len(reward) != len(response):
                raise EnvError(
                    f"row {row}: {len(response)} response_ids and {len(reward)} rewards; give one "
                    "for each id"
                )
            for at, one in enumerate(reward):
                if value := as_number(one, "a token's reward"):
                    before = [number for number, start in placed.items() if start <= at]
                    if before:
                        turns[max(before, key=placed.__getitem__)] += value
                    else:
                        own += value
        elif own_rewards:
            by_row.append((float(reward), trained))
        elif row == rows - 1:
            own += as_number(reward, "the reward") or 0.0
    for number, call in enumerate(calls):
        weigh(call.reply, weights.get(number, [0.0] * len(call.reply.ids)))
    return Scores(own, tuple(turns), metrics=_metrics(output, counts), rows=tuple(by_row))


def _add_weights(
    weights: dict[int, list[float]],
    mask: Sequence[Any],
    placed: Mapping[int, int],
    calls: Sequence[EngineCall],
) -> tuple[Any, ...]:
    """Add a row's mask to the weights of the calls; return the replies that it trains."""
    trained = []
    for number, start in placed.items():
        reply = calls[number].reply
        found = [float(one) for one in mask[start : start + len(reply.ids)]]
        found += [0.0] * (len(reply.ids) - len(found))  # the loop cut its response there
        weights[number] = [
            max(pair)
            for pair in zip(found, weights.get(number, [0.0] * len(reply.ids)), strict=True)
        ]
        trained += [reply] if any(found) else []
    return tuple(trained)


_ROW = ("prompt_token_ids", "response_ids", "loss_masks", "rewards", "rollout_logprobs")


def _of_row(output: Mapping[str, Any], key: str, row: int) -> Any:
    column = output.get(key)
    if column is not None and len(column) <= row:
        raise EnvError(
            f"{key} has {len(column)} rows and response_ids {len(output['response_ids'])}; give "
            "one for each"
        )
    return None if column is None else column[row]


def _places(calls: Sequence[EngineCall], prompt: list[int], response: list[int]) -> dict[int, int]:
    """Return the positions in the response of the replies, by the number of the call."""
    full, first, cursor = [*prompt, *response], len(prompt), len(prompt)
    placed: dict[int, int] = {}
    for number, call in enumerate(calls):
        ids = list(call.reply.ids)
        if call.context is not None:
            start = len(call.context)
            kept = full[start : start + len(ids)]
            fits = (
                start >= first
                and full[:start] == call.context
                and bool(kept)
                and kept == ids[: len(kept)]
            )
        else:
            starts = range(cursor, len(full) - len(ids) + 1)
            start = next((at for at in starts if full[at : at + len(ids)] == ids), -1)
            fits = start >= 0
        if fits:
            placed[number], cursor = start - first, start + len(ids)
    return placed


def _of_texts(
    calls: Sequence[EngineCall],
    placed: dict[int, int],
    response: list[int],
    mask: Sequence[Any],
    is_blank: Callable[[Sequence[int]], bool] | None,
    counts: Counter[str],
) -> Sequence[Any]:
    """Place the replies of a row that was built from texts, and return its mask without blank
    ids; see `read_output`."""
    if is_blank is None:
        return mask
    moved = _moved(calls, placed, response, mask)
    placed |= moved
    kept = _without_blanks(mask, response, placed, calls, is_blank)
    counts["replies_in_other_contexts"] += len(moved)
    counts["blank_ids_not_trained"] += sum(map(bool, mask)) - sum(map(bool, kept))
    return kept


def _moved(
    calls: Sequence[EngineCall], placed: Mapping[int, int], response: list[int], mask: Sequence[Any]
) -> dict[int, int]:
    """Return the positions of further replies, whose ids are in the response in order
    and masked as trained."""
    found: dict[int, int] = {}
    cursor = 0
    for number, call in enumerate(calls):
        ids = list(call.reply.ids)
        if number in placed:
            cursor = placed[number] + len(ids)
            continue
        for at in range(cursor, len(response) - len(ids) + 1):
            if response[at : at + len(ids)] == ids and all(mask[at : at + len(ids)]):
                found[number], cursor = at, at + len(ids)
                break
    return found


def _without_blanks(
    mask: Sequence[Any],
    response: Sequence[int],
    placed: Mapping[int, int],
    calls: Sequence[EngineCall],
    is_blank: Callable[[Sequence[int]], bool],
) -> list[Any]:
    """Return the mask without the blank ids that directly follow a reply."""
    kept = list(mask)
    starts = set(placed.values())
    for number, start in placed.items():
        first = last = start + len(calls[number].reply.ids)
        while last < len(kept) and kept[last] and last not in starts:
            last += 1
        if last > first and is_blank(response[first:last]):
            kept[first:last] = [0] * (last - first)
    return kept


def _check_mask(
    mask: Sequence[Any],
    logprobs: Sequence[Any] | None,
    placed: Mapping[int, int],
    calls: Sequence[EngineCall],
    names: tuple[str, str],
) -> None:
    if logprobs is not None and len(logprobs) != len(mask):
        raise EnvError(
            f"{names[1]} has {len(logprobs)} values for {len(mask)} response_ids; give one for "
            "each id"
        )
    sampled = {
        start + at: one
        for number, start in placed.items()
        for at, one in enumerate(calls[number].reply.logprobs)
    }
    for at, one in enumerate(mask):
        if not one:
            continue
        if at not in sampled:
            raise EnvError(
                f"{names[0]}[{at}] is {one}, and the engine did not sample that id there; write 0"
            )
        if logprobs is None or sampled[at] is None:
            continue
        if abs((number_of(logprobs[at]) or 0.0) - sampled[at]) > LOGPROB_TOLERANCE:
            raise EnvError(
                f"{names[1]}[{at}] is {logprobs[at]}, the engine's is {sampled[at]}; pass it on"
            )


def _metrics(output: Mapping[str, Any], counts: Mapping[str, int]) -> dict[str, float]:
    found = {name: float(number) for name, number in counts.items() if number}
    groups = {
        "": output.get("rollout_metrics"),
        "environment/": next(iter(output.get("env_metrics") or ()), None),
    }
    for prefix, group in groups.items():
        for key, value in (group or {}).items():
            if (number := number_of(value)) is not None:
                found[f"{prefix}{key}"] = number
    return found
