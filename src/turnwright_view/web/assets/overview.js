// The run at a glance: what is wrong, curves, evaluations, the sanity check, settings.
const CURVES = [
  ['reward', 'Reward', false], ['success', 'Success', true], ['turns', 'Turns', false], ['groups_no_signal', 'Groups without signal', false],
  ['truncated_share', 'Truncated', true], ['failed_share', 'Failed', true], ['tool_users', 'Episodes with a tool call', true], ['reply_tokens.p50', 'Reply length, median', false],
  ['entropy', 'Entropy', false], ['mismatch_mean', 'Mismatch', false], ['grad_norm', 'Gradient norm', false], ['repetition', 'Repetition', true],
  ['loss', 'Loss', false], ['seconds.generate.p95', 'Generate, p95 of an episode', false], ['seconds.tool.p95', 'Tools, p95 of an episode', false], ['seconds.environment.p95', 'Environment, p95', false],
  ['seconds.wait.p95', 'Waiting, p95 of an episode', false], ['rollout_over_train', 'Rollout time over training time', false], ['tokens_per_s', 'Sampled tokens per second', false],
  ['trained_tokens_per_s', 'Trained tokens per second', false], ['cache_hit', 'Cache hits', true], ['image_token_share', 'Share of image tokens', true], ['peak_memory_mib', 'Peak memory, MiB', false],
];

function meaning(name) {
  for (const [known, row] of Object.entries(Data.glossary)) {
    if (known === name || (known.endsWith('>') && name.startsWith(known.split('<')[0]))) return row.map((text) => text.replaceAll('`', ''));
  }
  return ['', '', ''];
}

function pointsOf(rows, phase, name) {
  const kept = new Map();
  for (const row of rows) if (row.phase === phase && typeof row[name] === 'number') kept.set(row.step, row[name]);
  return thin([...kept.entries()]);
}

function curves(runs, phase, names, prefix = '') {
  const drawn = [];
  for (const [name, title, share] of names) {
    const series = runs.map((run, number) => ({run: number, label: run.name, points: pointsOf(run.rows, phase, prefix + name), link: phase === 'train' ? (step) => '#/list/' + number + '?phase=train&step_min=' + step + '&step_max=' + step + '&worst=1' : null}));
    const [unit, text, advice] = meaning(name);
    const figure = chart(title, text + (unit && unit !== '1' ? ' (' + unit + ')' : ''), series, share);
    if (!figure) continue;
    if (advice && advice !== 'nothing') figure.append(h('p', {class: 'advice'}, advice));
    drawn.push(figure);
  }
  return drawn;
}

// What each of several policies has for itself (`policy/NAME/metric`): curves that all runs have, then its other metrics.
function policies(runs) {
  const found = new Map();
  for (const run of runs) {
    for (const row of run.rows) {
      for (const name of row.phase === 'train' ? Object.keys(row) : []) {
        const parts = /^policy\/([^/]+)\/(.+)$/.exec(name);
        if (parts) found.set(parts[1], (found.get(parts[1]) || new Set()).add(parts[2]));
      }
    }
  }
  return [...found].map(([policy, metrics]) => {
    const prefix = 'policy/' + policy + '/';
    const known = CURVES.map(([name]) => name);
    const others = [...metrics].filter((name) => !known.includes(name)).sort().map((name) => [name, name, false]);
    return h('section', {class: 'policy'}, h('h2', null, 'Policy ' + policy), h('div', {class: 'charts'}, curves(runs, 'train', CURVES, prefix)),
      others.length ? h('details', null, h('summary', null, 'other metrics of ' + policy), h('div', {class: 'charts'}, curves(runs, 'train', others, prefix))) : null);
  });
}

async function showOverview(main, still) {
  const runs = [];
  for (let run = 0; run < Data.runs; run++) runs.push(await Data.overview(run));
  if (!still()) return;
  const parts = [];
  runs.forEach((run, number) => {
    parts.push(h('h1', null, runs.length > 1 ? (number ? '┄ ' : '─ ') + run.name : run.name));
    const all = run.count === undefined ? run.all : run.count;
    const part = run.size && run.read < run.size ? ', ' + Math.floor((100 * run.read) / run.size) + '% of the file read' : '';
    parts.push(h('p', null, h('a', {href: '#/list/' + number}, plural(all, 'trajectory').replace('trajectorys', 'trajectories')), part,
      run.summary.success_after !== undefined ? ' · success ' + percent(run.summary.success_before) + ' before, ' + percent(run.summary.success_after) + ' after' : ' · running, or stopped early'));
    for (const [name, fault, remedy] of run.diagnoses) parts.push(h('p', {class: 'diagnosis', role: 'note'}, '⚠ ', h('b', null, name + '. '), fault, ' ', h('em', null, remedy)));
    for (const problem of run.problems) parts.push(h('p', {class: 'diagnosis'}, '⚠ incomplete: ', problem));
  });
  if (runs.length > 1) parts.push(compare(runs));
  parts.push(evaluations(runs));
  const reinforcement = curves(runs, 'train', CURVES);
  if (reinforcement.length) parts.push(h('section', {id: 'reinforcement'}, h('h2', null, 'Reinforcement'), h('div', {class: 'charts'}, reinforcement)));
  parts.push(policies(runs));
  const warmup = curves(runs, 'warmup', [['loss', 'Warmup loss', false]]).concat(curves(runs, 'gate', [['success', 'Success at the gate', true]]));
  if (warmup.length) parts.push(h('section', null, h('h2', null, 'Warmup'), h('div', {class: 'charts'}, warmup)));
  parts.push(families(runs));
  runs.forEach((run) => {
    if (run.findings.length) parts.push(h('section', null, h('h2', null, 'Sanity check'), run.findings.map((one) => [h('p', null, h('b', null, one.cause), ' ' + one.sentence), h('p', {class: 'muted'}, one.where), columns(one.columns)])));
    if (run.settings.length) parts.push(h('section', null, h('h2', null, 'Changed settings'), h('table', null, h('tbody', null, run.settings.map((row) => h('tr', null, row.map((cell) => h('td', null, h('code', null, cell)))))))));
  });
  put(main, parts);
}

function columns(pairs) {
  return h('div', {class: 'columns'}, pairs.map(([name, text]) => h('div', null, h('h4', null, name), h('pre', null, text))));
}

function evaluations(runs) {
  const rows = [];
  runs.forEach((run) => run.rows.forEach((row) => {
    if (row.phase === 'eval') rows.push(h('tr', null, h('td', null, run.name), h('td', null, row.name), h('td', null, row.mode), h('td', {class: 'num'}, percent(row.success)), h('td', {class: 'num'}, fixed(row.turns)), h('td', {class: 'num'}, row.n)));
  }));
  if (!rows.length) return null;
  const head = ['run', 'evaluation', 'mode', 'success', 'turns', 'episodes'].map((name, i) => h('th', {class: i > 2 ? 'num' : null}, name));
  return h('section', null, h('h2', null, 'Held-out success'), h('table', null, h('thead', null, h('tr', null, head)), h('tbody', null, rows)));
}

function lastTrain(run) {
  const rows = run.rows.filter((row) => row.phase === 'train');
  return rows[rows.length - 1] || {};
}

function compare(runs) {
  const [one, two] = runs.map(lastTrain);
  const names = [...new Set([...Object.keys(one), ...Object.keys(two)])].filter((name) => typeof one[name] === 'number' || typeof two[name] === 'number').sort();
  const rows = names.map((name) => {
    const [a, b] = [one[name], two[name]];
    const change = typeof a === 'number' && typeof b === 'number' ? (b > a ? '▲ ' : b < a ? '▼ ' : '= ') + fixed(b - a) : '';
    return h('tr', null, h('td', {title: meaning(name)[1]}, h('code', null, name)), h('td', {class: 'num'}, fixed(a)), h('td', {class: 'num'}, fixed(b)), h('td', {class: 'num'}, change));
  });
  const head = ['figure', '─ ' + runs[0].name, '┄ ' + runs[1].name, 'change'].map((name) => h('th', null, name));
  return h('details', {id: 'compare'}, h('summary', null, 'Last training step of both runs, by metric'), h('table', null, h('thead', null, h('tr', null, head)), h('tbody', null, rows)));
}

function families(runs) {
  const row = lastTrain(runs[0]);
  const groups = new Map();
  for (const name of Object.keys(row)) {
    const family = name.split('.')[0];
    if (family !== name && typeof row[name] === 'number') groups.set(family, (groups.get(family) || []).concat(name));
  }
  if (!groups.size) return null;
  const tables = [...groups].map(([family, names]) => h('div', null, h('h3', null, family), h('p', {class: 'muted'}, meaning(names[0])[1]),
    h('table', null, h('tbody', null, names.map((name) => h('tr', null, h('td', null, name.slice(family.length + 1)), h('td', {class: 'num'}, fixed(row[name]))))))));
  return h('section', null, h('h2', null, 'Metrics of step ' + row.step), h('div', {class: 'families'}, tables));
}
