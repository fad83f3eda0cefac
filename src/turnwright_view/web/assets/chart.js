// Curves by uPlot: one hover line for all charts of a page, values beside the title, steps by the
// arrow keys, and a click or Enter that leads to the episodes of a step.
import {html, useEffect, useLayoutEffect, useRef, useState} from './dom.js';
import {figure} from './format.js';
import {prose} from './parts.js';

const {uPlot} = window;
const sync = uPlot.sync('steps');

// Of several runs each has a color and a dash, so that they differ without color too.
export const DASHES = [[], [6, 4], [2, 3], [10, 4, 2, 4], [14, 5], [4, 4, 1, 4], [8, 2], [1, 2]];
const COLORS = 8;

export const colorOf = (number) => 'var(--c' + (number % COLORS) + ')';

function cssColor(number) {
  return getComputedStyle(document.documentElement).getPropertyValue('--c' + (number % COLORS)).trim();
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Mean of about `size` values around each point. Nearer to an end the window is as much shorter on
// both sides, so a curve is neither late nor bent where it begins and ends.
export function smoothed(values, size) {
  const last = values.length - 1;
  return values.map((value, at) => {
    const half = Math.min(Math.floor(size / 2), at, last - at);
    const window = values.slice(at - half, at + half + 1);
    return window.reduce((sum, one) => sum + one, 0) / window.length;
  });
}

// One table of all x with a column for each series; null where a series has no point.
function joined(series) {
  const tables = series.map((one) => [one.points.map((point) => point[0]), one.points.map((point) => point[1])]);
  return tables.length === 1 ? tables[0] : uPlot.join(tables);
}

function lines(series, smooth) {
  const drawn = [];
  for (const one of series) {
    const dots = one.whiskers || one.points.length === 1;
    if (dots || smooth <= 1) drawn.push({...one, dots});
    else {
      const values = smoothed(one.points.map((point) => point[1]), smooth);
      drawn.push({...one, faint: true});
      drawn.push({...one, points: one.points.map((point, at) => [point[0], values[at]]), mean: true});
    }
  }
  return drawn;
}

function options(drawn, {share, from0, format, stacked}, width, height) {
  const style = drawn.map((one) => ({
    label: one.label,
    stroke: cssColor(one.color) + (one.faint ? '55' : ''),
    width: one.faint ? 1 : stacked ? 0.5 : 2,
    dash: DASHES[(one.dash || 0) % DASHES.length],
    fill: stacked ? cssColor(one.color) + 'aa' : undefined,
    points: {show: Boolean(one.dots), size: 7, fill: cssColor(one.color)},
    spanGaps: true,
    paths: one.dots && one.whiskers ? () => null : undefined,
  }));

  return {
    width,
    height,
    padding: [8, 10, 0, 0],
    legend: {show: false},
    cursor: {sync: {key: sync.key, setSeries: false}, y: false, drag: {x: true, y: false}, points: {size: 7}},
    scales: {
      x: {time: false},
      y: {range: (chart, low, high) => yRange(low, high, share, from0)},
    },
    axes: [
      {stroke: () => css('--muted'), grid: {stroke: () => css('--grid'), width: 1}, ticks: {show: false}, size: 24, font: '11px system-ui', incrs: steps()},
      {
        stroke: () => css('--muted'),
        grid: {stroke: () => css('--grid'), width: 1},
        ticks: {show: false},
        font: '11px system-ui',
        gap: 4,
        size: (chart, values) => 10 + 6.5 * Math.max(2, ...(values || ['']).map((text) => String(text).length)),
        values: (chart, ticks) => ticks.map((tick) => format(tick)),
        space: 26,
      },
    ],
    series: [{}, ...style],
    hooks: {draw: [(chart) => drawWhiskers(chart, drawn)]},
  };
}

// Whole steps only: 1, 2, 5, 10, ...
function steps() {
  const units = [];
  for (let size = 1; size <= 1e9; size *= 10) units.push(size, 2 * size, 5 * size);
  return units;
}

function yRange(low, high, share, from0) {
  if (low === null || high === null) return [0, 1];
  if (share) return [0, Math.max(1, high)];
  const bottom = from0 && low >= 0 ? 0 : low;
  if (high <= bottom) return [bottom - (Math.abs(bottom) / 10 || 1), high + (Math.abs(high) / 10 || 1)];
  return uPlot.rangeNum(bottom, high, {min: {pad: from0 ? 0 : 0.1, soft: 0, mode: from0 ? 1 : 3}, max: {pad: 0.1, soft: 0, mode: 3}});
}

function drawWhiskers(chart, drawn) {
  const {ctx} = chart;
  drawn.forEach((one) => {
    if (!one.whiskers) return;
    ctx.save();
    ctx.strokeStyle = cssColor(one.color);
    ctx.lineWidth = 1.5 * devicePixelRatio;
    for (const [x, low, high] of one.whiskers) {
      const [at, top, bottom] = [chart.valToPos(x, 'x', true), chart.valToPos(high, 'y', true), chart.valToPos(low, 'y', true)];
      const half = 4 * devicePixelRatio;
      ctx.beginPath();
      ctx.moveTo(at, top);
      ctx.lineTo(at, bottom);
      ctx.moveTo(at - half, top);
      ctx.lineTo(at + half, top);
      ctx.moveTo(at - half, bottom);
      ctx.lineTo(at + half, bottom);
      ctx.stroke();
    }
    ctx.restore();
  });
}

// Areas on top of each other: every series is the sum of those before it and itself, and the last
// is drawn first, so that the others cover it.
function stack(series) {
  const sums = new Map();
  const stacked = series.map((one) => {
    const points = one.points.map(([x, y]) => {
      sums.set(x, (sums.get(x) || 0) + y);
      return [x, sums.get(x)];
    });
    return {...one, points, own: new Map(one.points)};
  });
  return stacked.reverse();
}

function useDark() {
  const media = window.matchMedia('(prefers-color-scheme: dark)');
  const [dark, setDark] = useState(media.matches);
  useEffect(() => {
    const changed = () => setDark(media.matches);
    media.addEventListener('change', changed);
    return () => media.removeEventListener('change', changed);
  }, []);
  return dark;
}

// `series`: [{label, color, dash, points: [[x, y]], whiskers?: [[x, low, high]]}]. `onPick(x)` is
// called by a click or Enter; `unit` is what x counts.
export function Chart({title, note, series, smooth = 1, share, from0, format = figure, stacked, onPick, unit = 'step', height = 170}) {
  const place = useRef(null);
  const plot = useRef(null);
  const [hovered, setHovered] = useState(null);
  const dark = useDark();
  const visible = series.filter((one) => one.points.length);
  const drawn = stacked ? stack(visible) : lines(visible, smooth);
  const shape = JSON.stringify([drawn.map((one) => [one.label, one.color, one.dash, Boolean(one.dots), Boolean(one.faint)]), dark, share, from0]);
  const latest = useRef({});
  latest.current = {onPick, drawn};

  // A chart is made anew when its lines are others; new points of the same lines are set.
  useLayoutEffect(() => {
    if (!drawn.length) return undefined;
    const width = Math.max(120, place.current.clientWidth);
    const chart = new uPlot(options(drawn, {share, from0, format, stacked}, width, height), joined(drawn), place.current);
    chart.hooks.setCursor = [(one) => setHovered(one.cursor.idx)];
    chart.over.addEventListener('click', () => pick(chart));
    plot.current = chart;
    const resized = new ResizeObserver(() => chart.setSize({width: Math.max(120, place.current.clientWidth), height}));
    resized.observe(place.current);
    return () => {
      resized.disconnect();
      chart.destroy();
      plot.current = null;
    };
  }, [shape]);

  useEffect(() => {
    if (plot.current) plot.current.setData(joined(drawn));
  }, [JSON.stringify(visible.map((one) => [one.points.length, one.points[one.points.length - 1]])), smooth, unit]);

  function pick(chart) {
    const at = chart.cursor.idx;
    // A drag selects a range, which is no click on a step.
    if (at !== null && at !== undefined && chart.select.width === 0 && latest.current.onPick) latest.current.onPick(chart.data[0][at]);
  }

  function keyed(event) {
    const chart = plot.current;
    if (!chart) return;
    const last = chart.data[0].length - 1;
    const at = chart.cursor.idx;
    const moves = {ArrowRight: at === null || at === undefined ? 0 : Math.min(last, at + 1), ArrowLeft: at === null || at === undefined ? last : Math.max(0, at - 1), Home: 0, End: last};
    if (event.key in moves) {
      chart.setCursor({left: chart.valToPos(chart.data[0][moves[event.key]], 'x'), top: 10});
      event.preventDefault();
    } else if (event.key === 'Enter') pick(chart);
    else if (event.key === 'Escape') chart.setCursor({left: -10, top: -10});
  }

  if (!visible.length) return null;
  const x = plot.current && hovered !== null && hovered !== undefined ? plot.current.data[0][hovered] : null;
  const told = visible.map((one) => ({one, point: pointAt(one.points, x)}));
  const summary = visible.map((one) => one.label + ' from ' + format(one.points[0][1]) + ' to ' + format(one.points[one.points.length - 1][1])).join(', ');

  return html`<figure class="chart">
    <figcaption>
      <b>${title}</b>
      <span class="values">${told.map(({one, point}) => html`<span class="value" key=${one.label}>
        <i class="swatch" style=${{background: colorOf(one.color)}}></i>${visible.length > 1 ? one.label + ' ' : ''}${point ? format(point[1]) : '–'}</span>`)}
        <span class="muted">${x === null ? '' : unit + ' ' + figure(x)}</span></span>
      ${note ? html`<span class="note">${prose(note)}</span>` : null}
    </figcaption>
    <div class="plot" ref=${place} tabindex="0" role="img" onKeyDown=${keyed}
      aria-label=${title + ': ' + summary + (onPick ? '; arrow keys move along it, Enter opens the episodes of a ' + unit : '')}></div>
  </figure>`;
}

// The point at x, or the last where nothing is hovered.
function pointAt(points, x) {
  if (x === null) return points[points.length - 1];
  return points.find((point) => point[0] === x);
}
