"""THE table: name → (strategy, client)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clients.afl import AFLClient
from clients.apfl import APFLClient
from clients.base import Client
from clients.ditto import DittoClient
from clients.fedadg import FedADGClient
from clients.fedala import FedALAClient
from clients.fedamp import FedAMPClient
from clients.fedbabu import FedBABUClient
from clients.fedbn import FedBNClient
from clients.fedembed import FedEmbedClient
from clients.fedma import FedMAClient
from clients.fedmd import FedMDClient, HeteroTENTClient
from clients.fedper import FedPerClient
from clients.fedprox import FedProxClient
from clients.fedrep import FedRepClient
from clients.fedsr import FedSRClient
from clients.fedtta import (
    FedTTAClient,
    FedTTAPlusPlusClient,
    FedTTAProxClient,
    GuardedFedTTAPlusPlusClient,
)
from clients.heterofedtta import HeteroFedTTAClient
from clients.lgfedavg import LGFedAvgClient
from clients.local import LocalClient
from clients.odpfl_hn import ODPFLHNClient
from clients.pefll import PeFLLClient
from clients.perfedavg import PerFedAvgClient
from clients.pfedhn import PFedHNClient, PFedHNPCClient
from clients.pfedme import PFedMeClient
from clients.pfl import PFLClient, PFLSampledClient
from clients.preference import GlobalClient, GlobalPlusClient
from clients.scaffold import ScaffoldClient
from clients.shot import SHOTClient
from clients.t3a import T3AClient
from clients.tent import TENTClient
from partitions.references import Table, Value
from strategies.afl import AFL
from strategies.base import PersonalizedStrategy
from strategies.fedamp import FedAMP
from strategies.fedavg import FedAvg
from strategies.fedembed import FedEmbed
from strategies.fedgma import FedGMA
from strategies.fedma import FedMA
from strategies.fedmd import FedMD, HeteroFedTTA
from strategies.fedrep import FedRep
from strategies.fedtta import FedTTA
from strategies.lgfedavg import LGFedAvg
from strategies.odpfl_hn import ODPFLHN
from strategies.pefll import PeFLL
from strategies.pfedhn import PFedHN
from strategies.pfedme import PFedMe
from strategies.pfl import PFL, PFLNearest
from strategies.preference import CentralAdam, PFedKM
from strategies.scaffold import Scaffold


@dataclass(frozen=True)
class Method:
    """A method: its server half, its client half, where it comes from.

    `novel` says what an unlabeled novel client gets: "global" (the global model), "adapted" (a
    model of its own) or "" (nothing: the method cannot serve it). `dp` names
    the kinds of differential privacy that it can keep: "local" where a train reply is the trained
    model under the names that were sent, "central" where the server takes the users' plain mean
    too. `effort` is a round's time in rounds of FedAvg, roughly: of runs side by side the longest
    begin first. `settings` are the defaults of its configuration section beyond those that its
    classes declare; of the package's methods they stand in pyproject."""

    strategy: type[PersonalizedStrategy]
    client: type[Client]
    paper: str
    line: str
    novel: str = ""
    dp: tuple[str, ...] = ()
    effort: float = 1.0
    settings: Mapping[str, Value] = field(default_factory=dict, compare=False)


BOTH = ("local", "central")
NAMED = {
    "local": Method(FedAvg, LocalClient, "–", "every client alone"),
    "fedavg": Method(
        FedAvg,
        Client,
        "McMahan et al., AISTATS 2017",
        "one global model, mean weighted by samples",
        "global",
        dp=BOTH,
    ),
    "fedprox": Method(
        FedAvg,
        FedProxClient,
        "Li et al., MLSys 2020",
        "FedAvg with a proximal term on the client",
        "global",
        dp=BOTH,
    ),
    "scaffold": Method(
        Scaffold,
        ScaffoldClient,
        "Karimireddy et al., ICML 2020",
        "control variates correct the clients' drift",
        "global",
    ),
    "afl": Method(
        AFL,
        AFLClient,
        "Mohri et al., ICML 2019",
        "one global model for the worst mixture of the clients",
        "global",
    ),
    "fedgma": Method(
        FedGMA,
        Client,
        "Tenison et al., 2022",
        "damps the entries of the update on whose sign clients disagree",
        "global",
    ),
    "fedadg": Method(
        FedAvg,
        FedADGClient,
        "Zhang et al., 2021",
        "features aligned with a generated reference, adversarially",
        "global",
        effort=3.3,
    ),
    "fedsr": Method(
        FedAvg,
        FedSRClient,
        "Nguyen et al., NeurIPS 2022",
        "a simple stochastic representation",
        "global",
        effort=2.6,
    ),
    "fedma": Method(
        FedMA,
        FedMAClient,
        "Wang et al., ICLR 2020",
        "matches the clients' neurons layer by layer, then averages",
        "global",
        effort=3.3,
    ),
    "fedper": Method(
        FedAvg,
        FedPerClient,
        "Arivazhagan et al., 2019",
        "shared body, personal head",
        dp=BOTH,
    ),
    "fedrep": Method(
        FedRep,
        FedRepClient,
        "Collins et al., ICML 2021",
        "FedPer that trains the head first, then the body",
        dp=BOTH,
    ),
    "lg-fedavg": Method(
        LGFedAvg,
        LGFedAvgClient,
        "Liang et al., 2020",
        "FedAvg first, then a personal body under the shared head",
    ),
    "per-fedavg": Method(
        FedAvg,
        PerFedAvgClient,
        "Fallah et al., NeurIPS 2020",
        "a model one labeled step from every client's, a novel one's too",
        effort=3.5,
    ),
    "pfedme": Method(
        PFedMe,
        PFedMeClient,
        "Dinh et al., NeurIPS 2020",
        "personal models near the global one, found by labeled steps",
        dp=BOTH,
        effort=5.6,
    ),
    "ditto": Method(
        FedAvg,
        DittoClient,
        "Li et al., ICML 2021",
        "a personal model near the global one, beside FedAvg",
        "global",
        dp=BOTH,
        effort=2.4,
    ),
    "apfl": Method(
        FedAvg,
        APFLClient,
        "Deng et al., 2020",
        "a personal model mixed with the global one, in a learnt proportion",
        "global",
        dp=BOTH,
        effort=2.2,
    ),
    "fedbn": Method(
        FedAvg,
        FedBNClient,
        "Li et al., ICLR 2021",
        "batch normalisation stays on the client; needs a network that has some",
        dp=BOTH,
    ),
    "fedbabu": Method(
        FedAvg,
        FedBABUClient,
        "Oh et al., ICLR 2022",
        "a body under one fixed random head, fine-tuned for each client",
        "global",
        dp=BOTH,
    ),
    "fedamp": Method(
        FedAMP,
        FedAMPClient,
        "Huang et al., AAAI 2021",
        "a model of its own for each client, pulled to those of similar clients",
    ),
    "fedala": Method(
        FedAvg,
        FedALAClient,
        "Zhang et al., AAAI 2023",
        "local and global model mixed element by element, by learnt weights",
        "global",
        dp=BOTH,
    ),
    "tent": Method(
        FedAvg,
        TENTClient,
        "Wang et al., ICLR 2021",
        "FedAvg, then entropy minimisation on the client's inputs",
        "adapted",
    ),
    "t3a": Method(
        FedAvg,
        T3AClient,
        "Iwasawa and Matsuo, NeurIPS 2021",
        "FedAvg, then class templates adjusted to the client's inputs",
        "adapted",
        dp=BOTH,
    ),
    "shot": Method(
        FedAvg,
        SHOTClient,
        "Liang et al., ICML 2020",
        "FedAvg, then predictions made sure and diverse under a fixed head",
        "adapted",
        dp=BOTH,
    ),
    "pfedhn": Method(
        PFedHN,
        PFedHNClient,
        "Shamsian et al., ICML 2021",
        "a hypernetwork on the server generates every client's model",
        effort=2.5,
    ),
    "pfedhn-pc": Method(
        PFedHN,
        PFedHNPCClient,
        "Shamsian et al., ICML 2021",
        "pFedHN whose classifiers stay on the clients",
    ),
    "odpfl-hn": Method(
        ODPFLHN,
        ODPFLHNClient,
        "Amosy et al., 2023",
        "pFedHN whose embeddings an encoder of unlabeled inputs provides",
        "adapted",
    ),
    "pefll": Method(
        PeFLL,
        PeFLLClient,
        "Scott et al., ICLR 2024",
        "ODPFL-HN whose encoder sees labels: a novel client needs a few, and no training",
        effort=3.1,
    ),
    "pfl-sampled": Method(
        PFL,
        PFLSampledClient,
        "Amosy et al., 2023",
        "a random training client's personal model",
        "global",
    ),
    "pfl-nearest": Method(
        PFLNearest,
        PFLClient,
        "Amosy et al., 2023",
        "the personal model of the training client with the most similar inputs",
        "adapted",
    ),
    "pfl-ensemble": Method(
        PFL,
        PFLClient,
        "Amosy et al., 2023",
        "the mean logits of all personal models",
        "global",
    ),
    "fedtta": Method(
        FedTTA,
        FedTTAClient,
        "Ye et al., UPFL, 2023",
        "a base model and a model that adapts it without labels, one step",
        "adapted",
        effort=4.5,
    ),
    "fedtta-prox": Method(
        FedTTA,
        FedTTAProxClient,
        "Ye et al., UPFL, 2023",
        "FedTTA whose base model stays close to the server's",
        "adapted",
        effort=5.0,
    ),
    "fedtta++": Method(
        FedTTA,
        FedTTAPlusPlusClient,
        "Ye et al., UPFL, 2023",
        "FedTTA-Prox that adapts until the entropy stops falling",
        "adapted",
        effort=5.0,
    ),
    "fedtta++-guarded": Method(
        FedTTA,
        GuardedFedTTAPlusPlusClient,
        "Ye et al., UPFL, 2023; guard ours",
        "FedTTA++ whose further steps must agree with the first one",
        "adapted",
        effort=5.0,
    ),
    "fedmd": Method(
        FedMD,
        FedMDClient,
        "Li and Wang, 2019",
        "any architectures; logits on a public set are averaged and distilled",
        "global",
        effort=2.0,
    ),
    "heterotent": Method(
        FedMD,
        HeteroTENTClient,
        "Ye et al., UPFL, 2023",
        "TENT inside FedMD, for any architectures",
        "adapted",
        effort=2.0,
    ),
    "heterofedtta": Method(
        HeteroFedTTA,
        HeteroFedTTAClient,
        "Ye et al., UPFL, 2023",
        "FedTTA inside FedMD, for any architectures",
        "adapted",
        effort=9.6,
    ),
    "fedembed": Method(
        FedEmbed,
        FedEmbedClient,
        "Silva et al., 2022",
        "personal embeddings, heads of sub-populations; needs the preference partition",
        dp=BOTH,
    ),
    "global": Method(
        CentralAdam,
        GlobalClient,
        "Silva et al., 2022",
        "one head for users with conflicting labels; needs the preference partition",
        dp=BOTH,
    ),
    "global+": Method(
        CentralAdam,
        GlobalPlusClient,
        "Silva et al., 2022",
        "global, conditioned on personal embeddings; needs the preference partition",
        dp=BOTH,
    ),
    "pfedkm": Method(
        PFedKM,
        GlobalClient,
        "Tang et al., 2021",
        "heads shared within clusters of gradients; needs the preference partition",
        dp=("local",),
    ),
}


def _adopted(name: str, method: Any) -> Method:
    if not isinstance(method, Method):
        raise ValueError(f"{name!r} is {method!r}; it must be a fedapps.methods.Method")
    return method


METHODS = Table("method", NAMED, _adopted)
