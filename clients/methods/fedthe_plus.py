"""FedTHE+ client (Jiang and Lin, ICLR 2023): FedTHE, then each input adapts all of the network.

e is FedTHE's. Then `adapt_steps` SGD steps of the body and both heads on MEMO's objective, the
entropy of the mean of σ(e_g g + e_l p) over an input's views; the adapted network predicts that
input alone. A client without a personal head does the same with the global model, which is MEMO.
Departs from the paper: views are crops and mirror images (`clients.methods.memo`), not AugMix."""

from torch import Tensor, nn

from clients.methods._two_heads import TwoHeads, Weigh, Weigher
from clients.methods.fedthe import FedTHEClient
from clients.methods.memo import MEMOClient, MEMONetwork


class FedTHEPlusNetwork(MEMONetwork):
    """Both heads, which adapt to each input together; `weigh` gives e of all inputs."""

    network: TwoHeads
    weigh: Weigh

    def given(self, x: Tensor) -> tuple[Tensor, ...]:
        """e (n, 2)."""
        g, p, f = self.network.outputs_of(x, self.settings["pass_megabytes"])
        return (self.weigh(g, p, f),)


class FedTHEPlusClient(FedTHEClient, MEMOClient):
    """FedTHE's client that adapts to each input before it predicts it."""

    rates = ("lr", "mixing_lr", "adapt_lr")

    adapt_lr = 0.0005
    adapt_steps = 3

    def personal_model(self, x: Tensor) -> nn.Module:
        """The network together with its adaptation to every input."""
        if self.personal_head is None:
            return self.adapting(self.network(), MEMONetwork)
        model = self.adapting(self.two_heads(), FedTHEPlusNetwork)
        model.weigh = Weigher(self.weigh)
        return model
