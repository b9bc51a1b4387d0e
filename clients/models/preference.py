"""FedEmbed's networks (FedEmbed, section 3; the layer sizes are ours, the paper gives none).

`PreferenceNet` is the encoder with one head; `EmbeddingNet` puts a personal embedding v_u, K
sub-population heads, the global head and the type head around any such encoder."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clients.core.functional import functional_call
from clients.models.head import HeadedNetwork, take_head
from clients.models.networks import convolved, image_shape

GRID = 7  # the fully connected layer sees at most GRID × GRID positions


class PreferenceNet(HeadedNetwork):
    """conv 5×5 16 → maxpool 2 → conv 5×5 32 → maxpool 2 → fc 128 → C, ReLU.

    Larger maps than 7×7, those of spectrograms, are max-pooled to it before the fc layer."""

    def __init__(self, shape: tuple[int, ...], num_classes: int):
        super().__init__()
        channels, height, width = image_shape(shape, "preference-net", 4)
        self.conv1 = nn.Conv2d(channels, 16, 5, padding=2)
        self.conv2 = nn.Conv2d(16, 32, 5, padding=2)
        self.grid = (min(height // 4, GRID), min(width // 4, GRID))
        self.fc = nn.Linear(32 * self.grid[0] * self.grid[1], 128)
        self.head = nn.Linear(128, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Activations (n, 128)."""
        x = convolved(x, self.conv1, self.conv2)
        if x.shape[-2:] != self.grid:
            x = F.adaptive_max_pool2d(x, self.grid)
        return F.relu(self.fc(x.flatten(1)))


class EmbeddingNet(nn.Module):
    """Θ_e, K binary heads Θ_1…Θ_K, global head Θ_g, type head Θ_t and v_u of `dim` entries.

    `encoder` has one input channel more than the images, diag(v_u), and loses its `head`; with
    `dim` 0 it has the images' channels. A single head that stays on the client is named `own`
    instead of ``heads.0``. There is no type head for `num_types` 0, and no global head without an
    embedding. Raises ValueError if diag(v_u) does not fit the image."""

    def __init__(
        self,
        encoder: nn.Module,
        shape: tuple[int, ...],
        *,
        dim: int,
        heads: int,
        num_types: int = 0,
        own: bool = False,
        global_head: bool = True,
    ) -> None:
        super().__init__()
        self.types = 0  # T, where users prefer types
        if dim and len(shape) < 3:
            raise ValueError(
                "personal embeddings are a further channel of images (channels, height, width), "
                f"and inputs have the shape {shape}; take a dataset of images, or the method global"
            )
        if dim and dim > min(shape[1:]):
            raise ValueError(
                f"the method's embedding-dim is {dim}; diag(v) must fit images of "
                f"{shape[1]}×{shape[2]} pixels: set it to at most {min(shape[1:])} in the "
                "method's section"
            )
        width = take_head(encoder).in_features + dim
        self.encoder = encoder
        self.dim = dim
        self.embedding: nn.Parameter | None = None
        if dim:
            self.embedding = nn.Parameter(torch.zeros(dim))

        self.own: nn.Linear | None = None
        if own:
            self.own = nn.Linear(width, 2)
            heads = 0  # the client's own head takes their place
        self.heads = nn.ModuleList(nn.Linear(width, 2) for _ in range(heads))

        self.global_head: nn.Linear | None = None
        if dim and global_head:
            self.global_head = nn.Linear(width, 2)

        self.type_head: nn.Linear | None = None
        if num_types:
            self.type_head = nn.Linear(width, num_types)

    def features(self, x: Tensor) -> Tensor:
        """Features (n, width) of x (n, C, H, W), without v_u."""
        return self.encoder(self.with_channel(x))

    def features_of_fixed(self, x: Tensor) -> Tensor:
        """The same, by an encoder whose weights and buffers are constants: gradients reach v_u
        alone, through diag(v_u)."""
        fixed = {name: p.detach() for name, p in self.encoder.named_parameters()}
        for name, buffer in self.encoder.named_buffers():
            fixed[name] = buffer.clone()  # running statistics of a second pass do not count
        return functional_call(self.encoder, fixed, (self.with_channel(x),))

    def with_channel(self, x: Tensor) -> Tensor:
        """x (n, C, H, W) with diag(v_u) as a further channel, if there is an embedding."""
        if self.embedding is None:
            return x
        channel = x.new_zeros(x.shape[-2:])
        channel[: self.dim, : self.dim] = torch.diag(self.embedding)
        return torch.cat([x, channel.expand(len(x), 1, -1, -1)], 1)

    def conditioned(self, features: Tensor) -> Tensor:
        """Features with v_u appended: the input of every head."""
        if self.embedding is None:
            return features
        return torch.cat([features, self.embedding.expand(len(features), -1)], 1)

    def head(self, k: int) -> nn.Module:
        """The client's own head, or the head of sub-population k."""
        return self.heads[k] if self.own is None else self.own

    def forward(self, x: Tensor, k: int = 0) -> Tensor:
        """Logits (n, 2) of head k."""
        return self.head(k)(self.conditioned(self.features(x)))
