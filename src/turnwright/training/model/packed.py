"""Packed model directories: codes and scales in the layouts of compressed-tensors (int4) and
transformers (fp8 blocks)."""

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
    """Return the `[quant]` of the run that a checkpoint belongs to; the default
    for any other directory."""
    run = source.absolute().parent.parent
    if source.absolute().parent.name == "checkpoints" and (run / "config.json").is_file():
        return load_run_config(run).config.quant
    return QuantConfig()


def write_packed(source: Path, directory: Path, config: QuantConfig) -> None:
    """Write a model directory or checkpoint as a packed directory; raise `ConfigError` if it exists
    or nothing is quantized."""
    if config.kind == "none":
        raise ConfigError(f'{source}: quant.kind is "none"; choose --kind int4 or fp8')
    if directory.exists():
        raise ConfigError(f"{directory}: already exists; choose another --out")
    settings = read_json(
        (base_model_of(source) or source) / "config.json", "it is no Hugging Face model directory"
    )
    model, _ = load(
        source, "cpu", {"bfloat16": torch.bfloat16}.get(settings.get("dtype", ""), torch.float32)
    )
    packed_weights = packing(model, config)(unique_weights(model, copy=True))
    tensors = {name: tensor.contiguous() for name, tensor in packed_weights}
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(
        settings | {"quantization_config": quantization_config(model, config)}, indent=2
    )
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")
    copy_extras(source, directory)


def packing(model: nn.Module, config: QuantConfig) -> Transform:
    """Create a transform for `Trainer.transforms` from a model's weights to those
    of a packed directory."""
    config = replace(config, activations=False)  # files hold weights
    grid, names = grid_of(config), quantized_names(model, config)
    assert grid is not None
    stage = packed(
        grid,
        frozenset(name for name in names if name.endswith(".weight"))
        | set(_expert_names(model, names)),
    )
    return lambda weights: stage(_per_expert(weights, names))


def quantization_config(model: nn.Module, config: QuantConfig) -> dict[str, Any]:
    """Return `quantization_config` of config.json for a model's packed directories."""
    config = replace(config, activations=False)
    grid, names = grid_of(config), quantized_names(model, config)
    assert grid is not None
    return grid.config(
        n
        for n, m in model.named_modules()
        if isinstance(m, nn.Linear) and f"{n}.weight" not in names
    )


def _per_expert(weights: Weights, names: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights with the names of files: stacked experts one by one, gate and
    up projections apart."""
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
            parts = [matrix] if last == "down_proj" else matrix.chunk(2)
            for own, part in zip(
                ("down_proj",) if len(parts) == 1 else ("gate_proj", "up_proj"), parts, strict=True
            ):
                yield f"{stem}.{number}.{own}.weight", part


def _expert_names(model: nn.Module, names: frozenset[str]) -> Iterator[str]:
    stacked = (
        (name, tensor)
        for name, tensor in model.state_dict().items()
        if name in names and tensor.dim() == 3
    )
    return (name for name, _ in _per_expert(stacked, names))
