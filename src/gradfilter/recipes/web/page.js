// The page around the plots: the answer, switches, tables, commands.

const about = numbers.about, counts = numbers.counts;
const total = counts.done + counts.failed + counts.started + counts.waiting;
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

function head() {
  place("title").textContent = `${about.model} on ${about.data}`;
  const s = about.settings;
  const length = s.steps ? plural(s.steps, "step") : plural(s.epochs, "epoch");
  const runs = [`${counts.done} of ${plural(total, "run")} done`];
  if (counts.failed) runs.push(`${counts.failed} failed`);
  place("facts").textContent = [
    runs.join(", "), plural(about.seeds.length, "seed"), `${length} each`,
    `${about.size} px`, `weights: ${about.weights}`, `${about.train_pictures.toLocaleString("en")} pictures to train on`,
    `${about.test_pictures.toLocaleString("en")} to test`, about.date,
  ].join(" · ");
}

function answer() {
  const verdict = numbers.verdicts.find((v) => v.cost === "kept_bytes");
  const host = place("answer");
  if (!reference) {
    host.textContent = entries.some((e) => e.exact)
      ? "No exact contender has all its runs done: there is nothing to compare with yet."
      : "Exact training is not among the methods: there is nothing to compare with.";
    return;
  }
  const best = byName[verdict.entry], cost = costOf("kept_bytes");
  if (best === reference) {
    host.append("Nothing that keeps less memory came within ", verdict.near, ": ", make("b", {}, label(reference)), ` has ${score(reference)}.`);
    return;
  }
  host.append(
    make("b", {}, label(best)), ` keeps ${amount(best, cost)} for the backward pass where ${label(reference)} keeps ${amount(reference, cost)}: `,
    make("b", {}, `${short(verdict.saving)}× less memory`), `, within ${verdict.near} (${percent(best.mean)} against ${percent(reference.mean)}).`,
  );
}

function caveat() {
  if (!reference) return;
  const seeds = reference.scores.length;
  place("caveat").textContent = seeds > 1
    ? `“Within noise of exact”: the mean over ${seeds} seeds is at most two standard errors of the difference below that of ${label(reference)}, the best exact contender. That does not prove them equal; more seeds, and more test pictures, tell finer differences. Scores are those at the end of training, not the best on the way.`
    : `One seed cannot show how large the noise is: what is within 1 point of ${label(reference)}, the best exact contender, counts as near. Use several seeds before you rely on it.`;
}

function cards() {
  place("cards-head").textContent = numbers.verdicts.length ? `Cheapest within ${numbers.verdicts[0].near}` : "";
  place("cards").replaceChildren(...numbers.verdicts.map((v) => {
    const e = byName[v.entry], cost = costOf(v.cost);
    const same = e === reference;
    return make("button", {
      type: "button", style: tint(e), "data-key": v.cost, "aria-pressed": String(state.cost === v.cost),
      onclick: () => { state.cost = v.cost; state.chosen = v.entry; update(); focusOn("cards", v.cost); },
    },
    make("small", {}, `Least ${cost.title}`), make("strong", {}, amount(e, cost)), make("span", {}, label(e)),
    make("small", {}, same ? "the reference itself: nothing cheaper is as good"
      : `${short(v.saving)}× less than ${label(reference)}; ${points(v.difference)}, noise ${(100 * v.noise).toFixed(1)}`));
  }));
}

// What the dotted line stands for.
function key() {
  place("reference").hidden = !reference;
  if (reference) place("reference").append(`the best exact contender: ${label(reference)}`);
}

function failures() {
  const found = new Map(); // contender and reason -> seeds
  for (const e of entries)
    for (const r of e.runs.filter((run) => run.status === "failed")) {
      const key = `${label(e)}\n${r.failure}`;
      found.set(key, [...(found.get(key) || []), r.seed]);
    }
  if (!found.size) return;
  place("failures").append(make("details", { open: "" },
    make("summary", { class: "bad" }, `${plural(counts.failed, "run")} failed`),
    ...[...found].map(([key, seeds]) => {
      const [name, reason] = key.split("\n");
      return make("p", { class: "note" }, `${name}, seed${seeds.length > 1 ? "s" : ""} ${seeds.join(", ")}: ${reason}`);
    })));
}

function legend(id, list, hidden, icon) {
  place(id).replaceChildren(...list.map((name) => make("button", {
    type: "button", "data-key": name, "aria-pressed": String(!hidden.has(name)),
    onclick: () => { if (!hidden.delete(name)) hidden.add(name); update(); focusOn(id, name); },
  }, icon(name), name)));
}

// Buttons are drawn anew by what they do: the keyboard stays where it was.
const focusOn = (id, key) => place(id).querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus();
const icon = (...parts) => draw("svg", { viewBox: "-8 -8 16 16", "aria-hidden": "true" }, ...parts);

function legends() {
  const swatch = (t) => icon(draw("circle", { r: 6, style: `fill: var(${colour(entries.find((e) => e.title === t))})` }));
  const form = (d) => icon(shape(shapes.indexOf(d), 5, { fill: "currentColor" }));
  const stroke = (d) => icon(draw("line", { x1: -8, x2: 8, stroke: "currentColor", "stroke-width": 2, "stroke-dasharray": DASHES[shapes.indexOf(d) % DASHES.length] }));
  for (const id of ["methods", "methods2"]) legend(id, titles, state.hiddenTitles, swatch);
  legend("depths", depths, state.hiddenDepths, form);
  legend("depths2", depths, state.hiddenDepths, stroke);
}

function switches() {
  const measured = numbers.costs.filter((c) => entries.some((e) => known(e.costs[c.key])));
  const set = (host, options, key) => choice(place(host), options, state[key], (value) => { state[key] = value; update(); focusOn(host, value); });
  set("cost", measured.map((c) => [c.key, c.title.replace("backward ", "")]), "cost");
  set("zoom", reference ? [["all", "all scores"], ["near", "near exact"]] : [], "zoom");
  place("zoom").hidden = !reference;
  set("measure", MEASURES, "measure");
  set("time", [["epoch", "epochs"], ["seconds", "seconds"]], "time");
  set("quantity", QUANTITIES, "quantity");
}

const COLUMNS = [
  ["title", "method", (e) => label(e), (e) => [make("i"), label(e)]],
  ["mean", metricTitle, (e) => e.mean, (e) => score(e)],
  ["difference", "against exact", (e) => gap(e), (e) => (e === reference ? "reference" : known(gap(e)) ? points(gap(e)) : "–")],
  ...numbers.costs.map((c) => [c.key, `${c.title}, ${c.unit}`, (e) => e.costs[c.key], (e) => short(e.costs[c.key])]),
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
    make("tbody", {}, entries.filter(shown).sort(order).map((e) => make("tr", {
      class: e.name === state.chosen ? "chosen" : null, style: tint(e), onclick: () => choose(e.name),
    }, COLUMNS.map(([, , , text]) => make("td", {}, text(e)))))),
  );
}

function heading([key, text]) {
  const now = state.sort === key;
  return make("th", { scope: "col", "aria-sort": now ? (state.falling ? "descending" : "ascending") : null },
    make("button", {
      type: "button", "data-key": key, onclick: () => {
        state.falling = now ? !state.falling : key === "mean" || key === "difference" || key === "runs";
        state.sort = key;
        table();
        focusOn("table", key);
      },
    }, text + (now ? (state.falling ? " ↓" : " ↑") : "")));
}

function choose(name) {
  state.chosen = state.chosen === name ? null : name;
  if (state.chosen) state.entry = name;
  update();
  document.querySelector(`.point[data-name="${CSS.escape(name)}"]`)?.focus({ preventScroll: true });
}

function detail() {
  const host = place("detail"), e = byName[state.chosen];
  host.replaceChildren();
  if (!e) return;
  host.setAttribute("style", tint(e));
  const seeds = e.runs.map((r) => `seed ${r.seed}: ${r.status === "done" ? percent(r.rows[r.rows.length - 1][`test_${numbers.metric}`]) : r.status}`);
  const gradient = e.measured.gradient;
  host.append(
    make("b", {}, label(e)), ` · ${score(e)} · ${seeds.join(", ")}`, make("br"),
    numbers.costs.map((c) => `${c.title} ${amount(e, c)}`).join(" · "),
    gradient ? ` · gradient cosine ${short(gradient.cosine)} before training` : "",
  );
}

function copyButton(text) {
  const button = make("button", { type: "button", class: "quiet", "aria-label": `Copy: ${text}` }, "Copy");
  button.addEventListener("click", async () => {
    let done = true;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      done = copyBySelection(text);
    }
    button.textContent = done ? "Copied" : "Select it";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

// Where the clipboard is closed to pages from a file.
function copyBySelection(text) {
  const area = make("textarea", { class: "hidden" });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

const command = (text) => make("div", { class: "command" }, make("pre", {}, text), copyButton(text));
const pairs = (found) => Object.entries(found).flatMap(([key, value]) => [
  make("dt", {}, key.replaceAll("_", " ")), make("dd", {}, value === null ? "–" : Array.isArray(value) ? value.join(", ") : String(value)),
]);

function made() {
  place("command").parentElement.replaceWith(command(numbers.command));
  const m = entries[0].measured;
  const notes = [
    `Costs are of one training step of ${m.pictures} pictures. Time is the median of steps that took turns, one of each contender after the other. Kept memory is what autograd holds from the forward to the backward pass, as measured; peak memory is over the weights, gradients included. Multiply-adds are counted, layer by layer.`,
    "Every run is one of gradfilter train in a folder of its own, beside this page. A score is taken on the test pictures at the end of training.",
    ...numbers.notes,
  ];
  place("method-notes").append(...notes.map((n) => make("p", { class: "note" }, n)));
  place("runs").append(...entries.flatMap((e) => e.runs.map((r) => make("div", { class: "run" },
    make("span", { class: r.status === "failed" ? "bad" : null }, `${label(e)}, seed ${r.seed}: ${r.status}`), command(r.command)))));
  place("settings").append(...pairs(about.settings));
  place("versions").append(...pairs(numbers.environment));
}

const THEMES = ["auto", "light", "dark"];

function theme() {
  const root = document.documentElement, button = place("theme");
  let now = "auto";
  try { now = localStorage.getItem("theme") || now; } catch { /* pages from a file may have no storage */ }
  const set = (name) => {
    now = THEMES.includes(name) ? name : "auto";
    if (now === "auto") delete root.dataset.theme;
    else root.dataset.theme = now;
    button.textContent = { auto: "◐ Auto", light: "☀ Light", dark: "☾ Dark" }[now];
    button.setAttribute("aria-label", `Colours: ${now}. Press to change.`);
  };
  set(now);
  button.addEventListener("click", () => {
    set(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
    try { localStorage.setItem("theme", now); } catch { /* see above */ }
  });
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
place("entry").addEventListener("change", (event) => { state.entry = event.target.value; drawLayers(); });
place("log").addEventListener("change", (event) => { state.log = event.target.checked; drawPareto(); });
place("layers-all").addEventListener("toggle", () => fillLayers(byName[state.entry]));
update();
let wide = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth !== wide) plots(); // a phone's bars come and go and change the height alone
  wide = window.innerWidth;
});
