"""Converted datasets on disk, memory-mapped by every process of a machine.

The folder is $FEDAPPS_CACHE_DIR, else ~/.cache/fedapps; an entry is a safetensors file and a JSON
file."""

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fedapps.common import external_code
from fedapps.common.file_states import file_states
from fedapps.common.home import home_folder
from fedapps.common.tasks import CLASSES
from partitions.datasets.description import Column, Description
from partitions.datasets.readers.raw import Raw

VERSION = 5  # of the format and of the readers' results
DATA, META = "data.safetensors", "meta.json"
READABLE = 40  # characters of a name at the beginning of an entry's name
UNFINISHED = re.compile(r"[A-Za-z0-9_-]+-[0-9a-f]{32}\.\w{8}")  # names of folders, see `_store`
DAY = 86_400  # seconds


def cache_dir() -> Path:
    """The cache's folder."""
    named = os.path.expanduser(os.environ.get("FEDAPPS_CACHE_DIR", ""))
    return Path(named or home_folder() / ".cache" / "fedapps")


def fingerprint(folder: Path, *, recursive: bool = True) -> str:
    """A hash of the paths, sizes and times of a file, or of the files in a folder, behind links
    too. Without `recursive`, files in its subfolders do not count."""
    stats = []
    for file in file_states(folder, recursive=recursive):
        stats.append((file.real_path, file.size, file.changed_ns))
    stats.sort()
    return hashlib.blake2b(json.dumps([VERSION, stats]).encode(), digest_size=8).hexdigest()


def code_identity(reference: str, options: Mapping[str, object]) -> dict[str, object]:
    """The inputs of a user's function or class, as JSON: its module's source, its arguments, and
    the sizes and times of files and folders that its text arguments name.

    Files that the code reads without such an argument are not noticed. Errors as
    `external_code.load`."""
    code = external_code.load(reference)
    defaults = external_code.keywords(code) if callable(code) else {}
    arguments = {}
    files = {}
    for name, value in (defaults | dict(options)).items():
        arguments[name] = value if isinstance(value, external_code.Value) else str(value)
        fingerprint_of_files = _named_files(arguments[name])
        if fingerprint_of_files:
            files[name] = fingerprint_of_files
    return {
        "reference": reference,
        "source": external_code.source_code(reference),
        "arguments": arguments,
        "files": files,
    }


def _named_files(value: object) -> str:
    """The fingerprint of the file or folder that a text names; "" if it names none.

    Subfolders do not count for a folder that contains the working directory or the user's home,
    such as "." or "/": it may hold the whole disk."""
    if not isinstance(value, str) or not value:
        return ""
    try:
        path = Path(value).expanduser()
        if not path.exists():
            return ""
        place = path.resolve()
        around = any(folder.is_relative_to(place) for folder in (Path.cwd(), home_folder()))
        return fingerprint(path, recursive=not (path.is_dir() and around))
    except (OSError, ValueError, RuntimeError):  # the text is too long for a path, or not readable
        return ""


def cache_key(name: str, **identity: object) -> str:
    """The name of a cache entry: the beginning of `name`, and a hash of `name` and `identity`.

    `identity` must be convertible to JSON. Of `name` only letters, digits and hyphens are used,
    since it may be a user's text and becomes part of a path."""
    text = json.dumps([VERSION, name, identity], sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9-]', '_', name)[:READABLE]}-{digest}"


def content_key(name: str, raw: Raw) -> str:
    """A key for data that no file and no code identifies: a hash of the data themselves."""
    arrays = {"x": raw.x, "y": raw.y, **raw.columns}
    digests = {
        column: hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=16).hexdigest()
        for column, array in arrays.items()
    }
    given: dict[str, Any] = {"num_train": raw.num_train, "classes": raw.classes}
    if raw.num_validation:
        given["num_validation"] = raw.num_validation
    return cache_key(name, content=digests, **given)


def cached(key: str, read: Callable[[], Raw]) -> Raw:
    """The entry `key` of `cache_key`, memory-mapped; a missing entry is first read and written.

    Of several processes that write at once the first one's entry stays. If the cache cannot be
    written or read, the arrays stay in memory, with a warning. A damaged entry is written again."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", key):
        raise ValueError(f"{key!r} is no key of cache_key: it would lead out of the cache")
    target = cache_dir() / key
    try:
        if target.is_dir():
            return _mapped(target)
    except OSError as error:
        _warn(target, error)
        return read()
    except (SafetensorError, ValueError, LookupError, TypeError) as error:  # as by a power failure
        sentence = "%s is damaged (%s) and is written again"
        logging.getLogger(__name__).warning(sentence, target, error)
        shutil.rmtree(target, ignore_errors=True)
    raw = read()
    try:
        _store(raw, target)
        return _mapped(target)
    except OSError as error:
        _warn(target, error)
        return raw


def save_arrays(
    arrays: Mapping[str, np.ndarray], file: Path, about: dict[str, str] | None = None
) -> None:
    """Write a safetensors file. Raises OSError if the disk fails, as other writers do."""
    try:
        save_file({n: np.ascontiguousarray(a) for n, a in arrays.items()}, file, about)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _warn(target: Path, error: OSError) -> None:
    logging.getLogger(__name__).warning(
        "no dataset can be kept as %s (%s): every process has its own copy; set FEDAPPS_CACHE_DIR",
        target,
        error,
    )


def _store(raw: Raw, target: Path) -> None:
    """Write the arrays beside `target`, then rename; the first of two writers wins."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(target.parent)
    private = Path(tempfile.mkdtemp(dir=target.parent, prefix=f"{target.name}."))
    try:
        temporary = private / target.name
        temporary.mkdir()  # unlike mkdtemp's, with the umask's permissions
        arrays = {"x": raw.x, "y": raw.y.astype(np.int64) if raw.y.ndim == 1 else raw.y}
        values_of_columns = {}
        for column, values in raw.columns.items():
            unique, inverse = np.unique(values, return_inverse=True)
            arrays[f"column.{column}"] = inverse
            values_of_columns[column] = unique.tolist()
        save_arrays(arrays, temporary / DATA)
        (temporary / DATA).chmod(temporary.stat().st_mode & 0o666)  # safetensors makes it private
        meta = {
            "num_train": raw.num_train,
            "num_validation": raw.num_validation,
            "classes": raw.classes,
            "columns": values_of_columns,
            "notes": raw.notes,
            "task": raw.task,
            "words": raw.words,
            "owner": raw.owner,
            "inputs": None if raw.inputs is None else asdict(raw.inputs),
        }
        (temporary / META).write_text(json.dumps(meta), "utf-8")
        try:
            temporary.rename(target)
        except OSError:
            if not target.is_dir():  # it is one if another process was first
                raise
    finally:
        shutil.rmtree(private, ignore_errors=True)


def _remove_unfinished(folder: Path) -> None:
    """Remove entries that were begun a day ago or earlier: their processes were killed."""
    for path in folder.glob("*.*"):
        if not UNFINISHED.fullmatch(path.name):  # the folder may hold other things
            continue
        with suppress(OSError):  # another process was faster
            if time.time() - path.stat().st_mtime > DAY:
                shutil.rmtree(path)


def _mapped(target: Path) -> Raw:
    """The stored arrays, mapped copy-on-write: processes share the pages that none writes."""
    from safetensors.torch import load_file

    arrays = {name: tensor.numpy() for name, tensor in load_file(target / DATA).items()}
    meta = json.loads((target / META).read_text("utf-8"))
    columns = {}
    for name, values in meta["columns"].items():
        columns[name] = np.array(values)[arrays[f"column.{name}"]]
    return Raw(
        arrays["x"],
        arrays["y"],
        meta["num_train"],
        columns,
        tuple(meta["classes"]),
        notes=tuple(meta.get("notes", ())),
        task=meta.get("task", CLASSES),
        inputs=_description(meta.get("inputs")),
        num_validation=meta.get("num_validation", 0),
        words=tuple(meta.get("words", ())),
        owner=meta.get("owner", ""),
    )


def _description(saved: dict[str, Any] | None) -> Description | None:
    """The description that `_store` wrote."""
    if saved is None:
        return None
    columns = []
    for column in saved["columns"]:
        columns.append(Column(**column | {"categories": tuple(column["categories"])}))
    return Description(saved["kind"], tuple(columns), saved.get("texts", ""))


# The cache of each client's rows. To import flwr-datasets and its dependencies costs a process
# seconds and a hundred megabytes, so one process of a machine partitions a dataset, and the others
# read its result. The key covers the configuration, the dataset's files, this package's sources and
# the libraries' versions.
TRAIN, VALIDATION, TEST = 0, 1, 2  # parts of a dataset
MAX_FILES = 200  # the oldest files beyond this number are deleted


class RowsOfClients(Sequence[np.ndarray]):
    """Each client's rows, as slices of one array: `rows` has those of all clients, one after the
    other, and `ends` (num_clients,) where each client's end.

    A client costs 8 bytes beside its rows, where an array for each costs more than 100."""

    def __init__(self, rows: np.ndarray, ends: np.ndarray) -> None:
        self.rows = rows
        self.ends = ends

    @classmethod
    def of(cls, rows: Sequence[np.ndarray]) -> Self:
        """The same rows, joined."""
        sizes = [len(client_rows) for client_rows in rows]
        return cls(np.concatenate(rows), np.cumsum(sizes))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, client: Any) -> Any:
        number = range(len(self))[client]
        if isinstance(number, range):
            return [self[i] for i in number]
        start = self.ends[number - 1] if number else 0
        return self.rows[start : self.ends[number]]

    @property
    def sizes(self) -> np.ndarray:
        """The number of rows of each client, (num_clients,)."""
        return np.diff(self.ends, prepend=0)


@dataclass(frozen=True)
class Assignment:
    """The dataset's `rows` of each client, and the `public` rows, which belong to no client.

    `pooled`: the rule has partitioned training, validation and test rows separately. `attributes`
    describe each client, or none if the list is empty."""

    rows: RowsOfClients
    public: np.ndarray
    pooled: bool
    attributes: list[dict[str, float | int | str]]

    @classmethod
    def of(
        cls,
        rows: Sequence[np.ndarray],
        public: np.ndarray,
        pooled: bool,
        attributes: list[dict[str, float | int | str]],
    ) -> Self:
        """The assignment of each client's `rows` and `attributes`, in little memory."""
        if not any(attributes):
            attributes = []
        return cls(RowsOfClients.of(rows), public, pooled, attributes)


def cached_assignment(
    dataset: str, config: Mapping[str, object], make: Callable[[], Assignment]
) -> Assignment:
    """The result of `make()`, from the cache if it holds the same dataset and configuration.

    `dataset` identifies the dataset's content; if it is empty, nothing is cached."""
    if not dataset:
        return make()
    text = json.dumps([dataset, _code(), sorted(config.items())])
    key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    file = cache_dir() / "deals" / f"{key}.safetensors"
    try:
        return _read(file)
    except (OSError, SafetensorError):
        assignment = make()
    with suppress(OSError):  # without a cache the next process partitions again
        _write(assignment, file)
    return assignment


@cache
def _code() -> str:
    """A hash of this package's sources and of the versions of the libraries that partition."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py")))
    libraries = [version(name) for name in ("flwr-datasets", "datasets", "numpy")]
    return hashlib.blake2b(sources + repr(libraries).encode()).hexdigest()


def _write(assignment: Assignment, file: Path) -> None:
    """Write a temporary file, then rename it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = assignment.rows
    arrays = {"rows": rows.rows, "sizes": rows.sizes, "public": assignment.public}
    about = json.dumps({"pooled": assignment.pooled, "attributes": assignment.attributes})
    handle, name = tempfile.mkstemp(dir=file.parent)
    os.close(handle)
    try:
        save_arrays(arrays, Path(name), {"about": about})
        Path(name).rename(file)
    finally:
        Path(name).unlink(missing_ok=True)
    oldest_first = sorted(file.parent.glob("*.safetensors"), key=os.path.getmtime)
    for old in oldest_first[:-MAX_FILES]:
        old.unlink(missing_ok=True)


def _read(file: Path) -> Assignment:
    from safetensors.torch import load_file

    with safe_open(file, framework="numpy") as content:
        about = json.loads(content.metadata()["about"])
    # Mapped: only the rows of clients that take part come into memory.
    arrays = {name: tensor.numpy() for name, tensor in load_file(file).items()}
    rows = RowsOfClients(arrays["rows"], np.cumsum(arrays["sizes"]))
    return Assignment(rows, arrays["public"], about["pooled"], about["attributes"])
