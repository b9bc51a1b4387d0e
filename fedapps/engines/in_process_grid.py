"""InProcessGrid: the same strategies and ClientApps in one process, without Ray or a SuperLink.

This file and `clients.core.arrays` alone use Flower's internals: ``TaskIdentity`` and message ids
as Flower's in-memory grid sets them, the dicts inside records, messages and their metadata, and a
ClientApp's table of handlers.
Therefore pyproject pins flwr to minor releases that were tried."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import count
from typing import Any, Self
from uuid import uuid4

from flwr.app import Context, Message, RecordDict
from flwr.app.error import Error
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import DEFAULT_ACTION
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from clients.core.arrays import filled
from clients.core.cohort import Cohort, Dropped
from fedapps.engines.jobs import Apps
from fedapps.node.context import (
    DEBUG,
    SIMULATED,
    SIMULATION,
    is_simulated,
    log_error,
    raises_errors,
    reason_of,
)
from fedapps.settings.config import Config

UserConfig = Mapping[str, str | int | float | bool]
_ids = map(f"{uuid4().hex}-{{}}".format, count())  # of messages; a new UUID for each is slow
Pause = Callable[[], None]  # called between messages; raises once the command is interrupted


class AnsweringGrid(Grid):
    """Flower's Grid, reduced to `get_node_ids` and `answer`, which subclasses define."""

    def __init__(self) -> None:
        self._run = Run.create_empty(1)
        self._replies: dict[str, Message] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        """Let a subclass that replaces `send_and_receive` alone, as users of Flower's Grid do,
        change what `stream` returns as well."""
        super().__init_subclass__(**options)
        if "send_and_receive" in vars(cls) and "stream" not in vars(cls):
            cls.stream = _stream_of_list  # type: ignore[method-assign, assignment]

    def answer(self, messages: Sequence[Message], timeout: float | None) -> Iterator[Message]:
        """The replies of the nodes; a node that needs more than `timeout` seconds has none."""
        raise NotImplementedError

    def set_run(self, run: Run) -> None:
        """Set the run."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """A message to a node; deprecated by Flower in favour of ``Message(…)``."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Wait for all replies and store them until they are pulled."""
        sent = with_ids(messages)
        self._replies |= {r.metadata.reply_to_message_id: r for r in self.answer(sent, None)}
        return [message.metadata.message_id for message in sent]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The stored replies to the messages of these ids."""
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """The replies that arrive within `timeout` seconds, as a list, which Flower's servers
        expect."""
        return list(self.answer(with_ids(messages), timeout))

    def stream(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """The same replies as they arrive; the grid keeps none in memory. Messages may be sent only
        when the caller iterates."""
        return self.answer(with_ids(messages), timeout)


def _stream_of_list(
    grid: AnsweringGrid, messages: Iterable[Message], *, timeout: float | None = None
) -> Iterator[Message]:
    return iter(grid.send_and_receive(messages, timeout=timeout))


class LocalGrid(AnsweringGrid):
    """A grid of virtual nodes 1, 2, …, one for each of `node_configs`."""

    def __init__(self, node_configs: Sequence[UserConfig]) -> None:
        super().__init__()
        self._count = len(node_configs)
        TaskIdentity.run_id = 1
        TaskIdentity.node_id = 0
        TaskIdentity.task_id = 0

    def get_node_ids(self) -> Iterable[int]:
        """The nodes' ids."""
        return range(1, self._count + 1)


class Contexts(Mapping[int, Context]):
    """The contexts of nodes 1, 2, …, one for each of `node_configs`.

    Only those with state, or that were asked for here, are kept. Others are made for each message,
    so clients that never trained take no memory."""

    def __init__(self, run_config: UserConfig, node_configs: Sequence[UserConfig]) -> None:
        self._run_config = dict(run_config)  # hundreds of keys; one copy for thousands of clients
        self._node_configs = node_configs
        self._kept: dict[int, Context] = {}

    def __getitem__(self, node: int) -> Context:
        self._kept[node] = self.passing(node)
        return self._kept[node]

    def __contains__(self, node: object) -> bool:
        return node in range(1, len(self) + 1)

    def __iter__(self) -> Iterator[int]:
        return iter(range(1, len(self) + 1))

    def __len__(self) -> int:
        return len(self._node_configs)

    def passing(self, node: int) -> Context:
        """The node's context, which is not kept before `keep`. KeyError if there is none."""
        if node in self._kept:
            return self._kept[node]
        if node not in self:
            raise KeyError(node)
        config = dict(self._node_configs[node - 1])
        return Context(1, node, config, RecordDict(), self._run_config)

    def keep(self, node: int, context: Context) -> None:
        """Keep the node's context if it has state, or had some."""
        if context.state or node in self._kept:
            self._kept[node] = context


class InProcessGrid(LocalGrid):
    """Calls `client_app` for one message after the other; `contexts` has the nodes' states.

    A client that raises answers with an error reply, as in Flower's engines. Up to `cohort`
    clients train side by side, as one stack (`clients.core.cohort`).

    A timeout limits the seconds of each client's own work, since clients do not work at the same
    time. In a cohort, the members share the seconds of common steps equally. A client cannot be
    interrupted: it works to its end, then its reply and its new state are dropped."""

    def __init__(
        self,
        client_app: ClientApp,
        run_config: UserConfig,
        node_configs: Sequence[UserConfig],
        cohort: int = 1,
        pause: Pause = lambda: None,
    ) -> None:
        super().__init__(node_configs)
        self.client_app = client_app
        self.cohort = Cohort(cohort)
        self._pause = pause
        self.contexts = Contexts(run_config, node_configs)
        self._contexts_after: dict[int, Context] = {}  # of replies that may come too late

    @classmethod
    def simulation(
        cls, client_app: ClientApp, run_config: UserConfig, num_nodes: int, *options: Any
    ) -> Self:
        """A grid whose nodes have the configurations of Flower's simulation engine."""
        return cls(client_app, run_config, Simulated(num_nodes), *options)

    def answer(self, messages: Sequence[Message], timeout: float | None) -> Iterator[Message]:
        """The replies; that of a client which worked longer than `timeout` seconds is an error."""
        for message, (reply, seconds) in zip(messages, self._replies_of(messages), strict=True):
            node = message.metadata.dst_node_id
            context = self._contexts_after.pop(node, None)
            if timeout is not None and seconds > timeout:
                reason = f"no reply within {timeout:g} s: it took {seconds:.3g} s"
                yield error_reply(message, reason, ErrorCode.NODE_UNAVAILABLE)
                continue
            if context is not None:
                self.contexts.keep(node, context)
            yield reply

    def _replies_of(self, messages: Sequence[Message]) -> Iterator[tuple[Message, float]]:
        """Each client's reply, and the seconds that it worked."""
        kinds = {message.metadata.message_type for message in messages}
        if self.cohort.size > 1 and all(kind.startswith("train") for kind in kinds):
            yield from self.cohort.run([partial(self._deliver, message) for message in messages])
            if kinds == {"train"}:
                context = self.contexts.passing(messages[0].metadata.dst_node_id)
                self.cohort.warn_if_unused(str(context.run_config.get("method", "the method")))
            return
        for message in messages:
            started = time.monotonic()
            reply = self._deliver(message)
            yield reply, time.monotonic() - started

    def _deliver(self, message: Message) -> Message:
        """Let the client answer, on a copy of its context."""
        self._pause()
        node = message.metadata.dst_node_id
        if node not in self.contexts:
            return error_reply(message, "there is no such node", ErrorCode.NODE_UNAVAILABLE)
        context = copy(self._contexts_after.get(node) or self.contexts.passing(node))
        context.state = filled(RecordDict(), context.state)
        reply = respond(self.client_app, message, context)
        self._contexts_after[node] = context
        return with_id(reply)


def run_in_process(
    apps: Apps, config: Config, pause: Pause = lambda: None, *, debug: bool = False
) -> None:
    """One run on the in-process grid; with `debug` the first error of a client is raised."""
    nodes = Simulated(int(config["num-clients"]), **{DEBUG: debug})
    grid = InProcessGrid(apps.client_app(), config, nodes, int(config["stacked-clients"]), pause)
    apps.run(grid, config, "in-process")


class Simulated(Sequence[UserConfig]):
    """The node configurations of Flower's simulation engine, with ``simulated`` and `more` added.
    Each is made when it is read."""

    def __init__(self, num_nodes: int, **more: bool) -> None:
        self._num_nodes = num_nodes
        self._more = more

    def __len__(self) -> int:
        return self._num_nodes

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(self._num_nodes)[index]]
        number = range(self._num_nodes)[index]
        return {**simulated_node(number, self._num_nodes), **self._more}


def simulated_node(number: int, num_nodes: int) -> UserConfig:
    """The configuration of one simulated node."""
    return {"partition-id": number, "num-partitions": num_nodes, SIMULATED: SIMULATION}


def with_ids(messages: Iterable[Message]) -> list[Message]:
    """The messages, each with a new id."""
    return [with_id(message) for message in messages]


def with_id(message: Message) -> Message:
    """The message, with a new id."""
    vars(message.metadata)["_message_id"] = next(_ids)
    return message


def with_records(message: Message, records: Mapping[str, Any]) -> Message:
    """A message with the same metadata that holds `records`."""
    result = Message.__new__(Message)
    vars(result).update(vars(message), _content=filled(RecordDict(), records))
    return result


def respond(client_app: ClientAppCallable, message: Message, context: Context) -> Message:
    """The ClientApp's reply; an error reply with the reason if it raises. A real node logs the
    whole error."""
    if lacking := _missing_handler(client_app, message):
        return error_reply(message, lacking)
    # A strategy may put one RecordDict into many messages, so each node gets a copy.
    copied = with_records(message, {key: r.copy() for key, r in message.content.items()})
    try:
        return client_app(copied, context)
    except (KeyboardInterrupt, Dropped):  # they end the caller's work, too
        raise
    # Whatever else it raises, also SystemExit and a panic of a library in Rust: a failing client
    # must not end the run.
    except BaseException as error:
        if raises_errors(context):
            raise
        if not is_simulated(context):
            log_error("the client's answer failed", error, context)
        return error_reply(message, reason_of(error, context))


def _missing_handler(client_app: ClientAppCallable, message: Message) -> str:
    """What a ClientApp lacks to answer the message; "" if it has a handler, or is no plain one.
    Flower would raise a ValueError, as a handler may."""
    if type(client_app) is not ClientApp or client_app._call is not None:
        return ""
    kind = message.metadata.message_type
    category, _, action = kind.partition(".")
    if f"{category}.{action or DEFAULT_ACTION}" in client_app._registered_funcs:
        return ""
    return f"its ClientApp has no handler of {kind!r} messages"


def error_reply(
    message: Message, reason: str, code: int = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
) -> Message:
    """An error reply to the message."""
    return Message(Error(code, reason), reply_to=message)
