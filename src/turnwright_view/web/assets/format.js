// Numbers, durations and words as a person reads them.

export function figure(value) {
  if (value === null || value === undefined) return '–';
  const size = Math.abs(value);
  if (size === 0) return '0';
  if (size >= 1e6) return trimmed(value / 1e6, 2) + 'M';
  if (size >= 1e4) return trimmed(value / 1e3, 1) + 'k';
  if (size < 0.9995e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

function trimmed(value, digits) {
  return String(Number(value.toFixed(digits)));
}

export function whole(value) {
  return value === null || value === undefined ? '–' : Math.round(value).toLocaleString('en-US');
}

export function percent(value, digits = 1) {
  if (value === null || value === undefined) return '–';
  if (value !== 0 && Math.abs(value) < 0.001) return (100 * value).toExponential(1) + '%';
  return trimmed(100 * value, digits) + '%';
}

export function signed(value) {
  if (value === null || value === undefined) return '–';
  return (value > 0 ? '+' : value < 0 ? '−' : '') + figure(Math.abs(value));
}

export function seconds(value) {
  if (value === null || value === undefined) return '–';
  if (value < 1e-3) return Math.round(1e6 * value) + ' µs';
  if (value < 0.9995) return Math.round(1000 * value) + ' ms';
  if (value < 100) return Number(value.toPrecision(3)) + ' s';
  if (value < 6000) return Math.round(value / 60) + ' min';
  if (value < 180000) return trimmed(value / 3600, 1) + ' h';
  return trimmed(value / 86400, 1) + ' days';
}

export function bytes(value) {
  if (value === null || value === undefined) return '–';
  if (value < 1024) return value + ' B';
  const units = ['KiB', 'MiB', 'GiB', 'TiB'];
  let size = value / 1024;
  let unit = 0;
  while (size >= 1000 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return trimmed(size, size < 10 ? 1 : 0) + ' ' + units[unit];
}

// "3 min ago" of a time in Unix seconds.
export function ago(time) {
  return time ? seconds(Math.max(0, Date.now() / 1000 - time)) + ' ago' : '–';
}

export function plural(count, name, many = name + 's') {
  return whole(count) + ' ' + (count === 1 ? name : many);
}

export function interval(low, high) {
  return low === null || low === undefined ? '' : '[' + percent(low) + ', ' + percent(high) + ']';
}

// Hidden characters as signs, as the server writes those of records: for words of the address.
const HIDDEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu;

export function visibleText(text) {
  return text.replace(HIDDEN, (one) => '⟨U+' + one.codePointAt(0).toString(16).toUpperCase().padStart(4, '0') + '⟩');
}
