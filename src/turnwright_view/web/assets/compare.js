// How two replies differ, id by id, and how the replies of a group part.
import {plainText} from './messages.js';

const MOST_COMPARED = 600; // ids of a side between the common beginning and end; the table has their product

// The ids of a turn's reply with their texts; of a reply without ids one piece with its text.
export function replyOf(episode, turn) {
  const pieces = [];
  for (const number of turn.spans) {
    const span = episode.spans[number];
    const tokens = (span && span.tokens) || [];
    tokens.forEach((text, index) => pieces.push({id: span.ids[index], text}));
  }
  if (pieces.length) return pieces;
  const text = plainText(turn.reply);
  return text ? [{id: text, text}] : [];
}

export const textOf = (pieces) => pieces.map((piece) => piece.text).join('');

export function commonStart(one, other) {
  const most = Math.min(one.length, other.length);
  let count = 0;
  while (count < most && one[count].id === other[count].id) count += 1;
  return count;
}

function commonEnd(one, other, start) {
  const most = Math.min(one.length, other.length) - start;
  let count = 0;
  while (count < most && one[one.length - 1 - count].id === other[other.length - 1 - count].id) count += 1;
  return count;
}

// For each piece of both sides, whether the other side lacks it.
export function changesOf(one, other) {
  const start = commonStart(one, other);
  const end = commonEnd(one, other, start);
  const middles = [one.slice(start, one.length - end), other.slice(start, other.length - end)];
  const kept = middles.every((middle) => middle.length <= MOST_COMPARED)
    ? longestCommon(...middles)
    : middles.map(() => new Set()); // too long to be looked into: all of it counts as changed
  return middles.map((middle, side) => [
    ...Array(start).fill(false),
    ...middle.map((_, index) => !kept[side].has(index)),
    ...Array(end).fill(false),
  ]);
}

// Places of a longest common subsequence in both sides.
function longestCommon(one, other) {
  const width = other.length + 1;
  const lengths = new Uint16Array((one.length + 1) * width); // from each pair of places to the ends
  for (let i = one.length - 1; i >= 0; i -= 1)
    for (let j = other.length - 1; j >= 0; j -= 1)
      lengths[i * width + j] = one[i].id === other[j].id
        ? lengths[(i + 1) * width + j + 1] + 1
        : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);

  const kept = [new Set(), new Set()];
  let i = 0;
  let j = 0;
  while (i < one.length && j < other.length) {
    if (one[i].id === other[j].id) {
      kept[0].add(i);
      kept[1].add(j);
      i += 1;
      j += 1;
    } else if (lengths[(i + 1) * width + j] >= lengths[i * width + j + 1]) i += 1;
    else j += 1;
  }
  return kept;
}

// Pieces in a row that are alike: [{changed, from, to, text}].
export function segmentsOf(pieces, changed) {
  const segments = [];
  pieces.forEach((piece, index) => {
    const last = segments[segments.length - 1];
    if (last && last.changed === changed[index]) {
      last.to = index + 1;
      last.text += piece.text;
    } else segments.push({changed: changed[index], from: index, to: index + 1, text: piece.text});
  });
  return segments;
}

// The turn of an episode in which it first says something other than another: its index, and -1 where
// both are the same ids to their ends.
export function partingTurn(episode, other) {
  const most = Math.max(episode.turns.length, other.turns.length);
  for (let index = 0; index < most; index += 1) {
    const [mine, its] = [episode.turns[index], other.turns[index]];
    if (!mine || !its) return index;
    const [here, there] = [replyOf(episode, mine), replyOf(other, its)];
    if (here.length !== there.length || commonStart(here, there) < here.length) return index;
  }
  return -1;
}

// What the world said to a turn: the messages of the turn that follows it, or the last ones.
export function answerTo(episode, index) {
  const next = episode.turns.find((turn, later) => later > index && turn.parent === index);
  if (next) return next.messages;
  return index === episode.turns.length - 1 ? episode.final : [];
}

// Of a turn, the different replies with the siblings that gave them, the most frequent first.
export function repliesOf(episodes, index) {
  const replies = new Map();
  for (const episode of episodes) {
    const turn = episode.turns[index];
    if (!turn) continue;
    const text = plainText(turn.reply) || textOf(replyOf(episode, turn));
    replies.set(text, [...(replies.get(text) || []), episode]);
  }
  const rows = [...replies].map(([text, siblings]) => ({text, siblings, reward: meanReward(siblings)}));
  return rows.sort((a, b) => b.siblings.length - a.siblings.length || (b.reward || 0) - (a.reward || 0));
}

function meanReward(episodes) {
  const rewards = episodes.map((episode) => episode.row.reward).filter((reward) => reward !== null);
  return rewards.length ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length : null;
}
