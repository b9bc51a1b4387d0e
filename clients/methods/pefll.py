"""PeFLL client (Scott, Zakerinia and Lampert, PeFLL: Personalized Federated Learning by Learning to
Learn, ICLR 2024, Algorithms 1 and 2): ODPFL-HN's exchanges, but the descriptor also uses labels.

The descriptor is v_i = 1/n Σ_j φ(x_j, y_j; η_v) over labeled samples. y_j is one-hot, appended to
x_j as channels (to a vector as entries). For other tasks than classes, y_j holds the numbers that
the network learns: truth values, or standardised values (ours). As in the authors' code, a client
that is scored sets the logits of classes without a training sample to 0, and a mini-batch's
gradient is clipped. Departs from the paper: also in training, all training samples make the
descriptor; the authors' code takes one mini-batch (`encode_samples`)."""

import torch
from torch import Tensor

from clients.core.arrays import Arrays
from clients.core.client import Config
from clients.core.evaluation import label_vectors
from clients.core.protocol import FewShot, StateUse
from clients.methods.odpfl_hn import ODPFLHNClient
from clients.models.head import head_of
from fedapps.common.settings import setting
from fedapps.common.tasks import CLASSES
from partitions.datasets.loading import Info
from partitions.shares import Samples


class PeFLLClient(ODPFLHNClient):
    """ODPFL-HN's client that describes its labeled samples; a novel client needs `novel-shots`."""

    # As in the authors' code.
    lr = 0.002
    momentum = 0.9
    weight_decay = 0.00005  # 2 λ_θ
    local_steps = 50
    batch_size = 32
    encoder = "mean"

    few_shot = FewShot.DESCRIPTOR
    needs_head = True
    saves_state_after = ()
    needs_state = StateUse.NONE

    local_clip_norm = 50.0

    mask_absent = setting(
        True, "set the logits of classes that a client lacks to 0; with task=classes alone"
    )

    @classmethod
    def descriptor_size(cls, num_training: int, num_clients: int) -> int:
        """1 + ⌊n/4⌋ for all n clients, novel ones included."""
        return 1 + num_clients // 4

    @classmethod
    def encoder_shape(cls, info: Info) -> tuple[int, ...]:
        """Inputs with a further channel for each output: the label."""
        return (info.shape[0] + info.num_outputs, *info.shape[1:])

    def described(self) -> Samples:
        """Its training samples. Raises ValueError for a client without labels."""
        if not len(self.share.train):
            raise ValueError("this client has no labels, and PeFLL describes clients by labels")
        return self.share.train

    def receive(self, arrays: Arrays, config: Config) -> None:
        """Load the generated network, without the classes that the training samples lack."""
        super().receive(arrays, config)
        head = head_of(self.target)
        if self.mask_absent and self.targets.task == CLASSES and len(self.share.train):
            _, y = self.share.train.to(self.device)[:]
            absent = y.bincount(minlength=head.out_features) == 0
            with torch.no_grad():
                for parameter in head.parameters():
                    parameter[absent] = 0

    def encoder_input(self, x: Tensor, y: Tensor) -> Tensor:
        """(x, y) as (n, channels + C, …), the last C being the label as a vector."""
        label = label_vectors(y, head_of(self.target).out_features).to(x.dtype)
        beside = label.view(*label.shape, *(1 for _ in x.shape[2:]))
        return torch.cat([x, beside.expand(-1, -1, *x.shape[2:])], 1)
