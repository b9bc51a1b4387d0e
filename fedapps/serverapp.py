"""The Flower ServerApp: builds the method's strategy and runs it."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context
from flwr.clientapp import ClientApp
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result

import partitions
from clients.core.arrays import Arrays, to_record
from clients.core.protocol import METHOD, FewShot
from fedapps.building import size_note, strategy_of_run
from fedapps.callbacks import make_callbacks
from fedapps.common import external_code
from fedapps.common.errors import error_line
from fedapps.common.threads import one_thread
from fedapps.common.torch_defaults import torch_defaults
from fedapps.engines import in_process_grid
from fedapps.engines.hosting import HostingGrid, engine_of
from fedapps.engines.jobs import Apps
from fedapps.files import PRIVACY, append_text, locked, resume_command, write_text
from fedapps.methods import METHODS, check_private
from fedapps.results.checkpoint import newest_checkpoint, next_round
from fedapps.results.folder import takes_states
from fedapps.results.recorder import Recorder
from fedapps.results.sweep import check_same
from fedapps.saved import State, read_client_states, read_former, read_json
from fedapps.service import DEPLOYMENT_VARIABLE, NOTED_RUNS
from fedapps.settings.config import (
    Config,
    accepted,
    check_method,
    construct,
    is_resolved,
    resolve,
    said,
    settings,
)
from fedapps.settings.unread import check_companions, check_read
from fedapps.trainings import forget, forget_outdated, kept_rounds, training_folders
from partitions.federations import novel_shots
from strategies.core.aggregation import is_plain
from strategies.core.latency import Latency
from strategies.core.privacy import Privacy, checked

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the configured method, or each of several (`method` = "fedavg,tent"), over the clients
    on the grid's nodes.

    Each of several methods has a folder ``<method>-seed<seed>`` in ``output-dir``. If one fails,
    its error is written there and the others run. With ``serve-dir``, serve that finished run
    until stopped. References in the run's configuration are allowed, since the submitter of an app
    may run code. Raises ValueError for a bad configuration before the first message, RuntimeError
    at the end if a method failed."""
    external_code.allow(*external_code.named(context.run_config))
    config = resolve(context.run_config, reads_data=True)
    if config["serve-dir"]:
        from fedapps.service.serving import serve

        serve(grid, config)
    engine = engine_of(grid)
    grid = HostingGrid(grid, int(config["num-clients"]), float(config["start-timeout"]))
    methods = [check_method(name.strip()) for name in str(config["method"]).split(",")]
    given = said(context.run_config)
    for note in check_read(config, given, methods, from_file=given):
        log(WARNING, note)
    check_companions(config, given, methods)
    configs = [config]
    if len(methods) > 1:
        configs = [_config_of_one(config, method) for method in methods]
    if not is_resolved(context.run_config):  # else `fedapps run` has checked the folders
        for each in configs:
            _check_output(each)
    if len(methods) == 1:
        run(grid, config, engine, report=True)
    else:
        _run_several(grid, config, engine, methods, configs)


def _config_of_one(config: Config, method: str) -> Config:
    """The configuration of one of several methods."""
    changes: Config = {"method": method}
    if config["output-dir"]:
        changes["output-dir"] = f"{config['output-dir']}/{method}-seed{config['seed']}"
    return config | changes


def _run_several(
    grid: Grid, config: Config, engine: str, methods: Sequence[str], configs: Sequence[Config]
) -> None:
    """Run the methods of `config` one by one, each by its own of the `configs`. Raises RuntimeError
    at the end if one failed."""
    # `fedapps run` has said which runs share a training, and removes what they keep.
    shares_here = bool(config["output-dir"] and not config["training-dir"])
    if shares_here:
        folders = training_folders(configs, Path(str(config["output-dir"])))
        configs = [
            each | {"training-dir": folder} for each, folder in zip(configs, folders, strict=True)
        ]
        forget_outdated(configs)
    errors = {}
    for method, method_config in zip(methods, configs, strict=True):
        try:
            run(grid, method_config, engine, report=True)
        except Exception as error:
            log(ERROR, "method %s failed", method, exc_info=error)
            errors[method] = error_line(error)
    if shares_here and not errors:
        forget(str(method_config["training-dir"]) for method_config in configs)
    if errors:
        raise RuntimeError("; ".join(f"{method}: {error}" for method, error in errors.items()))


def _check_output(config: Config) -> None:
    """Raise ValueError if the run would replace one of another configuration in ``output-dir``."""
    if config["output-dir"]:
        folder = Path(str(config["output-dir"]))
        check_same(folder, config, "choose another output-dir, or remove the folder")


@torch_defaults()
@one_thread()
def run(grid: Grid, config: Config, engine: str = "in-process", *, report: bool = False) -> Result:
    """Train and evaluate `config`'s method over the grid of `engine`; results to ``output-dir``.

    Server and clients compute on one thread, so all engines give the same bits.
    With `report`, log its scores at the end, and where the results are.
    Raises ValueError for a bad configuration before the first message, OSError if another process
    uses that folder."""
    config = resolve(config)
    privacy = check_run(config, engine)
    latency = _latency(config, engine)
    output = Path(str(config["output-dir"])) if config["output-dir"] else None
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        _note_run(output)
    with ExitStack() as opened:
        if output is not None:
            opened.enter_context(locked(output))
        former_state, client_states, checkpoint = _former_run(config)
        _prepare_privacy(config, privacy, output, checkpoint)
        kept = opened.enter_context(kept_rounds(config))
        callbacks = make_callbacks(config)
        recorder: Recorder

        def on_failure(text: str) -> None:
            recorder.record_failure(text)

        def on_round(metrics: dict[str, Any]) -> None:
            # The round is on record if a callback ends the run, and the checkpoint holds what
            # the callbacks have counted in this round.
            if kept is not None:
                recorder.training_elsewhere = kept.seconds
            recorder.record(metrics, strategy)
            callbacks.round_ends(metrics, strategy)
            if strategy.now.has_state:
                recorder.write_checkpoint_if_due(strategy, {"callbacks": callbacks.state()})

        if report and (note := size_note(config)):
            log(WARNING, "%s", note)
        strategy, shared = strategy_of_run(
            config,
            on_round=on_round,
            on_failure=on_failure,
            former=former_state,
            client_states=client_states,
            privacy=privacy,
            latency=latency,
            kept_rounds=kept,
        )
        # Only now: it removes what a former run has left, and a network or a method that the
        # configuration does not fit has been refused.
        recorder = Recorder(config, engine, output, checkpoint)
        recorder.strategy = strategy
        callbacks.on_failure = on_failure
        if checkpoint is not None:
            callbacks.load_state(checkpoint["callbacks"])
        with callbacks.run(config, lambda: recorder.summary), recorder:
            result = strategy.start(
                grid=grid,
                initial_arrays=to_record(shared),
                num_rounds=int(config["rounds"]),
                timeout=float(config["round-timeout"]),
                train_config=ConfigRecord({METHOD: str(config["method"])}),
            )
        if report:
            log(INFO, "\n%s", _end(config, recorder.summary, result))
        return result


def _note_run(output: Path) -> None:
    """Note the run's folder in the deployment that carries it, for `fedapps status`."""
    folder = os.environ.get(DEPLOYMENT_VARIABLE, "")
    if folder and "\n" not in str(output):
        with suppress(OSError):  # the SuperLink was moved to another machine
            append_text(Path(folder) / NOTED_RUNS, f"{output}\n")


def _end(config: Config, summary: dict[str, Any], result: Result) -> str:
    """What a person who submitted the run sees last: its scores, and where the rest is."""
    from fedapps.results.formats import as_text
    from fedapps.results.runs import run_of
    from fedapps.results.table import results

    lines = []
    if "best_round" in summary:  # absent without an evaluation
        lines.append(as_text(results(run_of(config, summary))))
    scored = len(result.evaluate_metrics_clientapp)
    lines.append(
        f"the Result holds {len(result.arrays)} arrays and the metrics of {scored} evaluations"
    )
    output = config["output-dir"]
    if output:
        lines.append(f"results: written to {output}: fedapps table, report and plot read them")
    else:
        lines.append(
            'results: not written; to have them, add to --run-config output-dir="/an/absolute/path"'
        )
    return "\n".join(lines)


def _former_run(config: Config) -> tuple[State | None, dict[int, Arrays], State | None]:
    """The strategy's and the clients' states that the run starts from, and its checkpoint: the
    newest one if it is to resume; else the saved run in ``from-dir`` has the states, which another
    method's run does not take over."""
    if config["resume"] and config["output-dir"]:
        checkpoint, refused = newest_checkpoint(Path(str(config["output-dir"])), config)
        for reason in refused:
            log(WARNING, reason)
        if checkpoint is not None:
            log(INFO, "the run continues at round %s", next_round(checkpoint))
            return checkpoint["strategy"], checkpoint["clients"], checkpoint
    if not config["from-dir"]:
        return None, {}, None
    folder = Path(str(config["from-dir"]))
    former = read_former(folder)
    if not takes_states(folder, str(config["method"])):
        return {"arrays": former["arrays"]}, {}, None
    return former, read_client_states(folder), None


def _prepare_privacy(
    config: Config, privacy: Privacy | None, output: Path | None, checkpoint: State | None
) -> None:
    """Let `privacy` write what is spent to the output folder, and resume what is there."""
    if output is None:
        return
    file = output / PRIVACY
    if privacy is None:
        file.unlink(missing_ok=True)  # of another run: this one would pass as private
        return
    if config["resume"] and file.is_file() and config["dp-generator"] == "system":
        # The file is newer than the checkpoint: it also counts rounds that were lost with a
        # killed process, since clients have answered in them.
        privacy.restore(checked(read_json(file), str(file)))
        finished_rounds = checkpoint["strategy"]["round"] if checkpoint is not None else 0
        privacy.plan(int(config["rounds"]) - finished_rounds)
    references = external_code.named(config)
    privacy.on_spend = lambda state: _write_spent(file, state, references)


def _write_spent(file: Path, state: Mapping[str, Any], references: list[str]) -> None:
    """Write what is spent before clients are asked to train. A run cannot go on without this file:
    killed and resumed it would report an ε that is too small. `references` are the run's."""
    try:
        write_text(file, json.dumps(state))
    except OSError as error:
        raise OSError(
            f"what the next round spends of the privacy budget cannot be written to {file} "
            f"({error}); make room, then: {resume_command(file.parent, references)}"
        ) from error


def check_run(config: Config, engine: str = "in-process") -> Privacy | None:
    """The run's differential privacy, None without any. Every `engine` but "deployment" simulates.

    Raises ValueError for settings that contradict each other or that the method cannot fulfil."""
    method = check_method(config["method"])
    if not config["rounds"] and not config["from-dir"]:
        raise ValueError("rounds is 0; it must be at least 1 unless from-dir is set")
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
    if config["output-dir"] and not config["fraction-evaluate"]:
        raise ValueError(
            "fraction-evaluate is 0, but output-dir keeps the scores of evaluations and the model "
            "of an evaluated round; give a share above 0, or a larger evaluate-every"
        )
    if config["robust"] != "none":
        _check_robust(config, method)
    if config["novel-rounds"] and "novel_rounds" not in accepted(METHODS[method].strategy):
        able = ", ".join(n for n, m in METHODS.items() if "novel_rounds" in accepted(m.strategy))
        raise ValueError(f"{method} has no novel-rounds; able: {able}")
    for key in ("output-dir", "from-dir", "training-dir"):
        folder = str(config[key])
        if folder and not Path(folder).is_absolute():
            raise ValueError(f"{key} is {folder!r}; it must be an absolute path")
    make_callbacks(config)  # raises for what a callback lacks
    _latency(config, engine)
    _check_shots(config, method)
    return _privacy(config, method)


def _latency(config: Config, engine: str) -> Latency | None:
    """The seconds of simulated clients, None without any.

    Raises ValueError where the engine's clients have no seconds to wait for, or have real ones."""
    method = str(config["method"])
    latency: Latency = construct(Latency, config=config, method=method)
    if latency.latency != "none":
        if engine == "deployment":
            raise ValueError(
                f"latency is {latency.latency!r}, which simulates clients' seconds, but these are "
                "real nodes; set latency to 'none'"
            )
        return latency
    values = settings(config, method)
    if engine == "deployment" or (values["round_quorum"] == 1 and not values["round_deadline"]):
        return None
    raise ValueError(
        f"round-quorum is {values['round_quorum']:g} and round-deadline "
        f"{values['round_deadline']:g}, but simulated clients have no seconds of their own; set "
        "latency=lognormal as well, or round-quorum to 1 and round-deadline to 0"
    )


def _check_robust(config: Config, method: str) -> None:
    """Raise ValueError for a robust mean that the method does not take, or that protects nobody."""
    if "robust" not in accepted(METHODS[method].strategy):
        able = ", ".join(name for name, m in METHODS.items() if "robust" in accepted(m.strategy))
        raise ValueError(f"{method} takes no robust {config['robust']!r}; able: {able}")
    if config["dp"] != "none":
        raise ValueError("robust and dp exclude each other: ε is that of the clients' plain mean")
    training = round(float(config["train-fraction"]) * int(config["num-clients"]))
    values = settings(config, method)
    sampled = round(values["fraction_train"] * training)
    # With few clients a robust mean may leave out nobody, and is then the plain one.
    plain = is_plain(values["robust"], values["robust_fraction"], sampled)
    if plain:
        raise ValueError(plain)


def _check_shots(config: Config, method: str) -> None:
    """Raise ValueError for novel-shots that the method cannot learn from."""
    if not novel_shots(config):
        return
    few_shot = METHODS[method].client.few_shot
    if not few_shot:
        able = ", ".join(name for name, entry in METHODS.items() if entry.client.few_shot)
        raise ValueError(f"{method} cannot learn from novel-shots; able: {able}")
    if few_shot == FewShot.ROUNDS and not settings(config, method)["novel_rounds"]:
        raise ValueError(
            f"{method} learns from novel-shots in rounds of their own; set novel-rounds, as to 20"
        )


def _privacy(config: Config, method: str) -> Privacy | None:
    """The run's differential privacy, which counts what the run in from-dir has spent. Raises
    ValueError for bad settings, and if no ε would hold for the model."""
    values = settings(config, method)
    spent = None
    if values["dp"] != "none" and values["from_dir"]:
        file = Path(values["from_dir"]) / PRIVACY
        if not file.is_file():
            raise ValueError(
                f"dp is {values['dp']!r}, but {values['from_dir']} holds no {PRIVACY}: its model "
                "was trained without privacy, so no ε holds for a model that starts from it"
            )
        spent = checked(read_json(file), str(file))
    privacy: Privacy = construct(Privacy, config=config, method=method, spent=spent)
    if privacy.mode == "none":
        return None
    if partitions.learns_from_inputs(config):
        privacy.admit("moments of inputs")
    if partitions.learns_words(config):
        privacy.admit("the vocabulary of frequent words")
    if config["early-stopping"]:
        privacy.admit("scores by which early-stopping ends the run")
    labeled = float(config["partition.labeled-clients"])
    if labeled < 1:
        raise ValueError(
            f"dp is {privacy.mode!r} and partition.labeled-clients {labeled:g}; the noise is that "
            "of a mean over all training clients; set one of the two to its default"
        )
    check_private(method, privacy.mode)
    return privacy


def load_client_app() -> ClientApp:
    """The ClientApp, which a server alone does not import."""
    from fedapps.clientapp import app

    return app


APPS = Apps(run, load_client_app)


def run_in_process(config: Config) -> None:
    """One run over clients in this process."""
    in_process_grid.run_in_process(APPS, config)
