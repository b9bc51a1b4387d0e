"""What a run's folder holds, and reading it: anybody may have written it.

summary.json is written last, and holds the SHA-256 of every file with arrays under `files`. So a
file that it does not name is not of the run, and a file with another digest is refused: the process
was killed between two files, or somebody replaced one.

A *state* consists of dicts, lists and sets of arrays, numbers and texts. In a file, its arrays are
the tensors of safetensors. Everything else is JSON in the file's header: an array is
``{"array": name}``, a dict ``{"dict": [[key, value], …]}`` in its order. No pickle."""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from clients.core.arrays import Arrays
from clients.core.protocol import RUN_TOKEN
from strategies.core.replies import finite

logger = logging.getLogger(__name__)

State = dict[str, Any]

SUMMARY = "summary.json"
DIGESTS = "files"  # the summary's key
HEX_DIGITS = 64  # of a SHA-256
MODEL = "model.safetensors"
HANDOUT = "handout.safetensors"  # clients' models that a method may hand out
STRATEGY = "strategy.safetensors"
CLIENTS = "clients"  # the folder of clients' states; the summary has one digest for it
TOKEN = "token.json"  # by it nodes recognize their states of the run
CHECKPOINTS = "checkpoints"  # a folder
WHICH = ("best", "last")  # rounds whose model a run's folder holds
MAX_DIGITS = 100  # of a whole number in JSON; a float cannot hold 310
STATE_FORMAT = "1"
HEADER_SIZE = 8  # bytes of a safetensors file that give the length of its header


def of_round(file: Path, which: str) -> Path:
    """The file with the state of the "best" or of the "last" round: model-final.safetensors."""
    return file.with_stem(f"{file.stem}-final") if which == "last" else file


def read_json(file: Path) -> Any:
    """The content of a JSON file. Raises ValueError if it is damaged, nested too deep, or holds
    whole numbers that no float can hold."""
    try:
        return json.loads(file.read_text("utf-8"), parse_int=_parse_int)
    except RecursionError as error:
        raise ValueError(f"{file} is damaged: nested too deep") from error
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def digest(data: bytes) -> str:
    """The SHA-256 of a file's content, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def digest_of_folder(digests: Mapping[str, str]) -> str:
    """One digest for files of a folder, from the digests of the single files by name."""
    lines = [f"{name} {value}\n" for name, value in sorted(digests.items())]
    return digest("".join(lines).encode())


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary of a run. Raises ValueError if it is missing or damaged."""
    file = folder / SUMMARY
    if not file.is_file():
        raise refusal(folder, f"{folder} holds no {SUMMARY}, which vouches for the run's files")
    summary = read_json(file)
    if not isinstance(summary, dict):
        raise ValueError(f"{file} is damaged: it holds no table")
    return summary


def refusal(folder: Path, reason: str, repair: str = "") -> ValueError:
    """The error for files that must not be used, with what repairs them; by default a run's."""
    if repair:
        return ValueError(f"{reason}; {repair}")
    if any((folder / CHECKPOINTS).glob("*.safetensors")):
        repair = f"go on with the run: fedapps run --resume {folder}"
    else:
        repair = "copy it again if it is a copy, else repeat the run with --fresh"
    return ValueError(f"{reason}; {repair}")


@dataclass(frozen=True)
class SavedFiles:
    """The files with arrays in a folder, and their `digests` by name.

    `digests` is None for a folder of an earlier release, which vouches for no file. Errors end with
    `repair`, by default what repairs a run."""

    folder: Path
    digests: Mapping[str, str] | None
    repair: str = ""

    @classmethod
    def of_run(cls, folder: Path) -> Self:
        """Those of a run. Raises ValueError if the run has no summary, or a damaged one."""
        return cls.named_in(folder, SUMMARY, read_summary(folder))

    @classmethod
    def named_in(
        cls, folder: Path, name: str, content: Mapping[str, Any], repair: str = ""
    ) -> Self:
        """Those that the `content` of the JSON file `name` vouches for."""
        if DIGESTS not in content:
            _warn_of_earlier_release(folder, name)
            return cls(folder, None, repair)
        digests = content[DIGESTS]
        if not isinstance(digests, dict) or not all(map(_is_digest, digests.values())):
            raise ValueError(f"{folder / name} is damaged: its {DIGESTS} are no SHA-256 digests")
        return cls(folder, digests, repair)

    def __contains__(self, name: str) -> bool:
        """Whether the file is one of the run's."""
        if self.digests is None:
            return (self.folder / name).exists()
        return name in self.digests

    def read(self, name: str) -> bytes:
        """The content of a file of the run. Raises ValueError if it is missing or another one."""
        try:
            data = (self.folder / name).read_bytes()
        except FileNotFoundError:
            raise self.refusal(f"{self.folder} holds no {name}") from None
        except OSError as error:
            raise ValueError(f"{self.folder / name} cannot be read: {error}") from error
        self.check(name, digest(data))
        return data

    def check(self, name: str, found: str) -> None:
        """Raise ValueError if a file or folder of the run has another digest than `found`."""
        if self.digests is not None and self.digests.get(name) != found:
            raise self.refusal(
                f"{self.folder / name} is of another round or run than the summary: it was "
                "replaced, or the process was killed while it wrote"
            )

    def arrays(self, name: str) -> Arrays:
        """The arrays of a safetensors file. Errors as `read`, and for NaN or infinity."""
        return self.parse(name, self.read(name))

    def parse(self, name: str, data: bytes) -> Arrays:
        """The arrays in the content of a safetensors file. Raises ValueError if the content is
        damaged, and for NaN or infinity."""
        file = self.folder / name
        try:
            loaded = load(data)
        except (SafetensorError, ValueError) as error:
            raise self.refusal(f"{file} is damaged: {error}") from error
        # The library's order changes from process to process; sums and draws follow the order.
        arrays: Arrays = dict(sorted(loaded.items()))
        for array_name, array in arrays.items():
            if array.dtype.kind in "fc" and not np.isfinite(array).all():
                raise self.refusal(f"{file} holds NaN or infinity, in {array_name}")
        return arrays

    def refusal(self, reason: str) -> ValueError:
        """The error for a file that must not be used, with what repairs it."""
        return refusal(self.folder, reason, self.repair)


def read_arrays(folder: Path, which: str = "best") -> Arrays:
    """The model in a run's folder, of the "best" or of the "last" round.

    Raises ValueError if the run has no model or no summary, and if the model is damaged, is not the
    one that the summary vouches for, or holds NaN or infinity."""
    if not (folder / MODEL).is_file():
        raise ValueError(
            f"{folder} holds no {MODEL}; name the folder of a run, <method>-seed<seed>"
        )
    saved = SavedFiles.of_run(folder)
    name = of_round(folder / MODEL, which).name
    if name in saved:
        return saved.arrays(name)
    if which == "last":
        raise ValueError(
            f"{folder} holds no {name}: the run did not finish, was copied without the file, "
            "or is of an earlier release, which saved only the best round; use round best"
        )
    raise refusal(folder, f"{folder / name} is not of this run: its {SUMMARY} does not name it")


def read_former(run: Path, which: str = "best") -> State:
    """The state that a strategy starts from, of the "best" or the "last" round.

    Raises ValueError if the model or the summary is missing, and if a file is damaged, is not the
    one that the summary vouches for, or holds NaN or infinity."""
    state: State = {"arrays": read_arrays(run, which)}
    saved = SavedFiles.of_run(run)
    if (name := of_round(run / HANDOUT, which).name) in saved:
        state["handout"] = saved.arrays(name)
    if (name := of_round(run / STRATEGY, which).name) in saved:
        data = saved.read(name)
        try:
            state["kept"] = parse_state(data)
        except ValueError as error:
            raise ValueError(f"{run / name} is refused: {error}") from error
        if not finite(state["kept"]):
            raise saved.refusal(f"{run / name} holds NaN or infinity")
    if (file := run / TOKEN).is_file():
        content = read_json(file)
        token = content.get(RUN_TOKEN) if isinstance(content, dict) else None
        if not isinstance(token, str):
            raise ValueError(f"{file} is damaged: it holds no {RUN_TOKEN}")
        state["token"] = token
    return state


def read_client_states(run: Path) -> dict[int, Arrays]:
    """The states of the run's clients by client id; {} if they are unknown, with a warning if the
    run had some and the whole folder was removed.

    Raises ValueError as `read_former`."""
    saved = SavedFiles.of_run(run)
    if CLIENTS not in saved:
        return {}
    if not (run / CLIENTS).is_dir():
        logger.warning("%s holds no %s/ any more: its clients begin without state", run, CLIENTS)
        return {}
    states: dict[int, Arrays] = {}
    digests: dict[str, str] = {}
    for file in (run / CLIENTS).glob("*.safetensors"):
        if not file.stem.isdecimal():
            raise ValueError(f"{file} is damaged: its name is no client's id")
        data = file.read_bytes()
        digests[file.name] = digest(data)
        states[int(file.stem)] = saved.parse(f"{CLIENTS}/{file.name}", data)
    saved.check(CLIENTS, digest_of_folder(digests))
    return states


def model_round(folder: Path, which: str = "best") -> int:
    """The round of the model in a run's folder; 0 if its summary has none. Raises ValueError if
    the entry is no round."""
    return _round_of(
        folder, *(["last_round"] if which == "last" else ["novel_round", "best_round"])
    )


def trained_rounds(folder: Path, which: str = "best") -> int:
    """The rounds that this model was trained for, with those of the runs that its run went on from.
    Raises ValueError as `model_round`."""
    return model_round(folder, which) + _round_of(folder, "earlier_rounds")


def _round_of(folder: Path, *names: str) -> int:
    """The summary's first entry of these names."""
    summary = read_summary(folder)
    name = next((name for name in names if name in summary), names[-1])
    number = summary.get(name, 0)
    if type(number) is not int or not 0 <= number < 2**63:
        raise ValueError(f"{folder / SUMMARY} is damaged: its {name} is {number!r:.100}")
    return number


@contextmanager
def opening(folder: Path) -> Iterator[None]:
    """Around the use of a saved run, which anybody may have written: any error that a damaged file
    causes in other code becomes a ValueError that names the folder."""
    try:
        yield
    except (ValueError, OSError):
        raise
    except (LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, RuntimeError,
            SafetensorError) as error:  # fmt: skip
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(f"{folder} cannot be used; a file in it is damaged ({reason})") from error


def state_bytes(state: Mapping[str, Any]) -> bytes:
    """The content of a state's file."""
    arrays: Arrays = {}
    text = json.dumps(_pack(state, "", arrays))
    header = {"format": STATE_FORMAT, "state": text, "digest": _digest_of_state(text, arrays)}
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
    if header.get("format") != STATE_FORMAT:
        raise ValueError(f"its format is {header.get('format')!r}, not {STATE_FORMAT!r}")
    if header.get("digest") != _digest_of_state(header.get("state", ""), arrays):
        raise ValueError("it is damaged: content and digest differ")
    try:
        state = _unpack(json.loads(header["state"]), arrays)
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"it is damaged: {error!r}") from error
    if not isinstance(state, dict):
        raise ValueError("it holds no state")
    return state


def _digest_of_state(text: str, arrays: Arrays) -> str:
    """Digest of the JSON and of every array's name, dtype, shape and content."""
    hasher = hashlib.blake2b(text.encode(), digest_size=16)
    for name, array in sorted(arrays.items()):
        hasher.update(f"{name} {array.dtype.str} {array.shape}".encode())
        hasher.update(np.asarray(array, order="C").data)
    return hasher.hexdigest()


def _pack(value: Any, name: str, arrays: Arrays) -> Any:
    """`value` as JSON; its arrays are moved to `arrays`."""
    if isinstance(value, str | int | float):  # nearly all values, and quickly seen
        return value
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


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) == HEX_DIGITS


@cache
def _warn_of_earlier_release(folder: Path, name: str) -> None:
    """Warn once of a folder whose files nothing vouches for; a later release refuses it."""
    logger.warning(
        "%s is of an earlier release: its %s vouches for no file, so a file of another round or "
        "run would not be noticed; only damage, NaN and infinity are",
        folder,
        name,
    )
