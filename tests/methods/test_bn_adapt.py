"""BN-adapt: statistics of the inputs at hand, by hand."""

import math

import pytest
import torch
from clients_with_sources import image_client, novel_client
from small_runs import SMALL
from torch import nn

import partitions
from clients.methods.bn_adapt import BNAdaptClient
from clients.methods.memo import MEMOClient
from fedapps.methods import METHODS


def test_statistics_by_hand():
    """Inputs 1, 3, 8: mean 4, unbiased variance 13; running 10 and 4. N = 6 and batches of 3 give
    ρ = ⅔: mean 8, variance 7. In batches of 2 ρ is ¾, also for the one left over, which has no
    variance and keeps 10 and 4."""
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2))
    model[0].running_mean += 10
    model[0].running_var += 3
    x = torch.tensor([[1.0], [3.0], [8.0]])
    client = novel_client(BNAdaptClient, model, x, prior_samples=6.0, test_batch_size=3)
    found = client.changes(x)
    assert found["0.running_mean"].item() == pytest.approx(8)
    assert found["0.running_var"].item() == pytest.approx(7)
    expected = (x - 8) / math.sqrt(7 + 1e-5)
    torch.testing.assert_close(client.predict(x), model[1](expected).detach())
    client.test_batch_size = 2
    logits = client.predict(x)
    torch.testing.assert_close(logits[2:], model[1]((x[2:] - 10) / math.sqrt(4 + 1e-5)).detach())
    first, last = (client.changes(b) for b in client.test_batches(x))
    assert first["0.running_mean"].item() == pytest.approx(0.75 * 10 + 0.25 * 2)
    assert first["0.running_var"].item() == pytest.approx(0.75 * 4 + 0.25 * 2)
    assert (last["0.running_mean"].item(), last["0.running_var"].item()) == (10, 4)
    client.test_batch_size = 4  # which three inputs count for: ρ is 6/10
    client.predict(x)
    short = client.personal_model(x)[0]
    assert (short.running_mean.item(), short.running_var.item()) == pytest.approx((7.6, 7.6))
    client.stream = {}
    client.update(x)
    served = client.personal_model(x)[0]
    assert (served.running_mean.item(), served.running_var.item()) == pytest.approx((8, 7))
    assert (model[0].running_mean.item(), model[0].running_var.item()) == (10, 4)


def test_a_second_layer_sees_what_the_adapted_first_one_gives():
    """N = 0: both layers normalise by the batch, as in training mode, but for the variance's n − 1;
    a large N is FedAvg."""
    client, x = image_client(BNAdaptClient, 12, prior_samples=0.0)
    changes = client.changes(x)
    model = client.model
    h = model.conv1(x)
    m = h.numel() / h.shape[1]
    torch.testing.assert_close(changes["norm1.running_mean"], h.mean((0, 2, 3)))
    h = (h - h.mean((0, 2, 3), keepdim=True)) / (
        h.var((0, 2, 3), keepdim=True) + model.norm1.eps
    ).sqrt()
    second = model.conv2(torch.relu(torch.max_pool2d(h, 2)))
    torch.testing.assert_close(changes["norm2.running_mean"], second.mean((0, 2, 3)))
    torch.testing.assert_close(changes["norm2.running_var"], second.var((0, 2, 3)))
    assert m > 500
    client.prior_samples = 1e6
    torch.testing.assert_close(client.predict(x), model(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("cls", [BNAdaptClient, MEMOClient])
def test_one_image_is_predicted(cls):
    client, x = image_client(cls, 1)
    assert client.predict(x).isfinite().all()


def test_layers_without_running_statistics_are_named():
    model = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"keeps none: 0; leave out track_running_stats=False"):
        BNAdaptClient.build(model, None)


@pytest.mark.parametrize("method", ["bn-adapt", "auto"])
def test_layers_that_hold_the_same_statistics_are_refused(method):
    first, second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    second.running_mean, second.running_var = first.running_mean, first.running_var
    model = nn.Sequential(first, second)
    model.head = nn.Linear(4, 3)
    kind = METHODS[method].client
    with pytest.raises(ValueError, match=f"{method} adapts .* '0' and '1' hold the same ones"):
        kind.build_network(model, partitions.task(SMALL))
