"""A personal model as an ONNX file, by torch's exporter, checked by onnxruntime."""

import importlib.util
from pathlib import Path

import numpy as np
import torch

from fedapps.service.delivery import ONNX, Personal

NEEDED = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-3  # of logits, absolute and relative


def check_installed() -> None:
    """Raise ValueError if the extra is not installed."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise ValueError(f"--onnx needs {', '.join(missing)}: pip install 'fedapps[onnx]'")


def export(model: Personal, shape: tuple[int, ...], folder: Path) -> Path:
    """Write the model, preprocessing included, for float32 inputs (n, *shape) in [0, 1].

    Raises ValueError if the file's logits are not the model's."""
    import onnxruntime

    file = folder / ONNX
    x = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0))
    batch = torch.export.Dim("n")
    torch.onnx.export(
        model, (x,), file, dynamo=True, dynamic_shapes={"x": {0: batch}},
        input_names=["x"], output_names=["logits"], external_data=False, verbose=False,
    )  # fmt: skip
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for rows in (x, x[:2]):  # the number of samples is free
        (found,) = session.run(None, {"x": rows.numpy()})
        with torch.no_grad():
            expected = model(rows).numpy()
        if not np.allclose(found, expected, atol=TOLERANCE, rtol=TOLERANCE):
            file.unlink()
            raise ValueError(
                f"the ONNX file differs from the model by up to {np.abs(found - expected).max():g}"
            )
    return file
