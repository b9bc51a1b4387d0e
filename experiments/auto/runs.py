"""The runs by which `auto` is judged, as the head of ``protocol.toml`` has them, one scenario after
another; finished ones are kept:

    python -m experiments.auto.runs judged --model mlp --seeds 100,101,102 --inputs 200

`--data` is mnist, fashion-mnist or digits. `--also` gives the corrections settings beside the
protocol's, such as ``auto.held-out=0``. Then ``python -m experiments.auto.judge RECORD judged/200``
makes the table."""

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import typer

from clients.core.decision.changes import IMAGE_CHANGES
from fedapps.commands.main import cli
from fedapps.settings.config import defaults, section_of
from fedapps.settings.experiments import read_experiment
from fedapps.settings.unread import is_read

# The scenarios and settings of each data.
PROTOCOLS = {
    "mnist": "auto/protocol",
    "fashion-mnist": "unseen/fashion-mnist",
    "digits": "unseen/digits",
}
NO_SHIFT = "unseen/inputs"  # of fewer inputs, which `novel-batch` is here
CORRUPTED = ("gaussian", "salt", "blur", "contrast", "brightness")
ROTATED = ("rotation", "shear")
# Changes that resemble a scenario's, which no played newcomer may have there.
LEFT_OUT = {
    "corruptions": CORRUPTED,
    "hybrid": CORRUPTED,
    "rotation-between": ROTATED,
    "rotation-beyond": ROTATED,
    "domain-inverted": ("inversion",),
    "domain-background": ("gradient", "occlusion"),
    "mix": ("gaussian", "salt", "blur", "inversion", "gradient", "occlusion", *ROTATED),
}
LEFT_OUT |= {
    "corruptions-small": CORRUPTED,
    "hybrid-small": CORRUPTED,
    "mix-small": (*LEFT_OUT["mix"], "contrast", "brightness"),
}
METHODS = ("fedavg", "auto", "bbse", "prior-em", "bn-adapt", "tent", "t3a")
# A network without normalisation layers, in which bn-adapt and tent have nothing to adapt.
PLAIN_NETWORK = "mlp"
METHODS_OF_PLAIN_NETWORK = ("fedavg", "auto", "bbse", "prior-em", "t3a")
# One batch, as auto has.
ALL_INPUTS = (
    "bbse.test-batch-size=0",
    "prior-em.test-batch-size=0",
    "bn-adapt.test-batch-size=0",
)
IN_PROCESS = ("--engine", "in-process")


class Scenario(NamedTuple):
    """An experiment of ``unseen/`` with one value for each of its settings; `swept` holds the
    settings for which the experiment lists several values."""

    experiment: str
    swept: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """``dirichlet-0.1``."""
        return "-".join([self.experiment, *(word.partition("=")[2] for word in self.swept)])


def scenarios(data: str) -> Iterator[Scenario]:
    """The scenarios of the data."""
    for included in read_experiment(PROTOCOLS[data]).include:
        if included == NO_SHIFT:
            continue
        grid = read_experiment(included).grid
        for values in product(*grid.values()):
            pairs = zip(grid, values, strict=True)
            swept = tuple(f"{key}={value}" for key, value in pairs)
            yield Scenario(included.removeprefix("unseen/"), swept)


def base_run(data: str, scenario: Scenario, model: str, seed: int, output: Path) -> list[str]:
    """The words of the command that trains the scenario's model, evaluated after the last round."""
    experiment = f"unseen/{scenario.experiment}"
    config = defaults() | read_experiment(experiment).settings
    given = read_experiment(PROTOCOLS[data]).settings
    settings = []
    for key, value in given.items():
        of_other_method = section_of(key) not in ("", "partition")
        if key not in ("model", "evaluate-every") and not of_other_method and is_read(key, config):
            settings.append(f"{key}={value}")
    settings += [f"evaluate-every={given['rounds']}", f"model={model}"]
    settings += [*scenario.swept, *changes(scenario)]
    words = ["run", experiment, *settings]
    folder = output / "base" / scenario.name
    return [*words, "--methods", "auto", "--seeds", str(seed), *IN_PROCESS, "--output", str(folder)]


def methods_for(model: str) -> tuple[str, ...]:
    """The methods that are compared with a network of this name."""
    return METHODS_OF_PLAIN_NETWORK if model == PLAIN_NETWORK else METHODS


def corrections(
    scenario: Scenario,
    methods: Sequence[str],
    seed: int,
    inputs: int,
    output: Path,
) -> list[str]:
    """The words of the command that corrects this model for clients with so many inputs."""
    batches = [word for word in ALL_INPUTS if section_of(word) in methods]
    trained = output / "base" / scenario.name / f"auto-seed{seed}"
    words = ["run", "--from", str(trained), f"novel-batch={inputs}", *batches, *changes(scenario)]
    folder = output / str(inputs) / scenario.name
    words += ["--methods", ",".join(methods), "--seeds", str(seed)]
    return [*words, *IN_PROCESS, "--output", str(folder)]


def changes(scenario: Scenario) -> Iterator[str]:
    """The setting of the changes that played newcomers may have, where some are left out."""
    left_out = LEFT_OUT.get(scenario.experiment, ())
    if left_out:
        yield "auto.changes=" + ",".join(name for name in IMAGE_CHANGES if name not in left_out)


def main(
    output: Path,
    data: str = "mnist",
    model: str = "convnet-atp",
    seeds: str = "100,101,102",
    inputs: str = "200,50,20",
    only: str = "",
    methods: str = "",
    also: str = "",
) -> None:
    """Carry out the runs. `only` names scenarios and `methods` those that correct, by commas;
    default: all. `also` holds further settings of these methods, by spaces."""
    if data not in PROTOCOLS:
        raise typer.BadParameter(f"--data is {data!r}; known: {', '.join(PROTOCOLS)}")
    command = typer.main.get_command(cli)
    compared = tuple(methods.split(",")) if methods else methods_for(model)
    for seed in map(int, seeds.split(",")):
        for scenario in scenarios(data):
            if only and scenario.name not in only.split(","):
                continue
            runs = [base_run(data, scenario, model, seed, output)]
            for number in map(int, inputs.split(",")):
                words = corrections(scenario, compared, seed, number, output)
                runs.append([*words, *also.split()])
            for words in runs:
                print("fedapps", *words, flush=True)
                if status := command.main(words, standalone_mode=False):
                    raise SystemExit(status)


if __name__ == "__main__":
    typer.run(main)
