"""The model of a finished run and the states of its strategy and clients, at the reported round;
model and strategy also at the last one.

Only simulations have `clients/`: a real node keeps its state to itself."""

import json
import logging
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
    read_json,
    write_files,
)
from fedapps.methods import METHODS
from fedapps.node.building import with_public
from fedapps.results.checkpoint import State, parse_state, state_bytes
from fedapps.saved import (
    CLIENTS,
    SUMMARY,
    SavedFiles,
    digest,
    digest_of_folder,
    read_arrays,
)
from fedapps.settings.config import Config, run_configuration
from fedapps.settings.variants import is_of_data, root
from partitions.federations import Federation
from strategies.core.replies import finite

logger = logging.getLogger(__name__)

STRATEGY = "strategy.safetensors"
ARRAY_FILES = (MODEL, HANDOUT, STRATEGY)


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


def digests_of(files: Mapping[Path, bytes]) -> dict[str, str]:
    """The digests of those of the files that hold arrays, by name."""
    return {file.name: digest(data) for file, data in files.items() if file.name != TOKEN}


def write_final(run: Path, state: Mapping[str, Any]) -> dict[str, str]:
    """Write the files of the last round's `state`: hard links to those of the reported round
    where both have the same content. Returns their digests by name."""
    files = {file: data for file, data in model_files(run, state).items() if file.name != TOKEN}
    finals = {of_round(file, "last"): data for file, data in files.items()}
    for file, data in list(files.items()):
        final = of_round(file, "last")
        final.unlink(missing_ok=True)
        if file.is_file() and file.read_bytes() == data:
            with suppress(OSError):  # some disks have no links
                os.link(file, final)
                del files[file]
    write_files({of_round(file, "last"): data for file, data in files.items()})
    return digests_of(finals)


def write_client_states(run: Path, memories: Mapping[int, Arrays]) -> str:
    """Write each client's state to ``clients/<id>.safetensors``: all of them, or none. Returns the
    digest of the folder."""
    digests: dict[str, str] = {}
    temporary = run / f".{CLIENTS}"
    rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        for client, arrays in memories.items():
            file, data = temporary / f"{client}.safetensors", array_bytes(arrays)
            write_files({file: data})
            digests[file.name] = digest(data)
        rmtree(run / CLIENTS, ignore_errors=True)
        temporary.rename(run / CLIENTS)
    finally:
        rmtree(temporary, ignore_errors=True)
    return digest_of_folder(digests)


def clear(run: Path) -> None:
    """Remove the results of a former run: first the summary, without which no file is used."""
    for name in (SUMMARY, "metrics.jsonl", ERRORS, *ARRAY_FILES, TOKEN):
        for which in WHICH:
            file = of_round(run / name, which)
            file.unlink(missing_ok=True)
            for unfinished in run.glob(f".{file.name}.*"):  # of a process that was killed
                unfinished.unlink(missing_ok=True)
    for name in (CLIENTS, f".{CLIENTS}"):
        rmtree(run / name, ignore_errors=True)


def read_former(run: Path, which: str = "best") -> State:
    """The state that a strategy starts from, of the "best" or the "last" round.

    Raises ValueError if the model or the summary is missing, and if a file is damaged, is not the
    one that the summary vouches for, or holds NaN or infinity."""
    state: State = {"arrays": read_arrays(run, which)}
    saved = SavedFiles.of_run(run)
    if (name := of_round(run / HANDOUT, which).name) in saved:
        state["handout"] = saved.arrays(name)
    if (name := of_round(run / STRATEGY, which).name) in saved:
        data = saved.read(name)
        try:
            state["kept"] = parse_state(data)
        except ValueError as error:
            raise ValueError(f"{run / name} is refused: {error}") from error
        if not finite(state["kept"]):
            raise saved.refusal(f"{run / name} holds NaN or infinity")
    if (file := run / TOKEN).is_file():
        content = read_json(file)
        token = content.get(RUN_TOKEN) if isinstance(content, dict) else None
        if not isinstance(token, str):
            raise ValueError(f"{file} is damaged: it holds no {RUN_TOKEN}")
        state["token"] = token
    return state


def read_client_states(run: Path) -> dict[int, Arrays]:
    """The states of the run's clients by client id; {} if they are unknown, with a warning if the
    run had some and the whole folder was removed.

    Raises ValueError as `read_former`."""
    saved = SavedFiles.of_run(run)
    if CLIENTS not in saved:
        return {}
    if not (run / CLIENTS).is_dir():
        logger.warning("%s holds no %s/ any more: its clients begin without state", run, CLIENTS)
        return {}
    states: dict[int, Arrays] = {}
    digests: dict[str, str] = {}
    for file in (run / CLIENTS).glob("*.safetensors"):
        if not file.stem.isdecimal():
            raise ValueError(f"{file} is damaged: its name is no client's id")
        data = file.read_bytes()
        digests[file.name] = digest(data)
        states[int(file.stem)] = saved.parse(f"{CLIENTS}/{file.name}", data)
    saved.check(CLIENTS, digest_of_folder(digests))
    return states


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


def check_unseen(run: Path, saved: Config, config: Config, method: str) -> None:
    """Raise ValueError if a run with `config` that starts from `run`, configured as `saved`, would
    score clients on samples that its training clients were trained on."""
    data_keys = [key for key in config if is_of_data(key)]
    changed = [key for key in data_keys if saved.get(key) != config[key]]
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
