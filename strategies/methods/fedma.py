"""FedMA, federated matched averaging (Wang et al., ICLR 2020, Algorithm 1, with communication).

One round: the clients train their networks; layer by layer the server matches their neurons,
averages the matched ones and freezes the layer, and the clients retrain the layers above; the
last layer is averaged. The next round starts each client from the global neurons that its neurons
were matched to, so its network keeps its size while the global one grows within bounds. Departs
from the paper: the cost is the squared distance, not the posterior of a Beta-Bernoulli process; the
last layer is weighted by sample counts, not by class; a client that was not in the last round
starts from the neurons with the largest support. Novel clients get the global model. The default
limits of replies do not protect it from one liar of ten (docs/reference/failures.md)."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from clients.core.arrays import Arrays, prefixed
from clients.core.layer_chain import chain, width
from clients.core.saved_states import TAKE_THE_SAME
from fedapps.common.settings import NONNEGATIVE, setting
from strategies.core.aggregation import weighted_mean
from strategies.core.replies import Node, Requirement, Update
from strategies.core.run_state import in_order_of
from strategies.core.strategy import PersonalizedStrategy
from strategies.maths.matching import layer_arrays, match, neurons, scatter_columns, take


class FedMA(PersonalizedStrategy):
    """A new global neuron costs `new_neuron_cost` times the mean squared norm of the layer's
    neurons. No layer grows beyond `max_growth` times its width. `sweeps`: see `matching.match`."""

    persistent_attributes = ("support", "assignments")
    requires = Requirement("fedma", "answer `train.retrain`", offers=("train.retrain",))

    new_neuron_cost = setting(
        1.0, "cost of a new neuron, as a multiple of the mean squared norm of neurons", NONNEGATIVE
    )
    max_growth = setting(
        1.5, "largest width of a layer, as a multiple of the clients' width", "[1, 100]"
    )
    sweeps = setting(1, "further matching passes over the clients after the first", "[0, 1000]")

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.layers: list[str] = []
        self.widths: dict[str, int] = {}  # of the clients' networks
        self.support: dict[str, np.ndarray] = {}  # clients by global neuron
        self.assignments: dict[int, dict[str, np.ndarray]] = {}  # of the last round's clients

    def initialize(self, arrays: Arrays) -> Arrays:
        """The initial network. Raises ValueError unless it is a chain of two or more layers."""
        self.layers = chain(arrays)
        self.widths = {layer: width(arrays, layer) for layer in self.layers}
        self.support = {layer: np.ones(n, int) for layer, n in self.widths.items()}
        return arrays

    def restore(self, arrays: Arrays, saved: Arrays) -> Arrays:
        """The global network of another run, whose hidden layers may have grown. Raises ValueError
        as the base, and for other inputs or outputs."""
        restored = in_order_of(arrays, saved)
        first, last = f"{self.layers[0]}.weight", f"{self.layers[-1]}.weight"
        same_inputs = restored[first].shape[1:] == arrays[first].shape[1:]
        same_outputs = len(restored[last]) == len(arrays[last])
        if not (same_inputs and same_outputs):
            raise ValueError(f"the saved network has other inputs or outputs: {TAKE_THE_SAME}")
        return restored

    def broadcast(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """Each client's part of the global network, of the initial size."""
        most_supported = {}  # for clients that were not in the last round
        for layer in self.layers[:-1]:
            by_support = np.argsort(-self.support[layer], kind="stable")
            most_supported[layer] = np.sort(by_support[: self.widths[layer]])
        payloads = {}
        for node in nodes:
            assignment = self.assignments.get(node.client, most_supported)
            payloads[node] = self.part(arrays, assignment)
        return payloads

    def part(self, arrays: Arrays, assignment: dict[str, np.ndarray]) -> Arrays:
        """The sub-network of the assigned global neurons."""
        network = dict(arrays)
        for layer, following in pairwise(self.layers):
            rows = assignment[layer]
            for name in (f"{layer}.weight", f"{layer}.bias"):
                network[name] = network[name][rows]
            next_weight = f"{following}.weight"
            network[next_weight] = take(network[next_weight], rows, width(arrays, layer))
        return network

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """Match, freeze and retrain, layer by layer; the mean of the last one."""
        counts = {update.node: float(update.num_examples) for update in updates}
        networks = {update.node: dict(update.arrays) for update in updates}
        self.assignments = {node.client: {} for node in networks}
        merged: Arrays = {}
        for layer, following in pairwise(self.layers):
            matched = match(
                [neurons(network, layer) for network in networks.values()],
                [counts[node] for node in networks],
                new_neuron_cost=self.new_neuron_cost,
                max_width=int(self.max_growth * self.widths[layer]),
                sweeps=self.sweeps,
            )
            self.support[layer] = matched.support
            merged |= layer_arrays(matched.neurons, layer, next(iter(networks.values())))
            next_weight = f"{following}.weight"
            for node, assigned in zip(networks, matched.assignments, strict=True):
                self.assignments[node.client][layer] = assigned
                network = networks[node]
                columns = network[next_weight]
                network[next_weight] = scatter_columns(columns, assigned, len(matched.neurons))
                del network[f"{layer}.weight"]
                del network[f"{layer}.bias"]
            networks = self.retrain(merged, networks)
        last_layer = weighted_mean(list(networks.values()), [counts[node] for node in networks])
        # Clients that did not retrain to the end have no complete assignment.
        self.assignments = {node.client: self.assignments[node.client] for node in networks}
        return merged | last_layer

    def retrain(self, frozen: Arrays, networks: dict[Node, Arrays]) -> dict[Node, Arrays]:
        """The clients' upper layers, trained on top of the frozen ones.

        Raises RuntimeError if fewer than min-valid-replies come back."""
        payloads = {}
        for node, upper_layers in networks.items():
            payloads[node] = prefixed("frozen", frozen) | upper_layers
        replies = self.exchange("train.retrain", payloads, like=networks)
        if len(replies) < self.min_valid_replies:
            raise RuntimeError(
                f"round {self.round}: {len(replies)} valid replies of {len(networks)} to "
                f"train.retrain, min-valid-replies is {self.min_valid_replies}; "
                f"{self.now.failure}"
            )
        return {reply.node: dict(reply.arrays) for reply in replies}

    def report(self) -> dict[str, float]:
        """The width of all hidden layers, as a ratio to the clients'."""
        hidden = self.layers[:-1]
        global_width = sum(len(self.support[layer]) for layer in hidden)
        client_width = sum(self.widths[layer] for layer in hidden)
        return {"growth": global_width / client_width}
