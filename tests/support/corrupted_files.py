"""Random corruption of the files of a run's folder, as an untrusted author could send them."""

import json
import tomllib

import numpy as np
import tomli_w
from safetensors import safe_open
from safetensors.numpy import save_file

from fedapps.saved import read_state, state_bytes

EVIL = "evil_module:Net"
NAMES = ["x", EVIL, "../x", f"{EVIL}.key", "0", ""]
JUNK = [
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**400, 0.5, -0.5, 1e300, float("nan"),
    float("inf"), "", "x", "0", "fedavg", "nan", EVIL, f"fedavg,{EVIL}", f"{EVIL} lr=1", "os:abort",
    "../../outside", "/tmp/outside", "{0.__class__}", "%s%n", "$\\frac$", "$x", "=1+1", "a\nb",
    "\x1b[31m", "\0", "\ud800", "9" * 5000, [], [1], ["x"], [[]], [1, 2, 3], {}, {"x": 1},
    {"accuracy": 1}, {"0": {"role": "novel", "accuracy": None}},
]  # fmt: skip
ARRAYS = [
    lambda a: a.reshape(-1)[:0],
    lambda a: np.float32(1),
    lambda a: a[..., None],
    lambda a: a.reshape(-1)[1:],
    lambda a: a.astype(np.int8),
    lambda a: a.astype(np.float64),
    lambda a: np.full(a.shape, np.nan, np.float32),
    lambda a: np.zeros((0, 3), np.float32),
]
KINDS = ["gone", "folder", "bytes", "cut", *["content"] * 8]


def spoil(file, draw):
    """Corrupt the file in a random way; returns its name."""
    kind, data = draw.choice(KINDS), file.read_bytes()
    if kind in ("gone", "folder"):
        file.unlink()
        if kind == "folder":
            file.mkdir()
    elif kind == "bytes":
        at = draw.randrange(len(data) + 1)
        file.write_bytes(data[:at] + draw.randbytes(draw.randrange(1, 9)) + data[at + 4 :])
    elif kind == "cut":
        file.write_bytes(data[: draw.randrange(len(data) + 1)])
    else:
        try:
            file.write_bytes(CONTENT[file.suffix](file, draw))
        except (TypeError, ValueError, AttributeError, AssertionError):  # the format cannot hold it
            file.write_bytes(b"[")
    return kind


def places(value, place=()):
    """The path to every value in nested tables and lists."""
    yield place
    if isinstance(value, dict | list):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(entry, (*place, key))


def changed(value, draw):
    """`value` with one entry replaced, removed or added."""
    return _at(value, draw.choice(list(places(value))), draw)


def _at(value, place, draw):
    if not place:
        return draw.choice(JUNK)
    copy = dict(value) if isinstance(value, dict) else list(value)
    kind = draw.randrange(6)
    if len(place) > 1:
        copy[place[0]] = _at(value[place[0]], place[1:], draw)
    elif kind == 0:
        del copy[place[0]]
    elif kind == 1 and isinstance(copy, dict):
        copy[draw.choice(NAMES)] = draw.choice(JUNK)
    else:
        copy[place[0]] = draw.choice(JUNK)
    return copy


def _lines(file, draw):
    lines = file.read_text().splitlines()
    at = draw.randrange(len(lines))
    lines[at] = json.dumps(changed(json.loads(lines[at]), draw))
    return "\n".join([*lines, ""]).encode()


def _arrays(file, draw):
    """Other shapes, types or names of arrays; in a state, other values under a correct digest."""
    if (
        file.stem.removesuffix("-final") in ("strategy", "stream")
        or file.parent.name == "checkpoints"
    ):
        return state_bytes(changed(read_state(file), draw))
    with safe_open(file, "numpy") as content:
        arrays = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    name, kind = draw.choice(sorted(arrays)), draw.randrange(4)
    if kind == 0:
        arrays[draw.choice([*NAMES, "embedding/x", "embedding/9"])] = arrays.pop(name)
    elif kind == 1:
        del arrays[name]
    else:
        arrays[name] = np.ascontiguousarray(draw.choice(ARRAYS)(arrays[name]))
    save_file(arrays, file)
    return file.read_bytes()


CONTENT = {
    ".toml": lambda f, draw: tomli_w.dumps(changed(tomllib.loads(f.read_text()), draw)).encode(),
    ".json": lambda f, draw: json.dumps(changed(json.loads(f.read_text()), draw)).encode(),
    ".jsonl": _lines,
    ".safetensors": _arrays,
}
