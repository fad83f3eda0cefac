"""TRL: the arguments of `GRPOTrainer` and `GRPOConfig` in a script, or the flags of a script that
has one, and what a recipe has in their place.

`RULES` has a recipe key or a rule for each argument with a meaning here, `NONE` the reason for
each one without, and `MACHINE` those of machines, memory and logging. `_finish` decides what
several arguments decide together: batches, numbers of steps, the correction, the environment.

Nothing here reads a script or writes a recipe: `convert.engine.convert_source` applies the table.
"""

from __future__ import annotations

from typing import Any

from turnwright.errors import ConfigError
from turnwright_compat.convert.engine import (
    Draft,
    Rule,
    System,
    argument,
    in_steps,
    linear_layers,
    list_argument,
    lists,
    noted,
    same,
    switch,
    template_arguments,
    top_k,
    trackers,
    unless_off,
)
from turnwright_compat.convert.grpo_config import (
    CORRECTIONS,
    loss_type,
    set_batch,
    sync_ref_model,
)

TRAINERS = {"GRPOTrainer": None, "RLOOTrainer": "rloo", "AsyncGRPOTrainer": None}
"""Trainers that are converted, with the algorithm that is theirs."""
OPTIMIZER_STEPS = (
    ("max_steps", "train.steps"),
    ("save_steps", "checkpoint.every"),
    ("eval_steps", "eval.every"),
    ("warmup_steps", "train.lr_warmup_steps"),
)
"""Arguments that count optimizer steps, and the recipe keys that count steps."""


# Rules of one argument


def _text(key: str) -> Rule:
    """Return a rule: the value as text."""

    def rule(draft: Draft, value: Any) -> None:
        draft.put(key, str(value))

    return rule


def _top_k(draft: Draft, value: Any) -> str | None:
    if value is None:
        return None
    return top_k("rollout.top_k")(draft, value)


# Rules over several arguments


def _finish(draft: Draft) -> None:
    # The recipe's keys stand in the order in which they are put here.
    _set_trainer(draft)
    updates = _set_batch(draft) * int(draft.number("num_iterations", 1))
    _set_steps(draft, updates)

    # The limit of a completion is that of an episode too: tool results use it up.
    length = int(draft.number("max_completion_length", 512))
    draft.put("limits.turn_tokens", length, origin="max_completion_length")
    draft.put("limits.episode_tokens", length, origin="max_completion_length")

    if draft.settings.get("epsilon_high") is None:
        draft.put("train.clip_high", draft.number("epsilon", 0.2), origin="epsilon")
    betas = [draft.number("adam_beta1", 0.9), draft.number("adam_beta2", 0.999)]
    draft.put("train.betas", betas, origin="adam_beta1, adam_beta2")
    _set_loss_terms(draft)

    _set_correction(draft)
    _set_environment(draft)
    _set_adapter(draft)


def _set_trainer(draft: Draft) -> None:
    """Take what the class of the trainer decides; refuse a trainer of another kind."""
    trainer = str(draft.settings.get("$program", ""))
    if trainer == "PPOTrainer":
        raise ConfigError(
            "PPOTrainer trains by the scores of a reward model, which is not here; write the "
            'reward into an environment, with train.algorithm = "ppo" (docs/training.md)'
        )
    if trainer.endswith("Trainer") and trainer not in TRAINERS:
        raise ConfigError(
            f"{trainer} trains in another way; only {', '.join(TRAINERS)} become recipes"
        )

    algorithm = TRAINERS.get(trainer)
    if algorithm is not None:
        draft.put("train.algorithm", algorithm, origin=trainer)
    if trainer == "AsyncGRPOTrainer":
        draft.put("schedule.mode", "async", origin=trainer)


def _set_batch(draft: Draft) -> int:
    """Set the prompts of a step; return the optimizer steps that one step has."""
    group = draft.number("num_generations", 8)
    accumulation = draft.number("gradient_accumulation_steps", 1)
    device_batch = draft.number("per_device_train_batch_size", 8)
    processes = draft.number("$num_processes", 1)
    micro_steps = draft.number("steps_per_generation", accumulation)

    origin = "per_device_train_batch_size, gradient_accumulation_steps, steps_per_generation"
    completions = device_batch * processes * micro_steps
    if draft.settings.get("generation_batch_size") is not None:
        origin = f"generation_batch_size, {origin}"
        completions = draft.number("generation_batch_size", completions)
        micro_steps = completions / max(1.0, device_batch * processes)

    if "$num_processes" not in draft.settings:
        draft.notes.append("the number of processes is not known: rollout.groups is for one")
    return set_batch(draft, completions, group, micro_steps / accumulation, origin=origin)


def _set_steps(draft: Draft, updates: int) -> None:
    """Set the numbers of steps, which count optimizer steps there, `updates` in a step; without
    one, the epochs of the data."""
    counters = list(OPTIMIZER_STEPS)
    if draft.isset("sync_ref_model"):
        counters.append(("ref_model_sync_steps", "train.reference_every"))
    for name, key in counters:
        count = draft.number(name, 0)
        if count >= 1:
            in_steps(draft, key, count, updates, name)

    if draft.number("max_steps", 0) <= 0:
        epochs = draft.number("num_train_epochs", 3)
        draft.put("train.data_epochs", epochs, origin="num_train_epochs")

    warmup_share = draft.number("warmup_ratio", 0)
    if not 0 < warmup_share < 1:
        return
    if "train.steps" in draft.values:
        warmup_steps = int(warmup_share * draft.values["train.steps"])
        draft.put("train.lr_warmup_steps", warmup_steps, origin="warmup_ratio")
    else:
        draft.reasons["warmup_ratio"] = (
            "the number of steps is known when the tasks are: set train.lr_warmup_steps"
        )


def _set_loss_terms(draft: Draft) -> None:
    kl_weight = draft.number("beta", 0)
    if kl_weight > 0:
        draft.put("train.kl", kl_weight, origin="beta")
        draft.put("train.kl_in", "loss", origin="beta")
    if draft.settings.get("importance_sampling_level") in ("sequence", "sequence_token"):
        draft.put("train.algorithm", "gspo", origin="importance_sampling_level")


def _set_correction(draft: Draft) -> None:
    """Correct vLLM's probabilities unless that is switched off: by default, TRL leaves out
    sequences over a ratio."""
    settings = draft.settings
    is_off = settings.get("vllm_importance_sampling_correction") is False
    if not draft.isset("use_vllm") or is_off:
        return

    mode = settings.get("vllm_importance_sampling_mode", "sequence_mask")
    if mode not in CORRECTIONS:
        draft.reasons["vllm_importance_sampling_mode"] = (
            "no such correction here; see train.correction"
        )
        return

    mode_origin = "use_vllm, vllm_importance_sampling_mode"
    draft.put("train.correction", CORRECTIONS[mode], origin=mode_origin)
    cap = draft.number("vllm_importance_sampling_cap", 3.0)
    highest = draft.number("vllm_importance_sampling_clip_max", cap)
    bound_origin = "vllm_importance_sampling_clip_max, vllm_importance_sampling_cap"
    draft.put("train.correction_high", highest, origin=bound_origin)


def _set_environment(draft: Draft) -> None:
    """Play TRL's own loop where the script has rewards or tools and no environment; a rollout
    function of the user has to be written again."""
    if "rollout_func" in draft.settings:
        loop = draft.settings["rollout_func"]
        draft.incomplete.append(
            f"rollout_func = {loop} is a loop of its own: write it as a play function "
            "(docs/environments.md)"
        )
        draft.values.pop("env.use", None)
        return

    has_arguments = any(key.startswith("env.args.") for key in draft.values)
    lacks_objects = any(
        clause.startswith(("environment_factory:", "tools:")) for clause in draft.incomplete
    )
    needs_loop = has_arguments and "env.use" not in draft.values
    if needs_loop and draft.base_known and not lacks_objects:
        draft.put("env.use", "trl:GRPOTrainer", origin="reward_funcs, tools")


def _set_adapter(draft: Draft) -> None:
    """Set the adapter of a `LoraConfig`, or of the flags of a script."""
    if not draft.isset("use_peft"):
        for key in ("alpha", "dropout", "targets", "rank"):
            draft.values.pop(f"lora.{key}", None)
        return

    rank = int(draft.number("lora.r", draft.number("lora_r", 8)))
    draft.put("lora.rank", rank, origin="lora.r, lora_r")
    alpha = draft.number("lora.lora_alpha", draft.number("lora_alpha", 8))
    draft.put("lora.alpha", alpha, origin="lora.lora_alpha")


RULES: dict[str, Any] = {
    # Model and data.
    "model": "model.path",
    "model_name_or_path": "model.path",
    "model_revision": "model.revision",
    "train_dataset": _text("env.tasks"),
    "eval_dataset": _text("env.eval_tasks"),
    "dataset_name": _text("env.tasks"),
    # Environment and rewards.
    "environment_factory": _text("env.use"),
    "tools": list_argument("tools"),
    "reward_funcs": list_argument("reward_funcs"),
    "reward_weights": list_argument("reward_weights"),
    "rollout_func": noted,
    "max_tool_calling_iterations": argument("max_tool_calling_iterations"),
    "chat_template_kwargs": template_arguments,
    # Batches.
    "num_generations": "rollout.group_size",
    "num_generations_eval": unless_off("eval.samples", (None,)),
    "per_device_train_batch_size": noted,
    "gradient_accumulation_steps": noted,
    "steps_per_generation": noted,
    "generation_batch_size": noted,
    # Limits and sampling.
    "max_completion_length": noted,
    "max_prompt_length": unless_off("limits.prompt_tokens"),
    "vllm_max_model_length": unless_off("limits.context"),
    "temperature": "rollout.temperature",
    "top_p": unless_off("rollout.top_p", (None,)),
    "top_k": _top_k,
    "min_p": unless_off("rollout.min_p", (None,)),
    # Credit and loss.
    "beta": noted,
    "num_iterations": "train.epochs",
    "epsilon": "train.clip_low",
    "epsilon_high": unless_off("train.clip_high", (None,)),
    "delta": unless_off("train.clip_cap"),
    "importance_sampling_level": noted,
    "scale_rewards": same(
        "train.advantage", group="std", none="mean", batch="group_batch", true="std", false="mean"
    ),
    "loss_type": loss_type,
    "entropy_coef": "train.entropy",
    "mask_truncated_completions": switch("train.overlong_filter"),
    "sync_ref_model": sync_ref_model,
    "ref_model_mixup_alpha": noted,
    "ref_model_sync_steps": noted,
    # Probabilities of the engine, and the schedule.
    "use_vllm": noted,
    "vllm_importance_sampling_correction": noted,
    "vllm_importance_sampling_mode": noted,
    "vllm_importance_sampling_cap": noted,
    "vllm_importance_sampling_clip_max": noted,
    "max_staleness": unless_off("schedule.staleness", (None,)),
    # Optimizer.
    "learning_rate": "train.lr",
    "lr_scheduler_type": same(
        "train.schedule",
        linear="linear",
        cosine="cosine",
        constant="constant",
        constant_with_warmup="constant",
    ),
    "warmup_steps": noted,
    "warmup_ratio": noted,
    "weight_decay": "train.weight_decay",
    "adam_beta1": noted,
    "adam_beta2": noted,
    "adam_epsilon": "train.eps",
    "max_grad_norm": "train.max_grad_norm",
    # Numbers of steps, and checkpoints.
    "num_train_epochs": noted,
    "max_steps": noted,
    "output_dir": unless_off("out", (None,)),
    "save_steps": noted,
    "save_total_limit": unless_off("checkpoint.keep", (None,)),
    "eval_steps": noted,
    # Seed, memory and trackers.
    "seed": "seed",
    "gradient_checkpointing": "train.gradient_checkpointing",
    "report_to": trackers,
    "run_name": unless_off("track.name", (None,)),
    "project": unless_off("track.project", (None,)),
    # Adapter.
    "use_peft": noted,
    "lora.r": noted,
    "lora.lora_alpha": noted,
    "lora.lora_dropout": "lora.dropout",
    "lora.target_modules": linear_layers,
    "lora_r": noted,
    "lora_alpha": noted,
    "lora_dropout": "lora.dropout",
    "lora_target_modules": lists("lora.targets"),
}

_OWN_LOSS = "write your own (train.algorithm)"
NONE: dict[str, tuple[str, tuple[Any, ...]]] = {
    "processing_class": ("the tokenizer and the processor are those of the model directory", ()),
    "callbacks": ("see the viewer and [track]", ()),
    "optimizers": ("AdamW is the optimizer", ()),
    "reward_processing_classes": ("call the reward model in a reward function", (None,)),
    "dataset_config": ("all rows are used", (None,)),
    "dataset_train_split": ("all rows are used", ("train",)),
    "repetition_penalty": (
        "no penalties: they would not be part of the trained distribution",
        (1, 1.0),
    ),
    "generation_kwargs": ("no free sampling settings", (None, {})),
    "shuffle_dataset": ("tasks are always shuffled, by the seed", (True,)),
    "data_seed": ("one seed for all", ()),
    "trust_remote_code": ("no code of model directories is run", (False,)),
    "chat_template_path": ("see model.template", (None,)),
    "multi_objective_aggregation": ("rewards are summed by their weights", ("sum_then_normalize",)),
    "top_entropy_quantile": ("see train.loss_scale for weights of tokens", (1, 1.0)),
    "use_adaptive_entropy": ("the weight of the entropy is constant", (False,)),
    "off_policy_mask_threshold": ("see train.correction = sequence_mis_mean", (None,)),
    "use_bias_correction_kl": (
        "see train.kl_estimator = k2, whose gradient is that of the KL",
        (False,),
    ),
    "vllm_importance_sampling_clip_min": ("see train.correction_low", (None,)),
    "vllm_structured_outputs_regex": ("no constrained sampling", (None,)),
    "disable_dropout": ("no dropout: the trained policy equals the sampled one", (True, False)),
    "router_aux_loss_coef": ("no auxiliary loss of the router", (0, 0.0)),
    "sapo_temperature_neg": (_OWN_LOSS, ()),
    "sapo_temperature_pos": (_OWN_LOSS, ()),
    "resume_from_checkpoint": ("a run continues with --resume", (None, False)),
    "optim": ("AdamW is the optimizer", ("adamw_torch", "adamw_torch_fused")),
    "lr_scheduler_kwargs": ("the rate decays to 0", (None, {})),
    "max_inflight_tasks": ("see rollout.concurrency", ()),
    "rollout_worker": ("write its loop as a play function", ()),
    "rollout_reward_fn": ("write it as the reward of a play function", ()),
}

MACHINE = (
    # Engines and the sending of weights.
    "vllm_*",
    "weight_sync_steps",
    "use_transformers_*",
    "cache_implementation",
    # Placement and parallelism.
    "ddp_*",
    "deepspeed",
    "ds3_*",
    "fsdp*",
    "accelerator_config",
    "local_rank",
    "average_tokens_across_devices",
    "use_cpu",
    "no_cuda",
    # Memory, precision and kernels.
    "bf16",
    "fp16",
    "tf32",
    "dtype",
    "torch_dtype",
    "torch_*",
    "attn_implementation",
    "use_liger*",
    "cast_lm_head_to_fp32",
    "gradient_checkpointing_kwargs",
    "full_determinism",
    # Loading of the model and of rows.
    "model_init_kwargs",
    "quantization_config",
    "load_in_*",
    "use_bnb*",
    "bnb_*",
    "dataloader_*",
    "pad_to_multiple_of",
    "per_device_eval_batch_size",
    "remove_unused_columns",
    "ignore_data_skip",
    # Adapters, as peft takes them.
    "lora.task_type",
    "lora.bias",
    "lora.inference_mode",
    "lora_task_type",
    # Checkpoints and evaluations.
    "save_strategy",
    "save_only_model",
    "eval_strategy",
    "eval_on_start",
    "load_best_model_at_end",
    "metric_for_best_model",
    "greater_is_better",
    "overwrite_output_dir",
    "do_train",
    "do_eval",
    "push_to_hub",
    "hub_*",
    # Logs and trackers.
    "logging_*",
    "log_*",
    "num_completions_to_print",
    "trackio_*",
    "disable_tqdm",
    "include_*",
    "transformers_*",
    "config",
)

SYSTEM = System(
    name="trl",
    rules=RULES,
    none=NONE,
    machine=MACHINE,
    defaults={
        "rollout.group_size": 8,
        "train.algorithm": "grpo",
        "train.aggregation": "token",
        "train.clip_low": 0.2,
        "train.lr": 1e-6,
        "train.schedule": "linear",
        "train.weight_decay": 0.0,
        "train.max_grad_norm": 1.0,
        "train.gradient_checkpointing": True,
        "seed": 42,
    },
    finish=_finish,
    programs=r"Trainer$",
    normalize=lambda key: key.lstrip("-").replace("-", "_"),
)
