import gc
import logging
import os
import signal
import sys
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

sys.path.insert(0, str(Path(__file__).parent / "support"))  # helpers, for every test file

os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # workers use this environment, not a new one
os.environ.setdefault("RAY_worker_niceness", "0")  # else other processes starve them

WAITING = {"test_engines.py", "test_jobs.py", "test_ray_grid.py", "test_report_browser.py"}
LONG = {"test_attack.py", "test_audit.py", "test_component_settings.py", "test_contract.py",
        "test_foreign.py", "test_kills.py", "test_loss.py", "test_networks_matrix.py",
        "test_pages.py", "test_personalize.py", "test_plugin.py", "test_resume.py",
        "test_saved_runs.py", "test_strangers.py", "test_tuning.py"}  # fmt: skip


def pytest_configure(config):
    """Tests that compare numbers and bits do so on the CPU, also where there is a GPU; only
    ``pytest -m gpu`` sees it."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported and collected stays: the collector need not look at it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish():
    """The collector no longer walks modules and tests, and walks less often what tests leave: a
    tenth of the tests' processor time."""
    gc.freeze()
    gc.set_threshold(5000, 10, 10)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    import torch  # not before the workers: who deals the tests to them has no need of it

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def frozen():
    """Whether `pytest_collection_finish` has frozen objects is known: to count them takes a tenth
    of a second, which each command in the tests' process would spend."""

    def some():
        return 1

    some.counted = gc.get_freeze_count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", some)
        yield


@pytest.fixture(autouse=True, scope="session")
def rough_distances():
    """Clients' distances after few of their 40 exchanges; tests/methods/test_pfl.py has all."""
    from strategies.core import domain_distances

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(domain_distances, "STEPS", 4)
        yield


@pytest.fixture(autouse=True, scope="session")
def interruptible():
    """So are commands that tests start: a shell's background job and its children ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def alone():
    """A command that runs in the tests' process quietens Flower's log, takes SIGTERM for Ctrl-C and
    allows what it is asked to: for its test alone."""
    log, allowed = logging.getLogger("flwr"), os.environ.get("FEDAPPS_ALLOW", "")
    level, handlers = log.level, {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    yield
    os.environ["FEDAPPS_ALLOW"] = allowed
    if log.level != level:  # setting it empties the caches of all loggers
        log.setLevel(level)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def own_modules(request):
    """A test's modules go with its folder: another test's module may have the same name."""
    from fedapps.common import external_code

    before = set(sys.modules)
    yield
    folder = request.node.funcargs.get("tmp_path")
    if folder is None:
        return
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if isinstance(file, str) and file.startswith(f"{folder}{os.sep}"):
            del sys.modules[name]
            external_code._imported.cache_clear()


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def anywhere(request):
    """The test holds on the CPU, and with ``-m gpu`` on a GPU."""
    import torch

    assert torch.cuda.is_available() == (request.param == "gpu")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Whatever the order, files that wait for processes begin first, then those that take longest,
    so that no worker is left with one at the end; slow tests have an hour."""
    items.sort(key=lambda item: (item.path.name not in WAITING, item.path.name not in LONG))
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(3600))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """One worker more than cores: while one waits for a process, no core is idle."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Files are dealt to workers; those that wait are one worker's, the others fill the time."""
    return Scheduling(config, log)


class Scheduling(LoadFileScheduling):
    def _split_scope(self, nodeid):
        file = super()._split_scope(nodeid)
        return "processes" if Path(file).name in WAITING else file
