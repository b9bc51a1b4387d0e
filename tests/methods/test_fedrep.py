import numpy as np
import torch
from small_runs import share

from clients.methods.fedper import FedPerClient
from clients.methods.fedrep import FedRepClient
from clients.models import build_model

SHAPE = (1, 2, 2)


def make(cls, **settings):
    x, y = torch.randn(6, *SHAPE, generator=torch.manual_seed(0)), torch.arange(6) % 3
    return cls(build_model("mlp-small", SHAPE, 3, 0), share(x, y), **settings), x, y


def body(client):
    return {n: a for n, a in client.initial.items() if not n.startswith("head.")}


def test_without_head_epochs_it_is_fedpers_body_step():
    """One step from the same head: the body's gradient is the same, the head stays put."""
    settings = {"local_steps": 1, "batch_size": 4}
    ours, _, _ = make(FedRepClient, head_epochs=0, **settings)
    theirs, _, _ = make(FedPerClient, **settings)
    one, other = ours.train(body(ours), {})[0], theirs.train(body(theirs), {})[0]
    assert one.keys() == other.keys() == body(ours).keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name])
        assert not np.array_equal(array, ours.initial[name])
    kept = ours.state["personal/head.weight"]
    np.testing.assert_array_equal(kept, ours.initial["head.weight"])
    assert not np.array_equal(theirs.state["personal/head.weight"], kept)


def test_the_head_takes_its_epochs_on_the_body_that_was_sent():
    """Two full-batch epochs of softmax regression on fixed features h, by its closed gradient
    (σ(hWᵀ + b) − onehot)ᵀ h / n; then a body step that sees the new head."""
    client, x, y = make(FedRepClient, head_epochs=2, local_steps=1, batch_size=6, lr=0.5)
    with torch.no_grad():
        h = client.model.features(x)
        w, b = (p.detach().clone() for p in client.model.head.parameters())
        for _ in range(2):
            error = ((h @ w.T + b).softmax(1) - torch.eye(3)[y]) / 6
            w, b = w - 0.5 * error.T @ h, b - 0.5 * error.sum(0)
    reply, _, _ = client.train(body(client), {})
    np.testing.assert_allclose(client.state["personal/head.weight"], w, atol=1e-6)
    np.testing.assert_allclose(client.state["personal/head.bias"], b, atol=1e-6)
    reference = build_model("mlp-small", SHAPE, 3, 0)
    with torch.no_grad():
        reference.head.weight.copy_(w)
        reference.head.bias.copy_(b)
    torch.nn.functional.cross_entropy(reference(x), y).backward()
    first = reference.layers[0].weight
    np.testing.assert_allclose(
        reply["layers.0.weight"], (first - 0.5 * first.grad).detach(), atol=1e-6
    )
    assert all(p.requires_grad for p in client.model.parameters())
