"""Implementations of the command line's commands."""

from __future__ import annotations

import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwright import files, plugins
from turnwright.config import ResolvedConfig, RunConfig
from turnwright.config.dump import load_run_config, to_json_dict
from turnwright.config.launch import world_size
from turnwright.display.reports import reports_of
from turnwright.errors import ConfigError, ModelError, TraceError, UsageError
from turnwright.records import NullListener, ProgressListener, RunDir, to_json, trajectory_row
from turnwright.rollouts.standalone import run_sync
from turnwright.types import Trajectory

if TYPE_CHECKING:
    from turnwright.engines.remote import ServerCapabilities
    from turnwright.engines.remote.placed import ServerPlacer
    from turnwright.envs.spec import EnvSpec
    from turnwright.renderers.chat_renderer import ChatRenderer
    from turnwright.renderers.history import History
    from turnwright.rollouts import EpisodeSpec, Rollout
    from turnwright.rollouts.stream import GroupPlayer
    from turnwright.training.distributed import ProcessRanks
    from turnwright.training.run import TrainingRun

Finding = tuple[bool | None, str]


def run_training(
    resolved: ResolvedConfig,
    *,
    resume: Path | None = None,
    watch: ProgressListener | None = None,
    env_specs: Sequence[EnvSpec] | None = None,
    history: History | None = None,
    began: tuple[float, float] | None = None,
) -> Path:
    """Train as configured, or resume a run, and return its directory; under torchrun, together with the other processes.

    `env_specs` and `history` are objects that replace those in the settings. `began` has `time.time()` and
    `time.process_time()` from which the run's times count; None means now.
    """
    began = began or (time.time(), time.process_time())  # includes importing torch
    if world_size() == 1:
        return _train(resolved, resume, watch, env_specs, history=history, began=began)
    from turnwright.training.distributed import ProcessRanks
    from turnwright.training.setup import run_worker_rank

    ranks = ProcessRanks()
    if ranks.rank:
        path = Path(resume) if resume is not None else Path(resolved.config.out)
        run_worker_rank(ranks, path)
        return path
    try:
        return _train(resolved, resume, watch, env_specs, history=history, began=began, ranks=ranks)
    finally:
        ranks.stop_workers()


def _train(
    resolved: ResolvedConfig,
    resume: Path | None,
    watch: ProgressListener | None,
    specs: Sequence[EnvSpec] | None,
    *,
    history: History | None,
    began: tuple[float, float],
    ranks: ProcessRanks | None = None,
) -> Path:
    from turnwright.display.diagnosis import DiagnosingListener

    watch = DiagnosingListener(watch or NullListener())
    path = Path(resume) if resume is not None else Path(resolved.config.out)
    journal = path / "journal.jsonl"
    for tracker in resolved.config.track.to:
        if ":" not in tracker:
            plugins.load("trackers", tracker)  # else its process would fail, beside the run
    if resume is None and ((path / "config.json").exists() or (journal.exists() and journal.stat().st_size > 0)):
        raise ConfigError(f"{path} already contains a run; resume it with --resume {path} or choose another --out")
    from turnwright.training.metrics import versions
    from turnwright.training.shared_process import SharedProcess
    from turnwright.training.task_plan import make_env_specs, with_steps_of_epochs

    specs = list(specs) if specs is not None else make_env_specs(resolved.config)
    if resume is None and resolved.config.train.data_epochs is not None:
        resolved = replace(resolved, config=with_steps_of_epochs(resolved.config, specs))
    _warn_early(resolved, specs, watch)
    with _resumable(path), RunDir(path) as run:
        extending = resume is not None and _is_extended(resolved, path)
        if resume is None:
            shutil.rmtree(path / "model", ignore_errors=True)  # left by a run stopped before its first step
            run.write_json("config.json", to_json_dict(resolved) | {"versions": versions()})
        with SharedProcess(specs, run, watch, resolved.config.model.threads).shared():
            _train_in(run, resolved, resume, watch, specs, history=history, began=began, ranks=ranks, extending=extending)
    return path


def _train_in(
    run: RunDir,
    resolved: ResolvedConfig,
    resume: Path | None,
    watch: ProgressListener,
    specs: Sequence[EnvSpec],
    *,
    history: History | None,
    began: tuple[float, float],
    ranks: ProcessRanks | None,
    extending: bool,
) -> None:
    from turnwright.trackers import TrackerProcesses
    from turnwright.training.run import TrainingRun

    resumed = resume is not None
    try:
        training_run = TrainingRun(
            resolved.config,
            specs,
            run,
            watch,
            resumed=resumed,
            began=began,
            history=history,
            ranks=ranks,
            extended=resolved.extended,
            workers=_workers(resolved, specs, run, watch.note, resumed=resumed),
            placer=_placer(resolved.config, watch.note),
        )
    except UsageError:
        if not resumed:  # so that the corrected command can be rerun
            shutil.rmtree(run.path / "model", ignore_errors=True)
            for name in ("config.json", "journal.jsonl", "trajectories.jsonl", "metrics.jsonl", ".lock"):
                (run.path / name).unlink(missing_ok=True)
            with suppress(OSError):
                run.path.rmdir()
        raise
    if extending:
        _record_extension(training_run, resolved)
    elif done := _finished(training_run):
        run_sync(training_run.parts.engine.close())
        watch.note(done)
        return

    track = resolved.config.track
    trackers = TrackerProcesses(track.to, run.path, track.project, track.name)
    try:
        run_sync(training_run.play())
    finally:
        try:
            reports_of(run.path, renew=True)
        except Exception as error:
            watch.note(f"could not write the report: {type(error).__name__}: {error}")
        for message in trackers.close():
            watch.note(message)


@contextmanager
def _resumable(path: Path) -> Iterator[None]:
    """Name the command that resumes a run which is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"resume with: turnwright train --resume {path}") from None


def _workers(
    resolved: ResolvedConfig, specs: Sequence[EnvSpec], run: RunDir, note: Callable[[str], None], *, resumed: bool
) -> Callable[[Path], GroupPlayer] | None:
    """Return what makes the pool of workers that `[scale]` asks for, or None without one."""
    scale = resolved.config.scale
    if scale.listen is None and scale.ray is None:
        return None
    try:
        pool = plugins.load("transports", "workers")
    except ImportError as error:
        raise ConfigError(
            f"[scale] needs starlette and uvicorn ({error.name} is missing): pip install 'turnwright[serve]'"
        ) from None
    recipe = None if resolved.recipe is None else resolved.recipe.parent.resolve()

    def make(source: Path) -> GroupPlayer:
        made: GroupPlayer = pool(resolved.config, specs, run, source, recipe=recipe, note=note, resumed=resumed)
        return made

    return make


def _placer(config: RunConfig, note: Callable[[str], None]) -> ServerPlacer | None:
    """Return what starts the engine's servers on the Ray cluster, or None when they are elsewhere."""
    if not config.engines_on_ray:
        return None
    try:
        engines = plugins.load("transports", "ray")
    except ImportError as error:
        raise ConfigError(f"scale.ray needs Ray ({error.name} is missing): pip install 'turnwright[ray]'") from None
    placer: ServerPlacer = engines(config.scale, note=note)
    return placer


def _warn_early(resolved: ResolvedConfig, specs: Sequence[EnvSpec], watch: ProgressListener) -> None:
    from turnwright.training.warmup import cannot_learn

    for why in cannot_learn(resolved.config, specs):
        watch.note(f"warning: {why}")


def _record_extension(training_run: TrainingRun, resolved: ResolvedConfig) -> None:
    """Write the settings of a run that is being extended; a `ConfigError` when its warm-up is over and would change."""
    run, warmup = training_run.run, resolved.config.warmup
    before = load_run_config(run.path).config.warmup
    changed = [key for key in ("steps", "gate_success") if getattr(warmup, key) != getattr(before, key)]
    if changed and training_run.cursor["phase"] != "warmup":
        recipe = resolved.recipe or "RECIPE"
        flag = changed[0].replace("_", "-")
        raise ConfigError(
            f"--resume {run.given_path}: the warm-up is over, so warmup.{changed[0]} has no effect; leave it out, or start a "
            f"new run: turnwright train {recipe} --out {run.given_path}-2 --warmup.{flag} {getattr(warmup, changed[0])}"
        )
    run.write_json("config.json", files.read_json(run.path / "config.json") | to_json_dict(resolved))
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
    """Return a note with the command that extends a run, if it is finished and has its last checkpoint; else nothing."""
    run, train = training_run.run.given_path, training_run.config.train
    try:
        summary = files.read_json(training_run.run.path / "summary.json")
        steps = summary["rl_steps"]
    except (OSError, ValueError, KeyError):
        return ""
    if (training_run.cursor["phase"], training_run.cursor["step"]) != ("reinforce", steps):
        return ""

    more, reached = f"--train.steps {2 * train.steps}", ""
    if steps < train.steps:  # a goal ended it, unless it is not finished
        key = summary.get("stopped_by", "")
        value = {"train.stop_success": train.stop_success, "train.patience": train.patience}.get(key)
        if value is None:
            return ""
        more, reached = f"{more} --{key} none", f" ({key} = {value:g} was reached)"
    return f"{run} is finished after {steps} steps{reached}; extend it with: turnwright train --resume {run} {more}"


def run_evaluation(
    resolved: ResolvedConfig, *, checkpoint: str | None = None, engine: str = "local", watch: ProgressListener | None = None
) -> dict[str, Any]:
    """Return success on held-out tasks, `sampled` and `greedy`, and `counts` of (episodes, successes) per task.

    `checkpoint` may be a model directory or a run (its last one); `engine` `scripted` is the environments' own solvers.
    """
    return run_sync(_evaluate(resolved, checkpoint, engine, watch or NullListener()))


async def _evaluate(resolved: ResolvedConfig, checkpoint: str | None, engine: str, watch: ProgressListener) -> dict[str, Any]:
    from turnwright.engines import Sampling
    from turnwright.training.evaluation import play_evaluation, summarize
    from turnwright.training.task_plan import TaskPlan, check_failures, eval_samples, make_env_specs

    config = resolved.config
    specs = make_env_specs(config)
    overlap = config.eval.overlap == "allowed"
    plan = TaskPlan(specs, steps=1, groups=1, held_out=config.eval.tasks, seed=config.seed, overlap=overlap)
    if not plan.held_out:
        raise ConfigError("there are no held-out tasks; set eval_tasks in [[env]], or provide more tasks")
    rollout = make_rollout(resolved, specs, checkpoint, engine, watch.note)
    chosen = plan.held_out
    if config.limits.prompt_tokens is not None:
        fits, _ = await rollout.within_prompt_limit([choice.episodes("prompt", 0, 1)[0] for choice in chosen])
        chosen = [choice for choice in chosen if choice.task.id in fits]
    own = Sampling(config.eval.temperature, config.eval.top_p, config.eval.top_k, min_p=config.eval.min_p)
    modes = {"sampled": (eval_samples(len(chosen), config.eval.tasks, config.eval.samples), own)}
    if config.eval.greedy and engine == "local":
        modes["greedy"] = (1, Sampling(temperature=0.0))
    found: dict[str, Any] = {}
    watch.phase("evaluate", len(modes), "passes")
    try:
        for number, (mode, (count, sampling)) in enumerate(modes.items(), 1):
            played = await play_evaluation(
                rollout,
                chosen,
                name=f"eval-{mode}",
                step=0,
                samples=count,
                sampling=sampling,
                play=partial(_play_again, rollout, config.rollout.max_retries),
            )
            check_failures(played, f"the {mode} pass", None, config.rollout.max_failed)
            summary = summarize(played, config.eval.success)
            found[mode] = summary.row()
            if mode == "sampled":
                found["counts"] = [list(pair) for pair in summary.counts]
            watch.progress(number, {"success": summary.success, "turns": summary.turns})
    finally:
        await rollout.engine.close()
    return found


async def _play_again(rollout: Rollout, max_retries: int, episodes: Sequence[EpisodeSpec], **given: Any) -> list[Trajectory]:
    """Play episodes, those again that failed and may pass; `given` are arguments of `Rollout.play`."""
    from turnwright.rollouts.play_again import play_again

    def play(these: Sequence[EpisodeSpec]) -> Awaitable[list[Trajectory]]:
        return rollout.play(these, **given)

    return await play_again(episodes, play(episodes), play, max_retries=max_retries)


def preview_rollouts(
    resolved: ResolvedConfig, *, n: int = 4, out: Path | None = None, watch: ProgressListener | None = None
) -> list[Trajectory]:
    """Play a few held-out tasks with the configured model, and write them to `out`, one record per line."""
    from turnwright.training.task_plan import TaskPlan, make_env_specs

    config = resolved.config
    specs = make_env_specs(config)
    overlap = config.eval.overlap == "allowed"
    plan = TaskPlan(specs, steps=1, groups=n, held_out=n, seed=config.seed, overlap=overlap)
    chosen = plan.held_out or plan.train[:n]
    watch = watch or NullListener()
    rollout = make_rollout(resolved, specs, None, "local", watch.note)
    watch.phase("roll out", len(chosen), "episodes")

    async def play() -> list[Trajectory]:
        try:
            episodes = [episode for choice in chosen for episode in choice.episodes("rollout", 0, 1)]
            return await _play_again(rollout, config.rollout.max_retries, episodes)
        finally:
            await rollout.engine.close()

    out = None if out is None else out.absolute()  # code of an environment may change the working directory
    trajectories = run_sync(play())
    if out is not None:
        try:
            out.write_bytes(b"".join(to_json(trajectory_row(t, rollout.renderer)) + b"\n" for t in trajectories))
        except OSError as error:
            raise TraceError(f"{out}: cannot be written ({error.strerror})") from error
    return trajectories


def make_rollout(
    resolved: ResolvedConfig,
    specs: Sequence[EnvSpec],
    checkpoint: str | None,
    engine: str,
    note: Callable[[str], None],
    *,
    run: RunDir | None = None,
    stop_on_bugs: bool = True,
) -> Rollout:
    from turnwright.engines import Sampling, ScriptedEngine
    from turnwright.renderers import byte_renderer
    from turnwright.rollouts import Rollout
    from turnwright.rollouts.rollout_settings import RolloutSettings

    config = resolved.config
    settings = RolloutSettings.of(config, stop_on_bugs=stop_on_bugs)
    if engine == "scripted":
        solvers = [spec.solver for spec in specs]
        if len(solvers) != 1 or solvers[0] is None:
            raise ConfigError("--engine scripted needs exactly one environment, with a solver")
        renderer = byte_renderer(config.rollout.control_text)
        settings = replace(settings, sampling=Sampling())
        return Rollout(ScriptedEngine(solvers[0]), renderer, settings, run=run)
    if engine != "local":
        raise ConfigError(f"--engine {engine}: unknown engine; choose local (configured by [engine]) or scripted")
    from turnwright.training.checkpoint import read_checkpoint
    from turnwright.training.components import make_eval_policies
    from turnwright.training.model.packed import quant_of

    if config.scale.listen is not None or config.scale.ray is not None:
        note("episodes are played in this process: workers ([scale]) play those of turnwright train")
    if config.engines_on_ray and config.policy:
        raise ConfigError(
            "scale.ray: only turnwright train starts the servers of several policies there; set engine.urls to running "
            "servers, or leave scale.ray out"
        )
    model = config.model
    if config.engine.kind == "chat" and checkpoint is None and model.path is None:
        from turnwright.training.servers import connect_fixed_servers

        renderer = byte_renderer(config.rollout.control_text)
        return Rollout(connect_fixed_servers(config, renderer), renderer, settings, run=run)
    named = checkpoint or model.directory
    if named is None:
        raise ModelError("no model: a tiny one exists only after training; set --run RUN, --checkpoint or --model.path")
    source = _last(Path(named))
    given = any(key.startswith("model.template") and value == "command line" for key, value in resolved.origins.items())
    if checkpoint and not given and read_checkpoint(source) is not None:
        # A run's checkpoint uses the template and arguments it was trained with.
        model = replace(model, template=None, template_args={})
    if config.engine.kind not in ("chat", "llamacpp") and resolved.origins.get("quant.kind", "default") == "default":
        config = replace(config, quant=quant_of(source))  # a checkpoint plays as it was trained
    config = replace(config, model=model)
    return Rollout(*make_eval_policies(config, source, _placer(config, note)), settings, run=run)


def _last(path: Path) -> Path:
    """Return the checkpoint with the policy of a run, or the directory itself."""
    from turnwright.config.snapshots import local_model
    from turnwright.training.checkpoint import Checkpoints

    path = local_model(path)
    if not (path / "checkpoints").is_dir():
        return path
    latest = Checkpoints(path / "checkpoints", path).policy()
    if latest is None:
        raise ModelError(f"{path}: the run has no checkpoint yet; train it further with --resume {path}")
    return latest.path


def model_of(path: Path) -> Path:
    """Return the model directory of a checkpoint or a run; raise `ModelError` if it holds several policies."""
    from turnwright.training.checkpoint import policies_of

    last = _last(path)
    if several := policies_of(last):
        raise ModelError(f"{last}: it holds several policies; name one of {', '.join(str(last / name) for name in several)}")
    return last


def check_env(spec: str) -> list[Finding]:
    """Check an environment's contract without a model."""
    from turnwright.envs.check import check_env as check
    from turnwright.envs.resolve import resolve_env

    return [(found.ok, found.text) for found in check(resolve_env(spec))]


def check_learning(algorithm: str | None = None, model: Path | None = None) -> Iterator[Finding]:
    """Check that a toy reward rises in training, with each algorithm or with one."""
    from turnwright.config.names import ALGORITHMS
    from turnwright.training.self_checks import check_learning

    for found in check_learning(ALGORITHMS if algorithm is None else [algorithm], model=model):
        yield found.ok, found.text


def check_engine(url: str, key_env: str | None = None) -> ServerCapabilities:
    """Probe a server's handling of ids and logprobs with a few tokens."""
    from turnwright.engines.remote import connect, probe_server

    async def probe() -> ServerCapabilities:
        engine = await connect(url, key_env=key_env)
        try:
            return await probe_server(engine)
        finally:
            await engine.close()

    return run_sync(probe())


def relay_weights(root: Path, note: Callable[[str], None], **settings: Any) -> None:
    """Fetch weights from peers to a directory, and pass them on, until interrupted; `settings` are those of `relay`."""
    try:
        relay = plugins.load("transports", "relay")
    except ImportError as error:
        raise ConfigError(f"turnwright engines relay needs {error.name}: pip install 'turnwright[serve,servers]'") from None
    run_sync(relay(root, note, **settings))


def pack_model(model: Path, out: Path, kind: str | None = None, size: int | None = None) -> None:
    """Write a model directory, a checkpoint or a run (its last checkpoint) as a packed directory.

    `kind` and `size` (int4: inputs per scale, fp8: side of a block) are by default those of the run.
    """
    from turnwright.training.model.packed import quant_of, write_packed

    source = model_of(model)
    changed: dict[str, Any] = {} if kind is None else {"kind": kind}
    changed |= {} if size is None else {"group": size, "block": size}
    write_packed(source, out, replace(quant_of(source), **changed))


def check_template(renderer: ChatRenderer, history: str = "append") -> list[Finding]:
    """Report a template's behavior in a growing conversation, and whether a history mode is exact with it."""
    from turnwright.renderers.contract import explain_contract

    loaded = (True, f"template and tokenizer load (fingerprint {renderer.fingerprint})")
    name, unread = renderer.call_format
    calls = f"replies are parsed as {name!r}"
    if unread:
        calls = (
            f"WARNING: the template writes tool calls as {unread[:200]!r}, and no parser reads them back: calls of a model "
            f"that follows it are not run (replies are parsed as {name!r}). Without tools this does not matter; with tools "
            "use a template with parsed calls (docs/templates.md)"
        )
    lost: list[Finding] = [
        (None, f"WARNING: a reply of the template's own does not come back: {reply}") for reply in renderer.unread_replies
    ]
    return [loaded, *explain_contract(renderer.contract, history), (None, calls), *lost]


def check_images(model: Path) -> list[Finding]:
    """Check that a vision-language model's answers depend on its images, in the local engine and in the trainer."""
    from turnwright.training.self_checks import check_vision, findings

    return findings(check_vision(model))
