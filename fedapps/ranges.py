"""What values every key of the configuration may have, whichever method and section it is in.

Ends are generous: they keep out what cannot work (NaN, infinity, signs, sizes that no machine
holds), not what is unwise. What depends on several keys, or on the data, is checked where both
are known. A section's own entry wins over that of the plain name."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

from clients.adaptation import INNER_LOSSES, KL_DIRECTIONS
from clients.fedembed import ASSIGNMENTS
from clients.fedmd import DIGEST_LOSSES, INITIALIZATIONS
from clients.fedsr import REPRESENTATIONS
from clients.heterofedtta import ADAPT_ON
from clients.models.encoders import ENCODERS
from clients.perfedavg import VARIANTS
from clients.pfl import BASES
from clients.privacy import COVERS, GENERATORS
from clients.tent import PARAMETERS
from partitions.federation import STANDARDIZE
from strategies.base import CHOICES, MEANS
from strategies.fedtta import WEIGHTINGS
from strategies.heads import HEADS
from strategies.odpfl_hn import TRAININGS
from strategies.pfedhn import DESCRIPTORS, OPTIMIZERS
from strategies.privacy import MODES
from strategies.robust import ROBUST

RATE = "[0, 100]"  # learning rates
COUNT = "[0, 1000000]"
SOME = "[1, 1000000]"
WIDTH = "[1, 4096]"
WEIGHT = "[0, 1000000]"
ROUNDS = "[0, 10000000]"
POSITIVE = "(0, 100]"
SECONDS = "(0, 1000000000]"

INTERVALS = {
    # of the run
    "num-clients": SOME,
    "train-fraction": "(0, 1]",
    "rounds": ROUNDS,
    "fraction-train": "(0, 1]",
    "fraction-evaluate": "(0, 1]",
    "local-steps": COUNT,
    "local-epochs": COUNT,
    "batch-size": SOME,
    "lr": RATE,
    "momentum": "[0, 1)",
    "weight-decay": "[0, 10]",
    "seed": "[0, 9223372036854775807]",
    "evaluate-every": "[1, 10000000]",
    "novel-rounds": ROUNDS,
    "novel-shots": COUNT,
    "early-stopping": ROUNDS,
    "checkpoint-every": ROUNDS,
    "cohort": "[1, 10000]",
    "image-size": "[0, 4096]",
    "serve-every": "(0, 86400]",
    "serve-timeout": "(0, 86400]",
    "lr-decay": "(0, 1]",
    "lr-decay-rounds": "[1, 10000000]",
    "data-seed": "[-1, 9223372036854775807]",
    "min-valid-replies": SOME,
    "min-available-nodes": COUNT,
    "round-timeout": SECONDS,
    "start-timeout": SECONDS,
    "max-update-norm": "[0, 1000000000000]",
    "robust-fraction": "[0, 0.5)",
    "dp-clip": "(0, 1000000]",
    "dp-noise-multiplier": WEIGHT,
    "dp-epsilon": WEIGHT,
    "dp-delta": "(0, 1)",
    # of partitions
    "partition.validation-fraction": "[0, 1)",
    "partition.test-fraction": "[0, 1)",
    "partition.public-samples": "[0, 1000000000]",
    "partition.classes-per-client": SOME,
    "partition.shards-per-client": SOME,
    "partition.alpha": "(0, 1000000]",
    "partition.novel-alpha": WEIGHT,
    "partition.min-samples": SOME,
    "partition.samples": "[1, 1000000000]",
    "partition.blur": "[0, 1000]",
    "partition.rotation": "[-360, 360]",
    "partition.keep-fraction": "(0, 1]",
    "partition.samples-per-user": "[2, 1000000]",
    "partition.test-per-user": COUNT,
    "partition.validation-per-user": COUNT,
    # of methods
    "adapt-batch-size": SOME,
    "adapt-clip-norm": WEIGHT,
    "adapt-lr": RATE,
    "adapt-momentum": "[0, 1)",
    "min-agreement": "[0, 1]",
    "descriptor-rate": "[0, 1]",
    "som-passes": SOME,
    "adapt-steps": COUNT,
    "adaptation-width": "[1, 4096]",
    "adversarial-lr": RATE,
    "agreement": "[0, 1]",
    "alignment": "[0, 1)",
    "base-weight": WEIGHT,
    "clip-norm": WEIGHT,
    "cmi": WEIGHT,
    "delta": POSITIVE,
    "descriptor-answers": SOME,
    "descriptor-delta": "(0, 1)",
    "descriptor-epsilon": WEIGHT,
    "descriptor-dim": "[0, 4096]",
    "digest-epochs": SOME,
    "embedding-dim": "[0, 4096]",
    "embedding-lr": RATE,
    "encode-batch-size": COUNT,
    "encode-samples": COUNT,
    "encoder-local-lr": RATE,
    "encoder-lr": RATE,
    "encoder-steps": COUNT,
    "feature-dim": WIDTH,
    "fedavg-rounds": ROUNDS,
    "fine-tune-rounds": ROUNDS,
    "head-epochs": COUNT,
    "test-samples": "[0, 10000]",
    "hidden-dim": WIDTH,
    "hidden-layers": "[0, 20]",
    "inner-lr": RATE,
    "inner-steps": SOME,
    "l2r": WEIGHT,
    "margin": WEIGHT,
    "max-growth": "[1, 100]",
    "max-steps": SOME,
    "apfl.mixing": "[0, 1]",
    "fedala.layers": SOME,
    "fedala.mixing-lr": RATE,
    "fedala.mixing-share": "(0, 1]",
    "fedamp.step": RATE,
    "fedamp.width": "(0, 1000000]",
    "fedbabu.tune-epochs": COUNT,
    "shot.diversity": WEIGHT,
    "t3a.supports": COUNT,
    "mixture-lr": RATE,
    "mu": WEIGHT,
    "new-neuron-cost": WEIGHT,
    "noise-dim": WIDTH,
    "novel-digest-epochs": SOME,
    "patience": SOME,
    "penalty": "(0, 1000000]",
    "personal-lr": POSITIVE,
    "prototypical-users": SOME,
    "public-batch-size": COUNT,
    "server-beta": POSITIVE,
    "server-lr": RATE,
    "server-momentum": "[0, 1)",
    "server-weight-decay": "[0, 10]",
    "som-radius": "(0, 1000]",
    "som-radius-end": "(0, 1000]",
    "som-rate": "(0, 1]",
    "som-rate-end": "(0, 1]",
    "sub-populations": "[0, 10000]",
    "sweeps": "[0, 1000]",
    "triplet-lr": POSITIVE,
    "heterofedtta.adaptation-width": "[0, 4096]",  # 0: by the size of the model
    "fedembed.embedding-dim": WIDTH,
    "global+.embedding-dim": WIDTH,
    "pfedkm.sub-populations": "[1, 10000]",
    **{f"{m}.server-lr": POSITIVE for m in ("scaffold", "fedgma", "fedembed", "pfedkm")},
    **{f"{m}.server-lr": POSITIVE for m in ("global", "global+")},
}

CHOSEN: dict[str, Collection[str]] = {
    "on-client-failure": CHOICES,
    "robust": ROBUST,
    "dp": MODES,
    "dp-generator": GENERATORS,
    "device": ("auto", "cpu", "cuda"),
    "dp-covers": COVERS,
    "mean-over": MEANS,
    "standardize": STANDARDIZE,
    "adapt-on": ADAPT_ON,
    "assignment": ASSIGNMENTS,
    "base": BASES,
    "descriptor": DESCRIPTORS,
    "digest-loss": DIGEST_LOSSES,
    "encoder": ENCODERS,
    "heads": HEADS,
    "initialization": INITIALIZATIONS,
    "inner-loss": INNER_LOSSES,
    "kl-direction": KL_DIRECTIONS,
    "parameters": PARAMETERS,
    "server-optimizer": OPTIMIZERS,
    "training": TRAININGS,
    "variant": VARIANTS,
    "representation": REPRESENTATIONS,
    "weighting": WEIGHTINGS,
}
LONGEST = 4096  # characters of a text


@dataclass(frozen=True)
class Interval:
    """Numbers from `low` to `high`, an end excluded where it is open."""

    low: float
    high: float
    open_low: bool = False
    open_high: bool = False

    @staticmethod
    @cache
    def parse(text: str) -> "Interval":
        """From its mathematical notation, such as ``(0, 1]``."""
        found = re.fullmatch(r"([\[(])(\S+), (\S+)([\])])", text)
        assert found, text
        left, low, high, right = found.groups()
        ends = [float(one) if "." in one else int(one) for one in (low, high)]  # ints are exact
        return Interval(ends[0], ends[1], left == "(", right == ")")

    def __contains__(self, value: float) -> bool:
        """Whether it holds the number; NaN lies in none."""
        low = self.low < value if self.open_low else self.low <= value
        return low and (value < self.high if self.open_high else value <= self.high)


def interval(key: str) -> str | None:
    """The interval of a key that is a number, None if there is no such."""
    return INTERVALS.get(key, INTERVALS.get(_plain(key)))


def choices(key: str) -> Collection[str] | None:
    """The texts that a key may have, None if there is no fixed list of them."""
    return CHOSEN.get(_plain(key))


def check(key: str, value: str | int | float | bool) -> None:
    """Raise ValueError, naming the value and the range or the choices, if it is out of range."""
    if isinstance(value, str):
        known = choices(key)
        if known is not None and value not in known:
            raise ValueError(f"unknown {key} {value!r:.200}; known: {', '.join(known)}")
        if len(value) > LONGEST or not value.isprintable():
            raise ValueError(
                f"{key} is {value!r:.200}; it must be one line of at most {LONGEST} characters"
            )
    elif not isinstance(value, bool):
        text = interval(key)
        if text is not None and value not in Interval.parse(text):
            raise ValueError(f"{key} is {value!r:.200}; it must lie in {text}")


def _plain(key: str) -> str:
    """The key without its method; partitions' keys are whole, and those of a stranger's code."""
    return key if key.startswith("partition.") or ":" in key else key.rpartition(".")[2]
