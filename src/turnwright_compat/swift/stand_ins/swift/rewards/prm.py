"""Process rewards: only the names."""

from typing import Any


class PRM:
    """Base class of process rewards."""

    def __call__(self, **kwargs: Any) -> list[Any]:
        raise NotImplementedError


prms: dict[str, Any] = {}
