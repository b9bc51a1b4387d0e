"""The report in a real browser: what can be clicked works, and what is there can be read."""

import json
import re
import shutil

import pytest
from run_folders import leave

from fedapps.results.report import write_report
from fedapps.results.runs import read_runs

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no browser is installed")
METHODS = ("fedavg", "fedper", "tent")
PHASES = ("prepare", "send", "clients", "aggregate", "evaluate")
# What a person sees: of each visible text, and of each part that has a colour as its meaning, the
# contrast (WCAG 2) with what lies behind it, and the parts that stick out of the page's width.
SEEN = """() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = colour => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].map(x => x / 255);
  };
  const over = (a, b) => [0, 1, 2].map(i => a[3] * a[i] + (1 - a[3]) * b[i]);
  const behind = element => {
    const layers = [];
    for (let at = element; at; at = at.parentElement)
      layers.push(getComputedStyle(at).backgroundColor);
    return layers.reverse().reduce((below, layer) => over(rgba(layer), below), [1, 1, 1]);
  };
  const light = colour => {
    const [r, g, b] = colour.map(x => x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const contrast = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + .05) / (y + .05);
  };
  const seen = {texts: [], marks: [], wide: []};
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walk.nextNode());) {
    const element = node.parentElement, text = node.textContent.trim();
    if (!text || !element.checkVisibility() || element.closest("script, style, option")) continue;
    const style = getComputedStyle(element), back = behind(element);
    const ink = rgba(element.closest("svg") ? style.fill : style.color);
    seen[text === "■" ? "marks" : "texts"].push([text, contrast(over(ink, back), back)]);
  }
  for (const part of document.querySelectorAll(".bar > div")) {
    const back = behind(part.closest("td"));
    seen.marks.push([part.title, contrast(behind(part), back)]);
  }
  for (const part of document.querySelectorAll("body *")) {
    const out = part.getBoundingClientRect().right > innerWidth + 1;
    if (out && part.checkVisibility() && !part.closest(".scroll"))
      seen.wide.push(part.outerHTML.slice(0, 80));
  }
  return seen;
}"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Three methods with two seeds each, on a simulated clock; fedper serves no novel client."""
    folder = tmp_path_factory.mktemp("runs")
    for place, method in enumerate(METHODS):
        for seed in (0, 1):
            novel = [] if method == "fedper" else [0.9 - 0.1 * place, 0.5]
            curve = (0.25, 0.5, 0.125 * place)
            run = leave(folder, method, seed, novel, train=(0.5, 0.25), curve=curve)
            file = run / "metrics.jsonl"
            rounds = [json.loads(line) for line in file.read_text().splitlines()]
            for number, report in enumerate(rounds, 1):
                report["phases"] = dict.fromkeys(PHASES, 1.0)
                report["simulated-seconds"] = 2.0 * number
            file.write_text("".join(json.dumps(report) + "\n" for report in rounds))
    return write_report(read_runs(folder)[0], folder)


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(params=[(1280, "light"), (390, "dark")], ids=["desk", "phone"])
def page(request, report, browser):
    """The report, on a desk and on a phone; it asks nobody for anything and raises no error."""
    width, scheme = request.param
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    errors, asked = [], []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report.as_uri())
    yield page
    assert errors == []
    assert len(asked) == 1
    page.close()


def column(page, place):
    rows = page.locator("#results tbody tr:visible").all()
    return [row.locator("td").nth(place).inner_text() for row in rows]


def test_the_table_sorts(page):
    assert column(page, 0) == list(METHODS)
    page.locator("#results th").first.click()
    assert column(page, 0) == list(METHODS)[::-1]
    for descending in (True, False):
        page.locator("#results th").nth(2).click()
        cells = [float(cell.split(" ± ")[0]) for cell in column(page, 2)[:2]]
        assert cells == sorted(cells, reverse=descending)
        assert column(page, 0)[2] == "fedper"  # cells without a number come last


def test_a_method_is_switched_off_and_on(page):
    parts = page.locator('#rounds [id="method-1"], #clients [id="method-1"]')
    shown = [part.is_visible() for part in parts.all()]
    assert any(shown)
    button = page.locator("#methods button", has_text="fedper")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert column(page, 0) == ["fedavg", "tent"]
    assert not any(part.is_visible() for part in parts.all())
    button.click()
    assert column(page, 0) == list(METHODS)
    assert [part.is_visible() for part in parts.all()] == shown


def test_a_client_has_a_page_of_its_own(page):
    page.locator("#clients svg a").first.click(force=True)
    page.wait_for_selector("#one:not([hidden])")
    client = re.search(r"Client (\d+)", page.locator("#one h2").inner_text())[1]
    rows = [row.locator("td").all_inner_texts() for row in page.locator("#one tr:visible").all()]
    assert [row[0] for row in rows[1:]] == [m for m in METHODS for _ in "01"]
    assert rows[1] == ["fedavg", "0", "train", "10", "50.00", "50.00", "1 of 2"]
    page.get_by_text("← all clients").click()
    page.wait_for_selector("#all:not([hidden])")
    page.locator("#choose").select_option(client)
    page.wait_for_selector("#one:not([hidden])")


def test_it_fits_the_screen_and_turns_dark(page):
    """Nothing but tables and figures scrolls sideways; the button turns what the system prefers."""
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= page.viewport_size["width"]
    colour = "getComputedStyle(document.body).backgroundColor"
    dark = page.viewport_size["width"] == 390
    assert page.evaluate(colour) == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")
    page.locator("#theme").click()
    assert page.evaluate(colour) == ("rgb(255, 255, 255)" if dark else "rgb(20, 23, 27)")


def test_everything_can_be_read(page):
    """Text has a contrast of 4.5, marks one of 2, on a page that is dark and on one that is light;
    nothing sticks out, and the table shows novel clients without a turn."""
    for _ in ("as the system prefers", "the other way"):
        seen = page.evaluate(SEEN)
        assert len(seen["texts"]) > 50 and len(seen["marks"]) > 3 * len(PHASES)
        assert [text for text in seen["texts"] if text[1] < 4.5] == []
        assert [mark for mark in seen["marks"] if mark[1] < 2] == []
        assert seen["wide"] == []
        page.locator("#theme").click()
    for cell in page.locator("#results tr > :nth-child(3)").all():
        box = cell.bounding_box()
        assert box["x"] + box["width"] <= page.viewport_size["width"]


def test_figures_have_names_and_meanings(page):
    """A screen reader says what a figure, a dot and a bar are; captions explain bands and boxes."""
    for place, role in (("rounds", "img"), ("times", "img"), ("clients", "group")):
        figure = page.locator(f"#{place} figure")
        assert figure.get_by_role(role).first.get_attribute("aria-label")
        caption = figure.locator("figcaption").inner_text()
        assert ("box: the middle half" if place == "clients" else "band: from the low") in caption
    dots = page.locator("#clients svg a")
    assert dots.first.get_attribute("aria-label") == "client 0"
    bars = page.locator("#costs .bar").all()
    name = ", ".join(f"{phase} 1.000 s" for phase in PHASES)
    assert [bar.get_attribute("aria-label") for bar in bars] == [name] * len(METHODS)
    assert page.get_by_role("button", name="dark or light").count() == 1
