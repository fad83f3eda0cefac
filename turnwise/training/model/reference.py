"""The reference policy of the KL term: a second copy of what is trained, or the model with its LoRA switched off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from turnwise.config import TrainConfig
from turnwise.errors import ConfigError, ModelError
from turnwise.training.distributed import full_tensor, shard_like
from turnwise.training.model.lora import Adapter


class ReferencePolicy:
    """A policy to stay near to. It is no model of its own: `active` lets the trainer's model be it for a while.

    Args:
        copied: trained parameters as they were, by name; None switches the adapter off instead.
    """

    def __init__(self, model: nn.Module, adapter: Adapter | None, copied: dict[str, Tensor] | None) -> None:
        self._own = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._adapter = adapter
        self.copied = copied

    @classmethod
    def of(cls, model: nn.Module, adapter: Adapter | None, config: TrainConfig, *, untouched: bool) -> ReferencePolicy:
        """The policy as it is now, kept as `train.reference` says.

        Args:
            untouched: whether the adapter is as it began on every rank, so that switched off it is the same policy.

        Raises:
            ConfigError: for `adapter_off` without an adapter.
        """
        if config.reference == "adapter_off" and adapter is None:
            raise ConfigError('train.reference = "adapter_off", but the model has no LoRA adapter; set lora.rank, or "copy"')
        if adapter is not None and (config.reference == "adapter_off" or (config.reference == "auto" and untouched)):
            return cls(model, adapter, None)
        return cls(model, adapter, {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad})

    @contextmanager
    def active(self) -> Iterator[None]:
        """Have the trainer's model be the reference, for passes that need no gradient."""
        if self.copied is None:
            with self._adapter.disabled() if self._adapter else nullcontext():
                yield
            return
        kept = {name: p.detach().clone() for name, p in self._own.items()}
        try:
            self._put(self.copied)
            yield
        finally:
            self._put(kept)

    def _put(self, tensors: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._own.items():
                parameter.copy_(tensors[name])

    def tensors(self) -> dict[str, Tensor] | None:
        """What must be kept of it, whole; None where the adapter is switched off."""
        return None if self.copied is None else {name: full_tensor(tensor) for name, tensor in self.copied.items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `tensors` gave.

        Raises:
            ModelError: when it is of another model.
        """
        copied = {}
        for name, parameter in self._own.items():
            if name not in tensors or tensors[name].shape != parameter.shape:
                raise ModelError(f"the reference policy is of another model: {name!r} does not fit; resume from another one")
            copied[name] = shard_like(tensors[name], parameter)
        self.copied = copied
