// What an episode, a group and a difference show alike of an episode.
import {runPlace} from './address.js';
import {html} from './dom.js';
import {plural, seconds} from './format.js';
import {Advantage, Reward, Stop} from './parts.js';

export function sampleName(row) {
  return 'sample ' + row.sample + (row.attempt ? ', attempt ' + (row.attempt + 1) : '');
}

// Where a page is from, from the run down; the rest are its children.
export function Trail({run, row, children}) {
  return html`<nav class="trail small" aria-label="where it is from">
    <a href=${runPlace(run)}>${(row && row.name) || run}</a>
    ${children}
  </nav>`;
}

// What became of an episode, in one row.
export function Outcome({episode}) {
  const {row} = episode;
  const facts = [plural(episode.turns.length, 'turn'), plural(row.tokens, 'token'), seconds(episode.wall_s)];
  return html`<div class="row badges">
    <${Reward} value=${row.reward} />
    <${Advantage} value=${row.advantage} reason=${row.reason} />
    <${Stop} row=${row} />
    <span class="muted">${facts.join(' · ')}</span>
  </div>`;
}

// What an episode begins with.
export const givenIn = (episode) => (episode.turns.length ? episode.turns[0].messages : episode.opening);

const MAX_TITLE = 240;

// What was asked, without what the system said before it; of a task without a text its name.
export function taskText(episode) {
  const asked = givenIn(episode).find((message) => message.role !== 'system' && message.text.trim());
  const text = (asked ? asked.text.trim() : episode.row.prompt) || 'task ' + episode.row.task;
  return text.length > MAX_TITLE ? text.slice(0, MAX_TITLE) + ' …' : text;
}

const MAX_ANSWER = 300;

export function Answer({answer}) {
  if (answer === null) return null;
  if (answer.length <= MAX_ANSWER) return html`<p class="answer">Expected answer <code>${answer}</code></p>`;
  return html`<details class="answer"><summary>expected answer</summary><pre>${answer}</pre></details>`;
}

// What makes an element that of a turn: keys and addresses lead to it, in each view.
export const turnMark = (number) => ({id: 'turn-' + number, 'data-turn': number, tabindex: '-1'});

// The turn that begins with a span, for each span that begins one.
export function turnStarts(episode) {
  const starts = new Map();
  episode.turns.forEach((turn, index) => {
    const [first] = turn.spans;
    if (first !== undefined && !starts.has(first)) starts.set(first, index + 1);
  });
  return starts;
}

// A part of a long text, for places with little room.
export function excerptOf(text, most) {
  return text.length > most ? text.slice(0, most) + ' …' : text;
}
