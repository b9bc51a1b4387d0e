"""InProcessGrid: the same strategies and ClientApps in one process, without Ray or a SuperLink.

The one file that touches Flower's internals: ``TaskIdentity`` and message ids are set as
Flower's own in-memory grid does, which is why pyproject pins flwr to one minor release."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Self
from uuid import uuid4

from flwr.app import Context, Message, RecordDict
from flwr.app.error import Error
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

UserConfig = Mapping[str, str | int | float | bool]


class InProcessGrid(Grid):
    """Calls `client_app` for each message, one after the other, a Context kept per node.

    `node_configs` holds one node configuration per node; node ids are 1, 2, … A client that
    raises answers with an error reply, as in Flower's engines."""

    def __init__(
        self, client_app: ClientApp, run_config: UserConfig, node_configs: Sequence[UserConfig]
    ) -> None:
        self.client_app = client_app
        self.contexts = {
            i: Context(
                run_id=1,
                node_id=i,
                node_config=dict(node_config),
                state=RecordDict(),
                run_config=dict(run_config),
            )
            for i, node_config in enumerate(node_configs, start=1)
        }
        self._run = Run.create_empty(1)
        self._replies: dict[str, Message] = {}
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 0

    @classmethod
    def simulation(cls, client_app: ClientApp, run_config: UserConfig, num_nodes: int) -> Self:
        """A grid whose nodes are configured as Flower's simulation engine does, and say that they
        are simulated."""
        nodes: list[UserConfig] = [
            {"partition-id": i, "num-partitions": num_nodes, "simulated": True}
            for i in range(num_nodes)
        ]
        return cls(client_app, run_config, nodes)

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
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Let the nodes answer; replies wait to be pulled."""
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid4())
            ids.append(message.metadata.message_id)
            self._replies[ids[-1]] = self._deliver(message)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies to the messages of these ids."""
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push, then pull. Nodes answer at once, so `timeout` is never reached."""
        return self.pull_messages(self.push_messages(messages))

    def _deliver(self, message: Message) -> Message:
        context = self.contexts.get(message.metadata.dst_node_id)
        if context is None:
            error = Error(ErrorCode.NODE_UNAVAILABLE, "there is no such node")
            return Message(error, reply_to=message)
        # Records of its own for each node: a strategy may put one RecordDict into many messages.
        content = RecordDict({key: record.copy() for key, record in message.content.items()})
        own = Message(content, message.metadata.dst_node_id, message.metadata.message_type)
        own.metadata.__dict__["_message_id"] = message.metadata.message_id
        try:
            reply = self.client_app(own, context)
        except Exception as error:  # a client's failure must not end the others' run
            reason = f"{type(error)}:<'{error}'>"
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
        reply.metadata.__dict__["_message_id"] = str(uuid4())
        return reply
