"""SkyRL: overrides of `skyrl.train.entrypoints.main_base`, and what a recipe has in their place.

`RULES` has a recipe key or a rule for each setting with a meaning here, `NONE` the reason for each
setting without one, and `MACHINE` those of machines, memory and logging. `_finish` decides what
several settings decide together: the schedule, the user's environment, the terms of the loss, the
critic.

Nothing here reads a script or writes a recipe: `convert.engine.convert_source` applies the table.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from turnwright_compat.convert.critic import (
    CLIP,
    CONSTANT,
    as_policy,
    begins_as_policy,
    critic_rules,
    note_clip,
    set_critic,
)
from turnwright_compat.convert.engine import (
    NO_EFFECT,
    Draft,
    System,
    eval_data,
    in_steps,
    linear_layers,
    lists,
    minibatches,
    noted,
    python_name,
    same,
    switch,
    temperature_of_eval,
    template_argument,
    top_k,
    trackers,
    train_data,
    unless_off,
)
from turnwright_compat.convert.sources import find_file

USE = "skyrl:{}"
"""How a registered environment is named (`turnwright_compat`)."""

# Starts of the keys of its configuration.
ALGORITHM = "trainer.algorithm."
CORRECTION = "trainer.algorithm.off_policy_correction."
CRITIC = "trainer.critic."
GENERATOR = "generator."
TRAINER = "trainer."

LOSSES = {"regular": None, "dual_clip": None, "gspo": "gspo", "cispo": "cispo"}
"""Loss -> the algorithm that it is; None is that of the estimator."""
ESTIMATORS = {"gae": "ppo", "grpo": "grpo", "rloo": "rloo", "reinforce++": "reinforce_pp"}


# Rules of one setting


def _eval_every(draft: Draft, value: Any) -> None:
    # An interval of -1 disables evaluations, as 0 does here.
    draft.put("eval.every", max(0, int(value)))


def _environment_class(draft: Draft, value: Any) -> None:
    draft.put("env.use", USE.format(value))


def _environment_setting(draft: Draft, key: str, value: Any) -> str | None:
    """Put a setting of one environment into its arguments; those of the other environments have
    no effect."""
    name, _, setting = key.removeprefix("environment.skyrl_gym.").partition(".")
    if name != draft.settings.get("environment.env_class", "gsm8k"):
        return "no effect: it belongs to another environment"

    draft.put(f"env.args.{setting}", value)
    return None


def _template(draft: Draft, value: Any) -> str | None:
    if value is None:
        return None

    # Such a template is rendered again every turn.
    draft.put("model.template", value)
    draft.put("rollout.history", "template")
    return None


def _template_args(draft: Draft, value: Any) -> str | None:
    if not isinstance(value, dict):
        return "expected a table"

    for name, argument_value in value.items():
        draft.put(f"model.template_args.{name}", argument_value)
    return None


def _one_message(draft: Draft, value: Any) -> None:
    if value is False:
        draft.put("rollout.history", "inline")


def _loss(draft: Draft, value: Any) -> str | None:
    if value not in LOSSES:
        return "no such loss here; write your own (train.algorithm)"

    algorithm = LOSSES[value]
    if algorithm is not None:
        draft.put("train.algorithm", algorithm)
    return None


def _estimator(draft: Draft, value: Any) -> str | None:
    if value not in ESTIMATORS:
        return "no such estimator here; write your own (train.advantage)"

    # A loss that is an algorithm of its own (`_loss`) has precedence.
    if "train.algorithm" not in draft.values:
        draft.put("train.algorithm", ESTIMATORS[value])
    return None


def _has_critic(draft: Draft) -> bool:
    return draft.settings.get(f"{ALGORITHM}advantage_estimator") == "gae"


def _discount(draft: Draft, value: Any) -> str | None:
    """Convert the discount: per token with a critic, and per turn else."""
    key = "train.token_discount" if _has_critic(draft) else "train.discount"
    return unless_off(key, (1,))(draft, value)


def _zero_variance(draft: Draft, value: Any) -> str:
    if value and _has_critic(draft):
        return "groups with equal rewards are trained too: a critic compares their tokens"
    return (
        f"{NO_EFFECT} at this value (groups without variance carry no loss; train.refill replaces "
        "them)"
    )


def _ratio_type(draft: Draft, value: Any) -> str | None:
    if value in (None, "token"):
        return None
    return "weights per sequence: see sequence_mis"


# Rules over several settings


def _finish(draft: Draft) -> None:
    # The recipe's keys stand in the order in which they are put here.
    _set_schedule(draft)
    _use_registered_class(draft)
    _set_steps(draft)
    _set_loss_terms(draft)
    _set_warmup(draft)
    if _has_critic(draft):
        _set_critic(draft)

    if draft.isset(f"{TRAINER}update_ref_every_epoch"):
        draft.reasons[f"{TRAINER}update_ref_every_epoch"] = (
            "set train.reference_every to the steps of one epoch"
        )
    _set_correction(draft)

    if not draft.number(f"{TRAINER}policy.model.lora.rank", 0):
        for key in ("alpha", "dropout", "targets"):
            draft.values.pop(f"lora.{key}", None)

    workers_key = "environment.skyrl_gym.max_env_workers"
    workers = draft.settings.get(workers_key)
    if workers is not None:
        draft.put("rollout.environments", workers, origin=workers_key)


def _set_schedule(draft: Draft) -> None:
    """Choose the schedule of SkyRL's asynchronous trainers."""
    program = str(draft.settings.get("$program"))
    has_async_settings = any(key.startswith(f"{TRAINER}fully_async.") for key in draft.settings)
    is_async = (
        "fully_async" in program
        or draft.isset(f"{TRAINER}fully_async.enabled")
        or (has_async_settings and "async" in program)
    )
    if not is_async:
        if re.search(r"(^|\.)async\.main_async$", program):
            draft.put("schedule.mode", "one_step_off", origin=program)
        return

    staleness_key = f"{TRAINER}fully_async.max_staleness_steps"
    origin = f"{TRAINER}fully_async.enabled, {staleness_key}" if has_async_settings else program
    draft.put("schedule.mode", "async", origin=origin)
    if staleness_key in draft.settings:
        staleness = int(draft.number(staleness_key, 4))
        draft.put("schedule.staleness", max(1, staleness), origin=staleness_key)


def _use_registered_class(draft: Draft) -> None:
    """Name the class of an environment that the script's own program registers."""
    env_class = draft.settings.get("environment.env_class")
    if env_class is None or draft.base_known:
        return

    program = str(draft.settings.get("$program"))
    file = program if program.endswith(".py") else program.replace(".", "/") + ".py"
    path = find_file(file, draft.folder)
    if path is None:
        return

    entry_point = _registered_entry_point(path, env_class)
    if entry_point is not None:
        module, _, attribute = entry_point.partition(":")
        class_name = python_name(draft, f"{module}.{attribute}")
        draft.put("env.use", class_name, origin="environment.env_class")
        draft.notes.append(f"{env_class} is the class that {path.name} registers")


def _registered_entry_point(path: Path, env_class: Any) -> str | None:
    """Return the `module:Class` that a program registers under a name; None if it registers none,
    or cannot be read."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None

    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if ast.unparse(node.func).rpartition(".")[2] != "register":
            continue

        arguments = {
            keyword.arg: keyword.value.value
            for keyword in node.keywords
            if isinstance(keyword.value, ast.Constant)
        }
        entry_point = arguments.get("entry_point")
        if arguments.get("id") == env_class and isinstance(entry_point, str):
            return entry_point

    return None


def _set_steps(draft: Draft) -> None:
    """Set the optimizer steps of a batch, and the epochs of the data if the steps are not
    named."""
    groups = draft.number(f"{TRAINER}train_batch_size", 1024)
    minibatch = draft.number(f"{TRAINER}policy_mini_batch_size", 256)
    minibatches(draft, minibatch, groups, f"{TRAINER}policy_mini_batch_size")

    if draft.settings.get(f"{TRAINER}max_training_steps") is None:
        epochs = draft.number(f"{TRAINER}epochs", 1)
        draft.put("train.data_epochs", epochs, origin=f"{TRAINER}epochs")


def _set_loss_terms(draft: Draft) -> None:
    settings = draft.settings
    kl_key = f"{ALGORITHM}kl_loss_coef"
    kl_coefficient = draft.number(kl_key, 0.001)
    if settings.get(f"{ALGORITHM}use_kl_in_reward") is True:
        draft.put("train.kl", kl_coefficient, origin=kl_key)
        draft.put("train.kl_in", "reward", origin=f"{ALGORITHM}use_kl_in_reward")
        draft.put("train.kl_estimator", "k1", origin=f"{ALGORITHM}use_kl_in_reward")
    elif settings.get(f"{ALGORITHM}use_kl_loss") is not False:
        # SkyRL's default is a KL term in the loss.
        draft.put("train.kl", kl_coefficient, origin=kl_key)
        draft.put("train.kl_in", "loss", origin=f"{ALGORITHM}use_kl_loss")

    if draft.isset(f"{ALGORITHM}use_entropy_loss"):
        entropy_key = f"{ALGORITHM}entropy_loss_coef"
        draft.put("train.entropy", draft.number(entropy_key, 0.01), origin=entropy_key)

    if settings.get(f"{ALGORITHM}policy_loss_type") == "dual_clip":
        cap_key = f"{ALGORITHM}clip_ratio_c"
        draft.put("train.clip_cap", draft.number(cap_key, 3.0), origin=cap_key)

    keeps_scale = settings.get(f"{ALGORITHM}grpo_norm_by_std") is False
    if keeps_scale and draft.values.get("train.algorithm", "grpo") == "grpo":
        draft.put("train.advantage", "mean", origin=f"{ALGORITHM}grpo_norm_by_std")


def _set_warmup(draft: Draft) -> None:
    """Set the warm-up of the rate, which counts optimizer steps there."""
    warmup_key = f"{TRAINER}policy.optimizer_config.num_warmup_steps"
    warmup = draft.number(warmup_key, 0)
    if warmup > 0:
        epochs = int(draft.number(f"{TRAINER}update_epochs_per_batch", 1))
        updates = draft.values.get("train.minibatches", 1) * epochs
        in_steps(draft, "train.lr_warmup_steps", warmup, updates, warmup_key)


def _set_critic(draft: Draft) -> None:
    # A loss that is an algorithm of its own (`_loss`) has these advantages too.
    if draft.values.get("train.algorithm", "ppo") != "ppo":
        draft.put("train.advantage", "gae", origin=f"{ALGORITHM}advantage_estimator")
    if "train.critic.lr" not in draft.values:
        draft.put("train.critic.lr", 5e-6, origin="skyrl's default")
    if "train.kl" in draft.values and "train.kl_estimator" not in draft.values:
        draft.put("train.kl_estimator", "k3", origin="skyrl's default")

    groups = draft.number(f"{TRAINER}train_batch_size", 1024)
    minibatch = draft.number(f"{TRAINER}critic_mini_batch_size", 256)
    parts = max(1, round(groups / minibatch)) if minibatch > 0 else 1
    epochs = int(draft.number(f"{TRAINER}update_epochs_per_batch", 1))
    origin = f"{TRAINER}critic_mini_batch_size, {TRAINER}update_epochs_per_batch"
    set_critic(draft, updates=epochs * parts, parts=parts, origin=origin)
    note_clip(draft, f"{ALGORITHM}value_clip", 0.2)


def _set_correction(draft: Draft) -> None:
    """Choose the correction: truncated weights per token, or exclusion of sequences."""
    settings = draft.settings
    metric_key = f"{CORRECTION}sequence_mask_metric"
    metric = settings.get(metric_key)

    if settings.get(f"{CORRECTION}tis_ratio_type") == "token" or draft.isset(f"{ALGORITHM}use_tis"):
        draft.put("train.correction", "tis", origin=f"{CORRECTION}tis_ratio_type")
        cap_key = f"{CORRECTION}token_tis_ratio_clip_high"
        cap = draft.number(cap_key, draft.number(f"{ALGORITHM}tis_imp_ratio_cap", 2.0))
        draft.put("train.correction_high", cap if cap > 0 else 2.0, origin=cap_key)
    elif metric == "geometric":
        draft.put("train.correction", "sequence_mis_mean", origin=metric_key)
        _set_bounds(draft, f"{CORRECTION}geo_mask", lowest=0.99, highest=1.01)
    elif metric == "product":
        draft.put("train.correction", "sequence_mis", origin=metric_key)
        _set_bounds(draft, f"{CORRECTION}product_mask", lowest=0.5, highest=2.0)


def _set_bounds(draft: Draft, mask: str, *, lowest: float, highest: float) -> None:
    """Set the ratios outside of which a sequence is left out; defaults are those of SkyRL."""
    low_key = f"{mask}_low"
    high_key = f"{mask}_high"
    draft.put("train.correction_low", draft.number(low_key, lowest), origin=low_key)
    draft.put("train.correction_high", draft.number(high_key, highest), origin=high_key)


RULES: dict[str, Any] = {
    "data.train_data": train_data,
    "data.val_data": eval_data,
    "environment.env_class": _environment_class,
    "environment.skyrl_gym.max_env_workers": noted,
    f"{GENERATOR}max_turns": "limits.turns",
    f"{GENERATOR}n_samples_per_prompt": "rollout.group_size",
    f"{GENERATOR}max_input_length": "limits.context",
    f"{TRAINER}max_prompt_length": "limits.prompt_tokens",
    f"{GENERATOR}sampling_params.max_generate_length": "limits.turn_tokens",
    f"{GENERATOR}sampling_params.temperature": "rollout.temperature",
    f"{GENERATOR}sampling_params.top_p": "rollout.top_p",
    f"{GENERATOR}sampling_params.top_k": top_k("rollout.top_k"),
    f"{GENERATOR}sampling_params.min_p": "rollout.min_p",
    f"{GENERATOR}sampling_params.stop": lists("rollout.stop"),
    f"{GENERATOR}eval_sampling_params.temperature": temperature_of_eval,
    f"{GENERATOR}eval_sampling_params.top_p": "eval.top_p",
    f"{GENERATOR}eval_sampling_params.top_k": top_k("eval.top_k"),
    f"{GENERATOR}eval_sampling_params.min_p": "eval.min_p",
    f"{GENERATOR}eval_n_samples_per_prompt": "eval.samples",
    f"{GENERATOR}chat_template.name_or_path": _template,
    f"{GENERATOR}chat_template_kwargs": _template_args,
    f"{GENERATOR}use_conversation_multi_turn": _one_message,
    f"{GENERATOR}apply_overlong_filtering": switch("train.overlong_filter"),
    f"{GENERATOR}inference_engine.enable_return_routed_experts": switch(
        "train.routing_replay", "replay"
    ),
    f"{TRAINER}policy.model.path": "model.path",
    f"{TRAINER}policy.model.lora.rank": "lora.rank",
    f"{TRAINER}policy.model.lora.alpha": "lora.alpha",
    f"{TRAINER}policy.model.lora.dropout": "lora.dropout",
    f"{TRAINER}policy.model.lora.target_modules": linear_layers,
    f"{TRAINER}policy.optimizer_config.lr": "train.lr",
    f"{TRAINER}policy.optimizer_config.adam_betas": "train.betas",
    f"{TRAINER}policy.optimizer_config.weight_decay": "train.weight_decay",
    f"{TRAINER}policy.optimizer_config.max_grad_norm": "train.max_grad_norm",
    f"{TRAINER}policy.optimizer_config.num_warmup_steps": noted,
    f"{TRAINER}policy.optimizer_config.scheduler": same(
        "train.schedule",
        constant="constant",
        constant_with_warmup="constant",
        linear="linear",
        cosine="cosine",
    ),
    f"{TRAINER}train_batch_size": "rollout.groups",
    f"{TRAINER}policy_mini_batch_size": noted,
    f"{TRAINER}update_epochs_per_batch": "train.epochs",
    f"{TRAINER}max_training_steps": unless_off("train.steps"),
    f"{TRAINER}epochs": noted,
    f"{TRAINER}eval_interval": _eval_every,
    f"{TRAINER}ckpt_interval": unless_off("checkpoint.every"),
    f"{TRAINER}max_ckpts_to_keep": unless_off("checkpoint.keep"),
    f"{TRAINER}ckpt_path": "out",
    f"{TRAINER}seed": "seed",
    f"{TRAINER}gradient_checkpointing": "train.gradient_checkpointing",
    f"{TRAINER}max_tokens_per_microbatch": unless_off("train.micro_tokens"),
    f"{TRAINER}logger": trackers,
    f"{TRAINER}project_name": "track.project",
    f"{TRAINER}run_name": "track.name",
    f"{TRAINER}update_ref_every_epoch": noted,
    f"{TRAINER}fully_async.enabled": noted,
    f"{TRAINER}fully_async.max_staleness_steps": noted,
    f"{ALGORITHM}advantage_estimator": _estimator,
    f"{ALGORITHM}policy_loss_type": _loss,
    f"{ALGORITHM}use_kl_loss": noted,
    f"{ALGORITHM}use_kl_in_reward": noted,
    f"{ALGORITHM}kl_loss_coef": noted,
    f"{ALGORITHM}kl_estimator_type": same(
        "train.kl_estimator", k1="k1", k2="k2", k3="k3", abs="k1"
    ),
    f"{ALGORITHM}use_entropy_loss": noted,
    f"{ALGORITHM}entropy_loss_coef": noted,
    f"{ALGORITHM}gamma": _discount,
    f"{ALGORITHM}eps_clip_low": "train.clip_low",
    f"{ALGORITHM}eps_clip_high": "train.clip_high",
    f"{ALGORITHM}clip_ratio_c": noted,
    f"{ALGORITHM}loss_reduction": same(
        "train.aggregation",
        token_mean="token",
        token_mean_legacy="token",
        sequence_mean="trajectory",
        seq_mean_token_sum_norm="fixed",
    ),
    f"{ALGORITHM}max_seq_len": unless_off("train.fixed_length"),
    f"{ALGORITHM}grpo_norm_by_std": noted,
    f"{ALGORITHM}dynamic_sampling.type": same("train.refill", none=0, filter=3, replace=3),
    f"{ALGORITHM}use_tis": noted,
    f"{ALGORITHM}tis_imp_ratio_cap": noted,
    f"{CORRECTION}tis_ratio_type": _ratio_type,
    f"{CORRECTION}token_tis_ratio_clip_high": noted,
    f"{CORRECTION}sequence_mask_metric": noted,
    f"{CORRECTION}geo_mask_high": noted,
    f"{CORRECTION}geo_mask_low": noted,
    f"{CORRECTION}product_mask_high": noted,
    f"{CORRECTION}product_mask_low": noted,
    f"{ALGORITHM}zero_variance_filter": _zero_variance,
    **critic_rules(
        _has_critic,
        {
            f"{ALGORITHM}lambd": unless_off("train.token_lambda", (1,)),
            f"{ALGORITHM}value_clip": (CLIP, ()),
            f"{TRAINER}critic_mini_batch_size": noted,
            f"{CRITIC}optimizer_config.lr": "train.critic.lr",
            f"{CRITIC}optimizer_config.max_grad_norm": "train.critic.max_grad_norm",
            f"{CRITIC}optimizer_config.weight_decay": as_policy(
                f"{TRAINER}policy.optimizer_config.weight_decay", 0.01, "train.weight_decay"
            ),
            f"{CRITIC}optimizer_config.adam_betas": as_policy(
                f"{TRAINER}policy.optimizer_config.adam_betas", [0.9, 0.999], "train.betas"
            ),
            f"{CRITIC}optimizer_config.num_warmup_steps": (CONSTANT, (0, None)),
            f"{CRITIC}optimizer_config.scheduler": (
                CONSTANT,
                ("constant", "constant_with_warmup", None),
            ),
            f"{CRITIC}model.path": begins_as_policy(f"{TRAINER}policy.model.path"),
            f"{CRITIC}model.lora.rank": as_policy(
                f"{TRAINER}policy.model.lora.rank", 0, "lora.rank"
            ),
            f"{CRITIC}model.lora.alpha": as_policy(
                f"{TRAINER}policy.model.lora.alpha", 16, "lora.alpha"
            ),
        },
    ),
}

_EVAL = "evaluations have the limits and stop texts of training episodes"
NONE: dict[str, tuple[str, tuple[Any, ...]]] = {
    f"{GENERATOR}batched": (
        "every reply is a call of its own, batched by the engine",
        (False, True),
    ),
    f"{GENERATOR}append_eos_token_after_stop_str_in_multi_turn": (
        "the template closes a reply; the token is not trained",
        (True,),
    ),
    f"{GENERATOR}zero_reward_on_non_stop": (
        "write it into the reward: env sees why a reply ended",
        (False,),
    ),
    f"{GENERATOR}miniswe_config_path": (
        "a setting of a generator of the user's: give it in [env.args]",
        (),
    ),
    f"{GENERATOR}miniswe_traj_dir": (
        "a setting of a generator of the user's: give it in [env.args]",
        (),
    ),
    f"{GENERATOR}step_wise_trajectories": (
        "branches are rows of one trajectory; see rollout.history",
        (False,),
    ),
    f"{GENERATOR}merge_stepwise_output": (
        "shared prefixes are merged without a key (train.batching)",
        (False, True),
    ),
    f"{GENERATOR}vision_language_generator": ("one loop for text and images", (False, True)),
    f"{GENERATOR}enable_child_agents": (
        "agents of its own generator; see [[env]] and play functions",
        (False,),
    ),
    f"{GENERATOR}train_child_trajectories": (
        "what an agent sampled is trained, see train.loss_scale",
        (True,),
    ),
    f"{GENERATOR}use_cache_salt": ("see engine.in_flight", (True,)),
    f"{GENERATOR}chat_template.source": ("model.template takes names and files", ("name", "file")),
    f"{GENERATOR}sampling_params.repetition_penalty": (
        "no penalties: they would not be part of the trained distribution",
        (1, 1.0),
    ),
    f"{GENERATOR}eval_sampling_params.repetition_penalty": ("no penalties", (1, 1.0)),
    f"{GENERATOR}sampling_params.logprobs": ("logprobs of sampled ids are always returned", ()),
    f"{GENERATOR}sampling_params.additional_kwargs": ("no free sampling settings", (None,)),
    f"{GENERATOR}eval_sampling_params.stop": (_EVAL, ()),
    f"{GENERATOR}eval_sampling_params.max_generate_length": (_EVAL, ()),
    f"{GENERATOR}eval_sampling_params": ("set eval.temperature, eval.top_p, eval.top_k", (None,)),
    f"{ALGORITHM}advantage_batch_normalize": ('see train.advantage = "batch"', (False,)),
    f"{ALGORITHM}zero_variance_filter_tol": ("rounding is allowed for", ()),
    f"{ALGORITHM}kl_ctrl.type": ("the weight of the KL term is constant", ("fixed",)),
    f"{ALGORITHM}kl_ctrl.kl_target": ("the weight of the KL term is constant", ()),
    f"{ALGORITHM}kl_ctrl.horizon": ("the weight of the KL term is constant", ()),
    f"{ALGORITHM}temperature": ("logprobs have the temperature of sampling", (None,)),
    f"{ALGORITHM}dynamic_sampling.max_sample_batches": ("train.refill is the number of rounds", ()),
    f"{ALGORITHM}dynamic_sampling.min_replace_ratio": (
        "train.refill replaces as many groups as it can",
        (),
    ),
    f"{CORRECTION}outlier_token_is_threshold_low": ('see train.correction = "icepop"', (None,)),
    f"{CORRECTION}outlier_token_is_threshold_high": ('see train.correction = "icepop"', (None,)),
    f"{CORRECTION}token_mask_is_threshold_low": ('see train.correction = "icepop"', (None,)),
    f"{CORRECTION}token_mask_is_threshold_high": ('see train.correction = "icepop"', (None,)),
    f"{CORRECTION}sequence_tis_ratio_clip_high": ("see train.correction = sequence_mis", ()),
    f"{TRAINER}eval_before_train": ("the policy is always evaluated before reinforcement", (True,)),
    f"{TRAINER}eval_batch_size": ("evaluations are not split into batches", ()),
    f"{TRAINER}resume_mode": ("a run continues with --resume", ("latest", None, "none")),
    f"{TRAINER}fully_async.num_parallel_generation_workers": ("see [schedule]", ()),
    f"{GENERATOR}rate_limit.enabled": ("see rollout.concurrency", (False,)),
    f"{GENERATOR}rate_limit.trajectories_per_second": ("see rollout.concurrency", ()),
    f"{GENERATOR}rate_limit.max_concurrency": ("see rollout.concurrency", ()),
    f"{ALGORITHM}overlong_buffer_len": ("see train.overlong_tokens", ()),
    f"{ALGORITHM}overlong_buffer_penalty_factor": ("see train.overlong_tokens", ()),
    f"{TRAINER}tags": ("see [track]", ()),
    f"{TRAINER}use_sample_packing": ("rows are always packed (train.batching)", (True,)),
}


MACHINE = (
    # Placement, parallelism and memory.
    f"{TRAINER}placement.*",
    f"{TRAINER}strategy",
    f"{TRAINER}*fsdp_config*",
    f"{TRAINER}*megatron_config*",
    f"{TRAINER}micro_*",
    f"{TRAINER}*sequence_parallel*",
    f"{TRAINER}*num_gpus*",
    f"{TRAINER}policy.optimizer_config.offload*",
    f"{TRAINER}gradient_checkpointing_use_*",
    f"{TRAINER}use_expandable_segments",
    f"{TRAINER}remove_microbatch_padding",
    # The model: kernels, and adapters as they are stored.
    f"{TRAINER}flash_attn",
    f"{TRAINER}policy.model_config_kwargs*",
    f"{TRAINER}policy.use_torch_compile",
    f"{TRAINER}policy.language_model_only",
    f"{TRAINER}policy.inference_only_init",
    f"{TRAINER}policy.model.fake_int4*",
    f"{TRAINER}policy.model.lora.*",
    f"{TRAINER}target_modules",
    f"{TRAINER}rope_*",
    f"{TRAINER}mtp.*",
    f"{TRAINER}disable_fast_tokenizer",
    # What is left of the critic, and the reference.
    f"{TRAINER}critic.*",
    f"{TRAINER}critic_*",
    f"{TRAINER}ref.*",
    f"{ALGORITHM}value_head_prefix",
    # Engines, workers and the loading of rows.
    f"{GENERATOR}inference_engine.*",
    f"{TRAINER}fully_async.*",
    "data.dataloader.*",
    # Checkpoints, logs and profiles.
    f"{TRAINER}hf_save_interval",
    f"{TRAINER}export_path",
    f"{TRAINER}resume_path",
    f"{TRAINER}log_path",
    f"{TRAINER}dump_*",
    f"{TRAINER}policy.record_memory",
    f"{TRAINER}policy.torch_profiler*",
    f"{TRAINER}*torch_profiler*",
    "hydra.*",
)


SYSTEM = System(
    name="skyrl",
    rules=RULES,
    none=NONE,
    machine=MACHINE,
    defaults={
        "env.use": USE.format("gsm8k"),
        "rollout.groups": 1024,
        "rollout.group_size": 5,
        "limits.turns": 1,
        "limits.turn_tokens": 1024,
        "limits.prompt_tokens": 512,
        "train.clip_low": 0.2,
        "train.clip_high": 0.2,
        "train.lr": 1e-6,
        "train.schedule": "constant",
        "train.weight_decay": 0.01,
        "train.betas": [0.9, 0.999],
        "train.max_grad_norm": 1.0,
        "train.gradient_checkpointing": True,
        "seed": 42,
    },
    finish=_finish,
    hydra=True,
    programs=(
        r"^skyrl(_train|\.train)?\.entrypoints\.main_base$|^skyrl$"
        r"|entrypoints/main_base\.py$|^skyrl(_train|\.train)?\.main$"
    ),
    refused={
        r"(^|\.)main_sft|\.sft\b": "trains on given replies (see [warmup] dataset)",
        r"^skyrl[\w.]*\.(main_generate|serve)$|^skyrl\.tinker": "trains nothing",
    },
    patterns=(
        ("environment.skyrl_gym.*.*", _environment_setting),
        (f"{GENERATOR}chat_template_kwargs.*", template_argument),
    ),
)
