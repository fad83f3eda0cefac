"""Reading a model's JSON files, and caches of what was read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turnwright import files
from turnwright.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; empty if the file does not exist.

    Raises `ModelError` if the file is not valid JSON or not an object.
    """
    if not path.exists():
        return {}
    try:
        value = files.read_json(path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value


def remember(cache: dict[Any, Any], key: Any, value: Any, limit: int = 1024) -> None:
    """Add an entry to a cache, which is emptied first if it has `limit` entries."""
    if len(cache) >= limit:
        cache.clear()
    cache[key] = value
