"""`Subject`, the module under test, and functions that compare results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

# Relative error from the order of float32 sums; wrong results differ by far more
NEAR = 1e-4


class WrongResult(AssertionError):
    """An error for a behavior that gives a wrong result without raising an error itself."""


def require(condition: bool, message: str) -> None:
    """Raise `WrongResult` unless a condition holds."""
    if not condition:
        raise WrongResult(message)


class Subject:
    """A module under test.

    Args:
        make: A function that makes the module.
        inputs: The arguments of the module's forward.
        output: A function that turns the forward's result into one tensor; None if the result is
            one tensor already.
        backend: The backend of `torch.compile`.
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

    @property
    def device(self) -> torch.device:
        """The device of the inputs."""
        return self.given[0].device

    def module(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return a new module in training mode, with the same parameters each time."""
        torch.manual_seed(0)
        return self.make().train().to(dtype)

    def inputs(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
        """Return new inputs; the floating ones require gradients."""
        return tuple(
            x.detach().to(dtype).clone().requires_grad_() if x.is_floating_point() else x.clone()
            for x in self.given
        )

    def call(self, module: Callable[..., object], *inputs: Tensor) -> Tensor:
        """Return a module's output as one tensor."""
        # seed, so that a forward that draws random numbers draws the same numbers in each call
        torch.manual_seed(0)
        result = module(*inputs)
        if self.output is not None:
            result = self.output(result)
        if not isinstance(result, Tensor):
            raise TypeError(
                f"check_module: the forward returns {type(result).__name__}, expected a tensor; "
                "pass a function to output= that turns the result into a tensor"
            )
        return result

    def step(
        self, module: nn.Module, inputs: Sequence[Tensor] | None = None
    ) -> dict[str, Tensor | None]:
        """Return the output and all gradients of one training step."""
        if inputs is None:
            inputs = self.inputs(_dtype_of(module))
        module.zero_grad()
        y = self.call(module, *inputs)
        y.backward(cotangent(y))
        return {"the output": y.detach(), **gradients_of(module, inputs)}


def _dtype_of(module: nn.Module) -> torch.dtype:
    """Return the dtype of a module's first floating tensor, or float32 if it has none."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            return tensor.dtype
    return torch.float32


Behavior = Callable[[Subject], None]


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def gradients_of(module: nn.Module, inputs: Sequence[Tensor]) -> dict[str, Tensor | None]:
    """Return the gradients of the parameters and inputs after a backward pass."""
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
    # in float64, because the numbers that torch draws depend on the dtype
    drawn = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    return drawn.to(y.dtype).to(y.device)


def near(
    what: str,
    actual: Tensor | None,
    expected: Tensor | None,
    *,
    limit: float = NEAR,
    scale: float | None = None,
) -> None:
    """Raise `WrongResult` unless two tensors agree within a tolerance.

    Args:
        what: The name of the tensor in messages.
        actual: The tensor, or None.
        expected: The expected tensor, or None.
        limit: The largest allowed difference, as a share of the scale.
        scale: The value that differences are relative to; default: the largest expected value.
    """
    if actual is None or expected is None:
        require(actual is expected, f"{what}: expected {_kind(expected)}, got {_kind(actual)}")
        return
    require(
        actual.shape == expected.shape,
        f"{what}: expected shape {list(expected.shape)}, got {list(actual.shape)}",
    )
    if not expected.numel():
        return
    if scale is None:
        scale = size(expected)
    difference = size(actual.detach().double() - expected.detach().double())
    # even if all expected values are 0, rounding is allowed
    most = limit * max(scale, NEAR)
    require(
        difference <= most,  # false for NaN, too
        f"{what}: expected a difference of at most {most:.1e}, got {difference:.1e} (largest value "
        f"{scale:.1e})",
    )


def size(tensor: Tensor | None) -> float:
    """Return the largest absolute value of a tensor, or 0 for None and empty tensors."""
    if tensor is None or not tensor.numel():
        return 0.0
    return float(tensor.detach().abs().max())


def _kind(value: Tensor | None) -> str:
    return "None" if value is None else "a tensor"


def same(
    actual: Mapping[str, Tensor | None],
    expected: Mapping[str, Tensor | None],
    where: str,
    *,
    limit: float = NEAR,
) -> None:
    """Raise `WrongResult` unless two training steps gave the same output and gradients.

    Errors of gradients are relative to the largest gradient, because some gradients are zero in
    theory and consist of rounding errors only, such as a bias's gradient before a normalization.
    """
    require(
        actual.keys() == expected.keys(),
        f"{where}: expected gradients of {sorted(expected)}, got {sorted(actual)}",
    )
    gradients = [size(value) for name, value in expected.items() if name != "the output"]
    largest = max(gradients, default=0.0)
    for name, value in expected.items():
        scale = size(value) if name == "the output" else largest
        near(f"{where}: {name}", actual[name], value, limit=limit, scale=scale)
