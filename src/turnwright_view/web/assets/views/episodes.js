// The list of a run's episodes: filters in the address, the ones that matter first.
import {changeQuery, episodePlace, go, groupOf, groupPlace, listPlace} from '../address.js';
import {html, useEffect, useInterval, useLoaded, useRef, useState} from '../dom.js';
import {figure, percent, plural, seconds, signed, visibleText, whole} from '../format.js';
import {moveFocus, useViewKeys} from '../keys.js';
import {stepName} from '../parts.js';
import {source} from '../source.js';

const PAGE = 100;
const FILTERS = ['phase', 'stop', 'error', 'tool', 'task', 'group', 'agent', 'trained', 'tie', 'text', 'sort'].concat(
  ['step', 'reward', 'turns', 'tokens'].flatMap((name) => [name + '_min', name + '_max']),
);
const ORDER_NAMES = {
  notable: 'last step, failures first', worst: 'worst reward', best: 'best reward', newest: 'newest', oldest: 'oldest', longest: 'most tokens', slowest: 'slowest',
};

export function Episodes({place, row, ready}) {
  const filter = Object.fromEntries(FILTERS.map((name) => [name, place.query.get(name) || '']).filter(([, value]) => value));
  const start = Math.max(0, Number(place.query.get('start')) || 0);
  const [round, setRound] = useState(0);
  const facets = useLoaded(() => source.facets(row.id), [row.id, round]);
  const {value: page, error, stale} = useLoaded(() => source.episodes(row.id, filter, start, PAGE), [row.id, filter, start, round]);

  // While a run goes on or its index grows, the list is asked again, but not under a reader's hands.
  const growing = page && (page.indexed.read < page.indexed.size || row.state === 'running');
  useInterval(() => document.activeElement === document.body && setRound((before) => before + 1), source.live && growing ? 3 : 0);
  useEffect(() => {
    if (page && !stale) ready();
  }, [page, place.hash]);
  useViewKeys({
    j: () => moveFocus('a.episode', 1),
    k: () => moveFocus('a.episode', -1),
    n: () => page && page.next !== null && changeQuery({start: page.next}),
    p: () => start && changeQuery({start: Math.max(0, start - PAGE)}),
  });

  return html`
    <h1 class="list-title">Episodes of ${row.name}</h1>
    <${Filters} facets=${facets.value} filter=${filter} focused=${place.query.get('focus') === 'text'} run=${row.id} />
    ${error ? html`<p class="fault" role="alert">${error.message}</p>` : null}
    ${page ? html`<${Pages} page=${page} start=${start} run=${row.id} filter=${filter} />
      <${Rows} rows=${page.rows} run=${row.id} filter=${filter} />
      ${page.rows.length > 20 ? html`<${Pages} page=${page} start=${start} run=${row.id} filter=${filter} />` : null}` : html`<p class="muted">Reading …</p>`}`;
}

// Every filter is a parameter of the address; a changed filter begins at the first page.
function set(name, value) {
  changeQuery({[name]: value, start: '', focus: ''});
}

function Filters({facets, filter, focused, run}) {
  const text = useRef(null);
  useEffect(() => {
    if (focused && text.current) text.current.focus();
  }, [focused]);
  const values = facets || {phase: [], stop: [], error: [], tool: [], agent: []};
  const ranges = ['step', 'reward', 'turns', 'tokens'];
  const ranged = ranges.some((name) => filter[name + '_min'] || filter[name + '_max']);

  const choice = (name, label, options) => (options.length || filter[name] ? html`<label>${label} <select id=${'f-' + name} value=${filter[name] || ''} onChange=${(event) => set(name, event.target.value)}>
    <option value="">any</option>${withOwn(options, filter[name]).map(([value, said]) => html`<option key=${value} value=${value}>${said}</option>`)}</select></label>` : null);
  const counted = (rows) => rows.map(([value, count]) => [value, value + ' (' + whole(count) + ')']);

  return html`<form class="card filters" role="search" aria-label="episodes" onSubmit=${(event) => event.preventDefault()}>
    <label class="search"><span>search</span> <input id="f-text" ref=${text} type="search" placeholder="words of prompts, replies, results, errors" value=${filter.text || ''} onChange=${(event) => set('text', event.target.value)} /></label>
    ${choice('phase', 'phase', counted(values.phase))}
    ${choice('stop', 'ended by', counted(values.stop))}
    ${choice('error', 'error', values.error.length ? [['*', 'any error'], ...counted(values.error)] : [])}
    ${choice('tool', 'tool', counted(values.tool))}
    ${values.agent.length > 1 || filter.agent ? choice('agent', 'agent', counted(values.agent)) : null}
    ${choice('tie', 'group', [['yes', 'all rewards equal'], ['no', 'rewards differ']])}
    ${choice('trained', 'trained', [['yes', 'yes'], ['no', 'no']])}
    <label>order <select id="f-sort" value=${filter.sort || 'notable'} onChange=${(event) => set('sort', event.target.value === 'notable' ? '' : event.target.value)}>
      ${Object.entries(ORDER_NAMES).map(([name, said]) => html`<option key=${name} value=${name}>${said}</option>`)}</select></label>
    <details open=${ranged}><summary>ranges</summary><div class="row">${ranges.map((name) => html`<span key=${name} class="range-field"><span class="muted small">${name}</span>
      <input id=${'f-' + name + '_min'} aria-label=${name + ' at least'} type="number" step="any" value=${filter[name + '_min'] || ''} onChange=${(event) => set(name + '_min', event.target.value)} /> to
      <input id=${'f-' + name + '_max'} aria-label=${name + ' at most'} type="number" step="any" value=${filter[name + '_max'] || ''} onChange=${(event) => set(name + '_max', event.target.value)} /></span>`)}</div></details>
    <${Chips} filter=${filter} run=${run} />
  </form>`;
}

// A value of the address that no episode has (any more) can still be seen and removed.
function withOwn(options, value) {
  return !value || options.some(([name]) => name === value) ? options : [[value, visibleText(value)], ...options];
}

// What has no field of its own, and the way back to all.
function Chips({filter, run}) {
  const names = Object.keys(filter).filter((name) => name !== 'sort');
  if (!names.length) return null;
  return html`<p class="chips">${['task', 'group'].filter((name) => filter[name]).map((name) => html`<button key=${name} type="button" onClick=${() => set(name, '')}>${name} ${visibleText(filter[name])} ✕</button>`)}
    <a href=${listPlace(run, {sort: filter.sort})}>all episodes</a></p>`;
}

function Pages({page, start, run, filter}) {
  const {indexed, total} = page;
  const reading = indexed.read < indexed.size ? `; ${percent(indexed.read / indexed.size, 0)} of the file is read` : '';
  const left = indexed.all && indexed.all > indexed.count ? ` (the file has ${whole(indexed.count)} of ${whole(indexed.all)})` : '';
  const shown = page.rows.length ? `${whole(start + 1)} – ${whole(start + page.rows.length)}` : 'none';
  const link = (at, text) => html`<a href=${listPlace(run, {...filter, start: at || ''})}>${text}</a>`;
  return html`<p class="pages row" role="status"><span>${shown} of ${total === null || total === undefined ? 'more' : plural(total, 'episode')}${left}${reading}</span>
    ${start > 0 ? link(Math.max(0, start - PAGE), '← before') : null}
    ${page.next !== null && page.next !== undefined ? link(page.next, 'next →') : null}</p>`;
}

function Rows({rows, run, filter}) {
  if (!rows.length) return html`<p class="card">No episode fits. <a href=${listPlace(run)}>Show all</a></p>`;
  const parts = [];
  for (const row of rows) {
    const part = parts[parts.length - 1];
    if (part && part.phase === row.phase && part.step === row.step) part.rows.push(row);
    else parts.push({phase: row.phase, step: row.step, rows: [row]});
  }
  return html`<div class="episodes">${parts.map((part, at) => html`<div key=${at}>
    <h2>${stepName(part.phase, part.step)} <a class="small" href=${listPlace(run, {phase: part.phase, step_min: part.step, step_max: part.step})}>only these</a></h2>
    <ol>${part.rows.map((row) => html`<${Row} key=${row.key} row=${row} run=${run} filter=${filter} />`)}</ol></div>`)}</div>`;
}

function Row({row, run}) {
  const facts = [plural(row.turns, 'turn'), plural(row.tokens, 'token'), seconds(row.wall_s)];
  if (row.tools.length) facts.push(row.tools.join(', '));
  if (row.images > 0) facts.push(plural(row.images, 'image'));
  if (row.branches > 0) facts.push('history rewritten ' + plural(row.branches, 'time'));
  const missing = row.reward === null || row.reward === undefined;
  const tone = missing ? 'warn' : row.reward > 0 ? 'good' : 'bad';
  return html`<li>
    <a class="episode" href=${episodePlace(run, row.key)}>
      <span class=${'score ' + tone} title="reward">${missing ? 'none' : figure(row.reward)}</span>
      <span class="texts"><span class="prompt">${row.prompt || row.task}</span>
        <span class="reply">${row.snippet ? '… ' + row.snippet : row.reply || 'no reply'}</span></span>
      <span class="facts-line">${row.error ? html`<span class="badge bad">✖ ${row.error}</span>` : row.stop && row.stop !== 'done' ? html`<span class="badge warn">${row.stop}</span>` : null}
        ${row.tie ? html`<span class="badge" title="all rewards of its group are equal">tie</span>` : null}
        ${row.advantage !== null && row.advantage !== undefined ? html`<span class="num" title="advantage">${signed(row.advantage)}</span>` : null}
        <span>${facts.join(' · ')}</span></span>
    </a>
    <a class="group-link small" href=${groupPlace(run, row.key)} aria-label=${'group of ' + groupOf(row.key)}>group</a>
  </li>`;
}
