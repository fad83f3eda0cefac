"""Estimate of a step's peak memory, before training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from turnwise.engines import Engine, HasContextLimit
from turnwise.engines.local import LocalEngine
from turnwise.errors import ConfigError
from turnwise.rollouts.garbage import resident_bytes
from turnwise.training.forward.batch import MicroBatch
from turnwise.training.forward.forward import ForwardPass, chunk_numbers
from turnwise.training.trainer.trainer import Trainer

LENGTHS = (16, 32, 64)
"""Ids of the measured passes; a parabola through them extrapolates to longer ones."""
WORKING = 1.5
"""Backward working memory relative to the forward pass' saved tensors; measured by `benchmarks/memory.py`."""
GIB = 2**30


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes at the peak of a training step."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    engine: int
    """The local engine's copy of the weights; its KV cache grows with use."""
    activations: int
    """Activations of one pass of `tokens` tokens, forward and backward."""
    logits: int
    """A chunk of targets, with the gradient of the head."""
    tokens: int

    @property
    def fixed(self) -> int:
        """Bytes needed independent of micro-batches."""
        return self.weights + self.gradients + self.optimizer + self.reference + self.engine

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        # Outgoing copies of the weights are made while no pass is running.
        return self.fixed + max(self.activations + self.logits, self.weights)

    def text(self, have: int | None) -> str:
        """Format the estimate and the available bytes, None if unknown, as one line."""
        names = ("weights", "gradients", "optimizer", "reference", "engine", "activations", "logits")
        parts = ", ".join(f"{name} {format_gib(getattr(self, name))}" for name in names if getattr(self, name))
        of = "" if have is None else f" of {format_gib(have)}"
        return (
            f"memory: about {format_gib(self.total)}{of} at the peak of a step ({parts}; passes of {self.tokens} "
            f"tokens, text alone)"
        )


def estimate(trainer: Trainer, *, longest: int, engine: bool = True) -> MemoryEstimate:
    """Estimate the memory of a step with rows of `longest` ids; an `engine` is a copy of the weights on the same device.

    The memory that a forward pass saves for the backward pass is measured on short passes and extrapolated to
    `train.micro_tokens` by a parabola, which covers attention that saves a square of the length.
    """
    weights = _bytes(trainer.model.parameters()) + _bytes(trainer.model.buffers())
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    # While a gradient is accumulated it exists twice: at worst the largest one.
    gradients = _bytes(trained) + max((p.nbytes for p in trained), default=0)
    low = any(p.dtype in (torch.bfloat16, torch.float16) for p in trained)
    # Two moments; with float32 masters also those and a float32 copy of the gradient.
    optimizer = sum(p.numel() for p in trained) * (16 if low else 2 * (trained[0].element_size() if trained else 4))
    tokens = trainer.micro_batch_limit.tokens
    return MemoryEstimate(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        # A copy of the trained parameters, and one of those it replaces while active.
        reference=2 * _bytes(trained) if trainer.keeps_reference else 0,
        engine=weights if engine else 0,
        activations=int(WORKING * activation_bytes(trainer.forward, tokens, min(longest, tokens), trainer.device)),
        logits=_logits(trainer.forward, tokens, trainer.device),
        tokens=tokens,
    )


def activation_bytes(forward: ForwardPass, tokens: int, length: int, device: torch.device) -> float:
    """Return the bytes that a forward pass over `tokens` tokens, in rows of `length`, saves up to the head."""
    if forward.body is None and forward.tower is None:
        return 0.0
    x = torch.tensor(LENGTHS, dtype=torch.float64)
    y = torch.tensor([_saved_bytes(forward, n, device) for n in LENGTHS], dtype=torch.float64)
    a, b, c = torch.linalg.solve(torch.stack([torch.ones_like(x), x, x**2], 1), y).tolist()
    # A constant per pass, a cost per token, and a cost per token and token of its row.
    return float(max(0.0, a) + b * tokens + max(0.0, c) * tokens * length)


def _saved_bytes(forward: ForwardPass, count: int, device: torch.device) -> int:
    ids_bt = torch.zeros(1, count, dtype=torch.long, device=device)
    at_m = torch.arange(count, device=device)
    micro = MicroBatch(ids_bt=ids_bt, positions=at_m[None], before_m=at_m, targets_m=ids_bt[0], tokens_m=at_m)
    parameters = {p.untyped_storage().data_ptr() for p in forward.model.parameters()}
    found: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        # Kept alive while counting, so that no address is counted for two tensors.
        hidden_md = forward.hidden(micro)
        size = sum(found.values())
    del hidden_md
    return size


def _logits(forward: ForwardPass, tokens: int, device: torch.device) -> int:
    """Estimate a chunk of logits with intermediate results and the gradient of the head's weights; or all logits."""
    if forward.head is None:
        width = int(getattr(getattr(forward.model, "config", None), "vocab_size", 0))
        return 4 * 4 * tokens * width
    width = forward.head.vocabulary
    weight = getattr(forward.head.module, "weight", None)
    chunked = tokens * width > chunk_numbers(device)
    weight_grad = 4 * weight.numel() if chunked and isinstance(weight, Tensor) and weight.requires_grad else 0
    return 4 * 4 * min(tokens * width, chunk_numbers(device)) + weight_grad


def available_bytes(device: torch.device) -> int | None:
    """Return the bytes that this process may use on a device, those in use included; None if unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + int(torch.cuda.memory_reserved(device))
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, ValueError, StopIteration):
        return None
    have = free + resident_bytes()
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            have = min(have, int(Path(limit).read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue
    return have


def report_memory(trainer: Trainer, longest: int | None, engine: Engine, note: Callable[[str], None]) -> None:
    """Report a step's estimated memory and what is available, for rows of `longest` ids (None uses the engine's limit); nothing
    for several ranks, which share devices."""
    if trainer.ranks.size == 1:
        limit = engine.context if isinstance(engine, HasContextLimit) else None
        longest = longest or limit or trainer.micro_batch_limit.tokens
        own = isinstance(engine, LocalEngine)
        note(check_memory(estimate(trainer, longest=longest, engine=own), available_bytes(trainer.device)))


def check_memory(found: MemoryEstimate, have: int | None) -> str:
    """Format the estimate, with a warning close to the available memory; raise `ConfigError` when the fixed part is over it."""
    text = found.text(have)
    if have is None or found.total <= 0.9 * have:
        return text
    if found.fixed > have:
        raise ConfigError(
            f"{text}: weights, gradients and optimizer alone need {format_gib(found.fixed)}. Train fewer parameters, use a "
            'smaller model, model.dtype = "bfloat16" or a device with more memory'
            + (", or set train.kl = 0" if found.reference else "")
        )
    each = (found.activations + found.logits) / found.tokens
    fits = int((0.9 * have - found.fixed) / each) if each else 0
    what = f"train.micro_tokens = {fits // 128 * 128}" if fits >= 256 else "a smaller train.micro_tokens and shorter episodes"
    return f"{text}, which may not fit: {what} would"


def format_gib(size: float) -> str:
    """Format bytes as GiB or MiB."""
    return f"{size / GIB:.1f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.0f} MiB"


def _bytes(tensors: Iterable[Tensor | nn.Parameter]) -> int:
    """Sum the bytes of tensors, tied ones once."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in tensors}.values())
