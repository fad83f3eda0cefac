"""The viewer on a large run, timed inside a real Chromium: the first page, filters, a trajectory,
and the server's memory.

    python benchmarks/viewer.py [--trajectories 100000]

Each trajectory has 8 turns and 600 sampled ids with logprobs and texts, beside what the world says.
Times are from the change of the address to the page being drawn, medians of 7. Needs Playwright and
a Chromium, as `make test-browser` does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
TURNS, SAMPLED = 8, 600
TIMED = """(hash) => new Promise((done) => {
  const main = document.getElementById('main');
  delete main.dataset.ready;
  const began = performance.now();
  const watch = new MutationObserver(() => {
    if (!main.dataset.ready) return;
    watch.disconnect();
    requestAnimationFrame(() => setTimeout(() => done(performance.now() - began), 0)); // drawn, not only built
  });
  watch.observe(main, {attributes: true});
  location.hash = hash;
})"""  # noqa: E501
FILTERS = {
    "stop reason": "stop=max_turns",
    "reward": "reward_min=0.9",
    "step and phase": "phase=train&step_min=40&step_max=60",
    "error": "error=*",
    "tool": "tool=search",
    "turns, newest first": "turns_min=8&newest=1",
}


def trajectory(rng: random.Random) -> dict[str, Any]:
    """One record of random words."""
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
    spans: list[dict[str, Any]] = []
    turns = []
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

    for turn in range(TURNS):
        span("env" if turn else "prompt", 40)
        own = span("model", SAMPLED // TURNS)
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
        turns.append(row | {"info": {}, "retries": 0, "generate_s": 0.5, "env_s": 0.1})
    return {"spans": spans, "turns": turns}


def write_run(run: Path, count: int) -> int:
    """A run of so many trajectories in groups of 8, 1000 a step; gives the bytes of its file."""
    rng = random.Random(0)
    bodies = [orjson.dumps(trajectory(rng))[1:] for _ in range(200)]
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    rows = [
        {
            "phase": "train",
            "step": n + 1,
            "reward": n / 100,
            "success": n / 100,
            "entropy": 1 / (n + 1),
        }
        for n in range(100)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (run / "trajectories.jsonl").open("wb") as file:
        for number in range(count):
            key = {
                "phase": "train",
                "step": number // 1000,
                "task": f"task-{number // 8}",
                "sample": number % 8,
                "attempt": 0,
            }
            failed = rng.random() < 0.001
            head: dict[str, Any] = {
                "schema": 1,
                "key": key,
                "task": {"id": key["task"], "messages": [], "answer": "7"},
            }
            head |= {
                "stop": rng.choice(["done"] * 9 + ["max_turns"]),
                "reward": rng.choice([0.0, 0.25, 1.0]),
                "wall_s": rng.random(),
            }
            if failed:
                head |= {
                    "stop": "env_error",
                    "reward": None,
                    "error": {"type": "OSError", "phase": "step", "message": "gone"},
                }
            file.write(orjson.dumps(head)[:-1] + b"," + rng.choice(bodies) + b"\n")
        return file.tell()


def memory(pid: int) -> float:
    """MiB that a process holds."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def first_page(page: Page, url: str) -> float:
    """Milliseconds from nothing to the first hundred rows."""
    page.goto("about:blank")
    began = time.perf_counter()
    page.goto(url + "#/list/0")
    page.wait_for_selector("table.list tbody tr")
    return 1000 * (time.perf_counter() - began)


def measure(page: Page, url: str, count: int) -> dict[str, Any]:
    """All times in milliseconds."""
    found: dict[str, Any] = {"first_page_while_reading": round(first_page(page, url))}
    began = time.monotonic()
    while (
        page.evaluate("fetch('/api/list?most=1').then((a) => a.json()).then((a) => a.count)")
        < count
    ):
        time.sleep(0.5)
    found["indexed_s"] = round(time.monotonic() - began, 1)

    def timed(address: str) -> int:
        times = []
        for _ in range(7):
            page.evaluate(TIMED, "#/list/0?task=none")
            times.append(page.evaluate(TIMED, address))
        return round(statistics.median(times))

    found["first_page"] = round(statistics.median(first_page(page, url) for _ in range(7)))
    found["filters"] = {name: timed(f"#/list/0?{query}") for name, query in FILTERS.items()}
    found["common_word"] = timed("#/list/0?text=alpha")
    at = page.evaluate(
        f"fetch('/api/list?start={count // 2}&most=1').then((a) => a.json()).then((a) => "
        "a.rows[0].at)"
    )
    found["trajectory"], found["tokens"], found["siblings"] = (
        timed(f"#/t/0/{at}/{view}") for view in ("conversation", "tokens", "siblings")
    )
    return found


def main() -> None:
    """Write a run, serve it, look at it."""
    parser = argparse.ArgumentParser(description="the viewer on a large run")
    parser.add_argument("--trajectories", type=int, default=100_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "large"
        size = write_run(run, args.trajectories)
        words = [sys.executable, "-m", "turnwright.cli.main", "view", str(run)]
        server = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        )
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[0]
            with sync_playwright() as playwright:
                where = os.environ.get("CHROMIUM") or shutil.which("chromium")
                browser = playwright.chromium.launch(executable_path=where, args=["--no-sandbox"])
                found = measure(browser.new_page(), url, args.trajectories)
                browser.close()
            found |= {
                "server_mib": round(memory(server.pid)),
                "file_mib": round(size / 2**20),
                "trajectories": args.trajectories,
            }
        finally:
            server.terminate()
            server.wait()
    for label, value in found.items():
        print(f"{label}: {value}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
