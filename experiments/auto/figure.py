"""The figure of the judged runs: ``python -m experiments.auto.figure``.

It shows by scenario what `auto` and each fixed correction gain, and how many clients they harm. The
PNG file holds the tables that it shows."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.auto.judge import AUTO, MAX_HARMED, Verdict, mean_of, read_record, table
from experiments.figures_site import sign

JUDGED = Path(__file__).parent / "judged"
IMAGE = Path(__file__).parents[2] / "docs" / "figures" / "auto-judged.png"
RECORDS = {
    "MNIST, mlp": "mnist-mlp-200-mean-matching.json",
    "Fashion-MNIST, mlp": "fashion-mnist-mlp-200-mean-matching.json",
}
FIXED = {
    "bbse": ("#9467bd", "BBSE"),
    "bn-adapt": ("#8c8c8c", "BN-adapt"),
    "prior-em": ("#c49a6c", "Prior-EM"),
    "t3a": ("#e6a532", "T3A"),
    "tent": ("#d1605e", "TENT"),
}
COLOUR = "#1f6fb4"  # of auto
LINEAR = 1.0  # points on either side of 0 in which the axis is linear


def verdicts_of(record: str) -> dict[str, Verdict]:
    """The mean over the seeds of each scenario, by its name."""
    found = read_record(JUDGED / record)
    return {scenario: mean_of(verdicts) for scenario, verdicts in found.items()}


def tables() -> str:
    """The tables of the records that the figure shows."""
    lines = []
    for record in RECORDS.values():
        lines += table(verdicts_of(record))
    return "\n".join(lines)


def draw(verdicts: dict[str, Verdict], gains: Axes, harms: Axes) -> None:
    """One row for each scenario, sorted by the gain of auto."""
    names = sorted(verdicts, key=lambda name: verdicts[name].gain[AUTO])
    rows = range(len(names))
    for method, (colour, label) in FIXED.items():
        if method not in verdicts[names[0]].gain:  # it has nothing to adapt in this network
            continue
        gain = [verdicts[name].gain[method] for name in names]
        harmed = [verdicts[name].harmed[method] for name in names]
        gains.scatter(gain, rows, s=18, color=colour, label=label)
        harms.scatter(harmed, rows, s=18, color=colour)
    oracle = [verdicts[name].oracle for name in names]
    gains.scatter(oracle, rows, s=70, facecolors="none", edgecolors="black", label="oracle")
    gain = [verdicts[name].gain[AUTO] for name in names]
    harmed = [verdicts[name].harmed[AUTO] for name in names]
    gains.scatter(gain, rows, s=48, marker="D", color=COLOUR, label="auto", zorder=3)
    harms.scatter(harmed, rows, s=48, marker="D", color=COLOUR, zorder=3)
    gains.set_xscale("symlog", linthresh=LINEAR)
    gains.set_xticks([-20, -5, -1, 0, 1, 5, 20, 50], ["-20", "-5", "-1", "0", "1", "5", "20", "50"])
    gains.axvline(0, color="black", linewidth=0.8)
    gains.set_yticks(rows, names)
    gains.grid(axis="y", color="#e5e5e5")
    harms.axvline(MAX_HARMED, color="black", linewidth=0.8, linestyle=":")
    harms.set_xlim(-3, 103)
    harms.grid(axis="y", color="#e5e5e5")


def figure() -> Figure:
    """Both data, one above the other; gains on the left and harm on the right."""
    drawn = Figure(figsize=(9, 8), layout="constrained")
    panels = drawn.subplots(len(RECORDS), 2, sharey="row", width_ratios=[1.6, 1])
    for (data, record), (gains, harms) in zip(RECORDS.items(), panels, strict=True):
        draw(verdicts_of(record), gains, harms)
        gains.set_title(data, loc="left")
    gains.set_xlabel("gain over FedAvg in points")
    harms.set_xlabel("clients that lose more than a point, in %")
    drawn.legend(*gains.get_legend_handles_labels(), loc="outside lower center", ncols=7)
    return drawn


if __name__ == "__main__":
    figure().savefig(IMAGE, dpi=110)
    sign(IMAGE, tables())
