"""The private paths, the ε that each path states, and the ε that an attack proves.

`PATHS` lists the attacked paths. `others` adds a run of every other method that supports privacy,
with the same attack."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from flwr.app import Context

from clients.methods._preferences import GlobalClient
from experiments.audit.bound import Family, any_mechanism, gaussian, lower_bound
from experiments.audit.entries import (
    CENTRAL,
    LOCAL,
    SETTINGS,
    WORLDS,
    Answer,
    central_run,
    component_answer,
    counted_by,
    descriptor_in_run,
    descriptor_of_component,
    descriptor_of_node,
    local_run,
    node_answer,
    served_run,
    stated_by_run,
)
from experiments.audit.federation import MODEL
from experiments.audit.view import View, no_noise, scores, seeded_entropy
from fedapps.methods import METHODS
from fedapps.settings.config import Config

RUN, NODE = "a run", "a SuperNode"
CLIENT_APP, SERVER_APP = "`client_app`", "`server_app`"


@dataclass(frozen=True)
class Path:
    """What is `released` through an `entry` point under a `kind` of privacy.

    `observe` gives an observer's view of a world, `stated` the ε at `delta` that is stated of what
    was last observed. Where an attack is `tight`, it proves a good part of that: one step, no
    sampling, opposite updates. `family` says how errors become ε."""

    released: str
    kind: str
    entry: str
    observe: Callable[[int], View]
    stated: Callable[[], float]
    delta: float = float(SETTINGS["dp-delta"])
    tight: bool = True
    family: Family = gaussian

    def __str__(self) -> str:
        return f"{self.released}, {self.kind}, {self.entry}"


def attacked(path: Path, repeats: int, seed: int = 0) -> tuple[float, float]:
    """The stated ε, and the ε that the attack proves from `repeats` observations of each world."""
    with no_noise():
        expected = [path.observe(world) for world in WORLDS]
    observed = []
    with seeded_entropy(seed):
        for world in WORLDS:
            observed.append([path.observe(world) for _ in range(repeats)])
    without, present = scores(expected, observed)
    return path.stated(), lower_bound(without, present, path.delta, path.family)


# One path for each entry point


def central(released: str, config: Config, *, registered: bool = False, tight: bool = True) -> Path:
    """All that a run with central privacy gives away."""
    observe = partial(central_run, config=CENTRAL | config, registered=registered)
    # A sampled round mixes the distributions with and without the user: it is not Gaussian.
    sampled = "fraction-train" in config
    family = any_mechanism if sampled else gaussian
    return Path(released, "central", RUN, observe, stated_by_run, tight=tight, family=family)


def served(released: str, config: Config, *, tight: bool = True) -> Path:
    """All that a run of `fedapps.server_app` with central privacy gives away."""
    observe = partial(served_run, config=CENTRAL | config)
    return Path(released, "central", SERVER_APP, observe, stated_by_run, tight=tight)


def local(released: str, config: Config, *, tight: bool = True) -> Path:
    """All that a user sends in a run with local privacy."""
    observe = partial(local_run, config=LOCAL | config)
    return Path(released, "local", RUN, observe, stated_by_run, tight=tight)


def answer(
    released: str, entry: str, asked: Callable[[int], Answer], *, tight: bool = True
) -> Path:
    """Answers of a node under local privacy, which counts what it spends."""
    last: list[Context] = []  # of the node that answered last

    def observe(world: int) -> View:
        view, context = asked(world)
        last[:] = [context]
        return view

    return Path(released, "local", entry, observe, lambda: counted_by(last[0]), tight=tight)


DESCRIPTOR_EPSILON, DESCRIPTOR_DELTA = 5.0, 0.01
DESCRIPTOR: Config = {
    "odpfl-hn.descriptor-epsilon": DESCRIPTOR_EPSILON,
    "odpfl-hn.descriptor-delta": DESCRIPTOR_DELTA,
}


def descriptor(entry: str, observe: Callable[[int], View], *, tight: bool = True) -> Path:
    """What a novel user sends to a server that lets it describe its inputs."""
    return Path(
        released="ODPFL-HN's descriptor",
        kind="descriptor",
        entry=entry,
        observe=observe,
        stated=lambda: DESCRIPTOR_EPSILON,
        delta=DESCRIPTOR_DELTA,
        tight=tight,
    )


def of_answer(observe: Callable[[int, Config], Answer]) -> Callable[[int], View]:
    """The view of a node's answer, without its context."""
    return lambda world: observe(world, DESCRIPTOR)[0]


def scores_of_run() -> Path:
    """The numbers of a run that says to evaluate in every round."""

    def observe(world: int) -> View:
        view = central_run(world, CENTRAL | FEDAVG)
        numbers = ("train ", "evaluate ", "reports", "summary")
        return {name: value for name, value in view.items() if name.startswith(numbers)}

    return Path("scores", "central", RUN, observe, stated_by_run, tight=False)


FEDAVG: Config = {"method": "fedavg"}
SAMPLED: Config = {"fraction-train": 0.6}
TASTES: Config = {
    "partition": "preference",
    "global.model": MODEL,
    "global+.embedding-dim": 2,
}
FEDEMBED: Config = {
    **TASTES,
    "method": "fedembed",
    "fedembed.assignment": "type",
    "fedembed.lr": 1.0,
    "fedembed.local-epochs": 1,
}
HELD: Config = {**FEDEMBED, "fedembed.assignment": "personal", "fedembed.heads": "server"}

PATHS: tuple[Path, ...] = (
    central("FedAvg's updates", FEDAVG),
    central("FedAvg's updates, sampled", FEDAVG | SAMPLED, tight=False),
    # The first step of the server's Adam shows little more than the signs of the mean change.
    central("FedEmbed's shared heads", FEDEMBED, tight=False),
    central("FedEmbed's heads on the server", HELD, registered=True, tight=False),
    served("FedAvg's updates", FEDAVG),
    scores_of_run(),
    local("FedAvg's updates", FEDAVG),
    answer("FedAvg's updates", NODE, partial(node_answer, action="train", method="fedavg")),
    answer(
        "FedAvg's updates, two rounds",
        NODE,
        partial(node_answer, action="train", method="fedavg", answers=2),
    ),
    answer(
        "FedAvg's updates",
        CLIENT_APP,
        partial(component_answer, action="train", method="fedavg"),
    ),
    local("FedEmbed's shared heads", FEDEMBED),
    local("FedEmbed's heads on the server", HELD),
    answer("scores", NODE, partial(node_answer, action="evaluate", method="fedavg")),
    answer("scores", CLIENT_APP, partial(component_answer, action="evaluate", method="fedavg")),
    descriptor(RUN, partial(descriptor_in_run, config=DESCRIPTOR), tight=False),
    descriptor(NODE, of_answer(descriptor_of_node)),
    descriptor(CLIENT_APP, of_answer(descriptor_of_component)),
)


def others() -> list[Path]:
    """A run of every other method that can keep privacy, of each kind."""
    paths = []
    for method, entry in METHODS.items():
        if method in ("fedavg", "fedembed"):
            continue
        config: Config = {"method": method}
        if issubclass(entry.client, GlobalClient):
            config |= TASTES | {f"{method}.local-epochs": 1, f"{method}.lr": 1.0}
        if "central" in entry.dp:
            paths.append(central(method, config, tight=False))
        if "local" in entry.dp:
            paths.append(local(method, config, tight=False))
    return paths
