"""`MaskConfig` and `KLConfig`: the settings of masks, and of the loss that trains them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

from model_components._checks import CheckedConfig, Range, problem

Mode = Literal["accurate", "efficient", "auto"]
Granularity = Literal["scalar", "input", "output", "element"]
Constraint = Literal["auto", "none", "sum_to_one", "unit_interval", "sigmoid"]
Coefficients = Literal["task", "evidence", "confidence", "fixed"]
Direction = Literal["forward", "reverse"]
Weight = Annotated[float, Range(least=0)]


@dataclass(frozen=True, kw_only=True)
class MaskConfig(CheckedConfig):
    """Settings of the masks over the weights of a merged model.

    Args:
        mode: ``"accurate"`` blends the weights, then multiplies once: ``x @ (Σ m_k W_k).T``.
            ``"efficient"`` multiplies by every component's weights: ``Σ (m_k * x) @ W_k.T``.
            ``"auto"`` uses the efficient mode for very few tokens, where it is faster, and the
            accurate mode otherwise.
        granularity: One mask value for each weight matrix (``"scalar"``), input column
            (``"input"``), output row (``"output"``) or element (``"element"``). Vectors (biases,
            norms) have one value per element, except with ``"scalar"``. An embedding is treated
            like the output head that it may be tied to: ``"input"`` is one value for each hidden
            feature, ``"output"`` one for each token.
        constraint: The condition on the K mask values of one weight element; see `constrain`.
            ``"unit_interval"`` clamps each value to 0..1. ``"sigmoid"`` is the sigmoid of the
            trained value. ``"auto"`` is ``"none"`` with a base and ``"sum_to_one"`` without, since
            unconstrained masks of whole weights would also scale what the components share.
        modules: Patterns of module names, such as ``("model.layers.*.mlp.*",)``. Only masks of
            matching modules are trained, and the others keep their initial values. Default: all
            masks are trained.
        initial: The initial masks: one number for all; ``"average"`` (1 / K); ``"component:1"``
            (only component 1, counted from 0); or ``"random"`` (uniform in 0..1, then divided by
            the sum over components). If the base is a merge that training starts from, use 0.
        seed: The seed for ``"random"``.

    Raises:
        ValueError: A value is invalid, or ``granularity="element"`` is used with
            ``mode="efficient"``.

    >>> MaskConfig.from_json(MaskConfig(granularity="input").to_json()).granularity
    'input'
    """

    # the default, because the checkpoint that `bake` writes then gives the same logits exactly
    mode: Mode = "accurate"
    granularity: Granularity = "output"
    constraint: Constraint = "auto"
    modules: tuple[str, ...] | None = None
    initial: float | str = "average"
    seed: int = 0

    def resolved(self, *, over_base: bool) -> Self:
        """Return the config with the constraint that ``"auto"`` stands for.

        Args:
            over_base: Whether masks apply to differences from a base.
        """
        if self.constraint != "auto":
            return self
        return replace(self, constraint="none" if over_base else "sum_to_one")

    def problems(self) -> Iterator[str]:
        """Yield messages about invalid patterns or initial masks, and conflicting settings."""
        # an empty tuple would train nothing, while None trains everything
        if self.modules == ():
            yield problem(self, "modules", "one pattern or more, or None")
        if self.granularity == "element" and self.mode == "efficient":
            yield (
                f"mode {self.mode!r} masks inputs or outputs, so it does not support granularity "
                "'element'; expected mode 'accurate' or 'auto'"
            )
        if isinstance(self.initial, str) and not re.fullmatch(
            r"average|random|component:\d+", self.initial
        ):
            yield problem(self, "initial", "a number, average, random or component:INDEX")


@dataclass(frozen=True, kw_only=True)
class KLConfig(CheckedConfig):
    """Settings of the loss that trains masks.

    The loss is ``KL(Σ_k c_k component_k, merged)``, averaged over positions, plus the terms below
    whose weights are above 0.

    Args:
        coefficients: How the teachers' shares c_k are chosen. ``"task"``: 1 for the component
            whose index is the example's ``task``, and 0 for the others. ``"evidence"``:
            proportional to the probability that component k gives the example, Π_t p_k(x_t) over
            its supervised tokens; no task is needed. ``"confidence"``: for each token, the softmax
            of the teachers' negative entropies. ``"fixed"``: the numbers in ``shares``.
        shares: One number per component, for ``"fixed"``. They are divided by their sum.
        confidence_temperature: The temperature of the softmax of ``"confidence"``. At 0, the
            teacher with the lowest entropy gets the whole share.
        temperature: T. The logits of the student and the teachers are divided by T, and the loss
            is multiplied by T².
        direction: ``"forward"`` KL(teacher, merged) or ``"reverse"`` KL(merged, teacher).
        cross_entropy: Weight of the cross-entropy with the labels.
        l1: Weight of the mean absolute mask.
        l2: Weight of the mean squared mask.
        similarity: Weight of the mean cosine similarity between the components' masks. This
            penalty drives the masks apart.

    Raises:
        ValueError: A value is invalid, or only one of ``shares`` and ``coefficients="fixed"`` is
            given.

    >>> KLConfig(coefficients="confidence", temperature=2.0).direction
    'forward'
    """

    coefficients: Coefficients = "task"
    shares: Annotated[tuple[float, ...] | None, Range(least=0)] = None
    confidence_temperature: Weight = 1.0
    temperature: Annotated[float, Range(least=1e-6)] = 1.0
    direction: Direction = "forward"
    cross_entropy: Weight = 0.0
    l1: Weight = 0.0
    l2: Weight = 0.0
    similarity: Weight = 0.0

    @property
    def penalizes(self) -> bool:
        """Return whether a penalty on masks has a weight above 0."""
        return any((self.l1, self.l2, self.similarity))

    def problems(self) -> Iterator[str]:
        """Yield messages if ``shares`` come without ``"fixed"`` or vice versa, or sum to 0."""
        if (self.shares is None) == (self.coefficients == "fixed"):
            yield (
                f"coefficients is {self.coefficients!r} and shares is {self.shares!r}; shares "
                "belong to coefficients='fixed', expected both or neither"
            )
        if self.shares is not None and not sum(self.shares) > 0:
            yield problem(self, "shares", "a sum above 0")
