"""A user's own `GeneratorInterface` of SkyRL as an agent function: one generator for each episode, over our engine."""

from __future__ import annotations

import asyncio
import copy
import inspect
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from turnwise.compat.common import attribute_config, constructor_parameters
from turnwise.compat.sampled_rows import EngineCall, read_output, sampling_options
from turnwise.config import Limits
from turnwise.envs.base import Scores
from turnwise.envs.user_imports import import_foreign, public_name
from turnwise.errors import ConfigError, suggest_or_list
from turnwise.media.messages import media_as_bytes
from turnwise.types import Image, Message, Task, Video

CONFIGS = ("generator_cfg", "skyrl_gym_cfg")
GIVEN = (*CONFIGS, "inference_engine_client", "tokenizer", "model_name", "policy_model_name")


def extras_of(task: Task, limits: Limits) -> dict[str, Any]:
    """Return the columns of a task's row but its prompt, and `max_turns`."""
    return copy.deepcopy(task.columns) | {"max_turns": limits.turns}


def given_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as SkyRL gives them to user code: plain data, with the images of the row as data URLs."""
    rows = []
    for message in media_as_bytes(messages):
        row = message.to_dict()
        if not isinstance(message.content, str):
            row["content"] = [_given_part(part) for part in message.content]
        rows.append(row)
    return rows


def _given_part(part: Any) -> Any:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Image) and isinstance(part.value, bytes):
        url = f"data:image;base64,{b64encode(part.value).decode('ascii')}"
        further = {"alt": part.alt, "max_pixels": part.max_pixels or None}
        return {"type": "image_url", "image_url": {"url": url}, **{key: one for key, one in further.items() if one is not None}}
    return {"type": "video", "video": part} if isinstance(part, Video) else part.to_dict()


def make_agent_function(target: Any, args: Mapping[str, Any], where: str) -> Callable[[Task, Any], Awaitable[Scores]]:
    """Make an agent function of a generator class; parameters of its constructor that SkyRL does not give come from `args`."""
    parameters, takes_any = constructor_parameters(target)
    named = [key for key, one in parameters.items() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    for key in args:
        if key not in (*CONFIGS, *named) and not takes_any:
            raise ConfigError(f"{where} has no argument {key!r}; {suggest_or_list(key, [*CONFIGS, *named])}")
    for key in named:
        if key not in (*GIVEN, *args) and parameters[key].default is inspect.Parameter.empty:
            raise ConfigError(f"{where} needs the argument {key!r}; give it under [env.args]")
    if missing := sorted(getattr(target, "__abstractmethods__", ())):
        raise ConfigError(f"{where} lacks {' and '.join(missing)}; a generator has async generate(input_batch)")

    async def play(task: Task, model: Any) -> Scores:
        client = EngineClient(model)
        given = {
            "generator_cfg": _generator_config(model.limits, args.get("generator_cfg") or {}),
            "skyrl_gym_cfg": attribute_config({"max_env_workers": 0, **(args.get("skyrl_gym_cfg") or {})}),
            "inference_engine_client": client,
            "tokenizer": model.tokenizer,
            "model_name": None,
            "policy_model_name": None,
        }
        own = {key: value for key, value in args.items() if key not in CONFIGS}
        taken = {key: value for key, value in {**given, **own}.items() if takes_any or key in named}
        generator = target(**taken)
        output = await generator.generate(_batch(target, task, model.limits))
        return read_output(output, client.calls, model.weigh)

    return play


def _generator_config(limits: Limits, given: Mapping[str, Any]) -> Any:
    sampling = {"max_generate_length": limits.turn_tokens, "logprobs": 1, "stop": None, **(given.get("sampling_params") or {})}
    config: dict[str, Any] = {
        "max_turns": limits.turns,
        "max_input_length": limits.context,
        "batched": False,
        "use_conversation_multi_turn": True,
        "chat_template_kwargs": {},
        "step_wise_trajectories": False,
        "zero_reward_on_non_stop": False,
        "apply_overlong_filtering": False,
        "append_eos_token_after_stop_str_in_multi_turn": True,
    }
    return attribute_config({**config, **given, "sampling_params": sampling})


def _batch(target: Any, task: Task, limits: Limits) -> dict[str, Any]:
    """Return the input of one episode."""
    homes = (public_name(base.__module__) for base in target.__mro__ if base.__name__ == "GeneratorInterface")
    home = next(homes, "skyrl.train.generators.base")
    module = import_foreign(home)
    extras = extras_of(task, limits)
    return {
        "prompts": [given_messages(task.messages)],
        "env_classes": [str(extras.get("env_class", ""))],
        "env_extras": [extras],
        "sampling_params": None,
        "trajectory_ids": [module.TrajectoryID(task.id, 0)],
        "batch_metadata": module.BatchMetadata(0, "train"),
    }


class EngineClient:
    """The engine as SkyRL's generators call it; keeps the calls in order."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.calls: list[EngineCall] = []

    async def generate(self, input_batch: Mapping[str, Any], model: str | None = None) -> dict[str, Any]:
        """Sample a reply to each prompt, which is given as ids or as messages."""
        by_ids = input_batch.get("prompt_token_ids")
        prompts = by_ids if by_ids is not None else input_batch.get("prompts") or []
        options = sampling_options(input_batch.get("sampling_params") or {})
        replies = await asyncio.gather(*(self._model.generate(list(prompt), **options) for prompt in prompts))
        for prompt, reply in zip(prompts, replies, strict=True):
            self.calls.append(EngineCall(None if by_ids is None else list(prompt), reply))
        decode = self._model.tokenizer.decode
        return {
            "responses": [decode(list(reply.ids), skip_special_tokens=True) for reply in replies],
            "response_ids": [list(reply.ids) for reply in replies],
            "stop_reasons": [reply.finish for reply in replies],
            "response_logprobs": [[one or 0.0 for one in reply.logprobs] for reply in replies],
        }

    async def finish_session(self, session_id: Any) -> None:
        """Do nothing: the episode ends its own session."""
