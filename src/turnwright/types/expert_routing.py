"""Expert routes of mixture-of-experts models, as engines report them.

`SpanRoutes` in `trajectory.py` keeps them by span and makes training rows of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ROUTES = "routes"
"""Name of the extra in `Request.extras`, `Generation.extras` and `Turn.extras`."""


@dataclass(frozen=True, slots=True)
class ExpertRoutes:
    """Experts chosen by routers: unsigned integers [positions, layers, k] as little-endian bytes.

    `numpy.asarray(routes)` returns an array without a copy. A server that reports no shape has one
    layer of layers * k numbers.
    """

    data: bytes
    layers: int
    """Number of layers with routers."""
    k: int
    """Experts per token and layer."""
    width: int = 1
    """Bytes of a number: 1, or 2 for more than 256 experts."""

    def __post_init__(self) -> None:
        sizes_fit = min(self.layers, self.k) >= 1 and self.width in (1, 2)
        if not sizes_fit or len(self.data) % self.bytes_per_position:
            raise ValueError(
                f"{len(self.data)} bytes do not fit routes of {self.layers} layers by {self.k} "
                f"experts of {self.width} bytes"
            )

    @classmethod
    def of(cls, array: Any) -> ExpertRoutes:
        """Return routes of an array [positions, layers, k] of integers from 0 to 65535.

        Raises `ValueError` for anything else.
        """
        if isinstance(array, ExpertRoutes):
            return array
        shape: tuple[int, ...] = tuple(getattr(array, "shape", ()))
        kind = getattr(getattr(array, "dtype", None), "kind", "")
        if len(shape) != 3 or kind not in ("i", "u"):
            received = f"{kind or type(array).__name__} {shape}"
            raise ValueError(
                f"routes must be integers of shape [positions, layers, k], not {received}"
            )

        lowest = int(array.min()) if shape[0] else 0
        highest = int(array.max()) if shape[0] else 0
        if lowest < 0 or highest > 65535:
            outside = lowest if lowest < 0 else highest
            raise ValueError(f"routes must be expert indices from 0 to 65535, not {outside}")

        width = 1 if highest < 256 else 2
        return cls(array.astype(f"<u{width}").tobytes(), shape[1], shape[2], width)

    @classmethod
    def from_bytes(cls, data: bytes, size: int, layers: int, k: int) -> ExpertRoutes:
        """Return routes of little-endian integers of `size` bytes.

        They are narrowed to the smallest width that holds them. Raises `ValueError` when they are
        over 65535, negative, or end inside a position.
        """
        if _fits(data, size, width=1):
            width = 1
        elif _fits(data, size, width=2):
            width = 2
        else:
            raise ValueError("routes contain a number that is negative or over 65535")

        if width == size:
            return cls(data, layers, k, size)
        narrow = bytearray(len(data) // size * width)
        for byte in range(width):
            narrow[byte::width] = data[byte::size]
        return cls(bytes(narrow), layers, k, width)

    @property
    def bytes_per_position(self) -> int:
        """Bytes of a position."""
        return self.layers * self.k * self.width

    @property
    def shape(self) -> tuple[int, int, int]:
        """Positions, layers, k."""
        return len(self), self.layers, self.k

    @property
    def __array_interface__(self) -> dict[str, Any]:
        kind = "|u1" if self.width == 1 else "<u2"
        return {"version": 3, "shape": self.shape, "typestr": kind, "data": self.data}

    def __len__(self) -> int:
        return len(self.data) // self.bytes_per_position

    def slice(self, start: int, end: int) -> ExpertRoutes:
        """Return the routes of positions `start` to `end`."""
        size = self.bytes_per_position
        return ExpertRoutes(self.data[start * size : end * size], self.layers, self.k, self.width)

    def concat(self, more: ExpertRoutes) -> ExpertRoutes:
        """Return these routes followed by those of later positions.

        Raises `ValueError` when the layers or the experts per token differ.
        """
        if (self.layers, self.k) != (more.layers, more.k):
            raise ValueError(
                f"routes of {more.layers} x {more.k} after routes of {self.layers} x {self.k}"
            )
        if self.width == more.width:
            return ExpertRoutes(self.data + more.data, self.layers, self.k, self.width)
        wide = self.as_uint16().data + more.as_uint16().data
        return ExpertRoutes(wide, self.layers, self.k, width=2)

    def as_uint16(self) -> ExpertRoutes:
        """Return the same routes with two bytes per number."""
        if self.width == 2:
            return self
        data = bytearray(2 * len(self.data))
        data[::2] = self.data
        return ExpertRoutes(bytes(data), self.layers, self.k, 2)


def _fits(data: bytes, size: int, *, width: int) -> bool:
    """Whether the bytes from `width` on are 0 in each integer of `size` bytes."""
    return all(data[byte::size].count(0) * size == len(data) for byte in range(width, size))
