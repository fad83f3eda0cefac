// The filters and orders of the list for a file, as the server's index has them.
import {groupOf} from './address.js';

const RANGES = ['step', 'reward', 'turns', 'tokens'];

export function matching(rows, filter, texts) {
  const words = wordsOf(filter.text || '');
  const hasWords = (row) => words.every((word) => texts.get(row.key).includes(word));
  const found = rows.filter((row) => fits(row, filter) && (!texts || hasWords(row)));
  return found.sort(ORDERS[filter.sort] || ORDERS.notable);
}

// Case and accents make no difference.
export function folded(text) {
  return text.normalize('NFKD').replace(/[\u0300-\u036f]/g, '').toLowerCase();
}

function wordsOf(text) {
  return folded(text).split(/\s+/).filter((word) => word);
}

function fits(row, filter) {
  for (const name of ['phase', 'stop', 'task'])
    if (filter[name] && row[name] !== filter[name]) return false;
  if (filter.tool && !row.tools.includes(filter.tool)) return false;
  if (filter.agent && !row.agents.includes(filter.agent)) return false;
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

// A reward that was not computed is the worst.
const reward = (row) => (row.reward === null ? -1e308 : row.reward);
const ascending = (of) => (a, b) => of(a) - of(b) || a.number - b.number;
const descending = (of) => (a, b) => of(b) - of(a) || a.number - b.number;

// Training, then evaluations, then gates; the last step first; inside of a step what failed, then the
// worst, ties before others of the same reward.
function phaseRank(row) {
  if (row.phase === 'train') return 0;
  return row.phase.startsWith('gate') ? 2 : 1;
}

function notable(a, b) {
  return (
    phaseRank(a) - phaseRank(b) ||
    b.step - a.step ||
    Boolean(b.error) - Boolean(a.error) ||
    reward(a) - reward(b) ||
    b.tie - a.tie ||
    a.number - b.number
  );
}

const ORDERS = {
  notable,
  newest: (a, b) => b.number - a.number,
  oldest: (a, b) => a.number - b.number,
  worst: ascending(reward),
  best: descending(reward),
  longest: descending((row) => row.tokens),
  slowest: descending((row) => row.wall_s),
};
