"""LoRA through peft: train small matrices beside linear layers instead of the layers (arXiv
2106.09685).

A layer computes ``W x + scale * B (A x)`` with ``scale = alpha / rank``; A starts random and B at
zero, so the initial model is unchanged. Engines get merged weights, ``W + scale * B A``;
checkpoints hold only A and B, in peft's own layout.

`add_lora` adds an adapter to a model, `load_adapter` that of a directory, `unload` merges it for
good. `Adapter` is what training does with one: merge its weights on their way to an engine, switch
it off for the reference policy, save it.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from turnwright.config import LoraConfig
from turnwright.engines.local.adapters import AdapterShape
from turnwright.engines.local.vision import split_vlm
from turnwright.errors import ConfigError, ModelError
from turnwright.training.distributed import local_shard
from turnwright.training.low_rank import ADAPTER_NAME, merge_weight
from turnwright.training.model.directory import ADAPTER_FILE, read_json
from turnwright.training.model.weight_export import Weights

WEIGHTS_FILE = "adapter_model.safetensors"
ALL = "all"
"""Target for every linear layer of the text model except its head."""
_PREFIX = "base_model.model."
"""Prefix of module names in peft's files."""
_PART = re.compile(
    rf"(?P<layer>.+)\.(?:base_layer\.(?P<own>\w+)|(?P<half>lora_[AB])\.{ADAPTER_NAME}\.weight)"
)


class Adapter:
    """LoRA adapter of a model prepared by peft."""

    def __init__(self, model: nn.Module) -> None:
        """Find the model's adapter layers.

        Raises `ConfigError` for adapters of another kind, which cannot be merged here.
        """
        from peft.tuners.lora import Linear as LoraLinear
        from peft.tuners.tuners_utils import BaseTunerLayer

        self.config: Any = model.peft_config[ADAPTER_NAME]
        self.layers: dict[str, Any] = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, BaseTunerLayer)
        }
        for name, layer in self.layers.items():
            if (
                not isinstance(layer, LoraLinear)
                or layer.lora_variant
                or layer.fan_in_fan_out
                or any(layer.lora_bias.values())
            ):
                raise ConfigError(
                    f"the adapter of {name} is no plain LoRA of a linear layer; others cannot be "
                    "merged here"
                )
        self.scales = {
            name: float(layer.scaling[ADAPTER_NAME]) for name, layer in self.layers.items()
        }

    def merge(self, weights: Weights) -> Weights:
        """Transform that merges adapters and restores the tensor names of a model without peft."""
        # A layer's W, A and B come apart, and are merged with the last of them.
        waiting: dict[str, dict[str, Tensor]] = {}
        for name, tensor in weights:
            part = _PART.fullmatch(name)
            layer = part["layer"] if part else ""
            if part is None or layer not in self.layers:
                yield name, tensor
            elif part["own"] not in (None, "weight"):
                yield f"{layer}.{part['own']}", tensor
            else:
                matrices = waiting.setdefault(layer, {})
                matrices[part["half"] or "W"] = tensor
                if len(matrices) == 3:
                    # The merged weight has no name, which would keep it until the next is merged.
                    yield (
                        f"{layer}.weight",
                        merge_weight(
                            matrices["W"],
                            matrices["lora_A"],
                            matrices["lora_B"],
                            self.scales[layer],
                        ),
                    )
                    del waiting[layer]

    def in_layout(self, weights: Weights) -> Weights:
        """Transform that keeps only the adapters, by peft's file names."""
        for name, tensor in weights:
            part = _PART.fullmatch(name)
            if part is not None and part["half"]:
                yield f"{_PREFIX}{part['layer']}.{part['half']}.weight", tensor

    @property
    def is_initial(self) -> bool:
        """Whether every B is still zero on this rank, so that the adapter has no effect."""
        return not any(
            bool(local_shard(layer.lora_B[ADAPTER_NAME].weight).count_nonzero())
            for layer in self.layers.values()
        )

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Disable the adapters in this context; for passes without gradient."""
        try:
            for layer in self.layers.values():
                # `enable_adapters` would also remove the gradients of A and B.
                layer._disable_adapters = True
            yield
        finally:
            for layer in self.layers.values():
                layer._disable_adapters = False

    @contextmanager
    def dropout(self) -> Iterator[None]:
        """Enable dropout before A, if the adapter has any."""
        drops = [layer.lora_dropout[ADAPTER_NAME] for layer in self.layers.values()]
        try:
            for drop in drops:
                drop.train()
            yield
        finally:
            for drop in drops:
                drop.eval()

    def peft_config(self) -> dict[str, Any]:
        """Return the content of peft's adapter_config.json."""
        with tempfile.TemporaryDirectory() as folder:
            # Leaves sets, enums and run-time values to peft.
            self.config.save_pretrained(folder)
            return read_json(Path(folder) / ADAPTER_FILE, "peft wrote none")

    def save(self, tensors: Mapping[str, Tensor], directory: Path, base: Path | None) -> None:
        """Write the adapter of base model directory `base` in peft's layout; tensors are by the
        names of `in_layout`."""
        self.config.base_model_name_or_path = None if base is None else str(base.resolve())
        self.config.save_pretrained(directory)
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, directory / WEIGHTS_FILE, {"format": "pt"})


def adapter_of(model: nn.Module) -> Adapter | None:
    """Return the adapter of a model, None if it has none."""
    return Adapter(model) if hasattr(model, "peft_config") else None


def shape_of(model: nn.Module, config: LoraConfig) -> AdapterShape:
    """Return the shape of the adapter that `add_lora` will add to a model."""
    alpha = 2 * config.rank if config.alpha is None else config.alpha
    layers = tuple(linear_layers(model, config.targets))
    return AdapterShape(layers, config.rank, alpha / config.rank)


def add_lora(model: nn.Module, config: LoraConfig, *, seed: int = 0) -> Adapter:
    """Add adapters to a model in place and freeze the rest; those of a bfloat16 model are in
    float32.

    Args:
        seed: of the random A.

    Raises:
        ConfigError: when peft is not installed, or a target is no linear layer.
    """
    shape = shape_of(model, config)
    peft_config = _peft().LoraConfig(
        r=shape.rank,
        lora_alpha=2 * config.rank if config.alpha is None else config.alpha,
        lora_dropout=config.dropout,
        target_modules=list(shape.layers),
        task_type="CAUSAL_LM",
        bias="none",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _inject(model, peft_config)


def load_adapter(model: nn.Module, directory: str | Path) -> Adapter:
    """Load the adapter of a directory in peft's layout into its base model, in place.

    Raises:
        ModelError: when it is unreadable or of another model.
        ConfigError: without peft, or for a kind that cannot be merged.
    """
    directory = Path(directory)
    peft = _peft()
    try:
        adapter = _inject(model, peft.LoraConfig.from_pretrained(str(directory)))
        tensors = dict(load_file(directory / WEIGHTS_FILE))
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise ModelError(
            f"{directory}: its LoRA adapter cannot be read ({' '.join(str(error).split())[:200]})"
        ) from error

    named = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    parameters = dict(adapter.in_layout(named))
    mismatched = sorted(parameters.keys() ^ tensors.keys())
    if not mismatched:
        for name, parameter in parameters.items():
            if parameter.shape != tensors[name].shape:
                mismatched.append(name)
    if mismatched:
        raise ModelError(
            f"{directory}: the LoRA adapter belongs to another model: {mismatched[0]} does not fit"
        )

    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])
    return adapter


def unload(model: nn.Module, adapter: Adapter) -> None:
    """Merge a model's adapter into it and remove peft, in place."""
    for name, layer in adapter.layers.items():
        linear = layer.base_layer
        a = layer.lora_A[ADAPTER_NAME].weight
        b = layer.lora_B[ADAPTER_NAME].weight
        with torch.no_grad():
            linear.weight.copy_(merge_weight(linear.weight, a, b, adapter.scales[name]))
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, linear)
    del model.peft_config


def linear_layers(model: nn.Module, targets: tuple[str, ...]) -> list[str]:
    """Resolve `all`, or suffixes such as `q_proj` or `mlp.up_proj`, to linear layers; raise
    `ConfigError` if one has none."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]

    # Of the text model: without its head, and without a vision tower.
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    tower, _ = split_vlm(model)
    vision = {name for name, _ in tower.vision_parameters()} if tower is not None else set()
    text: list[str] = []
    for name in linear:
        if model.get_submodule(name) is not head and f"{name}.weight" not in vision:
            text.append(name)

    layers: list[str] = []
    for target in targets:
        if target == ALL:
            matches = text
        else:
            matches = [name for name in linear if name == target or name.endswith(f".{target}")]
        if not matches:
            kinds = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError(
                f"lora.targets: {type(model).__name__} has no linear layer {target!r}; it has "
                f"{', '.join(kinds)}, and {ALL!r} for all of its text model"
            )
        layers += [name for name in matches if name not in layers]
    return layers


def _inject(model: nn.Module, config: Any) -> Adapter:
    peft = _peft()
    peft.inject_adapter_in_model(config, model, ADAPTER_NAME)
    for name, parameter in model.named_parameters():
        part = _PART.fullmatch(name)
        parameter.requires_grad_(part is not None and part["half"] is not None)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.eval()
    return Adapter(model)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError("LoRA needs the package peft; pip install 'turnwright[lora]'") from error
    return peft
