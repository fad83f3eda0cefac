// Addresses and keys.
const KEYS = [['j k', 'next and previous turn'], ['n p', 'next and previous trajectory'], ['1 – 4', 'views of a trajectory'], ['c', 'next coloring'], ['/', 'search'], ['o', 'overview'], ['l', 'list'], ['?', 'these keys']];
const Nav = {drawn: 0};

async function route() {
  const main = document.getElementById('main');
  delete main.dataset.ready;
  const mine = ++Nav.drawn;
  const still = () => mine === Nav.drawn; // a page that was asked for later is not overwritten by one that took longer
  const address = location.hash;
  const [path, query] = address.replace(/^#/, '').split('?');
  const words = path.split('/').filter((word) => word);
  const run = /^\d$/.test(words[1] || '') ? Math.min(Number(words[1]), Data.runs - 1) : 0;
  const links = [h('a', {href: '#/'}, 'overview')];
  for (let i = 0; i < Data.runs; i++) links.push(h('a', {href: '#/list/' + i}, Data.runs > 1 ? 'trajectories of ' + Data.names[i] : 'trajectories'));
  put(document.getElementById('nav'), links, h('details', {id: 'keys', class: 'keys'}, h('summary', null, 'keys'), h('div', null, KEYS.map(([key, what]) => [h('kbd', null, key), h('span', null, what)]))));
  try {
    if (words[0] === 'list') await showList(main, run, new URLSearchParams(query || ''), still);
    else if (words[0] === 't') await showTrajectory(main, run, Number(words[2]), VIEWS.includes(words[3]) ? words[3] : 'conversation', Number(words[4]) || 0, still);
    else await showOverview(main, still);
    if (!still()) return;
    main.dataset.ready = address; // what is drawn
    put(document.getElementById('state'), '');
  } catch (error) {
    if (still()) put(main, h('p', {class: 'diagnosis'}, '✖ ' + error.message));
  }
}

function step(by) {
  const turns = [...document.querySelectorAll('section.turn')];
  if (!turns.length) return;
  const here = turns.indexOf(document.activeElement.closest ? document.activeElement.closest('section.turn') : null);
  const next = turns[Math.max(0, Math.min(turns.length - 1, here + by))];
  next.scrollIntoView({block: 'start'});
  next.focus({preventScroll: true});
  history.replaceState(null, '', next.querySelector('h3 a').getAttribute('href'));
}

// The trajectory before or behind this one, in the order of the file.
async function beside(by) {
  const words = location.hash.split('/');
  if (words[1] !== 't') return;
  const [run, at] = [Number(words[2]), Number(words[3])];
  const number = (await Data.trajectory(run, at)).number + by;
  if (number < 0) return;
  const rows = Data.inside ? Data.inside.runs[run].list : null;
  const found = rows ? rows[rows.findIndex((row) => row.at === at) + by] : (await Data.list(run, {}, number, 1)).rows[0];
  if (found) location.hash = '#/t/' + run + '/' + found.at;
}

document.addEventListener('keydown', (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
    if (event.key === 'Escape') event.target.blur();
    return;
  }
  const words = location.hash.split('/');
  if (event.key === 'j') step(1);
  else if (event.key === 'k') step(-1);
  else if (event.key === 'n') beside(1);
  else if (event.key === 'p') beside(-1);
  else if (event.key === '?') document.getElementById('keys').toggleAttribute('open');
  else if (event.key === 'o') location.hash = '#/';
  else if (event.key === 'l') location.hash = '#/list/' + (words[2] && words[1] === 't' ? words[2] : 0);
  else if (/^[1-4]$/.test(event.key) && words[1] === 't') location.hash = words.slice(0, 4).join('/') + '/' + VIEWS[Number(event.key) - 1];
  else if (event.key === 'c') {
    const names = Object.keys(COLORINGS);
    Look.by = names[(names.indexOf(Look.by) + 1) % names.length];
    route();
  } else if (event.key === '/') {
    const search = document.getElementById('f-text');
    if (search) search.focus();
    else location.hash = '#/list/0';
    event.preventDefault();
  }
});

window.addEventListener('hashchange', route);

// What is known of the id under the pointer, or of the one that has the focus.
function tell(event) {
  const node = event.target.closest ? event.target.closest('.tok[data-title]') : null;
  const panel = document.getElementById('token');
  panel.hidden = node === null;
  if (node) put(panel, node.dataset.title);
}
document.addEventListener('mouseover', tell);
document.addEventListener('focusin', tell);

// A run that goes on: the overview is drawn anew when there is something new.
async function follow() {
  for (;;) {
    await new Promise((done) => setTimeout(done, 2000));
    if (document.hidden || !/^#?\/?$/.test(location.hash)) continue;
    try {
      const before = Data.overviews.map((one) => [one.rows.length, one.count, one.read].join());
      for (let run = 0; run < Data.runs; run++) await Data.overview(run);
      if (before.join(';') === Data.overviews.map((one) => [one.rows.length, one.count, one.read].join()).join(';')) continue;
      const top = window.scrollY;
      await route();
      window.scrollTo(0, top);
    } catch (error) {
      put(document.getElementById('state'), 'the viewer does not respond');
    }
  }
}

Data.start().then(route).then(() => (Data.inside ? null : follow()));
