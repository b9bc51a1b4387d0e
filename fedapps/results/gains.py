"""What novel clients gain: client by client, against a reference on the same split."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedapps.results.comparison import _split, _spreads
from fedapps.results.formats import TextTable
from fedapps.results.runs import clients_of, federation_of, read_rounds

if TYPE_CHECKING:
    from pandas import DataFrame

NOVEL_SCORES = {
    "accuracy": "mean accuracy in %",
    "gain": "mean gain in points",
    "harmed": "clients in % that lose more than one point",
    "worst-decile": "mean accuracy of the lowest tenth in %",
    "milliseconds": "median over evaluations, for a client",
    "kilobytes": "arrays to and from a client",
}
HARM = -1.0  # points


def novel_scores(runs: "DataFrame", round_: str = "best", against: str = "fedavg") -> "DataFrame":
    """`NOVEL_SCORES` of each run, NaN where unknown; the reference is `against` on the run's split
    with equal settings in the label. Raises ValueError if no run is called `against`."""
    from pandas import DataFrame

    if against not in {label.split()[0] for label in runs.method}:
        raise ValueError(f"no run of {against!r} to compare with; there are {set(runs.method)}")
    clients = clients_of(runs, round_)
    clients = clients[clients.role == "novel"].dropna(subset="accuracy")
    labels = [run.method.partition(" ") for run in runs.itertuples()]
    splits = map(_split, runs.config)
    place = [(name, rest, split) for (name, _, rest), split in zip(labels, splits, strict=True)]
    known = DataFrame(place, runs.index, ["name", "rest", "split"])
    clients = clients.join(known, on="run")
    reference = clients[clients.name == against][["rest", "split", "client", "accuracy"]]
    clients = clients.merge(
        reference, "left", on=["rest", "split", "client"], suffixes=("", "_reference")
    )
    clients["gain"] = clients.accuracy - clients.accuracy_reference
    clients["harmed"] = 100.0 * (clients.gain < HARM).where(clients.gain.notna())
    found = clients.groupby("run")[["accuracy", "gain", "harmed"]].mean()
    tenth = clients.assign(value=clients.accuracy)[["run", "split", "value"]]
    found["worst-decile"] = _spreads(tenth, ["run"])["lowest_tenth"]
    for run in runs.itertuples():
        rounds = DataFrame(
            [
                (r.phases["novel-client"], sum(r.novel_megabytes.values()))
                for r in read_rounds(run.folder)
                if "novel-client" in r.phases
            ],
            columns=["seconds", "megabytes"],
        )
        found.loc[run.Index, "milliseconds"] = 1e3 * rounds.seconds.median()
        found.loc[run.Index, "kilobytes"] = 1e3 * rounds.megabytes.median()
    return found.reindex(columns=[*NOVEL_SCORES]).astype(float)


def gains_table(
    runs: "DataFrame", scores: Sequence[str], round_: str = "best", against: str = ""
) -> TextTable:
    """A row for each method, a column for each of the scores: mean ± deviation over seeds. Raises
    ValueError for unknown scores."""
    if unknown := [score for score in scores if score not in NOVEL_SCORES]:
        raise ValueError(f"unknown score {unknown[0]!r}; known: {', '.join(NOVEL_SCORES)}")
    runs = runs[runs.error == ""]
    against = against or "fedavg"
    found = novel_scores(runs, round_, against)
    rows = []
    for method, group in runs.groupby("method", sort=False):
        cells = []
        for values in (found.loc[group.index, score].dropna() for score in scores):
            spread = f" ± {values.std():.2f}" if len(values) > 1 else ""
            cells.append(f"{values.mean():.2f}{spread}" if len(values) else "–")
        rows.append([str(method), *cells, str(len(group))])
    notes = [f"{score}: {NOVEL_SCORES[score]}" for score in scores]
    return TextTable(
        f"{federation_of(runs)}: novel clients, against {against}",
        ["method", *scores, "seeds"],
        rows,
        "; ".join([*notes, "± standard deviation over seeds"]),
    )
