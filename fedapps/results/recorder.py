"""What a run leaves in its folder: config.toml, metrics.jsonl, summary.json, model.safetensors."""

import json
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import tomli_w

from fedapps.config import Config
from fedapps.files import HANDOUT, MODEL, PRIVACY, write_arrays, write_text
from fedapps.service.card import make_card, write_card
from strategies.base import PersonalizedStrategy

FORMAT = "1"  # of what a run leaves; docs/run-folder.md tells it
LIBRARIES = ("fedapps", "flwr", "ray", "torch", "torchvision", "numpy", "flwr-datasets")


class Recorder:
    """Writes a line a round, and summary and model at every evaluation, so that a killed server
    loses nothing but the round at hand. Use as a context around the run. Without a folder it
    only keeps the summary; `engine` "" means whichever of Flower's engines runs it."""

    def __init__(self, config: Config, engine: str, folder: Path | None) -> None:
        self.config, self.engine, self.folder = config, engine, folder
        self.rounds: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self._best: dict[str, Any] = {}
        self._phase = 0
        self._started = time.monotonic()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for stale in ("metrics.jsonl", "summary.json", MODEL, HANDOUT, PRIVACY):
                (folder / stale).unlink(missing_ok=True)
            versions = {name: version(name) for name in LIBRARIES}
            versions |= {"python": platform.python_version(), "results": FORMAT}
            write_text(folder / "config.toml", tomli_w.dumps(config | {"versions": versions}))
            write_card(folder, make_card(config))

    def record(self, report: dict[str, Any], strategy: PersonalizedStrategy) -> None:
        """Take in one round's report."""
        self.rounds.append(report)
        if "evaluation" in report:
            result = _result(report, strategy)
            if strategy.phase != self._phase:
                self._phase, self._best = strategy.phase, {}
            accuracy = result["train"]["accuracy"]
            best = self._best.get("train", {}).get("accuracy")
            better = best is None or (accuracy is not None and accuracy > best)
            if better or strategy.reports_last:
                self._best = result
                if self.folder is not None:
                    write_arrays(self.folder / MODEL, strategy.arrays)
                    if strategy.handout:
                        write_arrays(self.folder / HANDOUT, strategy.handout)
            self.summary = self._summarize(result)
            self._write_summary()
        if self.folder is not None:
            with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(report) + "\n")

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Mark the summary as that of a finished run, or leave the error in it."""
        self.summary["finished"] = error is None
        if error is not None:
            self.summary["error"] = f"{type(error).__name__}: {error}"
        self._write_summary()

    def _write_summary(self) -> None:
        if self.folder is not None:
            write_text(self.folder / "summary.json", json.dumps(self.summary, indent=1))

    def _summarize(self, last: dict[str, Any]) -> dict[str, Any]:
        keys = ("method", "dataset", "partition", "model", "seed")
        megabytes = [r["megabytes"] for r in self.rounds if "megabytes" in r]  # private: none
        dropped = [r["dropped"] for r in self.rounds if "dropped" in r]
        return {
            **{key: self.config[key] for key in keys},
            "engine": self.engine or ("ray" if "ray" in sys.modules else "deployment"),
            "rounds": len(self.rounds),
            "best_round": self._best["round"],
            "train": self._best["train"],
            "novel": self._best["novel"],
            "last": {key: last[key] for key in ("train", "novel", "per_client")},
            "per_client": self._best["per_client"],
            "megabytes_per_client_round": {
                way: sum(m[way] for m in megabytes) / len(megabytes) if megabytes else None
                for way in ("down", "up")
            },
            "seconds": time.monotonic() - self._started,
            **({"privacy": told} if (told := _privacy(self.rounds[-1])) else {}),
            "dropped_replies": sum(sum(d.values()) for d in dropped) if dropped else None,
        }


def _privacy(report: dict[str, Any]) -> dict[str, Any]:
    """ε spent so far, at which δ, by which noise, and on which terms; {} without privacy."""
    names = ("epsilon", "delta", "noise-multiplier", "sigma", "generator", "terms")
    found = {name: report[f"dp-{name}"] for name in names if f"dp-{name}" in report}
    return {name.replace("-", "_"): value for name, value in found.items()}


def _result(report: dict[str, Any], strategy: PersonalizedStrategy) -> dict[str, Any]:
    """One evaluation as the summary shows it."""
    numbers = report["evaluation"]
    groups: dict[str, dict[str, Any] | None] = {}
    for role in ("train", "novel"):
        prefix = f"{role}-"
        told = {
            key.removeprefix(prefix).replace("-", "_"): value
            for key, value in numbers.items()
            if key.startswith(prefix)
        }
        groups[role] = {"accuracy": None, "clients": 0} | told
    if not numbers.get("novel-clients"):
        groups["novel"] = None
    return {
        "round": report["round"],
        **groups,
        "per_client": {
            str(update.node.client): {
                "role": "novel" if update.node.novel else "train",
                "accuracy": update.metrics.get("accuracy"),
                "examples": update.num_examples,
            }
            | {
                key.replace("-", "_"): update.metrics[key]
                for key in ("sub-population", "head")
                if key in update.metrics
            }
            for update in strategy.evaluation
        },
    }
