"""ms-swift: schedulers (`MultiTurnScheduler`, by class or registered name), Gym
environments, and rewards by name.

`adapt` decides which of these a recipe names, and reads `[env.args]`: flags of ms-swift and
arguments of the scheduler. `SchedulerEpisodes` runs the scheduler once an episode, over the engine
of `engine.py`, and asks the rewards. What user code imports of ms-swift is in `stand_ins.py`;
launch scripts are converted in `convert.py`.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from turnwright.envs.datasets import MEDIA_COLUMNS
from turnwright.envs.env import Scores
from turnwright.envs.foreign import ForeignObject, Framework, Registered, refuse_faithful
from turnwright.envs.resolve import load_named
from turnwright.envs.user_code import as_number, describe_value, load_user_module, number_of
from turnwright.envs.user_imports import STAND_INS, import_foreign, public_name
from turnwright.errors import ConfigError, EnvError, LimitReached, did_you_mean, suggest_or_list
from turnwright.types import Message, Task
from turnwright_compat.common import TrainerState, attribute_config, derives_from
from turnwright_compat.swift.engine import PROTOCOL, Episode, InferEngine, given_image, set_weights
from turnwright_compat.swift.scales import LossScales

OWN = (
    "external_plugins",
    "reward_funcs",
    "reward_weights",
    "gym_env",
    "use_gym_env",
    "system",
    "loss_scale",
)
"""`[env.args]` that are flags of ms-swift; others are arguments of the scheduler."""
REWARD_DEFAULTS: dict[str, Any] = {
    "cosine_min_len_value_wrong": -0.5,
    "cosine_max_len_value_wrong": 0.0,
    "cosine_min_len_value_correct": 1.0,
    "cosine_max_len_value_correct": 0.5,
    "repetition_n_grams": 3,
    "repetition_max_penalty": -1.0,
}
"""Defaults of flags that the registered rewards read from their `args`."""
SCHEDULERS = ("multi_turns", "swift.rollout.multi_turn")
"""Registry of schedulers, and the module that has it."""
MEDIA = ("images", "audios", "videos")
"""Lists of a request; one that `rollout_infos` has replaces the row's for the reward."""


def adapt(found: ForeignObject) -> SchedulerEpisodes | None:
    """Make an agent function of a scheduler, of a registered name, or of a Gym environment."""
    target = found.target
    args = dict(found.args)
    is_environment = derives_from(target, "swift", "Env")
    registered_name = target.id if isinstance(target, Registered) else None
    if registered_name is None and not _is_scheduler(target) and not is_environment:
        return None

    refuse_faithful(found)
    _load_plugins(args, found)
    if registered_name is not None:
        target = _registered(*SCHEDULERS, registered_name, found.where)
    elif is_environment:
        _registry("envs", "swift.rollout.gym_env")[target.__name__] = target
        args.setdefault("gym_env", target.__name__)
        target = _registered(*SCHEDULERS, "gym_scheduler", found.where)
    scheduler = _complete(target, found.where)
    _check_hooks(scheduler, found.where)
    _check_flags(args, scheduler, found)

    rewards = _rewards(args, found)
    scales = _scales(args, found)
    environment_weight = _environment_weight(scheduler, args, rewards)
    return SchedulerEpisodes(scheduler, args, rewards, scales, environment_weight)


def _check_hooks(scheduler: Any, where: str) -> None:
    """Raise `ConfigError` where ms-swift could not call what a scheduler has, or lacks."""
    missing = sorted(getattr(scheduler, "__abstractmethods__", ()))
    own_run = not _is_base(scheduler.run)
    if missing or (not own_run and _is_base(getattr(scheduler, "step", None))):
        raise ConfigError(
            f"{where} lacks {' and '.join(missing) or 'step'}; a scheduler has step, or its own run"
        )

    # A run of the class's own calls its hooks as it likes.
    hooks = [("run", 2)] if own_run else [("step", 3), ("check_finished", 3), ("run", 2)]
    for hook, count in hooks:
        try:
            if hasattr(scheduler, hook):
                inspect.signature(getattr(scheduler, hook)).bind(*range(count + 1))
        except TypeError as error:
            raise ConfigError(
                f"{where}.{hook}: {error}; ms-swift calls it with {count} arguments"
            ) from None


def _is_scheduler(target: Any) -> bool:
    """Whether a class is a scheduler by base class, or by the arguments of its `step`."""
    if derives_from(target, "swift", "RolloutScheduler"):
        return True
    if not inspect.isclass(target):
        return False

    # As it stands in the class, so that a static or class method is none.
    steps = (vars(base)["step"] for base in target.__mro__ if "step" in vars(base))
    step = next(steps, None)
    if not inspect.isfunction(step):
        return False
    names = list(inspect.signature(step).parameters)[1:4]
    return len(names) == 3 and names[0] == "infer_request" and names[2] == "current_turn"


def _complete(target: Any, where: str) -> Any:
    """Return a scheduler class; one without ms-swift's base, such as the one that its guide of
    3.6 prints, gets ours."""
    if derives_from(target, "swift", "RolloutScheduler"):
        return target
    base = importlib.import_module(f"{STAND_INS}.swift.rollout.multi_turn").MultiTurnScheduler
    return type(
        target.__name__,
        (target, base),
        {"__module__": target.__module__, "__doc__": target.__doc__},
    )


def _is_base(method: Any) -> bool:
    """Whether a method is that of `MultiTurnScheduler` or `RolloutScheduler` itself."""
    class_name = getattr(method, "__qualname__", "").partition(".")[0]
    if class_name not in ("MultiTurnScheduler", "RolloutScheduler"):
        return False
    return str(getattr(method, "__module__", "")).endswith("swift.rollout.multi_turn")


def _load_plugins(args: Mapping[str, Any], found: ForeignObject) -> None:
    plugins = args.get("external_plugins") or ()
    for name in [plugins] if isinstance(plugins, str) else plugins:
        path = Path(str(name))
        load_user_module(path if path.is_absolute() else found.base / path, str(name))


def _check_flags(args: Mapping[str, Any], scheduler: Any, found: ForeignObject) -> None:
    """Refuse flags that a scheduler would take for arguments of its own and ignore."""
    for key in args:
        if key in inspect.signature(scheduler).parameters:
            continue
        if key.startswith("reward_model"):
            raise ConfigError(
                f"{found.where}: {key}: no trainer holds a reward model here; serve it (swift "
                "deploy, vllm serve) and ask it in an AsyncORM, which reward_funcs names"
            )
        suggestion = None if key in OWN else did_you_mean(key, OWN, 0.85)
        if suggestion:
            raise ConfigError(f"{found.where}: [env.args] {key}: {suggestion}")


def _environment_weight(
    scheduler: Any, args: Mapping[str, Any], rewards: Sequence[Any]
) -> float | None:
    """Return the weight of the environment's `total_reward`, as `use_gym_env` decides; None
    where it is no reward."""
    weights = list(args.get("reward_weights") or ())
    has_own_weight = len(weights) > len(rewards)
    is_reward = args.get("use_gym_env")
    if is_reward is None:
        # ms-swift follows gym_env here, and has no run without any reward.
        is_gym = any(base.__name__ == "GYMScheduler" for base in scheduler.__mro__)
        is_reward = has_own_weight or is_gym or not rewards or args.get("gym_env") is not None
    if not is_reward:
        return None
    return float(weights[-1]) if has_own_weight else 1.0


def _registry(name: str, module: str) -> dict[str, Any]:
    """Return a registry, that of the framework or ours."""
    registry: dict[str, Any] = getattr(import_foreign(module), name)
    return registry


def _registered(name: str, module: str, key: str, where: str) -> Any:
    """Return what is registered under a name; a built-in of release 3.6 that the
    installed one dropped is ours."""
    built_in = dict(getattr(importlib.import_module(f"{STAND_INS}.{module}"), name))
    entries = built_in | _registry(name, module)
    if key not in entries:
        raise ConfigError(
            f"{where}: {name} has no {key!r}; {suggest_or_list(key, list(entries))}; files that "
            "register it belong to external_plugins under [env.args]"
        )
    return entries[key]


def _rewards(args: Mapping[str, Any], found: ForeignObject) -> list[tuple[str, Any, float]]:
    """Return the reward functions with names and weights."""
    reward_funcs = args.get("reward_funcs") or ()
    names = [reward_funcs] if isinstance(reward_funcs, str) else list(reward_funcs)
    weights = list(args.get("reward_weights") or [1.0] * len(names))
    if len(weights) not in (len(names), len(names) + 1):
        raise ConfigError(
            f"{found.where}: {len(names)} reward_funcs and {len(weights)} reward_weights; give one "
            "for each, and at most one more, for the environment"
        )

    rewards = []
    for name, weight in zip(names, weights, strict=False):
        function = _reward(name, args, found)
        rewards.append((name.rpartition(":")[2], function, float(weight)))
    return rewards


def _reward(name: str, args: Mapping[str, Any], found: ForeignObject) -> Any:
    """Return a reward function by name: `file.py:Name`, or a registered one; of a class its
    object."""
    if ":" in name:
        target = load_named(name, found, "reward_funcs")
    else:
        target = _registered("orms", "swift.rewards.orm", name, found.where)

    if inspect.isclass(target):
        reward_args = attribute_config(_reward_settings(args))
        try:
            target = _construct_reward(target, reward_args)
        except Exception as error:
            raise ConfigError(
                f"{found.where}: {name} cannot be made: {type(error).__name__}: {error}"
            ) from error
    if not callable(target):
        raise ConfigError(
            f"{found.where}: {name} is {describe_value(target)}; a reward is called with "
            "completions"
        )
    return target


def _reward_settings(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return `args` of rewards: flags of the recipe, and ms-swift's defaults of those
    that its rewards read."""
    settings = REWARD_DEFAULTS | {key: value for key, value in args.items() if key not in OWN}
    longest = settings.get("max_completion_length")
    if longest is not None:
        for key in ("cosine_max_len", "soft_max_length"):
            settings.setdefault(key, longest)
    return settings


def _construct_reward(target: Any, args: Any) -> Any:
    """Make a reward with `args`, if its constructor takes them."""
    parameters = inspect.signature(target).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return target(args=args) if takes_any or "args" in parameters else target()


def _scales(args: Mapping[str, Any], found: ForeignObject) -> LossScales | None:
    """Return the loss scales that `loss_scale` names: `[strategy+]name[+name]`, a name
    also as `file.py:Name`."""
    named = args.get("loss_scale")
    if named is None:
        return None
    names = str(named).split("+")
    strategy = names.pop(0) if names[0] in ("default", "last_round") else "default"
    if names[:1] == ["all"]:
        raise ConfigError(
            f"{found.where}: loss_scale {named!r}: only replies are trained; write default or "
            "last_round"
        )
    chain = []
    for name in names:
        if ":" in name:
            target = load_named(name, found, "loss_scale")
        else:
            target = _registered("loss_scale_map", "swift.loss_scale", name, found.where)
        chain.append(target(strategy))
    return LossScales(strategy == "last_round", chain)


@dataclass
class SchedulerEpisodes:
    """Agent function of a scheduler: one object for all episodes, over one engine that
    knows whose call it is."""

    scheduler: Any
    args: Mapping[str, Any]
    rewards: Sequence[tuple[str, Any, float]]
    scales: LossScales | None = None
    environment_weight: float | None = 1.0
    """Weight of `total_reward` of the rollout's infos; None where it is no reward."""
    _by_turns: dict[int, Any] = field(default_factory=dict)
    """The scheduler, by the limit of turns that it was made with."""
    _engine: InferEngine = field(default_factory=InferEngine)

    async def __call__(self, task: Task, model: Any) -> Scores:
        """Play one episode."""
        episode = Episode(model, f"chatcmpl-{uuid4().hex}")
        self._engine.enter(episode)
        scheduler = self._shared(model.limits.turns)
        request = self._request(task, episode.id)

        # As they are now: the scheduler may change the request.
        columns = dict(request.data_dict)
        for key in (*MEDIA, "objects", "tools"):
            value = getattr(request, key)
            if value:
                columns[key] = list(value) if isinstance(value, list) else value

        try:
            returned = await scheduler.run(request, import_foreign(PROTOCOL).RequestConfig())
        except LimitReached:
            returned = episode.cut()
            if not returned:
                raise
        finally:
            await _close_environment(scheduler, episode.id)

        outputs = list(returned) if isinstance(returned, (list, tuple)) else [returned]
        if not outputs or not all(map(_is_output, outputs)):
            raise EnvError(
                f"run returned {describe_value(returned)}; return a RolloutOutput, or a list of "
                "them"
            )
        replies = set_weights(outputs, episode, self.scales)
        rows = [self._row(output, request, columns, episode) for output in outputs]
        state = TrainerState(model.trajectory.key.step)
        return await self._score(rows, replies, len(episode.calls), state)

    def __repr__(self) -> str:
        return f"swift:{self.scheduler.__name__}"

    def _shared(self, turns: int) -> Any:
        """Return the scheduler, made at the first episode of a run."""
        if turns not in self._by_turns:
            arguments = {
                key: value for key, value in self.args.items() if key not in OWN or key == "gym_env"
            }
            self._by_turns[turns] = make_scheduler(self.scheduler, self._engine, turns, arguments)
        return self._by_turns[turns]

    def _request(self, task: Task, uuid: str) -> Any:
        """Return the request of a row."""
        columns = {
            key: value for key, value in task.other_columns.items() if key not in MEDIA_COLUMNS
        }
        columns = copy.deepcopy({**columns, **task.info})
        # A column that has the answer already, such as `solution`, stays the only one.
        if task.answer is not None and task.answer not in columns.values():
            columns.setdefault("answer", task.answer)

        messages, images = _messages(task.messages)
        if messages and messages[-1]["role"] == "user":
            columns.setdefault("problem", messages[-1]["content"])
        system = self.args.get("system")
        if system and not (messages and messages[0]["role"] == "system"):
            messages.insert(0, {"role": "system", "content": system})

        return import_foreign(PROTOCOL).RolloutInferRequest(
            messages=messages,
            images=images,
            audios=list(columns.pop("audios", None) or ()),
            videos=list(columns.pop("videos", None) or ()),
            tools=columns.pop("tools", None),
            objects=columns.pop("objects", None) or {},
            data_dict=columns,
            uuid=uuid,
        )

    def _row(
        self, output: Any, request: Any, columns: Mapping[str, Any], episode: Episode
    ) -> dict[str, Any]:
        """Return what a reward is called with for one row."""
        choice = output.response.choices[0]
        messages = output.messages
        if messages is None:
            messages = [*request.messages, {"role": "assistant", "content": choice.message.content}]
        decode = episode.model.tokenizer.decode
        texts = []
        for message in messages:
            content = message["content"]
            if isinstance(content, list) and _ids(content):
                message = {**message, "content": decode(content)}
            texts.append(message)

        infos = output.rollout_infos
        ids = output.response_token_ids
        if not ids and output.messages is None:
            # One turn without a scheduler: not a list for each turn.
            ids = list(choice.token_ids or ())
        return {
            **columns,
            **{key: infos[key] for key in MEDIA if key in infos},
            "messages": texts,
            "prompt_id": str(request.uuid),
            "request_id": str(request.uuid),
            "finish_reason": choice.finish_reason,
            "is_truncated": choice.finish_reason == "length",
            "rollout_infos": infos,
            "response_token_ids": ids,
            "multi_turn_infos": {**episode.infos, "num_turns": infos.get("num_turns")},
        }

    async def _score(
        self,
        rows: list[dict[str, Any]],
        replies: Sequence[tuple[Any, ...]],
        turns: int,
        state: TrainerState,
    ) -> Scores:
        """Return the weighted rewards, and those of the environment's steps; of several rows, each
        row's with its replies."""
        rewards = await self._weighted_rewards(rows, state)
        if rewards is None:
            return Scores(None)
        row_rewards, parts = rewards

        last_row = rows[-1]
        infos = last_row["rollout_infos"]
        metrics: dict[str, float] = {}
        for key, value in infos.items():
            number = number_of(value)
            if number is not None:
                metrics[f"environment/{key}"] = number
        status: Literal["truncated", "completed"] = (
            "truncated" if last_row["is_truncated"] else "completed"
        )

        weight = 1.0 if self.environment_weight is None else self.environment_weight
        totals: list[float | None] = [None] * len(rows)
        if self.environment_weight is not None:
            totals = [number_of(row["rollout_infos"].get("total_reward")) for row in rows]
        if len(rows) > 1:
            row_rewards = [
                reward + weight * (total or 0.0)
                for reward, total in zip(row_rewards, totals, strict=True)
            ]
            by_row = tuple(zip(row_rewards, replies, strict=True))
            return Scores(0.0, (), parts, metrics, status, by_row)

        step_rewards = [
            weight * (as_number(reward, "step_rewards") or 0.0)
            for reward in infos.get("step_rewards") or ()
        ]
        total_reward = weight * (totals[0] or 0.0)
        # The total is the reward. Steps only divide it among the turns, where they add up to it.
        if (
            totals[0] is not None
            and len(step_rewards) == turns
            and math.isclose(sum(step_rewards), total_reward, abs_tol=1e-9)
        ):
            return Scores(row_rewards[0], tuple(step_rewards), parts, metrics, status)
        return Scores(row_rewards[0] + total_reward, (), parts, metrics, status)

    async def _weighted_rewards(
        self, rows: list[dict[str, Any]], state: TrainerState
    ) -> tuple[list[float], dict[str, float]] | None:
        """Return the sum of the weighted rewards of each row, and the mean of each reward; None
        where a row has none."""
        completions = [row["messages"][-1]["content"] for row in rows]
        columns: dict[str, Any] = {key: [row[key] for row in rows] for key in rows[-1]}
        columns["trainer_state"] = state
        columns["trajectory_inputs"] = {rows[-1]["request_id"]: rows}

        values_by_name: dict[str, list[float]] = {}
        row_rewards = [0.0] * len(rows)
        is_scored = [not self.rewards] * len(rows)
        for name, function, weight in self.rewards:
            returned = await _call_reward(function, completions, columns)
            if returned is None:
                returned = [None] * len(rows)
            if not isinstance(returned, (list, tuple)) or len(returned) != len(rows):
                raise EnvError(
                    f"the reward {name} returned {describe_value(returned)} for {len(rows)} "
                    "completions; return a list with a number for each"
                )
            for number, row_value in enumerate(returned):
                value = as_number(row_value, f"the reward {name}")
                if value is not None:
                    values_by_name.setdefault(name, []).append(value)
                    row_rewards[number] += weight * value
                    is_scored[number] = True

        if not all(is_scored):
            return None
        parts = {name: sum(values) / len(values) for name, values in values_by_name.items()}
        return row_rewards, parts


def _is_output(value: Any) -> bool:
    return hasattr(value, "response") and hasattr(value, "rollout_infos")


async def _close_environment(scheduler: Any, uuid: str) -> None:
    """Close the environment that a Gym scheduler still has for an episode: a limit
    ended it, or an error."""
    if uuid in vars(scheduler).get("_envs", ()):
        await scheduler._close_and_remove(uuid)


def make_scheduler(target: Any, engine: InferEngine, turns: int, args: Mapping[str, Any]) -> Any:
    """Make a scheduler with the arguments that its constructor takes."""
    parameters = inspect.signature(target).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments = {"infer_engine": engine, "max_turns": turns, **args}
    if not takes_any:
        for key in args:
            if key not in parameters:
                raise ConfigError(
                    f"{target.__name__} has no argument {key!r}; "
                    f"{suggest_or_list(key, list(parameters))}"
                )
        arguments = {key: value for key, value in arguments.items() if key in parameters}

    scheduler: Any = target(**arguments)
    if scheduler.infer_engine is None:
        scheduler.infer_engine = engine
    if not scheduler.max_turns:
        scheduler.max_turns = turns

    build = getattr(target, "_build_messages", None)
    if build is not None and public_name(build.__module__) == "swift.rollout.multi_turn":
        # ms-swift's needs a template, and returns texts without one.
        scheduler._build_messages = _with_last_thoughts
    if _is_base(target.run):
        scheduler.step = partial(_dict_of_step, scheduler.step, engine)
        scheduler.on_turn_end = _recorded(_awaitable(scheduler.on_turn_end), engine)
        scheduler.on_trajectory_start = _awaitable(scheduler.on_trajectory_start)
    return scheduler


def _with_last_thoughts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages of which the last alone has its thoughts."""
    rows = copy.deepcopy([dict(message) for message in messages])
    for row in rows[:-1]:
        if row["role"] == "assistant" and isinstance(row["content"], str):
            row["content"] = row["content"].rpartition("</think>")[2].strip()
    return rows


def _dict_of_step(
    step: Callable[..., Any],
    engine: InferEngine,
    infer_request: Any,
    choice: Any,
    current_turn: int,
) -> dict[str, Any]:
    """Return what `step` made as a dict: until release 3.8 it was a request, or one
    with a dict for the reward."""
    returned = step(infer_request, choice, current_turn)
    if isinstance(returned, dict):
        return returned

    request: Any = returned
    infos: Any = {}
    if isinstance(returned, tuple) and len(returned) == 2:
        request, infos = returned
    if not hasattr(request, "messages") or not isinstance(infos, Mapping):
        raise EnvError(
            f"step returned {describe_value(returned)}; return a request, (request, dict) or a "
            "dict with infer_request"
        )
    for key, value in infos.items():
        engine.episode.infos.setdefault(key, []).append(value)
    return {"infer_request": request, "rollout_infos": dict(infos)}


def _awaitable(hook: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(hook)
    async def call(*args: Any) -> Any:
        returned = hook(*args)
        return await returned if inspect.isawaitable(returned) else returned

    return call


def _recorded(hook: Callable[..., Any], engine: InferEngine) -> Callable[..., Any]:
    """Return a hook whose `rollout_infos` are kept for an episode that a limit ends."""

    async def call(*args: Any) -> dict[str, Any]:
        returned = dict(await hook(*args) or {})
        engine.episode.rollout_infos.update(returned.get("rollout_infos") or {})
        return returned

    return call


async def _call_reward(function: Any, completions: list[Any], columns: dict[str, Any]) -> Any:
    """Call a reward, as ms-swift does on the thread of the loop; a synchronous one may
    run a loop of its own."""
    call = function if inspect.isroutine(function) else type(function).__call__
    names = list(inspect.signature(call).parameters)
    # Printed without self.
    bound = function if inspect.isroutine(function) or names[:1] != ["completions"] else call

    # Without a running loop, `asyncio.run` of a synchronous reward works.
    loop = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    try:
        returned = bound(completions, **columns)
    finally:
        asyncio._set_running_loop(loop)
    return await returned if inspect.isawaitable(returned) else returned


def _messages(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return messages whose media are `<image>` in texts, and the images."""
    rows: list[dict[str, Any]] = []
    images: list[Any] = []
    for message in messages:
        row = message.to_dict()
        if not isinstance(message.content, str):
            text = ""
            for part in message.content:
                if isinstance(part, str):
                    text += part
                else:
                    text += "<image>"
                    images.append(given_image(part))
            row["content"] = text
        rows.append(row)
    return rows, images


def _ids(content: list[Any]) -> bool:
    return bool(content) and isinstance(content[0], int)


def _names() -> list[str]:
    return list(_registry(*SCHEDULERS))


FRAMEWORK = Framework("swift", adapt, lambda name: Registered("swift", name), _names)
