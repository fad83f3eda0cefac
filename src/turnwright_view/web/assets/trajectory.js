// A trajectory: as a conversation, as tokens, as a tree of branches, beside its siblings.
const VIEWS = ['conversation', 'tokens', 'tree', 'siblings'];
const Look = {by: 'logprob'};

async function showTrajectory(main, run, at, view, turn, still) {
  const record = await Data.trajectory(run, at);
  if (!still()) return;
  const base = '#/t/' + run + '/' + at;
  const key = record.key;
  const facts = ['reward ' + reward(record.reward), record.stop, plural(record.turns.length, 'turn'), seconds(record.wall_s)];
  if (record.advantage !== null) facts.push('advantage ' + fixed(record.advantage));
  if (record.untrained) facts.push('not trained: ' + record.untrained);
  const head = [
    h('p', {class: 'muted'}, h('a', {href: '#/list/' + run}, 'trajectories'), ' / ', key.phase + ' step ' + key.step + ' / task ', h('a', {href: '#/list/' + run + '?' + new URLSearchParams({task: key.task})}, key.task), ' / sample ' + key.sample),
    h('h1', null, facts.join(' · ')),
    record.why ? h('p', null, record.why, record.answer !== null ? [' Expected answer: ', h('code', null, record.answer)] : null) : null,
    record.error ? failure('Failure', record.error) : null,
    record.failures.map((one) => failure('Recovered from (' + (one.recovery || '?') + ')', one)),
    pairs('reward by part', record.rewards), pairs('counters', record.metrics), pairs('history rewritten', record.branches),
    record.sanity.map((one) => h('div', {class: 'sanity'}, h('p', null, '⚠ ', h('b', null, one.cause), ' ' + one.sentence), columns(one.columns))),
    h('div', {class: 'tabs', role: 'tablist'}, VIEWS.map((name, i) => h('a', {role: 'tab', href: base + '/' + name, 'aria-selected': name === view ? 'true' : 'false'}, (i + 1) + ' ' + name))),
  ];
  const bodies = {conversation, tokens: tokenView, tree: treeView, siblings: siblingView};
  put(main, head, bodies[view](record, run, base));
  const target = turn ? document.getElementById('turn-' + turn) : null;
  if (target) {
    target.scrollIntoView({block: 'start'});
    target.focus({preventScroll: true});
  } else window.scrollTo(0, 0);
}

function pairs(title, values) {
  const names = Object.keys(values);
  return names.length ? h('p', {class: 'muted'}, title + ': ', names.map((name) => name + ' ' + fixed(values[name])).join(' · ')) : null;
}

function failure(title, one) {
  const where = [one.phase, one.turn >= 0 ? 'turn ' + (one.turn + 1) : '', one.place].filter((part) => part).join(', ');
  return h('div', {class: 'broken'}, h('p', null, '✖ ', h('b', null, title + ': ' + one.type), ' in ' + where + ': ', one.message), one.traceback ? h('details', null, h('summary', null, 'traceback'), h('pre', null, one.traceback)) : null);
}

function messageOf(message, run) {
  const pictures = message.images.map((image) => {
    const address = Data.image(run, image.hash);
    return address ? h('img', {src: address, alt: 'image ' + image.hash.slice(0, 12), width: image.width > 0 ? image.width : null, loading: 'lazy'}) : h('em', null, '[image ' + image.hash.slice(0, 12) + ' is not in the file]');
  });
  return h('div', {class: 'message ' + (message.role === 'assistant' ? 'model' : 'env')},
    h('h4', null, message.name ? message.role + ' ' + message.name : message.role), pictures,
    message.reasoning ? h('details', {open: true}, h('summary', null, 'thinking'), h('pre', null, message.reasoning)) : null,
    message.text ? h('pre', null, message.text) : null, message.calls.map(call));
}

function call(one) {
  return h('div', {class: 'call'}, '→ ', h('b', null, one.name || '(unnamed)'), ' ', h('code', null, one.arguments), one.error ? h('p', {class: 'wrong'}, '✖ ' + one.error) : null);
}

function conversation(record, run, base) {
  const parts = record.opening.map((message) => messageOf(message, run));
  record.turns.forEach((turn, number) => parts.push(turnOf(record, turn, number, run, base)));
  if (record.final.length) parts.push(h('h3', null, 'Final messages of the environment'), record.final.map((message) => messageOf(message, run)));
  if (record.failed.length) parts.push(h('details', null, h('summary', null, plural(record.failed.length, 'turn') + ' of attempts that failed'), record.failed.map((turn) => [turn.messages.map((m) => messageOf(m, run)), messageOf(turn.reply, run)])));
  return h('div', {class: 'conversation'}, parts);
}

function turnOf(record, turn, number, run, base) {
  const spans = turn.spans.map((index) => record.spans[index]).filter((span) => span);
  const count = spans.reduce((sum, span) => sum + span.length, 0);
  const versions = [...new Set(spans.map((span) => span.policy))].join(', ');
  const facts = [plural(count, 'token'), 'context ' + turn.context + (turn.cached > 0 ? ' (' + turn.cached + ' cached)' : ''), 'generated in ' + seconds(turn.generate_s), 'environment took ' + seconds(turn.env_s), 'policy ' + versions, 'reward ' + reward(turn.reward)];
  if (turn.finish !== 'stop') facts.push('finish ' + turn.finish);
  if (turn.retries) facts.push('⟳ ' + plural(turn.retries, 'try').replace('trys', 'tries') + ' more');
  if (turn.spans.length > 1) facts.push('⟳ continued ' + (turn.spans.length - 1) + ' times');
  const before = turn.parent === number - 1 ? null : h('p', {class: 'muted'}, turn.parent < 0 ? (number ? '⑂ separate conversation' : null) : '⑂ continues after turn ' + (turn.parent + 1));
  const calls = turn.calls.map((one) => h('li', null, one.tool + ' ' + seconds(one.s) + (one.error ? ' ✖ ' + one.error : ' ✓')));
  const about = Object.entries(turn.info).filter(([name]) => !name.startsWith('tool_')).map(([name, value]) => name + ' = ' + value);
  return h('section', {id: 'turn-' + (number + 1), class: 'turn', tabindex: -1},
    h('h3', null, h('a', {href: base + '/conversation/' + (number + 1)}, 'turn ' + (number + 1)), turn.agent !== 'main' ? ' ' + turn.agent : '', ' ', h('span', {class: 'muted'}, facts.join(' · '))), before,
    turn.messages.map((message) => messageOf(message, run)),
    turn.inserted !== null ? h('div', {class: 'message env'}, h('h4', null, 'environment, inside the message'), h('pre', null, turn.inserted)) : null,
    h('div', {class: 'message model'}, h('h4', null, 'assistant'), turn.reply.reasoning && !spans.length ? h('pre', null, turn.reply.reasoning) : null,
      h('pre', {class: 'tokens'}, spans.length ? spans.map((span) => tokensOf(span, record, Look.by)) : turn.reply.text), turn.reply.calls.map(call)),
    calls.length ? h('ul', {class: 'calls'}, calls) : null, about.length ? h('p', {class: 'muted'}, about.join(' · ')) : null);
}

function tokenView(record) {
  const buttons = Object.keys(COLORINGS).map((name) => h('button', {type: 'button', id: 'by-' + name, 'aria-pressed': name === Look.by ? 'true' : 'false', onclick: () => { Look.by = name; route(); }}, name));
  const runs = record.spans.map((span, index) => h('div', {class: 'span ' + span.origin}, h('p', {class: 'muted'}, [index + ': ' + span.origin, span.agent !== 'main' ? span.agent : '', span.origin === 'model' ? 'policy ' + span.policy : '', plural(span.length, 'id'), 'from ' + span.start, span.parent >= 0 ? 'after ' + span.parent : 'a root', span.untrained ? 'not trained: ' + span.untrained : ''].filter((part) => part).join(' · ')), h('pre', {class: 'tokens'}, tokensOf(span, record, Look.by))));
  return h('div', null, h('p', null, 'colored by ', buttons, ' ', h('span', {class: 'muted'}, COLORINGS[Look.by] + '; hover for id, logprob, policy')), legend(Look.by), runs);
}

function treeView(record) {
  const children = new Map();
  record.spans.forEach((span, index) => children.set(span.parent, (children.get(span.parent) || []).concat(index)));
  const owner = new Map();
  record.turns.forEach((turn, number) => turn.spans.forEach((index) => owner.set(index, number + 1)));
  const node = (start) => {
    const chain = [];
    let index = start;
    for (;;) {
      chain.push(index);
      const next = children.get(index) || [];
      if (next.length !== 1) break;
      index = next[0];
    }
    const below = children.get(index) || [];
    const pieces = chain.map((one) => {
      const span = record.spans[one];
      const cut = span.parent >= 0 && span.start < record.spans[span.parent].start + record.spans[span.parent].length;
      return h('span', {class: 'piece ' + span.origin, title: span.text.slice(0, 300)}, (cut ? '✂ ' : '') + (owner.has(one) ? 'turn ' + owner.get(one) : span.origin) + ' ' + span.length);
    });
    return h('li', null, pieces, below.length ? h('ul', null, below.map(node)) : null);
  };
  const roots = children.get(-1) || [];
  return h('div', null, h('p', {class: 'muted'}, 'Each piece is a span with its length; ✂ marks a span that replaces ids of its parent.'), h('ul', {class: 'tree'}, roots.map(node)));
}

function siblingView(record, run) {
  const place = h('div', {class: 'siblings'}, h('p', {class: 'muted'}, 'reading …'));
  const rank = (one) => (one.at === record.at ? Infinity : one.reward === null ? -Infinity : one.reward);
  record.siblings.sort((a, b) => rank(b) - rank(a) || a.sample - b.sample); // this one, then the best
  Promise.all(record.siblings.slice(0, 8).map((one) => Data.trajectory(run, one.at).catch(() => null))).then((found) => {
    put(place, found.map((other, number) => other && h('div', {class: 'sibling' + (other.at === record.at ? ' here' : '')},
      h('h3', null, h('a', {href: '#/t/' + run + '/' + other.at}, 'sample ' + other.key.sample), other.at === record.at ? ' (this one)' : ''),
      h('p', null, 'reward ' + reward(other.reward) + ' · advantage ' + fixed(record.siblings[number].advantage) + ' · ' + other.stop),
      other.turns.map((turn, n) => [h('p', {class: 'muted'}, 'turn ' + (n + 1)), turn.messages.map((message) => messageOf(message, run)), messageOf(turn.reply, run)]))));
  });
  const more = record.siblings.length > 8 ? h('p', {class: 'muted'}, 'first 8 of ' + record.siblings.length) : null;
  return h('div', null, more, place);
}
