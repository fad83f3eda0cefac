"""The viewer on large runs: how soon its first screen and a filtered list are there, what indexing
and one file cost, and what memory it takes while a run goes on.

    python benchmarks/viewer.py [--episodes 1000 10000 100000] [--minutes 60] [--run RUN]

Each made-up episode has 8 turns and 600 sampled ids with logprobs and texts, beside what the world
says. Times of the server are those of its answers over HTTP, medians of 7; those of the page, where
Playwright and a Chromium are there as for `make test-browser`, are from the change of the address
to the page being drawn. Reading as JSON is `orjson.loads` of each line of the same files. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import orjson

ROOT = Path(__file__).resolve().parents[1]
TURNS, SAMPLED = 8, 600
TIMES = 7  # of which the median is taken
STEP = 1000  # episodes of a step
GROUP = 8

TIMED = """(hash) => new Promise((done) => {
  const began = performance.now();
  const ready = () => document.getElementById('main')?.dataset.ready === hash;
  const look = () => ready() ? setTimeout(() => done(performance.now() - began), 0) : requestAnimationFrame(look);
  location.hash = hash;
  requestAnimationFrame(look);
})"""  # noqa: E501
FILTERS: dict[str, dict[str, Any]] = {
    "stop reason": {"stop": "max_turns"},
    "reward": {"reward_min": 0.9},
    "steps": {"phase": "train", "step_min": 1, "step_max": 20},
    "error": {"error": "*"},
    "tool": {"tool": "search"},
    "ties": {"tie": "yes"},
    "turns, newest first": {"turns_min": 8, "sort": "newest"},
    "worst first": {"sort": "worst"},
    "common word": {"text": "alpha"},
    "rare word": {"text": "task-17"},
}


def trajectory(rng: random.Random, turns: int = TURNS, sampled: int = SAMPLED) -> dict[str, Any]:
    """One record of random words."""
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
    spans: list[dict[str, Any]] = []
    rows = []
    place = 0

    def span(origin: str, count: int) -> int:
        nonlocal place
        tokens = [" " + rng.choice(words) for _ in range(count)]
        row = {
            "origin": origin,
            "parent": len(spans) - 1,
            "start": place,
            "ids": [rng.randrange(150_000) for _ in tokens],
        }
        row |= {"mask": int(origin == "model"), "text": "".join(tokens), "agent": "main"}
        if origin == "model":
            row |= {
                "tokens": tokens,
                "logprobs": [-rng.expovariate(2.0) for _ in tokens],
                "version": 3,
            }
        spans.append(row)
        place += count
        return len(spans) - 1

    for turn in range(turns):
        span("env" if turn else "prompt", 40)
        own = span("model", sampled // turns)
        call = {
            "id": f"c{turn}",
            "type": "function",
            "function": {"name": rng.choice(["search", "open"]), "arguments": "{}"},
        }
        reply = {
            "role": "assistant",
            "content": spans[own]["text"],
            "tool_calls": [call] if rng.random() < 0.3 else [],
        }
        row = {
            "agent": "main",
            "prompt": 0,
            "context": spans[own]["start"],
            "spans": [own],
            "parent": turn - 1,
            "finish": "stop",
        }
        row |= {
            "messages": [{"role": "user", "content": spans[own - 1]["text"]}],
            "reply": reply,
            "reward": 0.0,
        }
        rows.append(row | {"info": {}, "retries": 0, "generate_s": 0.5, "env_s": 0.1})
    return {"spans": spans, "turns": rows}


class Episodes:
    """Lines of trajectories.jsonl and training.jsonl without end, in groups of 8."""

    def __init__(self, turns: int = TURNS, sampled: int = SAMPLED, step: int = STEP) -> None:
        self._rng = random.Random(0)
        self._step = step
        self._number = 0
        self._bodies = [orjson.dumps(trajectory(self._rng, turns, sampled))[1:] for _ in range(200)]

    def next(self) -> tuple[bytes, bytes]:
        """Return the line of an episode, and that of its training."""
        rng = self._rng
        number = self._number
        self._number += 1
        key = {
            "phase": "train",
            "step": number // self._step,
            "task": f"task-{number // GROUP}",
            "sample": number % GROUP,
            "attempt": 0,
        }
        head: dict[str, Any] = {
            "schema": 1,
            "key": key,
            "task": {"id": key["task"], "messages": [], "answer": "7"},
            "stop": rng.choice(["done"] * 9 + ["max_turns"]),
            "reward": rng.choice([0.0, 0.25, 1.0]),
            "wall_s": rng.random(),
        }
        if rng.random() < 0.001:
            head |= {
                "stop": "env_error",
                "reward": None,
                "error": {"type": "OSError", "phase": "step", "message": "gone"},
            }
        line = orjson.dumps(head)[:-1] + b"," + rng.choice(self._bodies) + b"\n"
        advantage = None if head["reward"] is None else head["reward"] - 0.4
        learned = {"key": list(key.values()), "advantage": advantage, "reason": None}
        return line, orjson.dumps(learned) + b"\n"


def write_run(run: Path, count: int, episodes: Episodes) -> int:
    """Write a run of so many episodes; return the bytes of its records."""
    run.mkdir(parents=True)
    (run / "config.json").write_text('{"config": {}}')
    rows = [
        {
            "phase": "train",
            "step": n + 1,
            "reward": n / 100,
            "success": n / 100,
            "entropy": 1 / (n + 1),
            "stops": {"done": 900, "max_turns": 100},
        }
        for n in range(100)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (
        (run / "trajectories.jsonl").open("wb") as records,
        (run / "training.jsonl").open("wb") as training,
    ):
        for _ in range(count):
            line, learned = episodes.next()
            records.write(line)
            training.write(learned)
        return records.tell()


class Server:
    """`turnwright view`, and requests to it."""

    def __init__(self, run: Path, cache: Path) -> None:
        words = [sys.executable, "-m", "turnwright.cli.main", "view", str(run)]
        env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "XDG_CACHE_HOME": str(cache)}
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().split()[2]
        self._run = run.name
        self._connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=120)

    def get(self, path: str, **query: Any) -> bytes:
        """Return the body of an answer."""
        self._connection.request("GET", f"{path}?{urlencode(query)}")
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {body[:200]!r}")
        return body

    def first_screen(self) -> None:
        """Ask for what the first screen of a run needs."""
        for path in ("/", "/vendor.js", "/app.js", "/vendor.css", "/app.css", "/api/session"):
            self.get(path)
        self.get("/api/run", run=self._run)

    def episodes(self, **query: Any) -> dict[str, Any]:
        """Ask for a list."""
        found: dict[str, Any] = orjson.loads(self.get("/api/episodes", run=self._run, **query))
        return found

    def wait_indexed(self) -> list[float]:
        """Wait until all is indexed; return the milliseconds of lists asked for meanwhile."""
        times = []
        while True:
            began = time.perf_counter()
            indexed = self.episodes()["indexed"]
            times.append(1000 * (time.perf_counter() - began))
            if indexed["read"] == indexed["size"]:
                return times
            time.sleep(0.25)

    @property
    def mib(self) -> float:
        """MiB that the server holds."""
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
        return 0.0

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait()


@contextmanager
def served(run: Path) -> Iterator[Server]:
    """Serve a run with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        server = Server(run, Path(cache))
        try:
            yield server
        finally:
            server.close()


def median_ms(action: Callable[[], Any]) -> float:
    """Return the median milliseconds of an action."""
    times = []
    for _ in range(TIMES):
        began = time.perf_counter()
        action()
        times.append(1000 * (time.perf_counter() - began))
    return round(statistics.median(times), 1)


def measure_server(run: Path) -> dict[str, Any]:
    """Measure the answers of a server, from its start on."""
    with served(run) as server:
        began = time.perf_counter()
        server.first_screen()
        first_ms = 1000 * (time.perf_counter() - began)
        began = time.perf_counter()
        while_indexing = server.wait_indexed()
        found: dict[str, Any] = {
            "first_screen_at_start_ms": round(first_ms, 1),
            "list_while_indexing_ms": round(statistics.median(while_indexing), 1),
            "list_while_indexing_worst_ms": round(max(while_indexing), 1),
            "indexed_s": round(time.perf_counter() - began, 1),
            "first_screen_ms": median_ms(server.first_screen),
            "list_ms": median_ms(server.episodes),
            "filters_ms": {
                name: median_ms(lambda query=query: server.episodes(**query))  # type: ignore[misc]
                for name, query in FILTERS.items()
            },
        }
        key = server.episodes()["rows"][50]["key"]
        found["episode_ms"] = median_ms(lambda: server.get("/api/episode", run=run.name, key=key))
        found["server_mib"] = round(server.mib)
        return found


def measure_page(run: Path) -> dict[str, Any]:
    """Measure the page in a browser; empty where there is none."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return {}
    where = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with served(run) as server, sync_playwright() as playwright:
        server.wait_indexed()
        browser = playwright.chromium.launch(executable_path=where, args=["--no-sandbox"])
        page = browser.new_page()

        def first_screen() -> None:
            page.goto("about:blank")
            page.goto(server.url)
            page.wait_for_selector("main[data-ready]")

        def timed(query: dict[str, Any]) -> float:
            times = []
            for _ in range(TIMES):
                page.evaluate(TIMED, f"#/run/{run.name}")
                address = f"#/run/{run.name}/episodes?{urlencode(query)}"
                times.append(page.evaluate(TIMED, address))
            return round(statistics.median(times), 1)

        found = {
            "page_first_screen_ms": median_ms(first_screen),
            "page_list_ms": timed({}),
            "page_filters_ms": {name: timed(query) for name, query in FILTERS.items()},
        }
        browser.close()
        return found


READ = """
import sys, time
from pathlib import Path
import orjson
began, cpu = time.perf_counter(), time.process_time()
for name in ("trajectories.jsonl", "training.jsonl"):
    path = Path(sys.argv[1]) / name
    if path.is_file():
        with path.open("rb") as file:
            for line in file:
                orjson.loads(line)
print(time.perf_counter() - began, time.process_time() - cpu)
"""
INDEX = """
import sys, time
from pathlib import Path
from turnwright_view.web.index import ROUND_BYTES, RunIndex
began, cpu = time.perf_counter(), time.process_time()
index = RunIndex(Path(sys.argv[1]))
while index.update(ROUND_BYTES):
    pass
print(time.perf_counter() - began, time.process_time() - cpu)
"""


def measure_indexing(run: Path, times: int = 3) -> dict[str, Any]:
    """Measure indexing against reading the same files as JSON, one after the other."""
    reading: list[list[float]] = []
    indexing: list[list[float]] = []
    for _ in range(times):
        reading.append(_timed(READ, run))
        indexing.append(_timed(INDEX, run))
    wall, cpu = map(min, zip(*reading, strict=True))
    index_wall, index_cpu = map(min, zip(*indexing, strict=True))
    return {
        "read_as_json_s": round(wall, 2),
        "index_s": round(index_wall, 2),
        "index_over_json": round(index_wall / wall, 2),
        "index_over_json_cpu": round(index_cpu / cpu, 2),
    }


def _timed(code: str, run: Path) -> list[float]:
    """Run code in a process of its own; return its wall-clock and CPU seconds."""
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "XDG_CACHE_HOME": cache}
        words = [sys.executable, "-c", code, str(run)]
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    return [float(text) for text in done.stdout.split()]


def measure_export(run: Path, folder: Path) -> dict[str, Any]:
    """Measure one file of a run: CPU seconds of the command, with indexing, and megabytes."""
    out = folder / "sent.html"
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "XDG_CACHE_HOME": cache}
        words = [sys.executable, "-m", "turnwright.cli.main", "view", str(run), "--html", str(out)]
        before = os.times()
        subprocess.run(words, env=env, check=True, stdout=subprocess.DEVNULL)
        after = os.times()
    cpu = after.children_user + after.children_system
    cpu -= before.children_user + before.children_system
    return {"export_cpu_s": round(cpu, 2), "export_mb": round(out.stat().st_size / 1e6, 2)}


def measure_following(run: Path, minutes: float) -> dict[str, Any]:
    """Measure the memory of a server that follows a run which goes on, asked as by a page."""
    episodes = Episodes()
    write_run(run, 1000, episodes)
    samples: list[tuple[float, float]] = []
    with served(run) as server:
        began = time.monotonic()
        metrics = (run / "metrics.jsonl").open("a")
        records = (run / "trajectories.jsonl").open("ab")
        training = (run / "training.jsonl").open("ab")
        step = 100
        with metrics, records, training:
            while time.monotonic() - began < 60 * minutes:
                for _ in range(10):
                    line, learned = episodes.next()
                    records.write(line)
                    training.write(learned)
                step += 1
                metrics.write(json.dumps({"phase": "train", "step": step, "reward": 0.5}) + "\n")
                for file in (metrics, records, training):
                    file.flush()
                server.get("/api/runs")
                server.get("/api/run", run=run.name, since=step - 1)
                server.episodes()
                samples.append((time.monotonic() - began, server.mib))
                time.sleep(2)
        added = server.wait_indexed() and server.episodes()["total"] - 1000

    # The first fifth is warming up.
    settled = samples[len(samples) // 5 :]
    slope = (
        statistics.linear_regression(*zip(*settled, strict=True)).slope if len(settled) > 2 else 0
    )
    return {
        "followed_minutes": round(samples[-1][0] / 60, 1),
        "followed_episodes": added,
        "followed_mib": [round(settled[0][1], 1), round(settled[-1][1], 1)],
        "growth_mib_an_hour": round(3600 * slope, 2),
    }


def main() -> None:
    """Write runs, serve them, look at them."""
    parser = argparse.ArgumentParser(description="the viewer on large runs")
    parser.add_argument("--episodes", type=int, nargs="*", default=[1_000, 10_000, 100_000])
    parser.add_argument("--minutes", type=float, default=60, help="of following; 0 for none")
    parser.add_argument("--run", type=Path, help="a real run for the one file")
    args = parser.parse_args()

    figures: dict[str, Any] = {"sizes": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for count in args.episodes:
            run = folder / f"run-{count}"
            size = write_run(run, count, Episodes())
            found = {"file_mib": round(size / 2**20)}
            found |= measure_indexing(run, 3 if count <= 10_000 else 1)
            found |= measure_server(run) | measure_page(run)
            figures["sizes"][count] = found
            shutil.rmtree(run)
            for label, value in found.items():
                print(f"{count} episodes, {label}: {value}", flush=True)

        run = args.run
        if run is None:  # as many and as short episodes as the quickstart has
            run = folder / "quickstart"
            write_run(run, 14_000, Episodes(turns=3, sampled=10, step=128))
        figures |= measure_export(run, folder)
        figures["short_episodes"] = measure_indexing(run)
        if args.minutes:
            figures |= measure_following(folder / "followed", args.minutes)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
