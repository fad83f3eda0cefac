"""A call that SGLang read."""

from __future__ import annotations

from pydantic import BaseModel


class ToolCallItem(BaseModel):
    """One call: its position, the tool's name and its arguments as JSON."""

    tool_index: int
    name: str | None = None
    parameters: str
