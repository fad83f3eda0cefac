// A run at a glance: one sentence, held-out success, what to look at, six curves, and all else
// folded by theme.
import {changeQuery, episodePlace, go, listPlace} from '../address.js';
import {Chart, colorOf} from '../chart.js';
import {html, useEffect, useInterval, useLoaded, useState} from '../dom.js';
import {figure, interval, percent, plural, whole} from '../format.js';
import {AXES, docOf, lookOf, MAIN, pointsOf, policiesOf, themesOf, titleOf, trainingRows} from '../metrics.js';
import {prose, Segmented} from '../parts.js';
import {source} from '../source.js';

const DONE_COLOR = 0;

export function Overview({session, place, row, ready}) {
  const [round, setRound] = useState(0);
  const {value: run, error, stale} = useLoaded(() => source.overview(row.id), [row.id, round]);

  // A run that goes on has more rows, a finished one may be resumed.
  const changes = row.state === 'running' || (run && run.indexed.read < run.indexed.size);
  useInterval(() => setRound((before) => before + 1), source.live ? (changes ? 2 : 10) : 0);
  useEffect(() => {
    if (run && !stale) ready();
  }, [run, place.hash]);

  if (error) return html`<p class="fault" role="alert">${error.message}</p>`;
  if (!run) return html`<p class="muted">Reading ${row.name} …</p>`;
  return html`
    <${Story} run=${run} />
    <div class="glance">
      <${HeldOut} run=${run} />
      <${Diagnoses} run=${run} />
    </div>
    <${Curves} run=${run} place=${place} glossary=${session.glossary} />
    <${Tables} run=${run} />`;
}

function Story({run}) {
  const {indexed} = run;
  const reading = indexed.read < indexed.size;
  return html`<section class="card story" aria-label="what happened">
    <p class="muted small">${run.name} · ${run.state}</p>
    <h1>${run.story.sentence}</h1>
    <dl class="facts">${run.story.facts.map(([label, value]) => html`<div key=${label}><dt>${label}</dt><dd>${value}</dd></div>`)}</dl>
    <p class="next"><b>Look at</b> ${run.story.next.map((one) => html`<a key=${one.link} href=${safe(one.link)}>${one.text}</a>`)}
      <a href=${listPlace(run.id)}>${plural(indexed.count, 'episode')}</a></p>
    ${reading ? html`<p class="small" role="status">reading its episodes: ${percent(indexed.read / (indexed.size || 1), 0)}</p>` : null}
    ${run.problems.map((problem) => html`<p class="fault" key=${problem}>${problem}</p>`)}
  </section>`;
}

// Only places of this page are links.
function safe(link) {
  return link && link.startsWith('#/') ? link : '#/';
}

function HeldOut({run}) {
  const ends = run.evaluations.filter((one) => one.success !== null && one.success !== undefined);
  if (!ends.length) return null;
  // Evaluations while it trained are in the curve of success; here are its ends.
  const shown = ends.filter((one) => !/^step /.test(one.name)).slice(0, 8);
  const evaluations = shown.length ? shown : ends.slice(-4);
  return html`<section class="card" aria-label="held-out success">
    <h2>Held-out success <span class="muted small">with 95% intervals</span></h2>
    <div class="whiskers">${evaluations.map((one) => html`<${Whisker} key=${one.name + one.mode} one=${one} reference=${run.reference} />`)}</div>
    ${run.reference !== null && run.reference !== undefined ? html`<p class="muted small">┆ ${percent(run.reference)}: the best that a single reply could reach</p>` : null}
  </section>`;
}

function Whisker({one, reference}) {
  const name = (one.name || 'held-out') + ', ' + (one.mode === 'blind' ? 'every image gray' : one.mode);
  const place = (value) => 100 * Math.max(0, Math.min(1, value)) + '%';
  const told = `${name}: ${percent(one.success)}, 95% interval ${percent(one.low)} to ${percent(one.high)}` + (one.n ? `, ${one.n} episodes` : '');
  return html`<div class="whisker">
    <span class="name">${name}</span>
    <span class=${'track' + (one.name === 'after' ? ' after' : '')} role="img" aria-label=${told} title=${told}>
      <i class="bar" style=${{width: place(one.success)}}></i>
      <i class="range" style=${{left: place(one.low), width: 100 * (one.high - one.low) + '%'}}></i>
      ${reference !== null && reference !== undefined ? html`<i class="reference" style=${{left: place(reference)}}></i>` : null}
    </span>
    <b class="num">${percent(one.success)}</b>
    <span class="muted small num">${interval(one.low, one.high)}${one.n ? ' of ' + whole(one.n) : ''}</span>
  </div>`;
}

function Diagnoses({run}) {
  if (!run.diagnoses.length && !run.findings.length)
    return html`<section class="card" aria-label="diagnoses"><h2>Nothing wrong was found</h2>
      <p class="muted small">Every step is looked at for rewards that are missing or equal, cut replies, unused tools, a collapse of entropy, a mismatch of trainer and engine, and for ids that no template would write.</p></section>`;
  return html`<section aria-label="diagnoses" class="diagnoses">
    ${run.diagnoses.map((one) => html`<article class=${'card diagnosis ' + one.level} key=${one.name + one.fault}>
      <h2>${one.level === 'warn' ? '⚠ ' : ''}${one.name.replaceAll('_', ' ')}</h2>
      <p>${prose(one.fault)}</p>
      <p class="muted small">${prose(one.remedy)}</p>
      ${one.filter ? html`<a href=${listPlace(run.id, one.filter)}>the episodes that it is about</a>` : null}
    </article>`)}
    ${run.findings.map((one) => html`<article class="card diagnosis warn" key=${one.cause + one.where}>
      <h2>⚠ ${one.cause} ${one.count > 0 ? html`<span class="badge warn">${plural(one.count, 'time')}</span>` : null}</h2>
      <p>${one.sentence}</p>
      <details><summary>sampled, as the template writes it, as it was sent</summary>
        <dl class="columns">${one.columns.map(([name, text]) => html`<div key=${name}><dt>${name}</dt><dd><pre tabindex="0">${text}</pre></dd></div>`)}</dl></details>
      ${one.key ? html`<a href=${episodePlace(run.id, one.key)}>${one.where}</a>` : html`<span class="muted small">${one.where}</span>`}
    </article>`)}
  </section>`;
}

function Curves({run, place, glossary}) {
  const training = trainingRows(run.rows);
  const warmup = trainingRows(run.rows, 'warmup');
  const axis = place.query.get('x') in AXES ? place.query.get('x') : 'step';
  const smooth = Number(place.query.get('smooth')) || (training.length > 30 ? 5 : 1);
  if (!training.length && !warmup.length) return html`<section class="card"><p>No step of training is done yet.</p></section>`;

  const toEpisodes = (phase) => (step) => go(listPlace(run.id, {phase, step_min: step, step_max: step, sort: 'worst'}));
  const draw = (rows, phase) => (name) => {
    const series = [{label: phase === 'train' ? 'training' : phase, color: 0, points: pointsOf(rows, name, axis)}];
    if (name === 'success' && phase === 'train') series.push(...heldOutSeries(run, training, axis));
    policies.forEach((policy, number) => series.push({label: policy, color: number + 1, dash: number + 1, points: pointsOf(rows, `policy/${policy}/${name}`, axis)}));
    const [unit, meaning] = docOf(glossary, name);
    return html`<${Chart} key=${name} title=${titleOf(name)} note=${meaning || unit} series=${series} smooth=${smooth} unit=${AXES[axis][0]}
      ...${lookOf(glossary, name)} onPick=${axis === 'step' ? toEpisodes(phase) : null} />`;
  };
  const policies = policiesOf(training);
  const main = MAIN.map(([name]) => name);
  const warmupMetrics = [...main, ...themesOf(warmup, glossary).flatMap(([, metrics]) => metrics)];

  return html`<section class="card" aria-label="curves">
    <div class="row controls">
      <h2>Training</h2>
      <${Segmented} label="horizontal axis" value=${axis} values=${Object.keys(AXES).map((name) => [name, name])} onChange=${(x) => changeQuery({x: x === 'step' ? '' : x})} />
      <label>smooth over <input type="range" min="1" max="50" value=${smooth} onInput=${(event) => changeQuery({smooth: event.target.value})} /> ${plural(smooth, 'step')}</label>
      <span class="muted small">click a step for its episodes, drag to look closer, double-click for all</span>
    </div>
    ${training.length ? html`<div class="charts">${main.map(draw(training, 'train'))}</div>
      <${Stops} run=${run} onPick=${toEpisodes('train')} />
      ${themesOf(training, glossary).map(([theme, metrics]) => html`<${Fold} key=${theme} title=${theme + ' (' + metrics.length + ')'}>${() => html`<div class="charts">${metrics.map(draw(training, 'train'))}</div>`}<//>`)}` : null}
    ${warmup.length ? html`<${Fold} title="Warm-up" open=${!training.length}>${() => html`<div class="charts">${warmupMetrics.map(draw(warmup, 'warmup'))}</div>`}<//>` : null}
  </section>`;
}

// Evaluations as points with whiskers in the curve of success.
function heldOutSeries(run, training, axis) {
  const [, placeOf] = AXES[axis];
  const byStep = new Map(training.map((row) => [row.step, placeOf(row)]));
  const series = [];
  for (const [mode, color] of [['sampled', 1], ['greedy', 2]]) {
    const points = [];
    const whiskers = [];
    for (const one of run.evaluations.filter((each) => each.mode === mode)) {
      const x = axis === 'step' || one.step === 0 ? one.step : byStep.get(one.step);
      if (x === undefined || x === null || points.some((point) => point[0] === x)) continue;
      points.push([x, one.success]);
      whiskers.push([x, one.low, one.high]);
    }
    points.sort((a, b) => a[0] - b[0]);
    if (points.length) series.push({label: 'held-out, ' + mode, color, points, whiskers});
  }
  return series;
}

// What is folded is drawn when it is opened.
function Fold({title, open = false, children}) {
  const [shown, setShown] = useState(open);
  return html`<details open=${open} onToggle=${(event) => setShown(event.target.open)}><summary>${title}</summary>${shown ? children() : null}</details>`;
}

function Stops({run, onPick}) {
  const {steps, shares, sentences} = run.stops;
  // What ends an episode as it should is on top, so that all else stands on the ground line.
  const names = Object.keys(shares).sort((a, b) => (a === 'done') - (b === 'done'));
  if (!steps.length || !names.length) return null;
  const colors = names.map((name, number) => (name === 'done' ? DONE_COLOR : number + 1));
  const series = names.map((name, number) => ({label: name, color: colors[number], points: steps.map((step, at) => [step, shares[name][at] || 0])}));
  return html`<div class="stops">
    <${Chart} title="How episodes ended" note="share of a step's episodes" series=${series} stacked share format=${(value) => percent(value, 0)} onPick=${onPick} height=${150} />
    <dl class="sentences">${names.map((name, number) => html`<div key=${name}><dt><i class="swatch" style=${{background: colorOf(colors[number])}}></i>
      <a href=${listPlace(run.id, {phase: 'train', stop: name})}>${name}</a></dt><dd class="muted">${sentences[name]}</dd></div>`)}</dl>
  </div>`;
}

function Tables({run}) {
  return html`
    ${run.untrained.length ? html`<${Sheet} title="Sampled tokens that were not trained, by reason" heads=${['reason', 'tokens', 'share of all sampled']}
      rows=${run.untrained.map(([reason, tokens, share]) => [reason, whole(tokens), percent(share)])} />` : null}
    ${run.lags.length ? html`<${Sheet} title="Trained tokens by lag" heads=${['updates behind', 'tokens', 'share', 'KL of trainer and engine', 'effective samples']}
      rows=${run.lags.map(([lag, tokens, share, kl, ess]) => [lag, whole(tokens), percent(share), figure(kl), percent(ess)])} />` : null}
    ${run.time.length ? html`<${Sheet} title="Where the time went" heads=${['what', 'time', 'share']} rows=${run.time.map(([what, took, share]) => [what, duration(took), percent(share)])} />` : null}
    <${Settings} run=${run} />`;
}

function duration(value) {
  return value < 100 ? figure(value) + ' s' : figure(value / 60) + ' min';
}

function Sheet({title, heads, rows}) {
  return html`<details class="card"><summary>${title}</summary>
    <table class="blocks"><thead><tr>${heads.map((head, at) => html`<th key=${head} class=${at ? 'num' : ''}>${head}</th>`)}</tr></thead>
      <tbody>${rows.map((row) => html`<tr key=${row[0]}>${row.map((cell, at) => html`<td key=${at} class=${at ? 'num' : ''} data-label=${heads[at]}>${cell}</td>`)}</tr>`)}</tbody></table>
  </details>`;
}

function Settings({run}) {
  return html`<details class="card"><summary>Settings (${run.settings.length} that are not the default)</summary>
    ${run.command ? html`<pre class="command" tabindex="0">${run.command}</pre>` : null}
    <table class="blocks"><thead><tr><th>key</th><th>value</th><th>from</th></tr></thead>
      <tbody>${run.settings.map(([key, value, origin]) => html`<tr key=${key}><td data-label="key"><code>${key}</code></td><td data-label="value"><code>${value}</code></td><td data-label="from" class="muted">${origin}</td></tr>`)}</tbody></table>
    <p class="muted small">${run.defaults ? plural(run.defaults, 'more setting') + ' at the default. ' : ''}${Object.entries(run.versions).map(([name, version]) => name + ' ' + version).join(' · ')}</p>
  </details>`;
}
