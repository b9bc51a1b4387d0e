"""Tables of a page, made from run folders and from records of measurements."""

import json

import pytest
from run_folders import leave

from experiments import coverage
from experiments.fill_page import main, with_records
from experiments.record_table import record_table


def test_a_table_is_replaced_and_the_text_around_it_stays(tmp_path):
    """TENT gains 4 points on FedAvg's 50 %; a second filling changes nothing."""
    leave(tmp_path / "runs" / "iid", "fedavg", 0, [0.5])
    leave(tmp_path / "runs" / "iid", "tent", 0, [0.54])
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\n<!-- fedapps table runs --scores gain -->\nold\n<!-- end -->\n\nα stays.\n"
        "\n<!-- fedapps table runs/iid --scores harmed --against tent -->\n<!-- end -->\n"
    )
    main([page], tmp_path)
    text = page.read_text()
    assert text.startswith("# Title\n\n") and "\n\nα stays.\n" in text and "old" not in text
    assert "`fedapps table runs --scores gain`" in text and "| tent | 4.00 |" in text
    assert "| fedavg | 100.00 | 1 |" in text
    main([page], tmp_path)
    assert page.read_text() == text
    page.write_text("<!-- fedapps table absent --scores gain -->\n<!-- end -->")
    with pytest.raises(RuntimeError, match="absent"):
        main([page], tmp_path)


@pytest.fixture
def records(tmp_path, monkeypatch):
    """A record of FedTTA's Table 1, which has 94.69 and 95.06 for FedAvg, 98.51 and 98.44 for
    TENT."""
    common = {"column": "MNIST", "seeds": [3, 5], "rounds": 7, "dataset": "mnist", "code": ""}
    values = [("fedavg", "novel", 95.2875, 0.25), ("tent", "novel", 98.5, None),
              ("fedavg", "train", 90.0, 1.5)]  # fmt: skip
    cells = []
    for row, score, value, spread in values:
        cells.append({**common, "row": row, "score": score, "value": value, "spread": spread})
    record = {"table": "fedtta/table1", "note": "by hand", "cells": cells}
    (tmp_path / "measured").mkdir()
    (tmp_path / "measured" / "one.json").write_text(json.dumps(record))
    monkeypatch.setattr(coverage, "MEASURED", tmp_path / "measured")
    return record


def lines_of(table):
    return [line for line in table.splitlines() if line.startswith("|")]


def test_a_record_has_its_values_beside_the_published_ones(records):
    """An unmeasured cell has a dash, and what all values share stands below."""
    table = record_table("one")
    assert lines_of(table) == [
        "|  | novel clients, % | published | training clients, % | published |",
        "| --- | --- | --- | --- | --- |",
        "| fedavg | 95.29 ± 0.25 | 94.69 | 90.0 ± 1.5 | 95.06 |",
        "| tent | 98.50 | 98.51 | – | – |",
    ]
    assert table.endswith(
        "*data mnist; seeds 3, 5; rounds 7; by hand; "
        "measured before records kept the version of the code*"
    )


def test_a_part_of_a_record_and_a_turned_one(records):
    part = record_table("one --rows tent --scores novel-accuracy")
    assert lines_of(part)[2:] == ["| tent | 98.5 | 98.51 |"]
    assert lines_of(record_table("one --scores novel-accuracy --turned")) == [
        "|  | fedavg | tent |",
        "| --- | --- | --- |",
        "| novel clients, % | 95.29 ± 0.25 | 98.50 |",
        "| published | 94.69 | 98.51 |",
    ]


def test_values_of_other_data_have_no_published_one_beside_them(records, tmp_path):
    for cell in records["cells"]:
        cell["dataset"] = "fashion-mnist"
    (tmp_path / "measured" / "one.json").write_text(json.dumps(records))
    head, *_ = lines_of(record_table("one --scores novel-accuracy"))
    assert head == "|  | novel clients, %, on fashion-mnist |"


@pytest.mark.parametrize("words, message", [
    ("two", "no record 'two'; known: one"),
    ("one --rows tant", "the record has no row 'tant'; known: fedavg; tent"),
    ("one --columns CIFAR", "the record has no column 'CIFAR'; known: MNIST"),
    ("one --scores novel", "known: novel-accuracy; train-accuracy"),
    ("one --turn", "unrecognized arguments: --turn"),
])  # fmt: skip
def test_what_a_record_does_not_have_is_refused(records, words, message):
    with pytest.raises(ValueError, match=message):
        record_table(words)


def test_tables_of_records_are_filled_without_runs(records, tmp_path):
    """A command's table stays."""
    page = tmp_path / "page.md"
    command = "<!-- fedapps table absent -->\nits table\n<!-- end -->\n"
    page.write_text(f"above\n<!-- record one -->\nold\n<!-- end -->\nbelow\n{command}")
    main([page])
    text = page.read_text()
    assert "old" not in text and record_table("one") in text and command in text
    assert text.startswith("above\n") and "\nbelow\n" in text
    assert with_records(text) == text
