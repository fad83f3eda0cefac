// Components are functions that return html`...`. All text of a run becomes text nodes: nothing is
// parsed as HTML, and no address is made of anything but a place of this page (address.js).

export const {render} = window.preact;
export const {useEffect, useLayoutEffect, useMemo, useRef, useState} = window.preactHooks;
export const html = window.htm.bind(window.preact.h);

// What `load(signal)` returned for the newest `inputs`: {value, error, stale}. A view of an earlier
// address never overwrites that of a later one, however long it took; what it still asks for ends.
export function useLoaded(load, inputs) {
  const [state, setState] = useState({value: null, error: null, of: null});
  const name = JSON.stringify(inputs);

  useEffect(() => {
    const asked = new AbortController();
    const answered = (answer) => asked.signal.aborted || setState({value: null, error: null, of: name, ...answer});
    load(asked.signal).then(
      (value) => answered({value}),
      (error) => answered({error}),
    );
    return () => asked.abort();
  }, [name]);

  return state.of === name ? state : {...state, error: null, stale: true};
}

// Calls `action` every `seconds` while the page is in sight, but not while an earlier call goes on.
export function useInterval(action, seconds) {
  const latest = useRef(action);
  latest.current = action;

  useEffect(() => {
    if (!seconds) return undefined;
    let isBusy = false;
    const act = async () => {
      if (isBusy || document.hidden) return;
      isBusy = true;
      try {
        await latest.current();
      } finally {
        isBusy = false;
      }
    };
    const timer = setInterval(act, 1000 * seconds);
    return () => clearInterval(timer);
  }, [seconds]);
}
