"""slime and Miles: interaction environments (`build_env`), custom generate
functions, and their rewards.

`adapt` decides which of these a recipe names (`shape.py` has the questions). A `SlimeEnv` plays an
interaction environment turn by turn; `_agent_function` runs a generate function once an episode,
over the engine of `engine.py`, and reads its samples. What user code imports of slime is in
`stand_ins.py`; launch scripts are converted in `convert.py`.
"""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from turnwright.config import Limits
from turnwright.envs.env import Action, Env, Scores, Step
from turnwright.envs.foreign import ForeignObject, Registered, refuse_faithful
from turnwright.envs.resolve import load_named
from turnwright.envs.row_messages import read_tools
from turnwright.envs.user_code import as_number, call_user, describe_value
from turnwright.envs.user_imports import import_foreign, public_name
from turnwright.errors import ConfigError, EnvError, RewardError, suggest_or_list
from turnwright.types import Message, StopReason, Task, Trajectory, join_texts
from turnwright_compat.common import attribute_config, plain
from turnwright_compat.sampled_rows import read_output
from turnwright_compat.slime.engine import EPISODE, HOST, PORT, EngineServer, GenerateState
from turnwright_compat.slime.processor import pictures
from turnwright_compat.slime.session import generate as play_session
from turnwright_compat.slime.shape import (
    binds,
    builds_env,
    parameter_names,
    plays_session,
    signature_of,
    takes_a_sample,
    takes_one_input,
)

ARGUMENTS = (
    "custom_config_path",
    "custom_rm_path",
    "rm_type",
    "reward_key",
    "eval_reward_key",
    "args",
)
"""Keys of `[env.args]`; `args` has further arguments of the run, over those of the file."""
IDS = ("generate",)
"""`slime:generate`: one reply, as slime samples it without a function of the user."""
RM_TYPES = (
    "deepscaler",
    "dapo",
    "math",
    "f1",
    "gpqa",
    "ifbench",
    "gemma_math",
    "random",
    "deterministic_random",
    "remote_rm",
)
"""Each may have the prefix `boxed_`."""
ROLLOUT_PARAMETERS = ("args", "rollout_id")
UNLIMITED = 1 << 20
"""Context in tokens where the run has no limit of its own: user code compares
lengths with a number."""
STEPPED = (StopReason.DONE, StopReason.ENV_TRUNCATED, StopReason.MAX_TURNS)
"""Ends after the environment saw the last reply.

At others, an episode without a reward so far has reward 0.
"""
STATUSES = {
    "COMPLETED": "completed",
    "TRUNCATED": "truncated",
    "ABORTED": "aborted",
    "FAILED": "failed",
}


def adapt(found: ForeignObject) -> Any:
    """Make a factory of `build_env`, or an agent function of a generate function."""
    target = found.target
    if isinstance(target, Registered):
        target = import_foreign("slime.rollout.sglang_rollout").generate
    if parameter_names(target)[:2] == ROLLOUT_PARAMETERS or _is_rollout_class(target):
        raise ConfigError(
            f"{found.where} plays all samples of a step (--rollout-function-path), which our loop "
            f"replaces; {_hook(target)}"
        )

    is_session = plays_session(target)
    is_miles = is_session or takes_one_input(target)
    is_environment = builds_env(target)
    if not (takes_a_sample(target) or is_miles or is_environment):
        return None

    refuse_faithful(found)
    for key in found.args:
        if key not in ARGUMENTS:
            raise ConfigError(
                f"{found.where} has no argument {key!r}; {suggest_or_list(key, ARGUMENTS)}"
            )
    _check_rule(found)
    settings = _settings(found)

    if is_session:
        settings["custom_agent_function_path"] = target
        target = play_session
    if is_environment:
        return SlimeFactory(target, settings, found.where)
    generate: Any = target() if inspect.isclass(target) else target
    return _agent_function(generate, settings, is_miles, found.where, found.base)


HOOKS_OF_STEPS = (
    ("fully_async", 'set [schedule] mode = "async", and name the generate function in use'),
    ("sft_rollout", "train on given replies with [warmup] dataset"),
    (
        "eval",
        "give the rows as env.eval_tasks, and set when in [eval]; the environment or generate "
        "function in use plays them",
    ),
    (
        "verifiers",
        "make a factory of the environment with turnwright_compat.verifiers_env, and name it in "
        "use",
    ),
)
"""What replaces a function for a step, by a part of its module's or its own name."""
HOOK_OF_A_STEP = (
    "name what it calls for each sample: its generate function, or build_env. Rewards are "
    "custom_rm_path, a choice of groups is train.group_filter, and tasks may come from "
    "file.py:function"
)


def _hook(target: Any) -> str:
    """Return what replaces a function or class for a step."""
    name = f"{public_name(target.__module__)}.{target.__qualname__}".lower()
    return next((hook for part, hook in HOOKS_OF_STEPS if part in name), HOOK_OF_A_STEP)


def _is_rollout_class(target: Any) -> bool:
    """Whether a class is Miles' kind for a complete step, by what its constructor
    is annotated to take."""
    if not inspect.isclass(target):
        return False
    constructor = getattr(target, "__init__", None)
    if not inspect.isfunction(constructor):
        return False

    for parameter in inspect.signature(constructor).parameters.values():
        hint = parameter.annotation
        name = hint if isinstance(hint, str) else getattr(hint, "__name__", "")
        if name.rpartition(".")[2] == "RolloutFnConstructorInput":
            return True
    return False


def _settings(found: ForeignObject) -> dict[str, Any]:
    """Return the arguments of the run: the YAML file's, then those of `args`, then the rewards'."""
    settings = _settings_of_file(found)
    settings |= dict(found.args.get("args") or {})
    for key in ("reward_key", "eval_reward_key", "rm_type"):
        if found.args.get(key) is not None:
            settings[key] = found.args[key]

    reward = found.args.get("custom_rm_path")
    if reward is not None:
        settings["custom_rm_path"] = load_named(reward, found, "custom_rm_path")
    return settings


def _settings_of_file(found: ForeignObject) -> dict[str, Any]:
    """Return what the YAML file of `custom_config_path` has; nothing without one."""
    named = found.args.get("custom_config_path")
    if named is None:
        return {}

    import yaml  # type: ignore[import-untyped]

    path = found.base / str(named)
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{found.where}: custom_config_path = {named}: cannot be read ({error})"
        ) from None
    if not isinstance(document, Mapping):
        raise ConfigError(f"{found.where}: custom_config_path = {named}: expected keys and values")
    return dict(document)


def _check_rule(found: ForeignObject) -> None:
    """Raise `ConfigError` for an `rm_type` that is not here."""
    kind = found.args.get("rm_type")
    if kind is not None and str(kind).removeprefix("boxed_") not in RM_TYPES:
        raise ConfigError(
            f"{found.where}: rm_type = {kind!r}; {suggest_or_list(str(kind), RM_TYPES)}, or "
            "custom_rm_path = file.py:function"
        )


class RunArguments(argparse.Namespace):
    """`args` of user code, a namespace as slime's; what is set on it stays, also in its copies."""

    def __getattr__(self, key: str) -> Any:
        raise AttributeError(f"the configuration has no {key!r}; give it under [env.args] args")


def _arguments(
    settings: Mapping[str, Any], limits: Limits, server: EngineServer | None = None
) -> Any:
    """Return `args`: what our limits and the episode's servers are in slime's
    names, then the user's."""
    context = limits.context or UNLIMITED
    host, port = (HOST, PORT) if server is None else server.address
    sampling = {} if server is None else server.sampling_params()
    defaults: dict[str, Any] = {
        "max_turns": limits.turns,
        "generate_max_turns": limits.turns,
        "rollout_max_response_len": limits.episode_tokens or limits.turns * limits.turn_tokens,
        "rollout_max_prompt_len": limits.prompt_tokens or context,
        "rollout_max_context_len": context,
        "eval_max_response_len": None,
        "eval_max_prompt_len": None,
        "eval_max_context_len": None,
        "max_tokens_per_gpu": context,
        "context_parallel_size": 1,
        "max_seq_len": context,
        "sglang_context_length": context,
        "rollout_temperature": sampling.get("temperature", 1.0),
        "rollout_top_p": sampling.get("top_p", 1.0),
        "rollout_top_k": sampling.get("top_k", -1),
        "rollout_stop": None,
        "rollout_stop_token_ids": None,
        "rollout_skip_special_tokens": False,
        "rollout_seed": 42,
        "partial_rollout": False,
        "mask_offpolicy_in_partial_rollout": False,
        "group_rm": False,
        "rm_url": None,
        "apply_chat_template": True,
        "apply_chat_template_kwargs": {},
        "chat_template_path": None,
        "input_key": "prompt",
        "label_key": "label",
        "metadata_key": "metadata",
        "tool_key": None,
        "multimodal_keys": None,
        "reward_key": None,
        "eval_reward_key": None,
        "rm_type": None,
        "custom_rm_path": None,
        "custom_generate_function_path": None,
        "hf_checkpoint": None if server is None else server.model.tokenizer.name_or_path or None,
        "use_rollout_routing_replay": False,
        "use_opd": False,
        "ci_test": False,
        "sglang_router_ip": host,
        "sglang_router_port": port,
        "sglang_router_policy": None,
        "sglang_server_concurrency": 512,
        "sglang_speculative_algorithm": None,
        "rollout_num_gpus": 1,
        "rollout_num_gpus_per_engine": 1,
    }
    values = {key: attribute_config(value) for key, value in {**defaults, **settings}.items()}
    return RunArguments(**values)


def new_sample(task: Task, prompt: Any, *, images: bool = True) -> Any:
    """Return a new `Sample` of a task, with its images unless they are not needed."""
    info = dict(task.info)
    metadata = dict(info.pop("metadata", None) or {})
    tools = info.pop("tools", None)
    if tools is not None:
        metadata.setdefault("tools", tools)

    task_images = pictures(task) if images else []
    return import_foreign("slime.utils.types").Sample(
        group_index=0,
        index=0,
        prompt=prompt,
        label=task.answer,
        metadata={**info, **metadata},
        multimodal_inputs={"images": task_images, "videos": None} if task_images else None,
    )


def finish_sample(sample: Any, trajectory: Trajectory, response: str | Callable[..., str]) -> Any:
    """Return a sample with what was generated; `response` is its text, or decodes its ids."""
    turns = trajectory.turns
    path = list(trajectory.path(turns[-1].spans[-1])) if turns and turns[-1].spans else []
    start = turns[0].context if turns else len(path)
    is_cut = trajectory.stop is not None and trajectory.stop.status.value == "truncated"

    vars(sample).update(
        tokens=path,
        response_length=len(path) - start,
        response=response if isinstance(response, str) else response(path[start:]),
        status=type(sample).Status.TRUNCATED if is_cut else type(sample).Status.COMPLETED,
    )
    return sample


@dataclass(frozen=True, slots=True)
class SlimeFactory:
    """Factory of one kind of interaction environment."""

    build: Callable[..., Any]
    settings: Mapping[str, Any]
    where: str

    def __call__(self) -> SlimeEnv:
        return SlimeEnv(self)

    def check_row(self, task: Task) -> None:
        """Make the environment of a row, and close it.

        Raises:
            EnvError: for an environment without a hook that is needed, or with another signature.
        """
        env = SlimeEnv(self)
        try:
            env.build(task)
        finally:
            env.close()

    def __repr__(self) -> str:
        return f"slime:{self.where}"


HOOKS = {"reset": 0, "step": 1, "format_observation": 1}
"""Hooks of an interaction environment, with the number of their arguments."""


class SlimeEnv(Env):
    """One episode with an interaction environment.

    Its methods are synchronous, so each call runs in a thread.
    """

    def __init__(self, factory: SlimeFactory) -> None:
        self._factory = factory
        self._limits = Limits()
        self._env: Any = None
        self._sample: Any = None
        self._earned: float | None = None
        self._decode: Callable[..., str] = str

    def set_limits(self, limits: Limits) -> None:
        """Keep the limits: `args`."""
        self._limits = limits

    def set_decoder(self, decode: Callable[..., str]) -> None:
        """Keep the decoder, for the response that rewards read."""
        self._decode = decode

    @property
    def _args(self) -> Any:
        return _arguments(self._factory.settings, self._limits)

    def build(self, task: Task) -> None:
        """Build the environment of a row.

        Raises:
            EnvError: for an object without a hook that is needed, or with another signature of one.
        """
        factory = self._factory
        self._sample = new_sample(task, [message.to_dict() for message in task.messages])
        args = self._args
        if binds(inspect.signature(factory.build), sample=self._sample, args=args):
            self._env = factory.build(sample=self._sample, args=args)
        else:
            self._env = factory.build(self._sample, args)

        kind = type(self._env).__name__
        if not callable(getattr(self._env, "step", None)):
            raise EnvError(
                f"{factory.where} returned {kind}, which has no step; return an environment with "
                "reset and step"
            )
        for hook, count in HOOKS.items():
            try:
                method = getattr(self._env, hook, None)
                if callable(method):
                    inspect.signature(method).bind(*range(count))
            except TypeError as error:
                raise EnvError(
                    f"{kind}.{hook}: {error}; slime calls it with {count} arguments"
                ) from None

    def reset(self, task: Task, *, seed: int | None = None) -> list[Message]:
        """Build the environment of the row, and reset it; the row has the opening."""
        self.build(task)
        if callable(getattr(self._env, "reset", None)):
            self._env.reset()
        self.tools = _tools_of(task)
        return list(task.messages)

    def step(self, action: Action) -> Step:
        """Pass the text of a reply, with its end token, to the environment."""
        returned = self._env.step(action.raw + action.end_token)
        if not isinstance(returned, tuple) or len(returned) != 3:
            raise EnvError(
                f"{self._factory.where}: step returned {describe_value(returned)}; return "
                "(observation, done, info)"
            )

        observation, done, info = returned
        info = dict(info) if isinstance(info, Mapping) else {}
        reward = None
        if info.get("reward") is not None:
            reward = as_number(info["reward"], "info['reward']")
        if reward is not None:
            self._earned = (self._earned or 0.0) + reward
        if done:
            return Step(None, reward or 0.0, True, info=plain(info))

        if hasattr(self._env, "format_observation"):
            observation = self._env.format_observation(observation)
        return Step(_message(observation, self._factory.where), reward or 0.0, info=plain(info))

    async def reward(self, trajectory: Trajectory) -> Scores:
        """Call the recipe's reward with the finished sample."""
        if _is_scored(self._sample, self._args):
            sample = finish_sample(self._sample, trajectory, self._decode)
            return _read_reward(await _scored(sample, self._args), self._args)

        own_reward = self._sample.reward
        if self._earned is None and own_reward is None and trajectory.stop in STEPPED:
            raise RewardError(
                f"{self._factory.where}: nothing rewards the episode; give [env.args] "
                "custom_rm_path or rm_type, or return info['reward'] from step"
            )
        return _read_reward(own_reward if own_reward is not None else 0.0, self._args)

    def close(self) -> None:
        """Close the environment if it was made."""
        if self._env is not None and callable(getattr(self._env, "close", None)):
            self._env.close()


def _message(value: Any, where: str) -> Message:
    """Read what `format_observation` returned; a list of texts alone becomes text, which
    text-only templates take."""
    if not isinstance(value, Mapping) or "content" not in value:
        raise EnvError(
            f"{where}: format_observation returned {describe_value(value)}; return a message with "
            "role and content"
        )

    content = value["content"]
    if isinstance(content, list) and all(map(_is_text_part, content)):
        content = join_texts([str(part.get("text", "")) for part in content])
    return Message.of({**value, "content": content})


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text"


def _read_reward(value: Any, args: Any) -> Scores:
    """Read a reward: a number, or a dict from which `reward_key` names one; the
    other numbers are parts."""
    if not isinstance(value, Mapping):
        return Scores(as_number(value, "the reward"))

    key = args.reward_key
    if key is None or key not in value:
        raise RewardError(
            f"the reward is a dict ({', '.join(map(str, value))}); name one by [env.args] "
            "reward_key"
        )
    parts = {
        str(name): float(part) for name, part in value.items() if isinstance(part, (int, float))
    }
    return Scores(as_number(value[key], f"the reward {key!r}"), parts=parts)


def _agent_function(
    generate: Callable[..., Any], settings: Mapping[str, Any], miles: bool, where: str, base: Path
) -> Callable[[Task, Any], Any]:
    """Make an agent function of a custom generate function."""

    async def play(task: Task, model: Any) -> Scores:
        skip_special_tokens = bool(settings.get("rollout_skip_special_tokens"))
        server = EngineServer(model, skip_special_tokens, base)
        token = EPISODE.set(server)
        try:
            server.open()
            args = _arguments(settings, model.limits, server)
            sample = new_sample(task, _prompt(task, model, args))
            returned = await _call(generate, args, sample, server, miles)

            returned_list = isinstance(returned, (list, tuple))
            samples = list(returned) if returned_list else [returned]
            if not samples or not all(hasattr(sample, "response_length") for sample in samples):
                raise EnvError(
                    f"{where} returned {describe_value(returned)}; return a Sample, or a list of "
                    "them"
                )
            rewards = await _rewards_of(samples, args, where, together=returned_list)
        finally:
            EPISODE.reset(token)
            await server.close()

        for sample in samples:
            server.check_train_inputs(sample)
        rows = _rows(samples)
        rows["rewards"] = [reward.own or 0.0 for reward in rewards]
        scores = read_output(
            rows,
            server.calls,
            model.weigh,
            "loss_mask",
            "rollout_log_probs",
            own_rewards=len(samples) > 1,
            is_blank=lambda ids: not model.tokenizer.decode(ids).strip(),
        )

        own = scores.own
        if any(reward.own is None for reward in rewards):
            own = None
        status = _worst_status(samples)
        return replace(scores, own=own, parts=_mean_parts(rewards), status=status)  # type: ignore[arg-type]

    return play


def _worst_status(samples: Sequence[Any]) -> str:
    """Return the status of the sample that ended worst."""
    statuses = [STATUSES[_status_of(sample)] for sample in samples]
    return max(statuses, key=list(STATUSES.values()).index)


def _mean_parts(rewards: Sequence[Scores]) -> dict[str, float]:
    """Return the mean of each part over the samples; 0 where a sample has none of that name."""
    names = dict.fromkeys(name for reward in rewards for name in reward.parts)
    return {
        name: sum(reward.parts.get(name, 0.0) for reward in rewards) / len(rewards)
        for name in names
    }


async def _call(
    generate: Callable[..., Any], args: Any, sample: Any, server: EngineServer, miles: bool
) -> Any:
    """Call a generate function as slime or Miles does; return its samples."""
    params = server.sampling_params()
    if miles:
        module = import_foreign("miles.rollout.base_types")
        output = await generate(module.GenerateFnInput(GenerateState(args), sample, params, False))
        return getattr(output, "samples", output)

    signature = signature_of(generate)
    if signature is not None and "evaluation" in signature.parameters:
        return await generate(args, sample, params, evaluation=False)
    return await generate(args, sample, params)


def _prompt(task: Task, model: Any, args: Any) -> Any:
    """Return `sample.prompt`: the rendered conversation; with `apply_chat_template = false` the
    row's text, or messages."""
    messages = [message.to_dict() for message in task.messages]
    if args.apply_chat_template:
        return model.tokenizer.apply_chat_template(
            messages, tokenize=False, tools=_tools_of(task) or None, add_generation_prompt=True
        )
    text = task.messages[0].content if task.is_text else None
    return text if isinstance(text, str) else messages


def _tools_of(task: Task) -> Sequence[Mapping[str, Any]]:
    """Return the schemas of the row's tools, which may be written as JSON."""
    tools = task.info.get("tools") or (task.info.get("metadata") or {}).get("tools") or ()
    return read_tools(tools, f"task {task.id}")


def _rows(samples: list[Any]) -> dict[str, Any]:
    """Return samples as columns of ids, masks and logprobs."""
    rows: dict[str, Any] = {
        "prompt_token_ids": [],
        "response_ids": [],
        "loss_masks": [],
        "rollout_logprobs": [],
    }
    for sample in samples:
        length = sample.response_length
        start = len(sample.tokens) - length
        rows["prompt_token_ids"].append(list(sample.tokens[:start]))
        rows["response_ids"].append(list(sample.tokens[start:]))

        mask = [1] * length if sample.loss_mask is None else list(sample.loss_mask)
        rows["loss_masks"].append([0] * len(mask) if sample.remove_sample else mask)
        logprobs = sample.rollout_log_probs
        rows["rollout_logprobs"].append(list(logprobs) if logprobs else [None] * length)

    if all(logprob is None for row in rows["rollout_logprobs"] for logprob in row):
        rows["rollout_logprobs"] = None
    return rows


def _is_scored(sample: Any, args: Any) -> bool:
    """Whether the recipe or the row names a reward."""
    return bool(args.custom_rm_path or args.rm_type or (sample.metadata or {}).get("rm_type"))


async def _scored(sample: Any, args: Any) -> Any:
    """Return the reward that the recipe or the row names; a list of them for a list of samples."""
    function = args.custom_rm_path
    if function is not None:
        # slime calls it by position, whatever its parameters are named.
        return await call_user(functools.partial(function, args, sample), {})

    rewards = import_foreign("slime.rollout.rm_hub")
    if isinstance(sample, list):
        return await rewards.batched_async_rm(args, sample)
    return await rewards.async_rm(args, sample)


def _status_of(sample: Any) -> str:
    """Return the name of a sample's status, which may be a text; any other counts as
    COMPLETED, as in slime."""
    status = sample.status
    name = status.name if isinstance(status, Enum) else str(status).upper()
    return name if name in STATUSES else "COMPLETED"


async def _rewards_of(
    samples: Sequence[Any], args: Any, where: str, *, together: bool
) -> list[Scores]:
    """Return the rewards of the samples of one episode; none where one was aborted.

    With `together`, a generate function returned a list: those without a reward are scored in
    one call, as slime does.
    """
    if any(_status_of(sample) in ("ABORTED", "FAILED") for sample in samples):
        return [Scores(None)] * len(samples)

    unscored = [sample for sample in samples if sample.reward is None and _is_scored(sample, args)]
    # By identity: a list may hold one sample twice, and samples of one content are equal.
    values = {id(sample): sample.reward for sample in samples}
    if together and unscored:
        rewards = await _scored(unscored, args)
        if not isinstance(rewards, (list, tuple)) or len(rewards) != len(unscored):
            raise RewardError(
                f"{where}: the reward returned {describe_value(rewards)} for {len(unscored)} "
                "samples; generate returned a list, so it gets a list and returns as many rewards"
            )
        values |= {id(sample): reward for sample, reward in zip(unscored, rewards, strict=True)}
    else:
        for sample in unscored:
            values[id(sample)] = await _scored(sample, args)

    if any(value is None for value in values.values()):
        raise RewardError(
            f"{where}: the sample has no reward; set it, or give [env.args] custom_rm_path or "
            "rm_type"
        )
    return [_read_reward(values[id(sample)], args) for sample in samples]


def find(id: str) -> Registered | None:
    """Return slime's own generate function; None for another id."""
    return Registered("slime", id) if id in IDS else None
