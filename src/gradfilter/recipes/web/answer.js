// The answer in words: what is cheapest within noise of exact, and what failed.

const about = numbers.about,
  counts = numbers.counts;
const seeds = about.seeds.length;
const total = counts.done + counts.failed + counts.started + counts.waiting;
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

function head() {
  place("title").textContent = `${about.model} on ${about.data}`;
  const s = about.settings;
  const length = s.steps ? plural(s.steps, "step") : plural(s.epochs, "epoch");
  const runs = [`${counts.done} of ${plural(total, "run")} done`];
  if (counts.failed) runs.push(`${counts.failed} failed`);
  place("facts").textContent = [
    runs.join(", "),
    plural(seeds, "seed"),
    `${length} each`,
    `${about.size} px`,
    `weights: ${about.weights.split("/").pop()}`, // of a file, its name
    `${about.train_pictures.toLocaleString("en")} pictures to train on`,
    `${about.test_pictures.toLocaleString("en")} to test`,
    about.date,
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
  const best = byName[verdict.entry],
    cost = costOf("kept_bytes");
  if (best === reference) {
    host.append(
      "Nothing that keeps less memory came within ",
      numbers.near,
      ": ",
      make("b", {}, label(reference)),
      ` has ${score(reference)}.`,
    );
    return;
  }
  host.append(
    make("b", {}, label(best)),
    ` keeps ${amount(best, cost)} for the backward pass where ${label(reference)} keeps ${amount(reference, cost)}: `,
    make("b", {}, `${short(verdict.saving)}× less memory`),
    `, within ${numbers.near} (${percent(best.mean)} against ${percent(reference.mean)}).`,
  );
}

function caveat() {
  if (!reference) return;
  place("caveat").textContent =
    seeds > 1
      ? `“Within noise of exact”: the mean over ${seeds} seeds is at most two standard errors of the difference below that of ${label(reference)}, the best exact contender. That does not prove them equal; more seeds, and more test pictures, tell finer differences. Scores are those at the end of training, not the best on the way.`
      : `One seed cannot show how large the noise is: what is within 1 point of ${label(reference)}, the best exact contender, counts as near. Use several seeds before you rely on it.`;
}

function cards() {
  place("cards-head").textContent = numbers.verdicts.length
    ? `Cheapest within ${numbers.near}`
    : "";
  place("cards").replaceChildren(
    ...numbers.verdicts.map((v) => {
      const e = byName[v.entry],
        cost = costOf(v.cost);
      const same = e === reference;
      return make(
        "button",
        {
          type: "button",
          style: tint(e),
          "data-key": v.cost,
          "aria-pressed": String(state.cost === v.cost),
          onclick: () => {
            state.cost = v.cost;
            state.chosen = v.entry;
            update();
            focusOn("cards", v.cost);
          },
        },
        make("small", {}, `Least ${cost.title}`),
        make("strong", {}, amount(e, cost)),
        make("span", {}, label(e)),
        make(
          "small",
          {},
          same
            ? "the reference itself: nothing cheaper is as good"
            : `${short(v.saving)}× less than ${label(reference)}; ${points(v.difference)}${seeds > 1 ? `, noise ${(100 * v.noise).toFixed(1)}` : ""}`,
        ),
      );
    }),
  );
}

// What rings and the dotted line stand for.
function key() {
  place("near").append(`within ${numbers.near}`);
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
  place("failures").append(
    make(
      "details",
      { open: "" },
      make("summary", { class: "bad" }, `${plural(counts.failed, "run")} failed`),
      ...[...found].map(([key, seeds]) => {
        const [name, reason] = key.split("\n");
        return make(
          "p",
          { class: "note" },
          `${name}, seed${seeds.length > 1 ? "s" : ""} ${seeds.join(", ")}: ${reason}`,
        );
      }),
    ),
  );
}
