"""What the inputs of a dataset are: an image, a signal, a vector, tokens, or a row of a table.

A table's columns have names and kinds. The table needs no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

AUTO = "auto"
IMAGE, SIGNAL, TABLE, TOKENS, VECTOR = "image", "signal", "table", "tokens", "vector"
KINDS = {
    IMAGE: "(channels, height, width)",
    SIGNAL: "(channels, time)",
    TABLE: "named columns",
    TOKENS: "(time), whole numbers for an embedding",
    VECTOR: "(columns), numbers without names",
}
BY_CHARACTER, BY_WORD = "characters", "words"  # how texts become tokens
OF_ARRAYS = (IMAGE, SIGNAL, TOKENS, VECTOR)  # what `inputs=` may say of an array
DECLARED = (*OF_ARRAYS, BY_CHARACTER, BY_WORD)  # and of texts

NUMBER, TRUTH, CATEGORY = "number", "truth value", "category"
SCALED = (SIGNAL, TABLE, VECTOR)  # kinds that standardize=auto scales
SHOWN = 10  # names in a sentence
NO_SCALING, BY_TRAINING = "none", "training-clients"  # of standardize


@dataclass(frozen=True)
class Column:
    """A column of a table as it was read.

    Its cells are numbers, 0 and 1, or positions in `categories`; NaN where there is none.
    `identifier` says why the column seems to name its row: then it is left out unless it is asked
    for. `refusal` says why the column cannot be an input."""

    name: str
    kind: str = NUMBER
    categories: tuple[str, ...] = ()
    identifier: str = ""
    refusal: str = ""


@dataclass(frozen=True)
class Description:
    """The kind of a dataset's inputs, the columns of a table in the order of the stored x, and what
    of texts the tokens are: `BY_CHARACTER` or `BY_WORD`; "" for other inputs."""

    kind: str = IMAGE
    columns: tuple[Column, ...] = ()
    texts: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of a table's columns."""
        return tuple(column.name for column in self.columns)


def scaling(config: Mapping[str, Any], inputs: Description | None) -> str:
    """The value of standardize that holds for a dataset of these inputs.

    "auto" scales the columns and channels of a user's own tables, vectors and signals. Datasets of
    the package, which have no description, and images stay as they are."""
    value = str(config["standardize"])
    if value != AUTO:
        return value
    if inputs is not None and inputs.kind in SCALED:
        return BY_TRAINING
    return NO_SCALING


def names_in(text: object) -> list[str]:
    """The names in a setting, separated by commas."""
    return [name.strip() for name in str(text).split(",") if name.strip()]


def listed(names: Sequence[str]) -> str:
    """The first names, separated by commas."""
    shown = ", ".join(f"{name:.60}" for name in names[:SHOWN])
    if len(names) > SHOWN:
        shown += f" and {len(names) - SHOWN} more"
    return shown
