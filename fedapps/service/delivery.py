"""What a client receives: its model, the model's description, predictions, and a report."""

import csv
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clients.arrays import model_arrays
from clients.tent import entropy
from fedapps.console import spreadsheet_cell
from fedapps.files import MODEL, write_arrays, write_text
from fedapps.results.card import Card
from fedapps.service.inputs import Inputs
from partitions.datasets import Moment

DESCRIPTION, PREDICTIONS, REPORT = "model.json", "predictions.csv", "report.json"
ONNX = "model.onnx"


class Personal(nn.Module):
    """A personal network together with the preprocessing of its inputs.

    forward gives logits (n, C) of inputs (n, *shape): whole numbers as the run's dataset stores
    them, or floats in [0, 1]. `classes` names the outputs, `report` describes the adaptation."""

    def __init__(self, network: nn.Module, card: Card, report: dict[str, Any]) -> None:
        super().__init__()
        self.network, self.classes, self.report = network, card.classes, report
        self.scale = card.scale
        self.flat = card.shape[0] == 1 and len(card.shape)  # dimensions of images without a channel
        self.mean, self.std = (_broadcast(moment, card.shape) for moment in (card.mean, card.std))

    def forward(self, x: Tensor) -> Tensor:
        """Logits (n, C)."""
        x = x[:, None] if x.ndim == self.flat else x
        x = x.float() if x.is_floating_point() else x.float() / self.scale
        return self.network((x - self.mean) / self.std)


def _broadcast(moment: Moment | None, shape: tuple[int, ...]) -> Tensor:
    """One number, or one for each channel, that broadcasts over inputs (n, *shape)."""
    assert moment is not None  # otherwise the inputs were refused
    numbers = torch.tensor(moment)
    return numbers.reshape(-1, *[1] * (len(shape) - 1)) if isinstance(moment, tuple) else numbers


@dataclass(frozen=True)
class Served:
    """A client's network, its logits (n, C) for `inputs`, and the metrics of its adaptation."""

    card: Card
    network: nn.Module
    logits: Tensor
    inputs: Inputs
    metrics: dict[str, Any]

    def module(self) -> Personal:
        """The network with its preprocessing."""
        return Personal(self.network, self.card, self.report()).eval()

    def report(self) -> dict[str, Any]:
        """Steps, entropies, ε, and the accuracy if there are labels."""
        rows = self.inputs.scored & (self.inputs.labels >= 0)
        report: dict[str, Any] = {
            "method": self.card.method,
            "run": self.card.run,
            "data": self.inputs.digest(),
            "role": "novel" if self.inputs.share.novel else "training",
            "samples": len(self.logits),
            "entropy": float(entropy(self.logits.clamp(min=-1e30))),
        } | self.metrics
        if rows.any():
            correct = self.logits.argmax(1)[rows] == self.inputs.labels[rows]
            report["labels"] = f"{int(rows.sum())} given, used for scoring alone"
            report["accuracy"] = float(correct.float().mean())
        return report

    def predictions(self) -> str:
        """A CSV line for each sample: its name, its class, and the class's probability."""
        text = io.StringIO()
        lines = csv.writer(text, lineterminator="\n")
        lines.writerow(("sample", "class", "probability"))
        columns = (t.tolist() for t in self.logits.softmax(1).max(1))
        for name, p, best in zip(self.inputs.names, *columns, strict=True):
            cells = map(spreadsheet_cell, (name, self.card.classes[best]))
            lines.writerow((*cells, f"{p:.6f}"))
        return text.getvalue()

    def write(self, folder: Path) -> None:
        """Write the four files, the report last: if it exists, the others are complete. The ONNX
        file of a former model is removed."""
        (folder / ONNX).unlink(missing_ok=True)
        write_arrays(folder / MODEL, model_arrays(self.network))
        card = asdict(self.card)
        architecture = {"name": card.pop("model"), "network": type(self.network).__name__}
        preprocessing = {key: card.pop(key) for key in ("scale", "mean", "std")}
        description = {"architecture": architecture, **card, "preprocessing": preprocessing}
        write_text(folder / DESCRIPTION, json.dumps(description, indent=1))
        write_text(folder / PREDICTIONS, self.predictions())
        write_text(folder / REPORT, json.dumps(self.report(), indent=1))
