"""FedBABU client (Oh, Kim and Yun, ICLR 2022, Algorithm 1): the head is fixed, the body shared.

All clients train the body under one random head, which is neither trained nor sent. When a client
is scored, it first personalizes the model by epochs of local SGD. Novel clients without labels get
the body under the random head.

The personalization has a small rate of its own: under a random head features grow long, and at the
training rate its first steps diverge. Departs from the authors' code: the server's mean is weighted
by sample counts."""

from clients.core.arrays import Arrays
from clients.core.client import Config, Metrics
from clients.core.protocol import StateUse
from clients.core.sgd import train_only
from clients.methods.fedper import FedPerClient
from fedapps.common.settings import COUNT, RATE, setting


class FedBABUClient(FedPerClient):
    """Personalizes `part` of the network in `tune_epochs` epochs at `tune_lr`."""

    any_optimizer = True
    also_scores_global_model = True
    needs_state = StateUse.NONE

    rates = ("lr", "tune_lr")

    tune_lr = setting(0.01, "learning rate of the personalization; 0: lr", RATE)
    tune_epochs = setting(5, "epochs that personalize the model before it is scored", COUNT)
    part = setting("all", "part of the network that is personalized", ("all", "head", "body"))

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """FedAvg's steps of the body alone."""
        self.load(arrays)
        with train_only(self.model, lambda name: not self.is_personal(name)) as body:
            loss = self.fit_locally(config, parameters=body)
        return self.arrays(), len(self.share.train), {"loss": loss}

    def receive(self, arrays: Arrays, config: Config) -> None:
        """Load the body under the common head; a training client then personalizes the model."""
        super().receive(arrays, config)
        if self.tune_epochs and not self.share.novel:
            rows = self.rows(config, "tune", epochs=self.tune_epochs)
            with train_only(self.model, self.is_tuned) as parameters:
                lr = self.tune_lr or self.lr
                self.fit_locally(config, rows=rows, parameters=parameters, lr=lr)
            self.model.eval()

    def is_tuned(self, name: str) -> bool:
        """Whether the parameter belongs to `part`."""
        return self.part == "all" or self.is_personal(name) == (self.part == "head")
