"""InProcessGrid: the same strategies and ClientApps in one process, without Ray or a SuperLink.

The one file that touches Flower's internals: ``TaskIdentity`` and message ids are set as
Flower's own in-memory grid does, which is why pyproject pins flwr to one minor release."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import chain
from typing import Any, Self
from uuid import uuid4

from flwr.app import Context, Message, RecordDict
from flwr.app.error import Error
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from clients.cohort import Cohort

UserConfig = Mapping[str, str | int | float | bool]


class Replies(Iterable[Message]):
    """Replies as they come, the same ones whenever they are gone through again; whoever goes
    through them `once` keeps none of them in memory."""

    def __init__(self, coming: Iterator[Message]) -> None:
        self._coming, self._kept = coming, list[Message]()

    def __iter__(self) -> Iterator[Message]:
        yield from self._kept
        for reply in self._coming:
            self._kept.append(reply)
            yield reply

    def once(self) -> Iterator[Message]:
        """The replies that come."""
        return chain(self._kept, self._coming)


class LocalGrid(Grid):
    """A grid of virtual nodes 1, 2, …, one for each of `node_configs`.

    A subclass says how the nodes answer."""

    def __init__(self, node_configs: Sequence[UserConfig]) -> None:
        self._count = len(node_configs)
        self._run = Run.create_empty(1)
        self._replies: dict[str, Message] = {}
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 0

    def answer(self, messages: Sequence[Message], timeout: float | None) -> Iterator[Message]:
        """The nodes' replies; none from a node that does not answer within `timeout` seconds."""
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
        """A message to a node; Flower's deprecated way beside ``Message(…)``."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """The nodes' ids."""
        return range(1, self._count + 1)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Let the nodes answer; replies wait to be pulled."""
        sent = named(messages)
        self._replies |= {r.metadata.reply_to_message_id: r for r in self.answer(sent, None)}
        return [message.metadata.message_id for message in sent]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies to the messages of these ids."""
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """The replies that come within `timeout` seconds, each as it comes: nodes may not be asked
        before the caller waits for their replies."""
        return Replies(self.answer(named(messages), timeout))


class InProcessGrid(LocalGrid):
    """Calls `client_app` for each message, one after the other, a Context kept per node.

    `node_configs` holds one node configuration per node. A client that raises answers with an
    error reply, as in Flower's engines. Up to `cohort` clients train side by side, as one stack
    (`clients.cohort`). `pause` is called before each message."""

    def __init__(
        self,
        client_app: ClientApp,
        run_config: UserConfig,
        node_configs: Sequence[UserConfig],
        cohort: int = 1,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(node_configs)
        self.client_app, self.cohort, self._pause = client_app, Cohort(cohort), pause
        same = dict(run_config)  # hundreds of keys, once for thousands of clients
        self.contexts = {
            i: Context(
                run_id=1,
                node_id=i,
                node_config=dict(node_config),
                state=RecordDict(),
                run_config=same,
            )
            for i, node_config in enumerate(node_configs, start=1)
        }

    @classmethod
    def simulation(
        cls, client_app: ClientApp, run_config: UserConfig, num_nodes: int, *options: Any
    ) -> Self:
        """A grid whose nodes are configured as Flower's simulation engine does."""
        return cls(client_app, run_config, simulated(num_nodes), *options)

    def get_node_ids(self) -> Iterable[int]:
        """The ids of the nodes that are there."""
        return list(self.contexts)

    def answer(self, messages: Sequence[Message], timeout: float | None) -> Iterator[Message]:
        """Nodes answer at once, so `timeout` is never reached."""
        training = [m.metadata.message_type.startswith("train") for m in messages]
        if self.cohort.size > 1 and all(training):
            yield from self.cohort.run([partial(self._deliver, message) for message in messages])
        else:
            yield from map(self._deliver, messages)

    def _deliver(self, message: Message) -> Message:
        self._pause()
        context = self.contexts.get(message.metadata.dst_node_id)
        if context is None:
            return refusal(message, "there is no such node", ErrorCode.NODE_UNAVAILABLE)
        reply = respond(self.client_app, message, context)
        reply.metadata.__dict__["_message_id"] = str(uuid4())
        return reply


def simulated(num_nodes: int) -> list[UserConfig]:
    """The configurations that Flower's simulation engine gives its nodes, which also say that
    they are simulated."""
    return [simulated_node(i, num_nodes) for i in range(num_nodes)]


def simulated_node(number: int, of: int) -> UserConfig:
    """The configuration of one of them."""
    return {"partition-id": number, "num-partitions": of, "simulated": True}


def named(messages: Iterable[Message]) -> list[Message]:
    """The messages, each with an id."""
    found = list(messages)
    for message in found:
        message.metadata.__dict__["_message_id"] = str(uuid4())
    return found


def alike(message: Message, records: Mapping[str, Any]) -> Message:
    """A message of the same id, type and node that holds `records`."""
    own = copy(message)
    own.content = RecordDict(dict(records))
    return own


def respond(client_app: ClientApp, message: Message, context: Context) -> Message:
    """The ClientApp's reply; an error reply where it raises, as in Flower's engines."""
    # Records of its own for each node: a strategy may put one RecordDict into many messages.
    own = alike(message, {key: record.copy() for key, record in message.content.items()})
    try:
        return client_app(own, context)
    except (Exception, SystemExit) as error:  # a client's failure must not end the others' run
        return refusal(message, f"{type(error)}:<'{error}'>")


def refusal(
    message: Message, reason: str, code: int = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
) -> Message:
    """An error reply to the message."""
    return Message(Error(code, reason), reply_to=message)
