// All runs of a folder: a table, and any number of them in one plot.
import {changeQuery, runPlace} from '../address.js';
import {Chart, colorOf, CurveControls, DASHES} from '../chart.js';
import {html, useEffect, useInterval, useLoaded, useMemo, useState} from '../dom.js';
import {ago, bytes, figure, interval, percent, plural, seconds, whole} from '../format.js';
import {AXES, docOf, lookOf, pointsOf, titleOf, trainingRows} from '../metrics.js';
import {source} from '../source.js';

const FIRST_SHOWN = 8;
const MOST_CHANGED = 4;
const NO_METRIC = ['step', 'phase', 'tokens_so_far'];
const TONES = {finished: 'good', failed: 'bad', stopped: 'warn'};
const RUN_ORDERS = {
  name: (run) => run.name,
  success: (run) => -(run.after ? run.after.success : -1),
  reward: (run) => -(run.reward === null ? -1e308 : run.reward),
  updated: (run) => -(run.updated || 0),
  time: (run) => -(run.wall_s || 0),
};

export function Runs({session, place, ready}) {
  const {query} = place;
  const order = query.get('sort') in RUN_ORDERS ? query.get('sort') : 'updated';
  const words = (query.get('q') || '').toLowerCase().split(/\s+/).filter((word) => word);
  const runs = orderedRuns(session.runs.filter((run) => mentions(run, words)), RUN_ORDERS[order]);
  const shown = shownIds(runs, query.getAll('show'));

  const toggle = (id) => changeQuery({show: shown.includes(id) ? shown.filter((one) => one !== id) : [...shown, id]});
  return html`
    <section class="card"><div class="row controls">
      <h1>${plural(session.runs.length, 'run')}${session.folder ? ' in ' + session.folder : ''}</h1>
      <label>name <input id="f-name" type="search" value=${query.get('q') || ''}
        onInput=${(event) => changeQuery({q: event.target.value})} /></label>
      <label>sort by <select id="f-sort" value=${order} onChange=${(event) => changeQuery({sort: event.target.value})}>
        ${Object.keys(RUN_ORDERS).map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
      </select></label>
    </div></section>
    <${Comparison} runs=${runs.filter((run) => shown.includes(run.id))} shown=${shown} place=${place}
      glossary=${session.glossary} ready=${ready} />
    <section class="card"><${RunTable} runs=${runs} shown=${shown} toggle=${toggle} /></section>
    <${Sweep} runs=${runs} />`;
}

// Those that the address names, or the first few.
function shownIds(runs, chosen) {
  const ids = runs.map((run) => run.id);
  return chosen.length ? chosen.filter((id) => ids.includes(id)) : ids.slice(0, FIRST_SHOWN);
}

// A search looks at names, environments, models, states and what differs.
function mentions(run, words) {
  const settings = Object.entries(run.changed).map(([key, value]) => key + '=' + value);
  const about = [run.id, run.env, run.model, run.state, ...settings].join(' ').toLowerCase();
  return words.every((word) => about.includes(word));
}

function orderedRuns(runs, of) {
  return [...runs].sort((a, b) => {
    if (of(a) !== of(b)) return of(a) < of(b) ? -1 : 1;
    return a.id < b.id ? -1 : 1;
  });
}

// The table

function RunTable({runs, shown, toggle}) {
  const figures = ['held-out success', 'reward', 'steps', 'tokens', 'time', 'size', 'last written'];
  return html`<table class="blocks runs">
    <thead><tr><th>drawn</th><th>run</th><th>state</th><th>what differs</th>
      ${figures.map((name) => html`<th key=${name} class="num">${name}</th>`)}</tr></thead>
    <tbody>${runs.map((run) => html`<${RunTableRow} key=${run.id} run=${run} at=${shown.indexOf(run.id)} toggle=${toggle} />`)}</tbody>
  </table>`;
}

function RunTableRow({run, at, toggle}) {
  const isCut = run.planned && run.planned !== run.steps;
  return html`<tr>
    <td data-label="drawn"><label class="swatch-box">
      <input type="checkbox" checked=${at >= 0} onChange=${() => toggle(run.id)} aria-label=${'draw ' + run.id} />
      ${at >= 0 ? html`<${LineSample} number=${at} />` : null}</label></td>
    <td data-label="run"><a href=${runPlace(run.id)}>${run.id}</a></td>
    <td data-label="state"><span class=${'badge ' + (TONES[run.state] || '')}>${run.state}</span></td>
    <td data-label="what differs" class="small"><${Changed} changed=${run.changed} /></td>
    <td data-label="held-out success" class="num"><${Change} before=${run.before} after=${run.after} /></td>
    <td data-label="reward" class="num">${figure(run.reward)}</td>
    <td data-label="steps" class="num">${whole(run.steps)}${isCut ? ' of ' + whole(run.planned) : ''}</td>
    <td data-label="tokens" class="num">${figure(run.tokens)}</td>
    <td data-label="time" class="num">${seconds(run.wall_s)}</td>
    <td data-label="size" class="num">${bytes(run.size)}</td>
    <td data-label="last written" class="num">${ago(run.updated)}</td>
  </tr>`;
}

// Runs of one sweep differ in a few keys; of others, the rest is folded.
function Changed({changed}) {
  const pairs = Object.entries(changed).map(([key, value]) => {
    const text = value === '' ? "''" : String(value);
    return html`<code key=${key} class="pair">${key} = ${text}</code>`;
  });
  if (pairs.length <= MOST_CHANGED) return html`<span>${pairs}</span>`;
  return html`<details><summary>${plural(pairs.length, 'setting')}</summary>${pairs}</details>`;
}

function LineSample({number}) {
  const dash = DASHES[number % DASHES.length].join(' ') || null;
  return html`<svg width="26" height="10" aria-hidden="true">
    <line x1="0" x2="26" y1="5" y2="5" stroke=${colorOf(number)} stroke-width="3" stroke-dasharray=${dash} /></svg>`;
}

function Change({before, after}) {
  if (!after) return html`<span class="muted">${before ? percent(before.success) + ' before' : '–'}</span>`;
  return html`<span>${before ? percent(before.success) + ' → ' : ''}<b>${percent(after.success)}</b>${' '}
    <span class="muted small">${interval(after.low, after.high)}</span></span>`;
}

// The plot

// The chosen runs in one plot of one metric, and whether their last evaluations differ by more than
// chance.
function Comparison({runs, shown, place, glossary, ready}) {
  const {query} = place;
  const metric = query.get('metric') || 'success';
  const axis = query.get('x') in AXES ? query.get('x') : 'step';
  const smooth = Number(query.get('smooth')) || 5;
  const overviews = useOverviews(runs);
  const isThere = runs.every((run) => overviews.has(run.id));
  useEffect(() => {
    if (isThere) ready();
  }, [isThere, place.hash]);

  const training = useMemo(() => rowsById(overviews), [overviews]);
  const series = runs.map((run) => {
    const number = shown.indexOf(run.id);
    return {label: run.id, color: number, dash: number, points: pointsOf(training.get(run.id) || [], metric, axis)};
  });
  const hasPoints = series.some((one) => one.points.length);
  return html`<section class="card" aria-label="comparison">
    <div class="row controls">
      <${MetricField} metric=${metric} training=${training} />
      <${CurveControls} axis=${axis} smooth=${smooth} />
    </div>
    ${hasPoints ? html`<${Chart} title=${titleOf(metric)} note=${docOf(glossary, metric)[1]} series=${series} smooth=${smooth}
      unit=${AXES[axis][0]} height=${280} ...${lookOf(glossary, metric)} />`
      : html`<p class="muted">None of the chosen runs has ${metric}.</p>`}
    <${Verdict} runs=${runs.filter((run) => run.after)} />
  </section>`;
}

// Overviews by id, asked again while one of the runs goes on; null of one that could not be read.
function useOverviews(runs) {
  const ids = runs.map((run) => run.id);
  const [round, setRound] = useState(0);
  const {value, stale} = useLoaded((signal) => readOverviews(ids, signal), [ids, round]);

  const isRunning = runs.some((run) => run.state === 'running');
  useInterval(() => stale || setRound((before) => before + 1), source.live && isRunning ? 3 : 0);
  return value || NONE;
}

const NONE = new Map();

async function readOverviews(ids, signal) {
  const answers = await Promise.all(ids.map((id) => source.overview(id, signal).catch(() => null)));
  return new Map(ids.map((id, at) => [id, answers[at]]));
}

function rowsById(overviews) {
  const rows = new Map();
  for (const [id, overview] of overviews) if (overview) rows.set(id, trainingRows(overview.rows));
  return rows;
}

function MetricField({metric, training}) {
  const names = new Set([metric]);
  for (const rows of training.values()) for (const row of rows) Object.keys(row).forEach((name) => names.add(name));
  const metrics = [...names].filter((name) => !NO_METRIC.includes(name)).sort();
  return html`<label>metric <select id="f-metric" value=${metric} onChange=${(event) => changeQuery({metric: event.target.value})}>
    ${metrics.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
  </select></label>`;
}

// Wilson intervals that do not overlap are a difference that 95% would not blame on chance. Runs are
// compared with those of the same environment.
function Verdict({runs}) {
  if (runs.length < 2) return null;
  const ranked = [...runs].sort((a, b) => b.after.success - a.after.success);
  const best = ranked[0];
  const second = ranked.slice(1).find((run) => run.env === best.env);
  if (!second) return html`<p id="verdict" class="muted">The chosen runs have different environments.</p>`;

  const success = (run) => percent(run.after.success) + ' ' + interval(run.after.low, run.after.high);
  if (best.after.low > second.after.high)
    return html`<p id="verdict"><b>${best.id}</b> is best on held-out tasks: ${success(best)}, and its interval lies above
      that of ${second.id}, ${success(second)}: more than chance.</p>`;
  return html`<p id="verdict"><b>${best.id}</b> has the highest held-out success, ${success(best)}, but the interval
    of ${second.id} overlaps it, ${success(second)}: it may be chance.</p>`;
}

// Runs that differ in some keys are a sweep: the last success by the value of each key.
function Sweep({runs}) {
  const scored = runs.filter((run) => run.after);
  const keys = [...new Set(scored.flatMap((run) => Object.keys(run.changed)))].sort();
  if (!keys.length || scored.length < 2) return null;
  return html`<details class="card"><summary>By setting</summary>
    <div class="sweeps">${keys.map((key) => html`<${SweepTable} key=${key} name=${key} runs=${scored} />`)}</div>
  </details>`;
}

function SweepTable({name, runs}) {
  const groups = new Map();
  for (const run of runs) {
    const value = name in run.changed ? String(run.changed[name]) : 'as the others';
    groups.set(value, [...(groups.get(value) || []), run.after.success]);
  }
  const rows = [...groups].sort(([a], [b]) => Number(a) - Number(b) || (a < b ? -1 : 1));
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  return html`<table><caption><code>${name}</code></caption>
    <thead><tr><th>value</th><th class="num">runs</th><th class="num">held-out success, mean</th></tr></thead>
    <tbody>${rows.map(([value, successes]) => html`<tr key=${value}>
      <td><code>${value}</code></td>
      <td class="num">${successes.length}</td>
      <td class="num">${percent(mean(successes))}</td></tr>`)}</tbody>
  </table>`;
}
