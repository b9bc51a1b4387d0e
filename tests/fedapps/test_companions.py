"""A setting that is read beside another one alone is refused where that one is off."""

import pytest

from fedapps.methods import METHODS
from fedapps.settings.config import declared, defaults, override
from fedapps.settings.unread import check_companions


def check(changes, *methods, from_file=()):
    check_companions(override(defaults(), changes), changes, methods, from_file)


BESIDE = {key: setting for key, setting in declared().items() if setting.beside}


def parts(key):
    """The method, and the key and value of the condition."""
    section, _, _ = key.rpartition(".")
    name, _, value = BESIDE[key].beside.partition("=")
    return section or "fedavg", name.removesuffix("!"), value


@pytest.mark.parametrize("key", BESIDE)
def test_a_condition_names_a_declared_setting_and_one_of_its_values(key):
    section, name, value = parts(key)
    other = f"{section}.{name}" if f"{section}.{name}" in declared() else name
    setting = declared()[other]
    if isinstance(setting.values, tuple):
        assert value in setting.values
    else:
        assert str(type(setting.default)(value)) == value


@pytest.mark.parametrize(
    ("changes", "method", "words"),
    [
        ({"dp-clip": 0.5}, "fedavg", "dp is 'none'; set dp as well, or leave it out"),
        ({"dp-epsilon": 0.5}, "fedavg", "dp is 'none'"),
        ({"robust-fraction": 0.1}, "fedavg", "robust is 'none'"),
        ({"lr-decay-rounds": 3}, "fedavg", "lr-decay is 1.0"),
        ({"novel-lr": 0.5}, "fedavg", "novel-shots is 0"),
        ({"per-fedavg.delta": 0.1}, "per-fedavg", "set per-fedavg.variant to hessian-free"),
        ({}, "fedtta patience=2", "fedtta.max-steps is 1"),
        ({"pfedhn.server-optimizer": "adam", "pfedhn.server-momentum": 0.5}, "pfedhn", "to sgd"),
        ({"odpfl-hn.descriptor-delta": 0.1}, "odpfl-hn", "odpfl-hn.descriptor-epsilon is 0.0"),
    ],
    ids=str,
)
def test_it_is_refused_where_the_other_is_off(changes, method, words):
    with pytest.raises(ValueError, match=f"changes nothing here, since .*{words}"):
        check(changes, method)


@pytest.mark.parametrize(
    ("changes", "methods"),
    [
        ({"dp-clip": 0.5, "dp": "central"}, ["fedavg"]),
        ({"per-fedavg.delta": 0.1, "per-fedavg.variant": "hessian-free"}, ["per-fedavg"]),
        ({"fedtta.patience": 2}, ["fedtta", "fedtta++"]),  # which inherits it, and takes 100 steps
        ({}, ["fedtta max-steps=3 patience=2"]),
        ({"pfedhn.server-momentum": 0.5}, ["pfedhn"]),
    ],
    ids=str,
)
def test_it_is_taken_where_a_run_reads_it(changes, methods):
    check(changes, *methods)


def test_a_files_setting_may_be_meant_for_other_runs():
    check({"dp-clip": 0.5}, "fedavg", from_file={"dp-clip"})


def test_defaults_are_settings_like_others():
    assert set(METHODS) and not [key for key in BESIDE if key not in defaults()]
