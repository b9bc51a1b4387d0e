"""Each line of the page *Your own data* works: its file is made in the form that it names, and the
run that it writes reads what the line says."""

import json
import re
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from documented_code import written
from PIL import Image
from small_runs import ALL_SAMPLES, SMALL, fedapps, federate

from clients.models import build_model
from fedapps.common import external_code
from fedapps.settings.config import override, parse_override
from partitions import federation

PAGE = (Path(__file__).parents[1] / "docs" / "how-to" / "own-data.md").read_text("utf-8")
LINES = re.findall(r"^\|.*\| (?:nothing.*?)?`(dataset=.*?)`.* \|$", PAGE, re.M)
NOT_HERE = ("dataset=femnist",)
N = 48
HOSPITALS = np.array(["north", "south", "west"])[np.arange(N) // 2 % 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files that the page's lines name, each with a pattern that can be learnt."""
    folder = tmp_path_factory.mktemp("data")
    draws = np.random.default_rng(0)
    y = np.arange(N) % 2
    noise = draws.standard_normal(N)
    table = pd.DataFrame(
        {
            "patient_id": 1000 + np.arange(N),
            "age": (50 + 20 * y + 3 * noise).round(1),
            "dose": draws.random(N).round(3),
            "smoker": draws.choice(["yes", "no"], N),
            "hospital": HOSPITALS,
        }
    )
    labeled = table.assign(diagnosis=np.array(["well", "ill"])[y])
    labeled.to_csv(folder / "patients.csv", index=False)
    labeled.to_parquet(folder / "patients.parquet")
    labeled.to_csv(folder / "european.csv", index=False, sep=";", decimal=",")
    labeled.assign(dose=table["dose"].where(noise < 1)).to_csv(folder / "gaps.csv", index=False)
    symptoms = {"fever": y, "cough": (table["dose"] > 0.5).astype(int)}
    table.assign(**symptoms).to_csv(folder / "symptoms.csv", index=False)
    table.assign(days=table["age"] / 3).to_csv(folder / "stays.csv", index=False)
    x = draws.standard_normal((N, 5)) + 2 * y[:, None]
    np.savez(folder / "arrays.npz", x=x, y=y, device=HOSPITALS)
    np.savez(folder / "one-hot.npz", x=x, y=np.eye(2)[y])
    np.savez(folder / "several.npz", x=x, y=np.stack([y, 1 - y, x[:, 0] > 1], 1))
    np.savez(folder / "counts.npz", x=draws.poisson(5 + 20 * y[:, None], (N, 4)), y=y)
    np.savez(folder / "grey.npz", x=draws.random((N, 8, 8)) / 2 + y[:, None, None] / 2, y=y)
    windows = draws.standard_normal((N, 3, 32)) + y[:, None, None]
    np.savez(folder / "windows.npz", x=windows, y=y)
    ids = draws.integers(1, 50, (N, 12)) + 50 * y[:, None]
    ids[:, 8:] = 0
    np.savez(folder / "texts.npz", x=ids, y=y)
    users = {}
    for user in range(4):
        labels = y[N // 4 * user :][: N // 4]
        texts = [("what a great day", "it is a bad one")[label] for label in labels]
        users[f"user {user}"] = {"x": texts, "y": labels.tolist()}
    content = {"users": list(users), "num_samples": [N // 4] * 4, "user_data": users}
    (folder / "messages.json").write_text(json.dumps(content))
    columns = {"x": x.tolist(), "label": y.tolist()}
    datasets.Dataset.from_dict(columns).save_to_disk(str(folder / "saved"))
    for number, hospital in enumerate(HOSPITALS):
        kind = ("benign", "malignant")[y[number]]
        pixels = draws.integers(0, 100, (9, 10)) + 100 * y[number]
        for place in (f"photos/{kind}", f"scans/{hospital}/{kind}", f"sorted/{kind}/{hospital}"):
            (folder / place).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / place / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """The page's networks, as a user has them."""
    with written(tmp_path_factory.mktemp("code")):
        external_code.allow("my_lab.sensors:Windows", "my_lab.texts:Words")
        yield


def settings_of(line, folder):
    """The settings that a line of the page writes, with the file in `folder`."""
    changes = dict(map(parse_override, line.split()))
    changes.setdefault("num-clients", 4)
    if changes.get("task") == "values":
        changes["lr"] = 0.01  # as `fedapps run` sets it for values
    return changes | {"dataset": str(folder / changes["dataset"])}


TABLE = "2 numeric columns scaled by the training clients' statistics, 2 of categories, 2 classes"
VECTORS = "vectors of 5 columns scaled by the training clients' statistics, 2 classes"
SAID = {  # words of the line → what a run says that it read
    "european.csv": TABLE,
    "gaps.csv": TABLE,
    "patients.parquet": TABLE,
    "partition.column=hospital": TABLE.replace("2 of cat", "1 of cat"),
    "smoker,hospital": "2 numeric columns scaled by the training clients' statistics, 2 classes",
    "age,dose": "2 numeric columns scaled by the training clients' statistics, 2 classes",
    "arrays.npz": VECTORS,
    "saved": VECTORS,
    "one-hot.npz": VECTORS,
    "several.npz": VECTORS.replace("2 classes", "3 labels, several at once"),
    "counts.npz": VECTORS.replace("5", "4"),
    "grey.npz": "images of 1 channel and 8×8 pixels, 2 classes",
    "photos": "images of 1 channel and 8×8 pixels, 2 classes",
    "scans": "images of 1 channel and 9×10 pixels, 2 classes",
    "sorted": "images of 1 channel and 9×10 pixels, 2 classes",
    "windows.npz": "signals of 3 channels and 32 steps scaled by the training clients' statistics",
    "texts.npz": "12 tokens each, 2 classes",
    "messages.json": "25 tokens each of the training clients' 8 most frequent words, 2 classes",
    "symptoms.csv": TABLE.replace("2 classes", "2 labels, several at once"),
    "stays.csv": TABLE.replace("2 classes", "1 value to predict (regression)"),
    "patients.csv": TABLE,
}


def said_of(line):
    return next(text for words, text in SAID.items() if words in line)


@pytest.mark.usefixtures("code")
@pytest.mark.parametrize("line", [line for line in LINES if line not in NOT_HERE])
def test_a_line_reads_what_it_says(line, folder):
    read = federation(override(SMALL | ALL_SAMPLES, settings_of(line, folder)))
    assert read.line.startswith(f"{N} rows, {said_of(line)}")


KINDS = {said_of(line): line for line in LINES if line not in NOT_HERE}  # a line for each kind


@pytest.mark.usefixtures("code")
@pytest.mark.parametrize("line", KINDS.values())
def test_each_kind_is_learnt(line, folder):
    changes = settings_of(line, folder)
    result, _ = federate(**override(SMALL | ALL_SAMPLES, changes | {"method": "fedavg", "seed": 1}))
    before, after = (result.train_metrics_clientapp[r]["loss"] for r in (1, 2))
    assert after < before


def test_the_page_has_a_line_for_each_form():
    assert len(LINES) > 20
    files = {line.split()[0] for line in LINES}
    assert len(files) > 15


def test_hospitals_are_the_clients(folder):
    """Each client has the images of one hospital, whichever level its folder is on."""
    lines = [line for line in LINES if "partition.column=folder" in line]
    assert len(lines) == 2
    for line in lines:
        read = federation(override(SMALL | ALL_SAMPLES, settings_of(line, folder)))
        assert [len(read.share(client).everything) for client in range(3)] == [N // 3] * 3
        assert read.dataset.classes == ("benign", "malignant")


@pytest.mark.usefixtures("code")
def test_tokens_of_padding_do_not_count():
    """The page's network gives padded rows the outputs of the rows alone."""
    network = build_model("my_lab.texts:Words", (6,), 2, seed=0)
    ids = torch.tensor([[3, 7, 9, 0, 0, 0]])
    torch.testing.assert_close(network(ids), network(ids[:, :3]))


def test_tokens_need_a_network_that_begins_with_an_embedding(folder):
    words = [f"dataset={folder / 'texts.npz'}", "inputs=tokens", "partition=iid", "num-clients=4"]
    said = fedapps("run", "--methods", "fedavg", *words, code=2)
    assert "inputs are tokens, and model is 'mlp', which takes numbers; set model to" in said


def test_a_folder_of_tables_names_what_to_write(folder, tmp_path):
    table = pd.read_csv(folder / "patients.csv")
    for hospital, rows in table.groupby("hospital"):
        rows.to_csv(tmp_path / f"{hospital}.csv", index=False)
    changes = {"dataset": str(tmp_path), "label": "diagnosis", "partition": "iid"}
    with pytest.raises(ValueError, match=r"3 CSV files, such as north\.csv.*a column that names"):
        federation(override(SMALL | ALL_SAMPLES, changes))
