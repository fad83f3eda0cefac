"""Constraints across fields, and referenced files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from turnwise.config.constraints import PathKind, did_you_mean, field_errors, is_template_file, path_kinds, without_effect
from turnwise.config.schema import COLUMNS, EnvConfig, RunConfig, TrainConfig, truncation_key
from turnwise.errors import ConfigError

BATCH_ADVANTAGES = ("reinforce_pp",)
"""Algorithms that compare a trajectory with the whole batch alone, so that groups may be of one."""


def uses_group_baseline(train: TrainConfig) -> bool:
    """Whether a trajectory is compared with the others of its task."""
    if train.advantage is not None:
        return train.advantage != "batch"
    return train.algorithm not in BATCH_ADVANTAGES


def conflicting_keys(train: TrainConfig) -> tuple[str, str] | None:
    """The first key whose value another one excludes, and why; None where all fit."""
    if train.correction != "none" and train.old_logprobs == "engine":
        why = 'would count twice what old_logprobs = "engine" puts into the ratio already; set old_logprobs = "trainer"'
        return "correction", why
    if train.correction_low is not None and train.correction in ("none", "tis"):
        return "correction_low", f'has no meaning with correction = "{train.correction}", which has no lower bound'
    if train.correction_high is not None and train.correction == "none":
        return "correction_high", 'has no meaning with correction = "none"'
    low, high = train.correction_low, train.correction_high
    if low is not None and high is not None and low >= high:
        return "correction_low", f"must be under train.correction_high = {high:g}"
    if train.kl_in == "reward" and train.kl_estimator not in (None, "k1"):
        return "kl_estimator", 'k1 is what is taken off a reward: k2 and k3 are always positive there; set kl_in = "loss"'
    if train.kl and train.reference == "none":
        return "reference", f"train.kl = {train.kl:g} needs a policy to stay near to; set kl = 0, or leave this key out"
    batch = train.advantage or {"reinforce_pp": "batch", "reinforce_pp_baseline": "group_batch"}.get(train.algorithm)
    if train.refill and batch in ("batch", "group_batch"):
        return (
            "refill",
            f'replaces groups without a difference of their own; advantage = "{batch}" compares with the whole batch',
        )
    if train.discount != 1.0 and train.credit != "turn":
        return "discount", 'is between turns; set credit = "turn"'
    return None


class _Reporter:
    """Says no, naming the place that a value came from."""

    def __init__(self, where: Mapping[str, str], file: str) -> None:
        self.where = where
        self.file = file

    def refuse(self, key: str, value: Any, why: str) -> ConfigError:
        place = self.where.get(key, "default")
        if place == "command line":
            return ConfigError(f"command line: --{key.replace('_', '-')} {value}: {why}")
        file = self.file if place == "default" else place
        shown = f'"{value}"' if isinstance(value, str) else value
        return ConfigError(f"{file}: {key} = {shown}{' (the default)' if place == 'default' else ''}: {why}")


def validate(
    config: RunConfig,
    where: Mapping[str, str],
    file: str,
    *,
    envs: Collection[str] | None = None,
    templates: Collection[str] | None = None,
    training: bool = True,
    given: Collection[str] | None = None,
    has_objects: bool = False,
) -> None:
    """Hold a configuration to what must be true before anything is loaded.

    Args:
        config: what was read.
        where: dotted key -> file or `command line`, for values that are not defaults.
        file: what to name where a default is wrong.
        envs: names of the built-in environments, None when they are not known here.
        templates: names of the chat templates that can be named, likewise.
        training: whether the run will train.
        given: keys to refuse where they have no effect; None takes those of `where`.
        has_objects: whether environments are given as objects, so that the configuration names none.

    Raises:
        ConfigError: for the first thing that is wrong.
    """
    say = _Reporter(where, file)
    for prefix, section in _sections(config):
        for name, value, error in field_errors(section, training=training):
            raise say.refuse(f"{prefix}.{name}".removeprefix("."), value, error)
    _check_model(config, say)
    _check_template(config, say, templates)
    if not has_objects:
        _check_envs(config, say, envs)
    _check_files(config, say)
    _check_engine(config, say, training=training)
    _check_budgets(config, say)
    if config.rollout.history == "inline" and config.rollout.function:
        raise say.refuse("rollout.history", "inline", "is for environments; a play function says itself what follows a reply")
    if training:
        _check_training(config, say)
    _check_effects(config, say, where if given is None else given)


def _sections(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Every section with the prefix of its keys, the run itself without one."""
    yield "", config
    for name in RunConfig.__dataclass_fields__:
        section = getattr(config, name)
        if name == "env":
            yield from ((f"env.{index}", env) for index, env in enumerate(section))
        elif is_dataclass(section):
            yield name, section


def _check_effects(config: RunConfig, say: _Reporter, given: Collection[str]) -> None:
    """Refuse settings that would silently do nothing; what the command line switched off on top of a recipe is meant."""
    for prefix, section in _sections(config):

        def get(key: str, section: Any = section) -> Any:
            return getattr(section, key[4:]) if key.startswith("env.") else _get(config, key)

        def newer(key: str, others: Collection[str], prefix: str = prefix) -> bool:
            named = (f"{prefix}.{other[4:]}" if other.startswith("env.") else other for other in others)
            last = "command line"
            return say.where.get(key) != last and any(say.where.get(other) == last for other in named)

        for key, value, needs in without_effect(prefix, section, get, newer):
            if any(one == key or one.startswith(f"{key}.") for one in given):
                raise say.refuse(key, value, f"has no effect: it needs {needs}; set that, or leave this out")


def _check_model(config: RunConfig, say: _Reporter) -> None:
    model = config.model
    if model.path is not None:
        folder = Path(model.path)
        if not folder.is_dir():
            what = "is a file; name its directory" if folder.exists() else "no such directory; name one that holds a model"
            raise say.refuse("model.path", model.path, f"{what}, or leave the key out for a tiny model built here")
        if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise say.refuse("model.path", model.path, "holds no config.json, so it is not a Hugging Face model directory")
        return
    if model.hidden % model.heads or (model.hidden // model.heads) % 2:
        raise say.refuse("model.hidden", model.hidden, f"must be an even multiple of model.heads = {model.heads}")
    if model.heads % model.kv_heads:
        raise say.refuse("model.kv_heads", model.kv_heads, f"must divide model.heads = {model.heads}")
    if model.vision and (model.hidden // model.heads) % 8:
        what = f"must be a multiple of 8 * model.heads = {8 * model.heads} for a model that sees"
        raise say.refuse("model.hidden", model.hidden, what)
    if model.vision and model.image_side % (2 * model.patch):
        raise say.refuse("model.image_side", model.image_side, f"must be a multiple of 2 * model.patch = {2 * model.patch}")


def _check_template(config: RunConfig, say: _Reporter, names: Collection[str] | None) -> None:
    value = config.model.template
    if value is None:
        return
    if is_template_file(value):
        if not Path(value).is_file():
            raise say.refuse("model.template", value, _no_such_file(value))
    elif names is not None and value not in names:
        known = f"named ones are {', '.join(sorted(names))}; your own is a file, template.jinja say"
        near = did_you_mean(value, names)
        raise say.refuse("model.template", value, f"no such template; {near + ' ' if near else ''}{known}")


def _check_envs(config: RunConfig, say: _Reporter, envs: Collection[str] | None) -> None:
    if not config.env:
        tasks = " and tasks" if config.rollout.function else ""
        raise ConfigError(f'{say.file}: no environment; add [[env]] with use = "hop" or "file.py:Name"{tasks}')
    for index, env in enumerate(config.env):
        if not env.use and not (config.rollout.function and env.tasks):
            remedy = 'name a built-in one ("hop") or "file.py:Name"'
            if config.rollout.function:
                remedy += ", or give tasks for rollout.function"
            raise say.refuse(f"env.{index}.use", env.use, remedy)
        if env.use.endswith(".py"):
            raise say.refuse(f"env.{index}.use", env.use, f"say which environment of the file: {env.use}:Name")
        _check_columns(index, env, say)
        plain = ":" not in env.use and bool(env.use)
        if plain and envs is not None and env.use not in envs:
            near = did_you_mean(env.use, envs)
            known = f'built-in ones are {", ".join(sorted(envs))}; your own is "file.py:Name"'
            raise say.refuse(f"env.{index}.use", env.use, f"no such environment; {near + ' ' if near else ''}{known}")
    names = [_name(env) for env in config.env]
    for index, name in enumerate(names):
        if name in names[:index]:
            other = names.index(name)
            raise say.refuse(f"env.{index}.name", name, f"environment {other} has this name too; give each its own name")


def _check_columns(index: int, env: EnvConfig, say: _Reporter) -> None:
    for ours, column in env.columns.items():
        key = f"env.{index}.columns.{ours}"
        if ours not in COLUMNS:
            raise say.refuse(key, column, f"a column holds one of {', '.join(COLUMNS)}")
        if not isinstance(column, str) or not column:
            raise say.refuse(key, column, 'name a column of the rows, such as "label" or "meta.gold"')


def _check_files(config: RunConfig, say: _Reporter) -> None:
    for key, value, kind in _files(config):
        path, colon, name = value.rpartition(":") if ".py:" in value else (value, "", "")
        is_python = path.endswith(".py")
        if is_python and not colon:
            raise say.refuse(key, value, f"say which function of the file: {value}:name")
        if (is_python or kind is PathKind.DATA) and not Path(path).exists():
            raise say.refuse(key, value, _no_such_file(path))
        if is_python and not name.isidentifier():
            raise say.refuse(key, value, f"'{name}' is not a name; write {path}:Name")


def _no_such_file(path: str) -> str:
    folder = Path(path).parent
    near = did_you_mean(Path(path).name, [p.name for p in folder.iterdir()]) if folder.is_dir() else ""
    return f"no such file; {near or 'check the path, which is relative to the recipe'}"


def _check_engine(config: RunConfig, say: _Reporter, *, training: bool) -> None:
    engine = config.engine
    if engine.speculate and (engine.urls or engine.kind not in ("local", "vllm", "sglang")):
        why = "is for this process and for servers that are started here; one of your own drafts by the settings that it has"
        raise say.refuse("engine.speculate", engine.speculate, why)
    if engine.kind == "local":
        _check_server_only_keys(config, say)
        return
    if engine.colocate and engine.kind in ("chat", "llamacpp"):
        why = 'is for engines that give their memory back: "local", "vllm" and "sglang"'
        raise say.refuse("engine.colocate", engine.colocate, why)
    _check_update(config, say)
    if engine.kind in ("auto", "llamacpp", "chat") and not engine.urls:
        raise say.refuse(
            "engine.kind", engine.kind, 'needs engine.urls = ["http://host:port"]; vllm and sglang are started here'
        )
    if engine.kind == "chat" and not engine.model:
        raise say.refuse("engine.model", engine.model, "must name the model that the chat endpoint serves")
    if training and engine.kind == "chat":
        why = "cannot be trained with: it answers with text, and training needs the ids that were sampled and their logprobs"
        raise say.refuse(
            "engine.kind", engine.kind, f'{why}; use "vllm", "sglang" or "local", and this one for `turnwise eval`'
        )
    if training and engine.kind == "llamacpp":
        why = "takes no new weights while it runs, so it would sample from the first policy for ever"
        raise say.refuse("engine.kind", engine.kind, f'{why}; train with "vllm", "sglang" or "local"')
    if training and engine.missing_logprobs == "recompute" and config.train.old_logprobs == "engine":
        why = 'needs train.old_logprobs = "trainer": the engine\'s are what is missing'
        raise say.refuse("engine.missing_logprobs", engine.missing_logprobs, why)


def _check_update(config: RunConfig, say: _Reporter) -> None:
    """What ways of new weights need that not every server has."""
    engine = config.engine
    why = ""
    if engine.update == "tensors" and engine.kind not in ("sglang", "auto"):
        why = 'is for engine.kind = "sglang": no other server takes weights in requests; use "disk" or "group"'
    elif engine.update != "lora":
        return
    elif not config.lora.rank:
        why = "there is no adapter to send; set lora.rank"
    elif engine.kind not in ("vllm", "sglang", "auto"):
        why = "adapters go to vLLM and SGLang alone; leave it out, and they are merged into what goes out"
    elif engine.colocate:
        why = "a server that sleeps lets go of the model that the adapter belongs to (engine.colocate); leave one of them out"
    if why:
        raise say.refuse("engine.update", engine.update, why)


def _check_server_only_keys(config: RunConfig, say: _Reporter) -> None:
    """What is for servers alone."""
    engine = config.engine
    if engine.urls:
        raise say.refuse("engine.urls", list(engine.urls), 'needs engine.kind = "auto", or what the servers are: "vllm"')
    if engine.update != "disk":
        why = 'is for servers, engine.kind = "vllm", "sglang" or "auto"; the engine in this process needs no way'
        raise say.refuse("engine.update", engine.update, why)


def _check_budgets(config: RunConfig, say: _Reporter) -> None:
    limits = config.limits
    if limits.context is not None and limits.turn_tokens >= limits.context:
        raise say.refuse("limits.turn_tokens", limits.turn_tokens, f"must be under limits.context = {limits.context}")
    if limits.context is not None and limits.prompt_tokens is not None and limits.prompt_tokens >= limits.context:
        raise say.refuse("limits.prompt_tokens", limits.prompt_tokens, f"must be under limits.context = {limits.context}")


def _check_training(config: RunConfig, say: _Reporter) -> None:
    rollout, train = config.rollout, config.train
    if found := conflicting_keys(train):
        key, why = found
        raise say.refuse(f"train.{key}", getattr(train, key), why)
    if train.reference == "adapter_off" and not config.lora.rank:
        raise say.refuse("train.reference", train.reference, "there is no adapter to switch off; set lora.rank")
    if config.lora.rank and not config.lora.targets:
        raise say.refuse("lora.targets", [], 'must name a linear layer; ["all"] are those of the text model')
    if train.steps == 0:
        return
    if config.engine.kind == "sglang" and (cut := truncation_key(rollout.top_p, rollout.top_k)):
        key, why = cut
        raise say.refuse(f"rollout.{key}", getattr(rollout, key), why)
    if rollout.group_size < 2 and uses_group_baseline(train):
        why = "must be at least 2: a trajectory's advantage is its reward against the others of its group"
        raise say.refuse("rollout.group_size", rollout.group_size, why)
    if train.min_group > rollout.group_size and uses_group_baseline(train):
        why = f"must be at most rollout.group_size = {rollout.group_size}, or every group is dropped"
        raise say.refuse("train.min_group", train.min_group, why)
    episodes = rollout.groups * rollout.group_size
    if train.minibatches > episodes:
        raise say.refuse("train.minibatches", train.minibatches, f"must be at most the {episodes} episodes of a step")


def _name(env: EnvConfig) -> str:
    return env.name or env.use


def _get(config: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        config = getattr(config, part)
    return config


def _files(config: RunConfig) -> Iterator[tuple[str, str, PathKind]]:
    """Yield the data and the objects that are named, with their keys."""
    for prefix, section in _sections(config):
        cls: Any = type(section)
        for name, kind in path_kinds(cls).items():
            if kind in (PathKind.DATA, PathKind.OBJECT) and (value := getattr(section, name)):
                yield f"{prefix}.{name}", value, kind
