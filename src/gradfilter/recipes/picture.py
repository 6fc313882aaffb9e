"""A comparison as a picture: scores against costs."""

from __future__ import annotations

from pathlib import Path

from gradfilter.recipes.comparison import COSTS, Comparison, Cost, frontier

# Okabe and Ito's colours, which colour-blind readers can tell apart; exact is black
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
SHAPES = ("o", "s", "^", "D", "v", "P", "X")


def draw(found: Comparison, path: str | Path) -> None:
    """Three panels; colour is the method, shape the depth, the line what none beats by both."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.8), dpi=150, layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    for panel, cost in zip(axes, COSTS, strict=False):
        _panel(found, panel, cost)
    axes[0].set_ylabel(f"{found.metric}, %")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.suptitle(_literal(f"{found.about['model']} on {found.about['data']}"), fontsize=10)
    figure.savefig(path)


def _panel(found: Comparison, panel, cost: Cost) -> None:
    titles = list(dict.fromkeys(e.contender.title for e in found.entries if not e.contender.exact))
    depths = list(dict.fromkeys(["all layers", *(e.contender.depth for e in found.entries)]))
    points = []
    for e in found.entries:
        x = cost.of(e.measured)
        if e.mean is None or x is None:
            continue
        c = e.contender
        colour = "black" if c.exact else COLOURS[titles.index(c.title) % len(COLOURS)]
        shape = SHAPES[depths.index(c.depth) % len(SHAPES)]
        points.append((x, 100 * e.mean))
        look = {"fmt": shape, "color": colour, "ms": 6, "capsize": 3, "label": _literal(e.label)}
        panel.errorbar(x, 100 * e.mean, 100 * (e.deviation or 0), **look)
    line = frontier(points)
    look = {"color": "0.6", "lw": 1, "zorder": 0, "drawstyle": "steps-post"}
    panel.plot([x for x, _ in line], [y for _, y in line], **look)
    if points and min(x for x, _ in points) > 0:
        _logarithmic(panel)
    panel.set_xlabel(f"{cost.title}, {cost.unit}")
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)


def _literal(name: str) -> str:
    """A folder's or plan's name as it is: matplotlib takes what is between $ for a formula."""
    return name.replace("$", r"\$")


def _logarithmic(panel) -> None:
    """A logarithmic axis with few, plainly written numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
