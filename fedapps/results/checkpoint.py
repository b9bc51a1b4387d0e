"""Checkpoints: the whole state of a run in one file, which is refused if it is damaged.

A state consists of dicts, lists and sets of arrays, numbers and texts. Its arrays are the tensors
of a safetensors file. Everything else is JSON in the file's header: an array is
``{"array": name}``, a dict ``{"dict": [[key, value], …]}`` in its order. No pickle."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from clients.core.arrays import Arrays
from fedapps.files import CHECKPOINTS, write_files
from fedapps.settings.config import Config, differences

FORMAT = "1"
HEADER_SIZE = 8  # bytes of a safetensors file that give the length of its header
KEPT = 2  # if the newest is damaged, the one before it is used
State = dict[str, Any]


def write_checkpoint(run: Path, round_: int, content: bytes) -> None:
    """Write the checkpoint of a round to the folder `run`; of older ones only one stays."""
    write_files({_file(run, round_): content})
    for old in [r for r in _saved_rounds(run) if r <= round_][:-KEPT]:
        _file(run, old).unlink()


def newest_checkpoint(run: Path, config: Config) -> tuple[State | None, list[str]]:
    """The state of the newest undamaged checkpoint in the folder `run`, or None, and why newer
    ones are refused."""
    refused: list[str] = []
    for file in sorted((run / CHECKPOINTS).glob("round-*.safetensors"), reverse=True):
        try:
            content = read_state(file)
            if not all(isinstance(content.get(part), dict) for part in ("config", "state")):
                raise ValueError("it holds no run's state")
            if other := differences(content["config"], config):
                raise ValueError(f"it is another run's: {other}")
            return content["state"], refused
        except ValueError as error:
            refused.append(f"{file} is refused: {error}")
    return None, refused


def next_round(state: State) -> int:
    """The round with which a run continues from a checkpoint's `state`."""
    return int(state["strategy"]["round"]) + 1


def saved_round(run: Path) -> int:
    """The round of the newest checkpoint in the folder `run`, by its name; 0 if there is none."""
    return max(_saved_rounds(run), default=0)


def _saved_rounds(run: Path) -> list[int]:
    """The rounds of all checkpoints in the folder, ascending."""
    names = [f.stem.removeprefix("round-") for f in (run / CHECKPOINTS).glob("round-*.safetensors")]
    return sorted(int(name) for name in names if name.isdecimal())


def state_bytes(state: Mapping[str, Any]) -> bytes:
    """The content of a state's file."""
    arrays: Arrays = {}
    text = json.dumps(_pack(state, "", arrays))
    header = {"format": FORMAT, "state": text, "digest": _digest(text, arrays)}
    content: bytes = save(arrays, header)
    return content


def read_state(file: Path) -> State:
    """The state in `file`. Raises ValueError if it is damaged or has another format."""
    try:
        with safe_open(file, "numpy") as content:
            header = content.metadata() or {}
            arrays = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"it cannot be read ({error})") from error
    return _state(header, arrays)


def parse_state(data: bytes) -> State:
    """The state in the content of a file. Errors as `read_state`."""
    try:
        arrays = load(data)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"it cannot be read ({error})") from error
    size = int.from_bytes(data[:HEADER_SIZE], "little")
    header = json.loads(data[HEADER_SIZE : HEADER_SIZE + size])
    return _state(header.get("__metadata__", {}), arrays)


def _state(header: Mapping[str, str], arrays: Arrays) -> State:
    if header.get("format") != FORMAT:
        raise ValueError(f"its format is {header.get('format')!r}, not {FORMAT!r}")
    if header.get("digest") != _digest(header.get("state", ""), arrays):
        raise ValueError("it is damaged: content and digest differ")
    try:
        state = _unpack(json.loads(header["state"]), arrays)
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"it is damaged: {error!r}") from error
    if not isinstance(state, dict):
        raise ValueError("it holds no state")
    return state


def _file(run: Path, round_: int) -> Path:
    return run / CHECKPOINTS / f"round-{round_:08d}.safetensors"


def _digest(text: str, arrays: Arrays) -> str:
    """Digest of the JSON and of every array's name, dtype, shape and content."""
    digest = hashlib.blake2b(text.encode(), digest_size=16)
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.asarray(array, order="C").data)
    return digest.hexdigest()


def _pack(value: Any, name: str, arrays: Arrays) -> Any:
    """`value` as JSON; its arrays are moved to `arrays`."""
    if isinstance(value, np.ndarray):
        assert name not in arrays, name
        arrays[name] = np.asarray(value, order="C")
        return {"array": name}
    if isinstance(value, Mapping):
        return {"dict": [[key, _pack(v, f"{name}/{key}", arrays)] for key, v in value.items()]}
    if isinstance(value, set):
        return {"set": sorted(value)}
    if isinstance(value, list | tuple):
        return [_pack(item, f"{name}/{i}", arrays) for i, item in enumerate(value)]
    return value


def _unpack(value: Any, arrays: Arrays) -> Any:
    if isinstance(value, list):
        return [_unpack(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return arrays[value["array"]]
    if "set" in value:
        return set(value["set"])
    return {key: _unpack(item, arrays) for key, item in value["dict"]}
