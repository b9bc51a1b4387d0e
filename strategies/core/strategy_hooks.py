"""What a method states, what it overrides, and what it calls: `PersonalizedStrategy` without its
rounds.

A method overrides one or two of `initialize`, `personalize`, `broadcast` and `aggregate`. With
`exchange` it sends its clients further messages within a round. `strategies.core.strategy` says in
which order a run calls them.

`Arrays` are numpy arrays by name, as of a network's ``state_dict``. Names with "/" belong to a
group, such as "control/conv1.weight"; names without are the model's."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from itertools import islice
from typing import Any, ClassVar
from uuid import uuid4

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from clients.core.arrays import Arrays, filled, num_bytes, to_record
from clients.core.protocol import (
    LR_FACTOR,
    NUM_EXAMPLES,
    RUN_TOKEN,
    SELECT,
    SERVER_ROUND,
    lr_factor,
)
from clients.core.saved_states import check_shape
from clients.core.sgd import Optimizer
from fedapps.common.seeds import SEED, seed_of
from fedapps.common.settings import COUNT, NONNEGATIVE, POSITIVE_INT, Configured, setting
from fedapps.common.settings import SECONDS as POSITIVE_SECONDS
from strategies.core.column_encoder import ColumnEncoder
from strategies.core.evaluation import Evaluation
from strategies.core.kept_rounds import KeptRounds
from strategies.core.late_replies import LateReplies, rebased
from strategies.core.latency import Latency
from strategies.core.nodes import Nodes, as_nodes
from strategies.core.privacy import Privacy
from strategies.core.receiver import Receiver
from strategies.core.repeated_runs import Construction, Rebuilding
from strategies.core.replies import Node, Requirement, Update
from strategies.core.roster import Roster
from strategies.core.round_state import Request, Round, Sent
from strategies.core.run_state import client_states, in_order_of
from strategies.core.wrapper_checks import WrapperChecks

# Aggregates the metrics of several replies; the text is the name of the metric that weighs them. As
# `train_metrics_aggr_fn` of Flower's FedAvg.
Aggregate = Callable[[list[RecordDict], str], MetricRecord]

SCORE_NAME = re.compile(r"-?[A-Za-z][\w.+-]{0,60}")


class StrategyHooks(Configured, Strategy, metaclass=Rebuilding):
    """The base of `PersonalizedStrategy`, where the arguments are described."""

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
        self._has_just_continued = False  # until its clients are compared with those present
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
        self.wrapper_checks = WrapperChecks(self)
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

    def known_clients(self) -> set[int]:
        """The ids of the clients for which the server keeps something, such as embeddings."""
        return set()

    def forget(self) -> None:
        """Drop what `restore` rebuilds from the arrays, before a round is undone."""

    def sample(self) -> list[Node]:
        """The nodes that train in this round: a seeded draw from the training nodes.

        Raises RuntimeError if no training node is present, ValueError as `Privacy.check_users`."""
        nodes = self.training_nodes()
        if not nodes:
            raise RuntimeError(self._no_training_client())
        if self.privacy is not None:
            self.privacy.check_users(len(nodes), self.round)
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

    def training_stopped(self, num_rounds: int) -> None:
        """Called if training has ended in order before round `num_rounds`, the last one."""

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
