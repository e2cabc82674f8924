"""`MaskConfig` and `KLConfig`: how masks lie over the weights, and what they learn from."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields, replace
from typing import Self

MODES = ("accurate", "efficient", "auto")
GRANULARITIES = ("scalar", "input", "output", "element")
CONSTRAINTS = ("auto", "none", "sum_to_one", "unit_interval", "sigmoid")
COEFFICIENTS = ("task", "evidence", "confidence", "fixed")
DIRECTIONS = ("forward", "reverse")


def _one_of(owner: str, name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{owner}: {name} is {value!r}, expected one of {', '.join(allowed)}")


def _at_least(owner: str, low: float, **values: float) -> None:
    for name, value in values.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not low <= value < float("inf")
        ):
            raise ValueError(
                f"{owner}: {name} is {value!r}, expected a finite number of at least {low:g}"
            )


class _Json:
    def to_json(self) -> str:
        """Return it as JSON text."""
        # pyrefly: ignore[bad-argument-type]: its subclasses are dataclasses
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote.

        Raises:
            ValueError: An unknown field, or a bad value.
        """
        values = json.loads(text)
        # pyrefly: ignore[bad-argument-type]: its subclasses are dataclasses
        known = [f.name for f in fields(cls)]
        if unknown := sorted(values.keys() - set(known)):
            raise ValueError(
                f"{cls.__name__}: unknown field {unknown[0]!r}; it has {', '.join(known)}"
            )
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


@dataclass(frozen=True, kw_only=True)
class MaskConfig(_Json):
    """Settings of masks: how they lie over the weights of a merged model.

    Args:
        mode: ``"accurate"`` blends the weights, then multiplies once: ``x @ (Σ m_k W_k).T``;
            ``"efficient"`` multiplies by every component: ``Σ (m_k * x) @ W_k.T``; ``"auto"`` is
            efficient for very few tokens, where it is the faster one, and accurate elsewhere.
        granularity: One mask value for each weight matrix (``"scalar"``), input column
            (``"input"``), output row (``"output"``) or element (``"element"``). Vectors (biases,
            norms) have one value an element unless ``"scalar"``. An embedding is read as the output
            head it may be tied to: ``"input"`` is one value for each hidden feature, ``"output"``
            one for each token.
        constraint: The condition on the K mask values of one weight element. ``"auto"`` is
            ``"none"`` over a base, else ``"sum_to_one"``, since free masks over whole weights would
            also scale what the components have in common. ``"unit_interval"`` clamps each value to
            0..1; ``"sigmoid"`` makes it a function of the trained value. See `constrain`.
        modules: Patterns of module names such as ``("model.layers.*.mlp.*",)``: only masks over
            matching modules are trained, the others keep their initial value; default: all are
            trained.
        initial: A number for every mask; ``"average"`` (1 / K); ``"component:1"`` (that component
            alone); ``"random"`` (uniform in 0..1, then divided by their sum); or the path of a YAML
            recipe (`linear` or `task_arithmetic`) whose weights are taken.
        seed: Of ``"random"``.

    Raises:
        ValueError: A value outside these, or ``"element"`` with ``mode="efficient"``.

    >>> MaskConfig.from_json(MaskConfig(granularity="output").to_json()).granularity
    'output'
    """

    mode: str = "accurate"
    granularity: str = "input"
    constraint: str = "auto"
    modules: tuple[str, ...] | None = None
    initial: float | str = "average"
    seed: int = 0

    def resolved(self, *, over_base: bool) -> Self:
        """With the constraint that ``"auto"`` stands for.

        Args:
            over_base: Masks lie over differences from a base.
        """
        if self.constraint != "auto":
            return self
        return replace(self, constraint="none" if over_base else "sum_to_one")

    def __post_init__(self) -> None:
        _one_of("MaskConfig", "mode", self.mode, MODES)
        _one_of("MaskConfig", "granularity", self.granularity, GRANULARITIES)
        _one_of("MaskConfig", "constraint", self.constraint, CONSTRAINTS)
        if self.modules is not None and not (
            isinstance(self.modules, tuple)
            and self.modules
            and all(isinstance(p, str) for p in self.modules)
        ):
            raise ValueError(
                f"MaskConfig: modules is {self.modules!r}, expected a tuple of patterns, or None"
            )
        if self.granularity == "element" and self.mode == "efficient":
            raise ValueError(
                f"MaskConfig: mode {self.mode!r} cannot do granularity 'element', which masks "
                "weights and not inputs or outputs; expected mode 'accurate' or 'auto'"
            )
        if isinstance(self.initial, str):
            named = self.initial in ("average", "random") or re.fullmatch(
                r"component:\d+", self.initial
            )
            if not named and not self.initial.endswith((".yml", ".yaml")):
                raise ValueError(
                    f"MaskConfig: initial is {self.initial!r}, expected a number, average, random, "
                    "component:INDEX or the path of a recipe (.yml)"
                )
        else:
            _at_least("MaskConfig", float("-1e30"), initial=self.initial)


@dataclass(frozen=True, kw_only=True)
class KLConfig(_Json):
    """Settings of training: what the merged model is trained towards.

    ``KL(Σ_k c_k component k, merged)``, averaged over positions.

    Args:
        coefficients: Where the teachers' shares c_k come from. ``"task"``: 1 for the component
            whose index is the example's ``task``. ``"evidence"``, which needs no task: by how
            probable each component finds the example, c_k proportional to Π_t p_k(x_t) over its
            supervised tokens. ``"confidence"``: per token, the softmax of minus the teachers'
            entropies. ``"fixed"``: ``shares``.
        shares: One number a component, for ``"fixed"``; divided by their sum.
        confidence_temperature: Of the softmax of ``"confidence"``; at 0 the teacher of least
            entropy has all.
        temperature: T: logits of students and teachers are divided by it, the loss is multiplied by
            T².
        direction: ``"forward"`` KL(teacher, merged) or ``"reverse"`` KL(merged, teacher).
        cross_entropy: Weight of the cross-entropy towards the labels, added.
        l1: Weight of the mean absolute mask.
        l2: Weight of the mean squared mask.
        similarity: Weight of the mean cosine similarity between the components' masks: pulls them
            apart.

    Raises:
        ValueError: A value outside these.

    >>> KLConfig(coefficients="confidence", temperature=2.0).direction
    'forward'
    """

    coefficients: str = "task"
    shares: tuple[float, ...] | None = None
    confidence_temperature: float = 1.0
    temperature: float = 1.0
    direction: str = "forward"
    cross_entropy: float = 0.0
    l1: float = 0.0
    l2: float = 0.0
    similarity: float = 0.0

    @property
    def penalises(self) -> bool:
        """Return whether a penalty on masks has a weight above 0."""
        return any((self.l1, self.l2, self.similarity))

    def __post_init__(self) -> None:
        _one_of("KLConfig", "coefficients", self.coefficients, COEFFICIENTS)
        _one_of("KLConfig", "direction", self.direction, DIRECTIONS)
        weights = ("confidence_temperature", "cross_entropy", "l1", "l2", "similarity")
        _at_least("KLConfig", 0, **{name: getattr(self, name) for name in weights})
        _at_least("KLConfig", 1e-6, temperature=self.temperature)
        if (self.shares is None) == (self.coefficients == "fixed"):
            raise ValueError(
                "KLConfig: shares belong to coefficients='fixed'; expected both, or neither"
            )
        if self.shares is not None:
            _at_least("KLConfig", 0, **{f"shares[{i}]": v for i, v in enumerate(self.shares)})
            if not sum(self.shares) > 0:
                raise ValueError(f"KLConfig: shares are {self.shares}, expected a sum above 0")
