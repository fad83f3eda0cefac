import {html} from '../dom.js';

export function Episode() {
  return html`<p>…</p>`;
}
