"""What every figure of metrics.jsonl is: name, unit, meaning, and what to do when it moves; docs/metrics.md shows this table."""

# ruff: noqa: E501 (a line is a row of the table)

from __future__ import annotations

from typing import NamedTuple


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
