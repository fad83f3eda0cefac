// Small parts that several views have.
import {html} from './dom.js';
import {figure, signed} from './format.js';

// A reward, colored by whether it is above 0.
export function Reward({value, label = 'reward'}) {
  if (value === null || value === undefined)
    return html`<span class="badge warn" title="the reward was not computed">no ${label}</span>`;
  const tone = value > 0 ? 'good' : 'bad';
  return html`<span class=${'badge ' + tone}>${label ? label + ' ' : ''}${figure(value)}</span>`;
}

export function Advantage({value, reason}) {
  if (value === null || value === undefined) {
    if (!reason) return null;
    return html`<span class="badge" title="no id of it was trained">not trained: ${reason}</span>`;
  }
  return html`<span class="badge">advantage ${signed(value)}</span>`;
}

export function Stop({row}) {
  if (row.error) return html`<span class="badge bad">✖ ${row.error}</span>`;
  return html`<span class=${'badge' + (row.stop === 'done' ? '' : ' warn')}>${row.stop || 'no stop reason'}</span>`;
}

// What a phase and its step are called everywhere.
export function stepName(phase, step) {
  if (phase === 'train') return 'training step ' + step;
  return step ? phase + ', step ' + step : phase;
}

// Buttons of which one is chosen.
export function Segmented({label, value, values, onChange}) {
  const button = ([name, text]) => html`<button key=${name} type="button"
    aria-pressed=${name === value ? 'true' : 'false'} onClick=${() => onChange(name)}>${text}</button>`;
  return html`<span class="segmented" role="group" aria-label=${label}>${values.map(button)}</span>`;
}

// Names in backticks, as our own texts have them, become code; all else stays text.
export function prose(text) {
  return text.split('`').map((part, at) => (at % 2 ? html`<code>${part}</code>` : part));
}
