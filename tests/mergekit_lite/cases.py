"""One row for each way of calling each merge method: the table that the conformance tests go
through.

A method of the package without a row here fails `test_every_method_has_a_row`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mergekit_lite import Noise
from mergekit_lite.methods.averaging import rows_of
from tests.mergekit_lite import reference

SEED, NAME = 5, "layers.0.weight"


@dataclass(frozen=True)
class Case:
    """A method with parameters. ``grid`` draws inputs whose differences are exact, so that ranks
    are the same in
    every dtype (and many magnitudes are equal); methods that compare or rank need it."""

    method: str
    models: int = 2
    base: bool = True
    grid: bool = False
    gradients: bool = True
    parameters: dict[str, Any] = field(default_factory=dict)
    shapes: tuple[tuple[int, ...], ...] = ((1,), (7,), (5, 3), (17, 33), (3, 2, 5))

    def __str__(self) -> str:
        shown = ",".join(f"{k}={v}" for k, v in self.parameters.items())
        return f"{self.method}[{self.models}{'+base' if self.base else ''}{',' + shown if shown else ''}]"


def weights(*values: float) -> dict[str, Any]:
    return {"weight": list(values)}


# one dimension has two directions and no mean of them
PLANES = (
    (2,),
    (7,),
    (5, 3),
    (17, 33),
    (3, 2, 5),
)
MATRICES = ((6, 4), (4, 6), (17, 9), (5,), (2, 3, 2))
CASES = [
    Case("linear", 2, base=False, parameters=weights(0.3, 0.9)),
    Case("linear", 3, base=False, parameters=weights(0.3, -0.2, 1.5) | {"normalize": False}),
    Case("linear", 1, base=False, parameters=weights(2.0)),
    Case("passthrough", 1, base=False),
    Case("passthrough", 1, base=False, parameters={"scale": [0.7]}),
    Case("task_arithmetic", 3, parameters=weights(0.3, -0.2, 1.5) | {"lambda_": 0.8}),
    Case("task_arithmetic", 2, parameters=weights(0.5, 0.2) | {"normalize": True}),
    Case("nearswap", 1, parameters={"t": 0.3}),
    Case("slerp", 1, parameters={"t": 0.3}),
    Case("slerp", 1, parameters={"t": 1.0}),
    Case("nuslerp", 2, base=False, parameters=weights(0.3, 0.5)),
    Case("nuslerp", 2, parameters=weights(0.3, 0.5)),
    Case(
        "nuslerp",
        2,
        base=False,
        parameters=weights(0.4, 0.6) | {"nuslerp_flatten": False, "nuslerp_row_wise": True},
    ),
    Case("nuslerp", 2, parameters=weights(0.4, 0.6) | {"nuslerp_flatten": False}),
    Case("multislerp", 3, base=False, parameters=weights(0.3, 0.5, 0.4), shapes=PLANES),
    Case("multislerp", 2, parameters=weights(0.3, 0.5), shapes=PLANES),
    Case("karcher", 3, base=False, shapes=PLANES),
    Case("karcher", 2, base=False, parameters={"max_iter": 3}, shapes=PLANES),
    Case("model_stock", 2),
    Case("model_stock", 4),
    Case("model_stock", 3, parameters={"filter_wise": True}),
    Case("ties", 2, grid=True, parameters=weights(0.5, 0.25) | {"density": [0.5, 0.3]}),
    Case(
        "ties",
        3,
        grid=True,
        parameters=weights(0.5, -0.25, 1.0) | {"density": [0.5, 1.0, 0.1], "lambda_": 0.7},
    ),
    Case(
        "ties",
        2,
        grid=True,
        parameters=weights(1.0, 1.0) | {"density": [0.4, 0.4], "normalize": False, "rescale": True},
    ),
    Case("ties", 2, grid=True, parameters=weights(1.0, 0.5) | {"density": [1.0, 1.0]}),
    Case(
        "breadcrumbs",
        2,
        grid=True,
        parameters=weights(0.5, 0.25) | {"density": [0.6, 0.3], "gamma": [0.2, 0.1]},
    ),
    Case(
        "breadcrumbs",
        2,
        grid=True,
        parameters=weights(1.0, 1.0)
        | {"density": [0.9, 0.95], "gamma": [0.2, 0.1], "rescale": True, "normalize": True},
    ),
    Case(
        "breadcrumbs_ties",
        2,
        grid=True,
        parameters=weights(0.5, 0.25) | {"density": [0.6, 0.3], "gamma": [0.2, 0.1]},
    ),
    Case("sce", 2, grid=True),
    Case("sce", 4, grid=True, parameters={"select_topk": 0.4}),
    Case("dare_linear", 2, parameters=weights(0.5, 0.25) | {"density": [0.5, 0.3]}),
    Case(
        "dare_linear",
        2,
        parameters=weights(0.5, 0.25)
        | {"density": [0.5, 0.3], "rescale": False, "normalize": True},
    ),
    Case("dare_ties", 2, grid=True, parameters=weights(0.5, 0.25) | {"density": [0.5, 0.3]}),
    Case(
        "dare_ties",
        3,
        grid=True,
        parameters=weights(0.5, 0.25, 1.0) | {"density": [0.5, 1.0, 0.9], "normalize": True},
    ),
    Case(
        "della",
        2,
        grid=True,
        parameters=weights(0.5, 0.25) | {"density": [0.5, 0.4], "epsilon": [0.2, 0.1]},
    ),
    Case(
        "della_linear",
        2,
        grid=True,
        parameters=weights(0.5, 0.25) | {"density": [0.5, 0.4], "epsilon": [0.2, 0.1]},
    ),
    Case("arcee_fusion", 1),
    Case("ram", 3, grid=True),
    Case("ramplus_tl", 2, grid=True, parameters={"epsilon": 0.5}),
    Case("ramplus_tl", 3, grid=True, parameters={"epsilon": 0.5, "r": 0.3, "alpha": 0.9}),
    Case("tsv", 2, gradients=False, shapes=MATRICES),
    Case(
        "tsv",
        3,
        gradients=False,
        shapes=MATRICES,
        parameters={"weight": [0.5, 1.5, 1.0], "alpha": 0.7},
    ),
    Case("iso_c", 2, gradients=False, shapes=MATRICES),
    # spectral methods have no gradient rows: a thin decomposition's gradient is undefined up to the
    # sign of its vectors
]


def inputs_for(case: Case, shape: tuple[int, ...], seed: int = 0) -> dict[str, Tensor]:
    """Random tensors ``model0`` … and ``base``."""
    generator = torch.Generator().manual_seed(seed + sum(shape) + 100 * case.models)

    def draw() -> Tensor:
        if case.grid:  # multiples of 1/64 below 2: their differences are exact in bfloat16
            return torch.randint(-127, 128, shape, generator=generator) / 64
        return torch.randn(shape, generator=generator)

    made = {f"model{i}": draw() for i in range(case.models)}
    return made | ({"base": draw()} if case.base else {})


def split(tensors: dict[str, Tensor]) -> tuple[list[Tensor], Tensor | None]:
    """The models and the base of `inputs_for`'s dictionary."""
    return [t for name, t in tensors.items() if name != "base"], tensors.get("base")


def keep_masks(case: Case, tensors: dict[str, Tensor]) -> list[Tensor]:
    """The masks that the random methods draw for `NAME` with `SEED`."""
    models, base = split({k: v.detach().double() for k, v in tensors.items()})
    noise, density = Noise(SEED, NAME), case.parameters["density"]
    if case.method.startswith("dare"):
        return [noise.keep(i, m, d) for i, (m, d) in enumerate(zip(models, density, strict=True))]
    assert base is not None
    rows = [rows_of(m - base) for m in models]
    epsilon = case.parameters["epsilon"]
    chances = [
        reference.keep_probabilities(r.float(), d, e)
        for r, d, e in zip(rows, density, epsilon, strict=True)
    ]
    return [noise.keep_each(i, c).reshape(base.shape) for i, c in enumerate(chances)]


def reference_for(case: Case, inputs: dict[str, Tensor]) -> Callable[..., Tensor]:
    """The definition, called with the inputs by name."""
    function = getattr(reference, case.method)
    parameters = dict(case.parameters)
    if case.method in ("tsv", "iso_c"):
        parameters.setdefault("weight", [1.0] * case.models)
    if case.method.startswith(("dare", "della")):
        parameters["keep"] = keep_masks(case, inputs)
        parameters.pop("epsilon", None)

    def call(**tensors: Tensor) -> Tensor:
        return function(*split(tensors), **parameters)

    return call
