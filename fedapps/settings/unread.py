"""Settings that no run reads are refused: those of methods that do not run, options that the
partition rule or the dataset does not read, and settings beside another one that is off."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedapps.common import external_code
from fedapps.common.external_code import Value
from fedapps.methods import METHODS, chosen_from
from fedapps.settings.config import Config, declared, section_of
from fedapps.settings.variants import Variant, ancestors, lineage
from partitions.datasets.catalog import DATASETS, Info
from partitions.datasets.description import IMAGE, TABLE, Description
from partitions.rules.registry import RULES, options_of

# Settings that the package's datasets do not read.
OF_OWN_DATA = ("image-size", "label", "inputs", "columns", "ignore", "missing", "skip-broken")
# The forms of a user's own data with which a setting is read.
READ_WITH = {
    "image-size": "files of images",
    "label": "files",
    "inputs": "arrays and with LEAF's texts",
    "columns": "tables",
    "ignore": "tables",
    "missing": "tables",
}


def check_read(
    config: Mapping[str, Value],
    changes: Mapping[str, Any],
    methods: Sequence[str],
    from_file: Collection[str] = (),
) -> list[str]:
    """Raise ValueError for one of the `changes`, which `config` has, that no run reads: a setting
    of a method that does not run, or an option that the partition rule or dataset does not read.

    A change that is `from_file` may be meant for other runs. Returns a sentence for each option
    that some of the runs do not read."""
    variants = [Variant.parse(method) for method in methods]
    _check_sections(config, changes, variants, from_file)
    # Labels set options, too.
    keys = dict.fromkeys(changes)
    for variant in variants:
        keys |= dict.fromkeys(variant.settings)
    notes = []
    for key in keys:
        note = _unread_option(key, config, changes, variants, key in from_file)
        if note:
            notes.append(note)
    return notes


def _check_sections(
    config: Mapping[str, Value],
    changes: Mapping[str, Any],
    variants: Sequence[Variant],
    from_file: Collection[str],
) -> None:
    """Raise ValueError for a change, not `from_file`, in the section of a method that does not
    run."""
    methods = list(dict.fromkeys(variant.method for variant in variants))
    read_sections: set[str] = set()
    for variant in variants:
        of_label = {f"{variant.method}.{key}": value for key, value in variant.settings.items()}
        chosen = chosen_from(variant.method, {**config, **variant.settings, **of_label})
        for method in (variant.method, *chosen):
            # A method that extends another one inherits the settings of its section.
            read_sections.update(lineage(method))
    for key, value in changes.items():
        section = section_of(key)
        if section not in METHODS.known() or section in read_sections or key in from_file:
            continue
        raise ValueError(
            f"{key}={value} changes nothing here: {section} does not run, but {', '.join(methods)}"
        )


def _unread_option(
    key: str,
    config: Mapping[str, Value],
    changes: Mapping[str, Any],
    variants: Sequence[Variant],
    is_from_file: bool,
) -> str:
    """A sentence if some runs do not read an option of the partition or of the user's own data;
    "" if all do. Raises ValueError if none reads it, unless `is_from_file`."""
    reading = 0  # runs that have the option and read it
    unread = []  # the configurations of those that do not
    for variant in variants:
        if key not in changes and key not in variant.settings:
            continue
        run = {**config, **variant.settings}
        if is_read(key, run):
            reading += 1
        else:
            unread.append(run)
    if not unread:
        return ""
    source = "dataset" if key in OF_OWN_DATA else "partition"
    names: list[str] = []
    for run in unread:
        names += _datasets(run) if source == "dataset" else [str(run["partition"])]
    setting = f"{key}={changes[key]}" if key in changes else key
    distinct = ", ".join(dict.fromkeys(names))
    if reading == 0 and not is_from_file:
        raise ValueError(
            f"{setting} changes nothing here, since {source} is {distinct}; it is read "
            f"{_readers(key)}"
        )
    return f"{setting} changes nothing where the {source} is {distinct}"


def _readers(key: str) -> str:
    """What reads an option of the partition or of a user's own data."""
    if key in OF_OWN_DATA:
        return "with your own images or tables"
    option = key.removeprefix("partition.")
    return f"by {', '.join(name for name, rule in RULES.items() if option in rule.options)}"


def is_read(key: str, config: Config) -> bool:
    """Whether the configuration's partition rule or datasets read the key; True for others."""
    if key in OF_OWN_DATA:
        # A dataset that is not in the table is a path to the user's data.
        return not DATASETS.keys() >= set(_datasets(config))
    section, _, name = key.rpartition(".")
    return section != "partition" or name in options_of(config)


def check_read_by_data(
    changes: Mapping[str, Any],
    runs: Sequence[tuple[Config, Info]],
    from_file: Collection[str] = (),
) -> list[str]:
    """Raise ValueError for one of the `changes` that no run reads, because of the form of the
    user's own data: an array has no columns. `runs` are configurations with their dataset's `Info`.

    A change that is `from_file` may be meant for other data. Returns a sentence for each change
    that some of the runs do not read."""
    notes = []
    for key in changes:
        if key not in READ_WITH:
            continue
        unread = []
        for config, info in runs:
            if info.inputs is not None and not _data_read(key, config, info.inputs):
                unread.append(f"{config['dataset']} ({info.inputs.kind})")
        if not unread:
            continue
        datasets = ", ".join(dict.fromkeys(unread))
        setting = f"{key}={changes[key]}"
        if len(unread) == len(runs) and key not in from_file:
            raise ValueError(
                f"{setting} changes nothing here, since dataset is {datasets}; it is read with "
                f"{READ_WITH[key]}; leave it out, or save the data in this form"
            )
        notes.append(f"{setting} changes nothing where the dataset is {datasets}")
    return notes


def _data_read(key: str, config: Config, inputs: Description) -> bool:
    """Whether the key of `READ_WITH` is read with a user's own data that have these inputs; True
    for the setting's default, which needs no reader."""
    if config[key] == declared()[key].default:
        return True
    dataset = str(config["dataset"])
    is_function = external_code.is_reference(dataset)
    if key == "label":
        return not is_function
    if key == "image-size":
        is_array = Path(dataset).suffix in (".npz", ".npy")
        return inputs.kind == IMAGE and not is_array and not is_function
    if key == "inputs":
        return config[key] in (inputs.kind, inputs.texts)
    return inputs.kind == TABLE


def _datasets(config: Config) -> list[str]:
    names = [str(config["dataset"])]
    if "novel-dataset" in options_of(config):
        names.append(str(config["partition.novel-dataset"]))
    return names


def check_companions(
    config: Mapping[str, Any],
    changes: Collection[str],
    methods: Sequence[str],
    from_file: Collection[str] = (),
) -> None:
    """Raise ValueError for one of the `changes`, which `config` has, or for a setting of a method's
    label, that no run reads, as its declaration's `beside` says.

    A key that is `from_file` may be meant for a run whose settings differ."""
    wanted: dict[str, str] = {}  # of each key that some run does not read, why not
    read: set[str] = set()
    for label in methods:
        variant = Variant.parse(label)
        run = variant.apply(config)
        for key in {*changes, *variant.settings}:
            if key in from_file and key not in variant.settings:
                continue
            for own_key, condition in _conditions(key, variant.method, run):
                if _holds(condition, variant.method, run):
                    read.add(key)
                else:
                    wanted[key] = _unread(own_key, condition, variant.method, run)
    for key in sorted(wanted.keys() - read):
        raise ValueError(wanted[key])


def check_beside(method: str, config: Mapping[str, Any], given: Collection[str]) -> None:
    """The same for one method and the keys that were `given` for it."""
    check_companions({**config, "method": method}, given, [method])


def _conditions(key: str, method: str, config: Config) -> Iterator[tuple[str, str]]:
    """The key that holds for the method, with the condition of its declaration, if it has one."""
    section, _, name = key.rpartition(".")
    if section not in ("", method, *ancestors(method)):
        return
    own = _key(name, method, config)
    if own in declared() and declared()[own].beside:
        yield own, declared()[own].beside


def _holds(condition: str, method: str, config: Config) -> bool:
    """Whether the setting that the condition names has a value with which others are read."""
    name, unequal, value = _parsed(condition)
    return (str(config[_key(name, method, config)]) == value) != unequal


def _parsed(condition: str) -> tuple[str, bool, str]:
    """The name in a condition, whether it says "!=", and the value."""
    name, _, value = condition.partition("=")
    return name.removesuffix("!"), name.endswith("!"), value


def _key(name: str, method: str, config: Config) -> str:
    """The key that holds for the method."""
    own = f"{method}.{name}"
    return own if own in config else name


def _unread(key: str, condition: str, method: str, config: Config) -> str:
    """What to say of a key that is not read."""
    name, unequal, value = _parsed(condition)
    other = _key(name, method, config)
    needed = f"set {other} as well" if unequal else f"set {other} to {value}"
    return (
        f"{key}={config[key]} changes nothing here, since {other} is {config[other]!r}; {needed}, "
        "or leave it out"
    )
