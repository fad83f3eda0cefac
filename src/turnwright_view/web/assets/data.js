// Where the page has its data from: a server, or the file that it stands in.
const Data = {inside: null, runs: 1, names: [], glossary: {}, overviews: []};

Data.start = async function () {
  const element = document.getElementById('data');
  if (element) {
    Data.inside = JSON.parse(element.textContent);
    Data.runs = Data.inside.runs.length;
    Data.names = Data.inside.runs.map((run) => run.name);
    Data.glossary = Data.inside.glossary;
  } else {
    const found = await ask('/api/runs', {});
    Data.runs = found.runs;
    Data.names = found.names;
    Data.glossary = found.glossary;
  }
};

async function ask(path, query) {
  const answer = await fetch(path + '?' + new URLSearchParams(query));
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

// Rows that are known are not sent again; the rest is as it is now.
Data.overview = async function (run) {
  if (Data.inside) return (Data.overviews[run] = Data.inside.runs[run]);
  const before = Data.overviews[run];
  const known = before ? before.rows : [];
  const found = await ask('/api/overview', {run, since: known.length});
  found.rows = known.concat(found.rows);
  return (Data.overviews[run] = found);
};

// What the table can be filtered by.
Data.about = async function (run) {
  return Data.inside ? Data.inside.runs[run] : ask('/api/facets', {run});
};

Data.list = async function (run, filter, start, most) {
  if (!Data.inside) {
    const query = {run, start, most};
    for (const [name, value] of Object.entries(filter)) if (value !== '') query[name] = value;
    return ask('/api/list', query);
  }
  const here = Data.inside.runs[run];
  let rows = here.list.filter((row) => fits(row, filter, here.trajectories[row.at]));
  if (filter.newest === '1') rows = rows.reverse();
  if (filter.worst === '1') rows = rows.slice().sort((a, b) => (a.reward === null ? -Infinity : a.reward) - (b.reward === null ? -Infinity : b.reward) || 0);
  const next = start + most < rows.length ? start + most : null;
  return {rows: rows.slice(start, start + most), total: rows.length, next, count: here.all, read: 1, size: 1};
};

Data.trajectory = async function (run, at) {
  if (Data.inside) {
    const found = Data.inside.runs[run] && Data.inside.runs[run].trajectories[at];
    if (!found) throw new Error('this trajectory is not in the file: it contains a selection');
    return found;
  }
  return ask('/api/trajectory', {run, at});
};

Data.image = function (run, hash) {
  if (!/^[0-9a-f]{64}$/.test(hash)) return '';
  if (!Data.inside) return '/media/' + Number(run) + '/' + hash + '.png';
  const found = Data.inside.runs[run].images[hash];
  return found ? 'data:image/png;base64,' + found : '';
};

function fits(row, filter, record) {
  const between = (value, name) => {
    const low = filter[name + '_min'], high = filter[name + '_max'];
    if ((low || high) && (value === null || value === undefined)) return false;
    return !(low && value < Number(low)) && !(high && value > Number(high));
  };
  if (filter.phase && row.phase !== filter.phase) return false;
  if (filter.stop && row.stop !== filter.stop) return false;
  if (filter.task && row.task !== filter.task) return false;
  if (filter.tool && !row.tools.includes(filter.tool)) return false;
  if (filter.error && (filter.error === '*' ? !row.error : row.error !== filter.error)) return false;
  if (!between(row.step, 'step') || !between(row.reward, 'reward') || !between(row.turns, 'turns')) return false;
  if (!filter.text) return true;
  const needle = filter.text.toLowerCase();
  const texts = record.spans.map((span) => span.text).concat(record.error ? [record.error.message, record.error.traceback] : []);
  return texts.some((text) => text.toLowerCase().includes(needle));
}
