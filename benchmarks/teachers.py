"""Does a teacher teach faster than rewards? Hop, from one warm-up per seed; the teacher
is the quickstart's end.

    python benchmarks/teachers.py                # seed 100 chooses the sizes of steps; seeds 0, 1, 2 are reported
    python benchmarks/teachers.py --sizes reward=64 teacher=16 --seeds 0

`cpu_to_90_*` are the CPU seconds of playing and training (evaluations left out) to the first
evaluation of 256 held-out tasks with 90% success: `*_reward` trains by rewards, `*_teacher` by
the teacher alone (reverse KL over the vocabulary, groups of one). `held_out_shuffled` trains on
the teacher's answers exchanged between ids. `hint_self` is a policy that teaches itself with
hints (the right answer of each task), from `hint_start`, and `hint_shuffled` with hints drawn
without regard to the task; `hint_error` is the standard error of each of the three.
`cross_tokenizer` is the success of a policy with another tokenizer than its teacher's.
`remote_gap` is the largest difference in nats between the answers of a model that
`turnwright serve` serves, in the formats of vLLM and SGLang, and of the same model in this
process, text with branches and images. Last line JSON.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import turnwright as tw  # noqa: E402

HERE = Path(__file__).resolve()
SIZES = (16, 32, 64, 128)
STEPS = {
    "reward": {16: 160, 32: 160, 64: 80, 128: 80},
    "teacher": {16: 40, 32: 40, 64: 40, 128: 40},
}
GOAL = 0.9
HINT_SAMPLES = 1024
"""Evaluation episodes of each of the eight words: a standard error of at most 0.6%."""
WARMUP = """\
[model]
heads = 4
kv_heads = 4

[[env]]
use = "hop"

[limits]
turns = 6
turn_tokens = 32

[warmup]
demos = 4000
steps = 500
gate_success = 0.22
gate_every = 50
gate_tasks = 256

[train]
steps = 0
"""
TRAIN = """\
[model]
path = "{model}"

[[env]]
use = "hop"

[limits]
turns = 6
turn_tokens = 32

[rollout]
groups = {groups}
group_size = {group_size}

[train]
steps = {steps}
batching = "rows"
lr = 2e-3
{more}

[eval]
greedy = false
every = {every}
"""
REWARD = "gradient_signal_steps = 20"
TEACHER = """\
reward_weight = 0.0

[[teacher]]
path = "{teacher}"
signal = "loss"
"""
WORDS = ("amber", "birch", "cedar", "dune", "ember", "fjord", "grove", "heath")
HINTED = """\
[[env]]
use = "{here}:Colors"
args.hints = {hints}

[limits]
turns = 1
turn_tokens = 8

[eval]
overlap = "allowed"
greedy = false
"""


class Colors(tw.Env):
    """Each word belongs to `yes` or `no`. With `hints`, a system message has the answer in half of
    the episodes; players follow it, and without it they guess."""

    def __init__(self, hints: bool = False) -> None:
        self._hints = hints
        self._answer: str | None = None

    def reset(self, task: tw.Task, *, seed: int | None = None) -> Any:
        """Ask for the side of a word."""
        self._answer = task.answer
        hinted = self._hints and random.Random(seed).random() < 0.5
        return (
            [{"role": "system", "content": task.answer}, *task.messages]
            if hinted
            else task.messages
        )

    def step(self, action: tw.Action) -> tw.Step:
        """Reward the right side."""
        return tw.Step(reward=float(action.text == self._answer), terminated=True)

    @classmethod
    def tasks(cls, split: str, n: int, seed: int) -> list[tw.Task]:
        """Return the words."""
        return [tw.Task(word, answer=answer_of(word), id=word) for word in WORDS]

    @classmethod
    def demonstrator(cls, messages: Sequence[Any], rng: random.Random) -> str:
        """Follow the hint, or guess."""
        return messages[0].text if messages[0].role == "system" else rng.choice(("yes", "no"))


def answer_of(word: str) -> str:
    """Return the side of a word."""
    return "yes" if WORDS.index(word) % 2 else "no"


def right_hint(trajectory: Any) -> list[dict[str, str]]:
    """Return the answer of the task."""
    return [{"role": "system", "content": answer_of(trajectory.task.id)}]


def other_hint(trajectory: Any) -> list[dict[str, str]]:
    """Return the answer of a task drawn by lot for each episode."""
    key = trajectory.key
    word = random.Random(f"{key.step}/{key.task}/{key.sample}").choice(WORDS)
    return [{"role": "system", "content": answer_of(word)}]


def play(words: Sequence[str], *, shuffled: bool = False) -> None:
    """Run `turnwright` here, with the teacher's answers exchanged between ids."""
    from turnwright.cli.main import main as turnwright

    if shuffled:
        exchange_answers()
    sys.exit(turnwright(list(words)))


def exchange_answers() -> None:
    """Give each id of a batch the teacher's answer for another one."""
    from dataclasses import replace

    import torch

    from turnwright.training.teachers.local import LocalTeacher

    scored, generator = LocalTeacher.score, torch.Generator().manual_seed(0)

    def score(self: Any, batch: Any) -> Any:
        found = scored(self, batch)
        order = torch.randperm(batch.size, generator=generator)
        return replace(
            found, logp_n=found.logp_n[order], targets=found.targets and found.targets.take(order)
        )

    LocalTeacher.score = score  # type: ignore[method-assign]


def train(folder: Path, name: str, recipe: str, *words: object, shuffled: bool = False) -> Path:
    """Train a recipe in a process of its own; return its directory."""
    file, out = folder / f"{name}.toml", folder / name
    file.write_text(recipe)
    command = [
        sys.executable,
        str(HERE),
        "--play",
        "shuffled" if shuffled else "plain",
        "--",
        "train",
        str(file),
    ]
    command += [*map(str, words), "--out", str(out), "--display", "none"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with status {done.returncode}: {done.stderr[-2000:]}"
        )
    return out


def summary(out: Path, key: str = "success_after") -> float:
    """Return a figure of a run."""
    return float(json.loads((out / "summary.json").read_text())[key])


def cpu_to_goal(out: Path) -> float | None:
    """Return the CPU seconds of the training steps before the first evaluation at the goal;
    None if there is none."""
    before, spent = 0.0, 0.0
    for line in (out / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["phase"] == "train":
            spent += row["cpu_s"] - before
        elif (
            row["phase"] == "eval"
            and row["mode"] == "sampled"
            and row["step"]
            and row["success"] >= GOAL
        ):
            return spent
        before = row["cpu_s"]
    return None


def arm(
    folder: Path,
    seed: int,
    kind: str,
    size: int,
    warm: Path,
    teacher: Path | None,
    *,
    shuffled: bool = False,
) -> Path:
    """Train one arm from the warm-up, with so many episodes per step."""
    group_size = 8 if kind == "reward" else 1
    recipe = TRAIN.format(
        model=warm,
        groups=size // group_size,
        group_size=group_size,
        steps=STEPS[kind][size],
        more=REWARD if kind == "reward" else TEACHER.format(teacher=teacher),
        every=2,
    )
    return train(
        folder,
        f"{kind}-{size}-{seed}{'-shuffled' * shuffled}",
        recipe,
        "--seed",
        seed,
        shuffled=shuffled,
    )


def starts(folder: Path, seed: int) -> tuple[Path, Path, dict[str, float]]:
    """Train the warm-up and the teacher of a seed; return their models and figures."""
    warm = train(folder, f"warm-{seed}", WARMUP, "--seed", seed)
    recipe = TRAIN.format(
        model=warm / "checkpoints" / "warmed",
        groups=16,
        group_size=8,
        steps=80,
        more=REWARD,
        every=0,
    )
    end = train(folder, f"quickstart-{seed}", recipe, "--seed", seed)
    figures = {
        "start": summary(warm),
        "held_out_of_teacher": summary(end),
        "cpu_of_teacher": summary(end, "cpu_s"),
    }
    return warm / "checkpoints" / "warmed", end / "checkpoints" / "step-00080", figures


def choose(folder: Path, seed: int) -> dict[str, int]:
    """Return the fastest size of each arm on a seed that is not reported."""
    warm, teacher, _ = starts(folder, seed)
    best = {}
    for kind in STEPS:
        times = {size: cpu_to_goal(arm(folder, seed, kind, size, warm, teacher)) for size in SIZES}
        reached = {size: time for size, time in times.items() if time is not None}
        print(json.dumps({"seed": seed, "arm": kind, "cpu_to_90": times}), flush=True)
        best[kind] = min(reached, key=reached.__getitem__)
    return best


def hints(folder: Path, seed: int) -> dict[str, float]:
    """Train a policy on its own answers with hints, and with those of other tasks."""
    recipe = (
        HINTED.format(here=HERE, hints="true")
        + "[warmup]\ndemos = 500\nsteps = 100\ngate_success = 0.0\n[train]\nsteps = 0\n"
    )
    warm = train(folder, f"hinted-{seed}", recipe, "--seed", seed)
    found = {}
    for name in ("right", "other"):
        recipe = f'[model]\npath = "{warm / "checkpoints" / "warmed"}"\n' + HINTED.format(
            here=HERE, hints="false"
        )
        recipe += (
            "[rollout]\ngroups = 8\ngroup_size = 8\n[train]\nsteps = 60\nreward_weight = "
            "0.0\nlr = 1e-3\n"
        )
        recipe += f'[[teacher]]\nself = true\nsignal = "loss"\nhint = "{HERE}:{name}_hint"\n'
        out = train(
            folder, f"{name}-{seed}", recipe, "--seed", seed, "--eval.samples", HINT_SAMPLES
        )
        found |= {"hint_start": summary(out, "success_before")} if name == "right" else {}
        found["hint_self" if name == "right" else "hint_shuffled"] = summary(out)
    worst = max(value * (1 - value) for value in found.values())
    return found | {"hint_error": math.sqrt(worst / (HINT_SAMPLES * len(WORDS)))}


def crossed(folder: Path, seed: int, teacher: Path) -> dict[str, float]:
    """Train a policy whose tokenizer knows the questions alone, by the probabilities of the
    teacher's chunks of text."""
    from turnwright.config import ModelConfig
    from turnwright.envs.builtin import Hop
    from turnwright.training import create_tiny_model

    texts = [task.messages[0].text for task in Hop.tasks("train", 300, seed)]
    model = create_tiny_model(
        ModelConfig(heads=4, kv_heads=4), texts, folder / f"other-{seed}", seed=seed
    )
    head, _, tail = WARMUP.partition("[[env]]")
    recipe = (
        head.replace("heads = 4\nkv_heads = 4", f'path = "{model}"')
        + "[[env]]"
        + tail.replace("= 32", "= 64")
        .replace("0.22", "0.0")
        .replace("gate_every = 50", "gate_every = 500")
    )
    more = (
        'batching = "rows"\nlr = 2e-3\nreward_weight = 0.0\n[rollout]\ngroups = '
        "128\ngroup_size = 1\n"
    )
    recipe = recipe.replace(
        "steps = 0\n",
        f'steps = 30\ngradient_signal_steps = 20\n{more}[[teacher]]\npath = "{teacher}"\n',
    )
    out = train(folder, f"crossed-{seed}", recipe, "--seed", seed)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    lost = [row["teacher.teacher.unaligned"] for row in rows if row["phase"] == "train"]
    found = {
        "cross_tokenizer_aligned": 1 - sum(lost) / len(lost),
        "cross_tokenizer_start": summary(out, "success_before"),
    }
    return found | {
        "cross_tokenizer": summary(out),
        "cpu_of_cross_tokenizer": summary(out, "cpu_s"),
    }


def measure(folder: Path, seed: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Return the figures of one seed."""
    warm, teacher, row = starts(folder, seed)
    by_reward = arm(folder, seed, "reward", sizes["reward"], warm, teacher)
    taught = arm(folder, seed, "teacher", sizes["teacher"], warm, teacher)
    shuffled = arm(folder, seed, "teacher", sizes["teacher"], warm, teacher, shuffled=True)
    row |= {
        "seed": seed,
        "cpu_to_90_reward": cpu_to_goal(by_reward),
        "cpu_to_90_teacher": cpu_to_goal(taught),
    }
    if row["cpu_to_90_reward"] and row["cpu_to_90_teacher"]:
        row["speed"] = row["cpu_to_90_reward"] / row["cpu_to_90_teacher"]
    row |= {
        "held_out_reward": summary(by_reward),
        "held_out_teacher": summary(taught),
        "held_out_shuffled": summary(shuffled),
    }
    return row | hints(folder, seed) | crossed(folder, seed, teacher)


def main() -> None:
    """Choose sizes, print every seed, then the means."""
    if sys.argv[1:2] == ["--play"]:
        play(sys.argv[4:], shuffled=sys.argv[2] == "shuffled")
    from kit.teachers import largest_gaps

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--choose", type=int, default=100, help="seed that chooses the sizes")
    parser.add_argument("--sizes", nargs="*", help="reward=N teacher=N, in place of choosing")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        gaps = {f"remote_gap_{kind}": nats for kind, nats in largest_gaps(folder).items()}
        gaps["remote_gap"] = max(gaps.values())
        print(json.dumps(gaps), flush=True)
        if given.sizes:
            sizes = {kind: int(size) for kind, size in (pair.split("=") for pair in given.sizes)}
        else:
            sizes = choose(folder, given.choose)
        rows = []
        for seed in given.seeds:
            rows.append(measure(folder, seed, sizes))
            print(json.dumps(rows[-1]), flush=True)
    keys = [
        key for key in rows[0] if key != "seed" and all(row.get(key) is not None for row in rows)
    ]
    means = {key: sum(row[key] for row in rows) / len(rows) for key in keys}
    print(json.dumps(means | gaps | {"episodes_per_step": sizes, "seeds": rows}))


if __name__ == "__main__":
    main()
