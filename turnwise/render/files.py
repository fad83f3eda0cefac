"""Reading the JSON files of a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from turnwise.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is no such file.

    Raises:
        ModelError: when it holds none.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds no JSON object")
    return value
