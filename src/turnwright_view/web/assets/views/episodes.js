// The list of a run's episodes: filters in the address, the ones that matter first.
import {changeQuery, episodePlace, groupOf, groupPlace, listPlace} from '../address.js';
import {html, useEffect, useInterval, useLoaded, useRef, useState} from '../dom.js';
import {figure, percent, plural, seconds, signed, visibleText, whole} from '../format.js';
import {moveFocus, useViewKeys} from '../keys.js';
import {stepName} from '../parts.js';
import {source} from '../source.js';

const PAGE = 100;
const WORDS = ['phase', 'stop', 'error', 'tool', 'task', 'group', 'agent', 'trained', 'tie', 'text', 'sort'];
const BOUNDED = ['step', 'reward', 'turns', 'tokens'];
const FILTERS = [...WORDS, ...BOUNDED.flatMap((name) => [name + '_min', name + '_max'])];

const ORDER_NAMES = {
  notable: 'last step, failures first',
  worst: 'worst reward',
  best: 'best reward',
  newest: 'newest',
  oldest: 'oldest',
  longest: 'most tokens',
  slowest: 'slowest',
};

export function Episodes({place, row, ready}) {
  const filter = filterOf(place.query);
  const start = Math.max(0, Number(place.query.get('start')) || 0);
  const [round, setRound] = useState(0);
  const facets = useLoaded((signal) => source.facets(row.id, signal), [row.id, round]);
  const load = (signal) => source.episodes(row.id, filter, start, PAGE, signal);
  const list = useLoaded(load, [row.id, filter, start, round]);
  const page = list.value;

  // While a run goes on or its index grows, the list is asked again, but not under a reader's hands.
  const growing = page && (page.indexed.read < page.indexed.size || row.state === 'running');
  const isRead = () => page.rows.length && document.activeElement !== document.body;
  const again = () => list.stale || facets.stale || isRead() || setRound((before) => before + 1);
  useInterval(again, source.live && growing ? 3 : 0);
  useEffect(() => {
    if (page && !list.stale) ready();
  }, [page, place.hash]);

  useViewKeys({
    j: () => moveFocus('a.episode', 1),
    k: () => moveFocus('a.episode', -1),
    n: () => page && page.next !== null && changeQuery({start: page.next}),
    p: () => start && changeQuery({start: Math.max(0, start - PAGE)}),
  });

  const focused = place.query.get('focus') === 'text';
  return html`
    <h1 class="list-title">Episodes of ${row.name}</h1>
    <${Filters} facets=${facets.value} filter=${filter} focused=${focused} run=${row.id} />
    ${list.error ? html`<p class="fault" role="alert">${list.error.message}</p>` : null}
    ${page ? html`<${List} page=${page} start=${start} run=${row.id} filter=${filter} />` : html`<p class="muted">Reading …</p>`}`;
}

function filterOf(query) {
  const filter = {};
  for (const name of FILTERS) if (query.get(name)) filter[name] = query.get(name);
  return filter;
}

// Every filter is a parameter of the address; a changed filter begins at the first page.
function setFilter(name, value) {
  changeQuery({[name]: value, start: '', focus: ''});
}

// Filters

function Filters({facets, filter, focused, run}) {
  const values = facets || {phase: [], stop: [], error: [], tool: [], agent: []};
  const errors = values.error.length ? [['*', 'any error'], ...counted(values.error)] : [];
  const agents = values.agent.length > 1 ? counted(values.agent) : [];
  return html`<form class="card filters" role="search" aria-label="episodes" onSubmit=${(event) => event.preventDefault()}>
    <${SearchField} text=${filter.text} focused=${focused} />
    <${Choice} name="phase" label="phase" options=${counted(values.phase)} filter=${filter} />
    <${Choice} name="stop" label="ended by" options=${counted(values.stop)} filter=${filter} />
    <${Choice} name="error" label="error" options=${errors} filter=${filter} />
    <${Choice} name="tool" label="tool" options=${counted(values.tool)} filter=${filter} />
    <${Choice} name="agent" label="agent" options=${agents} filter=${filter} />
    <${Choice} name="tie" label="group" options=${[['yes', 'all rewards equal'], ['no', 'rewards differ']]} filter=${filter} />
    <${Choice} name="trained" label="trained" options=${[['yes', 'yes'], ['no', 'no']]} filter=${filter} />
    <${OrderField} order=${filter.sort || 'notable'} />
    <${Ranges} filter=${filter} />
    <${Chips} filter=${filter} run=${run} />
  </form>`;
}

function counted(values) {
  return values.map(([value, count]) => [value, value + ' (' + whole(count) + ')']);
}

function SearchField({text, focused}) {
  const field = useRef(null);
  useEffect(() => {
    if (focused) field.current.focus();
  }, [focused]);

  return html`<label class="search"><span>search</span>
    <input id="f-text" ref=${field} type="search" placeholder="words of prompts, replies, results, errors"
      value=${text || ''} onChange=${(event) => setFilter('text', event.target.value)} /></label>`;
}

function Choice({name, label, options, filter}) {
  const chosen = filter[name] || '';
  if (!options.length && !chosen) return null;

  // A value of the address that no episode has (any more) can still be seen and removed.
  const isKnown = !chosen || options.some(([value]) => value === chosen);
  const all = isKnown ? options : [[chosen, visibleText(chosen)], ...options];
  return html`<label>${label} <select id=${'f-' + name} value=${chosen} onChange=${(event) => setFilter(name, event.target.value)}>
    <option value="">any</option>
    ${all.map(([value, said]) => html`<option key=${value} value=${value}>${said}</option>`)}
  </select></label>`;
}

function OrderField({order}) {
  const choose = (event) => setFilter('sort', event.target.value === 'notable' ? '' : event.target.value);
  return html`<label>order <select id="f-sort" value=${order} onChange=${choose}>
    ${Object.entries(ORDER_NAMES).map(([name, said]) => html`<option key=${name} value=${name}>${said}</option>`)}
  </select></label>`;
}

function Ranges({filter}) {
  const open = BOUNDED.some((name) => filter[name + '_min'] || filter[name + '_max']);
  return html`<details open=${open}><summary>ranges</summary><div class="row">
    ${BOUNDED.map((name) => html`<span key=${name} class="range-field"><span class="muted small">${name}</span>
      <${Bound} name=${name + '_min'} label=${name + ' at least'} filter=${filter} /> to
      <${Bound} name=${name + '_max'} label=${name + ' at most'} filter=${filter} /></span>`)}
  </div></details>`;
}

function Bound({name, label, filter}) {
  return html`<input id=${'f-' + name} aria-label=${label} type="number" step="any" value=${filter[name] || ''}
    onChange=${(event) => setFilter(name, event.target.value)} />`;
}

// What has no field of its own, and the way back to all.
function Chips({filter, run}) {
  const names = Object.keys(filter).filter((name) => name !== 'sort');
  if (!names.length) return null;

  const chips = ['task', 'group'].filter((name) => filter[name]);
  return html`<p class="chips">
    ${chips.map((name) => html`<button key=${name} type="button" onClick=${() => setFilter(name, '')}>
      ${name} ${visibleText(filter[name])} ✕</button>`)}
    <a href=${listPlace(run, {sort: filter.sort})}>all episodes</a></p>`;
}

// Rows

function List({page, start, run, filter}) {
  const pages = html`<${Pages} page=${page} start=${start} run=${run} filter=${filter} />`;
  return html`${pages}
    <${Rows} rows=${page.rows} run=${run} />
    ${page.rows.length > 20 ? pages : null}`;
}

function Pages({page, start, run, filter}) {
  const link = (at, text) => html`<a href=${listPlace(run, {...filter, start: at || ''})}>${text}</a>`;
  const hasNext = page.next !== null && page.next !== undefined;
  return html`<p class="pages row" role="status">
    <span>${shownOf(page, start)}${howFar(page.indexed)}</span>
    ${start > 0 ? link(Math.max(0, start - PAGE), '← before') : null}
    ${hasNext ? link(page.next, 'next →') : null}</p>`;
}

function shownOf({rows, total}, start) {
  const shown = rows.length ? whole(start + 1) + ' – ' + whole(start + rows.length) : 'none';
  const isCounted = total !== null && total !== undefined;
  return shown + ' of ' + (isCounted ? plural(total, 'episode') : 'more');
}

// A file has a selection, and an index may not have read all of a run yet.
function howFar({count, all, read, size}) {
  if (all && all > count) return ` (the file has ${whole(count)} of ${whole(all)})`;
  return read < size ? `; ${percent(read / size, 0)} of the file is read` : '';
}

function Rows({rows, run}) {
  if (!rows.length) return html`<p class="card">No episode fits. <a href=${listPlace(run)}>Show all</a></p>`;

  const parts = [];
  for (const row of rows) {
    const last = parts[parts.length - 1];
    if (last && last.phase === row.phase && last.step === row.step) last.rows.push(row);
    else parts.push({phase: row.phase, step: row.step, rows: [row]});
  }
  return html`<div class="episodes">${parts.map((part, at) => html`<${StepRows} key=${at} part=${part} run=${run} />`)}</div>`;
}

function StepRows({part, run}) {
  const alone = {phase: part.phase, step_min: part.step, step_max: part.step};
  return html`<div>
    <h2>${stepName(part.phase, part.step)} <a class="small" href=${listPlace(run, alone)}>only these</a></h2>
    <ol>${part.rows.map((row) => html`<${Row} key=${row.key} row=${row} run=${run} />`)}</ol>
  </div>`;
}

function Row({row, run}) {
  return html`<li>
    <a class="episode" href=${episodePlace(run, row.key)}>
      <${Score} reward=${row.reward} />
      <span class="texts">
        <span class="prompt">${row.prompt || row.task}</span>
        <span class="reply">${row.snippet ? '… ' + row.snippet : row.reply || 'no reply'}</span>
      </span>
      <${RowFacts} row=${row} />
    </a>
    <a class="group-link small" href=${groupPlace(run, row.key)} aria-label=${'group of ' + groupOf(row.key)}>group</a>
  </li>`;
}

function Score({reward}) {
  if (reward === null || reward === undefined) return html`<span class="score warn" title="reward">none</span>`;
  return html`<span class=${'score ' + (reward > 0 ? 'good' : 'bad')} title="reward">${figure(reward)}</span>`;
}

function RowFacts({row}) {
  const facts = [plural(row.turns, 'turn'), plural(row.tokens, 'token'), seconds(row.wall_s)];
  if (row.tools.length) facts.push(row.tools.join(', '));
  if (row.images > 0) facts.push(plural(row.images, 'image'));
  if (row.branches > 0) facts.push('history rewritten ' + plural(row.branches, 'time'));

  const isTrained = row.advantage !== null && row.advantage !== undefined;
  return html`<span class="facts-line">
    <${Ending} row=${row} />
    ${row.tie ? html`<span class="badge" title="all rewards of its group are equal">tie</span>` : null}
    ${isTrained ? html`<span class="num" title="advantage">${signed(row.advantage)}</span>` : null}
    <span>${facts.join(' · ')}</span></span>`;
}

// How an episode ended, where it is not as it should.
function Ending({row}) {
  if (row.error) return html`<span class="badge bad">✖ ${row.error}</span>`;
  if (row.stop && row.stop !== 'done') return html`<span class="badge warn">${row.stop}</span>`;
  return null;
}
