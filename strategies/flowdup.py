"""FLowDUP's server (Zakerinia, Scott and Lampert, ICML 2026): the mean of ψ over training clients
with and without labels, see `clients.flowdup`."""

from strategies.fedavg import FedAvg


class FLowDUP(FedAvg):
    """FedAvg whose training clients may lack labels."""

    trains_unlabeled = True
