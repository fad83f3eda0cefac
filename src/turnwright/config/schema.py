"""Sections of the configuration: the keys of each, and beside them the rules that they keep.

The type of a field is its key's, with the bounds that pydantic checks; its docstring is the help
text. `check` yields the keys that do not go together, and `effects` says what keys need to have an
effect: a setting that nothing would read is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from turnwright.config.names import (
    ALGORITHM_ADVANTAGES,
    COLUMNS,
    CRITIC_ADVANTAGES,
    ENGINES,
    GROUPLESS_ADVANTAGES,
    PROGRAM,
    STATE_ADVANTAGES,
    address_error,
    advantage_error,
    algorithm_error,
    device_error,
    engine_error,
    history_error,
    loss_scale_error,
    no_such_file,
    out_error,
    parser_error,
    policy_name_error,
    sampler_error,
    sanity_share_error,
    stop_error,
    tracker_error,
    url_error,
)
from turnwright.config.rules import Broken, Context, Need, Section
from turnwright.config.snapshots import snapshot
from turnwright.config.values import PathKind, Valid, changed, is_template_file
from turnwright.errors import did_you_mean

NonNegativeInt = Annotated[int, Ge(0)]
PositiveInt = Annotated[int, Ge(1)]
NonNegativeFloat = Annotated[float, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
NonZeroFraction = Annotated[float, Gt(0), Le(1)]
ProperFraction = Annotated[float, Ge(0), Lt(1)]
MissingLogprobs = Literal["error", "mask", "recompute"]
UpdatePath = Literal["disk", "group", "tensors", "lora"]
GroupBackend = Literal["auto", "gloo", "nccl"]
InFlight = Literal["recompute", "salt", "keep"]
AdapterMode = Literal["auto", "rows", "merged"]
DType = Literal["auto", "float32", "bfloat16"]
Precision = Literal["auto", "float32", "mixed", "bfloat16"]
QuantKind = Literal["none", "int4", "fp8"]
OnInvalid = Literal["observe", "resample"]
RejectedReplies = Literal["trained", "untrained"]
Isolation = Literal["thread", "process"]
OnTurnLength = Literal["stop", "continue"]
ControlText = Literal["neutralise", "reject", "allow"]
Sanity = Literal["strict", "ignore_strippable", "off", "disable"]
SanityShare = float | Literal["turns"]
Schedule = Literal["linear", "cosine", "constant"]
Overlap = Literal["refused", "allowed"]
Batching = Literal["auto", "rows", "tree"]
Aggregation = Literal["token", "trajectory", "fixed"]
VisionTraining = Literal["trained", "frozen"]
CreditUnit = Literal["trajectory", "turn"]
StateKey = Literal["history", "observation"]
CriticBody = Literal["own", "policy"]
OnFailedEpisode = Literal["drop_group", "survivors"]
KLEstimator = Literal["k1", "k2", "k3"]
KLPlace = Literal["loss", "reward"]
Reference = Literal["auto", "copy", "adapter_off", "none"]
OldLogprobs = Literal["trainer", "engine"]
Correction = Literal["none", "tis", "sequence_mis", "sequence_mis_mean", "icepop"]
ExpertRouting = Literal["off", "replay"]
ScheduleMode = Literal["sync", "one_step_off", "async"]
TeacherSignal = Literal["advantage", "loss"]
Divergence = Literal["reverse", "forward", "js"]
Url = Annotated[str, Valid(url_error)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Section):
    """Sampling engine: in this process, or vLLM, SGLang or llama.cpp servers, with token
    ids as input and output."""

    kind: Annotated[str, Valid(engine_error)] = "local"
    """Engine: `local` samples in this process; `vllm`, `sglang` and `llamacpp` are servers; `auto`
    detects what answers at `urls`; `chat` is any chat endpoint. `chat` and `llamacpp` servers at
    `urls` accept no weight updates, so they are for evaluation only; a run can train with
    `llamacpp` servers of its own. An installed package may add others."""
    speculate: NonNegativeInt = 0
    """Maximum ids drafted per step from earlier text and verified in one pass; 0
    disables speculation. For `local`, and for `vllm` and `sglang` servers started by
    the run (SGLang on a GPU)."""
    adapters: AdapterMode = "auto"
    """LoRA adapters of several policies: `rows` samples all from one copy of the model, where each
    row of a pass takes its own adapter; `merged` gives each policy an engine with merged weights.
    `auto` is `rows` on a GPU and `merged` on a CPU, where engines compute beside each other."""
    urls: tuple[Url, ...] = ()
    """URLs of servers that run the model; without them and `urls_file`, the run starts `servers` of
    them and stops them at its end."""
    urls_file: Annotated[str | None, PathKind.DIRECTORY] = None
    """File with URLs of further servers, one a line, which the run watches: servers join and leave
    while it runs (`turnwright engines join URL --list FILE`)."""
    servers: PositiveInt = 1
    """Number of servers started without `urls` and `urls_file`."""
    install_dir: Annotated[str | None, PathKind.DIRECTORY] = None
    """Directory used by `turnwright engines install`; none is its default."""
    model: str | None = None
    """Model name on the servers; none asks them. Required for a chat endpoint."""
    key_env: str | None = None
    """Name of the environment variable that holds the servers' API key; none sends no key."""
    missing_logprobs: MissingLogprobs = "error"
    """Handling of ids without a logprob from the server: an error, excluded from the loss, or
    trained against the trainer's own logprob."""
    weights: Annotated[str | None, PathKind.DIRECTORY] = None
    """Directory for weight updates, at the same path on the servers; none is `weights`
    in the run directory."""
    tree: bool = False
    """Whether weights on disk (`update = disk | lora`) go to the servers' machines over HTTP, to
    each machine once and from machine to machine, in place of a directory that all see."""
    relay_port: NonNegativeInt = 0
    """Port of `turnwright engines relay` on each machine; 0: the servers pass weights on
    themselves, as `turnwright serve` does, or Ray's actors do."""
    colocate: bool = False
    """Whether engine and trainer share a device and alternate: the engine releases its memory
    while the trainer trains."""
    update: UpdatePath = "disk"
    """Transport of weight updates to servers: `disk`, a directory that they read; `group`, a
    process group; `tensors`, request bodies (SGLang); `lora`, only the trained adapter (`[lora]`),
    from disk, on top of the base model of the servers (vLLM, SGLang)."""
    in_flight: InFlight = "recompute"
    """Replies in flight during a weight update: `recompute` interrupts them and drops the prefix
    cache, `salt` interrupts them and separates the cache by policy version, `keep` continues them
    on the cache of the previous weights (vLLM, SGLang)."""
    group_backend: GroupBackend = "auto"
    """Backend of the process group: `auto` is `nccl` if the model trains on a GPU of
    its own, else `gloo`."""
    group_host: str | None = None
    """Address at which servers reach this process for a group or a tree; none uses the
    local address of the route to each server, and for a tree loopback, or with
    `scale.ray` this node's address."""
    group_s: PositiveFloat = 600.0
    """Timeout in seconds for a server to join a group, and for each bucket of weights,
    including one in a request."""
    concurrency: PositiveInt = 256
    """Maximum concurrent calls per server; further calls wait."""
    unavailable_timeout_s: PositiveFloat = 300.0
    """Seconds a call waits for an available server before failing."""
    start_s: PositiveFloat = 600.0
    """Timeout in seconds for a server started by the run to answer."""
    weight_check_tolerance: PositiveFloat | None = None
    """Maximum |server logprob - trainer logprob| of known ids after a weight update, in nats; none
    is 1e-3 in float32, 0.5 in bfloat16."""

    @property
    def attached(self) -> bool:
        """Whether the servers run without this run."""
        return bool(self.urls or self.urls_file)

    def check(self, run: RunConfig, context: Context) -> Broken:
        """Yield keys that the kind of engine does not have."""
        can_speculate = self.kind in ("local", "vllm", "sglang") and not self.attached
        if self.speculate and not can_speculate:
            why = (
                "is for the local engine and for servers started by the run; set speculation "
                "of your own server at the server"
            )
            yield "speculate", why
        if self.kind == "local":
            yield from self._check_local()
        elif self.kind in ENGINES:
            yield from self._check_servers(run, context)
        # An installed package's engine checks what it needs itself.

        learns_policies = context.training and bool(run.policy)
        if learns_policies and self.kind != "local" and self.update != "lora":
            why = 'must be "lora" with [[policy]]: servers hold one adapter for each policy'
            yield "update", why
        if context.training and run.schedule.mode != "sync":
            yield from self._check_overlap(run)

    def _check_local(self) -> Broken:
        if self.attached:
            why = 'needs engine.kind = "auto", or the kind of the servers, such as "vllm"'
            yield "urls" if self.urls else "urls_file", why
        if self.update != "disk":
            why = 'is for servers: engine.kind = "vllm", "sglang" or "auto"; leave it out'
            yield "update", why

    def _check_servers(self, run: RunConfig, context: Context) -> Broken:
        if self.colocate and self.kind in ("chat", "llamacpp"):
            why = 'needs an engine that can release its memory: "local", "vllm" or "sglang"'
            yield "colocate", why
        yield from self._check_update(run)
        if run.engines_on_ray:
            yield from self._check_on_ray()
        if self.kind in ("auto", "chat") and not self.attached:
            why = (
                'needs engine.urls = ["http://host:port"]; the run can start vllm, sglang and '
                "llamacpp"
            )
            yield "kind", why
        if self.kind == "chat":
            yield from self._check_chat(context)
        if self.kind == "llamacpp":
            yield from self._check_llamacpp(context)
        if context.training and self.missing_logprobs == "recompute":
            yield from self._check_recompute(run)

    def _check_update(self, run: RunConfig) -> Broken:
        if self.tree and self.update not in ("disk", "lora"):
            why = (
                f'sends directories of weights; with engine.update = "{self.update}" there are none'
            )
            yield "tree", why
        if self.update == "tensors" and self.kind not in ("sglang", "auto"):
            why = (
                'is for engine.kind = "sglang": no other server accepts weights in requests; '
                'use "disk" or "group"'
            )
            yield "update", why
        if self.update != "lora":
            return
        if not run.lora.rank:
            yield "update", "there is no adapter to send; set lora.rank"
        elif self.kind not in ("vllm", "sglang", "auto"):
            why = "adapters go to vLLM and SGLang only; leave it out to send merged weights"
            yield "update", why
        elif self.colocate:
            why = (
                "with engine.colocate, a sleeping server releases the adapter's base model; "
                "leave one of the two keys out"
            )
            yield "update", why

    def _check_on_ray(self) -> Broken:
        if self.update not in ("disk", "lora"):
            why = 'must be "disk" or "lora" for servers that the run starts on a Ray cluster'
            yield "update", why
        if self.colocate:
            why = "is for servers on the trainer's device; leave it out with scale.ray"
            yield "colocate", why
        if self.relay_port:
            why = (
                "is for servers that run without this run; leave it out with scale.ray, whose "
                "actors relay"
            )
            yield "relay_port", why

    def _check_chat(self, context: Context) -> Broken:
        if not self.model:
            yield "model", "must name the model that the chat endpoint serves"
        if context.training:
            why = (
                "cannot be trained with: it returns text, and training needs sampled ids and "
                "their logprobs; "
                'use "vllm", "sglang" or "local", and this one for `turnwright eval`'
            )
            yield "kind", why

    def _check_llamacpp(self, context: Context) -> Broken:
        # llama.cpp takes no new weights while it runs.
        if self.update != "disk":
            why = 'must be "disk" for llama.cpp, which is started again with each policy\'s file'
            yield "update", why
        if context.training and self.attached:
            why = (
                "accepts no weight updates, so it would always sample from the first policy; "
                "without engine.urls the run starts one again with each policy, "
                'or use "vllm" or "sglang"'
            )
            yield "kind", why
        if context.training and self.missing_logprobs == "error":
            why = (
                'must be "mask" or "recompute": llama.cpp reports no logprob of ids that end '
                "inside a character"
            )
            yield "missing_logprobs", why

    def _check_recompute(self, run: RunConfig) -> Broken:
        # The trainer's logprobs stand for the engine's.
        if run.train.old_logprobs == "engine":
            why = 'needs train.old_logprobs = "trainer", since the engine\'s are missing'
            yield "missing_logprobs", why
        if run.train.correction != "none":
            why = (
                "has no logprob of the engine for train.correction to weigh such ids by; set "
                'engine.missing_logprobs = "mask"'
            )
            yield "missing_logprobs", why

    def _check_overlap(self, run: RunConfig) -> Broken:
        if self.in_flight == "keep" and self.kind not in ("vllm", "sglang", "auto"):
            why = "is for vLLM and SGLang; the local engine interrupts replies: leave it out"
            yield "in_flight", why
        if self.in_flight == "keep" and self.update == "lora":
            why = "a reply ends with its adapter (engine.update = lora): set recompute or salt"
            yield "in_flight", why
        if self.colocate and run.schedule.mode == "async" and not run.schedule.hold:
            why = "needs schedule.hold = true, since the engine is asleep while the trainer trains"
            yield "colocate", why
        if self.colocate and run.schedule.mode == "one_step_off":
            why = (
                "samples and trains by turns, and one_step_off does both at once; leave one of "
                "the two out"
            )
            yield "colocate", why

    def needs(self, run: RunConfig) -> Iterator[Need]:
        """Yield what keys need: most are for servers."""
        startable = self.kind in ("vllm", "sglang")
        yield Need(
            ("adapters",),
            bool(run.policy) and self.kind == "local",
            "policy given and engine.kind = local",
        )
        yield Need(
            ("servers", "install_dir", "start_s"),
            startable and not self.attached,
            "engine.kind = vllm | sglang and engine.urls none and engine.urls_file none",
        )
        of_servers = (
            *("model", "key_env", "missing_logprobs", "weights", "concurrency"),
            *("unavailable_timeout_s", "weight_check_tolerance"),
        )
        yield Need(
            of_servers,
            self.kind in ("auto", "vllm", "sglang", "llamacpp", "chat"),
            "engine.kind = auto | vllm | sglang | llamacpp | chat",
        )

        # Transport of weights.
        yield Need(("weights",), self.update in ("disk", "lora"), "engine.update = disk | lora")
        yield Need(
            ("tree",),
            self.attached or (bool(run.scale.ray) and startable),
            "engine.urls given, or engine.urls_file given, or scale.ray given and engine.kind = "
            "vllm | sglang",
        )
        yield Need(("relay_port",), self.tree, "engine.tree = true")
        yield Need(("in_flight",), run.schedule.mode == "async", "schedule.mode = async")
        yield Need(("group_backend",), self.update == "group", "engine.update = group")
        yield Need(
            ("group_host",),
            self.update == "group" or self.tree,
            "engine.update = group, or engine.tree = true",
        )
        yield Need(
            ("group_s",), self.update in ("group", "tensors"), "engine.update = group | tensors"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Section):
    """Model to train: a directory, or a tiny model built by the run."""

    path: Annotated[str | None, PathKind.DIRECTORY] = None
    """Hugging Face directory of a causal or vision-language model with tokenizer and template, or a
    GGUF file, of which such a directory is made once; none builds a tiny model."""
    template: Annotated[str | None, PathKind.TEMPLATE] = None
    """Chat template that replaces the model's: a name (`chatml`, `qwen3_with_thinking`, ...) or a
    Jinja file; none keeps the model's."""
    revision: str | None = None
    """Branch, tag or commit of the hub: of a repository in its cache (`models--org--name`), or to
    verify a snapshot; none takes the directory as it is."""
    parser: Annotated[str, Valid(parser_error)] | None = None
    """Format in which tool calls and thinking are parsed (`hermes`, `qwen3_coder`, ...); none
    detects the template's."""
    hidden: PositiveInt = 64
    """Width of the tiny model."""
    layers: PositiveInt = 2
    """Number of layers of the tiny model."""
    heads: PositiveInt = 2
    """Number of attention heads of the tiny model."""
    kv_heads: PositiveInt = 2
    """Number of key-value heads of the tiny model."""
    vision: bool = False
    """Whether the tiny model is a Qwen3-VL, with a vision tower of the same
    width, layers and heads."""
    patch: PositiveInt = 8
    """Side of the tiny model's image patches, in pixels; 2 x 2 patches are one token."""
    image_side: PositiveInt = 32
    """Side in pixels of a square with the maximum image area of the tiny model; larger
    images are scaled down."""
    device: Annotated[str, Valid(device_error)] = "auto"
    """Device: `auto` (CUDA if available), `cpu`, `cuda` or `cuda:N`."""
    dtype: Precision = "auto"
    """Data type of weights and computation: `mixed` has float32 weights and multiplies in
    bfloat16, on CPUs only. `auto` is bfloat16 on CUDA; on a CPU `mixed` for a model of 20
    million weights or more where the processor multiplies bfloat16 faster and the local engine
    samples, else float32."""
    threads: PositiveInt = 1
    """CPU threads of torch; small models run faster with 1, and bitwise reproducibility is
    guaranteed only with 1."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking = false`; only
    variables that it uses."""

    @property
    def directory(self) -> Path | None:
        """Directory of `path` and `revision`; None for a tiny model.

        Raises `ConfigError` without such a snapshot.
        """
        return None if self.path is None else snapshot(Path(self.path), self.revision)

    def check(self, run: RunConfig, context: Context) -> Broken:
        """Yield sizes of a tiny model that do not fit, a missing model, or a missing template."""
        if self.path is None:
            yield from self._check_tiny()
        else:
            yield from self._check_directory(Path(self.path))
        if self.template is not None:
            yield from self._check_template(self.template, context.templates)

    def _check_directory(self, folder: Path) -> Broken:
        remedy = "or leave the key out for a tiny model built here"
        if folder.is_file():
            yield "path", f"is a file; name its directory, {remedy}"
            return
        if not folder.is_dir():
            yield "path", f"no such directory; name one that contains a model, {remedy}"
            return

        found = snapshot(folder, self.revision)
        is_model = (found / "config.json").is_file() or (found / "adapter_config.json").is_file()
        if not is_model:
            problem = "contains no config.json, so it is not a Hugging Face model directory"
            yield "path", f"{problem}; name one that does, {remedy}"

    def _check_tiny(self) -> Broken:
        head_width = self.hidden // self.heads
        if self.hidden % self.heads or head_width % 2:
            yield "hidden", f"must be an even multiple of model.heads = {self.heads}"
        if self.heads % self.kv_heads:
            yield "kv_heads", f"must divide model.heads = {self.heads}"
        if self.vision and head_width % 8:
            least = 8 * self.heads
            why = f"must be a multiple of 8 * model.heads = {least} for a vision model"
            yield "hidden", why
        if self.vision and self.image_side % (2 * self.patch):
            yield "image_side", f"must be a multiple of 2 * model.patch = {2 * self.patch}"

    def _check_template(self, template: str, names: Collection[str] | None) -> Broken:
        if is_template_file(template):
            if not Path(template).is_file():
                yield "template", no_such_file(template)
        elif names is not None and template not in names:
            near = did_you_mean(template, names)
            known = f"named ones are {', '.join(sorted(names))}"
            why = (
                f"no such template; {near + ' ' if near else ''}{known}; your own is a file, "
                "such as template.jinja"
            )
            yield "template", why

    def needs(self, run: RunConfig) -> Iterator[Need]:
        """Yield what keys need: the sizes are those of a tiny model."""
        yield Need(("revision",), bool(self.path), "model.path given")
        yield Need(
            ("hidden", "layers", "heads", "kv_heads", "vision", "patch", "image_side"),
            not self.path,
            "model.path none",
        )
        yield Need(("patch", "image_side"), self.vision, "model.vision = true")


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
        image_side: side in pixels of a square with the maximum image area;
            larger images are scaled down.
        threads: CPU threads of torch.

    Example::

        >>> tw.tiny(hidden=96, layers=3).hidden
        96
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
class RetryRules(Section):
    """Retries of what failed in an episode; what they need is said by the environment's rules."""

    turn: NonNegativeInt = 0
    """Maximum retries of a turn after its environment or tool failed; errors in its
    code are not retried."""
    engine: NonNegativeInt = 0
    """Maximum retries of an engine call that failed or timed out, with the
    same request and seed."""
    reward: NonNegativeInt = 0
    """Maximum retries of a reward that raised or timed out; an invalid value is final."""
    episode: NonNegativeInt = 8
    """Maximum retries of the turns of an episode, new attempts included, and as
    many of its engine calls."""
    wait_s: NonNegativeFloat = 0.5
    """Seconds before the first retry of a turn; doubled for each further retry up
    to 30, with 50% jitter."""


NOT_OF_PLAY = (
    *("on_invalid", "rejected_replies", "max_resamples_per_turn"),
    *("retries.turn", "retries.reward", "isolation", "reward_isolation"),
)
"""Keys of `EnvRules` that have no effect on a play function, which handles this itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvRules(Section):
    """Handling of invalid actions and of failures in one environment."""

    on_invalid: OnInvalid = "observe"
    """Response to `InvalidAction`: `observe` sends its message as the next observation; `resample`
    samples the reply again from the same context."""
    rejected_replies: RejectedReplies = "trained"
    """Whether rejected replies are trained on if replies are sampled again; they are
    recorded in either case."""
    max_resamples_per_turn: NonNegativeInt = 2
    """Maximum times a reply is sampled again in one turn; the message about the last invalid one
    becomes an observation."""
    retries: RetryRules = RetryRules()
    """Retries of what failed in an episode."""
    effects: bool = False
    """Whether its actions change something that outlasts the episode (files, services): each turn
    is on the disk before its action runs, and a resumed run restores the environment's state
    instead of repeating actions."""
    isolation: Isolation = "thread"
    """Where the environment runs: `thread`, synchronous code in a thread; `process`, all of it in a
    process that is killed on a timeout."""
    reward_isolation: Isolation = "thread"
    """Where the reward runs; a process is killed if it computes forever.

    Everything it needs must be picklable.
    """

    def needs(self, run: RunConfig) -> Iterator[Need]:
        """Yield what keys need: many have no effect on a play function."""
        resamples = self.on_invalid == "resample"
        retries = self.retries
        retries_calls = retries.turn > 0 or retries.engine > 0

        yield Need(NOT_OF_PLAY, not run.rollout.function, "rollout.function none")
        yield Need(
            ("rejected_replies", "max_resamples_per_turn"), resamples, "env.on_invalid = resample"
        )
        # A recipe may ask for no retries at all.
        yield Need(
            ("retries.episode",),
            retries_calls or retries.episode == 0,
            "env.retries.turn > 0, or env.retries.engine > 0",
        )
        yield Need(
            ("retries.wait_s",),
            run.rollout.max_retries > 0
            or retries_calls
            or retries.reward > 0
            or self.isolation == "process",
            "rollout.max_retries > 0, or env.retries.turn > 0, or env.retries.engine > 0, or "
            "env.retries.reward > 0, or env.isolation = process",
        )


def _weight_error(weight: float) -> str:
    if weight > 0:
        return ""
    return "must be above 0; leave an environment out by removing its table"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvConfig(EnvRules):
    """One environment of the run."""

    use: Annotated[str, PathKind.OBJECT] = ""
    """Built-in name (`hop`, `search`, ...), `file.py:Name` or `package.module:Name`: an Env class,
    a factory or its result, or an object of another framework; or a framework's registered id, such
    as `gym:FrozenLake-v1`."""
    name: str = ""
    """Label of its tasks and metrics; if empty, the built-in name, or the part of
    `use` after the colon."""
    weight: Annotated[float, Valid(_weight_error)] = 1.0
    """Share of the training groups, relative to the other environments."""
    sampler: Annotated[str, PathKind.OBJECT, Valid(sampler_error)] = "uniform"
    """Choice of training tasks: `uniform`, all in passes; `window`, pass rates near a half;
    `pools`, mostly neither solved nor unsolved at their last play; `progress`, changing pass rates;
    or `file.py:Class`. A tenth of the draws is uniform."""
    key: str | None = None
    """Entry of `Task.info` whose value names a task's kind, for statistics per kind;
    none keeps them per task."""
    tasks: Annotated[str | None, PathKind.DATA] = None
    """Training tasks: `file.py:function`, a `.jsonl` file or a Hugging Face dataset directory; none
    asks the environment."""
    eval_tasks: Annotated[str | None, PathKind.DATA] = None
    """Held-out tasks, in the same forms; none asks the environment, or holds out
    about a fifth of `tasks`."""
    return_multi_modal_inputs: bool = True
    """Whether images are read with the dataset's rows; if false, each is read
    when an episode uses it."""
    media_root: Annotated[str | None, PathKind.DIRECTORY] = None
    """Directory that paths of images in rows may lead to, besides the dataset's own; absolute paths
    must lie inside of it."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Columns of `tasks` by content (`prompt`, `answer`, `id`, `images`, `videos`, `env`,
    `metadata`, `tools`): `{ answer = "meta.gold" }`."""
    faithful: bool = False
    """Whether another framework's user code meets that framework's behavior where ours differs on
    purpose (docs/compat.md)."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the environment, checked against its signature."""

    @property
    def label(self) -> str:
        """Name of the environment, else what it uses."""
        return self.name or self.use

    def check(self, run: RunConfig, context: Context) -> Broken:
        """Yield what names no environment, no directory or no column."""
        function = run.rollout.function
        if not self.use and not (function and self.tasks):
            tasks = ", or give tasks for rollout.function" if function else ""
            yield "use", f'name a built-in one ("hop") or "file.py:Name"{tasks}'
        if self.use.endswith(".py"):
            yield "use", f"say which environment of the file: {self.use}:Name"
        if self.media_root is not None and (self.tasks or self.eval_tasks):
            yield from self._check_media(Path(self.media_root))
        yield from self._check_columns()
        is_named = bool(self.use) and ":" not in self.use
        if is_named and context.envs is not None and self.use not in (*context.envs, PROGRAM):
            near = did_you_mean(self.use, context.envs)
            known = f"built-in ones are {', '.join(sorted(context.envs))}"
            why = (
                f"no such environment; {near + ' ' if near else ''}{known}; your own is "
                '"file.py:Name"'
            )
            yield "use", why

    def _check_media(self, folder: Path) -> Broken:
        if folder.is_file():
            yield "media_root", "is a file; name the directory of the pictures"
        elif not folder.is_dir():
            yield "media_root", no_such_file(str(folder))

    def _check_columns(self) -> Broken:
        for content, column in self.columns.items():
            if content not in COLUMNS:
                yield f"columns.{content}", f"a column holds one of {', '.join(COLUMNS)}"
            if not isinstance(column, str) or not column:
                why = 'name a column of the rows, such as "label" or "meta.gold"'
                yield f"columns.{content}", why

    def needs(self, run: RunConfig) -> Iterator[Need]:
        """Yield what keys need, those of the rules included."""
        yield from EnvRules.needs(self, run)
        yield Need(("key",), self.sampler != "uniform", "env.sampler != uniform")
        yield Need(("return_multi_modal_inputs",), bool(self.tasks), "env.tasks given")
        yield Need(
            ("media_root", "columns"),
            bool(self.tasks or self.eval_tasks),
            "env.tasks given, or env.eval_tasks given",
        )


OF_THE_RUN = (
    *("steps", "data_epochs", "stop_success", "patience"),
    *("refill", "group_filter", "routing_replay", "vision"),
)
"""Keys of `[train]` that a policy cannot change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig(Section):
    """One of several policies of a run: the agents that it plays, and its origin. Without `path`,
    `urls` and `past` it starts as the run's model, and is trained as a LoRA adapter of it with
    `[lora]`, else as a copy of all its weights."""

    name: str = ""
    """Name of the policy, in metrics (`policy/NAME/...`) and checkpoints (`step-N/NAME`)."""
    agents: tuple[str, ...] = ()
    """Agents that it plays, as names or patterns (`solver-*`); an agent's first fitting policy
    plays it. Empty is the agent of the policy's name."""
    path: Annotated[str | None, PathKind.DIRECTORY] = None
    """Model directory that it starts from, with the tokenizer of the run's model;
    none is the run's model."""
    urls: tuple[Url, ...] = ()
    """URLs of servers of the model; such a policy is not trained."""
    past: Mapping[str, Any] = field(default_factory=dict)
    """Earlier versions of a trained policy, as opponents: `{ of = "solver", every = 10, keep = 5 }`
    draws for each task one of the last `keep` versions, saved every so many steps from the first
    on. Such a policy is not trained."""
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

    def check(self, run: RunConfig, context: Context) -> Broken:
        """Yield origins that exclude each other, and keys that it cannot change."""
        # A policy without a name is the one of a run that has no `[[policy]]`.
        wrong_name = policy_name_error(self.name)
        if wrong_name:
            yield "name", wrong_name
        origins = [key for key in ("path", "urls", "past") if getattr(self, key)]
        if len(origins) > 1:
            first = f"policy.{run.policy.index(self)}.{origins[0]}"
            yield origins[1], f"a policy has one origin, and {first} is given; leave one out"
        if self.past:
            yield from self._check_past(run)
        if self.train and not self.learns:
            yield "train", "has no effect: the policy is not trained; leave this out"
        for key in self.train:
            if key in OF_THE_RUN:
                yield f"train.{key}", f"is of the run, not of one policy; set train.{key}"

    def _check_past(self, run: RunConfig) -> Broken:
        unknown = sorted(self.past.keys() - {"of", "every", "keep"})
        if unknown:
            why = "there are of (the name of a trained policy), every (steps) and keep (versions)"
            yield f"past.{unknown[0]}", why
        learning = [policy.name for policy in run.policy if policy.learns]
        if self.past.get("of") not in learning:
            known = ", ".join(learning) or "there is none"
            yield "past", f'past = {{ of = "..." }} names a trained policy: {known}'
        for key in ("every", "keep"):
            value = self.past.get(key, 1)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                yield f"past.{key}", "must be an integer of at least 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(Section):
    """Limits of one episode. Times are in seconds, lengths in token ids."""

    turns: PositiveInt = 8
    """Maximum replies per episode, all agents together."""
    turn_tokens: PositiveInt = 256
    """Maximum tokens sampled per reply."""
    on_turn_length: OnTurnLength = "stop"
    """Handling of a reply without an end token: `stop` ends the episode, `continue` closes the
    reply and passes it to the environment. A play function gets the reply with
    `finish == "length"`; with `stop`, its conversation cannot go on."""
    episode_tokens: PositiveInt | None = None
    """Maximum tokens after the opening prompt, sampled and observed, all agents together; none is
    unlimited. An observation that does not fit is left out, and ends the episode."""
    context: PositiveInt | None = None
    """Maximum tokens of prompt and reply in one request; none asks the engine."""
    prompt_tokens: PositiveInt | None = None
    """Maximum tokens of an opening prompt, tools included; tasks over it are skipped, counted and
    listed. None skips no task.
    """
    observation_tokens: NonNegativeInt | None = None
    """Maximum tokens of an observation; longer ones are truncated, with a visible marker.

    None truncates nothing.
    """
    images: int = 64
    """Maximum images and videos per observation; more fail the episode."""
    episode_images: int | None = None
    """Maximum images and videos in all observations of an episode; more fail
    it. None is unlimited."""
    wall_clock_s: PositiveFloat = 600.0
    """Maximum seconds per episode."""
    generate_s: PositiveFloat = 300.0
    """Timeout of one reply, in seconds."""
    env_s: PositiveFloat = 60.0
    """Timeout of one reset, step or close, in seconds."""
    reward_s: PositiveFloat = 60.0
    """Timeout of a reward, in seconds."""

    def check(self, run: RunConfig, context: Context) -> Broken:
        """Yield lengths that no request can have."""
        if self.context is None:
            return
        for key in ("turn_tokens", "prompt_tokens"):
            tokens = getattr(self, key)
            if tokens is not None and tokens >= self.context:
                yield key, f"must be under limits.context = {self.context}"


SGLANG_TRUNCATES = (
    "SGLang returns logprobs of the distribution before truncation, not of the "
    "sampled one; leave it out"
)
"""Why a run cannot train with SGLang and truncated sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig(Section):
    """How episodes are played."""

    function: Annotated[str | None, PathKind.OBJECT] = None
    """Play function that replaces the environment, as `file.py:play`; none plays environments."""
    groups: PositiveInt = 16
    """Tasks per training step."""
    group_size: PositiveInt = 8
    """Episodes per task."""
    adapt: NonZeroFraction | None = None
    """Minimum factor of `env.weight`; above it, weights follow 4 p (1 - p) of the environment's
    pass rates p. None keeps them.
    """
    concurrency: PositiveInt = 256
    """Maximum concurrent engine calls; an episode needs none of them while
    its environment works."""
    environments: PositiveInt | None = None
    """Maximum environments alive at once; none starts as many as keep the engine busy."""
    max_retries: NonNegativeInt = 1
    """Maximum restarts of an episode that failed by its environment, its engine or a timeout,
    before the failure counts; the death of its process is no failure of the episode, and is
    repeated up to 5 times."""
    max_failed: Fraction = 0.2
    """Maximum share of failed episodes in a step or an evaluation; more stop the run, which can be
    resumed with --resume."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature in training."""
    top_p: NonZeroFraction = 1.0
    """Nucleus sampling: the fewest ids with this total probability; the trainer renormalizes over
    them, at two passes per step.
    """
    top_k: NonNegativeInt = 0
    """Number of most likely ids to sample from, renormalized likewise; 0 disables it."""
    min_p: ProperFraction = 0.0
    """Minimum probability of an id as a share of the most likely one's, applied first, renormalized
    likewise; 0 disables it."""
    history: Annotated[str, PathKind.OBJECT, Valid(history_error)] = "append"
    """Earlier turns in the prompt: `append`, all of them; `inline`, all of them within one
    assistant message; `template`, those that the model's template renders; `keep_images:N`,
    `downscale_images:N`, `drop_reasoning:N` or `file.py:policy`, those that a policy selects."""
    stop: tuple[Annotated[str, Valid(stop_error)], ...] = ()
    """Texts that end a reply, in addition to the model's end tokens; the text for the environment
    ends right after them."""
    alternatives: Annotated[int, Ge(0), Le(20)] = 0
    """Most likely ids recorded with each sampled id, with their logprobs, for the viewer to show;
    0 records none. `local`, `vllm` and `sglang` engines report them."""
    watchdog_s: PositiveFloat = 120.0
    """Seconds without progress before pending work is printed (also on SIGUSR1, with stacks)."""
    control_text: ControlText = "neutralise"
    """Control tokens in environment text: `neutralise` encodes them as plain text, `reject` fails
    the episode, `allow` encodes them as control tokens. They are counted in each case."""
    sanity: Sanity = "strict"
    """Comparison of finished episodes with a full render: `strict` reports any difference,
    `ignore_strippable` all but white space, `off` and `disable` skip it."""
    sanity_share: Annotated[SanityShare, Valid(sanity_share_error)] = 0.0625
    """Share of episodes compared at their last turn, selected by their keys; each costs about one
    full render. `turns` compares each turn of each episode."""

    @property
    def truncated_by(self) -> str | None:
        """The key that truncates sampling, or None."""
        if self.top_p < 1.0:
            return "top_p"
        if self.top_k > 0:
            return "top_k"
        return "min_p" if self.min_p > 0 else None

    def check(self, run: RunConfig, context: Context) -> Broken:
        """Yield what the engine or the advantage does not allow."""
        if self.history == "inline" and self.function:
            yield "history", "is for environments; a play function chooses what follows a reply"
        if self.alternatives and run.engine.kind in ("chat", "llamacpp"):
            why = (
                f'needs an engine that reports the most likely ids, and "{run.engine.kind}" does '
                'not; use "local", "vllm" or "sglang", or leave it out'
            )
            yield "alternatives", why
        if not context.training:
            return
        if self.adapt is not None and len(run.env) < 2 and not context.has_objects:
            why = (
                "has no effect with one environment: it moves weight between several; add "
                "another [[env]], or leave this out"
            )
            yield "adapt", why
        if run.train.steps == 0:
            return
        if run.engine.kind == "sglang" and self.truncated_by:
            yield self.truncated_by, SGLANG_TRUNCATES
        if self.group_size < 2 and run.train.compares(run):
            why = (
                "must be at least 2: a trajectory's advantage compares its reward with the "
                "others of its group"
            )
            yield "group_size", why

    def needs(self, run: RunConfig) -> Iterator[Need]:
        yield Need(
            ("sanity_share",),
            self.sanity in ("strict", "ignore_strippable"),
            "rollout.sanity = strict | ignore_strippable",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupConfig(Section):
    """Supervised training on demonstrations or conversations before reinforcement,
    ended by a measured gate."""

    demos: NonNegativeInt = 0
    """Demonstrations of the environment to record; 0 skips the warmup.

    With a dataset: conversations to use, 0 for all.
    """
    dataset: Annotated[str | None, PathKind.DATA] = None
    """Conversations to train on instead: JSONL, Parquet or Arrow rows with `messages` and
    optionally `tools`; none records demonstrations."""
    steps: PositiveInt = 500
    """Steps of a round, at whose end the learning rate is a tenth; rounds after the first
    begin at about half of it."""
    rounds: PositiveInt = 3
    """Maximum rounds: another begins where the gate is not met and the loss fell in the second
    half of the one before."""
    batch: PositiveInt = 32
    """Episodes per step."""
    lr: PositiveFloat = 4e-3
    """Peak learning rate, with cosine decay to a tenth."""
    gate_success: Fraction | None = None
    """Success rate of sampled episodes on training tasks that ends the warmup; a lower rate at the
    last step stops the run. None is 0.75 of the demonstrations' own; a lower rate then stops the
    run only where rewards do not differ, or the replies succeed as often in other tasks."""
    gate_loss: PositiveFloat | None = None
    """Maximum supervised loss per sampled token that is required too; none requires no loss."""
    gate_every: PositiveInt = 50
    """Steps between gate evaluations."""
    gate_tasks: PositiveInt = 128
    """Tasks per gate evaluation; one that passes is repeated with other samples."""

    @property
    def is_on(self) -> bool:
        """Whether the run begins with it."""
        return self.demos > 0 or bool(self.dataset)

    def needs(self, run: RunConfig) -> Iterator[Need]:
        gate = ("gate_success", "gate_loss", "gate_every", "gate_tasks")
        yield Need(
            ("steps", "rounds", "batch", "lr", *gate),
            self.is_on,
            "warmup.demos > 0, or warmup.dataset given",
        )


def _signal_steps_error(steps: int) -> str:
    if steps == 0 or steps >= 10:
        return ""
    return "must be 0 or at least 10: an average over fewer steps cannot tell a signal from chance"


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig(Section):
    """The critic of an algorithm that has one: a model of the rewards that an episode still earns,
    asked before each token or turn."""

    body: CriticBody = "own"
    """Source of the hidden states that values are computed from: a body of its `own`, a copy of the
    policy as it is when reinforcement begins, trained for values; or the `policy`'s, which then
    costs one more forward pass and no second model."""
    lr: NonNegativeFloat | None = None
    """Learning rate of its own body, constant; none is `train.lr`."""
    head_lr: NonNegativeFloat = 1e-3
    """Learning rate of the two layers between body and value, which begin at random."""
    updates: PositiveInt = 4
    """Updates a step, each over all of its values."""
    warmup_steps: NonNegativeInt = 0
    """First reinforcement steps, in which the critic is trained and the policy is not."""
    clip: PositiveFloat | None = None
    """Maximum move of a value in one step before its loss stops to fall, in standard deviations of
    returns (PPO's value clipping); none does not clip."""
    width: PositiveInt | None = None
    """Width of the hidden layer between body and value; none is the body's."""
    max_grad_norm: PositiveFloat = 1.0
    """Maximum gradient norm of body and head, each; larger gradients are scaled down to it."""


def _of_advantage(*names: str) -> str:
    """Return in words that the advantage is one of those, by itself or by its algorithm."""
    algorithms = [
        algorithm for algorithm, advantage in ALGORITHM_ADVANTAGES.items() if advantage in names
    ]
    return (
        f"train.advantage = {' | '.join(names)}, or train.advantage none and train.algorithm = "
        f"{' | '.join(algorithms)}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(Section):
    """Reinforcement learning."""

    steps: NonNegativeInt = 60
    """Reinforcement steps."""
    data_epochs: PositiveFloat | None = None
    """Passes over a finite list of training tasks, which set `steps` when the run starts; none
    takes `steps` as it is."""
    algorithm: Annotated[str, PathKind.OBJECT] = "grpo"
    """Algorithm: `grpo`, `dr_grpo`, `dapo`, `rloo`, `reinforce_pp`, `reinforce_pp_baseline`,
    `gspo`, `cispo`, `maxrl`, `gigpo`, `gagpo`, `state_rloo`, `state_grpo`; `ppo`, `turn_ppo` and
    `bilevel_ppo`, which train a critic; or `file.py:function`. It sets the keys below that are
    none."""
    reward_weight: NonNegativeFloat = 1.0
    """Factor on the rewards' advantages beside teachers; 0 trains by the teachers alone, and groups
    of one episode suffice."""
    stop_success: NonZeroFraction | None = None
    """Success rate of a step's episodes, averaged over 5 steps, that ends reinforcement early;
    none takes all steps."""
    patience: PositiveInt | None = None
    """Steps without a signal in the gradients, and so without an update, that end reinforcement
    early; none takes all steps."""
    lr: NonNegativeFloat = 1e-3
    """Learning rate."""
    schedule: Schedule = "linear"
    """Decay of the learning rate to 0 over the run (`constant`: no decay)."""
    lr_warmup_steps: NonNegativeInt = 0
    """First steps, over which the learning rate rises linearly to `lr`; the decay follows."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay of AdamW."""
    betas: tuple[ProperFraction, ProperFraction] = (0.9, 0.95)
    """Momentum coefficients of AdamW."""
    eps: PositiveFloat = 1e-8
    """Term added to the denominator of AdamW; a larger one damps updates of
    weights with tiny gradients."""
    gradient_signal_steps: Annotated[NonNegativeInt, Valid(_signal_steps_error)] = 0
    """Steps over which gradient agreement is averaged to scale the learning rate by its signal,
    five times as many while no step is taken; 0 disables scaling."""
    max_grad_norm: PositiveFloat = 1.0
    """Maximum gradient norm; larger gradients are scaled down to it."""
    epochs: PositiveInt = 1
    """Maximum passes over each step's groups; with `gradient_signal_steps`, as few as
    move the policy as far."""
    minibatches: PositiveInt = 1
    """Optimizer steps per epoch."""
    micro_tokens: PositiveInt | None = None
    """Maximum tokens per forward pass; results do not depend on it. None is 4096. For a large model
    in float32 on a CPU it is 512, and for an adapter of one, whose step takes little more than a
    pass does, 256, or 512 in mixed precision."""
    batching: Batching = "auto"
    """Computation of shared prefixes: `tree` computes them once, `rows` in each row, `auto` selects
    the cheaper one by estimate."""
    gradient_checkpointing: bool = False
    """Whether activations within layers are recomputed in the backward pass: less memory,
    about a third more time."""
    clip_low: NonZeroFraction | None = None
    """Clip range: ratios below 1 - clip_low are clipped; none is the algorithm's (grpo: 0.2)."""
    clip_high: PositiveFloat | None = None
    """Clip range: ratios above 1 + clip_high are clipped; none is the algorithm's (grpo: 0.28)."""
    clip_cap: Annotated[float, Gt(1)] | None = None
    """Maximum ratio in the loss of tokens with a negative advantage (dual clip, arXiv
    1912.09729); none is unlimited."""
    aggregation: Aggregation | None = None
    """Loss aggregation: mean over sampled tokens; mean over trajectories of their token means; or
    sum of tokens / (trajectories
    * `fixed_length`). None is the algorithm's (grpo: token)."""
    fixed_length: PositiveInt = 1024
    """Tokens per trajectory that `fixed` divides by, independent of the sampled length (Dr.

    GRPO, arXiv 2503.20783).
    """
    vision: VisionTraining = "trained"
    """Whether the vision tower and its projector are trained; `frozen` also needs no
    optimizer state for them."""
    advantage: Annotated[str | None, PathKind.OBJECT] = None
    """Advantage: reward minus the group mean, divided by the group's standard deviation (`std`),
    by that mean (`maxrl`) or not (`mean`); minus the mean of the other rewards (`rloo`); normalized
    over the batch (`batch`); minus the group mean, then normalized over the batch (`group_batch`);
    minus the average of the agent's earlier rewards in the environment (`running`); of turns that
    began in equal states (`gigpo`, `gagpo`, `state_rloo`, `state_std`); generalized, from a
    critic's values of tokens (`gae`), of turns (`gae_turn`) or of both (`gae_bilevel`), then
    normalized over the batch; or `file.py:function` of a group's trajectories and their returns.
    None is the algorithm's (grpo: std)."""
    credit: CreditUnit | None = None
    """Credit assignment: the trajectory's reward for all its tokens, or for a turn's tokens the
    rewards from that turn on. None is the algorithm's (grpo: trajectory)."""
    discount: Fraction | None = None
    """Discount of a reward per turn, with credit by turn; none is the algorithm's (grpo: 1)."""
    state: StateKey = "history"
    """Name of the state in which a turn begins, where the environment gives none (`info["state"]`
    of the step before it): all that the policy has read, or the last observation alone."""
    step_weight: NonNegativeFloat = 1.0
    """Weight of the comparison of equal states beside that of whole episodes, with `gigpo`."""
    gae_lambda: Fraction | None = None
    """Lambda of generalized advantages, per turn: weight of the rewards that came beside the value
    of the next state. None is the algorithm's (turn_ppo: 0.9; state_rloo: one over the returns from
    there)."""
    token_discount: Fraction = 1.0
    """Discount of generalized advantages, per token."""
    token_lambda: Fraction = 1.0
    """Lambda of generalized advantages, per token."""
    loss_scale: Annotated[str, PathKind.OBJECT] = "default"
    """Loss weights of sampled tokens: `default`, all equal; `last_round`, only the last round; or
    `file.py:function`, weights per turn or token."""
    overlong_tokens: PositiveInt | None = None
    """Sampled tokens at which a trajectory loses one point of reward (DAPO, arXiv 2503.14476, eq.
    13); none disables it, or with dapo uses the limits."""
    overlong_buffer: NonZeroFraction = 0.2
    """Share of `overlong_tokens`, at its end, over which that penalty grows linearly."""
    overlong_filter: bool = False
    """Whether episodes cut by a length limit (of a turn, the episode or the context) are left out
    of the loss; their rewards still count in the baseline."""
    refill: NonNegativeInt | None = None
    """Maximum rounds of new tasks that replace groups without signal; none is the algorithm's
    (dapo: 3, others: 0)."""
    group_filter: Annotated[str | None, PathKind.OBJECT] = None
    """`file.py:function` of a group's trajectories: whether the group is trained. It decides which
    groups `refill` replaces, in place of equal rewards."""
    keep_groups: NonZeroFraction = 1.0
    """Share of a step's groups that are trained, at least one: those whose rewards have the largest
    standard deviation (RAGEN, arXiv 2504.20073)."""
    on_failure: OnFailedEpisode = "drop_group"
    """Handling of a group with a failed episode: drop the group, or compute the
    baseline over the survivors."""
    min_group: Annotated[int, Ge(2)] = 2
    """Minimum rewarded trajectories per group; smaller groups are dropped and counted."""
    entropy: NonNegativeFloat = 0.0
    """Weight of the entropy bonus: the mean entropy of the sampled distribution at trained tokens,
    subtracted from the loss."""
    kl: NonNegativeFloat = 0.0
    """Weight of the KL term to the reference policy, the one at the start of
    reinforcement; 0 loads none."""
    kl_estimator: KLEstimator | None = None
    """KL estimator per token; none is the algorithm's (grpo: k3)."""
    kl_in: KLPlace | None = None
    """Whether the KL term is added to the loss or subtracted from the reward (k1); none is the
    algorithm's (grpo: loss)."""
    reference: Reference = "auto"
    """Reference policy of the KL term and of a `self` teacher: a second `copy` of the trained
    weights; `adapter_off`, the model without its LoRA; `none`, only with `kl = 0`. `auto` disables
    the LoRA if it is untrained, and copies otherwise."""
    reference_every: NonNegativeInt = 0
    """Steps after which the current policy becomes the reference policy, each
    time; 0 keeps the first."""
    old_logprobs: OldLogprobs = "trainer"
    """Source of the logprobs in the ratio's denominator."""
    max_mismatch: PositiveFloat | None = None
    """Maximum |trainer logprob - engine logprob| of a token of the current policy, in nats; a
    larger one stops the run. None: 1e-3 in float32, off in bfloat16."""
    max_mismatch_kl: PositiveFloat | None = None
    """Maximum mean KL(engine || trainer) per token of the current policy, in nats; a larger one
    stops the run. None: 0.1, or off with max_mismatch."""
    correction: Correction = "none"
    """Correction of logprob differences between trainer and engine, and for tokens of
    older policies: truncated weights per token, or exclusion of trajectories or tokens
    with a ratio out of bounds."""
    correction_low: NonNegativeFloat | None = None
    """Lower bound of the correction's ratio; none is the correction's default."""
    correction_high: PositiveFloat | None = None
    """Upper bound of the correction's ratio; none is the correction's default."""
    routing_replay: ExpertRouting = "off"
    """Whether a mixture-of-experts model is trained with the experts that the engine selected for
    each token (R3, arXiv 2510.11370)."""
    critic: CriticConfig = CriticConfig()
    """The critic of `ppo`, `turn_ppo` and `bilevel_ppo`."""

    def check(self, run: RunConfig, context: Context) -> Broken:
        """Yield names that there are not, and keys that conflict."""
        if not context.training:
            return
        yield from self.wrong_names()
        yield from self.conflicts()
        if self.reference == "adapter_off" and not run.lora.rank:
            yield "reference", "there is no adapter to switch off; set lora.rank"
        if run.teacher:
            yield from self._check_taught(run)
        if self.steps > 0:
            yield from self._check_sizes(run)

    def wrong_names(self) -> Broken:
        """Yield keys whose value names nothing that there is, and what there is."""
        names = {
            "algorithm": algorithm_error(self.algorithm),
            "advantage": "" if self.advantage is None else advantage_error(self.advantage),
            "loss_scale": loss_scale_error(self.loss_scale),
        }
        for key, why in names.items():
            if why:
                yield key, why

    def conflicts(self) -> Broken:
        """Yield keys of this section that conflict with another of it."""
        yield from self._check_correction()
        if self.kl_in == "reward" and self.kl_estimator not in (None, "k1"):
            why = 'must be k1 in a reward, since k2 and k3 are always positive; set kl_in = "loss"'
            yield "kl_estimator", why
        if self.kl and self.reference == "none":
            why = (
                f"train.kl = {self.kl:g} needs a reference policy; set kl = 0, or leave this "
                "key out"
            )
            yield "reference", why
        if self.reference_every and self.reference == "adapter_off":
            why = (
                'replaces the reference, which reference = "adapter_off" fixes; set reference '
                '= "copy"'
            )
            yield "reference_every", why
        baseline = self.baseline
        if self.refill and (baseline in GROUPLESS_ADVANTAGES or baseline == "group_batch"):
            others = "the complete batch"
            if baseline == "running":
                others = "earlier episodes"
            elif baseline in CRITIC_ADVANTAGES:
                others = "what its critic expects"
            why = (
                f'replaces groups without reward variance; advantage = "{baseline}" compares '
                f"with {others}"
            )
            yield "refill", why
        if self.discount not in (None, 1.0) and not self.by_turn:
            yield "discount", 'applies between turns; set credit = "turn"'
        if self.discount not in (None, 1.0) and baseline == "gae":
            why = 'applies between turns, and advantage = "gae" is by token; set token_discount'
            yield "discount", why
        if self.credit == "trajectory" and self.by_turn:
            why = f'has no meaning with advantage = "{baseline}", which is by turn; leave it out'
            yield "credit", why

    def _check_correction(self) -> Broken:
        low, high = self.correction_low, self.correction_high
        if self.correction != "none" and self.old_logprobs == "engine":
            why = (
                'would apply twice the correction that old_logprobs = "engine" puts into the '
                'ratio; set old_logprobs = "trainer"'
            )
            yield "correction", why
        if low is not None and self.correction in ("none", "tis"):
            why = f'has no meaning with correction = "{self.correction}", which has no lower bound'
            yield "correction_low", why
        if high is not None and self.correction == "none":
            yield "correction_high", 'has no meaning with correction = "none"'
        if low is not None and high is not None and low >= high:
            yield "correction_low", f"must be under train.correction_high = {high:g}"

    def _check_taught(self, run: RunConfig) -> Broken:
        """Yield keys that conflict with the teachers of the run."""
        teaches_itself = any(teacher.self for teacher in run.teacher)
        given = changed(self)
        if teaches_itself and self.reference == "none":
            yield (
                "reference",
                "is the policy that a teacher with self = true is; leave this key out",
            )
        if not teaches_itself and not self.kl:
            for key in ("reference", "reference_every"):
                if key in given and getattr(self, key) != "none":
                    why = (
                        "has no effect: it needs train.kl > 0, or a teacher with self = true; "
                        "leave it out"
                    )
                    yield key, why
        if self.reward_weight:
            return
        if self.kl and self.kl_in == "reward":
            why = (
                "subtracts from the reward, whose weight is 0 (train.reward_weight); set kl_in "
                '= "loss"'
            )
            yield "kl_in", why
        if all(teacher.signal == "loss" for teacher in run.teacher):
            # Only advantages have ratios that are clipped.
            for key in ("clip_low", "clip_high", "clip_cap", "old_logprobs"):
                if key in given:
                    why = (
                        'is about advantages, and the teachers\' signal = "loss" is the only '
                        "one; leave it out"
                    )
                    yield key, why

    def _check_sizes(self, run: RunConfig) -> Broken:
        group_size = run.rollout.group_size
        if self.min_group > group_size and self.compares(run):
            why = f"must be at most rollout.group_size = {group_size}, or every group is dropped"
            yield "min_group", why
        if self.keep_groups < 1 and group_size == 1:
            yield "keep_groups", "needs rewards that differ in a group; set rollout.group_size"
        if self.critic.warmup_steps >= self.steps and self.data_epochs is None:
            yield "critic.warmup_steps", f"must be under train.steps = {self.steps}"
        if self.lr_warmup_steps >= self.steps and self.data_epochs is None:
            yield "lr_warmup_steps", f"must be under train.steps = {self.steps}"
        episodes = run.rollout.groups * group_size
        if self.minibatches > episodes:
            yield "minibatches", f"must be at most the {episodes} episodes of a step"

    @property
    def baseline(self) -> str | None:
        """The advantage, or the algorithm's; None for an algorithm of the user's own."""
        return self.advantage or ALGORITHM_ADVANTAGES.get(self.algorithm)

    @property
    def by_turn(self) -> bool:
        """Whether the turns of an episode have advantages of their own."""
        own_turns = (*STATE_ADVANTAGES, *CRITIC_ADVANTAGES)
        return self.credit == "turn" or self.baseline in own_turns

    def compares(self, run: RunConfig) -> bool:
        """Return whether a trajectory is compared with the others of its task."""
        if run.policy:
            return False  # each policy is checked with its own keys
        return self.reward_weight > 0 and self.baseline not in GROUPLESS_ADVANTAGES

    def needs(self, run: RunConfig) -> Iterator[Need]:
        taught = bool(run.teacher)
        is_own_algorithm = ".py" in self.algorithm
        yield Need(("reward_weight",), taught, "teacher given")
        yield Need(("patience",), self.gradient_signal_steps > 0, "train.gradient_signal_steps > 0")
        yield Need(("clip_cap",), self.algorithm != "cispo", "train.algorithm != cispo")
        yield Need(
            ("fixed_length",),
            self.aggregation == "fixed"
            or (self.aggregation is None and (self.algorithm == "dr_grpo" or is_own_algorithm)),
            "train.aggregation = fixed, or train.aggregation none and train.algorithm = dr_grpo | "
            "file.py:name",
        )
        yield Need(
            ("vision",),
            bool(run.model.path) or run.model.vision,
            "model.path given, or model.vision = true",
        )
        of_groups = ("refill", "group_filter", "on_failure", "min_group")
        yield Need(
            ("advantage", "credit", "overlong_tokens", *of_groups),
            self.reward_weight > 0,
            "train.reward_weight > 0",
        )
        generalized = ("gagpo", "state_rloo", "state_std", "gae_turn", "gae_bilevel")
        by_token = ("gae", "gae_bilevel")
        yield Need(("state",), self.baseline in STATE_ADVANTAGES, _of_advantage(*STATE_ADVANTAGES))
        yield Need(("step_weight",), self.baseline == "gigpo", _of_advantage("gigpo"))
        yield Need(("gae_lambda",), self.baseline in generalized, _of_advantage(*generalized))
        yield Need(
            ("token_discount", "token_lambda"), self.baseline in by_token, _of_advantage(*by_token)
        )
        of_critic = (
            "body",
            "lr",
            "head_lr",
            "updates",
            "warmup_steps",
            "clip",
            "width",
            "max_grad_norm",
        )
        yield Need(
            tuple(f"critic.{key}" for key in of_critic),
            self.baseline in CRITIC_ADVANTAGES,
            _of_advantage(*CRITIC_ADVANTAGES),
        )
        yield Need(
            ("overlong_buffer",),
            bool(self.overlong_tokens) or self.algorithm == "dapo" or is_own_algorithm,
            "train.overlong_tokens given, or train.algorithm = dapo | file.py:name",
        )
        yield Need(("kl_estimator", "kl_in"), self.kl > 0, "train.kl > 0")
        yield Need(
            ("reference",),
            self.kl > 0 or taught or self.reference == "none",
            "train.kl > 0, or teacher given",
        )
        yield Need(("reference_every",), self.kl > 0 or taught, "train.kl > 0, or teacher given")


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherConfig(Section):
    """One teacher: a model that scores the ids that the policy sampled, beside rewards or alone
    (`train.reward_weight = 0`)."""

    name: str = ""
    """Label in metrics; if empty, `teacher` and its number from 1
    (`teacher` where there is one)."""
    path: Annotated[str | None, PathKind.DIRECTORY] = None
    """Hugging Face directory of the teacher, or a LoRA adapter's; it is
    loaded beside the policy."""
    urls: tuple[Url, ...] = ()
    """URLs of servers that run the teacher (vLLM, SGLang, `turnwright serve`); each takes a
    share of the episodes."""
    self: bool = False
    """Whether the policy is its own teacher, after `hint`: its reference policy, which has the
    weights of the start of reinforcement, or of every `train.reference_every` steps."""
    hint: Annotated[str | None, PathKind.OBJECT] = None
    """`file.py:function` of a trajectory that returns messages, which the teacher reads before
    the ids of the episode; none, or none returned for a trajectory, gives the same ids to both,
    or with `self` no answer."""
    policies: tuple[str, ...] = ()
    """Names of the policies that it teaches; none given means all."""
    environments: tuple[str, ...] = ()
    """Names of the environments whose episodes it scores; none given means all."""
    agents: tuple[str, ...] = ()
    """Names of the agents whose ids it scores; none given means all."""
    signal: TeacherSignal = "advantage"
    """`advantage` adds `weight * (log p_teacher - log p_policy)` of each sampled id to its
    advantage, after normalization; `loss` adds `weight * divergence` of the distributions at each
    sampled id to the loss."""
    weight: PositiveFloat = 1.0
    """Factor of the signal."""
    bound: PositiveFloat = 5.0
    """Maximum |log p_teacher - log p_policy| that counts, in nats."""
    divergence: Divergence = "reverse"
    """Divergence in the loss: `reverse`, KL(policy || teacher); `forward`, KL(teacher || policy);
    `js`, Jensen-Shannon."""
    top: PositiveInt | None = None
    """Ids that the divergence tells apart: the most likely ones of the teacher, with all others as
    one; none is the vocabulary, which servers do not send."""
    max_unaligned: Fraction = 0.1
    """Maximum share of a step's ids in text that a teacher's other tokenizer does not split
    alike; more stop the run."""
    timeout_s: PositiveFloat = 120.0
    """Seconds in which a server must answer for an episode; after that its ids are `no_teacher`."""
    key_env: str | None = None
    """Name of the environment variable that holds the servers' API key; none sends no key."""

    def check(self, run: RunConfig, context: Context) -> Broken:
        """Yield what names no teacher, and names that the run does not have."""
        if not context.training:
            return
        origins = [key for key in ("path", "urls", "self") if getattr(self, key)]
        one_of = "a teacher has exactly one of path, urls and self"
        if not origins:
            yield "path", f"is missing, and so are urls and self; {one_of}"
        elif len(origins) > 1:
            yield origins[0], f"is given beside {' and '.join(origins[1:])}; {one_of}"
        yield from self._check_names("environments", [env.label for env in run.env])
        yield from self._check_names("policies", [policy.name for policy in run.policy])
        if self.urls:
            yield from self._check_served(run)

    def _check_names(self, key: str, known: Collection[str]) -> Broken:
        for name in getattr(self, key):
            # Environments that are given as objects have no names here.
            if known and name not in known:
                near = did_you_mean(name, known) or f"there are {', '.join(known)}"
                yield key, f"{name!r} is none of the run's; {near}"

    def _check_served(self, run: RunConfig) -> Broken:
        if self.signal == "loss" and self.top is None:
            why = (
                "must be set: servers send the most likely ids only, no probabilities of a "
                "vocabulary"
            )
            yield "top", why
        truncated_by = run.rollout.truncated_by
        if truncated_by:
            why = (
                f"are servers, which score the vocabulary, but rollout.{truncated_by} cuts it; "
                "name a path, or leave that out"
            )
            yield "urls", why

    def needs(self, run: RunConfig) -> Iterator[Need]:
        yield Need(("self",), bool(self.hint), "teacher.hint given")
        yield Need(("policies",), bool(run.policy), "policy given")
        yield Need(("bound",), self.signal == "advantage", "teacher.signal = advantage")
        yield Need(("divergence", "top"), self.signal == "loss", "teacher.signal = loss")
        yield Need(("max_unaligned",), bool(self.path), "teacher.path given")
        yield Need(("timeout_s", "key_env"), bool(self.urls), "teacher.urls given")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig(Section):
    """How sampling and training overlap."""

    mode: ScheduleMode = "sync"
    """`sync`: sample a batch, then train on it. `one_step_off`: sample the next batch
    while one trains; weights change between batches. `async`: sample all the time;
    weights change during replies."""
    staleness: NonNegativeInt = 2
    """Maximum updates between the policy that sampled a token and the one trained on it; groups
    enter no earlier than this allows, and none is discarded."""
    hold: bool = False
    """Whether episodes are held, alive, while the trainer trains; for an engine that shares
    the trainer's device."""

    def check(self, run: RunConfig, context: Context) -> Broken:
        """Yield what trains on tokens of older policies without a correction."""
        if not context.training or run.train.correction != "none":
            return
        is_off_by_one = self.mode == "one_step_off"
        if is_off_by_one or (self.mode == "async" and self.staleness):
            why = (
                "trains on tokens of older policies, which needs train.correction, such as "
                '"tis" or "icepop"'
            )
            yield "mode" if is_off_by_one else "staleness", why

    def needs(self, run: RunConfig) -> Iterator[Need]:
        yield Need(("staleness", "hold"), self.mode == "async", "schedule.mode = async")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig(Section):
    """LoRA adapters, trained instead of the model's weights (needs the extra `lora`)."""

    rank: NonNegativeInt = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: PositiveFloat | None = None
    """Scale of an adapter's output, applied as alpha / rank; none is twice the rank."""
    targets: tuple[str, ...] = ("all",)
    """Linear layers with an adapter, by the ends of their names (`q_proj`, `mlp.up_proj`); `all` is
    those of the text model except its head."""
    dropout: ProperFraction = 0.0
    """Dropout of an adapter's inputs in the warmup.

    Reinforcement uses none, so that the trained policy is the sampled one.
    """

    def check(self, run: RunConfig, context: Context) -> Broken:
        """Yield adapters of no layer."""
        if context.training and self.rank and not self.targets:
            yield "targets", 'must name a linear layer; ["all"] are those of the text model'

    def needs(self, run: RunConfig) -> Iterator[Need]:
        yield Need(("alpha", "targets", "dropout"), self.rank > 0, "lora.rank > 0")
        yield Need(("dropout",), run.warmup.is_on, "warmup.demos > 0, or warmup.dataset given")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantConfig(Section):
    """Low precision: the weights that the trainer computes with and the engine samples from."""

    kind: QuantKind = "none"
    """Number format of linear layers: `int4` (codes -7..7, a scale per group of inputs), `fp8`
    (e4m3, a scale per square block) or `none`. Checkpoints hold full-precision weights."""
    group: Annotated[int, Ge(8)] = 128
    """Inputs per scale of int4; 32 suits tiny models."""
    block: PositiveInt = 128
    """Side of a block with one scale, and channels per scale of an activation."""
    activations: bool = True
    """Whether activations are rounded to fp8 too (W8A8); false rounds weights only. Emulated:
    products are not computed in fp8."""
    scale_dtype: DType = "auto"
    """Data type of int4 scales; `auto` is the model's."""
    train: bool = True
    """Whether the trainer computes on the same grid; false quantizes the engine only, which
    needs `train.correction`."""
    packed: bool = False
    """Whether servers get packed weights, codes and scales, and compute with them in bfloat16;
    false sends the values."""
    skip: tuple[str, ...] = ("lm_head",)
    """Layers kept in full precision, by the ends of their names, besides embeddings, norms,
    routers, vision tower and output head."""

    def check(self, run: RunConfig, context: Context) -> Broken:
        """Yield what the engine or the trainer cannot quantize."""
        if self.kind == "none":
            return
        engine = run.engine
        if run.policy:
            yield "kind", "is for runs with one policy; leave it out, or leave out [[policy]]"
        if engine.kind in ("chat", "llamacpp"):
            why = (
                f'engine.kind = "{engine.kind}" takes no weights; quantize the model at the '
                "server, and leave this out"
            )
            yield "kind", why
        if self.kind == "int4" and self.group % 8:
            yield "group", "must be a multiple of 8, the codes in one packed number"
        if self.packed and engine.kind == "local":
            yield "packed", 'is for servers; set engine.kind = "vllm" or "sglang"'
        if self.packed and engine.update != "disk":
            why = (
                "servers convert packed weights when they load them, so updates are "
                'directories; set engine.update = "disk"'
            )
            yield "packed", why
        if context.training:
            yield from self._check_trained(run)

    def _check_trained(self, run: RunConfig) -> Broken:
        rounds_activations = self.kind == "fp8" and self.activations
        if run.lora.rank:
            why = (
                "with lora.rank the base alone would be quantized, and the engine has the "
                "merged weights; set lora.rank = 0"
            )
            yield "kind", why
        if not self.train and run.train.correction == "none":
            why = (
                "trains another policy than the engine samples from; set train.correction, "
                'such as "tis"'
            )
            yield "train", why
        if run.engine.kind == "local":
            return
        if self.packed and self.kind == "fp8" and not self.activations:
            why = "servers round activations with packed fp8 weights; set quant.activations = true"
            yield "activations", why
        on_the_grid = (
            "is for the local engine: a server gets weights on the grid, and its "
            "logprobs must equal the trainer's"
        )
        if not self.train:
            yield "train", f"{on_the_grid}; set quant.train = true"
        elif rounds_activations and not self.packed:
            yield "activations", f"{on_the_grid}; set quant.activations = false"

    def needs(self, run: RunConfig) -> Iterator[Need]:
        yield Need(("group", "scale_dtype"), self.kind == "int4", "quant.kind = int4")
        yield Need(("block", "activations"), self.kind == "fp8", "quant.kind = fp8")
        yield Need(("train", "packed", "skip"), self.kind != "none", "quant.kind = int4 | fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig(Section):
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
    min_p: ProperFraction = 0.0
    """`rollout.min_p` for sampled episodes."""
    overlap: Overlap = "refused"
    """Whether tasks of the evaluation may be trained too. `allowed` trains all of them, for
    environments with few possible tasks; results are then labeled as not held out."""
    success: float = 1.0
    """Minimum reward of a success."""
    greedy: bool = True
    """Whether each task is also played greedily."""
    every: NonNegativeInt = 0
    """Reinforcement steps between evaluations during training; 0 disables them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig(Section):
    """Checkpoints to resume from."""

    every: PositiveInt = 10
    """Reinforcement steps between checkpoints; on resume, steps since the last one are trained
    again from the journal."""
    keep: PositiveInt = 2
    """Number of most recent checkpoints to keep."""
    keep_best: bool = True
    """Whether to keep also the checkpoint with the highest sampled success on held-out tasks,
    measured every `eval.every` steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackConfig(Section):
    """Trackers that receive the rows of metrics.jsonl; each runs in its own process and
    never blocks training."""

    to: tuple[Annotated[str, Valid(tracker_error)], ...] = ()
    """Trackers: `"trackio"`, `"wandb"`, `"tensorboard"`, or your own as `"file.py:Class"`."""
    project: str = "turnwright"
    """Project name at the trackers."""
    name: str | None = None
    """Run name at the trackers; none is the name of the run directory."""

    def needs(self, run: RunConfig) -> Iterator[Need]:
        yield Need(("project", "name"), bool(self.to), "track.to given")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleConfig(Section):
    """Workers that play the episodes, in other processes or on other machines; without them, the
    run plays them itself."""

    listen: Annotated[str, Valid(address_error)] | None = None
    """Address `host:port` at which workers join over HTTP (`turnwright worker --join`); none plays
    the episodes in the run, or with `ray` is a free port of every address. Port 0 is a free one."""
    ray: str | None = None
    """Ray cluster whose nodes run the workers: `auto`, or the address of its head; none uses no Ray
    (needs the extra `ray`)."""
    ray_workers: PositiveInt | None = None
    """Number of workers on the Ray cluster; none is one on each node, those that join later too."""
    ray_cpus: NonNegativeFloat = 1.0
    """CPUs that Ray reserves per worker."""
    ray_engine_cpus: PositiveFloat = 1.0
    """CPUs that Ray reserves per server that the run starts."""
    ray_engine_gpus: NonNegativeFloat = 1.0
    """GPUs that Ray reserves per server that the run starts; 0 starts builds for CPUs, several of
    one node share a server's model (tensor parallelism)."""
    lease_s: PositiveFloat = 15.0
    """Seconds without a word after which a worker is lost and stops by itself; a broken
    connection is noticed at once."""
    stall_s: PositiveFloat | None = None
    """Seconds without an event after which a group is asked for elsewhere; none is the sum of
    `limits.wall_clock_s`, `env_s` and `reward_s`."""
    wait_s: PositiveFloat = 600.0
    """Seconds a group waits while there is no worker before the run stops; it can be resumed."""

    def check(self, run: RunConfig, context: Context) -> Broken:
        """Yield shares of several GPUs."""
        gpus = self.ray_engine_gpus
        if run.engines_on_ray and gpus > 1 and not gpus.is_integer():
            why = "must be an integer above 1: the GPUs that a server's model is split over"
            yield "ray_engine_gpus", why

    def needs(self, run: RunConfig) -> Iterator[Need]:
        yield Need(
            ("ray_workers", "ray_cpus", "ray_engine_cpus", "ray_engine_gpus"),
            bool(self.ray),
            "scale.ray given",
        )
        yield Need(
            ("lease_s", "stall_s", "wait_s"),
            bool(self.listen or self.ray),
            "scale.listen given, or scale.ray given",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(Section):
    """Configuration of a run."""

    out: Annotated[str, Valid(out_error)] = "runs/run"
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
        """Policies of the run: those of `[[policy]]`, else one without a name
        that plays every agent."""
        return self.policy or (PolicyConfig(agents=("*",)),)

    @property
    def engines_on_ray(self) -> bool:
        """Whether the run starts its servers on the nodes of a Ray cluster."""
        return (
            self.scale.ray is not None
            and self.engine.kind in ("vllm", "sglang")
            and not self.engine.attached
        )

    def sections(self) -> Iterator[tuple[str, Section]]:
        """Yield each section with the prefix of its keys (`env.0`), and last
        the run, without one."""
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, Section):
                yield name, value
            elif isinstance(value, tuple):
                for index, table in enumerate(value):
                    yield f"{name}.{index}", table
        yield "", self

    def check(self, run: RunConfig, context: Context) -> Broken:
        """Yield tables of one list that do not go together."""
        yield from _check_labels("env", "environment", [env.label for env in self.env])
        yield from _check_labels("policy", "policy", [policy.name for policy in self.policy])
        yield from self._check_agents()
        if context.training and self.policy and not any(policy.learns for policy in self.policy):
            yield "policy.0.trained", "no policy is trained; set trained = true for one"
        if context.training:
            yield from self._check_teachers()

    def _check_agents(self) -> Broken:
        played_by: dict[str, str] = {}
        for index, policy in enumerate(self.policy):
            for agent in policy.plays:
                if agent in played_by:
                    why = (
                        f"policy {played_by[agent]} plays agent {agent!r} too; an agent has one "
                        "policy"
                    )
                    yield f"policy.{index}.agents", why
                played_by[agent] = policy.name

    def _check_teachers(self) -> Broken:
        names = [teacher.name for teacher in self.teacher]
        for index, name in enumerate(names):
            if name and name in names[:index]:
                why = "another teacher has this name too; give each its own name"
                yield f"teacher.{index}.name", why


def _check_labels(section: str, noun: str, names: list[str]) -> Broken:
    for index, name in enumerate(names):
        if name in names[:index]:
            why = f"{noun} {names.index(name)} has this name too; give each its own name"
            yield f"{section}.{index}.name", why
