"""The rounds of a run: what Flower's contract asks of a strategy, by its hooks.

A round calls `sample`, `broadcast`, `expected`, `reference`, `named` and `aggregate`; an
evaluation calls `personalize`. A wrapper, such as Flower's privacy wrappers, may run the rounds."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from logging import INFO
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from clients.arrays import Arrays, num_bytes, settled, to_record
from clients.privacy import EVERYTHING
from clients.protocol import RUN_TOKEN
from strategies.hooks import Hooks
from strategies.replies import LACKS, Node, Update
from strategies.roster import Roster
from strategies.round import Round, Stop
from strategies.run_state import (
    FlowerArrays,
    model_is_finite,
    return_client_states,
    snapshot,
    undo_round,
)
from strategies.scores import Evaluation, losses, own_means, records

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


class Loop:
    """The rounds of one strategy."""

    def __init__(
        self, strategy: Hooks, roster: Roster, client_states: Mapping[int, Arrays]
    ) -> None:
        self.strategy, self.roster = strategy, roster
        self.client_states = dict(client_states)
        self.evaluation = Evaluation(strategy)
        self.flower_arrays = FlowerArrays(strategy)

    # A run

    def run(
        self,
        arrays: ArrayRecord,
        training: ConfigRecord,
        evaluation: ConfigRecord,
        evaluate_fn: Evaluate | None,
    ) -> Result:
        """The rounds of the strategy that remain, or one evaluation if it has no rounds at all."""
        strategy, num_rounds = self.strategy, self.strategy.num_rounds
        result = Result()
        strategy.now = Round()
        self.flower_arrays.take(arrays)
        done = strategy.round
        if not done:
            self._evaluate_centrally(0, evaluate_fn, result)
        try:
            for number in range(done + 1, num_rounds + 1):
                log(INFO, "[ROUND %s/%s]", number, num_rounds)
                replies = self._send(
                    strategy.configure_train(number, arrays, training, strategy.grid)
                )
                aggregated, metrics = strategy.aggregate_train(number, replies)
                arrays = arrays if aggregated is None else aggregated
                if metrics is not None:
                    result.train_metrics_clientapp[number] = metrics
                self._evaluate(number, arrays, evaluation, result)
                self._evaluate_centrally(number, evaluate_fn, result)
        except Stop as stop:
            log(INFO, "training ends after round %s: %s", strategy.round, stop)
            if not strategy.now.evaluated:
                strategy.num_rounds = strategy.round  # a last round is always evaluated
                with suppress(Stop):  # `on_round` may raise it again
                    self._evaluate(strategy.round, arrays, evaluation, result)
        if not num_rounds:
            strategy.now = Round(0, report={"round": 0})
            self._evaluate(0, arrays, evaluation, result)
        result.arrays = to_record(strategy.arrays)
        return result

    def _send(self, messages: Iterable[Message]) -> Iterable[Message]:
        return self.strategy.grid.send_and_receive(messages, timeout=self.strategy.timeout)

    def _evaluate(
        self, number: int, arrays: ArrayRecord, config: ConfigRecord, result: Result
    ) -> None:
        replies = self._send(
            self.strategy.configure_evaluate(number, arrays, config, self.strategy.grid)
        )
        metrics = self.strategy.aggregate_evaluate(number, replies)
        if metrics is not None:
            result.evaluate_metrics_clientapp[number] = metrics

    def _evaluate_centrally(
        self, number: int, evaluate_fn: Evaluate | None, result: Result
    ) -> None:
        if evaluate_fn is not None:
            metrics = evaluate_fn(number, to_record(self.strategy.global_model()))
            if metrics is not None:
                result.evaluate_metrics_serverapp[number] = metrics

    def present(self) -> list[Node]:
        """Update the roster: the nodes that are present, by client id."""
        strategy = self.strategy
        config = strategy.common_config | {RUN_TOKEN: strategy.token}
        nodes = self.roster.present(strategy.grid, config, strategy.timeout)
        strategy.nodes = list(nodes)  # the strategy may change it
        return strategy.nodes

    def _meet(self) -> None:
        """Update the roster; refused nodes count among the dropped, and clients of a former run
        get their states back."""
        self.present()
        self.strategy.now.dropped += self.roster.refused
        return_client_states(self.strategy, self.client_states)

    # Training

    def configure_train(
        self, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages to the sampled training nodes."""
        strategy = self.strategy
        strategy.now, strategy.grid = Round(number), grid
        if not strategy.leads and number == 1:
            self.flower_arrays.begin_wrapped_run()
        self.flower_arrays.take(arrays)
        self._meet()
        nodes, now = strategy.sample(), strategy.now
        now.payloads = strategy.broadcast(strategy.arrays, nodes)
        if not strategy.leads:
            self.flower_arrays.check_wrapped(arrays, now.payloads.values())
        private: dict[str, Any] = {}
        if strategy.privacy is not None:
            strategy.privacy.spend(list(now.payloads))
            private = strategy.privacy.settings()
        settings = ConfigRecord(dict(config) | strategy.message_config() | private)
        now.sent = strategy.messenger.messages("train", now.payloads, settings)
        now.report = {"round": number, "sampled": len(nodes)}
        now.end_phase("send")
        return [message for message, _ in now.sent]

    def aggregate_train(
        self, number: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the valid replies."""
        strategy, now, messenger = self.strategy, self.strategy.now, self.strategy.messenger
        clients = max(len(now.sent), 1)
        updates = messenger.receive(now.sent, replies, self._expected(), train=True)
        now.end_phase("clients")
        self._stop_on_failure()
        self._stop_on_few(updates)
        foreign = records(updates, strategy.weighted_by_key)
        updates, _ = strategy.named(updates, [now.payloads[update.node] for update in updates])
        now.sent, now.payloads = [], {}  # together as large as twice the replies
        if strategy.privacy is not None:
            updates = strategy.privacy.protect(updates, strategy.arrays, number)
        before = snapshot(strategy)
        with np.errstate(over="ignore", invalid="ignore"):  # the result is checked below
            aggregated = strategy.aggregate(strategy.arrays, updates)
            strategy.arrays = settled(aggregated, before["arrays"])
        if not model_is_finite(strategy):
            undo_round(strategy, before)
        self._stop_on_failure()  # in an exchange that aggregate made
        now.report |= self._train_report(updates, clients) | strategy.report()
        now.end_phase("aggregate")
        messenger.record = None if strategy.keeps_arrays else to_record(strategy.arrays)
        return messenger.record, self._train_metrics(foreign)

    def _expected(self) -> dict[Node, Arrays]:
        """What each node's train reply must be like; nodes with any reply left out."""
        strategy = self.strategy
        like = {node: strategy.expected(sent) for node, sent in strategy.now.payloads.items()}
        return {node: arrays for node, arrays in like.items() if arrays is not None}

    def _train_report(self, updates: list[Update], clients: int) -> dict[str, Any]:
        """What a round's report says of the replies."""
        now, known, own = self.strategy.now, losses(updates), own_means(updates)
        return {
            "loss": float(np.mean(known)) if known else None,
            **({"metrics": own} if own else {}),
            "valid": len(updates),
            "dropped": dict(now.dropped),
            **({"clipped": now.clipped} if now.clipped else {}),
            "megabytes": {way: n / clients / 1e6 for way, n in now.bytes.items()},
        }

    def _train_metrics(self, foreign: list[RecordDict]) -> MetricRecord:
        """A round's metrics as Flower's loop gets them."""
        strategy, report = self.strategy, self.strategy.now.report
        metrics = MetricRecord()
        if strategy.privacy is None:
            metrics.update(strategy.train_metrics_aggr_fn(foreign, strategy.weighted_by_key))
        if not strategy.messenger.hides_participants:
            metrics["valid-replies"] = report["valid"]
            if report["loss"] is not None:
                metrics["loss"] = report["loss"]
            for cause, count in report["dropped"].items():
                metrics[f"dropped-{cause}"] = count
        if report.get("undone"):
            metrics["undone"] = 1
        return metrics

    def _stop_on_failure(self) -> None:
        """Raise RuntimeError if a client failed and `on_client_failure` is "stop"."""
        dropped = self.strategy.now.dropped
        if dropped and self.strategy.on_client_failure == "stop":
            causes = sorted(dropped) if self._secret else dict(dropped)
            raise RuntimeError(
                f"{self._lacking()}round {self.strategy.round}: a client failed ({causes}); "
                f"{self.strategy.now.failure}"
            )

    def _stop_on_few(self, updates: list[Update]) -> None:
        """Raise RuntimeError if too few of the sampled clients replied."""
        now, least = self.strategy.now, self.strategy.min_valid_replies
        if len(updates) >= least or not now.report["sampled"]:  # a private sample may be empty
            return
        count, causes = f"{len(updates)} valid replies of {len(now.sent)}", ""
        if self._secret:
            count = "too few valid replies"
        else:
            causes = f"; dropped by cause: {dict(now.dropped)}"
        causes += f"; {now.failure}" if now.failure else ""
        raise RuntimeError(
            f"{self._lacking()}round {now.number}: {count}, min-valid-replies is {least}{causes}"
        )

    def _stop_on_unscored(self, updates: list[Update]) -> None:
        """Raise RuntimeError if all training clients that were asked, or all novel ones, failed."""
        now, scored = self.strategy.now, {update.node.novel for update in updates}
        unscored = {node.novel for _, node in now.sent} - scored
        if unscored and now.dropped.total() > now.dropped["missing"]:
            role = "novel" if min(unscored) else "training"
            raise RuntimeError(
                f"round {now.number}: no {role} client could be evaluated (fraction-evaluate=0 "
                f"evaluates none); {now.failure}"
            )

    @property
    def _secret(self) -> bool:
        return self.strategy.messenger.hides_participants

    def _lacking(self) -> str:
        """What clients lack, if replies were refused for that, or foreign clients failed."""
        strategy, dropped = self.strategy, self.strategy.now.dropped
        failed = dropped["error"] and any(node.foreign for node in strategy.nodes)
        if strategy.requires is None or not (dropped[LACKS] or failed):
            return ""
        return f"{strategy.requires.sentence(type(strategy).__name__)}; "

    # Evaluation

    def configure_evaluate(
        self, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages to a sample of all nodes, in the rounds that evaluate."""
        strategy, now = self.strategy, self.strategy.now
        now.number, strategy.grid, now.sent = number, grid, []
        if not strategy.fraction_evaluate:
            return []
        if number % strategy.evaluate_every and number != strategy.num_rounds:
            return []
        now.evaluated, now.dropped, now.failure = True, Counter(), ""
        self.flower_arrays.take(arrays)
        if strategy.privacy is not None:
            if strategy.privacy.covers == EVERYTHING:
                return []  # scores without noise stay on their clients
            strategy.privacy.admit("scores of evaluations")
        self._meet()
        labeled = [node for node in strategy.nodes if not node.unlabeled]  # others have no score
        nodes = [node for node in labeled if strategy.evaluate_novel or not node.novel]
        nodes = strategy.draw("evaluate", nodes, strategy.fraction_evaluate)
        started, before = time.monotonic(), dict(now.bytes)
        payloads = strategy.personalize(strategy.arrays, nodes)
        each, down, up = 1 / max(len(nodes), 1), *(now.bytes[w] - before[w] for w in ("down", "up"))
        now.personalized = each * (time.monotonic() - started), each * down, each * up
        now.payloads = {node: arrays for node, arrays in payloads.items() if node.novel}
        scores: dict[str, Any] = {"bound": True} if strategy.bound else {}
        scores |= {} if strategy.select == "accuracy" else {"select": strategy.select}
        settings = ConfigRecord(dict(config) | strategy.message_config() | scores)
        now.sent = strategy.messenger.messages("evaluate", payloads, settings)
        return [message for message, _ in now.sent]

    def aggregate_evaluate(self, number: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The evaluation's metrics, and the end of the round."""
        strategy, now, metrics = self.strategy, self.strategy.now, None
        if now.evaluated:
            updates = strategy.messenger.receive(now.sent, replies, {})
            self._stop_on_failure()
            self._stop_on_unscored(updates)
            metrics = self.evaluation.metrics(updates)
            self._report_serving(updates)
            now.report["evaluation"] = dict(metrics)
            if now.dropped:
                now.report["evaluation-dropped"] = dict(now.dropped)
            strategy.evaluation = updates
            if strategy.privacy is not None:
                strategy.evaluation = []  # a client's score is not written
                now.report |= strategy.privacy.report()
            now.end_phase("evaluate")
        now.payloads = {}
        now.report["seconds"] = time.monotonic() - now.started
        now.report["phases"] = now.phases
        if strategy.on_round is not None:
            privacy = strategy.privacy
            strategy.on_round(now.report if privacy is None else privacy.released(now.report))
        return metrics

    def _report_serving(self, updates: list[Update]) -> None:
        """Report what a novel client costs: its seconds and its share of the server's, and the
        megabytes of arrays that it gets and sends."""
        now, sent = self.strategy.now, self.strategy.now.payloads
        seconds, down, up = now.personalized
        measured = [
            u.metrics["seconds"] for u in updates if u.node.novel and "seconds" in u.metrics
        ]
        if sent and measured:
            now.phases["novel-client"] = seconds + float(np.mean(measured))
            down += sum(num_bytes(arrays.values()) for arrays in sent.values()) / len(sent)
            now.report["novel-megabytes"] = {"down": down / 1e6, "up": up / 1e6}
