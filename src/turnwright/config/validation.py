"""Constraints across fields, and referenced files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import is_dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from turnwright.config.constraints import PathKind, changed, field_errors, is_template_file, path_kinds, without_effect
from turnwright.config.fields import table_lists
from turnwright.config.schema import (
    COLUMNS,
    ENGINES,
    OF_THE_RUN,
    PROGRAM,
    EnvConfig,
    ModelConfig,
    RunConfig,
    TeacherConfig,
    TrainConfig,
    truncation_key,
)
from turnwright.config.snapshots import snapshot
from turnwright.errors import ConfigError, did_you_mean

Broken = Iterator[tuple[str, str]]  # key of a violated rule, and why


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
    if train.reference_every and train.reference == "adapter_off":
        return "reference_every", 'replaces the reference, which reference = "adapter_off" fixes; set reference = "copy"'
    if train.refill and batch in ("batch", "group_batch", "running"):
        other = "earlier episodes" if batch == "running" else "the complete batch"
        return "refill", f'replaces groups without reward variance; advantage = "{batch}" compares with {other}'
    if train.discount != 1.0 and train.credit != "turn":
        return "discount", 'applies between turns; set credit = "turn"'
    return None


def _error(where: Mapping[str, str], file: str, key: str, value: Any, why: str) -> ConfigError:
    """Build an error that names the source of a value."""
    place = where.get(key, "default")
    if place == "command line":
        return ConfigError(f"command line: --{key.replace('_', '-')} {value}: {why}")
    text = f'"{value}"' if isinstance(value, str) else value
    default = place == "default"
    return ConfigError(f"{file if default else place}: {key} = {text}{' (the default)' if default else ''}: {why}")


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
    """Raise `ConfigError` for the first violated constraint of those that must hold before anything is loaded.

    Args:
        where: dotted key -> file or `command line`, for values that are not defaults.
        file: source to name in an error about a default.
        envs: names of the built-in environments; None skips this check, likewise for `templates`.
        training: whether the run trains; evaluation alone needs no groups of two.
        given: keys to reject if they have no effect; None is the keys of `where`.
        has_objects: whether environments are given as objects, so that the configuration names none.
    """
    error = partial(_error, where, file)
    for prefix, section in _sections(config):
        for name, value, why in field_errors(section, training=training):
            raise error(f"{prefix}.{name}".removeprefix("."), value, why)
    rules = [_model_rules(config.model), _template_rules(config, templates)]
    rules += [] if has_objects else [_env_rules(config, envs, file)]
    rules += [_policy_rules(config, training), _file_rules(config), _engine_rules(config, training)]
    rules += [_play_rules(config), _quant_rules(config, training)]
    rules += [_training_rules(config, has_objects)] if training else []
    for key, why in chain.from_iterable(rules):
        value = _value(config, key)
        raise error(key, list(value) if isinstance(value, tuple) else value, why)
    _check_effects(config, where, error, where if given is None else given)


def _sections(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yield each section with the prefix of its keys; the run itself has an empty prefix."""
    yield "", config
    for name in RunConfig.__dataclass_fields__:
        section = getattr(config, name)
        if name in table_lists():
            yield from ((f"{name}.{index}", table) for index, table in enumerate(section))
        elif is_dataclass(section):
            yield name, section


def _check_effects(
    config: RunConfig, where: Mapping[str, str], error: Callable[..., ConfigError], given: Collection[str]
) -> None:
    """Reject settings without effect, except those of a recipe that the command line made ineffective."""
    for prefix, section in _sections(config):

        def own(key: str, prefix: str = prefix) -> str:  # `env.` refers to the table that the key belongs to
            name, _, rest = key.partition(".")
            return f"{prefix}.{rest}" if name in table_lists() and name == prefix.partition(".")[0] else key

        def get(key: str, own: Callable[[str], str] = own) -> Any:
            return _value(config, own(key))

        def newer(key: str, others: Collection[str], own: Callable[[str], str] = own) -> bool:
            named = map(own, others)
            last = "command line"
            return where.get(key) != last and any(where.get(other) == last for other in named)

        for key, value, needs in without_effect(prefix, section, get, newer):
            if any(one == key or one.startswith(f"{key}.") for one in given):
                raise error(key, value, f"has no effect: it needs {needs}; set that, or leave this out")


def _model_rules(model: ModelConfig) -> Broken:
    if model.path is not None:
        folder = Path(model.path)
        if not folder.is_dir():
            what = "is a file; name its directory" if folder.exists() else "no such directory; name one that contains a model"
            yield "model.path", f"{what}, or leave the key out for a tiny model built here"
        folder = snapshot(folder, model.revision)
        if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
            why = "contains no config.json, so it is not a Hugging Face model directory; name one that does, or leave the key"
            yield "model.path", f"{why} out for a tiny model built here"
        return
    if model.hidden % model.heads or (model.hidden // model.heads) % 2:
        yield "model.hidden", f"must be an even multiple of model.heads = {model.heads}"
    if model.heads % model.kv_heads:
        yield "model.kv_heads", f"must divide model.heads = {model.heads}"
    if model.vision and (model.hidden // model.heads) % 8:
        yield "model.hidden", f"must be a multiple of 8 * model.heads = {8 * model.heads} for a vision model"
    if model.vision and model.image_side % (2 * model.patch):
        yield "model.image_side", f"must be a multiple of 2 * model.patch = {2 * model.patch}"


def _template_rules(config: RunConfig, names: Collection[str] | None) -> Broken:
    value = config.model.template
    if value is not None and is_template_file(value):
        if not Path(value).is_file():
            yield "model.template", _no_such_file(value)
    elif value is not None and names is not None and value not in names:
        near = did_you_mean(value, names)
        known = f"named ones are {', '.join(sorted(names))}; your own is a file, such as template.jinja"
        yield "model.template", f"no such template; {near + ' ' if near else ''}{known}"


def _env_rules(config: RunConfig, envs: Collection[str] | None, file: str) -> Broken:
    function = config.rollout.function
    if not config.env:
        tasks = " and tasks" if function else ""
        raise ConfigError(f'{file}: no environment; add [[env]] with use = "hop" or "file.py:Name"{tasks}')
    for index, env in enumerate(config.env):
        use = f"env.{index}.use"
        if not env.use and not (function and env.tasks):
            tasks = ", or give tasks for rollout.function" if function else ""
            yield use, f'name a built-in one ("hop") or "file.py:Name"{tasks}'
        if env.use.endswith(".py"):
            yield use, f"say which environment of the file: {env.use}:Name"
        if env.media_root is not None and (env.tasks or env.eval_tasks) and not Path(env.media_root).is_dir():
            is_file = Path(env.media_root).exists()
            problem = "is a file; name the directory of the pictures" if is_file else _no_such_file(env.media_root)
            yield f"env.{index}.media_root", problem
        for ours, column in env.columns.items():
            if ours not in COLUMNS:
                yield f"env.{index}.columns.{ours}", f"a column holds one of {', '.join(COLUMNS)}"
            if not isinstance(column, str) or not column:
                yield f"env.{index}.columns.{ours}", 'name a column of the rows, such as "label" or "meta.gold"'
        if env.use and ":" not in env.use and envs is not None and env.use not in (*envs, PROGRAM):
            near = did_you_mean(env.use, envs)
            known = f'built-in ones are {", ".join(sorted(envs))}; your own is "file.py:Name"'
            yield use, f"no such environment; {near + ' ' if near else ''}{known}"
    names = [env.name or env.use for env in config.env]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield f"env.{index}.name", f"environment {names.index(name)} has this name too; give each its own name"


def _policy_rules(config: RunConfig, training: bool) -> Broken:
    policies = config.policy
    names = [policy.name for policy in policies]
    claimed: dict[str, str] = {}
    for index, policy in enumerate(policies):
        key = f"policy.{index}"
        if policy.name in names[:index]:
            yield f"{key}.name", f"policy {names.index(policy.name)} has this name too; give each its own name"
        for agent in policy.plays:
            if agent in claimed:
                yield f"{key}.agents", f"policy {claimed[agent]} plays agent {agent!r} too; an agent has one policy"
            claimed[agent] = policy.name
        origins = [name for name in ("path", "urls", "past") if getattr(policy, name)]
        if len(origins) > 1:
            yield f"{key}.{origins[1]}", f"a policy has one origin, and policy.{index}.{origins[0]} is given; leave one out"
        yield from _past_rules(config, index)
        if policy.train and not policy.learns:
            yield f"{key}.train", "has no effect: the policy is not trained; leave this out"
        for name in policy.train:
            if name in OF_THE_RUN:
                yield f"{key}.train.{name}", f"is of the run, not of one policy; set train.{name}"
    if policies:
        yield from _policy_limits(config, training)


def _policy_limits(config: RunConfig, training: bool) -> Broken:
    """Check what runs with several policies cannot do."""
    policies = config.policy
    if training and not any(policy.learns for policy in policies):
        yield "policy.0.trained", "no policy is trained; set trained = true for one"
    if config.quant.kind != "none":
        yield "quant.kind", "is for runs with one policy; leave it out, or leave out [[policy]]"
    if training and config.engine.kind != "local" and config.engine.update != "lora":
        yield "engine.update", 'must be "lora" with [[policy]]: servers hold one adapter for each policy'


def _past_rules(config: RunConfig, index: int) -> Broken:
    past, key = config.policy[index].past, f"policy.{index}.past"
    if not past:
        return
    if unknown := sorted(past.keys() - {"of", "every", "keep"}):
        yield f"{key}.{unknown[0]}", "there are of (the name of a trained policy), every (steps) and keep (versions)"
    learning = [policy.name for policy in config.policy if policy.learns]
    if past.get("of") not in learning:
        yield key, f'past = {{ of = "..." }} names a trained policy: {", ".join(learning) or "there is none"}'
    for name in ("every", "keep"):
        value = past.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield f"{key}.{name}", "must be an integer of at least 1"


def _file_rules(config: RunConfig) -> Broken:
    """Check the data and objects that the configuration names."""
    for prefix, section in _sections(config):
        for field, kind in path_kinds(section.__class__).items():
            key, value = f"{prefix}.{field}", getattr(section, field)
            if not value or kind not in (PathKind.DATA, PathKind.OBJECT):
                continue
            path, colon, name = value.rpartition(":") if ".py:" in value else (value, "", "")
            is_python = path.endswith(".py")
            if is_python and not colon:
                yield key, f"say which function of the file: {value}:name"
            if (is_python or kind is PathKind.DATA) and not Path(path).exists():
                yield key, _no_such_file(path)
            if is_python and not name.isidentifier():
                yield key, f"'{name}' is not a name; write {path}:Name"


def _no_such_file(path: str) -> str:
    folder = Path(path).parent
    near = did_you_mean(Path(path).name, [p.name for p in folder.iterdir()]) if folder.is_dir() else ""
    return f"no such file; {near or 'check the path, which is relative to the recipe'}"


def _engine_rules(config: RunConfig, training: bool) -> Broken:
    engine = config.engine
    if engine.speculate and (engine.attached or engine.kind not in ("local", "vllm", "sglang")):
        why = "is for the local engine and for servers started by the run; set speculation of your own server at the server"
        yield "engine.speculate", why
    if engine.kind == "local":
        if engine.attached:
            yield (
                "engine.urls" if engine.urls else "engine.urls_file",
                'needs engine.kind = "auto", or the kind of the servers, such as "vllm"',
            )
        if engine.update != "disk":
            yield "engine.update", 'is for servers: engine.kind = "vllm", "sglang" or "auto"; leave it out'
        return
    if engine.kind not in ENGINES:
        return  # an installed package's, which checks what it needs
    if engine.colocate and engine.kind in ("chat", "llamacpp"):
        yield "engine.colocate", 'needs an engine that can release its memory: "local", "vllm" or "sglang"'
    yield from _update_rules(config)
    yield from _placed_rules(config)
    if engine.kind in ("auto", "chat") and not engine.attached:
        yield "engine.kind", 'needs engine.urls = ["http://host:port"]; the run can start vllm, sglang and llamacpp'
    if engine.kind == "chat" and not engine.model:
        yield "engine.model", "must name the model that the chat endpoint serves"
    if training and engine.kind == "chat":
        why = "cannot be trained with: it returns text, and training needs sampled ids and their logprobs"
        yield "engine.kind", f'{why}; use "vllm", "sglang" or "local", and this one for `turnwright eval`'
    if engine.kind == "llamacpp":
        yield from _llamacpp_rules(config, training)
    if training and engine.missing_logprobs == "recompute":
        yield from _recompute_rules(config)


def _llamacpp_rules(config: RunConfig, training: bool) -> Broken:
    """Check what llama.cpp needs, which takes no new weights while it runs."""
    engine = config.engine
    if engine.update != "disk":
        yield "engine.update", 'must be "disk" for llama.cpp, which is started again with each policy\'s file'
    if training and engine.attached:
        why = "accepts no weight updates, so it would always sample from the first policy"
        yield "engine.kind", f'{why}; without engine.urls the run starts one again with each policy, or use "vllm" or "sglang"'
    if training and engine.missing_logprobs == "error":
        why = "llama.cpp reports no logprob of ids that end inside a character"
        yield "engine.missing_logprobs", f'must be "mask" or "recompute": {why}'


def _recompute_rules(config: RunConfig) -> Broken:
    """Check what needs the engine's logprobs where the trainer's may stand for them."""
    if config.train.old_logprobs == "engine":
        yield "engine.missing_logprobs", 'needs train.old_logprobs = "trainer", since the engine\'s are missing'
    if config.train.correction != "none":
        why = "has no logprob of the engine for train.correction to weigh such ids by"
        yield "engine.missing_logprobs", f'{why}; set engine.missing_logprobs = "mask"'


def _placed_rules(config: RunConfig) -> Broken:
    """Check servers that the run starts on a Ray cluster."""
    engine = config.engine
    if not config.engines_on_ray:
        return
    if engine.update not in ("disk", "lora"):
        yield "engine.update", 'must be "disk" or "lora" for servers that the run starts on a Ray cluster'
    if engine.colocate:
        yield "engine.colocate", "is for servers on the trainer's device; leave it out with scale.ray"
    if engine.relay_port:
        yield "engine.relay_port", "is for servers that run without this run; leave it out with scale.ray, whose actors relay"
    gpus = config.scale.ray_engine_gpus
    if gpus > 1 and not gpus.is_integer():
        yield "scale.ray_engine_gpus", "must be an integer above 1: the GPUs that a server's model is split over"


def _quant_rules(config: RunConfig, training: bool) -> Broken:
    quant, kind = config.quant, config.engine.kind
    if quant.kind == "none":
        return
    if kind in ("chat", "llamacpp"):
        yield "quant.kind", f'engine.kind = "{kind}" takes no weights; quantize the model at the server, and leave this out'
    if quant.kind == "int4" and quant.group % 8:
        yield "quant.group", "must be a multiple of 8, the codes in one packed number"
    if quant.packed and kind == "local":
        yield "quant.packed", 'is for servers; set engine.kind = "vllm" or "sglang"'
    if quant.packed and config.engine.update != "disk":
        why = "servers convert packed weights when they load them, so updates are directories"
        yield "quant.packed", f'{why}; set engine.update = "disk"'
    if not training:
        return
    if config.lora.rank:
        why = "with lora.rank the base alone would be quantized, and the engine has the merged weights; set lora.rank = 0"
        yield "quant.kind", why
    if not quant.train and config.train.correction == "none":
        yield "quant.train", 'trains another policy than the engine samples from; set train.correction, such as "tis"'
    if kind != "local" and quant.packed and quant.kind == "fp8" and not quant.activations:
        yield "quant.activations", "servers round activations with packed fp8 weights; set quant.activations = true"
    if kind != "local" and (not quant.train or (quant.kind == "fp8" and quant.activations and not quant.packed)):
        key = "activations" if quant.train else "train"
        why = "is for the local engine: a server gets weights on the grid, and its logprobs must equal the trainer's"
        yield f"quant.{key}", f"{why}; set quant.{key} = {str(not quant.train).lower()}"


def _update_rules(config: RunConfig) -> Broken:
    """Check that the servers support `engine.update`."""
    engine = config.engine
    if engine.tree and engine.update not in ("disk", "lora"):
        yield "engine.tree", f'sends directories of weights; with engine.update = "{engine.update}" there are none'
    if engine.update == "tensors" and engine.kind not in ("sglang", "auto"):
        why = 'is for engine.kind = "sglang": no other server accepts weights in requests; use "disk" or "group"'
        yield "engine.update", why
    elif engine.update != "lora":
        return
    elif not config.lora.rank:
        yield "engine.update", "there is no adapter to send; set lora.rank"
    elif engine.kind not in ("vllm", "sglang", "auto"):
        yield "engine.update", "adapters go to vLLM and SGLang only; leave it out to send merged weights"
    elif engine.colocate:
        why = "with engine.colocate, a sleeping server releases the adapter's base model; leave one of the two keys out"
        yield "engine.update", why


def _play_rules(config: RunConfig) -> Broken:
    limits = config.limits
    for key in ("turn_tokens", "prompt_tokens"):
        value = getattr(limits, key)
        if limits.context is not None and value is not None and value >= limits.context:
            yield f"limits.{key}", f"must be under limits.context = {limits.context}"
    if config.rollout.history == "inline" and config.rollout.function:
        yield "rollout.history", "is for environments; a play function chooses what follows a reply"


def _schedule_rules(config: RunConfig) -> Broken:
    schedule, engine = config.schedule, config.engine
    if schedule.mode == "sync":
        return
    if (schedule.mode == "one_step_off" or schedule.staleness) and config.train.correction == "none":
        why = 'trains on tokens of older policies, which needs train.correction, such as "tis" or "icepop"'
        yield ("schedule.mode" if schedule.mode == "one_step_off" else "schedule.staleness"), why
    if engine.in_flight == "keep" and engine.kind not in ("vllm", "sglang", "auto"):
        yield "engine.in_flight", "is for vLLM and SGLang; the local engine interrupts replies: leave it out"
    if engine.in_flight == "keep" and engine.update == "lora":
        yield "engine.in_flight", "a reply ends with its adapter (engine.update = lora): set recompute or salt"
    if engine.colocate and schedule.mode == "async" and not schedule.hold:
        yield "engine.colocate", "needs schedule.hold = true, since the engine is asleep while the trainer trains"
    if engine.colocate and schedule.mode == "one_step_off":
        yield "engine.colocate", "samples and trains by turns, and one_step_off does both at once; leave one of the two out"


CLIPPED = ("clip_low", "clip_high", "clip_cap", "old_logprobs")
"""Keys of `[train]` that are about advantages alone."""


def _teacher_rules(config: RunConfig) -> Broken:
    environments = [env.name or env.use for env in config.env]
    for index, teacher in enumerate(config.teacher):
        prefix = f"teacher.{index}"
        given = [key for key in ("path", "urls", "self") if getattr(teacher, key)]
        if len(given) != 1:
            why = "is given beside " + " and ".join(given[1:]) if given else "is missing, and so are urls and self"
            yield f"{prefix}.{given[0] if given else 'path'}", f"{why}; a teacher has exactly one of path, urls and self"
        for key, known in (("environments", environments), ("policies", [policy.name for policy in config.policy])):
            for name in (name for name in getattr(teacher, key) if known and name not in known):
                near = did_you_mean(name, known) or f"there are {', '.join(known)}"
                yield f"{prefix}.{key}", f"{name!r} is none of the run's; {near}"
        if teacher.name and teacher.name in [other.name for other in config.teacher[:index]]:
            yield f"{prefix}.name", "another teacher has this name too; give each its own name"
        yield from ((f"{prefix}.{key}", why) for key, why in _served_teacher_rules(config, teacher))
    if config.teacher:
        yield from _taught_policy_rules(config)


def _taught_policy_rules(config: RunConfig) -> Broken:
    train = config.train
    own = any(teacher.self for teacher in config.teacher)
    if own and train.reference == "none":
        yield "train.reference", "is the policy that a teacher with self = true is; leave this key out"
    for key in ("reference", "reference_every") if not own and not train.kl else ():
        if key in changed(train) and getattr(train, key) != "none":
            yield f"train.{key}", "has no effect: it needs train.kl > 0, or a teacher with self = true; leave it out"
    if train.reward_weight:
        return
    if train.kl and train.kl_in == "reward":
        yield "train.kl_in", 'subtracts from the reward, whose weight is 0 (train.reward_weight); set kl_in = "loss"'
    if all(teacher.signal == "loss" for teacher in config.teacher):
        for key in (key for key in CLIPPED if key in changed(train)):
            yield f"train.{key}", 'is about advantages, and the teachers\' signal = "loss" is the only one; leave it out'


def _served_teacher_rules(config: RunConfig, teacher: TeacherConfig) -> Broken:
    if teacher.urls and teacher.signal == "loss" and teacher.top is None:
        yield "top", "must be set: servers send the most likely ids only, no probabilities of a vocabulary"
    if teacher.urls and (cut := truncation_key(config.rollout)):
        yield "urls", f"are servers, which score the vocabulary, but rollout.{cut[0]} cuts it; name a path, or leave that out"


def _training_rules(config: RunConfig, has_objects: bool) -> Broken:
    rollout, train = config.rollout, config.train
    if rollout.adapt is not None and len(config.env) < 2 and not has_objects:
        why = "has no effect with one environment: it moves weight between several; add another [[env]], or leave this out"
        yield "rollout.adapt", why
    if found := conflicting_keys(train):
        yield f"train.{found[0]}", found[1]
    yield from _schedule_rules(config)
    yield from _teacher_rules(config)
    if train.reference == "adapter_off" and not config.lora.rank:
        yield "train.reference", "there is no adapter to switch off; set lora.rank"
    if config.lora.rank and not config.lora.targets:
        yield "lora.targets", 'must name a linear layer; ["all"] are those of the text model'
    if train.steps == 0:
        return
    if config.engine.kind == "sglang" and (truncation := truncation_key(rollout)):
        yield f"rollout.{truncation[0]}", truncation[1]
    # Whether a trajectory is compared with the others of its task, not with the batch.
    compared = (train.advantage or ("batch" if train.algorithm == "reinforce_pp" else "")) not in ("batch", "running")
    compared = compared and not config.policy  # each policy is checked with its own keys
    compared = compared and train.reward_weight > 0
    if rollout.group_size < 2 and compared:
        why = "must be at least 2: a trajectory's advantage compares its reward with the others of its group"
        yield "rollout.group_size", why
    if train.min_group > rollout.group_size and compared:
        yield "train.min_group", f"must be at most rollout.group_size = {rollout.group_size}, or every group is dropped"
    if train.lr_warmup_steps >= train.steps and train.data_epochs is None:
        yield "train.lr_warmup_steps", f"must be under train.steps = {train.steps}"
    episodes = rollout.groups * rollout.group_size
    if train.minibatches > episodes:
        yield "train.minibatches", f"must be at most the {episodes} episodes of a step"


def _value(config: Any, dotted: str) -> Any:
    """Return the value of a dotted key; the name of an environment without one is what it uses."""
    parts = dotted.split(".")
    for number, part in enumerate(parts):
        if isinstance(config, Mapping):
            return config[".".join(parts[number:])]
        value = config[int(part)] if isinstance(config, tuple) else getattr(config, part)
        config = config.use if part == "name" and isinstance(config, EnvConfig) and not value else value
    return config
