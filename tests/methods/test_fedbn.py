"""FedBN: a round by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_runs import federate, share, states
from torch import nn

from clients.methods.fedbn import FedBNClient


def test_fedbn_estimates_a_novel_clients_statistics_before_it_learns():
    """Labeled inputs 1 and 3, others 5 and 15: mean 6, variance (25 + 9 + 1 + 81)/4 = 29. One step
    on the labeled ones, of mean 2 and variance 2: 0.9·6 + 0.1·2 = 5.6 and 0.9·29 + 0.1·2 = 26.3.
    The labels of the others are never used."""
    x = torch.tensor([[1.0], [3.0], [5.0], [15.0]])
    for hidden in (0, 1):
        whole = share(x, [0, 1, hidden, 1])
        few, others = (replace(whole.train, index=torch.tensor(i)) for i in ([0, 1], [2, 3]))
        novel = replace(whole, train=few, everything=others, novel=True, shots=1)
        for steps, expected in ((0, (6, 29)), (1, (5.6, 26.3))):
            model = FedBNClient.build(nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2)), None)
            client = FedBNClient(model, novel, novel_steps=steps)
            client.score(client.initial, {})
            norm = model[0].own_norm
            found = norm.running_mean.item(), norm.running_var.item()
            assert found == pytest.approx(expected)
            assert norm.momentum == 0.1 and not model.training


def test_fedbn_keeps_normalisation_on_the_client():
    changes = {"method": "fedbn", "model": "convnet-bn", "num-clients": 4, "rounds": 1}
    result, grid = federate(**changes)
    assert not any("norm" in name for name in result.arrays)
    kept = states(grid, "fedbn")
    name = "personal/norm1.own_norm.running_mean"
    means = [state[name] for state in kept.values()]
    assert len(means) == 2 and not np.array_equal(*means)
    with pytest.raises(ValueError, match="MLP has none; models that have it: convnet-bn"):
        federate(method="fedbn")
