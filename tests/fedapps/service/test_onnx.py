"""A personal model as an ONNX file: what it takes, and which models have none."""

import numpy as np
import pytest
import torch
from small_runs import SMALL
from torch import nn

import fedapps
from fedapps.results.card import Card
from fedapps.serverapp import run_in_process
from fedapps.service.delivery import PersonalModel
from fedapps.service.onnx import export

onnxruntime = pytest.importorskip("onnxruntime")


class Words(nn.Module):
    """The mean of the words' vectors."""

    def __init__(self):
        super().__init__()
        self.vectors = nn.Embedding(9, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, ids):
        return self.out(self.vectors(ids).mean(1))


def test_tokens_are_whole_numbers(tmp_path):
    """Of decimals the file would take tokens that are rounded down."""
    card = Card("fedavg", "mine", "words", (5,), ("a", "b"), 1.0, 0.0, 1.0, inputs="tokens")
    model = PersonalModel(Words(), card, {}).eval()
    session = onnxruntime.InferenceSession(export(model, (5,), tmp_path))
    assert [given.type for given in session.get_inputs()] == ["tensor(int64)"]
    for count in (1, 7):
        ids = np.random.default_rng(0).integers(0, 9, (count, 5))
        (logits,) = session.run(None, {"x": ids})
        expected = model(torch.from_numpy(ids)).detach().numpy()
        assert logits == pytest.approx(expected, abs=1e-5)


def test_values_are_in_their_own_unit(tmp_path, monkeypatch):
    """A hospital that runs the file reads doses, not deviations from their mean. Torch's exporter,
    which takes seconds, is left out."""
    written = []  # the module and the names of its outputs

    class Session:
        def __init__(self, file, **options):
            ((self.module, _),) = written

        def run(self, names, inputs):
            return (self.module(torch.from_numpy(inputs["x"])).detach().numpy(),)

    def write(module, args, file, *, output_names, **options):
        written.append((module, output_names))

    monkeypatch.setattr(torch.onnx, "export", write)
    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    card = Card("fedavg", "mine", "linear", (3,), ("dose", "days"), 1.0, 0.0, 1.0, task="values",
                target_mean=(2000.0, 0.5), target_std=(100.0, 0.01))  # fmt: skip
    model = PersonalModel(nn.Linear(3, 2), card, {}).eval()
    export(model, (3,), tmp_path)
    ((module, names),) = written
    assert names == ["values"]
    x = torch.rand(5, 3)
    expected = model.predict(x)
    assert expected[:, 0].min() > 1500
    torch.testing.assert_close(module(x), expected)


def test_a_model_that_learns_while_it_predicts_has_no_file(tmp_path):
    """The delivered model stays."""
    config = SMALL | {"method": "memo", "memo.views": 2, "output-dir": str(tmp_path / "run")}
    run_in_process(config)
    model = fedapps.load(tmp_path / "run").personalize(torch.rand(4, 1, 8, 8))
    model.save(tmp_path / "mine")
    with pytest.raises(
        ValueError, match=r"model of memo cannot be written as ONNX \(.*\), as none"
    ):
        export(model, (1, 8, 8), tmp_path / "mine")
    names = {file.name for file in (tmp_path / "mine").iterdir()}
    assert "model.safetensors" in names and "model.onnx" not in names


def test_a_file_that_differs_from_the_model_replaces_none(tmp_path, monkeypatch):
    """Nor does one whose process is killed before it is compared."""
    card = Card("fedavg", "mine", "words", (5,), ("a", "b"), 1.0, 0.0, 1.0, inputs="tokens")
    file = tmp_path / "model.onnx"
    file.write_bytes(b"old")
    seen = []

    class Session:
        def __init__(self, path, **options):
            seen.append((path.parent, path != file, file.read_bytes()))

        def run(self, names, given):
            return [np.full((len(given["x"]), 2), 9.0)]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    with pytest.raises(ValueError, match="differs from the model"):
        export(PersonalModel(Words(), card, {}).eval(), (5,), tmp_path)
    assert seen == [(tmp_path, True, b"old")]
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
