"""Parts `trainer` and `trl` of `real_model.py`: the trainer's step, and training
against TRL's `GRPOTrainer`.

`trainer`: groups of 8 episodes whose rewards differ are sampled once, and trained on again and
again by each kind at a learning rate of 1e-12, so that the weights stay those that sampled them.
They are of two kinds of work: 2 groups of a `story` that the model tells in four turns with replies
of up to 48 ids (`real_model_story.py`), by which kinds are compared, and 8 groups of the recipe's
own task `hop` by the warmed model, whose step is so short that what does not depend on its size,
such as Adam's update, is most of it.

`trl`: all sides train `hop` from the same warmed weights, as `recipes/quickstart_llm.toml` says but
for a constant learning rate: 8 groups of 8 on the same tasks, 6 turns, 12 ids a turn where a cut
reply does not end the episode, temperature 1, full fine-tuning, no KL. Ours is a run of
`turnwright train` with all that it records; TRL's is `real_model_trl.py`, in a Python that has TRL.
Each side is a process of one thread that waits while another makes its step; a step's CPU is all
that its process spends from one step's end to the next. On a GPU (`--device cuda`) it is the time
of a step, until all that was launched is done.

    python benchmarks/real_model_training.py DIRECTORY KIND DEVICE STEPS SEED OUT DESCRIPTOR
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from real_model_common import (
    RECIPE,
    ROOT,
    Kind,
    OwnTurns,
    Side,
    Spent,
    TrainingStep,
    load,
    model_config,
    timed,
)

sys.path.insert(0, str(ROOT / "src"))
from turnwright.config import EnvConfig, Limits, RunConfig
from turnwright.config import load as load_recipe
from turnwright.records import ProgressListener
from turnwright.rollouts.rollout_settings import RolloutSettings

OURS, THEIRS = "turnwright", "TRL"
GOAL, IN_A_ROW = 0.8, 2
FIRST_STEP = 2
"""Number of the first measured step: in two of twenty, the first two, a trainer also records what
an engine must sample."""
STILL = 1e-12
"""Learning rate that changes no weight by more than rounding."""


# Part trainer


def training_work() -> dict[str, RunConfig]:
    """Return the settings of each kind of work."""
    recipe = load_recipe(RECIPE).config
    # Kinds differ by more than an engine and a trainer of one kind may.
    recipe = replace(
        recipe, train=replace(recipe.train, lr=STILL, schedule="constant", max_mismatch=1.0)
    )
    story = EnvConfig(use=str(Path(__file__).with_name("real_model_story.py")) + ":Story")
    limits = Limits(context=1024, turns=4, turn_tokens=48, on_turn_length="continue")
    rollout = replace(recipe.rollout, groups=2)
    return {"story": replace(recipe, env=(story,), limits=limits, rollout=rollout), "hop": recipe}


async def sample_groups(directory: Path, kind: Kind, config: RunConfig) -> list[Any]:
    """Return a step's groups, sampled by the engine, whose rewards differ within each."""
    from turnwright.engines.local import LocalEngine
    from turnwright.envs.resolve import resolve_env
    from turnwright.rollouts import EpisodeSpec, Rollout, group_by_task
    from turnwright.types import EpisodeKey

    count = config.rollout.groups
    env_spec = resolve_env(config.env[0])
    model, renderer = load(directory, kind)
    engine = LocalEngine(model, renderer=renderer)
    rollout = Rollout(engine, renderer, RolloutSettings(limits=config.limits))

    groups: list[Any] = []
    for task in env_spec.tasks("train", 8 * count, 0):
        keys = [
            EpisodeKey("train", 0, task.id, sample) for sample in range(config.rollout.group_size)
        ]
        (group,) = group_by_task(
            await rollout.play([EpisodeSpec.of(env_spec, task, key) for key in keys])
        )
        if len({trajectory.reward for trajectory in group.trajectories}) > 1:
            groups.append(group)
        if len(groups) == count:
            break
    await engine.close()
    return groups


@dataclass(frozen=True)
class PassSize:
    """What the forward passes of a step compute."""

    positions: int
    """Rows of the layers: each shared prefix once where the trainer packs trees."""
    predicting: int
    """Rows of the head: positions before an id that carries loss."""

    @classmethod
    def of(cls, micros: Sequence[Any]) -> PassSize:
        """Count the rows of passes."""
        positions = sum(micro.ids_bt.numel() for micro in micros)
        return cls(positions, sum(micro.before_m.unique().numel() for micro in micros))


class TrainerPart:
    """The trainers of each kind of work and of computation; those of the same work
    train on the same episodes.

    Args:
        directories: weights of each kind of work, by its name.
        kinds: kinds of computation.
    """

    def __init__(self, directories: Mapping[str, Path], kinds: Sequence[Kind]) -> None:
        from turnwright.training.forward.ranks import Ranks
        from turnwright.training.setup import make_trainer

        self.work, self.kinds = training_work(), kinds
        self.groups: dict[str, list[Any]] = {}
        self.trainers: dict[tuple[str, Kind], Any] = {}
        self.spent: defaultdict[tuple[str, Kind], list[Spent]] = defaultdict(list)
        self.passes: dict[tuple[str, Kind], PassSize] = {}
        for name, config in self.work.items():
            self.groups[name] = asyncio.run(sample_groups(directories[name], kinds[-1], config))
            for kind in kinds:
                model, renderer = load(directories[name], kind)
                self.trainers[name, kind] = make_trainer(
                    config, model, renderer, None, Ranks(), None
                )

    def warm_up(self) -> None:
        """Let each trainer allocate its gradients and moments."""
        for (name, _), trainer in self.trainers.items():
            trainer.step(self.groups[name][:1], step=0, steps=1)

    def play_round(self, number: int) -> None:
        """Measure a step of each kind of work and of computation."""
        for name, kind in self.trainers:
            self._measure(name, kind, number)

    def _measure(self, name: str, kind: Kind, number: int) -> None:
        step, trainer = FIRST_STEP + number, self.trainers[name, kind]
        result, cpu_s = timed(partial(trainer.step, self.groups[name], step=step, steps=step + 1))
        _, batches = result.token_records
        trained = sum(batch.size for batch in batches)
        self.passes[name, kind] = PassSize.of(
            [micro for batch in batches for micro in batch.micros]
        )
        self.spent[name, kind].append(Spent(cpu_s, trained))
        text = f"{trained} ids in {cpu_s:.1f} s, {trained / cpu_s:.1f} trained ids a CPU second"
        print(f"round {number + 1}: trainer {kind:8s} {name:5s} {text}", flush=True)

    def step_s(self, name: str, kind: Kind) -> float:
        """Return the median CPU seconds of a step."""
        return statistics.median(spent.cpu_s for spent in self.spent[name, kind])

    def rate(self, name: str, kind: Kind) -> float:
        """Return the median of trained ids in a CPU second."""
        return statistics.median(spent.rate for spent in self.spent[name, kind])

    def figures(self) -> dict[str, float | None]:
        """Print the medians, and return the ratio."""
        for name, kind in self.spent:
            speed = (
                f"{self.rate(name, kind):.1f} trained ids a CPU second, "
                f"{self.step_s(name, kind):.1f} s a step"
            )
            size = (
                f"{self.spent[name, kind][0].amount} trained ids in "
                f"{self.passes[name, kind].positions} positions"
            )
            print(f"trainer {kind}, {name}: {speed}, {size}")
        if "mixed" not in self.kinds:
            return {}
        for name in self.work:
            ratio = self.rate(name, "mixed") / self.rate(name, "float32")
            print(f"trainer mixed, {name}: {ratio:.2f} times float32's trained ids a CPU second")
        return {"trainer_bf16_vs_fp32": self.rate("story", "mixed") / self.rate("story", "float32")}


# Part trl: our side


class StepByStep(ProgressListener):
    """Listener that lets a run make one training step at a time, and reports each."""

    def __init__(self, turns: OwnTurns) -> None:
        self.turns = turns
        self._training = False
        self._began = 0.0

    def phase(self, name: str, total: int, unit: str) -> None:
        """Wait for the first turn where training begins."""
        self._training = name == "train"
        if self._training:
            self._wait()

    def progress(self, done: int, metrics: Mapping[str, Any]) -> None:
        """Report a step, and wait for the next turn."""
        if not self._training:
            return
        total_s = self.turns.seconds() - self._began
        rollout_share = metrics["rollout_s"] / (metrics["rollout_s"] + metrics["train_s"])
        self.turns.report(
            total_s=total_s,
            rollout_s=rollout_share * total_s,
            success=metrics["success"],
            sampled=metrics["sampled_tokens"],
        )
        self._wait()

    def _wait(self) -> None:
        self.turns.wait()
        self._began = self.turns.seconds()


def train_ours(
    directory: Path, kind: Kind, steps: int, seed: int, out: Path, turns: OwnTurns
) -> None:
    """Train the recipe from warmed weights, a step at each turn."""
    from turnwright.runs import run_training

    words = ["--out", out, "--seed", seed, "--warmup.demos", 0]
    words += ["--train.steps", steps, "--train.schedule", "constant"]
    words += ["--eval.tasks", 1, "--checkpoint.every", steps]
    resolved = load_recipe(RECIPE, [str(word) for word in words])
    config = replace(resolved.config, model=model_config(directory, kind, turns.device))
    run_training(replace(resolved, config=config), watch=StepByStep(turns))


# Part trl: both sides


@dataclass(frozen=True)
class Settings:
    """How the sides train."""

    directory: Path
    """Warmed weights."""
    device: str
    """`cpu` or `cuda`."""
    steps: int
    seed: int
    patience_s: float
    """Seconds of silence after which a side counts as hung."""


def make_sides(
    settings: Settings,
    kinds: Sequence[Kind],
    trl_python: Path,
    trl_kinds: Sequence[str],
    folder: Path,
) -> list[Side]:
    """Start all sides, one after another, until each waits for its first turn."""
    here = Path(__file__).parent
    programs: list[tuple[str, Path, Path, str]] = []
    programs += [
        (OURS, Path(sys.executable), here / "real_model_training.py", kind) for kind in kinds
    ]
    programs += [(THEIRS, trl_python, here / "real_model_trl.py", kind) for kind in trl_kinds]

    sides = []
    for name, python, program, kind in programs:
        out = folder / f"{name}-{kind}"
        command = [
            python,
            program,
            settings.directory,
            kind,
            settings.device,
            settings.steps,
            settings.seed,
            out,
        ]
        words = [str(word) for word in command]
        log = folder / f"{name}-{kind}.log"
        sides.append(Side(f"{name} {kind}", words, log, settings.patience_s))
    return sides


def steps_to_goal(steps: Sequence[TrainingStep]) -> int | None:
    """Return after how many steps enough of them in a row sampled the goal's success;
    None if they did not."""
    in_a_row = 0
    for number, step in enumerate(steps, 1):
        in_a_row = in_a_row + 1 if step.success >= GOAL else 0
        if in_a_row == IN_A_ROW:
            return number
    return None


class TrlPart:
    """Our sides and TRL's, which train in turn until all have reached the goal."""

    def __init__(self, sides: Sequence[Side], settings: Settings) -> None:
        self.sides, self.settings = sides, settings
        self.unit = "CPU s" if settings.device == "cpu" else "s"

    def play(self) -> None:
        """Train all sides; one that fails takes no more turns."""
        for number in range(self.settings.steps):
            for side in self.sides:
                if side.failure:
                    continue
                step = side.step()
                if step is None:
                    print(f"step {number + 1}: {side.name:20s} failed: {side.failure}", flush=True)
                    continue
                cost = (
                    f"{step.total_s:6.2f} {self.unit}, {step.rollout_s:5.2f} of it sampling "
                    f"{step.sampled} ids"
                )
                rest = f"success {step.success:.0%}, peak {step.peak_gib:.1f} GiB"
                print(f"step {number + 1}: {side.name:20s} {cost}, {rest}", flush=True)
            going = [side for side in self.sides if not side.failure]
            if all(steps_to_goal(side.steps) is not None for side in going):
                break
        for side in self.sides:
            side.close()

    def step_s(self, side: Side) -> float:
        """Return the median of the seconds of a step."""
        return statistics.median(step.total_s for step in side.steps)

    def goal_s(self, side: Side) -> float | None:
        """Return the seconds to the goal; None if it was not reached."""
        reached = steps_to_goal(side.steps)
        return None if reached is None else sum(step.total_s for step in side.steps[:reached])

    def figures(self) -> dict[str, float | None]:
        """Print what each side took, and return the ratios: TRL's fastest side over our fastest.

        Steps of sides that reached the goal are compared, where both have one: a side that does not
        learn plays shorter episodes, so its steps cost less.
        """
        columns = [
            "",
            f"{self.unit} a step",
            "sampling",
            "ms a sampled id",
            "steps to 80%",
            f"{self.unit} to 80%",
        ]
        columns += ["success, first and last", "peak GiB"]
        print(f"| {' | '.join(columns)} |")
        print("|---" * len(columns) + "|")
        for side in self.sides:
            if not side.steps:
                print(f"| {side.name} | {side.failure} |")
                continue
            goal_s = self.goal_s(side)
            sampling = statistics.median(step.rollout_s for step in side.steps)
            each = (
                1000
                * sum(step.total_s for step in side.steps)
                / sum(step.sampled for step in side.steps)
            )
            cells = [f"{self.step_s(side):.2f}", f"{sampling:.2f}", f"{each:.2f}"]
            cells += [str(steps_to_goal(side.steps)), "-" if goal_s is None else f"{goal_s:.1f}"]
            cells += [
                f"{side.steps[0].success:.0%}, {side.steps[-1].success:.0%}",
                f"{side.steps[-1].peak_gib:.1f}",
            ]
            print(f"| {side.name} | {' | '.join(cells)} |")

        ours = [side for side in self.sides if side.steps and side.name.startswith(OURS)]
        theirs = [side for side in self.sides if side.steps and side.name.startswith(THEIRS)]
        our_goals = {side: goal_s for side in ours if (goal_s := self.goal_s(side)) is not None}
        their_goals = {side: goal_s for side in theirs if (goal_s := self.goal_s(side)) is not None}

        figures: dict[str, float | None] = {}
        if our_goals and their_goals:
            ours, theirs = list(our_goals), list(their_goals)
            figures["cpu_to_80_vs_trl"] = min(their_goals.values()) / min(our_goals.values())
        if ours and theirs:
            ratio = min(map(self.step_s, theirs)) / min(map(self.step_s, ours))
            figures["cpu_per_step_vs_trl"] = ratio
        return figures


if __name__ == "__main__":
    directory, kind, device, steps, seed, out, descriptor = sys.argv[1:]
    turns = OwnTurns(int(descriptor), device)
    train_ours(Path(directory), kind, int(steps), int(seed), Path(out), turns)  # type: ignore[arg-type]
