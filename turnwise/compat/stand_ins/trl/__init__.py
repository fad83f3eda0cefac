"""Names that scripts import from TRL beside their environments; training needs TRL itself."""

from __future__ import annotations

from typing import Any


class _NotInstalled:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ImportError(f"{type(self).__name__} needs TRL; pip install trl")


class GRPOConfig(_NotInstalled):
    """Configuration of TRL's trainer."""


class GRPOTrainer(_NotInstalled):
    """TRL's trainer."""
