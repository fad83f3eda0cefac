"""Types of conversations."""

from typing import Any

Messages = list[dict[str, Any]]
Tool = dict[str, Any]


class Template:
    """Type of templates, in annotations."""
