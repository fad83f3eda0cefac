// Curves by uPlot: one hover line for all charts of a page, values beside the title, steps by the
// arrow keys, and a click or Enter that leads to the episodes of a step.
import {changeQuery} from './address.js';
import {html, useEffect, useLayoutEffect, useMemo, useRef, useState} from './dom.js';
import {figure, plural} from './format.js';
import {AXES} from './metrics.js';
import {prose, Segmented} from './parts.js';

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
function smoothed(values, size) {
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

function options(drawn, {share, from0, format, stacked}) {
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
    padding: [8, 10, 0, 0],
    legend: {show: false},
    cursor: {sync: {key: sync.key, setSeries: false}, y: false, drag: {x: true, y: false}, points: {size: 7}},
    scales: {
      x: {time: false},
      y: {range: (chart, low, high) => yRange(low, high, share, from0)},
    },
    axes: [
      {...axisLook(), ...grid(), size: 24, incrs: wholeSteps()},
      {
        ...axisLook(),
        ...grid(),
        gap: 4,
        size: (chart, values) => tickWidth(values || ['']),
        values: (chart, ticks) => ticks.map((tick) => format(tick)),
        space: 26,
      },
    ],
    series: [{}, ...style],
    hooks: {draw: [(chart) => drawWhiskers(chart, drawn)]},
  };
}

function axisLook() {
  return {stroke: () => css('--muted'), ticks: {show: false}, font: '11px system-ui'};
}

function grid() {
  return {grid: {stroke: () => css('--grid'), width: 1}};
}

// Pixels of the widest tick.
function tickWidth(ticks) {
  return 10 + 6.5 * Math.max(2, ...ticks.map((text) => String(text).length));
}

// Whole steps only: 1, 2, 5, 10, ...
function wholeSteps() {
  const units = [];
  for (let size = 1; size <= 1e9; size *= 10) units.push(size, 2 * size, 5 * size);
  return units;
}

function yRange(low, high, share, from0) {
  if (low === null || high === null) return [0, 1];
  if (share) return [0, Math.max(1, high)];

  const bottom = from0 && low >= 0 ? 0 : low;
  if (high <= bottom) {
    const room = (end) => Math.abs(end) / 10 || 1;
    return [bottom - room(bottom), high + room(high)];
  }
  const below = from0 ? {pad: 0, soft: 0, mode: 1} : {pad: 0.1, soft: 0, mode: 3};
  return uPlot.rangeNum(bottom, high, {min: below, max: {pad: 0.1, soft: 0, mode: 3}});
}

function drawWhiskers(chart, drawn) {
  const {ctx} = chart;
  const half = 4 * devicePixelRatio;
  for (const one of drawn.filter((each) => each.whiskers)) {
    ctx.save();
    ctx.strokeStyle = cssColor(one.color);
    ctx.lineWidth = 1.5 * devicePixelRatio;
    for (const [x, low, high] of one.whiskers) {
      const at = chart.valToPos(x, 'x', true);
      const ends = [low, high].map((value) => chart.valToPos(value, 'y', true));
      ctx.beginPath();
      ctx.moveTo(at, ends[0]);
      ctx.lineTo(at, ends[1]);
      for (const end of ends) {
        ctx.moveTo(at - half, end);
        ctx.lineTo(at + half, end);
      }
      ctx.stroke();
    }
    ctx.restore();
  }
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
export function Chart(given) {
  const {title, note, series, smooth = 1, format = figure, stacked, onPick, unit = 'step'} = given;
  const shown = series.filter((one) => one.points.length);
  // The pointer moves over all charts at once, and changes no line.
  const drawn = useMemo(() => (stacked ? stack(shown) : lines(shown, smooth)), [series, smooth, stacked]);
  const {place, hovered, onKeyDown} = usePlot({...given, format, drawn});
  if (!shown.length) return null;

  const ends = shown.map(({label, points}) => `${label} from ${format(points[0][1])} to ${format(points[points.length - 1][1])}`);
  const keys = onPick ? `; arrow keys move along it, Enter opens the episodes of a ${unit}` : '';
  return html`<figure class="chart">
    <figcaption>
      <b>${title}</b>
      <span class="values">
        ${shown.map((one) => html`<${Value} key=${one.label} one=${one} x=${hovered} format=${format} alone=${shown.length === 1} />`)}
        <span class="muted">${hovered === null ? '' : unit + ' ' + figure(hovered)}</span>
      </span>
      ${note ? html`<span class="note">${prose(note)}</span>` : null}
    </figcaption>
    <div class="plot" ref=${place} tabindex="0" role="img" onKeyDown=${onKeyDown} aria-label=${title + ': ' + ends.join(', ') + keys}></div>
  </figure>`;
}

// The value of a line where the pointer is, or its last.
function Value({one, x, format, alone}) {
  const point = x === null ? one.points[one.points.length - 1] : one.points.find((each) => each[0] === x);
  const text = (alone ? '' : one.label + ' ') + (point ? format(point[1]) : '–');
  return html`<span class="value"><i class="swatch" style=${{background: colorOf(one.color)}}></i>${text}</span>`;
}

// The plot in an element: {place, hovered: x under the pointer or null, onKeyDown}.
function usePlot({drawn, share, from0, format, stacked, smooth, onPick, height = 170}) {
  const place = useRef(null);
  const plot = useRef(null);
  const latest = useRef(onPick);
  latest.current = onPick;
  const [hovered, setHovered] = useState(null);
  const dark = useDark();

  function pick(chart) {
    const at = chart.cursor.idx;
    // A drag selects a range, which is no click on a step.
    const isClick = chart.select.width === 0 && at !== null && at !== undefined;
    if (isClick && latest.current) latest.current(chart.data[0][at]);
  }

  // A chart is made anew when its lines are others; new points of the same lines are set.
  const look = drawn.map((one) => [one.label, one.color, one.dash, Boolean(one.dots), Boolean(one.faint)]);
  useLayoutEffect(() => {
    if (!drawn.length) return undefined;
    const size = () => ({width: Math.max(120, place.current.clientWidth), height});
    const settings = {...options(drawn, {share, from0, format, stacked}), ...size()};
    const chart = new uPlot(settings, joined(drawn), place.current);
    chart.hooks.setCursor = [({cursor, data}) => setHovered(cursor.idx === null || cursor.idx === undefined ? null : data[0][cursor.idx])];
    chart.over.addEventListener('click', () => pick(chart));
    plot.current = chart;

    const resized = new ResizeObserver(() => chart.setSize(size()));
    resized.observe(place.current);
    return () => {
      resized.disconnect();
      chart.destroy();
      plot.current = null;
    };
  }, [JSON.stringify([look, dark, share, from0])]);

  const ends = drawn.map(({points}) => [points.length, points[0], points[points.length - 1]]);
  useEffect(() => {
    if (plot.current) plot.current.setData(joined(drawn));
  }, [JSON.stringify(ends), smooth]);

  function onKeyDown(event) {
    const chart = plot.current;
    if (!chart) return;
    const to = moved(chart, event.key);
    if (to !== null) {
      chart.setCursor({left: chart.valToPos(chart.data[0][to], 'x'), top: 10});
      event.preventDefault();
    } else if (event.key === 'Enter') pick(chart);
    else if (event.key === 'Escape') chart.setCursor({left: -10, top: -10});
  }
  return {place, hovered, onKeyDown};
}

// The index that a key leads to, or null.
function moved(chart, key) {
  const last = chart.data[0].length - 1;
  const at = chart.cursor.idx;
  const isNowhere = at === null || at === undefined;
  const places = {
    ArrowRight: isNowhere ? 0 : Math.min(last, at + 1),
    ArrowLeft: isNowhere ? last : Math.max(0, at - 1),
    Home: 0,
    End: last,
  };
  return key in places ? places[key] : null;
}

// What the horizontal axis counts, and over how many steps curves are smoothed: both in the address.
export function CurveControls({axis, smooth}) {
  const axes = Object.keys(AXES).map((name) => [name, name]);
  return html`
    <${Segmented} label="horizontal axis" value=${axis} values=${axes} onChange=${(x) => changeQuery({x: x === 'step' ? '' : x})} />
    <label>smooth over
      <input type="range" min="1" max="50" value=${smooth} onInput=${(event) => changeQuery({smooth: event.target.value})} />
      ${plural(smooth, 'step')}</label>`;
}
