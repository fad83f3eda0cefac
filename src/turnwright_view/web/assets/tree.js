// Spans as a tree: where a history was rewritten, the spans that follow it begin a branch.
import {html} from './dom.js';
import {excerptOf, turnMark, turnStarts} from './episode_parts.js';
import {plural, whole} from './format.js';
import {originName} from './tokens.js';

const MAX_DEPTH = 40; // of branches inside of branches
const PIECE_EXCERPT = 90;

// A span follows an earlier one. One that names itself or a later one begins a tree of its own, so a
// record of any shape has no circles.
function followersOf(spans) {
  const followers = new Map();
  spans.forEach((span, number) => {
    const isAfter = span.parent >= 0 && span.parent < number;
    const parent = isAfter ? span.parent : -1;
    followers.set(parent, [...(followers.get(parent) || []), number]);
  });
  return followers;
}

export function Tree({episode, turnPlace}) {
  const followers = followersOf(episode.spans);
  const roots = followers.get(-1) || [];
  const turnStart = turnStarts(episode);
  const turnOf = new Map();
  episode.turns.forEach((turn, index) => turn.spans.forEach((number) => turnOf.set(number, index + 1)));
  const ends = episode.spans.filter((_, number) => !followers.has(number)).length;

  const many = plural(ends, 'history', 'histories') + ' in ' + plural(roots.length, 'tree');
  return html`<section class="card">
    <h2>${roots.length > 1 || ends > 1 ? many : 'One history, never rewritten'}</h2>
    <p class="muted">Each piece is a span of ids with its length; ✂ marks one that replaces the end of the span before it.</p>
    <${Branches} starts=${roots} depth=${0} ...${{episode, followers, turnOf, turnStart, turnPlace}} />
  </section>`;
}

function Branches({starts, depth, ...of}) {
  return html`<ul class="tree">
    ${starts.map((start) => html`<${Branch} key=${start} start=${start} depth=${depth} ...${of} />`)}
  </ul>`;
}

// A row of spans up to where the history parts, and the branches below.
function Branch({start, depth, ...of}) {
  const row = [start];
  let below = of.followers.get(start) || [];
  while (below.length === 1) {
    row.push(below[0]);
    below = of.followers.get(below[0]) || [];
  }
  return html`<li>
    <div class="pieces">${row.map((number) => html`<${Piece} key=${number} number=${number} ...${of} />`)}</div>
    ${below.length && depth < MAX_DEPTH ? html`<${Branches} starts=${below} depth=${depth + 1} ...${of} />` : null}
    ${below.length && depth >= MAX_DEPTH
      ? html`<p class="muted">… ${plural(below.length, 'more branch', 'more branches')} below</p>` : null}
  </li>`;
}

function Piece({number, episode, turnOf, turnStart, turnPlace}) {
  const span = episode.spans[number];
  const before = episode.spans[span.parent];
  const isCut = before && span.parent < number && span.start < before.start + before.length;
  const turn = turnOf.get(number);
  const name = turn ? html`<a href=${turnPlace(turn)}>turn ${turn}</a>` : originName(span.origin);
  const facts = [plural(span.length, 'id')];
  if (span.agent && span.agent !== 'main') facts.push(span.agent);
  const isStart = turnStart.has(number);
  const look = 'piece ' + (span.origin === 'model' ? 'of-model' : 'of-world') + (isStart ? ' turn' : '');
  return html`<div class=${look} ...${isStart ? turnMark(turn) : {}}>
    <p class="small">${isCut ? html`<b title=${'from position ' + whole(span.start)}>✂ </b>` : null}${name}
      <span class="muted"> ${facts.join(', ')}</span></p>
    <p class="excerpt">${excerptOf((span.text || '').trim(), PIECE_EXCERPT)}</p>
  </div>`;
}
