"""One client's data: rows of tensors that belong to all clients of a process."""

import json
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fedapps.common.new_files import create, make_folder, replaced
from fedapps.common.tasks import CLASSES, Targets, check_task
from partitions.cache import save_arrays
from partitions.datasets.labels import check_below
from partitions.datasets.loading import Info, Moment
from partitions.datasets.readers.raw import UNLABELED

Rows = Tensor | slice
SUB_POPULATION = "sub-population"  # attribute of a share: the type that its user prefers


@dataclass(frozen=True)
class Samples:
    """Rows `index` (n,) of inputs x (N, *shape) as stored and of labels y, (N,) or (N, k), without
    a copy.

    ``samples[rows]`` returns (x, y) of these positions in `index`. Its x is float32 in row-major
    order: (stored / `scale` − `mean`) / `std`. `mean` and `std` are numbers, or hold one number for
    each channel or column."""

    x: Tensor
    y: Tensor
    index: Tensor
    scale: float = 255.0
    mean: Moment = 0.0
    std: Moment = 1.0
    whole: bool = field(default=False, kw_only=True)  # tokens, which stay whole numbers
    fixed: ClassVar[bool] = True  # every access to a sample returns the same input

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows: Rows) -> tuple[Tensor, Tensor]:
        # index_select takes a thirtieth of the time of x[index] for bytes, a third for int64.
        if isinstance(rows, slice):
            index = self.index[rows]
        else:
            index = self.index.index_select(0, rows.to(self.index.device))
        x = self.x.index_select(0, index)
        if self.whole:
            return x.long(), self.y.index_select(0, index)
        if isinstance(self.mean, tuple) and x.ndim < 4:
            return row_major(self._by_column(x)), self.y.index_select(0, index)
        x = x.float()
        mean = _broadcast(self.mean, x)
        std = _broadcast(self.std, x)
        if self.scale != 1.0 or self.std != 1.0:
            x /= self.scale * std
        if self.mean != 0.0:
            x -= mean / std
        return row_major(x), self.y.index_select(0, index)

    def _by_column(self, x: Tensor) -> Tensor:
        """Rows of x (n, d) or (n, channels, time), standardised in float64: a float32 of 10⁹ ± 1
        would hold nothing of the ± 1."""
        x = x.double()
        mean = _broadcast(self.mean, x)
        std = _broadcast(self.std, x)
        return ((x / self.scale - mean) / std).float()

    @property
    def has_labels(self) -> bool:
        """Whether any of the samples has a label."""
        return bool(labeled_rows(self.y[self.index]).any())

    def labels(self) -> Tensor:
        """The labels (n,) or (n, k) as stored, −1 or NaN where there is none."""
        return self.y[self.index]

    def below(self, num_classes: int) -> "Samples":
        """These samples. Raises ValueError for a label that is not below `num_classes`, and for
        several labels or values of another number."""
        labels = self.labels()
        if labels.ndim == 1:
            check_below(labels.cpu().numpy(), num_classes, "labels")
        else:
            check_columns(labels.shape[1], num_classes)
        return self

    def converted(self) -> Self:
        """The same samples, stored in the form of ``samples[rows]``. Samples that are not `fixed`
        stay as they are."""
        if not self.fixed:
            return self
        x, _ = Samples.__getitem__(self, slice(None))
        index = torch.arange(len(x), device=x.device)
        return replace(self, x=x, y=self.y[self.index], index=index, scale=1.0, mean=0.0, std=1.0)

    def to(self, device: str | torch.device) -> "Samples":
        """The samples on `device`; each shared tensor is moved there once per process."""
        if self.x.device == torch.device(device):
            return self
        x = _moved(self.x, str(device))
        y = _moved(self.y, str(device))
        index = self.index.to(device)
        return Samples(x, y, index, self.scale, self.mean, self.std, whole=self.whole)


def check_columns(count: int, num_outputs: int) -> None:
    """Raise ValueError unless there is an output for each of `count` labels or values."""
    if count != num_outputs:
        raise ValueError(
            f"a sample has {count} labels or values, but the network has {num_outputs} outputs; "
            "each needs one output"
        )


def labeled_rows(y: Tensor) -> Tensor:
    """Whether each sample of labels (n,) or (n, k) has one, (n,)."""
    if y.is_floating_point():
        return y.isfinite().all(1)
    return y != UNLABELED


def without_labels(y: Tensor) -> Tensor:
    """Labels of y's shape and type, of samples that have none."""
    nothing = torch.nan if y.is_floating_point() else UNLABELED
    return y.new_tensor(nothing).expand(y.shape)


def row_major(x: Tensor) -> Tensor:
    """x with the strides of a new tensor of its shape, also where a dimension has one entry.

    Networks that flatten by `view` need these strides. A convolution passes on the strides of its
    input, even if they make no difference: with one channel, channels first and channels last are
    the same memory."""
    strides = torch.empty(x.shape, device="meta").stride()
    if x.stride() == strides:
        return x
    return x.contiguous().as_strided(x.shape, strides)


def _broadcast(moment: Moment, x: Tensor) -> Tensor | float:
    """The moment as one number, or as a tensor of x's device that broadcasts over x's columns or
    channels, (d,), (channels, 1) or (channels, 1, 1)."""
    if isinstance(moment, tuple):
        dtype = x.dtype if x.is_floating_point() else torch.float32
        return _as_tensor(moment, str(x.device), dtype).reshape(-1, *[1] * (x.ndim - 2))
    return moment


@lru_cache(maxsize=64)
def _as_tensor(moment: tuple[float, ...], device: str, dtype: torch.dtype) -> Tensor:
    return torch.tensor(moment, device=device, dtype=dtype)


_on_device: dict[str, WeakTensorKeyDictionary] = defaultdict(WeakTensorKeyDictionary)


def _moved(tensor: Tensor, device: str) -> Tensor:
    """The tensor on the device, moved there once while the original exists."""
    copies = _on_device[device]
    if tensor not in copies:
        copies[tensor] = tensor.to(device)
    moved: Tensor = copies[tensor]
    return moved


@dataclass(frozen=True)
class PreferredSamples(Samples):
    """Samples of a user who prefers one type; the stored labels are types.

    ``samples[rows]`` returns (x, y), with y = 1 if the type is `preferred`, else 0."""

    preferred: int = 0

    def __getitem__(self, rows: Rows) -> tuple[Tensor, Tensor]:
        x, types = super().__getitem__(rows)
        return x, (types == self.preferred).long()

    def types(self, rows: Rows) -> Tensor:
        """The types (n,) of the samples at `rows`; they do not depend on the user."""
        return self.y[self.index[rows]]

    def to(self, device: str | torch.device) -> "PreferredSamples":
        """The samples on `device`."""
        if self.x.device == torch.device(device):
            return self
        moved = super().to(device)
        return replace(self, x=moved.x, y=moved.y, index=moved.index)


@dataclass(frozen=True)
class Share:
    """One client's data.

    A novel client is evaluated on `everything`. `test` is None if the partition has no test
    samples. `attributes` describe the client, for figures. `public` is the same for all clients.
    With `shots` > 0 a novel client trains on that number of labeled samples of each class: they are
    in `train`, and not in `everything`. `targets` says what the labels mean."""

    train: Samples
    validation: Samples
    test: Samples | None
    everything: Samples
    novel: bool
    attributes: dict[str, float | int | str] = field(default_factory=dict)
    public: Samples | None = None
    shots: int = 0
    targets: Targets = field(default_factory=Targets)

    @property
    def unlabeled(self) -> bool:
        """Whether the client trains, and none of its training samples has a label."""
        return not self.novel and len(self.train) > 0 and not self.train.has_labels

    def below(self, num_classes: int) -> "Share":
        """This share, for a network with `num_classes` outputs. Raises ValueError for a label that
        has no output."""
        return self.with_samples(lambda samples: samples.below(num_classes))

    def with_samples(self, changed: Callable[[Samples], Samples]) -> "Share":
        """This share, with its training, validation, test and all samples as `changed` gives them.
        Public samples stay: they are not the client's."""
        return replace(
            self,
            train=changed(self.train),
            validation=changed(self.validation),
            test=None if self.test is None else changed(self.test),
            everything=changed(self.everything),
        )

    def with_shots(self, shots: int, seed: int) -> "Share":
        """A novel client's share with `shots` labeled training samples of each class, or in all
        where the labels are no classes; at least one sample, of each class, is left to evaluate
        on. A smaller number chooses a subset of the samples that a larger number chooses. The share
        of another client stays as it is."""
        if not shots or not self.novel:
            return self
        every = self.everything
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(every), generator=generator)
        labels = every.y.cpu()[every.index.cpu()][order]
        chosen = torch.zeros(len(every), dtype=torch.bool)
        if labels.ndim == 2:  # several labels or values: there are no classes to choose from
            rows = order[labeled_rows(labels)]
            chosen[rows[: min(shots, len(rows) - 1)]] = True
            labels = torch.empty(0)
        for label in labels[labels >= 0].unique():
            rows = order[labels == label]
            count = min(shots, len(rows) - 1)
            chosen[rows[:count]] = True
        return replace(
            self,
            train=replace(every, index=every.index[chosen]),
            validation=replace(every, index=every.index[:0]),
            test=None,
            everything=replace(every, index=every.index[~chosen]),
            shots=shots,
        )

    def save(self, folder: str | Path, info: Info) -> None:
        """Write the share to a folder, from which `load` reads it on the client's node."""
        folder = Path(folder)
        make_folder(folder)
        whole = self.everything
        arrays = {"x": whole.x[whole.index], "y": whole.y[whole.index]}
        position = {row: i for i, row in enumerate(whole.index.tolist())}
        for name in PARTS:
            part: Samples | None = getattr(self, name)
            if part is not None:
                positions = [position[row] for row in part.index.tolist()]
                arrays[name] = torch.tensor(positions).long()
        if self.public is not None:
            arrays["public"] = self.public.x[self.public.index]
            arrays["public.y"] = self.public.y[self.public.index]
        with replaced(folder / DATA) as file:
            save_arrays({name: a.numpy() for name, a in arrays.items()}, file)
        meta = {
            "name": info.name,
            "shape": info.shape,
            "num_classes": info.num_classes,
            "num_types": info.num_types,
            "novel": self.novel,
            "attributes": self.attributes,
            "scale": whole.scale,
            "whole": whole.whole,
            "mean": whole.mean,
            "std": whole.std,
            "task": self.targets.task,
            "target_mean": self.targets.mean,
            "target_std": self.targets.std,
        }
        # Last: without this file `load` refuses the folder.
        with replaced(folder / META) as file, create(file) as text:
            text.write(json.dumps(meta, indent=1).encode())

    @classmethod
    def load(cls, folder: str | Path) -> tuple["Share", Info]:
        """A share that `save` wrote, and the facts of its dataset. Raises ValueError if the files
        are missing or damaged."""
        folder = Path(folder)
        if not (folder / META).is_file() or not (folder / DATA).is_file():
            raise ValueError(f"data-path {folder} must hold {META} and {DATA}")
        try:
            meta = json.loads((folder / META).read_text("utf-8"))
            arrays = load_file(folder / DATA)
            _check_rows(arrays, tuple(meta["shape"]))
            return cls._from_saved(meta, arrays)
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
            SafetensorError,
            OverflowError,
        ) as error:
            raise ValueError(f"data-path {folder} is damaged: {error!r:.200}") from error

    @classmethod
    def _from_saved(cls, meta: dict[str, Any], arrays: dict[str, Tensor]) -> tuple["Share", Info]:
        mean = _moment(meta["mean"])
        std = _moment(meta["std"])
        scale = float(meta["scale"])
        if not (math.isfinite(scale) and scale > 0 and std):
            raise ValueError(f"scale is {meta['scale']!r} and std {meta['std']!r}")

        def samples(x: Tensor, y: Tensor, index: Tensor | None = None) -> Samples:
            if index is None:
                index = torch.arange(len(y))
            if meta["num_types"]:  # the stored labels are types
                preferred = int(meta["attributes"][SUB_POPULATION])
                return PreferredSamples(x, y, index, scale, mean, std, preferred)
            return Samples(x, y, index, scale, mean, std, whole=bool(meta.get("whole", False)))

        x = arrays["x"]
        y = arrays["y"]
        parts = {name: samples(x, y, arrays[name]) for name in PARTS if name in arrays}
        public = None
        if "public" in arrays:
            public = samples(arrays["public"], arrays["public.y"])
        targets = Targets(
            check_task(meta.get("task", CLASSES)),
            tuple(map(float, meta.get("target_mean", ()))),
            tuple(map(float, meta.get("target_std", ()))),
        )
        share = cls(
            parts["train"],
            parts["validation"],
            parts.get("test"),
            samples(x, y),
            bool(meta["novel"]),
            dict(meta["attributes"]),
            public,
            targets=targets,
        )
        info = Info(
            str(meta["name"]),
            tuple(meta["shape"]),
            int(meta["num_classes"]),
            "",
            num_types=meta["num_types"],
            task=targets.task,
        )
        return share, info


def _moment(value: Any) -> Moment:
    """A finite number, or one for each channel."""
    by_channel = isinstance(value, list)
    numbers = tuple(map(float, value)) if by_channel else (float(value),)
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"{value!r} is not finite")
    return numbers if by_channel else numbers[0]


def _check_rows(arrays: dict[str, Tensor], shape: tuple[int, ...]) -> None:
    """Raise ValueError if inputs, labels and the rows of the parts do not fit to each other."""
    for x_name, y_name in (("x", "y"), ("public", "public.y")):
        if x_name not in arrays:
            continue
        x = arrays[x_name]
        y = arrays[y_name]
        if x.shape[1:] != shape or y.shape[:1] != x.shape[:1] or y.ndim > 2:
            raise ValueError(f"{x_name} is of shape {(*x.shape,)}, {y_name} {(*y.shape,)}")
    for name in PARTS:
        rows = arrays.get(name, torch.zeros(0).long())
        are_numbers = rows.dtype == torch.int64 and rows.ndim == 1
        if not are_numbers or not ((rows >= 0) & (rows < len(arrays["y"]))).all():
            raise ValueError(f"{name} holds no rows of x")


PARTS = ("train", "validation", "test")
DATA, META = "samples.safetensors", "client.json"
