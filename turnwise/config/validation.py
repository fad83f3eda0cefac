"""Constraints across fields, and referenced files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from turnwise.config.constraints import PathKind, field_errors, is_template_file, path_kinds, without_effect
from turnwise.config.schema import COLUMNS, EnvConfig, RunConfig, TrainConfig, truncation_key
from turnwise.errors import ConfigError, did_you_mean

BATCH_ADVANTAGES = ("reinforce_pp",)
"""Algorithms that normalize rewards over the batch only, so that a group may have one episode."""


def uses_group_baseline(train: TrainConfig) -> bool:
    """Return whether a trajectory is compared with the others of its task."""
    if train.advantage is not None:
        return train.advantage != "batch"
    return train.algorithm not in BATCH_ADVANTAGES


def conflicting_keys(train: TrainConfig) -> tuple[str, str] | None:
    """Return the first `[train]` key that conflicts with another one, and why; None if none does."""
    if train.correction != "none" and train.old_logprobs == "engine":
        why = 'would apply twice the correction that old_logprobs = "engine" puts into the ratio; set old_logprobs = "trainer"'
        return "correction", why
    if train.correction_low is not None and train.correction in ("none", "tis"):
        return "correction_low", f'has no meaning with correction = "{train.correction}", which has no lower bound'
    if train.correction_high is not None and train.correction == "none":
        return "correction_high", 'has no meaning with correction = "none"'
    low, high = train.correction_low, train.correction_high
    if low is not None and high is not None and low >= high:
        return "correction_low", f"must be under train.correction_high = {high:g}"
    if train.kl_in == "reward" and train.kl_estimator not in (None, "k1"):
        return "kl_estimator", 'must be k1 in a reward, since k2 and k3 are always positive; set kl_in = "loss"'
    if train.kl and train.reference == "none":
        return "reference", f"train.kl = {train.kl:g} needs a reference policy; set kl = 0, or leave this key out"
    batch = train.advantage or {"reinforce_pp": "batch", "reinforce_pp_baseline": "group_batch"}.get(train.algorithm)
    if train.refill and batch in ("batch", "group_batch"):
        return "refill", f'replaces groups without reward variance; advantage = "{batch}" compares with the complete batch'
    if train.discount != 1.0 and train.credit != "turn":
        return "discount", 'applies between turns; set credit = "turn"'
    return None


class _Reporter:
    """Builds errors that name the source of a value."""

    def __init__(self, where: Mapping[str, str], file: str) -> None:
        self.where = where
        self.file = file

    def error(self, key: str, value: Any, why: str) -> ConfigError:
        place = self.where.get(key, "default")
        if place == "command line":
            return ConfigError(f"command line: --{key.replace('_', '-')} {value}: {why}")
        file = self.file if place == "default" else place
        text = f'"{value}"' if isinstance(value, str) else value
        return ConfigError(f"{file}: {key} = {text}{' (the default)' if place == 'default' else ''}: {why}")


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
    """Check the constraints that must hold before anything is loaded.

    Args:
        config: the configuration.
        where: dotted key -> file or `command line`, for values that are not defaults.
        file: source to name in an error about a default.
        envs: names of the built-in environments; None skips this check.
        templates: names of the built-in chat templates; None skips this check.
        training: whether the run trains.
        given: keys to reject if they have no effect; None is the keys of `where`.
        has_objects: whether environments are given as objects, so that the configuration names none.

    Raises:
        ConfigError: for the first violation.
    """
    reporter = _Reporter(where, file)
    for prefix, section in _sections(config):
        for name, value, error in field_errors(section, training=training):
            raise reporter.error(f"{prefix}.{name}".removeprefix("."), value, error)
    _check_model(config, reporter)
    _check_template(config, reporter, templates)
    if not has_objects:
        _check_envs(config, reporter, envs)
    _check_files(config, reporter)
    _check_engine(config, reporter, training=training)
    _check_budgets(config, reporter)
    if config.rollout.history == "inline" and config.rollout.function:
        raise reporter.error("rollout.history", "inline", "is for environments; a play function chooses what follows a reply")
    if training:
        _check_training(config, reporter)
    _check_effects(config, reporter, where if given is None else given)


def _sections(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yield each section with the prefix of its keys; the run itself has an empty prefix."""
    yield "", config
    for name in RunConfig.__dataclass_fields__:
        section = getattr(config, name)
        if name == "env":
            yield from ((f"env.{index}", env) for index, env in enumerate(section))
        elif is_dataclass(section):
            yield name, section


def _check_effects(config: RunConfig, reporter: _Reporter, given: Collection[str]) -> None:
    """Reject settings without effect, except those of a recipe that the command line made ineffective."""
    for prefix, section in _sections(config):

        def get(key: str, section: Any = section) -> Any:
            return getattr(section, key[4:]) if key.startswith("env.") else _get(config, key)

        def newer(key: str, others: Collection[str], prefix: str = prefix) -> bool:
            named = (f"{prefix}.{other[4:]}" if other.startswith("env.") else other for other in others)
            last = "command line"
            return reporter.where.get(key) != last and any(reporter.where.get(other) == last for other in named)

        for key, value, needs in without_effect(prefix, section, get, newer):
            if any(one == key or one.startswith(f"{key}.") for one in given):
                raise reporter.error(key, value, f"has no effect: it needs {needs}; set that, or leave this out")


def _check_model(config: RunConfig, reporter: _Reporter) -> None:
    model = config.model
    if model.path is not None:
        folder = Path(model.path)
        if not folder.is_dir():
            what = "is a file; name its directory" if folder.exists() else "no such directory; name one that contains a model"
            raise reporter.error("model.path", model.path, f"{what}, or leave the key out for a tiny model built here")
        if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise reporter.error(
                "model.path", model.path, "contains no config.json, so it is not a Hugging Face model directory"
            )
        return
    if model.hidden % model.heads or (model.hidden // model.heads) % 2:
        raise reporter.error("model.hidden", model.hidden, f"must be an even multiple of model.heads = {model.heads}")
    if model.heads % model.kv_heads:
        raise reporter.error("model.kv_heads", model.kv_heads, f"must divide model.heads = {model.heads}")
    if model.vision and (model.hidden // model.heads) % 8:
        what = f"must be a multiple of 8 * model.heads = {8 * model.heads} for a vision model"
        raise reporter.error("model.hidden", model.hidden, what)
    if model.vision and model.image_side % (2 * model.patch):
        raise reporter.error("model.image_side", model.image_side, f"must be a multiple of 2 * model.patch = {2 * model.patch}")


def _check_template(config: RunConfig, reporter: _Reporter, names: Collection[str] | None) -> None:
    value = config.model.template
    if value is None:
        return
    if is_template_file(value):
        if not Path(value).is_file():
            raise reporter.error("model.template", value, _no_such_file(value))
    elif names is not None and value not in names:
        known = f"named ones are {', '.join(sorted(names))}; your own is a file, such as template.jinja"
        near = did_you_mean(value, names)
        raise reporter.error("model.template", value, f"no such template; {near + ' ' if near else ''}{known}")


def _check_envs(config: RunConfig, reporter: _Reporter, envs: Collection[str] | None) -> None:
    if not config.env:
        tasks = " and tasks" if config.rollout.function else ""
        raise ConfigError(f'{reporter.file}: no environment; add [[env]] with use = "hop" or "file.py:Name"{tasks}')
    for index, env in enumerate(config.env):
        if not env.use and not (config.rollout.function and env.tasks):
            remedy = 'name a built-in one ("hop") or "file.py:Name"'
            if config.rollout.function:
                remedy += ", or give tasks for rollout.function"
            raise reporter.error(f"env.{index}.use", env.use, remedy)
        if env.use.endswith(".py"):
            raise reporter.error(f"env.{index}.use", env.use, f"say which environment of the file: {env.use}:Name")
        _check_columns(index, env, reporter)
        plain = ":" not in env.use and bool(env.use)
        if plain and envs is not None and env.use not in envs:
            near = did_you_mean(env.use, envs)
            known = f'built-in ones are {", ".join(sorted(envs))}; your own is "file.py:Name"'
            raise reporter.error(f"env.{index}.use", env.use, f"no such environment; {near + ' ' if near else ''}{known}")
    names = [_name(env) for env in config.env]
    for index, name in enumerate(names):
        if name in names[:index]:
            other = names.index(name)
            raise reporter.error(f"env.{index}.name", name, f"environment {other} has this name too; give each its own name")


def _check_columns(index: int, env: EnvConfig, reporter: _Reporter) -> None:
    for ours, column in env.columns.items():
        key = f"env.{index}.columns.{ours}"
        if ours not in COLUMNS:
            raise reporter.error(key, column, f"a column holds one of {', '.join(COLUMNS)}")
        if not isinstance(column, str) or not column:
            raise reporter.error(key, column, 'name a column of the rows, such as "label" or "meta.gold"')


def _check_files(config: RunConfig, reporter: _Reporter) -> None:
    for key, value, kind in _files(config):
        path, colon, name = value.rpartition(":") if ".py:" in value else (value, "", "")
        is_python = path.endswith(".py")
        if is_python and not colon:
            raise reporter.error(key, value, f"say which function of the file: {value}:name")
        if (is_python or kind is PathKind.DATA) and not Path(path).exists():
            raise reporter.error(key, value, _no_such_file(path))
        if is_python and not name.isidentifier():
            raise reporter.error(key, value, f"'{name}' is not a name; write {path}:Name")


def _no_such_file(path: str) -> str:
    folder = Path(path).parent
    near = did_you_mean(Path(path).name, [p.name for p in folder.iterdir()]) if folder.is_dir() else ""
    return f"no such file; {near or 'check the path, which is relative to the recipe'}"


def _check_engine(config: RunConfig, reporter: _Reporter, *, training: bool) -> None:
    engine = config.engine
    if engine.speculate and (engine.urls or engine.kind not in ("local", "vllm", "sglang")):
        why = "is for the local engine and for servers started by the run; set speculation of your own server at the server"
        raise reporter.error("engine.speculate", engine.speculate, why)
    if engine.kind == "local":
        _check_server_only_keys(config, reporter)
        return
    if engine.colocate and engine.kind in ("chat", "llamacpp"):
        why = 'needs an engine that can release its memory: "local", "vllm" or "sglang"'
        raise reporter.error("engine.colocate", engine.colocate, why)
    _check_update(config, reporter)
    if engine.kind in ("auto", "llamacpp", "chat") and not engine.urls:
        raise reporter.error(
            "engine.kind", engine.kind, 'needs engine.urls = ["http://host:port"]; the run can start vllm and sglang'
        )
    if engine.kind == "chat" and not engine.model:
        raise reporter.error("engine.model", engine.model, "must name the model that the chat endpoint serves")
    if training and engine.kind == "chat":
        why = "cannot be trained with: it returns text, and training needs sampled ids and their logprobs"
        raise reporter.error(
            "engine.kind", engine.kind, f'{why}; use "vllm", "sglang" or "local", and this one for `turnwise eval`'
        )
    if training and engine.kind == "llamacpp":
        why = "accepts no weight updates, so it would always sample from the first policy"
        raise reporter.error("engine.kind", engine.kind, f'{why}; train with "vllm", "sglang" or "local"')
    if training and engine.missing_logprobs == "recompute" and config.train.old_logprobs == "engine":
        why = 'needs train.old_logprobs = "trainer", since the engine\'s are missing'
        raise reporter.error("engine.missing_logprobs", engine.missing_logprobs, why)


def _check_update(config: RunConfig, reporter: _Reporter) -> None:
    """Check that the servers support `engine.update`."""
    engine = config.engine
    why = ""
    if engine.update == "tensors" and engine.kind not in ("sglang", "auto"):
        why = 'is for engine.kind = "sglang": no other server accepts weights in requests; use "disk" or "group"'
    elif engine.update != "lora":
        return
    elif not config.lora.rank:
        why = "there is no adapter to send; set lora.rank"
    elif engine.kind not in ("vllm", "sglang", "auto"):
        why = "adapters go to vLLM and SGLang only; leave it out to send merged weights"
    elif engine.colocate:
        why = "with engine.colocate, a sleeping server releases the adapter's base model; leave one of the two keys out"
    if why:
        raise reporter.error("engine.update", engine.update, why)


def _check_server_only_keys(config: RunConfig, reporter: _Reporter) -> None:
    """Reject keys that have no meaning for the engine in this process."""
    engine = config.engine
    if engine.urls:
        raise reporter.error(
            "engine.urls", list(engine.urls), 'needs engine.kind = "auto", or the kind of the servers, such as "vllm"'
        )
    if engine.update != "disk":
        why = 'is for servers: engine.kind = "vllm", "sglang" or "auto"; leave it out'
        raise reporter.error("engine.update", engine.update, why)


def _check_budgets(config: RunConfig, reporter: _Reporter) -> None:
    limits = config.limits
    if limits.context is not None and limits.turn_tokens >= limits.context:
        raise reporter.error("limits.turn_tokens", limits.turn_tokens, f"must be under limits.context = {limits.context}")
    if limits.context is not None and limits.prompt_tokens is not None and limits.prompt_tokens >= limits.context:
        raise reporter.error("limits.prompt_tokens", limits.prompt_tokens, f"must be under limits.context = {limits.context}")


def _check_training(config: RunConfig, reporter: _Reporter) -> None:
    rollout, train = config.rollout, config.train
    if found := conflicting_keys(train):
        key, why = found
        raise reporter.error(f"train.{key}", getattr(train, key), why)
    if train.reference == "adapter_off" and not config.lora.rank:
        raise reporter.error("train.reference", train.reference, "there is no adapter to switch off; set lora.rank")
    if config.lora.rank and not config.lora.targets:
        raise reporter.error("lora.targets", [], 'must name a linear layer; ["all"] are those of the text model')
    if train.steps == 0:
        return
    if config.engine.kind == "sglang" and (truncation := truncation_key(rollout.top_p, rollout.top_k)):
        key, why = truncation
        raise reporter.error(f"rollout.{key}", getattr(rollout, key), why)
    if rollout.group_size < 2 and uses_group_baseline(train):
        why = "must be at least 2: a trajectory's advantage compares its reward with the others of its group"
        raise reporter.error("rollout.group_size", rollout.group_size, why)
    if train.min_group > rollout.group_size and uses_group_baseline(train):
        why = f"must be at most rollout.group_size = {rollout.group_size}, or every group is dropped"
        raise reporter.error("train.min_group", train.min_group, why)
    episodes = rollout.groups * rollout.group_size
    if train.minibatches > episodes:
        raise reporter.error("train.minibatches", train.minibatches, f"must be at most the {episodes} episodes of a step")


def _name(env: EnvConfig) -> str:
    return env.name or env.use


def _get(config: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        config = getattr(config, part)
    return config


def _files(config: RunConfig) -> Iterator[tuple[str, str, PathKind]]:
    """Yield (key, value, kind) of the data and objects that the configuration names."""
    for prefix, section in _sections(config):
        cls: Any = type(section)
        for name, kind in path_kinds(cls).items():
            if kind in (PathKind.DATA, PathKind.OBJECT) and (value := getattr(section, name)):
                yield f"{prefix}.{name}", value, kind
