// The table of trajectories, with filters that stand in the address.
const FIELDS = ['phase', 'stop', 'error', 'tool', 'task', 'text', 'step_min', 'step_max', 'reward_min', 'reward_max', 'turns_min', 'turns_max', 'newest', 'worst'];
const NUMBERS = new Set([1, 3, 4, 6, 7, 9, 11]);

function filterOf(query) {
  const filter = {};
  for (const name of FIELDS) filter[name] = query.get(name) || '';
  return filter;
}

async function showList(main, run, query, still) {
  const filter = filterOf(query);
  let first = Data.list(run, filter, 0, 100); // asked for at once; what there is to choose from comes beside it
  first.catch(() => null);
  const about = await Data.about(run);
  if (!still()) return;
  const go = (changes) => { // of the address as it is now, which may be another than this page was drawn for
    const now = Object.assign(filterOf(new URLSearchParams(location.hash.split('?')[1] || '')), changes);
    location.hash = '#/list/' + run + '?' + new URLSearchParams(FIELDS.filter((name) => now[name] !== '').map((name) => [name, now[name]]));
  };
  const change = (name) => (event) => {
    if (Typed.moving) return; // removing a field fires its change event
    delete event.target.dataset.typed;
    go({[name]: event.target.value});
  };
  const enter = (event) => { // also what a field took over from the one before, which is no change of its own
    if (event.key !== 'Enter' || event.target.tagName !== 'INPUT') return;
    const fields = [...event.currentTarget.querySelectorAll('[data-typed]')];
    for (const field of fields) delete field.dataset.typed;
    go(Object.fromEntries(fields.map((field) => [field.id.slice(2), field.value])));
  };
  const choice = (name, label, first) => {
    const options = [h('option', {value: ''}, 'any')].concat(first || [], about.facets[name].map((value) => h('option', {value}, value)));
    const select = h('select', {id: 'f-' + name, onchange: change(name)}, options);
    select.value = filter[name];
    return h('label', null, label + ' ', select);
  };
  const input = (name, label, kind) => h('label', null, label + ' ', h('input', {id: 'f-' + name, type: kind, step: 'any', value: filter[name], onchange: change(name), oninput: Typed.mark}));
  const bar = h('form', {class: 'filters', onkeydown: enter, onsubmit: (event) => event.preventDefault()},
    input('text', 'text', 'search'), choice('phase', 'phase'), choice('stop', 'stop'), choice('error', 'error', [h('option', {value: '*'}, 'any error')]), choice('tool', 'tool'),
    input('step_min', 'step from', 'number'), input('step_max', 'to', 'number'), input('reward_min', 'reward from', 'number'), input('reward_max', 'to', 'number'),
    input('turns_min', 'turns from', 'number'), input('turns_max', 'to', 'number'), input('task', 'task', 'text'),
    h('button', {type: 'button', onclick: () => go({newest: filter.newest === '1' ? '' : '1'})}, filter.newest === '1' ? 'newest first' : 'oldest first'),
    h('button', {type: 'button', 'aria-pressed': filter.worst === '1' ? 'true' : 'false', onclick: () => go({worst: filter.worst === '1' ? '' : '1'})}, 'worst first'),
    h('a', {href: '#/list/' + run}, 'clear'));
  const names = ['phase', 'step', 'task', 'sample', 'reward', 'stop', 'turns', 'tokens', 'tools', 'images', 'error', 'time'];
  const body = h('tbody', null);
  const status = h('p', {id: 'status', class: 'muted', role: 'status'}, 'searching …');
  const more = h('button', {type: 'button', hidden: true}, 'more');
  Typed.keep(() => put(main, h('h1', null, about.name), bar, status, h('table', {class: 'list'}, h('thead', null, h('tr', null, names.map((name, i) => h('th', {class: NUMBERS.has(i) ? 'num' : null}, name)))), body), more));
  let count = 0;
  const load = async (start) => {
    const found = await (start === 0 && first ? first : Data.list(run, filter, start, 100));
    first = null;
    if (!still()) return;
    for (const row of found.rows) add(body, [line(run, row)]);
    count += found.rows.length;
    const of = found.total === null ? (found.next === null ? '' : ', part of the file searched') : ' of ' + found.total;
    const reading = found.read < found.size ? '; the file is being read, ' + Math.floor((100 * found.read) / found.size) + '%' : '';
    put(status, count + of + ' listed' + reading + (Data.inside && Data.inside.runs[run].all > found.total ? '; the file contains a selection of ' + Data.inside.runs[run].all : ''));
    more.hidden = found.next === null;
    more.onclick = () => load(found.next);
    if (found.total === null && found.next !== null && count < 20) await load(found.next);
  };
  await load(0);
}

// A field that is being written into while the list is drawn anew goes on where it was.
const Typed = {
  moving: false,
  mark: (event) => { event.target.dataset.typed = ''; },
  keep: (draw) => {
    const field = document.activeElement;
    const text = /^(text|search)$/.test(field.type) ? [field.selectionStart, field.selectionEnd] : null;
    Typed.moving = true;
    draw();
    Typed.moving = false;
    const now = /^f-/.test(field.id) && document.getElementById(field.id);
    if (!now) return;
    if ('typed' in field.dataset) {
      now.value = field.value;
      Typed.mark({target: now});
    }
    now.focus({preventScroll: true});
    if (text) now.setSelectionRange(...text);
  },
};

function line(run, row) {
  const link = '#/t/' + run + '/' + row.at;
  const cells = [row.phase, row.step, h('a', {href: link}, row.task.slice(0, 24)), row.sample, reward(row.reward), row.stop, row.turns, row.tokens, row.tools.join(' '), row.images || '', row.error, seconds(row.wall_s)];
  return h('tr', {class: row.error ? 'failed' : null, onclick: () => { location.hash = link; }}, cells.map((cell, i) => h('td', {class: NUMBERS.has(i) ? 'num' : null}, cell)));
}

function reward(value) {
  return value === null || value === undefined ? 'none' : fixed(value);
}
