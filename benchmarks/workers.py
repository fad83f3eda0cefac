"""The quickstart on two workers in two network namespaces, over HTTP and on Ray, with
kills by -9 in the middle.

    sudo python benchmarks/workers.py                     # alone, then http, then ray: three quickstarts
    sudo python benchmarks/workers.py --kinds http --warmup 60 --steps 8
    sudo python benchmarks/workers.py --kinds servers     # the engine's servers on Ray too, one in each namespace

Two namespaces with an address each are two machines to everything in them: the run, one worker and
Ray's head in the first, the other worker and the other raylet in the second. In the middle of a
step a worker is killed (`http`) or the raylet of the second namespace with all that it started
(`ray`), and replaced; some steps later the run itself, which is resumed. With `servers`, two
servers (`turnwright serve`) are placed on the nodes as well. The second node has a file system of
its own in place of the directory with the runs: its servers get all weights over the network
(`engine.tree`). A line of JSON for each kind: `unseen`, whether the second node's servers saw that
directory empty; `groups_once`, every episode ended once and every step trained once; `asked_again`,
groups; `detect_s`, from the kill to the journal's line about it; `lost_s`, from the kill to the
next turn of a group that was asked for again; `weights_equal` to those of the undisturbed run in
one process, bit for bit; `success` with the interval of that run. Needs root, for `ip netns`.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from kit.ray_cluster import write_server  # noqa: E402

NAMESPACES, ADDRESSES = ("turnwright0", "turnwright1"), ("10.77.0.1", "10.77.0.2")
PORT, RAY_PORT = 7070, 6379
TOKEN, SERVER_TOKEN = "of-the-benchmark", "TURNWRIGHT_SERVE_TOKEN"
PYTHON = Path(sys.executable)


def ip(*words: str) -> None:
    """Run `ip`."""
    subprocess.run(("ip", *words), check=True)


@contextmanager
def namespaces() -> Iterator[None]:
    """Two network namespaces that reach each other and nothing else; everything in them
    is killed at the end."""
    try:
        for name in NAMESPACES:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            "twv0",
            "netns",
            NAMESPACES[0],
            "type",
            "veth",
            "peer",
            "name",
            "twv1",
            "netns",
            NAMESPACES[1],
        )
        for number, (name, address) in enumerate(zip(NAMESPACES, ADDRESSES, strict=True)):
            ip("-n", name, "address", "add", f"{address}/24", "dev", f"twv{number}")
            for device in ("lo", f"twv{number}"):
                ip("-n", name, "link", "set", device, "up")
        yield
    finally:
        for name in NAMESPACES:
            for pid in pids(name):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(("ip", "netns", "del", name), check=False)


def pids(namespace: str, program: str = "") -> list[int]:
    """Return the processes in a namespace, or those of one program."""
    found = subprocess.run(
        ("ip", "netns", "pids", namespace), capture_output=True, text=True, check=False
    ).stdout.split()
    names = {int(pid): Path(f"/proc/{pid}/comm") for pid in found}
    return [
        pid
        for pid, name in names.items()
        if name.exists() and (not program or name.read_text().strip() == program)
    ]


def start(namespace: str, *words: Any, log: Path) -> subprocess.Popen[bytes]:
    """Start a program in a namespace."""
    with log.open("ab") as file:
        variables = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT / "src"),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        variables |= {"TURNWRIGHT_WORKER_TOKEN": TOKEN, SERVER_TOKEN: TOKEN}
        variables |= {"RAY_AUTH_MODE": "disabled"}  # nothing else reaches the namespaces
        command = ["ip", "netns", "exec", namespace, *map(str, words)]
        return subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | variables)


def turnwright(namespace: str, *words: Any, log: Path) -> subprocess.Popen[bytes]:
    """Start a command of this checkout."""
    return start(namespace, PYTHON, "-m", "turnwright.cli.main", *words, log=log)


def raylet(number: int, log: Path, hidden: Path | None = None) -> None:
    """Start a node of the Ray cluster, the first with its head; the second
    sees nothing in `hidden`."""
    own = (
        ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
        if not number
        else [f"--address={ADDRESSES[0]}:{RAY_PORT}"]
    )
    words = [
        "start",
        *own,
        f"--node-ip-address={ADDRESSES[number]}",
        "--num-cpus=2",
        "--object-store-memory=100000000",
    ]
    command: list[Any] = [PYTHON.parent / "ray", *words]
    if hidden is not None and number:
        command = [
            "unshare",
            "--mount",
            "sh",
            "-c",
            'mount -t tmpfs -o ro none "$0" && exec "$@"',
            hidden,
            *command,
        ]
    done = start(NAMESPACES[number], *command, log=log)
    if done.wait(120):
        raise SystemExit(f"ray {' '.join(words)} failed: {log.read_text()[-2000:]}")


def events(run: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a journal."""
    path = run / "journal.jsonl"
    return (
        [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []
    )


class JournalTail:
    """New events of a journal that another process writes."""

    def __init__(self, run: Path) -> None:
        self._path, self._at = run / "journal.jsonl", 0

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield complete lines that were not read yet."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._at += len(line)
                yield json.loads(line)

    def wait(
        self,
        holds: Callable[[dict[str, Any]], Any],
        process: subprocess.Popen[bytes],
        seconds: float = 3600,
    ) -> float:
        """Return the time at which an event appears."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if any(holds(event) for event in list(self.read())):
                return time.monotonic()
            if process.poll() is not None:
                raise SystemExit("the run ended before the kill was noticed")
            time.sleep(0.005)
        raise SystemExit("nothing like it appeared in the journal")


def turn_of_step(step: int) -> Callable[[dict[str, Any]], bool]:
    """Return whether an event is a turn of a training step or a later one."""
    return lambda event: event["e"] == "turn" and event["k"][0] == "train" and event["k"][1] >= step


def measure(
    run: Path, process: subprocess.Popen[bytes], step: int, kill: Callable[[], None]
) -> dict[str, float]:
    """Kill something in the middle of a step; return when it was noticed, and when a lost
    group had its next turn."""
    tail = JournalTail(run)
    tail.wait(turn_of_step(step), process)
    killed = time.monotonic()
    kill()
    lost: list[list[Any]] = []
    detected = tail.wait(
        lambda event: event["e"] == "asked_again" and (lost.append(event["g"]) or True),
        process,
        120,
    )
    resumed = tail.wait(lambda event: event["e"] == "turn" and event["k"][:3] in lost, process, 120)
    return {"detect_s": detected - killed, "lost_s": resumed - killed}


def server_words(home: Path) -> list[Any]:
    """Write what starts a server, and return the settings of one on each node."""
    words: list[Any] = ["--engine.kind", "vllm", "--engine.servers", "2", "--engine.tree", "true"]
    words += ["--engine.install-dir", write_server(home)]
    words += [
        "--engine.key-env",
        SERVER_TOKEN,
        "--scale.ray-engine-cpus",
        "1",
        "--scale.ray-engine-gpus",
        "0",
    ]
    return words


def unseen(run: Path) -> bool:
    """Return whether servers run in the second namespace and see nothing where the run is."""
    servers = [
        pid
        for pid in pids(NAMESPACES[1])
        if b"\0serve\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return bool(servers) and not any(
        list(Path(f"/proc/{pid}/root{run.parent}").iterdir()) for pid in servers
    )


def play(kind: str, folder: Path, words: list[Any], steps: int) -> dict[str, Any]:
    """Play the recipe on two workers of a kind with kills in the middle, and return its outcome."""
    log, on_ray = folder / f"{kind}.log", kind != "http"
    run = folder / "runs" / kind
    run.parent.mkdir(exist_ok=True)
    listen = f"{ADDRESSES[0]}:{PORT}"
    scale = ["--scale.listen", listen] + (
        ["--scale.ray", f"{ADDRESSES[0]}:{RAY_PORT}"] if on_ray else []
    )
    hidden = run.parent if kind == "servers" else None
    if kind == "servers":
        scale += server_words(folder / "home")

    def worker(number: int) -> subprocess.Popen[bytes]:
        return turnwright(
            NAMESPACES[number],
            "worker",
            "--join",
            f"http://{listen}",
            log=folder / f"worker{number}.log",
        )

    with namespaces():
        if on_ray:
            for number in (0, 1):
                raylet(number, folder / f"ray{number}.log", hidden)
        process = turnwright(
            NAMESPACES[0], "train", *words, "--out", run, "--display", "plain", *scale, log=log
        )
        workers = [worker(number) for number in (0, 1)] if kind == "http" else []

        def kill() -> None:
            victims = [workers[1].pid] if kind == "http" else pids(NAMESPACES[1], "raylet")
            for pid in victims:
                os.kill(pid, signal.SIGKILL)

        found: dict[str, Any] = {}
        if kind == "servers":
            JournalTail(run).wait(turn_of_step(0), process)
            found["unseen"] = unseen(run)
        found |= measure(run, process, steps // 3, kill)
        if kind == "http":
            workers.append(worker(1))
        else:
            raylet(1, folder / "ray1.log", hidden)
        JournalTail(run).wait(turn_of_step(2 * steps // 3), process)
        process.kill()
        process.wait()
        process = turnwright(NAMESPACES[0], "train", "--resume", run, "--display", "plain", log=log)
        if process.wait():
            raise SystemExit(f"the resumed run failed: {log.read_text()[-3000:]}")
    return found | outcome(run, folder / "alone")


def outcome(run: Path, alone: Path) -> dict[str, Any]:
    """Compare a run with the undisturbed one."""
    seen = events(run)
    closed, trained = (
        Counter(map(str, keys))
        for keys in (
            [event["k"] for event in seen if event["e"] == "closed"],
            [event["step"] for event in seen if event["e"] == "trained"],
        )
    )
    summary, other = (json.loads((one / "summary.json").read_text()) for one in (run, alone))
    weights = [
        max((one / "checkpoints").glob("step-*")).joinpath("model.safetensors").read_bytes()
        for one in (run, alone)
    ]
    return {
        "groups_once": set(closed.values()) == {1} and set(trained.values()) == {1},
        "asked_again": sum(event["e"] == "asked_again" for event in seen),
        "weights_equal": weights[0] == weights[1],
        "success": summary["success_after"],
        "interval_alone": other["success_after_ci"],
        "wall_s": summary["wall_s"],
        "wall_alone_s": other["wall_s"],
    }


def main() -> None:
    """Run the kinds that are asked for, and print a line of JSON for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=("http", "ray", "servers"), default=["http", "ray"]
    )
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument(
        "--warmup", type=int, help="warm-up steps, without a gate (default: the recipe's)"
    )
    parser.add_argument("--out", type=Path, help="directory to keep (default: a temporary one)")
    args = parser.parse_args()
    words = [
        str(ROOT / "recipes" / "quickstart.toml"),
        "--train.steps",
        str(args.steps),
        "--checkpoint.every",
        "5",
    ]
    if args.warmup is not None:
        words += [
            "--warmup.steps",
            str(args.warmup),
            "--warmup.gate_success",
            "0",
            "--warmup.gate_every",
            str(args.warmup),
        ]
    if "servers" in args.kinds:
        # vLLM's CPU attention supports no heads of 16.
        words += [
            "--model.heads",
            "2",
            "--model.kv-heads",
            "2",
        ]
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with namespaces():
            done = turnwright(
                NAMESPACES[0],
                "train",
                *words,
                "--out",
                folder / "alone",
                "--display",
                "plain",
                log=folder / "alone.log",
            )
            if done.wait():
                raise SystemExit((folder / "alone.log").read_text()[-3000:])
        for kind in args.kinds:
            row = play(kind, folder, words, args.steps)
            print(
                json.dumps(
                    {"kind": kind}
                    | {key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()}
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
