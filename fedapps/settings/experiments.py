"""Experiments: the methods, seeds and settings in a TOML file or on a command line."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedapps.common import external_code
from fedapps.common.external_code import Value
from fedapps.common.settings import present_keys
from fedapps.console import make_console, say
from fedapps.settings.config import check, listed, parse_override, set_twice
from fedapps.settings.published_tables import FOLDER, published_columns


def experiments_root() -> Path:
    """The folder of the shipped experiments."""
    package = Path(__file__).parents[1]  # installed, it holds the experiments
    roots = (package / "experiments", package.parent / "experiments")
    return next(root for root in roots if root.is_dir())


def experiments() -> dict[str, Path]:
    """The shipped experiments, ``<paper>/<table>`` → file."""
    root = experiments_root()
    found: dict[str, Path] = {}
    for file in sorted(root.rglob("*.toml")):
        place = file.relative_to(root)
        if place.parts[0] != FOLDER:
            found[str(place.with_suffix(""))] = file
    return found


@dataclass(frozen=True)
class Experiment:
    """The methods, seeds and settings of a file or a command line, not yet checked."""

    settings: dict[str, Any] = field(default_factory=dict)  # flat keys with one value
    grid: dict[str, list[Value]] = field(default_factory=dict)  # flat keys with several
    methods: str = ""  # separated by commas, as the seeds are
    seeds: str = ""
    published: Any = None  # its [published] tables, see `fedapps.results.published`
    tables: tuple[str, ...] = ()  # the papers' tables from which `published` comes
    # Why a setting is not the paper's, by key; "released" if it takes none of the authors' program
    reasons: dict[str, str] = field(default_factory=dict)
    search: Any = None  # its [search] table, see `fedapps.tuning`
    include: tuple[str, ...] = ()  # experiments that it consists of, see `parts`
    source: str = ""  # the file's text
    from_file: frozenset[str] = field(default=frozenset(), compare=False)  # keys of both
    methods_by_default: bool = False  # nobody named the methods: those of the main job

    def __or__(self, other: "Experiment") -> "Experiment":
        """This one with what `other` says instead: a key with one value or several, and a common
        key also for the methods whose own values stand here."""
        replaced = self._replaced_by(other)
        settings = {key: value for key, value in self.settings.items() if key not in replaced}
        grid = {key: values for key, values in self.grid.items() if key not in replaced}
        return Experiment(
            settings | other.settings,
            grid | other.grid,
            other.methods or self.methods,
            other.seeds or self.seeds,
            other.published or self.published,
            other.tables or self.tables,
            self.reasons | other.reasons,
            other.search or self.search,
            other.include or self.include,
            other.source or self.source,
            (self.from_file - replaced) | other.from_file,
            other.methods_by_default if other.methods else self.methods_by_default,
        )

    @property
    def keys(self) -> set[str]:
        """All its keys, with one value or several."""
        return {*self.settings, *self.grid}

    def _replaced_by(self, other: "Experiment") -> set[str]:
        """Its keys whose values those of `other` replace."""
        # Options of a dataset's or a partition rule's code may be called as a common key is.
        texts = [*self.settings.values(), *self.grid.values(), *other.settings.values()]
        of_data = set(external_code.named([*texts, *other.grid.values()]))
        replaced = set()
        for key in self.keys:
            section, _, name = key.rpartition(".")
            of_method = section != "partition" and section not in of_data
            if key in other.keys or (of_method and name in other.keys):
                replaced.add(key)
        return replaced

    def check_single(self, name: str, verb: str) -> None:
        """Raise ValueError, naming the others, if it includes others; `verb` says what to do."""
        if self.include:
            raise ValueError(
                f"{name} includes others; {verb} one of them: {', '.join(self.include)}"
            )

    def allow(self) -> None:
        """Let its references be imported: the user named this experiment. It is no saved run."""
        external_code.allow(
            *external_code.named([self.settings, self.grid, self.methods, self.search])
        )


def parts(asked: Experiment, folder: Path) -> list[tuple[Experiment, Path]]:
    """The experiments that an experiment includes, with its changes, each with a folder of its name
    in `folder`. The experiment itself if it includes none.

    Raises ValueError for an experiment that includes itself, and for two of one name."""
    if not asked.include:
        return [(asked, folder)]
    short_names = [name.rpartition("/")[2].removesuffix(".toml") for name in asked.include]
    for name in short_names:
        if short_names.count(name) > 1:
            raise ValueError(f"two included experiments would write to {folder / name}; rename one")
    changes = replace(asked, include=(), source="")
    found = []
    for name, short_name in zip(asked.include, short_names, strict=True):
        part = read_experiment(name)
        is_circular = name in part.include or set(part.include) & set(asked.include)
        if is_circular:
            raise ValueError(f"{name} includes itself")
        found += parts(part | changes, folder / short_name)
    return found


def read_arguments(arguments: Sequence[str], *, main: bool = True) -> Experiment:
    """The experiment that a command's arguments describe: a file's name and ``key=value`` changes.

    With `main`, they change the main job unless the file names methods. Raises ValueError for two
    experiments."""
    names = []
    changes = []
    for argument in arguments:
        if "=" in argument:
            changes.append(argument)
        else:
            names.append(argument)
    if len(names) > 1:
        raise ValueError(f"one experiment at a time, not {', '.join(names)}")
    experiment = read_experiment(names[0]) if names else Experiment()
    # A file that names methods or includes other files is complete without the main job.
    if main and not experiment.methods and not experiment.include:
        experiment = main_job() | experiment
    return experiment | parse_experiment(changes)


def main_job() -> Experiment:
    """The experiment of a command that names none. Results hold no copy of its file."""
    return replace(read_experiment("main"), source="", methods_by_default=True)


def read_experiment(name: str) -> Experiment:
    """An experiment's file; a list of values spans a grid.

    `name` is a file, or a shipped experiment: ``fedtta/table1-mnist``, also with ``experiments/``
    in front or ``.toml`` at the end."""
    shipped = experiments()
    short_name = name.removeprefix("experiments/").removesuffix(".toml")
    path = Path(name) if Path(name).is_file() else shipped.get(short_name)
    if path is None:
        raise ValueError(
            f"{name!r} is neither key=value, nor an experiment's file, nor one of the shipped "
            f"experiments: {', '.join(shipped) or 'none'}"
        )
    try:
        text = path.read_text("utf-8-sig")  # editors of Windows begin with a mark
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no valid TOML: {error}") from error
    methods, seeds = _lists(content)
    tables = {key: content.pop(key, None) for key in ("published", "search")}
    tables["reasons"] = _reasons(content.pop("reasons", {}))
    if names := _named_tables(tables["published"]):
        labels = split_names("methods", methods)
        tables["published"] = published_columns(names, labels, experiments_root())
        tables["tables"] = names
    included = _listed("include", content.pop("include", None))
    tables["include"] = tuple(included.split(",")) if included else ()
    asked = _spanned(_flat(content), methods, seeds)
    return replace(asked, **tables, source=text, from_file=frozenset(asked.keys))


def _named_tables(published: Any) -> tuple[str, ...]:
    """The tables of the papers that `published` names; () if it holds values instead."""
    names = published if isinstance(published, list) else [published]
    if all(isinstance(name, str) for name in names):
        return tuple(names)
    return ()


def _reasons(table: Any) -> dict[str, str]:
    """The [reasons] of a file, by key. Raises ValueError for anything but texts."""
    reasons = _flat(table) if isinstance(table, dict) else {"reasons": table}
    for key, reason in reasons.items():
        if not isinstance(reason, str) or not reason.strip():
            raise ValueError(f"[reasons] has {key} = {reason!r:.100}; a reason is a sentence")
    return reasons


def parse_experiment(arguments: Sequence[str]) -> Experiment:
    """An experiment of ``key=value`` arguments; ``lr=0.01,0.1`` spans a grid.

    A text with commas is one value if it is quoted or if the setting is itself a list. Of two
    arguments with one key the last one counts, and a line says so."""
    for note in set_twice(arguments):
        say(make_console(stderr=True), note)
    changes: dict[str, Any] = {}
    for argument in arguments:
        key, _, text = argument.partition("=")
        is_quoted = text.startswith(('"', "'"))
        words = [argument]
        if "," in text and not is_quoted and not listed(key):
            words = [f"{key}={word.strip()}" for word in text.split(",")]
        values = [parse_override(word)[1] for word in words]
        changes[key] = values[0] if len(values) == 1 else values
    methods, seeds = _lists(changes)
    return _spanned(changes, methods, seeds)


def _lists(named: dict[str, Any]) -> tuple[str, str]:
    """Take the methods and seeds out of `named`. Their keys may be in the singular."""
    for singular, plural in (("method", "methods"), ("seed", "seeds")):
        if singular in named and plural in named:
            raise ValueError(f"there is {singular} and there are {plural}; leave one of the two")
    return (
        _listed("methods", named.pop("methods", named.pop("method", None))),
        _listed("seeds", named.pop("seeds", named.pop("seed", None))),
    )


def _listed(key: str, value: Any) -> str:
    """A list of names or numbers, separated by commas; "" if there is none.

    Raises ValueError for one without entries, and for other things than texts and numbers."""
    if value is None:
        return ""
    names = value if isinstance(value, list) else [value]
    text = ""
    if all(type(name) in (str, int) for name in names):
        text = ",".join(map(str, names))
    if not text.strip(", "):
        raise ValueError(f"{key} is {value!r:.200}; it must be a name, a number, or a list of some")
    return text


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A TOML table with dotted keys, as Flower's `flatten_dict`, which refuses lists."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _spanned(named: dict[str, Any], methods: str, seeds: str) -> Experiment:
    """The experiment of these settings: a list of values spans a grid."""
    named = present_keys(named)
    single: dict[str, Any] = {}
    grid: dict[str, list[Value]] = {}
    for key, value in named.items():
        if isinstance(value, list):
            grid[key] = value
        else:
            single[key] = value
    return Experiment(single, grid, methods, seeds)


def split_names(what: str, text: str) -> list[str]:
    """The names in a comma-separated text. Raises ValueError for none and for duplicates."""
    names: list[str] = []
    for part in text.split(","):
        # A variant's settings may be set apart by several blanks.
        name = " ".join(part.split())
        if not name:
            continue
        if name in names:
            raise ValueError(f"{what} name {name!r} twice")
        names.append(name)
    if not names:
        raise ValueError(f"{what} are {text!r}; name at least one")
    return names


def parse_seeds(text: str) -> list[int]:
    """The seeds in a comma-separated text. Raises ValueError for what is no seed."""
    seeds = []
    for seed in split_names("seeds", text):
        if not seed.isdecimal():
            raise ValueError(
                f"seed {seed!r} is not a whole number from 0; write each seed, as in 0,1,2"
            )
        seeds.append(int(check("seed", int(seed), 0)))
    return seeds
