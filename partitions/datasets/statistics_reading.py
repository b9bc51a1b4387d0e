"""Reading the statistics that a node sends and the encoding that a server sends, both untrusted."""

import json
import math
from typing import Any

from fedapps.common.tasks import Targets
from partitions.datasets.description import CATEGORY, IMAGE, NUMBER, SIGNAL, TABLE, TRUTH, VECTOR
from partitions.datasets.encoding import Encoding, Feature
from partitions.datasets.readers.columns import MAX_CATEGORIES
from partitions.datasets.shared_encoding import SharedEncoding
from partitions.datasets.statistics import KINDS, LARGEST, Statistics, Sums

COLUMN_KINDS = (NUMBER, TRUTH, CATEGORY)
MAX_COLUMNS = 10_000
MAX_NAME = 200  # characters of a column's or a category's name
MAX_TEXT = 2**24  # characters of a client's statistics
MAX_ROWS = 10**9


def read_statistics(given: Any) -> Statistics:
    """The statistics in a client's reply. Raises ValueError with the first value that no client of
    this package sends."""
    if not isinstance(given, str) or len(given) > MAX_TEXT:
        raise ValueError(f"must be a text of at most {MAX_TEXT} characters")
    content = _parsed(given)
    if not isinstance(content, dict) or content.keys() != {"inputs", "rows", "columns", "targets"}:
        raise ValueError("must hold inputs, rows, columns and targets")
    inputs = content["inputs"]
    if inputs not in KINDS:
        raise ValueError(f"must be of a kind in {', '.join(KINDS)}, and inputs is {inputs!r:.80}")
    rows = _whole("rows", content["rows"], 1)
    columns = _columns("columns", content["columns"])
    targets = _columns("targets", content["targets"])
    if not columns:
        raise ValueError("must have a column")
    for sums in columns:
        _check_counts(sums, rows, inputs)
    for sums in targets:
        _check_counts(sums, rows, VECTOR)
    return Statistics(inputs, rows, columns, targets)


def _parsed(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"must be finite, and holds {constant}")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("must not be nested") from error


def _columns(name: str, given: Any) -> tuple[Sums, ...]:
    if not isinstance(given, list) or len(given) > MAX_COLUMNS:
        raise ValueError(f"must have a list of at most {MAX_COLUMNS} {name}")
    columns = tuple(_sums(entry) for entry in given)
    names = [column.name for column in columns]
    if len(set(names)) < len(names):
        raise ValueError(f"must have {name} of different names")
    return columns


def _sums(given: Any) -> Sums:
    if not isinstance(given, dict) or given.keys() != Sums.__dataclass_fields__.keys():
        raise ValueError(f"must have columns with {', '.join(Sums.__dataclass_fields__)}")
    name = _name(given["name"])
    kind = given["kind"]
    if kind not in COLUMN_KINDS:
        raise ValueError(f"must have columns of {', '.join(COLUMN_KINDS)}, not {kind!r:.80}")
    categories = given["categories"]
    if not isinstance(categories, dict) or len(categories) > MAX_CATEGORIES:
        raise ValueError(f"must have at most {MAX_CATEGORIES} categories in column {name}")
    counts = {_name(key): float(_whole(name, n, 1)) for key, n in categories.items()}
    if type(given["identifier"]) is not bool:
        raise ValueError(f"must say by true or false whether {name} is an identifier")
    squares = _number(name, given["squares"])
    if squares < 0:
        raise ValueError(f"must have no negative squares, and column {name} has {squares:g}")
    return Sums(
        name,
        kind,
        _whole(name, given["count"]),
        _whole(name, given["gaps"]),
        _number(name, given["mean"], LARGEST),
        squares,
        counts,
        given["identifier"],
    )


def _check_counts(sums: Sums, rows: int, inputs: str) -> None:
    """Raise ValueError for counts that no `rows` rows have."""
    cells = sums.count + sums.gaps
    name = sums.name
    fits = cells % rows == 0 and cells > 0 if inputs in (SIGNAL, IMAGE) else cells == rows
    if not fits or (inputs != TABLE and sums.gaps):
        raise ValueError(f"must have {rows} rows, and column {name} has {cells:g} cells")
    if sum(sums.categories.values()) > sums.count or (sums.categories and sums.kind != CATEGORY):
        raise ValueError(f"must have at most {sums.count:g} categories' cells in column {name}")
    if inputs != TABLE and sums.kind != NUMBER:
        raise ValueError(f"must have numbers in column {name}")
    if sums.kind == TRUTH and not 0 <= sums.mean <= 1:
        raise ValueError(f"must have truth values in column {name}, whose mean is {sums.mean:g}")


def _name(given: Any) -> str:
    if not isinstance(given, str) or len(given) > MAX_NAME or not given.isprintable():
        raise ValueError(f"must have printable names of at most {MAX_NAME} characters")
    return given


def _whole(name: str, given: Any, least: int = 0) -> int:
    if type(given) is not int or not least <= given <= MAX_ROWS:
        raise ValueError(f"must count from {least} to {MAX_ROWS}, and {name} has {given!r:.80}")
    return given


def _number(name: str, given: Any, most: float = math.inf) -> float:
    if type(given) not in (int, float) or not abs(given) <= min(most, 1e300):
        raise ValueError(f"must have finite numbers, and column {name} has {given!r:.80}")
    return float(given)


def read_encoding(given: Any) -> SharedEncoding:
    """The encoding in a server's message or in a saved state. Raises ValueError for any other."""
    try:
        content = _parsed(given)
        table = content["table"]
        if table is not None:
            features = [
                Feature(**entry | {"categories": tuple(map(str, entry["categories"]))})
                for entry in table["features"]
            ]
            table = Encoding(tuple(features), str(table["missing"]))
        targets = content["targets"]
        read = SharedEncoding(
            str(content["inputs"]),
            tuple(map(float, content["mean"])),
            tuple(map(float, content["std"])),
            table,
            Targets(
                str(targets["task"]),
                tuple(map(float, targets["mean"])),
                tuple(map(float, targets["std"])),
            ),
            float(content.get("largest", 0.0)),  # states of earlier versions lack it
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"the encoding of inputs is damaged: {error!r:.200}") from error
    kinds_fit = read.inputs in KINDS and (read.inputs == TABLE) == (table is not None)
    sizes_fit = len(read.mean) == len(read.std) > 0
    if table is not None:
        sizes_fit = sizes_fit and len(read.mean) == len(table.outputs)
    deviations = (*read.std, *read.targets.std)
    sizes_fit = sizes_fit and 0 <= read.largest < math.inf
    if not (kinds_fit and sizes_fit and all(0 < std < math.inf for std in deviations)):
        raise ValueError("the encoding of inputs is damaged: its parts do not fit to each other")
    return read
