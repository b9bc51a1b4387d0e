import os

import pytest
import torch

os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # workers use this environment, not a new one


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


ENGINES = ("test_engines.py", "test_ray_grid.py", "test_failures.py", "test_tls.py")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    """What starts Ray or a SuperLink runs in one worker, one after the other, and first: it waits
    more than it computes."""
    items.sort(key=lambda item: item.path.name not in ENGINES)
    for item in items:
        if item.path.name in ENGINES:
            item.add_marker(pytest.mark.xdist_group("engines"))
