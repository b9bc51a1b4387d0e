"""Clients of users with preferences: local Adam on one head, with or without an embedding.

These are the baselines *Global* and *Global+* of FedEmbed (section 4.1), and the client of PFedKM.
Adam has its library's defaults and starts anew in each round. The embedding has a separate learning
rate (ours)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from clients.core.arrays import Arrays
from clients.core.client import Client, Config, Metrics
from clients.core.copies import copy_of
from clients.core.evaluation import by_parts
from clients.core.protocol import FewShot, StateUse
from clients.core.sgd import Adam, clip_gradients
from clients.models import build_model
from clients.models.head import headed
from clients.models.preference import EmbeddingNet
from fedapps.common.seeds import seed_of
from fedapps.common.settings import RATE, WIDTH, setting
from fedapps.common.tasks import CLASSES
from partitions.datasets.loading import Info
from partitions.shares import PreferredSamples, Samples

EMBEDDING = "embedding"
EMBEDDING_DIM = setting(
    16, "entries of a personal embedding; at most the image's height and width", WIDTH
)


def enclose(
    info: Info, model: str, seed: int, dim: int, heads: int, **options: Any
) -> EmbeddingNet:
    """The registered network `model` as the encoder of an `EmbeddingNet`."""
    channels, *sides = info.shape
    shape = (channels + bool(dim), *sides)
    network = build_model(model, shape, info.num_outputs, seed)
    encoder = headed(network, "a method for users with preferences", shape, info.num_outputs)
    return EmbeddingNet(encoder, info.shape, dim=dim, heads=heads, **options)


class GlobalClient(Client):
    """One head for all users, no embedding."""

    tasks = (CLASSES,)
    few_shot = FewShot.NONE  # labels are preferences
    lr = 0.001  # of local Adam
    local_epochs = 5
    batch_size = 20

    model: EmbeddingNet

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if not isinstance(self.share.train, PreferredSamples):
            raise ValueError(
                "the method needs users with preferences: set partition to 'preference'"
            )
        self.k = 0  # number of the user's head

    @classmethod
    def build(
        cls, base: nn.Module, info: Info, *args: Any, model: str, seed: int, **settings: Any
    ) -> nn.Module:
        """Encoder and one head."""
        return enclose(info, model, seed, 0, 1)

    def losses(self, x: Tensor, y: Tensor, types: Tensor) -> dict[str, Tensor]:
        """The local losses by name, mean over the batch; they are summed."""
        return {"head": self.criterion(self.model(x, self.k), y)}

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """A step of Adam on the sum of the losses for each mini-batch.

        Heads of other users are returned unchanged. ``loss`` is the mean loss of the user's
        head."""
        self.load(arrays)
        self.model.train()
        optimizer = Adam(self.groups(), self.lr, self.weight_decay)
        samples = self.typed(self.share.train).converted()
        rows = self.rows(config)
        total_loss = 0.0
        for index in rows:
            x, y = samples[index]
            losses = self.losses(x, y, samples.types(index))
            optimizer.zero_grad()
            torch.stack(list(losses.values())).sum().backward()
            clip_gradients(optimizer.parameters(), self.local_clip_norm)
            optimizer.step()
            total_loss += float(losses["head"].detach())
        return self.arrays(), len(self.share.train), {"loss": total_loss / max(len(rows), 1)}

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups."""
        return [{"params": list(self.model.parameters())}]

    def typed(self, samples: Samples) -> PreferredSamples:
        """The samples, which have types, on the client's device."""
        moved = samples.to(self.device)
        assert isinstance(moved, PreferredSamples)
        return moved

    def predict(self, x: Tensor) -> Tensor:
        """Logits (n, 2) of the user's head."""
        return by_parts(lambda part: self.model(part, self.k), self.parts(x))

    def personal_model(self, x: Tensor) -> nn.Module:
        """The network with only the user's head."""
        model = copy_of(self.model).eval()
        if model.own is None:
            model.heads = nn.ModuleList([model.heads[self.k]])
        return model


class GlobalPlusClient(GlobalClient):
    """One head for all users, conditioned on a personal embedding v_u, which is never sent."""

    personal: tuple[str, ...] = (EMBEDDING,)
    needs_state = StateUse.PREDICTIONS

    rates: tuple[str, ...] = ("lr", "embedding_lr")

    embedding_dim = EMBEDDING_DIM
    embedding_lr = setting(0.01, "learning rate of embeddings, by local Adam", RATE)

    @classmethod
    def build(  # type: ignore[override]  # it takes more settings
        cls,
        base: nn.Module,
        info: Info,
        *args: Any,
        model: str,
        seed: int,
        embedding_dim: int,
        **settings: Any,
    ) -> nn.Module:
        """Encoder and one head, both conditioned on the embedding."""
        return enclose(info, model, seed, embedding_dim, 1, global_head=False)

    def load(self, arrays: Arrays) -> None:
        """Set the model; an untrained embedding is uniform in [0, 1)."""
        self.embedding()
        super().load(arrays)

    def embedding(self) -> Any:
        """v_u (dim,), from the state, or at first drawn by the user's seed."""
        key = f"personal/{EMBEDDING}"
        if key not in self.state:
            generator = torch.Generator().manual_seed(seed_of(self.seed, EMBEDDING, self.client))
            v = torch.rand(self.model.dim, generator=generator)
            self.state[key] = v.numpy()
        return self.state[key]

    def groups(self) -> list[dict[str, Any]]:
        """One group for the embedding, at its learning rate, one for all other parameters."""
        named: Mapping[str, nn.Parameter] = dict(self.model.named_parameters())
        others = [p for name, p in named.items() if name != EMBEDDING]
        embedding_group = {"params": [named[EMBEDDING]], "lr": self.embedding_lr}
        return [{"params": others}, embedding_group]
