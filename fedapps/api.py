"""The Python API: `run` carries out runs as `fedapps run` does, `read` opens their folder.

runs = fedapps.run(["fedavg", "fedtta++"], seeds=range(3), num_clients=20)
runs.to_pandas(); runs.plot("curves"); runs["fedtta++-seed0"].personalize(x)
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING

from fedapps.commands.run import choose
from fedapps.common.signals import sigterm_raises
from fedapps.common.torch_defaults import torch_defaults
from fedapps.console import make_console, say
from fedapps.engines import run as engines
from fedapps.planning import (
    caveat_lines,
    check_options,
    federation_line,
    keep_or_discard,
    plan,
    prepare,
    read_request,
    say_stopped,
    share_trainings,
    trainings_lines,
)
from fedapps.results import plot, table
from fedapps.results.comparison import check_setting
from fedapps.results.formats import as_text
from fedapps.results.progress import Display
from fedapps.results.report import write_report
from fedapps.results.runs import (
    CURVES,
    NUMBERS,
    ROLES,
    ROUNDS,
    check_round,
    clients_of,
    main_scores,
    read_runs,
    rounds_of,
    score_keys,
)
from fedapps.serverapp import APPS
from fedapps.service.finished_run import FinishedRun
from fedapps.settings.config import Value, effective
from fedapps.settings.experiments import Experiment

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

ALL_ROUNDS = 10**9
PARAMETERS = {"method": "methods", "output-dir": "output"}  # of `run`, for these settings

Setting = Value | Iterable[Value]


@torch_defaults()
def run(
    methods: str | Iterable[str] = (),
    seeds: int | Iterable[int] = (),
    *,
    experiment: str = "",
    settings: Mapping[str, Setting] | None = None,
    output: str | Path = "results",
    start_from: str | Path | None = None,
    engine: str = "",
    jobs: int | None = None,
    gpus_per_client: float = 0.0,
    ray_address: str = "",
    fresh: bool = False,
    progress: bool = True,
    **keywords: Setting,
) -> "Runs":
    """Train methods and compare them, as `fedapps run`: finished runs are kept, others resume.

    A setting is a keyword with underscores (``num_clients=20``), or a key of `settings`, which may
    hold dots (``{"partition.alpha": 0.1}``). Several values span a grid. Without `methods`: those
    of `experiment`, by default of the main job. `start_from` is a folder of finished runs to start
    from. `fresh` repeats finished runs. References ``module:NAME`` among the methods and settings
    are imported.

    Ctrl-C and SIGTERM raise KeyboardInterrupt, after a line with the command that continues.
    Raises ValueError for bad input before anything is trained, and RuntimeError, with the reasons,
    if runs failed; `read` then opens the others."""
    output = Path(output).expanduser()
    saved = None if start_from is None else Path(start_from).expanduser()
    given = {key.replace("_", "-"): value for key, value in keywords.items()}
    given |= dict(settings or {})
    arguments = [experiment] if experiment else []
    names = methods if isinstance(methods, str) else ",".join(methods)
    numbers = _numbers(seeds, given.pop("seed", ()))
    console = make_console(quiet=not progress)
    check_options(arguments, names, numbers, engine, jobs, gpus_per_client, ray_address)
    asked = read_request(arguments, names, numbers, saved) | _settings(given)
    asked.check_single(repr(experiment), f"run all by `fedapps run {experiment}`, or here")
    asked.allow()
    work = plan(asked, output, saved, bound=False, fresh=fresh)
    keep_or_discard(work, output, fresh, yes=True)
    share_trainings(work)
    say(console, federation_line(work))
    for line in [*caveat_lines(work), *trainings_lines(work)]:
        say(console, line)
    ray = bool(ray_address or gpus_per_client)
    engine, parallel = choose(console, work, engine, jobs, {}, ray=ray)
    prepare(console, work, output, asked.source)
    try:
        with sigterm_raises(), _quiet_flower(), Display(work, console, parallel) as display:
            engines.run_jobs(
                work, engine, APPS, parallel=parallel, gpus_per_client=gpus_per_client,
                ray_address=ray_address, follow=display.follow,
            )  # fmt: skip
    except KeyboardInterrupt:
        say_stopped(make_console(), work, output)  # also without progress
        raise
    failed = [f"{job.name}: {job.error}" for job in work if job.error]
    # If all runs failed, there is nothing to report.
    if len(failed) < len(work):
        frame, problems = read_runs(output)
        write_report(frame, output, problems)
    if failed:
        raise RuntimeError("; ".join(failed))
    names_of_work = [job.name for job in work]
    return Runs(frame[frame.name.isin(names_of_work)].reset_index(drop=True), problems)


def _numbers(seeds: int | Iterable[int], seed: Setting) -> str:
    """The seeds, which the setting `seed` may give instead. Raises ValueError if both are given."""
    seeds_text = _listed(seeds)
    seed_text = _listed(seed)
    if seeds_text and seed_text:
        raise ValueError(
            f"seeds are {seeds_text}, but seed is {seed_text} as well; remove one of the two"
        )
    return seeds_text or seed_text


def _listed(values: Setting) -> str:
    """One value or several, separated by commas."""
    return str(values) if isinstance(values, Value) else ",".join(map(str, values))


def _settings(given: Mapping[str, Setting]) -> Experiment:
    """Settings with one value and with several. Raises ValueError for one for which `run` has a
    parameter."""
    for key in PARAMETERS.keys() & given:
        raise ValueError(
            f"{key} is {given[key]!r}, but is no setting here; give run {PARAMETERS[key]}= instead"
        )
    single: dict[str, Value] = {}
    grid: dict[str, list[Value]] = {}
    for key, value in given.items():
        if isinstance(value, Value):
            single[key] = value
        else:
            grid[key] = list(value)
    return Experiment(single, grid)


@contextmanager
def _quiet_flower() -> Iterator[None]:
    """Inside, Flower logs errors alone, as under `fedapps run`."""
    log = logging.getLogger("flwr")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def read(folder: str | Path) -> "Runs":
    """The runs in a folder that `fedapps run` or `run` wrote to; `problems` names what cannot be
    read. No code that they name is run. Raises ValueError if there is no run."""
    return Runs(*read_runs(Path(folder).expanduser()))


class Runs:
    """Runs with their scores; a notebook shows their table.

    ``runs[0]`` and ``runs["fedtta++-seed0"]`` open a finished run (`fedapps.load`)."""

    def __init__(self, frame: "DataFrame", problems: Iterable[str] = ()) -> None:
        self._frame = frame
        self.problems = list(problems)

    def __len__(self) -> int:
        return len(self._frame)

    def __iter__(self) -> Iterator[FinishedRun]:
        return (self[place] for place in range(len(self)))

    def __getitem__(self, key: int | str) -> FinishedRun:
        names = list(self._frame.name)
        if isinstance(key, str):
            if key not in names:
                raise KeyError(f"no run {key!r}; there are {', '.join(names)}")
            place = names.index(key)
        else:
            place = index(key)  # TypeError for a slice or a float
            if not -len(names) <= place < len(names):
                raise IndexError(f"no run {place}; there are {len(names)}, counted from 0")
        return FinishedRun(self._frame.folder.iloc[place])

    @property
    def names(self) -> list[str]:
        """``<method>-seed<seed>`` of each run."""
        return list(self._frame.name)

    def table(self) -> "DataFrame":
        """The table of `fedapps run`: a row per method, mean ± deviation over seeds, as texts."""
        from pandas import DataFrame

        shown = table.results(self._frame)
        return DataFrame(shown.rows, columns=shown.columns).set_index("method")

    def to_pandas(self, *settings: str) -> "DataFrame":
        """A row per run: method, seed, accuracies in % by round and role, F1 in [0, 1], for values
        RMSE in the labels' unit and R², your own scores, seconds, megabytes per client and round,
        ε; and the values of the named settings, None where a run has no such setting.

        Raises ValueError for a setting that no run has."""
        for key in settings:
            check_setting(self._frame, key, "to_pandas")
        columns = ["method", "seed"]
        for round_ in ROUNDS:
            columns += [f"{round_} {score}" for score in score_keys(self._frame)]
        columns += [*NUMBERS, "error", "folder"]
        frame = self._frame[columns].dropna(axis="columns", how="all")
        for key in settings:
            frame[key] = [effective(config, key) for config in self._frame.config]
        return frame

    def rounds(self) -> "DataFrame":
        """A row per run and evaluated round: accuracies in % of training and novel clients, in the
        columns `train-accuracy` and `novel-accuracy`; where labels are values, RMSE in `train-rmse`
        and `novel-rmse`; F1 in `train-f1` and `novel-f1` where a run has no accuracy."""
        frame = rounds_of(self._frame, ALL_ROUNDS)
        kept: set[str] = set()
        for name in main_scores(self._frame):
            kept |= {f"{role}-{name}" for role in ROLES}
        unused = [key for key in CURVES if key not in kept]
        return frame.drop(columns=[key for key in unused if frame[key].isna().all()])

    def clients(self, round_: str = "best") -> "DataFrame":
        """A row per run and client at the "best" or "last" round: role, accuracy in %, samples.
        Where labels are values, the column `rmse` in their unit replaces the accuracy.

        Raises ValueError for another round."""
        check_round(round_)
        frame = clients_of(self._frame, round_)
        columns = ["method", "seed", "client", "role"]
        for name in main_scores(self._frame):
            of_name = [f"{role}-{name}" for role in ROLES]
            frame[name] = frame.value.where(frame.score.isin(of_name))
            columns.append(name)
        return frame[[*columns, "examples"]]

    def plot(self, kind: str = "curves", by: str = "") -> "Figure":
        """A figure: "curves", "clients", or "swept" with `by`, the setting on the x-axis.

        Raises ValueError for another kind, and for `by` beside one that does not read it."""
        good = self._frame[self._frame.error == ""]
        if kind == "swept":
            if not by:
                raise ValueError('"swept" needs the setting on the x-axis, as by="partition.alpha"')
            return plot.swept(good, by)
        if by:
            raise ValueError(f'by is {by!r}, but is for "swept" alone, not for {kind!r}; remove it')
        if kind not in plot.FIGURES:
            raise ValueError(f"unknown figure {kind!r}; known: {', '.join(plot.FIGURES)}, swept")
        figure: Figure = plot.FIGURES[kind](good)
        return figure

    def __repr__(self) -> str:
        return as_text(table.results(self._frame))

    def _repr_html_(self) -> str:
        return str(self.table().to_html(escape=True))
