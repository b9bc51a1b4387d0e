"""Settings of a component that come from Flower instead of its keywords.

A key of the run's configuration (``[tool.flwr.app.config]``, ``flwr run --run-config``) that is a
setting of the method works as a keyword; "fedprox.lr" wins over "lr". A key of a message's config,
which a strategy from outside the package may send, must have the value that the client has: a
server does not change how clients train. Names that other apps use for such a setting are refused
with the setting's name. How inputs are scaled is a keyword alone. All other keys belong to the
app."""

from collections.abc import Mapping, Sequence
from typing import Any

from clients.core.protocol import APP_SETTINGS
from fedapps.common.errors import Refusal
from fedapps.common.settings import key_of, present_key
from fedapps.common.tasks import AUTO
from fedapps.component_settings import OF_INPUTS, of_client, of_server, value_of
from fedapps.settings.config import Config, defaults, override
from fedapps.settings.rates import with_rate_of_task
from strategies.core.privacy import Privacy

PROXIMAL_MU = "proximal-mu"  # key of Flower's FedProx in the config of train messages
# What other apps call a setting, by hyphens.
ALIASES = {
    "learning-rate": "lr",
    "client-lr": "lr",
    "client-learning-rate": "lr",
    "epochs": "local-epochs",
    "num-epochs": "local-epochs",
    "batchsize": "batch-size",
    "fraction-fit": "fraction-train",
    PROXIMAL_MU: "mu",
}
# What other apps call a number that `server_app` takes from the run's configuration.
OTHER_COUNTS = {"num-rounds": "num-server-rounds", "min-available-clients": "min-available-nodes"}
PRIVACY = frozenset(map(key_of, Privacy.declared))


def with_run_config(
    component: str,
    method: str,
    config: Config,
    given: Mapping[str, Any],
    run_config: Mapping[str, Any],
) -> tuple[Config, dict[str, Any]]:
    """`config` with the method's settings in the run's configuration, and `given` with them.

    `given` are the component's keywords by key. Raises Refusal for a setting that both have with
    different values, for another name of a setting, and for settings of privacy."""
    known = (of_client(method) | of_server(method)).difference(OF_INPUTS)
    keywords = {key.removeprefix(f"{method}."): value for key, value in given.items()}
    changes: dict[str, Any] = {}
    for key in sorted(run_config, key=lambda key: key.startswith(f"{method}.")):  # specific last
        value = run_config[key]
        name = _plain(key, method)
        if ALIASES.get(name) in known and name not in known:
            raise Refusal(
                f"the run's configuration has {key} = {value!r}, which {component} calls "
                f"{ALIASES[name]}; rename the key, or leave it out"
            )
        if name in PRIVACY and value != config.get(name):
            raise Refusal(
                f"the run's configuration has {key} = {value!r}; {component} takes privacy by its "
                f"keywords alone: {key.replace('-', '_')}=…"
            )
        if name not in known or (name == "task" and value == AUTO):
            continue  # "auto" leaves the task to the component
        if name in keywords and keywords[name] != value:
            raise Refusal(
                f"{name} is {keywords[name]!r} in {component} and {value!r} in the run's "
                "configuration; set it in one place"
            )
        changes[f"{method}.{name}" if f"{method}.{name}" in config else name] = value
    given = {**given, **changes}
    if changes:
        config = override(config, changes)
    return with_rate_of_task(config, defaults(), given, str(config["task"])), given


def num_rounds_of(given: int, run_config: Mapping[str, Any]) -> int:
    """The rounds that `server_app` runs: those `given` as a keyword (0: none), or in the run's
    configuration, or 3. Raises ValueError as `_count`."""
    keys = ("num-server-rounds", "rounds")
    return _count("rounds", given, keys, run_config, default=3)


def least_nodes_of(given: int, run_config: Mapping[str, Any]) -> int:
    """The nodes that `server_app` waits for, as `num_rounds_of`, or 2."""
    key = "min-available-nodes"
    return _count("min_available_nodes", given, (key,), run_config, default=2)


def check_count(name: str, value: Any, place: str) -> None:
    """Raise ValueError unless the value, which stands in that place, is a whole number from 0."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r:.80} in {place}; it must be a whole number from 0")


def _count(
    keyword: str, given: int, keys: Sequence[str], run_config: Mapping[str, Any], *, default: int
) -> int:
    """The number that is `given` as the keyword (0: none), or stands under one of the `keys` in the
    run's configuration, or else the default.

    Raises ValueError for two different numbers, for another name of the key, and for what is no
    whole number."""
    counts: dict[str, int] = {}
    if given:
        counts[f"{keyword}={given}"] = given
    for key, value in run_config.items():
        name = key.replace("_", "-")
        if OTHER_COUNTS.get(name) in keys:
            raise ValueError(
                f"the run's configuration has {key} = {value!r:.80}, which server_app calls "
                f"{OTHER_COUNTS[name]}; rename the key, or leave it out"
            )
        if name in keys:
            check_count(key, value, "the run's configuration")
            counts[f"{key} = {value} in the run's configuration"] = value
    if len(set(counts.values())) > 1:
        raise ValueError(f"server_app has {' and '.join(counts)}; set it in one place")
    return next(iter(counts.values()), default)


def check_message(method: str, config: Config, message: Mapping[str, Any]) -> None:
    """Raise Refusal where a message's config has a setting of the method's clients, under its own
    name or another, with another value than `config`, or a proximal term that they lack."""
    known = of_client(method).difference(OF_INPUTS)
    mu = message.get(PROXIMAL_MU)
    if mu and "mu" not in known:
        raise Refusal(
            f"the message's config has {PROXIMAL_MU} = {mu!r}, and {method} has no proximal term; "
            f"write client_app('fedprox', mu={mu!r}, …), or take a strategy without one"
        )
    for key, value in message.items():
        # Keys of a message are the server's: no warning about a former name helps this user.
        name = _plain(key, method, silent=True)
        name = ALIASES.get(name, name)
        if key == APP_SETTINGS or name not in known:
            continue
        here = value_of(method, config, name)
        if value != here:
            raise Refusal(
                f"the message's config has {key} = {value!r}, but {name} of this client is "
                f"{here!r}, which no message changes; set {name} in client_app, or in the run's "
                "configuration"
            )


def _plain(key: str, method: str, *, silent: bool = False) -> str:
    """The key with hyphens under its present name, without the method's section. A former name
    gives a warning, unless `silent`."""
    return present_key(key.replace("_", "-"), silent=silent).removeprefix(f"{method}.")
