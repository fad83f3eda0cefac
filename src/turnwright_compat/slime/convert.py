"""slime (and Miles): flags of `train.py`."""

from __future__ import annotations

import re
from typing import Any

from turnwright.errors import ConfigError
from turnwright_compat.convert.engine import (
    NO_EFFECT,
    TO_DO,
    Draft,
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
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}


def _estimator(draft: Draft, value: Any) -> str | None:
    if value == "ppo":
        raise ConfigError(
            "advantage-estimator = ppo trains with a critic, which is not here; choose "
            f"{', '.join(ALGORITHMS)}"
        )
    return same("train.algorithm", **ALGORITHMS)(draft, value)


NONZERO_STD = "check_reward_nonzero_std"


def _response_length(draft: Draft, value: Any) -> None:
    """The budget of an episode: observations use it up too, and one reply may take all of it."""
    draft.put("limits.turn_tokens", value)
    draft.put("limits.episode_tokens", value)


def _generate(draft: Draft, value: Any) -> None:
    if "env.use" not in draft.values:
        draft.put("env.use", python_name(draft, str(value)))


def _custom_config(draft: Draft, value: Any) -> None:
    """Read the file of a custom loop, if it is near the script: its turns, and its
    environment for our loop."""
    draft.put("env.args.custom_config_path", value)
    path = find_file(str(value), draft.folder)
    if path is None:
        draft.incomplete.append(
            f"{value} (custom-config-path) was not found: set limits.turns to its max_turns"
        )
        return
    draft.put("env.args.custom_config_path", str(path))
    table = dict(
        (key.strip(), plain_value(text.strip()))
        for key, colon, text in (
            line.partition("#")[0].partition(":") for line in path.read_text("utf-8").splitlines()
        )
        if colon and key.strip() and text.strip()
    )
    if isinstance(table.get("max_turns"), int):
        draft.put("limits.turns", table["max_turns"])
    if isinstance(environment := table.get("rollout_interaction_env_path"), str):
        draft.put("env.use", python_name(draft, f"{environment}.build_env"))
        draft.notes.append(
            "our loop plays the environment of rollout_interaction_env_path, in place of the "
            "custom generate"
        )


def _eval_data(draft: Draft, value: Any) -> str | None:
    given = [str(one) for one in (value if isinstance(value, list) else [value])]
    paths = given[1::2] or given
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
    if str(value).endswith(NONZERO_STD):
        draft.put("train.refill", 3)
        return None
    if str(value).startswith(("slime.", "miles.")):
        return own_function("train.group_filter")(draft, value)
    draft.put("train.group_filter", python_name(draft, str(value)))
    return None


FULLY_ASYNC = re.compile(
    r"(?:^|\.)fully_async_rollout\.(?:generate_rollout_fully_async|FullyAsyncRolloutFn)$"
)
"""The systems' own rollouts that sample all the time, also a copy of their file."""
OWN_ROLLOUTS = re.compile(
    r"^(?:slime|miles)\.rollout\.(?:sglang_rollout\.generate_rollout|inference_rollout\.[\w.]*|[\w.]*InferenceRolloutFn)$"
)
"""The systems' own rollouts that our loop is."""
SUPERVISED = re.compile(r"(?:^|\.)sft_rollout\.")
_HOOKS = (
    "write what it does as a custom generate function (use), a reward (custom_rm_path), a filter "
    "of groups (train.group_filter) or tasks (file.py:function)"
)


def _rollout(draft: Draft) -> None:
    """Choose the schedule by the program and by the function for a step; name
    one that is the user's."""
    function, program = (
        str(draft.settings.get("rollout-function-path") or ""),
        str(draft.settings.get("$program")),
    )
    if SUPERVISED.search(function) or draft.settings.get("loss-type") in ("sft_loss", "sft"):
        raise ConfigError(
            f"trains on given replies ({function or 'loss-type sft_loss'}); see [warmup] dataset "
            "in docs/training.md"
        )
    if draft.isset("fully-async"):
        draft.put("schedule.mode", "async", origin="fully-async")
    elif FULLY_ASYNC.search(function):
        draft.put("schedule.mode", "async", origin="rollout-function-path")
    elif program.endswith("train_async.py"):
        draft.put("schedule.mode", "one_step_off", origin=program)
    if (
        draft.values.get("schedule.mode") == "async"
        and draft.number("max-weight-staleness", 0) >= 1
    ):
        draft.put(
            "schedule.staleness",
            int(draft.number("max-weight-staleness", 0)),
            origin="max-weight-staleness",
        )
    if function and not FULLY_ASYNC.search(function) and not OWN_ROLLOUTS.search(function):
        draft.reasons["rollout-function-path"] = f"a function for a step is not run here: {_HOOKS}"
        draft.incomplete.append(
            f"rollout-function-path = {function} plays a step by itself, which is not run here: "
            f"{_HOOKS}"
        )
    elif function:
        draft.reasons["rollout-function-path"] = (
            f"{NO_EFFECT} at this value: our loop plays what it plays"
        )


def _teacher(draft: Draft) -> None:
    """Make the teacher of on-policy distillation: its log probabilities are added to the
    advantages there too."""
    given = draft.settings
    if not draft.isset("use-opd"):
        return
    draft.teacher["signal"] = "advantage"
    draft.teacher["weight"] = draft.number("opd-kl-coef", 1.0)
    draft.teacher_settings.update(("use-opd", "opd-kl-coef", "opd-type"))
    urls = given.get("opd-teacher-urls", given.get("rm-url"))
    if given.get("opd-type") == "megatron" or "opd-teacher-load" in given:
        draft.teacher["path"] = f"{TO_DO}/teacher"
        load = given.get("opd-teacher-load")
        draft.incomplete.append(
            f"opd-teacher-load = {load} is a checkpoint of Megatron: set the path of [[teacher]] "
            "to its directory"
        )
        draft.teacher_settings.add("opd-teacher-load")
    elif urls:
        several = urls if isinstance(urls, list) else [urls]
        draft.teacher["urls"] = [re.sub(r"/generate/?$", "", str(one)) for one in several]
        draft.teacher_settings.update(("rm-url", "opd-teacher-urls"))
        draft.values.pop("env.args.rm_url", None)
    else:
        raise ConfigError(
            "use-opd names no teacher (opd-teacher-load or rm-url); write a [[teacher]] with its "
            "path"
        )
    if "on_policy_distillation.reward_func" in str(given.get("custom-rm-path")):
        # It asks the teacher, and rewards nothing.
        draft.values.pop("env.args.custom_rm_path", None)
        draft.teacher_settings.update(("custom-rm-path", "custom-reward-post-process-path"))
        draft.put("train.reward_weight", 0.0, origin="custom-rm-path")


def _lora(draft: Draft) -> None:
    """Set the adapter of Miles' flags."""
    rank = int(draft.number("lora-rank", 0))
    if rank <= 0:
        for key in ("alpha", "dropout", "targets", "rank"):
            draft.values.pop(f"lora.{key}", None)
        return
    draft.put("lora.rank", rank, origin="lora-rank")
    draft.put("lora.alpha", draft.number("lora-alpha", 16), origin="lora-alpha")


def _targets(draft: Draft, value: Any) -> str | None:
    if value in ("all-linear", None):
        return None
    names = [one.strip() for one in str(value).split(",") if one.strip()]
    if megatron := [one for one in names if one.startswith("linear_")]:
        draft.incomplete.append(
            f"target-modules has names of Megatron ({', '.join(megatron)}): set lora.targets "
            "(q_proj, ...)"
        )
        return "names of Megatron: set lora.targets"
    draft.put("lora.targets", names)
    return None


def _finish(draft: Draft) -> None:
    _rollout(draft)
    _teacher(draft)
    _lora(draft)
    given, batch = (
        draft.settings,
        draft.number("rollout-batch-size", 0) * draft.number("n-samples-per-prompt", 1),
    )
    if "num-steps-per-rollout" not in given and "global-batch-size" in given:
        minibatches(draft, draft.number("global-batch-size", 0), batch, "global-batch-size")
    replaced = given.get("rollout-function-path")
    if "env.use" not in draft.values and not (
        replaced and "rollout-function-path" in " ".join(draft.incomplete)
    ):
        draft.put("env.use", "slime:generate", origin="no custom-generate-function-path")
    if "num-epoch" in given and "num-rollout" not in given:
        draft.put("train.data_epochs", given["num-epoch"], origin="num-epoch")
    if draft.isset("use-kl-loss") and draft.number("kl-loss-coef", 0):
        draft.put("train.kl", draft.number("kl-loss-coef", 0), origin="kl-loss-coef")
        draft.put("train.kl_in", "loss", origin="use-kl-loss")
    elif draft.number("kl-coef", 0):
        draft.put("train.kl", draft.number("kl-coef", 0), origin="kl-coef")
        draft.put("train.kl_in", "reward", origin="kl-coef")
        draft.put("train.kl_estimator", "k1", origin="kl-coef")
    if "eps-clip-high" not in given:
        draft.put("train.clip_high", draft.number("eps-clip", 0.2), origin="eps-clip")
    if draft.number("lr-warmup-iters", 0) > 0:
        in_steps(
            draft,
            "train.lr_warmup_steps",
            draft.number("lr-warmup-iters", 0),
            draft.values.get("train.minibatches", 1),
            "lr-warmup-iters",
        )
    betas = [draft.number("adam-beta1", 0.9), draft.number("adam-beta2", 0.999)]
    draft.put("train.betas", betas, origin="adam-beta1, adam-beta2")
    if "use-tis" not in given:
        for key in ("train.correction_low", "train.correction_high"):
            draft.values.pop(key, None)


RULES: dict[str, Any] = {
    "hf-checkpoint": "model.path",
    "apply-chat-template-kwargs": lambda draft, value: (
        [draft.put(f"model.template_args.{k}", v) for k, v in value.items()] and None
    ),
    "prompt-data": train_data,
    "eval-prompt-data": _eval_data,
    "input-key": "env.columns.prompt",
    "label-key": "env.columns.answer",
    "metadata-key": unless_off("env.columns.metadata", ("metadata",)),
    "tool-key": unless_off("env.columns.tools", ("tools",)),
    "multimodal-keys": _multimodal,
    "custom-generate-function-path": _generate,
    "custom-config-path": _custom_config,
    "custom-rm-path": argument("custom_rm_path"),
    "rm-type": argument("rm_type"),
    "rm-url": argument("rm_url"),
    "reward-key": argument("reward_key"),
    "eval-reward-key": argument("eval_reward_key"),
    "group-rm": argument("group_rm"),
    "num-rollout": "train.steps",
    "num-epoch": noted,
    "rollout-batch-size": "rollout.groups",
    "n-samples-per-prompt": "rollout.group_size",
    "rollout-temperature": "rollout.temperature",
    "rollout-top-p": "rollout.top_p",
    "rollout-top-k": top_k("rollout.top_k"),
    "rollout-stop": lists("rollout.stop"),
    "rollout-max-response-len": _response_length,
    "rollout-max-context-len": "limits.context",
    "rollout-max-prompt-len": "limits.prompt_tokens",
    "max-seq-len": "limits.context",
    "generate-max-turns": "limits.turns",
    "dynamic-sampling-filter-path": _filter,
    "advantage-estimator": _estimator,
    "disable-grpo-std-normalization": switch("train.advantage", "mean"),
    "calculate-per-token-loss": switch("train.aggregation", "token"),
    "eps-clip": "train.clip_low",
    "eps-clip-high": "train.clip_high",
    "eps-clip-c": "train.clip_cap",
    "entropy-coef": "train.entropy",
    "gamma": lambda draft, value: draft.put("train.discount", value) if value != 1 else None,
    "use-kl-loss": noted,
    "kl-loss-coef": noted,
    "kl-coef": noted,
    "kl-loss-type": same("train.kl_estimator", k1="k1", k2="k2", k3="k3", low_var_kl="k3"),
    "ref-update-interval": unless_off("train.reference_every"),
    "lr": "train.lr",
    "lr-decay-style": same("train.schedule", constant="constant", linear="linear", cosine="cosine"),
    "lr-warmup-iters": noted,
    "rollout-function-path": noted,
    "fully-async": noted,
    "max-weight-staleness": noted,
    "lora-rank": noted,
    "lora-alpha": noted,
    "lora-dropout": "lora.dropout",
    "target-modules": _targets,
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
    "use-tis": switch("train.correction", "tis"),
    "tis-clip": "train.correction_high",
    "tis-clip-low": lambda draft, value: "tis has no lower bound here" if value else None,
    "use-rollout-logprobs": switch("train.old_logprobs", "engine"),
    "use-rollout-routing-replay": switch("train.routing_replay", "replay"),
    "seed": "seed",
    "rollout-seed": "seed",
    "save": "out",
    "save-interval": "checkpoint.every",
    "eval-interval": "eval.every",
    "n-samples-per-eval-prompt": "eval.samples",
    "eval-temperature": temperature_of_eval,
    "eval-top-p": "eval.top_p",
    "eval-top-k": top_k("eval.top_k"),
    "use-wandb": switch("track.to", ["wandb"]),
    "use-tensorboard": switch("track.to", ["tensorboard"]),
    "wandb-project": "track.project",
    "wandb-group": "track.name",
    "tb-project-name": "track.project",
    "tb-experiment-name": "track.name",
    "custom-advantage-function-path": own_function("train.advantage"),
    "custom-loss-function-path": own_function("train.algorithm"),
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
    "lambd": ("no critic, so no GAE", (1, 1.0)),
    "value-clip": ("no critic", ()),
    "num-critic-only-steps": ("no critic", (0,)),
    "use-opsm": ("see train.correction = sequence_mis_mean", (False,)),
    "opsm-delta": ("see train.correction = sequence_mis_mean", ()),
    "use-unbiased-kl": ("see train.kl_estimator = k2, whose gradient is that of the KL", (False,)),
    "normalize-advantages": ('see train.advantage = "batch"', (False,)),
    "disable-rewards-normalization": ("see train.advantage", (False,)),
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
    "critic-lr": ("no critic", ()),
    "critic-load": ("no critic", ()),
    "critic-save": ("no critic", ()),
    "critic-lr-warmup-iters": ("no critic", ()),
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
    *(
        "*-parallel-size",
        "*-parallel",
        "sglang-*",
        "actor-num-*",
        "critic-num-*",
        "rollout-num-gpus*",
    ),
    *(
        "num-gpus-per-node",
        "colocate",
        "offload*",
        "*-backend",
        "train-env-vars",
        "recompute-*",
        "micro-batch-size",
    ),
    *("use-dynamic-batch-size", "balance-*", "data-pad-size-multiplier", "log-probs-*", "wandb-*"),
    *(
        "disable-wandb-*",
        "log-*",
        "distributed-*",
        "update-weight*",
        "rollout-health-*",
        "use-fault-tolerance",
    ),
    *(
        "rollout-external-*",
        "http-proxy",
        "use-distributed-post",
        "accumulate-*",
        "attention-softmax-*",
    ),
    *("attention-backend", "rotary-*", "num-layers", "hidden-size", "ffn-*", "num-attention-heads"),
    *(
        "group-query-attention",
        "num-query-groups",
        "swiglu",
        "use-rotary*",
        "disable-bias*",
        "normalization",
    ),
    *(
        "norm-epsilon",
        "vocab-size",
        "kv-channels",
        "qk-layernorm",
        "moe-*",
        "untie-*",
        "add-qkv-bias",
    ),
    *(
        "make-vocab-*",
        "max-position-*",
        "position-embedding-*",
        "no-*",
        "save-debug-*",
        "load-debug-*",
        "debug-*",
    ),
    *(
        "dump-*",
        "profile*",
        "memory-*",
        "record-*",
        "ci-*",
        "check-weight-*",
        "tensorboard-*",
        "use-precision-*",
    ),
    *("overlap-*", "optimizer-cpu-offload", "use-cpu-*", "megatron-*", "custom-megatron-*"),
    *(
        "custom-model-provider-path",
        "model-name",
        "async-save",
        "save-hf",
        "mtp-*",
        "enable-mtp-*",
        "qwen-gdn-*",
    ),
    *(
        "allgather-cp",
        "context-parallel-*",
        "use-routing-replay",
        "custom-update-weight-*",
        "rollout-data-*",
    ),
    *(
        "rollout-buffer-url",
        "fetch-*",
        "use-stateless-adam",
        "release-train",
        "padded-vocab-size",
        "train-backend",
    ),
    *(
        "spec",
        "ref-ckpt-step",
        "reset-optimizer-states",
        "use-flash-*",
        "bf16",
        "fp16",
        "transformer-impl",
    ),
    *(
        "cross-entropy-*",
        "sequence-parallel",
        "freeze-indexer",
        "recompute-loss-function",
        "use-mcore-*",
        "fp8-*",
    ),
    *(
        "te-*",
        "deterministic-*",
        "use-distributed-optimizer",
        "tokenizer-*",
        "seq-length",
        "train-iters",
    ),
    *(
        "lr-decay-iters",
        "num-experts",
        "use-gated-attention",
        "apply-layernorm-1p",
        "attention-output-gate",
    ),
    *(
        "multi-latent-attention",
        "q-lora-rank",
        "kv-lora-rank",
        "qk-*",
        "v-head-dim",
        "expert-*",
        "prefill-*",
    ),
    *(
        "ray-*",
        "yaml-cfg",
        "attn-implementation",
        "use-miles-dashboard",
        "dashboard-*",
        "use-prometheus",
        "prometheus-*",
    ),
    *(
        "grad-reduce-*",
        "router-health-*",
        "save-retain-interval",
        "check-*",
        "dumper-*",
        "mlflow-*",
        "use-mlflow",
    ),
    *(
        "lora-sync-from-tensor",
        "lora-base-cpu-backup",
        "multi-lora-*",
        "miles-router-*",
        "use-miles-router",
    ),
    *(
        "mooncake-*",
        "mini-ft-*",
        "ft-components",
        "indep-dp",
        "witness-*",
        "enable-witness",
        "enable-event-analyzer",
    ),
    *(
        "env-report",
        "eval-hf-dir",
        "eval-keep-snapshots",
        "eval-max-in-flight",
        "eval-num-gpus*",
        "extra-high-precision-*",
    ),
    *(
        "low-memory-resume",
        "mfu-*",
        "observe-training-entropy",
        "p2p-transfer-*",
        "pin-rollout-manager-to-head",
        "qkv-format",
    ),
    *(
        "rematerialize-*",
        "rollout-external",
        "save-local-weight-checksum",
        "save-trigger-sentinel",
        "skip-actor-forward-only",
    ),
    *(
        "stream-optimizer-*",
        "train-memory-margin-bytes",
        "control-server-port",
        "delay-split-train-data-by-dp",
    ),
    *(
        "decoder-*",
        "router-*",
        "finetune",
        "exp-avg-*",
        "main-params-dtype",
        "main-grads-dtype",
        "ref-micro-batch-size",
    ),
    *("load-forge-rollout-data", "log", "cp-comm-type", "calculate-per-layer-*"),
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
