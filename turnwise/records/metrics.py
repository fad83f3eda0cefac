"""Rollout metrics with their documentation; success rates and intervals.

Figures of finished episodes, turn by turn: what a row of metrics.jsonl says of a rollout. No tensors, no model.

`glossary.py` says what each name means. Whatever a model, a tool or an environment can name (tools, exceptions, parts of
rewards) is counted under at most `MOST_NAMES` names, the rest under `(other)`: a model that makes up a tool a turn must not
fill a disk.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from turnwise.types import Group, Origin, Status, Trajectory, Turn

# ruff: noqa: E501 (a line is a row of the table)


class MetricDoc(NamedTuple):
    """One figure, or one family of them where the name ends in a part in `<>`."""

    name: str
    unit: str
    meaning: str
    advice: str
    """What to do when it moves."""


def _rows(text: str) -> tuple[MetricDoc, ...]:
    lines = [[part.strip() for part in line.split("|")] for line in text.strip().splitlines()]
    return tuple(MetricDoc(*line) for line in lines)


METRIC_GROUPS: dict[str, tuple[MetricDoc, ...]] = {
    "Where a row belongs": _rows("""
phase | name | `warmup`, `gate`, `eval` or `train` | nothing
step | count | of the phase, from 1 in `warmup` and `train` | nothing
name | name | of an evaluation (`before`, `after`, `step-N`) | nothing
mode | name | of an evaluation: `sampled` or `greedy` | nothing
time_s | s | wall-clock time of the run so far, earlier processes included | nothing
cpu_s | s | CPU time of the run so far | far under `time_s`: the run waits for its world or its engine, see `seconds.<phase>`
"""),
    "Rewards": _rows("""
reward | reward | mean over episodes that have one | falling: read the worst episodes of the step; flat: see `groups_no_signal`
success | share | episodes with a reward of at least `eval.success` | as `reward`
rewards.<part> | reward | mean of a named part of the reward | one rises while the others fall: the policy trades them; change weights
rewards_spread.<part> | reward | mean over groups of a part's standard deviation within the group: what it can move | a part at 0 teaches nothing; one far over the others is all that is learned
reward_by_turn.<turn> | reward | mean that a turn's step paid, by its number | all in the last turn: the reward is sparse, long episodes learn slowly
reward_counts.<name> | count | what judges, simulated users and rewards counted (`judge_*`, `user_*`, `reward_missing/*`) | missing rewards: look at the judge's errors
groups | count | tasks of the step | nothing
groups_no_signal | count | groups whose episodes all have the same reward, or none | near `groups`: nothing is learned; easier or harder tasks, larger groups, finer rewards
groups_solved | count | of those, groups in which every episode succeeded | near `groups`: the tasks are done with, take harder ones
groups_unsolved | count | of those, groups in which no episode did | near `groups`: too hard; demonstrations, easier tasks, rewards in between
by_env.<env>.success | share | success of one environment's episodes, where there are several | one falls while others rise: change weights
by_env.<env>.n | count | its episodes with a reward | nothing
n | count | episodes of an evaluation that have a reward | nothing
ci | share | Wilson's 95% interval of `success` | wide: more `eval.tasks`
failed | count | episodes of an evaluation without a reward | over 0: see `errors.<where>`
demo_reward | reward | mean of the demonstrations of the warm-up | low: the demonstrator fails, imitation cannot do better
passed | yes or no | whether a look at the gate met it | never: see the diagnosis "the warm-up never grounded"
"""),
    "How episodes went": _rows("""
turns | count | mean turns of an episode | to 1: the model has stopped using its world; to the limit: it does not come to an end
turns_spread.<p50, p95, max> | count | median, 95th percentile and maximum of turns | p95 at `limits.turns`: raise it, or reward shorter ways
turns_histogram.<turns> | count | episodes with so many turns | two humps: two strategies; look at one of each
stops.<reason> | count | episodes by why they ended | other reasons than `done` grow: see the next rows
truncated_share | share | episodes that a limit cut off | over a tenth: see which limit
truncations.<reason> | count | episodes cut off, by limit | `turn_length`: replies do not end; `context`, `episode_tokens`: observations are long; `max_turns`: no end in sight
failed_share | share | episodes that broke; nothing is trained on them | over 0: read `errors.<where>`
errors.<where> | count | episodes that broke, by phase and exception (`step/ConnectionError`) | mend the world: `turnwise view` shows the traceback
retries.<where> | count | failures that were recovered from, by phase and exception | growing: the world is near its capacity, lower `rollout.concurrency`
failed_plays | count | plays of episodes that the world, the engine or a deadline failed and that were played again (`rollout.max_retries`, `--resume`); there where there were any | as `errors.<where>`
failed_play_tokens | count | ids that those plays sampled; in none of the other counts, never trained | as `failed_plays`
continued | count | calls that the engine aborted and that went on (weights that arrived in between) | growing: updates interrupt long replies
branches.<reason> | count | how often history was rewritten, by reason | growing: the same ids are computed more than once
invalid_actions | count | actions that an environment refused | growing: the model forgets the form; falling is learning
"""),
    "Tools": _rows("""
tools_told | count | most tools that the model was told of in an episode of the run | 0 where there should be some: the environment gives none
tool_users | share | episodes that called a tool at least once | to 0: the model answers from memory; does the reward need the tool, does the template show it?
tool_calls.<tool> | count | calls by tool; `(unknown)` are of no tool there is | one tool takes all: are the others described?
tool_failures.<tool> | count | calls answered by an error, by tool | high share of calls: the schema or its description misleads
tool_mistakes.<kind> | count | the same by kind (`missing_argument`, `raised`, ...) | `raised`: the tool; anything else: the model's form
tool_seconds.<tool>.<p50, p95, max> | s | latency of calls | p95 far over p50: a slow service holds whole steps up
malformed_calls.<kind> | count | calls that could not be read, by kind | growing: does the parser fit the model's format? `turnwise check --model`
"""),
    "Tokens": _rows("""
sampled_tokens | count | ids that the model sampled | see `reply_tokens.<of>`
trained_tokens | count | ids that carried loss | far under `sampled_tokens`: see `untrained.<reason>`
untrained.<reason> | count | sampled ids of weight 0, by reason | `no_signal` grows as tasks are solved; `failed` must not
tokens.<origin> | count | ids by who wrote them: prompt, template, model, env | `env` far over `model`: observations cost most of the time
reply_tokens.<mean, p50, p95, max> | ids | length of a reply | rising with a flat reward: length is rewarded by accident; at `limits.turn_tokens`: cut
episode_tokens.<p50, p95, max> | ids | all ids of an episode, branches included | max near the context: episodes will be cut
repetition | share | runs of 4 ids within a reply that stood in it before | over 0.3: the model loops; lower lr, look for a reward that is paid for length
images | count | images and clips among the ids of a step's episodes | falls to 0 in a visual task: nothing is shown, see the media store
image_tokens | ids | ids of their blocks | large: lower `max_pixels`
image_token_share | share | of all ids | near 1: most of training is pixels
cache_hit | share | ids of contexts that the engine had in its cache | low over several turns: sessions wander between servers, or history is rewritten
draft_acceptance | share | ids that speculative decoding drafted which were then sampled | under 0.5: little repeats; lower `engine.speculate`, or set it to 0
neutralised | count | control texts in messages that were encoded as plain text | over 0: a world, or a model through it, writes control tokens
injections.<role> | count | control texts met, by the role of the message | `tool` or `user`: somebody tries, read those episodes
template_checks | count | episodes that the sanity check looked at | 0: nothing is checked, see `rollout.sanity`
template_breaks_<cause> | count | episodes that differ from a full render, by cause | over 0: `turnwise view` shows three columns
template_check_failed_<error> | count | looks that failed themselves | over 0: a bug, report it
"""),
    "Training": _rows("""
loss | nats | of the policy (around 0 by construction), or of demonstrations | NaN stops the run
grad_norm | 1 | of the gradient, before it is scaled down | jumps: lower lr
ratio_mean | 1 | new over old probability, mean of tokens | away from 1: too many updates on one step's episodes
clip_fraction | share | tokens whose ratio was clipped | over 0.2: lower lr, fewer epochs
entropy | nats | of the policy, per sampled token | to 0: exploration has ended; higher temperature, lower lr, more varied tasks
kl | nats | to the reference policy, where `train.kl` is over 0 | growing fast: the policy leaves its start; raise `train.kl`
tree_share | share | batches whose shared beginnings were computed once, as a tree | 0: `train.batching`, or it would not pay
tree_gain | ratio | estimated cost of rows by that of trees | under 1.1 rows are fed one by one
tree_unique | share | tokens left where what rows share is counted once | near 1: rows share little
agreement | cosine | of a step's first gradient with those before | around 0: noise, use larger groups
advantage_abs | 1 | mean size of advantages | to 0: rewards tie
lr | 1 | learning rate that was used | nothing
updates | count | optimizer steps taken | 0: no group gave a signal
trajectories | count | of the step | nothing
trajectories_trained | count | those with an advantage | 0: nothing was learned in the step
groups_refilled | count | groups played in place of others without signal, with `train.refill` | near `rollout.groups` times `refill`: nearly all tasks are solved or hopeless
used | share | the same over all trajectories | falls as tasks are solved; at 0 see `groups_no_signal`
mismatch_mean | nats | mean of the trainer's logprob less the engine's, in size | rising: engine and trainer compute different policies
mismatch_p95 | nats | 95th percentile of the same | as `mismatch_mean`
mismatch_max | nats | its maximum | over `train.max_mismatch` the run stops
mismatch_k3 | nats | estimate of the KL between the two | as `mismatch_mean`
mismatch_by_turn.<turn> | nats | mean of the same by the number of the turn | rising with turns: what later prompts show differs between engine and trainer
ess | share | effective sample size of importance weights between the two | under 0.9: updates rest on few tokens
correction_mean | 1 | mean weight that `train.correction` gave tokens | under 0.9 or over 1.1: engine and trainer are far apart, see `mismatch_mean`
correction_ess | share | effective sample size of those weights | under 0.9: updates rest on few tokens
correction_masked | share | tokens that it left out | growing: the correction hides a mismatch instead of mending it
"""),
    "Time and memory": _rows("""
rollout_s | s | wall-clock time of a step's episodes | see `seconds.<phase>.<of>`
train_s | s | of its training | see `trained_tokens_per_s`
rollout_over_train | 1 | the first over the second, where there was an update | far over 1: generation or the world is the bottleneck; more concurrency, faster engine
tokens_per_s | ids/s | sampled, over `rollout_s`; in the warm-up learned, over `train_s` | falling at equal lengths: the engine waits
trained_tokens_per_s | ids/s | trained, over `train_s` | falling: padding, swapping
tokens_trained | count | ids learned in a warm-up step | nothing
seconds.<phase>.<p50, p95, max, sum> | s | of an episode by phase: generate, tool, environment, reward, and wait (reset, rendering, waiting for its place in the loop) | p95 far over p50: a few episodes hold the step up
peak_memory_mib | MiB | most memory that the process has held so far | growing step by step: a leak, or longer episodes
peak_gpu_memory_mib | MiB | of the GPU | near its size: smaller `train.micro_tokens`
"""),
}


def markdown() -> str:
    """The tables of docs/metrics.md."""
    parts = []
    for title, figures in METRIC_GROUPS.items():
        lines = [f"## {title}", "", "| name | unit | meaning | what to do when it moves |", "|---|---|---|---|"]
        lines += [f"| `{f.name}` | {f.unit} | {f.meaning} | {f.advice} |" for f in figures]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def metric_doc(path: str) -> MetricDoc | None:
    """The figure that a name in a row is of, as `flat` writes it (`seconds.tool.p95`); None for one that stands in no table."""
    for one in METRICS:
        if one.name == path or (one.name.endswith(">") and path.startswith(one.name.partition("<")[0])):
            return one
    return None


METRICS: tuple[MetricDoc, ...] = tuple(f for figures in METRIC_GROUPS.values() for f in figures)


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


Z95 = 1.959963984540054
"""Standard normal quantile of 0.975."""


def wilson(successes: float, n: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a proportion, 95% unless told; (0, 1) without observations.

    Source: Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", JASA 22 (1927), eq. for p0.

    Raises:
        ValueError: when `successes` is not between 0 and `n`.
    """
    if n < 0 or not 0 <= successes <= max(n, 0):
        raise ValueError(f"successes must be from 0 to n, not {successes} of {n}")
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    scale = 1 + z * z / n
    centre = (p + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # The ends are exactly 0 and 1 where nothing, or everything, succeeded; rounding would leave 1e-17.
    return (0.0 if successes == 0 else max(0.0, centre - half)), (1.0 if successes == n else min(1.0, centre + half))


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of `k` episodes succeeds, unbiased, from `c` successes of `n` episodes of one task.

    Source: Chen et al., "Evaluating Large Language Models Trained on Code", arXiv 2107.03374, eq. 1: 1 - C(n-c, k) / C(n, k).

    Raises:
        ValueError: unless 0 <= c <= n and 1 <= k <= n.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, not n={n}, c={c}, k={k}")
    if n - c < k:
        return 1.0
    # As a product, since the binomials themselves overflow a float for large n.
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def mean_interval(values: Sequence[float], z: float = Z95) -> tuple[float, float]:
    """95% interval of the mean over tasks of values in [0, 1] (pass@k, success over several episodes of each task).

    Tasks are the independent units, so the standard error is that of their values (Miller, "Adding Error Bars to Evals",
    arXiv 2411.00640, eq. 1). Values that are all 0 or 1 are a proportion: Wilson's interval; so are values that all agree,
    where the standard error would be 0.
    """
    n = len(values)
    mean = sum(values) / n if n else 0.0
    variance = sum((value - mean) ** 2 for value in values) / (n - 1) if n > 1 else 0.0
    if variance == 0.0 or all(value in (0.0, 1.0) for value in values):
        return wilson(min(max(mean * n, 0.0), n), n, z)
    half = z * math.sqrt(variance / n)
    return max(0.0, mean - half), min(1.0, mean + half)
