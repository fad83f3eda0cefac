"""Token ids of a growing conversation, and their JSON text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson


class GrowingIds(list[int]):
    """List of ids that keeps its JSON text.

    A context grows by a few hundred ids a turn and is sent completely each time; a request encodes
    only the ids appended since the last one. Any change except appending drops the text.
    """

    __slots__ = ("_count", "_text")

    def __init__(self, ids: Sequence[int] = ()) -> None:
        super().__init__(ids)
        # JSON of the first `_count` ids, without brackets.
        self._count = 0
        self._text = bytearray()

    def json(self) -> bytes:
        """Return the ids as JSON, byte for byte as `orjson.dumps` writes them."""
        if self._count < len(self):
            if self._count:
                self._text += b","
            appended = orjson.dumps(self[self._count :])
            self._text += memoryview(appended)[1:-1]
            self._count = len(self)
        return b"".join((b"[", self._text, b"]"))


_CHANGES = (
    "__setitem__",
    "__delitem__",
    "__imul__",
    "insert",
    "pop",
    "remove",
    "clear",
    "sort",
    "reverse",
)
"""Methods of a list that do more than append."""


def _drops_text(name: str) -> Any:
    """Return the method of `list`, made to drop the JSON text first."""
    change = getattr(list, name)

    def changed(self: GrowingIds, *arguments: Any, **options: Any) -> Any:
        self._count = 0
        self._text = bytearray()
        return change(self, *arguments, **options)

    return changed


for _name in _CHANGES:
    setattr(GrowingIds, _name, _drops_text(_name))


def ids_json(ids: Sequence[int]) -> bytes:
    """Return ids as JSON; `GrowingIds` encode only what was appended since the last time."""
    return ids.json() if isinstance(ids, GrowingIds) else orjson.dumps(list(ids))
