"""What a worker process does: it carries out jobs, one after the other."""

import logging
from multiprocessing.connection import Connection

from fedapps.common.errors import error_line
from fedapps.common.threads import use_one_thread
from fedapps.engines.in_process_grid import run_in_process


def work(pipe: Connection, level: int) -> None:
    """Carry out jobs until the parent closes the pipe; send each one's error, "" if it has none.
    `level` is that of Flower's log."""
    logging.getLogger("flwr").setLevel(level)
    use_one_thread()
    while True:
        try:
            apps, config = pipe.recv()
        except EOFError:  # there are no more jobs
            return
        try:
            run_in_process(apps, config)
            pipe.send("")
        except KeyboardInterrupt:  # the parent ends this process
            raise
        except BaseException as error:  # as in a single process, see `run_in_turn`
            pipe.send(error_line(error))
