"""A run of training, from settings to its report: started, resumed or extended in its directory.

`run_training` is what `turnwright train` and `turnwright.train` call; `_train` has the steps in
order. The training itself is in `TrainingRun.play` of `training/run.py`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from turnwright import files, plugins
from turnwright.config import ResolvedConfig, RunConfig
from turnwright.config.dump import load_run_config, to_json_dict
from turnwright.config.launch import world_size
from turnwright.display.reports import reports_of
from turnwright.display.run_log import LoggingListener, LogLevel, failure_row, log, logged
from turnwright.errors import ConfigError, TurnwrightError, UsageError
from turnwright.records import NullListener, ProgressListener, RunDir
from turnwright.records.run_dir import FAILURE_FILE, LOG_FILE
from turnwright.rollouts.standalone import run_sync

if TYPE_CHECKING:
    from turnwright.envs.spec import EnvSpec
    from turnwright.renderers.history import History
    from turnwright.rollouts.stream import GroupPlayer
    from turnwright.training.distributed import ProcessRanks
    from turnwright.training.run import TrainingRun


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """What the caller gives a run, beside its settings."""

    watch: ProgressListener
    history: History | None
    """Replaces the one in the settings."""
    began: tuple[float, float]
    """Wall-clock and CPU time from which the run's times count."""
    ranks: ProcessRanks | None
    """Under torchrun, the processes that train together."""
    resumed: bool
    log_level: LogLevel
    """Least level of what is written to the run's log."""


def run_training(
    resolved: ResolvedConfig,
    *,
    resume: Path | None = None,
    watch: ProgressListener | None = None,
    env_specs: Sequence[EnvSpec] | None = None,
    history: History | None = None,
    began: tuple[float, float] | None = None,
    log_level: LogLevel = "info",
) -> Path:
    """Train as configured, or resume a run, and return its directory.

    Under torchrun, all its processes call this and train together.

    Args:
        resolved: the settings; of a resumed run, its own.
        resume: the directory of the run to resume.
        watch: receives progress.
        env_specs: environments that replace those in the settings.
        history: a history policy that replaces the one in the settings.
        began: `time.time()` and `time.process_time()` from which the run's times count; None is
            now.
        log_level: least level of what is written to RUN/log.txt; `off` writes none.
    """
    began = began or (time.time(), time.process_time())  # includes importing torch
    path = Path(resume) if resume is not None else Path(resolved.config.out)
    ranks = None
    if world_size() > 1:
        from turnwright.training.distributed import ProcessRanks
        from turnwright.training.setup import run_worker_rank

        ranks = ProcessRanks()
        if ranks.rank:
            run_worker_rank(ranks, path)
            return path

    from turnwright.display.diagnosis import DiagnosingListener

    listener = DiagnosingListener(LoggingListener(watch or NullListener()))
    given = _Given(
        watch=listener,
        history=history,
        began=began,
        ranks=ranks,
        resumed=resume is not None,
        log_level=log_level,
    )
    try:
        _train(path, resolved, env_specs, given)
    finally:
        if ranks is not None:
            ranks.stop_workers()
    return path


def _train(
    path: Path,
    resolved: ResolvedConfig,
    env_specs: Sequence[EnvSpec] | None,
    given: _Given,
) -> None:
    """Train in a run directory, which is locked meanwhile."""
    _check_start(path, resolved.config, resumed=given.resumed)

    # After the check, since these import torch.
    from turnwright.training.metrics import versions
    from turnwright.training.shared_process import SharedProcess
    from turnwright.training.task_plan import make_env_specs, with_steps_of_epochs
    from turnwright.training.warmup import cannot_learn

    specs = list(env_specs) if env_specs is not None else make_env_specs(resolved.config)
    if not given.resumed and resolved.config.train.data_epochs is not None:
        resolved = replace(resolved, config=with_steps_of_epochs(resolved.config, specs))

    with (
        _resumable(path),
        RunDir(path) as run,
        logged(run.path, given.log_level),
        _failure_kept(run),
    ):
        log.info("%s in %s", "resumed" if given.resumed else "started", run.path)
        for why in cannot_learn(resolved.config, specs):
            given.watch.note(f"warning: {why}")
        is_extended = given.resumed and _is_extended(resolved, path)
        if not given.resumed:
            # A model may be left by a run that was stopped before its first step.
            shutil.rmtree(path / "model", ignore_errors=True)
            run.write_json("config.json", to_json_dict(resolved) | {"versions": versions()})

        with SharedProcess(specs, run, given.watch, resolved.config.model.threads).shared():
            training_run = _load(run, resolved, specs, given)
            if is_extended:
                _record_extension(training_run, resolved)
            else:
                note = _finished(training_run)
                if note:
                    run_sync(training_run.parts.engine.close())
                    given.watch.note(note)
                    return
            _play(training_run, given.watch)
        log.info("finished")


@contextmanager
def _failure_kept(run: RunDir) -> Iterator[None]:
    """Log how the body ends, and keep in `failure.json` why it failed, until it is resumed.

    A run that is interrupted or killed has not failed: it goes on where it is resumed.
    """
    (run.path / FAILURE_FILE).unlink(missing_ok=True)
    try:
        yield
    except KeyboardInterrupt:
        log.warning("interrupted")
        raise
    except Exception as error:
        is_begun = (run.path / "config.json").exists()  # else its files are removed
        if is_begun:
            log.exception("failed")
            with suppress(TurnwrightError):  # a full disk, of which the error itself speaks
                run.write_json(FAILURE_FILE, failure_row(error, time.time()))
        raise


def _check_start(path: Path, config: RunConfig, *, resumed: bool) -> None:
    """Raise `ConfigError` for a missing tracker, and for a directory that holds a run already."""
    for tracker in config.track.to:
        if ":" not in tracker:
            plugins.load("trackers", tracker)  # else its process would fail, beside the run

    journal = path / "journal.jsonl"
    holds_run = (path / "config.json").exists() or (journal.exists() and journal.stat().st_size > 0)
    if not resumed and holds_run:
        remedy = f"resume it with --resume {path} or choose another --out"
        raise ConfigError(f"{path} already contains a run; {remedy}")


@contextmanager
def _resumable(path: Path) -> Iterator[None]:
    """Name the command that resumes a run which is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"resume with: turnwright train --resume {path}") from None


def _load(
    run: RunDir,
    resolved: ResolvedConfig,
    specs: Sequence[EnvSpec],
    given: _Given,
) -> TrainingRun:
    """Load models, engines and the state of a run; a mistake in a new one's settings leaves no
    files."""
    from turnwright.training.run import TrainingRun
    from turnwright.training.servers import ray_placer

    try:
        return TrainingRun(
            resolved.config,
            specs,
            run,
            given.watch,
            resumed=given.resumed,
            began=given.began,
            history=given.history,
            ranks=given.ranks,
            extended=resolved.extended,
            workers=_workers(resolved, specs, run, given),
            placer=ray_placer(resolved.config, given.watch.note),
        )
    except UsageError:
        if not given.resumed:  # so that the corrected command can be rerun
            _remove_files(run)
        raise


def _remove_files(run: RunDir) -> None:
    """Remove what a run that has not begun wrote, and its directory if nothing else is in it."""
    shutil.rmtree(run.path / "model", ignore_errors=True)
    for name in (
        "config.json",
        "journal.jsonl",
        "trajectories.jsonl",
        "metrics.jsonl",
        LOG_FILE,
        ".lock",
    ):
        (run.path / name).unlink(missing_ok=True)
    with suppress(OSError):
        run.path.rmdir()


def _workers(
    resolved: ResolvedConfig,
    specs: Sequence[EnvSpec],
    run: RunDir,
    given: _Given,
) -> Callable[[Path], GroupPlayer] | None:
    """Return what makes the pool of workers that `[scale]` asks for, or None without one."""
    scale = resolved.config.scale
    if scale.listen is None and scale.ray is None:
        return None

    try:
        pool = plugins.load("transports", "workers")
    except ImportError as error:
        missing = f"[scale] needs starlette and uvicorn ({error.name} is missing)"
        raise ConfigError(f"{missing}: pip install 'turnwright[serve]'") from None
    recipe = None if resolved.recipe is None else resolved.recipe.parent.resolve()

    def make(source: Path) -> GroupPlayer:
        workers: GroupPlayer = pool(
            resolved.config,
            specs,
            run,
            source,
            recipe=recipe,
            note=given.watch.note,
            resumed=given.resumed,
        )
        return workers

    return make


def _play(training_run: TrainingRun, watch: ProgressListener) -> None:
    """Train until the run ends, while its trackers follow, and write its report however it ends."""
    from turnwright.trackers import TrackerProcesses

    path = training_run.run.path
    track = training_run.config.track
    trackers = TrackerProcesses(track.to, path, track.project, track.name)
    try:
        run_sync(training_run.play())
    finally:
        try:
            reports_of(path, renew=True)
        except Exception as error:
            watch.note(f"could not write the report: {type(error).__name__}: {error}")
        for message in trackers.close():
            watch.note(message)


def _record_extension(training_run: TrainingRun, resolved: ResolvedConfig) -> None:
    """Write the settings of a run that is being extended.

    Raises `ConfigError` when its warm-up is over and would change.
    """
    run = training_run.run
    warmup = resolved.config.warmup
    recorded_warmup = load_run_config(run.path).config.warmup

    keys = ("steps", "gate_success")
    changed = [key for key in keys if getattr(warmup, key) != getattr(recorded_warmup, key)]
    if changed and training_run.cursor["phase"] != "warmup":
        key = changed[0]
        recipe = resolved.recipe or "RECIPE"
        raise ConfigError(
            f"--resume {run.given_path}: the warm-up is over, so warmup.{key} has no effect; leave "
            f"it out, or start a new run: turnwright train {recipe} --out {run.given_path}-2 "
            f"--warmup.{key.replace('_', '-')} {getattr(warmup, key)}"
        )

    recorded = files.read_json(run.path / "config.json")
    run.write_json("config.json", recorded | to_json_dict(resolved))
    (run.path / "summary.json").unlink(missing_ok=True)


def _is_extended(resolved: ResolvedConfig, run: Path) -> bool:
    """Return whether a run is resumed with more steps, another early stop or another gate."""
    before = load_run_config(run)
    if resolved.extended != before.extended:
        return True

    def ends(config: RunConfig) -> tuple[float | None, ...]:
        return config.train.stop_success, config.train.patience, config.warmup.gate_success

    return ends(resolved.config) != ends(before.config)


def _finished(training_run: TrainingRun) -> str:
    """Return a note with the command that extends a run, if it is finished and has its last
    checkpoint.

    Else the note is empty.
    """
    run = training_run.run.given_path
    train = training_run.config.train
    cursor = training_run.cursor
    try:
        summary = files.read_json(training_run.run.path / "summary.json")
        steps = summary["rl_steps"]
    except (OSError, ValueError, KeyError):
        return ""
    if cursor["phase"] != "reinforce" or cursor["step"] != steps:
        return ""

    more_steps = f"turnwright train --resume {run} --train.steps {2 * train.steps}"
    if steps >= train.steps:
        return f"{run} is finished after {steps} steps; extend it with: {more_steps}"

    # A goal ended it, unless it is not finished.
    key = summary.get("stopped_by", "")
    goals = {"train.stop_success": train.stop_success, "train.patience": train.patience}
    goal = goals.get(key)
    if goal is None:
        return ""
    return (
        f"{run} is finished after {steps} steps ({key} = {goal:g} was reached); extend it with: "
        f"{more_steps} --{key} none"
    )
