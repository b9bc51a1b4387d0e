"""The former place of these names, kept for one release: import them from `fedapps.strategies`."""

from strategies.methods.fedavg import FedAvg

__all__ = ["FedAvg"]
