"""A user's own `GeneratorInterface` of SkyRL as an agent function: one generator for each
episode, over our engine.

`make_agent_function` checks the generator's class once; the function that it returns makes a
generator, has it generate a batch of one episode over an `EngineClient`, and reads the output. How
rows of ids become weights is in `read_output` of `sampled_rows.py`.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import inspect
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any, get_args, get_type_hints

from turnwright.config import Limits
from turnwright.envs.env import Scores
from turnwright.envs.user_imports import STAND_INS, import_foreign, public_name
from turnwright.errors import ConfigError, EnvError, suggest_or_list
from turnwright.media.references import media_as_bytes
from turnwright.types import Image, Message, Task, Video
from turnwright_compat.common import attribute_config, constructor_parameters, settings
from turnwright_compat.sampled_rows import EngineCall, read_output, sampling_options

CONFIGS = ("generator_cfg", "skyrl_gym_cfg")
GIVEN = (*CONFIGS, "inference_engine_client", "tokenizer", "model_name", "policy_model_name")


_defaults = importlib.import_module(f"{STAND_INS}.skyrl.train.config.config")
_engine = importlib.import_module(
    f"{STAND_INS}.skyrl.backends.skyrl_train.inference_servers.engine_utils"
)


def extras_of(task: Task, limits: Limits) -> dict[str, Any]:
    """Return the columns of a task's row but its prompt, and `max_turns`."""
    return copy.deepcopy(task.columns) | {"max_turns": limits.turns}


def given_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as SkyRL gives them to user code: plain data, with the images of
    the row as data URLs."""
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
        given: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
        if part.alt is not None:
            given["alt"] = part.alt
        if part.max_pixels:
            given["max_pixels"] = part.max_pixels
        return given
    if isinstance(part, Video):
        return {"type": "video", "video": part}
    return part.to_dict()


def make_agent_function(
    target: Any, args: Mapping[str, Any], where: str
) -> Callable[[Task, Any], Awaitable[Scores]]:
    """Make an agent function of a generator class; parameters of its constructor that SkyRL does
    not give come from `args`."""
    parameters, takes_any = constructor_parameters(target)
    named = [
        key
        for key, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    # A user's own entrypoint makes the generator, so the engine's client may have another name.
    clients = [
        key
        for key, parameter in parameters.items()
        if "InferenceEngine" in str(parameter.annotation)
    ]

    for key in args:
        if key not in (*CONFIGS, *named) and not takes_any:
            raise ConfigError(
                f"{where} has no argument {key!r}; {suggest_or_list(key, [*CONFIGS, *named])}"
            )
    for key in named:
        is_required = parameters[key].default is inspect.Parameter.empty
        if is_required and key not in (*GIVEN, *clients, *args):
            raise ConfigError(f"{where} needs the argument {key!r}; give it under [env.args]")
    missing = sorted(getattr(target, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(
            f"{where} lacks {' and '.join(missing)}; a generator has async generate(input_batch)"
        )

    async def play(task: Task, model: Any) -> Scores:
        client = EngineClient(model)
        generator_config = _generator_config(target, model, args.get("generator_cfg") or {})
        gym_config = {"max_env_workers": 0, **(args.get("skyrl_gym_cfg") or {})}
        values = {
            "generator_cfg": generator_config,
            "skyrl_gym_cfg": attribute_config(gym_config),
            "inference_engine_client": client,
            "tokenizer": model.tokenizer,
            "model_name": None,
            "policy_model_name": None,
            **dict.fromkeys(clients, client),
        }
        for key, value in args.items():
            if key not in CONFIGS:
                values[key] = copy.deepcopy(attribute_config(value))

        taken = {key: value for key, value in values.items() if takes_any or key in named}
        generator = target(**taken)
        batch = _batch(target, task, model.limits, generator_config)
        output = await generator.generate(batch)
        return read_output(output, client.calls, model.weigh)

    return play


def _generator_config(target: Any, model: Any, changes: Mapping[str, Any]) -> Any:
    """Return SkyRL's configuration of generators by our limits, with the fields of the user's
    own where it has one."""
    limits, sampling = model.limits, model.sampling
    of_run = {
        "max_turns": limits.turns,
        "max_input_length": limits.context or 1 << 20,
        "sampling_params": {
            "max_generate_length": limits.turn_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
        },
    }
    config = _merged(asdict(_defaults.GeneratorConfig()), _defaults_of(target))
    config = _merged(config, of_run)
    config["eval_sampling_params"] = None
    config = _merged(config, changes)

    for key in ("sampling_params", "chat_template", "inference_engine"):
        if isinstance(config[key], Mapping):
            config[key] = settings(key.title().replace("_", ""), config[key])
    return settings("GeneratorConfig", config)


def _defaults_of(target: Any) -> dict[str, Any]:
    """Return the defaults of the dataclass that a constructor annotates `generator_cfg` with."""
    for base in inspect.getmro(target):
        try:
            hint = get_type_hints(vars(base).get("__init__")).get("generator_cfg")
        except Exception:  # an annotation of a type that is not installed, or no constructor
            continue
        for config_class in (hint, *get_args(hint)):  # also a part of `Config | None`
            if inspect.isclass(config_class) and is_dataclass(config_class):
                return _field_defaults(config_class)
    return {}


def _field_defaults(config_class: Any) -> dict[str, Any]:
    """Return the defaults of a dataclass by field, those that are dataclasses as dicts."""
    constants: dict[str, Any] = {}
    made: dict[str, Any] = {}
    for field in fields(config_class):
        if field.default is not MISSING:
            constants[field.name] = field.default
        if field.default_factory is not MISSING:
            made[field.name] = field.default_factory()
    return {
        name: asdict(value) if hasattr(type(value), "__dataclass_fields__") else value
        for name, value in {**constants, **made}.items()
    }


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with changes, those of nested tables one by one."""
    merged = dict(values)
    for key, value in changes.items():
        before = merged.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            value = _merged(before, value)
        merged[key] = value
    return merged


def _batch(target: Any, task: Task, limits: Limits, config: Any) -> dict[str, Any]:
    """Return the input of one episode."""
    # The batch's classes are of the same SkyRL, installed or ours, as the generator's base class.
    modules = (
        public_name(base.__module__)
        for base in target.__mro__
        if base.__name__ == "GeneratorInterface"
    )
    module = import_foreign(next(modules, "skyrl.train.generators.base"))

    extras = extras_of(task, limits)
    return {
        "prompts": [given_messages(task.messages)],
        "env_classes": [str(extras.get("env_class", ""))],
        "env_extras": [extras],
        "sampling_params": _engine.get_sampling_params_for_backend("vllm", config.sampling_params),
        "trajectory_ids": [module.TrajectoryID(task.id, 0)],
        "batch_metadata": module.BatchMetadata(0, "train"),
    }


class EngineClient:
    """The engine as SkyRL's generators call it; keeps the calls in order."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.calls: list[EngineCall] = []

    async def generate(
        self, input_batch: Mapping[str, Any], model: str | None = None
    ) -> dict[str, Any]:
        """Sample a reply to each prompt, which is given as ids or as messages."""
        prompts_of_ids = input_batch.get("prompt_token_ids")
        if prompts_of_ids is not None:
            prompts = prompts_of_ids
        else:
            prompts = input_batch.get("prompts") or []
        options = sampling_options(input_batch.get("sampling_params") or {})
        replies = await asyncio.gather(
            *(self._model.generate(list(prompt), **options) for prompt in prompts)
        )
        for prompt, reply in zip(prompts, replies, strict=True):
            context = None if prompts_of_ids is None else list(prompt)
            self.calls.append(EngineCall(context, reply))

        decode = self._model.tokenizer.decode
        return {
            "responses": [decode(list(reply.ids), skip_special_tokens=True) for reply in replies],
            "response_ids": [list(reply.ids) for reply in replies],
            "stop_reasons": [reply.finish for reply in replies],
            "response_logprobs": [
                [logprob or 0.0 for logprob in reply.logprobs] for reply in replies
            ],
        }

    def get_endpoint_url(self) -> str:
        """Raise: the replies of an agent that has its own HTTP client are recorded by the proxy."""
        raise EnvError(
            "get_endpoint_url: the engine has no HTTP endpoint here; play an agent with its own "
            'client by use = "program", with [env.args] agent = "file.py:function", which gets '
            "the URL of its episode"
        )

    async def finish_session(self, session_id: Any) -> None:
        """Do nothing: the episode ends its own session."""
