"""The client's own count of what it has revealed under local privacy.

Local privacy protects against the server, so neither the run's configuration nor a message decides
how much a node reveals. A node's configuration is its policy, which no run weakens; a run keeps the
strictest terms that it ever promised. Each new answer to a train message costs μ² = (2C / σ)²,
where the client clips to norm C and adds noise of deviation σ; costs add up (see
`strategies.core.accountant`). A repeated message gets the last answer again, at no cost. Count and
answer are stored before the answer leaves."""

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
from flwr.common.logger import log
from safetensors import SafetensorError, safe_open

from clients.core.arrays import Arrays, from_record, to_record
from clients.core.privacy import (
    COVERS,
    EVERYTHING,
    check_covered,
    local_noise,
    private,
    promised_multiplier,
    settings_of,
)
from clients.core.protocol import NUM_EXAMPLES, RUN_TOKEN
from fedapps.common.errors import Refusal
from fedapps.files import locked, write_arrays
from fedapps.node.context import is_simulated
from fedapps.settings.saved_configurations import CIRCUMSTANCES
from strategies.core.accountant import local_epsilon, local_loss

LEDGER, ANSWER = "privacy", "privacy.answer"  # keys of the node's state and of a file's metadata
ROUNDING = 1 + 1e-9  # tolerance of a sum that equals the promise
MAX_TOKEN = 64  # characters of a run's token
POLICY = {"dp-epsilon": 0.0, "dp-delta": 0.00001, "dp-clip": math.inf}  # a node's numbers


@dataclass(frozen=True)
class Policy:
    """What a node allows any run: ε(δ) of all its answers (0: each run's promise), the largest
    norm to clip to, and what ε must cover."""

    epsilon: float
    delta: float
    clip: float
    covers: str


def policy_of(node: Mapping[str, Any]) -> Policy | None:
    """The policy in a node's configuration, if it has one. Raises ValueError for a bad one."""
    keys = {key: node[key] for key in node if key == "dp" or key.startswith("dp-")}
    if not keys:
        return None
    # A misspelt key would be a policy that the node only seems to have.
    unknown = sorted(keys.keys() - {"dp", "dp-covers", *POLICY})
    if unknown:
        known = ", ".join(("dp", "dp-covers", *POLICY))
        raise Refusal(f"the node's configuration has {unknown[0]!r}; known: {known}")
    mode = keys.get("dp", "local")
    if mode != "local":
        raise Refusal(f"the node's dp is {mode!r}; it must be 'local', or not be there")
    covers = str(keys.get("dp-covers", EVERYTHING))
    if covers not in COVERS:
        raise Refusal(f"the node's dp-covers is {covers!r}; known: {', '.join(COVERS)}")
    values = {}
    for key, default in POLICY.items():
        value = float(keys.get(key, default))
        values[key] = value
        # Defaults may lie outside: they stand for no limit.
        limit = 1 if key == "dp-delta" else math.inf
        if key in keys and not 0 < value < limit:
            raise Refusal(f"the node's {key} is {keys[key]}; it must be positive and finite")
    if values["dp-epsilon"] and "state-dir" not in node:
        raise Refusal(
            "the node's dp-epsilon holds for all runs, but its configuration names no state-dir, "
            "where it counts what they spend"
        )
    return Policy(values["dp-epsilon"], values["dp-delta"], values["dp-clip"], covers)


@dataclass
class Ledger:
    """The strictest terms and the `spent` μ² of each run, and the last answered message."""

    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    question: str = ""  # digest of the last answered message
    names: list[str] = field(default_factory=list)  # of the last answer's arrays, in order

    def strictest(self, run: str, terms: Mapping[str, Any]) -> dict[str, Any]:
        """The strictest of `terms` and of those that the run promised before."""
        entry = self.runs.get(run)
        if entry is None:
            return dict(terms)
        covers = terms["covers"]
        if entry["covers"] != covers:
            covers = EVERYTHING
        return {
            "limit": min(entry["limit"], terms["limit"]),
            "delta": entry["delta"],  # the limit is a sum of μ², which holds at each δ
            "clip": min(entry["clip"], terms["clip"]),
            "covers": covers,
        }

    def charge(
        self, run: str, terms: Mapping[str, Any], cost: float, policy: Policy | None
    ) -> None:
        """Count an answer to the run. Raises ValueError if the run's promise or the policy is
        exceeded."""
        terms = self.strictest(run, terms)
        before = self.runs.get(run, {"spent": 0.0})["spent"]
        if before + cost > terms["limit"] * ROUNDING:
            most = local_epsilon(terms["limit"], terms["delta"])
            raise _exceeded("that this run promised", before, cost, most, terms["delta"])
        # Without an ε of the node each run has its own promise.
        if policy is not None and policy.epsilon > 0:
            total = sum(entry["spent"] for entry in self.runs.values())
            if local_epsilon(total + cost, policy.delta) > policy.epsilon:
                where = "of this node for all runs"
                raise _exceeded(where, total, cost, policy.epsilon, policy.delta)
        self.runs[run] = {**terms, "spent": before + cost}


def _exceeded(where: str, spent: float, cost: float, most: float, delta: float) -> Refusal:
    before = local_epsilon(spent, delta)
    after = local_epsilon(spent + cost, delta)
    return Refusal(
        f"this client has spent ε = {before:.4g} at δ = {delta:g}; another answer makes it "
        f"{after:.4g}, and the limit {where} is {most:.4g}"
    )


@dataclass(frozen=True)
class Charge:
    """What the answer to a train message costs: μ² of the run's `promise`, under the digest of the
    message."""

    run: str
    promise: Mapping[str, Any]
    cost: float
    policy: Policy | None
    question: str

    def count(self, ledger: Ledger) -> None:
        """Count the answer. Raises ValueError as `Ledger.charge`."""
        ledger.charge(self.run, self.promise, self.cost, self.policy)


@dataclass(frozen=True)
class Terms:
    """Under which the client answers a message: the run's `options`, no weaker than those of the
    node's policy, what the answer costs, if it is counted, and the answer that was given before."""

    options: Mapping[str, Any]
    charge: Charge | None = None
    given: Message | None = None


def agreed_terms(message: Message, context: Context) -> Terms:
    """The strictest terms of node and run. A simulated client without a policy trusts its run.

    Raises ValueError, an error reply to the server, for messages that the terms do not allow."""
    policy = policy_of(context.node_config)
    options = context.run_config
    if policy is None and is_simulated(context):
        check_covered(message, options)
        return Terms(options)
    ledger, _ = read_ledger(context)
    # A resumed run has another id, but the same token. Other programs' servers send none.
    token = str(settings_of(message).get(RUN_TOKEN, "")) or f"run {context.run_id}"
    run = token[:MAX_TOKEN]
    mode = options.get("dp", "none")
    if mode != "local":
        if policy or run in ledger.runs:
            since = "this node's own policy" if policy else "what this run began with"
            raise Refusal(f"the run's dp is {mode!r}, but 'local' is {since}")
        check_covered(message, options)
        return Terms(options)
    promise = ledger.strictest(run, promise_of(options, policy))
    effective = {**options, "dp-clip": promise["clip"], "dp-covers": promise["covers"]}
    check_covered(message, effective)
    if message.metadata.message_type != "train":
        return Terms(effective)
    question = digest(message, options)
    ledger, answer = read_ledger(context, question)
    if answer is not None:
        return Terms(effective, given=_reply(answer, message))
    cost = local_loss(local_noise(message, effective) / promise["clip"])
    charge = Charge(run, promise, cost, policy, question)
    charge.count(ledger)  # raises before the client trains
    return Terms(effective, charge)


def protected(reply: Message, message: Message, context: Context, terms: Terms) -> Message:
    """The client's reply within the `terms`. An answer that costs something is counted and stored
    first."""
    reply = private(reply, message, context, terms.options)
    charge = terms.charge
    if charge is None:
        return reply
    (record,) = reply.content.array_records.values()
    # The lock is not held while the client trains. Meanwhile another process may have answered, or
    # spent what was left: the ledger is read and charged again.
    with ledger_lock(context):
        ledger, answer = read_ledger(context, charge.question)
        if answer is None:
            charge.count(ledger)
            ledger.question = charge.question
            answer = from_record(record)
            write_ledger(context, ledger, answer)
    return _reply(answer, message)


def _reply(answer: Arrays, message: Message) -> Message:
    """A counted answer. As in `private`, the number of samples is not revealed."""
    content = RecordDict({"arrays": to_record(answer)})
    content["metrics"] = MetricRecord({NUM_EXAMPLES: 1})
    return Message(content, reply_to=message)


def promise_of(options: Mapping[str, Any], policy: Policy | None) -> dict[str, Any]:
    """The run's promise, within the node's policy. Raises ValueError if it promises no privacy."""
    clip = float(options["dp-clip"])
    delta = float(options["dp-delta"])
    epsilon = float(options["dp-epsilon"])
    multiplier = float(options["dp-noise-multiplier"])
    # One of the two sets the noise, the other one is 0.
    valid = min(epsilon, multiplier) == 0 < max(epsilon, multiplier) < math.inf
    if not (valid and 0 < clip < math.inf and 0 < delta < 1):
        raise Refusal(
            f"the run's dp-clip is {clip}, dp-delta {delta}, dp-epsilon and dp-noise-multiplier "
            f"{[epsilon, multiplier]}: that promises no privacy"
        )
    generator = str(options["dp-generator"])
    covers = str(options["dp-covers"])
    if policy is not None:
        if generator != "system":
            raise Refusal(f"dp-generator is {generator!r}, but this node draws noise by 'system'")
        # The stricter of the run and the node counts.
        clip = min(clip, policy.clip)
        if policy.covers == EVERYTHING:
            covers = EVERYTHING
    return {
        "limit": int(options["rounds"]) * local_loss(promised_multiplier(options)),
        "delta": delta,
        "clip": clip,
        "covers": covers,
    }


def digest(message: Message, options: Mapping[str, Any]) -> str:
    """A digest of everything that decides the answer to a message."""
    # A run that is resumed with another timeout asks the same question.
    run = {key: value for key, value in options.items() if key not in CIRCUMSTANCES}
    settings = [sorted(settings_of(message).items()), sorted(run.items())]
    result = hashlib.sha256(repr(settings).encode())
    for key, record in sorted(message.content.array_records.items()):
        for name, array in record.items():
            result.update(repr((key, name, len(array.data))).encode() + array.data)
    return result.hexdigest()


def ledger_file(context: Context) -> Path | None:
    """The file in the node's state-dir, None without one. Its name does not contain the node's id,
    which the server decides."""
    node = context.node_config
    if "state-dir" not in node:
        return None
    client = f"-{node['partition-id']}" if "partition-id" in node else ""
    return Path(str(node["state-dir"])) / f"privacy{client}.safetensors"


def ledger_lock(context: Context) -> AbstractContextManager[None]:
    """While it is held, no other process writes the node's ledger."""
    file = ledger_file(context)
    if file is None:
        return nullcontext()
    file.parent.mkdir(parents=True, exist_ok=True)
    return locked(file.parent, wait=True)


def read_ledger(context: Context, question: str = "") -> tuple[Ledger, Arrays | None]:
    """The ledger, and the last answer if it was that to the `question`.

    Raises ValueError for a damaged file."""
    file = ledger_file(context)
    if file is None:
        record = context.state.config_records.get(LEDGER)
        if not record:
            return Ledger(), None
        ledger = Ledger(**json.loads(str(record["json"])))
        if not question or ledger.question != question:
            return ledger, None
        return ledger, from_record(context.state.array_records[ANSWER])
    if not file.is_file():
        return Ledger(), None
    try:
        with safe_open(file, "numpy") as content:
            ledger = Ledger(**json.loads(content.metadata()[LEDGER]))
            if not question or ledger.question != question:
                return ledger, None
            # In their order, which safetensors does not keep.
            return ledger, {name: content.get_tensor(name) for name in ledger.names}
    except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
        raise Refusal(
            f"{file} is damaged ({error!r}); this client answers nothing without its count"
        ) from error


def write_ledger(context: Context, ledger: Ledger, answer: Arrays) -> None:
    """Store the ledger and the last answer together. Raises OSError if that fails."""
    file = ledger_file(context)
    ledger.names = list(answer)
    text = json.dumps(vars(ledger))
    if file is not None:
        write_arrays(file, answer, {LEDGER: text})
        return
    if LEDGER not in context.state:
        log(
            WARNING,
            "the node has no state-dir: the privacy spent under dp 'local' is counted for this run "
            "alone, until the SuperNode ends",
        )
    context.state[LEDGER] = ConfigRecord({"json": text})
    context.state[ANSWER] = to_record(answer)
