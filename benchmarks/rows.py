"""Rows of measurements: files that are whole, intervals over seeds, and tables."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

T_QUANTILES = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""0.975 quantiles of Student's t for 1 to 9 degrees of freedom."""


def write_json(path: Path, value: Any) -> None:
    """Write a file that is complete whenever the process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    draft.write_text(json.dumps(value) + "\n")
    draft.replace(path)


def half_width(values: Sequence[float]) -> float:
    """Return half of the width of the 95% interval of the mean of at least two values."""
    quantile = T_QUANTILES[min(len(values) - 2, len(T_QUANTILES) - 1)]
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def interval(values: Sequence[float]) -> float:
    """Return half of the width of the 95% interval of a mean; 0 for fewer than three values, which
    say too little."""
    return half_width(values) if len(values) > 2 else 0.0


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
