"""LoRA adapters of several policies over one copy of a model: each row of a pass takes its own.

A row x of policy p computes ``W x + s_p B_p (A_p x)``. The A of all policies are one product, and
so are the B; in between, columns of other policies are set to zero. So a row's bits depend on no
other row, and a pass on a GPU can be recorded. (Punica, arXiv 2310.18547, gathers the matrices of
each row in a kernel of its own, which pays with many policies.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from turnwright.engines.local.weights import fingerprint
from turnwright.errors import EngineError, SyncError

_NAME = re.compile(r"(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?P<half>[AB])\.weight")
"""Name of a matrix in peft's files."""


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """What an engine has to know of an adapter before its weights arrive."""

    layers: tuple[str, ...]
    """Names of the linear layers that it changes."""
    rank: int
    scale: float
    """Factor of B A, alpha / rank."""


class LowRankLinear:
    """Adapters of one linear layer: A [all ranks, in], B [out, all ranks] in float32."""

    def __init__(self, linear: nn.Linear, shapes: Sequence[tuple[int, AdapterShape]]) -> None:
        """Take the number and shape of each adapter of the layer.

        B is random, too, until `RowAdapters.reset`.
        """
        self.columns: dict[int, slice] = {}
        """Columns of each adapter among all ranks."""
        owners: list[int] = []
        scales: list[float] = []
        for number, shape in shapes:
            self.columns[number] = slice(len(owners), len(owners) + shape.rank)
            owners += [number] * shape.rank
            scales += [shape.scale] * shape.rank
        self.owners = tuple(owners)
        """Adapter of each column."""

        ranks = len(owners)
        device = linear.weight.device
        generator = torch.Generator().manual_seed(0)
        a = torch.randn(ranks, linear.in_features, generator=generator) / linear.in_features**0.5
        self.a = a.to(device)
        b = torch.randn(linear.out_features, ranks, generator=generator) / ranks
        self.b = b.to(device)
        self.scales = torch.tensor(scales, device=device)

    def change(self, inputs: Tensor, own: Tensor) -> Tensor:
        """Return what the adapters add for inputs [..., in], in float32.

        `own` [rows, all ranks] marks each row's columns: another policy's values must not be
        multiplied by zero, since they may be infinite.
        """
        inner = (inputs.to(self.a.dtype) @ self.a.T) * self.scales
        return torch.where(own, inner, 0.0) @ self.b.T


class RowAdapters:
    """Adapters 1, 2, ... of a model; rows of number 0 have none."""

    def __init__(
        self, module: nn.Module, decoder: nn.Module, shapes: Sequence[AdapterShape]
    ) -> None:
        """Take a model, its text decoder and the shapes of the adapters.

        Raises `EngineError` for a layer that is no linear layer of the decoder, whose inputs are
        the rows.
        """
        modules = dict(module.named_modules())
        decoder_modules = set(decoder.modules())
        names = list(dict.fromkeys(name for shape in shapes for name in shape.layers))
        for name in names:
            is_linear = isinstance(modules.get(name), nn.Linear)
            if not is_linear or modules[name] not in decoder_modules:
                raise EngineError(
                    f"adapter: the decoder of {type(module).__name__} has no linear layer {name!r}"
                )

        self.count = len(shapes)
        self.layers: dict[nn.Module, LowRankLinear] = {}
        self._by_name: dict[str, LowRankLinear] = {}
        for name in names:
            numbered = enumerate(shapes, 1)
            layer_shapes = [(number, shape) for number, shape in numbered if name in shape.layers]
            layer = LowRankLinear(modules[name], layer_shapes)
            self._by_name[name] = layer
            self.layers[modules[name]] = layer

        # Layers with equal columns share a mask.
        self._owners: dict[tuple[int, ...], Tensor] = {}
        for layer in self._by_name.values():
            self._owners[layer.owners] = torch.tensor(layer.owners, device=layer.a.device)
        self._masks: dict[tuple[int, ...], Tensor] = {}
        """[rows, all ranks] of the running pass: which columns are a row's own."""
        self._of_slot: list[int] = []
        self._on_device = torch.zeros(0, dtype=torch.long)
        """Copy of `_of_slot` on the device."""
        self._stale = True
        """Whether that copy lags behind."""

    def hook(self) -> None:
        """Let the layers of the module add their adapters' output."""
        for module, layer in self.layers.items():

            def add(
                module: nn.Module,
                arguments: tuple[Tensor, ...],
                output: Tensor,
                layer: LowRankLinear = layer,
            ) -> Tensor:
                inputs = arguments[0]
                own_columns = self._masks[layer.owners]
                if inputs.shape[-2] != len(own_columns):
                    raise EngineError(
                        f"adapter: {module} gets {inputs.shape[-2]} of {len(own_columns)} rows"
                    )
                return (output + layer.change(inputs, own_columns)).to(output.dtype)

            module.register_forward_hook(add)

    def assign(self, slot: int, number: int) -> None:
        """Let the rows of a slot take an adapter."""
        self._of_slot += [0] * (slot + 1 - len(self._of_slot))
        self._stale |= self._of_slot[slot] != number
        self._of_slot[slot] = number

    def of(self, slot: int) -> int:
        """Return the adapter of a slot's rows."""
        return self._of_slot[slot] if slot < len(self._of_slot) else 0

    def swap(self, first: int, second: int) -> None:
        """Exchange the adapters of two slots."""
        adapter_of_first = self.of(first)
        self.assign(first, self.of(second))
        self.assign(second, adapter_of_first)

    def prepare(self, slots: int, device: torch.device) -> None:
        """Bring the adapters of `slots` slots to the device, before each pass and outside of a
        recorded one."""
        if len(self._on_device) < slots:
            self._on_device = torch.zeros(slots, dtype=torch.long, device=device)
            self._stale = True
        if self._stale:
            count = min(len(self._of_slot), len(self._on_device))
            self._on_device[:count] = torch.tensor(self._of_slot[:count], dtype=torch.long)
            self._stale = False

    def begin(self, slots: Tensor) -> None:
        """Mark the columns of each row of a pass, given the slots [rows]."""
        numbers = self._on_device[slots][:, None]
        self._masks = {owners: numbers == columns for owners, columns in self._owners.items()}

    def add(self, module: nn.Module, inputs: Tensor, output: Tensor) -> None:
        """Add the adapters of a layer, if it has some, to its output [rows, out] in place."""
        layer = self.layers.get(module)
        if layer is not None:
            output.add_(layer.change(inputs, self._masks[layer.owners]))

    def reset(self) -> None:
        """Set every B to zero, so that no adapter has an effect, and take the adapters from all
        slots."""
        for layer in self._by_name.values():
            layer.b.zero_()
        self._of_slot.clear()
        self._on_device = self._on_device[:0]

    def check(
        self, number: int, weights: Iterable[tuple[str, Any]]
    ) -> list[tuple[str, Tensor, Tensor]]:
        """Return (name, tensor, place) of each matrix of an adapter in peft's layout.

        Raises `SyncError` unless they are all of its matrices, in their shapes and finite.
        """
        checked: dict[str, tuple[str, Tensor, Tensor]] = {}
        for name, tensor in weights:
            match = _NAME.fullmatch(name)
            layer = self._by_name.get(match["layer"]) if match else None
            columns = layer.columns.get(number) if layer else None
            if match is None or layer is None or columns is None:
                raise SyncError(
                    f"weight {name!r} is unknown to the adapter; send its matrices by peft's names"
                )
            place = layer.a[columns] if match["half"] == "A" else layer.b[:, columns]
            key = f"{match['layer']}.{match['half']}"
            if key in checked:
                raise SyncError(f"weight {name!r} was given twice; send each name once")
            if tensor.shape != place.shape:
                raise SyncError(
                    f"weight {name!r} has shape {tuple(tensor.shape)}, the engine's has "
                    f"{tuple(place.shape)}"
                )
            if not bool(torch.isfinite(tensor).all()):
                raise SyncError(f"weight {name!r} is not finite: check the last training updates")
            checked[key] = (name, tensor, place)

        needed: set[str] = set()
        for name, low_rank in self._by_name.items():
            if number in low_rank.columns:
                needed |= {f"{name}.A", f"{name}.B"}
        missing = sorted(needed - checked.keys())
        if missing:
            raise SyncError(
                f"{len(missing)} matrices of the adapter are missing, first {missing[0]!r}; send "
                "all of them"
            )
        return list(checked.values())


def copy_adapter(checked: Iterable[tuple[str, Tensor, Tensor]]) -> str:
    """Copy checked matrices to their places.

    Return the fingerprint of the copies where the types match.
    """
    copies: list[tuple[str, Tensor]] = []
    with torch.no_grad():
        for name, tensor, place in checked:
            place.copy_(tensor)
            copies.append((name, place if place.dtype == tensor.dtype else tensor))
    return fingerprint(copies)
