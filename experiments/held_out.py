"""The digits of a federation's training clients as a dataset, in which some of them act as novel
clients.

The defaults of novel-steps and novel-lr were chosen on it (docs/results/few-labels.md), so that no
label of a real novel client or of a test sample was used."""

import numpy as np

import partitions
from fedapps.settings.config import defaults
from partitions.datasets.readers.raw import Raw


def training_clients(split: int = 0, num_clients: int = 50) -> Raw:
    """Training and validation samples of the training clients of seed `split`. The column
    ``client`` holds the client of each sample."""
    config = defaults() | {"seed": split, "num-clients": num_clients}
    federation = partitions.federation(config)
    rows = []
    clients = []
    for client in np.flatnonzero(~federation.novel).tolist():
        rows_by_part = federation.rows(client)
        client_rows = np.concatenate([rows_by_part["train"], rows_by_part["validation"]])
        rows.append(client_rows)
        clients.append(np.full(len(client_rows), client))
    all_rows = np.concatenate(rows)
    x = federation.dataset.x.numpy()[all_rows]
    y = federation.dataset.y.numpy()[all_rows]
    return Raw(
        (x / federation.info.scale).astype(np.float32),
        y,
        len(y),
        {"client": np.concatenate(clients)},
    )
