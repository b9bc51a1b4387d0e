"""The HTML report of a folder of runs: table, curves, clients, costs, settings.

One file that needs no other file and no network, from the template report.html. Jinja escapes
every name; the figures are those of `fedapps plot`."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedapps.common.errors import without_escape_codes
from fedapps.files import write_text
from fedapps.results import plot
from fedapps.results.comparison import SHOTS, compare, several, side_by_side
from fedapps.results.formats import UNKNOWN, TextTable, mean_cell, number_cell
from fedapps.results.gains import HARM
from fedapps.results.runs import (
    CURVES,
    Column,
    are_on_real_nodes,
    clients_of,
    column,
    decisions_of,
    failures,
    main_scores,
    read_rounds,
    rounds_of,
)
from fedapps.results.table import results
from fedapps.settings.config import defaults, relevant
from fedapps.settings.saved_configurations import COMMANDS, configuration_file
from partitions.rules.registry import RULES

if TYPE_CHECKING:
    from jinja2 import Template
    from pandas import DataFrame

NAME = "report.html"
ELSEWHERE = {
    "method",
    "seed",
    "output-dir",
    "training-dir",
    "versions",
}  # settings that other parts show
# The settings that the page shows whatever their values are, beside the options of the rule.
FEDERATION = ("dataset", "partition", "num-clients", "train-fraction", "data-seed")
BOXES = (
    "box: the middle half of the clients; line in it: the median; whiskers: the farthest clients "
    "within 1.5 times the box's height"
)
MOST_COMMANDS = 10
# The inputs of played newcomers, by the regime to which auto's rule counts them.
PLAYED_INPUTS = {"label-shift": "as in training, T at most t", "other-inputs": "others, T over t"}
NOVEL_CLIENT = "novel-client"  # a phase that is no part of the round: one client's share of others
LIMIT = 2_000_000  # bytes of the page


def write_report(runs: "DataFrame", folder: Path, problems: Sequence[str] = ()) -> Path:
    """Write the report of the runs, with the `problems`, to `folder`; returns the file.

    What does not fit into `LIMIT` bytes is left out with a note: rounds, then clients of later
    seeds, then all clients."""
    template = _template()
    notes = [*failures(runs), *problems]
    first = runs.seed.min()
    # From the whole page to the smallest one.
    attempts = (
        (1000, runs, ""),
        (100, runs, "only some of the rounds are drawn"),
        (100, runs[runs.seed == first], f"only some rounds and clients of seed {first} are drawn"),
        (100, runs[:0], "only some of the rounds and no single clients are drawn"),
    )
    for points, with_clients, left_out in attempts:
        shown_notes = list(notes)
        if left_out:
            shown_notes.append(f"so that the page stays small, {left_out}")
        shown = content(runs, with_clients, points)
        rendered = template.render(shown, problems=shown_notes, commands=_commands(folder))
        page = without_escape_codes(rendered)
        if len(page.encode()) <= LIMIT:
            break
    write_text(folder / NAME, page)
    return folder / NAME


@cache
def _template() -> "Template":
    """The page's template; a process compiles it once."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters["on_page"] = plot.on_page
    return environment.from_string((files("fedapps.results") / NAME).read_text("utf-8"))


def content(runs: "DataFrame", with_clients: "DataFrame", points: int) -> dict[str, Any]:
    """What the template shows: at most `points` rounds, and the clients of some of the runs."""
    drawn_rounds = rounds_of(runs, points)
    curves = ""
    if len(drawn_rounds):
        curves = plot.as_svg(plot.curves(runs, points), "scores by round, a line for each method")
    times = ""
    if drawn_rounds.time.notna().any():
        name = "scores by simulated time, a line for each method"
        times = plot.as_svg(plot.time(runs, points), name)
    decided = decisions_of(with_clients)
    choices = ""
    if (decided.misfit.notna() & (decided.limit > 0)).any():
        name = "what each novel client chose, by T over t and its gain, a dot for each client"
        choices = plot.as_svg(plot.decisions(with_clients), name)
    dots = ""
    if clients_of(with_clients).value.notna().any():
        name = "each client's score, a dot for each client and a box for each method"
        dots = plot.as_svg(plot.clients(with_clients), name)
    clients = client_rows(with_clients)
    client_ids = {row[0] for row in clients}
    rounds = rounds_of(runs, 100)
    return {
        "results": results(runs),
        "shots": _shots(runs),
        "methods": list(zip(runs.method.unique(), plot.line_styles(), strict=False)),
        "curves": curves,
        "times": times,
        "bands": bands(runs),
        "rounds": [_by_round(rounds, key) for key in CURVES],
        "f1": f1_by_type(runs),
        "trainings": shared_trainings(runs),
        "choices": choices,
        "decided": decision_tables(with_clients),
        "dots": dots,
        "boxes": BOXES,
        "clients": clients,
        "client_columns": client_columns(runs),
        "client_ids": sorted(client_ids, key=_numbers_first),
        "costs": costs(runs),
        "settings": _settings(runs),
        "versions": _versions(runs.folder.iloc[0]),
        "colours": plot.COLOURS,
    }


def shared_trainings(runs: "DataFrame") -> list[str]:
    """A sentence for each set of methods that had one training in each seed."""
    methods: dict[tuple[str, int], list[str]] = {}  # by the training's folder and the seed
    for run in runs.itertuples():
        folder = str(run.config.get("training-dir", ""))
        if folder:
            methods.setdefault((folder, run.seed), []).append(run.method)
    groups: dict[tuple[str, ...], list[str]] = {}  # seeds by methods
    for (_, seed), names in methods.items():
        if len(names) > 1:
            groups.setdefault(tuple(names), []).append(str(seed))
    sentences = []
    for group, seeds in groups.items():
        seed_words = f"seed {seeds[0]}" if len(seeds) == 1 else f"each of seeds {', '.join(seeds)}"
        sentences.append(f"{', '.join(group)} share one training in {seed_words}.")
    return sentences


def decision_tables(runs: "DataFrame") -> list[TextTable]:
    """Novel clients that chose a correction without labels: means by choice, then each client. []
    if none did."""
    clients = decisions_of(runs)
    if clients.empty:
        return []
    clients["harmed"] = 100 * (clients.gain < HARM).where(clients.gain.notna())
    rows = []
    for (method, chosen), group in clients.groupby(["method", "chosen"], sort=False):
        share = 100 * len(group) / (clients.method == method).sum()
        numbers = [
            f"{share:.0f} %",
            number_cell(group.misfit.mean(), 2),
            number_cell(group.limit.mean(), 2),
            number_cell(group.expected.mean(), 2, signed=True),
            number_cell(group.gain.mean(), 2, signed=True),
            number_cell(group.harmed.mean(), 0),
        ]
        rows.append([method, chosen, *numbers])
    columns = ["method", "chosen", "clients", "T", "t", "expected", "measured", "harmed, %"]
    caption = (
        "means over clients; T over t: the proportions of the classes do not explain the inputs; "
        "gains over the global model in points, expected without labels and measured with them; "
        "harmed: loses more than a point"
    )
    tables = [TextTable("", columns, rows, caption)]
    rows = []
    for client in clients.itertuples(index=False):
        numbers = [
            number_cell(client.misfit, 2),
            number_cell(client.limit, 2),
            number_cell(client.expected, 2, signed=True),
            number_cell(client.gain, 2, signed=True),
        ]
        rows.append([client.client, client.method, str(client.seed), client.chosen, *numbers])
    columns = ["client", "method", "seed", "chosen", "T", "t", "expected", "measured"]
    each = TextTable("", columns, rows, "each novel client, at the reported round")
    return [*tables, *_played_table(runs), each]


def _played_table(runs: "DataFrame") -> list[TextTable]:
    """What the rules mean for the newcomers that training clients have played; [] without any."""
    rows = []
    for run in runs.dropna(subset="summary").itertuples():
        for played in run.summary.played:
            numbers = [
                number_cell(played.clients, 0),
                f"{100 * played.corrected:.0f} %",
                number_cell(100 * played.gain, 2, signed=True),
                number_cell(100 * played.harmed, 1),
            ]
            words = PLAYED_INPUTS[played.regime]
            rows.append([run.method, str(run.seed), words, *numbers])
    columns = ["method", "seed", "inputs", "clients", "corrected", "gain", "harmed, %"]
    caption = (
        "newcomers that training clients have played, by rules that did not see their samples: "
        "how many get a correction, what all of them gain in points, how many lose more than one"
    )
    return [TextTable("", columns, rows, caption)] if rows else []


def bands(runs: "DataFrame") -> str:
    """What lines and bands of the curves mean."""
    if runs.seed.nunique() == 1:
        return f"one seed ({runs.seed.iloc[0]})"
    return "line: the mean over seeds; band: from the lowest to the highest seed"


def client_rows(runs: "DataFrame") -> list[list[str]]:
    """Client, method, seed, role, samples, main score at the reported and at the last round, and
    rank, 1 for the best."""
    last = clients_of(runs, "last")[["run", "client", "value"]]
    last = last.rename(columns={"value": "last_value"})
    clients = clients_of(runs).merge(last, "left", ["run", "client"])
    named = len(main_scores(runs)) > 1
    clients["goodness"] = [
        column(key).score.goodness(value)
        for key, value in zip(clients.score, clients.value, strict=True)
    ]
    places = clients.groupby(["run", "role"]).goodness
    clients["rank"] = places.rank("min", ascending=False)
    clients["ranked"] = places.transform("count")
    rows = []
    for client in clients.itertuples(index=False):
        rank = UNKNOWN
        if not isnan(client.rank):
            rank = f"{client.rank:.0f} of {client.ranked}"
        shown = column(client.score)
        rows.append(
            [
                client.client,
                client.method,
                str(client.seed),
                client.role,
                str(client.examples),
                _client_cell(shown, client.value, named),
                _client_cell(shown, client.last_value, named),
                rank,
            ]
        )
    return rows


def _client_cell(shown: Column, value: float, named: bool) -> str:
    """A client's score; `named` where the page has several scores."""
    text = number_cell(value, shown.decimals(value))
    return f"{text} {shown.score.short or shown.score.text}" if named else text


def client_columns(runs: "DataFrame") -> list[str]:
    """The heads of `client_rows` without the client's."""
    names = main_scores(runs)
    columns = ["method", "seed", "role", "samples"]
    if names == ["accuracy"]:
        columns += ["accuracy, %", "last round, %"]
    elif len(names) == 1:
        columns += [_heading(names[0]), "last round"]
    else:
        columns += ["main score", "last round"]
    return [*columns, "rank"]


def _heading(name: str) -> str:
    """A main score as the head of a column."""
    score = column(f"train-{name}").score
    return score.short or score.text


def f1_by_type(runs: "DataFrame") -> tuple[list[str], list[tuple[str, list[float | None]]]]:
    """The sub-populations, and by method the mean F1 over seeds in each; None if unknown."""
    values: dict[str, dict[str, list[float]]] = {}  # by method and sub-population, of each seed
    for run in runs.dropna(subset="summary").itertuples():
        for metric, f1 in run.summary.evaluation.items():
            name = metric.removeprefix("train-f1-")
            if name.isdecimal() and f1 is not None:
                by_name = values.setdefault(run.method, {})
                by_name.setdefault(name, []).append(f1)
    names = sorted(set().union(*values.values()), key=int)
    rows: list[tuple[str, list[float | None]]] = []
    for method, by_name in values.items():
        means = {name: sum(f1s) / len(f1s) for name, f1s in by_name.items()}
        rows.append((method, [means.get(name) for name in names]))
    return names, rows


def costs(runs: "DataFrame") -> list[dict[str, Any]]:
    """By method: seconds of a round and of its phases, megabytes, dropped replies by cause."""
    rows = []
    for method, group in runs[runs.rounds > 0].groupby("method", sort=False):
        phases: dict[str, float] = {}
        dropped = Counter[str]()
        for run in group.itertuples():
            reports = read_rounds(run.folder)
            for report in reports:
                dropped.update(report.dropped)
                for phase, seconds in report.phases.items():
                    if phase == NOVEL_CLIENT:
                        continue
                    # The mean over all rounds, also over those without the phase.
                    share = seconds / len(reports) / len(group)
                    phases[phase] = phases.get(phase, 0.0) + share
        rows.append(
            {
                "method": method,
                "seconds": (group.seconds / group.rounds).mean(),
                "phases": phases,
                "down": number_cell(group.down.mean(skipna=False), 3),
                "up": number_cell(group.up.mean(skipna=False), 3),
                "dropped": ", ".join(f"{cause} {count}" for cause, count in dropped.items()),
            }
        )
    return rows


def _by_round(rounds: "DataFrame", key: str) -> TextTable:
    """Mean and range over seeds, a row per round and a column per method."""
    shown = column(key)
    scores = rounds.dropna(subset=key).groupby(["round", "method"], sort=False)[key]
    cells: dict[int, dict[str, str]] = {}  # by round and method
    methods: dict[str, None] = {}  # in the order of their first scores
    for (round_, method), values in scores:
        digits = shown.decimals(values.mean())
        text = mean_cell(values, digits)
        if len(values) > 1:
            text += f" ({number_cell(values.min(), digits)} – {number_cell(values.max(), digits)})"
        cells.setdefault(round_, {})[method] = text
        methods[method] = None
    rows = []
    for round_, by_method in sorted(cells.items()):
        rows.append([str(round_), *(by_method.get(method, UNKNOWN) for method in methods)])
    unit = ", %" if shown.score.in_percent else ""
    return TextTable("", ["round", *methods], rows, f"{shown.title}{unit}; range over seeds")


def _shots(runs: "DataFrame") -> TextTable | None:
    """Novel clients by the labels that they show; None if all runs are alike in it."""
    if not several(runs, SHOTS):
        return None
    return side_by_side(
        compare(runs, by=["method", SHOTS]), SHOTS, ["novel-accuracy", "novel-rmse"]
    )


def _settings(runs: "DataFrame") -> TextTable:
    """The data, the partition rule with its options, the seeds; then what differs from the
    defaults, in all runs that read it."""
    known = defaults()
    values: dict[str, list[Any]] = {}  # by setting, of the runs that read it
    options: set[str] = set()
    for config in runs.config:
        rule = RULES.get(str(config["partition"]))
        options |= {f"partition.{name}" for name in (rule.options if rule else ())}
        for key, value in relevant(known | config).items():
            values.setdefault(key, []).append(value)
    rows = []
    for key in FEDERATION:
        value = _distinct(values.pop(key))
        if key == "partition" and are_on_real_nodes(runs):
            value += ", for nodes without data of their own"
        rows.append([key, value])
    for key in sorted(options & values.keys()):
        rows.append([key, _distinct(values.pop(key))])
    rows.append(["seeds", _distinct(runs.seed)])
    for key, present in sorted(values.items()):
        same = all(value == present[0] for value in present)
        if same and key not in ELSEWHERE and present[0] != known.get(key):
            rows.append([key, str(present[0])])
    caption = "the federation, then what differs from the defaults in all runs that read it"
    return TextTable("", ["setting", "value"], rows, caption)


def _distinct(values: Iterable[Any]) -> str:
    """The different values, in their order."""
    return ", ".join(dict.fromkeys(str(value) for value in values))


def _commands(folder: Path) -> list[str]:
    """When the runs in a folder were asked for and by which command, the last ones."""
    file = folder / COMMANDS
    if not file.is_file():
        return []
    return file.read_text("utf-8", "replace").splitlines()[-MOST_COMMANDS:]


def _versions(folder: Path) -> str:
    """The versions of the libraries that a run used."""
    if not (folder / "config.toml").is_file():
        return ""
    versions = configuration_file(folder).get("versions", {})
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _numbers_first(name: str) -> tuple[bool, int, str]:
    """Sorts ids: numbers by size, then names."""
    if name.isdecimal():
        return False, int(name), name
    return True, 0, name
