"""The Flower strategy that every method starts from: construct it, call `start` in a ServerApp.

A method overrides one or two of `initialize`, `personalize`, `broadcast` and `aggregate`. With
`exchange` it sends its clients further messages within a round. A run calls, in this order:

1. `start` (or a wrapper, such as Flower's privacy wrappers) runs the rounds.
2. `configure_train` updates the roster and calls `sample` and `broadcast`.
3. `aggregate_train` checks the replies against `expected` and `baseline_arrays`, and calls
   `to_server_names`, `aggregate` and `report`.
4. `configure_evaluate` calls `personalize`, every `evaluate_every` rounds.
5. `aggregate_evaluate` computes the metrics and ends the round.

The class has what a method states, the settings, what a method overrides, what it may call, the
messages, the run, its training, its evaluation and its checkpoint, one after the other.

`Arrays` are numpy arrays by name, as of a network's ``state_dict``. Names with "/" belong to a
group, such as "control/conv1.weight"; names without are the model's.

The other files of this folder have one subject each: the roster of nodes (`roster`), replies with
their checks and limits (`checks_and_limits`), metrics (`evaluation`), saved state (`run_state`) and
privacy (`privacy`)."""

import math
import re
import time
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableSequence,
    Sequence,
)
from contextlib import suppress
from itertools import islice
from logging import INFO, WARNING
from typing import Any, ClassVar
from uuid import uuid4

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from clients.core.arrays import Arrays, filled, from_record, num_bytes, settled, to_record
from clients.core.privacy import EVERYTHING
from clients.core.protocol import (
    BOUND,
    LR_FACTOR,
    NUM_EXAMPLES,
    RUN_TOKEN,
    SECONDS,
    SELECT,
    SELECTED_SCORE,
    SERVER_ROUND,
    lr_factor,
)
from clients.core.saved_states import check_shape
from clients.core.sgd import Optimizer
from fedapps.common.seeds import SEED, seed_of
from fedapps.common.settings import COUNT, NONNEGATIVE, POSITIVE_INT, Configured, setting
from fedapps.common.settings import SECONDS as POSITIVE_SECONDS
from fedapps.common.tasks import AUTO
from strategies.core.checks_and_limits import Receiver
from strategies.core.column_encoder import ColumnEncoder
from strategies.core.evaluation import (
    MAIN_SCORES,
    Evaluation,
    foreign_means,
    losses,
    records,
    train_means,
)
from strategies.core.kept_rounds import KeptRounds
from strategies.core.late_replies import LateReplies, rebased
from strategies.core.latency import Latency
from strategies.core.nodes import Nodes, as_nodes
from strategies.core.privacy import Privacy, participants_are_secret
from strategies.core.repeated_runs import Construction, Rebuilding
from strategies.core.replies import LACKS, NOT_FINITE, Node, Requirement, Update, finite
from strategies.core.roster import Roster
from strategies.core.round_state import PersonalizationCost, Request, Round, Sent, Stop
from strategies.core.run_state import (
    check_names,
    client_states,
    copy_containers,
    in_order_of,
    own_copy,
    return_client_states,
)

__all__ = ["PersonalizedStrategy", "Stop"]

# Aggregates the metrics of several replies; the text is the name of the metric that weighs them. As
# `train_metrics_aggr_fn` of Flower's FedAvg.
Aggregate = Callable[[list[RecordDict], str], MetricRecord]
Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]

SCORE_NAME = re.compile(r"-?[A-Za-z][\w.+-]{0,60}")
# Keys of a strategy's `state` whose values are not part of the model.
NOT_OF_MODEL = ("round", "undone-rounds", "sizes", "privacy", "token", "column-encoder", "late")


class PersonalizedStrategy(Configured, Strategy, metaclass=Rebuilding):
    """Rounds of training on sampled training clients; evaluation on training and novel clients.

    Construct it with its settings and those of the method, as keywords, and with these:

    - `wait`: seconds that a run waits for `min_available_nodes`.
    - `on_round`: called with each round's report; it may raise `Stop`.
    - `on_failure`: called with a text for each new cause of a dropped reply.
    - `privacy`: protects updates before they are aggregated.
    - `latency`: the seconds of simulated clients, for a clock without waiting.
    - `kept_rounds`: rounds of a training that the run shares with others.
    - `column_encoder`: asks training clients once for sums over their columns, by which all clients
      scale and encode their inputs.
    - `former`: the `state` of an earlier run, or just its "arrays". The run continues after the
      round of that state; with 0 rounds it only evaluates.
    - `client_states`: the states of that run's clients, by client id; they are sent back.
    - `saved_rounds`: the number of rounds that `former` was trained for, if its state holds none.
    - `only_model`: limit the roster to clients whose network has this name.
    - `ask`: False asks no node for its identity.
    - `lenient`: accept clients that lack what the strategy `requires`, and log what it computes
      with them.
    - `min_train_nodes`, `min_evaluate_nodes`, `weighted_by_key`, `arrayrecord_key`,
      `configrecord_key`, `train_metrics_aggr_fn`, `evaluate_metrics_aggr_fn`: as in Flower's
      FedAvg. Both functions aggregate the metrics of foreign clients alone.

    Without `evaluate_every` every round is evaluated, as in Flower's strategies. After r rounds,
    `saved_rounds` included, all learning rates on clients and server are multiplied by
    `lr_decay` ** (r / `lr_decay_rounds`).

    A reply is dropped, counted and logged if it is an error, lacks or invents names, has wrong
    shapes or dtypes, is not finite, or is extremely far from what was sent.

    Raises ValueError for settings out of range, RuntimeError when a run cannot continue."""

    # Former names of attributes and hooks; a method that still uses one gets a warning.
    renamed: ClassVar[Mapping[str, str]] = {
        "kept": "persistent_attributes",
        "phase": "selection_phase",
        "parts": "limit_groups",
        "leads": "runs_own_loop",
        "reports_last": "report_last_round",
        "reference": "baseline_arrays",
        "named": "to_server_names",
        "handout": "published_models",
        "exchanges": "exchange_together",
    }

    # What a method states about itself

    # What the strategy needs of clients beyond training and scoring.
    requires: Requirement | None = None
    # True: the arrays never leave the server, and Flower's loop gets none.
    keeps_arrays = False
    # True: `aggregate` moves weights in a way that would break running statistics.
    treats_statistics_apart = False
    # False: the server has no single model that it could evaluate.
    holds_model = True
    # True: training clients without labels take part.
    trains_unlabeled = False
    # True: it aggregates replies that come after their round, as `late_starts` and `rebased` say.
    # False: they are dropped.
    uses_late_replies = False
    # True: it serves clients whose networks differ.
    any_model = False
    # Only rounds of the highest phase in a run may be reported as best.
    selection_phase = 0
    # Names of attributes that a checkpoint holds beside the arrays.
    persistent_attributes: tuple[str, ...] = ()
    # True: `aggregate` changes entries of the arrays that it gets.
    in_place = False
    # Prefixes of the names in a reply: each group of arrays has its own limit of norms.
    limit_groups: tuple[str, ...] = ()
    # With `protect`, max_update_ratio and max_examples_ratio unless they are given.
    protected_update_ratio = 3.5
    protected_examples_ratio = 3.0
    # True: the last round is reported, whatever the validation scores are.
    report_last_round = False

    # Set by `start`: whether the strategy runs its own rounds, not inside a wrapper.
    runs_own_loop = False

    # Settings

    fraction_train = setting(1.0, "share of the training clients sampled in a round", "(0, 1]")
    fraction_evaluate = setting(
        1.0,
        "share of the training and of the novel clients that evaluations score, the same clients "
        "in every round; 0: none",
        "[0, 1]",
        evaluation=True,
    )
    min_available_nodes = setting(
        0,
        "wait until this many clients are connected, before every round; 0: num-clients",
        COUNT,
    )
    evaluate_every = setting(
        5,
        "evaluate every this many rounds; the last round of a run is always evaluated",
        "[1, 10000000]",
        by_hand=1,  # as Flower's strategies; inside a wrapper no round is known to be the last
    )
    evaluate_novel = setting(
        True, "evaluate novel clients as well; tuning never does", evaluation=True
    )
    on_client_failure = setting(
        "skip", "skip the reply of a failing client, or stop the run", ("skip", "stop")
    )
    min_valid_replies = setting(
        1, "stop the run if a round has fewer valid replies than this", POSITIVE_INT
    )
    round_quorum = setting(
        1.0,
        "share of the sampled clients whose valid replies end a round; others are late, and enter "
        "a later round",
        "(0, 1]",
    )
    round_deadline = setting(
        0.0,
        "seconds after which a round ends, if min-valid-replies are there; 0: when round-quorum is",
        NONNEGATIVE,
    )
    late_exponent = setting(
        0.5,
        "p: a reply that is a rounds late counts with (1 + a)^-p; 0: like others",
        "[0, 100]",
    )
    protect = setting(False, "limit the influence of each client, against malicious clients")
    max_update_ratio = setting(
        0.0, "clip an update to this multiple of the usual update norm; 0: off", NONNEGATIVE
    )
    max_examples_ratio = setting(
        0.0,
        "cap a client's weight at this multiple of the median sample count; 0: off",
        NONNEGATIVE,
    )
    max_update_norm = setting(
        0.0, "clip a client's whole update to this norm; 0: off", "[0, 1000000000000]"
    )
    average_over = setting(
        "clients",
        "average accuracy over clients (unweighted) or over samples",
        ("clients", "samples"),
        evaluation=True,
    )
    selection_metric = setting(
        "auto",
        "training clients' validation score whose mean chooses the reported round: one of "
        f"{', '.join(SELECT)}, or of `scores`; auto: the task's main score",
        evaluation=True,
    )
    selection_mean = setting(
        "trimmed",
        "mean of selection-metric: trimmed, without a tenth at each end; or plain",
        ("trimmed", "plain"),
        evaluation=True,
    )
    report_generalization_bound = setting(
        False,
        "report the terms of ODPFL-HN's generalization bound",
        evaluation=True,
    )
    lr_decay = setting(
        1.0, "multiply all learning rates by this, smoothly over lr-decay-rounds", "(0, 1]"
    )
    lr_decay_rounds = setting(
        10,
        "rounds in which lr-decay multiplies the learning rates once",
        "[1, 10000000]",
        beside="lr-decay!=1.0",
    )
    start_timeout = setting(
        3600.0,
        "seconds to wait for a client's first reply, for which it loads its data",
        POSITIVE_SECONDS,
    )
    seed = SEED

    grid: Grid
    construction: Construction

    def __init__(
        self,
        *,
        wait: float = 120.0,
        on_round: Callable[[dict[str, Any]], None] | None = None,
        on_failure: Callable[[str], None] | None = None,
        former: Mapping[str, Any] | None = None,
        client_states: Mapping[int, Arrays] | None = None,
        only_model: str = "",
        privacy: Privacy | None = None,
        latency: Latency | None = None,
        kept_rounds: KeptRounds | None = None,
        column_encoder: ColumnEncoder | None = None,
        saved_rounds: int = 0,
        min_train_nodes: int = 1,
        min_evaluate_nodes: int = 1,
        weighted_by_key: str = NUM_EXAMPLES,
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: Aggregate | None = None,
        evaluate_metrics_aggr_fn: Aggregate | None = None,
        ask: bool = True,
        lenient: bool = False,
        **settings: Any,
    ) -> None:
        if lenient and self.requires is not None:
            self.requires.relax(type(self).__name__)
            self.requires = None
        super().__init__(**settings)
        if not SCORE_NAME.fullmatch(self.selection_metric):
            raise ValueError(
                f"selection-metric is {self.selection_metric!r:.200}; it must be the name of a "
                f"score: one of {', '.join(SELECT)}, or of your own, a word"
            )
        if self.protect:
            self.max_update_ratio = self.max_update_ratio or self.protected_update_ratio
            self.max_examples_ratio = self.max_examples_ratio or self.protected_examples_ratio
        self.privacy = privacy
        self.latency = latency
        self.kept_rounds = kept_rounds
        self.column_encoder = column_encoder
        self.on_round = on_round
        self.on_failure = on_failure

        # The run that this one continues.
        self.former = former  # its state; None once it is loaded
        self.former_clients = dict(client_states or {})  # by id, states that are not sent back yet
        self.saved_rounds = saved_rounds

        # Arguments with the meaning of Flower's FedAvg.
        self.min_nodes = {"sample": min_train_nodes, "evaluate": min_evaluate_nodes}
        self.weighted_by_key = weighted_by_key
        self.arrayrecord_key = arrayrecord_key
        self.configrecord_key = configrecord_key
        self.train_metrics_aggr_fn = train_metrics_aggr_fn  # None: `foreign_means`
        self.evaluate_metrics_aggr_fn = evaluate_metrics_aggr_fn

        # The run.
        self.arrays: Arrays = {}  # the server's present arrays
        self.nodes: MutableSequence[Node] = Nodes()  # present nodes, by client id
        self.published_models: Arrays = {}  # clients' models, to serve without the clients
        self.evaluation: list[Update] = []  # replies of the last evaluation
        self.now = Round()  # the present round; other attributes live through the run
        self.undone_rounds = 0  # rounds whose aggregate was not finite
        self.num_rounds = 0
        self.serves_finished_run = False  # to nodes that may be others than those that trained it
        self.timeout = 3600.0  # seconds
        self.token = uuid4().hex  # tells nodes which of their states belong to this run
        self.common_config: dict[str, Any] = {}  # part of every message's config

        self.receiver = Receiver(self)
        self.late = LateReplies(self)
        self.roster = Roster(
            max(self.min_available_nodes, *self.min_nodes.values()),
            wait,
            only_model,
            self.start_timeout,
            ask=ask,
            requires=self.requires,
            requires_too=None if column_encoder is None else column_encoder.requires,
            strategy=type(self).__name__,
        )
        self._evaluation = Evaluation(self)
        self._accepted: ArrayRecord | None = None  # the last record that Flower passed
        self._record: ArrayRecord | None = None  # of `arrays`; None if it is not made yet

    @property
    def round(self) -> int:
        """The number of the present round, from 1."""
        return self.now.number

    @property
    def decay(self) -> float:
        """The factor of the learning rates in the present round."""
        return lr_factor(self.lr_decay, self.lr_decay_rounds, self.saved_rounds + self.round)

    # What a method overrides

    @property
    def may_stop(self) -> bool:
        """Whether early stopping may end training now.

        False if a phase that the method needs has not begun, or if the last round is reported."""
        return not self.report_last_round

    @property
    def evaluates_novel(self) -> bool:
        """Whether the present round's evaluation includes novel clients."""
        return self.evaluate_novel

    def check_training_clients(self, count: int) -> None:
        """Raise ValueError if the method cannot do what it promises with so many of them.

        Called before a simulation begins."""

    def check_rounds(self, count: int, *, continues: bool) -> None:
        """Raise ValueError if the method cannot do what it promises in so many rounds; `continues`
        tells whether they go on from a saved run.

        Called before a simulation begins."""

    def initialize(self, arrays: Arrays) -> Arrays:
        """The server's arrays at the start, made from the `arrays` of the initial model.

        Called once in a run, before `restore`."""
        return arrays

    def restore(self, arrays: Arrays, saved: Arrays) -> Arrays:
        """The server's arrays at the start of a run that continues another one.

        `arrays` are those that `initialize` returned, `saved` those of the other run. A method that
        keeps parameters outside of its arrays, such as a hypernetwork, loads them here. Raises
        ValueError if names or shapes differ."""
        restored = in_order_of(arrays, saved)
        for name, array in restored.items():
            check_shape(f"the saved array {name!r}", array.shape, arrays[name].shape)
        return restored

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the method cannot continue from this saved `state`, whatever its
        arrays are.

        Called before a run begins, and by `load_state`."""

    def forget(self) -> None:
        """Drop what `restore` rebuilds from the arrays, before a round is undone."""

    def sample(self) -> list[Node]:
        """The nodes that train in this round: a seeded draw from the training nodes.

        Raises RuntimeError if no training node is present."""
        nodes = self.training_nodes()
        if not nodes:
            raise RuntimeError(self._no_training_client())
        if self.privacy is not None:
            secret_sample = self.privacy.sample(nodes, self.round)
            if secret_sample is not None:
                return secret_sample
        return self.draw("sample", nodes, self.fraction_train)

    def personalize(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """The model for each of the `nodes`, training or novel; by default the server's `arrays`.

        Evaluations and served runs call it. It may send messages to the nodes by `exchange`, and
        may leave out nodes that do not reply."""
        return dict.fromkeys(nodes, arrays)

    def broadcast(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """The arrays of each sampled node's train message; by default those of `personalize`."""
        return self.personalize(arrays, nodes)

    def message_config(self) -> dict[str, Any]:
        """Entries of the config of every message in the present round."""
        config: dict[str, Any] = {SERVER_ROUND: self.round, RUN_TOKEN: self.token}
        if self.lr_decay < 1:
            config[LR_FACTOR] = self.decay
        if self.column_encoder is not None:
            config |= self.column_encoder.settings()
        return config

    def expected(self, sent: Arrays) -> Arrays | None:
        """Arrays with the names, shapes and dtypes that a train reply must have; None: any.

        `sent` are the arrays of the train message."""
        return sent

    def baseline_arrays(self, sent: Arrays) -> Arrays:
        """The arrays from which the change of a train reply is measured, for limits of norms.

        `sent` are the arrays of the train message. Arrays of a reply under other names are measured
        from zero."""
        return sent

    def late_starts(self, sent: Mapping[Node, Arrays]) -> dict[Node, Arrays]:
        """The present arrays under the names of those that late nodes were `sent`, by node.

        The changes of late replies are added to them. A node that is left out has its reply
        dropped: by default if a name is no longer among the server's arrays."""
        starts: dict[Node, Arrays] = {}
        for node, arrays in sent.items():
            if arrays.keys() <= self.arrays.keys():
                starts[node] = {name: self.arrays[name] for name in arrays}
        return starts

    def rebased(self, arrays: Arrays, sent: Arrays, start: Arrays, weight: float) -> Arrays:
        """A late reply's `arrays` as those of a reply to `start`: x + w (y − x_s), or w y under
        names that were not sent, see `strategies.core.late_replies.rebased`."""
        return rebased(arrays, sent, start, weight)

    def to_server_names(
        self, updates: list[Update], sent: list[Arrays]
    ) -> tuple[list[Update], list[Arrays]]:
        """Replies, and the arrays that they started from, under the server's names.

        A method whose messages use other names than the server's arrays overrides it."""
        return updates, sent

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """The server's next arrays, from its present `arrays` and the valid replies, by client id.

        The updates' arrays are read-only. Returns new arrays, unless `in_place`. The values of
        `persistent_attributes` are replaced as well, not changed. A round whose result holds NaN or
        infinity is undone."""
        raise NotImplementedError

    def global_model(self) -> Arrays:
        """The one model that the server holds: the arrays that are in no group."""
        return {name: array for name, array in self.arrays.items() if "/" not in name}

    def report(self) -> dict[str, Any]:
        """The method's own entries of a round's report, called after `aggregate`."""
        return {}

    def optimizers(self) -> list[Optimizer]:
        """The server's optimizers, whose state a checkpoint holds. Always in the same order."""
        return []

    # What a method calls

    def exchange(
        self,
        action: str,
        payloads: Mapping[Node, Arrays],
        config: Mapping[str, Any] | None = None,
        like: Mapping[Node, Arrays] | None = None,
    ) -> list[Update]:
        """Send one more message to each node within the round, and return the valid replies.

        `action` is Flower's message type: ``exchange("query.encode", …)``. `payloads` are each
        node's arrays; `config` is added to the messages' config. `like` gives, by node, arrays of
        the names, shapes and dtypes that a reply must have. Replies are sorted by client id; nodes
        that fail or do not reply are left out, logged and counted in the round."""
        (updates,) = self.exchange_together(Request(action, payloads, config or {}, like or {}))
        return updates

    def exchange_together(self, *requests: Request) -> list[list[Update]]:
        """Send several requests together, where none needs the replies of another.

        Returns the valid replies to each request."""
        config = self.common_config | self.message_config()
        records: dict[int, ArrayRecord] = {}  # shared by all requests
        sent_by_request: list[Sent] = []
        messages: list[Message] = []
        asked: set[Node] = set()
        for request in requests:
            request_config = ConfigRecord({**config, **request.config})
            sent = self._messages(request.action, request.payloads, request_config, records)
            sent_by_request.append(sent)
            messages += [message for message, _ in sent]
            asked.update(request.payloads)
        replies: list[Message] = []
        if messages:
            replies += self.grid.send_and_receive(messages, timeout=self.timeout)
        # The requests are answered together, so a simulated clock waits once, for the slowest node.
        self.late.wait_for(asked)
        answers: list[list[Update]] = []
        for request, sent in zip(requests, sent_by_request, strict=True):
            answers.append(self.receiver.receive(sent, replies, request.like))
        return answers

    def training_nodes(self) -> Nodes:
        """The training nodes that are present, by client id.

        Nodes without labels are among them only if the method `trains_unlabeled` ones, and never
        with privacy, whose noise is that of a single mean."""
        with_unlabeled = self.trains_unlabeled and self.privacy is None

        def trains(node: Node) -> bool:
            return not node.novel and (with_unlabeled or not node.unlabeled)

        return as_nodes(self.nodes).of_kinds(trains)

    def _no_training_client(self) -> str:
        """What to say if none of the connected nodes trains: how many there are, and the causes."""
        novel = sum(node.novel for node in self.nodes)
        unlabeled = sum(node.unlabeled for node in self.nodes)
        causes = []
        if novel:
            causes.append(
                f"{novel} are novel: their training samples have no labels (the first item decides "
                "for a dataset), or their node configuration has novel=true"
            )
        if unlabeled:
            causes.append(f"{unlabeled} have no labels, which the method does not train on")
        refusals = self.roster.refusals
        if refusals:
            causes.append(f"{len(refusals)} more are refused; one said: {refusals[0].reason}")
        text = f"no training client among {len(self.nodes)} connected nodes"
        return "; ".join([text, *causes])

    def draw(self, purpose: str, nodes: Sequence[Node], fraction: float) -> list[Node]:
        """A random share of the nodes, in their order; seeded by (seed, purpose, round).

        Busy nodes are left out, and others are drawn in their places as far as there are some.
        At least `min_nodes` of the purpose, "sample", are drawn, if there are as many. The number
        is rounded to the nearest whole one, where Flower's FedAvg cuts it."""
        count = max(1, self.min_nodes[purpose], round(fraction * len(nodes)))
        generator = np.random.default_rng(seed_of(self.seed, purpose, self.round))
        order = iter(generator.permutation(len(nodes)))
        busy = self.late.busy
        if busy:
            order = (i for i in order if nodes[i] not in busy)
        return [nodes[i] for i in sorted(islice(order, count))]

    def draw_to_evaluate(self, nodes: Sequence[Node]) -> list[Node]:
        """A random share `fraction_evaluate` of the training and of the novel nodes, in their
        order; at least one of each role, and `min_nodes` in all, if there are as many.

        The same clients in every round of a run: of rounds that score other clients, the best one
        would be the one with the easiest clients. A client that joins or leaves changes the sample
        by at most itself and one other."""
        if self.fraction_evaluate == 1:
            return list(nodes)
        least = self.min_nodes["evaluate"]
        chosen: list[Node] = []
        for novel in (False, True):
            of_role = as_nodes(nodes).of_kinds(_has_role(novel))
            seeds = [seed_of(self.seed, "evaluate", client) for client in of_role.clients]
            order = np.argsort(np.array(seeds, np.int64), kind="stable")
            count = max(1, round(self.fraction_evaluate * len(of_role)))
            least_of_role = math.ceil(least * len(of_role) / max(len(nodes), 1))
            chosen += [of_role[i] for i in order[: max(count, least_of_role)]]
        return sorted(chosen)

    # Messages

    def _messages(
        self,
        action: str,
        payloads: Mapping[Node, Arrays],
        config: ConfigRecord,
        records: dict[int, ArrayRecord] | None = None,
    ) -> Sent:
        """One message per node, of Flower's message type `action`; its bytes count in the round.

        Arrays that nodes share are serialised once. `records` holds the results by the arrays' id;
        pass the same dict to share them with other messages."""
        if records is None:
            records = {}
        if self._record is not None:
            records[id(self.arrays)] = self._record
        sent: Sent = []
        for node in sorted(payloads):
            arrays = payloads[node]
            sent.append((self.message_to(node, action, arrays, config, records), node))
            self.now.bytes["down"] += num_bytes(arrays.values())
        return sent

    def message_to(
        self,
        node: Node,
        action: str,
        arrays: Arrays,
        config: ConfigRecord,
        records: dict[int, ArrayRecord],
    ) -> Message:
        """A message whose bytes are not counted; `records` are those of `_messages`."""
        if id(arrays) not in records:
            records[id(arrays)] = to_record(arrays)
        entries = {self.arrayrecord_key: records[id(arrays)], self.configrecord_key: config}
        content = filled(RecordDict(), entries)
        return Message(content, dst_node_id=node.id, message_type=action)

    # A run

    def summary(self) -> None:
        """Flower's hook to log the settings; nothing is logged, the configuration has them."""

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Run the rounds up to `num_rounds`; the result holds the server's final arrays.

        `timeout` is in seconds, for each exchange of messages. `train_config` is also part of
        queries, of further exchanges and, unless `evaluate_config` is given, of evaluations.
        `evaluate_fn` gets the round's number and `global_model`, after each round.

        Raises ValueError for an `evaluate_fn` where there is no global model, RuntimeError when
        the run cannot continue."""
        if evaluate_fn is not None and (self.keeps_arrays or not self.holds_model):
            raise ValueError(
                f"{type(self).__name__} holds no model that evaluate_fn could evaluate: every "
                "client has its own; leave it out and read the clients' evaluations"
            )
        if type(self).aggregate_train is not PersonalizedStrategy.aggregate_train:
            self._check_own_rounds()
        self.construction.begin(self)
        self.grid = grid
        self.num_rounds = num_rounds
        self.timeout = timeout
        self.common_config = dict(train_config or {})
        training = ConfigRecord(self.common_config)
        self.runs_own_loop = True
        try:
            return self._run(initial_arrays, training, evaluate_config or training, evaluate_fn)
        finally:
            self.runs_own_loop = False
            self.construction.end(self)

    def _run(
        self,
        arrays: ArrayRecord,
        training: ConfigRecord,
        evaluation: ConfigRecord,
        evaluate_fn: Evaluate | None,
    ) -> Result:
        """The remaining rounds, or one evaluation if `num_rounds` is 0."""
        result = Result()
        num_rounds = self.num_rounds  # as given: a run that stops early lowers the attribute
        self.now = Round()
        self._accept(arrays)  # loads the former state, with its round
        done = self.round
        if not done:
            self._evaluate_centrally(0, evaluate_fn, result)
        try:
            for number in range(done + 1, num_rounds + 1):
                log(INFO, "[ROUND %s/%s]", number, num_rounds)
                arrays, metrics = self._train_or_take(number, arrays, training)
                if metrics is not None:
                    result.train_metrics_clientapp[number] = metrics
                self._evaluate(number, arrays, evaluation, result)
                self._evaluate_centrally(number, evaluate_fn, result)
        except Stop as stop:
            log(INFO, "training ends after round %s: %s", self.round, stop)
            if not self.now.evaluated:
                self.num_rounds = self.round  # a last round is always evaluated
                with suppress(Stop):  # `on_round` may raise it again
                    self._evaluate(self.round, arrays, evaluation, result)
        if not num_rounds:
            self.now = Round(0, report={"round": 0})
            self._evaluate(0, arrays, evaluation, result)
        self._stop_on_undone()
        result.arrays = to_record(self.arrays)
        return result

    def _train_or_take(
        self, number: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> tuple[ArrayRecord, MetricRecord | None]:
        """Train a round, unless `kept_rounds` has it. Returns the arrays and the metrics."""
        kept = self.kept_rounds
        if kept is not None:
            if not self.nodes:  # the run begins
                self.present()
                self.check_training_clients(len(self.training_nodes()))
            metrics = kept.take(self, number)
            if metrics is not None:
                if self.now.has_state:
                    arrays = to_record(self.arrays)
                    self._record = arrays
                return arrays, metrics
        replies = self._send_train(self.configure_train(number, arrays, config, self.grid))
        aggregated, metrics = self.aggregate_train(number, replies)
        if aggregated is not None:
            arrays = aggregated
        if kept is not None:
            kept.keep(self, metrics)
        return arrays, metrics

    def open(self, grid: Grid, initial_arrays: ArrayRecord, config: Mapping[str, Any]) -> None:
        """Load the `former` state without any round, to serve the nodes of the grid.

        Afterwards `personalize` and `exchange` can be called; their messages hold `config`."""
        self.construction.begin(self)
        self.grid = grid
        self.serves_finished_run = True
        self.common_config = dict(config)
        self._accept(initial_arrays)

    def _accept(self, record: ArrayRecord) -> None:
        """Take over the arrays that Flower's loop passes, unless the strategy itself returned them.

        The first arrays of a run initialize the strategy, which then loads its former state. Later
        arrays are those that a wrapper changed: they replace the strategy's, and all other state is
        kept. Raises ValueError as `initialize`, `load_state` and `check_names` do."""
        if record is self._accepted or record is self._record:
            return
        arrays = from_record(record)
        if not self.runs_own_loop and self._accepted is not None:
            state = copy_containers(self.state()) | {"handout": self.published_models}
            self.load_state(state | {"arrays": arrays})
            self._accepted = record
            self._record = None
            return
        if self.treats_statistics_apart:
            check_names(arrays, type(self).__name__)
        self.arrays = self.initialize(arrays)
        if self.former is not None:
            self.load_state(own_copy(self.former, in_place=self.in_place))
            self.former = None
        self._accepted = record
        self._record = record if self.arrays is arrays else None

    def _send_train(self, messages: Iterable[Message]) -> Iterable[Message]:
        """The replies to train messages, one by one as they arrive if the grid can do so.

        Together they are as large as all clients' models."""
        # An `aggregate_train` of a subclass may expect a list, as Flower's own loop passes it.
        if type(self).aggregate_train is not PersonalizedStrategy.aggregate_train:
            return self.grid.send_and_receive(messages, timeout=self.timeout)
        if self.late.active:
            return ()  # `aggregate_train` lets `late` send them
        send = getattr(self.grid, "stream", self.grid.send_and_receive)
        replies: Iterable[Message] = send(messages, timeout=self.timeout)
        return replies

    def _evaluate(
        self, number: int, arrays: ArrayRecord, config: ConfigRecord, result: Result
    ) -> None:
        messages = self.configure_evaluate(number, arrays, config, self.grid)
        replies = self.grid.send_and_receive(messages, timeout=self.late.seconds_to_score)
        metrics = self.aggregate_evaluate(number, replies)
        if metrics is not None:
            result.evaluate_metrics_clientapp[number] = metrics

    def _evaluate_centrally(
        self, number: int, evaluate_fn: Evaluate | None, result: Result
    ) -> None:
        if evaluate_fn is None:
            return
        metrics = evaluate_fn(number, to_record(self.global_model()))
        if metrics is not None:
            result.evaluate_metrics_serverapp[number] = metrics

    def present(self) -> MutableSequence[Node]:
        """Update the roster; returns the nodes that are present, by client id.

        Raises as `Roster.present` does."""
        config = self.common_config | {RUN_TOKEN: self.token}
        if self.column_encoder is not None:
            config |= self.column_encoder.settings()
        nodes = self.roster.present(self.grid, config, self.timeout)
        self.nodes = nodes.copy()  # since a strategy may change its list
        return self.nodes

    def _update_roster(self) -> None:
        """Update the roster, count the nodes that it refused, send clients of a former run their
        states back, and make the encoding of inputs if the run needs one and has none."""
        self.present()
        self.now.dropped += self.roster.refused
        return_client_states(self, self.former_clients)
        if self.column_encoder is not None and self.column_encoder.encoding is None:
            self.column_encoder.learn(self)

    # Training

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages to the sampled training nodes."""
        if not self.runs_own_loop and server_round == 1:
            self._check_own_rounds()
            self.construction.begin(self)  # a wrapper's run begins
            self._warn_of_last_round()
        self.now = now = Round(server_round)
        self.grid = grid
        self._accept(arrays)
        self._update_roster()
        now.training = True
        busy = self.late.busy
        nodes = [node for node in self.sample() if node not in busy]
        now.payloads = self.broadcast(self.arrays, nodes)
        if not self.runs_own_loop:
            self._check_wrapped(arrays, now.payloads.values())
        entries = dict(config) | self.message_config()
        if self.privacy is not None:
            self.privacy.spend(list(now.payloads))  # before any message is sent
            entries |= self.privacy.settings()
        now.sent = self._messages("train", now.payloads, ConfigRecord(entries))
        now.report = {
            "round": server_round,
            "present": len(self.nodes),
            "sampled": len(nodes),
        }
        now.end_phase("send")
        return [message for message, _ in now.sent]

    def _check_own_rounds(self) -> None:
        """Raise ValueError for settings of rounds that another loop runs, or reads the replies
        of."""
        if self.late.active:
            raise ValueError(
                f"{type(self).__name__} has round_quorum {self.round_quorum:g}, round_deadline "
                f"{self.round_deadline:g} or latency, but another loop waits for its replies: call "
                "its own start, without an aggregate_train of yours, or leave them out"
            )

    def _check_wrapped(self, record: ArrayRecord, payloads: Collection[Arrays]) -> None:
        """Raise ValueError unless a wrapper can protect the strategy.

        A wrapper clips arrays and adds noise by their position in its `record`. So clients must get
        and return arrays of the same names, order and shapes."""
        name = type(self).__name__
        if self.keeps_arrays:
            why = "its arrays stay on the server, where no wrapper can add noise to them"
        elif self.requires is not None and self.requires.needs_exchanges:
            why = f"its clients {self.requires.behaviour}, which no wrapper clips"
        elif not self._are_like(record, payloads):
            why = "its clients do not get and return the very arrays that a wrapper clips"
        else:
            return
        raise ValueError(
            f"{name} cannot run inside another strategy, such as Flower's privacy wrappers: {why}. "
            f"Call {name}.start itself; for its own privacy see docs/concepts/privacy.md"
        )

    def _are_like(self, record: ArrayRecord, payloads: Collection[Arrays]) -> bool:
        """Whether payloads and expected replies have the names, order and shapes of the record."""
        needed = [(name, tuple(array.shape)) for name, array in record.items()]
        for sent in payloads:
            for arrays in (sent, self.expected(sent) or {}):
                if [(name, array.shape) for name, array in arrays.items()] != needed:
                    return False
        return True

    def _warn_of_last_round(self) -> None:
        """Warn if a wrapper's last round may not be evaluated."""
        if self.evaluate_every > 1:
            log(
                WARNING,
                "%s runs inside another strategy, which does not say which round is the last: with "
                "evaluate_every=%s the last round may not be evaluated; leave it out to evaluate "
                "every round",
                type(self).__name__,
                self.evaluate_every,
            )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the valid replies.

        Returns the new arrays, or None if the server keeps them, and the round's metrics. A round
        whose aggregate is not finite is undone. Raises RuntimeError if too few replies are
        valid."""
        now = self.now
        num_asked = max(len(now.sent), 1)
        if self.late.active:
            updates = self.late.collect(now.sent)
        else:
            updates = self.receiver.receive(
                now.sent, replies, self.expected_replies(), self.baselines(), train=True
            )
        now.end_phase("clients")
        self._stop_on_failure()
        self._stop_on_few(updates)
        started_from = [now.payloads[update.node] for update in updates]
        updates = self.to_server_names(updates, started_from)[0]
        # Free the sent models: they use twice the memory of the replies.
        del started_from
        now.sent = []
        now.payloads = {}
        if self.privacy is not None:
            updates = self.privacy.protect(updates, self.arrays, server_round)
        before = own_copy(self.state(), in_place=self.in_place)
        with np.errstate(over="ignore", invalid="ignore"):  # the result is checked below
            aggregated = self.aggregate(self.arrays, updates)
            self.arrays = settled(aggregated, before["arrays"])
        if not self._model_is_finite():
            self._undo_round(before)
        self._stop_on_failure()  # `aggregate` may have made an exchange
        now.report |= self._train_report(updates, num_asked) | self.report()
        now.training = False
        now.end_phase("aggregate")
        self._record = None if self.keeps_arrays else to_record(self.arrays)
        return self._record, self._train_metrics(updates)

    def _model_is_finite(self) -> bool:
        """Whether the model's part of the state holds no NaN or infinity."""
        state = self.state()
        return finite({key: value for key, value in state.items() if key not in NOT_OF_MODEL})

    def _undo_round(self, before: dict[str, Any]) -> None:
        """Return to the state `before` the round; the privacy budget of the round stays spent."""
        log(WARNING, "round %s is undone: NaN or infinity would come into the model", self.round)
        self.forget()
        state = before | {"handout": self.published_models}
        if self.privacy is not None:
            state["privacy"] = self.privacy.state()
        self.load_state(state)
        self.undone_rounds += 1
        self.now.report["undone"] = True

    def expected_replies(self) -> dict[Node, Arrays]:
        """What `expected` says of each node's train message in the present round."""
        like: dict[Node, Arrays] = {}
        for node, sent in self.now.payloads.items():
            expected = self.expected(sent)
            if expected is not None:
                like[node] = expected
        return like

    def baselines(self) -> dict[Node, Arrays]:
        """What `baseline_arrays` says of each node's train message in the present round."""
        payloads = self.now.payloads
        return {node: self.baseline_arrays(sent) for node, sent in payloads.items()}

    def _train_report(self, updates: list[Update], num_asked: int) -> dict[str, Any]:
        """The entries of a round's report about training replies; entries without news are left
        out. Megabytes are the mean over the `num_asked` clients."""
        now = self.now
        report: dict[str, Any] = {"loss": None}
        train_losses = losses(updates)
        if train_losses:
            report["loss"] = float(np.mean(train_losses))
        metrics = train_means(updates)
        if metrics:
            report["metrics"] = metrics
        not_finite = self._evaluation.count_not_finite(updates)
        if not_finite:
            report["not-finite"] = not_finite
        report["valid"] = len(updates)
        report["dropped"] = dict(now.dropped)
        if now.clipped:
            report["clipped"] = now.clipped
        if now.recounted:
            report["recounted"] = now.recounted
        report["megabytes"] = {way: count / num_asked / 1e6 for way, count in now.bytes.items()}
        return report

    def _train_metrics(self, updates: list[Update]) -> MetricRecord:
        """A round's metrics, for Flower's `Result` or a wrapper."""
        report = self.now.report
        metrics = MetricRecord()
        if self.privacy is None:
            aggregate = self.train_metrics_aggr_fn or foreign_means
            foreign_records = records(updates, self.weighted_by_key)
            metrics.update(aggregate(foreign_records, self.weighted_by_key))
        if not participants_are_secret(self.privacy):
            metrics["valid-replies"] = report["valid"]
            if report["loss"] is not None:
                metrics["loss"] = report["loss"]
            for name, count in report.get("not-finite", {}).items():
                metrics[f"not-finite-{name}"] = count
            for cause, count in report["dropped"].items():
                metrics[f"dropped-{cause}"] = count
            for name in ("clipped", "recounted"):
                if name in report:
                    metrics[name] = report[name]
        if report.get("undone"):
            metrics["undone"] = 1
        return metrics

    def _stop_on_failure(self) -> None:
        """Raise RuntimeError if a client failed and `on_client_failure` is "stop"."""
        dropped = self.now.dropped
        if not dropped or self.on_client_failure != "stop":
            return
        causes: Collection[str] = dict(dropped)
        if participants_are_secret(self.privacy):
            causes = sorted(dropped)  # counts would tell how many took part
        raise RuntimeError(
            f"{self._unmet_requirement()}round {self.round}: a client failed ({causes}); "
            f"{self.now.failure}"
        )

    def _stop_on_few(self, updates: list[Update]) -> None:
        """Raise RuntimeError if too few of the sampled clients replied."""
        now = self.now
        least = self.min_valid_replies
        if len(updates) >= least or not now.report["sampled"]:  # a private sample may be empty
            return
        if participants_are_secret(self.privacy):
            count = "too few valid replies"
            causes = ""
        else:
            count = f"{len(updates)} valid replies of {len(now.sent)}"
            causes = f"; dropped by cause: {dict(now.dropped)}"
        if now.failure:
            causes += f"; {now.failure}"
        if set(now.dropped) == {NOT_FINITE}:
            causes += "; training diverged: lower lr"
        raise RuntimeError(
            f"{self._unmet_requirement()}round {now.number}: {count}, min-valid-replies is "
            f"{least}{causes}"
        )

    def _stop_on_unscored(self, updates: list[Update]) -> None:
        """Raise RuntimeError if every evaluated training client, or every novel one, failed.

        Clients that only answered too late do not stop a run."""
        now = self.now
        roles = {False: "training", True: "novel"}  # by `Node.novel`
        asked_roles = {roles[node.novel] for _, node in now.sent}
        scored_roles = {roles[update.node.novel] for update in updates}
        unscored_roles = asked_roles - scored_roles
        all_late = now.dropped.total() == now.dropped["missing"]
        if not unscored_roles or all_late:
            return
        role = "training" if "training" in unscored_roles else "novel"
        raise RuntimeError(
            f"round {now.number}: no {role} client could be evaluated (fraction-evaluate=0 "
            f"evaluates none); {now.failure}"
        )

    def _stop_on_undone(self) -> None:
        """Raise RuntimeError if every round of the run was undone: nothing was trained."""
        if not self.undone_rounds or self.undone_rounds < self.round:
            return
        raise RuntimeError(
            f"every round was undone ({self.undone_rounds} of {self.round}): NaN or infinity would "
            f"have come into the model, which is that of the start; lower lr, or mend aggregate of "
            f"{type(self).__name__}"
        )

    def _unmet_requirement(self) -> str:
        """The start of an error's text: what the strategy requires, if clients may lack that.

        "" unless replies were refused for that, or foreign clients failed."""
        dropped = self.now.dropped
        failed = dropped["error"] and any(node.foreign for node in self.nodes)
        if self.requires is None or not (dropped[LACKS] or failed):
            return ""
        return f"{self.requires.sentence(type(self).__name__)}; "

    # Evaluation

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages to the run's sample of nodes, in the rounds that evaluate."""
        now = self.now
        now.number = server_round
        self.grid = grid
        now.sent = []
        if not self.fraction_evaluate:
            return []
        if server_round % self.evaluate_every and server_round != self.num_rounds:
            return []
        now.evaluated = True
        now.dropped = Counter()  # those of training are in the report already
        now.failure = ""
        self._accept(arrays)
        if self.privacy is not None:
            if self.privacy.covers == EVERYTHING:
                return []  # scores without noise stay on their clients
            self.privacy.admit("scores of evaluations")
        self._update_roster()
        nodes = self.draw_to_evaluate(self._nodes_to_evaluate())
        payloads = self._personalize_and_measure(nodes)
        # Train payloads were dropped; those of novel clients are measured when replies are read.
        now.payloads = {node: arrays for node, arrays in payloads.items() if node.novel}
        entries = dict(config) | self.message_config()
        if self.report_generalization_bound:
            entries[BOUND] = True
        if self.selection_metric not in (AUTO, *MAIN_SCORES):
            entries[SELECTED_SCORE] = self.selection_metric
        now.sent = self._messages("evaluate", payloads, ConfigRecord(entries))
        return [message for message, _ in now.sent]

    def _nodes_to_evaluate(self) -> Nodes:
        """The present nodes with labels, of both roles unless `evaluate_novel` is off."""
        with_novel = self.evaluates_novel

        def is_scored(node: Node) -> bool:
            return not node.unlabeled and (with_novel or not node.novel)

        nodes = as_nodes(self.nodes).of_kinds(is_scored)
        unable = self.late.unable_to_score
        if unable:
            nodes = Nodes(node for node in nodes if node not in unable)
        return nodes

    def _personalize_and_measure(self, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """`personalize` of these nodes; its mean cost for a node is kept for the report."""
        now = self.now
        started = time.monotonic()
        bytes_before = dict(now.bytes)
        payloads = self.personalize(self.arrays, nodes)
        share = 1 / max(len(nodes), 1)
        now.personalization_cost = PersonalizationCost(
            seconds=share * (time.monotonic() - started),
            bytes_down=share * (now.bytes["down"] - bytes_before["down"]),
            bytes_up=share * (now.bytes["up"] - bytes_before["up"]),
        )
        return payloads

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """End the round; returns the evaluation's metrics, None in a round without evaluation.

        Raises RuntimeError if every evaluated training client, or every novel one, failed."""
        now = self.now
        metrics = None
        if now.evaluated:
            updates = self.receiver.receive(now.sent, replies)
            self._stop_on_failure()
            self._stop_on_unscored(updates)
            metrics = self._evaluation.metrics(updates)
            self._report_serving(updates)
            now.report["evaluation"] = dict(metrics)
            if now.dropped:
                now.report["evaluation-dropped"] = dict(now.dropped)
            self.evaluation = updates
            if self.privacy is not None:
                self.evaluation = []  # a client's score is not written
                now.report |= self.privacy.report()
            now.end_phase("evaluate")
        now.payloads = {}
        now.report["seconds"] = time.monotonic() - now.started
        now.report["phases"] = now.phases
        if not self.runs_own_loop:
            self.construction.end(self)  # a wrapper does not say which round is the last
        if self.on_round is not None:
            report = now.report
            if self.privacy is not None:
                report = self.privacy.released(report)
            self.on_round(report)
        return metrics

    def _report_serving(self, updates: list[Update]) -> None:
        """Report the mean cost of serving a novel client.

        Its seconds are its own and its share of the server's; its megabytes are those of all arrays
        that it gets and sends."""
        now = self.now
        sent = now.payloads
        client_seconds = []
        for update in updates:
            if update.node.novel and SECONDS in update.metrics:
                client_seconds.append(update.metrics[SECONDS])
        if not sent or not client_seconds:
            return
        cost = now.personalization_cost
        now.phases["novel-client"] = cost.seconds + float(np.mean(client_seconds))
        sent_bytes = sum(num_bytes(arrays.values()) for arrays in sent.values())
        down = cost.bytes_down + sent_bytes / len(sent)
        now.report["novel-megabytes"] = {"down": down / 1e6, "up": cost.bytes_up / 1e6}

    # What a checkpoint holds

    def state(self) -> dict[str, Any]:
        """The run's state: nested dicts, lists and sets of arrays, numbers and texts."""
        state = {
            "round": self.round,
            "undone-rounds": self.undone_rounds,
            "arrays": self.arrays,
            "kept": {name: getattr(self, name) for name in self.persistent_attributes},
            "optimizers": [optimizer.state() for optimizer in self.optimizers()],
            "sizes": self.receiver.sizes.state(),
            "privacy": self.privacy.state() if self.privacy else {},
            "token": self.token,
            "late": self.late.state(),
        }
        if self.column_encoder is not None:
            state["column-encoder"] = self.column_encoder.state()
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`, after `initialize`; of a saved model only "arrays" are needed.

        Raises ValueError if it is the state of another network, and as `check_state`."""
        self.check_state(state)
        self.arrays = self.restore(self.arrays, state["arrays"])
        self.published_models = state.get("handout", {})
        self.token = state.get("token", self.token)
        if "column-encoder" in state:
            if self.column_encoder is None:
                raise ValueError(
                    "the saved run scales inputs by the training clients' statistics; set "
                    "standardize='training-clients' in server_app and client_app"
                )
            self.column_encoder.load_state(state["column-encoder"])
        for name, value in state.get("kept", {}).items():
            setattr(self, name, value)
        if "round" in state:
            self.now.number = state["round"]
            # Checkpoints of earlier releases have no such entry.
            self.undone_rounds = state.get("undone-rounds", 0)
            for optimizer, saved in zip(self.optimizers(), state["optimizers"], strict=True):
                optimizer.load_state(saved)
            self.receiver.sizes.load_state(state["sizes"])
            self.late.load_state(state.get("late", {}))
            if self.privacy is not None:
                self.privacy.restore(state["privacy"])

    def client_states(self) -> Iterator[tuple[int, Arrays]]:
        """The states of a simulation's clients, by client id; see `run_state.client_states`."""
        return client_states(self)


def _has_role(novel: bool) -> Callable[[Node], bool]:
    return lambda node: node.novel == novel
