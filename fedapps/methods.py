"""THE table: name → (strategy, client). No class is imported before it is asked for."""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from fedapps.common.external_code import Registry, Value, is_reference
from fedapps.common.spelling import did_you_mean
from fedapps.common.tasks import ALL_TASKS, CLASS_PROBABILITIES, CLASSES, not_served

if TYPE_CHECKING:
    from clients.core.client import Client
    from strategies.core.strategy import PersonalizedStrategy


NOVEL = ("", "global", "adapted")  # what an unlabeled novel client may get
BOTH = ("local", "central")  # kinds of differential privacy

# Families of methods. A method may belong to several.
AVERAGING = "federated averaging"
PERSONALIZED = "personalized"
HYPERNETWORK = "hypernetwork"
TEST_TIME = "test-time"
GENERALIZATION = "generalization"
DISTILLATION = "distillation"
CONFLICTING_LABELS = "conflicting labels"


def _resolved(reference: str) -> Any:
    """What "module:NAME" names. Each message asks, and `resolve_name` alone takes longer."""
    module_name, _, name = reference.partition(":")
    module = sys.modules.get(module_name)
    if module is None or "." in name:
        return resolve_name(reference)
    return getattr(module, name)


class _Half:
    """A class of a `Method`, given as a class or as "module:NAME", which is imported when read."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, method: Any, owner: type) -> Any:
        given = vars(method)[self.name]
        return _resolved(given) if isinstance(given, str) else given

    def __set__(self, method: Any, given: Any) -> None:
        vars(method)[self.name] = given


@dataclass(frozen=True)
class Method:
    """A method: its server half, its client half, where it comes from.

    `novel` says what an unlabeled novel client gets: "global" (the global model), "adapted" (a
    model of its own) or "" (nothing: the method cannot serve it). `dp` names the kinds of
    differential privacy that it can keep: "local" where a train reply is the trained model under
    the names that were sent, "central" where the server takes the users' plain mean too.
    `relative_cost` is a round's time in rounds of FedAvg, roughly: of runs side by side the longest
    begin first.

    Its settings are those that its classes declare, without the `hidden_settings` ones, which it
    does not offer. `settings` holds other defaults, also of common keys. A method that `extends`
    another takes over what that one's section sets, where it sets nothing itself.

    `name`, one word, stands for a reference in tables and figures. `family` names the families that
    the method belongs to, as `fedapps list methods --family` filters them. `tasks` are those of its
    client class, if they are given here: `fedapps list` reads them without importing torch.

    `trains_as` names the method whose training this one's is, bit by bit, with the same settings:
    it differs in evaluations alone, and in what it does with trained arrays. Runs with the same
    training share it, see `fedapps.trainings`. Such a method keeps no state of its clients, and its
    settings for evaluations are declared so.

    `chooses_by` names the setting that lists the methods which the clients choose from. These have
    the clients' network and the settings of their own sections."""

    strategy: "type[PersonalizedStrategy]"
    client: "type[Client]"
    paper: str
    summary: str
    novel: str = ""
    dp: tuple[str, ...] = ()
    relative_cost: float = 1.0
    settings: Mapping[str, Value] = field(default_factory=dict, compare=False)
    extends: str = ""
    hidden_settings: tuple[str, ...] = ()
    name: str = ""
    family: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    trains_as: str = ""
    chooses_by: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError for a declaration of another type, or outside of its choices."""
        for half in ("strategy", "client"):
            _check_half(half, vars(self)[half])
        for text in ("paper", "summary", "novel", "extends", "name", "trains_as", "chooses_by"):
            if not isinstance(getattr(self, text), str):
                raise ValueError(_wrong(text, getattr(self, text), "a text"))
        if self.novel not in NOVEL:
            raise ValueError(_wrong("novel", self.novel, f"one of {', '.join(map(repr, NOVEL))}"))
        for several in ("dp", "hidden_settings", "family", "tasks"):
            values = getattr(self, several)
            if not isinstance(values, tuple) or not all(isinstance(v, str) for v in values):
                raise ValueError(_wrong(several, values, "a tuple of texts, such as ('local',)"))
        unknown = set(self.dp) - set(BOTH)
        if unknown:
            raise ValueError(_wrong("dp", min(unknown), f"of {', '.join(map(repr, BOTH))}"))
        if unknown := set(self.tasks) - set(ALL_TASKS):
            raise ValueError(_wrong("tasks", min(unknown), f"of {', '.join(ALL_TASKS)}"))
        cost = self.relative_cost
        # A boolean is an instance of int.
        if isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 < cost < inf:
            raise ValueError(_wrong("relative_cost", cost, "a number above 0"))
        if not isinstance(self.settings, Mapping):
            raise ValueError(_wrong("settings", self.settings, "a dict of keys and values"))

    @property
    def served_tasks(self) -> tuple[str, ...]:
        """The tasks that it serves, see `fedapps.common.tasks`."""
        return self.tasks or self.client.served_tasks()

    @property
    def own_client(self) -> bool:
        """Whether its clients are of another class than FedAvg's."""
        return vars(self)["client"] != NAMED["fedavg"].__dict__["client"]


def _check_half(half: str, given: Any) -> None:
    """Raise ValueError unless it is a reference, or a class of that half's kind."""
    if isinstance(given, str):
        return
    base: type
    if half == "client":
        from clients.core.client import Client as base
    else:
        from strategies.core.strategy import PersonalizedStrategy as base
    if not isinstance(given, type) or not issubclass(given, base):
        raise ValueError(_wrong(half, given, f"a subclass of {base.__module__}.{base.__name__}"))


def _wrong(name: str, value: Any, wanted: str) -> str:
    return f"{name} of a Method is {value!r:.200}; it must be {wanted}"


# Set after the class is made: `dataclass` would take the descriptors for defaults.
for _half in ("strategy", "client"):
    setattr(Method, _half, _Half(_half))


FEDAVG = "strategies.methods.fedavg:FedAvg"


def _method(client: str, *texts: str, strategy: str = FEDAVG, **more: Any) -> Method:
    """A row of the package's own: its classes by reference; then paper, line, novel."""
    more = {"tasks": ALL_TASKS} | more
    return Method(strategy, client, *texts, **more)  # type: ignore[arg-type]


OWN_CLIPPING = ("local-clip-norm",)  # FedTTA clips each of its networks by `clip-norm`
FREE_EMBEDDINGS = ("bias", "embedding-lr")  # pfedhn's alone
TWO_PHASES = (
    "training",
    "fine-tune-rounds",
    "encoder-steps",
    "encoder-local-lr",
    "encoder-local-clip-norm",
)
PRIVATE_DESCRIPTORS = ("descriptor-epsilon", "descriptor-delta", "descriptor-answers")
NAMED = {
    "local": _method(
        "clients.methods.local:LocalClient",
        "–",
        "every client alone",
        family=(PERSONALIZED,),
    ),
    "fedavg": _method(
        "clients.core.client:Client",
        "McMahan et al., AISTATS 2017",
        "one global model, mean weighted by samples",
        "global",
        dp=BOTH,
        family=(AVERAGING,),
        trains_as="fedavg",
    ),
    "fedprox": _method(
        "clients.methods.fedprox:FedProxClient",
        "Li et al., MLSys 2020",
        "FedAvg with a proximal term on the client",
        "global",
        dp=BOTH,
        settings={"lr": 0.3},
        family=(AVERAGING,),
    ),
    "scaffold": _method(
        "clients.methods.scaffold:ScaffoldClient",
        "Karimireddy et al., ICML 2020",
        "control variates correct the clients' drift",
        "global",
        strategy="strategies.methods.scaffold:Scaffold",
        family=(AVERAGING,),
    ),
    "afl": _method(
        "clients.methods.afl:AFLClient",
        "Mohri et al., ICML 2019",
        "one global model for the worst mixture of the clients",
        "global",
        strategy="strategies.methods.afl:AFL",
        settings={"lr": 0.3},
        family=(AVERAGING, GENERALIZATION),
    ),
    "fedgma": _method(
        "clients.core.client:Client",
        "Tenison et al., 2022",
        "damps the entries of the update on whose sign clients disagree",
        "global",
        strategy="strategies.methods.fedgma:FedGMA",
        settings={"lr": 0.3},
        family=(AVERAGING, GENERALIZATION),
    ),
    "fedadg": _method(
        "clients.methods.fedadg:FedADGClient",
        "Zhang et al., 2021",
        "features aligned with a generated reference, adversarially",
        "global",
        relative_cost=3.3,
        settings={"lr": 0.3},
        family=(GENERALIZATION,),
    ),
    "fedsr": _method(
        "clients.methods.fedsr:FedSRClient",
        "Nguyen et al., NeurIPS 2022",
        "a simple stochastic representation",
        "global",
        relative_cost=2.6,
        settings={"lr": 0.3},
        tasks=CLASS_PROBABILITIES,
        family=(GENERALIZATION,),
    ),
    "fedma": _method(
        "clients.methods.fedma:FedMAClient",
        "Wang et al., ICLR 2020",
        "matches the clients' neurons layer by layer, then averages",
        "global",
        strategy="strategies.methods.fedma:FedMA",
        relative_cost=5.2,
        family=(AVERAGING,),
    ),
    "fedper": _method(
        "clients.methods.fedper:FedPerClient",
        "Arivazhagan et al., 2019",
        "shared body, personal head",
        dp=BOTH,
        family=(PERSONALIZED,),
    ),
    "fedrep": _method(
        "clients.methods.fedrep:FedRepClient",
        "Collins et al., ICML 2021",
        "FedPer that trains the head first, then the body",
        strategy="strategies.methods.fedrep:FedRep",
        dp=BOTH,
        relative_cost=1.9,
        family=(PERSONALIZED,),
    ),
    "lg-fedavg": _method(
        "clients.methods.lgfedavg:LGFedAvgClient",
        "Liang et al., 2020",
        "FedAvg first, then a personal body under the shared head",
        strategy="strategies.methods.lgfedavg:LGFedAvg",
        family=(PERSONALIZED,),
    ),
    "per-fedavg": _method(
        "clients.methods.perfedavg:PerFedAvgClient",
        "Fallah et al., NeurIPS 2020",
        "a model one labeled step from every client's, a novel one's too",
        relative_cost=3.5,
        family=(PERSONALIZED,),
    ),
    "pfedme": _method(
        "clients.methods.pfedme:PFedMeClient",
        "Dinh et al., NeurIPS 2020",
        "personal models near the global one, found by labeled steps",
        strategy="strategies.methods.pfedme:PFedMe",
        dp=BOTH,
        relative_cost=5.6,
        family=(PERSONALIZED,),
    ),
    "ditto": _method(
        "clients.methods.ditto:DittoClient",
        "Li et al., ICML 2021",
        "a personal model near the global one, beside FedAvg",
        "global",
        dp=BOTH,
        relative_cost=2.4,
        family=(PERSONALIZED,),
    ),
    "apfl": _method(
        "clients.methods.apfl:APFLClient",
        "Deng et al., 2020",
        "a personal model mixed with the global one, in a learnt proportion",
        "global",
        dp=BOTH,
        relative_cost=2.2,
        family=(PERSONALIZED,),
    ),
    "fedbn": _method(
        "clients.methods.fedbn:FedBNClient",
        "Li et al., ICLR 2021",
        "batch normalisation stays on the client; needs a network that has some",
        dp=BOTH,
        family=(PERSONALIZED,),
    ),
    "fedbabu": _method(
        "clients.methods.fedbabu:FedBABUClient",
        "Oh et al., ICLR 2022",
        "a body under one fixed random head, fine-tuned for each client",
        "global",
        dp=BOTH,
        family=(PERSONALIZED,),
    ),
    "fedamp": _method(
        "clients.methods.fedamp:FedAMPClient",
        "Huang et al., AAAI 2021",
        "a model of its own for each client, pulled to those of similar clients",
        strategy="strategies.methods.fedamp:FedAMP",
        relative_cost=2.1,
        family=(PERSONALIZED,),
    ),
    "fedala": _method(
        "clients.methods.fedala:FedALAClient",
        "Zhang et al., AAAI 2023",
        "local and global model mixed element by element, by learnt weights",
        "global",
        dp=BOTH,
        family=(PERSONALIZED,),
    ),
    "tent": _method(
        "clients.methods.tent:TENTClient",
        "Wang et al., ICLR 2021",
        "FedAvg, then entropy minimisation on the client's inputs",
        "adapted",
        tasks=CLASS_PROBABILITIES,
        family=(TEST_TIME,),
        trains_as="fedavg",
    ),
    "t3a": _method(
        "clients.methods.t3a:T3AClient",
        "Iwasawa and Matsuo, NeurIPS 2021",
        "FedAvg, then class templates adjusted to the client's inputs",
        "adapted",
        dp=BOTH,
        tasks=(CLASSES,),
        family=(TEST_TIME,),
        trains_as="fedavg",
    ),
    "shot": _method(
        "clients.methods.shot:SHOTClient",
        "Liang et al., ICML 2020",
        "FedAvg, then predictions made sure and diverse under a fixed head",
        "adapted",
        dp=BOTH,
        relative_cost=1.6,
        hidden_settings=("parameters", "bits", "adapt-clip-norm"),
        tasks=CLASS_PROBABILITIES,
        family=(TEST_TIME,),
        trains_as="fedavg",
    ),
    "bn-adapt": _method(
        "clients.methods.bn_adapt:BNAdaptClient",
        "Schneider et al., NeurIPS 2020",
        "FedAvg whose batch normalisation adapts; needs a network that has some",
        "adapted",
        dp=BOTH,
        family=(TEST_TIME,),
        trains_as="fedavg",
    ),
    "prior-em": _method(
        "clients.methods.prior_em:PriorEMClient",
        "Saerens et al., 2002",
        "FedAvg, corrected by the client's label distribution, found by EM",
        "adapted",
        strategy="strategies.methods.prior_em:PriorEM",
        dp=BOTH,
        tasks=(CLASSES,),
        family=(TEST_TIME,),
        trains_as="fedavg",
    ),
    "bbse": _method(
        "clients.methods.bbse:BBSEClient",
        "Lipton et al., ICML 2018",
        "FedAvg, corrected by the client's label distribution, from a confusion matrix",
        "adapted",
        strategy="strategies.methods.bbse:BBSE",
        tasks=(CLASSES,),
        family=(TEST_TIME,),
        trains_as="fedavg",
    ),
    "auto": _method(
        "clients.methods.auto:AutoClient",
        "ours",
        "FedAvg, and a choice for each client whether its inputs are corrected, and how",
        "adapted",
        strategy="strategies.methods.auto:Auto",
        tasks=(CLASSES,),
        family=(TEST_TIME,),
        trains_as="fedavg",
        chooses_by="candidates",
    ),
    "memo": _method(
        "clients.methods.memo:MEMOClient",
        "Zhang et al., NeurIPS 2022",
        "FedAvg, then each input adapts the model by its augmented views",
        "adapted",
        dp=BOTH,
        relative_cost=2.9,
        tasks=CLASS_PROBABILITIES,
        family=(TEST_TIME,),
        trains_as="fedavg",
    ),
    "atp": _method(
        "clients.methods.atp:ATPClient",
        "Bao et al., NeurIPS 2023",
        "FedAvg, then learnt rates of unlabeled adaptation, one for each tensor",
        "adapted",
        strategy="strategies.methods.atp:ATP",
        tasks=CLASS_PROBABILITIES,
        family=(TEST_TIME,),
    ),
    "fedthe": _method(
        "clients.methods.fedthe:FedTHEClient",
        "Jiang and Lin, ICLR 2023",
        "a balanced global and a personal head, weighted for each input without labels",
        "global",
        strategy="strategies.methods.fedthe:FedTHE",
        dp=BOTH,
        relative_cost=1.7,
        tasks=(CLASSES,),
        family=(PERSONALIZED, TEST_TIME),
    ),
    "fedthe+": _method(
        "clients.methods.fedthe_plus:FedTHEPlusClient",
        "Jiang and Lin, ICLR 2023",
        "FedTHE, then each input adapts the model by its augmented views",
        "adapted",
        strategy="strategies.methods.fedthe:FedTHE",
        dp=BOTH,
        relative_cost=3.0,
        extends="fedthe",
        tasks=(CLASSES,),
        family=(PERSONALIZED, TEST_TIME),
    ),
    "btfl": _method(
        "clients.methods.btfl:BTFLClient",
        "Zhou and Liu, 2025",
        "a global and a personal head, weighted for each input by a Bayesian formula",
        "global",
        strategy="strategies.methods.fedthe:FedTHE",
        dp=BOTH,
        relative_cost=1.6,
        tasks=(CLASSES,),
        family=(PERSONALIZED, TEST_TIME),
    ),
    "pfedhn": _method(
        "clients.methods.pfedhn:PFedHNClient",
        "Shamsian et al., ICML 2021",
        "a hypernetwork on the server generates every client's model",
        strategy="strategies.methods.pfedhn:PFedHN",
        relative_cost=2.5,
        family=(PERSONALIZED, HYPERNETWORK),
    ),
    "pfedhn-pc": _method(
        "clients.methods.pfedhn:PFedHNPCClient",
        "Shamsian et al., ICML 2021",
        "pFedHN whose classifiers stay on the clients",
        strategy="strategies.methods.pfedhn:PFedHN",
        relative_cost=2.3,
        extends="pfedhn",
        family=(PERSONALIZED, HYPERNETWORK),
    ),
    "odpfl-hn": _method(
        "clients.methods.odpfl_hn:ODPFLHNClient",
        "Amosy et al., 2023",
        "pFedHN whose embeddings an encoder of unlabeled inputs provides",
        "adapted",
        strategy="strategies.methods.odpfl_hn:ODPFLHN",
        relative_cost=2.8,
        settings={"lr": 0.3},
        hidden_settings=FREE_EMBEDDINGS,
        family=(HYPERNETWORK, TEST_TIME),
    ),
    "pefll": _method(
        "clients.methods.pefll:PeFLLClient",
        "Scott et al., ICLR 2024",
        "ODPFL-HN whose encoder sees labels: a novel client needs a few, and no training",
        strategy="strategies.methods.pefll:PeFLL",
        relative_cost=12.0,
        extends="odpfl-hn",
        hidden_settings=(*FREE_EMBEDDINGS, *TWO_PHASES, *PRIVATE_DESCRIPTORS, "spectral-norm"),
        family=(PERSONALIZED, HYPERNETWORK),
    ),
    "hyperfedzero": _method(
        "clients.methods.hyperfedzero:HyperFedZeroClient",
        "Zhou et al., ICLR 2026",
        "a hypernetwork generates the classifier from an embedding of the inputs",
        "adapted",
        dp=BOTH,
        relative_cost=3.3,
        family=(HYPERNETWORK, TEST_TIME),
    ),
    "flowdup": _method(
        "clients.methods.flowdup:FLowDUPClient",
        "Zakerinia et al., ICML 2026",
        "low-dimensional changes of a model, from inputs; learns from unlabeled clients, too",
        "adapted",
        strategy="strategies.methods.flowdup:FLowDUP",
        dp=BOTH,
        relative_cost=9.0,
        family=(HYPERNETWORK, TEST_TIME),
    ),
    "pfl-sampled": _method(
        "clients.methods.pfl:PFLSampledClient",
        "Amosy et al., 2023",
        "a random training client's personal model",
        "global",
        strategy="strategies.methods.pfl:PFL",
        extends="pfl-ensemble",
        family=(PERSONALIZED,),
    ),
    "pfl-nearest": _method(
        "clients.methods.pfl:PFLClient",
        "Amosy et al., 2023",
        "the personal model of the training client with the most similar inputs",
        "adapted",
        strategy="strategies.methods.pfl:PFLNearest",
        relative_cost=1.8,
        extends="pfl-ensemble",
        family=(PERSONALIZED, TEST_TIME),
    ),
    "pfl-ensemble": _method(
        "clients.methods.pfl:PFLClient",
        "Amosy et al., 2023",
        "the mean logits of all personal models",
        "global",
        strategy="strategies.methods.pfl:PFLEnsemble",
        family=(PERSONALIZED,),
    ),
    "fedtta": _method(
        "clients.methods.fedtta:FedTTAClient",
        "Ye et al., UPFL, 2023",
        "a base model and a model that adapts it without labels, one step",
        "adapted",
        strategy="strategies.methods.fedtta:FedTTA",
        relative_cost=4.5,
        settings={"lr": 0.3},
        hidden_settings=OWN_CLIPPING,
        family=(TEST_TIME,),
    ),
    "fedtta-prox": _method(
        "clients.methods.fedtta:FedTTAProxClient",
        "Ye et al., UPFL, 2023",
        "FedTTA whose base model stays close to the server's",
        "adapted",
        strategy="strategies.methods.fedtta:FedTTA",
        relative_cost=5.0,
        extends="fedtta",
        hidden_settings=OWN_CLIPPING,
        tasks=CLASS_PROBABILITIES,
        family=(TEST_TIME,),
    ),
    "fedtta++": _method(
        "clients.methods.fedtta:FedTTAPlusPlusClient",
        "Ye et al., UPFL, 2023",
        "FedTTA-Prox that adapts until the entropy stops falling",
        "adapted",
        strategy="strategies.methods.fedtta:FedTTA",
        relative_cost=5.0,
        extends="fedtta-prox",
        hidden_settings=OWN_CLIPPING,
        tasks=CLASS_PROBABILITIES,
        family=(TEST_TIME,),
    ),
    "fedtta++-guarded": _method(
        "clients.methods.fedtta:GuardedFedTTAPlusPlusClient",
        "Ye et al., UPFL, 2023; guard ours",
        "FedTTA++ whose further steps must agree with the first one",
        "adapted",
        strategy="strategies.methods.fedtta:FedTTA",
        relative_cost=5.0,
        extends="fedtta++",
        hidden_settings=OWN_CLIPPING,
        tasks=CLASS_PROBABILITIES,
        family=(TEST_TIME,),
    ),
    "fedmd": _method(
        "clients.methods.fedmd:FedMDClient",
        "Li and Wang, 2019",
        "any architectures; logits on a public set are averaged and distilled",
        "global",
        strategy="strategies.methods.fedmd:FedMD",
        relative_cost=5.6,
        family=(DISTILLATION,),
    ),
    "heterotent": _method(
        "clients.methods.fedmd:HeteroTENTClient",
        "Ye et al., UPFL, 2023",
        "TENT inside FedMD, for any architectures",
        "adapted",
        strategy="strategies.methods.fedmd:FedMD",
        relative_cost=5.6,
        extends="fedmd",
        tasks=CLASS_PROBABILITIES,
        family=(TEST_TIME, DISTILLATION),
    ),
    "heterofedtta": _method(
        "clients.methods.heterofedtta:HeteroFedTTAClient",
        "Ye et al., UPFL, 2023",
        "FedTTA inside FedMD, for any architectures",
        "adapted",
        strategy="strategies.methods.fedmd:HeteroFedTTA",
        relative_cost=9.6,
        extends="fedmd",
        hidden_settings=("mu", "min-agreement", "digest-loss", *OWN_CLIPPING),
        settings={"lr": 0.3},
        tasks=CLASS_PROBABILITIES,
        family=(TEST_TIME, DISTILLATION),
    ),
    "fedembed": _method(
        "clients.methods.fedembed:FedEmbedClient",
        "Silva et al., 2022",
        "personal embeddings, heads of sub-populations; needs the preference partition",
        strategy="strategies.methods.fedembed:FedEmbed",
        dp=BOTH,
        extends="global+",
        tasks=(CLASSES,),
        family=(PERSONALIZED, CONFLICTING_LABELS),
    ),
    "global": _method(
        "clients.methods._preferences:GlobalClient",
        "Silva et al., 2022",
        "one head for users with conflicting labels; needs the preference partition",
        strategy="strategies.methods._preferences:CentralAdam",
        dp=BOTH,
        settings={"model": "preference-net"},
        tasks=(CLASSES,),
        family=(CONFLICTING_LABELS,),
    ),
    "global+": _method(
        "clients.methods._preferences:GlobalPlusClient",
        "Silva et al., 2022",
        "global, conditioned on personal embeddings; needs the preference partition",
        strategy="strategies.methods._preferences:CentralAdam",
        dp=BOTH,
        extends="global",
        tasks=(CLASSES,),
        family=(PERSONALIZED, CONFLICTING_LABELS),
    ),
    "pfedkm": _method(
        "clients.methods._preferences:GlobalClient",
        "Tang et al., 2021",
        "heads shared within clusters of gradients; needs the preference partition",
        strategy="strategies.methods._preferences:PFedKM",
        dp=("local",),
        extends="global",
        tasks=(CLASSES,),
        family=(CONFLICTING_LABELS,),
    ),
}


def _adopted(name: str, method: Any) -> Method:
    if not isinstance(method, Method):
        raise ValueError(f"{name!r} is {method!r}; it must be a fedapps.methods.Method")
    if not re.fullmatch(r"[\w.+-]{0,60}", method.name):
        raise ValueError(f"the name of {name!r} is {method.name!r}; it must be one word")
    return method


METHODS = Registry("method", NAMED, _adopted)


def corrections() -> list[str]:
    """The package's methods whose clients only correct predictions of FedAvg's model."""
    names = []
    for name, method in NAMED.items():
        of_fedavg = method.trains_as == "fedavg" and vars(method)["strategy"] == FEDAVG
        if of_fedavg and method.own_client:
            names.append(name)
    return names


def chosen_from(method: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """The methods that the clients of `method` choose from, by its setting `Method.chooses_by`.
    Raises ValueError for a name in it that is none."""
    entry = METHODS.known().get(method)  # none for a name of results whose code nobody has allowed
    if entry is None or not entry.chooses_by:
        return ()
    key = f"{method}.{entry.chooses_by}"
    if key not in config:
        return ()
    from clients.core.decision.choice import CANDIDATES, methods_among, names_in

    chosen = methods_among(names_in(str(config[key])))
    for name in chosen:
        if name not in METHODS and not is_reference(name):
            known = [*CANDIDATES, *corrections()]
            raise ValueError(
                f"{key} names {name!r}{did_you_mean(name, known)}; known: "
                f"{', '.join(known)}, and module:NAME of a method; FedAvg's model is always one"
            )
    return chosen


def families() -> list[str]:
    """The families of the package's methods, in the order of the table."""
    known: dict[str, None] = {}
    for method in NAMED.values():
        known |= dict.fromkeys(method.family)
    return list(known)


def check_serves(method: str, task: str) -> None:
    """Raise ValueError for a method that does not serve the task, with those that do."""
    entry = METHODS[method]
    if task in entry.served_tasks:
        return
    if not entry.tasks:  # a method from outside: its class says why
        entry.client.check_serves(task)
    able = [name for name, entry in METHODS.items() if task in entry.served_tasks]
    refusal = not_served(method, entry.served_tasks, task)
    raise ValueError(f"{refusal}; those that do: {', '.join(able)}")


def check_settings_serve(method: str, values: Mapping[str, Any], task: str) -> None:
    """Raise ValueError for a setting that the method has, by `values`, and that does not serve the
    task. Keys of `values` are attributes."""
    entry = METHODS[method]
    limited = {**entry.strategy.settings_for_tasks, **entry.client.settings_for_tasks}
    for name, needs in limited.items():
        if name not in values or values[name] == needs.neutral or task in needs.tasks:
            continue
        key = f"{method}.{name.replace('_', '-')}"
        refusal = not_served(f"{key}={values[name]}", needs.tasks, task)
        raise ValueError(f"{refusal}; or set {key}={needs.neutral}")


def check_private(method: str, mode: str) -> None:
    """Raise ValueError for a method that cannot keep differential privacy of that mode."""
    if mode == "none" or mode in METHODS[method].dp:
        return
    able = [name for name, entry in METHODS.items() if mode in entry.dp]
    raise ValueError(f"{method} cannot keep dp {mode!r}; able: {', '.join(able)}")
