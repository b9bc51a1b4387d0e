"""``fedapps run --from`` and ``--bound``."""

import json
import shutil

from fedapps.commands.main import cli

from typer.testing import CliRunner  # isort: skip

SMALL = ["num-clients=6", "rounds=2", "local-steps=3", "--engine", "in-process"]


def fedapps(*arguments, code=0):
    result = CliRunner().invoke(cli, [str(a) for a in arguments], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def test_novel_labeled_clients_join_a_saved_model(tmp_path):
    first, later = tmp_path / "first", tmp_path / "later"
    got = fedapps("run", "--methods", "pfedhn,fedavg", *SMALL, "--output", first)
    assert "cannot without labels" in got
    more = ["--engine", "in-process", "--output", later, "--methods", "pfedhn", "novel-rounds=2"]
    assert "cannot without labels" not in fedapps("run", "--from", first, *more)
    summary = json.loads((later / "pfedhn-seed0" / "summary.json").read_text())
    before = json.loads((first / "pfedhn-seed0" / "summary.json").read_text())
    assert summary["rounds"] == 2
    assert summary["novel"]["clients"] == 3
    assert summary["train"]["accuracy"] == before["train"]["accuracy"]  # φ is frozen


def test_what_clients_keep_to_themselves_is_part_of_a_saved_run(tmp_path):
    """Evaluated again, methods whose parts stay on clients score as they did in the run; without
    these parts, or a strategy's own, they are refused, not evaluated wrongly."""
    first, later = tmp_path / "first", tmp_path / "later"
    methods = "pfl-ensemble,lg-fedavg fedavg-rounds=1"
    options = [*SMALL, "rounds=4", "evaluate-every=1"]
    fedapps("run", "--methods", methods, *options, "--output", first)
    fedapps("run", "--from", first, *SMALL[-2:], "--output", later)
    for run in ("pfl-ensemble-seed0", "lg-fedavg,fedavg-rounds=1-seed0"):
        before, after = (
            json.loads((folder / run / "summary.json").read_text()) for folder in (first, later)
        )
        assert {c: got["accuracy"] for c, got in before["per_client"].items()} == {
            c: got["accuracy"] for c, got in after["per_client"].items()
        }
    shutil.rmtree(first / "pfl-ensemble-seed0" / "clients")
    more = ["--methods", "pfl-ensemble", *SMALL[-2:], "--output", tmp_path / "refused"]
    assert "holds no clients/" in fedapps("run", "--from", first, *more, code=2)


def test_the_bounds_columns_add_up(tmp_path):
    got = fedapps("run", "--methods", "fedavg", *SMALL, "--output", tmp_path, "--bound")
    assert "êrr + ½ d̂" in got
    summary = json.loads((tmp_path / "fedavg-seed0" / "summary.json").read_text())
    terms = summary["train"]["training_error"], summary["novel"]["half_distance"]
    assert f"{terms[0]:.3f} │ {terms[1]:.3f} │ {sum(terms):.3f}" in got


def test_a_folder_without_a_run_is_refused(tmp_path):
    assert "holds no finished run" in fedapps("run", "--from", tmp_path, *SMALL, code=2)
    fedapps("run", "--methods", "fedavg", *SMALL, "--output", tmp_path)
    other = fedapps(
        "run", "--from", tmp_path, "--methods", "pfedhn", "--engine", "in-process", code=2
    )
    assert "model.safetensors" in other


def test_a_saved_run_is_not_scored_by_what_it_was_trained_on(tmp_path):
    """Of 1797 digits six clients have 299 or 300 each. Who keeps 0.3 of them for validation, after
    0.1, has 60 among them that were trained on: 180 of the three training clients. Inputs that are
    turned otherwise were not trained on by anybody else."""
    first, turned, later = (tmp_path / name for name in ("first", "turned", "later"))
    fraction, end = "partition.validation-fraction", [*SMALL[-2:], "--output", later]
    options = ["--methods", "fedavg", *SMALL, "--output"]
    fedapps("run", "partition=iid", f"{fraction}=0.1", *options, first)
    got = fedapps("run", "--from", first, f"{fraction}=0.3", *end, code=2)
    assert "180 of the" in got
    assert f"where {fraction} was 0.1" in got
    fedapps("run", "partition=rotated", "partition.samples=100", *options, turned)
    fedapps("run", "--from", turned, "partition.novel-angles=90", *end)
    assert "were trained on" in fedapps("run", "--from", turned, "data-seed=1", *end, code=2)
