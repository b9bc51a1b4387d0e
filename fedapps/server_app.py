"""The Flower ServerApp: builds the method's strategy and runs it."""

from logging import ERROR
from pathlib import Path

from flwr.app import ConfigRecord, Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result

import partitions
from clients.arrays import to_record
from fedapps.client_app import method_model
from fedapps.config import Config, check_method, construct, defaults, override
from fedapps.methods import METHODS
from fedapps.results import Recorder
from strategies.base import PersonalizedStrategy
from strategies.privacy import Privacy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the configured method, or several in turn where `method` is a comma-separated list.

    With several, each has a folder ``<method>-seed<seed>`` of its own in ``output-dir``, and one
    that fails leaves its error there and lets the others go on. Raises ValueError for a bad
    configuration before the first message, RuntimeError at the end if a method failed."""
    config = override(defaults(), dict(context.run_config))
    methods = [check_method(name.strip()) for name in str(config["method"]).split(",")]
    if len(methods) == 1:
        run(grid, config)
        return
    errors = {}
    for method in methods:
        own = config | {"method": method}
        if config["output-dir"]:
            own["output-dir"] = f"{config['output-dir']}/{method}-seed{config['seed']}"
        try:
            run(grid, own)
        except Exception as error:  # the other methods go on; all errors are raised at the end
            log(ERROR, "method %s failed", method, exc_info=error)
            errors[method] = f"{type(error).__name__}: {error}"
    if errors:
        raise RuntimeError("; ".join(f"{method}: {error}" for method, error in errors.items()))


def run(grid: Grid, config: Config, engine: str = "") -> Result:
    """Train and evaluate `config`'s method over the grid, results to ``output-dir``.

    Raises ValueError for a bad configuration before the first message."""
    config = override(defaults(), config)
    method = check_method(config["method"])
    check_run(config)
    privacy = check_privacy(config, method)
    entry = METHODS[method]
    _, initial = method_model(method, config, partitions.task(config))
    shared = {name: a for name, a in initial.items() if not entry.client.is_personal(name)}
    output = str(config["output-dir"])
    recorder = Recorder(config, engine, Path(output) if output else None)
    strategy: PersonalizedStrategy = construct(
        entry.strategy,
        config=config,
        method=method,
        min_available_nodes=int(config["num-clients"]),
        evaluate_novel=bool(entry.novel),
        on_round=lambda report: recorder.record(report, strategy),
        privacy=privacy,
    )
    with recorder:
        return strategy.start(
            grid=grid,
            initial_arrays=to_record(shared),
            num_rounds=int(config["rounds"]),
            train_config=ConfigRecord({"method": method}),
        )


def check_privacy(config: Config, method: str) -> Privacy | None:
    """The run's differential privacy, None without. Raises ValueError for bad settings, and for
    a kind of privacy that the method cannot keep."""
    privacy: Privacy = construct(Privacy, config=config, method=method)
    if privacy.mode == "none":
        return None
    if privacy.mode not in METHODS[method].dp:
        able = [name for name, entry in METHODS.items() if privacy.mode in entry.dp]
        raise ValueError(f"{method} cannot keep dp {privacy.mode!r}; able: {', '.join(able)}")
    return privacy


def check_run(config: Config) -> None:
    """Raise ValueError for common keys that are out of range."""
    for key in ("rounds", "num-clients", "batch-size", "evaluate-every"):
        if int(config[key]) < 1:
            raise ValueError(f"{key} is {config[key]}; it must be at least 1")
    for key in ("local-steps", "local-epochs", "lr", "momentum", "weight-decay"):
        if float(config[key]) < 0:
            raise ValueError(f"{key} is {config[key]}; it must not be negative")
    output = str(config["output-dir"])
    if output and not Path(output).is_absolute():
        raise ValueError(f"output-dir is {output!r}; it must be an absolute path")
