import os

import pytest
import torch

os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # workers use this environment, not a new one
os.environ.setdefault("RAY_worker_niceness", "0")  # else whoever works beside starves them


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)
