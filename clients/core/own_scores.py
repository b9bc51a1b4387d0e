"""A user's own scores: functions of outputs and labels, or metrics such as torchmetrics' ones.

A client reports each one beside the scores of its task, under its name; the server averages it over
clients. A minus sign before a name says that lower is better."""

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from clients.core.evaluation import in_units
from fedapps.common import external_code
from fedapps.common.tasks import BINARY, LABELS, VALUES, Targets, own_score_name

NAME = re.compile(r"-?[A-Za-z][A-Za-z0-9.+-]{0,40}")
# Names of other numbers in replies and in reports of rounds.
TAKEN = re.compile(
    r"(global-|test-|trimmed-|not-finite-|training-error|dp-|f1$|f1-).*|"
    r"accuracy|column-sums|macro-f1|micro-f1|rmse|mae|r2|loss|risk|auto|value-sums|counts|seconds|examples|"
    r"clients|client|sem|half-distance|error|novel|model|role|num-examples|input-size|unlabeled|"
    r"capabilities|table-columns|class-names|classes|public-samples|(public|frozen)-projections|"
    r"input-axes|(input|value)-magnitude|export-scaling|prototype|sub-population|head"
)
Scores = Mapping[str, Callable[..., Any]] | Iterable[Callable[..., Any]]

log = logging.getLogger("flwr")


class OwnScore:
    """A score of outputs and labels on the CPU, which must give one number.

    For `binary` and a single value both are (n,); outputs of other tasks are (n, C) or (n, k).
    Outputs of classes and labels are logits; values have the unit in which they were given."""

    def __init__(self, name: str, score: Callable[..., Any]) -> None:
        self.name = name
        self._score = score
        self._failed = False

    def of(self, outputs: Tensor, y: Tensor, targets: Targets) -> float | None:
        """Its value for these samples; None, with a warning for the first time, if it fails or
        gives NaN, as some do where a client has samples of one class alone."""
        try:
            return self.value(outputs, y, targets)
        except Exception as error:  # the user's code; the client's other scores stay
            if not self._failed:
                log.warning("%s; such clients are left out of the mean %s", error, self.name)
            self._failed = True
            return None

    def value(self, outputs: Tensor, y: Tensor, targets: Targets) -> float:
        """Its value for these samples. Raises ValueError for a result that is no number or NaN, and
        for an error in its code."""
        outputs, y = _as_given(outputs, y, targets)
        # A metric collects what it sees: each client has a new one.
        score = deepcopy(self._score) if hasattr(self._score, "reset") else self._score
        shapes = f"outputs {tuple(outputs.shape)} and labels {tuple(y.shape)}"
        try:
            with torch.no_grad():
                value = score(outputs, y)
        except Exception as error:
            raise ValueError(
                f"the score {self.name!r} fails for {shapes}: {type(error).__name__}: {error}"
            ) from error
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the score {self.name!r} gave {value!r:.200} for {shapes}; it must give one number"
            ) from error
        if math.isnan(number):
            raise ValueError(f"the score {self.name!r} gave NaN for {shapes}")
        return number


def _as_given(outputs: Tensor, y: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """Outputs and labels as a user's function takes them."""
    outputs = outputs.detach().cpu()
    y = y.cpu()
    if targets.task == BINARY:
        return outputs[:, 0], y
    if targets.task == LABELS:
        return outputs, y.long()
    if targets.task == VALUES:
        outputs = in_units(outputs, targets)
        y = in_units(y, targets)
        if y.shape[1] == 1:  # a single value: vectors (n,)
            return outputs[:, 0], y[:, 0]
    return outputs, y


def named_scores(given: Scores) -> dict[str, OwnScore]:
    """The scores by the names under which they are reported: keys of a table, or the names of
    functions. A class, as of torchmetrics, is called without arguments.

    Raises ValueError for what is no function, and for a name that cannot be used."""
    if not isinstance(given, Mapping):
        given = {_name_of(score): score for score in given}
    scores: dict[str, OwnScore] = {}
    for name, function_or_class in given.items():
        score: Any = function_or_class
        if isinstance(function_or_class, type):
            score = _made(name, function_or_class)
        if not callable(score):
            raise ValueError(
                f"the score {name!r} is {score!r:.200}; it must be a function of outputs and labels"
            )
        plain = str(name).replace("_", "-").removeprefix("-")
        if not NAME.fullmatch(plain) or TAKEN.fullmatch(plain):
            raise ValueError(
                f"a score is called {name!r:.200}, which is the name of another number or no word "
                "of letters, digits and hyphens; name it otherwise"
            )
        less_is_better = str(name).startswith("-")
        less_is_better |= getattr(score, "higher_is_better", None) is False
        reported = f"-{plain}" if less_is_better else plain
        scores[reported] = OwnScore(reported, score)
    return scores


def _name_of(score: Any) -> str:
    """The name of a function, or of a metric's class."""
    return str(getattr(score, "__name__", type(score).__name__))


def _made(name: str, kind: type) -> Any:
    try:
        return kind()
    except TypeError as error:
        raise ValueError(
            f"the score {name!r} is a class that needs arguments ({error}); name an object of it"
        ) from error


@lru_cache(maxsize=8)
def load_scores(references: str) -> Mapping[str, OwnScore]:
    """The scores of the setting `scores`: references ``module:NAME``, separated by commas. Errors
    as `named_scores` and `fedapps.common.external_code.load`."""
    words = [word.strip() for word in references.split(",") if word.strip()]
    for word in words:
        if not external_code.is_reference(word):
            raise ValueError(f"scores is {references!r:.200}; {word!r:.80} is no module:NAME")
    return named_scores({own_score_name(word): external_code.load(word) for word in words})
