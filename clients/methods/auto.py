"""Auto's client: decides without labels whether and how its inputs are corrected (ours).

Training clients summarise their held-out samples by sums, and play newcomers with them; from these
sums the server makes a rule (`strategies.methods.auto`). A client applies the rule to its own
inputs: four forward passes, one quadratic program of C variables, no gradient. It then predicts by
FedAvg's network or by a corrected one, and sends nothing. A method among the candidates, such as
TENT, adds what its own prediction takes.

The equations are in `clients.core.decision`. Mean matching corrects predictions by (n q + 16 π) /
(n + 16), where q explains the means of inner values best (`clients.core.decision.fit`), as kernel
mean matching does for inputs under target shift (Zhang et al., ICML 2013). BBSE uses π of the
training clients and all inputs as one batch. "bn16" normalises by the inputs' statistics and by the
training statistics, which count as 16 samples. EM takes `EM_STEPS` steps from π. Without a rule the
client is FedAvg's.

In a stream each update decides anew, for its inputs together with the newest ones before them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from clients.core.arrays import Arrays, group, prefixed
from clients.core.client import Client, Config, Metrics
from clients.core.decision.changes import (
    COLUMN_CHANGES,
    EVERY,
    IMAGE_CHANGES,
    Change,
    Changer,
    OwnChange,
    decimals_of_tokens,
    named_changes,
)
from clients.core.decision.choice import (
    BBSE,
    BN_WEIGHTS,
    EM_VIEWS,
    FOR_LABEL_SHIFT,
    KEEP,
    MEAN_MATCHING,
    Case,
    Rule,
    candidates_of,
    cases_of,
    cases_to_arrays,
    decide,
    methods_among,
    names_in,
    num_features,
)
from clients.core.decision.evidence import (
    changed_rows,
    label_shift_descriptor,
    outcomes,
    sample_evidence,
    statistics_descriptor,
)
from clients.core.decision.explanation import (
    KEPT,
    NONE,
    choice_metrics,
    decision_metrics,
    explained,
    name_of,
)
from clients.core.decision.fit import SOFTMAX, Statistics, shared_fit
from clients.core.decision.inner_values import (
    blocks_of,
    bytes_held,
    check_width,
    inputs_of,
    layers_with_statistics,
    look,
    note_on_size,
    of_logits,
)
from clients.core.decision.moments import class_sums, residual
from clients.core.decision.played import FEWEST, SIZES, newcomers
from clients.core.decision.tallies import (
    calibration_sums,
    derivatives,
    feature_sums,
    guard_losses,
    histograms,
    misfit_sums,
    size_counts,
)
from clients.core.evaluation import Choice, by_parts
from clients.core.functional import functional_call
from clients.core.label_shift import bbse, log_q_by_em
from clients.core.normalisation import sizes_with_statistics
from clients.core.protocol import FewShot
from clients.methods import _auto_notes
from clients.methods._batchwise import (
    Changes,
    HoldingOut,
    batch_norms,
    check_own_statistics,
    mixed_statistics,
    pooled_moments,
)
from clients.models.foreign import takes_tokens, takes_whole_numbers
from clients.models.head import head_of
from fedapps.common.errors import error_line, is_sentence
from fedapps.common.external_code import is_reference
from fedapps.common.seeds import seed_of
from fedapps.common.settings import Value, setting
from fedapps.common.tasks import CLASSES
from partitions.datasets.description import TOKENS
from partitions.datasets.loading import Info
from partitions.shares import Share, labeled_rows

SOURCE = "source"  # group of arrays: statistics of the training clients' samples
RULE = "rule"  # group of arrays: the numbers of the rule
SOURCE_MEANS = f"{SOURCE}/means"
PRESENT = "present"  # an array of the source
LARGEST_SIZE = "largest-size"  # an array of the rule
COEFFICIENTS = "coefficients"  # an array: sets of coefficients, whose derivatives are asked for
PLAYED = "played"  # group of the state: newcomers, between the server's messages
MIXING = 0.001  # ε of BBSE
PRIOR_SAMPLES = 16.0  # weight of π in the proportions of mean matching
EM_STEPS = 20
MADE_BEFORE = (
    "another release has made it; make the rule anew with `fedapps run --from RUN --methods auto`"
)
INPUTS, CHOSEN = "inputs", "chosen"  # of a stream: the newest inputs, the place of the last choice
CANDIDATES = setting(
    "mean-matching,bn16",
    "corrections to choose from beside FedAvg: mean-matching, bbse, bn0, bn16, bn64; tent, t3a, "
    "shot, memo, bn-adapt, or module:NAME of an own method that trains as FedAvg does",
    listed=True,
    evaluation=True,
)

PLAYS = setting(
    5,
    "newcomers that each training client plays; 0: none, and all clients keep FedAvg's model",
    "[0, 100]",
    evaluation=True,
)


class NotFiniteError(ValueError):
    """The network gives numbers that are not finite."""


class AutoClient(HoldingOut):
    """FedAvg's client that chooses a correction for its inputs, or none, by the server's rule."""

    tasks = (CLASSES,)
    needs_head = True
    supports_streaming = True
    few_shot = FewShot.NONE  # the rule belongs to the model that a client would train further
    exchanges = ("query.moments", "query.spread", "query.misfit", "query.play", "query.guard")
    saves_state_after = ("query.misfit", "query.guard")

    candidates = CANDIDATES
    plays = PLAYS
    changes = setting(
        EVERY,
        "changes of inputs that played newcomers may have, as their kind allows; module:NAME of an "
        "own one",
        listed=True,
        evaluation=True,
    )
    stream_inputs = setting(
        100,
        "newest inputs of a stream that the choice is made for; the saved stream holds them",
        f"[{SIZES[0]}, 100000]",
        evaluation=True,
    )

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.head = head_of(self.model)
        sizes = sizes_with_statistics(self.initial)
        # Layers of other kinds may have such statistics, too, which are read, and not corrected.
        self.has_statistics = bool(batch_norms(self.model))
        self.names = candidates_of(self.candidates, self.has_statistics)
        # What enters these layers has a block of φ each.
        self.layers: list[nn.Module] = [self.head]
        self.reads_input = not sizes
        if sizes:
            self.layers = [self.model.get_submodule(name) for name in sizes]
        self.blocks = blocks_of(self.initial, self.head.weight.shape)
        self.source: Arrays = {}
        self.rule: Arrays = {}
        self._correction: Tensor | Changes | Client | None = None

    @classmethod
    def build(cls, model: nn.Module, info: Info, /, *, candidates: str, changes: str) -> nn.Module:
        """The network. Raises ValueError if it allows none of the candidates, if its layers are too
        wide or cannot be read, or two hold the same statistics, and if others than all changes are
        named and none is one of such inputs."""
        layers_with_statistics(model)
        check_own_statistics("auto", model)
        candidates_of(candidates, bool(batch_norms(model)))
        check_width(model, head_of(model))
        tokens = takes_tokens(model) or (info.inputs is not None and info.inputs.kind == TOKENS)
        named = named_changes(changes, 1 + len(info.shape), whole=tokens)
        if not named and changes != EVERY:
            kinds = IMAGE_CHANGES if len(info.shape) == 3 else COLUMN_CHANGES
            able = "your own, as module:NAME" if tokens else ", ".join(kinds)
            raise ValueError(
                f"auto.changes is {changes!r}, and none of these changes inputs of the shape "
                f"{tuple(info.shape)}; those that do: {able}"
            )
        return model

    @classmethod
    def settings_for(
        cls, shares: Iterable[Share], /, *, held_out: float, plays: int
    ) -> dict[str, Value]:
        """Where nobody plays newcomers, no client holds out samples for them."""
        if plays and any(cls.can_play(len(share.train), held_out) for share in shares):
            return {}
        return {"held-out": 0.0, "plays": 0}

    @classmethod
    def caveats(
        cls,
        network: nn.Module,
        /,
        *,
        model: str,
        candidates: str,
        plays: int,
        shape: tuple[int, ...],
        changes: str = EVERY,
        held_out: float = 0.2,
        alpha: float = 1.0,
        early_stopping: int = 0,
        shares: Iterable[Share] = (),
    ) -> list[str]:
        """That nobody plays newcomers, or too few do, or with samples of the training; which
        candidates the network leaves out, and which changes the inputs; which layers it never
        calls or are not read, what the messages hold, and that early stopping is off."""
        counts: list[int] = []  # training samples by client
        whole = takes_tokens(network)
        for share in shares:
            if not counts:  # all clients have the same kind of inputs
                whole = whole or not share.train[:1][0].is_floating_point()
            counts.append(len(share.train))
        lines = []
        if plays:
            held = [cls.num_held_out(n, held_out) for n in counts]
            players = [cls.can_play(n, held_out) for n in counts]
            lines += _auto_notes.on_players(players, held, held_out, alpha)
        else:
            lines.append(_auto_notes.NOBODY_PLAYS)
        lines += _auto_notes.on_candidates(network, model, candidates)
        lines += _auto_notes.on_layers(network, model, shape)
        if early_stopping:
            lines.append(
                f"early-stopping={early_stopping} ends no run: the rule belongs to the last model, "
                "so all rounds are trained; set rounds"
            )
        if plays:
            lines += _auto_notes.on_changes(changes, shape, whole)
            note = note_on_size(network, head_of(network), len(counts))
            if note:
                lines.append(note)
        return lines

    @classmethod
    def bytes_after_rounds(cls, network: nn.Module, num_training: int, /, *, plays: int) -> int:
        """What the exchanges that make the rule hold."""
        return bytes_held(network, head_of(network), num_training) if plays else 0

    @classmethod
    def can_play(cls, n: int, held_out: float) -> bool:
        """Whether a client with n training samples plays newcomers; see `HoldingOut`."""
        count = cls.num_held_out(n, held_out)
        if not count:
            count = n
        return count >= SIZES[0]

    def check_own_code(self) -> None:
        """Raise ValueError for a user's correction or change that fails on the client's inputs:
        they are asked for only after all rounds. Clients with fewer inputs than a choice needs
        never call them."""
        named = [*self.names, *names_in(self.changes)]
        if not any(map(is_reference, named)):
            return
        x, _ = self.share.everything.to(self.device)[: SIZES[-1]]
        if len(x) < SIZES[0]:
            return
        self.receive(self.initial, {})
        # Where a class has few samples, a newcomer may have as few as two.
        for size in (SIZES[0], FEWEST, *SIZES[1:]):
            if size <= len(x):
                self._check_own_code_on(x[:size])

    def _check_own_code_on(self, x: Tensor) -> None:
        """`check_own_code` on inputs x (n, *shape), with the received model."""
        _, base = self.inner_values(x)
        if not base.isfinite().all():  # no fault of the user's code
            return
        for name in filter(is_reference, methods_among(self.names)):
            with self.naming_own_code("auto.candidates", name, len(x)):
                self._check_correction(name, x, base)
        for change in self.changes_of(x):
            if isinstance(change, OwnChange):
                with self.naming_own_code("auto.changes", change.reference, len(x)):
                    self._check_change(change, x)

    def _check_correction(self, name: str, x: Tensor, base: Tensor) -> None:
        """Raise ValueError for a correction whose logits of x are not finite."""
        # `predicted_by` then gives `base` itself.
        if self.predicted_by(name, x, base) is base:
            raise ValueError(
                f"auto.candidates names {name!r}, which predicts numbers that are not "
                "finite for the client's inputs; it would never be chosen"
            )

    def _check_change(self, change: OwnChange, x: Tensor) -> None:
        """Raise ValueError for a change of x for which the network's logits are not finite, and for
        one that makes decimals of tokens, which a user's app keeps as floats."""
        changer = Changer(x, self.are_tokens(x))
        changed = changer(change, x, np.random.default_rng(self.seed))
        if takes_whole_numbers(self.model) and (changed % 1 != 0).any():
            raise ValueError(decimals_of_tokens(change.reference))
        _, logits = self.inner_values(changed)
        if not logits.isfinite().all():
            raise ValueError(
                f"auto.changes names {change.reference!r}, and for inputs that it has "
                "changed the network gives numbers that are not finite"
            )

    @contextmanager
    def naming_own_code(self, key: str, reference: str, count: int) -> Iterator[None]:
        """Within the context an error of a user's code, called with `count` inputs, becomes a
        ValueError that names the code."""
        try:
            yield
        except Exception as error:  # whatever code from outside raises
            if is_sentence(error):
                raise
            raise ValueError(
                f"{key} names {reference!r}, which fails on {count} inputs of client "
                f"{self.client}: {error_line(error)}"
            ) from error

    # Serving

    def receive(self, arrays: Arrays, config: Config) -> None:
        """Load the model; keep the server's statistics and rule."""
        self.source = group(arrays, SOURCE)
        self.rule = group(arrays, RULE)
        network: Arrays = {}
        for name, array in arrays.items():
            if not name.startswith((f"{SOURCE}/", f"{RULE}/")):
                network[name] = array
        super().receive(network, config)
        for other in self.method_clients.values():
            other.receive(network, config)

    def predict(self, x: Tensor) -> Tensor:
        """Logits (n, C), corrected as the rule chooses."""
        self.stream = {}
        return self.update(x)

    def update(self, x: Tensor) -> Tensor:
        """Logits (n, C) of x, corrected as the rule chooses for x and the inputs before it."""
        self._correction = None
        self.adaptation_metrics = {}
        self.intermediate_logits = {}
        self.choice = None
        if not self.rule:
            self.choice = Choice(NONE, f"{KEPT}: the run has no rule, and its log says why")
            return super().predict(x)
        inputs = x
        if INPUTS in self.stream:
            inputs = torch.cat([self.stream[INPUTS], x])
        previous = self.stream.get(CHOSEN)
        self.stream = {INPUTS: inputs[-self.stream_inputs :].clone()}
        if len(inputs) < SIZES[0]:  # no newcomer had so few inputs
            number = f"{len(inputs)} inputs are" if len(inputs) > 1 else "1 input is"
            return self.kept(x, f"{number} fewer than the {SIZES[0]} that a choice needs")
        try:
            case, views = self.case(inputs)
        except NotFiniteError as error:
            logits = self.kept(x, str(error))
            self.follow(previous, KEEP)
            return logits
        before = len(inputs) - len(x)
        base = views[""][before:]
        self.intermediate_logits = {"base": base}
        rule = self.finished_rule()
        decision = decide(rule, case, self.names)
        self.adaptation_metrics = {**decision_metrics(rule, decision, self.names)}
        self.choice = explained(rule, decision, self.names, len(inputs))
        self.follow(previous, decision.choice)
        if decision.choice == KEEP:
            return base
        name = self.names[decision.choice]
        self._correction = self._corrections[name]
        return views[name][before:]

    def kept(self, x: Tensor, reason: str) -> Tensor:
        """Logits (n, C) by FedAvg's model, where the rule cannot be asked for this reason."""
        logits = super().predict(x)
        self.choice = Choice(NONE, f"{KEPT}: {reason}")
        self.intermediate_logits = {"base": logits}
        self.adaptation_metrics = {**choice_metrics(KEEP, self.names)}
        return logits

    def follow(self, previous: Tensor | None, choice: int) -> None:
        """Keep the choice for the next update, and say it if the choice before was another one."""
        assert self.choice is not None
        self.stream[CHOSEN] = torch.tensor(choice)
        if previous is not None and int(previous) != choice:
            former = name_of(int(previous), self.names)
            reason = f"Changed from {former} to {self.choice.name}. {self.choice.reason}"
            self.choice = Choice(self.choice.name, reason)

    def personal_model(self, x: Tensor) -> nn.Module:
        """The network, with the chosen correction in the bias of its head or in its statistics.

        Where a candidate corrects proportions, the head has a bias whatever is chosen: what an
        update chooses must not change the arrays of a saved model."""
        if isinstance(self._correction, Client):
            model = self._correction.personal_model(x)
        else:
            model = super().personal_model(x)
        head = getattr(model, "head", None)  # a user's own correction may have another network
        corrects_bias = any(name in FOR_LABEL_SHIFT for name in self.names)
        if corrects_bias and isinstance(head, nn.Linear) and head.bias is None:
            head.bias = nn.Parameter(torch.zeros_like(head.weight[:, 0]))
        if isinstance(self._correction, Tensor):
            head = head_of(model)
            bias = head.bias.detach() + self._correction.to(head.weight)
            head.bias = nn.Parameter(bias)
        elif isinstance(self._correction, dict):
            model.load_state_dict(self._correction, strict=False)
        return model

    def network_of_last_update(self, arrays: Arrays, config: Config) -> nn.Module:
        """As a client's: that of the last choice, since blank inputs could lead to another one."""
        self.begin("evaluate", config)
        self.receive(arrays, config)
        x, _ = self.share.everything.to(self.device)[:]
        self._correction = None  # proportions and statistics leave the structure as it is
        choice = int(self.stream.get(CHOSEN, KEEP))
        if choice != KEEP and self.names[choice] in self.method_clients:
            self._correction = self.method_clients[self.names[choice]]
            self._correction.predict(x.clone())
        return self.personal_model(x)

    # One client's inputs

    def case(self, x: Tensor, y: Tensor | None = None) -> tuple[Case, dict[str, Tensor]]:
        """The numbers that the rule needs of inputs x, labels included where there are some; and
        the logits (n, C) by view, "" that of FedAvg. NotFiniteError if they are not all finite."""
        n = len(x)
        statistics = self.statistics()
        phi, base = self.inner_values(x)
        finite = np.isfinite(phi).all(1)
        if not finite.all():
            raise NotFiniteError(
                f"for {n - int(finite.sum())} of {n} inputs the network gives numbers that are not "
                "finite"
            )
        fit = shared_fit(statistics, n)
        phi_mean = phi.mean(0)
        q = fit.proportions(phi_mean)
        views, q_bbse, q_after = self.views(x, base, statistics, q)
        misfit_of_prior = fit.misfits(phi_mean, statistics.prior)[SOFTMAX]
        log_base = log_probabilities(base)
        log_views = {name: log_probabilities(z) for name, z in views.items()}
        descriptors = []
        evidence = []
        right = []
        for name in self.names:
            log_candidate = log_views[name]
            rows = changed_rows(log_base, log_candidate)
            changed = len(rows) / n
            if name in FOR_LABEL_SHIFT:
                entries = label_shift_descriptor(q, q_bbse, misfit_of_prior, n, changed)
            else:
                entries = statistics_descriptor(q_after[name], log_base, log_candidate, changed)
            descriptors.append(entries)
            evidence.append(sample_evidence(log_base, log_views, name, rows))
            if y is not None:
                right.append(outcomes(log_base, log_candidate, rows, y.cpu().numpy()))
        misfits = fit.misfits(phi_mean, q)
        return Case(n, misfits, np.stack(descriptors), evidence, right), {"": base} | views

    def statistics(self) -> Statistics:
        """The server's statistics in float64."""
        if PRESENT not in self.source:
            raise ValueError(f"the run's rule does not say which classes it knows: {MADE_BEFORE}")
        given = {name: np.asarray(array, float) for name, array in self.source.items()}
        width = given["means"].shape[1]
        if width != self.blocks.width:
            raise ValueError(
                f"the run's rule is of {width} inner values, and auto reads {self.blocks.width} of "
                f"this network: {MADE_BEFORE}"
            )
        return Statistics(
            self.blocks,
            given["means"],
            given["within"],
            given["between"],
            given["confusion"],
            given["prior"],
            given[PRESENT] > 0,
        )

    def finished_rule(self) -> Rule:
        """The server's rule. Raises ValueError for one of other candidates."""
        rule = Rule.of(self.rule)
        count = 0 if rule.guard is None or rule.ranges is None else len(rule.ranges)
        if count != len(self.names):
            raise ValueError(
                f"the run's rule is of {count} corrections, and auto has {', '.join(self.names)} "
                f"for this network: {MADE_BEFORE}"
            )
        return rule

    def views(
        self, x: Tensor, base: Tensor, statistics: Statistics, q: np.ndarray
    ) -> tuple[dict[str, Tensor], np.ndarray, dict[str, np.ndarray]]:
        """The logits (n, C) of each corrected network, by the proportions q (C,) of the fit; q of
        BBSE; q of EM on the predictions of each other candidate."""
        log_prior = torch.from_numpy(np.log(statistics.prior)).to(base)
        classes = base.argmax(1).cpu().numpy()
        m = np.bincount(classes, minlength=base.shape[1]) / len(classes)
        q_bbse = bbse(statistics.confusion, m, MIXING)
        n = self.known_size(len(x))
        q_matched = (n * q + PRIOR_SAMPLES * statistics.prior) / (n + PRIOR_SAMPLES)
        views = {}
        self._corrections: dict[str, Tensor | Changes | Client] = {}
        for name, proportions in ((BBSE, q_bbse), (MEAN_MATCHING, q_matched)):
            ratio = torch.from_numpy(np.log(proportions)).to(base) - log_prior
            views[name] = base + ratio
            self._corrections[name] = ratio
        log_q_after: dict[str, Tensor] = {}
        if self.has_statistics:
            for name, weight in BN_WEIGHTS.items():
                changes, z = self.with_statistics(x, weight)
                views[name] = finite_or(z, base)
                self._corrections[name] = changes
            log_p = torch.stack([views[name] for name in BN_WEIGHTS]).log_softmax(-1)
            log_qs = log_q_by_em(log_p, log_prior, EM_STEPS)
            log_q_after |= zip(BN_WEIGHTS, log_qs, strict=True)
            for name, adapted in EM_VIEWS.items():
                views[name] = views[adapted] + log_q_after[adapted] - log_prior
        else:
            log_q = log_q_by_em(base.log_softmax(1), log_prior, EM_STEPS)
            views["em"] = base + log_q - log_prior
        for name in methods_among(self.names):
            views[name] = self.predicted_by(name, x, base)
            log_q_after[name] = log_q_by_em(views[name].log_softmax(1), log_prior, EM_STEPS)
            self._corrections[name] = self.method_clients[name]
        q_after = {}
        for name, log_q in log_q_after.items():
            q_after[name] = log_q.double().exp().cpu().numpy()
        return views, q_bbse, q_after

    def known_size(self, n: int) -> int:
        """n, as it counts beside the training clients' samples. More inputs than newcomers had
        count as so many: nothing is known of other corrections."""
        return min(n, int(self.rule.get(LARGEST_SIZE, n)))

    def predicted_by(self, name: str, x: Tensor, base: Tensor) -> Tensor:
        """Logits (n, C) by the candidate that is the method `name`; `base` if it gives numbers that
        are not finite, so that it is not chosen. The network stays as it is. ValueError for other
        than such logits."""
        network = {key: tensor.clone() for key, tensor in self.model.state_dict().items()}
        try:
            logits = self.method_clients[name].predict(x.clone())  # it may change them in place
        finally:
            self.model.load_state_dict(network)
        given = f"a {type(logits).__name__}"
        is_float = False
        if isinstance(logits, Tensor):
            given = f"{logits.dtype} of the shape {tuple(logits.shape)}"
            is_float = logits.is_floating_point()
        if not is_float or logits.shape != base.shape:
            raise ValueError(
                f"auto.candidates names {name!r}, which predicts {given} for {len(x)} inputs; it "
                f"must be a tensor of floats of the shape {tuple(base.shape)}"
            )
        return finite_or(logits.detach(), base)

    def with_statistics(self, x: Tensor, prior_samples: float) -> tuple[Changes, Tensor]:
        """Statistics ρ · training + (1 − ρ) · inputs with ρ = N / (N + n), and the logits (n, C) by
        them; the inputs' statistics are means over the parts of x."""
        rho = prior_samples / (prior_samples + self.known_size(len(x)))
        previous = dict(self.model.eval().named_buffers())
        parts = self.parts(x)
        passes = []
        for part in parts:
            passes.append(mixed_statistics(self.model, previous, part, rho, pooled_moments))
        if len(passes) == 1:
            return passes[0]
        mean: Changes = {}
        for name in passes[0][0]:
            mean[name] = torch.stack([changes[name] for changes, _ in passes]).mean(0)
        return mean, by_parts(partial(functional_call, self.model, mean), parts)

    def inner_values(self, x: Tensor) -> tuple[np.ndarray, Tensor]:
        """φ (n, D) in float64, and the logits (n, C) of the network as it is."""
        if not len(x):  # a network from outside may not take an empty batch
            return np.zeros((0, self.blocks.width)), x.new_zeros(0, self.head.out_features)
        self.model.eval()
        sizes = self.blocks.sizes[-2 - len(self.layers) : -2]  # two blocks of the logits follow
        values = []
        outputs = []
        for part in self.parts(x):
            with torch.no_grad(), inputs_of(self.layers, sizes, part) as means:
                z = self.model(part)
            if self.reads_input:
                means = [look(part), *means]
            values.append(torch.cat([*means, *of_logits(z)], 1))
            outputs.append(z)
        return torch.cat(values).double().cpu().numpy(), torch.cat(outputs)

    # What a training client answers: sums over held-out samples and played newcomers

    def held_out_samples(self) -> tuple[Tensor, Tensor]:
        """The labeled samples (x, y) that the network is not trained on."""
        x, y = self.held.to(self.device)[:]
        labeled = labeled_rows(y)
        return x[labeled], y[labeled]

    def moments(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """Counts (C, C) by predicted class and label; by class n_c (C,) and Σ φ (C, D); Σ φ_l φ_lᵀ
        (Σ d_l²,)."""
        self.load(arrays)
        x, y = self.held_out_samples()
        phi, z = self.inner_values(x)
        labels = y.cpu().numpy()
        classes = self.head.out_features
        confusion = np.zeros((classes, classes))
        np.add.at(confusion, (z.argmax(1).cpu().numpy(), labels), 1)
        counts, sums = class_sums(phi, labels, classes)
        squares = self.blocks.second_moments(phi)
        return {"confusion": confusion, "counts": counts, "sums": sums, "squares": squares}, {}

    def spread(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """r_l r_lᵀ (Σ d_l²,), 1/n (1,) and 1 (1,), by the class means in `arrays`; zeros from a
        client whose held-out samples have no label."""
        means = np.asarray(arrays[SOURCE_MEANS], float)
        self.receive(arrays, config)
        x, y = self.held_out_samples()
        if not len(x):
            return {
                "squares": np.zeros(self.blocks.entries),
                "inverse": np.zeros(1),
                "clients": np.zeros(1),
            }, {}
        phi, _ = self.inner_values(x)
        r = residual(phi, y.cpu().numpy(), means)
        squares = self.blocks.second_moments(r[None])
        return {"squares": squares, "inverse": np.array([1 / len(x)]), "clients": np.ones(1)}, {}

    def misfit(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """First, with the server's statistics in `arrays`: play newcomers, keep what the rule needs
        of them; count, Σ T_l and Σ T_l² of those with unchanged inputs, and counts by size. Then,
        with μ and σ: histograms of T and of the descriptors."""
        if SOURCE_MEANS in arrays:
            self.receive(arrays, config)
            cases = list(self.played())
            self.state = prefixed(PLAYED, cases_to_arrays(cases, len(self.names)))
            return misfit_sums(cases, len(self.blocks.sizes)) | size_counts(cases), {}
        return histograms(*self.rule_and_cases(arrays), len(self.names)), {}

    def play(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """Sums over the changed samples of the played newcomers, by what is known of the rule:
        of their features; then of the derivatives at `coefficients`; then, with those of the other
        folds in the rule, of the calibration."""
        rule, cases = self.rule_and_cases(arrays)
        if COEFFICIENTS in arrays:
            return derivatives(rule, cases, np.asarray(arrays[COEFFICIENTS], float)), {}
        if rule.coefficients is not None:
            return calibration_sums(rule, cases, len(self.names)), {}
        features = num_features(self.has_statistics, self.names)
        return feature_sums(rule, cases, len(self.names), features), {}

    def guard(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """By regime what each k of the grid means for the client's newcomers (2, K), and whether it
        has any (2,); see `guard_losses`. The newcomers are dropped."""
        losses = guard_losses(*self.rule_and_cases(arrays), self.names)
        self.state = prefixed(PLAYED, cases_to_arrays([], len(self.names)))
        return losses, {}

    def rule_and_cases(self, arrays: Arrays) -> tuple[Rule, list[Case]]:
        """What is known of the rule, and the newcomers that were played before. ValueError if they
        are not in the state."""
        played = group(self.state, PLAYED)
        if not played:
            raise ValueError("the played newcomers are not in the state: query.misfit comes first")
        return Rule.of(group(arrays, RULE)), cases_of(played)

    def played(self) -> Iterator[Case]:
        """The newcomers of the client's held-out samples. The draws are the same in each round: a
        run that starts from a saved one repeats its rule."""
        x, y = self.held_out_samples()
        changes = self.changes_of(x)
        seed = seed_of(self.seed, "play", self.client)
        classes = self.head.out_features
        whole = self.are_tokens(x)
        for newcomer in newcomers(x, y, classes, self.plays, changes, seed, whole):
            case, _ = self.case(newcomer.x, newcomer.y)
            yield replace(case, unchanged=newcomer.unchanged)

    def changes_of(self, x: Tensor) -> list[Change]:
        """The changes that newcomers with inputs x (n, *shape) may have."""
        return named_changes(self.changes, x.ndim, whole=self.are_tokens(x))

    def are_tokens(self, x: Tensor) -> bool:
        """Whether inputs x, or parts of them, are whole numbers: a user's app keeps these as
        floats, and the network knows."""
        return not x.is_floating_point() or takes_tokens(self.model)


def finite_or(logits: Tensor, base: Tensor) -> Tensor:
    """The logits, or `base` if they are not all finite: then no prediction changes."""
    return logits if logits.isfinite().all() else base


def log_probabilities(z: Tensor) -> np.ndarray:
    """The log-softmax (n, C) of logits, in float64."""
    return z.double().log_softmax(1).cpu().numpy()
