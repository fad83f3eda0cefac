// Sampled ids one by one, colored by one of several figures, and a panel that tells all of the one
// under the pointer or with the focus. A level is told by its underline as much as by its color.
import {html, useEffect, useMemo, useState} from './dom.js';
import {figure, plural, signed, whole} from './format.js';

const LOGPROB_BOUNDS = [-0.10536, -0.69315, -2.30259, -4.60517]; // 90%, 50%, 10%, 1%
const MISMATCH_BOUNDS = [1e-5, 1e-3, 1e-2, 1e-1];

// Of each coloring: its name, what it says, and the classes of its levels with their meaning.
export const COLORINGS = {
  state: {
    about: 'what became of each id in training',
    legend: [['trained', 'trained'], ['untrained', 'sampled, not trained'], ['never', 'never for training']],
  },
  logprob: {
    about: 'how likely each id was to the engine that sampled it',
    legend: [
      ['l0', 'over 90%'], ['l1', 'over 50%'], ['l2', 'over 10%'], ['l3', 'over 1%'], ['l4', 'under 1%'],
      ['none', 'unknown'],
    ],
  },
  advantage: {
    about: 'in which direction each id was trained',
    legend: [['up', 'made likelier'], ['down', 'made less likely'], ['none', 'no advantage']],
  },
  mismatch: {
    about: 'how far the trainer’s logprob is from the engine’s, in nats',
    legend: [
      ['l0', 'under 0.00001'], ['l1', 'under 0.001'], ['l2', 'under 0.01'], ['l3', 'under 0.1'], ['l4', 'over 0.1'],
      ['none', 'not scored'],
    ],
  },
};

// The range of a span's ids that an id is in: [from, to, state, reason].
function stateAt(span, index) {
  const range = (span.state || []).find(([from, to]) => index >= from && index < to);
  if (range) return {state: range[2], reason: range[3] || ''};
  return {state: span.origin === 'model' ? 'unknown' : 'never', reason: ''};
}

const at = (values, index) => (Array.isArray(values) && values[index] !== undefined ? values[index] : null);

// All that is known of one sampled id.
export function factsOf(span, index) {
  const logprob = at(span.logprobs, index);
  const trainer = at(span.trainer, index);
  const {state, reason} = stateAt(span, index);
  return {
    id: at(span.ids, index),
    text: at(span.tokens, index),
    position: span.start + index,
    logprob,
    trainer,
    mismatch: logprob === null || trainer === null ? null : trainer - logprob,
    weight: weightAt(span, index, state),
    advantage: advantageAt(span, index, state),
    state,
    reason,
    policy: span.policy || '',
    alternatives: at(span.alternatives, index) || [],
  };
}

// Where all weights are alike none are sent: what is trained counts once, everything else not at all.
function weightAt(span, index, state) {
  const own = at(span.weights, index);
  if (own !== null) return own;
  return state === 'trained' ? 1 : 0;
}

// What was not trained had no advantage, whatever that of its episode.
function advantageAt(span, index, state) {
  if (state !== 'trained') return null;
  const own = at(span.advantages, index);
  if (own !== null) return own;
  return span.advantage === undefined ? null : span.advantage;
}

function levelOf(by, span, index) {
  const {state, logprob, mismatch, advantage} = factsOf(span, index);
  if (by === 'state') return state;
  if (by === 'logprob') return logprob === null ? 'none' : 'l' + LOGPROB_BOUNDS.filter((bound) => logprob < bound).length;
  if (by === 'mismatch') {
    if (mismatch === null) return 'none';
    return 'l' + MISMATCH_BOUNDS.filter((bound) => Math.abs(mismatch) > bound).length;
  }
  if (!advantage) return 'none';
  return advantage > 0 ? 'up' : 'down';
}

// A line break that is an id is seen, and still breaks the line.
export const shownText = (text) => text.replace(/\n/g, '⏎\n');

const CHUNK = 500;

// The spans of one reply, or of one piece of the context. Ids are plain elements: the panel listens
// for all of them at once, so a reply of 20,000 costs no more than its text.
export function TokenBlock({episode, spans, by, label}) {
  const pieces = [];
  for (const number of spans) {
    const span = episode.spans[number];
    if (!span) continue;
    if (!span.tokens) {
      pieces.push(html`<${WholeSpan} key=${number} span=${span} number=${number} isFirst=${!pieces.length} />`);
      continue;
    }
    for (let from = 0; from < span.tokens.length; from += CHUNK) {
      const isFirst = !pieces.length;
      const key = number + ':' + from;
      pieces.push(html`<${Chunk} key=${key} span=${span} number=${number} from=${from} by=${by} isFirst=${isFirst} />`);
    }
    const left = span.length - span.tokens.length;
    if (left > 0) pieces.push(html`<em key=${number + ':rest'} class="muted"> … ${plural(left, 'more id')} left out here</em>`);
  }
  return html`<pre class="tokens" role="group" aria-label=${label + ': arrow keys move from id to id'}>${pieces}</pre>`;
}

// A span whose ids have no texts of their own: mostly what the model was given.
function WholeSpan({span, number, isFirst}) {
  const {state} = stateAt(span, 0);
  const text = shownText(span.text || '');
  return html`<span class=${'token ' + state} data-token=${number + ':-1'} tabindex=${isFirst ? 0 : null}>${text}</span>`;
}

// The same elements are given back until the coloring changes, so that nothing is compared again.
function Chunk({span, number, from, by, isFirst}) {
  return useMemo(() => {
    const tokens = span.tokens.slice(from, from + CHUNK);
    return tokens.map((text, offset) => {
      const index = from + offset;
      const tabindex = isFirst && offset === 0 ? 0 : null;
      const level = 'token ' + levelOf(by, span, index);
      return html`<span class=${level} data-token=${number + ':' + index} tabindex=${tabindex}>${shownText(text)}</span>`;
    });
  }, [span, from, by, isFirst]);
}

function Legend({by}) {
  return html`<ul class="legend" aria-label="legend">
    ${COLORINGS[by].legend.map(([level, text]) => html`<li key=${level}><span class=${'token ' + level}>${text}</span></li>`)}
  </ul>`;
}

export function ColoringChoice({by, onChange}) {
  return html`<div class="coloring">
    <p class="small"><label for="coloring">color by <kbd>c</kbd></label>${' '}
      <select id="coloring" value=${by} onChange=${(event) => onChange(event.target.value)}>
        ${Object.keys(COLORINGS).map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
      </select></p>
    <p class="muted small">${COLORINGS[by].about}</p>
    <${Legend} by=${by} />
  </div>`;
}

// What is known of the id under the pointer or with the focus, inside of the element `root`. On a
// narrow page it lies at the page's bottom, under which a margin is kept free (episode.css).
export function TokenPanel({root, episode}) {
  const [token, setToken] = useState('');

  useEffect(() => setToken(''), [episode]);
  useEffect(() => {
    const field = root.current;
    if (!field) return undefined;
    // Where the page scrolls under a pointer that rests, other ids come to lie under it; that is no
    // choice, and must not replace the id that a key led to.
    let pointer = '';
    const placeOf = (event) => event.screenX + ',' + event.screenY;
    const listeners = {
      mousemove: (event) => {
        pointer = placeOf(event);
      },
      mouseover: (event) => {
        const moved = placeOf(event) !== pointer;
        pointer = placeOf(event);
        if (moved && tokenOf(event)) setToken(tokenOf(event).dataset.token);
      },
      focusin: (event) => tokenOf(event) && setToken(tokenOf(event).dataset.token),
      click: (event) => tokenOf(event) && !window.getSelection().toString() && focusToken(tokenOf(event)),
      keydown: moveByKey,
    };
    for (const [name, listener] of Object.entries(listeners)) field.addEventListener(name, listener);
    return () => {
      for (const [name, listener] of Object.entries(listeners)) field.removeEventListener(name, listener);
    };
  }, [root.current]);

  const [number, index] = token.split(':').map(Number);
  const span = token ? episode.spans[number] : null;
  return html`<section class=${'token-panel' + (span ? ' chosen' : '')} aria-label="id under the pointer">
    ${!span ? html`<p class="muted small">Point at an id, or go to one with Tab and the arrow keys.</p>` : null}
    ${span && index < 0 ? html`<${SpanFacts} span=${span} />` : null}
    ${span && index >= 0 ? html`<${TokenFacts} facts=${factsOf(span, index)} />` : null}
    <p class="visually-hidden" role="status">${span ? spoken(span, index) : ''}</p>
  </section>`;
}

const tokenOf = (event) => event.target.closest('.token[data-token]');

// Of each block one id can be reached by Tab: the one that had the focus last.
function focusToken(element) {
  const block = element.closest('.tokens');
  block.querySelectorAll('[tabindex]').forEach((other) => other.removeAttribute('tabindex'));
  element.setAttribute('tabindex', '0');
  element.focus({preventScroll: true});
  element.scrollIntoView({block: 'nearest'});
}

function moveByKey(event) {
  const element = tokenOf(event);
  if (!element || event.ctrlKey || event.metaKey || event.altKey) return;
  const tokens = [...element.closest('.tokens').querySelectorAll('.token[data-token]')];
  const here = tokens.indexOf(element);
  const next = {
    ArrowRight: () => here + 1,
    ArrowLeft: () => here - 1,
    ArrowDown: () => inNextLine(tokens, here, 1),
    ArrowUp: () => inNextLine(tokens, here, -1),
    Home: () => 0,
    End: () => tokens.length - 1,
  }[event.key];
  if (!next) return;

  event.preventDefault();
  event.stopPropagation();
  focusToken(tokens[Math.max(0, Math.min(tokens.length - 1, next()))]);
}

// The id that stands nearest above or below.
function inNextLine(tokens, here, by) {
  const start = tokens[here];
  let best = here;
  for (let index = here + by; tokens[index]; index += by) {
    const line = tokens[index].offsetTop;
    if (line === start.offsetTop) continue;
    const isNewLine = best === here;
    if (!isNewLine && line !== tokens[best].offsetTop) break;
    const distance = (one) => Math.abs(one.offsetLeft - start.offsetLeft);
    if (isNewLine || distance(tokens[index]) < distance(tokens[best])) best = index;
  }
  return best;
}

const STATES = {trained: 'trained', untrained: 'not trained', never: 'never for training', unknown: 'not known whether trained'};

export function stateWords({state, reason}) {
  const words = STATES[state] || state;
  return reason ? words + ': ' + reason : words;
}

function probability(logprob) {
  const share = 100 * Math.exp(Math.min(0, logprob));
  return (share >= 1e-3 ? String(Number(share.toPrecision(3))) : share.toExponential(1)) + '%';
}

function TokenFacts({facts}) {
  const rows = [
    ['id', whole(facts.id).replace(/,/g, '') + ', at position ' + whole(facts.position)],
    ['engine', facts.logprob === null ? 'no logprob' : figures(facts.logprob) + ' (' + probability(facts.logprob) + ')'],
    ['trainer', facts.trainer === null ? 'not scored' : figures(facts.trainer) + ' (' + probability(facts.trainer) + ')'],
  ];
  if (facts.mismatch !== null) rows.push(['difference', signed(facts.mismatch)]);
  if (facts.state === 'trained') rows.push(['weight', figure(facts.weight)]);
  rows.push(['advantage', facts.advantage === null ? 'none' : signed(facts.advantage)]);
  if (facts.policy) rows.push(['policy', facts.policy]);

  return html`<p class="token-text"><code>${shownText(facts.text || '')}</code></p>
    <p><span class=${'token ' + facts.state}>${stateWords(facts)}</span></p>
    <dl class="fact-list">${rows.map(([name, text]) => html`<div key=${name}><dt>${name}</dt><dd>${text}</dd></div>`)}</dl>
    ${facts.alternatives.length ? html`<${Alternatives} rows=${facts.alternatives} chosen=${facts.id} />` : null}`;
}

const figures = (logprob) => logprob.toFixed(4).replace('-', '−');

function Alternatives({rows, chosen}) {
  return html`<table class="alternatives"><caption>what else was likely</caption><tbody>
    ${rows.map(([id, text, logprob]) => html`<tr key=${id}>
      <th scope="row"><code>${shownText(String(text))}</code>${id === chosen ? ' ✓' : ''}</th>
      <td class="num">${probability(logprob)}</td>
    </tr>`)}
  </tbody></table>`;
}

function SpanFacts({span}) {
  const ids = (span.ids || []).slice(0, 24).join(' ');
  const state = stateAt(span, 0);
  return html`<p><span class=${'token ' + state.state}>${stateWords(state)}</span></p>
    <dl class="fact-list">
      <div><dt>from</dt><dd>${originName(span.origin)}</dd></div>
      <div><dt>ids</dt><dd>${whole(span.length)}, from position ${whole(span.start)}</dd></div>
    </dl>
    <p class="small muted ids">${ids}${span.length > 24 ? ' …' : ''}</p>`;
}

const ORIGINS = {prompt: 'the prompt', env: 'the environment', template: 'the chat template', model: 'the model'};
export const originName = (origin) => ORIGINS[origin] || origin || 'not told';

// What a screen reader says of an id.
function spoken(span, index) {
  if (index < 0) return originName(span.origin) + ', ' + plural(span.length, 'id') + ', ' + stateWords(stateAt(span, 0));
  const facts = factsOf(span, index);
  const parts = [facts.text, 'id ' + facts.id, stateWords(facts)];
  if (facts.logprob !== null) parts.push('probability ' + probability(facts.logprob));
  if (facts.mismatch !== null) parts.push('trainer differs by ' + signed(facts.mismatch));
  if (facts.state === 'trained') parts.push('weight ' + figure(facts.weight) + ', advantage ' + signed(facts.advantage));
  return parts.join(', ');
}
