"""How many tokens a forward pass has, and what happens when the memory does not hold them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from turnwright.engines.local.mixed_precision import is_mixed
from turnwright.errors import TurnwrightError
from turnwright.training.forward.batch import TrainingBatch
from turnwright.training.trainer.heap import LARGE_WEIGHTS

T = TypeVar("T")

MICRO_TOKENS = 4096
"""Most tokens of a pass."""
LARGE_MICRO_TOKENS = 512
LARGE_MICRO_TOKENS_MIXED = 4096
"""The same for a large model on a CPU. Layers keep 0.4 MB a token in a model of 135 million weights
in mixed precision, where each pass packs all weights anew, and twice that in float32."""
ADAPTER_MICRO_TOKENS = 256
ADAPTER_MICRO_TOKENS_MIXED = 512
"""The same for an adapter of one, whose step has no gradients of weights that would be larger than
what layers keep. In float32 a step of 16 demonstrations peaked 0.2 GB lower with 256 than with 512
in the same CPU time."""


def is_large_on_cpu(model: nn.Module) -> bool:
    """Return whether a model is on a CPU, and so large that its passes decide how much memory the
    process has."""
    sizes = [p.numel() for p in model.parameters() if p.device.type == "cpu"]
    return bool(4 * sum(sizes) >= LARGE_WEIGHTS)


def default_micro_tokens(model: nn.Module) -> int:
    """Return the most tokens of a pass: few for a large model on a CPU, fewer where its trained
    part is small."""
    if not is_large_on_cpu(model):
        return MICRO_TOKENS

    weights = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if trained < weights // 4:
        return ADAPTER_MICRO_TOKENS_MIXED if is_mixed(model) else ADAPTER_MICRO_TOKENS
    return LARGE_MICRO_TOKENS_MIXED if is_mixed(model) else LARGE_MICRO_TOKENS


class MicroBatchLimit:
    """Micro-batch size in tokens, which is halved once after an out-of-memory error.

    A second time would hide that something else fills the memory. Results do not depend on the
    size.
    """

    def __init__(
        self,
        tokens: int,
        *,
        alone: bool = True,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        """Halve only `alone`: several ranks would have to halve together, and one that runs out of
        memory cannot notify the others during a pass."""
        self.tokens = tokens
        self.alone = alone
        self.halved = False
        self._on_note = on_note or logging.getLogger(__name__).warning

    def run(
        self,
        batch: TrainingBatch,
        work: Callable[[], T],
        undo: Callable[[], None] = lambda: None,
    ) -> T:
        """Run work over a batch's passes, from the first and with gradients as before.

        After an out-of-memory error it is undone and tried once more, with passes of half the size.

        Raises:
            TurnwrightError: when they were halved before.
        """
        while True:
            if self.halved:
                batch.repack(self.tokens)
            try:
                return work()
            except torch.OutOfMemoryError as error:
                reason = _first_sentence(error)

            # Outside the handler the exception is gone, and with it the frames that held
            # tensors of the failed pass.
            undo()
            self._halve(reason)

    def _halve(self, reason: str) -> None:
        if self.halved or self.tokens < 2 or not self.alone:
            already = ", already half of train.micro_tokens" if self.halved else ""
            raise TurnwrightError(
                f"out of memory with forward passes of {self.tokens} tokens{already} "
                f"({reason}). This update was not made. Shorten episodes (limits.context, "
                "limits.episode_tokens), lower train.micro_tokens, freeze parts of the model, "
                "or give the engine less memory"
            )

        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._on_note(
            f"out of memory ({reason}): forward passes now take {self.tokens // 2} tokens "
            f"instead of {self.tokens}; set train.micro_tokens = {self.tokens // 2} to start "
            "with that"
        )
        self.tokens //= 2
        self.halved = True


def _first_sentence(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].partition(". ")[0] if lines else "no more memory"
