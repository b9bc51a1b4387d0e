"""Names that look alike and differ: in case, in how accents are coded, by invisible characters."""

import unicodedata
from collections.abc import Sequence


def note_alike(names: Sequence[str], what: str, kind: str) -> str:
    """A sentence on those of the different names that look alike, with what to write; "" if none
    do."""
    first: dict[str, str] = {}
    pairs: list[str] = []
    in_case_alone = True
    for name in names:
        other = first.setdefault(_as_seen(name), name)
        if other == name:
            continue
        if other.casefold() == name.casefold():
            pairs.append(f"{other} and {name}")
        else:
            pairs.append(f"{other!a} and {name!a}")
            in_case_alone = False
    if not pairs:
        return ""
    difference = "case"
    if not in_case_alone:
        difference = "case or in how characters are coded"
    return (
        f"{what} {', '.join(pairs):.200} are several {kind}, though they differ in {difference} "
        "alone; write them alike if they mean the same"
    )


def _as_seen(name: str) -> str:
    """What a person sees of a name, whatever its case."""
    composed = unicodedata.normalize("NFKC", name)
    visible = [character for character in composed if unicodedata.category(character) != "Cf"]
    return "".join(visible).strip().casefold()
