"""The table by which `auto` is judged, from the runs of ``protocol.toml``, as Markdown:

    python -m experiments.auto.judge judged/200 judged/50 judged/20

Each folder is named by B and has a folder of runs for each scenario. A cell is the gain in
points, over the share of novel clients in % that lose more than a point. Then follow the bars."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from experiments.auto.runs import methods_for
from fedapps.results.gains import HARM
from fedapps.results.runs import clients_of, read_runs
from fedapps.results.schema import with_present_names

if TYPE_CHECKING:
    from pandas import DataFrame

AUTO, FEDAVG = "auto", "fedavg"
MAX_LOSS = 0.3  # points below FedAvg in the mean
MAX_HARMED = 5.0  # %
MAX_HARMED_BEYOND = 10.0  # % in held-out domains and in mix
MIN_SHARE = 0.8  # of the best fixed correction's gain, where this is over a point
MIN_SCENARIOS = 0.8  # share of such scenarios that reach it
MIN_SHARE_OF_50 = 0.7  # in the mean, with 50 inputs
MIX_FACTOR = 3.0


class Verdict(NamedTuple):
    """One scenario: FedAvg's accuracy in %; gain in points and share of harmed clients in % by
    method; the fixed correction with the highest mean gain, and the gain of the best one for each
    client, FedAvg included."""

    accuracy: float
    gain: dict[str, float]
    harmed: dict[str, float]
    best: str
    oracle: float

    @property
    def best_gain(self) -> float:
        """The mean gain of the best fixed correction, at least 0: FedAvg is one, too."""
        return max(self.gain.get(self.best, 0.0), 0.0)


def verdict(clients: "DataFrame") -> Verdict:
    """The verdict on a row for each method, seed and novel client, with the accuracy as `value`
    in %."""
    by_method = clients.pivot_table(index=["seed", "client"], columns="method", values="value")
    gains = by_method.sub(by_method[FEDAVG], axis=0)
    harmed = 100.0 * (gains < HARM)
    fixed = [name for name in gains.columns if name not in (AUTO, FEDAVG)]
    mean = gains.mean()
    best = max(fixed, key=lambda name: float(mean[name]))
    oracle = gains[[FEDAVG, *fixed]].max(axis=1)
    return Verdict(
        float(by_method[FEDAVG].mean()),
        {name: float(mean[name]) for name in gains.columns if name != FEDAVG},
        {name: float(harmed[name].mean()) for name in gains.columns if name != FEDAVG},
        best,
        float(oracle.mean()),
    )


def read(folder: Path) -> tuple[Verdict, str] | None:
    """The verdict on a scenario's folder, and auto's choices in %, T and t, means over the runs.
    None, with a sentence, if a method of the protocol has no run that ended."""
    runs, problems = read_runs(folder)
    for problem in problems:
        print(f"{folder}: {problem}")
    clients = clients_of(runs)
    clients = clients[clients.role == "novel"]
    clients = clients.assign(method=[label.partition(" ")[0] for label in clients.method])
    lacking = sorted(set(methods_for(runs.config.iloc[0]["model"])) - set(clients.method))
    if lacking:
        print(f"{folder} is left out: no run of {', '.join(lacking)} has ended there")
        return None
    summaries = []
    for run in runs.itertuples():
        if run.method.partition(" ")[0] == AUTO:
            summary = json.loads((run.folder / "summary.json").read_text())
            summaries.append(with_present_names(summary)["evaluation"])
    return verdict(clients), choices(summaries)


def choices(summaries: list[dict[str, float]]) -> str:
    """``none 90, bbse 10; T 1.2, t 3.0`` of novel clients, from the metrics of evaluations."""

    def mean(name: str) -> float:
        return sum(summary[name] for summary in summaries) / len(summaries)

    if not summaries or "novel-misfit" not in summaries[0]:
        return "none 100; no rule"
    names = [name for name in summaries[0] if name.startswith("novel-chosen-")]
    chosen = [f"{name.removeprefix('novel-chosen-')} {100 * mean(name):.0f}" for name in names]
    misfits = f"T {mean('novel-misfit'):.1f}, t {mean('novel-misfit-limit'):.1f}"
    return f"{', '.join(chosen)}; {misfits}"


def bars(verdicts: dict[str, Verdict], inputs: int) -> list[str]:
    """A line for each bar, with "met" or "missed" and the scenarios that miss it."""
    lost = []
    harmed = []
    shares: dict[str, float] = {}
    for name, one in verdicts.items():
        beyond = name.startswith(("domain", "mix"))
        if one.gain[AUTO] < -MAX_LOSS:
            lost.append(name)
        if one.harmed[AUTO] > (MAX_HARMED_BEYOND if beyond else MAX_HARMED):
            harmed.append(name)
        if one.best_gain > 1:
            shares[name] = one.gain[AUTO] / one.best_gain
    lines = [
        _line(f"at most {MAX_LOSS} points below FedAvg", lost),
        _line(f"at most {MAX_HARMED:g} % harmed, {MAX_HARMED_BEYOND:g} % in domains", harmed),
    ]
    if shares and inputs == 50:
        mean = sum(shares.values()) / len(shares)
        missed = [] if mean >= MIN_SHARE_OF_50 else [f"{100 * mean:.0f} %"]
        lines.append(_line(f"{100 * MIN_SHARE_OF_50:.0f} % of the best gain in the mean", missed))
    elif shares:
        short = [name for name, share in shares.items() if share < MIN_SHARE]
        enough = len(short) <= (1 - MIN_SCENARIOS) * len(shares)
        words = f"{100 * MIN_SHARE:.0f} % of the best gain in {len(shares) - len(short)} of "
        lines.append(f"{'met' if enough else 'missed'}: {words}{len(shares)} scenarios")
    for name, one in verdicts.items():
        if name.startswith("mix"):
            few = [name] if one.gain[AUTO] < MIX_FACTOR * one.best_gain else []
            lines.append(_line(f"{MIX_FACTOR:g} times the best fixed gain in mix", few))
    return lines


def _line(bar: str, missed: list[str]) -> str:
    if missed:
        return f"missed: {bar}: {', '.join(missed)}"
    return f"met: {bar}"


def main(folders: list[Path]) -> None:
    """Print the table and the bars of each folder."""
    for folder in folders:
        verdicts: dict[str, Verdict] = {}
        texts: dict[str, str] = {}
        for scenario in sorted(folder.iterdir()):
            found = read(scenario)
            if found is not None:
                verdicts[scenario.name], texts[scenario.name] = found
        methods = sorted({name for one in verdicts.values() for name in one.gain} - {AUTO})
        print(f"\n**{folder.name} inputs**\n")
        print(f"| scenario | fedavg | {' | '.join(methods)} | oracle | auto | choices in % |")
        print("|---" * (5 + len(methods)) + "|")
        for name, one in verdicts.items():
            cells = []
            for method in (*methods, AUTO):
                cells.append(f"{one.gain[method]:.2f}/{one.harmed[method]:.0f}")
            cells.insert(-1, f"{one.oracle:.2f}")
            print(f"| {name} | {one.accuracy:.1f} | {' | '.join(cells)} | {texts[name]} |")
        print()
        for line in bars(verdicts, int(folder.name)):
            print(f"- {line}")


if __name__ == "__main__":
    typer.run(main)
