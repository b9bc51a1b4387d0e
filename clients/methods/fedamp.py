"""FedAMP client (Huang et al., AAAI 2021, Algorithm 1): F_i(w) + λ/(2α)‖w − u_i‖², from u_i."""

from clients.methods.fedprox import FedProxClient


class FedAMPClient(FedProxClient):
    """FedProx's client; the server sends u_i, and `mu` is λ/α."""

    offers = ("proximal",)
    mu = 0.1
