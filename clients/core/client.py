"""FedAvg's client (McMahan et al., AISTATS 2017, Algorithm 1), which every method extends.

A method overrides one or two of `personal`, `loss`, `train`, `receive` and `predict`. See also
local SGD (`clients.core.sgd`), scoring (`clients.core.evaluation`) and the keys and types of
messages (`clients.core.protocol`)."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from functools import cache, partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from clients.core.arrays import (
    Arrays,
    OtherShapeError,
    group,
    load_into_model,
    model_arrays,
    prefixed,
    to_tensors,
)
from clients.core.cohort import in_cohort, run_in_cohort
from clients.core.copies import copy_of
from clients.core.criterion import Criterion
from clients.core.domain import domain_gradient
from clients.core.draws import Draws
from clients.core.evaluation import (
    CRITERIA,
    Choice,
    OwnScore,
    by_parts,
    score_parts,
    score_samples,
)
from clients.core.flower_fast import NumPyClient
from clients.core.layout import layout_of, set_training
from clients.core.mixed_precision import MixedPrecision
from clients.core.own_optimizer import OwnOptimizer
from clients.core.protocol import (
    BOUND,
    CLIENT,
    INPUT_SIZE,
    LOSS,
    LR_FACTOR,
    MODEL,
    NAMES,
    NOVEL,
    NUM_EXAMPLES,
    SELECTED_SCORE,
    SIDE,
    UNLABELED,
    Config,
    FewShot,
    Metrics,
    NDArrays,
    StateUse,
    round_of,
    with_names,
)
from clients.core.saved_states import check_kept
from clients.core.sgd import batches, sgd, train_only
from fedapps.common.class_members import Renamed
from fedapps.common.memory_limits import PASS_MEGABYTES, num_parts
from fedapps.common.seeds import SEED, seed_of, seed_torch
from fedapps.common.settings import (
    COUNT,
    MOMENTUM,
    NONNEGATIVE,
    POSITIVE_INT,
    RATE,
    Configured,
    Value,
    setting,
    taken,
)
from fedapps.common.tasks import ALL_TASKS, CLASSES, not_served
from partitions.datasets.loading import Info
from partitions.shares import Share


class OwnSteps(Protocol):
    """Local training by methods of the user's network."""

    def within(
        self, model: nn.Module, settings: dict[str, Any], factor: float, batches_per_epoch: int
    ) -> AbstractContextManager[dict[str, Any]]:
        """The arguments of `sgd` in the place of `settings`, at `factor` times the learning rates;
        an epoch has `batches_per_epoch`, 0 where it is not known."""


# Each message builds a client, and torch's own check is slow.
has_cuda = cache(torch.cuda.is_available)


class Client(Configured, NumPyClient):
    """One client with its model and its share of the data.

    `client` is the client's id. `initial` holds the arrays that the model starts from; by default
    these are the model's present arrays. `model_name` is the network's name for the server.
    Raises ValueError for a setting out of its range and for a device that is missing."""

    renamed: ClassVar[Mapping[str, str]] = {
        "has_global": "also_scores_global_model",
        "separate": "separately_trained",
        "stacked": "vmapped_tensors",
        "sent": "shared_names",
        "goes_on": "supports_streaming",
    }
    adapted = Renamed("adaptation_metrics")
    stages = Renamed("intermediate_logits")

    # What a method declares about its model

    # Name prefixes of the arrays that never leave the client.
    personal: tuple[str, ...] = ()
    # Name prefixes of further arrays that the method trains separately from the other arrays.
    separately_trained: tuple[str, ...] = ()
    # The network must have the form ``head(features(x))``, see `clients.models.head`.
    needs_head = False
    # A method with a head needs to know its arrays' names alone: `head` may be any layer, and other
    # steps may follow it.
    head_by_name = False
    # The client learns from public samples, which belong to no client.
    needs_public = False
    # The tasks that the method serves, see `fedapps.common.tasks`. A class with a `loss` of its own
    # serves only classes, unless it says so again: the loss may be the cross entropy.
    tasks: tuple[str, ...] = ALL_TASKS

    # What a method declares about training

    # Attributes that `loss` reads, each a list of tensors. If a class defines `loss` without this
    # line, its clients do not train in a cohort.
    vmapped_tensors: tuple[str, ...] = ()
    # The mathematics holds for any optimizer of local training. A class that defines `train` or
    # `fit_locally` without this line trains by SGD alone, see `takes_optimizer`.
    any_optimizer = True
    # The loss of local training may be that of the user's own `training_step`: nothing else that
    # the method learns needs the outputs' loss.
    any_loss = True
    # Attributes that are learning rates, which may decay over the rounds.
    rates: tuple[str, ...] = ("lr",)
    few_shot: FewShot = FewShot.TUNED

    # What a method declares about evaluation

    # Training clients evaluate the personal and the global model. The first chooses the round
    # reported for training clients, the second the round reported for novel clients.
    also_scores_global_model = False
    # `predict` itself splits inputs into batches of `novel_batch`.
    batchwise = False
    # A prediction computes gradients of the network in evaluation mode.
    adapts_by_gradients = False
    # An `update` continues from the previous one. A method in which a setting decides this has a
    # property of this name.
    supports_streaming = False

    # What a method declares about messages and state

    # Types of further messages that the client answers, for example ("query.encode",).
    exchanges: tuple[str, ...] = ()
    # Further capabilities that a strategy may require.
    offers: tuple[str, ...] = ()
    needs_state: StateUse = StateUse.NONE
    # Types of messages after which the state is stored; it is always stored after train messages.
    saves_state_after: tuple[str, ...] = ()
    # Name prefixes of the state's arrays that are kept across runs.
    state_across_runs: tuple[str, ...] = ()

    lr = setting(0.3, "learning rate of local SGD", RATE)
    momentum = setting(
        0.0, "momentum of local SGD; its buffer starts at zero in each round", MOMENTUM
    )
    weight_decay = setting(0.0, "weight decay of local SGD", "[0, 10]")
    local_clip_norm = setting(
        0.0, "clip the gradient of each mini-batch's loss to this norm; 0: off", NONNEGATIVE
    )
    local_steps = setting(20, "mini-batches of local training in a round", COUNT)
    local_epochs = setting(0, "when > 0: epochs of local training instead of local-steps", COUNT)
    batch_size = setting(64, "samples of a mini-batch", POSITIVE_INT)
    short_batches = setting(False, "keep the last, smaller mini-batch of each epoch")
    batch_draws = setting(
        "passes",
        "mini-batches of local-steps: from passes over the shuffled samples, or independent draws "
        "from all of them",
        ("passes", "independent"),
        beside="local-epochs=0",
    )
    pass_megabytes = setting(
        PASS_MEGABYTES,
        "megabytes of inputs in one forward pass; more inputs take several passes",
        "(0, 1024]",
    )
    novel_batch = setting(
        0,
        "batch size of a novel client's adaptation and prediction; 0: all inputs",
        COUNT,
        evaluation=True,
    )
    novel_stream = setting(
        False,
        "adapt online: continue from the previous batch instead of resetting",
        evaluation=True,
    )
    novel_steps = setting(
        20,
        "mini-batches on which a novel client trains with its novel-shots",
        COUNT,
        beside="novel-shots!=0",
        evaluation=True,
    )
    novel_lr = setting(
        0.1,
        "learning rate of a novel client, without decay; 0: the learning rate of training clients",
        RATE,
        beside="novel-shots!=0",
        evaluation=True,
    )
    seed = SEED
    device = setting("auto", "auto: cuda if available, else cpu", ("auto", "cpu", "cuda"))

    @classmethod
    def served_tasks(cls) -> tuple[str, ...]:
        """`tasks`, or only classes for a class that has a `loss` and does not declare them."""
        for kind in cls.__mro__:
            if "tasks" in vars(kind):
                break
            if "loss" in vars(kind):
                return (CLASSES,)
        return cls.tasks

    @classmethod
    def check_serves(cls, task: str) -> None:
        """Raise ValueError if the method's clients do not serve the task."""
        if task in cls.served_tasks():
            return
        advice = ""
        if task in cls.tasks:
            advice = (
                f". It has a loss of its own: add tasks = ({task!r}, …) to the class if this loss "
                "serves the task, as one that calls self.criterion or super().loss does"
            )
        raise ValueError(not_served(cls.__name__, cls.served_tasks(), task) + advice)

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
        self.check_serves(share.targets.task)
        if self.device == "auto":
            self.device = "cuda" if has_cuda() else "cpu"
        if self.device == "cuda" and not has_cuda():
            raise ValueError("device is 'cuda', but no CUDA device is visible")
        layout = layout_of(model)
        if layout.devices != {self.device}:  # `to` is slow even if nothing moves
            model = model.to(self.device)
        self.model = model
        self.share = share
        self.client = client
        self.model_name = model_name
        self.initial = model_arrays(model) if initial is None else initial
        # Names of frozen parameters: server and clients build them from the seed, none is sent.
        parameters = layout.parameters.items()
        self.frozen = frozenset(name for name, p in parameters if not p.requires_grad)
        # What the labels mean; the loss of outputs and labels, in training and in evaluation; and
        # the user's own scores of outputs and labels, by name.
        self.targets = share.targets
        self.criterion: Criterion = CRITERIA[share.targets.task]
        self.own_optimizer: OwnOptimizer | None = None  # of the user, in place of SGD
        self.own_steps: OwnSteps | None = None  # of the user's network, in place of loss and SGD
        self.autocast = ""  # type of forward passes in local training, "": that of the parameters
        self.draws: Draws | None = None  # of the user, in place of passes over all samples
        self.own_scores: Mapping[str, OwnScore] = {}
        self.common: Config = {}  # properties that all nodes share, which the server compares
        # Clients of the methods that this one chooses from, by name, with this one's network.
        self.method_clients: Mapping[str, Client] = {}
        # The arrays that persist on the client between rounds.
        self.state: Arrays = {}
        # The tensors that the previous updates hand to the next one; {} before the first update.
        self.stream: dict[str, Tensor] = {}
        # Of the last prediction: metrics of its adaptation, which correction was chosen if the
        # method chooses, and logits (n, C) before its end.
        self.adaptation_metrics: Metrics = {}
        self.choice: Choice | None = None
        self.intermediate_logits: dict[str, Tensor] = {}
        # Learning rates before decay, by attribute.
        self._given_rates: dict[str, float] = {}

    # What a method overrides

    @classmethod
    def is_personal(cls, name: str) -> bool:
        """Whether the model's array `name` stays on the client."""
        return name.startswith(cls.personal)

    @classmethod
    def shared(cls, initial: Arrays, /, *args: Any, **settings: Any) -> Arrays:
        """The initial arrays that the server starts from: all arrays that are not personal.

        An override may take settings of the method by keyword."""
        return {name: a for name, a in initial.items() if not cls.is_personal(name)}

    @classmethod
    def build(cls, model: nn.Module, info: Info, /, *args: Any, **settings: Any) -> nn.Module:
        """The method's whole network around the target network `model`; by default `model` itself.

        An override may take settings of the method by keyword. Torch's seed is set before the
        call, so server and clients start from the same arrays."""
        return model

    @classmethod
    def caveats(cls, network: nn.Module, /, *args: Any, **settings: Any) -> list[str]:
        """What `fedapps run` says before a run of the method begins, such as what this network does
        not allow; `network` is that of `build`.

        An override may take settings of the method by keyword, the `shape` of an input, and the
        `shares` of the training clients."""
        return []

    @classmethod
    def bytes_after_rounds(
        cls, network: nn.Module, num_training: int, /, *args: Any, **settings: Any
    ) -> int:
        """What the method's exchanges with so many training clients hold at most after the last
        round, in bytes, for the estimate of a run's memory.

        An override may take settings of the method by keyword."""
        return 0

    @classmethod
    def settings_for(
        cls, shares: Iterable[Share], /, *args: Any, **settings: Any
    ) -> dict[str, Value]:
        """Settings of the method, by their keys, that `fedapps run` replaces because the training
        clients' data, `shares`, leave the given ones without effect. `caveats` says so.

        An override may take settings of the method by keyword."""
        return {}

    @classmethod
    def uses_head(cls, values: Mapping[str, Any], /) -> bool:
        """Whether the method with these settings needs the network's head: `needs_head`."""
        return cls.needs_head

    @classmethod
    def takes_optimizer(cls) -> bool:
        """Whether a user's optimizer may replace the SGD of local training."""
        for name in ("train", "fit_locally"):
            definer = next(kind for kind in cls.__mro__ if name in vars(kind))
            if not vars(definer).get("any_optimizer", False):
                return False
        return True

    @classmethod
    def takes_own_steps(cls) -> bool:
        """Whether local training may be that of a user's network, with its loss and optimizer."""
        kind = next(kind for kind in cls.__mro__ if "loss" in vars(kind))
        return kind is Client and cls.any_loss and cls.takes_optimizer()

    @classmethod
    def build_network(cls, model: nn.Module, info: Info, /, **settings: Any) -> nn.Module:
        """Call `build` with the settings that it takes, see `arguments_for`.

        Raises ValueError for a setting out of its range."""
        given: dict[str, Any] = {}
        # `settings` also hold values that the class does not declare, such as num_clients.
        for name, value in settings.items():
            if name in cls.declared:
                given[name] = value
        cls.check(**given)
        return cls.build(model, info, **cls.arguments_for(cls.build, settings))

    @classmethod
    def arguments_for(
        cls, function: Callable[..., Any], settings: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What `function` takes by keyword: from `settings`, else the class's declared default, as
        for a setting that the method hides."""
        values = {name: declared.default for name, declared in cls.declared.items()}
        values |= settings
        return {name: values[name] for name in taken(function) if name in values}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Training loss of a mini-batch: the mean `criterion`; x (n, *shape), y (n,) or (n, k)."""
        return self.criterion(self.model(x), y)

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Local training from `arrays`, which are read-only; returns the model's shared arrays."""
        self.load(arrays)
        loss = self.fit_locally(config)
        return self.arrays(), len(self.share.train), {LOSS: loss}

    def receive(self, arrays: Arrays, config: Config) -> None:
        """Make the model ready to predict, from the arrays that the server sent."""
        self.load(arrays)
        set_training(self.model, False)

    def tune(self, config: Config) -> None:
        """Train on a novel client's few labeled samples, `share.train`, before scoring.

        Trains the parameters that `is_tuned` on the mean `criterion`, for `novel_steps` at
        `novel_lr`."""
        rows = self.rows(config, "shots")
        loss = partial(Client.loss, self)
        with train_only(self.model, self.is_tuned) as parameters:
            self.fit_locally(config, rows=rows, loss=loss, parameters=parameters)
        self.model.eval()

    def is_tuned(self, name: str) -> bool:
        """Whether `tune` trains the model's parameter `name`."""
        return True

    def predict(self, x: Tensor) -> Tensor:
        """Logits (n, C) of the inputs x (n, *shape). A method may adapt the model to x first."""
        return by_parts(self.model, self.parts(x))

    def update(self, x: Tensor) -> Tensor:
        """Logits (n, C) of the next inputs x (n, *shape) after adaptation to x.

        If the method `supports_streaming`, the model is adapted to all previous inputs too. The
        size of `stream` does not grow."""
        return self.predict(x)

    def personal_model(self, x: Tensor) -> nn.Module:
        """A copy, in evaluation mode, of the network that made the last prediction, that of x."""
        return copy_of(self.model).eval()

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """x in parts of at most about `pass_megabytes`, to bound memory."""
        count = num_parts(x.shape, self.pass_megabytes)
        # A part has at least two inputs if x has: one input has no batch statistics.
        return x.tensor_split(min(count, max(1, len(x) // 2)))

    def score(self, arrays: Arrays, config: Config) -> tuple[float, int, Metrics]:
        """Loss, number of labeled samples and metrics on validation, test or novel data.

        A novel client is scored on all its data except the samples that it has trained on."""
        self.receive(arrays, config)
        if self.share.shots and self.few_shot == FewShot.TUNED and len(self.share.train):
            self.tune(config)
        select = str(config.get(SELECTED_SCORE, ""))
        loss, labeled, metrics = score_parts(self, bool(config.get(BOUND)), select)
        if self.also_scores_global_model and not self.scored_as_novel:
            metrics |= self._score_as_novel(arrays, config, select)
        return loss, labeled, metrics

    def serve(self, arrays: Arrays, config: Config) -> tuple[nn.Module, Tensor]:
        """The personal network, and its logits (n, C) for all the client's inputs."""
        self.begin("evaluate", config)
        self.receive(arrays, config)
        x, _ = self.share.everything.to(self.device)[:]
        logits = self.update(x)
        return self.personal_model(x), logits

    def network_of_last_update(self, arrays: Arrays, config: Config) -> nn.Module:
        """A network of the structure that the last update has left, by `stream`, for the arrays of
        a saved one. The client's inputs are blank."""
        network, _ = self.serve(arrays, config)
        return network

    @property
    def scored_as_novel(self) -> bool:
        """Whether it is scored on all its data, as novel clients are, and adapts to them."""
        return self.share.novel

    def _score_as_novel(self, arrays: Arrays, config: Config, select: str) -> Metrics:
        """Metrics on the validation data by the model that the client would get as a novel one."""
        novel = copy(self)
        novel.share = replace(self.share, novel=True)
        novel.state = {}
        novel.receive(arrays, config)
        loss, count, metrics = score_samples(novel, self.share.validation, "global-", select)
        if select == "loss" and count:
            metrics["global-loss"] = loss
        return metrics

    def domain(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """Gradient and error rate of the domain classifiers ``weights`` on this client's inputs.

        The inputs have the label ``side``. See `clients.core.domain`."""
        samples = self.share.everything if self.share.novel else self.share.train
        weights = to_tensors(arrays)["weights"]
        side = float(config[SIDE])
        seed = seed_of(self.seed, "domain", self.client)
        return domain_gradient(samples.to(self.device), weights, side, seed), {}

    def check_saved(self, arrays: Arrays, state: Arrays) -> None:
        """Raise ValueError if the client cannot go on from the server's `arrays` and its own
        `state`, both of a saved run."""
        kept = group(state, "personal")
        # If nothing is shared, no array of the server shows that the network has more layers.
        complete = bool(kept) and self.personal == ("",)
        network = model_arrays(self.model, self.frozen)
        check_kept(self.client, kept, network, complete=complete)

    # What methods call

    def load(self, arrays: Arrays) -> None:
        """Set every array of the model: from `arrays`, else from the state, else from `initial`.

        Raises ValueError for an array that the model lacks or whose shape differs."""
        fallback = self.initial
        personal = group(self.state, "personal")
        if personal:
            fallback = self.initial | personal
        try:
            load_into_model(self.model, arrays, fallback)
        except OtherShapeError as error:
            shape = tuple(self.share.everything.x.shape[1:])
            raise ValueError(
                f"{error}: the run has other inputs, classes or another model than this client, "
                f"whose inputs have the shape {shape}; give all clients data of the same columns "
                "and classes"
            ) from error

    def lacks_state(self, arrays: Arrays) -> bool:
        """Whether a training client has no personal arrays, in its state or in `arrays`."""
        needs_state = self.needs_state == StateUse.PREDICTIONS and not self.share.unlabeled
        received = any(map(self.is_personal, arrays))
        return needs_state and not self.state and not received

    def shared_names(self) -> list[str]:
        """The names of the arrays that are sent: neither personal nor frozen ones."""
        return [n for n in self.initial if not self.is_personal(n) and n not in self.frozen]

    def arrays(self) -> Arrays:
        """The model's shared arrays; stores its personal arrays in the state."""
        shared: Arrays = {}
        personal: Arrays = {}
        for name, array in model_arrays(self.model, self.frozen).items():
            if self.is_personal(name):
                personal[name] = array
            else:
                shared[name] = array
        self.state |= prefixed("personal", personal)
        return shared

    def mean_so_far(self, new: Mapping[str, Tensor], count: int = 1) -> dict[str, Tensor]:
        """Update the running means in `stream` by `count` further terms, whose means are `new`.

        Returns the running means."""
        count_before = int(self.stream.get("count", 0))
        n = count_before + count
        mean = dict(new)
        if count_before:
            for name, value in new.items():
                previous = self.stream[name]
                mean[name] = previous + (value - previous) * count / n
        self.stream = mean | {"count": torch.tensor(n)}
        return mean

    @property
    def _tunes(self) -> bool:
        """Whether this is a novel client that trains on a few labeled samples before scoring."""
        return self.share.novel and self.few_shot == FewShot.TUNED

    def rows(self, config: Config, purpose: str = "batches", **count: int) -> Sequence[Tensor]:
        """Row indices of each mini-batch of this round: from the user's `draws`, else drawn by
        (seed, purpose, round, client).

        `count` is ``steps=…`` or ``epochs=…``; by default the settings decide."""
        if not count:
            count = {"steps": self.local_steps, "epochs": self.local_epochs}
            if self._tunes:
                count = {"steps": self.novel_steps}
        n = len(self.share.train)
        if self.draws is not None:
            return self.draws.batches(n, self.batch_size, short=self.short_batches, **count)
        round_ = round_of(config)
        seed = seed_of(self.seed, purpose, round_, self.client)
        return batches(
            n,
            self.batch_size,
            generator=torch.Generator().manual_seed(seed),
            short=self.short_batches,
            independent=self.batch_draws == "independent",
            **count,
        )

    def fit_locally(self, config: Config, **options: Any) -> float:
        """Local SGD on `loss` over this round's mini-batches; returns the mean loss.

        `options` replace the arguments of `sgd`: parameters, samples, rows, loss, lr, …"""
        layout = layout_of(self.model)
        set_training(self.model, True)
        lr = self.lr
        if self._tunes and self.novel_lr:
            lr = self.novel_lr
        settings: dict[str, Any] = {
            "parameters": layout.distinct,
            "samples": self.share.train,
            "loss": self.loss,
            "lr": lr,
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
            "clip_norm": self.local_clip_norm,
        }
        settings |= options
        settings["samples"] = settings["samples"].to(self.device)
        settings["parameters"] = list(settings["parameters"])
        if "rows" not in settings:
            settings["rows"] = self.rows(config)
        if self.own_optimizer is not None:
            settings["make_optimizer"] = partial(
                self.own_optimizer.make,
                lr=settings["lr"],  # has decayed already
                factor=self._decay(),  # for a user's own function, which has rates of its own
                momentum=settings["momentum"],
                weight_decay=settings["weight_decay"],
            )
        if self.autocast:
            settings["precision"] = MixedPrecision(self.autocast, self.device)
        if self.own_steps is not None:
            return self._by_own_steps(self.own_steps, settings)
        if in_cohort():
            return run_in_cohort(self, settings)
        return sgd(**settings)

    def _by_own_steps(self, own: OwnSteps, settings: dict[str, Any]) -> float:
        batches_per_epoch = 0
        if self.local_epochs and self.draws is None:
            batches_per_epoch = math.ceil(len(self.share.train) / self.batch_size)
        with own.within(self.model, settings, self._decay(), batches_per_epoch) as changed:
            return sgd(**changed)

    def _decay(self) -> float:
        """The factor by which the learning rate has decayed."""
        given = self._given_rates.get("lr", self.lr)
        return self.lr / given if given else 1.0

    # Flower's contract: a client answers servers of Flower's former API. Those of this package send
    # named arrays, for which `fedapps.node.bridge` calls `train` and `score` themselves.

    def __init_subclass__(cls, **options: Any) -> None:
        """Raises TypeError as `Configured` does, and for an override of `fit` or `evaluate`."""
        super().__init_subclass__(**options)
        for name, hook in (("fit", "train"), ("evaluate", "score")):
            if name in vars(cls):
                raise TypeError(
                    f"{cls.__name__} overrides {name!r}, which only servers of Flower's former API "
                    f"call; override {hook!r}, with named arrays"
                )

    def get_properties(self, config: Config) -> Config:
        """The client's identity, role and sample count, whether it has no labels, and what all
        nodes must have in common."""
        samples = self.share.everything if self.share.novel else self.share.train
        properties = dict(self.common)
        if self.share.unlabeled:
            properties[UNLABELED] = True
        return properties | {
            CLIENT: self.client,
            NOVEL: self.share.novel,
            NUM_EXAMPLES: len(samples),
            MODEL: self.model_name,
            INPUT_SIZE: math.prod(self.share.everything.x.shape[1:]),
        }

    def shared_frozen(self) -> list[nn.Parameter]:
        """The frozen parameters that no client has to itself: never sent, but the same on all."""
        named = layout_of(self.model).parameters.items()
        return [p for name, p in named if name in self.frozen and not self.is_personal(name)]

    def check_own_code(self) -> None:
        """Raise ValueError for a user's code that fails on the client's inputs, if the method calls
        some only after training. Called before the first round."""

    def get_parameters(self, config: Config) -> NDArrays:
        """The initial shared arrays, in the model's order."""
        return [self.initial[name] for name in self.shared_names()]

    def fit(self, parameters: NDArrays, config: Config) -> tuple[NDArrays, int, Metrics]:
        """`train` on named arrays; the names are in `config` and in the metrics."""
        self.begin("train", config)
        arrays = with_names(parameters, config, self.shared_names())
        reply, n, metrics = self.train(arrays, config)
        if NAMES in config:
            metrics = metrics | {NAMES: "\n".join(reply)}
        return list(reply.values()), n, metrics

    def evaluate(self, parameters: NDArrays, config: Config) -> tuple[float, int, Metrics]:
        """`score` of named arrays; the names are in `config`."""
        self.begin("evaluate", config)
        arrays = with_names(parameters, config, self.shared_names())
        return self.score(arrays, config)

    def begin(self, purpose: str, config: Config) -> None:
        """Prepare the answer to a message: decay the learning rates, seed torch's generator.

        The seed makes dropout and noise independent of earlier messages."""
        if not self._given_rates:
            self._given_rates = {name: getattr(self, name) for name in self.rates}
        factor = float(config.get(LR_FACTOR, 1.0))
        for name, rate in self._given_rates.items():
            setattr(self, name, factor * rate)
        round_ = round_of(config)
        seed_torch(seed_of(self.seed, purpose, round_, self.client))
