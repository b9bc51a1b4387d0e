"""The Flower strategy that every method starts from: construct it, call `start` in a ServerApp.

What a method states, overrides and may call is in `strategies.core.strategy_hooks`. This file has
the rounds, as Flower or a wrapper calls them. A run calls, in this order:

1. `start` (or a wrapper, such as Flower's privacy wrappers) runs the rounds.
2. `configure_train` updates the roster and calls `sample` and `broadcast`.
3. `aggregate_train` checks the replies against `expected` and `baseline_arrays`, and calls
   `to_server_names`, `aggregate` and `report`.
4. `configure_evaluate` calls `personalize`, every `evaluate_every` rounds.
5. `aggregate_evaluate` computes the metrics and ends the round.

The other files of this folder have one subject each: the roster of nodes (`roster`), replies
(`receiver`), their checks (`reply_checks`) and limits (`limits`), metrics (`evaluation`), saved
state (`run_state`), privacy (`privacy`) and wrappers (`wrapper_checks`)."""

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
from contextlib import contextmanager, suppress
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from clients.core.arrays import Arrays, from_record, num_bytes, settled, to_record
from clients.core.privacy import EVERYTHING
from clients.core.protocol import BOUND, RUN_TOKEN, SECONDS, SELECTED_SCORE
from fedapps.common.tasks import AUTO
from fedapps.common.torch_defaults import torch_defaults
from strategies.core.evaluation import (
    MAIN_SCORES,
    aggregated,
    foreign_means,
    losses,
    train_means,
)
from strategies.core.nodes import Nodes, as_nodes
from strategies.core.privacy import participants_are_secret
from strategies.core.replies import LACKS, NOT_FINITE, Node, Update, finite
from strategies.core.round_state import PersonalizationCost, Round, Stop
from strategies.core.run_state import (
    check_names,
    copy_containers,
    own_copy,
    return_client_states,
)
from strategies.core.strategy_hooks import StrategyHooks

__all__ = ["PersonalizedStrategy", "Stop"]

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]

SHOWN = 5  # client ids in a line of the log

# Keys of a strategy's `state` whose values are not part of the model.
NOT_OF_MODEL = ("round", "undone-rounds", "sizes", "privacy", "token", "column-encoder", "late")


class PersonalizedStrategy(StrategyHooks):
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

        Raises ValueError for arguments of a wrong type or out of range, and for an `evaluate_fn`
        where there is no global model, RuntimeError when the run cannot continue."""
        _check_start(initial_arrays, num_rounds, timeout)
        if evaluate_fn is not None and (self.keeps_arrays or not self.holds_model):
            raise ValueError(
                f"{type(self).__name__} holds no model that evaluate_fn could evaluate: every "
                "client has its own; leave it out and read the clients' evaluations"
            )
        if type(self).aggregate_train is not PersonalizedStrategy.aggregate_train:
            self.wrapper_checks.check_rounds()
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
            if self.round < num_rounds:
                self.training_stopped(num_rounds)
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

    @torch_defaults()  # the program around a strategy may have others
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
            self._has_just_continued = True
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
        if self._has_just_continued:
            self._has_just_continued = False
            self._warn_of_other_clients()
        self.now.dropped += self.roster.refused
        return_client_states(self, self.former_clients)
        if self.column_encoder is not None and self.column_encoder.encoding is None:
            self.column_encoder.learn(self)

    def _warn_of_other_clients(self) -> None:
        """Warn if clients of the run that this one continues are away and others are new: they may
        be the same under other ids."""
        known = self.known_clients()
        present = {node.client for node in self.nodes}
        away = sorted(known - present)
        new = sorted({node.client for node in self.training_nodes()} - known)
        if not away or not new:
            return
        log(
            WARNING,
            "the run that this one continues had clients %s, which are not connected; clients %s "
            "are new and begin without what the server keeps of each. Flower gives a node without "
            "a key, and each simulated one, another id when it starts again: then let clients "
            "report ids of their own, see docs/how-to/flower-app.md",
            _some(away),
            _some(new),
        )

    # Training

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages to the sampled training nodes."""
        if not self.runs_own_loop and server_round == 1:
            self.wrapper_checks.check_rounds()
            self.construction.begin(self)  # a wrapper's run begins
            self.wrapper_checks.warn_of_last_round()
        self.now = now = Round(server_round)
        self.grid = grid
        self._accept(arrays)
        self._update_roster()
        now.training = True
        busy = self.late.busy
        with torch_defaults():
            nodes = [node for node in self.sample() if node not in busy]
            now.payloads = self.broadcast(self.arrays, nodes)
        if not self.runs_own_loop:
            self.wrapper_checks.check_payloads(arrays, now.payloads.values())
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
        if not self.runs_own_loop:
            self.wrapper_checks.warn_of_noise(updates, num_asked)
        started_from = [now.payloads[update.node] for update in updates]
        updates = self.to_server_names(updates, started_from)[0]
        # Free the sent models: they use twice the memory of the replies.
        del started_from
        now.sent = []
        now.payloads = {}
        if self.privacy is not None:
            updates = self.privacy.protect(updates, self.arrays, server_round)
        before = own_copy(self.state(), in_place=self.in_place)
        # The result is checked below.
        with np.errstate(over="ignore", invalid="ignore"), torch_defaults():
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

    @torch_defaults()
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
            metrics.update(aggregated(aggregate, updates, self.weighted_by_key))
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
            if finite(self.arrays):
                causes += "; training diverged: lower lr"
            else:
                causes += "; the arrays that clients got are not finite, either: start from others"
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
        if now.training and not self.runs_own_loop:
            self.wrapper_checks.warn_of_skipped_round()
            now.training = False
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

    @torch_defaults()
    def _personalize_and_measure(self, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """`personalize` of these nodes; its mean cost for a node is kept for the report."""
        now = self.now
        started = time.monotonic()
        bytes_before = dict(now.bytes)
        payloads = self.personalize(self.arrays, nodes)
        share = 1 / max(len(nodes), 1)
        apart = now.preparation_cost
        seconds = time.monotonic() - started
        now.personalization_cost = PersonalizationCost(
            seconds=share * (seconds - apart.seconds),
            bytes_down=share * (now.bytes["down"] - bytes_before["down"] - apart.bytes_down),
            bytes_up=share * (now.bytes["up"] - bytes_before["up"] - apart.bytes_up),
        )
        return payloads

    @contextmanager
    def preparing(self, phase: str, num_clients: int) -> Iterator[None]:
        """Within the context `personalize` prepares with `num_clients` training clients what serves
        all nodes. The round's report has its seconds as the phase `phase`, and the megabytes that
        one of these clients gets (`down`) and sends (`up`) as ``PHASE-megabytes``; no novel
        client's cost has them."""
        now = self.now
        started = time.monotonic()
        bytes_before = dict(now.bytes)
        try:
            yield
        finally:
            cost = PersonalizationCost(
                seconds=time.monotonic() - started,
                bytes_down=now.bytes["down"] - bytes_before["down"],
                bytes_up=now.bytes["up"] - bytes_before["up"],
            )
            now.preparation_cost = cost
            now.phases[phase] = cost.seconds
            now.phase_started += cost.seconds  # the phase around it does not have them, too
            now.report[f"{phase}-megabytes"] = {
                "down": cost.bytes_down / num_clients / 1e6,
                "up": cost.bytes_up / num_clients / 1e6,
            }

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


def _some(numbers: Sequence[int]) -> str:
    """The first of the numbers, and how many there are in all."""
    shown = ", ".join(map(str, numbers[:SHOWN]))
    return shown if len(numbers) <= SHOWN else f"{shown}, … ({len(numbers)})"


def check_num_rounds(num_rounds: Any) -> None:
    """Raise ValueError unless it is a whole number from 0."""
    is_whole = isinstance(num_rounds, int | np.integer) and not isinstance(num_rounds, bool)
    if not is_whole or num_rounds < 0:
        raise ValueError(f"num_rounds is {num_rounds!r:.80}; it must be a whole number from 0")


def _check_start(initial_arrays: Any, num_rounds: Any, timeout: Any) -> None:
    """Raise ValueError for arguments of `start` of a wrong type or out of range."""
    if not isinstance(initial_arrays, ArrayRecord):
        raise ValueError(
            f"initial_arrays is a {type(initial_arrays).__name__}; give an ArrayRecord, as "
            "ArrayRecord(net.state_dict()) or ArrayRecord(list_of_numpy_arrays)"
        )
    check_num_rounds(num_rounds)
    is_number = isinstance(timeout, int | float | np.number)
    if not is_number or not timeout > 0:
        raise ValueError(f"timeout is {timeout!r:.80}; it must be a number of seconds above 0")
