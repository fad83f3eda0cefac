"""`turnwise.rollout`: environment in, trajectories out; no trainer needed."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any, TypeVar

from turnwise.config import EnvRules, Limits
from turnwise.config.constraints import check_rules_of_play, check_section
from turnwise.engines import Engine, HasRenderer, Sampling
from turnwise.envs import Env
from turnwise.envs.base import HasGroupReward
from turnwise.errors import UsageError
from turnwise.records import RunDir
from turnwise.renderers import Renderer, byte_renderer
from turnwise.renderers.control_text import ControlText
from turnwise.renderers.history import History
from turnwise.rollouts.agent_function import AgentFunction
from turnwise.rollouts.render_check import SHARE, Sanity
from turnwise.rollouts.runner import EpisodeSpec, Rollout, left_out, left_out_note
from turnwise.types import EpisodeKey, Task, Trajectory

T = TypeVar("T")


def rollout(
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
    control_text: ControlText = "neutralise",
    out: str | Path | None = None,
    stop: Sequence[str] = (),
    history: History = "append",
    rules: EnvRules | None = None,
    sanity: Sanity = "strict",
    sanity_share: float = SHARE,
    want: Sequence[str] = (),
) -> list[Trajectory]:
    """Play episodes and return their trajectories, `samples` per task, in the order of the tasks.

    Args:
        env: an `Env` class, another factory of environments, or a play function `async def play(task, model) -> reward`.
        tasks: what to do.
        engine: what samples.
        samples: episodes per task.
        renderer: of the engine's model; the engine's own when it has one, else the built-in byte-level ChatML.
        limits: of every episode; tasks over `limits.prompt_tokens` are left out, with a warning and in `out`/left_out.json.
        sampling: the distribution to sample from.
        seed: names all noise: the same seed gives the same episodes in whatever order they run.
        concurrency: most episodes at once.
        control_text: what becomes of control text in messages, `neutralise`, `reject` or `allow`, where the built-in renderer
            is used; any other has its own setting.
        out: a directory where every turn is written down before the next begins; nothing is written when None.
        stop: texts that end a reply, beside the model's end tokens; its text is cut right behind, its ids stay as sampled.
        history: what a prompt shows of earlier turns: `append`; `inline` (what an environment says stands inside the
            model's own message); `template`; a policy of one's own (a function of the conversation and the indices of the
            model's replies), or one by name (`drop_reasoning:2`, `file.py:policy`).
        rules: what becomes of the model's mistakes and the world's failures: retries, asking again, a process of its own.
        sanity: whether finished episodes are compared with a full render (`strict`, `ignore_strippable`, `off`); the first
            difference is a warning, all are counted in `trajectory.metrics`.
        sanity_share: share of the episodes that are compared, chosen by their keys; 1 compares every one.
        want: what the engine is asked for beside ids and logprobs: `routes`, the experts of every position (`Sample.routes`).

    Raises:
        UsageError: when `env` is an instance, or no factory at all, or `tasks` are no tasks, or `control_text` is another's, or
            there is no such history; ConfigError for limits or rules out of their range, or that have no effect.
        TraceError: when `out` cannot be written.
    """
    return run_sync(
        arollout(
            env,
            tasks,
            engine,
            samples=samples,
            renderer=renderer,
            limits=limits,
            sampling=sampling,
            seed=seed,
            concurrency=concurrency,
            control_text=control_text,
            out=out,
            stop=stop,
            history=history,
            rules=rules,
            sanity=sanity,
            sanity_share=sanity_share,
            want=want,
        )
    )


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
    control_text: ControlText = "neutralise",
    out: str | Path | None = None,
    stop: Sequence[str] = (),
    history: History = "append",
    rules: EnvRules | None = None,
    sanity: Sanity = "strict",
    sanity_share: float = SHARE,
    want: Sequence[str] = (),
) -> list[Trajectory]:
    """`rollout` for code that has an event loop already."""
    renderer = renderer or (engine.renderer if isinstance(engine, HasRenderer) else None)
    if renderer is not None and control_text != "neutralise":
        raise UsageError("control_text is of the built-in renderer; give it to load_renderer(path, control_text) instead")
    renderer = renderer or byte_renderer(control_text)
    run = RunDir(out) if out is not None else None
    try:
        runner = Rollout(
            engine,
            renderer,
            limits=limits,
            sampling=sampling,
            seed=seed,
            concurrency=concurrency,
            run=run,
            records=False,
            stop=stop,
            history=history,
            sanity=sanity,
            sanity_share=sanity_share,
            want=want,
        )
        rows = make_episode_specs(env, tasks, phase="rollout", step=0, samples=samples, rules=rules)
        return await runner.play(await _within_prompt_limit(runner, rows, run))
    finally:
        if run is not None:
            run.close()


async def _within_prompt_limit(runner: Rollout, rows: list[EpisodeSpec], run: RunDir | None) -> list[EpisodeSpec]:
    """Return the episodes whose opening prompts are within `limits.prompt_tokens`; warn of the tasks that are left out."""
    most = runner.limits.prompt_tokens
    if most is None:
        return rows
    fits, out = await runner.within_prompt_limit(list({row.task.id: row for row in reversed(rows)}.values())[::-1])
    if run is not None:
        run.write_json("left_out.json", left_out(most, out))
    if out:
        warnings.warn(left_out_note(most, out, listed=run is not None), stacklevel=2)
    return [row for row in rows if row.task.id in fits]


def make_episode_specs(
    env: Callable[[], Env] | AgentFunction,
    tasks: Iterable[Task],
    *,
    phase: str,
    step: int,
    samples: int = 1,
    rules: EnvRules | None = None,
) -> list[EpisodeSpec]:
    """The episodes of tasks, `samples` each; equal tasks are one group of so many more samples.

    Raises:
        UsageError: as `rollout`.
    """
    make, play = _what(env)
    if rules is not None:
        check_section(rules, "tw.rollout(rules=...)")
        if play is not None:
            check_rules_of_play(rules, "tw.rollout(rules=...)")
    if isinstance(tasks, Task):
        raise UsageError("tasks are a list of turnwise.Task objects: write tasks=[Task(...)]")
    group_reward = env.group_reward if isinstance(env, HasGroupReward) else None
    rows: list[EpisodeSpec] = []
    seen: Counter[str] = Counter()
    for task in tasks:
        if not isinstance(task, Task):
            raise UsageError(f"tasks are turnwise.Task objects, not {type(task).__name__}: write Task({task!r:.60})")
        for sample in range(seen[task.id], seen[task.id] + samples):
            key = EpisodeKey(phase, step, task.id, sample)
            rows.append(
                EpisodeSpec(
                    task,
                    key,
                    make,
                    play,
                    getattr(env, "max_turns", None),
                    rules or EnvRules(),
                    group_reward,
                )
            )
        seen[task.id] += samples
    return rows


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also where an event loop is running already (a notebook)."""
    return _in_thread(work) if _loop_runs() else _here(work)


def _here(work: Coroutine[Any, Any, T]) -> T:
    found: list[T] = []

    async def main() -> None:
        # In a box: where the loop gives Ctrl-C back, Python 3.11 spells out the main task, and with it all that it returned.
        found.append(await work)

    asyncio.run(main())
    return found[0]


def _loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _in_thread(work: Coroutine[Any, Any, T]) -> T:
    box: list[Any] = []
    done = threading.Event()  # a join that was interrupted may take the thread for ended
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
            box.append((asyncio.run(main()), None))
        except BaseException as error:
            box.append((None, error))
        finally:
            done.set()

    thread = threading.Thread(target=target, name="turnwise-rollout")
    try:
        thread.start()
        done.wait()
    except KeyboardInterrupt:  # the notebook's stop button: the work ends too
        stopped.set()
        for loop, task in begun:
            with suppress(RuntimeError):  # it ended just now
                loop.call_soon_threadsafe(task.cancel)
        done.wait()
        raise
    thread.join()
    result, error = box[0]
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _what(env: Any) -> tuple[Callable[[], Env] | None, AgentFunction | None]:
    if isinstance(env, Env):
        name = type(env).__name__
        raise UsageError(f"give the environment as a factory, not an instance: episodes run side by side; write env={name}")
    if not callable(env):
        raise UsageError(f"env is an Env class, a factory of environments or an async play function, not {type(env).__name__}")
    if iscoroutinefunction(env) or iscoroutinefunction(type(env).__call__):
        return None, env
    return env, None
