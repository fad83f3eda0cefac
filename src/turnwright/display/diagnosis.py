"""Diagnoses of a run over rows of metrics: live, for the report, and from the render check.

Each diagnosis is a small function with a named threshold. It reads the last `LAST` training steps,
so it disappears with its cause.
"""

from __future__ import annotations

import textwrap
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from turnwright.display.run_data import Row, lines_of, mapping, number, pair, read_run, sum_tables
from turnwright.display.text import single_line, visible
from turnwright.records.listeners import EpisodeListener, ProgressListener

LAST = 5
"""Number of recent training steps that a diagnosis reads."""

TIED = 0.9
"""Minimum share of groups without signal to report ties."""

MOSTLY_TIED = 0.5
"""Minimum share of groups without signal that explains why nothing changes."""

TRUNCATED = 0.5
"""Minimum share of episodes truncated by limits to report truncation."""

FAILED = 0.1
"""Minimum share of failed episodes to report them."""

TOOL_USERS = 0.02
"""Share of episodes with a call below which the tools count as unused."""

BLIND_MARGIN = 0.05
"""Minimum lead of success with images over success with gray ones, unless half the interval is
larger."""

MISMATCH_GROWTH = 4.0
"""Factor over the initial mismatch of trainer and engine that counts as a rise."""

MISMATCH_MIN = 1e-4
"""Mean mismatch in nats below which growth is ignored; float32 rounding is about 1e-6."""

ENTROPY_LEFT = 0.05
"""Share of the initial entropy below which exploration has ended."""

DOMINATES = 0.95
"""Share of the spread of all reward parts at which one part dominates."""

GATE_EVALS = 2
"""Number of failed gate evaluations after which the warmup is reported while it runs."""

MALFORMED = 0.3
"""Minimum share of calls that cannot be parsed or are answered by an error to report them."""

NOT_CARRIED = 0.3
"""Minimum lead of success on training tasks over held-out ones to report it."""

FEW_TASKS = 8
"""Number of different held-out tasks below which they stand for few others."""

FEW_HELD_OUT = 20
"""Number of held-out episodes below which success on them means little."""

FLAT_STEPS = 20
"""Number of steps without a change after which it is reported."""

NOISE = 0.05
"""Mean gradient agreement below which gradients count as noise."""

UNSOLVED = 0.95
"""Success at which ties are no fault: the tasks are solved."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A fault of a run and its remedy."""

    name: str
    fault: str
    remedy: str

    @property
    def text(self) -> str:
        """Fault and remedy in one line."""
        return f"{self.fault} {self.remedy}"


@dataclass(frozen=True, slots=True)
class DiagnosisInput:
    """Rows that diagnoses read."""

    train: Sequence[Row]
    last: Sequence[Row]
    """The last `LAST` training steps."""
    gate: Sequence[Row]
    summary: Row


def diagnose(rows: Sequence[Row], summary: Mapping[str, Any] | None = None) -> list[Diagnosis]:
    """Return all diagnoses of a run, the most informative first, from metrics.jsonl and the summary
    of a finished run."""
    train = [row for row in rows if row.get("phase") == "train"]
    gate = [row for row in rows if row.get("phase") == "gate"]
    read = DiagnosisInput(train, train[-LAST:], gate, summary or {})
    diagnoses = []
    for diagnosis_of in DIAGNOSES:
        diagnosis = diagnosis_of(read)
        if diagnosis is not None:
            diagnoses.append(diagnosis)
    return diagnoses


def unrewarded(rows: DiagnosisInput) -> Diagnosis | None:
    """No rewards: in the last `LAST` steps no episode had one."""
    if len(rows.last) < LAST or any(row.get("reward", 0.0) is not None for row in rows.last):
        return None
    return Diagnosis(
        "no episode had a reward",
        f"In the last {LAST} steps the reward of every episode was None, so nothing was learned.",
        "Find out why the environment or its reward function returned None.",
    )


def tied(rows: DiagnosisInput) -> Diagnosis | None:
    """All groups tie: `TIED` of the groups in the last `LAST` steps have no signal, and the tasks
    are not solved."""
    if any(name.startswith("teacher.") for row in rows.last for name in row):
        return None  # a teacher trains such groups
    if len(rows.last) < LAST or unrewarded(rows) is not None:
        return None
    groups = _sum(rows.last, "groups")
    without_signal = _sum(rows.last, "groups_no_signal")
    if not groups or without_signal / groups < TIED:
        return None
    if _mean(rows.last, "success") >= UNSOLVED:
        return None

    if _sum(rows.last, "groups_solved") > _sum(rows.last, "groups_unsolved"):
        which = "mostly all succeed"
        remedy = "Use harder tasks."
    else:
        which = "mostly none succeeds"
        remedy = "Use easier tasks, demonstrations (warmup.demos) or intermediate rewards."
    return Diagnosis(
        "all groups tie",
        f"In {without_signal:.0f} of {groups:.0f} groups of the last {LAST} steps all episodes had "
        f"the same reward ({which}), so nothing was learned from them.",
        f"{remedy} Larger groups (rollout.group_size) tie less often.",
    )


def truncated(rows: DiagnosisInput) -> Diagnosis | None:
    """Everything truncated: limits truncated `TRUNCATED` of the episodes."""
    share = _mean(rows.last, "truncated_share")
    if not rows.last or share < TRUNCATED:
        return None

    causes = sum_tables(rows.last, "truncations").most_common(1)
    cause = causes[0][0] if causes else "a limit"
    remedies = {
        "turn_length": "Replies do not end: raise limits.turn_tokens, or check the stop ids "
        "(turnwright check --model).",
        "max_turns": "If so many turns are the task's rule, the limit is right: reward what leads "
        "to the end, or demonstrate how to end in time. Else raise limits.turns, or "
        "the environment's own max_turns if that is lower.",
        "context": "Raise limits.context, truncate observations (limits.observation_tokens), or "
        "shorten rollout.history.",
        "episode_tokens": "Raise limits.episode_tokens, or truncate observations "
        "(limits.observation_tokens).",
        "wall_clock": "Raise limits.wall_clock_s, or find the slow phase: seconds.<phase> in "
        "docs/reference/metrics.md.",
        "invalid_token": "Misplaced control tokens: warm the model up, or check its template "
        "(turnwright check --model).",
    }
    return Diagnosis(
        "everything truncated",
        f"{100 * share:.0f}% of episodes were truncated, mostly by {cause}.",
        remedies.get(cause, "See stops in the overview."),
    )


def failing(rows: DiagnosisInput) -> Diagnosis | None:
    """Episodes fail: errors of environment, engine or reward ended `FAILED` of the episodes."""
    share = _mean(rows.last, "failed_share")
    if len(rows.last) < LAST or share < FAILED:
        return None

    errors = sum_tables(rows.last, "errors")
    mostly = f", mostly by {errors.most_common(1)[0][0]}" if errors else ""
    return Diagnosis(
        "episodes fail",
        f"{share:.0%} of the episodes in the last {LAST} steps failed{mostly}; they have no reward "
        "and are not trained on.",
        "Read the traceback of one (turnwright view), and mend the environment or raise its "
        "limits; rollout.max_retries plays a failed episode again.",
    )


def tool_unused(rows: DiagnosisInput) -> Diagnosis | None:
    """The tool is never called: tools are offered, and fewer than `TOOL_USERS` of the episodes call
    one."""
    offered = any(number(row.get("tools_offered")) for row in rows.train)
    share = _mean(rows.last, "tool_users")
    if not offered or len(rows.last) < LAST or share >= TOOL_USERS:
        return None
    return Diagnosis(
        "the tool is never called",
        f"{100 * share:.1f}% of the last {LAST} steps' episodes called a tool.",
        "Check that the reward needs it, the template renders it (turnwright check --model), and "
        "calls parse (malformed_calls).",
    )


def blind(rows: DiagnosisInput) -> Diagnosis | None:
    """The model is blind: success with gray images is as high, within `BLIND_MARGIN` or half the
    interval."""
    sighted = number(rows.summary.get("success_after"))
    blinded = number(rows.summary.get("success_blind"))
    if sighted is None or blinded is None:
        return None

    low, high = pair(rows.summary.get("success_after_ci")) or (0.0, 0.0)
    if sighted - blinded > max(BLIND_MARGIN, (high - low) / 2):
        return None
    return Diagnosis(
        "the model is blind",
        f"With gray images it succeeds as often ({100 * blinded:.0f}%) as with the real ones "
        f"({100 * sighted:.0f}%).",
        "Check that the task needs its images, and that pixels reach the model: turnwright check "
        "--model PATH --images.",
    )


def mismatch(rows: DiagnosisInput) -> Diagnosis | None:
    """Mismatch rises: above `MISMATCH_MIN` and `MISMATCH_GROWTH` times the mean of the first `LAST`
    steps."""
    measured = [row for row in rows.train if number(row.get("mismatch_mean")) is not None]
    if len(measured) < 2 * LAST:
        return None

    first = _mean(measured[:LAST], "mismatch_mean")
    last = _mean(measured[-LAST:], "mismatch_mean")
    if last < MISMATCH_MIN or last < MISMATCH_GROWTH * first:
        return None
    return Diagnosis(
        "mismatch rises",
        f"Engine and trainer differ by {last:.1e} nats per token, {first:.1e} at first.",
        "They compute different policies: precision, a kernel, an unmerged adapter, or stale "
        "weights. See mismatch_by_turn.",
    )


def entropy(rows: DiagnosisInput) -> Diagnosis | None:
    """Entropy collapsed: below `ENTROPY_LEFT` of the first `LAST` steps, with tasks unsolved."""
    measured = [row for row in rows.train if number(row.get("entropy")) is not None]
    if len(measured) < 2 * LAST:
        return None

    first = _mean(measured[:LAST], "entropy")
    last = _mean(measured[-LAST:], "entropy")
    is_solved = _mean(measured[-LAST:], "success") >= UNSOLVED
    if last > ENTROPY_LEFT * first or is_solved:
        return None
    return Diagnosis(
        "entropy collapsed",
        f"Entropy fell from {first:.3g} to {last:.3g} nats per token: samples are nearly "
        "identical, and groups tie.",
        "Return to an earlier checkpoint with a lower train.lr, a larger train.clip_high, or "
        "train.kl over 0.",
    )


def dominated(rows: DiagnosisInput) -> Diagnosis | None:
    """One part of the reward dominates: it has `DOMINATES` of the parts' spread within groups."""
    spreads: dict[str, float] = {}
    for row in rows.last:
        for part, value in mapping(row.get("rewards_spread")).items():
            spreads[str(part)] = spreads.get(str(part), 0.0) + (number(value) or 0.0)
    total = sum(spreads.values())
    if len(rows.last) < LAST or len(spreads) < 2 or not total:
        return None

    largest = max(spreads, key=lambda part: spreads[part])
    share = spreads[largest] / total
    if share < DOMINATES:
        return None
    return Diagnosis(
        "one part of the reward dominates",
        f"Within groups, {largest} is {100 * share:.0f}% of the spread of rewards; other "
        "parts have almost no effect.",
        "Change the weights of the parts, or what the others measure. See rewards_spread.",
    )


def warmup_gate_unmet(rows: DiagnosisInput) -> Diagnosis | None:
    """The warmup gate is not met: at least `GATE_EVALS` gate evaluations, none passed, and no
    reinforcement that helps."""
    if len(rows.gate) < GATE_EVALS or any(row.get("gate_passed") for row in rows.gate):
        return None
    if rows.train and not _unchanged(rows):
        return None

    successes = _values(rows.gate, "success")
    if not successes:
        return Diagnosis(
            "no episode of the warmup gate had a reward",
            f"In {len(rows.gate)} gate evaluations the reward of every episode was None, so "
            "nothing is known about success.",
            "Find out why the environment or its reward function returned None; more steps change "
            "nothing.",
        )

    losses = _values(rows.gate, "loss")
    trend = ""
    if len(losses) > 1:
        trend = f" while its loss went from {losses[0]:.3g} to {losses[-1]:.3g}"
    return Diagnosis(
        "the warmup gate is not met",
        f"In {len(rows.gate)} gate evaluations the model succeeded in at most "
        f"{100 * max(successes):.0f}% of tasks{trend}: it imitates the form of demonstrations "
        "without their conditions.",
        "Use more demonstrations (warmup.demos) and steps, a model with more layers, or a gate "
        "that the demonstrator can meet.",
    )


def worse(rows: DiagnosisInput) -> Diagnosis | None:
    """Reinforcement made it worse: the run went back to an earlier policy."""
    kept = rows.summary.get("rolled_back")
    interval = pair(rows.summary.get("success_after_ci"))
    if not kept or interval is None:
        return None
    return Diagnosis(
        "reinforcement made it worse",
        f"The last policy's held-out success is at most {100 * interval[1]:.0f}%, under that of "
        f"checkpoint {kept}, which the run keeps.",
        "Lower train.lr, scale it by evidence (train.gradient_signal_steps = 20), or check that "
        "the reward measures success.",
    )


def not_carried(rows: DiagnosisInput) -> Diagnosis | None:
    """Training high and held-out low: success on training tasks leads by `NOT_CARRIED`."""
    held_out = number(rows.summary.get("success_after"))
    trained = _mean(rows.last, "success")
    if held_out is None or len(rows.last) < LAST or trained - held_out < NOT_CARRIED:
        return None
    return Diagnosis(
        "what is learned does not carry over",
        f"Training tasks succeed in {100 * trained:.0f}%, held-out ones in {100 * held_out:.0f}%.",
        "Train on more and more different tasks, or hold out tasks whose answers also occur in "
        "training.",
    )


def few_held_out(rows: DiagnosisInput) -> Diagnosis | None:
    """Few held-out episodes: under `FEW_HELD_OUT`, or of under `FEW_TASKS` tasks."""
    episodes = number(rows.summary.get("n_eval"))
    tasks = number(rows.summary.get("eval_tasks"))
    if not episodes:
        return None

    if episodes >= FEW_HELD_OUT:
        if not tasks or tasks >= FEW_TASKS:
            return None
        return Diagnosis(
            "few held-out tasks",
            f"{tasks:.0f} held-out tasks, played {episodes / tasks:.0f} times each, say little "
            "about others.",
            "Give the environment more tasks, or evaluate on trained ones and say so "
            '(eval.overlap = "allowed").',
        )
    return Diagnosis(
        "few held-out episodes",
        f"{episodes:.0f} held-out episodes say little: one more success changes the rate by "
        f"{100 / episodes:.0f} points.",
        "Give the environment more held-out tasks, or play each more often (eval.samples).",
    )


def overlapping(rows: DiagnosisInput) -> Diagnosis | None:
    """Tasks of the evaluation were trained too, as `eval.overlap` allows."""
    if rows.summary.get("overlap") != "allowed":
        return None
    return Diagnosis(
        "evaluated on trained tasks",
        "Success is measured on tasks that were trained too, so it includes what was memorized.",
        'Where there are enough tasks, hold some out (eval.overlap = "refused", the default).',
    )


def one_reply(rows: DiagnosisInput) -> Diagnosis | None:
    """No better than one reply: success after reinforcement is at `single_turn_best`, in at most
    one and a half turns."""
    best = number(rows.summary.get("single_turn_best"))
    turns = number(rows.summary.get("turns_after"))
    low, high = pair(rows.summary.get("success_after_ci")) or (1.0, 0.0)
    if not best or turns is None or turns > 1.5 or not low <= best <= high:
        return None
    return Diagnosis(
        "no better than one reply",
        f"Success is what one reply reaches at best ({100 * best:.0f}%), in {turns:.1f} turns: the "
        "policy answers at once.",
        "Warm it up on demonstrations that use more turns, or reward the steps that lead to the "
        "answer.",
    )


def malformed(rows: DiagnosisInput) -> Diagnosis | None:
    """Calls fail: `MALFORMED` of the calls cannot be parsed, or are answered by an error."""
    malformed_calls = sum_tables(rows.last, "malformed_calls")
    failing = malformed_calls + sum_tables(rows.last, "tool_mistakes")
    calls = sum_tables(rows.last, "tool_calls").total() + malformed_calls.total()
    if len(rows.last) < LAST or not calls or failing.total() < MALFORMED * calls:
        return None

    kind, count = failing.most_common(1)[0]
    return Diagnosis(
        "calls fail",
        f"{failing.total():.0f} of {calls:.0f} calls in the last {LAST} steps cannot be used, "
        f"mostly {kind} ({count:.0f}).",
        "More demonstrations (warmup.demos) and warm-up steps teach the form; check it with "
        "turnwright check --model.",
    )


def flat(rows: DiagnosisInput) -> Diagnosis | None:
    """Nothing changes: over `FLAT_STEPS` steps, success of training episodes rose by no more than
    chance, tasks unsolved."""
    means = _unchanged(rows)
    if means is None or any(cause(rows) is not None for cause in (unrewarded, tied, truncated)):
        return None

    why, remedy = _why_flat(rows.train[-FLAT_STEPS:])
    before, after = means
    return Diagnosis(
        "nothing changes",
        f"Success of training episodes went from {100 * before:.0f}% to {100 * after:.0f}% in "
        f"{FLAT_STEPS} steps: {why}.",
        remedy,
    )


def _why_flat(recent: Sequence[Row]) -> tuple[str, str]:
    """Return why steps changed nothing, and the remedy."""
    groups = _sum(recent, "groups")
    without_signal = _sum(recent, "groups_no_signal")
    if groups and without_signal / groups >= MOSTLY_TIED:
        unsolved = _sum(recent, "groups_unsolved")
        return (
            f"in {without_signal:.0f} of {groups:.0f} groups all episodes had the same reward, in "
            f"{unsolved:.0f} of them none succeeded",
            "Where none succeeds, warm up longer (warmup.steps) or reward partial success; "
            "larger groups tie less often.",
        )

    agreement = max(_mean(recent, "gradient_agreement"), _mean(recent, "gradient_agreement_scaled"))
    if agreement < NOISE:
        return f"gradients of different steps do not agree ({agreement:.2f})", MORE_GROUPS
    if all(row.get("lr") == 0.0 for row in recent):
        return "gradients agree by no more than chance, so no step was taken", MORE_GROUPS
    return "gradients agree, so steps are too small", "Raise train.lr."


MORE_GROUPS = "Use larger or more groups (rollout)."


def _unchanged(rows: DiagnosisInput) -> tuple[float, float] | None:
    """Return success in the halves of the last `FLAT_STEPS` steps; None if it rose, tasks are
    solved, or none was trained."""
    if len(rows.train) < FLAT_STEPS:
        return None
    recent = rows.train[-FLAT_STEPS:]
    half = FLAT_STEPS // 2
    before = _mean(recent[:half], "success")
    after = _mean(recent[half:], "success")

    # Two standard errors of the difference of two rates.
    episodes = max(_mean(recent, "trajectories") * half, 1.0)
    chance = 2 * (2 * max(before * (1 - before), 0.01) / episodes) ** 0.5
    is_solved = max(before, after) >= UNSOLVED
    has_risen = after - before > chance
    if is_solved or has_risen or not _sum(recent, "trajectories"):
        return None
    return before, after


DIAGNOSES = (
    warmup_gate_unmet,
    worse,
    not_carried,
    blind,
    unrewarded,
    tied,
    truncated,
    failing,
    tool_unused,
    malformed,
    one_reply,
    mismatch,
    entropy,
    dominated,
    flat,
    few_held_out,
    overlapping,
)


def _sum(rows: Sequence[Row], name: str) -> float:
    return sum(number(row.get(name)) or 0.0 for row in rows)


def _mean(rows: Sequence[Row], name: str) -> float:
    """Return the mean of a column over the rows that have it; 0 without any."""
    values = _values(rows, name)
    return sum(values) / len(values) if values else 0.0


def _values(rows: Sequence[Row], name: str) -> list[float]:
    """Return the numbers of a column."""
    numbers = [number(row.get(name)) for row in rows]
    return [value for value in numbers if value is not None]


FILE = "sanity.jsonl"
_COLUMNS = ("sampled", "canonical", "sent")

_MAX_FINDINGS = 40
"""Maximum number of findings reported."""

_MAX_TEXT = 600
"""Maximum characters of a finding's texts."""

_SPACES = str.maketrans({"\n": "\u23ce", "\t": "\u21e5", " ": "\u00b7"})


@dataclass(frozen=True, slots=True)
class RenderFinding:
    """First difference of one cause."""

    cause: str
    sentence: str
    count: int
    """Number of occurrences in the reinforcement steps."""
    where: str
    columns: Sequence[tuple[str, str]]
    """(name, text) of sampled, canonical and sent."""
    key: Sequence[Any]
    """Key of the episode, as records have it; empty if it is not known."""


def findings(run_dir: Path, rows: Sequence[Row], problems: list[str]) -> list[RenderFinding]:
    """Read the render findings of a run, the most frequent cause (by rows of metrics.jsonl)
    first."""
    counts: Counter[str] = Counter()
    for row in rows:
        for name, value in row.items():
            if str(name).startswith("render_mismatch_"):
                counts[str(name).removeprefix("render_mismatch_")] += int(number(value) or 0)

    rows_of_file = islice(lines_of(run_dir / FILE, problems), _MAX_FINDINGS)
    found = [_finding(row, counts) for _, row in rows_of_file]
    return sorted(found, key=lambda finding: (-finding.count, finding.cause))


def _finding(row: Row, counts: Counter[str]) -> RenderFinding:
    """Read one finding; `counts` are the occurrences of each cause, 0 where there are none."""
    key = row.get("key")
    episode = "/".join(map(str, key)) if isinstance(key, list) else ""
    turn = number(row.get("turn"))
    place = "the opening prompt"
    if turn is not None and turn >= 0:
        place = f"turn {int(turn) + 1}"
    where = (
        f"episode {episode}, {place}, id {row.get('position')} of the path, origin "
        f"{row.get('origin')}"
    )

    cause = str(row.get("cause", ""))
    sentences = [str(row.get("sentence") or ""), str(row.get("said") or "")[:_MAX_TEXT]]
    return RenderFinding(
        cause=cause,
        sentence=" ".join(filter(None, sentences)),
        count=counts[cause],
        where=where,
        columns=[(name, str(row.get(name) or "")[:_MAX_TEXT]) for name in _COLUMNS],
        key=key if isinstance(key, list) else (),
    )


def table(found: Sequence[RenderFinding], width: int = 120) -> list[str]:
    """Format findings as terminal lines: three columns under each cause, with visible
    whitespace."""
    lines: list[str] = []
    cell = max(16, (width - 6) // 3)
    for finding in found:
        count = f" ({finding.count} in the steps)" if finding.count else ""
        lines.append("")
        lines.append(single_line(f"{finding.cause}{count}: {finding.sentence}"))
        lines.append(single_line(f"  {finding.where}"))

        texts = [visible(text).translate(_SPACES) for _, text in finding.columns]
        cells = [textwrap.wrap(text, cell, drop_whitespace=False) or [""] for text in texts]
        lines.append("   ".join(name.ljust(cell) for name, _ in finding.columns).rstrip())
        for row in zip_longest(*cells, fillvalue=""):
            lines.append("   ".join(text.ljust(cell) for text in row).rstrip())
    return lines[1:]


class DiagnosingListener(ProgressListener):
    """Forwards everything to another listener, and emits a note when a diagnosis is first made."""

    def __init__(self, watch: ProgressListener) -> None:
        self._watch = watch
        self.episode = watch.episode if isinstance(watch, EpisodeListener) else None
        self._first: list[Mapping[str, Any]] = []
        self._last: deque[Mapping[str, Any]] = deque(maxlen=LAST)
        self._reported: set[str] = set()

    def phase(self, name: str, total: int, unit: str) -> None:
        self._watch.phase(name, total, unit)

    def progress(self, done: int, figures: Mapping[str, Any]) -> None:
        self._watch.progress(done, figures)
        if figures.get("phase") == "train":
            with suppress(Exception):  # a malformed row must not stop the run
                self._report(figures)

    def _report(self, figures: Mapping[str, Any]) -> None:
        """Note what is diagnosed for the first time with a training step."""
        if len(self._first) < LAST:
            self._first.append(figures)
        else:
            self._last.append(figures)

        for diagnosis in diagnose([*self._first, *self._last]):
            if diagnosis.name not in self._reported:
                self._reported.add(diagnosis.name)
                self._watch.note(f"diagnosis: {diagnosis.text}")

    def waiting(self, what: str) -> None:
        self._watch.waiting(what)

    def note(self, text: str) -> None:
        self._watch.note(text)

    def close(self) -> None:
        self._watch.close()


def lines_of_run(run: Path) -> list[str]:
    """Return the diagnoses of a run, one line each."""
    data = read_run(run)
    diagnoses = diagnose(data.rows, data.summary)
    return [single_line(diagnosis.text, 1000) for diagnosis in diagnoses]
