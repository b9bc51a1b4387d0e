"""A personal model as an ONNX file, by torch's exporter, checked by onnxruntime."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from clients.core.evaluation import predicted
from fedapps.common import installed
from fedapps.common.new_files import replaced
from fedapps.common.tasks import VALUES
from fedapps.service.delivery import ONNX, PersonalModel
from partitions.datasets.description import TOKENS

REQUIRED = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-3  # of logits, absolute and relative


class InUnits(nn.Module):
    """A model for values whose outputs (n, k) are in the labels' own unit, float64."""

    def __init__(self, model: PersonalModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """What `PersonalModel.predict` gives."""
        return predicted(self.model(x), self.model.card.targets)


def check_installed() -> None:
    """Raise ValueError if the extra is not installed."""
    installed.check_installed("--onnx", REQUIRED, "onnx")


def export(model: PersonalModel, shape: tuple[int, ...], folder: Path) -> Path:
    """Write the model with its preprocessing, for float32 inputs (n, *shape) in [0, 1], or for
    tokens, int64. Its output `logits` is (n, C), and `values` (n, k) is in the labels' own unit.

    Raises ValueError if the model cannot be written, as one that learns while it predicts, and if
    the file's outputs are not the model's."""
    with replaced(folder / ONNX) as file:  # nobody sees a part of it, nor one that differs
        _export(model, shape, file)
    return folder / ONNX


def _export(model: PersonalModel, shape: tuple[int, ...], file: Path) -> None:
    """Write and check the file. Errors as `export`."""
    import onnxruntime

    exported: nn.Module = model
    name = "logits"
    if model.card.task == VALUES:
        exported = InUnits(model).eval()
        name = "values"
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(3, *shape, generator=generator)
    if model.card.inputs == TOKENS:
        x = torch.randint(0, 2, (3, *shape), generator=generator)  # which every network takes
    try:
        torch.onnx.export(
            exported, (x,), file, dynamo=True, dynamic_shapes={"x": {0: torch.export.Dim("n")}},
            input_names=["x"], output_names=[name], external_data=False, verbose=False,
        )  # fmt: skip
    except Exception as error:  # torch raises many kinds of errors, also for a user's network
        reason = str(error.__cause__ or error).partition("\n")[0]
        raise ValueError(
            f"the model of {model.card.method} cannot be written as ONNX ({reason:.200}), as none "
            f"that learns while it predicts; {file.parent} holds all other files"
        ) from error
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for rows in (x, x[:2]):  # any number of samples
        (outputs,) = session.run(None, {"x": rows.numpy()})
        if model.card.task == VALUES and model.card.target_std:
            outputs = (outputs - model.card.target_mean) / model.card.target_std
        with torch.no_grad():
            difference = np.abs(outputs - (expected := model(rows).numpy()))
        if not (difference <= TOLERANCE * (1 + np.abs(expected))).all():
            raise ValueError(f"the ONNX file differs from the model by up to {difference.max():g}")
