"""What a forward and a backward pass allocate, seen on short passes and carried on to a long one.

A pass makes the same tensors in the same order however many tokens it has; only their sizes change.
So three short passes (`trace_pass`) give each tensor's size as a polynomial, and the long pass is
played in numbers alone (`carry_on`): its peak is exact where a parabola through the three peaks
would be wrong, since in a short pass the peak may be one large weight's gradient, and in a long one
the activations of all layers.

What a kernel allocates inside itself is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(slots=True)
class Allocations:
    """Blocks of memory in the order in which they came and went."""

    sizes: list[float] = field(default_factory=list)
    """Bytes of each block, in the order of allocation."""
    events: list[int] = field(default_factory=list)
    """A block's number when it is allocated, and -1 minus its number when it is freed."""
    forward_events: int = 0
    """Events of the forward pass, which come first."""

    def live_bytes(self) -> list[float]:
        """Return the bytes in use after each event."""
        live: list[float] = []
        total = 0.0
        for event in self.events:
            total += self.sizes[event] if event >= 0 else -self.sizes[-1 - event]
            live.append(total)
        return live

    @property
    def saved(self) -> float:
        """Bytes in use between the forward and the backward pass."""
        return self.live_bytes()[self.forward_events - 1] if self.forward_events else 0.0

    @property
    def peak(self) -> float:
        """Most bytes in use at once."""
        return max(self.live_bytes(), default=0.0)


def carry_on(
    short: Sequence[Allocations], lengths: Sequence[int], tokens: int, length: int
) -> Allocations:
    """Return the allocations of a pass over `tokens` tokens in rows of `length`, from passes over
    one row each.

    A block has a constant size, a cost per token, and a cost per token and token of its row
    (attention that keeps its weights). Passes that made different blocks, as kernels that choose by
    size do, are reduced to what was saved and the peak.
    """
    if any(allocations.events != short[0].events for allocations in short):
        short = [_saved_and_peak(allocations) for allocations in short]

    powers = torch.tensor([[1.0, n, n * n] for n in lengths], dtype=torch.float64)
    sizes = torch.tensor([allocations.sizes for allocations in short], dtype=torch.float64)
    constant, each, squared = torch.linalg.solve(powers, sizes)
    # Rounding leaves a few bytes in place of 0, which a product of two lengths would make millions
    # of.
    squared = squared.where(squared > 0.01, 0.0)
    carried = constant + each * tokens + squared * (tokens * length)
    return Allocations(carried.clamp(min=0.0).tolist(), short[0].events, short[0].forward_events)


def _saved_and_peak(allocations: Allocations) -> Allocations:
    saved = allocations.saved
    beyond = max(0.0, allocations.peak - saved)
    return Allocations(sizes=[saved, beyond], events=[0, 1], forward_events=1)


def trace_pass(forward: Callable[[], Tensor], known: Iterable[Tensor]) -> Allocations:
    """Run a forward pass and the backward pass of its result, and return what they allocated.

    `known` are the tensors that exist already, such as the model's weights. Their gradients, which
    must be None before, are dropped as soon as they are complete: an estimate counts them once for
    all passes.
    """
    allocations = Allocations()
    leaves = [tensor for tensor in known if tensor.requires_grad]
    hooks = [leaf.register_post_accumulate_grad_hook(drop_gradient) for leaf in leaves]
    try:
        with torch.enable_grad(), _Tracer(allocations, known):
            result = forward()
            allocations.forward_events = len(allocations.events)
            if result.requires_grad:
                result.backward(torch.ones_like(result))
    finally:
        for hook in hooks:
            hook.remove()
    return allocations


def drop_gradient(leaf: Tensor) -> None:
    """Free the gradient of a leaf."""
    leaf.grad = None


class _Tracer(TorchDispatchMode):  # type: ignore[misc]
    """Adds to `allocations` each storage that an operation returns for the first time, and when it
    is freed."""

    def __init__(self, allocations: Allocations, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.allocations = allocations
        self.references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.alive = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            # A packed matrix has no storage to see.
            if isinstance(tensor, Tensor) and not tensor.is_mkldnn:
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address in self.alive:
            return
        number = len(self.allocations.sizes)
        self.alive.add(address)
        self.allocations.sizes.append(storage.nbytes())
        self.allocations.events.append(number)
        self.references[number] = weakref.ref(storage, lambda _: self._freed(address, number))

    def _freed(self, address: int, number: int) -> None:
        self.alive.discard(address)
        self.references.pop(number, None)
        self.allocations.events.append(-1 - number)
