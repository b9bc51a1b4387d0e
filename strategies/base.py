"""The strategy that every method starts from: roster, sampling, exchanges, checks, evaluation.

A Flower ``Strategy``: construct it with keyword arguments and call `start` in any ServerApp.
A method overrides one or two of `initialize`, `personalize`, `broadcast` and `aggregate`, and
may ask its clients more within a round by `exchange`."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from logging import INFO, WARNING
from typing import Any
from uuid import uuid4

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from clients.arrays import Arrays, from_record, num_bytes, settled, to_record
from clients.optimizers import Optimizer
from clients.privacy import EVERYTHING
from clients.protocol import LR_FACTOR, RESTORE_STATE, RUN_TOKEN, SAVE_STATE, lr_factor
from partitions.seeds import SEED, seed_of
from partitions.settings import COUNT, SECONDS, SOME, Configured, setting
from strategies.distances import a_distances
from strategies.magnitude import Magnitudes, distance, finite, scaled
from strategies.replies import EXAMPLES, LACKS, Node, Update, read_reply, weighed
from strategies.requirement import Requirement, checked
from strategies.roster import Roster
from strategies.round import Protection, Request, Round, Stop
from strategies.scores import Aggregate, f1_scores, losses, means, own_means, records
from strategies.wrapped import check_wrapped

OF_NO_MODEL = ("round", "magnitudes", "privacy", "token")  # of a strategy's state
AT_ONCE = 100  # clients that tell what they have in mind, or get it back, in one exchange


class PersonalizedStrategy(Configured, Strategy):
    """Rounds of training on sampled training clients; evaluation on training and novel clients.

    `fraction_train` of the training nodes is sampled each round, once `min_available_nodes` have
    connected (waiting at most `wait` seconds; `start_timeout` for their first answers). Every
    `evaluate_every` rounds, and after the last, `fraction_evaluate` of the nodes is evaluated;
    novel ones only if `evaluate_novel`. A reply that is an error, lacks or invents names, has
    wrong shapes or dtypes, or is not finite is dropped, counted and logged, and so is one that is
    absurdly far from what was sent; with `max_update_norm` > 0 updates are scaled down to that
    norm, all arrays together. With `on_client_failure` = "stop" the first such training reply ends
    the run, and so do fewer than `min_valid_replies` valid ones. `on_round` is called with each
    round's report and may raise `Stop`; `privacy` protects updates before they are aggregated.
    `former` is the `state` of a former run, or just its "arrays", from which this one goes on: in
    the round after the one that the state tells, if it tells one; with 0 rounds it is only
    evaluated. `memories` are what that run's clients kept, by client id; they get it back. With
    `only_model` the roster is cut to the clients whose network has that name. With `bound`
    evaluations report the empirical terms of ODPFL-HN's generalization bound as well. Accuracies
    are means over clients or, with `mean_over` = "samples", over their samples. The learning rates
    of round r, counted from 0, are `lr_decay` ** (r / `lr_decay_rounds`) times those given, the
    clients' and the server's own; `saved_rounds` more where `former` had as many.

    `min_train_nodes` to `evaluate_metrics_aggr_fn` are as Flower's FedAvg has them; what clients
    that are not ours tell comes back under its own name. Without `ask` nobody is asked who it is.
    A `lenient` strategy takes clients that lack what it `requires`, and logs what it then is.

    Raises ValueError for settings out of range, RuntimeError when a run cannot go on."""

    requires: Requirement | None = None  # of clients, beyond training and scoring
    keeps_arrays = False  # True: the arrays never leave the server, and Flower's loop gets none
    holds_model = True  # False: no single model on the server, hence nothing to evaluate there
    any_model = False  # True: it serves clients whose networks differ
    phase = 0  # the best round of a run is sought in its last phase
    kept: tuple[str, ...] = ()  # attributes that live through the run, beside the arrays
    in_place = False  # True: `aggregate` changes entries of the arrays that it gets
    reports_last = False  # True: the last round is reported, be it the best on validation or not

    fraction_train = setting(1.0, "share of the training clients sampled in a round", "(0, 1]")
    fraction_evaluate = setting(
        1.0, "share of all clients sampled for an evaluation; 0: none", "[0, 1]"
    )
    min_available_nodes = setting(
        0, "a run begins, and goes on, with so many of the clients; 0: num-clients", COUNT
    )
    evaluate_every = setting(
        5, "rounds between evaluations; the last round is always evaluated", "[1, 10000000]"
    )
    evaluate_novel = setting(True, "whether novel clients are evaluated; not while tuning")
    on_client_failure = setting(
        "skip", "skip a failing client's reply or stop the run", ("skip", "stop")
    )
    min_valid_replies = setting(1, "fewer valid replies in a round stop the run", SOME)
    max_update_norm = setting(
        0.0, "norm at which a client's whole update is clipped; 0: never", "[0, 1000000000000]"
    )
    mean_over = setting("clients", "what accuracies are means over", ("clients", "samples"))
    bound = setting(False, "report the terms of ODPFL-HN's generalization bound")
    lr_decay = setting(1.0, "all learning rates × this in every lr-decay-rounds rounds", "(0, 1]")
    lr_decay_rounds = setting(10, "rounds of that decay, which is smooth", "[1, 10000000]")
    start_timeout = setting(3600.0, "seconds for a client's first answer, with its data", SECONDS)
    seed = SEED

    def __init__(
        self,
        *,
        wait: float = 120.0,
        on_round: Callable[[dict[str, Any]], None] | None = None,
        former: Mapping[str, Any] | None = None,
        memories: Mapping[int, Arrays] | None = None,
        only_model: str = "",
        privacy: Protection | None = None,
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
        self.requires = checked(self.requires, type(self).__name__, lenient)
        super().__init__(**settings)
        self.on_round, self.privacy = on_round, privacy
        self.former, self.memories = former, dict(memories or {})
        self.saved_rounds = saved_rounds
        self.least = {"sample": min_train_nodes, "evaluate": min_evaluate_nodes}
        self.weighted_by_key = weighted_by_key
        self.arrayrecord_key, self.configrecord_key = arrayrecord_key, configrecord_key
        self.train_metrics_aggr_fn = train_metrics_aggr_fn or own_means
        self.evaluate_metrics_aggr_fn = evaluate_metrics_aggr_fn or own_means
        self.roster = Roster(
            max(self.min_available_nodes, *self.least.values()),
            wait,
            only_model,
            self.start_timeout,
            ask=ask,
            requires=self.requires,
            strategy=type(self).__name__,
        )
        self._distance: float | None = None  # mean over pairs of ½ d̂; inputs do not change
        self.arrays: Arrays = {}  # the server's present arrays
        self.nodes: list[Node] = []  # the present roster, by client id
        self.handout: Arrays = {}  # what of its clients' models it may hand out when they are gone
        self.evaluation: list[Update] = []  # replies of the last evaluation
        self._magnitudes = Magnitudes()
        self.now = Round()  # the round at hand; everything else lives through the run
        self.num_rounds, self.timeout = 0, 3600.0
        self.token = uuid4().hex  # by which nodes know what they kept of this run from another's
        self.grid: Grid
        self._config: dict[str, Any] = {}  # what every message's config holds
        self._given: ArrayRecord | None = None  # the record that Flower's loop brought
        self._record: ArrayRecord | None = None  # self.arrays as a record, if there is one
        self._leads = False  # whether the rounds are those of its own `start`, not of a wrapper's

    @property
    def round(self) -> int:
        """The number of the round at hand, from 1."""
        return self.now.number

    @property
    def may_stop(self) -> bool:
        """Whether training may end before its rounds: no phase that the method needs is to come,
        and the training clients' validation can judge."""
        return not self.reports_last

    @property
    def decay(self) -> float:
        """What the learning rates of the round at hand are to those given."""
        return self._decay(0)

    def _decay(self, later: int) -> float:
        past = self.saved_rounds + self.round + later
        return lr_factor(self.lr_decay, self.lr_decay_rounds, past)

    # What a method overrides

    def initialize(self, arrays: Arrays) -> Arrays:
        """The server's arrays at the start, from the initial model's arrays."""
        return arrays

    def restore(self, arrays: Arrays, saved: Arrays) -> Arrays:
        """The server's arrays at the start: the initialised `arrays` as a former run `saved` them.

        Raises ValueError if it saved other names."""
        if other := sorted(saved.keys() ^ arrays.keys()):
            raise ValueError(f"the saved arrays do not fit; missing or unknown: {other[:5]}")
        return dict(saved)

    def personalize(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """The model that each node gets, be it a training or a novel one."""
        return dict.fromkeys(nodes, arrays)

    def broadcast(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """What a train message carries."""
        return self.personalize(arrays, nodes)

    def expected(self, sent: Arrays) -> Arrays | None:
        """Arrays with the names, shapes and dtypes that a train reply must have; None: any."""
        return sent

    def reference(self, sent: Arrays) -> Arrays:
        """From where the size of a train reply is measured; from zero for other names."""
        return sent

    def named(self, updates: list[Update], sent: list[Arrays]) -> tuple[list[Update], list[Arrays]]:
        """Replies and what they started from, by the names that the server has for the arrays."""
        return updates, sent

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """The server's next arrays from valid replies, which come sorted by client.

        New arrays, unless `in_place` says so; those in `kept` are replaced as well."""
        raise NotImplementedError

    def global_model(self) -> Arrays:
        """The one model that the server holds: its arrays that are in no group."""
        return {name: array for name, array in self.arrays.items() if "/" not in name}

    def report(self) -> dict[str, Any]:
        """What the method has to say of itself for the round's metrics, e.g. a privacy budget."""
        return {}

    def optimizers(self) -> list[Optimizer]:
        """The server's optimizers: what they keep of their parameters lives through the run."""
        return []

    # What lives through the run

    def forget(self) -> None:
        """Drop what `restore` makes anew."""

    def state(self) -> dict[str, Any]:
        """All that lives through the run: dicts, lists and sets of arrays, numbers and texts."""
        return {
            "round": self.round,
            "arrays": self.arrays,
            "kept": {name: getattr(self, name) for name in self.kept},
            "optimizers": [optimizer.state() for optimizer in self.optimizers()],
            "magnitudes": self._magnitudes.state(),
            "privacy": self.privacy.state() if self.privacy else {},
            "token": self.token,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on, once initialised, from a `state`; of a saved model only the arrays are needed.

        Raises ValueError if it is that of another network."""
        self.arrays = self.restore(self.arrays, state["arrays"])
        self.handout = state.get("handout", {})
        self.token = state.get("token", self.token)
        for name, value in state.get("kept", {}).items():
            setattr(self, name, value)
        if "round" in state:
            self.now.number = state["round"]
            for optimizer, own in zip(self.optimizers(), state["optimizers"], strict=True):
                optimizer.load_state(own)
            self._magnitudes.load_state(state["magnitudes"])
            if self.privacy is not None:
                self.privacy.restore(state["privacy"])

    # What methods call

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
        """Several requests in one exchange, as none of them waits for another's replies; what is
        returned for each checks its replies, and counts them in the round in which it is called."""
        common = self._config | self._round_settings()
        records: dict[int, ArrayRecord] = {}
        sent = [
            self._messages(r.action, r.payloads, ConfigRecord(common | dict(r.config)), records)
            for r in requests
        ]
        messages = [message for own in sent for message, _ in own]
        asked = self.grid.send_and_receive(messages, timeout=self.timeout) if messages else []
        replies = list(asked)
        return [
            partial(self._receive, own, replies, r.like)
            for r, own in zip(requests, sent, strict=True)
        ]

    def _round_settings(self, later: int = 0) -> dict[str, Any]:
        """What every message of a round tells its client; of a `later` round by so many."""
        slowed = {LR_FACTOR: self._decay(later)} if self.lr_decay < 1 else {}
        return {"server-round": self.round + later, RUN_TOKEN: self.token} | slowed

    def training_nodes(self) -> list[Node]:
        """The training nodes of the roster, by client id."""
        return [node for node in self.nodes if not node.novel]

    def sample(self) -> list[Node]:
        """This round's nodes: a seeded draw from the training nodes, by client id."""
        nodes = self.training_nodes()
        if not nodes:
            raise RuntimeError(f"no training client among {len(self.nodes)} connected nodes")
        tossed = self.privacy.toss(nodes, self.round) if self.privacy else None
        return self._draw("sample", nodes, self.fraction_train) if tossed is None else tossed

    def _draw(
        self, purpose: str, nodes: Sequence[Node], fraction: float, later: int = 0
    ) -> list[Node]:
        """A share of the nodes by the generator of (seed, purpose, round), by client id; that of a
        `later` round by so many."""
        count = max(1, self.least[purpose], round(fraction * len(nodes)))
        generator = np.random.default_rng(seed_of(self.seed, purpose, self.round + later))
        return [nodes[i] for i in sorted(generator.permutation(len(nodes))[:count])]

    # Flower's contract

    def summary(self) -> None:
        """Nothing to log: the settings stand in the run's configuration."""

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds up to `num_rounds`; the result holds the server's final arrays.

        Flower's loop, but it may begin after a `former` run's last round. `train_config` goes
        along with queries, further exchanges and, unless `evaluate_config` is given, evaluations
        as well. `evaluate_fn` is called with `global_model`; ValueError where there is none."""
        if evaluate_fn is not None and (self.keeps_arrays or not self.holds_model):
            raise ValueError(
                f"{type(self).__name__} holds no model that evaluate_fn could evaluate: every "
                "client has its own; leave it out and read the clients' evaluations"
            )
        self.grid, self.num_rounds, self.timeout = grid, num_rounds, timeout
        self.now, self._leads = Round(), True
        self._config = dict(train_config or {})
        training = ConfigRecord(self._config)
        evaluation = evaluate_config or training
        result, arrays = Result(), initial_arrays
        self._take(arrays)
        done = self.round

        def evaluate_centrally(number: int) -> None:
            if evaluate_fn is not None:
                metrics = evaluate_fn(number, to_record(self.global_model()))
                if metrics is not None:
                    result.evaluate_metrics_serverapp[number] = metrics

        def evaluate(number: int) -> None:
            asked = self.configure_evaluate(number, arrays, evaluation, grid)
            metrics = self.aggregate_evaluate(number, grid.send_and_receive(asked, timeout=timeout))
            if metrics is not None:
                result.evaluate_metrics_clientapp[number] = metrics

        if not done:
            evaluate_centrally(0)
        try:
            for number in range(done + 1, num_rounds + 1):
                log(INFO, "[ROUND %s/%s]", number, num_rounds)
                replies = grid.send_and_receive(
                    self.configure_train(number, arrays, training, grid), timeout=timeout
                )
                aggregated, metrics = self.aggregate_train(number, replies)
                arrays = arrays if aggregated is None else aggregated
                if metrics is not None:
                    result.train_metrics_clientapp[number] = metrics
                evaluate(number)
                evaluate_centrally(number)
        except Stop as stop:
            log(INFO, "training ends after round %s: %s", self.round, stop)
            if not self.now.evaluated:
                self.num_rounds = self.round  # whose last one is evaluated, whatever evaluate_every
                with suppress(Stop):  # said again
                    evaluate(self.round)
        if not num_rounds:
            self.now = Round(0, report={"round": 0})
            evaluate(0)
        result.arrays, self._leads = to_record(self.arrays), False
        return result

    def open(self, grid: Grid, initial_arrays: ArrayRecord, config: Mapping[str, Any]) -> None:
        """Take over the `former` state without any round: ready to serve the nodes of the grid by
        `personalize` and `exchange`, whose messages hold `config`."""
        self.grid, self._config = grid, dict(config)
        self._take(initial_arrays)

    def present(self) -> list[Node]:
        """The nodes that are there now, by client id; the roster from here on."""
        config = self._config | {RUN_TOKEN: self.token}
        self.nodes = self.roster.present(self.grid, config, self.timeout)
        return self.nodes

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages to the sampled training nodes."""
        self.now, self.grid = Round(server_round), grid
        if not self._leads and server_round == 1:
            self._given = None  # a wrapper's run begins
        self._take(arrays)
        self._meet()
        nodes = self.sample()
        self.now.payloads = self.broadcast(self.arrays, nodes)
        if not self._leads:
            sent = self.now.payloads.values()
            wire = [*sent, *map(self.expected, sent)]
            check_wrapped(type(self).__name__, self.keeps_arrays, self.requires, arrays, wire)
        asked: dict[str, Any] = {}
        if self.privacy is not None:
            self.privacy.spend(list(self.now.payloads))
            asked = self.privacy.settings()
        settings = ConfigRecord(dict(config) | self._round_settings() | asked)
        self.now.sent = self._messages("train", self.now.payloads, settings)
        self.now.report = {"round": server_round, "sampled": len(nodes)}
        self.now.ends("send")
        return [message for message, _ in self.now.sent]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the valid replies."""
        clients = max(len(self.now.sent), 1)
        updates = self._receive(self.now.sent, replies, self._expected(), train=True)
        self.now.ends("clients")
        self._stop_on_failure()
        nobody_drawn = not self.now.report["sampled"]  # a private round of noise alone
        if len(updates) < self.min_valid_replies and not nobody_drawn:
            found = f"{len(updates)} valid replies of {len(self.now.sent)}"
            raise RuntimeError(
                f"{self._lacking()}round {server_round}: "
                f"{'too few valid replies' if self._hides else found}, "
                f"min-valid-replies is {self.min_valid_replies}"
                + ("" if self._hides else f"; dropped by cause: {dict(self.now.dropped)}")
            )
        told = records(updates, self.weighted_by_key)
        updates, _ = self.named(updates, [self.now.payloads[update.node] for update in updates])
        self.now.sent, self.now.payloads = [], {}  # together as large as twice the replies
        if self.privacy is not None:
            updates = self.privacy.protect(updates, self.arrays, server_round)
        before = apart(self.state())
        moved = ("optimizers", "arrays") if self.in_place else ("optimizers",)
        before |= {name: deepcopy(before[name]) for name in moved}
        with np.errstate(over="ignore", invalid="ignore"):  # it is looked for below
            self.arrays = settled(self.aggregate(self.arrays, updates), before["arrays"])
        if not finite({k: v for k, v in self.state().items() if k not in OF_NO_MODEL}):
            self._undo(before)
        self._stop_on_failure()  # in an exchange that aggregate made
        dropped = dict(self.now.dropped)
        self.now.report |= {
            "loss": _mean(losses(updates)),
            "valid": len(updates),
            "dropped": dropped,
            **({"clipped": self.now.clipped} if self.max_update_norm else {}),
            "megabytes": {way: n / clients / 1e6 for way, n in self.now.bytes.items()},
        } | self.report()
        self.now.ends("aggregate")
        metrics = MetricRecord()
        if self.privacy is None:
            metrics.update(self.train_metrics_aggr_fn(told, self.weighted_by_key))
        if not self._hides:
            metrics["valid-replies"] = len(updates)
            if self.now.report["loss"] is not None:
                metrics["loss"] = self.now.report["loss"]
            for cause, count in dropped.items():
                metrics[f"dropped-{cause}"] = count
        if self.now.report.get("undone"):
            metrics["undone"] = 1
        if self.keeps_arrays:
            self._record = None
            return None, metrics
        self._record = to_record(self.arrays)
        return self._record, metrics

    def _expected(self) -> dict[Node, Arrays]:
        """What each node's train reply must be like; nodes with any reply left out."""
        like = {node: self.expected(sent) for node, sent in self.now.payloads.items()}
        return {node: arrays for node, arrays in like.items() if arrays is not None}

    def _undo(self, before: dict[str, Any]) -> None:
        """Go back to where the round started; what was spent of a privacy budget stays spent."""
        log(WARNING, "round %s is undone: NaN or infinity would come into the model", self.round)
        self.forget()
        now = {"privacy": self.privacy.state()} if self.privacy else {}
        self.load_state(before | now | {"handout": self.handout})
        self.now.report["undone"] = True

    def _stop_on_failure(self) -> None:
        if self.now.dropped and self.on_client_failure == "stop":
            causes = sorted(self.now.dropped) if self._hides else dict(self.now.dropped)
            raise RuntimeError(
                f"{self._lacking()}round {self.round}: a client failed ({causes}); see the log"
            )

    def _lacking(self) -> str:
        """What clients lack, if replies were refused for that, or foreign clients failed."""
        failed = self.now.dropped["error"] and any(node.foreign for node in self.nodes)
        if self.requires is None or not (self.now.dropped[LACKS] or failed):
            return ""
        return f"{self.requires.sentence(type(self).__name__)}; "

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages to all training and novel nodes, in the rounds that evaluate."""
        self.now.number, self.grid = server_round, grid
        self.now.sent = []
        if not self.fraction_evaluate:
            return []
        if server_round % self.evaluate_every and server_round != self.num_rounds:
            return []
        self.now.evaluated = True
        self.now.dropped = Counter()
        self._take(arrays)
        if self.privacy is not None:
            if self.privacy.covers == EVERYTHING:
                return []  # a score that no noise covers stays on its client
            self.privacy.admit("scores of evaluations")
        self._meet()
        nodes = [n for n in self.nodes if self.evaluate_novel or not n.novel]
        nodes = self._draw("evaluate", nodes, self.fraction_evaluate)
        payloads = self.personalize(self.arrays, nodes)
        extra = self._round_settings() | ({"bound": True} if self.bound else {})
        settings = ConfigRecord(dict(config) | extra)
        self.now.sent = self._messages("evaluate", payloads, settings)
        return [message for message, _ in self.now.sent]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Means over clients, training and novel ones apart, and the end of the round."""
        metrics = None
        if self.now.evaluated:
            told = self._receive(self.now.sent, replies, {})
            own = self.evaluate_metrics_aggr_fn(
                records(told, self.weighted_by_key), self.weighted_by_key
            )
            metrics = MetricRecord({**own, **means(told, self.mean_over), **f1_scores(told)})
            if self.bound:
                self._add_distance(metrics)
            self.now.report["evaluation"] = dict(metrics)
            if self.now.dropped:
                self.now.report["evaluation-dropped"] = dict(self.now.dropped)
            self.evaluation = told
            if self.privacy is not None:
                self.evaluation = []  # nobody's own score is written down
                self.now.report |= self.privacy.report()
            self.now.ends("evaluate")
        self.now.report["seconds"] = time.monotonic() - self.now.started
        self.now.report["phases"] = self.now.phases
        if self.on_round is not None:
            report = self.now.report
            self.on_round(report if self.privacy is None else self.privacy.released(report))
        return metrics

    def _add_distance(self, metrics: MetricRecord) -> None:
        """`novel-half-distance`: mean ½ d̂ between novel and training clients' inputs."""
        novel = [node for node in self.nodes if node.novel]
        if self._distance is None and novel:
            distances = a_distances(self.exchanges, novel, self.training_nodes())
            if np.isfinite(distances).any():
                self._distance = float(np.nanmean(distances)) / 2
        if self._distance is not None:
            metrics["novel-half-distance"] = self._distance

    def _meet(self) -> None:
        """Who is there now; those who are refused count among the dropped, and clients of a former
        run get back what they had in mind."""
        self.present()
        self.now.dropped += self.roster.refused
        known = [node for node in self.nodes if node.client in self.memories]
        for some in _parts(known):
            self.exchange(RESTORE_STATE, {node: self.memories.pop(node.client) for node in some})
            self.now.bytes = {"down": 0, "up": 0}  # nothing of it is the round's

    def ask_memories(self) -> Iterator[tuple[int, Arrays]]:
        """What the clients of a simulation have in mind, each after its id; a real node tells
        nobody.

        Raises RuntimeError if one of them does not answer."""
        for some in _parts(self.nodes):
            replies = self.exchange(SAVE_STATE, {node: {} for node in some})
            if len(replies) < len(some):
                raise RuntimeError(f"{len(replies)} of {len(some)} clients told what they keep")
            yield from ((update.node.client, update.arrays) for update in replies if update.arrays)

    # Arrays and messages

    def _take(self, record: ArrayRecord) -> None:
        """Take over Flower's arrays unless they are the ones that this strategy gave it; of those
        that a wrapper has changed since all that is kept beside them goes on."""
        if record is self._given or record is self._record:
            return
        arrays = from_record(record)
        if not self._leads and self._given is not None:
            kept = apart(self.state()) | {"handout": self.handout}
            self.load_state(kept | {"arrays": arrays})
            self._given, self._record = record, None
            return
        self.arrays = self.initialize(arrays)
        if self.former is not None:
            self.load_state(self.former)
            self.former = None
        self._given, self._record = record, record if self.arrays is arrays else None

    def _messages(
        self,
        action: str,
        payloads: Mapping[Node, Arrays],
        config: ConfigRecord,
        records: dict[int, ArrayRecord] | None = None,
    ) -> list[tuple[Message, Node]]:
        """One message per node; arrays that nodes share are serialised once, and kept in `records`
        by their ids for other messages that hold them."""
        records = {} if records is None else records
        if self._record is not None:
            records[id(self.arrays)] = self._record
        sent = []
        for node in sorted(payloads):
            arrays = payloads[node]
            if id(arrays) not in records:
                records[id(arrays)] = to_record(arrays)
            content = RecordDict(
                {self.arrayrecord_key: records[id(arrays)], self.configrecord_key: config}
            )
            sent.append((Message(content, dst_node_id=node.id, message_type=action), node))
            self.now.bytes["down"] += num_bytes(arrays.values())
        return sent

    def _receive(
        self,
        sent: list[tuple[Message, Node]],
        replies: Iterable[Message],
        like: Mapping[Node, Arrays],
        train: bool = False,
    ) -> list[Update]:
        """The valid replies, sorted by client; the others are dropped, counted and logged."""
        nodes = {message.metadata.message_id: node for message, node in sent}
        kind = sent[0][0].metadata.message_type if sent else ""
        starts = self.now.payloads if kind == "train" else {}
        updates: list[Update] = []
        far: dict[Node, float] = {}
        once: Callable[[], Iterable[Message]] = getattr(replies, "once", lambda: replies)
        for reply in once():
            node = nodes.pop(reply.metadata.reply_to_message_id, None)
            if node is None:
                continue
            update, cause, detail = read_reply(
                reply, node, like.get(node), train, self.weighted_by_key, self.requires
            )
            if update is None:
                self._drop(node, cause, detail)
            else:
                updates.append(update)
                far[node] = distance(update.arrays, self.reference(starts.get(node, {})))
                self.now.bytes["up"] += num_bytes(update.arrays.values())
        for node in nodes.values():
            self._drop(node, "missing", f"none within {self.timeout} s")
        known = self.nodes if self.weighted_by_key == EXAMPLES else []
        updates = weighed(sorted(updates, key=lambda update: update.node), known)
        return self._plausible(kind, updates, far)

    def _plausible(
        self, kind: str, updates: list[Update], far: Mapping[Node, float]
    ) -> list[Update]:
        """The updates but those whose arrays are absurdly `far` from what was sent; train replies
        that are farther than `max_update_norm` are brought to it.

        Where participants are secret all stay, since what is usual would tell of them; those are
        clipped in any case."""
        if self._hides or kind == SAVE_STATE or not any(update.arrays for update in updates):
            return updates
        limit = self._magnitudes.limit(kind, [far[update.node] for update in updates])
        most = self.max_update_norm if kind == "train" else 0.0
        kept = []
        for update in updates:
            node, one = update.node, far[update.node]
            if one > limit:
                self._drop(node, "absurd", f"{one:.3g} from what was sent, > {limit:.3g}")
            elif most and one > most:
                start = self.reference(self.now.payloads[node])
                near = scaled(update.arrays, start, most / one)
                kept.append(replace(update, arrays=near))
                self.now.clipped += 1
            else:
                kept.append(update)
        return kept

    def _drop(self, node: Node, cause: str, detail: str) -> None:
        """Count and log a reply that is not used."""
        self.now.dropped[cause] += 1
        log(WARNING, "%s: reply dropped, %s: %s", self._named(node), cause, detail)

    @property
    def _hides(self) -> bool:
        """Whether it is a secret who takes part, and how many."""
        return self.privacy is not None and self.privacy.hides_participants

    def _named(self, node: Node) -> str:
        return "a client" if self._hides else f"client {node.client}"


def apart(state: Any) -> Any:
    """The state in dicts, lists and sets of its own; its arrays are the same."""
    if isinstance(state, Mapping):
        return {key: apart(value) for key, value in state.items()}
    if isinstance(state, list | set):
        return type(state)(map(apart, state))
    return state


def _parts(nodes: Sequence[Node]) -> Iterator[Sequence[Node]]:
    return (nodes[at : at + AT_ONCE] for at in range(0, len(nodes), AT_ONCE))


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None
