"""Facts and figures of a dataset and of a partition."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets as hf
import numpy as np
import scipy  # its modules load where they are used

from partitions.datasets.loading import Dataset, load, reread, source
from partitions.federations import Federation
from partitions.rules.partitioner import RowsPartitioner

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Summary:
    """A dataset's facts: where it comes from, sizes, and how often each class occurs."""

    name: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    num_train: int
    num_test: int
    class_counts: dict[str, int]
    columns: dict[str, int]  # natural column → number of values


def summary(name: str, data_dir: str = "", check: bool = False, **options: Any) -> Summary:
    """Facts of the dataset, read again from its source if `check`.

    Raises ValueError as `partitions.datasets.loading.load`; a harmless file that is not the
    official one gives a warning in the log."""
    data: Dataset = (reread if check else load)(name, data_dir, **options)
    counts = np.bincount(data.y.numpy(), minlength=data.info.num_classes)
    names = [*data.classes, *map(str, range(len(data.classes), len(counts)))]
    return Summary(
        name,
        source(name, data_dir),
        data.info.shape,
        str(data.x.dtype).removeprefix("torch."),
        data.num_train,
        len(data.y) - data.num_train,
        dict(zip(names, counts.tolist(), strict=True)),
        {column: len(np.unique(values)) for column, values in data.columns.items()},
    )


def export(federation: Federation, folder: Path) -> list[Path]:
    """Write one directory per client, the `data-path` of its node. Returns them by client.

    Raises ValueError if the folder holds clients of another partition, with the same samples."""
    digits = len(str(federation.num_clients - 1))
    paths = [folder / f"client-{i:0{digits}}" for i in range(federation.num_clients)]
    if others := sorted(set(folder.glob("client-*")) - set(paths)):
        raise ValueError(
            f"{folder} holds {others[0].name} of another partition, whose samples would belong to "
            "two clients; choose another folder, or empty this one"
        )
    for client, path in enumerate(paths):
        federation.share(client).save(path, federation.info)
    return paths


def class_counts(federation: Federation) -> np.ndarray:
    """Samples of each class that each client holds, (num_clients, num_classes)."""
    shares = (federation.share(client) for client in range(federation.num_clients))
    labels = (share.everything[:][1].numpy() for share in shares)
    return np.stack([np.bincount(y, minlength=federation.info.num_classes) for y in labels])


def distances(counts: np.ndarray, novel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each novel client's distance to the nearest training client, by class proportions.

    Total variation ½ Σ_c |p_c − q_c| (pFedHN, 5.3), and D_KL(p ‖ q) in nats (ODPFL-HN, 6.7) with
    one sample added to each class of both (ours), since q_c may be zero. (num_novel,) each."""
    p, q = counts[novel] / counts[novel].sum(1, keepdims=True), counts[~novel].astype(float)
    q /= q.sum(1, keepdims=True)
    variation = np.abs(p[:, None] - q[None]).sum(2) / 2
    divergence = scipy.stats.entropy(counts[novel][:, None] + 1, counts[~novel][None] + 1, axis=2)
    return variation.min(1), divergence.min(1)


class _Labels(RowsPartitioner):
    """Clients' labels, for flwr-datasets' figure."""

    def __init__(self, counts: np.ndarray) -> None:
        super().__init__(len(counts))
        self._ends = np.cumsum(counts.sum(1))
        labels = [np.repeat(np.arange(counts.shape[1]), row) for row in counts]
        self.dataset = hf.Dataset.from_dict({"label": np.concatenate(labels)})

    def assign(self, labels: np.ndarray) -> list[np.ndarray]:
        """Consecutive rows for each client."""
        return np.split(np.arange(len(labels)), self._ends[:-1])


def figure(federation: Federation) -> "Figure":
    """Samples per class and client, training clients on the left, novel ones on the right, with
    the novel clients' mean distances in the title."""
    from flwr_datasets.visualization import plot_label_distributions
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    counts, novel = class_counts(federation), federation.novel
    title = {False: f"{(~novel).sum()} training clients", True: f"{novel.sum()} novel clients"}
    if novel.any():
        variation, divergence = distances(counts, novel)
        title[True] += f", nearest: TV {variation.mean():.2f}, KL {divergence.mean():.2f}"
    roles = [role for role in (False, True) if (novel == role).any()]
    picture = Figure(figsize=(8 * len(roles), 5), layout="constrained")
    number = federation.info.num_classes
    few = number <= 20
    palette = colormaps["tab20" if few else "turbo"]
    colours = palette(np.arange(number) if few else np.linspace(0, 1, number))
    for role, axis in zip(roles, picture.subplots(1, len(roles), squeeze=False)[0], strict=True):
        chosen = counts[novel == role]
        plot_label_distributions(
            _Labels(chosen), "label", axis=axis, title=title[role], verbose_labels=False,
            cmap=ListedColormap(colours[chosen.sum(0) > 0]),  # a class has one colour in both
        )  # fmt: skip
        axis.set_xlabel("client")
    if few:
        marks = [Patch(color=colour, label=str(i)) for i, colour in enumerate(colours)]
        picture.legend(handles=marks, title="class", loc="outside right center")
    return picture
