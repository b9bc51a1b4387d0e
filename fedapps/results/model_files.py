"""Writes the model of a run and the state of its strategy, as of the reported round and of the last
one."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from clients.core.protocol import RUN_TOKEN
from fedapps.files import array_bytes, write_files
from fedapps.saved import HANDOUT, MODEL, STRATEGY, TOKEN, digest, of_round, state_bytes

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
