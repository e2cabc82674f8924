"""`prune_`: turn a model into a smaller stock model of its family, in place."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from model_components._devices import is_faster_in_bfloat16
from model_components._modes import evaluating
from model_components._walk import Batch

from ..config import PruneConfig
from ..data.batches import batches, check_float64, check_model, tokens_seen
from ..discovery.finding import COMPRESSED, all_or_nothing, num_parameters
from ..discovery.stock import (
    Changes,
    attribute_changes,
    parameter_shapes,
    set_attributes_,
    stock_config,
)
from ..fitting.block import Block, blocks_with
from ..fitting.cache import fit_stage
from ..fitting.fit import Fitted, Part, fit_, remarks_of
from ..storage.checkpoints import model_class, own_saving_, resized
from .blocks import (
    Stack,
    attends,
    block_influences,
    blocks_to_keep,
    config_with_blocks,
    keep_blocks_,
    least_influential,
    new_places,
)
from .neurons import (
    PrunablePart,
    neurons_by_influence,
    neurons_to_keep,
    parameters_gone,
    prunable_parts,
)
from .reports import PrunedLayer, PruneReport

_NEURONS = "neurons"
_UNEQUAL = (
    "the config does not describe the new sizes of the MLPs: save_pretrained writes a folder that "
    "only kronecker.from_pretrained loads, and fold pads all MLPs to the size of the largest, "
    "which keeps {:,} of its {:,} neurons"
)
_NEAR = 0.01  # smaller differences from the target size, as a share of all parameters, get no note
# number of parameters of a layer; in smaller layers, casts to bfloat16 cost as much time as they
# save
_LARGE = 1 << 18


def prune_(
    model: nn.Module,
    config: PruneConfig | None = None,
    *,
    calibration: Iterable[object],
    cache: str | Path | None = None,
    progress: bool = True,
) -> PruneReport:
    """Drop hidden neurons of every MLP, or whole blocks, and refit the others, in place.

    If an error occurs, the model is left unchanged.

    The result is a stock model: its config has the new size, ``model.save_pretrained`` writes it,
    and transformers' ``from_pretrained`` loads it. With ``allocate="influence"``, MLPs have
    different sizes, and only `kronecker.from_pretrained` loads the model.

    ``method="best"`` works block by block, on each MLP's inputs in the smaller model. It drops the
    neurons that the other neurons can best replace (optimal brain surgeon). Then it fits
    the MLP's last matrix in closed form, and finally all of the MLP's matrices by gradient descent
    on the same error. The target is the original MLP's output plus the error that the residual
    stream has accumulated so far. ``method="fast"`` chooses neurons and fits in closed form, on
    each MLP's inputs in the original model, so that the model runs only once on the data (as in
    MoDeGPT, arXiv 2408.09632). ``method="blocks"`` drops the blocks that change the hidden states
    least (arXiv 2403.03853), and fits the MLPs of the other blocks as ``"best"`` does, to
    compensate for the dropped blocks.

    Models in half precision are cast to float32 one block at a time, so hooks in a block get
    float32 tensors. In models with large layers, matrix products run in bfloat16 if that is faster
    on the device. Statistics and solves stay in float32 or float64.

    On a CPU, a model can be larger than memory: transformers memory-maps its weights from the
    files, and with ``cache`` the new MLPs are memory-mapped, too. Only one block in float32, its
    statistics and the hidden states must fit into memory.

    Args:
        model: A transformers model, or any model whose MLPs can be found; changed in place.
        config: The settings; default: keep half of the hidden neurons.
        calibration: Batches. A batch is a dict of the model's arguments, such as a row of a
            tokenized `datasets.Dataset`, or a tensor of token ids (B, T). Use 12,000 to 50,000
            tokens of the kind of text that the model is for.
        cache: A folder that stores each fitted MLP. Repeat an interrupted call to continue from
            these MLPs.
        progress: Show a progress bar.

    Returns:
        A report of the dropped neurons or blocks, with each layer's error.

    Raises:
        ValueError: The model has no MLPs, its weights cannot be pruned (shared, quantized, all
            zeros, not finite or on the meta device), the config of its family has no field for the
            size (except with ``allocate="influence"``), its blocks are not in one list (with
            ``allocate="influence"`` or ``method="blocks"``), or the calibration data is invalid.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(
    ...     GPT2Config(vocab_size=11, n_positions=8, n_embd=4, n_layer=1, n_head=1)
    ... )
    >>> report = prune_(
    ...     model, PruneConfig(keep=0.25), calibration=[torch.tensor([[1, 2, 3]])], progress=False
    ... )
    >>> model.config.n_inner, model.transformer.h[0].mlp.c_fc.weight.shape
    (4, torch.Size([4, 4]))
    """
    config = config or PruneConfig()
    if not isinstance(config, PruneConfig):
        raise ValueError(
            f"prune_: config is a {type(config).__name__}, expected a PruneConfig, such as "
            f"PruneConfig(keep=0.5); pass other configs to convert_"
        )
    check_model("prune_", model)
    check_float64("prune_", model)
    _refuse(model)
    walk = _Walk(model, config, batches(calibration, model, "prune_"), cache, progress)
    drops_blocks = config.chosen_method == "blocks"
    if config.allocate == "uniform" and (smaller := resized(model)):
        if drops_blocks:
            expected = "the original model; drop blocks before neurons"
        else:
            expected = "allocate='influence' for such a model"
        raise ValueError(
            f"prune_: {next(iter(smaller))} is already pruned to a size that the model's config "
            f"does not describe; expected {expected}"
        )
    prune = _drop_blocks if drops_blocks else _drop_neurons
    before = num_parameters(model)
    rows, notes = prune(walk, prunable_parts(model, walk.data))
    after = num_parameters(model)
    if config.size is not None and after / before < config.size - _NEAR:
        notes.append(
            f"{after / before:.1%} of the parameters are kept, instead of the requested "
            f"{config.size:.1%}"
        )
    return PruneReport(tuple(rows), before, after, (*walk.notes, *notes))


@dataclass
class _Walk:
    """The model, settings and data of one call of `prune_`, and the notes on its fit."""

    model: nn.Module
    config: PruneConfig
    data: Sequence[Batch]
    cache: str | Path | None
    progress: bool
    notes: tuple[str, ...] = ()

    def fit(
        self, parts: Sequence[Part], settings: object, dropped: Collection[str] = ()
    ) -> dict[str, Fitted]:
        """Fit the parts in place, and keep notes on the fit."""
        # part of the cache's key, because a fit in bfloat16 gives other weights
        in_bfloat16 = self._gains_by_bfloat16(parts)
        cache = fit_stage(
            self.cache,
            self.model,
            [asdict(self.config), settings, in_bfloat16],
            self.data,
            "prune_",
        )
        with (
            evaluating(self.model),
            self._products(parts),
            tqdm(total=len(parts), desc="pruning", disable=not self.progress) as bar,
        ):
            done = fit_(
                self.model,
                parts,
                self.data,
                operation="prune_",
                cache=cache,
                progress=bar,
                dropped=dropped,
            )
        # with fewer tokens than neurons, the fit is exact on these tokens but not on others
        fits = tokens_seen(self.data, max((p.neurons for p in parts), default=0))
        self.notes = (*fits, *remarks_of(done))
        return done

    def influences(self, parts: Sequence[PrunablePart]) -> tuple[list[Block], list[float]]:
        """Return the model's blocks, and the influence of each block."""
        with torch.no_grad(), evaluating(self.model):
            blocks, states = blocks_with(self.model, [], [p.name for p in parts], self.data)
            if len(blocks) < 2:
                raise ValueError(
                    "prune_: influence can be measured only with two or more blocks in one list, "
                    "each of which reads the output of the block before it, but "
                    f"{type(self.model).__name__} has no such list"
                )
            with self._products(parts):
                return blocks, block_influences(blocks, states)

    def fitting(self, parts: Sequence[PrunablePart], keep: Mapping[str, int]) -> list[Part]:
        """Return the parts for `fit_`, each with the number of neurons that it keeps."""
        return [
            Part(part.name, part.mlp, prune=self.config, neurons=keep[part.name]) for part in parts
        ]

    def _gains_by_bfloat16(self, parts: Sequence[Part | PrunablePart]) -> bool:
        """Return whether the layers are large enough for products to be faster in bfloat16."""
        sizes = [num_parameters(self.model.get_submodule(p.name)) for p in parts]
        device = next(self.model.parameters()).device
        return max(sizes, default=0) >= _LARGE and is_faster_in_bfloat16(device)

    def _products(self, parts: Sequence[Part | PrunablePart]) -> AbstractContextManager[object]:
        """Return a context manager in which products run in bfloat16 if that is faster."""
        if not self._gains_by_bfloat16(parts):
            return nullcontext()
        device = next(self.model.parameters()).device
        # autocast's cache would hold old weights, since weights change within the context
        return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


Outcome = tuple[list[PrunedLayer], list[str]]  # a row for each layer, and notes


def _drop_neurons(walk: _Walk, parts: Sequence[PrunablePart]) -> Outcome:
    """Drop hidden neurons of every MLP, and fit the others."""
    model = walk.model
    keep = neurons_to_keep(walk.model, parts, walk.config)
    first = parts[0]
    if all(keep[p.name] == p.count for p in parts):
        _refuse_nothing(walk.config, first.count, f"neurons of {first.name}")
    # near=1.0, since a share of neurons is rarely a whole number: a difference of less than one
    # neuron is not reported
    remarks = _rounded(
        walk.config, first.count, keep[first.name], f"neurons of {first.name}", near=1.0
    )
    influences: dict[str, float] = {}
    if walk.config.allocate == "influence":
        if isinstance(model, PreTrainedModel):
            # raises for a user's own class, which from_pretrained would not find
            model_class(type(model).__name__, "prune_")
        influences = _influence_of_each(walk, parts)
        budget = parameters_gone(parts, keep)
        if walk.config.size is not None:
            # with equal shares, more is dropped: every MLP rounds down its number of neurons
            total = num_parameters(model)
            budget = total - round(walk.config.size * total)
        keep = neurons_by_influence(parts, budget, influences, walk.config)
        # each part may be off by less than one neuron
        count, kept = sum(p.count for p in parts), sum(keep.values())
        remarks = _rounded(walk.config, count, kept, "neurons", near=len(parts))
        if isinstance(model, PreTrainedModel) and kept < count:
            largest = max(parts, key=lambda p: keep[p.name])
            remarks.append(_UNEQUAL.format(keep[largest.name], largest.count))
    changes: Changes = []
    if isinstance(model, PreTrainedModel) and walk.config.allocate == "uniform":
        # before the fit, so that a family whose config has no field for the size fails early
        changes = _stock_changes(model, parts, keep)
    with all_or_nothing(model, chain.from_iterable(p.modules for p in parts)):
        done = walk.fit(walk.fitting(parts, keep), keep)
        if walk.config.allocate == "influence":
            own_saving_(model)
    # after the fit, so that an error during the fit leaves the model unchanged
    set_attributes_(changes)
    return _rows(done, parts, keep, influences), remarks


def _stock_changes(
    model: PreTrainedModel, parts: Sequence[PrunablePart], keep: Mapping[str, int]
) -> Changes:
    """Return the attributes to set on a model so that it and its config have the new sizes."""
    shapes = parameter_shapes(model)
    for part in parts:
        shapes |= part.shapes(keep[part.name])
    sizes = {p.count: keep[p.name] for p in parts}
    advice = ", or allocate='influence', which needs no such field"
    config = stock_config(type(model), model.config, shapes, sizes, advice)
    return attribute_changes(model, config)


def _drop_blocks(walk: _Walk, parts: Sequence[PrunablePart]) -> Outcome:
    """Drop the blocks that change hidden states least, and fit the MLPs of the other blocks."""
    model = walk.model
    names = [p.name for p in parts]
    stack = Stack.of(model, names)
    keep = blocks_to_keep(model, stack, walk.config)
    if keep == stack.count:
        _refuse_nothing(walk.config, keep, "blocks")
    _, influences = walk.influences(parts)
    gone = least_influential(influences, keep)
    stay = [i for i in range(stack.count) if i not in gone]
    has_lost_attention = False
    if isinstance(model, PreTrainedModel) and gone:
        # raises before the fit if no config has so few blocks
        new_config = config_with_blocks(model, stack, stay)
        has_lost_attention = attends(model.config) and not attends(new_config)
    else:
        new_config = None
    places = new_places(model, stack, stay, new_config)
    rows = []
    for index, influence in gone.items():
        name = f"{stack.name}.{index}"
        size = num_parameters(model.get_submodule(name))
        rows.append(PrunedLayer(name, "parameters", size, 0, None, influence))
    left = [p for p in parts if stack.index(p.name) in stay]
    # the remaining MLPs keep all neurons, and are fitted to compensate for the dropped blocks
    counts = {p.name: p.count for p in left}
    dropped = {f"{stack.name}.{i}" for i in gone}
    with all_or_nothing(model, chain.from_iterable(p.modules for p in left)):
        # blocks are removed only after the fit, which runs the whole original model
        done = walk.fit(walk.fitting(left, counts), stay, dropped)
    if gone:
        keep_blocks_(model, stack, stay, new_config, places)
    rows += _rows(done, left, counts, {})
    notes = _rounded(walk.config, stack.count, keep, "blocks")
    if has_lost_attention:
        notes.append("no attention layer is left; some families cannot generate text without one")
    return rows, notes


def _rows(
    done: Mapping[str, Fitted],
    parts: Sequence[PrunablePart],
    keep: Mapping[str, int],
    influences: Mapping[str, float],
) -> list[PrunedLayer]:
    """Return a row of the report for each part that was fitted."""
    counts = {p.name: p.count for p in parts}
    rows = []
    for name, fitted in done.items():
        error = fitted.error**0.5
        influence = influences.get(name)
        rows.append(PrunedLayer(name, _NEURONS, counts[name], keep[name], error, influence))
    return rows


def _influence_of_each(walk: _Walk, parts: Sequence[PrunablePart]) -> dict[str, float]:
    """Return the influence of each part's block, by the part's name."""
    blocks, influences = walk.influences(parts)
    by_name: dict[str, float] = {}
    for block, influence in zip(blocks, influences, strict=True):
        by_name |= dict.fromkeys(block.singles, influence)
    return by_name


def _refuse_nothing(config: PruneConfig, count: int, what: str) -> None:
    """Raise a ValueError if the share to keep is below 1, but rounding would keep everything."""
    if config.size is None and config.share < 1:
        if config.multiple_of > 1:
            sizes = f" or multiple_of below {config.multiple_of}"
        else:
            sizes = ""
        raise ValueError(
            f"prune_: a keep of {config.share:.1%} would keep all {count} {what}, expected a "
            f"smaller keep{sizes}"
        )


def _rounded(
    config: PruneConfig, count: int, keep: int, what: str, *, near: float = 1e-9
) -> list[str]:
    """Return a list with a note if the kept share differs from the request, else an empty list."""
    exact = config.size is not None or abs(config.share * count - keep) < near
    if exact:
        return []
    return [
        f"{keep} of {count} {what} are kept, {keep / count:.1%} instead of the requested "
        f"{config.share:.1%}"
    ]


def _refuse(model: nn.Module) -> None:
    """Raise a ValueError if the model cannot be pruned.

    A model cannot be pruned in inference mode, if it is compressed, or if it contains a
    transformers model without being one.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "prune_: expected a call outside torch.inference_mode, in which no gradients can be "
            "computed"
        )
    for name, module in model.named_modules():
        if isinstance(module, COMPRESSED):
            raise ValueError(
                f"prune_: {name} is already compressed, expected a stock model; call prune_ "
                "before convert_"
            )
        if name and isinstance(module, PreTrainedModel) and not isinstance(model, PreTrainedModel):
            raise ValueError(
                f"prune_: expected the transformers model itself, got {type(model).__name__}, "
                f"which contains it as {name}; call prune_ on {name}"
            )
