"""The Flower ServerApp: builds the method's strategy and runs it."""

import json
import tomllib
from collections.abc import Mapping
from logging import ERROR, WARNING
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result

from clients.arrays import Arrays, to_record
from clients.models import sized
from clients.privacy import EVERYTHING
from fedapps.callbacks import make_callbacks
from fedapps.engines.nodes import Hosts, engine_of
from fedapps.files import PRIVACY, best_round, locked, write_text
from fedapps.methods import METHODS
from fedapps.node.building import client_models, network, shared_arrays
from fedapps.results.checkpoint import State, newest_checkpoint
from fedapps.results.folder import read_former, read_memories
from fedapps.results.recorder import Recorder
from fedapps.settings.config import (
    Config,
    accepted,
    check_method,
    construct,
    defaults,
    override,
    settings,
)
from fedapps.settings.variants import check_shadowed
from partitions import trust
from partitions.federation import novel_shots
from strategies.base import PersonalizedStrategy
from strategies.privacy import Privacy, checked

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the configured method, or several in turn where `method` is a comma-separated list, over
    the clients that live on the grid's nodes.

    With several, each has a folder ``<method>-seed<seed>`` of its own in ``output-dir``, and one
    that fails leaves its error there and lets the others go on. With ``serve-dir`` it serves that
    finished run instead, until it is stopped. What the run's configuration names is allowed: who
    submits an app may run code here anyway. Raises ValueError for a bad configuration before the
    first message, RuntimeError at the end if a method failed."""
    trust.allow(*trust.named(context.run_config))
    config = override(defaults(), dict(context.run_config))
    if config["serve-dir"]:
        from fedapps.service.serving import serve

        serve(grid, config)
    engine = engine_of(grid)
    grid = Hosts(grid, int(config["num-clients"]), float(config["start-timeout"]))
    methods = [check_method(name.strip()) for name in str(config["method"]).split(",")]
    changes = {key: value for key, value in config.items() if value != defaults().get(key)}
    for note in check_shadowed(config, changes, methods, from_file=changes):
        log(WARNING, note)
    if len(methods) == 1:
        run(grid, config, engine)
        return
    errors = {}
    for method in methods:
        own = config | {"method": method}
        if config["output-dir"]:
            own["output-dir"] = f"{config['output-dir']}/{method}-seed{config['seed']}"
        try:
            run(grid, own, engine)
        except Exception as error:  # the other methods go on; all errors are raised at the end
            log(ERROR, "method %s failed", method, exc_info=error)
            errors[method] = f"{type(error).__name__}: {error}"
    if errors:
        raise RuntimeError("; ".join(f"{method}: {error}" for method, error in errors.items()))


def run(grid: Grid, config: Config, engine: str = "in-process") -> Result:
    """Train and evaluate `config`'s method over the grid of `engine`, results to ``output-dir``.

    Raises ValueError for a bad configuration before the first message, OSError if another process
    writes to that folder."""
    config = override(defaults(), config)
    method = check_method(config["method"])
    check_run(config)
    check_shots(config, method)
    privacy = check_privacy(config, method)
    if not config["output-dir"]:
        return _carry_out(grid, config, engine, privacy)
    folder = Path(str(config["output-dir"]))
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        return _carry_out(grid, config, engine, privacy)


def _carry_out(grid: Grid, config: Config, engine: str, privacy: Privacy | None) -> Result:
    """`run`, once the configuration is checked."""
    method = str(config["method"])
    entry = METHODS[method]
    only = sized(str(config["model"]), str(config["only-model"])) if config["only-model"] else ""
    base = str(config["model"])
    shared = shared_arrays(config, method, only or base)
    sizes = {name: shared_arrays(config, method, name) for name in client_models(config)}
    networks = {name: network(config, method, name or only or base)[0] for name in sizes or [""]}
    takes = accepted(entry.strategy)
    output = str(config["output-dir"])
    callbacks = make_callbacks(config)
    former, memories, begun = _former(config)
    ledger = Path(output) / PRIVACY
    if privacy is None and output:
        ledger.unlink(missing_ok=True)  # of another run: it would make this one pass as private
    elif privacy is not None and output:
        if config["resume"] and ledger.is_file() and config["dp-generator"] == "system":
            privacy.restore(_spent(ledger))  # of lost rounds, too
            privacy.plan(int(config["rounds"]) - (begun["strategy"]["round"] if begun else 0))
        privacy.on_spend = lambda state: _enter(ledger, state)
    recorder = Recorder(config, engine, Path(output) if output else None, begun)
    if begun is not None:
        callbacks.load_state(begun["callbacks"])

    def on_round(report: dict[str, Any]) -> None:
        recorder.record(report, strategy)
        callbacks.round_ends(report, strategy)
        recorder.check_point(strategy, {"callbacks": callbacks.state()})

    strategy: PersonalizedStrategy = construct(
        entry.strategy,
        config=config,
        method=method,
        min_available_nodes=int(config["min-available-nodes"] or config["num-clients"]),
        evaluate_novel=bool(config["evaluate-novel"] and _serves_novel(config, method)),
        on_round=on_round,
        former=former,
        memories=memories,
        saved_rounds=best_round(Path(str(config["from-dir"]))) if config["from-dir"] else 0,
        privacy=privacy,
        only_model=only,
        **({"models": sizes} if sizes and "models" in takes else {}),
        **({"network": networks} if "network" in takes else {}),
    )
    with callbacks.run(config, lambda: recorder.summary), recorder:
        return strategy.start(
            grid=grid,
            initial_arrays=to_record(shared),
            num_rounds=int(config["rounds"]),
            timeout=float(config["round-timeout"]),
            train_config=ConfigRecord({"method": method}),
        )


def _serves_novel(config: Config, method: str) -> bool:
    """Whether novel clients get a model, be it from the labels that they show."""
    entry = METHODS[method]
    rounds = entry.client.few_shot == "rounds" and config["novel-rounds"]
    return bool(entry.novel or config["novel-shots"] or rounds)


def _enter(ledger: Path, state: Mapping[str, Any]) -> None:
    """Write down what is spent before anybody is asked to train. The one file without which a run
    cannot go on: one that is killed and resumed would tell an ε that is too small."""
    try:
        write_text(ledger, json.dumps(state))
    except OSError as error:
        raise OSError(
            f"what the next round spends of the privacy budget cannot be written to {ledger} "
            f"({error}); make room, then: fedapps run --resume {ledger.parent}"
        ) from error


def _spent(ledger: Path) -> dict[str, Any]:
    """What a run has spent, and on which terms: one of an earlier release tells these in its
    configuration alone. Raises ValueError for a file that no run wrote."""
    try:
        told = checked(json.loads(ledger.read_text("utf-8")), str(ledger))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{ledger} is damaged: {error}") from error
    if "generator" in told:
        return told
    try:
        saved = tomllib.loads(ledger.with_name("config.toml").read_text("utf-8"))
    except (OSError, ValueError):
        return told
    if saved.get("dp-generator") == "system":
        told["generator"] = "system"
    if saved.get("dp-covers") == EVERYTHING:
        told["not-covered"] = []
    return told


def _former(config: Config) -> tuple[State | None, dict[int, Arrays], State | None]:
    """From which strategy's state and clients' memories the run starts, and from which checkpoint:
    its own newest one if it is to resume, else what ``from-dir`` holds."""
    if config["resume"] and config["output-dir"]:
        begun, refused = newest_checkpoint(Path(str(config["output-dir"])), config)
        for reason in refused:
            log(WARNING, reason)
        if begun is not None:
            return begun["strategy"], begun["clients"], begun
    if not config["from-dir"]:
        return None, {}, None
    folder = Path(str(config["from-dir"]))
    return read_former(folder), read_memories(folder), None


def check_privacy(config: Config, method: str) -> Privacy | None:
    """The run's differential privacy, None without; what a run that it goes on from has spent is
    spent here, too. Raises ValueError for bad settings, and for what no ε would hold for."""
    own, spent = settings(config, method), None
    if own["dp"] != "none" and own["from_dir"]:
        ledger = Path(own["from_dir"]) / PRIVACY
        if not ledger.is_file():
            raise ValueError(
                f"dp is {own['dp']!r}, but {own['from_dir']} holds no {PRIVACY}: its model was "
                "trained without privacy, so that no ε would hold for what comes of it"
            )
        spent = _spent(ledger)
    privacy: Privacy = construct(Privacy, config=config, method=method, spent=spent)
    if privacy.mode == "none":
        return None
    if privacy.mode not in METHODS[method].dp:
        able = [name for name, entry in METHODS.items() if privacy.mode in entry.dp]
        raise ValueError(f"{method} cannot keep dp {privacy.mode!r}; able: {', '.join(able)}")
    return privacy


def check_shots(config: Config, method: str) -> None:
    """Raise ValueError for novel-shots out of range, or that the method cannot learn from."""
    shots, way = novel_shots(config), METHODS[method].client.few_shot
    if shots and not way:
        able = ", ".join(name for name, entry in METHODS.items() if entry.client.few_shot)
        raise ValueError(f"{method} cannot learn from novel-shots; able: {able}")
    if shots and way == "rounds" and not settings(config, method)["novel_rounds"]:
        raise ValueError(
            f"{method} learns from novel-shots in rounds of their own; set novel-rounds, as to 20"
        )


def check_run(config: Config) -> None:
    """Raise ValueError for common keys that contradict each other."""
    if not config["rounds"] and not config["from-dir"]:  # a saved model may only be evaluated
        raise ValueError("rounds is 0; it must be at least 1")
    if int(config["min-available-nodes"]) > int(config["num-clients"]):
        raise ValueError(
            f"min-available-nodes is {config['min-available-nodes']}, but num-clients only "
            f"{config['num-clients']}"
        )
    if float(config["round-timeout"]) > float(config["start-timeout"]):
        raise ValueError(
            f"round-timeout is {config['round-timeout']} and start-timeout "
            f"{config['start-timeout']}; the second must not be the shorter"
        )
    if config["resume"] and not config["output-dir"]:
        raise ValueError("resume goes on from a checkpoint in output-dir, which is not set")
    strategy = METHODS[check_method(config["method"])].strategy
    if config["robust"] != "none" and "robust" not in accepted(strategy):
        able = ", ".join(name for name, m in METHODS.items() if "robust" in accepted(m.strategy))
        raise ValueError(f"{config['method']} takes no robust {config['robust']!r}; able: {able}")
    if config["robust"] != "none" and config["dp"] != "none":
        raise ValueError("robust and dp exclude each other: ε is that of the clients' plain mean")
    make_callbacks(config)
    for key in ("output-dir", "from-dir"):
        folder = str(config[key])
        if folder and not Path(folder).is_absolute():
            raise ValueError(f"{key} is {folder!r}; it must be an absolute path")
