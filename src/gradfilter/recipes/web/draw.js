// What all plots share: elements, formats, scales, axes, the box that follows the pointer.

const numbers = JSON.parse(document.getElementById("numbers").textContent);
const place = (id) => document.getElementById(id);

function make(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function draw(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children.flat().filter((c) => c !== null && c !== undefined));
  return element;
}

// "inf" is how JSON here has an infinite number
const numeric = (v) => (v === "inf" ? Infinity : v === "-inf" ? -Infinity : v);
const known = (v) => v !== null && v !== undefined && Number.isFinite(v);

function short(value) {
  if (value === Infinity) return "∞";
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return size >= 100
    ? value.toFixed(0)
    : size >= 10
      ? value.toFixed(1)
      : size >= 1 || size === 0
        ? value.toFixed(2)
        : value.toPrecision(2);
}

const percent = (share) => (known(share) ? `${(100 * share).toFixed(1)}%` : "–");
const points = (share) => `${share < 0 ? "−" : "+"}${Math.abs(100 * share).toFixed(1)} points`;
const minus = (text) => String(text).replace("-", "−");

const METRICS = { top1: "top-1 accuracy", miou: "mean IoU" };
const metricTitle = METRICS[numbers.metric] || numbers.metric;

// A scale maps [low, high] to pixels; a logarithmic one needs low > 0.
function scale(low, high, from, to, logarithmic = false) {
  const f = logarithmic ? Math.log : (v) => v;
  const span = f(high) - f(low) || 1;
  const map = (v) => from + ((f(v) - f(low)) / span) * (to - from);
  map.ticks = (count) => (logarithmic ? logTicks(low, high, count) : evenTicks(low, high, count));
  map.low = low;
  map.high = high;
  return map;
}

function evenTicks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw || 1));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= raw) || power;
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-9); k++)
    found.push(k * step);
  return found;
}

function logTicks(low, high, count) {
  for (const digits of [[1, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]]) {
    const found = [];
    for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++)
      for (const d of digits) {
        const tick = d * 10 ** p;
        if (tick >= low && tick <= high) found.push(tick);
      }
    if (found.length <= count) return found.length > 1 ? found : evenTicks(low, high, count);
  }
  return evenTicks(low, high, count);
}

const tickText = (v) =>
  minus(Number(v.toPrecision(3)).toLocaleString("en", { maximumSignificantDigits: 3 }));

// An empty plot as wide as its place: the svg, and the frame that is left for the data.
function canvas(host, label, { height = 0.5, least = 280, most = 420, left = 46 } = {}) {
  const width = Math.max(
    260,
    host.clientWidth - parseFloat(getComputedStyle(host).paddingLeft) * 2,
  );
  const tall = Math.round(Math.min(most, Math.max(least, width * height)));
  const svg = draw("svg", {
    viewBox: `0 0 ${width} ${tall}`,
    width,
    height: tall,
    role: "group",
    "aria-label": label,
  });
  host.querySelector(":scope > svg")?.remove();
  host.prepend(svg);
  const frame = { left, right: width - 14, top: 14, bottom: tall - 42 };
  return { svg, frame, width, tall };
}

function axes(
  { svg, frame },
  x,
  y,
  { xTitle, yTitle, yText = tickText, xText = tickText, xTicks = null },
) {
  const wide = frame.right - frame.left;
  for (const tick of y.ticks(6)) {
    const at = y(tick);
    if (at < frame.top - 1 || at > frame.bottom + 1) continue;
    svg.append(draw("line", { class: "grid", x1: frame.left, x2: frame.right, y1: at, y2: at }));
    svg.append(draw("text", { x: frame.left - 6, y: at + 4, "text-anchor": "end" }, yText(tick)));
  }
  for (const tick of xTicks || x.ticks(Math.max(3, Math.floor(wide / 65)))) {
    const at = x(tick);
    svg.append(draw("line", { class: "grid", x1: at, x2: at, y1: frame.top, y2: frame.bottom }));
    svg.append(draw("text", { x: at, y: frame.bottom + 16, "text-anchor": "middle" }, xText(tick)));
  }
  svg.append(
    draw("line", {
      class: "axis",
      x1: frame.left,
      x2: frame.right,
      y1: frame.bottom,
      y2: frame.bottom,
    }),
  );
  svg.append(
    draw(
      "text",
      { class: "name", x: frame.right, y: frame.bottom + 34, "text-anchor": "end" },
      xTitle,
    ),
  );
  svg.append(draw("text", { class: "name", x: frame.left + 6, y: frame.top + 10 }, yTitle));
}

// Shapes tell depths apart; dashes do it for lines.
const SHAPES = [
  (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`,
  (r) => `M${-r * 0.9},${-r * 0.9}h${1.8 * r}v${1.8 * r}h${-1.8 * r}z`,
  (r) => `M0,${-1.2 * r}L${1.15 * r},${0.9 * r}H${-1.15 * r}z`,
  (r) => `M0,${-1.3 * r}L${1.3 * r},0L0,${1.3 * r}L${-1.3 * r},0z`,
  (r) => `M0,${1.2 * r}L${1.15 * r},${-0.9 * r}H${-1.15 * r}z`,
  (r) =>
    `M${-0.4 * r},${-1.2 * r}h${0.8 * r}v${0.8 * r}h${0.8 * r}v${0.8 * r}h${-0.8 * r}v${0.8 * r}h${-0.8 * r}v${-0.8 * r}h${-0.8 * r}v${-0.8 * r}h${0.8 * r}z`,
];
const DASHES = ["", "7 4", "2 3", "10 3 2 3", "4 2", "1 5"];

function shape(k, r, attributes = {}) {
  return draw("path", { d: SHAPES[k % SHAPES.length](r), ...attributes });
}

// The box with details: one a plot, kept inside it.
function tip(host) {
  let box = host.querySelector(":scope > .tip");
  if (!box) host.append((box = make("div", { class: "tip", role: "status", hidden: "" })));
  return {
    show(content, x, y) {
      box.replaceChildren(...content);
      box.hidden = false;
      const { offsetWidth: w, offsetHeight: h } = box;
      const room = host.clientWidth;
      const left = x + 14 + w > room ? x - 14 - w : x + 14;
      box.style.left = `${Math.max(4, Math.min(room - w - 4, left))}px`;
      box.style.top = `${Math.max(4, y - h - 10 < 0 ? y + 16 : y - h - 10)}px`;
    },
    hide() {
      box.hidden = true;
    },
  };
}

const row = (colour, name, value) =>
  make(
    "div",
    { class: "row", style: colour && `--c: var(${colour})` },
    colour ? make("i") : null,
    make("span", {}, name),
    make("b", {}, value),
  );

// Moves along a plot by pointer or arrow keys, from one of `xs` (pixels) to the next.
function scrub({ svg, frame }, xs, label, show, leave) {
  let now = -1;
  const go = (k) => {
    if (!xs.length) return;
    now = Math.max(0, Math.min(xs.length - 1, k));
    show(now);
  };
  const nearest = (event) => {
    const at = event.clientX - svg.getBoundingClientRect().left;
    go(xs.reduce((best, x, k) => (Math.abs(x - at) < Math.abs(xs[best] - at) ? k : best), 0));
  };
  const area = draw("rect", {
    x: frame.left,
    y: frame.top,
    width: frame.right - frame.left,
    height: frame.bottom - frame.top,
    fill: "transparent",
    tabindex: 0,
    role: "img",
    "aria-label": `${label}. Arrow keys move along it.`,
    onpointermove: nearest,
    onpointerdown: nearest,
    onpointerleave: leave,
    onblur: leave,
    onfocus: () => go(now < 0 ? xs.length - 1 : now),
    onkeydown: (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") leave();
      if (!step) return;
      event.preventDefault();
      go(now + step);
    },
  });
  svg.append(area);
}

// Buttons of which one is pressed.
function choice(host, options, current, choose) {
  host.replaceChildren(
    ...options.map(([key, text]) =>
      make(
        "button",
        {
          type: "button",
          "data-key": key,
          "aria-pressed": String(key === current),
          onclick: () => choose(key),
        },
        text,
      ),
    ),
  );
}
