"""Differential privacy of a run: sampling, clipping, noise, and the budget that is spent.

*Central*: the server is trusted, observers of its models are not. Users are sampled independently
and in secret (Poisson sampling at rate q); the server clips every user's change to norm C and
applies (Σ_u clip_C(Δ_u) + N(0, z²C²)) / m, with m = q N expected users, N configured.
*Local*: the server is not trusted either. Each user clips its change and adds N(0, z²C²). The
participants are known, so sampling hides nothing.

See `strategies.core.accountant` for ε, and `docs/reference/wire.md` for what each message holds."""

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from logging import WARNING
from typing import Any

import numpy as np

from clients.core.arrays import Arrays, as_type, is_counter
from clients.core.privacy import (
    COVERS,
    DP_GENERATOR,
    EVERYTHING,
    GENERATORS,
    MODES,
    clipped,
    generator,
    noised,
)
from clients.core.protocol import LOCAL_NOISE
from fedapps.common.once import say_once
from fedapps.common.settings import NONNEGATIVE, Configured, setting
from strategies.core.accountant import central_epsilon, local_epsilon, local_loss, multiplier
from strategies.core.replies import Node, Update

TEST_SETTING = "; TEST SETTING: a person who knows the seed knows the noise"
# Keys of a report that central privacy allows to write, beside dp-…. "undone" reveals nothing more
# than the released model, which does not change in such a round.
RELEASED = ("round", "evaluation", "undone")
# A mechanism that publishes each user's data with probability δ is (0, δ)-private.
LARGE_DELTA = "; δ is not below 1 / {} users, so it permits to publish one user's data"
CONTINUED = "; continues a saved run: other continuations of the same run are not included"
# The weakest terms: those of a saved run whose file lacks them.
UNKNOWN_TERMS: dict[str, Any] = {
    "generator": "seeded",
    "not-covered": ["scores and exchanges of the saved run"],
}
MOST_ROUNDS = 10**12
TERMS = {  # unit, adversary and accountant, by mode
    "central": "one user added or removed, against an observer of models who trusts the server; "
    "privacy loss distributions, Poisson sampling",
    "local": "one user's updates replaced, against the server too; sum of Gaussians, the user "
    "asked most often",
}


class Privacy(Configured):
    """The privacy of a run of `rounds` rounds, from the settings `dp…`.

    One of `dp_noise_multiplier` z and `dp_epsilon` is given, the other is 0. From ε, z is chosen so
    that the whole run keeps ε at `dp_delta` (local: even for a user in every round).

    - `fraction_train`: the sampling rate q.
    - `train_fraction`, `num_clients`: the number of users is N = round(`train_fraction` ·
      `num_clients`), whether or not they are present.
    - `spent`: the `state` of the run that this one continues; ε and its terms hold for both
      together.

    With `dp_covers` = "everything" ε covers all that leaves a client. With "model-updates" it does
    not cover scores of evaluations, nor a method's further exchanges.

    Raises ValueError for settings that contradict each other."""

    dp = setting("none", "differential privacy of the users' updates", MODES)
    dp_clip = setting(
        1.0, "C: clip a user's whole update to this norm", "(0, 1000000]", beside="dp!=none"
    )
    dp_noise_multiplier = setting(
        0.0,
        "z: noise N(0, z²C²) on a user's update (local) or on their sum",
        NONNEGATIVE,
        beside="dp!=none",
    )
    dp_epsilon = setting(
        0.0,
        "ε of the whole run, from which z is computed; in place of dp-noise-multiplier",
        NONNEGATIVE,
        beside="dp!=none",
    )
    dp_delta = setting(0.00001, "δ of (ε, δ)-privacy", "(0, 1)", beside="dp!=none")
    dp_generator = DP_GENERATOR
    dp_covers = setting(
        EVERYTHING,
        "what ε covers; model-updates: evaluations and assignments get no noise",
        COVERS,
        beside="dp!=none",
    )

    def __init__(
        self,
        *,
        fraction_train: float = 1.0,
        rounds: int = 30,
        num_clients: int = 20,
        train_fraction: float = 0.5,
        min_valid_replies: int = 1,
        report_generalization_bound: bool = False,
        robust: str = "none",
        max_update_norm: float = 0.0,
        round_quorum: float = 1.0,
        seed: int = 0,
        spent: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        dp = self.dp
        _check_budget(dp, self.dp_noise_multiplier, self.dp_epsilon)
        if dp != "none" and report_generalization_bound:
            raise ValueError(
                "report-generalization-bound asks clients for exact errors and gradients, which dp "
                f"{dp!r} does not cover; set one of the two"
            )
        if dp == "central":
            if min_valid_replies > 1:
                raise _not_central("min-valid-replies", "it would tell how many took part")
            if robust != "none":
                raise _not_central("robust", "ε is that of the mean")
            if round_quorum < 1:
                raise _not_central(
                    "round-quorum",
                    "when a round ends would tell who took part; round-deadline may end it",
                )
            if max_update_norm > 0:
                raise _not_central("max-update-norm", "dp-clip clips every update")
        self.mode = dp
        self.clip = self.dp_clip
        self.delta = self.dp_delta
        self.covers = self.dp_covers
        self.rate = fraction_train
        self.users = round(train_fraction * num_clients)  # N
        self.expected = max(1.0, fraction_train * self.users)  # m = q N
        self.on_spend: Callable[[Mapping[str, Any]], None] | None = None  # called with `state()`
        self.not_covered: list[str] = []
        self._generator = self.dp_generator
        self._seed = seed
        # The weakest generator of this run and of the run that it continues.
        self._weakest_generator = self.dp_generator
        self._spent: dict[str, float] = {}  # central: rounds by "z q"; local: μ² by client
        self.z = self.dp_noise_multiplier
        self._target = self.dp_epsilon  # 0: none
        self._continued = spent is not None
        if spent is not None:
            self.restore(spent)
        self.plan(rounds)

    def plan(self, rounds: int) -> None:
        """With dp-epsilon: choose the noise that keeps ε over `rounds` more rounds.

        Noise that already keeps it is not changed. Raises ValueError if ε is already spent."""
        if not (self._target and rounds):
            return
        if self.z and self._epsilon(self._after(self.z, rounds)) <= self._target:
            return
        before = self._epsilon(self._spent)
        if before >= self._target:
            raise ValueError(
                f"dp-epsilon is {self._target}, but the run that this one continues has spent "
                f"ε = {before:.4g}"
            )
        self.z = multiplier(lambda z: self._epsilon(self._after(z, rounds)), self._target)

    # What a strategy calls

    @property
    def hides_participants(self) -> bool:
        """Whether only the server knows the participants and their number."""
        return self.mode == "central"

    def settings(self) -> dict[str, Any]:
        """Entries of every train message's config."""
        return {LOCAL_NOISE: self.z * self.clip} if self.mode == "local" else {}

    def admit(self, what: str) -> None:
        """Record that clients send `what` without noise, which ε does not cover.

        Raises ValueError if ε must cover everything."""
        if self.covers == EVERYTHING:
            raise ValueError(
                f"with dp {self.mode!r} {what} would leave the clients without noise; set "
                "dp-covers to 'model-updates' if ε need not cover that"
            )
        if what not in self.not_covered:
            self.not_covered.append(what)
            self._notify()

    def check_users(self, count: int, round_: int) -> None:
        """Raise ValueError before the first round if more clients train than the mean is over. For
        clients that join later a warning is logged."""
        if self.mode != "central" or count <= self.users:
            return
        sentence = (
            f"{count} training clients are connected, but dp 'central' divides their sum by "
            f"{self.users} users (num-clients · train-fraction; num_clients= of server_app), so a "
            f"round would move the model {count / self.users:.3g} times as far as their mean; give "
            "the number of all clients that may train"
        )
        if round_ == 1:
            raise ValueError(sentence)
        say_once(sentence, WARNING)

    def sample(self, nodes: Sequence[Node], round_: int) -> list[Node] | None:
        """A secret Poisson sample, which may be empty; None where sampling hides nothing."""
        if self.mode != "central" or self.rate == 1:
            return None
        draws = generator(self._generator, self._seed, "sample", round_).random(len(nodes))
        return [nodes[i] for i in np.flatnonzero(draws < self.rate).tolist()]

    def spend(self, nodes: Sequence[Node]) -> None:
        """Count a round in which `nodes` are asked to train, whether or not they answer.

        Call it before the messages are sent: then a crash cannot lose the count."""
        if self.mode == "central":
            self._add(f"{self.z!r} {self.rate!r}", 1)
        else:
            for node in nodes:
                self._add(str(node.client), local_loss(self.z))
        self._notify()

    def exposed(self, update: Update) -> str:
        """Why a train reply cannot come from a client with local privacy; "" if it can.

        Such a client sends its noisy change and nothing else, and reports one sample."""
        if self.mode != "local":
            return ""
        metrics = sorted({*update.metrics, *update.foreign_metrics})
        if not metrics and update.num_examples == 1:
            return ""
        values = ", ".join([*metrics, f"num-examples {update.num_examples:g}"])
        return f"the client keeps no local privacy: beside its model it sends {values:.200}"

    def _notify(self) -> None:
        if self.on_spend is not None:
            self.on_spend(self.state())

    def protect(self, updates: Sequence[Update], arrays: Arrays, round_: int) -> list[Update]:
        """Updates whose unweighted mean is private; central: a single update.

        The `updates` started from `arrays`. They may lack some names and need not be clipped. If
        sampling selected nobody, noise is still added. Central: integers and booleans keep the
        server's values, whatever clients send."""
        if self.mode != "central":
            return [replace(update, num_examples=1) for update in updates]
        total = {n: np.zeros(x.shape) for n, x in arrays.items() if not is_counter(x)}
        for update in updates:
            change: Arrays = {}
            for name, y in update.arrays.items():
                if not is_counter(arrays[name]):
                    change[name] = y.astype(float) - arrays[name]
            for name, part in clipped(change, self.clip).items():
                total[name] += part
        source = generator(self._generator, self._seed, "dp-central", round_)
        total = noised(total, self.z * self.clip, source)
        mean: Arrays = {}
        for name, x in arrays.items():
            moved = x
            if name in total:
                moved = x + total[name] / self.expected
            mean[name] = as_type(moved, x.dtype)
        return [Update(Node(0, 0), mean, 1, {})]

    def released(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of a round's report that may be written."""
        if not self.hides_participants:
            return dict(report)
        released: dict[str, Any] = {}
        for key, value in report.items():
            if key in RELEASED or key.startswith("dp-"):
                released[key] = value
        return released

    # The spent budget

    def state(self) -> dict[str, Any]:
        """The spent budget and its terms, in plain values; see `restore`."""
        return {
            "mode": self.mode,
            "spent": dict(self._spent),
            "generator": self._weakest_generator,
            "not-covered": list(self.not_covered),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Add the budget that a former run, or this run before a crash, had spent.

        The weaker terms of both hold; unknown terms count as the weakest. Raises ValueError if the
        budget was spent in another mode."""
        if state["mode"] != self.mode:
            raise ValueError(
                f"dp is {self.mode!r}, but the model to start from was trained with "
                f"dp {state['mode']!r}; the two protect different things and do not add up"
            )
        for key, least in state["spent"].items():
            self._spent[key] = max(self._spent.get(key, 0), least)
        terms = UNKNOWN_TERMS | dict(state)
        generators = (self._weakest_generator, terms["generator"])
        self._weakest_generator = max(generators, key=GENERATORS.index)  # the weakest is last
        for what in terms["not-covered"]:
            if what not in self.not_covered:
                self.not_covered.append(what)

    def report(self) -> dict[str, Any]:
        """ε(δ) of the rounds so far, and its terms."""
        if self.mode == "none":
            return {}
        return {
            "dp-epsilon": self._epsilon(self._spent),
            "dp-delta": self.delta,
            "dp-noise-multiplier": self.z,
            "dp-generator": self._weakest_generator,
            "dp-terms": self.terms(),
        }

    def terms(self) -> str:
        """Unit, adversary, accountant and exclusions, in one line."""
        terms = TERMS[self.mode]
        if self.not_covered:
            terms += f"; not covered: {', '.join(self.not_covered)}"
        if self.mode == "central" and self.delta * self.users >= 1:
            terms += LARGE_DELTA.format(self.users)
        if self._continued:
            terms += CONTINUED
        if self._weakest_generator != "system":
            terms += TEST_SETTING
        return terms

    def _epsilon(self, spent: Mapping[str, float]) -> float:
        if self.mode == "local":
            return local_epsilon(max(spent.values(), default=0.0), self.delta)
        rounds: dict[tuple[float, float], int] = {}
        for key, count in spent.items():
            z, q = map(float, key.split())
            rounds[z, q] = rounds.get((z, q), 0) + int(count)
        return central_epsilon(rounds, self.delta)

    def _after(self, z: float, rounds: int) -> dict[str, float]:
        """The budget of a user that takes part in all of `rounds` more rounds."""
        if self.mode == "local":
            return {"": max(self._spent.values(), default=0) + rounds * local_loss(z)}
        key = f"{z!r} {self.rate!r}"
        return self._spent | {key: self._spent.get(key, 0) + rounds}

    def _add(self, key: str, amount: float) -> None:
        self._spent[key] = self._spent.get(key, 0) + amount


def participants_are_secret(privacy: Privacy | None) -> bool:
    """Whether only the server of a run with this privacy, if any, knows the participants."""
    return privacy is not None and privacy.hides_participants


def _not_central(key: str, why: str) -> ValueError:
    return ValueError(f"leave {key} at its default with dp 'central': {why}")


def _check_budget(dp: str, z: float, epsilon: float) -> None:
    """Raise ValueError unless exactly one of z and ε is given, or none without privacy."""
    given = f"dp-noise-multiplier is {z:g} and dp-epsilon is {epsilon:g}"
    if dp == "none":
        if z or epsilon:
            raise ValueError(f"{given}, but dp is 'none': set it to 'local' or 'central'")
    elif (z > 0) == (epsilon > 0):
        raise ValueError(f"{given}; exactly one must be positive, the other 0")


def checked(state: Any, where: str) -> dict[str, Any]:
    """Check a `Privacy.state` that was read from the untrusted file `where`.

    Raises ValueError with the first entry that no run writes."""

    def need(fits: bool, entry: str, value: Any, needed: str) -> None:
        if not fits:
            raise ValueError(f"{where} is refused: {entry} is {value!r:.80}; it must be {needed}")

    need(isinstance(state, dict), "its content", state, "a table")
    for key in ("mode", "spent", *state):
        need(key in FIELDS, "a key", key, f"one of {', '.join(FIELDS)}")
        fits, needed = FIELDS[key]
        need(fits(state.get(key)), repr(key), state.get(key), needed)
    for key, value in state["spent"].items():
        entry = f"'spent' of {key!r}"
        if state["mode"] == "central":
            need(_is_kind_of_round(key), "a key of 'spent'", key, "two numbers, z and q")
            fits_count = type(value) is int and 0 <= value <= MOST_ROUNDS
            need(fits_count, entry, value, f"a whole number of rounds, up to {MOST_ROUNDS}")
        else:
            need(bool(CLIENT.fullmatch(key)), "a key of 'spent'", key, "the number of a client")
            fits_loss = type(value) in (int, float) and 0 <= value <= sys.float_info.max
            need(fits_loss, entry, value, "a finite number from 0")
    return state


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


CLIENT = re.compile(r"0|[1-9][0-9]{0,19}")
# For each key of a state: a check of its value, and what the value must be.
FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "mode": (lambda value: value in ("local", "central"), "'local' or 'central'"),
    "spent": (lambda value: isinstance(value, dict), "a table"),
    "generator": (lambda value: value in GENERATORS, f"one of {', '.join(GENERATORS)}"),
    "not-covered": (_is_list_of_texts, "a list of texts"),
}


def _is_kind_of_round(key: str) -> bool:
    """Whether the key of `spent` is "z q", exactly as runs write it."""
    try:
        z, q = map(float, key.split())
    except ValueError:
        return False
    return 0 < z < math.inf and 0 < q <= 1 and key == f"{z!r} {q!r}"
