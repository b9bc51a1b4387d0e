"""Corrections and changes of inputs from outside the package, for auto; and some that fail."""

import torch

from clients.core.client import Client
from fedapps.common.settings import setting
from fedapps.methods import Method
from strategies.methods.fedavg import FedAvg
from strategies.methods.fedgma import FedGMA


class Doubting(Client):
    """Adds a number to the logit of class 0."""

    doubt = setting(100.0, "what is added", "[0, 1000]", evaluation=True)

    def predict(self, x):
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()  # a correction may leave the network changed
        logits = torch.zeros(len(x), 10)
        logits[:, 0] = self.doubt
        return logits


class Short(Client):
    """Predicts too few classes."""

    def predict(self, x):
        return super().predict(x)[:, :2]


class Inverting(Client):
    """Inverts the inputs in place."""

    def predict(self, x):
        return super().predict(x.neg_().add_(1))


class Infinite(Client):
    """Predicts no number for one input."""

    def predict(self, x):
        logits = super().predict(x).flip(1)
        logits[0, 0] = float("nan")
        return logits


class Failing(Client):
    """Has a fault."""

    def predict(self, x):
        return {}["a key"]


class Listing(Client):
    """Predicts no tensor."""

    def predict(self, x):
        return super().predict(x).tolist()


class Classes(Client):
    """Predicts whole numbers."""

    def predict(self, x):
        return super().predict(x).long()


class Pairing(Client):
    """Takes as many inputs as it was written for."""

    def predict(self, x):
        return super().predict(x.view(2, 10, *x.shape[1:]).flatten(0, 1))


class Trains(Client):
    """Trains by another loss than FedAvg's client."""

    def loss(self, x, y):
        return 2 * super().loss(x, y)

    def predict(self, x):
        return -super().predict(x)


class Wraps(Doubting):
    """Builds another network around the model."""

    @classmethod
    def build(cls, model, info, /):
        return torch.nn.Sequential(model)


class Crowded(Client):
    """Has room for 60 inputs."""

    def predict(self, x):
        room = torch.zeros(60, len(self.model.head.bias))
        room[: len(x)] = super().predict(x)
        return room[: len(x)]


def _correction(client):
    return Method(FedAvg, client, "a test", "a test", name=client.__name__.lower())


DOUBTING = _correction(Doubting)
SHORT = _correction(Short)
CROWDED = _correction(Crowded)
INFINITE = _correction(Infinite)
INVERTING = _correction(Inverting)
FAILING = _correction(Failing)
LISTING = _correction(Listing)
CLASSES = _correction(Classes)
PAIRING = _correction(Pairing)
TRAINS = _correction(Trains)
WRAPS = _correction(Wraps)
SERVED = Method(FedGMA, Doubting, "a test", "a server of another method", name="served")


def fog(x, draw):
    """Half way to white, in place."""
    return x.mul_(0.5).add_(0.5)


def cropped(x, draw):
    """Too small."""
    return x[..., 1:]


def listed(x, draw):
    """No tensor."""
    return x.tolist()


def bright(x, draw):
    """Finite, but not for a network."""
    return x + 1e38


def alone(x):
    """Takes no generator."""
    return x


def synonyms(x, draw):
    """Another first token, in place."""
    x[:, 0] = int(draw.integers(9))
    return x


def halves(x, draw):
    """No tokens."""
    return x / 2


def unknown(x, draw):
    """Tokens that the network does not know."""
    return x + 1000


def endless(x, draw):
    """Not finite."""
    return x / 0


NO_FUNCTION = 3
