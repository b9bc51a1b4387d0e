"""The Flower ServerApp: builds the method's strategy and runs it."""

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result

from clients.arrays import to_record
from fedapps.client_app import method_model
from fedapps.config import Config, check_method, construct, defaults, override
from fedapps.methods import METHODS
from fedapps.results import Recorder
from partitions.datasets import info

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the configured method to its end."""
    engine = str(context.node_config.get("engine", "flower"))
    run(grid, dict(context.run_config), engine)


def run(grid: Grid, config: Config, engine: str) -> Result:
    """Train and evaluate `config`'s method over the grid, results to ``output-dir``.

    Raises ValueError for a bad configuration before the first message."""
    config = override(defaults(), config)
    method = check_method(config["method"])
    entry = METHODS[method]
    _, initial = method_model(method, config, info(str(config["dataset"])))
    shared = {name: a for name, a in initial.items() if not entry.client.is_personal(name)}
    check_run(config)
    output = str(config["output-dir"])
    recorder = Recorder(config, engine, Path(output) if output else None)
    strategy = construct(
        entry.strategy,
        config=config,
        method=method,
        min_available_nodes=int(config["num-clients"]),
        evaluate_novel=bool(entry.novel),
        on_round=lambda report: recorder.record(report, strategy),
    )
    result = strategy.start(
        grid=grid, initial_arrays=to_record(shared), num_rounds=int(config["rounds"])
    )
    recorder.finish()
    return result


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
