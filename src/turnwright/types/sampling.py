"""Sampling parameters and the sampling distribution."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import groupby
from math import isfinite
from typing import Any


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. The default is the model's own distribution."""

    temperature: float = 1.0
    """0 selects the most likely id (greedy); its logprob is then that of the unscaled
    distribution."""
    top_p: float = 1.0
    top_k: int = 0
    """0 disables it."""
    min_p: float = field(default=0.0, kw_only=True)
    """Minimum probability as a share of the most likely id's, before top-k and top-p; 0 disables
    it."""

    def settings(self) -> dict[str, Any]:
        """Return the arguments to repeat it; `min_p` only if it is set."""
        settings: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        if self.min_p:
            settings["min_p"] = self.min_p
        return settings

    def fault(self) -> str:
        """Return which parameter is out of range; empty if none is."""
        if not is_finite_number(self.temperature) or self.temperature < 0:
            return f"temperature must be at least 0, not {self.temperature!r:.80}"
        if not is_finite_number(self.top_p) or not 0 < self.top_p <= 1:
            return f"top_p must be over 0 and at most 1, not {self.top_p!r:.80}"
        if type(self.top_k) is not int or not 0 <= self.top_k < 2**31:
            return f"top_k must be 0 (all) or a number of ids, not {self.top_k!r:.80}"
        if not is_finite_number(self.min_p) or not 0 <= self.min_p < 1:
            return f"min_p must be at least 0 and under 1, not {self.min_p!r:.80}"
        return ""

    @property
    def is_unmodified(self) -> bool:
        """Whether no id is excluded, so that logprobs are those of the tempered policy."""
        return self.top_p == 1.0 and self.top_k == 0 and self.min_p == 0.0


@dataclass(frozen=True)
class SamplingDistribution(Sampling):
    """Distribution that the engine samples from.

    It is that of logits / temperature, with banned ids masked, renormalized over the support of
    min-p, top-k and top-p. `turnwright.token_logprobs` computes its logprobs from a model's logits.
    """

    banned_ids: frozenset[int] = frozenset()
    """Ids with probability zero; ids past the end of the logits are ignored."""

    def to_dict(self) -> dict[str, Any]:
        """Return the non-default fields as JSON, banned ids as runs `[first, last]`.

        The caller must not modify it.
        """
        return self._row

    @cached_property
    def _row(self) -> dict[str, Any]:
        row: dict[str, Any] = {}
        if self.temperature != 1.0:
            row["temperature"] = self.temperature
        if self.top_p != 1.0:
            row["top_p"] = self.top_p
        if self.top_k != 0:
            row["top_k"] = self.top_k
        if self.min_p != 0.0:
            row["min_p"] = self.min_p
        if self.banned_ids:
            row["banned"] = list(_runs(sorted(self.banned_ids)))
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> SamplingDistribution:
        """Read what `to_dict` returned."""
        runs = tuple((first, last) for first, last in row.get("banned", ()))
        return _read(
            row.get("temperature", 1.0),
            row.get("top_p", 1.0),
            row.get("top_k", 0),
            row.get("min_p", 0.0),
            runs,
        )


@lru_cache(maxsize=64)
def _read(
    temperature: float, top_p: float, top_k: int, min_p: float, runs: tuple[tuple[int, int], ...]
) -> SamplingDistribution:
    """Return one shared object for all spans of a journal with equal distributions."""
    banned_ids: set[int] = set()
    for first, last in runs:
        banned_ids.update(range(first, last + 1))
    return SamplingDistribution(temperature, top_p, top_k, frozenset(banned_ids), min_p=min_p)


def _runs(ids: Iterable[int]) -> Iterable[tuple[int, int]]:
    """Yield (first, last) of each run of consecutive ids."""
    # Consecutive ids differ from their index by the same number.
    for _, pairs in groupby(enumerate(ids), key=lambda pair: pair[1] - pair[0]):
        run = [id_ for _, id_ in pairs]
        yield run[0], run[-1]


def is_finite_number(value: Any) -> bool:
    """Whether a value is a finite int or float, and neither a boolean nor of another type."""
    return type(value) in (int, float) and isfinite(value)
