"""`Subject`: the module that is tried, and how results are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

# Relative and absolute errors of float32 sums in another order; wrong results are far outside
_NEAR = 1e-4


class Subject:
    """A module to try.

    Args:
        make: Function that makes the module.
        inputs: Arguments of its forward.
        output: Function from the forward's result to one tensor.
        backend: Backend of `torch.compile`.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        inputs: Sequence[Tensor],
        output: Callable[[object], Tensor] | None,
        backend: str,
    ):
        self.make = make
        self.given = tuple(inputs)
        self.output = output
        self.backend = backend

    def module(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return a new module in training mode, the same each time."""
        torch.manual_seed(0)
        return self.make().train().to(dtype)

    def inputs(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
        """Return new inputs; the floating ones want gradients."""
        return tuple(
            x.detach().to(dtype).clone().requires_grad_() if x.is_floating_point() else x.clone()
            for x in self.given
        )

    def call(self, module: Callable[..., object], *inputs: Tensor) -> Tensor:
        """Return a module's output as one tensor."""
        torch.manual_seed(0)
        result = module(*inputs)
        if self.output is not None:
            result = self.output(result)
        if not isinstance(result, Tensor):
            raise TypeError(
                f"check_module: the forward gives {type(result).__name__}, expected a tensor, or "
                "output= that makes one of it"
            )
        return result

    def step(
        self, module: nn.Module, inputs: Sequence[Tensor] | None = None
    ) -> dict[str, Tensor | None]:
        """Return the output and all gradients of one training step."""
        if inputs is None:
            inputs = self.inputs(next(module.parameters()).dtype)
        module.zero_grad()
        y = self.call(module, *inputs)
        y.backward(cotangent(y))
        return {"the output": y.detach(), **gradients_of(module, inputs)}


Behavior = Callable[[Subject], None]


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that want gradients, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def gradients_of(module: nn.Module, inputs: Sequence[Tensor]) -> dict[str, Tensor | None]:
    """Return the gradients that a backward pass left."""
    found: dict[str, Tensor | None] = {}
    for name, parameter in trained(module).items():
        found[f"the gradient of {name}"] = parameter.grad
    for number, x in enumerate(inputs):
        if x.requires_grad:
            found[f"the gradient of input {number}"] = x.grad
    return found


def cotangent(y: Tensor) -> Tensor:
    """Return a fixed gradient to propagate from an output."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    return drawn.to(y.dtype).to(y.device)


def near(what: str, found: Tensor | None, expected: Tensor | None) -> None:
    """Compare two tensors of about float32's precision."""
    if found is None or expected is None:
        assert found is expected, f"{what} is {_known(found)}, expected {_known(expected)}"
        return
    assert found.shape == expected.shape, (
        f"{what} has shape {list(found.shape)}, expected {list(expected.shape)}"
    )
    if not expected.numel():
        return
    scale = float(expected.detach().abs().max())
    difference = float((found.detach().double() - expected.detach().double()).abs().max())
    assert difference <= _NEAR * max(scale, _NEAR), (
        f"{what} differs by {difference:.1e}, where values are up to {scale:.1e}"
    )


def _known(value: Tensor | None) -> str:
    return "None" if value is None else "a tensor"


def same(
    found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], where: str
) -> None:
    """Compare the results of two steps."""
    assert found.keys() == expected.keys(), (
        f"{where}: gradients of {sorted(found)}, expected of {sorted(expected)}"
    )
    for name, value in expected.items():
        near(f"{where}: {name}", found[name], value)
