"""Any method in a user's own Flower app: its two components, from a network and data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from logging import INFO, WARNING
from typing import Any

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result
from torch import Tensor

from clients.core.arrays import to_record
from clients.core.criterion import Criterion, OwnLoss
from clients.core.evaluation import LOGITS, PROBABILITIES
from clients.core.mixed_precision import check_autocast
from clients.core.own_scores import Scores, named_scores
from clients.core.protocol import METHOD, STATISTICS
from fedapps.building import build_strategy, shared_of
from fedapps.common.torch_defaults import torch_defaults
from fedapps.component_settings import (
    announced,
    check_carried_out,
    check_plain_training,
    check_scaling,
    check_users,
    checked_optimizer,
    clients_privacy,
    privacy_of,
    spent_budget,
)
from fedapps.engines.in_process_grid import respond
from fedapps.former_state import check_former, notes_on
from fedapps.methods import METHODS
from fedapps.node.bridge import register
from fedapps.node.mods import checked_mods
from fedapps.own_clients import Data, OwnClients
from fedapps.own_network import Model, configuration, network_of
from fedapps.run_settings import check_count, least_nodes_of, num_rounds_of, with_run_config
from fedapps.settings.config import Config, check_method, construct
from fedapps.settings.config import settings as of_method
from partitions.parts import packing
from strategies.core.column_encoder import ColumnEncoder
from strategies.core.strategy import PersonalizedStrategy

Shapes = Mapping[str, tuple[int, ...]] | tuple[tuple[int, ...], ...]  # of several input tensors
LEAST_CATEGORY_ROWS = 2


def client_app(
    method: str,
    *,
    model: Model,
    data: Data,
    public: Callable[[], Tensor] | None = None,
    loss: Criterion | None = None,
    scores: Scores = (),
    outputs: str = LOGITS,
    optimizer: str | Callable[..., Any] | None = None,
    scheduler: Callable[..., Any] | None = None,
    autocast: str = "",
    rounds: int = 0,
    least_category_rows: int = LEAST_CATEGORY_ROWS,
    mods: Sequence[Mod] | None = None,
    **settings: Any,
) -> ClientApp:
    """Flower's client half of `method`, around the network that `model` makes, of nothing or of the
    Context.

    `data` returns a node's samples: training samples, (training, validation), (training,
    validation, test), or a dict of these; without validation samples the node's model is not
    evaluated. Each is a DataLoader (its dataset, its collate function and a sampler of its own are
    used), a dataset, a pandas DataFrame (``label=`` names the column of
    labels), a dict of columns, a tensor, array or list of inputs, or a pair (x, y). A node whose
    samples have no labels, or with ``novel=true`` in its configuration, is a novel client. `public`
    returns the inputs that FedMD's methods learn from. `loss` replaces the task's loss of outputs
    and labels, in training and in scores. Methods that adapt without labels read outputs as logits
    of a softmax, whatever the loss. `scores` are further scores, functions of outputs and labels or
    torchmetrics' objects, by name or in a list: see `clients.core.own_scores`. `outputs` says
    whether the network gives "logits" or "probabilities", as one that ends in a sigmoid or a
    softmax does.

    `optimizer` replaces the SGD of local training, for methods whose mathematics allows it: "sgd",
    "adam" or "adamw", or a function of parameters that returns an optimizer of torch. `scheduler`
    is a function of that optimizer; the result takes a step after each mini-batch. The state of
    both begins anew in each round. `autocast` ("bfloat16" or "float16") is the type of forward
    passes in local training; parameters and scores keep theirs.

    ``task=`` says what labels mean, as "classes", "binary", "labels" or "values"; the server's half
    gets the same. With "binary" the loss and the scores get labels in the outputs' shape.

    With ``standardize="training-clients"``, in both halves, the server asks each training client
    once for sums over the columns of its training rows: of numbers, of gaps, and of the categories
    that at least `least_category_rows` of its rows have. All nodes then scale numbers, encode
    categories and standardise values to predict by the same statistics, as a simulation does;
    ``missing="mean"`` fills gaps.

    `settings` are those that the method's clients read, see `fedapps settings`; others are
    refused. With ``dp="local"`` each reply is clipped and noised on the node, which counts what it
    reveals; `rounds` is then the number of rounds of the run. `mods` are Flower's, around each
    message: see `fedapps.node.mods`.

    Raises ValueError for an unknown method, for a setting that the app does not carry out, and for
    a mod that could not work."""
    config, keys = configuration(method, settings)
    check_carried_out("client_app", method, config, keys)
    kind = METHODS[method].client
    exchanges = kind.exchanges
    privacy = clients_privacy(method, config, rounds)
    is_scaled = check_scaling(config, privacy_of(method, config, rounds) if privacy else None)
    if is_scaled:
        exchanges = (*exchanges, STATISTICS)
    if least_category_rows < 1:
        raise ValueError(f"least_category_rows is {least_category_rows}; it must be at least 1")
    if public is not None and not callable(public):
        raise ValueError(
            f"public is a {type(public).__name__}; give a function without arguments that returns "
            "the public inputs (n, *shape), as public=lambda: inputs"
        )
    around = checked_mods(mods, exchanges)
    if rounds and not privacy:
        raise ValueError("client_app reads rounds=… with dp='local' alone")
    if loss is not None:
        OwnLoss(loss)  # raises ValueError before the app starts
    if isinstance(scores, str):
        raise ValueError(
            f"client_app does not carry out the setting 'scores' as a text ({scores!r:.200}); give "
            "the functions, as scores={'auroc': auroc}"
        )
    own_scores = named_scores(scores)
    own_optimizer = checked_optimizer(method, optimizer, scheduler)
    check_autocast(autocast)
    if autocast:
        check_plain_training(method, "autocast=")
    if outputs not in (LOGITS, PROBABILITIES):
        raise ValueError(f"outputs is {outputs!r:.200}; it must be {LOGITS!r} or {PROBABILITIES!r}")

    clients = OwnClients(
        method=method,
        config=config,
        keys=keys,
        model=model,
        data=data,
        public=public,
        loss=loss,
        scores=own_scores,
        outputs=outputs,
        optimizer=own_optimizer,
        autocast=autocast,
        least_category_rows=least_category_rows,
    )
    app = _App(privacy, around)
    for message_type in ("query", "train", "evaluate", *METHODS[method].client.exchanges):
        register(app, message_type, clients.answer)
    if is_scaled:
        register(app, STATISTICS, clients.send_sums)
    return app


class _App(ClientApp):
    """Answers an error with its reason, as much as privacy allows.

    `privacy` holds the options of the app's own privacy, which the run's configuration lacks."""

    def __init__(self, privacy: Config, mods: list[Mod]) -> None:
        super().__init__(mods=mods)
        self._privacy = privacy

    def __call__(self, message: Message, context: Context) -> Message:
        # Last, so that no run's configuration weakens what the client's programmer set.
        if self._privacy:
            context = replace(context, run_config={**context.run_config, **self._privacy})
        with torch_defaults():
            return respond(super().__call__, message, context)


def server_app(
    method: str,
    *,
    model: Model,
    shape: tuple[int, ...] | Shapes,
    rounds: int = 0,
    min_available_nodes: int = 0,
    then: Callable[[Result, PersonalizedStrategy], None] | None = None,
    on_round: Callable[[dict[str, Any], PersonalizedStrategy], None] | None = None,
    former: Mapping[str, Any] | None = None,
    wait: float = 120.0,
    **settings: Any,
) -> ServerApp:
    """Flower's server half of `method`, for networks whose inputs are (n, *shape). For several
    input tensors `shape` is a dict of shapes by keyword, or a tuple of shapes.
    ``task=`` is that of the clients.

    It runs `rounds` rounds and passes the result to `then`. Before each round it waits up to `wait`
    seconds for `min_available_nodes` nodes; it ends with an error if fewer are connected. With 0
    both numbers are those of the run's configuration (``num-server-rounds``,
    ``min-available-nodes``), else 3 rounds and 2 nodes. Every round is evaluated unless
    `evaluate_every` says otherwise.

    `on_round` gets each round's report and the strategy, whose ``state()`` it may write. A later
    run, also after a failure, continues from such a state, given as `former`; `rounds` and ε
    include the rounds of the earlier run.

    `settings` are those that the method's strategy reads. Settings that clients read as well, such
    as ``task=`` and ``standardize=``, must be equal in `client_app`. With ``dp="central"`` the
    server clips and noises the mean over `num_clients` users; with ``dp="local"`` it asks the
    clients for noise. ``strategy.privacy.report()`` then has ε and its terms, which are also logged
    at the end.

    Raises ValueError for an unknown method, and for a setting that the app does not carry out."""
    entry = METHODS[check_method(method)]
    own, own_keys = configuration(method, settings)
    check_carried_out("server_app", method, own, own_keys)
    check_users(method, own, own_keys)
    _check_numbers(rounds, min_available_nodes, wait)
    if former is not None:
        check_former(former)
    # Raises for bad settings before the app starts.
    check_scaling(own, privacy_of(method, own, rounds or 1, former))
    app = ServerApp()

    @app.main()
    @torch_defaults()
    def main(grid: Grid, context: Context) -> None:
        config, keys = with_run_config("server_app", method, own, own_keys, context.run_config)
        construct(entry.strategy, config=config, method=method)  # raises for a value out of range
        whole, parts = packing(shape)
        network, _, _ = network_of(method, model, config, whole, context, parts=parts)
        num_rounds = num_rounds_of(rounds, context.run_config)
        least_nodes = least_nodes_of(min_available_nodes, context.run_config)
        privacy = privacy_of(method, config, num_rounds, former)
        options: dict[str, Any] = {
            "min_available_nodes": least_nodes,
            "privacy": privacy,
            "wait": wait,
        }
        if former is not None:
            options["former"] = former
            for note in notes_on(former, method, num_rounds, privacy):
                log(WARNING, "%s", note)
        if check_scaling(config, privacy):
            options["column_encoder"] = ColumnEncoder(method, whole, str(config["missing"]))
        if "evaluate-novel" not in keys:
            options["evaluate_novel"] = bool(entry.novel)
        strategy = build_strategy(config, method, network[0], **options)
        if on_round is not None:
            strategy.on_round = lambda report: on_round(report, strategy)
        result = strategy.start(
            grid=grid,
            initial_arrays=to_record(shared_of(network, method, of_method(config, method))),
            num_rounds=num_rounds,
            timeout=float(config["round-timeout"]),
            train_config=ConfigRecord({METHOD: method} | announced(method, keys, num_rounds)),
        )
        if privacy is not None:
            log(INFO, "differential privacy: %s", spent_budget(privacy))
        if then is not None:
            then(result, strategy)

    return app


def _check_numbers(rounds: Any, min_available_nodes: Any, wait: Any) -> None:
    """Raise ValueError for numbers of `server_app` that are out of range."""
    check_count("rounds", rounds, "server_app")
    check_count("min_available_nodes", min_available_nodes, "server_app")
    if not isinstance(wait, int | float) or not wait >= 0:
        raise ValueError(f"wait is {wait!r:.80}; it must be a number of seconds from 0")
