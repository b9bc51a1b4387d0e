"""FedRep client (Collins et al., ICML 2021, Algorithm 1): the head first, then the body.

h_i is the head, φ_i the body. h_i stays on the client, or the server holds and sends it.
Departs from the paper: the body takes the local steps or epochs of the common settings. A novel
client needs labels to train a head; without labels it is not served."""

from clients.core.arrays import Arrays, model_arrays
from clients.core.client import Config, Metrics
from clients.core.protocol import HEADS
from clients.core.sgd import train_only
from clients.methods.fedper import FedPerClient
from fedapps.common.settings import COUNT, setting


class FedRepClient(FedPerClient):
    """`head_epochs` passes over the data for the head, then local steps for the body."""

    any_optimizer = True
    offers = ("personal-head",)

    heads = HEADS
    head_epochs = setting(10, "epochs of the head before the body takes its local steps", COUNT)

    @classmethod
    def shared(cls, initial: Arrays, /, *, heads: str) -> Arrays:
        """The arrays of the body; with `heads` = "server" all arrays."""
        if heads == "server":
            return initial
        return super().shared(initial)

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """h_i ← GRD(f(h_i, φ)) `head_epochs` times, then φ_i ← GRD(f(h_i, φ))."""
        self.load(arrays)
        if self.head_epochs:
            rows = self.rows(config, "head", epochs=self.head_epochs)
            with train_only(self.model, self.is_personal) as head:
                self.fit_locally(config, rows=rows, parameters=head)
        with train_only(self.model, lambda name: not self.is_personal(name)) as body:
            loss = self.fit_locally(config, parameters=body)
        server_holds_head = any(self.is_personal(name) for name in arrays)
        reply = model_arrays(self.model, self.frozen) if server_holds_head else self.arrays()
        return reply, len(self.share.train), {"loss": loss}
