"""Auto's candidates that are methods, of the package or a user's, and a user's changes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from auto_clients import X, Y, network, rule_that_chooses, source_of
from flwr.app import Context, RecordDict
from small_runs import invoke, share

import partitions
from clients.core.client import Client
from clients.core.decision import choice
from clients.core.decision.changes import Changer, named_changes
from clients.core.label_shift import log_q_by_em
from clients.methods.auto import EM_STEPS, AutoClient
from clients.models.foreign import adopted
from clients.models.head import headed
from fedapps import InProcessGrid, client_app, server_app
from fedapps.building import Builder, check_chosen, corrects_alone, method_model
from fedapps.common import external_code
from fedapps.methods import METHODS, chosen_from, corrections
from fedapps.planning import check
from fedapps.settings.config import defaults, relevant, with_references
from fedapps.settings.unread import check_read
from fedapps.trainings import training_of

OWN = "custom_corrections"
INFO = partitions.task(defaults())  # of the digits


def auto_with(others, model, **settings):
    """A client of auto that also chooses from these clients of methods."""
    client = AutoClient(model, share(X, Y), held_out=0.75, **settings)
    client.method_clients = {name: METHODS[name].client(model, client.share) for name in others}
    return client


def served(client, others, place):
    """A novel client of the same network, with a rule by which the candidate at `place` wins."""
    rule = rule_that_chooses(client, place)
    arrays = dict(client.initial)
    arrays |= {f"source/{name}": a for name, a in source_of(client).items()}
    arrays |= {f"rule/{name}": a for name, a in rule.arrays().items()}
    model = network("convnet-bn" if client.has_statistics else "mlp-small")
    novel = AutoClient(model, replace(share(X[:25], [0] * 25), novel=True),
                       candidates=client.candidates)  # fmt: skip
    novel.method_clients = {name: METHODS[name].client(model, novel.share) for name in others}
    novel.receive(arrays, {})
    return novel


@pytest.mark.parametrize("model", ["convnet-bn", "mlp-small"])
@pytest.mark.parametrize("name", ["tent", "t3a", "shot", "memo"])
def test_a_method_among_the_candidates_predicts_as_alone(name, model):
    """Its logits and its served network are those of its own client, and FedAvg's network stays as
    it was received."""
    client = auto_with([name], network(model), candidates=f"bbse,{name}")
    novel = served(client, [name], 1)
    x = X[:25].square()
    alone = METHODS[name].client(network(model), novel.share)
    alone.receive(client.initial, {})
    expected = alone.predict(x)
    case, views = novel.case(x)
    torch.testing.assert_close(views[name], expected)
    assert [*views] == ["", *choice.views_of(novel.has_statistics, novel.names)]
    assert case.evidence[0].shape[1] == choice.num_features(novel.has_statistics, novel.names) - 5
    for key, tensor in novel.model.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), client.initial[key])
    z = novel.predict(x)
    if case.changed[1]:
        torch.testing.assert_close(z, expected)
        torch.testing.assert_close(novel.personal_model(x)(x), expected, rtol=1e-4, atol=1e-5)
        assert novel.choice.name == name and novel.adaptation_metrics[f"chosen-{name}"] == 1
    else:  # nothing changes, so nothing is won
        torch.testing.assert_close(z, Client.predict(novel, x))


def test_the_descriptors_of_a_method_are_those_of_a_correction_by_statistics():
    """log n; H(q) + (C − 1)/2n with q of EM on its predictions; the fall of the entropy."""
    client = auto_with(["tent"], network(), candidates="tent")
    novel = served(client, ["tent"], 0)
    x = X[:25]
    case, views = novel.case(x)
    prior = torch.from_numpy(np.log(novel.statistics().prior)).float()
    q = log_q_by_em(views["tent"].log_softmax(1), prior, EM_STEPS).exp().double().numpy()
    h = -(q * np.log(q)).sum() + 2 / 50
    p_base, p_tent = views[""].softmax(1), views["tent"].softmax(1)
    fall = -(p_base * p_base.log()).sum(1).mean() + (p_tent * p_tent.log()).sum(1).mean()
    expected = [np.log(25), h, float(fall), np.log(case.changed[0] + 0.01)]
    np.testing.assert_allclose(case.descriptors[0], expected, rtol=1e-4, atol=1e-5)


def own(*names):
    references = [f"{OWN}:{name}" for name in names]
    external_code.allow(*references)
    return references


def test_numbers_that_are_not_finite_change_nothing_and_another_shape_is_refused():
    infinite, short = own("INFINITE", "SHORT")
    client = auto_with([infinite], network(), candidates=infinite)
    novel = served(client, [infinite], 0)
    torch.testing.assert_close(novel.predict(X[:25]), Client.predict(novel, X[:25]))
    assert novel.choice.name == "none"
    base = Client.predict(novel, X)
    assert novel.predicted_by(infinite, X, base) is base
    client = auto_with([short], network(), candidates=short)
    client.load(client.initial)
    words = r"SHORT', which predicts .*\(40, 2\) for 40 inputs; it must be .*\(40, 3\)"
    with pytest.raises(ValueError, match=words):
        client.predicted_by(short, X, torch.zeros(40, 3))


def test_a_correction_that_changes_its_inputs_leaves_those_of_the_others_as_they_are():
    """Twice the same correction, the second on inputs that the first has inverted, would cancel."""
    (inverting,) = own("INVERTING")
    client = auto_with([inverting], network(), candidates=inverting)
    client.load(client.initial)
    x = X.clone()
    first = client.predicted_by(inverting, x, torch.zeros(40, 3))
    assert torch.equal(x, X)
    torch.testing.assert_close(client.predicted_by(inverting, x, torch.zeros(40, 3)), first)


def test_a_correction_that_leaves_the_network_changed_changes_nothing_else():
    """DOUBTING sets all weights to 0."""
    (doubting,) = own("DOUBTING")
    client = auto_with([doubting], network(), candidates=doubting)
    client.load(client.initial)
    base = Client.predict(client, X)
    wide = torch.zeros(len(X), 10)
    assert client.predicted_by(doubting, X, wide)[:, 0].eq(100).all()
    torch.testing.assert_close(Client.predict(client, X), base)


def test_clients_of_candidates_have_their_own_settings_and_the_common_ones():
    (doubting,) = own("DOUBTING")
    config = with_references(
        defaults() | {"method": "auto", "auto.candidates": f"tent,{doubting}", "num-clients": 6}, {}
    )
    config |= {"tent.adapt-steps": 3, f"{doubting}.doubt": 7.0, "lr": 0.07}
    client = Builder(config, "auto", INFO).client(partitions.federation(config).share(1), 1)
    tent, own_one = client.method_clients.values()
    assert (tent.adapt_steps, tent.lr, tent.client) == (3, 0.07, 1) and own_one.doubt == 7.0
    assert tent.model is client.model


def test_a_users_correction_is_one_candidate_of_a_run(tmp_path):
    """The sections of the own method and of TENT are read; the results have the word behind the
    colon."""
    (name,) = own("DOUBTING")
    words = ["num-clients=6", "rounds=1", "local-steps=3", "model=convnet-bn", "auto.alpha=0.5"]
    words += [f"auto.candidates=bbse,tent,{name}", f"{name}.doubt=7.0", "tent.adapt-steps=2"]
    done = invoke(
        "run", *words, "--engine", "in-process", "--output", tmp_path, "--methods", "auto"
    )
    assert "unknown" not in done.output
    (folder,) = tmp_path.glob("auto-seed*")
    summary = (folder / "summary.json").read_text()
    for role in ("train", "novel"):
        for word in ("none", "bbse", "tent", "DOUBTING"):
            assert f'"{role}-chosen-{word}"' in summary
    assert "errors.log" not in [file.name for file in folder.iterdir()]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            "tnet",
            r"names 'tnet' \(did you mean 'tent'\?\); known: bbse, mean-matching, bn0, bn16",
        ),
        ("bbse,", "names ''; known"),
        ("scaffold", "names 'scaffold', which does more than correct predictions"),
        ("bbse,auto", "names 'auto', which does more"),
        ("fedavg", "names 'fedavg', which does more"),
        ("TRAINS", "TRAINS', which does more than correct"),
        ("SERVED", "SERVED', which does more than correct"),
        ("WRAPS", "WRAPS', whose clients build another network around the model"),
    ],
)
def test_what_does_not_only_correct_is_refused(names, words):
    if names.isupper():
        (names,) = own(names)
    config = defaults() | {"method": "auto", "auto.candidates": names}
    with pytest.raises(ValueError, match=words):
        method_model("auto", config, INFO)


def test_a_candidate_that_cannot_take_the_inputs_is_to_be_left_out():
    words = r"memo needs images, .* the shape \(6,\); leave memo out of auto\.candidates"
    table = replace(INFO, shape=(6,))
    with pytest.raises(ValueError, match=words):
        check_chosen(network("convnet"), "auto", table, {"candidates": "bbse,memo"})


def test_apps_of_users_refuse_a_candidate_that_is_no_method():
    words = "names 'tnet' .did you mean 'tent'"
    with pytest.raises(ValueError, match=words):
        client_app("auto", model=network, data=lambda context: (X, Y), candidates="bbse,tnet")
    with pytest.raises(ValueError, match=words):
        server_app("auto", model=network, shape=(1, 8, 8), candidates="bbse,tnet", rounds=1)


def test_two_candidates_with_one_word_are_refused():
    with pytest.raises(ValueError, match="has 2 called 'tent'; rename the own one"):
        choice.candidates_of("tent,lab:tent", True)


def test_corrections_of_the_package_are_known_without_their_classes():
    assert corrections() == [name for name, entry in METHODS.items() if corrects_alone(entry)]
    assert chosen_from("auto", {"auto.candidates": "bbse, tent,bn16"}) == ("tent",)
    assert chosen_from("tent", defaults()) == chosen_from("a method that is gone", {}) == ()


def test_results_of_a_method_whose_code_is_not_allowed_are_read():
    config = defaults() | {"method": "nobody:ALLOWS", "nobody:ALLOWS.penalty": 1.0}
    assert relevant(config)["nobody:ALLOWS.penalty"] == 1.0


def test_the_settings_of_a_candidate_are_read_and_do_not_change_the_training():
    config = defaults() | {"method": "auto", "auto.candidates": "bbse,tent", "tent.adapt-steps": 3}
    assert relevant(config)["tent.adapt-steps"] == 3 and "t3a.supports" not in relevant(config)
    changes = {"tent.adapt-steps": 3}
    check_read(config, changes, ["auto"])
    with pytest.raises(ValueError, match="changes nothing here: tent does not run, but auto"):
        check_read(config | {"auto.candidates": "bbse"}, changes, ["auto"])
    alone = defaults() | {"method": "auto"}
    assert training_of(config) == training_of(alone)


def test_auto_is_left_out_of_a_run_with_few_clients_unless_it_is_named(tmp_path):
    """Three training clients certify no share of 0.05."""
    few = ("run", "num-clients=6", "rounds=1", "--dry-run", "--output", tmp_path)
    said = " ".join(invoke(*few).output.split())
    assert "auto is left out: auto.alpha is 0.05; 3 training clients certify no share" in said
    assert "fedavg-seed0" in said and "auto-seed0" not in said
    refused = invoke(*few, "--methods", "fedavg,auto", code=2)
    assert "auto.alpha is 0.05; 3 training clients" in refused.output


OWN_FAULTS = {
    "FAILING": r"FAILING', which fails on 20 inputs of client 0: KeyError: 'a key' \(.*\.py:\d+\)",
    "LISTING": r"LISTING', which predicts a list for 20 inputs; it must be a tensor of floats",
    "CLASSES": r"CLASSES', which predicts torch\.int64 of the shape \(20, 10\)",
    "SHORT": r"SHORT', which predicts .*\(20, 2\) for 20 inputs; it must be .*\(20, 10\)",
    "PAIRING": "PAIRING', which fails on 2 inputs of client 0: RuntimeError: shape",
    "CROWDED": "CROWDED', which fails on 100 inputs of client 0: RuntimeError: ",
    "INFINITE": "INFINITE', which predicts numbers that are not finite .* never be chosen",
    "cropped": r"cropped gives the shape \(20, 1, 8, 7\)",
    "listed": "listed gives a list; a change gives a tensor",
    "endless": "endless gives numbers that are not finite",
    "alone": r"alone', which fails on 20 inputs of client 0: TypeError: alone\(\) takes 1",
}


def config_with(name):
    """The digits with this correction, or this change, of the user's."""
    (reference,) = own(name)
    given = {"auto.candidates": f"bbse,{reference}"}
    if name.islower():
        given = {"auto.changes": f"blur,{reference}"}
    few = {"method": "auto", "num-clients": 4, "auto.alpha": 0.5, "partition": "iid"}
    return with_references(defaults() | few | given, {})


@pytest.mark.parametrize("name", OWN_FAULTS)
def test_a_users_code_that_fails_is_refused_before_the_first_round(name):
    """It was called only after all rounds. The clients that it failed on then had no part in the
    rule."""
    with pytest.raises(ValueError, match=OWN_FAULTS[name]):
        check(config_with(name))


@pytest.mark.parametrize("name", ["DOUBTING", "INVERTING", "fog"])
def test_a_users_code_that_works_is_not_refused(name):
    check(config_with(name))


class Squaring(torch.nn.Sequential):
    """A network of squares, which large inputs overflow."""

    def forward(self, x):
        return super().forward(x.square())


class Asking(InProcessGrid):
    """A grid that keeps the kinds of its messages."""

    def answer(self, messages, timeout):
        self.kinds = {message.metadata.message_type for message in messages}
        return super().answer(messages, timeout)


def test_the_nodes_of_a_users_app_say_what_fails_before_the_first_round():
    (name,) = own("bright")
    given = {"changes": f"column-shift,{name}", "held_out": 0.5}

    def data(context):
        x = torch.rand(60, 3, generator=torch.Generator().manual_seed(0))
        return x, x.argmax(1)

    def model():
        return Squaring(torch.nn.Linear(3, 3))

    client = client_app("auto", model=model, data=data, **given)
    server = server_app("auto", model=model, shape=(3,), rounds=1, alpha=0.5, **given)
    grid = Asking(client, {}, [{"partition-id": number} for number in range(2)])
    words = "bright', and for inputs that it has changed the network gives numbers that are not"
    with pytest.raises(RuntimeError, match=words):
        server(grid, Context(1, 0, {}, RecordDict(), {}))
    assert grid.kinds == {"query"}


# A user's changes


def test_a_users_change_sees_inputs_in_the_unit_range_and_leaves_them_alone():
    (name,) = own("fog")
    changes = named_changes(f"blur, {name}", 4)
    x = 4 * X - 1
    before = x.clone()
    changed = Changer(x)(changes[1], x, np.random.default_rng(0))
    low, high = float(x.min()), float(x.max())
    torch.testing.assert_close(changed, (x + high) / 2, rtol=1e-5, atol=1e-5)
    assert torch.equal(x, before) and low < float(changed.min())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cropped", r"cropped gives the shape \(40, 1, 8, 7\).*inputs' shape \(40, 1, 8, 8\)"),
        ("endless", "endless gives numbers that are not finite"),
    ],
)
def test_what_a_change_must_not_give(name, words):
    (reference,) = own(name)
    (change,) = named_changes(reference, 4)
    with pytest.raises(ValueError, match=words):
        change(X, np.random.default_rng(0))


def tokens_with(change):
    """A client of tokens below 9 that has this change of the user's."""
    tokens = torch.randint(0, 9, (40, 5), generator=torch.Generator().manual_seed(0))
    held = share(tokens, Y)
    whole = {name: replace(getattr(held, name), whole=True) for name in ("train", "everything")}
    held = replace(held, **whole)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(9, 4))
    model.add_module("head", torch.nn.Linear(4, 3))
    return AutoClient(model, held, held_out=0.75, changes=change, plays=20)


def test_a_users_change_of_tokens_gives_tokens():
    synonyms, halves, unknown = own("synonyms", "halves", "unknown")
    client = tokens_with(synonyms)
    client.check_own_code()
    client.source = source_of(client)
    before = client.held_out_samples()[0].clone()
    assert not all(case.unchanged for case in client.played())
    assert torch.equal(client.held_out_samples()[0], before)
    with pytest.raises(ValueError, match="halves gives decimals; a change of tokens gives tokens"):
        tokens_with(halves).check_own_code()
    with pytest.raises(ValueError, match=r"unknown', which fails on 20 inputs of client 0: "):
        tokens_with(unknown).check_own_code()


class Averaged(torch.nn.Module):
    """The mean of the embeddings of token ids."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(9, 4)
        self.head = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.embedding(x).mean(1))


def test_a_users_change_of_tokens_that_an_app_keeps_as_floats_gives_tokens():
    synonyms, halves = own("synonyms", "halves")
    tokens = torch.randint(0, 9, (40, 5), generator=torch.Generator().manual_seed(0)).float()
    network, _ = adopted(Averaged(), "averaged", (5,), 3)
    network = headed(network, "auto", (5,), 3)
    AutoClient(network, share(tokens, Y), held_out=0.5, changes=synonyms).check_own_code()
    client = AutoClient(network, share(tokens, Y), held_out=0.5, changes=halves)
    with pytest.raises(ValueError, match="halves gives decimals; a change of tokens gives tokens"):
        client.check_own_code()


def test_changes_that_are_none_or_fit_no_input_are_refused():
    (name,) = own("NO_FUNCTION")
    with pytest.raises(ValueError, match=r"NO_FUNCTION', which is 3; it must be a function"):
        named_changes(name, 4)
    config = defaults() | {"method": "auto", "auto.changes": "column-noise"}
    with pytest.raises(ValueError, match=r"none of these changes inputs of the shape \(1, 8, 8\)"):
        method_model("auto", config, INFO)
