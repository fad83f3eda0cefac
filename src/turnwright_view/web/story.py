"""What happened in a run, in one sentence that its intervals support, and where to look next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, urlencode

from turnwright.display.progress import amount, duration
from turnwright.display.run_data import Row, RunData, integer, mapping, number
from turnwright_view.web.evaluations import HeldOut, find

MAX_NEXT = 5
"""Maximum places to look at."""

JUMP_STEPS = 5
"""Steps whose mean is compared with that of the steps behind them, to find the largest jump."""

MIN_JUMP = 0.1
"""Smallest rise of success that is called a jump."""

percent = "{:.1%}".format


def story_of(
    run: RunData,
    run_id: str,
    evaluations: Sequence[HeldOut],
    played: int,
) -> dict[str, Any]:
    """Return the sentence, the facts beside it, and links to what to look at next."""
    return {
        "sentence": sentence(run, evaluations, played),
        "facts": [list(fact) for fact in facts(run, evaluations)],
        "next": where_to_look(run, run_id, evaluations),
    }


def sentence(run: RunData, evaluations: Sequence[HeldOut], played: int) -> str:
    """Summarize the result in one sentence that the intervals support."""
    before = find(evaluations, "before")
    after = find(evaluations, "after")
    if before is None or after is None:
        return _unfinished(run, played)

    cost = _cost(run)
    taken = f"in {_steps(run)} reinforcement steps"
    if cost:
        taken += f" ({', '.join(cost)})"
    change = f"from {_with_interval(before)} to {_with_interval(after)} {taken}"
    if after.low > before.high:
        text = f"Reinforcement raised held-out success {change}"
    elif after.high < before.low:
        text = f"Reinforcement lowered held-out success {change}"
    else:
        text = (
            f"Held-out success went {change}; the 95% intervals overlap, so no change is "
            "established"
        )

    best = number(run.summary.get("single_turn_best"))
    if best is not None and after.low > best:
        text += f"; a single reply could reach {percent(best)} at best"
    blind = find(evaluations, "after", "blind")
    if blind is not None:
        text += f"; with every image gray the same policy has {percent(blind.success)}"
    return text + "."


def _unfinished(run: RunData, played: int) -> str:
    trained = run.phase("train")
    if trained:
        planned = integer(mapping(run.config.get("train")).get("steps"))
        of = f" of {planned}" if planned > 0 else ""
        text = (
            f"The run has no final evaluation yet: {len(trained)}{of} reinforcement steps are done"
        )
        cost = _cost(run)
        text += f" ({', '.join(cost)})." if cost else "."
        reward = number(trained[-1].get("reward"))
        first = number(trained[0].get("reward"))
        if reward is not None and first is not None and len(trained) > 1:
            text += f" The mean reward went from {first:.3f} to {reward:.3f}."
        elif reward is not None:
            text += f" The last mean reward is {reward:.3f}."
        return text
    if run.rows:
        return "Reinforcement has not started yet."
    if played:
        return f"{played:,} episodes were played; nothing was trained."
    return "This run has no metrics yet."


def _steps(run: RunData) -> int:
    steps = integer(run.summary.get("rl_steps"))
    return steps if steps >= 0 else len(run.phase("train"))


def _with_interval(evaluation: HeldOut) -> str:
    low, high = 100 * evaluation.low, 100 * evaluation.high
    return f"{percent(evaluation.success)} [{low:.1f}, {high:.1f}]"


def _cost(run: RunData) -> list[str]:
    """Return the time and the tokens of a run, as far as they are known."""
    seconds = number(run.summary.get("wall_s"))
    if seconds is None:
        times = [number(row.get("time_s")) for row in run.rows[-1:]]
        seconds = times[0] if times else None
    cost = []
    if seconds is not None and seconds >= 0:
        cost.append(duration(seconds))
    tokens = sum(number(row.get("sampled_tokens")) or 0 for row in run.phase("train"))
    if tokens > 0:
        cost.append(f"{amount(tokens)} sampled tokens")
    return cost


def facts(run: RunData, evaluations: Sequence[HeldOut]) -> list[tuple[str, str]]:
    """Return the headline figures as (label, value)."""
    turns = [find(evaluations, name) for name in ("before", "after")]
    means = [f"{one.turns:.1f}" for one in turns if one is not None and one.turns is not None]
    tokens = sum(number(row.get("sampled_tokens")) or 0 for row in run.phase("train"))
    trained = sum(number(row.get("trained_tokens")) or 0 for row in run.phase("train"))
    figures = [
        ("reinforcement steps", _whole(run.summary.get("rl_steps"))),
        ("wall time", _duration(run.summary.get("wall_s"))),
        ("CPU time", _duration(run.summary.get("cpu_s"))),
        ("held-out tasks", _whole(run.summary.get("eval_tasks", run.summary.get("n_eval")))),
        ("turns of an episode", " \u2192 ".join(means)),
        ("sampled tokens", amount(tokens) if tokens > 0 else ""),
        ("trained tokens", amount(trained) if trained > 0 else ""),
        ("seed", _whole(run.summary.get("seed", run.config.get("seed")))),
    ]
    return [(label, text) for label, text in figures if text]


def _whole(value: Any) -> str:
    whole = integer(value)
    return str(whole) if whole >= 0 else ""


def _duration(value: Any) -> str:
    seconds = number(value)
    return "" if seconds is None or seconds < 0 else duration(seconds)


def where_to_look(
    run: RunData, run_id: str, evaluations: Sequence[HeldOut]
) -> list[dict[str, str]]:
    """Return what to look at next, each with the address of its episodes."""
    places: list[dict[str, str]] = []

    def look(text: str, **filter_: str) -> None:
        link = f"#/run/{quote(run_id, safe='')}/episodes?{urlencode(filter_)}"
        places.append({"text": text, "link": link})

    trained = run.phase("train")
    if trained:
        _look_at_last_step(trained[-1], look)
        jump = largest_jump(trained)
        if jump is not None:
            first, last, before, after = jump
            look(
                f"Success rose most between steps {first} and {last}: from {percent(before)} to "
                f"{percent(after)}",
                phase="train",
                step_min=str(first),
                step_max=str(last),
            )

    after_training = find(evaluations, "after")
    if after_training is not None and after_training.n is not None:
        failing = round((1 - after_training.success) * after_training.n)
        if failing:
            which = (
                "1 held-out episode fails" if failing == 1 else f"{failing} held-out episodes fail"
            )
            look(f"{which} after training", phase="eval-after-sampled", sort="worst")
    return places[:MAX_NEXT]


def _look_at_last_step(last: Row, look: Any) -> None:
    """Look at what did not succeed in the last step, and at its groups without signal."""
    step = str(integer(last.get("step")))
    of_step = {"phase": "train", "step_min": step, "step_max": step}
    failed = number(last.get("failed_share")) or 0.0
    if failed > 0:
        look(f"{percent(failed)} of the episodes of the last step failed", **of_step, error="*")

    success = number(last.get("success"))
    episodes = int(number(last.get("trajectories")) or 0)
    if success is not None and success < 1:
        failing = f"{percent(1 - success)} of the episodes"
        if episodes > 0:
            failing = f"{round((1 - success) * episodes)} of {episodes} episodes"
        look(f"{failing} of the last step did not succeed", **of_step, sort="worst")

    groups = int(number(last.get("groups")) or 0)
    tied = int(number(last.get("groups_no_signal")) or 0)
    if groups > 0 and tied > 0:
        look(f"{tied} of {groups} groups of the last step had equal rewards", **of_step, tie="yes")


def largest_jump(trained: Sequence[Row]) -> tuple[int, int, float, float] | None:
    """Return first and last step of the largest rise of success, and its means before and after;
    None if nothing rose by `MIN_JUMP`."""
    points: list[tuple[int, float]] = []
    for row in trained:
        success = number(row.get("success"))
        step = integer(row.get("step"))
        if success is not None and step >= 0:
            points.append((step, success))

    best: tuple[int, int, float, float] | None = None
    for middle in range(JUMP_STEPS, len(points) - JUMP_STEPS + 1):
        earlier = points[middle - JUMP_STEPS : middle]
        later = points[middle : middle + JUMP_STEPS]
        before = sum(success for _, success in earlier) / JUMP_STEPS
        after = sum(success for _, success in later) / JUMP_STEPS
        if after - before >= MIN_JUMP and (best is None or after - before > best[3] - best[2]):
            best = (earlier[0][0], later[-1][0], before, after)
    return best
