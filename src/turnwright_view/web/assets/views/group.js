import {html} from '../dom.js';

export function Group() {
  return html`<p>…</p>`;
}
