"""A cohort: clients trained in one stack of networks, over the same clients trained in turn.

Uses a GPU if there is one. On a CPU a cohort is not faster."""

from statistics import median

from experiments.benchmarks import engines
from experiments.benchmarks.measure import Row, round_seconds, train
from fedapps.settings.config import Config

ROUNDS = 8
REPEATS = 5
COHORT = 50
LIMITS = {"mlp": "0.10", "lenet": "0.20", "convnet": ""}  # by network, for the clients' part


def protocol(model: str) -> Config:
    """FedAvg in FedTTA's federation: 50 clients train, 20 steps of 64 samples each."""
    chosen: Config = {"model": model, "rounds": ROUNDS, "checkpoint-every": 0, "lr": 0.1}
    return engines.protocol() | chosen


def measure(config: Config) -> dict[str, float]:
    """Seconds of a later round, and of its clients' part."""
    later = train(config)[1:]
    return {
        "round": median(map(round_seconds, later)),
        "clients": median(report["phases"]["clients"] for report in later),
    }


def rows() -> list[Row]:
    """A round of a cohort over a round of the clients in turn; medians of alternating runs."""
    table = []
    for model, clients_limit in LIMITS.items():
        config = protocol(model)
        in_cohort = []
        in_turn = []
        for _ in range(REPEATS):
            in_cohort.append(measure(config | {"stacked-clients": COHORT}))
            in_turn.append(measure(config))
        for part, limit in (("round", ""), ("clients", clients_limit)):
            cohort_seconds = median(run[part] for run in in_cohort)
            turn_seconds = median(run[part] for run in in_turn)
            what = f"{model}: {part} of a cohort / in turn"
            values = f"{cohort_seconds:.3f} / {turn_seconds:.3f}"
            table.append(Row(what, cohort_seconds / turn_seconds, limit, values))
    return table
