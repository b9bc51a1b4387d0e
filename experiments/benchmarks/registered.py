"""Many registered clients; 100 take part in a round. The cost of a round must not depend
on the number registered.

`in_process` also draws docs/figures/registered-clients.png."""

import resource
from pathlib import Path
from statistics import median

import numpy as np

from experiments.benchmarks.measure import (
    NEVER,
    Row,
    in_new_process,
    process_sizes,
    round_seconds,
    seconds,
    train,
)
from experiments.benchmarks.memory import Watch
from fedapps.settings.config import Config, defaults

METHODS = ("fedavg", "scaffold", "fedper", "pfedhn", "fedtta", "fedembed")
REGISTERED = (100, 1000, 10_000)
USERS = (900, 9000)  # of FedEmbed with its default local training
SAMPLED, ROUNDS = 100, 6
SERVER, ACTOR = 1500, 1000  # MB of a process at most
FIGURE = Path(__file__).parents[2] / "docs" / "figures" / "registered-clients.png"


def protocol(method: str, registered: int) -> Config:
    """`method` on MNIST, 100 of the registered clients in a round. FedEmbed trains by its defaults,
    the other methods 5 steps on 4 samples, as many as the smallest share has.

    pFedHN's embeddings have 26 entries, which is its default for 100 clients. The default would
    grow with the number registered, and the hypernetwork with it."""
    return (
        defaults()
        | {
            "method": method,
            "dataset": "mnist",
            "num-clients": registered,
            "train-fraction": 1.0,
            "fraction-train": SAMPLED / registered,
            "fraction-evaluate": SAMPLED / registered,
            "rounds": ROUNDS,
            "local-steps": 5,
            "batch-size": 4,
            "evaluate-every": NEVER,
            "checkpoint-every": 0,
            "pfedhn.embedding-dim": 26,
        }
        | ({"partition": "preference"} if method == "fedembed" else {})
    )


def short_protocol(method: str, registered: int) -> Config:
    """`protocol` with 5 local steps of FedEmbed as well."""
    return protocol(method, registered) | {"fedembed.local-epochs": 0}


def measure(config: Config) -> tuple[float, float, float]:
    """Seconds of the start with the first round, and of a later round; peak memory in MB."""
    reports: list[dict] = []
    whole = seconds(lambda: reports.extend(train(config)))
    first = whole - sum(report["seconds"] for report in reports[1:])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return first, median(map(round_seconds, reports[1:])), peak


def measure_on_ray(config: Config) -> tuple[float, float, float]:
    """Seconds of a later round; the most memory in MB, as seen several times a second, of the
    server's process and of an actor."""
    watch = Watch(private_memory)
    reports = train(config, "ray", watch.look)
    return median(map(round_seconds, reports[1:])), *watch.peaks()


def private_memory(pid: int) -> int:
    """Resident memory of a process in MB, without Ray's shared store."""
    sizes = process_sizes("status", pid)
    return (sizes["VmRSS"] - sizes["RssShmem"]) // 1024


def in_process() -> list[Row]:
    """The time of a round with most clients registered over that with fewest, and the memory."""
    few, many = REGISTERED[0], REGISTERED[-1]
    limit = SERVER + ACTOR
    table = []
    for_figure = {}
    for method in METHODS:
        runs = [in_new_process(measure, short_protocol(method, count)) for count in REGISTERED]
        _, took, memory = np.array(runs).T
        for_figure[method] = np.stack([took, memory], axis=1)
        exponent = float(np.polyfit(np.log(REGISTERED), np.log(took), 1)[0])
        times = f"{took[-1]:.2f} / {took[0]:.2f} a round, exponent {exponent:.2f}"
        mb = f"{memory[-1]:.0f} of {limit} MB, {memory[0]:.0f} with {few}"
        what = f"{method} round, {many} registered / {few}"
        table.append(Row(what, took[-1] / took[0], "1.20", times))
        table.append(Row(f"{method} memory, {many} registered", memory[-1] / limit, "1.00", mb))
    draw(for_figure, FIGURE)
    return table


def on_ray() -> list[Row]:
    """On Ray actors: the time of a round with most clients registered over that with fewest, and
    the memory with most."""
    few, many = REGISTERED[0], REGISTERED[-1]
    table = []
    for method in METHODS:
        base, _, _ = in_new_process(measure_on_ray, short_protocol(method, few))
        took, server, actor = in_new_process(measure_on_ray, short_protocol(method, many))
        times = f"{took:.2f} / {base:.2f} a round"
        table += [
            Row(f"{method} on ray, {many} registered / {few}", took / base, "1.20", times),
            _memory(f"{method}, server's memory", server, SERVER),
            _memory(f"{method}, an actor's memory", actor, ACTOR),
        ]
    return table


def _memory(what: str, used: float, limit: int) -> Row:
    return Row(what, used / limit, "1.00", f"{used:.0f} of {limit} MB")


def fedembed() -> list[Row]:
    """FedEmbed's time of a round and memory, most users registered over fewest."""
    fewest, most = USERS
    _, few, small = in_new_process(measure, protocol("fedembed", fewest))
    first, many, large = in_new_process(measure, protocol("fedembed", most))
    return [
        Row(f"FedEmbed round, {most} users / {fewest}", many / few, "", f"{many:.2f} / {few:.2f}"),
        Row(
            f"its start and first round / a later one, {most} users",
            first / many,
            "",
            f"{first:.2f} / {many:.2f}",
        ),
        Row(f"peak memory, {most} / {fewest}", large / small, "", f"{large:.0f} / {small:.0f} MB"),
    ]


def draw(measured: dict[str, np.ndarray], file: Path) -> None:
    """Seconds of a round, and memory, against the number of registered clients; values (n, 2)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for column, label in enumerate(("seconds of a round", "peak memory in MB")):
        axis = figure.add_subplot(1, 2, column + 1)
        for method, values in measured.items():
            axis.plot(REGISTERED, values[:, column], marker="o", label=method)
        axis.set(xscale="log", ylim=(0, None), xlabel="registered clients", ylabel=label)
    axis.legend(frameon=False, ncols=2)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
