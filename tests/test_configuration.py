"""Every declared key is read, every key read is declared, and defaults stand the same twice."""

import re

import pytest

from fedapps.methods import METHODS
from fedapps.settings.config import accepted, defaults, override, parse_override, settings
from partitions.settings import taken
from strategies.privacy import Privacy

READ_BY_APPS = {"method", "dataset", "data_dir", "image_size", "partition", "num_clients",
                "train_fraction", "rounds", "model", "client_models", "from_dir", "standardize",
                "data_seed", "output_dir", "device", "cohort", "callbacks", "early_stopping",
                "serving", "serve_dir", "serve_every", "serve_timeout", "serve_again",
                "novel_shots", "checkpoint_every", "resume", "round_timeout"}  # fmt: skip
READ_BY_APPS |= set(taken(Privacy))
COMMON = {key.replace("-", "_") for key in defaults() if "." not in key}


def read_by(method: str) -> set[str]:
    """Every setting that the method's classes read."""
    entry = METHODS[method]
    return {*taken(entry.client.build), *accepted(entry.strategy), *accepted(entry.client)}


def declared(method: str) -> dict[str, object]:
    """The method's section of pyproject."""
    return {
        key.partition(".")[2].replace("-", "_"): value
        for key, value in defaults().items()
        if key.partition(".")[0] == method
    }


@pytest.mark.parametrize("method", METHODS)
def test_every_declared_key_of_a_method_is_read(method):
    assert declared(method).keys() <= read_by(method) | READ_BY_APPS


@pytest.mark.parametrize("method", METHODS)
def test_pyproject_holds_what_the_classes_declare(method):
    """A method's section over the common keys gives each setting the default of its declaration."""
    entry = METHODS[method]
    known = settings(defaults(), method)
    for name, one in {**entry.client.declared, **entry.strategy.declared}.items():
        value = known.get(name, one.default)  # a setting that the method does not offer
        assert (value, type(value)) == (one.default, type(one.default)), f"{method}: {name}"


def test_every_common_key_is_read():
    assert READ_BY_APPS.union(*(read_by(method) for method in METHODS)) >= COMMON


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fedprox.nu": 1.0}, ["'fedprox.nu'", "mu"]),
        ({"nonsense": 1}, ["'nonsense'", "num-clients"]),
        ({"lr": "fast"}, ["lr", "'fast'", "a number"]),
        ({"rounds": 1.5}, ["rounds", "1.5", "a whole number"]),
    ],
)
def test_a_bad_override_names_value_and_choices(changes, words):
    with pytest.raises(ValueError) as error:
        override(defaults(), changes)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("key", "meant", "names", "spared"),
    [
        ("momentun", "momentum", "batch-size", "afl.lr"),
        ("fedtta.adapt-l", "fedtta.adapt-lr", "fedtta.mu", "momentum"),
        ("fedtta+.mu", "fedtta++.mu", "pfedhn", "momentum"),
        ("resnet.width", None, "pfedhn", "pfedhn.lr"),
    ],
)
def test_an_unknown_key_is_told_its_nearest_and_those_beside_it(key, meant, names, spared):
    with pytest.raises(ValueError, match=f"unknown key '{re.escape(key)}'") as error:
        override(defaults(), {key: 1})
    said = str(error.value)
    assert f"did you mean {meant!r}" in said if meant else "did you mean" not in said
    words = set(re.split(r"[ ,]+", said))
    assert names in words
    assert spared not in words


def test_overrides_are_toml_values_and_bare_words():
    assert parse_override("lr=0.5") == ("lr", 0.5)
    assert parse_override("bound=true") == ("bound", True)
    assert parse_override("method=pfedhn") == ("method", "pfedhn")
    assert parse_override("partition.alpha=1") == ("partition.alpha", 1)
    assert override(defaults(), {"partition.alpha": 1})["partition.alpha"] == 1.0


def test_a_methods_own_key_wins_over_the_common_one():
    config = defaults() | {"lr": 0.5}
    assert settings(config, "fedavg")["lr"] == 0.5
    assert settings(config, "pfedhn")["lr"] == defaults()["pfedhn.lr"]
