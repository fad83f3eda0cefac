// One axis of wall time: what each turn waited for, generated, did with tools and in the environment.
import {html} from './dom.js';
import {percent, seconds} from './format.js';

// Each kind has a pattern of its own (episode.css), so that it is told without color.
const KINDS = [
  ['wait', 'waiting'],
  ['generate', 'generation'],
  ['tools', 'tools'],
  ['env', 'environment'],
];

// Seconds of each kind; those of the tools are part of the environment's.
function partsOf(turn) {
  const inEnv = turn.env_s || 0;
  const inTools = (turn.tools || []).reduce((sum, call) => sum + (call.s || 0), 0);
  const tools = Math.min(inTools, inEnv); // tools that ran side by side take no more than all of them
  return {wait: turn.wait_s || 0, generate: turn.generate_s || 0, tools, env: inEnv - tools};
}

const total = (parts) => KINDS.reduce((sum, [kind]) => sum + parts[kind], 0);

export function Timeline({timing, turnPlace, onTurn}) {
  const turns = ((timing && timing.turns) || []).map((turn) => ({number: turn.turn, parts: partsOf(turn)}));
  const spent = turns.reduce((sum, {parts}) => sum + total(parts), 0);
  const length = Math.max((timing && timing.wall_s) || 0, spent);
  if (!turns.length || !length) return null;

  return html`<section class="timeline" aria-label="time of each turn">
    <ol class="bars">
      ${turns.map(({number, parts}) => html`<li key=${number} style=${{width: share(total(parts), length)}}>
        <${Bar} number=${number} parts=${parts} place=${turnPlace(number)} onTurn=${onTurn} />
      </li>`)}
      ${length > spent ? html`<li class="rest" style=${{width: share(length - spent, length)}} title=${seconds(length - spent) + ' before, between and after its turns'}></li>` : null}
    </ol>
    <div class="axis" aria-hidden="true">${ticks(length).map((time) =>
      html`<span key=${time} style=${{left: share(time, length)}}>${time ? seconds(time) : '0'}</span>`)}</div>
    <${Sums} turns=${turns} length=${length} spent=${spent} />
  </section>`;
}

const share = (value, length) => (100 * value) / length + '%';

function Bar({number, parts, place, onTurn}) {
  const told = KINDS.filter(([kind]) => parts[kind] > 0).map(([kind, name]) => name + ' ' + seconds(parts[kind]));
  const label = 'turn ' + number + ': ' + told.join(', ');
  const clicked = (event) => {
    event.preventDefault();
    onTurn(number);
  };
  return html`<a href=${place} aria-label=${label} title=${label} onClick=${clicked}>
    <span class="bar">${KINDS.map(([kind]) =>
      parts[kind] > 0 ? html`<span key=${kind} class=${'part ' + kind} style=${{flexGrow: parts[kind] / total(parts)}}></span>` : null)}</span>
    <span class="turn-number" aria-hidden="true">${number}</span>
  </a>`;
}

// Four to six round times, of which the last is before the end.
function ticks(length) {
  const rough = length / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const times = [];
  for (let count = 0; count * step < length * 0.97; count += 1) times.push(count * step);
  return times;
}

function Sums({turns, length, spent}) {
  const rows = KINDS.map(([kind, name]) => [kind, name, turns.reduce((sum, {parts}) => sum + parts[kind], 0)]);
  rows.push(['rest', 'elsewhere', Math.max(0, length - spent)]);
  return html`<ul class="sums">
    ${rows.filter(([, , time]) => time > 0).map(([kind, name, time]) => html`<li key=${kind}>
      <span class=${'swatch part ' + kind} aria-hidden="true"></span>${name} <b class="num">${seconds(time)}</b>
      <span class="muted"> ${time / length < 0.01 ? 'under 1%' : percent(time / length, 0)}</span></li>`)}
  </ul>`;
}
