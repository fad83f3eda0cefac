"""The optimizer: AdamW with float32 masters, and how far a gradient agrees with earlier ones.

What follows from that agreement for the length of steps is in `gradient_signal.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor, nn

from turnwright.config import TrainConfig
from turnwright.errors import ModelError
from turnwright.training.distributed import full_tensor, shard_like
from turnwright.training.forward.ranks import Ranks
from turnwright.training.trainer.heap import LARGE_WEIGHTS

_MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's averages of gradients and of their squares, in torch and in files."""
Direction = dict[Tensor, Tensor]
"""A change of each parameter, by the parameter that the optimizer updates."""


class Agreement(NamedTuple):
    """How far a gradient points along another one."""

    cosine: float
    scaled: float
    """Cosine with each coordinate in units of its own root mean square, as in Adam's steps."""
    norm: float
    """L2 norm of the gradient."""


WHOLE = 1 << 22
"""Numbers of a parameter up to which its gradient is compared as a whole."""
PIECE = 1 << 20
"""Numbers of a piece where it is larger. Five intermediate results of 28 million embeddings would
be 0.6 GB."""


def _cosine(dot: float, square: float, other_square: float) -> float:
    return dot / math.sqrt(square * other_square) if square > 0 and other_square > 0 else 0.0


class Optimizer:
    """AdamW (arXiv 1711.05101) with gradient clipping, and float32 masters for models of lower
    precision.

    A bfloat16 weight has 8 significant bits: updates below 1/256 of it are rounded away, and at
    learning rates of 1e-6 nearly all are. So such models train on a float32 copy, which is rounded
    back after each update.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, ranks: Ranks) -> None:
        self.ranks = ranks
        self.max_grad_norm = config.max_grad_norm

        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in trained]
        self.params = [p for _, p in trained]
        self.masters = self.params
        if any(p.dtype in (torch.bfloat16, torch.float16) for p in self.params):
            self.masters = [p.detach().float().clone() for p in self.params]

        # No weight decay on norms and biases.
        matrices = [p for p in self.masters if p.dim() > 1]
        vectors = [p for p in self.masters if p.dim() <= 1]
        # One fused kernel for all: 0.2 ms instead of 0.7 on the tiny model.
        fused = all(
            p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in self.masters
        )
        self.adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=fused,
        )

        is_plain = ranks.size == 1 and all(
            type(p.data) is Tensor and p.device.type == "cpu" and p.dtype == torch.float32
            for p in self.masters
        )
        is_large = 4 * sum(p.numel() for p in self.masters) >= LARGE_WEIGHTS
        self.one_pass = is_plain and is_large
        """Whether gradients are compared by a kernel, for a large model on a CPU."""

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for p in self.params:
            p.grad = None

    def clip_gradient(self) -> float:
        """Scale the gradients down to `max_grad_norm` if their norm is larger; return the L2 norm
        of the full gradient as it was. `step` needs this call."""
        if self.masters is not self.params:
            for master, p in zip(self.masters, self.params, strict=True):
                master.grad = None if p.grad is None else p.grad.float()
        norm = torch.nn.utils.clip_grad_norm_(self.masters, self.max_grad_norm)
        return float(self.ranks.full(norm))

    def gradient(self) -> Direction:
        """Return the gradient; it stays as it is after `zero_grad`."""
        return {
            master: p.grad
            for master, p in zip(self.masters, self.params, strict=True)
            if p.grad is not None
        }

    def momentum(self) -> Direction:
        """Return Adam's average of past gradients; empty before the first step."""
        return {p: self.adamw.state[p]["exp_avg"] for p in self.masters if self.adamw.state.get(p)}

    def agreement(
        self, gradient: Direction, other: Direction, *, without: bool = False
    ) -> Agreement | None:
        """Return how a gradient agrees with another one, such as the momentum; None if either is 0.

        Noise of different episodes is as often against another gradient as along it; signal is
        along it. `without` takes the other gradient off first, of which it is a part.
        """
        sums = []
        for parameter, its_gradient in gradient.items():
            if parameter in other:
                sums.append(self._dots(parameter, its_gradient, other[parameter], without))
        if not sums:
            return None

        # One transfer for all.
        total = self.ranks.sum_(torch.stack(sums).double().sum(0))
        dot, square, other_square, *scaled = total.tolist()
        if not (square > 0 and other_square > 0):
            return None
        return Agreement(_cosine(dot, square, other_square), _cosine(*scaled), math.sqrt(square))

    def _dots(self, p: Tensor, gradient: Tensor, other: Tensor, without: bool) -> Tensor:
        """Return the dot product of this rank's parts of two gradients of a parameter, and each
        one's square; then the same with each coordinate divided by its mean square over steps, as
        Adam's second moment will have it."""
        own = self.ranks.local(gradient).flatten()
        past = self.ranks.local(other).flatten()
        state = self.adamw.state.get(p)
        squares = self.ranks.local(state["exp_avg_sq"]).flatten() if state else None

        if self.one_pass:
            # numba takes a while to import.
            from turnwright.training.trainer.dot_products import dot_products

            beta = self.adamw.defaults["betas"][1]
            eps = self.adamw.defaults["eps"]
            no_squares = past[:0]
            arrays = (own, past, no_squares if squares is None else squares)
            numbers = [array.float().numpy() for array in arrays]
            return torch.from_numpy(dot_products(*numbers, without, beta, eps**2))

        size = len(own) if len(own) <= WHOLE else PIECE
        pieces = zip(
            own.split(size),
            past.split(size),
            repeat(None) if squares is None else squares.split(size),
            strict=False,
        )
        dots = [self._dots_of_piece(*piece, without) for piece in pieces]
        return dots[0] if len(dots) == 1 else torch.stack(dots).sum(0)

    def _dots_of_piece(
        self, own: Tensor, past: Tensor, squares: Tensor | None, without: bool
    ) -> Tensor:
        own = own.to(past.dtype)
        if without:
            own = own - past

        beta = self.adamw.defaults["betas"][1]
        eps = self.adamw.defaults["eps"]
        square = own.square()
        square = square + past.square() if squares is None else squares.lerp(square, 1.0 - beta)
        scaled_own = own / (square + eps**2)
        scaled_past = past / (square + eps**2)

        return torch.stack(
            [
                torch.dot(own, past),
                torch.dot(own, own),
                torch.dot(past, past),
                torch.dot(scaled_own, past),
                torch.dot(scaled_own, own),
                torch.dot(scaled_past, past),
            ]
        )

    @contextmanager
    def moved(self, direction: Direction, size: float) -> Iterator[None]:
        """Move the parameters against a direction by a vector of this length, and back."""
        before = [p.detach().clone() for p in direction]
        with torch.no_grad():
            squares = torch.stack([self.ranks.local(d).square().sum() for d in direction.values()])
            norm = math.sqrt(self.ranks.sum_(squares.double().sum()).item())
            for p, change in direction.items():
                p.sub_(change, alpha=size / norm)
            try:
                yield
            finally:
                for p, old in zip(direction, before, strict=True):
                    p.copy_(old)

    def parameters(self) -> list[Tensor]:
        """Return copies of the parameters, for `shorten`."""
        return [master.detach().clone() for master in self.masters]

    def shorten(self, before: Sequence[Tensor], share: float) -> None:
        """Go back towards parameters of earlier: a share of the way from them remains.

        The moments stay.
        """
        with torch.no_grad():
            for master, old in zip(self.masters, before, strict=True):
                if share:
                    master.copy_(old + share * (master - old))
                else:  # what became infinite or no number stays so times 0
                    master.copy_(old)
        self._round()

    def step(self, lr: float) -> None:
        """Update the parameters from the gradients that `grad_norm` clipped."""
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self._round()

    def _round(self) -> None:
        """Copy the masters to parameters of lower precision."""
        if self.masters is not self.params:
            with torch.no_grad():
                for master, p in zip(self.masters, self.params, strict=True):
                    p.copy_(master)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the state for an exact resume by parameter name: moments, step counts and masters,
        if any."""
        for name, master in zip(self.names, self.masters, strict=True):
            state = self.adamw.state.get(master)
            if state:
                yield f"step.{name}", state["step"].reshape(1)
                for moment in _MOMENTS:
                    yield f"{moment}.{name}", full_tensor(state[moment])
            if self.masters is not self.params:
                yield f"master.{name}", full_tensor(master)

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore the tensors of `tensors`.

        Raises:
            ModelError: when they are of another model.
        """
        unknown = sorted({name.partition(".")[2] for name in tensors} - set(self.names))
        if unknown:
            raise ModelError(
                f"the optimizer state is of another model: this model has no {unknown[0]!r}"
            )

        self.adamw.state.clear()
        for name, master in zip(self.names, self.masters, strict=True):
            if f"step.{name}" in tensors:
                # The fused kernel needs the count on the parameter's device.
                device = master.device if master.device.type == "cuda" else "cpu"
                count = tensors[f"step.{name}"].reshape(()).to(device)
                state = {"step": count.clone()}
                for moment in _MOMENTS:
                    state[moment] = self._like(tensors[f"{moment}.{name}"], master, name)
                self.adamw.state[master] = state
            if self.masters is not self.params and f"master.{name}" in tensors:
                with torch.no_grad():
                    master.copy_(self._like(tensors[f"master.{name}"], master, name))

    @staticmethod
    def _like(tensor: Tensor, master: Tensor, name: str) -> Tensor:
        if tensor.shape != master.shape:
            raise ModelError(
                f"the optimizer state of {name!r} has shape {list(tensor.shape)}, the model's is "
                f"{list(master.shape)}"
            )
        return shard_like(tensor, master)


def schedule(kind: str, step: int, steps: int, warmup: int = 0) -> float:
    """Return the learning rate at a step (from 0) as a share of the peak.

    Up to the peak it rises linearly over `warmup` steps, of which the first is not 0, then it falls
    from 1 towards 0: linearly, by a cosine, or not if `constant`.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if kind == "constant":
        return 1.0

    done = min(max((step - warmup) / max(steps - warmup, 1), 0.0), 1.0)
    if kind == "linear":
        return 1.0 - done
    return 0.5 * (1.0 + math.cos(math.pi * done))
