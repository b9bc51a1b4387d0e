"""docs/reference/wire.md names all that messages hold, under any settings and under privacy."""

import pytest
import small_runs
from small_runs import SMALL, Watched, federate
from wire_table import DOWN, UP, held, table, unnamed

from fedapps.methods import METHODS

TASTES = small_runs.TASTES | {"num-clients": 20, "evaluate-every": 2}
VARIANTS = [
    (
        "fedavg",
        {
            "report-generalization-bound": True,
            "lr-decay": 0.9,
            "num-clients": 3,
            "evaluate-every": 2,
        },
    ),
    ("ditto", {"selection-metric": "macro-f1"}),
    ("ditto", {"selection-metric": "loss"}),
    ("fedembed", TASTES | {"fedembed.assignment": "som"}),
    ("pfedme", {"pfedme.heads": "server"}),
    ("pfedhn", {"pfedhn.descriptor": "class-proportions"}),
    ("pfedhn", {"pfedhn.descriptor": "class-shares"}),
    ("odpfl-hn", {"odpfl-hn.training": "two-phase", "odpfl-hn.fine-tune-rounds": 1}),
    ("odpfl-hn", {"odpfl-hn.encoder": "ds-sphere", "odpfl-hn.descriptor-epsilon": 1.0}),
]


def messages(method, **changes):
    """All messages of a small run, and their names."""
    _, grid = federate(Watched, method=method, **changes)
    assert not any(message.has_error() for message in grid.seen)
    return grid.seen, held(method, SMALL | changes, grid.seen)


@pytest.mark.parametrize(("method", "changes"), VARIANTS)
def test_every_name_is_documented_under_other_settings(method, changes):
    assert not unnamed(method, messages(method, **changes)[1])


def test_a_name_that_no_row_has_is_reported():
    names = {("train", UP): {"model", "loss", "age"}, ("query.gossip", DOWN): {"method"}}
    missing = [("query.gossip", DOWN, "method"), ("train", UP, "age")]
    assert unnamed("fedavg", names) == missing
    assert unnamed("fedavg", {("train", UP): {"control/model"}})
    assert not unnamed("scaffold", {("train", UP): {"control/model"}})


def test_every_method_of_the_page_exists():
    for message, methods, _ in table():
        others = (["all"], ["served", "nodes"], ["simulated", "clients"], ["apps"])
        others = (*others, ["apps", "with", "`standardize`"])
        assert methods in others or set(methods) <= METHODS.keys(), message


PRIVATE = small_runs.TASTES | {"fedembed.assignment": "type"}
PRIVATE |= {"dp-noise-multiplier": 1.0, "rounds": 1, "num-clients": 6}


@pytest.mark.parametrize(
    ("method", "kind"), [(method, kind) for method, entry in METHODS.items() for kind in entry.dp]
)
def test_a_private_client_sends_only_its_identity_and_its_change(method, kind):
    model = {"model": "convnet-bn"} if method in ("fedbn", "bn-adapt") else {}
    seen, names = messages(method, dp=kind, **PRIVATE, **model)
    assert names.pop(("query", UP)) == {"capabilities", "client", "novel", "model", "input-size"}
    trained = names.pop(("train", UP), {"model", "num-examples"})  # sampling may select nobody
    assert trained - {"own/model"} == {"model", "num-examples"}
    assert {way for _, way in names} <= {DOWN}
    assert not unnamed(method, names)
    for message in seen:
        for record in message.content.metric_records.values():
            assert dict(record) == {"num-examples": 1}
