"""What the parts of `real_model.py` share: the model, CPU seconds, and
turns that processes take."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, TypeVar

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "quickstart_llm.toml"
Kind = Literal["float32", "mixed", "bfloat16"]
KINDS: dict[str, tuple[Kind, ...]] = {"cpu": ("float32", "mixed"), "cuda": ("float32", "bfloat16")}
"""Kinds that a device is measured with."""
T = TypeVar("T")


class UnavailableKind(Exception):
    """A kind of computation that this library or this processor does not have."""


# The model


def has_bfloat16() -> bool:
    """Return whether the processor multiplies in bfloat16."""
    from turnwright.engines.local.mixed_precision import multiplies_bfloat16

    return multiplies_bfloat16()


def model_config(directory: Path, kind: Kind, device: str = "cpu") -> Any:
    """Return the `[model]` of a kind: the one place that knows how mixed precision is asked for."""
    from turnwright.config import ModelConfig

    if kind == "mixed" and not has_bfloat16():
        raise UnavailableKind("the processor has no products in bfloat16")
    return ModelConfig(path=str(directory), dtype=kind, device=device)


def load(directory: Path, kind: Kind) -> tuple[Any, Any]:
    """Load the model, ready for the engine and the trainer of a kind, and its renderer."""
    from turnwright.training.setup import load_model_and_renderer

    return load_model_and_renderer(directory, directory, model_config(directory, kind))


def usable_kinds(directory: Path, device: str) -> list[Kind]:
    """Return the kinds that can be measured here, and print why others cannot."""
    usable = []
    for kind in KINDS[device]:
        try:
            model_config(directory, kind, device)
        except UnavailableKind as missing:
            print(f"{kind}: skipped, for {missing}", flush=True)
        else:
            usable.append(kind)
    return usable


def make_warmed(model: Path, directory: Path, device: str = "cpu") -> Path:
    """Return the weights that training starts from: those after the recipe's warm-up, made once."""
    if directory.is_dir():
        return directory

    print(f"warming up once, into {directory} ...", flush=True)
    run = directory.with_name(f"{directory.name}-run")
    words = ["--model.path", model, "--out", run, "--train.steps", 0, "--eval.tasks", 1]
    words += ["--model.device", device]
    command = [sys.executable, "-m", "turnwright", "train", RECIPE, *words, "--display", "none"]
    done = subprocess.run(
        [str(word) for word in command],
        env=one_thread_environment(),
        stdout=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode:
        raise SystemExit("the warm-up failed")
    (run / "checkpoints" / "warmed").rename(directory)
    return directory


# Seconds


@dataclass(frozen=True)
class Spent:
    """CPU seconds of a piece of work, and how much was done in them."""

    cpu_s: float
    amount: int = 0

    @property
    def rate(self) -> float:
        """Amount in a CPU second."""
        return self.amount / self.cpu_s


def cpu_seconds() -> float:
    """Return the CPU seconds of this process, all threads, and of its ended children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def device_seconds(device: str) -> float:
    """Return what a side is charged by: CPU seconds, or on a GPU seconds, until all that
    was asked of it is done."""
    if device == "cpu":
        return cpu_seconds()
    import torch

    torch.cuda.synchronize()
    return time.perf_counter()


def peak_gib(device: str) -> float:
    """Return the largest memory that this process had of the device so far, in GiB."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    import torch

    return float(torch.cuda.max_memory_reserved() / 2**30)


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return the result of some work, and its CPU seconds."""
    began = cpu_seconds()
    result = work()
    return result, cpu_seconds() - began


# Turns of processes


def one_thread_environment() -> dict[str, str]:
    """Return the environment of a process that computes with one thread and fetches nothing."""
    own = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    return os.environ | own | {"PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class TrainingStep:
    """One training step of a side, as its process measured it."""

    total_s: float
    """CPU seconds, or seconds on a GPU."""
    rollout_s: float
    """Share of `total_s` that sampling took."""
    success: float
    """Mean success of the episodes that the step sampled."""
    sampled: int
    """Ids that the step sampled."""
    peak_gib: float
    """Largest memory of the device that the process had so far."""


READY, GO = "ready", "go"


class OwnTurns:
    """A process's end: it waits for its turn before each step, and reports the step after it."""

    def __init__(self, descriptor: int, device: str) -> None:
        self.device = device
        self._connection = Connection(descriptor)
        self._ready = False

    def wait(self) -> None:
        """Wait until the next step may begin; end the process where there is none."""
        if not self._ready:
            self._connection.send(READY)
            self._ready = True
        try:
            self._connection.recv()
        except EOFError:
            os._exit(0)

    def seconds(self) -> float:
        """Return what a step is charged by (`device_seconds`)."""
        return device_seconds(self.device)

    def report(self, *, total_s: float, rollout_s: float, success: float, sampled: int) -> None:
        """Report the step that just ended."""
        self._connection.send(
            json.dumps([total_s, rollout_s, success, sampled, peak_gib(self.device)])
        )


class Side:
    """The benchmark's end: a process that trains, one step at a time."""

    def __init__(
        self, name: str, command: Sequence[str | Path], log: Path, patience_s: float
    ) -> None:
        """Start the process and wait until it is ready.

        Its last argument is the descriptor of its end, its output goes to a file, and it has failed
        when it is silent for longer than `patience_s`.
        """
        self.name, self.log, self.patience_s = name, log, patience_s
        self.failure = ""
        """Why the process takes no more turns."""
        self.steps: list[TrainingStep] = []
        self._connection, theirs = Pipe()
        words = [*map(str, command), str(theirs.fileno())]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                words,
                env=one_thread_environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
            )
        theirs.close()
        self._receive()

    def step(self) -> TrainingStep | None:
        """Let the process make a step and return it; None if it died or takes too long."""
        try:
            self._connection.send(GO)
        except OSError:
            self._fail()
            return None
        reported = self._receive()
        if reported is None:
            return None
        step = TrainingStep(*json.loads(reported))
        self.steps.append(step)
        return step

    def _receive(self) -> str | None:
        """Return what the process sends; None if it failed."""
        try:
            if self._connection.poll(self.patience_s):
                return str(self._connection.recv())
        except (EOFError, OSError):
            self._fail()
            return None
        self.failure = f"it was silent for {self.patience_s:.0f} s"
        self.close()
        return None

    def _fail(self) -> None:
        """Note how the process ended."""
        status = self._process.wait()
        lines = self.log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
        self.failure = f"its process ended with status {status}, last saying {lines[-1]!r}"

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.kill()
        self._process.wait()
