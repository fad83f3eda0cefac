"""Credit assignment where the truth is known: how near a method's advantages are to the true ones,
and how fast it learns.

    python benchmarks/credit.py run --out DIR [--quick] [--methods M ...] [--worlds W ...]
                                    [--seeds N] [--jobs N]
    python benchmarks/credit.py table --out DIR
    python benchmarks/credit.py cell --method M --world W --seed S --out DIR [--shuffled]
    python benchmarks/credit.py tune --out DIR [--methods M ...]

The worlds (`credit_worlds.py`) are so small that the value of every choice at every history can be
computed from the model's own probabilities (`credit_truth.py`). A tiny model of random weights
learns a world by `Rollout`, `LocalEngine` and `Trainer.step`; a reply is one sampled letter, and
all ids but the choices are banned, so it begins with nearly equal probabilities.

A cell is one method in one world with one seed. It trains until the exact expected reward is 90% of
the way from the random policy's to the optimum, or `STEPS` steps are over. `run` also asks each
method for the advantages of the same episodes of the same policies: those of a run of GRPO, at its
start and at a quarter, a half and three quarters of the way. In a control (`--shuffled`) rewards
are dealt at random among the episodes of a step.

`run` skips what is in DIR. `table` prints markdown and JSON in its last line:
`best_vs_grpo_episodes` is the least mean ratio of a method's episodes to those of GRPO (`_long`: in
the worlds of eight or more turns), `spearman_truth_speed` the rank correlation over methods of the
mean cosine of a batch's gradient with the true one, and of speed. The method `truth` gets the true
advantages, and is in neither.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from credit_tables import (  # noqa: E402
    REFERENCE,
    TRUTH,
    Results,
    print_tables,
    speed_cell,
)
from credit_truth import (  # noqa: E402
    Array,
    Estimates,
    Histories,
    Truth,
    Visits,
    by_turn,
    correlation,
    cosine,
    gradient_of,
    tell_advantages,
)
from credit_worlds import PRACTICE, WORLDS, World, env_spec  # noqa: E402
from rows import markdown, write_json  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from turnwright.config import Limits, TrainConfig  # noqa: E402
from turnwright.config.schema import CriticConfig  # noqa: E402
from turnwright.engines.local import LocalEngine  # noqa: E402
from turnwright.errors import ConfigError  # noqa: E402
from turnwright.renderers.chat_renderer import ChatRenderer  # noqa: E402
from turnwright.renderers.template import ChatTemplate  # noqa: E402
from turnwright.renderers.tokenizer import ByteTokenizer  # noqa: E402
from turnwright.rollouts import (  # noqa: E402
    EpisodeSpec,
    Rollout,
    RolloutSettings,
    group_by_task,
)
from turnwright.training.algorithms import resolve_settings  # noqa: E402
from turnwright.training.forward.batch import LossDenominator  # noqa: E402
from turnwright.training.trainer.trainer import Trainer  # noqa: E402
from turnwright.types import EpisodeKey, Group, Task, Trajectory  # noqa: E402

# Methods.

LR = 3e-3


@dataclass(frozen=True)
class Method:
    """How to train: keys of `[train]`, and what the bench has to know besides."""

    keys: Mapping[str, Any]
    lr: float = LR
    """Chosen by `tune`, on a world that is not in the bench."""
    fit: int = 0
    """Steps with a learning rate of 0 on a common policy, before its advantages there are
    measured: for what a method learns beside the policy."""
    named: bool = True
    """Whether it gets the names of states; otherwise a state is what was read."""
    without: tuple[str, ...] = ()
    """Worlds that it cannot learn, and that are left out."""


TOLD = f"{ROOT / 'benchmarks' / 'credit_truth.py'}:told_advantages"
# Its learning rate is its own, also where the policy's is 0.
CRITIC = CriticConfig(lr=LR)
POLICY_CRITIC = CriticConfig(body="policy")
METHODS = {
    "truth": Method({"advantage": TOLD, "credit": "turn"}),
    "grpo": Method({"algorithm": "grpo"}),
    "grpo_turn": Method({"algorithm": "grpo", "credit": "turn"}),
    "dr_grpo": Method({"algorithm": "dr_grpo"}),
    "rloo": Method({"algorithm": "rloo"}),
    "rloo_turn": Method({"algorithm": "rloo", "credit": "turn"}),
    "reinforce_pp": Method({"algorithm": "reinforce_pp"}),
    "reinforce_pp_baseline": Method({"algorithm": "reinforce_pp_baseline"}),
    "gspo": Method({"algorithm": "gspo"}),
    "running": Method({"algorithm": "dr_grpo", "advantage": "running"}, fit=20),
    "maxrl": Method({"algorithm": "maxrl"}, without=("luck",)),  # which has negative rewards
    "gigpo": Method({"algorithm": "gigpo"}),
    "gagpo": Method({"algorithm": "gagpo"}),
    "state_rloo": Method({"algorithm": "state_rloo"}),
    "state_rloo_history": Method({"algorithm": "state_rloo"}, named=False),
    "state_grpo": Method({"algorithm": "state_grpo"}),
    "ppo": Method({"algorithm": "ppo", "critic": CRITIC}, fit=20),
    "turn_ppo": Method({"algorithm": "turn_ppo", "critic": CRITIC}, fit=20),
    "turn_ppo_head": Method({"algorithm": "turn_ppo", "critic": POLICY_CRITIC}, fit=20),
    "turn_ppo_mc": Method(
        {"algorithm": "turn_ppo", "critic": CRITIC, "discount": 1.0, "gae_lambda": 1.0}, fit=20
    ),
    "bilevel_ppo": Method({"algorithm": "bilevel_ppo", "critic": CRITIC}, fit=20),
}
ALL_WORLDS = WORLDS | {PRACTICE.name: PRACTICE}


def train_config(method: str, world: World, lr: float | None = None) -> TrainConfig:
    """Return the settings of a method; raise `ConfigError` where this version does not know it."""
    keys = dict(METHODS[method].keys)
    try:
        config = TrainConfig(
            lr=METHODS[method].lr if lr is None else lr,
            schedule="constant",
            fixed_length=world.turns,
            **keys,
        )
    except TypeError as error:
        raise ConfigError(str(error)) from error
    resolve_settings(config)
    return config


def unknown_methods(methods: Sequence[str]) -> dict[str, str]:
    """Return the methods that this version cannot train, each with the reason."""
    reasons = {}
    for method in methods:
        try:
            train_config(method, PRACTICE)
        except ConfigError as error:
            reasons[method] = str(error)
    return reasons


# Model and episodes.

TEMPLATE = """
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {{- '>' -}}
        {%- generation -%}{{- message.content -}}{{- '<|im_end|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- message.content -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '>' -}}{%- endif -%}
"""
"""As few ids a turn as possible: the message, >, the choice and its end."""
CONTEXT = 96
"""More ids than an episode has."""
HIDDEN = 32
HEAD_STD = 0.02
"""Of the initial weights of the head: probabilities are equal within a few hundredths."""
COPIES, GROUP_SIZE = 2, 8
"""Groups of each task in a step, and episodes of a group."""


@lru_cache
def make_renderer(world: World) -> ChatRenderer:
    """Return a renderer over bytes that bans all ids but a world's choices."""
    codec = ByteTokenizer(("<|endoftext|>", "<|im_end|>"))
    renderer = ChatRenderer(codec, ChatTemplate(TEMPLATE, origin="benchmarks/credit.py"))
    choice_ids = {codec.encode(choice)[0] for choice in world.choices}
    renderer.ban(set(range(codec.vocab_size)) - choice_ids)
    return renderer


@lru_cache
def make_histories(world: World) -> Histories:
    """Return the histories of a world, which are made once in a process."""
    return Histories(world, make_renderer(world))


def make_model(vocabulary: int, seed: int) -> torch.nn.Module:
    """Return a Qwen3 of two layers and random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=HIDDEN // 2,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
        initializer_range=0.8 * HIDDEN**-0.5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        torch.nn.init.normal_(model.lm_head.weight, std=HEAD_STD)
    return model.eval()


class Player:
    """Plays the steps of a world with a copy of a model's weights."""

    def __init__(self, world: World, model: torch.nn.Module, seed: int) -> None:
        renderer = make_renderer(world)
        self.engine = LocalEngine(model, renderer=renderer, context=CONTEXT)
        limits = Limits(turns=world.turns, turn_tokens=1, on_turn_length="continue")
        self._rollout = Rollout(self.engine, renderer, RolloutSettings(limits=limits, seed=seed))
        self._env_spec = env_spec(world)
        self._tasks = []
        for opening in world.openings:
            for number in range(COPIES):
                self._tasks.append(Task(opening, id=f"{opening}-{number}"))

    async def play(self, step: int) -> list[Group]:
        """Play each task of a step."""
        specs = []
        for task in self._tasks:
            for sample in range(GROUP_SIZE):
                key = EpisodeKey("train", step, task.id, sample)
                specs.append(EpisodeSpec.of(self._env_spec, task, key))
        episodes = await self._rollout.play(specs)
        for episode in episodes:
            assert episode.error is None, episode.error
        return group_by_task(episodes)


def make_trainer(method: str, world: World, model: torch.nn.Module, **options: Any) -> Trainer:
    """Return the trainer of a method; `options` are a seed, or another learning rate."""
    renderer = make_renderer(world)
    return Trainer(
        model,
        train_config(method, world, options.get("lr")),
        banned_ids=renderer.banned_ids,
        seed=options.get("seed", 0),
        template=renderer.fingerprint,
    )


def episodes_of(groups: Sequence[Group]) -> list[Trajectory]:
    """Return the episodes of groups."""
    return [trajectory for group in groups for trajectory in group.trajectories]


def shown_to(method: str, groups: Sequence[Group]) -> list[Group]:
    """Return groups as a method gets them: copies without the names of states, or as they are."""
    if METHODS[method].named:
        return list(groups)
    shown = []
    for group in groups:
        trajectories = []
        for trajectory in group.trajectories:
            twin = copy.copy(trajectory)
            twin.turns = [replace(turn, info={}) for turn in trajectory.turns]
            trajectories.append(twin)
        shown.append(Group(group.task, trajectories))
    return shown


def shuffled(groups: Sequence[Group], seed: str) -> list[Group]:
    """Return copies of groups whose rewards are dealt at random to the episodes of all.

    The rewards of a turn go to the same turn of another episode; what is later than its end goes to
    its last turn.
    """
    donors = episodes_of(groups)
    random.Random(seed).shuffle(donors)
    remaining = iter(donors)
    dealt = []
    for group in groups:
        trajectories = []
        for trajectory in group.trajectories:
            donor = next(remaining)
            twin = copy.copy(trajectory)
            twin.reward = donor.reward
            twin.turns = [copy.copy(turn) for turn in trajectory.turns]
            rewards = [turn.reward or 0.0 for turn in donor.turns]
            rewards += [0.0] * len(twin.turns)
            for number, turn in enumerate(twin.turns):
                turn.reward = rewards[number]
            twin.turns[-1].reward = sum(rewards[len(twin.turns) - 1 :])
            trajectories.append(twin)
        dealt.append(Group(group.task, trajectories))
    return dealt


# Cells.

STEPS = 200
"""Steps after which a cell gives up."""
EVERY = 4
"""Steps from one computation of the truth to the next."""
GOAL = 0.9
CONTROL_STEPS = 60


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training."""

    method: str
    world: str
    seed: int
    shuffled: bool = False
    steps: int = STEPS
    lr: float | None = None
    """None is the method's."""

    @property
    def name(self) -> str:
        """Name of its file."""
        control = "-shuffled" if self.shuffled else ""
        lr = "" if self.lr is None else f"-{self.lr:g}"
        return f"{self.world}-{self.method}-{self.seed}{control}{lr}"

    @property
    def settings(self) -> dict[str, Any]:
        """All that the result depends on, apart from the code."""
        method = METHODS[self.method]
        # Without the place of a function's file.
        keys = {name: str(value).rpartition("/")[2] for name, value in method.keys.items()}
        given = {"lr": self.lr or method.lr, "keys": keys}
        return asdict(self) | given | {"group_size": GROUP_SIZE, "copies": COPIES}


@dataclass
class Progress:
    """What a cell has seen so far."""

    episodes: int = 0
    tokens: int = 0
    curve: list[dict[str, float]] = field(default_factory=list)

    def played(self, groups: Sequence[Group]) -> None:
        """Count the episodes of a step."""
        for trajectory in episodes_of(groups):
            self.episodes += 1
            self.tokens += trajectory.sampled_tokens


def advantages_of(
    trainer: Trainer, histories: Histories, groups: Sequence[Group]
) -> tuple[Visits, Array, Array]:
    """Return the turns of a step's episodes, the advantage that a trainer gives to each, and its
    weight in the loss."""
    step_credits = trainer.step_credits(groups)
    scale = LossDenominator.of(
        step_credits.credits,
        trainer.objective.settings.aggregation,
        trainer.config.fixed_length,
    )
    visits = Visits.of(histories, [credit.trajectory for credit in step_credits.credits])
    return visits, *by_turn(step_credits, scale)


def compared(
    trainer: Trainer, histories: Histories, truth: Truth, groups: Sequence[Group]
) -> dict[str, float]:
    """Return how a step's advantages and gradient agree with the true ones."""
    visits, advantage_m, weight_m = advantages_of(trainer, histories, groups)
    true_m = truth.advantage_nc[visits.history_m, visits.choice_m]
    gradient_nc = gradient_of(truth, visits, advantage_m, weight_m)
    return {
        "correlation": correlation(advantage_m, true_m),
        "cosine": cosine(gradient_nc, truth.gradient_nc),
    }


async def train(
    cell: Cell, at_truth: Callable[[float, torch.nn.Module], bool] | None = None
) -> dict[str, Any]:
    """Train until the goal or the last step; return what happened.

    `at_truth` is called with each level and the model, and returns whether to go on.
    """
    began = time.process_time()
    world = ALL_WORLDS[cell.world]
    histories = make_histories(world)
    model = make_model(make_renderer(world).codec.vocab_size, cell.seed)
    trainer = make_trainer(cell.method, world, model, seed=cell.seed, lr=cell.lr)
    player = Player(world, model, cell.seed)
    progress = Progress()

    try:
        for step in range(cell.steps + 1):
            # The truth of the policy that plays this step.
            is_looked_at = step % EVERY == 0
            truth = None
            if is_looked_at or cell.method == TRUTH:
                truth = histories.truth(histories.policy(model))
            if truth is not None and is_looked_at:
                level = world.level(truth.value)
                point = {"episodes": progress.episodes, "tokens": progress.tokens, "level": level}
                progress.curve.append(point)
                is_over = (level >= GOAL and not cell.shuffled) or step == cell.steps
                if is_over or (at_truth is not None and not at_truth(level, model)):
                    break

            # Play, and compare what the method makes of the episodes with the truth.
            await player.engine.update(trainer.weights(), version=step)
            groups = await player.play(step)
            progress.played(groups)
            if cell.method == TRUTH and truth is not None:
                tell_advantages(histories, truth, episodes_of(groups))
            if cell.shuffled:
                groups = shuffled(groups, f"{cell.seed}/{step}")
            groups = shown_to(cell.method, groups)
            if truth is not None and is_looked_at:
                progress.curve[-1] |= compared(trainer, histories, truth, groups)

            trainer.step(groups, step=step, steps=cell.steps, version=step)
    finally:
        await player.engine.close()
    return result_of(cell, progress) | {"cpu_s": time.process_time() - began}


def result_of(cell: Cell, progress: Progress) -> dict[str, Any]:
    """Return the row of a cell."""
    last = progress.curve[-1]
    is_reached = last["level"] >= GOAL
    return {
        "settings": cell.settings,
        "method": cell.method,
        "world": cell.world,
        "seed": cell.seed,
        "shuffled": cell.shuffled,
        "episodes_to_90": last["episodes"] if is_reached else None,
        "tokens_to_90": last["tokens"] if is_reached else None,
        "episodes": last["episodes"],
        "tokens": last["tokens"],
        "level": last["level"],
        "best_level": max(point["level"] for point in progress.curve),
        "curve": progress.curve,
    }


# The same policies for all methods.

POLICY_LEVELS = (0.0, 0.25, 0.5, 0.75)
REFERENCE_SEED = 1000
BATCHES = 200


async def reference_policies(world: World, out: Path) -> list[Path]:
    """Return policies of a run of GRPO, the first of each level in `POLICY_LEVELS`, the initial one
    included; those that it reached.

    The run is made once.
    """
    folder = out / "policies"
    levels_file = folder / f"{world.name}.json"
    if not levels_file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        levels: list[float] = []

        def keep(level: float, model: torch.nn.Module) -> bool:
            if not levels or level >= POLICY_LEVELS[len(levels)]:
                save_file(model.state_dict(), folder / f"{world.name}-{len(levels)}.safetensors")
                levels.append(level)
            return len(levels) < len(POLICY_LEVELS)

        await train(Cell(method=REFERENCE, world=world.name, seed=REFERENCE_SEED), keep)
        write_json(levels_file, levels)

    count = len(json.loads(levels_file.read_text()))
    return [folder / f"{world.name}-{number}.safetensors" for number in range(count)]


async def measure(world: World, methods: Sequence[str], batches: int, out: Path) -> None:
    """Write how near each method's advantages are to the truth, on the same batches of the same
    policies."""
    histories = make_histories(world)
    model = make_model(make_renderer(world).codec.vocab_size, 0)
    rows: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
    for number, path in enumerate(await reference_policies(world, out)):
        model.load_state_dict(load_file(path))
        truth = histories.truth(histories.policy(model))
        player = Player(world, model, REFERENCE_SEED + 1 + number)
        trainers = {}
        estimates = {}
        for method in methods:
            trainers[method] = make_trainer(method, world, copy.deepcopy(model), lr=0.0)
            estimates[method] = Estimates(truth, histories.turn_n)

        # What is learned beside the policy is learned on other episodes.
        try:
            for step in range(max(METHODS[method].fit for method in methods)):
                groups = await player.play(batches + step)
                for method, trainer in trainers.items():
                    if step < METHODS[method].fit:
                        trainer.step(
                            shown_to(method, groups),
                            step=step,
                            steps=METHODS[method].fit,
                            version=0,
                        )

            for step in range(batches):
                groups = await player.play(step)
                tell_advantages(histories, truth, episodes_of(groups))
                for method, trainer in trainers.items():
                    shown = shown_to(method, groups)
                    estimates[method].add(*advantages_of(trainer, histories, shown))
        finally:
            await player.engine.close()

        for method in methods:
            level = {"level": world.level(truth.value)}
            rows[method].append(level | estimates[method].figures())

    for method in methods:
        row = {"method": method, "world": world.name, "policies": rows[method]}
        write_json(measure_file(out, world.name, method), row | {"batches": batches})


def measure_file(out: Path, world: str, method: str) -> Path:
    """Return the file of `measure`."""
    return out / "truth" / f"{world}-{method}.json"


# Commands.


def cell_file(out: Path, cell: Cell) -> Path:
    """Return the file of a cell's row."""
    return out / "cells" / f"{cell.name}.json"


def is_done(out: Path, cell: Cell) -> bool:
    """Whether the row of a cell with these settings is there."""
    path = cell_file(out, cell)
    return path.exists() and json.loads(path.read_text())["settings"] == cell.settings


def play_cell(cell: Cell, out: Path) -> str:
    """Train a cell and write its row; return a line about it."""
    torch.set_num_threads(1)
    row = asyncio.run(train(cell))
    write_json(cell_file(out, cell), row)
    return (
        f"{cell.name}: level {row['level']:.2f}, {row['episodes']} episodes, {row['cpu_s']:.0f} s"
    )


def play_measure(world: str, methods: Sequence[str], batches: int, out: Path) -> str:
    """Measure methods on the common policies of a world; return a line about it."""
    torch.set_num_threads(1)
    began = time.process_time()
    asyncio.run(measure(WORLDS[world], methods, batches, out))
    return f"{world}: {len(methods)} methods measured, {time.process_time() - began:.0f} s"


def play_all(jobs: Sequence[Callable[[], str]], workers: int) -> int:
    """Play jobs in processes of their own; return how many failed."""
    failed = 0
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(job) for job in jobs]
        for future in as_completed(futures):
            try:
                print(future.result(), flush=True)
            except Exception as error:
                failed += 1
                print(f"failed: {error!r}", file=sys.stderr, flush=True)
    return failed


def is_measured(out: Path, world: str, method: str, batches: int) -> bool:
    """Whether a method was measured on at least so many batches of a world."""
    path = measure_file(out, world, method)
    return path.exists() and json.loads(path.read_text())["batches"] >= batches


def cells_of(args: argparse.Namespace, methods: Sequence[str]) -> list[Cell]:
    """Return the cells of a run, seed by seed, and its controls."""
    cells = []
    for seed in range(args.seeds):
        for world in args.worlds:
            for method in methods:
                if world not in METHODS[method].without:
                    cells.append(Cell(method=method, world=world, seed=seed, steps=args.steps))

    # True advantages do not depend on rewards.
    controlled = [method for method in methods if method != TRUTH]
    for seed in range(args.controls):
        for world in args.worlds:
            for method in controlled:
                if world not in METHODS[method].without:
                    cells.append(control_of(method, world, seed))
    return cells


def control_of(method: str, world: str, seed: int) -> Cell:
    """Return the cell with shuffled rewards."""
    return Cell(method=method, world=world, seed=seed, shuffled=True, steps=CONTROL_STEPS)


def jobs_of(args: argparse.Namespace, methods: Sequence[str]) -> list[Callable[[], str]]:
    """Return what a run has not done yet: measurements first, then cells."""
    jobs: list[Callable[[], str]] = []
    for world in args.worlds:
        missing = []
        for method in methods:
            if world in METHODS[method].without:
                continue
            if not is_measured(args.out, world, method, args.batches):
                missing.append(method)
        if missing:
            jobs.append(partial(play_measure, world, missing, args.batches, args.out))

    for cell in cells_of(args, methods):
        if not is_done(args.out, cell):
            jobs.append(partial(play_cell, cell, args.out))
    return jobs


LRS = (1e-3, 3e-3, 1e-2)


def tune(args: argparse.Namespace, methods: Sequence[str]) -> int:
    """Train methods at several learning rates on the world for that, and print the episodes."""
    cells = []
    for method in methods:
        for lr in LRS:
            for seed in range(args.seeds):
                cells.append(Cell(method=method, world=PRACTICE.name, seed=seed, lr=lr))
    jobs = [partial(play_cell, cell, args.out) for cell in cells if not is_done(args.out, cell)]
    failed = play_all(jobs, args.jobs)

    rows = []
    for method in methods:
        texts = []
        for lr in LRS:
            paths = [cell_file(args.out, c) for c in cells if (c.method, c.lr) == (method, lr)]
            texts.append(speed_cell([json.loads(p.read_text()) for p in paths if p.exists()]))
        rows.append([f"`{method}`", *texts])
    print(markdown(["method", *(f"{lr:g}" for lr in LRS)], rows))
    return failed


QUICK = (2, 120, 40, 2)
"""Seeds, steps, batches and jobs."""
QUICK_METHODS = (
    "truth",
    "grpo",
    "rloo_turn",
    "maxrl",
    "gigpo",
    "gagpo",
    "state_rloo",
    "state_grpo",
    "turn_ppo",
)
"""One of each kind."""


def parsed() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("cell", "run", "tune", "table"):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, required=True)
        if name == "cell":
            command.add_argument("--method", choices=tuple(METHODS), required=True)
            command.add_argument("--world", choices=tuple(ALL_WORLDS), required=True)
            command.add_argument("--seed", type=int, required=True)
            command.add_argument("--shuffled", action="store_true")
        if name in ("run", "tune"):
            command.add_argument("--methods", nargs="+", choices=tuple(METHODS))
            command.add_argument("--seeds", type=int, default=5 if name == "run" else 2)
            command.add_argument("--jobs", type=int, default=1)
        if name == "run":
            worlds = tuple(WORLDS)
            command.add_argument("--worlds", nargs="+", choices=worlds, default=worlds)
            command.add_argument(
                "--quick",
                action="store_true",
                help="nine methods, two seeds, fewer steps and batches, two jobs",
            )
            command.add_argument("--controls", type=int, default=1, help="seeds of controls")
            command.add_argument("--batches", type=int, default=BATCHES)
        command.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    is_quick = getattr(args, "quick", False)
    if is_quick:
        args.seeds, args.steps, args.batches, args.jobs = QUICK
    if args.command in ("run", "tune") and args.methods is None:
        args.methods = QUICK_METHODS if is_quick else tuple(METHODS)
    return args


def main() -> int:
    """Run a command; return how many jobs failed."""
    args = parsed()
    if args.command == "table":
        print_tables(Results.read(args.out, tuple(METHODS)))
        return 0
    if args.command == "cell":
        cell = Cell(method=args.method, world=args.world, seed=args.seed, steps=args.steps)
        if args.shuffled:
            cell = control_of(args.method, args.world, args.seed)
        print(play_cell(cell, args.out))
        print(cell_file(args.out, cell).read_text(), end="")
        return 0

    reasons = unknown_methods(args.methods)
    for method, reason in reasons.items():
        print(f"{method} is skipped: {reason}")
    methods = [method for method in args.methods if method not in reasons]
    if args.command == "tune":
        return tune(args, methods)
    failed = play_all(jobs_of(args, methods), args.jobs)
    print_tables(Results.read(args.out, tuple(METHODS)))
    return failed


if __name__ == "__main__":
    sys.exit(bool(main()))
