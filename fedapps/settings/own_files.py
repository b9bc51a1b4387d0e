"""The user's files that a configuration names: data, and modules of code."""

import sys
from collections.abc import Mapping
from pathlib import Path

from fedapps.common import external_code
from fedapps.common.file_states import FileState, file_states
from fedapps.common.settings import Value
from partitions.datasets.loading import own_path


def places_of_user(config: Mapping[str, Value]) -> list[Path]:
    """The file or folder of the user's data, and the files of the modules that the configuration
    names."""
    places: list[Path] = []
    data = own_path(str(config["dataset"]), str(config["data-dir"]))
    if data is not None:
        places.append(data)
    for reference in external_code.named(config):
        module = sys.modules.get(reference.partition(":")[0])
        file = getattr(module, "__file__", None)
        if file and Path(file).is_file():
            places.append(Path(file))
    return places


def newest_file(place: Path) -> FileState | None:
    """The file that changed last, of a folder or of the file `place`; None if there is none."""
    return max(file_states(place), key=_time_of_change, default=None)


def _time_of_change(file: FileState) -> int:
    return file.changed_ns
