"""Settings: what a user may choose of a class, declared once, on the class that reads it.

    class TENTClient(Client):
        adapt_steps = setting(10, "SGD steps on the entropy when scored", COUNT)

    class PatientTENTClient(TENTClient):
        adapt_steps = 50

On a class the attribute is the default. On an object it is the value given to the constructor.
A subclass inherits the declaration and may replace the default by a plain value."""

import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, ClassVar, TypeVar

from fedapps.common.class_members import check_members
from fedapps.common.tasks import ForTasks

Value = str | int | float | bool
T = TypeVar("T", str, int, float, bool)

RATE = "[0, 100]"  # learning rates
COUNT = "[0, 1000000]"
POSITIVE_INT = "[1, 1000000]"
WIDTH = "[1, 4096]"
NONNEGATIVE = "[0, 1000000]"
WEIGHT = NONNEGATIVE  # its former name, for one release
ROUNDS = "[0, 10000000]"
POSITIVE = "(0, 100]"
MOMENTUM = "[0, 1)"
SHARE = "[0, 1]"
SECONDS = "(0, 1000000000]"
WHOLE = "[0, 9223372036854775807]"

KINDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
BESIDE = "x-beside"  # keywords of our own in JSON Schema
EVALUATION = "x-evaluation"
LIST = "comma-separated"  # format, in JSON Schema, of a text that is a list
LONGEST = 4096  # characters of a text
FORMER_KEYS = {  # understood for one release
    "cohort": "stacked-clients",
    "bound": "report-generalization-bound",
    "select": "selection-metric",
    "mean-over": "average-over",
    "only-model": "restrict-to-model",
    "partition.base": "partition.base-rule",
    "hyperfedzero.entropy": "hyperfedzero.entropy-weight",
}


@dataclass(frozen=True)
class Interval:
    """Numbers from `low` to `high`, an end excluded where it is open."""

    low: float
    high: float
    open_low: bool = False
    open_high: bool = False

    @staticmethod
    @cache
    def parse(text: str) -> "Interval":
        """From its mathematical notation, such as ``(0, 1]``."""
        match = re.fullmatch(r"([\[(])(\S+), (\S+)([\])])", text)
        if match is None:
            raise ValueError(f"{text!r} is no interval; write it as '(0, 1]'")
        left, low, high, right = match.groups()
        return Interval(_number(low), _number(high), left == "(", right == ")")

    def __contains__(self, value: float) -> bool:
        """Whether it holds the number; no range holds NaN."""
        if value == self.low:
            return not self.open_low
        if value == self.high:
            return not self.open_high
        return self.low < value < self.high


def _number(text: str) -> float:
    """An end of an interval; an integer stays one, since a float is exact up to 2⁵³ alone."""
    return float(text) if "." in text else int(text)


@dataclass(frozen=True)
class Setting:
    """A default with its meaning and its range: an interval of numbers or a choice of texts.

    The default decides the type. The text of a `listed` one is a list, separated by commas.
    `beside` says where this one is read, by the value of another one: "variant=exact", or
    "robust!=none". The default is that of a run's configuration; an object that is constructed
    without the setting has the value `by_hand`, if there is one.

    An `evaluation` setting decides evaluations alone: whatever its value is, the same arrays are
    trained. With the value `neutral`, training is that of a class without the setting."""

    default: Value
    meaning: str
    values: str | tuple[str, ...] = ""
    listed: bool = False
    beside: str = ""
    by_hand: Value | None = None
    evaluation: bool = False
    neutral: Value | None = None
    longest: int = LONGEST  # characters of a text

    def __get__(self, instance: object, owner: type | None = None) -> Value:
        """The default, where an object has no value of its own."""
        return self.default

    def is_default(self, value: Any) -> bool:
        """Whether `value` is the default, which was checked when it was declared."""
        return type(value) is type(self.default) and bool(value == self.default)

    def checked(self, key: str, value: Any) -> Value:
        """`value` in the setting's type. Raises ValueError, naming the key, the value and what it
        must be."""
        kind = type(self.default)
        if self.listed and type(value) in (int, float):  # a list of one number
            value = str(value)
        if kind is float and type(value) is int and abs(value) < 10**300:
            value = float(value)
        if type(value) is not kind:
            raise ValueError(f"{key} is {value!r:.200}; it must be {KINDS[kind]}")
        if isinstance(self.values, tuple):
            if value not in self.values:
                known = ", ".join(self.values)
                raise ValueError(f"unknown {key} {value!r:.200}; known: {known}")
        elif (
            self.values and not isinstance(value, str) and value not in Interval.parse(self.values)
        ):
            raise ValueError(f"{key} is {value!r:.200}; it must lie in {self.values}")
        if isinstance(value, str) and (len(value) > self.longest or not value.isprintable()):
            raise ValueError(
                f"{key} is {value!r:.200}; it must be one line of at most {self.longest} characters"
            )
        return value

    @property
    def range(self) -> str:
        """Its interval or its choices; "" where any value of the type will do."""
        return self.values if isinstance(self.values, str) else ", ".join(self.values)

    def schema(self) -> dict[str, Any]:
        """JSON Schema of its value, or of a list of values, as a grid of runs has them."""
        value: dict[str, Any] = {"type": JSON_TYPES[type(self.default)]}
        if isinstance(self.values, tuple):
            value["enum"] = list(self.values)
        elif self.values:
            ends = Interval.parse(self.values)
            value["exclusiveMinimum" if ends.open_low else "minimum"] = ends.low
            value["exclusiveMaximum" if ends.open_high else "maximum"] = ends.high
        if self.longest != LONGEST:
            value["maxLength"] = self.longest
        if self.listed:
            value["format"] = LIST
        either = [value, {"type": "array", "items": value}]
        schema = {"description": self.meaning, "default": self.default, "anyOf": either}
        if self.beside:
            schema[BESIDE] = self.beside
        if self.evaluation:
            schema[EVALUATION] = True
        return schema

    @classmethod
    def from_schema(cls, schema: Mapping[str, Any]) -> "Setting":
        """The setting that `schema` describes."""
        value = schema["anyOf"][0]
        values: str | tuple[str, ...] = tuple(value.get("enum", ())) or ""
        low = value.get("minimum", value.get("exclusiveMinimum"))
        if low is not None:
            high = value.get("maximum", value.get("exclusiveMaximum"))
            left = "[" if "minimum" in value else "("
            right = "]" if "maximum" in value else ")"
            values = f"{left}{low}, {high}{right}"
        listed = value.get("format") == LIST
        beside = schema.get(BESIDE, "")
        return cls(
            schema["default"],
            schema["description"],
            values,
            listed,
            beside,
            evaluation=schema.get(EVALUATION, False),
            longest=value.get("maxLength", LONGEST),
        )


def setting(
    default: T,
    meaning: str,
    values: str | tuple[str, ...] = "",
    *,
    listed: bool = False,
    beside: str = "",
    by_hand: T | None = None,
    evaluation: bool = False,
    neutral: T | None = None,
    longest: int = LONGEST,
) -> T:
    """Declare a setting in a class's body, see `Setting`. Raises ValueError if a default lies
    outside of its own range."""
    declared = Setting(
        default, meaning, values, listed, beside, by_hand, evaluation, neutral, longest
    )
    declared.checked(meaning, default)
    for value in (by_hand, neutral):
        if value is not None:
            declared.checked(meaning, value)
    return declared  # type: ignore[return-value]  # on the class it reads as its default


class Configured:
    """A class whose settings are declared on it, and given to its constructor by keyword."""

    declared: ClassVar[Mapping[str, Setting]] = {}  # its settings by attribute, its bases' included
    renamed: ClassVar[Mapping[str, str]] = {}  # present names of attributes by their former ones
    # Settings that serve only some tasks, by attribute.
    settings_for_tasks: ClassVar[Mapping[str, ForTasks]] = {}
    _by_hand: ClassVar[Mapping[str, Value]] = {}  # defaults of objects, where they are others

    def __init_subclass__(cls, **options: Any) -> None:
        """Collect the declarations; a plain value replaces an inherited default.

        Raises TypeError for a name that seems to be a misspelling, see `class_members`, and for a
        setting that is replaced by what is no value."""
        super().__init_subclass__(**options)
        known: dict[str, Setting] = {}
        for base in reversed(cls.__mro__[1:]):
            known |= {name: s for name, s in vars(base).items() if isinstance(s, Setting)}
        for name, value in list(vars(cls).items()):
            if name in known and isinstance(value, Value):
                default = known[name].checked(key_of(name), value)
                setattr(cls, name, replace(known[name], default=default, by_hand=None))
            elif name in known and not isinstance(value, Setting | property):
                raise TypeError(
                    f"{cls.__name__} sets {name!r} to {value!r:.80}; it is a setting: give it a "
                    "value, or declare it by setting(…)"
                )
            if isinstance(vars(cls)[name], Setting):
                known[name] = vars(cls)[name]
        check_members(cls, known, cls.renamed)
        cls.declared = known
        cls._by_hand = {n: s.by_hand for n, s in known.items() if s.by_hand is not None}
        cls.__signature__ = _signature(cls)  # type: ignore[attr-defined]

    def __init__(self, **settings: Any) -> None:
        vars(self).update(self._by_hand)
        vars(self).update(self.check(**settings))

    @classmethod
    def check(cls, **settings: Any) -> dict[str, Value]:
        """The values in their declared types. Raises ValueError for one out of its range, TypeError
        for a setting that the class does not have."""
        for name in settings.keys() - cls.declared.keys():
            present = present_key(key_of(name)).replace("-", "_")
            if present in cls.declared and present not in settings:
                settings[present] = settings.pop(name)
        if unknown := settings.keys() - cls.declared.keys():
            known = ", ".join(sorted(cls.declared)) or "none"
            raise TypeError(f"{cls.__name__} has no setting {min(unknown)!r}; it has {known}")
        return {
            name: value
            if (declared := cls.declared[name]).is_default(value)
            else declared.checked(key_of(name), value)
            for name, value in settings.items()
        }


@lru_cache(maxsize=256)
def taken(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of what a function takes by keyword alone."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind == p.KEYWORD_ONLY)


def present_key(key: str, *, silent: bool = False) -> str:
    """The key under its present name. A former one gives a FutureWarning, unless `silent`."""
    if key not in FORMER_KEYS:
        return key
    present = FORMER_KEYS[key]
    if not silent:
        text = f"the setting {key!r} is now called {present!r}; a later release refuses {key!r}"
        warnings.warn(text, FutureWarning, stacklevel=3)
    return present


def present_keys(changes: Mapping[str, Any], *, silent: bool = False) -> dict[str, Any]:
    """The changes under present names. Raises ValueError for a setting under both of its names."""
    if FORMER_KEYS.keys().isdisjoint(changes):
        return dict(changes)
    renamed: dict[str, Any] = {}
    for key, value in changes.items():
        present = present_key(key, silent=silent)
        if present in renamed or (present != key and present in changes):
            raise ValueError(f"{key} and {present} are the same setting; leave one out")
        renamed[present] = value
    return renamed


def key_of(name: str) -> str:
    """The key of a configuration that sets the attribute `name`."""
    return name.replace("_", "-")


def keyword_arguments(config: Mapping[str, Value], *sections: str) -> dict[str, Value]:
    """The settings in sections of a configuration by the attributes that they set, those of a later
    section over those of an earlier one; "" is the section of common keys."""
    by_section = _sections(tuple(config))
    arguments: dict[str, Value] = {}
    for section in sections:
        for key, name in by_section.get(section, ()):
            arguments[name] = config[key]
    return arguments


@lru_cache(maxsize=8)
def _sections(keys: tuple[str, ...]) -> dict[str, list[tuple[str, str]]]:
    """Keys and their attributes by section. Every message needs them, so the results are cached."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for key in keys:
        section, _, name = key.rpartition(".")
        sections.setdefault(section, []).append((key, name.replace("-", "_")))
    return sections


def _signature(cls: type[Configured]) -> inspect.Signature:
    """What the constructor takes: the parameters of its bases' constructors, and its settings."""
    taken: dict[str, inspect.Parameter] = {}
    for base in reversed(cls.__mro__):
        if "__init__" in vars(base):
            taken |= dict(list(inspect.signature(vars(base)["__init__"]).parameters.items())[1:])
    named = [p for p in taken.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    keyword = inspect.Parameter.KEYWORD_ONLY
    settings = [
        inspect.Parameter(
            name, keyword, default=cls._by_hand.get(name, s.default), annotation=type(s.default)
        )
        for name, s in cls.declared.items()
    ]
    return inspect.Signature(sorted([*named, *settings], key=lambda p: p.kind))
