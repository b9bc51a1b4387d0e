"""What this package uses of Flower's older API. No other module imports from it."""

from flwr.client import NumPyClient
from flwr.common import (
    Code,
    EvaluateIns,
    FitIns,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)

__all__ = ["Code", "EvaluateIns", "FitIns", "NumPyClient", "ndarrays_to_parameters",
           "parameters_to_ndarrays"]  # fmt: skip
