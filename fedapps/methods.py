"""THE table: name → (strategy, client)."""

from dataclasses import dataclass

from clients.base import Client
from clients.fedper import FedPerClient
from clients.fedprox import FedProxClient
from clients.fedtta import FedTTAClient, FedTTAPlusPlusClient, FedTTAProxClient
from clients.local import LocalClient
from clients.tent import TENTClient
from strategies.base import PersonalizedStrategy
from strategies.fedavg import FedAvg
from strategies.fedtta import FedTTA
from strategies.pfedhn import PFedHN


@dataclass(frozen=True)
class Method:
    """A method: its server half, its client half, where it comes from.

    `novel` says what an unlabeled novel client gets: "global" (the global model), "adapted" (a
    model of its own) or "" (nothing: the method cannot serve it)."""

    strategy: type[PersonalizedStrategy]
    client: type[Client]
    paper: str
    line: str
    novel: str = ""


METHODS = {
    "local": Method(FedAvg, LocalClient, "–", "every client alone"),
    "fedavg": Method(
        FedAvg,
        Client,
        "McMahan et al., AISTATS 2017",
        "one global model, mean weighted by samples",
        "global",
    ),
    "fedprox": Method(
        FedAvg,
        FedProxClient,
        "Li et al., MLSys 2020",
        "FedAvg with a proximal term on the client",
        "global",
    ),
    "fedper": Method(
        FedAvg, FedPerClient, "Arivazhagan et al., 2019", "shared body, personal head"
    ),
    "tent": Method(
        FedAvg,
        TENTClient,
        "Wang et al., ICLR 2021",
        "FedAvg, then entropy minimisation on the client's inputs",
        "adapted",
    ),
    "pfedhn": Method(
        PFedHN,
        Client,
        "Shamsian et al., ICML 2021",
        "a hypernetwork on the server generates every client's model",
    ),
    "fedtta": Method(
        FedTTA,
        FedTTAClient,
        "Ye et al., UPFL, 2023",
        "a base model and a model that adapts it without labels, one step",
        "adapted",
    ),
    "fedtta-prox": Method(
        FedTTA,
        FedTTAProxClient,
        "Ye et al., UPFL, 2023",
        "FedTTA whose base model stays close to the server's",
        "adapted",
    ),
    "fedtta++": Method(
        FedTTA,
        FedTTAPlusPlusClient,
        "Ye et al., UPFL, 2023",
        "FedTTA-Prox that adapts until the entropy stops falling",
        "adapted",
    ),
}
