"""Requests that share an exchange: the same numbers as with an exchange for each. On real nodes
an exchange costs seconds."""

from itertools import groupby

import numpy as np
from small_runs import TASTES, federate

from clients.core.arrays import from_record
from clients.core.protocol import SAVE_STATE
from fedapps.engines.in_process_grid import InProcessGrid
from strategies.core import domain_distances
from strategies.core.strategy import PersonalizedStrategy
from strategies.methods.fedembed import FedEmbed


class Counted(InProcessGrid):
    """Keeps what each exchange asked, those for what a simulation saves apart."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.asked: list[str] = []

    def send_and_receive(self, messages, *, timeout=None):
        sent = list(messages)
        self.asked += sorted({message.metadata.message_type for message in sent} - {SAVE_STATE})
        return super().send_and_receive(sent, timeout=timeout)


def same(one, other):
    ours, theirs = from_record(one.arrays), from_record(other.arrays)
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(array, theirs[name]) for name, array in ours.items())
    assert one.evaluate_metrics_clientapp == other.evaluate_metrics_clientapp


def test_volunteers_are_not_asked_twice_between_two_trainings(monkeypatch):
    settings = TASTES | {"method": "fedembed", "num-clients": 20, "rounds": 4, "evaluate-every": 2}
    one, grid = federate(Counted, **settings)
    train = ["query.prototype", "train.assign", "train"]
    score = ["query.prototype", "evaluate"]
    assert grid.asked == ["query", *train, *train, *score, *train[1:], *train, *score]
    never = property(lambda self: np.array([-1]), lambda self, value: None)
    monkeypatch.setattr(FedEmbed, "recent", never, raising=False)
    other, grid = federate(Counted, **settings)
    assert grid.asked == ["query", *train, *train, *score, *train, *train, *score]
    same(one, other)


def test_volunteers_are_asked_again_after_a_lost_round(monkeypatch):
    """Round 3, before which an evaluation asked them, is undone; but they have trained in it."""
    settings = TASTES | {"method": "fedembed", "num-clients": 20, "rounds": 4, "evaluate-every": 2}
    whole = FedEmbed.aggregate

    def spoilt(self, arrays, updates):
        found = whole(self, arrays, updates)
        return {name: a * np.nan for name, a in found.items()} if self.round == 3 else found

    monkeypatch.setattr(FedEmbed, "aggregate", spoilt)
    result, grid = federate(Counted, **settings)
    assert result.train_metrics_clientapp[3]["undone"] == 1
    train = ["query.prototype", "train.assign", "train"]
    score = ["query.prototype", "evaluate"]
    assert grid.asked == ["query", *train, *train, *score, *train[1:], *train, *score]


def test_both_sides_of_a_domain_classifier_are_asked_at_once(monkeypatch):
    """The steps of a distance, fewer than usual (conftest.py), and their errors."""
    asked_of_domains = domain_distances.STEPS + 1
    settings = {"method": "pfl-nearest", "num-clients": 4, "rounds": 1, "local-steps": 1}
    one, grid = federate(Counted, **settings)
    count = {kind: len(list(asked)) for kind, asked in groupby(grid.asked)}
    assert count == {
        "query": 1,
        "train": 1,
        "query.export": 1,
        "query.domain": asked_of_domains,
        "evaluate": 1,
    }
    together = PersonalizedStrategy.exchange_together

    def apart(self, *requests):
        return [together(self, request)[0] for request in requests]

    monkeypatch.setattr(PersonalizedStrategy, "exchange_together", apart)
    other, grid = federate(Counted, **settings)
    assert grid.asked.count("query.domain") == 2 * asked_of_domains
    same(one, other)
