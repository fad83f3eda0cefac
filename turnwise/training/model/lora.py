"""LoRA through peft: small matrices beside linear layers are trained in place of the layers (arXiv 2106.09685).

A layer computes ``W x + scale * B (A x)`` with ``scale = alpha / rank``; A begins random and B at zero, so the model begins as
it was. Weights that leave for an engine are merged, ``W + scale * B A``; what is saved is A and B alone, in peft's own layout.
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

from turnwise.config import LoraConfig
from turnwise.engines.local.vision import split_vlm
from turnwise.errors import ConfigError, ModelError
from turnwise.training.distributed import local_shard
from turnwise.training.model.directory import ADAPTER_FILE, read_json
from turnwise.training.model.weights import Weights

WEIGHTS_FILE = "adapter_model.safetensors"
ALL = "all"
"""The target that is every linear layer of the text model but its head."""
_NAME = "default"
"""What peft calls an adapter that is the only one."""
_PREFIX = "base_model.model."
"""What stands before a module's name in files of peft."""
_PART = re.compile(rf"(?P<layer>.+)\.(?:base_layer\.(?P<own>\w+)|(?P<half>lora_[AB])\.{_NAME}\.weight)")


class Adapter:
    """The LoRA of a model whose layers peft has put adapters into."""

    def __init__(self, model: nn.Module) -> None:
        """Find it.

        Raises:
            ConfigError: for adapters of another kind, which cannot be merged here.
        """
        from peft.tuners.lora import Linear as LoraLinear
        from peft.tuners.tuners_utils import BaseTunerLayer

        self.config: Any = model.peft_config[_NAME]
        self.layers: dict[str, Any] = {n: m for n, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
        for name, layer in self.layers.items():
            if not isinstance(layer, LoraLinear) or layer.lora_variant or layer.fan_in_fan_out or any(layer.lora_bias.values()):
                raise ConfigError(f"the adapter of {name} is no plain LoRA of a linear layer; others cannot be merged here")
        self.scales = {name: float(layer.scaling[_NAME]) for name, layer in self.layers.items()}

    def merge(self, weights: Weights) -> Weights:
        """A stage of the seam: adapters go into what they adapt, and every tensor has the name that it has without peft."""
        halves: dict[str, dict[str, Tensor]] = {}
        for name, tensor in weights:
            part = _PART.fullmatch(name)
            layer = part["layer"] if part else ""
            if part is None or layer not in self.layers:
                yield name, tensor
            elif part["own"] not in (None, "weight"):
                yield f"{layer}.{part['own']}", tensor
            else:
                have = halves.setdefault(layer, {})
                have[part["half"] or "W"] = tensor
                if len(have) == 3:
                    yield f"{layer}.weight", merge_weight(have["W"], have["lora_A"], have["lora_B"], self.scales[layer])
                    del halves[layer]

    def in_layout(self, weights: Weights) -> Weights:
        """A stage that leaves adapters alone, by the names that peft gives them in files."""
        for name, tensor in weights:
            part = _PART.fullmatch(name)
            if part is not None and part["half"]:
                yield f"{_PREFIX}{part['layer']}.{part['half']}.weight", tensor

    @property
    def is_initial(self) -> bool:
        """Whether every B is still zero on this rank, so that the model is what it was without adapters."""
        return not any(bool(local_shard(layer.lora_B[_NAME].weight).count_nonzero()) for layer in self.layers.values())

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Have the model compute without its adapters; for passes that need no gradient."""
        try:
            for layer in self.layers.values():
                layer._disable_adapters = True  # `enable_adapters` would take the gradients of A and B away too
            yield
        finally:
            for layer in self.layers.values():
                layer._disable_adapters = False

    @contextmanager
    def dropout(self) -> Iterator[None]:
        """Have dropout in front of A, where the adapter has some."""
        found = [layer.lora_dropout[_NAME] for layer in self.layers.values()]
        try:
            for one in found:
                one.train()
            yield
        finally:
            for one in found:
                one.eval()

    def peft_config(self) -> dict[str, Any]:
        """What peft writes into adapter_config.json."""
        with tempfile.TemporaryDirectory() as folder:  # sets, enums and what only lives at run time are peft's business
            self.config.save_pretrained(folder)
            return read_json(Path(folder) / ADAPTER_FILE, "peft wrote none")

    def save(self, tensors: Mapping[str, Tensor], directory: Path, base: Path | None) -> None:
        """Write the adapter as peft does.

        Args:
            tensors: by the names of `in_layout`.
            base: the model directory that it belongs to.
        """
        path = None if base is None else str(base.resolve())
        self.config.base_model_name_or_path = path
        self.config.save_pretrained(directory)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / WEIGHTS_FILE, {"format": "pt"})


def merge_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """``W + scale * B A``, computed in float32 and rounded once."""
    return (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)


def adapter_of(model: nn.Module) -> Adapter | None:
    """The adapter of a model, None where it has none."""
    return Adapter(model) if hasattr(model, "peft_config") else None


def add_lora(model: nn.Module, config: LoraConfig, *, seed: int = 0) -> Adapter:
    """Put adapters into a model, in place; all else of it is frozen. A bfloat16 model's adapters are in float32.

    Args:
        seed: of the random A.

    Raises:
        ConfigError: when peft is not installed, or a target is no linear layer.
    """
    names = linear_layers(model, config.targets)
    made = _peft().LoraConfig(
        r=config.rank,
        lora_alpha=2 * config.rank if config.alpha is None else config.alpha,
        lora_dropout=config.dropout,
        target_modules=names,
        task_type="CAUSAL_LM",
        bias="none",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _inject(model, made)


def load_adapter(model: nn.Module, directory: str | Path) -> Adapter:
    """Put the adapter of a directory in peft's layout into its base model, in place.

    Raises:
        ModelError: when it cannot be read, or belongs to another model.
        ConfigError: when peft is not installed, or it is of a kind that cannot be merged.
    """
    directory = Path(directory)
    peft = _peft()
    try:
        adapter = _inject(model, peft.LoraConfig.from_pretrained(str(directory)))
        tensors = dict(load_file(directory / WEIGHTS_FILE))
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise ModelError(f"{directory}: its LoRA adapter cannot be read ({' '.join(str(error).split())[:200]})") from error
    own = dict(adapter.in_layout((name, p.detach()) for name, p in model.named_parameters()))
    odd = sorted(own.keys() ^ tensors.keys()) or [name for name in own if own[name].shape != tensors[name].shape]
    if odd:
        raise ModelError(f"{directory}: the LoRA adapter belongs to another model: {odd[0]} does not fit")
    for name, mine in own.items():
        mine.copy_(tensors[name])
    return adapter


def unload(model: nn.Module) -> nn.Module:
    """Merge a model's adapters into it, in place, and leave it as it is without peft."""
    adapter = adapter_of(model)
    for name, layer in adapter.layers.items() if adapter else ():
        linear, a, b = layer.base_layer, layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
        with torch.no_grad():
            linear.weight.copy_(merge_weight(linear.weight, a, b, adapter.scales[name] if adapter else 1.0))
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, linear)
    if adapter is not None:
        del model.peft_config
    return model


def linear_layers(model: nn.Module, targets: tuple[str, ...]) -> list[str]:
    """The names of the linear layers that targets mean: `all`, or ends of names, such as `q_proj` or `mlp.up_proj`.

    Raises:
        ConfigError: for a target that is the end of no linear layer's name.
    """
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    tower, _ = split_vlm(model)
    sight = {name for name, _ in tower.vision_parameters()} if tower is not None else set()
    text = [n for n in linear if model.get_submodule(n) is not head and f"{n}.weight" not in sight]
    found: list[str] = []
    for target in targets:
        fitting = text if target == ALL else [name for name in linear if name == target or name.endswith(f".{target}")]
        if not fitting:
            kinds = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError(
                f"lora.targets: no linear layer of {type(model).__name__} is called {target!r}; there are {', '.join(kinds)}, "
                f"and {ALL!r} for all of its text model"
            )
        found += [name for name in fitting if name not in found]
    return found


def _inject(model: nn.Module, config: Any) -> Adapter:
    peft = _peft()
    peft.inject_adapter_in_model(config, model, _NAME)
    for name, parameter in model.named_parameters():
        half = _PART.fullmatch(name)
        parameter.requires_grad_(half is not None and half["half"] is not None)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.eval()
    return Adapter(model)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError("LoRA needs the package peft; pip install 'turnwise[lora]'") from error
    return peft
