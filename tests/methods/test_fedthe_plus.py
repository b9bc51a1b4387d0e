"""FedTHE+: adapting to each input."""

import torch
from torch import nn
from two_head_clients import X, two_heads, view_settings

from clients.methods.fedthe_plus import FedTHEPlusClient
from clients.methods.memo import MEMONetwork, marginal_entropy


def test_fedthe_plus_adapts_all_of_the_network_to_each_input():
    """Two steps by hand for each image alone, each on further views, at its e."""
    client, sent = two_heads(FedTHEPlusClient, adapt_lr=0.2, adapt_steps=2)
    client.receive(sent, {})
    found, heads, rows = client.predict(X[:4]), client.two_heads(), []
    e = client.weigh(*heads.outputs_of(X[:4], 64))
    views = MEMONetwork(nn.Identity(), client.views_seed, vars(client) | view_settings()).views(
        X[:4], 2
    )
    for image, mixture, some in zip(X[:4], e, views, strict=True):
        copy = client.two_heads()
        for step in (0, 1):
            loss = marginal_entropy(copy(some[3 * step : 3 * step + 3], mixture))
            slopes = torch.autograd.grad(loss, list(copy.parameters()))
            with torch.no_grad():
                for weight, slope in zip(copy.parameters(), slopes, strict=True):
                    weight.sub_(0.2 * slope)
        rows.append(copy(image[None], mixture)[0].detach())
    torch.testing.assert_close(found, torch.stack(rows), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, heads(X[:4], e), atol=1e-3)
    client.adapt_lr = 0.0
    torch.testing.assert_close(client.predict(X[:4]), heads(X[:4], e))
