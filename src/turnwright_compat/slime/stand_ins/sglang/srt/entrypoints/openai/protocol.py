"""Tools in OpenAI's format, as SGLang takes them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class Function(BaseModel):
    """A function that a model may call."""

    description: str | None = None
    name: str | None = None
    parameters: Any = None
    strict: bool = False


class Tool(BaseModel):
    """A tool; all of them are functions."""

    type: str = "function"
    function: Function
