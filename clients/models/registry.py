"""name → target network, fitted to the shape of the dataset's inputs."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from clients.models.head import headed
from clients.models.networks import MLP, ConvNet, ConvNetBN, FeatureMLP, LeNet, OmniglotLeNet
from clients.models.preference import PreferenceNet
from partitions.references import VARIADIC, Table, called, makes
from partitions.seeds import drawing


@dataclass(frozen=True)
class Model:
    """A registered network: built by ``build(shape, num_classes)``."""

    build: Callable[..., nn.Module]
    line: str


NETWORKS = {
    "mlp": Model(MLP, "784-200-200-C, ReLU; any input (FedTTA)"),
    "softmax": Model(partial(MLP, hidden=()), "no hidden layer: softmax regression; any input"),
    "mlp-small": Model(partial(MLP, hidden=(100,)), "one hidden layer of 100 (pFedHN, MNIST)"),
    "mlp-big": Model(partial(MLP, hidden=(400, 400)), "two hidden layers of 400"),
    "convnet": Model(ConvNet, "two 5×5 convolutions 32/64, fc 512 (FedTTA)"),
    "convnet-2048": Model(partial(ConvNet, fc=2048), "convnet with fc 2048 (FedTTA, FEMNIST)"),
    "convnet-small": Model(partial(ConvNet, widths=(16, 32)), "16/32 (HeteroFedTTA)"),
    "convnet-big": Model(partial(ConvNet, widths=(64, 128)), "64/128 (HeteroFedTTA)"),
    "convnet-bn": Model(ConvNetBN, "convnet with batch normalisation (FedBN)"),
    "lenet": Model(LeNet, "two 5×5 convolutions 16/32, fc 120, fc 84 (pFedHN, ODPFL-HN)"),
    "lenet-small": Model(partial(LeNet, k=8), "8/16 (pFedHN, size S)"),
    "lenet-big": Model(partial(LeNet, k=32), "32/64 (pFedHN, size L)"),
    "omniglot-lenet": Model(OmniglotLeNet, "four 3×3 convolutions, fc 84 (pFedHN, Omniglot)"),
    "feature-mlp": Model(FeatureMLP, "two layers of 500, dropout, on features (ODPFL-HN)"),
    "preference-net": Model(PreferenceNet, "two 5×5 convolutions 16/32, fc 128 (FedEmbed)"),
}


def sized(model: str, size: str) -> str:
    """The name of the network `size` ("small", "medium" or "big" of `model`, or any other name)."""
    return {"small": f"{model}-small", "medium": model, "big": f"{model}-big"}.get(size, size)


def build_model(
    name: str, shape: tuple[int, ...], num_classes: int, seed: int, **options: Any
) -> nn.Module:
    """The network `name` for inputs of `shape`, initialised by `seed` alone; `options` are the
    settings of a referenced one.

    Raises ValueError for an unknown name or a shape that the network cannot take."""
    with drawing(seed):
        return MODELS[name].build(tuple(shape), num_classes, **options)


def _adopted(name: str, build: Any) -> Model:
    """What ``module:NAME`` builds, given `num_classes` and, if it takes it, `shape`."""
    if isinstance(build, Model):
        return build
    if not makes(build, nn.Module):
        raise ValueError(
            f"{name!r} is {build!r:.200}; a model must be a subclass of torch.nn.Module, or a "
            "function annotated to return one (-> torch.nn.Module)"
        )

    def made(shape: tuple[int, ...], num_classes: int, **options: Any) -> nn.Module:
        kinds = [p.kind for p in inspect.signature(build).parameters.values()]
        passed = {"num_classes": num_classes} if VARIADIC[1] in kinds else {}
        given = {"shape": shape, "num_classes": num_classes}
        return headed(called(name, build, given, passed | options), name, shape, num_classes)

    return Model(made, f"{build.__doc__ or name}".partition("\n")[0])


MODELS = Table("model", NETWORKS, _adopted)
