"""The JSON and TOML files of a run folder as pydantic models.

A metric has one name everywhere: ``accuracy`` of a client, and ``train-accuracy`` or
``novel-accuracy`` of a group of clients. Within the summary's groups `train` and `novel` the name
stands without its group. A summary's other keys have underscores: ``best_round``. Earlier releases
wrote ``test_accuracy`` as well; `metric_names` reads their files.

Another person may have written the folder. Known keys must have their types; unknown keys are
ignored. docs/reference/run-folder.md says what the keys mean."""

from collections.abc import Mapping
from math import isfinite
from typing import Annotated, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from fedapps.common.tasks import MAIN_SCORES, Score, main_score

T = TypeVar("T")
Count = Annotated[int, Field(ge=0, lt=2**63)]


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def metric_names(scores: Mapping[str, T]) -> dict[str, T]:
    """The scores by their metrics' names, also those that an earlier release wrote."""
    return {key.replace("_", "-"): score for key, score in scores.items()}


Rate = Annotated[float | None, AfterValidator(_finite)]  # NaN counts as unknown
# Metrics of a group of clients: that of the task's main score, and others.
Rates = Annotated[dict[str, Rate], AfterValidator(metric_names)]


def _with_main_score(rates: Rates) -> Rates:
    if not MAIN_SCORES & rates.keys():
        raise ValueError(f"it has no {' or '.join(sorted(MAIN_SCORES))}")
    return rates


GroupResult = Annotated[Rates, AfterValidator(_with_main_score)]


class Model(BaseModel):
    """Strict types; only whole numbers become floats."""

    model_config = ConfigDict(strict=True)


class ClientResult(Model):
    """A client at one evaluation."""

    role: Literal["train", "novel"]
    accuracy: Rate = None
    rmse: Rate = None  # in the place of the accuracy where the labels are values
    examples: Count
    # Of a client that chose a correction without labels, "none" among them; gains are shares.
    chosen: Annotated[str, Field(pattern=r"^[\w.+-]*$", max_length=60)] = ""
    misfit: Rate = None
    misfit_limit: Rate = Field(None, alias="misfit-limit")
    expected_gain: Rate = Field(None, alias="expected-gain")
    base_accuracy: Rate = Field(None, alias="base-accuracy")

    @model_validator(mode="after")
    def _has_main_score(self) -> Self:
        if not MAIN_SCORES & self.model_fields_set:
            raise ValueError(f"it has no {' or '.join(sorted(MAIN_SCORES))}")
        return self

    @property
    def main(self) -> Score:
        """The main score of the client's task."""
        return main_score(self.model_fields_set)

    @property
    def score(self) -> float | None:
        """The value of the `main` score, None if it is unknown."""
        value: float | None = getattr(self, self.main.name)
        return value


class Evaluation(Model):
    """One evaluation of a run."""

    train: Rates | None = None
    novel: Rates | None = None
    per_client: dict[str, ClientResult] = {}

    def by_key(self) -> Rates:
        """Both groups' metrics by the keys of a round's report, such as ``train-accuracy``."""
        metrics: Rates = {}
        for role, group in (("train", self.train), ("novel", self.novel)):
            for name, value in (group or {}).items():
                metrics[f"{role}-{name}"] = value
        return metrics


class Megabytes(Model):
    """Traffic per client and round; null in private runs."""

    down: Rate
    up: Rate


class Privacy(Model):
    """The privacy budget that a run has spent."""

    epsilon: float
    delta: float
    generator: str
    terms: str


class Named(Model):
    """A run's name of its method in tables, "" for the method itself."""

    name: Annotated[str, Field(pattern=r"^[\w.+-]*$", max_length=60)] = ""


class Summary(Evaluation, Named):
    """summary.json: the evaluation of the reported round, and totals of the run."""

    train: GroupResult
    novel: GroupResult | None
    megabytes_per_client_round: Megabytes
    seconds: Rate
    rounds: Count
    code: Annotated[str, Field(pattern=r"^[0-9a-f]*$", max_length=64)] = ""
    best_round: Count = 0
    novel_round: Count | None = None  # None: best_round, as in runs of earlier releases
    saved_model_train: Rates | None = None
    last: Evaluation = Evaluation()
    undone_rounds: Count | None = None
    clipped_replies: Count | None = None
    recounted_replies: Count | None = None
    dropped_replies: Count | None = None
    simulated_seconds: Rate = None
    late: Count | None = None
    late_used: Count | None = None
    late_dropped: Count | None = None
    late_age: Rate = None
    privacy: Privacy | None = None
    finished: bool | None = None


class Failure(Named):
    """summary.json of a run that failed, perhaps before its first evaluation."""

    error: str


class Round(Model):
    """A line of metrics.jsonl."""

    round: Count
    # None: absent, as privacy hides it.
    present: Count | None = None
    sampled: Count | None = None
    valid: Count = 0
    seconds: Rate = None
    evaluation: dict[str, Rate] = {}
    dropped: dict[str, Count] = {}
    evaluation_dropped: dict[str, Count] = Field({}, alias="evaluation-dropped")
    late: Count = 0
    late_used: Count = Field(0, alias="late-used")
    epsilon: Rate = Field(None, alias="dp-epsilon")
    clipped: Count = 0
    recounted: Count = 0
    simulated_seconds: Rate = Field(None, alias="simulated-seconds")
    phases: dict[str, float] = {}
    novel_megabytes: dict[str, float] = Field({}, alias="novel-megabytes")


class Settings(Model):
    """config.toml: the keys that tables and reports need."""

    method: str
    dataset: str
    partition: str
    seed: Count
    num_clients: Count = Field(alias="num-clients")
    train_fraction: float = Field(alias="train-fraction")
    versions: dict[str, str] = {}


SummaryFile: TypeAdapter[Failure | Summary] = TypeAdapter(
    Annotated[Failure | Summary, Field(union_mode="left_to_right")]
)


def mismatch(error: ValidationError) -> str:
    """The last mismatch of a file, in one line: ``train.accuracy: Input should be …``."""
    last = error.errors()[-1]
    place = ".".join(str(part) for part in last["loc"])
    if not place:
        return last["msg"]
    return f"{place}: {last['msg']}"
