"""Names that scripts import from TRL beside their environments; training needs TRL itself.

A script can be imported for its environment, its tools and its rewards: every class here can be
named and derived from, and raises `ImportError` when an object of it is made.
"""

from __future__ import annotations

from typing import Any

SUBMODULES = ("rewards",)
"""Modules of TRL that have stand-ins of their own."""


class _NotInstalled:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ImportError(f"{type(self).__name__} needs TRL; pip install trl")


class GRPOConfig(_NotInstalled):
    """Configuration of TRL's trainer."""


class GRPOTrainer(_NotInstalled):
    """TRL's trainer."""


class AsyncGRPOTrainer(_NotInstalled):
    """TRL's asynchronous trainer."""


class RLOOTrainer(_NotInstalled):
    """TRL's trainer of RLOO."""


def __getattr__(name: str) -> Any:
    """Return a stand-in for any other name of TRL: scripts import callbacks, parsers and
    configurations beside the trainer."""
    # An import of a submodule asks here first, and imports it after an AttributeError.
    if name.startswith("__") or name in SUBMODULES:
        raise AttributeError(name)

    return type(name, (_NotInstalled,), {"__module__": GRPOConfig.__module__})
