"""ODPFL-HN client (Amosy et al., On-Demand Unlabeled Personalized Federated Learning, Algorithm 1;
supplement B and D): describes its inputs by the server's encoder, trains the model it gets, and
backpropagates to the encoder. Its inputs never leave it.

Departs from the paper: batches of a batched encoding are weighed by their sizes, so that one of
a mean-pooling encoder equals the encoding in one pass; for ε ≥ 1, where the classic Gaussian
mechanism does not hold, the noise is that of the analytic one (Balle and Wang, ICML 2018)."""

import hashlib
import math
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from clients.arrays import Arrays, to_numpy
from clients.base import Client, Config, Metrics
from clients.models.encoders import ENCODERS, Described, build_encoder
from clients.optimizers import SGD
from clients.privacy import DP_GENERATOR, generator, noised
from clients.protocol import StateUse
from clients.sgd import train_only
from partitions.datasets import Info
from partitions.seeds import seed_of
from partitions.settings import COUNT, RATE, SOME, WEIGHT, setting
from partitions.shares import Samples

DESCRIPTOR = "descriptor"  # e_i, or its gradient, on the wire


DESCRIPTOR_EPSILON = setting(
    0.0, "ε of all that a novel client tells of its inputs; 0: no noise", WEIGHT
)
DESCRIPTOR_DELTA = setting(0.01, "δ of that ε", "(0, 1)")


class ODPFLHNClient(Client):
    """At most `encode_samples` inputs (0: all) make the descriptor, `encode_batch_size` in a pass
    (0: all in one). With `training` = "two-phase" it fits the encoder to the server's embedding
    in `encoder_steps` steps of `encoder_local_lr`.

    A novel client with `descriptor_epsilon` > 0 protects itself: it adds Gaussian noise and
    answers at most `descriptor_answers` different γ, with (ε, δ)-differential privacy of all its
    answers together with respect to replacing one input; the same γ gets the same answer again,
    as long as its inputs are the same.
    What it spent it keeps. Noise is drawn by `dp_generator`; a "seeded" one protects only against
    who does not know the run's seed."""

    exchanges = ("query.encode", "train.backprop")
    saves_state_after: tuple[str, ...] = ("query.encode",)
    state_across_runs = (
        "answer/",
        "sigma/",
        "spent",
    )  # a novel client's budget is one for all runs
    needs_state = StateUse.TRAINING  # of a private novel client: its answers, and what they spent
    rates = ("lr", "encoder_local_lr")

    encoder: Any = setting("ds", "set encoder; private: ds-sphere", tuple(ENCODERS))
    descriptor_dim = setting(
        0, "entries of a descriptor; 0: (training clients) / 4, rounded up", "[0, 4096]"
    )
    encode_samples = setting(0, "inputs that make a descriptor, at most; 0: all", COUNT)
    encode_batch_size = setting(0, "inputs of one pass of the encoder; 0: all", COUNT)
    encoder_steps = setting(5, "two-phase: steps of the encoder to the embedding in a round", COUNT)
    encoder_local_lr = setting(0.01, "two-phase: learning rate of these steps", RATE)
    descriptor_epsilon = DESCRIPTOR_EPSILON
    descriptor_delta = DESCRIPTOR_DELTA
    descriptor_answers = setting(
        1, "encoders that a private novel client answers; each gets its share of ε", SOME
    )
    dp_generator = DP_GENERATOR

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        assert isinstance(self.model, Described)
        self.target, self.encoder = self.model.target, self.model.encoder
        if self.descriptor_epsilon:
            self.encoder.sensitivity(1)  # refuses at once what cannot be bounded

    @classmethod
    def build(
        cls,
        model: nn.Module,
        info: Info,
        *,
        encoder: str,
        descriptor_dim: int,
        num_clients: int,
        train_fraction: float,
    ) -> nn.Module:
        """The target network with its encoder; `descriptor_dim` 0 means ⌈N_train/4⌉."""
        dim = descriptor_dim or math.ceil(round(train_fraction * num_clients) / 4)
        return Described(model, build_encoder(encoder, model, info.shape, dim))

    @property
    def private(self) -> bool:
        """Whether it is a novel client that tells a noisy descriptor, and else nothing."""
        return bool(self.descriptor_epsilon) and self.share.novel

    def is_tuned(self, name: str) -> bool:
        """The generated network, not the encoder."""
        return name.startswith("target.")

    def receive(self, arrays: Arrays, config: Config) -> None:
        """The generated network; what its descriptor cost a private novel client is told."""
        super().receive(arrays, config)
        if self.private:
            epsilon, delta = self.descriptor_epsilon, self.descriptor_delta
            self.adapted = {"epsilon": epsilon, "delta": delta}

    def personal_model(self, x: Tensor) -> nn.Module:
        """The generated network, without the encoder."""
        return deepcopy(self.target).eval()

    # The three exchanges

    def encode(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """e_i = g({x}; γ), from labels none; a private novel client adds noise and tells its σ.

        Raises ValueError if that client's budget does not allow for another γ."""
        known = digest(arrays | self._inputs()) if self.private else ""
        if f"answer/{known}" not in self.state:
            self.load(arrays)
            with torch.no_grad():
                e, n = self.descriptor(config)
            if not self.private:
                return to_numpy({DESCRIPTOR: e}), {}
            counters = int(config.get("server-round", 0)), self.client
            source = generator(self.dp_generator, self.seed, "dp", *counters)
            sigma = self._spend(self.encoder.sensitivity(n))
            noisy = noised(to_numpy({DESCRIPTOR: e}), sigma, source)[DESCRIPTOR]
            self.state |= {f"answer/{known}": noisy, f"sigma/{known}": np.array(sigma)}
        told = {"dp-sigma": float(self.state[f"sigma/{known}"])}
        return {DESCRIPTOR: self.state[f"answer/{known}"]}, told

    def _inputs(self) -> Arrays:
        """What a private descriptor describes; other inputs would be another question."""
        samples = self.share.everything
        return {"inputs": samples.x[samples.index].numpy()}

    def _spend(self, sensitivity: float) -> float:
        """σ of one answer more, whose (Δ/σ)² is taken from the budget.

        k answers with the noise of sensitivity √k Δ are together one with that of Δ (μ-GDP)."""
        whole = noise_scale(1.0, self.descriptor_epsilon, self.descriptor_delta) ** -2
        spent, cost = float(self.state.get("spent", 0.0)), whole / self.descriptor_answers
        if spent + cost > whole * (1 + 1e-9):
            raise ValueError(
                f"this client has answered what descriptor-epsilon {self.descriptor_epsilon:g} and "
                f"descriptor-answers {self.descriptor_answers} allow, and this is another encoder, "
                "or its data have changed"
            )
        self.state["spent"] = np.array(spent + cost)
        return sensitivity / cost**0.5

    def _refuse(self, what: str) -> None:
        """Raise ValueError if the client is a private novel one, whose budget covers no `what`."""
        if self.private:
            raise ValueError(
                f"descriptor-epsilon is {self.descriptor_epsilon:g}, and covers no {what} of a "
                "novel client, only its descriptor"
            )

    def domain(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """As any client's, but for a private novel one's."""
        self._refuse("classifier")
        return super().domain(arrays, config)

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """w̃_i: local SGD from w_i; where an embedding e_i comes along, the encoder is fitted."""
        self._refuse("trained model")
        names = [name for name in arrays if name != DESCRIPTOR]
        self.load({name: arrays[name] for name in names})
        with train_only(self.model, lambda name: name.startswith("target.")) as parameters:
            loss = self.fit_locally(config, parameters=parameters)
        metrics: Metrics = {"loss": loss}
        if DESCRIPTOR in arrays:
            metrics["encoder-loss"] = self.fit_encoder(torch.from_numpy(arrays[DESCRIPTOR]), config)
        trained = to_numpy(self.model.state_dict())
        return {name: trained[name] for name in names}, len(self.share.train), metrics

    def backprop(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """g_γ = (∂e_i/∂γ)ᵀ g_e, from the inputs and the γ of this round's encoding."""
        self._refuse("gradient")
        gradient = torch.from_numpy(arrays[DESCRIPTOR]).to(self.device)
        self.load({name: a for name, a in arrays.items() if name != DESCRIPTOR})
        self.encoder.zero_grad()
        e, _ = self.descriptor(config)
        e.backward(gradient)
        own = self.encoder.named_parameters(prefix="encoder")
        return to_numpy({n: p.grad if p.grad is not None else p * 0 for n, p in own}), {}

    # The encoder

    def described(self) -> Samples:
        """The samples behind its descriptor."""
        return self.share.everything if self.share.novel else self.share.train

    def told(self, x: Tensor, y: Tensor) -> Tensor:
        """What the encoder is given of samples x (n, *shape), y (n,): the inputs alone."""
        return x

    def descriptor(self, config: Config) -> tuple[Tensor, int]:
        """g({x}; γ) (d,) and the number of inputs behind it; differentiable.

        A generator of (seed, round, client) chooses and splits the inputs."""
        self.encoder.eval()
        samples = self.described().to(self.device)
        n = min(self.encode_samples, len(samples)) if self.encode_samples else len(samples)
        seed = seed_of(self.seed, "encode", int(config.get("server-round", 0)), self.client)
        order = torch.Generator().manual_seed(seed)
        rows = torch.randperm(len(samples), generator=order)[:n]
        passes = -(-n // self.encode_batch_size) if self.encode_batch_size else 1
        e = sum(
            self.encoder(self.told(*samples[batch])) * (len(batch) / n)
            for batch in rows.tensor_split(passes)
        )
        assert isinstance(e, Tensor)
        return e, n

    def fit_encoder(self, embedding: Tensor, config: Config) -> float:
        """SGD on ‖g(S_i; γ) − e_i‖², Eq. (13); returns its value before the first step."""
        optimizer = SGD(self.encoder.parameters(), self.encoder_local_lr)
        losses = []
        for _ in range(self.encoder_steps):
            loss = (self.descriptor(config)[0] - embedding.to(self.device)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.encoder.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses[0] if losses else 0.0


def digest(arrays: Arrays) -> str:
    """What tells one question from another."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        found.update(name.encode() + arrays[name].tobytes())
    return found.hexdigest()


def noise_scale(sensitivity: float, epsilon: float, delta: float) -> float:
    """s of N(0, s² I) for (ε, δ)-DP: s² = 2 Δ² ln(1.25/δ)/ε² for ε < 1, else the analytic one's."""
    if epsilon < 1:
        return sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / epsilon
    from dp_accounting import get_sigma_gaussian  # here: a slow import that few clients need

    return sensitivity * get_sigma_gaussian(epsilon, delta)
