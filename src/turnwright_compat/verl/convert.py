"""verl: overrides and YAML of `verl.trainer.main_ppo`, and what a recipe has in their place.

`RULES` has a recipe key or a rule for each setting with a meaning here, `NONE` the reason for each
setting without one, and `MACHINE` those of machines, memory and logging. `_finish` decides what
several settings decide together: batches, the critic, turns, the agent loop, the teacher and the
schedule.

Nothing here reads a script or writes a recipe: `convert.engine.convert_source` applies the table.
"""

from __future__ import annotations

from typing import Any

from turnwright.errors import ConfigError
from turnwright_compat.convert.critic import (
    CLIP,
    CONSTANT,
    as_policy,
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
    eval_data,
    linear_layers,
    lists,
    minibatches,
    noted,
    python_name,
    router_replay,
    same,
    switch,
    temperature_of_eval,
    template_argument,
    template_arguments,
    top_k,
    trackers,
    train_data,
    unless_off,
)
from turnwright_compat.convert.hydra import read_document
from turnwright_compat.convert.sources import find_file

USE = "verl:tools"
"""How tools of verl are named (`turnwright_compat`); their files are settings of the
environment."""

# Starts of the keys of its configuration.
ACTOR = "actor_rollout_ref.actor."
ALGORITHM = "algorithm."
CORRECTION = "algorithm.rollout_correction."
CRITIC = "critic."
DATA = "data."
MODEL = "actor_rollout_ref.model."
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn."
ROLLOUT = "actor_rollout_ref.rollout."
TRAINER = "trainer."

_GIGPO_MODE = "episodes and turns are both divided by their deviations"
OWN_LOOPS = ("single_turn_agent", "tool_agent")
"""verl's own agent loops."""
PARSERS = {
    "hermes": "hermes",
    "llama3_json": "llama3",
    "gpt_oss": "harmony",
    "qwen3_coder": "qwen3_coder",
    "glm": "glm",
}
ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "gigpo": "gigpo",
}
"""Estimator -> algorithm; `gigpo` is that of verl-agent."""
KL_ESTIMATORS = {
    "kl": "k1",
    "k1": "k1",
    "abs": "k1",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}


# Rules of one setting


def _estimator_name(draft: Draft) -> str:
    """Return the estimator; verl's default is generalized advantages."""
    return str(draft.settings.get(f"{ALGORITHM}adv_estimator") or "gae")


def _has_critic(draft: Draft) -> bool:
    return _estimator_name(draft) == "gae"


def _estimator(draft: Draft, value: Any) -> str | None:
    if value is None:
        return None
    if value not in ESTIMATORS:
        # The default is another one.
        draft.left_out.add("train.algorithm")
        return "no such estimator here; write your own (train.advantage)"

    # A loss that is an algorithm of its own (`_loss`) has precedence.
    if "train.algorithm" not in draft.values:
        draft.put("train.algorithm", ESTIMATORS[value])
    return None


def _discount(draft: Draft, value: Any) -> str | None:
    """Convert the discount: per token with a critic, and per turn else; that of GiGPO, which is
    not 1 here by default, is in `_set_gigpo`."""
    if _estimator_name(draft) == "gigpo":
        return None
    key = "train.token_discount" if _has_critic(draft) else "train.discount"
    return unless_off(key, (1,))(draft, value)


def _of_gigpo(rule: Rule) -> Rule:
    """Return a rule of a setting that only GiGPO reads."""

    def checked(draft: Draft, value: Any) -> str | None:
        if _estimator_name(draft) != "gigpo":
            return f"{NO_EFFECT}: the estimator is not gigpo"
        return rule(draft, value)

    return checked


def _gigpo_mode(draft: Draft, value: Any) -> str:
    if value == "mean_std_norm":
        return f"{NO_EFFECT} at this value: {_GIGPO_MODE}"
    return f"{_GIGPO_MODE}; write your own (train.advantage)"


def _similarity(draft: Draft, value: Any) -> str:
    reason = "states are equal, or they are not (train.state)"
    enabled = draft.isset(f"{ALGORITHM}gigpo.enable_similarity")
    return reason if enabled else f"{NO_EFFECT} at this value ({reason})"


def _agent_environment(draft: Draft, value: Any) -> None:
    """Leave an environment of verl-agent to the user: it has another interface."""
    draft.put("env.use", f"{TO_DO}.py:Env")
    draft.incomplete.append(
        f"env.env_name = {value} is an environment of verl-agent: set [[env]] use = file.py:Class"
    )


def _loss(draft: Draft, value: Any) -> str | None:
    if value == "vanilla":
        return None
    return same("train.algorithm", gspo="gspo", cispo="cispo")(draft, value)


def _checkpoint_every(draft: Draft, value: Any) -> None:
    # A frequency of -1 saves no checkpoints.
    if int(value) > 0:
        draft.put("checkpoint.every", int(value))


def _sanity(draft: Draft, value: Any) -> str | None:
    """Convert the check of the tokenization: verl makes it at the end of each rollout, ours has a
    share of the episodes."""
    levels = {level: level for level in ("strict", "ignore_strippable", "disable", "off")}
    problem = same("rollout.sanity", **levels)(draft, value)
    if problem is None and str(value).lower() == "strict":
        draft.put("rollout.sanity_share", 1.0)
    return problem


# Rules over several settings


def _finish(draft: Draft) -> None:
    # The recipe's keys stand in the order in which they are put here.
    _set_batch(draft)
    _set_steps(draft)
    _set_loss_terms(draft)
    _set_environment(draft)
    _set_tool_defaults(draft)
    _set_teacher(draft)
    _set_schedule(draft)

    if _has_critic(draft):
        _set_critic(draft)
    if _estimator_name(draft) == "gigpo":
        _set_gigpo(draft)

    has_adapter = draft.number(f"{MODEL}lora_rank", 0) or draft.number(f"{MODEL}lora.rank", 0)
    if not has_adapter:
        for key in ("lora.alpha", "lora.targets", "lora.rank"):
            draft.values.pop(key, None)

    _set_correction(draft)


def _set_batch(draft: Draft) -> None:
    """Set the optimizer steps of a batch; asynchronous trainers have only minibatches, which are
    the batches then."""
    origin = f"{ACTOR}ppo_mini_batch_size"
    minibatch = draft.number(origin, 256)
    groups = draft.number(f"{DATA}train_batch_size", 1024)
    if groups > 0:
        minibatches(draft, minibatch, groups, origin)
    else:
        draft.values.pop("rollout.groups", None)
        draft.put("rollout.groups", int(minibatch), origin=origin)


def _set_steps(draft: Draft) -> None:
    """Set the epochs of the data, if the steps are not named, and the warm-up of the rate."""
    steps = draft.settings.get(f"{TRAINER}total_training_steps")
    if steps is None:
        epochs = draft.number(f"{TRAINER}total_epochs", 30)
        draft.put("train.data_epochs", epochs, origin=f"{TRAINER}total_epochs")

    warmup_key = f"{ACTOR}optim.lr_warmup_steps_ratio"
    warmup_share = draft.number(warmup_key, 0)
    if warmup_share <= 0:
        return
    if isinstance(steps, int):
        draft.put("train.lr_warmup_steps", int(warmup_share * steps), origin=warmup_key)
    else:
        draft.reasons[warmup_key] = (
            "the number of steps is known when the tasks are: set train.lr_warmup_steps to that "
            "share of them"
        )


def _set_critic(draft: Draft) -> None:
    """Set what trains the critic, and its warm-up, whose number is that of the first step in which
    the policy is trained too."""
    # A loss that is an algorithm of its own (`_loss`) has these advantages too.
    if draft.values.get("train.algorithm", "ppo") != "ppo":
        draft.put("train.advantage", "gae", origin=f"{ALGORITHM}adv_estimator")
    if "train.critic.lr" not in draft.values:
        draft.put("train.critic.lr", 1e-5, origin="verl's default")

    minibatch = draft.number(
        f"{CRITIC}ppo_mini_batch_size", draft.number(f"{ACTOR}ppo_mini_batch_size", 256)
    )
    groups = draft.values.get("rollout.groups", 1024)
    parts = 1
    if isinstance(groups, int) and minibatch > 0:
        parts = max(1, round(groups / minibatch))
    epochs = int(draft.number(f"{CRITIC}ppo_epochs", draft.number(f"{ACTOR}ppo_epochs", 1)))
    origin = f"{CRITIC}ppo_epochs, {CRITIC}ppo_mini_batch_size"
    set_critic(draft, updates=epochs * parts, parts=parts, origin=origin)
    note_clip(draft, f"{CRITIC}cliprange_value", 0.5)

    warmup_key = f"{TRAINER}critic_warmup"
    first = int(draft.number(warmup_key, 0))
    set_critic_warmup(draft, first - 1, warmup_key)
    if first > 1:
        draft.notes.append(
            f"{warmup_key} = {first} is the first step that trains the policy too: the critic is "
            f"trained alone in the {first - 1} before it"
        )


def _set_gigpo(draft: Draft) -> None:
    """Set the discount per turn and the states of verl-agent, which are observations."""
    discount_key = f"{ALGORITHM}gamma"
    draft.put("train.discount", draft.number(discount_key, 1.0), origin=discount_key)
    draft.put("train.state", "observation", origin=f"{ALGORITHM}adv_estimator")
    if f"{ALGORITHM}gigpo.mode" not in draft.settings:
        draft.notes.append(f"gigpo.mode is not set: {_GIGPO_MODE} here")


def _set_loss_terms(draft: Draft) -> None:
    settings = draft.settings
    if draft.isset(f"{ACTOR}use_kl_loss"):
        coefficient = draft.number(f"{ACTOR}kl_loss_coef", 0.001)
        draft.put("train.kl", coefficient, origin=f"{ACTOR}kl_loss_coef")
        draft.put("train.kl_in", "loss", origin=f"{ACTOR}use_kl_loss")
        draft.read(f"{ACTOR}kl_loss_type")
        estimator = settings.get(f"{ACTOR}kl_loss_type", "low_var_kl")
        same("train.kl_estimator", **KL_ESTIMATORS)(draft, estimator)
    elif draft.isset(f"{ALGORITHM}use_kl_in_reward"):
        coefficient = draft.number(f"{ALGORITHM}kl_ctrl.kl_coef", 0.001)
        draft.put("train.kl", coefficient, origin=f"{ALGORITHM}kl_ctrl.kl_coef")
        draft.put("train.kl_in", "reward", origin=f"{ALGORITHM}use_kl_in_reward")

    keeps_scale = settings.get(f"{ALGORITHM}norm_adv_by_std_in_grpo") is False
    if keeps_scale and _estimator_name(draft) == "grpo":
        draft.put("train.advantage", "mean", origin=f"{ALGORITHM}norm_adv_by_std_in_grpo")

    if draft.isset(f"{ALGORITHM}filter_groups.enable"):
        # There the first batch counts too, and 0 is no bound.
        rounds = int(draft.number(f"{ALGORITHM}filter_groups.max_num_gen_batches", 0)) - 1
        origin = f"{ALGORITHM}filter_groups.enable, {ALGORITHM}filter_groups.max_num_gen_batches"
        draft.put("train.refill", rounds if rounds >= 0 else 10, origin=origin)

    clip = draft.number(f"{ACTOR}clip_ratio", 0.2)
    for side in ("low", "high"):
        if f"{ACTOR}clip_ratio_{side}" not in settings:
            draft.put(f"train.clip_{side}", clip, origin=f"{ACTOR}clip_ratio")

    # Only this aggregation divides by a fixed length.
    if settings.get(f"{ACTOR}loss_agg_mode") != "seq-mean-token-sum-norm":
        draft.values.pop("train.fixed_length", None)


def _set_correction(draft: Draft) -> None:
    """Choose the correction of the engine's probabilities: weights, or what is masked."""
    settings = draft.settings
    weights = settings.get(f"{CORRECTION}rollout_is")
    masks = str(settings.get(f"{CORRECTION}rollout_rs"))
    threshold_key = f"{CORRECTION}rollout_is_threshold"

    if weights == "token":
        draft.put("train.correction", "tis", origin=f"{CORRECTION}rollout_is")
        highest = draft.number(threshold_key, 2.0)
        draft.put("train.correction_high", highest, origin=threshold_key)
    elif weights == "sequence" or "sequence" in masks:
        draft.put("train.correction", "sequence_mis", origin=f"{CORRECTION}rollout_is")
        highest = draft.number(threshold_key, 3.0)
        draft.put("train.correction_high", highest, origin=threshold_key)
    elif "geometric" in masks or "seq_mean" in masks:
        draft.put("train.correction", "sequence_mis_mean", origin=f"{CORRECTION}rollout_rs")
        mask_threshold = settings.get(f"{CORRECTION}rollout_rs_threshold")
        if isinstance(mask_threshold, int | float):
            origin = f"{CORRECTION}rollout_rs_threshold"
            draft.put("train.correction_high", mask_threshold, origin=origin)
    elif "token" in masks:
        draft.put("train.correction", "icepop", origin=f"{CORRECTION}rollout_rs")

    if "train.correction" in draft.values and draft.values.get("train.old_logprobs") == "engine":
        draft.values.pop("train.old_logprobs")
        draft.notes.append(
            "bypass_mode is left out: with a correction, the ratio's denominator is the trainer's "
            "policy"
        )


# Environment: reward, agent loop, turns and tools


def _set_environment(draft: Draft) -> None:
    _set_reward(draft)

    no_switch = f"{NO_EFFECT}: turns and tools need no switch here"
    draft.reasons[f"{MULTI_TURN}enable"] = no_switch
    draft.reasons[f"{ROLLOUT}multi_turn"] = no_switch

    has_agent_loop = _set_agent_loop(draft)
    _set_turns(draft, has_agent_loop)
    length = int(draft.number(f"{DATA}max_response_length", 512))
    draft.put("limits.turn_tokens", length, origin=f"{DATA}max_response_length")
    if "env.env_name" in draft.settings:
        _set_agent_limits(draft)


def _set_agent_limits(draft: Draft) -> None:
    """Leave out limits that verl-agent, whose rows are turns, has for a turn."""
    for key in ("limits.episode_tokens", "limits.prompt_tokens"):
        draft.values.pop(key, None)
        draft.left_out.add(key)
    draft.reasons[f"{DATA}max_prompt_length"] = (
        "it is the prompt of a turn there, with what is kept of those before: set limits.context"
    )


def _set_reward(draft: Draft) -> None:
    """Name the user's reward function; its settings are at the top or under `reward`."""
    settings = draft.settings
    path = settings.get("reward.custom_reward_function.path") or settings.get(
        "custom_reward_function.path"
    )
    if path is None:
        return

    name = (
        settings.get("reward.custom_reward_function.name")
        or settings.get("custom_reward_function.name")
        or "compute_score"
    )
    origin = (
        "reward.custom_reward_function.path, reward.custom_reward_function.name, "
        "custom_reward_function.path, custom_reward_function.name"
    )
    draft.put("env.args.reward", f"{path}:{name}", origin=origin)


def _set_agent_loop(draft: Draft) -> bool:
    """Name the agent loop of the user, if the settings do; return whether there is one."""
    loop_name = draft.settings.get(f"{ROLLOUT}agent.default_agent_loop")
    config = draft.settings.get(f"{ROLLOUT}agent.agent_loop_config_path")
    is_users = loop_name not in (None, *OWN_LOOPS)
    if not is_users and config is None:
        return False

    origin = f"{ROLLOUT}agent.agent_loop_config_path, {ROLLOUT}agent.default_agent_loop"
    loops = _loops_of(draft, config)
    if is_users and loop_name in loops:
        _use_loop(draft, loops[loop_name], origin)
        return True

    # The settings decide for a loop of verl, whatever others the file has.
    if loop_name in OWN_LOOPS:
        return True

    if len(loops) == 1 and not is_users:
        ((only_name, target),) = loops.items()
        draft.notes.append(
            f"rows name their loop there (agent_name); {only_name} is the one of the file, and "
            "plays all rows here"
        )
        _use_loop(draft, target, origin)
        return True

    # What is wrong with a file that could not be read is said already (`_loops_of`).
    if config is None or loops or is_users:
        listed = f"; the file has {', '.join(loops)}" if loops else ""
        draft.incomplete.append(
            f"the agent loop {loop_name or 'of each row'} is not read{listed}: set [[env]] use = "
            "file.py:Class"
        )
    draft.put("env.use", f"{TO_DO}.py:Loop", origin=origin)
    return True


def _use_loop(draft: Draft, target: str, origin: str) -> None:
    """Let a class of the user play, with the limits of tools where such a loop reads them."""
    draft.put("env.use", python_name(draft, target), origin=origin)

    tool_settings = {}
    for name in (
        "max_parallel_calls",
        "max_tool_response_length",
        "tool_config_path",
        "tool_response_truncate_side",
    ):
        if f"env.args.{name}" in draft.values:
            tool_settings[name] = draft.values.pop(f"env.args.{name}")

    # A loop reads them in its configuration.
    if tool_settings:
        tool_origin = ", ".join(f"{MULTI_TURN}{name}" for name in tool_settings)
        draft.put("env.args.rollout", {"multi_turn": tool_settings}, origin=tool_origin)


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
        document = read_document(path)
    except ConfigError as error:
        draft.incomplete.append(str(error))
        return {}

    loops: dict[str, str] = {}
    for row in document if isinstance(document, list) else []:
        if isinstance(row, dict) and row.get("_target_"):
            loops[str(row.get("name"))] = str(row["_target_"])
    return loops


def _set_turns(draft: Draft, has_agent_loop: bool) -> None:
    """Set the replies of an episode: as many as either bound allows, else all that fit, and one
    without tools and loops."""
    settings = draft.settings
    bounds: dict[str, int] = {}
    assistant_turns = settings.get(f"{MULTI_TURN}max_assistant_turns")
    if isinstance(assistant_turns, int) and assistant_turns > 0:
        bounds[f"{MULTI_TURN}max_assistant_turns"] = assistant_turns
    user_turns = settings.get(f"{MULTI_TURN}max_user_turns")
    if isinstance(user_turns, int) and user_turns > 0:
        # A last reply follows the last result.
        bounds[f"{MULTI_TURN}max_user_turns"] = user_turns + 1
    agent_turns = settings.get("env.max_steps")
    if isinstance(agent_turns, int) and agent_turns > 0:
        bounds["env.max_steps"] = agent_turns

    if bounds:
        tightest = min(bounds, key=lambda key: bounds[key])
        origin = ", ".join(dict.fromkeys([tightest, *bounds]))
        draft.put("limits.turns", bounds[tightest], origin=origin)
        return

    is_multi_turn = (
        settings.get(f"{MULTI_TURN}enable", settings.get(f"{ROLLOUT}multi_turn")) is True
    )
    calls_tools = settings.get(f"{ROLLOUT}agent.default_agent_loop") == "tool_agent"
    if not (is_multi_turn or has_agent_loop or calls_tools):
        draft.put("limits.turns", 1, origin=f"{MULTI_TURN}enable")
        return

    length = int(draft.number(f"{DATA}max_response_length", 512))
    origin = (
        f"{MULTI_TURN}max_assistant_turns, {MULTI_TURN}enable, {ROLLOUT}agent.default_agent_loop"
    )
    draft.put("limits.turns", length, origin=origin)
    draft.notes.append(
        "max_assistant_turns is not set, so turns are unlimited there: limits.turns is the tokens "
        "of an episode"
    )


def _set_tool_defaults(draft: Draft) -> None:
    """Set verl's limits of tool results where tools are given."""
    tool_files = ("tool_config_path", "function_tool_path", "interaction_config_path")
    has_tools = any(f"env.args.{name}" in draft.values for name in tool_files)
    if not has_tools or draft.values.get("env.use", USE) != USE:
        return

    for name, default in (("max_parallel_calls", 1), ("max_tool_response_length", 256)):
        if f"env.args.{name}" not in draft.values:
            draft.put(f"env.args.{name}", default, origin="verl's default")


# Teachers and schedules


def _set_teacher(draft: Draft) -> None:
    """Make the teacher of verl's distillation by policy gradients; refuse its other losses."""
    settings = draft.settings
    if settings.get("distillation.enabled") is not True:
        return

    loss = "distillation.distillation_loss."
    mode = settings.get(f"{loss}loss_mode", "k3")
    if mode != "k1" or settings.get(f"{loss}use_policy_gradient") is not True:
        raise ConfigError(
            f"distillation_loss.loss_mode = {mode} without use_policy_gradient is a loss that is "
            "not here; "
            'use k1 with policy gradients, or write the recipe with [[teacher]] signal = "loss" '
            "(docs/reference/teachers.md)"
        )
    teacher_paths = [
        value
        for key, value in settings.items()
        if key.startswith("distillation.teacher_models.") and key.endswith(".model_path")
    ]
    if len(teacher_paths) != 1:
        raise ConfigError(
            "distillation of several teachers by a column of rows; write a [[teacher]] for each, "
            "with environments"
        )

    draft.teacher["path"] = str(teacher_paths[0])
    draft.teacher["signal"] = "advantage"
    draft.teacher["weight"] = float(draft.number(f"{loss}distillation_loss_coef", 1.0))
    bound = draft.number(f"{loss}loss_max_clamp", 0)
    if bound:
        draft.teacher["bound"] = float(bound)
    draft.teacher_settings.update(key for key in settings if key.startswith("distillation."))
    if settings.get(f"{loss}use_task_rewards") is False:
        draft.put("train.reward_weight", 0.0, origin=f"{loss}use_task_rewards")


def _set_schedule(draft: Draft) -> None:
    """Choose the schedule of verl's asynchronous trainers."""
    program = str(draft.settings.get("$program"))
    if "fully_async" in program:
        draft.put("schedule.mode", "async", origin=program)
        _set_async_batch(draft)
    elif "one_step_off" in program:
        draft.put("schedule.mode", "one_step_off", origin=program)


def _set_async_batch(draft: Draft) -> None:
    """Set the groups of a step, which are several minibatches there, and the number of steps,
    which is counted in groups."""
    minibatch = draft.number(f"{ACTOR}ppo_mini_batch_size", 256)
    groups = minibatch * draft.number("async_training.require_batches", 1)
    origin = f"{ACTOR}ppo_mini_batch_size, async_training.require_batches"
    draft.put("rollout.groups", int(groups), origin=origin)

    all_groups = draft.number("rollout.total_rollout_steps", 0)
    if all_groups > 0:
        steps = max(1, int(all_groups / groups))
        draft.put("train.steps", steps, origin="rollout.total_rollout_steps")
        draft.values.pop("train.data_epochs", None)


RULES: dict[str, Any] = {
    f"{DATA}train_files": train_data,
    f"{DATA}val_files": eval_data,
    f"{DATA}prompt_key": "env.columns.prompt",
    f"{DATA}image_key": "env.columns.images",
    f"{DATA}video_key": "env.columns.videos",
    f"{DATA}max_prompt_length": "limits.prompt_tokens",
    f"{DATA}max_response_length": "limits.episode_tokens",
    f"{DATA}train_batch_size": "rollout.groups",
    f"{DATA}seed": unless_off("seed", (None,)),
    f"{DATA}return_multi_modal_inputs": "env.return_multi_modal_inputs",
    f"{DATA}apply_chat_template_kwargs": template_arguments,
    f"{DATA}tool_config_path": argument("tool_config_path"),
    f"{DATA}function_tool_path": argument("function_tool_path"),
    f"{ALGORITHM}adv_estimator": _estimator,
    f"{ALGORITHM}norm_adv_by_std_in_grpo": noted,
    f"{ALGORITHM}gamma": _discount,
    f"{ALGORITHM}gigpo.step_advantage_w": _of_gigpo(same("train.step_weight")),
    f"{ALGORITHM}gigpo.mode": _of_gigpo(_gigpo_mode),
    f"{ALGORITHM}gigpo.enable_similarity": _of_gigpo(_similarity),
    f"{ALGORITHM}gigpo.similarity_thresh": _of_gigpo(_similarity),
    f"{ALGORITHM}use_kl_in_reward": noted,
    f"{ALGORITHM}kl_penalty": noted,
    f"{ALGORITHM}kl_ctrl.kl_coef": noted,
    f"{ALGORITHM}filter_groups.enable": noted,
    f"{ALGORITHM}filter_groups.max_num_gen_batches": noted,
    f"{CORRECTION}rollout_is": noted,
    f"{CORRECTION}rollout_is_threshold": noted,
    f"{CORRECTION}rollout_rs": noted,
    f"{CORRECTION}rollout_rs_threshold": noted,
    f"{CORRECTION}bypass_mode": switch("train.old_logprobs", "engine"),
    f"{ACTOR}optim.lr": "train.lr",
    f"{ACTOR}optim.weight_decay": "train.weight_decay",
    f"{ACTOR}optim.betas": "train.betas",
    f"{ACTOR}optim.clip_grad": "train.max_grad_norm",
    f"{ACTOR}grad_clip": "train.max_grad_norm",
    f"{ACTOR}optim.lr_scheduler_type": same(
        "train.schedule", constant="constant", cosine="cosine", linear="linear"
    ),
    f"{ACTOR}optim.lr_decay_style": same(
        "train.schedule", constant="constant", cosine="cosine", linear="linear"
    ),
    f"{ACTOR}optim.lr_warmup_steps": unless_off("train.lr_warmup_steps"),
    f"{ACTOR}optim.lr_warmup_steps_ratio": noted,
    f"{ACTOR}ppo_mini_batch_size": noted,
    f"{ACTOR}ppo_max_token_len_per_gpu": "train.micro_tokens",
    f"{ACTOR}clip_ratio": noted,
    f"{ACTOR}clip_ratio_low": "train.clip_low",
    f"{ACTOR}clip_ratio_high": "train.clip_high",
    f"{ACTOR}clip_ratio_c": "train.clip_cap",
    f"{ACTOR}entropy_coeff": "train.entropy",
    f"{ACTOR}freeze_vision_tower": switch("train.vision", "frozen"),
    f"{ACTOR}policy_loss.loss_mode": _loss,
    f"{ACTOR}loss_agg_mode": same(
        "train.aggregation",
        token_mean="token",
        seq_mean_token_mean="trajectory",
        seq_mean_token_sum_norm="fixed",
    ),
    f"{ACTOR}loss_scale_factor": unless_off("train.fixed_length"),
    f"{ACTOR}use_kl_loss": noted,
    f"{ACTOR}kl_loss_coef": noted,
    f"{ACTOR}kl_loss_type": noted,
    f"{ACTOR}ppo_epochs": "train.epochs",
    f"{ACTOR}router_replay.mode": router_replay,
    f"{ROLLOUT}n": "rollout.group_size",
    f"{ROLLOUT}temperature": "rollout.temperature",
    f"{ROLLOUT}top_p": "rollout.top_p",
    f"{ROLLOUT}top_k": top_k("rollout.top_k"),
    f"{ROLLOUT}min_p": "rollout.min_p",
    f"{ROLLOUT}stop": lists("rollout.stop"),
    f"{ROLLOUT}max_model_len": unless_off("limits.context"),
    f"{ROLLOUT}response_length": "limits.episode_tokens",
    f"{ROLLOUT}prompt_length": "limits.prompt_tokens",
    f"{ROLLOUT}seed": unless_off("seed", (None,)),
    f"{ROLLOUT}enable_rollout_routing_replay": switch("train.routing_replay", "replay"),
    f"{ROLLOUT}val_kwargs.n": "eval.samples",
    f"{ROLLOUT}val_kwargs.temperature": temperature_of_eval,
    f"{ROLLOUT}val_kwargs.top_p": "eval.top_p",
    f"{ROLLOUT}val_kwargs.top_k": top_k("eval.top_k"),
    f"{ROLLOUT}multi_turn": noted,
    f"{MULTI_TURN}enable": noted,
    f"{MULTI_TURN}max_assistant_turns": noted,
    f"{MULTI_TURN}max_user_turns": noted,
    f"{MULTI_TURN}tool_config_path": argument("tool_config_path"),
    f"{MULTI_TURN}function_tool_path": argument("function_tool_path"),
    f"{MULTI_TURN}interaction_config_path": argument("interaction_config_path"),
    f"{ROLLOUT}tool_kwargs.tools_config_file": argument("tool_config_path"),
    f"{MULTI_TURN}max_parallel_calls": argument("max_parallel_calls"),
    f"{MULTI_TURN}max_tool_response_length": argument("max_tool_response_length"),
    f"{MULTI_TURN}tool_response_truncate_side": argument("tool_response_truncate_side"),
    f"{MULTI_TURN}use_inference_chat_template": switch("rollout.history", "template"),
    f"{MULTI_TURN}tokenization_sanity_check_mode": _sanity,
    f"{MULTI_TURN}format": same("model.parser", **PARSERS),
    f"{ROLLOUT}agent.default_agent_loop": noted,
    f"{ROLLOUT}agent.agent_loop_config_path": noted,
    f"{MODEL}path": "model.path",
    f"{MODEL}lora_rank": "lora.rank",
    f"{MODEL}lora_alpha": "lora.alpha",
    f"{MODEL}lora.rank": "lora.rank",
    f"{MODEL}lora.alpha": "lora.alpha",
    f"{MODEL}target_modules": linear_layers,
    f"{MODEL}enable_gradient_checkpointing": "train.gradient_checkpointing",
    "reward.custom_reward_function.path": noted,
    "reward.custom_reward_function.name": noted,
    "custom_reward_function.path": noted,
    "custom_reward_function.name": noted,
    f"{TRAINER}total_training_steps": unless_off("train.steps"),
    "rollout.total_rollout_steps": noted,
    "async_training.require_batches": noted,
    f"{TRAINER}total_epochs": noted,
    f"{TRAINER}test_freq": lambda draft, value: draft.put("eval.every", max(0, int(value))),
    f"{TRAINER}save_freq": _checkpoint_every,
    f"{TRAINER}max_actor_ckpt_to_keep": unless_off("checkpoint.keep"),
    f"{TRAINER}default_local_dir": "out",
    f"{TRAINER}logger": trackers,
    f"{TRAINER}project_name": "track.project",
    f"{TRAINER}experiment_name": "track.name",
    # verl-agent: the environment and its episodes.
    "env.env_name": _agent_environment,
    "env.max_steps": noted,
    "env.rollout.n": "rollout.group_size",
    **critic_rules(
        _has_critic,
        {
            f"{ALGORITHM}lam": unless_off("train.token_lambda", (1,)),
            f"{TRAINER}critic_warmup": noted,
            f"{CRITIC}optim.lr": "train.critic.lr",
            f"{CRITIC}optim.clip_grad": "train.critic.max_grad_norm",
            f"{CRITIC}grad_clip": "train.critic.max_grad_norm",
            f"{CRITIC}ppo_epochs": noted,
            f"{CRITIC}ppo_mini_batch_size": noted,
            f"{CRITIC}cliprange_value": (CLIP, ()),
            f"{CRITIC}model.path": begins_as_policy(f"{MODEL}path"),
            f"{CRITIC}model.lora_rank": as_policy(f"{MODEL}lora_rank", 0, "lora.rank"),
            f"{CRITIC}model.lora_alpha": as_policy(f"{MODEL}lora_alpha", 16, "lora.alpha"),
            f"{CRITIC}model.target_modules": as_policy(
                f"{MODEL}target_modules", "all-linear", "lora.targets"
            ),
            f"{CRITIC}optim.weight_decay": as_policy(
                f"{ACTOR}optim.weight_decay", 0.01, "train.weight_decay"
            ),
            f"{CRITIC}optim.betas": as_policy(f"{ACTOR}optim.betas", [0.9, 0.999], "train.betas"),
            f"{CRITIC}optim.lr_warmup_steps": (CONSTANT, (-1, 0, None)),
            f"{CRITIC}optim.lr_warmup_steps_ratio": (CONSTANT, (0, None)),
            f"{CRITIC}optim.lr_scheduler_type": (CONSTANT, ("constant", None)),
            f"{CRITIC}optim.warmup_style": (CONSTANT, ("constant", None)),
            f"{CRITIC}loss_agg_mode": ("its loss is a mean over values", ("token-mean",)),
            f"{CRITIC}shuffle": ("an update is on all values", (True, False)),
            f"{CRITIC}enable": ("the algorithm says whether there is one", (True, None)),
        },
    ),
}

_MANAGER = "the reward is the environment's: env.args.reward"
_TEACHER = "see [[teacher]]"
_DISTILLATION = (
    "loss_mode",
    "topk",
    "use_task_rewards",
    "distillation_loss_coef",
    "loss_max_clamp",
    "log_prob_min_clamp",
    "use_policy_gradient",
    "policy_loss_mode",
    "clip_ratio",
    "clip_ratio_low",
    "clip_ratio_high",
)
"""Settings of the loss of a distillation."""
NONE: dict[str, tuple[str, tuple[Any, ...]]] = {
    "distillation.enabled": (_TEACHER, (False,)),
    **{f"distillation.distillation_loss.{name}": (_TEACHER, ()) for name in _DISTILLATION},
    "distillation.teacher_key": (_TEACHER, ()),
    f"{DATA}reward_fn_key": (
        "every column of a row reaches the reward under its own name",
        ("data_source",),
    ),
    f"{DATA}audio_key": ("no audio", ("audios",)),
    f"{DATA}shuffle": ("tasks are always shuffled, by the seed", (True,)),
    f"{DATA}validation_shuffle": ("an evaluation plays every held-out task", (False,)),
    f"{DATA}truncation": (
        "prompts over limits.prompt_tokens are skipped, counted and listed",
        ("error",),
    ),
    f"{DATA}filter_overlong_prompts": (
        "prompts over limits.prompt_tokens are skipped, counted and listed",
        (True,),
    ),
    f"{DATA}train_max_samples": ("all rows are used; cut the file", (-1,)),
    f"{DATA}val_max_samples": ("see eval.tasks", (-1,)),
    f"{DATA}custom_cls.path": ("write [[env]] tasks = file.py:function", (None,)),
    f"{DATA}custom_cls.name": ("write [[env]] tasks = file.py:function", (None,)),
    f"{DATA}mm_processor_kwargs": (
        "images are processed by the model directory's settings",
        ({}, None),
    ),
    f"{DATA}return_raw_chat": ("messages are kept", (True, False)),
    f"{DATA}gen_batch_size": ("see [schedule]", ()),
    f"{DATA}mask_truncated": ("see train.overlong_filter", (False,)),
    f"{ALGORITHM}filter_groups.metric": (
        "write train.group_filter",
        ("seq_reward", "seq_final_reward", "acc", "score", None),
    ),
    f"{ALGORITHM}kl_ctrl.type": ("the weight of the KL term is constant", ("fixed",)),
    f"{ALGORITHM}kl_ctrl.horizon": ("the weight of the KL term is constant", ()),
    f"{ALGORITHM}kl_ctrl.target_kl": ("the weight of the KL term is constant", ()),
    f"{ALGORITHM}use_pf_ppo": ("no sampling of trajectories by reward", (False,)),
    f"{CORRECTION}rollout_is_batch_normalize": ("correction weights are not normalized", (False,)),
    f"{CORRECTION}loss_type": ("see train.algorithm", ()),
    f"{CORRECTION}rollout_token_veto_threshold": ('see train.correction = "icepop"', (None,)),
    f"{ACTOR}tau_pos": ("write your own (train.algorithm)", ()),
    f"{ACTOR}tau_neg": ("write your own (train.algorithm)", ()),
    f"{ACTOR}policy_loss.clip_cov_ratio": ("write your own (train.algorithm)", ()),
    f"{ACTOR}policy_loss.kl_cov_ratio": ("write your own (train.algorithm)", ()),
    f"{ACTOR}policy_loss.dro_beta": ("write your own (train.algorithm)", (None,)),
    f"{ACTOR}shuffle": ("minibatches are shuffled at every step", (False, True)),
    f"{ACTOR}calculate_entropy": ("the entropy is exact and always measured", (False, True)),
    f"{ACTOR}optim.optimizer": ("AdamW is the optimizer", ("AdamW", "adam")),
    f"{ACTOR}optim.min_lr_ratio": ("the rate decays to 0", (0, 0.0, None)),
    f"{ACTOR}optim.num_cycles": ("half a cosine", (0.5,)),
    f"{ACTOR}optim.warmup_style": ("see train.schedule", (None, "constant")),
    f"{ACTOR}optim.lr_warmup_init": ("the rate rises from a share of its peak", (0,)),
    f"{ROLLOUT}over_sample_rate": (
        "train.refill asks for more groups only where some are replaced",
        (0,),
    ),
    f"{ROLLOUT}ignore_eos": ("a reply ends at the template's end tokens", (False,)),
    f"{ROLLOUT}repetition_penalty": (
        "no penalties: they would not be part of the trained distribution",
        (1, 1.0),
    ),
    f"{ROLLOUT}val_kwargs.do_sample": (
        "evaluations are played sampled, and greedily with eval.greedy",
        (),
    ),
    f"{ROLLOUT}do_sample": ("training samples", (True,)),
    f"{ROLLOUT}single_turn_response_length": (
        "a reply has the limit of the episode; set limits.turn_tokens",
        (None,),
    ),
    f"{ROLLOUT}calculate_log_probs": ("logprobs of sampled ids are always returned", (True,)),
    f"{MULTI_TURN}num_repeat_rollouts": ("see rollout.group_size", (None,)),
    f"{ROLLOUT}skip_tokenizer_init": ("machine", (True,)),
    f"{MODEL}custom_chat_template": (
        "a template is a file here: write it to chat.jinja and set model.template",
        (None,),
    ),
    f"{MODEL}trust_remote_code": ("no code of model directories is run", (False,)),
    "reward.reward_manager.name": (_MANAGER, ("naive",)),
    "reward_model.reward_manager": (_MANAGER, ("naive",)),
    "reward.reward_manager.module.path": (_MANAGER, ()),
    "reward.reward_manager.module.name": (_MANAGER, (None,)),
    f"{ALGORITHM}filter_groups.max_inflight_gen_batches": ("see train.refill", ()),
    f"{ALGORITHM}pf_ppo.reweight_method": ("no sampling of trajectories by reward", ("pow",)),
    f"{ALGORITHM}pf_ppo.weight_pow": ("no sampling of trajectories by reward", (2.0, 2)),
    "reward.num_workers": ("rewards run beside the episodes; see env.reward_isolation", ()),
    "reward_model.enable": (
        "no reward model served by the trainer; call yours in the reward",
        (False,),
    ),
    f"{TRAINER}val_before_train": ("the policy is always evaluated before reinforcement", (True,)),
    f"{TRAINER}val_only": ("`turnwright eval`", (False,)),
    f"{TRAINER}resume_mode": ("a run continues with --resume", ("auto", "disable")),
    f"{TRAINER}log_val_generations": ("the viewer has every episode", ()),
    f"{TRAINER}rollout_data_dir": ("the run directory has every episode", ()),
    f"{TRAINER}validation_data_dir": ("the run directory has every episode", ()),
    f"{TRAINER}balance_batch": ("passes are packed by tokens", (True, False)),
    "async_training.staleness_threshold": ('see [schedule] mode = "async" and staleness', ()),
    "async_training.trigger_parameter_sync_step": ("weights are sent after every step", (1,)),
    "async_training.partial_rollout": ('see [schedule] mode = "async" and engine.in_flight', ()),
}

MACHINE = (
    # Engines: their kind, memory, batching and servers.
    f"{ROLLOUT}*gpu*",
    f"{ROLLOUT}name",
    f"{ROLLOUT}mode",
    f"{ROLLOUT}*parallel*",
    f"{ROLLOUT}dtype",
    f"{ROLLOUT}enforce_eager",
    f"{ROLLOUT}*cache*",
    f"{ROLLOUT}max_num_*",
    f"{ROLLOUT}log_prob_*",
    f"{ROLLOUT}engine_kwargs*",
    f"{ROLLOUT}enable_*",
    f"{ROLLOUT}load_format",
    f"{ROLLOUT}layered_summon",
    f"{ROLLOUT}disable_log_stats",
    f"{ROLLOUT}checkpoint_engine*",
    f"{ROLLOUT}quantization*",
    f"{ROLLOUT}nnodes",
    f"{ROLLOUT}update_weights*",
    f"{ROLLOUT}cudagraph*",
    f"{ROLLOUT}multi_stage*",
    f"{ROLLOUT}scheduling_policy",
    f"{ROLLOUT}logprobs_mode",
    f"{ROLLOUT}mtp*",
    f"{ROLLOUT}skip_rollout*",
    f"{ROLLOUT}free_*",
    f"{ROLLOUT}disaggregation*",
    f"{ROLLOUT}full_determinism",
    f"{ROLLOUT}use_*",
    f"{ROLLOUT}moe_*",
    f"{ROLLOUT}qat*",
    # Engines: workers, traces and profiles.
    f"{ROLLOUT}agent.num_workers",
    f"{ROLLOUT}agent.custom_async_server*",
    f"{ROLLOUT}trace*",
    f"{ROLLOUT}prometheus*",
    f"{ROLLOUT}profiler*",
    # The reference, what is left of the critic, and how they share machines.
    "actor_rollout_ref.ref.*",
    "actor_rollout_ref.hybrid_engine",
    "actor_rollout_ref.nccl_timeout",
    "critic.*",
    # The actor: parallelism, memory and kernels.
    f"{ACTOR}fsdp_config*",
    f"{ACTOR}megatron*",
    f"{ACTOR}*micro_batch*",
    f"{ACTOR}strategy",
    f"{ACTOR}*parallel*",
    f"{ACTOR}use_dynamic_bsz",
    f"{ACTOR}use_torch_compile",
    f"{ACTOR}use_fused*",
    f"{ACTOR}use_remove*",
    f"{ACTOR}entropy_*",
    f"{ACTOR}checkpoint*",
    f"{ACTOR}profiler*",
    f"{ACTOR}data_loader*",
    f"{ACTOR}veomni*",
    f"{ACTOR}qat*",
    f"{ACTOR}pad_*",
    f"{ACTOR}router_replay.*",
    f"{ACTOR}use_rollout_log_probs",
    # The actor's optimizer.
    f"{ACTOR}optim.*offload*",
    f"{ACTOR}optim.override*",
    f"{ACTOR}optim.optimizer_*",
    f"{ACTOR}optim.total_training_steps",
    f"{ACTOR}optim.zero_*",
    f"{ACTOR}optim.lr_decay_steps",
    # The model: kernels, and adapters as they are stored.
    f"{MODEL}use_*",
    f"{MODEL}override_*",
    f"{MODEL}enable_activation*",
    f"{MODEL}external_lib",
    f"{MODEL}fused_*",
    f"{MODEL}tokenizer_path",
    f"{MODEL}exclude_modules",
    f"{MODEL}lora.*",
    f"{MODEL}mtp*",
    f"{MODEL}tiled_mlp*",
    f"{MODEL}hf_config_path",
    f"{MODEL}lora_adapter_path",
    "model_engine",
    # The trainer: machines, checkpoints and profiles.
    f"{TRAINER}nnodes",
    f"{TRAINER}n_gpus_per_node",
    f"{TRAINER}device",
    f"{TRAINER}use_legacy*",
    f"{TRAINER}ray_*",
    f"{TRAINER}*esi*",
    f"{TRAINER}default_hdfs_dir",
    f"{TRAINER}del_local*",
    f"{TRAINER}max_critic*",
    f"{TRAINER}resume_from*",
    f"{TRAINER}npu_*",
    f"{TRAINER}use_v1*",
    f"{TRAINER}v1.*",
    f"{TRAINER}remove_*",
    "ray_*",
    "global_profiler*",
    "rollout.n*",
    "async_training.*",
    "transfer_queue*",
    # Rewards: models and sandboxes that are served.
    "reward.reward_model*",
    "reward_model.*",
    "reward.sandbox*",
    "reward.reward_manager.source",
    "sandbox_fusion*",
    # Data: loaders and samplers.
    f"{DATA}dataloader*",
    f"{DATA}filter_overlong_prompts_workers",
    f"{DATA}use_shm",
    f"{DATA}return_*",
    f"{DATA}trust_remote*",
    f"{DATA}image_patch*",
    f"{DATA}sampler*",
    f"{DATA}datagen*",
    f"{DATA}tokenizer",
    f"{DATA}val_batch_size",
    "custom_cls*",
    # Machines of teachers.
    "distillation.*n_gpus*",
    "distillation.nnodes",
    "distillation.*.inference.*",
    "distillation.*num_replicas",
    # Hydra, and what a configuration is made of.
    "hydra.*",
    "--*",
    "defaults",
    "*._target_",
    "skip.*",
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
        "train.algorithm": "ppo",
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
        (f"{DATA}apply_chat_template_kwargs.*", template_argument),
        ("distillation.teacher_models.*", lambda draft, key, value: "see [[teacher]]"),
    ),
    programs=(
        r"^verl(\.trainer\.main_ppo\w*|\.experimental\.[\w.]*(main\w*|fully_async\w*))?$"
        r"|(^|/)main_ppo\.py$|fully_async_main\.py$"
    ),
    refused={
        r"^verl\..*sft_trainer|fsdp_sft": "trains on given replies (see [warmup] dataset)",
        r"^verl\.trainer\.main_(eval|generation)": "trains nothing",
    },
)
