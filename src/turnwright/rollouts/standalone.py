"""`turnwright.rollout`: play episodes of an environment without a trainer.

`arollout` checks its arguments, makes the episodes (`make_episode_specs`), and plays them by a
`Rollout`. `rollout` is the same for code without an event loop. How episodes are played is in
`runner`, `stream` and `episode`.
"""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import wraps
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from turnwright.config import EnvRules, Limits
from turnwright.config.schema import SanityShare
from turnwright.config.validation import check_rules_of_play
from turnwright.config.values import check_section
from turnwright.engines import Engine, HasRenderer, Sampling
from turnwright.envs import Env
from turnwright.envs.env import HasGroupReward
from turnwright.envs.resolve import resolve_env
from turnwright.errors import UsageError
from turnwright.records import RunDir
from turnwright.renderers import Renderer, byte_renderer
from turnwright.renderers.control_text import ControlText
from turnwright.renderers.history import History
from turnwright.rollouts.agent_function import AgentFunction
from turnwright.rollouts.episode_progress import EpisodeProgress, progress_listener
from turnwright.rollouts.episode_spec import EpisodeSpec
from turnwright.rollouts.render_check import SHARE, Sanity
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright.rollouts.runner import Rollout, left_out, left_out_note
from turnwright.shutdown import run_loop
from turnwright.types import EpisodeKey, Task, Trajectory

P = ParamSpec("P")
T = TypeVar("T")


async def arollout(
    env: Callable[[], Env] | AgentFunction,
    tasks: Iterable[Task],
    engine: Engine,
    *,
    samples: int = 1,
    renderer: Renderer | None = None,
    limits: Limits | None = None,
    sampling: Sampling | None = None,
    seed: int = 0,
    concurrency: int = 256,
    environments: int | None = None,
    control_text: ControlText = "neutralise",
    out: str | Path | None = None,
    stop: Sequence[str] = (),
    history: History = "append",
    rules: EnvRules | None = None,
    sanity: Sanity = "strict",
    sanity_share: SanityShare = SHARE,
    want: Sequence[str] = (),
    alternatives: int = 0,
    progress: bool | None = None,
) -> list[Trajectory]:
    """Play episodes and return their trajectories, `samples` per task, in the order of the tasks.

    Example::

        >>> async def play(task, model):
        ...     reply = await model.generate(task.messages)
        ...     return float(task.answer in reply.text)
        >>> tasks = [tw.Task("6 * 7?", answer="42")]
        >>> (trajectory,) = tw.rollout(play, tasks, tw.ScriptedEngine(["42"]))
        >>> trajectory.reward
        1.0

    Args:
        env: an `Env` class, another environment factory, an agent function
            `async def play(task, model) -> reward`, or what a recipe names: a built-in environment,
            `file.py:Name`.
        tasks: tasks to play.
        engine: engine that samples the replies.
        samples: episodes per task.
        renderer: renderer of the engine's model; by default the engine's own, else the built-in
            byte-level ChatML.
        limits: limits of every episode; tasks over `limits.prompt_tokens` are skipped, with a
            warning and a list in `out`/left_out.json.
        sampling: sampling parameters.
        seed: seed of all randomness; the same seed gives the same episodes, in whatever order they
            run.
        concurrency: maximum number of concurrent engine calls; an episode needs none while its
            environment works.
        environments: maximum number of environments alive at once; None starts as many as keep the
            engine busy.
        control_text: handling of control text in messages by the built-in renderer: `neutralise`,
            `reject` or `allow`; other renderers have their own setting.
        out: directory in which every turn is recorded before the next begins; None records nothing.
        stop: texts that end a reply, besides the model's end tokens; its text is cut after one, its
            ids are not.
        history: which earlier turns a prompt contains: `append`; `inline` (observations become part
            of the model's own message); `template`; a policy (a function of the conversation and
            the indices of the model's replies), or a policy by name (`drop_reasoning:2`,
            `file.py:policy`).
        rules: handling of invalid actions and of environment failures: retries, asking again,
            process isolation.
        sanity: comparison of finished episodes with a complete render (`strict`,
            `ignore_strippable`, `off`); the first difference is a warning, all are counted in
            `trajectory.metrics`.
        sanity_share: share of compared episodes, chosen by their keys; 1 compares all, `turns` each
            turn of all.
        want: engine extras to request besides ids and logprobs: `routes`, the experts of every
            position (`Sample.routes`).
        alternatives: most likely ids recorded with each sampled id (`Span.alternatives`), at most
            20; engines in this process, vLLM and SGLang return them.
        progress: whether a progress bar is shown; None shows it in notebooks and where standard
            error is a terminal.

    Raises:
        UsageError: when `env` is an instance or not a factory, `tasks` are not tasks,
            `control_text` is set for another renderer, or the history is unknown; ConfigError for
            limits or rules out of range or without effect.
        TraceError: when `out` cannot be written.
    """
    if not isinstance(engine, Engine):
        what = f"of type {type(engine).__name__}"
        if isinstance(engine, str):
            what = f"the URL {engine!r:.100}"
        raise UsageError(
            f"engine is {what}, but must be an object that samples: "
            "turnwright.engines.remote.VllmEngine(URL) or SglangEngine(URL) for a server, "
            "turnwright.engines.local.LocalEngine.load(DIR) for a model directory"
        )

    if renderer is None and isinstance(engine, HasRenderer):
        renderer = engine.renderer
    if renderer is not None and control_text != "neutralise":
        raise UsageError(
            "control_text applies to the built-in renderer; pass it to load_renderer(path, "
            "control_text) instead"
        )
    renderer = renderer or byte_renderer(control_text)

    run = RunDir(out, trajectories=False) if out is not None else None
    watch = progress_listener(progress)
    counted = EpisodeProgress(watch)
    try:
        settings = RolloutSettings(
            limits=limits or Limits(),
            sampling=sampling or Sampling(),
            seed=seed,
            concurrency=concurrency,
            environments=environments,
            stop=stop,
            history=history,
            sanity=sanity,
            sanity_share=sanity_share,
            want=want,
            alternatives=alternatives,
        )
        runner = Rollout(engine, renderer, settings, run=run, on_finished=counted.finished)
        episodes = make_episode_specs(
            env, tasks, phase="rollout", step=0, samples=samples, rules=rules
        )
        episodes = await _within_prompt_limit(runner, episodes, run)
        counted.begin("rollout", len(episodes))
        return await runner.play(episodes)
    finally:
        watch.close()
        if run is not None:
            run.close()


def _blocking(function: Callable[P, Coroutine[Any, Any, T]], name: str) -> Callable[P, T]:
    """Return a function that runs a coroutine function to completion."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_sync(function(*args, **kwargs))

    run.__name__ = run.__qualname__ = name
    return run


rollout = _blocking(arollout, "rollout")
"""`arollout` for code without a running event loop, and for notebooks."""


async def _within_prompt_limit(
    runner: Rollout, episodes: list[EpisodeSpec], run: RunDir | None
) -> list[EpisodeSpec]:
    """Return the episodes whose opening prompts are within `limits.prompt_tokens`.

    Warns about skipped tasks.
    """
    limit = runner.limits.prompt_tokens
    if limit is None:
        return episodes

    # One episode of each task is measured: the first.
    first_episodes = {episode.task.id: episode for episode in reversed(episodes)}
    fitting, skipped = await runner.within_prompt_limit([*reversed(first_episodes.values())])

    if run is not None:
        run.write_json("left_out.json", left_out(limit, skipped))
    if skipped:
        warnings.warn(left_out_note(limit, skipped, listed=run is not None), stacklevel=2)
    return [episode for episode in episodes if episode.task.id in fitting]


def make_episode_specs(
    env: Callable[[], Env] | AgentFunction,
    tasks: Iterable[Task],
    *,
    phase: str,
    step: int,
    samples: int = 1,
    rules: EnvRules | None = None,
) -> list[EpisodeSpec]:
    """Return the episodes of tasks, `samples` each; equal tasks form one group with more samples.

    Raises `UsageError` as `rollout`.
    """
    if isinstance(env, str):
        spec = resolve_env(env)
        env = spec.factory or spec.agent_function

    make, play = _factory_or_agent(env)
    if rules is not None:
        check_section(rules, "tw.rollout(rules=...)")
        if play is not None:
            check_rules_of_play(rules, "tw.rollout(rules=...)")
    if isinstance(tasks, Task):
        raise UsageError("tasks must be a list of turnwright.Task objects: write tasks=[Task(...)]")

    rules = rules or EnvRules()
    max_turns = getattr(env, "max_turns", None)
    group_reward = env.group_reward if isinstance(env, HasGroupReward) else None
    episodes: list[EpisodeSpec] = []
    samples_so_far: Counter[str] = Counter()
    for task in tasks:
        if not isinstance(task, Task):
            raise UsageError(
                f"tasks must be turnwright.Task objects, not {type(task).__name__}: write "
                f"Task({task!r:.60})"
            )
        first = samples_so_far[task.id]
        for sample in range(first, first + samples):
            episodes.append(
                EpisodeSpec(
                    task=task,
                    key=EpisodeKey(phase, step, task.id, sample),
                    make=make,
                    play=play,
                    max_turns=max_turns,
                    rules=rules,
                    group_reward=group_reward,
                )
            )
        samples_so_far[task.id] += samples
    return episodes


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to completion, also under a running event loop (a notebook)."""
    try:
        asyncio.get_running_loop()
        has_running_loop = True
    except RuntimeError:
        has_running_loop = False
    return _run_in_thread(work) if has_running_loop else _run(work)


def _run(work: Coroutine[Any, Any, T]) -> T:
    results: list[T] = []

    async def main() -> None:
        # Not returned: on Ctrl-C, Python 3.11 formats the main task, and with it a returned result.
        results.append(await work)

    run_loop(main())
    return results[0]


def _run_in_thread(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a loop of its own in a thread; Ctrl-C cancels it."""
    outcome: list[Any] = []
    done = threading.Event()  # an interrupted join may regard the thread as ended
    stopped = threading.Event()
    begun: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None
        begun.append((asyncio.get_running_loop(), task))
        if stopped.is_set():
            task.cancel()
        return await work

    def target() -> None:
        try:
            outcome.append((asyncio.run(main()), None))
        except BaseException as error:
            outcome.append((None, error))
        finally:
            done.set()

    thread = threading.Thread(target=target, name="turnwright-rollout")
    try:
        thread.start()
        done.wait()
    except KeyboardInterrupt:  # the notebook's stop button
        stopped.set()
        for loop, task in begun:
            with suppress(RuntimeError):  # the loop has just closed
                loop.call_soon_threadsafe(task.cancel)
        done.wait()
        raise
    thread.join()
    result, error = outcome[0]
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _factory_or_agent(env: Any) -> tuple[Callable[[], Env] | None, AgentFunction | None]:
    if isinstance(env, Env):
        name = type(env).__name__
        raise UsageError(
            "pass the environment as a factory, not an instance: episodes run concurrently; write "
            f"env={name}"
        )
    if not callable(env):
        raise UsageError(
            "env must be an Env class, an environment factory or an async function, not "
            f"{type(env).__name__}"
        )
    if iscoroutinefunction(env) or iscoroutinefunction(type(env).__call__):
        return None, env
    return env, None
