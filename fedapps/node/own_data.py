"""What the `data` function of an app returns, as a client's share."""

from collections.abc import Callable
from dataclasses import replace
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import Context
from flwr.common.logger import log
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from partitions.items import from_items, from_tensors
from partitions.shares import Samples, Share

FORMS = (
    "return training samples, or a pair of training and validation samples; samples are a "
    "DataLoader, a dataset, a tensor or array of inputs, or a pair of them (x, y)"
)
_said: set[str] = set()  # sentences that this process has logged


def share_of(given: Any, context: Context, public: Callable[[], Tensor] | None = None) -> Share:
    """A client's share of what its node's `data` function returned.

    It is novel if its training samples have no labels, or by its node configuration. Raises
    ValueError for data with another reading, or with a part that would not be used."""
    training, validation = _parts(given)
    train = _samples(training)
    held_out = None if validation is None else _samples(validation)
    empty = replace(train, index=train.index[:0])
    novel = bool(context.node_config.get("novel", False))
    if not novel and held_out is not None:
        _check_labels(train, held_out)
    if novel and held_out is not None:
        _say(
            "a novel client (novel=true) is scored on its training samples; its validation samples "
            "are not used"
        )
    novel = novel or not train.has_labels
    public_samples = None if public is None else from_tensors(public())
    return Share(
        train=empty if novel else train,
        validation=empty if held_out is None else held_out,
        test=None,
        everything=train,
        novel=novel,
        public=public_samples,
    )


def say_what_is_unused(given: Any, batch_size: int) -> None:
    """Say once which options of the training samples' DataLoader are not used; `batch_size` is the
    client's setting."""
    loader, _ = _parts(given)
    if not isinstance(loader, DataLoader):
        return
    if batch_size != loader.batch_size:
        _say(
            f"mini-batches have {batch_size} samples (setting batch-size), not the DataLoader's "
            f"{loader.batch_size}; pass batch_size={loader.batch_size} to client_app for the same"
        )
    unused = []
    if isinstance(loader.sampler, SequentialSampler):
        unused.append("shuffle=False (training shuffles)")
    if loader.drop_last:
        unused.append("drop_last=True (a pass ends as short-batches and local-epochs say)")
    for name in ("num_workers", "generator", "worker_init_fn"):
        if getattr(loader, name):
            unused.append(name)
    if unused:
        _say(f"of the DataLoader the dataset is used, not {', '.join(unused)}")


def _say(text: str) -> None:
    """Warn once in a process: `data` is called for every message."""
    if text not in _said:
        _said.add(text)
        log(WARNING, text)


def _parts(given: Any) -> tuple[Any, Any]:
    """Training and validation samples as they are given; None for validation if there are none."""
    # A pair of tensors is inputs and labels, not training and validation inputs.
    if _are_tensors(given) or not isinstance(given, tuple | list):
        return given, None
    if len(given) == 2:
        return given[0], given[1]
    if isinstance(given, tuple):
        raise ValueError(f"data returned a tuple of {len(given)} parts; {FORMS}")
    return given, None


def _samples(part: Any) -> Samples:
    """Samples in one of the `FORMS`."""
    if isinstance(part, Tensor | np.ndarray):
        return from_tensors(part)
    if _are_tensors(part):
        return from_tensors(*part)
    if isinstance(part, tuple):
        kinds = ", ".join(type(item).__name__ for item in part)
        raise ValueError(f"data returned ({kinds}) as samples; {FORMS}")
    if isinstance(part, DataLoader):
        return from_items(_dataset(part))
    return from_items(part)


def _are_tensors(given: Any) -> bool:
    """Whether it is (x,) or (x, y)."""
    arrays = (Tensor, np.ndarray)
    if not isinstance(given, tuple | list) or not 1 <= len(given) <= 2:
        return False
    return all(isinstance(part, arrays) for part in given)


def _check_labels(train: Samples, validation: Samples) -> None:
    """Raise ValueError if only one of them has labels: the other's would not be used."""
    if train.has_labels == validation.has_labels:
        return
    has, lacks = ("training", "validation") if train.has_labels else ("validation", "training")
    raise ValueError(
        f"the {has} samples have labels, and the {lacks} samples have none; give both labels, or "
        "return the inputs alone for a client without labels"
    )


def _dataset(loader: DataLoader[Any]) -> Any:
    """The loader's dataset. Raises ValueError if the loader changes what a dataset's items are, or
    how often each is drawn: local training draws its own mini-batches."""
    name = type(loader).__name__
    instead = "training draws its own mini-batches from the dataset"
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise ValueError(
            f"{name} makes its own batches (__iter__), and {instead}; return a dataset whose items "
            "are samples"
        )
    if loader.batch_size is None and loader.batch_sampler is None:
        raise ValueError(
            f"{name} has batch_size=None, so it is unclear whether an item is a sample or a batch; "
            "return the dataset itself, whose items are samples"
        )
    if type(loader.batch_sampler) is not BatchSampler:
        kind = type(loader.batch_sampler).__name__
        raise ValueError(
            f"{name} has a batch_sampler ({kind}), and {instead}; return its dataset, or a "
            "torch.utils.data.Subset of it"
        )
    if loader.collate_fn is not default_collate:
        kind = getattr(loader.collate_fn, "__name__", type(loader.collate_fn).__name__)
        raise ValueError(
            f"{name} has a collate_fn ({kind}), and {instead}; let the dataset's items be what it "
            "makes of them, one sample each"
        )
    if not _draws_each_once(loader):
        kind = type(loader.sampler).__name__
        raise ValueError(
            f"{name} has a sampler ({kind}) that does not draw each sample once, and {instead}; "
            "return its dataset, a torch.utils.data.Subset of it, or weigh samples by loss="
        )
    return loader.dataset


def _draws_each_once(loader: DataLoader[Any]) -> bool:
    """Whether an epoch is one pass over the dataset, in order or shuffled."""
    sampler = loader.sampler
    if type(sampler) is SequentialSampler:
        return True
    if type(sampler) is not RandomSampler or sampler.replacement:
        return False
    return len(sampler) == len(sampler.data_source)
