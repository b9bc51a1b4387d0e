"""What an observer sees through each entry point, in one repeat.

The world is `WITHOUT` or `PRESENT`. Under central privacy these are a federation without the
attacked user and one with it, and the observer sees what a run gives away: its models, reports and
summary. Elsewhere the user is asked in both worlds, with other samples, and the observer is the
server, which sees the user's messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result
from torch.nn import functional

import fedapps
from clients.core.arrays import Arrays, from_record, to_record
from clients.core.protocol import RUN_TOKEN, SERVER_ROUND
from clients.models.encoders import Described, MeanSets
from experiments.audit.federation import (
    BATCH,
    BYSTANDER,
    DATASET,
    MODEL,
    SHAPE,
    TinyNet,
    candidates,
    node,
    novel_inputs,
    novel_node,
    samples,
)
from experiments.audit.view import View, of_arrays, of_message, of_values
from fedapps.building import network, shared_arrays
from fedapps.callbacks import Callback, Report
from fedapps.clientapp import app
from fedapps.common import external_code
from fedapps.common.external_code import Value
from fedapps.engines.in_process_grid import InProcessGrid, error_reply
from fedapps.node.context import SIMULATED, SIMULATION
from fedapps.node.ledger import read_ledger
from fedapps.serverapp import run
from fedapps.settings.config import Config, construct, defaults, override
from strategies.core.accountant import local_epsilon
from strategies.core.privacy import Privacy
from strategies.core.strategy import PersonalizedStrategy

WITHOUT, PRESENT = WORLDS = (0, 1)
USER = 2  # node of the attacked user in a run; that of the bystander is 1
SETTINGS: Config = {
    "model": MODEL,
    "dataset": DATASET,
    "num-clients": 2,
    "min-available-nodes": 1,
    "train-fraction": 1.0,
    "rounds": 1,
    "local-epochs": 1,
    "batch-size": BATCH,
    "lr": 100.0,
    "evaluate-every": 1,
    "dp-delta": 0.00001,
}
TRAINING: dict[str, Any] = {"local_epochs": 1, "batch_size": BATCH, "lr": 100.0}
CENTRAL: Config = {"dp": "central", "dp-noise-multiplier": 0.5}  # μ = 1 / z = 2
LOCAL: Config = {"dp": "local", "dp-noise-multiplier": 1.0}  # μ = 2 / z = 2


@dataclass(frozen=True)
class Question:
    """A server's message: its type, method, arrays, and the `more` of its configuration."""

    action: str
    method: str
    arrays: Arrays
    more: Config


Answer = tuple[View, Context]

external_code.allow(MODEL, DATASET, f"{__name__}:Released")


class Released(Callback):
    """Keeps what the last run gave away beside its arrays."""

    reports: Sequence[Mapping[str, Any]] = ()
    summary: Mapping[str, Any] = {}

    def run_starts(self, config: Config) -> None:
        """Forget the run before."""
        Released.reports = []
        Released.summary = {}

    def round_ends(self, report: Report, strategy: PersonalizedStrategy) -> None:
        """A line of metrics.jsonl."""
        Released.reports = [*Released.reports, dict(report)]

    def run_ends(self, summary: Mapping[str, Any]) -> None:
        """The content of summary.json."""
        Released.summary = dict(summary)


class WatchedGrid(InProcessGrid):
    """Keeps what the attacked user sent. A node in `silent` answers no train message."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.replies: list[Message] = []
        self.silent: set[int] = set()

    def _deliver(self, message: Message) -> Message:
        if message.metadata.dst_node_id in self.silent and message.metadata.message_type == "train":
            return error_reply(message, "away")
        reply = super()._deliver(message)
        if message.metadata.dst_node_id == USER:
            self.replies.append(reply)
        return reply


# A run, in process


def simulated(places: Sequence[Config], config: Config) -> WatchedGrid:
    """A grid of virtual clients with their own data."""
    marked = [{**place, SIMULATED: SIMULATION} for place in places]
    return WatchedGrid(app, config, marked)


def central_run(world: int, config: Config, *, registered: bool = False) -> View:
    """A run with or without the user. With `registered` it is there in both worlds, since its
    number names arrays, and trains in one."""
    tastes = config.get("partition") == "preference"
    places = [node(0, BYSTANDER, tastes=tastes)]
    if world == PRESENT or registered:
        places.append(node(1, PRESENT, tastes=tastes))
    config = configured(config)
    grid = simulated(places, config)
    if world == WITHOUT and registered:
        grid.silent = {USER}
    return of_result(run(grid, config))


def local_run(world: int, config: Config) -> View:
    """All that the user sends in a run, with one data set or the other."""
    tastes = config.get("partition") == "preference"
    config = configured(config)
    grid = simulated([node(0, BYSTANDER, tastes=tastes), node(1, world, tastes=tastes)], config)
    run(grid, config)
    return of_replies(grid.replies)


def configured(changes: Config) -> Config:
    """A run's whole configuration. Each repeat asks for it."""
    return dict(_configured(**changes))


@lru_cache(maxsize=16, typed=True)
def _configured(**changes: Value) -> Config:
    settings = SETTINGS | {"callbacks": f"{__name__}:Released"} | changes
    rate = f"{settings['method']}.lr"
    # A method's own rate would hold in place of the common one, and be too small.
    if rate in defaults() and rate not in changes:
        settings[rate] = SETTINGS["lr"]
    return override(defaults(), settings, all_methods=False)


def of_result(result: Result) -> View:
    """All that a run gives away: arrays, metrics, lines of metrics.jsonl, summary."""
    rounds = (result.train_metrics_clientapp, result.evaluate_metrics_clientapp)
    view = of_arrays(from_record(result.arrays))
    for name, metrics in zip(("train", "evaluate"), rounds, strict=True):
        for number, record in metrics.items():
            view |= of_values(dict(record), f"{name} {number}/")
    view |= of_values({"reports": Released.reports, "summary": Released.summary})
    return view


def of_replies(replies: Sequence[Message]) -> View:
    """All that a user's messages hold, and their number."""
    view: View = {"messages": float(len(replies))}
    for number, reply in enumerate(replies):
        view |= of_message(reply, f"{number}/")
    return view


def stated_by_run() -> float:
    """ε that the last run states in its summary."""
    return float(Released.summary["privacy"]["epsilon"])


# A node that a server asks


def asked(client_app: ClientApp, place: Config, config: Config, *questions: Question) -> Answer:
    """All that a real node answers, and its context."""
    grid = InProcessGrid(client_app, config, [place])
    view: View = {}
    for number, question in enumerate(questions, start=1):
        settings: dict[str, Any] = {"method": question.method, RUN_TOKEN: "audit"}
        settings[SERVER_ROUND] = number
        content = RecordDict({"arrays": to_record(question.arrays)})
        content["config"] = ConfigRecord(settings | question.more)
        (reply,) = grid.send_and_receive([Message(content, 1, question.action)])
        view |= of_message(reply, f"{number}/")
    return view, grid.contexts[1]


def node_answer(world: int, action: str, method: str, answers: int = 1) -> Answer:
    """The project's app on a real node, in a run of so many rounds."""
    config, question = honest_question(action, method, answers)
    return asked(app, node(1, world), config, *[question] * answers)


@cache
def honest_question(action: str, method: str, rounds: int) -> tuple[Config, Question]:
    """A run with local privacy, and what its server says in each round."""
    config = configured({"method": method, "rounds": rounds, **LOCAL})
    privacy: Privacy = construct(Privacy, config=config, method=method)
    start = shared_arrays(config, method, MODEL)
    return config, Question(action, method, start, privacy.settings())


def component_answer(world: int, action: str, method: str) -> Answer:
    """`fedapps.client_app` on a real node. Its keywords alone say that it is private."""
    _, question = honest_question(action, method, 1)
    return asked(local_component(method), {"world": world}, {}, question)


@cache
def local_component(method: str) -> ClientApp:
    """The app of a programmer who wants local privacy."""
    return component(method, rounds=1, **TRAINING, **as_keywords(LOCAL))


def component(method: str, **settings: Any) -> ClientApp:
    """`fedapps.client_app` of the worst case."""

    def data(context: Context) -> Any:
        pair = samples(int(context.node_config["world"]))
        return pair, pair

    return fedapps.client_app(method, model=tiny_net, data=data, **settings)


def tiny_net() -> TinyNet:
    """The network, for two classes."""
    return TinyNet(SHAPE, 2)


def as_keywords(config: Config) -> dict[str, Any]:
    """Settings as `fedapps.client_app` and `fedapps.server_app` take them."""
    return {key.replace("-", "_"): value for key, value in config.items() if key != "method"}


def counted_by(context: Context) -> float:
    """ε of all that a node says that it has answered, at the δ of `SETTINGS`."""
    ledger, _ = read_ledger(context)
    spent = sum(entry["spent"] for entry in ledger.runs.values())
    return local_epsilon(spent, float(SETTINGS["dp-delta"]))


# Flower components: a ServerApp and a ClientApp of a programmer


def served_run(world: int, config: Config) -> View:
    """A run of `fedapps.server_app` over nodes of `fedapps.client_app`, with or without the user.
    Nothing but the server's keywords says that it is private."""
    method = str(config["method"])
    keywords = TRAINING | as_keywords(config) | {"num_clients": 2}
    views: list[View] = []

    def then(result: Result, strategy: PersonalizedStrategy) -> None:
        # No callback runs here: a programmer of a ServerApp gets the strategy itself.
        Released.reports = []
        assert strategy.privacy is not None
        Released.summary = {"privacy": {"epsilon": strategy.privacy.report()["dp-epsilon"]}}
        views.append(of_result(result))

    server = fedapps.server_app(
        method,
        model=tiny_net,
        shape=SHAPE,
        rounds=1,
        min_available_nodes=1,
        then=then,
        **keywords,
    )
    places: list[Config] = [{"world": BYSTANDER}, {"world": PRESENT}]
    grid = InProcessGrid(component(method, **TRAINING), {}, places[: 1 + world])
    server(grid, Context(1, 0, {}, RecordDict(), {}))
    return views[0]


# ODPFL-HN's descriptor

ENCODER: Config = {"odpfl-hn.encoder": "ds-sphere", "odpfl-hn.descriptor-dim": 2}


@cache
def worst_question() -> Question:
    """A server's request to encode, by a γ whose φ(x) is the sign of x's first entry, in the first
    direction."""
    arrays = shared_arrays(configured({"method": "odpfl-hn", **ENCODER}), "odpfl-hn", MODEL)
    gamma = {n: np.zeros_like(a) for n, a in arrays.items() if n.startswith("encoder.")}
    # ReLU(x) − ReLU(−x) = x: two hidden units let the sign through.
    gamma["encoder.fc.0.weight"][:2, 0] = [1, -1]
    gamma["encoder.out.weight"][0, :2] = [1, -1]
    return Question("query.encode", "odpfl-hn", gamma, {})


@cache
def worst_pair() -> tuple[int, int]:
    """Two candidates that `worst_question` tells apart, and for which the φ(x) of a run's first γ
    are as opposite as any."""
    config = configured({"method": "odpfl-hn", **ENCODER})
    described, _ = network(config, "odpfl-hn", MODEL)
    x = candidates()
    with torch.no_grad():
        assert isinstance(described, Described) and isinstance(described.encoder, MeanSets)
        phi = functional.normalize(described.encoder.each(x), dim=1)
    first = x.flatten(1)[:, 0]
    alike = phi @ phi.T
    # `worst_question` does not tell apart inputs whose first entries have one sign.
    alike[torch.outer(first, first) >= 0] = 1
    i, j = divmod(int(alike.argmin()), len(x))
    return i, j


def descriptor_of_node(world: int, config: Config) -> Answer:
    """The project's app on a real node without labels, asked by a server with the worst encoder."""
    place = novel_node(1, world, worst_pair())
    return asked(app, place, descriptor_config(**config), worst_question())


def descriptor_of_component(world: int, config: Config) -> Answer:
    """The same of `fedapps.client_app`."""
    own = novel_component(**as_keywords(ENCODER | config))
    return asked(own, {"world": world}, {}, worst_question())


@cache
def novel_component(**settings: Any) -> ClientApp:
    """The app of a programmer whose node has inputs alone."""
    own = {name.removeprefix("odpfl-hn."): value for name, value in settings.items()}

    def data(context: Context) -> Any:
        return novel_inputs(int(context.node_config["world"]), worst_pair())

    return fedapps.client_app("odpfl-hn", model=tiny_net, data=data, **own)


@cache
def descriptor_config(**settings: Any) -> Config:
    """A whole configuration whose novel clients have private descriptors."""
    run_: Config = {"method": "odpfl-hn", "odpfl-hn.hidden-dim": 4, "odpfl-hn.encoder-lr": 1e-9}
    return configured({**run_, **ENCODER, **settings})


def descriptor_in_run(world: int, config: Config) -> View:
    """What a novel user sends to encode its inputs, in a whole run."""
    config = descriptor_config(**config)
    grid = simulated([node(0, BYSTANDER), novel_node(1, world, worst_pair())], config)
    run(grid, config)
    return of_replies([r for r in grid.replies if r.metadata.message_type == "query.encode"])
