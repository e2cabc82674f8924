"""The table of merge methods, and the decorator that adds to it.

A method is a pure function of tensors, and its signature defines its parameters:

    @merge_method("my_average", inputs=(2, None))
    def my_average(tensors, base, *, weight: PerModel, sharpness: float = 1.0) -> Tensor:
        ...

The parameters are the keyword-only arguments. An argument annotated `PerModel` has one number for
each model, and any other argument has one value for all models. An argument without a default is
required. The public name of a parameter has no trailing underscore (``lambda_`` is ``lambda``). An
argument called ``noise`` receives the random source.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model_components._checks import check_choice

from .._torch import Tensor, torch
from .closed_forms import CALIBRATED
from .noise import Noise
from .parameters import Bound, Parameter, PerModel, Range, Value, value_type


# compared by identity, because methods are keys of dictionaries
@dataclass(eq=False)
class MergeMethod:
    """A merge method: call it on tensors, or pass its name to `merge_models`.

    Args:
        name: The method's name in recipes.
        function: The function of tensors.
        parameters: The method's parameters, by public name.
        base: ``"required"``, ``"optional"`` or ``"unused"``.
        inputs: The smallest and the largest number of models, without the base; None for no limit.
        elementwise: Whether an element of the result depends only on the elements at the same
            position in the inputs, so that any range of elements can be merged alone.
        validate: A function that checks the parameters of one tensor in combination. It raises a
            ValueError if they are invalid.
        noisy: Whether the function has an argument ``noise``, which receives the random source.
    """

    name: str
    function: Callable[..., Any]
    parameters: Mapping[str, Parameter]
    base: str = "unused"
    inputs: tuple[int, int | None] = (1, None)
    elementwise: bool = False
    validate: Callable[[Bound], None] | None = None
    noisy: bool = False

    def __post_init__(self) -> None:
        # so that help() and inspect.signature show the function's docstring and signature
        functools.update_wrapper(self, self.function)

    def near(self, name: str) -> list[str]:
        """Return the names of parameters that are similar to a misspelled name."""
        return difflib.get_close_matches(name, self.parameters, n=3)

    def parameter(self, name: str) -> Parameter:
        """Return the parameter with a public name.

        Raises:
            ValueError: There is no such parameter. The message suggests similar names.
        """
        if name in self.parameters:
            return self.parameters[name]
        near = self.near(name)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(
            f"{self.name}: unknown parameter {name!r}, expected one of "
            f"{', '.join(self.parameters)}{hint}"
        )

    def bind(self, number_of_models: int, values: Mapping[str, object]) -> Bound:
        """Check the values of parameters, and add the defaults of parameters without a value.

        Args:
            number_of_models: The number of models, and so of the values of a per-model parameter. A
                single value is used for all models.
            values: The values by public name (``lambda``) or argument name (``lambda_``).

        Returns:
            The function's keyword arguments.

        Raises:
            ValueError: A name is unknown, a required value is missing, a value has a wrong type or
                is out of range, or a parameter has a wrong number of values.
        """
        parameters: dict[str, object] = {}
        for argument, value in values.items():
            name = argument.rstrip("_")
            self.parameter(name)  # raises if it is unknown
            parameters[name] = value
        bound: Bound = {}
        for name, parameter in self.parameters.items():
            if name not in parameters and parameter.required:
                raise ValueError(f"{self.name}: parameter {name!r} is required, but was not given")
            value = parameters.get(name, parameter.default)
            if parameter.per_model:
                bound[parameter.argument] = self._check_values_per_model(
                    parameter, value, number_of_models
                )
            else:
                bound[parameter.argument] = parameter.check(value, self.name)
        if self.validate is not None:
            self.validate(bound)
        return bound

    def _check_values_per_model(
        self, parameter: Parameter, value: object, number_of_models: int
    ) -> list[Value]:
        """Return the checked values of a per-model parameter, one for each model."""
        many = [value] * number_of_models
        if isinstance(value, (list, tuple)):
            many = list(value)
        if len(many) != number_of_models:
            raise ValueError(
                f"{self.name}: {parameter.name} has {len(many)} values, expected one for each of "
                f"{number_of_models} models"
            )
        checked = []
        for number, one in enumerate(many, 1):
            # a recipe may give a value for some models only
            if one is None and parameter.required:
                raise ValueError(
                    f"{self.name}: parameter {parameter.name!r} is required, but model number "
                    f"{number} has no value"
                )
            checked.append(parameter.check(parameter.default if one is None else one, self.name))
        return checked

    def check_inputs(self, number_of_models: int, has_base: bool) -> None:
        """Check the number of models, and whether a base is given if the method needs one.

        Raises:
            ValueError: The number of models is out of range, the base is missing, or the method
                does not use the given base.
        """
        if has_base and self.base == "unused":
            raise ValueError(
                f"{self.name}: expected no base model, got one, which this method does not use"
            )
        if not has_base and self.base == "required":
            raise ValueError(f"{self.name}: expected a base model, got none")
        fewest, most = self.inputs
        if number_of_models < fewest or (most is not None and number_of_models > most):
            if most == fewest:
                need = f"exactly {fewest}"
            elif most is None:
                need = f"at least {fewest}"
            else:
                need = f"{fewest}-{most}"
            beside = " in addition to the base model" if self.base == "required" else ""
            raise ValueError(
                f"{self.name}: expected the number of models{beside} to be {need}, got "
                f"{number_of_models}"
            )

    @property
    def is_cut(self) -> bool:
        """Return whether the eager engine may split a tensor and merge the parts separately.

        A random method gets whole tensors, because its random numbers belong to the elements'
        positions in the whole tensor.
        """
        return self.elementwise and not self.noisy

    def compute(
        self, tensors: list[Tensor], base: Tensor | None, bound: Bound, noise: Noise
    ) -> Tensor:
        """Call the function with checked parameters.

        Raises:
            ValueError: The function does not return a real tensor of the inputs' shape.
        """
        if self.noisy:
            merged = self.function(tensors, base, noise=noise, **bound)
        else:
            merged = self.function(tensors, base, **bound)
        expected = tuple(tensors[0].shape)
        if not isinstance(merged, torch.Tensor) or merged.is_complex() or merged.shape != expected:
            got = type(merged).__name__
            if isinstance(merged, torch.Tensor):
                got = f"a tensor of shape {tuple(merged.shape)} and dtype {merged.dtype}"
            raise ValueError(f"{self.name}: expected a real tensor of shape {expected}, got {got}")
        return merged

    def __call__(
        self,
        tensors: Sequence[Tensor],
        base: Tensor | None = None,
        *,
        seed: int = 0,
        name: str = "",
        **parameters: object,
    ) -> Tensor:
        """Merge tensors of equal shape; the result is differentiable.

        The result has the dtype to which torch promotes the tensors' dtypes. It is computed in
        float32, or in float64 if that is the result's dtype, and rounded once.

        Args:
            tensors: One tensor per model, all of the same shape.
            base: The base model's tensor, for methods that use one.
            seed: The seed of random methods.
            name: The tensor's name, on which random numbers depend.
            **parameters: The method's parameters.

        Raises:
            ValueError: The shapes differ, or `bind` or `check_inputs` raises an error.
        """
        tensors = list(tensors)
        self.check_inputs(len(tensors), base is not None)
        operands = [*tensors, *([] if base is None else [base])]
        shapes = {tuple(t.shape) for t in operands}
        if len(shapes) > 1:
            raise ValueError(
                f"{self.name}: expected tensors of equal shape, got shapes {sorted(shapes)}"
            )
        bound = self.bind(len(tensors), parameters)
        dtype = functools.reduce(torch.promote_types, (t.dtype for t in operands))
        work = torch.float64 if dtype == torch.float64 else torch.float32
        # methods need at least one element, for example for order statistics
        if not tensors[0].numel():
            return torch.zeros_like(tensors[0], dtype=dtype)
        widened = [t.to(work) for t in tensors]
        widened_base = None if base is None else base.to(work)
        return self.compute(widened, widened_base, bound, Noise(seed, name)).to(dtype)


METHODS: dict[str, MergeMethod] = {}
"""The merge methods without calibration data, by name; `merge_method` adds to them."""


def merge_method(
    name: str,
    *,
    base: str = "unused",
    inputs: tuple[int, int | None] = (1, None),
    elementwise: bool = False,
    ranges: Mapping[str, Range] | None = None,
    validate: Callable[[Bound], None] | None = None,
) -> Callable[[Callable[..., object]], MergeMethod]:
    """Register a function ``(tensors, base, *, parameters) -> Tensor`` as a merge method.

    The function's keyword-only arguments are the method's parameters. An argument annotated
    `PerModel` has one number for each model, and any other argument has one value for all models.
    An argument without a default is required. The public name of a parameter has no trailing
    underscore (``lambda_`` is ``lambda``). An argument called ``noise`` receives a `Noise`.

    Args:
        name: The method's name in recipes.
        base: ``"required"``, ``"optional"`` or ``"unused"``.
        inputs: The smallest and the largest number of models, without the base; None for no limit.
        elementwise: Whether an element of the result depends only on the elements at the same
            position in the inputs. Then the function may get ranges of flattened tensors, so that
            memory does not grow with the tensor. A method with ``noise`` always gets whole tensors.
        ranges: The `Range` of each numeric parameter that has limits, by public name.
        validate: A function that checks the parameters of a tensor in combination. It raises a
            ValueError if they are invalid.

    Returns:
        A decorator that returns the registered method.

    Raises:
        ValueError: The name is not a string or is already in use, ``base`` is not one of the three
            values, or the function's arguments do not begin with (tensors, base).

    >>> @merge_method("largest_value", inputs=(2, None), elementwise=True)
    ... def largest_value(tensors, base, *, weight: PerModel = 1.0):
    ...     return torch.stack([w * t for w, t in zip(weight, tensors)]).amax(0)
    >>> largest_value([torch.tensor([1.0, 5.0]), torch.tensor([2.0, 3.0])])
    tensor([2., 5.])
    >>> _ = METHODS.pop("largest_value")
    """
    if not isinstance(name, str):
        raise ValueError(
            f"merge_method: expected a name, as in @merge_method('my_average'), got {name!r}"
        )
    check_choice("merge_method", "base", base, ("required", "optional", "unused"))

    def decorate(function: Callable[..., object]) -> MergeMethod:
        if name in METHODS:
            raise ValueError(f"merge_method: a method called {name!r} is registered already")
        # with `from __future__ import annotations`, a signature has strings in place of types
        hints = typing.get_type_hints(function)
        signature = inspect.signature(function)
        try:
            named = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
            signature.bind([], None, **dict.fromkeys(named))
        except TypeError as error:
            raise ValueError(
                f"merge_method: expected {name} to be a function (tensors, base, *, parameters), "
                f"got {signature}"
            ) from error
        parameters = {}
        for key, argument in signature.parameters.items():
            if argument.kind is not argument.KEYWORD_ONLY or key == "noise":
                continue
            public = key.rstrip("_")
            hint = hints.get(key, float)
            per_model = hint == PerModel
            parameters[public] = Parameter(
                name=public,
                argument=key,
                type=float if per_model else value_type(hint),
                default=argument.default,
                per_model=per_model,
                range=(ranges or {}).get(public),
            )
        method = MergeMethod(
            name,
            function,
            parameters,
            base,
            inputs,
            elementwise,
            validate,
            "noise" in signature.parameters,
        )
        METHODS[name] = method
        return method

    return decorate


def get_method(name: str) -> MergeMethod:
    """Return the merge method with the given name.

    Args:
        name: Its name in recipes.

    Returns:
        The method, which can be called on tensors.

    Raises:
        ValueError: There is no such method, or it needs calibration data. The message suggests what
            to use instead.

    >>> get_method("slerp").name
    'slerp'
    >>> get_method("slurp")
    Traceback (most recent call last):
    ValueError: merge method 'slurp' is unknown; did you mean slerp...
    """
    if name in METHODS:
        return METHODS[name]
    if name in CALIBRATED:
        raise ValueError(
            f"merge method {name!r} needs calibration data for each model; run mergekit-lite "
            "merge RECIPE OUT --calibration with a file for each model, or in Python "
            f"merge_models([...], {name!r}, calibration=[...], out=...)"
        )
    # 0.4 finds task_arithmetic for task, which the default of 0.6 does not
    known = sorted([*METHODS, *CALIBRATED])
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    raise ValueError(
        f"merge method {name!r} is unknown{hint} All methods: {', '.join(known)}. A method of "
        "your own exists only in the Python process that registered it"
    )
