"""Prove that two checkouts train alike, bit for bit: record runs with each, then compare everything
that has to be the same.

    Y=tests/tools/yardstick.py
    python $Y record OUT [--checkout DIR] [--python PY] [--full] [--only NAME ...]
    python $Y compare A B
    python $Y sides BASE HEAD [--out DIR] [--full] [--only NAME ...] [--artefacts]
    python $Y artefacts RUN [--checkout DIR] [--base DIR]

`record` runs `python -m turnwright train` in a checkout with that checkout's interpreter, one
thread and a fixed seed, so it imports no module of it: five steps per recipe, or the recipes' own
lengths with --full. The package may have its name of before. `compare A B` takes two recordings or
two runs, the older first. It ends with status 0 and one line of JSON, which counts the exceptions
used; or with status 1 and the first difference: run, file, record, field, both values. `sides`
records and compares both checkouts. `artefacts` checks that a checkout replays, views, evaluates,
exports and resumes a copy of a run recorded by another one; with --base, that both checkouts print
the same evaluation and export the same rows.

Compared: journal, trajectories, per-token records, metrics, summary, config, checkpoints and model
directories (tensors by name, dtype, shape and bytes), media. Renamed settings and metrics go
through the tables below. Not compared: clocks, memory, versions, machine, paths, texts of failures,
the state of torch's generator (a run does not seed it), report.html.

Episodes run concurrently, so the order of lines in journal.jsonl and trajectories.jsonl differs
between two runs of one checkout. Events are therefore compared per episode, in the order of that
episode; trajectories by key; `trained` events in order, each with the number of episodes closed
before it. Two things depend on the order and are left out: how many ids of a turn came from the
engine's cache (of `cache_hit`, whether there were any is compared), and which episode of a step is
the first to show a cause in sanity.jsonl (cause, phase and step are compared).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

Recording = dict[str, dict[str, Any]]
"""File to record to value, of one run."""

ROOT = Path(__file__).resolve().parents[2]
ALWAYS = "--display none --seed 0 --model.device cpu --rollout.sanity-share 0.5"
"""The share had another default before; half of the episodes, so that it is
seen which are chosen."""
SHORT = (
    "--warmup.demos 600 --warmup.gate-tasks 16 --warmup.gate-success 0 --train.steps 5 "
    "--rollout.groups 8 --rollout.group-size 8 --eval.tasks 16 --eval.every 2 --checkpoint.every 2"
)
RECIPES = {
    "quickstart": 60,
    "quickstart_vlm": 50,
    "frozen_lake": 30,
    "json_tools": 60,
    "hinted_math": 80,
}
"""Warm-up steps of the short form: enough for some rewards, so that something is learned."""

NAMES = {
    # Settings in the journal.
    "wall_clock": "wall_clock_s",
    "max_asks_per_turn": "max_resamples_per_turn",
    "rejected": "rejected_replies",
    # Counters of the render check.
    "template_checks": "render_checks",
}
"""Names in records before issue 53 -> after it."""
PREFIXES = {
    "template_breaks_": "render_mismatch_",
    "template_check_failed_": "render_check_failed_",
}
VALUES = {"ask_again": "resample"}
UNSET = {"micro_tokens": 4096}
"""What settings of None come to in the recipes; their default was this number before issue 54."""
RETRIES = {
    "max_env_retries_per_turn": "turn",
    "max_engine_retries_per_turn": "engine",
    "max_reward_retries": "reward",
    "max_env_retries": "episode",
    "max_engine_retries": "episode",
    "retry_wait_s": "wait_s",
}
DROPPED = "sanity_every", "selection"
"""Keys that went in issue 55; the recipes have their defaults."""
PACKAGES = "turnwright", "turnwise"
"""The package's name, and the one before issue 53."""
CLOCK = re.compile(r".*_s|seconds|tool_seconds|rollout_over_train|peak_(gpu_)?memory_mib|crc|time")
"""Fields whose value depends on the clock or the machine; the checksum of a journal
line covers its clocks."""
HIDDEN = "(not compared)"
GONE = "(missing)"


class Exemption(NamedTuple):
    """A deliberate difference: a field that only the newer recording has."""

    name: str
    file: str
    field: str
    """A pattern, as the file is; indices are `[]`."""


EXEMPTIONS: tuple[Exemption, ...] = (
    Exemption("alternatives", r"config\.json", r"(config|origins) rollout\.alternatives"),
)


class Failed(Exception):
    """A check that did not pass; the text says which."""


# Loading: a run directory as records without clocks.


def hide(value: Any) -> Any:
    """Replace numbers and texts, and keep the structure."""
    if isinstance(value, dict):
        return {name: hide(one) for name, one in value.items()}
    return [hide(one) for one in value] if isinstance(value, list) else HIDDEN


def strip(value: Any) -> Any:
    """Hide clocks and texts of failures; drop `cached`, which depends on which of two
    waiting calls came first."""
    if isinstance(value, list):
        return [strip(one) for one in value]
    if not isinstance(value, dict):
        return value
    found = {
        name: hide(one) if CLOCK.fullmatch(name) else strip(one)
        for name, one in value.items()
        if name != "cached"
    }
    if {"type", "message", "traceback"} <= found.keys():
        found |= {name: HIDDEN for name in ("message", "traceback", "place") if name in found}
    return found


def renamed(value: Any) -> Any:
    """A record under present names."""
    if isinstance(value, list):
        return [renamed(one) for one in value]
    if isinstance(value, dict):
        present = {
            present_name(name): UNSET.get(name) if one is None else renamed(one)
            for name, one in value.items()
        }
        return with_retries({name: one for name, one in present.items() if name not in DROPPED})
    return (
        VALUES.get(value, value.replace(PACKAGES[1], PACKAGES[0]))
        if isinstance(value, str)
        else value
    )


def with_retries(rules: dict[str, Any]) -> dict[str, Any]:
    """Rules with their table of retries, which were keys of the environment before issue 55."""
    if not RETRIES.keys() <= rules.keys():
        return rules
    rest = {name: one for name, one in rules.items() if name not in RETRIES}
    return rest | {"retries": {key: rules[name] for name, key in RETRIES.items()}}


def present_name(name: str) -> str:
    prefix = next(filter(name.startswith, PREFIXES), "")
    name = PREFIXES[prefix] + name.removeprefix(prefix) if prefix else NAMES.get(name, name)
    return name.replace(PACKAGES[1], PACKAGES[0])


def rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [renamed(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def episode_name(key: list[Any]) -> str:
    return "/".join(str(part) for part in key)


def journal(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Events by episode and number; `settings` and `tools` stand in the events that name them."""
    named: dict[str, Any] = {}
    counts: Counter[str] = Counter()
    found: dict[str, Any] = {}
    for event in events:
        if event["e"] in ("settings", "tools"):
            # Written when first used: after which episode is chance.
            named[event["name"]] = event["value"]
            if isinstance(event["value"], dict):
                event["value"].pop("v", None)  # the version of the records
            continue
        plain = strip(event)
        for answer in plain.get("answers", ()):
            answer[3] = HIDDEN  # seconds of the environment
        if "settings" in event:
            plain["settings"] = named[event["settings"]]
        if "tools" in event:
            plain["tools"] = named[event["tools"]]
        if event["e"] in ("trained", "accepted", "resumed"):
            plain["closed"] = counts["closed"]
        counts["closed"] += event["e"] == "closed"
        episode = episode_name(event["k"]) if "k" in event else "run"
        found[f"{episode} event {counts[episode]}"] = plain
        counts[episode] += 1
    return dict(sorted(found.items()))


def metrics_row(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value > 0 if name == "cache_hit" else value for name, value in strip(row).items()}


def config_rows(data: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Settings and their origins by key; the hashes of template, tokenizer and their settings."""
    for key, origin in data["origins"].items():  # has every key
        section, _, name = key.rpartition(".")
        if name in DROPPED:
            continue
        key = f"{section}.retries.{RETRIES[name]}" if name in RETRIES else key
        value = data["config"]
        for part in key.split("."):
            value = value[int(part)] if isinstance(value, list) else value[part]
        yield f"config {key}", HIDDEN if key == "out" else without_paths(value)
        yield f"origins {key}", without_paths(origin)
    yield (
        "rest",
        without_paths(
            {
                name: value
                for name, value in data.items()
                if name not in ("config", "origins", "versions")
            }
        ),
    )


def without_paths(value: Any) -> Any:
    """Absolute paths by their last part."""
    return json.loads(re.sub(r'"/[^"]*/', '"', json.dumps(value)))


def tensors(path: Path) -> dict[str, Any]:
    """Tensors by name, with their bytes."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    found: dict[str, Any] = {}
    for name, head in json.loads(data[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + size + offset for offset in head["data_offsets"])
        seeded = not name.startswith("rng.")  # a run does not seed torch's generator
        found[name] = {
            "dtype": head["dtype"],
            "shape": head["shape"],
            "data": data[begin:end] if seeded else b"",
        }
    return found


def model_file(path: Path) -> Any:
    """A file of a checkpoint or a model directory."""
    if path.suffix == ".safetensors":
        return tensors(path)
    if path.suffix != ".json":
        return sha256(path.read_bytes()).hexdigest()
    data = json.loads(path.read_text(encoding="utf-8"))
    if path.name == "state.json":
        # Contents are compared themselves; the journal's length and checksum cover its clocks.
        data["cursor"]["journal"] = HIDDEN
        data |= {"files": sorted(data["files"])} if "files" in data else {}
    return {
        name: HIDDEN if name in ("crc", "transformers_version") else value
        for name, value in data.items()
    }


def load(run: Path) -> Recording:
    """Read what has to be the same from a run directory, as file to record to value."""
    config, summary = (
        renamed(json.loads((run / name).read_text(encoding="utf-8")))
        for name in ("config.json", "summary.json")
    )
    table = rows(run / "metrics.jsonl")
    found: Recording = {
        "trajectories.jsonl": {
            episode_name(list(row["key"].values())): row
            for row in strip(rows(run / "trajectories.jsonl"))
        },
        "journal.jsonl": journal(rows(run / "journal.jsonl")),
        "training.jsonl": {f"row {n}": row for n, row in enumerate(rows(run / "training.jsonl"))},
        "metrics.jsonl": {
            f"row {n} ({row['phase']} {row['step']})": metrics_row(row)
            for n, row in enumerate(table)
        },
        "sanity.jsonl": {
            row["cause"]: row["key"][:2]
            for row in sorted(rows(run / "sanity.jsonl"), key=lambda r: r["cause"])
        },
        "summary.json": {
            name: value
            for name, value in strip(summary).items()
            if name not in ("versions", "machine")
        },
        "config.json": dict(config_rows(config)),
        # Checkouts before the log had none.
        "files": {path.name: None for path in sorted(run.iterdir()) if path.name != "log.txt"},
        "media": {
            path.name: sha256(path.read_bytes()).hexdigest() for path in sorted(run.glob("media/*"))
        },
    }
    for folder in ("checkpoints", "model"):
        files = [path for path in sorted((run / folder).rglob("*")) if path.is_file()]
        found[folder] = {str(path.relative_to(run / folder)): model_file(path) for path in files}
    return found


# Comparing.


def element(data: bytes, at: int, size: int) -> str:
    """An element of a tensor, as hex and, where Python can read it, as a number."""
    word = data[at * size : (at + 1) * size]
    number = {4: "<f", 8: "<d"}.get(size)
    return f"0x{word[::-1].hex()}" + (f" ({struct.unpack(number, word)[0]!r})" if number else "")


def differences(a: Any, b: Any, field: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(field, older, newer) of what differs between two values; types count, as 1 and 1.0 and
    true are other bytes."""
    if isinstance(a, dict) and isinstance(b, dict):
        if (
            isinstance(a.get("data"), bytes)
            and isinstance(b.get("data"), bytes)
            and len(a["data"]) == len(b["data"])
        ):
            if a["data"] != b["data"]:
                size = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}.get(
                    a["dtype"], 1
                )
                at = (
                    next(
                        n
                        for n, (x, y) in enumerate(zip(a["data"], b["data"], strict=True))
                        if x != y
                    )
                    // size
                )
                yield (
                    f"{field} element {at}",
                    element(a["data"], at, size),
                    element(b["data"], at, size),
                )
            a, b = (
                {name: value for name, value in one.items() if name != "data"} for one in (a, b)
            )
        for name in [*a, *(name for name in b if name not in a)]:
            yield from differences(
                a.get(name, GONE), b.get(name, GONE), f"{field}.{name}" if field else str(name)
            )
    elif isinstance(a, list) and isinstance(b, list):
        for n in range(max(len(a), len(b))):
            yield from differences(
                a[n] if n < len(a) else GONE, b[n] if n < len(b) else GONE, f"{field}[{n}]"
            )
    elif type(a) is not type(b) or repr(a) != repr(b):
        # repr: -0.0 and 0.0 are other bits, NaN is itself.
        yield field, a, b


def exemption(file: str, field: str, older: Any) -> str | None:
    """The name of the exemption that allows a difference."""
    plain = re.sub(r"\[\d+]", "[]", field)
    found = (
        one.name
        for one in EXEMPTIONS
        if re.fullmatch(one.file, file) and re.fullmatch(one.field, plain)
    )
    return next(found, None) if isinstance(older, str) and older == GONE else None


def compare_run(a: Recording, b: Recording, used: Counter[str]) -> dict[str, Any] | None:
    """Find the first difference that no exemption allows."""
    for file in a:
        for record in [*a[file], *(name for name in b[file] if name not in a[file])]:
            for field, older, newer in differences(
                a[file].get(record, GONE), b[file].get(record, GONE)
            ):
                if name := exemption(file, field or record, older):
                    used[name] += 1
                else:
                    return {
                        "file": file,
                        "record": record,
                        "field": field,
                        "older": shown(older),
                        "newer": shown(newer),
                    }
    return None


def shown(value: Any) -> Any:
    """A value as JSON has it, if it is short and has no bytes; else its beginning as text."""
    text = repr(value)
    try:
        json.dumps(value)
    except TypeError:
        return text[:400]
    return value if len(text) < 400 else text[:400] + " ..."


def runs_in(folder: Path) -> dict[str, Path]:
    if (folder / "config.json").exists():
        return {"run": folder}
    return {path.parent.name: path.parent for path in sorted(folder.glob("*/config.json"))}


def compare(a: Path, b: Path) -> int:
    """Compare two recordings or runs, and print one line of JSON."""
    older, newer = runs_in(a), runs_in(b)
    if older.keys() != newer.keys() or not older:
        raise Failed(f"{a} has the runs {sorted(older)}, {b} has {sorted(newer)}")
    used: Counter[str] = Counter()
    records = 0
    for name, path in older.items():
        ours = load(path)
        records += sum(len(file) for file in ours.values())
        if difference := compare_run(ours, load(newer[name]), used):
            print(json.dumps({"identical": False, "run": name} | difference))
            return 1
    print(
        json.dumps(
            {"identical": True, "runs": list(older), "records": records, "exceptions": dict(used)}
        )
    )
    return 0


# Running checkouts.


def run_command(checkout: Path, python: Path | None, *words: str) -> str:
    """Run a command of a checkout's own package; one thread, nothing written into the checkout.

    Raises:
        Failed: when it ends with another status than 0.
    """
    python = python or checkout / ".venv" / "bin" / "python"
    one = {
        name: "1"
        for name in (
            "OMP_NUM_THREADS",
            "MKL_NUM_THREADS",
            "OPENBLAS_NUM_THREADS",
            "PYTHONDONTWRITEBYTECODE",
        )
    }
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME")
    }
    folder, package = package_of(checkout)
    command = [str(python), "-m", package, *words]
    own = {"PYTHONPATH": str(folder)}
    done = subprocess.run(
        command, cwd=checkout, env=kept | one | own, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Failed(
            f"{' '.join(command)}\nin {checkout} ended with "
            f"{done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
        )
    return done.stdout


def package_of(checkout: Path) -> tuple[Path, str]:
    """The folder of a checkout that has its package, and the package's name then."""
    for folder in (checkout / "src", checkout):
        for package in PACKAGES:
            if (folder / package / "__main__.py").is_file():
                return folder, package
    raise Failed(f"{checkout} has no package {' or '.join(PACKAGES)}")


def record(
    out: Path,
    checkout: Path,
    python: Path | None = None,
    *,
    full: bool = False,
    only: list[str] | None = None,
) -> None:
    """Train the recipes with a checkout, one after another, into `out`."""
    out, checkout = out.resolve(), checkout.resolve()
    out.mkdir(parents=True, exist_ok=False)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=False
    ).stdout
    made = {"checkout": str(checkout), "commit": commit.strip(), "full": full}
    (out / "recording.json").write_text(json.dumps(made) + "\n", encoding="utf-8")
    for name in only or RECIPES:
        steps = str(RECIPES[name])
        short = [*SHORT.split(), "--warmup.steps", steps, "--warmup.gate-every", steps]
        words = ["train", f"recipes/{name}.toml", "--out", str(out / name), *ALWAYS.split()]
        run_command(checkout, python, *words, *([] if full else short))


def sides(
    base: Path, head: Path, out: Path, *, full: bool, only: list[str] | None, artefacts: bool
) -> int:
    """Record both checkouts on this machine, one after the other, and compare."""
    for name, side in (("base", base), ("head", head)):
        record(out / name, side, full=full, only=only)
    status = compare(out / "base", out / "head")
    if artefacts:
        for path in runs_in(out / "base").values():
            check_artefacts(path, head, base)
    return status


def interrupt(run: Path) -> None:
    """Make a run what a kill in its last training step leaves: half of the step's
    turns, no later line or file."""
    last = max(row["step"] for row in rows(run / "metrics.jsonl") if row["phase"] == "train")
    lines = (run / "journal.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    events = [json.loads(line) for line in lines]
    turns = [
        n
        for n, event in enumerate(events)
        if event["e"] == "turn" and event["k"][:2] == ["train", last - 1]
    ]
    cut = turns[len(turns) // 2]
    closed = {tuple(event["k"]) for event in events[:cut] if event["e"] == "closed"}
    table = [row["phase"] == "train" and row["step"] == last for row in rows(run / "metrics.jsonl")]

    def keep(name: str, wanted: list[bool]) -> None:
        path = run / name
        text = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text(
            "".join(line for line, is_wanted in zip(text, wanted, strict=True) if is_wanted),
            encoding="utf-8",
        )

    keep("journal.jsonl", [n < cut for n in range(len(lines))])
    keep("metrics.jsonl", [n < table.index(True) for n in range(len(table))])
    keep("training.jsonl", [row["step"] < last - 1 for row in rows(run / "training.jsonl")])
    keep(
        "trajectories.jsonl",
        [tuple(row["key"].values()) in closed for row in rows(run / "trajectories.jsonl")],
    )
    shutil.rmtree(run / "checkpoints" / f"step-{last:05d}")
    for name in ("summary.json", "report.html"):
        (run / name).unlink()


def outputs(run: Path, checkout: Path) -> dict[str, Any]:
    """What a checkout evaluates and exports from a run."""
    words = ["eval", "--run", str(run), "--tasks", "8", "--json", "--display", "none"]
    found: dict[str, Any] = {"eval": strip(json.loads(run_command(checkout, None, *words)))}
    for columns in ("samples", "sft", "trl", "verl"):
        file = run.with_name(f"{columns}.jsonl")
        run_command(
            checkout, None, "export", str(run), str(file), "--columns", columns, "--phase", "all"
        )
        found[columns] = rows(file)
    return found


def check_artefacts(run: Path, checkout: Path, base: Path | None = None) -> None:
    """Check that a checkout replays, views, evaluates, exports and resumes a copy of a run.

    Raises:
        Failed: at the first check that does not pass.
    """
    checkout = checkout.resolve()
    with tempfile.TemporaryDirectory() as made:
        copy = Path(made) / "run"
        shutil.copytree(run, copy)
        run_command(checkout, None, "replay", str(copy))  # status 1 at any difference
        run_command(checkout, None, "replay", str(copy), "--loop")
        run_command(checkout, None, "view", str(copy), "--report")
        run_command(checkout, None, "view", str(copy), "--html", f"{made}/page.html")
        sides = [outputs(copy, side) for side in (base and base.resolve(), checkout) if side]
        for field, older, newer in differences(sides[0], sides[-1]):
            if not exemption("export", field, older):
                raise Failed(f"{run}: {field} is {older!r} by {base}, {newer!r} by {checkout}")
        interrupt(copy)
        run_command(checkout, None, "train", "--resume", str(copy), "--display", "none")
        old, new = load(run), load(copy)
        for side in (old, new):
            side["journal.jsonl"] = {}  # has what was cut off twice; trajectories are compared
            for name in ("resumed", "times_cover"):
                side["summary.json"].pop(name, None)
        if not new["summary.json"].pop("resumed_turns", 0):
            raise Failed(
                f"{run}: resumed, it sampled the recorded turns of the interrupted step again"
            )
        if difference := compare_run(old, new, Counter()):
            raise Failed(
                f"{run}: resumed, it differs from the unbroken run: {json.dumps(difference)}"
            )
    print(json.dumps({"artefacts": str(run), "checkout": str(checkout), "good": True}))


def main(words: list[str]) -> int:
    """Run one command; its exit status."""
    parser = argparse.ArgumentParser(
        prog="yardstick.py", description=(__doc__ or "").partition("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("record", "compare", "sides", "artefacts"):
        command = commands.add_parser(name)
        for place in {
            "record": ["out"],
            "compare": ["a", "b"],
            "sides": ["base", "head"],
            "artefacts": ["run"],
        }[name]:
            command.add_argument(place, type=Path)
        if name in ("record", "sides"):
            command.add_argument(
                "--full", action="store_true", help="whole runs, as the recipes say"
            )
            command.add_argument("--only", nargs="+", choices=list(RECIPES), metavar="NAME")
        if name in ("record", "artefacts"):
            command.add_argument(
                "--checkout",
                type=Path,
                default=ROOT,
                help="default: the one that this script is in",
            )
    commands.choices["record"].add_argument(
        "--python", type=Path, help="default: .venv/bin/python of the checkout"
    )
    commands.choices["sides"].add_argument(
        "--out", type=Path, help="where the recordings stay; default: nowhere"
    )
    commands.choices["sides"].add_argument(
        "--artefacts", action="store_true", help="check BASE's runs with HEAD as well"
    )
    commands.choices["artefacts"].add_argument(
        "--base", type=Path, help="checkout whose evaluation and export are the measure"
    )
    given = parser.parse_args(words)
    try:
        if given.command == "compare":
            return compare(given.a, given.b)
        if given.command == "record":
            record(given.out, given.checkout, given.python, full=given.full, only=given.only)
        elif given.command == "artefacts":
            check_artefacts(given.run, given.checkout, given.base)
        else:
            with tempfile.TemporaryDirectory() as made:
                out = given.out or Path(made) / "sides"
                return sides(
                    given.base,
                    given.head,
                    out,
                    full=given.full,
                    only=given.only,
                    artefacts=given.artefacts,
                )
    except Failed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
