"""The model of a finished run and the states of its strategy and clients, at the reported round;
model and strategy also at the last one.

Only simulations have `clients/`: a real node keeps its state to itself."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np

import partitions
from clients.core.arrays import Arrays
from clients.core.protocol import RUN_TOKEN, StateUse
from fedapps.files import (
    ERRORS,
    HANDOUT,
    MODEL,
    TOKEN,
    WHICH,
    array_bytes,
    of_round,
    read_arrays,
    read_json,
    read_safetensors,
    write_arrays,
    write_files,
)
from fedapps.methods import METHODS
from fedapps.node.building import with_public
from fedapps.results.checkpoint import State, read_state, state_bytes
from fedapps.settings.config import Config, run_configuration
from fedapps.settings.variants import is_of_data, root
from partitions.federations import Federation

STRATEGY, CLIENTS = "strategy.safetensors", "clients"


def model_files(run: Path, state: Mapping[str, Any]) -> dict[Path, bytes]:
    """The files of a strategy's `state`, by path."""
    files = {run / MODEL: array_bytes(state["arrays"])}
    if state["handout"]:
        files[run / HANDOUT] = array_bytes(state["handout"])
    if state["kept"]:
        files[run / STRATEGY] = state_bytes(state["kept"])
    if token := state.get("token"):
        files[run / TOKEN] = json.dumps({RUN_TOKEN: token}).encode()
    return files


def write_final(run: Path, state: Mapping[str, Any]) -> None:
    """Write the files of the last round's `state`: hard links to those of the reported round
    where both have the same content."""
    files = {file: data for file, data in model_files(run, state).items() if file.name != TOKEN}
    for file, data in list(files.items()):
        final = of_round(file, "last")
        final.unlink(missing_ok=True)
        if file.is_file() and file.read_bytes() == data:
            with suppress(OSError):  # some disks have no links
                os.link(file, final)
                del files[file]
    write_files({of_round(file, "last"): data for file, data in files.items()})


def write_client_states(run: Path, memories: Mapping[int, Arrays]) -> None:
    """Write each client's state to ``clients/<id>.safetensors``: all of them, or none."""
    temporary = run / f".{CLIENTS}"
    rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        for client, arrays in memories.items():
            write_arrays(temporary / f"{client}.safetensors", arrays)
        rmtree(run / CLIENTS, ignore_errors=True)
        temporary.rename(run / CLIENTS)
    finally:
        rmtree(temporary, ignore_errors=True)


def clear(run: Path) -> None:
    """Remove the results of a former run."""
    for name in ("metrics.jsonl", "summary.json", ERRORS, MODEL, HANDOUT, STRATEGY, TOKEN):
        for which in WHICH:
            of_round(run / name, which).unlink(missing_ok=True)
    for name in (CLIENTS, f".{CLIENTS}"):
        rmtree(run / name, ignore_errors=True)


def read_former(run: Path, which: str = "best") -> State:
    """The state that a strategy starts from, of the "best" or the "last" round. Raises ValueError
    if the model is missing or another file is damaged."""
    state: State = {"arrays": read_arrays(run, which)}
    if (file := of_round(run / HANDOUT, which)).is_file():
        state["handout"] = read_safetensors(file)
    if (file := of_round(run / STRATEGY, which)).is_file():
        try:
            state["kept"] = read_state(file)
        except ValueError as error:
            raise ValueError(f"{file} is refused: {error}") from error
    if (file := run / TOKEN).is_file():
        content = read_json(file)
        token = content.get(RUN_TOKEN) if isinstance(content, dict) else None
        if not isinstance(token, str):
            raise ValueError(f"{file} is damaged: it holds no {RUN_TOKEN}")
        state["token"] = token
    return state


def read_client_states(run: Path) -> dict[int, Arrays]:
    """The states of the run's clients by client id; {} if they are unknown."""
    files = list((run / CLIENTS).glob("*.safetensors"))
    if odd := [file for file in files if not file.stem.isdecimal()]:
        raise ValueError(f"{odd[0]} is damaged: its name is no client's id")
    return {int(file.stem): read_safetensors(file) for file in files}


def takes_states(run: Path, method: str) -> bool:
    """Whether the method takes over the states in the folder; from another method's run, unless one
    extends the other, it takes the model alone. A run without a configuration is of the method."""
    if not (run / "config.toml").is_file():
        return True
    return root(str(run_configuration(run)["method"])) == root(method)


def check_former(run: Path, method: str) -> None:
    """Raise ValueError unless the folder holds everything that the method's predictions need."""
    read_former(run)
    known = (run / CLIENTS).is_dir() and takes_states(run, method)
    if METHODS[method].client.needs_state == StateUse.PREDICTIONS and not known:
        raise ValueError(
            f"{run} holds no {CLIENTS}/ of {method}: the states of {method}'s clients are missing, "
            "and their predictions would be wrong without them. Run it to its end in a simulation"
        )


def check_unseen(run: Path, saved: Config, config: Config, method: str) -> None:
    """Raise ValueError if a run with `config` that starts from `run`, configured as `saved`, would
    score clients on samples that its training clients were trained on."""
    deals = [key for key in config if is_of_data(key)]
    if not (changed := [key for key in deals if saved.get(key) != config[key]]):
        return
    former, present = (partitions.federation(with_public(c, method)) for c in (saved, config))
    alike = type(former) is type(present) is Federation  # users' samples may recur
    if not alike or former.dataset.key != present.dataset.key:
        return
    train = [former.rows(i)["train"] for i, novel in enumerate(former.novel) if not novel]
    scored = np.concatenate(
        [
            rows
            for client, novel in enumerate(present.novel)
            for part, rows in present.rows(client).items()
            if novel or part != "train"
        ]
    )
    if seen := np.isin(scored, np.concatenate(train)).sum():
        before = ", ".join(f"{key} was {saved[key]}" for key in changed)
        raise ValueError(
            f"{seen} of the {len(scored)} samples that clients would be scored on were trained on "
            f"in {run}, where {before}; deal them in the same way, or train again"
        )
