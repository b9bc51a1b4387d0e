"""A client, its network and its initial arrays, from a configuration."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

import partitions
from clients.core.arrays import Arrays, model_arrays
from clients.core.client import Client
from clients.core.cohort import in_cohort
from clients.models import build_model, sized
from clients.models.head import headed
from clients.models.roles import check_tied, frozen_names
from fedapps.common.external_code import options
from fedapps.common.seeds import drawing
from fedapps.common.settings import taken
from fedapps.methods import METHODS, Method
from fedapps.settings.config import Config, accepted, settings
from partitions.datasets.loading import Info
from partitions.federations import DEFAULT_PUBLIC
from partitions.shares import Share

Network = tuple[nn.Module, Arrays]  # a method's whole network and its initial arrays


class Builder:
    """Makes the clients of one method and one configuration, which is read once."""

    def __init__(self, config: Config, method: str, info: Info) -> None:
        self._config, self._method, self._info = config, method, info
        self._kind, self._settings = METHODS[method].client, client_settings(config, method)
        self._networks: dict[str, Network] = {}

    def client(self, share: Share, client_id: int, node_model: str = "") -> Client:
        """The method's client that holds the share. `node_model` names its network if the node's
        configuration does."""
        config, method, kind = self._config, self._method, self._kind
        if share.public is None and kind.needs_public:
            share = replace(share, public=partitions.federation(with_public(config, method)).public)
        name = client_model(config, method, client_id, node_model)
        if name not in self._networks:
            self._networks[name] = method_model(method, config | {"model": name}, self._info)
        model, initial = self._networks[name]
        if in_cohort():  # clients of a cohort train at the same time
            model = deepcopy(model)
        given = {"client": client_id, "initial": initial, "model_name": name}
        return kind(model, share, **self._settings | given)


def check_batches(client: Client, config: Config, method: str, info: Info) -> None:
    """Raise ValueError if a mini-batch of the client has a single sample, which its network cannot
    train on, since it normalises features over the mini-batch."""
    n, size, passes = len(client.share.train), client.batch_size, client.local_epochs > 0
    passes |= client.short_batches and client.local_steps >= -(-n // size)
    if n > 1 and size > 1 and (not passes or n % size != 1):
        return
    chosen = settings(config | {"model": client.model_name}, method)
    name, seed = str(chosen["model"]), int(chosen["seed"])
    network = build_model(name, info.shape, info.num_classes, seed, **options(config, name))
    try:
        with torch.no_grad(), drawing(seed):
            network.train()(client.share.train[:1][0])
    except ValueError as error:
        if n < 2:
            raise ValueError(
                f"a client has one sample to train on, and {name} trains on two or more at a time; "
                "use fewer clients, or take another model"
            ) from error
        key = f"{method}.batch-size" if f"{method}.batch-size" in config else "batch-size"
        fit = next(s for s in range(size + 1, n + 2) if s > 1 and (not passes or n % s != 1))
        raise ValueError(
            f"{key} is {size}; of a client's {n} samples a mini-batch has one, and {name} trains "
            f"on two or more: set {key} to {fit}, or take another model"
        ) from error


def client_settings(config: Config, method: str) -> dict[str, Any]:
    """Keyword arguments for the method's client: the settings that are not its defaults."""
    kind = METHODS[method].client
    names, chosen = accepted(kind), settings(config, method)
    return {
        name: value
        for name, value in chosen.items()
        if name in names and not (name in kind.declared and kind.declared[name].is_default(value))
    }


def with_public(config: Config, method: str) -> Config:
    """The configuration, with public samples in the federation if the method needs some."""
    key = "partition.public-samples"
    return config | {
        key: config[key] or (DEFAULT_PUBLIC if METHODS[method].client.needs_public else 0)
    }


def client_model(config: Config, method: str, client: int, node_model: str = "") -> str:
    """The name of a client's network: `node_model`, else the one that client-models deals it.

    Raises ValueError for a network of its own if all clients of the method must have the same.
    With restrict-to-model all clients of the run have the same."""
    dealt = client_models(config)
    if not node_model and not dealt:
        return str(config["model"])
    if not config["restrict-to-model"] and not _any_model(METHODS[method]):
        able = ", ".join(name for name, m in METHODS.items() if _any_model(m))
        raise ValueError(f"{method!r} needs one model for all clients; their own have: {able}")
    if node_model:
        return sized(str(config["model"]), node_model)
    return dealt[client % len(dealt)]


def client_models(config: Config) -> list[str]:
    """The names of the networks that client-models deals."""
    words = str(config["client-models"]).split(",")
    return [sized(str(config["model"]), word.strip()) for word in words if word.strip()]


def _any_model(method: Method) -> bool:
    """Whether its clients may have different networks."""
    return method.strategy.any_model or method.client.personal == ("",)


def method_model(method: str, config: Config, info: Info) -> Network:
    """The method's network of a configuration. The seed alone decides its initial arrays.

    A process keeps one network per configuration: every call of a client sets all its arrays."""
    method_settings = settings(config, method)
    own = options(config, str(method_settings["model"]))
    return _method_model(
        method, tuple(sorted(method_settings.items())), tuple(sorted(own.items())), info
    )


@lru_cache(maxsize=8)
def _method_model(
    method: str,
    method_settings: tuple[tuple[str, object], ...],
    model_options: tuple[tuple[str, object], ...],
    info: Info,
) -> Network:
    values: dict[str, Any] = dict(method_settings)
    seed, name = int(str(values["seed"])), str(values["model"])
    base = build_model(name, info.shape, info.num_classes, seed, **dict(model_options))
    with drawing(seed):
        return network_around(base, method, info, values)


def network_around(base: nn.Module, method: str, info: Info, values: dict[str, Any]) -> Network:
    """The method's network around `base`, by the method's settings `values`."""
    client = METHODS[method].client
    if client.uses_head(values):
        base = headed(base, method, tuple(info.shape), info.num_classes)

    def separate(name: str) -> bool:
        return client.is_personal(name) or name.startswith(client.separately_trained)

    model = check_tied(client.build_network(base, info, **values), separate, method)
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
            f"{method} keeps {', '.join(kept):.300} on the client{also}, so nothing of "
            f"{type(model).__name__} would be shared; choose a network with more layers that are "
            "trained, or the method local"
        )


def shared_arrays(config: Config, method: str, model: str) -> Arrays:
    """The initial arrays that the server starts from, of the method's network around `model`."""
    return shared_of(network(config, method, model), method, settings(config, method))


def shared_of(network: Network, method: str, values: Mapping[str, Any]) -> Arrays:
    """The initial arrays that the server starts from: neither personal nor frozen."""
    model, initial = network
    shared, frozen = METHODS[method].client.shared, frozen_names(model)
    own = {name: values[name] for name in taken(shared) if name in values}
    return {n: a for n, a in shared(initial, **own).items() if n not in frozen}


def network(config: Config, method: str, model: str) -> Network:
    """The method's network around `model`."""
    return method_model(method, config | {"model": model}, partitions.task(config))
