// Elements, texts and numbers. All text of a run is set by textContent; nothing is parsed as HTML.
const SVG = 'http://www.w3.org/2000/svg';
const SVG_TAGS = new Set(['svg', 'path', 'line', 'circle', 'rect', 'text', 'title', 'g']);

function h(tag, attributes, ...children) {
  const node = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (name === 'value') node.value = value;
    else node.setAttribute(name, value === true ? '' : String(value));
  }
  add(node, children);
  return node;
}

function add(node, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) add(node, child);
    else node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

function put(node, ...children) {
  node.replaceChildren();
  add(node, children);
  return node;
}

function fixed(value, digits) {
  if (value === null || value === undefined) return '–';
  const size = Math.abs(value);
  if (digits !== undefined) return value.toFixed(digits);
  if (size === 0) return '0';
  if (size >= 1e6) return (value / 1e6).toFixed(1) + 'M';
  if (size >= 1e4) return (value / 1e3).toFixed(1) + 'k';
  if (size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(4)));
}

function seconds(value) {
  if (value === null || value === undefined) return '–';
  if (value < 1e-3) return Math.round(1e6 * value) + ' µs';
  return value < 1 ? (1000 * value).toPrecision(3) + ' ms' : value.toPrecision(3) + ' s';
}

function percent(value) {
  if (value === 0) return '0%';
  return value < 0.001 ? value.toExponential(1) : (100 * value).toFixed(1) + '%';
}

function plural(count, name) {
  return count + ' ' + name + (count === 1 ? '' : 's');
}
