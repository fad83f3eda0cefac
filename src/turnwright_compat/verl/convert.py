"""verl: overrides and YAML of `verl.trainer.main_ppo`."""

from __future__ import annotations

from typing import Any

from turnwright.errors import ConfigError
from turnwright_compat.convert.engine import (
    NO_EFFECT,
    TO_DO,
    Draft,
    System,
    argument,
    eval_data,
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
from turnwright_compat.convert.hydra import read_document
from turnwright_compat.convert.sources import find_file

USE = "verl:tools"
"""How tools of verl are named (`turnwright_compat`); their files are
settings of the environment."""
R, M, D = "actor_rollout_ref.rollout.", "actor_rollout_ref.rollout.multi_turn.", "data."
AL, TR = "algorithm.", "trainer."
AC, MO, RC = "actor_rollout_ref.actor.", "actor_rollout_ref.model.", "algorithm.rollout_correction."
PARSERS = {
    "hermes": "hermes",
    "llama3_json": "llama3",
    "gpt_oss": "harmony",
    "qwen3_coder": "qwen3_coder",
    "glm": "glm",
}


def _template_args(draft: Draft, value: Any) -> str | None:
    for name, one in (value or {}).items():
        draft.put(f"model.template_args.{name}", one)
    return None


OWN_LOOPS = ("single_turn_agent", "tool_agent")
"""verl's own agent loops."""


def _estimator(draft: Draft, value: Any) -> str | None:
    if value == "gae":
        raise ConfigError(
            'adv_estimator = "gae" trains with a critic, which is not here; choose grpo, rloo or '
            "reinforce_plus_plus"
        )
    names = {
        "grpo": "grpo",
        "rloo": "rloo",
        "reinforce_plus_plus": "reinforce_pp",
        "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    }
    if value not in names:
        return "no such estimator here (no critic); write your own (train.advantage)"
    if "train.algorithm" not in draft.values:
        draft.put("train.algorithm", names[value])
    return None


def _loss(draft: Draft, value: Any) -> str | None:
    if value == "vanilla":
        return None
    return same("train.algorithm", gspo="gspo", cispo="cispo")(draft, value)


def _correction(draft: Draft) -> None:
    given, low_high = draft.settings, draft.settings.get(f"{RC}rollout_rs_threshold")
    if given.get(f"{RC}rollout_is") == "token":
        draft.put("train.correction", "tis", origin=f"{RC}rollout_is")
        draft.put(
            "train.correction_high",
            draft.number(f"{RC}rollout_is_threshold", 2.0),
            origin=f"{RC}rollout_is_threshold",
        )
    elif given.get(f"{RC}rollout_is") == "sequence" or "sequence" in str(
        given.get(f"{RC}rollout_rs")
    ):
        draft.put("train.correction", "sequence_mis", origin=f"{RC}rollout_is")
        draft.put(
            "train.correction_high",
            draft.number(f"{RC}rollout_is_threshold", 3.0),
            origin=f"{RC}rollout_is_threshold",
        )
    elif "geometric" in str(given.get(f"{RC}rollout_rs")) or "seq_mean" in str(
        given.get(f"{RC}rollout_rs")
    ):
        draft.put("train.correction", "sequence_mis_mean", origin=f"{RC}rollout_rs")
        if isinstance(low_high, int | float):
            draft.put("train.correction_high", low_high, origin=f"{RC}rollout_rs_threshold")
    elif "token" in str(given.get(f"{RC}rollout_rs")):
        draft.put("train.correction", "icepop", origin=f"{RC}rollout_rs")
    if "train.correction" in draft.values and draft.values.get("train.old_logprobs") == "engine":
        draft.values.pop("train.old_logprobs")
        draft.notes.append(
            "bypass_mode is left out: with a correction, the ratio's denominator is the trainer's "
            "policy"
        )


def _finish(draft: Draft) -> None:
    given = draft.settings
    mini = draft.number(f"{AC}ppo_mini_batch_size", 256)
    if (groups := draft.number(f"{D}train_batch_size", 1024)) > 0:
        minibatches(draft, mini, groups, f"{AC}ppo_mini_batch_size")
    else:  # asynchronous trainers have only minibatches
        draft.values.pop("rollout.groups", None)
        draft.put("rollout.groups", int(mini), origin=f"{AC}ppo_mini_batch_size")
    steps = given.get(f"{TR}total_training_steps")
    if steps is None:
        draft.put(
            "train.data_epochs", draft.number(f"{TR}total_epochs", 30), origin=f"{TR}total_epochs"
        )
    if (ratio := draft.number(f"{AC}optim.lr_warmup_steps_ratio", 0)) > 0:
        if isinstance(steps, int):
            draft.put(
                "train.lr_warmup_steps",
                int(ratio * steps),
                origin=f"{AC}optim.lr_warmup_steps_ratio",
            )
        else:
            why = (
                "the number of steps is known when the tasks are: set train.lr_warmup_steps to "
                "that share of them"
            )
            draft.reasons[f"{AC}optim.lr_warmup_steps_ratio"] = why
    _loss_terms(draft)
    _environment(draft)
    _tool_defaults(draft)
    _distillation(draft)
    _asynchronous(draft)
    if f"{AL}adv_estimator" not in given:
        draft.incomplete.append(
            "adv_estimator is not set: verl's default is gae, with a critic, which is not here; "
            "grpo is written"
        )
    if not (draft.number(f"{MO}lora_rank", 0) or draft.number(f"{MO}lora.rank", 0)):
        for key in ("lora.alpha", "lora.targets", "lora.rank"):
            draft.values.pop(key, None)
    _correction(draft)


def _loss_terms(draft: Draft) -> None:
    given = draft.settings
    if draft.isset(f"{AC}use_kl_loss"):
        draft.put("train.kl", draft.number(f"{AC}kl_loss_coef", 0.001), origin=f"{AC}kl_loss_coef")
        draft.put("train.kl_in", "loss", origin=f"{AC}use_kl_loss")
        draft.read(f"{AC}kl_loss_type")
        same(
            "train.kl_estimator",
            kl="k1",
            k1="k1",
            abs="k1",
            mse="k2",
            k2="k2",
            low_var_kl="k3",
            k3="k3",
        )(draft, given.get(f"{AC}kl_loss_type", "low_var_kl"))
    elif draft.isset(f"{AL}use_kl_in_reward"):
        draft.put(
            "train.kl", draft.number(f"{AL}kl_ctrl.kl_coef", 0.001), origin=f"{AL}kl_ctrl.kl_coef"
        )
        draft.put("train.kl_in", "reward", origin=f"{AL}use_kl_in_reward")
    if given.get(f"{AL}norm_adv_by_std_in_grpo") is False:
        draft.put("train.advantage", "mean", origin=f"{AL}norm_adv_by_std_in_grpo")
    if draft.isset(f"{AL}filter_groups.enable"):
        rounds = int(draft.number(f"{AL}filter_groups.max_num_gen_batches", 0)) - 1
        origin = f"{AL}filter_groups.enable, {AL}filter_groups.max_num_gen_batches"
        draft.put(
            "train.refill",
            rounds if rounds >= 0 else 10,
            origin=origin,
        )
    clip = draft.number(f"{AC}clip_ratio", 0.2)
    for side in ("low", "high"):
        if f"{AC}clip_ratio_{side}" not in given:
            draft.put(f"train.clip_{side}", clip, origin=f"{AC}clip_ratio")
    if given.get(f"{AC}loss_agg_mode") != "seq-mean-token-sum-norm":
        draft.values.pop("train.fixed_length", None)


def _environment(draft: Draft) -> None:
    given = draft.settings
    if (
        path := given.get("reward.custom_reward_function.path")
        or given.get("custom_reward_function.path")
    ) is not None:
        names = (given.get(f"{one}custom_reward_function.name") for one in ("reward.", ""))
        origin = ", ".join(
            f"{one}custom_reward_function.{key}"
            for one in ("reward.", "")
            for key in ("path", "name")
        )
        draft.put(
            "env.args.reward", f"{path}:{next(filter(None, names), 'compute_score')}", origin=origin
        )
    draft.reasons.update(
        dict.fromkeys(
            (f"{M}enable", f"{R}multi_turn"), f"{NO_EFFECT}: turns and tools need no switch here"
        )
    )
    own_loop = _agent_loop(draft)
    _turns(draft, own_loop)
    length = draft.number(f"{D}max_response_length", 512)
    draft.put("limits.turn_tokens", int(length), origin=f"{D}max_response_length")


def _agent_loop(draft: Draft) -> bool:
    """Name the agent loop of the user, if the settings do; return whether there is one."""
    named, config = (
        draft.settings.get(f"{R}agent.default_agent_loop"),
        draft.settings.get(f"{R}agent.agent_loop_config_path"),
    )
    own = named not in (None, *OWN_LOOPS)
    if not own and config is None:
        return False
    origin = f"{R}agent.agent_loop_config_path, {R}agent.default_agent_loop"
    loops = _loops_of(draft, config)
    if own and named in loops:
        _use_loop(draft, loops[named], origin)
    elif named == "tool_agent" or (named == "single_turn_agent" and loops is not None):
        pass  # the settings decide for a loop of verl, whatever others the file has
    elif len(loops) == 1 and not own:
        ((name, target),) = loops.items()
        draft.notes.append(
            f"rows name their loop there (agent_name); {name} is the one of the file, and plays "
            "all rows here"
        )
        _use_loop(draft, target, origin)
    elif config is None or loops or own:
        listed = f"; the file has {', '.join(loops)}" if loops else ""
        draft.incomplete.append(
            f"the agent loop {named or 'of each row'} is not read{listed}: set [[env]] use = "
            "file.py:Class"
        )
        draft.put("env.use", f"{TO_DO}.py:Loop", origin=origin)
    else:
        draft.put("env.use", f"{TO_DO}.py:Loop", origin=origin)
    return True


def _use_loop(draft: Draft, target: str, origin: str) -> None:
    draft.put("env.use", python_name(draft, target), origin=origin)
    prefix = "env.args."
    kept = {
        "max_parallel_calls",
        "max_tool_response_length",
        "tool_response_truncate_side",
        "tool_config_path",
    }
    settings = {
        key: draft.values.pop(f"{prefix}{key}")
        for key in sorted(kept)
        if f"{prefix}{key}" in draft.values
    }
    if settings:  # a loop reads them in its configuration
        draft.put(
            "env.args.rollout",
            {"multi_turn": settings},
            origin=", ".join(f"{M}{key}" for key in settings),
        )


def _loops_of(draft: Draft, config: Any) -> dict[str, str]:
    """Return the classes of a file of agent loops, by their names."""
    if config is None:
        return {}
    path = find_file(str(config), draft.folder)
    if path is None:
        draft.incomplete.append(
            f"{config} (agent_loop_config_path) was not found, so the agent loop is not known: set "
            "[[env]] use = file.py:Class"
        )
        return {}
    try:
        found = read_document(path)
    except ConfigError as error:
        draft.incomplete.append(str(error))
        return {}
    rows = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    return {str(one.get("name")): str(one["_target_"]) for one in rows if one.get("_target_")}


def _turns(draft: Draft, own_loop: bool) -> None:
    """Set the replies of an episode: as many as either bound allows, else all that fit, and one
    without tools and loops."""
    given = draft.settings
    bounds = {f"{M}max_assistant_turns": given.get(f"{M}max_assistant_turns")}
    if isinstance(users := given.get(f"{M}max_user_turns"), int) and users > 0:
        bounds[f"{M}max_user_turns"] = users + 1  # a last reply follows the last result
    known = {key: value for key, value in bounds.items() if isinstance(value, int) and value > 0}
    if known:
        least = min(known, key=lambda key: known[key])
        draft.put("limits.turns", known[least], origin=", ".join(dict.fromkeys([least, *known])))
        return
    several = given.get(f"{M}enable", given.get(f"{R}multi_turn")) is True
    if several or own_loop or given.get(f"{R}agent.default_agent_loop") == "tool_agent":
        length = int(draft.number(f"{D}max_response_length", 512))
        draft.put(
            "limits.turns",
            length,
            origin=f"{M}max_assistant_turns, {M}enable, {R}agent.default_agent_loop",
        )
        draft.notes.append(
            "max_assistant_turns is not set, so turns are unlimited there: limits.turns is the "
            "tokens of an episode"
        )
        return
    draft.put("limits.turns", 1, origin=f"{M}enable")


def _tool_defaults(draft: Draft) -> None:
    """Set verl's limits of tool results where tools are given."""
    tools = ("tool_config_path", "function_tool_path", "interaction_config_path")
    if (
        not any(f"env.args.{one}" in draft.values for one in tools)
        or draft.values.get("env.use", USE) != USE
    ):
        return
    for key, value in (("max_parallel_calls", 1), ("max_tool_response_length", 256)):
        if f"env.args.{key}" not in draft.values:
            draft.put(f"env.args.{key}", value, origin="verl's default")


def _distillation(draft: Draft) -> None:
    """Make the teacher of verl's distillation by policy gradients; refuse its other losses."""
    given = draft.settings
    if given.get("distillation.enabled") is not True:
        return
    loss = "distillation.distillation_loss."
    mode = given.get(f"{loss}loss_mode", "k3")
    models = [
        (key, one)
        for key, one in given.items()
        if key.startswith("distillation.teacher_models.") and key.endswith(".model_path")
    ]
    if mode != "k1" or given.get(f"{loss}use_policy_gradient") is not True:
        raise ConfigError(
            f"distillation_loss.loss_mode = {mode} without use_policy_gradient is a loss that is "
            "not here; "
            'use k1 with policy gradients, or write the recipe with [[teacher]] signal = "loss" '
            "(docs/reference/teachers.md)"
        )
    if len(models) != 1:
        raise ConfigError(
            "distillation of several teachers by a column of rows; write a [[teacher]] for each, "
            "with environments"
        )
    draft.teacher["path"] = str(models[0][1])
    draft.teacher["signal"] = "advantage"
    draft.teacher["weight"] = float(draft.number(f"{loss}distillation_loss_coef", 1.0))
    if draft.number(f"{loss}loss_max_clamp", 0):
        draft.teacher["bound"] = float(draft.number(f"{loss}loss_max_clamp", 0))
    draft.teacher_settings.update(key for key in given if key.startswith("distillation."))
    if given.get(f"{loss}use_task_rewards") is False:
        draft.put("train.reward_weight", 0.0, origin=f"{loss}use_task_rewards")


def _asynchronous(draft: Draft) -> None:
    """Choose the schedule of verl's asynchronous trainers."""
    program = str(draft.settings.get("$program"))
    if "fully_async" in program:
        draft.put("schedule.mode", "async", origin=program)
        batch = draft.number(f"{AC}ppo_mini_batch_size", 256) * draft.number(
            "async_training.require_batches", 1
        )
        draft.put(
            "rollout.groups",
            int(batch),
            origin=f"{AC}ppo_mini_batch_size, async_training.require_batches",
        )
        if (total := draft.number("rollout.total_rollout_steps", 0)) > 0:
            steps = max(1, int(total / batch))
            draft.put("train.steps", steps, origin="rollout.total_rollout_steps")
            draft.values.pop("train.data_epochs", None)
    elif "one_step_off" in program:
        draft.put("schedule.mode", "one_step_off", origin=program)


def _sanity(draft: Draft, value: Any) -> str | None:
    """Convert the check of the tokenization: verl makes it at the end of each rollout, ours has a
    share of the episodes."""
    levels = {level: level for level in ("strict", "ignore_strippable", "disable", "off")}
    problem = same("rollout.sanity", **levels)(draft, value)
    if problem is None and str(value).lower() == "strict":
        draft.put("rollout.sanity_share", 1.0)
    return problem


RULES: dict[str, Any] = {
    f"{D}train_files": train_data,
    f"{D}val_files": eval_data,
    f"{D}prompt_key": "env.columns.prompt",
    f"{D}image_key": "env.columns.images",
    f"{D}video_key": "env.columns.videos",
    f"{D}max_prompt_length": "limits.prompt_tokens",
    f"{D}max_response_length": "limits.episode_tokens",
    f"{D}train_batch_size": "rollout.groups",
    f"{D}seed": unless_off("seed", (None,)),
    f"{D}return_multi_modal_inputs": "env.return_multi_modal_inputs",
    f"{D}apply_chat_template_kwargs": _template_args,
    f"{D}tool_config_path": argument("tool_config_path"),
    f"{D}function_tool_path": argument("function_tool_path"),
    f"{AL}adv_estimator": _estimator,
    f"{AL}norm_adv_by_std_in_grpo": noted,
    f"{AL}gamma": lambda draft, value: draft.put("train.discount", value) if value != 1 else None,
    f"{AL}use_kl_in_reward": noted,
    f"{AL}kl_penalty": noted,
    f"{AL}kl_ctrl.kl_coef": noted,
    f"{AL}filter_groups.enable": noted,
    f"{AL}filter_groups.max_num_gen_batches": noted,
    f"{RC}rollout_is": noted,
    f"{RC}rollout_is_threshold": noted,
    f"{RC}rollout_rs": noted,
    f"{RC}rollout_rs_threshold": noted,
    f"{RC}bypass_mode": switch("train.old_logprobs", "engine"),
    f"{AC}optim.lr": "train.lr",
    f"{AC}optim.weight_decay": "train.weight_decay",
    f"{AC}optim.betas": "train.betas",
    f"{AC}optim.clip_grad": "train.max_grad_norm",
    f"{AC}grad_clip": "train.max_grad_norm",
    f"{AC}optim.lr_scheduler_type": same(
        "train.schedule", constant="constant", cosine="cosine", linear="linear"
    ),
    f"{AC}optim.lr_decay_style": same(
        "train.schedule", constant="constant", cosine="cosine", linear="linear"
    ),
    f"{AC}optim.lr_warmup_steps": unless_off("train.lr_warmup_steps"),
    f"{AC}optim.lr_warmup_steps_ratio": noted,
    f"{AC}ppo_mini_batch_size": noted,
    f"{AC}ppo_max_token_len_per_gpu": "train.micro_tokens",
    f"{AC}clip_ratio": noted,
    f"{AC}clip_ratio_low": "train.clip_low",
    f"{AC}clip_ratio_high": "train.clip_high",
    f"{AC}clip_ratio_c": "train.clip_cap",
    f"{AC}entropy_coeff": "train.entropy",
    f"{AC}freeze_vision_tower": switch("train.vision", "frozen"),
    f"{AC}policy_loss.loss_mode": _loss,
    f"{AC}loss_agg_mode": same(
        "train.aggregation",
        token_mean="token",
        seq_mean_token_mean="trajectory",
        seq_mean_token_sum_norm="fixed",
    ),
    f"{AC}loss_scale_factor": unless_off("train.fixed_length"),
    f"{AC}use_kl_loss": noted,
    f"{AC}kl_loss_coef": noted,
    f"{AC}kl_loss_type": noted,
    f"{AC}ppo_epochs": "train.epochs",
    f"{AC}router_replay.mode": lambda draft, value: (
        draft.put("train.routing_replay", "replay") if value not in ("disabled", None) else None
    ),
    f"{R}n": "rollout.group_size",
    f"{R}temperature": "rollout.temperature",
    f"{R}top_p": "rollout.top_p",
    f"{R}top_k": top_k("rollout.top_k"),
    f"{R}min_p": "rollout.min_p",
    f"{R}stop": lists("rollout.stop"),
    f"{R}max_model_len": unless_off("limits.context"),
    f"{R}response_length": "limits.episode_tokens",
    f"{R}prompt_length": "limits.prompt_tokens",
    f"{R}seed": unless_off("seed", (None,)),
    f"{R}enable_rollout_routing_replay": switch("train.routing_replay", "replay"),
    f"{R}val_kwargs.n": "eval.samples",
    f"{R}val_kwargs.temperature": temperature_of_eval,
    f"{R}val_kwargs.top_p": "eval.top_p",
    f"{R}val_kwargs.top_k": top_k("eval.top_k"),
    f"{R}multi_turn": noted,
    f"{M}enable": noted,
    f"{M}max_assistant_turns": noted,
    f"{M}max_user_turns": noted,
    f"{M}tool_config_path": argument("tool_config_path"),
    f"{M}function_tool_path": argument("function_tool_path"),
    f"{M}interaction_config_path": argument("interaction_config_path"),
    f"{R}tool_kwargs.tools_config_file": argument("tool_config_path"),
    f"{M}max_parallel_calls": argument("max_parallel_calls"),
    f"{M}max_tool_response_length": argument("max_tool_response_length"),
    f"{M}tool_response_truncate_side": argument("tool_response_truncate_side"),
    f"{M}use_inference_chat_template": switch("rollout.history", "template"),
    f"{M}tokenization_sanity_check_mode": _sanity,
    f"{M}format": same("model.parser", **PARSERS),
    f"{R}agent.default_agent_loop": noted,
    f"{R}agent.agent_loop_config_path": noted,
    f"{MO}path": "model.path",
    f"{MO}lora_rank": "lora.rank",
    f"{MO}lora_alpha": "lora.alpha",
    f"{MO}lora.rank": "lora.rank",
    f"{MO}lora.alpha": "lora.alpha",
    f"{MO}target_modules": lambda draft, value: (
        lists("lora.targets")(draft, value) if value not in ("all-linear", None) else None
    ),
    f"{MO}enable_gradient_checkpointing": "train.gradient_checkpointing",
    "reward.custom_reward_function.path": noted,
    "reward.custom_reward_function.name": noted,
    "custom_reward_function.path": noted,
    "custom_reward_function.name": noted,
    f"{TR}total_training_steps": unless_off("train.steps"),
    "rollout.total_rollout_steps": noted,
    "async_training.require_batches": noted,
    f"{TR}total_epochs": noted,
    f"{TR}test_freq": lambda draft, value: draft.put("eval.every", max(0, int(value))),
    f"{TR}save_freq": lambda draft, value: (
        draft.put("checkpoint.every", int(value)) if int(value) > 0 else None
    ),
    f"{TR}max_actor_ckpt_to_keep": unless_off("checkpoint.keep"),
    f"{TR}default_local_dir": "out",
    f"{TR}logger": trackers,
    f"{TR}project_name": "track.project",
    f"{TR}experiment_name": "track.name",
}

_MANAGER = "the reward is the environment's: env.args.reward"
_TEACHER = "see [[teacher]]"
NONE: dict[str, tuple[str, tuple[Any, ...]]] = {
    "distillation.enabled": (_TEACHER, (False,)),
    **{
        f"distillation.distillation_loss.{one}": (_TEACHER, ())
        for one in (
            *(
                "loss_mode",
                "topk",
                "use_task_rewards",
                "distillation_loss_coef",
                "loss_max_clamp",
                "log_prob_min_clamp",
            ),
            *(
                "use_policy_gradient",
                "policy_loss_mode",
                "clip_ratio",
                "clip_ratio_low",
                "clip_ratio_high",
            ),
        )
    },
    "distillation.teacher_key": (_TEACHER, ()),
    f"{D}reward_fn_key": (
        "every column of a row reaches the reward under its own name",
        ("data_source",),
    ),
    f"{D}audio_key": ("no audio", ("audios",)),
    f"{D}shuffle": ("tasks are always shuffled, by the seed", (True,)),
    f"{D}validation_shuffle": ("an evaluation plays every held-out task", (False,)),
    f"{D}truncation": (
        "prompts over limits.prompt_tokens are skipped, counted and listed",
        ("error",),
    ),
    f"{D}filter_overlong_prompts": (
        "prompts over limits.prompt_tokens are skipped, counted and listed",
        (True,),
    ),
    f"{D}train_max_samples": ("all rows are used; cut the file", (-1,)),
    f"{D}val_max_samples": ("see eval.tasks", (-1,)),
    f"{D}custom_cls.path": ("write [[env]] tasks = file.py:function", (None,)),
    f"{D}custom_cls.name": ("write [[env]] tasks = file.py:function", (None,)),
    f"{D}mm_processor_kwargs": (
        "images are processed by the model directory's settings",
        ({}, None),
    ),
    f"{D}return_raw_chat": ("messages are kept", (True, False)),
    f"{D}gen_batch_size": ("see [schedule]", ()),
    f"{D}mask_truncated": ("see train.overlong_filter", (False,)),
    f"{AL}lam": ("no critic, so no GAE", (1, 1.0)),
    f"{AL}filter_groups.metric": (
        "write train.group_filter",
        ("seq_reward", "seq_final_reward", "acc", "score", None),
    ),
    f"{AL}kl_ctrl.type": ("the weight of the KL term is constant", ("fixed",)),
    f"{AL}kl_ctrl.horizon": ("the weight of the KL term is constant", ()),
    f"{AL}kl_ctrl.target_kl": ("the weight of the KL term is constant", ()),
    f"{AL}use_pf_ppo": ("no sampling of trajectories by reward", (False,)),
    f"{RC}rollout_is_batch_normalize": ("correction weights are not normalized", (False,)),
    f"{RC}loss_type": ("see train.algorithm", ()),
    f"{RC}rollout_token_veto_threshold": ('see train.correction = "icepop"', (None,)),
    f"{AC}tau_pos": ("write your own (train.algorithm)", ()),
    f"{AC}tau_neg": ("write your own (train.algorithm)", ()),
    f"{AC}policy_loss.clip_cov_ratio": ("write your own (train.algorithm)", ()),
    f"{AC}policy_loss.kl_cov_ratio": ("write your own (train.algorithm)", ()),
    f"{AC}policy_loss.dro_beta": ("write your own (train.algorithm)", (None,)),
    f"{AC}shuffle": ("minibatches are shuffled at every step", (False, True)),
    f"{AC}calculate_entropy": ("the entropy is exact and always measured", (False, True)),
    f"{AC}optim.optimizer": ("AdamW is the optimizer", ("AdamW", "adam")),
    f"{AC}optim.min_lr_ratio": ("the rate decays to 0", (0, 0.0, None)),
    f"{AC}optim.num_cycles": ("half a cosine", (0.5,)),
    f"{AC}optim.warmup_style": ("see train.schedule", (None, "constant")),
    f"{AC}optim.lr_warmup_init": ("the rate rises from a share of its peak", (0,)),
    f"{R}over_sample_rate": (
        "train.refill asks for more groups only where some are replaced",
        (0,),
    ),
    f"{R}ignore_eos": ("a reply ends at the template's end tokens", (False,)),
    f"{R}repetition_penalty": (
        "no penalties: they would not be part of the trained distribution",
        (1, 1.0),
    ),
    f"{R}val_kwargs.do_sample": (
        "evaluations are played sampled, and greedily with eval.greedy",
        (),
    ),
    f"{R}do_sample": ("training samples", (True,)),
    f"{R}single_turn_response_length": (
        "a reply has the limit of the episode; set limits.turn_tokens",
        (None,),
    ),
    f"{R}calculate_log_probs": ("logprobs of sampled ids are always returned", (True,)),
    f"{M}num_repeat_rollouts": ("see rollout.group_size", (None,)),
    f"{R}skip_tokenizer_init": ("machine", (True,)),
    f"{MO}custom_chat_template": (
        "a template is a file here: write it to chat.jinja and set model.template",
        (None,),
    ),
    f"{MO}trust_remote_code": ("no code of model directories is run", (False,)),
    "reward.reward_manager.name": (_MANAGER, ("naive",)),
    "reward_model.reward_manager": (_MANAGER, ("naive",)),
    "reward.reward_manager.module.path": (_MANAGER, ()),
    "reward.reward_manager.module.name": (_MANAGER, (None,)),
    f"{AL}filter_groups.max_inflight_gen_batches": ("see train.refill", ()),
    f"{AL}pf_ppo.reweight_method": ("no sampling of trajectories by reward", ("pow",)),
    f"{AL}pf_ppo.weight_pow": ("no sampling of trajectories by reward", (2.0, 2)),
    "reward.num_workers": ("rewards run beside the episodes; see env.reward_isolation", ()),
    "reward_model.enable": (
        "no reward model served by the trainer; call yours in the reward",
        (False,),
    ),
    f"{TR}val_before_train": ("the policy is always evaluated before reinforcement", (True,)),
    f"{TR}val_only": ("`turnwright eval`", (False,)),
    f"{TR}resume_mode": ("a run continues with --resume", ("auto", "disable")),
    f"{TR}critic_warmup": ("no critic", (0,)),
    f"{TR}log_val_generations": ("the viewer has every episode", ()),
    f"{TR}rollout_data_dir": ("the run directory has every episode", ()),
    f"{TR}validation_data_dir": ("the run directory has every episode", ()),
    f"{TR}balance_batch": ("passes are packed by tokens", (True, False)),
    "async_training.staleness_threshold": ('see [schedule] mode = "async" and staleness', ()),
    "async_training.trigger_parameter_sync_step": ("weights are sent after every step", (1,)),
    "async_training.partial_rollout": ('see [schedule] mode = "async" and engine.in_flight', ()),
}

MACHINE = (
    *(
        f"{R}*gpu*",
        f"{R}name",
        f"{R}mode",
        f"{R}*parallel*",
        f"{R}dtype",
        f"{R}enforce_eager",
        f"{R}*cache*",
    ),
    *(f"{R}max_num_*", f"{R}log_prob_*", f"{R}engine_kwargs*", f"{R}enable_*", f"{R}load_format"),
    *(
        f"{R}layered_summon",
        f"{R}disable_log_stats",
        f"{R}checkpoint_engine*",
        f"{R}trace*",
        f"{R}prometheus*",
    ),
    *(f"{R}profiler*", f"{R}quantization*", f"{R}nnodes", f"{R}update_weights*", f"{R}cudagraph*"),
    *(
        f"{R}multi_stage*",
        f"{R}scheduling_policy",
        f"{R}logprobs_mode",
        f"{R}mtp*",
        f"{R}agent.num_workers",
    ),
    *(
        f"{R}skip_rollout*",
        f"{R}free_*",
        f"{R}disaggregation*",
        f"{R}full_determinism",
        f"{R}use_*",
    ),
    *(
        "actor_rollout_ref.ref.*",
        "actor_rollout_ref.hybrid_engine",
        "actor_rollout_ref.nccl_timeout",
        "critic.*",
    ),
    *(
        f"{AC}fsdp_config*",
        f"{AC}megatron*",
        f"{AC}*micro_batch*",
        f"{AC}strategy",
        f"{AC}*parallel*",
    ),
    *(
        f"{AC}use_dynamic_bsz",
        f"{AC}use_torch_compile",
        f"{AC}use_fused*",
        f"{AC}use_remove*",
        f"{AC}entropy_*",
    ),
    *(
        f"{AC}checkpoint*",
        f"{AC}profiler*",
        f"{AC}data_loader*",
        f"{AC}optim.*offload*",
        f"{AC}optim.override*",
    ),
    *(
        f"{AC}optim.optimizer_*",
        f"{AC}veomni*",
        f"{AC}qat*",
        f"{AC}optim.total_training_steps",
        f"{AC}optim.zero_*",
    ),
    *(
        f"{AC}pad_*",
        f"{AC}router_replay.*",
        f"{AC}optim.lr_decay_steps",
        f"{MO}use_*",
        f"{MO}override_*",
    ),
    *(
        f"{MO}enable_activation*",
        f"{MO}external_lib",
        f"{MO}fused_*",
        f"{MO}tokenizer_path",
        f"{MO}exclude_modules",
    ),
    *(
        f"{MO}lora.*",
        f"{MO}mtp*",
        f"{MO}tiled_mlp*",
        f"{MO}hf_config_path",
        f"{MO}lora_adapter_path",
        f"{TR}nnodes",
    ),
    *(f"{TR}n_gpus_per_node", f"{TR}device", f"{TR}use_legacy*", f"{TR}ray_*", f"{TR}*esi*"),
    *(
        f"{TR}default_hdfs_dir",
        f"{TR}del_local*",
        f"{TR}max_critic*",
        f"{TR}resume_from*",
        f"{TR}npu_*",
    ),
    *(f"{TR}use_v1*", f"{TR}v1.*", f"{TR}remove_*", "ray_*", "global_profiler*", "rollout.n*"),
    *(
        "reward.reward_model*",
        "reward_model.*",
        "reward.sandbox*",
        "hydra.*",
        "--*",
        f"{D}dataloader*",
    ),
    *(
        f"{D}filter_overlong_prompts_workers",
        f"{D}use_shm",
        f"{D}return_*",
        f"{D}trust_remote*",
        f"{D}image_patch*",
    ),
    *(
        f"{D}sampler*",
        f"{D}datagen*",
        f"{D}tokenizer",
        "transfer_queue*",
        "defaults",
        "async_training.*",
    ),
    *(
        "model_engine",
        "distillation.*n_gpus*",
        "distillation.nnodes",
        "distillation.*.inference.*",
        "distillation.*num_replicas",
    ),
    *(
        "*._target_",
        "skip.*",
        f"{D}val_batch_size",
        f"{R}agent.custom_async_server*",
        f"{R}moe_*",
        f"{R}qat*",
    ),
    *(
        f"{AC}use_rollout_log_probs",
        "reward.reward_manager.source",
        "sandbox_fusion*",
        "custom_cls*",
    ),
)

SYSTEM = System(
    name="verl",
    rules=RULES,
    none=NONE,
    machine=MACHINE,
    defaults={
        "env.use": USE,
        "rollout.groups": 1024,
        "rollout.group_size": 1,
        "limits.prompt_tokens": 512,
        "limits.episode_tokens": 512,
        "train.algorithm": "grpo",
        "train.aggregation": "token",
        "train.clip_cap": 3.0,
        "train.lr": 1e-6,
        "train.schedule": "constant",
        "train.weight_decay": 0.01,
        "train.betas": [0.9, 0.999],
        "train.max_grad_norm": 1.0,
        "train.gradient_checkpointing": True,
    },
    finish=_finish,
    hydra=True,
    patterns=(
        (f"{D}apply_chat_template_kwargs.*", template_argument),
        ("distillation.teacher_models.*", lambda draft, key, value: "see [[teacher]]"),
    ),
    programs=r"^verl(\.trainer\.main_ppo\w*|\.experimental\.[\w.]*(main\w*|fully_async\w*))?$|(^|/)main_ppo\.py$|fully_async_main\.py$",
    refused={
        r"^verl\..*sft_trainer|fsdp_sft": "trains on given replies (see [warmup] dataset)",
        r"^verl\.trainer\.main_(eval|generation)": "trains nothing",
    },
)
