"""PFLlib's own code on the splits of finished runs:

``python -m experiments.benchmarks.pfllib CHECKOUT RUNS``.

CHECKOUT is a clone of github.com/TsingZ0/PFLlib, RUNS what `fedapps run` wrote. Each run's split is
written to CHECKOUT/dataset in PFLlib's format; validation samples are its test samples. PFLlib's
system/main.py then trains there as it is, except that the network is ours with the same initial
weights. Prints the accuracies of both after the last round, and writes PFLlib's to OUT as JSON.

With ``--corrected``, PFLlib's client of FedAMP follows its paper instead."""

import importlib
import json
import os
import random
import re
import runpy
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import nn

import partitions
from clients.models import build_model
from clients.models.head import take_head
from fedapps.results.schema import with_present_names
from fedapps.saved import read_json
from fedapps.settings.config import Config
from fedapps.settings.saved_configurations import run_folders, saved_configuration
from partitions.federations import Federation

ALGORITHMS = {
    "local": "Local", "fedavg": "FedAvg", "fedper": "FedPer", "fedrep": "FedRep",
    "fedbabu": "FedBABU", "ditto": "Ditto", "apfl": "APFL", "fedala": "FedALA", "fedamp": "FedAMP",
}  # fmt: skip
START = (
    "import sys; from experiments.benchmarks.pfllib import start; start(*map(sys.argv.pop, (1, 1)))"
)


def export(federation: Federation, folder: Path) -> None:
    """Write the training clients' samples to `folder` as PFLlib reads them: train/<i>.npz and
    test/<i>.npz with a dictionary of x (n, *shape), float32, and y (n,), and config.json."""
    clients = np.flatnonzero(~federation.novel).tolist()
    for i, client in enumerate(clients):
        share = federation.share(client)
        for part, samples in (("train", share.train), ("test", share.validation)):
            (folder / part).mkdir(parents=True, exist_ok=True)
            x, y = samples[:]
            data = np.array({"x": x.numpy(), "y": y.numpy()})  # PFLlib unpickles it
            np.savez_compressed(folder / part / f"{i}.npz", data=data)
    described = {"num_clients": len(clients), "num_classes": federation.info.num_classes}
    (folder / "config.json").write_text(json.dumps(described))


def flags(config: Config) -> dict[str, Any]:
    """The options of PFLlib's main.py that mean what the run's configuration says.

    FedBABU tunes the models of PFLlib's last round of training, which are not averaged, so it gets
    a round less."""
    method = str(config["method"])
    rounds = int(config["rounds"])
    flags_of_method = {
        "fedrep": {"plocal_epochs": config["fedrep.head-epochs"]},
        "fedbabu": {
            "fine_tuning_epochs": config["fedbabu.tune-epochs"],
            "global_rounds": rounds - 1,
        },
        "ditto": {"mu": config["ditto.penalty"], "plocal_epochs": config["local-epochs"]},
        "apfl": {"alpha": config["apfl.mixing"]},
        "fedala": {
            "eta": config["fedala.mixing-lr"],
            "rand_percent": round(100 * float(config["fedala.mixing-share"])),
            "layer_idx": 2 * int(config["fedala.layers"]),  # weights and biases count
        },
        "fedamp": {  # our μ is λ/α
            "alphaK": config["fedamp.step"],
            "sigma": config["fedamp.width"],
            "lamda": float(config["fedamp.mu"]) * float(config["fedamp.step"]),
        },
    }
    options: dict[str, Any] = {
        "algorithm": ALGORITHMS[method],
        "device": "cpu",
        "model": "DNN",
        "num_clients": round(int(config["num-clients"]) * float(config["train-fraction"])),
        "global_rounds": rounds,
        "local_epochs": config["local-epochs"],
        "batch_size": config["batch-size"],
        "local_learning_rate": config["lr"],
    }
    options |= flags_of_method.get(method, {})
    options["eval_gap"] = options["global_rounds"]  # before the first round and after the last
    return options


class Network(nn.Module):
    """The run's network, its head named as PFLlib's networks have it: `fc`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        info = partitions.federation(config).info
        name = str(config["model"])
        self.body = build_model(name, info.shape, info.num_classes, int(config["seed"]))
        self.fc: nn.Module = take_head(self.body)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (n, C)."""
        logits: torch.Tensor = self.fc(self.body(x))
        return logits


def start(run: str, corrected: str) -> None:
    """Run main.py of the current folder, with the network of a finished run as its DNN."""
    config = saved_configuration(Path(run))
    random.seed(int(config["seed"]))
    np.random.seed(int(config["seed"]))
    torch.set_num_threads(1)
    sys.path.insert(0, os.getcwd())
    models = importlib.import_module("flcore.trainmodel.models")
    vars(models)["DNN"] = lambda *_, **__: Network(config)
    if corrected:
        correct()
    runpy.run_path("main.py", run_name="__main__")


def correct() -> None:
    """Replace PFLlib's client of FedAMP by one that follows the paper."""
    amp = importlib.import_module("flcore.clients.clientamp")
    vars(amp)["clientAMP"] = amp_client(amp.clientAMP)


def amp_client(base: Any) -> type:
    """PFLlib's client of FedAMP with F_i(w) + λ/(2α)‖w − u_i‖², from u_i."""

    class AMP(base):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.optimizer.register_step_pre_hook(self.pull)

        def pull(self, *_: Any) -> None:
            for w, u in zip(self.model.parameters(), self.client_u.parameters(), strict=True):
                w.grad += self.lamda / self.alphaK * (w.detach() - u.detach())

        def train(self) -> None:
            self.clone_model(self.client_u, self.model)
            super().train()

    return AMP


def accuracy(checkout: Path, run: Path, corrected: bool = False) -> float:
    """PFLlib's accuracy in % after the last round, on the run's split and with its settings."""
    config = saved_configuration(run)
    name = f"digits-{config['seed']}"
    export(partitions.federation(config), checkout / "dataset" / name)
    named = flags(config) | {"dataset": name}
    options = [f"--{key}={value}" for key, value in named.items()]
    variant = "corrected" if corrected else ""
    done = subprocess.run(
        [sys.executable, "-c", START, str(run.resolve()), variant, *options],
        cwd=checkout / "system",
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"PFLlib: {done.stderr.strip()[-500:]}")
    return 100 * float(re.findall(r"Averaged Test Accuracy: ([\d.]+)", done.stdout)[-1])


def main(
    checkout: Path,
    runs: Path,
    out: Annotated[Path, typer.Option()] = Path("pfllib.json"),
    methods: Annotated[str, typer.Option(help="Names, separated by commas.")] = "",
    corrected: Annotated[bool, typer.Option(help="FedAMP as in its paper.")] = False,
) -> None:
    """Both programs' accuracies in %, mean ± deviation over seeds, and their difference."""
    ours: dict[str, list[float]] = defaultdict(list)
    theirs: dict[str, list[float]] = defaultdict(list)
    for run in run_folders(runs):
        method = str(saved_configuration(run)["method"])
        if methods and method not in methods.split(","):
            continue
        last = with_present_names(read_json(run / "summary.json")["last"])
        ours[method].append(100 * last["evaluation"]["train-accuracy"])
        theirs[method].append(accuracy(checkout, run, corrected))
        print(run.name, f"{ours[method][-1]:.2f}", f"{theirs[method][-1]:.2f}", flush=True)
    print("\n| method | fedapps | PFLlib | difference |\n|---|---|---|---|")
    for method, our_scores in ours.items():
        their_scores = theirs[method]
        difference = np.mean(our_scores) - np.mean(their_scores)
        cells = f"{_measured(our_scores)} | {_measured(their_scores)}"
        print(f"| {method} | {cells} | {difference:+.2f} |")
    out.write_text(json.dumps(theirs))


def _measured(accuracies: list[float]) -> str:
    """Mean ± deviation over seeds; the mean alone for a single seed."""
    mean = np.mean(accuracies)
    if len(accuracies) == 1:
        return f"{mean:.2f}"
    return f"{mean:.2f} ± {np.std(accuracies, ddof=1):.2f}"


if __name__ == "__main__":
    typer.run(main)
