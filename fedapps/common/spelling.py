"""What a misspelt word was meant to be."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question in parentheses that names the known word nearest to `word`; "" if none is near."""
    near = get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f" (did you mean {near[0]!r}?)" if near else ""
