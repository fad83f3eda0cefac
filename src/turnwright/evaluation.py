"""`turnwright.evaluate` and `turnwright eval`: success and pass@k on held-out tasks.

`evaluate` takes objects, the command names (`turnwright.cli.evaluate`); both come to
`evaluate_config`, which plays the passes, one sampled and one greedy. How episodes are played and
counted is in `turnwright.training.evaluation`, which training uses too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwright.api import as_mapping, as_overrides, check_sections, new_settings
from turnwright.config import EnvRules, ModelConfig, ResolvedConfig
from turnwright.config.values import check_section
from turnwright.errors import ConfigError, UsageError, missing_training
from turnwright.records import NullListener, ProgressListener
from turnwright.records.episode_metrics import mean_interval, pass_at_k
from turnwright.rollouts.episode_progress import EpisodeProgress, progress_listener
from turnwright.rollouts.standalone import run_sync
from turnwright.types import Task, Trajectory
from turnwright.types.notebook import html_of

if TYPE_CHECKING:
    from turnwright.engines import Engine, Sampling
    from turnwright.envs.spec import EnvSpec
    from turnwright.renderers.history import History
    from turnwright.training.evaluation import EvalResult
    from turnwright.training.task_plan import TaskChoice

PLACE = "tw.evaluate()"
"""Name of the call in errors."""

PASS_AT = (1, 2, 4, 8, 16, 32, 64, 128)
"""Values of k for which pass@k is given, besides the number of episodes of each task."""


@dataclass(frozen=True, slots=True)
class PassAtK:
    """Estimated share of tasks that at least one of k episodes solves."""

    value: float
    low: float
    high: float
    """Bounds of its 95% interval, over tasks."""


@dataclass(frozen=True, slots=True, repr=False)
class EvaluationResult:
    """Success on held-out tasks: `sampled`, and `greedy` where the engine can."""

    scores: Mapping[str, EvalResult]
    """Scores by mode."""
    trajectories: Mapping[str, Sequence[Trajectory]]
    """Episodes by mode, in the order of the tasks."""
    pass_at_k: Mapping[int, PassAtK]
    """By k, of the sampled episodes."""

    @property
    def success(self) -> float | None:
        """Share of sampled episodes that succeed; None if none has a reward."""
        return self.scores["sampled"].success

    @property
    def ci(self) -> tuple[float, float]:
        """Wilson's 95% interval of `success`."""
        return self.scores["sampled"].ci

    @property
    def n(self) -> int:
        """Sampled episodes with a reward."""
        return self.scores["sampled"].n

    @property
    def stops(self) -> Mapping[str, int]:
        """Number of sampled episodes by stop reason."""
        return self.scores["sampled"].stops

    @property
    def episodes(self) -> Sequence[Trajectory]:
        """Sampled episodes."""
        return self.trajectories["sampled"]

    def row(self) -> dict[str, Any]:
        """Return the figures as `turnwright eval --json` prints them."""
        row: dict[str, Any] = {mode: scores.row() for mode, scores in self.scores.items()}
        row["counts"] = [list(pair) for pair in self.scores["sampled"].counts]
        if self.pass_at_k:
            row["pass_at_k"] = {
                str(k): {"value": estimate.value, "ci": [estimate.low, estimate.high]}
                for k, estimate in self.pass_at_k.items()
            }
        return row

    def __repr__(self) -> str:
        """Return one line."""
        texts = []
        for mode, scores in self.scores.items():
            if scores.success is None:
                texts.append(f"{mode} no reward")
                continue
            low, high = scores.ci
            texts.append(f"{mode} {scores.success:.1%} [{100 * low:.1f}, {100 * high:.1f}]")
        return f"<Evaluation {', '.join(texts)}, {self.n} episodes>"

    def _repr_html_(self) -> str | None:
        return html_of(self)


def evaluate(
    env: Any = None,
    *,
    tasks: Iterable[Task] | None = None,
    model: ModelConfig | str | Path | None = None,
    engine: Engine | str = "local",
    run: str | Path | None = None,
    samples: int | None = None,
    seed: int | None = None,
    history: History | None = None,
    rules: EnvRules | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> EvaluationResult:
    """Measure success on held-out tasks, like `turnwright eval`, with objects instead of names.

    Example::

        >>> class Coin(tw.Env):
        ...     def reset(self, task, *, seed=None):
        ...         return task.messages
        ...     def step(self, action):
        ...         return tw.Step(reward=float(action.text == "heads"), terminated=True)
        >>> tasks = [tw.Task(f"Toss {number}.") for number in range(4)]
        >>> tossed = tw.evaluate(Coin, tasks=tasks, engine=tw.ScriptedEngine(["heads"]))
        >>> tossed.success, tossed.n
        (1.0, 4)

    Args:
        env: as in `turnwright.train`; None uses those of `run`.
        tasks: tasks to evaluate on; None asks the environment for those it holds out.
        model: a Hugging Face model directory, a checkpoint, or a run, of which the last checkpoint
            is played.
        engine: an engine that samples; `local` loads `model` as `[engine]` configures, `scripted`
            is the environment's own solver.
        run: a run's directory, whose settings are used, and whose last checkpoint is played unless
            `model` names another.
        samples: sampled episodes per task; None is `eval.samples`.
        seed: seed of every random draw; None is that of the run, or 0.
        history: earlier turns in the prompt, as in `turnwright.rollout`; None is that of the run,
            or `append`.
        rules: handling of invalid actions and failures, as in `turnwright.rollout`.
        progress: whether progress is shown; None shows it in notebooks and terminals.
        settings: sections of the configuration, such as `limits={"turns": 4}` or
            `eval={"temperature": 0.7}`.

    Raises:
        UsageError: for an invalid argument.
        TurnwrightError: if too many episodes fail.
    """
    held_out = None if tasks is None else _task_list(tasks)
    settings = dict(settings)
    if samples is not None:
        settings["eval"] = {**as_mapping(settings.get("eval", {})), "samples": samples}

    if run is not None:
        resolved = _settings_of_run(Path(run), model, seed, history, settings)
    else:
        resolved = new_settings(
            model if isinstance(model, ModelConfig) else None,
            "runs/run",
            seed or 0,
            history or "append",
            settings,
            PLACE,
            training=False,
        )
    specs = _specs(env, resolved, held_out, rules)

    # The last checkpoint of the run is played, unless a model is named.
    checkpoint = run
    if isinstance(model, ModelConfig):
        checkpoint = run if model.path is None else None
    elif model is not None:
        checkpoint = model
    with closing(progress_listener(progress)) as watch:
        try:
            return evaluate_config(
                resolved,
                checkpoint=checkpoint,
                engine=engine,
                watch=watch,
                env_specs=specs,
                tasks=held_out,
                history=None if isinstance(history, str) else history,
            )
        except ModuleNotFoundError as error:
            raise (missing_training(error) or error) from None


def _task_list(tasks: Iterable[Task]) -> list[Task]:
    """Return tasks as a list; raise `UsageError` for anything else."""
    is_one = isinstance(tasks, Task)
    listed = [] if is_one else list(tasks)
    if is_one or not all(isinstance(task, Task) for task in listed):
        raise UsageError("tasks must be a list of turnwright.Task objects: tasks=[tw.Task(...)]")
    return listed


def _settings_of_run(
    run: Path,
    model: ModelConfig | str | Path | None,
    seed: int | None,
    history: History | None,
    settings: Mapping[str, Any],
) -> ResolvedConfig:
    """Return the settings of a run, with changes."""
    from turnwright.config.dump import load_run_config
    from turnwright.config.recipe import override

    check_sections(settings, PLACE)
    changes = dict(settings)
    if isinstance(model, ModelConfig):
        changes["model"] = model
    if isinstance(history, str):
        changes["rollout"] = {**as_mapping(changes.get("rollout", {})), "history": history}

    words = as_overrides(changes)
    if seed is not None:
        words.append(f"--seed={seed}")
    return override(load_run_config(run), words, training=False)


def _specs(
    env: Any,
    resolved: ResolvedConfig,
    tasks: Sequence[Task] | None,
    rules: EnvRules | None,
) -> list[EnvSpec]:
    """Return the environment that is given, or those of the settings."""
    from turnwright.envs.resolve import as_env_spec, load_object
    from turnwright.training.task_plan import make_env_specs

    if env is None:
        if not resolved.config.env:
            raise UsageError("tw.evaluate() needs an environment: tw.evaluate(env, ...)")
        specs = make_env_specs(resolved.config)
    else:
        named = env if isinstance(env, str) else ""
        target = load_object(env) if named else env
        specs = [as_env_spec(target, name=named, where=named, tasks=tasks, eval_tasks=tasks)]
    if rules is not None:
        check_section(rules, "tw.evaluate(rules=...)")
        specs = [replace(spec, rules=rules) for spec in specs]
    return specs


def evaluate_config(
    resolved: ResolvedConfig,
    *,
    checkpoint: str | Path | None = None,
    engine: Engine | str = "local",
    watch: ProgressListener | None = None,
    env_specs: Sequence[EnvSpec] | None = None,
    tasks: Sequence[Task] | None = None,
    history: History | None = None,
) -> EvaluationResult:
    """Evaluate as configured.

    Args:
        resolved: the settings.
        checkpoint: a model directory or a run (its last checkpoint), not the settings' model.
        engine: as in `evaluate`.
        watch: receives progress.
        env_specs: environments that replace those in the settings.
        tasks: tasks of the only environment that replace those that it holds out.
        history: a history policy that replaces the one in the settings.

    Raises:
        ConfigError: where the settings hold no tasks out.
    """
    work = _play_passes(
        resolved,
        None if checkpoint is None else str(checkpoint),
        engine,
        watch or NullListener(),
        env_specs,
        tasks,
        history,
    )
    return run_sync(work)


async def _play_passes(
    resolved: ResolvedConfig,
    checkpoint: str | None,
    engine: Engine | str,
    watch: ProgressListener,
    env_specs: Sequence[EnvSpec] | None,
    tasks: Sequence[Task] | None,
    history: History | None,
) -> EvaluationResult:
    from turnwright.training.configured_rollout import make_rollout, play_with_retries
    from turnwright.training.evaluation import play_evaluation, summarize
    from turnwright.training.task_plan import check_failures, make_env_specs

    config = resolved.config
    specs = list(env_specs) if env_specs is not None else make_env_specs(config)
    choices = _choices(resolved, specs, tasks)

    counted = EpisodeProgress(watch)
    rollout = make_rollout(
        resolved,
        specs,
        checkpoint,
        engine,
        watch.note,
        history=history,
        on_finished=counted.finished,
    )
    if config.limits.prompt_tokens is not None:
        first_episodes = [choice.episodes("prompt", 0, 1)[0] for choice in choices]
        fits, _ = await rollout.within_prompt_limit(first_episodes)
        choices = [choice for choice in choices if choice.task.id in fits]

    scores: dict[str, EvalResult] = {}
    trajectories: dict[str, Sequence[Trajectory]] = {}
    try:
        for this_pass in _passes(resolved, choices, engine, are_given=tasks is not None):
            mode = this_pass.mode
            counted.begin(f"evaluate {mode}", len(choices) * this_pass.samples)
            played = await play_evaluation(
                rollout,
                choices,
                name=f"eval-{mode}",
                step=0,
                samples=this_pass.samples,
                sampling=this_pass.sampling,
                play=partial(play_with_retries, rollout, max_retries=config.rollout.max_retries),
            )
            check_failures(played, f"the {mode} pass", None, config.rollout.max_failed)
            scores[mode] = summarize(played, config.eval.success)
            trajectories[mode] = played
    finally:
        if isinstance(engine, str):  # else the caller's
            await rollout.engine.close()
    return EvaluationResult(scores, trajectories, estimate_pass_at_k(scores["sampled"].counts))


def _choices(
    resolved: ResolvedConfig, specs: Sequence[EnvSpec], tasks: Sequence[Task] | None
) -> Sequence[TaskChoice]:
    """Return the tasks to play, with the environment of each."""
    from turnwright.training.task_plan import TaskChoice, TaskPlan

    if tasks is not None:
        if len(specs) != 1:
            raise UsageError("tasks= needs one environment; leave it out, or name one with env=")
        if not tasks:
            raise UsageError("tasks= has no tasks")
        return [TaskChoice(specs[0], task) for task in tasks]

    config = resolved.config
    plan = TaskPlan(
        specs,
        steps=1,
        groups=1,
        held_out=config.eval.tasks,
        seed=config.seed,
        overlap=config.eval.overlap == "allowed",
    )
    if not plan.held_out:
        remedy = "set eval_tasks in [[env]], or provide more tasks"
        raise ConfigError(f"there are no held-out tasks; {remedy}")
    return plan.held_out


@dataclass(frozen=True, slots=True)
class _Pass:
    """One way of playing each task: how it is called, how often, and how replies are sampled."""

    mode: str
    samples: int
    sampling: Sampling


def _passes(
    resolved: ResolvedConfig,
    choices: Sequence[TaskChoice],
    engine: Engine | str,
    *,
    are_given: bool,
) -> list[_Pass]:
    """Return the passes that the settings ask for; greedy replies are those of the local engine
    only."""
    from turnwright.engines import Sampling
    from turnwright.rollouts.rollout_settings import sampling_of
    from turnwright.training.task_plan import eval_samples

    settings = resolved.config.eval
    samples = settings.samples
    if not are_given:  # fewer tasks than eval.tasks are played more often
        samples = eval_samples(len(choices), settings.tasks, settings.samples)
    passes = [_Pass("sampled", samples, sampling_of(settings))]
    if settings.greedy and engine == "local":
        passes.append(_Pass("greedy", 1, Sampling(temperature=0.0)))
    return passes


def estimate_pass_at_k(counts: Iterable[tuple[int, int]]) -> dict[int, PassAtK]:
    """Return pass@k by k, of (episodes with a reward, successes) of each task."""
    played = [(episodes, successes) for episodes, successes in counts if episodes]
    if not played:
        return {}

    # Of a task that was played n times, pass@k has an estimate for k up to n.
    fewest = min(episodes for episodes, _ in played)
    estimates = {}
    for k in (*PASS_AT, fewest):
        if k <= fewest:
            by_task = [pass_at_k(episodes, successes, k) for episodes, successes in played]
            low, high = mean_interval(by_task)
            estimates[k] = PassAtK(sum(by_task) / len(by_task), low, high)
    return estimates
