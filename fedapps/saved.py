"""The files of a saved run, as its summary vouches for them.

summary.json is written last, and holds the SHA-256 of every file with arrays under `files`. So a
file that it does not name is not of the run, and a file with another digest is refused: the process
was killed between two files, or somebody replaced one."""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from clients.core.arrays import Arrays
from fedapps.files import CHECKPOINTS, MODEL, of_round, read_json

logger = logging.getLogger(__name__)

SUMMARY = "summary.json"
DIGESTS = "files"  # the summary's key
CLIENTS = "clients"  # the folder of clients' states; the summary has one digest for it
HEX_DIGITS = 64  # of a SHA-256


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
