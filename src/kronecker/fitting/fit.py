"""Fit a whole model block by block, each part on its inputs in the smaller model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from model_components._layers import is_conv1d
from model_components._stages import Stage
from model_components._walk import Batch

from ..config import Config, PruneConfig
from ..discovery.finding import prefixed, put, set_parameters_, submodules
from ..discovery.mlps import Mlp
from ..init import Factors
from ..layers import empty_layer
from ..layers.experts import is_experts
from ..layers.linear import linear_of
from ..layers.weights import dense
from ..moments import Moments
from .block import Block, blocks_with
from .experts import fit_expert_neurons
from .factors import fit_factors
from .mlp import MlpWeights, Seen
from .neurons import fit_neurons

# remarks for the user on a fit, by the name of a note
_REMARKS = {
    "unknown": "fitted in closed form only, since the function between the MLP's matrices is not "
    "known",
    "few": "a few tokens (attention sinks) make up more than half of the sum of squared outputs by "
    "which the relative error is divided, so the error says little about the other tokens",
    "alone": "not fitted to compensate for the blocks that were dropped after it, since this needs "
    "a block with a single MLP whose output is added to the hidden states unchanged",
}


@dataclass(frozen=True)
class Part:
    """Layers that are fitted together: an MLP, a stack of experts, or a single linear layer."""

    name: str  # of the MLP's last layer, of the stack of experts, or of the single layer
    mlp: Mlp | None = None
    # the config of each layer that gets factors, by name; empty if neurons are dropped instead
    configs: Mapping[str, Config] = field(default_factory=dict)
    prune: PruneConfig | None = None
    neurons: int = 0  # number of neurons to keep, if some are dropped


@dataclass(frozen=True)
class Fitted:
    """A part's new parameters by name, and its squared relative error."""

    tensors: dict[str, Tensor]
    error: float  # the squared relative error
    notes: tuple[str, ...] = field(default=())


def remarks_of(done: Mapping[str, Fitted]) -> list[str]:
    """Return a line for each kind of note, which names the first part and counts the others."""
    lines = []
    for note, text in _REMARKS.items():
        names = [name for name, fitted in done.items() if note in fitted.notes]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"{names[0]}{more}: {text}")
    return lines


@torch.no_grad()
def fit_(
    model: nn.Module,
    parts: Sequence[Part],
    data: Sequence[Batch],
    *,
    operation: str,
    cache: Stage,
    progress: tqdm,
    dropped: Collection[str] = (),
) -> dict[str, Fitted]:
    """Fit the parts of a model, in place, and return each `Fitted` part without its tensors.

    Args:
        model: A model in evaluation mode.
        parts: The parts to fit.
        data: Batches, as `batches` returns them.
        operation: The name with which error messages begin.
        cache: The store of parts that an earlier call has fitted.
        progress: A progress bar, which advances by one after each part.
        dropped: Names of blocks that the smaller model does not have.
    """
    # in one pass, each part is fitted on its inputs in the original model, so that only the
    # original model's hidden states are needed
    one_pass = all(p.prune is not None and p.prune.chosen_method == "fast" for p in parts)
    done: dict[str, Fitted] = {}
    by_name = {p.name: p for p in parts}
    mlps = [p.mlp for p in parts if p.mlp]
    singles = [p.name for p in parts if not p.mlp]
    # without autocast, since the recorded arguments are used with and without autocast
    with torch.autocast(next(model.parameters()).device.type, enabled=False):
        blocks, theirs = blocks_with(model, mlps, singles, data)
    ours = list(theirs)
    for index, block in enumerate(blocks):
        if block.name in dropped:
            # no earlier block can compensate for dropped blocks at the beginning of the model, so
            # the blocks that follow do
            if all(b.name in dropped for b in blocks[:index]):
                theirs = block.outputs(theirs)
            continue
        before = theirs
        gone = list(takewhile(lambda b: b.name in dropped, blocks[index + 1 :]))
        # before any of this block's layers changes
        theirs = _run_originals(block, gone, theirs, one_pass)
        _check_reached(block, operation)
        given = before if one_pass else ours
        # in the order they run, so that later parts of a block get inputs from refitted parts
        for part in map(by_name.__getitem__, block.ran):
            fitted = _fitted_or_stored(model, block, part, given, operation, cache)
            place_(model, part, fitted.tensors)
            notes = fitted.notes
            if gone and "output" not in block.kinds.values():
                notes = (*notes, "alone")
            # without tensors, which are now in the model: keeping them could double the memory
            done[part.name] = Fitted({}, fitted.error, notes)
            progress.update(1)
        if not one_pass:
            ours = block.outputs(ours)
    return done


def _check_reached(block: Block, operation: str) -> None:
    silent = [name for name in block.singles if name not in block.ran]
    if silent:
        raise ValueError(
            f"{operation}: expected calibration data with tokens that reach {silent[0]}, got none"
        )


def _run_originals(
    block: Block, gone: Sequence[Block], states: Sequence[Tensor], one_pass: bool
) -> list[Tensor]:
    """Run the original block and the dropped blocks after it; store that block's targets.

    Return the original model's hidden states after these blocks, one tensor per batch.
    """
    outputs = block.original(states, one_pass=one_pass)
    if not gone:
        return outputs
    later = outputs
    for dropped in gone:
        later = dropped.outputs(later)
    block.look_ahead(outputs, later)
    return later


def _fitted_or_stored(
    model: nn.Module,
    block: Block,
    part: Part,
    given: list[Tensor],
    operation: str,
    cache: Stage,
) -> Fitted:
    """Return a part from the cache or, if it is not there, fit and store it."""
    name = part.name or "model"
    stored = cache.load(name)
    if stored is None:
        fitted = fit_part(model, block, part, given, operation)
        cache.store(name, fitted.tensors, {"error": fitted.error, "notes": fitted.notes})
        # read again from the cache, whose memory-mapped tensors the system can evict from memory,
        # since all parts together may not fit
        stored = cache.load(name)
        if stored is None:
            return fitted
    tensors, facts = stored
    return Fitted(tensors, facts["error"], notes=tuple(facts["notes"]))


def fit_part(
    model: nn.Module, block: Block, part: Part, states: Sequence[Tensor], operation: str
) -> Fitted:
    """Return a part's new parameters, fitted on the given hidden states before its block."""
    if is_experts(module := model.get_submodule(part.name)):
        assert part.prune is not None
        tensors, error, is_of_few = fit_expert_neurons(
            module, block.routed(part.name, states), part.neurons, part.prune
        )
        named = prefixed(part.name, tensors.items())
        return Fitted(named, error, notes=("few",) if is_of_few else ())
    if part.mlp is None:
        return _fitted_alone(module, part, block.inputs(part.name, states), block.said[part.name])
    return _fitted_mlp(model, block, part, part.mlp, states, operation)


def _fitted_alone(
    module: nn.Module, part: Part, inputs: Sequence[Tensor], said: Sequence[Tensor]
) -> Fitted:
    """Fit a single linear layer to its outputs in the original model."""
    config = part.configs[part.name]
    moments = Moments.zeros(*dense(module).shape, device=said[0].device)
    for x, y in zip(inputs, said, strict=True):
        moments.add(x, y)
    layer = linear_of(config).from_config(module, config, moments)
    seen = moments.centered() if layer.bias is not None else moments
    tensors = prefixed(part.name, layer.state_dict().items())
    notes = ("few",) if moments.is_of_few_tokens() else ()
    return Fitted(tensors, seen.error(layer.dense_weight()) ** 2, notes=notes)


def _fitted_mlp(
    model: nn.Module, block: Block, part: Part, mlp: Mlp, states: Sequence[Tensor], operation: str
) -> Fitted:
    modules = list(submodules(model, (*mlp.ups, mlp.down)).values())
    prune = part.prune
    if prune is None:
        descends = any(config.epochs for config in part.configs.values())
    else:
        descends = prune.descends
    middle = None
    # pruning in closed form needs only the values of hidden neurons, which a run of the block gives
    if prune is None or descends:
        middle = block.middle(mlp, states[0], getattr(model, "config", None))
    weights = MlpWeights.of(modules, middle)
    seen = block.seen.pop(mlp.down, None)  # removed, since moments of all blocks would fill memory
    if seen is None:
        seen = block.smaller(mlp, states, keep_inputs=prune is None or descends)
    _check_seen(seen, part, operation)
    notes = ("unknown",) if weights.middle is None and descends else ()
    if seen.moments.is_of_few_tokens():
        notes = (*notes, "few")
    if prune is not None:
        small, error = fit_neurons(mlp, weights, seen, part.neurons, prune)
        return Fitted(_stock_parameters(mlp, modules, small), error, notes)
    small, error = fit_factors(mlp, weights, seen, part.configs)
    return Fitted(_factors_as_parameters(part, mlp, modules, small), error, notes)


def _factors_as_parameters(
    part: Part, mlp: Mlp, modules: Sequence[nn.Module], small: Any
) -> dict[str, Tensor]:
    """Return the parameters, by their names in the model, of layers that hold fitted factors."""
    tensors: dict[str, Tensor] = {}
    matrices = (*small.ups, small.down)
    biases = (*small.up_biases, small.down_bias)
    for name, module, (a, b), bias in zip(
        (*mlp.ups, mlp.down), modules, matrices, biases, strict=True
    ):
        layer: Any = empty_layer(module, part.configs[name])
        layer.set_factors_(Factors(a, b, 0.0))
        if bias is not None and layer.bias is not None:
            layer.bias.copy_(bias)
        tensors |= prefixed(name, layer.state_dict().items())
    return tensors


def _check_seen(seen: Seen, part: Part, operation: str) -> None:
    if not seen.moments.count:
        raise ValueError(
            f"{operation}: expected calibration data with tokens that reach {part.name}, got only "
            "padding"
        )


def _stock_parameters(
    mlp: Mlp, modules: Sequence[nn.Module], weights: MlpWeights
) -> dict[str, Tensor]:
    """Return an MLP's parameters by name, in the dtypes and layouts of its modules."""
    state: dict[str, Tensor] = {}
    matrices = (*weights.ups, weights.down)
    biases = (*weights.up_biases, weights.down_bias)
    for name, module, (matrix,), bias in zip(
        (*mlp.ups, mlp.down), modules, matrices, biases, strict=True
    ):
        dtype = dense(module).dtype
        state[f"{name}.weight"] = (matrix.T if is_conv1d(module) else matrix).to(dtype)
        if bias is not None:
            state[f"{name}.bias"] = bias.to(dtype)
    return state


def place_(model: nn.Module, part: Part, tensors: Mapping[str, Tensor]) -> None:
    """Put a part's new parameters into its layers, or into smaller layers that replace them."""
    if part.prune is not None:
        set_parameters_(model, tensors)
        return
    for name, config in part.configs.items():
        layer = empty_layer(model.get_submodule(name), config)
        layer.load_state_dict(
            {k.removeprefix(f"{name}."): t for k, t in tensors.items() if k.startswith(f"{name}.")}
        )
        put(model, name, layer)
