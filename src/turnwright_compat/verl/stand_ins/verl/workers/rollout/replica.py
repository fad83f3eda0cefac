"""What a server returns."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class TokenOutput(BaseModel):
    """Reply of a server."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = Field(default_factory=dict)
