"""A cohort of clients in one stack of networks, over the same clients in turn.

Uses a GPU if there is one; on a CPU a cohort gains nothing."""

from statistics import median

from experiments.benchmarks import engines
from experiments.benchmarks.measure import Row, round_seconds, train
from fedapps.settings.config import Config

ROUNDS, REPEATS, COHORT = 8, 5, 50
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
    """A cohort's round over one of clients in turn; medians of alternating runs."""
    table = []
    for model, bound in LIMITS.items():
        config = protocol(model)
        pairs = [
            (measure(config | {"stacked-clients": COHORT}), measure(config)) for _ in range(REPEATS)
        ]
        for part, limit in (("round", ""), ("clients", bound)):
            one, other = (median(pair[i][part] for pair in pairs) for i in (0, 1))
            what = f"{model}: {part} of a cohort / in turn"
            table.append(Row(what, one / other, limit, f"{one:.3f} / {other:.3f}"))
    return table
