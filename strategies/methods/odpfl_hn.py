"""ODPFL-HN server (Amosy et al., On-Demand Unlabeled Personalized Federated Learning, Algorithm 1;
supplement B.2 for two-phase training).

A client gets three messages in a round: it encodes its inputs to e_i, trains w_i = f(e_i; θ), and
backpropagates g_e to the encoder's γ. A novel client, which has no labels, encodes and gets its
model.

Departs from the paper: a round has any number of clients, whose gradients are averaged; the last
message carries γ again, so clients need not store it; buffers are averaged on the server (see
`strategies.methods._generated_networks`). Every answer of a private novel client spends ε, so the
server asks it once, in the last round, which is then the reported one. The default limits of
replies do not protect the method from one liar of ten (docs/reference/failures.md)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import Message, MetricRecord
from torch import Tensor, nn

from clients.core.arrays import Arrays, group, prefixed, to_numpy, to_tensors
from clients.core.privacy import DP_GENERATOR
from clients.core.saved_states import TAKE_THE_SAME
from clients.core.sgd import Optimizer
from clients.methods.odpfl_hn import DESCRIPTOR, DESCRIPTOR_DELTA, DESCRIPTOR_EPSILON, SIGMA
from clients.methods.pfedhn import NOVEL_ROUNDS
from fedapps.common.settings import RATE, ROUNDS, SHARE, setting
from strategies.core.aggregation import mean
from strategies.core.privacy import TEST_SETTING
from strategies.core.replies import Node, Requirement, Update
from strategies.core.strategy import PersonalizedStrategy
from strategies.maths.moments import Moments
from strategies.methods._generated_networks import (
    GeneratorSettings,
    ModelGenerator,
    Targets,
    build_optimizer,
)

TARGET = "target."  # names of the generated network's arrays
ENCODER = "encoder."
OUTPUT = "encoder.out.bias"  # has the size of the descriptor
TERMS = (
    "one input of a novel client replaced, against the server; Gaussian mechanism (classic below "
    "ε = 1, else analytic), all its answers together; not covered: training clients, the number of "
    "its samples, its score in evaluations"
)


class ODPFLHN(GeneratorSettings, PersonalizedStrategy):
    """With `training` = "two-phase" the hypernetwork first learns with free embeddings, to which
    clients fit the encoder. In the last `fine_tune_rounds` the encoder is frozen, and the
    hypernetwork is tuned on its descriptors. `descriptor_rate` > 0 centres and scales descriptors
    by running statistics of training clients (see `strategies.maths.moments`).

    `network` and `buffers` are those of `PFedHN`."""

    keeps_arrays = True
    in_place = True  # the arrays are the parameters that the optimizers move
    persistent_attributes = ("sigmas",)
    limit_groups = (ENCODER,)
    requires = Requirement(
        "odpfl-hn",
        "answer `query.encode` and `train.backprop`",
        offers=("query.encode", "train.backprop"),
    )

    server_lr = 0.5  # η_hn and `encoder_lr`: published for MNIST by FedTTA
    # Not published: ours.
    server_momentum = 0.0
    server_weight_decay = 0.0
    clip_norm = 1.0
    encoder_lr = setting(0.5, "η_encoder, learning rate of the encoder", RATE)
    descriptor_rate = setting(
        0.0,
        "weight of a round in the running statistics that centre and scale descriptors; 0: off",
        SHARE,
    )
    training = setting(
        "end-to-end",
        "train end to end, or first with free embeddings, then tune",
        ("end-to-end", "two-phase"),
    )
    fine_tune_rounds = setting(
        10,
        "two-phase: last rounds, in which the encoder is frozen",
        ROUNDS,
        beside="training=two-phase",
    )
    descriptor_epsilon = DESCRIPTOR_EPSILON
    descriptor_delta = DESCRIPTOR_DELTA
    dp_generator = DP_GENERATOR
    novel_rounds = NOVEL_ROUNDS

    def __init__(
        self,
        *,
        network: nn.Module | Mapping[str, nn.Module] | None = None,
        buffers: Sequence[str] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.two_phase = self.training == "two-phase"
        self.private = self.descriptor_epsilon > 0
        self._check_settings()
        self._modules = {"": network} if isinstance(network, nn.Module) else network
        self._buffers = buffers
        self._promise = {
            "dp-epsilon": self.descriptor_epsilon,
            "dp-delta": self.descriptor_delta,
            "dp-generator": self.dp_generator,
            "dp-terms": TERMS + (TEST_SETTING if self.dp_generator != "system" else ""),
        }
        self.report_last_round = self.private
        self.generator: ModelGenerator  # f(·; θ) and the free embeddings
        self.gamma: dict[str, nn.Parameter] = {}  # γ, the encoder's parameters
        self.moments = Moments(self.descriptor_rate)
        self.descriptors: dict[Node, Tensor] = {}  # e_i of this round's training nodes
        self.sigmas: list[float] = []  # noise that private novel clients added

    def _check_settings(self) -> None:
        """Raise ValueError for settings that exclude each other."""
        if self.descriptor_rate and self.two_phase:
            raise ValueError(
                "descriptor-rate is for end-to-end training; of two phases the first teaches the "
                "encoder the scale of the embeddings"
            )
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

    # The run

    def check_rounds(self, count: int, *, continues: bool) -> None:
        """Raise ValueError if a run of two phases has no rounds for the first one."""
        if continues or not self.two_phase:
            return
        if 0 < count <= self.fine_tune_rounds:
            raise ValueError(
                f"two-phase training of {count} rounds with {self.fine_tune_rounds} "
                "fine-tune-rounds would never train the encoder; set fewer of these"
            )

    def initialize(self, arrays: Arrays) -> Arrays:
        """The target network is the template; the encoder's arrays are γ."""
        target = {name: a for name, a in arrays.items() if name.startswith(TARGET)}
        encoder = {name: a for name, a in arrays.items() if name.startswith(ENCODER)}
        if not target or OUTPUT not in encoder:
            raise ValueError(
                f"odpfl-hn needs {TARGET}… and {OUTPUT} arrays, not {list(arrays)}; "
                f"use `{type(self).requires.usage}`"
            )
        continues = self.former is not None
        self.check_rounds(self.num_rounds, continues=continues)
        self.generator = ModelGenerator(
            self,
            Targets({"": target}, self._modules, self._buffers, type(self).__name__),
            self.seed,
            embedding_dim=encoder[OUTPUT].shape[0],
        )
        serves_only = self.num_rounds == 0 and continues
        if not serves_only:
            self.generator.check_memory()
        for name, tensor in to_tensors(encoder).items():
            self.gamma[name] = nn.Parameter(tensor.clone())
        self._encoder_optimizer = build_optimizer(self, self.gamma.values(), self.encoder_lr)
        return self.server_arrays()

    def restore(self, arrays: Arrays, saved: Arrays) -> Arrays:
        """Saved φ, γ, descriptors' statistics and free embeddings."""
        self.generator.restore(saved)
        encoder = group(saved, "encoder")
        saved_shapes = {name: array.shape for name, array in encoder.items()}
        own_shapes = {name: parameter.shape for name, parameter in self.gamma.items()}
        if saved_shapes != own_shapes:
            raise ValueError(
                "the saved run has no encoder, or one of other layers: "
                f"{TAKE_THE_SAME}, and the encoder's settings"
            )
        with torch.no_grad():
            for name, parameter in self.gamma.items():
                parameter.copy_(torch.from_numpy(encoder[name]))
        for name, moment in to_tensors(group(saved, "moments")).items():
            setattr(self.moments, name, moment.clone())
        return self.server_arrays()

    def forget(self) -> None:
        """θ, the free embeddings, and their optimizer."""
        self.generator.forget()

    def optimizers(self) -> list[Optimizer]:
        """The one of θ and free embeddings, and the encoder's."""
        return [self.generator.built_optimizer(), self._encoder_optimizer]

    def server_arrays(self) -> Arrays:
        """The generator's arrays, ``encoder/…`` and ``moments/…``, which share memory."""
        gamma = {name: parameter.detach().numpy() for name, parameter in self.gamma.items()}
        moments = {"mean": self.moments.mean, "variance": self.moments.variance}
        known_moments = {name: moment.numpy() for name, moment in moments.items() if len(moment)}
        return (
            self.generator.arrays()
            | prefixed("encoder", gamma)
            | prefixed("moments", known_moments)
        )

    @property
    def free(self) -> bool:
        """Whether training clients have free embeddings: phase one of two-phase training."""
        return self.two_phase and self.round <= self.num_rounds - self.fine_tune_rounds

    @property
    def may_stop(self) -> bool:
        """Not while embeddings are free."""
        return super().may_stop and not self.free

    @property
    def evaluates_novel(self) -> bool:
        """Private novel clients are asked only in the last round."""
        return super().evaluates_novel and (not self.private or self.round == self.num_rounds)

    # A round

    def broadcast(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """w_i = f(e_i; θ) for the nodes that encoded. In the phase of free embeddings e_i is the
        node's embedding, which its message also holds, beside γ."""
        if self.free:
            return self._broadcast_free(nodes)
        self.selection_phase = 1 if self.two_phase else 0
        self.descriptors = self._request_descriptors(nodes)
        self._update_descriptor_statistics()
        return self.generator.models_to_train(self._scaled(self.descriptors))

    def _broadcast_free(self, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        self.selection_phase = 0
        embeddings_before = len(self.generator.embeddings)
        embeddings = self._free_embeddings(nodes)
        if len(self.generator.embeddings) > embeddings_before:
            self.arrays = self.server_arrays()  # the state to which an undone round returns
        payloads = self.generator.models_to_train(embeddings)
        gamma = to_numpy(self.gamma)
        for node, model in payloads.items():
            payloads[node] = model | gamma | to_numpy({DESCRIPTOR: embeddings[node]})
        return payloads

    def expected(self, sent: Arrays) -> Arrays:
        """What was sent, without the embedding."""
        return {name: a for name, a in sent.items() if name != DESCRIPTOR}

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """Descend on θ by g_θ, then on γ by the mean of the clients' g_γ = (∂e_i/∂γ)ᵀ g_e. With
        free embeddings γ is the mean of the clients' encoders."""
        self.generator.descend(updates, self.decay)
        self.generator.targets.average(updates)
        if self.free:
            self._average_encoders(updates)
        elif not self.two_phase:
            self._descend_on_encoder([update.node for update in updates])
        return self.server_arrays()

    def _average_encoders(self, updates: Sequence[Update]) -> None:
        encoders = []
        for update in updates:
            encoders.append({n: a for n, a in update.arrays.items() if n.startswith(ENCODER)})
        with torch.no_grad():
            for name, array in mean(encoders).items():
                self.gamma[name].copy_(torch.from_numpy(array))

    def _descend_on_encoder(self, nodes: Sequence[Node]) -> None:
        """One step along the mean of the nodes' g_γ, which they compute from their g_e."""
        gamma = to_numpy(self.gamma)  # sent again, so that clients need not store it
        payloads = {}
        for node in nodes:
            g_e = self.descriptors[node].grad
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

    def personalize(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """w_i = f(e_i; θ) for every node that answers the request for its descriptor. While
        embeddings are free, training nodes have the model of theirs."""
        with_embedding = []
        encoding = []
        for node in nodes:
            if self.free and not node.novel:
                with_embedding.append(node)
            else:
                encoding.append(node)
        vectors = self._free_embeddings(with_embedding)
        vectors |= self._scaled(self._request_descriptors(encoding))
        return self.generator.models({node: vectors[node] for node in nodes if node in vectors})

    def report(self) -> dict[str, Any]:
        """The relative spread of the round's generated weights; novel clients' privacy, and the
        largest σ that they added."""
        report: dict[str, Any] = {}
        if self.generator.weight_spread is not None:
            report["weights-spread"] = self.generator.weight_spread
        if self.sigmas:
            report |= self._promise
            report["dp-sigma"] = max(self.sigmas)
        return report

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Private novel clients have encoded since the round's training was reported."""
        self.now.report |= self.report()
        return super().aggregate_evaluate(server_round, replies)

    # Descriptors

    def _request_descriptors(self, nodes: Sequence[Node]) -> dict[Node, Tensor]:
        """Let the nodes encode: e_i (embedding_dim,) of each node that answers."""
        gamma = to_numpy(self.gamma)
        like = {DESCRIPTOR: np.zeros(self.generator.embedding_dim, gamma[OUTPUT].dtype)}
        descriptors = {}
        for update in self.exchange(
            "query.encode", dict.fromkeys(nodes, gamma), like=dict.fromkeys(nodes, like)
        ):
            e = torch.from_numpy(update.arrays[DESCRIPTOR].copy())
            descriptors[update.node] = e.requires_grad_(not self.two_phase)
            if SIGMA in update.metrics:
                self.sigmas.append(update.metrics[SIGMA])
        return descriptors

    def _update_descriptor_statistics(self) -> None:
        """Add this round's descriptors to the statistics; the first statistics are those of all
        training clients, so the clients that were not sampled encode as well."""
        if not self.moments.rate:
            return
        observed = dict(self.descriptors)
        if not len(self.moments.mean):
            others = [node for node in self.training_nodes() if node not in observed]
            observed |= self._request_descriptors(others)
        if observed:
            self.moments.update(torch.stack(list(observed.values())))

    def _scaled(self, descriptors: Mapping[Node, Tensor]) -> dict[Node, Tensor]:
        """The descriptors, centred and scaled."""
        return {node: self.moments.scaled(e) for node, e in descriptors.items()}

    def _free_embeddings(self, nodes: Sequence[Node]) -> dict[Node, Tensor]:
        """The nodes' free embeddings; new ones start at N(0, I)."""
        for node in nodes:
            if node.client not in self.generator.embeddings:
                self.generator.draw_embedding(node.client)
        return {node: self.generator.embeddings[node.client] for node in nodes}
