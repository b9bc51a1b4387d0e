"""A personal model as an ONNX file, by torch's exporter, checked by onnxruntime."""

from pathlib import Path

import numpy as np
import torch

from fedapps.common import installed
from fedapps.service.delivery import ONNX, PersonalModel

REQUIRED = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-3  # of logits, absolute and relative


def check_installed() -> None:
    """Raise ValueError if the extra is not installed."""
    installed.check_installed("--onnx", REQUIRED, "onnx")


def export(model: PersonalModel, shape: tuple[int, ...], folder: Path) -> Path:
    """Write the model with its preprocessing, for float32 inputs (n, *shape) in [0, 1].

    Raises ValueError if the file's logits are not the model's."""
    import onnxruntime

    file = folder / ONNX
    x = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0))
    torch.onnx.export(
        model, (x,), file, dynamo=True, dynamic_shapes={"x": {0: torch.export.Dim("n")}},
        input_names=["x"], output_names=["logits"], external_data=False, verbose=False,
    )  # fmt: skip
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for rows in (x, x[:2]):  # any number of samples
        (logits,) = session.run(None, {"x": rows.numpy()})
        with torch.no_grad():
            error = np.abs(logits - (expected := model(rows).numpy()))
        if not (error <= TOLERANCE * (1 + np.abs(expected))).all():
            file.unlink()
            raise ValueError(f"the ONNX file differs from the model by up to {error.max():g}")
    return file
