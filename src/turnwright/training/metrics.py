"""Metrics rows, the run's summary, and per-token records."""

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


def versions() -> dict[str, str]:
    """Return the versions of packages that results depend on."""
    found = {"python": platform.python_version()}
    for name in ("turnwright", "torch", "transformers", "tokenizers", "numpy", "numba"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = __version__ if name == "turnwright" else "not installed"
    return found


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
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
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
    rewards = [t.reward for t in trajectories if t.reward is not None]
    sampled = sum(t.sampled_tokens for t in trajectories)
    untrained = {
        name[7:]: value for name, value in trained.items() if name.startswith("tokens_") and value
    }
    for name in ("trained", "sampled", "per_s"):
        untrained.pop(name, None)
    rejected = {
        name.removeprefix(REJECTED): value
        for name, value in trained.items()
        if name.startswith(REJECTED)
    }
    return {
        name: value for name, value in trained.items() if not name.startswith(("tokens_", REJECTED))
    } | {
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "success": sum(reward >= success for reward in rewards) / len(rewards) if rewards else None,
        "turns": sum(len(t.turns) for t in trajectories) / max(len(trajectories), 1),
        "trajectories_trained_share": trained.get("trajectories_trained", 0.0)
        / max(trained.get("trajectories", 1.0), 1.0),
        "sampled_tokens": sampled,
        "trained_tokens": trained.get("tokens_trained", 0.0),
        "tokens_per_s": sampled / max(rollout_s, 1e-9),
        "rollout_s": rollout_s,
        "trained_tokens_per_s": trained.get("tokens_per_s", 0.0),
        **(
            {"rollout_over_train": rollout_s / trained["train_s"]}
            if trained.get("optimizer_steps")
            else {}
        ),
        **peak_memory(),
        **rollout_metrics(trajectories, success=success),
        "stops": dict(Counter(str(t.stop) for t in trajectories)),
        **_parts(trajectories),
        "untrained": untrained,
        **({"groups_filtered": rejected} if rejected else {}),
    }


def peak_memory() -> dict[str, float]:
    """Return this process' peak memory so far in MiB, and the GPU's if there is one."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {"peak_memory_mib": peak / (1024 if sys.platform != "darwin" else 1024**2)}
    if torch.cuda.is_available():
        found["peak_gpu_memory_mib"] = torch.cuda.max_memory_allocated() / 1024**2
    return found


def _parts(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Return sums of the counters of the sanity check, and of judges, users and rewards, and means
    of named reward parts; empty ones omitted."""
    checks: dict[str, int] = {}
    values: dict[str, list[float]] = {}
    counts: dict[str, float] = {}
    for trajectory in trajectories:
        for name, value in trajectory.rewards.items():
            values.setdefault(name, []).append(value)
        for name, value in trajectory.metrics.items():
            if name.startswith(CHECKED):
                checks[name] = checks.get(name, 0) + int(value)
            if name.startswith(COUNTED):
                counts[name] = counts.get(name, 0.0) + value
    rows = {
        "rewards": {name: sum(given) / len(given) for name, given in values.items()},
        "reward_counts": dict(sorted(counts.items())),
    }
    return dict(sorted(checks.items())) | {name: row for name, row in rows.items() if row}


def success_figures(
    before: Mapping[str, EvalResult], after: Mapping[str, EvalResult], env_specs: Sequence[EnvSpec]
) -> dict[str, Any]:
    """Return held-out success before and after training, blind with images, and
    `single_turn_best` if known."""
    metrics: dict[str, Any] = {}
    for name, scores in (("before", before), ("after", after)):
        sampled, greedy = scores.get("sampled"), scores.get("greedy")
        metrics[f"success_{name}"] = sampled.success if sampled else None
        metrics[f"success_{name}_ci"] = list(sampled.ci) if sampled and sampled.n else None
        metrics[f"greedy_{name}"] = greedy.success if greedy else None
        metrics[f"turns_{name}"] = sampled.turns if sampled else None
        if sampled and len(sampled.by_env) > 1:
            metrics[f"success_{name}_by_env"] = sampled.row()["by_env"]
    if (blind := after.get("blind")) is not None:
        metrics |= {
            "success_blind": blind.success,
            "success_blind_ci": list(blind.ci) if blind.n else None,
        }
    known = [
        (env_spec.single_turn_best, env_spec.weight)
        for env_spec in env_specs
        if env_spec.single_turn_best is not None
    ]
    best = None
    if len(known) == len(env_specs):
        best = sum(bound * weight for bound, weight in known) / sum(
            env_spec.weight for env_spec in env_specs
        )
    sampled = before.get("sampled")
    counts = {"n_eval": sampled.n, "eval_tasks": len(sampled.counts)} if sampled else {"n_eval": 0}
    return metrics | {"single_turn_best": best} | counts


def no_signal_reason(rows: Sequence[Mapping[str, Any]]) -> str:
    """Explain why nothing was learned if no training step had a group with signal; else
    return an empty text."""
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
    config: RunConfig, success: Mapping[str, Any], resumes: int, progress: Mapping[str, Any]
) -> dict[str, Any]:
    """Build the content of summary.json from `success_figures`, the number of resumes and
    further entries of the run."""
    summary = (
        dict(success)
        | dict(progress)
        | ({"overlap": "allowed"} if config.eval.overlap == "allowed" else {})
    )
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
    run: Path, step: int, credits: Sequence[Credit], batches: Sequence[TrainingBatch]
) -> dict[str, Any]:
    """Write a step's per-token records, one row per trajectory; return the
    metrics computed from them."""
    with closing(JsonLines(run / FILE)) as lines:
        for row in joined(token_rows(step, credits, batches)):
            lines.append(row)
    found = mismatch_by_turn(batches)
    return ({"mismatch_by_turn": found} if found else {}) | lag_metrics(batches)


def joined(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of token records with those of one trajectory joined, which several agents or
    policies were trained on.

    Their advantages differ, so each span has its own; the trajectory's is the mean.
    """
    by_key: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        by_key.setdefault(tuple(row["key"]), []).append(row)
    return [same[0] if len(same) == 1 else _joined(same) for same in by_key.values()]


def _joined(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    known = [row["advantage"] for row in rows if row["advantage"] is not None]
    found: dict[str, Any] = {"key": rows[0]["key"], "step": rows[0]["step"]}
    found["advantage"] = math.fsum(known) / len(known) if known else None
    found["reason"] = None if known else rows[0]["reason"]
    found["advantages"], found["logprobs"] = {}, {}
    for row in rows:
        found["logprobs"] |= row["logprobs"]
        mean = {span: [row["advantage"]] * len(values) for span, values in row["logprobs"].items()}
        found["advantages"] |= row.get("advantages", mean if row["advantage"] is not None else {})
    return found


def token_rows(
    step: int, credits: Sequence[Credit], batches: Sequence[TrainingBatch]
) -> Iterator[dict[str, Any]]:
    """Yield one row per trajectory of a step: its advantage or why it has none, and the
    trainer's logprobs per span.

    `advantage` is the mean over its ids; `advantages`, if they differ, has one per id by
    span index, `logprobs` likewise, null for ids without loss. A batch that was never
    scored yields no logprobs.
    """
    found = scored_ids(batches)
    for credit in credits:
        trajectory = credit.trajectory
        spans: dict[str, list[float | None]] = {}
        numbers = (
            trajectory.numbers
            if isinstance(trajectory, AgentView)
            else range(len(trajectory.spans))
        )
        for (span, offset), logprob in found.get(id(trajectory), ()):
            name = str(numbers[span])
            if name not in spans:
                spans[name] = [None] * len(trajectory.spans[span].ids)
            spans[name][offset] = float(f"{logprob:.7g}")
        row: dict[str, Any] = {"key": key_row(trajectory.key), "step": step}
        row |= {"advantage": credit.advantage, "reason": credit.reason}
        if credit.values is not None:
            row["advantages"] = {
                str(numbers[span]): [float(f"{one:.7g}") for one in values]
                for span, values in credit.values.items()
            }
        yield row | {"logprobs": spans}


def lag_metrics(batches: Sequence[TrainingBatch]) -> dict[str, Any]:
    """Return metrics of a step's trained tokens by lag and by cache, from logprobs before the first
    update; those by lag only if a token has one, those by cache only if a token was sampled on a
    cache of older weights."""
    scored = _scored(batches)
    if not scored:
        return {}
    lags_n, kept_n, engine_n = (
        torch.cat(parts)
        for parts in zip(*((b.lags_n, b.kept_n, b.engine_n) for b, _ in scored), strict=True)
    )
    trainer_n = torch.cat([trainer_n for _, trainer_n in scored])
    found: dict[str, Any] = {}
    if bool(lags_n.any()):
        found = {"lag_mean": float(lags_n.double().mean()), "lag_max": int(lags_n.max())}
        tables = found | {
            "tokens_by_lag": {},
            "mismatch_kl_by_lag": {},
            "importance_ess_by_lag": {},
        }
        for lag in sorted(set(lags_n.tolist())):
            chosen_n = lags_n == lag
            tables["tokens_by_lag"][str(lag)] = int(chosen_n.sum())
            for name, value in logprob_mismatch(trainer_n[chosen_n], engine_n[chosen_n]).items():
                if name in ("mismatch_kl", "importance_ess"):
                    tables[f"{name}_by_lag"][str(lag)] = value
        found = {name: value for name, value in tables.items() if value != {}}
    if bool(kept_n.any()):
        by_cache = {"own": ~kept_n, "kept": kept_n}
        figures = {
            name: logprob_mismatch(trainer_n[n], engine_n[n]) for name, n in by_cache.items()
        }
        found["tokens_by_cache"] = {name: int(n.sum()) for name, n in by_cache.items()}
        found["mismatch_kl_by_cache"] = {
            name: one["mismatch_kl"] for name, one in figures.items() if one
        }
    return found


def mismatch_by_turn(batches: Sequence[TrainingBatch]) -> dict[str, float]:
    """Return the mean |logprob of trainer - of engine| of each turn's ids of the current version,
    by turn number from 1."""
    turns, known, gaps = [], [], []
    for batch, trainer_n in _scored(batches):
        turn_of = [
            {
                span: number
                for number, turn in enumerate(t.turns[:MAX_TURNS], 1)
                for span in turn.spans
            }
            for t in batch.trajectories
        ]
        owners = batch.trajectory_n.tolist()
        turns += [
            turn_of[index].get(span, 0)
            for index, (span, _) in zip(owners, batch.slots, strict=True)
        ]
        known.append((batch.current_n & batch.engine_n.isfinite()).cpu())
        gaps.append((trainer_n - batch.engine_n).abs().cpu())
    if not gaps:
        return {}
    turn_n, gap_n = torch.tensor(turns, dtype=torch.long), torch.cat(gaps)
    known_n = (turn_n > 0) & torch.cat(known)
    counts = torch.bincount(turn_n[known_n]).tolist()
    sums = torch.bincount(turn_n[known_n], gap_n[known_n]).tolist()
    return {
        str(number): total / count
        for number, (total, count) in enumerate(zip(sums, counts, strict=True))
        if count
    }


def scored_ids(batches: Iterable[TrainingBatch]) -> dict[int, list[tuple[tuple[int, int], float]]]:
    """Return by id of each trajectory ((span, offset), logprob before the first update) of
    its ids that carry loss."""
    found: dict[int, list[tuple[tuple[int, int], float]]] = {}
    for batch, trainer_n in _scored(batches):
        own: list[list[tuple[tuple[int, int], float]]] = [[] for _ in batch.trajectories]
        for index, slot, logprob in zip(
            batch.trajectory_n.tolist(), batch.slots, trainer_n.tolist(), strict=True
        ):
            own[index].append((slot, logprob))
        found |= {
            id(trajectory): ids for trajectory, ids in zip(batch.trajectories, own, strict=True)
        }
    return found


def _scored(batches: Iterable[TrainingBatch]) -> list[tuple[TrainingBatch, torch.Tensor]]:
    """Return the batches that were scored, with their logprobs before the first update."""
    return [(batch, batch.start_n) for batch in batches if batch.start_n is not None]
