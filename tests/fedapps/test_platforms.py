"""Runs in process need nothing that Windows lacks."""

import os

import numpy as np
import pytest
from small_runs import run_anew

POSIX = """
import builtins, os, signal, sys

LACKS = ("fcntl", "grp", "posix", "pty", "pwd", "resource", "termios", "tty")
PACKAGES = ("partitions", "clients", "strategies", "fedapps")
imported = builtins.__import__

def without_posix(name, globals=None, *rest, **named):
    caller = (globals or {}).get("__name__", "").partition(".")[0]
    if caller in PACKAGES and name in LACKS:
        raise ModuleNotFoundError(f"no module named {name!r} on Windows")
    return imported(name, globals, *rest, **named)

import torch, flwr.client, flwr.clientapp, flwr.serverapp, flwr.superlink.grid, ray
import matplotlib.pyplot, multiprocessing, pandas, sklearn.metrics  # they may use what is removed
builtins.__import__ = without_posix
for module, names in (
    (os, "fork getegid geteuid getgid getpgid getuid killpg nice sched_getaffinity setsid uname"),
    (signal, "SIGALRM SIGCHLD SIGHUP SIGKILL SIGUSR1 alarm pause setitimer"),
):
    for name in names.split():
        delattr(module, name)
"""
MODULES = """
import importlib, pkgutil
for package in PACKAGES:
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
"""
COMMANDS = """
from pathlib import Path
from fedapps.commands.main import cli

def fedapps(words):
    try:
        cli(words.split())
    except SystemExit as end:
        assert not end.code, words

folder = Path(sys.argv[1])
small = "--methods tent --engine in-process --jobs 1 num-clients=4 rounds=1 local-steps=1"
fedapps(f"run {small} --output {folder}/runs")
fedapps(f"table {folder}/runs")
fedapps("list methods")
fedapps(f"personalize {folder}/runs/tent-seed0 {folder}/x.npy --output {folder}/mine")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the process is forked")
def test_modules_and_runs_in_process_need_no_posix(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((9, 1, 8, 8), np.uint8))
    printed = run_anew(POSIX + MODULES + COMMANDS, tmp_path)
    assert "tent" in printed and "fedtta++" in printed
    assert (tmp_path / "mine" / "predictions.csv").is_file()
