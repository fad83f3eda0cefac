"""Kill a training run at random instants, resume it each time, and hold it to a
run that was never stopped.

    python benchmarks/kill_resume.py --kills 10 [--mode one_step_off]
    python benchmarks/kill_resume.py --kills 20 --mode async    # every admitted group trained once, on turns sampled once
    python benchmarks/kill_resume.py --kills 10 --mode one_step_off --served    # the engine in a process that no kill meets
    python benchmarks/kill_resume.py --kills 20 --effects    # of an environment whose steps change files, with snapshots
    python benchmarks/kill_resume.py --tree 20    # outages, and kills of each process below the run, at random instants
    python benchmarks/kill_resume.py --phases 3    # environments' processes, so often in each phase and each mode

Compared are the ids that were trained, byte for byte and by (step, task, sample); the final
weights, bit for bit; the rows of metrics, but for times and what resuming counts; and the turns
of the journal that were sampled again (none). `lost_s` is the time from the last line of the
journal to each kill. With --effects, `books_equal` tells whether every step of every episode is
in its file once, and `steps_repeated` how often a step ran again that a kill had cut off from
its entry. Last line JSON.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECIPE = """\
[[env]]
use = "hop"

[limits]
turns = 4
turn_tokens = 8

[rollout]
groups = 6
group_size = 4

[warmup]
demos = 200
steps = 24
batch = 8
gate_success = 0.0
gate_loss = 2.2
gate_every = 8
gate_tasks = 24

[train]
steps = 16

[eval]
tasks = 24
every = 4

[checkpoint]
every = 3
"""
TIMES = {
    "time_s",
    "cpu_s",
    "train_s",
    "rollout_s",
    "tokens_per_s",
    "trained_tokens_per_s",
    "rollout_over_train",
    "seconds",
}
# Of a process, too.
TIMES |= {
    "peak_memory_mib",
    "cache_hit",
    "tool_seconds",
    "tools_offered",
    "resume",
}

FAILED = ("env_error", "tool_error", "reward_error", "engine_error", "timeout")
"""Stop reasons of episodes that are played again."""


@dataclass
class Outcome:
    """What a run that was killed and resumed came to, beside one that was not."""

    kills: list[str] = field(default_factory=list)
    """What each kill interrupted."""
    ids_equal: bool = False
    weights_equal: bool = False
    metrics_equal: bool = False
    trained: int = 0
    """Episodes that were trained on."""
    again: int = 0
    """Turns that the journal had and that were sampled again."""
    resumed: int = 0
    """Turns of interrupted episodes that were taken from the journal."""
    lost_s: list[float] = field(default_factory=list)
    """For each kill, seconds since the last line of the journal."""
    books_equal: bool = True
    """Of an environment with effects: whether the files that its steps wrote are those
    of the undisturbed run."""
    steps_repeated: int = 0
    """Of an environment with effects: steps that ran before a kill, without an entry in the
    journal, and again after it."""

    @property
    def good(self) -> bool:
        """Whether nothing differs, and nothing of the journal was sampled again."""
        return (
            self.ids_equal
            and self.weights_equal
            and self.metrics_equal
            and self.books_equal
            and not self.again
        )


def command(*words: str | Path) -> list[str]:
    """The command line of `turnwright train`."""
    return [
        sys.executable,
        "-m",
        "turnwright.cli.main",
        "train",
        *map(str, words),
        "--display",
        "none",
    ]


def environment() -> dict[str, str]:
    """Of the processes: this checkout, one thread."""
    return os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def start(words: Sequence[str], **outputs: Any) -> subprocess.Popen[Any]:
    """Start a command in a process of its own."""
    return subprocess.Popen(words, env=environment(), **outputs)


def finish(words: Sequence[str]) -> float:
    """Run a command to its end; the seconds that it took."""
    began = time.monotonic()
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(words)} ended with status {done.returncode}: {done.stderr[-2000:]}"
        )
    return time.monotonic() - began


def phase_of(run: Path) -> str:
    """What a run was doing last, by its files."""
    if any((run / "checkpoints").glob(".*")):
        return "writing a checkpoint"
    if not (run / "config.json").exists():
        return "before it began"
    last = last_event(run)
    if last is None:
        return "warm-up" if (run / "model").is_dir() else "making the model"
    name = str(last["k"][0]) if "k" in last else str(last["e"])
    return {
        "gate": "warm-up",
        "train": "rollout",
        "trained": "after a step",
        "resumed": "set-up",
    }.get(name, name)


def kill_when(words: Sequence[str], run: Path, instant: str | float) -> str | None:
    """Start a command and kill it: so many seconds after the journal grew, or the moment that
    `phase_of` says `instant`.

    "checkpoint" is the moment that one is being written, "mid-episode" the one that several
    episodes have a turn and no end.

    Returns:
        What was interrupted; None when the run had ended before.
    """
    before, grown = size(run), 0.0
    process = start(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        # While it is looked at: on a busy machine it would be over before.
        process.send_signal(signal.SIGSTOP)
        now = time.monotonic()
        grown = grown or (now if size(run) > before else 0.0)
        if instant == "checkpoint":
            there = any((run / "checkpoints").glob(".*.writing"))
        elif instant == "mid-episode":
            there = bool(grown) and mid_episode(run) >= 4
        elif isinstance(instant, str):
            there = (bool(grown) or instant == "warm-up") and instant in phase_of(run)
        else:
            there = now >= grown + instant if grown else False
        if there:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return phase_of(run)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.0005 if instant == "checkpoint" else 0.003)
    return None


def mid_episode(run: Path) -> int:
    """How many episodes of training are in the journal with a turn and without an end."""
    turns: dict[tuple[Any, ...], int] = {}
    for event in events(run):
        if "k" in event and event["k"][0] == "train":
            if event["e"] in ("opened", "closed"):
                turns.pop(tuple(event["k"]), None)
            elif event["e"] == "turn":
                turns[tuple(event["k"])] = 1
    return len(turns)


def size(run: Path) -> int:
    """Bytes of the journal."""
    journal = run / "journal.jsonl"
    return journal.stat().st_size if journal.exists() else 0


def last_event(run: Path) -> dict[str, Any] | None:
    """The journal's last whole line; none before there is one."""
    lines = (run / "journal.jsonl").read_bytes().rsplit(b"\n", 2) if size(run) else []
    return json.loads(lines[-2]) if len(lines) > 1 else None


def events(run: Path) -> list[dict[str, Any]]:
    """The journal's whole lines."""
    lines = (
        (run / "journal.jsonl").read_bytes().split(b"\n")
        if (run / "journal.jsonl").exists()
        else [b""]
    )
    return [json.loads(line) for line in lines[:-1]]


def trained(run: Path) -> dict[tuple[int, str, int], list[list[Any]]]:
    """(step, task, sample) -> the spans that were trained, from the journal."""
    open_now: dict[tuple[Any, ...], list[list[Any]]] = {}
    closed: dict[tuple[Any, ...], list[list[Any]]] = {}
    steps, failed = set(), {}
    for event in events(run):
        if event["e"] == "trained":
            steps.add(event["step"])
        if "k" not in event or event["k"][0] != "train":
            continue
        key = tuple(event["k"])
        if event["e"] == "opened":
            open_now[key] = []
        for span in event.get("spans", ()):
            open_now[key].append(
                [span["origin"], span["ids"], span.get("logprobs"), span.get("version")]
            )
        if event["e"] == "closed":
            if key in closed and not failed[key]:
                raise SystemExit(f"the journal closes {key} twice")
            failed[key] = event["stop"] in FAILED
            closed[key] = open_now.pop(key)
    return {(key[1], key[2], key[3]): spans for key, spans in closed.items() if key[1] in steps}


def sampled_again(run: Path) -> tuple[int, int]:
    """Turns of the journal that were sampled again, and turns that were taken from it."""
    again, resumed, seen = 0, 0, set()
    for event in events(run):
        if event["e"] == "turn" and "resumed" in event:
            resumed += 1
        elif event["e"] == "turn":
            name = *event["k"], event["seed"]
            again += name in seen
            seen.add(name)
    return again, resumed


def metrics(run: Path) -> list[dict[str, Any]]:
    """Rows of metrics without times, in a fixed order."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return sorted(
        ({k: v for k, v in row.items() if k not in TIMES} for row in rows), key=json.dumps
    )


def weights(run: Path) -> bytes:
    """The last checkpoint's weights."""
    last = max((run / "checkpoints").glob("step-*"))
    return (last / "model.safetensors").read_bytes()


NAMED = ("warm-up", "checkpoint", "eval-before", "rollout", "checkpoint")
"""Where kills are aimed at, in this order; the others come at random."""


def instants(kills: int, seconds: float, rng: random.Random) -> Iterator[str | float]:
    """When to kill."""
    yield from NAMED[:kills]
    for _ in range(kills - len(NAMED)):
        yield rng.uniform(0.0, seconds)


def kill_and_resume(
    file: Path,
    war: Path,
    kills: Sequence[str | float],
    outcome: Outcome | Stream,
    given: Sequence[str] = (),
) -> None:
    """Kill and resume the run of a recipe, with overrides `given`, then let it end."""
    begin = command(file, "--out", war, *given)
    for instant in kills:
        begun = (war / "config.json").exists()
        words = command("--resume", war) if begun else begin
        if (found := kill_when(words, war, instant)) is None:
            break
        outcome.kills.append(found)
        journal = war / "journal.jsonl"
        outcome.lost_s.append(
            round(time.time() - journal.stat().st_mtime, 3) if journal.exists() else 0.0
        )
    finish(command("--resume", war) if (war / "config.json").exists() else begin)


@contextmanager
def serving(model: Path | None) -> Iterator[list[str]]:
    """Serve a model in a process of its own; yield the overrides of a run that samples there,
    none without a model."""
    if model is None:
        yield []
        return
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
    with start(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[0]
            given = ["--model.path", str(model), "--warmup.demos", "0"]
            yield [*given, "--engine.kind", "auto", "--engine.urls", json.dumps([url])]
        finally:
            server.terminate()


def warmed(folder: Path, recipe: str) -> Path:
    """Return the model of a recipe after its warm-up."""
    file, out = folder / "warm.toml", folder / "warm"
    file.write_text(recipe)
    finish(command(file, "--out", out, "--train.steps", "1", "--checkpoint.keep", "99"))
    return out / "checkpoints" / "warmed"


def compare(
    folder: Path, kills: Sequence[str | float], recipe: str = RECIPE, model: Path | None = None
) -> Outcome:
    """Run once in peace and once with kills, and compare; with a `model`, each
    with a server of its own."""
    file = folder / "recipe.toml"
    file.write_text(recipe)
    peace, war = folder / "peace", folder / "war"
    (folder / "ledger.py").write_text(LEDGER)
    os.environ["BOOKS"] = str(folder / "books-peace")
    with serving(model) as given:
        finish(command(file, "--out", peace, *given))
    os.environ["BOOKS"] = str(folder / "books-war")
    outcome = Outcome()
    with serving(model) as given:
        kill_and_resume(file, war, kills, outcome, given)
    ours, theirs = trained(war), trained(peace)
    outcome.ids_equal, outcome.trained = ours == theirs and bool(ours), len(ours)
    outcome.weights_equal = weights(war) == weights(peace)
    outcome.metrics_equal = metrics(war) == metrics(peace)
    outcome.again, outcome.resumed = sampled_again(war)
    (ours_b, executed), (theirs_b, once) = (
        books(folder / "books-war"),
        books(folder / "books-peace"),
    )
    outcome.books_equal, outcome.steps_repeated = ours_b == theirs_b, executed - once
    return outcome


def with_schedule(recipe: str, mode: str, **more: object) -> str:
    """Return a recipe in another `schedule.mode`, with more keys of that table."""
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in more.items())
    corrected = recipe.replace("[train]\n", '[train]\ncorrection = "tis"\n')
    return f'{corrected}\n[schedule]\nmode = "{mode}"\n{lines}'


@dataclass
class Stream:
    """What an asynchronous run that was killed and resumed came to."""

    kills: list[str] = field(default_factory=list)
    groups_lost: int = 0
    """Groups that were admitted and not trained, or trained twice."""
    lags: dict[int, int] = field(default_factory=dict)
    """Trained tokens by lag."""
    again: int = 0
    """Turns that the journal had and that were sampled again."""
    resumed: int = 0
    lost_s: list[float] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether every group was trained once, on turns that were sampled once, by
        policies that there were."""
        return not self.groups_lost and not self.again and min(self.lags) >= 0


def besiege_stream(folder: Path, kills: Sequence[str | float], recipe: str) -> Stream:
    """Kill and resume an asynchronous run, and account for every group that was admitted."""
    file, war, stream = folder / "recipe.toml", folder / "war", Stream()
    file.write_text(recipe)
    kill_and_resume(file, war, kills, stream)
    warmed = json.loads((war / "summary.json").read_text())["warmup_steps"]
    admitted: Counter[int] = Counter()
    batches: dict[int, tuple[list[int], set[tuple[int, str]]]] = {}
    opened: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    spans: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for event in events(war):
        if event["e"] == "admitted":
            admitted[event["group"]] += 1
        elif event["e"] == "batch":
            groups, keys = event["groups"], {(step, task) for step, task in event["keys"]}
            stream.groups_lost += event["step"] in batches
            batches[event["step"]] = groups, keys
        elif "k" in event and event["k"][0] == "train":
            key = tuple(event["k"])
            if event["e"] == "opened":
                opened[key] = []
            opened[key] += event.get("spans", ())
            if event["e"] == "closed":
                spans.setdefault((key[1], key[2]), []).extend(opened.pop(key))
    taken = Counter(group for groups, _ in batches.values() for group in groups)
    stream.groups_lost += sum(((taken - admitted) + (admitted - taken)).values())
    lags: Counter[int] = Counter()
    for step, (_, keys) in batches.items():
        for key in keys:
            for span in spans[key]:
                if span["origin"] == "model":
                    lags[step + warmed - span["version"]] += len(span["ids"])
    stream.lags = dict(sorted(lags.items()))
    stream.again, stream.resumed = sampled_again(war)
    return stream


def books(folder: Path) -> tuple[dict[str, str], int]:
    """The files of `Ledger`, and how many steps were executed."""
    if not folder.exists():
        return {}, 0
    files = {path.name: path.read_text() for path in folder.iterdir() if path.name != "executed"}
    return files, len((folder / "executed").read_text().splitlines())


LEDGER = '''
"""A world whose steps write into a file that outlasts the run; its snapshots take lines back."""

import os
import time
from pathlib import Path

import turnwright as tw


class Ledger(tw.Env):
    def reset(self, task, *, seed=None):
        self.folder = Path(os.environ["BOOKS"])
        self.folder.mkdir(exist_ok=True)
        self.book = self.folder / f"{task.id}-{seed}"
        self.book.write_text("")
        self.left = 2 + int(task.answer) % 3
        return f"Say {task.answer}."

    def step(self, action):
        time.sleep(0.002)
        lines = self.book.read_text().splitlines()
        with self.book.open("a") as book, (self.folder / "executed").open("a") as executed:
            executed.write(f"{self.book.name} {len(lines)}\\n")
            book.write(f"{len(lines)} {len(action.raw)}\\n")
        time.sleep(0.002)
        return tw.Step(f"{len(lines)} so far", terminated=len(lines) + 1 >= self.left)

    def reward(self, trajectory):
        return sum(sum(span.ids) for span in trajectory.spans if span.sampled) % 5 / 4

    def snapshot(self):
        return {"lines": self.book.read_text()}

    def restore(self, state):
        self.book.write_text(state["lines"])

    @staticmethod
    def tasks(split, n, seed):
        return [tw.Task(f"{split} {i}", id=f"{split}{i}", answer=str(i)) for i in range(n)]
'''
EFFECTS = RECIPE[: RECIPE.index("[warmup]")] + RECIPE[RECIPE.index("[train]") :]
EFFECTS = EFFECTS.replace('use = "hop"', 'use = "ledger.py:Ledger"\neffects = true').replace(
    "turn_tokens = 8", 'turn_tokens = 8\non_turn_length = "continue"'
)


WORLD = '''
"""Two worlds that are out of reach while a file exists: one with processes of its own, one whose rewards have them."""

import time
from pathlib import Path

import turnwright as tw

DOWN = Path(__file__).with_name("down")


class Apart(tw.Env):
    def reset(self, task, *, seed=None):
        self.reach()
        self.left = 1 + int(task.answer) % 3
        return f"Say {task.answer}."

    def reach(self):
        time.sleep(0.01)
        if DOWN.exists():
            raise ConnectionError("no route to the world")

    def step(self, action):
        self.reach()
        self.left -= 1
        return tw.Step(f"{len(action.raw)}, go on", terminated=self.left == 0)

    def reward(self, trajectory):
        self.reach()
        return sum(sum(span.ids) for span in trajectory.spans if span.sampled) % 5 / 4

    @staticmethod
    def tasks(split, n, seed):
        return [tw.Task(f"{split} {i}", id=f"{split}{i}", answer=str(i)) for i in range(n)]


class Scored(Apart):
    pass
'''  # noqa: E501
TREE = """\
[model]
hidden = 32
layers = 1
[[env]]
use = "world.py:Apart"
isolation = "process"
retries.wait_s = 0.05
[[env]]
use = "world.py:Scored"
reward_isolation = "process"
retries.wait_s = 0.05
[limits]
turns = 3
turn_tokens = 6
on_turn_length = "continue"
[rollout]
groups = 4
group_size = 4
concurrency = 8
max_failed = 0.0
[warmup]
demos = 0
[train]
steps = 12
[eval]
tasks = 4
every = 6
[checkpoint]
every = 3
"""
KINDS = ("run", "forks environments", "environment", "outage", "any")


@dataclass
class Siege:
    """What a run that was disturbed came to, beside one that was not."""

    disturbed: list[str] = field(default_factory=list)
    """What was done, in order."""
    resumes: int = 0
    ended: bool = False
    ids_equal: bool = False
    weights_equal: bool = False
    trained: int = 0
    failed_plays: int = 0
    """Plays of episodes that failed, and were played again."""

    @property
    def good(self) -> bool:
        """Whether it came to the end that it would have come to undisturbed."""
        return self.ended and self.ids_equal and self.weights_equal


def below(root: int) -> dict[int, str]:
    """The processes of a run, itself included, and what each is."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found = {root: "run"}
    for pid in parents.get(root, []):
        try:
            forks = b"isolation.forking" in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        found[pid] = "forks environments" if forks else "other"
        found |= dict.fromkeys(parents.get(pid, []), "environment" if forks else "other")
    return found


def disturb(root: int, kind: str, down: Path, rng: random.Random) -> str:
    """Disturb the run of this process id by an outage of its world or a kill; what it was, empty
    where there was nothing."""
    if kind == "outage":
        down.touch()
        time.sleep(rng.uniform(0.02, 0.6))
        down.unlink()
        return "outage"
    living = below(root)
    among = sorted(pid for pid, what in living.items() if kind in ("any", what))
    if not among:
        return ""
    pid = rng.choice(among)
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return ""
    return f"kill: {living[pid]}"


def besiege(folder: Path, count: int, rng: random.Random, recipe: str = TREE) -> Siege:
    """Run once in peace and once with outages and kills, and compare."""
    (folder / "world.py").write_text(WORLD)
    file, peace, war = folder / "tree.toml", folder / "peace", folder / "war"
    file.write_text(recipe)
    seconds = finish(command(file, "--out", peace))
    siege, kinds = Siege(), [KINDS[number % len(KINDS)] for number in range(count)]
    rng.shuffle(kinds)
    for _ in range(4 * count):
        begun = (war / "config.json").exists()
        words = command("--resume", war) if begun else command(file, "--out", war)
        before = size(war)
        with (folder / "said").open("wb") as said:
            process = start(words, stdout=said, stderr=said)
            siege.resumes += begun
            while process.poll() is None:
                if kinds and size(war) > before:
                    time.sleep(rng.uniform(0.0, min(1.0, seconds / 8)))
                    if process.poll() is None and (
                        what := disturb(process.pid, kinds[-1], folder / "down", rng)
                    ):
                        kinds.pop()
                        siege.disturbed.append(what)
                time.sleep(0.003)
        if process.returncode == 0:
            siege.ended = True
            break
        text = (folder / "said").read_text()
        if process.returncode != -signal.SIGKILL and "which retries them" not in text:
            raise SystemExit(f"the run ended with status {process.returncode}: {text[-2000:]}")
    ours, theirs = trained(war), trained(peace)
    siege.ids_equal, siege.trained = ours == theirs and bool(ours), len(ours)
    siege.weights_equal = siege.ended and weights(war) == weights(peace)
    closed = [tuple(event["k"]) for event in events(war) if event["e"] == "closed"]
    siege.failed_plays = len(closed) - len(set(closed))
    return siege


PHASES = ("demonstrations", "gate", "evaluation", "training")
SLOW = '''
"""A world whose processes are met by a kill while they work."""

import asyncio

from turnwright.envs.builtin.hop import Hop


class Slow(Hop):
    async def step(self, action):
        await asyncio.sleep(0.02)
        return await super().step(action)
'''
DEATHS = """\
[model]
hidden = 32
layers = 1
[[env]]
use = "slow.py:Slow"
isolation = "process"
retries.wait_s = 0.05
[limits]
turns = 4
turn_tokens = 8
[rollout]
groups = 4
group_size = 4
max_failed = 0.0
[warmup]
demos = 120
steps = 12
batch = 8
gate_success = 0.0
gate_every = 4
gate_tasks = 32
[train]
steps = 6
[eval]
tasks = 16
every = 3
"""


@dataclass
class Deaths:
    """What a run came to whose environments' processes were killed in one phase, beside one
    that was not disturbed."""

    mode: str
    phase: str
    kills: int = 0
    ended: bool = False
    failed_plays: int = 0
    warmup_equal: bool = False
    ids_equal: bool = False
    weights_equal: bool = False
    accepted: int = 0
    """Episodes whose failure counted."""

    @property
    def good(self) -> bool:
        """Whether the run was disturbed and came out as if it had not been.

        With staleness, two undisturbed runs differ too, by which episodes ended first: of them, no
        episode may be missing.
        """
        equal = self.warmup_equal and (
            self.mode == "async" or (self.ids_equal and self.weights_equal)
        )
        return bool(self.failed_plays) and self.ended and equal and not self.accepted


def playing_now(run: Path) -> str:
    """What kind of episodes a run plays, by the journal's last one."""
    if not (run / "model").is_dir():
        return ""
    keyed = [event["k"][0] for event in events(run) if "k" in event]
    if not keyed:
        return "demonstrations"
    return {"gate": "gate", "gate-again": "gate", "train": "training"}.get(keyed[-1], "evaluation")


def warmup_losses(run: Path) -> list[float]:
    """The losses of the warm-up's steps."""
    return [row["loss"] for row in metrics(run) if row["phase"] == "warmup"]


def kill_environments(root: int) -> int:
    """Kill the processes of a run's environments, those that wait for an episode
    too; return how many."""
    killed = 0
    for pid in [pid for pid, what in below(root).items() if what == "environment"]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed += 1
    return killed


def kill_in_phase(
    folder: Path, mode: str, phase: str, count: int, peace: Path, rng: random.Random
) -> Deaths:
    """Kill processes of environments while a run is in a phase, and compare."""
    deaths, war, rounds = Deaths(mode, phase), folder / f"{mode}-{phase}", 0
    with (folder / "said").open("wb") as said:
        process = start(command(folder / f"{mode}.toml", "--out", war), stdout=said, stderr=said)
        while process.poll() is None:
            if rounds < count and playing_now(war) == phase:
                time.sleep(rng.uniform(0.0, 0.05))
                killed = kill_environments(process.pid)
                rounds += killed > 0
                deaths.kills += killed
            time.sleep(0.001)

    deaths.ended = process.returncode == 0
    if not deaths.ended:
        print((folder / "said").read_text()[-1000:], file=sys.stderr)
        return deaths
    deaths.failed_plays = json.loads((war / "summary.json").read_text()).get("failed_plays", 0)
    deaths.warmup_equal = warmup_losses(war) == warmup_losses(peace)
    deaths.ids_equal, deaths.weights_equal = (
        trained(war) == trained(peace),
        weights(war) == weights(peace),
    )
    deaths.accepted = sum(len(event["failed"]) for event in events(war) if event["e"] == "accepted")
    return deaths


def besiege_phases(folder: Path, count: int, rng: random.Random) -> list[Deaths]:
    """Kill in each phase of a run in each mode."""
    recipes = {
        "sync": DEATHS,
        "one_step_off": with_schedule(DEATHS, "one_step_off"),
        "async at staleness 0": with_schedule(DEATHS, "async", staleness=0),
        "async": with_schedule(DEATHS, "async"),
    }
    (folder / "slow.py").write_text(SLOW)
    found = []
    for mode, recipe in recipes.items():
        (folder / f"{mode}.toml").write_text(recipe)
        peace = folder / f"{mode}-peace"
        finish(command(folder / f"{mode}.toml", "--out", peace))
        for phase in PHASES:
            found.append(kill_in_phase(folder, mode, phase, count, peace, rng))
            print(json.dumps(vars(found[-1])), flush=True)
    return found


def main() -> None:
    """Kill, resume, compare, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--effects", action="store_true", help="an environment whose steps change files"
    )
    parser.add_argument(
        "--tree", type=int, default=0, help="this many outages and kills of processes below the run"
    )
    parser.add_argument(
        "--phases",
        type=int,
        default=0,
        help="kill all environments' processes so often in each phase",
    )
    parser.add_argument(
        "--mode",
        choices=("sync", "one_step_off", "async", "hold"),
        default="sync",
        help="schedule.mode",
    )
    parser.add_argument(
        "--served",
        action="store_true",
        help="sample by `turnwright serve`, in a process that is not killed",
    )
    args = parser.parse_args()
    if args.phases:
        with tempfile.TemporaryDirectory() as name:
            found = besiege_phases(Path(name), args.phases, random.Random(args.seed))
        good = sum(one.good for one in found)
        print(
            json.dumps({"runs": len(found), "good": good, "kills": sum(one.kills for one in found)})
        )
        sys.exit(0 if good == len(found) else 1)
    if args.mode in ("async", "hold"):
        with tempfile.TemporaryDirectory() as name:
            recipe = with_schedule(RECIPE, "async", hold=args.mode == "hold")
            stream = besiege_stream(
                Path(name), list(instants(args.kills, 0.9, random.Random(args.seed))), recipe
            )
        for number, what in enumerate(stream.kills, 1):
            print(f"kill {number}: {what}")
        print(json.dumps(vars(stream) | {"kills": len(stream.kills), "good": stream.good}))
        sys.exit(0 if stream.good else 1)
    if args.tree:
        with tempfile.TemporaryDirectory() as name:
            siege = besiege(Path(name), args.tree, random.Random(args.seed))
        for number, what in enumerate(siege.disturbed, 1):
            print(f"{number}: {what}")
        print(json.dumps(vars(siege) | {"disturbed": len(siege.disturbed), "good": siege.good}))
        sys.exit(0 if siege.good else 1)
    with tempfile.TemporaryDirectory() as name:
        rng = random.Random(args.seed)
        kills = list(instants(args.kills, 0.9, rng))
        if args.effects or args.served:  # there is no warm-up
            kills = [rng.uniform(0.0, 0.9) for _ in range(args.kills)]
        recipe = EFFECTS if args.effects else RECIPE
        model = warmed(Path(name), recipe) if args.served else None
        outcome = compare(
            Path(name),
            kills,
            recipe if args.mode == "sync" else with_schedule(recipe, args.mode),
            model,
        )
    for number, what in enumerate(outcome.kills, 1):
        print(f"kill {number}: {what}")
    print(
        f"episodes trained: {outcome.trained}; turns resumed: {outcome.resumed}, sampled again: "
        f"{outcome.again}"
    )
    print(json.dumps(vars(outcome) | {"kills": len(outcome.kills), "good": outcome.good}))
    sys.exit(0 if outcome.good else 1)


if __name__ == "__main__":
    main()
