"""Ditto client (Li, Hu, Beirami and Smith, ICML 2021, Algorithm 1): a personal model beside w.

v_i ← v_i − η (∇F_i(v_i) + λ (v_i − w)), where w is the server's model of the round. Departs from
the paper: both models take the common local steps, on different mini-batches; v_i starts from the
first w that the client receives; the server's mean is weighted by sample counts."""

from clients.core.arrays import Arrays, group, model_arrays, prefixed
from clients.core.client import Client, Config, Metrics
from clients.core.protocol import StateUse
from fedapps.common.settings import NONNEGATIVE, setting


class DittoClient(Client):
    """`penalty` is λ. v_i is stored as ``own/…``; novel clients are scored with w."""

    also_scores_global_model = True
    needs_state = StateUse.PREDICTIONS

    penalty = setting(
        0.1, "λ, weight of the distance between personal and global model", NONNEGATIVE
    )

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Steps of v_i towards w, then FedAvg's steps from w."""
        self.load(arrays)
        self.tune(config)
        self.state |= prefixed("own", model_arrays(self.model, self.frozen))
        return super().train(arrays, config)

    def tune(self, config: Config) -> None:
        """Steps of v_i near w, the model's present weights; also for a novel client's few labels.

        The penalty's gradient is λ v_i − λ w. Weight decay adds λ v_i, the drift adds −λ w."""
        decay = self.weight_decay + self.penalty
        drift = [-self.penalty * w.detach() for w in self.model.parameters()]
        self.load(group(self.state, "own") or model_arrays(self.model))
        rows = self.rows(config, "own")
        self.fit_locally(config, rows=rows, weight_decay=decay, drift=drift)
        self.model.eval()

    def receive(self, arrays: Arrays, config: Config) -> None:
        """Load v_i; before any training load w."""
        super().receive(group(self.state, "own") or arrays, config)
