"""Low-precision weights: codes and scales, values on their grid, packed tensors, and rounding of
activations.

int4 has one scale per group of inputs: scale = amax / 7, codes -7..7. fp8 (e4m3fn) has one scale
per block of a matrix: scale = amax / 448. A matrix is [..., out, in]; experts are stacked in front.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig

from turnwright.engines.local.vision import auto_class

INT4_MAX = 7
FP8_MAX = 448.0
FP8 = torch.float8_e4m3fn
PACKED = "weight_packed"
"""Last part of a tensor's name in packed files, as are the next three: those of compressed-tensors'
int4, and `SCALE_FP8` of transformers' fp8."""
SCALE = "weight_scale"
SHAPE = "weight_shape"
SCALE_FP8 = "weight_scale_inv"
Weights = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class WeightGrid:
    """Values that quantized weights can take."""

    kind: Literal["int4", "fp8"]
    size: int
    """Inputs per scale (int4), or side of a block (fp8) and channels per scale of its
    activations."""
    activations: bool = False
    """Whether inputs of a layer are rounded to fp8 as well."""
    scale_dtype: torch.dtype | None = None
    """Data type of int4 scales; None is that of the weights. fp8 has float32."""

    def codes(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return a matrix's codes (int8 or e4m3, its shape) and scales ([..., out, groups] or
        [..., rows, columns])."""
        parts = self._split(weight.detach())
        amax = parts.float().abs().amax(self._within, keepdim=True)
        dtype = torch.float32 if self.kind == "fp8" else self.scale_dtype or weight.dtype
        largest_code = INT4_MAX if self.kind == "int4" else FP8_MAX
        # Rounded to its stored type before dividing, so that codes fit the scale that a server
        # reads.
        scale = (amax / largest_code).to(dtype)
        divided = parts.float() / torch.where(scale == 0, 1, scale).float()
        if self.kind == "int4":
            codes = divided.round().clamp(-INT4_MAX, INT4_MAX).to(torch.int8)
        else:
            codes = divided.clamp(-FP8_MAX, FP8_MAX).to(FP8)
        return codes.reshape(weight.shape), scale.squeeze(self._within)

    def values(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return codes x scales, computed in float32."""
        split_dims = scale.dim() + len(self._within)
        for dim in sorted(split_dims + within for within in self._within):
            scale = scale.unsqueeze(dim)
        return (self._split(codes).float() * scale.float()).to(dtype).reshape(codes.shape)

    def on_grid(self, weight: Tensor) -> Tensor:
        """Return the nearest values on the grid."""
        codes, scale = self.codes(weight)
        return self.values(codes, scale, weight.dtype)

    def round_inputs(self, inputs: Tensor) -> Tensor:
        """Round activations to fp8 with a scale per row and `size` channels; a narrower layer is
        one group."""
        parts = inputs.unflatten(-1, (-1, min(self.size, inputs.shape[-1]))).float()
        scale = parts.abs().amax(-1, keepdim=True) / FP8_MAX
        scale = torch.where(scale == 0, 1, scale)
        rounded = (parts / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).float() * scale
        return rounded.to(inputs.dtype).reshape(inputs.shape)

    def misfit(self, shape: torch.Size) -> str:
        """Return why a matrix cannot be quantized, or an empty string."""
        rows, columns = shape[-2:]
        if self.kind == "int4":
            if columns % self.size:
                return f"{columns} inputs are no multiple of quant.group = {self.size}"
            return ""
        # transformers reads other shapes wrongly: it takes rows // scale rows for the block's side.
        for side in (rows, columns):
            if side % self.size:
                return f"a side of {side} is no multiple of quant.block = {self.size}"
        return ""

    def pack(self, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a packed file for matrix `name`, which ends in `weight`."""
        codes, scale = self.codes(weight)
        stem = name.removesuffix("weight")
        if self.kind == "fp8":
            yield name, codes
            yield stem + SCALE_FP8, scale
            return

        # Eight codes of four bits in an int32.
        places = torch.arange(0, 32, 4, dtype=torch.int32, device=codes.device)
        nibbles = (codes.to(torch.int32) + 8).unflatten(-1, (-1, 8)) << places
        # Bits are disjoint, so a sum is an "or"; int64 would widen it.
        yield stem + PACKED, nibbles.sum(-1, dtype=torch.int32)
        yield stem + SCALE, scale
        yield stem + SHAPE, torch.tensor(weight.shape)

    def config(self, ignore: Iterable[str]) -> dict[str, Any]:
        """Return `quantization_config` of config.json for a packed directory; `ignore` are linear
        layers in full precision."""
        if self.kind == "fp8":
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [self.size, self.size],
                "modules_to_not_convert": sorted(ignore),
            }

        weights = {
            "num_bits": 4,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": self.size,
            "dynamic": False,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "ignore": sorted(ignore),
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        }

    @property
    def _within(self) -> tuple[int, ...]:
        """Dimensions of a split matrix that share a scale."""
        return (-1,) if self.kind == "int4" else (-3, -1)

    def _split(self, matrix: Tensor) -> Tensor:
        parts = matrix.unflatten(-1, (-1, self.size))
        return parts if self.kind == "int4" else parts.unflatten(-3, (-1, self.size))


def packed_grid(quantization: Mapping[str, Any]) -> WeightGrid | None:
    """Return the grid that `quantization_config` describes, or None for a layout that only
    transformers reads."""
    if quantization.get("quant_method") == "fp8":
        block: list[int] = quantization.get("weight_block_size") or []
        if len(block) != 2 or block[0] != block[1]:
            return None
        return WeightGrid("fp8", block[0], activations=True)

    if quantization.get("format") != "pack-quantized":
        return None
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        return None
    (group,) = groups.values()
    weights = group.get("weights") or {}
    supported = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    if any(weights.get(key) != value for key, value in supported.items()):
        return None
    if group.get("input_activations"):
        return None
    return WeightGrid("int4", weights["group_size"])


def unpack(
    tensors: Mapping[str, Tensor], grid: WeightGrid, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors of a packed file, packed ones as values on the grid in `dtype`."""
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if last == PACKED:
            nibbles = (tensor.unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
            columns = int(tensors[f"{stem}.{SHAPE}"][-1])
            codes = (nibbles - 8).to(torch.int8).flatten(-2)[..., :columns]
            yield f"{stem}.weight", grid.values(codes, tensors[f"{stem}.{SCALE}"], dtype)
        elif tensor.dtype == FP8:
            yield name, grid.values(tensor, tensors[f"{stem}.{SCALE_FP8}"], dtype)
        elif last not in (SCALE, SHAPE, SCALE_FP8):
            yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor


class RoundedInputLinear(nn.Linear):  # type: ignore[misc]
    """Linear layer that rounds its inputs to fp8; its weights are on the grid."""

    grid: WeightGrid

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the layer on rounded inputs."""
        outputs: Tensor = super().forward(self.grid.round_inputs(inputs))
        return outputs


def input_grid(layer: nn.Module) -> WeightGrid | None:
    """Return the grid that a layer's inputs are rounded to, or None."""
    return layer.grid if isinstance(layer, RoundedInputLinear) else None


_LOADING = threading.RLock()
"""Held while transformers loads a model: it replaces methods of its classes meanwhile, so two
threads leave them replaced."""


def from_directory(root: Path, dtype: Any, **options: Any) -> Any:
    """Call `from_pretrained` of the class that a model directory needs.

    Packed weights are read as values on their grid. A layout of `quantization_config` that is
    unknown here is left to transformers. Threads may call this at once.
    """
    with _LOADING:
        return _from_directory(root, dtype, **options)


def _from_directory(root: Path, dtype: Any, **options: Any) -> Any:
    config = AutoConfig.from_pretrained(root, local_files_only=True, trust_remote_code=False)
    model_class = auto_class(config)
    options |= {"dtype": dtype, "local_files_only": True}
    quantization = config.to_dict().get("quantization_config")
    grid = None if quantization is None else packed_grid(quantization)
    if grid is None:
        return model_class.from_pretrained(root, trust_remote_code=False, **options)

    tensors: dict[str, Tensor] = {}
    for file in sorted(root.glob("*.safetensors")):
        tensors |= load_file(file)
    del config.quantization_config
    config_dtype = torch.float32 if config.dtype is None else config.dtype
    weights = dict(unpack(tensors, grid, config_dtype if dtype == "auto" else dtype))

    with torch.device("meta"):
        # An auto class needs a directory, the model's own class takes tensors.
        own_class = type(model_class.from_config(config))
    return own_class.from_pretrained(None, config=config, state_dict=weights, **options)
