"""ms-swift: flags and YAML of `swift rlhf`, `swift rollout` and `megatron rlhf`, and what a recipe
has in their place.

`RULES` has a recipe key or a rule for each flag with a meaning here, `NONE` the reason for each
flag without one, and `MACHINE` those of machines, memory and logging. `_finish` decides what
several flags decide together: batches, numbers of steps, the terms of the loss, the teacher.

Nothing here reads a script or writes a recipe: `convert.engine.convert_source` applies the table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turnwright.config.names import url_error
from turnwright.errors import ConfigError
from turnwright_compat.convert.engine import (
    NO_EFFECT,
    Draft,
    Rule,
    System,
    argument,
    eval_data,
    in_steps,
    linear_layers,
    list_argument,
    lists,
    noted,
    router_replay,
    same,
    switch,
    top_k,
    trackers,
    train_data,
    unless_off,
)
from turnwright_compat.convert.grpo_config import (
    CORRECTIONS,
    loss_type,
    set_batch,
    sync_ref_model,
)
from turnwright_compat.convert.sources import find_file

USE = "swift:{}"
"""How a registered scheduler is named (`turnwright_compat`); the user's plugins are settings of
the environment."""
COLUMNS = {
    **dict.fromkeys(("messages", "query", "problem", "prompt", "question"), "prompt"),
    **dict.fromkeys(("solution", "answer", "response"), "answer"),
    "images": "images",
    "videos": "videos",
    "tools": "tools",
    "id": "id",
}
DIVERGENCES = {0.0: "forward", 0.5: "js", 1.0: "reverse"}
"""beta -> the divergence that it is; others lie between."""
REWARD_FLAGS = {
    "soft_overlong": ("soft_max_length", "soft_cache_length"),
    "repetition": ("repetition_n_grams", "repetition_max_penalty"),
    "cosine": (
        "cosine_max_len",
        "cosine_min_len_value_wrong",
        "cosine_max_len_value_wrong",
        "cosine_min_len_value_correct",
        "cosine_max_len_value_correct",
    ),
}
"""Flags that a registered reward reads."""
OPTIMIZER_STEPS = (
    ("max_steps", "train.steps"),
    ("train_iters", "train.steps"),
    ("save_steps", "checkpoint.every"),
    ("eval_steps", "eval.every"),
    ("warmup_steps", "train.lr_warmup_steps"),
    ("lr_warmup_iters", "train.lr_warmup_steps"),
)
"""Flags that count optimizer steps, and the recipe keys that count steps."""


# Rules of one flag


def _plugins(draft: Draft, value: Any) -> None:
    paths = []
    for name in value if isinstance(value, list) else [value]:
        path = find_file(str(name), draft.folder) or Path(str(name))
        paths.append(str(path))
    draft.put("env.args.external_plugins", paths)


def _scheduler(draft: Draft, value: Any) -> None:
    draft.put("env.use", USE.format(value))


def _gym_env(draft: Draft, value: Any) -> None:
    draft.put("env.args.use_gym_env", draft.isset("use_gym_env"))


def _columns(draft: Draft, value: Any) -> str | None:
    if not isinstance(value, dict):
        return 'expected a JSON table, such as {"answer": "solution"}'

    for column, meaning in value.items():
        if meaning in COLUMNS:
            draft.put(f"env.columns.{COLUMNS[meaning]}", str(column))
        else:
            draft.notes.append(f"column {column} keeps its name, it is not renamed to {meaning}")
    return None


def _tuner(draft: Draft, value: Any) -> str | None:
    if value == "lora":
        rank = int(draft.number("lora_rank", 8))
        draft.put("lora.rank", rank, origin="tuner_type, train_type, lora_rank")
    return None if value in ("lora", "full") else "only LoRA and full training"


def _loss(draft: Draft, value: Any) -> str | None:
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    return loss_type(draft, value)


def _loss_scale(draft: Draft, value: Any) -> str | None:
    if value in ("default", "last_round"):
        draft.put("train.loss_scale", value)
        return None
    if str(value).partition("+")[0] == "all":
        return "only replies are trained: set default or last_round"

    # Any other name is one that the user's plugins register.
    draft.put("env.args.loss_scale", value)
    return None


def _reward_flag(reward: str, name: str) -> Rule:
    """Return a rule: a flag of a reward, without effect where the script does not name that
    reward."""

    def rule(draft: Draft, value: Any) -> str | None:
        if reward not in _rewards_of(draft):
            return f"{NO_EFFECT}: reward_funcs does not name {reward}"

        draft.put(f"env.args.{name}", value)
        return None

    return rule


def _rewards_of(draft: Draft) -> list[str]:
    names = draft.settings.get("reward_funcs")
    return [str(name) for name in names] if isinstance(names, list) else [str(names)]


def _steps(draft: Draft, value: Any) -> str | None:
    # `_finish` brings the number into steps; here its form is checked.
    draft.put("train.steps", value)
    return None


# Rules over several flags


def _finish(draft: Draft) -> None:
    # The recipe's keys stand in the order in which they are put here.
    _refuse_other_trainings(draft)
    updates = _set_batch(draft) * int(draft.number("num_iterations", 1))
    _set_steps(draft, updates)
    _set_limits(draft)

    if "epsilon_high" not in draft.settings:
        draft.put("train.clip_high", draft.number("epsilon", 0.2), origin="epsilon")
    betas = [draft.number("adam_beta1", 0.9), draft.number("adam_beta2", 0.95)]
    draft.put("train.betas", betas, origin="adam_beta1, adam_beta2")
    _set_loss_terms(draft)

    _set_teacher(draft)
    if "rollout_importance_sampling_mode" not in draft.settings:
        draft.values.pop("train.correction_high", None)
    _set_adapter(draft)
    _set_environment(draft)


def _refuse_other_trainings(draft: Draft) -> None:
    """Refuse trainings that are no reinforcement; name a type that is left to its default."""
    kind = draft.settings.get("rlhf_type")
    if kind is None:
        if str(draft.settings.get("$program")) == "swift rlhf":
            draft.incomplete.append(
                "rlhf_type is not set, and its default is dpo; the settings are read as those of "
                "grpo"
            )
        return

    if kind == "ppo":
        raise ConfigError(
            "rlhf_type = ppo trains by the scores of a reward model, which is not here; write the "
            'reward into an environment, with train.algorithm = "ppo" (docs/training.md)'
        )
    if kind not in ("grpo", "gkd"):
        raise ConfigError(
            f"rlhf_type = {kind} is a training that no recipe does; only grpo, and gkd from its "
            "own replies"
        )


def _set_batch(draft: Draft) -> int:
    """Set the prompts of a step: completions of all processes and of all optimizer steps of a
    generation, over the group.

    Returns the optimizer steps of one step.
    """
    settings = draft.settings
    distills = settings.get("rlhf_type") == "gkd"
    group = 1 if distills else draft.number("num_generations", 8)
    accumulation = draft.number("gradient_accumulation_steps", 1)
    micro_steps = draft.number("steps_per_generation", accumulation)
    processes = draft.number("$NPROC_PER_NODE", 1) * draft.number("$NNODES", 1)

    if "generation_batch_size" in settings:
        origin = "generation_batch_size, per_device_train_batch_size, gradient_accumulation_steps"
        completions = draft.number("generation_batch_size", 0)
        device_batch = draft.number("per_device_train_batch_size", completions)
        updates = completions / max(1.0, device_batch * processes * accumulation)
    elif "global_batch_size" in settings:
        # Megatron's batch is that of an optimizer step.
        origin = "global_batch_size, steps_per_generation"
        updates = draft.number("steps_per_generation", 1)
        completions = draft.number("global_batch_size", 16) * updates
    elif "per_device_train_batch_size" in settings:
        origin = "per_device_train_batch_size, gradient_accumulation_steps, steps_per_generation"
        completions = draft.number("per_device_train_batch_size", 1) * processes * micro_steps
        updates = micro_steps / accumulation
        if "$NPROC_PER_NODE" not in settings:
            draft.notes.append(
                "the number of processes is not known: rollout.groups is for one (NPROC_PER_NODE)"
            )
    else:
        return 1

    return set_batch(draft, completions, group, updates, origin=origin)


def _set_steps(draft: Draft, updates: int) -> None:
    """Set the numbers of steps, which count optimizer steps there, `updates` in a step; without
    one, the epochs of the data."""
    settings = draft.settings
    max_steps = settings.get("max_steps", settings.get("train_iters"))
    has_steps = isinstance(max_steps, int) and max_steps > 0
    if not has_steps:
        epochs = draft.number("num_train_epochs", 3)
        draft.put("train.data_epochs", epochs, origin="num_train_epochs")

    for name, key in OPTIMIZER_STEPS:
        count = draft.number(name, 0)
        if count >= 1:
            in_steps(draft, key, count, updates, name)
    if draft.isset("sync_ref_model") and draft.number("ref_model_mixup_alpha", 0.6) == 1.0:
        every = draft.number("ref_model_sync_steps", 512)
        in_steps(draft, "train.reference_every", every, updates, "ref_model_sync_steps")

    warmup_share = draft.number("warmup_ratio", draft.number("lr_warmup_fraction", 0))
    if warmup_share and has_steps:
        warmup_steps = int(warmup_share * draft.values["train.steps"])
        draft.put("train.lr_warmup_steps", warmup_steps, origin="warmup_ratio")
    elif warmup_share:
        why = (
            "the number of steps is known when the tasks are: set train.lr_warmup_steps to that "
            "share of them"
        )
        draft.reasons.update({"warmup_ratio": why, "lr_warmup_fraction": why})


def _set_limits(draft: Draft) -> None:
    length = int(draft.number("max_completion_length", 512))
    draft.put("limits.turn_tokens", length, origin="max_completion_length")
    if draft.settings.get("completion_length_limit_scope") == "total":
        draft.put("limits.episode_tokens", length, origin="completion_length_limit_scope")


def _set_loss_terms(draft: Draft) -> None:
    settings = draft.settings
    kl_weight = draft.number("beta", 0.04)
    if kl_weight > 0:
        draft.put("train.kl", kl_weight, origin="beta")
        kl_in = "reward" if draft.isset("kl_in_reward") else "loss"
        draft.put("train.kl_in", kl_in, origin="kl_in_reward")

    if settings.get("importance_sampling_level") in ("sequence", "sequence_token"):
        draft.put("train.algorithm", "gspo", origin="importance_sampling_level")

    if draft.isset("dynamic_sample"):
        rounds = int(draft.number("max_resample_times", 3))
        draft.put("train.refill", rounds, origin="dynamic_sample, max_resample_times")

    # Rewards of the length have the limit of a completion unless their flags name one.
    length = int(draft.number("max_completion_length", 512))
    for reward, name in (("soft_overlong", "soft_max_length"), ("cosine", "cosine_max_len")):
        if name not in settings and reward in _rewards_of(draft):
            draft.put(f"env.args.{name}", length, origin="max_completion_length")


def _set_adapter(draft: Draft) -> None:
    """Set the rank that an adapter has by default; leave out its settings where there is none."""
    settings = draft.settings
    tuner = settings.get("tuner_type", settings.get("train_type", "lora"))
    if tuner == "lora" and "lora.rank" not in draft.values:
        draft.put("lora.rank", int(draft.number("lora_rank", 8)), origin="tuner_type, lora_rank")

    if "lora.rank" not in draft.values:
        for key in ("alpha", "dropout", "targets"):
            draft.values.pop(f"lora.{key}", None)


def _set_environment(draft: Draft) -> None:
    """Name the scheduler that plays where the flags name none."""
    settings = draft.settings
    if draft.isset("use_gym_env") and "env.use" not in draft.values:
        draft.put("env.use", USE.format("gym_scheduler"), origin="use_gym_env")

    # A server has the scheduler, and its own command may stand in another script.
    programs = settings.get("$programs", ())
    is_served_elsewhere = settings.get("vllm_mode") == "server" and "swift rollout" not in programs
    if "env.use" not in draft.values and not is_served_elsewhere:
        draft.put("env.use", USE.format("single_turn"), origin="no multi_turn_scheduler")


# Teachers


def _set_teacher(draft: Draft) -> None:
    """Make the teacher of GKD or of a GRPO with one; refuse what would be another training."""
    settings = draft.settings
    model = settings.get("teacher_model")
    server = settings.get("teacher_model_server")
    distills = settings.get("rlhf_type") == "gkd"
    if server is not None and (wrong := _server_error(server)):
        if distills:
            raise ConfigError(f"teacher_model_server: {wrong}")
        server = None  # left out with that reason, and without a teacher unless it has a path too
    if distills:
        _refuse_distillation(draft)
    elif model is None and server is None:
        return

    if model is not None and model == settings.get("model"):
        raise _own_teacher()
    if server is None:
        draft.teacher["path"] = str(model)
    else:
        draft.teacher["urls"] = [server]
    draft.teacher_settings.update(
        ("teacher_model", "teacher_model_server", "teacher_kl_coef", "lmbda", "gkd_logits_topk")
    )
    if settings.get("teacher_adapters"):
        raise ConfigError(
            "teacher_adapters are merged into the teacher there; merge them first, and set the "
            "path of [[teacher]]"
        )

    if distills:
        _distill(draft, on_server=server is not None)
        return
    draft.teacher["signal"] = "advantage"
    draft.teacher["weight"] = draft.number("teacher_kl_coef", 1.0)
    if not settings.get("reward_funcs") and not draft.isset("use_gym_env"):
        draft.put("train.reward_weight", 0.0, origin="teacher_model")


def _teacher_server(draft: Draft, value: Any) -> str | None:
    wrong = _server_error(value)
    if wrong:
        draft.incomplete.append(f"teacher_model_server: {wrong}")
        return wrong
    return None


def _server_error(server: Any) -> str:
    """Return why a recipe has no such server; empty for a URL."""
    if isinstance(server, str):
        return url_error(server)
    if isinstance(server, (dict, list)):
        return "it names several teachers by tags of rows; write a [[teacher]] for each"
    return f"must be the URL of a server, not {server!r:.60}"


def _own_teacher() -> ConfigError:
    return ConfigError(
        "the policy is its own teacher (OPSD), after a prompt of its rows that the settings do "
        "not name; write [[teacher]] with self = true and hint = file.py:function "
        "(docs/reference/teachers.md)"
    )


def _distill(draft: Draft, *, on_server: bool) -> None:
    """Set GKD's loss: a divergence from the teacher, without rewards and without groups."""
    draft.teacher_settings.update(("rlhf_type", "beta"))
    draft.teacher["signal"] = "loss"
    draft.teacher["divergence"] = DIVERGENCES[draft.number("beta", 0.5)]

    top_ids = draft.number("gkd_logits_topk", 0)
    if top_ids > 0:
        draft.teacher["top"] = int(top_ids)
        draft.incomplete.append(
            f"gkd_logits_topk = {top_ids:g} compares these ids alone, renormalized; here all "
            "others count as one (teacher.top)"
        )
    elif on_server:
        raise ConfigError(
            "a teacher on a server needs gkd_logits_topk: servers do not send the vocabulary"
        )

    draft.put("train.reward_weight", 0.0, origin="rlhf_type")
    draft.put("rollout.group_size", 1, origin="rlhf_type")
    draft.put("train.aggregation", "token", origin="rlhf_type")
    # These are about advantages and ratios; a divergence has neither.
    for key in (
        "train.kl",
        "train.kl_in",
        "train.clip_low",
        "train.clip_high",
        "train.clip_cap",
        "train.advantage",
        "train.refill",
    ):
        draft.values.pop(key, None)
        draft.left_out.add(key)


def _refuse_distillation(draft: Draft) -> None:
    """Refuse a distillation that no recipe does."""
    settings = draft.settings
    plugins = " ".join(str(path) for path in draft.values.get("env.args.external_plugins", ()))
    if draft.isset("seq_kd"):
        raise ConfigError(
            "seq_kd trains on replies of the teacher; only replies of the policy are trained "
            "(lmbda = 1)"
        )

    own_share = draft.number("lmbda", 0.5)
    if own_share != 1.0:
        raise ConfigError(
            f"gkd with lmbda = {own_share:g} trains on given replies too; only replies of the "
            "policy are trained: set lmbda = 1"
        )
    if draft.number("sft_alpha", 0) > 0:
        raise ConfigError(
            "sft_alpha adds a supervised term, which is not here during reinforcement; set it to "
            "0 or see [warmup]"
        )
    if draft.number("beta", 0.5) not in DIVERGENCES:
        raise ConfigError(
            f"beta = {settings['beta']} is a divergence that is not here; choose 0 (forward), 0.5 "
            "(js) or 1 (reverse)"
        )
    if settings.get("teacher_model") is None and settings.get("teacher_model_server") is None:
        raise _own_teacher()
    if _sets_teacher_prompt(draft, plugins):
        raise ConfigError(
            "external_plugins give the teacher a prompt of its own (teacher_prompt); "
            "write [[teacher]] with hint = file.py:function (docs/reference/teachers.md)"
        )


def _sets_teacher_prompt(draft: Draft, plugins: str) -> bool:
    """Return whether the user's plugins, paths between spaces, name the teacher's prompt."""
    for plugin in plugins.split():
        try:
            if "teacher_prompt" in Path(plugin).read_text(encoding="utf-8"):
                return True
        except (OSError, ValueError):
            draft.incomplete.append(
                f"{plugin} (external_plugins) was not found; if it sets teacher_prompt, write it "
                "as the teacher's hint"
            )
    return False


RULES: dict[str, Any] = {
    # Model and data.
    "model": "model.path",
    "model_revision": "model.revision",
    "dataset": train_data,
    "val_dataset": eval_data,
    "columns": _columns,
    "system": argument("system"),
    # Environment and rewards.
    "multi_turn_scheduler": _scheduler,
    "external_plugins": _plugins,
    "gym_env": argument("gym_env"),
    "use_gym_env": _gym_env,
    "reward_funcs": list_argument("reward_funcs"),
    "reward_weights": list_argument("reward_weights"),
    # Limits.
    "max_turns": "limits.turns",
    "max_completion_length": noted,
    "completion_length_limit_scope": noted,
    "max_length": "limits.prompt_tokens",
    "vllm_max_model_len": "limits.context",
    "enable_thinking": "model.template_args.enable_thinking",
    # Batches and sampling.
    "num_generations": "rollout.group_size",
    "generation_batch_size": noted,
    "per_device_train_batch_size": noted,
    "gradient_accumulation_steps": noted,
    "steps_per_generation": noted,
    "global_batch_size": noted,
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": top_k("rollout.top_k"),
    "min_p": "rollout.min_p",
    "stop_words": lists("rollout.stop"),
    # Credit and loss.
    "advantage_estimator": same(
        "train.algorithm", grpo="grpo", rloo="rloo", reinforce_plus_plus="reinforce_pp"
    ),
    "loss_type": _loss,
    "importance_sampling_level": noted,
    "scale_rewards": same(
        "train.advantage", group="std", none="mean", batch="group_batch", true="std", false="mean"
    ),
    "epsilon": "train.clip_low",
    "epsilon_high": "train.clip_high",
    "delta": unless_off("train.clip_cap"),
    "beta": noted,
    "kl_in_reward": noted,
    "num_iterations": "train.epochs",
    "dynamic_sample": noted,
    "max_resample_times": noted,
    "overlong_filter": switch("train.overlong_filter"),
    **{
        name: _reward_flag(reward, name) for reward, names in REWARD_FLAGS.items() for name in names
    },
    "rollout_importance_sampling_mode": same("train.correction", **CORRECTIONS),
    "rollout_importance_sampling_threshold": "train.correction_high",
    "loss_scale": _loss_scale,
    # Optimizer.
    "learning_rate": "train.lr",
    "lr": "train.lr",
    "lr_scheduler_type": same(
        "train.schedule",
        linear="linear",
        cosine="cosine",
        constant="constant",
        constant_with_warmup="constant",
    ),
    "lr_decay_style": same("train.schedule", linear="linear", cosine="cosine", constant="constant"),
    "warmup_ratio": noted,
    "lr_warmup_fraction": noted,
    "warmup_steps": noted,
    "lr_warmup_iters": noted,
    "weight_decay": "train.weight_decay",
    "adam_beta1": noted,
    "adam_beta2": noted,
    "adam_epsilon": "train.eps",
    "max_grad_norm": "train.max_grad_norm",
    "clip_grad": "train.max_grad_norm",
    # Numbers of steps.
    "num_train_epochs": noted,
    "max_steps": _steps,
    "train_iters": _steps,
    # Teacher and reference.
    "rlhf_type": noted,
    "teacher_model": noted,
    "teacher_model_server": _teacher_server,
    "teacher_kl_coef": noted,
    "lmbda": noted,
    "gkd_logits_topk": noted,
    "sync_ref_model": sync_ref_model,
    "ref_model_sync_steps": noted,
    # Adapter, memory and routes.
    "tuner_type": _tuner,
    "train_type": _tuner,
    "lora_rank": noted,
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "target_modules": linear_layers,
    "freeze_vit": switch("train.vision", "frozen"),
    "gradient_checkpointing": "train.gradient_checkpointing",
    "recompute_granularity": switch("train.gradient_checkpointing"),
    "router_replay_mode": router_replay,
    # Checkpoints, evaluation and trackers.
    "output_dir": "out",
    "save": "out",
    "save_steps": noted,
    "save_total_limit": "checkpoint.keep",
    "eval_steps": noted,
    "num_generations_eval": "eval.samples",
    "seed": "seed",
    "report_to": trackers,
    "wandb_project": "track.project",
    "run_name": "track.name",
    "wandb_exp_name": "track.name",
}

_OWN_LOSS = "write your own (train.algorithm)"
NONE: dict[str, tuple[str, tuple[Any, ...]]] = {
    "template": ("the model's template is used; see model.template", ()),
    "agent_template": ("see model.parser", ()),
    "response_prefix": ("see model.template_args", ()),
    "repetition_penalty": (
        "no penalties: they would not be part of the trained distribution",
        (1, 1.0),
    ),
    "structured_outputs_regex": ("no constrained sampling", (None,)),
    "vllm_server_pass_dataset": ("every column of a row reaches the environment", (True, False)),
    "async_generate": ('see [schedule] mode = "one_step_off"', (False,)),
    "truncation_strategy": (
        "prompts over limits.prompt_tokens are skipped, counted and listed",
        ("delete",),
    ),
    "split_dataset_ratio": ("about a fifth of the tasks is held out without eval_tasks", ()),
    "dataset_shuffle": ("tasks are always shuffled, by the seed", (True,)),
    "data_seed": ("one seed for all", ()),
    "tau_pos": (_OWN_LOSS, ()),
    "tau_neg": (_OWN_LOSS, ()),
    "real_tau": (_OWN_LOSS, ()),
    "fipo_decay_rate": (_OWN_LOSS, ()),
    "fipo_clip_range": (_OWN_LOSS, ()),
    "top_entropy_quantile": ("see train.loss_scale for weights of tokens", (1, 1.0)),
    "log_entropy": ("the entropy is exact and always measured", (True, False)),
    "log_completions": ("the viewer has every episode", (True, False)),
    "log_rollout_offpolicy_metrics": ("always measured", (True, False)),
    "reward_model": ("call it in a reward function", (None,)),
    "reward_model_plugin": ("call it in a reward function", (None,)),
    "ref_model": ("the reference policy is the model at the start of reinforcement", (None,)),
    "ref_model_mixup_alpha": (
        "the reference is replaced (train.reference_every), not mixed",
        (1, 1.0),
    ),
    "chord_sft_dataset": ("no supervised term during reinforcement; see [warmup]", ()),
    "chord_mu_peak": ("no supervised term during reinforcement; see [warmup]", ()),
    "advantage_reweight": ("write your own (train.advantage)", (None,)),
    "rlsd_lambda": ("write your own (train.advantage)", ()),
    "sdar_loss_coef": (_OWN_LOSS, (0, 0.0)),
    "seq_kd": ("only replies of the policy are trained", (False,)),
    "sft_alpha": ("no supervised term during reinforcement; see [warmup]", (0, 0.0)),
    "teacher_adapters": ("see the path of [[teacher]]", (None, [])),
    "teacher_model_revision": ("see the path of [[teacher]]", (None,)),
    "teacher_tag_key": ("write a [[teacher]] for each environment", (None,)),
    "off_policy_sequence_mask_delta": ("see train.correction = sequence_mis_mean", (None,)),
    "vf_coef": (
        "a critic has a body of its own (train.critic.body), so its loss needs no weight beside "
        "the policy's",
        (),
    ),
    "min_lr": ("the rate decays to 0", (0, 0.0)),
    "freeze_aligner": ("see train.vision", ()),
    "freeze_llm": ("see [lora]", (False,)),
    "optimizer": ("AdamW is the optimizer", ("adam", "adamw")),
    "resume_from_checkpoint": ("a run continues with --resume", (None,)),
    "config": ("convert that file", ()),
    "finetune": ("weights come from model.path", (True,)),
    "load": ("weights come from model.path; a run continues with --resume", ()),
    "vllm_use_async_engine": ("the engine has every reply of its own in flight", (True, False)),
    "use_async_engine": ("the engine has every reply of its own in flight", (True, False)),
}

MACHINE = (
    # Engines and servers.
    "vllm_*",
    "use_vllm",
    "sglang_*",
    "lmdeploy_*",
    "host",
    "port",
    "sleep_level",
    "move_model_batches",
    # Placement and parallelism.
    "*_parallel_size",
    "sequence_parallel*",
    "ddp_*",
    "ddp_timeout",
    "deepspeed",
    "fsdp*",
    "device_map",
    "gpus",
    "train.gpus",
    "rollout.gpus",
    "colocate_groups",
    "overlap_*",
    "expert_*",
    "use_ray",
    "ray*",
    # Memory, precision and kernels.
    "torch_dtype",
    "bf16",
    "fp16",
    "attn_impl",
    "attention_backend",
    "cross_entropy_*",
    "use_liger_kernel",
    "torch_compile",
    "offload_*",
    "recompute_*",
    "gradient_checkpointing_kwargs",
    "gradient_accumulation_fusion",
    "optimizer_cpu_offload",
    "use_precision_*",
    "enable_flattened_*",
    "manual_gc*",
    # Packing and loading of rows.
    "dataloader_*",
    "dataset_num_proc",
    "load_from_cache_file",
    "cached_dataset",
    "streaming",
    "strict",
    "micro_batch_size",
    "per_device_eval_batch_size",
    "padding_free",
    "packing",
    "remove_unused_columns",
    "max_pixels",
    # The model as it is loaded and named.
    "model_type",
    "model_author",
    "model_name",
    "model_kwargs",
    "use_hf",
    "use_chat_template",
    "moe_*",
    "merge_lora",
    "loss_weights",
    # Megatron.
    "megatron_*",
    "no_*",
    "apply_wd_*",
    "async_save",
    # Machines of teachers.
    "teacher.*",
    "teacher_deepspeed",
    "offload_teacher_model",
    "teacher_model_type",
    "teacher_*parallel*",
    # Checkpoints.
    "no_save_*",
    "save_safetensors",
    "save_only_model",
    "save_strategy",
    "eval_strategy",
    "create_checkpoint_*",
    "add_version",
    "hub_*",
    "push_to_hub",
    # Logs and trackers.
    "logging_*",
    "*interval",
    "tensorboard_*",
    "wandb_*",
    "swanlab_*",
)


def _normalize(key: str) -> str:
    """Return a flag with `_`; a key of a group of workers (`train.lora_rank`) without the group."""
    flag = key.lstrip("-").replace("-", "_")
    group, dot, name = flag.partition(".")
    if group == "teacher" and name == "model":
        return "teacher_model"

    # The numbers of devices are those of each group.
    if dot and group in ("train", "rollout") and name != "gpus":
        return name
    return flag


SYSTEM = System(
    name="swift",
    rules=RULES,
    none=NONE,
    machine=MACHINE,
    defaults={
        "rollout.group_size": 8,
        "rollout.temperature": 0.9,
        "train.algorithm": "grpo",
        "train.aggregation": "trajectory",
        "train.clip_low": 0.2,
        "train.schedule": "cosine",
        "train.weight_decay": 0.1,
        "train.max_grad_norm": 1.0,
        "seed": 42,
    },
    finish=_finish,
    programs=r"^swift (rlhf|rollout)$",
    refused={
        r"^swift (sft|pt)$": "trains on given replies (see [warmup] dataset)",
        r"^swift (?!rlhf$|rollout$)": "trains nothing",
    },
    normalize=_normalize,
)
