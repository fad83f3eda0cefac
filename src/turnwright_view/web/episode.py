"""The page of an episode: its conversation, its ids with what training made of them, its time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwright.display.diagnosis import FILE as SANITY
from turnwright.display.run_data import (
    PolicyNames,
    Row,
    integer,
    lines_of,
    mapping,
    number,
    sentence_of,
)
from turnwright.display.text import text_of
from turnwright_view.web.episode_rows import EpisodeColumns, content_text
from turnwright_view.web.index import RunIndex
from turnwright_view.web.media import media_of
from turnwright_view.web.texts import truncate
from turnwright_view.web.token_states import FROZEN, Training, states_of

MAX_TOKENS = 20_000
"""Maximum ids of a page with their metrics."""

MAX_ALTERNATIVES = 100_000
"""Maximum alternatives of a page: five of each id that it has."""

MAX_IDS = 200
"""Maximum ids of a span that has no metrics."""

MAX_INFO = 50
"""Maximum entries of a turn's info, and calls of a turn."""


def episode_page(index: RunIndex, columns: EpisodeColumns) -> dict[str, Any]:
    """Return one episode in full; of a record that cannot be shown, the reason as its error.

    Such a record is counted by the index, since its line had nothing wrong until it was opened.
    """
    trained = index.trained(columns)
    try:
        return _page(index, columns, index.record(columns), trained)
    except OSError:
        raise
    except Exception as error:
        index.failed.add(columns.at)
        why = (
            f"the record cannot be read: {type(error).__name__}: {error}; byte {columns.at} of "
            f"{index.trajectories.name}"
        )
        row = {"error": {"type": type(error).__name__, "phase": "reading", "message": why}}
        return _page(index, columns, row, {})


def _page(index: RunIndex, columns: EpisodeColumns, row: Row, trained: Row) -> dict[str, Any]:
    before, behind = index.neighbors(columns.number)
    stop = str(row.get("stop") or "")
    turns = [turn for turn in row.get("turns") or () if isinstance(turn, Mapping)]
    training = Training.of(columns.phase, trained)
    return {
        "key": columns.key.address,
        "row": index.row(columns),
        "number": columns.number,
        "previous": "" if before is None else before.key.address,
        "next": "" if behind is None else behind.key.address,
        "siblings": index.siblings(columns.key),
        "record": {
            "file": str(index.trajectories),
            "at": columns.at,
            "length": columns.length,
        },
        **_outcome(row),
        "stop": truncate(stop),
        "why": sentence_of(stop),
        "advantage": training.advantage,
        "untrained": truncate(columns.untrained),
        "opening": [] if turns else _messages(mapping(row.get("task")).get("messages")),
        "spans": _spans(row, turns, training, index.policies()),
        "turns": [_turn(turn) for turn in turns],
        "failed": [
            _turn(turn) for turn in row.get("failed_turns") or () if isinstance(turn, Mapping)
        ],
        "final": _messages(row.get("final")),
        "timing": _timing(row, turns),
        "sanity": list(_sanity(index.path, columns)),
    }


def _outcome(row: Row) -> dict[str, Any]:
    """Return what became of the episode: rewards, metrics and failures."""
    task = mapping(row.get("task"))
    error = mapping(row.get("error"))
    outcome: dict[str, Any] = {
        "answer": None if task.get("answer") is None else truncate(text_of(task["answer"])),
        "error": _failure(error) if error else None,
        "failures": [_failure(mapping(failure)) for failure in row.get("failures") or ()],
    }
    for name in ("reward", "wall_s", "reward_s"):
        outcome[name] = number(row.get(name))
    for name in ("rewards", "metrics", "branches"):
        table = mapping(row.get(name))
        outcome[name] = {truncate(str(key)): number(value) for key, value in table.items()}
    return outcome


# Spans


def _spans(
    row: Row, turns: Sequence[Row], training: Training, policies: PolicyNames
) -> list[dict[str, Any]]:
    spans = [span for span in row.get("spans") or () if isinstance(span, Mapping)]
    weights = _weights(turns, spans)
    left = MAX_TOKENS
    alternatives_left = MAX_ALTERNATIVES
    pages = []
    for index, span in enumerate(spans):
        is_frozen = policies.is_frozen(span)
        page = _span(span, index, training, weights.get(index), left, is_frozen)
        page["policy"] = truncate(policies.label(span), 200)
        if is_frozen:
            page["untrained"] = FROZEN
            page["untrained_from"] = 0
        left -= len(page.get("tokens") or ())

        alternatives = _alternatives(span, len(page.get("tokens") or ()), alternatives_left)
        if alternatives:
            page["alternatives"] = alternatives
            alternatives_left -= sum(map(len, alternatives))
        pages.append(page)
    return pages


def _span(
    span: Row,
    index: int,
    training: Training,
    weights: Sequence[float | None] | None,
    left: int,
    is_frozen: bool,
) -> dict[str, Any]:
    ids = span["ids"] if isinstance(span.get("ids"), list) else []
    page: dict[str, Any] = {
        "origin": truncate(str(span.get("origin") or "")),
        "parent": integer(span.get("parent")),
        "start": integer(span.get("start")),
        "length": len(ids),
        "agent": truncate(str(span.get("agent") or "main"), 80),
        "text": truncate(str(span.get("text") or "")),
        "version": number(span.get("version")),
        "media": [],
    }
    for block in span.get("media") or ():
        page["media"] += media_of(mapping(block).get("media"))
    if span.get("untrained"):
        page["untrained"] = truncate(str(span["untrained"]), 80)
        page["untrained_from"] = integer(span.get("untrained_from", 0))

    texts = span.get("tokens")
    if not isinstance(texts, list) or len(texts) != len(ids):
        page["ids"] = [integer(token_id) for token_id in ids[:MAX_IDS]]
        count = min(len(ids), MAX_TOKENS)
        page["state"] = states_of(span, index, count, training, weights, is_frozen)
        return page

    count = max(0, min(left, len(ids)))
    page["ids"] = [integer(token_id) for token_id in ids[:count]]
    page["tokens"] = [truncate(str(text), 400) for text in texts[:count]]
    page["state"] = states_of(span, index, count, training, weights, is_frozen)
    page["logprobs"] = _numbers(span.get("logprobs"), count)
    page["trainer"] = _numbers(training.logprobs.get(str(index)), count)
    page["weights"] = None if weights is None else list(weights[:count])
    page |= _advantages(training, index, count, page["state"])
    return page


def _alternatives(span: Row, count: int, left: int) -> list[list[list[Any]]]:
    """Return the alternatives of a span's first `count` ids, as [id, text, logprob] each.

    From where more than `left` would be sent, ids have none.
    """
    rows = span.get("alternatives")
    texts = span.get("alternative_tokens")
    if not isinstance(rows, list) or not isinstance(texts, list):
        return []

    alternatives: list[list[list[Any]]] = []
    for row, row_texts in zip(rows[:count], texts, strict=False):
        left -= len(row)
        if left < 0:
            break
        of_id: list[list[Any]] = []
        for (token_id, logprob), text in zip(row, row_texts, strict=False):
            value = number(logprob)
            if value is not None:
                of_id.append([integer(token_id), truncate(str(text), 80), value])
        alternatives.append(of_id)
    return alternatives


def _advantages(
    training: Training, index: int, count: int, states: Sequence[Sequence[Any]]
) -> dict[str, Any]:
    """Return the advantages of ids: one number where all are alike."""
    values = _numbers(training.advantages.get(str(index)), count)
    if values and len(set(values)) > 1:
        return {"advantages": values, "advantage": None}
    is_trained = any(state == "trained" for _, _, state, _ in states)
    one = values[0] if values else training.advantage
    return {"advantages": None, "advantage": one if is_trained else None}


def _numbers(values: Any, count: int) -> list[float | None]:
    return [number(value) for value in values[:count]] if isinstance(values, list) else []


def _weights(turns: Sequence[Row], spans: Sequence[Row]) -> dict[int, list[float | None]]:
    """Return the weights that an agent function gave to sampled ids, by span."""
    weights: dict[int, list[float | None]] = {}
    for turn in turns:
        of_turn = turn.get("weights")
        if not isinstance(of_turn, list):
            continue
        values = [number(weight) for weight in of_turn]
        for index in turn.get("spans") or ():
            if isinstance(index, int) and 0 <= index < len(spans):
                length = len(spans[index].get("ids") or ())
                weights[index] = values[:length]
                values = values[length:]
    return weights


# Turns


def _turn(turn: Row) -> dict[str, Any]:
    info = mapping(turn.get("info"))
    inserted = turn.get("inserted")
    page: dict[str, Any] = {
        "agent": truncate(str(turn.get("agent") or "main"), 80),
        "spans": [index for index in turn.get("spans") or () if isinstance(index, int)],
        "cached": integer(turn.get("cached", 0)),
        "messages": _messages(turn.get("messages")),
        "reply": _message(turn.get("reply")),
        "inserted": None if inserted is None else truncate(str(inserted)),
        "finish": truncate(str(turn.get("finish") or ""), 80),
        "retries": number(turn.get("retries")) or 0,
        "info": {},
        "calls": _calls(info),
    }
    for name in ("parent", "prompt", "context", "kept"):
        page[name] = integer(turn.get(name))
    for name in ("reward", "generate_s", "env_s"):
        page[name] = number(turn.get(name))
    for name, value in list(info.items())[:MAX_INFO]:
        if name != "tool_log":
            page["info"][truncate(str(name), 80)] = truncate(text_of(value), 2000)
    return page


def _calls(info: Row) -> list[dict[str, Any]]:
    """Return the calls of tools that a turn's environment logged."""
    log = info.get("tool_log")
    calls = []
    for entry in log[:MAX_INFO] if isinstance(log, list) else ():
        call = mapping(entry)
        calls.append(
            {
                "tool": truncate(str(call.get("tool")), 80),
                "s": number(call.get("s")),
                "error": truncate(str(call.get("error") or ""), 80),
            }
        )
    return calls


def _timing(row: Row, turns: Sequence[Row]) -> dict[str, Any]:
    """Return where the time of an episode went, turn after turn.

    The record says how long a turn took, not when it began: waiting (for a slot, for the engine's
    queue, rendering) is known of the whole episode only.
    """
    of_turns = []
    spent = number(row.get("reward_s")) or 0.0
    for index, turn in enumerate(turns, 1):
        generate_s = number(turn.get("generate_s"))
        env_s = number(turn.get("env_s"))
        spent += (generate_s or 0.0) + (env_s or 0.0)
        of_turns.append(
            {
                "turn": index,
                "wait_s": None,
                "generate_s": generate_s,
                "env_s": env_s,
                "tools": _calls(mapping(turn.get("info"))),
            }
        )
    wall_s = number(row.get("wall_s"))
    return {
        "start": 0,
        "turns": of_turns,
        "reward_s": number(row.get("reward_s")),
        "wait_s": None if wall_s is None else max(0.0, wall_s - spent),
        "wall_s": wall_s,
    }


# Messages


def _messages(messages: Any) -> list[dict[str, Any]]:
    return [_message(message) for message in messages or ()]


def _message(message: Any) -> dict[str, Any]:
    row = mapping(message)
    content = row.get("content") if row else message
    images: list[dict[str, Any]] = []
    if isinstance(content, Sequence) and not isinstance(content, str):
        for part in content:
            images += media_of(part)
        texts = [
            content_text([part]) if isinstance(part, Mapping) else text_of(part) for part in content
        ]
        content = "".join(texts)
    calls = []
    for call in row.get("tool_calls") or ():
        function = mapping(mapping(call).get("function"))
        calls.append(
            {
                "name": truncate(str(function.get("name") or ""), 200),
                "arguments": truncate(text_of(function.get("arguments"))),
                "error": truncate(str(mapping(call).get("error") or ""), 400),
            }
        )
    return {
        "role": truncate(str(row.get("role") or "?"), 80),
        "name": truncate(str(row.get("name") or ""), 80),
        "text": truncate(text_of(content)),
        "reasoning": truncate(text_of(row.get("reasoning_content") or "")),
        "calls": calls,
        "images": images,
    }


def _failure(failure: Row) -> dict[str, Any]:
    names = ("type", "message", "phase", "traceback", "kind", "place", "recovery")
    page: dict[str, Any] = {name: truncate(str(failure.get(name) or "")) for name in names}
    page["turn"] = integer(failure.get("turn", -1))
    return page


def _sanity(path: Path, columns: EpisodeColumns) -> Iterator[dict[str, Any]]:
    """Yield the sanity check's findings in this episode: sampled, canonical, sent."""
    key = columns.key.recorded
    for _, row in lines_of(path / SANITY, []):
        if row.get("key") != key:
            continue
        finding: dict[str, Any] = {
            name: truncate(str(row.get(name))) for name in ("cause", "sentence")
        }
        finding["turn"] = integer(row.get("turn"))
        finding["columns"] = [
            [name, truncate(str(row.get(name) or ""), 2000)]
            for name in ("sampled", "canonical", "sent")
        ]
        yield finding
