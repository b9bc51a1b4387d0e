"""FedMD client (Li and Wang, 2019, Algorithm 1): distillation between models of any architecture.

Clients send their logits on a public unlabeled set, and the server returns the consensus. In each
round a client fits the consensus ("digest"), trains on its data ("revisit") and sends its logits
("communicate"). Departs from the paper: there is no private pre-training before the first round. A
novel client digests the consensus from its initial model. The loss "mae" of logits is that of the
authors' code, "kl" that of FedTTA's comparison (`clients.methods._divergence.divergence`)."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clients.core.arrays import Arrays, to_numpy, to_tensors
from clients.core.client import Client, Config, Metrics
from clients.core.normalisation import NORMALISATION, batch_statistics
from clients.core.projections import projections
from clients.core.protocol import PUBLIC, StateUse, round_of
from clients.core.saved_states import TAKE_THE_SAME
from clients.core.sgd import batches
from clients.methods._divergence import KL_DIRECTION, divergence
from clients.methods.tent import TENTClient
from fedapps.common.seeds import drawing, seed_of
from fedapps.common.settings import COUNT, NONNEGATIVE, POSITIVE_INT, setting
from fedapps.common.tasks import ALL_TASKS, CLASS_PROBABILITIES, ForTasks
from partitions.shares import Samples

FLOAT16 = setting(False, "send logits as float16")
# Keys of the answer to "query": the number of public samples, and of logits for each of them.
PUBLIC_SAMPLES = "public-samples"
CLASSES = "classes"
RESETTABLE = (nn.Linear, nn.Conv2d, *NORMALISATION)
# The least epochs, and the least mini-batches, of a novel client by default. With a small public
# set twenty epochs are too few steps for a model that starts untrained.
NOVEL_EPOCHS = 20
NOVEL_STEPS = 1000
Logits = dict[str, Tensor]  # sets of logits (m, C) on the public set, by name


class FedMDClient(Client):
    """Digests the consensus, revisits its data, communicates logits; the model stays on the client.

    Clients of one architecture start from the same weights. With `initialization` = "own" each
    client draws its weights, a novel client anew at every evaluation. For validation, a training
    client also scores the model that it would get as a novel client. Raises ValueError if the share
    has no public set."""

    tasks: tuple[str, ...] = ALL_TASKS
    settings_for_tasks: ClassVar = {"digest_loss": ForTasks(CLASS_PROBABILITIES, "mae")}
    personal = ("",)
    also_scores_global_model = True
    offers = ("public-logits",)
    needs_state = StateUse.PREDICTIONS
    needs_public = True

    digest_epochs = setting(1, "epochs on the public set in a round", POSITIVE_INT)
    novel_digest_epochs = setting(
        0,
        "epochs of a novel client on the public set; it starts untrained; 0: twenty, or more until "
        "there are a thousand mini-batches",
        COUNT,
    )
    public_batch_size = setting(0, "public samples of a mini-batch; 0: batch-size", COUNT)
    digest_loss = setting("mae", "loss of public logits", ("mae", "kl"))
    kl_direction = KL_DIRECTION
    initialization = setting(
        "shared", "clients start from the same or from different weights", ("shared", "own")
    )
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
        """The client's properties, the shape of its logits on the public set, and projections of
        this set: logits of other public samples would have no meaning to other clients."""
        if self.public.is_floating_point() and not self.public.isfinite().all():
            raise ValueError("public samples hold NaN or infinity; fill them in, or leave them out")
        num_samples, num_classes = self.shape_of_logits()
        properties = super().get_properties(config)
        return properties | {
            PUBLIC_SAMPLES: num_samples,
            CLASSES: num_classes,
            PUBLIC: projections(self.public),
        }

    def shape_of_logits(self) -> tuple[int, int]:
        """(m, C): the number of public samples, and of logits for each of them."""
        batch_statistics(self.model, False)
        with torch.no_grad():
            # A single input has no batch statistics.
            try:
                logits = self.model(self.public[:2].to(self.device))
            except Exception as error:  # whatever code from outside raises
                raise ValueError(
                    f"the network cannot take public samples of the shape "
                    f"{tuple(self.public.shape[1:])}; give inputs like the client's own, which "
                    f"have the shape {tuple(self.share.everything.x.shape[1:])}: {error}"
                ) from error
        return len(self.public), logits.shape[1]

    def check_saved(self, arrays: Arrays, state: Arrays) -> None:
        """As the base; the consensus must be of as many public samples and classes."""
        super().check_saved(arrays, state)
        num_samples, num_classes = self.shape_of_logits()
        for name, logits in arrays.items():
            if logits.shape != (num_samples, num_classes):
                raise ValueError(
                    f"the saved consensus {name!r} has the shape {logits.shape}, and the run has "
                    f"{num_samples} public samples and {num_classes} outputs: {TAKE_THE_SAME}"
                )

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Digest, revisit, communicate; returns only logits."""
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
        """Load the client's model; a novel client then digests the consensus."""
        self.resume(config)
        if self.share.novel and arrays:
            self.digest(arrays, config, self.epochs_of_novel_client())
        self.model.eval()

    def epochs_of_novel_client(self) -> int:
        """`novel_digest_epochs`; for 0 at least `NOVEL_EPOCHS`, and `NOVEL_STEPS` mini-batches."""
        if self.novel_digest_epochs:
            return self.novel_digest_epochs
        batches_per_epoch = math.ceil(len(self.public) / self.public_batch_size)
        return max(NOVEL_EPOCHS, math.ceil(NOVEL_STEPS / batches_per_epoch))

    def resume(self, config: Config) -> None:
        """Load the model of the last round; before the first round the initial weights."""
        self.load({})
        if not self.state and self.initialization == "own":
            round_ = round_of(config)
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
        # A sample's "label" is its row in the teacher's logits.
        samples = Samples(self.public, torch.arange(m), torch.arange(m), scale=1.0)
        round_ = round_of(config)
        seed = seed_of(self.seed, "digest", round_, self.client)
        generator = torch.Generator().manual_seed(seed)
        rows = batches(m, self.public_batch_size, epochs=epochs, generator=generator)

        def loss(x: Tensor, row: Tensor) -> Tensor:
            return self.distillation(x, {name: t[row] for name, t in teacher.items()})

        return self.fit_locally(config, samples=samples, rows=rows, loss=loss, lr=self.lr)

    # What a method on FedMD overrides

    def distillation(self, x: Tensor, teacher: Logits) -> Tensor:
        """Loss of the student on public inputs x (n, *shape) against the teacher's (n, C)."""
        z = self.model(x)
        target = teacher["logits"]
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

    `clip_norm` clips the gradients of training. With `communicate_adapted` the public logits come
    from the model that is adapted to the public set."""

    tasks = CLASS_PROBABILITIES
    supports_streaming = False  # each message digests public samples anew

    digest_loss = "kl"
    clip_norm = setting(0.0, "clip training gradients to this norm; 0: off", NONNEGATIVE)
    communicate_adapted = setting(
        False, "adapt the model to the public set before it computes public logits"
    )

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
