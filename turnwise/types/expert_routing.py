"""Which experts a router chose: as an engine tells them, as they lie along the spans of a trajectory, as rows to train on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

ROUTES = "routes"
"""The name of the extra, in `Request.extras`, `Generation.extras` and `Turn.extras`."""

ReportedRoutes = dict[int, tuple[bytearray, bytearray]]
"""By span: the numbers of its positions one behind another, and 1 for each position that was told."""


@dataclass(frozen=True, slots=True)
class ExpertRoutes:
    """The experts that routers chose: unsigned integers [positions, layers, k], as bytes, little end first.

    `numpy.asarray(routes)` is an array of it, without a copy. A server that tells no shape has one layer of layers * k numbers.
    """

    data: bytes
    layers: int
    """Layers with routers, in their order."""
    k: int
    """Experts per token and layer."""
    width: int = 1
    """Bytes of a number: 1, or 2 where there are more than 256 experts."""

    def __post_init__(self) -> None:
        if min(self.layers, self.k) < 1 or self.width not in (1, 2) or len(self.data) % self.bytes_per_position:
            raise ValueError(
                f"{len(self.data)} bytes are no routes of {self.layers} layers by {self.k} experts of {self.width} bytes"
            )

    @classmethod
    def of(cls, array: Any) -> ExpertRoutes:
        """Routes of an array [positions, layers, k] of integers from 0 to 65535.

        Raises:
            ValueError: for anything else.
        """
        if isinstance(array, ExpertRoutes):
            return array
        shape: tuple[int, ...] = tuple(getattr(array, "shape", ()))
        kind = getattr(getattr(array, "dtype", None), "kind", "")
        if len(shape) != 3 or kind not in ("i", "u"):
            raise ValueError(f"routes are integers of shape [positions, layers, k], not {kind or type(array).__name__} {shape}")
        low, high = (int(array.min()), int(array.max())) if shape[0] else (0, 0)
        if low < 0 or high > 65535:
            raise ValueError(f"routes hold the numbers of experts, not {low if low < 0 else high}")
        width = 1 if high < 256 else 2
        return cls(array.astype(f"<u{width}").tobytes(), shape[1], shape[2], width)

    @classmethod
    def from_bytes(cls, data: bytes, size: int, layers: int, k: int) -> ExpertRoutes:
        """Routes of little-endian integers of `size` bytes, brought to the least width that holds them.

        Raises:
            ValueError: when they are over 65535, negative, or no whole number of positions.
        """
        used = next((n for n in (1, 2) if all(data[byte::size].count(0) * size == len(data) for byte in range(n, size))), 0)
        if not used:
            raise ValueError("routes hold a number that is negative or over 65535")
        if used == size:
            return cls(data, layers, k, size)
        kept = bytearray(len(data) // size * used)
        for byte in range(used):
            kept[byte::used] = data[byte::size]
        return cls(bytes(kept), layers, k, used)

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
        """Those of the positions from `start` to `end`, counted from 0 on."""
        return ExpertRoutes(
            self.data[start * self.bytes_per_position : end * self.bytes_per_position], self.layers, self.k, self.width
        )

    def concat(self, more: ExpertRoutes) -> ExpertRoutes:
        """These and those of the positions behind.

        Raises:
            ValueError: when they are of other layers or another number of experts per token.
        """
        if (self.layers, self.k) != (more.layers, more.k):
            raise ValueError(f"routes of {more.layers} x {more.k} behind routes of {self.layers} x {self.k}")
        one, other = (self, more) if self.width == more.width else (self.as_uint16(), more.as_uint16())
        return ExpertRoutes(one.data + other.data, self.layers, self.k, one.width)

    def as_uint16(self) -> ExpertRoutes:
        """The same in two bytes a number."""
        if self.width == 2:
            return self
        data = bytearray(2 * len(self.data))
        data[::2] = self.data
        return ExpertRoutes(bytes(data), self.layers, self.k, 2)


class TrajectoryView(Protocol):
    """A trajectory, as far as its routes go."""

    @property
    def key(self) -> Any:
        """What errors call it."""

    @property
    def spans(self) -> Sequence[Any]:
        """Of the forest, by index."""

    @property
    def turns(self) -> Sequence[Any]:
        """In the order in which they were sampled."""

    @property
    def failed_turns(self) -> Sequence[Any]:
        """Of attempts that failed."""

    def chain(self, leaf: int) -> Sequence[tuple[int, int]]:
        """Spans from the root to a leaf, and how many ids of each are used."""


class SpanRoutes:
    """The routes of a trajectory by span, so that branches share those of their trunk.

    What was told first stands: a position's route is the one that what was sampled behind it was sampled with.
    """

    def __init__(self, trajectory: TrajectoryView) -> None:
        self._told: ReportedRoutes = {}
        self._sizes: tuple[int, int, int] | None = None
        """Layers, k, width."""
        self._trajectory = trajectory
        given = [
            (turn, *turn.extras[ROUTES])
            for turn in (*trajectory.failed_turns, *trajectory.turns)
            if ROUTES in turn.extras and (turn.spans or turn.prompt >= 0)
        ]
        wide = any(ExpertRoutes.of(routes).width == 2 for _, _, routes in given)
        for turn, start, routes in given:
            made = ExpertRoutes.of(routes)
            self._take(turn.spans[-1] if turn.spans else turn.prompt, start, made.as_uint16() if wide else made)

    def __bool__(self) -> bool:
        return bool(self._told)

    def _take(self, leaf: int, start: int, routes: ExpertRoutes) -> None:
        sizes = routes.layers, routes.k, routes.width
        if self._sizes not in (None, sizes):
            raise ValueError(f"{self._trajectory.key}: routes of {routes.layers} x {routes.k} and of others in one trajectory")
        self._sizes = sizes
        each, end = routes.bytes_per_position, start + len(routes)
        for index, used in self._trajectory.chain(leaf):
            span = self._trajectory.spans[index]
            first, last = max(start, span.start), min(end, span.start + used)
            if first >= last:
                continue
            if index not in self._told:
                self._told[index] = bytearray(len(span.ids) * each), bytearray(len(span.ids))
            data, known = self._told[index]
            low, high = first - span.start, last - span.start
            for at in _runs(known, low, high):
                source = (at[0] + span.start - start) * each
                data[at[0] * each : at[1] * each] = routes.data[source : source + (at[1] - at[0]) * each]
            known[low:high] = b"\1" * (high - low)

    def for_chain(self, links: Sequence[tuple[int, int]]) -> tuple[ExpertRoutes, list[int]] | None:
        """The routes of a chain of spans, zeros where none were told, and 1 for each position whose routes were.

        Args:
            links: as `Trajectory.chain` gives them.

        Returns:
            None where the trajectory has none at all.
        """
        if self._sizes is None:
            return None
        layers, k, width = self._sizes
        data, known = bytearray(), bytearray()
        for index, used in links:
            mine = self._told.get(index)
            data += bytes(used * layers * k * width) if mine is None else mine[0][: used * layers * k * width]
            known += bytes(used) if mine is None else mine[1][:used]
        return ExpertRoutes(bytes(data), layers, k, width), list(known)


def _runs(known: bytearray, low: int, high: int) -> Iterable[tuple[int, int]]:
    """Where runs of positions that were not told begin and end."""
    while low < high:
        begin = known.find(0, low, high)
        if begin < 0:
            return
        end = known.find(1, begin, high)
        low = high if end < 0 else end
        yield begin, low
