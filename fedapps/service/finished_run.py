"""A finished run, and the model that a later client gets from it."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from clients.core.arrays import from_record, to_record
from clients.core.protocol import METHOD, SERVE
from fedapps.building import WITHOUT_SCORES, Builder, build_strategy, method_model, shared_of
from fedapps.common import external_code
from fedapps.common.threads import one_thread
from fedapps.common.torch_defaults import torch_defaults
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.methods import METHODS
from fedapps.node.bridge import load_state, reply_of
from fedapps.results.card import Card, read_card
from fedapps.results.schema import SummaryFile
from fedapps.saved import SUMMARY, WHICH, opening, read_former, read_summary, trained_rounds
from fedapps.service.delivery import PersonalizationResult, PersonalModel, result_of
from fedapps.service.inputs import Data, Inputs, read_inputs
from fedapps.service.stream import CLIENT
from fedapps.settings.config import Config, override, settings
from fedapps.settings.saved_configurations import saved_configuration, where_a_run_is
from strategies.core.replies import Node
from strategies.core.strategy import PersonalizedStrategy

NEW_CLIENT = 2**32  # partition id that no client of the run has
WAIT_SECONDS = 5.0  # for the first node, each time that the nodes are polled
# Why a client has no model.
FAILED = "it failed; see the log"
NO_MODEL = "the method has none for it"

logger = logging.getLogger("flwr")


class FinishedRun:
    """The run in `folder`, with the model of its "best" or its "last" `round`. Raises ValueError
    if it holds none that can be served."""

    def __init__(self, folder: str | Path, round: str = "best") -> None:
        self.folder = Path(folder).expanduser().resolve()
        self.round = round
        if round not in WHICH:
            raise ValueError(f"unknown round {round!r}; known: {', '.join(WHICH)}")
        if not (self.folder / "config.toml").is_file():
            raise ValueError(f"{folder} holds no run; {where_a_run_is(Path(folder))}")
        self.config: Config = saved_configuration(self.folder)
        self.card: Card = read_card(self.folder)
        self.method = self.card.method
        self.summary: dict[str, Any] = read_summary(self.folder)
        try:
            SummaryFile.validate_python(self.summary)
        except ValueError as error:
            file = self.folder / SUMMARY
            raise ValueError(f"{file} is damaged: it is no run's summary") from error
        read_former(self.folder, round)  # refuses files of other rounds and runs, and NaN

    @property
    def novel(self) -> str:
        """What an unlabeled novel client gets: "global", "adapted", or "" for nothing."""
        return METHODS[self.method].novel

    @torch_defaults()
    def personalize(self, data: Data) -> PersonalModel:
        """The model of a client that holds the data: unlabeled inputs (n, *shape), or a path. With
        some methods its `update` goes on with further inputs.

        Inputs are whole numbers as the run's dataset stores them, or floats in [0, 1].
        Raises ValueError if they do not fit, or if the method cannot serve such a client."""
        return self.serve(self.inputs(data)).module()

    @torch_defaults()
    def inputs(self, data: Data, skip_broken: float | None = None) -> Inputs:
        """The data as a client's inputs. A share `skip_broken` of them, None: the run's, may be
        broken; they are left out."""
        card = self.card
        if skip_broken is not None:
            if not 0 <= skip_broken < 1:
                raise ValueError(f"skip-broken is {skip_broken}; it must lie in [0, 1)")
            card = replace(card, skip_broken=skip_broken)
        return read_inputs(data, card)

    def serve(self, inputs: Inputs, epsilon: float | None = None) -> PersonalizationResult:
        """What a client with these inputs receives, computed as in evaluation.

        `epsilon` is the privacy of an ODPFL-HN client's descriptor; None: the run's."""
        self.check_novel()
        if not inputs.share.novel:
            raise ValueError("this is a training client's folder; its own node serves it")
        with opening(self.folder), torch_defaults(), one_thread():
            return self._ask_strategy(inputs, epsilon)

    def _ask_strategy(self, inputs: Inputs, epsilon: float | None) -> PersonalizationResult:
        """What the run's strategy has for this client, asked over a grid of the client alone."""
        config = self._config_with(epsilon)
        builder = Builder(config, self.method, self.card.info())
        errors: list[ValueError] = []

        def answer(message: Message, context: Context) -> Message:
            try:
                return reply_of(builder.client(inputs.share, CLIENT), message, context)
            except ValueError as error:
                errors.append(error)
                raise

        client = builder.client(inputs.share, CLIENT)  # raises ValueError if the inputs do not fit
        # A strategy may ask the client before it has a model for it: a grid of this one node.
        app = cast(ClientApp, answer)  # the grid only calls it
        grid = InProcessGrid(app, config, [{"partition-id": NEW_CLIENT}])
        strategy = restore_strategy(self, grid)
        nodes = strategy.present()
        payloads = strategy.personalize(strategy.arrays, nodes)
        if errors:
            raise errors[0]
        if not payloads:
            raise self._no_model(NO_MODEL)
        (node,) = nodes
        client.state = load_state(grid.contexts[node.id], self.method, client)
        # Read-only, as the arrays of a message are: training must not change what was sent.
        arrays = from_record(to_record(payloads[node]), copy=False)
        message_config = strategy.common_config | strategy.message_config()
        try:
            return result_of(client, arrays, message_config, config, self.card, inputs)
        except ValueError:
            raise
        except Exception as error:
            logger.error("the client failed", exc_info=error)
            raise self._no_model(FAILED) from error

    def _config_with(self, epsilon: float | None) -> Config:
        """The run's configuration without scores of the user's own, with `epsilon` as the privacy
        of descriptors unless it is None. Raises ValueError if the method's clients send none."""
        if epsilon is None:
            return self.config | WITHOUT_SCORES
        key = f"{self.method}.descriptor-epsilon"
        if key not in self.config:
            raise ValueError(
                f"epsilon is {epsilon:g}, but {self.method}'s clients send no descriptor to "
                "add noise to; odpfl-hn's do"
            )
        return override(self.config | WITHOUT_SCORES, {key: epsilon})

    def _no_model(self, reason: str) -> ValueError:
        return ValueError(f"{self.method} gives no model for these inputs: {reason}")

    def check_novel(self) -> None:
        """Raise ValueError if the method cannot serve unlabeled novel clients."""
        if not self.novel:
            able = ", ".join(name for name, entry in METHODS.items() if entry.novel)
            raise ValueError(
                f"{self.method} cannot serve clients without labels; those that can: {able}"
            )


def load(run: str | Path, *, round: str = "best", allow: Sequence[str] = ()) -> FinishedRun:
    """A finished run, by its folder: ``load(run).personalize(x)`` is the model for inputs x.

    `round` "last" serves the model of the last round, not of the one that validation chose.
    `allow` names the code from outside the package, each as module:NAME, that the run may use."""
    external_code.allow(*allow)
    return FinishedRun(run, round)


def restore_strategy(run: FinishedRun, grid: Grid) -> PersonalizedStrategy:
    """The run's strategy in its final state, over the nodes of a grid."""
    entry = METHODS[run.method]
    config = run.config
    network = method_model(run.method, config, run.card.info())
    strategy = build_strategy(
        config,
        run.method,
        network[0],
        min_available_nodes=0,
        evaluate_novel=bool(entry.novel),
        wait=WAIT_SECONDS,
        former=read_former(run.folder, run.round),
        saved_rounds=trained_rounds(run.folder, run.round),
        privacy=None,
    )
    shared = shared_of(network, run.method, settings(config, run.method))
    strategy.open(grid, to_record(shared), {METHOD: run.method})
    return strategy


@torch_defaults()
@one_thread()  # the same bits as in an evaluation
def hand_out(strategy: PersonalizedStrategy, nodes: list[Node]) -> dict[int, str]:
    """Send nodes their models; returns the reason for each client without one, by client."""
    payloads = strategy.personalize(strategy.arrays, nodes)
    served = {update.node.client for update in strategy.exchange(SERVE, payloads)}
    reasons = {}
    for node in nodes:
        if node.client in served:
            continue
        reasons[node.client] = FAILED if node in payloads else NO_MODEL
    return reasons
