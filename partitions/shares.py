"""One client's data: rows of tensors that all clients of a process share."""

import json
import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from partitions.cache import save_arrays
from partitions.datasets.labels import check_below
from partitions.datasets.loading import Info, Moment
from partitions.datasets.readers.raw import UNLABELED

Rows = Tensor | slice
SUB_POPULATION = "sub-population"  # attribute of a share: the type that its user prefers


@dataclass(frozen=True)
class Samples:
    """Rows `index` of inputs x (N, *shape) as stored and labels y (N,); nothing is copied.

    ``samples[rows]`` gives (x, y) of those of its rows: x float32 (n, *shape) in row-major order,
    the stored values over `scale`, then less `mean` over `std`, which are numbers or one for each
    channel."""

    x: Tensor
    y: Tensor
    index: Tensor
    scale: float = 255.0
    mean: Moment = 0.0
    std: Moment = 1.0
    fixed: ClassVar[bool] = True  # every access to a sample gives the same

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows: Rows) -> tuple[Tensor, Tensor]:
        # a thirtieth of the time of x[index] for bytes, a third for whole numbers
        if isinstance(rows, slice):
            index = self.index[rows]
        else:
            index = self.index.index_select(0, rows.to(self.index.device))
        x = self.x.index_select(0, index).float()
        mean, std = (_broadcast(moment, x.device) for moment in (self.mean, self.std))
        if self.scale != 1.0 or self.std != 1.0:
            x /= self.scale * std
        if self.mean != 0.0:
            x -= mean / std
        return row_major(x), self.y.index_select(0, index)

    @property
    def has_labels(self) -> bool:
        """Whether any of the samples has a label."""
        return bool((self.y[self.index] != UNLABELED).any())

    def labels(self) -> Tensor:
        """The labels (n,) as stored, −1 where there is none."""
        return self.y[self.index]

    def below(self, num_classes: int) -> "Samples":
        """The samples. Raises ValueError for a label that is not below `num_classes`."""
        check_below(self.labels().cpu().numpy(), num_classes, "labels")
        return self

    def converted(self) -> Self:
        """The same samples, converted to the form of ``samples[rows]``; itself if not `fixed`."""
        if not self.fixed:
            return self
        x, _ = Samples.__getitem__(self, slice(None))
        index = torch.arange(len(x), device=x.device)
        return replace(self, x=x, y=self.y[self.index], index=index, scale=1.0, mean=0.0, std=1.0)

    def to(self, device: str | torch.device) -> "Samples":
        """The samples on `device`; each shared tensor is moved there once per process."""
        if self.x.device == torch.device(device):
            return self
        x, y = (_moved(tensor, str(device)) for tensor in (self.x, self.y))
        return Samples(x, y, self.index.to(device), self.scale, self.mean, self.std)


def row_major(x: Tensor) -> Tensor:
    """x with the strides of a new tensor of its shape, also where a dimension has one entry.

    Networks that flatten by `view` need them. A convolution passes on the strides of its input,
    even those that decide nothing: with one channel, channels first and last are the same memory.
    """
    strides = torch.empty(x.shape, device="meta").stride()
    if x.stride() == strides:
        return x
    return x.contiguous().as_strided(x.shape, strides)


def _broadcast(moment: Moment, device: torch.device) -> Tensor | float:
    """One number, or (channels, 1, 1)."""
    if isinstance(moment, tuple):
        return torch.tensor(moment, device=device)[:, None, None]
    return moment


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
    """Samples whose stored labels are types; a user that prefers `preferred` labels them.

    ``samples[rows]`` gives (x, y) with y 1 where the type is the preferred one, else 0."""

    preferred: int = 0

    def __getitem__(self, rows: Rows) -> tuple[Tensor, Tensor]:
        x, types = super().__getitem__(rows)
        return x, (types == self.preferred).long()

    def types(self, rows: Rows) -> Tensor:
        """The types (n,) of those samples; they do not depend on the user."""
        return self.y[self.index[rows]]

    def to(self, device: str | torch.device) -> "PreferredSamples":
        """The samples on `device`."""
        if self.x.device == torch.device(device):
            return self
        moved = super().to(device)
        return replace(self, x=moved.x, y=moved.y, index=moved.index)


@dataclass(frozen=True)
class Share:
    """One client's data. A novel client is scored on `everything`; `test` is None if the partition
    gives no test samples. `attributes` describe the client, for figures. All clients have the same
    `public` samples. With `shots` a novel client learns from so many labeled samples of each
    class, its `train`, which are not in `everything`."""

    train: Samples
    validation: Samples
    test: Samples | None
    everything: Samples
    novel: bool
    attributes: dict[str, float | int | str] = field(default_factory=dict)
    public: Samples | None = None
    shots: int = 0

    @property
    def unlabeled(self) -> bool:
        """Whether it is a training client's, and no training sample has a label."""
        return not self.novel and len(self.train) > 0 and not self.train.has_labels

    def below(self, num_classes: int) -> "Share":
        """The share of a network with so many outputs. Raises ValueError for other labels."""
        return replace(
            self,
            train=self.train.below(num_classes),
            validation=self.validation.below(num_classes),
            everything=self.everything.below(num_classes),
        )

    def with_shots(self, shots: int, seed: int) -> "Share":
        """A novel client's share with `shots` labels of each class, at least one sample being left
        for scoring. Fewer shots are among more. For other clients: itself."""
        if not shots or not self.novel:
            return self
        every = self.everything
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(every), generator=generator)
        labels = every.y.cpu()[every.index.cpu()][order]
        chosen = torch.zeros(len(every), dtype=torch.bool)
        for label in labels[labels >= 0].unique():
            rows = order[labels == label]
            chosen[rows[: min(shots, len(rows) - 1)]] = True
        return replace(
            self,
            train=replace(every, index=every.index[chosen]),
            validation=replace(every, index=every.index[:0]),
            test=None,
            everything=replace(every, index=every.index[~chosen]),
            shots=shots,
        )

    def save(self, folder: str | Path, info: Info) -> None:
        """Write the share to a folder that `load` reads, for its node."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        whole = self.everything
        arrays = {"x": whole.x[whole.index], "y": whole.y[whole.index]}
        position = {int(row): i for i, row in enumerate(whole.index)}
        for name in PARTS:
            part: Samples | None = getattr(self, name)
            if part is not None:
                arrays[name] = torch.tensor([position[int(row)] for row in part.index]).long()
        if self.public is not None:
            arrays["public"] = self.public.x[self.public.index]
            arrays["public.y"] = self.public.y[self.public.index]
        save_arrays({name: a.numpy() for name, a in arrays.items()}, folder / DATA)
        meta = {
            "name": info.name,
            "shape": info.shape,
            "num_classes": info.num_classes,
            "num_types": info.num_types,
            "novel": self.novel,
            "attributes": self.attributes,
            "scale": whole.scale,
            "mean": whole.mean,
            "std": whole.std,
        }
        (folder / META).write_text(json.dumps(meta, indent=1), "utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> tuple["Share", Info]:
        """A share that `save` wrote, and its dataset. Raises ValueError if it is missing or
        damaged."""
        folder = Path(folder)
        if not (folder / META).is_file() or not (folder / DATA).is_file():
            raise ValueError(f"data-path {folder} must hold {META} and {DATA}")
        try:
            meta, arrays = json.loads((folder / META).read_text("utf-8")), load_file(folder / DATA)
            _check_rows(arrays, tuple(meta["shape"]))
            return cls._made(meta, arrays)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError,
                OverflowError) as error:  # fmt: skip
            raise ValueError(f"data-path {folder} is damaged: {error!r:.200}") from error

    @classmethod
    def _made(cls, meta: dict[str, Any], arrays: dict[str, Tensor]) -> tuple["Share", Info]:
        mean, std = _moment(meta["mean"]), _moment(meta["std"])
        scaling = (float(meta["scale"]), mean, std)
        if not (math.isfinite(scaling[0]) and scaling[0] > 0 and std):
            raise ValueError(f"scale is {meta['scale']!r} and std {meta['std']!r}")

        def samples(x: Tensor, y: Tensor, index: Tensor | None = None) -> Samples:
            index = torch.arange(len(y)) if index is None else index
            if meta["num_types"]:  # y are types
                preferred = int(meta["attributes"][SUB_POPULATION])
                return PreferredSamples(x, y, index, *scaling, preferred)
            return Samples(x, y, index, *scaling)

        x, y = arrays["x"], arrays["y"]
        parts = {name: samples(x, y, arrays[name]) for name in PARTS if name in arrays}
        share = cls(
            parts["train"],
            parts["validation"],
            parts.get("test"),
            samples(x, y),
            bool(meta["novel"]),
            dict(meta["attributes"]),
            samples(arrays["public"], arrays["public.y"]) if "public" in arrays else None,
        )
        shape, types = tuple(meta["shape"]), meta["num_types"]
        return share, Info(str(meta["name"]), shape, int(meta["num_classes"]), "", num_types=types)


def _moment(value: Any) -> Moment:
    """A finite number, or one for each channel."""
    numbers = tuple(map(float, value if isinstance(value, list) else [value]))
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"{value!r} is not finite")
    return numbers if isinstance(value, list) else numbers[0]


def _check_rows(arrays: dict[str, Tensor], shape: tuple[int, ...]) -> None:
    """Raise ValueError for inputs, labels and rows of the parts that do not match."""
    for x, y in (("x", "y"), ("public", "public.y")):
        if x in arrays and (arrays[x].shape[1:] != shape or arrays[y].shape != arrays[x].shape[:1]):
            raise ValueError(f"{x} is of shape {(*arrays[x].shape,)}, {y} {(*arrays[y].shape,)}")
    for name in PARTS:
        rows = arrays.get(name, torch.zeros(0).long())
        whole = rows.dtype == torch.int64 and rows.ndim == 1
        if not whole or not ((rows >= 0) & (rows < len(arrays["y"]))).all():
            raise ValueError(f"{name} holds no rows of x")


PARTS = ("train", "validation", "test")
DATA, META = "samples.safetensors", "client.json"
