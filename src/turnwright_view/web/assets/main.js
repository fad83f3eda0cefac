// The page: its head, the view of the address, and what is followed while a run goes on.
import {listPlace, runPlace, runsPlace, usePlace} from './address.js';
import {html, render, useEffect, useInterval, useState} from './dom.js';
import {visibleText} from './format.js';
import {KeyHelp, useKeys} from './keys.js';
import {source} from './source.js';
import {Diff} from './views/diff.js';
import {Episode} from './views/episode.js';
import {Episodes} from './views/episodes.js';
import {Group} from './views/group.js';
import {Overview} from './views/overview.js';
import {Runs} from './views/runs.js';

const VIEWS = {overview: Overview, episodes: Episodes, group: Group, episode: Episode, diff: Diff};
const POLL_S = 2;

function App() {
  const place = usePlace();
  const [session, setSession] = useState(null);
  const [fault, setFault] = useState('');

  const load = (asked) =>
    asked.then(
      (answer) => {
        setSession((before) => ({...before, ...answer}));
        setFault('');
      },
      (error) => setFault(error.message),
    );
  useEffect(() => {
    load(source.session());
  }, []);
  useInterval(() => load(source.runs()), source.live ? POLL_S : 0);

  if (!session && fault) return html`<main id="main"><p class="fault" role="alert">${fault}</p></main>`;
  if (!session) return html`<main id="main"><p class="muted">Reading the run …</p></main>`;

  const only = session.runs.length === 1 ? session.runs[0].id : '';
  const at = place.view === 'home' ? {...place, view: only ? 'overview' : 'runs', run: only} : place;
  const row = session.runs.find((one) => one.id === at.run);
  return html`<${Head} session=${session} place=${at} row=${row} fault=${fault} />
    <${View} key=${at.view + '/' + at.run} session=${session} place=${at} row=${row} />`;
}

function Head({session, place, row, fault}) {
  const here = (view) => (place.view === view ? 'page' : null);
  return html`<header>
    <a class="brand" href=${session.runs.length === 1 ? runPlace(session.runs[0].id) : runsPlace()}>turnwright</a>
    <nav aria-label="pages">
      ${session.runs.length > 1 ? html`<a href=${runsPlace()} aria-current=${here('runs')}>runs</a>` : null}
      ${row ? html`<a href=${runPlace(row.id)} aria-current=${here('overview')}>${row.name}</a>
        <a href=${listPlace(row.id)} aria-current=${here('episodes')}>episodes</a>` : null}
    </nav>
    ${row && row.state === 'running' ? html`<span class="live">running</span>` : null}
    <span role="status" class="fault-line">${fault ? 'the viewer does not respond: ' + fault : ''}</span>
    <${KeyHelp} />
  </header>`;
}

function View({session, place, row}) {
  useKeys(place);
  const [ready, setReady] = useState(null);

  // Every place begins at its top, but a place with other parameters stays where it is.
  useEffect(() => {
    window.scrollTo(0, 0);
  }, [place.view, place.run, place.key]);

  const Shown = place.view === 'runs' ? Runs : VIEWS[place.view];
  const isKnown = Shown && (place.view === 'runs' || row);
  return html`<main id="main" tabindex="-1" data-ready=${ready === place.hash ? place.hash || '#/' : null}>
    ${isKnown ? html`<${Shown} session=${session} place=${place} row=${row} ready=${() => setReady(place.hash)} />`
      : html`<${Nowhere} place=${place} isRun=${Boolean(row)} />`}
  </main>`;
}

function Nowhere({place, isRun}) {
  const what = isRun ? 'such page' : 'run ' + visibleText(place.run);
  return html`<p class="fault" role="alert">There is no ${what} here. <a href="#/">To the first page</a></p>`;
}

document.title = 'Turnwright';
render(html`<${App} />`, document.getElementById('app'));
