"""`plan`: what each MLP of a model becomes, within a budget of parameters or time, by what it costs where it counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from model_components._modes import evaluating
from model_components._report import Axes, Figure, Report, Table, bars

from .config import STRUCTURES, Config, KroneckerConfig, LowRankConfig, PruneConfig, structure_of
from .data import batches
from .fitting.block import Block, blocks_with
from .fitting.calls import outputs_of, tokens
from .fitting.fit import Part, fit_part, place_
from .layers.experts import is_experts
from .layers.weights import bias_of, dense
from .surgery.convert import check_layer, num_parameters
from .surgery.finding import find_mlps, snapshot
from .surgery.mlps import Mlp

SHARES = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875)

CANDIDATES: dict[str, tuple[Config, ...]] = {
    "prune": tuple(PruneConfig(keep=share, refit="writing") for share in SHARES),
    "low_rank": tuple(LowRankConfig(keep=share, epochs=0) for share in SHARES),
    "kronecker": tuple(
        KroneckerConfig(b_shape=b, rank=r, epochs=0)
        for b, ranks in (((4, 1), (1, 3)), ((8, 1), (1, 3)), ((2, 2), (1, 3)), ((3, 3), (2, 4)))
        for r in ranks
    ),
}
"""What is tried where each MLP has its own; B's shape is of the layers that read the block's width."""

_SAMPLE = 8  # MLPs that a structure for all is tried on
_SLACK = 1e-3  # above a share of parameters: a small factor has some, too
_KRONECKER_SHAPES = ((2, 1), (4, 1), (1, 2), (2, 2), (3, 3))  # tried where all MLPs have the same


@dataclass(frozen=True)
class Choice:
    """What one MLP could become."""

    config: Config | None  # None: left dense
    parameters: int
    error: float  # of its block's output, squared, relative: what it changes in the residual stream
    seconds: float  # that its block took for the calibration batches

    @property
    def structure(self) -> str:
        """In words."""
        if self.config is None:
            return "dense"
        if isinstance(self.config, KroneckerConfig):
            return f"kronecker {self.config.rank} x B {self.config.b_shape}"
        return f"{structure_of(self.config)} {self.config.keep:.0%}"


@dataclass(frozen=True)
class Plan(Report):
    """A config for every MLP that becomes smaller, with what it was chosen by."""

    chosen: dict[str, Choice]  # of the MLPs that were measured, by the name of the layer that writes the block's width
    options: dict[str, tuple[Choice, ...]]
    configs: dict[str, Config]  # by the names of all MLPs' layers: what `convert_` takes
    parameters: int
    budget: int | None
    mlps: int

    @property
    def prune(self) -> PruneConfig | None:
        """What `prune_` takes, where all MLPs lose the same share of their neurons: the result is a stock model."""
        found = {c.config for c in self.chosen.values()}
        config = found.pop()
        return replace(config, refit="all") if isinstance(config, PruneConfig) and not found else None

    @property
    def seconds(self) -> float:
        """Of the chosen blocks, for the calibration batches."""
        return sum(c.seconds for c in self.chosen.values())

    def summary(self) -> list[str]:
        """Parameters, budget and time."""
        dense = sum(held[0].seconds for held in self.options.values())
        wanted = "" if self.budget is None else f" for a budget of {self.budget:,}"
        return [
            f"{self.parameters:,} parameters{wanted}; blocks take {self.seconds / max(dense, 1e-9):.0%} of the time"
        ]

    def table(self) -> Table:
        """A row for each MLP, by the layer that writes the block's width."""
        rows = [
            (name, c.structure, f"{c.parameters:,}", f"{c.error**0.5:.3f}", f"{c.seconds / self._dense(name):.2f}")
            for name, c in self.chosen.items()
        ]
        return Table(("MLP", "choice", "parameters", "error", "time"), rows)

    def remarks(self) -> list[str]:
        """What every structure would cost everywhere, where all MLPs can have it; and how many MLPs were measured."""
        by_structure: dict[str, list[Choice]] = {}
        for choices in self.options.values():
            for choice in choices[1:]:
                by_structure.setdefault(choice.structure, []).append(choice)
        remarks = [
            f"{name} everywhere: error {(sum(c.error for c in choices) / len(choices)) ** 0.5:.3f}, "
            f"{sum(c.seconds for c in choices) / sum(map(self._dense, self.options)):.0%} of the time"
            for name, choices in by_structure.items()
            if len(choices) == len(self.options)
        ]
        return [*remarks, *([f"measured on {len(self.options)} of {self.mlps} MLPs"] if self._sampled else [])]

    @property
    def _sampled(self) -> bool:
        return len(self.options) < self.mlps

    def _dense(self, name: str) -> float:
        return max(1e-9, self.options[name][0].seconds)

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
    budget: int | None = None,
    keep: float | None = None,
    time_budget: float | None = None,
    calibration: Iterable[Any],
    structures: Sequence[str] = tuple(STRUCTURES),
    uniform: bool = False,
    candidates: Sequence[Config] | None = None,
    progress: bool = True,
) -> Plan:
    """Choose what each MLP becomes, so that the model has at most ``budget`` parameters.

    Each candidate is fitted to each MLP in closed form, on what the original model feeds it, and put in its place: its
    error is what the block's output then changes, as a share of it; its time is what the block then takes. The sum of
    squared errors is minimised within the budget.

    Args:
        model: Left as it is.
        budget: Parameters of the whole model, tied ones once.
        keep: Share of the MLPs' parameters, instead of ``budget``; to a thousandth.
        time_budget: Share of the blocks' own time, instead of ``budget`` or besides it; measured on this machine.
        calibration: Batches as for `convert_`; a few thousand tokens do.
        structures: Of ``"prune"``, ``"low_rank"`` and ``"kronecker"``; MLPs may stay dense, too.
        uniform: One structure of one size for all MLPs, as a stock config needs; of each structure the largest that
            the budget allows is tried, on at most eight MLPs from the first to the last.
        candidates: Configs to try instead; those that do not fit a layer are passed over.
        progress: Show a progress bar.

    Returns:
        A `Plan`; ``plan.configs`` is what `convert_` takes, ``plan.prune`` what `prune_` takes where that is possible.

    Raises:
        ValueError: No MLP is found, no budget or one out of reach, unknown structures.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    >>> found = plan(model, budget=600, calibration=[torch.tensor([[1, 2, 3]])], uniform=True, progress=False)
    >>> found.parameters <= 600
    True
    """
    if unknown := sorted(set(structures) - set(STRUCTURES) - {"dense"}):
        raise ValueError(f"plan: structures have {unknown[0]!r}, needed some of {', '.join(STRUCTURES)}")
    if budget is None and keep is None and time_budget is None:
        raise ValueError("plan: budget is None, needed a number of parameters, keep or time_budget")
    for name, value in (("keep", keep), ("time_budget", time_budget)):
        if value is not None and not 0 < value < 1:
            raise ValueError(f"plan: {name} is {value}, needed a share between 0 and 1")
    if budget is not None and keep is not None:
        raise ValueError(f"plan: budget is {budget:,} and keep {keep}, needed one of them")
    data = batches(calibration, model, "plan")
    if any(is_experts(m) for m in model.modules()):
        raise ValueError(f"plan: {type(model).__name__} has stacks of experts, which no plan is made for; see prune_")
    if wrong := [c for c in candidates or () if c.init != "sequential"]:
        raise ValueError(f"plan: {wrong[0]} is not fitted to calibration data, needed init='sequential'")
    mlps = find_mlps(model, data[0])
    if not mlps:
        raise ValueError(f"plan: no MLP is found in {type(model).__name__}")
    for mlp in mlps:
        for name in (*mlp.ups, mlp.down):
            check_layer("plan", name, model.get_submodule(name))
    total, inside = num_parameters(model), sum(_count(model, m, None) for m in mlps)
    if keep is not None:
        budget = min(total - 1, total - inside + int(inside * (keep + _SLACK)))
    if budget is not None and not total - inside < budget < total:
        raise ValueError(
            f"plan: budget is {budget:,}, needed {total - inside:,} to {total - 1:,} for {type(model).__name__}"
        )
    share = None if budget is None or not uniform else keep or (budget - (total - inside)) / inside
    trying = {m.down: _candidates(model, m, structures, candidates, share, _SLACK if keep else 0.0) for m in mlps}
    least = total - inside + sum(min(_count(model, m, c) for c in (*trying[m.down], None)) for m in mlps)
    if budget is not None and budget < least:
        raise ValueError(f"plan: budget is {budget:,}, needed {least:,} to {total - 1:,} for {type(model).__name__}")
    measured = _spread(mlps) if uniform else mlps
    with evaluating(model):
        options = _measured(model, mlps, data, {m.down: trying[m.down] for m in measured}, progress)
    limits: list[tuple[Callable[[Choice], float], float]] = []
    if budget is not None and not uniform:
        limits.append((lambda c: c.parameters, budget - (total - inside)))
    if time_budget is not None:
        limits.append((lambda c: c.seconds, time_budget * sum(held[0].seconds for held in options.values())))
    chosen = _same_for_all(options, limits) if uniform else _choose(options, limits)
    configs: dict[str, Config] = {}
    parameters = total - inside
    for mlp in mlps:
        config = next(iter(chosen.values())).config if uniform else chosen[mlp.down].config
        parameters += _count(model, mlp, config)
        if config is not None:
            config = config if candidates is not None else _trained(config)
            configs |= dict.fromkeys(mlp.ups, config) | {mlp.down: config.opposite()}
    return Plan(chosen, options, configs, parameters, None if keep is not None else budget, len(mlps))


def _spread(mlps: Sequence[Mlp]) -> list[Mlp]:
    """Some of the MLPs, from the first to the last."""
    count = min(_SAMPLE, len(mlps))
    return [mlps[round(i * (len(mlps) - 1) / max(1, count - 1))] for i in range(count)]


def _trained(config: Config) -> Config:
    """One of our candidates, tried in closed form, with the fit that `convert_` gives by default."""
    if isinstance(config, PruneConfig):
        return replace(config, refit="all")
    return replace(config, epochs=type(config).epochs)


def _candidates(
    model: nn.Module,
    mlp: Mlp,
    structures: Sequence[str],
    candidates: Sequence[Config] | None,
    share: float | None,
    slack: float,
) -> list[Config]:
    """What an MLP could become; with ``share`` only the largest of each structure that keeps about that share."""
    if candidates is None and share is None:
        candidates = [c for s in structures for c in CANDIDATES.get(s, ())]
    if candidates is not None:
        return [c for c in candidates if _fits(model, mlp, c, 1.0 if share is None else share + slack)]
    assert share is not None
    dense_count, trying = _count(model, mlp, None), []
    if "prune" in structures:
        neurons = dense(model.get_submodule(mlp.down)).shape[1]
        most = range(int(neurons * share + 1e-9), 0, -1)
        sizes = (PruneConfig(keep=stay / neurons, refit="writing") for stay in most)
        trying += [next((c for c in sizes if _fits(model, mlp, c, share + slack)), PruneConfig(keep=1 / neurons))]
    if "low_rank" in structures:
        trying.append(LowRankConfig(keep=min(share, 0.999), epochs=0))
    if "kronecker" in structures:
        for b in _KRONECKER_SHAPES:
            ranks = [KroneckerConfig(b_shape=b, rank=r, epochs=0) for r in range(1, b[0] * b[1])]
            within = [c for c in ranks if _fits(model, mlp, c, share + slack)]
            trying += [c for c in within[-1:] if _count(model, mlp, c) > 0.8 * share * dense_count]
    return trying


def _count(model: nn.Module, mlp: Mlp, config: Config | None) -> int:
    """Parameters of an MLP, biases included."""
    total = 0
    for name in (*mlp.ups, mlp.down):
        module = model.get_submodule(name)
        rows, columns = dense(module).shape
        bias = 0 if bias_of(module) is None else rows
        if isinstance(config, PruneConfig):
            neurons = dense(model.get_submodule(mlp.down)).shape[1]
            stays = config.neurons(neurons)
            total += rows * columns * stays // neurons + (bias if name == mlp.down else bias * stays // neurons)
        elif config is not None:
            total += (config.opposite() if name == mlp.down else config).count(rows, columns) + bias
        else:
            total += rows * columns + bias
    return total


def _fits(model: nn.Module, mlp: Mlp, config: Config, share: float) -> bool:
    try:
        size = _count(model, mlp, config)
    except ValueError:
        return False
    dense_size = _count(model, mlp, None)
    return size < dense_size and size <= share * dense_size


def _measured(
    model: nn.Module,
    mlps: Sequence[Mlp],
    data: Sequence[Mapping[str, Any]],
    trying: Mapping[str, Sequence[Config]],
    progress: bool,
) -> dict[str, tuple[Choice, ...]]:
    options: dict[str, tuple[Choice, ...]] = {}
    blocks = blocks_with(model, mlps, [], data)
    states = [c.hidden for c in blocks[0].calls]
    with tqdm(total=sum(map(len, trying.values())), desc="measuring", unit="fit", disable=not progress) as bar:
        for block in blocks:
            after = block.original(states)
            for mlp in (m for m in block.mlps if m.down in trying):
                _, seconds = _run(block, states)
                choices = [Choice(None, _count(model, mlp, None), 0.0, seconds)]
                for config in trying[mlp.down]:
                    choices.append(_tried(model, block, mlp, config, states, after))
                    bar.update(1)
                options[mlp.down] = tuple(choices)
            states = after
    return options


def _tried(
    model: nn.Module, block: Block, mlp: Mlp, config: Config, states: Sequence[Tensor], after: Sequence[Tensor]
) -> Choice:
    """Fit a candidate, put it in the MLP's place, look at the block's output, and put the MLP back."""
    names = (*mlp.ups, mlp.down)
    configs = dict.fromkeys(mlp.ups, config) | {mlp.down: config.opposite()}
    neurons = dense(model.get_submodule(mlp.down)).shape[1]
    part = Part(mlp.down, configs, mlp, config.neurons(neurons) if isinstance(config, PruneConfig) else 0)
    put_back = snapshot(model, names)
    try:
        place_(model, part, fit_part(model, block, part, states, "plan").tensors)
        outputs, seconds = _run(block, states)
    finally:
        put_back()
    pairs = [(tokens(o, c.keep), tokens(a, c.keep)) for o, a, c in zip(outputs, after, block.calls, strict=True)]
    apart = sum(float((o.float() - a.float()).double().square().sum()) for o, a in pairs)
    energy = sum(float(a.double().square().sum()) for _, a in pairs)
    return Choice(config, _count(model, mlp, config), apart / max(energy, 1e-30), seconds)


def _run(block: Block, states: Sequence[Tensor]) -> tuple[list[Tensor], float]:
    begin = time.perf_counter()
    outputs = outputs_of(block.module, block.calls, states)
    return outputs, time.perf_counter() - begin


Limits = Sequence[tuple[Callable[[Choice], float], float]]  # what is limited, and by what


def _within(chosen: Mapping[str, Choice], limits: Limits) -> bool:
    return all(sum(cost(c) for c in chosen.values()) <= limit for cost, limit in limits)


def _same_for_all(options: Mapping[str, tuple[Choice, ...]], limits: Limits) -> dict[str, Choice]:
    """The structure that costs least when all MLPs have it."""
    shared = [c.config for c in next(iter(options.values()))[1:]]
    by_config = [{n: next((c for c in held if c.config == s), None) for n, held in options.items()} for s in shared]
    plans = [{n: c for n, c in p.items() if c is not None} for p in by_config if all(p.values())]
    possible = [p for p in plans if _within(p, limits)]
    if not possible:
        raise ValueError("plan: no structure is within the budget for all MLPs; needed a larger one")
    return min(possible, key=lambda p: sum(c.error for c in p.values()))


def _choose(options: Mapping[str, tuple[Choice, ...]], limits: Limits) -> dict[str, Choice]:
    """The least sum of errors within limits: by a price for each share of a limit, then by spending what is left."""
    found: list[dict[str, Choice]] = []
    for mix in [(1.0,)] if len(limits) == 1 else [(i / 10, 1 - i / 10) for i in range(11)]:
        if (cheapest := _at_price(options, limits, mix)) is not None:
            found.append(_spend(options, limits, cheapest))
    if not found:
        raise ValueError("plan: no choice for all MLPs is within the budget of time, needed a larger one")
    return min(found, key=lambda p: sum(c.error for c in p.values()))


def _at_price(
    options: Mapping[str, tuple[Choice, ...]], limits: Limits, mix: Sequence[float]
) -> dict[str, Choice] | None:
    """The best choices at the lowest price at which they are within the limits."""

    def price(choice: Choice) -> float:
        return sum(m * cost(choice) / limit for m, (cost, limit) in zip(mix, limits, strict=True))

    def at(rate: float) -> dict[str, Choice]:
        return {n: min(held, key=lambda c: c.error + rate * price(c)) for n, held in options.items()}

    low, high = 1e-12, 1e12
    if not _within(at(high), limits):
        return None
    for _ in range(100):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if _within(at(middle), limits) else (middle, high)
    return at(high)


def _spend(options: Mapping[str, tuple[Choice, ...]], limits: Limits, chosen: dict[str, Choice]) -> dict[str, Choice]:
    """The same with what is left of the limits spent on whatever lowers the error most."""
    while True:
        steps = [
            (chosen[n].error - c.error, n, c)
            for n, held in options.items()
            for c in held
            if c.error < chosen[n].error and _within(chosen | {n: c}, limits)
        ]
        if not steps:
            return chosen
        _, name, choice = max(steps, key=lambda s: s[0])
        chosen = chosen | {name: choice}
