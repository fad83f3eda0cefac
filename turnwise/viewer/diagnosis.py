"""Diagnoses over metrics; live diagnosis; render-check findings.

What is wrong with a run, in plain words: each diagnosis is a small function over rows of metrics, its threshold has a name.

A diagnosis looks at the last `LAST` training steps, so that it goes away when what it saw does.
"""

from __future__ import annotations

import textwrap
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.records.progress import EpisodeListener, ProgressListener
from turnwise.viewer.run_data import Row, lines_of, number
from turnwise.viewer.text import single_line, visible

LAST = 5
"""Training steps that a diagnosis looks back."""
TIED = 0.9
"""Share of groups without signal from which on a run learns next to nothing."""
CUT = 0.5
"""Share of episodes that limits cut off, from which on a run mostly learns from stumps."""
TOOL_USERS = 0.02
"""Share of episodes with a call under which the tools count as unused."""
BLIND_MARGIN = 0.05
"""Success with images has to be over success with grey ones by this much, or by the half-width of its interval."""
MISMATCH_GROWTH = 4.0
"""How many times over its beginning the mismatch of trainer and engine has to be to count as rising."""
MISMATCH_LEAST = 1e-4
"""Mean mismatch, in nats, under which its growth means nothing: rounding in float32 is about 1e-6."""
ENTROPY_LEFT = 0.05
"""Share of the first steps' entropy under which exploration has ended."""
DOMINATES = 0.95
"""Share of what all parts of a reward can move, from which on one part is all that is learned."""
LOOKS = 2
"""Looks at the gate, none passed, from which on the warm-up is spoken of while it still runs."""
UNSOLVED = 0.95
"""Success at or over which ties are no trouble: the tasks are solved."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Something that is wrong, and what to do."""

    name: str
    says: str
    do: str

    @property
    def text(self) -> str:
        """One line."""
        return f"{self.says} {self.do}"


@dataclass(frozen=True, slots=True)
class DiagnosisInput:
    """What diagnoses look at."""

    train: Sequence[Row]
    gate: Sequence[Row]
    summary: Row

    @property
    def last(self) -> Sequence[Row]:
        """The training steps that count."""
        return self.train[-LAST:]


def diagnose(rows: Sequence[Row], summary: Mapping[str, Any] | None = None) -> list[Diagnosis]:
    """Everything that is wrong with a run, the most telling first; empty where nothing is seen to be.

    Args:
        rows: of metrics.jsonl, in order.
        summary: summary.json, where the run is over.
    """
    by_phase = {phase: [row for row in rows if row.get("phase") == phase] for phase in ("train", "gate")}
    found = (look(DiagnosisInput(by_phase["train"], by_phase["gate"], summary or {})) for look in LOOKS_AT)
    return [one for one in found if one is not None]


def tied(rows: DiagnosisInput) -> Diagnosis | None:
    """All groups tie: `TIED` of the groups of the last `LAST` steps have no signal, and the tasks are not solved."""
    groups, without = _sum(rows.last, "groups"), _sum(rows.last, "groups_no_signal")
    if len(rows.last) < LAST or not groups or without / groups < TIED or _mean(rows.last, "success") >= UNSOLVED:
        return None
    solved, unsolved = _sum(rows.last, "groups_solved"), _sum(rows.last, "groups_unsolved")
    easy = solved > unsolved
    which = "mostly all succeed" if easy else "mostly none succeeds"
    do = "Take harder tasks." if easy else "Take easier tasks, demonstrations (warmup.demos), or rewards with steps in between."
    return Diagnosis(
        "all groups tie",
        f"In {without:.0f} of {groups:.0f} groups of the last {LAST} steps all episodes had the same reward ({which}), so "
        "nothing was learned from them.",
        f"{do} Larger groups (rollout.group_size) tie less often.",
    )


def truncated(rows: DiagnosisInput) -> Diagnosis | None:
    """Everything truncated: limits cut off `CUT` of the episodes."""
    share = _mean(rows.last, "truncated_share")
    if not rows.last or share < CUT:
        return None
    causes = _counter(rows.last, "truncations")
    cause = next(iter(causes.most_common(1)), ("a limit", 0))[0]
    do = {
        "turn_length": "Replies do not end: raise limits.turn_tokens, or check the stop ids (turnwise check --model).",
        "max_turns": "Raise limits.turns, or reward coming to an end.",
        "context": "Raise limits.context, cut observations (limits.observation_tokens), or drop history (rollout.history).",
        "episode_tokens": "Raise limits.episode_tokens, or cut observations (limits.observation_tokens).",
        "wall_clock": "Raise limits.wall_clock, or find out what is slow: seconds.<phase> in docs/metrics.md.",
        "invalid_token": "Control tokens out of place: warm the model up, or check its template (turnwise check --model).",
    }.get(cause, "See stops in the overview.")
    return Diagnosis("everything truncated", f"{100 * share:.0f}% of episodes were cut off, mostly by {cause}.", do)


def tool_unused(rows: DiagnosisInput) -> Diagnosis | None:
    """The tool is never called: the model is told of tools, and under `TOOL_USERS` of episodes call one."""
    told = any(number(row.get("tools_told")) for row in rows.train)
    share = _mean(rows.last, "tool_users")
    if not told or len(rows.last) < LAST or share >= TOOL_USERS:
        return None
    return Diagnosis(
        "the tool is never called",
        f"{100 * share:.1f}% of the last {LAST} steps' episodes called a tool.",
        "Does the reward need it, does the template show it (turnwise check --model), can the reply be read (malformed_calls)?",
    )


def blind(rows: DiagnosisInput) -> Diagnosis | None:
    """The model is blind: with grey images it does as well as with the real ones, within `BLIND_MARGIN` or the interval."""
    seeing, grey = number(rows.summary.get("success_after")), number(rows.summary.get("success_blind"))
    if seeing is None or grey is None:
        return None
    interval = rows.summary.get("success_after_ci")
    bounds = [number(bound) for bound in interval] if isinstance(interval, Sequence) else []
    low, high = bounds if len(bounds) == 2 else (None, None)
    half = (high - low) / 2 if low is not None and high is not None else 0.0
    if seeing - grey > max(BLIND_MARGIN, half):
        return None
    return Diagnosis(
        "the model is blind",
        f"With grey images it succeeds as often ({100 * grey:.0f}%) as with the real ones ({100 * seeing:.0f}%).",
        "Can the task be solved without looking? Do pixels reach the model: turnwise check --model PATH --images.",
    )


def mismatch(rows: DiagnosisInput) -> Diagnosis | None:
    """Mismatch rises: over `MISMATCH_LEAST` and `MISMATCH_GROWTH` times that of the first `LAST` steps."""
    known = [row for row in rows.train if number(row.get("mismatch_mean")) is not None]
    if len(known) < 2 * LAST:
        return None
    first, last = _mean(known[:LAST], "mismatch_mean"), _mean(known[-LAST:], "mismatch_mean")
    if last < MISMATCH_LEAST or last < MISMATCH_GROWTH * first:
        return None
    return Diagnosis(
        "mismatch rises",
        f"Engine and trainer differ by {last:.1e} nats a token, {first:.1e} at first.",
        "They compute different policies: precision, a kernel, an adapter not merged, or stale weights. See mismatch_by_turn.",
    )


def entropy(rows: DiagnosisInput) -> Diagnosis | None:
    """Entropy collapsed: under `ENTROPY_LEFT` of that of the first `LAST` steps, with tasks still unsolved."""
    known = [row for row in rows.train if number(row.get("entropy")) is not None]
    if len(known) < 2 * LAST:
        return None
    first, last = _mean(known[:LAST], "entropy"), _mean(known[-LAST:], "entropy")
    if last > ENTROPY_LEFT * first or _mean(known[-LAST:], "success") >= UNSOLVED:
        return None
    return Diagnosis(
        "entropy collapsed",
        f"Entropy fell from {first:.3g} to {last:.3g} nats a token: the policy says nearly the same each time; groups tie.",
        "Go back to an earlier checkpoint with a lower train.lr, a larger train.clip_high, or train.kl over 0.",
    )


def dominated(rows: DiagnosisInput) -> Diagnosis | None:
    """One part of the reward dominates: of all that parts move within groups, one has `DOMINATES`."""
    totals: Counter[str] = Counter()
    for row in rows.last:
        spreads = row.get("rewards_spread")
        for name, value in spreads.items() if isinstance(spreads, Mapping) else ():
            totals[str(name)] += number(value) or 0.0  # type: ignore[assignment]
    whole = sum(totals.values())
    if len(rows.last) < LAST or len(totals) < 2 or not whole:
        return None
    name, most = totals.most_common(1)[0]
    if most / whole < DOMINATES:
        return None
    return Diagnosis(
        "one part of the reward dominates",
        f"Within groups {100 * most / whole:.0f}% of what rewards differ by is {name}; the other parts teach next to nothing.",
        "Change the weights of the parts, or what the others measure. rewards_spread has each.",
    )


def warmup_gate_unmet(rows: DiagnosisInput) -> Diagnosis | None:
    """The warm-up never grounded: no reinforcement began, and none of at least `LOOKS` looks at the gate passed."""
    if rows.train or len(rows.gate) < LOOKS or any(row.get("passed") for row in rows.gate):
        return None
    successes = [number(row.get("success")) or 0.0 for row in rows.gate]
    losses = [loss for row in rows.gate if (loss := number(row.get("loss"))) is not None]
    told = f" while its loss went from {losses[0]:.3g} to {losses[-1]:.3g}" if len(losses) > 1 else ""
    return Diagnosis(
        "the warm-up never grounded",
        f"In {len(rows.gate)} looks the model succeeded in at most {100 * max(successes):.0f}% of tasks{told}: it writes what "
        "demonstrations look like, without what they depend on.",
        "More demonstrations (warmup.demos) and steps, a model with more layers, or a gate that the demonstrator can meet.",
    )


LOOKS_AT: tuple[Callable[[DiagnosisInput], Diagnosis | None], ...] = (
    warmup_gate_unmet,
    blind,
    tied,
    truncated,
    tool_unused,
    mismatch,
    entropy,
    dominated,
)


def _sum(rows: Sequence[Row], name: str) -> float:
    return sum(number(row.get(name)) or 0.0 for row in rows)


def _mean(rows: Sequence[Row], name: str) -> float:
    known = [value for row in rows if (value := number(row.get(name))) is not None]
    return sum(known) / len(known) if known else 0.0


def _counter(rows: Sequence[Row], name: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    for row in rows:
        found = row.get(name)
        for key, value in found.items() if isinstance(found, Mapping) else ():
            counts[str(key)] += int(number(value) or 0)
    return counts


FILE = "sanity.jsonl"
_COLUMNS = ("sampled", "canonical", "sent")
_MOST = 40
"""Reports shown at most, whatever the file holds."""
_LONGEST = 600


@dataclass(frozen=True, slots=True)
class RenderFinding:
    """One cause, as it was first seen."""

    cause: str
    sentence: str
    count: int
    """How often the reinforcement steps saw it."""
    where: str
    columns: Sequence[tuple[str, str]]
    """Each of sampled, canonical, sent with its text."""


def findings(run_dir: Path, rows: Sequence[Row], problems: list[str]) -> list[RenderFinding]:
    """The reports of a run, the commonest cause first.

    Args:
        rows: of metrics.jsonl, for the counts.
        problems: gets a line where the file cannot be read.
    """
    counts: Counter[str] = Counter()
    for row in rows:
        for name, value in row.items():
            if str(name).startswith("template_breaks_"):
                counts[str(name).removeprefix("template_breaks_")] += int(number(value) or 0)
    found: list[RenderFinding] = []
    for _, row in lines_of(run_dir / FILE, problems):
        cause, key = str(row.get("cause", "")), row.get("key")
        episode = "/".join(map(str, key)) if isinstance(key, list) else ""
        turn = number(row.get("turn"))
        place = f"turn {int(turn) + 1}" if turn is not None and turn >= 0 else "the opening prompt"
        where = f"episode {episode}, {place}, id {row.get('position')} of the path, in what is of origin {row.get('origin')}"
        texts = [(name, str(row.get(name) or "")[:_LONGEST]) for name in _COLUMNS]
        said = str(row.get("said") or "")[:_LONGEST]
        found.append(
            RenderFinding(cause, " ".join(filter(None, (str(row.get("sentence") or ""), said))), counts[cause], where, texts)
        )
        if len(found) == _MOST:
            break
    return sorted(found, key=lambda one: (-one.count, one.cause))


def table(found: Sequence[RenderFinding], width: int = 120) -> list[str]:
    """The reports as lines for a terminal: under each cause three columns, line breaks and other signs written out."""
    lines: list[str] = []
    cell = max(16, (width - 6) // 3)
    for one in found:
        seen = f" ({one.count} in the steps)" if one.count else ""
        lines += ["", single_line(f"{one.cause}{seen}: {one.sentence}"), single_line(f"  {one.where}")]
        cells = [textwrap.wrap(_shown(text), cell, drop_whitespace=False) or [""] for _, text in one.columns]
        lines.append("   ".join(name.ljust(cell) for name, _ in one.columns).rstrip())
        for number_ in range(max(map(len, cells))):
            row = [rows[number_] if number_ < len(rows) else "" for rows in cells]
            lines.append("   ".join(text.ljust(cell) for text in row).rstrip())
    return lines[1:]


def _shown(text: str) -> str:
    return visible(text).replace("\n", "\u23ce").replace("\t", "\u21e5").replace(" ", "\u00b7")


class DiagnosingListener:
    """Passes everything on to another watch, and notes a diagnosis when it is first made."""

    def __init__(self, watch: ProgressListener) -> None:
        self._watch = watch
        self.episode = watch.episode if isinstance(watch, EpisodeListener) else None
        """Receives finished episodes for the other watch; None where it is no `EpisodeListener`, and so this is none."""
        self._first: list[Mapping[str, Any]] = []
        self._last: deque[Mapping[str, Any]] = deque(maxlen=LAST)
        self._told: set[str] = set()

    def phase(self, name: str, total: int, unit: str) -> None:
        """Passed on."""
        self._watch.phase(name, total, unit)

    def progress(self, done: int, figures: Mapping[str, Any]) -> None:
        """Passed on; behind a training step the last rows are looked at."""
        self._watch.progress(done, figures)
        if figures.get("phase") == "train":
            with suppress(Exception):  # a row of an odd shape: the run is worth more than what is said of it
                self._take(figures)

    def waiting(self, what: str) -> None:
        """Passed on."""
        self._watch.waiting(what)

    def note(self, text: str) -> None:
        """Passed on."""
        self._watch.note(text)

    def close(self) -> None:
        """Passed on."""
        self._watch.close()

    def _take(self, row: Mapping[str, Any]) -> None:
        if len(self._first) < LAST:
            self._first.append(row)
        else:
            self._last.append(row)
        for one in diagnose([*self._first, *self._last]):
            if one.name not in self._told:
                self._told.add(one.name)
                self._watch.note(f"diagnosis: {one.text}")
