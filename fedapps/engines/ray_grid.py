"""RayGrid: the same strategies and ClientApps over Ray actors, one core or share of a GPU each.

Arrays that several messages share go into Ray's object store once an exchange. Work goes to idle
actors in batches that become shorter, the longest first, so that all end together. A client stays
with the actor that holds its state, unless another one is idle; a copy of every state lies in the
object store, so that an actor may take a client over or forget whom it has not served for long, and
a new one replace an actor that died, also with its machine: copies of states lie on the driver's.
What else the driver and the actors of its machine tell each other goes by mailboxes."""

import ctypes
import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, count, product
from typing import Any, NamedTuple, Self

import ray
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from fedapps.engines.grid import InProcessGrid, LocalGrid, UserConfig, alike, refusal
from fedapps.engines.mailboxes import Mailboxes

AHEAD = 2  # batches that wait at an actor, so that it is never idle while the driver thinks
PARTS = 2  # a batch is a part of an actor's share of the rest: the last ones are of one message
HELD = 128 << 20  # bytes of clients' states that an actor keeps; the store has them all
CHECK_SECONDS = 1.0  # between looks at Ray itself; it ends a process seconds after its own death
TRIES = 2  # a message that was at an actor when it died is asked once more, alone
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
DEAD = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError)  # killed, be it by Ray
Load = Callable[[], ClientApp]


@dataclass(eq=False)
class Task:
    """A message, whom it asks, and how long the answer may take."""

    message: Message
    seconds: float

    def __post_init__(self) -> None:
        self.node = self.message.metadata.dst_node_id


class Shared:
    """Array records that several of the messages hold: each is put into Ray's store once."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._uses = Counter(id(record) for m in messages for record in m.content.values())
        self._stored: dict[int, ray.ObjectRef] = {}

    def parted(self, message: Message) -> tuple[Message, dict[str, ray.ObjectRef]]:
        """The message with its own records alone, and where the shared ones lie."""
        own, refs = {}, {}
        for key, record in message.content.items():
            if isinstance(record, ArrayRecord) and self._uses[id(record)] > 1:
                if id(record) not in self._stored:
                    self._stored[id(record)] = ray.put(record)
                refs[key] = self._stored[id(record)]
            else:
                own[key] = record
        return alike(message, own), refs


@dataclass
class Answer:
    """A reply, how long it took, the bytes of the client's state since, if it has one, and whether
    that is a new one."""

    reply: Message
    seconds: float
    state: int | None
    changed: bool


class Refs(NamedTuple):
    """Where in Ray's store a message's shared records lie, and its client's state, if the actor
    that gets it does not hold that."""

    shared: dict[str, ray.ObjectRef]
    state: ray.ObjectRef | None


class Batch(NamedTuple):
    """Tasks that an actor has, its mailbox for their messages and answers, and the states that
    they leave."""

    actor: Any
    tasks: list[Task]
    box: int
    states: ray.ObjectRef


class Actor:
    """One process: the ClientApp, the data that it loads, and the contexts of its clients."""

    def __init__(self, load: Load, mailboxes: Sequence[str]) -> None:
        keep_freed_memory()
        self.client_app = load()
        self.mailboxes = Mailboxes(mailboxes)
        self.mailboxes.hide()
        self.records: dict[ray.ObjectRef, ArrayRecord] = {}  # shared ones of this exchange

    def begin(self, run_config: UserConfig, node_configs: Sequence[UserConfig]) -> tuple[str, int]:
        """A new run, in which no client has a state. Returns the machine's id in Ray, and how many
        mailboxes there are."""
        self.grid = InProcessGrid(self.client_app, run_config, node_configs)
        return _machine(), len(self.mailboxes)

    def answer(
        self, messages: list[Message] | None, refs: list[Refs], box: int, forgotten: list[int]
    ) -> tuple[list[Answer] | None, dict[int, RecordDict]]:
        """Answers, and the states of the clients that have changed theirs; messages and answers
        are None where they lie in the mailbox. The states of `forgotten` are not needed here."""
        for node in forgotten:
            self.grid.contexts[node].state = RecordDict()
        needed = {ref for one in refs for ref in one.shared.values()}
        self.records = {ref: self.records.get(ref) or ray.get(ref) for ref in needed}
        answers, states = [], {}
        for message, own in zip(self.mailboxes.take(box, messages), refs, strict=True):
            started = time.perf_counter()
            node = message.metadata.dst_node_id
            context = self.grid.contexts[node]
            if own.state is not None:
                context.state = ray.get(own.state)[node]
            for key, ref in own.shared.items():
                message.content[key] = self.records[ref]
            before = dict(context.state)
            (reply,) = self.grid.answer([message], None)
            changed = any(before.get(k) is not record for k, record in context.state.items())
            if changed:
                states[node] = context.state
            seconds = time.perf_counter() - started
            answers.append(Answer(reply, seconds, _size(context.state), changed))
        return self.mailboxes.put(box, answers), states


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
        self._start = partial(remote(num_cpus=1, num_gpus=gpus)(Actor).remote, load)
        self.mailboxes: dict[Any, Mailboxes] = {}  # of an actor, for as many batches as it may have
        self.all: list[Any] = [self._make() for _ in range(count or fitting)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for actor in self.all:
            self._end(actor)

    def replace(self, dead: Any) -> Any:
        """A new actor in the place of a dead one."""
        self._end(dead)
        at = self.all.index(dead)
        self.all[at] = self._make()
        return self.all[at]

    def _make(self) -> Any:
        boxes = Mailboxes.made(AHEAD)
        actor = self._start(boxes.paths)
        self.mailboxes[actor] = boxes
        return actor

    def _end(self, actor: Any) -> None:
        ray.kill(actor)
        self.mailboxes.pop(actor).close()


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
        self._held: dict[Any, dict[int, int]] = {}  # bytes by node at an actor, the last used last
        self._states: dict[int, ray.ObjectRef] = {}  # {node: state, …} by node
        self._seconds: dict[tuple[int, str], float] = {}  # that a node's last answer took
        self._left: dict[ray.ObjectRef, Batch] = {}  # whose answers a caller has not waited for
        self._late: set[int] = set()  # nodes that were waited for in vain, and did not answer since

    def answer(self, messages: Sequence[Message], timeout: float | None) -> Iterator[Message]:
        """Replies as they come; an actor that has not answered in time is replaced.

        Raises RuntimeError if actors do not start, or Ray has died."""
        running: dict[ray.ObjectRef, Batch] = {}
        self._left = {ref: b for ref, b in self._left.items() if not ray.wait([ref], timeout=0)[0]}
        try:
            yield from self._answers(messages, timeout, running)
        except (ray.exceptions.RayError, OSError):
            self._check()
            raise
        finally:
            self._left |= running

    def _answers(
        self,
        messages: Sequence[Message],
        timeout: float | None,
        running: dict[ray.ObjectRef, Batch],
    ) -> Iterator[Message]:
        deadline = time.monotonic() + (1e9 if timeout is None else timeout)
        tasks = map(Task, messages, self._expected(messages))
        queue = sorted(tasks, key=lambda task: task.seconds, reverse=True)
        shared = Shared(messages)
        parts, ahead = float(PARTS * len(self._actors.all)), AHEAD
        tries: Counter[str] = Counter()
        while queue or running:
            self._pause()
            busy: Counter[int] = Counter()
            for batch in running.values():
                busy[id(batch.actor)] += self._weight(batch.tasks)
            for least, actor in product(range(ahead), self._machines):
                if queue and busy[id(actor)] == least:
                    chosen = self._choose(actor, queue, sum(t.seconds for t in queue) / parts)
                    at_once = [*running.values(), *self._left.values()]
                    there = [batch for batch in at_once if batch.actor is actor]
                    answers, batch = self._send(actor, chosen, there, shared)
                    running[answers] = batch
                    busy[id(actor)] += self._weight(chosen)
            left = max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait([*running, *self._starting], timeout=min(left, CHECK_SECONDS))
            if not ready and left > CHECK_SECONDS:
                self._check()
                continue
            if ready and ready[0] in self._starting:
                self._begin(ready[0])
                continue
            if not ready:
                first = {id(batch.actor): batch for batch in [*running.values()][::-1]}
                for batch in first.values():
                    self._replace(batch.actor)
                    self._suspect(batch.tasks, float(timeout or 0))
                break
            try:
                done = ray.get(ready[0])
            except (*DEAD, ray.exceptions.ObjectLostError):
                self._check()
                dead = running[ready[0]].actor
                lost = [ref for ref, batch in running.items() if batch.actor is dead]
                self._replace(dead)
                for task in [task for ref in lost for task in running.pop(ref).tasks]:
                    tries[task.message.metadata.message_id] += 1
                    if tries[task.message.metadata.message_id] < TRIES:
                        queue.append(task)
                    else:
                        reason = "the process that it ran in died, twice"
                        yield refusal(task.message, reason, ErrorCode.CLIENT_APP_CRASHED)
                parts, ahead = math.inf, 1  # so that who is at fault takes no other along
            else:
                batch = running.pop(ready[0])
                done = self._actors.mailboxes[batch.actor].take(batch.box, done)
                self._remember(batch, done)
                yield from (one.reply for one in done)

    def _send(
        self, actor: Any, tasks: list[Task], there: list[Batch], shared: Shared
    ) -> tuple[ray.ObjectRef, Batch]:
        """Let the actor answer after the batches that are there; returns where its answers will be,
        and the batch."""
        messages, refs = [], []
        for task in tasks:
            message, records = shared.parted(task.message)
            held = self._home.get(task.node) is actor
            messages.append(message)
            refs.append(Refs(records, None if held else self._states.get(task.node)))
        used = {batch.box for batch in there}
        box = next(number for number in count() if number not in used)
        nodes = {task.node for task in chain(tasks, *(batch.tasks for batch in there))}
        forgotten = self._surplus(actor, nodes)
        left = self._actors.mailboxes[actor].put(box, messages)
        answers, states = actor.answer.options(num_returns=2).remote(left, refs, box, forgotten)
        return answers, Batch(actor, tasks, box, states)

    def _surplus(self, actor: Any, needed: set[int]) -> list[int]:
        """Nodes, none of the `needed`, whose states the actor is to forget, since it holds more
        than HELD bytes of them: those that live elsewhere now, and the longest unused."""
        held = self._held.get(actor, {})
        more, found = sum(held.values()) - HELD, []
        for node in [*held] if more > 0 else ():
            away = self._home.get(node) is not actor
            if node not in needed and (away or more > 0):
                more -= held.pop(node)
                found.append(node)
                if not away:
                    del self._home[node]
        return found

    def _choose(self, actor: Any, queue: list[Task], seconds: float) -> list[Task]:
        """Take a batch that fits `seconds`, or of one, out of the queue: the actor's own clients
        and free ones, else others'."""
        own = [t for t in queue if self._home.get(t.node, actor) is actor] or queue
        size = bisect_right(list(accumulate(task.seconds for task in own)), seconds)
        batch = own[: max(1, size)]
        for task in batch:
            queue.remove(task)
        return batch

    def _weight(self, batch: list[Task]) -> int:
        """For how many a batch counts: nothing waits behind one that may never come."""
        return AHEAD if any(task.node in self._late for task in batch) else 1

    def _suspect(self, batch: list[Task], seconds: float) -> None:
        """One of the batch did not answer in time: each goes first and alone until it does."""
        self._late |= {task.node for task in batch}
        kinds = ((task.node, task.message.metadata.message_type) for task in batch)
        self._seconds |= dict.fromkeys(kinds, seconds)

    def _remember(self, batch: Batch, answers: list[Answer]) -> None:
        """Where the batch's clients live now, and how long their answers took."""
        states = batch.states
        if self._machines[batch.actor] != _machine():
            states = ray.put(ray.get(states))
        for task, one in zip(batch.tasks, answers, strict=True):
            kind = task.message.metadata.message_type
            self._seconds[task.node, kind] = one.seconds
            self._late.discard(task.node)
            if one.state is not None:
                self._home[task.node] = batch.actor
                held = self._held.setdefault(batch.actor, {})
                held.pop(task.node, None)
                held[task.node] = one.state
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
            self._machines[actor], boxes = ray.get(started)
            self._failed_starts = 0
            if not boxes:  # it is on another machine
                self._actors.mailboxes[actor].close()
        except DEAD as error:
            self._failed_starts += 1
            if self._failed_starts > TRIES * len(self._actors.all):
                reason = str(error).strip().splitlines()[-1]
                raise RuntimeError(f"Ray's actors do not start: {reason}") from error
            self._replace(actor)

    def _replace(self, dead: Any) -> None:
        """A new actor for a dead one; its clients' states come from the store."""
        self._machines.pop(dead, None)
        self._held.pop(dead, None)
        new = self._actors.replace(dead)
        self._starting[new.begin.remote(*self._run_of)] = new
        self._home = {node: actor for node, actor in self._home.items() if actor is not dead}


def _size(state: RecordDict) -> int | None:
    """The bytes of a client's state; None if it has none."""
    return sum(one.count_bytes() for one in state.array_records.values()) if state else None


def keep_freed_memory() -> None:
    """Let glibc keep what tensors of up to 32 MB free for the next ones. Given back to the system
    and asked for again, it has to be zeroed page by page: up to a twelfth of a round."""
    with suppress(OSError, AttributeError, TypeError):  # no glibc
        mallopt = ctypes.CDLL(None).mallopt
        for option, size in ((M_MMAP_THRESHOLD, 32 << 20), (M_TRIM_THRESHOLD, 256 << 20)):
            mallopt(option, size)


def _machine() -> str:
    """The id that Ray gives to the machine of this process."""
    return str(ray.get_runtime_context().get_node_id())
