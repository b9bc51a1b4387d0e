"""Baselines for clients without labels (Amosy et al., section 6.2): other clients' personal models.

A training client trains as in pFedHN or FedPer. The server sends its personal model to novel
clients. So these baselines send FedPer's head, which FedPer itself never does."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from clients.core.arrays import Arrays, model_arrays, prefixed
from clients.core.client import Client, Config, Metrics
from clients.core.evaluation import further_scores, main_of, own_scores_of, value_sums
from clients.core.protocol import DOMAIN, VALUE_SUMS, FewShot, StateUse
from fedapps.common.seeds import seed_of
from fedapps.common.settings import setting
from fedapps.common.tasks import TASKS, VALUES
from partitions.shares import labeled_rows

BASE = setting("fedper", "method whose personal models novel clients get", ("fedper", "pfedhn"))
HEAD = "head."
UNTRAINED = "untrained"  # key of a reply's metrics: 1 if the personal head is not yet trained


class Ensemble(nn.Module):
    """The mean logits of its `members`."""

    def __init__(self, members: Iterable[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        """Mean logits (n, C)."""
        return torch.stack([member(x) for member in self.members]).mean(0)


class PFLClient(Client):
    """With `base` = "fedper" the head stays on the client until the server requests it."""

    few_shot = FewShot.NONE  # a novel client only has models of other clients

    needs_state = StateUse.PREDICTIONS
    needs_head = True
    head_by_name = True
    separately_trained = (HEAD,)
    exchanges = ("query.export", DOMAIN)

    base = BASE

    @classmethod
    def uses_head(cls, values: Mapping[str, Any], /) -> bool:
        """Only for FedPer; pFedHN's hypernetwork generates the whole network."""
        return bool(values.get("base", "fedper") == "fedper")

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.others: list[Arrays] = []  # the models of a novel client

    def lacks_state(self, arrays: Arrays) -> bool:
        """As every client; with pFedHN never, because the server generates all models."""
        return self.base != "pfedhn" and super().lacks_state(arrays)

    def arrays(self) -> Arrays:
        """The shared arrays; stores FedPer's head in the state."""
        arrays = super().arrays()
        if self.base == "pfedhn":
            return arrays
        head = {name: a for name, a in arrays.items() if name.startswith(HEAD)}
        self.state |= prefixed("personal", head)
        return {name: a for name, a in arrays.items() if name not in head}

    def export(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """The personal model without frozen arrays, and whether its head is still untrained."""
        self.load(arrays)
        metrics: Metrics = {}
        if self.base == "fedper" and not self.state:
            metrics[UNTRAINED] = 1.0
        return model_arrays(self.model, self.frozen), metrics

    def receive(self, arrays: Arrays, config: Config) -> None:
        """Load the model. A novel client receives several models as ``<client>/<name>``."""
        if not self.share.novel:
            super().receive(arrays, config)
            return
        models: dict[str, Arrays] = {}
        for full_name, array in arrays.items():
            owner, _, name = full_name.partition("/")
            models.setdefault(owner, {})[name] = array
        self.others = list(models.values())
        self.model.eval()

    def predict(self, x: Tensor) -> Tensor:
        """Logits (n, C), for a novel client the mean over its models."""
        if not self.share.novel:
            return super().predict(x)
        return self.each(x).mean(0)

    def each(self, x: Tensor) -> Tensor:
        """Logits (models, n, C) of each model of a novel client."""
        logits = []
        for other in self.others:
            self.load(other)
            logits.append(super().predict(x))
        return torch.stack(logits)

    def personal_model(self, x: Tensor) -> nn.Module:
        """A novel client's only network, or the mean of all its networks."""
        if not self.share.novel:
            return super().personal_model(x)
        members = []
        for other in self.others:
            self.load(other)
            members.append(super().personal_model(x))
        return members[0] if len(members) == 1 else Ensemble(members)


class PFLSampledClient(PFLClient):
    """PFL-sampled: the expected scores of a random training client's model."""

    def serve(self, arrays: Arrays, config: Config) -> tuple[nn.Module, Tensor]:
        """One of the models, drawn by the seed."""
        if self.share.novel:
            owners = list(dict.fromkeys(name.partition("/")[0] for name in arrays))
            draw = np.random.default_rng(seed_of(self.seed, "sampled", self.client))
            start = f"{draw.choice(owners)}/"
            arrays = {name: a for name, a in arrays.items() if name.startswith(start)}
        return super().serve(arrays, config)

    def score(self, arrays: Arrays, config: Config) -> tuple[float, int, Metrics]:
        """Loss and scores of a novel client: over the predictions of all models, not those of mean
        logits."""
        if not self.share.novel:
            return super().score(arrays, config)
        self.receive(arrays, config)
        x, y = self.share.everything.to(self.device)[:]
        labeled = labeled_rows(y)
        count = int(labeled.sum())
        if not count:
            return 0.0, 0, {}
        y = y[labeled]
        outputs = self.each(x)[:, labeled]
        losses = [float(self.criterion(z, y)) for z in outputs]  # one for each model
        # Of the predictions of all models together, so accuracy is the mean over the models.
        num_models = len(outputs)
        predictions = outputs.flatten(0, 1)
        labels = torch.cat([y] * num_models)
        main = TASKS[self.targets.task].main.name
        metrics: Metrics = {main: main_of(predictions, labels, self.targets)}
        metrics |= further_scores(predictions, labels, self.targets)
        metrics |= own_scores_of(self, predictions, labels)
        if self.targets.task == VALUES:
            sums = value_sums(predictions, labels)
            metrics[VALUE_SUMS] = [total / num_models for total in sums]
        return sum(losses) / num_models, count, metrics
