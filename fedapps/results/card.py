"""serving.json: what serving needs to know of a run beside its configuration and its arrays."""

import base64
import hashlib
import json
import zlib
from dataclasses import asdict
from logging import WARNING
from pathlib import Path
from typing import Annotated, Any, Self

from flwr.common.logger import log
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass

import partitions
from fedapps.common.tasks import CLASSES, VALUES, Targets, check_task
from fedapps.results.reference import Reference, reference
from fedapps.results.schema import Count, mismatch
from fedapps.saved import MODEL, read_json
from fedapps.settings.config import Config
from fedapps.settings.run import LONGEST_CARD
from partitions.datasets.description import NO_SCALING, TOKENS, Description, scaling
from partitions.datasets.encoding import Encoding
from partitions.datasets.loading import Info, Moment, label_of

FILE = "serving.json"
MAX_CLASSES = 10**6
LONGEST = 4096  # characters of a card's line without words
LARGEST = 10**7  # bytes of a card that was packed
PACKED = "packed:"  # what such a card begins with

Positive = Annotated[FiniteFloat, Field(gt=0)]
Size = Annotated[int, Field(gt=0, lt=2**63)]


def _named(classes: Any) -> Any:
    """Classes of a JSON file: names, or their number."""
    if type(classes) is int and 0 < classes <= MAX_CLASSES:
        return tuple(map(str, range(classes)))
    return tuple(classes) if isinstance(classes, list) else classes


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Card:
    """The task that a run's networks were trained on.

    Inputs of `shape` as stored are divided by `scale`, then standardised by `mean` and `std`, each
    one number or one per channel or column. These two are None if the server had no data to compute
    them.
    `run` identifies the run; it is known once the run has a model."""

    method: str
    dataset: str
    model: str
    shape: Annotated[tuple[Size, ...], Field(min_length=1)]
    classes: Annotated[tuple[str, ...], BeforeValidator(_named), Field(min_length=1)]
    scale: Positive
    mean: FiniteFloat | Annotated[tuple[FiniteFloat, ...], Field(min_length=1)] | None = 0.0
    std: Positive | Annotated[tuple[Positive, ...], Field(min_length=1)] | None = 1.0
    num_types: Count = 0  # as in the dataset's Info
    # What the labels mean, with the moments of values as in `Targets`.
    task: Annotated[str, AfterValidator(check_task)] = CLASSES
    target_mean: tuple[FiniteFloat, ...] = ()
    target_std: tuple[Positive, ...] = ()
    label: str = ""  # the column of labels in tables
    skip_broken: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.0  # share of a client's samples
    inputs: str = ""  # what an input is, for own data: as in `Description`
    texts: str = ""  # of texts, what a token is: as in `Description`
    words: tuple[str, ...] = ()  # of texts as words: those of the tokens 2, 3, …
    encoding: Encoding | None = None  # of a table's columns
    reference: Reference | None = None  # of the training clients' inputs, of own data alone
    run: str = ""

    def info(self) -> Info:
        """The task as networks are built for it."""
        count = len(self.classes)
        return Info(
            self.dataset,
            self.shape,
            count,
            "",
            classes=self.classes,
            num_types=self.num_types,
            task=self.task,
            inputs=Description(self.inputs, texts=self.texts) if self.inputs else None,
        )

    @property
    def targets(self) -> Targets:
        """How outputs of the run's networks are read."""
        return Targets(self.task, self.target_mean, self.target_std)

    def text(self) -> str:
        """The card as JSON, which `parse` reads."""
        return json.dumps(asdict(self), indent=1)

    def line(self) -> str:
        """The card in one line that fits into a setting: if it is too long, without the names of
        classes, then packed, then without `reference`. Raises ValueError if a table has too many
        columns for that. With words it is packed, and may be longer."""
        content = asdict(self)
        if self.words:
            text = _packed(content)
            if len(text) > LONGEST_CARD:
                raise _too_long(f"{len(self.words)} words")
            return text
        text = json.dumps(content)
        if len(text) > LONGEST:
            content["classes"] = len(self.classes)
            text = json.dumps(content)
        if len(text) > LONGEST:
            text = _packed(content)
        if len(text) > LONGEST:
            text = _packed(content | {"reference": None})
            log(
                WARNING,
                "the description of the run's inputs is too long for what is known of the training "
                "clients': nodes that are served do not say whether theirs look like them",
            )
        if len(text) > LONGEST:
            raise _too_long(f"{self.shape} inputs")
        return text

    @classmethod
    def parse(cls, text: str) -> Self:
        """The card that `text` or `line` wrote. Raises ValueError for anything else."""
        try:
            return TypeAdapter(cls).validate_json(_unpacked(text))
        except ValidationError as error:
            raise ValueError(f"it is no run's card: {mismatch(error)}") from error


def _too_long(what: str) -> ValueError:
    return ValueError(
        f"the description of the run's {what} does not fit into a message to nodes; use fedapps "
        "personalize for each client"
    )


def _packed(content: dict[str, Any]) -> str:
    """The content in printable characters, compressed."""
    data = zlib.compress(json.dumps(content, separators=(",", ":")).encode(), 9)
    return PACKED + base64.b85encode(data).decode()


def _unpacked(text: str) -> str:
    """The JSON that `_packed` wrote, or the text itself if it is JSON. Raises ValueError for
    damaged text and for more than `LARGEST` bytes."""
    if not text.startswith(PACKED):
        return text
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b85decode(text.removeprefix(PACKED)), LARGEST)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"it is no run's card: it is damaged ({error})") from error
    if not unpacker.eof:
        raise ValueError(f"it is no run's card: it has more than {LARGEST} bytes, or is cut off")
    return data.decode(errors="replace")


def make_card(config: Config) -> Card:
    """The card of a run that is about to start under `config`."""
    info = partitions.task(config)
    classes = info.classes
    mean: Moment | None = 0.0
    std: Moment | None = 1.0
    encoding = None
    known = None
    words: tuple[str, ...] = ()
    standardize = scaling(config, info.inputs)
    targets = Targets(info.task)
    needs_data = info.inputs is not None or info.task == VALUES or standardize != NO_SCALING
    if len(classes) != info.num_classes or needs_data:
        try:
            federation = partitions.federation(config)
        except ValueError:  # a server of real nodes has no data
            if standardize != NO_SCALING:
                mean = None
                std = None
        else:
            samples = federation.share(0).everything
            classes = federation.dataset.classes or classes
            if info.task == VALUES:
                targets = federation.targets
            mean = samples.mean
            std = samples.std
            encoding = federation.encoding
            words = federation.words
            numbers = info.inputs is not None and info.inputs.kind != TOKENS
            if numbers and config["dp"] == "none":  # no ε covers these statistics
                known = reference(federation)
    if len(classes) != info.num_classes:
        classes = tuple(map(str, range(info.num_classes)))
    return Card(
        method=str(config["method"]),
        dataset=str(config["dataset"]),
        model=str(config["model"]),
        shape=tuple(info.shape),
        classes=tuple(classes),
        scale=info.scale,
        mean=mean,
        std=std,
        num_types=info.num_types,
        task=info.task,
        target_mean=targets.mean,
        target_std=targets.std,
        label=label_of(config),
        skip_broken=float(config["skip-broken"]),
        inputs="" if info.inputs is None else info.inputs.kind,
        texts="" if info.inputs is None else info.inputs.texts,
        words=words,
        encoding=encoding,
        reference=known,
    )


def read_card(folder: Path) -> Card:
    """The card of a finished run; ValueError if it has none.

    `run` is the digest of its model and its configuration, since one model serves in many ways."""
    for name in (FILE, MODEL):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} holds no {name}; name the folder of a run that evaluated")
    content = read_json(folder / FILE)
    if not isinstance(content, dict):
        raise ValueError(f"{folder / FILE} is damaged: it holds no table")
    parts = [(folder / name).read_bytes() for name in (MODEL, "config.toml")]
    digest = hashlib.sha256(b"".join(parts)).hexdigest()[:16]
    try:
        return Card.parse(json.dumps(content | {"run": digest}))
    except ValueError as error:
        raise ValueError(f"{folder / FILE} is damaged: {error}") from error
