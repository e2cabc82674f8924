"""`plan`: each candidate is fitted to each MLP (or stack of experts) and put in its place, to see what it costs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from model_components._modes import evaluating

from ..config import Config, KroneckerConfig, LowRankConfig, PruneConfig, is_number, is_whole
from ..data.batches import Batch, batches, first_output
from ..fitting.block import Block, blocks_with
from ..fitting.calls import WholeModel, outputs_of, tokens
from ..fitting.fit import Part, fit_part, place_
from ..structures import STRUCTURES
from ..surgery.convert import num_parameters
from ..surgery.finding import snapshot
from ..surgery.neurons import PrunablePart, prunable_parts
from .choice import Choice, Plan
from .solving import Limits, best_of_each, same_for_all

SHARES = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875)

CANDIDATES: dict[str, tuple[Config, ...]] = {
    "prune": tuple(PruneConfig(keep=share, refit="writing") for share in SHARES),
    "low_rank": tuple(LowRankConfig(keep=share, epochs=0) for share in SHARES),
    "kronecker": tuple(
        KroneckerConfig(b_shape=b, rank=r, epochs=0)
        for b, ranks in (((4, 1), (2, 3)), ((8, 1), (2, 3)), ((2, 2), (1, 3)), ((3, 3), (2, 4)))
        for r in ranks
    ),
}
"""What is tried where each MLP has its own; B's shape is of the layers that read the block's width.

One term with a B of (n, 1) is not: it is dropped neurons with another activation.
"""

_SAMPLE = 5  # MLPs that a structure for all is tried on
_LEAST_SECONDS, _MOST_RUNS = 0.1, 5  # of timing a block
_SLACK = 1e-3  # above a share of parameters: a small factor has some, too
_KRONECKER_SHAPES = ((4, 1), (1, 2), (2, 2), (3, 3))  # tried where all MLPs have the same


@torch.no_grad()
def plan(
    model: nn.Module,
    *,
    budget: int | None = None,
    keep: float | None = None,
    time_budget: float | None = None,
    calibration: Iterable[object],
    structures: Sequence[str] = tuple(STRUCTURES),
    uniform: bool = False,
    candidates: Sequence[Config] | None = None,
    progress: bool = True,
) -> Plan:
    """Choose what each MLP (or stack of experts) becomes, so that the model has at most ``budget`` parameters.

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
            the budget allows is tried, on at most five MLPs from the first to the last.
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
    if isinstance(structures, str):
        raise ValueError(f"plan: structures is {structures!r}, needed a list, as [{structures!r}]")
    if unknown := sorted(set(structures) - set(STRUCTURES)):
        raise ValueError(f"plan: structures have {unknown[0]!r}, needed some of {', '.join(STRUCTURES)}")
    if budget is None and keep is None and time_budget is None:
        raise ValueError("plan: budget is None, needed a number of parameters, keep or time_budget")
    if budget is not None and not is_whole(budget, 0):
        raise ValueError(f"plan: budget is {budget}, needed a whole number of parameters; a share is keep={budget}")
    for name, value in (("keep", keep), ("time_budget", time_budget)):
        if value is not None and not (is_number(value) and 0 < value < 1):
            raise ValueError(f"plan: {name} is {value}, needed a share between 0 and 1")
    if budget is not None and keep is not None:
        raise ValueError(f"plan: budget is {budget:,} and keep {keep}, needed one of them")
    data = batches(calibration, model, "plan")
    for candidate in candidates or ():
        if isinstance(candidate, PruneConfig) and (candidate.granularity != "neuron" or candidate.budget is not None):
            raise ValueError(f"plan: {candidate} is not about one MLP, needed keep and granularity='neuron'")
    if wrong := [c for c in candidates or () if c.init != "sequential"]:
        raise ValueError(f"plan: {wrong[0]} is not fitted to calibration data, needed init='sequential'")
    parts = prunable_parts(model, data, "plan")
    total, inside = num_parameters(model), sum(p.parameters_as(None) for p in parts)
    if keep is not None:
        budget = min(total - 1, total - inside + int(inside * (keep + _SLACK)))
    if budget is not None and not total - inside < budget < total:
        raise ValueError(
            f"plan: budget is {budget:,}, needed {total - inside:,} to {total - 1:,} for {type(model).__name__}"
        )
    share = None if budget is None else keep or (budget - (total - inside)) / inside
    slack = _SLACK if keep is not None else 0.0
    trying = {
        p.name: _candidates(p, parts if uniform else [p], structures, candidates, share, slack, uniform=uniform)
        for p in parts
    }
    least = total - inside + sum(min(p.parameters_as(c) for c in (*trying[p.name], None)) for p in parts)
    if budget is not None and budget < least:
        raise ValueError(f"plan: budget is {budget:,}, needed {least:,} to {total - 1:,} for {type(model).__name__}")
    measured = _spread(parts) if uniform else parts
    with evaluating(model):
        options = _measured(model, parts, data, {p.name: trying[p.name] for p in measured}, progress)
    limits: Limits = []
    if budget is not None and not uniform:
        limits.append((lambda c: c.parameters, budget - (total - inside)))
    if time_budget is not None:
        limits.append((lambda c: c.seconds, time_budget * sum(choices[0].seconds for choices in options.values())))
    chosen = same_for_all(options, limits) if uniform else best_of_each(options, limits)
    configs: dict[str, Config] = {}
    parameters = total - inside
    for part in parts:
        config = next(iter(chosen.values())).config if uniform else chosen[part.name].config
        parameters += part.parameters_as(config)
        if config is not None:
            configs |= part.configs(config if candidates is not None else _trained(config))
    return Plan(chosen, options, configs, parameters, None if keep is not None else budget, len(parts))


def _spread(parts: Sequence[PrunablePart]) -> list[PrunablePart]:
    """Some of the parts, from the first to the last."""
    count = min(_SAMPLE, len(parts))
    return [parts[round(i * (len(parts) - 1) / max(1, count - 1))] for i in range(count)]


def _trained(config: Config) -> Config:
    """One of our candidates, tried in closed form, with the fit that `convert_` gives by default."""
    if isinstance(config, PruneConfig):
        return replace(config, refit="all")
    return replace(config, epochs=type(config).epochs)


def _candidates(
    part: PrunablePart,
    together: Sequence[PrunablePart],
    structures: Sequence[str],
    candidates: Sequence[Config] | None,
    share: float | None,
    slack: float,
    *,
    uniform: bool,
) -> list[Config]:
    """What a part could become: what is given, or some sizes of each structure and the largest within ``share``."""
    if candidates is None:
        largest = [] if share is None else _largest(together, structures, share, slack)
        sizes = [] if uniform and share is not None else [c for s in structures for c in CANDIDATES.get(s, ())]
        candidates = [*dict.fromkeys([*largest, *sizes])]
    return [c for c in candidates if _fits(part, c, share + slack if uniform and share is not None else 1.0)]


def _largest(together: Sequence[PrunablePart], structures: Sequence[str], share: float, slack: float) -> list[Config]:
    """The largest of each structure that keeps at most a share, and the slack, of the parameters of each of these."""
    first, largest = together[0], list[Config]()

    def fit(config: Config) -> bool:
        return all(_fits(p, config, share + slack) for p in together)

    if "prune" in structures:
        sizes = (PruneConfig(keep=n / first.count, refit="writing") for n in range(int(first.count * share), 0, -1))
        largest += [c for c in [next((c for c in sizes if fit(c)), None)] if c is not None]
    if "low_rank" in structures:
        largest.append(LowRankConfig(keep=min(share, 0.999), epochs=0))
    if "kronecker" in structures:
        for b in _KRONECKER_SHAPES:
            least_rank = 2 if b[1] == 1 else 1  # see `CANDIDATES`
            ranks = [KroneckerConfig(b_shape=b, rank=r, epochs=0) for r in range(least_rank, b[0] * b[1])]
            within = [c for c in ranks if fit(c)][-1:]
            largest += [c for c in within if first.parameters_as(c) > 0.8 * share * first.parameters_as(None)]
    return largest


def _fits(part: PrunablePart, config: Config, share: float) -> bool:
    try:
        size = part.parameters_as(config)
    except ValueError:
        return False
    whole = part.parameters_as(None)
    return size < whole and size <= share * whole


def _measured(
    model: nn.Module,
    parts: Sequence[PrunablePart],
    data: Sequence[Batch],
    trying: Mapping[str, Sequence[Config]],
    progress: bool,
) -> dict[str, tuple[Choice, ...]]:
    options: dict[str, tuple[Choice, ...]] = {}
    by_name = {p.name: p for p in parts}
    blocks = blocks_with(model, [p.mlp for p in parts if p.mlp], [p.name for p in parts if not p.mlp], data)
    states = [c.hidden for c in blocks[0].calls]
    with tqdm(total=sum(map(len, trying.values())), desc="measuring", unit="fit", disable=not progress) as bar:
        for block in blocks:
            next_states = block.original(states)
            for part in (by_name[n] for n in block.ran if n in trying):
                after, seconds = _run(block, states)
                choices = [Choice(None, part.parameters_as(None), 0.0, seconds)]
                for config in trying[part.name]:
                    choices.append(_tried(model, block, part, config, states, after))
                    bar.update(1)
                options[part.name] = tuple(choices)
            states = next_states
    return options


def _tried(
    model: nn.Module,
    block: Block,
    part: PrunablePart,
    config: Config,
    states: Sequence[Tensor],
    after: Sequence[Tensor],
) -> Choice:
    """Fit a candidate, put it in the part's place, look at the block's output, and put the part back."""
    neurons = part.neurons(config) if isinstance(config, PruneConfig) else 0
    fitting = Part(part.name, part.configs(config), part.mlp, neurons)
    put_back = snapshot(model, part.modules)
    try:
        place_(model, fitting, fit_part(model, block, fitting, states, "plan").tensors)
        outputs, seconds = _run(block, states)
    finally:
        put_back()
    pairs = [(tokens(o, c.keep), tokens(a, c.keep)) for o, a, c in zip(outputs, after, block.calls, strict=True)]
    apart = sum(float((o.float() - a.float()).double().square().sum()) for o, a in pairs)
    energy = sum(float(a.double().square().sum()) for _, a in pairs)
    return Choice(config, part.parameters_as(config), (apart / max(energy, 1e-30)) ** 0.5, seconds)


def _run(block: Block, states: Sequence[Tensor]) -> tuple[list[Tensor], float]:
    """What a block says, or the model where that is one block, and the seconds it took."""
    outputs: list[Tensor] = []
    times: list[float] = []
    while sum(times) < _LEAST_SECONDS and len(times) < _MOST_RUNS:  # what is short is timed again, and the least counts
        begin = time.perf_counter()
        if all(isinstance(call, WholeModel) for call in block.calls):
            outputs = [first_output(block.module, call.batch) for call in block.calls if isinstance(call, WholeModel)]
        else:
            outputs = outputs_of(block.module, block.calls, states)
        times.append(time.perf_counter() - begin)
    return outputs, min(times)
