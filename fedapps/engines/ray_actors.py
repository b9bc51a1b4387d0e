"""Ray actors that answer for clients: each is a process with one core, or a share of a GPU.

An actor keeps no client's state. States lie in Ray's object store, on the driver's machine, so any
actor can answer for any client, and an actor or a machine that is lost costs no state."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import ray
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from fedapps.common.threads import use_one_thread
from fedapps.engines.in_process_grid import Contexts, UserConfig, respond, with_id, with_records
from fedapps.engines.memory_files import MemoryFiles, keep_freed_memory

AHEAD = 2  # batches that are sent to an actor, so that it never waits for the driver


class SharedRecords:
    """Array records that several of the messages hold; each is put into Ray's store once."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._uses: Counter[int] = Counter()  # messages that hold a record, by its id()
        for message in messages:
            self._uses.update(id(record) for record in message.content.values())
        self._stored: dict[int, ray.ObjectRef] = {}

    def split(self, message: Message) -> tuple[Message, dict[str, ray.ObjectRef]]:
        """The message without its shared records, and references to these."""
        rest: dict[str, Any] = {}
        refs: dict[str, ray.ObjectRef] = {}
        for key, record in message.content.items():
            is_shared = isinstance(record, ArrayRecord) and self._uses[id(record)] > 1
            if not is_shared:
                rest[key] = record
                continue
            if id(record) not in self._stored:
                self._stored[id(record)] = ray.put(record)
            refs[key] = self._stored[id(record)]
        return with_records(message, rest), refs


class Refs(NamedTuple):
    """References to a message's shared records, and to the client's state if it has one."""

    shared: dict[str, ray.ObjectRef]
    state: ray.ObjectRef | None


@dataclass
class Answer:
    """A reply, the seconds that it took, and whether the client's state changed."""

    reply: Message
    seconds: float
    changed: bool


class Actor:
    """One process with the ClientApp and the data that it loads."""

    def __init__(self, load: Callable[[], ClientApp], paths: Sequence[str]) -> None:
        keep_freed_memory()
        use_one_thread()
        self.client_app = load()
        self.files = MemoryFiles(paths)
        self.files.unlink()
        self.records: dict[ray.ObjectRef, ArrayRecord] = {}  # shared ones of this exchange

    def begin(self, run_config: UserConfig, node_configs: Sequence[UserConfig]) -> tuple[str, int]:
        """Begin a run. Returns the machine's id in Ray, and the number of files in memory."""
        self.contexts = Contexts(run_config, node_configs)
        return machine_id(), len(self.files)

    def answer(self, messages: list[Message] | None, refs: list[Refs], file: int) -> list[Any]:
        """The answers, and after them each client's state, None if it has not changed.

        `messages` and the answers are None if they are in the file of that number."""
        self._get_shared(refs)
        answers: list[Answer] = []
        states: list[RecordDict | None] = []
        for message, (shared, state) in zip(self.files.read(file, messages), refs, strict=True):
            started = time.perf_counter()
            former_records = {} if state is None else dict(ray.get(state))
            context = self.contexts.passing(message.metadata.dst_node_id)
            context.state = RecordDict(former_records)
            for key, ref in shared.items():
                message.content[key] = self.records[ref]
            reply = with_id(respond(self.client_app, message, context))
            # A client that changes its state puts a new record into it.
            changed = any(
                former_records.get(key) is not record for key, record in context.state.items()
            )
            states.append(context.state if changed else None)
            answers.append(Answer(reply, time.perf_counter() - started, changed))
        return [self.files.write(file, answers), *states]

    def _get_shared(self, refs: Sequence[Refs]) -> None:
        """Get the shared records of these messages from Ray's store, unless the last batch had
        them; forget all others."""
        records: dict[ray.ObjectRef, ArrayRecord] = {}
        for shared, _ in refs:
            for ref in shared.values():
                if ref not in records:
                    records[ref] = self.records.get(ref) or ray.get(ref)
        self.records = records


class Actors:
    """`count` actors, or as many as Ray has cores and shares `gpus` of a GPU; `load` makes the
    ClientApp in an actor. One run after the other uses them.

    Ray must have been started. A context manager, which ends the actors. Raises ValueError if no
    actor fits."""

    def __init__(self, load: Callable[[], ClientApp], count: int = 0, gpus: float = 0.0) -> None:
        resources = ray.cluster_resources()
        fitting = int(resources.get("CPU", 1))
        if gpus:
            fitting = min(fitting, int(resources.get("GPU", 0) / gpus))
        if fitting < 1:
            raise ValueError(
                f"a share of {gpus} of a GPU for each client, but Ray sees "
                f"{resources.get('GPU', 0)}"
            )
        remote: Any = ray.remote
        self._start = partial(remote(num_cpus=1, num_gpus=gpus)(Actor).remote, load)
        self.files: dict[Any, MemoryFiles] = {}  # by actor; one for each batch that it may have
        self.all: list[Any] = [self._make() for _ in range(count or fitting)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for actor in self.all:
            self._end(actor)

    def replace(self, dead: Any) -> Any:
        """A new actor in place of a dead one."""
        self._end(dead)
        index = self.all.index(dead)
        self.all[index] = self._make()
        return self.all[index]

    def _make(self) -> Any:
        files = MemoryFiles.create(AHEAD)
        actor = self._start(files.paths)
        self.files[actor] = files
        return actor

    def _end(self, actor: Any) -> None:
        ray.kill(actor)
        self.files.pop(actor).close()


def machine_id() -> str:
    """The id of this process's machine in Ray."""
    return str(ray.get_runtime_context().get_node_id())
