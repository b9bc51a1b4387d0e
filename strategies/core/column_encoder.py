"""One encoding of inputs for all nodes, from sums over the training clients' columns.

Before the first round each training client is asked once for its sums
(`partitions.datasets.statistics`). The encoding that they give is part of every later message and
of the run's state, so a later client and a resumed run read inputs by the same numbers. A client
of another package sends no sums and would train on other inputs, so it is refused."""

from collections.abc import Iterable, Mapping, Sequence
from logging import INFO, WARNING
from typing import Any, Protocol

from flwr.common.logger import log

from clients.core.arrays import Arrays
from clients.core.protocol import ENCODING, NUM_EXAMPLES, SHAPE, STATISTICS, SUMS
from partitions.datasets.shared_encoding import (
    Sent,
    SharedEncoding,
    agreeing,
    in_other_units,
    learnt,
)
from partitions.datasets.statistics_reading import read_encoding
from strategies.core.privacy import Privacy, participants_are_secret
from strategies.core.receiver import Receiver
from strategies.core.replies import DIFFERS, Node, Requirement, Update
from strategies.core.round_state import Round

COVERED = "sums over the columns of training rows"  # what privacy would have to cover


class Asking(Protocol):
    """What an encoder uses of its strategy."""

    receiver: Receiver
    now: Round
    privacy: Privacy | None
    runs_own_loop: bool
    weighted_by_key: str

    def training_nodes(self) -> Iterable[Node]:
        """The training nodes that are present."""

    def exchange(self, action: str, payloads: Mapping[Node, Arrays]) -> list[Update]:
        """The valid replies to a message."""


class ColumnEncoder:
    """Makes the encoding of inputs of shape `shape`, at the start of a run of `method`.

    `missing` says whether gaps are filled by the mean, as in `partitions.datasets.encoding`."""

    def __init__(self, method: str, shape: tuple[int, ...], missing: str) -> None:
        self.encoding: SharedEncoding | None = None
        self.requires = Requirement(
            method,
            "send the sums of their columns",
            offers=(STATISTICS,),
            source="fedapps.client_app('{}', standardize='training-clients')",
        )
        self._shape = shape
        self._missing = missing

    def settings(self) -> dict[str, Any]:
        """Entries of every message's config."""
        if self.encoding is None:
            return {SHAPE: list(self._shape)}
        return {ENCODING: self.encoding.text()}

    def learn(self, strategy: Asking) -> None:
        """Ask the training clients, and make the encoding of their answers.

        A client whose columns are not those of the majority is dropped. Raises ValueError if
        privacy does not allow the question, also inside another strategy, such as Flower's privacy
        wrappers, and RuntimeError if no encoding can be made."""
        if not strategy.runs_own_loop:
            raise ValueError(
                "a column_encoder asks clients for sums over their columns, which no wrapper "
                "clips; call the strategy's own start, or scale the samples in `data=`"
            )
        if strategy.privacy is not None:
            strategy.privacy.admit(COVERED)
        payloads: dict[Node, Arrays] = {node: {} for node in strategy.training_nodes()}
        updates = strategy.exchange(STATISTICS, payloads)
        sent: list[Sent] = []
        nodes: list[Node] = []
        for update in updates:
            if SUMS not in update.metrics:
                strategy.receiver.drop(update.node, "malformed", f"the reply holds no {SUMS}")
                continue
            nodes.append(update.node)
            sent.append(_sent(update, strategy))
        if not sent:
            raise RuntimeError(
                f"none of {len(payloads)} training clients sent the sums of its columns, which "
                f"standardize='training-clients' asks for; {strategy.now.failure}"
            )
        notes: list[str] = []
        try:
            kept, others = agreeing(sent)
            for number, difference in others:
                strategy.receiver.drop(nodes[number], DIFFERS, difference)
            encoding = learnt(kept, self._missing, notes)
            self._check_shape(encoding)
        except ValueError as error:
            raise RuntimeError(str(error)) from error
        self.encoding = encoding
        for note in (*notes, *in_other_units(encoding, kept)):
            log(WARNING, "%s", note)
        log(INFO, "inputs: %s", encoding.line)

    def _check_shape(self, encoding: SharedEncoding) -> None:
        """Raise ValueError unless the network takes what the encoding gives."""
        if encoding.table is None:
            return
        width = len(encoding.table.outputs)
        if self._shape == (width,):
            return
        names: Sequence[str] = encoding.table.outputs
        raise ValueError(
            f"the training clients' columns give {width} inputs ({', '.join(names):.500}), but "
            f"shape is {self._shape}; give server_app shape=({width},), and let the network of "
            f"model= take {width} inputs"
        )

    def state(self) -> str:
        """The encoding as a text; "" before it is made."""
        return "" if self.encoding is None else self.encoding.text()

    def load_state(self, state: str) -> None:
        """Continue with the encoding of a `state`. Raises ValueError if it is damaged."""
        if state:
            self.encoding = read_encoding(state)


def _sent(update: Update, strategy: Asking) -> Sent:
    """A client's statistics. Its rows count for at most its sample count.

    With privacy sample counts are hidden, and each client counts the same."""
    statistics = update.metrics[SUMS]
    weight = 1.0
    if strategy.privacy is not None:
        weight = 1 / statistics.rows
    elif strategy.weighted_by_key == NUM_EXAMPLES and update.num_examples < statistics.rows:
        weight = update.num_examples / statistics.rows
    name = f"client {update.node.client}"
    if participants_are_secret(strategy.privacy):
        name = "a client"
    return Sent(name, statistics, weight)
