// An episode: its head, the time it took, and four views of it.
import {changeQuery, diffPlace, episodePlace, go, groupPlace, listPlace} from '../address.js';
import {html, useEffect, useLoaded, useMemo, useRef, useState} from '../dom.js';
import {Answer, Outcome, Trail, excerptOf, sampleName, taskText, turnMark, turnStarts} from '../episode_parts.js';
import {bytes, figure, plural, seconds, whole} from '../format.js';
import {moveFocus, useViewKeys} from '../keys.js';
import {Trainer} from '../ledger.js';
import {Calls, Failure, Images, Message, Messages, Text} from '../messages.js';
import {stepName} from '../parts.js';
import {source} from '../source.js';
import {Timeline} from '../timeline.js';
import {COLORINGS, ColoringChoice, TokenBlock, TokenPanel, originName, stateWords} from '../tokens.js';
import {Tree} from '../tree.js';

const EPISODE_VIEWS = {conversation: Conversation, tokens: Spans, tree: Tree, trainer: Trainer};
const VIEW_NAMES = Object.keys(EPISODE_VIEWS);
const COLORED = ['conversation', 'tokens'];

export function Episode({place, row, ready}) {
  const run = place.run;
  const load = (signal) => source.episode(run, place.key, signal);
  const {value: episode, error, stale} = useLoaded(load, [run, place.key]);
  const wanted = place.query.get('view');
  const view = VIEW_NAMES.includes(wanted) ? wanted : VIEW_NAMES[0];
  const by = COLORINGS[place.query.get('by')] ? place.query.get('by') : 'state';
  const turn = Number(place.query.get('turn')) || 0;
  const isShown = episode !== null && !stale;

  // Another episode is seen as this one was.
  const placeOf = (key) => episodePlace(run, key, {view: place.query.get('view'), by: place.query.get('by')});
  // A turn's own link leads to what was said in it.
  const turnPlace = (number) => episodePlace(run, place.key, {turn: number, by: place.query.get('by')});
  const rival = isShown ? rivalOf(episode) : null;

  const toTurn = (step) => {
    const element = moveFocus('.turn', step);
    if (element) changeQuery({turn: element.dataset.turn});
  };
  const toView = (name) => changeQuery({view: name === VIEW_NAMES[0] ? '' : name});
  const nextColoring = () => {
    const names = Object.keys(COLORINGS);
    changeQuery({by: names[(names.indexOf(by) + 1) % names.length]});
  };
  useViewKeys({
    1: () => toView(VIEW_NAMES[0]),
    2: () => toView(VIEW_NAMES[1]),
    3: () => toView(VIEW_NAMES[2]),
    4: () => toView(VIEW_NAMES[3]),
    j: () => toTurn(1),
    k: () => toTurn(-1),
    c: nextColoring,
    n: () => isShown && episode.next && go(placeOf(episode.next)),
    p: () => isShown && episode.previous && go(placeOf(episode.previous)),
    g: () => go(groupPlace(run, place.key)),
    d: () => rival && go(diffPlace(run, place.key, rival.key)),
  });

  useEffect(() => {
    if (isShown && turn) showTurn(turn);
  }, [episode, isShown, turn, view]);
  useEffect(() => {
    if (isShown || error) ready();
  }, [episode, isShown, error, place.hash]);

  if (error) return html`<p class="fault" role="alert">${error.message}</p>`;
  if (!episode) return html`<p class="muted">Reading the episode …</p>`;

  const Shown = EPISODE_VIEWS[view];
  const toShownTurn = (number) => {
    const isHere = document.getElementById('turn-' + number);
    changeQuery({view: isHere ? place.query.get('view') : '', turn: number});
    showTurn(number); // also where the address names this turn already
  };
  return html`<div key=${episode.key} class="one-episode" aria-busy=${stale ? 'true' : null}>
    <${EpisodeHead} episode=${episode} run=${run} row=${row} rival=${rival} placeOf=${placeOf} />
    <${Timeline} timing=${episode.timing} turnPlace=${turnPlace} onTurn=${toShownTurn} />
    <nav class="views" aria-label="views of the episode">${VIEW_NAMES.map((name, index) => html`<a key=${name}
      href=${episodePlace(run, place.key, {view: index ? name : '', by: place.query.get('by')})}
      aria-current=${name === view ? 'page' : null}>${name} <kbd>${index + 1}</kbd></a>`)}</nav>
    ${COLORED.includes(view)
      ? html`<${Colored} episode=${episode} by=${by}><${Shown} episode=${episode} run=${run} by=${by} turnPlace=${turnPlace} /><//>`
      : html`<${Shown} episode=${episode} turn=${turn} turnPlace=${turnPlace} />`}
  </div>`;
}

function showTurn(number) {
  const element = document.getElementById('turn-' + number);
  if (!element || element.contains(document.activeElement)) return;
  element.scrollIntoView({block: 'start'});
  element.focus({preventScroll: true});
}

// The sibling that an episode is compared with first: the best, and the worst for the best itself.
function rivalOf(episode) {
  const others = episode.siblings.filter((sibling) => sibling.key !== episode.key && sibling.reward !== null);
  if (!others.length) return null;
  const ranked = [...others].sort((a, b) => b.reward - a.reward);
  const best = ranked[0];
  const isBest = episode.row.reward !== null && episode.row.reward >= best.reward;
  return isBest ? ranked[ranked.length - 1] : best;
}

function EpisodeHead({episode, run, row, rival, placeOf}) {
  const {phase, step, task} = episode.row;
  return html`<section class="card head">
    <${Trail} run=${run} row=${row}>
      <a href=${listPlace(run, {phase, step_min: step, step_max: step})}>${stepName(phase, step)}</a>
      <a href=${groupPlace(run, episode.key)}>task ${task}</a>
      <span>${sampleName(episode.row)}</span>
    <//>
    <h1>${taskText(episode)}</h1>
    <${Outcome} episode=${episode} />
    <${Answer} answer=${episode.answer} />
    ${episode.why ? html`<p class="muted why">${episode.why}</p>` : null}
    <${Failures} episode=${episode} />
    <${Figures} title="reward by part" values=${episode.rewards} />
    <${Figures} title="history rewritten" values=${episode.branches} />
    <${Figures} title="metrics" values=${episode.metrics} />
    ${episode.sanity.map((finding, index) => html`<${Finding} key=${index} finding=${finding} />`)}
    <${Moves} episode=${episode} run=${run} rival=${rival} placeOf=${placeOf} />
  </section>`;
}

function Failures({episode}) {
  return html`
    ${episode.error ? html`<${Failure} title="Failure" failure=${episode.error} />` : null}
    ${episode.failures.map((failure, index) => {
      const title = 'Recovered from (' + (failure.recovery || '?') + ')';
      return html`<${Failure} key=${index} title=${title} failure=${failure} isOver=${true} />`;
    })}`;
}

const MAX_NAME = 80;

function Figures({title, values}) {
  const names = Object.keys(values);
  if (!names.length) return null;
  return html`<p class="small figures"><span class="muted">${title}</span>
    ${names.map((name) => html`<span key=${name}>${excerptOf(name, MAX_NAME)} <b class="num">${figure(values[name])}</b></span>`)}</p>`;
}

function Finding({finding}) {
  const where = finding.turn >= 0 ? 'in turn ' + (finding.turn + 1) + ': ' : '';
  return html`<div class="finding">
    <p>⚠ <b>${finding.cause}</b> ${where}${finding.sentence}</p>
    <details><summary>what was sampled, and what was sent</summary>
      <dl class="fact-list">${finding.columns.map(([name, text]) => html`<div key=${name}>
        <dt>${name}</dt><dd><code>${text}</code></dd></div>`)}</dl>
    </details>
  </div>`;
}

function Moves({episode, run, rival, placeOf}) {
  return html`<nav class="moves row small" aria-label="other episodes">
    ${episode.previous ? html`<a href=${placeOf(episode.previous)}>← previous <kbd>p</kbd></a>` : null}
    ${episode.next ? html`<a href=${placeOf(episode.next)}>next → <kbd>n</kbd></a>` : null}
    <a href=${groupPlace(run, episode.key)}>group of ${whole(episode.siblings.length)} <kbd>g</kbd></a>
    ${rival ? html`<a href=${diffPlace(run, episode.key, rival.key)}>
      difference to ${rivalName(episode, rival)} (reward ${figure(rival.reward)}) <kbd>d</kbd></a>` : null}
    <${CopyLink} />
    <${Record} record=${episode.record} />
  </nav>`;
}

function rivalName(episode, rival) {
  if (rival.reward > episode.row.reward) return 'the best';
  return rival.reward < episode.row.reward ? 'the worst' : 'a sibling';
}

function CopyLink() {
  const [told, setTold] = useState('');
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(location.href);
      setTold('copied');
    } catch {
      setTold(location.href); // no clipboard without a secure address: the link itself, to be selected
    }
  };
  return html`<span>
    <button type="button" class="quiet" onClick=${copy}>copy link</button>${' '}
    <span role="status" class="link">${told}</span>
  </span>`;
}

function Record({record}) {
  if (!record) return null;
  const command = 'tail -c +' + (record.at + 1) + ' ' + quoted(record.file) + ' | head -c ' + record.length;
  return html`<details class="record"><summary>record</summary>
    <p class="muted">${bytes(record.length)} from byte ${whole(record.at)} on. In a shell:</p>
    <pre>${command}</pre></details>`;
}

// A name as a shell takes it.
const quoted = (name) => (/^[\w./-]+$/.test(name) ? name : "'" + name.replace(/'/g, "'\\''") + "'");

// A view with ids, and beside it what they are colored by and what is known of one.
function Colored({episode, by, children}) {
  const root = useRef(null);
  return html`<div class="colored">
    <div class="body" ref=${root}>${children}</div>
    <aside class="beside" aria-label="ids">
      <${ColoringChoice} by=${by} onChange=${(name) => changeQuery({by: name})} />
      <${TokenPanel} root=${root} episode=${episode} />
    </aside>
  </div>`;
}

function Conversation({episode, run, by, turnPlace}) {
  // Parts of it are many; they are made again for another episode or coloring alone.
  return useMemo(() => html`
    <${Messages} messages=${episode.opening} run=${run} />
    ${episode.turns.map((turn, index) => html`<${Turn} key=${index} number=${index + 1}
      ...${{episode, turn, run, by, turnPlace}} />`)}
    ${episode.final.length ? html`<section class="card turn-end">
      <h2>Last words of the environment</h2>
      <${Messages} messages=${episode.final} run=${run} />
    </section>` : null}
    ${episode.failed.length ? html`<details class="card">
      <summary>${plural(episode.failed.length, 'turn')} of attempts that failed</summary>
      ${episode.failed.map((turn, index) => html`<${Messages} key=${index} messages=${[...turn.messages, turn.reply]} run=${run} />`)}
    </details>` : null}
    ${!episode.turns.length && !episode.opening.length ? html`<p class="muted">Nothing was said.</p>` : null}`,
  [episode, by]);
}

function Turn({episode, turn, number, run, by, turnPlace}) {
  const id = 'turn-' + number;
  return html`<section class="card turn" ...${turnMark(number)} aria-labelledby=${id + '-title'}>
    <div class="turn-head">
      <h2 id=${id + '-title'}><a href=${turnPlace(number)}>Turn ${number}</a></h2>
      ${turn.agent !== 'main' ? html`<span class="badge">${turn.agent}</span>` : null}
      <p class="small muted">${turnFacts(episode, turn).join(' · ')}</p>
    </div>
    <${Marks} turn=${turn} number=${number} />
    <${Messages} messages=${turn.messages} run=${run} />
    ${turn.inserted !== null ? html`<div class="message of-world">
      <p class="author">environment, inside of the reply</p>
      <div class="content"><${Text} text=${turn.inserted} /></div>
    </div>` : null}
    <${Reply} ...${{episode, turn, number, run, by}} />
    <${Info} info=${turn.info} />
  </section>`;
}

const spansOf = (episode, turn) => turn.spans.map((index) => episode.spans[index]).filter((span) => span);

function turnFacts(episode, turn) {
  const spans = spansOf(episode, turn);
  const policies = [...new Set(spans.map((span) => span.policy).filter((policy) => policy))];
  const facts = [plural(spans.reduce((sum, span) => sum + span.length, 0), 'token')];
  const cached = turn.cached > 0 ? ', ' + whole(turn.cached) + ' cached' : '';
  if (turn.context >= 0) facts.push('context ' + whole(turn.context) + cached);
  facts.push(seconds(turn.generate_s));
  if (turn.env_s !== null) facts.push('environment ' + seconds(turn.env_s));
  if (policies.length) facts.push('policy ' + policies.join(', '));
  if (turn.reward) facts.push('reward ' + figure(turn.reward));
  return facts;
}

// What is out of the ordinary about a turn.
function Marks({turn, number}) {
  const marks = [];
  const before = turn.parent < 0 ? 'a separate conversation' : 'continues after turn ' + (turn.parent + 1);
  if (turn.parent !== number - 2) marks.push('↳ ' + before);
  if (turn.finish && turn.finish !== 'stop') marks.push('ended by ' + turn.finish);
  if (turn.retries) marks.push('↻ ' + plural(turn.retries, 'more try', 'more tries'));
  if (turn.spans.length > 1) marks.push('↻ continued ' + plural(turn.spans.length - 1, 'time'));
  if (!marks.length) return null;
  return html`<p class="marks">${marks.map((mark) => html`<span key=${mark} class="badge warn">${mark}</span>`)}</p>`;
}

// A reply as its ids where they are recorded, else as its message.
function Reply({episode, turn, number, run, by}) {
  const {reply} = turn;
  if (!spansOf(episode, turn).length) return html`<${Message} message=${reply} run=${run} />`;
  return html`<div class="message of-model">
    <p class="author">${reply.role}</p>
    <div class="content">
      <${TokenBlock} episode=${episode} spans=${turn.spans} by=${by} label=${'reply of turn ' + number} />
      <${Images} images=${reply.images} run=${run} />
      <${Calls} calls=${reply.calls} log=${turn.calls} />
    </div>
  </div>`;
}

function Info({info}) {
  const names = Object.keys(info).filter((name) => !name.startsWith('tool_'));
  if (!names.length) return null;
  return html`<p class="small muted info">${names.map((name) => html`<span key=${name}>${name} = <bdi>${info[name]}</bdi></span>`)}</p>`;
}

// Everything in the order of the record: what was given and what was sampled.
function Spans({episode, by}) {
  return useMemo(() => {
    const turnStart = turnStarts(episode);
    return html`<section class="card spans">${episode.spans.map((span, number) => {
      const turn = turnStart.get(number);
      const look = 'span ' + (span.origin === 'model' ? 'of-model' : 'of-world') + (turn ? ' turn' : '');
      return html`<div key=${number} class=${look} ...${turn ? turnMark(turn) : {}}>
        <p class="small muted">${turn ? html`<b>turn ${turn}</b> · ` : null}${spanFacts(span, number).join(' · ')}</p>
        <${TokenBlock} episode=${episode} spans=${[number]} by=${by} label=${'span ' + number} />
      </div>`;
    })}</section>`;
  }, [episode, by]);
}

function spanFacts(span, number) {
  const facts = [number + ': ' + originName(span.origin)];
  if (span.agent && span.agent !== 'main') facts.push(span.agent);
  if (span.origin === 'model' && span.policy) facts.push('policy ' + span.policy);
  facts.push(plural(span.length, 'id') + ' from position ' + whole(span.start));
  facts.push(span.parent >= 0 ? 'after ' + span.parent : 'a beginning');
  if (span.origin !== 'model') return facts;
  for (const [from, to, state, reason] of span.state || []) facts.push(whole(to - from) + ' ' + stateWords({state, reason}));
  return facts;
}
