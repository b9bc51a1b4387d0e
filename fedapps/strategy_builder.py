"""Builds a method's strategy from a configuration: for runs, for other people's apps, and to serve.

`build_strategy` is the one place that constructs a strategy. `strategy_of_run` adds what a run of
this package knows of its clients."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from clients.core.arrays import Arrays
from clients.core.protocol import FewShot
from clients.models import sized
from fedapps.methods import METHODS
from fedapps.node.building import client_models, network, shared_arrays
from fedapps.saved import trained_rounds
from fedapps.settings.config import Config, accepted, construct
from strategies.core.rounds import PersonalizedStrategy

Networks = nn.Module | Mapping[str, nn.Module]  # all clients' network, or networks by name


def build_strategy(
    config: Config, method: str, networks: Networks, **options: Any
) -> PersonalizedStrategy:
    """The method's strategy with the settings of `config` and the `options` that are no settings.

    It gets the networks if it asks for them. Raises ValueError for a value out of its range."""
    strategy_class = METHODS[method].strategy
    if "network" in accepted(strategy_class):
        options["network"] = networks
    strategy: PersonalizedStrategy = construct(
        strategy_class, config=config, method=method, **options
    )
    return strategy


def strategy_of_run(config: Config, **options: Any) -> tuple[PersonalizedStrategy, Arrays]:
    """The strategy of the run that `config` describes, and the arrays that it starts from."""
    method, base = str(config["method"]), str(config["model"])
    entry = METHODS[method]
    only_model = ""
    if config["restrict-to-model"]:
        only_model = sized(base, str(config["restrict-to-model"]))
    first_model = only_model or base

    models = client_models(config)  # empty where all clients have the same network
    if models and "models" in accepted(entry.strategy):
        options["models"] = {name: shared_arrays(config, method, name) for name in models}
    networks: dict[str, nn.Module] = {}
    if "network" in accepted(entry.strategy):
        for name in models or [""]:
            networks[name], _ = network(config, method, name or first_model)

    trained_before = 0
    if config["from-dir"]:
        trained_before = trained_rounds(Path(str(config["from-dir"])))
    strategy = build_strategy(
        config,
        method,
        networks,
        min_available_nodes=int(config["min-available-nodes"] or config["num-clients"]),
        evaluate_novel=bool(config["evaluate-novel"]) and _serves_novel(config, method),
        saved_rounds=trained_before,
        only_model=only_model,
        **options,
    )
    return strategy, shared_arrays(config, method, first_model)


def _serves_novel(config: Config, method: str) -> bool:
    """Whether novel clients get a model: without labels, or from the few that they have."""
    entry = METHODS[method]
    learns_in_rounds = entry.client.few_shot == FewShot.ROUNDS and config["novel-rounds"]
    return bool(entry.novel or config["novel-shots"] or learns_in_rounds)
