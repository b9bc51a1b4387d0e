"""THE table: name → (strategy, client)."""

from dataclasses import dataclass

from clients.base import Client
from clients.fedembed import FedEmbedClient
from clients.fedper import FedPerClient
from clients.fedprox import FedProxClient
from clients.local import LocalClient
from clients.preference import GlobalClient, GlobalPlusClient
from clients.tent import TENTClient
from strategies.base import PersonalizedStrategy
from strategies.fedavg import FedAvg
from strategies.fedembed import FedEmbed
from strategies.pfedhn import PFedHN
from strategies.preference import CentralAdam, PFedKM


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
    "fedembed": Method(
        FedEmbed,
        FedEmbedClient,
        "Silva et al., 2022",
        "personal embeddings, heads of sub-populations; needs the preference partition",
    ),
    "global": Method(
        CentralAdam,
        GlobalClient,
        "Silva et al., 2022",
        "one head for users with conflicting labels; needs the preference partition",
    ),
    "global+": Method(
        CentralAdam,
        GlobalPlusClient,
        "Silva et al., 2022",
        "global, conditioned on personal embeddings; needs the preference partition",
    ),
    "pfedkm": Method(
        PFedKM,
        GlobalClient,
        "Tang et al., 2021",
        "heads shared within clusters of gradients; needs the preference partition",
    ),
}
