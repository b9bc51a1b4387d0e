"""The README's table and the figures of the site: ``python -m experiments.figures_site RESULTS``.

RESULTS holds ``fedapps run --seeds 0,1,2``: the table and the figures beside it are all of this
run. Each figure has the table in its PNG text `TABLE`, and a form for phones. The screenshots need
Chromium; the tutorials' figures are those that their cells draw."""

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from experiments.tutorials import FOLDER, execute
from fedapps.results.runs import read_runs
from fedapps.results.table import results as results_table

FIGURES = FOLDER.parent / "figures"
README = FOLDER.parents[1] / "README.md"
README_TABLE = re.compile(r"^\| method \| training clients \|.*?(?=\n\n)", re.MULTILINE | re.DOTALL)
TABLE = "fedapps table"  # the PNG text that holds the table of a figure's run
PHONE = 390  # points
OF_THE_RUN = ("overview.png", "overview-phone.png", "report.png", "report-phone.png")
METHODS = {"fedavg": "global model", "tent": "TENT", "fedtta++": "FedTTA++"}
GREY, BLUE, GREEN = "#9aa3ad", "#3f51b5", "#2e8b57"


def table_of(results: Path) -> str:
    """The runs' table as the README shows it: without seconds, which differ between machines."""
    shown = results_table(read_runs(results)[0])
    kept = [place for place, title in enumerate(shown.columns) if title != "seconds"]
    lines = []
    for row in (shown.columns, ["---"] * len(shown.columns), *shown.rows):
        lines.append("| " + " | ".join(row[place] for place in kept) + " |")
    lines[1] = lines[1].replace(" ", "")
    return "\n".join(lines)


def write_table(table: str) -> None:
    """Put the table into the README, in place of the former one."""
    text = README_TABLE.sub(lambda _: table, README.read_text("utf-8"))
    README.write_text(text, "utf-8")


def sign(image: Path, table: str) -> None:
    """Store the run's table in a PNG file, to tell later which run the figure shows."""
    text = PngInfo()
    text.add_itxt(TABLE, table)
    with Image.open(image) as opened:
        opened.load()
    opened.save(image, pnginfo=text, optimize=True)


def overview(results: Path, *, phone: bool = False) -> Figure:
    """Who gets which model, and what novel clients gain: side by side, for a phone stacked."""
    if phone:
        figure = Figure(figsize=(4.2, 5.2), layout="constrained")
        scheme, dots = figure.subplots(2, 1, height_ratios=[1, 1])
    else:
        figure = Figure(figsize=(9, 3), layout="constrained")
        scheme, dots = figure.subplots(1, 2, width_ratios=[1.5, 1])
    _draw_scheme(scheme, name_size=8 if phone else 10)
    _draw_gains(dots, results)
    return figure


def _draw_scheme(scheme: Axes, name_size: int) -> None:
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
        scheme.text(x + 1.3, y + 0.8, name, ha="center", va="center", weight="bold", size=name_size)
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
        novel = runs[runs.method == method]["best novel-accuracy"]
        colour = GREY if method == "fedavg" else GREEN
        dots.plot(novel, [place] * len(novel), "o", color=colour, alpha=0.35)
        dots.plot([novel.mean()], [place], "D", color=colour, ms=9)
        dots.text(novel.mean(), place + 0.22, f"{label}: {novel.mean():.1f} %", ha="center")
    dots.set(ylim=(-0.4, 2.6), yticks=[], xlabel="accuracy of later clients in %, three seeds")
    dots.spines[["top", "right", "left"]].set_visible(False)


def screenshot(report: Path, image: Path, width: int, height: int) -> None:
    """The top of a report, as a browser shows it on a screen of this size in points."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        # Chromium's sandbox does not start for root, as in a container.
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": width, "height": height},
            color_scheme="light",
            device_scale_factor=2 if width == PHONE else 1,
        )
        page.goto(report.resolve().as_uri())
        page.screenshot(path=image)
        browser.close()


def tutorial_figures(page: Path) -> None:
    """The figures that the cells of a tutorial draw, under the names that the page gives them."""
    # Shell cells are not executed here, so what follows them would lack their files.
    text = page.read_text("utf-8").partition("\n```sh\n")[0]
    names = re.findall(r"\(\.\./figures/(\S+\.png)\)", text)
    if not names:
        return
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)  # cells import the files that cells before wrote
        drawn = [value for _, value in execute(text) if isinstance(value, Figure)]
        for figure, name in zip(drawn, names, strict=True):
            figure.savefig(FIGURES / name, dpi=100)


def main(results: Path) -> None:
    """Write the table and draw all figures."""
    table = table_of(results)
    write_table(table)
    overview(results).savefig(FIGURES / "overview.png", dpi=120)
    overview(results, phone=True).savefig(FIGURES / "overview-phone.png", dpi=200)
    screenshot(results / "report.html", FIGURES / "report.png", 1100, 900)
    screenshot(results / "report.html", FIGURES / "report-phone.png", PHONE, 700)
    for name in OF_THE_RUN:
        sign(FIGURES / name, table)
    for page in sorted(FOLDER.glob("*.md")):
        tutorial_figures(page)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
