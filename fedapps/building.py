"""The two halves of a method, client and strategy, and their network, from a configuration.

The only builders: for runs, for other people's apps, and to serve. `build_strategy` alone
constructs a strategy; `strategy_of_run` adds what a run of this package knows of its clients."""

import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import partitions
from clients.core.arrays import Arrays, model_arrays
from clients.core.client import Client
from clients.core.cohort import in_cohort
from clients.core.copies import copy_of
from clients.core.decision.choice import CANDIDATES
from clients.core.own_scores import load_scores
from clients.core.protocol import FewShot, StateUse
from clients.core.single_samples import advice as of_single_samples
from clients.core.single_samples import leaves_one
from clients.core.unknown_tokens import advice as of_tokens
from clients.models import build_model, sized
from clients.models.foreign import check_gradients, check_logits, warn_if_not_fixed
from clients.models.head import headed
from clients.models.roles import check_tied, frozen_names
from clients.models.unsent import warn_of_unsent
from fedapps.common.seeds import drawing
from fedapps.common.settings import keyword_arguments, taken
from fedapps.methods import METHODS, Method, chosen_from, corrections
from fedapps.saved import trained_rounds
from fedapps.settings.config import Config, accepted, construct, settings
from fedapps.settings.saved_configurations import unchecked_configuration
from partitions.datasets.loading import Info
from partitions.federations import DEFAULT_PUBLIC
from partitions.shares import Share
from strategies.core.strategy import PersonalizedStrategy

# A client that is served is scored by no function of the run's own, and need not have its code.
WITHOUT_SCORES: Config = {"scores": ""}
Network = tuple[nn.Module, Arrays]  # a method's whole network and its initial arrays
Networks = nn.Module | Mapping[str, nn.Module]  # all clients' network, or networks by name


class Builder:
    """Makes the clients of one method and one configuration, which is read once."""

    def __init__(self, config: Config, method: str, info: Info) -> None:
        self._config = config
        self._method = method
        self._info = info
        self._kind = METHODS[method].client
        self._settings = client_settings(config, method)
        self._scores = load_scores(str(config["scores"]))
        self._networks: dict[str, Network] = {}

    def client(self, share: Share, client_id: int, node_model: str = "") -> Client:
        """The method's client that holds the share. `node_model` names its network if the node's
        configuration does."""
        config = self._config
        method = self._method
        if share.public is None and self._kind.needs_public:
            federation = partitions.federation(with_public(config, method))
            share = replace(share, public=federation.public)
        name = client_model(config, method, client_id, node_model)
        if name not in self._networks:
            self._networks[name] = method_model(method, config | {"model": name}, self._info)
        model, initial = self._networks[name]
        if in_cohort():  # clients of a cohort train at the same time
            model = copy_of(model)
        identity = {"client": client_id, "initial": initial, "model_name": name}
        client = self._kind(model, share, **self._settings | identity)
        client.own_scores = self._scores
        client.method_clients = chosen_clients(client, config, method)
        return client


def check_takes(client: Client, config: Config, info: Info) -> None:
    """Raise ValueError if the client's network cannot take an input of the user's own data."""
    name = client.model_name or str(config["model"])
    network = build_model(
        name, info.shape, info.num_outputs, int(config["seed"]), **keyword_arguments(config, name)
    )
    samples = client.share.everything[:2][0]  # one has no batch statistics
    try:
        with torch.no_grad():
            network.eval()(samples)
    except Exception as error:  # whatever code from outside raises
        if text := of_tokens(error, network, client.share.everything):
            raise ValueError(f"model={name} cannot take an input of {info.name}: {text}") from error
        kind = "" if info.inputs is None else f" ({info.inputs.kind})"
        raise ValueError(
            f"model={name} cannot take an input of {info.name}, {samples.dtype} "
            f"{tuple(samples.shape[1:])}{kind}: {str(error).partition(chr(10))[0]:.200}; give a "
            "network that takes it, as model=module:NAME (tokens need an nn.Embedding), or declare "
            "the data otherwise, by inputs="
        ) from error


def check_batches(client: Client, config: Config, method: str, info: Info) -> None:
    """Raise ValueError if a mini-batch of the client has a single sample, which its network cannot
    train on, since it normalises features over the mini-batch."""
    if not len(client.share.train) or not leaves_one(client, client.batch_size):
        return
    chosen = settings(config | {"model": client.model_name}, method)
    name = str(chosen["model"])
    seed = int(chosen["seed"])
    network = build_model(
        name, info.shape, info.num_outputs, seed, **keyword_arguments(config, name)
    )
    try:
        with torch.no_grad(), drawing(seed):
            network.train()(client.share.train[:1][0])
    except ValueError as error:
        key = f"{method}.batch-size" if f"{method}.batch-size" in config else "batch-size"
        raise ValueError(of_single_samples(client, name, key)) from error


def client_settings(config: Config, method: str) -> dict[str, Any]:
    """Keyword arguments for the method's client: the settings that are not its defaults."""
    kind = METHODS[method].client
    names = accepted(kind)
    changed: dict[str, Any] = {}
    for name, value in settings(config, method).items():
        is_default = name in kind.declared and kind.declared[name].is_default(value)
        if name in names and not is_default:
            changed[name] = value
    return changed


def chosen_clients(client: Client, config: Config, method: str) -> dict[str, Client]:
    """Clients of the methods that `client` chooses from, by name: with its network and samples, the
    settings of their own sections, and the common settings as `method` has them."""
    names = chosen_from(method, config)
    if not names:
        return {}
    common = {key: config[f"{method}.{key}"] for key in config if f"{method}.{key}" in config}
    identity = {"client": client.client, "initial": client.initial, "model_name": client.model_name}
    others = {}
    for name in names:
        given = client_settings(config | common, name)
        others[name] = METHODS[name].client(client.model, client.share, **given | identity)
    return others


def check_chosen(network: nn.Module, method: str, info: Info, values: Mapping[str, Any]) -> None:
    """Raise ValueError if the method's clients choose from a method that does more than correct
    predictions of FedAvg's model, or that cannot use the network."""
    key = METHODS[method].chooses_by
    given = {f"{method}.{key}": values[key]} if key else {}
    for name in chosen_from(method, given):
        if not corrects_alone(METHODS[name]):
            raise ValueError(
                f"{method}.{key} names {name!r}, which does more than correct predictions of "
                "FedAvg's model: its clients train otherwise, or its server sends more; choose "
                f"from {', '.join([*CANDIDATES, *corrections()])}"
            )
        client = METHODS[name].client
        client.check_serves(info.task)
        if client.adapts_by_gradients:
            check_gradients(network, name, tuple(info.shape))
        try:
            built = client.build_network(network, info)
        except ValueError as error:
            raise ValueError(f"{error}; leave {name} out of {method}.{key}") from error
        if built is not network:
            raise ValueError(
                f"{method}.{key} names {name!r}, whose clients build another network around the "
                f"model; let `build` of {client.__name__} return the model"
            )


def corrects_alone(method: Method) -> bool:
    """Whether its clients train as FedAvg's and only predict otherwise, by what they have and
    FedAvg's server sends."""
    kind = method.client
    if method.strategy is not METHODS["fedavg"].strategy:
        return False
    for name in ("train", "fit_locally", "loss"):
        if getattr(kind, name) != getattr(Client, name):
            return False
    if kind.personal or kind.exchanges or kind.needs_public or kind.needs_state != StateUse.NONE:
        return False
    return kind.predict != Client.predict or kind.update != Client.update


def with_public(config: Config, method: str) -> Config:
    """The configuration, with public samples in the federation if the method needs some."""
    key = "partition.public-samples"
    if config[key] or not METHODS[method].client.needs_public:
        return config
    return config | {key: DEFAULT_PUBLIC}


def client_model(config: Config, method: str, client: int, node_model: str = "") -> str:
    """The name of a client's network: `node_model`, else its entry of client-models, else the
    run's.

    Raises ValueError for a network of its own if all clients of the method must have the same.
    With restrict-to-model all clients of the run have the same."""
    names = client_models(config)
    if not node_model and not names:
        return str(config["model"])
    if not config["restrict-to-model"] and not _any_model(METHODS[method]):
        able = ", ".join(name for name, m in METHODS.items() if _any_model(m))
        raise ValueError(f"{method!r} needs one model for all clients; their own have: {able}")
    if node_model:
        return sized(str(config["model"]), node_model)
    return names[client % len(names)]


def client_models(config: Config) -> list[str]:
    """The names of the networks in client-models, which clients have in turn."""
    words = str(config["client-models"]).split(",")
    return [sized(str(config["model"]), word.strip()) for word in words if word.strip()]


def _any_model(method: Method) -> bool:
    """Whether its clients may have different networks."""
    return method.strategy.any_model or method.client.personal == ("",)


def method_model(method: str, config: Config, info: Info) -> Network:
    """The method's network of a configuration. The seed alone decides its initial arrays.

    A process keeps one network per configuration: every call of a client sets all its arrays."""
    method_settings = settings(config, method)
    model_options = keyword_arguments(config, str(method_settings["model"]))
    return _method_model(
        method,
        tuple(sorted(method_settings.items())),
        tuple(sorted(model_options.items())),
        info,
    )


@lru_cache(maxsize=8)
def _method_model(
    method: str,
    method_settings: tuple[tuple[str, object], ...],
    model_options: tuple[tuple[str, object], ...],
    info: Info,
) -> Network:
    values: dict[str, Any] = dict(method_settings)
    seed = int(values["seed"])
    name = str(values["model"])
    base = build_model(name, info.shape, info.num_outputs, seed, **dict(model_options))
    check_logits(base, tuple(info.shape), info.task)
    warn_if_not_fixed(base, tuple(info.shape))
    warn_of_unsent(base, tuple(info.shape))
    with drawing(seed):
        return network_around(base, method, info, values)


def network_around(
    base: nn.Module,
    method: str,
    info: Info,
    values: dict[str, Any],
    known_heads: dict[Hashable, str] | None = None,
) -> Network:
    """The method's network around `base`, by the method's settings `values`; `known_heads`: see
    `headed`."""
    client = METHODS[method].client
    if client.adapts_by_gradients:
        check_gradients(base, method, tuple(info.shape))
    if client.uses_head(values):
        place = str(values.get("head", ""))
        base = headed(
            base,
            method,
            tuple(info.shape),
            info.num_outputs,
            place,
            client.head_by_name,
            known_heads,
        )

    def separate(name: str) -> bool:
        return client.is_personal(name) or name.startswith(client.separately_trained)

    model = check_tied(client.build_network(base, info, **values), separate, method)
    check_chosen(model, method, info, values)
    arrays = model_arrays(model)
    check_personal(client, method, model, arrays)
    return model, arrays


def check_personal(client: type[Client], method: str, model: nn.Module, arrays: Arrays) -> None:
    """Raise ValueError where what the method keeps on the client is no array of the network, or
    every array of it: it would train as another method."""
    kept = [name for name in arrays if client.is_personal(name)]
    names = f"those of {type(model).__name__} are {', '.join(arrays):.500}"
    for prefix in client.personal:
        if not any(name.startswith(prefix) for name in arrays):
            raise ValueError(
                f"{method} keeps arrays on the client whose names begin with {prefix!r}, but "
                f"{names}; name the part so, or change `personal` of {client.__name__}"
            )
    own_rule = any("is_personal" in vars(kind) for kind in client.__mro__ if kind is not Client)
    if own_rule and not kept:
        raise ValueError(
            f"{method} keeps no array on the client: `is_personal` of {client.__name__} names "
            f"none, and {names}"
        )
    frozen = frozen_names(model)  # they stay as they are made, on both sides
    sent = [name for name in arrays if name not in frozen and not client.is_personal(name)]
    if client.personal != ("",) and kept and not sent:
        also = f" and {', '.join(sorted(frozen)):.300} are frozen" if frozen else ""
        raise ValueError(
            f"{method} keeps {', '.join(kept):.300} on the client{also}, so nothing of the "
            "network would be shared; choose one with more layers that are trained, or the method "
            "local"
        )


LARGE = 1_000_000  # weights
LARGE_RATIO = 5


def size_note(config: Config) -> str:
    """A line about a method whose client has many more weights than the network of the run, such as
    an encoder for large images; "" for others."""
    method = str(config["method"])
    model = str(settings(config, method)["model"])
    info = partitions.task(config)
    seed = int(config["seed"])
    target = build_model(
        model, info.shape, info.num_outputs, seed, **keyword_arguments(config, model)
    )
    _, arrays = network(config, method, model)
    sizes: dict[str, int] = defaultdict(int)  # by the arrays' first name
    for name, array in arrays.items():
        first_name = re.split("[./]", name)[0]
        sizes[first_name] += array.size
    total = sum(sizes.values())
    usual = sum(array.size for array in model_arrays(target).values())
    if total < LARGE or total < LARGE_RATIO * usual:
        return ""
    largest = max(sizes, key=lambda name: sizes[name])
    return (
        f"{method}: a client has {total / 1e6:.3g} million weights, {total / usual:.0f} times the "
        f"{usual / 1e6:.2g} million of {model}: {largest} alone {sizes[largest] / 1e6:.3g} "
        "million; rounds take longer, and so do messages"
    )


def replaced_settings(configs: Sequence[Config]) -> Config:
    """The settings that the training clients' data replace in all these runs of one method, by key;
    see `Client.settings_for`."""
    method = str(configs[0]["method"])
    client = METHODS[method].client
    replaced: list[Config] = []
    for config in configs:
        arguments = client.arguments_for(client.settings_for, settings(config, method))
        replaced.append(client.settings_for(training_shares(config), **arguments))
    if any(changes != replaced[0] for changes in replaced):
        return {}
    return {f"{method}.{name}": value for name, value in replaced[0].items()}


def are_training(config: Config, method: str) -> np.ndarray:
    """By client whether it trains, as `PersonalizedStrategy.training_nodes` has it: those without
    labels do with few methods."""
    federation = partitions.federation(with_public(config, method))
    if METHODS[method].strategy.trains_unlabeled and config["dp"] == "none":
        return ~federation.novel
    return ~(federation.novel | federation.unlabeled)


def training_shares(config: Config) -> Iterator[Share]:
    """The data of each training client."""
    method = str(config["method"])
    federation = partitions.federation(with_public(config, method))
    for number in np.flatnonzero(are_training(config, method)):
        yield federation.share(int(number))


def method_caveats(config: Config) -> list[str]:
    """What the method says of its network and its settings, see `Client.caveats`."""
    method = str(config["method"])
    client = METHODS[method].client
    values = settings(config, method)
    info = partitions.task(config)
    model, _ = method_model(method, config, info)
    values["shape"] = tuple(info.shape)
    if "shares" in taken(client.caveats):
        values["shares"] = training_shares(config)
    return client.caveats(model, **client.arguments_for(client.caveats, values))


def bytes_after_rounds(config: Config) -> int:
    """What the method's exchanges after the last round hold, see `Client.bytes_after_rounds`."""
    method = str(config["method"])
    kind = METHODS[method].client
    arguments = kind.arguments_for(kind.bytes_after_rounds, settings(config, method))
    model, _ = method_model(method, config, partitions.task(config))
    num_training = round(int(config["num-clients"]) * float(config["train-fraction"]))
    return kind.bytes_after_rounds(model, max(1, num_training), **arguments)


def held_out_note(config: Config) -> str:
    """That the saved network, from which the run starts, was trained on samples that the run's
    method holds out; "" if it was not."""
    method = str(config["method"])
    held_out = settings(config, method).get("held_out", 0.0)
    if not held_out:
        return ""
    folder = str(config["from-dir"])
    shares = set()  # what each run that has trained the network held out
    while folder and (Path(folder) / "config.toml").is_file():
        former = unchecked_configuration(Path(folder))
        if former["rounds"]:
            shares.add(float(former.get(f"{former['method']}.held-out", 0.0)))
        folder = str(former["from-dir"])
    others = shares - {held_out}
    if not others:
        return ""
    return (
        f"the saved network was trained with held-out={min(others):g}, so on samples that are held "
        f"out now, and looks better on them than on new ones; start from a run of bbse or auto "
        f"with held-out={held_out:g}"
    )


def shared_arrays(config: Config, method: str, model: str) -> Arrays:
    """The initial arrays that the server starts from, of the method's network around `model`."""
    return shared_of(network(config, method, model), method, settings(config, method))


def shared_of(network: Network, method: str, values: Mapping[str, Any]) -> Arrays:
    """The initial arrays that the server starts from: neither personal nor frozen."""
    model, initial = network
    client = METHODS[method].client
    arrays = client.shared(initial, **client.arguments_for(client.shared, values))
    frozen = frozen_names(model)
    return {name: array for name, array in arrays.items() if name not in frozen}


def network(config: Config, method: str, model: str) -> Network:
    """The method's network around `model`."""
    return method_model(method, config | {"model": model}, partitions.task(config))


def build_strategy(
    config: Config, method: str, networks: Networks, **options: Any
) -> PersonalizedStrategy:
    """The method's strategy with the settings of `config` and the `options` that are no settings.

    It gets the networks if it asks for them. Raises ValueError for a value out of its range."""
    strategy_class = METHODS[method].strategy
    if "network" in accepted(strategy_class):
        options["network"] = networks
    # A setting has this name, too: without an option its text would be passed.
    options.setdefault("latency", None)
    strategy: PersonalizedStrategy = construct(
        strategy_class, config=config, method=method, **options
    )
    return strategy


def strategy_of_run(config: Config, **options: Any) -> tuple[PersonalizedStrategy, Arrays]:
    """The strategy of the run that `config` describes, and the arrays that it starts from."""
    method = str(config["method"])
    base = str(config["model"])
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
        for name in models:
            networks[name], _ = network(config, method, name)
        if not models:
            networks[""], _ = network(config, method, first_model)

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
