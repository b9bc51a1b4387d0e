"""What a client receives: its model, the model's description, predictions, and a report."""

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from clients.core.arrays import Arrays, load_into_model, model_arrays
from clients.core.client import Client
from clients.core.evaluation import Choice, further_scores, main_of, predicted
from clients.core.normalisation import entropy
from clients.core.single_samples import naming_single_inputs
from fedapps.common import external_code
from fedapps.common.tasks import BINARY, CLASSES, LABELS, TASKS, VALUES, Targets
from fedapps.common.torch_defaults import torch_defaults
from fedapps.console import spreadsheet_cell
from fedapps.files import array_bytes, write_files
from fedapps.results.card import Card
from fedapps.results.reference import Reference, far
from fedapps.saved import DIGESTS, MODEL, SavedFiles, digest, opening, read_json
from fedapps.service.inputs import Data, Inputs, check_values, read_inputs, unlabeled
from fedapps.service.stream import FILE as STREAM
from fedapps.service.stream import Stream, cannot_go_on
from fedapps.settings.config import Config
from partitions.arrays import as_tensor
from partitions.datasets.description import TOKENS
from partitions.datasets.distance import warning
from partitions.datasets.loading import Moment
from partitions.shares import labeled_rows

DESCRIPTION, PREDICTIONS, REPORT = "model.json", "predictions.csv", "report.json"
ONNX = "model.onnx"


class PersonalModel(nn.Module):
    """A personal network together with the preprocessing of its inputs.

    forward gives logits (n, C) of inputs (n, *shape): whole numbers as the run's dataset stores
    them, or floats in [0, 1]; for a table the columns that `encode` makes. As other modules of
    torch it checks no values, and can be exported; `predict` checks them. Outputs for values are
    standardised; `predict` gives them in their own unit. `classes` names the outputs, `report`
    describes the adaptation, `last` is what the client received last; None if the model was loaded
    from a folder."""

    scale: Tensor
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        network: nn.Module,
        card: Card,
        report: dict[str, Any],
        last: "PersonalizationResult | None" = None,
        stream: Stream | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.classes = card.classes
        self.report = report
        self.card = card
        self.last = last
        self.stream = stream
        # Images of one channel may come without it: (n, height, width).
        self.flat = len(card.shape) if card.shape[0] == 1 else 0
        # Buffers: they move with the network, and a saved state has them.
        self.register_buffer("scale", torch.tensor(float(card.scale)))
        self.by_column = len(card.shape) < 3 and isinstance(card.mean, tuple)
        precision = torch.float64 if self.by_column else torch.float32
        self.register_buffer("mean", _broadcast(card.mean, card.shape).to(precision))
        self.register_buffer("std", _broadcast(card.std, card.shape).to(precision))

    def forward(self, x: Tensor | np.ndarray) -> Tensor:
        """Logits (n, C). Nothing is checked: inputs on another scale, such as floats up to 255,
        give wrong logits without an error. `predict` checks them."""
        if not isinstance(x, Tensor):
            x = as_tensor(x).to(self.scale.device)
        if self.card.inputs == TOKENS:
            return self.network(x)
        if x.ndim == self.flat:
            x = x[:, None]
        is_scaled = x.is_floating_point() or x.dtype == torch.bool
        x = x.double() if self.by_column else x.float()  # as in training: see `Samples`
        scaled = x if is_scaled else x / self.scale
        return self.network(((scaled - self.mean) / self.std).float())

    def predict(self, x: Tensor | np.ndarray) -> Tensor:
        """Classes (n,), truth values (n, k), or values (n, k) in their own unit. Raises ValueError
        for inputs on another scale than `forward` takes, for NaN and infinity, and for no sample or
        one without its axis."""
        given = as_tensor(x)
        axes = {len(self.card.shape) + 1, self.flat}
        if not given.ndim or given.ndim not in axes or not len(given):
            raise ValueError(
                f"inputs have shape {tuple(given.shape)}; the run takes (n, *{self.card.shape}) of "
                "at least one sample"
            )
        check_values(given, self.card.scale, self.card)
        with torch.no_grad():
            outputs: Tensor = self(x)
        return predicted(outputs, self.card.targets)

    def encode(self, table: Data) -> Tensor:
        """A table's rows as inputs (n, d) float64 of `forward`; columns are read by name. Raises
        ValueError as `FinishedRun.personalize` for columns that do not fit."""
        samples = read_inputs(table, self.card).share.everything
        return samples.x[samples.index]

    @torch_defaults()
    def update(self, data: Data) -> Tensor:
        """Logits (n, C) of further unlabeled inputs, or of those at a path, after adaptation to
        them: the model goes on from the inputs before. Memory does not grow.

        Raises ValueError if the method adapts to each batch alone, and for bad inputs."""
        if self.stream is None:
            raise cannot_go_on(self.card.method)
        last = updated(self.card, self.stream, read_inputs(data, self.card))
        self.last = last
        self.network = last.network.eval().to(self.mean.device)
        self.report = last.report()
        self.stream = last.stream
        return last.logits

    def __getstate__(self) -> dict[str, Any]:
        """The model without the inputs, for pickles and copies."""
        return vars(self) | {"last": None}

    def save(self, folder: str | Path) -> None:
        """Write the model, and the predictions of the last inputs, for `fedapps.load_personal`."""
        if self.last is None:
            raise ValueError("the model has had no update since it was loaded; its folder has it")
        self.last.write(Path(folder).expanduser())


def _digits(targets: Targets) -> int:
    """The digits of predicted values: seven of a deviation of the training labels, also where their
    mean is many deviations from 0."""
    ratios = [1.0]
    for mean, std in zip(targets.mean, targets.std, strict=True):
        ratios.append(abs(mean) / std)
    return min(7 + int(math.log10(max(ratios))), 16)


def _broadcast(moment: Moment | None, shape: tuple[int, ...]) -> Tensor:
    """One number, or one for each channel, that broadcasts over inputs (n, *shape)."""
    assert moment is not None  # otherwise the inputs were refused
    numbers = torch.tensor(moment, dtype=torch.float64)
    if isinstance(moment, tuple):
        numbers = numbers.reshape(-1, *[1] * (len(shape) - 1))
    return numbers


@dataclass(frozen=True)
class PersonalizationResult:
    """A client's network, its logits (n, C) for `inputs`, the metrics of its adaptation, what it
    goes on from, if it can, and the correction that it chose, if the method chooses."""

    card: Card
    network: nn.Module
    logits: Tensor
    inputs: Inputs
    metrics: dict[str, Any]
    stream: Stream | None = None
    choice: Choice | None = None

    def module(self) -> PersonalModel:
        """The network with its preprocessing."""
        return PersonalModel(self.network, self.card, self.report(), self, self.stream).eval()

    def report(self) -> dict[str, Any]:
        """Steps, entropies, ε, what was predicted, how far the inputs are from training's, and the
        scores of the task if there are labels."""
        targets = self.card.targets
        labels = self.inputs.labels
        rows = self.inputs.scored & labeled_rows(labels)
        report: dict[str, Any] = {
            "method": self.card.method,
            "run": self.card.run,
            "data": self.stream.data if self.stream else self.inputs.digest(),
            "role": "novel" if self.inputs.share.novel else "training",
            "samples": len(self.logits),
        }
        if targets.task == CLASSES:
            # A logit of −∞ excludes a class; 0 · ∞ would make the entropy NaN.
            report["entropy"] = float(entropy(self.logits.clamp(min=-1e30)))
        report |= self.metrics
        if self.choice is not None:
            report["choice"] = self.choice.name
            report["decision"] = self.choice.reason
        report["predicted"] = self._counts()
        if self.inputs.notes:
            report["notes"] = list(self.inputs.notes)
        if self.card.reference is not None:
            report["inputs"] = self._distance(self.card.reference)
        if self.stream:
            report["updates"] = self.stream.updates
        if rows.any():
            z, y = self.logits[rows], labels[rows]
            report["labels"] = f"{int(rows.sum())} given, used for scoring alone"
            report[TASKS[targets.task].main.name] = main_of(z, y, targets)
            report |= further_scores(z, y, targets)
        return report

    def _counts(self) -> dict[str, Any]:
        """How often each class or label is predicted; smallest and largest predicted value."""
        prediction = predicted(self.logits, self.card.targets)
        classes = self.card.classes
        if self.card.task == VALUES:
            lowest = prediction.min(0).values
            highest = prediction.max(0).values
            ends = torch.stack([lowest, highest], 1).tolist()
            return dict(zip(classes, ends, strict=True))
        if self.card.task == LABELS:
            return dict(zip(classes, prediction.sum(0).int().tolist(), strict=True))
        counts = torch.bincount(prediction, minlength=len(classes)).tolist()
        return {name: count for name, count in zip(classes, counts, strict=True) if count}

    def _distance(self, reference: Reference) -> dict[str, Any]:
        """The farthest columns in deviations of the training rows, and a warning if they are
        farther than the training clients' held-out rows."""
        farthest, threshold = far(reference, self.inputs.share.everything)
        found: dict[str, Any] = {"farthest": farthest, "threshold": threshold}
        beyond = warning(farthest, threshold)
        if beyond:
            found["warning"] = f"{beyond}; {self._dominant(reference)}"
        return found

    def _dominant(self, reference: Reference) -> str:
        """The share of the class that is predicted most often, beside its share in training."""
        if self.card.task not in (CLASSES, BINARY):
            return "compare units and columns with training's"
        counts = self._counts()
        name = max(counts, key=lambda name: int(counts[name]))
        text = f"{counts[name]} of {len(self.logits)} are predicted {name}"
        if reference.shares:
            share = reference.shares[self.card.classes.index(name)]
            text += f", {100 * share:.0f} % in training"
        return text

    def predictions(self) -> str:
        """A CSV line for each sample: its name, and its class with the class's probability, and the
        correction that was chosen, if the method chooses; of several labels whether each holds, 1
        or 0, and its probability; of values the numbers in the labels' unit."""
        targets = self.card.targets
        text = io.StringIO()
        lines = csv.writer(text, lineterminator="\n")
        if targets.task in (CLASSES, BINARY):
            chosen = [] if self.choice is None else [self.choice.name]
            lines.writerow(("sample", "class", "probability", *("correction" for _ in chosen)))
            rows = [[*cells, *chosen] for cells in self._class_cells()]
        else:
            # Names come from files and could be formulas of a spreadsheet.
            names = list(map(spreadsheet_cell, self._names()))
            further = []
            if targets.task == LABELS:
                further = [f"{name} probability" for name in names]
            lines.writerow(("sample", *names, *further))
            rows = self._number_cells()
        for name, cells in zip(self.inputs.names, rows, strict=True):
            lines.writerow((spreadsheet_cell(name), *cells))
        return text.getvalue()

    def _names(self) -> list[str]:
        """A name for each output; that of a single value is "value"."""
        count = self.logits.shape[1]
        if len(self.card.classes) == count and self.card.classes != tuple(map(str, range(count))):
            return list(self.card.classes)
        if count == 1:
            return ["value"]
        word = "label" if self.card.task == LABELS else "value"
        return [f"{word} {number}" for number in range(count)]

    def _class_cells(self) -> list[list[str]]:
        """Each sample's class and its probability."""
        if self.card.task == BINARY:
            second = self.logits[:, 0].sigmoid()
            probabilities = torch.stack([1 - second, second], 1)
        else:
            probabilities = self.logits.softmax(1)
        cells = []
        values, best = probabilities.max(1)
        for p, number in zip(values.tolist(), best.tolist(), strict=True):
            cells.append([spreadsheet_cell(self.card.classes[number]), f"{p:.6f}"])
        return cells

    def _number_cells(self) -> list[list[str]]:
        """Each sample's values, or 1 and 0 for its labels and then their probabilities."""
        numbers = predicted(self.logits, self.card.targets).tolist()
        cells = []
        if self.card.task == VALUES:
            digits = _digits(self.card.targets)
            for values in numbers:
                cells.append([f"{value:.{digits}g}" for value in values])
            return cells
        probabilities = self.logits.sigmoid().tolist()
        for holds, sample_probabilities in zip(numbers, probabilities, strict=True):
            labels = [str(label) for label in holds]
            cells.append(labels + [f"{p:.6f}" for p in sample_probabilities])
        return cells

    def write(self, folder: Path) -> None:
        """Write the files together, last the report, which vouches for the others. The ONNX file
        and the stream of a former model are removed."""
        card = asdict(self.card)
        architecture = {"name": card.pop("model"), "network": type(self.network).__name__}
        preprocessing = {key: card.pop(key) for key in ("scale", "mean", "std")}
        description = {"architecture": architecture, **card, "preprocessing": preprocessing}
        content = {
            MODEL: array_bytes(model_arrays(self.network)),
            DESCRIPTION: json.dumps(description, indent=1).encode(),
            PREDICTIONS: self.predictions().encode(),
        }
        outdated = [folder / ONNX]
        if self.stream is not None:
            content[STREAM] = self.stream.content()
        else:
            outdated.append(folder / STREAM)
        digests = {name: digest(data) for name, data in content.items()}
        report = with_null(self.report() | {DIGESTS: digests})
        content[REPORT] = json.dumps(report, indent=1, allow_nan=False).encode()
        files = {folder / name: data for name, data in content.items()}
        write_files(files, outdated=outdated)


def with_null(value: Any) -> Any:
    """The value with null in place of NaN and infinity, which are no JSON."""
    if isinstance(value, dict):
        return {key: with_null(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [with_null(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def result_of(
    client: Client,
    arrays: Arrays,
    message_config: dict[str, Any],
    config: Config,
    card: Card,
    inputs: Inputs,
) -> PersonalizationResult:
    """What a client with these inputs has after the server's message of `arrays` and
    `message_config`. `config` is the run's configuration."""
    with naming_single_inputs(client):
        network, logits = client.serve(arrays, message_config)
    stream = None
    if client.supports_streaming and client.share.novel:
        stream = Stream.begun(client, config, message_config, arrays, inputs.digest())
    metrics = dict(client.adaptation_metrics)
    return PersonalizationResult(
        card, network.cpu(), logits.cpu(), inputs, metrics, stream, client.choice
    )


def updated(card: Card, stream: Stream, inputs: Inputs) -> PersonalizationResult:
    """What the client has after further inputs. Raises ValueError for a training client's, and if
    the adapted network gives no numbers."""
    if not inputs.share.novel:
        raise ValueError("this is a training client's folder; only novel clients go on")
    with torch_defaults():
        client = stream.client(card, inputs.share)
        with naming_single_inputs(client):
            network, logits = client.serve(stream.sent, stream.message)
    if logits.isnan().any():
        raise ValueError("after this update the model would predict NaN; it stays as it was")
    metrics = dict(client.adaptation_metrics)
    after = stream.after(client)
    return PersonalizationResult(
        card, network.cpu(), logits.cpu(), inputs, metrics, after, client.choice
    )


@torch_defaults()
def load_personal(folder: str | Path, *, allow: Sequence[str] = ()) -> PersonalModel:
    """The model in a folder of `fedapps personalize`, of `PersonalModel.save`, or in the state-dir
    of a node that was served, to go on with `PersonalModel.update`. `allow` as `fedapps.load`.

    Raises ValueError if the folder holds none that can go on."""
    external_code.allow(*allow)
    folder = Path(folder).expanduser()
    with opening(folder):
        saved, report = _read_report(folder)
        card = _read_card(folder / DESCRIPTION, saved)
        if STREAM not in saved:
            raise cannot_go_on(card.method, folder)
        kept = Stream.parse(folder / STREAM, saved.read(STREAM))
        blank = unlabeled(torch.zeros(()).expand(2, *card.shape), card)
        client = kept.client(card, blank.share)
        network = client.network_of_last_update(kept.sent, kept.message).cpu().eval()
        load_into_model(network, saved.arrays(MODEL), {})
        return PersonalModel(network, card, report, stream=kept).eval()


def _read_report(folder: Path) -> tuple[SavedFiles, dict[str, Any]]:
    """The files that a report vouches for, and the report itself. Raises ValueError if there is
    none."""
    for name in (DESCRIPTION, REPORT):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} holds no {name}; name a folder of a delivered model")
    report = read_json(folder / REPORT)
    saved = SavedFiles.named_in(folder, REPORT, report, "personalize the client's data again")
    return saved, {key: value for key, value in report.items() if key != DIGESTS}


def _read_card(file: Path, saved: SavedFiles) -> Card:
    """The card that `PersonalizationResult.write` described. Raises ValueError if it is damaged."""
    saved.read(file.name)
    card = read_json(file)
    architecture = card.pop("architecture")
    preprocessing = card.pop("preprocessing")
    return Card.parse(json.dumps(card | preprocessing | {"model": architecture["name"]}))
