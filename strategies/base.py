"""The Flower strategy that every method starts from: construct it, call `start` in a ServerApp.

`strategies.hooks` is what a method overrides. This class is made of collaborators: the rounds
(`loop`), the roster (`roster`), messages and replies (`messages`, `replies`, `reply_metrics`),
evaluations (`scores`), saved state (`run_state`) and, from outside, privacy (`privacy`)."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from uuid import uuid4

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from clients.arrays import Arrays
from strategies.hooks import Aggregate, Hooks
from strategies.loop import Loop
from strategies.messages import Messenger
from strategies.privacy import Privacy
from strategies.replies import EXAMPLES, Node
from strategies.roster import Roster
from strategies.round import Round, Stop
from strategies.run_state import client_states
from strategies.scores import foreign_means

__all__ = ["PersonalizedStrategy", "Stop"]


class PersonalizedStrategy(Hooks):
    """Rounds of training on sampled training clients; evaluation on training and novel clients.

    A run waits at most `wait` seconds for `min_available_nodes`. A reply that is an error, lacks or
    invents names, has wrong shapes or dtypes, is not finite, or is absurdly far from what was sent
    is dropped, counted and logged.

    `on_round` is called with each round's report and may raise `Stop`; `on_failure` with a text for
    each new cause of a dropped reply. `privacy` protects updates
    before they are aggregated. `former` is the `state` of a former run, or just its "arrays"; the
    run continues after the round of that state, and with 0 rounds it is only evaluated.
    `client_states` are the states of that run's clients, by client id; they are sent back. With
    `only_model` the roster is limited to clients whose network has that name. The learning rates of
    round r, counted from 0, are `lr_decay` ** (r / `lr_decay_rounds`) times those given, on clients
    and server; r is `saved_rounds` more where `former` was trained for that many.

    `min_train_nodes` to `evaluate_metrics_aggr_fn` are those of Flower's FedAvg; they aggregate
    the metrics of foreign clients. Without `ask` no node is asked for its identity. A `lenient`
    strategy accepts clients that lack what it `requires`, and logs what it then computes.

    Raises ValueError for settings out of range, RuntimeError when a run cannot continue."""

    def __init__(
        self,
        *,
        wait: float = 120.0,
        on_round: Callable[[dict[str, Any]], None] | None = None,
        on_failure: Callable[[str], None] | None = None,
        former: Mapping[str, Any] | None = None,
        client_states: Mapping[int, Arrays] | None = None,
        only_model: str = "",
        privacy: Privacy | None = None,
        saved_rounds: int = 0,
        min_train_nodes: int = 1,
        min_evaluate_nodes: int = 1,
        weighted_by_key: str = EXAMPLES,
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: Aggregate | None = None,
        evaluate_metrics_aggr_fn: Aggregate | None = None,
        ask: bool = True,
        lenient: bool = False,
        **settings: Any,
    ) -> None:
        if lenient and self.requires is not None:
            self.requires.relax(type(self).__name__)
            self.requires = None
        super().__init__(**settings)
        self.privacy, self.former, self.saved_rounds = privacy, former, saved_rounds
        self.min_nodes = {"sample": min_train_nodes, "evaluate": min_evaluate_nodes}
        self.weighted_by_key = weighted_by_key
        self.arrayrecord_key, self.configrecord_key = arrayrecord_key, configrecord_key
        self.on_round, self.on_failure = on_round, on_failure
        self.train_metrics_aggr_fn = train_metrics_aggr_fn or foreign_means
        self.evaluate_metrics_aggr_fn = evaluate_metrics_aggr_fn or foreign_means
        self.arrays, self.nodes, self.handout, self.evaluation = {}, [], {}, []
        self.now, self.num_rounds, self.timeout = Round(), 0, 3600.0
        self.token, self.common_config = uuid4().hex, {}
        self.messenger = Messenger(self)
        self.roster = Roster(
            max(self.min_available_nodes, *self.min_nodes.values()),
            wait,
            only_model,
            self.start_timeout,
            ask=ask,
            requires=self.requires,
            strategy=type(self).__name__,
        )
        self.loop = Loop(self, self.roster, client_states or {})

    def summary(self) -> None:
        """Nothing to log: the settings stand in the run's configuration."""

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds up to `num_rounds`; the result holds the server's final arrays.

        `train_config` also goes with queries, further exchanges and, unless `evaluate_config` is
        given, evaluations. `evaluate_fn` gets `global_model`; ValueError where there is none."""
        if evaluate_fn is not None and (self.keeps_arrays or not self.holds_model):
            raise ValueError(
                f"{type(self).__name__} holds no model that evaluate_fn could evaluate: every "
                "client has its own; leave it out and read the clients' evaluations"
            )
        self.grid, self.num_rounds, self.timeout = grid, num_rounds, timeout
        self.common_config = dict(train_config or {})
        training = ConfigRecord(self.common_config)
        with self.loop.flower_arrays.leading():
            return self.loop.run(initial_arrays, training, evaluate_config or training, evaluate_fn)

    def open(self, grid: Grid, initial_arrays: ArrayRecord, config: Mapping[str, Any]) -> None:
        """Load the `former` state without any round, to serve the nodes of the grid.

        `personalize` and `exchange` then work; their messages hold `config`."""
        self.grid, self.common_config = grid, dict(config)
        self.loop.flower_arrays.take(initial_arrays)

    def present(self) -> list[Node]:
        """Update the roster: the nodes that are present, by client id."""
        return self.loop.present()

    def client_states(self) -> Iterator[tuple[int, Arrays]]:
        """As `run_state.client_states`."""
        return client_states(self)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages to the sampled training nodes."""
        return self.loop.configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the valid replies."""
        return self.loop.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages to a sample of all nodes, in the rounds that evaluate."""
        return self.loop.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The evaluation's metrics, and the end of the round."""
        return self.loop.aggregate_evaluate(server_round, replies)
