"""Personal heads on the server: what travels, what is stored, what noise falls on."""

import numpy as np
import pytest
from small_runs import federate, states, update

from clients.core.arrays import from_record, group
from clients.methods.pfedme import PFedMeClient
from fedapps.serverapp import run
from fedapps.settings.config import defaults
from strategies.core.privacy import Privacy
from strategies.core.replies import Node
from strategies.core.round_state import Round
from strategies.methods._preferences import PFedKM
from strategies.methods.fedembed import FedEmbed
from strategies.methods.fedrep import FedRep
from strategies.methods.pfedme import PFedMe

START = {"body": np.ones(2, np.float32), "head.w": np.array([1.0, 2.0], np.float32)}
TASTES = {"partition": "preference", "model": "preference-net", "num-clients": 20}
TASTES |= {"train-fraction": 1.0, "fraction-train": 0.5, "local-epochs": 1}


def started(strategy, clients, start=START):
    """The strategy and its arrays in a round with these training clients."""
    strategy.arrays = strategy.initialize(start)
    strategy.nodes = [Node(client, 50 + client) for client in clients]
    return strategy


def answered(strategy, changes):
    """The strategy's arrays after clients changed what they were sent: (body, head) by client."""
    nodes = [Node(client, 50 + client) for client in changes]
    sent = strategy.broadcast(strategy.arrays, nodes)
    replies = []
    for node, (body, head) in zip(nodes, changes.values(), strict=True):
        moves = {name: body if name == "body" else head for name in sent[node]}
        trained = {name: a + np.float32(moves[name]) for name, a in sent[node].items()}
        replies.append(update(node.client, trained))
    replies, _ = strategy.to_server_names(replies, [sent[node] for node in nodes])
    if strategy.privacy is not None:
        replies = strategy.privacy.protect(replies, strategy.arrays, 1)
    strategy.arrays = strategy.aggregate(strategy.arrays, replies)
    return strategy.arrays


def test_heads_that_nobody_used_exist_after_an_empty_round():
    """Else the names of a private model would tell that nobody was drawn."""
    strategy = started(FedRep(heads="server"), [3, 8])
    assert strategy.to_server_names([], []) == ([], [])
    assert strategy.arrays.keys() == {"body", "held/3/head.w", "held/8/head.w"}


def by_client(grid, method):
    """The states of a grid's clients by client id."""
    return {
        grid.contexts[node].node_config["partition-id"]: state
        for node, state in states(grid, method).items()
    }


def test_a_head_becomes_what_its_client_made_of_it():
    """Clients 3 and 5 of 3, 4, 5 move their heads by 1 and −2, the bodies by 2 and 4: mean 3."""
    strategy = started(FedRep(heads="server"), [3, 4, 5])
    arrays = answered(strategy, {3: (2.0, 1.0), 5: (4.0, -2.0)})
    assert arrays["body"] == pytest.approx([4, 4])
    heads = {client: arrays[f"held/{client}/head.w"].tolist() for client in (3, 4, 5)}
    assert heads == {3: [2, 3], 4: [1, 2], 5: [-1, 0]}
    sent = strategy.personalize(arrays, strategy.nodes)
    assert sent[Node(5, 55)].keys() == {"body", "head.w"}
    assert sent[Node(5, 55)]["head.w"].tolist() == [-1, 0]


def test_the_server_holds_what_clients_would_have_kept():
    """FedRep over three rounds of half the clients, both ways, to rounding."""
    changes = {"method": "fedrep", "rounds": 3, "fraction-train": 0.67, "fedrep.head-epochs": 1}
    kept, at_clients = federate(**changes)
    held, grid = federate(**changes, **{"fedrep.heads": "server"})
    here, there = from_record(held.arrays), from_record(kept.arrays)
    for name, array in there.items():
        np.testing.assert_allclose(here[name], array, atol=1e-5)
    own = by_client(at_clients, "fedrep")
    assert not states(grid, "fedrep") and len(own) == 3
    for client, state in own.items():
        for name, array in group(state, "personal").items():
            np.testing.assert_allclose(here[f"held/{client}/{name}"], array, atol=1e-5)
    numbers = [dict(run.evaluate_metrics_clientapp[3]) for run in (held, kept)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)


def test_a_saved_run_has_the_heads_of_its_clients(tmp_path):
    """FedRep cannot be evaluated again without them: the initial heads are near chance."""
    changes = {"method": "fedrep", "fedrep.heads": "server", "evaluate-every": 2}
    first, _ = federate(**changes, **{"output-dir": str(tmp_path)})
    again, _ = federate(**changes | {"rounds": 0, "from-dir": str(tmp_path)})
    accuracy = [first.evaluate_metrics_clientapp[2], again.evaluate_metrics_clientapp[0]]
    assert accuracy[0]["train-accuracy"] == accuracy[1]["train-accuracy"]


def private(**settings):
    known = {"dp_clip": 10.0, "dp_generator": "seeded", "num_clients": 4, "train_fraction": 1.0}
    return Privacy(dp="central", **known, **settings)


def test_a_private_head_takes_its_users_change_whatever_the_rounds_size():
    """Three of four users are expected and two came: the mean is over three, and so is what is
    added to a head: its user's whole change, +1 and −2, and hardly any noise."""
    privacy = private(dp_noise_multiplier=1e-9, fraction_train=0.75)
    strategy = FedRep(heads="server", privacy=privacy, fraction_train=0.75)
    arrays = answered(started(strategy, [0, 1, 2, 3]), {0: (3.0, 1.0), 2: (0.0, -2.0)})
    assert arrays["held/0/head.w"] == pytest.approx([2, 3], abs=1e-5)
    assert arrays["held/2/head.w"] == pytest.approx([-1, 0], abs=1e-5)


def test_noise_falls_on_heads_that_nobody_used():
    """z C = 0.5 · 10 = 5 on each of 1000 entries of a head whose user stayed away."""
    start = {"body": np.ones(1, np.float32), "head.w": np.zeros(1000, np.float32)}
    privacy = private(dp_noise_multiplier=0.5, fraction_train=0.75)
    strategy = FedRep(heads="server", privacy=privacy, fraction_train=0.75)
    arrays = answered(started(strategy, [0, 1, 2, 3], start), {0: (0, 0), 1: (0, 0)})
    for client in range(4):
        assert np.std(arrays[f"held/{client}/head.w"]) == pytest.approx(5, rel=0.1)


def test_a_head_under_the_central_adam_moves_after_its_users_round():
    """Adam's first step is server-lr along the sign; in the next round, without its user, the mean
    change is 0: m̂ = 0.9 · 0.1 g / 0.19, v̂ = 0.999 · 0.001 g² / 0.001999, so it moves on by
    lr · 0.473684 / √0.499750 = 0.670060 lr. The head of a user who never came stays."""
    start = {"body": np.ones(2, np.float32), "heads.0.w": np.zeros(2, np.float32)}
    options = {"assignment": "personal", "server_lr": 0.1}
    strategy = started(FedEmbed(heads="server", **options), [0, 1, 2], start)
    arrays = answered(strategy, {0: (0.0, 0.3), 1: (0.0, 0.0)})
    assert arrays["held/0/heads.0.w"] == pytest.approx([0.1, 0.1], abs=1e-5)
    arrays = answered(strategy, {1: (0.0, 0.0)})
    assert arrays["held/0/heads.0.w"] == pytest.approx([0.167006] * 2, abs=1e-5)
    assert arrays["held/1/heads.0.w"].tolist() == arrays["held/2/heads.0.w"].tolist() == [0, 0]


def test_pfedmes_server_holds_the_head_of_theta():
    """w is the same to the last bit wherever the heads live; a held head is that of the kept θ."""
    changes = TASTES | {"method": "pfedme", "rounds": 2}
    kept, at_clients = federate(**changes)
    held, grid = federate(**changes, **{"pfedme.heads": "server"})
    here, there = from_record(held.arrays), from_record(kept.arrays)
    assert not states(grid, "pfedme")
    for name, array in there.items():
        np.testing.assert_array_equal(here[name], array)
    for client, state in by_client(at_clients, "pfedme").items():
        np.testing.assert_allclose(
            here[f"held/{client}/own/head.weight"], state["theta/head.weight"], atol=1e-6
        )


def test_pfedme_is_scored_with_its_own_head_on_the_common_body():
    strategy = started(PFedMe(heads="server"), [0, 1])
    sent = strategy.personalize(strategy.arrays, strategy.nodes)[Node(1, 51)]
    assert sent.keys() == {"body", "head.w", "own/head.w"}
    seen = {}

    class Scored(PFedMeClient):
        def __init__(self):
            self.state = {}

        def load(self, arrays):
            seen.update(arrays)
            raise StopIteration

    with pytest.raises(StopIteration):
        Scored().score(sent | {"own/head.w": np.full(2, 7.0)}, {})
    assert {name: a.tolist() for name, a in seen.items()} == {"body": [1, 1], "head.w": [7, 7]}


@pytest.mark.parametrize("method", ["fedembed", "fedrep", "pfedme"])
def test_private_runs_hold_noisy_heads_of_all_users(method):
    """A user sees its own head alone; all 20 have one, those of users who never came as well."""
    private = {"dp": "central", "dp-noise-multiplier": 1.0, "dp-generator": "seeded"}
    own = {f"{method}.heads": "server", "fedembed.assignment": "personal", "rounds": 1}
    own |= {"fedembed.embedding-dim": 8, "fedembed.local-epochs": 1}
    result, _ = federate(**TASTES | own | private | {"method": method})
    held = {n: a for n, a in from_record(result.arrays).items() if n.startswith("held/")}
    heads = {name.split("/")[1]: a for name, a in held.items() if name.endswith("weight")}
    assert len(heads) == 20
    assert len({a.tobytes() for a in heads.values()}) == 20


def test_only_personal_heads_can_be_held():
    with pytest.raises(ValueError, match="unknown heads 'cloud'; known: client, server"):
        FedRep(heads="cloud")
    with pytest.raises(ValueError, match="assignment 'som'"):
        FedEmbed(heads="server", assignment="som")
    config = defaults() | TASTES | {"method": "fedembed", "fedembed.heads": "server"}
    with pytest.raises(ValueError, match="assignment 'prototype'"):
        run(None, config)


def test_pfedkms_map_goes_over_the_users_once_a_round_in_any_order():
    """One cluster; users change encoder and head by (1, 2) and (−3, 5). At the end of the run the
    rate is ¼: from (8, 8) the map comes to 9/16 · 8 + 3/16 of the first user's + 1/4 of the
    second's, whichever of them is first. Encoder and head move by the mean change (−1, 3.5)."""
    start = {"body": np.zeros(1, np.float32), "heads.0.w": np.zeros(1, np.float32)}
    one, two = np.array([1.0, 2.0]), np.array([-3.0, 5.0])
    either = [4.5 + 3 / 16 * a + b / 4 for a, b in ((one, two), (two, one))]
    found = set()
    for seed in range(12):
        strategy = PFedKM(sub_populations=1, seed=seed, som_rate=0.5, som_rate_end=0.25)
        arrays = strategy.initialize(start)
        strategy.now, strategy.num_rounds = Round(3), 3
        strategy.gradients = np.full((1, 2), 8.0, np.float32)
        strategy.descend = lambda arrays, mean: mean
        changes = [dict(zip(start, map(np.float32, c[:, None]), strict=True)) for c in (one, two)]
        mean = strategy.aggregate(arrays, [update(i, c) for i, c in enumerate(changes)])
        assert [mean[name].item() for name in ("body", "heads.0.w")] == [-1, 3.5]
        found |= {i for i, nodes in enumerate(either) if np.allclose(strategy.gradients[0], nodes)}
    assert found == {0, 1}
