"""Yahoo Answers (Zhang et al., 2015): `train.csv` and `test.csv`, class 1…10, then three texts.

Question title, question content and best answer, joined, become BERT features (ODPFL-HN, 6.6)."""

import csv
from pathlib import Path

import numpy as np

from partitions.datasets.catalog import TOPICS
from partitions.datasets.features import bert
from partitions.datasets.readers.raw import Raw


def read_yahoo(folder: Path) -> Raw | None:
    """Features (n, 768). ValueError naming a damaged file's line."""
    places = [folder, folder / "yahoo_answers_csv"]
    places = [place for place in places if (place / "train.csv").is_file()]
    if not places:
        return None
    place = places[0]
    known_labels = [str(number) for number in range(1, len(TOPICS) + 1)]
    texts = []
    labels = []
    counts = []
    for split in ("train", "test"):
        path = place / f"{split}.csv"
        if not path.is_file():
            raise ValueError(f"{place} has no file {path.name}")
        with path.open(newline="", encoding="utf-8") as file:
            for number, row in enumerate(csv.reader(file), start=1):
                if len(row) != 4 or row[0] not in known_labels:
                    raise ValueError(f"{path}, row {number}: no class 1…10 and three texts")
                labels.append(int(row[0]) - 1)
                texts.append(" ".join(filter(None, row[1:])))
        counts.append(len(labels))
    x = bert(texts, folder.parent)
    return Raw(x, np.array(labels), counts[0], classes=TOPICS)
