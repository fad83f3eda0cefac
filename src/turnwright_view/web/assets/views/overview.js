// A run at a glance: one sentence, held-out success, what to look at, six curves, and all else
// folded by theme.
import {episodePlace, go, listPlace} from '../address.js';
import {Chart, colorOf, CurveControls} from '../chart.js';
import {html, useEffect, useInterval, useLoaded, useState} from '../dom.js';
import {figure, interval, percent, plural, seconds, whole} from '../format.js';
import {AXES, docOf, lookOf, MAIN, pointsOf, policiesOf, themesOf, titleOf, trainingRows} from '../metrics.js';
import {prose} from '../parts.js';
import {source} from '../source.js';

const DONE_COLOR = 0;
const MOST_WHISKERS = 8;

export function Overview({session, place, row, ready}) {
  const [round, setRound] = useState(0);
  const {value: run, error, stale} = useLoaded((signal) => source.overview(row.id, signal), [row.id, round]);

  // One that takes longer than the time between two looks is waited for.
  useInterval(() => stale || setRound((before) => before + 1), pollingOf(row, run));
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

// Seconds between two looks: a run that goes on has more rows, a finished one may be resumed, and the
// run of a file stays as it is.
function pollingOf(row, run) {
  if (!source.live) return 0;
  const isReading = run && run.indexed.read < run.indexed.size;
  return row.state === 'running' || isReading ? 2 : 10;
}

function Story({run}) {
  const {facts, next, sentence} = run.story;
  const {count, read, size} = run.indexed;
  return html`<section class="card story" aria-label="what happened">
    <p class="muted small">${run.name} · ${run.state}</p>
    <h1>${sentence}</h1>
    <dl class="facts">${facts.map(([label, value]) => html`<div key=${label}><dt>${label}</dt><dd>${value}</dd></div>`)}</dl>
    <p class="next"><b>Look at</b>
      ${next.map((one) => html`<a key=${one.link} href=${safe(one.link)}>${one.text}</a>`)}
      <a href=${listPlace(run.id)}>${plural(count, 'episode')}</a></p>
    ${read < size ? html`<p class="small" role="status">reading its episodes: ${percent(read / size, 0)}</p>` : null}
    ${run.problems.map((problem) => html`<p class="fault" key=${problem}>${problem}</p>`)}
  </section>`;
}

// Only places of this page are links.
function safe(link) {
  return link && link.startsWith('#/') ? link : '#/';
}

function HeldOut({run}) {
  const measured = run.evaluations.filter((one) => one.success !== null && one.success !== undefined);
  if (!measured.length) return null;

  // Evaluations while it trained are in the curve of success; here are its ends.
  const ends = measured.filter((one) => !/^step[ -]/.test(one.name)).slice(0, MOST_WHISKERS);
  const shown = ends.length ? ends : measured.slice(-4);
  const hasReference = run.reference !== null && run.reference !== undefined;
  return html`<section class="card" aria-label="held-out success">
    <h2>Held-out success <span class="muted small">with 95% intervals</span></h2>
    <div class="whiskers">
      ${shown.map((one) => html`<${Whisker} key=${one.name + one.mode} one=${one} reference=${run.reference} />`)}
    </div>
    ${hasReference ? html`<p class="muted small">┆ ${percent(run.reference)}: the best that a single reply could reach</p>` : null}
  </section>`;
}

function Whisker({one, reference}) {
  const name = (one.name || 'held-out') + ', ' + (one.mode === 'blind' ? 'every image gray' : one.mode);
  const place = (value) => 100 * Math.max(0, Math.min(1, value)) + '%';
  const episodes = one.n ? `, ${one.n} episodes` : '';
  const told = `${name}: ${percent(one.success)}, 95% interval ${percent(one.low)} to ${percent(one.high)}${episodes}`;
  const hasReference = reference !== null && reference !== undefined;
  return html`<div class="whisker">
    <span class="name">${name}</span>
    <span class=${'track' + (one.name === 'after' ? ' after' : '')} role="img" aria-label=${told} title=${told}>
      <i class="bar" style=${{width: place(one.success)}}></i>
      <i class="range" style=${{left: place(one.low), width: 100 * (one.high - one.low) + '%'}}></i>
      ${hasReference ? html`<i class="reference" style=${{left: place(reference)}}></i>` : null}
    </span>
    <b class="num">${percent(one.success)}</b>
    <span class="muted small num">${interval(one.low, one.high)}${one.n ? ' of ' + whole(one.n) : ''}</span>
  </div>`;
}

function Diagnoses({run}) {
  if (!run.diagnoses.length && !run.findings.length)
    return html`<section class="card" aria-label="diagnoses">
      <h2>Nothing wrong was found</h2>
      <p class="muted small">
        Every step is looked at for rewards that are missing or equal, failures, cut replies, unused tools,
        a collapse of entropy, a mismatch of trainer and engine, and ids that no template would write.
      </p></section>`;
  return html`<section aria-label="diagnoses" class="diagnoses">
    ${run.diagnoses.map((one) => html`<${DiagnosisCard} key=${one.name + one.fault} one=${one} run=${run.id} />`)}
    ${run.findings.map((one) => html`<${FindingCard} key=${one.cause + one.where} one=${one} run=${run.id} />`)}
  </section>`;
}

function DiagnosisCard({one, run}) {
  return html`<article class=${'card diagnosis ' + one.level}>
    <h2>${one.level === 'warn' ? '⚠ ' : ''}${one.name}</h2>
    <p>${prose(one.fault)}</p>
    <p class="muted small">${prose(one.remedy)}</p>
    ${one.filter ? html`<a href=${listPlace(run, one.filter)}>the episodes that it is about</a>` : null}
  </article>`;
}

// A difference between what was sampled and what the chat template would write.
function FindingCard({one, run}) {
  const times = one.count > 0 ? html`<span class="badge warn">${plural(one.count, 'time')}</span>` : null;
  return html`<article class="card diagnosis warn">
    <h2>⚠ ${one.cause} ${times}</h2>
    <p>${one.sentence}</p>
    <details><summary>sampled, as the template writes it, as it was sent</summary>
      <dl class="columns">${one.columns.map(([name, text]) => html`<div key=${name}>
        <dt>${name}</dt><dd><pre tabindex="0">${text}</pre></dd></div>`)}</dl>
    </details>
    ${one.key ? html`<a href=${episodePlace(run, one.key)}>${one.where}</a>` : html`<span class="muted small">${one.where}</span>`}
  </article>`;
}

function Curves({run, place, glossary}) {
  const training = trainingRows(run.rows);
  const warmup = trainingRows(run.rows, 'warmup');
  if (!training.length && !warmup.length) return html`<section class="card"><p>No step of training is done yet.</p></section>`;

  const axis = place.query.get('x') in AXES ? place.query.get('x') : 'step';
  const smooth = Number(place.query.get('smooth')) || (training.length > 30 ? 5 : 1);
  const toEpisodes = (phase) => (step) => go(listPlace(run.id, {phase, step_min: step, step_max: step, sort: 'worst'}));

  // Charts of some metrics of a phase, those of all policies in one.
  const policies = policiesOf(training);
  const draw = (rows, phase) => (name) => {
    const series = [{label: phase === 'train' ? 'training' : phase, color: 0, points: pointsOf(rows, name, axis)}];
    if (name === 'success' && phase === 'train') series.push(...heldOutSeries(run, training, axis));
    policies.forEach((policy, number) => {
      const points = pointsOf(rows, `policy/${policy}/${name}`, axis);
      series.push({label: policy, color: number + 1, dash: number + 1, points});
    });
    const [unit, meaning] = docOf(glossary, name);
    return html`<${Chart} key=${name} title=${titleOf(name)} note=${meaning || unit} series=${series} smooth=${smooth}
      unit=${AXES[axis][0]} ...${lookOf(glossary, name)} onPick=${axis === 'step' ? toEpisodes(phase) : null} />`;
  };
  const charts = (metrics, rows, phase) => html`<div class="charts">${metrics.map(draw(rows, phase))}</div>`;

  const main = MAIN.map(([name]) => name);
  const warmupMetrics = [...main, ...themesOf(warmup, glossary).flatMap(([, metrics]) => metrics)];
  return html`<section class="card" aria-label="curves">
    <div class="row controls">
      <h2>Training</h2>
      <${CurveControls} axis=${axis} smooth=${smooth} />
      <span class="muted small">click a step for its episodes, drag to look closer, double-click for all</span>
    </div>
    ${training.length ? html`
      ${charts(main, training, 'train')}
      <${Stops} run=${run} onPick=${toEpisodes('train')} />
      ${themesOf(training, glossary).map(([theme, metrics]) => html`
        <${Fold} key=${theme} title=${theme + ' (' + metrics.length + ')'}>${() => charts(metrics, training, 'train')}<//>`)}` : null}
    ${warmup.length ? html`
      <${Fold} title="Warm-up" open=${!training.length}>${() => charts(warmupMetrics, warmup, 'warmup')}<//>` : null}
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
  return html`<details open=${open} onToggle=${(event) => setShown(event.target.open)}>
    <summary>${title}</summary>${shown ? children() : null}</details>`;
}

function Stops({run, onPick}) {
  const {steps, shares, sentences} = run.stops;
  // What ends an episode as it should is on top, so that all else stands on the ground line.
  const names = Object.keys(shares).sort((a, b) => (a === 'done') - (b === 'done'));
  if (!steps.length || !names.length) return null;

  const series = names.map((name, number) => ({
    label: name,
    color: name === 'done' ? DONE_COLOR : number + 1,
    points: steps.map((step, at) => [step, shares[name][at] || 0]),
  }));
  return html`<div class="stops">
    <${Chart} title="How episodes ended" note="share of a step's episodes" series=${series} stacked share
      format=${(value) => percent(value, 0)} onPick=${onPick} height=${150} />
    <dl class="sentences">${series.map(({label, color}) => html`<div key=${label}>
      <dt><i class="swatch" style=${{background: colorOf(color)}}></i>
        <a href=${listPlace(run.id, {phase: 'train', stop: label})}>${label}</a></dt>
      <dd class="muted">${sentences[label]}</dd></div>`)}</dl>
  </div>`;
}

function Tables({run}) {
  const untrained = run.untrained.map(([reason, tokens, share]) => [reason, whole(tokens), percent(share)]);
  const lags = run.lags.map(([lag, tokens, share, kl, ess]) => [lag, whole(tokens), percent(share), figure(kl), percent(ess)]);
  const time = run.time.map(([what, took, share]) => [what, seconds(took), percent(share)]);
  return html`
    <${Sheet} title="Sampled tokens that were not trained, by reason" rows=${untrained}
      heads=${['reason', 'tokens', 'share of all sampled']} />
    <${Sheet} title="Trained tokens by lag" rows=${lags}
      heads=${['updates behind', 'tokens', 'share', 'KL of trainer and engine', 'effective samples']} />
    <${Sheet} title="Where the time went" heads=${['what', 'time', 'share']} rows=${time} />
    <${Settings} run=${run} />`;
}

function Sheet({title, heads, rows}) {
  if (!rows.length) return null;
  const kind = (at) => (at ? 'num' : '');
  return html`<details class="card"><summary>${title}</summary>
    <table class="blocks">
      <thead><tr>${heads.map((head, at) => html`<th key=${head} class=${kind(at)}>${head}</th>`)}</tr></thead>
      <tbody>${rows.map((row) => html`<tr key=${row[0]}>
        ${row.map((cell, at) => html`<td key=${at} class=${kind(at)} data-label=${heads[at]}>${cell}</td>`)}</tr>`)}</tbody>
    </table>
  </details>`;
}

function Settings({run}) {
  const versions = Object.entries(run.versions).map(([name, version]) => name + ' ' + version);
  return html`<details class="card"><summary>Settings (${run.settings.length} that are not the default)</summary>
    ${run.command ? html`<pre class="command" tabindex="0">${run.command}</pre>` : null}
    <table class="blocks">
      <thead><tr><th>key</th><th>value</th><th>from</th></tr></thead>
      <tbody>${run.settings.map(([key, value, origin]) => html`<tr key=${key}>
        <td data-label="key"><code>${key}</code></td>
        <td data-label="value"><code>${value}</code></td>
        <td data-label="from" class="muted">${origin}</td></tr>`)}</tbody>
    </table>
    <p class="muted small">
      ${run.defaults ? plural(run.defaults, 'more setting') + ' at the default. ' : ''}${versions.join(' · ')}</p>
  </details>`;
}
