"""The JSON and TOML files of a run folder as pydantic models.

A metric has one name everywhere: ``accuracy`` of a client, and ``train-accuracy`` or
``novel-accuracy`` of a group of clients. A summary's other keys have underscores: ``best_round``.
Earlier releases wrote ``test_accuracy``, and the metrics of a group without its name:
`with_present_names` reads their files.

Another person may have written the folder. Known keys must have their types; unknown keys are
ignored. docs/reference/run-folder.md says what the keys mean."""

from collections.abc import Mapping
from math import isfinite
from typing import Annotated, Any, Literal, Self, TypeVar

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
# Of a client that chose: T, t, what it expects to win; the main score without the choice.
DECISION_METRICS = ("misfit", "misfit-limit", "expected-gain", "base-accuracy")
CLIENT_METRICS = (*sorted(MAIN_SCORES), *DECISION_METRICS)
Count = Annotated[int, Field(ge=0, lt=2**63)]


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def metric_names(scores: Mapping[str, T]) -> dict[str, T]:
    """The scores by their metrics' names, also those that an earlier release wrote."""
    return {key.replace("_", "-"): score for key, score in scores.items()}


def with_present_names(content: Any) -> Any:
    """A summary, or one evaluation of it, with `evaluation` by the names of metrics, as
    ``train-accuracy``. Earlier releases wrote tables `train` and `novel` without this prefix.

    Raises ValueError for a group that is no table."""
    if not isinstance(content, Mapping) or "evaluation" in content:
        return content
    metrics: dict[str, Any] = {}
    for role in ("train", "novel"):
        metrics |= _with_role(role, content.get(role))
    present = {**content, "evaluation": metrics}
    if content.get("saved_model_train") is not None:
        present["saved_model_train"] = _with_role("train", content["saved_model_train"])
    return present


def _with_role(role: str, group: Any) -> dict[str, Any]:
    """The metrics of a group in a file of an earlier release, by their whole names."""
    if group is None:
        return {}
    if not isinstance(group, Mapping):
        raise ValueError(f"its {role} is {group!r:.80}, and must be a table")
    return {f"{role}-{name}": value for name, value in metric_names(group).items()}


Rate = Annotated[float | None, AfterValidator(_finite)]  # NaN counts as unknown
Rates = dict[str, Rate]  # numbers by the names of metrics


class Model(BaseModel):
    """Strict types; only whole numbers become floats."""

    model_config = ConfigDict(strict=True)


class ClientResult(Model):
    """A client at one evaluation. `metrics` are those of `CLIENT_METRICS` that the file has beside
    the other keys; gains are shares."""

    role: Literal["train", "novel"]
    examples: Count
    # The correction that it chose without labels, "none" among them.
    chosen: Annotated[str, Field(pattern=r"^[\w.+-]*$", max_length=60)] = ""
    metrics: Rates

    @model_validator(mode="before")
    @classmethod
    def _with_metrics(cls, content: Any) -> Any:
        if not isinstance(content, Mapping):
            return content
        metrics = {name: content[name] for name in CLIENT_METRICS if name in content}
        if not MAIN_SCORES & metrics.keys():
            raise ValueError(f"it has no {' or '.join(sorted(MAIN_SCORES))}")
        return {**content, "metrics": metrics}

    @property
    def main(self) -> Score:
        """The main score of the client's task."""
        return main_score(self.metrics)

    @property
    def score(self) -> float | None:
        """The value of the `main` score, None if it is unknown."""
        return self.metrics[self.main.name]


class Evaluation(Model):
    """One evaluation of a run. `evaluation` has the keys of a round's report, such as
    ``train-accuracy``."""

    evaluation: Rates = {}
    per_client: dict[str, ClientResult] = {}

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_releases(cls, content: Any) -> Any:
        return with_present_names(content)


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


class Played(Model):
    """What auto's rule means for the newcomers that training clients have played: shares. Without
    a guard none gets a correction."""

    regime: Literal["label-shift", "other-inputs"]
    clients: float
    guard: float | None
    corrected: float
    gain: float
    harmed: float


class Summary(Evaluation, Named):
    """summary.json: the evaluation of the reported round, and totals of the run."""

    megabytes_per_client_round: Megabytes
    seconds: Rate
    rounds: Count
    code: Annotated[str, Field(pattern=r"^[0-9a-f]*$", max_length=64)] = ""
    engine: str = ""
    reports_last_round: bool = False
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
    played: list[Played] = []
    finished: bool | None = None

    @model_validator(mode="after")
    def _has_main_score(self) -> Self:
        names = [f"train-{name}" for name in sorted(MAIN_SCORES)]
        if not self.evaluation.keys() & set(names):
            raise ValueError(f"it has no {' or '.join(names)}")
        return self


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
    evaluation: Rates = {}
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
