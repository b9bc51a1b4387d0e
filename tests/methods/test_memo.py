"""MEMO: marginal entropy over views, by hand."""

import math
from dataclasses import replace

import pytest
import torch
from clients_with_sources import Logits, image_client
from torch import nn

from clients.methods.memo import MEMOClient, MEMONetwork, marginal_entropy, mirrored
from clients.models import build_model
from partitions.datasets.loading import described


def test_marginal_entropy_by_hand():
    """Views (¾, ¼) and (¼, ¾) have the mean (½, ½), of entropy ln 2; equal ones their own. A class
    of probability 0 counts 0."""
    z = torch.tensor([[math.log(3), 0.0], [0.0, math.log(3)]])
    assert float(marginal_entropy(z)) == pytest.approx(math.log(2))
    own = math.log(4) - 0.75 * math.log(3)
    assert float(marginal_entropy(z[[0, 0]])) == pytest.approx(own)
    assert float(marginal_entropy(torch.tensor([[0.0, -math.inf]]))) == 0


@pytest.mark.parametrize("name", ["mlp-small", "convnet-bn"])
def test_each_image_adapts_the_network_for_itself(name):
    """vmap takes the first network, not the second. Without shifts all views are the image: one
    step on H(p) by hand for each image alone, from the network as it was sent."""
    client, x = image_client(MEMOClient, 3, name, adapt_lr=0.3, crop_share=0.0, views=2)
    network, rows = client.personal_model(x).network, []
    before = {n: t.clone() for n, t in client.model.state_dict().items()}
    for image in x:
        copy = build_model(name, (1, 8, 8), 3, 0).eval()
        log_p = copy(image[None]).log_softmax(1)
        slopes = torch.autograd.grad(-(log_p.exp() * log_p).sum(), list(copy.parameters()))
        with torch.no_grad():
            for weight, slope in zip(copy.parameters(), slopes, strict=True):
                weight.sub_(0.3 * slope)
            rows.append(copy(image[None])[0])
    torch.testing.assert_close(client.predict(x), torch.stack(rows), rtol=1e-4, atol=1e-5)
    client.pass_megabytes = 0.01  # one image at once
    torch.testing.assert_close(client.predict(x), torch.stack(rows), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(torch.stack(rows), network(x), atol=1e-3)
    assert all(torch.equal(t, before[n]) for n, t in client.model.state_dict().items())


def test_no_rate_or_step_is_fedavg_and_a_served_network_adapts_as_the_client_did():
    client, x = image_client(MEMOClient, 4, adapt_lr=0.0)
    torch.testing.assert_close(client.predict(x), client.model(x))
    assert torch.equal(client.intermediate_logits["base"], client.model(x))
    client.adapt_lr, client.adapt_steps = 0.5, 0
    torch.testing.assert_close(client.predict(x), client.model(x))
    client.adapt_steps = 1
    with torch.no_grad():
        assert torch.equal(client.predict(x), client.personal_model(x)(x))
    assert not torch.allclose(client.predict(x), client.model(x), atol=1e-3)


def test_views_are_shifted_and_mirrored_at_the_border():
    """One row 0 … 7, a margin of 1: shifts by −1, 0 and 1 repeat the pixel at the border. With
    flips half of the views run backwards. Views of an image differ from those of the next."""
    assert mirrored(torch.tensor([-2, -1, 0, 3, 4, 5]), 4).tolist() == [1, 0, 0, 3, 3, 2]
    x = torch.arange(8.0).expand(2, 2, 1, 8) + torch.tensor([0.0, 100.0])[None, :, None, None]
    settings = {"views": 50, "crop_share": 0.125, "flips": False}
    views = MEMONetwork(nn.Identity(), 3, settings).views(x)
    assert views.shape == (2, 50, 2, 1, 8)
    assert torch.equal(views[:, :, 1], views[:, :, 0] + 100)
    found = {tuple(v.int().tolist()) for v in views[:, :, 0, 0].flatten(0, 1)}
    shifted = {(0, 0, 1, 2, 3, 4, 5, 6), (0, 1, 2, 3, 4, 5, 6, 7), (1, 2, 3, 4, 5, 6, 7, 7)}
    assert found == shifted
    assert not torch.equal(views[0], views[1])
    flipped = MEMONetwork(nn.Identity(), 3, settings | {"flips": True}).views(x)
    found = {tuple(v.int().tolist()) for v in flipped[:, :, 0, 0].flatten(0, 1)}
    assert found == shifted | {v[::-1] for v in shifted}


def test_memo_refuses_what_is_no_image():
    info = replace(described({"dataset": "digits", "data-dir": ""}), shape=(64,))
    with pytest.raises(ValueError, match=r"memo needs images.*\(64,\)"):
        MEMOClient.build(Logits(), info)


def test_a_network_that_takes_no_single_image_is_refused_before_the_first_round():
    """It failed at the first evaluation of each client."""
    norm = nn.BatchNorm1d(8, track_running_stats=False)
    info = described({"dataset": "digits", "data-dir": ""})
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), norm, nn.Linear(8, 3))
    with pytest.raises(ValueError, match=r"and the network takes no single one; .*: Value"):
        MEMOClient.build(network, info)
    tracked = nn.Sequential(*network[:2], nn.BatchNorm1d(8), network[3])
    assert MEMOClient.build(tracked, info).training


class Counting(nn.Linear):
    """A pass changes a buffer in evaluation mode, which no function to differentiate may."""

    def __init__(self):
        super().__init__(64, 3)
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x):
        h = super().forward(x.flatten(1))
        self.total.add_(h.sum(0))
        return h


def test_a_network_that_cannot_adapt_is_refused_before_the_first_round():
    """It failed at the first evaluation of each client. The trial changes nothing."""
    info = described({"dataset": "digits", "data-dir": ""})
    network = Counting()
    with pytest.raises(ValueError, match=r"by torch\.func\.grad, and the network does not"):
        MEMOClient.build(network, info)
    taken = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    before = taken[1].weight.clone()
    assert MEMOClient.build(taken, info) is taken
    assert torch.equal(taken[1].weight, before) and taken[1].weight.grad is None
