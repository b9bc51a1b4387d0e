"""One lying client of ten, as a table: accuracy of training clients after the last round.

    python -m experiments.attacks run FILE [--methods fedavg,afl] [--partitions iid] [--seeds 0]
    python -m experiments.attacks table BEFORE AFTER

`run` adds the runs that FILE lacks, a line each. `table` prints two such files as Markdown. The
embedded digits, 20 clients, half of them in training, 30 rounds of 5 local steps,
with `protect`. `--more` has other settings; with more clients, `--liars` is more than one."""

import json
import logging
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean

import numpy as np
import typer
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp

from clients.core.arrays import Arrays, from_record, is_statistic, to_record
from clients.core.client import Client
from clients.core.protocol import NUM_EXAMPLES, SERVER_ROUND
from fedapps.clientapp import make_client
from fedapps.common.seeds import seed_of
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.methods import METHODS
from fedapps.node.bridge import register, reply_of
from fedapps.node.context import method_of
from fedapps.results.gains import HARM
from fedapps.serverapp import run
from fedapps.settings.config import Config, defaults, parse_override

NONE = "none"
ATTACKS = {
    "flip": "the change of the model with the sign flipped, times ten",
    "samples": "the same, of a client that claims 99 times its samples",
    "random": "a random change, a hundred times as long as the honest one",
    "risk": "`flip`, with a risk and a loss of a million",
    "control": "control variates and the replies to exchanges with the sign flipped, times ten; of "
    "a method without either, training on labels in reverse order",
    "permuted": "confusion matrices, and sums of inner values by class, in which each class is "
    "taken for the next one, 99 times",
    "counts": "label counts and confusion matrices of the first class alone, 99 times",
}
# Attacks on counts, of methods that send some.
ON_COUNTS = ("permuted", "counts")
COUNT_EXCHANGES = ("query.confusion", "query.labels", "query.moments")
COUNTS = ("confusion", "labels", "counts")  # arrays of these exchanges
SUMS = "sums"  # array of query.moments: sums of inner values by class
SMALL: Config = {"local-steps": 5, "evaluate-every": 30, "protect": True}
NEEDS: dict[str, Config] = {m: {"model": "convnet-bn"} for m in ("fedbn", "bn-adapt")}
Key = tuple[str, str, int, str]  # method, partition, seed, attack
cli = typer.Typer(help="One lying client of ten.", no_args_is_help=True, add_completion=False)


class Liar:
    """A ClientApp whose first training clients to answer, `count` of them, lie in all replies."""

    def __init__(self, method: str, attack: str, seed: int, count: int = 1) -> None:
        entry = METHODS[method]
        self.attack = attack
        self.seed = seed
        self.count = count
        self.nodes: set[int] = set()  # ids of the liars' nodes
        self.round = 0  # of the last message
        self.novel: set[int] = set()  # ids of novel clients' nodes
        # What novel clients gain by what they chose without labels, in points; by node, at last.
        self.gains: dict[int, float] = {}
        requires = entry.strategy.requires
        has_controls = requires is not None and "control/" in requires.groups
        self.flips_labels = not (entry.client.exchanges or has_controls)
        self.app = ClientApp()
        for action in ("query", "train", "evaluate", *entry.client.exchanges):
            register(self.app, action, self.answer)

    def client(self, context: Context, method: str) -> Client:
        """The node's client."""
        client = make_client(context, method)
        lies = context.node_id in self.nodes
        if lies and self.attack == "control" and self.flips_labels:
            train = client.share.train
            client.share = replace(client.share, train=replace(train, y=train.y.max() - train.y))
        return client

    def answer(self, message: Message, context: Context) -> Message:
        """The reply of the node's client, falsified if it is a liar's."""
        client = self.client(context, method_of(message, context))
        reply = reply_of(client, message, context)
        kind = message.metadata.message_type
        for record in message.content.config_records.values():
            self.round = int(str(record.get(SERVER_ROUND, self.round)))
        if kind == "query":
            if reply.content["properties"]["novel"]:
                self.novel.add(context.node_id)
            elif len(self.nodes) < self.count:
                self.nodes.add(context.node_id)
        if kind == "evaluate" and context.node_id in self.novel:
            self.note_gain(context.node_id, reply)
        if context.node_id in self.nodes and kind != "evaluate" and self.attack != NONE:
            self.falsify(kind, message, reply)
        return reply

    def note_gain(self, node: int, reply: Message) -> None:
        """Keep what a novel client gains, if its method says how it does without its choice."""
        for metrics in reply.content.metric_records.values():
            if "base-accuracy" in metrics:
                gain = float(str(metrics["accuracy"])) - float(str(metrics["base-accuracy"]))
                self.gains[node] = 100 * gain

    def falsify(self, kind: str, message: Message, reply: Message) -> None:
        """Make the reply a lie."""
        sent: Arrays = {}
        for record in message.content.array_records.values():
            sent |= from_record(record)
        for key, part in reply.content.items():
            if isinstance(part, ArrayRecord):
                reply.content[key] = to_record(self.false_arrays(kind, sent, from_record(part)))
            elif self.attack == "samples" and NUM_EXAMPLES in part:
                part[NUM_EXAMPLES] = 99 * int(str(part[NUM_EXAMPLES]))
            elif self.attack == "risk" and kind == "train":
                part.update({name: 1e6 for name in ("risk", "loss") if name in part})

    def false_arrays(self, kind: str, sent: Arrays, arrays: Arrays) -> Arrays:
        """The arrays of a false reply to a message of this kind that held the arrays `sent`."""
        draws = np.random.default_rng(seed_of(self.seed, "lie"))
        result = dict(arrays)
        if self.attack in ON_COUNTS:
            if kind not in COUNT_EXCHANGES:
                return result
            for name in COUNTS:
                if name in arrays:
                    result[name] = false_counts(arrays[name], self.attack)
            if self.attack == "permuted" and SUMS in arrays:
                result["counts"] = 99 * arrays["counts"]
                result[SUMS] = 99 * np.roll(arrays[SUMS], 1, axis=0)
            return result
        for name, y in arrays.items():
            if kind == "train" and not name.startswith("control/"):
                falsified = self.attack != "control"
            else:
                falsified = self.attack in ("control", "random")
            if not falsified or is_statistic(name, y):
                continue
            x = sent.get(name)
            # A reply that is no changed copy of what was sent is itself the change.
            if x is None or x.shape != y.shape or kind != "train":
                x = np.zeros_like(y)
            change = -10 * (y - x)
            if self.attack == "random":
                noise = draws.standard_normal(y.shape)
                length = max(float(np.linalg.norm(noise)), 1e-12)
                change = 100 * float(np.linalg.norm(y - x)) / length * noise
            result[name] = np.asarray(x + change, y.dtype)
        return result


def false_counts(counts: np.ndarray, attack: str) -> np.ndarray:
    """Counts (C,) by label or (C, C) by predicted class and label, falsified."""
    if attack == "permuted":
        return 99 * np.roll(counts, 1, axis=0) if counts.ndim == 2 else counts
    false = np.zeros_like(counts)
    false[..., 0] = 99 * counts.sum(-1)
    if counts.ndim == 1:
        false[0] = 99 * counts.sum()
    return false


def attacks_on(method: str) -> list[str]:
    """No attack, and those that the method's replies allow."""
    counts = any(kind in METHODS[method].client.exchanges for kind in COUNT_EXCHANGES)
    return [NONE, *(attack for attack in ATTACKS if counts or attack not in ON_COUNTS)]


def attacked(method: str, attack: str, config: Config, liars: int = 1) -> dict[str, object]:
    """The last accuracy of training and of novel clients in %, and the share of novel clients that
    their choices without labels harm; or the error that ends the run."""
    config = defaults() | NEEDS.get(method, {}) | config | {"method": method}
    liar = Liar(method, attack, int(config["seed"]), liars)
    grid = InProcessGrid.simulation(liar.app, config, int(config["num-clients"]))
    try:
        scores = run(grid, config, "deployment").evaluate_metrics_clientapp
    except RuntimeError as error:
        return {"error": str(error)[:200], "round": liar.round}
    accuracy = scores[max(scores)]["train-accuracy"]
    assert isinstance(accuracy, float)
    novel = scores[max(scores)]["novel-accuracy"]
    assert isinstance(novel, float)
    line: dict[str, object] = {"accuracy": 100 * accuracy, "novel": 100 * novel}
    if liar.gains:
        gains = list(liar.gains.values())
        line["gain"] = mean(gains)
        line["harmed"] = 100 * sum(gain < HARM for gain in gains) / len(gains)
    return line


def finished(file: Path) -> dict[Key, dict[str, object]]:
    """The runs in a file."""
    runs: dict[Key, dict[str, object]] = {}
    if not file.exists():
        return runs
    for line in file.read_text("utf-8").splitlines():
        run = json.loads(line)
        runs[run["method"], run["partition"], run["seed"], run["attack"]] = run
    return runs


@cli.command("run")
def run_missing(
    file: Path,
    methods: str = "fedavg,scaffold,afl,fedtta++",
    partitions: str = "iid",
    seeds: str = "0,1,2",
    attacks: str = ",".join([NONE, *ATTACKS]),
    protect: bool = True,
    liars: int = 1,
    more: str = "",
) -> None:
    """Add to the file the runs that it lacks. `more` are further settings, key=value, by spaces."""
    if liars < 1:
        raise typer.BadParameter(f"--liars is {liars}; it must be at least 1")
    done = finished(file)
    wanted = attacks.split(",")
    further = dict(map(parse_override, more.split()))
    cells = product(seeds.split(","), partitions.split(","), methods.split(","), wanted)
    for seed, partition, method, attack in cells:
        if (method, partition, int(seed), attack) in done or attack not in attacks_on(method):
            continue
        cell: Config = {"partition": partition, "seed": int(seed), "protect": protect, **further}
        line: dict[str, object] = {"method": method, "attack": attack, **cell}
        line |= attacked(method, attack, SMALL | cell, liars)
        # After each run, so that a stopped command goes on where it was.
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")


def over_seeds(
    runs: dict[Key, dict[str, object]], method: str, partition: str, attack: str
) -> list[dict[str, object]]:
    """The runs of one cell of the table, one for each seed."""
    return [
        run
        for run in runs.values()
        if (run["method"], run["partition"], run["attack"]) == (method, partition, attack)
    ]


def shown(runs: list[dict[str, object]], score: str = "accuracy") -> str:
    """Mean accuracy over the seeds, or the round in which the first run ends."""
    ends = [int(str(run["round"])) for run in runs if "error" in run]
    if ends:
        return f"ends at {min(ends)}"
    if not runs:
        return "?"
    accuracy = mean(float(str(run[score])) for run in runs)
    return f"{accuracy:.1f}"


@cli.command("table")
def print_table(before: Path, after: Path, novel: bool = False) -> None:
    """Markdown: a row for each method and partition, cells "before → after"; with --novel of novel
    clients. Columns are the attacks that a file has."""
    old = finished(before)
    new = finished(after)
    score = "novel" if novel else "accuracy"
    present = {attack for *_, attack in (*old, *new)}
    columns = [attack for attack in (NONE, *ATTACKS) if attack in present]
    print(f"| method | partition | {' | '.join(columns)} | seeds |")
    print("|---" * (3 + len(columns)) + "|")
    seeds_of: dict[tuple[str, str], set[int]] = {}  # by method and partition
    for method, partition, seed, _ in new:
        seeds_of.setdefault((method, partition), set()).add(seed)
    for (method, partition), seeds in seeds_of.items():
        cells = []
        for attack in columns:
            old_runs = over_seeds(old, method, partition, attack)
            new_runs = over_seeds(new, method, partition, attack)
            cells.append(f"{shown(old_runs, score)} → {shown(new_runs, score)}")
        print(f"| {method} | {partition} | {' | '.join(cells)} | {len(seeds)} |")


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.ERROR)
    cli()
