import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedapps
from clients.core.arrays import from_record, model_arrays
from clients.methods.fedmd import FedMDClient, HeteroTENTClient
from clients.methods.heterofedtta import HeteroFedTTAClient
from clients.models import build_model
from clients.models.adaptable import Adaptable
from fedapps.building import client_model, with_public
from fedapps.clientapp import app
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.serverapp import run
from fedapps.settings.config import defaults
from partitions import federation
from partitions.datasets.loading import Info
from partitions.shares import Samples, Share
from strategies.core.replies import Node, Update
from strategies.methods.fedmd import FedMD, HeteroFedTTA

INFO = Info("test", (3,), 4, "")
EACH = pytest.mark.parametrize("cls", [FedMDClient, HeteroTENTClient, HeteroFedTTAClient])


def share(n=12, public=10, novel=False, seed=0):
    """n samples to train on and five to validate, none of them public."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n + 5 + public, 3, generator=generator)
    y = torch.randint(4, (n + 5 + public,), generator=generator)
    rows = torch.arange(n + 5 + public)
    train, held, every, common = (
        Samples(x, y, part, scale=1.0)
        for part in (rows[:n], rows[n : n + 5], rows[: n + 5], rows[n + 5 :])
    )
    return Share(train, held, None, every, novel, public=common if public else None)


def client(cls=FedMDClient, model="mlp-small", **options):
    data = {key: options.pop(key) for key in ("n", "public", "novel") if key in options}
    net = cls.build_network(build_model(model, (3,), 4, seed=0), INFO)
    return cls(net, share(**data), local_steps=2, batch_size=4, **options)


@pytest.mark.parametrize("direction", ["student-teacher", "teacher-student"])
@pytest.mark.parametrize("weight", [0.0, 0.8])
def test_equation_14_by_hand(weight, direction):
    """f(x) = w x at x = 1, w = (ln 3, 0), g(z) = z₁ − z₂, η_inner = ½ ln 3: p = (¾, ¼) and
    ψ̃ = (½ ln 3, ½ ln 3), p̃ = (½, ½). Teachers q = (½, ½) and q̃ = (¾, ¼):

    KL(p̃‖q̃) = ½ ln ⅔ + ½ ln 2 and KL(p‖q) = ¾ ln 1.5 + ¼ ln ½; the reverse ones change places."""
    base, adaptation = nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        base.weight.copy_(torch.tensor([[math.log(3)], [0.0]]))
        adaptation.weight.copy_(torch.tensor([[1.0, -1.0]]))
    student = HeteroFedTTAClient(
        Adaptable(base, adaptation),
        share(),
        inner_lr=math.log(3) / 2,
        batch_size=1,
        base_weight=weight,
        kl_direction=direction,
    )
    teacher = {
        "logits/base": torch.tensor([[0.0, 0.0]]),
        "logits/personalized": torch.tensor([[math.log(3), 0.0]]),
    }
    personalized = 0.5 * math.log(2 / 3) + 0.5 * math.log(2)
    plain = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    if direction == "teacher-student":
        personalized, plain = plain, personalized
    loss = student.distillation(torch.ones(1, 1), teacher).item()
    assert loss == pytest.approx(personalized + weight * plain, rel=1e-5)


def test_digest_losses_by_hand():
    """Zero weights, logits 0: |0 − 2| over two equal entries is 2; KL((½,½)‖(¾,¼)) as above."""
    model = nn.Linear(1, 2, bias=False)
    nn.init.zeros_(model.weight)
    one, data = torch.ones(1, 1), share()
    mae = FedMDClient(model, data).distillation(one, {"logits": torch.tensor([[2.0, -2.0]])})
    assert mae.item() == 2.0
    kl = FedMDClient(model, data, digest_loss="kl")
    teacher = {"logits": torch.tensor([[3.0, 1.0]]).log()}
    got = kl.distillation(one, teacher).item()
    assert got == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2))
    reverse = FedMDClient(model, data, digest_loss="kl", kl_direction="teacher-student")
    got = reverse.distillation(one, teacher).item()
    assert got == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))


@pytest.mark.parametrize("float16", [False, True])
def test_a_round_returns_logits_alone_and_keeps_the_model(float16):
    one = client(float16=float16)
    reply, n, metrics = one.train({}, {"server-round": 1})
    assert n == 12 and metrics.keys() == {"loss"}
    assert reply.keys() == {"logits"} and reply["logits"].shape == (10, 4)
    assert reply["logits"].dtype == (np.float16 if float16 else np.float32)
    kept = {name.removeprefix("personal/") for name in one.state}
    assert kept == set(one.initial)
    again, _, metrics = one.train(reply, {"server-round": 2})
    assert metrics.keys() == {"loss", "digest-loss"}
    assert not np.array_equal(again["logits"], reply["logits"])


def test_a_round_digests_then_revisits_then_communicates():
    """By their own numbers of passes. Of those who are scored the novel ones digest."""
    for novel in (False, True):
        one, done = client(digest_epochs=2, novel_digest_epochs=7, novel=novel), []
        one.digest = lambda arrays, config, epochs, done=done: done.append(epochs) or 0.0
        one.fit_locally = lambda config, done=done: done.append("revisit") or 0.0
        one.communicate = lambda done=done: done.append("communicate") or {}
        one.train({"logits": np.zeros((10, 4), np.float32)}, {})
        assert done == [2, "revisit", "communicate"]
        one.receive({"logits": np.zeros((10, 4), np.float32)}, {})
        one.receive({}, {})
        assert done[3:] == [7] * novel


@pytest.mark.parametrize(("batch", "epochs"), [(3, 250), (10, 1000), (0, 334)])
def test_a_novel_client_takes_a_thousand_steps_on_a_small_public_set(batch, epochs):
    """Ten public samples: an epoch is four mini-batches of three, one of all, or three of four."""
    assert client(public_batch_size=batch).epochs_of_novel_client() == epochs


def test_a_novel_client_takes_twenty_epochs_of_a_large_public_set():
    """A hundred mini-batches of one."""
    assert client(public=100, public_batch_size=1).epochs_of_novel_client() == 20


def test_every_public_sample_is_fitted_to_its_own_row_of_the_consensus():
    """Two passes over ten samples in batches of 3, 3, 3 and 1, in an order of each round's own."""
    one = client(public_batch_size=3)
    teacher, got, orders = np.arange(40, dtype=np.float32).reshape(10, 4), [], []
    one.distillation = lambda x, teacher: got.append((x, teacher["logits"])) or one.model(x).sum()
    for round_ in (1, 2, 1):
        got.clear()
        one.digest({"logits": teacher}, {"server-round": round_}, 2)
        assert [len(x) for x, _ in got] == [3, 3, 3, 1] * 2
        rows = [int(z[0]) // 4 for _, batch in got for z in batch]
        assert sorted(rows) == sorted([*range(10)] * 2)
        assert torch.equal(torch.cat([x for x, _ in got]), one.public[rows])
        orders.append(rows)
    assert orders[0] == orders[2] != orders[1] and orders[0][:10] != orders[0][10:]


def test_what_is_communicated_is_what_is_kept_and_draws_nothing():
    """Logits in evaluation mode of the very weights that stay in the state."""
    one = client(model="feature-mlp")  # with dropout
    reply, _, _ = one.train({}, {"server-round": 1})
    later = client(model="feature-mlp")
    later.state = one.state
    later.receive({}, {})
    expected = later.predict(later.public).numpy()
    assert reply["logits"] == pytest.approx(expected, rel=1e-5, abs=1e-6)


@EACH
def test_a_novel_client_digests_when_scored_and_keeps_nothing(cls):
    consensus, _, _ = client(cls).train({}, {"server-round": 1})
    novel = client(cls, novel=True, novel_digest_epochs=3)
    got = novel.score(consensus, {"server-round": 1})
    assert novel.state == {}
    assert novel.score(consensus, {"server-round": 1}) == got
    assert novel.score({}, {"server-round": 1}) != got


@pytest.mark.parametrize("adapt_on", ["public", "public-set", "own"])
def test_public_logits_of_both_models(adapt_on):
    """ "own": f(D_p; ψ̃) with ψ̃ of the training inputs; "public": each batch adapts for itself;
    "public-set": ψ̃ by the mean ‖g‖ over batches of 3, 3, 3 and 1 of D_p's ten samples."""
    settings = {"public_batch_size": 3, "inner_loss": "batches", "model": "feature-mlp"}
    one = client(HeteroFedTTAClient, adapt_on=adapt_on, **settings)
    one.load({})
    one.model.train()  # its dropout is off all the same
    got = one.communicate()
    public = one.public
    torch.testing.assert_close(got["logits/base"], one.base(public).detach())
    if adapt_on == "public":
        expected = torch.cat([one.adapt(x)[1] for x in public.split(3)]).detach()
    else:
        batches = public.split(3) if adapt_on == "public-set" else one.share.train[:][0].split(4)
        ell = sum(one.adaptation(one.base(x)).square().sum().sqrt() for x in batches) / len(batches)
        steps = torch.autograd.grad(ell, list(one.base.parameters()))
        with torch.no_grad():
            for p, step in zip(one.base.parameters(), steps, strict=True):
                p.sub_(one.inner_lr * step)
        expected = one.base(public).detach()
    torch.testing.assert_close(got["logits/personalized"], expected)


def test_a_step_on_the_whole_public_set_is_as_long_as_the_digests():
    """√(B/n)‖g‖ has the client's B = 4 in both, whatever the batches of public samples."""
    settings = {"inner_loss": "whole", "model": "feature-mlp", "adapt_on": "public-set"}
    found = []
    for size in (1, 9):
        one = client(HeteroFedTTAClient, public_batch_size=size, **settings)
        one.load({})
        found.append(one.communicate()["logits/personalized"])
    torch.testing.assert_close(*found)


def test_heterogeneous_tent_tells_the_logits_of_the_model_adapted_to_the_public_set():
    """One step of lr 0.1 on the mean entropy of D_p, or none."""
    plain = client(HeteroTENTClient, adapt_steps=1, lr=0.1)
    one = client(HeteroTENTClient, adapt_steps=1, lr=0.1, communicate_adapted=True)
    got, adapted = (c.load({}) or c.communicate()["logits"] for c in (plain, one))
    torch.testing.assert_close(got, one.model(one.public).detach())
    log_p = one.model(one.public).log_softmax(1)
    entropy = -(log_p.exp() * log_p).sum() / 10
    steps = torch.autograd.grad(entropy, list(one.model.parameters()))
    with torch.no_grad():
        for p, step in zip(one.model.parameters(), steps, strict=True):
            p.sub_(0.1 * step)
    torch.testing.assert_close(adapted, one.model(one.public).detach())


def test_heterogeneous_tent_clips_what_it_trains_on():
    """With lr 1 and two steps whose gradients are clipped at 0.01 no weights move by more than
    0.02 in norm; unclipped they do."""
    moved = []
    for clip in (0.01, 0.0):
        one = client(HeteroTENTClient, lr=1.0, clip_norm=clip)
        one.load({})
        one.fit_locally({})
        after = {n: p.detach().numpy() for n, p in one.model.named_parameters()}
        moved.append(math.sqrt(sum(((after[n] - one.initial[n]) ** 2).sum() for n in after)))
    assert moved[0] <= 0.02 * 1.001 < moved[1]


def test_frozen_layers_are_not_drawn_anew():
    one = client(initialization="own", client=1)
    head = one.model.head.requires_grad_(False)
    one.resume({})
    now = model_arrays(one.model)
    assert np.array_equal(now["head.weight"], one.initial["head.weight"])
    others = [n for n in now if n.endswith("weight") and not n.startswith("head.")]
    assert not head.weight.requires_grad and others
    assert not any(np.array_equal(now[name], one.initial[name]) for name in others)


def test_an_initialization_of_its_own():
    """Of each client; kept by one that trains, and drawn anew by a novel one in every round."""

    def start(**options):
        one = client(initialization="own", **options)
        one.resume({"server-round": 3})
        return one.model.layers[0].weight.detach().clone()

    shared, own, other = client().model.layers[0].weight, start(client=1), start(client=2)
    assert not torch.equal(own, shared) and not torch.equal(own, other)
    assert torch.equal(own, start(client=1))
    trained = client(initialization="own", client=1)
    trained.train({}, {"server-round": 3})
    kept = trained.model.layers[0].weight.detach().clone()
    trained.resume({"server-round": 4})
    assert torch.equal(trained.model.layers[0].weight, kept)
    novel = client(initialization="own", novel=True)
    draws = [
        (novel.resume({"server-round": r}), novel.model.layers[0].weight.clone())[1] for r in (1, 2)
    ]
    assert not torch.equal(*draws)
    novel.receive({}, {"server-round": 1})
    assert torch.equal(novel.model.layers[0].weight, draws[0])


@EACH
def test_training_clients_validate_a_novel_clients_model_too(cls):
    """Both on the same samples: that of a client with a state, and that of one without."""
    trained = client(cls, client=4, novel_digest_epochs=20)
    novel = client(cls, client=4, novel=True, novel_digest_epochs=20)
    consensus, _, _ = trained.train({}, {"server-round": 1})
    config = {"server-round": 2, "select": "loss"}
    novel.share = replace(novel.share, everything=trained.share.validation)
    own, _, both = trained.score(consensus, config)
    other, _, alone = novel.score(consensus, config)
    assert both["global-loss"] == other != pytest.approx(own, rel=1e-2)
    assert both["global-accuracy"] == alone["accuracy"]


def test_adaptation_networks_by_size():
    """Table 3: 32, 64 and 128 units for small, medium and big, whatever the kind of network."""
    for kind in ("convnet", "mlp", "lenet"):
        for name, width in ((f"{kind}-small", 32), (kind, 64), (f"{kind}-big", 128)):
            net = HeteroFedTTAClient.build_network(build_model(name, (1, 16, 16), 10, 0), INFO)
            assert net.adaptation[0].out_features == width
    other = HeteroFedTTAClient.build_network(build_model("softmax", (1, 16, 16), 10, 0), INFO)
    assert other.adaptation[0].out_features == 32


def nodes(*shapes):
    got = [{"public-samples": m, "classes": c} for m, c in shapes]
    return [Node(i, 50 + i, properties=p) for i, p in enumerate(got)]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_consensus_is_the_mean_of_the_logits(dtype):
    """(1 + 4) / 2 and (2 − 2) / 2, whatever the sample counts are."""
    strategy = FedMD(float16=dtype is np.float16)
    replies = [
        Update(Node(i, 50 + i), {"logits": np.array([z], dtype)}, n, {})
        for i, (z, n) in enumerate([([1, 2], 9), ([4, -2], 1)])
    ]
    consensus = strategy.aggregate({}, replies)["logits"]
    assert consensus.tolist() == [[2.5, 0.0]] and consensus.dtype == dtype


def test_logits_must_have_the_shape_that_most_clients_reported():
    strategy = HeteroFedTTA(float16=True)
    strategy.nodes = nodes((5, 3), (7, 3), (5, 3))
    expected = strategy.expected({})
    assert {name: (a.shape, a.dtype) for name, a in expected.items()} == {
        "logits/base": ((5, 3), np.float16),
        "logits/personalized": ((5, 3), np.float16),
    }
    strategy.nodes = [Node(1, 51)]
    with pytest.raises(RuntimeError, match="public logits"):
        strategy.expected({})


class Watched(InProcessGrid):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.names: set[str] = set()

    def _deliver(self, message):
        reply = super()._deliver(message)
        for one in (message, reply):
            for record in one.content.array_records.values() if one.has_content() else ():
                self.names |= from_record(record).keys()
        return reply


def test_architectures_mix_and_only_logits_travel():
    """Small, medium and big in one federation; node 0 gives its own choice."""
    config = defaults() | {"method": "heterofedtta", "num-clients": 6, "rounds": 2}
    config |= {"local-steps": 1, "client-models": "small,medium,big", "evaluate-every": 2}
    config |= {"heterofedtta.novel-digest-epochs": 1}
    configs = [{"partition-id": i, "num-partitions": 6} for i in range(6)]
    configs[0]["model"] = "convnet-small"
    grid = Watched(app, config, configs)
    result = run(grid, config, "in-process")
    assert grid.names == {"logits/base", "logits/personalized"}
    public = len(federation(with_public(config, "heterofedtta")).public)
    assert {a.numpy().shape for a in result.arrays.values()} == {(public, 10)}
    sizes = {
        sum(a.numpy().size for a in record.values())
        for context in grid.contexts.values()
        for record in context.state.array_records.values()
    }
    assert len(sizes) >= 2


def test_models_are_dealt_by_client_and_need_a_personal_model():
    config = defaults() | {"client-models": "small, medium, lenet", "model": "convnet"}
    dealt = [client_model(config, "fedmd", i) for i in range(4)]
    assert dealt == ["convnet-small", "convnet", "lenet", "convnet-small"]
    assert client_model(config, "fedmd", 0, "big") == "convnet-big"
    assert client_model(defaults(), "fedavg", 3) == "mlp"
    with pytest.raises(ValueError, match=r"'fedavg'.*fedmd"):
        client_model(config, "fedavg", 0)


def test_the_server_averages_each_set_and_holds_nothing_else():
    """Base logits 1 and 3, personalized 5 and 11; novel clients do not say what is expected."""
    names = HeteroFedTTA.sets
    replies = [
        Update(Node(i, 50 + i), dict(zip(names, map(np.float32, z), strict=True)), 1 + i, {})
        for i, z in enumerate((([1], [5]), ([3], [11])))
    ]
    after = HeteroFedTTA().aggregate({}, replies)
    assert {name: a.tolist() for name, a in after.items()} == {names[0]: [2], names[1]: [8]}
    assert FedMD().initialize({"w": np.zeros(1), "logits": np.ones(1)}).keys() == {"logits"}
    strategy = FedMD()
    strategy.nodes = [replace(n, novel=i > 0) for i, n in enumerate(nodes((5, 3), (7, 3), (7, 3)))]
    assert strategy.expected({})["logits"].shape == (5, 3)


def test_public_samples_that_a_client_cannot_use_are_named():
    """Public rows of the share have three columns, as its own."""
    usable = client()
    usable.public = torch.zeros(4, 5)
    with pytest.raises(ValueError, match=r"public samples of the shape \(5,\); .* shape \(3,\)"):
        usable.get_properties({})
    usable.public = torch.full((4, 3), torch.nan)
    with pytest.raises(ValueError, match="public samples hold NaN or infinity"):
        usable.get_properties({})
    with pytest.raises(ValueError, match="public is a Tensor; give a function"):
        fedapps.client_app("fedmd", model=nn.Linear, data=share, public=torch.zeros(4, 3))
