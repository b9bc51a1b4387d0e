"""FedAMP client (Huang et al., AAAI 2021, Algorithm 1): F_i(w) + λ/(2α)‖w − u_i‖², from u_i."""

from typing import Any

from clients.fedprox import FedProxClient


class FedAMPClient(FedProxClient):
    """FedProx's client, to whom the server sends u_i; `mu` is λ/α."""

    offers = ("proximal",)

    def __init__(self, *args: Any, mu: float = 0.1, **options: Any) -> None:
        super().__init__(*args, mu=mu, **options)
