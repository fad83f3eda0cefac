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
        text_ids = [*opened, *ids[: len(ids) - ends]]
        text = decode(text_ids)
        starts = [len(decode(text_ids[:size])) for size in range(len(opened), len(text_ids))]
        weights = _at(self._parts(text, query), starts)
        if ends:
            weights += _at(self._parts(decode(ids[-1:]), None), [0])
        return weights

    def _parts(self, text: str, query: Any) -> list[tuple[str, float]]:
        """Return the parts of a text with their weights."""
        parts = [(text, 1.0)]
        for scale in self.chain:
            split: list[tuple[str, float]] = []
            for part, weight in parts:
                texts, factors = scale.get_loss_scale(part, query=query)
                if len(texts) != len(factors) or "".join(texts) != part:
                    raise EnvError(
                        f"{type(scale).__name__}.get_loss_scale returned {len(texts)} parts and "
                        f"{len(factors)} weights; return all parts of the text, with a weight for "
                        "each"
                    )
                weights = [
                    weight * (as_number(factor, "a loss scale") or 0.0) for factor in factors
                ]
                split += zip(texts, weights, strict=True)
            parts = split
        return parts


def _at(parts: list[tuple[str, float]], positions: list[int]) -> list[float]:
    """Return the weight of the part at each position of the text; 1 where there is no part."""
    kept = [(text, weight) for text, weight in parts if text]
    if not kept:
        return [1.0] * len(positions)
    ends = list(accumulate(len(text) for text, _ in kept))
    last = len(kept) - 1
    return [kept[min(bisect_right(ends, position), last)][1] for position in positions]
