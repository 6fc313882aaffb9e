// The controls, the table, and the start of it all.

function legend(id, list, hidden, icon) {
  place(id).replaceChildren(
    ...list.map((name) =>
      make(
        "button",
        {
          type: "button",
          "data-key": name,
          "aria-pressed": String(!hidden.has(name)),
          onclick: () => {
            if (!hidden.delete(name)) hidden.add(name);
            update();
            focusOn(id, name);
          },
        },
        icon(name),
        name,
      ),
    ),
  );
}

// Buttons are drawn anew by what they do: the keyboard stays where it was.
const focusOn = (id, key) =>
  place(id)
    .querySelector(`[data-key="${CSS.escape(key)}"]`)
    ?.focus();
const icon = (...parts) => draw("svg", { viewBox: "-8 -8 16 16", "aria-hidden": "true" }, ...parts);

function legends() {
  const swatch = (t) =>
    icon(
      draw("circle", { r: 6, style: `fill: var(${colour(entries.find((e) => e.title === t))})` }),
    );
  const form = (d) => icon(shape(shapes.indexOf(d), 5, { fill: "currentColor" }));
  const stroke = (d) =>
    icon(
      draw("line", {
        x1: -8,
        x2: 8,
        stroke: "currentColor",
        "stroke-width": 2,
        "stroke-dasharray": DASHES[shapes.indexOf(d) % DASHES.length],
      }),
    );
  for (const id of ["methods", "methods2"]) legend(id, titles, state.hiddenTitles, swatch);
  legend("depths", depths, state.hiddenDepths, form);
  legend("depths2", depths, state.hiddenDepths, stroke);
}

function switches() {
  const measured = numbers.costs.filter((c) => entries.some((e) => known(e.costs[c.key])));
  const set = (host, options, key) =>
    choice(place(host), options, state[key], (value) => {
      state[key] = value;
      update();
      focusOn(host, value);
    });
  set(
    "cost",
    measured.map((c) => [c.key, c.title.replace("backward ", "")]),
    "cost",
  );
  set(
    "zoom",
    reference
      ? [
          ["all", "all scores"],
          ["near", "near exact"],
        ]
      : [],
    "zoom",
  );
  place("zoom").hidden = !reference;
  set("measure", MEASURES, "measure");
  set(
    "time",
    [
      ["epoch", "epochs"],
      ["seconds", "seconds"],
    ],
    "time",
  );
  set("quantity", QUANTITIES, "quantity");
}

const COLUMNS = [
  ["title", "method", (e) => label(e), (e) => [make("i"), label(e)]],
  ["mean", metricTitle, (e) => e.mean, (e) => score(e)],
  [
    "difference",
    "against exact",
    (e) => gap(e),
    (e) => (e === reference ? "reference" : known(gap(e)) ? points(gap(e)) : "–"),
  ],
  ...numbers.costs.map((c) => [
    c.key,
    `${c.title}, ${c.unit}`,
    (e) => e.costs[c.key],
    (e) => short(e.costs[c.key]),
  ]),
  ["runs", "runs done", (e) => e.scores.length, (e) => `${e.scores.length} of ${e.runs.length}`],
];
const gap = (e) => (reference && known(e.mean) ? e.mean - reference.mean : null);

function table() {
  const column = COLUMNS.find(([key]) => key === state.sort);
  const order = (a, b) => {
    const [u, v] = [column[2](a), column[2](b)];
    if (u === null || v === null) return (u === null) - (v === null);
    return (u < v ? -1 : u > v ? 1 : 0) * (state.falling ? -1 : 1);
  };
  place("table").replaceChildren(
    make("thead", {}, make("tr", {}, COLUMNS.map(heading))),
    make(
      "tbody",
      {},
      entries
        .filter(shown)
        .sort(order)
        .map((e) =>
          make(
            "tr",
            {
              class: e.name === state.chosen ? "chosen" : null,
              style: tint(e),
              onclick: () => choose(e.name),
            },
            COLUMNS.map(([, , , text]) => make("td", {}, text(e))),
          ),
        ),
    ),
  );
}

function heading([key, text]) {
  const now = state.sort === key;
  return make(
    "th",
    { scope: "col", "aria-sort": now ? (state.falling ? "descending" : "ascending") : null },
    make(
      "button",
      {
        type: "button",
        "data-key": key,
        onclick: () => {
          state.falling = now
            ? !state.falling
            : key === "mean" || key === "difference" || key === "runs";
          state.sort = key;
          table();
          focusOn("table", key);
        },
      },
      text + (now ? (state.falling ? " ↓" : " ↑") : ""),
    ),
  );
}

function choose(name) {
  state.chosen = state.chosen === name ? null : name;
  if (state.chosen) state.entry = name;
  update();
  document.querySelector(`.point[data-name="${CSS.escape(name)}"]`)?.focus({ preventScroll: true });
}

function detail() {
  const host = place("detail"),
    e = byName[state.chosen];
  host.replaceChildren();
  if (!e) return;
  host.setAttribute("style", tint(e));
  const runs = e.runs.map(
    (r) =>
      `seed ${r.seed}: ${r.status === "done" ? percent(r.rows[r.rows.length - 1][`test_${numbers.metric}`]) : r.status}`,
  );
  const gradient = e.measured.gradient;
  host.append(
    make("b", {}, label(e)),
    ` · ${score(e)} · ${runs.join(", ")}`,
    make("br"),
    numbers.costs.map((c) => `${c.title} ${amount(e, c)}`).join(" · "),
    gradient ? ` · gradient cosine ${short(gradient.cosine)} before training` : "",
  );
}

function plots() {
  drawPareto();
  drawCurves();
  drawLayers();
}

function update() {
  switches();
  legends();
  cards();
  detail();
  table();
  place("entry").value = state.entry;
  plots();
}

head();
answer();
caveat();
key();
failures();
made();
theme();
place("entry").append(...entries.map((e) => make("option", { value: e.name }, label(e))));
place("entry").addEventListener("change", (event) => {
  state.entry = event.target.value;
  drawLayers();
});
place("log").addEventListener("change", (event) => {
  state.log = event.target.checked;
  drawPareto();
});
place("layers-all").addEventListener("toggle", () => fillLayers(byName[state.entry]));
update();
let wide = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth !== wide) plots(); // a phone's bars come and go and change the height alone
  wide = window.innerWidth;
});
