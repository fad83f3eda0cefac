// Places of the page, all in the address after #, so that every one has a link that stays.
import {useEffect, useState} from './dom.js';

function parseAddress(hash) {
  const [path, query] = hash.replace(/^#/, '').split('?');
  const words = path.split('/').filter((word) => word);
  const place = {view: 'home', run: '', key: '', query: new URLSearchParams(query || ''), hash};
  if (words[0] === 'runs') return {...place, view: 'runs'};
  if (words[0] !== 'run' || !words[1]) return place;
  return {...place, run: decoded(words[1]), view: words[2] || 'overview', key: words.slice(3).join('/')};
}

function decoded(word) {
  try {
    return decodeURIComponent(word);
  } catch {
    return word; // a percent sign that encodes nothing
  }
}

// Query parameters without those that are empty; a list gives one for each of its values.
export function queryOf(values) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(values || {}))
    for (const one of Array.isArray(value) ? value : [value])
      if (one !== '' && one !== null && one !== undefined) query.append(name, String(one));
  const text = query.toString();
  return text ? '?' + text : '';
}

export const runsPlace = (query) => '#/runs' + queryOf(query);
export const runPlace = (run, query) => '#/run/' + encodeURIComponent(run) + queryOf(query);
export const listPlace = (run, query) => '#/run/' + encodeURIComponent(run) + '/episodes' + queryOf(query);
export const episodePlace = (run, key, query) => '#/run/' + encodeURIComponent(run) + '/episode/' + key + queryOf(query);
export const diffPlace = (run, key, other) => '#/run/' + encodeURIComponent(run) + '/diff/' + key + queryOf({with: other});

// A key is phase/step/task/sample/attempt, each part encoded by itself.
export const groupOf = (key) => key.split('/').slice(0, 3).join('/');
export const groupPlace = (run, key) => '#/run/' + encodeURIComponent(run) + '/group/' + groupOf(key);
export const keyParts = (key) => key.split('/').map(decoded);

// This place with some parameters changed, without an entry in the history.
export function changeQuery(changes) {
  const place = parseAddress(location.hash);
  for (const [name, value] of Object.entries(changes)) {
    place.query.delete(name);
    for (const one of Array.isArray(value) ? value : [value])
      if (one !== '' && one !== null && one !== undefined) place.query.append(name, String(one));
  }
  const text = place.query.toString();
  const [path] = location.hash.split('?');
  history.replaceState(null, '', (path || '#/') + (text ? '?' + text : ''));
  window.dispatchEvent(new HashChangeEvent('hashchange'));
}

export function go(address) {
  location.hash = address;
}

export function usePlace() {
  const [place, setPlace] = useState(() => parseAddress(location.hash));
  useEffect(() => {
    const moved = () => setPlace(parseAddress(location.hash));
    window.addEventListener('hashchange', moved);
    return () => window.removeEventListener('hashchange', moved);
  }, []);
  return place;
}
