"""A client, its network and its initial arrays, from a configuration."""

from copy import deepcopy
from dataclasses import replace
from functools import lru_cache

from torch import nn

import partitions
from clients.arrays import Arrays, model_arrays
from clients.base import Client
from clients.cohort import in_cohort
from clients.models import build_model, sized
from clients.models.roles import check_tied
from fedapps.methods import METHODS, Method
from fedapps.settings.config import Config, construct, settings
from partitions.base import DEFAULT_PUBLIC
from partitions.datasets import Info
from partitions.references import options
from partitions.seeds import drawing
from partitions.settings import taken
from partitions.shares import Share


def build_client(
    config: Config, method: str, share: Share, info: Info, client_id: int, own: str = ""
) -> Client:
    """The method's client that holds the share; `own` names its network if it has one."""
    if share.public is None and METHODS[method].client.needs_public:
        share = replace(share, public=partitions.federation(with_public(config, method)).public)
    config = config | {"model": client_model(config, method, client_id, own)}
    model, initial = method_model(method, config, info)
    if in_cohort():  # the others' steps are still to come
        model = deepcopy(model)
    return construct(
        METHODS[method].client,
        model,
        share,
        config=config,
        method=method,
        client=client_id,
        initial=initial,
        model_name=str(config["model"]),
    )


def with_public(config: Config, method: str) -> Config:
    """The configuration whose federation keeps public samples if the method needs some."""
    key = "partition.public-samples"
    return config | {
        key: config[key] or (DEFAULT_PUBLIC if METHODS[method].client.needs_public else 0)
    }


def client_model(config: Config, method: str, client: int, own: str = "") -> str:
    """The network of a client: its node's `own`, else the one that client-models deals it.

    Raises ValueError if all clients of the method must have the same, unless the run is that of
    one model's clients (only-model)."""
    dealt = client_models(config)
    if not own and not dealt:
        return str(config["model"])
    if not config["only-model"] and not _any_model(METHODS[method]):
        able = ", ".join(name for name, m in METHODS.items() if _any_model(m))
        raise ValueError(f"{method!r} needs one model for all clients; their own have: {able}")
    return sized(str(config["model"]), own) if own else dealt[client % len(dealt)]


def client_models(config: Config) -> list[str]:
    """The names of the networks that client-models deals."""
    words = str(config["client-models"]).split(",")
    return [sized(str(config["model"]), word.strip()) for word in words if word.strip()]


def _any_model(method: Method) -> bool:
    """Whether its clients' networks may differ: the strategy serves all, or they stay there."""
    return method.strategy.any_model or method.client.personal == ("",)


def method_model(method: str, config: Config, info: Info) -> tuple[nn.Module, Arrays]:
    """The method's whole network and its initial arrays, which the seed alone decides.

    A process keeps one network per configuration: every call of a client sets all its arrays."""
    known = settings(config, method)
    own = options(config, str(known["model"]))
    return _method_model(method, tuple(sorted(known.items())), tuple(sorted(own.items())), info)


@lru_cache(maxsize=8)
def _method_model(
    method: str,
    settings: tuple[tuple[str, object], ...],
    own: tuple[tuple[str, object], ...],
    info: Info,
) -> tuple[nn.Module, Arrays]:
    known = dict(settings)
    seed = int(str(known["seed"]))
    base = build_model(str(known["model"]), info.shape, info.num_classes, seed, **dict(own))
    with drawing(seed):
        client = METHODS[method].client
        model = check_tied(client.build_network(base, info, **known), client.is_separate, method)
    return model, model_arrays(model)


def shared_arrays(config: Config, method: str, model: str) -> Arrays:
    """The initial arrays of the method's network around `model` that are not personal."""
    _, initial = network(config, method, model)
    shared, known = METHODS[method].client.shared, settings(config, method)
    return shared(initial, **{name: known[name] for name in taken(shared) if name in known})


def network(config: Config, method: str, model: str) -> tuple[nn.Module, Arrays]:
    """The method's network around `model`, and its initial arrays."""
    return method_model(method, config | {"model": model}, partitions.task(config))
