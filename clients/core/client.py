"""The client that every method starts from: FedAvg's (McMahan et al., AISTATS 2017, Algorithm 1,
ClientUpdate). A method overrides one or two of `personal`, `loss`, `train`, `receive`, `predict`.

Beside it stand local SGD (`clients.core.sgd`), scoring (`clients.core.evaluation`) and the messages
to Flower's NumPyClient (`clients.core.protocol`)."""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clients.core.arrays import Arrays, group, load_into_model, model_arrays, prefixed, to_tensors
from clients.core.cohort import run_sgd
from clients.core.criterion import Criterion
from clients.core.domain import domain_gradient
from clients.core.evaluation import Streaming, by_parts, score_parts, score_samples
from clients.core.flower_fast import NumPyClient
from clients.core.layout import layout_of
from clients.core.protocol import (
    LR_FACTOR,
    NAMES,
    UNLABELED,
    Config,
    FewShot,
    Metrics,
    NDArrays,
    StateUse,
    with_names,
)
from clients.core.sgd import batches, train_only
from fedapps.common.class_members import Renamed
from fedapps.common.memory_limits import PASS_MEGABYTES, num_parts
from fedapps.common.seeds import SEED, seed_of, seed_torch
from fedapps.common.settings import COUNT, MOMENTUM, POSITIVE_INT, RATE, Configured, setting, taken
from partitions.datasets.loading import Info
from partitions.shares import Share

has_cuda = cache(torch.cuda.is_available)  # slow, and asked for every message


class Client(Streaming, Configured, NumPyClient):
    """One client with its model and its share of the data.

    `client` is its id, `initial` the arrays that the model starts from (default: its present ones),
    `model_name` the network's name for the server. Raises ValueError for a setting out of its range
    and for a device that is missing."""

    renamed: ClassVar[Mapping[str, str]] = {
        "has_global": "also_scores_global_model",
        "separate": "separately_trained",
        "stacked": "vmapped_tensors",
        "sent": "shared_names",
        "goes_on": "supports_streaming",
    }
    adapted = Renamed("adaptation_metrics")
    stages = Renamed("intermediate_logits")

    # Prefixes of the model's names: what never leaves the client, and what else is trained
    # separately from the rest.
    personal: tuple[str, ...] = ()
    separately_trained: tuple[str, ...] = ()
    # Attributes, lists of tensors, that `loss` reads. A class with a `loss` and without this line
    # trains in no cohort.
    vmapped_tensors: tuple[str, ...] = ()
    rates: tuple[str, ...] = ("lr",)  # attributes that are learning rates, which may decay
    few_shot: FewShot = FewShot.TUNED
    # Whether a novel client gets another model than a training client. Training clients then score
    # both, the former as if they came now; each decides the round that its group reports.
    also_scores_global_model = False
    needs_head = False  # the network must be ``head(features(x))``, see `clients.models.head`
    batchwise = False  # `predict` itself splits inputs into batches of `novel_batch`
    needs_public = False  # learns from public samples, which belong to no client
    # Further messages, e.g. ("query.encode",), and what else strategies may require of it.
    exchanges: tuple[str, ...] = ()
    offers: tuple[str, ...] = ()
    needs_state: StateUse = StateUse.NONE
    # Messages, beside train messages, after which the state is stored; prefixes of the state's
    # names that are kept across runs.
    saves_state_after: tuple[str, ...] = ()
    state_across_runs: tuple[str, ...] = ()

    lr = setting(0.3, "learning rate of local SGD", RATE)
    momentum = setting(0.0, "momentum of local SGD, fresh in each round", MOMENTUM)
    weight_decay = setting(0.0, "weight decay of local SGD", "[0, 10]")
    local_steps = setting(20, "mini-batches of local training in a round", COUNT)
    local_epochs = setting(0, "when > 0: epochs of local training instead of local-steps", COUNT)
    batch_size = setting(64, "samples of a mini-batch", POSITIVE_INT)
    short_batches = setting(False, "the last mini-batch of a pass has what remains")
    pass_megabytes = setting(
        PASS_MEGABYTES,
        "megabytes of inputs that are predicted or adapted to at once",
        "(0, 1024]",
    )
    novel_batch = setting(
        0, "inputs of a novel client that are adapted to and predicted at once; 0: all", COUNT
    )
    novel_stream = setting(
        False, "a novel client's adaptation to a batch starts from the batches before it, if it can"
    )
    novel_steps = setting(
        20,
        "mini-batches that a novel client learns from with novel-shots",
        COUNT,
        beside="novel-shots!=0",
    )
    novel_lr = setting(
        0.1,
        "its learning rate then, which does not decay; 0: as in training",
        RATE,
        beside="novel-shots!=0",
    )
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
            self.device = "cuda" if has_cuda() else "cpu"
        if self.device == "cuda" and not has_cuda():
            raise ValueError("device is 'cuda', but no CUDA device is visible")
        layout = layout_of(model)
        if layout.devices != {self.device}:
            model = model.to(self.device)  # slow, even where nothing moves
        self.model, self.share = model, share
        self.client, self.model_name = client, model_name
        self.initial = model_arrays(model) if initial is None else initial
        # names; made on both sides, never sent
        parameters = layout.parameters.items()
        self.frozen = frozenset(name for name, p in parameters if not p.requires_grad)
        self.criterion: Criterion = F.cross_entropy  # used wherever outputs meet labels
        self.state: Arrays = {}  # kept between rounds
        self.stream = {}
        self.adaptation_metrics: Metrics = {}  # metrics of the last prediction's adaptation
        self.intermediate_logits: dict[
            str, Tensor
        ] = {}  # its logits (n, C) at earlier stages, by name
        self._given_rates: dict[str, float] = {}  # learning rates before decay

    # What a method overrides

    @classmethod
    def is_personal(cls, name: str) -> bool:
        """Whether the model's array `name` stays on the client."""
        return name.startswith(cls.personal)

    @classmethod
    def shared(cls, initial: Arrays, /, *args: Any, **settings: Any) -> Arrays:
        """The part of the network's initial arrays that the server starts from: all but the
        personal ones. An override may take settings of the method by keyword."""
        return {name: a for name, a in initial.items() if not cls.is_personal(name)}

    @classmethod
    def build(cls, model: nn.Module, info: Info, /, *args: Any, **settings: Any) -> nn.Module:
        """The method's whole network around the target network `model`; by default just that.

        An override may take settings of the method by keyword. Torch's seed is set before the
        call, so server and clients start from the same arrays."""
        return model

    @classmethod
    def uses_head(cls, values: Mapping[str, Any], /) -> bool:
        """Whether the method with these settings needs the network's head: `needs_head`."""
        return cls.needs_head

    @classmethod
    def build_network(cls, model: nn.Module, info: Info, /, **settings: Any) -> nn.Module:
        """`build` with those of `settings`, and of the declared defaults, that it takes.

        Raises ValueError for a setting out of its range."""
        known = {name: declared.default for name, declared in cls.declared.items()} | settings
        cls.check(**{name: value for name, value in settings.items() if name in cls.declared})
        return cls.build(model, info, **{n: known[n] for n in taken(cls.build) if n in known})

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Training loss of a mini-batch: the mean `criterion`; x (n, *shape), y (n,)."""
        return self.criterion(self.model(x), y)

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Local training from `arrays`, which are read-only; returns the model's shared arrays."""
        self.load(arrays)
        loss = self.fit_locally(config)
        return self.arrays(), len(self.share.train), {"loss": loss}

    def receive(self, arrays: Arrays, config: Config) -> None:
        """Make the model ready to predict, from the arrays that the server sent."""
        self.load(arrays)
        self.model.eval()

    def tune(self, config: Config) -> None:
        """Train on the few labeled samples of a novel client, its `share.train`, before scoring:
        on the cross entropy, the parameters that `is_tuned`. `rows` and `fit_locally` then have
        `novel_steps` and `novel_lr`."""
        rows, loss = self.rows(config, "shots"), partial(Client.loss, self)
        with train_only(self.model, self.is_tuned) as parameters:
            self.fit_locally(config, rows=rows, loss=loss, parameters=parameters)
        self.model.eval()

    def is_tuned(self, name: str) -> bool:
        """Whether a novel client's few labels train the model's parameter `name`."""
        return True

    def predict(self, x: Tensor) -> Tensor:
        """Logits (n, classes) for the inputs x (n, *shape), after adaptation to them if any."""
        return by_parts(self.model, self.parts(x))

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """x in parts of at most about `pass_megabytes`, to bound memory; of two inputs or more,
        since one has no batch statistics."""
        return x.tensor_split(min(num_parts(x.shape, self.pass_megabytes), max(1, len(x) // 2)))

    def score(self, arrays: Arrays, config: Config) -> tuple[float, int, Metrics]:
        """Loss, sample count and accuracies of the model on validation, test or novel data.

        A novel client is scored on all its data except the samples that it has trained on."""
        self.receive(arrays, config)
        if self.share.shots and self.few_shot == FewShot.TUNED and len(self.share.train):
            self.tune(config)
        select = str(config.get("select", ""))
        loss, labeled, metrics = score_parts(self, bool(config.get("bound")), select)
        if self.also_scores_global_model and not self.share.novel:
            newcomer = copy(self)
            newcomer.share, newcomer.state = replace(self.share, novel=True), {}
            newcomer.receive(arrays, config)
            other, count, scores = score_samples(
                newcomer, self.share.validation, "global-accuracy", select
            )
            metrics |= scores | ({"global-loss": other} if select == "loss" and count else {})
        return loss, labeled, metrics

    def domain(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """Its part in training domain classifiers ``weights``, under the label ``side``."""
        samples = self.share.everything if self.share.novel else self.share.train
        weights = to_tensors(arrays)["weights"]
        seed = seed_of(self.seed, "domain", self.client)
        return domain_gradient(samples.to(self.device), weights, float(config["side"]), seed), {}

    # What methods call

    def load(self, arrays: Arrays) -> None:
        """Set the whole model: arrays as sent, else personal ones from the state, else initial.

        Raises ValueError for an array that the model lacks or whose shape differs."""
        personal = group(self.state, "personal")
        load_into_model(self.model, arrays, self.initial | personal if personal else self.initial)

    def lacks_state(self, arrays: Arrays) -> bool:
        """Whether a training client has neither kept its personal part nor got it in `arrays`."""
        needs = self.needs_state == StateUse.PREDICTIONS and not self.share.unlabeled
        return needs and not self.state and not any(map(self.is_personal, arrays))

    def shared_names(self) -> list[str]:
        """The names of what is sent: all but personal and frozen arrays."""
        return [n for n in self.initial if not self.is_personal(n) and n not in self.frozen]

    def arrays(self) -> Arrays:
        """The shared arrays of the model; the personal ones go to the state."""
        arrays = model_arrays(self.model, self.frozen)
        personal = {n: a for n, a in arrays.items() if self.is_personal(n)}
        self.state |= prefixed("personal", personal)
        return {n: a for n, a in arrays.items() if n not in personal}

    def rows(self, config: Config, purpose: str = "batches", **count: int) -> Sequence[Tensor]:
        """The mini-batches of this round, by a generator of (seed, purpose, round, client).

        `count`, ``steps=…`` or ``epochs=…``, replaces the settings' number."""
        few = self.share.novel and self.few_shot == FewShot.TUNED
        usual = {"steps": self.local_steps, "epochs": self.local_epochs}
        count = count or ({"steps": self.novel_steps} if few else usual)
        generator = torch.Generator().manual_seed(
            seed_of(self.seed, purpose, int(config.get("server-round", 0)), self.client)
        )
        n, size, short = len(self.share.train), self.batch_size, self.short_batches
        return batches(n, size, generator=generator, short=short, **count)

    def fit_locally(self, config: Config, **options: Any) -> float:
        """Local SGD on `loss` over this round's mini-batches; returns the mean loss.

        `options` replace the arguments of `sgd`: parameters, samples, rows, loss, lr, …"""
        layout = layout_of(self.model)
        if not (self.model.training and all(module.training for module in layout.children)):
            self.model.train()  # slow, even where nothing changes
        few = self.share.novel and self.few_shot == FewShot.TUNED
        settings: dict[str, Any] = {
            "parameters": layout.distinct,
            "samples": self.share.train,
            "loss": self.loss,
            "lr": (few and self.novel_lr) or self.lr,
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
        } | options
        settings["samples"] = settings["samples"].to(self.device)
        settings["parameters"] = list(settings["parameters"])
        if "rows" not in settings:
            settings["rows"] = self.rows(config)
        return run_sgd(self, settings)

    # Flower's contract

    def get_properties(self, config: Config) -> Config:
        """The client's identity, role and sample count, and whether it has no labels."""
        return {
            **({UNLABELED: True} if self.share.unlabeled else {}),
            "client": self.client,
            "novel": self.share.novel,
            "num-examples": len(self.share.everything if self.share.novel else self.share.train),
            "model": self.model_name,
            "input-size": math.prod(self.share.everything.x.shape[1:]),
        }

    def get_parameters(self, config: Config) -> NDArrays:
        """The initial shared arrays, in the model's order."""
        return [self.initial[name] for name in self.shared_names()]

    def fit(self, parameters: NDArrays, config: Config) -> tuple[NDArrays, int, Metrics]:
        """`train` on named arrays; the names travel in `config` and in the metrics."""
        self.begin("train", config)
        arrays = with_names(parameters, config, self.shared_names())
        reply, n, metrics = self.train(arrays, config)
        if NAMES in config:
            metrics = metrics | {NAMES: "\n".join(reply)}
        return list(reply.values()), n, metrics

    def evaluate(self, parameters: NDArrays, config: Config) -> tuple[float, int, Metrics]:
        """`score` of named arrays."""
        self.begin("evaluate", config)
        return self.score(with_names(parameters, config, self.shared_names()), config)

    def begin(self, purpose: str, config: Config) -> None:
        """Set the round's learning rates, and seed torch's global generator for dropout and noise:
        the call alone decides its draws."""
        self._given_rates = self._given_rates or {n: getattr(self, n) for n in self.rates}
        for name, rate in self._given_rates.items():
            setattr(self, name, float(config.get(LR_FACTOR, 1.0)) * rate)
        seed_torch(seed_of(self.seed, purpose, int(config.get("server-round", 0)), self.client))
