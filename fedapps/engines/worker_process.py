"""The start of a worker process. It imports nothing that takes time, so that a process whose parent
is killed ends at once, also in the seconds in which it imports torch."""

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection

from fedapps.common.signals import Terminated, interrupt


def start(pipe: Connection, level: int) -> None:
    """Carry out the jobs that come through the pipe, see `job_worker.work`, as long as the parent
    lives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process, by SIGTERM
    signal.signal(signal.SIGTERM, interrupt)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        from fedapps.engines.job_worker import work

        work(pipe, level)
    except Terminated:  # what was half written has been removed
        os._exit(128 + signal.SIGTERM)
