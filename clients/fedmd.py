"""FedMD client (Li and Wang, 2019, Algorithm 1): models of any architecture that learn from each
other by their logits on a public unlabeled set.

Departs from the paper: no private pre-training before the first round. A novel client digests the
consensus from its initial model; "mae" on logits is the loss of the authors' code, "kl" that of
FedTTA's comparison, KL(student ‖ teacher)."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from clients.adaptation import kl
from clients.arrays import Arrays, to_numpy, to_tensors
from clients.base import Client, Config, Metrics
from clients.sgd import batches
from clients.tent import TENTClient, batch_statistics
from partitions.seeds import seed_of
from partitions.shares import Samples

DIGEST_LOSSES = ("kl", "mae")
Logits = dict[str, Tensor]  # sets of logits (m, C) on the public set, by name


class FedMDClient(Client):
    """Digests the consensus, revisits its own data, communicates logits; the model stays here.

    A round digests for `digest_epochs` passes over the public set, a novel client for
    `novel_digest_epochs`. Logits travel as float16 if `float16`. Raises ValueError if the share
    has no public set."""

    personal = ("",)
    needs_public = True

    def __init__(
        self,
        *args: Any,
        digest_epochs: int = 1,
        novel_digest_epochs: int = 20,
        digest_loss: str = "mae",
        float16: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        for key, value in (
            ("digest-epochs", digest_epochs),
            ("novel-digest-epochs", novel_digest_epochs),
        ):
            if value < 1:
                raise ValueError(f"{key} is {value}; it must be at least 1")
        if digest_loss not in DIGEST_LOSSES:
            raise ValueError(f"unknown digest-loss {digest_loss!r}; known: {DIGEST_LOSSES}")
        if self.share.public is None or not len(self.share.public):
            raise ValueError("the client has no public samples; set partition.public-samples")
        self.digest_epochs, self.novel_digest_epochs = digest_epochs, novel_digest_epochs
        self.digest_loss, self.dtype = digest_loss, "float16" if float16 else "float32"
        self.public: Tensor = self.share.public[:][0]  # D_p (m, *shape)

    def properties(self) -> Config:
        """Also the shape of its logits on the public set."""
        with torch.no_grad():
            classes = batch_statistics(self.model, False)(self.public[:1].to(self.device)).shape[1]
        return super().properties() | {"public-samples": len(self.public), "classes": classes}

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Digest, revisit, communicate; returns logits alone."""
        self.load({})
        metrics: Metrics = {}
        if arrays:
            metrics["digest-loss"] = self.digest(arrays, config, self.digest_epochs)
        metrics["loss"] = self.fit_locally(config)
        self.arrays()  # the whole model is personal: into the state
        told = to_numpy(self.communicate())
        return (
            {name: a.astype(self.dtype) for name, a in told.items()},
            len(self.share.train),
            metrics,
        )

    def receive(self, arrays: Arrays, config: Config) -> None:
        """The client's own model; a novel one digests the consensus first, for this call."""
        super().receive({}, config)
        if self.share.novel and arrays:
            self.digest(arrays, config, self.novel_digest_epochs)
            self.model.eval()

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
            rows=batches(m, self.batch_size, steps=0, epochs=epochs, generator=generator),
            loss=lambda x, row: self.distillation(x, {n: t[row] for n, t in teacher.items()}),
        )

    # What a method on FedMD overrides

    def distillation(self, x: Tensor, teacher: Logits) -> Tensor:
        """Loss of the student on public inputs x (n, *shape) against the teacher's (n, C)."""
        z, target = self.model(x), teacher["logits"]
        return kl(z, target) if self.digest_loss == "kl" else F.l1_loss(z, target)

    def communicate(self) -> Logits:
        """The model's logits on the public set."""
        batch_statistics(self.model, False)
        with torch.no_grad():
            return {"logits": self.model(self.public.to(self.device))}


class HeteroTENTClient(FedMDClient, TENTClient):
    """TENT inside FedMD, FedTTA's baseline for clients of different architectures."""

    def __init__(self, *args: Any, digest_loss: str = "kl", **options: Any) -> None:
        super().__init__(*args, digest_loss=digest_loss, **options)
