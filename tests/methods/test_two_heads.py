"""FedTHE, FedTHE+ and BTFL: what the three have in common."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_runs import share
from two_head_clients import INFO, Plain, X, Y, two_heads

from clients.core.arrays import model_arrays
from clients.core.client import Client
from clients.methods._two_heads import SUMMARY, TwoHeads
from clients.methods.btfl import BTFLClient, levels
from clients.methods.fedthe import FedTHEClient
from clients.methods.fedthe_plus import FedTHEPlusClient
from clients.methods.memo import MEMOClient

ALL = (FedTHEClient, FedTHEPlusClient, BTFLClient)


def test_the_summary_is_of_the_received_body_in_evaluation_mode():
    """Features (1, 2) and (3, 6) have the mean (2, 4), whatever dropout and training do. BTFL:
    tanh(0.4) = 0.38 and tanh(0.6) = 0.54 are 0 and 1; a negative feature is 0."""
    x = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    client = FedTHEClient(FedTHEClient.build(Plain(), INFO), share(x, [0, 1]))
    sent, *_ = client.train(model_arrays(client.model), {})
    assert sent[SUMMARY].tolist() == [2, 4]
    x = torch.tensor([[0.4, 0.6], [0.6, 0.6], [-5.0, 0.6], [0.0, 0.0]])
    assert levels(x).tolist() == [[0, 1], [1, 1], [0, 1], [0, 0]]
    client = BTFLClient(BTFLClient.build(Plain(), INFO), share(x, [0, 1, 0, 1]))
    sent, *_ = client.train(model_arrays(client.model), {})
    assert sent[SUMMARY].tolist() == [[0.75, 0.25], [0.25, 0.75]]


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("name", ["mlp-small", "convnet-bn"])
def test_an_unseen_client_gets_the_global_model(cls, name):
    """Its logits are those of e = (1, 0); FedTHE+ gives those of MEMO at its settings. It keeps no
    head, and its network has no summary."""
    client, sent = two_heads(cls, name)
    novel = cls(client.model, replace(share(X, Y), novel=True), views=3) if (
        cls is FedTHEPlusClient
    ) else cls(client.model, replace(share(X, Y), novel=True))  # fmt: skip
    novel.receive(sent, {})
    assert novel.personal_head is None and not novel.state
    found, network = novel.predict(X), novel.personal_model(X)
    assert SUMMARY not in "".join(network.state_dict())
    body = client.network()
    with torch.no_grad():
        torch.testing.assert_close(found, network(X))
        heads = TwoHeads(client.network(), torch.randn(3, body.head.in_features))
        torch.testing.assert_close(body(X), heads(X, torch.tensor([1.0, 0.0])))
    if cls is not FedTHEPlusClient:
        assert torch.equal(found, body(X))
        return
    memo = MEMOClient(body, share(X, Y), views=3, adapt_lr=0.0005, adapt_steps=3)
    memo.receive({n: a for n, a in sent.items() if n != SUMMARY}, {})
    torch.testing.assert_close(found, memo.predict(X))
    novel.adapt_lr = 0.3
    assert not torch.allclose(novel.predict(X), body(X), atol=1e-3)


@pytest.mark.parametrize("cls", ALL)
def test_a_training_client_mixes_both_heads(cls):
    """Prediction twice is the same; without labels or after `load` the global model predicts."""
    client, sent = two_heads(cls)
    client.receive(sent, {})
    one, again = client.predict(X), client.predict(X)
    assert torch.equal(one, again) and not client.intermediate_logits
    with torch.no_grad():
        torch.testing.assert_close(deepcopy(client.personal_model(X))(X), one)
    Client.receive(client, sent, {})
    other = client.predict(X)
    assert not torch.allclose(one, other, atol=1e-3)
    client.share = share(X, torch.full_like(Y, -1))
    client.receive(sent, {})
    assert torch.equal(client.predict(X), other)


@pytest.mark.parametrize("kind", [FedTHEClient, FedTHEPlusClient, BTFLClient])
def test_what_weighs_the_heads_moves_and_is_saved_with_the_network(kind):
    """The means, and BTFL's shares, are buffers: the state of another client's network brings
    them."""
    models = []
    for shift in (0.0, 0.5):
        client, sent = two_heads(kind)
        client.receive(sent | {SUMMARY: sent[SUMMARY] + np.float32(shift)}, {})
        models.append(client.personal_model(X))
    one, other = models
    other.load_state_dict(one.state_dict())
    with torch.no_grad():
        assert torch.equal(other(X[:3]), one(X[:3]))
    places = {t.device.type for t in other.to("meta").state_dict().values()}
    assert places == {"meta"} and any("weigh" in name for name in other.state_dict())
