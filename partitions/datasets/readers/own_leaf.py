"""A user's own files in LEAF's JSON: texts, or lists of numbers, of users.

They are one file, a folder of files, or the folders ``train`` and ``test`` of `preprocess.sh`
(`partitions.datasets.readers.leaf`). Texts become tokens: characters where each label is the
character that comes next, else words; `inputs` may declare either."""

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedapps.common.tasks import AUTO, CLASSES
from partitions.datasets.description import (
    BY_CHARACTER,
    BY_WORD,
    TOKENS,
    Description,
)
from partitions.datasets.labels import of_later, of_task
from partitions.datasets.readers.convert import as_inputs, joined
from partitions.datasets.readers.leaf import (
    LABELS_OF_TWEETS,
    TEXT_OF_ROW,
    USER,
    character_tokens,
    files_of_split,
    unknown_characters,
    users_of,
    word_tokens,
)
from partitions.datasets.readers.raw import Raw
from partitions.datasets.words import names_of_characters, padded_line

LONGEST_TEXT = 1000  # characters that a network reads one after the other
KEYS = ("users", "user_data")


@dataclass
class _Split:
    """The samples of one split, by user and in the order of the files."""

    inputs: list[Any] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    users: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)  # file, user and row of each sample


def leaf_files(path: Path) -> dict[str, list[Path]]:
    """LEAF's files at `path` by split; empty if there are none."""
    if path.is_file():
        return {"train": [path]} if path.suffix == ".json" else {}
    files = {}
    for split in ("train", "test"):
        files[split] = files_of_split(path, split)
    if not any(files.values()):
        files["train"] = sorted(path.glob("*.json"))
    return {split: found for split, found in files.items() if found}


def read_leaf(
    path: Path, files: dict[str, list[Path]], later: bool, task: str, declared: str
) -> Raw:
    """The samples of LEAF's `files` at `path`, with the column "user".

    `later` and `task` are as in `read_files`; `declared` is the setting `inputs`. Raises ValueError
    for files that are not LEAF's, and for texts or numbers that cannot be read."""
    if not later and "train" not in files:
        raise ValueError(f"{path} holds test files alone; training needs the folder train")
    splits = {}
    samples: list[Any] = []
    users: list[str] = []
    for name, of_split in files.items():
        split = _split(of_split)
        splits[name] = split
        samples += split.inputs
        users += split.users
    if not samples:
        raise ValueError(f"{path} holds users without samples")
    notes: list[str] = []
    are_texts = isinstance(_text_of(samples[0]), str)
    if are_texts:
        raw = _texts(splits, path, later, task, declared, notes)
    else:
        raw = _numbers(splits, path, later, task, declared, notes)
    num_train = len(splits["train"].users) if "train" in splits else 0
    raw = replace(raw, columns={USER: np.array(users)}, num_train=num_train, owner=USER)
    return raw.noted(*notes)


def _split(files: list[Path]) -> _Split:
    """The samples of the files."""
    found = _Split()
    for file in files:
        _check_keys(file)
        for user, samples in users_of(file):
            for row in range(len(samples["y"])):
                found.places.append(f"{file}: input {row} of user {user!r:.60}")
            found.inputs += samples["x"]
            found.labels += samples["y"]
            found.users += [user] * len(samples["y"])
    return found


def _check_keys(file: Path) -> None:
    """Raise ValueError for JSON of another form, which says what LEAF's is."""
    try:
        content = json.loads(file.read_text("utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{file} is no whole JSON file ({error})") from error
    if not isinstance(content, dict) or not content.keys() >= set(KEYS):
        raise ValueError(
            f"{file} is a JSON file, but not LEAF's, which holds users, num_samples and "
            'user_data: {name: {"x": [inputs], "y": [labels]}}; write it so, or its samples into a '
            ".csv or .npz"
        )


def _text_of(sample: Any) -> Any:
    """The text of a row of Sent140; another sample as it is."""
    is_row = isinstance(sample, list) and len(sample) > TEXT_OF_ROW
    if is_row and isinstance(sample[TEXT_OF_ROW], str):
        return sample[TEXT_OF_ROW]
    return sample


def _texts(
    splits: dict[str, _Split], path: Path, later: bool, task: str, declared: str, notes: list[str]
) -> Raw:
    """Texts as tokens, and their labels."""
    texts: list[str] = []
    labels: list[Any] = []
    for split in splits.values():
        for given, place in zip(split.inputs, split.places, strict=True):
            text = _text_of(given)
            if not isinstance(text, str):
                raise ValueError(f"{place} is {given!r:.100}; each must be a text, as the first is")
            texts.append(text)
        labels += split.labels
    follow = all(isinstance(label, str) and len(label) == 1 for label in labels)
    kind = declared
    if declared == AUTO:
        is_letter = follow and not all(label.isdigit() for label in labels)
        kind = BY_CHARACTER if is_letter else BY_WORD
        other = BY_WORD if is_letter else BY_CHARACTER
        labels_are = "single characters" if is_letter else "no single letters"
        notes.append(
            f"{path}: inputs are texts and labels {labels_are}: the {kind} are tokens "
            f"(inputs={kind}); inputs={other} reads the {other}"
        )
    if kind not in (BY_CHARACTER, BY_WORD):
        raise ValueError(
            f"{path}: inputs are texts, and inputs is {declared!r}; set it to {BY_CHARACTER} or "
            f"{BY_WORD}"
        )
    if kind == BY_WORD:
        return _words(texts, labels, path, later, task, notes)
    return _characters(texts, labels, follow, path, later, task, notes)


def _characters(
    texts: list[str],
    labels: list[Any],
    follow: bool,
    path: Path,
    later: bool,
    task: str,
    notes: list[str],
) -> Raw:
    """Tokens (n, length) uint8 by LEAF's numbers of characters, with line breaks before shorter
    texts. Labels that are characters keep their names."""
    sizes = [len(text) for text in texts]
    length = max(sizes)
    if not length:
        raise ValueError(f"{path}: all texts are empty")
    if length > LONGEST_TEXT:
        raise ValueError(
            f"{path}: texts have up to {length} characters; inputs={BY_CHARACTER} takes at most "
            f"{LONGEST_TEXT}: cut them into pieces, or set inputs={BY_WORD}"
        )
    if min(sizes) < length and not later:
        notes.append(
            f"{path}: texts have {min(sizes)} to {length} characters; line breaks precede the "
            "shorter ones"
        )
    unknown: Counter[str] = Counter()
    lines = "".join(padded_line(text, length) for text in texts)
    x = character_tokens(lines, unknown).reshape(-1, length)
    notes += unknown_characters(
        unknown, x.size, path, f"number the characters yourself in an .npz, or set inputs={BY_WORD}"
    )
    inputs = Description(TOKENS, texts=BY_CHARACTER)
    if not follow or task not in (AUTO, CLASSES):
        return _labeled(x, labels, inputs, path, later, task, notes)
    tokens = character_tokens("".join(labels), Counter())
    present, y = np.unique(tokens, return_inverse=True)
    names = names_of_characters()
    classes = tuple(names[token] for token in present)
    return Raw(x, y.astype(np.int64), len(x), classes=classes, inputs=inputs)


def _words(
    texts: list[str], labels: list[Any], path: Path, later: bool, task: str, notes: list[str]
) -> Raw:
    """Tokens (n, 25) int32 of the texts' first words, among which a federation chooses."""
    x, words = word_tokens(texts)
    if not words:
        raise ValueError(f"{path}: no text holds a word")
    given = {str(label) for label in labels if label is not None}
    if given <= LABELS_OF_TWEETS.keys():  # 0 and 4 are Sent140's, in whose files they may be texts
        kind = int if later or "4" not in given else str  # as texts they are no classes 0 … 4
        labels = [None if label is None else kind(label) for label in labels]
    raw = _labeled(x, labels, Description(TOKENS, texts=BY_WORD), path, later, task, notes)
    return replace(raw, words=words)


def _numbers(
    splits: dict[str, _Split], path: Path, later: bool, task: str, declared: str, notes: list[str]
) -> Raw:
    """Lists of numbers as an array of inputs."""
    samples: list[Any] = []
    labels: list[Any] = []
    places: list[str] = []
    for split in splits.values():
        samples += split.inputs
        labels += split.labels
        places += split.places
    first = np.shape(samples[0])
    for sample, place in zip(samples, places, strict=True):
        try:
            shape = np.asarray(sample, dtype=np.float64).shape
        except (ValueError, TypeError) as error:
            raise ValueError(f"{place} is {sample!r:.100}, no list of numbers") from error
        if shape != first:
            raise ValueError(f"{place} has the shape {shape}, and the first one {first}")
    x, inputs = as_inputs(np.array(samples), path, later, notes, declared)
    return _labeled(x, labels, inputs, path, later, task, notes)


def _labeled(
    x: np.ndarray,
    labels: list[Any],
    inputs: Description,
    path: Path,
    later: bool,
    task: str,
    notes: list[str],
) -> Raw:
    """The inputs with their labels as the task has them."""
    try:
        given = np.array(labels)
    except ValueError as error:
        raise ValueError(f"{path}: labels are lists of several lengths") from error
    read = of_later if later else of_task
    y = read(given, str(path), task, notes)
    return joined([Raw.of(x, y, len(x), inputs=inputs)], path, later=later, task=task)
