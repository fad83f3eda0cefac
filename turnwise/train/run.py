"""One training run from its recipe to its summary, able to go on where a kill stopped it.

Going on takes no luck: the last checkpoint holds weights and optimizer, the journal holds every finished episode. Steps since
the checkpoint are trained again on the journal's episodes, so nothing that was finished is sampled twice, and since a
sampled id depends on names (run, step, task, sample, turn, position) and not on order, what was cut off comes out the same.
"""

from __future__ import annotations

import asyncio
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from turnwise.config import RunConfig
from turnwise.engine import Sampling
from turnwise.engine.local.fingerprint import fingerprint
from turnwise.env.world import World
from turnwise.errors import SyncError, TurnwiseError
from turnwise.rollout import Rollout, group
from turnwise.trace import RunDir, Watch, read_json_lines, replay, trajectory_row
from turnwise.train.checkpoint import Checkpoints
from turnwise.train.evaluate import Score, evaluate
from turnwise.train.plan import Choice, Plan
from turnwise.train.setup import make_parts, model_directory, within_prompt_limit
from turnwise.train.warmup import demonstrations, gate, learning_rate, pick
from turnwise.types import Key, Trajectory

MOST_FAILED = 0.2
"""Share of a step's episodes that may fail before the run stops: it would train on whatever is left."""


class Run:
    """A run in one directory: warm-up, evaluation, reinforcement, evaluation."""

    def __init__(self, config: RunConfig, worlds: Sequence[World], run: RunDir, watch: Watch) -> None:
        """Load everything; a fresh directory starts, any other goes on.

        Raises:
            UsageError: when the recipe, a model or a dataset cannot be used.
        """
        self.config = config
        self.worlds = list(worlds)
        self.run = run
        self.watch = watch
        self.began = (time.time(), time.process_time())
        steps, groups = config.train.steps, config.rollout.groups
        watch.phase("set up", 0, "")
        self.plan = Plan(worlds, steps=steps, groups=groups, held_out=config.eval.tasks, seed=config.seed)
        source = model_directory(config, worlds, run.path)
        self.checkpoints = Checkpoints(run.checkpoints, source, keep=config.checkpoint.keep)
        latest = self.checkpoints.latest()
        self.cursor: dict[str, Any] = dict(latest.cursor) if latest else {"phase": "warmup", "step": 0, "warmed": 0}
        self.parts = make_parts(config, source, latest.path if latest else None)
        if latest is not None:
            self.parts.trainer.load(latest.path)
        self.rows = {_row_name(row) for row in read_json_lines(run.path / "metrics.jsonl")}
        self.rollout = Rollout(
            self.parts.engine,
            self.parts.renderer,
            limits=config.limits,
            sampling=Sampling(temperature=config.rollout.temperature),
            seed=config.seed,
            concurrency=config.rollout.concurrency,
            run=run,
            recorded=self._recorded(),
        )

    async def play(self) -> dict[str, Any]:
        """Run to the end.

        Returns:
            What summary.json holds.

        Raises:
            TurnwiseError: when the run cannot go on; the message says why, and it can be resumed.
        """
        try:
            await self._left_out()
            if self.cursor["phase"] == "warmup":
                await self._warm_up()
            before = await self._evaluate("before")
            await self._reinforce()
            after = await self._evaluate("after")
        finally:
            await self.parts.engine.close()
        summary = self._summary(before, after)
        self.run.write_json("summary.json", summary)
        self.run.sync()
        return summary

    # Going on

    def _recorded(self) -> dict[Key, Trajectory]:
        """Finished episodes that the journal holds and the checkpoint does not cover, and their missing records written."""
        done = self.cursor["step"] if self.cursor["phase"] == "reinforce" else 0
        found = replay(self.run.events(), self.plan.by_id.get)
        found = {k: t for k, t in found.items() if k.phase != "train" or k.step >= done}
        written = set()
        for row in read_json_lines(self.run.path / "trajectories.jsonl"):
            written.add(tuple(row["key"].values()))
        for key, trajectory in found.items():
            if (key.phase, key.step, key.task, key.sample, key.attempt) not in written:
                self.run.trajectories.append(trajectory_row(trajectory, self.parts.renderer))
        return found

    async def _left_out(self) -> None:
        most = self.config.limits.prompt_tokens
        if most is None:
            return
        rollout = Rollout(self.parts.engine, self.parts.renderer, limits=self.config.limits, seed=self.config.seed)
        fits, out = await within_prompt_limit(rollout, [*self.plan.train, *self.plan.held_out], most)
        self.plan.keep(fits)
        self.run.write_json("left_out.json", {"limits.prompt_tokens": most, "count": len(out), "tasks": out})
        if out:
            shown = ", ".join(out[:5]) + (", ..." if len(out) > 5 else "")
            self.watch.note(f"{len(out)} tasks left out, their prompt is over {most} tokens: {shown} (left_out.json has all)")

    def _save(self, name: str, **cursor: Any) -> None:
        self.cursor |= cursor
        self.watch.waiting("checkpoint")
        self.checkpoints.save(name, self.parts.trainer, self.cursor)
        self.watch.waiting("")

    # Warm-up

    async def _warm_up(self) -> None:
        config, warmup = self.config, self.config.warmup
        step = int(self.cursor["step"])
        if warmup.demos == 0:
            self.cursor |= {"phase": "reinforce", "step": 0}
            self.parts.trainer.reference()
            return
        self.watch.phase("warm-up", warmup.steps, "steps")
        demos = await demonstrations(self.worlds, self.plan.train, self.parts.renderer, config)
        demo_reward = sum(t.reward or 0.0 for t in demos) / len(demos)
        missing = "no look at the gate yet"
        losses: list[float] = list(self.cursor.get("losses", ()))
        while step < warmup.steps:
            figures = self.parts.trainer.supervised(pick(demos, config, step), lr=learning_rate(config, step))
            losses = [*losses[-19:], figures["loss"]]
            step += 1
            self._row({"phase": "warmup", "step": step, "demo_reward": demo_reward} | figures)
            self.watch.progress(step, figures)
            if step % warmup.gate_every == 0 or step == warmup.steps:
                missing = await self._look(step, sum(losses) / len(losses))
                if not missing:
                    break
                self._save("warmup", phase="warmup", step=step, losses=losses)
        if missing:
            raise TurnwiseError(
                f"the warm-up ended after {step} steps without meeting its gate: {missing}. Reinforcement would find nothing "
                "to build on: raise warmup.steps or warmup.demos, or lower the gate if that is what the demonstrations allow"
            )
        # Reinforcement begins with moments of its own: those of cross entropy are of another size.
        self.parts.trainer.reset_optimizer()
        self.parts.trainer.reference()
        self._save("warmed", phase="reinforce", step=0, warmed=step, losses=[])

    async def _look(self, step: int, loss: float) -> str:
        """Play some training tasks; what the gate still misses, empty when it is met."""
        await self._sync(step)
        tasks = self.plan.train[: self.config.warmup.gate_tasks]
        score = await self._score(tasks, "gate", step, 1, Sampling(temperature=self.config.rollout.temperature))
        missing = gate(self.config, score, loss)
        self._row({"phase": "gate", "step": step, "loss": loss, "passed": not missing} | score.row())
        return missing

    # Reinforcement

    async def _reinforce(self) -> None:
        config = self.config
        steps = config.train.steps
        self.watch.phase("reinforce", steps, "steps")
        for step in range(int(self.cursor["step"]), steps):
            await self._sync(self.cursor["warmed"] + step)
            began = time.monotonic()
            choices = self.plan.step(step)
            episodes = [e for choice in choices for e in choice.episodes("train", step, config.rollout.group_size)]
            trajectories = await self._watched(self.rollout.play(episodes), len(episodes))
            rollout_s = time.monotonic() - began
            self._check_failures(trajectories, step)
            self.watch.waiting("the optimizer")
            figures = self.parts.trainer.step(group(trajectories), step=step, steps=steps)
            row = {"phase": "train", "step": step + 1} | _figures(trajectories, figures, rollout_s, config.eval.success)
            if self._row(row):
                self.run.journal.append({"e": "trained", "step": step, "episodes": len(trajectories)})
            self.watch.progress(step + 1, row)
            self.rollout.forget(step)
            done = step + 1
            if done % config.checkpoint.every == 0 or done == steps:
                self._save(f"step-{done:05d}", phase="reinforce", step=done)
            if config.eval.every and done % config.eval.every == 0 and done < steps:
                await self._sync(self.cursor["warmed"] + done)
                await self._evaluate(f"step-{done}", greedy=False)

    def _check_failures(self, trajectories: Sequence[Trajectory], step: int) -> None:
        failed = [t for t in trajectories if t.stop is not None and t.stop.failed]
        if len(failed) <= MOST_FAILED * len(trajectories):
            return
        kinds = Counter((str(t.stop), t.error.type if t.error else "") for t in failed)
        error = next((t.error for t in failed if t.error is not None), None)
        told = f"; the first in {error.phase}: {error.type}: {error.message}" if error else ""
        counts = ", ".join(f"{stop} {kind} x{count}" for (stop, kind), count in kinds.most_common(3))
        raise TurnwiseError(
            f"{len(failed)} of {len(trajectories)} episodes of step {step} failed ({counts}){told}. Tracebacks stand in "
            f"{self.run.path / 'trajectories.jsonl'}; mend the cause, then start a new run"
        )

    async def _sync(self, version: int) -> None:
        """Bring the trainer's weights to the engine, and prove that they arrived.

        Raises:
            SyncError: when the engine's fingerprint is not the trainer's.
        """
        self.watch.waiting("weights to reach the engine")
        weights = list(self.parts.trainer.weights())
        arrived = await self.parts.engine.update(weights, version)
        if arrived != fingerprint(weights) or self.parts.engine.version != version:
            raise SyncError(
                f"the engine holds other weights than the trainer sent (policy {version}, engine says "
                f"{self.parts.engine.version}): it would sample from a policy that is not the one being trained"
            )
        self.rollout.min_version = version
        self.watch.waiting("")

    # Evaluation

    async def _evaluate(self, name: str, *, greedy: bool = True) -> dict[str, Score]:
        config = self.config.eval
        if not self.plan.held_out:
            self.watch.note("no held-out tasks: nothing is evaluated")
            return {}
        step = self.config.train.steps if name == "after" else int(self.cursor["step"]) if name != "before" else 0
        await self._sync(self.cursor["warmed"] + step)
        self.watch.phase(f"evaluate {name}", 2 if greedy and config.greedy else 1, "passes")
        scores: dict[str, Score] = {}
        modes = {"sampled": (config.samples, config.temperature)} | ({"greedy": (1, 0.0)} if greedy and config.greedy else {})
        for number, (mode, (samples, temperature)) in enumerate(modes.items(), 1):
            phase = f"eval-{name}-{mode}"
            score = await self._score(self.plan.held_out, phase, step, samples, Sampling(temperature=temperature))
            scores[mode] = score
            self._row({"phase": "eval", "name": name, "mode": mode, "step": step} | score.row())
            self.watch.progress(number, {"success": score.success, "turns": score.turns, "stops": score.stops})
        return scores

    async def _score(self, choices: Sequence[Choice], phase: str, step: int, samples: int, sampling: Sampling) -> Score:
        work = evaluate(
            self.rollout,
            choices,
            name=phase,
            step=step,
            samples=samples,
            sampling=sampling,
            threshold=self.config.eval.success,
        )
        return await self._watched(work, len(choices) * samples)

    async def _watched(self, work: Any, episodes: int) -> Any:
        """Await episodes while telling the watch what they wait for."""
        task = asyncio.ensure_future(work)
        start = self.rollout.finished
        while not (await asyncio.wait({task}, timeout=1.0))[0]:
            phases = Counter(phase for _, _, phase, _ in self.rollout.pending())
            oldest = next(iter(self.rollout.pending()), None)
            told = ", ".join(f"{count} in {phase}" for phase, count in phases.most_common())
            if oldest is not None:
                told += f"; longest: {oldest[0]} turn {oldest[1] + 1}, {oldest[3]:.0f} s in {oldest[2]}"
            self.watch.waiting(f"{self.rollout.finished - start} of {episodes} episodes done; {told}")
        self.watch.waiting("")
        return task.result()

    # Figures

    def _row(self, row: Mapping[str, Any]) -> bool:
        """Write a row of metrics, once: a resumed run comes by some of them again."""
        name = _row_name(row)
        if name in self.rows:
            return False
        self.rows.add(name)
        self.run.metrics.append(dict(row) | {"time_s": time.time() - self.began[0]})
        return True

    def _summary(self, before: Mapping[str, Score], after: Mapping[str, Score]) -> dict[str, Any]:
        config = self.config
        summary: dict[str, Any] = {}
        for name, scores in (("before", before), ("after", after)):
            sampled, greedy = scores.get("sampled"), scores.get("greedy")
            summary[f"success_{name}"] = sampled.success if sampled else None
            summary[f"success_{name}_ci"] = list(sampled.ci) if sampled else None
            summary[f"greedy_{name}"] = greedy.success if greedy else None
            summary[f"turns_{name}"] = sampled.turns if sampled else None
        bounds = [world.single_turn_best for world in self.worlds]
        known = [bound for bound in bounds if bound is not None]
        weights = [world.weight for world in self.worlds]
        best = sum(b * w for b, w in zip(known, weights, strict=True)) / sum(weights) if len(known) == len(bounds) else None
        return summary | {
            "single_turn_best": best,
            "rl_steps": config.train.steps,
            "warmup_steps": self.cursor["warmed"],
            "n_eval": before["sampled"].n if before else 0,
            "wall_s": time.time() - self.began[0],
            "cpu_s": time.process_time() - self.began[1],
            "seed": config.seed,
            "versions": versions(),
            "machine": machine(),
        }


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    found = {"python": platform.python_version()}
    for name in ("turnwise", "torch", "transformers", "tokenizers", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine() -> dict[str, Any]:
    """What the run ran on, in plain words."""
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
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _row_name(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return (row.get("phase"), row.get("name"), row.get("mode"), row.get("step"))


def _figures(
    trajectories: Sequence[Trajectory], trained: Mapping[str, float], rollout_s: float, success: float
) -> dict[str, Any]:
    """A step's row of metrics: what the rollout was like, and what the trainer made of it."""
    rewards = [t.reward for t in trajectories if t.reward is not None]
    sampled = sum(t.sampled_tokens for t in trajectories)
    n = max(len(rewards), 1)
    untrained = {name[7:]: value for name, value in trained.items() if name.startswith("tokens_") and value}
    for name in ("trained", "sampled", "per_s"):
        untrained.pop(name, None)
    return {name: value for name, value in trained.items() if not name.startswith("tokens_")} | {
        "reward": sum(rewards) / n,
        "success": sum(reward >= success for reward in rewards) / n,
        "turns": sum(len(t.turns) for t in trajectories) / max(len(trajectories), 1),
        "used": trained.get("trajectories_trained", 0.0) / max(trained.get("trajectories", 1.0), 1.0),
        "sampled_tokens": sampled,
        "trained_tokens": trained.get("tokens_trained", 0.0),
        "tokens_per_s": sampled / max(rollout_s, 1e-9),
        "rollout_s": rollout_s,
        "stops": dict(Counter(str(t.stop) for t in trajectories)),
        "untrained": untrained,
    }
