"""ODPFL-HN client (Amosy et al., On-Demand Unlabeled Personalized Federated Learning, Algorithm 1;
supplement B and D). The client encodes its inputs by the server's encoder g(·; γ), trains the model
w_i that the server generates from this descriptor e_i, and backpropagates to γ. Its inputs never
leave the client.

Departs from the paper: an encoding in batches weighs them by their sizes, so a mean-pooling encoder
gives the same result as in one pass. For ε ≥ 1, where the classic Gaussian mechanism does not hold,
the noise is that of the analytic mechanism (Balle and Wang, ICML 2018)."""

import hashlib
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from clients.core.arrays import Arrays, to_numpy, to_tensors
from clients.core.client import Client, Config, Metrics
from clients.core.copies import copy_of
from clients.core.privacy import DP_GENERATOR, generator, noised
from clients.core.protocol import StateUse, round_of
from clients.core.sgd import SGD, clip_gradients, train_only
from clients.models.encoders import ENCODERS, Described
from fedapps.common.errors import Refusal
from fedapps.common.memory_limits import num_parts
from fedapps.common.seeds import seed_of
from fedapps.common.settings import COUNT, NONNEGATIVE, POSITIVE_INT, RATE, setting
from partitions.datasets.loading import Info
from partitions.shares import Samples

SIGMA = "dp-sigma"  # key of a reply's metrics: σ of a private descriptor's noise
DESCRIPTOR = "descriptor"  # e_i, or its gradient, on the wire
LEAST_EPSILON = 1e-20  # σ is about Δ/ε, and float32 ends at 3e38

DESCRIPTOR_EPSILON = setting(
    0.0, "ε of all descriptors that a novel client sends; 0: no noise", NONNEGATIVE
)
DESCRIPTOR_DELTA = setting(
    0.01, "δ that belongs to descriptor-epsilon", "(0, 1)", beside="descriptor-epsilon!=0.0"
)


class ODPFLHNClient(Client):
    """A client that describes its inputs by a set encoder.

    With `training` = "two-phase" it fits the encoder to the server's embedding, in `encoder_steps`
    steps of `encoder_local_lr`.

    A novel client with `descriptor_epsilon` > 0 adds Gaussian noise and answers at most
    `descriptor_answers` different γ. All its answers together have (ε, δ)-differential privacy
    with respect to replacing one input. For the same γ and inputs, it repeats its answer. The state
    keeps the spent privacy budget. A "seeded" `dp_generator` does not protect against people who
    know the run's seed."""

    exchanges = ("query.encode", "train.backprop")
    saves_state_after: tuple[str, ...] = ("query.encode",)
    state_across_runs = ("answer/", "sigma/", "spent")  # a novel client has one budget for all
    needs_state = StateUse.TRAINING  # a private novel client's answers, and what they spent
    rates = ("lr", "encoder_local_lr")
    model: Described  # by `build`

    encoder: Any = setting("ds", "set encoder; private: ds-sphere", tuple(ENCODERS))
    descriptor_dim = setting(
        0, "entries of a descriptor; 0: (training clients) / 4, rounded up", "[0, 4096]"
    )
    encode_samples = setting(0, "most inputs that a descriptor uses; 0: all", COUNT)
    encode_batch_size = setting(0, "inputs in one pass of the encoder; 0: all", COUNT)
    encoder_steps = setting(
        5,
        "two-phase: steps in a round that fit the encoder to the embedding",
        COUNT,
        beside="training=two-phase",
    )
    encoder_local_lr = setting(
        0.01, "two-phase: learning rate of encoder-steps", RATE, beside="training=two-phase"
    )
    encoder_local_clip_norm = setting(
        1.0,
        "two-phase: clip each gradient of encoder-steps to this norm; 0: off",
        NONNEGATIVE,
        beside="training=two-phase",
    )
    descriptor_epsilon = DESCRIPTOR_EPSILON
    descriptor_delta = DESCRIPTOR_DELTA
    descriptor_answers = setting(
        1,
        "encoders for which a private novel client sends descriptors; they share ε",
        POSITIVE_INT,
        beside="descriptor-epsilon!=0.0",
    )
    dp_generator = DP_GENERATOR

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.target = self.model.target
        self.encoder = self.model.encoder
        if self.descriptor_epsilon:
            self.encoder.sensitivity(1)  # raises ValueError where it has no bound
            if self.descriptor_epsilon < LEAST_EPSILON:
                raise ValueError(
                    f"descriptor-epsilon is {self.descriptor_epsilon:g}, whose noise no descriptor "
                    f"in float32 can hold; set at least {LEAST_EPSILON:g}, or 0 for no noise"
                )

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
        """The target network with its encoder; `descriptor_dim` 0 means `descriptor_size`."""
        dim = descriptor_dim or cls.descriptor_size(
            round(train_fraction * num_clients), num_clients
        )
        return Described(model, ENCODERS[encoder](model, cls.encoder_shape(info), dim))

    @classmethod
    def descriptor_size(cls, num_training: int, num_clients: int) -> int:
        """⌈n/4⌉ entries for n training clients."""
        return math.ceil(num_training / 4)

    @classmethod
    def encoder_shape(cls, info: Info) -> tuple[int, ...]:
        """The shape of one input of the encoder."""
        return tuple(info.shape)

    @property
    def private(self) -> bool:
        """Whether it is a novel client that reveals only a noisy descriptor."""
        return bool(self.descriptor_epsilon) and self.share.novel

    def is_tuned(self, name: str) -> bool:
        """The generated network, not the encoder."""
        return name.startswith("target.")

    def receive(self, arrays: Arrays, config: Config) -> None:
        """The generated network; a private novel client also reports ε and δ."""
        super().receive(arrays, config)
        if self.private:
            self.adaptation_metrics = {
                "epsilon": self.descriptor_epsilon,
                "delta": self.descriptor_delta,
            }

    def personal_model(self, x: Tensor) -> nn.Module:
        """The generated network, without the encoder."""
        return copy_of(self.target).eval()

    # The three exchanges

    def encode(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """e_i = g({x}; γ); a private novel client adds noise and reports its σ.

        Raises ValueError if that client's budget does not cover another γ."""
        if self.private:
            return self._private_answer(arrays, config)
        self.load(arrays)
        with torch.no_grad():
            e, _ = self.descriptor(config)
        return to_numpy({DESCRIPTOR: e}), {}

    def _private_answer(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """A noisy e_i and its σ; from the state if it has been computed for this γ and inputs."""
        samples = self.share.everything
        key = digest(arrays | {"inputs": samples.x[samples.index].numpy()})
        if f"answer/{key}" not in self.state:
            self.load(arrays)
            with torch.no_grad():
                e, n = self.descriptor(config)
            round_ = round_of(config)
            source = generator(self.dp_generator, self.seed, "dp", round_, self.client)
            sigma = self._spend(self.encoder.sensitivity(n))
            noisy = noised(to_numpy({DESCRIPTOR: e}), sigma, source)
            self.state[f"answer/{key}"] = noisy[DESCRIPTOR]
            self.state[f"sigma/{key}"] = np.array(sigma)
        metrics = {SIGMA: float(self.state[f"sigma/{key}"])}
        return {DESCRIPTOR: self.state[f"answer/{key}"]}, metrics

    def _spend(self, sensitivity: float) -> float:
        """σ of one more answer; its cost (Δ/σ)² is subtracted from the privacy budget.

        k answers with noise for sensitivity √k Δ are together as private as one for Δ (μ-GDP).
        Raises ValueError if the budget does not cover the answer."""
        budget = noise_scale(1.0, self.descriptor_epsilon, self.descriptor_delta) ** -2
        cost = budget / self.descriptor_answers
        spent = float(self.state.get("spent", 0.0))
        if spent + cost > budget * (1 + 1e-9):  # tolerance for rounding
            raise Refusal(
                f"this client has answered what descriptor-epsilon {self.descriptor_epsilon:g} and "
                f"descriptor-answers {self.descriptor_answers} allow; this is another encoder, or "
                "its data have changed"
            )
        self.state["spent"] = np.array(spent + cost)
        return sensitivity / cost**0.5

    def _refuse(self, what: str) -> None:
        """Raise ValueError for a private novel client, whose budget does not cover `what`."""
        if self.private:
            raise Refusal(
                f"descriptor-epsilon is {self.descriptor_epsilon:g}, and covers no {what} of a "
                "novel client, only its descriptor"
            )

    def domain(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """The answer of every client. Raises ValueError for a private novel client."""
        self._refuse("classifier")
        return super().domain(arrays, config)

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """w̃_i: local SGD from w_i; an embedding e_i, if there is one, fits the encoder."""
        self._refuse("trained model")
        model = {name: array for name, array in arrays.items() if name != DESCRIPTOR}
        self.load(model)
        with train_only(self.model, lambda name: name.startswith("target.")) as parameters:
            loss = self.fit_locally(config, parameters=parameters)
        metrics: Metrics = {"loss": loss}
        if DESCRIPTOR in arrays:
            metrics["encoder-loss"] = self.fit_encoder(to_tensors(arrays)[DESCRIPTOR], config)
        trained = to_numpy(self.model.state_dict())
        reply = {name: trained[name] for name in model}
        return reply, len(self.share.train), metrics

    def backprop(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """g_γ = (∂e_i/∂γ)ᵀ g_e, from the inputs and the γ of this round's encoding."""
        self._refuse("gradient")
        gradient = to_tensors(arrays, self.device)[DESCRIPTOR]
        self.load({name: a for name, a in arrays.items() if name != DESCRIPTOR})
        self.encoder.zero_grad()
        e, _ = self.descriptor(config)
        e.backward(gradient)
        gradients: dict[str, Tensor] = {}
        for name, p in self.encoder.named_parameters(prefix="encoder"):
            gradients[name] = p * 0 if p.grad is None else p.grad
        return to_numpy(gradients), {}

    # The encoder

    def described(self) -> Samples:
        """The samples that the descriptor uses."""
        return self.share.everything if self.share.novel else self.share.train

    def encoder_input(self, x: Tensor, y: Tensor) -> Tensor:
        """The encoder's input for samples x (n, *shape), y (n,): the inputs, without labels."""
        return x

    def descriptor(self, config: Config) -> tuple[Tensor, int]:
        """g({x}; γ) (d,), differentiable, and the number of inputs that it uses.

        A generator of (seed, round, client) chooses and splits the inputs."""
        self.encoder.eval()
        samples = self.described().to(self.device)
        n = len(samples)
        if self.encode_samples:
            n = min(n, self.encode_samples)
        seed = seed_of(self.seed, "encode", round_of(config), self.client)
        shuffling = torch.Generator().manual_seed(seed)
        rows = torch.randperm(len(samples), generator=shuffling)[:n]
        passes = num_parts((n, *samples.x.shape[1:]), self.pass_megabytes)
        if self.encode_batch_size:
            passes = max(passes, -(-n // self.encode_batch_size))
        terms = []
        for batch in rows.tensor_split(passes):
            e_batch = self.encoder(self.encoder_input(*samples[batch]))
            terms.append(e_batch * (len(batch) / n))
        e = sum(terms)
        assert isinstance(e, Tensor)
        return e, n

    def fit_encoder(self, embedding: Tensor, config: Config) -> float:
        """SGD on ‖g(S_i; γ) − e_i‖², Eq. (13); returns its value before the first step."""
        optimizer = SGD(self.encoder.parameters(), self.encoder_local_lr)
        losses = []
        for _ in range(self.encoder_steps):
            e, _ = self.descriptor(config)
            loss = (e - embedding.to(self.device)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            clip_gradients(optimizer.parameters(), self.encoder_local_clip_norm)
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses[0] if losses else 0.0


def digest(arrays: Arrays) -> str:
    """A hash of names and contents."""
    hasher = hashlib.sha256()
    for name in sorted(arrays):
        hasher.update(name.encode() + arrays[name].tobytes())
    return hasher.hexdigest()


def noise_scale(sensitivity: float, epsilon: float, delta: float) -> float:
    """s of N(0, s² I) for (ε, δ)-DP: s² = 2 Δ² ln(1.25/δ)/ε² for ε < 1, else the analytic noise."""
    if epsilon < 1:
        return sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / epsilon
    from dp_accounting import get_sigma_gaussian  # slow, and few clients need it

    return sensitivity * get_sigma_gaussian(epsilon, delta)
