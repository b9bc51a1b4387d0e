"""FedEmbed's figures and its table by prevalence: ``python -m experiments.figures_fedembed …``.

- ``voices OUT.png``
- ``prevalence RUN``, where RUN is the folder of one method's run
- ``clusters RUN …``, of several seeds
- ``embeddings OUT.png [EXPERIMENT.toml] key=value …`` trains twice in process, with and without the
  type head, and reads the users' states, which only a simulation can"""

import logging
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table

from experiments.figures_hypernetworks import client_of, save
from fedapps.results.schema import metric_names, with_present_names
from fedapps.saved import read_json
from fedapps.settings.config import Config, defaults, override
from fedapps.settings.experiments import read_arguments

cli = typer.Typer(help="FedEmbed's figures.", no_args_is_help=True, add_completion=False)


@cli.command()
def voices(out: Path, shown: int = 6) -> None:
    """Spectrograms of one text by a few voices."""
    from partitions.datasets import voices as speech

    figure, axes = plt.subplots(2, shown // 2, figsize=(10, 4.5), sharex=True, sharey=True)
    extent = (0.0, speech.SECONDS, 0.0, speech.RATE / 2000)
    for number, axis in enumerate(axes.flat):
        voice = speech.voices(20)[number]
        level = speech.spectrogram(voice, speech.text(0), 375, np.random.default_rng(0))
        axis.imshow(level, origin="lower", aspect="auto", extent=extent, cmap="magma")
        axis.set_title(f"voice {number}: {voice.pitch:.0f} Hz", fontsize=9)
    figure.supxlabel("seconds")
    figure.supylabel("kHz")
    save(figure, out, dpi=60)


@cli.command()
def prevalence(run: Path) -> None:
    """F1 by the sub-populations' share of the users."""
    table = Table("share of users", "sub-populations", "mean F1", "deviation")
    scores_by_share = by_prevalence(read_json(run / "summary.json"))
    for share, scores in sorted(scores_by_share.items(), reverse=True):
        cells = (f"{np.mean(scores):.3f}", f"{np.std(scores):.3f}")
        table.add_row(f"{100 * share:.0f} %", str(len(scores)), *cells)
    Console().print(table)


@cli.command()
def clusters(runs: list[Path]) -> None:
    """The adjusted Rand index of the users' heads and sub-populations: 1 if both divide the users
    alike, near 0 by chance."""
    values = []
    for folder in runs:
        values.append(rand_index(read_json(folder / "summary.json")))
        print(f"{folder.name}: {values[-1]:.3f}")
    if len(values) > 1:
        print(f"mean {np.mean(values):.3f}, deviation {np.std(values, ddof=1):.3f}")


@cli.command()
def embeddings(
    out: Path,
    arguments: Annotated[list[str] | None, typer.Argument(help="TOML file, key=value")] = None,
) -> None:
    """t-SNE of the users' embeddings, trained with and without the type head, and the share of a
    user's neighbours that are of the same sub-population. Where no triplet loss separates the
    embeddings, as with ``fedembed.assignment=type``, this shows the effect of the type head."""
    from sklearn.manifold import TSNE

    logging.getLogger("flwr").setLevel(logging.ERROR)
    config = override(defaults(), {"method": "fedembed", "partition": "preference"})
    config = override(config, read_arguments(arguments or [], main=False).settings)
    figure, axes = plt.subplots(1, 2, figsize=(9, 4))
    for axis, head in zip(axes, (True, False), strict=True):
        v, kinds = trained(config | {"fedembed.type-head": head})
        perplexity = min(30, len(v) - 1)  # it must be below the number of points
        x, y = TSNE(random_state=0, perplexity=perplexity).fit_transform(v).T
        axis.scatter(x, y, c=kinds, cmap="tab20", s=6)
        title = f"{'with' if head else 'without'} type head, {own_kind(v, kinds):.2f} of own kind"
        print(title)
        axis.set_title(title)
        axis.set(xticks=[], yticks=[])
    save(figure, out, dpi=60)


def by_prevalence(summary: dict[str, Any]) -> dict[float, list[float]]:
    """F1 of the sub-populations by their share of the users, rounded to whole percents."""
    clients = map(metric_names, summary["per_client"].values())
    users = [client["sub-population"] for client in clients]
    evaluation = with_present_names(summary)["evaluation"]
    scores = defaultdict(list)
    for kind in sorted(set(users)):
        share = round(users.count(kind) / len(users), 2)
        scores[share].append(evaluation[f"train-f1-{kind}"])
    return dict(scores)


def rand_index(summary: dict[str, Any]) -> float:
    """The adjusted Rand index (Hubert and Arabie, 1985) of heads and sub-populations."""
    from sklearn.metrics import adjusted_rand_score

    users = [metric_names(user) for user in summary["per_client"].values()]
    kinds = [int(user["sub-population"]) for user in users]
    heads = [int(user["head"]) for user in users]
    return float(adjusted_rand_score(kinds, heads))


def trained(config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings (users, d) of all users after a run, and their sub-populations (users,)."""
    from clients.methods.fedembed import FedEmbedClient
    from fedapps.clientapp import app
    from fedapps.engines.in_process_grid import InProcessGrid
    from fedapps.serverapp import run

    grid = InProcessGrid.simulation(app, config, int(config["num-clients"]))
    run(grid, config, "in-process")
    v = []
    kinds = []
    for context in grid.contexts.values():
        client = client_of(context, "fedembed")
        assert isinstance(client, FedEmbedClient)
        v.append(client.embedding())
        kinds.append(client.share.attributes["sub-population"])
    return np.stack(v), np.array(kinds)


def own_kind(v: np.ndarray, kinds: np.ndarray, k: int = 10) -> float:
    """The mean share of users of the same sub-population among the k nearest embeddings."""
    from sklearn.neighbors import NearestNeighbors

    neighbours = NearestNeighbors(n_neighbors=min(k, len(v) - 1)).fit(v)
    _, others = neighbours.kneighbors()
    return float((kinds[others] == kinds[:, None]).mean())


if __name__ == "__main__":
    cli()
