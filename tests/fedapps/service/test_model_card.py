"""The model card, and the upload to a hub on this machine."""

import base64
import json
import shutil
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import yaml

from fedapps.files import write_text
from fedapps.saved import read_json
from fedapps.serverapp import run_in_process
from fedapps.service.finished_run import FinishedRun
from fedapps.service.model_card import PATHS, facts, model_card, push, write_model
from fedapps.settings.config import defaults

REPO = "lab/tent-digits"
X = torch.rand(12, 1, 8, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("card") / "tent"
    config = defaults() | {
        "method": "tent",
        "output-dir": str(place),
        "num-clients": 4,
        "rounds": 1,
    }
    run_in_process(config | {"local-steps": 1, "evaluate-every": 1})
    return place


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's API that an upload asks for; files are kept in `server.files`."""

    def do_POST(self):
        length = self.headers.get("Content-Length")
        if length is None:  # chunks
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(length))
        if self.path == "/api/repos/create":
            self.server.created = json.loads(body)
            self.answer({"url": f"{self.address()}/{REPO}", "id": REPO})
        elif self.path.endswith("/preupload/main"):
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]
            self.answer({"files": modes})
        elif self.path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.server.files[line["value"]["path"]] = content
            self.answer({"commitUrl": f"{self.address()}/{REPO}/commit/1", "commitOid": "1"})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        else:
            self.send_error(404)

    def do_GET(self):
        self.answer({"id": REPO, "sha": "0", "siblings": []})

    def address(self):
        return f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *text):
        pass


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files = {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_the_card_has_front_matter_scores_and_the_way_to_use_it(folder):
    text = model_card(FinishedRun(folder), REPO)
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["library_name"] == "fedapps" and "tent" in front["tags"]
    (index,) = front["model-index"]
    scores = {m["name"]: m["value"] for r in index["results"] for m in r["metrics"]}
    evaluation = read_json(folder / "summary.json")["evaluation"]
    assert scores["accuracy of novel clients (mean)"] == evaluation["novel-accuracy"]
    assert scores["accuracy of training clients (mean)"] == evaluation["train-accuracy"]
    assert f'snapshot_download("{REPO}")' in text and "num-clients=" in text
    assert str(folder) not in text


def test_the_card_has_the_scores_of_the_round_whose_model_is_saved(folder, tmp_path):
    """Training clients report round 1, novel clients and the model round 3. A summary of an earlier
    release does not say what training clients had there; it does where the rounds are the same."""
    run = FinishedRun(folder)
    best, saved = {"accuracy": 0.9, "clients": 2}, {"accuracy": 0.7, "clients": 2}
    del run.summary["evaluation"]
    run.summary |= {"best_round": 1, "novel_round": 3, "novel": {"accuracy": 0.6, "clients": 2}}
    run.summary |= {"train": best, "saved_model_train": saved}

    def told():
        front = yaml.safe_load(model_card(run, REPO).split("---\n")[1])
        scores = [m["value"] for r in front["model-index"][0]["results"] for m in r["metrics"]]
        return facts(run)["accuracy"], scores

    assert told() == ("training clients 70.00 %, novel clients 60.00 %", [0.7, 0.6])
    del run.summary["saved_model_train"]
    assert told() == ("training clients –, novel clients 60.00 %", [0.6])
    run.summary["best_round"] = 3
    assert told() == ("training clients 90.00 %, novel clients 60.00 %", [0.9, 0.6])


def test_a_regression_is_shown_with_its_error_and_the_name_of_its_value(folder):
    """Each topic leaves a blank before its text in the 21 characters of `fedapps show`."""
    run = FinishedRun(folder)
    run.card = replace(run.card, task="values", classes=("dose",))
    run.summary["evaluation"] = {"train-rmse": 12.5, "novel-rmse": 15.0}
    run.summary["saved_model_train"] = {"train-rmse": 12.5}
    shown = facts(run)
    assert shown["data"].endswith("; 1 value: dose")
    assert shown["RMSE"] == "training clients 12.5, novel clients 15"
    run.card = replace(run.card, classes=("dose", "days"))
    assert facts(run)["data"].endswith("; 2 values: dose, days")
    assert max(map(len, shown)) < 20


def test_texts_of_the_run_are_no_markup(folder, tmp_path):
    copy = tmp_path / "run"
    copy.mkdir()
    for file in folder.iterdir():
        if file.is_file():
            (copy / file.name).write_bytes(file.read_bytes())
    card = read_json(copy / "serving.json")
    card["classes"][0] = "a | [x](javascript:1) <script>"
    write_text(copy / "serving.json", json.dumps(card))
    text = model_card(FinishedRun(copy))
    assert r"a \| \[x\](javascript:1) \<script\>" in text


def test_of_the_users_data_the_last_component_is_told(folder, tmp_path):
    """In none of the files is a path of this machine."""
    own, out = tmp_path / "own", tmp_path / "out"
    shutil.copytree(folder, own)
    for name in ("config.toml", "serving.json", "summary.json"):
        text = (own / name).read_text()
        assert text.count('"digits"') == 1
        write_text(own / name, text.replace('"digits"', '"/home/me/secret/mine.npz"'))
    out.mkdir()
    write_model(FinishedRun(own), out, REPO)
    texts = {file.name: file.read_text() for file in out.iterdir() if file.suffix != ".safetensors"}
    assert len(texts) == 4
    for name, text in texts.items():
        assert "mine.npz" in text and "secret" not in text, name
    assert FinishedRun(out).card.dataset == "mine.npz"


def test_an_uploaded_run_serves_later_clients(folder, hub, tmp_path):
    address = f"http://127.0.0.1:{hub.server_port}"
    assert push(FinishedRun(folder), REPO, private=True, endpoint=address).endswith("/commit/1")
    assert hub.created.get("visibility", hub.created.get("private")) in ("private", True)
    assert {"README.md", "config.toml", "model.safetensors"} <= hub.files.keys()
    assert not {"token.json", ".lock"} & hub.files.keys()
    for name, content in hub.files.items():
        (tmp_path / name).write_bytes(content)
    downloaded = FinishedRun(tmp_path)
    assert not any(downloaded.config[key] for key in PATHS)
    expected, served = (run.personalize(X)(X) for run in (FinishedRun(folder), downloaded))
    torch.testing.assert_close(served, expected, rtol=0, atol=0)
