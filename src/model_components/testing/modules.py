"""`check_module`: check that a module can do everything that torch's own modules can do."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .._report import Report, Table
from .behaviors import autograd, copies, distributed, forms, transforms
from .behaviors.subject import Behavior, Subject, WrongResult

BEHAVIORS: dict[str, Behavior] = {
    function.__name__: function
    for module in (copies, forms, autograd, transforms, distributed)
    for function in module.BEHAVIORS
}
"""All behaviors by name. Each is a function whose docstring describes the check."""


@dataclass(frozen=True)
class ModuleReport(Report):
    """The result of `check_module`.

    Attributes:
        passed: The names of the behaviors that passed.
        raised: The error messages of the behaviors that raised an error, by behavior name.
        wrong: The differences of the behaviors that gave a wrong result without an error, by
            behavior name.
    """

    passed: tuple[str, ...]
    raised: Mapping[str, str]
    wrong: Mapping[str, str]

    def summary(self) -> list[str]:
        """Return a line with the numbers of behaviors that passed, raised an error or are wrong."""
        return [
            f"{len(self.passed)} behaviors passed, {len(self.raised)} raised an error, "
            f"{len(self.wrong)} wrong"
        ]

    def table(self) -> Table:
        """Return the behaviors that did not pass, with the beginning of each message."""
        rows = [
            (name, result, textwrap.shorten(message, 100))
            for result, messages in (("wrong", self.wrong), ("raised", self.raised))
            for name, message in messages.items()
        ]
        return Table(("behavior", "result", "message"), rows, sentences=True)


def check_module(
    make: Callable[[], nn.Module],
    *inputs: Tensor,
    output: Callable[[object], Tensor] | None = None,
    only: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    backend: str = "aot_eager",
) -> ModuleReport:
    """Check that a module can do everything that torch's own modules can do.

    A behavior passes if its result agrees with a plain call of the module or with finite
    differences. A behavior that raises an error is not supported, but users notice that. A behavior
    that gives a wrong result without an error is a bug in the module.

    Args:
        make: A function that makes the module, in float32 on the CPU. It is called many times. The
            module must be deterministic in training mode, for example without dropout.
        inputs: The arguments of the module's forward. The batch dimension comes first and has an
            even size, 4 or more. Gradients are taken with respect to floating inputs.
        output: A function that turns the forward's result into one tensor; default: the result
            itself, which must be a tensor.
        only: Names of the behaviors to try; default: all of `BEHAVIORS`.
        skip: Names of behaviors that do not apply, such as ``"leading_dimensions"`` if the forward
            reads sequences, or ``"parameters_reset"`` if the module has no ``reset_parameters``.
        backend: The backend of `torch.compile`. ``"inductor"`` also compiles kernels, and is slow.

    Returns:
        A report of the behaviors that passed, raised an error, or are wrong. Printed, it is a
        table.

    Raises:
        ValueError: A behavior is unknown, ``make`` is a module instead of a function, or inputs
            have the wrong sizes.

    >>> print(check_module(lambda: torch.nn.Linear(4, 3), torch.ones(6, 4), only=["pickled"]))
    1 behaviors passed, 0 raised an error, 0 wrong
    """
    _check_arguments(make, inputs, only, skip)
    chosen = list(BEHAVIORS if only is None else only)
    skipped = set(skip)
    _check_known([*chosen, *skipped])
    subject = Subject(make, inputs, output, backend)
    passed = []
    raised = {}
    wrong = {}
    hook = sys.excepthook
    for name in chosen:
        if name in skipped:
            continue
        try:
            # behaviors seed the CPU's generator; the caller's state is restored afterwards
            with torch.random.fork_rng(devices=[]):
                BEHAVIORS[name](subject)
        except WrongResult as error:
            wrong[name] = str(error)
        except Exception as error:
            raised[name] = f"{type(error).__name__}: {error}"
        else:
            passed.append(name)
    sys.excepthook = hook  # torch.distributed replaces the hook
    return ModuleReport(tuple(passed), raised, wrong)


def _check_arguments(make: object, inputs: Sequence[Tensor], only: object, skip: object) -> None:
    for name, value in (("only", only), ("skip", skip)):
        # a string would be read as a list of characters
        if isinstance(value, str):
            raise ValueError(f"check_module: expected a list for {name}, got {value!r}")
    if isinstance(make, nn.Module):
        raise ValueError(
            f"check_module: expected a function that makes a module, got a {type(make).__name__}; "
            "write lambda: ..."
        )
    rows = {len(x) if x.dim() else 0 for x in inputs}
    # even, because a behavior halves the batch; `exported` declares the same upper limit
    if len(rows) != 1 or rows.pop() not in range(4, 1 << 20, 2):
        raise ValueError(
            "check_module: expected inputs with the same first dimension (the batch), even and at "
            f"least 4, got shapes {[list(x.shape) for x in inputs]}"
        )


def _check_known(names: Sequence[str]) -> None:
    unknown = [name for name in names if name not in BEHAVIORS]
    if unknown:
        raise ValueError(
            f"check_module: unknown behavior {unknown[0]!r}; expected one of {', '.join(BEHAVIORS)}"
        )
