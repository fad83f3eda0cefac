"""A user's own `AgentLoopBase` of verl as an agent function: one loop for each
episode, over our engine.

`make_agent_function` checks the loop's class once; the function that it returns makes a loop,
runs it over a `ServerManager`, and reads the outputs. How rows of ids become weights is in
`read_output` of `sampled_rows.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from turnwright.config import Limits
from turnwright.envs.datasets import MEDIA_COLUMNS
from turnwright.envs.env import Scores
from turnwright.envs.user_code import call_user, describe_value
from turnwright.envs.user_imports import import_foreign
from turnwright.errors import ConfigError, EnvError, suggest_or_list
from turnwright.types import Task
from turnwright_compat.common import accepted, attribute_config
from turnwright_compat.sampled_rows import EngineCall, read_output, sampling_options
from turnwright_compat.verl.tools import read_score

GIVEN = (
    "trainer_config",
    "server_manager",
    "tokenizer",
    "processor",
    "dataset_cls",
    "data_config",
    "hf_model_type",
    "tools",
)
"""Arguments of the constructor that verl gives."""
SETTINGS = ("rollout", "data", "hf_model_type")
"""Arguments of `[env.args]` that are parts of verl's configuration."""
OF_ADAPTER = ("reward", "reward_kwargs", "tool_config_path", "function_tool_path")
"""Arguments of `[env.args]` that the adapter reads."""


def make_agent_function(
    target: Any,
    args: Mapping[str, Any],
    reward: Callable[..., Any] | None,
    where: str,
    tools: list[Any],
) -> Callable[[Task, Any], Awaitable[Scores]]:
    """Make an agent function of a loop class; arguments of its constructor that verl does
    not give come from `args`.

    `tools`: verl's objects, which the loop calls.
    """
    parameters = inspect.signature(target).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    own_arguments = {key: value for key, value in args.items() if key not in SETTINGS}
    _check_class(target, own_arguments, takes_any, where)
    module = import_foreign("verl.experimental.agent_loop.agent_loop")

    async def play(task: Task, model: Any) -> Scores:
        server = ServerManager(model)
        rollout_config = _rollout_config(model.limits, args.get("rollout") or {})
        trainer_config = {"actor_rollout_ref": {"rollout": rollout_config}}
        given = {
            "trainer_config": module.DictConfigWrap(attribute_config(trainer_config)),
            "server_manager": server,
            "tokenizer": model.tokenizer,
            "processor": None,
            "dataset_cls": None,
            "data_config": module.DictConfigWrap(attribute_config(dict(args.get("data") or {}))),
            "hf_model_type": args.get("hf_model_type"),
            "tools": module.ToolListWrap(list(tools)),
        }
        taken = {
            key: value
            for key, value in given.items()
            if takes_any or _is_named(parameters.get(key))
        }
        loop = target(**(taken | own_arguments))
        returned = await loop.run(_sampling_params(model.sampling), **_row(task))

        outputs = list(returned) if isinstance(returned, (list, tuple)) else [returned]
        # The class of an output is verl's, installed or ours, so its attributes are asked.
        if not outputs or not all(getattr(output, "response_ids", None) for output in outputs):
            raise EnvError(
                f"run returned {describe_value(returned)}; return an AgentLoopOutput with "
                "response_ids, or several"
            )

        # The last of several outputs is what verl scores; its score is that of all.
        last = outputs[-1]
        if last.reward_score is not None:
            scores = Scores(last.reward_score)
        else:
            scores = await _computed(reward, task, model, last, where)
        row_scores = read_output(
            _rows_of(outputs), server.calls, model.weigh, "response_mask", "response_logprobs"
        )
        return replace(row_scores.with_added(scores.own), parts=scores.parts)

    return play


def _is_named(parameter: inspect.Parameter | None) -> bool:
    """Return whether a parameter can be given by its name."""
    if parameter is None:
        return False
    return parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def _check_class(
    target: Any, own_arguments: Mapping[str, Any], takes_any: bool, where: str
) -> None:
    """Raise `ConfigError` for an argument too many or too few, or a class without `run`."""
    parameters = inspect.signature(target).parameters
    named = [key for key, parameter in parameters.items() if _is_named(parameter)]

    for key in own_arguments:
        if key in GIVEN or (key not in named and not takes_any):
            candidates = (*named, *SETTINGS, *OF_ADAPTER)
            known = [name for name in candidates if name not in GIVEN or name in SETTINGS]
            raise ConfigError(f"{where} has no argument {key!r}; {suggest_or_list(key, known)}")
    for key in named:
        is_required = parameters[key].default is inspect.Parameter.empty
        if key not in (*GIVEN, *own_arguments) and is_required:
            raise ConfigError(f"{where} needs the argument {key!r}; give it under [env.args]")

    missing = sorted(getattr(target, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(
            f"{where} lacks {' and '.join(missing)}; an agent loop has async run(sampling_params, "
            "**kwargs)"
        )


def _rows_of(outputs: list[Any]) -> dict[str, Any]:
    """Return the outputs of a loop as columns; the episode's reward is added to them later."""
    logprobs = [output.response_logprobs or None for output in outputs]
    if None in logprobs and any(logprobs):
        raise EnvError(
            "run returned response_logprobs for some of its outputs; give them for all, or for none"
        )
    return {
        "prompt_token_ids": [output.prompt_ids for output in outputs],
        "response_ids": [output.response_ids for output in outputs],
        "loss_masks": [output.response_mask for output in outputs],
        "rewards": [0.0] * len(outputs),
        "rollout_logprobs": logprobs if all(logprobs) else None,
    }


def _sampling_params(sampling: Any) -> dict[str, Any]:
    """Return what verl gives to `run`: how the run samples, and that logprobs are wanted."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "repetition_penalty": 1.0,
        "logprobs": True,
    }


def _rollout_config(limits: Limits, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of verl's rollout configuration loops read, by our limits."""
    multi_turn = {
        "max_user_turns": None,
        "max_assistant_turns": limits.turns,
        "max_parallel_calls": 1,
        "max_tool_response_length": 256,
        "tool_response_truncate_side": "middle",
        "format": "hermes",
    }
    config = {
        "prompt_length": limits.prompt_tokens or limits.context or 1 << 20,
        "response_length": limits.episode_tokens or limits.turns * limits.turn_tokens,
        "full_determinism": False,
        "calculate_log_probs": True,
    }
    return {**config, **changes, "multi_turn": {**multi_turn, **(changes.get("multi_turn") or {})}}


def _row(task: Task) -> dict[str, Any]:
    """Return the columns of a task's row, as verl's dataset gives them to a loop."""
    row = {key: value for key, value in task.other_columns.items() if key not in MEDIA_COLUMNS}
    row |= task.info
    extra_info = dict(row.get("extra_info") or {})

    row.setdefault("reward_model", {"ground_truth": task.answer})
    for key in ("tools_kwargs", "interaction_kwargs"):
        row.setdefault(key, extra_info.get(key) or {})
    return row | {
        "raw_prompt": [message.to_dict() for message in task.messages],
        "extra_info": extra_info,
        "index": extra_info.get("index", 0),
    }


async def _computed(
    reward: Callable[..., Any] | None, task: Task, model: Any, output: Any, where: str
) -> Scores:
    """Return the score of an episode whose loop gave none; `extra_info` has what verl's reward
    loop adds to the row's."""
    if reward is None:
        raise EnvError(
            f"{where}: run returned no reward_score; give [env.args] reward = "
            '"file.py:compute_score"'
        )

    extra_info = {
        **(task.info.get("extra_info") or {}),
        **(vars(output).get("extra_fields") or {}),
        "num_turns": output.num_turns,
        "rollout_reward_scores": {},
    }
    response = model.tokenizer.decode(list(output.response_ids), skip_special_tokens=True)
    arguments = {
        "data_source": task.info.get("data_source"),
        "solution_str": response,
        "ground_truth": task.answer,
        "extra_info": extra_info,
    }
    return read_score(await call_user(partial(reward, **accepted(reward, arguments)), {}))


class ServerManager:
    """The engine as verl's loops call it; keeps the calls in order."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._output: Any = import_foreign("verl.workers.rollout.replica").TokenOutput
        self.calls: list[EngineCall] = []

    async def generate(
        self,
        request_id: Any,
        *,
        prompt_ids: list[int],
        sampling_params: Mapping[str, Any],
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        **_: Any,
    ) -> Any:
        """Sample a reply to ids."""
        if video_data:
            raise EnvError("the loop gives videos to generate; give their frames as images")

        ids = [int(token_id) for token_id in prompt_ids]
        options = sampling_options(sampling_params, image_data)
        reply = await self._model.generate(ids, **options)
        self.calls.append(EngineCall(ids, reply))
        return self._output(
            token_ids=list(reply.ids),
            log_probs=[logprob or 0.0 for logprob in reply.logprobs],
            stop_reason="aborted" if reply.finish == "abort" else "completed",
            num_preempted=0,
            extra_fields={},
        )
