"""The configuration and the network of a user's own Flower app, which both components share."""

import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from flwr.app import Context
from torch import nn

from clients.core.evaluation import LOGITS, PROBABILITIES
from clients.methods._preferences import GlobalClient
from clients.models.foreign import (
    adopted,
    check_logits,
    of_probabilities,
    uncompiled,
    warn_if_not_fixed,
)
from clients.models.lightning import check_without_trainer, trains_itself
from clients.models.unsent import warn_of_unsent
from fedapps.building import Network, network_around
from fedapps.common import external_code
from fedapps.common.seeds import drawing
from fedapps.common.settings import present_key
from fedapps.common.tasks import BINARY
from fedapps.component_settings import check_declared_task, check_own_steps, initial_configuration
from fedapps.methods import METHODS
from fedapps.settings.config import Config, check_method, construct, override
from fedapps.settings.config import settings as of_method
from partitions.datasets.loading import Info
from partitions.parts import Part

Model = Callable[..., nn.Module]  # of nothing, or of a Context
OR_DECLARE = f", or give client_app outputs={PROBABILITIES!r}"


def configuration(method: str, settings: dict[str, Any]) -> tuple[Config, dict[str, Any]]:
    """The defaults with `settings`, and the latter by key; a method's own key wins over a common
    one of the same name.

    References in them are allowed: the programmer wrote them."""
    external_code.allow(*external_code.named([method, settings]))
    entry = METHODS[check_method(method)]
    if issubclass(entry.client, GlobalClient):
        able = [name for name, m in METHODS.items() if not issubclass(m.client, GlobalClient)]
        raise ValueError(
            f"{method} needs users whose tastes are known, as the preference partition makes them; "
            f"those that take any data: {', '.join(able)}"
        )
    config = initial_configuration(method)
    # A Python keyword has underscores where a key has hyphens; former keys are understood.
    keys = {name: present_key(name.replace("_", "-")) for name in settings}
    changes = {}
    for name, key in keys.items():
        key_of_method = f"{method}.{key}"
        # A common key would be overridden by the default of the method's section.
        changes[key_of_method if key_of_method in config else key] = settings[name]
    config = override(config, changes)
    construct(entry.strategy, config=config, method=method)  # raises for a value out of range
    check_declared_task(method, config)
    return config, changes


def network_of(
    method: str,
    model: Model,
    config: Config,
    shape: tuple[int, ...],
    context: Context,
    outputs: str = "",
    parts: Sequence[Part] = (),
    known_heads: dict[Hashable, str] | None = None,
    known_changes: dict[tuple[int, ...], bool] | None = None,
) -> tuple[Network, int, nn.Module | None]:
    """The method's network around the user's, the number of its outputs, and the user's network if
    it trains itself. The seed alone decides its initial arrays. `outputs` says what these are; ""
    leaves them unchecked, as for the server, which computes none. Inputs are packed of `parts`.
    `known_heads` holds the heads that were found in former networks of `model`, and `known_changes`
    by shape whether these changed their inputs."""
    task = str(config["task"])
    with drawing(int(str(config["seed"]))):
        base = made(model, context)
        name = type(base).__name__
        if isinstance(base, nn.Module):
            base = uncompiled(base)
        by_itself = trains_itself(base)
        if by_itself:
            check_own_steps(method, base)
            check_without_trainer(base)
        network, num_outputs = adopted(
            base,
            name,
            shape,
            task=task,
            parts=parts,
            trains_itself=by_itself,
            known_changes=known_changes,
        )
        if outputs == PROBABILITIES:
            of_probabilities(network, task)
        elif outputs == LOGITS:
            check_logits(network, shape, task, OR_DECLARE)
        if outputs:  # not tried before
            warn_if_not_fixed(network, shape)
            warn_of_unsent(network, shape)
        classes = 2 if task == BINARY else num_outputs
        info = Info("own", shape, classes, "", task=task)
        settings = of_method(config, method)
        built = network_around(network.eval(), method, info, settings, known_heads)
        return built, num_outputs, base if by_itself else None


def inputs_of(model: Model, config: Config, context: Context) -> Sequence[str]:
    """The parameters of the forward pass of the user's network."""
    with drawing(int(str(config["seed"]))):
        network = uncompiled(made(model, context))
    return tuple(inspect.signature(network.forward).parameters)


def made(model: Model, context: Context) -> Any:
    """The user's network; a function with one parameter gets the component's Context."""
    parameters = inspect.signature(model).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
    if len(needed) > 1:
        raise ValueError(
            f"model= needs {', '.join(needed)}; give a function that takes nothing, or Flower's "
            "Context alone"
        )
    return model(context) if needed else model()
