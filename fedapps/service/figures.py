"""Figures of a finished run's model: predictions, embeddings, ATP's rates, FedTTA's Figure 2."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor

import partitions
from clients.core.arrays import Arrays, group
from clients.core.client import Client
from clients.core.evaluation import main_of, predicted
from clients.core.privacy import EVERYTHING
from clients.core.protocol import LR_FACTOR, RESTORE_STATE, SERVER_ROUND, lr_factor
from clients.methods.atp import RATES, adaptable
from clients.methods.fedtta import Adapting
from fedapps.building import WITHOUT_SCORES, Builder, with_public
from fedapps.common.tasks import CLASS_PROBABILITIES, TASKS, Targets
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.methods import METHODS
from fedapps.node.bridge import reply_of
from fedapps.results.folder import check_former
from fedapps.results.plot import matrix, shown
from fedapps.results.schema import metric_names
from fedapps.saved import model_round, read_arrays, read_client_states
from fedapps.service.finished_run import FinishedRun, restore_strategy
from fedapps.settings.config import Config, settings
from fedapps.settings.saved_configurations import saved_configuration
from partitions.federations import Federation
from partitions.shares import Share, labeled_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

# Columns of a trace, after the task's main score; the entropy is in nats.
TRACED = ["ℓ_per", "entropy"]
SHOWN_CLASSES = 5  # of a client in the map of embeddings
LISTED_STEPS = (0, 1, 2, 3, 5, 10, 20)  # adaptation steps that are printed, beside the last one


def confusion(folder: Path) -> "Figure":
    """True against predicted class, over the samples that novel clients are scored on, or over
    validation samples if the run serves no novel client. For users with tastes: sub-population
    against head.

    Each row sums to 1; that of a class without samples is empty. Raises ValueError for a run that
    predicts no classes."""
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    clients = map(metric_names, summary["per_client"].values())
    users = [client for client in clients if "head" in client]
    # A user with tastes predicts two classes, liked or not: its head says more than they do.
    if users:
        types = np.array([user["sub-population"] for user in users])
        heads = np.array([user["head"] for user in users])
        return _shares(types, heads, "sub-population", "assigned head", folder.name)
    classes = FinishedRun(folder).card.classes
    return _shares(*predictions(folder), "true class", "predicted class", folder.name, classes)


def _shares(
    true: np.ndarray,
    predicted: np.ndarray,
    rows: str,
    columns: str,
    title: str,
    classes: Sequence[str] = (),
) -> "Figure":
    """The shares of the predicted numbers for each true one, with the names of the `classes`."""
    from sklearn.metrics import confusion_matrix

    present = np.union1d(true, predicted)
    shares = confusion_matrix(true, predicted, labels=present, normalize="true")
    names = [classes[number] if classes else str(number) for number in present]
    return matrix(shares, rows, columns, title, names)


@dataclass
class RecordedClasses:
    """A client's true and predicted classes (n,), recorded in place of a user's own score."""

    true: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    predicted: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def of(self, outputs: Tensor, y: Tensor, targets: Targets) -> float:
        """Record the samples that an evaluation scores; returns how many they are."""
        self.true = y.cpu().numpy()
        self.predicted = predicted(outputs, targets).cpu().numpy()
        return float(len(y))


def predictions(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """True and predicted classes (samples,) of an evaluation of a run's saved model, by its clients
    with their saved states.

    Raises ValueError if the run predicts no classes, if its folder lacks what predictions need, and
    if its differential privacy covers them."""
    run = FinishedRun(folder)
    check_former(folder, run.method)
    if run.card.task not in CLASS_PROBABILITIES:
        raise ValueError(
            f"{folder.name} predicts {run.card.task}, and this figure is of classes; `fedapps plot "
            f"{folder} clients` draws each client's score"
        )
    known = settings(run.config, run.method)
    if known["dp"] != "none" and known["dp_covers"] == EVERYTHING:
        raise ValueError(
            f"{folder.name} keeps dp {known['dp']!r}, which covers predictions as well"
        )
    recorded: dict[int, RecordedClasses] = {}
    grid = _grid_of(run, recorded)
    strategy = restore_strategy(run, grid)
    present = strategy.present()
    # The grid's nodes begin without the states of the run.
    saved_states = read_client_states(folder)
    with_state = [node for node in present if node.client in saved_states]
    strategy.exchange(RESTORE_STATE, {node: saved_states[node.client] for node in with_state})
    # Those of training clients are shown only where there are no novel ones.
    scored = run.summary["per_client"].values()
    serves_novel = bool(run.novel) or any(client["role"] == "novel" for client in scored)
    shows_novel = serves_novel and any(node.novel for node in present)
    nodes = [node for node in present if node.novel == shows_novel and not node.unlabeled]
    payloads = strategy.personalize(strategy.arrays, nodes)
    recorded.clear()
    strategy.exchange("evaluate", payloads, {SERVER_ROUND: model_round(folder)})
    of_clients = [recorded[client] for client in sorted(recorded)]
    if not any(len(classes.true) for classes in of_clients):
        raise ValueError(f"{folder.name}: no client has been scored on samples with labels")
    true = np.concatenate([classes.true for classes in of_clients])
    return true, np.concatenate([classes.predicted for classes in of_clients])


def _grid_of(run: FinishedRun, recorded: dict[int, RecordedClasses]) -> InProcessGrid:
    """A grid of the run's clients, which answer queries, evaluations and the exchanges of its
    method. The classes of a client's last evaluation are `recorded` by its id."""

    def answer(message: Message, context: Context) -> Message:
        client = make_client(run.config, int(context.node_config["partition-id"]))
        recorded[client.client] = RecordedClasses()
        client.own_scores = {"recorded": recorded[client.client]}
        return reply_of(client, message, context)

    app = ClientApp()
    app.query()(answer)
    app.evaluate()(answer)
    for action in {RESTORE_STATE, *METHODS[run.method].client.exchanges}:
        category, _, name = action.partition(".")
        getattr(app, category)(name)(answer)
    return InProcessGrid.simulation(app, run.config, int(run.config["num-clients"]))


def embeddings(folder: Path, attribute: str = "") -> "Figure":
    """t-SNE of the clients' embeddings or descriptors, coloured by a client attribute (such as
    ``coarse``), or labelled with their classes; with their ids where labels are no classes."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from sklearn.manifold import TSNE

    config = saved_configuration(folder)
    vectors = descriptors(config, read_arrays(folder))
    if len(vectors) < 4:
        raise ValueError(f"{folder.name} holds {len(vectors)} embeddings; a map needs at least 4")
    tsne = TSNE(init="random", random_state=0, perplexity=min(30, (len(vectors) - 1) / 3))
    points = tsne.fit_transform(np.stack(list(vectors.values())))
    federation = _federation(config)
    shares = [federation.share(client) for client in vectors]
    figure = Figure(figsize=(6, 5), layout="constrained")
    axis = figure.subplots()
    if attribute:
        values = np.array([str(share.attributes[attribute]) for share in shares])
        for number, value in enumerate(sorted(set(values))):
            x, y = points[values == value].T
            colour = colormaps["tab20"](number % 20)  # the map has 20 colours
            axis.scatter(x, y, color=colour, label=shown(value))
        axis.legend(title=attribute, fontsize=7)
    else:
        has_classes = federation.info.task in CLASS_PROBABILITIES
        for (x, y), client, share in zip(points, vectors, shares, strict=True):
            style: dict[str, Any] = {}
            if share.novel:
                style = {"color": "#D55E00", "weight": "bold"}
            text = _classes_of(share) if has_classes else str(client)
            axis.text(x, y, text, ha="center", fontsize=7, **style)
        # Texts do not widen the axes, as dots would.
        axis.set(xlim=(points[:, 0].min(), points[:, 0].max()))
        axis.set(ylim=(points[:, 1].min(), points[:, 1].max()))
        topic = "classes" if has_classes else "ids"
        axis.set_title(f"{topic} of training clients, and of novel ones (bold)")
    axis.set(xticks=[], yticks=[])
    return figure


def _classes_of(share: Share) -> str:
    """The first classes among a client's labels."""
    _, labels = share.everything[:]
    classes = labels[labeled_rows(labels)].unique().tolist()
    return ",".join(map(str, classes[:SHOWN_CLASSES]))


def descriptors(config: Config, arrays: Arrays) -> dict[int, np.ndarray]:
    """v_i by client, or with an encoder e_i, which novel clients have as well."""
    encoder = group(arrays, "encoder")
    vectors: dict[int, np.ndarray] = {}
    if not encoder:
        for name, embedding in sorted(group(arrays, "embedding").items()):
            vectors[int(name)] = embedding
        return vectors
    for number in range(int(config["num-clients"])):
        client: Any = make_client(config, number)
        encoded, _ = client.encode(encoder, {})
        vectors[client.client] = encoded["descriptor"]
    return vectors


def traces(folder: Path, client: int | None, steps: int) -> "dict[int, DataFrame]":
    """The traces of one novel client of a run, or of all, by client."""
    config = saved_configuration(folder)
    novel = np.flatnonzero(_federation(config).novel).tolist()
    if client is not None and client not in novel:
        raise ValueError(f"client {client} is not novel; novel are {novel}")
    arrays = read_arrays(folder)
    round_ = model_round(folder)
    numbers = novel if client is None else [client]
    return {number: trace(config, arrays, number, steps, round_) for number in numbers}


def trace(config: Config, arrays: Arrays, number: int, steps: int, round_: int) -> "DataFrame":
    """A row before and after each of `steps` adaptation steps of a novel client, from the server's
    `arrays` of a round.

    Raises ValueError if the method does not adapt by FedTTA's steps."""
    from pandas import DataFrame

    method = str(config["method"])
    able = []
    for name, entry in METHODS.items():
        # A personal base model is on the client; the server's arrays lack it.
        if issubclass(entry.client, Adapting) and not entry.client.personal:
            able.append(name)
    if method not in able:
        raise ValueError(f"{method!r} has no adaptation steps to trace; known: {', '.join(able)}")
    client = make_client(config, number)
    assert isinstance(client, Adapting)
    known = settings(config, method)
    factor = lr_factor(known["lr_decay"], known["lr_decay_rounds"], round_)
    client.begin("evaluate", {LR_FACTOR: factor})
    client.load(arrays)
    x, y = client.share.everything.to(client.device)[:]
    labeled = labeled_rows(y)
    main = TASKS[client.targets.task].main
    rows = []
    for step in client.steps(x, steps):
        score = main_of(step.logits[labeled], y[labeled], client.targets)
        rows.append((score, step.personalization, step.entropy))
    return DataFrame(rows, columns=[main.short or main.text, *TRACED])


def draw_traces(traces: "dict[int, DataFrame]") -> "Figure":
    """The main score, ℓ_per and entropy against the step, means over clients, and the step of
    least entropy."""
    from matplotlib.figure import Figure

    means = _mean(traces)
    figure = Figure(figsize=(10, 3), layout="constrained")
    least = means["entropy"][1:].idxmin()  # step 0 is the model before adaptation
    for axis, label in zip(figure.subplots(1, 3), means, strict=True):
        axis.plot(means[label], color="black")
        axis.axvline(least, linestyle=":", color="grey")
        axis.set(xlabel="adaptation step", ylabel=label)
    clients = f"mean of {len(traces)} novel clients"
    if len(traces) == 1:
        (number,) = traces
        clients = f"client {number}"
    figure.suptitle(f"{clients}; dotted: least entropy")
    return figure


def trace_lines(traces: "dict[int, DataFrame]") -> Iterator[str]:
    """The means over clients at a few steps."""
    means = _mean(traces)
    for step in means.index:
        if step in LISTED_STEPS or step == means.index[-1]:
            values = [f"{label} {value:.4f}" for label, value in means.loc[step].items()]
            yield f"step {step:3d}  {'  '.join(values)}"


def _mean(traces: "dict[int, DataFrame]") -> "DataFrame":
    from pandas import concat

    return concat(traces).groupby(level=1).mean()


def rates(folder: Path) -> "Figure":
    """ATP's learnt rates, one bar for each tensor; those of running statistics in another colour.

    Raises ValueError if the run's method learns none."""
    from matplotlib.figure import Figure

    arrays = read_arrays(folder)
    if RATES not in arrays:
        raise ValueError(f"{folder.name} has learnt no rates of adaptation; atp learns some")
    names = list(adaptable(make_client(saved_configuration(folder), 0).model))
    colours = ["#D55E00" if "running" in name else "#0072B2" for name in names]
    figure = Figure(figsize=(6, 1 + 0.2 * len(names)), layout="constrained")
    axis = figure.subplots()
    axis.barh(names, arrays[RATES], color=colours)
    axis.axvline(0, color="grey", linewidth=0.5)
    axis.invert_yaxis()
    axis.set(xlabel="rate α of adaptation", title=folder.name)
    return figure


def make_client(config: Config, number: int) -> Client:
    """The run's client with this number."""
    federation = _federation(config)
    builder = Builder(config | WITHOUT_SCORES, str(config["method"]), federation.info)
    return builder.client(federation.share(number), number)


def _federation(config: Config) -> Federation:
    return partitions.federation(with_public(config, str(config["method"])))
