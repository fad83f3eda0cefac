// A group: all attempts at one task of one step, as rows of turns, and where they part ways.
import {diffPlace, episodePlace, keyParts, listPlace} from '../address.js';
import {answerTo, commonStart, partingTurn, repliesOf, replyOf, textOf} from '../compare.js';
import {html, useEffect, useLoaded, useMemo} from '../dom.js';
import {Answer, Trail, excerptOf, givenIn, sampleName, taskText} from '../episode_parts.js';
import {figure, plural, signed} from '../format.js';
import {moveFocus, useViewKeys} from '../keys.js';
import {Images, plainText} from '../messages.js';
import {Reward, Stop, stepName} from '../parts.js';
import {source} from '../source.js';

const MOST_ROWS = 64;
const MOST_SHOWN = 16; // siblings that are read whole

export function Group({place, row, ready}) {
  const run = place.run;
  const load = (signal) => readGroup(run, place.key, signal);
  const {value: group, error, stale} = useLoaded(load, [run, place.key]);
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
async function readGroup(run, key, signal) {
  const {rows} = await source.episodes(run, {group: key, sort: 'best'}, 0, MOST_ROWS, signal);
  if (!rows.length) throw new Error('there are no episodes of this group');
  const rank = (one) => (one.reward === null ? -Infinity : one.reward);
  const ranked = [...rows].sort((a, b) => rank(b) - rank(a) || a.sample - b.sample || a.attempt - b.attempt);
  const half = MOST_SHOWN / 2;
  const shown = ranked.length <= MOST_SHOWN ? ranked : [...ranked.slice(0, half), ...ranked.slice(-half)];

  const answers = await Promise.allSettled(shown.map((one) => source.episode(run, one.key, signal)));
  const episodes = answers.filter((answer) => answer.status === 'fulfilled').map((answer) => answer.value);
  if (!episodes.length) throw answers[0].reason;
  return {rows: ranked, episodes};
}

// Figures of a group's rewards, as far as it has some.
function rewardsOf(rows) {
  const rewards = rows.map((row) => row.reward).filter((reward) => reward !== null);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const variance = rewards.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / rewards.length;
  return {
    count: rewards.length,
    missing: rows.length - rewards.length,
    mean,
    spread: Math.sqrt(variance),
    least: Math.min(...rewards),
    most: Math.max(...rewards),
    isTie: rewards.length > 1 && rewards.every((reward) => reward === rewards[0]),
  };
}

function GroupHead({group, run, row, groupKey}) {
  // The address has the task as it is, the record with its hidden characters made visible.
  const [phase, step, task] = keyParts(groupKey);
  const first = group.episodes[0];
  return html`<section class="card head">
    <${Trail} run=${run} row=${row}>
      <a href=${listPlace(run, {phase, step_min: step, step_max: step})}>${stepName(first.row.phase, first.row.step)}</a>
      <a href=${listPlace(run, {task})}>task ${first.row.task}</a>
    <//>
    <h1>${taskText(first)}</h1>
    <${Images} images=${givenIn(first).flatMap((message) => message.images)} run=${run} />
    <${RewardFigures} rows=${group.rows} />
    <${Answer} answer=${first.answer} />
    <${WhatIsLeftOut} group=${group} run=${run} groupKey=${groupKey} />
  </section>`;
}

function RewardFigures({rows}) {
  const rewards = rewardsOf(rows);
  return html`<div class="row badges">
    <span class="badge">${plural(rows.length, 'sibling')}</span>
    ${rewards.count ? html`
      <span class="badge">mean reward ${figure(rewards.mean)}</span>
      <span class="badge">spread ${figure(rewards.spread)}</span>
      <span class="muted">from ${figure(rewards.least)} to ${figure(rewards.most)}</span>` : null}
    ${rewards.isTie ? html`
      <span class="badge warn">tie</span>
      <span class="muted">All rewards are equal, so the group tells nothing about what was better.</span>` : null}
    ${rewards.missing ? html`<span class="badge warn">${rewards.missing} without a reward</span>` : null}
  </div>`;
}

function WhatIsLeftOut({group, run, groupKey}) {
  const elsewhere = group.episodes[0].siblings.length - group.rows.length;
  const isCut = group.episodes.length < group.rows.length;
  return html`
    ${elsewhere > 0 ? html`<p class="muted small">Its other ${elsewhere} are not in this file.</p>` : null}
    ${isCut ? html`<p class="muted small">Below are ${group.episodes.length} of them, the best and the worst.${' '}
      <a class="underlined" href=${listPlace(run, {group: groupKey})}>All in the list</a></p>` : null}`;
}

const MOST_REPLIES = 6;

// Of each turn, the different replies, with how many gave them and how these fared.
function Parting({episodes}) {
  const turns = useMemo(() => {
    const most = Math.max(...episodes.map((episode) => episode.turns.length));
    return Array.from({length: most}, (_, index) => repliesOf(episodes, index));
  }, [episodes]);
  const first = turns.findIndex((replies) => replies.length > 1);

  return html`<section class="card parting">
    <h2>${partingTitle(episodes, first)}</h2>
    <ol>${turns.map((replies, index) => html`<li key=${index} class=${index === first ? 'first' : ''}>
      <h3>turn ${index + 1}</h3>
      <${Replies} replies=${replies} of=${episodes.length} />
    </li>`)}</ol>
  </section>`;
}

function partingTitle(episodes, first) {
  if (episodes.length === 1) return 'A single attempt';
  if (first >= 0) return 'They part ways in turn ' + (first + 1);
  const lengths = new Set(episodes.map((episode) => episode.turns.length));
  return lengths.size > 1 ? 'The same replies, of different length' : 'All gave the same replies';
}

function Replies({replies, of}) {
  const left = replies.length - MOST_REPLIES;
  return html`<ul>
    ${replies.slice(0, MOST_REPLIES).map((reply) => html`<${ReplyCount} key=${reply.text} reply=${reply} of=${of} />`)}
    ${left > 0 ? html`<li class="muted small">and ${plural(left, 'other reply', 'other replies')}</li>` : null}
  </ul>`;
}

const REPLY_EXCERPT = 160;

function ReplyCount({reply, of}) {
  const count = reply.siblings.length;
  return html`<li class="reply-count">
    <span class="share" aria-hidden="true"><span style=${{width: (100 * count) / of + '%'}}></span></span>
    <span class="num count">${count} ×</span>
    <span><${Reward} value=${reply.reward} label="mean reward" /></span>
    <code>${excerptOf(reply.text, REPLY_EXCERPT) || '(nothing)'}</code>
  </li>`;
}

function Matrix({group, run}) {
  const {episodes} = group;
  const best = episodes[0];
  // Where all are as good, the first is what the others are compared with.
  const bestName = rewardsOf(group.rows).isTie ? 'the first' : 'the best';
  const most = Math.max(...episodes.map((episode) => episode.turns.length));
  const turns = Array.from({length: most}, (_, index) => index);

  return html`<section class="card">
    <h2>Attempts${bestName === 'the best' ? ', best first' : ''}</h2>
    <p class="muted small">Muted is what begins with the same ids as ${bestName} attempt; ≠ marks the turn in which an attempt
      first differs from it. Below each reply is what the world answered.</p>
    <div class="scroller" role="region" aria-label="attempts by turn" tabindex="0">
    <table class="matrix" style=${{minWidth: 170 + 190 * most + 'px'}}>
      <thead><tr>
        <th scope="col">attempt</th>
        ${turns.map((index) => html`<th key=${index} scope="col">turn ${index + 1}</th>`)}
      </tr></thead>
      <tbody>${episodes.map((episode) => html`<${Sibling} key=${episode.key} ...${{episode, best, bestName, turns, run}} />`)}</tbody>
    </table></div>
  </section>`;
}

function Sibling({episode, best, bestName, turns, run}) {
  const parting = episode === best ? -1 : partingTurn(episode, best);
  return html`<tr class="sibling" data-key=${episode.key}>
    <th scope="row"><${SiblingHead} ...${{episode, best, bestName, run}} /></th>
    ${turns.map((index) => html`<${Cell} key=${index} ...${{episode, best, index, parting, run}} />`)}
  </tr>`;
}

function SiblingHead({episode, best, bestName, run}) {
  const {row} = episode;
  const name = sampleName(row);
  const difference = html`<a href=${diffPlace(run, best.key, episode.key)}
    aria-label=${'difference of ' + name + ' to ' + bestName}>difference</a>`;
  return html`
    <p class="row"><a class="sample" href=${episodePlace(run, episode.key)}>${name}</a><${Reward} value=${row.reward} label="" /></p>
    <p class="small muted">${row.reason ? 'not trained: ' + row.reason : 'advantage ' + signed(row.advantage)}</p>
    ${row.stop !== 'done' || row.error ? html`<p><${Stop} row=${row} /></p>` : null}
    <p class="small">${episode === best ? html`<b>${bestName}</b>` : difference}</p>`;
}

const MOST_IN_CELL = 600;

function Cell({episode, best, index, parting, run}) {
  const turn = episode.turns[index];
  const isParting = index === parting;
  const label = 'turn ' + (index + 1);
  const mark = isParting ? html`<p class="parts">≠ parts here</p>` : null;
  if (!turn && !isParting) return html`<td class="no-turn" data-label=${label}></td>`;
  if (!turn) return html`<td class="parting-cell" data-label=${label}>${mark}<p class="muted small">has ended</p></td>`;

  const pieces = replyOf(episode, turn);
  const ofBest = best.turns[index] ? replyOf(best, best.turns[index]) : [];
  // After the two have parted, what is alike is so by chance or by another way.
  const isComparable = episode !== best && (parting < 0 || index <= parting);
  const same = isComparable ? commonStart(pieces, ofBest) : 0;
  return html`<td class=${isParting ? 'parting-cell' : ''} data-label=${label}>
    ${mark}
    ${turn.agent !== 'main' ? html`<p class="small muted agent">${turn.agent}</p>` : null}
    <p class="said">
      ${same ? html`<span class="alike">${textOf(pieces.slice(0, same))}</span>` : null}
      <span>${excerptOf(textOf(pieces.slice(same)), MOST_IN_CELL)}</span>
    </p>
    <${World} messages=${answerTo(episode, index)} run=${run} />
  </td>`;
}

// What the world answered, in little.
function World({messages, run}) {
  const texts = messages.map((message) => plainText({...message, images: []})).filter((text) => text);
  return html`
    ${texts.length ? html`<p class="world">${excerptOf(texts.join('\n'), MOST_IN_CELL)}</p>` : null}
    <${Images} images=${messages.flatMap((message) => message.images)} run=${run} />`;
}
