"""Result of a dynamic sampling filter."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class DynamicFilterOutput:
    """Whether a group is trained, and why not."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False
