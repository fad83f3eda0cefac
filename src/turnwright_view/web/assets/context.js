// What the engine was given before a turn: the spans above it, as far as they still counted.
import {html, useEffect, useMemo, useState} from './dom.js';
import {plural, whole} from './format.js';
import {originName, shownText} from './tokens.js';

// The spans that lead to a turn, from the first: {number, span, used}. Where a history was rewritten,
// a span goes on from the middle of the one before it, of which only the ids up to there are used.
function contextOf(episode, turn) {
  const pieces = [];
  let number = turn.prompt;
  let end = Infinity;
  while (number >= 0 && episode.spans[number]) {
    const span = episode.spans[number];
    const used = Math.max(0, Math.min(span.length, end - span.start));
    if (used) pieces.unshift({number, span, used});
    end = Math.min(end, span.start);
    // A span follows an earlier one; in a record with a circle the walk ends here.
    if (span.parent >= number) break;
    number = span.parent;
  }
  return pieces;
}

// It shows the turn of the address first; another may be chosen.
export function Context({episode, number}) {
  const [index, setIndex] = useState(0);
  useEffect(() => setIndex(Math.max(0, number - 1)), [number]);
  const turn = episode.turns[index];
  const pieces = useMemo(() => (turn ? contextOf(episode, turn) : []), [episode, index]);
  if (!turn) return null;

  let position = 0;
  const rows = pieces.map(({number, span, used}) => {
    const cached = Math.max(0, Math.min(used, turn.cached - position));
    position += used;
    return html`<${ContextPiece} key=${number} ...${{number, span, used, cached}} />`;
  });
  return html`<section class="card context">
    <div class="row">
      <h2>What the engine was given</h2>
      <span><label for="context-turn">before</label>${' '}
        <select id="context-turn" value=${index} onChange=${(event) => setIndex(Number(event.target.value))}>
          ${episode.turns.map((_, other) => html`<option key=${other} value=${other}>turn ${other + 1}</option>`)}
        </select></span>
      <span class="muted small">${plural(position, 'id')}, ${whole(Math.max(0, turn.cached))} of them cached</span>
    </div>
    ${turn.context >= 0 && position !== turn.context
      ? html`<p class="fault">The record says that the context had ${plural(turn.context, 'id')}.</p>` : null}
    ${rows}
  </section>`;
}

function ContextPiece({number, span, used, cached}) {
  const isModel = span.origin === 'model';
  const facts = [number + ': ' + originName(span.origin), plural(used, 'id')];
  if (used < span.length) facts[1] += ' of ' + whole(span.length);
  if (cached) facts.push(cached < used ? whole(cached) + ' cached' : 'cached');
  // Texts of ids are known for sampled ones alone; of others the whole text is shown.
  const text = span.tokens && used < span.length ? span.tokens.slice(0, used).join('') : span.text;
  return html`<div class=${'span ' + (isModel ? 'of-model' : 'of-world')}>
    <p class="small muted">${facts.join(' · ')}</p>
    <pre class=${cached === used ? 'muted' : ''}>${shownText(text)}</pre>
  </div>`;
}
