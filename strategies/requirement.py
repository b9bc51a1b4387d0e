"""What a strategy asks of its clients beyond training and scoring what they are sent.

It is checked as soon as it can be: `offers` when a client says who it is, `metrics` and `groups` in
each of its train replies. A client that lacks something is left out, and a run stops where nobody
is left, with a sentence that says what to do."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from logging import WARNING
from typing import Any

from flwr.common.logger import log

from clients.protocol import OFFERS


@dataclass(frozen=True)
class Requirement:
    """Clients must `do` this, as those of `method` do.

    They say their `offers` in their answer to ``query``, the exchanges that they answer among
    them; a train reply holds the `metrics`, and arrays of the `groups`. `otherwise` is what the
    strategy is with clients that do not, "" where it is nothing."""

    method: str
    do: str
    offers: tuple[str, ...] = ()
    otherwise: str = ""
    metrics: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    source: str = "fedapps.client_app('{}')"

    @property
    def way(self) -> str:
        """What has such clients."""
        return self.source.format(self.method)

    @property
    def exchanges(self) -> bool:
        """Whether clients are asked for more than training and scores."""
        return any("." in offer for offer in self.offers)

    def offered(self, properties: Mapping[str, Any]) -> bool:
        """Whether a client that tells these properties offers all that is needed."""
        return set(self.offers) <= set(str(properties.get(OFFERS, "")).split())

    def replied(self, arrays: Iterable[str], metrics: Iterable[str]) -> bool:
        """Whether a train reply with arrays and metrics of these names holds what is needed."""
        names = list(arrays)
        return set(self.metrics) <= set(metrics) and all(
            any(name.startswith(group) for name in names) for group in self.groups
        )

    def sentence(self, strategy: str) -> str:
        """What `strategy` needs, and what to do where clients lack it."""
        more = f", or pass lenient=True: it is then {self.otherwise}" if self.otherwise else ""
        return f"{strategy} needs clients that {self.do}; use `{self.way}`{more}"


def checked(requires: Requirement | None, strategy: str, lenient: bool) -> Requirement | None:
    """What is asked of clients: nothing of a `lenient` strategy.

    Raises ValueError if it is nothing without that."""
    if lenient and requires is not None and not requires.otherwise:
        raise ValueError(
            f"{strategy} cannot be lenient; it needs clients that {requires.do}: "
            f"use `{requires.way}`"
        )
    if lenient and requires is not None:
        words = "%s is lenient: with clients that do not %s it is %s"
        log(WARNING, words, strategy, requires.do, requires.otherwise)
    return None if lenient else requires
