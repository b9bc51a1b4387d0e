"""pFedHN's update against the gradient of its surrogate, computed by brute force."""

import numpy as np
import torch

from clients.arrays import to_record
from strategies.pfedhn import PFedHN
from strategies.replies import Node, Update

TEMPLATE = {"w": np.zeros((2, 3)), "b": np.zeros(2)}  # float64


def surrogate(strategy, nodes, trained):
    """Σ_i ½‖θ̃_i − h(v_i; φ)‖², the trained weights held fixed."""
    theta = strategy.generate(nodes)
    return sum(
        0.5 * (torch.from_numpy(reply[name]) - theta[name][i]).square().sum()
        for i, reply in enumerate(trained)
        for name in reply
    )


def test_the_update_descends_on_the_surrogate():
    """With plain SGD the step of φ is −lr·mean_i, that of v_i is −lr_v times its own gradient of
    the surrogate; here these gradients come from autograd on the surrogate itself."""
    torch.set_default_dtype(torch.float64)
    try:
        strategy = PFedHN(
            embedding_dim=3, hidden_dim=5, hidden_layers=2, server_lr=0.1, embedding_lr=0.2,
            server_momentum=0.0, server_weight_decay=0.0, clip_norm=0.0,
        )  # fmt: skip
        strategy._take(to_record(TEMPLATE))
        nodes = [Node(0, 10), Node(1, 11), Node(2, 12)]
        sent = strategy.broadcast({}, nodes)
        rng = np.random.default_rng(0)
        trained = [
            {n: a + rng.normal(size=a.shape) for n, a in sent[node].items()} for node in nodes
        ]
        phi = dict(strategy.hypernetwork.named_parameters())
        v = strategy.embeddings
        loss = surrogate(strategy, nodes, trained)
        gradients = torch.autograd.grad(loss, [*phi.values(), *v.values()])
        steps = [0.1 / 3] * len(phi) + [0.2] * len(v)
        expected = [
            (p - step * g).detach().clone()
            for p, g, step in zip([*phi.values(), *v.values()], gradients, steps, strict=True)
        ]
        strategy.aggregate({}, [Update(n, t, 1, {}) for n, t in zip(nodes, trained, strict=True)])
        for after, want in zip([*phi.values(), *v.values()], expected, strict=True):
            torch.testing.assert_close(after.detach(), want, rtol=1e-10, atol=1e-12)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_client_without_a_reply_leaves_its_embedding_alone():
    strategy = PFedHN(embedding_dim=2, hidden_dim=4, hidden_layers=1)
    strategy._take(to_record({n: a.astype(np.float32) for n, a in TEMPLATE.items()}))
    nodes = [Node(0, 10), Node(1, 11)]
    sent = strategy.broadcast({}, nodes)
    before = {client: v.detach().clone() for client, v in strategy.embeddings.items()}
    reply = {n: a + 1 for n, a in sent[nodes[1]].items()}
    strategy.aggregate({}, [Update(nodes[1], reply, 1, {})])
    assert torch.equal(strategy.embeddings[0], before[0])
    assert not torch.equal(strategy.embeddings[1], before[1])
