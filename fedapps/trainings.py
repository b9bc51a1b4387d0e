"""Runs with the same training share it: the first one trains, the others only evaluate.

Methods such as TENT and T3A train as FedAvg (`Method.trains_as`). Their runs have one training if
all other settings agree that decide training; those declared as `evaluation` do not. Each such run
has the same ``training-dir``, ``.trainings/<digest>`` beside the runs' folders. There the run that
trains keeps its rounds (`strategies.core.kept_rounds`), a file for each evaluated round, until all
runs of the command have finished. Every run evaluates and writes its files as if it were alone."""

import hashlib
import inspect
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from logging import WARNING
from pathlib import Path

from flwr.common.logger import log

from fedapps.common.external_code import Value, is_reference
from fedapps.common.new_files import make_folder, remove_folder
from fedapps.files import library_versions, locked, write_files, write_text
from fedapps.methods import METHODS, chosen_from
from fedapps.saved import read_json, read_state, state_bytes
from fedapps.settings.config import Config, relevant, section_of, settings
from fedapps.settings.own_files import newest_file, places_of_user
from fedapps.settings.run import RunSettings
from fedapps.settings.saved_configurations import CIRCUMSTANCES
from fedapps.settings.sections import of_class, of_partitions
from strategies.core.kept_rounds import Content, KeptRounds

FOLDER = ".trainings"  # beside the folders of runs
SETTINGS = "training.json"  # in the folder of a training: what decides it
NOT_COMPARED = {*CIRCUMSTANCES, "method", "from-dir", "callbacks"}
ROUND_FILES = "round-*.safetensors"  # beside it
VERSIONS = "versions"  # in that file: of the libraries that have trained
LOGGERS = ("tensorboard", "mlflow", "wandb")  # callbacks that only read
# What a method that trains as another one has from it, and does not replace.
OF_TRAINING = {
    "client": (
        "train", "fit_locally", "loss", "rows", "begin", "load", "arrays", "shared_names",
        "shared", "is_personal", "personal",
    ),
    "strategy": (
        "sample", "draw", "training_nodes", "message_config", "expected", "baseline_arrays",
        "late_starts", "rebased", "to_server_names", "aggregate", "mean",
        "configure_train", "aggregate_train", "optimizers",
    ),
}  # fmt: skip

logger = logging.getLogger(__name__)  # for the user of the command; Flower's is for its own lines


def check_trains_as(method: str) -> None:
    """Raise ValueError if the method's `trains_as` cannot be true: it names no method that could be
    meant, or a class of the method replaces what decides training."""
    entry = METHODS[method]
    if not entry.trains_as:
        return
    says = f"{method} says trains_as={entry.trains_as!r}"
    try:
        other = METHODS[entry.trains_as]
    except ValueError as error:
        raise ValueError(f"{says}: {error}") from error
    if other.trains_as not in ("", entry.trains_as):
        raise ValueError(
            f"{says}, which trains as {other.trains_as!r}; write trains_as={other.trains_as!r}"
        )
    if entry.client.needs_state:
        raise ValueError(
            f"{says}, but {entry.client.__name__} keeps a state of each client, which no other run "
            "has; leave trains_as out"
        )
    for half, names in OF_TRAINING.items():
        cls = getattr(entry, half)
        for name in names:
            if not _is_same_member(cls, getattr(other, half), name):
                raise ValueError(
                    f"{says}, but {cls.__name__} replaces {name}, which decides training; "
                    "leave trains_as out"
                )
    # By default training messages carry what `personalize` gives.
    own = entry.strategy
    others = other.strategy
    sends_personalized = _is_same_member(own, others, "broadcast")
    if sends_personalized and not _is_same_member(own, others, "personalize"):
        raise ValueError(
            f"{says}, but {own.__name__} trains from what its personalize gives; "
            "override broadcast as well, to send the arrays as they are, or leave trains_as out"
        )


def _is_same_member(one: type, other: type, name: str) -> bool:
    """Whether both classes have the same function, or an equal value, under the name."""
    one_member = inspect.getattr_static(one, name, None)
    return bool(one_member == inspect.getattr_static(other, name, None))


def why_apart(config: Mapping[str, Value]) -> str:
    """Why a run trains by itself although its method trains as another one; "" if it may share its
    training, or if its method never does."""
    values = settings(config, str(config["method"]))
    callbacks = {name.strip() for name in str(config["callbacks"]).split(",")} - {"", *LOGGERS}
    if config["early-stopping"]:
        return "early-stopping ends each method's training by its own scores"
    if callbacks:
        return f"callbacks={min(callbacks)} may end or change each method's training"
    if values["dp"] != "none":
        return f"dp={values['dp']} draws noise for each run"
    if values["latency"] != "none" or values["round_quorum"] < 1 or values["round_deadline"]:
        return "rounds end before their last reply, and each run waits for its own messages"
    if config["from-dir"]:
        return "each run starts from a saved one"
    return ""


def training_of(config: Mapping[str, Value]) -> Config | None:
    """The settings that decide what a run trains, by keys without the method's section; None for a
    method that shares no training. Raises ValueError as `check_trains_as`."""
    method = str(config["method"])
    entry = METHODS[method]
    check_trains_as(method)
    if not entry.trains_as or not config["rounds"] or why_apart(config):
        return None
    known = of_class(RunSettings) | of_partitions()
    known |= of_class(entry.strategy) | of_class(entry.client)
    training: Config = {"trains-as": entry.trains_as}
    correcting = chosen_from(method, config)
    for key, value in relevant(config).items():
        name = key.removeprefix(f"{method}.")
        setting = known.get(name)
        if name in NOT_COMPARED or section_of(name) in correcting:
            continue
        if setting is not None and (setting.evaluation or value == setting.neutral):
            continue
        training[name] = value
    if is_reference(str(training["model"])):
        # The method decides how the arrays of a network from outside are named.
        uses_head = entry.client.uses_head(settings(config, method))
        training["uses-head"] = uses_head
        training["head-by-name"] = uses_head and entry.client.head_by_name
    return training


def digest_of(training: Config) -> str:
    """The name of a training's folder."""
    text = json.dumps(training, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def training_folders(configs: Sequence[Mapping[str, Value]], output: Path) -> list[str]:
    """The ``training-dir`` of each run whose folder lies in `output`: "" for a run that has its
    training for itself, unless an earlier command has begun to share it."""
    names = []
    for config in configs:
        training = training_of(config)
        names.append(digest_of(training) if training is not None else "")
    counts = Counter(names)
    folders = []
    for name in names:
        folder = output / FOLDER / name
        shared = name != "" and (counts[name] > 1 or folder.is_dir())
        folders.append(str(folder) if shared else "")
    return folders


@contextmanager
def kept_rounds(config: Mapping[str, Value]) -> Iterator[KeptRounds | None]:
    """The rounds of the run's training, which it shares; None if it shares none.

    Only one run at a time keeps rounds; another one takes what is there, and trains the rest for
    itself. Raises ValueError if the folder has the rounds of another training."""
    if not config["training-dir"]:
        yield None
        return
    folder = Path(str(config["training-dir"]))
    make_folder(folder.parent)
    make_folder(folder)
    with ExitStack() as stack:
        keeps = True
        try:
            stack.enter_context(locked(folder))
        except BlockingIOError:
            keeps = False
        _check(folder, config)
        rounds = _Files(folder, keeps)
        yield KeptRounds(rounds.read, rounds.write)


def _check(folder: Path, config: Mapping[str, Value]) -> None:
    """Write what decides the training to its folder. Raises ValueError if other settings are there,
    or if the run shares no training."""
    training = training_of(config)
    if training is None:
        reason = why_apart(config) or f"{config['method']} trains as no other method"
        raise ValueError(f"training-dir is {folder}, but the run trains by itself: {reason}")
    file = folder / SETTINGS
    if not file.is_file():
        with suppress(OSError):  # the rounds are not kept on a full disk either
            content = {**training, VERSIONS: library_versions()}
            write_text(file, json.dumps(content, indent=1))
        return
    there = read_json(file)
    there.pop(VERSIONS, None)  # see `forget_outdated`
    different = [key for key in {**there, **training} if there.get(key) != training.get(key)]
    if different:
        raise ValueError(
            f"training-dir is {folder}, which holds the rounds of another training: "
            f"{different[0]} is {there.get(different[0])!r} there and "
            f"{training.get(different[0])!r} here; leave training-dir out"
        )


class _Files:
    """The files of kept rounds in `folder`; without `keeps` they are only read."""

    def __init__(self, folder: Path, keeps: bool) -> None:
        self.folder = folder
        self.keeps = keeps

    def read(self, number: int) -> Content | None:
        """What was kept after that round; None if nothing was, or if the file is damaged."""
        file = self._file(number)
        if not file.is_file():
            return None
        try:
            return read_state(file)
        except ValueError as error:
            log(WARNING, "%s: %s; its rounds are trained again", file, error)
            return None

    def write(self, number: int, content: Content) -> None:
        """Keep that round, as long as the disk takes it."""
        if not self.keeps:
            return
        try:
            write_files({self._file(number): state_bytes(content)})
        except OSError as error:
            self.keeps = False
            log(
                WARNING,
                "round %s is not kept (%s); the other methods train the rounds from it on again",
                number,
                error,
            )

    def _file(self, number: int) -> Path:
        return self.folder / ROUND_FILES.replace("*", f"{number:08d}")


def keeps_rounds(config: Mapping[str, Value]) -> bool:
    """Whether an earlier command has kept rounds that the run will take."""
    if not config["training-dir"] or not config["resume"]:
        return False
    folder = Path(str(config["training-dir"]))
    return any(folder.glob(ROUND_FILES)) and not _why_outdated(config)


def forget_outdated(configs: Iterable[Mapping[str, Value]]) -> None:
    """Remove the kept rounds that runs do not take: those of runs that begin anew, and those of
    other data, code or libraries than today's, with a warning."""
    by_folder = {str(config["training-dir"]): config for config in configs}
    for folder, config in by_folder.items():
        reason = _why_outdated(config) if folder and config["resume"] else ""
        if reason:
            logger.warning("the rounds kept in %s are trained anew: %s", folder, reason)
        if reason or not config["resume"]:
            forget([folder])


def _why_outdated(config: Mapping[str, Value]) -> str:
    """Why the run would not train the rounds that are kept for it as they were; "" if it would."""
    file = Path(str(config["training-dir"])) / SETTINGS
    training = training_of(config)
    if training is None or not file.is_file():
        return ""
    try:
        versions = read_json(file).get(VERSIONS)
    except ValueError as error:
        return f"{file}: {error}"
    if versions != library_versions():
        return "other versions of libraries have trained them"
    kept_since_ns = file.stat().st_mtime_ns
    for place in places_of_user(training):
        newest = newest_file(place)
        if newest is not None and newest.changed_ns > kept_since_ns:
            return f"{newest.path} has changed since"
    return ""


def forget(folders: Iterable[str]) -> None:
    """Remove the kept rounds in these folders."""
    for folder in dict.fromkeys(folders):
        if folder:
            remove_folder(Path(folder))
            with suppress(OSError):  # another training is kept there
                Path(folder).parent.rmdir()
