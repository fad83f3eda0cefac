import {html} from '../dom.js';

export function Diff() {
  return html`<p>…</p>`;
}
