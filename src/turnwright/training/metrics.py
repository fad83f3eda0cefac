"""Metrics rows, the run's summary, and per-token records.

`step_row` is the row of a training step, `summary_of` the content of summary.json, and
`write_token_records` writes what each sampled id had: advantage and logprob, or why it was not
trained. What episodes count is summed up by `rollout_metrics`, and what the trainer measures by
`StepMetrics.metrics`; each name is explained in `records/episode_metrics.py`.
"""

from __future__ import annotations

import math
import os
import platform
import resource
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from turnwright._version import __version__
from turnwright.config import RunConfig
from turnwright.envs.spec import EnvSpec
from turnwright.records.episode_metrics import MAX_TURNS, rollout_metrics
from turnwright.records.run_dir import JsonLines
from turnwright.records.serialization import key_row
from turnwright.training.agent_views import AgentView
from turnwright.training.credit import Credit
from turnwright.training.evaluation import EvalResult
from turnwright.training.forward.batch import TrainingBatch
from turnwright.training.loss import logprob_mismatch
from turnwright.training.untrained_reasons import REJECTED
from turnwright.types import Trajectory

CHECKED = ("render_checks", "render_mismatch_", "render_check_failed_")
"""Prefixes of the sanity check's counters, which a step's row sums up under their own names."""
COUNTED = ("judge_", "user_", "reward_missing/")
"""Prefixes of other counters, which it sums up in `reward_counts`."""

Slot = tuple[int, int]
"""Span and offset of an id in its trajectory."""


def versions() -> dict[str, str]:
    """Return the versions of packages that results depend on."""
    packages = {"python": platform.python_version()}
    for name in ("turnwright", "torch", "transformers", "tokenizers", "numpy", "numba"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = __version__ if name == "turnwright" else "not installed"
    return packages


def hardware() -> dict[str, Any]:
    """Describe the machine of the run."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "system": platform.system(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
    }


def _processor() -> str:
    if sys.platform == "linux":
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        for line in cpuinfo.splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def step_row(
    trajectories: Sequence[Trajectory],
    trained: Mapping[str, float],
    rollout_s: float,
    success: float,
) -> dict[str, Any]:
    """Build a step's metrics row from its rollouts and the trainer's metrics."""
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
    sampled = sum(trajectory.sampled_tokens for trajectory in trajectories)

    # The trainer counts tokens by their reason, and groups by that of a filter: a table each.
    row: dict[str, Any] = {}
    untrained: dict[str, float] = {}
    rejected: dict[str, float] = {}
    for name, value in trained.items():
        if name.startswith(REJECTED):
            rejected[name.removeprefix(REJECTED)] = value
        elif not name.startswith("tokens_"):
            row[name] = value
        elif value:
            untrained[name.removeprefix("tokens_")] = value
    for name in ("trained", "sampled", "per_s"):
        untrained.pop(name, None)

    mean_reward = None
    success_share = None
    if rewards:
        mean_reward = sum(rewards) / len(rewards)
        success_share = sum(reward >= success for reward in rewards) / len(rewards)
    turns = sum(len(trajectory.turns) for trajectory in trajectories)
    trajectories_trained = trained.get("trajectories_trained", 0.0)
    row |= {
        "reward": mean_reward,
        "success": success_share,
        "turns": turns / max(len(trajectories), 1),
        "trajectories_trained_share": trajectories_trained
        / max(trained.get("trajectories", 1.0), 1.0),
        "sampled_tokens": sampled,
        "trained_tokens": trained.get("tokens_trained", 0.0),
        "tokens_per_s": sampled / max(rollout_s, 1e-9),
        "rollout_s": rollout_s,
        "trained_tokens_per_s": trained.get("tokens_per_s", 0.0),
    }
    if trained.get("optimizer_steps"):
        row["rollout_over_train"] = rollout_s / trained["train_s"]

    row |= peak_memory()
    row |= rollout_metrics(trajectories, success=success)
    row["stops"] = dict(Counter(str(trajectory.stop) for trajectory in trajectories))
    row |= _parts(trajectories)
    row["untrained"] = untrained
    if rejected:
        row["groups_filtered"] = rejected
    return row


def peak_memory() -> dict[str, float]:
    """Return this process' peak memory so far in MiB, and the GPU's if there is one."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Darwin counts bytes, Linux KiB.
    per_mib = 1024**2 if sys.platform == "darwin" else 1024
    memory = {"peak_memory_mib": peak / per_mib}
    if torch.cuda.is_available():
        memory["peak_gpu_memory_mib"] = torch.cuda.max_memory_allocated() / 1024**2
    return memory


def _parts(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Return sums of the counters of the sanity check, and of judges, users and rewards, and means
    of named reward parts; empty ones omitted."""
    checks: dict[str, int] = {}
    parts: dict[str, list[float]] = {}
    counts: dict[str, float] = {}
    for trajectory in trajectories:
        for name, value in trajectory.rewards.items():
            parts.setdefault(name, []).append(value)
        for name, value in trajectory.metrics.items():
            if name.startswith(CHECKED):
                checks[name] = checks.get(name, 0) + int(value)
            if name.startswith(COUNTED):
                counts[name] = counts.get(name, 0.0) + value

    row: dict[str, Any] = dict(sorted(checks.items()))
    if parts:
        row["rewards"] = {name: sum(values) / len(values) for name, values in parts.items()}
    if counts:
        row["reward_counts"] = dict(sorted(counts.items()))
    return row


def success_figures(
    before: Mapping[str, EvalResult],
    after: Mapping[str, EvalResult],
    env_specs: Sequence[EnvSpec],
) -> dict[str, Any]:
    """Return held-out success before and after training, blind with images, and `single_turn_best`
    if known."""
    figures: dict[str, Any] = {}
    for name, scores in (("before", before), ("after", after)):
        sampled = scores.get("sampled")
        greedy = scores.get("greedy")
        figures[f"success_{name}"] = sampled.success if sampled else None
        figures[f"success_{name}_ci"] = list(sampled.ci) if sampled and sampled.n else None
        figures[f"greedy_{name}"] = greedy.success if greedy else None
        figures[f"turns_{name}"] = sampled.turns if sampled else None
        if sampled and len(sampled.by_env) > 1:
            figures[f"success_{name}_by_env"] = sampled.row()["by_env"]

    blind = after.get("blind")
    if blind is not None:
        figures["success_blind"] = blind.success
        figures["success_blind_ci"] = list(blind.ci) if blind.n else None

    figures["single_turn_best"] = _single_turn_best(env_specs)
    sampled = before.get("sampled")
    figures["n_eval"] = sampled.n if sampled else 0
    if sampled:
        figures["eval_tasks"] = len(sampled.counts)
    return figures


def _single_turn_best(env_specs: Sequence[EnvSpec]) -> float | None:
    """Return the mean bound of environments by their weights; None if one has none."""
    bounds: list[float] = []
    for env_spec in env_specs:
        if env_spec.single_turn_best is None:
            return None
        bounds.append(env_spec.single_turn_best * env_spec.weight)
    return sum(bounds) / sum(env_spec.weight for env_spec in env_specs)


def no_signal_reason(rows: Sequence[Mapping[str, Any]]) -> str:
    """Explain why nothing was learned if no training step had a group with signal; else return an
    empty text."""
    if not rows or any(row.get("trajectories_trained") for row in rows):
        return ""
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    if not rewards:
        return (
            f"nothing was learned: no episode of {len(rows)} steps had a reward, each was None. "
            "Find out why the environment or its reward function returned None "
            "(trajectories.jsonl has the episodes)"
        )

    reward = sum(rewards) / len(rewards)
    stops: Counter[str] = Counter()
    for row in rows:
        stops.update(row["stops"])
    common, count = stops.most_common(1)[0]
    share = 100 * count / stops.total()

    return (
        f"nothing was learned: no group of {len(rows)} steps had a signal. An episode provides one "
        "if its reward differs from others of its task, and all were equal (mean reward "
        f"{reward:.2f}; {share:.0f}% ended in {common}). Start with a model that sometimes "
        "succeeds (warmup.demos with a demonstrator or solver, or model.path), easier tasks, or a "
        "reward with intermediate values"
    )


def summary_of(
    config: RunConfig,
    success: Mapping[str, Any],
    resumes: int,
    progress: Mapping[str, Any],
) -> dict[str, Any]:
    """Build the content of summary.json from `success_figures`, the number of resumes and further
    entries of the run."""
    summary = dict(success) | dict(progress)
    if config.eval.overlap == "allowed":
        summary["overlap"] = "allowed"
    summary |= {
        "resumed": resumes,
        "seed": config.seed,
        "versions": versions(),
        "machine": hardware(),
    }
    if resumes:
        summary["times_cover"] = (
            f"all {resumes + 1} processes of the run, each but the last up to the last row of "
            "metrics that it wrote"
        )
    return summary


FILE = "training.jsonl"


def write_token_records(
    run: Path,
    step: int,
    credits: Sequence[Credit],
    batches: Sequence[TrainingBatch],
) -> dict[str, Any]:
    """Write a step's per-token records, one row per trajectory; return the metrics computed from
    them."""
    with closing(JsonLines(run / FILE)) as lines:
        for row in joined(token_rows(step, credits, batches)):
            lines.append(row)

    metrics: dict[str, Any] = {}
    by_turn = mismatch_by_turn(batches)
    if by_turn:
        metrics["mismatch_by_turn"] = by_turn
    return metrics | lag_metrics(batches)


def joined(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of token records with those of one trajectory joined, which several agents or
    policies were trained on.

    Their advantages differ, so each span has its own; the trajectory's is the mean.
    """
    by_key: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        by_key.setdefault(tuple(row["key"]), []).append(row)
    return [_joined(same) if len(same) > 1 else same[0] for same in by_key.values()]


def _joined(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    advantages = [row["advantage"] for row in rows if row["advantage"] is not None]
    row_of_all: dict[str, Any] = {
        "key": rows[0]["key"],
        "step": rows[0]["step"],
        "advantage": math.fsum(advantages) / len(advantages) if advantages else None,
        "reason": None if advantages else rows[0]["reason"],
        "advantages": {},
        "logprobs": {},
    }
    for row in rows:
        row_of_all["logprobs"] |= row["logprobs"]
        if "advantages" in row:
            row_of_all["advantages"] |= row["advantages"]
        elif row["advantage"] is not None:
            for span, logprobs in row["logprobs"].items():
                row_of_all["advantages"][span] = [row["advantage"]] * len(logprobs)
    return row_of_all


def token_rows(
    step: int, credits: Sequence[Credit], batches: Sequence[TrainingBatch]
) -> Iterator[dict[str, Any]]:
    """Yield one row per trajectory of a step: its advantage or why it has none, and the trainer's
    logprobs per span.

    `advantage` is the mean over its ids; `advantages`, if they differ, has one per id by span
    index, `logprobs` likewise, null for ids without loss. A batch that was never scored yields no
    logprobs.
    """
    scored = scored_ids(batches)
    for credit in credits:
        trajectory = credit.trajectory
        if isinstance(trajectory, AgentView):
            # A part of a trajectory, whose spans are numbered in the whole.
            numbers: Sequence[int] = trajectory.numbers
        else:
            numbers = range(len(trajectory.spans))

        logprobs: dict[str, list[float | None]] = {}
        for (span, offset), logprob in scored.get(id(trajectory), ()):
            name = str(numbers[span])
            if name not in logprobs:
                logprobs[name] = [None] * len(trajectory.spans[span].ids)
            # Seven digits, which float32 has.
            logprobs[name][offset] = float(f"{logprob:.7g}")

        row: dict[str, Any] = {
            "key": key_row(trajectory.key),
            "step": step,
            "advantage": credit.advantage,
            "reason": credit.reason,
        }
        if credit.values is not None:
            row["advantages"] = {
                str(numbers[span]): [float(f"{value:.7g}") for value in values]
                for span, values in credit.values.items()
            }
        row["logprobs"] = logprobs
        yield row


def lag_metrics(batches: Sequence[TrainingBatch]) -> dict[str, Any]:
    """Return metrics of a step's trained tokens by lag and by cache, from logprobs before the first
    update.

    Those by lag are there only if a token has one, those by cache only if a token was sampled on a
    cache of older weights.
    """
    scored = _scored(batches)
    if not scored:
        return {}
    lags_n = torch.cat([batch.lags_n for batch, _ in scored])
    kept_n = torch.cat([batch.kept_n for batch, _ in scored])
    engine_n = torch.cat([batch.engine_n for batch, _ in scored])
    trainer_n = torch.cat([logp_n for _, logp_n in scored])

    metrics: dict[str, Any] = {}
    if bool(lags_n.any()):
        tokens: dict[str, int] = {}
        mismatch_kl: dict[str, float] = {}
        importance_ess: dict[str, float] = {}
        for lag in sorted(set(lags_n.tolist())):
            with_lag_n = lags_n == lag
            tokens[str(lag)] = int(with_lag_n.sum())
            mismatch = logprob_mismatch(trainer_n[with_lag_n], engine_n[with_lag_n])
            if mismatch:
                mismatch_kl[str(lag)] = mismatch["mismatch_kl"]
                importance_ess[str(lag)] = mismatch["importance_ess"]

        metrics["lag_mean"] = float(lags_n.double().mean())
        metrics["lag_max"] = int(lags_n.max())
        metrics["tokens_by_lag"] = tokens
        if mismatch_kl:
            metrics["mismatch_kl_by_lag"] = mismatch_kl
            metrics["importance_ess_by_lag"] = importance_ess

    if bool(kept_n.any()):
        metrics["tokens_by_cache"] = {}
        metrics["mismatch_kl_by_cache"] = {}
        for name, on_cache_n in (("own", ~kept_n), ("kept", kept_n)):
            metrics["tokens_by_cache"][name] = int(on_cache_n.sum())
            mismatch = logprob_mismatch(trainer_n[on_cache_n], engine_n[on_cache_n])
            if mismatch:
                metrics["mismatch_kl_by_cache"][name] = mismatch["mismatch_kl"]
    return metrics


def mismatch_by_turn(batches: Sequence[TrainingBatch]) -> dict[str, float]:
    """Return the mean |logprob of trainer - of engine| of each turn's ids of the current version,
    by turn number from 1."""
    turns: list[int] = []
    compared: list[torch.Tensor] = []
    gaps: list[torch.Tensor] = []
    for batch, trainer_n in _scored(batches):
        turns += batch.turn_numbers()
        compared.append((batch.current_n & batch.engine_n.isfinite()).cpu())
        gaps.append((trainer_n - batch.engine_n).abs().cpu())
    if not gaps:
        return {}

    turn_n = torch.tensor(turns, dtype=torch.long) + 1  # 0 is none
    gap_n = torch.cat(gaps)
    compared_n = (turn_n > 0) & (turn_n <= MAX_TURNS) & torch.cat(compared)
    counts = torch.bincount(turn_n[compared_n]).tolist()
    sums = torch.bincount(turn_n[compared_n], gap_n[compared_n]).tolist()
    return {
        str(number): total / count
        for number, (total, count) in enumerate(zip(sums, counts, strict=True))
        if count
    }


def scored_ids(batches: Iterable[TrainingBatch]) -> dict[int, list[tuple[Slot, float]]]:
    """Return by id of each trajectory its slots that carry loss, with their logprobs before the
    first update."""
    scored: dict[int, list[tuple[Slot, float]]] = {}
    for batch, trainer_n in _scored(batches):
        by_index: list[list[tuple[Slot, float]]] = [[] for _ in batch.trajectories]
        indices = batch.trajectory_n.tolist()
        for index, slot, logprob in zip(indices, batch.slots, trainer_n.tolist(), strict=True):
            by_index[index].append((slot, logprob))
        for trajectory, ids in zip(batch.trajectories, by_index, strict=True):
            scored[id(trajectory)] = ids
    return scored


def _scored(batches: Iterable[TrainingBatch]) -> list[tuple[TrainingBatch, torch.Tensor]]:
    """Return the batches that were scored, with their logprobs before the first update."""
    return [(batch, batch.start_n) for batch in batches if batch.start_n is not None]
