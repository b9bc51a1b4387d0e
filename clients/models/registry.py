"""name → target network, fitted to the shape of the dataset's inputs.

The table can be read without torch; a network's class is imported when it is built."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from fedapps.common.external_code import (
    VARIADIC,
    Registry,
    call_with,
    declares_return_type,
    described,
)
from fedapps.common.seeds import drawing
from partitions.datasets.words import CHARACTERS, NUM_WORD_TOKENS, VOCABULARY

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Model:
    """A registered network: ``build(shape, num_classes, **options)``; `build` is a function, a
    class or its ``module:NAME``. It takes tokens below `num_tokens`; 0: it takes numbers."""

    build: "Callable[..., nn.Module] | str"
    summary: str
    options: Mapping[str, Any] = field(default_factory=dict)
    num_tokens: int = 0


def _network(name: str, summary: str, **options: Any) -> Model:
    return Model(f"clients.models.{name}", summary, options)


def _of_tokens(summary: str, num_tokens: int, **options: Any) -> Model:
    all_options = {"num_tokens": num_tokens, **options}
    return Model("clients.models.networks:StackedLSTM", summary, all_options, num_tokens)


NETWORKS = {
    "mlp": _network("networks:MLP", "784-200-200-C, ReLU; any input (FedTTA)"),
    "softmax": _network(
        "networks:MLP", "no hidden layer: softmax regression; any input", hidden=()
    ),
    "mlp-small": _network("networks:MLP", "one hidden layer of 100 (pFedHN, MNIST)", hidden=(100,)),
    "mlp-big": _network("networks:MLP", "two hidden layers of 400", hidden=(400, 400)),
    "convnet": _network("networks:ConvNet", "two 5×5 convolutions 32/64, fc 512 (FedTTA)"),
    "convnet-2048": _network("networks:ConvNet", "convnet with fc 2048 (FedTTA, FEMNIST)", fc=2048),
    "convnet-small": _network("networks:ConvNet", "16/32 (HeteroFedTTA)", widths=(16, 32)),
    "convnet-big": _network("networks:ConvNet", "64/128 (HeteroFedTTA)", widths=(64, 128)),
    "convnet-bn": _network("networks:ConvNetBN", "convnet with batch normalisation (FedBN)"),
    "convnet-atp": _network(
        "networks:ConvNetATP", "three 3×3 convolutions 32/64/64, fc 64, batch normalisation (ATP)"
    ),
    "lenet": _network(
        "networks:LeNet", "two 5×5 convolutions 16/32, fc 120, fc 84 (pFedHN, ODPFL-HN)"
    ),
    "lenet-small": _network("networks:LeNet", "8/16 (pFedHN, size S)", k=8),
    "lenet-big": _network("networks:LeNet", "32/64 (pFedHN, size L)", k=32),
    "omniglot-lenet": _network(
        "networks:OmniglotLeNet", "four 3×3 convolutions, fc 84 (pFedHN, Omniglot)"
    ),
    "feature-mlp": _network(
        "networks:FeatureMLP", "two layers of 500, dropout, on features (ODPFL-HN)"
    ),
    "preference-net": _network(
        "preference:PreferenceNet", "two 5×5 convolutions 16/32, fc 128 (FedEmbed)"
    ),
    "char-lstm": _of_tokens(
        "tokens of 80 characters, embedding 8, two LSTM layers of 256 (LEAF, Shakespeare)",
        len(CHARACTERS),
    ),
    "word-lstm": _of_tokens(
        f"tokens of {VOCABULARY} words, embedding 100, two LSTM layers of 100, fc 128 "
        "(LEAF, Sent140)",
        NUM_WORD_TOKENS,
        embedding=100,
        hidden=100,
        fc=128,
    ),
}


def sized(model: str, size: str) -> str:
    """The name of the network `size` ("small", "medium" or "big" of `model`, or any other name)."""
    return {"small": f"{model}-small", "medium": model, "big": f"{model}-big"}.get(size, size)


def build_model(
    name: str, shape: tuple[int, ...], num_classes: int, seed: int, **options: Any
) -> "nn.Module":
    """The network `name` for inputs of `shape`, initialised by `seed` alone; `options` are the
    settings of a network from outside the package.

    Raises ValueError for an unknown name or a shape that the network cannot take."""
    model = MODELS[name]
    build = resolve_name(model.build) if isinstance(model.build, str) else model.build
    with drawing(seed):
        network: nn.Module = build(tuple(shape), num_classes, **model.options, **options)
        return network


def _adopted(name: str, build: Any) -> Model:
    """The network of ``module:NAME``, which gets `num_classes` and, if it takes it, `shape`."""
    from torch import nn

    from clients.models.foreign import adopted

    if isinstance(build, Model):
        return build
    if not declares_return_type(build, nn.Module):
        raise ValueError(
            f"{name!r} is {described(build)}; a model must be a subclass of torch.nn.Module, or a "
            "function annotated to return one (-> torch.nn.Module)"
        )

    def made(shape: tuple[int, ...], num_classes: int, **options: Any) -> "nn.Module":
        kinds = [p.kind for p in inspect.signature(build).parameters.values()]
        passed = {"num_classes": num_classes} if VARIADIC[1] in kinds else {}
        given = {"shape": shape, "num_classes": num_classes}
        network = call_with(name, build, given, passed | options)
        return adopted(network, name, shape, num_classes)[0]

    return Model(made, f"{build.__doc__ or name}".partition("\n")[0])


MODELS = Registry("model", NETWORKS, _adopted)
