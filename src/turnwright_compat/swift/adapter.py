"""ms-swift: schedulers (`MultiTurnScheduler`, by class or registered name), Gym
environments, and rewards by name."""

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
MEDIA = ("images", "audios", "videos")
"""Lists of a request; one that `rollout_infos` has replaces the row's for the reward."""


def adapt(found: ForeignObject) -> SchedulerEpisodes | None:
    """Make an agent function of a scheduler, of a registered name, or of a Gym environment."""
    target, args = found.target, dict(found.args)
    named = target.id if isinstance(target, Registered) else None
    if named is None and not _is_scheduler(target) and not derives_from(target, "swift", "Env"):
        return None
    refuse_faithful(found)
    _load_plugins(args, found)
    if named is not None:
        target = _registered("multi_turns", "swift.rollout.multi_turn", named, found.where)
    elif derives_from(target, "swift", "Env"):
        _registry("envs", "swift.rollout.gym_env")[target.__name__] = target
        args.setdefault("gym_env", target.__name__)
        target = _registered(
            "multi_turns", "swift.rollout.multi_turn", "gym_scheduler", found.where
        )
    scheduler = _complete(target, found.where)
    missing = sorted(getattr(scheduler, "__abstractmethods__", ()))
    own_run = not _is_base(scheduler.run)
    if missing or (not own_run and _is_base(getattr(scheduler, "step", None))):
        raise ConfigError(
            f"{found.where} lacks {' and '.join(missing) or 'step'}; a scheduler has step, or its "
            "own run"
        )

    # A run of the class's own calls its hooks as it likes.
    hooks = [("run", 2)] if own_run else [("step", 3), ("check_finished", 3), ("run", 2)]
    for hook, count in hooks:
        try:
            if hasattr(scheduler, hook):
                inspect.signature(getattr(scheduler, hook)).bind(*range(count + 1))
        except TypeError as error:
            raise ConfigError(
                f"{found.where}.{hook}: {error}; ms-swift calls it with {count} arguments"
            ) from None
    _check_flags(args, scheduler, found)
    rewards = _rewards(args, found)
    return SchedulerEpisodes(
        scheduler,
        args,
        rewards,
        _scales(args, found),
        _environment_weight(scheduler, args, rewards),
    )


def _is_scheduler(target: Any) -> bool:
    """Whether a class is a scheduler by base class, or by the arguments of its `step`."""
    if derives_from(target, "swift", "RolloutScheduler"):
        return True
    step = vars(target).get("step") if inspect.isclass(target) else None
    inherited = next(
        (vars(base)["step"] for base in getattr(target, "__mro__", ()) if "step" in vars(base)),
        step,
    )
    if not inspect.isclass(target) or not inspect.isfunction(inherited):
        return False
    names = list(inspect.signature(inherited).parameters)[1:4]
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
    return getattr(method, "__qualname__", "").partition(".")[0] in (
        "MultiTurnScheduler",
        "RolloutScheduler",
    ) and str(getattr(method, "__module__", "")).endswith("swift.rollout.multi_turn")


def _load_plugins(args: Mapping[str, Any], found: ForeignObject) -> None:
    given = args.get("external_plugins") or ()
    for name in [given] if isinstance(given, str) else given:
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
        meant = None if key in OWN else did_you_mean(key, OWN, 0.85)
        if meant:
            raise ConfigError(f"{found.where}: [env.args] {key}: {meant}")


def _environment_weight(
    scheduler: Any, args: Mapping[str, Any], rewards: Sequence[Any]
) -> float | None:
    """Return the weight of the environment's `total_reward`, as `use_gym_env` decides; None
    where it is no reward."""
    weights = list(args.get("reward_weights") or ())
    given = len(weights) > len(rewards)
    chosen = args.get("use_gym_env")
    if chosen is None:
        # ms-swift follows gym_env here, and has no run without any reward.
        is_gym = any(base.__name__ == "GYMScheduler" for base in scheduler.__mro__)
        chosen = given or is_gym or not rewards or args.get("gym_env") is not None
    if not chosen:
        return None
    return float(weights[-1]) if given else 1.0


def _registry(name: str, module: str) -> dict[str, Any]:
    """Return a registry, that of the framework or ours."""
    found: dict[str, Any] = getattr(import_foreign(module), name)
    return found


def _registered(name: str, module: str, key: str, where: str) -> Any:
    """Return what is registered under a name; a built-in of release 3.6 that the
    installed one dropped is ours."""
    known = dict(getattr(importlib.import_module(f"{STAND_INS}.{module}"), name)) | _registry(
        name, module
    )
    if key not in known:
        raise ConfigError(
            f"{where}: {name} has no {key!r}; {suggest_or_list(key, list(known))}; files that "
            "register it belong to external_plugins under [env.args]"
        )
    return known[key]


def _rewards(args: Mapping[str, Any], found: ForeignObject) -> list[tuple[str, Any, float]]:
    """Return the reward functions with names and weights."""
    given = args.get("reward_funcs") or ()
    names = [given] if isinstance(given, str) else list(given)
    weights = list(args.get("reward_weights") or [1.0] * len(names))
    if len(weights) not in (len(names), len(names) + 1):
        raise ConfigError(
            f"{found.where}: {len(names)} reward_funcs and {len(weights)} reward_weights; give one "
            "for each, and at most one more, for the environment"
        )
    made = []
    for name, weight in zip(names, weights, strict=False):
        if ":" in name:
            target = load_named(name, found, "reward_funcs")
        else:
            target = _registered("orms", "swift.rewards.orm", name, found.where)
        if inspect.isclass(target):
            own = attribute_config(_reward_settings(args))
            try:
                target = _made_reward(target, own)
            except Exception as error:
                raise ConfigError(
                    f"{found.where}: {name} cannot be made: {type(error).__name__}: {error}"
                ) from error
        if not callable(target):
            raise ConfigError(
                f"{found.where}: {name} is {describe_value(target)}; a reward is called with "
                "completions"
            )
        made.append((name.rpartition(":")[2], target, float(weight)))
    return made


def _reward_settings(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return `args` of rewards: flags of the recipe, and ms-swift's defaults of those
    that its rewards read."""
    found = REWARD_DEFAULTS | {key: value for key, value in args.items() if key not in OWN}
    longest = found.get("max_completion_length")
    if longest is not None:
        for key in ("cosine_max_len", "soft_max_length"):
            found.setdefault(key, longest)
    return found


def _made_reward(target: Any, args: Any) -> Any:
    """Make a reward with `args`, if its constructor takes them."""
    parameters = inspect.signature(target).parameters
    takes = "args" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return target(args=args) if takes else target()


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
    _made: dict[int, Any] = field(default_factory=dict)
    _engine: InferEngine = field(default_factory=InferEngine)

    async def __call__(self, task: Task, model: Any) -> Scores:
        """Play one episode."""
        episode = Episode(model, f"chatcmpl-{uuid4().hex}")
        self._engine.enter(episode)
        scheduler = self._shared(model.limits.turns)
        request = self._request(task, episode.id)
        columns = dict(request.data_dict)
        for key in (*MEDIA, "objects", "tools"):
            if value := getattr(request, key):
                columns[key] = list(value) if isinstance(value, list) else value
        try:
            made = await scheduler.run(request, import_foreign(PROTOCOL).RequestConfig())
        except LimitReached:
            made = episode.cut()
            if not made:
                raise
        finally:
            await _close_environment(scheduler, episode.id)
        outputs = list(made) if isinstance(made, (list, tuple)) else [made]
        if not outputs or not all(
            hasattr(one, "response") and hasattr(one, "rollout_infos") for one in outputs
        ):
            raise EnvError(
                f"run returned {describe_value(made)}; return a RolloutOutput, or a list of them"
            )
        replies = set_weights(outputs, episode, self.scales)
        rows = [self._row(output, request, columns, episode) for output in outputs]
        state = TrainerState(model.trajectory.key.step)
        return await self._score(rows, replies, len(episode.calls), state)

    def __repr__(self) -> str:
        return f"swift:{self.scheduler.__name__}"

    def _shared(self, turns: int) -> Any:
        """Return the scheduler, made at the first episode of a run."""
        if turns not in self._made:
            own = {
                key: value for key, value in self.args.items() if key not in OWN or key == "gym_env"
            }
            self._made[turns] = make_scheduler(self.scheduler, self._engine, turns, own)
        return self._made[turns]

    def _request(self, task: Task, uuid: str) -> Any:
        """Return the request of a row."""
        other = {
            key: value for key, value in task.other_columns.items() if key not in MEDIA_COLUMNS
        }
        columns = copy.deepcopy({**other, **task.info})
        if (
            task.answer is not None and task.answer not in columns.values()
        ):  # `solution` and others stay as they are
            columns.setdefault("answer", task.answer)
        messages, images = _messages(task.messages)
        if messages and messages[-1]["role"] == "user":
            columns.setdefault("problem", messages[-1]["content"])
        if self.args.get("system") and not (messages and messages[0]["role"] == "system"):
            messages.insert(0, {"role": "system", "content": self.args["system"]})
        media = {key: list(columns.pop(key, None) or ()) for key in ("audios", "videos")}
        tools, objects = columns.pop("tools", None), columns.pop("objects", None) or {}
        return import_foreign(PROTOCOL).RolloutInferRequest(
            messages=messages,
            images=images,
            tools=tools,
            objects=objects,
            data_dict=columns,
            uuid=uuid,
            **media,
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
        texts = [
            {**one, "content": decode(one["content"])}
            if isinstance(one["content"], list) and _ids(one["content"])
            else one
            for one in messages
        ]
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
        completions = [row["messages"][-1]["content"] for row in rows]
        columns: dict[str, Any] = {key: [row[key] for row in rows] for key in rows[-1]}
        columns |= {"trainer_state": state, "trajectory_inputs": {rows[-1]["request_id"]: rows}}
        found: dict[str, list[float]] = {}
        own, scored = [0.0] * len(rows), [not self.rewards] * len(rows)
        for name, function, weight in self.rewards:
            made = await _call_reward(function, completions, columns)
            made = [None] * len(rows) if made is None else made
            if not isinstance(made, (list, tuple)) or len(made) != len(rows):
                raise EnvError(
                    f"the reward {name} returned {describe_value(made)} for {len(rows)} "
                    "completions; return a list with a number for each"
                )
            for number, one in enumerate(made):
                if (value := as_number(one, f"the reward {name}")) is not None:
                    found.setdefault(name, []).append(value)
                    own[number] += weight * value
                    scored[number] = True
        if not all(scored):
            return Scores(None)
        parts = {name: sum(values) / len(values) for name, values in found.items()}
        infos, truncated = rows[-1]["rollout_infos"], rows[-1]["is_truncated"]
        metrics = {
            f"environment/{key}": float(value)
            for key, one in infos.items()
            if (value := number_of(one)) is not None
        }
        status: Literal["truncated", "completed"] = "truncated" if truncated else "completed"
        gym = self.environment_weight
        totals = [
            None if gym is None else number_of(row["rollout_infos"].get("total_reward"))
            for row in rows
        ]
        gym = 1.0 if gym is None else gym
        if len(rows) > 1:
            own = [one + gym * (total or 0.0) for one, total in zip(own, totals, strict=True)]
            return Scores(0.0, (), parts, metrics, status, tuple(zip(own, replies, strict=True)))
        steps = [
            gym * (as_number(one, "step_rewards") or 0.0) for one in infos.get("step_rewards") or ()
        ]
        total = gym * (totals[0] or 0.0)
        # The total is the reward. Steps only divide it among the turns, where they add up to it.
        divided = (
            totals[0] is not None
            and len(steps) == turns
            and math.isclose(sum(steps), total, abs_tol=1e-9)
        )
        return Scores(
            own[0] + (0.0 if divided else total),
            tuple(steps) if divided else (),
            parts,
            metrics,
            status,
        )


async def _close_environment(scheduler: Any, uuid: str) -> None:
    """Close the environment that a Gym scheduler still has for an episode: a limit
    ended it, or an error."""
    if uuid in vars(scheduler).get("_envs", ()):
        await scheduler._close_and_remove(uuid)


def make_scheduler(target: Any, engine: InferEngine, turns: int, args: Mapping[str, Any]) -> Any:
    """Make a scheduler with the arguments that its constructor takes."""
    parameters = inspect.signature(target).parameters
    given = {"infer_engine": engine, "max_turns": turns, **args}
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        for key in args:
            if key not in parameters:
                raise ConfigError(
                    f"{target.__name__} has no argument {key!r}; "
                    f"{suggest_or_list(key, list(parameters))}"
                )
        given = {key: value for key, value in given.items() if key in parameters}
    made: Any = target(**given)
    if made.infer_engine is None:
        made.infer_engine = engine
    if not made.max_turns:
        made.max_turns = turns
    build = getattr(target, "_build_messages", None)
    if build is not None and public_name(build.__module__) == "swift.rollout.multi_turn":
        made._build_messages = (
            _with_last_thoughts  # ms-swift's needs a template, and returns texts without one
        )
    if _is_base(target.run):
        made.step = partial(_dict_of_step, made.step, engine)
        made.on_turn_end = _recorded(_awaitable(made.on_turn_end), engine)
        made.on_trajectory_start = _awaitable(made.on_trajectory_start)
    return made


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
    made = step(infer_request, choice, current_turn)
    if isinstance(made, dict):
        return made
    request, given = made if isinstance(made, tuple) and len(made) == 2 else (made, {})
    if not hasattr(request, "messages") or not isinstance(given, Mapping):
        raise EnvError(
            f"step returned {describe_value(made)}; return a request, (request, dict) or a dict "
            "with infer_request"
        )
    for key, value in given.items():
        engine.episode.infos.setdefault(key, []).append(value)
    return {"infer_request": request, "rollout_infos": dict(given)}


def _awaitable(hook: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(hook)
    async def call(*args: Any) -> Any:
        made = hook(*args)
        return await made if inspect.isawaitable(made) else made

    return call


def _recorded(hook: Callable[..., Any], engine: InferEngine) -> Callable[..., Any]:
    """Return a hook whose `rollout_infos` are kept for an episode that a limit ends."""

    async def call(*args: Any) -> dict[str, Any]:
        made = dict(await hook(*args) or {})
        engine.episode.rollout_infos.update(made.get("rollout_infos") or {})
        return made

    return call


async def _call_reward(function: Any, completions: list[Any], columns: dict[str, Any]) -> Any:
    """Call a reward, as ms-swift does on the thread of the loop; a synchronous one may
    run a loop of its own."""
    call = function if inspect.isroutine(function) else type(function).__call__
    names = list(inspect.signature(call).parameters)
    # Printed without self.
    bound = function if inspect.isroutine(function) or names[:1] != ["completions"] else call
    loop = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    try:
        made = bound(completions, **columns)
    finally:
        asyncio._set_running_loop(loop)
    return await made if inspect.isawaitable(made) else made


def _messages(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return messages whose media are `<image>` in texts, and the images."""
    rows, images = [], list[Any]()
    for message in messages:
        row = message.to_dict()
        if not isinstance(message.content, str):
            texts = [part if isinstance(part, str) else "<image>" for part in message.content]
            images += [given_image(part) for part in message.content if not isinstance(part, str)]
            row["content"] = "".join(texts)
        rows.append(row)
    return rows, images


def _ids(content: list[Any]) -> bool:
    return bool(content) and isinstance(content[0], int)


def _names() -> list[str]:
    return list(_registry("multi_turns", "swift.rollout.multi_turn"))


FRAMEWORK = Framework("swift", adapt, lambda name: Registered("swift", name), _names)
