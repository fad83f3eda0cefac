"""A training run from recipe to summary, resumable after a kill.

The last checkpoint holds weights and optimizer state; the journal holds every finished episode.
A resumed run repeats the steps since the checkpoint on the journal's episodes. A sampled id
depends on names (run, step, task, sample, turn, position), not on order, so interrupted
episodes come out the same.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwright.config import RunConfig
from turnwright.engines import Sampling, ScriptedEngine
from turnwright.engines.local import torch_settings
from turnwright.envs.spec import EnvSpec
from turnwright.errors import TurnwrightError
from turnwright.records import EpisodeListener, ProgressListener, RunDir, read_json_lines
from turnwright.records.episode_metrics import rollout_metrics
from turnwright.renderers.history import History
from turnwright.renderers.row_arguments import check_row_arguments
from turnwright.rollouts import EpisodeSpec, Rollout
from turnwright.rollouts.group_scheduler import BatchScheduler
from turnwright.rollouts.play_again import play_again
from turnwright.rollouts.resume import EarlierEpisodes
from turnwright.rollouts.rollout_settings import RolloutSettings, sampling_of
from turnwright.rollouts.runner import left_out, left_out_note, parse_history
from turnwright.rollouts.stream import GroupPlayer, RolloutStream
from turnwright.training.batches import (
    Batches,
    StepBatches,
    StreamBatches,
    groups_per_step,
    off_loop,
)
from turnwright.training.checkpoint import Checkpoints, check_run_template
from turnwright.training.components import build_components
from turnwright.training.curriculum import Curriculum
from turnwright.training.evaluation import EvalResult, play_evaluation, summarize
from turnwright.training.forward.ranks import Ranks
from turnwright.training.metrics import (
    no_signal_reason,
    step_row,
    success_figures,
    summary_of,
    write_token_records,
)
from turnwright.training.run_record import RunRecord
from turnwright.training.setup import (
    model_directory,
    release_engine_memory,
)
from turnwright.training.task_plan import (
    TaskChoice,
    TaskPlan,
    check_failures,
    eval_samples,
    planned_steps,
)
from turnwright.training.trainer.heap import return_large_heap
from turnwright.training.trainer.memory import report_memory
from turnwright.training.warmup import cut_note, demonstrations, sample_demos
from turnwright.training.warmup_gate import (
    SIGNAL,
    Gate,
    exceeds,
    learning_rate,
    round_ends,
    still_falls,
    success_in_other_tasks,
)
from turnwright.types import ROUTES, Trajectory

if TYPE_CHECKING:
    from turnwright.engines.remote.placed import ServerPlacer

HEAP_STEPS = 8
"""Warm-up steps after which the freed memory of a large model goes back to the system. At each step
it would cost as much as the step."""
RECENT = 20
"""Last warm-up steps, whose mean loss `warmup.gate_loss` bounds."""
STOP_STEPS = 5
"""Steps over which the success that ends reinforcement is averaged."""


class TrainingRun:
    """A run in one directory: warm-up, evaluation, reinforcement, evaluation."""

    _stream: RolloutStream
    """Stream of the run's episodes, open while it plays."""
    measured: Mapping[str, Any] = {}
    """Turn-level metrics of the last evaluation or gate evaluation."""

    def __init__(
        self,
        config: RunConfig,
        env_specs: Sequence[EnvSpec],
        run: RunDir,
        watch: ProgressListener,
        *,
        resumed: bool = False,
        began: tuple[float, float] | None = None,
        history: History | None = None,
        ranks: Ranks | None = None,
        extended: Mapping[str, Sequence[int]] = {},
        workers: Callable[[Path], GroupPlayer] | None = None,
        placer: ServerPlacer | None = None,
    ) -> None:
        """Load all components as rank 0 of `ranks`; start in a fresh directory, else resume
        (`resumed` if in another process).

        `began` has `time.time()` and `time.process_time()` at the start of this process' share;
        None means now. `extended` has the numbers of steps that the run had before it was resumed
        with more. `workers` returns what plays the groups elsewhere, for the directory of tokenizer
        and template; `placer` starts the servers elsewhere.
        """
        self.config, self.env_specs = config, list(env_specs)
        self.run = run
        self.watch = watch
        self.history = parse_history(config.rollout.history if history is None else history)
        began = began or (time.time(), time.process_time())
        watch.phase("set up", 0, "")
        train, rollout = config.train, config.rollout
        self._train_steps = (*extended.get("train.steps", ()), train.steps)
        lengths = (*extended.get("warmup.steps", ()), config.warmup.steps)
        self._round_ends = round_ends(lengths, config.warmup.rounds)
        self.plan = TaskPlan(
            env_specs,
            steps=self._train_steps,
            groups=rollout.groups,
            held_out=config.eval.tasks,
            seed=config.seed,
            overlap=config.eval.overlap == "allowed",
            curriculum=Curriculum.of(config, env_specs),
        )
        source = model_directory(config, env_specs, run.path)
        self.checkpoints = Checkpoints(run.checkpoints, source, keep=config.checkpoint.keep)
        latest = self.checkpoints.newest()
        self.cursor: dict[str, Any] = (
            dict(latest.cursor) if latest else {"phase": "warmup", "step": 0, "warmed": 0}
        )
        weights = latest.path if latest else None
        self.parts = build_components(
            config, source, run.path, weights, ranks, on_note=watch.note, placer=placer
        )
        self.policies = self.parts.policies
        """Policies that are trained."""
        self.policies.restore(self.cursor)
        self.policies.check_agents(env_specs)
        own = config.model.template is not None or bool(config.model.template_args)
        self._template = self.parts.renderer.template.source if own else None
        check_run_template(run, self.parts.renderer, resumed=resumed)
        self._codes_reported = False
        self._unseen_noted = False
        self._version = 0
        """Policy version of the last weight update."""
        self.stopped_by = ""
        """Key that ended reinforcement early."""
        self.record = RunRecord(
            run,
            began,
            covered=self.cursor["step"] if self.cursor["phase"] == "reinforce" else 0,
            asynchronous=config.schedule.mode == "async",
        )
        recorded = self.record.episodes(
            self.plan.by_id.get, self.parts.renderer, self.cursor.get("journal"), watch.note
        )
        if resumed:
            self.record.resume()
        self.rollout = Rollout(
            self.parts.engine,
            self.parts.renderer,
            RolloutSettings.of(config, history=self.history, stop_on_bugs=True),
            run=run,
            earlier=EarlierEpisodes(recorded, self.record.interrupted),
            media=self.parts.media,
            pixels=self.parts.pixels,
            on_episode=watch.episode if isinstance(watch, EpisodeListener) else None,
            elsewhere=None if workers is None else workers(source),
        )

    async def play(self) -> dict[str, Any]:
        """Run to the end and return the content of summary.json; after a `TurnwrightError`,
        the run can be resumed."""
        for note in self.policies.notes:
            self.watch.note(note)
        for note in self.plan.notes(self.config):
            self.watch.note(note)
        for policy in self.policies:
            report_memory(
                policy.trainer,
                self.config.limits,
                policy.engine,
                self.watch.note,
                sequences=self.config.rollout.groups * self.config.rollout.group_size,
                concurrency=self.config.rollout.concurrency,
            )
        try:
            await self._apply_prompt_limit()
            async with self.rollout.stream() as self._stream:
                if self.cursor["phase"] == "warmup":
                    await self._warm_up()
                for past in self.parts.past:
                    past.begin(int(self.cursor["warmed"]))
                before = await self._evaluate("before", 0)
                self._keep_best(0, before)
                await self._reinforce()
                steps = int(self.cursor["step"])
                after = await self._evaluate("after", steps)
                self._keep_best(steps, after)
                rolled_back = self._roll_back(after)
        finally:
            await self.parts.engine.close()
        wall, cpu = self.record.times()
        known = {
            "rl_steps": steps,
            "warmup_steps": self.cursor["warmed"],
            "best": self.checkpoints.best(),
            "wall_s": wall,
            "cpu_s": cpu,
        }
        known |= {"rolled_back": rolled_back} if rolled_back else {}
        known |= {"stopped_by": self.stopped_by} if self.stopped_by else {}
        known |= {"failed_plays": failed} if (failed := self.record.all_failed_plays) else {}
        resumed_turns = self.record.resumed_turns + self.rollout.resumed_turns
        known |= {"resumed_turns": resumed_turns} if resumed_turns else {}
        summary = summary_of(
            self.config, success_figures(before, after, self.env_specs), self.record.resumes, known
        )
        rows = [
            row
            for row in read_json_lines(self.run.path / "metrics.jsonl")
            if row.get("phase") == "train"
        ]
        if reason := no_signal_reason(rows):
            self.watch.note(reason)
        self.run.write_json("summary.json", summary)
        self.run.sync()
        return summary

    async def _apply_prompt_limit(self) -> None:
        check_row_arguments(
            (choice.task for choice in (*self.plan.train, *self.plan.held_out)), self.parts.renderer
        )
        limit = self.config.limits.prompt_tokens
        if limit is None:
            return
        # A second store would separate the engine from the images of the run.
        store = self.rollout.media_intake.store
        rollout = Rollout(
            self.parts.engine,
            self.parts.renderer,
            RolloutSettings(limits=self.config.limits, seed=self.config.seed),
            media=store,
        )
        choices = [*self.plan.train, *self.plan.held_out]
        fits, out = await rollout.within_prompt_limit(
            [choice.episodes("prompt", 0, 1)[0] for choice in choices]
        )
        self.plan.restrict_to(fits)
        self.run.write_json("left_out.json", left_out(limit, out))
        if out:
            self.watch.note(left_out_note(limit, out, listed=True))

    def _save(self, name: str, **cursor: Any) -> None:
        self.cursor |= cursor
        self.watch.waiting("checkpoint")
        torch_settings.keep()
        self.run.sync()  # after a power cut, no checkpoint may outlive the episodes before it
        state = (
            self.cursor
            | self.plan.state()
            | self.policies.state()
            | {"journal": self.run.journal.mark()}
        )
        self.checkpoints.save(name, self.policies, state, self._template)
        for past in self.parts.past:
            past.prune([checkpoint.step for checkpoint in self.checkpoints.all()])
        self.watch.waiting("")

    def _keep_past(self, step: int) -> None:
        """Keep the weights of a step that later episodes may play against."""
        for past in self.parts.past if step >= self.cursor["step"] else ():
            # A resumed run has the earlier ones.
            past.save(step, self._template)

    def _keep_best(self, step: int, scores: Mapping[str, EvalResult]) -> None:
        """Keep the checkpoint of an evaluated policy if none scored higher;
        of equals, the later."""
        best, name = self.checkpoints.best(), f"step-{step:05d}" if step else "warmed"
        if (
            not self.config.checkpoint.keep_best
            or "sampled" not in scores
            or not (step or self.cursor["warmed"])
        ):
            return
        success = scores["sampled"].success
        if success is not None and (best is None or success >= best[1]):
            if step and not (self.checkpoints.root / name).exists():
                self._save(name, phase="reinforce", step=step)
            self.checkpoints.mark_best(name, success)

    def _roll_back(self, after: Mapping[str, EvalResult]) -> str:
        """Make the best checkpoint the policy of the run where the last one is worse by more than
        chance; return its name."""
        best, last = self.checkpoints.best(), after.get("sampled")
        if best is None or last is None or last.success is None:
            return ""
        name, score = best
        if score <= last.ci[1]:
            # An extended run may have made good what it had broken.
            self.checkpoints.mark_best(name, score)
            return ""
        self.checkpoints.mark_best(name, score, rolled_back=True)
        self.watch.note(
            f"the last policy succeeds in {last.success:.0%} of held-out episodes, that of "
            f"checkpoint {name} in {score:.0%}: the run keeps {name} for eval, rollout and serve; "
            "lower train.lr, or set train.gradient_signal_steps"
        )
        return name

    # Warm-up

    async def _warm_up(self) -> None:
        config, warmup = self.config, self.config.warmup
        step = int(self.cursor["step"])
        if warmup.demos == 0 and warmup.dataset is None:
            self.cursor |= {"phase": "reinforce", "step": 0}
            self.policies.reference()
            return
        self.watch.phase("warm-up", planned_steps(self._round_ends, step), "steps")
        note = self.watch.note
        demos = await self._demonstrate()
        self._note_unseen_images()
        # Those are in the first row of metrics, since they are played before it.
        failed_plays = self.record.failed_plays("demonstrate", 0)
        rewards = [t.reward for t in demos if t.reward is not None]
        demo_reward = sum(rewards) / len(rewards) if rewards else None
        gate = Gate.of(config, demos)
        if gate.demo_success is not None:
            note(
                f"{gate.demo_success:.0%} of {len(demos)} demonstrations succeed; the warm-up's "
                f"goal is {gate.success:.0%}"
            )
        if cut := cut_note(config, demos):
            note(cut)

        missing, played = "the gate was not evaluated yet", list[Trajectory]()
        losses: list[float] = list(self.cursor.get("losses", ()))  # of this round
        await release_engine_memory(self.parts.engine, config)
        while step < self._round_ends[-1]:
            end = planned_steps(self._round_ends, step)
            figures = self.policies.supervised(
                sample_demos(demos, config, step), lr=learning_rate(warmup.lr, step, end)
            )
            losses.append(figures["loss"])
            step += 1
            self.record.row(
                {"phase": "warmup", "step": step, "demo_reward": demo_reward}
                | figures
                | failed_plays
            )
            failed_plays = {}
            self.watch.progress(step, figures)
            if step % HEAP_STEPS == 0:
                return_large_heap(self.parts.engine)
            if step % warmup.gate_every and step != end:
                continue

            return_large_heap(self.parts.engine)
            recent = losses[-RECENT:]
            missing, played = await self._check_gate(gate, step, sum(recent) / len(recent))
            await release_engine_memory(self.parts.engine, config)
            return_large_heap(self.parts.engine)
            if not missing:
                break
            if step == end:
                # A user who asked for more steps than this round has gets them
                # whatever the loss does.
                asked_for_more = step < warmup.steps
                if not asked_for_more and not self._another_round(step, losses, played):
                    break
                note(f"after {step} steps {missing}, but the loss still falls: the warm-up goes on")
                self.watch.phase("warm-up", planned_steps(self._round_ends, step), "steps")
                losses = []
            self._save("warmup", phase="warmup", step=step, losses=losses)
        if missing:
            await self._judge_missed_gate(gate, missing, demos, played, step)

        # Reinforcement starts with fresh moments: those of cross entropy have another scale.
        self.policies.reset_optimizer()
        self.policies.reference()
        self._save("warmed", phase="reinforce", step=0, warmed=step, losses=[])

    def _another_round(
        self, step: int, losses: Sequence[float], played: Sequence[Trajectory]
    ) -> bool:
        """Return whether a warm-up that missed its gate at the end of a round goes on."""
        is_last = step == self._round_ends[-1]
        has_rewards = any(trajectory.reward is not None for trajectory in played)
        return not is_last and has_rewards and still_falls(losses)

    async def _judge_missed_gate(
        self,
        gate: Gate,
        missing: str,
        demos: Sequence[Trajectory],
        played: Sequence[Trajectory],
        step: int,
    ) -> None:
        """Note that reinforcement begins below the gate; raise `TurnwrightError` where it would
        have nothing to build on."""
        run, warmup = self.run.given_path, self.config.warmup
        result = summarize(played, self.config.eval.success)
        if result.success is None:
            raise TurnwrightError(
                f"the warm-up ended after {step} steps without meeting its gate, since {missing}: "
                "training longer changes nothing. Find out why the environment or its reward "
                "function returned None for each of them (episodes are in "
                f"{run / 'trajectories.jsonl'}), mend it, and resume with --resume {run}"
            )

        longer = f"--resume {run} --warmup.steps {step + warmup.steps}"
        if gate.demo_success is None or result.differing < SIGNAL:
            raise TurnwrightError(
                f"the warm-up ended after {step} steps without meeting its gate: {missing}. "
                f"Reinforcement would have nothing to build on: resume with {longer} if the loss "
                f"still falls, or with --resume {run} --warmup.gate-success X if the "
                "demonstrations allow no more, or start a new run with more warmup.demos"
            )

        chance = await self._success_in_other_tasks(played)
        reads = chance is None or exceeds(result, chance)
        if chance is not None and not reads and await self._demonstrations_read(demos):
            raise TurnwrightError(
                f"the warm-up ended after {step} steps without meeting its gate: {missing}, and "
                f"the same replies succeed in {chance.success:.0%} of other tasks, so what a task "
                f"shows is not used yet. Reinforcement would learn from luck: resume with {longer} "
                f"if the loss still falls, or with --resume {run} --warmup.gate-success "
                f"{result.success:.2g} to begin it all the same; else a larger model or plainer "
                "observations"
            )
        self.watch.note(
            f"warm-up ended below its goal ({missing}); training goes on, since "
            f"{result.differing:.0%} of rewards differ"
        )

    async def _demonstrations_read(self, demos: Sequence[Trajectory]) -> bool:
        """Return whether demonstrations succeed more often than their replies do in other tasks:
        what pays there depends on the task."""
        some = demos[: self.config.warmup.gate_tasks]
        chance = await self._success_in_other_tasks(some)
        return chance is not None and exceeds(summarize(some, self.config.eval.success), chance)

    async def _success_in_other_tasks(self, played: Sequence[Trajectory]) -> EvalResult | None:
        """Return the success of replies in other tasks than their own; None if
        that cannot be known."""

        def make_rollout(engine: ScriptedEngine) -> Rollout:
            return Rollout(
                engine,
                self.parts.renderer,
                RolloutSettings(
                    limits=self.config.limits,
                    seed=self.config.seed,
                    stop=self.config.rollout.stop,
                    history=self.history,
                    sanity="off",
                ),
                media=self.rollout.media_intake.store,
            )

        by_id = {choice.task.id: choice for choice in self.plan.train}
        for env_spec in self.env_specs:
            choices = self.plan.demonstrated(env_spec, self.config.warmup.demos)
            by_id |= {choice.task.id: choice for choice in choices}
        return await success_in_other_tasks(by_id, played, make_rollout, self.config.eval.success)

    async def _demonstrate(self) -> list[Trajectory]:
        """Play the demonstrations as the other episodes of a run; one that failed for good stays
        left out after a resume."""
        played: list[Trajectory] = []

        async def play(rollout: Rollout, episodes: Sequence[EpisodeSpec]) -> list[Trajectory]:
            episodes = [episode for episode in episodes if episode.key not in self.record.accepted]
            trajectories = await self._again(episodes, rollout.play(episodes), rollout.play)
            played.extend(trajectories)
            return trajectories

        demos = await demonstrations(
            self.env_specs,
            self.plan,
            self.parts.renderer,
            self.config,
            self.history,
            self.rollout.media_intake.store,
            self.watch.note,
            play,
        )
        self.record.accept(played)
        torch_settings.keep()
        return demos

    async def _check_gate(self, gate: Gate, step: int, loss: float) -> tuple[str, list[Trajectory]]:
        """Play some training tasks; return the unmet gate conditions, empty when the gate is met
        twice, and the last plays."""
        await self._sync(step)
        missing, trajectories = "", list[Trajectory]()
        for name in ("gate", "gate-again"):
            if missing:
                break
            episodes = self.config.warmup.gate_tasks
            tasks = self.plan.preview(episodes)
            samples = math.ceil(episodes / len(tasks))
            trajectories = await self._play_scored(
                tasks, name, step, samples, sampling_of(self.config.rollout)
            )
            result = summarize(trajectories, self.config.eval.success)
            missing = gate.unmet(result, loss)
            row = {"phase": "gate", "step": step, "loss": loss, "gate_passed": not missing} | dict(
                self.measured
            )
            row |= {"name": "again"} if name == "gate-again" else {}
            self.record.row(row | result.row() | self.record.failed_plays(name, step))
        return missing, trajectories

    # Reinforcement

    async def _reinforce(self) -> None:
        config = self.config
        steps = config.train.steps
        self.watch.phase("train", steps, "steps")
        first = int(self.cursor["step"])
        self.plan.begin(self.cursor.get("curriculum"), first)
        batches = self._batches(first)
        try:
            for step in range(first, steps):
                await batches.settle()
                if stop := self._early_stop(step):
                    self.stopped_by, why = stop
                    self.watch.note(f"early stopping after {step} steps: {why}")
                    if not (self.checkpoints.root / f"step-{step:05d}").exists():
                        self._save(f"step-{step:05d}", phase="reinforce", step=step)
                    break
                if config.eval.every and step and step % config.eval.every == 0:
                    await self._stream.gate.hold()
                    self._keep_best(step, await self._evaluate(f"step-{step}", step, greedy=False))
                    self._stream.gate.resume()
                    self.watch.phase("train", steps, "steps")
                await self._train_step(batches, step)
                if (step + 1) % config.checkpoint.every == 0 or step + 1 == steps:
                    await batches.settle()
                    self._save(f"step-{step + 1:05d}", phase="reinforce", step=step + 1)
        finally:
            await batches.close()

    def _early_stop(self, steps: int) -> tuple[str, str] | None:
        """Return the key that ends reinforcement after so many steps, and why, if one does."""
        goal, patience = self.config.train.stop_success, self.config.train.patience

        def last(n: int) -> list[tuple[float, float]]:
            return [
                self.record.steps.get(step, (0.0, math.nan))
                for step in range(steps - n + 1, steps + 1)
            ]

        if (
            goal is not None
            and steps >= STOP_STEPS
            and sum(success for success, _ in last(STOP_STEPS)) / STOP_STEPS >= goal
        ):
            return "train.stop_success", f"train.stop_success = {goal:g} is reached"
        if patience is not None and all(lr == 0 for _, lr in last(patience)):
            return "train.patience", (
                f"for {patience} steps (train.patience) gradients agreed by no more than chance, "
                "so the policy did not change; more or larger groups (rollout) show weaker signals"
            )
        return None

    def _batches(self, first: int) -> Batches:
        """Return the source of batches that `schedule.mode` names, from a step on."""
        schedule, rollout = self.config.schedule, self.config.rollout
        steps, plan, policies = self.config.train.steps, self.plan, self.policies
        progress = partial(self._with_progress, episodes=rollout.groups * rollout.group_size)
        if schedule.mode != "async":
            ahead_until = steps if schedule.mode == "one_step_off" else 0
            return StepBatches(
                plan, policies, self._play_accepted, progress, ahead_until=ahead_until
            )
        scheduler = BatchScheduler(
            groups_per_step(plan, steps),
            schedule.staleness,
            steps=steps,
            refill=policies.refill,
        )
        record = self.record.stream
        scheduler.restore(record.state(first))
        journal, gate = self.run.journal, self._stream.gate
        return StreamBatches(
            scheduler, plan, policies, self._play_groups, progress, gate, journal.append, record
        )

    async def _train_step(self, batches: Batches, step: int) -> None:
        """Send the step's policy to the engine, take a batch and train on it."""
        config, gate = self.config, self._stream.gate
        self._keep_past(step)
        if config.train.reference_every and step and step % config.train.reference_every == 0:
            self.policies.reference()
        version = self.cursor["warmed"] + step
        await self._send_weights(version)
        proof = asyncio.create_task(self._probe(version))
        if config.schedule.mode != "async":
            await proof
        self.watch.waiting("")
        gate.resume()
        began = time.monotonic()
        try:
            trajectories, refilled = await batches.next(step)
            await proof  # among the calls in flight, it waits for them to be prefilled again
        finally:
            proof.cancel()
        if config.schedule.mode == "async":
            self._accept(trajectories, f"step {step + 1}")
        rollout_s = time.monotonic() - began
        if config.schedule.mode == "async" and config.schedule.hold:
            gate.hold_new()
        await release_engine_memory(self.parts.engine, config)
        return_large_heap(self.parts.engine)
        self.watch.waiting("optimizer step")
        row = await self._train(trajectories, step, rollout_s) | {
            "tools_offered": self.rollout.tools_offered
        }
        return_large_heap(self.parts.engine)
        row |= {"groups_refilled": refilled} if self.policies.refill else {}
        row |= self.record.failed_plays("train", step) | self.plan.figures
        self.record.row(row)
        self.watch.progress(step + 1, row)
        self.rollout.drop_recorded(trajectories)

    async def _train(
        self, trajectories: Sequence[Trajectory], step: int, rollout_s: float
    ) -> dict[str, Any]:
        """Train on a step's episodes and return its metrics row; no tensor of the
        step stays referenced."""
        mode = self.config.schedule.mode
        version = None if mode == "sync" else self._version
        steps = planned_steps(self._train_steps, step)

        def work() -> tuple[dict[str, Any], Any, Any]:
            torch_settings.keep()
            return self.policies.step(trajectories, step=step, steps=steps, version=version)

        metrics, credits, batches = work() if mode == "sync" else await off_loop(work)
        for policy in self.policies:
            if summary := policy.trainer.layout.summary():
                self.watch.note(summary)
        self._report_codes(step, metrics)
        if step not in self.record.trained:
            self.run.journal.append({"e": "trained", "step": step, "episodes": len(trajectories)})
        row = {"phase": "train", "step": step + 1} | step_row(
            trajectories, metrics, rollout_s, self.config.eval.success
        )
        return row | write_token_records(self.run.path, step, credits, batches)

    def _report_codes(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report the first step whose update changed no code of the quantized weights."""
        if (
            self._codes_reported
            or metrics.get("codes_changed") != 0
            or not metrics["optimizer_steps"]
        ):
            return
        self._codes_reported = True
        self.watch.note(
            f"step {step + 1} changed no code of the quantized weights: its update is below their "
            "rounding step, and only their scales and other weights changed; if most steps do so "
            "(codes_changed in metrics.jsonl), raise train.lr"
        )

    async def _play_accepted(self, choices: Sequence[TaskChoice], step: int) -> list[Trajectory]:
        """Play the groups of a step, and continue with those that failed for good."""
        found = await self._play_groups(choices, step)
        self._accept(found, f"step {step + 1}")
        return found

    def _play_groups(self, choices: Sequence[TaskChoice], step: int) -> Awaitable[list[Trajectory]]:
        """Submit the groups of a nominal step now; the engine's policy may get newer
        while they are played."""
        size = self.plan.group_size(step, self.config.rollout.group_size)
        episodes = [
            episode for choice in choices for episode in choice.episodes("train", step, size)
        ]
        # Evaluations need no routes.
        extras = [ROUTES] if self.config.train.routing_replay == "replay" else []
        return self._play_with_retries(episodes, extras=extras, training=True)

    def _play_with_retries(
        self,
        episodes: Sequence[EpisodeSpec],
        *,
        extras: Sequence[str] = (),
        sampling: Sampling | None = None,
        blank: bool = False,
        training: bool = False,
    ) -> Awaitable[list[Trajectory]]:
        """Submit episodes now; retry those that the environment, the engine
        or a deadline failed."""
        given: dict[str, Any] = {
            "extras": extras,
            "min_version": self._version,
            "sampling": sampling,
            "blank": blank,
        }

        def play(these: Sequence[EpisodeSpec]) -> Awaitable[list[Trajectory]]:
            return self._stream.submit(these, training=training, **given)

        return self._again(episodes, play(episodes), play)

    def _again(
        self,
        episodes: Sequence[EpisodeSpec],
        playing: Awaitable[list[Trajectory]],
        play: Callable[[Sequence[EpisodeSpec]], Awaitable[list[Trajectory]]],
    ) -> Awaitable[list[Trajectory]]:
        return play_again(
            episodes,
            playing,
            play,
            max_retries=self.config.rollout.max_retries,
            accepted=self.record.accepted,
            on_failed_play=self.record.count_failed_play,
        )

    def _accept(self, found: Sequence[Trajectory], where: str) -> None:
        """Continue with episodes of which some failed; their failures are final from here on."""
        check_failures(found, where, self.run.given_path, self.config.rollout.max_failed)
        self.record.accept(found)

    async def _sync(self, version: int) -> None:
        """Send the trainer's weights to the engine; raise `SyncError` unless its fingerprint and
        its samples show them."""
        await self._send_weights(version)
        await self._probe(version)
        self.watch.waiting("")

    async def _send_weights(self, version: int) -> None:
        self.watch.waiting("weight update")
        torch_settings.keep()
        for policy in self.policies:
            await policy.send(version)
        self._version = version

    async def _probe(self, version: int) -> None:
        for policy in self.policies:
            probe = policy.trainer.take_probe()
            if probe is not None and policy.trainer.config.max_mismatch is None:
                await probe.ask(
                    policy.engine, version, policy.trainer.banned_ids, self.config.limits.generate_s
                )

    # Evaluation

    async def _evaluate(
        self, name: str, step: int, *, greedy: bool = True
    ) -> dict[str, EvalResult]:
        config = self.config.eval
        self._keep_past(step)
        if not self.plan.held_out:
            self.watch.note("no held-out tasks; skipping evaluation")
            return {}
        await self._sync(self.cursor["warmed"] + step)
        scores: dict[str, EvalResult] = {}
        samples = eval_samples(len(self.plan.held_out), config.tasks, config.samples)
        modes = {"sampled": (samples, sampling_of(config))}
        modes |= {"greedy": (1, Sampling(temperature=0.0))} if greedy and config.greedy else {}
        if name == "after":
            modes["blind"] = modes["sampled"]
        self.watch.phase(f"evaluate {name}", len(modes) - ("blind" in modes), "passes")
        for number, (mode, (samples, sampling)) in enumerate(modes.items(), 1):
            if mode == "blind" and not scores["sampled"].images:
                continue
            phase, blind = f"eval-{name}-{mode}", mode == "blind"
            if blind:  # known only now: a pass over the others would be "3/2"
                self.watch.phase("evaluate blind", 1, "passes")
            trajectories = await self._play_scored(
                self.plan.held_out, phase, step, samples, sampling, blind
            )
            found = scores[mode] = summarize(trajectories, self.config.eval.success)
            row = {"phase": "eval", "name": name, "mode": mode, "step": step} | dict(self.measured)
            self.record.row(row | found.row() | self.record.failed_plays(phase, step))
            counted = found if blind else scores["sampled"]  # as the summary does
            figures = {"success": counted.success, "turns": counted.turns, "stops": counted.stops}
            if mode == "greedy":
                figures["greedy"] = found.success
            self.watch.progress(1 if blind else number, figures)
        return scores

    async def _play_scored(
        self,
        choices: Sequence[TaskChoice],
        phase: str,
        step: int,
        samples: int,
        sampling: Sampling,
        blind: bool = False,
    ) -> list[Trajectory]:
        """Play tasks for an evaluation, and keep what was measured of them."""
        work = play_evaluation(
            self.rollout,
            choices,
            name=phase,
            step=step,
            samples=samples,
            sampling=sampling,
            blind=blind,
            play=self._play_with_retries,
        )
        trajectories: list[Trajectory] = await self._with_progress(work, len(choices) * samples)
        self._accept(trajectories, f"the {phase} episodes")
        self.measured = rollout_metrics(trajectories, success=self.config.eval.success)
        self._note_unseen_images()
        return trajectories

    def _note_unseen_images(self) -> None:
        """Note once that the model reads the alternative texts of images,
        where it has no vision."""
        if self.rollout.media_intake.store.has_unseen and not self._unseen_noted:
            self._unseen_noted = True
            how = (
                "set model.vision = true"
                if self.config.model.path is None
                else "take a model with vision"
            )
            self.watch.note(
                "warning: the environment shows images, and the model has no vision: it reads "
                f"their alt texts; {how} to train one that sees them"
            )

    async def _with_progress(self, work: Any, episodes: int) -> Any:
        """Await episodes while reporting what they wait for."""
        task = asyncio.ensure_future(work)
        start = self.rollout.finished
        try:
            while not (await asyncio.wait({task}, timeout=1.0))[0]:
                self.watch.waiting(
                    f"{self.rollout.finished - start}/{episodes} episodes; {self._pending()}"
                )
        finally:
            if not task.done():
                # interrupted: no episode may continue while the engine is being closed.
                task.cancel()
                await asyncio.wait({task})
        self.watch.waiting("")
        torch_settings.keep()
        return task.result()

    def _pending(self) -> str:
        running = self.rollout.pending()
        pending = ", ".join(
            f"{count} in {name}" for name, count in Counter(row[2] for row in running).most_common()
        )
        if running:
            session, turn, name, seconds, _ = running[0]
            pending += f"; longest: {session} turn {turn + 1}, {seconds:.0f} s in {name}"
        return pending
