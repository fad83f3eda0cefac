"""The critic: a model of the rewards that an episode still earns, for `ppo`, `turn_ppo` and
`bilevel_ppo`.

Its value of an id is read from the hidden state that predicts the id. That is a state of its own
body, a copy of the policy that is trained for values, or of the policy's body, which it leaves
alone (`train.critic.body`). Values are asked before a step's advantages are computed
(`Critic.values`), and `Critic.learn` moves them towards the step's returns afterwards.

The head works in returns with mean 0 and deviation 1. Both are running averages; when they move,
the last layer moves against them, so that no value changes (PopArt, arXiv 1602.07714).

Suffixes of tensors are those of `forward/batch.py`; `_d` is the width of hidden states.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, silu

from turnwright.config import TrainConfig
from turnwright.errors import ModelError
from turnwright.records.episode_metrics import MAX_TURNS
from turnwright.renderers.vision import PixelCache
from turnwright.training.credit import Credit
from turnwright.training.distributed import shard_like
from turnwright.training.forward.batch import TrainingBatch
from turnwright.training.forward.forward import ForwardPass
from turnwright.training.forward.passes import MicroBatch
from turnwright.training.forward.prefix_tree import install_tree_attention
from turnwright.training.forward.ranks import Ranks
from turnwright.training.trainer.micro_batches import MicroBatchLimit
from turnwright.training.trainer.mismatch import check_finite
from turnwright.training.trainer.optimizer import Optimizer
from turnwright.types.seeds import derive_seed

PARTS = ("head", "body")
"""Parts of a critic, of which the second is its own or none."""
RETURN_DECAY = 0.9
"""Weight of the earlier mean and square of returns at each step."""
SMALLEST_DEVIATION = 1e-3
"""Of returns, in points of reward: smaller ones are not magnified to 1."""


class ValueHead(nn.Module):  # type: ignore[misc]
    """Two layers from hidden states (M, width) to values (M,), in units of the returns' deviation.

    The last layer begins with zeros: a new critic expects the mean.
    """

    def __init__(self, width: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.width = width
        self.inner = nn.Linear(width, hidden, dtype=dtype)
        self.last = nn.Linear(hidden, 1, dtype=dtype)

    def reset(self, seed: int) -> None:
        """Draw the first layer anew, and set the last to zeros."""
        generator = torch.Generator().manual_seed(seed)
        bound = 1.0 / math.sqrt(self.width)
        with torch.no_grad():
            for parameter in self.inner.parameters():
                drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_((2.0 * drawn - 1.0) * bound)
            for parameter in self.last.parameters():
                parameter.zero_()

    def forward(self, hidden_md: Tensor) -> Tensor:
        """Compute values; hidden states of any scale."""
        scaled_md = layer_norm(hidden_md.to(self.inner.weight.dtype), (self.width,))
        values: Tensor = self.last(silu(self.inner(scaled_md))).squeeze(-1)
        return values


@dataclass(slots=True)
class ReturnScale:
    """Running mean and deviation of returns."""

    total: float = 0.0
    """Weight of all steps so far, for means that do not begin at 0."""
    first: float = 0.0
    second: float = 0.0
    """Weighted sums of the returns' means and mean squares."""

    @property
    def mean(self) -> float:
        """Mean of the returns, 0 before the first step."""
        return self.first / self.total if self.total else 0.0

    @property
    def deviation(self) -> float:
        """Deviation of the returns, 1 before the first step."""
        if not self.total:
            return 1.0
        variance = self.second / self.total - self.mean**2
        return max(math.sqrt(max(variance, 0.0)), SMALLEST_DEVIATION)

    def add(self, mean: float, square: float) -> None:
        """Add a step's mean and mean square."""
        self.total = RETURN_DECAY * self.total + (1.0 - RETURN_DECAY)
        self.first = RETURN_DECAY * self.first + (1.0 - RETURN_DECAY) * mean
        self.second = RETURN_DECAY * self.second + (1.0 - RETURN_DECAY) * square


@dataclass(frozen=True, slots=True)
class AskedValues:
    """What a critic expected of a batch's ids before the step."""

    batch: TrainingBatch
    values_n: Tensor
    """In points of reward, float64."""
    features_nd: Tensor | None
    """Hidden states of the policy's body; None for a body of its own."""


def body_of(model: nn.Module, *, shared: bool) -> nn.Module:
    """Return a copy of a model to read values from; with `shared`, what is not trained (the base of
    an adapter, a frozen vision tower) is the model's own."""
    memo = {}
    if shared:
        memo = {id(p): p for p in model.parameters() if not p.requires_grad}
    return copy.deepcopy(model, memo)


class Critic:
    """Critic of one policy.

    Args:
        config: `[train]` of the policy, with the keys of its critic.
        policy: the policy's forward pass, whose hidden states are read where it has no body.
        body: copy of the policy's model that it trains; None reads the policy's.
        limit: how many positions a pass may have.
        pixels: source of images' pixel values.
        seed: seed of the head's first weights.
        trees: whether passes may be prefix trees.
    """

    def __init__(
        self,
        config: TrainConfig,
        policy: ForwardPass,
        body: nn.Module | None,
        ranks: Ranks,
        *,
        limit: MicroBatchLimit,
        pixels: PixelCache | None,
        seed: int,
        trees: bool,
    ) -> None:
        self.config = config.critic
        self._train_config = config
        self._ranks = ranks
        self._limit = limit
        self._pixels = pixels
        self._seed = seed

        # Where hidden states come from.
        self.body = body
        self.forward = policy if body is None else ForwardPass(body)
        width = self.forward.feature_width
        if body is not None:
            if trees and self.forward.decoder is not None:
                install_tree_attention(self.forward.decoder)
            if config.gradient_checkpointing:
                self.forward.enable_checkpointing()
            ranks.shard(body, self.forward)
        self._hidden: Callable[[MicroBatch], Tensor] = self._read
        if self.forward.head is not None:  # without one the pass calls the model itself
            self._hidden = ranks.as_method(self.forward.model, "turnwright_features", self._read)

        # What reads values from them.
        first = next(self.forward.model.parameters())
        dtype = torch.promote_types(first.dtype, torch.float32)
        hidden = self.config.width or width
        self.head = ValueHead(width, hidden, dtype).to(first.device)
        self.reset(policy.model)

    def _read(self, micro: MicroBatch) -> Tensor:
        """Return the hidden states (M, width) of a pass's targets."""
        features_md, _ = self.forward.features(micro, self._pixels)
        return features_md.clone()  # a view would lose the hooks of sharded layers

    def reset(self, model: nn.Module) -> None:
        """Begin anew with the weights of the policy as they are."""
        self.scale = ReturnScale()
        self.updates = 0
        self.head.reset(derive_seed(self._seed, "critic"))

        common = replace(self._train_config, max_grad_norm=self.config.max_grad_norm)
        # Every rank has the whole head, and its gradient.
        self._optimizers = [(Optimizer(self.head, common, Ranks()), self.config.head_lr)]
        if self.body is None:
            return
        with torch.no_grad():
            for own, other in zip(self.body.parameters(), model.parameters(), strict=True):
                if own is not other:
                    own.copy_(other)
        body_lr = self._train_config.lr if self.config.lr is None else self.config.lr
        self._optimizers.append((Optimizer(self.body, common, self._ranks), body_lr))

    # Values.

    def values(self, batch: TrainingBatch) -> AskedValues:
        """Ask what each id of a batch is expected to be followed by."""
        features_nd = None
        with torch.no_grad():
            if self.body is None:
                features_nd = self._limit.run(batch, lambda: self._features(batch))
                scaled_n = self.head(features_nd).double()
            else:
                scaled_n = self._limit.run(batch, lambda: self._scaled(batch))
        values_n = scaled_n * self.scale.deviation + self.scale.mean
        return AskedValues(batch, values_n, features_nd)

    def _features(self, batch: TrainingBatch) -> Tensor:
        size = batch.size, self.head.width
        features_nd = self.head.inner.weight.new_zeros(size)
        for micro, counts in self._ranks.passes(batch.micros):
            features_md = self._hidden(micro)
            if counts:
                features_nd[micro.tokens_m] = features_md.to(features_nd.dtype)
        return self._ranks.sum_(features_nd)

    def _scaled(self, batch: TrainingBatch) -> Tensor:
        scaled_n = torch.zeros_like(batch.weights_n)
        for micro, counts in self._ranks.passes(batch.micros):
            values_m = self.head(self._hidden(micro))
            if counts:
                scaled_n[micro.tokens_m] = values_m.double()
        return self._ranks.sum_(scaled_n)

    # Learning.

    def learn(self, asked: AskedValues, credits: Sequence[Credit]) -> dict[str, float]:
        """Move the values towards a step's targets; return metrics.

        `critic.explained_variance` is 1 - Var(return - value) / Var(return), of the values before
        the step and the returns that came; with `.turn_K`, of turn K alone.
        """
        batch = asked.batch
        targets_n, returns_n = _of_credits(batch, credits)
        asked_n = targets_n.isfinite()
        if not bool(asked_n.any()):
            return {}
        metrics = _explained(asked, returns_n, asked_n)

        # The scale of returns. The first one makes the mean of what a new critic says, 0; later
        # ones move no value.
        targets_k = targets_n[asked_n]
        is_kept = self._rescale(float(targets_k.mean()), float(targets_k.square().mean()))
        scaled_n = (targets_n - self.scale.mean) / self.scale.deviation
        before_n = torch.zeros_like(scaled_n)
        if is_kept:
            before_n = (asked.values_n - self.scale.mean) / self.scale.deviation

        losses, norms = [], []
        for _ in range(self.config.updates):
            loss, norm = self._update(asked, scaled_n, before_n)
            losses.append(loss)
            norms.append(norm)
        return metrics | {
            "critic.loss": losses[0],
            "critic.loss_after": losses[-1],
            "critic.grad_norm": sum(norms) / len(norms),
            "critic.return_mean": self.scale.mean,
            "critic.return_std": self.scale.deviation,
        }

    def _rescale(self, mean: float, square: float) -> bool:
        """Add a step's mean and mean square of targets to the scale; return whether values are what
        they were, as they are but for the first step."""
        is_first = not self.scale.total
        old_mean, old_deviation = self.scale.mean, self.scale.deviation
        self.scale.add(mean, square)
        if is_first:
            return False

        with torch.no_grad():
            self.head.last.weight.mul_(old_deviation / self.scale.deviation)
            self.head.last.bias.mul_(old_deviation)
            self.head.last.bias.add_(old_mean - self.scale.mean)
            self.head.last.bias.div_(self.scale.deviation)
        return True

    def _update(
        self, asked: AskedValues, targets_n: Tensor, before_n: Tensor
    ) -> tuple[float, float]:
        """Make one update; return the loss, and the L2 norm of its gradient before clipping."""

        def clear() -> None:
            for optimizer, _ in self._optimizers:
                optimizer.zero_grad()

        def backward() -> float:
            if asked.features_nd is not None:
                loss = self._loss(self.head(asked.features_nd), targets_n, before_n)
                loss.backward()
                return float(loss.detach())
            return self._backward(asked.batch, targets_n, before_n)

        clear()
        loss = self._limit.run(asked.batch, backward, undo=clear)
        squares = [optimizer.clip_gradient() ** 2 for optimizer, _ in self._optimizers]
        norm = math.sqrt(sum(squares))
        check_finite(loss, norm, "the critic's step")
        for optimizer, lr in self._optimizers:
            optimizer.step(lr)
        clear()
        self.updates += 1
        return loss, norm

    def _backward(self, batch: TrainingBatch, targets_n: Tensor, before_n: Tensor) -> float:
        """Run forward and backward of this rank's passes; return the loss of all ranks."""
        count = targets_n.isfinite().sum()
        total = torch.zeros((), dtype=torch.float64, device=targets_n.device)
        for micro, counts in self._ranks.passes(batch.micros):
            tokens_m = micro.tokens_m
            values_m = self.head(self._hidden(micro))
            loss = self._loss(values_m, targets_n[tokens_m], before_n[tokens_m], count)
            if not counts:
                loss = 0.0 * loss
            loss.backward()
            total += loss.detach()

        # Sharded layers have summed their gradients over the ranks already.
        for parameter in self.head.parameters():
            if parameter.grad is not None:
                self._ranks.sum_(parameter.grad)
        return float(self._ranks.sum_(total))

    def _loss(
        self,
        values_m: Tensor,
        targets_m: Tensor,
        before_m: Tensor,
        count: Tensor | None = None,
    ) -> Tensor:
        """Compute half the mean square of the errors where there is a target; `count` targets are
        in all passes.

        With `clip`, of the larger error of the value and of the value clipped to that range around
        the one before the step (as PPO's released code does; arXiv 2005.12729).
        """
        asked_m = targets_m.isfinite()
        if count is None:
            count = asked_m.sum()
        targets_m = torch.where(asked_m, targets_m, 0.0).to(values_m.dtype)
        errors_m = (values_m - targets_m).square()
        if self.config.clip is not None:
            before_m = before_m.to(values_m.dtype)
            clipped_m = before_m + (values_m - before_m).clamp(-self.config.clip, self.config.clip)
            errors_m = torch.maximum(errors_m, (clipped_m - targets_m).square())
        return 0.5 * (errors_m * asked_m).sum() / count

    # State.

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the state for an exact resume: body, head, their optimizers, and the scale."""
        yield "updates", torch.tensor([self.updates])
        scale = [self.scale.total, self.scale.first, self.scale.second]
        yield "scale", torch.tensor(scale, dtype=torch.float64)
        for part, (optimizer, _) in zip(PARTS, self._optimizers, strict=False):
            for name, parameter in zip(optimizer.names, optimizer.params, strict=True):
                yield f"{part}.{name}", self._ranks.full(parameter.detach())
            for name, tensor in optimizer.tensors():
                yield f"optimizer_{part}.{name}", tensor

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the tensors of `tensors`; raise `ModelError` when they are of another critic."""
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            parts.setdefault(part, {})[rest] = tensor

        self.updates = int(parts["updates"][""])
        self.scale = ReturnScale(*parts["scale"][""].tolist())
        for part, (optimizer, _) in zip(PARTS, self._optimizers, strict=False):
            self._put(parts.get(part, {}), optimizer)
            optimizer.restore(parts.get(f"optimizer_{part}", {}))

    @staticmethod
    def _put(tensors: Mapping[str, Tensor], optimizer: Optimizer) -> None:
        for name, parameter in zip(optimizer.names, optimizer.params, strict=True):
            if name not in tensors or tensors[name].shape != parameter.shape:
                raise ModelError(
                    f"the critic of the checkpoint is another: {name!r} does not fit; set "
                    "train.critic as it was, or begin a new run"
                )
            with torch.no_grad():
                parameter.copy_(shard_like(tensors[name], parameter))


def _of_credits(batch: TrainingBatch, credits: Sequence[Credit]) -> tuple[Tensor, Tensor]:
    """Return the targets and the returns of a batch's ids, NaN where there is none."""
    learned = {id(credit.trajectory): credit.for_critic for credit in credits}
    targets, returns = [], []
    for index, (span, offset) in zip(batch.trajectory_n.tolist(), batch.slots, strict=True):
        lesson = learned.get(id(batch.trajectories[index]))
        targets.append(math.nan if lesson is None else lesson.targets[span][offset])
        returns.append(math.nan if lesson is None else lesson.returns[span][offset])
    device = batch.weights_n.device
    return (
        torch.tensor(targets, dtype=torch.float64, device=device),
        torch.tensor(returns, dtype=torch.float64, device=device),
    )


def _explained(asked: AskedValues, returns_n: Tensor, asked_n: Tensor) -> dict[str, float]:
    """Return the explained variance of the values that were asked, and that of each turn."""
    name = "critic.explained_variance"
    parts = {name: asked_n}
    turn_n = torch.tensor(asked.batch.turn_numbers(), device=returns_n.device) + 1
    for turn in range(1, min(int(turn_n.max()), MAX_TURNS) + 1):
        parts[f"{name}.turn_{turn}"] = asked_n & (turn_n == turn)

    metrics = {}
    for part, of_part_n in parts.items():
        share = explained_variance(asked.values_n[of_part_n], returns_n[of_part_n])
        if share is not None:
            metrics[part] = share
    return metrics


def explained_variance(values_k: Tensor, returns_k: Tensor) -> float | None:
    """Compute 1 - Var(return - value) / Var(return); None where returns do not differ."""
    if returns_k.numel() < 2:
        return None
    variance = returns_k.var(correction=0)
    if variance <= 1e-12:
        return None
    return float(1.0 - (returns_k - values_k).var(correction=0) / variance)
