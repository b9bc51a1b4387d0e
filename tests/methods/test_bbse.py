"""BBSE: the estimated distribution of labels, by hand."""

import numpy as np
import pytest
import torch
from clients_with_sources import Logits, novel_client
from small_runs import federate, share

from clients.methods._batchwise import HoldingOut
from clients.methods.bbse import BBSEClient
from strategies.maths.label_shift import conditional
from strategies.methods.bbse import BBSE
from strategies.methods.prior_em import PriorEM

Z = torch.tensor([[2.0, 0.0, 0.0]] * 2 + [[0.0, 1.0, 0.0]] * 5 + [[0.0, 0.0, 1.0]] * 3)


@pytest.mark.parametrize(
    ("k", "q"),
    [
        (np.eye(3), [0.2, 0.5, 0.3]),  # q = m
        # m = K q: 0.2 = 0.8 q_0 + 0.1 q_1, 0.5 = 0.2 q_0 + 0.9 q_1
        ([[0.8, 0.1, 0], [0.2, 0.9, 0], [0, 0, 1]], [0.13 / 0.7, 0.36 / 0.7, 0.3]),
        # q_0 would be −0.1 and q_1 0.8: projected, by (0.1 / 2 each) to (0, 0.75, 0.25)
        ([[1, 0.375, 0], [0, 0.625, 0], [0, 0, 1]], [0, 0.75, 0.25]),
    ],
)
def test_bbse_by_hand(k, q):
    """Two, five and three predictions: m = (0.2, 0.5, 0.3); z + log(3 q), ε = 0.001 mixed in."""
    client = novel_client(BBSEClient, Logits(3), Z, {"confusion": k})
    mixed = 0.999 * np.array(q) + 0.001 / 3
    assert client.predict(Z).numpy() == pytest.approx(Z.numpy() + np.log(3 * mixed), abs=1e-4)
    torch.testing.assert_close(client.personal_model(Z)(Z), client.predict(Z))


def test_soft_predictions_full_mixing_and_a_prior():
    """K = I: q is the mean prediction. Mixed fully, q is uniform, and π alone corrects."""
    client = novel_client(BBSEClient, Logits(3), Z, {"confusion": np.eye(3)}, predictions="soft")
    mean = 0.999 * Z.softmax(1).mean(0) + 0.001 / 3
    torch.testing.assert_close(client.log_q(Z).exp(), mean)
    source = {"confusion": np.eye(3), "prior": [0.5, 0.25, 0.25]}
    client = novel_client(BBSEClient, Logits(3), Z, source, mixing=1.0)
    assert torch.equal(client.predict(Z).argmax(1), Z.argmax(1))
    client.source_prior = "training"
    expected = Z + torch.tensor([2 / 3, 4 / 3, 4 / 3]).log()
    torch.testing.assert_close(client.predict(Z), expected)


def test_bbse_takes_the_training_prior_from_its_confusion_matrix():
    """It needs no label counts beside it."""
    result, _ = federate(method="bbse", rounds=1, **{"bbse.source-prior": "training"})
    assert "novel-accuracy" in result.evaluate_metrics_clientapp[1]


def test_a_class_that_no_sample_has_and_one_that_nobody_predicts():
    """Counts by predicted class and label: label 2 has no sample and counts as recognised; class 1
    is never predicted, so K is singular, and q is finite all the same."""
    k = conditional(np.array([[3.0, 2.0, 0.0], [-1.0, 0.0, 0.0], [1.0, 2.0, 0.0]]))
    assert k.tolist() == [[0.75, 0.5, 0], [0, 0, 0], [0.25, 0.5, 1]]
    client = novel_client(BBSEClient, Logits(3), Z, {"confusion": k})
    assert client.predict(Z).isfinite().all()
    assert client.predict(Z[:1]).isfinite().all()
    with pytest.raises(ValueError, match="no confusion: no training client"):
        novel_client(BBSEClient, Logits(3), Z).predict(Z)


def test_a_frozen_head_that_is_never_sent_is_refused():
    """The server counts the classes by its rows."""
    arrays = {"layers.0.weight": np.zeros((3, 4), np.float32)}
    assert PriorEM().initialize(arrays) == arrays
    for strategy in (PriorEM(source_prior="training"), BBSE()):
        with pytest.raises(ValueError, match="leave the head's weights unfrozen"):
            strategy.initialize(arrays)


def test_a_client_counts_its_held_out_samples():
    """Of ten samples the two at places 0 and 5 are held out: predicted 0 and 1, labeled 0 and 2."""
    y = torch.tensor([0, 1, 1, 1, 1, 2, 1, 1, 1, 1])
    client = BBSEClient(Logits(3), share(Z, y), held_out=0.2)
    assert len(client.share.train) == 8 and client.get_properties({})["num-examples"] == 8
    assert client.share.train.index.tolist() == [1, 2, 3, 4, 6, 7, 8, 9]
    counts = client.confusion(client.initial, {})[0]["confusion"]
    assert counts.tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 0]]
    client.predictions = "soft"
    counts = client.confusion(client.initial, {})[0]["confusion"]
    assert counts[:, 0] == pytest.approx(Z[0].softmax(0).numpy())
    assert counts[:, 2] == pytest.approx(Z[5].softmax(0).numpy())


def test_labels_in_an_order_that_holds_out_a_whole_class_are_refused():
    """Every fifth sample is held out. Of ten classes in turn these are all of 0 and 5. By chance
    all of the six samples of a class may be, and of three classes in turn none is lost."""

    def client(y, **settings):
        return HoldingOut(Logits(3), share(torch.rand(len(y), 3), y), **settings)

    in_turn = torch.arange(100) % 10
    shuffled = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    words = r"every training sample of class 0, 10 of 100, since .* shuffle the training samples"
    with pytest.raises(ValueError, match=words):
        client(in_turn, held_out=0.2)
    assert len(client(in_turn, held_out=0.25).held) == 25
    assert len(client(in_turn[shuffled], held_out=0.2).held) == 20
    assert len(client(torch.arange(60) % 10, held_out=0.2).held) == 12
    assert len(client(torch.arange(99) % 3, held_out=0.2).held) == 20


@pytest.mark.parametrize(("n", "fraction", "held"), [(1, 0.5, 1), (3, 0.9, 2), (4, 0.0, 4)])
def test_a_client_always_trains_on_something(n, fraction, held):
    client = HoldingOut(Logits(3), share(Z[:n], [0] * n), held_out=fraction)
    assert len(client.held) == held
    assert len(client.share.train) == (n - held or n)
