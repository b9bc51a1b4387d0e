"""The worst case: a user of a tiny network whose updates are long, and opposite in the two worlds.

Every update of the attacked user is longer than the norm C at which it is clipped. In one world it
has eight samples, all of class 1; in the other four, all of class 0. So its updates point in
opposite directions, and it makes two local steps in place of one, which a counter of batches shows.
A bystander has each input in both classes, and so hardly an update."""

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from clients.models.head import HeadedNetwork
from fedapps.settings.config import Config
from partitions.datasets.loading import Info, preference_info
from partitions.preference_federation import RANK
from partitions.shares import SUB_POPULATION, PreferredSamples, Samples, Share

SHAPE = (1, 2, 2)  # of an input: an image, which some methods need
WIDTH = 3
BATCH = 4
BYSTANDER = -1  # in place of a world
MODEL = "experiments.audit.federation:TinyNet"
DATASET = "experiments.audit.federation:INFO"
INFO = Info("audit", SHAPE, 2, "", scale=1.0)


class TinyNet(HeadedNetwork):
    """Batch normalisation, which counts its batches, a hidden layer of `WIDTH`, and a head."""

    def __init__(self, shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(shape[0])
        self.body = nn.Linear(torch.Size(shape).numel(), WIDTH)
        self.head = nn.Linear(WIDTH, num_classes)
        with torch.no_grad():
            self.head.weight.mul_(0.01)  # equal logits: the classes' gradients are opposite
            self.head.bias.zero_()

    def features(self, x: Tensor) -> Tensor:
        """Activations (n, `WIDTH`)."""
        return self.body(self.norm(x).flatten(1))


def inputs(count: int) -> Tensor:
    """Inputs (count, *SHAPE), always the same."""
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(0))


def samples(world: int) -> tuple[Tensor, Tensor]:
    """The inputs and labels of the attacked user in a world, or of the `BYSTANDER`."""
    if world == BYSTANDER:
        x = inputs(BATCH // 2).repeat(2, 1, 1, 1)
        return x, torch.arange(2).repeat_interleave(BATCH // 2)
    count = BATCH * (1 + world)
    return inputs(count), torch.full((count,), world)


def share(world: int, *, tastes: bool) -> tuple[Share, Info]:
    """A training user that is also scored on its samples. With `tastes` it prefers samples of type
    1, and labels are types."""
    x, y = samples(world)
    rows = torch.arange(len(y))
    every = Samples(x, y, rows, 1.0)
    attributes: dict[str, float | int | str] = {}
    info = INFO
    if tastes:
        every = PreferredSamples(x, y, rows, 1.0, preferred=1)
        attributes = {SUB_POPULATION: 1, RANK: 1}
        info = preference_info(INFO)
    return Share(every, every, None, every, False, attributes), info


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Where nodes have their data, while this process lives."""
    return tempfile.TemporaryDirectory(prefix="audit-")


@cache
def data_path(world: int, *, tastes: bool) -> str:
    """The folder of such a user's data, for its node."""
    path = Path(_folder().name) / f"{'tastes' if tastes else 'labels'}-{world}"
    user, info = share(world, tastes=tastes)
    user.save(path, info)
    return str(path)


def node(number: int, world: int, *, tastes: bool = False) -> Config:
    """The configuration of a SuperNode that holds such a user's data."""
    path = data_path(world, tastes=tastes)
    return {"data-path": path, "partition-id": number, "allow": MODEL}


def candidates() -> Tensor:
    """Inputs from which a novel user has its own; large, so that biases of an encoder are small."""
    return 100 * inputs(400)


@cache
def novel_path(world: int, first: int, second: int) -> str:
    """The folder of a novel user's data, see `novel_inputs`."""
    path = Path(_folder().name) / f"novel-{world}"
    x = novel_inputs(world, (first, second))
    every = Samples(x, torch.zeros(len(x)).long(), torch.arange(len(x)), 1.0)
    empty = replace(every, index=every.index[:0])
    Share(empty, empty, None, every, novel=True).save(path, INFO)
    return str(path)


def novel_inputs(world: int, pair: tuple[int, int]) -> Tensor:
    """Two inputs of a user without labels. The worlds differ in the second: either of the
    `candidates` in the `pair`."""
    return candidates()[[0, pair[world]]]


def novel_node(number: int, world: int, pair: tuple[int, int]) -> Config:
    """The configuration of a SuperNode that holds such a user's data."""
    path = novel_path(world, *pair)
    return {"data-path": path, "partition-id": number, "allow": MODEL}
