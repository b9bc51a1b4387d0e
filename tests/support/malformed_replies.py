"""Malformed replies of hostile or broken clients, and the cause under which each is dropped."""

import io
import math
from functools import partial

import numpy as np
from flwr.app import ConfigRecord, MetricRecord

from clients.core.arrays import from_record, to_record


def file(save, *content, **options):
    buffer = io.BytesIO()
    save(buffer, *content, **options)
    return buffer.getvalue()


def header(shape):
    """A .npy file of 8 bytes whose header claims another shape, or none at all."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(8)


BYTES = {
    "empty": b"",
    "zip": file(np.savez, w=np.ones(2)),
    "pickle": file(np.save, np.array([print]), allow_pickle=True),
    "texts": file(np.save, np.array(["a", "b"])),
    "huge": header("(1000000000000000,)"),
    "negative": header("(-1, -2)"),
    "garbled": header("(((("),
    "unclosed": header("'''"),
}
VALUES = {"nan": math.nan, "infinity": math.inf, "1e10": 1e10, "3e38": 3e38, "-1e20": -1e20}
METRICS = {
    f"{name} is {value!r:.20}": {name: value}
    for name in ("num-examples", "loss", "risk", "dp-sigma", "accuracy", "counts", "head")
    for value in ("many", b"\0", True, [1.0, 2.0], [], -3.5, 1e300, math.nan, 0, 10**9)
}
# Values that no honest client sends. Other large numbers may be an overflow.
NO_NUMBER = {"'many'", "b'\\x00'", "True", "[1.0, 2.0]", "[]"}
NO_COUNT = NO_NUMBER | {"-3.5", "1e+300", "nan"}
REFUSED = {
    "num-examples": NO_COUNT,
    "head": NO_COUNT | {"1000000000"},
    "counts": NO_COUNT | {"0", "1000000000"},
    "accuracy": NO_NUMBER | {"-3.5", "1000000000"},
    "dp-sigma": NO_NUMBER | {"-3.5"},
    "loss": NO_NUMBER,
    "risk": NO_NUMBER,
}


def set_bytes(data, reply):
    for record in reply.content.array_records.values():
        for array in record.values():
            array.data = data


def add_value(value, reply):
    for key, record in reply.content.array_records.items():
        arrays = from_record(record)
        wrong = {n: a + a.dtype.type(value) for n, a in arrays.items() if a.dtype.kind == "f"}
        reply.content[key] = to_record(arrays | wrong)


def set_metrics(values, reply):
    for record in reply.content.metric_records.values():
        for name in values.keys() & record.keys():
            del record[name]
    reply.content["more"] = ConfigRecord(values)


def remove_metrics(reply):
    reply.content["metrics"] = MetricRecord({})


MALFORMED = {
    **{f"bytes: {name}": partial(set_bytes, data) for name, data in BYTES.items()},
    **{f"values: {name}": partial(add_value, value) for name, value in VALUES.items()},
    **{f"metric: {name}": partial(set_metrics, values) for name, values in METRICS.items()},
    "no metrics": remove_metrics,
}


# Properties in a reply to the opening query.
OPENINGS = [
    *({"client": value} for value in ("7", -1, True, [1.0], math.nan, 1e300, b"7")),
    *({"novel": value} for value in ("no", 1, [True])),
    *({"num-examples": value} for value in ("many", -5, math.inf, True, 10**12)),
    *({name: value} for name in ("classes", "public-samples", "input-size")
      for value in (0, math.nan, "all", [3])),
    {"model": "m" * 300}, {"model": 3}, {"model": "two\nlines"},
    {f"more-{i}": i for i in range(200)},
]  # fmt: skip


def due_cause(kind, reply):
    """The cause under which this reply is dropped after the malformation, "" if it is accepted."""
    family, _, what = kind.partition(": ")
    name, _, value = what.partition(" is ")
    arrays = [a for record in reply.content.array_records.values() for a in record.values()]
    if (family == "bytes" and arrays) or (family == "metric" and value in REFUSED[name]):
        return "malformed"
    trained = reply.metadata.message_type == "train"
    if trained and kind in ("no metrics", "metric: num-examples is 0"):
        return "malformed"
    if family == "values" and any(
        a.dtype.startswith("float") and math.prod(a.shape) for a in arrays
    ):
        return "not-finite" if what in ("nan", "infinity") else "absurd"
    return ""
