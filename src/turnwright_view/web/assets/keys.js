// Keys of the page. A view adds its own by `useViewKeys`.
import {go, listPlace, runPlace, runsPlace} from './address.js';
import {html, useEffect, useRef} from './dom.js';

const HELP = [
  ['o', 'overview of the run'], ['l', 'its episodes'], ['r', 'all runs'], ['/', 'search'],
  ['j k', 'next and previous: row of a list, turn of an episode'], ['Enter', 'open the row'],
  ['n p', 'next and previous episode'], ['g', 'group of the episode'], ['d', 'difference to a sibling'],
  ['1 – 4', 'views of an episode'], ['c', 'next coloring'], ['← →', 'along a curve'], ['?', 'these keys'],
];

const own = new Map();

// Keys of a view: {key: action}; gone with the view.
export function useViewKeys(actions) {
  const latest = useRef(actions);
  latest.current = actions;
  useEffect(() => {
    const names = Object.keys(latest.current);
    names.forEach((name) => own.set(name, () => latest.current[name]()));
    return () => names.forEach((name) => own.delete(name));
  }, []);
}

export function useKeys(place) {
  const latest = useRef(place);
  latest.current = place;
  useEffect(() => {
    const pressed = (event) => onKey(event, latest.current);
    document.addEventListener('keydown', pressed);
    return () => document.removeEventListener('keydown', pressed);
  }, []);
}

function onKey(event, place) {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (event.key === 'Escape') {
    document.getElementById('keys').removeAttribute('open');
    if (typing) event.target.blur();
  }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;

  const general = {
    o: () => place.run && go(runPlace(place.run)),
    l: () => place.run && go(listPlace(place.run)),
    r: () => go(runsPlace()),
    '/': () => search(place),
    '?': () => document.getElementById('keys').toggleAttribute('open'),
  };
  const action = own.get(event.key) || general[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

function search(place) {
  const field = document.getElementById('f-text');
  if (field) field.focus();
  else if (place.run) go(listPlace(place.run, {focus: 'text'}));
}

// j and k: the next or previous of some elements gets the focus.
export function moveFocus(selector, by) {
  const all = [...document.querySelectorAll(selector)];
  if (!all.length) return null;
  const here = all.findIndex((one) => one === document.activeElement || one.contains(document.activeElement));
  const next = all[Math.max(0, Math.min(all.length - 1, here + by))];
  next.scrollIntoView({block: 'nearest'});
  next.focus({preventScroll: true});
  return next;
}

export function KeyHelp() {
  return html`<details id="keys" class="keys"><summary>keys</summary>
    <dl>${HELP.map(([key, what]) => html`<div key=${key}><dt><kbd>${key}</kbd></dt><dd>${what}</dd></div>`)}</dl>
  </details>`;
}
