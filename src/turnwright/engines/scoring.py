"""Log-probabilities of given ids, as teachers and weight checks ask servers for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from turnwright.types import MediaPlacement


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Ids to score under logits / temperature without the banned ids."""

    ids: Sequence[int]
    media: tuple[MediaPlacement, ...] = ()
    """Complete image blocks among `ids`, in order."""
    temperature: float = 1.0
    banned_ids: frozenset[int] = frozenset()
    top: int = 0
    """Number of most likely ids to report at each position; fewer may be reported."""

    @property
    def is_plain(self) -> bool:
        """Whether the distribution is that of the model, as servers report it."""
        return self.temperature == 1.0 and not self.banned_ids


class IdScores(NamedTuple):
    """Answer to a `ScoreRequest`: one entry for each id but the first."""

    logprobs: list[float]
    """log p(ids[i] | ids[:i]) for i >= 1."""
    top: Sequence[Mapping[int, float]]
    """The most likely ids there with their logprobs; empty unless requested."""
