// Which metrics are drawn, how, and under which theme. All but the first six comes from the glossary
// of metrics, which docs/metrics.md is made of: {name: [unit, meaning, advice, theme]}.
import {figure, percent, seconds} from './format.js';

// The six that are seen first, with the titles that a newcomer reads.
export const MAIN = [
  ['success', 'Success'],
  ['reward', 'Reward'],
  ['turns', 'Turns of an episode'],
  ['entropy', 'Entropy'],
  ['groups_no_signal', 'Groups without signal'],
  ['mismatch_mean', 'Mismatch of trainer and engine'],
];
const MAIN_NAMES = new Set(MAIN.map(([name]) => name));
const NO_CURVE = new Set(['step', 'phase', 'name', 'mode', 'time_s', 'cpu_s', 'tokens_so_far']);
const OTHER = 'Everything else';

const LOOKS = {
  share: {from0: true, format: (value) => percent(value)},
  s: {from0: true, format: seconds},
  count: {from0: true},
  ids: {from0: true},
};
const WHOLE_SHARES = new Set(['success', 'truncated_share', 'failed_share', 'tool_users', 'trajectories_trained_share', 'cache_hit']);

// The entry of a metric; those of a family, like `stops.<reason>`, share one.
export function docOf(glossary, metric) {
  if (glossary[metric]) return glossary[metric];
  const family = Object.keys(glossary).find((name) => name.includes('<') && patternOf(name).test(metric));
  return family ? glossary[family] : ['', '', '', OTHER];
}

const patterns = new Map();

function patternOf(name) {
  if (!patterns.has(name)) {
    const fixed = name.split(/<[^>]*>/).map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, '\\$&'));
    patterns.set(name, new RegExp('^' + fixed.join('.+') + '$'));
  }
  return patterns.get(name);
}

export function lookOf(glossary, metric) {
  if (WHOLE_SHARES.has(metric)) return {share: true, format: (value) => percent(value, 0)};
  const [unit] = docOf(glossary, metric);
  return LOOKS[unit] || (metric.startsWith('mismatch') ? {from0: true} : {format: figure});
}

// Of several policies each has metrics of its own, `policy/NAME/METRIC`, drawn with that of all.
const OF_POLICY = /^policy\/(.*)\/([^/]+)$/;
const baseOf = (name) => name.replace(OF_POLICY, '$2');

export function policiesOf(rows) {
  const names = rows.flatMap((row) => Object.keys(row).map((name) => OF_POLICY.exec(name)).filter((found) => found));
  return [...new Set(names.map((found) => found[1]))];
}

// [[theme, [metric]]] of the metrics that the rows have, without the first six.
export function themesOf(rows, glossary) {
  const all = new Set(rows.flatMap((row) => Object.keys(row).map(baseOf)));
  const names = [...all].filter((name) => !NO_CURVE.has(name) && !MAIN_NAMES.has(name));
  const themes = new Map(Object.values(glossary).map((doc) => [doc[3], []]));
  themes.set(OTHER, []);
  for (const name of names.sort()) themes.get(docOf(glossary, name)[3] || OTHER).push(name);
  return [...themes].filter(([, metrics]) => metrics.length);
}

export const titleOf = (metric) => MAIN.find(([name]) => name === metric)?.[1] || metric.replaceAll('_', ' ');

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
