"""Our rollouts in another trainer: what the integrations share.

`Episodes` holds an environment and its tasks. The trainer's dataset has its `rows`; for a batch of
them the integration opens a rollout once (`Episodes.open`) and plays it with the trainer's own
generate call (`Episodes.play`), by a `CallEngine` that makes a `Generation` of each reply
(`make_generation`). `trained_rows` cuts a finished episode into rows as trainers take them.

The call itself, and the format of a batch, are in `rollout.py` of each framework's folder.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

from turnwright.config.schema import EnvConfig, Limits
from turnwright.engines import Engine, Generation, Request, Sampling
from turnwright.envs import EnvSpec, resolve_env
from turnwright.envs.datasets import task_from_row
from turnwright.envs.env import Env
from turnwright.envs.resolve import as_env_spec
from turnwright.errors import BackendContractError, EngineError, UsageError
from turnwright.media import MediaStore
from turnwright.records.run_dir import RunDir
from turnwright.renderers import Renderer, load_renderer
from turnwright.renderers.vision.processors import PixelCache, pil_images
from turnwright.rollouts import EpisodeSpec, Rollout
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright.rollouts.stream import RolloutStream
from turnwright.types import EpisodeKey, FailureKind, ImageRef, MediaPlacement, Task, Trajectory
from turnwright.types.sampling import is_finite_number

TASK = "turnwright_task"
"""Key of a trainer's row that holds the id of its task."""
CONCURRENCY = 1024
"""Calls in flight by default: the trainer's servers have their own queues."""
_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)

Sample = Callable[[Request], Awaitable[Generation]]
"""Samples one reply by the generate call of a trainer."""
_SAMPLE: ContextVar[Sample] = ContextVar("turnwright_sample")


async def _no_sample(request: Request) -> Generation:
    raise UsageError("the episodes were opened without an engine, and no generate call was given")


class CallEngine:
    """Engine that samples by the call of the submission that an episode belongs to."""

    async def generate(self, request: Request) -> Generation:
        """Sample one reply."""
        return await _SAMPLE.get()(request)

    def release(self, session: str) -> None:
        """Do nothing: the trainer's engine ends its own sessions."""

    async def close(self) -> None:
        """Do nothing: the engine is the trainer's."""


def make_generation(
    request: Request,
    ids: Sequence[int],
    logprobs: Sequence[float | None] | None,
    reason: str | None,
    *,
    needs: str,
) -> Generation:
    """Make a generation of what a trainer's engine returned.

    Args:
        reason: finish reason that the engine reported: `stop`, `length`, `abort`; None where it
            does not tell the first two apart, so that fewer ids than asked for are a stop.
        needs: setting of the trainer that makes its engine return logprobs.

    Raises:
        BackendContractError: without logprobs, or when the engine stopped where
            no end token of ours is.
    """
    ids = list(ids)
    if logprobs is None or len(logprobs) != len(ids):
        have = "no" if logprobs is None else str(len(logprobs))
        raise BackendContractError(
            f"the trainer's engine returned {have} logprobs for {len(ids)} ids; set {needs}"
        )

    ended = bool(ids) and (ids[-1] in request.stop_ids or _completes_stop_text(request, ids))
    stopped = reason == "stop" or (reason is None and len(ids) < request.max_tokens)
    if stopped and ids and not ended:
        end_ids = ", ".join(map(str, sorted(request.stop_ids)[:8]))
        raise BackendContractError(
            f"the trainer's engine stopped after id {ids[-1]}, which is no end token of the "
            f"renderer ({end_ids}); add it to eos_token_id of the model's generation_config.json"
        )

    finish: Literal["stop", "length", "abort"]
    if ended:
        finish = "stop"
    elif reason == "abort" or not ids:
        finish = "abort"
    else:
        finish = "length"
    sampled_logprobs = [None if logprob is None else float(logprob) for logprob in logprobs]
    return Generation(ids, sampled_logprobs, finish, 0)


def _completes_stop_text(request: Request, ids: Sequence[int]) -> bool:
    return request.stop_text is not None and request.stop_text.first_completion(ids) == len(ids)


def sampling_of(params: Mapping[str, Any]) -> Sampling:
    """Return the sampling parameters of a trainer's engine call, for the record; -1 is no limit
    on the number of ids."""
    values: dict[str, Any] = {}
    for name in ("temperature", "top_p", "top_k", "min_p"):
        value = params.get(name)
        if value is not None:
            values[name] = value

    if "top_k" in values:
        values["top_k"] = max(int(values["top_k"]), 0)
    for name in ("temperature", "top_p", "min_p"):
        if name in values and not is_finite_number(values[name]):
            values[name] = float(values[name])

    sampling = Sampling(**values)
    fault = sampling.fault()
    if fault:
        raise UsageError(f"sampling parameters of the trainer: {fault}")
    return sampling


def renderer_of(tokenizer: Any, model: str | Path | None = None) -> Renderer:
    """Return a renderer of a trainer's tokenizer, with its chat template.

    `model` is the model's directory, for its end tokens and its vision processor; other
    names are not looked up.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        if model is not None:
            for name in _MODEL_FILES:
                source = Path(model) / name
                if source.is_file():
                    shutil.copy(source, folder)
        return load_renderer(folder)


@dataclass(frozen=True, slots=True)
class TrainedRow:
    """A row as trainers take it: a prompt, and everything after it."""

    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    """1 for the response's ids that are trained."""
    logprobs: list[float]
    """Logprobs of the response's ids, 0.0 where they were not sampled."""
    rewards: list[float]
    """Rewards by id of the response.

    They sum to the episode's reward over its rows, or to the row's own in each.
    """
    media: tuple[MediaPlacement, ...] = ()
    """Images and videos of the complete row."""

    @property
    def ids(self) -> list[int]:
        """Prompt and response."""
        return [*self.prompt_ids, *self.response_ids]

    def cut(self, length: int) -> TrainedRow:
        """Return the row with at most so many ids of response; what is cut
        off must not be trained."""
        if any(self.mask[length:]):
            over = sum(self.mask[length:])
            raise UsageError(
                f"{over} sampled ids are beyond the first {length} of the response; set "
                "limits.episode_tokens"
            )

        end = len(self.prompt_ids) + length
        return TrainedRow(
            self.prompt_ids,
            self.response_ids[:length],
            self.mask[:length],
            self.logprobs[:length],
            self.rewards[:length],
            tuple(block for block in self.media if block.end <= end),
        )


def trained_rows(trajectory: Trajectory, filler: int) -> list[TrainedRow]:
    """Return the rows of an episode, in order; the ids before a row's first
    new reply are its prompt.

    An episode without a reward, one that failed, has one row without trained ids; `filler` is its
    response where nothing was sampled, since trainers take no empty one.
    """
    seen_slots: set[tuple[int, int]] = set()
    rows: list[TrainedRow] = []
    has_reward = trajectory.reward is not None

    for row in trajectory.samples():
        new_positions = [
            position
            for position, sampled in enumerate(row.mask)
            if sampled and row.slots[position] not in seen_slots
        ]
        seen_slots.update(row.slots[position] for position in new_positions)
        start = new_positions[0] if new_positions else len(row.ids)

        mask = [int(weight > 0 and has_reward) for weight in row.weights[start:]]
        if not start or (rows and not any(mask)):
            continue  # only ids of failed attempts, or a branch that is not trained

        logprobs = [logprob or 0.0 for logprob in row.logprobs[start:]]
        rewards = [0.0] * len(mask)
        if row.token_rewards is not None and has_reward:
            rewards = row.token_rewards[start:]
        rows.append(
            TrainedRow(row.ids[:start], row.ids[start:], mask, logprobs, rewards, tuple(row.media))
        )

    with_trained_ids = [row for row in rows if any(row.mask)]
    if with_trained_ids:
        return with_trained_ids
    if rows:
        return rows[:1]
    opening = trajectory.path(0) if trajectory.spans else []
    return [TrainedRow(opening or [filler], [filler], [0], [0.0], [0.0])]


def single_row(trajectory: Trajectory, filler: int, trainer: str) -> TrainedRow:
    """Return the one row of an episode; raise `UsageError` where there are several."""
    rows = trained_rows(trajectory, filler)
    if len(rows) > 1:
        branches = dict(trajectory.branches)
        raise UsageError(
            f"{trajectory.key}: an episode of {len(rows)} rows (branches: {branches}); {trainer} "
            'takes one for each prompt. Use history = "append" with a template that keeps earlier '
            "turns, or train with turnwright.train"
        )
    return rows[0]


def episode_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean number of turns, and the share of episodes by status, for a trainer's log."""
    turns = sum(len(trajectory.turns) for trajectory in trajectories)
    metrics = {"turnwright/turns": turns / max(len(trajectories), 1)}

    stops = [trajectory.stop for trajectory in trajectories if trajectory.stop]
    statuses = Counter(str(stop.status.value) for stop in stops)
    for status, count in statuses.items():
        metrics[f"turnwright/{status}"] = count / len(trajectories)
    return metrics


class _SharedStream:
    """The stream of an event loop, open while anything is played on it."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self._lock = asyncio.Lock()
        self._users = 0
        self.stream: RolloutStream | None = None

    @asynccontextmanager
    async def use(self) -> AsyncIterator[RolloutStream]:
        """Open the stream with its first user, close it with its last."""
        async with self._lock:
            if self.stream is None:
                self.stream = await RolloutStream(self._rollout).__aenter__()
            self._users += 1
        try:
            yield self.stream
        finally:
            self._users -= 1
            async with self._lock:
                if not self._users and self.stream is not None:
                    stream, self.stream = self.stream, None
                    await stream.__aexit__(None, None, None)


class Episodes:
    """An environment with its tasks, played in another trainer."""

    def __init__(
        self,
        env: str | EnvSpec | Callable[[], Env] | Callable[..., Any],
        tasks: Sequence[Task] | None = None,
        *,
        n_tasks: int = 256,
        n_eval: int = 0,
        seed: int = 0,
        args: Mapping[str, Any] | None = None,
        limits: Limits | Mapping[str, Any] | None = None,
        renderer: Renderer | None = None,
        out: str | Path | None = None,
        **rollout: Any,
    ) -> None:
        """Prepare an environment; nothing is played yet.

        Args:
            env: a built-in name, `file.py:Name` or `framework:id`, an `Env` class, a
                factory, or an agent function.
            tasks: training tasks; by default `n_tasks` of the environment's, drawn by `seed`.
            n_tasks: number of tasks to draw.
            n_eval: number of held-out tasks to draw.
            seed: seed of tasks and episodes.
            args: arguments of an environment given by name.
            limits: limits of every episode; by default those that the trainer's lengths imply.
            renderer: renderer of the model; by default made of the trainer's tokenizer.
            out: directory in which every turn is recorded, by process.
            rollout: further settings of episodes (`RolloutSettings`), such as `stop` or `history`.

        Raises:
            ConfigError: for an environment that cannot be used.
        """
        if isinstance(env, str):
            self.spec = resolve_env(EnvConfig(use=env, args=args or {}))
        else:
            self.spec = as_env_spec(env, args=args)
        self.seed = seed
        self.limits = limits
        self.renderer = renderer
        self.last: list[Trajectory] = []
        """Trajectories of the last call."""
        self._out = out
        self._rollout_settings = rollout

        self._training_tasks = tasks
        self._task_counts = {"train": n_tasks, "eval": n_eval}
        self._tasks_by_split: dict[str, dict[str, Task]] = {}
        self._samples: Counter[tuple[str, int, str]] = Counter()
        """Episodes so far of each task, by phase and step."""

        self._rollout: Rollout | None = None
        # A stream belongs to one event loop; a trainer may play on several.
        self._streams: WeakKeyDictionary[asyncio.AbstractEventLoop, _SharedStream] = (
            WeakKeyDictionary()
        )

    @property
    def tasks(self) -> dict[str, Task]:
        """The training tasks by id."""
        return self.tasks_of("train")

    def tasks_of(self, split: str) -> dict[str, Task]:
        """Return the tasks of `train` or `eval` by id."""
        if split not in self._tasks_by_split:
            tasks = self._training_tasks if split == "train" else None
            if tasks is None:
                count = self._task_counts[split]
                tasks = self.spec.tasks(split, count, self.seed) if count else ()
            self._tasks_by_split[split] = {task.id: task for task in tasks}
        return self._tasks_by_split[split]

    def rows(self, split: str = "train") -> list[dict[str, Any]]:
        """Return the rows of the trainer's dataset: for each task its id, and a prompt for
        the trainer's tables."""
        tasks = self.tasks_of(split)
        return [{"prompt": prompt_of(task), TASK: task_id} for task_id, task in tasks.items()]

    def task_of(self, row: Mapping[str, Any], where: str) -> Task:
        """Return the task that a trainer's row names; for a row of another dataset the
        task that its columns hold.

        Raises:
            UsageError: for an id that no task has; TaskError for a row without a prompt.
        """
        task_id = row.get(TASK)
        if task_id is None:
            return task_from_row(row, where)

        task = self.tasks.get(str(task_id)) or self.tasks_of("eval").get(str(task_id))
        if task is None:
            raise UsageError(
                f"{where}: {TASK} = {str(task_id)!r} is no task; give the n_tasks, n_eval and "
                "seed that the rows were made with"
            )
        return task

    def episode(
        self, task: Task, *, phase: str = "train", step: int = 0, sample: int | None = None
    ) -> EpisodeSpec:
        """Return an episode to play; without a number of its own it is the
        next sample of its task."""
        if sample is None:
            counter_key = (phase, step, task.id)
            sample = self._samples[counter_key]
            self._samples[counter_key] += 1

        spec = self.spec
        return EpisodeSpec(
            task,
            EpisodeKey(phase, step, task.id, sample),
            spec.factory,
            spec.agent_function,
            spec.max_turns,
            spec.rules,
            spec.group_reward,
        )

    def open(
        self,
        tokenizer: Any,
        model: str | Path | None,
        *,
        engine: Callable[[Renderer], Engine] | None = None,
        groups: bool = False,
        **lengths: int | None,
    ) -> Rollout:
        """Return the rollout; the first call makes it, with the trainer's tokenizer and
        lengths where none were given.

        `engine` makes an engine of ours, which samples in place of the trainer's; `groups` if the
        trainer asks for all episodes of a task at once.
        """
        if self._rollout is not None:
            return self._rollout

        if self.spec.group_reward is not None and not groups:
            raise UsageError(
                f"{self.spec.name}: group_reward compares episodes, and this trainer asks for "
                "each alone"
            )
        self.renderer = self.renderer or renderer_of(tokenizer, model)

        limits = self.limits
        if not isinstance(limits, Limits):
            trainer_limits = {key: length for key, length in lengths.items() if length is not None}
            limits = Limits(**{**trainer_limits, **(limits or {})})
        self.limits = limits

        run = None
        if self._out is not None:
            run = RunDir(Path(self._out) / str(os.getpid()), trajectories=False)

        defaults: dict[str, Any] = {"stop_on_bugs": True}
        if engine is None:
            defaults["concurrency"] = CONCURRENCY
        sampler = CallEngine() if engine is None else engine(self.renderer)
        settings = RolloutSettings(
            limits=limits, seed=self.seed, **{**defaults, **self._rollout_settings}
        )
        self._rollout = Rollout(sampler, self.renderer, settings, run=run)
        return self._rollout

    async def play(
        self, episodes: Sequence[EpisodeSpec], sample: Sample | None, sampling: Sampling
    ) -> list[Trajectory]:
        """Play episodes with replies of `sample`, after `open`; None where
        that was given an engine.

        Raises:
            EngineError: when the trainer's engine failed, which is the trainer's to handle.
            RepeatedUserError: when the same bug in user code broke episodes of several tasks.
        """
        assert self._rollout is not None
        shared = self._streams.setdefault(asyncio.get_running_loop(), _SharedStream(self._rollout))
        async with shared.use() as stream:
            # The submission's tasks copy the context, so each submission samples by its own call.
            token = _SAMPLE.set(sample or _no_sample)
            try:
                submission = stream.submit(episodes, sampling=sampling)
            finally:
                _SAMPLE.reset(token)
            trajectories = await submission

        for trajectory in trajectories:
            if trajectory.error is not None and trajectory.error.kind == FailureKind.ENGINE:
                raise EngineError(f"{trajectory.key}: {trajectory.error.message}")
        self.last = trajectories
        return trajectories

    @property
    def pixels(self) -> PixelCache | None:
        """Preprocessed images of the episodes; None for a text-only model."""
        return None if self._rollout is None else self._rollout.pixels

    @property
    def media(self) -> MediaStore:
        """Images of the episodes."""
        assert self._rollout is not None
        return self._rollout.media_intake.store


def prompt_of(task: Task) -> list[dict[str, str]]:
    """Return the messages of a task as text, for a trainer's tables and length filters; its
    id where it has none."""
    messages = [
        {"role": message.role, "content": message.text} for message in task.messages if message.text
    ]
    return messages or [{"role": "user", "content": task.id}]


def images_of(placed: Sequence[MediaPlacement], trainer: str) -> list[ImageRef]:
    """Return the images among ids, in order; raise `UsageError` for videos."""
    images = [block.media for block in placed if isinstance(block.media, ImageRef)]
    if len(images) < len(placed):
        raise UsageError(f"{trainer} takes no videos from Turnwright; give their frames as images")
    return images


def pictures(placed: Sequence[MediaPlacement], store: MediaStore, trainer: str) -> list[Any]:
    """Return the images among ids as Pillow images, in order; raise `UsageError` for videos."""
    return [picture for image in images_of(placed, trainer) for picture in pil_images(image, store)]
