"""The figures of the site: ``python -m experiments.figures_site RESULTS``.

RESULTS holds ``fedapps run --seeds 0,1,2``. The screenshot needs Chromium; the tutorials' figures
are those that their cells draw."""

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from experiments.tutorials import FOLDER, cells, execute
from fedapps.results.runs import read_runs

FIGURES = FOLDER.parent / "figures"
METHODS = {"fedavg": "global model", "tent": "TENT", "fedtta++": "FedTTA++"}
GREY, BLUE, GREEN = "#9aa3ad", "#3f51b5", "#2e8b57"


def overview(results: Path) -> Figure:
    """Who gets which model, and what novel clients gain."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    scheme, dots = figure.subplots(1, 2, width_ratios=[1.5, 1])
    _draw_scheme(scheme)
    _draw_gains(dots, results)
    return figure


def _draw_scheme(scheme: Axes) -> None:
    """Boxes of training clients, server and a later client, with arrows between them."""
    scheme.set(xlim=(-0.2, 10), ylim=(0, 6))
    scheme.axis("off")
    boxes = (
        ("training client", 0, 4.4, GREY, "trains on its labels"),
        ("training client", 0, 2.4, GREY, "trains on its labels"),
        ("server", 3.9, 3.4, BLUE, "combines models"),
        ("later client", 7, 0.3, GREEN, "inputs, no labels"),
    )
    for name, x, y, colour, line in boxes:
        box = FancyBboxPatch((x, y), 2.6, 1.2, "round,pad=0.12", fc="white", ec=colour, lw=2)
        scheme.add_patch(box)
        scheme.text(x + 1.3, y + 0.8, name, ha="center", va="center", weight="bold")
        scheme.text(x + 1.3, y + 0.3, line, ha="center", va="center", fontsize=8)
    arrow = {"arrowstyle": "<->", "lw": 1.5}
    scheme.annotate("", (3.75, 4.1), (2.75, 4.9), arrowprops=arrow)
    scheme.annotate("", (3.75, 3.8), (2.75, 3.1), arrowprops=arrow)
    scheme.annotate("", (8.2, 1.65), (6.65, 3.7), arrowprops={"arrowstyle": "->", "lw": 1.5})
    scheme.text(7.0, 2.3, "a model that adapts\nto the client's inputs", ha="right", fontsize=9)


def _draw_gains(dots: Axes, results: Path) -> None:
    """The accuracy of later clients: a dot for each seed, a diamond for the mean."""
    runs, _ = read_runs(results)
    # The axis counts from below, so the first method comes last.
    for place, (method, label) in enumerate(reversed(METHODS.items())):
        novel = runs[runs.method == method]["best novel"]
        colour = GREY if method == "fedavg" else GREEN
        dots.plot(novel, [place] * len(novel), "o", color=colour, alpha=0.35)
        dots.plot([novel.mean()], [place], "D", color=colour, ms=9)
        dots.text(novel.mean(), place + 0.22, f"{label}: {novel.mean():.1f} %", ha="center")
    dots.set(ylim=(-0.4, 2.6), yticks=[], xlabel="accuracy of later clients in %, three seeds")
    dots.spines[["top", "right", "left"]].set_visible(False)


def screenshot(report: Path, image: Path) -> None:
    """The top of a report, as a browser shows it."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        # Chromium's sandbox does not start for root, as in a container.
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 900}, color_scheme="light")
        page.goto(report.resolve().as_uri())
        page.screenshot(path=image)
        browser.close()


def tutorial_figures(page: Path) -> None:
    """The figures that the cells of a tutorial draw, under the names that the page gives them."""
    text = page.read_text("utf-8")
    names = re.findall(r"\(\.\./figures/(\S+\.png)\)", text)
    # Shell cells are not executed here, so what follows them would lack their files.
    has_shell_cell = any(kind == "sh" for kind, _, _ in cells(text))
    if not names or has_shell_cell:
        return
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)  # cells import the files that cells before wrote
        drawn = [value for _, value in execute(text) if isinstance(value, Figure)]
        for figure, name in zip(drawn, names, strict=True):
            figure.savefig(FIGURES / name, dpi=100)


def main(results: Path) -> None:
    """Draw all figures."""
    overview(results).savefig(FIGURES / "overview.png", dpi=120)
    screenshot(results / "report.html", FIGURES / "report.png")
    for page in sorted(FOLDER.glob("*.md")):
        tutorial_figures(page)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
