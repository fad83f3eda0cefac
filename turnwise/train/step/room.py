"""How many tokens a forward pass may hold, and what is done when the device's memory was not enough for them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from turnwise.errors import TurnwiseError
from turnwise.train.forward.batch import TrainingBatch

T = TypeVar("T")

_log = logging.getLogger(__name__)


class MicroBatchLimit:
    """The tokens of a pass: `train.micro_tokens`, until memory runs out for the first time, and half of it from then on.

    Once, since twice would hide that something else fills the memory; the result does not depend on it.
    """

    def __init__(self, tokens: int, *, alone: bool = True, on_note: Callable[[str], None] | None = None) -> None:
        """
        Args:
            alone: whether this process trains by itself. Several would have to halve together, and one that ran out of memory
                cannot tell the others in the middle of a pass.
            on_note: receives a line when it is halved; a warning is logged by default.
        """
        self.tokens = tokens
        self.alone = alone
        self.halved = False
        self._on_note = on_note or _log.warning

    def run(self, batch: TrainingBatch, work: Callable[[], T], undo: Callable[[], None] = lambda: None) -> T:
        """Do work that goes over the passes of a batch; where memory runs out, once more over passes of half the size.

        Args:
            work: starts from the first pass whenever it is called; gradients are then as they were before the first call.
            undo: what is left of an attempt that failed is taken back by it.

        Raises:
            TurnwiseError: when memory runs out though the passes were halved before.
        """
        if self.halved:
            batch.repack(self.tokens)
        try:
            return work()
        except torch.OutOfMemoryError as error:
            told = _first_line(error)
            if self.halved or self.tokens < 2 or not self.alone:
                raise TurnwiseError(_full(told, self.tokens, self.halved)) from None
        # Out here the exception is gone, and with it the frames that held the tensors of the failed pass.
        undo()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.halved = True
        self._on_note(
            f"memory ran out ({told}): from here on a forward pass takes {self.tokens // 2} tokens instead of {self.tokens}; "
            f"set train.micro_tokens = {self.tokens // 2} to begin with that"
        )
        self.tokens //= 2
        batch.repack(self.tokens)
        try:
            return work()
        except torch.OutOfMemoryError as error:
            told = _first_line(error)
        undo()
        raise TurnwiseError(_full(told, self.tokens, True))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no more memory"])[0].partition(". ")[0]


def _full(told: str, tokens: int, halved: bool) -> str:
    again = ", which is half of train.micro_tokens already" if halved else ""
    return (
        f"memory ran out with forward passes of {tokens} tokens{again} ({told}). The weights were left as they are. Shorten "
        "episodes (limits.context, limits.episode_tokens), lower train.micro_tokens, freeze what need not be trained, or give "
        "the engine less"
    )
