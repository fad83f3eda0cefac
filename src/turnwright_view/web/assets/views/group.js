// A group: all attempts at one task of one step, as rows of turns, and where they part ways.
import {diffPlace, episodePlace, keyParts, listPlace, runPlace} from '../address.js';
import {answerTo, commonStart, partingTurn, repliesOf, replyOf, textOf} from '../compare.js';
import {html, useEffect, useLoaded, useMemo} from '../dom.js';
import {figure, plural, signed} from '../format.js';
import {moveFocus, useViewKeys} from '../keys.js';
import {Images, plainText} from '../messages.js';
import {Reward, Stop, stepName} from '../parts.js';
import {source} from '../source.js';
import {Answer, givenIn, taskText} from './episode.js';

const MOST_ROWS = 64;
const MOST_SHOWN = 16; // siblings that are read whole

export function Group({place, row, ready}) {
  const run = place.run;
  const {value: group, error, stale} = useLoaded(() => readGroup(run, place.key), [run, place.key]);
  const isShown = group !== null && !stale;

  useViewKeys({
    j: () => moveFocus('.sibling > th a.sample', 1),
    k: () => moveFocus('.sibling > th a.sample', -1),
  });
  useEffect(() => {
    if (isShown || error) ready();
  }, [isShown, error, place.hash]);

  if (error) return html`<p class="fault" role="alert">${error.message}</p>`;
  if (!group) return html`<p class="muted">Reading the group …</p>`;
  return html`<div class="group" aria-busy=${stale ? 'true' : null}>
    <${GroupHead} group=${group} run=${run} row=${row} groupKey=${place.key} />
    <${Parting} episodes=${group.episodes} />
    <${Matrix} group=${group} run=${run} />
  </div>`;
}

// The best come first. Of a large group the best and the worst are read.
async function readGroup(run, key) {
  const {rows} = await source.episodes(run, {group: key, sort: 'best'}, 0, MOST_ROWS);
  if (!rows.length) throw new Error('there are no episodes of this group');
  const rank = (one) => (one.reward === null ? -Infinity : one.reward);
  const ranked = [...rows].sort((a, b) => rank(b) - rank(a) || a.sample - b.sample || a.attempt - b.attempt);
  const half = MOST_SHOWN / 2;
  const shown = ranked.length <= MOST_SHOWN ? ranked : [...ranked.slice(0, half), ...ranked.slice(-half)];

  const answers = await Promise.allSettled(shown.map((one) => source.episode(run, one.key)));
  const episodes = answers.filter((answer) => answer.status === 'fulfilled').map((answer) => answer.value);
  if (!episodes.length) throw answers[0].reason;
  return {rows: ranked, episodes};
}

function GroupHead({group, run, row, groupKey}) {
  const [phase, step, task] = keyParts(groupKey);
  const rewards = group.rows.map((one) => one.reward).filter((reward) => reward !== null);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const spread = Math.sqrt(rewards.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / rewards.length);
  const isTie = rewards.length > 1 && rewards.every((reward) => reward === rewards[0]);
  const missing = group.rows.length - rewards.length;
  const first = group.episodes[0];
  const shownTask = first.row.task; // the address has the same without hidden characters made visible

  return html`<section class="card head">
    <nav class="trail small" aria-label="where it is from">
      <a href=${runPlace(run)}>${(row && row.name) || run}</a>
      <a href=${listPlace(run, {phase, step_min: step, step_max: step})}>${stepName(phase, Number(step))}</a>
      <a href=${listPlace(run, {task})}>task ${shownTask}</a>
    </nav>
    <h1>${taskText(first) || 'task ' + shownTask}</h1>
    <${Images} images=${givenIn(first).flatMap((message) => message.images)} run=${run} />
    <div class="row badges">
      <span class="badge">${plural(group.rows.length, 'sibling')}</span>
      ${rewards.length ? html`<span class="badge">mean reward ${figure(mean)}</span><span class="badge">spread ${figure(spread)}</span>
        <span class="muted">from ${figure(Math.min(...rewards))} to ${figure(Math.max(...rewards))}</span>` : null}
      ${isTie ? html`<span class="badge warn">tie</span><span class="muted">All rewards are equal, so the group tells nothing about what was better.</span>` : null}
      ${missing ? html`<span class="badge warn">${missing} without a reward</span>` : null}
    </div>
    <${Answer} answer=${first.answer} />
    ${group.episodes.length < group.rows.length ? html`<p class="muted small">Below are ${group.episodes.length} of them, the best and the worst.
      <a href=${listPlace(run, {group: groupKey})}>All in the list</a></p>` : null}
  </section>`;
}

const MOST_REPLIES = 6;

// Of each turn, the different replies, with how many gave them and how these fared.
function Parting({episodes}) {
  const turns = useMemo(() => {
    const most = Math.max(...episodes.map((episode) => episode.turns.length));
    return Array.from({length: most}, (_, index) => repliesOf(episodes, index));
  }, [episodes]);
  const first = turns.findIndex((replies) => replies.length > 1);
  const ends = [...new Set(episodes.map((episode) => episode.turns.length))];

  let title = 'They part ways in turn ' + (first + 1);
  if (episodes.length === 1) title = 'A single attempt';
  else if (first < 0) title = ends.length > 1 ? 'The same replies, of different length' : 'All gave the same replies';
  return html`<section class="card parting">
    <h2>${title}</h2>
    <ol>${turns.map((replies, index) => html`<li key=${index} class=${index === first ? 'first' : ''}>
      <h3>turn ${index + 1}</h3>
      <ul>${replies.slice(0, MOST_REPLIES).map((reply) => html`<${ReplyCount} key=${reply.text} reply=${reply} of=${episodes.length} />`)}
        ${replies.length > MOST_REPLIES ? html`<li class="muted small">and ${plural(replies.length - MOST_REPLIES, 'other reply', 'other replies')}</li>` : null}
      </ul>
    </li>`)}</ol>
  </section>`;
}

const REPLY_EXCERPT = 160;

function ReplyCount({reply, of}) {
  const text = reply.text.length > REPLY_EXCERPT ? reply.text.slice(0, REPLY_EXCERPT) + ' …' : reply.text;
  return html`<li class="reply-count">
    <span class="share" aria-hidden="true"><span style=${{width: (100 * reply.siblings.length) / of + '%'}}></span></span>
    <span class="num count">${reply.siblings.length} ×</span>
    <span><${Reward} value=${reply.reward} label="mean reward" /></span>
    <code>${text || '(nothing)'}</code>
  </li>`;
}

function Matrix({group, run}) {
  const {episodes} = group;
  const best = episodes[0];
  const most = Math.max(...episodes.map((episode) => episode.turns.length));
  const turns = Array.from({length: most}, (_, index) => index);

  return html`<section class="card">
    <h2>Attempts, best first</h2>
    <p class="muted small">Muted is what begins with the same ids as the best attempt; ≠ marks the turn in which an attempt first differs from it.
      Below each reply is what the world answered.</p>
    <div class="scroller" role="region" aria-label="attempts by turn" tabindex="0">
    <table class="matrix" style=${{minWidth: 170 + 190 * most + 'px'}}>
      <thead><tr><th scope="col">attempt</th>${turns.map((index) => html`<th key=${index} scope="col">turn ${index + 1}</th>`)}</tr></thead>
      <tbody>${episodes.map((episode) => html`<${Sibling} key=${episode.key} episode=${episode} best=${best} turns=${turns} run=${run} />`)}</tbody>
    </table></div>
  </section>`;
}

function Sibling({episode, best, turns, run}) {
  const isBest = episode === best;
  const parting = isBest ? -1 : partingTurn(episode, best);
  const {row} = episode;
  const name = 'sample ' + row.sample + (row.attempt ? ', attempt ' + (row.attempt + 1) : '');
  return html`<tr class="sibling" data-key=${episode.key}>
    <th scope="row">
      <p class="row"><a class="sample" href=${episodePlace(run, episode.key)}>${name}</a><${Reward} value=${row.reward} label="" /></p>
      <p class="small muted">${row.reason ? 'not trained: ' + row.reason : 'advantage ' + signed(row.advantage)}</p>
      ${row.stop !== 'done' || row.error ? html`<p><${Stop} row=${row} /></p>` : null}
      <p class="small">${isBest ? html`<b>the best</b>` : html`<a href=${diffPlace(run, best.key, episode.key)} aria-label=${'difference of ' + name + ' to the best'}>difference</a>`}</p>
    </th>
    ${turns.map((index) => html`<${Cell} key=${index} episode=${episode} best=${best} index=${index} parting=${parting} run=${run} />`)}
  </tr>`;
}

function Cell({episode, best, index, parting, run}) {
  const turn = episode.turns[index];
  const isParting = index === parting;
  const mark = isParting ? html`<p class="parts">≠ parts here</p>` : null;
  if (!turn) return html`<td class=${isParting ? 'parting-cell' : 'no-turn'} data-label=${'turn ' + (index + 1)}>${isParting ? html`${mark}<p class="muted small">has ended</p>` : null}</td>`;

  const pieces = replyOf(episode, turn);
  const its = best.turns[index] ? replyOf(best, best.turns[index]) : [];
  // After the two have parted, what is alike is so by chance or by another way.
  const isComparable = episode !== best && (parting < 0 || index <= parting);
  const same = isComparable ? commonStart(pieces, its) : 0;
  const answer = answerTo(episode, index);
  const answerText = answer.map((message) => plainText({...message, images: []})).filter((text) => text).join('\n');
  return html`<td class=${isParting ? 'parting-cell' : ''} data-label=${'turn ' + (index + 1)}>
    ${mark}
    <p class="said">${same ? html`<span class="alike">${textOf(pieces.slice(0, same))}</span>` : null}<span>${excerpt(textOf(pieces.slice(same)))}</span></p>
    ${answerText ? html`<p class="world">${excerpt(answerText)}</p>` : null}
    <${Images} images=${answer.flatMap((message) => message.images)} run=${run} />
  </td>`;
}

const LONG_CELL = 600;
const excerpt = (text) => (text.length > LONG_CELL ? text.slice(0, LONG_CELL) + ' …' : text);
