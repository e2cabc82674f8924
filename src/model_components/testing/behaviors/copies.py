"""Behaviors of copies of a module and of its state."""

from __future__ import annotations

import copy
import io
import pickle

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel

from .subject import Behavior, Subject, near, require, same, trained


def _disturb_(module: nn.Module) -> None:
    """Change every trained parameter."""
    with torch.no_grad():
        for parameter in trained(module).values():
            # the addition also changes zeros, with which biases often begin
            parameter.mul_(0.7).add_(0.3)


def deepcopied(subject: Subject) -> None:
    """Check that a deep copy gives the same results and shares no trained parameter."""
    module = subject.module()
    expected = subject.step(module)
    twin = copy.deepcopy(module)
    same(subject.step(twin), expected, "the copy")
    _disturb_(module)
    same(subject.step(twin), expected, "the copy after the module changed")


def pickled(subject: Subject) -> None:
    """Check that a pickled and unpickled module gives the same results."""
    module = subject.module()
    twin = pickle.loads(pickle.dumps(module))
    same(subject.step(twin), subject.step(module), "the unpickled module")


def state_dict_saved(subject: Subject) -> None:
    """Check that a saved state dict can be read with ``weights_only``, and loads strictly."""
    module = subject.module()
    expected = subject.step(module)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    _disturb_(module)
    module.load_state_dict(torch.load(buffer, weights_only=True), strict=True)
    same(subject.step(module), expected, "the loaded module")


def state_dict_assigned(subject: Subject) -> None:
    """Check that a module on the meta device loads a state dict with ``assign=True``."""
    module = subject.module()
    expected = subject.step(module)
    state = copy.deepcopy(module.state_dict())
    empty = copy.deepcopy(module).to("meta")
    empty.load_state_dict(state, assign=True)
    for parameter in empty.parameters():
        require(not parameter.is_meta, "a parameter stayed on the meta device")
    same(subject.step(empty), expected, "the module after load_state_dict with assign=True")


def meta_device(subject: Subject) -> None:
    """Check the forward on the meta device, and the move back by ``to_empty`` and a state dict."""
    module = subject.module()
    expected = subject.step(module)
    state = copy.deepcopy(module.state_dict())
    empty = copy.deepcopy(module).to("meta")
    y = subject.call(empty, *(x.detach().to("meta") for x in subject.inputs()))
    known = expected["the output"]
    assert known is not None
    require(y.is_meta, f"the output: expected device meta, got {y.device}")
    require(
        y.shape == known.shape,
        f"the output on the meta device: expected shape {list(known.shape)}, got {list(y.shape)}",
    )
    empty.to_empty(device=known.device).load_state_dict(state)
    same(subject.step(empty), expected, "the module after to_empty")


def state_replaced_after_use(subject: Subject) -> None:
    """Check that weights loaded after a module's first use change its output accordingly."""
    module = subject.module()
    other = subject.module()
    _disturb_(other)
    state = copy.deepcopy(other.state_dict())
    # test both modes, because a module may keep a computed weight in evaluation mode only
    for mode in (True, False):
        other.train(mode)
        module.train(mode)
        with torch.no_grad():
            # fills any cache that the module keeps between calls
            subject.call(module, *subject.inputs())
            expected = subject.call(other, *subject.inputs())
        before = copy.deepcopy(module.state_dict())
        module.load_state_dict(state)
        actual = subject.call(module, *subject.inputs())
        near(f"the output with training={mode} after load_state_dict", actual, expected)
        module.load_state_dict(before)


def parameters_as_vector(subject: Subject) -> None:
    """Check that parameters can be converted to one vector and back."""
    module = subject.module()
    expected = subject.step(module)
    vector = parameters_to_vector(module.parameters()).detach().clone()
    _disturb_(module)
    vector_to_parameters(vector, module.parameters())
    same(subject.step(module), expected, "the module after vector_to_parameters")


def averaged(subject: Subject) -> None:
    """Check that `AveragedModel` gives the output of the module with the averaged parameters."""
    module = subject.module()
    average = AveragedModel(module)
    average.update_parameters(module)
    _disturb_(module)
    average.update_parameters(module)
    with torch.no_grad():
        actual = subject.call(average, *subject.inputs())
        for parameter, mean in zip(module.parameters(), average.module.parameters(), strict=True):
            parameter.copy_(mean)
        near("the averaged module's output", actual, subject.call(module, *subject.inputs()))


def parameters_reset(subject: Subject) -> None:
    """Check that ``reset_parameters`` redraws all trained parameters, reproducibly for a seed."""
    module = subject.module()
    states = []
    for _ in range(2):
        _disturb_(module)
        torch.manual_seed(3)
        # pyrefly: ignore[not-callable]: a method, though nn.Module says Tensor
        module.reset_parameters()
        states.append({name: p.detach().clone() for name, p in trained(module).items()})
    for name, value in states[0].items():
        require(torch.equal(value, states[1][name]), f"{name} is not reset")
    y = subject.call(module, *subject.inputs())
    require(bool(y.isfinite().all()), "the output is not finite after reset_parameters")


def printed(subject: Subject) -> None:
    """Check that ``repr`` returns a non-empty string."""
    require(bool(repr(subject.module())), "repr is empty")


BEHAVIORS: tuple[Behavior, ...] = (
    deepcopied,
    pickled,
    state_dict_saved,
    state_dict_assigned,
    meta_device,
    state_replaced_after_use,
    parameters_as_vector,
    averaged,
    parameters_reset,
    printed,
)
