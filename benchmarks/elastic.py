"""Servers that are killed and added while a run trains: `python benchmarks/fleet.py elastic`."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import kill_resume
import psutil

from turnwright.cli.main import main as turnwright
from turnwright.engines import Request
from turnwright.engines.remote import Fleet
from turnwright.engines.remote.engine_list import EngineList
from turnwright.engines.remote.remote_engine import CANARY
from turnwright.engines.remote.replica import Replica

SERVERS, AT_A_TIME = 4, 2
RECIPE = kill_resume.RECIPE.replace("groups = 6", "groups = 24\nconcurrency = 12").replace(
    "steps = 16", "steps = {steps}"
)
EPISODES = 24 * 4


class Server:
    """`turnwright serve` in a process of its own."""

    def __init__(self, model: Path) -> None:
        words = [
            sys.executable,
            "-m",
            "turnwright.cli.main",
            "serve",
            str(model),
            "--port",
            "0",
            "--device",
            "cpu",
        ]
        self.begun = time.monotonic()
        self.process = kill_resume.start(words, stdout=subprocess.PIPE, text=True)
        self.listening = self.answered = self.joined = self.cpu_s = 0.0

    def wait(self) -> None:
        """Wait until it listens."""
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[0]
        self.listening = time.monotonic()
        self.cpu_s = sum(psutil.Process(self.process.pid).cpu_times()[:2])

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@dataclass
class Siege:
    """Servers of a run, and what becomes of them."""

    model: Path
    servers: EngineList
    rounds: int
    rng: random.Random
    running: list[Server] = field(default_factory=list)
    spare: list[Server] = field(default_factory=list)
    added: list[Server] = field(default_factory=list)
    killed: int = 0
    in_flight: list[int] = field(default_factory=list)
    """Calls in flight on the servers that were killed, by round."""
    replies: int = 0
    """Since the last weights."""
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.ready = threading.Event()

    def start(self, count: int) -> list[Server]:
        made = [Server(self.model) for _ in range(count)]
        for server in made:
            server.wait()
        return made

    def prepare(self) -> None:
        """Start the servers of the next round, in a thread, once those of this round answered."""
        self.ready.clear()

        def work() -> None:
            while not all(server.answered for server in self.added):
                # A start takes a core, which would be measured too.
                time.sleep(0.02)
            self.spare = self.start(AT_A_TIME)
            self.ready.set()

        threading.Thread(target=work, daemon=True).start()

    def answered(self, member: Replica) -> None:
        """Note a reply; in mid-step, kill and add servers."""
        self.replies += 1
        due = self.replies == EPISODES // 2 and self.killed < AT_A_TIME * self.rounds
        if due and self.ready.is_set() and all(server.answered for server in self.added):
            self.strike()

    def strike(self) -> None:
        victims = self.rng.sample(self.running, AT_A_TIME)
        urls = {server.url for server in victims}
        self.in_flight.append(
            sum(len(m.calls) for fleet in FLEETS for m in fleet.members if m.engine.url in urls)
        )
        for server in victims:
            server.kill()
            self.servers.remove(server.url)
            self.running.remove(server)
            self.killed += 1
        for server in self.spare:
            self.servers.add(server.url)
            server.joined = time.monotonic()
        self.running += self.spare
        self.added += self.spare
        self.spare = []
        if self.killed < AT_A_TIME * self.rounds:
            self.prepare()


FLEETS: list[Fleet] = []


def play(folder: Path, recipe: str, model: Path, rounds: int, seed: int) -> tuple[Path, Siege]:
    """Train with four servers, of which two at a time are replaced in the middle of a step."""
    file, out = folder / "recipe.toml", folder / f"run-{rounds}"
    file.write_text(recipe)
    siege = Siege(model, EngineList(folder / f"engines-{rounds}.txt"), rounds, random.Random(seed))
    siege.running = siege.start(SERVERS)
    for server in siege.running:
        siege.servers.add(server.url)
    if rounds:
        siege.prepare()
    generate, update, made, check = (
        Replica.generate,
        Fleet.update_from,
        Fleet.__init__,
        Replica.check,
    )

    async def noted(self: Replica, request: Any) -> Any:
        found = await generate(self, request)
        siege.answered(self)
        return found

    async def asked(self: Replica, *given: Any) -> bool:
        """Ask a server that joined for a reply as soon as the fleet would: the
        step may be over by then."""
        well = await check(self, *given)
        for server in siege.added:
            if well and server.url == self.engine.url and not server.answered:
                request = Request(
                    list(CANARY), 4, frozenset(), 1, "first", min_version=FLEETS[-1].version
                )
                assert (await generate(self, request)).version == FLEETS[-1].version
                server.answered = time.monotonic()
        return well

    async def paced(self: Fleet, *given: Any, **options: Any) -> None:
        # The run is faster than two servers start: it waits for those of the next round.
        if siege.killed < AT_A_TIME * siege.rounds:
            await asyncio.to_thread(siege.ready.wait)
        await update(self, *given, **options)
        siege.replies = 0

    def kept(self: Fleet, *given: Any, **options: Any) -> None:
        made(self, *given, **options)
        FLEETS.append(self)

    words = [
        "train",
        str(file),
        "--out",
        str(out),
        "--model.path",
        str(model),
        "--warmup.demos",
        "0",
    ]
    words += [
        "--engine.kind",
        "auto",
        "--engine.urls-file",
        str(siege.servers.path),
        "--display",
        "none",
    ]
    with ExitStack() as stack:
        stack.enter_context(patch.object(Replica, "generate", noted))
        stack.enter_context(patch.object(Replica, "check", asked))
        stack.enter_context(patch.object(Fleet, "update_from", paced))
        stack.enter_context(patch.object(Fleet, "__init__", kept))
        status = turnwright(words)
    for server in [*siege.running, *siege.spare]:
        server.kill()
    siege.counts = FLEETS.pop().counts
    if status:
        raise SystemExit(f"the run ended with status {status}")
    return out, siege


def elastic(rounds: int, seed: int) -> dict[str, Any]:
    """Compare a run whose servers are replaced with one whose servers stay; return the
    figures of the last line."""
    recipe = RECIPE.format(steps=rounds + 6)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        os.chdir(folder)
        model = kill_resume.warmed(folder, recipe)
        besieged, siege = play(folder, recipe, model, rounds, seed)
        peaceful, _ = play(folder, recipe, model, 0, seed)
        ours, theirs = kill_resume.trained(besieged), kill_resume.trained(peaceful)
        weights_equal = kill_resume.weights(besieged) == kill_resume.weights(peaceful)
    answered = [server for server in siege.added if server.answered]
    joined = [server.answered - server.joined for server in answered]
    started = [
        server.listening - server.begun + wait
        for server, wait in zip(answered, joined, strict=True)
    ]
    cut = sum(siege.in_flight)
    print(
        f"{len(siege.in_flight)} rounds, {siege.killed} servers killed with {cut} calls in flight; "
        f"{dict(siege.counts)}"
    )
    return {
        "rounds": len(siege.in_flight),
        "killed": siege.killed,
        "calls_cut": cut,
        "trained": len(ours),
        "lost": len(theirs.keys() - ours.keys()),
        "ids_equal": ours == theirs,
        "weights_equal": weights_equal,
        "never_answered": len(siege.added) - len(answered),
        "join_to_answer_s": [round(statistics.median(joined), 2), round(max(joined), 2)],
        "start_to_answer_s": [round(statistics.median(started), 2), round(max(started), 2)],
        "start_cpu_s": round(statistics.median(server.cpu_s for server in siege.added), 2),
    }
