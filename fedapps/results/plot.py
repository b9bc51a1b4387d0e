"""Figures of a folder of runs as PDF, SVG or PNG, readable in grey as well."""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO, StringIO
from itertools import cycle
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import numpy as np

from fedapps.console import visible
from fedapps.files import write_files
from fedapps.results import check_ending
from fedapps.results.comparison import compare, order
from fedapps.results.runs import (
    CURVES,
    MAIN_KEYS,
    check_one_main_score,
    clients_of,
    column,
    decisions_of,
    rounds_of,
    score_keys,
)

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from pandas import DataFrame

MARKED = 20  # points of a line that have a marker
NO_CHANGE = "none"  # the choice of a client that keeps the global model
MAX_SLANTED = 24  # characters of a name that fits below an axis at a slant
MAX_LINE = 40  # characters of a line of a longer name
LINE_HEIGHT = 0.18  # inches
CHARACTER_WIDTH = 0.08  # inches, on average
MAX_NAMED_PLACES = 20  # of an axis of a matrix
UPRIGHT = 3  # characters of a name that has room below a matrix; a longer one is turned
MAX_NUMBERED_CELLS = 400  # of a matrix; in smaller cells numbers would overlap
# Okabe and Ito's colours in an order in which neighbours differ in grey; every line also has its
# dashes and its marker.
BLACK = "#000000"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", BLACK, "#56B4E9", "#D55E00")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = "os^Dv*PX<"  # 9 markers and 7 colours: the eighth line differs from the first in both


def curves(runs: "DataFrame", points: int = 1000) -> "Figure":
    """The main score by round, the mean over seeds and their range; F1 if there is no accuracy."""
    return _curves(runs, rounds_of(runs, points))


def time(runs: "DataFrame", points: int = 1000) -> "Figure":
    """The main score by simulated seconds, as `curves`: at the mean time over seeds of each round.

    Raises ValueError for runs without simulated seconds."""
    rounds = rounds_of(runs, points).dropna(subset="time")
    if rounds.empty:
        raise ValueError("the runs have no simulated seconds; run with latency=lognormal")
    return _curves(runs, rounds, by_time=True)


def _curves(runs: "DataFrame", rounds: "DataFrame", *, by_time: bool = False) -> "Figure":
    """A panel for each main score, a line for each method, by round or by simulated time."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = _panels([key for key in CURVES if rounds[key].notna().any()])
    styles = _styles(runs.method.unique())
    for key, axis in axes.items():
        for method, scores in rounds.dropna(subset=key).groupby("method", sort=False):
            means = scores.groupby("round")[key].agg(["mean", "min", "max"])
            if by_time:
                means.index = scores.groupby("round")["time"].mean()
            style = styles[method]
            every = math.ceil(len(means) / MARKED)
            (line,) = axis.plot(means["mean"], label=shown(method), markevery=every, **style)
            band = axis.fill_between(
                means.index, means["min"], means["max"], color=style["color"], alpha=0.15, lw=0
            )
            _name(runs, method, line, band)
        if by_time:
            axis.set_xlabel("simulated seconds")
            continue
        axis.set_xlabel("round")
        axis.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 2.5, 5, 10]))
    _legend(figure, axes)
    return figure


def swept(runs: "DataFrame", key: str) -> "Figure":
    """Each score against a swept setting, ± deviation over seeds; a line per method."""
    lines = compare(runs, by=["method", key]).lines
    values = sorted(lines[key].unique(), key=order)
    if len(values) < 2:
        raise ValueError(f"the runs have a single value of {key}: {', '.join(values)}")
    figure, axes = _panels([score for score in score_keys(runs) if score in set(lines.score)])
    # Numbers stand at their values; if one value is a word, all stand at equal distances.
    words = any(order(value)[0] for value in values)
    places: dict[str, float] = {}
    for number, value in enumerate(values):
        places[value] = float(number) if words else order(value)[1]
    lines = lines.assign(place=lines[key].map(places))
    styles = _styles(lines.method.unique())
    for score, axis in axes.items():
        for method, group in lines[lines.score == score].groupby("method", sort=False):
            points = group.sort_values("place")
            error = points.deviation_over_seeds.fillna(0.0)
            axis.errorbar(
                points.place,
                points["mean"],
                error,
                label=shown(method),
                capsize=3,
                **styles[method],
            )
        axis.set_xlabel(key)
        if words:
            axis.set_xticks(list(places.values()), [shown(value) for value in places])
    _legend(figure, axes)
    return figure


def clients(runs: "DataFrame") -> "Figure":
    """Each client's main score as a dot, quartiles as a box; all seeds together."""
    dots = clients_of(runs).dropna(subset="value")
    figure, axes = _panels([key for key in MAIN_KEYS if (dots.score == key).any()])
    names = list(runs.method.unique())
    for key, axis in axes.items():
        for method, group in dots[dots.score == key].groupby("method", sort=False):
            place = names.index(method)
            box = axis.boxplot(
                [group.value],
                positions=[place],
                widths=0.6,
                showfliers=False,
                manage_ticks=False,  # each box would set those of all, which are set below
                medianprops={"color": "black", "linewidth": 2},
            )
            points = axis.scatter(
                place + np.linspace(-0.2, 0.2, len(group)),
                group.value,
                s=9,
                zorder=3,  # above the box, so that a page's reader can click it
                color=COLOURS[place % len(COLOURS)],
                alpha=0.5,
                urls=[f"#client={quote(client)}" for client in group.client],
            )
            box_artists = itertools.chain.from_iterable(box.values())
            _name(runs, method, points, *box_artists)
        _set_names(axis, names)
        # Every panel has a place for every method, also for one without values in it.
        axis.set_xlim(-0.5, len(names) - 0.5)
    _make_room(figure, names)
    return figure


def _lines_of(name: str) -> list[str]:
    """A method's name for an axis, in lines of at most `MAX_LINE` characters, cut at blanks."""
    lines = wrap(name, MAX_LINE, break_long_words=False, break_on_hyphens=False)
    return [shown(line) for line in lines]


def _are_long(names: Sequence[str]) -> bool:
    """Whether a name is too long to stand below an axis at a slant."""
    return max(map(len, names)) > MAX_SLANTED


def _set_names(axis: "Axes", names: Sequence[str]) -> None:
    """Name the places 0, 1, … of the horizontal axis; long names stand upright, in lines."""
    texts = ["\n".join(_lines_of(name)) for name in names]
    if _are_long(names):
        axis.set_xticks(range(len(names)), texts, rotation=90)
    else:
        axis.set_xticks(range(len(names)), texts, rotation=30, ha="right")


def _make_room(figure: "Figure", names: Sequence[str]) -> None:
    """Enlarge a figure whose panels have these names below, if they are long."""
    if not _are_long(names):
        return
    most_lines = 0
    longest_line = 0
    for name in names:
        lines = _lines_of(name)
        most_lines = max(most_lines, len(lines))
        longest_line = max(longest_line, *map(len, lines))
    panel_width = max(5.0, 1.0 + LINE_HEIGHT * len(names) * (most_lines + 0.5))
    figure.set_size_inches(panel_width * len(figure.axes), 4.0 + CHARACTER_WIDTH * longest_line)


def decisions(runs: "DataFrame") -> "Figure":
    """What novel clients chose without labels: T / t against the gain that was expected and, where
    labels exist, against the measured one. A dot is a client, all seeds together. Above 1 the
    proportions of the classes do not explain a client's inputs.

    Raises ValueError for runs without choices."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import SymmetricalLogLocator

    dots = decisions_of(runs)
    dots = dots[dots.limit > 0].dropna(subset="misfit")
    if dots.empty:
        raise ValueError(
            "no novel client of these runs made a choice; auto's clients do, where a run has a rule"
        )
    gains = {"expected": "expected gain", "gain": "measured gain"}
    columns = [name for name in gains if dots[name].notna().any()]
    figure = Figure(figsize=(5 * len(columns), 4), layout="constrained")
    panels = figure.subplots(1, len(columns), sharex=True, sharey=True, squeeze=False)[0]
    axes = dict(zip(columns, panels, strict=True))
    styles = _styles(sorted(dots.chosen.unique(), key=lambda name: (name != NO_CHANGE, name)))
    for name, axis in axes.items():
        for chosen, style in styles.items():
            group = dots[dots.chosen == chosen].dropna(subset=name)
            look = style | {"linestyle": "none", "label": shown(chosen)}
            axis.plot(group.misfit / group.limit, group[name], alpha=0.7, **look)
        axis.axvline(1.0, color=BLACK, linewidth=1, linestyle=":", label="T = t")
        axis.axhline(0.0, color=BLACK, linewidth=1, alpha=0.3)
        # Clients with other inputs lie far above 1, those without shift around 0.
        axis.set_xscale("symlog", linthresh=1.0)
        axis.xaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=1.0, subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlim(left=min(0.0, (dots.misfit / dots.limit).min()))
        axis.set(xlabel="T / t: distance from mixtures of the classes", title=gains[name])
        axis.grid(alpha=0.3)
    panels[0].set_ylabel("gain in points")
    _legend(figure, axes, title="choice")
    return figure


def gain(folder: Path, against: str = "fedavg") -> "Figure":
    """Novel clients' mean gain in each subfolder's runs, ± deviation over seeds; a line per method.
    Raises ValueError where no subfolder holds runs, and where their gains have different units."""
    import pandas
    from matplotlib.figure import Figure

    from fedapps.results.gains import check_reference, novel_scores, scenarios

    runs_by_scenario, _ = scenarios(folder)
    check_reference(runs_by_scenario.values(), against)
    main = check_one_main_score(pandas.concat([*runs_by_scenario.values()]))
    unit = "points" if main == "accuracy" else "the labels' unit"
    names = list(runs_by_scenario)
    # Mean and deviation by method and by the scenario's place; a method may lack scenarios.
    lines: dict[str, dict[int, tuple[float, float]]] = {}
    for place, runs in enumerate(runs_by_scenario.values()):
        gains = novel_scores(runs, against=against).gain
        for method, values in gains.groupby(runs.method):
            spread = values.std() if len(values) > 1 else 0.0
            lines.setdefault(str(method), {})[place] = (values.mean(), spread)
    figure = Figure(figsize=(1.5 * len(names) + 4, 4), layout="constrained")
    axis = figure.subplots()
    axis.grid(alpha=0.3)
    axis.set_ylabel(f"gain on {shown(against)} in {unit}")
    styles = line_styles()
    for number, (method, cells) in enumerate(lines.items()):
        shift = 0.6 * (number / max(len(lines) - 1, 1) - 0.5)  # so that bars do not cover others
        places = [place + shift for place in cells]
        means, spreads = zip(*cells.values(), strict=True)
        style = next(styles) | {"linestyle": "none", "label": shown(method), "capsize": 2}
        axis.errorbar(places, means, spreads, **style)
    axis.set_xticks(range(len(names)), [shown(name) for name in names])
    _legend(figure, {"gain": axis})
    return figure


def matrix(
    values: np.ndarray, rows: str, columns: str, title: str = "", names: Sequence[str] = ()
) -> "Figure":
    """Shares (rows, columns) as a map from white to black; `names` are those of the places of both
    axes, by default their numbers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4.2), layout="constrained")
    axis = figure.subplots()
    image = axis.imshow(values, vmin=0, vmax=1, cmap="Greys")
    axis.set(xlabel=columns, ylabel=rows, title=shown(title))
    figure.colorbar(image)
    names = names or [str(number) for number in range(max(values.shape))]
    longest = _name_places(axis.xaxis, names[: values.shape[1]])
    if longest > UPRIGHT:
        axis.xaxis.set_tick_params(rotation=90)
    _name_places(axis.yaxis, names[: values.shape[0]])
    if values.size > MAX_NUMBERED_CELLS:
        return figure
    for (row, place), value in np.ndenumerate(values):
        text = f"{value:.2f}".removeprefix("0") if value else ""
        colour = "white" if value > 0.5 else "black"
        axis.text(place, row, text, ha="center", va="center", fontsize=7, color=colour)
    return figure


def _name_places(axis: "Axis", names: Sequence[str]) -> int:
    """Name the places 0, 1, … of an axis, every second, third, … one if there are many; returns
    the characters of the longest name."""
    step = math.ceil(len(names) / MAX_NAMED_PLACES)
    places = range(0, len(names), step)
    texts = [shown(names[place][:MAX_SLANTED]) for place in places]
    axis.set_ticks(places, texts)
    return max(map(len, texts))


def save(figure: "Figure", output: Path) -> None:
    """Write the figure. Raises ValueError for an ending that `check_ending` refuses."""
    check_ending(output)
    import matplotlib

    dates = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
    metadata: Any = dates.get(output.suffix.lower())
    # In memory: matplotlib hides the error of a full disk behind others.
    drawn = BytesIO()
    kind = output.suffix.lower().removeprefix(".")
    # Without dates, and with a fixed salt for names, the same runs give the same file.
    # Type 42 embeds TrueType fonts, whose text stays text for search and screen readers.
    with matplotlib.rc_context({"pdf.fonttype": 42, "svg.hashsalt": "fedapps"}):
        figure.savefig(drawn, format=kind, dpi=150, metadata=metadata)
    write_files({output: drawn.getvalue()})


def as_svg(figure: "Figure", name: str) -> "Markup":
    """The figure as an element of an HTML page, its black in the page's text colour. Screen readers
    say its `name`, and that of the client to which a dot leads."""
    import matplotlib
    from markupsafe import Markup, escape

    file = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedapps"}):
        figure.savefig(file, format="svg", transparent=True)
    text = file.getvalue()
    text = text[text.index("<svg") :]  # an XML declaration may not stand inside a page
    text = re.sub("<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Links lead to places of the page itself. The keyboard reaches clients by the page's list: a
    # tab stop for each of some thousand dots would be in the way.
    text = text.replace(' target="_blank"', "")
    text = re.sub(r'<a xlink:href="#client=([^"]*)"', _named_link, text)
    role = "group" if "<a " in text else "img"
    text = text.replace("<svg", f'<svg role="{role}" aria-label="{escape(name)}"', 1)
    return Markup(text.replace(BLACK, on_page(BLACK)))


def on_page(colour: str) -> str:
    """A colour of `COLOURS` for a page, which may be dark: black is the text's colour."""
    return "currentColor" if colour == BLACK else colour


def _named_link(link: re.Match[str]) -> str:
    """The beginning of a dot's link, with a name."""
    from markupsafe import escape

    client = escape(visible(unquote(link[1])))
    return f'{link[0]} tabindex="-1" aria-label="client {client}"'


def line_styles() -> Iterator[dict[str, Any]]:
    """Endless lines that differ in colour, dashes and marker."""
    for colour, dashes, marker in zip(cycle(COLOURS), cycle(DASHES), cycle(MARKERS), strict=False):
        yield {"color": colour, "linestyle": dashes, "marker": marker, "markersize": 4}


def _styles(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The look of each method's lines, the same in all panels of a figure."""
    return dict(zip(methods, line_styles(), strict=False))


def shown(name: str) -> str:
    """A name as matplotlib's text: no control characters, no formula."""
    return visible(name).replace("$", r"\$")


def _name(runs: "DataFrame", method: str, *artists: Any) -> None:
    """Give the artists of a method an id in SVG files, by which a page can hide them."""
    number = list(runs.method.unique()).index(method)
    for artist in artists:
        artist.set_gid(f"method-{number}")


def _panels(names: Sequence[str]) -> tuple["Figure", dict[str, "Axes"]]:
    """A panel for each score. All share the horizontal axis, and those of one kind and unit the
    vertical one. Raises ValueError if there is no score."""
    from matplotlib.figure import Figure

    if not names:
        raise ValueError("no run has the numbers for this figure")
    figure = Figure(figsize=(5 * len(names), 4), layout="constrained")
    labels = [_axis_label(name) for name in names]
    panels = figure.subplots(
        1, len(names), sharex=True, sharey=len(set(labels)) == 1, squeeze=False
    )[0]
    first: dict[str, Axes] = {}  # panel by label
    for axis, name, label in zip(panels, names, labels, strict=True):
        axis.set_title(shown(column(name).title))
        axis.grid(alpha=0.3)
        if label in first and len(set(labels)) > 1:
            axis.sharey(first[label])
        elif label not in first:
            axis.set_ylabel(label)
        first.setdefault(label, axis)
    return figure, dict(zip(names, panels, strict=True))


def _axis_label(key: str) -> str:
    """What the axis of a score shows, with its unit."""
    score = column(key).score
    if score.in_percent:
        return f"{score.text} in %"
    name = shown(score.short or score.text)
    return f"{name} in the labels' unit" if score.in_units else name


def _legend(figure: "Figure", axes: Mapping[str, "Axes"], title: str = "") -> None:
    """One legend below all panels, with as many columns as the figure has room for."""
    lines: dict[str, Any] = {}
    for axis in axes.values():
        handles, labels = axis.get_legend_handles_labels()
        lines |= dict(zip(labels, handles, strict=True))
    if len(lines) < 2:
        return
    handles = list(lines.values())
    labels = list(lines)
    # A legend's width is known only once it is made.
    for columns in (4, 3, 2, 1):
        legend = figure.legend(
            handles, labels, title=title, loc="outside lower center", ncols=columns, frameon=False
        )
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


FIGURES: dict[str, Callable[["DataFrame"], "Figure"]] = {
    "curves": curves,
    "time": time,
    "clients": clients,
    "decisions": decisions,
}
