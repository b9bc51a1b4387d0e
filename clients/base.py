"""The client that every method starts from: names, state, local SGD, scoring.

Flower's ``NumPyClient`` contract at the rim, named arrays inside. A method overrides one or two
of `personal`, `loss`, `train` and `score`; the class as it stands is FedAvg's client
(McMahan et al., AISTATS 2017, Algorithm 1, ClientUpdate)."""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import torch
from flwr.client import NumPyClient
from flwr.common import NDArrays
from torch import Tensor, nn
from torch.nn import functional as F

from clients.arrays import Arrays, group, model_arrays, prefixed, to_numpy
from clients.cohort import fit
from clients.domain import half
from clients.sgd import batches, only
from partitions.datasets import Info
from partitions.readers.raw import UNLABELED
from partitions.seeds import SEED, seed_of, seed_torch
from partitions.settings import COUNT, MOMENTUM, RATE, SOME, Configured, setting, taken
from partitions.shares import SUB_POPULATION, Samples, Share

Config = dict[str, Any]
Metrics = dict[str, Any]
Criterion = Callable[[Tensor, Tensor], Tensor]
NAMES = "names"  # config and metrics key: the arrays' names, joined by line breaks
LR_FACTOR = "lr-factor"  # config key: what the round's learning rates are to those given
OFFERS = "fedapps"  # key of its answer to "query": what it can do, in words; only ours tell it
RUN_TOKEN = "run-token"  # config key: the run whose state the client goes on from
KEEP, RECALL = "query.keep", "train.recall"  # of a simulation's clients alone
DOMAIN = "query.domain"  # of runs that report the bound's terms


def lr_factor(decay: float, every: int, round_: int) -> float:
    """What the rates of a round, from 1, are to those given: × `decay` in `every` rounds."""
    return decay ** (max(round_ - 1, 0) / every)


class Client(Configured, NumPyClient):
    """One client with its model and its share of the data.

    `client` is its id, `initial` the arrays that the model starts from (default: its present ones),
    `model_name` what the server is told of the network. Raises ValueError for a setting out of its
    range, and for a device that is not there."""

    personal: tuple[str, ...] = ()  # prefixes of the model's names that never leave the client
    rates: tuple[str, ...] = ("lr",)  # its attributes that are learning rates: they may decay
    needs_state = ""  # what its state is for: "training" alone, or its "predictions" as well
    needs_head = False  # True: the network's last linear layer must be named `head`
    needs_public = False  # True: learns from public samples, which no client owns
    few_shot = "tuned"  # how a novel client learns from a few labels: "tuned", in "rounds", by its
    # "descriptor"; "": not
    stacked: tuple[str, ...] = ()  # attributes, lists of tensors, that `loss` reads; a class that
    # has a `loss` and no such line trains in no cohort
    parted: tuple[str, ...] = ()  # prefixes of names that it trains apart, beside the personal ones
    exchanges: tuple[str, ...] = ()  # further messages it answers, e.g. ("query.encode",)
    offers: tuple[str, ...] = ()  # what else strategies may require, e.g. ("personal-head",)
    remembers: tuple[str, ...] = ()  # those beside train messages after which its state is kept
    lasting: tuple[str, ...] = ()  # prefixes of its state's names that outlive the run

    lr = setting(0.3, "learning rate of local SGD", RATE)
    momentum = setting(0.0, "momentum of local SGD, fresh in each round", MOMENTUM)
    weight_decay = setting(0.0, "weight decay of local SGD", "[0, 10]")
    local_steps = setting(20, "mini-batches of local training in a round", COUNT)
    local_epochs = setting(0, "when > 0: epochs of local training instead of local-steps", COUNT)
    batch_size = setting(64, "samples of a mini-batch", SOME)
    short_batches = setting(False, "the last mini-batch of a pass has what remains")
    seed = SEED
    device = setting("auto", "cuda where there is one", ("auto", "cpu", "cuda"))

    def __init__(
        self,
        model: nn.Module,
        share: Share,
        *,
        client: int = 0,
        initial: Arrays | None = None,
        model_name: str = "",
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        if self.device == "auto":
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is 'cuda', but no CUDA device is visible")
        self.model, self.share = _on(self.device, model), share
        self.model_name = model_name  # the model's name, told to the server
        self.client = client
        self.initial = model_arrays(model) if initial is None else initial
        self._rates: dict[str, float] = {}  # the learning rates as they were given
        self.criterion: Criterion = F.cross_entropy  # of logits (n, C) and labels (n,)
        self.state: Arrays = {}
        self.adapted: Metrics = {}  # what the last prediction's adaptation tells of itself
        self.stages: dict[str, Tensor] = {}  # its logits (n, C) at earlier stages, by name

    # What a method overrides

    @classmethod
    def is_personal(cls, name: str) -> bool:
        """Whether the model's array `name` stays on the client."""
        return name.startswith(cls.personal)

    @classmethod
    def stands_apart(cls, name: str) -> bool:
        """Whether the model's array `name` is personal, or trained apart from the rest."""
        return cls.is_personal(name) or name.startswith(cls.parted)

    @classmethod
    def shared(cls, initial: Arrays, /, *args: Any, **settings: Any) -> Arrays:
        """What of the whole network's initial arrays the server starts from: all but the personal
        ones. An override may take settings of the method by keyword."""
        return {name: a for name, a in initial.items() if not cls.is_personal(name)}

    @classmethod
    def build(cls, model: nn.Module, info: Info, /, *args: Any, **settings: Any) -> nn.Module:
        """The method's whole network around the target network `model`; by default just that.

        An override may take settings of the method by keyword. Called with torch's seed set, so
        that server and clients start from the same arrays."""
        return model

    @classmethod
    def built(cls, model: nn.Module, info: Info, /, **settings: Any) -> nn.Module:
        """`build` with what it takes of `settings`, and of the defaults that the class declares.

        Raises ValueError for a setting out of its range."""
        known = {name: one.default for name, one in cls.declared.items()} | settings
        cls.check(**{name: value for name, value in settings.items() if name in cls.declared})
        return cls.build(model, info, **{n: known[n] for n in taken(cls.build) if n in known})

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Training loss of a mini-batch: the mean `criterion`; x (n, *shape), y (n,)."""
        return self.criterion(self.model(x), y)

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Local training from `arrays`; returns the model's shared arrays."""
        self.load(arrays)
        loss = self.fit_locally(config)
        return self.arrays(), len(self.share.train), {"loss": loss}

    def receive(self, arrays: Arrays, config: Config) -> None:
        """Make the model ready to predict by what the server sent to score or to serve it."""
        self.load(arrays)
        self.model.eval()

    def tune(self, config: Config) -> None:
        """Learn from the few labeled samples of a novel client, its `share.train`, before it is
        scored: by the steps of a round on the cross entropy, of the parameters that are `tuned`."""
        rows = self.rows(config, "shots")
        with only(self.model, self.is_tuned) as parameters:
            loss = partial(Client.loss, self)
            self.fit_locally(config, rows=rows, loss=loss, parameters=parameters)
        self.model.eval()

    def is_tuned(self, name: str) -> bool:
        """Whether a novel client's few labels move the model's parameter `name`."""
        return True

    def predict(self, x: Tensor) -> Tensor:
        """Adapt to the inputs x (n, *shape), then their logits (n, classes); no labels in reach."""
        with torch.no_grad():
            return self.model(x)

    def personal_model(self, x: Tensor) -> nn.Module:
        """A copy of the target network as it stood when it predicted x, in evaluation mode."""
        return deepcopy(self.model).eval()

    def score(self, arrays: Arrays, config: Config) -> tuple[float, int, Metrics]:
        """Loss, sample count and accuracies of the model on validation, test or novel data.

        A novel client is scored on everything it holds, but for what it has learnt from. Unlabeled
        samples get predictions but count in no accuracy."""
        self.receive(arrays, config)
        if self.share.shots and self.few_shot == "tuned" and len(self.share.train):
            self.tune(config)
        metrics: Metrics = {}
        if self.share.novel:
            loss, labeled = self._score("accuracy", self.share.everything, metrics)
        else:
            loss, labeled = self._score("accuracy", self.share.validation, metrics)
            if self.share.test is not None:
                _, tested = self._score("test-accuracy", self.share.test, metrics)
                metrics["test-accuracy-examples"] = tested
            if config.get("bound"):
                fitted: Metrics = {}
                _, trained = self._score("accuracy", self.share.train, fitted)
                metrics["training-error"] = 1 - fitted["accuracy"]
                metrics["training-error-examples"] = trained
        return loss, labeled, metrics

    def serve(self, arrays: Arrays, config: Config) -> tuple[nn.Module, Tensor]:
        """What its owner gets: the personal network, and its logits (n, C) for all inputs here."""
        self.begin("evaluate", config)
        self.receive(arrays, config)
        x, _ = self.share.everything.to(self.device)[:]
        logits = self.predict(x)
        return self.personal_model(x), logits

    def properties(self) -> Config:
        """What the client tells of itself when the server asks who it is."""
        return {
            "client": self.client,
            "novel": self.share.novel,
            "num-examples": len(self.share.everything if self.share.novel else self.share.train),
            "model": self.model_name,
            "input-size": math.prod(self.share.everything.x.shape[1:]),
        }

    def domain(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """Its half of the linear classifiers ``weights`` that tell its inputs from others'; its
        label is the config's ``side``. See `clients.domain`."""
        samples = self.share.everything if self.share.novel else self.share.train
        weights = torch.from_numpy(arrays["weights"])
        seed = seed_of(self.seed, "domain", self.client)
        return half(samples.to(self.device), weights, float(config["side"]), seed), {}

    def keep(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """All that it keeps between rounds, for the checkpoint of a simulation."""
        return self.state, {}

    def recall(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """Take back what `keep` told."""
        self.state = dict(arrays)
        return {}, {}

    # What methods call

    def load(self, arrays: Arrays) -> None:
        """Set the whole model: shared arrays as sent, personal ones from state, else initial.

        Raises ValueError for an array that the model lacks or whose shape differs."""
        personal = group(self.state, "personal")
        target = self.model.state_dict()
        if unknown := arrays.keys() - target.keys():
            raise ValueError(f"arrays {sorted(unknown)} are unknown to the model: {list(target)}")
        with torch.no_grad():
            places: set[int] = set()  # of a tied parameter's names the first one counts
            for name, tensor in target.items():
                if tensor.data_ptr() in places:
                    continue
                places.add(tensor.data_ptr())
                source = arrays.get(name, personal.get(name, self.initial.get(name)))
                if source is None:
                    raise ValueError(f"no value for the model's array {name!r}")
                if source.shape != tuple(tensor.shape):
                    raise ValueError(
                        f"array {name!r} has shape {source.shape}, the model {tuple(tensor.shape)}"
                    )
                tensor.copy_(torch.from_numpy(np.asarray(source)))

    def arrays(self) -> Arrays:
        """The shared arrays of the model; the personal ones go to the state."""
        own = to_numpy(self.model.state_dict())
        self.state |= prefixed("personal", {n: a for n, a in own.items() if self.is_personal(n)})
        return {n: a for n, a in own.items() if not self.is_personal(n)}

    def rows(
        self, config: Config, purpose: str = "batches", epochs: int | None = None
    ) -> Sequence[Tensor]:
        """The mini-batches of this round, by a generator of (seed, purpose, round, client).

        `epochs` replaces the settings' number of steps or epochs."""
        generator = torch.Generator().manual_seed(
            seed_of(self.seed, purpose, int(config.get("server-round", 0)), self.client)
        )
        return batches(
            len(self.share.train),
            self.batch_size,
            steps=self.local_steps,
            epochs=self.local_epochs if epochs is None else epochs,
            generator=generator,
            short=self.short_batches,
        )

    def slow(self, factor: float) -> None:
        """Set its learning rates to `factor` times those that it was given."""
        self._rates = self._rates or {name: getattr(self, name) for name in self.rates}
        for name, rate in self._rates.items():
            setattr(self, name, factor * rate)

    def fit_locally(self, config: Config, **options: Any) -> float:
        """Local SGD on `loss` over this round's mini-batches; returns the mean loss.

        `options` replace what `sgd` is called with: parameters, samples, rows, loss, lr, …"""
        self.model.train()
        settings: dict[str, Any] = {
            "parameters": self.model.parameters(),
            "samples": self.share.train,
            "loss": self.loss,
            "lr": self.lr,
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
        } | options
        settings["samples"] = settings["samples"].to(self.device)
        settings["parameters"] = list(settings["parameters"])
        if "rows" not in settings:
            settings["rows"] = self.rows(config)
        return fit(self, settings)

    def _score(self, key: str, samples: Samples, metrics: Metrics) -> tuple[float, int]:
        """Put the accuracy of `samples` under `key`; returns mean loss and labeled count.

        Under "accuracy" also what the adaptation tells, and the accuracies of its stages."""
        if not len(samples):
            return 0.0, 0
        x, y = samples.to(self.device)[:]
        logits = self.predict(x)
        labeled = y != UNLABELED
        stages = self.stages if key == "accuracy" else {}
        metrics |= self.adapted if key == "accuracy" else {}
        count = int(labeled.sum())
        if not count:
            return 0.0, 0
        for name, z in stages.items():
            metrics[f"{name}-accuracy"] = float((z.argmax(1) == y)[labeled].float().mean())
        logits, y = logits[labeled], y[labeled]
        predicted = logits.argmax(1)
        metrics[key] = float((predicted == y).float().mean())
        if SUB_POPULATION in self.share.attributes:  # TN, FP, FN, TP of a user with a taste
            metrics["counts"] = torch.bincount(2 * y + predicted, minlength=4).tolist()
            metrics[SUB_POPULATION] = int(self.share.attributes[SUB_POPULATION])
        return float(F.cross_entropy(logits, y)), count

    # Flower's contract

    def get_properties(self, config: Config) -> Config:
        """The client's identity, role and sample count."""
        return self.properties()

    def get_parameters(self, config: Config) -> NDArrays:
        """The initial shared arrays, in the model's order."""
        return [a for n, a in self.initial.items() if not self.is_personal(n)]

    def fit(self, parameters: NDArrays, config: Config) -> tuple[NDArrays, int, Metrics]:
        """Train on named arrays; names travel in `config` and in the metrics."""
        self.begin("train", config)
        reply, n, metrics = self.train(self._named(parameters, config), config)
        return list(reply.values()), n, metrics | self._names(reply, config)

    def evaluate(self, parameters: NDArrays, config: Config) -> tuple[float, int, Metrics]:
        """Score the model that the named arrays make."""
        self.begin("evaluate", config)
        return self.score(self._named(parameters, config), config)

    def begin(self, purpose: str, config: Config) -> None:
        """The round's learning rates, and what dropout and noise draw: the call alone decides it,
        though they use torch's global generator."""
        self.slow(float(config.get(LR_FACTOR, 1.0)))
        seed = seed_of(self.seed, purpose, int(config.get("server-round", 0)), self.client)
        seed_torch(seed)

    def _named(self, parameters: NDArrays, config: Config) -> Arrays:
        """Pair the list with ``config["names"]``; without it the model's own order holds."""
        if NAMES in config:
            names = [name for name in str(config[NAMES]).split("\n") if name]
        else:
            names = [name for name in self.initial if not self.is_personal(name)]
        if len(names) != len(parameters):
            raise ValueError(f"{len(parameters)} arrays for {len(names)} names: {names}")
        return dict(zip(names, parameters, strict=True))

    @staticmethod
    def _names(arrays: Arrays, config: Config) -> Metrics:
        return {NAMES: "\n".join(arrays)} if NAMES in config else {}


def _on(device: str, model: nn.Module) -> nn.Module:
    """The model on the device; ``to`` would walk through all of it where it is there already."""
    one = next(model.parameters(), None)
    return model if one is not None and one.device == torch.device(device) else model.to(device)
