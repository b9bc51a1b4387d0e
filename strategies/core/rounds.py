"""The Flower strategy that every method starts from: construct it, call `start` in a ServerApp.

`strategies.core.strategy` is what a method overrides. A round calls `sample`, `broadcast`,
`expected`, `baseline_arrays`, `to_server_names` and `aggregate`; an evaluation calls `personalize`.
A wrapper, such as Flower's privacy wrappers, may run the rounds. Collaborators are the roster
(`roster`), messages and replies (`messages`, `replies`, `reply_metrics`), evaluations (`scores`),
saved state (`run_state`) and privacy (`privacy`)."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from clients.core.arrays import Arrays, num_bytes, settled, to_record
from clients.core.privacy import EVERYTHING
from clients.core.protocol import RUN_TOKEN
from strategies.core.evaluation import Evaluation, foreign_means, losses, records, train_means
from strategies.core.replies import LACKS, NOT_FINITE, Node, Update
from strategies.core.round import Round, Stop
from strategies.core.run_state import (
    InitialArraysTracker,
    client_states,
    model_is_finite,
    return_client_states,
    snapshot,
    undo_round,
)
from strategies.core.strategy import StrategyBase

__all__ = ["PersonalizedStrategy", "Stop"]

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


class PersonalizedStrategy(StrategyBase):
    """Rounds of training on sampled training clients; evaluation on training and novel clients.

    A run waits at most `wait` seconds for `min_available_nodes`. A reply that is an error, lacks or
    invents names, has wrong shapes or dtypes, is not finite, or is absurdly far from what was sent
    is dropped, counted and logged.

    `on_round` is called with each round's report and may raise `Stop`; `on_failure` with a text for
    each new cause of a dropped reply. `privacy` protects updates
    before they are aggregated. `former` is the `state` of a former run, or just its "arrays"; the
    run continues after the round of that state, and with 0 rounds it is only evaluated.
    `client_states` are the states of that run's clients, by client id; they are sent back. With
    `only_model` the roster is limited to clients whose network has that name. The learning rates of
    round r, counted from 0, are `lr_decay` ** (r / `lr_decay_rounds`) times those given, on clients
    and server; r is `saved_rounds` more where `former` was trained for that many.

    `min_train_nodes` to `evaluate_metrics_aggr_fn` are those of Flower's FedAvg; they aggregate
    the metrics of foreign clients. Without `evaluate_every` every round is evaluated, as in
    Flower's strategies. Without `ask` no node is asked for its identity. A `lenient`
    strategy accepts clients that lack what it `requires`, and logs what it then computes.

    Raises ValueError for settings out of range, RuntimeError when a run cannot continue."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._scores, self._initial_arrays = Evaluation(self), InitialArraysTracker(self)

    def summary(self) -> None:
        """Nothing to log: the settings stand in the run's configuration."""

    # A run

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

        `train_config` also goes with queries, further exchanges and, unless `evaluate_config` is
        given, evaluations. `evaluate_fn` gets `global_model`; ValueError where there is none."""
        if evaluate_fn is not None and (self.keeps_arrays or not self.holds_model):
            raise ValueError(
                f"{type(self).__name__} holds no model that evaluate_fn could evaluate: every "
                "client has its own; leave it out and read the clients' evaluations"
            )
        self.construction.begin(self)
        self.grid, self.num_rounds, self.timeout = grid, num_rounds, timeout
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
        """The rounds that remain, or one evaluation if there are no rounds at all."""
        result, num_rounds = Result(), self.num_rounds
        self.now = Round()
        self._initial_arrays.accept(arrays)
        done = self.round
        if not done:
            self._evaluate_centrally(0, evaluate_fn, result)
        try:
            for number in range(done + 1, num_rounds + 1):
                log(INFO, "[ROUND %s/%s]", number, num_rounds)
                replies = self._train(self.configure_train(number, arrays, training, self.grid))
                aggregated, metrics = self.aggregate_train(number, replies)
                arrays = arrays if aggregated is None else aggregated
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

    def open(self, grid: Grid, initial_arrays: ArrayRecord, config: Mapping[str, Any]) -> None:
        """Load the `former` state without any round, to serve the nodes of the grid.

        `personalize` and `exchange` then work; their messages hold `config`."""
        self.construction.begin(self)
        self.grid, self.common_config = grid, dict(config)
        self._initial_arrays.accept(initial_arrays)

    def _send(self, messages: Iterable[Message]) -> Iterable[Message]:
        return self.grid.send_and_receive(messages, timeout=self.timeout)

    def _train(self, messages: Iterable[Message]) -> Iterable[Message]:
        """The replies to train messages, as they arrive if the grid can do so: together they are as
        large as all clients' models. An `aggregate_train` of a subclass gets Flower's list."""
        if type(self).aggregate_train is not PersonalizedStrategy.aggregate_train:
            return self._send(messages)
        send = getattr(self.grid, "stream", self.grid.send_and_receive)
        replies: Iterable[Message] = send(messages, timeout=self.timeout)
        return replies

    def _evaluate(
        self, number: int, arrays: ArrayRecord, config: ConfigRecord, result: Result
    ) -> None:
        replies = self._send(self.configure_evaluate(number, arrays, config, self.grid))
        metrics = self.aggregate_evaluate(number, replies)
        if metrics is not None:
            result.evaluate_metrics_clientapp[number] = metrics

    def _evaluate_centrally(
        self, number: int, evaluate_fn: Evaluate | None, result: Result
    ) -> None:
        if evaluate_fn is not None:
            metrics = evaluate_fn(number, to_record(self.global_model()))
            if metrics is not None:
                result.evaluate_metrics_serverapp[number] = metrics

    def present(self) -> list[Node]:
        """Update the roster: the nodes that are present, by client id."""
        config = self.common_config | {RUN_TOKEN: self.token}
        nodes = self.roster.present(self.grid, config, self.timeout)
        self.nodes = list(nodes)  # a strategy may change it
        return self.nodes

    def _ask_who_is_there(self) -> None:
        """Update the roster; refused nodes count among the dropped, and clients of a former run
        get their states back."""
        self.present()
        self.now.dropped += self.roster.refused
        return_client_states(self, self.former_clients)

    def client_states(self) -> Iterator[tuple[int, Arrays]]:
        """As `run_state.client_states`."""
        return client_states(self)

    # Training

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages to the sampled training nodes."""
        if not self.runs_own_loop and server_round == 1:
            self.construction.begin(self)  # a wrapper's run begins
            self._warn_of_last_round()
        self.now, self.grid = Round(server_round), grid
        self._initial_arrays.accept(arrays)
        self._ask_who_is_there()
        nodes, now = self.sample(), self.now
        now.payloads = self.broadcast(self.arrays, nodes)
        if not self.runs_own_loop:
            self._initial_arrays.check_wrapped(arrays, now.payloads.values())
        private: dict[str, Any] = {}
        if self.privacy is not None:
            self.privacy.spend(list(now.payloads))
            private = self.privacy.settings()
        settings = ConfigRecord(dict(config) | self.message_config() | private)
        now.sent = self.messenger.messages("train", now.payloads, settings)
        now.report = {"round": server_round, "sampled": len(nodes)}
        now.end_phase("send")
        return [message for message, _ in now.sent]

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
        """Aggregate the valid replies."""
        now = self.now
        clients = max(len(now.sent), 1)
        expected = {node: self.expected(sent) for node, sent in now.payloads.items()}
        like = {node: arrays for node, arrays in expected.items() if arrays is not None}
        updates = self.messenger.receive(now.sent, replies, like, train=True)
        now.end_phase("clients")
        self._stop_on_failure()
        self._stop_on_few(updates)
        foreign = records(updates, self.weighted_by_key)
        updates, _ = self.to_server_names(
            updates, [now.payloads[update.node] for update in updates]
        )
        now.sent, now.payloads = [], {}  # together as large as twice the replies
        if self.privacy is not None:
            updates = self.privacy.protect(updates, self.arrays, server_round)
        before = snapshot(self)
        with np.errstate(over="ignore", invalid="ignore"):  # the result is checked below
            aggregated = self.aggregate(self.arrays, updates)
            self.arrays = settled(aggregated, before["arrays"])
        if not model_is_finite(self):
            undo_round(self, before)
        self._stop_on_failure()  # in an exchange that aggregate made
        now.report |= self._train_report(updates, clients) | self.report()
        now.end_phase("aggregate")
        self.messenger.record = None if self.keeps_arrays else to_record(self.arrays)
        return self.messenger.record, self._train_metrics(foreign)

    def _train_report(self, updates: list[Update], clients: int) -> dict[str, Any]:
        """What a round's report says of the replies."""
        now, known, own = self.now, losses(updates), train_means(updates)
        lost = self._scores.count_not_finite(updates)
        return {
            "loss": float(np.mean(known)) if known else None,
            **({"metrics": own} if own else {}),
            **({"not-finite": lost} if lost else {}),
            "valid": len(updates),
            "dropped": dict(now.dropped),
            **({"clipped": now.clipped} if now.clipped else {}),
            **({"recounted": now.recounted} if now.recounted else {}),
            "megabytes": {way: n / clients / 1e6 for way, n in now.bytes.items()},
        }

    def _train_metrics(self, foreign: list[RecordDict]) -> MetricRecord:
        """A round's metrics as Flower's loop gets them."""
        report, metrics = self.now.report, MetricRecord()
        if self.privacy is None:
            mean = self.train_metrics_aggr_fn or foreign_means
            metrics.update(mean(foreign, self.weighted_by_key))
        if not self.messenger.hides_participants:
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
        if dropped and self.on_client_failure == "stop":
            causes = sorted(dropped) if self.messenger.hides_participants else dict(dropped)
            raise RuntimeError(
                f"{self._lacking()}round {self.round}: a client failed ({causes}); "
                f"{self.now.failure}"
            )

    def _stop_on_few(self, updates: list[Update]) -> None:
        """Raise RuntimeError if too few of the sampled clients replied."""
        now, least = self.now, self.min_valid_replies
        if len(updates) >= least or not now.report["sampled"]:  # a private sample may be empty
            return
        count, causes = f"{len(updates)} valid replies of {len(now.sent)}", ""
        if self.messenger.hides_participants:
            count = "too few valid replies"
        else:
            causes = f"; dropped by cause: {dict(now.dropped)}"
        causes += f"; {now.failure}" if now.failure else ""
        if now.dropped and set(now.dropped) == {NOT_FINITE}:
            causes += "; training diverged: lower lr"
        raise RuntimeError(
            f"{self._lacking()}round {now.number}: {count}, min-valid-replies is {least}{causes}"
        )

    def _stop_on_unscored(self, updates: list[Update]) -> None:
        """Raise RuntimeError if all training clients that were asked, or all novel ones, failed."""
        now, scored = self.now, {update.node.novel for update in updates}
        unscored = {node.novel for _, node in now.sent} - scored
        if unscored and now.dropped.total() > now.dropped["missing"]:
            role = "novel" if min(unscored) else "training"
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

    def _lacking(self) -> str:
        """What clients lack, if replies were refused for that, or foreign clients failed."""
        dropped = self.now.dropped
        failed = dropped["error"] and any(node.foreign for node in self.nodes)
        if self.requires is None or not (dropped[LACKS] or failed):
            return ""
        return f"{self.requires.sentence(type(self).__name__)}; "

    # Evaluation

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages to a sample of all nodes, in the rounds that evaluate."""
        now = self.now
        now.number, self.grid, now.sent = server_round, grid, []
        if not self.fraction_evaluate:
            return []
        if server_round % self.evaluate_every and server_round != self.num_rounds:
            return []
        now.evaluated, now.dropped, now.failure = True, Counter(), ""
        self._initial_arrays.accept(arrays)
        if self.privacy is not None:
            if self.privacy.covers == EVERYTHING:
                return []  # scores without noise stay on their clients
            self.privacy.admit("scores of evaluations")
        self._ask_who_is_there()
        labeled = [node for node in self.nodes if not node.unlabeled]  # others have no score
        nodes = [node for node in labeled if self.evaluate_novel or not node.novel]
        nodes = self.draw("evaluate", nodes, self.fraction_evaluate)
        started, before = time.monotonic(), dict(now.bytes)
        payloads = self.personalize(self.arrays, nodes)
        each, down, up = 1 / max(len(nodes), 1), *(now.bytes[w] - before[w] for w in ("down", "up"))
        now.personalized = each * (time.monotonic() - started), each * down, each * up
        now.payloads = {node: arrays for node, arrays in payloads.items() if node.novel}
        scores: dict[str, Any] = {"bound": True} if self.report_generalization_bound else {}
        scores |= {} if self.selection_metric == "accuracy" else {"select": self.selection_metric}
        settings = ConfigRecord(dict(config) | self.message_config() | scores)
        now.sent = self.messenger.messages("evaluate", payloads, settings)
        return [message for message, _ in now.sent]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The evaluation's metrics, and the end of the round."""
        now, metrics = self.now, None
        if now.evaluated:
            updates = self.messenger.receive(now.sent, replies, {})
            self._stop_on_failure()
            self._stop_on_unscored(updates)
            metrics = self._scores.metrics(updates)
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
            self.on_round(self.privacy.released(now.report) if self.privacy else now.report)
        return metrics

    def _report_serving(self, updates: list[Update]) -> None:
        """Report what a novel client costs: its seconds and its share of the server's, and the
        megabytes of arrays that it gets and sends."""
        now, sent = self.now, self.now.payloads
        seconds, down, up = now.personalized
        measured = [
            u.metrics["seconds"] for u in updates if u.node.novel and "seconds" in u.metrics
        ]
        if sent and measured:
            now.phases["novel-client"] = seconds + float(np.mean(measured))
            down += sum(num_bytes(arrays.values()) for arrays in sent.values()) / len(sent)
            now.report["novel-megabytes"] = {"down": down / 1e6, "up": up / 1e6}
