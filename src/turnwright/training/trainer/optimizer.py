"""AdamW with float32 masters, and the gradient-agreement learning rate."""

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

_SLOTS = ("exp_avg", "exp_avg_sq")
Direction = dict[Tensor, Tensor]
"""A change of each parameter, by the parameter that the optimizer updates."""


class Agreement(NamedTuple):
    """How far a gradient points along another one."""

    cosine: float
    scaled: float
    """Cosine with each coordinate in units of its own root mean square, as in Adam's steps."""
    norm: float
    """L2 norm of the gradient."""


WHOLE, PIECE = 1 << 22, 1 << 20
"""Numbers of a parameter up to which its gradient is compared as a whole, and of a piece where it
is larger. Five intermediate results of 28 million embeddings would be 0.6 GB."""


def _cosine(dot: float, square: float, other_square: float) -> float:
    return dot / math.sqrt(square * other_square) if square > 0 and other_square > 0 else 0.0


class Optimizer:
    """AdamW (arXiv 1711.05101) with gradient clipping, and float32 masters for
    models of lower precision.

    A bfloat16 weight has 8 significant bits: updates below 1/256 of it are rounded away, and at
    learning rates of 1e-6 nearly all are. So such models train on a float32 copy, which is
    rounded back after each update.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, ranks: Ranks) -> None:
        self.ranks = ranks
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in named]
        self.params = [p for _, p in named]
        low = any(p.dtype in (torch.bfloat16, torch.float16) for p in self.params)
        self.masters = [p.detach().float().clone() for p in self.params] if low else self.params
        matrices = [p for p in self.masters if p.dim() > 1]
        vectors = [p for p in self.masters if p.dim() <= 1]
        # No weight decay on norms and biases. One fused kernel for all: 0.2 ms instead of
        # 0.7 on the tiny model.
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
        self.max_grad_norm = config.max_grad_norm
        plain = all(
            type(p.data) is Tensor and p.device.type == "cpu" and p.dtype == torch.float32
            for p in self.masters
        )
        self.one_pass = (
            plain and ranks.size == 1 and 4 * sum(p.numel() for p in self.masters) >= LARGE_WEIGHTS
        )
        """Whether gradients are compared by a kernel, for a large model on a CPU."""

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for p in self.params:
            p.grad = None

    def grad_norm(self) -> float:
        """Return the L2 norm of the full gradient; scale the gradients down to
        `max_grad_norm` if it is larger."""
        if self.masters is not self.params:
            for master, p in zip(self.masters, self.params, strict=True):
                master.grad = None if p.grad is None else p.grad.float()
        return float(
            self.ranks.full(torch.nn.utils.clip_grad_norm_(self.masters, self.max_grad_norm))
        )

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
        """Return how a gradient agrees with another one, or with the momentum; None if either is 0.
        Noise of different episodes is as often against another gradient as along it; signal is
        along it. `without` takes the other gradient off first, of which it is a part."""
        sums = [self._dots(p, g, other[p], without) for p, g in gradient.items() if p in other]
        if not sums:
            return None
        # One transfer for all.
        dot, square, other_square, *scaled = self.ranks.sum_(
            torch.stack(sums).double().sum(0)
        ).tolist()
        if not (square > 0 and other_square > 0):
            return None
        return Agreement(_cosine(dot, square, other_square), _cosine(*scaled), math.sqrt(square))

    def _dots(self, p: Tensor, gradient: Tensor, other: Tensor, without: bool) -> Tensor:
        """Return the dot product of this rank's parts of two gradients of a parameter, and each
        one's square; then the same with each coordinate divided by its mean square over steps, as
        Adam's second moment will have it."""
        o, g = self.ranks.local(other).flatten(), self.ranks.local(gradient).flatten()
        state = self.adamw.state.get(p)
        past = self.ranks.local(state["exp_avg_sq"]).flatten() if state else None
        if self.one_pass:
            from turnwright.training.trainer.dot_products import (
                dot_products,
            )  # numba takes a while to import

            beta, eps = self.adamw.defaults["betas"][1], self.adamw.defaults["eps"]
            numbers = [one.float().numpy() for one in (g, o, o[:0] if past is None else past)]
            return torch.from_numpy(dot_products(*numbers, without, beta, eps**2))
        size = len(g) if len(g) <= WHOLE else PIECE
        parts = zip(
            g.split(size),
            o.split(size),
            repeat(None) if past is None else past.split(size),
            strict=False,
        )
        dots = [self._dots_of_part(*part, without) for part in parts]
        return dots[0] if len(dots) == 1 else torch.stack(dots).sum(0)

    def _dots_of_part(self, g: Tensor, o: Tensor, past: Tensor | None, without: bool) -> Tensor:
        g = g.to(o.dtype)
        g = g - o if without else g
        beta, eps = self.adamw.defaults["betas"][1], self.adamw.defaults["eps"]
        square = g.square()
        square = square + o.square() if past is None else past.lerp(square, 1.0 - beta)
        scaled_g, scaled_o = g / (square + eps**2), o / (square + eps**2)
        pairs = (g, o), (g, g), (o, o), (scaled_g, o), (scaled_g, g), (scaled_o, o)
        return torch.stack([torch.dot(*pair) for pair in pairs])

    @contextmanager
    def moved(self, direction: Direction, size: float) -> Iterator[None]:
        """Move the parameters against a direction by a vector of this length, and back."""
        before = [p.detach().clone() for p in direction]
        with torch.no_grad():
            squares = torch.stack([self.ranks.local(d).square().sum() for d in direction.values()])
            norm = math.sqrt(self.ranks.sum_(squares.double().sum()).item())
            for p, d in direction.items():
                p.sub_(d, alpha=size / norm)
            try:
                yield
            finally:
                for p, old in zip(direction, before, strict=True):
                    p.copy_(old)

    def parameters(self) -> list[Tensor]:
        """Return copies of the parameters, for `shorten`."""
        return [master.detach().clone() for master in self.masters]

    def shorten(self, before: Sequence[Tensor], share: float) -> None:
        """Go back towards parameters of earlier: a share of the way from them
        remains. The moments stay."""
        with torch.no_grad():
            for master, old in zip(self.masters, before, strict=True):
                # What became infinite or no number stays so times 0.
                master.copy_(old + share * (master - old) if share else old)
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
        """Yield the state for an exact resume by parameter name: moments, step
        counts and masters, if any."""
        for name, master in zip(self.names, self.masters, strict=True):
            state = self.adamw.state.get(master)
            if state:
                yield f"step.{name}", state["step"].reshape(1)
                for slot in _SLOTS:
                    yield f"{slot}.{name}", full_tensor(state[slot])
            if self.masters is not self.params:
                yield f"master.{name}", full_tensor(master)

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore the tensors of `tensors`. Raises `ModelError` when they are of another model."""
        unknown = sorted({name.partition(".")[2] for name in tensors} - set(self.names))
        if unknown:
            raise ModelError(
                f"the optimizer state is of another model: this model has no {unknown[0]!r}"
            )
        self.adamw.state.clear()
        for name, master in zip(self.names, self.masters, strict=True):
            if f"step.{name}" in tensors:
                state = {
                    slot: self._like(tensors[f"{slot}.{name}"], master, name) for slot in _SLOTS
                }
                # The fused kernel needs the count on the parameter's device.
                count = (
                    tensors[f"step.{name}"]
                    .reshape(())
                    .to(master.device if master.device.type == "cuda" else "cpu")
                )
                self.adamw.state[master] = {"step": count.clone(), **state}
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
    """Return the learning rate at a step (from 0) as a share of the peak: up to it linearly over
    `warmup` steps, of which the first is not 0, then from 1 down towards 0, or 1 if `constant`."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    step, steps = step - warmup, steps - warmup
    if kind == "constant":
        return 1.0
    done = min(max(step / max(steps, 1), 0.0), 1.0)
    return 1.0 - done if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


STANDARD_ERRORS = 3.0
"""Standard errors by which the average must exceed 0 to count. With 2, noise did so in 8 of 20
controls of 180 steps, and one policy in 20 was broken."""


YOUNG = 4
"""Steps whose agreement is split by tasks, by one more forward pass each: their spread shows a
strong signal at once."""


def standard_errors(average: float, variance: float, terms: float) -> float:
    """Return the standard errors that an average of noise around 0 is above it, from the
    sum of its squared terms.

    Few terms say little about their spread: the average over the root of `variance` follows
    Student's t. The result is the normal deviate of the same rarity (Wallace, Ann. Math. Stat. 30,
    1959), with a degree of freedom less than terms of equal size have, since older ones are
    smaller; 0 for fewer than five terms.
    """
    freedom = terms - 2.0
    if average <= 0 or freedom < 3.0:
        return 0.0
    if average**2 >= terms * variance:
        return math.inf
    rarity = -freedom * math.log1p(-(average**2) / (terms * variance))
    return (8.0 * freedom + 1.0) / (8.0 * freedom + 3.0) * math.sqrt(rarity)


def signal_share(agreement: float, beta: float) -> float:
    """Return the share of the momentum's squared length that is signal, from its
    cosine with a new gradient.

    A gradient g is the true one, G, plus noise; a momentum m averages k = (1 + beta) / (1 - beta)
    such gradients. With r the signal-to-noise ratio of one gradient::

        E<g, m> = |G|^2      |g|^2 = |G|^2 (1 + 1 / r)      |m|^2 = |G|^2 (1 + 1 / (k r))
        agreement^2 = <g, m>^2 / (|g|^2 |m|^2) = r / (1 + r) * k r / (1 + k r)

    Solved for r, the share is ``k r / (1 + k r)``. A step along m times that share is nearest to
    the one along G. It is the optimal step of McCandlish et al. (arXiv 1812.06162, eq. 2.7: 1 / (1
    + noise scale / batch)) with the episodes that m averages as the batch. With several updates by
    each gradient `beta` is what a weight falls to from one to the next.
    """
    square = min(max(agreement, 0.0), 1.0) ** 2
    if square >= 1.0:
        return 1.0
    k = (1.0 + beta) / (1.0 - beta)
    half = square * (1.0 + k) / 2.0
    r = (half + math.sqrt(half * half + k * (1.0 - square) * square)) / (k * (1.0 - square))
    return k * r / (1.0 + k * r)


STILL = 5
"""A policy that was not updated has the gradient that it had: what is known of it lasts
so many times longer."""


class GradientSignal:
    """Moving average of a run's gradient agreements over `memory` steps, and the learning-rate
    share it implies (1 if 0)."""

    def __init__(self, memory: int, beta: float) -> None:
        self.memory = memory
        self.beta = beta
        self.average = 0.0
        """Starts at 0: no evidence."""
        self.variance = 0.0
        """Variance of `average` if agreements were noise around 0: the sum of its squared terms."""
        self.weight = 0.0
        """Sum of the weights of the steps in `average`."""
        self.squares = self.fourths = 0.0
        """Sums of the second and fourth powers of the weights of known steps, of their
        parts for the latter."""

    @property
    def terms(self) -> float:
        """Number of terms of equal size that tell as much of the variance (Satterthwaite,
        Biometrics Bulletin 2, 1946)."""
        return self.squares**2 / self.fourths if self.fourths else 0.0

    @property
    def is_young(self) -> bool:
        """Whether the average has too few steps for their spread to say something: it
        needs their tasks' parts."""
        return (
            self.weight < 1.0 - (1.0 - 1.0 / self.memory) ** YOUNG - 1e-9 if self.memory else False
        )

    def update(
        self, agreement: float | None, parts: Sequence[float] = (), *, moved: bool = True
    ) -> None:
        """Add one step's agreement; None (unknown) counts as 0. `parts` are those of independent
        tasks in it. `moved`: whether the step before updated the policy."""
        if self.memory:
            weight = 1.0 / self.memory
            kept, value = 1.0 - weight / (1 if moved else STILL), agreement or 0.0
            self.average = kept * self.average + weight * value
            self.weight = kept * self.weight + weight
            square = math.fsum(part * part for part in parts or (value,))
            self.variance = kept**2 * self.variance + weight**2 * square
            known = 0.0 if agreement is None else weight
            self.squares = kept**2 * self.squares + known**2
            self.fourths = kept**4 * self.fourths + known**4 / max(len(parts), 1)

    @property
    def share(self) -> float:
        """Factor on the learning rate, from 0 to 1; 0 unless the average exceeds three standard
        errors, as noise does one time in 700. An average that has just exceeded them may be noise:
        its square loses the share of it that the square of three standard errors is, so the factor
        rises from 0. It is corrected for its start, as Adam's are (arXiv 1412.6980, section 3)."""
        if not self.memory:
            return 1.0
        errors = standard_errors(self.average, self.variance, self.terms)
        if errors <= STANDARD_ERRORS:
            return 0.0
        square = self.average**2 * (1.0 - (STANDARD_ERRORS / errors) ** 2)
        return signal_share(math.sqrt(square) / self.weight, self.beta)

    def state(self) -> tuple[float, ...]:
        """Return the arguments of `restore`."""
        return self.average, self.variance, self.weight, self.squares, self.fourths

    def restore(
        self, average: float, variance: float, weight: float, squares: float, fourths: float
    ) -> None:
        """Restore what `state` returned."""
        self.average, self.variance, self.weight = average, variance, weight
        self.squares, self.fourths = squares, fourths
