"""What a client has given away under local privacy, counted by the client itself.

The server is whom local privacy is against, so that neither its run configuration nor its messages
decide how much a node gives. A node's own configuration is its policy, which no run weakens; a run
keeps the strictest terms that it ever told. Each new answer to a train message costs
μ² = (2C / σ)², C being the norm that the client clips at and σ the deviation that it adds; these
add up (see `strategies.accountant`). The message that was answered last gets the same answer again,
which costs nothing. What is counted and the answer are written before the answer leaves."""

import hashlib
import json
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.logger import log
from safetensors import SafetensorError, safe_open

from clients.arrays import Arrays, from_record, to_record
from clients.privacy import (
    COVERS,
    EVERYTHING,
    local_noise,
    private,
    promised_multiplier,
    settings_of,
)
from clients.protocol import RUN_TOKEN
from fedapps.files import locked, write_arrays
from fedapps.node.bridge import is_simulated
from fedapps.settings.config import CIRCUMSTANCES
from strategies.accountant import local_epsilon, local_loss

LEDGER, ANSWER = "privacy", "privacy.answer"  # keys of the node's state, of a file's metadata
ROUNDING = 1 + 1e-9  # of a sum of rounds that is just what was promised
TOKEN = 64  # letters of a run's token
POLICY = {"dp-epsilon": 0.0, "dp-delta": 0.00001, "dp-clip": math.inf}  # what a node may set


@dataclass(frozen=True)
class Policy:
    """What a node allows any run: ε(δ) of all its answers (0: what each run promises), the norm
    that it clips at, at most, and what must be covered."""

    epsilon: float
    delta: float
    clip: float
    covers: str


def policy_of(node: Mapping[str, Any]) -> Policy | None:
    """The policy in a node's configuration, if it has one. Raises ValueError for a bad one."""
    found = {key: node[key] for key in node if key == "dp" or key.startswith("dp-")}
    if not found:
        return None
    if unknown := sorted(found.keys() - {"dp", "dp-covers", *POLICY}):
        known = ", ".join(("dp", "dp-covers", *POLICY))
        raise ValueError(f"the node's configuration has {unknown[0]!r}; known: {known}")
    if (mode := found.get("dp", "local")) != "local":
        raise ValueError(f"the node's dp is {mode!r}; it must be 'local', or not be there")
    if (covers := str(found.get("dp-covers", EVERYTHING))) not in COVERS:
        raise ValueError(f"the node's dp-covers is {covers!r}; known: {', '.join(COVERS)}")
    values = {key: float(found.get(key, default)) for key, default in POLICY.items()}
    for key, value in values.items():
        if key in found and not (0 < value < (1 if key == "dp-delta" else math.inf)):
            raise ValueError(f"the node's {key} is {found[key]}; it must be positive and finite")
    if values["dp-epsilon"] and "state-dir" not in node:
        raise ValueError(
            "the node's dp-epsilon holds for all runs, but its configuration names no state-dir, "
            "where it counts what they spent"
        )
    return Policy(values["dp-epsilon"], values["dp-delta"], values["dp-clip"], covers)


@dataclass
class Ledger:
    """What a client has spent: by run, its strictest terms and the μ² `spent`; and the digest of
    the message last answered."""

    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    question: str = ""
    names: list[str] = field(default_factory=list)  # of the answer's arrays, in their order

    def strictest(self, run: str, terms: Mapping[str, Any]) -> dict[str, Any]:
        """The terms of the run, where it told others before."""
        entry = self.runs.get(run)
        if entry is None:
            return dict(terms)
        return {
            "limit": min(entry["limit"], terms["limit"]),
            "delta": entry["delta"],
            "clip": min(entry["clip"], terms["clip"]),
            "covers": terms["covers"] if entry["covers"] == terms["covers"] else EVERYTHING,
        }

    def charge(
        self, run: str, terms: Mapping[str, Any], cost: float, policy: Policy | None
    ) -> None:
        """Count an answer to the run. Raises ValueError if that is more than it or the policy
        allows."""
        terms = self.strictest(run, terms)
        before = self.runs.get(run, {"spent": 0.0})["spent"]
        if before + cost > terms["limit"] * ROUNDING:
            most = local_epsilon(terms["limit"], terms["delta"])
            raise _exceeded("that this run promised", before, cost, most, terms["delta"])
        total = sum(entry["spent"] for entry in self.runs.values())
        if policy and policy.epsilon and local_epsilon(total + cost, policy.delta) > policy.epsilon:
            raise _exceeded("of this node for all runs", total, cost, policy.epsilon, policy.delta)
        self.runs[run] = {**terms, "spent": before + cost}


def _exceeded(where: str, spent: float, cost: float, most: float, delta: float) -> ValueError:
    before, after = (local_epsilon(loss, delta) for loss in (spent, spent + cost))
    return ValueError(
        f"this client has spent ε = {before:.4g} at δ = {delta:g}; another answer makes it "
        f"{after:.4g}, and the limit {where} is {most:.4g}"
    )


def guarded(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Flower mod for every message: `private`, by the strictest terms of node and run, whose
    answers the client counts. A simulated client without a policy trusts the run that it is in.

    Raises ValueError, which reaches the server as an error reply, for what these do not allow."""
    policy, options = policy_of(context.node_config), context.run_config
    if policy is None and is_simulated(context):
        return private(message, context, call_next)
    ledger, _ = read_ledger(context)
    told = str(settings_of(message).get(RUN_TOKEN, "")) or f"run {context.run_id}"
    run, mode = told[:TOKEN], options.get("dp", "none")
    if mode != "local" and (policy or run in ledger.runs):
        since = "this node's own policy" if policy else "what this run began with"
        raise ValueError(f"the run's dp is {mode!r}, but 'local' is {since}")
    if mode != "local":
        return private(message, context, call_next)
    terms = ledger.strictest(run, terms_of(options, policy))
    effective = {**options, "dp-clip": terms["clip"], "dp-covers": terms["covers"]}
    if message.metadata.message_type != "train":
        return private(message, context, call_next, effective)
    question = digest(message, options)
    ledger, known = read_ledger(context, question)
    if known is None:
        cost = local_loss(local_noise(message, effective) / terms["clip"])
        ledger.charge(run, terms, cost, policy)  # refuses before anything is trained
        reply = private(message, context, call_next, effective)
        (record,) = reply.content.array_records.values()
        with alone(context):
            ledger, known = read_ledger(context, question)  # perhaps of another process meanwhile
            if known is None:
                ledger.charge(run, terms, cost, policy)
                ledger.question, known = question, from_record(record)
                write_ledger(context, ledger, known)
    content = RecordDict({"arrays": to_record(known)})
    content["metrics"] = MetricRecord({"num-examples": 1})
    return Message(content, reply_to=message)


def terms_of(options: Mapping[str, Any], policy: Policy | None) -> dict[str, Any]:
    """What a run promises, within the node's policy. Raises ValueError for what is no promise."""
    clip, delta = float(options["dp-clip"]), float(options["dp-delta"])
    given = [float(options[key]) for key in ("dp-epsilon", "dp-noise-multiplier")]
    if not (0 < clip < math.inf and 0 < delta < 1 and min(given) == 0 < max(given) < math.inf):
        raise ValueError(
            f"the run's dp-clip is {clip}, dp-delta {delta}, dp-epsilon and dp-noise-multiplier "
            f"{given}: that promises no privacy"
        )
    covers, generator = str(options["dp-covers"]), str(options["dp-generator"])
    if policy and generator != "system":
        raise ValueError(f"dp-generator is {generator!r}, but this node draws noise by 'system'")
    limit = int(options["rounds"]) * local_loss(promised_multiplier(options))
    weak = covers != EVERYTHING and (policy is None or policy.covers != EVERYTHING)
    return {
        "limit": limit,
        "delta": delta,
        "clip": min(clip, policy.clip) if policy else clip,
        "covers": covers if weak else EVERYTHING,
    }


def digest(message: Message, options: Mapping[str, Any]) -> str:
    """What tells one question from another: all that decides the answer."""
    run = {key: value for key, value in options.items() if key not in CIRCUMSTANCES}
    told = [sorted(settings_of(message).items()), sorted(run.items())]
    found = hashlib.sha256(repr(told).encode())
    for key, record in sorted(message.content.array_records.items()):
        for name, array in record.items():
            found.update(repr((key, name, len(array.data))).encode() + array.data)
    return found.hexdigest()


# Where it is kept


def ledger_file(context: Context) -> Path | None:
    """The file in the node's state-dir, None if it has none. The server decides a node's id, so
    that it is no part of the name."""
    node = context.node_config
    if "state-dir" not in node:
        return None
    client = f"-{node['partition-id']}" if "partition-id" in node else ""
    return Path(str(node["state-dir"])) / f"privacy{client}.safetensors"


def alone(context: Context) -> AbstractContextManager[None]:
    """No other process counts for the node meanwhile."""
    file = ledger_file(context)
    if file is None:
        return nullcontext()
    file.parent.mkdir(parents=True, exist_ok=True)
    return locked(file.parent, wait=True)


def read_ledger(context: Context, question: str = "") -> tuple[Ledger, Arrays | None]:
    """What the client has spent, and the answer to the `question` if that was asked last.

    Raises ValueError for a file that is damaged."""
    file = ledger_file(context)
    if file is None:
        record = context.state.config_records.get(LEDGER)
        ledger = Ledger(**json.loads(str(record["json"]))) if record else Ledger()
        asked = question and ledger.question == question
        return ledger, from_record(context.state.array_records[ANSWER]) if asked else None
    if not file.is_file():
        return Ledger(), None
    try:
        with safe_open(file, "numpy") as content:
            ledger = Ledger(**json.loads(content.metadata()[LEDGER]))
            asked = question and ledger.question == question
            return ledger, {n: content.get_tensor(n) for n in ledger.names} if asked else None
    except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{file} is damaged ({error!r}); without what it counted this client answers nothing"
        ) from error


def write_ledger(context: Context, ledger: Ledger, answer: Arrays) -> None:
    """Keep what is spent and the last answer, together. Raises OSError where that fails."""
    file, ledger.names = ledger_file(context), list(answer)
    told = json.dumps(vars(ledger))
    if file is not None:
        write_arrays(file, answer, {LEDGER: told})
        return
    if LEDGER not in context.state:
        log(
            WARNING,
            "the node has no state-dir: what dp 'local' has spent is counted for this run alone, "
            "until the SuperNode ends",
        )
    context.state[LEDGER] = ConfigRecord({"json": told})
    context.state[ANSWER] = to_record(answer)
