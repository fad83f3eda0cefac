"""Tables of a run's page: how episodes ended, what was not trained, where time went, settings."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from turnwright.display.run_data import (
    Row,
    RunData,
    mapping,
    number,
    sentence_of,
    sum_tables,
)
from turnwright.display.text import text_of
from turnwright_view.web.texts import truncate

MAX_STOPS = 40
"""Maximum stop reasons over time; the rest is left out."""

MAX_STEPS = 2_000
"""Maximum steps of stop reasons over time; of more, some are left out evenly."""

TIMES = ("warmup", "rollout", "training", "rest of the steps", "evaluation")
"""What wall time is split into, in this order."""


def stops_by_step(run: RunData) -> dict[str, Any]:
    """Return the share of each stop reason in each training step, the commonest first."""
    rows = [row for row in run.phase("train") if isinstance(row.get("stops"), Mapping)]
    every = 1 + len(rows) // MAX_STEPS
    rows = rows[::every]
    names = [name for name, _ in sum_tables(rows, "stops").most_common(MAX_STOPS)]

    shares: dict[str, list[float]] = {name: [] for name in names}
    for row in rows:
        counts = sum_tables([row], "stops")
        total = counts.total() or 1
        for name in names:
            shares[name].append(round(counts[name] / total, 6))
    return {
        "steps": [number(row.get("step")) for row in rows],
        "shares": {truncate(name, 80): of_steps for name, of_steps in shares.items()},
        "sentences": {truncate(name, 80): sentence_of(name) for name in names},
    }


def untrained_tokens(run: RunData) -> list[list[Any]]:
    """Return the untrained sampled tokens as [reason, tokens, share of all sampled ones]."""
    rows = run.phase("train")
    counts = sum_tables(rows, "untrained")
    sampled = sum(number(row.get("sampled_tokens")) or 0 for row in rows)
    table = []
    for name, count in counts.most_common():
        if count > 0:
            table.append([truncate(name, 80), count, count / sampled if sampled else None])
    return table


def tokens_by_lag(run: RunData) -> list[list[Any]]:
    """Return the trained tokens by lag as [lag, tokens, share, KL, effective sample share], the
    last two as means over steps by their tokens."""
    rows = run.phase("train")
    counts = sum_tables(rows, "tokens_by_lag")
    total = counts.total() or 1
    table = []
    for lag in sorted(counts, key=lambda lag: (len(lag), lag)):
        kl = _mean_of_lag(rows, "mismatch_kl_by_lag", lag)
        ess = _mean_of_lag(rows, "importance_ess_by_lag", lag)
        table.append([truncate(lag, 80), counts[lag], counts[lag] / total, kl, ess])
    return table


def _mean_of_lag(rows: Sequence[Row], name: str, lag: str) -> float | None:
    total = 0.0
    tokens = 0.0
    for row in rows:
        value = number(mapping(row.get(name)).get(lag))
        if value is not None:
            count = number(mapping(row.get("tokens_by_lag")).get(lag)) or 0.0
            total += value * count
            tokens += count
    return total / tokens if tokens else None


def time_split(run: RunData) -> list[list[Any]]:
    """Return where wall time went as [what, seconds, share]."""
    spent: dict[str, float] = {}

    def spend(what: str, seconds: float) -> None:
        spent[what] = spent.get(what, 0.0) + seconds

    clock = 0.0
    for row in run.rows:
        now = number(row.get("time_s"))
        if now is None or now < clock:  # a resumed run restarts its clock
            clock = now or clock
            continue
        passed = now - clock
        clock = now
        phase = str(row.get("phase"))
        if phase == "train":
            rollout = min(passed, number(row.get("rollout_s")) or 0.0)
            train = min(passed - rollout, number(row.get("train_s")) or 0.0)
            spend("rollout", rollout)
            spend("training", train)
            spend("rest of the steps", passed - rollout - train)
        else:
            spend({"eval": "evaluation"}.get(phase, truncate(phase, 80)), passed)

    total = sum(spent.values())
    parts = [(what, seconds) for what, seconds in spent.items() if seconds > 0]
    parts.sort(key=lambda part: TIMES.index(part[0]) if part[0] in TIMES else len(TIMES))
    return [[what, seconds, seconds / total] for what, seconds in parts]


def settings(run: RunData) -> tuple[list[tuple[str, str, str]], int]:
    """Return the settings that were set as (key, value, origin), and the number of those at their
    defaults."""
    from turnwright.config.dump import toml_value

    changed: list[tuple[str, str, str]] = []
    defaults = 0
    for key, value in _flat(run.config, ""):
        origin = str(run.origins.get(key, "default"))
        if origin == "default":
            defaults += 1
        else:
            changed.append((key, toml_value(value), origin))
    return changed, defaults


def _flat(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, list) and all(isinstance(item, Mapping) for item in node):
        node = dict(enumerate(node)) or node
    if prefix and not (isinstance(node, Mapping) and node):
        yield prefix[:-1], node
    for key, value in mapping(node).items():
        yield from _flat(value, f"{prefix}{key}.")


def command_of(run: RunData, recipe: Any) -> str:
    """Return the command line that starts this run, from its recipe and the settings given on the
    command line."""
    words = ["turnwright", "train"]
    if isinstance(recipe, str) and recipe:
        words.append(recipe.rpartition("/")[2])
    for key, value in _flat(run.config, ""):
        if run.origins.get(key) == "command line":
            words += [f"--{key}", text_of(value)]
    return truncate(shlex.join(words), 2_000)
