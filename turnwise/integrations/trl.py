"""Our rollouts in `trl.GRPOTrainer`, as its `rollout_func`.

TRL keeps its trainer, its loss and its logging; environments, token-exact contexts, failures and records are ours::

    play = TurnwiseRollout("hop", n_tasks=256)
    trainer = GRPOTrainer(
        model, turnwise_reward, args, train_dataset=play.dataset(), processing_class=tokenizer, rollout_func=play
    )
"""

from __future__ import annotations

import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.config.schema import EnvRules, Limits
from turnwise.engines import Engine, Sampling, SupportsWeightUpdate
from turnwise.engines.local import LocalEngine
from turnwise.envs import EnvSpec, resolve_env
from turnwise.envs.base import Env
from turnwise.envs.resolve import as_env_spec
from turnwise.errors import UsageError
from turnwise.records.run_dir import RunDir
from turnwise.renderers import Renderer, load_renderer
from turnwise.rollouts import EpisodeSpec, Rollout, run_sync
from turnwise.training.model.lora import Adapter
from turnwise.training.model.weights import Weights, clone_tensors, tied_names
from turnwise.types import EpisodeKey, Task, Trajectory

TASK = "turnwise_task"
"""Key of a prompt's last message that holds the id of its task: TRL hands a rollout function prompts, and no other column."""


class TurnwiseRollout:
    """Rollout function of `trl.GRPOTrainer`: plays episodes with the trainer's current weights.

    One row for each prompt: the ids of an episode, with `env_mask` 1 on sampled ids alone. Use `turnwise_reward` as a reward
    function. `last` has the trajectories of the last call, in the order of its prompts.
    """

    def __init__(
        self,
        env: str | EnvSpec | Callable[[], Env] | Callable[..., Any],
        tasks: Sequence[Task] | None = None,
        *,
        n_tasks: int = 256,
        seed: int = 0,
        limits: Limits | None = None,
        renderer: Renderer | None = None,
        engine: Engine | None = None,
        out: str | Path | None = None,
        **rollout: Any,
    ) -> None:
        """Prepare a rollout function; the engine is made at its first call.

        Args:
            env: a built-in name or `file.py:Name`, an `Env` class, a factory, or an agent function.
            tasks: training tasks; by default `n_tasks` of the environment's, drawn by `seed`.
            n_tasks: number of tasks to draw.
            seed: seed of tasks and of sampling.
            limits: limits of every episode.
            renderer: renderer of the model; by default made of the trainer's `processing_class`.
            engine: engine that samples; by default a `LocalEngine`, which copies the trainer's weights before each call. One of
                your own gets the weights by `update`.
            out: directory in which every turn is recorded.
            rollout: further arguments of `turnwise.rollouts.Rollout`, such as `stop` or `concurrency`.

        Raises:
            ConfigError: for an environment or a task that cannot be used.
        """
        self.spec = resolve_env(env) if isinstance(env, str) else as_env_spec(env)
        self.tasks = {task.id: task for task in (self.spec.tasks("train", n_tasks, seed) if tasks is None else tasks)}
        self.last: list[Trajectory] = []
        self._limits, self._renderer, self._engine = limits or Limits(), renderer, engine
        self._seed, self._out, self._arguments = seed, out, rollout
        self._rollout: Rollout | None = None
        self._calls = 0

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of TRL's `train_dataset`: for each task a prompt that names it. The environment opens the episode."""
        return [{"prompt": [{"role": "user", "content": _text(task), TASK: name}]} for name, task in self.tasks.items()]

    def dataset(self) -> Any:
        """Return `rows` as a `datasets.Dataset`."""
        from datasets import Dataset

        return Dataset.from_list(self.rows())

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Play an episode for each prompt; TRL repeats a prompt as often as it wants samples.

        Raises:
            UsageError: for a prompt that is not from `dataset`, or an episode of several rows.
        """
        self.last = run_sync(self._play([self._task_of(prompt) for prompt in prompts], trainer))
        found: dict[str, list[Any]] = {
            name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "turnwise_trajectory")
        }
        for trajectory in self.last:
            prompt_ids, ids, logprobs, mask = _row(trajectory, trainer)
            for name, value in zip(found, (prompt_ids, ids, logprobs, mask, trajectory), strict=True):
                found[name].append(value)
        return found

    def _task_of(self, prompt: Any) -> Task:
        name = prompt[-1].get(TASK) if isinstance(prompt, list) and prompt and isinstance(prompt[-1], Mapping) else None
        if name not in self.tasks:
            raise UsageError("a prompt names no task of this rollout; pass train_dataset=play.dataset() to the trainer")
        return self.tasks[name]

    async def _play(self, tasks: Sequence[Task], trainer: Any) -> list[Trajectory]:
        model = trainer.accelerator.unwrap_model(trainer.model)
        if self._rollout is None:
            self._rollout = self._open(model, trainer)
        if isinstance(self._engine, SupportsWeightUpdate):
            await self._engine.update(_weights(model), trainer.state.global_step + 1)
        args, phase = trainer.args, "train" if trainer.model.training else "eval"
        sampling = Sampling(temperature=args.temperature, top_p=args.top_p, top_k=max(args.top_k or 0, 0))
        samples: dict[str, int] = {}
        episodes, rules = [], EnvRules()
        for task in tasks:
            sample = samples[task.id] = samples.get(task.id, -1) + 1
            rank = int(trainer.accelerator.process_index)
            key = EpisodeKey(phase, self._calls, task.id, sample + rank * len(tasks))
            spec = self.spec
            episodes.append(EpisodeSpec(task, key, spec.factory, spec.agent_function, spec.max_turns, rules, spec.group_reward))
        self._calls += 1
        async with self._rollout.stream() as stream:
            return await stream.submit(episodes, sampling=sampling)

    def _open(self, model: Any, trainer: Any) -> Rollout:
        if self._renderer is None:
            with tempfile.TemporaryDirectory() as folder:
                trainer.processing_class.save_pretrained(folder)
                self._renderer = load_renderer(folder)
        if self._engine is None:
            self._engine = LocalEngine(model.config, renderer=self._renderer, device=model.device, dtype=model.dtype)
        run = None if self._out is None else RunDir(self._out)
        return Rollout(
            self._engine, self._renderer, limits=self._limits, seed=self._seed, run=run, records=False, **self._arguments
        )


def turnwise_reward(
    completions: Sequence[Any], turnwise_trajectory: Sequence[Trajectory], log_metric: Any = None, **_: Any
) -> list[float | None]:
    """Return the episodes' rewards, as a reward function of TRL; None, which TRL leaves out, for one that failed."""
    if log_metric is not None:
        log_metric("turnwise/turns", statistics.fmean(len(t.turns) for t in turnwise_trajectory))
        for status, count in Counter(str(t.stop.status.value) for t in turnwise_trajectory if t.stop).items():
            log_metric(f"turnwise/{status}", count / len(turnwise_trajectory))
    return [None if t.error is not None else t.reward for t in turnwise_trajectory]


def _text(task: Task) -> str:
    """Return the last message of a task for TRL's tables; its id where the environment writes the messages."""
    return task.messages[-1].text if task.messages else task.id


def _weights(model: Any) -> Weights:
    """Return the weights of a model by the names that it has without adapters, which are merged."""
    plain = model.get_base_model() if hasattr(model, "peft_config") else model
    weights = clone_tensors(plain, tied_names(plain))
    return weights if plain is model else Adapter(plain).merge(weights)


def _row(trajectory: Trajectory, trainer: Any) -> tuple[list[int], list[int], list[float], list[int]]:
    """Return the ids of the prompt, and ids, logprobs and mask of what followed.

    An episode that failed before it sampled anything has one id, which is not trained: TRL takes no empty completion.
    """
    rows = list(trajectory.samples())
    if len(rows) > 1:
        raise UsageError(
            f"{trajectory.key}: an episode of {len(rows)} rows (branches: {dict(trajectory.branches)}); TRL takes one for each "
            'prompt. Use history = "append" with a template that keeps earlier turns, or train with turnwise.train'
        )
    if not rows or not trajectory.turns:
        ids = list(rows[0].ids) if rows else [trainer.processing_class.eos_token_id]
        return ids, [trainer.processing_class.eos_token_id], [0.0], [0]
    row, start = rows[0], trajectory.turns[0].context
    if row.media:
        raise UsageError(f"{trajectory.key}: TRL's rollout_func takes no images; train with turnwise.train")
    logprobs = [logprob or 0.0 for logprob in row.logprobs[start:]]
    return list(row.ids[:start]), list(row.ids[start:]), logprobs, [int(weight > 0) for weight in row.weights[start:]]
