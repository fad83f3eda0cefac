"""Packed model directories: codes and scales in the layouts of compressed-tensors (int4) and
transformers (fp8 blocks).

`write_packed` writes one of a model, `packing` is the same as a transform of weights on their way
to servers, and `quantization_config` what config.json says of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from turnwright.config import QuantConfig
from turnwright.config.dump import load_run_config
from turnwright.errors import ConfigError
from turnwright.training.model.directory import base_model_of, read_json
from turnwright.training.model.models import copy_extras, load
from turnwright.training.model.quantize import grid_of, packed, quantized_names
from turnwright.training.model.weight_export import Transform, Weights, unique_weights


def quant_of(source: Path) -> QuantConfig:
    """Return the `[quant]` of the run that a checkpoint belongs to; the default for any other
    directory."""
    checkpoints = source.absolute().parent
    run = checkpoints.parent
    if checkpoints.name == "checkpoints" and (run / "config.json").is_file():
        return load_run_config(run).config.quant
    return QuantConfig()


def write_packed(source: Path, directory: Path, config: QuantConfig) -> None:
    """Write a model directory or checkpoint as a packed directory; raise `ConfigError` if it exists
    or nothing is quantized."""
    if config.kind == "none":
        raise ConfigError(f'{source}: quant.kind is "none"; choose --kind int4 or fp8')
    if directory.exists():
        raise ConfigError(f"{directory}: already exists; choose another --out")

    model_source = base_model_of(source) or source
    settings = read_json(model_source / "config.json", "it is no Hugging Face model directory")
    dtype = torch.bfloat16 if settings.get("dtype", "") == "bfloat16" else torch.float32
    model, _ = load(source, "cpu", dtype)
    packed_weights = packing(model, config)(unique_weights(model, copy=True))
    tensors = {name: tensor.contiguous() for name, tensor in packed_weights}

    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    settings["quantization_config"] = quantization_config(model, config)
    text = json.dumps(settings, indent=2)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")
    copy_extras(source, directory)


def packing(model: nn.Module, config: QuantConfig) -> Transform:
    """Create a transform for `Trainer.transforms` from a model's weights to those of a packed
    directory."""
    # Files hold weights alone.
    config = replace(config, activations=False)
    grid = grid_of(config)
    assert grid is not None

    names = quantized_names(model, config)
    matrices = frozenset(name for name in names if name.endswith(".weight"))
    stage = packed(grid, matrices | set(_expert_names(model, names)))
    return lambda weights: stage(_per_expert(weights, names))


def quantization_config(model: nn.Module, config: QuantConfig) -> dict[str, Any]:
    """Return `quantization_config` of config.json for a model's packed directories."""
    config = replace(config, activations=False)
    grid = grid_of(config)
    assert grid is not None

    names = quantized_names(model, config)
    return grid.config(
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and f"{name}.weight" not in names
    )


def _per_expert(weights: Weights, names: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights with the names of files: stacked experts one by one, gate and up projections
    apart."""
    for name, tensor in weights:
        if name not in names or name.endswith(".weight"):
            yield name, tensor
            continue

        stem, _, last = name.rpartition(".")
        if last not in ("gate_up_proj", "down_proj"):
            raise ConfigError(
                f"{name}: no packed layout is known for these experts; add experts to quant.skip"
            )
        for number, matrix in enumerate(tensor):
            if last == "down_proj":
                yield f"{stem}.{number}.down_proj.weight", matrix
            else:
                gate, up = matrix.chunk(2)
                yield f"{stem}.{number}.gate_proj.weight", gate
                yield f"{stem}.{number}.up_proj.weight", up


def _expert_names(model: nn.Module, names: frozenset[str]) -> Iterator[str]:
    stacked = (
        (name, tensor)
        for name, tensor in model.state_dict().items()
        if name in names and tensor.dim() == 3
    )
    return (name for name, _ in _per_expert(stacked, names))
