"""Checkpoints: the whole state of a run in one file, which is refused if it is damaged.

`fedapps.saved` has the format of the file."""

from pathlib import Path

from fedapps.common.lazy import lazy
from fedapps.common.new_files import make_folder
from fedapps.files import write_files
from fedapps.saved import CHECKPOINTS, State, read_state
from fedapps.settings.config import Config
from fedapps.settings.saved_configurations import differences

# The format has moved; its former names stay for one release.
__getattr__ = lazy(__name__, dict.fromkeys(("parse_state", "state_bytes"), "fedapps.saved"))

KEPT = 2  # if the newest is damaged, the one before it is used


def write_checkpoint(run: Path, round_: int, content: bytes) -> None:
    """Write the checkpoint of a round to the folder `run`; of older ones only one stays."""
    make_folder(run / CHECKPOINTS)  # the older ones of another folder are not removed
    write_files({_file(run, round_): content})
    for old in [r for r in _saved_rounds(run) if r <= round_][:-KEPT]:
        _file(run, old).unlink()


def newest_checkpoint(run: Path, config: Config) -> tuple[State | None, list[str]]:
    """The state of the newest undamaged checkpoint in the folder `run`, or None, and why newer
    ones are refused."""
    refused: list[str] = []
    for file in sorted((run / CHECKPOINTS).glob("round-*.safetensors"), reverse=True):
        try:
            content = read_state(file)
            if not all(isinstance(content.get(part), dict) for part in ("config", "state")):
                raise ValueError("it holds no run's state")
            if other := differences(content["config"], config):
                raise ValueError(f"it is another run's: {other}")
            return content["state"], refused
        except ValueError as error:
            refused.append(f"{file} is refused: {error}")
    return None, refused


def next_round(state: State) -> int:
    """The round with which a run continues from a checkpoint's `state`."""
    return int(state["strategy"]["round"]) + 1


def saved_round(run: Path) -> int:
    """The round of the newest checkpoint in the folder `run`, by its name; 0 if there is none."""
    return max(_saved_rounds(run), default=0)


def _saved_rounds(run: Path) -> list[int]:
    """The rounds of all checkpoints in the folder, ascending."""
    names = [f.stem.removeprefix("round-") for f in (run / CHECKPOINTS).glob("round-*.safetensors")]
    return sorted(int(name) for name in names if name.isdecimal())


def _file(run: Path, round_: int) -> Path:
    return run / CHECKPOINTS / f"round-{round_:08d}.safetensors"
