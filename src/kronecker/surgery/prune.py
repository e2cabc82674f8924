"""`prune_`: a model becomes a smaller stock model of its family, in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from model_components._modes import evaluating
from model_components._report import Axes, Figure, Report, Table, bars

from ..config import PruneConfig
from ..data import Batch, batches
from ..fitting.block import blocks_with
from ..fitting.cache import FitCache
from ..fitting.experts import experts_shapes
from ..fitting.fit import UNKNOWN, Part, fit_
from ..layers.experts import GROUPED, is_experts
from ..layers.weights import bias_of, dense
from .blocks import Stack, block_influences, blocks_to_keep, config_with_blocks, keep_blocks_, least_influential
from .checks import check_layer
from .convert import num_parameters
from .finding import find_mlps, snapshot
from .mlps import Mlp
from .stock import attribute_changes, stock_config


@dataclass(frozen=True)
class PrunedLayer:
    """One layer that became smaller, was fitted to make up for others, or a block that went."""

    name: str
    before: int  # hidden neurons; of a block parameters
    after: int
    error: float  # relative, of what it adds to the stream, on the smaller model's own inputs; of a block its influence


@dataclass(frozen=True)
class PruneReport(Report):
    """What `prune_` dropped."""

    layers: tuple[PrunedLayer, ...]
    before: int
    after: int
    notes: tuple[str, ...] = ()

    def summary(self) -> list[str]:
        """Parameters before and after."""
        share = f"{self.after / self.before:.1%}"
        return [f"{self.before:,} to {self.after:,} parameters ({share}), {len(self.layers)} layers"]

    def table(self) -> Table:
        """A row for each layer."""
        rows = [(r.name, f"{r.before:,}", f"{r.after:,}", f"{r.error:.3f}") for r in self.layers]
        return Table(("layer", "before", "after", "error"), rows)

    def remarks(self) -> list[str]:
        """What was not as asked for."""
        return list(self.notes)

    def plot(self, ax: Axes | None = None) -> Figure:
        """Each layer's relative error as a bar (extra ``plot``), on ``ax`` or in a new figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return bars(ax, "PruneReport.plot", {r.name: r.error for r in self.layers}, "relative error")


def prune_(
    model: nn.Module,
    config: PruneConfig | None = None,
    *,
    calibration: Iterable[Any],
    cache: str | Path | None = None,
    progress: bool = True,
) -> PruneReport:
    """Drop hidden neurons of every MLP, or whole blocks, and fit what stays; on any error the model is as it was.

    The result is a stock model: its config has the new size, ``model.save_pretrained`` writes it, and plain
    ``from_pretrained`` loads it.

    Block by block, on what the smaller model really feeds each MLP: the neurons go whose loss costs least when all
    others make up for it (optimal brain surgeon); then the matrix that writes the block's width is fitted in closed
    form towards what the original said and what the residual stream has lost so far, and then all of the MLP's matrices
    by descent on the same error. With ``granularity="block"`` the blocks go that change hidden states least
    (arXiv 2403.03853), and the MLPs of the others are fitted to make up for them in the same way.

    Args:
        model: A transformers model, or any model whose MLPs can be found; changed in place.
        config: What to drop; default: half of the hidden neurons.
        calibration: Batches: dicts of the model's arguments, or tensors of token ids (B, T). 50,000 tokens of the text
            that it is for are good, 12,000 will do.
        cache: A folder that keeps each fitted MLP, so that an interrupted call that is made again goes on.
        progress: Show a progress bar.

    Returns:
        What was dropped, with each layer's error.

    Raises:
        ValueError: No MLP, weights that are shared by several, quantised, zero, not finite or on the meta device; a
            family whose config has no field for the size; bad calibration. Nothing has changed then.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=4, n_layer=1, n_head=1))
    >>> report = prune_(model, PruneConfig(keep=0.25), calibration=[torch.tensor([[1, 2, 3]])], progress=False)
    >>> model.config.n_inner, model.transformer.h[0].mlp.c_fc.weight.shape
    (4, torch.Size([4, 4]))
    """
    config = config or PruneConfig()
    if not isinstance(config, PruneConfig):
        raise ValueError(f"prune_: config is a {type(config).__name__}, needed a PruneConfig; convert_ takes it")
    _refuse(model)
    data = batches(calibration, model, "prune_")
    parts = _parts(model, data)
    if config.granularity == "block":
        return _without_blocks(model, parts, config, data, cache, progress)
    keep = _keep(model, parts, config)
    changes: list[tuple[nn.Module, str, object]] = []
    if isinstance(model, PreTrainedModel):
        shapes = {n: s for p in parts for n, s in p.shapes(keep[p.name]).items()}
        every = {n: shapes.get(n, p.shape) for n, p in model.named_parameters(remove_duplicate=False)}
        new_config = stock_config(type(model), model.config, every, {p.count: keep[p.name] for p in parts})
        changes = attribute_changes(model, new_config)
    before = num_parameters(model)
    put_back = snapshot(model, (n for p in parts for n in p.modules))
    try:
        with evaluating(model):
            fits = FitCache(cache, model, [config.to_dict(), keep], data, "prune_")
            fitting = [Part(p.name, dict.fromkeys(p.modules, config), p.mlp, keep[p.name]) for p in parts]
            with tqdm(total=len(parts), desc="pruning", unit="MLP", disable=not progress) as bar:
                done = fit_(model, fitting, data, operation="prune_", cache=fits, progress=bar)
    except BaseException:
        put_back()
        raise
    for module, name, value in changes:
        vars(module)[name] = value
    sizes = {p.name: p.count for p in parts}
    rows = [PrunedLayer(n, sizes[n], keep[n], fitted.error**0.5) for n, fitted in done.items()]
    notes = [f"{n}: {UNKNOWN}" for n, fitted in done.items() if "unknown" in fitted.notes]
    return PruneReport(tuple(rows), before, num_parameters(model), tuple(notes))


def _without_blocks(
    model: nn.Module,
    parts: Sequence[_Part],
    config: PruneConfig,
    data: Sequence[Batch],
    cache: str | Path | None,
    progress: bool,
) -> PruneReport:
    """Drop the blocks that change hidden states least; the MLPs of the others make up for them."""
    stack = Stack.of(model, [p.name for p in parts])
    keep = blocks_to_keep(model, stack, config)
    with evaluating(model):
        names = [p.name for p in parts]
        gone = least_influential(block_influences(blocks_with(model, [], names, data)), keep)
    stay = [i for i in range(stack.count) if i not in gone]
    new_config = config_with_blocks(model, stack, stay) if isinstance(model, PreTrainedModel) and gone else None
    before, rows = num_parameters(model), []
    for index, influence in gone.items():
        name = f"{stack.name}.{index}"
        rows.append(PrunedLayer(name, sum(p.numel() for p in model.get_submodule(name).parameters()), 0, influence))
    left = [p for p in parts if config.refit != "none" and stack.index(p.name) in stay]
    put_back = snapshot(model, (n for p in left for n in p.modules))
    try:
        with evaluating(model):
            fits = FitCache(cache, model, [config.to_dict(), stay], data, "prune_")
            fitting = [Part(p.name, dict.fromkeys(p.modules, config), p.mlp, p.count) for p in left]
            with tqdm(total=len(left), desc="fitting", unit="MLP", disable=not progress) as bar:
                dropped = {f"{stack.name}.{i}" for i in gone}
                done = fit_(model, fitting, data, operation="prune_", cache=fits, progress=bar, dropped=dropped)
    except BaseException:
        put_back()
        raise
    if gone:
        keep_blocks_(model, stack, stay, new_config)
    counts = {p.name: p.count for p in left}
    rows += [PrunedLayer(n, counts[n], counts[n], fitted.error**0.5) for n, fitted in done.items()]
    notes = [f"{n}: {UNKNOWN}" for n, fitted in done.items() if "unknown" in fitted.notes]
    return PruneReport(tuple(rows), before, num_parameters(model), tuple(notes))


def _refuse(model: nn.Module) -> None:
    """What cannot be pruned, whatever is in it."""
    if torch.is_inference_mode_enabled():
        raise ValueError("prune_: torch.inference_mode is on, needed a place where gradients can be taken")
    for name, module in model.named_modules():
        if type(module).__module__.startswith("peft."):
            raise ValueError(f"prune_: {name or type(module).__name__} is an adapter's; merge adapters first")
        if name and isinstance(module, PreTrainedModel) and not isinstance(model, PreTrainedModel):
            raise ValueError(f"prune_: {name} within {type(model).__name__} has a config of its own; prune_ that model")


@dataclass(frozen=True)
class _Part:
    """An MLP, or a stack of experts, whose hidden neurons are dropped."""

    name: str  # of the layer that writes the block's width, or of the stack
    modules: tuple[str, ...]
    count: int  # hidden neurons
    shapes: Callable[[int], dict[str, torch.Size]]  # of its parameters, with so many
    mlp: Mlp | None  # None: experts

    def parameters(self, keep: int) -> int:
        """How many it has with so many hidden neurons."""
        return sum(shape.numel() for shape in self.shapes(keep).values())


def _parts(model: nn.Module, data: Sequence[Batch]) -> list[_Part]:
    parts = [_mlp_part(model, mlp) for mlp in find_mlps(model, data[0])]
    for name, module in model.named_modules():
        if is_experts(module):
            parts.append(_experts_part(name, module))
    if not parts:
        raise ValueError(f"prune_: no MLP is found in {type(model).__name__}")
    members = {n for p in parts for n in p.modules}
    holders: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = holders.setdefault(id(parameter), name)
        if first != name and not members.isdisjoint((name.rpartition(".")[0], first.rpartition(".")[0])):
            raise ValueError(f"prune_: {name} is {first}, too; needed MLPs that share no weight")
    for name in members:
        check_layer("prune_", name, model.get_submodule(name))
    return parts


def _mlp_part(model: nn.Module, mlp: Mlp) -> _Part:
    count = dense(model.get_submodule(mlp.down)).shape[1]
    return _Part(mlp.down, (*mlp.ups, mlp.down), count, lambda keep: _shapes(model, mlp, keep), mlp)


def _experts_part(name: str, module: nn.Module) -> _Part:
    def shapes(keep: int) -> dict[str, torch.Size]:
        return {f"{name}.{n}": shape for n, shape in experts_shapes(module, keep).items()}

    return _Part(name, (name,), module.get_parameter("down_proj").shape[2], shapes, None)


def _keep(model: nn.Module, parts: Sequence[_Part], config: PruneConfig) -> dict[str, int]:
    """How many hidden neurons each part keeps."""
    grouped = {p.count for p in parts if p.mlp is None}  # layers of one size have one field in a config
    units = {p.name: math.lcm(config.multiple_of, GROUPED if p.count in grouped else 1) for p in parts}
    if config.budget is None:
        return {p.name: config.neurons(p.count, units[p.name]) for p in parts}
    total = num_parameters(model)
    per_neuron = {p.name: p.parameters(2) - p.parameters(1) for p in parts}
    neurons = sum(per_neuron[p.name] * p.count for p in parts)
    least = total - neurons + sum(per_neuron.values())
    if not least <= config.budget <= total:
        kind = type(model).__name__
        raise ValueError(f"prune_: budget is {config.budget:,}, needed {least:,} to {total:,} for {kind}")
    share = 1 - (total - config.budget) / neurons
    fewest = {p.name: min(p.count, units[p.name]) for p in parts}
    keep = {p.name: max(fewest[p.name], int(share * p.count / u + 1e-9) * u) for p in parts for u in [units[p.name]]}
    if (size := total - sum(per_neuron[p.name] * (p.count - keep[p.name]) for p in parts)) > config.budget:
        raise ValueError(f"prune_: budget is {config.budget:,}, needed {size:,} or more with sizes rounded as they are")
    return {p.name: p.count if config.budget == total else keep[p.name] for p in parts}


def _shapes(model: nn.Module, mlp: Mlp, keep: int) -> dict[str, torch.Size]:
    """The shapes of an MLP's parameters with ``keep`` hidden neurons."""
    shapes: dict[str, torch.Size] = {}
    rows = len(mlp.rows(torch.arange(keep), keep))
    for name in (*mlp.ups, mlp.down):
        module = model.get_submodule(name)
        outputs, inputs = dense(module).shape
        matrix = (outputs, keep) if name == mlp.down else (rows, inputs)
        shapes[f"{name}.weight"] = torch.Size(matrix[::-1] if isinstance(module, Conv1D) else matrix)
        if bias_of(module) is not None:
            shapes[f"{name}.bias"] = torch.Size(matrix[:1])
    return shapes
