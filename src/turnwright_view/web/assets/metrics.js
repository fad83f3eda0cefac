// Which metrics are drawn, how, and under which theme.
import {figure, percent, seconds} from './format.js';

const share = {share: true, format: (value) => percent(value, 0)};
const parts = {from0: true, format: (value) => percent(value)};
const time = {from0: true, format: seconds};
const count = {from0: true};

// The six that are seen first; `first` of those that a run has.
export const MAIN = [
  ['success', 'Success', share],
  ['reward', 'Reward', {}],
  ['turns', 'Turns of an episode', {}],
  ['entropy', 'Entropy', count],
  ['groups_no_signal', 'Groups without signal', count],
  ['mismatch_mean', 'Mismatch of trainer and engine', count],
];

export const THEMES = [
  ['Learning', [
    ['loss', 'Loss', {}], ['grad_norm', 'Gradient norm', count], ['lr', 'Learning rate', count], ['kl', 'KL', count],
    ['clip_fraction', 'Clipped share', parts], ['ratio_mean', 'Ratio', {}], ['advantage_abs', 'Mean size of advantages', count],
    ['gradient_agreement', 'Agreement of gradients', {}], ['explained_variance', 'Explained variance', {}],
    ['trajectories_trained_share', 'Trajectories that were trained', share], ['optimizer_steps', 'Optimizer steps', count],
  ]],
  ['Episodes', [
    ['truncated_share', 'Truncated', share], ['failed_share', 'Failed', share], ['tool_users', 'With a tool call', share],
    ['invalid_actions', 'Invalid actions', count], ['repetition', 'Repetition', parts], ['reply_tokens.mean', 'Reply length', count],
    ['reply_tokens.p95', 'Reply length, 95th percentile', count], ['episode_tokens.p50', 'Episode length, median', count],
    ['groups_solved', 'Groups solved', count], ['groups_unsolved', 'Groups unsolved', count], ['calls_continued', 'Continued calls', count],
  ]],
  ['Tokens', [
    ['sampled_tokens', 'Sampled tokens', count], ['trained_tokens', 'Trained tokens', count], ['image_token_share', 'Image tokens', share],
    ['cache_hit', 'Cache hits', share], ['tree_gain', 'Gain by trees', count], ['tree_unique_share', 'Unique tokens', share],
  ]],
  ['Exactness and staleness', [
    ['mismatch_p95', 'Mismatch, 95th percentile', count], ['mismatch_max', 'Mismatch, largest', count], ['mismatch_kl', 'Mismatch, KL', count],
    ['importance_ess', 'Effective sample share', share], ['lag_mean', 'Lag, mean', count], ['lag_max', 'Lag, largest', count],
    ['render_checks', 'Render checks', count],
  ]],
  ['Time and memory', [
    ['rollout_s', 'Rollout of a step', time], ['train_s', 'Training of a step', time], ['rollout_over_train', 'Rollout over training', count],
    ['tokens_per_s', 'Sampled tokens a second', count], ['trained_tokens_per_s', 'Trained tokens a second', count],
    ['seconds.generate.p95', 'Generation, p95 of an episode', time], ['seconds.tool.p95', 'Tools, p95 of an episode', time],
    ['seconds.environment.p95', 'Environment, p95 of an episode', time], ['seconds.wait.p95', 'Waiting, p95 of an episode', time],
    ['peak_memory_mib', 'Peak memory, MiB', count],
  ]],
];

const NO_CURVE = new Set(['step', 'phase', 'name', 'mode', 'time_s', 'cpu_s']);

// Themes with the metrics that the rows have; what no theme names comes last.
export function themesOf(rows) {
  const names = new Set(rows.flatMap((row) => Object.keys(row)));
  const placed = new Set(MAIN.map(([name]) => name));
  const themes = [];
  for (const [theme, metrics] of THEMES) {
    metrics.forEach(([name]) => placed.add(name));
    const there = metrics.filter(([name]) => names.has(name));
    if (there.length) themes.push([theme, there]);
  }
  const others = [...names].filter((name) => !placed.has(name) && !NO_CURVE.has(name)).sort();
  if (others.length) themes.push(['Everything else', others.map((name) => [name, name, {}])]);
  return themes;
}

// What x can count, and its value in a row of training.
export const AXES = {
  step: ['step', (row) => row.step],
  time: ['minute', (row) => (row.time_s === undefined ? null : row.time_s / 60)],
  tokens: ['sampled token', (row) => row.tokens_so_far],
};

// Rows of training in their order, a step that was trained twice as it was the last time, with the
// tokens sampled so far.
export function trainingRows(rows, phase = 'train') {
  const last = new Map();
  for (const row of rows) if (row.phase === phase) last.set(row.step, row);
  let tokens = 0;
  return [...last.values()].sort((a, b) => a.step - b.step).map((row) => {
    tokens += row.sampled_tokens || 0;
    return {...row, tokens_so_far: tokens};
  });
}

export function pointsOf(rows, metric, axis = 'step') {
  const [, place] = AXES[axis] || AXES.step;
  const points = [];
  for (const row of rows) {
    const x = place(row);
    const y = row[metric];
    if (typeof x === 'number' && typeof y === 'number' && (!points.length || x > points[points.length - 1][0])) points.push([x, y]);
  }
  return points;
}

export const lookOf = (metric) => [...MAIN, ...THEMES.flatMap(([, metrics]) => metrics)].find(([name]) => name === metric)?.[2] || {format: figure};
