"""A run's folder: writes the states of its clients, clears the results of a former run, and checks
what another run starts from.

Only simulations have `clients/`: a real node keeps its state to itself."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

import partitions
from clients.core.arrays import Arrays
from clients.core.protocol import StateUse
from fedapps.building import with_public
from fedapps.common.new_files import remove_folder
from fedapps.files import ERRORS, PRIVACY, array_bytes, write_files
from fedapps.methods import METHODS
from fedapps.results.card import FILE as CARD
from fedapps.results.model_files import ARRAY_FILES
from fedapps.saved import (
    CLIENTS,
    SUMMARY,
    TOKEN,
    WHICH,
    SavedFiles,
    digest,
    digest_of_folder,
    of_round,
    read_client_states,
    read_former,
)
from fedapps.settings.config import Config
from fedapps.settings.saved_configurations import run_configuration
from fedapps.settings.variants import is_of_data, root
from partitions.federations import Federation


def write_client_states(run: Path, memories: Mapping[int, Arrays]) -> str:
    """Write each client's state to ``clients/<id>.safetensors``: all of them, or none. Returns the
    digest of the folder."""
    digests: dict[str, str] = {}
    temporary = run / f".{CLIENTS}"
    remove_folder(temporary)
    temporary.mkdir()
    try:
        for client, arrays in memories.items():
            file = temporary / f"{client}.safetensors"
            data = array_bytes(arrays)
            write_files({file: data})
            digests[file.name] = digest(data)
        remove_folder(run / CLIENTS)
        temporary.rename(run / CLIENTS)
    finally:
        remove_folder(temporary)
    return digest_of_folder(digests)


def clear(run: Path) -> None:
    """Remove the results of a former run: first the summary, without which no file is used."""
    for name in (SUMMARY, "metrics.jsonl", ERRORS, *ARRAY_FILES, TOKEN):
        for which in WHICH:
            file = of_round(run / name, which)
            file.unlink(missing_ok=True)
            _remove_unfinished(file)
    for name in ("config.toml", CARD, PRIVACY):
        _remove_unfinished(run / name)
    for name in (CLIENTS, f".{CLIENTS}"):
        remove_folder(run / name)


def _remove_unfinished(file: Path) -> None:
    """Remove what processes that were killed have written of the file."""
    for unfinished in file.parent.glob(f".{file.name}.*"):
        unfinished.unlink(missing_ok=True)


def takes_states(run: Path, method: str) -> bool:
    """Whether the method takes over the states in the folder; from another method's run, unless one
    extends the other, it takes the model alone. A run without a configuration is of the method."""
    if not (run / "config.toml").is_file():
        return True
    return root(str(run_configuration(run)["method"])) == root(method)


def check_former(run: Path, method: str) -> None:
    """Raise ValueError unless the folder holds everything that the method's predictions need."""
    read_former(run)
    known = (run / CLIENTS).is_dir() and CLIENTS in SavedFiles.of_run(run)
    known = known and takes_states(run, method)
    if known:
        read_client_states(run)
    if METHODS[method].client.needs_state == StateUse.PREDICTIONS and not known:
        raise ValueError(
            f"{run} holds no {CLIENTS}/ of {method}: the states of {method}'s clients are missing, "
            "and their predictions would be wrong without them. Run it to its end in a simulation"
        )


def check_public(run: Path, saved: Config, config: Config, method: str) -> None:
    """Raise ValueError if the public samples of `config` are others than those of `run`, configured
    as `saved`, whose consensus is of these."""
    if not METHODS[method].client.needs_public or not _changed_data(saved, config):
        return
    former = partitions.federation(with_public(saved, method)).public
    present = partitions.federation(with_public(config, method)).public
    assert former is not None and present is not None
    if not torch.equal(former[:][0], present[:][0]):
        raise ValueError(
            f"{method} cannot start from {run}: its consensus is of other public samples than "
            "those of this run; take the saved run's data, or train again"
        )


def check_unseen(run: Path, saved: Config, config: Config, method: str) -> None:
    """Raise ValueError if a run with `config` that starts from `run`, configured as `saved`, would
    score clients on samples that its training clients were trained on."""
    changed = _changed_data(saved, config)
    if not changed:
        return
    former = partitions.federation(with_public(saved, method))
    present = partitions.federation(with_public(config, method))
    # Users with tastes may share samples, so these say nothing of what was seen.
    comparable = type(former) is type(present) is Federation
    if not comparable or former.dataset.key != present.dataset.key:
        return
    train_rows = []
    for client, novel in enumerate(former.novel):
        if not novel:
            train_rows.append(former.rows(client)["train"])
    scored_rows = []
    for client, novel in enumerate(present.novel):
        for part, rows in present.rows(client).items():
            if novel or part != "train":
                scored_rows.append(rows)
    scored = np.concatenate(scored_rows)
    seen = np.isin(scored, np.concatenate(train_rows)).sum()
    if seen:
        before = ", ".join(f"{key} was {saved[key]}" for key in changed)
        raise ValueError(
            f"{seen} of the {len(scored)} samples that clients would be scored on were trained on "
            f"in {run}, where {before}; deal them in the same way, or train again"
        )


def _changed_data(saved: Config, config: Config) -> list[str]:
    """The settings of data in which `config` differs from `saved`."""
    data_keys = [key for key in config if is_of_data(key)]
    return [key for key in data_keys if saved.get(key) != config[key]]
