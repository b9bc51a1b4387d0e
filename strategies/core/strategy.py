"""What a method overrides and what it may call: the file to read before writing a method.

A method overrides one or two of `initialize`, `personalize`, `broadcast` and `aggregate`. It may
ask its clients more within a round by `exchange`. `strategies.core.rounds` calls the hooks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar
from uuid import uuid4

import numpy as np
from flwr.app import MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from clients.core.arrays import Arrays
from clients.core.optimizers import Optimizer
from clients.core.protocol import LR_FACTOR, RUN_TOKEN, SELECT, lr_factor
from fedapps.common.seeds import SEED, seed_of
from fedapps.common.settings import COUNT, NONNEGATIVE, POSITIVE_INT, SECONDS, Configured, setting
from strategies.core.construction import Construction, Rebuilding
from strategies.core.messages import Messenger
from strategies.core.privacy import Privacy
from strategies.core.replies import EXAMPLES, Node, Requirement, Update
from strategies.core.roster import Roster
from strategies.core.round import Request, Round

Aggregate = Callable[[list[RecordDict], str], MetricRecord]  # as Flower's FedAvg takes it


class StrategyBase(Configured, Strategy, metaclass=Rebuilding):
    """A strategy's settings, state and hooks; `strategies.core.rounds` makes a Flower strategy of
    it."""

    renamed: ClassVar[Mapping[str, str]] = {
        "kept": "persistent_attributes",
        "phase": "selection_phase",
        "parts": "limit_groups",
        "leads": "runs_own_loop",
        "reports_last": "report_last_round",
        "reference": "baseline_arrays",
        "named": "to_server_names",
        "handout": "published_models",
    }

    requires: Requirement | None = None  # of clients, beyond training and scoring
    keeps_arrays = False  # True: the arrays never leave the server, and Flower's loop gets none
    treats_statistics_apart = False  # True: what moves weights would break running statistics
    holds_model = True  # False: the server has no single model that it could evaluate
    trains_unlabeled = False  # True: training clients without labels take part
    any_model = False  # True: it serves clients whose networks differ
    selection_phase = 0  # the best round of a run is sought in its last phase
    persistent_attributes: tuple[
        str, ...
    ] = ()  # attributes that live through the run, beside the arrays
    in_place = False  # True: `aggregate` changes entries of the arrays that it gets
    limit_groups: tuple[
        str, ...
    ] = ()  # prefixes of a reply's networks, each with its own size limit
    protected_update_ratio = 3.5  # max_update_ratio with `protect`, unless one is given
    protected_examples_ratio = 3.0  # max_examples_ratio likewise
    runs_own_loop = False  # whether the strategy runs its own rounds, not a wrapper
    report_last_round = False  # True: the last round is reported, whatever the validation says

    fraction_train = setting(1.0, "share of the training clients sampled in a round", "(0, 1]")
    fraction_evaluate = setting(
        1.0, "share of all clients sampled for an evaluation; 0: none", "[0, 1]"
    )
    min_available_nodes = setting(
        0, "a run begins, and goes on, with so many of the clients; 0: num-clients", COUNT
    )
    evaluate_every = setting(
        5,
        "rounds between evaluations; the last round of a run is always evaluated",
        "[1, 10000000]",
        by_hand=1,  # as Flower's strategies; inside a wrapper no round is known to be the last
    )
    evaluate_novel = setting(True, "whether novel clients are evaluated; not while tuning")
    on_client_failure = setting(
        "skip", "skip a failing client's reply or stop the run", ("skip", "stop")
    )
    min_valid_replies = setting(1, "fewer valid replies in a round stop the run", POSITIVE_INT)
    protect = setting(False, "limit what one client's reply can count: for clients that may lie")
    max_update_ratio = setting(
        0.0, "a client's change is at most so many times as long as is usual; 0: any", NONNEGATIVE
    )
    max_examples_ratio = setting(
        0.0, "a client counts with at most so many times the usual samples; 0: any", NONNEGATIVE
    )
    max_update_norm = setting(
        0.0, "norm at which a client's whole update is clipped; 0: never", "[0, 1000000000000]"
    )
    average_over = setting(
        "clients",
        "average accuracy over clients, each counting alike, or over samples",
        ("clients", "samples"),
    )
    selection_metric = setting(
        "accuracy",
        "training clients' validation score whose trimmed mean chooses the reported round",
        SELECT,
    )
    report_generalization_bound = setting(
        False, "report the terms of ODPFL-HN's generalization bound"
    )
    lr_decay = setting(1.0, "all learning rates × this in every lr-decay-rounds rounds", "(0, 1]")
    lr_decay_rounds = setting(
        10, "rounds of that decay, which is smooth", "[1, 10000000]", beside="lr-decay!=1.0"
    )
    start_timeout = setting(3600.0, "seconds for a client's first answer, with its data", SECONDS)
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
        saved_rounds: int = 0,
        min_train_nodes: int = 1,
        min_evaluate_nodes: int = 1,
        weighted_by_key: str = EXAMPLES,
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
        if self.protect:
            self.max_update_ratio = self.max_update_ratio or self.protected_update_ratio
            self.max_examples_ratio = self.max_examples_ratio or self.protected_examples_ratio
        self.privacy = privacy
        self.former = former  # the state to start from, until it is loaded
        self.former_clients = dict(client_states or {})  # states that are not sent back yet, by id
        self.saved_rounds = saved_rounds  # rounds that the model to start from was trained
        self.min_nodes = {"sample": min_train_nodes, "evaluate": min_evaluate_nodes}
        self.weighted_by_key = weighted_by_key
        self.arrayrecord_key, self.configrecord_key = arrayrecord_key, configrecord_key
        self.on_round, self.on_failure = on_round, on_failure
        self.train_metrics_aggr_fn = train_metrics_aggr_fn  # None: `foreign_means`
        self.evaluate_metrics_aggr_fn = evaluate_metrics_aggr_fn
        self.arrays: Arrays = {}  # the server's present arrays
        self.nodes: list[Node] = []  # those present, by client id
        # Clients' models that may be served when the clients are gone
        self.published_models: Arrays = {}
        self.evaluation: list[Update] = []  # replies of the last evaluation
        self.now = Round()  # the present round; everything else lives through the run
        self.undone_rounds = 0  # whose aggregate was not finite
        self.num_rounds, self.timeout = 0, 3600.0
        self.token = uuid4().hex  # the nodes know by it which of their states belong to this run
        self.common_config: dict[str, Any] = {}  # of every message
        self.messenger = Messenger(self)
        self.roster = Roster(
            max(self.min_available_nodes, *self.min_nodes.values()),
            wait,
            only_model,
            self.start_timeout,
            ask=ask,
            requires=self.requires,
            strategy=type(self).__name__,
        )

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
        """Whether training may end early: no phase that the method needs is still to come, and the
        training clients' validation can choose a round."""
        return not self.report_last_round

    def initialize(self, arrays: Arrays) -> Arrays:
        """The server's arrays at the start, from the initial model's arrays."""
        return arrays

    def restore(self, arrays: Arrays, saved: Arrays) -> Arrays:
        """The server's arrays at the start, from the initialised `arrays` and those `saved`.

        Raises ValueError if the names differ."""
        if other := sorted(saved.keys() ^ arrays.keys()):
            raise ValueError(f"the saved arrays do not fit; missing or unknown: {other[:5]}")
        return dict(saved)

    def forget(self) -> None:
        """Drop what `restore` rebuilds."""

    def sample(self) -> list[Node]:
        """The nodes that train in this round: a seeded draw from the training nodes."""
        nodes = self.training_nodes()
        if not nodes:
            raise RuntimeError(f"no training client among {len(self.nodes)} connected nodes")
        secret = self.privacy.sample(nodes, self.round) if self.privacy else None
        return self.draw("sample", nodes, self.fraction_train) if secret is None else secret

    def personalize(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """The model for each node, training or novel."""
        return dict.fromkeys(nodes, arrays)

    def broadcast(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """The arrays of each node's train message."""
        return self.personalize(arrays, nodes)

    def message_config(self) -> dict[str, Any]:
        """Entries of every message's config in a round."""
        slowed = {LR_FACTOR: self.decay} if self.lr_decay < 1 else {}
        return {"server-round": self.round, RUN_TOKEN: self.token} | slowed

    def expected(self, sent: Arrays) -> Arrays | None:
        """Arrays with the names, shapes and dtypes that a train reply must have; None: any."""
        return sent

    def baseline_arrays(self, sent: Arrays) -> Arrays:
        """The arrays from which a train reply's size is measured; other names count from zero."""
        return sent

    def to_server_names(
        self, updates: list[Update], sent: list[Arrays]
    ) -> tuple[list[Update], list[Arrays]]:
        """Replies, and the arrays that they started from, under the server's names."""
        return updates, sent

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """The server's next arrays, from valid replies by client. Their arrays are read-only.

        Returns new arrays unless `in_place`; arrays in `persistent_attributes` are replaced as
        well, not changed."""
        raise NotImplementedError

    def global_model(self) -> Arrays:
        """The one model that the server holds: its arrays that are in no group."""
        return {name: array for name, array in self.arrays.items() if "/" not in name}

    def report(self) -> dict[str, Any]:
        """The method's own entries of a round's report."""
        return {}

    def optimizers(self) -> list[Optimizer]:
        """The server's optimizers, whose state lives through the run."""
        return []

    # What lives through the run

    def state(self) -> dict[str, Any]:
        """All that lives through the run: dicts, lists and sets of arrays, numbers and texts."""
        return {
            "round": self.round,
            "undone-rounds": self.undone_rounds,
            "arrays": self.arrays,
            "kept": {name: getattr(self, name) for name in self.persistent_attributes},
            "optimizers": [optimizer.state() for optimizer in self.optimizers()],
            "sizes": self.messenger.sizes.state(),
            "privacy": self.privacy.state() if self.privacy else {},
            "token": self.token,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue, once initialised, from a `state`; a saved model needs only its "arrays".

        Raises ValueError if it is that of another network."""
        self.arrays = self.restore(self.arrays, state["arrays"])
        self.published_models = state.get("handout", {})
        self.token = state.get("token", self.token)
        for name, value in state.get("kept", {}).items():
            setattr(self, name, value)
        if "round" in state:
            self.now.number = state["round"]
            self.undone_rounds = state.get("undone-rounds", 0)  # earlier checkpoints have none
            for optimizer, saved in zip(self.optimizers(), state["optimizers"], strict=True):
                optimizer.load_state(saved)
            self.messenger.sizes.load_state(state["sizes"])
            if self.privacy is not None:
                self.privacy.restore(state["privacy"])

    # What a method calls

    def exchange(
        self,
        action: str,
        payloads: Mapping[Node, Arrays],
        config: Mapping[str, Any] | None = None,
        like: Mapping[Node, Arrays] | None = None,
    ) -> list[Update]:
        """One more request and reply within the round, e.g. ``exchange("query.encode", …)``.

        `like` gives arrays of the names, shapes and dtypes that a node's reply must have."""
        (read,) = self.exchanges(Request(action, payloads, config or {}, like or {}))
        return read()

    def exchanges(self, *requests: Request) -> list[Callable[[], list[Update]]]:
        """Several requests at once, where none needs another's replies.

        Each returned function checks the replies of its request, and counts them in the round in
        which it is called."""
        return self.messenger.exchanges(requests, self.common_config | self.message_config())

    def training_nodes(self) -> list[Node]:
        """The training nodes that are present, by client id; those without labels only if the
        method `trains_unlabeled` ones and keeps no privacy, whose noise is that of one mean."""
        unlabeled = self.trains_unlabeled and self.privacy is None
        return [n for n in self.nodes if not n.novel and (unlabeled or not n.unlabeled)]

    def draw(self, purpose: str, nodes: Sequence[Node], fraction: float) -> list[Node]:
        """A share of the nodes, by client id, from the generator of (seed, purpose, round).

        The number is rounded to the nearest whole one, where Flower's FedAvg cuts it."""
        count = max(1, self.min_nodes[purpose], round(fraction * len(nodes)))
        generator = np.random.default_rng(seed_of(self.seed, purpose, self.round))
        return [nodes[i] for i in sorted(generator.permutation(len(nodes))[:count])]
