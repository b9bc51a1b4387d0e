"""What one client owns: rows of tensors that all clients of a process share."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from partitions.datasets import Info

Rows = Tensor | slice
SUB_POPULATION = "sub-population"  # attribute of a share: the type that its user prefers


@dataclass(frozen=True)
class Samples:
    """Rows `index` of inputs x (N, *shape) as stored and labels y (N,); nothing is copied.

    ``samples[rows]`` gives (x, y) of those of its rows: x float32 (n, *shape), the stored values
    over `scale`, then less `mean` over `std`."""

    x: Tensor
    y: Tensor
    index: Tensor
    scale: float = 255.0
    mean: float = 0.0
    std: float = 1.0

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows: Rows) -> tuple[Tensor, Tensor]:
        index = self.index[rows]
        x = self.x[index].float()
        if self.scale != 1.0 or self.std != 1.0:
            x /= self.scale * self.std
        if self.mean != 0.0:
            x -= self.mean / self.std
        return x, self.y[index]

    def to(self, device: str | torch.device) -> "Samples":
        """The samples on `device`; each shared tensor is moved there once per process."""
        if self.x.device == torch.device(device):
            return self
        x, y = (_moved(tensor, str(device)) for tensor in (self.x, self.y))
        return Samples(x, y, self.index.to(device), self.scale, self.mean, self.std)


_on_device: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}  # source kept, so its id stays taken


def _moved(tensor: Tensor, device: str) -> Tensor:
    key = (id(tensor), device)
    if key not in _on_device:
        _on_device[key] = (tensor, tensor.to(device))
    return _on_device[key][1]


@dataclass(frozen=True)
class Share:
    """One client's data. A novel client is scored on `everything`; `test` is there only where
    the partition gives test samples. `attributes` describe the client, for figures."""

    train: Samples
    validation: Samples
    test: Samples | None
    everything: Samples
    novel: bool
    attributes: dict[str, float | int | str] = field(default_factory=dict)

    def save(self, folder: str | Path, info: Info) -> None:
        """Write the share to a folder that `load` reads, for a node that has only its own."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        arrays = {}
        for name, samples in parts.items():
            if samples is not None:
                arrays[f"{name}.x"] = samples.x[samples.index].numpy()
                arrays[f"{name}.y"] = samples.y[samples.index].numpy()
        save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, folder / DATA)
        one = self.everything
        meta = {
            "name": info.name,
            "shape": info.shape,
            "num_classes": info.num_classes,
            "novel": self.novel,
            "attributes": self.attributes,
            "scale": one.scale,
            "mean": one.mean,
            "std": one.std,
        }
        (folder / META).write_text(json.dumps(meta, indent=1), "utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> tuple["Share", Info]:
        """A share that `save` wrote, and its dataset. Raises ValueError if it is not there."""
        folder = Path(folder)
        if not (folder / META).is_file() or not (folder / DATA).is_file():
            raise ValueError(f"data-path {folder} must hold {META} and {DATA}")
        meta = json.loads((folder / META).read_text("utf-8"))
        arrays = load_file(folder / DATA)
        names = [n for n in ("train", "validation", "test") if f"{n}.x" in arrays]
        x = torch.from_numpy(np.concatenate([arrays[f"{n}.x"] for n in names]))
        y = torch.from_numpy(np.concatenate([arrays[f"{n}.y"] for n in names]))
        scaling = (meta["scale"], meta["mean"], meta["std"])
        parts, start = {}, 0
        for name in names:
            end = start + len(arrays[f"{name}.y"])
            parts[name] = Samples(x, y, torch.arange(start, end), *scaling)
            start = end
        share = cls(
            parts["train"],
            parts["validation"],
            parts.get("test"),
            Samples(x, y, torch.arange(len(y)), *scaling),
            meta["novel"],
            meta["attributes"],
        )
        known = Info(meta["name"], tuple(meta["shape"]), meta["num_classes"], "")
        return share, known


DATA, META = "samples.safetensors", "client.json"
