"""Drop whole blocks: choose the blocks that change the hidden states least, and remove them."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from model_components._walk import tokens

from ..config import PruneConfig
from ..discovery.finding import blocks_of, num_parameters
from ..discovery.stock import (
    Changes,
    as_loaded,
    attribute_changes,
    empty_modules,
    set_attributes_,
    stock_config,
)
from ..fitting.block import Block
from .neurons import rounded_up

_PLACES = ("layer_idx", "layer_id")  # attributes in which blocks store their index


@dataclass(frozen=True)
class Stack:
    """The name and the length of the list of modules that holds a model's repeated blocks."""

    name: str
    count: int

    @classmethod
    def of(cls, model: nn.Module, layers: Sequence[str]) -> Stack:
        """Return the stack that holds these layers.

        Raises:
            ValueError: The layers are not within one list of modules.
        """
        blocks = blocks_of(model, layers)
        # for example, T5 has two lists, for encoder and decoder, so neither holds all MLPs
        if len(blocks) < 2 or not blocks[0][0]:
            kind = type(model).__name__
            raise ValueError(
                f"prune_: expected a model with all blocks in one list of modules, got {kind}, "
                "which has no such list; drop neurons instead"
            )
        return cls(blocks[0][0].rpartition(".")[0], len(blocks))

    def index(self, name: str) -> int | None:
        """Return the index of the block that contains the module or parameter ``name``.

        Return None if no block contains it.
        """
        first = name.removeprefix(f"{self.name}.").partition(".")[0]
        if name.startswith(f"{self.name}."):
            return int(first)
        return None

    def renamed(self, name: str, stay: Sequence[int]) -> str | None:
        """Return a parameter's name after all blocks but ``stay`` are dropped.

        Return None if the parameter is in a dropped block.
        """
        if (index := self.index(name)) is None:
            return name
        rest = name.removeprefix(f"{self.name}.{index}")
        if index in stay:
            return f"{self.name}.{stay.index(index)}{rest}"
        return None


def blocks_to_keep(model: nn.Module, stack: Stack, config: PruneConfig) -> int:
    """Return how many blocks to keep."""
    if config.size is None:
        return max(1, round(config.share * stack.count))
    if config.size == 1:
        return stack.count
    sizes = list(map(num_parameters, model.get_submodule(stack.name).children()))
    total = num_parameters(model)
    # the number of parameters that is left for the blocks, without embeddings, head and norms
    room = round(config.size * total) - (total - sum(sizes))
    # count every block as if it were the largest: it is not yet known which blocks stay, and size
    # is an upper limit
    keep = min(stack.count, room // max(sizes))
    if keep < 1:
        least = rounded_up((total - sum(sizes) + max(sizes)) / total)
        raise ValueError(
            f"prune_: size is {config.size}, expected {least} or more, which leaves one block"
        )
    return keep


@torch.no_grad()
def block_influences(blocks: Sequence[Block], states: Sequence[Tensor]) -> list[float]:
    """Return each block's influence: 1 - the mean cosine similarity of its inputs and outputs.

    Source: ShortGPT (arXiv 2403.03853).

    Args:
        blocks: All blocks, in order.
        states: The hidden states before the first block, one tensor per batch.
    """
    influences = []
    for block in blocks:
        cosines: list[Tensor] = []
        outputs = block.outputs(states)
        for call, before, after in zip(block.calls, states, outputs, strict=True):
            if before.shape != after.shape:
                raise ValueError(
                    f"prune_: {block.name} returns hidden states of shape {list(after.shape)} for "
                    f"an input of shape {list(before.shape)}, expected the same shape to measure "
                    "the block's influence"
                )
            first = tokens(before, call.keep).float()
            last = tokens(after, call.keep).float()
            cosines.append(torch.cosine_similarity(first, last, dim=-1))
        influence = 1 - float(torch.cat(cosines).mean())
        if not math.isfinite(influence):
            raise ValueError(
                f"prune_: the influence of {block.name} is {influence}; expected finite hidden "
                "states, and calibration data that is not all padding"
            )
        influences.append(influence)
        states = outputs
    return influences


def config_with_blocks(
    model: PreTrainedModel, stack: Stack, stay: Sequence[int]
) -> PretrainedConfig:
    """Return the model's config, changed to describe only the blocks ``stay``.

    Lists with one entry per block are cut, too.
    """
    config = copy.deepcopy(model.config)
    # models of images and text have a nested config for the language model, which has these blocks
    for holder in (config, config.get_text_config()):
        for name, value in holder.to_dict().items():
            # such as Gemma 3's layer_types, which lists the kind of attention of each block; a list
            # of token ids may have as many entries by chance
            is_token = name.endswith(("_token_id", "_token_ids"))
            if isinstance(value, list) and len(value) == stack.count and not is_token:
                setattr(holder, name, [value[i] for i in stay])
    shapes: dict[str, torch.Size] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        renamed = stack.renamed(name, stay)
        if renamed is not None:
            shapes[renamed] = parameter.shape
    sizes = {stack.count: len(stay)}
    return stock_config(type(model), config, shapes, sizes, "; drop neurons instead")


def attends(config: PretrainedConfig) -> bool:
    """Return whether a config lists a layer with attention that is not linear."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    return any("attention" in kind and "linear" not in kind for kind in kinds)


def new_places(
    model: nn.Module, stack: Stack, stay: Sequence[int], config: PretrainedConfig | None
) -> Changes:
    """Return changes to attributes, such as ``layer_idx``, in which blocks store their index.

    The changes give each block in ``stay`` its new index.

    Raises:
        ValueError: Blocks of this family depend on their index in another way, so that the model
            would compute something else after loading.
    """
    changes: Changes = []
    modules = model.named_modules()
    if config is None or not isinstance(model, PreTrainedModel):
        for name, module in modules:
            # without a config, only the names in `_PLACES` are known to store an index
            if (index := stack.index(name)) not in stay:
                continue
            for place in _PLACES:
                if vars(module).get(place) == index:
                    changes.append((module, place, stay.index(index)))
        return changes
    old, new = empty_modules(model, as_loaded(config))
    for name, module in modules:
        index = stack.index(name)
        renamed = stack.renamed(name, stay)
        if index is None or renamed is None:
            continue
        for key, before in vars(old[name]).items():
            after = vars(new[renamed]).get(key)
            if not isinstance(before, (int, float, str, tuple)) or before == after:
                continue
            # a stored index may change, but not a value that depends on the index, such as GPT-2's
            # scale of attention
            if (before, after) != (index, stay.index(index)):
                raise ValueError(
                    f"prune_: expected blocks that do not depend on their index, but {key} is "
                    f"{before} in {name}, and would be {after} after renaming to {renamed}; use a "
                    "method other than 'blocks'"
                )
            changes.append((module, key, after))
    return changes


def keep_blocks_(
    model: nn.Module,
    stack: Stack,
    stay: Sequence[int],
    config: PretrainedConfig | None,
    places: Changes,
) -> None:
    """Keep only the blocks ``stay``, and update the indices that these blocks store."""
    parent, _, last = stack.name.rpartition(".")
    # the modules themselves and not copies, so that a user's references and hooks stay valid
    blocks = list(model.get_submodule(stack.name).children())
    set_attributes_(places)
    setattr(model.get_submodule(parent), last, nn.ModuleList(blocks[i] for i in stay))
    if isinstance(model, PreTrainedModel) and config is not None:
        set_attributes_(attribute_changes(model, config))


def least_influential(influences: Sequence[float], keep: int) -> Mapping[int, float]:
    """Return the influences, by index, of the blocks to drop: all but the top ``keep``."""
    order = sorted(range(len(influences)), key=lambda i: influences[i])
    return {i: influences[i] for i in sorted(order[: len(influences) - keep])}
