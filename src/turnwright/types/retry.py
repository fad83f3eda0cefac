"""`Retry-After` header of HTTP servers."""

from __future__ import annotations

import math
import time
from email.utils import parsedate_to_datetime


def retry_after(header: str | None) -> float:
    """Return the seconds of a `Retry-After` header, a number or a date.

    0 if it is missing or invalid.
    """
    if not header:
        return 0.0
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - time.time()
        except (TypeError, ValueError, OverflowError):
            return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0
