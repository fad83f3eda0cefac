"""Images of a run for the page: by the hash of their pixels, from the run's media folder alone."""

from __future__ import annotations

import re
from base64 import b64encode
from io import BytesIO
from pathlib import Path
from typing import Any

from turnwright.display.run_data import integer, mapping
from turnwright.errors import MediaError
from turnwright.media import MediaLimits, MediaStore
from turnwright.types import ImageRef

MAX_FRAMES = 64
"""Maximum frames of a clip on a page."""

MAX_PICTURES = 300
"""Maximum different images of a run in a file."""

MAX_SIDE = 256
"""Maximum side of an image in a file, in pixels."""

MAX_PIXELS = 20_000_000
"""Maximum pixels of an image that is decoded for a file."""

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


class Thumbnails:
    """Small pictures of a run's images for a file, within the limits of one.

    No file is embedded as it is: its pixels are decoded within limits, compared with the hash in
    its name, and written as a small PNG. A file in place of an image is left out.
    """

    def __init__(self, run: Path) -> None:
        self._store = MediaStore(run / "media", limits=MediaLimits(pixels=MAX_PIXELS))
        self._run = run
        self._left = MAX_PICTURES
        self._known: dict[str, str] = {}

    def png(self, name: str) -> str:
        """Return the image of a hash as base64; empty where there is none or no room."""
        if name not in self._known:
            if self._left <= 0 or image_file(self._run, name) is None:
                return ""
            self._left -= 1
            self._known[name] = self._made(name)
        return self._known[name]

    def _made(self, name: str) -> str:
        try:
            from PIL import Image as Pillow

            picture = Pillow.fromarray(self._store.pixels(ImageRef(name)))
        except (MediaError, ImportError, OSError, ValueError, TypeError):
            return ""
        picture.thumbnail((MAX_SIDE, MAX_SIDE))
        out = BytesIO()
        picture.save(out, "PNG", optimize=True)
        return b64encode(out.getvalue()).decode()
