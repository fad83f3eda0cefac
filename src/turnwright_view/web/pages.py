"""Page assembly and JSON for the page."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from turnwright.display.diagnosis import FILE as SANITY
from turnwright.display.diagnosis import diagnose, findings
from turnwright.display.run_data import (
    Row,
    integer,
    lines_of,
    mapping,
    number,
    read_run,
    sentence_of,
)
from turnwright.display.text import csp_digest, text_of, visible
from turnwright.errors import TraceError
from turnwright.records.episode_metrics import METRICS, flatten_row
from turnwright_view.web.index import IndexEntry, TrajectoryIndex

MAX_TEXT = 20_000  # maximum characters of one text
MAX_TOKENS = 20_000  # maximum sampled ids of a trajectory with their metrics
HASH = re.compile(r"[0-9a-f]{64}")


def overview(store: TrajectoryIndex, since: int = 0) -> dict[str, Any]:
    """Return the first page of a run, with rows of metrics from index `since` on."""
    from turnwright_view.report import settings

    run = read_run(store.path)
    return {
        "name": name_of(store),
        "rows": [
            {name: truncate(str(row[name])) for name in ("phase", "name", "mode") if name in row}
            | {truncate(name): round(value, 9) for name, value in flatten_row(row)}
            for row in run.rows[since:]
        ],
        "since": since,
        "summary": {
            truncate(str(k)): v
            for k, v in run.summary.items()
            if isinstance(v, (bool, str)) or number(v) is not None
        },
        "settings": [[truncate(part) for part in row] for row in settings(run)[0]],
        "diagnoses": [
            [one.name, truncate(one.fault), truncate(one.remedy)]
            for one in diagnose(run.rows, run.summary)
        ],
        "findings": [
            {
                "cause": truncate(one.cause),
                "sentence": truncate(one.sentence),
                "where": truncate(one.where),
                "count": one.count,
            }
            | {"columns": [[name, truncate(text)] for name, text in one.columns]}
            for one in findings(store.path, run.rows, [])
        ],
        "problems": [truncate(problem) for problem in (*run.problems, *store.problems)],
        "count": len(store.entries),
        "read": store.read,
        "size": store.size,
        "facets": facets(store),
    }


def name_of(store: TrajectoryIndex) -> str:
    """Return the name of a run: its directory."""
    return truncate(store.path.resolve().name, 200)


def facets(store: TrajectoryIndex) -> dict[str, list[str]]:
    """Return the values that the table can be filtered by."""
    return {
        name: [truncate(value, 400) for value in values] for name, values in store.facets().items()
    }


def glossary() -> dict[str, list[str]]:
    """Return unit, meaning and advice of each metric."""
    return {one.name: [one.unit, one.meaning, one.advice] for one in METRICS}


def truncate(text: str, limit: int = MAX_TEXT) -> str:
    """Truncate a text with a note."""
    if len(text) > limit:
        return text[:limit] + f"\n\u2026 {len(text) - limit:,} more characters are left out"
    return text


def escape_json(value: Any) -> Any:
    """Return JSON with control and hidden characters escaped in all texts and keys; everything sent
    to the page passes here."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, Mapping):
        return {visible(str(name)): escape_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [item if type(item) in (int, float) else escape_json(item) for item in value]
    return value


def listed(row: Row) -> dict[str, Any]:
    """Return a trajectory's row of a table."""
    texts = {name: truncate(value, 400) for name, value in row.items() if isinstance(value, str)}
    return {**row, **texts, "tools": [truncate(name) for name in row["tools"]]}


NO_TRAINING = "not of a training step"
"""Why the ids of gates, evaluations and rollouts are not trained."""


def trajectory(store: TrajectoryIndex, number_: int, entry: IndexEntry) -> dict[str, Any]:
    """Return one trajectory in full; of a record that cannot be read, the
    reason in place of its error.

    Such a record is counted by the index, since its line had nothing wrong until it was opened.
    """
    trained = store.trained(entry)
    try:
        return _page_of(store, number_, entry, store.row(entry), trained)
    except OSError:
        raise
    except Exception as error:
        store.failed.add(entry.at)
        why = (
            f"the record cannot be read: {type(error).__name__}: {error}; byte {entry.at} of "
            f"{store.trajectories.name}"
        )
        row = {"error": {"type": type(error).__name__, "phase": "reading", "message": why}}
        return _page_of(store, number_, entry, row, {})


def _page_of(
    store: TrajectoryIndex, number_: int, entry: IndexEntry, row: Row, trained: Row
) -> dict[str, Any]:
    spans = [span for span in row.get("spans") or () if isinstance(span, Mapping)]
    logprobs, advantages = mapping(trained.get("logprobs")), mapping(trained.get("advantages"))
    left, policies = MAX_TOKENS, read_run(store.path).policies
    rows = []
    for index, span in enumerate(spans):
        rows.append(_span(span, logprobs.get(str(index)), advantages.get(str(index)), left))
        rows[-1]["policy"] = truncate(policies.label(span), 200)
        if policies.is_frozen(span):
            rows[-1] |= {"untrained": "frozen", "untrained_from": 0}
        left -= len(rows[-1].get("tokens") or ())
    task, error, stop = (
        mapping(row.get("task")),
        mapping(row.get("error")),
        str(row.get("stop") or ""),
    )
    return {
        "at": entry.at,
        "number": number_,
        "key": {name: truncate(str(value)) for name, value in mapping(row.get("key")).items()}
        | {"step": str(entry.step)},
        "answer": None if task.get("answer") is None else truncate(text_of(task["answer"])),
        "opening": [_message(message) for message in task.get("messages") or ()]
        if not row.get("turns")
        else [],
        **{name: number(row.get(name)) for name in ("reward", "wall_s", "reward_s")},
        **{
            name: {truncate(str(k)): number(v) for k, v in mapping(row.get(name)).items()}
            for name in ("rewards", "metrics", "branches")
        },
        "stop": truncate(stop),
        "why": sentence_of(stop),
        "error": _failure(error) if error else None,
        "failures": [_failure(mapping(one)) for one in row.get("failures") or ()],
        "advantage": number(trained.get("advantage")),
        "untrained": truncate(str(trained.get("reason") or ""))
        if entry.phase == "train"
        else NO_TRAINING,
        "spans": rows,
        "turns": [_turn(turn) for turn in row.get("turns") or () if isinstance(turn, Mapping)],
        "failed": [
            _turn(turn) for turn in row.get("failed_turns") or () if isinstance(turn, Mapping)
        ],
        "final": [_message(message) for message in row.get("final") or ()],
        "siblings": [
            listed(one._asdict()) | {"advantage": number(store.trained(one).get("advantage"))}
            for one in store.siblings(entry)
        ],
        "sanity": list(_sanity(store.path, entry)),
    }


def _span(span: Row, trainer: Any, advantages: Any, left: int) -> dict[str, Any]:
    ids = span["ids"] if isinstance(span.get("ids"), list) else []
    one: dict[str, Any] = {
        "origin": truncate(str(span.get("origin") or "")),
        **{name: integer(span.get(name)) for name in ("parent", "start")},
        "length": len(ids),
        "agent": truncate(str(span.get("agent") or "main"), 80),
        "text": truncate(str(span.get("text") or "")),
        "version": number(span.get("version")),
        "media": [
            found
            for block in span.get("media") or ()
            for found in media_of(mapping(block).get("media"))
        ],
    }
    if span.get("untrained"):
        one |= {
            "untrained": truncate(str(span["untrained"]), 80),
            "untrained_from": integer(span.get("untrained_from", 0)),
        }
    texts, logprobs = span.get("tokens"), span.get("logprobs")
    if isinstance(texts, list) and len(texts) == len(ids):
        count = max(0, min(left, len(ids)))
        one["ids"] = list(map(integer, ids[:count]))
        one["tokens"] = [truncate(str(text), 400) for text in texts[:count]]
        one |= {"logprobs": [], "trainer": []}
        values = {"logprobs": logprobs, "trainer": trainer, "advantages": advantages}
        one |= {
            name: [number(v) for v in found[:count]]
            for name, found in values.items()
            if isinstance(found, list)
        }
    else:
        one["ids"] = list(map(integer, ids[:200]))
    return one


def _turn(turn: Row) -> dict[str, Any]:
    info = mapping(turn.get("info"))
    calls = info["tool_log"] if isinstance(info.get("tool_log"), list) else []
    return {
        "agent": truncate(str(turn.get("agent") or "main"), 80),
        "spans": [index for index in turn.get("spans") or () if isinstance(index, int)],
        **{name: integer(turn.get(name)) for name in ("parent", "prompt", "context")},
        "cached": integer(turn.get("cached", 0)),
        "messages": [_message(message) for message in turn.get("messages") or ()],
        "reply": _message(turn.get("reply")),
        "inserted": None if turn.get("inserted") is None else truncate(str(turn["inserted"])),
        "finish": truncate(str(turn.get("finish") or ""), 80),
        **{name: number(turn.get(name)) for name in ("reward", "generate_s", "env_s")},
        "retries": number(turn.get("retries")) or 0,
        "info": {
            truncate(str(k), 80): truncate(text_of(v), 2000)
            for k, v in list(info.items())[:50]
            if k != "tool_log"
        },
        "calls": [
            {"tool": truncate(str(mapping(c).get("tool")), 80), "s": number(mapping(c).get("s"))}
            | {"error": truncate(str(mapping(c).get("error") or ""), 80)}
            for c in calls[:50]
        ],
    }


def _message(message: Any) -> dict[str, Any]:
    row = mapping(message)
    content = row.get("content") if row else message
    images: list[dict[str, Any]] = []
    if isinstance(content, Sequence) and not isinstance(content, str):
        for part in content:
            images += media_of(part)
        content = "".join(
            str(mapping(p).get("text") or "") if isinstance(p, Mapping) else text_of(p)
            for p in content
        )
    calls = []
    for call in row.get("tool_calls") or ():
        function = mapping(mapping(call).get("function"))
        name, error = str(function.get("name") or ""), str(mapping(call).get("error") or "")
        calls.append(
            {"name": truncate(name, 200), "arguments": truncate(text_of(function.get("arguments")))}
        )
        calls[-1]["error"] = truncate(error, 400)
    author = {
        "role": truncate(str(row.get("role") or "?"), 80),
        "name": truncate(str(row.get("name") or ""), 80),
    }
    texts = {
        "text": truncate(text_of(content)),
        "reasoning": truncate(text_of(row.get("reasoning_content") or "")),
    }
    return {**author, **texts, "calls": calls, "images": images}


def media_of(part: Any) -> list[dict[str, Any]]:
    """Return the images of a content part that are in the run's media folder, by hash."""
    row = mapping(part)
    if row.get("type") == "video":
        return [found for frame in list(row.get("frames") or ())[:64] for found in media_of(frame)]
    name = row.get("image")
    if row.get("type") != "image" or not isinstance(name, str) or not HASH.fullmatch(name):
        return []
    return [
        {"hash": name, "width": integer(row.get("width")), "height": integer(row.get("height"))}
    ]


def _failure(failure: Row) -> dict[str, Any]:
    names = ("type", "message", "phase", "traceback", "kind", "place", "recovery")
    return {name: truncate(str(failure.get(name) or "")) for name in names} | {
        "turn": integer(failure.get("turn", -1))
    }


def _sanity(path: Path, entry: IndexEntry) -> Iterator[dict[str, Any]]:
    """Yield the sanity check's findings in this trajectory: sampled, canonical, sent."""
    key = [entry.phase, entry.played, entry.task, entry.sample, entry.attempt]
    for _, row in lines_of(path / SANITY, []):
        if row.get("key") == key:
            columns = [
                [name, truncate(str(row.get(name) or ""), 2000)]
                for name in ("sampled", "canonical", "sent")
            ]
            texts = {name: truncate(str(row.get(name))) for name in ("cause", "sentence")}
            yield texts | {"columns": columns, "turn": integer(row.get("turn"))}


ASSETS = Path(__file__).parent / "assets"
SCRIPTS = (
    "base.js",
    "data.js",
    "charts.js",
    "overview.js",
    "table.js",
    "tokens.js",
    "trajectory.js",
    "app.js",
)
MAX_BYTES = 24 * 2**20
"""Maximum bytes of trajectories and images in a self-contained file.

The page reports what is left out.
"""


@cache
def script() -> str:
    """Return the page's code."""
    return "'use strict';\n" + "\n".join(
        (ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS
    )


@cache
def style() -> str:
    """Return the page's style sheet."""
    return (ASSETS / "app.css").read_text(encoding="utf-8")


def _page(head: str, body: str) -> str:
    text = (ASSETS / "page.html").read_text(encoding="utf-8")
    return text.replace("<!--HEAD-->", head).replace("<!--BODY-->", body)


SERVED_HEAD = '<link rel="icon" href="/icon.svg"><link rel="stylesheet" href="/app.css">'
ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><path d="M3 4h10M8 4v9M8 8.5h4" '
    'stroke="#4a86e0" stroke-width="2" fill="none" stroke-linecap="round"/></svg>'
)
SERVED: dict[str, Callable[[], tuple[str, str]]] = {
    "/": lambda: (
        "text/html; charset=utf-8",
        _page(SERVED_HEAD, '<script src="/app.js"></script>'),
    ),
    "/app.js": lambda: ("text/javascript; charset=utf-8", script()),
    "/icon.svg": lambda: ("image/svg+xml", ICON),
    "/app.css": lambda: ("text/css; charset=utf-8", style()),
}


def self_contained(runs: Iterable[Path], out: Path, *, max_bytes: int = MAX_BYTES) -> int:
    """Write the viewer and its runs as one file, which needs no server and no network; return
    its number of trajectories.

    Failures and each step's worst and best come first within `max_bytes` of
    trajectories and images.
    """
    stores = [TrajectoryIndex(path) for path in runs]
    left = max_bytes // max(len(stores), 1)
    data: dict[str, Any] = {"glossary": glossary(), "runs": []}
    count = 0
    for store in stores:
        store.update()
        kept, images = _fitting(store, left)
        count += len(kept)
        rows = [listed(entry._asdict()) for entry in store.entries if entry.at in kept]
        run = escape_json(overview(store) | {"list": rows})
        data["runs"].append(
            run | {"trajectories": kept, "images": images, "all": len(store.entries)}
        )
    code, css = script(), style()
    policy = (
        f"default-src 'none'; script-src 'sha256-{csp_digest(code)}'; style-src "
        f"'sha256-{csp_digest(css)}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{css}</style>'
    body = (
        '<script type="application/json" '
        f'id="data">{embed_json(data)}</script>\n<script>{code}</script>'
    )
    try:
        out.write_text(_page(head, body), encoding="utf-8")
    except OSError as error:
        why = f"cannot be written ({error.strerror}); free space or choose another path with --html"
        raise TraceError(f"{out}: {why}") from error
    return count


def embed_json(data: Any) -> str:
    """Return JSON that cannot end its HTML element."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, default=str)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _fitting(store: TrajectoryIndex, left: int) -> tuple[dict[int, Any], dict[str, str]]:
    kept: dict[int, Any] = {}
    images: dict[str, str] = {}
    numbers = {entry.at: number for number, entry in enumerate(store.entries)}
    seen: Counter[tuple[str, int]] = Counter()
    ranked = []  # by informativeness: failures, each step's worst and best, then the rest
    for entry in sorted(store.entries, key=lambda e: (e.reward is None, e.reward or 0.0)):
        seen[entry.phase, entry.step] += 1
        ranked.append((0 if entry.error else seen[entry.phase, entry.step], entry.at, entry))
    for _, _, entry in sorted(ranked, key=lambda row: row[:2]):
        found = escape_json(trajectory(store, numbers[entry.at], entry))
        fresh = {}
        for name in _hashes(found):
            file = store.path / "media" / f"{name}.png"
            if name not in images and file.is_file() and not file.is_symlink():
                fresh[name] = b64encode(file.read_bytes()).decode()
        size = len(embed_json(found)) + sum(map(len, fresh.values()))
        if size > left:
            continue
        left -= size
        kept[entry.at] = found
        images |= fresh
        if left < 4096:
            break
    return kept, images


def _hashes(found: Any) -> Iterable[str]:
    if isinstance(found, dict):
        if isinstance(found.get("hash"), str):
            yield found["hash"]
        for value in found.values():
            yield from _hashes(value)
    elif isinstance(found, list):
        for value in found:
            yield from _hashes(value)
