from collections.abc import Callable

import numpy as np
import pytest
import torch

from fedapps.settings.config import defaults
from partitions.datasets import loading
from partitions.datasets.loading import Dataset, Info
from partitions.federations import Federation

torch.set_num_threads(1)


def _toy(labels, num_train=None, **columns) -> Dataset:
    y = torch.from_numpy(np.asarray(labels, np.int64))
    x = torch.arange(len(y), dtype=torch.float32)[:, None]
    info = Info("toy", (1,), int(y.max()) + 1, "", scale=1.0, columns=tuple(columns))
    columns = {name: np.asarray(values) for name, values in columns.items()}
    return Dataset(info, x, y, len(y) if num_train is None else num_train, columns)


def _divide(dataset=None, **changes) -> Federation:
    named = {key.replace("_", "-"): value for key, value in changes.items()}
    named = {
        key.replace("partition-", "partition.") if key.startswith("partition-") else key: value
        for key, value in named.items()
    }
    assert named.keys() <= defaults().keys(), named.keys() - defaults().keys()
    return Federation(defaults() | named, dataset)


def _held(federation, part="everything") -> list[np.ndarray]:
    shares = [federation.share(client) for client in range(federation.num_clients)]
    return [getattr(share, part)[:][0].numpy()[:, 0].astype(int) for share in shares]


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """An empty cache of datasets, and no folder of data but those that a test names."""
    monkeypatch.setenv("FEDAPPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    loading._load.cache_clear()
    yield
    loading._load.cache_clear()


@pytest.fixture(scope="session")
def toy() -> Callable[..., Dataset]:
    """A dataset of given labels whose input is the row number, so that a sample tells its row."""
    return _toy


@pytest.fixture(scope="session")
def divide() -> Callable[..., Federation]:
    """A federation of a dataset; `partition_alpha=…` stands for partition.alpha."""
    return _divide


@pytest.fixture(scope="session")
def held() -> Callable[..., list[np.ndarray]]:
    """The rows of a toy dataset that each client holds."""
    return _held
