// What the trainer saw beside what the engine saw: an account of the sampled ids that adds up, a
// table by turn, and a ledger with a row an id.
import {Context} from './context.js';
import {html, useMemo, useState} from './dom.js';
import {turnMark} from './episode_parts.js';
import {figure, percent, plural, signed, whole} from './format.js';
import {Segmented} from './parts.js';
import {factsOf, shownText, stateWords} from './tokens.js';

const ROWS = 200; // at first, and more each time that more are asked for

// Sampled ids by what became of them and why. The parts are counted apart from the sum, so that the
// page shows if a record does not add up.
function accountOf(episode) {
  const account = {sampled: 0, beyond: 0, parts: []};
  for (const span of episode.spans) {
    if (span.origin !== 'model') continue;
    account.sampled += span.length;
    account.beyond += span.tokens ? span.length - span.tokens.length : 0;
    for (const [from, to, state, reason] of span.state || []) addPart(account.parts, state, reason, to - from);
  }
  const rank = ({state}) => STATES_IN_ORDER.indexOf(state);
  account.parts.sort((a, b) => rank(a) - rank(b) || b.count - a.count);
  account.missing = account.sampled - account.parts.reduce((sum, part) => sum + part.count, 0);
  return account;
}

const STATES_IN_ORDER = ['trained', 'untrained', 'never'];

function addPart(parts, state, reason, count) {
  const same = parts.find((part) => part.state === state && part.reason === reason);
  if (same) same.count += count;
  else parts.push({state, reason, count});
}

export function Trainer({episode, turn, turnPlace}) {
  return html`<${Account} account=${useMemo(() => accountOf(episode), [episode])} />
    <${TurnTable} episode=${episode} turnPlace=${turnPlace} />
    <${Context} episode=${episode} number=${turn} />
    <${Ledger} episode=${episode} turnPlace=${turnPlace} />`;
}

function Account({account}) {
  const share = (count) => (account.sampled ? percent(count / account.sampled, 0) : '–');
  return html`<section class="card account">
    <h2>Account of the sampled ids</h2>
    <div class="account-bar" aria-hidden="true">${account.parts.map(({state, reason, count}) =>
      html`<span key=${state + reason} class=${state} style=${{flexGrow: count}}></span>`)}</div>
    <table><tbody>
      ${account.parts.map((part) => html`<tr key=${part.state + part.reason}>
        <th scope="row"><span class=${'token ' + part.state}>${stateWords(part)}</span></th>
        <td class="num">${whole(part.count)}</td><td class="num muted">${share(part.count)}</td></tr>`)}
      ${account.missing ? html`<tr><th scope="row">${account.beyond ? 'beyond what this page is sent' : 'not recorded'}</th>
        <td class="num">${whole(account.missing)}</td><td class="num muted">${share(account.missing)}</td></tr>` : null}
      <tr class="sum"><th scope="row">sampled</th><td class="num">${whole(account.sampled)}</td><td></td></tr>
    </tbody></table>
  </section>`;
}

// Figures of a turn's sampled ids.
function turnFigures(episode, turn) {
  const sums = {sampled: 0, trained: 0, left: 0, weight: 0, advantage: 0, scored: 0, mismatch: 0, largest: 0, logprob: 0, known: 0};
  for (const number of turn.spans) {
    const span = episode.spans[number];
    if (!span) continue;
    sums.sampled += span.length;
    const count = span.tokens ? span.tokens.length : 0;
    sums.left += span.length - count;
    for (let index = 0; index < count; index += 1) addTo(sums, factsOf(span, index));
  }
  return sums;
}

function addTo(sums, facts) {
  if (facts.logprob !== null) {
    sums.known += 1;
    sums.logprob += facts.logprob;
  }
  if (facts.mismatch !== null) {
    sums.scored += 1;
    sums.mismatch += facts.mismatch;
    if (Math.abs(facts.mismatch) > Math.abs(sums.largest)) sums.largest = facts.mismatch;
  }
  if (facts.state !== 'trained') return;
  sums.trained += 1;
  sums.weight += facts.weight;
  sums.advantage += facts.advantage || 0;
}

const TURN_COLUMNS = [
  'context', 'cached', 'sampled', 'mean logprob',
  'trained', 'mean weight', 'mean advantage', 'scored', 'mean difference', 'largest',
];
const FIRST_OF_TRAINER = 4;

function turnCells(turn, sums) {
  const mean = (sum, count) => (count ? sum / count : null);
  return [
    whole(turn.context),
    whole(Math.max(0, turn.cached)),
    whole(sums.sampled),
    signed(mean(sums.logprob, sums.known)),
    whole(sums.trained),
    figure(mean(sums.weight, sums.trained)),
    signed(mean(sums.advantage, sums.trained)),
    whole(sums.scored),
    signed(mean(sums.mismatch, sums.scored)),
    sums.scored ? signed(sums.largest) : '–',
  ];
}

function TurnTable({episode, turnPlace}) {
  const rows = useMemo(() => episode.turns.map((turn) => turnCells(turn, turnFigures(episode, turn))), [episode]);
  const look = (column) => (column === FIRST_OF_TRAINER ? 'num side' : 'num');
  return html`<section class="card">
    <h2>Turn by turn</h2>
    <div class="scroller" role="region" aria-label="what engine and trainer saw, by turn" tabindex="0">
    <table class="sides">
      <thead>
        <tr><td></td><th scope="colgroup" colspan=${FIRST_OF_TRAINER}>engine</th>
          <th scope="colgroup" colspan=${TURN_COLUMNS.length - FIRST_OF_TRAINER} class="side">trainer</th></tr>
        <tr><th scope="col">turn</th>
          ${TURN_COLUMNS.map((name, column) => html`<th key=${name} scope="col" class=${look(column)}>${name}</th>`)}</tr>
      </thead>
      <tbody>${episode.turns.map((turn, index) => html`<tr key=${index} class="turn" ...${turnMark(index + 1)}>
        <th scope="row"><a href=${turnPlace(index + 1)}>turn ${index + 1}</a>
          ${turn.agent !== 'main' ? html`<div class="small muted agent">${turn.agent}</div>` : null}</th>
        ${rows[index].map((text, column) => html`<td key=${column} class=${look(column)}>${text}</td>`)}
      </tr>`)}</tbody>
    </table></div>
    <p class="muted small">The context is what the engine was given before it sampled; cached ids of it were not computed again.
      The difference is the trainer’s logprob minus the engine’s, in nats.</p>
  </section>`;
}

const LEDGER_ORDERS = [['order', 'as sampled'], ['difference', 'largest difference'], ['unlikely', 'least likely']];

function ledgerRows(episode) {
  const rows = [];
  episode.turns.forEach((turn, index) => {
    for (const number of turn.spans) {
      const span = episode.spans[number];
      const tokens = (span && span.tokens) || [];
      for (let offset = 0; offset < tokens.length; offset += 1) rows.push({...factsOf(span, offset), turn: index + 1});
    }
  });
  return rows;
}

function inOrder(rows, order) {
  const size = {
    difference: (row) => (row.mismatch === null ? -1 : Math.abs(row.mismatch)),
    unlikely: (row) => (row.logprob === null ? -1 : -row.logprob),
  }[order];
  return size ? [...rows].sort((a, b) => size(b) - size(a)) : rows;
}

function Ledger({episode, turnPlace}) {
  const [order, setOrder] = useState('order');
  const [most, setMost] = useState(ROWS);
  const all = useMemo(() => ledgerRows(episode), [episode]);
  const rows = useMemo(() => inOrder(all, order), [all, order]);

  return html`<section class="card">
    <div class="row">
      <h2>Ledger</h2>
      <${Segmented} label="order" value=${order} values=${LEDGER_ORDERS} onChange=${setOrder} />
    </div>
    <div class="scroller" role="region" aria-label="ledger of the sampled ids" tabindex="0">
    <table class="ledger">
      <thead><tr>
        <th scope="col" class="num">turn</th>
        <th scope="col" class="num">id</th>
        <th scope="col">text</th>
        <th scope="col" class="num">engine</th>
        <th scope="col" class="num">trainer</th>
        <th scope="col" class="num">difference</th>
        <th scope="col" class="num">weight</th>
        <th scope="col" class="num">advantage</th>
        <th scope="col">state</th>
      </tr></thead>
      <tbody>${rows.slice(0, most).map((row, index) =>
        html`<${LedgerRow} key=${order + index} row=${row} turnPlace=${turnPlace} />`)}</tbody>
    </table></div>
    ${rows.length > most ? html`<p><button type="button" onClick=${() => setMost(most + 5 * ROWS)}>
      show more of ${plural(rows.length, 'id')}, of which ${whole(most)} are here</button></p>` : null}
  </section>`;
}

function LedgerRow({row, turnPlace}) {
  return html`<tr>
    <td class="num"><a href=${turnPlace(row.turn)}>${row.turn}</a></td>
    <td class="num">${row.id}</td>
    <td><code>${shownText(row.text)}</code></td>
    <td class="num">${nats(row.logprob)}</td>
    <td class="num">${nats(row.trainer)}</td>
    <td class="num">${signed(row.mismatch)}</td>
    <td class="num">${figure(row.weight)}</td>
    <td class="num">${signed(row.advantage)}</td>
    <td><span class=${'token ' + row.state}>${stateWords(row)}</span></td>
  </tr>`;
}

const nats = (logprob) => (logprob === null ? '–' : logprob.toFixed(4).replace('-', '−'));
