// Cost and gradient quality of one contender, from the first layer to the last.

const QUANTITIES = [
  ["kept_bytes", "kept memory"],
  ["backward_macs", "multiply-adds"],
  ["cosine", "gradient cosine"],
  ["snr_db", "gradient SNR"],
];
const EXACT_DB = 50; // from here on the difference is rounding

const judged = (e) => e.measured.gradient !== null;
const exactAt = (e) => entries.find((other) => other.exact && other.last === e.last);

// The unit of a bar: what the highest of these contenders is told well in.
function unitOf(found) {
  if (state.quantity === "backward_macs") return ["million", 1e6];
  const most = Math.max(
    ...found.flatMap((e) => e.measured.layers).map((l) => l.kept_bytes + l.beside_bytes),
  );
  return most < 2 ** 21 ? ["KiB", 1024] : ["MiB", 2 ** 20];
}

function heights(e, size) {
  const kept = state.quantity === "kept_bytes";
  return e.measured.layers.map((l) => ({
    name: l.name,
    own: (kept ? l.kept_bytes : l.backward_macs) / size,
    beside: kept ? l.beside_bytes / size : 0,
  }));
}

function drawLayers() {
  const e = byName[state.entry],
    host = place("layers"),
    box = tip(host);
  box.hide();
  place("layers-note").textContent = layersNote(e);
  if (state.quantity === "kept_bytes" || state.quantity === "backward_macs") drawBars(e, host, box);
  else drawQuality(e, host, box);
  fillLayers(e);
}

const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}.`;

function layersNote(e) {
  const exact = exactAt(e);
  const ghost = exact && exact !== e ? ` The outline is ${label(exact)}.` : "";
  if (state.quantity === "kept_bytes")
    return `Solid: the layer's input as it is kept for the backward pass; pale: what norms and activations behind it keep. “(elsewhere)” is what belongs to no single layer.${ghost}`;
  if (state.quantity === "backward_macs")
    return `Multiply-adds of the backward pass as counted layer by layer, in millions for ${e.measured.pictures} pictures.${ghost}`;
  if (!judged(e)) return "All gradients of this contender are exact: there is nothing to compare.";
  return `Gradients of ${e.measured.judged} training pictures against the exact ones, before training. Filled: of the weight; hollow: of the input, pixel by pixel. All weights together: cosine ${short(e.measured.gradient.cosine)}. ${e.measured.notes.map(sentence).join(" ")}`;
}

function layerAxis({ frame }, count) {
  const x = scale(0, count, frame.left + 4, frame.right - 4);
  const every = Math.max(1, Math.ceil(count / Math.max(3, (frame.right - frame.left) / 55)));
  const ticks = [];
  for (let k = 0; k < count; k += every) ticks.push(k + 0.5);
  return { x, xTicks: ticks, xText: (v) => String(Math.round(v + 0.5)) };
}

function drawBars(e, host, box) {
  const exact = exactAt(e);
  const kept = state.quantity === "kept_bytes";
  const [unit, size] = unitOf(exact ? [e, exact] : [e]);
  const bars = heights(e, size);
  const ghosts = exact && exact !== e ? heights(exact, size) : [];
  const paper = canvas(host, "cost by layer", { height: 0.36, least: 240, most: 360 });
  const { svg, frame } = paper;
  const high = Math.max(...[...bars, ...ghosts].map((b) => b.own + b.beside)) || 1;
  const y = scale(0, high * 1.08, frame.bottom, frame.top + 16);
  const axis = layerAxis(paper, bars.length),
    { x } = axis;
  axes(paper, x, y, {
    xTitle: "layer, from the input to the loss",
    yTitle: `${kept ? "kept" : "backward multiply-adds"}, ${unit}`,
    ...axis,
  });
  const wide = x(1) - x(0),
    gap = wide > 6 ? 1 : 0.3;
  const group = draw("g", { style: tint(e) });
  bars.forEach((b, k) => {
    const at = { x: x(k) + gap, width: Math.max(0.6, wide - 2 * gap) };
    group.append(
      draw("rect", {
        class: "bar",
        "data-layer": b.name,
        ...at,
        y: y(b.own),
        height: y(0) - y(b.own),
      }),
    );
    if (b.beside)
      group.append(
        draw("rect", {
          class: "bar beside",
          ...at,
          y: y(b.own + b.beside),
          height: y(b.own) - y(b.own + b.beside),
        }),
      );
  });
  svg.append(group);
  if (ghosts.length) svg.append(draw("path", { class: "ghost", d: outline(ghosts, x, y) }));
  inspect(paper, box, bars, x, (k) => {
    const b = bars[k],
      g = ghosts.find((other) => other.name === b.name);
    return [
      make("b", {}, b.name),
      row(null, e.measured.layers[k].method || "norms, activations", ""),
      row(colour(e), e.title, `${short(b.own + b.beside)} ${unit}`),
      ...(g ? [row("--m0", "exact", `${short(g.own + g.beside)} ${unit}`)] : []),
    ];
  });
}

function outline(bars, x, y) {
  return bars.map((b, k) => `${k ? "L" : "M"}${x(k)},${y(b.own + b.beside)}H${x(k + 1)}`).join("");
}

function drawQuality(e, host, box) {
  const paper = canvas(host, "gradient quality by layer", { height: 0.36, least: 240, most: 360 });
  const { svg, frame } = paper;
  if (!judged(e)) return nothing(paper, "exact gradients: nothing to compare");
  const layers = e.measured.layers.filter((l) => l.weight || l.input);
  const key = state.quantity,
    cap = key === "cosine" ? 1 : EXACT_DB;
  const value = (m) => (m && m[key] !== null ? Math.min(cap, numeric(m[key])) : null);
  const found = layers.flatMap((l) => [value(l.weight), value(l.input)]).filter(known);
  const y = scale(Math.min(0, ...found), cap * 1.04, frame.bottom - 4, frame.top + 18);
  const axis = layerAxis(paper, layers.length),
    { x } = axis;
  axes(paper, x, y, {
    xTitle: "layer, from the input to the loss",
    yTitle:
      key === "cosine"
        ? "cosine with the exact gradient"
        : `SNR, dB (${EXACT_DB} or more: rounding)`,
    ...axis,
  });
  const group = draw("g", { class: "point", style: tint(e) });
  const places = layers.map((l, k) => [l, x(k + 0.5)]);
  const path = places
    .filter(([l]) => known(value(l.weight)))
    .map(([l, at]) => `${at},${y(value(l.weight))}`);
  group.append(draw("polyline", { class: "curve", points: path.join(" "), opacity: 0.5 }));
  for (const [l, at] of places) {
    const w = value(l.weight),
      i = value(l.input);
    if (known(i))
      group.append(draw("circle", { class: "open", cx: at, cy: y(i), r: 3, "stroke-width": 1.5 }));
    if (known(w))
      group.append(
        draw("circle", { class: "dot", "data-layer": l.name, cx: at, cy: y(w), r: 3.5 }),
      );
  }
  svg.append(group);
  const told = (m) => (m ? `${short(numeric(m.cosine))} · ${short(numeric(m.snr_db))} dB` : "–");
  inspect(paper, box, layers, x, (k) => [
    make("b", {}, layers[k].name),
    row(null, layers[k].method, ""),
    row(null, "weight: cosine · SNR", told(layers[k].weight)),
    row(null, "input: cosine · SNR", told(layers[k].input)),
  ]);
}

function inspect(paper, box, list, x, content) {
  const { svg, frame } = paper;
  const hair = draw("line", {
    class: "hair",
    y1: frame.top,
    y2: frame.bottom,
    visibility: "hidden",
  });
  svg.append(hair);
  const show = (k) => {
    const at = x(k + 0.5);
    hair.setAttribute("x1", at);
    hair.setAttribute("x2", at);
    hair.setAttribute("visibility", "visible");
    box.show(content(k), at, frame.top + 60);
  };
  const leave = () => {
    hair.setAttribute("visibility", "hidden");
    box.hide();
  };
  scrub(
    paper,
    list.map((_, k) => x(k + 0.5)),
    `${list.length} layers`,
    show,
    leave,
  );
}

function fillLayers(e) {
  if (!place("layers-all").open) return;
  const head = [
    "layer",
    "method",
    "kept, KiB",
    "beside, KiB",
    "backward, million",
    "gW cosine",
    "gW SNR, dB",
    "gx cosine",
  ];
  const cell = (m, key) => (m ? minus(short(numeric(m[key]))) : "–");
  place("layers-table").replaceChildren(
    make(
      "thead",
      {},
      make(
        "tr",
        {},
        head.map((h) => make("th", { scope: "col" }, h)),
      ),
    ),
    make(
      "tbody",
      {},
      e.measured.layers.map((l) =>
        make(
          "tr",
          {},
          [
            l.name,
            l.trained ? l.method || l.kind : "frozen",
            short(l.kept_bytes / 1024),
            short(l.beside_bytes / 1024),
            short(l.backward_macs / 1e6),
            cell(l.weight, "cosine"),
            cell(l.weight, "snr_db"),
            cell(l.input, "cosine"),
          ].map((text) => make("td", {}, text)),
        ),
      ),
    ),
  );
}
