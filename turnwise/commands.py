"""What the verbs of the command line do, as functions."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.config import ModelConfig, ResolvedConfig
from turnwise.config.dump import to_json_dict
from turnwise.config.launch import world_size
from turnwise.errors import ConfigError, ModelError, TraceError, UsageError
from turnwise.records import NullListener, ProgressListener, RunDir, to_json, trajectory_row
from turnwise.rollouts.api import run_sync
from turnwise.types import Trajectory

if TYPE_CHECKING:
    from turnwise.engines.remote import ServerCapabilities
    from turnwise.envs.spec import EnvSpec
    from turnwise.renderers.chat_renderer import ChatRenderer
    from turnwise.renderers.history import History
    from turnwise.rollouts import Rollout
    from turnwise.training.distributed import Ranks

Finding = tuple[bool | None, str]


def run_training(
    resolved: ResolvedConfig,
    *,
    resume: Path | None = None,
    watch: ProgressListener | None = None,
    worlds: Sequence[EnvSpec] | None = None,
    history: History | None = None,
) -> Path:
    """Train what a configuration describes, or go on with a run; under torchrun, together with the other processes.

    Args:
        resolved: the settings; those of the run itself when it goes on.
        resume: the run directory to go on with.
        watch: hears what happens.
        worlds: environments as objects, in place of those that the settings name.
        history: a history policy as an object, in place of the one that the settings name.

    Returns:
        The run directory.

    Raises:
        UsageError: for a mistake in the settings or what they name.
        TurnwiseError: when the run cannot go on.
    """
    if world_size() == 1:
        return _train(resolved, resume, watch, worlds, history)
    from turnwise.training.distributed import Ranks
    from turnwise.training.setup import run_worker_rank

    ranks = Ranks.join()
    if ranks.rank:
        path = Path(resume) if resume is not None else Path(resolved.config.out)
        run_worker_rank(ranks, path)
        return path
    try:
        return _train(resolved, resume, watch, worlds, history, ranks)
    finally:
        ranks.stop_workers()


def _train(
    resolved: ResolvedConfig,
    resume: Path | None,
    watch: ProgressListener | None,
    worlds: Sequence[EnvSpec] | None,
    history: History | None,
    ranks: Ranks | None = None,
) -> Path:
    began = (time.time(), time.process_time())  # importing torch is part of what a run costs
    from turnwise.trackers import TrackerProcesses
    from turnwise.viewer.diagnosis import DiagnosingListener

    watch = DiagnosingListener(watch or NullListener())
    path = Path(resume) if resume is not None else Path(resolved.config.out)
    if resume is None and _has_run(path):
        raise ConfigError(f"{path}: holds a run already; go on with it by --resume {path}, or choose another --out")
    from turnwise.training.metrics import versions
    from turnwise.training.run import TrainingRun
    from turnwise.training.task_plan import make_env_specs

    found = list(worlds) if worlds is not None else make_env_specs(resolved.config)
    with RunDir(path) as run:
        if resume is None:
            shutil.rmtree(path / "model", ignore_errors=True)  # of a run that was stopped before it began
            run.write_json("config.json", to_json_dict(resolved) | {"versions": versions()})
        try:
            resumed = resume is not None
            trained = TrainingRun(
                resolved.config, found, run, watch, resumed=resumed, began=began, history=history, ranks=ranks
            )
        except UsageError:
            if resume is None:
                _remove_failed_start(path)
            raise
        followers = TrackerProcesses(resolved.config.track.to, path, resolved.config.track.project, resolved.config.track.name)
        try:
            run_sync(trained.play())
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"go on with: turnwise train --resume {path}") from None
        finally:
            report(path, watch)
            for told in followers.close():
                watch.note(told)
    return path


def _has_run(path: Path) -> bool:
    journal = path / "journal.jsonl"
    return (path / "config.json").exists() or (journal.exists() and journal.stat().st_size > 0)


def _remove_failed_start(path: Path) -> None:
    """Take back what a run left that could not begin, so that the same command works once the mistake is mended."""
    shutil.rmtree(path / "model", ignore_errors=True)
    for name in ("config.json", "journal.jsonl", "trajectories.jsonl", "metrics.jsonl", ".lock"):
        (path / name).unlink(missing_ok=True)
    with suppress(OSError):
        path.rmdir()


def report(run: Path, watch: ProgressListener) -> None:
    """Write the report of a run; a report that cannot be written costs a line, never the run."""
    from turnwise.viewer.report import write_report

    try:
        write_report(run)
    except Exception as error:
        watch.note(f"the report could not be written: {type(error).__name__}: {error}")


def run_evaluation(
    resolved: ResolvedConfig,
    *,
    checkpoint: str | None = None,
    engine: str = "local",
    samples: int | None = None,
    watch: ProgressListener | None = None,
) -> dict[str, Any]:
    """Success on held-out tasks, sampled and greedy.

    Args:
        resolved: the settings.
        checkpoint: a checkpoint, a model directory, or a run (its last checkpoint), in place of the settings' model.
        engine: `local`, or `scripted` for the environments' own solvers.
        samples: sampled episodes per task, in place of `eval.samples`.
        watch: hears what happens.

    Returns:
        `sampled` and `greedy` figures (success, ci, n, turns, ...), and `counts` of (episodes, successes) per task.

    Raises:
        UsageError: for a mistake in the settings or what they name.
    """
    return asyncio.run(_evaluate(resolved, checkpoint, engine, samples, watch or NullListener()))


async def _evaluate(
    resolved: ResolvedConfig, checkpoint: str | None, engine: str, samples: int | None, watch: ProgressListener
) -> dict[str, Any]:
    from turnwise.engines import Sampling
    from turnwise.training.evaluation import play_evaluation, summarize
    from turnwise.training.task_plan import TaskPlan, check_failures, make_env_specs

    config = resolved.config
    worlds = make_env_specs(config)
    plan = TaskPlan(worlds, steps=1, groups=1, held_out=config.eval.tasks, seed=config.seed)
    if not plan.held_out:
        raise ConfigError("there are no held-out tasks; give [[env]] eval_tasks, or more tasks")
    rollout = _rollout(resolved, worlds, checkpoint, engine)
    chosen = plan.held_out
    if config.limits.prompt_tokens is not None:
        fits, _ = await rollout.within_prompt_limit([choice.episodes("prompt", 0, 1)[0] for choice in chosen])
        chosen = [choice for choice in chosen if choice.task.id in fits]
    own = Sampling(config.eval.temperature, config.eval.top_p, config.eval.top_k)
    modes = {"sampled": (samples or config.eval.samples, own)}
    if config.eval.greedy and engine == "local":
        modes["greedy"] = (1, Sampling(temperature=0.0))
    found: dict[str, Any] = {}
    watch.phase("evaluate", len(modes), "passes")
    try:
        for number, (mode, (count, sampling)) in enumerate(modes.items(), 1):
            played = await play_evaluation(rollout, chosen, name=f"eval-{mode}", step=0, samples=count, sampling=sampling)
            check_failures(played, f"the {mode} pass", None, config.rollout.max_failed)
            figures = summarize(played, config.eval.success)
            found[mode] = figures.row()
            if mode == "sampled":
                found["counts"] = [list(pair) for pair in figures.counts]
            watch.progress(number, {"success": figures.success, "turns": figures.turns})
    finally:
        await rollout.engine.close()
    return found


def preview_rollouts(
    resolved: ResolvedConfig, *, n: int = 4, out: Path | None = None, watch: ProgressListener | None = None
) -> list[Trajectory]:
    """Play a few held-out tasks with the settings' model.

    Args:
        out: a file that gets one record a line.

    Raises:
        UsageError: for a mistake in the settings or what they name.
        TraceError: when `out` cannot be written.
    """
    from turnwise.training.task_plan import TaskPlan, make_env_specs

    config = resolved.config
    worlds = make_env_specs(config)
    plan = TaskPlan(worlds, steps=1, groups=n, held_out=n, seed=config.seed)
    chosen = plan.held_out or plan.train[:n]
    player = _rollout(resolved, worlds, None, "local")
    (watch or NullListener()).phase("roll out", len(chosen), "episodes")

    async def play() -> list[Trajectory]:
        try:
            return await player.play([episode for choice in chosen for episode in choice.episodes("rollout", 0, 1)])
        finally:
            await player.engine.close()

    trajectories = asyncio.run(play())
    if out is not None:
        try:
            out.write_bytes(b"".join(to_json(trajectory_row(t, player.renderer)) + b"\n" for t in trajectories))
        except OSError as error:
            raise TraceError(f"{out}: cannot be written ({error.strerror})") from error
    return trajectories


def _rollout(resolved: ResolvedConfig, worlds: Sequence[EnvSpec], checkpoint: str | None, engine: str) -> Rollout:
    from turnwise.engines import Sampling, ScriptedEngine
    from turnwise.renderers import byte_renderer
    from turnwise.rollouts import Rollout

    config = resolved.config
    options: dict[str, Any] = {"limits": config.limits, "seed": config.seed, "concurrency": config.rollout.concurrency}
    names = ("stop", "history", "watchdog_s", "sanity", "sanity_every", "sanity_share")
    options |= {"stop_on_bugs": True} | {name: getattr(config.rollout, name) for name in names}
    if engine == "scripted":
        solvers = [world.solver for world in worlds]
        if len(solvers) != 1 or solvers[0] is None:
            raise ConfigError("--engine scripted plays one environment's own solver, and there is none")
        return Rollout(ScriptedEngine(solvers[0]), byte_renderer(config.rollout.control_text), **options)
    if engine != "local":
        raise ConfigError(
            f"--engine {engine}: not an engine of this release; there are local (what [engine] says) and scripted"
        )
    options["sampling"] = Sampling(config.rollout.temperature, config.rollout.top_p, config.rollout.top_k)
    if config.engine.kind == "chat" and checkpoint is None and config.model.path is None:
        from turnwise.training.setup import connect_fixed_servers

        renderer = byte_renderer(config.rollout.control_text)
        return Rollout(connect_fixed_servers(config, renderer), renderer, **options)
    from turnwise.training.setup import load_model_and_renderer, make_eval_engine

    source = model_directory(resolved, checkpoint)
    of_model = _with_own_template(resolved, source) if checkpoint else config.model
    model, loaded = load_model_and_renderer(source, source, of_model, config.rollout.control_text)
    return Rollout(make_eval_engine(config, source, model, loaded), loaded, **options)


def _with_own_template(resolved: ResolvedConfig, source: Path) -> ModelConfig:
    """The settings of a model; a checkpoint of a run brings the template along that it was trained with, arguments and all."""
    from turnwise.training.checkpoint import read_checkpoint

    model = resolved.config.model
    said = any(key.startswith("model.template") and value == "command line" for key, value in resolved.origins.items())
    return model if said or read_checkpoint(source) is None else replace(model, template=None, template_args={})


def model_directory(resolved: ResolvedConfig, checkpoint: str | None) -> Path:
    """The model directory that is meant: a checkpoint, a run's last one, or the settings' model.

    Raises:
        ModelError: when there is none.
    """
    named = checkpoint or resolved.config.model.path
    if named is None:
        raise ModelError(
            "no model: a tiny one exists only after training; name one with --run RUN, --checkpoint or --model.path"
        )
    return _last(Path(named))


def _last(path: Path) -> Path:
    """A model directory; of a run its last checkpoint."""
    if (path / "checkpoints").is_dir():
        from turnwise.training.checkpoint import Checkpoints

        latest = Checkpoints(path / "checkpoints", path).newest()
        if latest is None:
            raise ModelError(f"{path}: the run has no checkpoint yet; train it further with --resume {path}")
        return latest.path
    return path


def check_env(spec: str) -> list[Any]:
    """Whether an environment keeps its contract, found out without a model.

    Raises:
        ConfigError: when there is no such environment.
    """
    from turnwise.envs.check import check_env as check
    from turnwise.envs.resolve import resolve_env

    return list(check(resolve_env(spec)))


def check_learning(algorithm: str | None = None, model: Path | None = None) -> Iterator[Finding]:
    """Whether a toy reward rises when trained on, with each algorithm or with one.

    Raises:
        UsageError: for an algorithm or a model that cannot be used.
    """
    from turnwise.config.schema import ALGORITHMS
    from turnwise.training.self_checks import check_learning

    for found in check_learning(ALGORITHMS if algorithm is None else [algorithm], model=model):
        yield found.ok, found.text


def check_engine(url: str, key_env: str | None = None) -> ServerCapabilities:
    """What a server does with ids and logprobs, found by asking it for a few tokens.

    Raises:
        EngineError: when it does not answer, or is none of the kinds that are known.
        ConfigError: for a URL that is none.
    """
    from turnwise.engines.remote import connect, probe_server

    async def look() -> ServerCapabilities:
        engine = await connect(url, key_env=key_env)
        try:
            return await probe_server(engine)
        finally:
            await engine.close()

    return run_sync(look())


def serve_model(model: Path, formats: str, told: Callable[[str], None], **settings: Any) -> None:
    """Put a model behind HTTP until it is interrupted; `settings` as of `turnwise.training.server.serve`.

    Args:
        model: a model directory, a checkpoint or a run (its last checkpoint).
        formats: `vllm` or `sglang`.
        told: hears a line that begins with the URL, once it answers.

    Raises:
        UsageError: when the model or the address cannot be used.
    """
    from turnwise.training.server import serve as run

    run_sync(run(_last(model), formats, told, **settings))  # type: ignore[arg-type]


def check_template(renderer: ChatRenderer, history: str = "append") -> list[Finding]:
    """What a template does with a conversation that grows, and whether a history mode can be exact with it."""
    from turnwise.renderers.contract import explain_contract

    loaded = (True, f"template and tokenizer load (fingerprint {renderer.fingerprint})")
    name, unread = renderer.call_format
    calls: Finding = (None, f"replies are read as in {name!r}")
    if unread:
        calls = (
            None,
            f"WARNING: the template writes tool calls as {unread[:200]!r}, and no parser reads them back: a model that follows "
            f"it makes no call that is run (replies are read as in {name!r}). Without tools this does not matter; with tools "
            "take a template whose calls are read (docs/templates.md)",
        )
    return [loaded, *explain_contract(renderer.contract, history), calls]


def check_images(model: Path) -> list[Finding]:
    """Whether a vision-language model's answers depend on what it is shown, in the local engine and in the trainer.

    Raises:
        ModelError, EngineError: when it cannot be run.
    """
    from turnwise.training.self_checks import check_vision, findings

    return findings(check_vision(model))
