"""Token ids of a growing conversation, and their JSON text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson


class GrowingIds(list[int]):
    """List of ids that keeps its JSON text, so that a request encodes only the ids
    appended since the last one.

    A context grows by a few hundred ids a turn and is sent completely each time. Any change except
    appending drops the text.
    """

    __slots__ = ("_count", "_text")

    def __init__(self, ids: Sequence[int] = ()) -> None:
        super().__init__(ids)
        self._count, self._text = 0, bytearray()

    def json(self) -> bytes:
        """Return the ids as JSON, byte for byte as `orjson.dumps` writes them."""
        if self._count < len(self):
            if self._count:
                self._text += b","
            self._text += memoryview(orjson.dumps(self[self._count :]))[1:-1]
            self._count = len(self)
        return b"".join((b"[", self._text, b"]"))


def _dropping(name: str) -> Any:
    change = getattr(list, name)

    def changed(self: GrowingIds, *arguments: Any, **options: Any) -> Any:
        self._count, self._text = 0, bytearray()
        return change(self, *arguments, **options)

    return changed


for _name in (
    "__setitem__",
    "__delitem__",
    "__imul__",
    "insert",
    "pop",
    "remove",
    "clear",
    "sort",
    "reverse",
):
    setattr(GrowingIds, _name, _dropping(_name))


def ids_json(ids: Sequence[int]) -> bytes:
    """Return ids as JSON, without encoding those again that `GrowingIds` encoded before."""
    return ids.json() if isinstance(ids, GrowingIds) else orjson.dumps(list(ids))
