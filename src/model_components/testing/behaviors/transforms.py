"""Behaviors under `torch.func`, `torch.compile` and `torch.export`."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd, jacrev, vmap

from .subject import Behavior, Subject, cotangent, near, same, trained


def _loss_of(subject: Subject, module: nn.Module) -> Callable[..., Tensor]:
    """Return a loss as a function of the parameters and the inputs."""

    def loss(parameters: dict[str, Tensor], *inputs: Tensor) -> Tensor:
        def call(*arguments: Tensor) -> object:
            return functional_call(module, parameters, arguments)

        y = subject.call(call, *inputs)
        return (y * y).sum()

    return loss


def called_functionally(subject: Subject) -> None:
    """Check that ``functional_call`` uses the given state instead of the module's own."""
    module = subject.module()
    expected = subject.call(module, *subject.inputs())
    state = copy.deepcopy(module.state_dict())
    with torch.no_grad():
        for parameter in trained(module).values():
            # detects a module that reads its own parameters instead of the given state
            parameter.add_(1.0)

    def call(*inputs: Tensor) -> object:
        return functional_call(module, state, inputs)

    near("the output", subject.call(call, *subject.inputs()), expected)


def func_grad(subject: Subject) -> None:
    """Check that ``torch.func.grad`` gives autograd's gradients."""
    module = subject.module()
    inputs = [x.detach() for x in subject.inputs()]
    y = subject.call(module, *inputs)
    (y * y).sum().backward()
    parameters = {name: p.detach() for name, p in trained(module).items()}
    actual = grad(_loss_of(subject, module))(parameters, *inputs)
    expected = {}
    for name, parameter in trained(module).items():
        # `grad` gives zeros for a parameter that does not affect the output
        unused = parameter.grad is None
        expected[name] = torch.zeros_like(parameter) if unused else parameter.grad
    same(actual, expected, "torch.func.grad")


def func_vmap(subject: Subject) -> None:
    """Check that ``vmap`` over batches gives the same output as a loop."""
    module = subject.module()
    inputs = [x.detach() for x in subject.inputs()]
    batches = [torch.stack([x, x.flip(0)]) for x in inputs]
    expected = torch.stack([subject.call(module, *(b[i] for b in batches)) for i in range(2)])
    actual = vmap(lambda *one: subject.call(module, *one))(*batches)
    near("the output", actual, expected)


def per_sample_gradients(subject: Subject) -> None:
    """Check that per-row gradients from ``vmap`` of ``grad`` sum to the batch's gradient."""
    module = subject.module()
    inputs = [x.detach() for x in subject.inputs()]
    parameters = {name: p.detach() for name, p in trained(module).items()}
    loss = _loss_of(subject, module)
    whole = grad(loss)(parameters, *inputs)

    def of_row(parameters: dict[str, Tensor], *row: Tensor) -> dict[str, Tensor]:
        return grad(loss)(parameters, *(x[None] for x in row))

    rows = vmap(of_row, in_dims=(None, *[0] * len(inputs)))(parameters, *inputs)
    sums = {name: value.sum(0) for name, value in rows.items()}
    same(sums, whole, "the sum of the rows' gradients")


def jacobians(subject: Subject) -> None:
    """Check that forward and reverse mode give the same Jacobian."""
    module = subject.module(torch.float64)
    inputs = [x.detach()[:1] for x in subject.inputs(torch.float64)]
    # the smallest parameter, because the size of the Jacobian grows with it
    name, parameter = min(trained(module).items(), key=lambda item: item[1].numel())

    def output(value: Tensor) -> Tensor:
        def call(*arguments: Tensor) -> object:
            return functional_call(module, {name: value}, arguments)

        return subject.call(call, *inputs)

    value = parameter.detach()
    near("the Jacobian", jacfwd(output)(value), jacrev(output)(value))


def compiled_training(subject: Subject) -> None:
    """Check that one compiled graph gives the same output and gradients in training."""
    module = subject.module()
    expected = subject.step(module)
    # otherwise compilations of earlier behaviors would count toward torch's limit
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend=subject.backend)
    inputs = subject.inputs()
    module.zero_grad()
    y = subject.call(compiled, *inputs)
    y.backward(cotangent(y))
    actual: dict[str, Tensor | None] = {"the output": y.detach()}
    # from the module itself, because the compiled module renames its parameters
    for name in expected:
        if name.startswith("the gradient of input"):
            actual[name] = inputs[int(name.rpartition(" ")[2])].grad
        elif name.startswith("the gradient of "):
            actual[name] = module.get_parameter(name.removeprefix("the gradient of ")).grad
    same(actual, expected, "the compiled module")


def compiled_evaluation(subject: Subject) -> None:
    """Check that one compiled graph gives the same output in evaluation without gradients."""
    module = subject.module().eval()
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend=subject.backend)
    with torch.no_grad():
        expected = subject.call(module, *subject.inputs())
        near("the output", subject.call(compiled, *subject.inputs()), expected)


def compiled_for_any_batch(subject: Subject) -> None:
    """Check that one compiled graph gives the same output for batches of several sizes."""
    module = subject.module()
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend=subject.backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (2, 3, 4):
            inputs = [x.detach()[:rows] for x in subject.inputs()]
            for x in inputs:
                # not dynamic=True, with which LatentThinker takes three times as long to compile
                torch._dynamo.mark_dynamic(x, 0)
            near(
                f"{rows} rows",
                subject.call(compiled, *inputs),
                subject.call(module, *inputs),
            )


def exported(subject: Subject) -> None:
    """Check that ``torch.export`` captures the module for batches of 2 or more rows."""
    module = subject.module().eval()
    inputs = tuple(x.detach() for x in subject.inputs())
    # at least 2, because torch.export treats sizes 0 and 1 as constants
    batch = torch.export.Dim("batch", min=2, max=1 << 20)
    shapes = (tuple({0: batch} for _ in inputs),)
    program = torch.export.export(_Wrapped(module), inputs, dynamic_shapes=shapes).module()
    for rows in (len(inputs[0]), 3):
        part = [x[:rows] for x in inputs]
        near(f"{rows} rows", subject.call(program, *part), subject.call(module, *part))


class _Wrapped(nn.Module):
    """A wrapper whose forward takes ``*inputs``, so that argument names do not matter."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> object:
        return self.module(*inputs)


BEHAVIORS: tuple[Behavior, ...] = (
    called_functionally,
    func_grad,
    func_vmap,
    per_sample_gradients,
    jacobians,
    compiled_training,
    compiled_evaluation,
    compiled_for_any_batch,
    exported,
)
