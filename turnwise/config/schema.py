"""Config sections; each field carries type, bounds, help and default."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from turnwise.config.constraints import (
    OF_ENVIRONMENTS,
    Check,
    Fraction,
    Needs,
    NonNegativeFloat,
    NonNegativeInt,
    NonZeroFraction,
    PathKind,
    PositiveFloat,
    PositiveInt,
    bounds,
    did_you_mean,
    each,
    named,
)

EngineKind = Literal["local", "auto", "vllm", "sglang", "llamacpp", "chat"]
MissingLogprobs = Literal["error", "mask", "recompute"]
UpdatePath = Literal["disk", "group", "tensors", "lora"]
GroupBackend = Literal["auto", "gloo", "nccl"]
OF_SERVERS = Needs("engine.kind = auto | vllm | sglang | llamacpp | chat")
STARTED_HERE = Needs("engine.kind = vllm | sglang and engine.urls none")


def _url_error(url: str) -> str:
    return "" if url.startswith(("http://", "https://")) else f"{url!r} is no URL; write http://host:port"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What samples: this process, or vLLM, SGLang or llama.cpp servers, ids in and ids out."""

    kind: EngineKind = "local"
    """`local` samples in this process; `vllm`, `sglang` and `llamacpp` are servers, `auto` is what answers at `urls`; `chat` is
    any chat endpoint. `llamacpp` and `chat` are for evaluation alone: they take no new weights."""
    speculate: NonNegativeInt = 0
    """Most ids that are drafted behind each from what stood before, and verified in one pass; 0 drafts none. For `local`, and
    for `vllm` and `sglang` servers that are started here (SGLang on a GPU)."""
    urls: Annotated[tuple[str, ...], each(_url_error)] = ()
    """Where servers of the model run; with none, `servers` of them are started here and ended with the run."""
    servers: Annotated[PositiveInt, STARTED_HERE] = 1
    """How many are started where `urls` is empty."""
    home: Annotated[str | None, PathKind.DIRECTORY, STARTED_HERE] = None
    """The directory of `turnwise engines install`; none is its default."""
    model: Annotated[str | None, OF_SERVERS] = None
    """The name that servers know the model by; none asks them (a chat endpoint has to be told)."""
    key_env: Annotated[str | None, OF_SERVERS] = None
    """The environment variable that holds the servers' API key."""
    missing_logprobs: Annotated[MissingLogprobs, OF_SERVERS] = "error"
    """What becomes of ids for which a server gives no logprob: an error; untrained; or trained against the trainer's own."""
    weights: Annotated[str | None, PathKind.DIRECTORY, OF_SERVERS, Needs("engine.update = disk | lora")] = None
    """Directory through which new weights go out, seen by servers under the same path; none is `weights` in the run's own."""
    colocate: bool = False
    """Engine and trainer share a device and take turns: the engine gives its memory back while the trainer trains."""
    update: UpdatePath = "disk"
    """How new weights reach servers: `disk`, a directory that they read; `group`, a process group in which they are sent;
    `tensors`, the bodies of requests, to SGLang; `lora`, the adapter that is trained (`[lora]`) alone, on the disk, beside the
    model that servers (vLLM, SGLang) have."""
    group_backend: Annotated[GroupBackend, Needs("engine.update = group")] = "auto"
    """What a process group sends by: `auto` is `nccl` where the model trains on a GPU of its own, and `gloo` elsewhere."""
    group_host: Annotated[str | None, Needs("engine.update = group")] = None
    """Address under which servers reach this process for a group; none finds the one on the way to each of them."""
    group_s: Annotated[PositiveFloat, Needs("engine.update = group | tensors")] = 600.0
    """How long a server may take to join a group, and for each bucket of weights, also one in a request."""
    concurrency: Annotated[PositiveInt, OF_SERVERS] = 256
    """Most calls at a time per server; others wait in line."""
    patience_s: Annotated[PositiveFloat, OF_SERVERS] = 300.0
    """How long a call waits for any server to come back before it is an error."""
    start_s: Annotated[PositiveFloat, STARTED_HERE] = 600.0
    """How long a server that is started here may take to answer."""
    tolerance: Annotated[PositiveFloat | None, OF_SERVERS] = None
    """Most |logprob of server - of trainer| of known ids after new weights, nats; none is 1e-3 in float32, 0.5 in bfloat16."""


def truncation_key(top_p: float, top_k: int) -> tuple[str, str] | None:
    """The key of `[rollout]` that cuts what is sampled, and why SGLang cannot be trained with then; None where none does."""
    key = "top_p" if top_p < 1.0 else "top_k" if top_k > 0 else None
    if key is None:
        return None
    return (
        key,
        "SGLang gives logprobs of the distribution before it is cut, so what was sampled would not be known; leave it out",
    )


COLUMNS = ("prompt", "answer", "id", "images", "videos", "env")
"""What `[env] columns` can name."""
HISTORY_MODES = ("append", "inline", "template")
HISTORY_POLICIES = ("keep_images", "downscale_images", "drop_reasoning")
"""Names of the policies that come with the package; each takes a number."""
HISTORY_OBJECT = "object:"
"""What stands before the name of a policy that was given as an object."""
ALGORITHMS = ("grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gspo", "cispo")
TRACKERS = ("trackio", "wandb", "tensorboard")
LOSS_SCALES = ("default", "last_round")
DType = Literal["auto", "float32", "bfloat16"]
OnInvalid = Literal["observe", "ask_again"]
RejectedReplies = Literal["trained", "untrained"]
Isolation = Literal["thread", "process"]
OnTurnLength = Literal["stop", "continue"]
ControlText = Literal["neutralise", "reject", "allow"]
Sanity = Literal["strict", "ignore_strippable", "off", "disable"]
SanityEvery = Literal["episode", "turn"]
Schedule = Literal["linear", "cosine", "constant"]
Batching = Literal["auto", "rows", "tree"]
Aggregation = Literal["token", "trajectory", "fixed"]
VisionTraining = Literal["trained", "frozen"]
Advantage = Literal["std", "mean", "rloo", "batch", "group_batch"]
CreditUnit = Literal["trajectory", "turn"]
OnFailedEpisode = Literal["drop_group", "survivors"]
KLEstimator = Literal["k1", "k2", "k3"]
KLPlace = Literal["loss", "reward"]
Reference = Literal["auto", "copy", "adapter_off", "none"]
OldLogprobs = Literal["trainer", "engine"]
Correction = Literal["none", "tis", "sequence_mis", "sequence_mis_mean", "icepop"]
ExpertRouting = Literal["off", "replay"]

WARMED_UP = Needs("warmup.demos > 0", "warmup.dataset given")
RETRIED = Needs(
    "rollout.max_retries > 0",
    "env.max_env_retries_per_turn > 0",
    "env.max_engine_retries_per_turn > 0",
    "env.max_reward_retries > 0",
)
FIXED = Needs("train.aggregation = fixed", "train.aggregation none and train.algorithm = dr_grpo | file.py:name")

algorithm_error = named(ALGORITHMS)
loss_scale_error = named(LOSS_SCALES)
tracker_error = named(TRACKERS, "file.py:Class", marks=(".py", ":"))


def history_error(value: str) -> str:
    """Return what is wrong with a value of `rollout.history`, or an empty string."""
    name, _, number = value.partition(":")
    if value in HISTORY_MODES or value.startswith(HISTORY_OBJECT) or ".py" in value:
        return ""
    if name not in HISTORY_POLICIES:
        near = did_you_mean(name, (*HISTORY_MODES, *HISTORY_POLICIES))
        known = ", ".join((*HISTORY_MODES, *(f"{policy}:N" for policy in HISTORY_POLICIES), "file.py:policy"))
        return f"{near + ' ' if near else ''}there are {known}"
    return "" if number.isdecimal() else f"say how many, as in {name}:2"


def _error_unless(holds: Callable[[Any], Any], error: str) -> Check:
    return Check(lambda value: "" if holds(value) else error)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model is trained: a directory, or a tiny one built here."""

    path: Annotated[str | None, PathKind.DIRECTORY] = None
    """A Hugging Face directory of a causal or vision-language model (with tokenizer and template); none builds a tiny one."""
    template: Annotated[str | None, PathKind.TEMPLATE] = None
    """A chat template in place of the model's own: a name (`chatml`, `qwen3_with_thinking`, ...) or a Jinja file."""
    hidden: Annotated[PositiveInt, Needs("model.path none")] = 64
    """Width of the tiny model."""
    layers: Annotated[PositiveInt, Needs("model.path none")] = 2
    """Layers of the tiny model."""
    heads: Annotated[PositiveInt, Needs("model.path none")] = 2
    """Attention heads of the tiny model."""
    kv_heads: Annotated[PositiveInt, Needs("model.path none")] = 2
    """Key-value heads of the tiny model."""
    vision: Annotated[bool, Needs("model.path none")] = False
    """Whether the tiny model sees: it is a Qwen3-VL then, whose vision tower has the same width, layers and heads."""
    patch: Annotated[PositiveInt, Needs("model.path none"), Needs("model.vision = true")] = 8
    """Side of the squares that the tiny model cuts images into, in pixels; 2 x 2 of them are one token."""
    image_side: Annotated[PositiveInt, Needs("model.path none"), Needs("model.vision = true")] = 32
    """Images over this side squared, in pixels, are scaled down for the tiny model."""
    device: Annotated[
        str, _error_unless(re.compile(r"auto|cpu|cuda(:\d+)?").fullmatch, 'must be "auto", "cpu", "cuda" or "cuda:N"')
    ] = "auto"
    """`auto` (CUDA where there is one), `cpu`, `cuda` or `cuda:N`."""
    dtype: DType = "auto"
    """`auto` is bfloat16 on CUDA, float32 on a CPU."""
    threads: PositiveInt = 1
    """CPU threads of torch; small models are faster with 1, and bits are only promised with 1."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking = false`; only those that it uses."""


def tiny(
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int = 2,
    vision: bool = False,
    patch: int = 8,
    image_side: int = 32,
    threads: int = 1,
) -> ModelConfig:
    """A tiny Qwen3 model with random weights, to be built when a run begins; its tokenizer is trained from the run's own texts.

    Args:
        hidden: width.
        layers: number of layers.
        heads: attention heads.
        kv_heads: key-value heads.
        vision: whether it sees: a tiny Qwen3-VL.
        patch: side of the squares that it cuts images into, in pixels; 2 x 2 of them are one token.
        image_side: images over this side squared, in pixels, are scaled down.
        threads: CPU threads of torch.
    """
    return ModelConfig(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        vision=vision,
        patch=patch,
        image_side=image_side,
        threads=threads,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvRules:
    """What becomes of the model's mistakes and the world's failures in one environment."""

    on_invalid: Annotated[OnInvalid, OF_ENVIRONMENTS] = "observe"
    """What `InvalidAction` does: its message is what the model reads next, or the model is asked again from where it stood."""
    rejected: Annotated[RejectedReplies, OF_ENVIRONMENTS, Needs("env.on_invalid = ask_again")] = "trained"
    """What becomes of replies that were rejected where the model is asked again; they are recorded either way."""
    max_asks_per_turn: Annotated[NonNegativeInt, OF_ENVIRONMENTS, Needs("env.on_invalid = ask_again")] = 2
    """How often the model is asked again in one turn; the mistake behind the last one is an observation."""
    max_env_retries_per_turn: Annotated[NonNegativeInt, OF_ENVIRONMENTS] = 0
    """How often a turn is tried again whose environment or tool failed; mistakes in its code are not tried again."""
    max_env_retries: Annotated[NonNegativeInt, OF_ENVIRONMENTS, Needs("env.max_env_retries_per_turn > 0", unless=(0,))] = 8
    """The same for a whole episode, fresh attempts included."""
    max_engine_retries_per_turn: NonNegativeInt = 0
    """How often a call of the engine is made again that failed or missed its deadline: the same request with the same seed."""
    max_engine_retries: Annotated[NonNegativeInt, Needs("env.max_engine_retries_per_turn > 0", unless=(0,))] = 8
    """The same for a whole episode."""
    max_reward_retries: Annotated[NonNegativeInt, OF_ENVIRONMENTS] = 0
    """How often an episode's reward is asked for again that raised or missed its deadline; a value that is none is final."""
    retry_wait_s: Annotated[NonNegativeFloat, RETRIED] = 0.5
    """Seconds before the first retry of a turn; twice as many before each next one, at most 30, give or take a half."""
    isolation: Annotated[Isolation, OF_ENVIRONMENTS] = "thread"
    """Where the environment runs: synchronous code in a thread; or all of it in a process, killed at a missed deadline."""
    reward_isolation: Annotated[Isolation, OF_ENVIRONMENTS] = "thread"
    """The same for the reward alone: in a process, what computes for ever is killed. All that it needs must be picklable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvConfig(EnvRules):
    """One environment of the run."""

    use: Annotated[str, PathKind.OBJECT] = ""
    """A built-in name (`hop`, `search`, ...) or `file.py:Name`: an Env class, a factory, or a factory's result."""
    name: str = ""
    """What its tasks and figures are called; when empty the built-in name, or what follows the colon of `use`."""
    weight: Annotated[float, bounds(gt=0, remedy="leave an environment out by removing its table")] = 1.0
    """Share of the training groups, relative to the other environments."""
    tasks: Annotated[str | None, PathKind.DATA] = None
    """`file.py:function`, a `.jsonl` file or a Hugging Face dataset directory; none asks the environment itself."""
    eval_tasks: Annotated[str | None, PathKind.DATA] = None
    """The same for held-out tasks; none asks the environment itself, or holds out about a fifth of `tasks`."""
    return_multi_modal_inputs: Annotated[bool, Needs("env.tasks given")] = True
    """Whether rows bring their images along, read when the dataset is; else each is read when an episode shows it."""
    columns: Annotated[Mapping[str, Any], Needs("env.tasks given", "env.eval_tasks given")] = field(default_factory=dict)
    """Columns of `tasks` by content (`prompt`, `answer`, `id`, `images`, `videos`, `env`): `{ answer = "meta.gold" }`."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """The environment's own settings, checked against its signature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one episode may use. Times are in seconds, lengths in token ids."""

    turns: PositiveInt = 8
    """Most replies of an episode, all agents together."""
    turn_tokens: PositiveInt = 256
    """Most tokens sampled in one reply."""
    on_turn_length: OnTurnLength = "stop"
    """What a reply without an end does: `stop` ends the episode, `continue` closes the reply and hands it to the world."""
    episode_tokens: PositiveInt | None = None
    """Most tokens after the opening prompt, sampled and observed, all agents together."""
    context: PositiveInt | None = None
    """Most tokens of prompt and reply in one request; none asks the engine."""
    prompt_tokens: PositiveInt | None = None
    """Tasks whose opening prompt, tools included, is longer are left out, counted and listed."""
    observation_tokens: NonNegativeInt | None = None
    """Longer observations are cut, with a mark that the model can see."""
    images: int = 64
    """Most images and videos of one observation; more fail the episode."""
    episode_images: int | None = None
    """Most images and videos of all observations of an episode together; more fail it."""
    wall_clock: PositiveFloat = 600.0
    """Most seconds of an episode."""
    generate_s: PositiveFloat = 300.0
    """Deadline of one reply."""
    env_s: PositiveFloat = 60.0
    """Deadline of one reset, step or close."""
    reward_s: PositiveFloat = 60.0
    """Deadline of a reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How episodes are played."""

    function: Annotated[str | None, PathKind.OBJECT] = None
    """`file.py:play`: a play function that takes the environment's place."""
    groups: PositiveInt = 16
    """Tasks per training step."""
    group_size: PositiveInt = 8
    """Episodes per task."""
    concurrency: PositiveInt = 256
    """Most episodes at once."""
    max_retries: NonNegativeInt = 1
    """How often an episode that the world, the engine or a deadline failed is played again before its failure counts."""
    max_failed: Fraction = 0.2
    """Share of a step's or an evaluation's episodes that may fail; more stop the run, which goes on with --resume."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature while training."""
    top_p: NonZeroFraction = 1.0
    """Sample from the fewest ids whose probabilities reach this; the trainer renormalises over them, for two passes a step."""
    top_k: NonNegativeInt = 0
    """Sample from that many most likely ids, likewise; 0 is off."""
    history: Annotated[str, PathKind.OBJECT, Check(history_error)] = "append"
    """What the model sees of earlier turns: `append`, all of it; `inline`, all of it within one assistant message; `template`,
    what its own template shows of it; `keep_images:N`, `downscale_images:N`, `drop_reasoning:N` or
    `file.py:policy`, what a policy chooses."""
    stop: Annotated[tuple[str, ...], _error_unless(all, 'a text must not be empty; write ["</search>"], say')] = ()
    """Texts that end a reply, beside the model's own end tokens; the text for the environment is cut right behind."""
    watchdog_s: PositiveFloat = 120.0
    """Seconds without progress after which what is pending is printed (also on SIGUSR1, with stacks)."""
    control_text: ControlText = "neutralise"
    """Control text in what the world says: encoded as plain text; the episode fails; or taken for control. Counted always."""
    sanity: Sanity = "strict"
    """Compare finished episodes with a full render: any difference, all but white space, or not (`disable` is `off`)."""
    sanity_every: Annotated[SanityEvery, Needs("rollout.sanity = strict | ignore_strippable")] = "episode"
    """What the sanity check looks at: the last turn of an episode, or each."""
    sanity_share: Annotated[Fraction, Needs("rollout.sanity = strict | ignore_strippable")] = 0.125
    """Share of the episodes that the sanity check compares, chosen by their keys; each costs about one full render."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupConfig:
    """Supervised training on demonstrations or conversations, before reinforcement; ended by a measured gate."""

    demos: NonNegativeInt = 0
    """Demonstrations of the environment to record; 0 leaves the phase out. With a dataset: conversations to take, 0 is all."""
    dataset: Annotated[str | None, PathKind.DATA] = None
    """Conversations to learn from in their place: JSONL, Parquet or Arrow, rows with `messages` and maybe `tools`."""
    steps: Annotated[PositiveInt, WARMED_UP] = 400
    """Most steps."""
    batch: Annotated[PositiveInt, WARMED_UP] = 32
    """Episodes per step."""
    lr: Annotated[PositiveFloat, WARMED_UP] = 4e-3
    """Peak learning rate, cosine to a tenth."""
    gate_success: Annotated[Fraction, WARMED_UP] = 0.15
    """Sampled success on training tasks that ends the phase; not reaching it stops the run."""
    gate_loss: Annotated[PositiveFloat | None, WARMED_UP] = None
    """Supervised loss per sampled token that must be met too."""
    gate_every: Annotated[PositiveInt, WARMED_UP] = 100
    """Steps between two looks at the gate."""
    gate_tasks: Annotated[PositiveInt, WARMED_UP] = 64
    """Tasks per look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Reinforcement."""

    steps: NonNegativeInt = 60
    """Reinforcement steps."""
    algorithm: Annotated[str, PathKind.OBJECT, Check(algorithm_error, only_training=True)] = "grpo"
    """How rewards become a loss: `grpo`, `dr_grpo`, `dapo`, `rloo`, `reinforce_pp`, `reinforce_pp_baseline`, `gspo`, `cispo` or
    `file.py:function`. It gives the keys that are none their values."""
    lr: NonNegativeFloat = 1e-3
    """Learning rate."""
    schedule: Schedule = "linear"
    """How the learning rate falls to 0 over the run (constant: not)."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay of AdamW."""
    betas: Annotated[tuple[float, float], bounds(ge=0, lt=1)] = (0.9, 0.95)
    """Momentum terms of AdamW."""
    eps: PositiveFloat = 1e-8
    """Term added to the denominator of AdamW; a larger one damps updates of weights whose gradients are tiny."""
    signal_memory: Annotated[
        NonNegativeInt,
        _error_unless(
            lambda steps: steps not in range(1, 5),
            "must be 0 or at least 5: an average over fewer steps is never two standard errors over 0",
        ),
    ] = 0
    """Steps over which the agreement of gradients is averaged, which scales the learning rate by its signal; 0 leaves it."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm."""
    epochs: PositiveInt = 1
    """Passes over each step's groups."""
    minibatches: PositiveInt = 1
    """Optimizer steps per pass."""
    micro_tokens: PositiveInt = 4096
    """Most tokens of one forward pass; the result does not depend on it."""
    batching: Batching = "auto"
    """Whether what rows share is computed once, as a tree, or each row by itself; `auto` takes what is estimated cheaper."""
    gradient_checkpointing: bool = False
    """Keep no activations within layers and compute them again in the backward pass: less memory, about a third more time."""
    clip_low: NonZeroFraction | None = None
    """Ratios under 1 - clip_low are clipped; none is as the algorithm has it (grpo: 0.2)."""
    clip_high: PositiveFloat | None = None
    """Ratios over 1 + clip_high are clipped; none is as the algorithm has it (grpo: 0.28)."""
    aggregation: Aggregation | None = None
    """Mean over sampled tokens; over trajectories of their token means; or sum of tokens / (trajectories * `fixed_length`);
    none is as the algorithm has it (grpo: token)."""
    fixed_length: Annotated[PositiveInt, FIXED] = 1024
    """Tokens per trajectory that `fixed` divides by, whatever was sampled (Dr. GRPO, arXiv 2503.20783)."""
    vision: Annotated[VisionTraining, Needs("model.path given", "model.vision = true")] = "trained"
    """What becomes of a model's vision tower and what joins it to the text: `frozen` leaves them, without optimizer state."""
    advantage: Advantage | None = None
    """Reward minus the group's mean, divided by its standard deviation or not; minus the mean of the others; compared with the
    whole batch; or with the group first, then the batch. None is as the algorithm has it (grpo: std)."""
    credit: CreditUnit = "trajectory"
    """Whether all tokens of a trajectory have its reward, or those of a turn the rewards from that turn on."""
    discount: Fraction = 1.0
    """What a reward one turn later is worth, with `credit = "turn"`."""
    loss_scale: Annotated[str, PathKind.OBJECT, Check(loss_scale_error, only_training=True)] = "default"
    """Which sampled tokens carry loss, and how much: `default`, all alike; `last_round`, those of the last round alone; or
    `file.py:function`, weights per turn or token."""
    overlong_tokens: PositiveInt | None = None
    """Sampled tokens from which on a trajectory loses a whole point of reward (DAPO, arXiv 2503.14476, eq. 13); none is off,
    with dapo what the limits allow."""
    overlong_buffer: Annotated[
        NonZeroFraction, Needs("train.overlong_tokens given", "train.algorithm = dapo | file.py:name")
    ] = 0.2
    """Share of `overlong_tokens` before their end over which that point is lost bit by bit."""
    refill: NonNegativeInt | None = None
    """Times at most that groups without signal are replaced by further tasks'; none: the algorithm's (dapo: 3, others: 0)."""
    on_failure: OnFailedEpisode = "drop_group"
    """What a failed episode does to its group: drops it, or the others go on with a baseline over themselves."""
    min_group: Annotated[int, bounds(ge=2)] = 2
    """Groups with fewer rewarded trajectories are dropped, and counted."""
    kl: NonNegativeFloat = 0.0
    """Weight of the KL term to the policy at the start of reinforcement; 0 keeps no reference."""
    kl_estimator: Annotated[KLEstimator | None, Needs("train.kl > 0")] = None
    """How the KL of a token is estimated; none is as the algorithm has it (grpo: k3)."""
    kl_in: Annotated[KLPlace | None, Needs("train.kl > 0")] = None
    """Whether the KL term is part of the loss or taken off the reward (k1); none is as the algorithm has it (grpo: loss)."""
    reference: Annotated[Reference, Needs("train.kl > 0", unless=("none",))] = "auto"
    """What the KL term holds to: a second `copy` of what is trained; the model with its LoRA switched off; `none` with `kl = 0`
    alone. `auto` switches the LoRA off where it has not been trained yet, and copies otherwise."""
    old_logprobs: OldLogprobs = "trainer"
    """Where the ratio's denominator comes from."""
    max_mismatch: PositiveFloat | None = None
    """Stop when a token's |logprob of trainer - of engine| is larger; none: 1e-3 in float32, off in bfloat16 or corrected."""
    max_mismatch_kl: PositiveFloat | None = None
    """Stop when KL(engine || trainer) per token, in nats, is larger on average; none: 0.1, or off with max_mismatch."""
    correction: Correction = "none"
    """What is done about differing logprobs of trainer and engine: weights per token that are truncated, or trajectories or
    tokens left out whose ratio is out of bounds."""
    correction_low: NonNegativeFloat | None = None
    """Lower bound of the correction's ratio; none is as the correction has it."""
    correction_high: PositiveFloat | None = None
    """Upper bound of the correction's ratio; none is as the correction has it."""
    routes: ExpertRouting = "off"
    """Whether a mixture-of-experts model is trained with the experts that the engine chose for each token (R3, arXiv
    2510.11370)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Adapters that are trained in place of the model's own weights (needs the extra `lora`)."""

    rank: NonNegativeInt = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: Annotated[PositiveFloat | None, Needs("lora.rank > 0")] = None
    """What an adapter adds is multiplied with alpha / rank; none is twice the rank."""
    targets: Annotated[tuple[str, ...], Needs("lora.rank > 0")] = ("all",)
    """Linear layers that get an adapter, by the ends of their names (`q_proj`, `mlp.up_proj`); `all` are those of the text
    model, its head left out."""
    dropout: Annotated[float, bounds(ge=0, lt=1), Needs("lora.rank > 0"), WARMED_UP] = 0.0
    """Share of an adapter's inputs that is dropped in the warm-up; never in reinforcement, where what is trained is what was
    sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Held-out success, before and after reinforcement."""

    tasks: PositiveInt = 256
    """Held-out tasks."""
    samples: PositiveInt = 1
    """Sampled episodes per task."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature."""
    top_p: NonZeroFraction = 1.0
    """As `rollout.top_p`, of sampled episodes."""
    top_k: NonNegativeInt = 0
    """As `rollout.top_k`, of sampled episodes."""
    success: float = 1.0
    """A reward of at least this is a success."""
    greedy: bool = True
    """Also play each task greedily."""
    every: NonNegativeInt = 0
    """Reinforcement steps between two evaluations in the middle; 0 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """What is kept to go on from."""

    every: PositiveInt = 10
    """Reinforcement steps between two checkpoints; steps since the last are trained again from the journal on resume."""
    keep: PositiveInt = 2
    """Checkpoints kept, the last ones."""
    keep_best: bool = True
    """Whether the checkpoint with the highest sampled success on held-out tasks is kept too; `eval.every` says when one is
    looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackConfig:
    """Where figures are sent besides metrics.jsonl; a process each, for which training never waits."""

    to: Annotated[tuple[str, ...], each(tracker_error)] = ()
    """Trackers: `"trackio"`, `"wandb"`, `"tensorboard"`, or one's own as `"file.py:Class"`."""
    project: Annotated[str, Needs("track.to given")] = "turnwise"
    """What they call the project."""
    name: Annotated[str | None, Needs("track.to given")] = None
    """What they call the run; none is the name of its directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A whole run."""

    out: Annotated[str, _error_unless(str.strip, "must name a directory for the run")] = "runs/run"
    """Run directory."""
    seed: NonNegativeInt = 0
    """Names every random draw of the run."""
    model: ModelConfig = ModelConfig()
    env: tuple[EnvConfig, ...] = ()
    rollout: RolloutConfig = RolloutConfig()
    limits: Limits = Limits()
    engine: EngineConfig = field(default_factory=EngineConfig)
    warmup: WarmupConfig = WarmupConfig()
    train: TrainConfig = TrainConfig()
    lora: LoraConfig = LoraConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    track: TrackConfig = TrackConfig()
