"""slime (and Miles): the flags of `train.py`, and what a recipe has in their place.

`RULES` has a recipe key or a rule for each flag with a meaning here, `NONE` the reason for each
flag without one, and `MACHINE` those of machines, memory and logging. `_finish` decides what
several flags decide together: the schedule, the teacher, the adapter, the terms of the loss and
the critic.

Nothing here reads a script or writes a recipe: `convert.engine.convert_source` applies the table.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from turnwright.errors import ConfigError
from turnwright_compat.convert.critic import (
    CLIP,
    CONSTANT,
    begins_as_policy,
    critic_rules,
    note_clip,
    set_critic,
    set_critic_warmup,
)
from turnwright_compat.convert.engine import (
    NO_EFFECT,
    TO_DO,
    Draft,
    Rule,
    System,
    argument,
    data_path,
    in_steps,
    lists,
    minibatches,
    noted,
    own_function,
    python_name,
    same,
    switch,
    temperature_of_eval,
    top_k,
    train_data,
    unless_off,
)
from turnwright_compat.convert.sources import find_file, plain_value

ALGORITHMS = {
    "grpo": "grpo",
    "gspo": "gspo",
    "cispo": "cispo",
    "ppo": "ppo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
NONZERO_STD = "check_reward_nonzero_std"
"""The systems' filter that drops groups whose rewards are all equal."""

FULLY_ASYNC = re.compile(
    r"(?:^|\.)fully_async_rollout\.(?:generate_rollout_fully_async|FullyAsyncRolloutFn)$"
)
"""The systems' own rollouts that sample all the time, also a copy of their file."""
OWN_ROLLOUTS = re.compile(
    r"^(?:slime|miles)\.rollout\."
    r"(?:sglang_rollout\.generate_rollout|inference_rollout\.[\w.]*|[\w.]*InferenceRolloutFn)$"
)
"""The systems' own rollouts that our loop is."""
SUPERVISED = re.compile(r"(?:^|\.)sft_rollout\.")
_HOOKS = (
    "write what it does as a custom generate function (use), a reward (custom_rm_path), a filter "
    "of groups (train.group_filter) or tasks (file.py:function)"
)


# Rules of one flag


def _has_critic(draft: Draft) -> bool:
    return draft.settings.get("advantage-estimator") == "ppo"


def _discount(draft: Draft, value: Any) -> str | None:
    """Convert the discount: per token with a critic, and per turn else."""
    key = "train.token_discount" if _has_critic(draft) else "train.discount"
    return unless_off(key, (1,))(draft, value)


def _of_groups(rule: Rule) -> Rule:
    """Return a rule of a setting about the rewards of a group, which a critic's advantages do not
    read."""

    def checked(draft: Draft, value: Any) -> str | None:
        if _has_critic(draft):
            return f"{NO_EFFECT}: rewards are not normalized by group with a critic"
        return rule(draft, value)

    return checked


def _group_normalization(draft: Draft, value: Any) -> str:
    reason = "see train.advantage"
    return reason if value else f"{NO_EFFECT} at this value ({reason})"


def _normalization(draft: Draft, value: Any) -> str:
    """Account for the normalization of advantages over the batch, which those of a critic always
    have here."""
    if _has_critic(draft):
        if value:
            return (
                f"{NO_EFFECT} at this value: advantages of a critic are normalized over the batch"
            )
        return "advantages of a critic are always normalized over the batch"

    reason = 'see train.advantage = "batch"'
    return reason if value else f"{NO_EFFECT} at this value ({reason})"


def _response_length(draft: Draft, value: Any) -> None:
    # It is the budget of an episode: observations use it up too, and one reply may take all of it.
    draft.put("limits.turn_tokens", value)
    draft.put("limits.episode_tokens", value)


def _template_args(draft: Draft, value: Any) -> None:
    for name, argument_value in value.items():
        draft.put(f"model.template_args.{name}", argument_value)


def _generate(draft: Draft, value: Any) -> None:
    # The environment that a custom configuration names has precedence over the user's loop.
    if "env.use" not in draft.values:
        draft.put("env.use", python_name(draft, str(value)))


def _custom_config(draft: Draft, value: Any) -> None:
    """Read the file of a custom loop, if it is near the script: its turns, and its environment
    for our loop."""
    draft.put("env.args.custom_config_path", value)
    path = find_file(str(value), draft.folder)
    if path is None:
        draft.incomplete.append(
            f"{value} (custom-config-path) was not found: set limits.turns to its max_turns"
        )
        return

    draft.put("env.args.custom_config_path", str(path))
    loop_settings = _top_level_entries(path)
    max_turns = loop_settings.get("max_turns")
    if isinstance(max_turns, int):
        draft.put("limits.turns", max_turns)

    environment = loop_settings.get("rollout_interaction_env_path")
    if isinstance(environment, str):
        draft.put("env.use", python_name(draft, f"{environment}.build_env"))
        draft.notes.append(
            "our loop plays the environment of rollout_interaction_env_path, in place of the "
            "custom generate"
        )


def _top_level_entries(path: Path) -> dict[str, Any]:
    """Return the `key: value` lines of a YAML file, without comments and nested tables."""
    entries: dict[str, Any] = {}
    for line in path.read_text("utf-8").splitlines():
        without_comment = line.partition("#")[0]
        key, _, text = without_comment.partition(":")
        if key.strip() and text.strip():
            entries[key.strip()] = plain_value(text.strip())
    return entries


def _eval_data(draft: Draft, value: Any) -> str | None:
    words = [str(word) for word in (value if isinstance(value, list) else [value])]
    # The flag takes pairs of a name and a path; a single word is a path.
    paths = words[1::2] or words
    draft.put("env.eval_tasks", data_path(draft, paths[0]))
    return None


def _multimodal(draft: Draft, value: Any) -> str | None:
    if not isinstance(value, dict):
        return 'expected a JSON table, such as {"image": "images"}'

    for kind, column in value.items():
        if kind in ("image", "video"):
            draft.put(f"env.columns.{kind}s", str(column))
    return None


def _filter(draft: Draft, value: Any) -> str | None:
    name = str(value)
    if name.endswith(NONZERO_STD):
        draft.put("train.refill", 3)
        return None
    if name.startswith(("slime.", "miles.")):
        return own_function("train.group_filter")(draft, value)

    draft.put("train.group_filter", python_name(draft, name))
    return None


def _targets(draft: Draft, value: Any) -> str | None:
    if value in ("all-linear", None):
        return None

    names = [name.strip() for name in str(value).split(",") if name.strip()]
    megatron_names = [name for name in names if name.startswith("linear_")]
    if megatron_names:
        draft.incomplete.append(
            f"target-modules has names of Megatron ({', '.join(megatron_names)}): set lora.targets "
            "(q_proj, ...)"
        )
        return "names of Megatron: set lora.targets"

    draft.put("lora.targets", names)
    return None


# Rules over several flags


def _finish(draft: Draft) -> None:
    # The recipe's keys stand in the order in which they are put here.
    rollout_function = str(draft.settings.get("rollout-function-path") or "")
    _refuse_supervised(draft, rollout_function)
    _set_schedule(draft, rollout_function)
    _account_for_rollout_function(draft, rollout_function)
    _set_teacher(draft)
    _set_adapter(draft)

    _set_batch(draft)
    _set_environment(draft)
    settings = draft.settings
    if "num-epoch" in settings and "num-rollout" not in settings:
        draft.put("train.data_epochs", settings["num-epoch"], origin="num-epoch")
    _set_loss_terms(draft)
    _set_optimizer(draft)
    if _has_critic(draft):
        _set_critic(draft)

    if "use-tis" not in settings:
        for key in ("train.correction_low", "train.correction_high"):
            draft.values.pop(key, None)


def _refuse_supervised(draft: Draft, rollout_function: str) -> None:
    """Refuse a training on replies that the data have."""
    supervised_loss = draft.settings.get("loss-type") in ("sft_loss", "sft")
    if SUPERVISED.search(rollout_function) or supervised_loss:
        raise ConfigError(
            f"trains on given replies ({rollout_function or 'loss-type sft_loss'}); see [warmup] "
            "dataset in docs/training.md"
        )


def _set_schedule(draft: Draft, rollout_function: str) -> None:
    """Choose the schedule by the program and by the function that plays a step."""
    program = str(draft.settings.get("$program"))
    if draft.isset("fully-async"):
        draft.put("schedule.mode", "async", origin="fully-async")
    elif FULLY_ASYNC.search(rollout_function):
        draft.put("schedule.mode", "async", origin="rollout-function-path")
    elif program.endswith("train_async.py"):
        draft.put("schedule.mode", "one_step_off", origin=program)

    staleness = draft.number("max-weight-staleness", 0)
    if draft.values.get("schedule.mode") == "async" and staleness >= 1:
        draft.put("schedule.staleness", int(staleness), origin="max-weight-staleness")


def _account_for_rollout_function(draft: Draft, rollout_function: str) -> None:
    """Say what becomes of the function that plays a step: the systems' own are our loop, one of
    the user's is not run."""
    if not rollout_function:
        return

    if FULLY_ASYNC.search(rollout_function) or OWN_ROLLOUTS.search(rollout_function):
        draft.reasons["rollout-function-path"] = (
            f"{NO_EFFECT} at this value: our loop plays what it plays"
        )
        return

    draft.reasons["rollout-function-path"] = f"a function for a step is not run here: {_HOOKS}"
    draft.incomplete.append(
        f"rollout-function-path = {rollout_function} plays a step by itself, which is not run "
        f"here: {_HOOKS}"
    )


def _set_teacher(draft: Draft) -> None:
    """Make the teacher of on-policy distillation: its log probabilities are added to the
    advantages there too."""
    if not draft.isset("use-opd"):
        return

    draft.teacher["signal"] = "advantage"
    draft.teacher["weight"] = draft.number("opd-kl-coef", 1.0)
    draft.teacher_settings.update(("use-opd", "opd-kl-coef", "opd-type"))
    _find_teacher(draft)

    # This reward function asks the teacher, and rewards nothing.
    if "on_policy_distillation.reward_func" in str(draft.settings.get("custom-rm-path")):
        draft.values.pop("env.args.custom_rm_path", None)
        draft.teacher_settings.update(("custom-rm-path", "custom-reward-post-process-path"))
        draft.put("train.reward_weight", 0.0, origin="custom-rm-path")


def _find_teacher(draft: Draft) -> None:
    """Set where the teacher's log probabilities come from: a model directory, or servers."""
    settings = draft.settings
    urls = settings.get("opd-teacher-urls", settings.get("rm-url"))
    if settings.get("opd-type") == "megatron" or "opd-teacher-load" in settings:
        draft.teacher["path"] = f"{TO_DO}/teacher"
        checkpoint = settings.get("opd-teacher-load")
        draft.incomplete.append(
            f"opd-teacher-load = {checkpoint} is a checkpoint of Megatron: set the path of "
            "[[teacher]] to its directory"
        )
        draft.teacher_settings.add("opd-teacher-load")
        return

    if not urls:
        raise ConfigError(
            "use-opd names no teacher (opd-teacher-load or rm-url); write a [[teacher]] with its "
            "path"
        )
    server_urls = urls if isinstance(urls, list) else [urls]
    draft.teacher["urls"] = [re.sub(r"/generate/?$", "", str(url)) for url in server_urls]
    draft.teacher_settings.update(("rm-url", "opd-teacher-urls"))
    draft.values.pop("env.args.rm_url", None)


def _set_adapter(draft: Draft) -> None:
    """Set the adapter of Miles' flags, or none."""
    rank = int(draft.number("lora-rank", 0))
    if rank <= 0:
        for key in ("alpha", "dropout", "targets", "rank"):
            draft.values.pop(f"lora.{key}", None)
        return

    draft.put("lora.rank", rank, origin="lora-rank")
    draft.put("lora.alpha", draft.number("lora-alpha", 16), origin="lora-alpha")


def _set_batch(draft: Draft) -> None:
    """Set the optimizer steps of a batch, unless the flags count them."""
    settings = draft.settings
    if "num-steps-per-rollout" in settings or "global-batch-size" not in settings:
        return

    prompts = draft.number("rollout-batch-size", 0)
    completions = prompts * draft.number("n-samples-per-prompt", 1)
    global_batch = draft.number("global-batch-size", 0)
    minibatches(draft, global_batch, completions, "global-batch-size")


def _set_environment(draft: Draft) -> None:
    """Play the system's own loop where no other is named."""
    rollout_function = draft.settings.get("rollout-function-path")
    # An incomplete recipe says that the user's function is to be written again.
    to_rewrite = rollout_function and "rollout-function-path" in " ".join(draft.incomplete)
    if "env.use" not in draft.values and not to_rewrite:
        draft.put("env.use", "slime:generate", origin="no custom-generate-function-path")


def _set_loss_terms(draft: Draft) -> None:
    """Set the KL term and the upper bound of the ratio."""
    loss_coefficient = draft.number("kl-loss-coef", 0)
    reward_coefficient = draft.number("kl-coef", 0)
    if draft.isset("use-kl-loss") and loss_coefficient:
        draft.put("train.kl", loss_coefficient, origin="kl-loss-coef")
        draft.put("train.kl_in", "loss", origin="use-kl-loss")
    elif reward_coefficient:
        draft.put("train.kl", reward_coefficient, origin="kl-coef")
        draft.put("train.kl_in", "reward", origin="kl-coef")
        draft.put("train.kl_estimator", "k1", origin="kl-coef")

    if "eps-clip-high" not in draft.settings:
        draft.put("train.clip_high", draft.number("eps-clip", 0.2), origin="eps-clip")


def _set_optimizer(draft: Draft) -> None:
    """Set the warm-up of the learning rate and the optimizer's betas."""
    warmup = draft.number("lr-warmup-iters", 0)
    if warmup > 0:
        updates = draft.values.get("train.minibatches", 1)
        in_steps(draft, "train.lr_warmup_steps", warmup, updates, "lr-warmup-iters")

    betas = [draft.number("adam-beta1", 0.9), draft.number("adam-beta2", 0.999)]
    draft.put("train.betas", betas, origin="adam-beta1, adam-beta2")


def _set_critic(draft: Draft) -> None:
    """Set what trains the critic: the batches and the bound of gradients of the policy."""
    if "clip-grad" in draft.settings:
        draft.put("train.critic.max_grad_norm", draft.settings["clip-grad"], origin="clip-grad")

    origin = "num-steps-per-rollout, global-batch-size"
    updates = draft.values.get("train.minibatches", 1)
    parts = updates if isinstance(updates, int) else 1
    set_critic(draft, updates=updates, parts=parts, origin=origin, decays=True)
    note_clip(draft, "value-clip", 0.2)
    if "normalize-advantages" not in draft.settings:
        draft.notes.append(
            "without normalize-advantages, those of ppo are as they are there; here they are "
            "normalized over the batch"
        )

    warmup = int(draft.number("num-critic-only-steps", 0))
    set_critic_warmup(draft, warmup, "num-critic-only-steps")


RULES: dict[str, Any] = {
    # Model and data.
    "hf-checkpoint": "model.path",
    "apply-chat-template-kwargs": _template_args,
    "prompt-data": train_data,
    "eval-prompt-data": _eval_data,
    "input-key": "env.columns.prompt",
    "label-key": "env.columns.answer",
    "metadata-key": unless_off("env.columns.metadata", ("metadata",)),
    "tool-key": unless_off("env.columns.tools", ("tools",)),
    "multimodal-keys": _multimodal,
    # Environment and rewards.
    "custom-generate-function-path": _generate,
    "custom-config-path": _custom_config,
    "custom-rm-path": argument("custom_rm_path"),
    "rm-type": argument("rm_type"),
    "rm-url": argument("rm_url"),
    "reward-key": argument("reward_key"),
    "eval-reward-key": argument("eval_reward_key"),
    "group-rm": argument("group_rm"),
    # Steps, batches and sampling.
    "num-rollout": "train.steps",
    "num-epoch": noted,
    "rollout-batch-size": "rollout.groups",
    "n-samples-per-prompt": "rollout.group_size",
    "rollout-temperature": "rollout.temperature",
    "rollout-top-p": "rollout.top_p",
    "rollout-top-k": top_k("rollout.top_k"),
    "rollout-stop": lists("rollout.stop"),
    # Limits.
    "rollout-max-response-len": _response_length,
    "rollout-max-context-len": "limits.context",
    "rollout-max-prompt-len": "limits.prompt_tokens",
    "max-seq-len": "limits.context",
    "generate-max-turns": "limits.turns",
    # Credit and loss.
    "dynamic-sampling-filter-path": _filter,
    "advantage-estimator": same("train.algorithm", **ALGORITHMS),
    "disable-grpo-std-normalization": _of_groups(switch("train.advantage", "mean")),
    "disable-rewards-normalization": _of_groups(_group_normalization),
    "normalize-advantages": _normalization,
    "calculate-per-token-loss": switch("train.aggregation", "token"),
    "eps-clip": "train.clip_low",
    "eps-clip-high": "train.clip_high",
    "eps-clip-c": "train.clip_cap",
    "entropy-coef": "train.entropy",
    "gamma": _discount,
    "use-kl-loss": noted,
    "kl-loss-coef": noted,
    "kl-coef": noted,
    "kl-loss-type": same("train.kl_estimator", k1="k1", k2="k2", k3="k3", low_var_kl="k3"),
    "ref-update-interval": unless_off("train.reference_every"),
    # Learning rate.
    "lr": "train.lr",
    "lr-decay-style": same("train.schedule", constant="constant", linear="linear", cosine="cosine"),
    "lr-warmup-iters": noted,
    # Schedule.
    "rollout-function-path": noted,
    "fully-async": noted,
    "max-weight-staleness": noted,
    # Adapter.
    "lora-rank": noted,
    "lora-alpha": noted,
    "lora-dropout": "lora.dropout",
    "target-modules": _targets,
    # Optimizer and passes.
    "weight-decay": "train.weight_decay",
    "adam-beta1": noted,
    "adam-beta2": noted,
    "adam-eps": "train.eps",
    "clip-grad": "train.max_grad_norm",
    "global-batch-size": noted,
    "num-steps-per-rollout": "train.minibatches",
    "max-tokens-per-gpu": "train.micro_tokens",
    "recompute-granularity": switch("train.gradient_checkpointing"),
    "gradient-checkpointing": switch("train.gradient_checkpointing"),
    # Probabilities and routes of the engine.
    "use-tis": switch("train.correction", "tis"),
    "tis-clip": "train.correction_high",
    "tis-clip-low": lambda draft, value: "tis has no lower bound here" if value else None,
    "use-rollout-logprobs": switch("train.old_logprobs", "engine"),
    "use-rollout-routing-replay": switch("train.routing_replay", "replay"),
    # Seeds, checkpoints and evaluation.
    "seed": "seed",
    "rollout-seed": "seed",
    "save": "out",
    "save-interval": "checkpoint.every",
    "eval-interval": "eval.every",
    "n-samples-per-eval-prompt": "eval.samples",
    "eval-temperature": temperature_of_eval,
    "eval-top-p": "eval.top_p",
    "eval-top-k": top_k("eval.top_k"),
    # Trackers.
    "use-wandb": switch("track.to", ["wandb"]),
    "use-tensorboard": switch("track.to", ["tensorboard"]),
    "wandb-project": "track.project",
    "wandb-group": "track.name",
    "tb-project-name": "track.project",
    "tb-experiment-name": "track.name",
    # Functions of the user.
    "custom-advantage-function-path": own_function("train.advantage"),
    "custom-loss-function-path": own_function("train.algorithm"),
    **critic_rules(
        _has_critic,
        {
            "lambd": unless_off("train.token_lambda", (1,)),
            "num-critic-only-steps": noted,
            "critic-lr": unless_off("train.critic.lr", (None,)),
            "critic-lr-warmup-iters": (CONSTANT, (0, None)),
            "critic-load": begins_as_policy("hf-checkpoint", "load", "ref-load"),
            "critic-save": ("checkpoints have the critic too", ()),
            "value-clip": (CLIP, ()),
        },
    ),
}

_TEACHER = "see [[teacher]], with its path or urls"
_TRAINED = (
    "each sampled token of a group counts by its rules; see train.group_filter, "
    "train.advantage and train.loss_scale"
)
NONE: dict[str, tuple[str, tuple[Any, ...]]] = {
    "apply-chat-template": ("the model's template is always applied", (True,)),
    "rollout-shuffle": ("tasks are always shuffled, by the seed", (True,)),
    "eval-input-key": ("held-out tasks have the columns of the training tasks", ("prompt",)),
    "eval-label-key": ("held-out tasks have the columns of the training tasks", ()),
    "eval-tool-key": ("held-out tasks have the columns of the training tasks", ()),
    "eval-max-response-len": ("evaluations have the limits of training episodes", ()),
    "eval-max-context-len": ("evaluations have the limits of training episodes", ()),
    "eval-max-prompt-len": ("evaluations have the limits of training episodes", ()),
    "eval-min-new-tokens": ("no minimum length of a reply", (0, None)),
    "eval-config": ("name held-out tasks in [[env]] eval_tasks", ()),
    "skip-eval-before-train": ("the policy is always evaluated before reinforcement", ()),
    "generate-tool-specs-path": (
        "name the tools in [env.args] of an environment with tools, or in the rows",
        (),
    ),
    "generate-execute-tool-function-path": ("write the tools as functions: see tw.tool_env", ()),
    "generate-tool-call-parser": ("the template tells the format of calls; see model.parser", ()),
    "custom-agent-function-path": (
        "write it as an agent function of (task, model), or point it at turnwright serve",
        (),
    ),
    "use-session-server": (
        "contexts keep the sampled ids without a server; agents over HTTP: turnwright serve",
        (False,),
    ),
    "session-server-ip": ("see use-session-server", ()),
    "session-server-port": ("see use-session-server", ()),
    "tito-model": ("contexts keep the sampled ids with every template", ()),
    "pause-generation-mode": (
        'see [schedule] mode = "async", which keeps replies across weight updates',
        (),
    ),
    "eval-function-path": ("evaluations play the same loop", ()),
    "data-source-path": ("write [[env]] tasks = file.py:function", ()),
    "buffer-filter-path": (_TRAINED, ()),
    "rollout-sample-filter-path": (_TRAINED, ()),
    "rollout-all-samples-process-path": (_TRAINED, ()),
    "rollout-sample-hook-path": (_TRAINED, ()),
    "custom-reward-post-process-path": (_TRAINED, ()),
    "custom-convert-samples-to-train-data-path": (_TRAINED, ()),
    "custom-pg-loss-reducer-function-path": ("see train.aggregation", ()),
    "custom-tis-function-path": ("see train.correction", ()),
    "custom-rollout-log-function-path": ("see [track]", ()),
    "custom-eval-rollout-log-function-path": ("see [track]", ()),
    "partial-rollout": (
        'see [schedule] mode = "async", which keeps replies across weight updates',
        (False,),
    ),
    "mask-offpolicy-in-partial-rollout": ("see train.correction", (False,)),
    "min-batch-collection-ratio": ("a step waits for its groups; see [schedule]", (1, 1.0)),
    "over-sampling-batch-size": (
        "train.refill asks for more groups only where some are replaced",
        (),
    ),
    "rollout-stop-token-ids": (
        "replies end at the template's end tokens, or at texts: rollout.stop",
        (),
    ),
    "rollout-skip-special-tokens": (
        "environments see text without the end token; adapters restore it",
        (),
    ),
    "rollout-task-type": ("one loop for all tasks", ()),
    "use-opsm": ("see train.correction = sequence_mis_mean", (False,)),
    "opsm-delta": ("see train.correction = sequence_mis_mean", ()),
    "use-unbiased-kl": ("see train.kl_estimator = k2, whose gradient is that of the KL", (False,)),
    "loss-mask-type": ("what was sampled is trained, whatever the template", ()),
    "loss-type": ("see train.algorithm", ("policy_loss",)),
    "lora-type": ("adapters are plain LoRA", ("lora",)),
    "exclude-modules": ("name the layers in lora.targets", (None,)),
    "lora-adapter-path": ("merge it into the model first", (None,)),
    "lora-train-only": ("the trained policy is the one that samples", (False,)),
    "experts-shared-outer-loras": ("each layer has an adapter of its own", (False,)),
    "multi-lora-n-adapters": ("see [[policy]]", (0, None)),
    "multi-lora-adapter": ("see [[policy]]", ()),
    "custom-async-data-buffer-path": ("see schedule.selection", (None,)),
    "async-unused-samples-handler": ("see schedule.selection", (None,)),
    "async-max-concurrent-samples": ("see rollout.concurrency", (None,)),
    "async-data-buffer-capacity-factor": ("see schedule.staleness", ()),
    "rollout-submission-granularity": ("see [schedule]", (None,)),
    "disable-compute-advantages-and-returns": ("only reinforcement", (False,)),
    "disable-rollout-global-dataset": ("write [[env]] tasks = file.py:function", (False,)),
    "disable-rollout-trim-samples": ("a step has the groups of rollout.groups", (False,)),
    "allow-partial-train-step": ("a step has the groups of rollout.groups", (False,)),
    "use-dynamic-global-batch-size": ("a step has the groups of rollout.groups", (False,)),
    "chat-template-path": ("set model.template", (None,)),
    "session-message-matcher": ("see use-session-server", (None,)),
    "session-sample-picker-path": ("see use-session-server", (None,)),
    "session-sample-postprocessor-path": ("see use-session-server", (None,)),
    "true-on-policy-mode": (
        "trainer and engine are compared at every step (train.max_mismatch)",
        (False,),
    ),
    "eval-overflow-policy": ("evaluations have the limits of training episodes", (None,)),
    "use-indexer-replay": ("only routing is replayed", (False,)),
    "use-rollout-indexer-replay": ("only routing is replayed", (False,)),
    "opd-teacher-urls": (_TEACHER, ()),
    "opd-log-prob-top-k": (_TEACHER, (0, None)),
    "opd-reward-weight-mode": (_TEACHER, (None,)),
    "opd-teacher-key": (_TEACHER, (None,)),
    "opd-top-k-strategy": (_TEACHER, (None,)),
    "opd-topk-per-position": (_TEACHER, (None,)),
    "use-opd": (_TEACHER, (False,)),
    "opd-kl-coef": (_TEACHER, ()),
    "opd-type": (_TEACHER, ()),
    "opd-teacher-load": (_TEACHER, ()),
    "opd-teacher-ckpt-step": (_TEACHER, ()),
    "keep-old-actor": ("the denominator's policy is scored before the first update", (False,)),
    "use-rollout-entropy": ("the entropy is exact and always measured", (False,)),
    "get-mismatch-metrics": ("always measured", (True,)),
    "ref-load": ("the reference policy is the model at the start of reinforcement", ()),
    "load": ("weights come from model.path; a run continues with --resume", ()),
    "start-rollout-id": ("a run continues with --resume", ()),
    "optimizer": ("AdamW is the optimizer", ("adam", "adamw")),
    "lr-warmup-fraction": ("set train.lr_warmup_steps", (0,)),
    "lr-warmup-init": ("the rate rises from a share of its peak", (0,)),
    "min-lr": ("the rate decays to 0", (0, 0.0)),
    "attention-dropout": ("no dropout: the trained policy equals the sampled one", (0, 0.0)),
    "hidden-dropout": ("no dropout: the trained policy equals the sampled one", (0, 0.0)),
    "freeze-params-name-list": ("see train.vision and [lora]", ()),
    "only-train-params-name-list": ("see train.vision and [lora]", ()),
}

MACHINE = (
    # Placement and parallelism.
    "*-parallel-size",
    "*-parallel",
    "actor-num-*",
    "critic-num-*",
    "rollout-num-gpus*",
    "num-gpus-per-node",
    "colocate",
    "ray-*",
    "sequence-parallel",
    "allgather-cp",
    "context-parallel-*",
    "cp-comm-type",
    "expert-*",
    "distributed-*",
    "use-distributed-post",
    "use-distributed-optimizer",
    "overlap-*",
    "grad-reduce-*",
    "indep-dp",
    "delay-split-train-data-by-dp",
    "pin-rollout-manager-to-head",
    "decoder-*",
    "*-backend",
    "train-backend",
    "release-train",
    "skip-actor-forward-only",
    # Memory, precision and kernels.
    "offload*",
    "recompute-*",
    "recompute-loss-function",
    "memory-*",
    "train-memory-margin-bytes",
    "low-memory-resume",
    "rematerialize-*",
    "optimizer-cpu-offload",
    "use-cpu-*",
    "stream-optimizer-*",
    "use-stateless-adam",
    "use-precision-*",
    "exp-avg-*",
    "main-params-dtype",
    "main-grads-dtype",
    "bf16",
    "fp16",
    "fp8-*",
    "te-*",
    "transformer-impl",
    "extra-high-precision-*",
    "accumulate-*",
    "attention-softmax-*",
    "attention-backend",
    "attn-implementation",
    "cross-entropy-*",
    "use-flash-*",
    "no-*",
    "deterministic-*",
    "log-probs-*",
    "qkv-format",
    "calculate-per-layer-*",
    # Packing of rows.
    "micro-batch-size",
    "ref-micro-batch-size",
    "use-dynamic-batch-size",
    "balance-*",
    "data-pad-size-multiplier",
    "seq-length",
    # Servers, routers and the sending of weights.
    "sglang-*",
    "prefill-*",
    "router-*",
    "router-health-*",
    "miles-router-*",
    "use-miles-router",
    "rollout-health-*",
    "rollout-external-*",
    "rollout-external",
    "rollout-buffer-url",
    "rollout-data-*",
    "http-proxy",
    "fetch-*",
    "update-weight*",
    "custom-update-weight-*",
    "check-weight-*",
    "p2p-transfer-*",
    "mooncake-*",
    "control-server-port",
    # The shape of the model, which model.path has.
    "num-layers",
    "hidden-size",
    "ffn-*",
    "num-attention-heads",
    "group-query-attention",
    "num-query-groups",
    "swiglu",
    "rotary-*",
    "use-rotary*",
    "disable-bias*",
    "normalization",
    "norm-epsilon",
    "vocab-size",
    "padded-vocab-size",
    "make-vocab-*",
    "kv-channels",
    "qk-layernorm",
    "qk-*",
    "moe-*",
    "num-experts",
    "untie-*",
    "add-qkv-bias",
    "max-position-*",
    "position-embedding-*",
    "use-gated-attention",
    "apply-layernorm-1p",
    "attention-output-gate",
    "multi-latent-attention",
    "q-lora-rank",
    "kv-lora-rank",
    "v-head-dim",
    "qwen-gdn-*",
    "mtp-*",
    "enable-mtp-*",
    "spec",
    "tokenizer-*",
    "use-routing-replay",
    "freeze-indexer",
    # Megatron and its checkpoints.
    "megatron-*",
    "custom-megatron-*",
    "custom-model-provider-path",
    "model-name",
    "use-mcore-*",
    "yaml-cfg",
    "train-env-vars",
    "train-iters",
    "lr-decay-iters",
    "finetune",
    "ref-ckpt-step",
    "reset-optimizer-states",
    "async-save",
    "save-hf",
    "save-retain-interval",
    "save-local-weight-checksum",
    "save-trigger-sentinel",
    "load-forge-rollout-data",
    # Adapters as the trainer stores and sends them.
    "lora-sync-from-tensor",
    "lora-base-cpu-backup",
    "multi-lora-*",
    # Evaluation by separate processes.
    "eval-hf-dir",
    "eval-keep-snapshots",
    "eval-max-in-flight",
    "eval-num-gpus*",
    # Faults, checks and experiments of the trainer.
    "use-fault-tolerance",
    "ci-*",
    "check-*",
    "mini-ft-*",
    "ft-components",
    "witness-*",
    "enable-witness",
    "enable-event-analyzer",
    "env-report",
    # Logs, dashboards and profiles.
    "wandb-*",
    "disable-wandb-*",
    "log-*",
    "log",
    "tensorboard-*",
    "mlflow-*",
    "use-mlflow",
    "use-miles-dashboard",
    "dashboard-*",
    "use-prometheus",
    "prometheus-*",
    "save-debug-*",
    "load-debug-*",
    "debug-*",
    "dump-*",
    "dumper-*",
    "profile*",
    "record-*",
    "mfu-*",
    "observe-training-entropy",
)

SYSTEM = System(
    name="slime",
    rules=RULES,
    none=NONE,
    machine=MACHINE,
    defaults={
        "rollout.group_size": 1,
        "train.algorithm": "grpo",
        "train.aggregation": "trajectory",
        "train.clip_low": 0.2,
        "train.lr": 1e-6,
        "train.schedule": "linear",
        "train.weight_decay": 0.01,
        "train.max_grad_norm": 1.0,
        "seed": 1234,
    },
    finish=_finish,
    programs=r"(^|/)train(_async)?\.py$",
    normalize=lambda key: key.lstrip("-").replace("_", "-"),
)
