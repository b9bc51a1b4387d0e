"""The coverage page: what an item's cells make of it, by hand, and the committed items."""

import re

import pytest

from clients.methods.fedprox import FedProxClient
from experiments import coverage
from experiments.check_published import of_method
from experiments.coverage import (
    IN_PART,
    NOT,
    PAGE,
    ROOT,
    WHOLLY,
    Item,
    is_stale,
    measured,
    read_items,
    read_records,
    row_of_page,
)
from experiments.fingerprint import fingerprint, settings_of
from fedapps.reproduction import parts_of
from fedapps.results.method_code import code_of
from fedapps.settings.config import defaults
from fedapps.settings.experiments import experiments_root
from fedapps.settings.published_tables import cells, published_tables, read_table
from fedapps.settings.variants import Variant


def cell(row, column="MNIST", seeds=(0, 1, 2), dataset="mnist", **more):
    return {
        **{"column": column, "row": row, "score": "novel", "value": 95.0, "spread": 0.5},
        **{"seeds": list(seeds), "rounds": 200, "dataset": dataset, "code": ""},
    } | more


def item(rows=("fedavg", "tent"), columns=("MNIST",), **more):
    """Two cells of FedTTA's Table 1, which has 94.69 and 98.51 for them."""
    return Item("FedTTA", "table", "Table 1", "clients/methods/", ["one"], "fedtta/table1",
                columns, rows, "mnist", **more)  # fmt: skip


def record(cells):
    return {"one": {"table": "fedtta/table1", "cells": cells}}


@pytest.mark.parametrize("cells, status", [
    ([cell("fedavg"), cell("tent")], WHOLLY),
    ([cell("fedavg")], IN_PART),  # a row is missing
    ([cell("fedavg"), cell("tent", seeds=[0, 1])], IN_PART),  # two seeds
    ([cell("fedavg"), cell("tent", dataset="digits")], IN_PART),  # other data than the paper's
    ([cell("fedavg"), cell("tent", column="CIFAR-10")], IN_PART),  # another column
    ([cell("scaffold")], NOT),
])  # fmt: skip
def test_an_item_is_measured_wholly_by_all_its_cells(cells, status):
    assert measured(item(), record(cells)).status == status


def test_what_an_item_lacks_makes_it_partial():
    records = record([cell("fedavg"), cell("tent")])
    assert measured(item(lacks="the paper's users"), records).status == IN_PART
    with pytest.raises(ValueError, match="names the record 'one'; known: two"):
        measured(item(), {"two": records["one"]})


def test_a_line_of_the_page_by_hand():
    """95 − 94.69 = 0.31 and 95 − 98.51 = −3.51: mean size 1.91, largest −3.51."""
    line = row_of_page(measured(item(), record([cell("fedavg"), cell("tent")])))
    assert "| wholly | mnist | 2, 95.00 to 95.00 | 2, 94.69 to 98.51 |" in line
    assert "| 1.91, at most −3.51 | 2 of 2 | – |" in line
    one = row_of_page(measured(item(["fedavg"]), record([cell("fedavg")])))
    assert "| 95.00 ± 0.50 | 94.69 | 0.31, at most +0.31 |" in one


def test_a_value_is_stale_unless_its_version_is_that_of_the_code():
    assert is_stale(cell("tent bits=true"))
    assert is_stale(cell("tent", code="0123456789ab"))
    assert not is_stale(cell("tent bits=true", code=code_of("tent")))


def test_a_value_with_a_fingerprint_is_stale_if_the_method_computes_something_else(monkeypatch):
    """Whatever the version of its files is. Numbers agree up to rounding. Another setting, one that
    was removed, and a term that is left out make the value stale."""
    settings = {"method": "fedprox", "fedprox.mu": 0.5}
    numbers = fingerprint(settings)
    assert numbers == fingerprint(settings) and numbers["squares"] > 0
    assert {"train-loss, round 2", "novel-loss, round 1"} <= numbers.keys()

    def value(numbers, **more):
        fingerprinted = {"settings": settings | more, "numbers": numbers}
        return cell("fedprox", code="0123456789ab", fingerprint=fingerprinted)

    rounded = {name: number * (1 + 1e-6) for name, number in numbers.items()}
    assert not is_stale(value(rounded))
    assert is_stale(value(numbers | {"squares": numbers["squares"] * 1.01}))
    assert is_stale(value(numbers, **{"fedprox.mu": 0.6}))
    assert is_stale(value(numbers, **{"fedprox.nu": 0.6}))
    coverage.numbers_now.cache_clear()
    train = FedProxClient.fit_locally

    def without_drift(self, config, *, weight_decay, drift):
        return train(self, config, weight_decay=weight_decay)

    monkeypatch.setattr(FedProxClient, "fit_locally", without_drift)
    assert is_stale(value(numbers))
    coverage.numbers_now.cache_clear()


def test_the_settings_of_a_fingerprint_by_hand():
    """Those of the method that are no defaults, at most three steps, noise that repeats, and no
    settings of the data. `lenet` takes no images as small as the digits."""
    config = Variant.parse("odpfl-hn encoder=ds-sphere").apply(
        defaults()
        | {"partition": "dirichlet", "partition.alpha": 3.0, "num-clients": 90, "model": "lenet"}
        | {"local-steps": 40, "standardize": "channels", "odpfl-hn.descriptor-epsilon": 1.0}
        | {"odpfl-hn.fine-tune-rounds": 1}
    )
    assert settings_of(config) == {
        "method": "odpfl-hn", "model": "mlp", "local-steps": 3, "odpfl-hn.fine-tune-rounds": 1,
        "odpfl-hn.encoder": "ds-sphere", "odpfl-hn.descriptor-epsilon": 1.0,
        "standardize": "training-clients", "dp-generator": "seeded",
    }  # fmt: skip


def test_three_training_clients_certify_a_choice_in_the_small_run():
    settings = settings_of(defaults() | {"method": "auto", "auto.alpha": 0.1})
    small = {"auto.alpha": 0.5, "auto.plays": 2, "auto.held-out": 0.4}
    assert settings == {"method": "auto", "local-steps": 3} | small
    assert fingerprint(settings)


def test_every_item_has_a_number_or_the_reason_why_not():
    records = read_records()
    names = set()
    for one in read_items():
        found = measured(one, records)
        assert found.status == WHOLLY or one.lacks.strip(), one.name
        assert (ROOT / one.code).exists(), one.code
        if one.table:
            columns = {
                column["name"] for column in read_table(one.table, experiments_root())["columns"]
            }
            assert set(one.columns) <= columns, one.name
        names.add((one.paper, one.kind, one.name))
    assert len(names) == len(read_items()) == 134


def test_a_table_without_a_number_that_mnist_could_have_says_what_that_would_take():
    """That the paper's data are not there is no reason where `--data mnist` runs the structure."""
    for one in read_items():
        if one.records or not one.table:
            continue
        content = read_table(one.table, experiments_root())
        if content.get("without-experiment"):
            continue
        replaced: set[str] = set()
        for part in parts_of(one.table, "mnist"):
            if part.substitute:
                replaced.update(column["name"] for column in part.columns)
        if replaced & (set(one.columns) or replaced):
            assert f"`fedapps reproduce {one.table} --data mnist`" in one.lacks, one.name
            assert re.search(r"about \d+ (hours|days) on two cores", one.lacks), one.name


# Its record has a column for each ε and number of samples.
OTHER_COLUMNS = {"odpfl_hn/figure4"}


@pytest.mark.parametrize(
    "name", sorted(published_tables(experiments_root()).keys() - OTHER_COLUMNS)
)
def test_items_name_every_row_and_column_of_a_table(name):
    """An item without a row counts as measured wholly though that row is not measured."""
    items = [one for one in read_items() if one.table == name]
    for column in read_table(name, experiments_root())["columns"]:
        if column.get("derived"):
            continue
        named: set[str] = set()
        for one in items:
            if not one.columns or column["name"] in one.columns:
                named.update(one.rows)
        assert named == cells(column) | column.get("group", {}).keys(), column["name"]


def test_an_item_of_a_table_says_that_its_runs_were_shorter_or_departed():
    """The published number of rounds is the table's. A record's note names what departs."""
    records = read_records()
    for one in read_items():
        if not one.table:
            continue
        notes = [records[name]["note"] for name in one.records if "note" in records[name]]
        assert one.lacks.strip() or not notes, (one.name, notes)
        content = read_table(one.table, experiments_root())
        for value in measured(one, records).cells:
            method = str(value["row"]).partition(" ")[0]
            rounds = set()
            for column in content["columns"]:
                if not one.columns or column["name"] == value["column"]:
                    settings = (content.get("settings", {}), column.get("settings", {}))
                    rounds.add(of_method(method, *settings).get("rounds", value["rounds"]))
            assert rounds == {value["rounds"]} or "rounds" in one.lacks, one.name


def test_the_page_has_every_item():
    """With its present status and what is missing, though not the values, which take longer."""
    lines = PAGE.read_text("utf-8").splitlines()
    records = read_records()
    headings = [number for number, line in enumerate(lines) if line.startswith("## ")]
    papers = {lines[start][3:]: start for start in headings}
    for one in read_items():
        start = papers[one.paper]
        end = min([number for number in headings if number > start], default=len(lines))
        status = measured(one, records).status
        head = f"| {one.kind} | {one.name} | `{one.code}` | {status} |"
        (line,) = (line for line in lines[start:end] if line.startswith(head))
        assert line.endswith(f"| {one.lacks or '–'} |"), one.name
