"""Reference policy of the KL term: a copy of the trained parameters, or the model
with its LoRA disabled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from turnwright.config import TrainConfig
from turnwright.errors import ConfigError, ModelError
from turnwright.training.distributed import full_tensor, shard_like
from turnwright.training.model.lora import Adapter


class ReferencePolicy:
    """Reference policy in the trainer's model: `active` switches it to `copied`, or
    disables the adapter if None."""

    def __init__(
        self, model: nn.Module, adapter: Adapter | None, copied: dict[str, Tensor] | None
    ) -> None:
        self._own = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._adapter = adapter
        self.copied = copied

    @classmethod
    def of(
        cls, model: nn.Module, adapter: Adapter | None, config: TrainConfig, *, untouched: bool
    ) -> ReferencePolicy:
        """Keep the current policy as `train.reference` specifies; raise `ConfigError` for
        `adapter_off` without an adapter. If `untouched`, the adapter is initial on every rank, so
        that disabling it gives the same policy."""
        if config.reference == "adapter_off" and adapter is None:
            raise ConfigError(
                'train.reference = "adapter_off", but the model has no LoRA adapter; set '
                'lora.rank, or "copy"'
            )
        if adapter is not None and (
            config.reference == "adapter_off" or (config.reference == "auto" and untouched)
        ):
            return cls(model, adapter, None)
        return cls(
            model,
            adapter,
            {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad},
        )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Switch the trainer's model to the reference in this context; for
        passes without gradient."""
        if self.copied is None:
            with self._adapter.disabled() if self._adapter else nullcontext():
                yield
            return
        current = {name: p.detach().clone() for name, p in self._own.items()}
        try:
            self._put(self.copied)
            yield
        finally:
            self._put(current)

    def _put(self, tensors: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._own.items():
                parameter.copy_(tensors[name])

    def tensors(self) -> dict[str, Tensor] | None:
        """Return the full tensors to save; None if the reference disables the adapter."""
        return (
            None
            if self.copied is None
            else {name: full_tensor(tensor) for name, tensor in self.copied.items()}
        )

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore the tensors of `tensors`. Raises `ModelError` when they are of another model."""
        copied = {}
        for name, parameter in self._own.items():
            if name not in tensors or tensors[name].shape != parameter.shape:
                raise ModelError(
                    f"the reference policy is of another model: {name!r} does not fit; resume "
                    "another checkpoint"
                )
            copied[name] = shard_like(tensors[name], parameter)
        self.copied = copied
