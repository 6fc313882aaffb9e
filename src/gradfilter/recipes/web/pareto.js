// Scores against a cost: one point a contender.

const entries = numbers.entries;
const titles = [...new Set(entries.map((e) => e.title))];
const others = titles.filter((t) => !entries.some((e) => e.title === t && e.exact));
const depths = [...new Set(entries.map((e) => e.depth))];
const shapes = ["all layers", ...depths.filter((d) => d !== "all layers")];
const byName = Object.fromEntries(entries.map((e) => [e.name, e]));
const reference = byName[numbers.reference] || null;

const colour = (e) => (e.exact ? "--m0" : `--m${1 + (others.indexOf(e.title) % 7)}`);
const tint = (e) => `--c: var(${colour(e)})`;
const shapeOf = (e) => shapes.indexOf(e.depth);
const label = (e) => `${e.title}, ${e.depth}`;
const costOf = (key) => numbers.costs.find((c) => c.key === key);
const score = (e) =>
  percent(e.mean) + (known(e.deviation) ? ` ± ${(100 * e.deviation).toFixed(1)}` : "");
const amount = (e, cost) =>
  known(e.costs[cost.key]) ? `${short(e.costs[cost.key])} ${cost.unit}` : "not measured";

// Where some contenders fail to learn, the others are told apart only without them.
const NEAR = 0.1; // below exact
const scores = entries.map((e) => e.mean).filter(known);
const apart =
  reference &&
  reference.mean - Math.min(...scores) > 2 * NEAR &&
  scores.filter((v) => v > reference.mean - NEAR).length > 2;

const state = {
  cost: "kept_bytes",
  zoom: apart ? "near" : "all",
  log: true,
  chosen: null,
  hiddenTitles: new Set(),
  hiddenDepths: new Set(),
  measure: `test_${numbers.metric}`,
  time: "epoch",
  entry: (entries.find((e) => !e.exact) || entries[0]).name,
  quantity: "kept_bytes",
  sort: "mean",
  falling: true,
};
const shown = (e) => !state.hiddenTitles.has(e.title) && !state.hiddenDepths.has(e.depth);

// Of points that no other beats by cost and score, from cheap to dear.
function frontier(found) {
  const best = [];
  for (const p of [...found].sort((a, b) => a.x - b.x || b.y - a.y))
    if (!best.length || p.y > best[best.length - 1].y) best.push(p);
  return best;
}

function scoreRange(visible) {
  const ends = visible.flatMap((e) => [e.mean - (e.deviation || 0), e.mean + (e.deviation || 0)]);
  let low = Math.min(...ends),
    high = Math.max(...ends);
  if (state.zoom === "near" && reference) low = Math.max(low, reference.mean - NEAR);
  const pad = Math.max(0.01, (high - low) * 0.12);
  return [Math.max(0, low - pad), Math.min(1.004, high + pad)];
}

function costRange(visible, cost) {
  const values = visible.map((e) => e.costs[cost.key]);
  if (cost.key === "seconds") values.push(inferenceTime());
  const low = Math.min(...values),
    high = Math.max(...values);
  if (state.log && low > 0) return [low / 1.25, high * 1.25];
  return [0, high * 1.08];
}

const inferenceTime = () => numbers.inference.median / costOf("seconds").scale;

function details(e, cost) {
  const failed = e.runs.filter((r) => r.status === "failed").length;
  const lines = [
    make("b", {}, label(e)),
    row(null, metricTitle, score(e)),
    row(null, cost.title, amount(e, cost)),
  ];
  if (reference && e !== reference && known(e.mean))
    lines.push(row(null, `against ${label(reference)}`, points(e.mean - reference.mean)));
  if (known(e.mean)) lines.push(row(null, `runs done`, `${e.scores.length} of ${e.runs.length}`));
  if (failed)
    lines.push(make("div", { class: "bad" }, `${failed} of ${e.runs.length} runs failed`));
  return lines;
}

function spoken(e, cost) {
  const told = known(e.mean) ? score(e) : "no run came to its end";
  return `${label(e)}: ${told}, ${cost.title} ${amount(e, cost)}${e.within_noise ? `, within ${numbers.near}` : ""}`;
}

function drawPareto() {
  const host = place("pareto"),
    cost = costOf(state.cost),
    box = tip(host);
  box.hide();
  const priced = entries.filter((e) => shown(e) && known(e.costs[cost.key]));
  const visible = priced.filter((e) => known(e.mean));
  const paper = canvas(host, `${metricTitle} against ${cost.title}`);
  const { svg, frame } = paper;
  if (!priced.length)
    return nothing(
      paper,
      entries.some(shown)
        ? "not measured on this machine"
        : "nothing is shown: choose a method and a depth",
    );
  if (!visible.length) nothing(paper, "no run is done yet");
  const [low, high] = visible.length ? scoreRange(visible) : [0, 1];
  const range = costRange(priced, cost);
  const x = scale(...range, frame.left + 8, frame.right - 8, state.log && range[0] > 0);
  const y = scale(low, high, frame.bottom - 8, frame.top + 16);
  axes(paper, x, y, {
    xTitle: `${cost.title}, ${cost.unit}${cost.key === "backward_macs" ? "s" : ""} of a step of ${priced[0].measured.pictures} pictures`,
    yTitle: `${metricTitle}, %`,
    yText: (v) => tickText(100 * v),
  });
  drawGuides(paper, x, y, cost);
  const steps = frontier(visible.map((e) => ({ x: e.costs[cost.key], y: e.mean }))).map(
    (p, k) => `${k ? "H" : "M"}${x(p.x)}${k ? "V" : ","}${Math.min(y(p.y), frame.bottom)}`,
  );
  svg.append(draw("path", { class: "frontier", d: steps.join("") }));
  for (const e of priced) svg.append(point(e, cost, x, y, frame, box));
}

function nothing({ svg, width, tall }, text) {
  svg.append(draw("text", { x: width / 2, y: tall / 2, "text-anchor": "middle" }, text));
}

function drawGuides({ svg, frame }, x, y, cost) {
  if (reference && shown(reference)) {
    const at = y(reference.mean);
    svg.append(
      draw("line", { class: "reference", x1: frame.left, x2: frame.right, y1: at, y2: at }),
    );
  }
  if (cost.key !== "seconds") return;
  const at = x(inferenceTime());
  svg.append(draw("line", { class: "reference", x1: at, x2: at, y1: frame.top, y2: frame.bottom }));
  svg.append(draw("text", { x: at + 5, y: frame.top + 26 }, "inference"));
}

function point(e, cost, x, y, frame, box) {
  const failed = !known(e.mean);
  const below = !failed && e.mean < y.low;
  const px = x(e.costs[cost.key]),
    py = failed || below ? frame.bottom - 4 : y(e.mean);
  const show = () => box.show(details(e, cost), px, py);
  const group = draw("g", {
    class: "point",
    style: tint(e),
    transform: `translate(${px},${py})`,
    tabindex: 0,
    role: "button",
    "data-name": e.name,
    "aria-label": spoken(e, cost),
    "aria-pressed": String(state.chosen === e.name),
    onpointerenter: show,
    onpointerleave: box.hide,
    onfocus: show,
    onblur: box.hide,
    onclick: () => choose(e.name),
    onkeydown: (event) => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        choose(e.name);
      }
      if (event.key === "Escape") box.hide();
    },
  });
  if (failed) {
    const waiting = !e.runs.some((r) => r.status === "failed");
    group.append(waiting ? shape(shapeOf(e), 5, { class: "open", opacity: 0.5 }) : cross());
  } else {
    if (known(e.deviation) && !below) group.append(...whisker(e, y, py, frame));
    if (e.within_noise) group.append(draw("circle", { class: "ring", r: 11 }));
    group.append(...(below ? outside(e) : [shape(shapeOf(e), 6.5, { class: "mark" })]));
  }
  group.append(draw("circle", { class: "target", r: 16 }));
  return group;
}

// An arrow to where the point would be, below the frame.
const outside = (e) => [
  draw("path", { class: "open", d: "M-5,-6L0,1L5,-6M0,1V-14" }),
  draw("text", { y: -19, "text-anchor": "middle" }, percent(e.mean)),
];

const cross = () => draw("path", { class: "open", d: "M-5,-5L5,5M-5,5L5,-5" });

function whisker(e, y, py, frame) {
  const top = y(e.mean + e.deviation) - py;
  const bottom = Math.min(y(e.mean - e.deviation), frame.bottom) - py;
  return [
    draw("line", { class: "whisker", y1: top, y2: bottom }),
    draw("line", { class: "whisker", x1: -4, x2: 4, y1: top, y2: top }),
    draw("line", { class: "whisker", x1: -4, x2: 4, y1: bottom, y2: bottom }),
  ];
}
