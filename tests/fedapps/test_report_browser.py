"""The report in a real browser: what can be clicked works."""

import re
import shutil

import pytest
from run_folders import leave

from fedapps.results.report import write_report
from fedapps.results.runs import read_runs

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no browser is installed")
METHODS = ("fedavg", "fedper", "tent")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Three methods with two seeds each; fedper serves no novel client."""
    folder = tmp_path_factory.mktemp("runs")
    for place, method in enumerate(METHODS):
        for seed in (0, 1):
            novel = [] if method == "fedper" else [0.9 - 0.1 * place, 0.5]
            leave(folder, method, seed, novel, train=(0.5, 0.25), curve=(0.25, 0.5, 0.125 * place))
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
