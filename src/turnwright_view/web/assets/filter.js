// The filters and orders of the list for a file, as the server's index has them.
import {groupOf} from './address.js';

const RANGES = ['step', 'reward', 'turns', 'tokens'];

export function matching(rows, filter, texts) {
  const words = wordsOf(filter.text || '');
  const found = rows.filter((row) => fits(row, filter) && (!texts || words.every((word) => texts.get(row.key).toLowerCase().includes(word))));
  return found.sort(ORDERS[filter.sort] || ORDERS.notable);
}

function wordsOf(text) {
  return text.toLowerCase().split(/\s+/).filter((word) => word);
}

function fits(row, filter) {
  for (const name of ['phase', 'stop', 'task'])
    if (filter[name] && row[name] !== filter[name]) return false;
  if (filter.tool && !row.tools.includes(filter.tool)) return false;
  if (filter.group && groupOf(row.key) !== filter.group) return false;
  if (filter.error && (filter.error === '*' ? !row.error : row.error !== filter.error)) return false;
  if (filter.trained && row.trained !== (filter.trained === 'yes')) return false;
  if (filter.tie && row.tie !== (filter.tie === 'yes')) return false;
  return RANGES.every((name) => within(row[name], filter[name + '_min'], filter[name + '_max']));
}

function within(value, low, high) {
  if (!low && !high) return true;
  if (value === null || value === undefined) return false;
  return !(low && value < Number(low)) && !(high && value > Number(high));
}

const reward = (row) => (row.reward === null ? -Infinity : row.reward);
const ascending = (of) => (a, b) => of(a) - of(b) || a.number - b.number;
const descending = (of) => (a, b) => of(b) - of(a) || a.number - b.number;

// Last training step first; inside of a step failures, then ties, then the worst.
const phaseRank = (row) => (row.phase === 'train' ? 0 : 1);
const stateRank = (row) => (row.error ? 0 : row.tie ? 1 : 2);

export const ORDERS = {
  notable: (a, b) =>
    phaseRank(a) - phaseRank(b) || b.step - a.step || stateRank(a) - stateRank(b) || reward(a) - reward(b) || a.number - b.number,
  newest: (a, b) => b.number - a.number,
  oldest: (a, b) => a.number - b.number,
  worst: ascending((row) => (row.reward === null ? -1e308 : row.reward)),
  best: descending((row) => (row.reward === null ? -1e308 : row.reward)),
  longest: descending((row) => row.tokens),
  slowest: descending((row) => row.wall_s),
};
