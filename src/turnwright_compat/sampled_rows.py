"""Rows of ids, masks and rewards that a user's own loop returns, as weights and rewards of
the replies it sampled.

The engine of such a loop keeps an `EngineCall` for each reply. `read_output` finds the replies in
the rows, refuses a mask that trains what was not sampled, and passes the masks on as weights.
`sampling_options` and `image_of` read what the loop asked of the engine.
"""

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
"""Largest difference of a logprob in a row from the one that the engine returned."""
_LENGTHS = ("max_tokens", "max_new_tokens", "max_generate_length")


def sampling_options(
    given: Mapping[str, Any], media: Sequence[Any] | None = None
) -> dict[str, Any]:
    """Return a framework's sampling parameters by our names, without those that leave
    the choice to the run."""
    top_k = given.get("top_k")
    if top_k is not None:
        top_k = max(0, top_k)  # -1 is no limit there, 0 here

    options = {
        "max_tokens": next((given[name] for name in _LENGTHS if given.get(name)), None),
        "temperature": given.get("temperature"),
        "top_p": given.get("top_p"),
        "top_k": top_k,
        "min_p": given.get("min_p"),
        "stop": _as_tuple(given.get("stop")),
        "stop_ids": _as_tuple(given.get("stop_token_ids")),
        "media": tuple(map(image_of, _as_tuple(media))),
    }
    return {key: value for key, value in options.items() if value not in (None, ())}


def image_of(value: Any) -> Any:
    """Return an image of a request as a part of a message: also a data URL, a path, base64 text, or
    a dict with one of them."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")

    if isinstance(value, str) and not value.startswith("data:"):
        value = Path(value) if _is_file(value) else f"data:image;base64,{value}"
    if isinstance(value, (Image, ImageRef, Video, VideoRef)):
        return value
    return Image(value)


def _is_file(text: str) -> bool:
    """Whether a text is the path of a file; base64 is often longer than a name may be."""
    try:
        return len(text) < 4096 and Path(text).is_file()
    except (OSError, ValueError):
        return False


def _as_tuple(value: Any) -> tuple[Any, ...]:
    """Return a parameter that may be one value or several as a tuple."""
    if value is None or value == "":
        return ()
    if isinstance(value, (str, int)):
        return (value,)
    return tuple(value)


@dataclass(slots=True)
class EngineCall:
    """One call of the generator's engine: the ids that it knew, and the reply."""

    context: list[int] | None
    """None where the generator gave messages."""
    reply: Any


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of a `GeneratorOutput`; what the output has no column of is None."""

    number: int
    prompt: list[int]
    response: list[int]
    mask: Sequence[Any]
    reward: Any
    logprobs: Sequence[Any] | None


_Starts = dict[int, int]
"""Number of a call -> the position in a row's response at which its reply starts."""


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
    turn_rewards = [0.0] * len(calls)
    episode_reward = 0.0
    by_row: list[tuple[float, tuple[Any, ...]]] = []
    counts: Counter[str] = Counter()
    row_count = len(output["response_ids"])

    for number in range(row_count):
        row = _read_row(output, number, mask_name)
        starts = _places(calls, row.prompt, row.response)
        mask = row.mask
        if is_blank is not None:
            mask = _mask_of_texts(calls, starts, row, is_blank, counts)
        names = (f"row {number}: {mask_name}", f"row {number}: {logprobs_name}")
        _check_mask(mask, row.logprobs, starts, calls, names)
        trained = _add_weights(weights, mask, starts, calls)

        if isinstance(row.reward, (list, tuple)):
            episode_reward = _add_token_rewards(row, starts, turn_rewards, episode_reward)
        elif own_rewards:
            by_row.append((float(row.reward), trained))
        elif number == row_count - 1:
            episode_reward += as_number(row.reward, "the reward") or 0.0

    # A reply that is in no row, or not as it was sampled, is not trained.
    for number, call in enumerate(calls):
        weigh(call.reply, weights.get(number, [0.0] * len(call.reply.ids)))
    return Scores(
        episode_reward,
        tuple(turn_rewards),
        metrics=_metrics(output, counts),
        rows=tuple(by_row),
    )


def _read_row(output: Mapping[str, Any], number: int, mask_name: str) -> _Row:
    prompt = _cell(output, "prompt_token_ids", number)
    response = _cell(output, "response_ids", number)
    mask = _cell(output, "loss_masks", number)
    reward = _cell(output, "rewards", number)
    logprobs = _cell(output, "rollout_logprobs", number)

    if mask is None or len(mask) != len(response):
        raise EnvError(
            f"row {number}: {len(response)} response_ids and {len(mask or ())} {mask_name}; give "
            "one for each id"
        )
    return _Row(number, list(prompt or ()), list(response), mask, reward, logprobs)


def _add_token_rewards(
    row: _Row, starts: _Starts, turn_rewards: list[float], episode_reward: float
) -> float:
    """Add a row's reward of each id to the turn of the last reply that starts at it or earlier.

    Return the reward of the episode, with what stands before the first reply.
    """
    if len(row.reward) != len(row.response):
        raise EnvError(
            f"row {row.number}: {len(row.response)} response_ids and {len(row.reward)} rewards; "
            "give one for each id"
        )

    for position, token_reward in enumerate(row.reward):
        value = as_number(token_reward, "a token's reward")
        if not value:
            continue
        earlier = [call for call, start in starts.items() if start <= position]
        if earlier:
            turn_rewards[max(earlier, key=starts.__getitem__)] += value
        else:
            episode_reward += value
    return episode_reward


def _add_weights(
    weights: dict[int, list[float]],
    mask: Sequence[Any],
    starts: _Starts,
    calls: Sequence[EngineCall],
) -> tuple[Any, ...]:
    """Add a row's mask to the weights of the calls; return the replies that it trains.

    A reply that several rows hold has the largest of its weights at each id.
    """
    trained = []
    for number, start in starts.items():
        reply = calls[number].reply
        in_row = [float(value) for value in mask[start : start + len(reply.ids)]]
        in_row += [0.0] * (len(reply.ids) - len(in_row))  # the loop cut its response there

        in_other_rows = weights.get(number, [0.0] * len(reply.ids))
        weights[number] = [max(pair) for pair in zip(in_row, in_other_rows, strict=True)]
        if any(in_row):
            trained.append(reply)
    return tuple(trained)


def _cell(output: Mapping[str, Any], key: str, row: int) -> Any:
    column = output.get(key)
    if column is None:
        return None
    if len(column) <= row:
        raise EnvError(
            f"{key} has {len(column)} rows and response_ids {len(output['response_ids'])}; give "
            "one for each"
        )
    return column[row]


def _places(calls: Sequence[EngineCall], prompt: list[int], response: list[int]) -> _Starts:
    """Find the replies that a row holds after the very ids that the engine received.

    A reply to messages, whose context is not known, is the next place where its ids stand.
    """
    row_ids = [*prompt, *response]
    response_start = len(prompt)
    cursor = response_start
    starts: _Starts = {}

    for number, call in enumerate(calls):
        ids = list(call.reply.ids)
        if call.context is not None:
            start = len(call.context)
            kept = row_ids[start : start + len(ids)]  # shorter where the loop cut its response
            fits = (
                start >= response_start
                and row_ids[:start] == call.context
                and bool(kept)
                and kept == ids[: len(kept)]
            )
        else:
            start = _find(row_ids, ids, cursor)
            fits = start >= 0

        if fits:
            starts[number] = start - response_start
            cursor = start + len(ids)
    return starts


def _find(row_ids: Sequence[int], ids: list[int], first: int) -> int:
    """Return the first position from `first` on at which some ids stand; -1 without one."""
    positions = range(first, len(row_ids) - len(ids) + 1)
    return next((at for at in positions if row_ids[at : at + len(ids)] == ids), -1)


def _mask_of_texts(
    calls: Sequence[EngineCall],
    starts: _Starts,
    row: _Row,
    is_blank: Callable[[Sequence[int]], bool],
    counts: Counter[str],
) -> Sequence[Any]:
    """Return the mask of a row that was built from texts, without blank ids; see `read_output`.

    The replies that the row holds in other contexts are added to `starts`.
    """
    moved = _replies_elsewhere(calls, starts, row)
    starts |= moved
    kept = _without_blanks(row, starts, calls, is_blank)

    counts["replies_in_other_contexts"] += len(moved)
    counts["blank_ids_not_trained"] += sum(map(bool, row.mask)) - sum(map(bool, kept))
    return kept


def _replies_elsewhere(calls: Sequence[EngineCall], starts: _Starts, row: _Row) -> _Starts:
    """Return the positions of further replies, whose ids are in the response in order
    and masked as trained."""
    further: _Starts = {}
    cursor = 0
    for number, call in enumerate(calls):
        ids = list(call.reply.ids)
        if number in starts:
            cursor = starts[number] + len(ids)
            continue

        for position in range(cursor, len(row.response) - len(ids) + 1):
            end = position + len(ids)
            if row.response[position:end] == ids and all(row.mask[position:end]):
                further[number] = position
                cursor = end
                break
    return further


def _without_blanks(
    row: _Row,
    starts: _Starts,
    calls: Sequence[EngineCall],
    is_blank: Callable[[Sequence[int]], bool],
) -> list[Any]:
    """Return the mask without the blank ids that directly follow a reply."""
    kept = list(row.mask)
    reply_starts = set(starts.values())
    for number, start in starts.items():
        reply_end = start + len(calls[number].reply.ids)
        blank_end = reply_end
        while blank_end < len(kept) and kept[blank_end] and blank_end not in reply_starts:
            blank_end += 1

        if blank_end > reply_end and is_blank(row.response[reply_end:blank_end]):
            kept[reply_end:blank_end] = [0] * (blank_end - reply_end)
    return kept


def _check_mask(
    mask: Sequence[Any],
    logprobs: Sequence[Any] | None,
    starts: _Starts,
    calls: Sequence[EngineCall],
    names: tuple[str, str],
) -> None:
    """Refuse a mask or logprobs that are not of what the engine sampled.

    `names`: what errors call the mask and the logprobs.
    """
    mask_name, logprobs_name = names
    if logprobs is not None and len(logprobs) != len(mask):
        raise EnvError(
            f"{logprobs_name} has {len(logprobs)} values for {len(mask)} response_ids; give one "
            "for each id"
        )

    sampled = {
        start + offset: logprob
        for number, start in starts.items()
        for offset, logprob in enumerate(calls[number].reply.logprobs)
    }
    for position, weight in enumerate(mask):
        if not weight:
            continue
        if position not in sampled:
            raise EnvError(
                f"{mask_name}[{position}] is {weight}, and the engine did not sample that id "
                "there; write 0"
            )

        engine_logprob = sampled[position]
        if logprobs is None or engine_logprob is None:
            continue
        if abs((number_of(logprobs[position]) or 0.0) - engine_logprob) > LOGPROB_TOLERANCE:
            raise EnvError(
                f"{logprobs_name}[{position}] is {logprobs[position]}, the engine's is "
                f"{engine_logprob}; pass it on"
            )


def _metrics(output: Mapping[str, Any], counts: Mapping[str, int]) -> dict[str, float]:
    """Return the numbers among the metrics that the loop reports, and our counts."""
    metrics = {name: float(count) for name, count in counts.items() if count}
    reported = {
        "": output.get("rollout_metrics"),
        "environment/": next(iter(output.get("env_metrics") or ()), None),
    }
    for prefix, values in reported.items():
        for key, value in (values or {}).items():
            number = number_of(value)
            if number is not None:
                metrics[f"{prefix}{key}"] = number
    return metrics
