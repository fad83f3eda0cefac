// Two episodes side by side, turn by turn: what of their replies differs, id by id.
import {diffPlace, episodePlace, go, groupPlace} from '../address.js';
import {answerTo, changesOf, partingTurn, replyOf, segmentsOf} from '../compare.js';
import {html, useEffect, useLoaded, useMemo} from '../dom.js';
import {Outcome, Trail, givenIn, sampleName, taskText} from '../episode_parts.js';
import {figure, plural} from '../format.js';
import {moveFocus, useViewKeys} from '../keys.js';
import {Failure, Messages} from '../messages.js';
import {source} from '../source.js';

export function Diff({place, row, ready}) {
  const run = place.run;
  const other = place.query.get('with') || '';
  const load = (signal) => Promise.all([place.key, other].map((key) => source.episode(run, key, signal)));
  const {value: pair, error, stale} = useLoaded(load, [run, place.key, other]);
  const isShown = pair !== null && !stale;

  useViewKeys({
    j: () => moveFocus('.diff-turn', 1),
    k: () => moveFocus('.diff-turn', -1),
    g: () => go(groupPlace(run, place.key)),
    d: () => go(diffPlace(run, other, place.key)),
  });
  useEffect(() => {
    if (isShown || error) ready();
  }, [isShown, error, place.hash]);

  if (error) return html`<p class="fault" role="alert">${error.message}</p>`;
  if (!pair) return html`<p class="muted">Reading both episodes …</p>`;
  const most = Math.max(pair[0].turns.length, pair[1].turns.length);
  return html`<div class="diff" aria-busy=${stale ? 'true' : null}>
    <${PairHead} pair=${pair} run=${run} row=${row} />
    ${Array.from({length: most}, (_, index) => html`<${TurnPair} key=${index} pair=${pair} index=${index} run=${run} />`)}
  </div>`;
}

function PairHead({pair, run, row}) {
  const [one, other] = pair;
  return html`<section class="card head">
    <${Trail} run=${run} row=${row}><a href=${groupPlace(run, one.key)}>group of task ${one.row.task}</a><//>
    <h1>${taskText(one)}</h1>
    <p>${sentenceOf(one, other)}</p>
    <div class="two-sides">${pair.map((episode, side) => html`<div key=${side} class="side">
      <h2><a href=${episodePlace(run, episode.key)}>${sampleName(episode.row)}</a></h2>
      <${Outcome} episode=${episode} />
      ${episode.error ? html`<${Failure} title="Failure" failure=${episode.error} />` : null}
    </div>`)}</div>
    <nav class="moves row small" aria-label="other differences">
      <a href=${diffPlace(run, other.key, one.key)}>⇄ swap sides <kbd>d</kbd></a>
      <a href=${groupPlace(run, one.key)}>group <kbd>g</kbd></a>
      <${SiblingChoice} one=${one} other=${other} run=${run} />
    </nav>
  </section>`;
}

function sentenceOf(one, other) {
  const parting = partingTurn(one, other);
  if (parting < 0) return 'Both have the same ids to their ends.';
  const ended = [one, other].find((episode) => !episode.turns[parting]);
  const before = parting ? 'The same ids in ' + plural(parting, 'turn') + '; ' : '';
  const what = ended ? sampleName(ended.row) + ' has ended before turn ' : 'they part ways in turn ';
  const sentence = before + what + (parting + 1) + '.';
  return sentence[0].toUpperCase() + sentence.slice(1);
}

function SiblingChoice({one, other, run}) {
  const siblings = one.siblings.filter((sibling) => sibling.key !== one.key);
  if (siblings.length < 2) return null;
  const isForeign = !siblings.some((sibling) => sibling.key === other.key);
  return html`<span><label for="sibling">compare with</label>${' '}
    <select id="sibling" value=${other.key} onChange=${(event) => go(diffPlace(run, one.key, event.target.value))}>
      ${isForeign ? html`<option value=${other.key}>an episode of another group</option>` : null}
      ${siblings.map((sibling) => html`<option key=${sibling.key} value=${sibling.key}>
        ${sampleName(sibling)}, reward ${figure(sibling.reward)}</option>`)}
    </select></span>`;
}

function TurnPair({pair, index, run}) {
  const turns = pair.map((episode) => episode.turns[index]);
  const replies = useMemo(() => pair.map((episode, side) => (turns[side] ? replyOf(episode, turns[side]) : [])), pair);
  const changes = useMemo(() => changesOf(...replies), [replies]);
  const changed = changes.map((flags) => flags.filter((flag) => flag).length);
  const isSame = turns[0] && turns[1] && !changed[0] && !changed[1];

  const id = 'diff-turn-' + (index + 1);
  return html`<section class="card diff-turn" tabindex="-1" aria-labelledby=${id}>
    <div class="turn-head"><h2 id=${id}>Turn ${index + 1}</h2>
      <p class="small muted">${isSame ? 'the same reply' : told(turns, changed)}</p></div>
    ${index === 0 ? html`<${Given} title="what was asked" messages=${pair.map(givenIn)} run=${run} />` : null}
    ${isSame
      ? html`<${ComparedReply} name="both" pieces=${replies[0]} changed=${changes[0]} side=${0} isSame=${true} />`
      : html`<div class="two-sides">${pair.map((episode, side) => html`<${ComparedReply} key=${side}
          name=${sampleName(episode.row)} pieces=${replies[side]} changed=${changes[side]} side=${side} hasEnded=${!turns[side]} />`)}</div>`}
    <${Given} title="what the world answered" messages=${pair.map((episode) => answerTo(episode, index))} run=${run} />
  </section>`;
}

function told(turns, changed) {
  if (!turns[0] || !turns[1]) return 'on one side only';
  return changed.map((count) => plural(count, 'id')).join(' against ') + ' differ';
}

function ComparedReply({name, pieces, changed, side, isSame = false, hasEnded = false}) {
  if (hasEnded) return html`<div class="message"><p class="author">${name}</p><p class="muted content">has ended</p></div>`;
  return html`<div class=${'message of-model' + (isSame ? ' same' : '')}>
    <p class="author">${name}</p>
    <pre class="content compared">${segmentsOf(pieces, changed).map((segment) =>
      html`<${Segment} key=${segment.from} segment=${segment} side=${side} />`)}</pre>
  </div>`;
}

function Segment({segment, side}) {
  if (!segment.changed) return html`<span>${segment.text}</span>`;
  return html`<mark class=${side ? 'added' : 'removed'} data-from=${segment.from} data-to=${segment.to}>${segment.text}</mark>`;
}

// Messages of the world: told once and folded where both sides have the same.
function Given({title, messages, run}) {
  const [one, other] = messages;
  if (!one.length && !other.length) return null;
  if (JSON.stringify(one) === JSON.stringify(other)) return html`<details class="given">
    <summary class="small muted">${title}: the same ${plural(one.length, 'message')}</summary>
    <${Messages} messages=${one} run=${run} />
  </details>`;
  return html`<div class="two-sides">${messages.map((list, side) => html`<div key=${side} class="side">
    <${Messages} messages=${list} run=${run} />
    ${list.length ? null : html`<p class="muted small">${title}: nothing</p>`}
  </div>`)}</div>`;
}
