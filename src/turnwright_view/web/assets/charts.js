// Lines over steps; the second run is dashed, so that it can be distinguished without color.
function chart(title, note, series, share) {
  const width = 420, height = 150, left = 52, right = width - 74, top = 10, bottom = height - 22;
  const drawn = series.filter((one) => one.points.length);
  if (!drawn.length) return null;
  const xs = drawn.flatMap((one) => one.points.map((p) => p[0]));
  const ys = drawn.flatMap((one) => one.points.map((p) => p[1]));
  let [low, high] = [Math.min(...ys), Math.max(...ys)];
  if (share) [low, high] = [0, Math.max(1, high)];
  if (high <= low) [low, high] = [low - (Math.abs(low) / 10 || 1), high + (Math.abs(high) / 10 || 1)];
  const [first, last] = [Math.min(...xs), Math.max(...xs)];
  const at = (x, y) => [
    left + (last > first ? (x - first) / (last - first) : 0.5) * (right - left),
    bottom - ((y - low) / (high - low)) * (bottom - top),
  ];
  const parts = [];
  for (const y of [low, (low + high) / 2, high]) {
    const place = at(first, y)[1];
    parts.push(h('line', {class: 'grid', x1: left, x2: right, y1: place, y2: place}));
    parts.push(h('text', {class: 'tick', x: left - 6, y: place + 4, 'text-anchor': 'end'}, fixed(y)));
  }
  parts.push(h('text', {class: 'tick', x: left, y: height - 6}, 'step ' + first));
  if (last > first) parts.push(h('text', {class: 'tick', x: right, y: height - 6, 'text-anchor': 'end'}, last));
  const ends = [];
  drawn.forEach((one, number) => {
    const marks = one.points.map((p) => at(p[0], p[1]));
    const css = 'run' + one.run;
    if (marks.length > 1) parts.push(h('path', {class: 'curve ' + css, d: 'M' + marks.map((m) => m[0].toFixed(1) + ',' + m[1].toFixed(1)).join('L')}));
    one.points.forEach((p, i) => {
      const tooltip = h('title', null, one.label + ', step ' + p[0] + ': ' + fixed(p[1]) + (one.link ? '; click for its episodes, the worst first' : ''));
      const episodes = one.link ? () => { location.hash = one.link(p[0]); } : null;
      parts.push(h('circle', {class: (marks.length > 1 ? 'hit' : 'mark ' + css) + (episodes ? ' link' : ''), cx: marks[i][0], cy: marks[i][1], r: 5, onclick: episodes}, tooltip));
    });
    const end = marks[marks.length - 1];
    const below = ends.some((y) => Math.abs(y - end[1]) < 12) ? 13 : 0;
    ends.push(end[1]);
    parts.push(h('text', {class: 'end', x: right + 6, y: end[1] + 4 + below}, (number ? '┄ ' : '') + fixed(one.points[one.points.length - 1][1])));
  });
  const svg = h('svg', {viewBox: '0 0 ' + width + ' ' + height, role: 'img', class: 'chart'}, h('title', null, title), parts);
  return h('figure', null, h('figcaption', null, h('b', null, title), ' ', h('span', {class: 'muted'}, note)), svg);
}

function thin(points) {
  if (points.length <= 240) return points;
  const size = Math.ceil(points.length / 240), kept = [];
  for (let i = 0; i < points.length; i += size) {
    const part = points.slice(i, i + size);
    kept.push([part[part.length - 1][0], part.reduce((sum, p) => sum + p[1], 0) / part.length]);
  }
  return kept;
}
