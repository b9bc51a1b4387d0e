"""Which settings `client_app` and `server_app` carry out, and how the two are compared.

A setting is read by the server's component, by the clients', or by both. One that is given where
only the other component reads it must be given there too, with the same value; the server's
messages therefore say what its component was given, and a client's component compares. A setting
that no component carries out is refused."""

import json
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from clients.core.client import Client
from clients.core.own_optimizer import TORCH_DEFAULTS, OwnOptimizer
from clients.core.protocol import APP_SETTINGS, METHOD, RUN_TOKEN
from fedapps.common.errors import Refusal
from fedapps.common.settings import key_of, taken
from fedapps.common.tasks import AUTO, CLASSES, TASKS
from fedapps.former_state import rounds_of, spent_before
from fedapps.methods import METHODS, check_private, check_serves, chosen_from
from fedapps.settings.config import Config, construct, defaults, override, settings
from fedapps.settings.run import RunSettings
from fedapps.settings.unread import check_beside
from partitions.datasets.description import BY_TRAINING, NO_SCALING
from partitions.datasets.encoding import REFUSE
from strategies.core.column_encoder import COVERED
from strategies.core.privacy import Privacy
from strategies.methods.fedavg import FedAvg

# Settings of a run that `server_app` carries out, beside those of the method and of privacy.
OF_SERVER = frozenset({"round-timeout", "num-clients"})
OF_INPUTS = ("standardize", "missing")
ROUNDS = "rounds"
OF_SGD = ("lr", "momentum", "weight-decay")
PARAMETERS = frozenset({"min-available-nodes"})  # of `server_app`, which are no settings there

# What a component has in the place of a run's setting.
INSTEAD = {
    "method": "name the method as the first argument",
    "rounds": "server_app takes `rounds` as a parameter, and client_app too with dp='local'",
    "model": "`model=` is the function that makes your network",
    "client-models": "all clients have the network of `model=`",
    "restrict-to-model": "all clients have the network of `model=`",
    "dataset": "`data=` returns a node's samples",
    "data-dir": "`data=` returns a node's samples",
    "data-seed": "`data=` returns a node's samples",
    "head": "the method treats no layer as a head",
    "image-size": "resize the images in `data=`",
    "label": "it names a column of the nodes' tables, which client_app reads",
    "inputs": "`data=` returns inputs as the network takes them",
    "skip-broken": "leave broken samples out in `data=`",
    "columns": "choose the columns of inputs in `data=`",
    "ignore": "choose the columns of inputs in `data=`",
    "partition": "`data=` returns a node's samples",
    "novel-shots": "only `fedapps run` deals few labeled samples to novel clients",
    "scores": "client_app takes `scores=`, your own functions",
    "callbacks": "use `on_round=` or `then=`",
    "output-dir": "write what you need in `on_round=` or `then=`",
    "checkpoint-every": "write `strategy.state()` in `on_round=`",
    "resume": "server_app takes `former=`, the `strategy.state()` of an earlier run",
    "from-dir": "load saved arrays into the network in `model=`",
    "training-dir": "only `fedapps run` trains once for several methods",
    "early-stopping": "set `rounds`",
    "stacked-clients": "only `fedapps run` trains clients side by side",
}
SERVING = "only `fedapps serve` serves a finished run"


def check_carried_out(
    component: str, method: str, config: Config, given: Mapping[str, Any]
) -> None:
    """Raise ValueError, saying what to write instead, for a key of `given` that `component`, which
    is "client_app" or "server_app", does not carry out."""
    read = of_client(method) | of_server(method) | _keys(Privacy)
    if component == "server_app":
        read |= OF_SERVER
    for key in given:
        name = key.removeprefix(f"{method}.")
        if name in read and key in config:
            continue
        if key.startswith("partition."):
            hint = INSTEAD["partition"]
        elif key.startswith("serv"):
            hint = SERVING
        elif key in INSTEAD:
            hint = INSTEAD[key]
        elif key in {*OF_SERVER, *PARAMETERS}:
            hint = "it belongs to server_app"
        elif key in _keys(RunSettings):
            hint = "only `fedapps run` does"
        else:
            hint = f"{method} does not read it"
        raise ValueError(f"{component} does not carry out the setting {key!r}: {hint}")
    check_beside(method, config, given)
    chosen_from(method, config)  # raises ValueError for a name that is no method


def initial_configuration(method: str) -> Config:
    """The defaults of an app, also for a method from outside the package: those of a run, but each
    round is evaluated, as with Flower's strategies, and labels are classes: those of one node alone
    cannot tell the task. Inputs are scaled only if both components say so."""
    if method in METHODS:
        return dict(_initial_configuration(method))
    return _made_initial_configuration(method)


def _made_initial_configuration(method: str) -> Config:
    changes = {"method": method, "evaluate-every": 1, "task": CLASSES, "standardize": NO_SCALING}
    return override(defaults(), changes)


# Each message asks; code from outside may declare other settings the next time.
_initial_configuration = lru_cache(maxsize=8)(_made_initial_configuration)


def check_declared_task(method: str, config: Config) -> None:
    """Raise ValueError for a task that the method does not serve, and for "auto"."""
    task = str(config["task"])
    if task == AUTO:
        raise ValueError(
            f"task is {AUTO!r}, but the labels of one node cannot tell the task of all nodes; "
            f"known: {', '.join(TASKS)}"
        )
    check_serves(method, task)


def check_scaling(config: Config, privacy: Privacy | None) -> bool:
    """Whether the nodes' inputs are scaled and encoded by sums over the training clients' columns.

    Raises ValueError for another `standardize`, for a setting that needs it, and where privacy does
    not allow the sums."""
    value = str(config["standardize"])
    if value not in (NO_SCALING, BY_TRAINING):
        raise ValueError(
            f"standardize is {value!r}; client_app and server_app know {NO_SCALING!r} (inputs as "
            f"`data=` returns them) and {BY_TRAINING!r}"
        )
    if value == NO_SCALING and config["missing"] != REFUSE:
        raise ValueError(
            f"missing={config['missing']!r} fills gaps with the training clients' mean, which "
            f"standardize={BY_TRAINING!r} asks for; set it in both components, or fill gaps in "
            "`data=`"
        )
    if value == BY_TRAINING and privacy is not None:
        privacy.admit(COVERED)
    return value == BY_TRAINING


def checked_optimizer(method: str, optimizer: Any, scheduler: Any) -> OwnOptimizer | None:
    """The user's optimizer of local training; None without one. Raises ValueError for a value that
    is none, and for a method that trains by SGD alone."""
    if optimizer is None and scheduler is None:
        return None
    own = OwnOptimizer("sgd" if optimizer is None else optimizer, scheduler)
    if own.given != "sgd" and not METHODS[method].client.takes_optimizer():
        able = [name for name, m in METHODS.items() if m.client.takes_optimizer()]
        raise ValueError(
            f"{method} trains by steps of its own, which need plain SGD with the settings lr, "
            f"momentum and weight-decay; optimizer= is for {', '.join(able)}"
        )
    return own


def check_plain_training(method: str, keyword: str) -> None:
    """Raise ValueError if the method has steps of its own, which what was given as `keyword` would
    not reach."""
    if METHODS[method].client.takes_optimizer():
        return
    able = [name for name, m in METHODS.items() if m.client.takes_optimizer()]
    raise ValueError(
        f"{method} trains by steps of its own, which {keyword} does not reach; {keyword} is for "
        f"{', '.join(able)}"
    )


def check_own_steps(method: str, network: Any) -> None:
    """Raise ValueError if the method does not train by the `training_step` of a network."""
    if METHODS[method].client.takes_own_steps():
        return
    able = [name for name, m in METHODS.items() if m.client.takes_own_steps()]
    name = type(network).__name__
    raise ValueError(
        f"{name} has training_step and configure_optimizers, and {method} has a loss or steps of "
        f"its own; choose {', '.join(able)}, or return the network inside, or "
        f"torch.nn.Sequential({name}(…)) to leave them unused"
    )


def with_optimizer(
    method: str, config: Config, given: Mapping[str, Any], optimizer: OwnOptimizer | None
) -> Config:
    """`config` with torch's own defaults of the optimizer where a setting is not `given`. Raises
    Refusal for a setting that the optimizer does not read."""
    if optimizer is None or optimizer.given == "sgd":
        return config
    keys = {key.removeprefix(f"{method}.") for key in given}
    if isinstance(optimizer.given, str):
        check_unread(method, given, ("momentum",), f"optimizer= is {optimizer.given}")
    else:
        check_unread(method, given, OF_SGD, "optimizer= is a function")
    changes: dict[str, Any] = {"lr": 1.0, "momentum": 0.0}  # the function has rates of its own
    if isinstance(optimizer.given, str):
        changes = {"momentum": 0.0} | TORCH_DEFAULTS[optimizer.given]
    absent = {key: value for key, value in changes.items() if key not in keys}
    return override(config, {_key_of(method, config, key): v for key, v in absent.items()})


def check_unread(
    method: str, given: Mapping[str, Any], unread: Sequence[str], optimizer: str
) -> None:
    """Raise Refusal for a setting of SGD that the user's `optimizer` does not read."""
    keys = sorted({key.removeprefix(f"{method}.") for key in given} & {*unread})
    if keys:
        raise Refusal(
            f"{', '.join(keys)} is a setting of SGD, and {optimizer}; set it there, or leave it out"
        )


def _key_of(method: str, config: Config, key: str) -> str:
    """The key of the method's own section, if it has the setting."""
    return f"{method}.{key}" if f"{method}.{key}" in config else key


def of_client(method: str) -> set[str]:
    """The keys that the method's clients read, and those that shape its network."""
    client = METHODS[method].client
    read = _keys(client) | _of_network(client) | {"task", "label", *OF_INPUTS}
    return read - set(METHODS[method].hidden_settings)


def of_server(method: str) -> set[str]:
    """The keys that the method's strategy reads, and those that shape its network."""
    of_network = _of_network(METHODS[method].client)
    read = _keys(METHODS[method].strategy) | of_network | {"task", *OF_INPUTS}
    read -= PARAMETERS
    return read - set(METHODS[method].hidden_settings)


@lru_cache(maxsize=256)
def _of_network(client: type[Client]) -> frozenset[str]:
    """The keys of the clients' settings by which both components build the network."""
    defaults = _ReadKeys({name: declared.default for name, declared in client.declared.items()})
    uses_head = client.uses_head(defaults)
    read_by_uses_head = defaults.read  # noted during that call
    names = {*taken(client.build), *taken(client.shared), *read_by_uses_head}
    keys = {key_of(name) for name in names & {*client.declared, *RunSettings.declared}}
    if uses_head:
        keys.add("head")
    return frozenset(keys)


class _ReadKeys(dict[str, Any]):
    """A table that notes which of its keys are read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As of a dict."""
        self.read.add(key)
        return super().get(key, default)


def _keys(cls: Any) -> set[str]:
    """The keys of the settings that a class declares."""
    return {key_of(name) for name in cls.declared}


def check_users(method: str, config: Config, given: Mapping[str, Any]) -> None:
    """Raise ValueError unless `server_app` knows the number of users where it needs it alone."""
    if config["dp"] == "central":
        if "num-clients" not in given:
            raise ValueError(
                "dp is 'central': the private mean is over all users, present or not; give their "
                "number as num_clients=…"
            )
    elif "num-clients" in given and "num-clients" not in _of_network(METHODS[method].client):
        raise ValueError(
            "num-clients is read with dp='central' alone, for the mean over all users; the nodes "
            "that the server waits for are `min_available_nodes`"
        )


def privacy_of(
    method: str, config: Config, rounds: int, former: Mapping[str, Any] | None = None
) -> Privacy | None:
    """The privacy of a run of `rounds` rounds, None without any. All of `num-clients` are users
    that train. The rounds and the budget of the state `former` are among those of the run.

    Raises ValueError for bad settings, for a method that cannot keep it, and where no ε would hold
    for the model."""
    spent = None
    if former is not None and config["dp"] != "none":
        spent = spent_before(former, str(config["dp"]))
        rounds = max(0, rounds - rounds_of(former))
    terms = config | {"rounds": rounds, "train-fraction": 1.0}
    privacy: Privacy = construct(Privacy, config=terms, method=method, spent=spent)
    check_private(method, privacy.mode)
    return None if privacy.mode == "none" else privacy


def spent_budget(privacy: Privacy) -> str:
    """What the rounds so far have spent, and its terms, in one line."""
    report = privacy.report()
    return f"ε = {report['dp-epsilon']:.4g} at δ = {report['dp-delta']:g}; {report['dp-terms']}"


def clients_privacy(method: str, config: Config, rounds: int) -> Config:
    """The options of privacy that `client_app` keeps, for `clients.core.privacy`; empty without dp.

    Raises ValueError for bad settings, and for central privacy, which the server keeps."""
    if config["dp"] == "central":
        raise ValueError(
            "client_app does not carry out dp='central': the server clips and adds the noise; give "
            "dp and its settings to server_app"
        )
    if config["dp"] == "local" and not rounds:
        raise ValueError("dp is 'local': ε counts the rounds; give their number as rounds=…")
    privacy = privacy_of(method, config, rounds)
    if privacy is None:
        return {}
    values = settings(config | {"rounds": rounds}, method)
    return {key: values[key.replace("-", "_")] for key in (*_keys(Privacy), "seed", "rounds")}


def announced(method: str, given: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """The entry of every message's config that says what `server_app` was given, and its rounds."""
    short = {key.removeprefix(f"{method}."): value for key, value in given.items()}
    short[ROUNDS] = rounds
    return {APP_SETTINGS: json.dumps(short, sort_keys=True)}


def check_agreement(
    method: str, config: Config, given: Mapping[str, Any], message: Mapping[str, Any]
) -> None:
    """Raise Refusal where this client's method or settings contradict those of `server_app`, which
    the config of its `message` holds, and where the method cannot work with the server.

    Compared are settings that one component was given and the other reads."""
    own = {key.removeprefix(f"{method}.") for key in given} - _keys(Privacy)
    if APP_SETTINGS not in message:  # of a strategy without server_app
        if is_of_other_package(message):
            _check_foreign_server(method)
        _check_client_reads(method, own)
        return
    if message.get(METHOD, method) != method:
        raise Refusal(
            f"client_app has the method {method!r} and server_app {message[METHOD]!r}; give both "
            "the same"
        )
    server_given = json.loads(str(message[APP_SETTINGS]))
    server_defaults = initial_configuration(method)
    if server_given.get("dp") == "local" and config["dp"] != "local":
        raise Refusal(
            "server_app was given dp='local', and client_app was not; the clients add the noise: "
            "give client_app dp='local', its settings and rounds=…"
        )
    compared = (own & of_server(method)) | (server_given.keys() & of_client(method))
    compared -= _keys(Privacy)
    if config["dp"] == "local":  # both halves then read all of them
        compared |= _keys(Privacy)
    for key in sorted(compared):
        of_clients = value_of(method, config, key)
        of_servers = server_given.get(key, value_of(method, server_defaults, key))
        if of_clients != of_servers:
            raise Refusal(
                f"client_app has {key} {of_clients!r} and server_app {of_servers!r}; give both the "
                "same"
            )


def _check_client_reads(method: str, keys: Collection[str]) -> None:
    """Raise Refusal if client_app was given one of the `keys` that the server alone reads."""
    only_servers = sorted(set(keys) - of_client(method))
    if only_servers:
        raise Refusal(
            f"the client's app was given {only_servers[0]}, which the server alone reads; give it "
            "to the server's strategy, and not to client_app"
        )


def check_promised_rounds(promised: Any, message: Mapping[str, Any]) -> None:
    """Raise Refusal if `server_app`, whose settings the message holds, runs another number of
    rounds than this client's component has promised its user (None: nothing)."""
    if promised is None or APP_SETTINGS not in message:
        return
    rounds = json.loads(str(message[APP_SETTINGS])).get(ROUNDS)
    if rounds != promised:
        raise Refusal(
            f"client_app has rounds {promised!r}, over which it promises its user an ε, and "
            f"server_app runs {rounds!r}; give both the same"
        )


def is_of_other_package(message: Mapping[str, Any]) -> bool:
    """Whether a message with these entries comes from a strategy of another package."""
    return RUN_TOKEN not in message


def _check_foreign_server(method: str) -> None:
    """Raise Refusal if the method needs its own strategy, for a message of another package's
    strategy."""
    strategy = METHODS[method].strategy
    if strategy is FedAvg:
        return
    raise Refusal(
        f"the message comes from a strategy of another package, such as Flower's, and {method} "
        f"needs its own; write server_app({method!r}, …), or start {strategy.__name__} of "
        "fedapps.strategies in your ServerApp"
    )


def value_of(method: str, config: Config, key: str) -> Any:
    """The value that holds for the method: that of its section, else the common one."""
    return config.get(f"{method}.{key}", config.get(key))
