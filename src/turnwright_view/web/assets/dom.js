// Components are functions that return html`...`. All text of a run becomes text nodes: nothing is
// parsed as HTML, and no address is made of anything but a place of this page (address.js).

export const {Fragment, h, render} = window.preact;
export const {useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState} = window.preactHooks;
export const html = window.htm.bind(h);

// What `load` returned for the newest `inputs`: {value, error}. A view of an earlier address never
// overwrites that of a later one, however long it took.
export function useLoaded(load, inputs) {
  const [state, setState] = useState({value: null, error: null, of: null});
  const name = JSON.stringify(inputs);

  useEffect(() => {
    let wanted = true;
    load().then(
      (value) => wanted && setState({value, error: null, of: name}),
      (error) => wanted && setState({value: null, error, of: name}),
    );
    return () => {
      wanted = false;
    };
  }, [name]);

  return state.of === name ? state : {...state, error: null, stale: true};
}

// Calls `action` every `seconds` while the page is in sight.
export function useInterval(action, seconds) {
  const latest = useRef(action);
  latest.current = action;

  useEffect(() => {
    if (!seconds) return undefined;
    const timer = setInterval(() => document.hidden || latest.current(), 1000 * seconds);
    return () => clearInterval(timer);
  }, [seconds]);
}
