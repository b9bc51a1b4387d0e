"""The report in a real browser: its numbers are summary.json's, and what can be clicked works."""

import json
import re
import shutil

import numpy as np
import pytest
from left import leave
from typer.testing import CliRunner

from fedapps.commands.main import cli
from fedapps.results.report import write_report
from fedapps.results.runs import read_runs

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no browser is installed")
METHODS = ("fedavg", "fedper", "tent")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three methods with two seeds each; fedper serves no novel client."""
    folder = tmp_path_factory.mktemp("runs")
    keys = ["num-clients=6", "rounds=3", "local-steps=3", "evaluate-every=1"]
    options = ["--methods", ",".join(METHODS), "--seeds", "0,1", "--engine", "in-process"]
    done = CliRunner().invoke(cli, ["run", *keys, *options, "--output", str(folder)])
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(params=[(1280, "light"), (390, "dark")], ids=["desk", "phone"])
def page(request, runs, browser):
    """The report, on a desk and on a phone; it asks nobody for anything and raises no error."""
    width, scheme = request.param
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    errors, asked = [], []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    page.on("request", lambda request: asked.append(request.url))
    page.goto((runs / "report.html").as_uri())
    yield page
    assert errors == []
    assert len(asked) == 1
    page.close()


def summaries(folder, method):
    return [json.loads((folder / f"{method}-seed{s}/summary.json").read_text()) for s in (0, 1)]


def column(page, place):
    return [row.locator("td").nth(place).inner_text() for row in page.locator(
        "#results tbody tr:visible").all()]  # fmt: skip


def test_the_table_is_that_of_the_summaries_and_sorts(page, runs):
    methods = column(page, 0)
    assert methods == list(METHODS)
    values = {
        role: {m: [100 * s[role]["accuracy"] for s in summaries(runs, m) if s[role]]
               for m in METHODS}
        for role in ("train", "novel")
    }  # fmt: skip
    for place, role in ((1, "train"), (2, "novel")):
        for method, cell in zip(methods, column(page, place), strict=True):
            if told := values[role][method]:
                assert cell == f"{np.mean(told):.2f} ± {np.std(told, ddof=1):.2f}"
            else:
                assert cell == "cannot without labels"
    head = page.locator("#results th").first
    head.click()
    assert column(page, 0) == list(METHODS)[::-1]
    head = page.locator("#results th").nth(2)
    for descending in (True, False):
        head.click()
        cells = [float(cell.split(" ± ")[0]) for cell in column(page, 2)[:2]]
        assert cells == sorted(cells, reverse=descending)
        assert column(page, 0)[2] == "fedper"  # what has no number stands last


def test_a_method_is_switched_off_and_on(page):
    lines = page.locator("#rounds .panel").first.locator("path[stroke]")
    dots = page.locator("#clients .panel").first.locator("circle")
    before = dots.count()
    assert lines.count() == 3
    button = page.locator("#methods button", has_text="fedper")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert column(page, 0) == ["fedavg", "tent"]
    assert lines.count() == 2
    assert dots.count() == before * 2 // 3
    button.click()
    assert lines.count() == 3


def test_values_stand_under_the_pointer(page, runs):
    """At the right edge the last round; the mean and the range over both seeds."""
    svg = page.locator("#rounds .panel").first.locator("svg")
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 12, box["y"] + box["height"] / 2)
    lines = page.locator("#tip").inner_text().split("\n")
    assert lines[0] == "round 3"
    told = [100 * s["last"]["train"]["accuracy"] for s in summaries(runs, "tent")]
    expected = f"tent: {np.mean(told):.2f} ({min(told):.2f} – {max(told):.2f})"
    assert expected in lines
    assert page.locator("#rounds .panel").nth(1).inner_text().endswith("not scored: fedper")


def test_a_client_has_a_page_of_its_own(page, runs):
    page.locator("#clients circle").first.scroll_into_view_if_needed()
    page.locator("#clients circle").first.click(force=True)
    page.wait_for_selector("#one:not([hidden])")
    client = re.search(r"Client (\d+)", page.locator("#one h2").inner_text())[1]
    found = {}
    for row in page.locator("#one tbody tr").all():
        method, seed, _role, samples, accuracy, last, _rank = row.locator("td").all_inner_texts()
        found[method, int(seed)] = (samples, accuracy, last)
    for method in METHODS:
        for seed, summary in enumerate(summaries(runs, method)):
            if (told := summary["per_client"].get(client)) is None:
                continue
            last = summary["last"]["per_client"][client]["accuracy"]
            percents = [f"{100 * value:.2f}" for value in (told["accuracy"], last)]
            assert found.pop((method, seed)) == (str(told["examples"]), *percents)
    assert not found
    page.get_by_text("← all clients").click()
    page.wait_for_selector("#all:not([hidden])")
    page.locator("#choose").select_option(client)
    page.wait_for_selector("#one:not([hidden])")


def test_costs_are_told(page, runs):
    row = page.locator("#costs tbody tr").first.locator("td").all_inner_texts()
    told = summaries(runs, "fedavg")
    assert row[0] == "fedavg"
    assert row[3] == f"{np.mean([s['megabytes_per_client_round']['down'] for s in told]):.3f}"
    assert row[5] == "none"
    assert page.locator("#costs .bar").first.locator("div").count() == 4  # phases of a round


def test_a_private_run_hides_its_traffic(browser, tmp_path):
    leave(tmp_path, "fedavg", 0, [0.5], curve=(0.25, 0.5))
    file = tmp_path / "fedavg-seed0" / "summary.json"
    hidden = {"dropped_replies": None, "per_client": {}}
    hidden |= {"megabytes_per_client_round": {"down": None, "up": None}}
    file.write_text(json.dumps(json.loads(file.read_text()) | hidden))
    page, errors = browser.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(write_report(read_runs(tmp_path)[0], tmp_path).as_uri())
    cells = page.locator("#costs tbody tr td").all_inner_texts()
    assert (cells[0], cells[3:]) == ("fedavg", ["–", "–", "–"])
    assert page.locator("#rounds path[stroke]").count() == 1
    assert not page.locator("#clients").is_visible()
    assert errors == []
    page.close()


def test_it_fits_the_screen_and_turns_dark(page):
    """Nothing but tables scrolls sideways; the button turns what the system prefers."""
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= page.viewport_size["width"]
    colour = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(colour)
    assert before == (
        "rgb(20, 23, 27)" if page.viewport_size["width"] == 390 else "rgb(255, 255, 255)"
    )
    page.locator("#theme").click()
    assert page.evaluate(colour) != before
