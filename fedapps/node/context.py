"""What a node's context says: its client and method, whether it is simulated, and what the server
may know of its errors."""

import sys
from logging import ERROR

from flwr.app import Context, Message
from flwr.common.logger import log

from clients.core.privacy import settings_of
from clients.core.protocol import METHOD
from fedapps.common.errors import Refusal, described

SIMULATED = "simulated"  # key of a node's configuration: SIMULATION in that of a virtual client
DEBUG = "debug"  # the same: a virtual client's error is raised, and not sent as a reply
FLOWER_ACTORS = "flwr.simulation.ray_transport.ray_actor"  # their module, loaded in each of them


class SimulationMark(int):
    """The value of ``simulated`` in the configuration of a node that an engine of this package
    simulates. A SuperNode's configuration is text, from which no such object is read."""

    def __reduce__(self) -> str:
        """The object's name, so that a copy in another process is its SIMULATION again."""
        return "SIMULATION"


SIMULATION = SimulationMark(True)


def identity(context: Context) -> int:
    """The client's id: that of its partition, else that of its node."""
    return int(context.node_config.get("partition-id", context.node_id))


def method_of(message: Message, context: Context) -> str:
    """The method whose client answers: the message's ``method``, else the run's."""
    return str(settings_of(message).get(METHOD, context.run_config.get("method", "")))


def reason_of(error: BaseException, context: Context) -> str:
    """What the server may know of a client's error: under privacy no message and no code."""
    where = "see the node's log"
    if is_simulated(context):  # where all is in one program's hands
        where = "a run without it shows the text"
    return described(error, private=withholds_errors(context), where=where)


def withholds_errors(context: Context) -> bool:
    """Whether the run or the node has a privacy that the text of an error could break."""
    settings = {**context.run_config, **context.node_config}
    has_policy = any(key.startswith("dp-") for key in context.node_config)
    has_dp = settings.get("dp", "none") != "none"
    private_descriptors = any(
        value for key, value in settings.items() if key.endswith("descriptor-epsilon")
    )
    return has_policy or has_dp or private_descriptors


def log_error(text: str, error: BaseException, context: Context) -> None:
    """Write a client's whole error to the log of its node, and that the server gets no text of
    it, if it gets none."""
    if withholds_errors(context) and not isinstance(error, Refusal):
        text += "; under differential privacy the server gets its type and place, not its text"
    log(ERROR, "%s", text, exc_info=error)


def is_simulated(context: Context) -> bool:
    """Whether the client is virtual, so that its server is the same program.

    Only an engine can say so: this package's mark the node's configuration, Flower's answers in an
    actor of its own. A text in a node's configuration does not count, nor does a Ray that code on
    the node has started."""
    if context.node_config.get(SIMULATED) is SIMULATION:
        return True
    return _is_flower_actor()


def _is_flower_actor() -> bool:
    """Whether this process is an actor of Flower's simulation engine."""
    flower_actors = sys.modules.get(FLOWER_ACTORS)
    ray = sys.modules.get("ray")
    if flower_actors is None or ray is None or not ray.is_initialized():
        return False
    actors = ray._private.worker.global_worker.actors.values()  # none in a driver
    return any(isinstance(actor, flower_actors.VirtualClientEngineActor) for actor in actors)


def raises_errors(context: Context) -> bool:
    """Whether an error of the client is raised, for a person who debugs a simulation."""
    return bool(context.node_config.get(DEBUG)) and is_simulated(context)
