"""The table by which `auto` is judged, from the runs of ``protocol.toml``, as Markdown:

    python -m experiments.auto.judge experiments/auto/judged/mnist-50.json judged/50 --inputs 50

The folder has a folder of runs for each scenario. A cell is the gain in points, over the share of
novel clients in % that lose more than a point. Then follow the bars. The record, the first file,
keeps what earlier calls wrote for other seeds and scenarios; the table is of all that it holds."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
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
DECIMALS = 4  # of a verdict's numbers
CHOSEN, MISFIT, LIMIT = "chosen-", "misfit", "misfit-limit"  # metrics of a run with auto


class Verdict(NamedTuple):
    """A scenario's novel clients, means over the seeds, which have equally many: FedAvg's accuracy
    in %; gain in points and share of harmed clients in % by method; the gain of the best fixed
    correction of each client, FedAvg included; auto's choices as shares, T and t, by metric, empty
    where there is no rule."""

    seeds: list[int]
    accuracy: float
    gain: dict[str, float]
    harmed: dict[str, float]
    oracle: float
    choices: dict[str, float]

    @property
    def best_gain(self) -> float:
        """The best fixed correction's mean gain, at least 0: FedAvg is one, too."""
        fixed = [gain for name, gain in self.gain.items() if name != AUTO]
        return max(0.0, *fixed)


def verdict(clients: "DataFrame", seed: int, choices: dict[str, float]) -> Verdict:
    """The verdict on one seed: a row for each method and novel client, with the accuracy as `value`
    in %."""
    by_method = clients.pivot_table(index="client", columns="method", values="value")
    gains = by_method.sub(by_method[FEDAVG], axis=0)
    harmed = 100.0 * (gains < HARM)
    others = [name for name in gains.columns if name != FEDAVG]
    oracle = gains.drop(columns=AUTO).max(axis=1)
    return Verdict(
        [seed],
        _rounded(by_method[FEDAVG].mean()),
        {name: _rounded(gains[name].mean()) for name in others},
        {name: _rounded(harmed[name].mean()) for name in others},
        _rounded(oracle.mean()),
        choices,
    )


def _rounded(value: float) -> float:
    return round(float(value), DECIMALS)


def seeds_of(verdicts: Sequence[Verdict]) -> list[int]:
    """All their seeds, in the verdicts' order."""
    seeds: list[int] = []
    for one in verdicts:
        seeds += one.seeds
    return seeds


def mean_of(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict on all their seeds."""
    weights = [len(one.seeds) for one in verdicts]

    def mean(values: Sequence[float]) -> float:
        return float(np.average(values, weights=weights))

    def mean_by_name(mappings: Sequence[dict[str, float]]) -> dict[str, float]:
        means = {}
        for name in mappings[0]:
            means[name] = mean([mapping[name] for mapping in mappings])
        return means

    return Verdict(
        seeds_of(verdicts),
        mean([one.accuracy for one in verdicts]),
        mean_by_name([one.gain for one in verdicts]),
        mean_by_name([one.harmed for one in verdicts]),
        mean([one.oracle for one in verdicts]),
        mean_by_name([one.choices for one in verdicts]),
    )


def read(folder: Path, compared: Sequence[str] = ()) -> list[Verdict]:
    """The verdict on each seed of a scenario's folder. A seed is left out, with a sentence, if one
    of the methods that are `compared` has no run that ended; default: those of the protocol. Other
    methods' runs do not count."""
    runs, problems = read_runs(folder)
    for problem in problems:
        print(f"{folder}: {problem}")
    runs = runs.assign(method=[label.partition(" ")[0] for label in runs.method])
    clients = clients_of(runs)
    clients = clients[clients.role == "novel"]
    methods = compared or methods_for(runs.config.iloc[0]["model"])
    clients = clients[clients.method.isin(methods)]
    verdicts = []
    for seed, of_seed in clients.groupby("seed"):
        lacking = sorted(set(methods) - set(of_seed.method))
        if lacking:
            print(f"{folder}, seed {seed}, is left out: no run of {', '.join(lacking)} has ended")
            continue
        (auto,) = runs[(runs.seed == seed) & (runs.method == AUTO)].folder
        verdicts.append(verdict(of_seed, int(seed), choices(auto)))
    return verdicts


def choices(run: Path) -> dict[str, float]:
    """What novel clients of this run of auto chose, as shares, with T and t."""
    summary = with_present_names(json.loads((run / "summary.json").read_text()))
    evaluation = summary["evaluation"]
    found = {}
    for name, value in evaluation.items():
        metric = name.removeprefix("novel-")
        if name.startswith("novel-") and metric.startswith((CHOSEN, MISFIT)):
            found[metric] = _rounded(value)
    return found if MISFIT in found else {}


def choices_text(choices: dict[str, float]) -> str:
    """``none 90, bbse 10; T 1.2, t 3.0``."""
    if not choices:
        return "none 100; no rule"
    chosen = []
    for name, share in choices.items():
        if name.startswith(CHOSEN):
            chosen.append(f"{name.removeprefix(CHOSEN)} {100 * share:.0f}")
    return f"{', '.join(chosen)}; T {choices[MISFIT]:.1f}, t {choices[LIMIT]:.1f}"


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
        enough = [name for name, share in shares.items() if share >= MIN_SHARE]
        met = len(enough) >= MIN_SCENARIOS * len(shares)
        words = f"{100 * MIN_SHARE:.0f} % of the best gain in {len(enough)} of "
        lines.append(f"{'met' if met else 'missed'}: {words}{len(shares)} scenarios")
    for name, one in verdicts.items():
        if name.startswith("mix"):
            few = [name] if one.gain[AUTO] < MIX_FACTOR * one.best_gain else []
            lines.append(_line(f"{MIX_FACTOR:g} times the best fixed gain in mix", few))
    return lines


def _line(bar: str, missed: list[str]) -> str:
    if missed:
        return f"missed: {bar}: {', '.join(missed)}"
    return f"met: {bar}"


def table(verdicts: dict[str, Verdict]) -> list[str]:
    """The table's lines."""
    corrected: set[str] = set()
    for one in verdicts.values():
        corrected |= one.gain.keys()
    methods = sorted(corrected - {AUTO})
    lines = [f"| scenario | fedavg | {' | '.join(methods)} | oracle | auto | choices in % |"]
    lines.append("|---" * (5 + len(methods)) + "|")
    for name, one in verdicts.items():
        cells = []
        for method in (*methods, AUTO):
            cells.append(f"{one.gain[method]:.2f}/{one.harmed[method]:.0f}")
        cells.insert(-1, f"{one.oracle:.2f}")
        row = [name, f"{one.accuracy:.1f}", *cells, choices_text(one.choices)]
        lines.append(f"| {' | '.join(row)} |")
    return lines


def read_record(file: Path) -> dict[str, list[Verdict]]:
    """The verdicts of a record by scenario; none where there is no record yet."""
    if not file.exists():
        return {}
    found: dict[str, list[Verdict]] = {}
    for scenario, entries in json.loads(file.read_text()).items():
        found[scenario] = [Verdict(**entry) for entry in entries]
    return found


def write_record(file: Path, found: dict[str, list[Verdict]]) -> None:
    """Write the verdicts, a line each."""
    blocks = []
    for scenario, verdicts in sorted(found.items()):
        lines = [f"  {json.dumps(one._asdict())}" for one in verdicts]
        blocks.append(f' "{scenario}": [\n' + ",\n".join(lines) + "\n ]")
    file.write_text("{\n" + ",\n".join(blocks) + "\n}\n")


def merged(old: list[Verdict], new: list[Verdict]) -> list[Verdict]:
    """All of `new`, and those of `old` that have other seeds."""
    measured = set(seeds_of(new))
    kept = [one for one in old if measured.isdisjoint(one.seeds)]
    return sorted(kept + new, key=lambda one: one.seeds)


def main(
    record: Path,
    folder: Annotated[Path | None, typer.Argument()] = None,
    inputs: int = 200,
    methods: str = "",
) -> None:
    """Take a folder's runs into the record, and print the record's table and bars. `inputs` are
    those of a novel client. `methods` names those that are compared, by commas; default: those of
    the protocol."""
    found = read_record(record)
    if folder is not None:
        for scenario in sorted(folder.iterdir()):
            new = read(scenario, methods.split(",") if methods else ())
            if new:
                found[scenario.name] = merged(found.get(scenario.name, []), new)
        write_record(record, found)
    if not found:
        raise SystemExit(f"{record} holds no scenario, so there is nothing to judge")
    verdicts = {scenario: mean_of(found[scenario]) for scenario in sorted(found)}
    for line in table(verdicts):
        print(line)
    print()
    for line in bars(verdicts, inputs):
        print(f"- {line}")


if __name__ == "__main__":
    typer.run(main)
