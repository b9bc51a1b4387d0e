"""The digits of a federation's training clients, as a dataset: some of them serve as novel clients.

Settings are chosen on it without a label of a novel client or of a test sample: the defaults of
novel-steps and novel-lr (docs/results/few-labels.md)."""

import numpy as np

import partitions
from fedapps.settings.config import defaults
from partitions.datasets.readers.raw import Raw


def training_clients(split: int = 0, num_clients: int = 50) -> Raw:
    """Training and validation samples of the training clients of seed `split`, with their client
    as column ``client``."""
    config = defaults() | {"seed": split, "num-clients": num_clients}
    federation = partitions.federation(config)
    rows = {
        client: np.concatenate([federation.rows(client)[part] for part in ("train", "validation")])
        for client in np.flatnonzero(~federation.novel).tolist()
    }
    every = np.concatenate(list(rows.values()))
    clients = np.repeat(list(rows), [len(some) for some in rows.values()])
    x, y = federation.dataset.x.numpy()[every], federation.dataset.y.numpy()[every]
    return Raw((x / federation.info.scale).astype(np.float32), y, len(y), {"client": clients})
