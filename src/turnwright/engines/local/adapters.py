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
        ends, ranks = [0], sum(shape.rank for _, shape in shapes)
        for _, shape in shapes:
            ends.append(ends[-1] + shape.rank)
        self.columns = {number: slice(*ends[i : i + 2]) for i, (number, _) in enumerate(shapes)}
        self.owners = tuple(number for number, shape in shapes for _ in range(shape.rank))
        device = linear.weight.device
        draw = torch.Generator().manual_seed(0)
        self.a = (
            torch.randn(ranks, linear.in_features, generator=draw) / linear.in_features**0.5
        ).to(device)
        self.b = (torch.randn(linear.out_features, ranks, generator=draw) / ranks).to(device)
        self.scales = torch.tensor(
            [shape.scale for _, shape in shapes for _ in range(shape.rank)], device=device
        )

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
        """Raises `EngineError` for a layer that is no linear layer of the model's text decoder,
        whose inputs are the rows."""
        modules, of_rows = dict(module.named_modules()), set(decoder.modules())
        names = list(dict.fromkeys(name for shape in shapes for name in shape.layers))
        for name in names:
            if not isinstance(modules.get(name), nn.Linear) or modules[name] not in of_rows:
                raise EngineError(
                    f"adapter: the decoder of {type(module).__name__} has no linear layer {name!r}"
                )
        self.count = len(shapes)
        self.layers: dict[nn.Module, LowRankLinear] = {}
        self._by_name: dict[str, LowRankLinear] = {}
        for name in names:
            having = [
                (number, shape) for number, shape in enumerate(shapes, 1) if name in shape.layers
            ]
            self._by_name[name] = self.layers[modules[name]] = LowRankLinear(modules[name], having)
        self._owners = {
            one.owners: torch.tensor(one.owners, device=one.a.device)
            for one in self._by_name.values()
        }
        self._masks: dict[tuple[int, ...], Tensor] = {}
        self._of_slot: list[int] = []
        self._on_device = torch.zeros(0, dtype=torch.long)
        self._stale = True

    def hook(self) -> None:
        """Let the layers of the module add their adapters' output."""
        for module, layer in self.layers.items():

            def add(
                module: nn.Module,
                given: tuple[Tensor, ...],
                output: Tensor,
                layer: LowRankLinear = layer,
            ) -> Tensor:
                own = self._masks[layer.owners]
                if given[0].shape[-2] != len(own):
                    raise EngineError(
                        f"adapter: {module} gets {given[0].shape[-2]} of {len(own)} rows"
                    )
                return (output + layer.change(given[0], own)).to(output.dtype)

            module.register_forward_hook(add)

    def assign(self, slot: int, number: int) -> None:
        """Let the rows of a slot take an adapter."""
        self._of_slot += [0] * (slot + 1 - len(self._of_slot))
        self._stale |= self._of_slot[slot] != number
        self._of_slot[slot] = number

    def of(self, slot: int) -> int:
        """Return the adapter of a slot's rows."""
        return self._of_slot[slot] if slot < len(self._of_slot) else 0

    def swap(self, one: int, other: int) -> None:
        """Exchange the adapters of two slots."""
        first, second = self.of(one), self.of(other)
        self.assign(one, second)
        self.assign(other, first)

    def prepare(self, slots: int, device: torch.device) -> None:
        """Bring the adapters of `slots` slots to the device; before each pass,
        outside of a recorded one."""
        if len(self._on_device) < slots:
            self._on_device, self._stale = torch.zeros(slots, dtype=torch.long, device=device), True
        if self._stale:
            count = min(len(self._of_slot), len(self._on_device))
            self._on_device[:count] = torch.tensor(self._of_slot[:count], dtype=torch.long)
            self._stale = False

    def begin(self, slots: Tensor) -> None:
        """Mark the columns of each row of a pass, given the slots [rows]."""
        numbers = self._on_device[slots][:, None]
        self._masks = {owners: numbers == row for owners, row in self._owners.items()}

    def add(self, module: nn.Module, inputs: Tensor, output: Tensor) -> None:
        """Add the adapters of a layer, if it has some, to its output [rows, out] in place."""
        layer = self.layers.get(module)
        if layer is not None:
            output.add_(layer.change(inputs, self._masks[layer.owners]))

    def reset(self) -> None:
        """Set every B to zero, so that no adapter has an effect, and take the
        adapters from all slots."""
        for layer in self._by_name.values():
            layer.b.zero_()
        self._of_slot.clear()
        self._on_device = self._on_device[:0]

    def check(
        self, number: int, weights: Iterable[tuple[str, Any]]
    ) -> list[tuple[str, Tensor, Tensor]]:
        """Return (name, tensor, place) of each matrix of an adapter in peft's layout; raise
        `SyncError` unless they are all of its matrices, in their shapes and finite."""
        found: dict[str, tuple[str, Tensor, Tensor]] = {}
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
            if key in found:
                raise SyncError(f"weight {name!r} was given twice; send each name once")
            if tensor.shape != place.shape:
                raise SyncError(
                    f"weight {name!r} has shape {tuple(tensor.shape)}, the engine's has "
                    f"{tuple(place.shape)}"
                )
            if not bool(torch.isfinite(tensor).all()):
                raise SyncError(f"weight {name!r} is not finite: check the last training updates")
            found[key] = name, tensor, place
        wanted = {
            f"{name}.{half}"
            for name, layer in self._by_name.items()
            if number in layer.columns
            for half in "AB"
        }
        if missing := sorted(wanted - found.keys()):
            raise SyncError(
                f"{len(missing)} matrices of the adapter are missing, first {missing[0]!r}; send "
                "all of them"
            )
        return list(found.values())


def copy_adapter(checked: Iterable[tuple[str, Tensor, Tensor]]) -> str:
    """Copy checked matrices to their places; return the fingerprint of the copies
    where the types match."""
    rows = []
    with torch.no_grad():
        for name, tensor, place in checked:
            place.copy_(tensor)
            rows.append((name, place if place.dtype == tensor.dtype else tensor))
    return fingerprint(rows)
