// Messages of a conversation: text, reasoning, images and calls of tools.
import {html, useState} from './dom.js';
import {seconds, whole} from './format.js';
import {source} from './source.js';

const LONG = 3000;
const SHOWN_OF_LONG = 2000;

// A text of any length; of a long one the beginning, until more is asked for.
export function Text({text}) {
  const [isOpen, setOpen] = useState(false);
  if (text.length <= LONG || isOpen) return html`<pre>${text}</pre>`;
  return html`<pre>${text.slice(0, SHOWN_OF_LONG)} …</pre>
    <button type="button" onClick=${() => setOpen(true)}>show all ${whole(text.length)} characters</button>`;
}

export function Message({message, run}) {
  const isModel = message.role === 'assistant';
  return html`<div class=${'message ' + (isModel ? 'of-model' : 'of-world')}>
    <p class="author">${message.role}${message.name ? html`${' '}<b>${message.name}</b>` : null}</p>
    <div class="content">
      <${Images} images=${message.images || []} run=${run} />
      <${Reasoning} text=${message.reasoning} />
      ${message.text ? html`<${Text} text=${message.text} />` : null}
      <${Calls} calls=${message.calls || []} />
      ${isEmpty(message) ? html`<p class="muted small">no text</p>` : null}
    </div>
  </div>`;
}

export function Messages({messages, run}) {
  return messages.map((message, index) => html`<${Message} key=${index} message=${message} run=${run} />`);
}

function Reasoning({text}) {
  if (!text) return null;
  return html`<details open><summary class="small muted">reasoning</summary><${Text} text=${text} /></details>`;
}

function isEmpty(message) {
  return !message.text && !message.reasoning && !(message.calls || []).length && !(message.images || []).length;
}

const SMALL_IMAGE = 120; // pixels; a smaller one is enlarged, with its pixels as they are

export function Images({images, run}) {
  if (!images.length) return null;
  return html`<div class="images">${images.map((image, number) => {
    const address = source.image(run, image.hash);
    const name = 'image ' + image.hash.slice(0, 12);
    if (!address) return html`<em key=${number} class="muted">[${name} is not here]</em>`;
    const isSmall = image.width > 0 && image.width < SMALL_IMAGE;
    const size = image.width > 0 ? ', ' + image.width + ' × ' + image.height : '';
    return html`<img key=${number} class=${isSmall ? 'enlarged' : ''} src=${address} alt=${name + size} loading="lazy" />`;
  })}</div>`;
}

// Calls as the model wrote them; `log` has what became of each, in the same order.
export function Calls({calls, log = []}) {
  const rest = log.slice(calls.length);
  if (!calls.length && !rest.length) return null;
  return html`<ul class="calls" aria-label="calls">
    ${calls.map((call, number) => html`<${Call} key=${number} call=${call} outcome=${log[number]} />`)}
    ${rest.map((outcome, number) => html`<li key=${'rest' + number}><b>${outcome.tool}</b> <${CallOutcome} outcome=${outcome} /></li>`)}
  </ul>`;
}

function Call({call, outcome}) {
  const given = pretty(call.arguments || '');
  return html`<li>
    <span aria-hidden="true">→ </span><b>${call.name || '(unnamed)'}</b> <${CallOutcome} outcome=${outcome} />
    ${given ? html`<${Text} text=${given} />` : null}
    ${call.error ? html`<p class="wrong">✖ ${call.error}</p>` : null}
  </li>`;
}

function CallOutcome({outcome}) {
  if (!outcome) return null;
  const time = outcome.s === null || outcome.s === undefined ? '' : seconds(outcome.s);
  return html`<span class="small muted">${time}</span> ${outcome.error
    ? html`<span class="wrong">✖ ${outcome.error}</span>`
    : html`<span class="small" title="the tool answered">✓</span>`}`;
}

// Arguments are JSON most of the time; what is not is shown as it is.
function pretty(text) {
  try {
    const value = JSON.parse(text);
    return value && typeof value === 'object' ? JSON.stringify(value, null, 2) : text;
  } catch {
    return text;
  }
}

// What a message says in one text, for places with little room.
export function plainText(message) {
  const calls = (message.calls || []).map((call) => call.name + ' ' + call.arguments);
  const images = (message.images || []).map((image) => '[image ' + image.hash.slice(0, 8) + ']');
  return [...images, message.text, ...calls].filter((part) => part).join(' ');
}

// What ended an episode, or what it went on after.
export function Failure({title, failure, isOver = false}) {
  const turn = failure.turn >= 0 ? 'turn ' + (failure.turn + 1) : '';
  const where = [failure.phase, turn, failure.place].filter((part) => part).join(', ');
  return html`<div class=${isOver ? 'finding' : 'fault failure'}>
    <p><b>✖ ${title}: ${failure.type}</b>${where ? ' in ' + where : ''}</p>
    ${failure.message ? html`<pre>${failure.message}</pre>` : null}
    ${failure.traceback ? html`<details><summary>traceback</summary><pre>${failure.traceback}</pre></details>` : null}
  </div>`;
}
