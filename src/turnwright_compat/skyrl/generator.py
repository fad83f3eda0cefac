"""A user's own `GeneratorInterface` of SkyRL as an agent function: one generator for each
episode, over our engine."""

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
        further = {"alt": part.alt, "max_pixels": part.max_pixels or None}
        return {
            "type": "image_url",
            "image_url": {"url": url},
            **{key: one for key, one in further.items() if one is not None},
        }
    return {"type": "video", "video": part} if isinstance(part, Video) else part.to_dict()


def make_agent_function(
    target: Any, args: Mapping[str, Any], where: str
) -> Callable[[Task, Any], Awaitable[Scores]]:
    """Make an agent function of a generator class; parameters of its constructor that SkyRL does
    not give come from `args`."""
    parameters, takes_any = constructor_parameters(target)
    named = [
        key
        for key, one in parameters.items()
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    ]
    for key in args:
        if key not in (*CONFIGS, *named) and not takes_any:
            raise ConfigError(
                f"{where} has no argument {key!r}; {suggest_or_list(key, [*CONFIGS, *named])}"
            )
    # A user's own entrypoint makes the generator, so the engine's client may have another name.
    clients = [key for key, one in parameters.items() if "InferenceEngine" in str(one.annotation)]
    for key in named:
        if (
            key not in (*GIVEN, *clients, *args)
            and parameters[key].default is inspect.Parameter.empty
        ):
            raise ConfigError(f"{where} needs the argument {key!r}; give it under [env.args]")
    if missing := sorted(getattr(target, "__abstractmethods__", ())):
        raise ConfigError(
            f"{where} lacks {' and '.join(missing)}; a generator has async generate(input_batch)"
        )

    async def play(task: Task, model: Any) -> Scores:
        client = EngineClient(model)
        given = {
            "generator_cfg": _generator_config(target, model, args.get("generator_cfg") or {}),
            "skyrl_gym_cfg": attribute_config(
                {"max_env_workers": 0, **(args.get("skyrl_gym_cfg") or {})}
            ),
            "inference_engine_client": client,
            "tokenizer": model.tokenizer,
            "model_name": None,
            "policy_model_name": None,
            **dict.fromkeys(clients, client),
        }
        own = {
            key: copy.deepcopy(attribute_config(value))
            for key, value in args.items()
            if key not in CONFIGS
        }
        taken = {key: value for key, value in {**given, **own}.items() if takes_any or key in named}
        generator = target(**taken)
        output = await generator.generate(
            _batch(target, task, model.limits, given["generator_cfg"])
        )
        return read_output(output, client.calls, model.weigh)

    return play


def _generator_config(target: Any, model: Any, given: Mapping[str, Any]) -> Any:
    """Return SkyRL's configuration of generators by our limits, with the fields of the user's
    own where it has one."""
    limits, sampling = model.limits, model.sampling
    own = {
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
    config = _merged(_merged(asdict(_defaults.GeneratorConfig()), _defaults_of(target)), own)
    config["eval_sampling_params"] = None
    config = _merged(config, given)
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
        for one in (hint, *get_args(hint)):
            if inspect.isclass(one) and is_dataclass(one):
                made = {
                    field.name: field.default
                    for field in fields(one)
                    if field.default is not MISSING
                }
                made |= {
                    field.name: field.default_factory()
                    for field in fields(one)
                    if field.default_factory is not MISSING
                }
                return {
                    key: asdict(value) if hasattr(type(value), "__dataclass_fields__") else value
                    for key, value in made.items()
                }
    return {}


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with changes, those of nested tables one by one."""
    found = dict(values)
    for key, value in changes.items():
        before = found.get(key)
        found[key] = (
            _merged(before, value)
            if isinstance(before, Mapping) and isinstance(value, Mapping)
            else value
        )
    return found


def _batch(target: Any, task: Task, limits: Limits, config: Any) -> dict[str, Any]:
    """Return the input of one episode."""
    homes = (
        public_name(base.__module__)
        for base in target.__mro__
        if base.__name__ == "GeneratorInterface"
    )
    home = next(homes, "skyrl.train.generators.base")
    module = import_foreign(home)
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
        by_ids = input_batch.get("prompt_token_ids")
        prompts = by_ids if by_ids is not None else input_batch.get("prompts") or []
        options = sampling_options(input_batch.get("sampling_params") or {})
        replies = await asyncio.gather(
            *(self._model.generate(list(prompt), **options) for prompt in prompts)
        )
        for prompt, reply in zip(prompts, replies, strict=True):
            self.calls.append(EngineCall(None if by_ids is None else list(prompt), reply))
        decode = self._model.tokenizer.decode
        return {
            "responses": [decode(list(reply.ids), skip_special_tokens=True) for reply in replies],
            "response_ids": [list(reply.ids) for reply in replies],
            "stop_reasons": [reply.finish for reply in replies],
            "response_logprobs": [[one or 0.0 for one in reply.logprobs] for reply in replies],
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
