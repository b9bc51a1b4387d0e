"""ODPFL-HN server (Amosy et al., On-Demand Unlabeled Personalized Federated Learning, Algorithm 1;
supplement B.2 for two-phase training).

A client gets three messages in a round: it encodes its inputs to e_i, trains w_i = f(e_i; θ), and
backpropagates g_e to the encoder's γ. A novel client, which has no labels, encodes and gets its
model. Departs from the paper: a round has any number of clients, whose gradients are averaged; the
last message carries γ again, so clients need not store it; buffers are averaged on the server (see
`strategies.methods._generated_networks`). Every answer of a private novel client spends ε, so it is
asked once, in the last round, which is then the reported one. The default limits of replies do not
protect it from one liar of ten (docs/reference/failures.md)."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from torch import Tensor, nn

from clients.core.arrays import Arrays, group, prefixed, to_numpy, to_tensors
from clients.core.optimizers import Optimizer
from clients.core.privacy import DP_GENERATOR
from clients.methods.odpfl_hn import DESCRIPTOR_DELTA, DESCRIPTOR_EPSILON
from fedapps.common.settings import RATE, ROUNDS, SHARE, setting
from strategies.core.aggregation import mean
from strategies.core.privacy import TEST_SETTING
from strategies.core.replies import Node, Requirement, Update
from strategies.maths.moments import Moments
from strategies.methods.pfedhn import DESCRIPTOR, PFedHN

TARGET, ENCODER = "target.", "encoder."
TERMS = (
    "one input of a novel client replaced, against the server; Gaussian mechanism (classic below "
    "ε = 1, else analytic), all its answers together; not covered: training clients, the number of "
    "its samples, its score in evaluations"
)
OUTPUT = "encoder.out.bias"  # has the size of the descriptor


class ODPFLHN(PFedHN):
    """With `training` = "two-phase" the hypernetwork first learns with free embeddings, to which
    clients fit the encoder; in the last `fine_tune_rounds` the encoder is frozen, and the
    hypernetwork is tuned on its descriptors. `descriptor_rate` > 0 centres and scales descriptors
    by running statistics of training clients (see `strategies.maths.moments`)."""

    any_model = False  # the encoder follows the target network's convolutions
    persistent_attributes = ("sigmas",)
    limit_groups = (ENCODER,)
    requires = Requirement(
        "odpfl-hn",
        "answer `query.encode` and `train.backprop`",
        offers=("query.encode", "train.backprop"),
    )

    server_lr = 0.5  # η_hn; this and the next four as published for MNIST by FedTTA
    server_momentum = 0.0
    server_weight_decay = 0.0
    clip_norm = 1.0
    encoder_lr = setting(0.5, "η_encoder, learning rate of the encoder", RATE)
    descriptor_rate = setting(
        0.0, "> 0: descriptors are centred and scaled by running statistics, so much a round", SHARE
    )
    training = setting(
        "end-to-end", "or in two phases: free embeddings, then tuning", ("end-to-end", "two-phase")
    )
    fine_tune_rounds = setting(
        10, "two-phase: last rounds, with the encoder frozen", ROUNDS, beside="training=two-phase"
    )
    descriptor_epsilon, descriptor_delta = DESCRIPTOR_EPSILON, DESCRIPTOR_DELTA
    dp_generator = DP_GENERATOR

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        if self.descriptor_rate and self.training == "two-phase":
            raise ValueError(
                "descriptor-rate is for end-to-end training; of two phases the first teaches the "
                "encoder the scale of the embeddings"
            )
        self.moments = Moments(self.descriptor_rate)
        self.private = self.descriptor_epsilon > 0
        if self.novel_rounds:
            raise ValueError(
                f"novel-rounds is {self.novel_rounds}, but a descriptor serves novel clients at "
                "once: in such rounds their labels would train the encoder, and be scored after"
            )
        if self.private and self.report_generalization_bound:
            raise ValueError(
                "report-generalization-bound asks novel clients for exact gradients of their "
                f"inputs, which odpfl-hn.descriptor-epsilon {self.descriptor_epsilon:g} does not "
                "cover; set one"
            )
        self._promise = {
            "dp-epsilon": self.descriptor_epsilon,
            "dp-delta": self.descriptor_delta,
            "dp-generator": self.dp_generator,
            "dp-terms": TERMS + (TEST_SETTING if self.dp_generator != "system" else ""),
        }
        self.report_last_round = self.private
        self.gamma: dict[str, nn.Parameter] = {}
        self.descriptors: dict[int, Tensor] = {}  # this round's e_i by client id
        self.sigmas: list[float] = []

    # Hooks

    def initialize(self, arrays: Arrays) -> Arrays:
        """The target network is the template; the encoder's arrays are γ."""
        target = {n: a for n, a in arrays.items() if n.startswith(TARGET)}
        encoder = {n: a for n, a in arrays.items() if n.startswith(ENCODER)}
        if not target or OUTPUT not in encoder:
            raise ValueError(
                f"odpfl-hn needs {TARGET}… and {OUTPUT} arrays, not {list(arrays)}; "
                f"use `{type(self).requires.usage}`"
            )
        too_short = 0 < self.num_rounds <= self.fine_tune_rounds and self.former is None
        if self.training == "two-phase" and too_short:
            raise ValueError(
                f"two-phase training of {self.num_rounds} rounds with {self.fine_tune_rounds} "
                "fine-tune-rounds would never train the encoder; set fewer of these"
            )
        super().initialize(target)
        self.gamma = {n: nn.Parameter(t.clone()) for n, t in to_tensors(encoder).items()}
        self._encoder_optimizer = self._optimizer(self.gamma.values(), self.encoder_lr)
        self.embedding_dim = encoder[OUTPUT].shape[0]
        return self.server_arrays()

    def restore(self, arrays: Arrays, saved: Arrays) -> Arrays:
        """Saved φ, γ, descriptors' statistics and free embeddings."""
        self.network().load_state_dict(to_tensors(group(saved, "hypernetwork")))
        encoder = group(saved, "encoder")
        with torch.no_grad():
            for name, parameter in self.gamma.items():
                parameter.copy_(torch.from_numpy(encoder[name]))
        for client, embedding in to_tensors(group(saved, "embedding")).items():
            self._remember(int(client), embedding.clone())
        for name, moment in to_tensors(group(saved, "moments")).items():
            setattr(self.moments, name, moment.clone())
        self.targets.load(group(saved, "buffer"))
        return self.server_arrays()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Private novel clients are only asked in the last round."""
        last = server_round == self.num_rounds
        self.evaluate_novel = self._serves_novel and (last or not self.private)
        return super().configure_evaluate(server_round, arrays, config, grid)

    def broadcast(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """w_i = f(e_i; θ) for the nodes that encoded; with free embeddings also e_i and γ."""
        self.selection_phase = 0 if self.free or self.training != "two-phase" else 1
        payloads = super().broadcast(arrays, nodes)
        if not self.free:
            return payloads
        gamma = self._gamma()
        return {
            node: model | gamma | to_numpy({DESCRIPTOR: self.embeddings[node.client]})
            for node, model in payloads.items()
        }

    def expected(self, sent: Arrays) -> Arrays:
        """What was sent, without the embedding."""
        return {name: a for name, a in sent.items() if name != DESCRIPTOR}

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """Descend on θ by g_θ, then on γ by the mean of the clients' g_γ = (∂e_i/∂γ)ᵀ g_e."""
        super().aggregate(arrays, updates)
        if self.free:
            encoders = [
                {n: a for n, a in u.arrays.items() if n.startswith(ENCODER)} for u in updates
            ]
            with torch.no_grad():
                for name, array in mean(encoders).items():
                    self.gamma[name].copy_(torch.from_numpy(array))
        elif self.training == "end-to-end":
            self._descend_on_encoder([update.node for update in updates])
        return self.server_arrays()

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Private novel clients have encoded since the round's training was reported."""
        self.now.report |= self.report()
        return super().aggregate_evaluate(server_round, replies)

    def report(self) -> dict[str, Any]:
        """Also novel clients' privacy, and the largest σ that they added."""
        promise = self._promise | {"dp-sigma": max(self.sigmas)} if self.sigmas else {}
        return super().report() | promise

    def optimizers(self) -> list[Optimizer]:
        """Also that of the encoder."""
        return [*super().optimizers(), self._encoder_optimizer]

    # Descriptors

    @property
    def free(self) -> bool:
        """Whether training clients have free embeddings: phase one of two-phase training."""
        last = self.num_rounds - self.fine_tune_rounds
        return self.training == "two-phase" and self.round <= last

    @property
    def may_stop(self) -> bool:
        """Not while embeddings are free."""
        return super().may_stop and not self.free

    def ensure_embeddings(self, nodes: Sequence[Node]) -> list[Node]:
        """Let the nodes encode; returns those that did, and those with free embeddings."""
        with_free = [node for node in nodes if self.free and not node.novel]
        self.descriptors = {}
        gamma, encoding = self._gamma(), [node for node in nodes if node not in with_free]
        like = {DESCRIPTOR: np.zeros(self.embedding_dim, gamma[OUTPUT].dtype)}
        for update in self.exchange(
            "query.encode", dict.fromkeys(encoding, gamma), like=dict.fromkeys(encoding, like)
        ):
            e = torch.from_numpy(update.arrays[DESCRIPTOR].copy())
            self.descriptors[update.node.client] = e.requires_grad_(self.training == "end-to-end")
            if "dp-sigma" in update.metrics:
                self.sigmas.append(update.metrics["dp-sigma"])
        met = {
            node.client for node in super().ensure_embeddings(with_free)
        } | self.descriptors.keys()
        return [node for node in nodes if node.client in met]

    def embedding(self, client: int) -> Tensor:
        """The client's descriptor, centred and scaled, or its free embedding."""
        if client in self.descriptors:
            return self.moments.scaled(self.descriptors[client])
        return super().embedding(client)

    def update_descriptor_statistics(self, nodes: Sequence[Node]) -> None:
        """Update the descriptors' statistics; the first ones are of all training clients."""
        if not self.moments.rate:
            return
        sampled = self.descriptors
        observed = {c: sampled[c] for c in (n.client for n in nodes) if c in sampled}
        if not len(self.moments.mean):
            self.ensure_embeddings([n for n in self.training_nodes() if n.client not in sampled])
            observed |= self.descriptors
            self.descriptors = sampled
        if observed:
            self.moments.update(torch.stack(list(observed.values())))

    def server_arrays(self) -> Arrays:
        """Also ``encoder/…`` and ``moments/…``, which share memory."""
        gamma = {name: p.detach().numpy() for name, p in self.gamma.items()}
        moments = {"mean": self.moments.mean, "variance": self.moments.variance}
        known = {name: moment.numpy() for name, moment in moments.items() if len(moment)}
        return super().server_arrays() | prefixed("encoder", gamma) | prefixed("moments", known)

    def _gamma(self) -> Arrays:
        return to_numpy(self.gamma)

    def _descend_on_encoder(self, nodes: Sequence[Node]) -> None:
        gamma = self._gamma()
        payloads = {}
        for node in nodes:
            g_e = self.descriptors[node.client].grad
            assert g_e is not None
            payloads[node] = gamma | to_numpy({DESCRIPTOR: g_e})
        replies = self.exchange("train.backprop", payloads, like=dict.fromkeys(payloads, gamma))
        if not replies:
            return
        for name, gradient in mean([reply.arrays for reply in replies]).items():
            self.gamma[name].grad = torch.from_numpy(gradient)
        if self.clip_norm > 0:
            nn.utils.clip_grad_norm_(self.gamma.values(), self.clip_norm)
        self._encoder_optimizer.step(self.decay)
