"""The default learning rate of values to predict, for runs, for `flwr run` and for components."""

from collections.abc import Container, Mapping
from contextlib import suppress

from fedapps.common.external_code import Value
from fedapps.common.tasks import AUTO, VALUES

# The gradient of the mean square error grows with the error, where that of cross entropy is
# bounded: rates that suit classes overfit or diverge. Of 0.01, 0.03 and 0.1 it has the best R² on
# training clients' validation samples, over seeds 0-9 of three tables (diabetes, Friedman #1, a
# linear one), with `mlp` and 20 rounds.
LARGEST_RATE_OF_VALUES = 0.03


def with_rate_of_task(
    config: Mapping[str, Value], defaults: Mapping[str, Value], given: Container[str], task: str
) -> dict[str, Value]:
    """The configuration, where `defaults` of `lr` are at most `LARGEST_RATE_OF_VALUES` if the
    `task` is values. A rate that is `given` by the user stays."""
    changed = dict(config)
    if task != VALUES or "lr" in given:
        return changed
    for key, value in config.items():
        if key != "lr" and not key.endswith(".lr"):
            continue
        is_default = key not in given and value == defaults.get(key)
        if is_default and float(value) > LARGEST_RATE_OF_VALUES:
            changed[key] = LARGEST_RATE_OF_VALUES
    return changed


def task_of(config: Mapping[str, Value]) -> str:
    """The task that the configuration declares, or that its data have; "auto" where there are no
    data to read."""
    task = str(config["task"])
    if task == AUTO:
        from partitions.datasets.loading import described

        with suppress(ValueError):  # a server of real nodes has no data
            task = described(config).task
    return task
