"""What each rank of the tests does, and a single process likewise: the same steps by
the trainer's own calls."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from kit.training import M, P, chain, random_groups, with_turns
from torch import nn

from turnwright.config import LoraConfig, QuantConfig, TrainConfig
from turnwright.config.names import ALGORITHMS
from turnwright.errors import TurnwrightError
from turnwright.training import Checkpoints, Ranks, Trainer, add_lora
from turnwright.training.distributed import ProcessRanks
from turnwright.training.model import models
from turnwright.training.model.quantize import (
    OnGrid,
    grid_of,
    quantize_for_training,
    quantized_names,
)
from turnwright.training.trainer.leader import RankZeroTrainer, follow_rank_zero
from turnwright.types import Group, Task

STEPS, HALF = 5, 3
LONE, NONE = 1, 2
"""Steps in which one rank alone has something to train, and neither has."""
IDS = list(range(3, 20))
CASES = {
    "grpo": {},
    # Everything that scores, corrects, or needs a whole trajectory at once.
    "gspo": {
        "algorithm": "gspo",
        "minibatches": 2,
        "epochs": 2,
        "kl": 0.1,
        "correction": "tis",
        "gradient_signal_steps": 5,
    },
    "lora": {"kl": 0.1},
    "bfloat16": {},
    "int4": {},
    "fp8": {},
}
QUANT = {"int4": QuantConfig(kind="int4", group=8), "fp8": QuantConfig(kind="fp8", block=8)}
CASES |= {name: {"algorithm": name} for name in ALGORITHMS if name not in CASES}
# A critic makes four updates a step; none shall be large where the gradient is rounding alone.
CASES |= {name: {"algorithm": name, "eps": 1e-3} for name in ("ppo", "turn_ppo", "bilevel_ppo")}


def steps_of(step: int):
    """Groups of a step: mostly many passes; once a single trajectory that is trained, which one
    rank gets; once none."""
    if step == LONE:
        rows = [chain([(P, [1, 2]), (M, [3, 4, 5])], sample=n, reward=float(n)) for n in (0, 1)]
        rows[0].spans[1].untrained = "banned_id"
        return [Group(Task("t", id="t"), rows)]
    if step == NONE:
        return [
            Group(
                Task("t", id="t"),
                [chain([(P, [1, 2]), (M, [3])], sample=n, reward=1.0) for n in (0, 1)],
            )
        ]
    groups = random_groups(step, groups=3 + step % 3, size=3, high=4 + 5 * (step % 4))
    for number, group in enumerate(groups):
        # Were all tasks equally hard, a critic's gradient would be rounding alone, of which Adam
        # makes steps.
        for trajectory in group.trajectories:
            trajectory.reward += 0.5 * (number % 2)
            with_turns(trajectory)
    return groups


def make(case: str, source: Path, ranks: ProcessRanks) -> Trainer:
    model = models.load(source, dtype=torch.bfloat16 if case == "bfloat16" else torch.float32)[0]
    if case.startswith("lora"):
        add_lora(model, LoraConfig(rank=4), seed=1)
    config = TrainConfig(lr=1e-3, max_mismatch=1e9, micro_tokens=64, **CASES[case])
    return trainer_of(case, model, config, ranks)


def trainer_of(case: str, model: nn.Module, config: TrainConfig, ranks: Ranks) -> Trainer:
    quant = QUANT.get(case, QuantConfig())
    names = quantized_names(model, quant)
    quantize_for_training(model, quant)
    trainer = Trainer(model, config, seed=3, ranks=ranks)
    if grid := grid_of(quant):
        trainer.transforms.append(OnGrid(grid, names))
    return trainer


def play(case: str, source: Path, out: Path, ranks: ProcessRanks) -> None:
    """Steps, with a checkpoint in the middle; what they came to is written by rank 0."""
    trainer = make(case, source, ranks)
    warm = [trainer.supervised(random_groups(9)[0].trajectories, lr=1e-3)]
    trainer.reset_optimizer()
    trainer.reference()
    kept = Checkpoints(out / case, source) if ranks.rank == 0 else None
    figures = []
    for step in range(STEPS):
        figures.append(trainer.step(steps_of(step), step=step, steps=STEPS).metrics)
        if step + 1 in (HALF, STEPS):
            if kept is not None:
                kept.save(f"step-{step + 1}", trainer, {"step": step + 1})
            else:  # the calls that saving makes
                trainer.save_weights(out, source)
                trainer.save(out)
    sent = dict(trainer.weights())
    scored = trainer.logprobs([t for g in random_groups(1) for t in g.trajectories])
    if ranks.rank == 0:
        torch.save(sent, out / f"{case}.pt")
        (out / f"{case}.json").write_text(
            json.dumps({"warm": warm, "steps": figures, "scored": scored})
        )


def lead(source: Path, out: Path, ranks: ProcessRanks) -> None:
    """Rank 0 calls, and the others do what it calls; an error of all ends nothing."""

    def begin() -> RankZeroTrainer:
        return RankZeroTrainer(models.load(source)[0], TrainConfig(max_mismatch=1e9), ranks=ranks)

    if ranks.rank:
        follow_rank_zero(ranks, begin)
        return
    ranks.broadcast(())
    trainer = begin()
    before = trainer.expected(IDS)
    try:
        trainer.supervised([], lr=0.1)
    except TurnwrightError as error:
        said = str(error)
    loss = trainer.step(steps_of(0), step=0, steps=9).metrics["loss"]
    (out / "lead.json").write_text(json.dumps([before, trainer.expected(IDS), said, loss]))
    ranks.stop_workers()


def play_all(source: Path, out: Path, cases: list[str]) -> None:
    """What a rank does."""
    torch.set_num_threads(1)
    joined = ProcessRanks()
    lead(source, out, joined)
    for name in cases:
        play(name, source, out, joined)
    joined.leave()
