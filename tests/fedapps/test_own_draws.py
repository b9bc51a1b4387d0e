"""What a user's own code draws from the global generators of Python, numpy and torch."""

import random

import numpy as np
import pytest
import torch
from component_runs import run_components
from flwr.app import Context, RecordDict
from flwr.client import NumPyClient
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import random_split

import fedapps
from fedapps.engines.in_process_grid import InProcessGrid

COUNT = 20
X = torch.arange(3.0 * COUNT).view(COUNT, 3)
Y = torch.arange(COUNT) % 2


def by_torch():
    return [subset.indices for subset in random_split(range(COUNT), [14, 6])]


def by_numpy():
    return train_test_split(np.arange(COUNT), test_size=6)


def by_python():
    rows = random.sample(range(COUNT), COUNT)
    return rows[:14], rows[14:]


def linear():
    return nn.Linear(3, 2)


@pytest.mark.parametrize("split", [by_torch, by_numpy, by_python])
def test_a_split_without_a_seed_is_the_same_for_each_message(split):
    """`data` is called for each message. With another split each time, clients would train on the
    samples on which they were validated before. All nodes draw alike, so parts of one permutation
    do not overlap."""
    given = {0: [], 1: []}

    def data(node):
        training, validation = split()
        given[node].append(sorted(map(int, validation)))
        return (X[training], Y[training]), (X[validation], Y[validation])

    run_components("fedavg", linear, data, (3,), rounds=2, count=2)
    assert len(given[0]) > 4
    splits = given[0] + given[1]
    assert splits.count(splits[0]) == len(splits)


def test_a_split_in_client_fn_is_the_same_for_each_message():
    given = []

    class Kept(NumPyClient):
        def __init__(self):
            given.append(by_numpy()[1].tolist())

        def fit(self, parameters, config):
            return parameters, COUNT, {}

        def evaluate(self, parameters, config):
            return 0.0, COUNT, {}

    client = fedapps.from_client_fn(lambda context: Kept().to_client())
    server = fedapps.server_app("fedavg", model=linear, shape=(3,), rounds=2, min_available_nodes=1)
    grid = InProcessGrid(client, {}, [{"partition-id": 0}])
    server(grid, Context(1, 0, {}, RecordDict(), {}))
    assert len(given) == 4 and given.count(given[0]) == 4


class Augmented(torch.utils.data.Dataset):
    """Samples with a random number each, whose draws are listed."""

    def __init__(self, draw):
        self.draw = draw
        self.drawn = []

    def __len__(self):
        return COUNT

    def __getitem__(self, row):
        self.drawn.append(self.draw())
        return X[row] + self.drawn[-1], int(Y[row])


@pytest.mark.parametrize("draw", [lambda: np.random.rand(), random.random])  # noqa: PLW0108
def test_augmentation_differs_by_round_and_repeats_with_the_seed(draw):
    """A node's process answers one message. If the user's code seeds numpy when it is imported, as
    here before each message, all rounds would augment alike."""

    def drawn():
        dataset = Augmented(draw)

        def data(_):
            np.random.seed(0)
            random.seed(0)
            return dataset, (X, Y)

        run_components("fedavg", linear, data, (3,), rounds=2, local_steps=1, batch_size=COUNT)
        return set(dataset.drawn)

    first = drawn()
    assert len(first) >= 2 * COUNT  # of both rounds' mini-batches
    np.random.seed(7)
    random.seed(7)
    assert len(first & drawn()) >= 2 * COUNT  # a look at the first item may draw otherwise


def test_the_users_generators_continue_as_if_nothing_had_drawn():
    """Noise that Flower's mods draw from numpy after a client's answer must not be known to the
    server, which knows the run's seed."""
    np.random.seed(3)
    random.seed(3)
    expected = (np.random.rand(), random.random())
    np.random.seed(3)
    random.seed(3)
    run_components("fedavg", linear, lambda _: ((X, Y), (X, Y)), (3,))
    assert (np.random.rand(), random.random()) == expected
