"""The page of the viewer: served in parts, or as one file with a run inside."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from turnwise.errors import TraceError
from turnwise.view.web import content
from turnwise.view.web.store import IndexEntry, TrajectoryIndex

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("base.js", "data.js", "charts.js", "overview.js", "table.js", "tokens.js", "trajectory.js", "app.js")
MOST_BYTES = 24 * 2**20
"""Of trajectories and images in a file that is sent; what does not fit is left out, and the page says so."""


@cache
def script() -> str:
    """All of the page's code."""
    return "'use strict';\n" + "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)


@cache
def style() -> str:
    """The page's style sheet."""
    return (ASSETS / "app.css").read_text(encoding="utf-8")


def _page(head: str, body: str) -> str:
    text = (ASSETS / "page.html").read_text(encoding="utf-8")
    return text.replace("<!--HEAD-->", head).replace("<!--BODY-->", body)


def served_page() -> str:
    """The page that asks the server for everything."""
    return _page('<link rel="icon" href="/icon.svg"><link rel="stylesheet" href="/app.css">', '<script src="/app.js"></script>')


ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><path d="M3 4h10M8 4v9M8 8.5h4" '
    'stroke="#4a86e0" stroke-width="2" fill="none" stroke-linecap="round"/></svg>'
)
SERVED: dict[str, Callable[[], tuple[str, str]]] = {
    "/": lambda: ("text/html; charset=utf-8", served_page()),
    "/app.js": lambda: ("text/javascript; charset=utf-8", script()),
    "/icon.svg": lambda: ("image/svg+xml", ICON),
    "/app.css": lambda: ("text/css; charset=utf-8", style()),
}


def self_contained(runs: Iterable[Path], out: Path, *, most_bytes: int = MOST_BYTES) -> int:
    """Write the viewer with its runs inside one file, which needs no server and no network.

    Args:
        runs: run directories.
        out: the file.
        most_bytes: of trajectories and images; the failed, the best and the worst of each step come first.

    Returns:
        How many trajectories are in it.

    Raises:
        TraceError: when the file cannot be written.
    """
    stores = [TrajectoryIndex(path) for path in runs]
    left = most_bytes // max(len(stores), 1)
    data: dict[str, Any] = {"glossary": content.glossary(), "runs": []}
    count = 0
    for store in stores:
        store.update()
        kept, images = _fitting(store, left)
        count += len(kept)
        rows = [content.listed(entry._asdict()) for entry in store.entries if entry.at in kept]
        run = content.shown(content.overview(store) | {"list": rows})
        data["runs"].append(run | {"trajectories": kept, "images": images, "all": len(store.entries)})
    code, css = script(), style()
    policy = (
        f"default-src 'none'; script-src 'sha256-{_digest(code)}'; style-src 'sha256-{_digest(css)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{css}</style>'
    body = f'<script type="application/json" id="data">{embed_json(data)}</script>\n<script>{code}</script>'
    try:
        out.write_text(_page(head, body), encoding="utf-8")
    except OSError as error:
        raise TraceError(f"{out}: cannot be written ({error.strerror}); make room or name another place with --html") from error
    return count


def embed_json(data: Any) -> str:
    """JSON that cannot end the element that it stands in."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, default=str)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _fitting(store: TrajectoryIndex, left: int) -> tuple[dict[int, Any], dict[str, str]]:
    kept: dict[int, Any] = {}
    images: dict[str, str] = {}
    numbers = {entry.at: number for number, entry in enumerate(store.entries)}
    for entry in _telling(store.entries):
        found = content.shown(content.trajectory(store, numbers[entry.at], entry))
        size = len(embed_json(found))
        fresh = {}
        for name in _hashes(found):
            file = store.path / "media" / f"{name}.png"
            if name not in images and file.is_file() and not file.is_symlink():
                fresh[name] = b64encode(file.read_bytes()).decode()
        size += sum(map(len, fresh.values()))
        if size > left:
            continue
        left -= size
        kept[entry.at] = found
        images |= fresh
        if left < 4096:
            break
    return kept, images


def _telling(entries: list[IndexEntry]) -> list[IndexEntry]:
    """Entries, those first that tell most: what failed, each step's worst and best, then the rest."""
    seen: dict[tuple[str, int], int] = {}
    ranked = []
    for entry in sorted(entries, key=lambda e: (e.reward is None, e.reward or 0.0)):
        place = seen[(entry.phase, entry.step)] = seen.get((entry.phase, entry.step), -1) + 1
        ranked.append((0 if entry.error else 1 + place, entry.at, entry))
    return [entry for _, _, entry in sorted(ranked, key=lambda row: row[:2])]


def _hashes(found: Any) -> Iterable[str]:
    if isinstance(found, dict):
        if isinstance(found.get("hash"), str):
            yield found["hash"]
        for value in found.values():
            yield from _hashes(value)
    elif isinstance(found, list):
        for value in found:
            yield from _hashes(value)


def _digest(text: str) -> str:
    return b64encode(sha256(text.encode()).digest()).decode()
