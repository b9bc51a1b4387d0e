"""RayGrid: the same strategies and ClientApps over Ray actors.

Actors get messages in batches. An exchange begins with the longest answers in large batches, and
ends with short answers in small ones: so all actors end at about the same time. An actor that dies
is replaced, and its messages are sent once more, one by one. Messages and answers of actors on the
driver's machine are exchanged by `memory_files`, other objects by Ray's object store."""

import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Any, NamedTuple

import ray
from flwr.app import Message
from flwr.common.constant import ErrorCode

from fedapps.engines.in_process_grid import LocalGrid, Pause, UserConfig, error_reply
from fedapps.engines.ray_actors import AHEAD, Actors, Answer, Refs, SharedRecords, machine_id

# A batch is this part of an actor's share of the remaining seconds. A message costs the driver
# 0.2 ms of CPU time in a batch, 1.2 ms alone; opening queries are answered three times as fast.
PARTS = 2
CHECK_SECONDS = 1.0  # between checks of Ray, which ends this process seconds after its own death
MAX_TRIES = 2  # of a message whose actor dies
DEAD = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError)


@dataclass(eq=False)
class Task:
    """A message and the seconds that its answer is expected to take."""

    message: Message
    seconds: float

    def __post_init__(self) -> None:
        self.node = self.message.metadata.dst_node_id


class Batch(NamedTuple):
    """Tasks that were sent to an actor, the number of the file in memory with its messages and
    answers, and a reference to each client's state after its task."""

    actor: Any
    tasks: list[Task]
    file: int
    states: list[ray.ObjectRef]


class Dispatch(NamedTuple):
    """How large the next batches are, and how many of them an actor gets ahead."""

    parts: float  # a batch has this part of the remaining seconds
    ahead: int


# After an actor's death: single messages, to isolate the client that crashes.
ONE_BY_ONE = Dispatch(parts=math.inf, ahead=1)


class RayGrid(LocalGrid):
    """A grid over `actors`. `check` raises RuntimeError if Ray itself has died; it is called
    before an actor's death is handled."""

    def __init__(
        self,
        actors: Actors,
        run_config: UserConfig,
        node_configs: Sequence[UserConfig],
        check: Callable[[], None] = lambda: None,
        pause: Pause = lambda: None,
    ) -> None:
        super().__init__(node_configs)
        self._actors = actors
        self._check = check
        self._pause = pause
        self._configs = (ray.put(dict(run_config)), ray.put(node_configs))
        self._starting = {actor.begin.remote(*self._configs): actor for actor in actors.all}
        self._failed_starts = 0  # since the last successful one
        self._machines: dict[Any, str] = {}  # by actor, of those that have begun the run
        self._states: dict[int, ray.ObjectRef] = {}  # by node
        # Seconds of a node's last answer to a type of message.
        self._seconds: dict[tuple[int, str], float] = {}
        # Batches whose answers no caller waits for any more, as it stopped or timed out.
        self._abandoned: dict[ray.ObjectRef, Batch] = {}
        self._late: set[int] = set()  # nodes that missed a timeout and have not answered since

    def answer(self, messages: Sequence[Message], timeout: float | None) -> Iterator[Message]:
        """Replies as they arrive. An actor that has not answered in time is replaced.

        Raises RuntimeError if actors do not start, or Ray has died."""
        running: dict[ray.ObjectRef, Batch] = {}
        self._forget_answered()
        try:
            yield from self._answers(messages, timeout, running)
        except (ray.exceptions.RayError, OSError):
            self._check()
            raise
        finally:
            self._abandoned |= running

    def _forget_answered(self) -> None:
        """Forget the abandoned batches that are answered by now: their files are free again."""
        for ref in list(self._abandoned):
            ready, _ = ray.wait([ref], timeout=0)
            if ready:
                del self._abandoned[ref]

    def _answers(
        self,
        messages: Sequence[Message],
        timeout: float | None,
        running: dict[ray.ObjectRef, Batch],
    ) -> Iterator[Message]:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        tasks = [Task(*pair) for pair in zip(messages, self._expected(messages), strict=True)]
        queue = sorted(tasks, key=lambda task: task.seconds, reverse=True)
        shared = SharedRecords(messages)
        tries = Counter[str]()  # by message id
        dispatch = Dispatch(parts=PARTS * len(self._actors.all), ahead=AHEAD)
        while queue or running:
            self._pause()
            self._send_batches(queue, running, shared, dispatch)
            left = max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait([*running, *self._starting], timeout=min(left, CHECK_SECONDS))
            if not ready:
                if left <= CHECK_SECONDS:
                    self._replace_late(running, float(timeout or 0))
                    return
                self._check()
                continue
            if ready[0] in self._starting:
                self._begin(ready[0])
                continue
            answers = self._received(ready[0], running)
            if answers is not None:
                for answer in answers:
                    yield answer.reply
                continue
            for task in self._replace_dead(ready[0], running):
                message_id = task.message.metadata.message_id
                tries[message_id] += 1
                if tries[message_id] < MAX_TRIES:
                    queue.append(task)
                else:
                    reason = "the process that it ran in died, twice"
                    yield error_reply(task.message, reason, ErrorCode.CLIENT_APP_CRASHED)
            dispatch = ONE_BY_ONE

    def _send_batches(
        self,
        queue: list[Task],
        running: dict[ray.ObjectRef, Batch],
        shared: SharedRecords,
        dispatch: Dispatch,
    ) -> None:
        """Give actors with less than `ahead` batches new ones from the queue, idle actors first."""
        load: Counter[int] = Counter()
        for batch in running.values():
            load[id(batch.actor)] += self._weight(batch.tasks)
        for batches in range(dispatch.ahead):
            for actor in self._machines:
                if not queue or load[id(actor)] != batches:
                    continue
                tasks = _take_batch(queue, dispatch.parts)
                answers, batch = self._send(actor, tasks, running, shared)
                running[answers] = batch
                load[id(actor)] += self._weight(tasks)

    def _send(
        self,
        actor: Any,
        tasks: list[Task],
        running: dict[ray.ObjectRef, Batch],
        shared: SharedRecords,
    ) -> tuple[ray.ObjectRef, Batch]:
        """Send a batch to the actor; returns a reference to its answers, and the batch."""
        messages: list[Message] = []
        refs: list[Refs] = []
        for task in tasks:
            message, records = shared.split(task.message)
            messages.append(message)
            refs.append(Refs(records, self._states.get(task.node)))
        # The first file of the actor that no batch uses.
        unanswered = [*running.values(), *self._abandoned.values()]
        used = {batch.file for batch in unanswered if batch.actor is actor}
        file = next(number for number in count() if number not in used)
        returned = self._actors.files[actor].write(file, messages)
        call = actor.answer.options(num_returns=1 + len(tasks))
        answers, *states = call.remote(returned, refs, file)
        return answers, Batch(actor, tasks, file, states)

    def _received(
        self, ref: ray.ObjectRef, running: dict[ray.ObjectRef, Batch]
    ) -> list[Answer] | None:
        """The answers of a batch, whose states and times are noted; None if its actor has died."""
        try:
            returned = ray.get(ref)
        except (*DEAD, ray.exceptions.ObjectLostError):
            return None
        batch = running.pop(ref)
        answers: list[Answer] = self._actors.files[batch.actor].read(batch.file, returned)
        local = self._machines[batch.actor] == machine_id()
        for task, answer, state in zip(batch.tasks, answers, batch.states, strict=True):
            self._seconds[task.node, task.message.metadata.message_type] = answer.seconds
            self._late.discard(task.node)
            if answer.changed:
                # Of a state on another machine, a copy on this one outlives that machine.
                self._states[task.node] = state if local else ray.put(ray.get(state))
        return answers

    def _expected(self, messages: Sequence[Message]) -> list[float]:
        """The seconds of each answer: those of the node's last one of its kind, or their mean."""
        last_seconds: list[float | None] = []
        for message in messages:
            key = (message.metadata.dst_node_id, message.metadata.message_type)
            last_seconds.append(self._seconds.get(key))
        known = [seconds for seconds in last_seconds if seconds is not None]
        mean = 1.0
        if known:
            mean = sum(known) / len(known)
        return [mean if seconds is None else seconds for seconds in last_seconds]

    def _weight(self, tasks: list[Task]) -> int:
        """As how many batches the tasks count. A late node's batch fills its actor, so that nothing
        waits behind an answer that may never come."""
        late = any(task.node in self._late for task in tasks)
        return AHEAD if late else 1

    def _replace_late(self, running: dict[ray.ObjectRef, Batch], timeout: float) -> None:
        """Replace the actors that have not answered in time. The nodes of the batches at which they
        worked are asked first next time, and alone, until they answer."""
        current: dict[int, Batch] = {}  # by actor: its first batch, as actors work in order
        for batch in running.values():
            current.setdefault(id(batch.actor), batch)
        for batch in current.values():
            self._replace(batch.actor)
            for task in batch.tasks:
                self._late.add(task.node)
                self._seconds[task.node, task.message.metadata.message_type] = timeout

    def _replace_dead(self, ref: ray.ObjectRef, running: dict[ray.ObjectRef, Batch]) -> list[Task]:
        """Replace the actor of a batch; returns the tasks of all its batches."""
        self._check()
        dead = running[ref].actor
        self._replace(dead)
        tasks: list[Task] = []
        for answers, batch in list(running.items()):
            if batch.actor is dead:
                tasks += batch.tasks
                del running[answers]
        return tasks

    def _begin(self, started: ray.ObjectRef) -> None:
        """Give an actor work from now on; replace it if it has not started.

        An actor that finds no core, since its machine is lost, waits and delays no other."""
        actor = self._starting.pop(started)
        try:
            machine, num_files = ray.get(started)
        except DEAD as error:
            self._failed_starts += 1
            if self._failed_starts > MAX_TRIES * len(self._actors.all):
                reason = str(error).strip().splitlines()[-1]
                raise RuntimeError(f"Ray's actors do not start: {reason}") from error
            self._replace(actor)
            return
        self._machines[actor] = machine
        self._failed_starts = 0
        if num_files == 0:  # it is on another machine
            self._actors.files[actor].close()

    def _replace(self, dead: Any) -> None:
        """Start another actor in place of one, which gets no more work."""
        self._machines.pop(dead, None)
        new = self._actors.replace(dead)
        self._starting[new.begin.remote(*self._configs)] = new


def _take_batch(queue: list[Task], parts: float) -> list[Task]:
    """Remove and return the first tasks of the queue: at most 1 / `parts` of its seconds, one task
    at least."""
    seconds = list(accumulate(task.seconds for task in queue))
    size = max(1, bisect_right(seconds, seconds[-1] / parts))
    tasks = queue[:size]
    del queue[:size]
    return tasks
