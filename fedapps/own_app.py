"""Any method in a user's own Flower app: its two components, from a network and data."""

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result
from torch import Tensor, nn

from clients.core.arrays import to_record
from clients.core.client import Client
from clients.core.criterion import Criterion, OwnLoss
from clients.core.draws import Draws
from clients.core.evaluation import LOGITS, PROBABILITIES, from_logits
from clients.core.flower_fast import (
    Code,
    EvaluateIns,
    FitIns,
    NumPyClient,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from clients.core.mixed_precision import check_autocast
from clients.core.own_scores import Scores, named_scores
from clients.core.privacy import settings_of
from clients.core.projections import projections_of_parameters
from clients.core.protocol import (
    AXES,
    CLASS_NAMES,
    COLUMNS,
    FROZEN,
    LOSS,
    MAGNITUDE,
    METHOD,
    NUM_EXAMPLES,
    STATISTICS,
    SUMS,
    VALUE_MAGNITUDE,
)
from clients.methods._preferences import GlobalClient
from clients.models.foreign import (
    InputShapeError,
    adopted,
    check_logits,
    check_whole_inputs,
    of_probabilities,
    takes_whole_numbers,
    uncompiled,
    warn_if_random,
)
from clients.models.lightning import OwnSteps, check_without_trainer, trains_itself
from fedapps.building import (
    Network,
    build_strategy,
    chosen_clients,
    client_settings,
    network_around,
    shared_of,
)
from fedapps.common import external_code
from fedapps.common.once import say_once
from fedapps.common.seeds import drawing
from fedapps.common.settings import present_key
from fedapps.common.tasks import BINARY, VALUES
from fedapps.common.torch_defaults import torch_defaults
from fedapps.component_settings import (
    OF_SGD,
    announced,
    check_agreement,
    check_carried_out,
    check_declared_task,
    check_own_steps,
    check_plain_training,
    check_scaling,
    check_unread,
    check_users,
    checked_optimizer,
    clients_privacy,
    initial_configuration,
    privacy_of,
    spent_budget,
    with_optimizer,
)
from fedapps.engines.in_process_grid import respond
from fedapps.methods import METHODS
from fedapps.node.bridge import opening_error, register, reply_of, unpack
from fedapps.node.context import identity
from fedapps.node.ledger import agreed_terms, protected
from fedapps.node.mods import checked_mods
from fedapps.node.own_data import (
    axes_of,
    batches_of,
    draws_of,
    magnitude_of,
    say_what_is_unused,
    share_of,
)
from fedapps.node.own_encoding import (
    TableReader,
    encoded,
    encoding_in,
    say_distance,
    statistics_of,
    unencoded,
)
from fedapps.run_settings import check_message, with_run_config
from fedapps.settings.config import Config, check_method, construct, override
from fedapps.settings.config import settings as of_method
from partitions.datasets.description import BY_TRAINING
from partitions.datasets.loading import Info
from partitions.items import parts_of
from partitions.parts import Part, packing
from partitions.reading import Form
from strategies.core.column_encoder import ColumnEncoder
from strategies.core.strategy import PersonalizedStrategy

Model = Callable[..., nn.Module]  # of nothing, or of a Context
Data = Callable[[Context], Any]
Score = Callable[[Tensor, Tensor], Any]  # of outputs and labels
Shapes = Mapping[str, tuple[int, ...]] | tuple[tuple[int, ...], ...]  # of several input tensors
LEAST_CATEGORY_ROWS = 2
UNKNOWN_DISTANCE = (
    "whether this novel client's inputs look like training is not known: the run keeps no "
    f"statistics of the training clients' inputs, as standardize={BY_TRAINING!r} in both "
    "components does"
)
OR_DECLARE = f", or give client_app outputs={PROBABILITIES!r}"


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
    config, keys = _configuration(method, settings)
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

    # Every message makes the network anew; what a trial has shown of it once holds for the others.
    checked_shapes: set[tuple[int, ...]] = set()
    known_heads: dict[Hashable, str] = {}

    def form_of(context: Context, config: Config, reader: TableReader | None) -> Form:
        return Form(
            str(config["task"]),
            str(config["label"]),
            lambda: _inputs_of(model, config, context),
            table=reader,
        )

    def make_client(
        context: Context, config: Config, named: Mapping[str, Any], message: Mapping[str, Any]
    ) -> Client:
        samples = data(context)
        task = str(config["task"])
        scales = config["standardize"] == BY_TRAINING
        if scales:
            encoding = encoding_in(message)
            form = form_of(context, config, TableReader(encoding))
            share = share_of(samples, context, public, form)
            axes = axes_of(share.everything)
            share = unencoded(share, message) if encoding is None else encoded(share, encoding)
            if encoding is not None and share.novel:
                say_distance(share, encoding)
        else:
            form = form_of(context, config, None)
            share = share_of(samples, context, public, form)
            axes = axes_of(share.everything)
            if share.novel:
                say_once(UNKNOWN_DISTANCE)
        shape = tuple(share.everything.x.shape[1:])
        try:
            (network, initial), num_outputs, module = _network(
                method,
                model,
                config,
                shape,
                context,
                outputs="" if outputs == LOGITS and shape in checked_shapes else outputs,
                parts=parts_of(share.everything),
                known_heads=known_heads,
            )
        except InputShapeError as error:
            if not form.order:
                raise
            raise ValueError(
                f"{error}; the table's columns of inputs are {', '.join(form.order):.300}"
            ) from error
        checked_shapes.add(shape)
        if takes_whole_numbers(network):
            if scales:
                raise ValueError(
                    "standardize='training-clients' makes decimals of inputs, but the network "
                    "takes whole numbers; leave it out"
                )
            check_whole_inputs(share.everything)
        share = share.below(2 if task == BINARY else num_outputs)
        given = client_settings(config, method)
        client = kind(network, share, client=identity(context), initial=initial, **given)
        if loss is not None:
            criterion = OwnLoss(loss, task, from_logits(outputs, task))
            client.criterion = criterion.to(client.device)
        common = {COLUMNS: form.columns, CLASS_NAMES: form.class_names, AXES: axes}
        client.common = {name: value for name, value in common.items() if value}
        client.own_scores = own_scores
        client.own_optimizer = own_optimizer
        client.method_clients = chosen_clients(client, config, method)
        client.autocast = autocast
        client.draws = _checked_draws(method, samples, client)
        if module is not None:
            client.own_steps = own_steps(module, samples, named)
        if scales:
            client.offers = (*client.offers, STATISTICS)
        say_what_is_unused(samples, client.batch_size)
        return client

    def own_steps(module: nn.Module, samples: Any, named: Mapping[str, Any]) -> OwnSteps:
        check_unread(method, named, OF_SGD, f"{type(module).__name__} has configure_optimizers")
        name = type(module).__name__
        for keyword, value in (("loss", loss), ("optimizer", own_optimizer)):
            if value is not None:
                raise ValueError(
                    f"{name} has training_step and configure_optimizers, and client_app was given "
                    f"{keyword}=; leave it out, or let model= return the network inside"
                )
        return OwnSteps(module, batches_of(samples))

    def checked(message: Message, context: Context) -> tuple[Config, Mapping[str, Any]]:
        """The configuration that holds for the message, and what was given of it by name."""
        chosen, named = with_run_config("client_app", method, config, keys, context.run_config)
        chosen = with_optimizer(method, chosen, named, own_optimizer)
        sent = settings_of(message)
        check_agreement(method, chosen, keys, sent)  # both halves see the run's configuration
        check_message(method, chosen, sent)
        return chosen, named

    def handle(message: Message, context: Context) -> Message:
        terms = agreed_terms(message, context)
        if terms.given is not None:
            return terms.given
        try:
            client = make_client(context, *checked(message, context), settings_of(message))
            if message.metadata.message_type == "query":
                client.common |= _of_values(client)
            reply = reply_of(client, message, context)
        except Exception as error:
            reply = opening_error(error, message, context)
        return protected(reply, message, context, terms)

    def send_sums(message: Message, context: Context) -> Message:
        terms = agreed_terms(message, context)
        chosen, _ = checked(message, context)
        reader = TableReader(None)
        share = share_of(data(context), context, public, form_of(context, chosen, reader))
        sums = statistics_of(share, reader, str(chosen["missing"]), least_category_rows)
        content = RecordDict(
            {
                "statistics": ConfigRecord({SUMS: sums.text()}),
                "metrics": MetricRecord({NUM_EXAMPLES: sums.rows}),
            }
        )
        return protected(Message(content, reply_to=message), message, context, terms)

    app = _App(privacy, around)
    for message_type in ("query", "train", "evaluate", *METHODS[method].client.exchanges):
        register(app, message_type, handle)
    if is_scaled:
        register(app, STATISTICS, send_sums)
    return app


def _of_values(client: Client) -> dict[str, Any]:
    """What nodes have in common of the numbers in frozen parameters, inputs and labels."""
    common: dict[str, Any] = {}
    if frozen := client.shared_frozen():
        common[FROZEN] = projections_of_parameters(frozen)
    samples = client.share.everything
    magnitude = magnitude_of(samples)
    if magnitude is not None and not takes_whole_numbers(client.model):
        common[MAGNITUDE] = magnitude
    # With one scaling for all nodes the server compares these by the sums.
    if client.share.targets.task == VALUES and STATISTICS not in client.offers:
        magnitude = magnitude_of(samples, of_labels=True)
        if magnitude is not None:
            common[VALUE_MAGNITUDE] = magnitude
    return common


def _checked_draws(method: str, samples: Any, client: Client) -> Draws | None:
    """The sampler of the client's loader, if it has one and the client trains. Raises ValueError
    for a method or a setting that draws otherwise."""
    draws = draws_of(samples)
    if draws is None or client.share.novel:
        return None
    check_plain_training(method, f"a DataLoader's {draws.name}")
    if client.batch_draws == "independent":
        raise ValueError(
            f"batch-draws is 'independent', and the DataLoader has {draws.name}, which draws the "
            "samples; leave one of them out"
        )
    return draws


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
    min_available_nodes: int = 2,
    then: Callable[[Result, PersonalizedStrategy], None] | None = None,
    former: Mapping[str, Any] | None = None,
    **settings: Any,
) -> ServerApp:
    """Flower's server half of `method`, for networks whose inputs are (n, *shape). For several
    input tensors `shape` is a dict of shapes by keyword, or a tuple of shapes.
    ``task=`` is that of the clients.

    It runs `rounds` rounds (0: the app's ``num-server-rounds``) once `min_available_nodes` have
    joined, and passes the result to `then`. `former` is the ``strategy.state()`` of an earlier run,
    which this one continues; `rounds` counts its rounds, too. Every round is evaluated unless
    `evaluate_every` says otherwise. `settings` are those that the method's strategy reads; those
    that clients read must be equal in `client_app`, ``task=`` and ``standardize=`` among them. With
    ``dp="central"`` the server clips and noises the mean over `num_clients` users; with
    ``dp="local"`` it asks the clients for noise.
    ``strategy.privacy.report()`` then has ε and its terms, which are also logged at the end.

    Raises ValueError for an unknown method, and for a setting that the app does not carry out."""
    entry = METHODS[check_method(method)]
    own, own_keys = _configuration(method, settings)
    check_carried_out("server_app", method, own, own_keys)
    check_users(method, own, own_keys)
    # Raises for bad settings before the app starts.
    check_scaling(own, privacy_of(method, own, rounds or 1))
    app = ServerApp()

    @app.main()
    @torch_defaults()
    def main(grid: Grid, context: Context) -> None:
        config, keys = with_run_config("server_app", method, own, own_keys, context.run_config)
        construct(entry.strategy, config=config, method=method)  # raises for a value out of range
        whole, parts = packing(shape)
        network, _, _ = _network(method, model, config, whole, context, parts=parts)
        num_rounds = rounds or int(context.run_config.get("num-server-rounds", 3))
        privacy = privacy_of(method, config, num_rounds)
        least_nodes = context.run_config.get("min-available-nodes", min_available_nodes)
        options: dict[str, Any] = {"min_available_nodes": int(least_nodes), "privacy": privacy}
        if former is not None:
            options["former"] = former
            done = int(former.get("round", 0))
            if done >= num_rounds:
                log(
                    WARNING, "nothing is trained: former has had %s rounds, and rounds=%s counts "
                    "them; for %s further rounds write rounds=%s",
                    done, num_rounds, num_rounds, done + num_rounds,
                )  # fmt: skip
        if check_scaling(config, privacy):
            options["column_encoder"] = ColumnEncoder(method, whole, str(config["missing"]))
        if "evaluate-novel" not in keys:
            options["evaluate_novel"] = bool(entry.novel)
        strategy = build_strategy(config, method, network[0], **options)
        result = strategy.start(
            grid=grid,
            initial_arrays=to_record(shared_of(network, method, of_method(config, method))),
            num_rounds=num_rounds,
            timeout=float(config["round-timeout"]),
            train_config=ConfigRecord({METHOD: method} | announced(method, keys)),
        )
        if privacy is not None:
            log(INFO, "differential privacy: %s", spent_budget(privacy))
        if then is not None:
            then(result, strategy)

    return app


def _configuration(method: str, settings: dict[str, Any]) -> tuple[Config, dict[str, Any]]:
    """The defaults with `settings`, and the latter by key; a method's own key wins over a common
    one of the same name.

    References in them are allowed: the programmer wrote them."""
    external_code.allow(*external_code.named([method, settings]))
    entry = METHODS[check_method(method)]
    if issubclass(entry.client, GlobalClient):
        able = [name for name, m in METHODS.items() if not issubclass(m.client, GlobalClient)]
        raise ValueError(
            f"{method} needs users whose tastes are known, as the preference partition makes them; "
            f"those that take any data: {', '.join(able)}"
        )
    config = initial_configuration(method)
    # A Python keyword has underscores where a key has hyphens; former keys are understood.
    keys = {name: present_key(name.replace("_", "-")) for name in settings}
    changes = {}
    for name, key in keys.items():
        key_of_method = f"{method}.{key}"
        # A common key would be overridden by the default of the method's section.
        changes[key_of_method if key_of_method in config else key] = settings[name]
    config = override(config, changes)
    construct(entry.strategy, config=config, method=method)  # raises for a value out of range
    check_declared_task(method, config)
    return config, changes


def _network(
    method: str,
    model: Model,
    config: Config,
    shape: tuple[int, ...],
    context: Context,
    outputs: str = "",
    parts: Sequence[Part] = (),
    known_heads: dict[Hashable, str] | None = None,
) -> tuple[Network, int, nn.Module | None]:
    """The method's network around the user's, the number of its outputs, and the user's network if
    it trains itself. The seed alone decides its initial arrays. `outputs` says what these are; ""
    leaves them unchecked, as for the server, which computes none. Inputs are packed of `parts`.
    `known_heads` holds the heads that were found in former networks of `model`."""
    task = str(config["task"])
    with drawing(int(str(config["seed"]))):
        base = _made(model, context)
        name = type(base).__name__
        if isinstance(base, nn.Module):
            base = uncompiled(base)
        by_itself = trains_itself(base)
        if by_itself:
            check_own_steps(method, base)
            check_without_trainer(base)
        network, num_outputs = adopted(
            base, name, shape, task=task, parts=parts, trains_itself=by_itself
        )
        if outputs == PROBABILITIES:
            of_probabilities(network, task)
        elif outputs == LOGITS:
            check_logits(network, shape, task, OR_DECLARE)
        if outputs:  # not tried before
            warn_if_random(network, shape)
        classes = 2 if task == BINARY else num_outputs
        info = Info("own", shape, classes, "", task=task)
        settings = of_method(config, method)
        built = network_around(network.eval(), method, info, settings, known_heads)
        return built, num_outputs, base if by_itself else None


def _inputs_of(model: Model, config: Config, context: Context) -> Sequence[str]:
    """The parameters of the forward pass of the user's network."""
    with drawing(int(str(config["seed"]))):
        network = uncompiled(_made(model, context))
    return tuple(inspect.signature(network.forward).parameters)


def _made(model: Model, context: Context) -> Any:
    """The user's network; a function with one parameter gets the component's Context."""
    parameters = inspect.signature(model).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
    if len(needed) > 1:
        raise ValueError(
            f"model= needs {', '.join(needed)}; give a function that takes nothing, or Flower's "
            "Context alone"
        )
    return model(context) if needed else model()


def from_client_fn(client_fn: Callable[[Any], Any], mods: Sequence[Mod] | None = None) -> ClientApp:
    """A ClientApp around the clients that `client_fn` makes of a Context, or of a ``cid``.

    A client is a NumPyClient, a Client, or what ``to_client()`` returns. It gets the message's
    config and the arrays in order. Only numbers of its metrics are sent. `mods` are Flower's,
    around each message: see `fedapps.node.mods`. Raises ValueError for one that could not work."""
    around = checked_mods(mods)
    ((name, first),) = inspect.signature(client_fn).parameters.items()
    by_cid = name == "cid" or first.annotation in (str, "str")
    app = ClientApp(mods=around)

    def called(message: Message, context: Context) -> tuple[Any, Any, list[str], list[Any]]:
        """The client, the config, and the arrays' names and values."""
        client = client_fn(str(identity(context)) if by_cid else context)
        config, arrays = unpack(message.content)
        return client, config, list(arrays), list(arrays.values())

    @app.query()
    def query(message: Message, context: Context) -> Message:
        """Nothing: the server takes the node's id as the client's."""
        return Message(RecordDict(), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client, config, names, arrays = called(message, context)
        if isinstance(client, NumPyClient):
            trained, count, metrics = client.fit(arrays, config)
        else:
            result = client.fit(FitIns(ndarrays_to_parameters(arrays), config))
            _check(result)
            trained = parameters_to_ndarrays(result.parameters)
            count = result.num_examples
            metrics = result.metrics
        if len(trained) != len(names):
            raise ValueError(f"fit got {len(names)} arrays and returned {len(trained)}")
        records = {"arrays": to_record(dict(zip(names, trained, strict=True)))}
        return _reply(message, metrics | {NUM_EXAMPLES: count}, records)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client, config, _, arrays = called(message, context)
        if isinstance(client, NumPyClient):
            loss, count, metrics = client.evaluate(arrays, config)
        else:
            result = client.evaluate(EvaluateIns(ndarrays_to_parameters(arrays), config))
            _check(result)
            loss = result.loss
            count = result.num_examples
            metrics = result.metrics
        # The client's own "loss" counts, but not its "num-examples": the server weighs by that.
        return _reply(message, {LOSS: loss} | metrics | {NUM_EXAMPLES: count}, {})

    return app


def _check(result: Any) -> None:
    if result.status.code != Code.OK:
        reason = result.status.message or f"the client answered {result.status.code.name}"
        raise RuntimeError(reason)


def _reply(message: Message, metrics: Mapping[str, Any], records: dict[str, Any]) -> Message:
    """A reply with `records` and the numbers of `metrics`; a record of metrics holds no others."""
    numbers: dict[str, Any] = {}
    for name, value in metrics.items():
        plain = value.item() if isinstance(value, np.generic) else value
        if type(plain) in (int, float):  # a boolean is an instance of int
            numbers[name] = plain
    content = records | {"metrics": MetricRecord(numbers)}
    return Message(RecordDict(content), reply_to=message)
