// Where the page has its data from: the server, or the file that the page stands in.
import {queryOf} from './address.js';
import {folded, matching} from './filter.js';

const overviews = new Map();
const fromFile = readFile();

export const source = {
  live: fromFile === null,

  session() {
    return fromFile ? Promise.resolve(fromFile.session) : ask('/api/session');
  },

  runs() {
    return fromFile ? Promise.resolve(fromFile.session) : ask('/api/runs');
  },

  // Rows of metrics that are here already are not sent again.
  async overview(run, signal) {
    if (fromFile) return known(fromFile.overviews[run], 'run');
    const before = overviews.get(run);
    const rows = before ? before.rows : [];
    const answer = await ask('/api/run', {run, since: rows.length}, signal);
    // A run that was begun anew has fewer.
    answer.rows = answer.since === rows.length ? rows.concat(answer.rows) : answer.rows;
    overviews.set(run, answer);
    return answer;
  },

  async facets(run, signal) {
    return fromFile ? known(fromFile.overviews[run], 'run').facets : ask('/api/facets', {run}, signal);
  },

  async episodes(run, filter, start, most, signal) {
    if (!fromFile) {
      const query = {...filter, run, start, most};
      return filter.group ? wholeGroup(query, signal) : ask('/api/episodes', query, signal);
    }
    const here = known(fromFile.episodes[run], 'run');
    const texts = filter.text ? await textsOf(run, here) : null;
    const rows = matching(here.rows, filter, texts);
    const next = start + most < rows.length ? start + most : null;
    const indexed = {read: 1, size: 1, count: here.rows.length, all: here.all};
    return {rows: rows.slice(start, start + most), total: rows.length, next, indexed};
  },

  async episode(run, key, signal) {
    if (!fromFile) return ask('/api/episode', {run, key}, signal);
    const row = known(fromFile.episodes[run], 'run').rows.find((one) => one.key === key);
    if (!row) throw new Error('this episode is not in the file, which has a selection of them');
    return (await chunk(run, row.chunk)).episodes[key];
  },

  // The address of an image, or '' where the file does not have it.
  image(run, hash) {
    if (!/^[0-9a-f]{64}$/.test(hash)) return '';
    if (!fromFile) return '/media/' + encodeURIComponent(run) + '/' + hash + '.png';
    const bytes = media.get(hash);
    return bytes ? 'data:image/png;base64,' + bytes : '';
  },
};

const INDEXING = 503;
const PATIENCE = 120;

// What is not indexed yet is asked for again, every half a second for a minute, unless `signal` ends it.
async function ask(path, query, signal) {
  let answer = await fetch(path + queryOf(query), {signal});
  for (let tries = 0; answer.status === INDEXING && tries < PATIENCE; tries++) {
    await new Promise((done) => setTimeout(done, 500));
    answer = await fetch(path + queryOf(query), {signal});
  }
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

// A group is whole when all is indexed.
async function wholeGroup(query, signal) {
  for (let tries = 0; ; tries++) {
    const found = await ask('/api/episodes', query, signal);
    if (found.rows.length || found.indexed.read >= found.indexed.size || tries >= PATIENCE) return found;
    await new Promise((done) => setTimeout(done, 500));
  }
}

function readFile() {
  const element = document.getElementById('data');
  return element ? JSON.parse(element.textContent) : null;
}

function known(value, what) {
  if (!value) throw new Error('there is no such ' + what + ' here');
  return value;
}

// Episodes of a file are packed by some dozens; each pack is read when one of it is asked for.
const chunks = new Map();
const media = new Map();

function chunk(run, number) {
  const id = 'chunk-' + Object.keys(fromFile.episodes).indexOf(run) + '-' + number;
  if (!chunks.has(id)) chunks.set(id, unpack(document.getElementById(id).textContent));
  return chunks.get(id);
}

async function unpack(text) {
  const packed = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream('gzip'));
  const content = await new Response(stream).json();
  for (const [hash, bytes] of Object.entries(content.media)) media.set(hash, bytes);
  return content;
}

async function textsOf(run, here) {
  const texts = new Map();
  for (const row of here.rows) {
    const episode = (await chunk(run, row.chunk)).episodes[row.key];
    const spans = episode.spans.map((span) => span.text);
    const error = episode.error ? [episode.error.message, episode.error.traceback] : [];
    texts.set(row.key, folded([...spans, ...error, row.task].join('\n')));
  }
  return texts;
}
