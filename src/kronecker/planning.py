"""`plan`: which layers to compress, and how far, for a budget of parameters, by the error each choice really makes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from model_components._modes import evaluating
from model_components._report import Axes, Figure, Report, Table, bars

from .config import KroneckerConfig
from .data import batches
from .fitting.sequential import Fit
from .layers.linear import dense
from .surgery.convert import check_layer, num_parameters
from .surgery.finding import blocks_of, find_mlps, put
from .surgery.mlps import Mlp

CANDIDATES = tuple(
    KroneckerConfig(b_shape=b, rank=r)
    for b, ranks in (
        ((2, 1), (1,)),
        ((4, 1), (1, 3)),
        ((8, 1), (1, 3)),
        ((2, 2), (1, 3)),
        ((3, 3), (2, 4)),
        ((16, 1), (1,)),
    )
    for r in ranks
)
"""Shapes of B for the layers that read the block's width; the layer that writes it has the opposite."""


@dataclass(frozen=True)
class Choice:
    """What one MLP could become."""

    config: KroneckerConfig | None  # None: left dense
    parameters: int
    error: float  # what it changes in the residual stream, squared, relative to the stream


@dataclass(frozen=True)
class Plan(Report):
    """A config for every layer to compress, with what it was chosen by."""

    chosen: dict[str, Choice]  # by the name of the layer that writes the block's width
    options: dict[str, tuple[Choice, ...]]
    configs: dict[str, KroneckerConfig]
    parameters: int
    budget: int

    def summary(self) -> list[str]:
        """Parameters and budget."""
        return [f"{self.parameters:,} parameters for a budget of {self.budget:,}"]

    def table(self) -> Table:
        """A row for each MLP, by the layer that writes the block's width."""
        rows = []
        for name, choice in self.chosen.items():
            what = "dense" if choice.config is None else f"{choice.config.rank} x B {choice.config.b_shape}"
            rows.append((name, what, f"{choice.parameters:,}", f"{choice.error**0.5:.3f}"))
        return Table(("MLP", "choice", "parameters", "error"), rows)

    def plot(self, ax: Axes | None = None) -> Figure:
        """The parameters that each MLP gets (extra ``plot``), on ``ax`` or in a new figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return bars(ax, "Plan.plot", {n: c.parameters for n, c in self.chosen.items()}, "parameters")


@torch.no_grad()
def plan(
    model: nn.Module,
    *,
    budget: int,
    calibration: Iterable[Any],
    candidates: Sequence[KroneckerConfig] = CANDIDATES,
    progress: bool = True,
) -> Plan:
    """Choose shapes, terms and layers so that the model has at most ``budget`` parameters.

    Each candidate is fitted to each MLP alone, on what the original model feeds it; its error is what it changes in the
    residual stream, as a share of the stream. The sum of squared errors is then minimised within the budget.

    Args:
        model: Left as it is.
        budget: Parameters of the whole model, tied ones once.
        calibration: Batches as for `convert_`; a few thousand tokens do.
        candidates: Configs for the layers that read the block's width; those that do not divide are passed over.
        progress: Show a progress bar.

    Returns:
        A `Plan`; ``plan.configs`` is what `convert_` takes.

    Raises:
        ValueError: No MLP is found, or a budget out of reach.
    """
    mlps = find_mlps(model)
    if not mlps:
        raise ValueError(f"plan: no MLP is found in {type(model).__name__}")
    for mlp in mlps:
        for name in (*mlp.ups, mlp.down):
            check_layer("plan", name, model.get_submodule(name))
    total = num_parameters(model)
    fixed = total - sum(_count(model, m, None) for m in mlps)
    fitting = {m.down: [c for c in candidates if _fits(model, m, c)] for m in mlps}
    least = fixed + sum(min(_count(model, m, c) for c in (None, *fitting[m.down])) for m in mlps)
    if not least <= budget < total:
        raise ValueError(f"plan: budget is {budget:,}, needed {least:,} to {total - 1:,} for {type(model).__name__}")
    data = batches(calibration, model, "plan")
    with evaluating(model):
        options = _measured(model, mlps, data, fitting, progress)
    chosen = _choose(options, budget - fixed)
    configs: dict[str, KroneckerConfig] = {}
    for mlp in mlps:
        config = chosen[mlp.down].config
        if config is not None:
            configs |= dict.fromkeys(mlp.ups, config) | {mlp.down: config.opposite()}
    return Plan(chosen, options, configs, fixed + sum(c.parameters for c in chosen.values()), budget)


def _count(model: nn.Module, mlp: Mlp, config: KroneckerConfig | None) -> int:
    counts = []
    for name in (*mlp.ups, mlp.down):
        shape = dense(model.get_submodule(name)).shape
        own = config.opposite() if config is not None and name == mlp.down else config
        counts.append(shape[0] * shape[1] if own is None else own.count(*shape))
    return sum(counts)


def _fits(model: nn.Module, mlp: Mlp, config: KroneckerConfig) -> bool:
    try:
        return _count(model, mlp, config) < _count(model, mlp, None)
    except ValueError:
        return False


def _measured(
    model: nn.Module,
    mlps: Sequence[Mlp],
    data: Sequence[Any],
    fitting: Mapping[str, Sequence[KroneckerConfig]],
    progress: bool,
) -> dict[str, tuple[Choice, ...]]:
    names = [n for m in mlps for n in (*m.ups, m.down)]
    walk = Fit(model, blocks_of(model, names), data)
    made: dict[str, tuple[Choice, ...]] = {}
    total = sum(map(len, fitting.values()))
    with tqdm(total=total, desc="measuring", unit="fit", disable=not progress) as bar:
        for index, (_, _, held) in enumerate(walk.blocks):
            theirs = walk.theirs
            for mlp in [m for m in mlps if m.down in held]:
                choices = [Choice(None, _count(model, mlp, None), 0.0)]
                for candidate in fitting[mlp.down]:
                    bar.update(1)
                    config = replace(candidate, init="sequential")
                    own = dict.fromkeys(mlp.ups, config) | {mlp.down: config.opposite()}
                    modules = {n: model.get_submodule(n) for n in own}
                    try:
                        step = walk.step(index, own, residual=False)
                        outputs = step.fit(walk.calls[index], theirs, theirs)
                    finally:
                        for name, module in modules.items():
                            put(model, name, module)
                    stream = sum(float(t.double().square().sum()) for t in outputs) or 1.0
                    error = step.errors[mlp.down] ** 2 * step.energies[mlp.down] / stream
                    choices.append(Choice(config, _count(model, mlp, config), error))
                made[mlp.down] = tuple(choices)
            walk.advance(index)
    return made


def _choose(options: dict[str, tuple[Choice, ...]], budget: int) -> dict[str, Choice]:
    """The least sum of errors within a budget: by a price for each parameter, then by spending what is left."""

    def at(price: float) -> dict[str, Choice]:
        return {n: min(held, key=lambda c: c.error + price * c.parameters) for n, held in options.items()}

    def cost(chosen: dict[str, Choice]) -> int:
        return sum(c.parameters for c in chosen.values())

    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low * high) ** 0.5 if low > 0 else high * 1e-12
        if cost(at(middle)) <= budget:
            high = middle
        else:
            low = middle
    chosen = at(high)
    if cost(chosen) > budget:  # every option's price is above all errors
        chosen = {n: min(held, key=lambda c: c.parameters) for n, held in options.items()}
    while True:
        left = budget - cost(chosen)
        steps = [
            ((chosen[n].error - c.error) / (c.parameters - chosen[n].parameters), n, c)
            for n, held in options.items()
            for c in held
            if 0 < c.parameters - chosen[n].parameters <= left and c.error < chosen[n].error
        ]
        if not steps:
            return chosen
        _, name, choice = max(steps, key=lambda s: s[0])
        chosen[name] = choice
