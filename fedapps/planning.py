"""How a run is planned: its options are read, checked and turned into jobs, before work begins."""

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from fedapps.common.errors import is_sentence
from fedapps.common.threads import one_thread
from fedapps.common.torch_defaults import torch_defaults
from fedapps.console import invocation, make_console, say
from fedapps.engines import check_address, check_engine_name
from fedapps.settings.experiments import Experiment, parse_seeds, read_arguments, split_names

if TYPE_CHECKING:
    from clients.core.arrays import Arrays
    from fedapps.engines.jobs import Job
    from fedapps.settings.config import Config
    from partitions.datasets.catalog import Info


MAX_JOBS = 1024


def check_options(
    arguments: list[str], methods: str, seeds: str, engine: str, jobs: int | None,
    gpus_per_client: float, ray_address: str, debug: bool = False,
) -> None:  # fmt: skip
    """Raise ValueError for options that are out of range or that exclude each other."""
    if engine:
        check_engine_name(engine)
    if debug and (engine not in ("", "in-process") or ray_address or gpus_per_client):
        raise ValueError("--debug raises errors in this process: it takes no other engine")
    if jobs is not None and not 1 <= jobs <= MAX_JOBS:
        raise ValueError(f"--jobs is {jobs}; it must lie in [1, {MAX_JOBS}]")
    if ray_address and engine not in ("", "ray"):
        raise ValueError(f"--ray-address is for --engine ray, not {engine}")
    if gpus_per_client and engine == "in-process":
        raise ValueError("--gpus-per-client is for --engine ray or flower, not in-process")
    for option, given in (("methods", methods), ("seeds", seeds)):
        also = [a for a in arguments if a.partition("=")[0] in (option, option[:-1])]
        if given and also:
            raise ValueError(f"--{option} is {given!r}, but {also[0]} is given as well; remove one")
    if not 0 <= gpus_per_client <= 64:
        raise ValueError(f"--gpus-per-client is {gpus_per_client}; it must lie in [0, 64]")
    if ray_address:
        check_address(ray_address)
    elif gpus_per_client:
        from torch import cuda

        if gpus_per_client > (gpus := cuda.device_count()):  # Ray would wait for more GPUs forever
            raise ValueError(
                f"--gpus-per-client is {gpus_per_client}, but this machine has {gpus} GPUs"
            )


def read_request(arguments: list[str], methods: str, seeds: str, from_: Path | None) -> Experiment:
    """The experiment that arguments and options describe together.

    References that they name are allowed. Methods and seeds default to those of the runs in the
    folder `from_`. Raises ValueError for two experiments, and for one that includes others if all
    would start from one folder of runs."""
    from fedapps.settings.saved_configurations import saved_runs

    experiment = read_arguments(arguments, main=from_ is None)
    experiment |= Experiment(methods=methods, seeds=seeds)
    experiment.allow()
    if from_ is None:
        return experiment
    if experiment.include:
        raise ValueError("--from takes one experiment; run the included ones by themselves")
    methods, seeds = saved_runs(from_)
    return Experiment({"rounds": 0}, methods=methods, seeds=seeds) | experiment


def configured(
    experiment: Experiment, base: "Config | None" = None, changes: "Config | None" = None
) -> "tuple[Config, list[str]]":
    """The configuration that an experiment's runs share, and their labels: each method with each
    combination of the grid's values. `changes` of `base`, the defaults, replace the experiment's
    settings. Prints notes: about options that some runs do not read, and about own data.

    Raises ValueError for bad input. Of data, only a user's own are loaded."""
    from fedapps.settings.config import defaults, override, with_references
    from fedapps.settings.unread import check_companions, check_read, check_read_by_data
    from fedapps.settings.variants import OF_THE_APP, Variant, combinations
    from partitions import forget_changed

    forget_changed()  # a notebook's process lives on while its user changes files
    for key in OF_THE_APP.keys() & experiment.keys:
        raise ValueError(f"{key} is set by the command: use {OF_THE_APP[key]}")
    methods = split_names("methods", experiment.methods)
    # A common key also changes the sections of methods from outside the package.
    names = [Variant.parse(method).method for method in methods]
    config = with_references(base or defaults(), {"method": ",".join(names)})
    config = override(config, experiment.settings if changes is None else changes)
    # `override` raises for an unknown key and for a value out of range.
    for key, values in experiment.grid.items():
        for value in values:
            override(config, {key: value})
    if experiment.methods_by_default:
        names = _serving(names, config)
        methods = [method for method in methods if Variant.parse(method).method in names]
    labels = combinations(methods, experiment.grid, experiment.settings)
    for note in check_read(config, experiment.settings, labels, experiment.from_file):
        say(make_console(stderr=True), note)
    given = _without_undone(experiment.settings, config, base)
    check_companions(config, given, labels, experiment.from_file)
    runs = _runs_with_data(config, labels)
    for note in check_read_by_data(experiment.settings, runs, experiment.from_file):
        say(make_console(stderr=True), note)
    if base is None:
        infos = [info for _, info in runs]
        config = _suited_to_data(config, infos, experiment)
    return config, labels


def _runs_with_data(config: "Config", labels: Sequence[str]) -> "list[tuple[Config, Info]]":
    """By label the configuration and what its dataset is. Raises ValueError for an unknown
    partition rule or model."""
    from clients.models import MODELS
    from fedapps.settings.variants import Variant
    from partitions import task
    from partitions.datasets.loading import absolute_paths
    from partitions.rules.registry import PARTITIONS

    runs = []
    for label in labels:
        run_config = Variant.parse(label).apply(config)
        # As in the jobs: a second reading under another path would repeat the notes.
        runs.append((run_config, task(run_config | absolute_paths(run_config))))
        PARTITIONS.check(str(run_config["partition"]))
        MODELS.check(str(run_config["model"]))
    return runs


def _suited_to_data(config: "Config", infos: "Sequence[Info]", experiment: Experiment) -> "Config":
    """The configuration with the learning rate of the data's task and, for a user's own data, with
    their owners as clients, unless the experiment says otherwise. Prints what divides a user's own
    data."""
    from fedapps.settings.config import defaults
    from fedapps.settings.rates import with_rate_of_task

    for info in infos:
        config = with_rate_of_task(config, defaults(), experiment.keys, info.task)
    if infos[-1].inputs is None or "partition" in experiment.keys:
        return config
    if infos[-1].owner:
        config, text = _by_owner(config, infos[-1].owner, experiment)
    else:
        text = _default_partition(str(config["partition"]))
    say(make_console(stderr=True), text)
    return config


def _without_undone(settings: "Config", config: "Config", base: "Config | None") -> Collection[str]:
    """The keys of the settings, without those that only return the saved run `base` to a default:
    such a key is no mistake where the setting beside it is off."""
    from fedapps.settings.config import defaults

    if base is None:
        return settings
    by_default = defaults()
    given = []
    for key in settings:
        differs_from_base = key in base and base[key] != config[key]
        is_default = key in by_default and config[key] == by_default[key]
        if not (differs_from_base and is_default):
            given.append(key)
    return given


def _by_owner(config: "Config", owner: str, experiment: Experiment) -> "tuple[Config, str]":
    """The configuration where each client is an owner, whom the data's format names, and a sentence
    about it. Without a given num-clients there are at most as many clients as owners."""
    import numpy as np

    from fedapps.settings.config import override
    from partitions.datasets.loading import absolute_paths, configured

    changes: dict[str, str | int] = {"partition": "natural"}
    text = f"no partition is named, so each client is a {owner} (partition=natural)"
    owners = configured(config | absolute_paths(config)).columns[owner]
    _, counts = np.unique(owners, return_counts=True)
    able = int((counts >= int(config["partition.min-samples"])).sum())
    is_default = "num-clients" not in experiment.keys
    if not experiment.source and "num-clients" in experiment.from_file:
        is_default = True  # the main job's
    if is_default and 0 < able < int(config["num-clients"]):
        changes["num-clients"] = able
        text += f", of whom there are {able} (num-clients={able})"
    return override(config, changes), text


def _default_partition(rule: str) -> str:
    """What divides a user's own data where nobody said it."""
    return (
        f"no partition is named, so partition={rule} divides the data: each client gets a few "
        "classes; partition=iid deals the rows at random, partition=natural "
        "partition.column=NAME by a column that names their owners"
    )


def _serving(methods: list[str], config: "Config") -> list[str]:
    """Those of the `methods`, which nobody named, that serve the task of the data. Prints which
    ones do not."""
    from fedapps.common.tasks import CLASSES
    from partitions import task
    from partitions.datasets.loading import absolute_paths

    kind = task(config | absolute_paths(config)).task
    if kind == CLASSES:
        return methods
    from fedapps.methods import METHODS  # loads torch

    left_out = [name for name in methods if kind not in METHODS[name].served_tasks]
    if left_out:
        note = f"left out, since they do not serve task={kind}: {', '.join(left_out)}"
        say(make_console(stderr=True), note)
    return [name for name in methods if name not in left_out]


def _with_enough_clients(jobs: "list[Job]") -> "list[Job]":
    """Those whose methods, which nobody named, can have so few training clients. Prints which ones
    cannot."""
    from fedapps.methods import METHODS
    from fedapps.settings.config import construct

    left_out = set()
    for label, job in {job.method: job for job in jobs}.items():
        method = str(job.config["method"])
        count = _num_training_clients(job.config, method)
        strategy = construct(METHODS[method].strategy, config=job.config, method=method)
        try:
            strategy.check_training_clients(count)
        except ValueError as error:
            say(make_console(stderr=True), f"{label} is left out: {error}")
            left_out.add(label)
    return [job for job in jobs if job.method not in left_out]


def _num_training_clients(config: "Config", method: str) -> int:
    """How many clients train, by the federation of the configuration."""
    from fedapps.building import are_training

    return int(are_training(config, method).sum())


def plan(
    experiment: Experiment, output: Path, from_: Path | None, bound: bool, fresh: bool
) -> "list[Job]":
    """The runs of an experiment, checked. Raises ValueError for bad input."""
    from fedapps.settings.saved_configurations import run_folders, saved_configuration

    changes = dict(experiment.settings)
    if bound:
        changes["report-generalization-bound"] = True
    base = None if from_ is None else saved_configuration(run_folders(from_)[0])
    config, labels = configured(experiment, base, changes)
    seeds = parse_seeds(experiment.seeds or str(config["seed"]))

    # Torch is loaded from here on.
    from fedapps.results.folder import check_public, check_unseen
    from fedapps.results.published import Published
    from fedapps.saved import opening

    jobs = make_jobs(config | {"resume": not fresh}, labels, seeds, output)
    if experiment.methods_by_default:
        jobs = _with_enough_clients(jobs)
    with opening(from_) if from_ else nullcontext():
        if from_ is not None:
            start_from(from_, jobs, changes, output, fresh)
        _check_methods(jobs)
        for job in jobs:
            former = Path(str(job.config["from-dir"]))
            method = str(job.config["method"])
            if job.config["from-dir"] and (former / "config.toml").is_file():
                before = saved_configuration(former)
                check_unseen(former, before, job.config, method)
                check_public(former, before, job.config, method)
    replace_settings(jobs)
    if experiment.published:
        Published.read(experiment.settings, experiment.published)
    return jobs


def _check_methods(jobs: "list[Job]") -> None:
    """Raise ValueError for what `check` and `check_start` refuse. If there are several methods, the
    error names the method."""
    # One job of each method: those of other seeds differ in what is drawn alone.
    by_label = {job.method: job for job in jobs}
    for label, job in by_label.items():
        try:
            check(job.config)
            check_start(job.config)
        except ValueError as error:
            method = re.escape(str(job.config["method"]))
            is_named = re.search(rf"(?<![\w-]){method}(?![\w+-])", str(error))
            if is_named or len(by_label) == 1 or not is_sentence(error):
                raise
            raise ValueError(f"{label}: {error}") from error


def replace_settings(jobs: "list[Job]") -> None:
    """Replace the settings that the data of all runs of a label leave without effect, see
    `Client.settings_for`."""
    from fedapps.building import replaced_settings

    by_label: dict[str, list[Job]] = {}
    for job in jobs:
        by_label.setdefault(job.method, []).append(job)
    for of_label in by_label.values():
        changes = replaced_settings([job.config for job in of_label])
        for job in of_label:
            job.config |= changes


def make_jobs(
    config: "Config", labels: Sequence[str], seeds: Sequence[int], output: Path
) -> "list[Job]":
    """One job for each seed of each label: a method, perhaps with settings."""
    from fedapps.engines.jobs import Job
    from fedapps.settings.variants import Variant
    from partitions.datasets.loading import absolute_paths

    jobs: list[Job] = []
    for label in labels:
        variant = Variant.parse(label)
        applied = variant.apply(config)
        applied |= absolute_paths(applied)
        for seed in seeds:
            folder = output.resolve() / variant.folder(seed)
            changes: Config = {"seed": seed, "output-dir": str(folder)}
            jobs.append(Job(label, seed, applied | changes, folder))
    return jobs


def start_from(
    saved: Path, jobs: "list[Job]", changes: "Config", output: Path, fresh: bool
) -> None:
    """Let each job start from a run in the folder `saved`, by `Variant.former`."""
    from fedapps.results.folder import check_former
    from fedapps.results.sweep import finished
    from fedapps.settings.config import override
    from fedapps.settings.saved_configurations import saved_configuration
    from fedapps.settings.variants import Variant

    for job in jobs:
        folder = saved.resolve()
        if not (folder / "config.toml").is_file():  # it holds several runs
            folder /= Variant.parse(job.method).former(saved, job.seed)
        check_former(folder, job.method.split()[0])
        before = saved_configuration(folder)
        config = override(before, changes | {"from-dir": str(folder), "resume": not fresh})
        job.config = make_jobs(config, [job.method], [job.seed], output)[0].config
    for start in sorted({str(job.config["from-dir"]) for job in jobs}):
        if finished(Path(start)) is None:
            note = f"{start} has not finished: its best model so far is taken"
            say(make_console(stderr=True), note)
    for note in sorted(set(map(_private_before, jobs))):
        if note:
            say(make_console(stderr=True), note)


def _private_before(job: "Job") -> str:
    """A sentence if the run from which the job starts is private, and the job trains without
    privacy; else ""."""
    from fedapps.files import PRIVACY
    from fedapps.former_state import WITHOUT_EPSILON

    start = Path(str(job.config["from-dir"]))
    is_trained = bool(job.config["rounds"]) and job.config["dp"] == "none"
    if not is_trained or not (start / PRIVACY).is_file():
        return ""
    return WITHOUT_EPSILON.format(start)


@torch_defaults()
@one_thread()  # as in the run, which uses the arrays that are made here
def check(config: "Config") -> None:
    """Raise ValueError for every error in a configuration that can be known before a run."""
    from clients.models import sized
    from fedapps.building import (
        check_batches,
        check_takes,
        client_models,
        method_model,
        with_public,
    )
    from fedapps.clientapp import simulated_client
    from fedapps.methods import METHODS
    from fedapps.serverapp import check_run
    from fedapps.settings.config import check_method, construct
    from partitions import federation, task

    method = check_method(config["method"])
    check_task(config, method)
    check_tokens(config)
    privacy = check_run(config)
    strategy = construct(METHODS[method].strategy, config=config, method=method, privacy=privacy)
    networks = {str(config["model"]), *client_models(config)}
    if config["restrict-to-model"]:
        networks.add(sized(str(config["model"]), str(config["restrict-to-model"])))
    for network in networks:  # needs no data
        method_model(method, config | {"model": network}, task(config))
    # One client of each model size, and one that trains.
    num_clients = int(config["num-clients"])
    num_models = len(str(config["client-models"]).split(","))
    novel = federation(with_public(config, method)).novel
    strategy.check_training_clients(_num_training_clients(config, method))
    strategy.check_rounds(int(config["rounds"]), continues=bool(config["from-dir"]))
    training_client = int(novel.argmin())
    for client_id in {*range(min(num_models, num_clients)), training_client}:
        client = simulated_client(config, method, client_id)
        if task(config).inputs is not None:
            check_takes(client, config, task(config))
        if client_id == training_client and config["rounds"]:
            check_batches(client, config, method, task(config))
        client.check_own_code()


def check_task(config: "Config", method: str) -> None:
    """Raise ValueError for a task that the method does not serve, and for settings that read scores
    which the task does not have."""
    from clients.core.own_scores import load_scores
    from fedapps.common.tasks import AUTO, CLASSES, TASKS
    from fedapps.methods import check_serves, check_settings_serve
    from fedapps.settings.config import settings
    from partitions import task

    info = task(config)
    check_serves(method, info.task)
    check_settings_serve(method, settings(config, method), info.task)
    selected = str(config["selection-metric"])
    own = [name.removeprefix("-") for name in load_scores(str(config["scores"]))]
    known = (AUTO, "loss", *TASKS[info.task].scores, *own)
    if selected.removeprefix("-") not in known:
        raise ValueError(
            f"selection-metric is {selected!r}, which the task {info.task!r} of {info.name} does "
            f"not have; it has {', '.join(known)}"
        )
    if info.task != CLASSES and config["report-generalization-bound"]:
        raise ValueError(
            f"report-generalization-bound is a bound of the error of classes; the task of "
            f"{info.name} is {info.task!r}"
        )


def check_tokens(config: "Config") -> None:
    """Raise ValueError if inputs are tokens and the network is one of the package's that takes
    numbers, or fewer tokens; or if inputs are no tokens, and it takes these."""
    from clients.models.registry import NETWORKS
    from partitions import task
    from partitions.datasets.description import TOKENS

    info = task(config)
    model = str(config["model"])
    if model not in NETWORKS:
        return
    num_tokens = NETWORKS[model].num_tokens
    are_tokens = info.inputs is not None and info.inputs.kind == TOKENS
    if num_tokens and not are_tokens:
        raise ValueError(
            f"model {model!r} takes tokens, and {info.name} has {info.inputs_text}; set model to a "
            "network that takes them, or inputs=tokens if they are whole numbers that number words"
        )
    if not are_tokens or 0 < info.num_tokens <= num_tokens:
        return
    fitting = [name for name, other in NETWORKS.items() if info.num_tokens <= other.num_tokens]
    choices = f"set model to {', '.join(fitting)}, or" if fitting else "set model to"
    otherwise = ", or inputs=vector if the whole numbers are quantities"
    if info.inputs is not None and info.inputs.texts:
        otherwise = ""
    takes = f"tokens below {num_tokens}, not {info.num_tokens}" if num_tokens else "numbers"
    raise ValueError(
        f"inputs are tokens, and model is {model!r}, which takes {takes}; {choices} your "
        f"own network that begins with torch.nn.Embedding, as my_lab.nets:Words{otherwise}"
    )


@torch_defaults()
@one_thread()
def check_start(config: "Config") -> None:
    """Raise ValueError if the run in from-dir cannot be used: it is another method's and lacks the
    method's model, or has other data or another network."""
    from fedapps.building import strategy_of_run
    from fedapps.clientapp import simulated_client
    from fedapps.results.folder import takes_states
    from fedapps.saved import read_client_states, read_former

    if not config["from-dir"]:
        return
    folder = Path(str(config["from-dir"]))
    method = str(config["method"])
    former = read_former(folder)
    arrays = former["arrays"]
    states: dict[int, Arrays] = {}
    if takes_states(folder, method):
        states = read_client_states(folder)
    strategy, shared = strategy_of_run(config)
    try:
        strategy.check_state(former)
        strategy.restore(strategy.initialize(shared), arrays)
        for client_id in _clients_of_each_network(config, method, states):
            client = simulated_client(config, method, client_id)
            client.check_saved(arrays, states.get(client_id, {}))
    except (ValueError, RuntimeError) as error:  # torch's, for a network of other sizes
        raise ValueError(f"{method} cannot start from {folder}: {error}") from error


def _clients_of_each_network(
    config: "Config", method: str, states: "Mapping[int, Arrays]"
) -> list[int]:
    """One client of each network, if it can be one of those that have a state in a saved run."""
    from fedapps.building import client_model

    clients: dict[str, int] = {}  # by the name of the network
    num_clients = int(config["num-clients"])
    with_state = [client for client in sorted(states) if client < num_clients]
    for client in [*with_state, *range(num_clients)]:
        clients.setdefault(client_model(config, method, client), client)
    return list(clients.values())


def keep_or_discard(work: "list[Job]", output: Path, fresh: bool, yes: bool) -> None:
    """Mark finished runs as done; with `fedapps run --fresh` they are repeated."""
    from fedapps.files import check_writable
    from fedapps.results.sweep import finished, keep_finished

    check_writable(output)
    if not fresh:
        keep_finished(work)
        return
    if yes:
        return
    lost = [job.name for job in work if finished(job.folder)]
    if lost:
        lost_runs = f"{output} holds finished runs that will be lost: {', '.join(lost)}"
        typer.confirm(f"{lost_runs}. Go on?", abort=True)


def share_trainings(work: "list[Job]") -> None:
    """Let the unfinished runs of each folder that have the same training share it.

    A run that continues although its data or code have changed trains by itself: the rounds before
    are of the former ones."""
    from fedapps.trainings import training_folders

    by_output: dict[Path, list[Job]] = {}
    for job in work:
        if not job.done and not job.changed_file:
            by_output.setdefault(job.folder.parent, []).append(job)
    for output, jobs in by_output.items():
        folders = training_folders([job.config for job in jobs], output)
        for job, folder in zip(jobs, folders, strict=True):
            job.config["training-dir"] = folder


def trainings_lines(work: "list[Job]") -> list[str]:
    """Which of the unfinished runs share a training or take kept rounds, and why others that could
    share one do not."""
    from fedapps.methods import METHODS
    from fedapps.trainings import keeps_rounds, why_apart

    jobs = [job for job in work if not job.done]
    methods_of: dict[str, dict[str, None]] = {}  # by the training's folder
    apart: dict[str, dict[str, None]] = {}  # methods by the reason
    config_of: dict[str, Config] = {}  # of one of its runs, by the training's folder
    alone = 0
    for job in jobs:
        folder = str(job.config["training-dir"])
        if folder:
            methods_of.setdefault(folder, {})[job.method] = None
            config_of[folder] = job.config
            continue
        alone += 1
        reason = why_apart(job.config)
        if reason and METHODS[str(job.config["method"])].trains_as:
            apart.setdefault(reason, {})[job.method] = None
    lines = []
    groups = dict.fromkeys(", ".join(names) for names in methods_of.values() if len(names) > 1)
    if groups:
        each_once = len({job.config["method"] for job in jobs}) == len(jobs)
        noun = "methods" if each_once else "runs"
        trainings = len(methods_of) + alone
        counted = "1 training" if trainings == 1 else f"{trainings} trainings"
        sharing = "; ".join(f"{names} share one" for names in groups)
        lines.append(f"{len(jobs)} {noun}, {counted}: {sharing}")
    for folder, methods in methods_of.items():
        if keeps_rounds(config_of[folder]):
            lines.append(f"{', '.join(methods)}: rounds that are trained already are in {folder}")
    for reason, methods in apart.items():
        if len(methods) > 1:
            lines.append(f"{', '.join(methods)} train apart: {reason}")
    return lines


FEDERATION = ("dataset", "partition", "num-clients", "train-fraction", "rounds", "local-steps",
              "batch-size", "lr", "model", "evaluate-every")  # fmt: skip


def federation_line(work: "list[Job]") -> str:
    """The settings that all runs share or that make their results differ most, as key=value."""
    from fedapps.settings.config import effective
    from partitions.rules.registry import COMMON_OPTIONS, options_of

    keys = dict.fromkeys(FEDERATION)
    for job in work:
        options = sorted(set(options_of(job.config)) - set(COMMON_OPTIONS))
        keys |= dict.fromkeys(f"partition.{option}" for option in options)
    words = []
    for key in keys:
        values = dict.fromkeys(str(effective(job.config, key)) for job in work)
        words.append(f"{key}={','.join(values)}")
    return f"federation: {' '.join(words)}"


def data_line(work: "list[Job]") -> str:
    """What the users' own data hold, and how their inputs are scaled; "" for the package's data."""
    from fedapps.building import with_public
    from partitions import federation
    from partitions.datasets.loading import described

    config = work[0].config
    if described(config).inputs is None:
        return ""
    return f"data: {federation(with_public(config, str(config['method']))).line}"


def size_lines(work: "list[Job]") -> list[str]:
    """A line for each method whose clients have many more weights than its network."""
    from fedapps.building import size_note

    lines = []
    for job in one_of_each_method(work).values():
        note = size_note(job.config)
        if note:
            lines.append(note)
    return lines


def one_of_each_method(work: "list[Job]") -> "dict[str, Job]":
    """By method one job that is not done."""
    return {job.method: job for job in work if not job.done}


def caveat_lines(work: "list[Job]") -> list[str]:
    """What the methods say before they begin: of auto the candidates that its network lacks, and
    whether a saved network was trained on samples that a method holds out."""
    from fedapps.building import held_out_note, method_caveats

    methods_of: dict[str, list[str]] = {}  # by the note
    for method, job in one_of_each_method(work).items():
        notes = method_caveats(job.config)
        held_out = held_out_note(job.config)
        if held_out:
            notes.append(held_out)
        for note in notes:
            methods_of.setdefault(note, []).append(method)
    return [f"{', '.join(methods)}: {note}" for note, methods in methods_of.items()]


def prepare(console: Console, work: "list[Job]", output: Path, source: str) -> None:
    """Create the folder of results. Print the round at which each begun run continues, and the
    checkpoints that runs cannot resume from."""
    from fedapps.files import append_text, write_text
    from fedapps.settings.saved_configurations import COMMANDS, ORDER, ordered_names

    for job in work:
        if job.config["resume"] and not job.done:
            for line in _continuation(job):
                say(console, line)
    if not output.exists():
        write_text(output / ".gitignore", "*\n")  # neither git nor `flwr run` takes results
    if source:
        write_text(output / "experiment.toml", source)
    new = [f"{job.name}\n" for job in work if job.name not in ordered_names(output)]
    with suppress(OSError):  # without it rows are sorted by name; each run reports a full disk
        append_text(output / ORDER, "".join(new))
        append_text(output / COMMANDS, f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC: {invocation()}\n")


def _continuation(job: "Job") -> list[str]:
    """Why checkpoints of a job are refused, and at which round it continues; [] for a new one."""
    from fedapps.results.checkpoint import newest_checkpoint, next_round

    state, lines = newest_checkpoint(job.folder, job.config)
    if state is not None:
        number = next_round(state)
        if number > job.total:
            return [*lines, f"{job.name}: all {job.total} rounds are done; its results are written"]
        return [*lines, f"{job.name} continues at round {number} of {job.total}"]
    if lines or (job.folder / "metrics.jsonl").is_file():
        lines.append(f"{job.name} begins at round 1: it has no checkpoint to continue from")
    return lines


def say_stopped(console: Console, work: "list[Job]", output: Path) -> None:
    """Print where each unfinished run of an interrupted command continues, and the command."""
    from fedapps.common.external_code import named
    from fedapps.files import resume_command
    from fedapps.results.checkpoint import saved_round

    unfinished = [job for job in work if not job.done]
    for job in unfinished:
        if job.rounds:
            number = saved_round(job.folder) + 1
            say(console, f"{job.name}: stopped after round {job.rounds}, continues at {number}")
    references = named([job.config for job in unfinished])
    say(console, f"stopped; to continue: {resume_command(output, references)}")
