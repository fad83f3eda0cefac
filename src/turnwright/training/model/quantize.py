"""Quantization-aware training: which layers are quantized, straight-through layers, and weights on
the grid for engines.

`quantized_layers` finds the layers, `quantize_for_training` makes them compute on their grid,
`quantize_for_sampling` copies a model for an engine, and `OnGrid` and `packed` transform weights on
their way to servers and files. The grids themselves are in `engines/local/quantization.py`.

A layer keeps its full-precision weights (masters), names and tying; only its class changes.
Rounding has the gradient of the identity (straight-through estimator: Bengio et al., arXiv
1308.3432).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from turnwright.config import QuantConfig
from turnwright.engines.local.quantization import RoundedInputLinear, WeightGrid
from turnwright.engines.local.vision import split_vlm
from turnwright.errors import ConfigError
from turnwright.training.model.weight_export import Transform, Weights


class _StraightThrough(torch.autograd.Function):  # type: ignore[misc]
    """Rounding with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
        return rounding(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def straight_through(values: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    """Round a tensor; its gradient is that of the result."""
    rounded: Tensor = _StraightThrough.apply(values, rounding)
    return rounded


class GridLinear(nn.Linear):  # type: ignore[misc]
    """Linear layer that computes with its weights on the grid, and with rounded inputs if the grid
    has them."""

    grid: WeightGrid

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the layer in the values of its grid."""
        if self.grid.activations:
            inputs = straight_through(inputs, self.grid.round_inputs)
        weight = straight_through(self.weight, self.grid.on_grid)
        return nn.functional.linear(inputs, weight, self.bias)


@cache
def _experts_class(plain: Any) -> Any:
    """Return a subclass of a module of stacked experts that computes with its matrices on the
    grid."""

    class GridExperts(plain):  # type: ignore[misc]
        grid: WeightGrid

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            # Instance attributes come before parameters, which stay registered.
            for name, parameter in self._parameters.items():
                if parameter is not None and parameter.dim() == 3:
                    self.__dict__[name] = straight_through(parameter, self.grid.on_grid)
            try:
                return super().forward(*args, **kwargs)
            finally:
                for name in self._parameters:
                    self.__dict__.pop(name, None)

    GridExperts.__name__ = GridExperts.__qualname__ = f"Grid{plain.__name__}"
    return GridExperts


def grid_of(config: QuantConfig) -> WeightGrid | None:
    """Return the grid of `[quant]`; None if nothing is quantized."""
    if config.kind == "none":
        return None
    if config.kind == "fp8":
        return WeightGrid("fp8", config.block, config.activations)
    scale_dtypes = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
    return WeightGrid("int4", config.group, scale_dtype=scale_dtypes[config.scale_dtype])


def quantized_layers(model: nn.Module, config: QuantConfig) -> dict[str, nn.Module]:
    """Return the layers that `[quant]` quantizes by name: linear layers and stacked experts of the
    text model, except its head and `skip`.

    Raises:
        ConfigError: for a layer that does not fit.
    """
    grid = grid_of(config)
    if grid is None:
        return {}

    tower, _ = split_vlm(model)
    vision: set[int] = set()
    if tower is not None:
        vision = {id(parameter) for _, parameter in tower.vision_parameters()}
    head = model.get_output_embeddings()
    layers = {}
    for name, module in model.named_modules():
        matrices = dict(_matrices(module))
        if not matrices or module is head:
            continue
        if any(name == skip or name.endswith(f".{skip}") for skip in config.skip):
            continue
        if any(id(matrix) in vision for matrix in matrices.values()):
            continue

        for own_name, matrix in matrices.items():
            # Files hold gate and up projections apart, so blocks must not cross from one to the
            # other.
            part = matrix.chunk(2, -2)[0] if own_name == "gate_up_proj" else matrix
            misfit = grid.misfit(part.shape)
            if misfit:
                raise ConfigError(
                    f"{name}.{own_name}: {misfit}; choose a divisor, or add the layer's name to "
                    "quant.skip"
                )
        if not isinstance(module, nn.Linear):
            _check_experts(name, module, grid)
        layers[name] = module

    if not layers:
        raise ConfigError(
            f'quant.kind = "{config.kind}": {type(model).__name__} has no linear layer outside '
            "quant.skip"
        )
    return layers


def _matrices(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrices of a linear layer or of stacked experts, by their own names."""
    if isinstance(module, nn.Linear):
        yield "weight", module.weight
    elif not isinstance(module, (nn.Conv1d, nn.modules.conv._ConvNd)):
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3:
                yield name, parameter


def _check_experts(name: str, module: nn.Module, grid: WeightGrid) -> None:
    """Check that a module with 3-D parameters is stacked experts [experts, out, in]."""
    if vars(module).get("is_transposed") is not False:
        raise ConfigError(
            f"{name}: its 3-D weights are not [experts, out, in]; add {name.rpartition('.')[2]} to "
            "quant.skip"
        )
    if grid.activations:
        raise ConfigError(
            f"{name} (stacked experts): the inputs of its second product are inside one function "
            "of transformers, so they cannot be rounded; set quant.activations = false"
        )


def quantize_for_training(model: nn.Module, config: QuantConfig) -> None:
    """Make the quantized layers compute on their grid, in place, by a change of class; parameters
    stay as they are."""
    for module in quantized_layers(model, config).values():
        if "grid" in vars(module):
            continue  # changed already, for a server
        module.grid = grid_of(config)
        if isinstance(module, nn.Linear):
            module.__class__ = GridLinear
        else:
            module.__class__ = _experts_class(module.__class__)


def quantize_for_sampling(model: nn.Module, config: QuantConfig) -> nn.Module:
    """Return the model that an engine samples from: a copy with weights on the grid; the model
    itself without `[quant]`."""
    grid = grid_of(config)
    if grid is None:
        return model

    model = deepcopy(model)
    for module in quantized_layers(model, config).values():
        for _, matrix in _matrices(module):
            with torch.no_grad():
                matrix.copy_(grid.on_grid(matrix))
        if grid.activations:
            module.grid = grid
            module.__class__ = RoundedInputLinear
    return model


def quantized_names(model: nn.Module, config: QuantConfig) -> frozenset[str]:
    """Return the names of the quantized matrices, as in `state_dict()`."""
    layers = quantized_layers(model, config)
    names: set[str] = set()
    for name, module in layers.items():
        names.update(f"{name}.{own_name}" for own_name, _ in _matrices(module))
    return frozenset(names)


def rounds_activations(model: nn.Module) -> bool:
    """Return whether a layer computes with rounded inputs."""
    return any(
        isinstance(module, GridLinear) and module.grid.activations for module in model.modules()
    )


@contextmanager
def plain_inputs(model: nn.Module) -> Iterator[None]:
    """Compute without rounded activations in this context."""
    rounded = [
        module
        for module in model.modules()
        if isinstance(module, GridLinear) and module.grid.activations
    ]
    grids = [module.grid for module in rounded]
    try:
        for module, grid in zip(rounded, grids, strict=True):
            module.grid = replace(grid, activations=False)
        yield
    finally:
        for module, grid in zip(rounded, grids, strict=True):
            module.grid = grid


@dataclass(frozen=True, slots=True)
class OnGrid:
    """Transform for `Trainer.transforms` that places the named matrices on the grid."""

    grid: WeightGrid
    names: frozenset[str]

    def __call__(self, weights: Weights) -> Weights:
        """Yield the weights, named matrices on the grid."""
        return (
            (name, self.grid.on_grid(tensor) if name in self.names else tensor)
            for name, tensor in weights
        )

    def codes(self, weights: Weights) -> dict[str, Tensor]:
        """Return the codes of the named matrices, one byte each, on the CPU."""
        codes: dict[str, Tensor] = {}
        for name, tensor in weights:
            if name in self.names:
                codes[name] = self.grid.codes(tensor)[0].view(torch.uint8).cpu()
        return codes


def packed(grid: WeightGrid, names: frozenset[str]) -> Transform:
    """Create a transform that replaces the named matrices by codes and scales, in the layout of a
    packed directory."""

    def stage(weights: Weights) -> Weights:
        for name, tensor in weights:
            if name in names:
                yield from grid.pack(name, tensor)
            else:
                yield name, tensor

    return stage
