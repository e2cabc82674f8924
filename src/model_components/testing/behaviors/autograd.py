"""Behaviors of gradients: first and second order, forward and backward mode, special uses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from .subject import (
    Behavior,
    Subject,
    cotangent,
    gradients_of,
    near,
    require,
    same,
    size,
    trained,
)

# The step of finite differences in float64, where errors of rounding and curvature are similar
_STEP = 1e-6
# A derivative that is below this share of the largest derivative may be only a rounding error
_SMALL = 1e-2
# Allowed relative error of a finite difference, with a margin for strong curvature
_FINITE = 1e-3


def _floating(inputs: Sequence[Tensor]) -> list[int]:
    return [number for number, x in enumerate(inputs) if x.is_floating_point()]


class _Line:
    """A module's output in float64 along one random direction of all parameters and inputs."""

    def __init__(self, subject: Subject):
        self.subject = subject
        self.module = subject.module(torch.float64)
        self.inputs = subject.inputs(torch.float64)
        generator = torch.Generator().manual_seed(5)

        def direction(like: Tensor) -> Tensor:
            drawn = torch.randn(like.shape, generator=generator, dtype=torch.float64)
            return drawn.to(like.device)

        self.parameters = {name: p.detach() for name, p in trained(self.module).items()}
        self.moves = {name: direction(p) for name, p in self.parameters.items()}
        self.input_moves = [
            direction(x) if x.is_floating_point() else torch.zeros((), dtype=x.dtype)
            for x in self.inputs
        ]

    def at(self, step: Tensor) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return the parameters and the inputs after a step of the given length."""
        parameters = {name: p + step * self.moves[name] for name, p in self.parameters.items()}
        inputs = [
            x.detach() + step * move if x.is_floating_point() else x
            for x, move in zip(self.inputs, self.input_moves, strict=True)
        ]
        return parameters, inputs

    def output(self, step: Tensor) -> Tensor:
        """Return the module's output after a step of the given length."""
        parameters, inputs = self.at(step)

        def call(*arguments: Tensor) -> object:
            return functional_call(self.module, parameters, arguments)

        return self.subject.call(call, *inputs)


def _slope(function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the derivative of a function at step 0, as a finite difference."""
    ends = []
    for sign in (1, -1):
        step = torch.tensor(sign * _STEP, dtype=torch.float64)
        ends.append(function(step).detach())
    return (ends[0] - ends[1]) / (2 * _STEP)


def _agrees(what: str, actual: Tensor, slope: Tensor, largest: float = 0.0) -> None:
    """Raise `WrongResult` unless a derivative is close to its finite difference."""
    most = _FINITE * max(size(slope), largest, 1e-6)
    error = size(actual.detach() - slope)
    require(
        error <= most,
        f"{what}: expected an error of at most {most:.1e} against the finite difference, got "
        f"{error:.1e}",
    )


def gradients(subject: Subject) -> None:
    """Check that gradients of all parameters and inputs agree with a finite difference."""
    line = _Line(subject)
    step = torch.zeros((), dtype=torch.float64, requires_grad=True)
    y = line.output(step)
    # the plain sum of some outputs, such as a softmax's, is constant and would show nothing
    weights = cotangent(y)
    (actual,) = torch.autograd.grad((y * weights).sum(), step)
    _agrees("the gradient", actual, _slope(lambda s: (line.output(s) * weights).sum()))


def second_gradients(subject: Subject) -> None:
    """Check that second derivatives agree with a finite difference of the first derivatives."""
    line = _Line(subject)

    def first(step: Tensor, graph: bool) -> Tensor:
        step = step if step.requires_grad else step.detach().requires_grad_()
        y = line.output(step)
        return torch.autograd.grad((y * y).sum(), step, create_graph=graph)[0]

    zero = torch.zeros((), dtype=torch.float64, requires_grad=True)
    derivative = first(zero, True)
    slope = _slope(lambda s: first(s, False))
    if not derivative.requires_grad:
        # without a graph of the backward pass, autograd treats the second derivative as 0
        actual = torch.zeros_like(slope)
    else:
        (actual,) = torch.autograd.grad(derivative, zero)
    _agrees("the second derivative", actual, slope)


def gradient_penalty(subject: Subject) -> None:
    """Check that a gradient penalty, as in WGAN-GP, gives every parameter the right gradient."""
    module = subject.module(torch.float64)
    inputs = subject.inputs(torch.float64)
    # a module that reads token ids has no floating input
    wanted = [inputs[number] for number in _floating(inputs)] or list(trained(module).values())
    actual = _penalty_gradients(subject, module, inputs, wanted)
    largest = max((size(gradient) for gradient in actual.values()), default=0.0)
    for name, parameter in trained(module).items():
        generator = torch.Generator().manual_seed(7)
        move = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        move = move.to(parameter.device)
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * _STEP * move)
            ends.append(_penalty(subject, module, inputs, wanted).detach())
            with torch.no_grad():
                parameter.sub_(sign * _STEP * move)
        slope = (ends[0] - ends[1]) / (2 * _STEP)
        gradient = actual[name]
        if gradient is None:
            along = torch.zeros_like(slope)
        else:
            along = (gradient * move).sum()
        # a gradient that is zero in theory is compared at the scale of the other gradients
        _agrees(f"the penalty's gradient of {name}", along, slope, _SMALL * largest)


def _penalty(
    subject: Subject, module: nn.Module, inputs: Sequence[Tensor], wanted: Sequence[Tensor]
) -> Tensor:
    y = subject.call(module, *inputs)
    gradients = torch.autograd.grad((y * y).sum(), wanted, create_graph=True)
    return torch.stack([(g * g).sum() for g in gradients]).sum()


def _penalty_gradients(
    subject: Subject, module: nn.Module, inputs: Sequence[Tensor], wanted: Sequence[Tensor]
) -> dict[str, Tensor | None]:
    parameters = trained(module)
    penalty = _penalty(subject, module, inputs, wanted)
    actual = torch.autograd.grad(penalty, list(parameters.values()), allow_unused=True)
    return dict(zip(parameters, actual, strict=True))


def forward_mode(subject: Subject) -> None:
    """Check that forward-mode derivatives agree with a finite difference."""
    line = _Line(subject)
    zero = torch.zeros((), dtype=torch.float64)
    actual = torch.func.jvp(line.output, (zero,), (torch.ones_like(zero),))[1]
    _agrees("the forward-mode derivative", actual, _slope(line.output))


def backward_twice(subject: Subject) -> None:
    """Check that a second backward pass of a retained graph adds the same gradients again."""
    module = subject.module()
    expected = subject.step(module)
    inputs = subject.inputs()
    module.zero_grad()
    y = subject.call(module, *inputs)
    y.backward(cotangent(y), retain_graph=True)
    y.backward(cotangent(y))
    doubled = {}
    for name, value in gradients_of(module, inputs).items():
        doubled[name] = None if value is None else value / 2
    same(doubled, {name: expected[name] for name in doubled}, "two backward passes, halved")


def parameters_frozen(subject: Subject) -> None:
    """Check that inputs get gradients, and parameters none, if the parameters are frozen."""
    module = subject.module()
    expected = subject.step(module)
    module.zero_grad()
    module.requires_grad_(False)
    inputs = subject.inputs()
    y = subject.call(module, *inputs)
    require(y.requires_grad == bool(_floating(inputs)), "the output's requires_grad is wrong")
    if y.requires_grad:
        y.backward(cotangent(y))
    actual = gradients_of(module, inputs)
    same(actual, {name: expected[name] for name in actual}, "frozen parameters")
    frozen = all(parameter.grad is None for parameter in module.parameters())
    require(frozen, "a frozen parameter has a gradient")


def inputs_frozen(subject: Subject) -> None:
    """Check that parameters' gradients stay the same if the inputs do not require gradients."""
    module = subject.module()
    expected = subject.step(module)
    actual = subject.step(module, [x.detach() for x in subject.inputs()])
    same(actual, {name: expected[name] for name in actual}, "detached inputs")


def output_changed_in_place(subject: Subject) -> None:
    """Check that an in-place operation on the output, such as ``relu_``, works."""
    module = subject.module()
    results = []
    for change in (torch.relu, torch.relu_):
        inputs = subject.inputs()
        module.zero_grad()
        y = change(subject.call(module, *inputs))
        y.backward(cotangent(y))
        gradients = {}
        for name, value in gradients_of(module, inputs).items():
            gradients[name] = None if value is None else value.clone()
        results.append({"the output": y.detach(), **gradients})
    same(results[1], results[0], "relu_")


def changed_before_backward(subject: Subject) -> None:
    """Check that changing a parameter or buffer before backward raises an error or is ignored."""
    expected = subject.step(subject.module())
    first = subject.module()
    names = [name for name, _ in first.named_parameters()]
    names += [name for name, buffer in first.named_buffers() if buffer.is_floating_point()]
    for name in names:
        module = subject.module()
        inputs = subject.inputs()
        y = subject.call(module, *inputs)
        # a copy, because the output may be a view of the tensor that changes next
        value = y.detach().clone()
        owner, _, last = name.rpartition(".")
        with torch.no_grad():
            getattr(module.get_submodule(owner), last).add_(1.0)
        try:
            y.backward(cotangent(value))
        except RuntimeError:
            # torch has noticed the change, as it does in its own modules
            continue
        actual = {"the output": value, **gradients_of(module, inputs)}
        same(actual, expected, f"after a change of {name} and no error")


def checkpointed(subject: Subject) -> None:
    """Check that both variants of activation checkpointing give the same results."""
    module = subject.module()
    expected = subject.step(module)
    floating = bool(_floating(subject.inputs()))
    for reentrant in (False, True):
        if reentrant and not floating:
            continue  # torch's reentrant variant needs an input that requires a gradient

        def through(*inputs: Tensor, reentrant: bool = reentrant) -> object:
            def call(*arguments: Tensor) -> Tensor:
                return subject.call(module, *arguments)

            return checkpoint(call, *inputs, use_reentrant=reentrant)

        inputs = subject.inputs()
        module.zero_grad()
        y = through(*inputs)
        assert isinstance(y, Tensor)  # as `subject.call` returns
        y.backward(cotangent(y))
        actual = {"the output": y.detach(), **gradients_of(module, inputs)}
        same(actual, expected, f"checkpoint with use_reentrant={reentrant}")


def saved_tensors_offloaded(subject: Subject) -> None:
    """Check that hooks on saved tensors, such as CPU offloading uses, change no result."""
    module = subject.module()
    expected = subject.step(module)
    with save_on_cpu():
        same(subject.step(module), expected, "save_on_cpu")


def hooked(subject: Subject) -> None:
    """Check that each forward and backward hook is called exactly once."""
    module = subject.module()
    expected = subject.step(module)
    calls: list[str] = []
    module.register_forward_pre_hook(lambda *_: calls.append("forward pre"))
    module.register_forward_hook(lambda *_: calls.append("forward"))
    # torch runs backward hooks only for plain tensor outputs, and warns without input gradients
    backward = subject.output is None and bool(_floating(subject.inputs()))
    if backward:
        module.register_full_backward_hook(lambda *_: calls.append("backward"))
    same(subject.step(module), expected, "hooks")
    expected_calls = ["forward pre", "forward"] + ["backward"] * backward
    require(calls == expected_calls, f"hooks: expected {expected_calls}, got {calls}")


def without_gradients(subject: Subject) -> None:
    """Check that ``no_grad`` and ``inference_mode`` give the same output without a graph."""
    module = subject.module().eval()
    expected = subject.call(module, *subject.inputs())
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            y = subject.call(module, *subject.inputs())
        require(not y.requires_grad, "the output requires a gradient")
        near(type(context).__name__, y, expected)


def gradients_dense(subject: Subject) -> None:
    """Check that gradients have their parameters' strides, as fused optimizers require."""
    module = subject.module()
    y = subject.call(module, *subject.inputs())
    parameters = trained(module)
    actual = torch.autograd.grad(y, list(parameters.values()), cotangent(y), allow_unused=True)
    for (name, parameter), gradient in zip(parameters.items(), actual, strict=True):
        if gradient is not None:
            # strides of dimensions of size 1 do not matter
            pairs = zip(gradient.shape, gradient.stride(), parameter.stride(), strict=True)
            require(
                all(length == 1 or one == other for length, one, other in pairs),
                f"the gradient of {name}: expected strides {parameter.stride()}, got "
                f"{gradient.stride()}",
            )


def optimizers(subject: Subject) -> None:
    """Check that plain, foreach and fused optimizers take the same step."""
    module = subject.module()
    parameters = trained(module)
    y = subject.call(module, *subject.inputs())
    actual = torch.autograd.grad(y, list(parameters.values()), cotangent(y), allow_unused=True)
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        results = []
        for option in ("plain", "foreach", "fused"):
            twin = copy.deepcopy(module)
            twin_parameters = list(trained(twin).values())
            for parameter, gradient in zip(twin_parameters, actual, strict=True):
                # use the same gradients for all optimizers, so that only their steps can differ
                parameter.grad = gradient
            foreach = option == "foreach"
            fused = option == "fused"
            kind(twin_parameters, lr=0.1, foreach=foreach, fused=fused).step()
            values = [parameter.detach() for parameter in twin_parameters]
            results.append(dict(zip(parameters, values, strict=True)))
        for option, result in zip(("foreach", "fused"), results[1:], strict=True):
            same(result, results[0], f"{option} {kind.__name__}")


BEHAVIORS: tuple[Behavior, ...] = (
    gradients,
    second_gradients,
    gradient_penalty,
    forward_mode,
    backward_twice,
    parameters_frozen,
    inputs_frozen,
    output_changed_in_place,
    changed_before_backward,
    checkpointed,
    saved_tensors_offloaded,
    hooked,
    without_gradients,
    gradients_dense,
    optimizers,
)
