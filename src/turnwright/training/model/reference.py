"""Reference policy of the KL term: a copy of the trained parameters, or the model with its LoRA
disabled."""

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
    """Reference policy in the trainer's model: `active` switches it to `copied`, or disables the
    adapter if None."""

    def __init__(
        self, model: nn.Module, adapter: Adapter | None, copied: dict[str, Tensor] | None
    ) -> None:
        self._trained = _trained_parameters(model)
        self._adapter = adapter
        self.copied = copied

    @classmethod
    def of(
        cls,
        model: nn.Module,
        adapter: Adapter | None,
        config: TrainConfig,
        *,
        untouched: bool,
    ) -> ReferencePolicy:
        """Keep the current policy as `train.reference` specifies.

        If `untouched`, the adapter is initial on every rank, so that disabling it gives the same
        policy.

        Raises:
            ConfigError: for `adapter_off` without an adapter.
        """
        if config.reference == "adapter_off" and adapter is None:
            raise ConfigError(
                'train.reference = "adapter_off", but the model has no LoRA adapter; set '
                'lora.rank, or "copy"'
            )

        without_adapter = config.reference == "adapter_off"
        if config.reference == "auto":
            without_adapter = untouched
        if adapter is not None and without_adapter:
            return cls(model, adapter, None)

        copied = {
            name: parameter.detach().clone()
            for name, parameter in _trained_parameters(model).items()
        }
        return cls(model, adapter, copied)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Switch the trainer's model to the reference in this context; for passes without
        gradient."""
        if self.copied is None:
            with self._adapter.disabled() if self._adapter else nullcontext():
                yield
            return

        current = {name: parameter.detach().clone() for name, parameter in self._trained.items()}
        try:
            self._put(self.copied)
            yield
        finally:
            self._put(current)

    def _put(self, tensors: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._trained.items():
                parameter.copy_(tensors[name])

    def tensors(self) -> dict[str, Tensor] | None:
        """Return the full tensors to save; None if the reference disables the adapter."""
        if self.copied is None:
            return None
        return {name: full_tensor(tensor) for name, tensor in self.copied.items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore the tensors of `tensors`. Raises `ModelError` when they are of another model."""
        copied = {}
        for name, parameter in self._trained.items():
            if name not in tensors or tensors[name].shape != parameter.shape:
                raise ModelError(
                    f"the reference policy is of another model: {name!r} does not fit; resume "
                    "another checkpoint"
                )
            copied[name] = shard_like(tensors[name], parameter)
        self.copied = copied


def _trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    parameters = model.named_parameters()
    return {name: parameter for name, parameter in parameters if parameter.requires_grad}
