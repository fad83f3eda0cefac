"""Estimate of a step's peak memory, before training.

`report_memory` is what a run says before its first step, `estimate` counts what a step holds. The
part of a forward and a backward pass is measured on short passes and carried on to long ones
(`allocations.py`). What happens when memory runs out all the same is in `micro_batches.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from turnwright.config import Limits
from turnwright.engines import Engine, HasContextLimit
from turnwright.engines.local import LocalEngine
from turnwright.errors import ConfigError
from turnwright.rollouts.garbage import resident_bytes
from turnwright.training.forward.forward import chunk_rows
from turnwright.training.forward.passes import MicroBatch
from turnwright.training.trainer.allocations import Allocations, carry_on, trace_pass
from turnwright.training.trainer.trainer import Trainer

LENGTHS = (16, 32, 64)
"""Ids of the measured passes."""
HEAP = 1.25
"""Memory that holds a pass on a CPU over what the pass uses: the C library does not take a freed
block for the next tensor of its size. Fitted to the cases of `benchmarks/memory.py`."""
HEAP_OF_SMALL_BLOCKS = 2.2
"""The same where a pass frees large tensors between small ones that stay, as with gradient
checkpointing or a LoRA adapter; but not that of a bfloat16 model, which computes in float32, so
that what it frees has room for two tensors of the model. Memory of its own for each tensor
(`MALLOC_MMAP_THRESHOLD_`) would need neither, and makes a step 20 to 30% longer."""
SPREAD = 1.1
"""Most over least memory from which on both are reported."""
MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes at the peak of a training step."""

    process: int
    """What the process holds before training besides weights: the interpreter, its libraries."""
    weights: int
    gradients: int
    optimizer: int
    reference: int
    """The reference policy's weights, kept between steps."""
    critic: int
    """Weights and moments of a critic's own body; its gradients take the place of the policy's."""
    engine: int
    """The local engine's copy of the weights, and its cache once it is full."""
    activations: int
    """Most that one pass of `tokens` tokens has allocated, forward and backward, up to the head."""
    logits: int
    """What a chunk of targets takes beyond that, with the gradient of the head."""
    update: int
    """Copies of weights that are made while no pass is running."""
    tokens: int
    longest: int
    """Ids of the longest row."""
    takes_images: bool = False
    """Whether rows may have images, which are not counted."""

    @property
    def fixed(self) -> int:
        """Bytes needed independent of micro-batches."""
        return (
            self.process
            + self.weights
            + self.gradients
            + self.optimizer
            + self.reference
            + self.critic
            + self.engine
        )

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return self.fixed + max(self.activations + self.logits, self.update)

    def text(self, have: int | None, least: MemoryEstimate | None = None) -> str:
        """Format the estimate and the available bytes, None if unknown, as one line.

        `least` is the estimate for shorter rows, where their length is not known yet.
        """
        names = ["process", "weights", "gradients", "optimizer", "reference", "critic", "engine"]
        if self.activations + self.logits > self.update:
            names += ["activations", "logits"]
        else:
            names.append("update")
        parts: list[str] = []
        for name in names:
            size = getattr(self, name)
            if size >= MIB:
                parts.append(f"{name} {format_gib(size)}")

        total = f"about {format_gib(self.total)}"
        rows = ""
        if least is not None and self.total > SPREAD * least.total:
            total = f"{format_gib(least.total)} to {format_gib(self.total)}"
            rows = f" for rows of {least.longest} to {self.longest} ids"
        images = ", images not counted" if self.takes_images else ""
        of = "" if have is None else f" of {format_gib(have)}"
        return (
            f"memory: {total}{of} at the peak of a step{rows} ({', '.join(parts)}; passes of "
            f"{self.tokens} tokens{images})"
        )


def estimate(
    trainer: Trainer,
    *,
    longest: int,
    sequences: int | None = None,
    engine: LocalEngine | None = None,
    concurrency: int | None = None,
    passes: Sequence[Allocations] | None = None,
) -> MemoryEstimate:
    """Estimate the memory of a step.

    Args:
        trainer: before its first step.
        longest: ids of the longest row.
        sequences: rows of a step; None if there may be any number of them.
        engine: an engine of the same process and device, whose cache grows with use.
        concurrency: sequences that the engine plays at a time; None if there may be any number.
        passes: of `short_passes`, if they were made before.
    """
    weights = _bytes(trainer.model.parameters()) + _bytes(trainer.model.buffers())
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]

    # Two moments; with float32 masters also those and a float32 copy of the gradient.
    each = 2 * (trained[0].element_size() if trained else 4)
    if any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in trained):
        each = 16
    optimizer = each * sum(parameter.numel() for parameter in trained)

    # A reference of its own takes the place of the trained parameters while it scores, and they
    # wait in a copy. With a LoRA adapter it is the model without the adapter.
    reference = _bytes(trained) if trainer.keeps_reference and trainer.adapter is None else 0

    # A critic's body has the trained parameters once more, and their moments.
    own_body = 0
    if trainer.critic is not None and trainer.critic.body is not None:
        own_body = _bytes(trained)
    critic = own_body + (optimizer if own_body else 0)

    in_engine = 0
    cache = 0
    if engine is not None:
        in_engine = engine.weight_bytes
        cache = max(0, engine.cache_bytes_of(concurrency, longest) - engine.cache_bytes)

    tokens = trainer.micro_batch_limit.tokens
    if sequences is not None:
        tokens = min(tokens, sequences * longest)
    a_pass = carry_on(passes or short_passes(trainer), LENGTHS, tokens, min(longest, tokens))
    heap = _heap(trainer)
    beyond_peak = max(0.0, a_pass.saved + _logits(trainer, tokens) - a_pass.peak)
    return MemoryEstimate(
        process=max(0, _bytes_in_use(trainer.device) - weights - own_body - in_engine),
        weights=weights,
        gradients=_bytes(trained),
        optimizer=optimizer,
        reference=reference,
        critic=critic,
        engine=in_engine + cache,
        activations=int(heap * a_pass.peak),
        logits=int(heap * beyond_peak),
        update=weights,
        tokens=tokens,
        longest=longest,
        takes_images=trainer.forward.tower is not None,
    )


def short_passes(trainer: Trainer) -> list[Allocations]:
    """Run a forward and a backward pass up to the head over rows of `LENGTHS` ids; return what they
    allocate."""
    known = [*trainer.model.parameters(), *trainer.model.buffers()]
    return [trace_pass(partial(_features, trainer, count), known) for count in LENGTHS]


def _features(trainer: Trainer, count: int) -> Tensor:
    """Run a forward pass over one row in which each id is a target."""
    ids_bt = torch.zeros(1, count, dtype=torch.long, device=trainer.device)
    index_m = torch.arange(count, device=trainer.device)
    micro = MicroBatch(
        ids_bt=ids_bt,
        positions=index_m[None],
        before_m=index_m,
        targets_m=ids_bt[0],
        tokens_m=index_m,
    )
    features_md, _ = trainer.forward.features(micro, None)
    return features_md


def _logits(trainer: Trainer, tokens: int) -> int:
    """Estimate a chunk of logits with intermediate results and the gradient of the head's weights;
    or all logits."""
    head = trainer.forward.head
    if head is None:
        width = int(getattr(getattr(trainer.model, "config", None), "vocab_size", 0))
        return 4 * 4 * tokens * width

    width = head.vocabulary
    most = chunk_rows(trainer.device, head) * width
    weight_gradient = 0
    weight = getattr(head.module, "weight", None)
    is_chunked = tokens * width > most
    if is_chunked and isinstance(weight, Tensor) and weight.requires_grad:
        weight_gradient = 4 * weight.numel()
    return 4 * 4 * min(tokens * width, most) + weight_gradient


def _heap(trainer: Trainer) -> float:
    """Return the memory that holds a pass over what the pass uses."""
    if trainer.device.type != "cpu":
        return 1.0
    float32_adapter = trainer.adapter is not None and trainer.dtype == torch.float32
    if float32_adapter or trainer.config.gradient_checkpointing:
        return HEAP_OF_SMALL_BLOCKS
    return HEAP


def _bytes_in_use(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return resident_bytes()


def available_bytes(device: torch.device) -> int | None:
    """Return the bytes that this process may use on a device, those in use included; None if
    unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + int(torch.cuda.memory_reserved(device))

    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(
            int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")
        )
    except (OSError, ValueError, StopIteration):
        return None

    # What a container may use is less than what the machine has.
    have = free + resident_bytes()
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            have = min(have, int(Path(limit).read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue
    return have


def report_memory(
    trainer: Trainer,
    limits: Limits,
    engine: Engine,
    note: Callable[[str], None],
    *,
    sequences: int,
    concurrency: int,
) -> None:
    """Report a step's estimated memory and what is available; nothing for several ranks, which
    share devices.

    How long rows will be is not known yet: at least as long as replies that fill their limits, if
    observations are short; at most as long as the limit or the engine allows.
    """
    if trainer.ranks.size > 1:
        return

    local_engine = engine if isinstance(engine, LocalEngine) else None
    longest = limits.context
    if not longest and isinstance(engine, HasContextLimit):
        longest = engine.context
    longest = longest or trainer.micro_batch_limit.tokens
    shortest = min(longest, limits.turns * limits.turn_tokens)

    passes = short_passes(trainer)
    least = estimate(
        trainer,
        longest=shortest,
        sequences=sequences,
        engine=local_engine,
        concurrency=min(sequences, concurrency),
        passes=passes,
    )
    most = estimate(
        trainer,
        longest=longest,
        sequences=sequences,
        engine=local_engine,
        concurrency=concurrency,
        passes=passes,
    )
    note(check_memory(most, available_bytes(trainer.device), least))


def check_memory(
    most: MemoryEstimate, have: int | None, least: MemoryEstimate | None = None
) -> str:
    """Format the estimate, with a warning close to the available memory; raise `ConfigError` when
    the fixed part is over it."""
    text = most.text(have, least)
    if have is None or most.total <= 0.9 * have:
        return text

    # What is certain is the estimate for the shortest rows.
    certain = least or most
    if certain.fixed > have:
        without_kl = ", or set train.kl = 0" if most.reference else ""
        raise ConfigError(
            f"{text}: weights, gradients and optimizer alone need {format_gib(certain.fixed)}. "
            'Train fewer parameters, use a smaller model, model.dtype = "bfloat16" or a device '
            f"with more memory{without_kl}"
        )

    each = (most.activations + most.logits) / most.tokens
    fitting = int((0.9 * have - most.fixed) / each) if each else 0
    what = "a smaller train.micro_tokens and shorter episodes"
    if fitting >= 256:
        what = f"train.micro_tokens = {fitting // 128 * 128}"
    return f"{text}, which may not fit: {what} would"


def format_gib(size: float) -> str:
    """Format bytes as GiB or MiB."""
    return f"{size / GIB:.1f} GiB" if size >= 0.1 * GIB else f"{size / MIB:.0f} MiB"


def _bytes(tensors: Iterable[Tensor | nn.Parameter]) -> int:
    """Sum the bytes of tensors, tied ones once."""
    sizes = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in tensors}
    return sum(sizes.values())
