"""Facts and figures of a dataset and of a partition."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets as hf
import numpy as np
import scipy  # its modules load where they are used

from fedapps.common.new_files import make_folder
from fedapps.common.tasks import LABELS, VALUES
from partitions.datasets.loading import Dataset, Info, load, reread, source
from partitions.federations import Federation
from partitions.rules.partitioner import RowsPartitioner
from partitions.shares import META

if TYPE_CHECKING:
    from matplotlib.figure import Figure


MAX_VALUES = 4  # rows of panels in a figure


@dataclass(frozen=True)
class Summary:
    """A dataset's facts: where it comes from, sizes, and how often each class, or each of several
    labels, occurs; of values `QUANTILES` by the number of the output."""

    name: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    num_train: int
    num_test: int
    num_validation: int
    class_counts: dict[str, int]
    columns: dict[str, int]  # natural column → number of values
    quantiles: dict[str, list[float]]
    task: str


QUANTILES = {"least": 0.0, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "most": 1.0}


def summary(name: str, data_dir: str = "", check: bool = False, **options: Any) -> Summary:
    """Facts of the dataset, read again from its source if `check`.

    Raises ValueError as `partitions.datasets.loading.load`; a harmless file that is not the
    official one gives a warning in the log."""
    read = reread if check else load
    data: Dataset = read(name, data_dir, **options)
    y = data.y.numpy()
    counts: list[int] = []
    quantiles: dict[str, list[float]] = {}
    if data.info.task == VALUES:
        for number, values in enumerate(np.quantile(y, list(QUANTILES.values()), axis=0).T):
            name_of_output = data.classes[number] if data.classes else str(number)
            quantiles[name_of_output] = values.tolist()
    else:
        counts = label_counts(y, data.info).tolist()
    # Classes without a name are called by their number.
    names = [*data.classes, *map(str, range(len(data.classes), len(counts)))][: len(counts)]
    return Summary(
        name,
        source(name, data_dir),
        data.info.shape,
        str(data.x.dtype).removeprefix("torch."),
        data.num_train,
        len(data.y) - data.num_train - data.num_validation,
        data.num_validation,
        dict(zip(names, counts, strict=False)),
        {column: len(np.unique(values)) for column, values in data.columns.items()},
        quantiles,
        data.info.task,
    )


def label_counts(y: np.ndarray, info: Info) -> np.ndarray:
    """How often each class, or each of several labels, occurs among labels (n,) or (n, k)."""
    if info.task == LABELS:
        return np.nansum(y, axis=0).astype(np.int64)
    return np.bincount(y[y >= 0], minlength=info.num_classes)


def export(federation: Federation, folder: Path) -> list[Path]:
    """Write one directory per client, the `data-path` of its node. Returns them by client.

    Raises ValueError if the folder holds clients of another partition, with the same samples."""
    digits = len(str(federation.num_clients - 1))
    paths = [folder / f"client-{i:0{digits}}" for i in range(federation.num_clients)]
    others = sorted(set(folder.glob("client-*")) - set(paths))
    if others:
        raise ValueError(
            f"{folder} holds {others[0].name} of another partition, whose samples would belong to "
            "two clients; choose another folder, or empty this one"
        )
    # An export that is killed leaves folders that are refused, none of a former partition.
    for path in paths:
        make_folder(path)
        (path / META).unlink(missing_ok=True)
    for client, path in enumerate(paths):
        federation.share(client).save(path, federation.info)
    return paths


def class_counts(federation: Federation) -> np.ndarray:
    """Samples of each class, or with each of several labels, that each client holds,
    (num_clients, num_classes)."""
    counts = []
    for client in range(federation.num_clients):
        _, y = federation.share(client).everything[:]
        counts.append(label_counts(y.numpy(), federation.info))
    return np.stack(counts)


def sample_counts(federation: Federation) -> np.ndarray:
    """The samples of each client, (num_clients,)."""
    clients = range(federation.num_clients)
    return np.array([len(federation.share(client).everything) for client in clients])


def client_values(federation: Federation) -> list[np.ndarray]:
    """The values (n, k) of each client whose labels are values, in the labels' unit."""
    mean = np.array(federation.targets.mean)
    std = np.array(federation.targets.std)
    values = []
    for client in range(federation.num_clients):
        y = federation.share(client).everything.labels()
        values.append(y.double().numpy() * std + mean)
    return values


def distances(counts: np.ndarray, novel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each novel client's distance to the nearest training client, by class proportions.

    Total variation ½ Σ_c |p_c − q_c| (pFedHN, 5.3), and D_KL(p ‖ q) in nats (ODPFL-HN, 6.7) with
    one sample added to each class of both (ours), since q_c may be zero. (num_novel,) each."""
    p = counts[novel] / np.maximum(counts[novel].sum(1, keepdims=True), 1)
    q = counts[~novel] / np.maximum(counts[~novel].sum(1, keepdims=True), 1)
    variation = np.abs(p[:, None] - q[None]).sum(2) / 2
    divergence = scipy.stats.entropy(counts[novel][:, None] + 1, counts[~novel][None] + 1, axis=2)
    return variation.min(1), divergence.min(1)


class _Labels(RowsPartitioner):
    """A partition with the `counts` (clients, classes) of labels, for flwr-datasets' figure."""

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
    the novel clients' mean distances in the title. Of values, each client's distribution."""
    if federation.info.task == VALUES:
        return _figure_of_values(federation)
    from flwr_datasets.visualization import plot_label_distributions
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    counts = class_counts(federation)
    novel = federation.novel
    groups = [(f"{(~novel).sum()} training clients", counts[~novel])]
    if novel.any():
        variation, divergence = distances(counts, novel)
        title = (
            f"{novel.sum()} novel clients, "
            f"nearest: TV {variation.mean():.2f}, KL {divergence.mean():.2f}"
        )
        groups.append((title, counts[novel]))
    num_classes = federation.info.num_classes
    has_legend = num_classes <= 20  # as many as tab20 has colours
    if has_legend:
        colours = colormaps["tab20"](np.arange(num_classes))
    else:
        colours = colormaps["turbo"](np.linspace(0, 1, num_classes))
    picture = Figure(figsize=(8 * len(groups), 5), layout="constrained")
    axes = picture.subplots(1, len(groups), squeeze=False)[0]
    for axis, (title, group_counts) in zip(axes, groups, strict=True):
        # The figure draws only the classes that occur: so a class has one colour in both groups.
        colours_of_group = colours[group_counts.sum(0) > 0]
        plot_label_distributions(
            _Labels(group_counts),
            "label",
            axis=axis,
            title=title,
            verbose_labels=False,
            cmap=ListedColormap(colours_of_group),
        )
        axis.set_xlabel("client")
    if has_legend:
        marks = [Patch(color=colour, label=str(i)) for i, colour in enumerate(colours)]
        title = "label" if federation.info.task == LABELS else "class"
        picture.legend(handles=marks, title=title, loc="outside right center")
    return picture


def _figure_of_values(federation: Federation) -> "Figure":
    """A box for each client with the quartiles of its values, in the labels' unit; a row of panels
    for each of the first `MAX_VALUES` values."""
    from matplotlib.figure import Figure

    novel = federation.novel
    groups = [("training clients", np.flatnonzero(~novel))]
    if novel.any():
        groups.append(("novel clients", np.flatnonzero(novel)))
    values = client_values(federation)
    num_values = min(values[0].shape[1], MAX_VALUES)
    size = (8 * len(groups), 4 * num_values)
    picture = Figure(figsize=size, layout="constrained")
    axes = picture.subplots(num_values, len(groups), sharey="row", squeeze=False)
    for number, row in enumerate(axes):
        for axis, (title, clients) in zip(row, groups, strict=True):
            axis.boxplot([values[client][:, number] for client in clients], showfliers=False)
            axis.set(title=f"{len(clients)} {title}", xlabel="client")
        row[0].set_ylabel("value" if num_values == 1 else f"value {number}")
    return picture
