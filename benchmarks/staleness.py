"""Success of the quickstart's task trained on episodes of older weights, by correction.

Every step trains on episodes that were sampled by the weights of `--lag` updates before;
evaluations use the newest weights. So each token has the full lag, which is the worst case of
`schedule.staleness`: an asynchronous run mixes it with smaller ones. For one seed all runs
reinforce the same weights, those of the warm-up of its first run, which has no lag. Recipe:
recipes/quickstart.toml with 2 heads.

    python benchmarks/staleness.py                                     # three seeds, lag 2, each correction
    python benchmarks/staleness.py --only icepop --only tis:1.0 --lag 4   # a bound: correction_high, or LOW-HIGH

The last line is JSON: by correction (`none` is the run without lag), a row for each seed: success
before and after (sampled, 95% interval), the least and the mean effective sample size of importance
weights, and the share of tokens excluded.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turnwright.config import load
from turnwright.config.dump import to_json_dict
from turnwright.envs.spec import EnvSpec
from turnwright.errors import SyncError
from turnwright.records import NullListener, RunDir, read_json_lines
from turnwright.rollouts.standalone import run_sync
from turnwright.training.run import TrainingRun
from turnwright.training.task_plan import make_env_specs

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "quickstart.toml"
CORRECTIONS = ("tis", "icepop", "sequence_mis", "sequence_mis_mean")


class LaggedRun(TrainingRun):
    """A run whose training episodes are sampled by the weights of `lag` updates before."""

    lag = 0
    evaluating = True

    async def _reinforce(self) -> None:
        self.evaluating, self.kept = False, {}
        step = self.policies.step

        def stepped(trajectories: Any, **given: Any) -> Any:
            return step(trajectories, **given | {"version": self.newest})

        self.policies.step = stepped  # type: ignore[method-assign]
        await super()._reinforce()
        self.evaluating = True

    async def _send_weights(self, version: int) -> None:
        if self.evaluating:
            await super()._send_weights(version)
            return
        (policy,) = self.policies
        self.newest, self.kept[version] = version, list(policy.weights())
        old = max(min(self.kept), version - self.lag)
        await policy.engine.update(self.kept[old], old)
        policy.trainer.take_probe()
        if policy.engine.version != old:
            raise SyncError(f"the engine reports policy {policy.engine.version}, not {old}")
        self._version = old
        self.kept.pop(version - self.lag, None)


def trained(
    name: str, seed: int, lag: int, folder: Path, words: Sequence[str], warmed: Path | None
) -> dict[str, Any]:
    """Train once, from `warmed` or else after a warm-up, with a correction such as `tis`,
    `tis:1.5` or `icepop:0.5-2`."""
    out = folder / f"{name}-{seed}".replace(":", "_")
    kind, _, bounds = name.partition(":")
    low, _, high = bounds.rpartition("-")
    words = [
        *words,
        "--out",
        str(out),
        "--seed",
        str(seed),
        "--model.heads",
        "2",
        "--model.kv-heads",
        "2",
    ]
    words += ["--train.correction", kind, "--checkpoint.keep", "99"]
    words += [
        *(["--train.correction-low", low] if low else []),
        *(["--train.correction-high", high] if high else []),
    ]
    words += [] if warmed is None else ["--model.path", str(warmed), "--warmup.demos", "0"]
    resolved = load(RECIPE, words)
    specs: list[EnvSpec] = make_env_specs(resolved.config)
    with RunDir(out) as run:
        run.write_json("config.json", to_json_dict(resolved))
        made = LaggedRun(resolved.config, specs, run, NullListener())
        made.lag = lag
        summary = run_sync(made.play())
    rows = [
        row
        for row in read_json_lines(out / "metrics.jsonl")
        if row.get("phase") == "train" and "correction_ess" in row
    ]
    ess = [row["correction_ess"] for row in rows] or [1.0]
    masked = [row["correction_masked"] for row in rows] or [0.0]
    names = ("success_before", "success_after", "success_after_ci", "greedy_after")
    found = {"seed": seed, "lag": lag} | {key: summary[key] for key in names}
    return found | {
        "ess_min": min(ess),
        "ess_mean": sum(ess) / len(ess),
        "masked_mean": sum(masked) / len(masked),
    }


def main() -> None:
    """Run the benchmark; words that it does not know are overrides of the recipe."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--lag", type=int, default=2, help="updates between the sampling policy and the trained one"
    )
    parser.add_argument(
        "--only", action="append", help="a correction, with bounds or not; may be given again"
    )
    args, words = parser.parse_known_args()
    rows: dict[str, list[dict[str, Any]]] = {}
    print(
        "| correction | seed | lag | success before | success after | greedy after | least ESS | "
        "mean ESS | excluded |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds):
            warmed = None
            for name in ("none", *(args.only or CORRECTIONS)):
                row = trained(name, seed, args.lag if warmed else 0, Path(folder), words, warmed)
                warmed = warmed or Path(folder) / f"none-{seed}" / "checkpoints" / "warmed"
                rows.setdefault(name, []).append(row)
                low, high = (100 * bound for bound in row["success_after_ci"])
                print(
                    f"| `{name}` | {seed} | {row['lag']} | {100 * row['success_before']:.1f}% | "
                    f"{100 * row['success_after']:.1f}% [{low:.1f}, {high:.1f}] | "
                    f"{100 * row['greedy_after']:.0f}% | {row['ess_min']:.2f} | "
                    f"{row['ess_mean']:.2f} | {100 * row['masked_mean']:.2f}% |",
                    flush=True,
                )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
