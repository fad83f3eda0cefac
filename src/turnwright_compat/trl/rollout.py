"""Our rollouts in `trl.GRPOTrainer`, as its `rollout_func`.

TRL keeps its trainer, its loss and its logging; environments, token-exact contexts,
failures and records are ours::

    play = TurnwrightRollout("hop", n_tasks=256)
    trainer = GRPOTrainer(
        model,
        turnwright_reward,
        args,
        train_dataset=play.dataset(),
        processing_class=tokenizer,
        rollout_func=play,
    )
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from turnwright.engines import Engine, Sampling, SupportsWeightUpdate
from turnwright.engines.local import LocalEngine
from turnwright.envs import EnvSpec
from turnwright.envs.env import Env
from turnwright.errors import UsageError
from turnwright.renderers import Renderer
from turnwright.rollouts import run_sync
from turnwright.training.model.lora import Adapter
from turnwright.training.model.weight_export import Weights, unique_weights
from turnwright.types import Task, Trajectory
from turnwright_compat.episodes import TASK, Episodes, episode_metrics, prompt_of, single_row

__all__ = ["TASK", "TurnwrightRollout", "turnwright_reward"]


class TurnwrightRollout(Episodes):
    """Rollout function of `trl.GRPOTrainer`: plays episodes with the trainer's current weights.

    One row for each prompt: the ids of an episode, with `env_mask` 1 on sampled ids alone. Use
    `turnwright_reward` as a reward function. `last` has the trajectories of the last call, in
    the order of its prompts.
    """

    def __init__(
        self,
        env: str | EnvSpec | Callable[[], Env] | Callable[..., Any],
        tasks: Sequence[Task] | None = None,
        *,
        engine: Engine | None = None,
        **given: Any,
    ) -> None:
        """Prepare a rollout function; the engine is made at its first call.

        Args:
            engine: engine that samples; by default a `LocalEngine`, which copies the trainer's
                weights before each call. One of your own gets the weights by `update`.

        The others are those of `Episodes`.

        Raises:
            ConfigError: for an environment or a task that cannot be used.
        """
        super().__init__(env, tasks, **given)
        self._engine = engine
        self._calls = 0
        self.tasks_of("train")  # tasks that cannot be used are an error here

    def rows(self, split: str = "train") -> list[dict[str, Any]]:
        """Return the rows of TRL's `train_dataset`: for each task a prompt that names it.

        The environment opens the episode.
        """
        rows = []
        for task_id, task in self.tasks_of(split).items():
            text = prompt_of(task)[-1]["content"]
            rows.append({"prompt": [{"role": "user", "content": text, TASK: task_id}]})
        return rows

    def dataset(self) -> Any:
        """Return `rows` as a `datasets.Dataset`."""
        from datasets import Dataset

        return Dataset.from_list(self.rows())

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Play an episode for each prompt; TRL repeats a prompt as often as it wants samples.

        Raises:
            UsageError: for a prompt that is not from `dataset`, or an episode of several rows.
        """
        run_sync(self._play([self._named(prompt) for prompt in prompts], trainer))
        columns: dict[str, list[Any]] = {
            "prompt_ids": [],
            "completion_ids": [],
            "logprobs": [],
            "env_mask": [],
            "turnwright_trajectory": [],
        }
        for trajectory in self.last:
            prompt_ids, ids, logprobs, mask = _row(trajectory, trainer)
            columns["prompt_ids"].append(prompt_ids)
            columns["completion_ids"].append(ids)
            columns["logprobs"].append(logprobs)
            columns["env_mask"].append(mask)
            columns["turnwright_trajectory"].append(trajectory)
        return columns

    def _named(self, prompt: Any) -> Task:
        """Return the task that a prompt of `rows` names."""
        name = None
        if isinstance(prompt, list) and prompt and isinstance(prompt[-1], Mapping):
            name = prompt[-1].get(TASK)
        if name not in self.tasks:
            raise UsageError(
                "a prompt names no task of this rollout; pass train_dataset=play.dataset() to the "
                "trainer"
            )
        return self.tasks[name]

    async def _play(self, tasks: Sequence[Task], trainer: Any) -> list[Trajectory]:
        model = trainer.accelerator.unwrap_model(trainer.model)
        self.open(
            trainer.processing_class,
            None,
            engine=lambda renderer: self._engine_of(model, renderer),
            groups=True,
        )
        if isinstance(self._engine, SupportsWeightUpdate):
            await self._engine.update(_weights(model), trainer.state.global_step + 1)

        args = trainer.args
        sampling = Sampling(
            temperature=args.temperature, top_p=args.top_p, top_k=max(args.top_k or 0, 0)
        )
        phase = "train" if trainer.model.training else "eval"
        # Processes of the trainer play different samples of one task.
        first_sample = int(trainer.accelerator.process_index) * len(tasks)
        samples: Counter[str] = Counter()
        episodes = []
        for task in tasks:
            sample = first_sample + samples[task.id]
            episodes.append(self.episode(task, phase=phase, step=self._calls, sample=sample))
            samples[task.id] += 1
        self._calls += 1
        return await self.play(episodes, None, sampling)

    def _engine_of(self, model: Any, renderer: Renderer) -> Engine:
        if self._engine is None:
            self._engine = LocalEngine(
                model.config, renderer=renderer, device=model.device, dtype=model.dtype
            )
        return self._engine


def turnwright_reward(
    completions: Sequence[Any],
    turnwright_trajectory: Sequence[Trajectory],
    log_metric: Any = None,
    **_: Any,
) -> list[float | None]:
    """Return the episodes' rewards, as a reward function of TRL; None, which TRL leaves
    out, for one that failed."""
    if log_metric is not None:
        for name, value in episode_metrics(turnwright_trajectory).items():
            log_metric(name, value)
    return [
        None if trajectory.error is not None else trajectory.reward
        for trajectory in turnwright_trajectory
    ]


def _weights(model: Any) -> Weights:
    """Return the weights of a model by the names that it has without adapters, which are merged."""
    plain = model.get_base_model() if hasattr(model, "peft_config") else model
    weights = unique_weights(plain, copy=True)
    return weights if plain is model else Adapter(plain).merge(weights)


def _row(
    trajectory: Trajectory, trainer: Any
) -> tuple[list[int], list[int], list[float], list[int]]:
    """Return the ids of the prompt, and ids, logprobs and mask of what followed."""
    row = single_row(trajectory, trainer.processing_class.eos_token_id, "TRL")
    if row.media:
        raise UsageError(
            f"{trajectory.key}: TRL's rollout_func takes no images; train with turnwright.train"
        )
    return row.prompt_ids, row.response_ids, row.logprobs, row.mask
