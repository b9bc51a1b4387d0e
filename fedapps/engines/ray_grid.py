"""RayGrid: the same strategies and ClientApps over Ray actors, one core or share of a GPU each.

Arrays that several messages share go into Ray's object store once an exchange. Work goes to idle
actors in batches that become shorter, the longest first, so that all end together. A client stays
with the actor that holds its state, unless another one is idle; a copy of every state lies in the
object store, so that an actor may take a client over, and a new one replace an actor that died,
also with its machine: copies of states lie on the driver's."""

import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any, Self

import ray
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from fedapps.engines.grid import InProcessGrid, LocalGrid, UserConfig, alike, refusal

AHEAD = 2  # batches that wait at an actor, so that it is never idle while the driver thinks
PARTS = 2  # a batch is a part of an actor's share of the rest: the last ones are of one message
CHECK_SECONDS = 1.0  # between looks at Ray itself; it ends a process seconds after its own death
TRIES = 2  # a message that was at an actor when it died is asked once more, alone
DEAD = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError)  # killed, be it by Ray
Load = Callable[[], ClientApp]


@dataclass(eq=False)
class Task:
    """A message without the arrays that it shares with others, where those lie, and how long the
    answer may take."""

    message: Message
    shared: dict[str, ray.ObjectRef]
    seconds: float
    state: ray.ObjectRef | None = None  # of its client, where the actor does not hold it

    @property
    def node(self) -> int:
        """Whom it asks."""
        return self.message.metadata.dst_node_id


@dataclass
class Answer:
    """A reply, how long it took, whether the client has a state since, and whether a new one."""

    reply: Message
    seconds: float
    stateful: bool
    changed: bool


class Actor:
    """One process: the ClientApp, the data that it loads, and the contexts of its clients."""

    def __init__(self, load: Load) -> None:
        self.client_app = load()
        self.records: dict[ray.ObjectRef, ArrayRecord] = {}  # shared ones of this exchange

    def begin(self, run_config: UserConfig, node_configs: Sequence[UserConfig]) -> str:
        """A new run, in which no client has a state. Returns the machine's id in Ray."""
        self.grid = InProcessGrid(self.client_app, run_config, node_configs)
        return _machine()

    def answer(self, batch: list[Task]) -> tuple[list[Answer], dict[int, RecordDict]]:
        """Answers, and the states of the clients that have changed theirs."""
        needed = {ref for task in batch for ref in task.shared.values()}
        self.records = {ref: self.records.get(ref) or ray.get(ref) for ref in needed}
        answers, states = [], {}
        for task in batch:
            started = time.perf_counter()
            context = self.grid.contexts[task.node]
            if task.state is not None:
                context.state = ray.get(task.state)[task.node]
            for key, ref in task.shared.items():
                task.message.content[key] = self.records[ref]
            before = dict(context.state)
            (reply,) = self.grid.answer([task.message], None)
            changed = any(before.get(k) is not record for k, record in context.state.items())
            if changed:
                states[task.node] = context.state
            seconds = time.perf_counter() - started
            answers.append(Answer(reply, seconds, bool(context.state), changed))
        return answers, states


class Actors:
    """`count` actors (0: as many as Ray has cores and shares `gpus` of a GPU), started once and
    used by one run after the other. `load` makes the ClientApp in an actor.

    Ray must have been started; use as a context, which ends the actors. Raises ValueError if not
    even one of them fits."""

    def __init__(self, load: Load, count: int = 0, gpus: float = 0.0) -> None:
        there = ray.cluster_resources()
        fitting = int(there.get("CPU", 1))
        if gpus:
            fitting = min(fitting, int(there.get("GPU", 0) / gpus))
        if fitting < 1:
            raise ValueError(
                f"a share of {gpus} of a GPU for each client, but Ray sees {there.get('GPU', 0)}"
            )
        remote: Any = ray.remote
        self._make = lambda: remote(num_cpus=1, num_gpus=gpus)(Actor).remote(load)
        self.all: list[Any] = [self._make() for _ in range(count or fitting)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for actor in self.all:
            ray.kill(actor)

    def replace(self, dead: Any) -> Any:
        """A new actor in the place of a dead one."""
        ray.kill(dead)
        at = self.all.index(dead)
        self.all[at] = self._make()
        return self.all[at]


class RayGrid(LocalGrid):
    """A grid over `actors`, its nodes' contexts dealt to them. `check` raises RuntimeError when Ray
    itself has died, and is asked before anything is made of an actor's death. `pause` is called
    whenever replies are about to be waited for."""

    def __init__(
        self,
        actors: Actors,
        run_config: UserConfig,
        node_configs: Sequence[UserConfig],
        check: Callable[[], None] = lambda: None,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(node_configs)
        self._check, self._pause = check, pause
        self._actors = actors
        self._run_of = (ray.put(dict(run_config)), ray.put(list(node_configs)))
        self._starting = {actor.begin.remote(*self._run_of): actor for actor in actors.all}
        self._failed_starts = 0  # since one began
        self._machines: dict[Any, str] = {}  # of the actors that have begun
        self._home: dict[int, Any] = {}  # the actor that holds a node's state
        self._states: dict[int, ray.ObjectRef] = {}  # {node: state, …} by node
        self._seconds: dict[tuple[int, str], float] = {}  # that a node's last answer took
        self._late: set[int] = set()  # nodes that were waited for in vain, and did not answer since

    def answer(self, messages: Sequence[Message], timeout: float | None) -> Iterator[Message]:
        """Replies as they come; an actor that has not answered in time is replaced.

        Raises RuntimeError if actors do not start, or Ray has died."""
        try:
            yield from self._answers(messages, timeout)
        except (ray.exceptions.RayError, OSError):
            self._check()
            raise

    def _answers(self, messages: Sequence[Message], timeout: float | None) -> Iterator[Message]:
        deadline = time.monotonic() + (1e9 if timeout is None else timeout)
        queue = sorted(self._tasks(messages), key=lambda task: task.seconds, reverse=True)
        parts, ahead = float(PARTS * len(self._actors.all)), AHEAD
        running: dict[ray.ObjectRef, tuple[Any, list[Task], ray.ObjectRef]] = {}
        tries: Counter[str] = Counter()
        while queue or running:
            self._pause()
            busy: Counter[int] = Counter()
            for actor, batch, _ in running.values():
                busy[id(actor)] += self._weight(batch)
            for least, actor in product(range(ahead), self._machines):
                if queue and busy[id(actor)] == least:
                    batch = self._choose(actor, queue, sum(t.seconds for t in queue) / parts)
                    answers, states = actor.answer.options(num_returns=2).remote(batch)
                    running[answers] = (actor, batch, states)
                    busy[id(actor)] += self._weight(batch)
            left = max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait([*running, *self._starting], timeout=min(left, CHECK_SECONDS))
            if not ready and left > CHECK_SECONDS:
                self._check()
                continue
            if ready and ready[0] in self._starting:
                self._begin(ready[0])
                continue
            if not ready:
                first = {id(actor): (actor, batch) for actor, batch, _ in [*running.values()][::-1]}
                for actor, batch in first.values():
                    self._replace(actor)
                    self._suspect(batch, float(timeout or 0))
                break
            try:
                done = ray.get(ready[0])
            except (*DEAD, ray.exceptions.ObjectLostError):
                self._check()
                dead = running[ready[0]][0]
                lost = [ref for ref, (actor, _, _) in running.items() if actor is dead]
                self._replace(dead)
                for task in [task for ref in lost for task in running.pop(ref)[1]]:
                    tries[task.message.metadata.message_id] += 1
                    if tries[task.message.metadata.message_id] < TRIES:
                        queue.append(task)
                    else:
                        yield refusal(task.message, "the process that it ran in died, twice")
                parts, ahead = math.inf, 1  # so that who is at fault takes no other along
            else:
                actor, batch, states = running.pop(ready[0])
                self._remember(actor, batch, done, states)
                yield from (one.reply for one in done)

    def _tasks(self, messages: Sequence[Message]) -> Iterable[Task]:
        """The messages, array records that several of them hold put into the store once."""
        uses = Counter(id(record) for m in messages for record in m.content.array_records.values())
        stored: dict[int, ray.ObjectRef] = {}
        for message, seconds in zip(messages, self._expected(messages), strict=True):
            shared = {k: r for k, r in message.content.array_records.items() if uses[id(r)] > 1}
            for record in shared.values():
                if id(record) not in stored:
                    stored[id(record)] = ray.put(record)
            own = {k: r for k, r in message.content.items() if k not in shared}
            refs = {k: stored[id(r)] for k, r in shared.items()}
            yield Task(alike(message, own), refs, seconds)

    def _choose(self, actor: Any, queue: list[Task], seconds: float) -> list[Task]:
        """Take a batch that fits `seconds`, or of one, out of the queue: the actor's own clients
        and free ones, else others'."""
        own = [t for t in queue if self._home.get(t.node, actor) is actor] or queue
        size = bisect_right(list(accumulate(task.seconds for task in own)), seconds)
        batch = own[: max(1, size)]
        for task in batch:
            queue.remove(task)
            if self._home.get(task.node) is not actor:
                task.state = self._states.get(task.node)
        return batch

    def _weight(self, batch: list[Task]) -> int:
        """For how many a batch counts: nothing waits behind one that may never come."""
        return AHEAD if any(task.node in self._late for task in batch) else 1

    def _suspect(self, batch: list[Task], seconds: float) -> None:
        """One of the batch did not answer in time: each goes first and alone until it does."""
        self._late |= {task.node for task in batch}
        kinds = ((task.node, task.message.metadata.message_type) for task in batch)
        self._seconds |= dict.fromkeys(kinds, seconds)

    def _remember(
        self, actor: Any, batch: list[Task], answers: list[Answer], states: ray.ObjectRef
    ) -> None:
        """Where the batch's clients live now, and how long their answers took."""
        if self._machines[actor] != _machine():
            states = ray.put(ray.get(states))
        for task, one in zip(batch, answers, strict=True):
            kind = task.message.metadata.message_type
            self._seconds[task.node, kind] = one.seconds
            self._late.discard(task.node)
            if one.stateful:
                self._home[task.node] = actor
            if one.changed:
                self._states[task.node] = states

    def _expected(self, messages: Sequence[Message]) -> list[float]:
        """Seconds that each answer may take: as long as the node's last one of its kind, or as
        long as the others' on average."""
        asked = [(m.metadata.dst_node_id, m.metadata.message_type) for m in messages]
        known = [self._seconds[one] for one in asked if one in self._seconds]
        typical = sum(known) / len(known) if known else 1.0
        return [self._seconds.get(one, typical) for one in asked]

    def _begin(self, started: ray.ObjectRef) -> None:
        """From now on an actor gets work; another one is tried if it has not started.

        One that finds no core to run on, its machine being gone, waits and holds nobody up."""
        actor = self._starting.pop(started)
        try:
            self._machines[actor] = ray.get(started)
            self._failed_starts = 0
        except DEAD as error:
            self._failed_starts += 1
            if self._failed_starts > TRIES * len(self._actors.all):
                reason = str(error).strip().splitlines()[-1]
                raise RuntimeError(f"Ray's actors do not start: {reason}") from error
            self._replace(actor)

    def _replace(self, dead: Any) -> None:
        """A new actor for a dead one; its clients' states come from the store."""
        self._machines.pop(dead, None)
        new = self._actors.replace(dead)
        self._starting[new.begin.remote(*self._run_of)] = new
        self._home = {node: actor for node, actor in self._home.items() if actor is not dead}


def _machine() -> str:
    """The id that Ray gives to the machine of this process."""
    return str(ray.get_runtime_context().get_node_id())
