"""Figures of a folder of runs: PDF, SVG or PNG, by the ending; told apart in grey as well."""

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedapps.engines.jobs import Job
from fedapps.results.comparison import compare, order
from fedapps.results.published import SCORES
from fedapps.results.runs import rounds_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROLES = {"train": "training clients", "novel": "novel clients"}
ENDINGS = (".pdf", ".svg", ".png")
# Okabe and Ito's colours in an order in which neighbours differ in grey; every line has dashes and
# a marker of its own as well.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#D55E00")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = "os^Dv*P"


def curves(jobs: Sequence[Job]) -> "Figure":
    """Accuracy by round, the mean over seeds and their range; F1 where nothing else is told."""
    told: dict[str, dict[str, dict[int, list[float]]]] = {role: {} for role in ROLES}
    for job in jobs:
        for report in rounds_of(job):
            numbers = report.get("evaluation", {})
            for role in ROLES:
                score = numbers.get(f"{role}-accuracy", numbers.get(f"{role}-f1"))
                if score is not None:
                    of = told[role].setdefault(job.method, {})
                    of.setdefault(report["round"], []).append(100 * score)
    figure, axes = _panels([role for role in ROLES if told[role]])
    styles = dict(zip(dict.fromkeys(job.method for job in jobs), line_styles(), strict=False))
    for role, axis in axes.items():
        for method, rounds in told[role].items():
            x = sorted(rounds)
            axis.plot(x, [np.mean(rounds[n]) for n in x], label=method, **styles[method])
            low, high = [min(rounds[n]) for n in x], [max(rounds[n]) for n in x]
            axis.fill_between(x, low, high, color=styles[method]["color"], alpha=0.15, lw=0)
        axis.set_xlabel("round")
        axis.xaxis.get_major_locator().set_params(integer=True)
    _legend(figure, axes)
    return figure


def swept(jobs: Sequence[Job], key: str) -> "Figure":
    """Accuracy against a swept setting, ± deviation over seeds; a line a method."""
    lines = compare(jobs, by=["method", key]).lines
    if len({line.by[1] for line in lines}) < 2:
        raise ValueError(f"the runs have one value of {key} alone: {lines[0].by[1]}")
    figure, axes = _panels([s for s in SCORES if any(line.score == s for line in lines)])
    places = _places(sorted({line.by[1] for line in lines}, key=order))
    for score, axis in axes.items():
        of = [line for line in lines if line.score == score]
        methods = dict.fromkeys(line.by[0] for line in of)
        for method, style in zip(methods, line_styles(), strict=False):
            points = sorted(
                (places[line.by[1]], line.mean, line.deviation or 0.0)
                for line in of
                if line.by[0] == method
            )
            x, y, error = zip(*points, strict=True)
            axis.errorbar(x, y, error, label=method, capsize=3, **style)
        axis.set_xlabel(key)
        if any(place != value for value, place in ((order(v)[1], p) for v, p in places.items())):
            axis.set_xticks(list(places.values()), list(places))
    _legend(figure, axes)
    return figure


def clients(jobs: Sequence[Job]) -> "Figure":
    """Each client's accuracy as a dot, quartiles as a box; all seeds together."""
    names = list(dict.fromkeys(job.method for job in jobs))
    told: dict[str, dict[str, list[float]]] = {role: {} for role in ROLES}
    for job in jobs:
        for client in job.summary().get("per_client", {}).values():
            if client["accuracy"] is not None:
                of = told[client["role"]].setdefault(job.method, [])
                of.append(100 * client["accuracy"])
    figure, axes = _panels([role for role in ROLES if told[role]])
    for role, axis in axes.items():
        for place, method in enumerate(names):
            if values := told[role].get(method):
                axis.boxplot(
                    [values],
                    positions=[place],
                    widths=0.6,
                    showfliers=False,
                    medianprops={"color": "black", "linewidth": 2},
                )
                spread = np.linspace(-0.2, 0.2, len(values))
                colour = COLOURS[place % len(COLOURS)]
                axis.plot(place + spread, values, ".", color=colour, alpha=0.5)
        axis.set_xticks(range(len(names)), names, rotation=30, ha="right")
    return figure


def matrix(values: np.ndarray, rows: str, columns: str, title: str = "") -> "Figure":
    """Shares (rows, columns) as a map from white to black."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4.2), layout="constrained")
    axis = figure.subplots()
    image = axis.imshow(values, vmin=0, vmax=1, cmap="Greys")
    axis.set(xlabel=columns, ylabel=rows, title=title)
    for (row, column), value in np.ndenumerate(values if values.size <= 400 else values[:0]):
        axis.text(
            column,
            row,
            f"{value:.2f}".removeprefix("0") if value else "",
            ha="center",
            va="center",
            fontsize=7,
            color="white" if value > 0.5 else "black",
        )
    figure.colorbar(image)
    return figure


def save(figure: "Figure", output: Path) -> None:
    """Write the figure. Raises ValueError for an ending that is none of `ENDINGS`."""
    if output.suffix.lower() not in ENDINGS:
        raise ValueError(f"{output} must end in one of {', '.join(ENDINGS)}")
    import matplotlib

    output.parent.mkdir(parents=True, exist_ok=True)
    dates = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
    metadata: Any = dates.get(output.suffix.lower())
    with matplotlib.rc_context({"pdf.fonttype": 42, "svg.hashsalt": "fedapps"}):
        figure.savefig(output, dpi=150, metadata=metadata)


def _panels(names: Sequence[str]) -> tuple["Figure", dict[str, Any]]:
    """A panel for each score. Raises ValueError if there is none."""
    from matplotlib.figure import Figure

    if not names:
        raise ValueError("no run tells what this figure shows")
    figure = Figure(figsize=(5 * len(names), 4), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axis, name in zip(panels, names, strict=True):
        axis.set_title({**SCORES, **ROLES}[name])
        axis.grid(alpha=0.3)
    panels[0].set_ylabel("F1" if names[0].startswith("f1") else "accuracy in %")
    return figure, dict(zip(names, panels, strict=True))


def _legend(figure: "Figure", axes: Mapping[str, Any]) -> None:
    """One legend below all panels, of as many columns as the figure has room for."""
    told: dict[str, Any] = {}
    for axis in axes.values():
        handles, labels = axis.get_legend_handles_labels()
        told |= dict(zip(labels, handles, strict=True))
    for columns in (4, 3, 2, 1) if len(told) > 1 else ():
        legend = figure.legend(
            list(told.values()), list(told), loc="outside lower center", ncols=columns
        )
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def line_styles() -> Any:
    """Endless lines that colour, dashes and marker tell apart."""
    keys = ("color", "linestyle", "marker")
    endless = zip(cycle(COLOURS), cycle(DASHES), cycle(MARKERS), strict=False)
    return (dict(zip(keys, one, strict=True)) | {"markersize": 4} for one in endless)


def _places(values: Sequence[str]) -> dict[str, float]:
    """Where values stand on the axis: numbers at themselves, words beside each other."""
    numbers = not any(order(value)[0] for value in values)
    return {v: order(v)[1] if numbers else float(place) for place, v in enumerate(values)}


FIGURES: dict[str, Callable[[Sequence[Job]], "Figure"]] = {"curves": curves, "clients": clients}
