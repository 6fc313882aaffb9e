// Learning curves: one line a contender, the mean over its seeds.

const MEASURES = [
  [`test_${numbers.metric}`, `test ${metricTitle}`],
  ["test_loss", "test loss"],
  ["train_loss", "training loss"],
];

// What all runs that got so far say at each evaluation.
function curve(e) {
  const runs = e.runs.map((r) => r.rows).filter((rows) => rows.length);
  const most = Math.max(0, ...runs.map((rows) => rows.length));
  const found = [];
  for (let k = 0; k < most; k++) {
    const here = runs.map((rows) => rows[k]).filter((r) => r && known(r[state.measure]));
    if (!here.length) continue;
    const values = here.map((r) => r[state.measure]);
    const mean = (list) => list.reduce((a, b) => a + b, 0) / list.length;
    found.push({
      x: mean(here.map((r) => r[state.time])),
      y: mean(values),
      low: Math.min(...values),
      high: Math.max(...values),
      epoch: here[0].epoch,
    });
  }
  return found;
}

function drawCurves() {
  const host = place("curves"),
    box = tip(host);
  box.hide();
  const lines = entries
    .filter(shown)
    .map((e) => ({ e, dots: curve(e) }))
    .filter((l) => l.dots.length);
  const name = MEASURES.find(([key]) => key === state.measure)[1];
  const share = state.measure === `test_${numbers.metric}`;
  const paper = canvas(host, `${name} over the training`);
  const { svg, frame } = paper;
  if (!lines.length)
    return nothing(
      paper,
      entries.some(shown)
        ? "no run has begun yet"
        : "nothing is shown: choose a method and a depth",
    );
  const dots = lines.flatMap((l) => l.dots);
  const low = Math.min(...dots.map((d) => d.low)),
    high = Math.max(...dots.map((d) => d.high));
  const pad = (high - low) * 0.08 || 0.01;
  const y = scale(Math.max(0, low - pad), high + pad, frame.bottom - 4, frame.top + 16);
  const x = scale(0, Math.max(...dots.map((d) => d.x)) || 1, frame.left + 6, frame.right - 8);
  axes(paper, x, y, {
    xTitle: state.time === "epoch" ? "epochs" : "seconds of training steps",
    yTitle: share ? `${name}, %` : name,
    yText: (v) => tickText(share ? 100 * v : v),
  });
  for (const l of lines) drawLine(svg, l, x, y);
  follow(paper, host, box, lines, x, share, name);
}

function drawLine(svg, { e, dots }, x, y) {
  const group = draw("g", { style: tint(e), "data-curve": e.name });
  const along = (pick) => dots.map((d) => `${x(d.x)},${y(pick(d))}`);
  group.append(
    draw("polygon", {
      class: "band",
      points: [...along((d) => d.high), ...along((d) => d.low).reverse()].join(" "),
    }),
  );
  group.append(
    draw("polyline", {
      class: "curve",
      points: along((d) => d.y).join(" "),
      "stroke-dasharray": DASHES[shapeOf(e) % DASHES.length],
    }),
  );
  const end = dots[dots.length - 1];
  const failed = e.runs.some((r) => r.status === "failed");
  const mark = failed
    ? draw("g", { class: "point" }, cross())
    : shape(shapeOf(e), 4.5, { class: "dot" });
  mark.setAttribute("transform", `translate(${x(end.x)},${y(end.y)})`);
  group.append(mark);
  svg.append(group);
}

// The values of all lines at the evaluation that is nearest to the pointer.
function follow(paper, host, box, lines, x, share, name) {
  const { svg, frame } = paper;
  const longest = lines.reduce((a, b) => (b.dots.length > a.dots.length ? b : a)).dots;
  const xs = longest.map((d) => x(d.x));
  const hair = draw("line", {
    class: "hair",
    y1: frame.top,
    y2: frame.bottom,
    visibility: "hidden",
  });
  svg.append(hair);
  const value = (d) => (share ? percent(d.y) : short(d.y));
  const show = (k) => {
    hair.setAttribute("x1", xs[k]);
    hair.setAttribute("x2", xs[k]);
    hair.setAttribute("visibility", "visible");
    const here = lines.filter((l) => l.dots[k]).sort((a, b) => b.dots[k].y - a.dots[k].y);
    const head = k === 0 ? "before training" : `epoch ${tickText(longest[k].epoch)}`;
    box.show(
      [make("b", {}, head), ...here.map((l) => row(colour(l.e), label(l.e), value(l.dots[k])))],
      xs[k],
      frame.top + 60,
    );
  };
  const leave = () => {
    hair.setAttribute("visibility", "hidden");
    box.hide();
  };
  scrub(paper, xs, `${name} of ${lines.length} contenders`, show, leave);
}
