"""Deprecated names of members, kept for one release."""

from typing import Any
from warnings import warn


class Renamed:
    """Deprecated name of a member: warns, and returns the member under its new name."""

    def __init__(self, new: str) -> None:
        self.new, self.old = new, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.old = f"{owner.__name__}.{name}"

    def __get__(self, instance: Any, owner: type) -> Any:
        warn(f"{self.old} is now {self.new}; the old name leaves with the next release", DeprecationWarning, stacklevel=2)
        return getattr(owner if instance is None else instance, self.new)
