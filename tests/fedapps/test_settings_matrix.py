"""Every declared setting × every entry point: its value arrives, or a sentence refuses it.

The cases are made from the declarations, so a new setting without an answer fails. The two
components of other people's apps are in test_component_settings.py. `personalize`, `serve` and
`deploy` take no settings: their command lines refuse them."""

import pytest
from flwr.app import Context, RecordDict
from setting_values import other_value
from small_runs import SMALL, invoke

import fedapps.serverapp
import strategies
from fedapps import api
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.methods import METHODS
from fedapps.planning import plan
from fedapps.settings.config import accepted, defaults, override, settings
from fedapps.settings.experiments import parse_experiment
from fedapps.settings.sections import common, of_method, of_partitions
from strategies.core.strategy import PersonalizedStrategy

ALL = common() | of_partitions()
OF_METHODS = [
    (method, key)
    for method, entry in METHODS.items()
    for key in of_method(method, entry)
    if key not in common()
]
OFFERED = [getattr(strategies, name) for name in strategies.__all__]
CLASSES = [cls for cls in OFFERED if isinstance(cls, type)]
STRATEGIES = [cls for cls in CLASSES if issubclass(cls, PersonalizedStrategy)]


def written(value):
    return str(value).lower() if isinstance(value, bool) else str(value)


def planned(key, value, output):
    """The configurations of the runs that the command plans."""
    argument = [f"{key}={written(value)}"]
    small = dict(SMALL.items() - defaults().items())
    small.pop(key, None)
    request = parse_experiment([f"{name}={written(other)}" for name, other in small.items()])
    request = request | parse_experiment(argument)
    if not request.methods:
        request = request | parse_experiment(["methods=fedavg"])
    return [job.config for job in plan(request, output, None, bound=False, fresh=False)]


@pytest.mark.parametrize("key", ALL)
def test_the_command_carries_it_out_or_refuses_it(key, tmp_path):
    value = other_value(ALL[key])
    try:
        configs = planned(key, value, tmp_path)
    except ValueError as error:
        assert len(str(error)) > 20
        return
    for config in configs:
        assert config[key] == value
    if key in common() and key not in fedapps.settings.run.RunSettings.declared:
        entry = METHODS["fedavg"]
        reading = accepted(entry.client) | accepted(entry.strategy)
        name = key.replace("-", "_")
        assert name in reading or key.startswith("dp") or key == "novel-rounds", key


@pytest.mark.parametrize("key", ALL)
def test_a_submitted_app_carries_it_out_or_refuses_it(key, monkeypatch):
    """`flwr run`: the run's configuration reaches the run that the ServerApp starts."""
    value, found = other_value(ALL[key]), []
    monkeypatch.setattr(
        "fedapps.serverapp.run", lambda grid, config, *_, **__: found.append(config)
    )
    monkeypatch.setattr("fedapps.service.serving.serve", lambda grid, config: found.append(config))
    config = {"num-clients": 2} | {key: value}
    try:
        fedapps.serverapp.main(InProcessGrid(None, {}, []), Context(1, 0, {}, RecordDict(), config))
    except (ValueError, NotImplementedError) as error:
        assert len(str(error)) > 20
        return
    assert found and found[0][key] == value


@pytest.mark.parametrize(("method", "key"), OF_METHODS)
def test_a_setting_of_a_method_is_read_by_one_of_its_halves(method, key):
    entry, name = METHODS[method], key.replace("-", "_")
    value = other_value(of_method(method, entry)[key])
    config = override(defaults(), {f"{method}.{key}": value})
    assert settings(config, method)[name] == value
    assert name in accepted(entry.client) | accepted(entry.strategy)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda cls: cls.__name__)
def test_a_strategy_by_hand_has_it_or_refuses_it(strategy):
    """Settings of a run or of the clients alone are no keywords of a strategy."""
    carried = 0
    for name, setting in strategy.declared.items():
        value = other_value(setting)
        try:
            made = strategy(**{name: value})
        except (ValueError, TypeError) as error:  # another setting is needed beside it
            assert len(str(error)) > 20
            continue
        assert getattr(made, name) == value
        carried += 1
    assert carried > 15
    for key in ALL:
        name = key.replace("-", "_")
        if name in strategy.declared or name in accepted(strategy):
            continue
        with pytest.raises(TypeError, match=r"has no setting|unexpected keyword"):
            strategy(**{name: other_value(ALL[key])})


def test_a_strategy_by_hand_says_where_privacy_is_given():
    with pytest.raises(TypeError, match="has no setting 'dp'"):
        strategies.FedAvg(dp="central")
    assert issubclass(strategies.FedAvg, PersonalizedStrategy)


@pytest.mark.parametrize("command", ["personalize", "serve", "deploy"])
def test_a_command_of_the_service_takes_no_setting(command, tmp_path):
    for words in (["--lr", "0.1"], ["--rounds", "3"], ["--dp", "central"]):
        refused = invoke(command, str(tmp_path), *words, code=2)
        assert "No such option" in refused.output


def test_the_api_is_the_command():
    """It plans by the same function, with the same keys."""
    assert api.plan is plan
