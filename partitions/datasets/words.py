"""Texts as tokens: LEAF's characters of Shakespeare, and words of a federation's vocabulary."""

import re
from collections.abc import Sequence

import numpy as np

# LEAF's characters in LEAF's order; a character's position is its token.
CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
LINE_LENGTH = 80  # characters before the one to predict
TWEET_LENGTH = 25  # words of a tweet, as in LEAF
VOCABULARY = 10_000  # words that a federation keeps (ours)
PADDING, UNKNOWN = 0, 1  # tokens; the words' own begin after them
NUM_WORD_TOKENS = VOCABULARY + 2
WORD = re.compile(r"[\w']+|[.,!?;]")  # LEAF's

_NAMES = {"\n": "newline", " ": "space"}


def names_of_characters() -> tuple[str, ...]:
    """Names for tables and figures, by token."""
    return tuple(_NAMES.get(character, character) for character in CHARACTERS)


def split_words(text: str) -> list[str]:
    """The words and marks of a text, split as LEAF does, in lower case (ours)."""
    return WORD.findall(text.lower())


def padded(tokens: Sequence[int]) -> list[int]:
    """The first `TWEET_LENGTH` tokens. Padding precedes them, so that a recurrent network ends with
    the last word (LEAF pads at the end)."""
    kept = list(tokens[:TWEET_LENGTH])
    return [PADDING] * (TWEET_LENGTH - len(kept)) + kept


def of_length(x: np.ndarray, length: int) -> np.ndarray:
    """Tokens x (n, other) as (n, length): the last ones of longer rows, padding before shorter."""
    kept = x[:, -length:]
    return np.pad(kept, ((0, 0), (length - kept.shape[1], 0)), constant_values=PADDING)


def padded_line(text: str, length: int) -> str:
    """The last `length` characters of a text, with line breaks, whose token is 0, before it."""
    return text[-length:].rjust(length, "\n")


def most_frequent(x: np.ndarray, rows: np.ndarray, words: Sequence[str]) -> tuple[str, ...]:
    """The `VOCABULARY` words that occur most in the `rows` of x (n, length), whose token of
    ``words[i]`` is i + 1; of equally frequent ones the first in the alphabet. Words that do not
    occur there are left out."""
    counts = np.bincount(x[rows].ravel(), minlength=len(words) + 1)[1:]
    order = sorted(np.flatnonzero(counts).tolist(), key=lambda i: (-counts[i], words[i]))
    return tuple(words[i] for i in order[:VOCABULARY])


def renumbered(x: np.ndarray, words: Sequence[str], kept: Sequence[str]) -> np.ndarray:
    """The tokens x of `words` as those of the `kept` words: 2, 3, … in their order, `UNKNOWN` for
    other words."""
    numbers = {word: number for number, word in enumerate(kept, start=UNKNOWN + 1)}
    table = [numbers.get(word, UNKNOWN) for word in words]
    return np.array([PADDING, *table], np.int32)[x]
