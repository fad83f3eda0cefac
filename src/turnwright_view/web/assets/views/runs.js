// All runs of a folder: a table, and any number of them in one plot.
import {changeQuery, runPlace} from '../address.js';
import {Chart, colorOf, DASHES} from '../chart.js';
import {html, useEffect, useInterval, useMemo, useState} from '../dom.js';
import {ago, bytes, figure, interval, percent, plural, seconds, whole} from '../format.js';
import {AXES, docOf, lookOf, pointsOf, titleOf, trainingRows} from '../metrics.js';
import {Segmented} from '../parts.js';
import {source} from '../source.js';

const FIRST_SHOWN = 8;
const MOST_CHANGED = 4;
const RUN_ORDERS = {
  name: (run) => run.name,
  success: (run) => -(run.after ? run.after.success : -1),
  reward: (run) => -(run.reward === null ? -1e308 : run.reward),
  updated: (run) => -(run.updated || 0),
  time: (run) => -(run.wall_s || 0),
};

export function Runs({session, place, ready}) {
  const {query} = place;
  const sort = query.get('sort') in RUN_ORDERS ? query.get('sort') : 'updated';
  const runs = orderedRuns(session.runs.filter((run) => named(run, query.get('q') || '')), RUN_ORDERS[sort]);
  const chosen = query.getAll('show');
  const shown = chosen.length ? chosen.filter((id) => runs.some((run) => run.id === id)) : runs.slice(0, FIRST_SHOWN).map((run) => run.id);

  const toggle = (id) => changeQuery({show: shown.includes(id) ? shown.filter((one) => one !== id) : [...shown, id]});
  return html`
    <section class="card"><div class="row controls">
      <h1>${plural(session.runs.length, 'run')}${session.folder ? ' in ' + session.folder : ''}</h1>
      <label>name <input id="f-name" type="search" value=${query.get('q') || ''} onInput=${(event) => changeQuery({q: event.target.value})} /></label>
      <label>sort by <select id="f-sort" value=${sort} onChange=${(event) => changeQuery({sort: event.target.value})}>
        ${Object.keys(RUN_ORDERS).map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label>
    </div></section>
    <${Comparison} runs=${runs.filter((run) => shown.includes(run.id))} shown=${shown} query=${query} glossary=${session.glossary} ready=${ready} hash=${place.hash} />
    <section class="card"><${RunTable} runs=${runs} shown=${shown} toggle=${toggle} /></section>
    <${Sweep} runs=${runs} />`;
}

function named(run, text) {
  const words = text.toLowerCase().split(/\s+/).filter((word) => word);
  const about = [run.id, run.env, run.model, run.state, ...Object.entries(run.changed).map(([key, value]) => key + '=' + value)].join(' ').toLowerCase();
  return words.every((word) => about.includes(word));
}

function orderedRuns(runs, of) {
  return [...runs].sort((a, b) => {
    const [one, other] = [of(a), of(b)];
    return one < other ? -1 : one > other ? 1 : a.id < b.id ? -1 : 1;
  });
}

function RunTable({runs, shown, toggle}) {
  return html`<table class="blocks runs"><thead><tr>
      <th>drawn</th><th>run</th><th>state</th><th>what differs</th><th class="num">held-out success</th><th class="num">reward</th><th class="num">steps</th>
      <th class="num">tokens</th><th class="num">time</th><th class="num">size</th><th class="num">last written</th></tr></thead>
    <tbody>${runs.map((run) => {
      const at = shown.indexOf(run.id);
      return html`<tr key=${run.id}>
        <td data-label="drawn"><label class="swatch-box"><input type="checkbox" checked=${at >= 0} onChange=${() => toggle(run.id)} aria-label=${'draw ' + run.id} />
          ${at >= 0 ? html`<${LineSample} number=${at} />` : null}</label></td>
        <td data-label="run"><a href=${runPlace(run.id)}>${run.id}</a></td>
        <td data-label="state"><span class=${'badge ' + ({finished: 'good', failed: 'bad', stopped: 'warn'}[run.state] || '')}>${run.state}</span></td>
        <td data-label="what differs" class="small"><${Changed} changed=${run.changed} /></td>
        <td data-label="held-out success" class="num"><${Change} before=${run.before} after=${run.after} /></td>
        <td data-label="reward" class="num">${figure(run.reward)}</td>
        <td data-label="steps" class="num">${whole(run.steps)}${run.planned && run.planned !== run.steps ? ' of ' + whole(run.planned) : ''}</td>
        <td data-label="tokens" class="num">${figure(run.tokens)}</td>
        <td data-label="time" class="num">${seconds(run.wall_s)}</td>
        <td data-label="size" class="num">${bytes(run.size)}</td>
        <td data-label="last written" class="num">${ago(run.updated)}</td></tr>`;
    })}</tbody></table>`;
}

// Runs of one sweep differ in a few keys; of others, the rest is folded.
function Changed({changed}) {
  const pairs = Object.entries(changed).map(([key, value]) => html`<code key=${key} class="pair">${key} = ${value === '' ? "''" : String(value)}</code>`);
  if (pairs.length <= MOST_CHANGED) return html`<span>${pairs}</span>`;
  return html`<details><summary>${plural(pairs.length, 'setting')}</summary>${pairs}</details>`;
}

function LineSample({number}) {
  const dash = DASHES[number % DASHES.length].join(' ');
  return html`<svg width="26" height="10" aria-hidden="true"><line x1="0" x2="26" y1="5" y2="5" stroke=${colorOf(number)} stroke-width="3" stroke-dasharray=${dash || null} /></svg>`;
}

function Change({before, after}) {
  if (!after) return html`<span class="muted">${before ? percent(before.success) + ' before' : '–'}</span>`;
  return html`<span>${before ? percent(before.success) + ' → ' : ''}<b>${percent(after.success)}</b> <span class="muted small">${interval(after.low, after.high)}</span></span>`;
}

// The chosen runs in one plot of one metric, and whether their last evaluations differ by more than
// chance.
function Comparison({runs, shown, query, glossary, ready, hash}) {
  const metric = query.get('metric') || 'success';
  const axis = query.get('x') in AXES ? query.get('x') : 'step';
  const smooth = Number(query.get('smooth')) || 5;
  const [overviews, setOverviews] = useState({});
  const [round, setRound] = useState(0);
  const names = runs.map((run) => run.id).join('\n');

  useInterval(() => setRound((before) => before + 1), source.live && runs.some((run) => run.state === 'running') ? 3 : 0);
  useEffect(() => {
    let wanted = true;
    Promise.all(runs.map((run) => source.overview(run.id).then((found) => [run.id, found], () => [run.id, null]))).then((found) => {
      if (wanted) setOverviews(Object.fromEntries(found));
    });
    return () => {
      wanted = false;
    };
  }, [names, round]);
  const there = runs.every((run) => run.id in overviews);
  useEffect(() => {
    if (there) ready();
  }, [there, hash]);

  const training = useMemo(() => new Map(runs.filter((run) => overviews[run.id]).map((run) => [run.id, trainingRows(overviews[run.id].rows)])), [overviews, names]);
  const metrics = [...new Set([...training.values()].flatMap((rows) => rows.flatMap((row) => Object.keys(row))))].filter((name) => !['step', 'phase', 'tokens_so_far'].includes(name)).sort();
  const series = runs.map((run) => ({
    label: run.id,
    color: shown.indexOf(run.id),
    dash: shown.indexOf(run.id),
    points: pointsOf(training.get(run.id) || [], metric, axis),
  }));

  return html`<section class="card" aria-label="comparison">
    <div class="row controls">
      <label>metric <select id="f-metric" value=${metric} onChange=${(event) => changeQuery({metric: event.target.value})}>
        ${(metrics.includes(metric) ? metrics : [metric, ...metrics]).map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label>
      <${Segmented} label="horizontal axis" value=${axis} values=${Object.keys(AXES).map((name) => [name, name])} onChange=${(x) => changeQuery({x: x === 'step' ? '' : x})} />
      <label>smooth over <input type="range" min="1" max="50" value=${smooth} onInput=${(event) => changeQuery({smooth: event.target.value})} /> ${plural(smooth, 'step')}</label>
    </div>
    ${series.some((one) => one.points.length) ? html`<${Chart} title=${titleOf(metric)} series=${series} smooth=${smooth} unit=${AXES[axis][0]} height=${280} note=${docOf(glossary, metric)[1]} ...${lookOf(glossary, metric)} />`
      : html`<p class="muted">None of the chosen runs has ${metric}.</p>`}
    <${Verdict} runs=${runs.filter((run) => run.after)} />
  </section>`;
}

// Wilson intervals that do not overlap are a difference that 95% would not blame on chance; where
// they overlap, nothing is said.
function Verdict({runs}) {
  if (runs.length < 2) return null;
  const ranked = [...runs].sort((a, b) => b.after.success - a.after.success);
  const [best, second] = ranked;
  const apart = best.after.low > second.after.high;
  return html`<p id="verdict">${apart
    ? html`<b>${best.id}</b> is best on held-out tasks: ${percent(best.after.success)} ${interval(best.after.low, best.after.high)}, and its interval lies above that of ${second.id}, ${percent(second.after.success)} ${interval(second.after.low, second.after.high)}: more than chance.`
    : html`<b>${best.id}</b> has the highest held-out success, ${percent(best.after.success)} ${interval(best.after.low, best.after.high)}, but the interval of ${second.id} overlaps it, ${percent(second.after.success)} ${interval(second.after.low, second.after.high)}: it may be chance.`}</p>`;
}

// Runs that differ in few keys are a sweep: the last success by the value of each key.
function Sweep({runs}) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.changed)))].sort();
  const scored = runs.filter((run) => run.after);
  if (!keys.length || scored.length < 2) return null;
  return html`<details class="card"><summary>By setting</summary>
    <div class="sweeps">${keys.map((key) => html`<${SweepTable} key=${key} name=${key} runs=${scored} />`)}</div>
  </details>`;
}

function SweepTable({name, runs}) {
  const values = new Map();
  for (const run of runs) {
    const value = name in run.changed ? String(run.changed[name]) : 'as the others';
    values.set(value, [...(values.get(value) || []), run]);
  }
  const rows = [...values].sort(([a], [b]) => (Number(a) - Number(b)) || (a < b ? -1 : 1));
  return html`<table><caption><code>${name}</code></caption><thead><tr><th>value</th><th class="num">runs</th><th class="num">held-out success, mean</th></tr></thead>
    <tbody>${rows.map(([value, group]) => html`<tr key=${value}><td><code>${value}</code></td><td class="num">${group.length}</td>
      <td class="num">${percent(group.reduce((sum, run) => sum + run.after.success, 0) / group.length)}</td></tr>`)}</tbody></table>`;
}
