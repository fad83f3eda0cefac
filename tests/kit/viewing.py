"""A run directory as training would leave it, made of random figures, and requests to a viewer of
it."""

from __future__ import annotations

import gzip
import http.client
import json
import math
import random
import time
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from turnwright.config import load
from turnwright.config.dump import to_json_dict
from turnwright.records.episode_metrics import wilson


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def trajectory(
    rng: random.Random,
    *,
    phase: str = "train",
    step: int = 0,
    turns: int = 3,
    reward: float | None = 1.0,
    said: str = "",
    **more: Any,
) -> dict[str, Any]:
    """One line of trajectories.jsonl: look-ups, then an answer."""
    names = [rng.choice(["amber", "birch", "cedar", "delta", "ember"]) for _ in range(turns)]
    spans: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    place = 0

    def span(origin: str, text: str, tokens: list[str] | None = None) -> int:
        nonlocal place
        pieces = tokens or [text[i : i + 4] for i in range(0, len(text), 4)]
        row: dict[str, Any] = {
            "origin": origin,
            "parent": len(spans) - 1,
            "start": place,
            "text": text,
            "mask": int(origin == "model"),
        }
        row["ids"] = [rng.randrange(512) for _ in pieces]
        if origin == "model":
            logprobs = [-rng.expovariate(1.5) if rng.random() < 0.4 else -0.01 for _ in pieces]
            row |= {"tokens": pieces, "logprobs": logprobs, "version": step}
        spans.append(row)
        place += len(row["ids"])
        return len(spans) - 1

    heard = message("user", f"code of {names[0]}")
    span("prompt", f"<|im_start|>user\n{heard['content']}<|im_end|>\n<|im_start|>assistant\n")
    for turn in range(turns):
        reply = f"lookup {names[turn]}" if turn + 1 < turns else "answer 7"
        reply = said or reply
        tokens = [reply[:6], reply[6:], "<|im_end|>"] if not said else [reply, "<|im_end|>"]
        own = span("model", reply + "<|im_end|>", tokens)
        rows.append(
            {
                "agent": "main",
                "prompt": own - 1,
                "context": spans[own]["start"],
                "spans": [own],
                "parent": turn - 1,
                "messages": [heard],
                "reply": message("assistant", reply),
                "finish": "stop",
                "reward": 0.0,
                "info": {},
                "retries": 0,
                "generate_s": 0.031,
                "env_s": 0.0004,
            }
        )
        if turn + 1 < turns:
            heard = message("user", said or f"see {names[turn + 1]}")
            span("template", "\n<|im_start|>user\n")
            span("env", heard["content"])
            span("template", "<|im_end|>\n<|im_start|>assistant\n")
    task = {
        "id": f"t{rng.randrange(10**6)}",
        "messages": [rows[0]["messages"][0]],
        "answer": "7",
        "info": {},
    }
    key = {"phase": phase, "step": step, "task": task["id"], "sample": 0, "attempt": 0}
    final = [message("user", "right")] if reward else [message("user", "wrong")]
    row = {
        "schema": 1,
        "key": key,
        "task": task,
        "stop": "done",
        "reward": reward,
        "rewards": {},
        "error": None,
        "final": final,
    }
    return (
        row
        | {
            "branches": {},
            "metrics": {},
            "template": "ab12",
            "wall_s": 0.12,
            "spans": spans,
            "turns": rows,
        }
        | more
    )


def metrics(rng: random.Random, steps: int) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl."""
    rows: list[dict[str, Any]] = []
    clock = 0.0
    for step in range(0, 200, 10):
        clock += 0.5
        rows.append(
            {
                "phase": "warmup",
                "step": step,
                "time_s": clock,
                "loss": 0.4 + 5 * math.exp(-step / 30),
                "lr": 4e-3,
            }
        )
        if step in (90, 190):
            rows[-1]["success"] = 0.1 if step < 100 else 0.24
    for mode, share, turns in (("sampled", 0.24, 2.1), ("greedy", 0.19, 2.0)):
        clock += 2
        ci = list(wilson(round(share * 256), 256))
        rows.append(
            {
                "phase": "eval",
                "step": 0,
                "time_s": clock,
                "name": "before",
                "mode": mode,
                "n": 256,
                "success": share,
                "ci": ci,
            }
        )
        rows[-1]["turns"] = turns
    for step in range(steps):
        share = 0.24 + 0.74 / (1 + math.exp(-(step - steps / 2) / (steps / 9)))
        clock += 0.9
        done = round(128 * min(1.0, share + rng.gauss(0, 0.03)))
        rows.append(
            {
                "phase": "train",
                "step": step,
                "time_s": clock,
                "reward": done / 128,
                "success": done / 128,
                "turns": 2 + share,
                "sampled_tokens": int(1500 + 300 * share + rng.gauss(0, 40)),
                "tokens_per_s": 2900 + rng.gauss(0, 100),
                "stops": {"done": done + (128 - done) // 2, "max_turns": (128 - done + 1) // 2},
                "entropy": 0.5 * (1.1 - share),
                "grad_norm": 0.4 + rng.random() * 0.3,
                "gradient_agreement": 0.9 - share + rng.gauss(0, 0.1),
                "clip_fraction": rng.random() * 0.01,
                "mismatch_max": 1e-5 + rng.random() * 3e-5,
                "trajectories_trained_share": 1.0 if share < 0.8 else 0.5,
                "rollout_s": 0.6,
                "train_s": 0.25,
                "lr": 1e-3 * (1 - step / steps),
                "untrained": {"no_signal": 40 + 10 * step},
            }
        )
    for mode, share, turns in (("sampled", 0.973, 3.0), ("greedy", 0.988, 3.0)):
        clock += 2
        ci = list(wilson(round(share * 256), 256))
        rows.append(
            {
                "phase": "eval",
                "step": steps,
                "time_s": clock,
                "name": "after",
                "mode": mode,
                "n": 256,
                "success": share,
                "ci": ci,
            }
        )
        rows[-1]["turns"] = turns
    return rows


def write_run(folder: Path, *, steps: int = 60, said: str = "") -> Path:
    """Make a run directory; `said` is put in place of everything that model, world and task say."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    resolved = load(None, ["--env.use", "hop", "--train.lr", "2e-3", "--env.args.note", "x"])
    config = to_json_dict(resolved) | {
        "versions": {"turnwright": "0.1.0", "torch": "2.13.0", "python": "3.11.2"}
    }
    config["config"]["env"][0]["args"]["note"] = said
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in metrics(rng, steps))
    )
    summary = {
        "success_before": 0.24,
        "success_after": 0.973,
        "greedy_before": 0.19,
        "greedy_after": 0.988,
        "single_turn_best": 0.1,
    }
    summary |= {
        "turns_before": 2.1,
        "turns_after": 3.0,
        "rl_steps": steps,
        "n_eval": 256,
        "wall_s": 93.2,
        "cpu_s": 51.0,
        "seed": 0,
    }
    summary |= {"machine": {"cpu": "2 x " + (said or "x86_64"), "memory": "8 GB"}}
    (folder / "summary.json").write_text(json.dumps(summary))
    lines = [
        trajectory(rng, phase="before", turns=2, reward=reward, said=said) for reward in (0.0, 1.0)
    ]
    for step in range(steps):
        lines += [
            trajectory(rng, step=step, turns=rng.choice((2, 3, 4)), reward=float(i % 2), said=said)
            for i in range(4)
        ]
    error = {
        "type": "ToolFailed",
        "message": said or "the table is gone",
        "phase": "step",
        "traceback": "Traceback ...\n  line 3",
    }
    lines.append(
        trajectory(rng, step=steps - 1, reward=None, stop="env_error", error=error, said=said)
    )
    (folder / "trajectories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    return folder


POLICIES = ("asker", "solver", "rival", "judge")
"""Two trained ones, earlier versions of the second, and a model on a server."""


def add_policies(run: Path, names: tuple[str, ...] = POLICIES) -> Path:
    """Give a run several policies: the turns of each episode are those of their
    agents, one after another."""
    asker, solver, rival, judge = names
    config = json.loads((run / "config.json").read_text())
    config["config"]["policy"] = [
        {"name": asker, "agents": [asker], "path": None, "urls": [], "past": {}, "trained": True},
        {
            "name": solver,
            "agents": ["solver-*"],
            "path": None,
            "urls": [],
            "past": {},
            "trained": True,
        },
        {
            "name": rival,
            "agents": [],
            "path": None,
            "urls": [],
            "past": {"of": solver, "every": 1},
            "trained": True,
        },
        {
            "name": judge,
            "agents": [],
            "path": None,
            "urls": ["http://x"],
            "past": {},
            "trained": True,
        },
    ]
    (run / "config.json").write_text(json.dumps(config))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        for number, name in enumerate((asker, solver) if row["phase"] == "train" else ()):
            row |= {
                f"policy/{name}/{key}": row[key] + number for key in ("reward", "entropy", "lr")
            }
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    agents = (asker, "solver-1", rival, judge)
    episodes = [json.loads(line) for line in (run / "trajectories.jsonl").read_text().splitlines()]
    for episode in episodes:
        for number, turn in enumerate(episode["turns"]):
            turn["agent"] = agents[number % 4]
            for index in turn["spans"]:
                episode["spans"][index]["agent"] = turn["agent"]
    (run / "trajectories.jsonl").write_text(
        "".join(json.dumps(episode) + "\n" for episode in episodes)
    )
    return run


def get(
    server: Any, path: str, host: str | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one request, whose host may be forged and whose path is sent as
    it is."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.putrequest("GET", path, skip_host=True, skip_accept_encoding=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.port}")
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), body


def get_json(server: Any, path: str, **query: Any) -> Any:
    """What a server answers to a request that it accepts."""
    status, _, body = get(server, f"{path}?{urlencode(query)}")
    assert status == 200, (status, body)
    return json.loads(body)


def read_whole(server: Any) -> None:
    """Wait until the indexes of all runs have read everything."""
    until = time.monotonic() + 60
    for run_id in server.session.runs():
        index = server.session.index(run_id)
        training = index.training
        while time.monotonic() < until:
            state = index.state()
            size = training.stat().st_size if training.is_file() else 0
            progress = index.progress()
            if progress["read"] == progress["size"] and state.trained_read == size:
                break
            time.sleep(0.01)
        else:
            raise AssertionError(f"the index of {run_id} did not get through the file")


class SentPage(HTMLParser):
    """A page that is one file: its elements, what stands in scripts, and the data in these."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts: list[str] = []
        self.packs: dict[str, Any] = {}
        self._inside = ""
        self.feed(text)
        self.data = json.loads(self.scripts[0])

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._inside = tag
        if tag == "script":
            self.scripts.append("")
            self._name = dict(attrs).get("id") or ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "script" and self._name.startswith("chunk-"):
            self.packs[self._name] = json.loads(gzip.decompress(b64decode(self.scripts[-1])))
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data

    @property
    def policy(self) -> str:
        """Its content security policy."""
        (policy,) = [value for name, value in self.attributes if value and "default-src" in value]
        return policy

    def episodes(self, run: int = 0) -> dict[str, Any]:
        """Episodes of a run by key."""
        found: dict[str, Any] = {}
        for name, pack in self.packs.items():
            if name.startswith(f"chunk-{run}-"):
                found |= pack["episodes"]
        return found

    def images(self) -> dict[str, str]:
        """Images by hash, as base64."""
        return {name: png for pack in self.packs.values() for name, png in pack["media"].items()}


def sent(paths: list[Path], out: Path, **options: Any) -> SentPage:
    """Write the page of runs as one file, and read it."""
    from turnwright_view.web import write_page

    write_page(paths, out, **options)
    return SentPage(out.read_text())
