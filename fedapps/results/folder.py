"""What others go on from of a finished run: its model, and what strategy and clients keep beside.

All at the reported round. `clients/` is there after simulations alone: what a real node keeps is
its own."""

import json
from collections.abc import Mapping
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np

import partitions
from clients.arrays import Arrays
from clients.protocol import RUN_TOKEN, StateUse
from fedapps.files import (
    HANDOUT,
    MODEL,
    TOKEN,
    array_bytes,
    load_arrays,
    read_arrays,
    read_json,
    write_arrays,
)
from fedapps.methods import METHODS
from fedapps.node.building import with_public
from fedapps.results import kinds
from fedapps.results.checkpoint import State, read_state, state_bytes
from fedapps.settings.config import Config
from partitions.base import PARTITION_KEYS

STRATEGY, CLIENTS = "strategy.safetensors", "clients"
DEALS = (*PARTITION_KEYS, "dataset", "data-seed")


def model_files(run: Path, state: Mapping[str, Any]) -> dict[Path, bytes]:
    """The server's arrays of a strategy's `state`, what it keeps beside them, if anything, and the
    run's token."""
    files = {run / MODEL: array_bytes(state["arrays"])}
    if state["handout"]:
        files[run / HANDOUT] = array_bytes(state["handout"])
    if state["kept"]:
        files[run / STRATEGY] = state_bytes(state["kept"])
    if token := state.get("token"):
        files[run / TOKEN] = json.dumps({RUN_TOKEN: token}).encode()
    return files


def write_memories(run: Path, memories: Mapping[int, Arrays]) -> None:
    """What each client keeps, ``clients/<id>.safetensors``: of all of them, or of none."""
    begun = run / f".{CLIENTS}"
    rmtree(begun, ignore_errors=True)
    begun.mkdir()
    try:
        for client, arrays in memories.items():
            write_arrays(begun / f"{client}.safetensors", arrays)
        rmtree(run / CLIENTS, ignore_errors=True)
        begun.rename(run / CLIENTS)
    finally:
        rmtree(begun, ignore_errors=True)


def clear(run: Path) -> None:
    """Remove what a former run left there of its results."""
    for name in ("metrics.jsonl", "summary.json", MODEL, HANDOUT, STRATEGY, TOKEN):
        (run / name).unlink(missing_ok=True)
    for name in (CLIENTS, f".{CLIENTS}"):
        rmtree(run / name, ignore_errors=True)


def read_former(run: Path) -> State:
    """The state that a strategy goes on from. Raises ValueError where the model is missing, or
    what is kept beside it is damaged."""
    state: State = {"arrays": read_arrays(run)}
    if (file := run / HANDOUT).is_file():
        state["handout"] = load_arrays(file)
    if (file := run / STRATEGY).is_file():
        try:
            state["kept"] = read_state(file)
        except ValueError as error:
            raise ValueError(f"{file} is refused: {error}") from error
    if (file := run / TOKEN).is_file():
        told = read_json(file)
        if not kinds.record({RUN_TOKEN: kinds.text})(told):
            raise ValueError(f"{file} is damaged: it holds no {RUN_TOKEN}")
        state["token"] = told[RUN_TOKEN]
    return state


def read_memories(run: Path) -> dict[int, Arrays]:
    """What the run's clients keep, by client id; {} if it is not told."""
    files = list((run / CLIENTS).glob("*.safetensors"))
    if odd := [file for file in files if not file.stem.isdecimal()]:
        raise ValueError(f"{odd[0]} is damaged: its name is no client's id")
    return {int(file.stem): load_arrays(file) for file in files}


def check_former(run: Path, method: str) -> None:
    """Raise ValueError unless the folder holds all that the method's predictions need."""
    read_former(run)
    if METHODS[method].client.needs_state == StateUse.PREDICTIONS and not (run / CLIENTS).is_dir():
        raise ValueError(
            f"{run} holds no {CLIENTS}/: what {method}'s clients keep to themselves is missing, "
            "and without it their predictions would be wrong. Run it to its end in a simulation"
        )


def check_unseen(run: Path, saved: Config, config: Config, method: str) -> None:
    """Raise ValueError if a run with `config` that goes on from `run`, configured as `saved`, would
    score clients by samples that the training clients trained on there."""
    there, here = (
        {key: value for key, value in told.items() if key in DEALS or key.startswith("partition.")}
        for told in (saved, config)
    )
    if there == here:
        return
    former, present = (partitions.federation(with_public(c, method)) for c in (saved, config))
    alike = type(former) is type(present) is partitions.Federation  # users' samples may recur
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
        changed = [f"{key} was {there[key]}" for key in here if here[key] != there.get(key)]
        raise ValueError(
            f"{seen} of the {len(scored)} samples that clients would be scored by were trained on "
            f"in {run}, where {', '.join(changed)}; deal them as there, or train anew"
        )
