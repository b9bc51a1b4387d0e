"""Settings: every declared key is read, every key read is declared, and variants inherit."""

import json
import re
import subprocess
import sys
import tomllib
import warnings

import numpy as np
import pytest
import tomli_w
from flwr.common.config import flatten_dict
from small_runs import fedapps

from fedapps.common.settings import FORMER_KEYS, taken
from fedapps.methods import METHODS
from fedapps.planning import configured
from fedapps.run_settings import with_run_config
from fedapps.settings import written_files
from fedapps.settings.config import (
    accepted,
    defaults,
    effective,
    override,
    parse_override,
    resolve,
    settings,
)
from fedapps.settings.experiments import (
    Experiment,
    experiments,
    parse_experiment,
    read_arguments,
)
from fedapps.settings.run import RunSettings
from fedapps.settings.saved_configurations import differences, run_configuration
from fedapps.settings.unread import check_read
from fedapps.settings.variants import Variant
from strategies.core.latency import Latency
from strategies.core.privacy import Privacy
from strategies.methods.fedavg import FedAvg

SINCE = ("fedtta.min-agreement", "fedtta-prox.min-agreement")  # keys that older releases lack
LIGHT = """
import sys
import fedapps.commands.list, fedapps.commands.settings, fedapps.settings.config
from fedapps.settings.experiments import main_job
from fedapps.settings.variants import Variant, combinations
config = fedapps.settings.config.override(fedapps.settings.config.defaults(), main_job().settings)
Variant.parse("fedtta++ inner-lr=0.1").apply(config)
for rows in ("methods", "datasets", "partitions", "models", "experiments"):
    assert fedapps.commands.list.LISTS[rows]()
fedapps.commands.settings.of_method("pefll")
try:
    fedapps.settings.config.override(config, {"lr": -1.0})
except ValueError:
    print("refused")
print({"torch", "flwr", "ray"} & sys.modules.keys())
"""

READ_BY_APPS = {*RunSettings.declared, *taken(Privacy), *Latency.declared}
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
def test_a_configuration_holds_what_the_classes_declare(method):
    """A method's section over the common keys gives each setting the default of its declaration."""
    entry = METHODS[method]
    known = settings(defaults(), method)
    for name, one in {**entry.client.declared, **entry.strategy.declared}.items():
        value = known.get(name, one.default)  # a setting that the method does not offer
        assert (value, type(value)) == (one.default, type(one.default)), f"{method}: {name}"


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].hidden_settings])
def test_a_method_fixes_what_its_classes_declare(method):
    entry = METHODS[method]
    names = {name.replace("-", "_") for name in entry.hidden_settings}
    assert names <= entry.client.declared.keys() | entry.strategy.declared.keys()


def test_what_is_written_from_the_declarations_is_fresh():
    """`fedapps settings --write` writes both files anew."""
    text = written_files.PYPROJECT.read_text("utf-8")
    assert written_files.pyproject(text) == text
    assert written_files.SCHEMA.read_text("utf-8") == written_files.json_schema()


def test_the_schema_describes_experiments():
    """Its numbers have ends, its texts choices; grids are lists; every shipped file's keys stand
    there, apart from those in quotes."""
    known = json.loads(written_files.SCHEMA.read_text("utf-8"))
    lr, dp = (known["properties"][key]["anyOf"] for key in ("lr", "dp"))
    assert lr[0] == {"type": "number", "minimum": 0, "maximum": 100}
    assert lr[1] == {"type": "array", "items": lr[0]}
    assert dp[0]["enum"] == ["none", "local", "central"]
    allowed = re.compile(*known["patternProperties"])
    for file in experiments().values():
        for key, value in tomllib.loads(file.read_text("utf-8")).items():
            assert key in known["properties"] or allowed.search(key), f"{file}: {key}"
            if isinstance(value, dict) and key not in ("published", "search", "reasons"):
                assert value.keys() <= known["properties"][key]["properties"].keys(), file


def flower() -> dict:
    """The configuration that Flower hands to a run: the keys of pyproject.toml alone."""
    content = tomllib.loads(written_files.PYPROJECT.read_text("utf-8"))
    return dict(flatten_dict(content["tool"]["flwr"]["app"]["config"]))


def test_a_section_holds_what_differs_from_the_parents():
    section = {key for key in flower() if key.startswith("fedtta++.")}
    assert section == {"fedtta++.max-steps"}
    assert settings(defaults(), "fedtta++").items() >= {
        "max_steps": 50, "mu": 0.01, "inner_lr": 0.5, "batch_size": 64,  # its own, … common
    }.items()  # fmt: skip
    assert resolve(flower()) == defaults()


@pytest.mark.parametrize(
    ("changes", "reached"),
    [
        ({"fedtta.inner-lr": 0.1}, "fedtta, fedtta-prox, fedtta++, fedtta++-guarded"),
        ({"fedtta-prox.inner-lr": 0.1}, "fedtta-prox, fedtta++, fedtta++-guarded"),
        ({"fedtta++.inner-lr": 0.1}, "fedtta++, fedtta++-guarded"),
        ({"fedtta.inner-lr": 0.1, "fedtta++.inner-lr": 0.5}, "fedtta, fedtta-prox"),
        ({"fedtta++.inner-lr": 0.5, "fedtta.inner-lr": 0.1}, "fedtta, fedtta-prox"),
        ({"fedtta.mu": 0.1}, "fedtta"),  # fedtta-prox sets another
    ],
)
def test_a_change_reaches_those_that_inherit_the_key(changes, reached):
    for config in (override(defaults(), changes), resolve(flower() | changes)):
        new = {key.rpartition(".")[0] for key in config if config[key] != defaults()[key]}
        assert new == set(reached.split(", "))


def rates(file: str, words: str, methods: str, folder) -> dict[str, object]:
    """The learning rate of each run that a file, arguments and `--methods` describe, by label."""
    arguments = words.split()
    if file:
        (folder / "mine.toml").write_text(f"rounds = 2\n{file}\n", "utf-8")
        arguments.insert(0, str(folder / "mine.toml"))
    asked = read_arguments(arguments) | Experiment(methods=methods)
    config, labels = configured(asked)
    runs = {label: Variant.parse(label).apply(config) for label in labels}
    return {label: effective(run, "lr") for label, run in runs.items()}


@pytest.mark.parametrize(
    ("words", "methods", "expected"),
    [
        ("lr=0.1", "fedavg,fedprox,pfedhn,fedtta++",
         {"fedavg": 0.1, "fedprox": 0.1, "pfedhn": 0.1, "fedtta++": 0.1}),
        ("lr=0.3", "pfedhn", {"pfedhn": 0.3}),  # the common default, said for all
        ("", "fedavg,pfedme", {"fedavg": 0.3, "pfedme": 0.05}),
        ("lr=0.1 fedprox.lr=0.2", "fedavg,fedprox", {"fedavg": 0.1, "fedprox": 0.2}),
        ("fedprox.lr=0.2 lr=0.1", "fedavg,fedprox", {"fedavg": 0.1, "fedprox": 0.2}),
        ("lr=0.1 pfedhn.lr=0.005", "pfedhn", {"pfedhn": 0.005}),  # its default, said for it
        ("lr=0.1 fedtta.lr=0.2", "fedtta++", {"fedtta++": 0.2}),  # which extends fedtta
        ("lr=0.1", "fedprox,fedprox lr=0.2", {"fedprox": 0.1, "fedprox lr=0.2": 0.2}),
        ("lr=0.01,0.1", "pfedhn", {"pfedhn lr=0.01": 0.01, "pfedhn lr=0.1": 0.1}),
        ("lr=0.01,0.1 pfedhn.lr=0.2", "fedavg,pfedhn",
         {"fedavg lr=0.01": 0.01, "fedavg lr=0.1": 0.1, "pfedhn": 0.2}),
        ("lr=0.01,0.1 fedtta.lr=0.2", "fedtta++", {"fedtta++": 0.2}),
        ("lr=0.1 pfedhn.lr=0.01,0.2", "pfedhn", {"pfedhn lr=0.01": 0.01, "pfedhn lr=0.2": 0.2}),
        ("lr=0.5,0.1 pfedhn.lr=0.01,0.2", "pfedhn", {"pfedhn lr=0.01": 0.01, "pfedhn lr=0.2": 0.2}),
        ("lr=0.01,0.1", "fedavg,pfedhn lr=0.2",
         {"fedavg lr=0.01": 0.01, "fedavg lr=0.1": 0.1, "pfedhn lr=0.2": 0.2}),
    ],
)  # fmt: skip
def test_a_common_setting_reaches_every_method_but_a_more_specific_one_wins(
    words, methods, expected, tmp_path
):
    assert rates("", words, methods, tmp_path) == expected


@pytest.mark.parametrize(
    ("file", "words", "methods", "expected"),
    [
        ("lr = 0.1", "", "fedprox", {"fedprox": 0.1}),
        ("lr = 0.1\n[fedprox]\nlr = 0.2", "", "fedavg,fedprox", {"fedavg": 0.1, "fedprox": 0.2}),
        ('"fedprox.lr" = 0.2\nlr = 0.1', "", "fedprox", {"fedprox": 0.2}),
        ("lr = [0.01, 0.1]\n[fedprox]\nlr = 0.2", "", "fedprox", {"fedprox": 0.2}),
        # the command comes last
        ("[fedprox]\nlr = 0.2", "lr=0.1", "fedprox", {"fedprox": 0.1}),
        ("[fedtta]\nlr = 0.2", "lr=0.1", "fedtta++", {"fedtta++": 0.1}),
        ("[fedprox]\nlr = [0.2, 0.4]", "lr=0.1", "fedprox", {"fedprox": 0.1}),
        ("[fedprox]\nlr = 0.2", "lr=0.01,0.1", "fedprox",
         {"fedprox lr=0.01": 0.01, "fedprox lr=0.1": 0.1}),
        ("lr = 0.1", "fedprox.lr=0.2", "fedavg,fedprox", {"fedavg": 0.1, "fedprox": 0.2}),
        ("lr = [0.01, 0.1]", "fedprox.lr=0.2", "fedprox", {"fedprox": 0.2}),
        ("[fedprox]\nlr = 0.2", "lr=0.1 fedprox.lr=0.4", "fedprox", {"fedprox": 0.4}),
    ],
)  # fmt: skip
def test_a_command_wins_over_a_file_and_in_a_file_the_methods_own_value(
    file, words, methods, expected, tmp_path
):
    assert rates(file, words, methods, tmp_path) == expected


METHOD_FROM_OUTSIDE = """
from clients.core.client import Client
from fedapps.methods import Method
from partitions import federation
from strategies.methods.fedavg import FedAvg

FAST = Method(FedAvg, Client, "mine", "a rate of its own", settings={"lr": 0.7})


def data(*, lr: float = 0.9):
    pass
"""


def test_a_common_setting_reaches_a_method_from_outside_and_no_other_code(tmp_path, monkeypatch):
    (tmp_path / "outside_rates.py").write_text(METHOD_FROM_OUTSIDE, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    method, data = "outside_rates:FAST", "outside_rates:data"
    monkeypatch.setenv("FEDAPPS_ALLOW", f"{method},{data}")
    assert rates("", "", method, tmp_path) == {method: 0.7}
    assert rates("", "lr=0.1", method, tmp_path) == {method: 0.1}
    assert rates(f'["{method}"]\nlr = 0.2', "lr=0.1", method, tmp_path) == {method: 0.1}
    file = Experiment({"dataset": data, f"{data}.lr": 0.2, f"{method}.lr": 0.2})
    both = file | Experiment({"lr": 0.1})
    assert both.settings == {"dataset": data, f"{data}.lr": 0.2, "lr": 0.1}


def test_an_included_experiment_stands_below_the_one_that_includes_it():
    part = Experiment({"fedprox.lr": 0.2, "rounds": 3}, {"pfedhn.lr": [0.1, 0.2]})
    whole = Experiment({"lr": 0.1, "fedtta.lr": 0.3})
    assert (part | whole).settings == {"rounds": 3, "lr": 0.1, "fedtta.lr": 0.3}
    assert (part | whole).grid == {}


@pytest.mark.parametrize(
    ("changes", "method", "rate"),
    [
        ({}, "pfedhn", 0.005),
        ({"lr": 0.1}, "pfedhn", 0.1),
        ({"lr": 0.1}, "fedtta++", 0.1),
        ({"lr": 0.1, "pfedhn.lr": 0.2}, "pfedhn", 0.2),
        ({"pfedhn.lr": 0.2}, "pfedhn-pc", 0.2),
    ],
)
def test_what_differs_from_a_default_in_flowers_configuration_was_said_by_the_user(
    changes, method, rate
):
    """``flwr run --run-config``: Flower adds the defaults of all keys that pyproject declares."""
    config = resolve(flower() | changes)
    assert settings(config, method)["lr"] == rate
    assert config.keys() == defaults().keys()


def test_a_resolved_configuration_stays_as_it_is():
    """pFedHN's rate was said, and is its default: it differs from the common one that was said."""
    config = override(defaults(), {"lr": 0.1, "pfedhn.lr": 0.005, "fedtta.lr": 0.3})
    assert resolve(config) == config
    assert settings(config, "pfedhn")["lr"] == 0.005


def test_a_methods_own_key_wins_in_the_configuration_of_another_app():
    for names in (("lr", "fedprox.lr"), ("fedprox.lr", "lr")):
        run_config = {name: {"lr": 0.1, "fedprox.lr": 0.2}[name] for name in names}
        config, given = with_run_config("client_app", "fedprox", defaults(), {}, run_config)
        assert settings(config, "fedprox")["lr"] == given["fedprox.lr"] == 0.2


@pytest.mark.parametrize(
    ("changes", "methods", "words"),
    [
        ({"pfedhn.lr": 0.1}, "fedavg", "pfedhn.lr=0.1 changes nothing here: pfedhn does not run"),
        ({"fedtta++.mu": 0.1}, "fedtta", "fedtta++.mu=0.1 changes nothing here: fedtta++ does not"),
        (
            {"partition.alpha": 1.0},
            "fedavg, tent",
            "partition.alpha=1.0 changes nothing here, since partition is pathological; it is read "
            "by dirichlet, dirichlet-split, dirichlet-novel",
        ),
        (
            {"image-size": 64},
            "fedavg",
            "image-size=64 changes nothing here, since dataset is digits; it is read with your own "
            "images or tables",
        ),
        (
            {"label": "kind", "partition": "cross-dataset", "partition.novel-dataset": "mnist"},
            "fedavg",
            "label=kind changes nothing here, since dataset is digits, mnist",
        ),
    ],
)
def test_a_setting_that_no_run_reads_is_refused_unless_it_stands_in_a_file(changes, methods, words):
    config, names = override(defaults(), changes), methods.split(", ")
    with pytest.raises(ValueError, match=re.escape(words)):
        check_read(config, changes, names)
    assert len(check_read(config, changes, names, from_file=changes)) <= 1


@pytest.mark.parametrize(
    ("changes", "methods", "notes"),
    [
        ({"lr": 0.1}, "fedavg, pfedhn", []),
        ({"fedtta.inner-lr": 0.1}, "fedtta++", []),
        (
            {"partition": "corrupted", "partition.classes-per-client": 3},
            "fedavg",
            [],
        ),  # of its base
        ({"partition.alpha": 1.0}, "fedavg partition=dirichlet", []),
        (
            {"partition.alpha": 1.0},
            "fedavg partition=dirichlet, fedavg partition=iid",
            ["partition.alpha=1.0 changes nothing where the partition is iid"],
        ),
        (
            {},
            "fedavg partition=dirichlet partition.alpha=1, fedavg partition=iid partition.alpha=1",
            ["partition.alpha changes nothing where the partition is iid"],
        ),
        ({"image-size": 64, "dataset": "photos"}, "fedavg", []),
        (
            {
                "image-size": 64,
                "partition": "cross-dataset",
                "partition.novel-dataset": "photos",
            },
            "fedavg",
            [],
        ),
        (
            {"image-size": 64},
            "fedavg, fedavg dataset=photos",
            ["image-size=64 changes nothing where the dataset is digits"],
        ),
    ],
)
def test_an_option_that_some_runs_read_is_allowed(changes, methods, notes):
    config = override(defaults(), changes)
    assert check_read(config, changes, methods.split(", ")) == notes


def test_a_partition_rule_from_outside_may_read_any_option():
    rule = {"partition": "my_lab:Rule", "partition.alpha": 1.0}
    assert not check_read(defaults() | rule, rule, ["fedavg"])


def test_the_command_refuses_a_change_without_effect(tmp_path):
    words = ("run", "fedprox.lr=0.1", "--methods", "pfedhn", "--output", tmp_path / "out")
    assert "fedprox does not run, but pfedhn" in fedapps(*words, code=2)
    assert not (tmp_path / "out").exists()


def test_a_run_computes_with_the_rate_that_the_command_says(tmp_path):
    """pFedHN has a rate of its own: its run with lr=0.1 is that with pfedhn.lr=0.1, to the bit."""
    small = ["num-clients=4", "rounds=1", "local-steps=1", "pfedhn.hidden-dim=8"]
    small += ["model=mlp-small", "--methods", "pfedhn"]
    models = []
    for rate in ("lr=0.1", "pfedhn.lr=0.1"):
        fedapps("run", rate, *small, "--engine", "in-process", "--output", str(tmp_path / rate))
        models.append((tmp_path / rate / "pfedhn-seed0" / "model.safetensors").read_bytes())
    assert models[0] == models[1]
    fedapps("run", *small, "--engine", "in-process", "--output", str(tmp_path / "default"))
    default = (tmp_path / "default" / "pfedhn-seed0" / "model.safetensors").read_bytes()
    assert default != models[0]


def test_a_configuration_of_an_earlier_release_is_read_as_it_was(tmp_path):
    """All keys were written out: a section keeps its values, whatever its parent has now."""
    former = {k: v for k, v in defaults().items() if k not in SINCE} | {"fedtta.inner-lr": 0.25}
    former |= {"method": "fedtta++", "fedtta++.clip-norm": 5.0}
    (tmp_path / "config.toml").write_text(tomli_w.dumps(former | {"versions": {"results": "1"}}))
    assert run_configuration(tmp_path) == defaults() | former
    assert settings(run_configuration(tmp_path), "fedtta++")["inner_lr"] == 0.5
    assert not differences(former, run_configuration(tmp_path))


def test_a_run_of_an_earlier_release_can_be_used(tmp_path):
    """fedtta++, whose section was whole: shown, resumed, gone on from and personalized."""
    small = ["num-clients=4", "rounds=1", "local-steps=1", "fedtta++.max-steps=1"]
    small += ["model=mlp-small"]
    options = ["--engine", "in-process", "--output"]
    first, run = str(tmp_path / "first"), tmp_path / "first" / "fedtta++-seed0"
    fedapps("run", *small, "--methods", "fedtta++", *options, first)
    config = tomllib.loads((run / "config.toml").read_text("utf-8"))
    for key in SINCE:
        del config[key]
    config["fedtta++.clip-norm"] = 5.0
    (run / "config.toml").write_text(tomli_w.dumps(config), "utf-8")
    assert "fedtta++" in fedapps("table", first)
    fedapps("run", "--resume", first, *options[:2])
    fedapps("run", "--from", first, *options, str(tmp_path / "second"))
    again = tomllib.loads((tmp_path / "second" / run.name / "config.toml").read_text("utf-8"))
    assert (again["fedtta++.clip-norm"], again["fedtta++.max-steps"]) == (5.0, 1)
    np.savez(tmp_path / "x.npz", x=np.zeros((3, 1, 8, 8), np.float32))
    fedapps("personalize", str(run), str(tmp_path / "x.npz"), "--output", str(tmp_path / "mine"))


def test_settings_start_without_torch():
    """Nor Flower, nor Ray: neither to list and to check, nor to refuse."""
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["refused", "set()"], done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["settings"], ["num-clients", "partition.alpha", "[1, 1000000]", "none, local, central"]),
        (["settings", "fedtta++"], ["fedtta++.max-steps", "fedtta++.mu", "(as fedtta-prox)"]),
        (["settings", "tent"], ["tent.bits = false measure entropy in bits"]),
        (["settings", "fedavg"], ["no settings of its own"]),
        (["settings", "--schema"], ['"exclusiveMinimum"', "fedtta++"]),
    ],
)
def test_the_command_shows_settings(arguments, words):
    said = fedapps(*arguments)
    assert all(word in said for word in words)


def test_every_common_key_is_read():
    assert READ_BY_APPS.union(*(read_by(method) for method in METHODS)) >= COMMON


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fedprox.nu": 1.0}, ["'fedprox.nu'", "mu"]),
        ({"nonsense": 1}, ["'nonsense'", "num-clients"]),
        ({"lr": "fast"}, ["lr", "'fast'", "a number"]),
        ({"rounds": 1.5}, ["rounds", "1.5", "a whole number"]),
        ({"fedrep.lr": 0.1}, ["'fedrep.lr'", "the common 'lr'", '"fedrep lr=…"']),
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
    assert parse_override("report-generalization-bound=true") == (
        "report-generalization-bound",
        True,
    )
    for text in (".5", "0.5", "5e-1", "+.5", "5.e-1"):  # as people write numbers
        assert parse_override(f"lr={text}") == ("lr", 0.5)
    assert parse_override("method=pfedhn") == ("method", "pfedhn")
    assert parse_override("partition.alpha=1") == ("partition.alpha", 1)
    assert override(defaults(), {"partition.alpha": 1})["partition.alpha"] == 1.0


def test_a_methods_own_key_wins_over_the_common_one():
    config = defaults() | {"lr": 0.5}
    assert settings(config, "fedavg")["lr"] == 0.5
    assert settings(config, "pfedhn")["lr"] == defaults()["pfedhn.lr"]


FORMER = [
    ("cohort", "stacked-clients", 2),
    ("bound", "report-generalization-bound", True),
    ("select", "selection-metric", "loss"),
    ("mean-over", "average-over", "samples"),
    ("only-model", "restrict-to-model", "small"),
    ("partition.base", "partition.base-rule", "iid"),
    ("hyperfedzero.entropy", "hyperfedzero.entropy-weight", 0.5),
]


@pytest.mark.parametrize(("former", "present", "value"), FORMER)
def test_a_former_name_of_a_setting_is_understood_with_a_note(former, present, value, tmp_path):
    """In changes and on the command line; in the configuration of a saved run without a note."""
    assert {key for key, _, _ in FORMER} == FORMER_KEYS.keys()
    with pytest.warns(FutureWarning, match=f"{former!r} is now called {present!r}"):
        assert override(defaults(), {former: value})[present] == value
    with pytest.warns(FutureWarning, match=f"{former!r} is now called"):
        written = str(value).lower() if isinstance(value, bool) else value
        assert parse_experiment([f"{former}={written}"]).settings == {present: value}
    with pytest.raises(ValueError, match="are the same setting"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        override(defaults(), {former: value, present: value})
    saved = {key: value for key, value in defaults().items() if key != present} | {former: value}
    (tmp_path / "config.toml").write_text(tomli_w.dumps(saved))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_configuration(tmp_path)[present] == value


def test_a_strategy_by_hand_understands_former_names():
    with pytest.warns(FutureWarning, match="'mean-over' is now called 'average-over'"):
        assert FedAvg(mean_over="samples").average_over == "samples"
    with pytest.warns(FutureWarning, match="'hyperfedzero.entropy' is now called"):
        own = Variant.parse("hyperfedzero entropy=0.3").apply(defaults())
    assert own["hyperfedzero.entropy-weight"] == 0.3


def test_a_file_of_an_editor_of_windows_is_read(tmp_path):
    """It begins with a byte order mark, and its lines end with two characters."""
    file = tmp_path / "own.toml"
    file.write_bytes(b"\xef\xbb\xbfrounds = 3\r\nlr = 0.5\r\n")
    found = read_arguments([str(file)]).settings
    assert (found["rounds"], found["lr"]) == (3, 0.5)


def test_a_key_that_two_arguments_set_is_said(capsys):
    experiment = read_arguments(["lr=0.1", "rounds=2", "lr=0.2", "rounds=2", "local_steps=3"])
    assert experiment.settings["lr"] == 0.2
    said = " ".join(capsys.readouterr().err.split())
    assert said == "lr=0.1 and lr=0.2 set lr twice; the last one counts"
