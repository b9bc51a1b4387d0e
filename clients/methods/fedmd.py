"""FedMD client (Li and Wang, 2019, Algorithm 1): models of any architecture learn from each other
by their logits on a public unlabeled set.

Departs from the paper: no private pre-training before the first round. A novel client digests the
consensus from its initial model. "mae" on logits is the loss of the authors' code, "kl" the loss of
FedTTA's comparison (see `clients.methods._adaptation.divergence`)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clients.core.arrays import Arrays, to_numpy, to_tensors
from clients.core.client import Client, Config, Metrics
from clients.core.normalisation import NORMALISATION, batch_statistics
from clients.core.protocol import StateUse
from clients.core.sgd import batches
from clients.methods._adaptation import KL_DIRECTION, divergence
from clients.methods.tent import TENTClient
from fedapps.common.seeds import drawing, seed_of
from fedapps.common.settings import COUNT, NONNEGATIVE, POSITIVE_INT, setting
from partitions.shares import Samples

FLOAT16 = setting(False, "logits travel as float16")
RESETTABLE = (nn.Linear, nn.Conv2d, *NORMALISATION)
Logits = dict[str, Tensor]  # sets of logits (m, C) on the public set, by name


class FedMDClient(Client):
    """Digests the consensus, revisits its data, communicates logits; the model stays on the client.

    Clients of one architecture start from the same weights. With `initialization` = "own" each
    starts from different ones, a novel client at every evaluation. At an evaluation a training
    client, too, digests as a novel one, to validate the model that those get. Raises ValueError if
    the share has no public set."""

    personal = ("",)
    also_scores_global_model = True
    offers = ("public-logits",)
    needs_state = StateUse.PREDICTIONS
    needs_public = True

    digest_epochs = setting(1, "passes over the public set in a round", POSITIVE_INT)
    novel_digest_epochs = setting(
        20, "passes of a novel client, which starts untrained", POSITIVE_INT
    )
    public_batch_size = setting(0, "public samples of a mini-batch; 0: batch-size", COUNT)
    digest_loss = setting("mae", "loss of public logits", ("mae", "kl"))
    kl_direction = KL_DIRECTION
    initialization = setting("shared", "clients start from equal weights or not", ("shared", "own"))
    float16 = FLOAT16

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if self.share.public is None or not len(self.share.public):
            raise ValueError(
                "the client has no public samples; set partition.public-samples, or pass public= "
                "to client_app"
            )
        self.public_batch_size = self.public_batch_size or self.batch_size
        self.dtype = "float16" if self.float16 else "float32"
        self.public: Tensor = self.share.public[:][0]  # D_p (m, *shape)

    def get_properties(self, config: Config) -> Config:
        """Also the shape of its logits on the public set."""
        with torch.no_grad():
            classes = batch_statistics(self.model, False)(self.public[:1].to(self.device)).shape[1]
        properties = super().get_properties(config)
        return properties | {"public-samples": len(self.public), "classes": classes}

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Digest, revisit, communicate; returns logits alone."""
        self.resume(config)
        metrics: Metrics = {}
        if arrays:
            metrics["digest-loss"] = self.digest(arrays, config, self.digest_epochs)
        metrics["loss"] = self.fit_locally(config)
        self.arrays()  # puts the whole model, which is personal, into the state
        logits = to_numpy(self.communicate())
        reply = {name: a.astype(self.dtype) for name, a in logits.items()}
        return reply, len(self.share.train), metrics

    def receive(self, arrays: Arrays, config: Config) -> None:
        """The client's model; a novel client digests the consensus first, for this call."""
        self.resume(config)
        if self.share.novel and arrays:
            self.digest(arrays, config, self.novel_digest_epochs)
        self.model.eval()

    def resume(self, config: Config) -> None:
        """Set the model of the last round, or before the first one its initial weights."""
        self.load({})
        if not self.state and self.initialization == "own":
            round_ = int(config.get("server-round", 0))
            with drawing(seed_of(self.seed, "initialization", round_, self.client)):
                for module in self.model.modules():
                    trained = all(p.requires_grad for p in module.parameters())
                    if isinstance(module, RESETTABLE) and trained:
                        module.reset_parameters()

    def digest(self, arrays: Arrays, config: Config, epochs: int) -> float:
        """Fit the consensus logits on the public set; returns the mean loss."""
        teacher = {name: t.float() for name, t in to_tensors(arrays, self.device).items()}
        m = len(self.public)
        for name, t in teacher.items():
            if len(t) != m:
                raise ValueError(f"{name} has {len(t)} rows for {m} public samples")
        generator = torch.Generator().manual_seed(
            seed_of(self.seed, "digest", int(config.get("server-round", 0)), self.client)
        )
        return self.fit_locally(
            config,
            # Each sample's "label" is its row in the teacher's logits.
            samples=Samples(self.public, torch.arange(m), torch.arange(m), scale=1.0),
            rows=batches(m, self.public_batch_size, steps=0, epochs=epochs, generator=generator),
            loss=lambda x, row: self.distillation(x, {n: t[row] for n, t in teacher.items()}),
            lr=self.lr,
        )

    # What a method on FedMD overrides

    def distillation(self, x: Tensor, teacher: Logits) -> Tensor:
        """Loss of the student on public inputs x (n, *shape) against the teacher's (n, C)."""
        z, target = self.model(x), teacher["logits"]
        if self.digest_loss == "mae":
            return F.l1_loss(z, target)
        return divergence(z, target, self.kl_direction)

    def communicate(self) -> Logits:
        """The model's logits on the public set."""
        batch_statistics(self.model, False)
        with torch.no_grad():
            return {"logits": self.model(self.public.to(self.device))}


class HeteroTENTClient(FedMDClient, TENTClient):
    """TENT inside FedMD, FedTTA's baseline for clients of different architectures.

    `clip_norm` (0: never) clips the gradients of training; with `communicate_adapted` the public
    logits come from the model adapted to the public set."""

    supports_streaming = False  # each message digests public samples anew

    digest_loss = "kl"
    clip_norm = setting(0.0, "norm at which a training gradient is clipped; 0: never", NONNEGATIVE)
    communicate_adapted = setting(False, "public logits of the model adapted to the public set")

    def fit_locally(self, config: Config, **options: Any) -> float:
        """SGD with clipped gradients."""

        def clip() -> None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)

        return super().fit_locally(config, adjust=clip if self.clip_norm else None, **options)

    def communicate(self) -> Logits:
        """The logits of the model, adapted to the public set or not."""
        if not self.communicate_adapted:
            return super().communicate()
        return {"logits": self.predict(self.public.to(self.device))}
