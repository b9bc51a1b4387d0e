"""Networks from outside the package: what they take and return is found by trial, before a run."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from logging import WARNING
from typing import Any

import torch
from torch import Tensor, nn

from clients.core.copies import copy_of
from clients.core.layer_inputs import before_calls
from clients.core.normalisation import untracked_norms
from fedapps.common.once import say_once
from fedapps.common.seeds import drawing
from fedapps.common.tasks import BINARY, CLASSES, VALUES
from partitions.parts import Part, unpacked
from partitions.shares import Samples

COMPILED = "_orig_mod"  # where torch.compile keeps the network that it was given
STEP, OPTIMIZERS = "training_step", "configure_optimizers"
TRAINING = (STEP, OPTIMIZERS, "manual_backward", "optimizer_step")
LIBRARIES = ("lightning", "pytorch_lightning")  # whose base classes define these
SPREAD = 0.1  # of the noise on parameters, so that a scale of 1 shows in a trial
SCALES = (1.0, 100.0)  # of the inputs of a trial, so that a bound of the outputs shows
MAX_MIXING = 0.01  # of the largest output: rounding differs less between batches
FAILURES = (RuntimeError, ValueError, TypeError, IndexError)  # of inputs of another kind


def layers_of(network: nn.Module) -> str:
    """The network's linear layers for a message: names and sizes."""
    layers = []
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear):
            place = name or "itself"  # the network is a linear layer
            layers.append(f"{place!r} ({module.in_features} → {module.out_features})")
    return ", ".join(layers) or "no linear layer"


BLANKS = 2  # inputs of zeros: batch normalisation in training takes no single one


def blank_inputs(network: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """`BLANKS` inputs (2, *shape) of zeros, on the device of the network's parameters."""
    device = next(network.parameters(), torch.empty(0)).device
    return torch.zeros(BLANKS, *shape, dtype=torch.float32, device=device)


def trial_inputs(network: nn.Module, shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
    """Four random inputs (4, *shape), on the device of the network's parameters; of zeros and ones
    where the network takes whole numbers."""
    device = blank_inputs(network, shape).device
    with drawing(1):
        if any(isinstance(hook, _Whole | _Parts) for hook in network._forward_pre_hooks.values()):
            return torch.randint(0, 2, (4, *shape)).float().to(device)
        return scale * torch.randn(4, *shape, dtype=torch.float32).to(device)


def varied(network: nn.Module) -> nn.Module | None:
    """A copy with noise on its parameters; None if it cannot be copied."""
    try:
        copy = copy_of(network)
    except (RuntimeError, TypeError):
        return None
    with drawing(0), torch.no_grad():
        for parameter in copy.parameters():
            if parameter.is_floating_point():
                parameter.add_(SPREAD * torch.randn_like(parameter))
    return copy


def logits_of(output: Any) -> Tensor:
    """The logits in a network's output: the output itself, ``output["logits"]`` of a mapping,
    ``output.logits`` of another object, as the outputs of Hugging Face are, or the first entry of a
    tuple or list.

    Raises ValueError for another output."""
    logits = output
    if isinstance(output, Mapping):
        logits = output.get("logits")
    elif hasattr(output, "logits"):
        logits = output.logits
    elif isinstance(output, tuple | list) and output:
        logits = output[0]
    if isinstance(logits, Tensor):
        return logits
    described = type(output).__name__
    if isinstance(output, Mapping):
        keys = ", ".join(map(repr, output)) or "no key"
        described += f" with {keys}"

    raise ValueError(
        f"the network returns {described}; it must return logits (n, C), a mapping or an object "
        "that has them under 'logits', or a tuple whose first entry they are"
    )


def first_tensor(values: Any) -> Tensor | None:
    """The first tensor among nested tuples, lists and mappings; None if there is none."""
    if isinstance(values, Tensor):
        return values
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, tuple | list):
        return None
    for value in values:
        tensor = first_tensor(value)
        if tensor is not None:
            return tensor
    return None


class _Hook:
    """A hook of `adopted`, which `as_given` turns off."""

    off = False


class _Outputs(_Hook):
    """A forward hook: of several outputs the logits remain, and one output for each sample is a
    column (n, 1). `to_logits` makes logits of what the network gives."""

    def __init__(self) -> None:
        self.to_logits: Callable[[Tensor], Tensor] | None = None

    def __call__(self, network: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if self.off:
            return output
        logits = output if isinstance(output, Tensor) else _main(network, output)
        if logits.ndim < 2:
            x = first_tensor((args, kwargs))
            count = len(logits) if x is None else len(x)  # `squeeze` also drops a single sample
            logits = logits.reshape(count, -1)
        if self.to_logits is not None:
            logits = self.to_logits(logits)
        return logits


def _main(network: nn.Module, output: Any) -> Tensor:
    """The logits among several outputs; says once which these are."""
    logits = logits_of(output)
    kind = type(output).__name__
    which = "its first entry"
    if isinstance(output, Mapping) or hasattr(output, "logits"):
        which = "'logits'"
    if isinstance(output, Mapping | tuple | list):
        kind += f" of {len(output)}"
    say_once(
        f"{type(network).__name__} returns a {kind}: {which} is what is trained and scored, the "
        "rest is dropped"
    )
    return logits


def log_odds(probabilities: Tensor) -> Tensor:
    """log p − log(1 − p). Its binary cross entropy is that of p, with the same gradients."""
    limits = torch.finfo(probabilities.dtype)
    p = probabilities.clamp(limits.tiny, 1 - limits.eps / 2)
    return p.log() - (1 - p).log()


def log_probabilities(probabilities: Tensor) -> Tensor:
    """log p (n, C), whose softmax is p."""
    return probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()


def of_probabilities(network: nn.Module, task: str) -> nn.Module:
    """The adopted network, whose outputs are probabilities; their logits remain."""
    hook = _hook_of(network)
    assert hook is not None
    hook.to_logits = log_probabilities if task == CLASSES else log_odds
    return network


def _hook_of(network: nn.Module) -> _Outputs | None:
    """The hook of `adopted`; None for a network of this package."""
    for hook in network._forward_hooks.values():
        if isinstance(hook, _Outputs):
            return hook
    return None


def check_logits(network: nn.Module, shape: tuple[int, ...], task: str, instead: str = "") -> None:
    """Raise ValueError for an adopted network whose outputs are probabilities for all inputs: the
    loss of the task would squash them a second time. `instead` says what else helps."""
    hook = _hook_of(network)
    if task == VALUES or hook is None or hook.to_logits is not None:
        return
    first = _output_for(network, blank_inputs(network, shape))
    if first is None or not _are_probabilities(first, task):
        return
    trial = varied(network)
    if trial is None:
        return
    for scale in SCALES:
        outputs = _output_for(trial, trial_inputs(trial, shape, scale))
        if outputs is None or not _are_probabilities(outputs, task):
            return
    step = "softmax" if task == CLASSES else "sigmoid"
    raise ValueError(
        f"{type(network).__name__} gives probabilities, as a {step} at its end does, and the loss "
        f"of task={task} takes logits; leave the {step} out{instead}"
    )


def is_adopted(network: nn.Module) -> bool:
    """Whether it is a user's network that `adopted` returned."""
    return _hook_of(network) is not None


def warn_if_not_fixed(network: nn.Module, shape: tuple[int, ...]) -> None:
    """Warn once of an adopted network whose outputs for the same inputs differ in evaluation mode:
    it draws random numbers, its passes change it, or inputs change each other's outputs."""
    if not is_adopted(network):
        return
    x = trial_inputs(network, shape)
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    outputs = []
    for seed in (0, 0, 1):
        with drawing(seed):
            outputs.append(_output_for(network, x))
    first, again, other = outputs
    if first is None or again is None or other is None:
        return
    name = type(network).__name__
    if not torch.allclose(first, again, equal_nan=True):
        changed = []
        for place, buffer in network.named_buffers():
            if place in buffers and not torch.equal(buffer, buffers[place]):
                changed.append(place)
        which = f"its buffers {', '.join(changed):.200}" if changed else "what it keeps"
        say_once(
            f"each forward pass of {name} changes {which}, also in evaluation mode, so predictions "
            "depend on earlier ones, and a client's model can give other predictions than those "
            "reported; change them only where self.training is true",
            WARNING,
        )
    elif not torch.allclose(first, other, equal_nan=True):
        say_once(
            f"{name} gives other outputs for the same inputs in evaluation mode, so scores and "
            "predictions are random; torch.nn.functional.dropout needs training=self.training, "
            "which torch.nn.Dropout knows",
            WARNING,
        )
    else:
        _warn_if_mixed(network, x, first)


def _warn_if_mixed(network: nn.Module, x: Tensor, outputs: Tensor) -> None:
    """Warn once if the outputs for half of the inputs x change without the other half."""
    part = x[: len(x) // 2]
    alone = _output_for(network, part)
    if alone is None:
        return
    beside_others = outputs[: len(part)].float()
    difference = (alone.float() - beside_others).abs().max()
    if difference <= MAX_MIXING * beside_others.abs().max():
        return
    name = type(network).__name__
    untracked = untracked_norms(network)
    cause = ""
    if untracked:
        cause = f": {', '.join(untracked):.200} keep no running statistics"
    say_once(
        f"the outputs of {name} for an input depend on the other inputs of its batch, also in "
        f"evaluation mode{cause}; so scores and predictions depend on the batches; use layers that "
        "treat each input alone in evaluation mode, as batch normalisation with running statistics",
        WARNING,
    )


def _output_for(network: nn.Module, x: Tensor) -> Tensor | None:
    """What the network gives in evaluation mode; None if it cannot take x."""
    training = network.training
    try:
        with torch.no_grad():
            output: Tensor = network.eval()(x)
    except Exception:  # whatever code from outside raises
        return None
    finally:
        network.train(training)
    return output


def _are_probabilities(outputs: Tensor, task: str) -> bool:
    """Whether all lie in [0, 1] and not all on its ends; those of classes add up to 1."""
    if not ((outputs >= 0) & (outputs <= 1)).all() or ((outputs == 0) | (outputs == 1)).all():
        return False
    sums = outputs.float().sum(1)
    return task != CLASSES or torch.allclose(sums, torch.ones_like(sums), atol=1e-3)


class _Repeated(_Hook):
    """A forward pre-hook: images of one channel become images of `channels` equal ones."""

    def __init__(self, channels: int) -> None:
        self.channels = channels

    def __call__(self, network: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.off:
            return inputs
        x, *others = inputs
        return (x.expand(-1, self.channels, -1, -1), *others)


class _Whole(_Hook):
    """A forward pre-hook: inputs become whole numbers again, as token ids are."""

    def __call__(self, network: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.off:
            return inputs
        x, *others = inputs
        return (x.long(), *others)


class _Copied(_Hook):
    """A forward pre-hook: the network gets a copy of its inputs, which it may change."""

    def __call__(self, network: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.off:
            return inputs
        x, *others = inputs
        return (x.clone(), *others)


class _Parts(_Hook):
    """A forward pre-hook: x is unpacked into the input tensors that it holds."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)

    def __call__(self, network: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.off:
            return args, kwargs
        x, *others = args
        tensors = unpacked(x, self.parts)
        by_position = [t for t, part in zip(tensors, self.parts, strict=True) if not part.name]
        named = {part.name: t for t, part in zip(tensors, self.parts, strict=True) if part.name}
        return (*by_position, *others), kwargs | named


def takes_whole_numbers(network: nn.Module) -> bool:
    """Whether the adopted network in `network`, itself or around it, takes one tensor of whole
    numbers."""
    return any(type(hook) is _Whole for hook in _pre_hooks(network))


def takes_tokens(network: nn.Module) -> bool:
    """Whether the adopted network in `network` takes whole numbers, or has parts of them."""
    for hook in _pre_hooks(network):
        if type(hook) is _Whole:
            return True
        if isinstance(hook, _Parts) and any(part.whole for part in hook.parts):
            return True
    return False


def _pre_hooks(network: nn.Module) -> Iterator[Callable[..., Any]]:
    """The forward pre-hooks of the network and of all modules in it."""
    for module in network.modules():
        yield from module._forward_pre_hooks.values()


def check_whole_inputs(samples: Samples) -> None:
    """Raise ValueError for inputs with fractions, which a network of whole numbers would lose."""
    if not samples.fixed or not samples.x.is_floating_point():
        return
    fractions = samples.x[samples.index] % 1 != 0
    if fractions.any():
        row = int(fractions.flatten(1).any(1).nonzero()[0])
        raise ValueError(
            f"row {row} of the inputs has fractions, and the network takes whole numbers alone "
            "(torch.nn.Embedding); give token ids as whole numbers"
        )


def uncompiled(network: nn.Module) -> nn.Module:
    """The network without torch.compile and torch.nn.DataParallel, which put `_orig_mod.` and
    `module.` in front of names."""
    places = [name for name, m in network.named_modules() if _wrapped_by(m) is not None]
    for place in reversed(places):  # inner ones first
        wrapper = network.get_submodule(place)
        inner = _wrapped_by(wrapper)
        assert inner is not None
        if isinstance(wrapper, nn.DataParallel):
            say_once("the network is split over devices by torch.nn.DataParallel; it runs on one")
        else:
            say_once("the network is compiled by torch.compile; it runs as it was before that")
        if place:
            network.set_submodule(place, inner)
        else:
            network = inner  # the whole network was wrapped; it is no one's submodule
    for module in network.modules():
        module._compiled_call_impl = None  # of `Module.compile`, which changes no name
    return network


def _wrapped_by(module: nn.Module) -> nn.Module | None:
    """The network that torch.compile or torch.nn.DataParallel was given; None for others."""
    if isinstance(module, nn.DataParallel):
        return module.module
    if COMPILED not in module._modules:  # the mapping of a module of torch.jit has no `get`
        return None
    return module._modules[COMPILED]


def adopted(
    network: Any,
    name: str,
    shape: tuple[int, ...],
    num_outputs: int | None = None,
    task: str = "",
    parts: Sequence[Part] = (),
    trains_itself: bool = False,
    known_changes: dict[tuple[int, ...], bool] | None = None,
) -> tuple[nn.Module, int]:
    """The network, which gives logits (n, C) of inputs (n, *shape), and C. Its names stay.

    Images of one channel are repeated where it takes more. Inputs become whole numbers where it
    takes these alone, and packed inputs are unpacked into their `parts`. Of several outputs the
    logits remain. A network that `trains_itself` may have methods that train it. `known_changes`
    holds by shape whether former networks of the same code changed their inputs. Raises ValueError
    for inputs that it cannot take, for parameters that cannot be trained, and for outputs that are
    no logits of the `task`, or of `num_outputs`."""
    if not isinstance(network, nn.Module):
        raise ValueError(f"{name!r} gives {type(network).__name__}, not a torch.nn.Module")
    if isinstance(network, torch.jit.ScriptModule):
        raise ValueError(
            f"{name!r} gives a network of torch.jit, which takes no hooks; give the network before "
            "torch.jit.script or torch.jit.trace"
        )
    network = uncompiled(network)
    if not any(True for _ in network.parameters()):
        raise ValueError(
            f"{name!r} gives {type(network).__name__} without parameters; there is nothing to "
            "train: add a layer, such as torch.nn.Linear"
        )
    if not trains_itself:
        check_trains_nothing(network)
    check_types(network)
    network.register_forward_hook(_Outputs(), with_kwargs=True)
    training = network.training
    logits = _tried(network.eval(), name, shape, parts)
    network.train(training)
    changes = None if known_changes is None else known_changes.get(shape)
    if changes is None:
        changes = changes_inputs(network, shape)
    if known_changes is not None:
        known_changes[shape] = changes
    if changes:
        network.register_forward_pre_hook(_Copied(), prepend=True)
        say_once(
            f"{type(network).__name__} changes its inputs in place; it gets a copy of them in each "
            "pass"
        )
    outputs = logits.shape[1] if logits.ndim == 2 and len(logits) == 2 else 0
    has_one = outputs == 1
    if has_one and (task == CLASSES or (num_outputs or 0) > 1):
        raise ValueError(
            f"{name!r} gives one output; task={CLASSES} needs one for each class: it has "
            f"{layers_of(network)}; let its last layer have {num_outputs or 2} outputs, or declare "
            f"task={BINARY} (two classes, one output) or task={VALUES} (a number)"
        )
    if outputs and not has_one and (task == BINARY or num_outputs == 1):
        raise ValueError(
            f"{name!r} gives {outputs} outputs, and task={task or BINARY} needs one: it has "
            f"{layers_of(network)}; let its last layer have one output, or declare task={CLASSES}"
        )
    if outputs != (num_outputs or outputs) or not outputs:
        wanted = num_outputs or "C"
        raise ValueError(
            f"{name!r} gives {tuple(logits.shape)} for 2 inputs, not logits (2, {wanted})"
        )
    return network, outputs


def changes_inputs(network: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether the network changes its inputs in place, in training or in evaluation mode. Methods
    that run several passes of the same inputs would see other ones each time."""
    trial = varied(network)
    if trial is None:
        return False
    for training in (False, True):
        x = trial_inputs(trial, shape)
        version = x._version  # torch counts the changes of a tensor
        with suppress(Exception), torch.no_grad(), drawing(1):  # whatever code from outside raises
            trial.train(training)(x)
        if x._version != version:
            return True
    return False


def check_types(network: nn.Module) -> None:
    """Raise ValueError for quantised layers, and for complex parameters, complex buffers and extra
    states without a tensor, which would travel."""
    name = type(network).__name__
    quantised = []
    for place, module in network.named_modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if ".quantized" in type(module).__module__ or any(t.is_quantized for t in tensors):
            quantised.append(place or "itself")
    if quantised:
        raise ValueError(
            f"{name} has quantised layers, which are not trained: {', '.join(quantised):.300}; "
            "give the network before its quantisation"
        )
    frozen = {place for place, p in network.named_parameters() if not p.requires_grad}
    complex_names = []
    for place, tensor in network.state_dict().items():
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"{name} has the extra state {place!r} (get_extra_state), {type(tensor).__name__}, "
                "which cannot be averaged; keep tensors (register_buffer), or leave it out of "
                "state_dict"
            )
        if tensor.is_complex() and place not in frozen:
            complex_names.append(place)
    if complex_names:
        raise ValueError(
            f"{name} has complex parameters or buffers, which cannot be averaged: "
            f"{', '.join(complex_names):.300}; keep real and imaginary parts as real parameters "
            "(torch.view_as_real), or freeze them"
        )


class InputShapeError(ValueError):
    """A network that cannot take inputs of the shape that the data have."""


def _tried(network: nn.Module, name: str, shape: tuple[int, ...], parts: Sequence[Part]) -> Tensor:
    """The output for two blank inputs, as the network takes them: packed of `parts`, as they are,
    as whole numbers, or with repeated channels.

    Raises InputShapeError if it cannot take them."""
    x = blank_inputs(network, shape)
    with torch.no_grad():
        if parts:
            return _tried_parts(network, name, x, parts)
        try:
            return network(x)
        except FAILURES as error:
            failure = error
        handle = network.register_forward_pre_hook(_Whole())
        try:
            output: Tensor = network(x)
            say_once(f"{type(network).__name__} takes whole numbers: its inputs stay token ids")
            return output
        except FAILURES:
            handle.remove()
        channel_counts: list[int] = []
        if len(shape) == 3 and shape[0] == 1:
            channel_counts = _channel_counts(network)
        # The first convolution of the list need not be the one that gets the images.
        for channels in channel_counts:
            handle = network.register_forward_pre_hook(_Repeated(channels))
            try:
                return network(x)
            except FAILURES:
                handle.remove()
    hint = _hint_of_types(network)
    raise InputShapeError(
        f"{name!r} cannot take inputs of shape {shape}: {failure}{hint}"
    ) from failure


def _hint_of_types(network: nn.Module) -> str:
    """What to write for parameters of another type than the inputs'; "" if there are none."""
    types = {p.dtype for p in network.parameters() if p.is_floating_point()} - {torch.float32}
    if not types:
        return ""
    shown = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in types))
    return (
        f"; it has parameters of {shown}, and inputs are float32: return network.float(), or "
        "convert the inputs in its forward pass"
    )


def _channel_counts(network: nn.Module) -> list[int]:
    """The different numbers of input channels, from 2 on, of the network's convolutions."""
    counts = []
    for module in network.modules():
        if not isinstance(module, nn.Conv2d):
            continue
        channels = module.in_channels
        if channels > 1 and channels not in counts:
            counts.append(channels)
    return counts


def _tried_parts(network: nn.Module, name: str, x: Tensor, parts: Sequence[Part]) -> Tensor:
    """The output for blank inputs packed of `parts`. Parts of whole numbers that the network takes
    as decimals are given so, and the other way round."""
    given = tuple(part.whole for part in parts)
    choices = [given, *product((True, False), repeat=len(parts))]
    failure: Exception | None = None
    for choice in dict.fromkeys(choices):
        chosen = [replace(p, whole=whole) for p, whole in zip(parts, choice, strict=True)]
        handle = network.register_forward_pre_hook(_Parts(chosen), with_kwargs=True)
        try:
            output: Tensor = network(x)
            return output
        except FAILURES as error:
            failure = failure or error  # of the parts as they were given
            handle.remove()
    shown = ", ".join(f"{p.name or 'by position'} {p.shape}" for p in parts)
    raise ValueError(f"{name!r} cannot take inputs {shown}: {failure}") from failure


def layers_by_call(network: nn.Module, x: Tensor) -> list[str]:
    """The names of the modules that have parameters of their own, in the order in which their
    forward passes of x end; those that are not called come first."""
    network = copy_of(network).eval()
    owners = []
    for name, module in network.named_modules():
        if list(module.parameters(recurse=False)):
            owners.append(name)

    ended: list[str] = []
    for name in owners:

        def note(module: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
            ended.append(name)

        network.get_submodule(name).register_forward_hook(note)
    with torch.no_grad():
        network(x)
    called = list(dict.fromkeys(ended))  # once each: a layer may be used twice
    not_called = [name for name in owners if name not in called]
    return not_called + called


def shapes_by_layer(
    network: nn.Module, names: Collection[str], shape: tuple[int, ...]
) -> dict[str, list[tuple[int, ...]]]:
    """The shapes of what enters each of the layers `names` in a forward pass of `BLANKS` inputs
    (n, *shape) in evaluation mode, call by call; {} if the network cannot take blank inputs."""
    shapes: dict[str, list[tuple[int, ...]]] = {name: [] for name in names}

    def note(name: str, x: Tensor) -> None:
        shapes[name].append(tuple(x.shape))

    handles = []
    for name in names:
        handles.append(before_calls(network.get_submodule(name), partial(note, name)))
    try:
        output = _output_for(network, blank_inputs(network, shape))
    finally:
        for handle in handles:
            handle.remove()
    return {} if output is None else shapes


def check_gradients(network: nn.Module, method: str, shape: tuple[int, ...]) -> None:
    """Raise ValueError for an adopted network that computes gradients in training alone: a method
    that adapts it by gradients, in evaluation mode, would change nothing."""
    if not any(_hook_of(module) is not None for module in network.modules()):
        return
    in_training = with_gradient(network, shape, training=True)
    in_evaluation = with_gradient(network, shape, training=False)
    if in_training is None or in_evaluation is None:
        return
    lost = sorted(in_training - in_evaluation)
    owners = {name: name.rpartition(".")[0] for name in lost}
    shapes = shapes_by_layer(network, set(owners.values()), shape)
    uncalled = [name for name, calls in shapes.items() if not calls]  # such as an auxiliary head
    lost = [name for name in lost if owners[name] not in uncalled]
    if lost:
        raise ValueError(
            f"{method} adapts the network by gradients, and {type(network).__name__} computes none "
            f"in evaluation mode for {', '.join(lost):.200}; leave torch.no_grad, "
            "torch.set_grad_enabled or detach out of its forward pass, or choose a method without "
            "such steps, such as t3a or bn-adapt"
        )


def with_gradient(network: nn.Module, shape: tuple[int, ...], training: bool) -> set[str] | None:
    """The names of the trained parameters that a gradient of the outputs reaches; None if the
    network cannot be tried."""
    trial = varied(network)
    if trial is None:
        return None
    trained = {name: p for name, p in trial.named_parameters() if p.requires_grad}
    try:
        with drawing(1):
            loss = trial.train(training)(trial_inputs(trial, shape)).square().sum()
            if not loss.requires_grad:
                return set()
            gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    except Exception:  # whatever code from outside raises
        return None
    reached = set()
    for name, gradient in zip(trained, gradients, strict=True):
        if gradient is not None:
            reached.add(name)
    return reached


def check_trains_nothing(network: nn.Module) -> None:
    """Raise ValueError for a network that says how it is trained, as a LightningModule does: local
    training takes its outputs alone."""
    defined = [name for name in TRAINING if defines(network, name)]
    if defined:
        name = type(network).__name__
        methods = " and ".join(defined)
        raise ValueError(
            f"{name} has {methods}, which would not be called: clients train the outputs "
            "of the network by optimizer= (SGD by default), on loss=; "
            f"return the network inside, or torch.nn.Sequential({name}(…)) to leave them unused; "
            f"client_app calls {STEP} and {OPTIMIZERS} of a network that has both"
        )


def defines(network: object, name: str) -> bool:
    """Whether a class of the network, but not Lightning's own base class, defines the method."""
    for kind in type(network).__mro__:
        if name in vars(kind):
            return kind.__module__.partition(".")[0] not in LIBRARIES
    return False


@contextmanager
def as_given(network: nn.Module) -> Iterator[None]:
    """Within the context an adopted network takes and returns what it did before `adopted`."""
    hooks: list[Any] = [*network._forward_hooks.values(), *network._forward_pre_hooks.values()]
    off = [hook for hook in hooks if isinstance(hook, _Hook)]
    for hook in off:
        hook.off = True
    try:
        yield
    finally:
        for hook in off:
            hook.off = False
