// How the comparison was made: commands, settings, versions; and the switch of colours.

function copyButton(text) {
  const button = make(
    "button",
    { type: "button", class: "quiet", "aria-label": `Copy: ${text}` },
    "Copy",
  );
  button.addEventListener("click", async () => {
    let done = true;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      done = copyBySelection(text);
    }
    button.textContent = done ? "Copied" : "Select it";
    setTimeout(() => {
      button.textContent = "Copy";
    }, 1500);
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

const command = (text) =>
  make("div", { class: "command" }, make("pre", {}, text), copyButton(text));
const pairs = (found) =>
  Object.entries(found).flatMap(([key, value]) => [
    make("dt", {}, key.replaceAll("_", " ")),
    make("dd", {}, value === null ? "–" : Array.isArray(value) ? value.join(", ") : String(value)),
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
  place("runs").append(
    ...entries.flatMap((e) =>
      e.runs.map((r) =>
        make(
          "div",
          { class: "run" },
          make(
            "span",
            { class: r.status === "failed" ? "bad" : null },
            `${label(e)}, seed ${r.seed}: ${r.status}`,
          ),
          command(r.command),
        ),
      ),
    ),
  );
  place("settings").append(...pairs(about.settings));
  place("versions").append(...pairs(numbers.environment));
}

const THEMES = ["auto", "light", "dark"];

function theme() {
  const root = document.documentElement,
    button = place("theme");
  let now = "auto";
  try {
    now = localStorage.getItem("theme") || now;
  } catch {
    /* pages from a file may have no storage */
  }
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
    try {
      localStorage.setItem("theme", now);
    } catch {
      /* see above */
    }
  });
}
