// One axis of wall time: what each turn waited for, generated, did with tools and in the environment.
import {html} from './dom.js';
import {percent, seconds} from './format.js';

// Each kind has a pattern of its own (episode.css), so that it is told without color.
const KINDS = [
  ['generate', 'generation'],
  ['tools', 'tools'],
  ['env', 'environment'],
  ['reward', 'reward'],
  ['wait', 'waiting'],
];

// Seconds of each kind in a turn; those of the tools are part of the environment's.
function partsOf(turn) {
  const inEnv = turn.env_s || 0;
  const inTools = (turn.tools || []).reduce((sum, call) => sum + (call.s || 0), 0);
  const tools = Math.min(inTools, inEnv); // tools that ran side by side take no more than all of them
  return {generate: turn.generate_s || 0, tools, env: inEnv - tools, reward: 0, wait: turn.wait_s || 0};
}

const total = (parts) => KINDS.reduce((sum, [kind]) => sum + parts[kind], 0);

// Turns in their order, and behind them the time of which only its sum is known.
export function Timeline({timing, turnPlace, onTurn}) {
  if (!timing) return null;
  const turns = timing.turns.map((turn) => ({number: turn.turn, parts: partsOf(turn)}));
  const spent = turns.reduce((sum, {parts}) => sum + total(parts), 0);
  const reward = timing.reward_s || 0;
  const length = Math.max(timing.wall_s || 0, spent + reward);
  if (!turns.length || !length) return null;

  const behind = [
    ['reward', 'computing the reward', reward],
    ['wait', 'waiting, before and between its turns', length - spent - reward],
  ].filter(([, , time]) => time > 0);
  return html`<section class="timeline" aria-label="time of each turn">
    <ol class="bars">
      ${turns.map(({number, parts}) => html`<li key=${number} style=${{width: widthOf(total(parts), length)}}>
        <${Bar} number=${number} parts=${parts} place=${turnPlace(number)} onTurn=${onTurn} />
      </li>`)}
      ${behind.map(([kind, name, time]) => html`<li key=${kind} style=${{width: widthOf(time, length)}} title=${name + ': ' + seconds(time)}>
        <span class="turn-bar"><span class=${'part ' + kind} style=${{flexGrow: 1}}></span></span>
      </li>`)}
    </ol>
    <div class="axis" aria-hidden="true">${ticksOf(length).map((time) =>
      html`<span key=${time} style=${{left: widthOf(time, length)}}>${time ? seconds(time) : '0'}</span>`)}</div>
    <${TimeSums} turns=${turns} behind=${behind} length=${length} wall=${timing.wall_s} />
  </section>`;
}

const widthOf = (value, length) => (100 * value) / length + '%';

function Bar({number, parts, place, onTurn}) {
  const told = KINDS.filter(([kind]) => parts[kind] > 0).map(([kind, name]) => name + ' ' + seconds(parts[kind]));
  const whole = total(parts);
  const label = 'turn ' + number + ': ' + told.join(', ');
  const clicked = (event) => {
    event.preventDefault();
    onTurn(number);
  };
  return html`<a href=${place} aria-label=${label} title=${label} onClick=${clicked}>
    <span class="turn-bar">${KINDS.filter(([kind]) => parts[kind] > 0).map(([kind]) =>
      html`<span key=${kind} class=${'part ' + kind} style=${{flexGrow: parts[kind] / whole}}></span>`)}</span>
    <span class="turn-number" aria-hidden="true">${number}</span>
  </a>`;
}

// Four to six round times, of which the last is before the end.
function ticksOf(length) {
  const rough = length / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const times = [];
  for (let count = 0; count * step < length * 0.97; count += 1) times.push(count * step);
  return times;
}

function TimeSums({turns, behind, length, wall}) {
  const sumOf = (kind) => {
    const inTurns = turns.reduce((sum, {parts}) => sum + parts[kind], 0);
    const [, , after] = behind.find(([other]) => other === kind) || [kind, '', 0];
    return inTurns + after;
  };
  const rows = KINDS.map(([kind, name]) => ({kind, name, time: sumOf(kind)})).filter(({time}) => time > 1e-9);
  return html`<ul class="sums">
    ${rows.map(({kind, name, time}) => html`<li key=${kind}>
      <span class=${'kind part ' + kind} aria-hidden="true"></span>${name} <b class="num">${seconds(time)}</b>
      <span class="muted"> ${time / length < 0.01 ? 'under 1%' : percent(time / length, 0)}</span></li>`)}
    ${wall && wall < 0.99 * length ? html`<li class="muted">side by side, so it took ${seconds(wall)} in all</li>` : null}
  </ul>`;
}
