"""HyperFedZero client (Zhou et al., Deploying Models to Non-participating Clients in Federated
Learning without Fine-tuning, ICLR 2026): a hypernetwork generates the classifier from an embedding
of the inputs, so a client that never trained gets its own classifier without labels.

NoisyEmbed: e = softmax(A f(x) + ζ ⊙ softplus(B f(x))), ζ ~ N(0, I) in training alone.
Classifier: its flat weights are chunks w_j = MLP([e, u_j]), u_j learnt; the surplus is dropped.
Loss: CE + α var(s)/mean(s) + β mean_i H(e_i), s = Σ_i e_i over the mini-batch.
f is the target network without its head, so the last layer alone is generated. The sources leave
open, hence ours: the linear layers A and B, one hidden layer in the MLP, a classifier for each
sample or one for all of a client's inputs, from their mean e (`granularity`)."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clients.core.client import Client
from clients.core.copies import copy_of
from clients.core.evaluation import by_parts
from clients.models.head import take_head
from fedapps.common.memory_limits import num_parts
from fedapps.common.settings import NONNEGATIVE, POSITIVE_INT, WIDTH, setting
from fedapps.common.tasks import ALL_TASKS
from partitions.datasets.loading import Info


class GeneratedHead(nn.Module):
    """The target network, whose head (C, d) is generated for each sample; with `for_client` for
    each batch, from its mean embedding."""

    def __init__(
        self, model: nn.Module, embedding: int, chunk: int, chunk_dim: int, hidden: int, mean: bool
    ) -> None:
        super().__init__()
        head = take_head(model)
        self.body = model
        self.for_client = mean
        self.shape = (head.out_features, head.in_features + 1)  # the last column is the bias
        self.embed = nn.Linear(head.in_features, embedding)  # A
        self.noisy = nn.Linear(head.in_features, embedding)  # B
        num_chunks = math.ceil(math.prod(self.shape) / chunk)
        self.chunks = nn.Parameter(torch.randn(num_chunks, chunk_dim))  # u
        self.mlp = nn.Sequential(
            nn.Linear(embedding + chunk_dim, hidden), nn.ReLU(), nn.Linear(hidden, chunk)
        )

    def embedding(self, features: Tensor) -> Tensor:
        """log e (n, E) of features (n, d)."""
        z = self.embed(features)
        if self.training:
            z = z + torch.randn_like(z) * F.softplus(self.noisy(features))
        return z.log_softmax(1)

    def heads(self, e: Tensor) -> Tensor:
        """Weights and bias (m, C, d + 1) for the embeddings e (m, E)."""
        m = len(e)
        count = len(self.chunks)
        # Every e_i meets every u_j: (m, count, E + chunk_dim).
        pairs = torch.cat([e[:, None].expand(-1, count, -1), self.chunks.expand(m, -1, -1)], 2)
        flat = self.mlp(pairs).flatten(1)
        # The last chunk is longer than what is left of the classifier.
        weights = flat[:, : math.prod(self.shape)]
        return weights.view(m, *self.shape)

    def classify(self, features: Tensor, e: Tensor) -> Tensor:
        """Logits (n, C) of features (n, d), by the head of each e (n, E) or of one e (1, E)."""
        heads = self.heads(e)
        return torch.einsum("nd,ncd->nc", features, heads[:, :, :-1]) + heads[:, :, -1]

    def shared(self, e: Tensor) -> Tensor:
        """The embeddings that heads are generated from: e (n, E), or its mean (1, E)."""
        return e.mean(0, keepdim=True) if self.for_client else e

    def forward(self, x: Tensor) -> Tensor:
        """Logits (n, C)."""
        features = self.body(x)
        return self.classify(features, self.shared(self.embedding(features).exp()))


def imbalance(e: Tensor) -> Tensor:
    """var(s)/mean(s) of s = Σ_i e_i for embeddings e (n, E): 0 if all entries are used alike."""
    s = e.sum(0)
    return s.var() / s.mean()


class HyperFedZeroClient(Client):
    """`balance` is α, `entropy_weight` is β. ``embedding-variance`` is the sum of the variances of
    e's entries over a client's inputs; near 0 the classifiers hardly differ. On the digits it stays
    near 0 because e starts almost uniform: the spread of A f(x) is 0.02 there. The penalties and
    the noise do not cause it: docs/results/unseen-digits.md."""

    tasks = ALL_TASKS
    needs_head = True
    model: GeneratedHead  # by `build`
    supports_streaming = property(lambda self: self.granularity == "client")

    balance = setting(0.01, "α, weight of the equal use of the embedding's entries", NONNEGATIVE)
    entropy_weight = setting(0.01, "β, weight of the entropy of an input's embedding", NONNEGATIVE)
    granularity = setting(
        "sample", "a classifier for each input, or one for a client", ("sample", "client")
    )
    embedding_dim = setting(16, "entries of the embedding e", "[2, 4096]")
    chunk_size = setting(128, "weights of a chunk of the classifier", POSITIVE_INT)
    chunk_dim = setting(16, "entries of the embedding of a chunk", WIDTH)
    hidden_dim = setting(64, "width of the hypernetwork's hidden layer", WIDTH)

    @classmethod
    def build(
        cls,
        model: nn.Module,
        info: Info,
        *,
        embedding_dim: int,
        chunk_size: int,
        chunk_dim: int,
        hidden_dim: int,
        granularity: str,
    ) -> nn.Module:
        """The target network with embedding and hypernetwork in place of its head."""
        of_client = granularity == "client"
        return GeneratedHead(model, embedding_dim, chunk_size, chunk_dim, hidden_dim, of_client)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """CE + α var(s)/mean(s) + β mean_i H(e_i)."""
        features = self.model.body(x)
        log_e = self.model.embedding(features)
        e = log_e.exp()
        h = -(e * log_e).sum(1).mean()
        loss = self.criterion(self.model.classify(features, self.model.shared(e)), y)
        return loss + self.balance * imbalance(e) + self.entropy_weight * h

    def predict(self, x: Tensor) -> Tensor:
        """Logits (n, C) by the generated classifiers, without noise."""
        self.stream = {}
        return self.update(x)

    def update(self, x: Tensor) -> Tensor:
        """Logits (n, C); a client's classifier is that of the mean e over the stream's inputs."""
        features = by_parts(self.model.body, self.parts(x))
        with torch.no_grad():
            e = self.model.embedding(features).exp()
        self.adaptation_metrics = {"embedding-variance": float(e.var(0, unbiased=False).sum())}
        network = self.model
        shared = network.shared(e)
        if network.for_client:
            with torch.no_grad():
                return network.classify(features, self.mean_so_far({"e": shared}, len(x))["e"])
        # Each input has a classifier of its own, which needs more memory than the input.
        parts = num_parts((len(x), math.prod(network.shape)), self.pass_megabytes)
        rows = torch.arange(len(x)).tensor_split(parts)
        return by_parts(lambda some: network.classify(features[some], shared[some]), rows)

    def personal_model(self, x: Tensor) -> nn.Module:
        """The network that generates a head for each input or, for a client, the target network
        with the last head."""
        network = copy_of(self.model).eval()
        if not network.for_client:
            return network
        with torch.no_grad():
            (head,) = network.heads(self.stream["e"])
        classes, width = network.shape
        network.body.head = nn.Linear(width - 1, classes, device=head.device)
        network.body.head.load_state_dict({"weight": head[:, :-1], "bias": head[:, -1]})
        return network.body
