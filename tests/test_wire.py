"""docs/privacy.md names all that messages hold, also under settings that change them, and no more
than that; under privacy they hold what it says."""

import pytest
from tiny import SMALL, Watched, federate
from wire import DOWN, UP, held, table, unnamed

from fedapps.methods import METHODS

TASTES = {"partition": "preference", "num-clients": 20, "evaluate-every": 2}
TASTES |= {f"{m}.local-epochs": 1 for m in ("fedembed", "global", "global+", "pfedkm")}
TASTES |= {f"{m}.embedding-dim": 8 for m in ("fedembed", "global+")}
VARIANTS = [
    ("fedavg", {"bound": True, "lr-decay": 0.9, "num-clients": 3, "evaluate-every": 2}),
    ("fedembed", TASTES | {"fedembed.assignment": "som"}),
    ("pfedme", {"pfedme.heads": "server"}),
    ("pfedhn", {"pfedhn.descriptor": "class-proportions"}),
    ("odpfl-hn", {"odpfl-hn.training": "two-phase", "odpfl-hn.fine-tune-rounds": 1}),
    ("odpfl-hn", {"odpfl-hn.encoder": "ds-sphere", "odpfl-hn.descriptor-epsilon": 1.0}),
]


def messages(method, **changes):
    """All messages of a small run, and its configuration."""
    _, grid = federate(Watched, method=method, **changes)
    assert not any(message.has_error() for message in grid.seen)
    return grid.seen, SMALL | changes


@pytest.mark.parametrize(("method", "changes"), VARIANTS)
def test_other_settings_send_nothing_that_is_not_named(method, changes):
    seen, config = messages(method, **changes)
    assert not unnamed(method, held(method, config, seen))


def test_a_name_that_no_row_has_is_found():
    found = {("train", UP): {"model", "loss", "age"}, ("query.gossip", DOWN): {"method"}}
    assert unnamed("fedavg", found) == [
        ("query.gossip", DOWN, "method"),
        ("train", UP, "age"),
    ]
    assert unnamed("fedavg", {("train", UP): {"control/model"}})
    assert not unnamed("scaffold", {("train", UP): {"control/model"}})


def test_every_method_of_the_page_exists():
    for message, methods, _ in table():
        others = (["all"], ["served", "nodes"], ["simulated", "clients"])
        assert methods in others or set(methods) <= METHODS.keys(), message


PRIVATE = {"dp-noise-multiplier": 1.0, "rounds": 1, "fedembed.assignment": "type"} | TASTES
KEPT = [(method, kind) for method, entry in METHODS.items() for kind in entry.dp]


@pytest.mark.parametrize(("method", "kind"), KEPT)
def test_a_private_client_tells_who_it_is_and_its_change(method, kind):
    own = {"model": "convnet-bn"} if method == "fedbn" else {}
    seen, config = messages(method, dp=kind, **PRIVATE, **own)
    found = held(method, config, seen)
    assert found.pop(("query", UP)) == {"fedapps", "client", "novel", "model", "input-size"}
    told = found.pop(("train", UP), {"model", "num-examples"})  # perhaps nobody was drawn
    assert told - {"own/model"} == {"model", "num-examples"}
    assert {way for _, way in found} <= {DOWN}
    assert not unnamed(method, found)
    for message in seen:
        for record in message.content.metric_records.values():
            assert dict(record) == {"num-examples": 1}
