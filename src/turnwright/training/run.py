"""A run of training, from recipe to summary, resumable after a kill.

`TrainingRun.play` has the phases in their order. `_warm_up` imitates demonstrations until a gate is
met, `_evaluate` plays the held-out tasks before and after, and `_reinforce` is the loop of steps:
`_train_step` sends the weights to the engine, takes a batch of episodes and trains on it.

What a run is made of is loaded elsewhere (`components.build_components`), and so is what a step
computes (`Trainer.step`). Where batches come from, played before their step or all the time, is in
`batches.py`; which tasks are played, in `task_plan.py`; what was recorded, in `run_record.py`. A
run's directory, its trackers and its report are the business of `turnwright.runs`.

The last checkpoint holds weights and optimizer state; the journal holds every finished episode. A
resumed run repeats the steps since the checkpoint on the journal's episodes. A sampled id depends
on names (run, step, task, sample, turn, position), not on order, so interrupted episodes come out
the same.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
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
from turnwright.training.run_record import RunRecord, log_failures
from turnwright.training.setup import model_directory, release_engine_memory
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
        self.config = config
        self.env_specs = list(env_specs)
        self.run = run
        self.watch = watch
        self.history = parse_history(config.rollout.history if history is None else history)
        began = began or (time.time(), time.process_time())
        watch.phase("set up", 0, "")

        # What is played: for how many steps, earlier ends included, and with which tasks.
        self._train_steps = (*extended.get("train.steps", ()), config.train.steps)
        warmup_steps = (*extended.get("warmup.steps", ()), config.warmup.steps)
        self._round_ends = round_ends(warmup_steps, config.warmup.rounds)
        self.plan = TaskPlan(
            env_specs,
            steps=self._train_steps,
            groups=config.rollout.groups,
            held_out=config.eval.tasks,
            seed=config.seed,
            overlap=config.eval.overlap == "allowed",
            curriculum=Curriculum.of(config, env_specs),
        )

        # Where the run stands: at its last checkpoint, or at the start.
        source = model_directory(config, env_specs, run.path)
        self.checkpoints = Checkpoints(run.checkpoints, source, keep=config.checkpoint.keep)
        latest = self.checkpoints.newest()
        self.cursor: dict[str, Any] = {"phase": "warmup", "step": 0, "warmed": 0}
        if latest is not None:
            self.cursor = dict(latest.cursor)

        # Models, engines and trainers, with the weights of that checkpoint.
        self.parts = build_components(
            config,
            source,
            run.path,
            None if latest is None else latest.path,
            ranks,
            on_note=watch.note,
            placer=placer,
        )
        self.policies = self.parts.policies
        """Policies that are trained."""
        self.policies.restore(self.cursor)
        self.policies.check_agents(env_specs)

        # A template of the user's own is written into checkpoints; the model's is there anyway.
        has_own_template = config.model.template is not None or bool(config.model.template_args)
        self._template = self.parts.renderer.template.source if has_own_template else None
        check_run_template(run, self.parts.renderer, resumed=resumed)

        self._codes_reported = False
        self._unseen_noted = False
        self._version = 0
        """Policy version of the last weight update."""
        self.stopped_by = ""
        """Key that ended reinforcement early."""
        self.measured: Mapping[str, Any] = {}
        """Turn-level metrics of the last evaluation or gate evaluation."""

        # What the journal holds: finished episodes, and turns of interrupted ones.
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
        self._report_start()
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

        summary = self._summary(steps, before, after, rolled_back)
        rows = read_json_lines(self.run.path / "metrics.jsonl")
        reason = no_signal_reason([row for row in rows if row.get("phase") == "train"])
        if reason:
            self.watch.note(reason)
        self.run.write_json("summary.json", summary)
        self.run.sync()
        return summary

    def _report_start(self) -> None:
        """Note what the recipe makes of policies and tasks, and how much memory a step needs."""
        for note in self.policies.notes:
            self.watch.note(note)
        for note in self.plan.notes(self.config):
            self.watch.note(note)

        rollout = self.config.rollout
        for policy in self.policies:
            report_memory(
                policy.trainer,
                self.config.limits,
                policy.engine,
                self.watch.note,
                sequences=rollout.groups * rollout.group_size,
                concurrency=rollout.concurrency,
            )

    def _summary(
        self,
        steps: int,
        before: Mapping[str, EvalResult],
        after: Mapping[str, EvalResult],
        rolled_back: str,
    ) -> dict[str, Any]:
        """Return the content of summary.json."""
        wall_s, cpu_s = self.record.times()
        figures: dict[str, Any] = {
            "rl_steps": steps,
            "warmup_steps": self.cursor["warmed"],
            "best": self.checkpoints.best(),
            "wall_s": wall_s,
            "cpu_s": cpu_s,
        }

        # Keys of what did not happen are left out.
        rare = {
            "rolled_back": rolled_back,
            "stopped_by": self.stopped_by,
            "failed_plays": self.record.all_failed_plays,
            "resumed_turns": self.record.resumed_turns + self.rollout.resumed_turns,
        }
        figures |= {key: value for key, value in rare.items() if value}

        success = success_figures(before, after, self.env_specs)
        return summary_of(self.config, success, self.record.resumes, figures)

    async def _apply_prompt_limit(self) -> None:
        """Leave out tasks whose first prompt is longer than `limits.prompt_tokens`."""
        choices = [*self.plan.train, *self.plan.held_out]
        check_row_arguments((choice.task for choice in choices), self.parts.renderer)
        limit = self.config.limits.prompt_tokens
        if limit is None:
            return

        # A media store of its own would separate the engine from the images of the run.
        rollout = Rollout(
            self.parts.engine,
            self.parts.renderer,
            RolloutSettings(limits=self.config.limits, seed=self.config.seed),
            media=self.rollout.media_intake.store,
        )
        episodes = [choice.episodes("prompt", 0, 1)[0] for choice in choices]
        fitting, too_long = await rollout.within_prompt_limit(episodes)

        self.plan.restrict_to(fitting)
        self.run.write_json("left_out.json", left_out(limit, too_long))
        if too_long:
            self.watch.note(left_out_note(limit, too_long, listed=True))

    # Checkpoints

    def _save(self, name: str, **cursor: Any) -> None:
        """Write a checkpoint at a place of the run, which `cursor` updates."""
        self.cursor |= cursor
        self.watch.waiting("checkpoint")
        torch_settings.keep()
        # After a power cut, no checkpoint may outlive the episodes before it.
        self.run.sync()

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
        if step < self.cursor["step"]:
            return  # a resumed run has them
        for past in self.parts.past:
            past.save(step, self._template)

    def _keep_best(self, step: int, scores: Mapping[str, EvalResult]) -> None:
        """Keep the checkpoint of an evaluated policy if none scored higher; of equals, the
        later."""
        if not self.config.checkpoint.keep_best or "sampled" not in scores:
            return
        if step == 0 and not self.cursor["warmed"]:
            return  # the model as it was given, of which there is no checkpoint
        success = scores["sampled"].success
        best = self.checkpoints.best()
        if success is None or (best is not None and success < best[1]):
            return

        name = f"step-{step:05d}" if step else "warmed"
        if step and not (self.checkpoints.root / name).exists():
            self._save(name, phase="reinforce", step=step)
        self.checkpoints.mark_best(name, success)

    def _roll_back(self, after: Mapping[str, EvalResult]) -> str:
        """Make the best checkpoint the policy of the run where the last one is worse by more than
        chance; return its name."""
        best = self.checkpoints.best()
        last = after.get("sampled")
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
        """Imitate demonstrations until the gate is met, or until the loss falls no more."""
        warmup = self.config.warmup
        step = int(self.cursor["step"])
        if warmup.demos == 0 and warmup.dataset is None:
            self.cursor |= {"phase": "reinforce", "step": 0}
            self.policies.reference()
            return

        self.watch.phase("warm-up", planned_steps(self._round_ends, step), "steps")
        demos = await self._demonstrate()
        self._note_unseen_images()
        gate = self._gate_of(demos)

        # The first row of metrics has the failed plays of demonstrations, which precede it.
        failed_plays = self.record.failed_plays("demonstrate", 0)
        rewards = [demo.reward for demo in demos if demo.reward is not None]
        demo_reward = sum(rewards) / len(rewards) if rewards else None

        missing = "the gate was not evaluated yet"
        played: list[Trajectory] = []
        round_losses: list[float] = list(self.cursor.get("losses", ()))
        await release_engine_memory(self.parts.engine, self.config)

        while step < self._round_ends[-1]:
            round_end = planned_steps(self._round_ends, step)
            figures = self.policies.supervised(
                sample_demos(demos, self.config, step),
                lr=learning_rate(warmup.lr, step, round_end),
            )
            round_losses.append(figures["loss"])
            step += 1

            row = {"phase": "warmup", "step": step, "demo_reward": demo_reward}
            self.record.row(row | figures | failed_plays)
            failed_plays = {}
            self.watch.progress(step, figures)
            if step % HEAP_STEPS == 0:
                return_large_heap(self.parts.engine)
            if step % warmup.gate_every and step != round_end:
                continue

            # What training freed goes back before the engine samples, and what the engine holds
            # before training goes on.
            return_large_heap(self.parts.engine)
            recent = round_losses[-RECENT:]
            missing, played = await self._check_gate(gate, step, sum(recent) / len(recent))
            await release_engine_memory(self.parts.engine, self.config)
            return_large_heap(self.parts.engine)
            if not missing:
                break

            if step == round_end:
                # A user who asked for more steps than this round has gets them whatever the loss
                # does.
                asked_for_more = step < warmup.steps
                if not asked_for_more and not self._another_round(step, round_losses, played):
                    break
                self.watch.note(
                    f"after {step} steps {missing}, but the loss still falls: the warm-up goes on"
                )
                self.watch.phase("warm-up", planned_steps(self._round_ends, step), "steps")
                round_losses = []
            self._save("warmup", phase="warmup", step=step, losses=round_losses)

        if missing:
            await self._judge_missed_gate(gate, missing, demos, played, step)

        # Reinforcement starts with fresh moments: those of cross entropy have another scale.
        self.policies.reset_optimizer()
        self.policies.reference()
        self._save("warmed", phase="reinforce", step=0, warmed=step, losses=[])

    def _gate_of(self, demos: Sequence[Trajectory]) -> Gate:
        """Return the goal of the warm-up, and note what demonstrations allow and what they lose."""
        gate = Gate.of(self.config, demos)
        if gate.demo_success is not None:
            self.watch.note(
                f"{gate.demo_success:.0%} of {len(demos)} demonstrations succeed; the warm-up's "
                f"goal is {gate.success:.0%}"
            )
        cut = cut_note(self.config, demos)
        if cut:
            self.watch.note(cut)
        return gate

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
        run = self.run.given_path
        warmup = self.config.warmup
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

        # Replies that pay as often in any other task do not depend on what their task shows. Some
        # worlds are like that; demonstrations tell whether this is one.
        chance = await self._success_in_other_tasks(played)
        by_luck = chance is not None and not exceeds(result, chance)
        if chance is not None and by_luck and await self._demonstrations_read(demos):
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
        some_demos = demos[: self.config.warmup.gate_tasks]
        chance = await self._success_in_other_tasks(some_demos)
        if chance is None:
            return False
        return exceeds(summarize(some_demos, self.config.eval.success), chance)

    async def _success_in_other_tasks(self, played: Sequence[Trajectory]) -> EvalResult | None:
        """Return the success of replies in other tasks than their own; None if that cannot be
        known."""

        def replaying(engine: ScriptedEngine) -> Rollout:
            settings = RolloutSettings(
                limits=self.config.limits,
                seed=self.config.seed,
                stop=self.config.rollout.stop,
                history=self.history,
                sanity="off",
            )
            media = self.rollout.media_intake.store
            return Rollout(engine, self.parts.renderer, settings, media=media)

        by_id = {choice.task.id: choice for choice in self.plan.train}
        for env_spec in self.env_specs:
            choices = self.plan.demonstrated(env_spec, self.config.warmup.demos)
            by_id |= {choice.task.id: choice for choice in choices}
        return await success_in_other_tasks(by_id, played, replaying, self.config.eval.success)

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
        episodes = self.config.warmup.gate_tasks
        tasks = self.plan.preview(episodes)
        samples = math.ceil(episodes / len(tasks))
        sampling = sampling_of(self.config.rollout)

        for name in ("gate", "gate-again"):
            trajectories = await self._play_scored(tasks, name, step, samples, sampling)
            result = summarize(trajectories, self.config.eval.success)
            missing = gate.unmet(result, loss)

            row = {"phase": "gate", "step": step, "loss": loss, "gate_passed": not missing}
            row |= self.measured
            if name == "gate-again":
                row["name"] = "again"
            self.record.row(row | result.row() | self.record.failed_plays(name, step))
            if missing:
                break
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
                stop = self._early_stop(step)
                if stop is not None:
                    self.stopped_by, why = stop
                    self.watch.note(f"early stopping after {step} steps: {why}")
                    if not (self.checkpoints.root / f"step-{step:05d}").exists():
                        self._save(f"step-{step:05d}", phase="reinforce", step=step)
                    break

                if config.eval.every and step and step % config.eval.every == 0:
                    await self._stream.gate.hold()
                    scores = await self._evaluate(f"step-{step}", step, greedy=False)
                    self._keep_best(step, scores)
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
        goal = self.config.train.stop_success
        patience = self.config.train.patience

        def last(count: int) -> list[tuple[float, float]]:
            numbers = range(steps - count + 1, steps + 1)
            return [self.record.steps.get(number, (0.0, math.nan)) for number in numbers]

        if goal is not None and steps >= STOP_STEPS:
            successes = [success for success, _ in last(STOP_STEPS)]
            if sum(successes) / STOP_STEPS >= goal:
                return "train.stop_success", f"train.stop_success = {goal:g} is reached"

        # Without agreement among the gradients the learning rate of a step is 0.
        if patience is not None and all(lr == 0 for _, lr in last(patience)):
            return "train.patience", (
                f"for {patience} steps (train.patience) gradients agreed by no more than chance, "
                "so the policy did not change; more or larger groups (rollout) show weaker signals"
            )
        return None

    def _batches(self, first: int) -> Batches:
        """Return the source of batches that `schedule.mode` names, from a step on."""
        schedule = self.config.schedule
        rollout = self.config.rollout
        steps = self.config.train.steps
        progress = partial(self._with_progress, episodes=rollout.groups * rollout.group_size)

        if schedule.mode != "async":
            return StepBatches(
                self.plan,
                self.policies,
                self._play_accepted,
                progress,
                ahead_until=steps if schedule.mode == "one_step_off" else 0,
            )

        scheduler = BatchScheduler(
            groups_per_step(self.plan, steps),
            schedule.staleness,
            steps=steps,
            refill=self.policies.refill,
        )
        recorded = self.record.stream
        scheduler.restore(recorded.state(first))
        return StreamBatches(
            scheduler,
            self.plan,
            self.policies,
            self._play_groups,
            progress,
            self._stream.gate,
            self.run.journal.append,
            recorded,
        )

    async def _train_step(self, batches: Batches, step: int) -> None:
        """Send the step's policy to the engine, take a batch and train on it."""
        schedule = self.config.schedule
        reference_every = self.config.train.reference_every
        is_async = schedule.mode == "async"
        gate = self._stream.gate

        self._keep_past(step)
        if reference_every and step and step % reference_every == 0:
            self.policies.reference()

        # The engine gets the weights, and proves that it samples from them.
        version = self.cursor["warmed"] + step
        await self._send_weights(version)
        proof = asyncio.create_task(self._probe(version))
        if not is_async:
            await proof
        self.watch.waiting("")
        gate.resume()

        began = time.monotonic()
        try:
            trajectories, refilled = await batches.next(step)
            # Among the calls in flight, the proof waits for them to be prefilled again.
            await proof
        finally:
            proof.cancel()
        if is_async:
            self._accept(trajectories, f"step {step + 1}")
        rollout_s = time.monotonic() - began

        if is_async and schedule.hold:
            gate.hold_new()
        await release_engine_memory(self.parts.engine, self.config)
        return_large_heap(self.parts.engine)
        self.watch.waiting("optimizer step")
        row = await self._train(trajectories, step, rollout_s)
        row["tools_offered"] = self.rollout.tools_offered
        return_large_heap(self.parts.engine)

        if self.policies.refill:
            row["groups_refilled"] = refilled
        row |= self.record.failed_plays("train", step) | self.plan.figures
        self.record.row(row)
        self.watch.progress(step + 1, row)
        self.rollout.drop_recorded(trajectories)

    async def _train(
        self, trajectories: Sequence[Trajectory], step: int, rollout_s: float
    ) -> dict[str, Any]:
        """Train on a step's episodes and return its metrics row; no tensor of the step stays
        referenced."""
        mode = self.config.schedule.mode
        version = None if mode == "sync" else self._version
        steps = planned_steps(self._train_steps, step)

        def work() -> tuple[dict[str, Any], Any, Any]:
            torch_settings.keep()
            return self.policies.step(trajectories, step=step, steps=steps, version=version)

        metrics, credits, batches = work() if mode == "sync" else await off_loop(work)

        for policy in self.policies:
            layout = policy.trainer.layout.summary()
            if layout:
                self.watch.note(layout)
        self._report_codes(step, metrics)
        if step not in self.record.trained:
            self.run.journal.append({"e": "trained", "step": step, "episodes": len(trajectories)})

        row = {"phase": "train", "step": step + 1}
        row |= step_row(trajectories, metrics, rollout_s, self.config.eval.success)
        return row | write_token_records(self.run.path, step, credits, batches)

    def _report_codes(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report the first step whose update changed no code of the quantized weights."""
        if self._codes_reported or metrics.get("codes_changed") != 0:
            return
        if not metrics["optimizer_steps"]:
            return

        self._codes_reported = True
        self.watch.note(
            f"step {step + 1} changed no code of the quantized weights: its update is below their "
            "rounding step, and only their scales and other weights changed; if most steps do so "
            "(codes_changed in metrics.jsonl), raise train.lr"
        )

    # Episodes

    async def _play_accepted(self, choices: Sequence[TaskChoice], step: int) -> list[Trajectory]:
        """Play the groups of a step, and continue with those that failed for good."""
        trajectories = await self._play_groups(choices, step)
        self._accept(trajectories, f"step {step + 1}")
        return trajectories

    def _play_groups(self, choices: Sequence[TaskChoice], step: int) -> Awaitable[list[Trajectory]]:
        """Submit the groups of a nominal step now; the engine's policy may get newer while they are
        played."""
        size = self.plan.group_size(step, self.config.rollout.group_size)
        episodes: list[EpisodeSpec] = []
        for choice in choices:
            episodes += choice.episodes("train", step, size)

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
        """Submit episodes now; retry those that the environment, the engine or a deadline
        failed."""
        # Retries, too, take any policy from the one of now on.
        min_version = self._version

        def play(some: Sequence[EpisodeSpec]) -> Awaitable[list[Trajectory]]:
            return self._stream.submit(
                some,
                training=training,
                extras=extras,
                min_version=min_version,
                sampling=sampling,
                blank=blank,
            )

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

    def _accept(self, trajectories: Sequence[Trajectory], where: str) -> None:
        """Continue with episodes of which some failed; their failures are final from here on."""
        check_failures(trajectories, where, self.run.given_path, self.config.rollout.max_failed)
        log_failures(trajectories, where)
        self.record.accept(trajectories)

    # Weights

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
        """Play the held-out tasks with the policy of a step; return the scores by mode."""
        config = self.config.eval
        self._keep_past(step)
        if not self.plan.held_out:
            self.watch.note("no held-out tasks; skipping evaluation")
            return {}
        await self._sync(self.cursor["warmed"] + step)

        samples = eval_samples(len(self.plan.held_out), config.tasks, config.samples)
        sampled = _EvalPass("sampled", samples, sampling_of(config))
        passes = [sampled]
        if greedy and config.greedy:
            passes.append(_EvalPass("greedy", 1, Sampling(temperature=0.0)))
        self.watch.phase(f"evaluate {name}", len(passes), "passes")

        scores: dict[str, EvalResult] = {}
        for number, eval_pass in enumerate(passes, 1):
            result = await self._evaluate_pass(name, step, eval_pass)
            scores[eval_pass.mode] = result

            # The figures are those of the sampled pass, as in the summary.
            figures = _progress_figures(scores["sampled"])
            if eval_pass.mode == "greedy":
                figures["greedy"] = result.success
            self.watch.progress(number, figures)

        # Whether the tasks show images, and a blind pass is worth its time, is known only now. It
        # is a phase of its own: as a pass after the others it would be "3/2".
        if name == "after" and scores["sampled"].images:
            self.watch.phase("evaluate blind", 1, "passes")
            blind = _EvalPass("blind", sampled.samples, sampled.sampling)
            scores["blind"] = await self._evaluate_pass(name, step, blind)
            self.watch.progress(1, _progress_figures(scores["blind"]))
        return scores

    async def _evaluate_pass(self, name: str, step: int, eval_pass: _EvalPass) -> EvalResult:
        """Play the held-out tasks once, and write the row of metrics."""
        mode = eval_pass.mode
        phase = f"eval-{name}-{mode}"
        trajectories = await self._play_scored(
            self.plan.held_out,
            phase,
            step,
            eval_pass.samples,
            eval_pass.sampling,
            blind=mode == "blind",
        )

        result = summarize(trajectories, self.config.eval.success)
        row = {"phase": "eval", "name": name, "mode": mode, "step": step} | dict(self.measured)
        self.record.row(row | result.row() | self.record.failed_plays(phase, step))
        return result

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
        playing = play_evaluation(
            self.rollout,
            choices,
            name=phase,
            step=step,
            samples=samples,
            sampling=sampling,
            blind=blind,
            play=self._play_with_retries,
        )
        trajectories: list[Trajectory]
        trajectories = await self._with_progress(playing, len(choices) * samples)
        self._accept(trajectories, f"the {phase} episodes")
        self.measured = rollout_metrics(trajectories, success=self.config.eval.success)
        self._note_unseen_images()
        return trajectories

    def _note_unseen_images(self) -> None:
        """Note once that the model reads the alternative texts of images, where it has no
        vision."""
        if self._unseen_noted or not self.rollout.media_intake.store.has_unseen:
            return

        self._unseen_noted = True
        if self.config.model.path is None:
            remedy = "set model.vision = true"
        else:
            remedy = "take a model with vision"
        self.watch.note(
            "warning: the environment shows images, and the model has no vision: it reads "
            f"their alt texts; {remedy} to train one that sees them"
        )

    async def _with_progress(self, work: Any, episodes: int) -> Any:
        """Await episodes while reporting what they wait for."""
        task = asyncio.ensure_future(work)
        start = self.rollout.finished
        try:
            while not (await asyncio.wait({task}, timeout=1.0))[0]:
                finished = self.rollout.finished - start
                self.watch.waiting(f"{finished}/{episodes} episodes; {self._pending()}")
        finally:
            if not task.done():
                # Interrupted: no episode may continue while the engine is being closed.
                task.cancel()
                await asyncio.wait({task})
        self.watch.waiting("")
        torch_settings.keep()
        return task.result()

    def _pending(self) -> str:
        """Return what the running episodes wait for, and which waits longest."""
        running = self.rollout.pending()
        waits = Counter(episode.phase for episode in running)
        pending = ", ".join(f"{count} in {name}" for name, count in waits.most_common())
        if running:
            longest = running[0]
            where = f"{longest.label} turn {longest.turn + 1}"
            pending += f"; longest: {where}, {longest.seconds:.0f} s in {longest.phase}"
        return pending


@dataclass(frozen=True, slots=True)
class _EvalPass:
    """One pass of an evaluation over the held-out tasks."""

    mode: str
    """`sampled`, `greedy`, or `blind`: sampled, without the images."""
    samples: int
    """Episodes of each task."""
    sampling: Sampling


def _progress_figures(result: EvalResult) -> dict[str, Any]:
    return {"success": result.success, "turns": result.turns, "stops": result.stops}
