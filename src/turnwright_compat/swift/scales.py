"""ms-swift's loss scales: weights of sampled ids by the parts of their messages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from turnwright.envs.user_code import as_number
from turnwright.errors import EnvError


@dataclass(frozen=True, slots=True)
class LossScales:
    """Loss scales in a chain: each splits the parts of the one before, and their
    weights are multiplied."""

    last_round: bool
    """Whether only replies to the last message of the user are trained."""
    chain: Sequence[Any]

    def weights(
        self,
        decode: Callable[[Sequence[int]], str],
        opened: Sequence[int],
        ids: Sequence[int],
        ends: bool,
        query: Any,
    ) -> list[float]:
        """Return the weights of a reply's ids: each has that of the part in which its text begins.

        Args:
            opened: ids of the message before the reply.
            ends: whether the last id is an end token; it is a text of its own.
        """
        own = [*opened, *ids[: len(ids) - ends]]
        text = decode(own)
        starts = [len(decode(own[:size])) for size in range(len(opened), len(own))]
        found = _at(self._parts(text, query), starts)
        return found + (_at(self._parts(decode(ids[-1:]), None), [0]) if ends else [])

    def _parts(self, text: str, query: Any) -> list[tuple[str, float]]:
        parts = [(text, 1.0)]
        for scale in self.chain:
            split: list[tuple[str, float]] = []
            for part, weight in parts:
                texts, weights = scale.get_loss_scale(part, query=query)
                if len(texts) != len(weights) or "".join(texts) != part:
                    raise EnvError(
                        f"{type(scale).__name__}.get_loss_scale returned {len(texts)} parts and "
                        f"{len(weights)} weights; return all parts of the text, with a weight for "
                        "each"
                    )
                made = [weight * (as_number(one, "a loss scale") or 0.0) for one in weights]
                split += zip(texts, made, strict=True)
            parts = split
        return parts


def _at(parts: list[tuple[str, float]], positions: list[int]) -> list[float]:
    kept = [(text, weight) for text, weight in parts if text]
    ends = list(accumulate(len(text) for text, _ in kept))
    return [
        kept[min(bisect_right(ends, at), len(kept) - 1)][1] if kept else 1.0 for at in positions
    ]
