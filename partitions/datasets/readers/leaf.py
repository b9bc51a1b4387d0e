"""LEAF's JSON (Caldas et al., 2018): files of users in the folders ``train`` and ``test``.

A file is {"users": [name], "num_samples": [count], "user_data": {name: {"x": [input], "y":
[label]}}}. `preprocess.sh -t sample` writes them: each user has samples in both folders. Here are
the two data sets of texts, Shakespeare and Sent140; FEMNIST has a file of its own."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from partitions.datasets.catalog import SENTIMENTS
from partitions.datasets.readers.raw import Raw
from partitions.datasets.words import (
    CHARACTERS,
    LINE_LENGTH,
    TWEET_LENGTH,
    names_of_characters,
    padded,
    split_words,
)

USER = "user"  # the natural column: a role of a play, or the author of tweets
TEXT_OF_ROW = 4  # of a tweet's row: id, date, query, user, text
LABELS_OF_TWEETS = {"0": 0, "1": 1, "4": 1}  # LEAF writes 0 and 1, the raw file has 0 and 4
MOST_UNKNOWN = 0.01  # share of unknown characters above which a text is not LEAF's Shakespeare

Samples = Mapping[str, list[Any]]


def files_of_split(folder: Path, split: str) -> list[Path]:
    """LEAF's JSON files of a split, in `folder` or in its folder ``data``."""
    files = [*(folder / split).glob("*.json"), *(folder / "data" / split).glob("*.json")]
    return sorted(files)


def users_of(path: Path) -> Iterator[tuple[str, Samples]]:
    """Name and samples of each user of a file. Raises ValueError for a file that is not LEAF's."""
    try:
        users = json.loads(path.read_text("utf-8-sig"))["user_data"]
        for user, samples in users.items():
            if len(samples["x"]) != len(samples["y"]):
                raise ValueError(
                    f"user {user!r:.60} has {len(samples['x'])} inputs and {len(samples['y'])} "
                    "labels"
                )
            yield user, samples
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is truncated or not LEAF's: {error}") from error


def read_shakespeare(folder: Path) -> Raw | None:
    """Tokens (n, 80) uint8 of 80 characters, labelled by the next one; column "user"."""
    inputs: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    users: list[str] = []
    sizes = {"train": 0, "test": 0}
    unknown: Counter[str] = Counter()
    for split, path, user, samples in _samples(folder):
        texts = [_line(text, path, user, row) for row, text in enumerate(samples["x"])]
        nexts = [_next(text, path, user, row) for row, text in enumerate(samples["y"])]
        inputs.append(character_tokens("".join(texts), unknown).reshape(-1, LINE_LENGTH))
        labels.append(character_tokens("".join(nexts), unknown))
        users += [user] * len(nexts)
        sizes[split] += len(nexts)
    if not users:
        return None
    x = np.concatenate(inputs)
    y = np.concatenate(labels).astype(np.int64)
    raw = Raw(x, y, sizes["train"], {USER: np.array(users)}, names_of_characters())
    advice = "these files do not hold LEAF's Shakespeare"
    return raw.noted(*unknown_characters(unknown, x.size + y.size, folder, advice))


def read_sent140(folder: Path) -> Raw | None:
    """Tokens (n, 25) int32 of a tweet's first words, and 1 for a positive tweet; column "user".

    Each word has a number, padding has 0: `words` holds the words from 1 on, in the order in which
    they occur. A federation keeps those that its training clients use most."""
    texts: list[str] = []
    labels: list[int] = []
    users: list[str] = []
    sizes = {"train": 0, "test": 0}
    for split, path, user, samples in _samples(folder):
        for row, (given, label) in enumerate(zip(samples["x"], samples["y"], strict=True)):
            texts.append(_tweet(given, path, user, row))
            labels.append(_sentiment(label, path, user, row))
        users += [user] * len(samples["y"])
        sizes[split] += len(samples["y"])
    if not users:
        return None
    x, words = word_tokens(texts)
    columns = {USER: np.array(users)}
    return Raw(x, np.array(labels), sizes["train"], columns, SENTIMENTS, words=words)


def word_tokens(texts: Iterable[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    """The first words of each text as tokens (n, 25) int32, 1, 2, … in the order in which the words
    occur, with padding 0 before them; and these words."""
    numbers: dict[str, int] = {}
    rows: list[list[int]] = []
    for text in texts:
        tokens = [numbers.setdefault(word, len(numbers) + 1) for word in split_words(text)]
        rows.append(padded(tokens))
    return np.array(rows, np.int32).reshape(-1, TWEET_LENGTH), tuple(numbers)


def _samples(folder: Path) -> Iterator[tuple[str, Path, str, Samples]]:
    """Split, file, user and samples, training files first. Raises ValueError if test files have
    none of the training files' users."""
    users: dict[str, set[str]] = {"train": set(), "test": set()}
    for split, of_split in users.items():
        for path in files_of_split(folder, split):
            for user, samples in users_of(path):
                of_split.add(user)
                yield split, path, user, samples
    if users["test"] and not users["train"] & users["test"]:
        raise ValueError(
            f"{folder}: no user of the training files has samples in the test files, so no client "
            "could train and test; write the files again with LEAF's preprocess.sh -t sample"
        )


def _line(text: object, path: Path, user: str, row: int) -> str:
    """An input of Shakespeare."""
    if not isinstance(text, str) or len(text) != LINE_LENGTH:
        raise ValueError(
            f"{path}: input {row} of user {user!r:.60} is {text!r:.100}; each must be a text of "
            f"{LINE_LENGTH} characters"
        )
    return text


def _next(text: object, path: Path, user: str, row: int) -> str:
    """A label of Shakespeare."""
    if not isinstance(text, str) or len(text) != 1:
        raise ValueError(
            f"{path}: label {row} of user {user!r:.60} is {text!r:.100}; each must be one character"
        )
    return text


def character_tokens(text: str, unknown: Counter[str]) -> np.ndarray:
    """The numbers of the characters (n,) uint8. Unknown ones are counted and get the last number,
    as an index of −1 does in LEAF's code."""
    numbers = {character: number for number, character in enumerate(CHARACTERS)}
    last = len(CHARACTERS) - 1
    for character in set(text):
        if character not in CHARACTERS:
            unknown[character] += text.count(character)
    return np.array([numbers.get(character, last) for character in text], np.uint8)


def unknown_characters(unknown: Counter[str], total: int, folder: Path, advice: str) -> list[str]:
    """A note on characters that LEAF does not number. Raises ValueError with the `advice` if they
    are many."""
    if not unknown:
        return []
    shown = ", ".join(f"{character!r}" for character, _ in unknown.most_common(10))
    count = unknown.total()
    text = (
        f"{folder}: {count} of {total} characters are not among LEAF's {len(CHARACTERS)} ({shown})"
    )
    if count > MOST_UNKNOWN * total:
        raise ValueError(f"{text}; {advice}")
    return [f"{text}; they count as {CHARACTERS[-1]!r}, the last of these"]


def _tweet(given: object, path: Path, user: str, row: int) -> str:
    """The text of a tweet: the fifth entry of LEAF's row, or the input itself."""
    if isinstance(given, list) and len(given) > TEXT_OF_ROW:
        given = given[TEXT_OF_ROW]
    if not isinstance(given, str):
        raise ValueError(
            f"{path}: input {row} of user {user!r:.60} is {given!r:.100}; each must be a text, or "
            "LEAF's row of id, date, query, user and text"
        )
    return given


def _sentiment(label: object, path: Path, user: str, row: int) -> int:
    """0 for a negative tweet, 1 for a positive one."""
    if str(label) not in LABELS_OF_TWEETS:
        raise ValueError(
            f"{path}: label {row} of user {user!r:.60} is {label!r:.60}; each must be 0 "
            "(negative), or 1 or 4 (positive)"
        )
    return LABELS_OF_TWEETS[str(label)]
