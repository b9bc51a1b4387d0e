"""The clients of a user's own Flower app: they answer the messages to its nodes."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

from clients.core.client import Client
from clients.core.criterion import Criterion, OwnLoss, check_own_loss
from clients.core.draws import Draws
from clients.core.evaluation import LOGITS, from_logits
from clients.core.own_optimizer import OwnOptimizer
from clients.core.own_scores import OwnScore
from clients.core.privacy import settings_of
from clients.core.projections import projections_of_parameters
from clients.core.protocol import (
    AXES,
    CLASS_NAMES,
    COLUMNS,
    FROZEN,
    MAGNITUDE,
    NUM_EXAMPLES,
    STATISTICS,
    SUMS,
    VALUE_MAGNITUDE,
)
from clients.models.foreign import InputShapeError, check_whole_inputs, takes_whole_numbers
from clients.models.lightning import OwnSteps
from fedapps.building import Network, chosen_clients, client_settings
from fedapps.common.errors import Refusal
from fedapps.common.once import say_once
from fedapps.common.seeds import drawing_anywhere, seed_of
from fedapps.common.tasks import BINARY, VALUES
from fedapps.component_settings import (
    OF_SGD,
    ROUNDS,
    check_agreement,
    check_plain_training,
    check_promised_rounds,
    check_unread,
    is_of_other_package,
    with_optimizer,
)
from fedapps.methods import METHODS
from fedapps.node.bridge import opening_error, reply_of
from fedapps.node.context import identity
from fedapps.node.ledger import agreed_terms, protected
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
from fedapps.own_network import Model, inputs_of, network_of
from fedapps.run_settings import check_message, with_run_config
from fedapps.settings.config import Config
from partitions.datasets.description import BY_TRAINING
from partitions.items import parts_of
from partitions.reading import Form
from partitions.shares import Share

Data = Callable[[Context], Any]  # a node's samples
UNKNOWN_DISTANCE = (
    "whether this novel client's inputs look like training is not known: the run keeps no "
    f"statistics of the training clients' inputs, as standardize={BY_TRAINING!r} in both "
    "components does"
)


@dataclass(frozen=True)
class ReadSamples:
    """A node's samples, and what must be the same on all nodes."""

    samples: Any  # as the user's function has returned them
    share: Share
    form: Form
    axes: str


@dataclass
class OwnClients:
    """Makes a client for each message and lets it answer; the fields are those of `client_app`.

    `config` is the configuration, and `keys` what the user gave of it by name."""

    method: str
    config: Config
    keys: Mapping[str, Any]
    model: Model
    data: Data
    public: Callable[[], Tensor] | None
    loss: Criterion | None
    scores: dict[str, OwnScore]
    outputs: str
    optimizer: OwnOptimizer | None
    autocast: str
    least_category_rows: int
    # Every message makes the network anew; what a trial has shown of it once holds for the others.
    checked_shapes: set[tuple[int, ...]] = field(default_factory=set)
    known_heads: dict[Hashable, str] = field(default_factory=dict)
    known_changes: dict[tuple[int, ...], bool] = field(default_factory=dict)

    def answer(self, message: Message, context: Context) -> Message:
        """The client's reply, protected as the node agreed with the server."""
        terms = agreed_terms(message, context)
        if terms.given is not None:
            return terms.given
        try:
            config, named = self.checked(message, context)
            client = self.client(context, config, named, settings_of(message))
            if message.metadata.message_type == "query":
                client.common |= common_values(client)
            reply = reply_of(client, message, context)
            _check_scored(reply, message)
        except Exception as error:
            reply = opening_error(error, message, context)
        return protected(reply, message, context, terms)

    def send_sums(self, message: Message, context: Context) -> Message:
        """Sums over the columns of the node's training rows."""
        terms = agreed_terms(message, context)
        config, _ = self.checked(message, context)
        reader = TableReader(None)
        form = self.form(context, config, reader)
        share = share_of(self.samples(context, config), context, self.public, form)
        sums = statistics_of(share, reader, str(config["missing"]), self.least_category_rows)
        content = RecordDict(
            {
                "statistics": ConfigRecord({SUMS: sums.text()}),
                "metrics": MetricRecord({NUM_EXAMPLES: sums.rows}),
            }
        )
        return protected(Message(content, reply_to=message), message, context, terms)

    def checked(self, message: Message, context: Context) -> tuple[Config, Mapping[str, Any]]:
        """The configuration that holds for the message, and what was given of it by name."""
        config, named = with_run_config(
            "client_app", self.method, self.config, self.keys, context.run_config
        )
        config = with_optimizer(self.method, config, named, self.optimizer)
        sent = settings_of(message)
        check_agreement(self.method, config, self.keys, sent)  # both halves see the run's config
        if config["dp"] == "local":
            check_promised_rounds(context.run_config.get(ROUNDS), sent)
        check_message(self.method, config, sent)
        return config, named

    def client(
        self,
        context: Context,
        config: Config,
        named: Mapping[str, Any],
        sent: Mapping[str, Any],
    ) -> Client:
        """The node's client; `sent` is what the message says of settings and encoding."""
        read = self.read(context, config, sent)
        (network, initial), num_outputs, trains_itself = self.network(context, config, read)
        if takes_whole_numbers(network):
            if config["standardize"] == BY_TRAINING:
                raise ValueError(
                    "standardize='training-clients' makes decimals of inputs, but the network "
                    "takes whole numbers; leave it out"
                )
            check_whole_inputs(read.share.everything)
        task = str(config["task"])
        share = read.share.below(2 if task == BINARY else num_outputs)
        kind = METHODS[self.method].client
        settings = client_settings(config, self.method)
        client = kind(network, share, client=identity(context), initial=initial, **settings)
        if self.loss is not None:
            criterion = OwnLoss(self.loss, task, from_logits(self.outputs, task))
            client.criterion = criterion.to(client.device)
            check_own_loss(criterion, task, num_outputs, client.device)
        common = {
            COLUMNS: read.form.columns,
            CLASS_NAMES: read.form.class_names,
            AXES: read.axes,
        }
        client.common = {name: value for name, value in common.items() if value}
        client.own_scores = self.scores
        client.own_optimizer = self.optimizer
        client.method_clients = chosen_clients(client, config, self.method)
        client.autocast = self.autocast
        client.draws = self.loader_draws(read.samples, client)
        if trains_itself is not None:
            client.own_steps = self.own_steps(trains_itself, read.samples, named)
        if config["standardize"] == BY_TRAINING:
            client.offers = (*client.offers, STATISTICS)
        say_what_is_unused(read.samples, client.batch_size)
        return client

    def samples(self, context: Context, config: Config) -> Any:
        """What the user's function returns.

        It is called for each message. Unless it seeds its draws itself, the run's seed makes them
        the same for all messages, and for all nodes: a random split must not let a client train on
        the samples that validate it, and parts of one permutation must not overlap."""
        with drawing_anywhere(seed_of(int(str(config["seed"])), "data")):
            return self.data(context)

    def read(self, context: Context, config: Config, sent: Mapping[str, Any]) -> ReadSamples:
        """The node's samples; with one scaling for all nodes, by the encoding in the message."""
        samples = self.samples(context, config)
        if config["standardize"] != BY_TRAINING:
            form = self.form(context, config, None)
            share = share_of(samples, context, self.public, form)
            if share.novel:
                say_once(UNKNOWN_DISTANCE)
            return ReadSamples(samples, share, form, axes_of(share.everything))
        encoding = encoding_in(sent)
        form = self.form(context, config, TableReader(encoding))
        share = share_of(samples, context, self.public, form)
        axes = axes_of(share.everything)
        if encoding is None:
            return ReadSamples(samples, unencoded(share, sent), form, axes)
        share = encoded(share, encoding)
        if share.novel:
            say_distance(share, encoding)
        return ReadSamples(samples, share, form, axes)

    def form(self, context: Context, config: Config, reader: TableReader | None) -> Form:
        """How samples are read."""
        return Form(
            str(config["task"]),
            str(config["label"]),
            lambda: inputs_of(self.model, config, context),
            table=reader,
        )

    def network(
        self, context: Context, config: Config, read: ReadSamples
    ) -> tuple[Network, int, nn.Module | None]:
        """As `network_of`, for the node's inputs."""
        samples = read.share.everything
        shape = tuple(samples.x.shape[1:])
        outputs = self.outputs
        if outputs == LOGITS and shape in self.checked_shapes:
            outputs = ""
        try:
            made = network_of(
                self.method,
                self.model,
                config,
                shape,
                context,
                outputs=outputs,
                parts=parts_of(samples),
                known_heads=self.known_heads,
                known_changes=self.known_changes,
            )
        except InputShapeError as error:
            if not read.form.order:
                raise
            raise ValueError(
                f"{error}; the table's columns of inputs are {', '.join(read.form.order):.300}"
            ) from error
        self.checked_shapes.add(shape)
        return made

    def loader_draws(self, samples: Any, client: Client) -> Draws | None:
        """The sampler of the client's loader, if it has one and the client trains. Raises
        ValueError for a method or a setting that draws otherwise."""
        draws = draws_of(samples)
        if draws is None or client.share.novel:
            return None
        check_plain_training(self.method, f"a DataLoader's {draws.name}")
        if client.batch_draws == "independent":
            raise ValueError(
                f"batch-draws is 'independent', and the DataLoader has {draws.name}, which draws "
                "the samples; leave one of them out"
            )
        return draws

    def own_steps(self, module: nn.Module, samples: Any, named: Mapping[str, Any]) -> OwnSteps:
        """The steps of a network that trains itself. Raises ValueError for what they replace."""
        name = type(module).__name__
        check_unread(self.method, named, OF_SGD, f"{name} has configure_optimizers")
        for keyword, value in (("loss", self.loss), ("optimizer", self.optimizer)):
            if value is not None:
                raise ValueError(
                    f"{name} has training_step and configure_optimizers, and client_app was given "
                    f"{keyword}=; leave it out, or let model= return the network inside"
                )
        return OwnSteps(module, batches_of(samples))


def _check_scored(reply: Message, message: Message) -> None:
    """Raise Refusal for an evaluation without samples that another package's strategy asks for: it
    would divide by zero, or compare the names of scores, and the run would end."""
    if message.metadata.message_type != "evaluate" or not is_of_other_package(settings_of(message)):
        return
    if not reply.content["metrics"][NUM_EXAMPLES]:
        raise Refusal(
            "this node has no labeled samples to be evaluated on; data= returns training and "
            "validation samples: (training, validation)"
        )


def common_values(client: Client) -> dict[str, Any]:
    """What nodes have in common of the numbers in frozen parameters, inputs and labels."""
    common: dict[str, Any] = {}
    frozen = client.shared_frozen()
    if frozen:
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
