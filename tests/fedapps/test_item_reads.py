"""How often the items of a dataset are read in an app of other people."""

import torch
from flwr.app import Context, RecordDict
from torch import nn

import fedapps
from fedapps.engines.in_process_grid import InProcessGrid


class Counted(torch.utils.data.Dataset):
    """Twenty samples that count how often they are read."""

    reads = 0

    def __len__(self):
        return 20

    def __getitem__(self, row):
        Counted.reads += 1
        return torch.full((3,), float(row)), row % 2


def test_items_are_read_for_mini_batches_and_scores_alone():
    """Two rounds of 3 mini-batches of 4 are 24 reads, two scores of 20 samples 40; each of the five
    messages (a query, and in each round training and evaluation) reads the first item, of training
    and of validation, to see its shape: 74. One pass for labels at each message were 100 more."""
    settings = {"local_steps": 3, "batch_size": 4}
    client = fedapps.client_app(
        "fedavg", model=lambda: nn.Linear(3, 2), data=lambda _: (Counted(), Counted()), **settings
    )
    server = fedapps.server_app(
        "fedavg", model=lambda: nn.Linear(3, 2), shape=(3,), rounds=2, min_available_nodes=1
    )
    Counted.reads = 0
    grid = InProcessGrid(client, {}, [{"partition-id": 0}])
    server(grid, Context(1, 0, {}, RecordDict(), {}))
    assert Counted.reads == 24 + 40 + 5 * 2
