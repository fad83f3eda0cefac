"""Images of a run for the page: by the hash of their pixels, from the run's media folder alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from turnwright.display.run_data import integer, mapping

MAX_FRAMES = 64
"""Maximum frames of a clip on a page."""

_HASH = re.compile(r"[0-9a-f]{64}")


def media_of(part: Any) -> list[dict[str, Any]]:
    """Return the images of a content part that are in the run's media folder, by hash."""
    row = mapping(part)
    if row.get("type") == "video":
        images: list[dict[str, Any]] = []
        for frame in list(row.get("frames") or ())[:MAX_FRAMES]:
            images += media_of(frame)
        return images
    name = row.get("image")
    if row.get("type") != "image" or not isinstance(name, str) or not _HASH.fullmatch(name):
        return []
    return [
        {"hash": name, "width": integer(row.get("width")), "height": integer(row.get("height"))}
    ]


def image_file(run: Path, name: str) -> Path | None:
    """Return the file of an image; None for what is no hash, missing, or a symbolic link."""
    if not _HASH.fullmatch(name):
        return None
    file = run / "media" / f"{name}.png"
    if file.is_symlink() or file.parent.is_symlink() or not file.is_file():
        return None
    return file
