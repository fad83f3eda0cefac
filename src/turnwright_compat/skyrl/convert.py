"""SkyRL: overrides of `skyrl.train.entrypoints.main_base`."""

from __future__ import annotations

import ast
import re
from typing import Any

from turnwright.errors import ConfigError
from turnwright_compat.convert.engine import (
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
A, G, T, OC = (
    "trainer.algorithm.",
    "generator.",
    "trainer.",
    "trainer.algorithm.off_policy_correction.",
)


def _template(draft: Draft, value: Any) -> str | None:
    if value is None:
        return None
    draft.put("model.template", value)
    draft.put("rollout.history", "template")  # such a template is rendered again every turn
    return None


def _template_args(draft: Draft, value: Any) -> str | None:
    if not isinstance(value, dict):
        return "expected a table"
    for name, one in value.items():
        draft.put(f"model.template_args.{name}", one)
    return None


def _one_message(draft: Draft, value: Any) -> None:
    if value is False:
        draft.put("rollout.history", "inline")


def _correction(draft: Draft) -> None:
    """Choose the correction: truncated weights per token, or exclusion of sequences."""
    given = draft.settings
    if given.get(f"{OC}tis_ratio_type") == "token" or draft.isset(f"{A}use_tis"):
        draft.put("train.correction", "tis", origin=f"{OC}tis_ratio_type")
        cap = draft.number(
            f"{OC}token_tis_ratio_clip_high", draft.number(f"{A}tis_imp_ratio_cap", 2.0)
        )
        draft.put(
            "train.correction_high",
            cap if cap > 0 else 2.0,
            origin=f"{OC}token_tis_ratio_clip_high",
        )
    elif given.get(f"{OC}sequence_mask_metric") == "geometric":
        draft.put("train.correction", "sequence_mis_mean", origin=f"{OC}sequence_mask_metric")
        draft.put(
            "train.correction_low",
            draft.number(f"{OC}geo_mask_low", 0.99),
            origin=f"{OC}geo_mask_low",
        )
        draft.put(
            "train.correction_high",
            draft.number(f"{OC}geo_mask_high", 1.01),
            origin=f"{OC}geo_mask_high",
        )
    elif given.get(f"{OC}sequence_mask_metric") == "product":
        draft.put("train.correction", "sequence_mis", origin=f"{OC}sequence_mask_metric")
        draft.put(
            "train.correction_low",
            draft.number(f"{OC}product_mask_low", 0.5),
            origin=f"{OC}product_mask_low",
        )
        draft.put(
            "train.correction_high",
            draft.number(f"{OC}product_mask_high", 2.0),
            origin=f"{OC}product_mask_high",
        )


def _asynchronous(draft: Draft) -> None:
    """Choose the schedule of SkyRL's asynchronous trainers."""
    program = str(draft.settings.get("$program"))
    named = any(key.startswith(f"{T}fully_async.") for key in draft.settings)
    if (
        "fully_async" in program
        or draft.isset(f"{T}fully_async.enabled")
        or (named and "async" in program)
    ):
        origin = f"{T}fully_async.enabled, {T}fully_async.max_staleness_steps"
        draft.put("schedule.mode", "async", origin=origin if named else program)
        if f"{T}fully_async.max_staleness_steps" in draft.settings:
            staleness = int(draft.number(f"{T}fully_async.max_staleness_steps", 4))
            draft.put(
                "schedule.staleness",
                max(1, staleness),
                origin=f"{T}fully_async.max_staleness_steps",
            )
    elif re.search(r"(^|\.)async\.main_async$", program):
        draft.put("schedule.mode", "one_step_off", origin=program)


def _registered(draft: Draft) -> None:
    """Name the class of an environment that the script's own program registers."""
    name, program = draft.settings.get("environment.env_class"), str(draft.settings.get("$program"))
    if name is None or draft.base_known:
        return
    path = find_file(
        program if program.endswith(".py") else program.replace(".", "/") + ".py", draft.folder
    )
    if path is None:
        return
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "register":
            words = {
                one.arg: one.value.value
                for one in node.keywords
                if isinstance(one.value, ast.Constant)
            }
            if words.get("id") == name and isinstance(words.get("entry_point"), str):
                module, _, attribute = str(words["entry_point"]).partition(":")
                draft.put(
                    "env.use",
                    python_name(draft, f"{module}.{attribute}"),
                    origin="environment.env_class",
                )
                draft.notes.append(f"{name} is the class that {path.name} registers")
                return


def _finish(draft: Draft) -> None:
    given = draft.settings
    _asynchronous(draft)
    _registered(draft)
    groups, mini = (
        draft.number(f"{T}train_batch_size", 1024),
        draft.number(f"{T}policy_mini_batch_size", 256),
    )
    minibatches(draft, mini, groups, f"{T}policy_mini_batch_size")
    if given.get(f"{T}max_training_steps") is None:
        draft.put("train.data_epochs", draft.number(f"{T}epochs", 1), origin=f"{T}epochs")
    if given.get(f"{A}use_kl_in_reward") is True:
        draft.put("train.kl", draft.number(f"{A}kl_loss_coef", 0.001), origin=f"{A}kl_loss_coef")
        draft.put("train.kl_in", "reward", origin=f"{A}use_kl_in_reward")
        draft.put("train.kl_estimator", "k1", origin=f"{A}use_kl_in_reward")
    elif given.get(f"{A}use_kl_loss") is not False:
        draft.put("train.kl", draft.number(f"{A}kl_loss_coef", 0.001), origin=f"{A}kl_loss_coef")
        draft.put("train.kl_in", "loss", origin=f"{A}use_kl_loss")
    if draft.isset(f"{A}use_entropy_loss"):
        draft.put(
            "train.entropy",
            draft.number(f"{A}entropy_loss_coef", 0.01),
            origin=f"{A}entropy_loss_coef",
        )
    if given.get(f"{A}policy_loss_type") == "dual_clip":
        draft.put(
            "train.clip_cap", draft.number(f"{A}clip_ratio_c", 3.0), origin=f"{A}clip_ratio_c"
        )
    if (
        given.get(f"{A}grpo_norm_by_std") is False
        and draft.values.get("train.algorithm", "grpo") == "grpo"
    ):
        draft.put("train.advantage", "mean", origin=f"{A}grpo_norm_by_std")
    warmup = f"{T}policy.optimizer_config.num_warmup_steps"
    if draft.number(warmup, 0) > 0:
        updates = draft.values.get("train.minibatches", 1) * int(
            draft.number(f"{T}update_epochs_per_batch", 1)
        )
        in_steps(draft, "train.lr_warmup_steps", draft.number(warmup, 0), updates, warmup)
    if draft.isset(f"{T}update_ref_every_epoch"):
        draft.reasons[f"{T}update_ref_every_epoch"] = (
            "set train.reference_every to the steps of one epoch"
        )
    _correction(draft)
    if not draft.number(f"{T}policy.model.lora.rank", 0):
        for key in ("alpha", "dropout", "targets"):
            draft.values.pop(f"lora.{key}", None)
    if (limit := given.get("environment.skyrl_gym.max_env_workers")) is not None:
        draft.put("rollout.environments", limit, origin="environment.skyrl_gym.max_env_workers")


LOSSES = {"regular": None, "dual_clip": None, "gspo": "gspo", "cispo": "cispo"}


def _loss(draft: Draft, value: Any) -> str | None:
    if value not in LOSSES:
        return "no such loss here; write your own (train.algorithm)"
    if LOSSES[value] is not None:
        draft.put("train.algorithm", LOSSES[value])
    return None


def _estimator(draft: Draft, value: Any) -> str | None:
    if value == "gae":
        raise ConfigError(
            'advantage_estimator = "gae" trains with a critic, which is not here; choose grpo, '
            "rloo or reinforce++"
        )
    names = {"grpo": "grpo", "rloo": "rloo", "reinforce++": "reinforce_pp"}
    if value not in names:
        return "no such estimator here (no critic); write your own (train.advantage)"
    if "train.algorithm" not in draft.values:
        draft.put("train.algorithm", names[value])
    return None


RULES: dict[str, Any] = {
    "data.train_data": train_data,
    "data.val_data": eval_data,
    "environment.env_class": lambda draft, value: draft.put("env.use", USE.format(value)),
    "environment.skyrl_gym.max_env_workers": noted,
    f"{G}max_turns": "limits.turns",
    f"{G}n_samples_per_prompt": "rollout.group_size",
    f"{G}max_input_length": "limits.context",
    f"{T}max_prompt_length": "limits.prompt_tokens",
    f"{G}sampling_params.max_generate_length": "limits.turn_tokens",
    f"{G}sampling_params.temperature": "rollout.temperature",
    f"{G}sampling_params.top_p": "rollout.top_p",
    f"{G}sampling_params.top_k": top_k("rollout.top_k"),
    f"{G}sampling_params.min_p": "rollout.min_p",
    f"{G}sampling_params.stop": lists("rollout.stop"),
    f"{G}eval_sampling_params.temperature": temperature_of_eval,
    f"{G}eval_sampling_params.top_p": "eval.top_p",
    f"{G}eval_sampling_params.top_k": top_k("eval.top_k"),
    f"{G}eval_sampling_params.min_p": "eval.min_p",
    f"{G}eval_n_samples_per_prompt": "eval.samples",
    f"{G}chat_template.name_or_path": _template,
    f"{G}chat_template_kwargs": _template_args,
    f"{G}use_conversation_multi_turn": _one_message,
    f"{G}apply_overlong_filtering": switch("train.overlong_filter"),
    f"{G}inference_engine.enable_return_routed_experts": switch("train.routing_replay", "replay"),
    f"{T}policy.model.path": "model.path",
    f"{T}policy.model.lora.rank": "lora.rank",
    f"{T}policy.model.lora.alpha": "lora.alpha",
    f"{T}policy.model.lora.dropout": "lora.dropout",
    f"{T}policy.model.lora.target_modules": linear_layers,
    f"{T}policy.optimizer_config.lr": "train.lr",
    f"{T}policy.optimizer_config.adam_betas": "train.betas",
    f"{T}policy.optimizer_config.weight_decay": "train.weight_decay",
    f"{T}policy.optimizer_config.max_grad_norm": "train.max_grad_norm",
    f"{T}policy.optimizer_config.num_warmup_steps": noted,
    f"{T}policy.optimizer_config.scheduler": same(
        "train.schedule",
        constant="constant",
        constant_with_warmup="constant",
        linear="linear",
        cosine="cosine",
    ),
    f"{T}train_batch_size": "rollout.groups",
    f"{T}policy_mini_batch_size": noted,
    f"{T}update_epochs_per_batch": "train.epochs",
    f"{T}max_training_steps": unless_off("train.steps"),
    f"{T}epochs": noted,
    f"{T}eval_interval": lambda draft, value: draft.put("eval.every", max(0, int(value))),
    f"{T}ckpt_interval": unless_off("checkpoint.every"),
    f"{T}max_ckpts_to_keep": unless_off("checkpoint.keep"),
    f"{T}ckpt_path": "out",
    f"{T}seed": "seed",
    f"{T}gradient_checkpointing": "train.gradient_checkpointing",
    f"{T}max_tokens_per_microbatch": unless_off("train.micro_tokens"),
    f"{T}logger": trackers,
    f"{T}project_name": "track.project",
    f"{T}run_name": "track.name",
    f"{T}update_ref_every_epoch": noted,
    f"{T}fully_async.enabled": noted,
    f"{T}fully_async.max_staleness_steps": noted,
    f"{A}advantage_estimator": _estimator,
    f"{A}policy_loss_type": _loss,
    f"{A}use_kl_loss": noted,
    f"{A}use_kl_in_reward": noted,
    f"{A}kl_loss_coef": noted,
    f"{A}kl_estimator_type": same("train.kl_estimator", k1="k1", k2="k2", k3="k3", abs="k1"),
    f"{A}use_entropy_loss": noted,
    f"{A}entropy_loss_coef": noted,
    f"{A}gamma": lambda draft, value: draft.put("train.discount", value) if value != 1 else None,
    f"{A}eps_clip_low": "train.clip_low",
    f"{A}eps_clip_high": "train.clip_high",
    f"{A}clip_ratio_c": noted,
    f"{A}loss_reduction": same(
        "train.aggregation",
        token_mean="token",
        token_mean_legacy="token",
        sequence_mean="trajectory",
        seq_mean_token_sum_norm="fixed",
    ),
    f"{A}max_seq_len": unless_off("train.fixed_length"),
    f"{A}grpo_norm_by_std": noted,
    f"{A}dynamic_sampling.type": same("train.refill", none=0, filter=3, replace=3),
    f"{A}use_tis": noted,
    f"{A}tis_imp_ratio_cap": noted,
    f"{OC}tis_ratio_type": lambda draft, value: (
        None if value in (None, "token") else "weights per sequence: see sequence_mis"
    ),
    f"{OC}token_tis_ratio_clip_high": noted,
    f"{OC}sequence_mask_metric": noted,
    f"{OC}geo_mask_high": noted,
    f"{OC}geo_mask_low": noted,
    f"{OC}product_mask_high": noted,
    f"{OC}product_mask_low": noted,
}

_EVAL = "evaluations have the limits and stop texts of training episodes"
NONE: dict[str, tuple[str, tuple[Any, ...]]] = {
    f"{G}batched": ("every reply is a call of its own, batched by the engine", (False, True)),
    f"{G}append_eos_token_after_stop_str_in_multi_turn": (
        "the template closes a reply; the token is not trained",
        (True,),
    ),
    f"{G}zero_reward_on_non_stop": (
        "write it into the reward: env sees why a reply ended",
        (False,),
    ),
    f"{G}miniswe_config_path": (
        "a setting of a generator of the user's: give it in [env.args]",
        (),
    ),
    f"{G}miniswe_traj_dir": ("a setting of a generator of the user's: give it in [env.args]", ()),
    f"{G}step_wise_trajectories": (
        "branches are rows of one trajectory; see rollout.history",
        (False,),
    ),
    f"{G}merge_stepwise_output": (
        "shared prefixes are merged without a key (train.batching)",
        (False, True),
    ),
    f"{G}vision_language_generator": ("one loop for text and images", (False, True)),
    f"{G}enable_child_agents": (
        "agents of its own generator; see [[env]] and play functions",
        (False,),
    ),
    f"{G}train_child_trajectories": (
        "what an agent sampled is trained, see train.loss_scale",
        (True,),
    ),
    f"{G}use_cache_salt": ("see engine.in_flight", (True,)),
    f"{G}chat_template.source": ("model.template takes names and files", ("name", "file")),
    f"{G}sampling_params.repetition_penalty": (
        "no penalties: they would not be part of the trained distribution",
        (1, 1.0),
    ),
    f"{G}eval_sampling_params.repetition_penalty": ("no penalties", (1, 1.0)),
    f"{G}sampling_params.logprobs": ("logprobs of sampled ids are always returned", ()),
    f"{G}sampling_params.additional_kwargs": ("no free sampling settings", (None,)),
    f"{G}eval_sampling_params.stop": (_EVAL, ()),
    f"{G}eval_sampling_params.max_generate_length": (_EVAL, ()),
    f"{G}eval_sampling_params": ("set eval.temperature, eval.top_p, eval.top_k", (None,)),
    f"{A}advantage_batch_normalize": ('see train.advantage = "batch"', (False,)),
    f"{A}value_clip": ("no critic", ()),
    f"{A}lambd": ("no critic, so no GAE", (1, 1.0)),
    f"{A}zero_variance_filter": (
        "groups without variance carry no loss; train.refill replaces them",
        (False, True),
    ),
    f"{A}zero_variance_filter_tol": ("rounding is allowed for", ()),
    f"{A}kl_ctrl.type": ("the weight of the KL term is constant", ("fixed",)),
    f"{A}kl_ctrl.kl_target": ("the weight of the KL term is constant", ()),
    f"{A}kl_ctrl.horizon": ("the weight of the KL term is constant", ()),
    f"{A}temperature": ("logprobs have the temperature of sampling", (None,)),
    f"{A}dynamic_sampling.max_sample_batches": ("train.refill is the number of rounds", ()),
    f"{A}dynamic_sampling.min_replace_ratio": (
        "train.refill replaces as many groups as it can",
        (),
    ),
    f"{OC}outlier_token_is_threshold_low": ('see train.correction = "icepop"', (None,)),
    f"{OC}outlier_token_is_threshold_high": ('see train.correction = "icepop"', (None,)),
    f"{OC}token_mask_is_threshold_low": ('see train.correction = "icepop"', (None,)),
    f"{OC}token_mask_is_threshold_high": ('see train.correction = "icepop"', (None,)),
    f"{OC}sequence_tis_ratio_clip_high": ("see train.correction = sequence_mis", ()),
    f"{T}eval_before_train": ("the policy is always evaluated before reinforcement", (True,)),
    f"{T}eval_batch_size": ("evaluations are not split into batches", ()),
    f"{T}resume_mode": ("a run continues with --resume", ("latest", None, "none")),
    f"{T}fully_async.num_parallel_generation_workers": ("see [schedule]", ()),
    f"{G}rate_limit.enabled": ("see rollout.concurrency", (False,)),
    f"{G}rate_limit.trajectories_per_second": ("see rollout.concurrency", ()),
    f"{G}rate_limit.max_concurrency": ("see rollout.concurrency", ()),
    f"{A}overlong_buffer_len": ("see train.overlong_tokens", ()),
    f"{A}overlong_buffer_penalty_factor": ("see train.overlong_tokens", ()),
    f"{T}tags": ("see [track]", ()),
    f"{T}use_sample_packing": ("rows are always packed (train.batching)", (True,)),
}


def _environment_setting(draft: Draft, key: str, value: Any) -> str | None:
    """Put a setting of one environment into its arguments; those of the other
    environments have no effect."""
    name, _, setting = key.removeprefix("environment.skyrl_gym.").partition(".")
    if name != draft.settings.get("environment.env_class", "gsm8k"):
        return "no effect: it belongs to another environment"
    draft.put(f"env.args.{setting}", value)
    return None


MACHINE = (
    *(
        f"{T}placement.*",
        f"{T}strategy",
        f"{T}*fsdp_config*",
        f"{T}*megatron_config*",
        f"{T}micro_*",
    ),
    *(
        f"{T}critic.*",
        f"{T}ref.*",
        f"{T}hf_save_interval",
        f"{T}export_path",
        f"{T}log_path",
        f"{T}dump_*",
    ),
    *(f"{T}*sequence_parallel*", f"{T}policy.model_config_kwargs*", f"{T}policy.use_torch_compile"),
    *(
        f"{T}policy.record_memory",
        f"{T}mtp.*",
        f"{T}policy.torch_profiler*",
        f"{T}policy.optimizer_config.offload*",
    ),
    *(f"{T}*torch_profiler*", f"{T}flash_attn", f"{G}inference_engine.*", "data.dataloader.*"),
    *(f"{T}use_expandable_segments", f"{T}remove_microbatch_padding", f"{T}policy.model.lora.*"),
    *(
        f"{T}policy.language_model_only",
        f"{T}fully_async.*",
        f"{T}gradient_checkpointing_use_*",
        f"{T}resume_path",
    ),
    *(
        f"{T}*num_gpus*",
        f"{T}disable_fast_tokenizer",
        f"{T}target_modules",
        "hydra.*",
        f"{T}critic_*",
    ),
    *(
        f"{A}value_head_prefix",
        f"{T}rope_*",
        f"{T}policy.inference_only_init",
        f"{T}policy.model.fake_int4*",
    ),
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
    programs=r"^skyrl(_train|\.train)?\.entrypoints\.main_base$|^skyrl$|entrypoints/main_base\.py$|^skyrl(_train|\.train)?\.main$",
    refused={
        r"(^|\.)main_sft|\.sft\b": "trains on given replies (see [warmup] dataset)",
        r"^skyrl[\w.]*\.(main_generate|serve)$|^skyrl\.tinker": "trains nothing",
    },
    patterns=(
        ("environment.skyrl_gym.*.*", _environment_setting),
        (f"{G}chat_template_kwargs.*", template_argument),
    ),
)
