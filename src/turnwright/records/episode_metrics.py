"""Metrics of rollouts, their documentation, success rates and intervals.

`rollout_metrics` reduces the episodes of a step to one row of numbers; `METRIC_GROUPS` documents
each of them, those of training included, which `training/metrics.py` computes. `wilson`,
`pass_at_k` and `mean_interval` are the statistics of evaluations.

Names chosen by a model, a tool or an environment (tools, exceptions, parts of rewards) are counted
under at most `MAX_NAMES` names, the rest under `(other)`: a model that invents a tool per turn must
not fill a disk.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from turnwright.types import Group, GroupKey, Origin, Status, Trajectory, Turn


class MetricDoc(NamedTuple):
    """Documentation of one metric, or of a family of metrics if the name ends in a part in `<>`."""

    name: str
    unit: str
    meaning: str
    advice: str
    """What to do when the metric changes."""


def _rows(text: str) -> tuple[MetricDoc, ...]:
    lines = [[part.strip() for part in line.split("|")] for line in text.strip().splitlines()]
    return tuple(MetricDoc(*line) for line in lines)


METRIC_GROUPS: dict[str, tuple[MetricDoc, ...]] = {
    "Where a row belongs": _rows("""
phase | name | `warmup`, `gate`, `eval` or `train` | nothing
step | count | step of the phase, from 1 in `warmup` and `train` | nothing
name | name | name of an evaluation (`before`, `after`, `step-N`) | nothing
mode | name | sampling of an evaluation: `sampled` or `greedy` | nothing
time_s | s | wall-clock time of the run so far, earlier processes included | nothing
cpu_s | s | CPU time of the run so far | far under `time_s`: the run waits for its environment or its engine, see `seconds.<phase>`
"""),  # noqa: E501
    "Rewards": _rows("""
reward | reward | mean over rewarded episodes | falling: read the worst episodes of the step; flat: see `groups_no_signal`
success | share | episodes with a reward of at least `eval.success` | as `reward`
rewards.<part> | reward | mean of a named part of the reward | one rises while the others fall: the policy trades them; change weights
rewards_spread.<part> | reward | mean over groups of the standard deviation of a part within the group | a part at 0 teaches nothing; one far over the others dominates learning
reward_by_turn.<turn> | reward | mean step reward, by turn number | all in the last turn: the reward is sparse, long episodes learn slowly
reward_counts.<name> | count | counters of judges, simulated users and rewards (`judge_*`, `user_*`, `reward_missing/*`) | missing rewards: check the judge's errors
groups | count | tasks of the step | nothing
groups_no_signal | count | groups whose episodes all have the same reward, or none; penalties and credit by turn are not looked at (`untrained.no_signal`) | near `groups`: nothing is learned; use easier or harder tasks, larger groups, finer rewards
groups_solved | count | of those, groups in which every episode succeeded | near `groups`: the tasks are solved, use harder ones
groups_unsolved | count | of those, groups in which no episode succeeded | near `groups`: too hard; use demonstrations, easier tasks, intermediate rewards
by_env.<env>.success | share | success in one environment, if there are several | one falls while others rise: change weights
by_env.<env>.n | count | rewarded episodes of that environment | nothing
n | count | rewarded episodes of an evaluation | nothing
ci | share | Wilson's 95% interval of `success` | wide: more `eval.tasks`
failed | count | episodes of an evaluation without a reward | over 0: see `errors.<where>`
demo_reward | reward | mean reward of the warm-up's demonstrations | low: the demonstrator fails, imitation cannot do better
gate_passed | yes or no | whether a gate evaluation met the gate | never: see the diagnosis "the warmup gate is not met"
"""),  # noqa: E501
    "How episodes went": _rows("""
turns | count | mean turns of an episode | to 1: the model no longer uses its environment; to the limit: it does not finish
turns_spread.<p50, p95, max> | count | median, 95th percentile and maximum of turns | p95 at `limits.turns`: raise it, or reward shorter solutions
turns_histogram.<turns> | count | episodes by number of turns | two peaks: two strategies; read one of each
stops.<reason> | count | episodes by stop reason | reasons other than `done` grow: see the next rows
truncated_share | share | episodes truncated by a limit | over a tenth: see which limit
truncations.<reason> | count | truncated episodes, by limit | `turn_length`: replies do not end; `context`, `episode_tokens`: observations are long; `max_turns`: no end in sight
failed_share | share | failed episodes, which are not trained on | over 0: read `errors.<where>`
errors.<where> | count | failed episodes, by phase and exception (`step/ConnectionError`) | fix the environment: `turnwright view` shows the traceback
retries.<where> | count | recovered failures, by phase and exception | growing: the environment is near its capacity, set `rollout.environments`
failed_plays | count | failed plays of episodes that were played again (`rollout.max_retries`, `--resume`); absent if there were none | as `errors.<where>`
failed_play_tokens | count | ids sampled in those plays; in no other count, never trained | as `failed_plays`
calls_continued | count | calls aborted by the engine (weight updates) and then continued | growing: updates interrupt long replies
branches.<reason> | count | history rewrites, by reason | growing: the same ids are computed more than once
resume.<what> | count | interrupted episodes that could not go on from the journal (`new_attempts`), recorded turns and tokens that they did not use (`lost_turns`, `lost_tokens`), and steps with effects that may have run before the kill and ran again (`steps_in_doubt`) | growing: the environment is not deterministic, or it has effects and no snapshots; `retries.<where>` and `turnwright view` have the reason
invalid_actions | count | actions that an environment rejected | growing: the model loses the format; falling is learning
"""),  # noqa: E501
    "Tools": _rows("""
tools_offered | count | maximum number of tools offered to the model in an episode of the run | 0 where there should be some: the environment offers none
tool_users | share | episodes that called a tool at least once | to 0: the model answers from memory; does the reward need the tool, does the template render it?
tool_calls.<tool> | count | calls by tool; `(unknown)` are calls of unknown tools | one tool takes all: are the others described?
tool_failures.<tool> | count | calls answered by an error, by tool | high share of calls: the schema or its description misleads
tool_mistakes.<kind> | count | the same by kind (`missing_argument`, `raised`, ...) | `raised`: the tool; anything else: the model's format
tool_seconds.<tool>.<p50, p95, max> | s | latency of calls | p95 far over p50: a slow service delays steps
malformed_calls.<kind> | count | unparsable calls, by kind | growing: does the parser fit the model's format? `turnwright check --model`
"""),  # noqa: E501
    "Tokens": _rows("""
sampled_tokens | count | ids that the model sampled | see `reply_tokens.<of>`
trained_tokens | count | ids in the loss | far under `sampled_tokens`: see `untrained.<reason>`
untrained.<reason> | count | sampled ids of weight 0, by reason | `no_signal` grows as tasks are solved; `failed` must not
tokens.<origin> | count | ids by origin: prompt, template, model, env | `env` far over `model`: observations cost most of the time
reply_tokens.<mean, p50, p95, max> | ids | length of a reply | rising with a flat reward: length is rewarded by accident; at `limits.turn_tokens`: truncated
episode_tokens.<p50, p95, max> | ids | all ids of an episode, branches included | max near the context: episodes will be truncated
repetition | share | repeated runs of 4 ids within a reply | over 0.3: the model loops; lower lr, check whether length is rewarded
images | count | images and clips in a step's episodes | falls to 0 in a visual task: check the media store
image_tokens | ids | ids of their blocks | large: lower `max_pixels`
image_token_share | share | share of image ids in all ids | near 1: most of training is pixels
cache_hit | share | context ids that the engine had in its cache | low over several turns: sessions change servers, or history is rewritten
draft_acceptance | share | drafted ids of speculative decoding that were then sampled | under 0.5: little repeats; lower `engine.speculate`, or set it to 0
control_text_neutralized | count | control texts in messages that were encoded as plain text | over 0: an environment, or a model through it, writes control tokens
control_text.<role> | count | control texts by the role of the message | `tool` or `user`: a possible attack, read those episodes
render_checks | count | episodes checked by the sanity check | 0: nothing is checked, see `rollout.sanity`
render_mismatch_<cause> | count | episodes that differ from a complete render, by cause | over 0: `turnwright view` shows three columns
render_check_failed_<error> | count | checks that raised an exception | over 0: a bug, report it
"""),  # noqa: E501
    "Training": _rows("""
loss | nats | policy loss (around 0 by construction), or loss on demonstrations | NaN stops the run
grad_norm | 1 | norm of the gradient before clipping | jumps: lower lr
ratio_mean | 1 | new over old probability, mean of tokens | away from 1: too many updates on one step's episodes
clip_fraction | share | tokens whose ratio was clipped | over 0.2: lower lr, fewer epochs
entropy | nats | entropy of the policy, per sampled token | to 0: exploration has ended; higher temperature, lower lr, more varied tasks
kl | nats | KL to the reference policy, where `train.kl` is over 0 | growing fast: the policy leaves its start; raise `train.kl`
tree_share | share | batches whose shared prefixes were computed once, as a tree | 0: `train.batching`, or it would not pay
tree_gain | ratio | estimated cost of rows over that of trees | under 1.1 rows are computed one by one
tree_unique_share | share | tokens left after shared prefixes are counted once | near 1: rows share little
gradient_agreement | cosine | cosine of a step's first gradient with those before | around 0: noise, use larger groups
gradient_agreement_scaled | cosine | the same with each coordinate divided by its root mean square | around 0: noise, use larger groups
step_kl | nats | KL of the policy after a step from that before it, per episode that succeeded, with `train.gradient_signal_steps` | over 0.15: the step was shortened
step_share | share | share of the step that was made | often under 1: lower lr
critic.explained_variance | share | 1 less the variance of (return less value) over that of the returns, of the critic's values before the step, with `ppo`, `turn_ppo` and `bilevel_ppo` | under 0.1 after many steps: the critic knows nothing; more `train.critic.updates`, `train.critic.warmup_steps`, or a body of its own
critic.explained_variance.turn_<turn> | share | the same of one turn, up to 32 | low in early turns alone: what happens later is not to be foreseen there
critic.loss | 1 | half the mean square of (value less target), in deviations of returns, before the step | rising: the critic lags behind the policy
critic.loss_after | 1 | the same before the last of the step's updates | as `critic.loss`: `train.critic.lr` is too low
critic.grad_norm | 1 | norm of the critic's gradient before clipping, mean of its updates | jumps: lower `train.critic.lr`
critic.return_mean | reward | running mean of the critic's targets | nothing
critic.return_std | reward | their running deviation | nothing
advantage_abs | 1 | mean absolute advantage | to 0: rewards tie
lr | 1 | learning rate | nothing
optimizer_steps | count | optimizer steps | 0: no group gave a signal
codes_changed | count | codes of quantized weights that the step's updates changed, with `[quant]` | 0 in most steps: updates are below the rounding step, raise `train.lr`
trajectories | count | trajectories of the step | nothing
trajectories_trained | count | trajectories with an advantage | 0: nothing was learned in the step
groups_refilled | count | groups played in place of others without signal, with `train.refill` | near `rollout.groups` times `refill`: nearly all tasks are solved or hopeless
policy/<name>/<metric> | as the metric | the policy's own, with `[[policy]]` | as for the metric
curriculum.<env>.share | share | share of the groups that the environment has from now on, with `env.sampler` or `rollout.adapt` | at its floor: the environment gives no signal
curriculum.<env>.pass_rate | share | mean pass rate of the step's groups, replaced ones included | with `window`, far from a half: few tasks are near it
groups_filtered.<reason> | count | groups that `train.group_filter` left out, by the reason in slime's `DynamicFilterOutput` | near `groups`: the filter leaves too little to train
trajectories_trained_share | share | `trajectories_trained` over `trajectories` | falls as tasks are solved; at 0 see `groups_no_signal`
mismatch_mean | nats | mean absolute difference between the trainer's and the engine's logprobs, of tokens of the current policy (so are the next five) | rising: engine and trainer compute different policies
mismatch_p95 | nats | its 95th percentile | as `mismatch_mean`
mismatch_max | nats | its maximum | over `train.max_mismatch` the run stops
mismatch_kl | nats | k3 estimate of the KL between the two | as `mismatch_mean`
mismatch_by_turn.<turn> | nats | the mean difference by turn number | rising with turns: engine and trainer render later prompts differently
importance_ess | share | effective sample size of importance weights between the two | under 0.9: updates rest on few tokens
lag_mean | updates | mean lag of trained tokens: updates between the policy that sampled a token and the one trained; absent where all are 0 | near `schedule.staleness`: the trainer is the bottleneck
lag_max | updates | its maximum | over `schedule.staleness`: a bug, report it
tokens_by_lag.<lag> | count | trained tokens by lag | as `lag_mean`
mismatch_kl_by_lag.<lag> | nats | `mismatch_kl` by lag | growing with lag is normal; at lag 0 it must stay at rounding
importance_ess_by_lag.<lag> | share | `importance_ess` by lag | under 0.5 at the largest lag: lower `schedule.staleness` or `train.lr`
tokens_by_cache.<cache> | count | trained tokens by the weights of their context's cache: `own` version or `kept` of an older one (`engine.in_flight = "keep"`) | nothing
mismatch_kl_by_cache.<cache> | nats | `mismatch_kl` by that cache | `kept` far over `own`: use `engine.in_flight = "salt"`
teacher.<name>.answered | share | trained ids for which a teacher answered | falling: its servers fail, or episodes outgrow its context
teacher.<name>.kl | nats | mean of log p_policy - log p_teacher at those ids, before the first update | not falling: the teacher's signal is too weak, or rewards pull elsewhere
teacher.<name>.unaligned | share | ids that a teacher with another tokenizer cannot score, as no chunk of its ids has them | over 0.1: the tokenizers split text too differently
teacher.<name>.bounded | share | ids over `teacher.bound`, with `signal = "advantage"` | over 0.1: policy and teacher differ too much; use `signal = "loss"`
correction_mean | 1 | mean token weight of `train.correction` | under 0.9 or over 1.1: engine and trainer differ, see `mismatch_mean`
correction_ess | share | effective sample size of those weights | under 0.9: updates rest on few tokens
correction_masked | share | tokens excluded by the correction | growing: the correction hides a mismatch instead of fixing it
"""),  # noqa: E501
    "Time and memory": _rows("""
rollout_s | s | wall-clock time of a step's episodes | see `seconds.<phase>.<of>`
train_s | s | wall-clock time of its training | see `trained_tokens_per_s`
rollout_over_train | 1 | `rollout_s` over `train_s`, where there was an update | far over 1: generation or the environment is the bottleneck; more concurrency, faster engine
tokens_per_s | ids/s | sampled ids over `rollout_s`; in the warm-up trained ids over `train_s` | falling at equal lengths: the engine waits
trained_tokens_per_s | ids/s | trained ids over `train_s` | falling: padding, swapping
tokens_trained | count | ids trained in a warm-up step | nothing
seconds.<phase>.<p50, p95, max, sum> | s | seconds of an episode by phase: generate, tool, environment, reward, and wait (reset, rendering, waiting for a slot) | p95 far over p50: a few episodes delay the step
peak_memory_mib | MiB | peak memory of the process so far | growing step by step: a leak, or longer episodes
peak_gpu_memory_mib | MiB | peak memory of the GPU | near its size: smaller `train.micro_tokens`
"""),  # noqa: E501
}


METRICS: tuple[MetricDoc, ...] = tuple(doc for docs in METRIC_GROUPS.values() for doc in docs)
MAX_NAMES = 32
MAX_TURNS = 32
"""Turns with metrics of their own; later ones have none."""
REPEAT_LENGTH = 4
"""Length of the id runs whose repetition is counted."""
UNKNOWN = "(unknown)"
UNNAMED = "(unnamed)"
OTHER = "(other)"

Row = dict[str, Any]


class TimedCall(NamedTuple):
    """One tool call of a turn."""

    tool: str
    seconds: float
    """NaN if they were not recorded."""
    error: str | None
    """Kind of the error; None if the call succeeded."""


EpisodeCalls = list[list[TimedCall]]
"""Calls of an episode, by turn."""


def rollout_metrics(trajectories: Sequence[Trajectory], *, success: float = 1.0) -> Row:
    """Return metrics of finished episodes by their names in metrics.jsonl.

    Families are dicts; empty ones are left out. `success` is the minimum reward of a successful
    episode. docs/reference/metrics.md documents the metrics.

    Example::

        >>> async def play(task, model):
        ...     return float((await model.generate(task.messages)).text == task.answer)
        >>> tasks = [tw.Task("6 * 7?", answer="42")]
        >>> row = rollout_metrics(tw.rollout(play, tasks, tw.ScriptedEngine(["42"])))
        >>> row["truncated_share"], row["failed_share"]
        (0.0, 0.0)
    """
    episodes = max(len(trajectories), 1)
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    turns_per_episode = [len(trajectory.turns) for trajectory in trajectories]
    calls = [[calls_of(turn) for turn in trajectory.turns] for trajectory in trajectories]

    stops = [trajectory.stop for trajectory in trajectories if trajectory.stop is not None]
    truncations = Counter(str(stop) for stop in stops if stop.status is Status.TRUNCATED)

    errors = [trajectory.error for trajectory in trajectories if trajectory.error is not None]
    recovered = [failure for trajectory in trajectories for failure in trajectory.failures]

    drafted = sum(trajectory.metrics.get("draft_ids", 0) for trajectory in trajectories)
    accepted = sum(trajectory.metrics.get("draft_ids_accepted", 0) for trajectory in trajectories)
    context = sum(turn.context for turn in turns)
    cached = sum(turn.cached for turn in turns)

    row: Row = {
        "turns_spread": distribution_summary(turns_per_episode, mean=False),
        "turns_histogram": {
            str(number): count for number, count in sorted(Counter(turns_per_episode).items())
        },
        "truncated_share": truncations.total() / episodes,
        "truncations": dict(truncations.most_common()),
        "failed_share": sum(stop.failed for stop in stops) / episodes,
        "errors": top_counts(f"{failure.phase}/{failure.type}" for failure in errors),
        "retries": top_counts(f"{failure.phase}/{failure.type}" for failure in recovered),
        "calls_continued": sum(max(0, len(turn.spans) - 1) for turn in turns),
        "resume": _counted(trajectories, "resume_"),
        "seconds": _seconds(trajectories, calls),
        "branches": _summed(trajectory.branches for trajectory in trajectories),
        "invalid_actions": _count(trajectories, "invalid_actions"),
        "malformed_calls": _counted(trajectories, "malformed_", exclude=("malformed_calls",)),
        "control_text_neutralized": _count(trajectories, "neutralised"),
        "control_text": _counted(trajectories, "control_text_"),
        "cache_hit": cached / context if context else None,
        "draft_acceptance": accepted / drafted if drafted else None,
    }
    row |= _tools(calls)
    row |= _tokens(trajectories)
    row |= _rewards(trajectories, success)
    return {name: value for name, value in row.items() if value not in ({}, None)}


def distribution_summary(values: Sequence[float], *, mean: bool = True) -> dict[str, float]:
    """Return mean, median, 95th percentile (nearest rank) and maximum; empty without values."""
    if not values:
        return {}
    ordered = sorted(values)
    summary: dict[str, float] = {}
    if mean:
        summary["mean"] = math.fsum(ordered) / len(ordered)
    summary["p50"] = ordered[math.ceil(0.5 * len(ordered)) - 1]
    summary["p95"] = ordered[math.ceil(0.95 * len(ordered)) - 1]
    summary["max"] = ordered[-1]
    return summary


def top_counts(names: Iterable[str]) -> dict[str, int]:
    """Count names, most frequent first; names past `MAX_NAMES` are counted together."""
    counts = Counter(names).most_common()
    top = {name[:80]: count for name, count in counts[:MAX_NAMES]}
    rest = sum(count for _, count in counts[MAX_NAMES:])
    if rest:
        top[OTHER] = top.get(OTHER, 0) + rest
    return top


def flatten_row(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a row under flattened names, without other values.

    Example::

        >>> dict(flatten_row({"stops": {"done": 3}, "phase": "train"}))
        {'stops.done': 3.0}
    """
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from flatten_row(value, f"{prefix}{name}.")
        elif isinstance(value, (int, float)):
            try:
                as_float = float(value)
            except OverflowError:  # rows of other programs may hold integers of any size
                continue
            if math.isfinite(as_float):
                yield f"{prefix}{name}", as_float


def _count(trajectories: Sequence[Trajectory], name: str) -> int:
    """Sum one counter of the episodes."""
    return sum(int(trajectory.metrics.get(name, 0)) for trajectory in trajectories)


def _summed(counters: Iterable[Mapping[str, float]]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for counter in counters:
        for name, count in counter.items():
            totals[name] += int(count)
    return dict(totals.most_common(MAX_NAMES))


def _counted(
    trajectories: Sequence[Trajectory], prefix: str, exclude: Sequence[str] = ()
) -> dict[str, int]:
    """Sum the counters of episodes with a prefix, by the rest of their names."""
    counters = []
    for trajectory in trajectories:
        counters.append(
            {
                name.removeprefix(prefix): count
                for name, count in trajectory.metrics.items()
                if name.startswith(prefix) and name not in exclude
            }
        )
    return _summed(counters)


def calls_of(turn: Turn) -> list[TimedCall]:
    """Return each call of a turn; from its reply with NaN seconds if none is recorded."""
    tool_log = turn.info.get("tool_log")
    if not isinstance(tool_log, Sequence) or isinstance(tool_log, str):
        return [
            TimedCall(
                call.name or UNNAMED, math.nan, call.cause if call.error is not None else None
            )
            for call in turn.reply.tool_calls
        ]

    calls = []
    for entry in tool_log:  # the environment's own data, which may have any form
        if isinstance(entry, Mapping):
            seconds = entry.get("s")
            calls.append(
                TimedCall(
                    tool=str(entry.get("tool") or UNNAMED),
                    seconds=float(seconds) if isinstance(seconds, (int, float)) else math.nan,
                    error=entry.get("error"),
                )
            )
    return calls


def _tools(episodes: Sequence[EpisodeCalls]) -> Row:
    calls: list[TimedCall] = []
    users = 0
    for turns in episodes:
        users += any(turns)
        for turn_calls in turns:
            for call in turn_calls:
                is_unknown = call.error == "unknown_tool"
                calls.append(call._replace(tool=UNKNOWN) if is_unknown else call)

    counts = top_counts(call.tool for call in calls)
    seconds: dict[str, list[float]] = {}
    for call in calls:
        if math.isfinite(call.seconds):
            tool = call.tool if call.tool in counts else OTHER
            seconds.setdefault(tool, []).append(call.seconds)

    failed = [call for call in calls if call.error is not None]
    return {
        "tool_users": users / max(len(episodes), 1),
        "tool_calls": counts,
        "tool_failures": top_counts(call.tool for call in failed),
        "tool_mistakes": top_counts(call.error for call in calls if call.error is not None),
        "tool_seconds": {
            tool: distribution_summary(values, mean=False) for tool, values in seconds.items()
        },
    }


def _seconds(
    trajectories: Sequence[Trajectory], calls: Sequence[EpisodeCalls]
) -> dict[str, dict[str, float]]:
    """Return seconds of episodes by phase; `wait` is the rest of the wall-clock time."""
    by_phase: dict[str, list[float]] = {
        "generate": [],
        "tool": [],
        "environment": [],
        "reward": [],
        "wait": [],
    }
    for trajectory, calls_by_turn in zip(trajectories, calls, strict=True):
        generate = math.fsum(turn.generate_s for turn in trajectory.turns)
        environment = math.fsum(turn.env_s for turn in trajectory.turns)
        tool = _tool_seconds(trajectory, calls_by_turn)
        rest = trajectory.wall_s - generate - environment - trajectory.reward_s

        by_phase["generate"].append(generate)
        by_phase["tool"].append(tool)
        by_phase["environment"].append(environment - tool)
        by_phase["reward"].append(trajectory.reward_s)
        by_phase["wait"].append(max(0.0, rest))

    summaries: dict[str, dict[str, float]] = {}
    for phase, values in by_phase.items():
        if values:
            summary = distribution_summary(values, mean=False)
            summaries[phase] = summary | {"sum": math.fsum(values)}
    return summaries


def _tool_seconds(trajectory: Trajectory, calls_by_turn: EpisodeCalls) -> float:
    seconds = []
    for turn, calls in zip(trajectory.turns, calls_by_turn, strict=True):
        if turn.reply.tool_calls:
            in_calls = math.fsum(call.seconds for call in calls if math.isfinite(call.seconds))
            # Concurrent calls of one turn may sum to more than the step that waited for them.
            seconds.append(min(turn.env_s, in_calls))
    return math.fsum(seconds)


def _tokens(trajectories: Sequence[Trajectory]) -> Row:
    ids_by_origin: Counter[Origin] = Counter()
    reply_lengths: list[int] = []
    episode_lengths: list[int] = []
    runs = 0
    repeated_runs = 0
    images = 0
    image_ids = 0
    for trajectory in trajectories:
        for span in trajectory.spans:
            ids_by_origin[span.origin] += len(span.ids)
            images += len(span.media)
            image_ids += sum(block.length for block in span.media)
            if span.origin is Origin.MODEL:
                span_runs = max(0, len(span.ids) - REPEAT_LENGTH + 1)
                runs += span_runs
                repeated_runs += span_runs - _distinct_runs(span.ids)
        for turn in trajectory.turns:
            reply_lengths.append(sum(len(trajectory.spans[index].ids) for index in turn.spans))
        episode_lengths.append(sum(len(span.ids) for span in trajectory.spans))

    row: Row = {
        "tokens": {str(origin): count for origin, count in sorted(ids_by_origin.items())},
        "reply_tokens": distribution_summary(reply_lengths),
        "episode_tokens": distribution_summary(episode_lengths, mean=False),
        "repetition": repeated_runs / runs if runs else None,
    }
    if images:
        row["images"] = images
        row["image_tokens"] = image_ids
        row["image_token_share"] = image_ids / max(sum(episode_lengths), 1)
    return row


def _distinct_runs(ids: Sequence[int]) -> int:
    """Count the different runs of `REPEAT_LENGTH` consecutive ids."""
    shifted = [islice(ids, offset, None) for offset in range(REPEAT_LENGTH)]
    return len(set(zip(*shifted, strict=False)))


def _rewards(trajectories: Sequence[Trajectory], success: float) -> Row:
    by_turn: dict[int, list[float]] = {}
    for trajectory in trajectories:
        for number, turn in enumerate(trajectory.turns[:MAX_TURNS], 1):
            if turn.reward is not None:
                by_turn.setdefault(number, []).append(turn.reward)

    groups = group_by_task(trajectories)
    rewarded = 0
    tied_rewards: list[float] = []  # one of each group whose rewards are equal
    for group in groups:
        rewards = [reward for reward in group.rewards if reward is not None]
        if rewards:
            rewarded += 1
            spread = max(rewards) - min(rewards)
            if spread <= 1e-12 * max(1.0, *map(abs, rewards)):
                tied_rewards.append(rewards[0])

    return {
        "reward_by_turn": {
            str(number): math.fsum(values) / len(values)
            for number, values in sorted(by_turn.items())
        },
        "rewards_spread": _component_spread(groups),
        "groups": len(groups),
        "groups_no_signal": len(tied_rewards) + len(groups) - rewarded,
        "groups_solved": sum(reward >= success for reward in tied_rewards),
        "groups_unsolved": sum(reward < success for reward in tied_rewards),
    }


def group_by_task(trajectories: Iterable[Trajectory]) -> list[Group]:
    """Group trajectories by phase, step and task, in order of first appearance."""
    groups: dict[GroupKey, Group] = {}
    for trajectory in trajectories:
        group = groups.setdefault(trajectory.key.group, Group(trajectory.task, []))
        group.trajectories.append(trajectory)
    return list(groups.values())


def _component_spread(groups: Sequence[Group]) -> dict[str, float]:
    """Return the standard deviation of each reward part, as a mean over groups.

    It is the share that the part can have of an advantage.
    """
    spreads: dict[str, list[float]] = {}
    for group in groups:
        names = dict.fromkeys(name for member in group.trajectories for name in member.rewards)
        for name in islice(names, MAX_NAMES):
            values = [
                member.rewards[name] for member in group.trajectories if name in member.rewards
            ]
            mean = math.fsum(values) / len(values)
            variance = math.fsum((value - mean) ** 2 for value in values) / len(values)
            spreads.setdefault(name, []).append(math.sqrt(variance))
    return {name: math.fsum(values) / len(values) for name, values in spreads.items()}


Z95 = 1.959963984540054
"""Standard normal quantile of 0.975."""


def wilson(successes: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95% score interval of a proportion; (0, 1) without observations.

    Source: Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", JASA 22
    (1927), eq. for p0.

    Example::

        >>> low, high = wilson(81, 263)
        >>> round(low, 4), round(high, 4)
        (0.2553, 0.3662)
    """
    if n < 0 or not 0 <= successes <= max(n, 0):
        raise ValueError(f"successes must be from 0 to n, not {successes} of {n}")
    if n == 0:
        return 0.0, 1.0

    p = successes / n
    z = Z95
    scale = 1 + z * z / n
    center = (p + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))

    # The ends are exactly 0 and 1 if nothing or everything succeeded; rounding would leave 1e-17.
    low = 0.0 if successes == 0 else max(0.0, center - half)
    high = 1.0 if successes == n else min(1.0, center + half)
    return low, high


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that at least one of `k` episodes of a task succeeds.

    The estimate from `c` successes in `n` episodes is unbiased.

    Source: Chen et al., "Evaluating Large Language Models Trained on Code", arXiv 2107.03374,
    eq. 1: 1 - C(n-c, k) / C(n, k).
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, not n={n}, c={c}, k={k}")
    if n - c < k:
        return 1.0
    # A product, since the binomials overflow a float for large n.
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95% interval of the mean over tasks of values in [0, 1].

    Such values are pass@k, or success over several episodes of a task. Tasks are the independent
    units, so the standard error is that of their values (Miller, "Adding Error Bars to Evals",
    arXiv 2411.00640, eq. 1). Values that are all 0 or 1 are a proportion, with Wilson's interval.
    So are values that all agree, whose standard error would be 0.
    """
    n = len(values)
    mean = sum(values) / n if n else 0.0
    variance = sum((value - mean) ** 2 for value in values) / (n - 1) if n > 1 else 0.0
    if variance == 0.0 or all(value in (0.0, 1.0) for value in values):
        return wilson(min(max(mean * n, 0.0), n), n)
    half = Z95 * math.sqrt(variance / n)
    return max(0.0, mean - half), min(1.0, mean + half)
