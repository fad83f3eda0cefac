// Sampled ids one by one, coloured by one of several figures; levels differ in underline too.
const COLORINGS = {
  mask: 'trained or not', logprob: 'logprob of the engine', advantage: 'advantage', mismatch: 'trainer minus engine',
};

function levelOf(by, span, i, record) {
  const logprob = span.logprobs ? span.logprobs[i] : null;
  const trainer = span.trainer ? span.trainer[i] : null;
  const untrained = isUntrained(span, i, record);
  if (by === 'mask') return untrained ? 'm0' : 'm1';
  if (by === 'logprob') return logprob === null || logprob === undefined ? 'none' : 'l' + [-0.10536, -0.69315, -2.30259, -4.60517].filter((bound) => logprob < bound).length;
  if (by === 'advantage') {
    const advantage = advantageOf(span, i, record);
    if (untrained || advantage === null) return 'none';
    return advantage > 0 ? 'up' : advantage < 0 ? 'down' : 'none';
  }
  if (trainer === null || trainer === undefined || logprob === null || logprob === undefined) return 'none';
  const off = Math.abs(trainer - logprob);
  return 'l' + [1e-5, 1e-3, 1e-2, 1e-1].filter((bound) => off > bound).length;
}

// Of the id, where ids of a trajectory differ (credit by turn, a penalty on ids), else that of the trajectory.
function advantageOf(span, i, record) {
  const own = span.advantages ? span.advantages[i] : undefined;
  return own === undefined ? record.advantage : own;
}

function isUntrained(span, i, record) {
  return (span.untrained !== undefined && i >= (span.untrained_from || 0)) || record.untrained !== '';
}

function tokenTitle(span, i, record) {
  const parts = ['id ' + span.ids[i], 'position ' + (span.start + i)];
  const logprob = span.logprobs ? span.logprobs[i] : null;
  parts.push(logprob === null || logprob === undefined ? 'no logprob' : 'logprob ' + logprob.toFixed(4) + ', probability ' + percent(Math.exp(Math.min(0, logprob))));
  const trainer = span.trainer ? span.trainer[i] : null;
  if (trainer !== null && trainer !== undefined) {
    parts.push('trainer ' + trainer.toFixed(4));
    if (logprob !== null && logprob !== undefined) parts.push('mismatch ' + (trainer - logprob).toExponential(1));
  }
  const advantage = advantageOf(span, i, record);
  if (advantage !== null) parts.push('advantage ' + fixed(advantage));
  parts.push('policy ' + span.policy);
  parts.push(isUntrained(span, i, record) ? 'not trained: ' + (span.untrained || record.untrained) : 'trained');
  return parts.join('\n');
}

function tokensOf(span, record, by) {
  if (!span.tokens) return h('span', {class: 'tok given', 'data-title': span.origin + ', ' + plural(span.length, 'id') + ', not sampled\nids ' + span.ids.slice(0, 20).join(' ')}, span.text);
  const nodes = span.tokens.map((text, i) => h('span', {class: 'tok ' + levelOf(by, span, i, record), 'data-title': tokenTitle(span, i, record), tabindex: -1}, text.replace(/\n/g, '⏎\n')));
  if (span.tokens.length < span.length) nodes.push(h('em', null, ' … ' + (span.length - span.tokens.length) + ' more ids are left out'));
  return nodes;
}

function legend(by) {
  const rows = {
    mask: [['m1', 'trained'], ['m0', 'not trained'], ['given', 'not sampled']],
    logprob: [['l0', 'over 90%'], ['l1', 'over 50%'], ['l2', 'over 10%'], ['l3', 'over 1%'], ['l4', 'under 1%'], ['none', 'unknown']],
    advantage: [['up', 'better than its siblings'], ['down', 'worse'], ['none', 'no advantage']],
    mismatch: [['l0', 'under 1e-5'], ['l1', 'under 1e-3'], ['l2', 'under 1e-2'], ['l3', 'under 0.1'], ['l4', 'over 0.1 nats'], ['none', 'not trained']],
  };
  return h('p', {class: 'legend'}, rows[by].map(([css, text]) => [h('span', {class: 'tok ' + css}, text), ' ']));
}
