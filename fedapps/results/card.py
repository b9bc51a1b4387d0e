"""What serving needs to know of a run beside its configuration and its arrays."""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self

import partitions
from fedapps.files import MODEL, parse_json, read_json, write_text
from fedapps.results.kinds import (
    count,
    either,
    finite,
    list_of,
    maybe,
    positive,
    record,
    text,
    whole,
)
from fedapps.settings.config import Config
from partitions.datasets import Info, Moment

FILE = "serving.json"
LONGEST = 4096  # characters of a setting


@dataclass(frozen=True)
class Card:
    """The task that a run's networks were trained on.

    Inputs of `shape` as stored are divided by `scale`, then standardised by `mean` and `std`;
    these two are None where the server that trained had no data to take them from. `run` tells
    runs apart; it is known once the run has a model."""

    method: str
    dataset: str
    model: str
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    scale: float
    mean: Moment | None = 0.0
    std: Moment | None = 1.0
    num_types: int = 0  # as the dataset's Info has it
    run: str = ""

    def info(self) -> Info:
        """The task as networks are built for it."""
        return Info(
            self.dataset,
            self.shape,
            len(self.classes),
            "",
            classes=self.classes,
            num_types=self.num_types,
        )

    def text(self) -> str:
        """The card as JSON, which `parse` reads."""
        return json.dumps(asdict(self), indent=1)

    def line(self) -> str:
        """The same in one line that a configuration may hold: of very many classes no names."""
        told = asdict(self)
        if len(json.dumps(told)) > LONGEST:
            told["classes"] = len(self.classes)
        return json.dumps(told)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The card that `text` or `line` wrote. Raises ValueError for anything else."""
        told = parse_json(text)
        if not KIND(told) or told.keys() - {field.name for field in fields(cls)}:
            raise ValueError("its values are not those of a run's card")
        classes, shape = told["classes"], tuple(told["shape"])
        names = map(str, range(classes)) if isinstance(classes, int) else classes
        moments = {k: tuple(told[k]) for k in ("mean", "std") if isinstance(told.get(k), list)}
        return cls(**(told | moments | {"classes": tuple(names), "shape": shape}))


KIND = record(
    {
        **dict.fromkeys(("method", "dataset", "model"), text),
        "shape": list_of(count),
        "classes": either(count, list_of(text)),
        "scale": positive,
    },
    mean=maybe(either(finite, list_of(finite))),
    std=maybe(either(positive, list_of(positive))),
    num_types=whole,
    run=text,
)


def make_card(config: Config) -> Card:
    """The card of a run that is about to start under `config`."""
    info = partitions.task(config)
    names = [str(config[key]) for key in ("method", "dataset", "model")]
    classes: tuple[str, ...] = info.classes
    mean: Moment | None = 0.0
    std: Moment | None = 1.0
    if len(classes) != info.num_classes or config["standardize"] != "none":
        try:
            federation = partitions.federation(config)
        except ValueError:  # a server of real nodes has no data
            mean, std = (None, None) if config["standardize"] != "none" else (mean, std)
        else:
            one = federation.share(0).everything
            classes = federation.dataset.classes or classes
            mean, std = one.mean, one.std
    if len(classes) != info.num_classes:
        classes = tuple(map(str, range(info.num_classes)))
    method, dataset, model = names
    shape, types = tuple(info.shape), info.num_types
    return Card(method, dataset, model, shape, classes, info.scale, mean, std, types)


def write_card(folder: Path, card: Card) -> None:
    """Leave the card in a run's folder."""
    write_text(folder / FILE, card.text())


def read_card(folder: Path) -> Card:
    """The card of a finished run; `run` is the digest of its model and its configuration, since
    one model serves in many ways. ValueError if it has none."""
    for name in (FILE, MODEL):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} holds no {name}; name the folder of a run that evaluated")
    told = read_json(folder / FILE)
    if not isinstance(told, dict):
        raise ValueError(f"{folder / FILE} is damaged: it holds no table")
    parts = [(folder / name).read_bytes() for name in (MODEL, "config.toml")]
    digest = hashlib.sha256(b"".join(parts)).hexdigest()[:16]
    try:
        return Card.parse(json.dumps(told | {"run": digest}))
    except ValueError as error:
        raise ValueError(f"{folder / FILE} is damaged: {error}") from error
