"""Which classes novel clients' models confuse: ``python -m experiments.novel_errors FOLDER``.

For each run in FOLDER: the novel clients' accuracy over all samples, in %, at the round of the
saved model; the wrong predictions where some training client has both classes, the true and the
predicted one, and where none has both. The last columns say which share of a novel client's samples
has a class that a training client has, in %: the mean over training clients, and the highest. A
model that knows its client's classes alone is right for at most this share.

It reads labels of novel clients, so it explains scores. It must choose no default."""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

import fedapps
import partitions
from fedapps.results.formats import TextTable, as_markdown
from partitions.federations import Federation

COLUMNS = ("run", "accuracy", "errors, held together", "held apart", "a client's classes", "best")


def errors(y: np.ndarray, predicted: np.ndarray, owned: Iterable[set[int]]) -> tuple[int, int]:
    """The number of errors of predictions (n,) of labels (n,) whose two classes some client owns
    together, and of the others; `owned` are the classes of each training client."""
    clients = list(owned)
    together = 0
    apart = 0
    for true, guess in zip(y.tolist(), predicted.tolist(), strict=True):
        if true == guess:
            continue
        if any({true, guess} <= classes for classes in clients):
            together += 1
        else:
            apart += 1
    return together, apart


def covered(y: np.ndarray, owned: Iterable[set[int]]) -> np.ndarray:
    """The share of the labels (n,) that each training client owns, (clients,)."""
    return np.array([np.isin(y, sorted(classes)).mean() for classes in owned])


def classes_of_training_clients(federation: Federation) -> list[set[int]]:
    """The classes of each training client's training samples."""
    owned = []
    for client in np.flatnonzero(~federation.novel).tolist():
        owned.append(set(federation.share(client).train.labels().tolist()))
    return owned


def row_of(folder: str) -> list[str]:
    """A run's row."""
    run = fedapps.load(folder)
    federation = partitions.federation(run.config)
    owned = classes_of_training_clients(federation)
    labels = []
    predictions = []
    shares = []
    for client in np.flatnonzero(federation.novel).tolist():
        samples = federation.share(client).everything
        x = samples.x[samples.index]  # as stored: `personalize` scales it
        y_of_client = samples.labels().numpy()
        labels.append(y_of_client)
        predictions.append(run.personalize(x).predict(x).numpy())
        shares.append(covered(y_of_client, owned))
    y = np.concatenate(labels)
    predicted = np.concatenate(predictions)
    together, apart = errors(y, predicted, owned)
    table = np.stack(shares)  # (novel clients, training clients)
    return [
        Path(folder).name,
        f"{100 * (y == predicted).mean():.1f}",
        str(together),
        str(apart),
        f"{100 * table.mean():.1f}",
        f"{100 * table.max(1).mean():.1f}",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of a folder's runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    rows = []
    for name in fedapps.read(folder).names:
        rows.append(row_of(str(folder / name)))
    caption = "all samples of novel clients; accuracy and shares in %"
    print(as_markdown(TextTable("errors", list(COLUMNS), rows, caption)), end="")


if __name__ == "__main__":
    main()
