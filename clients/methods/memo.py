"""MEMO client (Zhang, Levine and Finn, NeurIPS 2022): each input adapts the network for itself.

θ' = θ − η ∇H(p̄), p̄ the mean prediction of `views` augmented views of the input, which θ' then
predicts. As in the code of Bao et al. (NeurIPS 2023), views are random crops (of the input with a
mirrored border) and, with `flips`, mirror images, not AugMix; batch normalisation keeps its running
statistics. Departs from that code: by default no view is mirrored, as digits need. On the
same views it agrees with that code to 1e-5 (tests/test_authors.py)."""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from clients.core.arrays import Arrays
from clients.core.client import Client, Config
from clients.core.copies import copy_of
from clients.core.functional import functional_call
from clients.core.layout import set_training
from clients.core.normalisation import class_logits
from clients.core.protocol import round_of
from clients.models.foreign import trial_inputs
from fedapps.common.errors import error_line
from fedapps.common.seeds import seed_of
from fedapps.common.settings import COUNT, POSITIVE_INT, RATE, setting
from fedapps.common.tasks import CLASS_PROBABILITIES
from partitions.datasets.loading import Info


def marginal_entropy(logits: Tensor) -> Tensor:
    """H(mean_v σ(z_v)) in nats of the logits (views, C), or of one output for two classes."""
    log_p = class_logits(logits).log_softmax(1).logsumexp(0) - math.log(len(logits))
    return -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum()


class MEMONetwork(nn.Module):
    """A network that adapts to each input before it predicts it; `seed` decides the views."""

    def __init__(self, network: nn.Module, seed: int, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.network = network
        self.seed = seed
        self.settings = settings

    def forward(self, x: Tensor) -> Tensor:
        """Logits (n, C) of images x (n, *shape)."""
        parameters = {}
        for name, parameter in self.network.named_parameters():
            if parameter.requires_grad:
                parameters[name] = parameter.detach()
        lr = self.settings["adapt_lr"]
        steps = self.settings["adapt_steps"]

        def entropy(theta: dict[str, Tensor], views: Tensor, *given: Tensor) -> Tensor:
            return marginal_entropy(functional_call(self.network, theta, (views, *given)))

        def logits(image: Tensor, views: Tensor, *given: Tensor) -> Tensor:
            adapted = parameters
            for views_of_step in views.unflatten(0, (steps, self.settings["views"])):
                gradient = grad(entropy)(adapted, views_of_step, *given)
                adapted = {n: p - lr * gradient[n] for n, p in adapted.items()}
            out: Tensor = functional_call(self.network, adapted, (image[None], *given))[0]
            return out

        views = self.views(x, steps)
        given = self.given(x)
        num_weights = sum(p.numel() for p in parameters.values())
        # An input needs float32 copies of weights and gradients, and its views.
        megabytes_per_input = 8e-6 * num_weights + 4e-6 * views[0].numel()
        inputs_at_once = max(1, int(self.settings["pass_megabytes"] / megabytes_per_input))
        try:
            return vmap(logits, chunk_size=inputs_at_once)(x, views, *given)
        except RuntimeError:  # an operation that vmap lacks, such as another memory format
            return torch.stack([logits(*row) for row in zip(x, views, *given, strict=True)])

    def given(self, x: Tensor) -> tuple[Tensor, ...]:
        """Further inputs of `network`: tensors with a row for each image in x."""
        return ()

    def views(self, x: Tensor, steps: int = 1) -> Tensor:
        """Augmented views (n, steps · views, *shape) of images x (n, *shape)."""
        count = steps * self.settings["views"]
        height, width = x.shape[2:]
        generator = torch.Generator().manual_seed(self.seed)

        def shifted(side: int) -> Tensor:
            """The indices (n, count, side) of each view on an axis."""
            margin = round(self.settings["crop_share"] * side)
            shifts = torch.randint(2 * margin + 1, (len(x), count), generator=generator) - margin
            return mirrored(shifts[..., None] + torch.arange(side), side)

        rows = shifted(height)
        columns = shifted(width)
        flipped = torch.rand((len(x), count), generator=generator) < 0.5 * self.settings["flips"]
        columns = torch.where(flipped[..., None], columns.flip(-1), columns)
        # One index for each axis of the result (n, views, channels, height, width), which then has
        # the strides of a new tensor.
        image = torch.arange(len(x))[:, None, None, None, None]
        channel = torch.arange(x.shape[1])[:, None, None]
        return x[image, channel, rows[:, :, None, :, None], columns[:, :, None, None, :]]


N = TypeVar("N", bound=MEMONetwork)


def mirrored(index: Tensor, side: int) -> Tensor:
    """Indices beyond 0 … side − 1 on an axis that is mirrored at its ends, ends included."""
    index = torch.where(index < 0, -1 - index, index)
    return torch.where(index >= side, 2 * side - 1 - index, index)


class MEMOClient(Client):
    """FedAvg's client that predicts each input by a network which has adapted to it.

    `adapt_lr` is η, `crop_share` the largest shift of a crop as a share of the side."""

    tasks: tuple[str, ...] = CLASS_PROBABILITIES
    adapts_by_gradients = True
    rates: tuple[str, ...] = ("lr", "adapt_lr")

    views_round = -1  # of `views_seed`

    views = setting(16, "augmented views of an input", POSITIVE_INT, evaluation=True)
    adapt_lr = setting(
        0.005, "η, learning rate of the step on an input's views", RATE, evaluation=True
    )
    adapt_steps = setting(
        1, "adaptation steps for an input, each on new views", COUNT, evaluation=True
    )
    crop_share = setting(
        0.125, "largest shift of a view, as a share of the side", "[0, 0.5]", evaluation=True
    )
    flips = setting(
        False, "mirror views at random; unsuitable for digits and letters", evaluation=True
    )

    @classmethod
    def build(cls, model: nn.Module, info: Info, /) -> nn.Module:
        """The network. ValueError for inputs that are no images, and for a network that cannot
        predict a single one."""
        if len(info.shape) != 3:
            raise ValueError(
                f"memo needs images, whose views it makes; inputs of {info.name} have the shape "
                f"{info.shape}"
            )
        check_takes_one(model, info.shape)
        return model

    def receive(self, arrays: Arrays, config: Config) -> None:
        """Load the model and decide the seed of the round's views, one for all models it scores."""
        super().receive(arrays, config)
        round_ = round_of(config)
        if round_ != self.views_round:
            self.views_round = round_
            self.views_seed = seed_of(self.seed, "views", round_, self.client)

    def predict(self, x: Tensor) -> Tensor:
        """Logits (n, C), each input by its adapted network."""
        self.intermediate_logits = {"base": super().predict(x)}
        with torch.no_grad():
            return self.personal_model(x)(x)

    def personal_model(self, x: Tensor) -> nn.Module:
        """The network together with its adaptation to every input."""
        return self.adapting(super().personal_model(x), MEMONetwork)

    def adapting(self, network: nn.Module, kind: type[N]) -> N:
        """`network`, which adapts to each input."""
        names = ("adapt_lr", "adapt_steps", "views", "crop_share", "flips", "pass_megabytes")
        settings = {name: getattr(self, name) for name in names}
        return kind(network, self.views_seed, settings).eval()


def check_takes_one(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Raise ValueError if the network cannot predict a single image of this shape (c, h, w), or
    cannot adapt to it."""
    image = trial_inputs(model, shape)[:1]
    set_training(model, False)
    trial = copy_of(model)
    settings = {"adapt_lr": 0.0, "adapt_steps": 1, "views": 2, "crop_share": 0.0, "flips": False}
    adapting = MEMONetwork(trial, 0, settings | {"pass_megabytes": 1.0})
    try:
        with torch.no_grad():
            model(image)
    except Exception as error:  # whatever code from outside raises
        raise ValueError(
            "memo and fedthe+ predict one image at a time, and the network takes no single one; "
            "give its batch normalisation running statistics, or take tent: "
            f"{error_line(error)}"
        ) from error
    finally:
        set_training(model, True)
    try:
        with torch.no_grad():
            adapting(image)
    except Exception as error:  # whatever code from outside raises
        raise ValueError(
            "memo and fedthe+ adapt the network by torch.func.grad, and the network does not allow "
            "it; let its forward pass change no buffer in evaluation mode and call what torch.func "
            f"takes, or take tent: {error_line(error)}"
        ) from error
