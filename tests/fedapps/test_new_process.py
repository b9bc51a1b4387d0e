"""A new process: what it imports, and on how many threads it computes.

One process shows it all, since it imports torch and Flower for seconds."""

import subprocess
import sys

import pytest

from fedapps.settings.config import defaults
from partitions.datasets import loading
from partitions.federations import Federation

PROGRAM = """
import sys
import threading
import psutil
import torch
from fedapps.common.threads import one_thread

a = torch.ones(600, 600)

def turn():
    with one_thread():
        before = psutil.Process().num_threads()
        torch.mm(a, a)
        print("more threads:", psutil.Process().num_threads() - before)

torch.set_num_threads(1)
thread = threading.Thread(target=turn)
thread.start()
thread.join()
torch.set_num_threads(3)

import fedapps.clientapp
from fedapps.settings.config import defaults
from partitions import federation
federation(defaults()).share(0)
slow = {"dp_accounting", "flwr_datasets", "matplotlib", "ray", "scipy.stats"}
print("started with:", *sorted(slow & set(sys.modules)))
import fedapps.api, fedapps.own_app, fedapps.estimate, fedapps.engines.run
import fedapps.planning, fedapps.service.finished_run
from fedapps.serverapp import run_in_process
print("threads:", torch.get_num_threads())
config = defaults() | {"num-clients": 4, "rounds": 1, "local-steps": 2, "pfedhn.hidden-dim": 8}
for method in ("fedavg", "tent", "pfedhn", "fedtta++"):
    run_in_process(config | {"method": method})
print("trained with:", *sorted({"torch._dynamo"} & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What the program prints, by the words before a colon. Another process, this one, has dealt
    the rows."""
    with pytest.MonkeyPatch.context() as env:
        env.setenv("FEDAPPS_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        env.setenv("OMP_NUM_THREADS", "3")
        loading._load.cache_clear()
        for clients in (20, 4):
            Federation(defaults() | {"num-clients": clients}).share(0)
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
        )
        loading._load.cache_clear()
    assert done.returncode == 0, done.stderr
    parts = [line.partition(":") for line in done.stdout.splitlines()]
    return {words: rest.strip() for words, colon, rest in parts if colon}


def test_a_client_starts_without_slow_imports_and_trains_without_torch_s_compiler(printed):
    """A process for each message: what it imports is what an exchange costs. The compiler would
    cost every actor and every message seconds and 160 MB."""
    assert printed["started with"] == printed["trained with"] == ""


def test_a_new_thread_computes_on_one_and_importing_sets_nothing(printed):
    """A run in process begins with such a thread, whose sums on three threads may differ in the
    last bits. The entry points import most of the package."""
    assert printed["more threads"] == "0"
    assert printed["threads"] == "3"
