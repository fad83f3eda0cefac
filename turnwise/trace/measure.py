"""Figures of finished episodes, turn by turn: what a row of metrics.jsonl says of a rollout. No tensors, no model.

`glossary.py` says what each name means. Whatever a model, a tool or an environment can name (tools, exceptions, parts of
rewards) is counted under at most `MOST_NAMES` names, the rest under `(other)`: a model that makes up a tool a turn must not
fill a disk.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from turnwise.types import Group, Origin, Status, Trajectory, Turn

MOST_NAMES = 32
MOST_TURNS = 32
"""Turns that have figures of their own; later ones are left out of those."""
REPEATED = 4
"""Length of the runs of ids whose repetition is counted."""
UNKNOWN = "(unknown)"
UNNAMED = "(unnamed)"
OTHER = "(other)"
SECONDS = ("generate", "tool", "environment", "reward", "wait")

Row = dict[str, Any]


def rollout_metrics(trajectories: Sequence[Trajectory], *, success: float = 1.0) -> Row:
    """Figures of episodes by name; families are dicts, and empty ones are left out.

    Args:
        trajectories: finished episodes.
        success: a reward of at least this is a success.

    Returns:
        What stands under the same names in metrics.jsonl; docs/metrics.md has the table.
    """
    episodes = max(len(trajectories), 1)
    stops = [t.stop for t in trajectories if t.stop is not None]
    cut = Counter(str(stop) for stop in stops if stop.status is Status.TRUNCATED)
    row: Row = {
        "turns_spread": distribution_summary([len(t.turns) for t in trajectories], mean=False),
        "turns_histogram": {str(n): count for n, count in sorted(Counter(len(t.turns) for t in trajectories).items())},
        "truncated_share": cut.total() / episodes,
        "truncations": dict(cut.most_common()),
        "failed_share": sum(stop.failed for stop in stops) / episodes,
        "errors": top_counts(f"{t.error.phase}/{t.error.type}" for t in trajectories if t.error is not None),
        "retries": top_counts(f"{failure.phase}/{failure.type}" for t in trajectories for failure in t.failures),
        "continued": sum(max(0, len(turn.spans) - 1) for turn in _turns(trajectories)),
        "seconds": _seconds(trajectories),
        "branches": _summed(t.branches for t in trajectories),
        "invalid_actions": sum(int(t.metrics.get("invalid_actions", 0)) for t in trajectories),
        "malformed_calls": _counted(trajectories, "malformed_", besides=("malformed_calls",)),
        "neutralised": sum(int(t.metrics.get("neutralised", 0)) for t in trajectories),
        "injections": _counted(trajectories, "control_text_"),
        "cache_hit": _cache_hit(trajectories),
        "draft_acceptance": _draft_acceptance(trajectories),
    }
    row |= _tools(trajectories) | _tokens(trajectories) | _rewards(trajectories, success)
    return {name: value for name, value in row.items() if value not in ({}, None)}


def distribution_summary(values: Sequence[float], *, mean: bool = True) -> dict[str, float]:
    """Mean, median, 95th percentile (the value that so many are at or under) and maximum; empty of nothing."""
    if not values:
        return {}
    ordered = sorted(values)
    last = len(ordered) - 1
    found = {"p50": ordered[_at(0.5, last)], "p95": ordered[_at(0.95, last)], "max": ordered[-1]}
    return {"mean": math.fsum(ordered) / len(ordered)} | found if mean else found


def _at(share: float, last: int) -> int:
    return min(last, max(0, math.ceil(share * (last + 1)) - 1))


def top_counts(names: Iterable[str]) -> dict[str, int]:
    """How often each name is there, the commonest first; names past `MOST_NAMES` are counted together."""
    counts = Counter(names).most_common()
    found = {name[:80]: count for name, count in counts[:MOST_NAMES]}
    rest = sum(count for _, count in counts[MOST_NAMES:])
    return found | {OTHER: found.get(OTHER, 0) + rest} if rest else found


def flatten_row(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a row as trackers take them: `stops.done`, `seconds.tool.p95`; what is no number is left out."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from flatten_row(value, f"{prefix}{name}.")
        elif isinstance(value, (int, float)) and math.isfinite(value):
            yield f"{prefix}{name}", float(value)


def _turns(trajectories: Sequence[Trajectory]) -> Iterator[Turn]:
    return (turn for t in trajectories for turn in t.turns)


def _summed(counts: Iterable[Mapping[str, float]]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for one in counts:
        found.update({name: int(count) for name, count in one.items()})
    return dict(found.most_common(MOST_NAMES))


def _counted(trajectories: Sequence[Trajectory], prefix: str, besides: Sequence[str] = ()) -> dict[str, int]:
    """The counters of episodes that begin with a prefix, without it."""
    return _summed(
        {name.removeprefix(prefix): n for name, n in t.metrics.items() if name.startswith(prefix) and name not in besides}
        for t in trajectories
    )


def calls_of(turn: Turn) -> list[tuple[str, float, str | None]]:
    """(tool, seconds, mistake or None) of each call that a turn made, as its environment wrote them down.

    Of an environment that does not, the names are those that the reply gives, and seconds are NaN.
    """
    found = turn.info.get("tool_log")
    if isinstance(found, Sequence) and not isinstance(found, str):
        rows = [one for one in found if isinstance(one, Mapping)]
        return [(str(one.get("tool") or UNNAMED), _finite(one.get("s")), one.get("error")) for one in rows]
    return [(call.name or UNNAMED, math.nan, call.cause if call.error is not None else None) for call in turn.reply.tool_calls]


def _finite(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _tools(trajectories: Sequence[Trajectory]) -> Row:
    calls: list[tuple[str, float, str | None]] = []
    callers = 0
    for trajectory in trajectories:
        before = len(calls)
        for turn in trajectory.turns:
            calls += [(UNKNOWN if error == "unknown_tool" else tool, s, error) for tool, s, error in calls_of(turn)]
        callers += len(calls) > before
    counts = top_counts(tool for tool, _, _ in calls)
    timed: dict[str, list[float]] = {}
    for tool, seconds, _ in calls:
        if math.isfinite(seconds):
            timed.setdefault(tool if tool in counts else OTHER, []).append(seconds)
    return {
        "tool_users": callers / max(len(trajectories), 1),
        "tool_calls": counts,
        "tool_failures": top_counts(tool for tool, _, error in calls if error is not None),
        "tool_mistakes": top_counts(error for _, _, error in calls if error is not None),
        "tool_seconds": {tool: distribution_summary(values, mean=False) for tool, values in timed.items()},
    }


def _seconds(trajectories: Sequence[Trajectory]) -> dict[str, dict[str, float]]:
    """Seconds of an episode by phase; `wait` is what is left of its wall-clock time."""
    found: dict[str, list[float]] = {name: [] for name in SECONDS}
    for trajectory in trajectories:
        generate = math.fsum(turn.generate_s for turn in trajectory.turns)
        world = math.fsum(turn.env_s for turn in trajectory.turns)
        # Calls of one turn may run side by side, so that their sum is longer than the step that waited for them.
        tool = math.fsum(min(turn.env_s, _known(turn)) for turn in trajectory.turns)
        rest = trajectory.wall_s - generate - world - trajectory.reward_s
        for name, value in zip(SECONDS, (generate, tool, world - tool, trajectory.reward_s, max(0.0, rest)), strict=True):
            found[name].append(value)
    return {
        name: distribution_summary(values, mean=False) | {"sum": math.fsum(values)} for name, values in found.items() if values
    }


def _known(turn: Turn) -> float:
    return math.fsum(s for _, s, _ in calls_of(turn) if math.isfinite(s)) if turn.reply.tool_calls else 0.0


def _cache_hit(trajectories: Sequence[Trajectory]) -> float | None:
    context = sum(turn.context for turn in _turns(trajectories))
    return sum(turn.cached for turn in _turns(trajectories)) / context if context else None


def _draft_acceptance(trajectories: Sequence[Trajectory]) -> float | None:
    drafted = sum(t.metrics.get("draft_ids", 0) for t in trajectories)
    return sum(t.metrics.get("draft_ids_accepted", 0) for t in trajectories) / drafted if drafted else None


def _tokens(trajectories: Sequence[Trajectory]) -> Row:
    origins: Counter[str] = Counter()
    replies: list[int] = []
    whole: list[int] = []
    runs = repeats = images = shown = 0
    for trajectory in trajectories:
        for span in trajectory.spans:
            origins[str(span.origin)] += len(span.ids)
            images += len(span.media)
            shown += sum(block.length for block in span.media)
            if span.origin is Origin.MODEL and (more := len(span.ids) - REPEATED + 1) > 0:
                runs += more
                repeats += more - len(set(zip(*(islice(span.ids, i, None) for i in range(REPEATED)), strict=False)))
        replies += [sum(len(trajectory.spans[index].ids) for index in turn.spans) for turn in trajectory.turns]
        whole.append(sum(len(span.ids) for span in trajectory.spans))
    row: Row = {
        "tokens": dict(sorted(origins.items())),
        "reply_tokens": distribution_summary(replies),
        "episode_tokens": distribution_summary(whole, mean=False),
        "repetition": repeats / runs if runs else None,
    }
    if images:
        row |= {"images": images, "image_tokens": shown, "image_token_share": shown / max(sum(whole), 1)}
    return row


def _rewards(trajectories: Sequence[Trajectory], success: float) -> Row:
    by_turn: dict[int, list[float]] = {}
    for trajectory in trajectories:
        for number, turn in enumerate(trajectory.turns[:MOST_TURNS], 1):
            if turn.reward is not None:
                by_turn.setdefault(number, []).append(turn.reward)
    groups = groups_of(trajectories)
    known = [rewards for group in groups if (rewards := [r for r in group.rewards if r is not None])]
    tied = [rewards for rewards in known if max(rewards) - min(rewards) <= 1e-12 * max(1.0, *map(abs, rewards))]
    return {
        "reward_by_turn": {str(n): math.fsum(values) / len(values) for n, values in sorted(by_turn.items())},
        "rewards_spread": _component_spread(groups),
        "groups": len(groups),
        "groups_no_signal": len(tied) + len(groups) - len(known),
        "groups_solved": sum(rewards[0] >= success for rewards in tied),
        "groups_unsolved": sum(rewards[0] < success for rewards in tied),
    }


def groups_of(trajectories: Sequence[Trajectory]) -> list[Group]:
    """Trajectories by phase, step and task."""
    groups: dict[tuple[str, int, str], Group] = {}
    for t in trajectories:
        groups.setdefault((t.key.phase, t.key.step, t.key.task), Group(t.task, [])).trajectories.append(t)
    return list(groups.values())


def _component_spread(groups: Sequence[Group]) -> dict[str, float]:
    """Mean over groups of the standard deviation of each part of the reward: how much of an advantage it can make."""
    found: dict[str, list[float]] = {}
    for group in groups:
        names = dict.fromkeys(name for t in group.trajectories for name in t.rewards)
        for name in islice(names, MOST_NAMES):
            values = [t.rewards[name] for t in group.trajectories if name in t.rewards]
            mean = math.fsum(values) / len(values)
            found.setdefault(name, []).append(math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values)))
    return {name: math.fsum(values) / len(values) for name, values in found.items()}
