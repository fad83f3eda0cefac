"""Config sections; each field carries type, bounds, help and default."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from turnwright.config.constraints import OF_ENVIRONMENTS, Check, Needs, PathKind, bounds, named, or_installed
from turnwright.config.snapshots import snapshot
from turnwright.errors import did_you_mean

NonNegativeInt = Annotated[int, bounds(ge=0)]
PositiveInt = Annotated[int, bounds(ge=1)]
NonNegativeFloat = Annotated[float, bounds(ge=0)]
PositiveFloat = Annotated[float, bounds(gt=0)]
Fraction = Annotated[float, bounds(ge=0, le=1)]
NonZeroFraction = Annotated[float, bounds(gt=0, le=1)]
ENGINES = ("local", "auto", "vllm", "sglang", "llamacpp", "chat")
MissingLogprobs = Literal["error", "mask", "recompute"]
UpdatePath = Literal["disk", "group", "tensors", "lora"]
GroupBackend = Literal["auto", "gloo", "nccl"]
InFlight = Literal["recompute", "salt", "keep"]
AdapterMode = Literal["auto", "rows", "merged"]
OF_SERVERS = Needs("engine.kind = auto | vllm | sglang | llamacpp | chat")
STARTED_HERE = Needs("engine.kind = vllm | sglang and engine.urls none and engine.urls_file none")
OF_TREES = Needs("engine.urls given", "engine.urls_file given", "scale.ray given and engine.kind = vllm | sglang")


def _each(error: Callable[[str], str]) -> Check:
    return Check(lambda values: next(filter(None, map(error, values)), ""))


def _url_error(url: str) -> str:
    return "" if url.startswith(("http://", "https://")) else f"{url!r} is not a URL; write http://host:port"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sampling engine: in this process, or vLLM, SGLang or llama.cpp servers, with token ids as input and output."""

    kind: Annotated[str, Check(or_installed("engines", named(ENGINES, "")))] = "local"
    """Engine: `local` samples in this process; `vllm`, `sglang` and `llamacpp` are servers; `auto` detects what answers at
    `urls`; `chat` is any chat endpoint. `chat` and `llamacpp` servers at `urls` accept no weight updates, so they are for
    evaluation only; a run can train with `llamacpp` servers of its own. An installed package may add others."""
    speculate: NonNegativeInt = 0
    """Maximum ids drafted per step from earlier text and verified in one pass; 0 disables speculation. For `local`, and for
    `vllm` and `sglang` servers started by the run (SGLang on a GPU)."""
    adapters: Annotated[AdapterMode, Needs("policy given and engine.kind = local")] = "auto"
    """LoRA adapters of several policies: `rows` samples all from one copy of the model, where each row of a pass takes its own
    adapter; `merged` gives each policy an engine with merged weights. `auto` is `rows` on a GPU and `merged` on a CPU, where
    engines compute beside each other."""
    urls: Annotated[tuple[str, ...], _each(_url_error)] = ()
    """URLs of servers that run the model; without them and `urls_file`, the run starts `servers` of them and stops them at its
    end."""
    urls_file: Annotated[str | None, PathKind.DIRECTORY] = None
    """File with URLs of further servers, one a line, which the run watches: servers join and leave while it runs (`turnwright
    engines join URL --list FILE`)."""
    servers: Annotated[PositiveInt, STARTED_HERE] = 1
    """Number of servers started without `urls` and `urls_file`."""
    install_dir: Annotated[str | None, PathKind.DIRECTORY, STARTED_HERE] = None
    """Directory used by `turnwright engines install`; none is its default."""
    model: Annotated[str | None, OF_SERVERS] = None
    """Model name on the servers; none asks them. Required for a chat endpoint."""
    key_env: Annotated[str | None, OF_SERVERS] = None
    """Name of the environment variable that holds the servers' API key; none sends no key."""
    missing_logprobs: Annotated[MissingLogprobs, OF_SERVERS] = "error"
    """Handling of ids without a logprob from the server: an error, excluded from the loss, or trained against the trainer's own
    logprob."""
    weights: Annotated[str | None, PathKind.DIRECTORY, OF_SERVERS, Needs("engine.update = disk | lora")] = None
    """Directory for weight updates, at the same path on the servers; none is `weights` in the run directory."""
    tree: Annotated[bool, OF_TREES] = False
    """Whether weights on disk (`update = disk | lora`) go to the servers' machines over HTTP, to each machine once and from
    machine to machine, in place of a directory that all see."""
    relay_port: Annotated[NonNegativeInt, Needs("engine.tree = true")] = 0
    """Port of `turnwright engines relay` on each machine; 0: the servers pass weights on themselves, as `turnwright serve`
    does, or Ray's actors do."""
    colocate: bool = False
    """Whether engine and trainer share a device and alternate: the engine releases its memory while the trainer trains."""
    update: UpdatePath = "disk"
    """Transport of weight updates to servers: `disk`, a directory that they read; `group`, a process group; `tensors`, request
    bodies (SGLang); `lora`, only the trained adapter (`[lora]`), from disk, on top of the base model of the servers (vLLM,
    SGLang)."""
    in_flight: Annotated[InFlight, Needs("schedule.mode = async")] = "recompute"
    """Replies in flight during a weight update: `recompute` interrupts them and drops the prefix cache, `salt` interrupts them
    and separates the cache by policy version, `keep` continues them on the cache of the previous weights (vLLM, SGLang)."""
    group_backend: Annotated[GroupBackend, Needs("engine.update = group")] = "auto"
    """Backend of the process group: `auto` is `nccl` if the model trains on a GPU of its own, else `gloo`."""
    group_host: Annotated[str | None, Needs("engine.update = group", "engine.tree = true")] = None
    """Address at which servers reach this process for a group or a tree; none uses the local address of the route to each
    server, and for a tree loopback, or with `scale.ray` this node's address."""
    group_s: Annotated[PositiveFloat, Needs("engine.update = group | tensors")] = 600.0
    """Timeout in seconds for a server to join a group, and for each bucket of weights, including one in a request."""
    concurrency: Annotated[PositiveInt, OF_SERVERS] = 256
    """Maximum concurrent calls per server; further calls wait."""
    unavailable_timeout_s: Annotated[PositiveFloat, OF_SERVERS] = 300.0
    """Seconds a call waits for an available server before failing."""
    start_s: Annotated[PositiveFloat, STARTED_HERE] = 600.0
    """Timeout in seconds for a server started by the run to answer."""
    weight_check_tolerance: Annotated[PositiveFloat | None, OF_SERVERS] = None
    """Maximum |server logprob - trainer logprob| of known ids after a weight update, in nats; none is 1e-3 in float32, 0.5 in
    bfloat16."""

    @property
    def attached(self) -> bool:
        """Whether the servers run without this run."""
        return bool(self.urls or self.urls_file)


def truncation_key(rollout: RolloutConfig) -> tuple[str, str] | None:
    """Return the `[rollout]` key that truncates sampling and why SGLang then cannot be trained with, or None if no key does."""
    truncates = {"top_p": rollout.top_p < 1.0, "top_k": rollout.top_k > 0, "min_p": rollout.min_p > 0}
    key = next((key for key, cuts in truncates.items() if cuts), None)
    if key is None:
        return None
    return key, "SGLang returns logprobs of the distribution before truncation, not of the sampled one; leave it out"


COLUMNS = ("prompt", "answer", "id", "images", "videos", "env", "metadata", "tools")
"""Contents that `[env] columns` can name."""
PROGRAM = "program"
"""`env.use` of an unmodified program (`turnwright_serve.proxy.recipe`)."""
HISTORY_MODES = ("append", "inline", "template")
HISTORY_POLICIES = ("keep_images", "downscale_images", "drop_reasoning")
"""Names of the built-in history policies; each takes a number."""
HISTORY_OBJECT = "object:"
"""Prefix of the name of a policy given as an object."""
ALGORITHMS = ("grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gspo", "cispo")
PARSERS = (
    *("hermes", "qwen3_coder", "seed", "mistral", "deepseek", "glm", "hunyuan", "kimi", "kimi_k3", "harmony", "cohere"),
    *("command_r", "gemma", "lfm2", "minimax_m2", "muse", "minimax_m1", "apriel", "nemotron_v2", "gigachat", "functionary"),
    *("minicpm", "granite", "internlm2", "function_gemma", "minicpm3", "olmo3", "solar", "apertus", "llama3", "pythonic"),
    "json_list",
)
"""Reply formats, the names of `turnwright.renderers.parsers.PARSERS`."""
TRACKERS = ("trackio", "wandb", "tensorboard")
SAMPLERS = ("uniform", "window", "pools", "progress")
LOSS_SCALES = ("default", "last_round")
DType = Literal["auto", "float32", "bfloat16"]
Precision = Literal["auto", "float32", "mixed", "bfloat16"]
QuantKind = Literal["none", "int4", "fp8"]
OnInvalid = Literal["observe", "resample"]
RejectedReplies = Literal["trained", "untrained"]
Isolation = Literal["thread", "process"]
OnTurnLength = Literal["stop", "continue"]
ControlText = Literal["neutralise", "reject", "allow"]
Sanity = Literal["strict", "ignore_strippable", "off", "disable"]
SanityEvery = Literal["episode", "turn"]
Schedule = Literal["linear", "cosine", "constant"]
Overlap = Literal["refused", "allowed"]
Batching = Literal["auto", "rows", "tree"]
Aggregation = Literal["token", "trajectory", "fixed"]
VisionTraining = Literal["trained", "frozen"]
Advantage = Literal["std", "mean", "rloo", "batch", "group_batch", "running"]
CreditUnit = Literal["trajectory", "turn"]
OnFailedEpisode = Literal["drop_group", "survivors"]
KLEstimator = Literal["k1", "k2", "k3"]
KLPlace = Literal["loss", "reward"]
Reference = Literal["auto", "copy", "adapter_off", "none"]
OldLogprobs = Literal["trainer", "engine"]
Correction = Literal["none", "tis", "sequence_mis", "sequence_mis_mean", "icepop"]
ExpertRouting = Literal["off", "replay"]
ScheduleMode = Literal["sync", "one_step_off", "async"]
Selection = Literal["complete", "fifo", "discard"]
TeacherSignal = Literal["advantage", "loss"]
Divergence = Literal["reverse", "forward", "js"]

REWARDED = Needs("train.reward_weight > 0")
DIVERGES = Needs("teacher.signal = loss")
SERVED = Needs("teacher.urls given")
WARMED_UP = Needs("warmup.demos > 0", "warmup.dataset given")
RETRIED = Needs(
    "rollout.max_retries > 0",
    "env.max_env_retries_per_turn > 0",
    "env.max_engine_retries_per_turn > 0",
    "env.max_reward_retries > 0",
    "env.isolation = process",
)
TOO_FEW_STEPS = "must be 0 or at least 10: an average over fewer steps cannot tell a signal from chance"
FIXED = Needs("train.aggregation = fixed", "train.aggregation none and train.algorithm = dr_grpo | file.py:name")

ADVANTAGES: tuple[str, ...] = get_args(Advantage)
algorithm_error = named(ALGORITHMS)
advantage_error = named(ADVANTAGES)
parser_error = or_installed("parsers", named(PARSERS, ""))
sampler_error = named(SAMPLERS, "file.py:Class")
loss_scale_error = named(LOSS_SCALES)
tracker_error = or_installed("trackers", named(TRACKERS, "file.py:Class", marks=(".py", ":")))


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
    """Model to train: a directory, or a tiny model built by the run."""

    path: Annotated[str | None, PathKind.DIRECTORY] = None
    """Hugging Face directory of a causal or vision-language model with tokenizer and template, or a GGUF file, of which such a
    directory is made once; none builds a tiny model."""
    template: Annotated[str | None, PathKind.TEMPLATE] = None
    """Chat template that replaces the model's: a name (`chatml`, `qwen3_with_thinking`, ...) or a Jinja file; none keeps the
    model's."""
    revision: Annotated[str | None, Needs("model.path given")] = None
    """Branch, tag or commit of the hub: of a repository in its cache (`models--org--name`), or to verify a snapshot; none takes
    the directory as it is."""
    parser: Annotated[str | None, Check(parser_error)] = None
    """Format in which tool calls and thinking are parsed (`hermes`, `qwen3_coder`, ...); none detects the template's."""
    hidden: Annotated[PositiveInt, Needs("model.path none")] = 64
    """Width of the tiny model."""
    layers: Annotated[PositiveInt, Needs("model.path none")] = 2
    """Number of layers of the tiny model."""
    heads: Annotated[PositiveInt, Needs("model.path none")] = 2
    """Number of attention heads of the tiny model."""
    kv_heads: Annotated[PositiveInt, Needs("model.path none")] = 2
    """Number of key-value heads of the tiny model."""
    vision: Annotated[bool, Needs("model.path none")] = False
    """Whether the tiny model is a Qwen3-VL, with a vision tower of the same width, layers and heads."""
    patch: Annotated[PositiveInt, Needs("model.path none"), Needs("model.vision = true")] = 8
    """Side of the tiny model's image patches, in pixels; 2 x 2 patches are one token."""
    image_side: Annotated[PositiveInt, Needs("model.path none"), Needs("model.vision = true")] = 32
    """Side in pixels of a square with the maximum image area of the tiny model; larger images are scaled down."""
    device: Annotated[
        str, _error_unless(re.compile(r"auto|cpu|cuda(:\d+)?").fullmatch, 'must be "auto", "cpu", "cuda" or "cuda:N"')
    ] = "auto"
    """Device: `auto` (CUDA if available), `cpu`, `cuda` or `cuda:N`."""
    dtype: Precision = "auto"
    """Data type of weights and computation: `mixed` has float32 weights and multiplies in bfloat16, on CPUs only. `auto` is
    bfloat16 on CUDA; on a CPU `mixed` for a model of 20 million weights or more where the processor multiplies bfloat16 faster
    and the local engine samples, else float32."""
    threads: PositiveInt = 1
    """CPU threads of torch; small models run faster with 1, and bitwise reproducibility is guaranteed only with 1."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking = false`; only variables that it uses."""

    @property
    def directory(self) -> Path | None:
        """Directory of `path` and `revision`; None for a tiny model. Raises `ConfigError` without such a snapshot."""
        return None if self.path is None else snapshot(Path(self.path), self.revision)


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
    """Describe a tiny Qwen3 model with random weights.

    The model is built when a run starts; its tokenizer is trained on the run's own texts.

    Args:
        hidden: width.
        layers: number of layers.
        heads: number of attention heads.
        kv_heads: number of key-value heads.
        vision: whether to build a tiny Qwen3-VL.
        patch: side of an image patch, in pixels; 2 x 2 patches are one token.
        image_side: side in pixels of a square with the maximum image area; larger images are scaled down.
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
    """Handling of invalid actions and of failures in one environment."""

    on_invalid: Annotated[OnInvalid, OF_ENVIRONMENTS] = "observe"
    """Response to `InvalidAction`: `observe` sends its message as the next observation; `resample` samples the reply again
    from the same context."""
    rejected_replies: Annotated[RejectedReplies, OF_ENVIRONMENTS, Needs("env.on_invalid = resample")] = "trained"
    """Whether rejected replies are trained on if replies are sampled again; they are recorded in either case."""
    max_resamples_per_turn: Annotated[NonNegativeInt, OF_ENVIRONMENTS, Needs("env.on_invalid = resample")] = 2
    """Maximum times a reply is sampled again in one turn; the message about the last invalid one becomes an observation."""
    max_env_retries_per_turn: Annotated[NonNegativeInt, OF_ENVIRONMENTS] = 0
    """Maximum retries of a turn after its environment or tool failed; errors in its code are not retried."""
    max_env_retries: Annotated[NonNegativeInt, OF_ENVIRONMENTS, Needs("env.max_env_retries_per_turn > 0", unless=(0,))] = 8
    """Maximum such retries per episode, new attempts included."""
    max_engine_retries_per_turn: NonNegativeInt = 0
    """Maximum retries of an engine call that failed or timed out, with the same request and seed."""
    max_engine_retries: Annotated[NonNegativeInt, Needs("env.max_engine_retries_per_turn > 0", unless=(0,))] = 8
    """Maximum such retries per episode."""
    max_reward_retries: Annotated[NonNegativeInt, OF_ENVIRONMENTS] = 0
    """Maximum retries of a reward that raised or timed out; an invalid value is final."""
    retry_wait_s: Annotated[NonNegativeFloat, RETRIED] = 0.5
    """Seconds before the first retry of a turn; doubled for each further retry up to 30, with 50% jitter."""
    effects: bool = False
    """Whether its actions change something that outlasts the episode (files, services): each turn is on the disk before its
    action runs, and a resumed run restores the environment's state instead of repeating actions."""
    isolation: Annotated[Isolation, OF_ENVIRONMENTS] = "thread"
    """Where the environment runs: `thread`, synchronous code in a thread; `process`, all of it in a process that is killed on a
    timeout."""
    reward_isolation: Annotated[Isolation, OF_ENVIRONMENTS] = "thread"
    """Where the reward runs; a process is killed if it computes forever. Everything it needs must be picklable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvConfig(EnvRules):
    """One environment of the run."""

    use: Annotated[str, PathKind.OBJECT] = ""
    """Built-in name (`hop`, `search`, ...), `file.py:Name` or `package.module:Name`: an Env class, a factory or its result, or
    an object of another framework; or a framework's registered id, such as `gym:FrozenLake-v1`."""
    name: str = ""
    """Label of its tasks and metrics; if empty, the built-in name, or the part of `use` after the colon."""
    weight: Annotated[float, bounds(gt=0, remedy="leave an environment out by removing its table")] = 1.0
    """Share of the training groups, relative to the other environments."""
    sampler: Annotated[
        str, PathKind.OBJECT, Check(sampler_error), Needs("schedule.selection = complete | fifo", unless=("uniform",))
    ] = "uniform"
    """Choice of training tasks: `uniform`, all in passes; `window`, pass rates near a half; `pools`, mostly neither solved nor
    unsolved at their last play; `progress`, changing pass rates; or `file.py:Class`. A tenth of the draws is uniform."""
    key: Annotated[str | None, Needs("env.sampler != uniform")] = None
    """Entry of `Task.info` whose value names a task's kind, for statistics per kind; none keeps them per task."""
    tasks: Annotated[str | None, PathKind.DATA] = None
    """Training tasks: `file.py:function`, a `.jsonl` file or a Hugging Face dataset directory; none asks the environment."""
    eval_tasks: Annotated[str | None, PathKind.DATA] = None
    """Held-out tasks, in the same forms; none asks the environment, or holds out about a fifth of `tasks`."""
    return_multi_modal_inputs: Annotated[bool, Needs("env.tasks given")] = True
    """Whether images are read with the dataset's rows; if false, each is read when an episode uses it."""
    media_root: Annotated[str | None, PathKind.DIRECTORY, Needs("env.tasks given", "env.eval_tasks given")] = None
    """Directory that paths of images in rows may lead to, besides the dataset's own; absolute paths must lie inside of it."""
    columns: Annotated[Mapping[str, Any], Needs("env.tasks given", "env.eval_tasks given")] = field(default_factory=dict)
    """Columns of `tasks` by content (`prompt`, `answer`, `id`, `images`, `videos`, `env`, `metadata`, `tools`):
    `{ answer = "meta.gold" }`."""
    faithful: bool = False
    """Whether another framework's user code meets that framework's behavior where ours differs on purpose (docs/compat.md)."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the environment, checked against its signature."""


def _policy_name_error(name: str) -> str:
    fits = re.fullmatch(r"[A-Za-z][\w-]*", name, re.ASCII)
    return "" if fits else "must be a name of letters, digits, '_' and '-', such as \"asker\""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """One of several policies of a run: the agents that it plays, and its origin. Without `path`, `urls` and `past` it starts
    as the run's model, and is trained as a LoRA adapter of it with `[lora]`, else as a copy of all its weights."""

    name: Annotated[str, Check(_policy_name_error)] = ""
    """Name of the policy, in metrics (`policy/NAME/...`) and checkpoints (`step-N/NAME`)."""
    agents: tuple[str, ...] = ()
    """Agents that it plays, as names or patterns (`solver-*`); an agent's first fitting policy plays it. Empty is the agent of
    the policy's name."""
    path: Annotated[str | None, PathKind.DIRECTORY] = None
    """Model directory that it starts from, with the tokenizer of the run's model; none is the run's model."""
    urls: Annotated[tuple[str, ...], _each(_url_error)] = ()
    """URLs of servers of the model; such a policy is not trained."""
    past: Mapping[str, Any] = field(default_factory=dict)
    """Earlier versions of a trained policy, as opponents: `{ of = "solver", every = 10, keep = 5 }` draws for each task one of
    the last `keep` versions, saved every so many steps from the first on. Such a policy is not trained."""
    trained: bool = True
    """Whether it is trained; false plays it as it is."""
    train: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `[train]` with other values for this policy: `{ lr = 1e-4 }`."""

    @property
    def plays(self) -> tuple[str, ...]:
        """Names and patterns of its agents."""
        return self.agents or (self.name,)

    @property
    def learns(self) -> bool:
        """Whether the run trains it."""
        return self.trained and not self.urls and not self.past


OF_THE_RUN = ("steps", "data_epochs", "stop_success", "patience", "refill", "group_filter", "routing_replay", "vision")
"""Keys of `[train]` that a policy cannot change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one episode. Times are in seconds, lengths in token ids."""

    turns: PositiveInt = 8
    """Maximum replies per episode, all agents together."""
    turn_tokens: PositiveInt = 256
    """Maximum tokens sampled per reply."""
    on_turn_length: OnTurnLength = "stop"
    """Handling of a reply without an end token: `stop` ends the episode, `continue` closes the reply and passes it to the
    environment. A play function gets the reply with `finish == "length"`; with `stop`, its conversation cannot go on."""
    episode_tokens: PositiveInt | None = None
    """Maximum tokens after the opening prompt, sampled and observed, all agents together; none is unlimited. An observation
    that does not fit is left out, and ends the episode."""
    context: PositiveInt | None = None
    """Maximum tokens of prompt and reply in one request; none asks the engine."""
    prompt_tokens: PositiveInt | None = None
    """Maximum tokens of an opening prompt, tools included; tasks over it are skipped, counted and listed. None skips no task.
    """
    observation_tokens: NonNegativeInt | None = None
    """Maximum tokens of an observation; longer ones are truncated, with a visible marker. None truncates nothing."""
    images: int = 64
    """Maximum images and videos per observation; more fail the episode."""
    episode_images: int | None = None
    """Maximum images and videos in all observations of an episode; more fail it. None is unlimited."""
    wall_clock_s: PositiveFloat = 600.0
    """Maximum seconds per episode."""
    generate_s: PositiveFloat = 300.0
    """Timeout of one reply, in seconds."""
    env_s: PositiveFloat = 60.0
    """Timeout of one reset, step or close, in seconds."""
    reward_s: PositiveFloat = 60.0
    """Timeout of a reward, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How episodes are played."""

    function: Annotated[str | None, PathKind.OBJECT] = None
    """Play function that replaces the environment, as `file.py:play`; none plays environments."""
    groups: PositiveInt = 16
    """Tasks per training step."""
    group_size: PositiveInt = 8
    """Episodes per task."""
    adapt: Annotated[float | None, bounds(gt=0, le=1), Needs("schedule.selection = complete | fifo")] = None
    """Minimum factor of `env.weight`; above it, weights follow 4 p (1 - p) of the environment's pass rates p. None keeps them.
    """
    concurrency: PositiveInt = 256
    """Maximum concurrent engine calls; an episode needs none of them while its environment works."""
    environments: PositiveInt | None = None
    """Maximum environments alive at once; none starts as many as keep the engine busy."""
    max_retries: NonNegativeInt = 1
    """Maximum restarts of an episode that failed by its environment, its engine or a timeout, before the failure counts; the
    death of its process is no failure of the episode, and is repeated up to 5 times."""
    max_failed: Fraction = 0.2
    """Maximum share of failed episodes in a step or an evaluation; more stop the run, which can be resumed with --resume."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature in training."""
    top_p: NonZeroFraction = 1.0
    """Nucleus sampling: the fewest ids with this total probability; the trainer renormalizes over them, at two passes per step.
    """
    top_k: NonNegativeInt = 0
    """Number of most likely ids to sample from, renormalized likewise; 0 disables it."""
    min_p: Annotated[float, bounds(ge=0, lt=1)] = 0.0
    """Minimum probability of an id as a share of the most likely one's, applied first, renormalized likewise; 0 disables it."""
    history: Annotated[str, PathKind.OBJECT, Check(history_error)] = "append"
    """Earlier turns in the prompt: `append`, all of them; `inline`, all of them within one assistant message; `template`, those
    that the model's template renders; `keep_images:N`, `downscale_images:N`, `drop_reasoning:N` or `file.py:policy`, those that
    a policy selects."""
    stop: Annotated[tuple[str, ...], _error_unless(all, 'a text must not be empty; write for example ["</search>"]')] = ()
    """Texts that end a reply, in addition to the model's end tokens; the text for the environment ends right after them."""
    watchdog_s: PositiveFloat = 120.0
    """Seconds without progress before pending work is printed (also on SIGUSR1, with stacks)."""
    control_text: ControlText = "neutralise"
    """Control tokens in environment text: `neutralise` encodes them as plain text, `reject` fails the episode, `allow` encodes
    them as control tokens. They are counted in each case."""
    sanity: Sanity = "strict"
    """Comparison of finished episodes with a full render: `strict` reports any difference, `ignore_strippable` all but white
    space, `off` and `disable` skip it."""
    sanity_every: Annotated[SanityEvery, Needs("rollout.sanity = strict | ignore_strippable")] = "episode"
    """Scope of the comparison: the last turn of an episode, or each turn."""
    sanity_share: Annotated[Fraction, Needs("rollout.sanity = strict | ignore_strippable")] = 0.0625
    """Share of episodes compared, selected by their keys; each costs about one full render."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupConfig:
    """Supervised training on demonstrations or conversations before reinforcement, ended by a measured gate."""

    demos: NonNegativeInt = 0
    """Demonstrations of the environment to record; 0 skips the warmup. With a dataset: conversations to use, 0 for all."""
    dataset: Annotated[str | None, PathKind.DATA] = None
    """Conversations to train on instead: JSONL, Parquet or Arrow rows with `messages` and optionally `tools`; none records
    demonstrations."""
    steps: Annotated[PositiveInt, WARMED_UP] = 500
    """Steps of a round, at whose end the learning rate is a tenth; rounds after the first begin at about half of it."""
    rounds: Annotated[PositiveInt, WARMED_UP] = 3
    """Maximum rounds: another begins where the gate is not met and the loss fell in the second half of the one before."""
    batch: Annotated[PositiveInt, WARMED_UP] = 32
    """Episodes per step."""
    lr: Annotated[PositiveFloat, WARMED_UP] = 4e-3
    """Peak learning rate, with cosine decay to a tenth."""
    gate_success: Annotated[Fraction | None, WARMED_UP] = None
    """Success rate of sampled episodes on training tasks that ends the warmup; a lower rate at the last step stops the run.
    None is 0.75 of the demonstrations' own; a lower rate then stops the run only where rewards do not differ, or the replies
    succeed as often in other tasks."""
    gate_loss: Annotated[PositiveFloat | None, WARMED_UP] = None
    """Maximum supervised loss per sampled token that is required too; none requires no loss."""
    gate_every: Annotated[PositiveInt, WARMED_UP] = 50
    """Steps between gate evaluations."""
    gate_tasks: Annotated[PositiveInt, WARMED_UP] = 128
    """Tasks per gate evaluation; one that passes is repeated with other samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Reinforcement learning."""

    steps: NonNegativeInt = 60
    """Reinforcement steps."""
    data_epochs: PositiveFloat | None = None
    """Passes over a finite list of training tasks, which set `steps` when the run starts; none takes `steps` as it is."""
    algorithm: Annotated[str, PathKind.OBJECT, Check(algorithm_error, only_training=True)] = "grpo"
    """Algorithm: `grpo`, `dr_grpo`, `dapo`, `rloo`, `reinforce_pp`, `reinforce_pp_baseline`, `gspo`, `cispo` or
    `file.py:function`. It sets the keys below that are none."""
    reward_weight: Annotated[NonNegativeFloat, Needs("teacher given")] = 1.0
    """Factor on the rewards' advantages beside teachers; 0 trains by the teachers alone, and groups of one episode suffice."""
    stop_success: Annotated[Fraction | None, bounds(gt=0)] = None
    """Success rate of a step's episodes, averaged over 5 steps, that ends reinforcement early; none takes all steps."""
    patience: Annotated[PositiveInt | None, Needs("train.gradient_signal_steps > 0")] = None
    """Steps without a signal in the gradients, and so without an update, that end reinforcement early; none takes all steps."""
    lr: NonNegativeFloat = 1e-3
    """Learning rate."""
    schedule: Schedule = "linear"
    """Decay of the learning rate to 0 over the run (`constant`: no decay)."""
    lr_warmup_steps: NonNegativeInt = 0
    """First steps, over which the learning rate rises linearly to `lr`; the decay follows."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay of AdamW."""
    betas: Annotated[tuple[float, float], bounds(ge=0, lt=1)] = (0.9, 0.95)
    """Momentum coefficients of AdamW."""
    eps: PositiveFloat = 1e-8
    """Term added to the denominator of AdamW; a larger one damps updates of weights with tiny gradients."""
    gradient_signal_steps: Annotated[NonNegativeInt, _error_unless(lambda steps: steps not in range(1, 10), TOO_FEW_STEPS)] = 0
    """Steps over which gradient agreement is averaged to scale the learning rate by its signal, five times as many while no
    step is taken; 0 disables scaling."""
    max_grad_norm: PositiveFloat = 1.0
    """Maximum gradient norm; larger gradients are scaled down to it."""
    epochs: PositiveInt = 1
    """Maximum passes over each step's groups; with `gradient_signal_steps`, as few as move the policy as far."""
    minibatches: PositiveInt = 1
    """Optimizer steps per epoch."""
    micro_tokens: PositiveInt | None = None
    """Maximum tokens per forward pass; results do not depend on it. None is 4096. For a large model in float32 on a CPU it is
    512, and for an adapter of one, whose step takes little more than a pass does, 256, or 512 in mixed precision."""
    batching: Batching = "auto"
    """Computation of shared prefixes: `tree` computes them once, `rows` in each row, `auto` selects the cheaper one by
    estimate."""
    gradient_checkpointing: bool = False
    """Whether activations within layers are recomputed in the backward pass: less memory, about a third more time."""
    clip_low: NonZeroFraction | None = None
    """Clip range: ratios below 1 - clip_low are clipped; none is the algorithm's (grpo: 0.2)."""
    clip_high: PositiveFloat | None = None
    """Clip range: ratios above 1 + clip_high are clipped; none is the algorithm's (grpo: 0.28)."""
    clip_cap: Annotated[float | None, bounds(gt=1), Needs("train.algorithm != cispo")] = None
    """Maximum ratio in the loss of tokens with a negative advantage (dual clip, arXiv 1912.09729); none is unlimited."""
    aggregation: Aggregation | None = None
    """Loss aggregation: mean over sampled tokens; mean over trajectories of their token means; or sum of tokens / (trajectories
    * `fixed_length`). None is the algorithm's (grpo: token)."""
    fixed_length: Annotated[PositiveInt, FIXED] = 1024
    """Tokens per trajectory that `fixed` divides by, independent of the sampled length (Dr. GRPO, arXiv 2503.20783)."""
    vision: Annotated[VisionTraining, Needs("model.path given", "model.vision = true")] = "trained"
    """Whether the vision tower and its projector are trained; `frozen` also needs no optimizer state for them."""
    advantage: Annotated[str | None, PathKind.OBJECT, Check(advantage_error, only_training=True), REWARDED] = None
    """Advantage: reward minus the group mean, divided by the group's standard deviation (`std`) or not (`mean`); minus the mean
    of the other rewards (`rloo`); normalized over the batch (`batch`); minus the group mean, then normalized over the batch
    (`group_batch`); minus the average of the agent's earlier rewards in the environment (`running`); or `file.py:function` of a
    group's trajectories and their returns. None is the algorithm's (grpo: std)."""
    credit: Annotated[CreditUnit, REWARDED] = "trajectory"
    """Credit assignment: the trajectory's reward for all its tokens, or for a turn's tokens the rewards from that turn on."""
    discount: Fraction = 1.0
    """Discount of a reward per turn, with `credit = "turn"`."""
    loss_scale: Annotated[str, PathKind.OBJECT, Check(loss_scale_error, only_training=True)] = "default"
    """Loss weights of sampled tokens: `default`, all equal; `last_round`, only the last round; or `file.py:function`, weights
    per turn or token."""
    overlong_tokens: Annotated[PositiveInt | None, REWARDED] = None
    """Sampled tokens at which a trajectory loses one point of reward (DAPO, arXiv 2503.14476, eq. 13); none disables it, or
    with dapo uses the limits."""
    overlong_buffer: Annotated[
        NonZeroFraction, Needs("train.overlong_tokens given", "train.algorithm = dapo | file.py:name")
    ] = 0.2
    """Share of `overlong_tokens`, at its end, over which that penalty grows linearly."""
    overlong_filter: bool = False
    """Whether episodes cut by a length limit (of a turn, the episode or the context) are left out of the loss; their rewards
    still count in the baseline."""
    refill: Annotated[NonNegativeInt | None, REWARDED] = None
    """Maximum rounds of new tasks that replace groups without signal; none is the algorithm's (dapo: 3, others: 0)."""
    group_filter: Annotated[str | None, PathKind.OBJECT, REWARDED] = None
    """`file.py:function` of a group's trajectories: whether the group is trained. It decides which groups `refill` replaces, in
    place of equal rewards."""
    on_failure: Annotated[OnFailedEpisode, REWARDED] = "drop_group"
    """Handling of a group with a failed episode: drop the group, or compute the baseline over the survivors."""
    min_group: Annotated[int, bounds(ge=2), REWARDED] = 2
    """Minimum rewarded trajectories per group; smaller groups are dropped and counted."""
    entropy: NonNegativeFloat = 0.0
    """Weight of the entropy bonus: the mean entropy of the sampled distribution at trained tokens, subtracted from the loss."""
    kl: NonNegativeFloat = 0.0
    """Weight of the KL term to the reference policy, the one at the start of reinforcement; 0 loads none."""
    kl_estimator: Annotated[KLEstimator | None, Needs("train.kl > 0")] = None
    """KL estimator per token; none is the algorithm's (grpo: k3)."""
    kl_in: Annotated[KLPlace | None, Needs("train.kl > 0")] = None
    """Whether the KL term is added to the loss or subtracted from the reward (k1); none is the algorithm's (grpo: loss)."""
    reference: Annotated[Reference, Needs("train.kl > 0", "teacher given", unless=("none",))] = "auto"
    """Reference policy of the KL term and of a `self` teacher: a second `copy` of the trained weights; `adapter_off`, the model
    without its LoRA; `none`, only with `kl = 0`. `auto` disables the LoRA if it is untrained, and copies otherwise."""
    reference_every: Annotated[NonNegativeInt, Needs("train.kl > 0", "teacher given")] = 0
    """Steps after which the current policy becomes the reference policy, each time; 0 keeps the first."""
    old_logprobs: OldLogprobs = "trainer"
    """Source of the logprobs in the ratio's denominator."""
    max_mismatch: PositiveFloat | None = None
    """Maximum |trainer logprob - engine logprob| of a token of the current policy, in nats; a larger one stops the run. None:
    1e-3 in float32, off in bfloat16."""
    max_mismatch_kl: PositiveFloat | None = None
    """Maximum mean KL(engine || trainer) per token of the current policy, in nats; a larger one stops the run. None: 0.1, or
    off with max_mismatch."""
    correction: Correction = "none"
    """Correction of logprob differences between trainer and engine, and for tokens of older policies: truncated weights per
    token, or exclusion of trajectories or tokens with a ratio out of bounds."""
    correction_low: NonNegativeFloat | None = None
    """Lower bound of the correction's ratio; none is the correction's default."""
    correction_high: PositiveFloat | None = None
    """Upper bound of the correction's ratio; none is the correction's default."""
    routing_replay: ExpertRouting = "off"
    """Whether a mixture-of-experts model is trained with the experts that the engine selected for each token (R3, arXiv
    2510.11370)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherConfig:
    """One teacher: a model that scores the ids that the policy sampled, beside rewards or alone (`train.reward_weight = 0`)."""

    name: str = ""
    """Label in metrics; if empty, `teacher` and its number from 1 (`teacher` where there is one)."""
    path: Annotated[str | None, PathKind.DIRECTORY] = None
    """Hugging Face directory of the teacher, or a LoRA adapter's; it is loaded beside the policy."""
    urls: Annotated[tuple[str, ...], _each(_url_error)] = ()
    """URLs of servers that run the teacher (vLLM, SGLang, `turnwright serve`); each takes a share of the episodes."""
    self: Annotated[bool, Needs("teacher.hint given")] = False
    """Whether the policy is its own teacher, after `hint`: its reference policy, which has the weights of the start of
    reinforcement, or of every `train.reference_every` steps."""
    hint: Annotated[str | None, PathKind.OBJECT] = None
    """`file.py:function` of a trajectory that returns messages, which the teacher reads before the ids of the episode; none, or
    none returned for a trajectory, gives the same ids to both, or with `self` no answer."""
    policies: Annotated[tuple[str, ...], Needs("policy given")] = ()
    """Names of the policies that it teaches; none given means all."""
    environments: tuple[str, ...] = ()
    """Names of the environments whose episodes it scores; none given means all."""
    agents: tuple[str, ...] = ()
    """Names of the agents whose ids it scores; none given means all."""
    signal: TeacherSignal = "advantage"
    """`advantage` adds `weight * (log p_teacher - log p_policy)` of each sampled id to its advantage, after normalization;
    `loss` adds `weight * divergence` of the distributions at each sampled id to the loss."""
    weight: PositiveFloat = 1.0
    """Factor of the signal."""
    bound: Annotated[PositiveFloat, Needs("teacher.signal = advantage")] = 5.0
    """Maximum |log p_teacher - log p_policy| that counts, in nats."""
    divergence: Annotated[Divergence, DIVERGES] = "reverse"
    """Divergence in the loss: `reverse`, KL(policy || teacher); `forward`, KL(teacher || policy); `js`, Jensen-Shannon."""
    top: Annotated[PositiveInt | None, DIVERGES] = None
    """Ids that the divergence tells apart: the most likely ones of the teacher, with all others as one; none is the
    vocabulary, which servers do not send."""
    max_unaligned: Annotated[Fraction, Needs("teacher.path given")] = 0.1
    """Maximum share of a step's ids in text that a teacher's other tokenizer does not split alike; more stop the run."""
    timeout_s: Annotated[PositiveFloat, SERVED] = 120.0
    """Seconds in which a server must answer for an episode; after that its ids are `no_teacher`."""
    key_env: Annotated[str | None, SERVED] = None
    """Name of the environment variable that holds the servers' API key; none sends no key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """How sampling and training overlap."""

    mode: ScheduleMode = "sync"
    """`sync`: sample a batch, then train on it. `one_step_off`: sample the next batch while one trains; weights change between
    batches. `async`: sample all the time; weights change during replies."""
    staleness: Annotated[NonNegativeInt, Needs("schedule.mode = async")] = 2
    """Maximum updates between the policy that sampled a token and the one trained on it; groups enter no earlier than this
    allows, and none is discarded."""
    hold: Annotated[bool, Needs("schedule.mode = async")] = False
    """Whether episodes are held, alive, while the trainer trains; for an engine that shares the trainer's device."""
    selection: Annotated[Selection, Needs("schedule.mode = async")] = "complete"
    """Groups of a step: `complete`, the oldest complete groups; `fifo`, those admitted first; `discard`, the complete ones
    within the bound. The last two are for comparison: `fifo` waits longer, `discard` loses slow episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """LoRA adapters, trained instead of the model's weights (needs the extra `lora`)."""

    rank: NonNegativeInt = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: Annotated[PositiveFloat | None, Needs("lora.rank > 0")] = None
    """Scale of an adapter's output, applied as alpha / rank; none is twice the rank."""
    targets: Annotated[tuple[str, ...], Needs("lora.rank > 0")] = ("all",)
    """Linear layers with an adapter, by the ends of their names (`q_proj`, `mlp.up_proj`); `all` is those of the text model
    except its head."""
    dropout: Annotated[float, bounds(ge=0, lt=1), Needs("lora.rank > 0"), WARMED_UP] = 0.0
    """Dropout of an adapter's inputs in the warmup. Reinforcement uses none, so that the trained policy is the sampled one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantConfig:
    """Low precision: the weights that the trainer computes with and the engine samples from."""

    kind: QuantKind = "none"
    """Number format of linear layers: `int4` (codes -7..7, a scale per group of inputs), `fp8` (e4m3, a scale per square block)
    or `none`. Checkpoints hold full-precision weights."""
    group: Annotated[PositiveInt, bounds(ge=8), Needs("quant.kind = int4")] = 128
    """Inputs per scale of int4; 32 suits tiny models."""
    block: Annotated[PositiveInt, Needs("quant.kind = fp8")] = 128
    """Side of a block with one scale, and channels per scale of an activation."""
    activations: Annotated[bool, Needs("quant.kind = fp8")] = True
    """Whether activations are rounded to fp8 too (W8A8); false rounds weights only. Emulated: products are not computed in
    fp8."""
    scale_dtype: Annotated[DType, Needs("quant.kind = int4")] = "auto"
    """Data type of int4 scales; `auto` is the model's."""
    train: Annotated[bool, Needs("quant.kind = int4 | fp8")] = True
    """Whether the trainer computes on the same grid; false quantizes the engine only, which needs `train.correction`."""
    packed: Annotated[bool, Needs("quant.kind = int4 | fp8")] = False
    """Whether servers get packed weights, codes and scales, and compute with them in bfloat16; false sends the values."""
    skip: Annotated[tuple[str, ...], Needs("quant.kind = int4 | fp8")] = ("lm_head",)
    """Layers kept in full precision, by the ends of their names, besides embeddings, norms, routers, vision tower and output
    head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Held-out evaluation before and after reinforcement."""

    tasks: PositiveInt = 256
    """Held-out tasks."""
    samples: PositiveInt = 1
    """Sampled episodes per task."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature."""
    top_p: NonZeroFraction = 1.0
    """`rollout.top_p` for sampled episodes."""
    top_k: NonNegativeInt = 0
    """`rollout.top_k` for sampled episodes."""
    min_p: Annotated[float, bounds(ge=0, lt=1)] = 0.0
    """`rollout.min_p` for sampled episodes."""
    overlap: Overlap = "refused"
    """Whether tasks of the evaluation may be trained too. `allowed` trains all of them, for environments with few possible
    tasks; results are then labeled as not held out."""
    success: float = 1.0
    """Minimum reward of a success."""
    greedy: bool = True
    """Whether each task is also played greedily."""
    every: NonNegativeInt = 0
    """Reinforcement steps between evaluations during training; 0 disables them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints to resume from."""

    every: PositiveInt = 10
    """Reinforcement steps between checkpoints; on resume, steps since the last one are trained again from the journal."""
    keep: PositiveInt = 2
    """Number of most recent checkpoints to keep."""
    keep_best: bool = True
    """Whether to keep also the checkpoint with the highest sampled success on held-out tasks, measured every `eval.every`
    steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackConfig:
    """Trackers that receive the rows of metrics.jsonl; each runs in its own process and never blocks training."""

    to: Annotated[tuple[str, ...], _each(tracker_error)] = ()
    """Trackers: `"trackio"`, `"wandb"`, `"tensorboard"`, or your own as `"file.py:Class"`."""
    project: Annotated[str, Needs("track.to given")] = "turnwright"
    """Project name at the trackers."""
    name: Annotated[str | None, Needs("track.to given")] = None
    """Run name at the trackers; none is the name of the run directory."""


def _address_error(address: str) -> str:
    host, colon, port = address.rpartition(":")
    fits = bool(host and colon) and port.isdecimal() and int(port) < 2**16
    return "" if fits else "write host:port, such as 0.0.0.0:7070; port 0 is a free one"


OF_WORKERS = Needs("scale.listen given", "scale.ray given")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleConfig:
    """Workers that play the episodes, in other processes or on other machines; without them, the run plays them itself."""

    listen: Annotated[str | None, Check(_address_error)] = None
    """Address `host:port` at which workers join over HTTP (`turnwright worker --join`); none plays the episodes in the run, or
    with `ray` is a free port of every address. Port 0 is a free one."""
    ray: str | None = None
    """Ray cluster whose nodes run the workers: `auto`, or the address of its head; none uses no Ray (needs the extra `ray`)."""
    ray_workers: Annotated[PositiveInt | None, Needs("scale.ray given")] = None
    """Number of workers on the Ray cluster; none is one on each node, those that join later too."""
    ray_cpus: Annotated[NonNegativeFloat, Needs("scale.ray given")] = 1.0
    """CPUs that Ray reserves per worker."""
    ray_engine_cpus: Annotated[PositiveFloat, Needs("scale.ray given")] = 1.0
    """CPUs that Ray reserves per server that the run starts."""
    ray_engine_gpus: Annotated[NonNegativeFloat, Needs("scale.ray given")] = 1.0
    """GPUs that Ray reserves per server that the run starts; 0 starts builds for CPUs, several of one node share a server's
    model (tensor parallelism)."""
    lease_s: Annotated[PositiveFloat, OF_WORKERS] = 15.0
    """Seconds without a word after which a worker is lost and stops by itself; a broken connection is noticed at once."""
    stall_s: Annotated[PositiveFloat | None, OF_WORKERS] = None
    """Seconds without an event after which a group is asked for elsewhere; none is the sum of `limits.wall_clock_s`, `env_s`
    and `reward_s`."""
    wait_s: Annotated[PositiveFloat, OF_WORKERS] = 600.0
    """Seconds a group waits while there is no worker before the run stops; it can be resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Configuration of a run."""

    out: Annotated[str, _error_unless(str.strip, "must name a directory for the run")] = "runs/run"
    """Run directory."""
    seed: NonNegativeInt = 0
    """Seed of every random draw of the run."""
    model: ModelConfig = ModelConfig()
    env: tuple[EnvConfig, ...] = ()
    policy: tuple[PolicyConfig, ...] = ()
    rollout: RolloutConfig = RolloutConfig()
    limits: Limits = Limits()
    engine: EngineConfig = field(default_factory=EngineConfig)
    warmup: WarmupConfig = WarmupConfig()
    train: TrainConfig = TrainConfig()
    teacher: tuple[TeacherConfig, ...] = ()
    schedule: ScheduleConfig = ScheduleConfig()
    lora: LoraConfig = LoraConfig()
    quant: QuantConfig = QuantConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    track: TrackConfig = TrackConfig()
    scale: ScaleConfig = ScaleConfig()

    @property
    def policies(self) -> tuple[PolicyConfig, ...]:
        """Policies of the run: those of `[[policy]]`, else one without a name that plays every agent."""
        return self.policy or (PolicyConfig(agents=("*",)),)

    @property
    def engines_on_ray(self) -> bool:
        """Whether the run starts its servers on the nodes of a Ray cluster."""
        return self.scale.ray is not None and self.engine.kind in ("vllm", "sglang") and not self.engine.attached
